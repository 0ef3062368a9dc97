//! `LD_PRELOAD=libuzswap_malloc.so UZSWAP_MEMORY=64M PROGRAM`: the program's large blocks are
//! regions of one pager, unknown to the program. What is small comes from the C library as ever.
//!
//! `calls` has the functions that a program calls; they decide which of the two a block belongs to.
//! `blocks` makes the pager at the first large block, and blocks from it. `original` is the C
//! library's own allocator, which serves this library too (build.rs). `signals` has what else it
//! stands before.

mod blocks;
mod calls;
mod original;
mod signals;

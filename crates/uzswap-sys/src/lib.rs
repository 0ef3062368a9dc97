//! The kernel seam: everything uzswap asks of Linux that the standard library does not offer.
//!
//! Each module is one interface of the kernel with its error numbers translated, and nothing else:
//! no policy, no state beyond a file descriptor or a mapping. Most of the project's `unsafe` code
//! is here.

#![expect(
    unsafe_code,
    reason = "calls of the kernel, signal handlers, stacks: arguments are of the request's type and outlive the call; one value owns a mapping"
)]

pub mod ballast;
pub mod c_library;
pub mod callers_signals;
pub mod cgroup;
pub mod cpu;
pub mod fault_signals;
pub mod freezer;
pub mod fuse;
pub mod loopdev;
pub mod map;
pub mod node;
pub mod own_threads;
pub mod past_limit;
pub mod pid_namespace;
pub mod pressure;
pub mod proc_mem;
pub mod proc_text;
pub mod process;
pub mod process_pages;
pub mod processor;
pub mod secret;
pub mod shared;
pub mod smaps;
pub mod stack;
pub mod swap;
pub mod thread_memory;
pub mod ublk;
pub mod uffd;

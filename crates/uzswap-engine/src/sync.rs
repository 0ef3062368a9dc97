//! Locks and atomics, which the model checker replaces by its own, and the order of locks.
//!
//! **Order** of locks (a thread that holds one may take only those to its right):
//!
//! ```text
//! CPUs → recompressor, or trainer → entry       CPUs → CPUs that are up → any one below of a CPU
//! writer → a CPU's buffer → entry → share record's entry → unit's piece
//!        → scratch, or an LRU shard → size class → sections
//! entry → a CPU's slots → cluster               growing → sections
//! ```
//! The sums over segments come last.
//!
//! Against the order only `try_lock` is used. Compaction holds a size class and tries entries. An
//! object that moves to another node tries its class on that node. A store tries the entry of a
//! page that may be identical. A load of neighbours from the backing tries up to 64 entries.
//!
//! **No thread allocates** while it holds any of these, except the recompressor and the trainer. A
//! kernel that is short of memory waits for threads, and these wait for the locks. `Making` of
//! descriptors is exempt, because only maintaining threads take it.

pub(crate) use uzswap_sync::{Backoff, Mutex, MutexGuard, atomic, lock, pin, profile, try_lock};

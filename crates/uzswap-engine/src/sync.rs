//! Locks and atomics, which the model checker replaces by its own, and the order of locks.
//!
//! **Order** in which locks are taken (a thread that holds one may take only those to its right):
//!
//! writer → a CPU's buffer → entry → share record's entry → unit's piece → scratch, or an LRU shard
//! → size class → sections
//!
//! and before an entry the recompressor or the trainer, and before these where CPUs stand; from an
//! entry or from nothing, a CPU's slots → cluster; and last, what segments add up to.
//!
//! Against the order only `try_lock` is used: by compaction, which holds a size class and tries
//! entries; by a store, which tries that of a page that may be the same; by who reads neighbours
//! from the backing, and tries theirs.
//!
//! **Nobody allocates** while holding any of these but the recompressor and the trainer: when the
//! kernel is short of memory, it waits for threads that wait for these locks. A lock that only
//! threads which maintain take is no such one: `Making` of descriptors, held while some are made.

pub(crate) use uzswap_sync::{Backoff, Mutex, MutexGuard, atomic, lock, pin, profile, try_lock};

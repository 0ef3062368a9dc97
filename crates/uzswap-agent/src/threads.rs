//! The threads of this library, by their numbers.

use std::sync::atomic::Ordering::SeqCst;
use uzswap_calls::stop;
use uzswap_sys::own_threads;

/// The thread that watches, if it has begun.
pub fn watcher() -> Option<i32> {
    own_threads::of_own_process(crate::front()?.watcher.load(SeqCst))
}

/// Threads of this library's own that are there.
pub fn ours() -> Vec<i32> {
    let watcher = watcher();
    let is_ours = |thread: &i32| own_threads::all().chain(watcher).any(|ours| ours == *thread);
    stop::threads().unwrap_or_default().into_iter().filter(is_ours).collect()
}

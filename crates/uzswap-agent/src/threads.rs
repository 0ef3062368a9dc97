//! The threads of this library, by their numbers.

use std::sync::atomic::Ordering::SeqCst;
use uzswap_calls::stop;
use uzswap_sys::own_threads;

/// Threads of this library's own that are there.
pub fn ours() -> Vec<i32> {
    let loader = crate::front().map_or(0, |front| front.loader.load(SeqCst));
    let loader = own_threads::of_own_process(loader);
    let is_ours = |thread: &i32| own_threads::all().chain(loader).any(|ours| ours == *thread);
    stop::threads().unwrap_or_default().into_iter().filter(is_ours).collect()
}

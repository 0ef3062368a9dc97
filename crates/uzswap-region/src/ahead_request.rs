//! The last request for a window that is to be read ahead: see [`crate::ahead`].

use crate::budget::Bell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Default)]
pub(crate) struct AheadRequest {
    /// A region in the upper half, a page in the lower; no region has the number 0.
    asked: AtomicU64,
    bell: Bell,
}

impl AheadRequest {
    /// Asks for a window of pages.
    pub(crate) fn ask(&self, region: u32, page: u32) {
        self.asked.store(u64::from(region) << 32 | u64::from(page), Relaxed);
        self.bell.ring();
    }

    /// The word that the thread that reads ahead waits for.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Waits for a request, or for a mere ring.
    pub(crate) fn next(&self) -> Option<(u32, u32)> {
        self.bell.wait();
        let asked = self.asked.swap(0, Relaxed);
        (asked != 0).then_some(((asked >> 32) as u32, asked as u32))
    }
}

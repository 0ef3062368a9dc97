//! Descriptors of ours. The program must not close them: without them its pages are lost.

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

static DESCRIPTORS: [AtomicI32; 256] = [const { AtomicI32::new(-1) }; 256];

/// Notes which descriptors are ours.
pub fn keep(descriptors: &[i32]) {
    for (place, descriptor) in DESCRIPTORS.iter().zip(descriptors) {
        place.store(*descriptor, Relaxed);
    }
}

/// The descriptors that are ours.
pub fn all() -> impl Iterator<Item = i32> {
    DESCRIPTORS.iter().map(|ours| ours.load(Relaxed)).filter(|ours| *ours >= 0)
}

/// True for a descriptor of ours.
pub fn is_ours(descriptor: i32) -> bool {
    descriptor >= 0 && DESCRIPTORS.iter().any(|ours| ours.load(Relaxed) == descriptor)
}

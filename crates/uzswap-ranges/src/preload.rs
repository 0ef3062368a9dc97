//! Memory that is allocated before an insertion.

use crate::leaf::{LEVELS, Leaf};
use std::hash::{BuildHasher, RandomState};
use uzswap_sync as sync;

/// Memory for the leaf that an insertion may need, so that nothing is allocated while a lock is
/// held or memory is short. Each thread has one. About one insertion in forty takes the leaf.
pub struct Preload {
    leaf: Option<Box<Leaf>>,
    /// State of a xorshift generator, which draws heights.
    random: u64,
}

impl Default for Preload {
    fn default() -> Self {
        Self { leaf: None, random: RandomState::new().hash_one(0) | 1 }
    }
}

impl Preload {
    /// Draws heights from a generator with this seed, so that a run can be repeated.
    #[cfg(test)]
    pub(crate) fn with_seed(seed: u64) -> Self {
        Self { leaf: None, random: seed | 1 }
    }

    /// True if an insertion would allocate nothing.
    pub fn is_ready(&self) -> bool {
        self.leaf.is_some()
    }

    /// Allocates the memory.
    pub(crate) fn ready(&mut self) {
        if self.leaf.is_none() {
            let height = self.height();
            self.leaf = Some(Box::new(Leaf::new(height)));
            // The first pin of a thread allocates too.
            drop(sync::pin());
        }
    }

    pub(crate) fn take(&mut self) -> Box<Leaf> {
        self.leaf.take().expect("insertions make the memory ready first, and need one leaf at most")
    }

    /// 1, plus the number of zeros below the lowest set bit of a random number.
    fn height(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (1 + self.random.trailing_zeros()).min(LEVELS as u32)
    }
}

//! Recounts everything.

use crate::Totals;
use crate::leaf::link::LeafRef;
use crate::leaf::{LEVELS, Leaf};
use crate::list::{SkipList, next_on};
use crossbeam_epoch::Guard;
use std::iter::successors;
use uzswap_sync::atomic::Ordering::Acquire;

impl SkipList {
    pub(crate) fn recount(&self) -> Totals {
        let pinned = &uzswap_sync::pin();
        let mut totals = Totals::default();
        for leaf in self.level(0, pinned) {
            let high = next_on(&leaf, 0, pinned).map_or(u64::MAX, |next| next.low());
            assert_eq!(leaf.high(), high, "a span ends where the next one begins");
            assert!(leaf.len() > 0 || leaf == self.head(pinned), "an empty leaf");
            count_leaf(&leaf, &mut totals);
        }
        assert_eq!(totals.taken + totals.free, u64::MAX, "taken and free points");
        for level in 1..LEVELS {
            let below = self.level(0, pinned).filter(|leaf| leaf.height() > level);
            assert!(self.level(level, pinned).eq(below), "a level has the leaves of its height");
            self.level(level, pinned).for_each(|leaf| check_copy(&leaf, level, pinned));
        }
        totals
    }

    fn level<'g>(&'g self, level: usize, pinned: &'g Guard) -> impl Iterator<Item = LeafRef<'g>> {
        successors(Some(self.head(pinned)), move |leaf| next_on(leaf, level, pinned))
    }
}

fn count_leaf(leaf: &Leaf, totals: &mut Totals) {
    leaf.assert_idle();
    let mut room = 0;
    for slot in 0..=leaf.len() {
        let (start, end) = leaf.run_before(slot);
        assert!(start <= end, "ranges overlap, or reach beyond their leaf's span");
        totals.free += end - start;
        room = room.max(end - start);
    }
    for slot in 0..leaf.len() {
        assert!(leaf.item(slot).size > 0, "an empty range");
        totals.taken += leaf.item(slot).size;
    }
    assert!(leaf.low() < leaf.high(), "an empty span");
    assert!(leaf.room() >= room, "a leaf has more room than it says");
    assert!(leaf.len() == 0 || leaf.first() == leaf.key(0), "where the first item begins");
    assert_eq!(leaf.last(), leaf.run_before(leaf.len()).0, "where the last item ends");
    totals.items += leaf.len();
    totals.leaves += 1;
}

/// Checks the copy of the next leaf's `low` beside a link.
fn check_copy(leaf: &Leaf, level: usize, pinned: &Guard) {
    let low = next_on(leaf, level, pinned).map(|next| next.low());
    let copy = leaf.upper[level - 1].low.load(Acquire);
    assert!(
        low.map_or(copy == u64::MAX, |low| copy <= low),
        "a copy beyond the leaf that it tells of"
    );
}

//! What packing pages written through needs to know of their segments.

use super::{BATCH, CLUSTER_SEGMENTS, SLOT_BYTES, Slot, Slots, home, numbers};
use crate::backing::segments::{Segment, Use};
use crate::sync::lock;

/// Segments that are emptied at a time.
pub(crate) const VICTIMS: usize = 8;

/// Slots of a segment that is broken up, kept from others. There is at least one, so the segment
/// stays what it is until they are let go.
#[derive(Debug)]
pub(crate) struct Held {
    segment: Segment,
    slots: u64,
}

impl Held {
    /// The other slots of the segment.
    pub(crate) fn others(&self) -> impl Iterator<Item = Slot> + use<> {
        let (first, slots) = (self.segment.0 * BATCH as u32, self.slots);
        (0..BATCH as u32).filter(move |at| slots & 1 << at == 0).map(move |at| Slot(first + at))
    }
}

impl Slots {
    /// Segments that are broken up, with the fewest slots in use, the emptiest first. No more than
    /// so many clusters are looked at, so to within an eighth of a segment.
    pub(crate) fn emptiest(&self) -> [Option<Segment>; VICTIMS] {
        let mut fewest: [Option<(Segment, usize)>; VICTIMS] = [None; VICTIMS];
        let clusters = self.by_fill.iter().flat_map(|set| numbers(set, 0)).take(VICTIMS);
        for segment in clusters.flat_map(|number| self.segments_in(number)) {
            let live = self.segments.live(segment) / SLOT_BYTES;
            if self.segments.state(segment) != Use::Singles || live == BATCH {
                continue;
            }
            let at = fewest.partition_point(|other| other.is_some_and(|(_, few)| few <= live));
            if at < VICTIMS {
                fewest[at..].rotate_right(1);
                fewest[at] = Some((segment, live));
            }
        }
        fewest.map(|found| found.map(|(segment, _)| segment))
    }

    fn segments_in(&self, number: u32) -> impl Iterator<Item = Segment> + use<> {
        let (first, count) = (number * CLUSTER_SEGMENTS as u32, self.segments.count() as u32);
        (first..count.min(first + CLUSTER_SEGMENTS as u32)).map(Segment)
    }

    /// Keeps the free slots of a segment that is broken up from others; `None` if it has none, or
    /// is not broken up.
    pub(crate) fn hold(&self, segment: Segment) -> Option<Held> {
        let (number, word) = home(segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        let slots = if cluster.broken & 1 << word != 0 { !cluster.used[word] } else { 0 };
        cluster.used[word] |= slots;
        self.tell(number, &cluster);
        (slots != 0).then_some(Held { segment, slots })
    }

    /// Makes slots that were held free again.
    pub(crate) fn let_go(&self, held: Held) {
        let (number, _) = home(held.segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        self.clear(&mut cluster, held.segment, held.slots);
        self.tell(number, &cluster);
    }
}

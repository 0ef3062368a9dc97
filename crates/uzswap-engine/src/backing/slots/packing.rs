//! Segments of pages written through, as packing needs them.

use super::{BATCH, CLUSTER_SEGMENTS, SLOT_BYTES, Slot, Slots, home, numbers};
use crate::backing::segments::Use;
use crate::backing::shape::Segment;
use crate::sync::lock;

/// Segments that are emptied at a time.
pub(crate) const VICTIMS: usize = 8;

/// Free slots of a broken-up segment, reserved by packing. There is at least one such slot, so the
/// segment stays broken up until they are released.
#[derive(Debug)]
pub(crate) struct Reserved {
    segment: Segment,
    slots: u64,
}

impl Reserved {
    /// The other slots of the segment.
    pub(crate) fn others(&self) -> impl Iterator<Item = Slot> + use<> {
        let (first, slots) = (self.segment.0 * BATCH as u32, self.slots);
        (0..BATCH as u32).filter(move |at| slots & 1 << at == 0).map(move |at| Slot(first + at))
    }
}

impl Slots {
    /// The broken-up segments with the fewest slots in use, the emptiest first. Only [`VICTIMS`]
    /// clusters are searched, so the result is right to within an eighth of a segment.
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

    /// Reserves the free slots of a broken-up segment; `None` if it has none, or is not broken up.
    pub(crate) fn reserve(&self, segment: Segment) -> Option<Reserved> {
        let (number, word) = home(segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        let slots = if cluster.broken & 1 << word != 0 { !cluster.used[word] } else { 0 };
        cluster.used[word] |= slots;
        self.tell(number, &cluster);
        (slots != 0).then_some(Reserved { segment, slots })
    }

    /// Frees reserved slots.
    pub(crate) fn release(&self, held: Reserved) {
        let (number, _) = home(held.segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        self.clear(&mut cluster, held.segment, held.slots);
        self.tell(number, &cluster);
    }
}

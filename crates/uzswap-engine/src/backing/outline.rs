//! Sums over the table of segments, without a scan of all of it.
//!
//! Segments form *groups* of 64, and groups form *rows* of 64, a GiB of the backing. For each group
//! and row there is the sum of live bytes, and the written segment with the fewest. A thread that
//! changes a segment marks the segment's group; on a marked group this costs one load. A thread
//! that asks for the sum recounts marked groups and then adds up the rows, a thousand for a TiB.
//!
//! **No change is missed.** A segment's word is changed before its group is marked, and a mark is
//! cleared before the words are read. All four accesses are sequentially consistent. So if a thread
//! has changed a word and then finds the mark still set, the thread that clears the mark reads the
//! changed word.

use super::shape::Segment;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, lock};

/// Segments in a group, and groups in a row.
const FAN: usize = u64::BITS as usize;

/// The sum of some segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sum {
    /// Bytes of their live records.
    pub(super) live: u64,
    /// The written segment with the fewest live bytes: the bytes in the high half, and the
    /// segment's number in the low half. The least value is the cheapest segment. [`Sum::NONE`] if
    /// no segment is written.
    least: u64,
}

impl Sum {
    const NONE: u64 = u64::MAX;
    const EMPTY: Self = Self { live: 0, least: Self::NONE };

    /// The sum of one segment.
    pub(super) fn of(segment: Segment, live: u32, is_written: bool) -> Self {
        let least = u64::from(live) << 32 | u64::from(segment.0);
        Self { live: live.into(), least: if is_written { least } else { Self::NONE } }
    }

    fn of_all(sums: impl Iterator<Item = Self>) -> Self {
        sums.fold(Self::EMPTY, |all, one| Self {
            live: all.live + one.live,
            least: all.least.min(one.least),
        })
    }

    /// The written segment with the fewest live bytes.
    pub(super) fn cheapest(self) -> Option<Segment> {
        (self.least != Self::NONE).then_some(Segment(self.least as u32))
    }
}

/// See the module.
pub(super) struct Outline {
    /// A word for each row, a bit for each group that has changed since it was counted.
    changed: Box<[AtomicU64]>,
    counted: Mutex<GroupSums>,
}

struct GroupSums {
    groups: Box<[Sum]>,
    rows: Box<[Sum]>,
}

impl Outline {
    /// The outline of `segments` segments, all still to be counted.
    pub(super) fn new(segments: usize) -> Self {
        let groups = segments.div_ceil(FAN);
        let rows = groups.div_ceil(FAN);
        let outline = Self {
            changed: (0..rows).map(|_| AtomicU64::new(0)).collect(),
            counted: Mutex::new(GroupSums {
                groups: vec![Sum::EMPTY; groups].into(),
                rows: vec![Sum::EMPTY; rows].into(),
            }),
        };
        (0..groups).for_each(|group| outline.note(Segment((group * FAN) as u32)));
        outline
    }

    /// Notes that a segment has changed.
    pub(super) fn note(&self, segment: Segment) {
        let group = segment.0 as usize / FAN;
        let (row, bit) = (&self.changed[group / FAN], 1 << (group % FAN));
        if row.load(SeqCst) & bit == 0 {
            row.fetch_or(bit, SeqCst);
        }
    }

    /// The sum of all segments; `of` gives the sum of one segment.
    pub(super) fn sum(&self, segments: usize, of: impl Fn(Segment) -> Sum) -> Sum {
        let GroupSums { groups, rows } = &mut *lock(&self.counted);
        for (at, changed) in self.changed.iter().enumerate() {
            if changed.load(SeqCst) == 0 {
                continue;
            }
            let mut left = changed.swap(0, SeqCst);
            while left != 0 {
                let group = at * FAN + left.trailing_zeros() as usize;
                left &= left - 1;
                let members = group * FAN..segments.min((group + 1) * FAN);
                groups[group] = Sum::of_all(members.map(|number| of(Segment(number as u32))));
            }
            let members = at * FAN..groups.len().min((at + 1) * FAN);
            rows[at] = Sum::of_all(groups[members].iter().copied());
        }
        Sum::of_all(rows.iter().copied())
    }

    /// Bytes of the tables.
    pub(super) fn bytes(&self) -> usize {
        let GroupSums { groups, rows } = &*lock(&self.counted);
        size_of_val(&*self.changed) + size_of_val(&**groups) + size_of_val(&**rows)
    }
}

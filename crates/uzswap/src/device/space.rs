//! The size of the swap space that the kernel sees: no more than it needs, and none that cannot be
//! served.
//!
//! The kernel reports freed slots only when it discards a whole cluster, and it uses fresh clusters
//! while there are some. While less than half of all swap space is taken, a page also keeps its
//! slot after it is read back. So dead pages and second copies pile up in a large area. We
//! therefore make areas one after another, each a quarter of all earlier ones. Then the kernel
//! reuses slots, and only a reuse shows us that the old page in a slot is dead
//! (docs/design/space.md has the measurements).
//!
//! When pool and backing are nearly full, the kernel may have one free slot at most for each page
//! that can be stored in the worst case. Pages of our own take the other slots (slots.rs). The
//! kernel then finds swap space full and acts on that. Without this, the kernel would only repeat
//! its refused writes.

use crate::device::slots::Holder;
use std::ops::Range;
use std::time::{Duration, Instant};
use uzswap_sys::swap::Area;

/// The least size of the first area, and its share of the whole size.
const FIRST_BYTES_MIN: u64 = 256 << 20;
const FIRST_DIVISOR: u64 = 64;
const FIRST_BYTES_LEAST: u64 = 16 << 20;

/// The least free space that the kernel needs: the space that it may take between two looks.
const FREE_BYTES_MIN: u64 = 128 << 20;
const FREE_DIVISOR: u64 = 8;

/// A further area, as a share of those that exist. The kernel knows some 23 areas, ours and others.
const GROWTH_DIVISOR: u64 = 4;
const AREAS_MAX: usize = 18;

/// Areas are made of whole clusters.
pub const CLUSTER_BYTES: u64 = 2 << 20;

/// With more room than this, the kernel may have all slots: it cannot fill the cache between two
/// looks.
const ROOM_BYTES_ENOUGH: u64 = 256 << 20;

/// With less room the cache counts as full.
const ROOM_BYTES_MIN: u64 = 256 << 10;

/// The pause before an area that could not be made is tried again. The pause doubles up to a
/// minute.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_DOUBLINGS: u32 = 6;

/// The interval of looks, with enough room and without.
const CALM: Duration = Duration::from_millis(50);
const TIGHT: Duration = Duration::from_millis(5);

/// A change of the cache's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// The cache can take no more.
    Yes,
    /// The cache can take more again.
    No,
}

/// The first part of a disk of `size` bytes that is not `taken`. The part has `bytes`, or fewer if
/// the gap is smaller, and begins with a cluster. A gap arises when an area is switched off by
/// hand.
pub fn free_part(taken: &[Range<u64>], bytes: u64, size: u64) -> Option<Range<u64>> {
    let mut taken = taken.to_vec();
    taken.sort_by_key(|part| part.start);
    let mut start = 0;
    for part in taken.into_iter().chain(std::iter::once(size..size)) {
        if start < part.start {
            return Some(start..part.start.min(start + bytes));
        }
        start = start.max(part.end.next_multiple_of(CLUSTER_BYTES));
    }
    None
}

/// See the module.
pub struct Space {
    /// The maximum size of all areas together, in bytes.
    size: u64,
    ballast: Holder,
    is_full: bool,
    /// No area is made before this time, which grows with consecutive failures.
    grows_from: Option<Instant>,
    failures: u32,
    /// Bytes of free slots that the kernel may have; `u64::MAX` with enough room.
    free_max: u64,
}

impl Space {
    /// Makes the state for areas of up to `size` bytes together.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            ballast: Holder::default(),
            is_full: false,
            grows_from: None,
            failures: 0,
            free_max: u64::MAX,
        }
    }

    /// The part of the disk for the next area; `None` if there are enough areas. The new part
    /// overlaps no part of `taken`.
    pub fn wants(&self, areas: &[Area], taken: &[Range<u64>]) -> Option<Range<u64>> {
        free_part(taken, self.bytes_wanted(areas)?, self.size)
    }

    /// Bytes of the next area; `None` if there are enough areas.
    fn bytes_wanted(&self, areas: &[Area]) -> Option<u64> {
        if areas.is_empty() {
            let first = (self.size / FIRST_DIVISOR).max(FIRST_BYTES_MIN);
            let first = first.min(self.free_max.saturating_mul(2)).max(FIRST_BYTES_LEAST);
            return Some(first);
        }
        // The kernel does not count the header among an area's bytes.
        let total: u64 = areas.iter().map(|area| area.bytes.next_multiple_of(CLUSTER_BYTES)).sum();
        let taken: u64 = areas.iter().map(|area| area.used).sum();
        let free = total.saturating_sub(taken - self.ballast_bytes().min(taken));
        let wanted = (total / FREE_DIVISOR).max(FREE_BYTES_MIN).min(self.free_max);
        let is_early = self.grows_from.is_some_and(|from| Instant::now() < from);
        if free >= wanted || total >= self.size || is_early {
            return None;
        }
        let few = areas.len() < AREAS_MAX / 2;
        let enough =
            if few { self.free_max.saturating_mul(2).max(FIRST_BYTES_LEAST) } else { u64::MAX };
        let more = (total / GROWTH_DIVISOR).max(FREE_BYTES_MIN).min(enough);
        let (more, left) = (more.next_multiple_of(CLUSTER_BYTES), self.size - total);
        Some(if areas.len() + 1 >= AREAS_MAX || more > left { left } else { more })
    }

    fn ballast_bytes(&self) -> u64 {
        self.ballast.bytes()
    }

    /// The time until the next look.
    pub fn pause(&self) -> Duration {
        if self.free_max == u64::MAX { CALM } else { TIGHT }
    }

    /// True if the cache could take no more at the last look.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Notes that an area could not be made. The next attempt waits, twice as long after each
    /// failure. The resource that is missing, memory most likely, comes back with time.
    pub fn cannot_grow(&mut self) {
        self.grows_from = Some(Instant::now() + RETRY * (1 << self.failures.min(RETRY_DOUBLINGS)));
        self.failures += 1;
    }

    /// An area was made.
    pub fn has_grown(&mut self) {
        (self.grows_from, self.failures) = (None, 0);
    }

    /// Leaves the kernel as many free slots as the cache has `room` for, bytes. Returns a change of
    /// the cache's state.
    pub fn look(&mut self, areas: &[Area], room: u64) -> Option<Full> {
        self.free_max = if room >= ROOM_BYTES_ENOUGH { u64::MAX } else { room / 2 };
        let free: u64 = areas.iter().map(|area| area.bytes.saturating_sub(area.used)).sum();
        self.ballast.hear();
        let bytes = self.ballast.bytes();
        match free.checked_sub(self.free_max) {
            Some(excess) => self.ballast.set(bytes + excess),
            None if bytes > 0 => self.ballast.set(bytes.saturating_sub(self.free_max - free)),
            None => {}
        }
        let before = std::mem::replace(&mut self.is_full, room < ROOM_BYTES_MIN);
        match (before, self.is_full) {
            (false, true) => Some(Full::Yes),
            (true, false) => Some(Full::No),
            _ => None,
        }
    }

    /// Gives all slots back.
    pub fn release(&mut self) {
        self.ballast = Holder::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn area(bytes: u64, used: u64) -> Area {
        Area { path: "/dev/loop0".into(), bytes, used, priority: 0 }
    }

    /// The part at the start of the disk.
    fn first(bytes: u64) -> Vec<Range<u64>> {
        std::iter::once(0..bytes).collect()
    }

    #[test]
    fn areas_grow_with_the_pages_that_are_swapped_out() {
        let space = Space::new(4096 * MIB);
        assert_eq!(space.wants(&[], &[]), Some(0..256 * MIB));
        assert_eq!(space.wants(&[area(256 * MIB, 127 * MIB)], &first(256 * MIB)), None);
        assert_eq!(
            space.wants(&[area(256 * MIB, 129 * MIB)], &first(256 * MIB)),
            Some(256 * MIB..384 * MIB)
        );
        let (mut areas, mut total) = (Vec::new(), 0);
        while let Some(part) = space.wants(&areas, &first(total)) {
            assert_eq!(part.start, total, "one behind the other");
            total = part.end;
            // The kernel does not count the header.
            areas.push(area(part.end - part.start - 4096, part.end - part.start - 4096));
        }
        assert_eq!(total, 4096 * MIB);
        assert!(areas.len() <= AREAS_MAX, "{} areas", areas.len());
    }

    #[test]
    fn a_small_and_a_huge_size_are_served_too() {
        assert_eq!(Space::new(16 * MIB).wants(&[], &[]), Some(0..16 * MIB));
        let huge = Space::new(16 << 40);
        let (mut areas, mut total) = (Vec::new(), 0);
        while let Some(part) = huge.wants(&areas, &first(total)) {
            total = part.end;
            areas.push(area(part.end - part.start, part.end - part.start));
        }
        assert_eq!((total, areas.len() <= AREAS_MAX), (16 << 40, true));
    }

    /// An earlier version took the kernel's list for all areas. After a swapoff of the first area
    /// by hand, the next areas overlapped others.
    #[test]
    fn no_two_areas_are_over_the_same_part_whichever_is_switched_off() {
        let space = Space::new(1024 * MIB);
        let mut taken = vec![256 * MIB..384 * MIB, 384 * MIB..512 * MIB];
        let on = |taken: &[Range<u64>]| -> Vec<_> {
            taken.iter().map(|part| area(part.end - part.start, part.end - part.start)).collect()
        };
        while let Some(part) = space.wants(&on(&taken), &taken) {
            let is_apart = |other: &Range<u64>| part.end <= other.start || other.end <= part.start;
            assert!(taken.iter().all(is_apart), "{part:?} is in {taken:?}");
            taken.push(part);
        }
        assert_eq!(taken.iter().map(|part| part.end - part.start).sum::<u64>(), 1024 * MIB);
        let parts = |parts: &[Range<u64>], bytes, size| {
            let taken: Vec<_> =
                parts.iter().map(|part| part.start * MIB..part.end * MIB - 512).collect();
            free_part(&taken, bytes * MIB, size * MIB)
                .map(|part| (part.start / MIB, part.end / MIB))
        };
        assert_eq!(parts(&[0..8, 16..24], 4, 24), Some((8, 12)));
        assert_eq!(parts(&[16..24, 0..8], 40, 48), Some((8, 16)), "less where no more is free");
        assert_eq!(parts(&[0..24, 4..8], 40, 24), None);
        let one = free_part(&first(8 * MIB + 512), MIB, 64 * MIB);
        assert_eq!(one, Some(10 * MIB..11 * MIB), "no area begins within a cluster");
    }

    #[test]
    fn an_area_that_could_not_be_made_is_tried_again_ever_more_slowly() {
        let mut space = Space::new(4096 * MIB);
        let (areas, taken) = ([area(256 * MIB, 200 * MIB)], first(256 * MIB));
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let began = Instant::now();
            space.cannot_grow();
            assert_eq!(space.wants(&areas, &taken), None);
            assert!(space.wants(&[], &[]).is_some(), "without any area nothing could leave");
            pauses.push((space.grows_from.unwrap() - began).as_secs());
            space.grows_from = Some(began);
            assert!(space.wants(&areas, &taken).is_some());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64]);
        space.has_grown();
        space.cannot_grow();
        assert!(space.grows_from.unwrap() < Instant::now() + 2 * RETRY);
    }

    #[test]
    fn with_little_room_the_kernel_is_left_few_slots() {
        let mut space = Space::new(4096 * MIB);
        let (areas, taken) = ([area(256 * MIB, 200 * MIB)], first(256 * MIB));
        assert_eq!(space.look(&areas, 1 << 40), None);
        assert_eq!((space.pause(), space.wants(&areas, &taken).is_some()), (CALM, true));
        assert_eq!(space.look(&areas, 64 * MIB), None);
        assert_eq!(
            (space.pause(), space.wants(&areas, &taken)),
            (TIGHT, None),
            "half of it is enough"
        );
        assert_eq!(space.look(&areas, 0), Some(Full::Yes));
        assert_eq!(space.look(&areas, 0), None);
        assert_eq!(space.look(&areas, 1 << 40), Some(Full::No));
        space.free_max = 4 * MIB;
        assert_eq!(space.wants(&[], &[]), Some(0..16 * MIB), "a small pool has a small area");
    }
}

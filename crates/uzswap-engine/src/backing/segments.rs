//! The use of each segment of the backing.
//!
//! A segment is written once, whole, and then only loses records. Or it is given out slot by slot,
//! for pages written through. The count of live bytes shows when a segment is free again, and which
//! segment is cheapest to clean. Cleaning copies a segment's live records into another. This is a
//! log, cleaned greedily. With a fifth of the space free, cleaning copies three quarters of a
//! segment for each segment won. Cleaning copies less where neighbours die together, as one
//! program's records do.
//!
//! One word has a segment's use and its live bytes, so they change together. Exactly one thread
//! thus sees a written segment's last record die, and gives the segment back. `outline` has the
//! sums.

use super::Backing;
use super::outline::{Outline, Sum};
use super::shape::{SEGMENT_BYTES, Segment};
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, Values};
use crate::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::Arc;

/// The use of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Use {
    /// The segment is empty.
    Free = 0,
    /// Being filled or written by the thread that took it. No other thread takes or cleans it.
    Open = 1,
    /// Written. The segment becomes free when none of its records is live.
    Written = 2,
    /// Given out slot by slot. The segment becomes free when all slots are back.
    Singles = 3,
    /// Cleaning is copying the segment's live records elsewhere.
    Cleaning = 4,
    /// The backing no longer has the segment's content. No thread cleans the segment, and each load
    /// of a record reports the error. It becomes free when none of its records is live.
    Lost = 5,
}

impl Use {
    fn of(word: u32) -> Self {
        match word >> Self::SHIFT {
            0 => Self::Free,
            1 => Self::Open,
            2 => Self::Written,
            3 => Self::Singles,
            4 => Self::Cleaning,
            5 => Self::Lost,
            other => unreachable!("no use of a segment has number {other}"),
        }
    }

    fn word(self, live: u32) -> u32 {
        (self as u32) << Self::SHIFT | live
    }

    const SHIFT: u32 = 29;
    const LIVE: u32 = (1 << Self::SHIFT) - 1;
}

const _: () = assert!(SEGMENT_BYTES <= Use::LIVE as usize);

/// See the module.
pub(crate) struct Segments {
    /// The backing, which learns of each segment that becomes free.
    backing: Option<Arc<dyn Backing>>,
    words: Values<DurableAtomic<AtomicU32>>,
    outline: Outline,
}

impl Segments {
    /// All segments free.
    pub(super) fn new(count: usize) -> Self {
        let words = (0..count).map(|_| DurableAtomic::new(Use::Free.word(0)));
        Self::of(Values::Own(words.collect()))
    }

    fn of(words: Values<DurableAtomic<AtomicU32>>) -> Self {
        Self { backing: None, outline: Outline::new(words.len()), words }
    }

    /// Tells the backing of each segment that becomes free.
    pub(super) fn with_backing(self, backing: &Arc<dyn Backing>) -> Self {
        Self { backing: Some(backing.clone()), ..self }
    }

    /// In memory that outlives the process: free, or as the previous process left them.
    #[cfg(not(feature = "shuttle"))]
    pub(super) fn durable(durable: &Arc<Durable>) -> Self {
        Self::of(durable.segments())
    }

    #[cfg(feature = "shuttle")]
    pub(super) fn durable(_durable: &Arc<Durable>) -> Self {
        unreachable!("the model checker has no memory that outlives it")
    }

    /// Takes the segments over; no record is known to be live yet. An open segment stays open: a
    /// write may still be under way.
    pub(super) fn adopt(&self) {
        for segment in self.all() {
            let was = self.state(segment);
            let now = if was == Use::Cleaning { Use::Written } else { was };
            self.word(segment).store(now.word(0), SeqCst);
            self.outline.note(segment);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Segment> + use<> {
        (0..self.words.len() as u32).map(Segment)
    }

    fn word(&self, segment: Segment) -> &DurableAtomic<AtomicU32> {
        &self.words[segment.0 as usize]
    }

    pub(crate) fn state(&self, segment: Segment) -> Use {
        Use::of(self.word(segment).load(Acquire))
    }

    /// Bytes of the segment's live records.
    pub(crate) fn live(&self, segment: Segment) -> usize {
        (self.word(segment).load(Acquire) & Use::LIVE) as usize
    }

    /// Changes the use of a segment. `false` if its use is not `from`.
    pub(crate) fn turn(&self, segment: Segment, from: Use, to: Use) -> bool {
        let turn = |word| (Use::of(word) == from).then(|| to.word(word & Use::LIVE));
        let turned = self.word(segment).fetch_update(SeqCst, Acquire, turn).is_ok();
        if turned {
            self.outline.note(segment);
        }
        if let (true, Use::Free, Some(backing)) = (turned, to, &self.backing) {
            backing.free(segment.start());
        }
        turned
    }

    /// Notes that the segment is written, or that cleaning leaves it. `true` if no record in it is
    /// live: then the caller gives it back.
    pub(crate) fn written(&self, segment: Segment) -> bool {
        let turned = self.turn(segment, Use::Open, Use::Written)
            || self.turn(segment, Use::Cleaning, Use::Written);
        debug_assert!(turned, "{segment:?} was {:?}", self.state(segment));
        self.claim_dead(segment)
    }

    /// Notes that the backing no longer has the content of a segment that was to be cleaned.
    /// Returns `true` if no record in the segment is live: then the caller gives the segment back.
    pub(crate) fn lost(&self, segment: Segment) -> bool {
        let turned = self.turn(segment, Use::Cleaning, Use::Lost);
        debug_assert!(turned, "{segment:?} was {:?}", self.state(segment));
        self.claim_dead(segment)
    }

    /// Claims a written segment without live records; `true` if the caller must give it back.
    fn claim_dead(&self, segment: Segment) -> bool {
        let claim = |was: Use| {
            let (dead, claimed) = (was.word(0), Use::Open.word(0));
            self.word(segment).compare_exchange(dead, claimed, SeqCst, Acquire).is_ok()
        };
        let is_claimed = claim(Use::Written) || claim(Use::Lost);
        if is_claimed {
            self.outline.note(segment);
        }
        is_claimed
    }

    /// Notes that `bytes` in a segment became live.
    pub(crate) fn add(&self, segment: Segment, bytes: usize) {
        self.word(segment).fetch_add(bytes as u32, SeqCst);
        self.outline.note(segment);
    }

    /// Notes that no entry refers to `bytes` any more. `true` if a written segment has no other
    /// live bytes: then the caller gives it back.
    pub(crate) fn remove(&self, segment: Segment, bytes: usize) -> bool {
        let before = self.word(segment).fetch_sub(bytes as u32, SeqCst);
        self.outline.note(segment);
        debug_assert!(
            before & Use::LIVE >= bytes as u32,
            "more dies in a segment than lived there"
        );
        before & Use::LIVE == bytes as u32 && self.claim_dead(segment)
    }

    /// The written segment with the fewest live bytes.
    pub(crate) fn cheapest(&self) -> Option<Segment> {
        self.sum().cheapest()
    }

    /// Bytes of all live records.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.sum().live
    }

    fn sum(&self) -> Sum {
        self.outline.sum(self.count(), |segment| self.sum_of(segment))
    }

    fn sum_of(&self, segment: Segment) -> Sum {
        let word = self.word(segment).load(SeqCst);
        Sum::of(segment, word & Use::LIVE, Use::of(word) == Use::Written)
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * size_of::<AtomicU32>() + self.outline.bytes()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::testing::Noise;
    use std::sync::atomic::AtomicBool;

    /// Computed by a scan.
    fn looked_up(segments: &Segments) -> (Option<Segment>, u64) {
        let is_written = |segment: &Segment| segments.state(*segment) == Use::Written;
        let written = segments.all().filter(is_written);
        let cheapest = written.min_by_key(|segment| segments.live(*segment));
        (cheapest, segments.all().map(|segment| segments.live(segment) as u64).sum())
    }

    /// A random change of segments, each of which is `Written` or `Free`.
    fn change(segments: &Segments, noise: &mut Noise) {
        let segment = Segment(noise.below(segments.count() as u64) as u32);
        match segments.state(segment) {
            Use::Free if segments.turn(segment, Use::Free, Use::Open) => {
                segments.add(segment, 4096 * (1 + noise.below(60) as usize));
                assert!(!segments.written(segment));
            }
            Use::Written if noise.below(20) == 0 => {
                assert!(segments.turn(segment, Use::Written, Use::Cleaning));
                segments.remove(segment, segments.live(segment));
                assert!(segments.written(segment));
                assert!(segments.turn(segment, Use::Open, Use::Free));
            }
            Use::Written if segments.live(segment) > 4096 => {
                assert!(!segments.remove(segment, 4096));
            }
            _ => {}
        }
    }

    #[test]
    fn sums_of_segments_are_those_that_a_look_at_each_segment_finds() {
        for count in [1, 63, 64, 65, 4096, 4097, 9000] {
            let segments = Segments::new(count);
            let mut noise = Noise::new(count as u64);
            for _ in 0..if cfg!(miri) { 5 } else { 300 } {
                (0..noise.below(50)).for_each(|_| change(&segments, &mut noise));
                assert_eq!((segments.cheapest(), segments.live_bytes()), looked_up(&segments));
            }
        }
    }

    #[test]
    fn no_change_is_missed_while_others_count() {
        let segments = Segments::new(5 * 64 + 7);
        let is_done = AtomicBool::new(false);
        let per_thread = segments.count() as u64 / 4;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    segments.live_bytes();
                }
            });
            let writers = (0..4).map(|first| {
                let segments = &segments;
                scope.spawn(move || {
                    let mut noise = Noise::new(first);
                    for _ in 0..if cfg!(miri) { 100 } else { 200_000 } {
                        let segment = Segment((noise.below(per_thread) * 4 + first) as u32);
                        segments.add(segment, 8);
                        if noise.below(2) == 0 {
                            segments.remove(segment, 8);
                        }
                    }
                })
            });
            writers.collect::<Vec<_>>().into_iter().for_each(|writer| drop(writer.join()));
            is_done.store(true, Relaxed);
        });
        assert_eq!((segments.cheapest(), segments.live_bytes()), looked_up(&segments));
    }

    #[test]
    fn finding_the_cheapest_segment_looks_at_changed_segments_alone() {
        for count in [1 << 16, if cfg!(miri) { 1 << 17 } else { 1 << 22 }] {
            let segments = Segments::new(count);
            segments.cheapest();
            let mut noise = Noise::new(7);
            (0..100).for_each(|_| change(&segments, &mut noise));
            let looks = std::cell::Cell::new(0);
            let sum = segments.outline.sum(count, |segment| {
                looks.set(looks.get() + 1);
                segments.sum_of(segment)
            });
            assert!((1..=100 * 64).contains(&looks.get()), "{} of {count}", looks.get());
            assert_eq!((sum.cheapest(), sum.live), looked_up(&segments));
        }
    }
}

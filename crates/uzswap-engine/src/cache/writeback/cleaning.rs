//! Makes free segments: copies the live records of the emptiest segments into the open segment.

use super::{FailedRequest, SegmentWriter};
use crate::backing::record::{Record, record_at};
use crate::backing::segments::Use;
use crate::backing::shape::{SEGMENT_BYTES, Segment};
use crate::backing::slots::Slots;
use crate::cache::Cache;
use crate::counters::Counter::SegmentsCleaned;
use crate::ids::Place;
use crate::index::State;
use crate::object::Extent;
use crate::sync::lock;
use std::io;

/// A segment with more live bytes than this is not cleaned: to gain one segment, cleaning would
/// copy thirty.
const WORTH_CLEANING: usize = SEGMENT_BYTES - SEGMENT_BYTES / 32;

/// The progress of cleaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cleaning {
    /// More than the reserved segments are free.
    Enough,
    /// Space is still short: the caller releases the writer's lock, and asks again.
    Unfinished,
    /// There is nothing to win.
    Hopeless,
}

impl Cache {
    /// Takes space on the backing, after cleaning if it is short.
    pub(crate) fn clean_for<T>(&self, take: impl FnOnce(&Slots) -> Option<T>) -> Option<T> {
        loop {
            let mut writer = lock(&self.writeback.writer);
            let cleaning = self.clean_if_short(&mut writer);
            if cleaning == Cleaning::Unfinished {
                continue;
            }
            let taken = (cleaning == Cleaning::Enough).then(|| take(&self.slots)).flatten();
            self.flush(&mut writer);
            return taken;
        }
    }

    /// Cleans one segment if space is short. The maintaining thread prepares memory for stores
    /// before it cleans the next segment, because each takes a read, which may be slow.
    pub(super) fn clean_if_short(&self, writer: &mut SegmentWriter) -> Cleaning {
        if self.slots.is_short() && writer.cleaning.is_empty() {
            self.slots.drain();
            self.flush(writer);
        }
        if !self.slots.is_short() {
            writer.hopeless_above = u64::MAX;
            return Cleaning::Enough;
        }
        let live = self.slots.segments.live_bytes();
        let hopeless = !self.slots.cleaning_can_win(live) || live > writer.hopeless_above;
        let goes_on = match hopeless {
            _ if !self.writeback_works() => false,
            true => self.pack_singles(),
            false => self.clean_one(writer, live),
        };
        if goes_on { Cleaning::Unfinished } else { Cleaning::Hopeless }
    }

    /// Cleans the cheapest segment, or frees the segments that were cleaned.
    fn clean_one(&self, writer: &mut SegmentWriter, live: u64) -> bool {
        let worth = |victim: &Segment| self.slots.segments.live(*victim) <= WORTH_CLEANING;
        let victim = self.slots.segments.cheapest().filter(worth);
        let room = writer.cleaning.len() < writer.cleaning.capacity();
        if let (Some(victim), true) = (victim, room) {
            return self.clean(writer, victim);
        }
        let cleaned = self.counters.get(SegmentsCleaned);
        self.flush(writer);
        let won_nothing = victim.is_none() || self.counters.get(SegmentsCleaned) == cleaned;
        // Either only segments written just now are worth cleaning, or the live records of the
        // others cannot be read. Cleaning stops, and does not try again before a record has died.
        if won_nothing && self.slots.is_short() && !self.pack_singles() {
            writer.hopeless_above = live.saturating_sub(SEGMENT_BYTES as u64);
            return false;
        }
        true
    }

    /// Copies a segment's live records elsewhere. The segment is free once the copies are written.
    fn clean(&self, writer: &mut SegmentWriter, victim: Segment) -> bool {
        let Some(mut content) = writer.cleaned.take() else { return false };
        let cleaned = if self.slots.segments.turn(victim, Use::Written, Use::Cleaning) {
            let copied = match self.backing.read(victim.start(), &mut content) {
                Ok(()) => self.copy_live(writer, victim, &mut content),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    writer.cleaned = Some(content);
                    if self.slots.segments.lost(victim) {
                        self.slots.give_segment(victim, Use::Open);
                    }
                    return true;
                }
                Err(error) => {
                    self.fail(FailedRequest { what: "read", byte: victim.start(), error });
                    false
                }
            };
            writer.cleaning.push(victim);
            copied
        } else {
            true // Its last record died just now: it is free.
        };
        writer.cleaned = Some(content);
        cleaned
    }

    /// Copies a segment's live records into open ones. A record that cannot be opened stays: each
    /// load reports the error, and the record may be readable the next time.
    fn copy_live(&self, writer: &mut SegmentWriter, victim: Segment, content: &mut [u8]) -> bool {
        let (mut next, layout) = (0, self.slots.layout);
        while let Some(found) = record_at(content, next, layout) {
            let offset = next;
            next += layout.record_bytes(found.form);
            // Flushes before it locks the entry, because a commit may have to lock the same entry.
            if writer.open.as_ref().is_some_and(|open| open.place(found.form).is_none()) {
                self.flush(writer);
            }
            if !self.writeback_works() || !self.open(writer, 0) {
                return false;
            }
            let Some(open) = &mut writer.open else { return false };
            let extent =
                Extent { place: Place::at(victim.start() + offset as u64), form: found.form };
            let view = self.index.view();
            let Some(locked) = view.lock(found.owner) else { continue };
            if locked.state() == State::Placed(extent) {
                let bytes = &mut content[offset..][..layout.bytes(found.form)];
                if let Ok(held) = self.open_read(found.owner, extent, locked.proof(), bytes) {
                    let checksum = held.checksum;
                    let record = Record { checksum, moved_from: Some(victim), ..found };
                    open.append(record).copy_from_slice(held.object);
                }
            }
        }
        true
    }

    /// Frees the segments whose last record was moved, and leaves others. No copy is in flight.
    pub(super) fn finish_cleaning(&self, writer: &mut SegmentWriter) {
        for victim in writer.cleaning.drain(..) {
            if self.slots.segments.written(victim) {
                self.slots.give_segment(victim, Use::Open);
                self.counters.increment(SegmentsCleaned);
            }
        }
    }
}

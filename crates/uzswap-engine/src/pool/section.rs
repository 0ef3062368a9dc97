//! The pool's memory: sections of 2 MiB, frames of a page.
//!
//! A section is brought on line whole and given back whole, so the pool grows and shrinks in steps
//! of 2 MiB. Frames are taken from the lowest section that has any, which lets the highest ones run
//! empty. All frames that exist are faulted in: a store never waits for the kernel to find memory.

use crate::durable::{Durable, Values};
use crate::ids::SwapEntry;
use crate::page::PAGE_BYTES;
use crate::stops::Kept;
use crate::sync::{Mutex, lock};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use uzswap_sys::map::Mapping;

/// Frames in a section: 2 MiB, one huge page.
pub(crate) const SECTION_FRAMES: usize = 512;
/// Bytes in a section.
pub(crate) const SECTION_BYTES: usize = SECTION_FRAMES * PAGE_BYTES;

/// A page of the pool's memory: its section and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame(pub(super) u32);

impl Frame {
    pub(super) fn section(self) -> usize {
        self.0 as usize / SECTION_FRAMES
    }
}

/// What a section lies in.
enum Memory {
    Own(Mapping),
    /// In memory that outlives the process, which [`Sections`] has.
    Durable(NonNull<u8>),
}

// SAFETY: plain memory, of the process or of `Sections`, with no tie to the thread that made it.
unsafe impl Send for Memory {}

impl Memory {
    fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Own(mapping) => mapping.as_ptr(),
            Self::Durable(start) => start.as_ptr(),
        }
    }
}

struct Section {
    memory: Memory,
    /// A set bit is a free frame.
    free: [u64; SECTION_FRAMES / 64],
    free_count: usize,
    /// Being emptied: gives out no frames.
    leaving: bool,
}

struct Inner {
    sections: Box<[Option<Box<Section>>]>,
    /// No section below has a free frame to give.
    lowest: usize,
}

/// The sections there are.
pub(super) struct Sections {
    /// Start of each section; null where there is none. Read without the lock by whoever holds an
    /// object of the section, which keeps it on line.
    bases: Box<[AtomicPtr<u8>]>,
    inner: Mutex<Inner>,
    online: AtomicUsize,
    used_frames: AtomicUsize,
    /// Frames that may be in use.
    limit: AtomicUsize,
    /// Memory that outlives the process, and which sections are on line there.
    durable: Option<(Arc<Durable>, Values<Kept<AtomicU32>>)>,
    /// Held while a section's memory is made: its number must not be another's meanwhile.
    making: Mutex<Making>,
}

struct Making;

/// Sections that `bytes_max` bytes take.
pub(crate) fn sections_of(bytes_max: usize) -> usize {
    bytes_max.div_ceil(SECTION_BYTES).max(1)
}

impl Sections {
    /// Room for `bytes_max` bytes; nothing is on line yet.
    pub(super) fn new(bytes_max: usize, durable: Option<&Arc<Durable>>) -> Self {
        let count = sections_of(bytes_max);
        Self {
            durable: durable.map(|durable| (durable.clone(), durable.sections_on_line())),
            making: Mutex::new(Making),
            bases: (0..count).map(|_| AtomicPtr::default()).collect(),
            inner: Mutex::new(Inner { sections: (0..count).map(|_| None).collect(), lowest: 0 }),
            online: AtomicUsize::new(0),
            used_frames: AtomicUsize::new(0),
            limit: AtomicUsize::new(count * SECTION_FRAMES),
        }
    }

    /// Lets at most `frames` be in use. More may be at the moment; then none are given out.
    pub(super) fn set_limit(&self, frames: usize) {
        self.limit.store(frames, Ordering::Relaxed);
    }

    pub(super) fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Frames that zspages are made of.
    pub(super) fn used_frames(&self) -> usize {
        self.used_frames.load(Ordering::Relaxed)
    }

    /// Frames on line and not in use.
    pub(super) fn free_frames(&self) -> usize {
        (self.online.load(Ordering::Relaxed) * SECTION_FRAMES).saturating_sub(self.used_frames())
    }

    /// Sections on line.
    pub(super) fn online(&self) -> usize {
        self.online.load(Ordering::Relaxed)
    }

    /// Sections that could be on line.
    pub(super) fn possible(&self) -> usize {
        self.bases.len()
    }

    /// Takes `out.len()` frames, or none at all.
    pub(super) fn take(&self, out: &mut [Frame]) -> bool {
        let mut inner = lock(&self.inner);
        if self.used_frames() + out.len() > self.limit() {
            return false;
        }
        let mut taken = 0;
        let mut number = inner.lowest;
        while taken < out.len() && number < inner.sections.len() {
            match &mut inner.sections[number] {
                Some(section) if section.free_count > 0 && !section.leaving => {
                    let within = section.take_lowest();
                    out[taken] = Frame((number * SECTION_FRAMES + within) as u32);
                    taken += 1;
                }
                _ => number += 1,
            }
        }
        if taken < out.len() {
            out[..taken].iter().for_each(|frame| inner.give(*frame));
            return false;
        }
        inner.lowest = number;
        self.used_frames.fetch_add(taken, Ordering::Relaxed);
        true
    }

    /// Gives frames back.
    pub(super) fn give(&self, frames: impl Iterator<Item = Frame>) {
        let mut inner = lock(&self.inner);
        let count = frames.map(|frame| inner.give(frame)).count();
        self.used_frames.fetch_sub(count, Ordering::Relaxed);
    }

    /// Brings one more section on line, faulted in. Errors: no memory; `QuotaExceeded` when every
    /// possible section is on line.
    pub(super) fn bring_online(&self) -> io::Result<()> {
        // No server waits for it.
        let _making = self.durable.is_some().then(|| lock(&self.making));
        let number = lock(&self.inner).sections.iter().position(Option::is_none);
        let Some(number) = number else { return Err(io::ErrorKind::QuotaExceeded.into()) };
        self.put_online(number)
    }

    /// Where the number is not kept from others (there is no memory with a place for it), another
    /// one may be found.
    fn put_online(&self, number: usize) -> io::Result<()> {
        let memory = match &self.durable {
            None => Memory::Own(Mapping::populated(SECTION_BYTES)?),
            Some((durable, on_line)) => {
                let start = durable.populate_section(number)?;
                on_line[number].store(1, Ordering::Release);
                Memory::Durable(start)
            }
        };
        let section = Box::new(Section {
            memory,
            free: [u64::MAX; SECTION_FRAMES / 64],
            free_count: SECTION_FRAMES,
            leaving: false,
        });
        let mut inner = lock(&self.inner);
        let is_own = matches!(section.memory, Memory::Own(_));
        let free = || inner.sections.iter().position(Option::is_none);
        let number = if is_own { free().ok_or(io::ErrorKind::QuotaExceeded)? } else { number };
        self.bases[number].store(section.memory.as_ptr(), Ordering::Release);
        inner.sections[number] = Some(section);
        inner.lowest = inner.lowest.min(number);
        self.online.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Takes over the sections that another process has left, all frames free.
    pub(super) fn adopt(&self) -> io::Result<()> {
        let Some((_, on_line)) = &self.durable else { return Ok(()) };
        let numbers =
            (0..).zip(on_line.iter()).filter(|(_, word)| word.load(Ordering::Acquire) != 0);
        numbers.map(|(number, _)| number).try_for_each(|number| self.put_online(number))
    }

    /// Takes frames that were in use in the process before; `false` if one is not there, or taken.
    pub(super) fn retake(&self, frames: impl Iterator<Item = Frame>) -> bool {
        let mut inner = lock(&self.inner);
        for frame in frames {
            let within = frame.0 as usize % SECTION_FRAMES;
            match inner.sections.get_mut(frame.section()) {
                Some(Some(section)) if section.is_free(within) => {
                    section.free[within / 64] &= !(1 << (within % 64));
                    section.free_count -= 1;
                }
                _ => return false,
            }
            self.used_frames.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Makes a section give out no more frames (`leaving`), or undoes it.
    /// `false`: there is no such section.
    pub(super) fn set_leaving(&self, number: usize, leaving: bool) -> bool {
        let mut inner = lock(&self.inner);
        let Some(Some(section)) = inner.sections.get_mut(number) else { return false };
        section.leaving = leaving;
        inner.lowest = inner.lowest.min(number);
        true
    }

    /// Unmaps a section in which no frame is in use; `false` if there is none such at `number`.
    pub(super) fn take_offline(&self, number: usize) -> bool {
        let mut inner = lock(&self.inner);
        let Some(slot) = inner.sections.get_mut(number) else { return false };
        if slot.as_ref().is_none_or(|section| section.free_count < SECTION_FRAMES) {
            return false;
        }
        self.bases[number].store(std::ptr::null_mut(), Ordering::Release);
        let section = slot.take();
        self.online.fetch_sub(1, Ordering::Relaxed);
        if let Some((durable, on_line)) = &self.durable {
            on_line[number].store(0, Ordering::Release);
            // Under the lock: nobody brings it on line again meanwhile.
            durable.release_section(number);
        }
        drop(inner);
        drop(section);
        true
    }

    /// Frames in use in each section on line, by its number.
    pub(super) fn usage(&self) -> Vec<(usize, usize)> {
        let mut usage = Vec::with_capacity(self.possible());
        let inner = lock(&self.inner);
        let used = |section: &Section| SECTION_FRAMES - section.free_count;
        let online = (0..).zip(&inner.sections);
        usage.extend(online.filter_map(|(n, s)| Some((n, used(s.as_deref()?)))));
        usage
    }

    /// Number of the highest section on line that is wholly free.
    pub(super) fn highest_empty(&self) -> Option<usize> {
        let inner = lock(&self.inner);
        inner.sections.iter().rposition(|slot| {
            slot.as_ref().is_some_and(|section| section.free_count == SECTION_FRAMES)
        })
    }

    /// A pointer `offset` bytes into a frame of a section that is on line.
    ///
    /// The section stays on line while the frame is in use, so the pointer is good for as long as
    /// the caller keeps the frame's zspage alive, for the rest of the frame.
    fn pointer(&self, frame: Frame, offset: usize) -> *mut u8 {
        let base = self.bases[frame.section()].load(Ordering::Acquire);
        assert!(!base.is_null() && offset < PAGE_BYTES, "{frame:?} of a section that is off line");
        let within = frame.0 as usize % SECTION_FRAMES * PAGE_BYTES + offset;
        // SAFETY: a section is SECTION_BYTES long and `within` is below that.
        unsafe { base.add(within) }
    }

    /// The header word at `offset` (a multiple of 8) of a frame.
    ///
    /// Headers are read by compaction while others write theirs, so they are only ever accessed as
    /// atomics.
    pub(super) fn header(&self, frame: Frame, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(size_of::<u64>()));
        // SAFETY: aligned (sections are page-aligned, the offset was checked) and inside the frame,
        // which stays mapped while its zspage is in use, as `pointer` says; callers reach a header
        // only through a zspage in use. No plain access ever overlaps it: payloads and headers of a
        // class never change places while the zspage lives.
        unsafe { AtomicU64::from_ptr(self.pointer(frame, offset).cast()) }
    }

    /// Copies `bytes` into a frame.
    ///
    /// The caller owns the object there: it has just allocated it and told nobody, or holds its
    /// entry's lock.
    pub(super) fn write(&self, frame: Frame, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= PAGE_BYTES);
        // SAFETY: in bounds of the frame, by the assertion; not overlapping, since `bytes` cannot
        // be a borrow of pool memory (none is ever made); not racing, since the caller owns it.
        unsafe {
            let to = self.pointer(frame, offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies out of a frame. The caller owns the object there, as for [`Self::write`].
    pub(super) fn read(&self, frame: Frame, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= PAGE_BYTES);
        // SAFETY: as in `write`, with the direction turned.
        unsafe {
            let from = self.pointer(frame, offset);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
    }

    /// Recounts; panics with the difference.
    pub(super) fn check(&self, used: &[(Frame, SwapEntry)]) {
        let inner = lock(&self.inner);
        let mut free = 0;
        for section in inner.sections.iter().flatten() {
            let bits: u32 = section.free.iter().map(|word| word.count_ones()).sum();
            assert_eq!(bits as usize, section.free_count);
            free += section.free_count;
        }
        let online = inner.sections.iter().flatten().count();
        assert_eq!(online, self.online());
        assert_eq!(online * SECTION_FRAMES - free, self.used_frames());
        for (frame, owner) in used {
            let section = inner.sections[frame.section()].as_ref();
            let section = section.unwrap_or_else(|| panic!("{frame:?} of {owner:?} is off line"));
            assert!(!section.is_free(frame.0 as usize % SECTION_FRAMES), "{frame:?} is free");
        }
    }
}

impl Inner {
    fn give(&mut self, frame: Frame) {
        let section = self.sections[frame.section()]
            .as_mut()
            .expect("a section with a frame in use stays on line");
        section.give(frame.0 as usize % SECTION_FRAMES);
        self.lowest = self.lowest.min(frame.section());
    }
}

impl Section {
    fn take_lowest(&mut self) -> usize {
        let (at, word) = (0..).zip(&mut self.free).find(|(_, word)| **word != 0).expect("counted");
        let bit = word.trailing_zeros() as usize;
        *word &= *word - 1;
        self.free_count -= 1;
        at * 64 + bit
    }

    fn give(&mut self, within: usize) {
        assert!(!self.is_free(within), "a frame is given back once");
        self.free[within / 64] |= 1 << (within % 64);
        self.free_count += 1;
    }

    fn is_free(&self, within: usize) -> bool {
        self.free[within / 64] & 1 << (within % 64) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_from_the_lowest_section_and_all_or_nothing() {
        let sections = Sections::new(2 * SECTION_BYTES, None);
        assert!(!sections.take(&mut [Frame(0); 1]), "nothing is on line");
        sections.bring_online().unwrap();
        sections.bring_online().unwrap();
        assert_eq!(sections.bring_online().unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
        let mut frames = vec![Frame(0); 2 * SECTION_FRAMES - 3];
        assert!(sections.take(&mut frames));
        assert_eq!(frames[5], Frame(5));
        assert!(!sections.take(&mut [Frame(0); 4]));
        assert_eq!(sections.free_frames(), 3);
        sections.give([frames[9]].into_iter());
        let mut one = [Frame(0)];
        assert!(sections.take(&mut one));
        assert_eq!(one, [Frame(9)]);
    }

    #[test]
    fn only_an_empty_section_goes_off_line() {
        let sections = Sections::new(2 * SECTION_BYTES, None);
        sections.bring_online().unwrap();
        let mut frame = [Frame(0)];
        assert!(sections.take(&mut frame));
        assert!(!sections.take_offline(0));
        assert!(!sections.take_offline(1));
        sections.give(frame.into_iter());
        assert_eq!(sections.highest_empty(), Some(0));
        assert!(sections.take_offline(0));
        assert_eq!((sections.online(), sections.free_frames()), (0, 0));
    }
}

//! The pool's memory: sections of 2 MiB, frames of a page.
//!
//! A section is brought on line whole and given back whole, so the pool grows and shrinks in steps
//! of 2 MiB. [`SectionState`] has the table of states. The pool takes frames from the lowest
//! section with free ones, so the highest sections become empty. All frames are faulted in: a store
//! never waits for the kernel to find memory.

#![expect(
    unsafe_code,
    reason = "frames are raw memory: an object's owner holds its entry's lock; a section with a frame in use stays mapped; headers are atomics"
)]

mod bytes;
mod check;

use super::size_class::FRAMES_MAX;
use super::state::SectionState;
use crate::bits::Bits;
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, Values};
use crate::page::PAGE_BYTES;
use crate::sync::{Mutex, lock};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use uzswap_sys::map::Mapping;
use uzswap_sys::node::Nodes;

/// Frames in a section: 2 MiB, one huge page.
pub(crate) const SECTION_FRAMES: usize = 512;
pub(crate) const SECTION_BYTES: usize = SECTION_FRAMES * PAGE_BYTES;

/// A page of the pool's memory: its section and its index in the section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame(pub(super) u32);

impl Frame {
    pub(super) fn section(self) -> usize {
        self.0 as usize / SECTION_FRAMES
    }
}

enum SectionMemory {
    Own(Mapping),
    /// In memory that outlives the process, which [`Sections`] owns.
    Durable(NonNull<u8>),
}

// SAFETY: plain memory, of the process or of `Sections`, with no tie to the thread that made it.
unsafe impl Send for SectionMemory {}

impl SectionMemory {
    fn start(&self) -> NonNull<u8> {
        match self {
            Self::Own(mapping) => NonNull::new(mapping.as_ptr()).expect("it is mapped"),
            Self::Durable(start) => *start,
        }
    }
}

/// A section with memory.
struct Section {
    memory: SectionMemory,
    /// A set bit is a free frame.
    free: [u64; SECTION_FRAMES / 64],
    free_count: usize,
}

struct SectionSlot {
    state: SectionState,
    section: Option<Box<Section>>,
    /// Free frames at the last update of its node's sets.
    noted: usize,
}

struct SectionTable {
    slots: Box<[SectionSlot]>,
    /// For each node.
    nodes: Box<[OnNode]>,
    absent: Bits,
}

/// The online sections of a node.
struct OnNode {
    /// Sections with a free frame, and sections with free frames only.
    with_room: Bits,
    empty: Bits,
    free_frames: usize,
}

/// All sections.
pub(super) struct Sections {
    /// Start of each section; null where there is none. A thread with an object of the section
    /// reads it without the lock: the object keeps the section on line.
    bases: Box<[AtomicPtr<u8>]>,
    /// The node of each section that has memory.
    on_node: Box<[AtomicU8]>,
    nodes: Arc<Nodes>,
    /// True if a node must have no memory of the pool.
    closed: Box<[AtomicBool]>,
    /// True, for each node, if the last section that was made for it got memory of another node.
    short: Box<[AtomicBool]>,
    /// True, for each node, if a store has waited in vain for memory since the last section was
    /// made.
    late: Box<[AtomicBool]>,
    inner: Mutex<SectionTable>,
    /// Free frames of each node's sections that are online.
    free: Box<[AtomicUsize]>,
    /// Sections that have memory.
    online: AtomicUsize,
    /// Sections that must have no memory.
    offline: AtomicUsize,
    used_frames: AtomicUsize,
    /// The maximum number of frames in use.
    limit: AtomicUsize,
    /// Memory that outlives the process, with the state of each section.
    durable: Option<(Arc<Durable>, Values<DurableAtomic<AtomicU32>>)>,
}

/// The state of a section in memory that outlives the process. There a section with memory is never
/// [`kept::NONE`], so no section is forgotten, whenever the process ends.
mod kept {
    pub(super) const NONE: u32 = 0;
    pub(super) const ONLINE: u32 = 1;
    pub(super) const OFFLINE: u32 = 2;
}

/// The reason why a section keeps its state.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The section's present state does not allow the change.
    State(SectionState),
    /// No other section may have memory.
    Last,
    /// The machine has no memory.
    Memory(io::Error),
}

/// The number of sections for `bytes_max` bytes.
pub(crate) fn sections_of(bytes_max: usize) -> usize {
    bytes_max.div_ceil(SECTION_BYTES).max(1)
}

impl Sections {
    /// Space for `bytes_max` bytes; no section is on line yet.
    pub(super) fn new(
        bytes_max: usize,
        durable: Option<&Arc<Durable>>,
        nodes: &Arc<Nodes>,
    ) -> Self {
        let count = sections_of(bytes_max);
        let slot = |_| SectionSlot { state: SectionState::Absent, section: None, noted: 0 };
        let bits = || Bits::new(count);
        let on_node = |_| OnNode { with_room: bits(), empty: bits(), free_frames: 0 };
        let inner = SectionTable {
            slots: (0..count).map(slot).collect(),
            nodes: (0..nodes.count()).map(on_node).collect(),
            absent: bits(),
        };
        (0..count).for_each(|number| inner.absent.set(number, true));
        Self {
            durable: durable.map(|durable| (durable.clone(), durable.sections_on_line())),
            bases: (0..count).map(|_| AtomicPtr::default()).collect(),
            on_node: (0..count).map(|_| AtomicU8::new(0)).collect(),
            nodes: nodes.clone(),
            closed: (0..nodes.count()).map(|_| AtomicBool::new(false)).collect(),
            short: (0..nodes.count()).map(|_| AtomicBool::new(false)).collect(),
            late: (0..nodes.count()).map(|_| AtomicBool::new(false)).collect(),
            inner: Mutex::new(inner),
            free: (0..nodes.count()).map(|_| AtomicUsize::new(0)).collect(),
            online: AtomicUsize::new(0),
            offline: AtomicUsize::new(0),
            used_frames: AtomicUsize::new(0),
            limit: AtomicUsize::new(count * SECTION_FRAMES),
        }
    }

    /// Sets the maximum number of frames in use. While more are in use, no frame is given out.
    pub(super) fn set_limit(&self, frames: usize) {
        self.limit.store(frames, Ordering::Relaxed);
    }

    /// The maximum number of frames in use: the set limit, or fewer if fewer sections may have
    /// memory.
    pub(super) fn limit(&self) -> usize {
        let sections = self.possible() - self.offline.load(Ordering::Relaxed);
        self.limit.load(Ordering::Relaxed).min(sections * SECTION_FRAMES)
    }

    /// Frames of zspages.
    pub(super) fn used_frames(&self) -> usize {
        self.used_frames.load(Ordering::Relaxed)
    }

    /// Free frames that can be taken; those of a section that is going offline cannot.
    pub(super) fn free_frames(&self) -> usize {
        self.free.iter().map(|free| free.load(Ordering::Relaxed)).sum()
    }

    /// Sections that have memory.
    pub(super) fn online(&self) -> usize {
        self.online.load(Ordering::Relaxed)
    }

    /// The number of sections that the pool is made for.
    pub(super) fn possible(&self) -> usize {
        self.bases.len()
    }

    /// True if the pool could have more sections.
    pub(super) fn can_grow(&self) -> bool {
        self.online() + self.offline.load(Ordering::Relaxed) < self.possible()
    }

    /// Free frames of a node that can be taken.
    pub(super) fn free_on(&self, node: usize) -> usize {
        self.free[node].load(Ordering::Relaxed)
    }

    /// The node of a section with memory.
    pub(super) fn node_of(&self, section: usize) -> usize {
        self.on_node[section].load(Ordering::Acquire).into()
    }

    /// Stops a node from getting memory, or lets it get memory again.
    pub(super) fn close(&self, node: usize, is_closed: bool) {
        self.closed[node].store(is_closed, Ordering::Relaxed);
    }

    pub(super) fn is_closed(&self, node: usize) -> bool {
        self.closed[node].load(Ordering::Relaxed)
    }

    /// True if the kernel had no memory on a node at the last request.
    pub(super) fn is_short(&self, node: usize) -> bool {
        self.short[node].load(Ordering::Relaxed)
    }

    /// True if the next section will probably be on this node and is not late.
    pub(super) fn comes_on(&self, node: usize) -> bool {
        let is_below_limit = self.used_frames() + FRAMES_MAX <= self.limit();
        !self.late[node].load(Ordering::Relaxed)
            && !self.is_short(node)
            && is_below_limit
            && self.can_grow()
    }

    /// Notes that a store waited in vain for memory on a node.
    pub(super) fn note_late(&self, node: usize) {
        self.late[node].store(true, Ordering::Relaxed);
    }

    /// Takes `out.len()` frames of a node, or none at all. Objects that move may exceed the limit:
    /// their old frames are free in a moment.
    pub(super) fn take(&self, out: &mut [Frame], node: usize, is_move: bool) -> bool {
        let mut inner = lock(&self.inner);
        if !is_move && self.used_frames() + out.len() > self.limit() {
            return false;
        }
        let mut taken = 0;
        while taken < out.len() {
            let Some(number) = inner.nodes[node].with_room.first() else {
                out[..taken].iter().for_each(|frame| self.give_one(&mut inner, *frame));
                return false;
            };
            let section = inner.section(number);
            while taken < out.len() && section.free_count > 0 {
                out[taken] = Frame((number * SECTION_FRAMES + section.take_lowest()) as u32);
                taken += 1;
            }
            self.note(&mut inner, number);
        }
        self.used_frames.fetch_add(taken, Ordering::Relaxed);
        true
    }

    pub(super) fn give(&self, frames: impl Iterator<Item = Frame>) {
        let mut inner = lock(&self.inner);
        let count = frames.map(|frame| self.give_one(&mut inner, frame)).count();
        self.used_frames.fetch_sub(count, Ordering::Relaxed);
    }

    /// Brings one more section online, faulted in, on `node` if this node has memory. Fails if
    /// there is no memory. The error is `QuotaExceeded` if all possible sections are online.
    pub(super) fn bring_any_online(&self, node: usize) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        let Some(number) = inner.absent.first() else {
            return Err(io::ErrorKind::QuotaExceeded.into());
        };
        self.turn(&mut inner, number, SectionState::GoingOnline);
        drop(inner);
        self.make(number, SectionState::Absent, node)
    }

    /// Brings a section online, if it is not.
    pub(super) fn bring_online(&self, number: usize) -> Result<(), Refused> {
        let mut inner = lock(&self.inner);
        let before = inner.slots[number].state;
        match before {
            SectionState::Online => return Ok(()),
            SectionState::Absent | SectionState::Offline => {}
            SectionState::GoingOnline | SectionState::GoingOffline => {
                return Err(Refused::State(before));
            }
        }
        self.turn(&mut inner, number, SectionState::GoingOnline);
        drop(inner);
        let here = self.nodes.here();
        let open = self.nodes.nearest(here).iter().find(|node| !self.is_closed(**node));
        self.make(number, before, *open.unwrap_or(&here)).map_err(Refused::Memory)
    }

    /// Makes the memory of a section that is going online. After an error it has its old state.
    fn make(&self, number: usize, before: SectionState, node: usize) -> io::Result<()> {
        let made = self.populate(number, before, node).map(|memory| {
            Box::new(Section {
                memory,
                free: [u64::MAX; SECTION_FRAMES / 64],
                free_count: SECTION_FRAMES,
            })
        });
        let mut inner = lock(&self.inner);
        let section = match made {
            Ok(section) => section,
            Err(error) => {
                self.turn(&mut inner, number, before);
                return Err(error);
            }
        };
        let start = section.memory.start();
        let asked = node;
        let node = self.nodes.of_page(start, asked);
        self.short[asked].store(node != asked, Ordering::Relaxed);
        self.late[asked].store(false, Ordering::Relaxed);
        self.on_node[number].store(node as u8, Ordering::Release);
        self.bases[number].store(start.as_ptr(), Ordering::Release);
        inner.slots[number].section = Some(section);
        self.turn(&mut inner, number, SectionState::Online);
        if before == SectionState::Offline {
            self.offline.fetch_sub(1, Ordering::Relaxed);
        }
        self.online.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the memory on the given node if possible. A kernel without such a call places the
    /// memory anywhere, and reports its node afterwards.
    fn populate(
        &self,
        number: usize,
        before: SectionState,
        node: usize,
    ) -> io::Result<SectionMemory> {
        let prefer = |start| drop(self.nodes.prefer(start, SECTION_BYTES, node));
        let Some((durable, kept)) = &self.durable else {
            let memory = SectionMemory::Own(Mapping::reserved(SECTION_BYTES)?);
            prefer(memory.start());
            if let SectionMemory::Own(mapping) = &memory {
                mapping.populate()?;
            }
            return Ok(memory);
        };
        kept[number].store(kept::ONLINE, Ordering::Release);
        prefer(durable.section(number));
        let made = durable.populate_section(number);
        if made.is_err() {
            durable.release_section(number);
            kept[number].store(kept_as(before), Ordering::Release);
        }
        Ok(SectionMemory::Durable(made?))
    }

    /// Takes over the sections that another process has left, with all frames free.
    pub(super) fn adopt(&self) -> io::Result<()> {
        let Some((_, kept)) = &self.durable else { return Ok(()) };
        for (number, word) in kept.iter().enumerate() {
            let taken = match word.load(Ordering::Acquire) {
                kept::NONE => continue,
                kept::OFFLINE => self.keep_offline(number),
                _ => self.bring_online(number),
            };
            taken.map_err(|refused| match refused {
                Refused::Memory(error) => error,
                Refused::State(_) | Refused::Last => io::Error::other("no section of a pool"),
            })?;
        }
        Ok(())
    }

    /// Takes frames that the previous process used; `false` if one does not exist, or is taken.
    pub(super) fn retake(&self, frames: impl Iterator<Item = Frame>) -> bool {
        let mut inner = lock(&self.inner);
        for frame in frames {
            let within = frame.0 as usize % SECTION_FRAMES;
            let slot = inner.slots.get_mut(frame.section());
            match slot.and_then(|slot| slot.section.as_mut()) {
                Some(section) if section.is_free(within) => {
                    section.free[within / 64] &= !(1 << (within % 64));
                    section.free_count -= 1;
                }
                _ => return false,
            }
            self.note(&mut inner, frame.section());
            self.used_frames.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Stops an online section from giving out frames.
    pub(super) fn begin_offline(&self, number: usize) -> Result<(), Refused> {
        let mut inner = lock(&self.inner);
        match inner.slots[number].state {
            SectionState::Online => {
                self.turn(&mut inner, number, SectionState::GoingOffline);
                Ok(())
            }
            other => Err(Refused::State(other)),
        }
    }

    /// Puts a section that is going offline back online.
    pub(super) fn stay_online(&self, number: usize) {
        self.turn(&mut lock(&self.inner), number, SectionState::Online);
    }

    /// Keeps a section that has no memory from getting memory.
    pub(super) fn keep_offline(&self, number: usize) -> Result<(), Refused> {
        let mut inner = lock(&self.inner);
        match inner.slots[number].state {
            SectionState::Offline => return Ok(()),
            SectionState::Absent => {}
            other => return Err(Refused::State(other)),
        }
        self.note_offline()?;
        self.turn(&mut inner, number, SectionState::Offline);
        if let Some((_, kept)) = &self.durable {
            kept[number].store(kept::OFFLINE, Ordering::Release);
        }
        Ok(())
    }

    /// Counts one more section without memory, unless it is the last one. The caller has the lock.
    fn note_offline(&self) -> Result<(), Refused> {
        let one_more = |offline| (offline + 1 < self.possible()).then_some(offline + 1);
        let noted = self.offline.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        noted.map(drop).map_err(|_| Refused::Last)
    }

    /// True if only one section may have memory.
    pub(super) fn is_last(&self) -> bool {
        self.offline.load(Ordering::Relaxed) + 1 >= self.possible()
    }

    /// Gives back the memory of a section that is going offline and has no frame in use; `false` if
    /// it has one.
    pub(super) fn finish_offline(&self, number: usize, to: SectionState) -> Result<bool, Refused> {
        let mut inner = lock(&self.inner);
        let is_empty = |section: &Section| section.free_count == SECTION_FRAMES;
        if !inner.slots[number].section.as_deref().is_some_and(is_empty) {
            return Ok(false);
        }
        if to == SectionState::Offline {
            self.note_offline()?;
        }
        self.bases[number].store(std::ptr::null_mut(), Ordering::Release);
        let section = inner.slots[number].section.take();
        self.online.fetch_sub(1, Ordering::Relaxed);
        // Unlocks first: giving memory back takes longer than a store should wait. No other thread
        // changes a section that is going offline.
        drop(inner);
        drop(section);
        if let Some((durable, kept)) = &self.durable {
            durable.release_section(number);
            kept[number].store(kept_as(to), Ordering::Release);
        }
        self.turn(&mut lock(&self.inner), number, to);
        Ok(true)
    }

    /// Gives back the memory of a node's highest section without a frame in use; `false` if there
    /// is none.
    pub(super) fn give_one_back(&self, node: usize) -> bool {
        let mut inner = lock(&self.inner);
        let Some(number) = inner.nodes[node].empty.last() else { return false };
        self.turn(&mut inner, number, SectionState::GoingOffline);
        drop(inner);
        matches!(self.finish_offline(number, SectionState::Absent), Ok(true))
    }

    /// Changes the state of a section.
    fn turn(&self, inner: &mut SectionTable, number: usize, to: SectionState) {
        let state = &mut inner.slots[number].state;
        let may = state.next().iter().any(|(next, _)| *next == to);
        assert!(may, "section {number} cannot become {to:?} from {state:?}");
        *state = to;
        self.note(inner, number);
    }

    /// Updates the sets for a section.
    fn note(&self, inner: &mut SectionTable, number: usize) {
        let SectionSlot { state, section, noted } = &mut inner.slots[number];
        let free = match (*state, section) {
            (SectionState::Online, Some(section)) => section.free_count,
            _ => 0,
        };
        inner.absent.set(number, *state == SectionState::Absent);
        let node = self.node_of(number);
        let on_node = &mut inner.nodes[node];
        on_node.with_room.set(number, free > 0);
        on_node.empty.set(number, free == SECTION_FRAMES);
        on_node.free_frames = on_node.free_frames + free - *noted;
        *noted = free;
        self.free[node].store(on_node.free_frames, Ordering::Relaxed);
    }

    fn give_one(&self, inner: &mut SectionTable, frame: Frame) {
        inner.section(frame.section()).give(frame.0 as usize % SECTION_FRAMES);
        self.note(inner, frame.section());
    }

    pub(super) fn states(&self) -> Vec<SectionState> {
        let mut states = Vec::with_capacity(self.possible());
        states.extend(lock(&self.inner).slots.iter().map(|slot| slot.state));
        states
    }

    /// Frames in use in each section that has memory, by its number.
    pub(super) fn usage(&self) -> Vec<(usize, usize)> {
        let mut usage = Vec::with_capacity(self.possible());
        let inner = lock(&self.inner);
        let used = |section: &Section| SECTION_FRAMES - section.free_count;
        let slots = (0..).zip(&inner.slots);
        usage.extend(slots.filter_map(|(n, slot)| Some((n, used(slot.section.as_deref()?)))));
        usage
    }
}

fn kept_as(state: SectionState) -> u32 {
    match state {
        SectionState::Absent => kept::NONE,
        SectionState::Offline => kept::OFFLINE,
        SectionState::GoingOnline | SectionState::Online | SectionState::GoingOffline => {
            kept::ONLINE
        }
    }
}

impl SectionTable {
    fn section(&mut self, number: usize) -> &mut Section {
        let section = self.slots[number].section.as_deref_mut();
        section.expect("a section with a frame in use, or to give, has memory")
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
mod tests;

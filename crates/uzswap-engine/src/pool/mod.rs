//! The memory of compressed objects: an allocator for sizes that are a large part of a page.
//!
//! [`Pool::alloc`] gives a [`Handle`], never an address. An object has the key of its owner, so
//! that [`Pool::compact`] and [`Pool::vacate`] can move it and have the owner's entry told. The
//! lock of its owner's entry keeps an object alive. A thread that reads, writes, moves or frees an
//! object has that lock, or has just allocated the object and told no other thread.
//!
//! Locks: one for each size class, for a few list operations or the copy of one zspage's objects.
//! The sections' lock is taken once for a whole zspage. The pool has no lock.

#[expect(unsafe_code, reason = "frames are raw memory, copied to and from by pointer")]
mod section;
mod size_class;
mod zspage;

mod claims;
mod places;

pub(crate) use claims::{Claim, Claims};
pub(crate) use section::Refused;
pub use section::SectionState;
pub(crate) use section::{SECTION_BYTES, SECTION_FRAMES, sections_of};
pub(crate) use size_class::{CLASSES, COMPRESSED_BYTES_MAX};
pub(crate) use zspage::Zspage;

use crate::crash_points;
use crate::durable::Durable;
use crate::ids::{Handle, SwapEntry};
use crate::page::PAGE_BYTES;
use crate::sync::{Mutex, MutexGuard, lock, try_lock};
use crossbeam_utils::CachePadded;
use section::{Frame, Sections};
use size_class::{FRAMES_MAX, SizeClass, class_of, classes};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use uzswap_sys::node::Nodes;
use zspage::{NO_CLASS, NO_OBJECT, NONE, Zspages};

/// The header in front of an object: its owner, and the page's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) owner: SwapEntry,
    pub(crate) checksum: u32,
}

/// Owner of an object that is allocated and not written yet; it must not be moved.
const BUSY: u32 = u32::MAX - 1;
/// Owner of a freed object; then the low half is the next one of the free list.
const FREE: u32 = u32::MAX;

impl Header {
    fn to_bits(self) -> u64 {
        u64::from(self.owner.0) << 32 | u64::from(self.checksum)
    }

    fn from_bits(bits: u64) -> Self {
        Self { owner: SwapEntry((bits >> 32) as u32), checksum: bits as u32 }
    }
}

/// No frame on line is free, the limit is reached, or no descriptor is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoMemory;

/// Lists of zspages by how full they are. Full ones are on no list.
const GROUPS: usize = 8;
const FULL: u8 = GROUPS as u8;
/// The group of a zspage that is being emptied, or lies in a section that is. It is on no list, so
/// it gets no new object.
const LEAVING: u8 = FULL + 1;

/// The zspages of a size class on a node.
struct Class {
    node: usize,
    heads: [u32; GROUPS],
    zspages: usize,
    used: usize,
}

/// It has cache lines of its own: threads that store objects of other sizes do not write to them.
struct SharedClass {
    class: Mutex<Class>,
    /// Frames that compaction could free. It is written with the class locked, so that a sum over
    /// all classes takes no lock.
    slack: AtomicUsize,
}

/// Moves an owner from one handle to another: tries to lock the entry, checks that it still has
/// `from`, calls `copy`, and sets `to`. `false`: not now.
pub(crate) type Relocate<'a> = &'a dyn Fn(SwapEntry, Handle, Handle, &dyn Fn()) -> bool;

/// One row of the table of size classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes of an object, its 8-byte header included.
    pub size: usize,
    /// Frames of a zspage.
    pub frames_per_zspage: usize,
    /// Objects in a zspage.
    pub objects_per_zspage: usize,
    /// Zspages there are.
    pub zspages: usize,
    /// Objects in use.
    pub used: usize,
    /// Objects that fit in the zspages.
    pub allocated: usize,
}

/// The reason why an object stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stuck {
    /// No other section has space for it.
    NoRoom,
    /// Its owner's entry is locked.
    Held(SwapEntry),
    /// It is allocated, and not written yet.
    New,
}

/// The objects left in a section that was to be emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Left {
    /// The reason, for one of the objects.
    pub(crate) stuck: Stuck,
    pub(crate) objects: usize,
    /// Bytes of their frames.
    pub(crate) bytes: usize,
}

/// See the module.
pub(crate) struct Pool {
    sections: Sections,
    zspages: Zspages,
    nodes: Arc<Nodes>,
    /// All classes of the first node, then of the second, and so on: a zspage's frames are on one
    /// node.
    classes: Box<[CachePadded<SharedClass>]>,
    /// Objects that are on another node than the nearest.
    elsewhere: AtomicU64,
}

impl Pool {
    /// A pool that can grow to `bytes_max` (rounded up to sections). It is empty.
    pub(crate) fn new(
        bytes_max: usize,
        durable: Option<&Arc<Durable>>,
        nodes: &Arc<Nodes>,
    ) -> Self {
        let sections = Sections::new(bytes_max, durable, nodes);
        let frames = sections.possible() * SECTION_FRAMES;
        let class = |at| {
            let class = Class { node: at / CLASSES, heads: [NONE; GROUPS], zspages: 0, used: 0 };
            CachePadded::new(SharedClass { class: Mutex::new(class), slack: AtomicUsize::new(0) })
        };
        Self {
            sections,
            zspages: Zspages::new(frames, durable),
            classes: (0..CLASSES * nodes.count()).map(class).collect(),
            nodes: nodes.clone(),
            elsewhere: AtomicU64::new(0),
        }
    }

    /// Allocates an object of `bytes`: on the node of the caller's processor, or else, unless
    /// `only_here`, on the nearest node with space.
    pub(crate) fn alloc(&self, bytes: usize, only_here: bool) -> Result<Handle, NoMemory> {
        let number = class_of(bytes);
        let here = self.nodes.here();
        let others = if only_here { 1 } else { self.nodes.count() };
        for node in self.nodes.nearest(here).iter().take(others) {
            let made = self.alloc_in(number, &mut lock(self.class(number, *node)), false);
            if made.is_ok() {
                if *node != here {
                    self.elsewhere.fetch_add(1, Relaxed);
                }
                return made;
            }
        }
        Err(NoMemory)
    }

    fn class(&self, number: usize, node: usize) -> &Mutex<Class> {
        &self.classes[node * CLASSES + number].class
    }

    /// Updates the frames that compaction of a class could free: the whole zspages that its free
    /// objects add up to.
    fn note_slack(&self, number: usize, class: &Class) {
        let SizeClass { objects, frames, .. } = classes()[number];
        let free = class.zspages * usize::from(objects) - class.used;
        let slack = free / usize::from(objects) * usize::from(frames);
        self.classes[class.node * CLASSES + number].slack.store(slack, Relaxed);
    }

    /// The node of an object.
    #[cfg(feature = "testing")]
    pub(crate) fn node_of_object(&self, handle: Handle) -> usize {
        self.node_of(handle.zspage())
    }

    /// The node of a zspage in use.
    fn node_of(&self, zspage: u32) -> usize {
        self.sections.node_of(self.zspages.get(zspage).frame(0).section())
    }

    /// Writes an object just allocated.
    pub(crate) fn write(&self, handle: Handle, header: Header, bytes: &[u8]) {
        self.pieces(handle, bytes.len(), |frame, offset, range| {
            crash_points::store();
            self.sections.write(frame, offset, &bytes[range]);
        });
        self.set_header(handle, header);
    }

    /// Copies the first `out.len()` bytes of an object.
    pub(crate) fn read(&self, handle: Handle, out: &mut [u8]) -> Header {
        self.pieces(handle, out.len(), |frame, offset, range| {
            self.sections.read(frame, offset, &mut out[range]);
        });
        self.header(handle)
    }

    /// An object's header.
    pub(crate) fn header(&self, handle: Handle) -> Header {
        Header::from_bits(self.header_bits(handle))
    }

    /// Gives an object a new owner or checksum.
    pub(crate) fn set_header(&self, handle: Handle, header: Header) {
        debug_assert!(header.owner.0 < BUSY);
        self.set_header_bits(handle, header.to_bits());
    }

    /// Frees an object; an empty zspage gives its frames back.
    pub(crate) fn free(&self, handle: Handle) {
        let number = self.class_number(handle.zspage());
        let mut class = lock(self.class(number, self.node_of(handle.zspage())));
        self.free_in(number, &mut class, handle);
    }

    /// Limits the frames in use to `bytes`.
    pub(crate) fn set_limit(&self, bytes: usize) {
        self.sections.set_limit(bytes / PAGE_BYTES);
    }

    /// Most bytes of frames in use.
    pub(crate) fn limit(&self) -> usize {
        self.sections.limit() * PAGE_BYTES
    }

    /// Bytes of frames that compaction could free.
    pub(crate) fn slack_bytes(&self) -> usize {
        let slack = self.classes.iter().map(|shared| shared.slack.load(Relaxed));
        slack.sum::<usize>() * PAGE_BYTES
    }

    /// Bytes of frames in use.
    pub(crate) fn bytes(&self) -> usize {
        self.sections.used_frames() * PAGE_BYTES
    }

    /// Bytes mapped: frames in use and free ones on line.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.sections.online() * SECTION_BYTES
    }

    /// Bytes of free frames that can be taken.
    pub(crate) fn free_bytes(&self) -> usize {
        self.sections.free_frames() * PAGE_BYTES
    }

    /// True if descriptors are ready for `bytes` of frames, in zspages of any class.
    pub(crate) fn has_descriptors(&self, bytes: usize) -> bool {
        self.zspages.has_ready(bytes / PAGE_BYTES)
    }

    /// Bytes of descriptors.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.zspages.bytes() + size_of_val(&*self.classes)
    }

    /// True if the maintaining thread is about to make memory on the node of the caller's
    /// processor, so that a store without space there could wait for it.
    pub(crate) fn comes_here(&self) -> bool {
        self.nodes.count() > 1 && {
            let here = self.nodes.here();
            self.served().any(|node| node == here) && self.sections.comes_on(here)
        }
    }

    /// Notes that no store should wait for memory on the caller's node before there is some.
    pub(crate) fn note_late(&self) {
        self.sections.note_late(self.nodes.here());
    }

    /// Nodes that stores take memory of first: those with processors.
    pub(crate) fn served(&self) -> impl Iterator<Item = usize> {
        let is_served =
            |node: &usize| self.nodes.has_cpus(*node) && !self.sections.is_closed(*node);
        (0..self.nodes.count()).filter(is_served)
    }

    /// The node of the caller's processor.
    pub(crate) fn node_here(&self) -> usize {
        self.nodes.here()
    }

    /// Bytes of free frames on line, for stores on this processor.
    pub(crate) fn free_bytes_here(&self) -> usize {
        match self.nodes.count() {
            1 => self.free_bytes(),
            _ => self.sections.free_on(self.nodes.here()) * PAGE_BYTES,
        }
    }

    /// Nodes that each keep memory free.
    pub(crate) fn served_count(&self) -> usize {
        self.served().count().max(1)
    }

    /// Bytes that all nodes together keep free, `reserve` each.
    pub(crate) fn reserve_of_all(&self, reserve: usize) -> usize {
        reserve * self.served_count()
    }

    /// Objects that are on another node than the nearest, which had no space.
    pub(crate) fn stored_elsewhere(&self) -> u64 {
        self.elsewhere.load(Relaxed)
    }

    /// Brings sections on line until `reserve` bytes and their descriptors are free on each node
    /// that `is_meant`. Allocates, and may wait for the kernel. Errors: the machine has no more
    /// memory.
    pub(crate) fn provision(
        &self,
        reserve: usize,
        is_meant: impl Fn(usize) -> bool,
    ) -> std::io::Result<()> {
        self.zspages.provision(reserve / PAGE_BYTES)?;
        // Other nodes make up for a node without enough memory.
        let enough = self.reserve_of_all(reserve);
        let lacks = |node: &usize| {
            self.sections.free_on(*node) * PAGE_BYTES < reserve
                && (!self.sections.is_short(*node) || self.free_bytes() < enough)
        };
        // One section at a time, to the node with the least: stores go on meanwhile, and one node
        // must not delay the others.
        while self.sections.can_grow() {
            let meant = self.served().filter(|node| is_meant(*node) && lacks(node));
            let least = meant.min_by_key(|node| self.sections.free_on(*node));
            let Some(node) = least else { break };
            self.sections.bring_any_online(node)?;
        }
        Ok(())
    }

    /// Unmaps wholly free sections, the highest first, while `reserve` bytes stay free on each node
    /// that `is_meant`; the bytes given back.
    pub(crate) fn give_back(&self, reserve: usize, is_meant: impl Fn(usize) -> bool) -> usize {
        let mut given = 0;
        for node in (0..self.nodes.count()).filter(|node| is_meant(*node)) {
            let reserve = if self.served().any(|served| served == node) { reserve } else { 0 };
            while self.sections.free_on(node) * PAGE_BYTES >= reserve + SECTION_BYTES
                && self.sections.give_one_back(node)
            {
                given += SECTION_BYTES;
            }
        }
        given
    }

    /// One step of compaction in one class, on the first node that needs one: moves the objects of
    /// its emptiest zspage into fuller ones, if that frees its frames. `Some(moved)` if a zspage
    /// was freed.
    pub(crate) fn compact(&self, number: usize, relocate: Relocate<'_>) -> Option<usize> {
        (0..self.nodes.count()).find_map(|node| self.compact_on(number, node, relocate))
    }

    fn compact_on(&self, number: usize, node: usize, relocate: Relocate<'_>) -> Option<usize> {
        let mut class = lock(self.class(number, node));
        let per_zspage = usize::from(classes()[number].objects);
        let room = class.zspages * per_zspage - class.used;
        if room < per_zspage {
            return None;
        }
        let source = class.heads.iter().copied().find(|head| *head != NONE)?;
        let moved = usize::from(self.zspages.get(source).used.load(Relaxed));
        self.empty_zspage(number, &mut class, source, false, relocate).ok().map(|()| moved)
    }

    /// Stops an online section from taking objects; [`Self::vacate`] empties it. Otherwise the
    /// objects of one of its zspages could move to its next one, and then again.
    pub(crate) fn begin_offline(&self, section: usize) -> Result<(), Refused> {
        self.sections.begin_offline(section)?;
        for number in self.zspages.numbers() {
            if let Some((_, mut class)) = self.lock_in(number, section) {
                self.unlink(&mut class, number);
                self.zspages.get(number).group.store(LEAVING, Relaxed);
            }
        }
        Ok(())
    }

    /// Moves every object out of a section that is going offline, into sections with space.
    pub(crate) fn vacate(&self, section: usize, relocate: Relocate<'_>) -> Result<(), Left> {
        let mut stuck = None;
        for number in self.zspages.numbers() {
            if let Some((class_number, mut class)) = self.lock_in(number, section)
                && let Err(why) =
                    self.empty_zspage(class_number, &mut class, number, true, relocate)
            {
                stuck = Some(why);
            }
        }
        let Some(stuck) = stuck else { return Ok(()) };
        let left = self.zspages.numbers().filter(|number| self.is_in(*number, section));
        let used = |number| usize::from(self.zspages.get(number).used.load(Relaxed));
        let objects = left.map(used).sum();
        let in_use = self.sections().into_iter().find(|(number, _)| *number == section);
        Err(Left { stuck, objects, bytes: in_use.map_or(0, |(_, frames)| frames * PAGE_BYTES) })
    }

    /// Frames in use of each section on line, by number.
    pub(crate) fn sections(&self) -> Vec<(usize, usize)> {
        self.sections.usage()
    }

    /// The table of size classes.
    pub(crate) fn class_stats(&self) -> Vec<ClassStats> {
        let row = |(number, class): (usize, &SizeClass)| {
            let (mut zspages, mut used) = (0, 0);
            for node in 0..self.nodes.count() {
                let state = lock(self.class(number, node));
                zspages += state.zspages;
                used += state.used;
            }
            ClassStats {
                size: class.size.into(),
                frames_per_zspage: class.frames.into(),
                objects_per_zspage: class.objects.into(),
                zspages,
                used,
                allocated: zspages * usize::from(class.objects),
            }
        };
        classes().iter().enumerate().map(row).collect()
    }

    fn is_in(&self, number: u32, section: usize) -> bool {
        let zspage = self.zspages.get(number);
        let class = zspage.class.load(Acquire);
        class != NO_CLASS && {
            let frames = usize::from(classes()[usize::from(class)].frames);
            (0..frames).any(|i| zspage.frame(i).section() == section)
        }
    }

    /// The locked class of a zspage that has a frame in `section`.
    fn lock_in(&self, number: u32, section: usize) -> Option<(usize, MutexGuard<'_, Class>)> {
        let class_number = self.zspages.get(number).class.load(Acquire);
        if class_number == NO_CLASS || !self.is_in(number, section) {
            return None;
        }
        // All frames of a zspage are on one node.
        let class = lock(self.class(class_number.into(), self.sections.node_of(section)));
        // The descriptor may have been freed and reused before the lock was taken.
        let is_same = self.zspages.get(number).class.load(Relaxed) == class_number;
        (is_same && self.is_in(number, section)).then_some((class_number.into(), class))
    }

    /// Puts a section that is going offline back online, with its remaining objects.
    pub(crate) fn stay_online(&self, section: usize) {
        for number in self.zspages.numbers() {
            let Some((class_number, mut class)) = self.lock_in(number, section) else { continue };
            let zspage = self.zspages.get(number);
            if zspage.group.load(Relaxed) != LEAVING {
                continue;
            }
            match zspage.used.load(Relaxed) {
                // Its last object was freed meanwhile.
                0 => self.release(class_number, &mut class, number),
                _ => self.link(class_number, &mut class, number),
            }
        }
        self.sections.stay_online(section);
    }

    /// Moves the objects of a zspage elsewhere in its class: into existing space or, with `grow`,
    /// into new zspages too. Then its frames are free. Without `grow` it stops at the first object
    /// that must stay, and lets other threads use the zspage again.
    fn empty_zspage(
        &self,
        number: usize,
        class: &mut MutexGuard<'_, Class>,
        source: u32,
        grow: bool,
        relocate: Relocate<'_>,
    ) -> Result<(), Stuck> {
        let zspage = self.zspages.get(source);
        self.unlink(class, source);
        zspage.group.store(LEAVING, Relaxed);
        let mut stuck = Ok(());
        for index in 0..zspage.fresh.load(Relaxed) {
            let from = Handle::new(source, index);
            let moved = match (self.header_bits(from) >> 32) as u32 {
                FREE => continue,
                BUSY => Err(Stuck::New),
                owner => self.move_object(number, class, from, SwapEntry(owner), grow, relocate),
            };
            stuck = stuck.and(moved);
            if moved == Err(Stuck::NoRoom) || !grow && moved.is_err() {
                stuck = moved;
                break;
            }
        }
        if zspage.used.load(Relaxed) == 0 {
            self.release(number, class, source);
            return Ok(());
        }
        if !grow {
            self.link(number, class, source);
        }
        stuck
    }

    fn move_object(
        &self,
        number: usize,
        class: &mut Class,
        from: Handle,
        owner: SwapEntry,
        grow: bool,
        relocate: Relocate<'_>,
    ) -> Result<(), Stuck> {
        if !grow && class.heads.iter().all(|head| *head == NONE) {
            return Err(Stuck::NoRoom);
        }
        if let Ok(to) = self.alloc_in(number, class, true) {
            return match relocate(owner, from, to, &|| self.copy(number, from, to)) {
                true => {
                    self.free_in(number, class, from);
                    Ok(())
                }
                false => {
                    self.free_in(number, class, to);
                    Err(Stuck::Held(owner))
                }
            };
        }
        let others = self.nodes.nearest(class.node).iter().filter(|_| grow).skip(1);
        for node in others {
            // Against the lock order, as another thread may do the reverse.
            let Some(mut other) = try_lock(self.class(number, *node)) else {
                return Err(Stuck::Held(owner));
            };
            let Ok(to) = self.alloc_in(number, &mut other, true) else { continue };
            let has_moved = relocate(owner, from, to, &|| self.copy(number, from, to));
            if !has_moved {
                self.free_in(number, &mut other, to);
                return Err(Stuck::Held(owner));
            }
            self.free_in(number, class, from);
            return Ok(());
        }
        Err(Stuck::NoRoom)
    }

    /// Copies a whole object, header included.
    fn copy(&self, number: usize, from: Handle, to: Handle) {
        let mut buffer = [0; PAGE_BYTES];
        let class = classes()[number];
        let header = if class.is_huge() { 0 } else { size_class::HEADER_BYTES };
        let bytes = &mut buffer[..usize::from(class.size) - header];
        let header = self.read(from, bytes);
        self.write(to, header, bytes);
    }

    fn class_number(&self, zspage: u32) -> usize {
        usize::from(self.zspages.get(zspage).class.load(Acquire))
    }

    /// Allocates an object of a class; for an object that moves, beyond the limit too.
    fn alloc_in(
        &self,
        number: usize,
        class: &mut Class,
        is_move: bool,
    ) -> Result<Handle, NoMemory> {
        let fullest = class.heads.iter().rev().copied().find(|head| *head != NONE);
        let at = match fullest {
            Some(zspage) => zspage,
            None => self.grow(number, class, is_move)?,
        };
        let zspage = self.zspages.get(at);
        let free = zspage.free.load(Relaxed);
        let index = if free != NO_OBJECT {
            let next = self.header_bits(Handle::new(at, free)) as u16;
            zspage.free.store(next, Relaxed);
            free
        } else {
            zspage.fresh.fetch_add(1, Relaxed)
        };
        let handle = Handle::new(at, index);
        self.set_header_bits(handle, u64::from(BUSY) << 32);
        class.used += 1;
        zspage.used.fetch_add(1, Relaxed);
        self.note_slack(number, class);
        self.relink(number, class, at);
        Ok(handle)
    }

    fn free_in(&self, number: usize, class: &mut Class, handle: Handle) {
        let zspage = self.zspages.get(handle.zspage());
        let next = zspage.free.swap(handle.index(), Relaxed);
        debug_assert!((self.header_bits(handle) >> 32) as u32 != FREE, "{handle:?} is free");
        self.set_header_bits(handle, u64::from(FREE) << 32 | u64::from(next));
        class.used -= 1;
        self.note_slack(number, class);
        let used = zspage.used.fetch_sub(1, Relaxed) - 1;
        if zspage.group.load(Relaxed) == LEAVING {
            return; // The thread that empties it will relink it.
        }
        if used == 0 {
            self.unlink(class, handle.zspage());
            self.release(number, class, handle.zspage());
        } else {
            self.relink(number, class, handle.zspage());
        }
    }

    /// A new, empty zspage, on the list of the emptiest.
    fn grow(&self, number: usize, class: &mut Class, is_move: bool) -> Result<u32, NoMemory> {
        let at = self.zspages.take().ok_or(NoMemory)?;
        let mut frames = [Frame(0); FRAMES_MAX];
        let frames = &mut frames[..usize::from(classes()[number].frames)];
        if !self.sections.take(frames, class.node, is_move) {
            self.zspages.give(at);
            return Err(NoMemory);
        }
        self.zspages.get(at).init(number as u8, frames);
        class.zspages += 1;
        self.link(number, class, at);
        Ok(at)
    }

    /// Frees a zspage without objects, which is on no list.
    fn release(&self, number: usize, class: &mut Class, at: u32) {
        let zspage = self.zspages.get(at);
        self.sections.give((0..usize::from(classes()[number].frames)).map(|i| zspage.frame(i)));
        class.zspages -= 1;
        self.note_slack(number, class);
        self.zspages.give(at);
    }

    fn group_of(number: usize, zspage: &Zspage) -> u8 {
        let used = usize::from(zspage.used.load(Relaxed));
        (used * GROUPS / usize::from(classes()[number].objects)) as u8
    }

    /// Moves a zspage to the list that it belongs to.
    fn relink(&self, number: usize, class: &mut Class, at: u32) {
        let zspage = self.zspages.get(at);
        if zspage.group.load(Relaxed) != Self::group_of(number, zspage) {
            self.unlink(class, at);
            self.link(number, class, at);
        }
    }

    fn link(&self, number: usize, class: &mut Class, at: u32) {
        let zspage = self.zspages.get(at);
        let group = Self::group_of(number, zspage);
        zspage.group.store(group, Relaxed);
        if group == FULL {
            return;
        }
        let head = &mut class.heads[usize::from(group)];
        zspage.prev.store(NONE, Relaxed);
        zspage.next.store(*head, Relaxed);
        if *head != NONE {
            self.zspages.get(*head).prev.store(at, Relaxed);
        }
        *head = at;
    }

    fn unlink(&self, class: &mut Class, at: u32) {
        let zspage = self.zspages.get(at);
        let group = zspage.group.load(Relaxed);
        if group >= FULL {
            return;
        }
        let (prev, next) = (zspage.prev.load(Relaxed), zspage.next.load(Relaxed));
        match prev {
            NONE => class.heads[usize::from(group)] = next,
            prev => self.zspages.get(prev).next.store(next, Relaxed),
        }
        if next != NONE {
            self.zspages.get(next).prev.store(prev, Relaxed);
        }
    }

    fn header_bits(&self, handle: Handle) -> u64 {
        match self.header_place(handle) {
            Some((frame, offset)) => self.sections.header(frame, offset).load(Acquire),
            None => self.zspages.get(handle.zspage()).huge_header(),
        }
    }

    fn set_header_bits(&self, handle: Handle, bits: u64) {
        match self.header_place(handle) {
            Some((frame, offset)) => {
                crash_points::store();
                self.sections.header(frame, offset).store(bits, Release);
            }
            None => self.zspages.get(handle.zspage()).set_huge_header(bits),
        }
    }

    /// Frame and offset of an object's header; `None` for a huge one.
    fn header_place(&self, handle: Handle) -> Option<(Frame, usize)> {
        let zspage = self.zspages.get(handle.zspage());
        let class = classes()[usize::from(zspage.class.load(Relaxed))];
        let at = usize::from(handle.index()) * usize::from(class.size);
        (!class.is_huge()).then(|| (zspage.frame(at / PAGE_BYTES), at % PAGE_BYTES))
    }

    /// Calls `each` with the one or two frames that have an object's first `bytes`.
    fn pieces(
        &self,
        handle: Handle,
        bytes: usize,
        mut each: impl FnMut(Frame, usize, std::ops::Range<usize>),
    ) {
        let zspage = self.zspages.get(handle.zspage());
        let class = classes()[usize::from(zspage.class.load(Relaxed))];
        let header = if class.is_huge() { 0 } else { size_class::HEADER_BYTES };
        assert!(bytes + header <= usize::from(class.size), "{bytes} bytes in {class:?}");
        let at = usize::from(handle.index()) * usize::from(class.size) + header;
        let (frame, offset) = (at / PAGE_BYTES, at % PAGE_BYTES);
        let first = bytes.min(PAGE_BYTES - offset);
        each(zspage.frame(frame), offset, 0..first);
        if first < bytes {
            each(zspage.frame(frame + 1), 0, first..bytes);
        }
    }

    /// Recounts everything; `owned` are the objects that entries refer to. Panics with the
    /// difference. The pool must be at rest.
    pub(crate) fn check(&self, owned: &[(SwapEntry, Handle)]) {
        let mut frames = Vec::new();
        let mut live = 0;
        let mut by_class = vec![Vec::new(); self.classes.len()];
        for at in self.zspages.numbers() {
            let class = self.zspages.get(at).class.load(Relaxed);
            if class != NO_CLASS {
                by_class[self.node_of(at) * CLASSES + usize::from(class)].push(at);
            }
        }
        for (place, all) in by_class.into_iter().enumerate() {
            let (state, number) = (lock(&self.classes[place].class), place % CLASSES);
            let slack = self.classes[place].slack.load(Relaxed);
            self.note_slack(number, &state);
            assert_eq!(slack, self.classes[place].slack.load(Relaxed), "class {number}");
            assert_eq!(state.node, place / CLASSES);
            let mut listed = 0;
            for (group, head) in state.heads.iter().enumerate() {
                let mut at = *head;
                let mut prev = NONE;
                while at != NONE {
                    let zspage = self.zspages.get(at);
                    assert_eq!(usize::from(zspage.group.load(Relaxed)), group);
                    assert_eq!(usize::from(Self::group_of(number, zspage)), group);
                    assert_eq!(zspage.prev.load(Relaxed), prev);
                    (prev, at) = (at, zspage.next.load(Relaxed));
                    listed += 1;
                }
            }
            let full = |n: &&u32| self.zspages.get(**n).group.load(Relaxed) == FULL;
            assert_eq!(listed + all.iter().filter(full).count(), state.zspages, "class {number}");
            assert_eq!(all.len(), state.zspages, "class {number}");
            let used = |n: &u32| usize::from(self.zspages.get(*n).used.load(Relaxed));
            assert_eq!(all.iter().map(used).sum::<usize>(), state.used, "class {number}");
            live += state.used;
            for at in all {
                let count = usize::from(classes()[number].frames);
                let owner = SwapEntry(at);
                frames.extend((0..count).map(|i| (self.zspages.get(at).frame(i), owner)));
            }
        }
        self.sections.check(&frames);
        assert_eq!(frames.len(), self.sections.used_frames());
        assert_eq!(owned.len(), live, "objects that no entry refers to, or the reverse");
        for (owner, handle) in owned {
            assert_eq!(self.header(*handle).owner, *owner, "owner of {handle:?}");
        }
    }
}

#[cfg(test)]
mod tests;

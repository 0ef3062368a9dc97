//! The memory of compressed objects: an allocator for sizes that are a large part of a page.
//!
//! [`Pool::alloc`] gives a [`Handle`], never an address. An object has the key of its owner, so
//! that [`Pool::compact`] and [`Pool::vacate`] can move it and change the owner's entry. The lock
//! of its owner's entry keeps an object alive. A thread that reads, writes, moves or frees an
//! object has that lock, or has just allocated the object and not published it.
//!
//! Locks: one for each size class, held for a few list operations or the copy of one zspage's
//! objects. A thread takes the sections' lock once for a whole zspage. The pool has no lock.

mod section;
mod size_class;
mod state;
mod zspage;

mod check;
mod claims;
mod moving;
mod places;

pub(crate) use claims::{Claim, Claims};
pub(crate) use moving::{Left, Stuck};
pub(crate) use section::{Refused, SECTION_BYTES, SECTION_FRAMES, sections_of};
pub(crate) use size_class::{CLASSES, COMPRESSED_BYTES_MAX};
pub use state::SectionState;
pub(crate) use zspage::Zspage;

use crate::crash_points;
use crate::durable::Durable;
use crate::ids::{Handle, SwapEntry};
use crate::page::PAGE_BYTES;
use crate::sync::{Mutex, lock};
use crossbeam_utils::CachePadded;
use section::{Frame, Sections};
use size_class::{FRAMES_MAX, SizeClass, class_of, classes};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use uzswap_sys::node::Nodes;
use zspage::{NO_OBJECT, NONE, Zspages};

/// The header in front of an object: its owner, and the page's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) owner: SwapEntry,
    pub(crate) checksum: u32,
}

/// Owner of an object that is allocated and not written yet; it must not be moved.
const BUSY: u32 = u32::MAX - 1;
/// Owner of a freed object. The low half of its header is the next object of the free list.
const FREE: u32 = u32::MAX;

impl Header {
    fn to_bits(self) -> u64 {
        u64::from(self.owner.0) << 32 | u64::from(self.checksum)
    }

    fn from_bits(bits: u64) -> Self {
        Self { owner: SwapEntry((bits >> 32) as u32), checksum: bits as u32 }
    }
}

/// No frame on line is free, the limit is reached, or there is no spare descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoMemory;

/// Lists of zspages by how full they are. Full ones are on no list.
const GROUPS: usize = 8;
const FULL: u8 = GROUPS as u8;
/// The group of a zspage that is being emptied, or whose section is. The zspage is on no list, so
/// it gets no new object.
const LEAVING: u8 = FULL + 1;

/// The zspages of a size class on a node.
struct Class {
    node: usize,
    heads: [u32; GROUPS],
    zspages: usize,
    used: usize,
}

/// Each class has cache lines of its own, to which threads that store other sizes do not write.
struct SharedClass {
    class: Mutex<Class>,
    /// Frames that compaction could free. It is written with the class locked, so that a sum over
    /// all classes takes no lock.
    slack: AtomicUsize,
}

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
    /// For each node.
    growing: Box<[Mutex<Growing>]>,
}

/// Locked while a section comes on line, so that several threads that lack memory bring one section
/// on line together, not one each. No serving thread waits for this lock.
struct Growing;

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
            growing: (0..nodes.count()).map(|_| Mutex::new(Growing)).collect(),
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

    /// The maximum bytes of frames in use.
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

    /// True if there are spare descriptors for `bytes` of frames, in zspages of any class.
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

    /// Notes that no store should wait for memory on the caller's node until the node has some.
    pub(crate) fn note_late(&self) {
        self.sections.note_late(self.nodes.here());
    }

    /// Nodes from which stores take memory first: those with processors.
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
    /// that `is_meant`. Allocates, and may wait for the kernel. Fails if the machine has no more
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
        // One section at a time, to the node with the least, because stores continue, and one node
        // must not delay the others.
        while self.sections.can_grow() {
            let meant = self.served().filter(|node| is_meant(*node) && lacks(node));
            let least = meant.min_by_key(|node| self.sections.free_on(*node));
            let Some(node) = least else { break };
            let _growing = lock(&self.growing[node]);
            if lacks(&node) {
                self.sections.bring_any_online(node)?;
            }
        }
        Ok(())
    }

    /// Bytes of the next section that are needed soon, where each node keeps `reserve` bytes free.
    /// None while half a section is free beyond the reserve, and all when nothing is.
    pub(crate) fn bytes_ahead(&self, reserve: usize) -> usize {
        const LEAD: usize = SECTION_BYTES / 2;
        let spare = self.free_bytes().saturating_sub(self.reserve_of_all(reserve));
        if self.sections.can_grow() { (LEAD - spare.min(LEAD)) * 2 } else { 0 }
    }

    /// Unmaps wholly free sections, the highest first, while `reserve` bytes stay free on each node
    /// that `is_meant`. Returns the bytes given back.
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

    fn class_number(&self, zspage: u32) -> usize {
        usize::from(self.zspages.get(zspage).class.load(Acquire))
    }

    /// Allocates an object of a class. An object that moves may exceed the limit.
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
            return; // The thread that empties the zspage will relink it.
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
}

#[cfg(test)]
mod tests;

//! Moves objects: compaction, and the emptying of sections.

use super::section::Refused;
use super::size_class::{self, classes};
use super::zspage::{NO_CLASS, NONE};
use super::{BUSY, Class, FREE, LEAVING, Pool};
use crate::ids::{Handle, SwapEntry};
use crate::page::PAGE_BYTES;
use crate::sync::{MutexGuard, lock, try_lock};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Gives an owner another handle: tries to lock its entry, checks that it still has `from`, calls
/// `copy`, and sets `to`. `false` if the object cannot move now.
pub(crate) type Relocate<'a> = &'a dyn Fn(SwapEntry, Handle, Handle, &dyn Fn()) -> bool;

/// The reason why an object stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stuck {
    /// No other section has space for the object.
    NoRoom,
    /// The entry of the object's owner is locked.
    Held(SwapEntry),
    /// The object is allocated, and not written yet.
    New,
}

/// The objects left in a section that was to be emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Left {
    /// The reason why one of the objects stays.
    pub(crate) stuck: Stuck,
    pub(crate) objects: usize,
    /// Bytes of their frames.
    pub(crate) bytes: usize,
}

impl Pool {
    /// One step of compaction in a class, on the first node that needs one: moves the objects of
    /// the emptiest zspage into fuller ones, if that frees its frames. `Some(moved)` if a zspage
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

    /// Stops an online section from taking objects, before [`Self::vacate`] empties it. Otherwise
    /// objects could move from one zspage of the section to its next, and then again.
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
                // Another thread has freed the zspage's last object.
                0 => self.release(class_number, &mut class, number),
                _ => self.link(class_number, &mut class, number),
            }
        }
        self.sections.stay_online(section);
    }

    /// Moves the objects of a zspage elsewhere in its class: into existing space or, with `grow`,
    /// into new zspages too. This frees the zspage's frames. Without `grow` it stops at the first
    /// object that must stay, and other threads may use the zspage again.
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
            // This only tries to lock, because another thread may take these two locks in the
            // reverse order.
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
}

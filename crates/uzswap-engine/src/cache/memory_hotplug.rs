//! Adds memory to the pool, and removes memory, while the pool is in use.
//!
//! The pool lies in sections of 2 MiB. [`SectionState`] has the table of their states. Every
//! section can be emptied: nothing refers to an object by its address, so an object may move while
//! its entry is not locked. The objects move to other sections. If those are full, the oldest pages
//! go to the backing first. If an object cannot move, its section stays online, and the error names
//! it.
//!
//! The pool's size follows the machine: see [`Cache::follow_memory`].

use super::Cache;
use crate::error::SectionError;
use crate::ids::SwapEntry;
use crate::pool::{Left, Refused, SECTION_BYTES, SectionState, Stuck};
use crate::sync::Backoff;

/// Attempts to move objects in use, each after a longer pause, before their section stays online:
/// some 0.1 s. A read of the backing, during which an entry is locked, takes less.
const TRIES: u32 = 1000;

/// Sections that may be added for a section that goes. The section's objects need up to two,
/// because objects of one class cannot fill the zspages of another. Stores need one in the same
/// time.
const GROWS: u32 = 3;

impl Cache {
    /// The state of each section of the pool, by number.
    pub fn section_states(&self) -> Vec<SectionState> {
        self.pool.section_states()
    }

    /// Sections of the pool that have memory: number and bytes in use.
    pub fn sections(&self) -> Vec<(usize, usize)> {
        let bytes = |(number, frames)| (number, frames * crate::page::PAGE_BYTES);
        self.pool.sections().into_iter().map(bytes).collect()
    }

    /// Brings a section to a state: `online`, or `offline`, which lasts until it is brought online
    /// again. May write to the backing. After an error the section is unchanged.
    pub fn set_section(&self, section: usize, state: &str) -> Result<(), SectionError> {
        let last = self.pool.sections_possible() - 1;
        if section > last {
            return Err(SectionError::NoSection { section, last });
        }
        match state {
            "online" => self.pool.bring_online(section).map_err(|why| refused(section, why)),
            "offline" => self.take_offline(section),
            other => Err(SectionError::NoState(other.into())),
        }
    }

    /// For each node that the machine may have, true if the pool may use it.
    pub fn nodes(&self) -> Vec<bool> {
        (0..self.pool.nodes_count()).map(|node| !self.pool.is_closed(node)).collect()
    }

    /// The node of a section with memory.
    pub fn node_of_section(&self, section: usize) -> usize {
        self.pool.node_of_section(section)
    }

    /// Brings a node to a state: `offline` empties the node's sections, and the pool adds no others
    /// there until `online`. After an error the sections that were not emptied yet stay, and the
    /// node stays online.
    pub fn set_node(&self, node: usize, state: &str) -> Result<(), SectionError> {
        let last = self.pool.nodes_count() - 1;
        if node > last {
            return Err(SectionError::NoNode { node, last });
        }
        let is_closed = match state {
            "online" => false,
            "offline" => true,
            other => return Err(SectionError::NoState(other.into())),
        };
        if !self.pool.close(node, is_closed) {
            return Err(SectionError::LastNode { node });
        }
        if !is_closed {
            return Ok(());
        }
        let (mut tries, mut backoff) = (0, Backoff::new());
        // This also finds a section that was added in the meantime.
        while let Some(section) = self.section_on(node) {
            match self.empty_by_all_means(section, SectionState::Absent) {
                Ok(()) => {}
                // The maintaining thread is making the section or giving it back.
                Err(SectionError::Standing { .. }) if tries < TRIES => {
                    tries += 1;
                    backoff.wait();
                }
                Err(error) => {
                    self.pool.close(node, false);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn section_on(&self, node: usize) -> Option<usize> {
        let sections = self.pool.sections().into_iter().map(|(number, _)| number);
        sections.into_iter().find(|number| self.pool.node_of_section(*number) == node)
    }

    /// Empties sections on nodes that have no memory any more. The kernel has moved the pages of
    /// these sections to other nodes: otherwise it could not have taken the node's memory off line.
    /// The objects move to sections whose node is known. Returns the first error.
    pub fn follow_nodes(&self) -> Result<(), SectionError> {
        let Some(with_memory) = self.pool.nodes_with_memory() else { return Ok(()) };
        let mut outcome = Ok(());
        for (node, is_open) in self.nodes().into_iter().enumerate() {
            let has_memory = with_memory.contains(&node);
            if is_open && !has_memory && self.section_on(node).is_some() {
                outcome = outcome.and(self.set_node(node, "offline"));
                // The node gets no sections while it has no memory.
                self.pool.close(node, false);
            }
        }
        outcome
    }

    fn take_offline(&self, section: usize) -> Result<(), SectionError> {
        match self.pool.keep_offline(section) {
            Err(Refused::State(SectionState::Online)) => {}
            done => return done.map_err(|why| refused(section, why)),
        }
        if self.pool.is_last_section() {
            return Err(SectionError::Last { section });
        }
        self.empty_by_all_means(section, SectionState::Offline)
    }

    /// Empties a section: makes space elsewhere and waits for the users of its objects.
    fn empty_by_all_means(&self, section: usize, to: SectionState) -> Result<(), SectionError> {
        let (mut tries, mut grows) = (0, 0);
        let mut backoff = Backoff::new();
        self.vacate(section, to, |left| match left.stuck {
            Stuck::NoRoom => {
                grows += 1;
                grows <= GROWS && self.pool.grow_section().is_ok() || self.make_way(left.bytes)
            }
            Stuck::Held(_) | Stuck::New => {
                tries += 1;
                // Stores continue at the same time. After an error the next turn tries again.
                let _ = self.provision();
                backoff.wait();
                tries < TRIES
            }
        })
    }

    /// Moves every object of a section to other sections, and gives the section's memory back until
    /// the pool needs it again.
    pub fn empty_section(&self, section: usize) -> Result<(), SectionError> {
        let last = self.pool.sections_possible() - 1;
        if section > last {
            return Err(SectionError::NoSection { section, last });
        }
        let has_memory = self.sections().iter().any(|(number, _)| *number == section);
        if has_memory && self.pool.is_last_section() {
            return Err(SectionError::Last { section });
        }
        self.vacate(section, SectionState::Absent, |_| false)
    }

    /// Empties a section and gives its memory back. Goes on while `try_again` agrees.
    fn vacate(
        &self,
        section: usize,
        to: SectionState,
        mut try_again: impl FnMut(Left) -> bool,
    ) -> Result<(), SectionError> {
        self.make_ready_besides(section);
        self.pool.begin_offline(section).map_err(|why| refused(section, why))?;
        let relocate = |owner, from, to, copy: &dyn Fn()| self.relocate(owner, from, to, copy);
        loop {
            let left = match self.pool.vacate(section, &relocate) {
                Ok(()) => match self.pool.finish_offline(section, to) {
                    Ok(true) => return Ok(()),
                    // A thread took space before `begin_offline`, and no entry refers to it yet.
                    Ok(false) => Left { stuck: Stuck::New, objects: 1, bytes: SECTION_BYTES },
                    Err(why) => {
                        self.pool.stay_online(section);
                        return Err(refused(section, why));
                    }
                },
                Err(left) => left,
            };
            if !try_again(left) {
                self.pool.stay_online(section);
                return Err(self.stays(section, left));
            }
        }
    }

    /// Brings another section on line if concurrent stores would have little memory without this
    /// one. After an error stores wait for the maintaining thread, or are rejected.
    fn make_ready_besides(&self, section: usize) {
        let is_it = |(number, _): &(usize, usize)| *number == section;
        let Some((_, used)) = self.sections().into_iter().find(is_it) else { return };
        let own = SECTION_BYTES.saturating_sub(used);
        if self.pool.free_bytes().saturating_sub(own) < self.reserve.reserve_bytes() {
            let _ = self.pool.grow_section();
        }
    }

    /// Writes pages back until `bytes` are free in sections that stay; `false` if no page could be
    /// written.
    fn make_way(&self, bytes: usize) -> bool {
        let before = self.pool.bytes();
        // Gaps between objects of other classes are usable only after compaction, and a write for a
        // few pages is not worth it.
        let wanted = bytes.max(SECTION_BYTES / 16) + self.pool.slack_bytes();
        self.write_back_to(before.saturating_sub(wanted), || drop(self.provision()));
        self.compact_all();
        self.pool.bytes() < before
    }

    fn stays(&self, section: usize, left: Left) -> SectionError {
        let Left { stuck, objects, bytes } = left;
        let what = match stuck {
            Stuck::NoRoom => return SectionError::NoRoom { section, objects, bytes },
            Stuck::New => "a page that is being stored".into(),
            Stuck::Held(owner) => self.describe_held(owner),
        };
        SectionError::Held { section, objects, what }
    }

    fn describe_held(&self, owner: SwapEntry) -> String {
        let number = owner.0;
        let what = if self.shares.contains(owner) {
            "pages that are the same, of record"
        } else if self.units.contains(owner) {
            "a unit of cold pages, piece"
        } else {
            "page"
        };
        let by = match self.index.view().peek(owner).is_in_flight() {
            true => "writeback or recompression",
            false => "a request",
        };
        format!("{what} {number}, which {by} holds")
    }

    /// Empties sections and gives them back, while the reserve stays free. Returns their bytes.
    pub fn give_sections_back(&self) -> usize {
        let mut given = 0;
        let reserve = self.pool.reserve_of_all(self.reserve.reserve_bytes());
        while self.pool.free_bytes() >= reserve + SECTION_BYTES {
            let emptiest = self.pool.sections().into_iter().min_by_key(|(_, frames)| *frames);
            let Some((section, _)) = emptiest else { break };
            if self.empty_section(section).is_err() {
                break; // Its objects are in use.
            }
            given += SECTION_BYTES;
        }
        given
    }

    /// Sets the memory of the machine, or of this process if it is allowed less; `max_pool_percent`
    /// refers to this memory. The surplus of a pool above its new limit is written back.
    pub fn follow_memory(&self, ram_bytes: u64) {
        if self.attributes.set_ram_bytes(ram_bytes) {
            self.pool.set_limit(self.attributes.pool_bytes_max() as usize);
            self.ring();
        }
    }
}

fn refused(section: usize, why: Refused) -> SectionError {
    match why {
        Refused::State(state) => SectionError::Standing { section, state: state.name() },
        Refused::Last => SectionError::Last { section },
        Refused::Memory(why) => SectionError::Memory { section, why },
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::testing::{Content, Setup, page_of};
    use crate::{Load, PAGE_BYTES, Reject, Store};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    /// No thread gets frames of a section that goes offline.
    #[test]
    fn a_store_waits_a_moment_while_the_only_section_goes_and_is_then_rejected() {
        let (cache, area, _) = Setup::default().make();
        // There is a maintaining thread, but it is busy elsewhere.
        cache.wait_for_work(Duration::ZERO);
        let (section, _) = cache.sections()[0];
        cache.pool.begin_offline(section).unwrap();
        let cache = Arc::new(cache);
        let (sender, receiver) = mpsc::channel();
        let storing = cache.clone();
        let store = move || {
            let stored = storing.store(area.entry(7).unwrap(), &page_of(Content::Random, 7));
            sender.send(stored)
        };
        std::thread::Builder::new().spawn(store).unwrap();
        let stored = receiver.recv_timeout(Duration::from_secs(20));
        assert_eq!(stored, Ok(Store::Rejected(Reject::AllocFail)), "a store tries again and again");
        cache.pool.stay_online(section);
        let page = page_of(Content::Random, 7);
        assert_eq!(cache.store(area.entry(7).unwrap(), &page), Store::Stored);
        cache.check();
    }

    #[test]
    fn an_object_that_cannot_move_is_named_with_the_reason_and_its_section_is_online_again() {
        let (cache, area, _) = Setup::default().make();
        let key = area.entry(7).unwrap();
        let page = page_of(Content::Pointers, 7);
        assert_eq!(cache.store(key, &page), Store::Stored);
        let (section, _) = cache.sections().into_iter().find(|(_, bytes)| *bytes > 0).unwrap();
        let view = cache.index.view();
        let held = view.lock(key).unwrap();
        let error = cache.set_section(section, "offline").unwrap_err().to_string();
        let page_held = format!("page {}, which a request holds", key.0);
        assert!(error.contains("still holds 1 objects") && error.contains(&page_held), "{error}");
        assert_eq!(cache.section_states()[section], SectionState::Online);
        drop(held);
        drop(view);
        cache.set_section(section, "offline").unwrap();
        assert_eq!(cache.section_states()[section], SectionState::Offline);
        let mut got = [0; PAGE_BYTES];
        assert_eq!(cache.load(key, &mut got).unwrap(), Load::Hit);
        assert!(got == page);
        cache.check();
    }
}

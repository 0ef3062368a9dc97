//! A fork of a process with windows: the child continues with a copy of everything.
//!
//! A lock that another thread holds at the fork would stay locked in the child for ever. So
//! [`Pager::before_fork`] waits until no page moves out or in. Then the child makes its copy of the
//! pager its own. A child that cannot do so brings all pages in, and has no pager.

#![expect(
    unsafe_code,
    reason = "memory that a program has already, and its copy in a fork: the code that adopts a range sees each call that changes it; a child that writes pages to their places has one thread"
)]

use crate::core::Inner;
use crate::core::space::Space;
use crate::lane::Lane;
use crate::layers::{ForChild, Layers};
use crate::page::transition::{GONE, INHERITED, PINNED, RELEASED};
use crate::page::word::{Kind, Word};
use crate::pager::Pager;
use crate::steady;
use rustix::process::Resource;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, MutexGuard, RwLockWriteGuard};
use uzswap_engine::backing::Backing;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_remote::Tiers;
use uzswap_sys::fault_signals::{self, Blocked};
use uzswap_sys::process::Lifted;
use uzswap_sys::{map, proc_mem};
use uzswap_trace::Log;

/// Our descriptors have numbers below this ([`uzswap_sys::process::out_of_the_way`]).
const DESCRIPTORS: u64 = 1024;

impl Pager {
    /// Called in a forked child, after [`BeforeFork::in_child`], as soon as the C library can be
    /// used: from a handler of `pthread_atfork` that was set after this pager was made.
    pub fn after_fork(&self) -> io::Result<()> {
        self.inner().adopt_process();
        self.restart_threads()?;
        self.inner().budget.set_lifted(false);
        Ok(())
    }

    /// Waits until no page moves out or in, and prevents such moves. Fails if the child cannot have
    /// a file of its own; the pager then works as before.
    pub fn before_fork(&self) -> io::Result<BeforeFork> {
        let pager = self.clone();
        let blocked = Blocked::all();
        let limits = pager.inner().lift_limits();
        let inner = pager.inner().clone();
        // A holder of `steady` may wait for a fault, and that fault for room that reclaim would
        // make.
        inner.budget.set_lifted(true);
        let steady = steady::unsteady();
        // SAFETY: the guards are dropped before the pager that they borrow from: `end` does both,
        // in this order, and nothing else takes them apart.
        let parts: &'static Inner = unsafe { &*Arc::as_ptr(&inner) };
        let lanes = parts.lanes.all();
        let regions = parts.regions_mut();
        let (backing, store) = (None, None);
        let mut still =
            BeforeFork { lanes, regions, steady, backing, store, limits, _blocked: blocked, pager };
        match still.part_backing(parts) {
            Ok(()) => Ok(still),
            Err(error) => {
                still.in_parent();
                Err(error)
            }
        }
    }
}

/// Everything stands still: see [`Pager::before_fork`].
pub struct BeforeFork {
    lanes: Vec<MutexGuard<'static, Lane>>,
    regions: RwLockWriteGuard<'static, BTreeMap<u32, Arc<Space>>>,
    steady: RwLockWriteGuard<'static, ()>,
    /// The top of the child.
    backing: Option<ForChild>,
    /// The store.
    store: Option<uzswap_remote::BeforeFork<'static>>,
    /// The program's limits, which may be too low for the child's descriptors and file.
    limits: Lifted,
    _blocked: Blocked,
    pager: Pager,
}

impl std::fmt::Debug for BeforeFork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BeforeFork").finish_non_exhaustive()
    }
}

impl BeforeFork {
    /// Makes parent and child write to different files from now on.
    fn part_backing(&mut self, parts: &'static Inner) -> io::Result<()> {
        // First the store, whose thread reads and writes the local backing.
        self.store = parts.tiers.as_ref().map(Tiers::before_fork);
        self.backing = parts.layers.as_ref().map(Layers::before_fork).transpose()?;
        if let (Some(tiers), Some(store)) = (&parts.tiers, &mut self.store) {
            tiers.give_to_child(store, |offset, bytes| match &mut self.backing {
                Some(own) => own.write(offset, bytes),
                None => Err(io::ErrorKind::Unsupported.into()),
            })?;
        }
        Ok(())
    }

    /// Ends the fork in the parent: everything continues.
    pub fn in_parent(self) {
        let pager = self.pager.clone();
        self.end();
        pager.inner().budget.set_lifted(false);
    }

    fn end(self) {
        let Self { lanes, regions, steady, backing, store, limits, _blocked, pager: _ } = self;
        drop((lanes, regions, steady, backing, store, limits));
    }

    /// Makes the pager the child's own, with descriptors of its own. No page is pinned then: the
    /// calling thread pins its pages again. The pager has threads again after
    /// [`Pager::after_fork`]. The child cannot get those descriptors if `/proc` is closed to
    /// it, or if a filter forbids userfaultfd. Then this brings all pages in, gives them to the
    /// program, and returns the reason. May be called as soon as the kernel has made the child.
    ///
    /// Fails if an absent page cannot be brought in. The child must not continue then.
    pub fn in_child(mut self) -> io::Result<Option<io::Error>> {
        let inner = self.pager.inner().clone();
        steady::forked_by_call();
        fault_signals::forked();
        inner.adopt_process();
        inner.log.iter().for_each(Log::forked);
        // The parent may be suspended; the child's own thread will learn if the child is.
        inner.budget.set_suspended(false);
        let renewed = inner.door.renew().and_then(|()| inner.staging.renew());
        if let (Some(layers), Some(own)) = (&inner.layers, &self.backing) {
            layers.in_child(own)?;
            inner.cache.go_on_in_fork()?;
        }
        if let (Some(tiers), Some(store)) = (&inner.tiers, self.store.take()) {
            tiers.in_child(store)?;
        }
        let spaces: Vec<_> = self.regions.values().cloned().collect();
        if renewed.is_ok() {
            spaces.iter().try_for_each(|space| inner.inherit_space(space))?;
        }
        // Until the pager has threads that make room, a thread without room gets memory beyond the
        // budget.
        self.end();
        if renewed.is_err() {
            spaces.iter().try_for_each(|space| inner.restore_space(space))?;
        }
        Ok(renewed.err())
    }
}

impl Inner {
    fn lift_limits(&self) -> Lifted {
        let file = self.layers.as_ref().map_or(0, Layers::bytes);
        Lifted::new(&[(Resource::Nofile, DESCRIPTORS), (Resource::Fsize, file)])
    }

    /// In the child: ends all pins, finds the pages that another thread of the parent's had `Busy`,
    /// and registers the adopted memory. Threads that the child lacks had most of the pins, and
    /// would never unpin the pages.
    fn inherit_space(&self, space: &Space) -> io::Result<()> {
        let mut at = 0;
        while at < space.pages() {
            let found = space.words.find(at);
            if found.word.kind() == Kind::Resident && found.word.pins() > 0 && space.is_window() {
                // The child has no thread yet that could change the word.
                found.change(PINNED, found.word.without_pins());
            }
            if found.word.kind() == Kind::Busy {
                // Pages that share a word are alike, and none of them is used.
                let word = match found.is_shared() {
                    true if space.is_window() => Word::EMPTY,
                    true => Word::UNTOUCHED,
                    false => self.whereabouts(space, at)?,
                };
                space.end_busy(&found, INHERITED, word);
            }
            at = found.end();
        }
        adopted_runs(space).flat_map(|run| self.inherited_parts(space, run)).try_for_each(|part| {
            self.door.watch(space.address(part.start)..space.address(part.end))
        })
    }

    /// Gives up the pages of a run that the child has not inherited (`MADV_DONTFORK`), since they
    /// are not mapped. Returns the others.
    fn inherited_parts(&self, space: &Space, run: Range<u32>) -> Vec<Range<u32>> {
        let is_mapped = |pages: &Range<u32>| {
            map::is_mapped(space.address(pages.start)..space.address(pages.end))
        };
        if is_mapped(&run) {
            return vec![run];
        }
        let mut parts: Vec<Range<u32>> = Vec::new();
        let mut at = run.start;
        while at < run.end {
            let found = space.words.find(at);
            let pages = at..found.end().min(run.end);
            at = pages.end;
            match parts.last_mut() {
                _ if !is_mapped(&pages) => self.forget_uninherited(space, pages.start),
                Some(last) if last.end == pages.start => last.end = pages.end,
                _ => parts.push(pages),
            }
        }
        self.keys.take(space, run);
        parts
    }

    /// Gives up the pages of a word. Pages that share a word are zeros; the mapped ones belong to
    /// the program from now on.
    fn forget_uninherited(&self, space: &Space, page: u32) {
        let found = space.words.find(page);
        let mut was = found.word;
        if was.kind() == Kind::Busy {
            was = self.whereabouts_by(space, page, false);
        } else if !found.take() {
            unreachable!("a fork has one thread");
        }
        if found.is_shared() {
            return space.end_busy(&found, RELEASED, Word::UNTOUCHED);
        }
        self.budget.give_back(self.forget(space, page, was));
        space.end_busy(&found, GONE, Word::UNTOUCHED);
    }

    /// Writes each absent page to its place, in a child that cannot have a door of its own.
    /// Afterwards all memory belongs to the program.
    fn restore_space(&self, space: &Space) -> io::Result<()> {
        adopted_runs(space).for_each(|run| drop(self.inherited_parts(space, run)));
        let mut content: Box<Page> = Box::new([0; PAGE_BYTES]);
        let mut at = 0;
        while at < space.pages() {
            let (page, found) = (at, space.words.find(at));
            at = found.end().min(space.pages());
            if found.is_shared() {
                if found.word.kind() != Kind::Untouched {
                    // No page of the word was used.
                    let _ = self.door.let_zeros_in(space.address(page)..space.address(at), true);
                    // The process has one thread, so the word cannot change.
                    if found.word.kind() == Kind::Busy || found.take() {
                        space.end_busy(&found, RELEASED, Word::UNTOUCHED);
                    }
                }
                continue;
            }
            let mut word = found.word;
            if word.kind() == Kind::Busy {
                // Another thread of the parent's had the page.
                word = self.whereabouts_by(space, page, map::is_in_core(space.address(page))?);
            } else if !space.take(page, word) {
                continue;
            }
            let is_out = match word.kind() {
                Kind::Staged => {
                    content.copy_from_slice(self.staging.page(word.frame()));
                    true
                }
                Kind::Stored => {
                    self.load(space, page, &mut content);
                    true
                }
                _ => false,
            };
            let address = space.address(page);
            if is_out || word.kind() == Kind::Empty {
                // With userfaultfd the page can be touched, because nothing is registered in a
                // child.
                let _ = self.door.let_zeros_in(address..address + PAGE_BYTES, true);
            }
            if is_out {
                // SAFETY: adopted memory, private and anonymous, whose content this is; there is
                // one thread.
                unsafe { proc_mem::write_plainly(address, &*content) }?;
            }
            space.put(page, RELEASED, Word::UNTOUCHED);
        }
        Ok(())
    }

    /// The right word for a page that another thread was changing.
    fn whereabouts(&self, space: &Space, page: u32) -> io::Result<Word> {
        let is_there = self.door.pagemap().has_page(space.address(page))?;
        Ok(self.whereabouts_by(space, page, is_there))
    }

    /// As [`Self::whereabouts`], for a page that is present if `is_there`.
    fn whereabouts_by(&self, space: &Space, page: u32, is_there: bool) -> Word {
        let is_stored = space.key_if_any(page).is_some_and(|key| self.cache.has(key));
        if is_there {
            // An existing copy may be older.
            let copy = if is_stored { Word::KEPT | Word::STALE } else { 0 };
            return Word::RESIDENT.with(Word::USED | copy);
        }
        match self.staging.frame_of((space.id, page)) {
            Some(frame) => Word::staged(frame, Word::RESIDENT),
            None if is_stored => Word::STORED,
            None => Word::EMPTY,
        }
    }
}

/// Adopted pages in a row, by words.
fn adopted_runs(space: &Space) -> impl Iterator<Item = Range<u32>> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let mut run: Option<Range<u32>> = None;
        while at < space.pages() {
            let found = space.words.find(at);
            let pages = at..found.end().min(space.pages());
            at = pages.end;
            match (found.word.kind(), &mut run) {
                (Kind::Untouched, None) => {}
                (Kind::Untouched, Some(_)) => break,
                (_, Some(run)) => run.end = pages.end,
                (_, None) => run = Some(pages),
            }
        }
        run
    })
}

//! A region as its user sees it.

#![expect(
    unsafe_code,
    reason = "unmapping by address; a region as a slice: the caller's promise; zeros are a valid value, without a destructor"
)]

use crate::core::Inner;
use crate::core::registry;
use crate::core::space::Space;
use crate::error::Error;
use crate::page::transition::PINNED;
use crate::page::word::{Kind, Word};
use crate::pager::Pager;
use rustix::io::Errno;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::{Area, PAGE_BYTES};
use uzswap_policy::ahead;
use uzswap_sys::fault_signals::{self, Blocked};
use uzswap_sys::map::Mapping;
use uzswap_sys::uffd::Fault;

/// The expected accesses to a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// No known order: the pager finds streams itself. This changes the whole region, whatever the
    /// range.
    Normal,
    /// In order: many pages come in at each fault. This changes the whole region.
    Sequential,
    /// In no order: one page comes in at a fault. This changes the whole region.
    Random,
    /// The range will be needed: it is brought in before the call returns.
    WillNeed,
    /// The range will not be needed for long: it is taken out and compressed before the call
    /// returns.
    PageOut,
    /// The content of the range is not needed any more: whole pages in it read as zeros from now
    /// on.
    DontNeed,
}

/// Memory whose pages are compressed when there is no room for them. Unmapped when dropped.
///
/// Use it through [`RegionRef::as_ptr`], like any memory, with two rules:
/// - In [`crate::Mode::InThread`], pin memory for a system call ([`RegionRef::pin`]). A thread that
///   touches the region must not block SIGBUS: the process would be killed.
/// - No thread's stack lies in it.
pub struct Region(RegionRef);

impl Region {
    pub(crate) fn new(space: Arc<Space>, pager: Pager) -> Self {
        Self(RegionRef { space, pager })
    }

    /// Leaves the region mapped and returns its address, for callers that can keep no more than
    /// that: [`Pager::region_at`] finds it again, [`Pager::unmap`] unmaps it. The region does not
    /// keep the pager alive, and lasts no longer than the process.
    pub fn into_raw(self) -> NonNull<u8> {
        let kept = ManuallyDrop::new(self);
        // SAFETY: read once, and `kept` is never dropped; so the handles go and the region stays.
        let handles = unsafe { std::ptr::read(&kept.0) };
        handles.as_ptr()
    }
}

impl Deref for Region {
    type Target = RegionRef;

    fn deref(&self) -> &RegionRef {
        &self.0
    }
}

/// A region that another owner keeps mapped: it can do everything that a region can, except unmap.
pub struct RegionRef {
    space: Arc<Space>,
    pager: Pager,
}

impl RegionRef {
    /// The region's start, aligned to 2 MiB. Valid for reads and writes of [`Self::len`] bytes
    /// while the region lives. The memory is zeros at the start.
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(self.space.base() as *mut u8).expect("no mapping begins at 0")
    }

    /// The region's size in bytes, as requested.
    pub fn len(&self) -> usize {
        self.space.bytes()
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The region's pager.
    pub fn pager(&self) -> &Pager {
        &self.pager
    }

    /// Brings a range of bytes in and keeps it in memory, at the same addresses, until the value is
    /// dropped. So a system call or a device may use it. Fails if the range is beyond the region,
    /// or if more than half of the budget would be pinned.
    pub fn pin(&self, range: Range<usize>) -> Result<Pinned, Error> {
        self.check()?;
        let pages = self.space.pages_of(&range, false)?;
        if !self.pager.inner().count_pins(pages.len() as i64) {
            let (bytes, memory) = (range.len(), self.pager.memory());
            return Err(Error::Pinned { bytes, memory });
        }
        let _blocked = Blocked::all();
        for page in pages.clone() {
            self.with_resident(page, Word::pinned);
        }
        Ok(Pinned { space: self.space.clone(), pages })
    }

    /// Brings a range of bytes in. It may be evicted again at any time; pin memory that must stay.
    pub fn touch(&self, range: Range<usize>) -> Result<(), Error> {
        self.check()?;
        let _blocked = Blocked::all();
        for page in self.space.pages_of(&range, false)? {
            self.with_resident(page, |word| Some(word.with(Word::USED)));
        }
        Ok(())
    }

    /// Declares the expected accesses. Errors: a range beyond the region; for [`Advice::PageOut`],
    /// no room in pool and backing for all of it (the rest stays as it was).
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Error> {
        self.check()?;
        let pages = self.space.pages_of(&range, advice == Advice::DontNeed)?;
        match advice {
            Advice::Normal => self.space.advice.store(ahead::NORMAL, Relaxed),
            Advice::Sequential => self.space.advice.store(ahead::SEQUENTIAL, Relaxed),
            Advice::Random => self.space.advice.store(ahead::RANDOM, Relaxed),
            Advice::WillNeed => self.touch(range)?,
            Advice::PageOut => self.pager.inner().page_out(&self.space, pages)?,
            Advice::DontNeed => self.pager.inner().drop_pages(&self.space, pages),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Error> {
        debug_assert!(
            !fault_signals::is_blocked() || self.pager.mode() != crate::Mode::InThread,
            "SIGBUS is blocked in this thread: a fault would kill the process"
        );
        self.pager.inner().check_process()
    }

    /// Brings a page in and changes its word while it is resident.
    fn with_resident(&self, page: u32, to: impl Fn(Word) -> Option<Word>) {
        loop {
            let word = self.space.load(page);
            // A system call that writes to a guarded page would fail.
            if word.kind() != Kind::Resident || word.has(Word::GUARDED) {
                let address = self.space.address(page);
                let fault = Fault { address, is_write: false, instruction: 0 };
                self.pager.inner().fault(&self.space, page, fault);
            } else if self.space.change(page, PINNED, word, to(word).expect("pinned 2^18 times")) {
                return;
            }
        }
    }
}

impl Pager {
    /// Makes a region: `bytes` of zeros (rounded up to pages), of which as much is in memory as
    /// the budget allows.
    pub fn map(&self, bytes: usize) -> Result<Region, Error> {
        let inner = self.inner();
        inner.check_process()?;
        let _blocked = Blocked::all();
        if bytes == 0 {
            let must = "at least 1".into();
            return Err(Error::Range { what: "the size of a region", value: 0, must });
        }
        if inner.door.uffd().is_none() {
            let (text, known) = (inner.mode.to_string(), "in-thread, handler-threads");
            return Err(Error::Choice { what: "mode for regions", text, known });
        }
        let _steady = inner.steady();
        let max = inner.cache.pages_max() as u64 * PAGE_BYTES as u64;
        let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES));
        let area = pages.ok().and_then(|pages| inner.cache.add_area(pages));
        let area = area.ok_or(Error::Addresses { bytes, max })?;
        let id = inner.next_region();
        let space = match new_space(id, inner, bytes, area) {
            Ok(space) => Arc::new(space),
            Err(error) => {
                inner.cache.remove_area(area);
                return Err(error);
            }
        };
        inner.count_table(space.table_bytes() as i64);
        inner.regions_mut().insert(id, space.clone());
        registry::add(&space);
        inner.account();
        Ok(Region::new(space, self.clone()))
    }

    /// The region of this pager that an address lies in.
    pub fn region_at(&self, address: usize) -> Option<RegionRef> {
        let found = registry::find(address)?;
        let is_ours = Arc::ptr_eq(&found.pager, self.inner());
        let space = is_ours.then(|| self.inner().regions().get(&found.id).cloned())??;
        Some(RegionRef { space, pager: self.clone() })
    }

    /// The number of mapped regions.
    pub fn regions(&self) -> usize {
        self.inner().regions().len()
    }

    /// Unmaps the region that begins at `address`, like dropping it, for callers that only have its
    /// address from [`Region::into_raw`].
    ///
    /// # Safety
    /// Nobody uses the memory or a [`RegionRef`] of it any more, and no [`Region`] or
    /// [`crate::RegionVec`] of it will be dropped.
    pub unsafe fn unmap(&self, address: usize) -> Result<(), Error> {
        let foreign = Error::Foreign { address };
        let space = registry::find(address)
            .filter(|space| Arc::ptr_eq(&space.pager, self.inner()) && space.base() == address);
        let Some(space) = space else { return Err(foreign) };
        if let Err(error) = self.inner().check_process() {
            return if space.drop_copy() { Ok(()) } else { Err(error) };
        }
        let space = self.inner().regions().get(&space.id).cloned().ok_or(foreign)?;
        self.inner().unmap(&space);
        Ok(())
    }
}

/// Maps memory for `bytes`; `area` has a key for each page.
fn new_space(id: u32, inner: &Arc<Inner>, bytes: usize, area: Area) -> Result<Space, Error> {
    let failed = |source| Error::Map { bytes, source };
    let whole = area.pages() as usize * PAGE_BYTES;
    let memory = Mapping::for_pages(whole, registry::UNIT).map_err(failed)?;
    let base = memory.as_ptr() as usize;
    if !registry::covers(&(base..base + whole)) {
        return Err(failed(Errno::ADDRNOTAVAIL.into()));
    }
    Space::new(id, inner.clone(), memory, bytes, area)
}

impl Inner {
    fn unmap(&self, space: &Space) {
        let _blocked = Blocked::all();
        registry::remove(space);
        // The caller holds no lock yet that a handler may wait for.
        self.handlers.wait();
        let _steady = self.steady();
        self.regions_mut().remove(&space.id);
        let pages = space.close();
        self.cache.remove_area(space.area);
        self.count_table(-(space.table_bytes() as i64));
        self.account();
        self.budget.give_back(pages);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for RegionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("start", &self.as_ptr()).field("len", &self.len()).finish()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.check().is_err() {
            // In a fork there is a copy at these addresses, nothing, or something else.
            self.0.space.drop_copy();
            std::mem::forget(self.0.space.clone());
            return;
        }
        self.0.pager.inner().unmap(&self.0.space);
    }
}

/// Keeps a range in memory until it is dropped.
#[must_use = "the range is unpinned when this is dropped"]
pub struct Pinned {
    space: Arc<Space>,
    pages: Range<u32>,
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("pages", &self.pages).finish()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let inner = &self.space.pager;
        if inner.check_process().is_err() {
            std::mem::forget(self.space.clone());
            return;
        }
        for page in self.pages.clone() {
            self.space.unpin(page);
        }
        inner.count_pins(-(self.pages.len() as i64));
    }
}

//! One region's memory and the state of its pages.
//!
//! A page is changed only by the thread that made its word `Busy` ([`Space::take`],
//! [`Space::acquire`]); all others wait on the word. Words are made of memory that is mapped when
//! it is first touched, as is the region's own, so that a region costs only its touched part.

use crate::budget::{wait, wake_all};
use crate::error::Error;
use crate::keys::BLOCK;
use crate::pager::Inner;
use crate::registry::{self, UNIT};
use crate::word::{Kind, Word};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex, PoisonError};
use uzswap_engine::{Area, PAGE_BYTES, SwapEntry};
use uzswap_sys::map::{self, Mapping};

/// Words in a page of them.
const CHUNK: usize = PAGE_BYTES / size_of::<AtomicU32>();

/// See the module.
pub(crate) struct Space {
    pub(crate) id: u32,
    pub(crate) pager: Arc<Inner>,
    /// Until it is unmapped.
    memory: Mutex<Option<Mapping>>,
    base: usize,
    bytes: usize,
    pages: u32,
    pub(crate) area: Area,
    /// Of a window, by blocks: the keys that each has, of the area, and 1.
    blocks: Option<Mapping>,
    words: Mapping,
    /// Which chunks of the words have been touched.
    touched: Box<[AtomicU8]>,
    /// The program's advice on its accesses: see [`crate::streams`].
    pub(crate) advice: AtomicU8,
    /// It is being unmapped, or was: `Busy` pages stay so.
    is_closed: AtomicBool,
    /// In a fork: a file is mapped over the region. See [`crate::copy`].
    is_copy: AtomicBool,
    /// Its addresses are the program's own, which maps and unmaps them. See [`crate::window`].
    is_window: bool,
}

/// A page that the owner of this value has made `Busy`, and its word before.
pub(crate) struct Taken {
    pub(crate) space: Arc<Space>,
    pub(crate) page: u32,
    pub(crate) was: Word,
}

impl Taken {
    /// Ends `Busy`: the word is as before.
    pub(crate) fn put_back(self) {
        self.space.put(self.page, self.was);
    }
}

/// How many of these, from the first on, are neighbours in order.
pub(crate) fn neighbours(taken: &[Taken]) -> usize {
    let goes_on = |pair: &&[Taken]| {
        Arc::ptr_eq(&pair[0].space, &pair[1].space) && pair[0].page + 1 == pair[1].page
    };
    taken.windows(2).take_while(goes_on).count() + usize::from(!taken.is_empty())
}

impl Space {
    /// Maps memory for `bytes`; `area` has a key for each page.
    pub(crate) fn new(id: u32, pager: Arc<Inner>, bytes: usize, area: Area) -> Result<Self, Error> {
        let pages = area.pages();
        let failed = |source| Error::Map { bytes, source };
        let whole = pages as usize * PAGE_BYTES;
        let memory = Mapping::for_pages(whole, UNIT).map_err(failed)?;
        let base = memory.as_ptr() as usize;
        if !registry::covers(&(base..base + whole)) {
            return Err(failed(Errno::ADDRNOTAVAIL.into()));
        }
        pager.door.watch(base..base + whole).map_err(failed)?;
        Self::over(id, pager, (base, bytes), area, Some(memory))
    }

    /// Over addresses that are the program's; their pages are given keys of `area` as they are
    /// adopted.
    pub(crate) fn window(
        id: u32,
        pager: Arc<Inner>,
        (base, bytes): (usize, usize),
        area: Area,
    ) -> Result<Self, Error> {
        Self::over(id, pager, (base, bytes), area, None)
    }

    fn over(
        id: u32,
        pager: Arc<Inner>,
        (base, bytes): (usize, usize),
        area: Area,
        memory: Option<Mapping>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes, source };
        let is_window = memory.is_none();
        let pages = if is_window { (bytes / PAGE_BYTES) as u32 } else { area.pages() };
        let blocks = is_window.then(|| {
            let bytes = pages.div_ceil(BLOCK) as usize * size_of::<AtomicU32>();
            let blocks = Mapping::for_pages(bytes, PAGE_BYTES)?;
            blocks.set_inherited(0, blocks.len(), true)?;
            Ok(blocks)
        });
        let blocks = blocks.transpose().map_err(failed)?;
        let words = Mapping::for_pages(pages as usize * size_of::<AtomicU32>(), PAGE_BYTES);
        let words = words.map_err(failed)?;
        // A fork looks at them.
        words.set_inherited(0, words.len(), true).map_err(failed)?;
        let chunks = (pages as usize).div_ceil(CHUNK);
        Ok(Self {
            id,
            pager,
            memory: Mutex::new(memory),
            base,
            bytes,
            pages,
            area,
            blocks,
            words,
            touched: (0..chunks).map(|_| AtomicU8::new(0)).collect(),
            advice: AtomicU8::new(0),
            is_closed: AtomicBool::new(false),
            is_copy: AtomicBool::new(false),
            is_window,
        })
    }

    /// True if its addresses are the program's own.
    pub(crate) fn is_window(&self) -> bool {
        self.is_window
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < self.pages as usize * PAGE_BYTES
    }

    pub(crate) fn page_of(&self, address: usize) -> u32 {
        ((address - self.base) / PAGE_BYTES) as u32
    }

    pub(crate) fn address(&self, page: u32) -> usize {
        self.base + page as usize * PAGE_BYTES
    }

    pub(crate) fn key(&self, page: u32) -> SwapEntry {
        let at = match self.blocks {
            None => Some(page),
            Some(_) => self.block(page / BLOCK).map(|block| block * BLOCK + page % BLOCK),
        };
        let key = at.and_then(|at| self.area.entry(at));
        key.expect("a page of the region, or one that is adopted, has a key in its area")
    }

    /// How many pages from `page` on have keys in order.
    pub(crate) fn keys_in_order(&self, page: u32) -> usize {
        let left = self.blocks.as_ref().map(|_| BLOCK - page % BLOCK);
        left.unwrap_or(self.pages - page) as usize
    }

    /// The blocks that pages are in.
    pub(crate) fn blocks_of(&self, pages: Range<u32>) -> Range<u32> {
        pages.start / BLOCK..pages.end.div_ceil(BLOCK)
    }

    /// The keys that a block has, of a window.
    pub(crate) fn block(&self, at: u32) -> Option<u32> {
        self.block_word(at).load(Relaxed).checked_sub(1)
    }

    pub(crate) fn set_block(&self, at: u32, keys: Option<u32>) {
        self.block_word(at).store(keys.map_or(0, |keys| keys + 1), Relaxed);
    }

    fn block_word(&self, at: u32) -> &AtomicU32 {
        assert!(at < self.pages.div_ceil(BLOCK));
        let blocks = self.blocks.as_ref().expect("asked of windows only");
        // SAFETY: inside the mapping, which has a word for each block and lives as long as `self`;
        // aligned; words are only ever accessed as atomics; zeros are one.
        unsafe { &*blocks.as_ptr().cast::<AtomicU32>().add(at as usize) }
    }

    /// Bytes of the tables that grow with the region's size; words are counted as they are touched.
    pub(crate) fn table_bytes(&self) -> usize {
        let block_bytes = if self.is_window { PAGE_BYTES } else { 0 };
        self.touched.len() + size_of::<Self>() + block_bytes
    }

    fn word(&self, page: u32) -> &AtomicU32 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, which has a word for each page and lives as long as `self`;
        // aligned; words are only ever accessed as atomics; zeros are a word.
        unsafe { &*self.words.as_ptr().cast::<AtomicU32>().add(page as usize) }
    }

    pub(crate) fn load(&self, page: u32) -> Word {
        Word(self.word(page).load(Acquire))
    }

    /// Makes a page `Busy` if its word is still `from`.
    pub(crate) fn take(&self, page: u32, from: Word) -> bool {
        self.touch_chunk(page);
        self.change(page, from, Word::BUSY)
    }

    /// Changes a word that is still `from`, for changes that are complete by that.
    pub(crate) fn change(&self, page: u32, from: Word, to: Word) -> bool {
        debug_assert!(from.kind() != Kind::Busy);
        self.word(page).compare_exchange(from.0, to.0, AcqRel, Relaxed).is_ok()
    }

    /// Makes a page `Busy` as soon as it is not, and returns its former word.
    pub(crate) fn acquire(&self, page: u32) -> Word {
        loop {
            let word = self.load(page);
            if word.kind() == Kind::Busy {
                self.wait(page);
            } else if self.take(page, word) {
                return word;
            }
        }
    }

    /// Ends `Busy`, and wakes the waiting threads.
    pub(crate) fn put(&self, page: u32, word: Word) {
        let slot = self.word(page);
        let was = Word(slot.swap(word.0, AcqRel));
        debug_assert!(was.kind() == Kind::Busy);
        if was.has(Word::WAITED) {
            wake_all(slot);
        }
    }

    /// Waits until a page is not `Busy`, or for no reason.
    pub(crate) fn wait(&self, page: u32) {
        const SPINS: usize = 100;
        let slot = self.word(page);
        for _ in 0..SPINS {
            if Word(slot.load(Relaxed)).kind() != Kind::Busy {
                return;
            }
            std::hint::spin_loop();
        }
        let waited = Word::BUSY.with(Word::WAITED);
        let now = match slot.compare_exchange(Word::BUSY.0, waited.0, AcqRel, Acquire) {
            Ok(_) => waited,
            Err(now) => Word(now),
        };
        if now == waited {
            wait(slot, waited.0);
        }
    }

    /// Pins a page if it is there.
    pub(crate) fn pin_present(&self, page: u32) -> bool {
        loop {
            let word = self.load(page);
            let pinned = (word.kind() == Kind::Resident).then(|| word.pinned()).flatten();
            let Some(pinned) = pinned else { return false };
            if self.change(page, word, pinned) {
                return true;
            }
        }
    }

    /// Pins a page once less. A pin goes with its page: a page that has been unmapped, or given
    /// back by the program, has none any more.
    pub(crate) fn unpin(&self, page: u32) {
        loop {
            let word = self.load(page);
            match word.kind() {
                Kind::Busy if self.is_closed.load(Acquire) => return,
                // A call on the page is under way; it leaves a pinned page where it is.
                Kind::Busy => self.wait(page),
                Kind::Resident if word.pins() > 0 => {
                    if self.change(page, word, word.unpinned()) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// Counts the words' memory as it is touched.
    fn touch_chunk(&self, page: u32) {
        let chunk = &self.touched[page as usize / CHUNK];
        if chunk.load(Relaxed) == 0 && chunk.swap(1, Relaxed) == 0 {
            self.pager.budget.charge_anyway(1);
        }
    }

    /// The next page from `page` on that may ever have been touched.
    pub(crate) fn next_touched(&self, page: u32) -> Option<u32> {
        let first = page as usize / CHUNK;
        let chunk = self.touched.get(first..)?.iter().position(|chunk| chunk.load(Relaxed) != 0)?;
        let page = page.max(((first + chunk) * CHUNK) as u32);
        (page < self.pages).then_some(page)
    }

    /// Pages of a range of bytes: all that it touches, or only those that it covers.
    pub(crate) fn pages_of(
        &self,
        bytes: &Range<usize>,
        covered: bool,
    ) -> Result<Range<u32>, Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes {
            let must = format!("a range within the {} bytes of the region", self.bytes);
            let value = bytes.end as u64;
            return Err(Error::Range { what: "the end of the range", value, must });
        }
        // The last page of a region is covered by its last byte.
        let end_covers = bytes.end == self.bytes;
        let pages = match covered {
            true if end_covers => bytes.start.div_ceil(PAGE_BYTES)..bytes.end.div_ceil(PAGE_BYTES),
            true => bytes.start.div_ceil(PAGE_BYTES)..bytes.end / PAGE_BYTES,
            false => bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES),
        };
        Ok(pages.start as u32..(pages.end as u32).max(pages.start as u32))
    }

    /// Gives the memory of pages that are all `Busy` back to the kernel.
    pub(crate) fn discard(&self, pages: Range<u32>) {
        if self.is_window {
            let range = self.address(pages.start)..self.address(pages.end);
            // SAFETY: as below; the content of these pages is in a frame, or not needed.
            let done = unsafe { map::discard_range(range) };
            return done.expect("MADV_DONTNEED of memory that is mapped");
        }
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &*memory else { return };
        let offset = pages.start as usize * PAGE_BYTES;
        // SAFETY: the caller has decided that the content of these pages is not needed.
        let done = unsafe { memory.discard_part(offset, pages.len() * PAGE_BYTES) };
        done.expect("MADV_DONTNEED of our own mapping");
    }

    /// Lets pages leave after the program has locked its memory. An error would mean that it is not
    /// mapped.
    pub(crate) fn unlock(&self) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = memory.as_ref().map(Mapping::unlock);
    }

    /// Takes every page for good, unmaps the memory, and returns how many pages had any.
    pub(crate) fn close(&self) -> i64 {
        // Before any page is taken for good.
        self.is_closed.store(true, Release);
        let mut resident = 0;
        let mut at = self.next_touched(0);
        while let Some(page) = at {
            let was = self.acquire(page);
            match was.kind() {
                Kind::Resident => resident += 1,
                Kind::Staged => self.pager.staging.disown(was.frame(), self, page),
                _ => {}
            }
            at = self.next_touched(page + 1);
        }
        let chunks: usize = self.touched.iter().map(|chunk| usize::from(chunk.load(Relaxed))).sum();
        drop(self.memory.lock().unwrap_or_else(PoisonError::into_inner).take());
        resident + chunks as i64
    }

    /// All of its addresses.
    fn range(&self) -> Range<usize> {
        self.base..self.address(self.pages)
    }

    /// Decides if processes that are forked from now on inherit the memory.
    pub(crate) fn set_inherited(&self, is_inherited: bool) -> io::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &*memory else { return Ok(()) };
        memory.set_inherited(0, self.range().len(), is_inherited)
    }

    /// Writes pages to a file. In a fork that has inherited the memory.
    pub(crate) fn write_pages(
        &self,
        pages: Range<u32>,
        file: &File,
        offset: u64,
    ) -> io::Result<()> {
        let (at, bytes) = (self.address(pages.start), pages.len() * PAGE_BYTES);
        // SAFETY: mapped, as the caller says, in a process of one thread, which is here.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
        file.write_all_at(bytes, offset)
    }

    /// Maps the part of a file that begins at `offset` over the memory. In a fork that has
    /// inherited it.
    pub(crate) fn cover(&self, file: &File, offset: u64) -> io::Result<()> {
        // SAFETY: the fork has the memory at these addresses; its content is in the file.
        unsafe { map::map_file_over(self.range(), file.as_fd(), offset) }?;
        self.is_copy.store(true, Relaxed);
        Ok(())
    }

    /// Unmaps the memory that a fork has inherited and could not complete.
    pub(crate) fn abandon(&self) {
        self.is_copy.store(false, Relaxed);
        // SAFETY: the fork has the memory at these addresses, or the file; nobody has used it yet.
        let done = unsafe { map::unmap_range(self.range()) };
        done.expect("munmap of a mapping");
    }

    /// True if this is a fork with a copy of the region.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_copy.load(Relaxed)
    }

    /// Unmaps the copy that a fork has, if it has one.
    pub(crate) fn drop_copy(&self) -> bool {
        let had = self.is_copy.swap(false, Relaxed);
        if had {
            // SAFETY: the region's user gives it up, and with it the mapping in its place.
            let done = unsafe { map::unmap_range(self.range()) };
            done.expect("munmap of a mapping");
        }
        had
    }
}

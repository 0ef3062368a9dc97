//! Pages on their way out: uncompressed, in batches of 64 frames.
//!
//! ```text
//! hole ──(64 pages are moved in)──> queued ──(stored, oldest first; frames given back)──> hole
//! ```
//! A page that is touched while its batch is queued is moved back, without a codec.
//!
//! A frame's memory is never used for another page. A page that was moved in is the program's own
//! page of memory. A pipe (`vmsplice`) or a socket (`MSG_ZEROCOPY`) may still refer to that memory.
//! The kernel nevertheless moves the page, and a reused frame would change the data in the pipe. If
//! the memory is given back to the kernel instead, the pipe or socket keeps the data.
//!
//! The area is registered, as the target of moves must be; no thread of ours touches an absent
//! frame. Other code may: a program that locks all of its memory (`mlockall`) makes the kernel
//! bring all frames in. So the area's descriptor delivers faults as signals, which are an error
//! inside the kernel.

#![expect(
    unsafe_code,
    reason = "pages are moved from and to raw memory: the thread that made a page's word `Busy` has the page alone"
)]

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::Mapping;
use uzswap_sys::uffd::{Delivery, Uffd};

/// Frames of a batch, which is as large as the largest window.
pub(crate) const BATCH: usize = uzswap_policy::ahead::WINDOW_MAX;

/// Owner of a frame without a page: no region has this number.
const NOBODY: u64 = u64::MAX;

fn owner_of((region, page): (u32, u32)) -> u64 {
    u64::from(region) << 32 | u64::from(page)
}

pub(crate) struct Staging {
    /// Moves pages to the area; `None` where they are copied.
    uffd: Option<Uffd>,
    memory: Mapping,
    batches: Box<[Batch]>,
    lists: Mutex<Lists>,
}

struct Lists {
    holes: Vec<u32>,
    queued: VecDeque<u32>,
}

/// The frames of a batch: which have memory, and their owners. The thread that has the batch writes
/// both; a thread that takes a page back clears the page's bit.
pub(crate) struct Batch {
    present: AtomicU64,
    owners: [AtomicU64; BATCH],
}

impl Batch {
    pub(crate) fn present(&self) -> u64 {
        self.present.load(Acquire)
    }

    /// The region and page of frame `at`, if there is a page in it.
    pub(crate) fn owner(&self, at: usize) -> Option<(u32, u32)> {
        let owner = self.owners[at].load(Acquire);
        let is_there = self.present() & 1 << at != 0 && owner != NOBODY;
        is_there.then_some(((owner >> 32) as u32, owner as u32))
    }
}

impl Staging {
    /// An area of `batches` batches, to which userfaultfd can move pages if `by_userfaultfd`.
    pub(crate) fn new(batches: usize, by_userfaultfd: bool) -> io::Result<Self> {
        let memory = Mapping::for_pages(batches.max(1) * BATCH * PAGE_BYTES, PAGE_BYTES)?;
        let base = memory.as_ptr() as usize;
        let uffd = by_userfaultfd.then(|| Uffd::open(Delivery::Signal)).transpose()?;
        if let Some(uffd) = &uffd {
            uffd.register(base..base + memory.len())?;
        }
        let batch = |_| Batch {
            present: AtomicU64::new(0),
            owners: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        let lists = Lists {
            holes: (0..batches as u32).rev().collect(),
            queued: VecDeque::with_capacity(batches),
        };
        let batches = (0..batches).map(batch).collect();
        Ok(Self { uffd, memory, batches, lists: Mutex::new(lists) })
    }

    /// Makes forked processes inherit the frames.
    pub(crate) fn set_inherited(&self) -> io::Result<()> {
        self.memory.set_inherited(0, self.memory.len(), true)
    }

    /// Opens a descriptor of its own for the frames of a forked child.
    pub(crate) fn renew(&self) -> io::Result<()> {
        let Some(uffd) = &self.uffd else { return Ok(()) };
        uffd.renew()?;
        let base = self.memory.as_ptr() as usize;
        uffd.register(base..base + self.memory.len())
    }

    /// The descriptors that must stay open.
    pub(crate) fn descriptors(&self) -> Vec<i32> {
        self.uffd.as_ref().map(Uffd::descriptors).unwrap_or_default()
    }

    /// The descriptor that moves pages to the area.
    pub(crate) fn uffd(&self) -> &Uffd {
        self.uffd.as_ref().expect("only the userfaultfd door asks for it")
    }

    /// The frame in which the page of a region is.
    pub(crate) fn frame_of(&self, page: (u32, u32)) -> Option<usize> {
        let owner = Some(page);
        let frames = 0..self.batches.len() * BATCH;
        frames.into_iter().find(|frame| self.batches[frame / BATCH].owner(frame % BATCH) == owner)
    }

    pub(crate) fn table_bytes(&self) -> usize {
        self.batches.len() * size_of::<Batch>()
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn batch(&self, number: u32) -> &Batch {
        &self.batches[number as usize]
    }

    pub(crate) fn address(&self, frame: usize) -> usize {
        self.memory.as_ptr() as usize + frame * PAGE_BYTES
    }

    /// A batch without memory.
    pub(crate) fn take_hole(&self) -> Option<u32> {
        self.lists().holes.pop()
    }

    /// The batch queued longest.
    pub(crate) fn take_oldest(&self) -> Option<u32> {
        self.lists().queued.pop_front()
    }

    pub(crate) fn queued(&self) -> usize {
        self.lists().queued.len()
    }

    /// Puts a batch that has been filled with pages into the queue.
    pub(crate) fn queue(&self, number: u32) {
        self.lists().queued.push_back(number);
    }

    /// Gives a batch back whose frames have no memory.
    pub(crate) fn give_hole(&self, number: u32) {
        self.batch(number).present.store(0, Relaxed);
        self.lists().holes.push(number);
    }

    /// Gives a batch back whose pages are all stored, taken back or copied, and frees the memory of
    /// its frames. Returns the number of those pages.
    pub(crate) fn give_back(&self, number: u32) -> i64 {
        let present = self.batch(number).present();
        if present != 0 {
            let (offset, bytes) = (number as usize * BATCH * PAGE_BYTES, BATCH * PAGE_BYTES);
            // SAFETY: no thread relies on the content of the frames, as the caller says.
            let done = unsafe { self.memory.discard_part(offset, bytes) };
            done.expect("MADV_DONTNEED of our own mapping");
        }
        self.give_hole(number);
        present.count_ones().into()
    }

    /// Lets pages leave the area after the program has locked its memory. An error would mean that
    /// the area is not mapped.
    pub(crate) fn unlock(&self) {
        let _ = self.memory.unlock();
    }

    /// Notes that the page of a region has been moved into a frame.
    pub(crate) fn enter(&self, frame: usize, page: (u32, u32)) {
        let batch = &self.batches[frame / BATCH];
        batch.owners[frame % BATCH].store(owner_of(page), Relaxed);
        batch.present.fetch_or(1 << (frame % BATCH), Release);
    }

    /// Notes that a page has left its frame. The frame's memory still exists. If the page's region
    /// is being unmapped, the batch may have other pages by now, and nothing changes.
    pub(crate) fn disown(&self, frame: usize, page: (u32, u32)) {
        let owner = &self.batches[frame / BATCH].owners[frame % BATCH];
        let _ = owner.compare_exchange(owner_of(page), NOBODY, AcqRel, Relaxed);
    }

    /// Notes that a frame's page has been moved away.
    pub(crate) fn leave(&self, frame: usize) {
        self.batches[frame / BATCH].present.fetch_and(!(1 << (frame % BATCH)), Release);
    }

    /// Frames of a batch, into which the caller copies pages. The caller has the batch.
    #[expect(clippy::mut_from_ref, reason = "only one thread has a batch in hand")]
    pub(crate) fn frames_mut(&self, frame: usize, count: usize) -> &mut [Page] {
        assert!(frame + count <= self.batches.len() * BATCH);
        // SAFETY: the frames are inside the area. The caller owns the batch, and no thread uses a
        // frame before a word names it.
        unsafe { std::slice::from_raw_parts_mut(self.address(frame) as *mut Page, count) }
    }

    /// The page in a frame: the caller has made its word `Busy`.
    pub(crate) fn page(&self, frame: usize) -> &Page {
        assert!(frame < self.batches.len() * BATCH);
        // SAFETY: the frame is inside the area. As the word said, it is present, and no other
        // thread changes it while the word is `Busy`.
        unsafe { &*(self.address(frame) as *const Page) }
    }
}

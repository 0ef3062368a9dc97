//! Zspages: runs of objects of one size over a few frames, which need not be neighbours.
//!
//! Descriptors are in a table of their own and are reused; a descriptor's number is half of a
//! handle. All fields are written under the lock of the zspage's class. `frames` and `class` do not
//! change while an object is live in the zspage. A thread that keeps an object alive, by its
//! entry's lock, thus reads these two without the class's lock.

use super::section::{Frame, SECTION_FRAMES};
use super::size_class::FRAMES_MAX;
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, Lasting};
use crate::sync::{Mutex, lock};
use crate::table::ChunkedTable;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicUsize};
use std::sync::atomic::{Ordering::Relaxed, Ordering::Release};

/// No zspage, no object.
pub(super) const NONE: u32 = u32::MAX;
/// No object.
pub(super) const NO_OBJECT: u16 = u16::MAX;
/// The class of a descriptor that is not in use.
pub(super) const NO_CLASS: u8 = u8::MAX;

/// See the module.
#[repr(C)]
pub(crate) struct Zspage {
    frames: [DurableAtomic<AtomicU32>; FRAMES_MAX],
    /// Neighbours in the list of the fullness group; [`NONE`] at the ends.
    pub(super) prev: DurableAtomic<AtomicU32>,
    pub(super) next: DurableAtomic<AtomicU32>,
    /// The number of allocated objects.
    pub(super) used: DurableAtomic<AtomicU16>,
    /// No object at or after this index was ever allocated. So a new zspage needs no free list.
    pub(super) fresh: DurableAtomic<AtomicU16>,
    /// First of the list of freed objects.
    pub(super) free: DurableAtomic<AtomicU16>,
    pub(super) class: DurableAtomic<AtomicU8>,
    /// The fullness group whose list has the zspage.
    pub(super) group: DurableAtomic<AtomicU8>,
}

/// 48 bytes for some twenty objects.
const _: () = assert!(size_of::<Zspage>() == 48);

#[expect(
    unsafe_code,
    reason = "memory that several processes map, one after the other: one of them serves at a time; it holds atomics, or data of a single thread"
)]
// SAFETY: it consists of atomic numbers, of which any bytes are values, and has no destructor.
unsafe impl Lasting for Zspage {}

impl Zspage {
    /// Descriptors that are made together: as many as a section has frames.
    pub(crate) const CHUNK: usize = SECTION_FRAMES;

    fn new() -> Self {
        Self {
            frames: std::array::from_fn(|_| DurableAtomic::new(NONE)),
            prev: DurableAtomic::new(NONE),
            next: DurableAtomic::new(NONE),
            used: DurableAtomic::new(0),
            fresh: DurableAtomic::new(0),
            free: DurableAtomic::new(NO_OBJECT),
            class: DurableAtomic::new(NO_CLASS),
            group: DurableAtomic::new(0),
        }
    }

    /// Resets it to [`Self::new`].
    fn clear(&self) {
        self.frames.iter().for_each(|frame| frame.store(NONE, Relaxed));
        self.class.store(NO_CLASS, Relaxed);
    }

    /// Turns an unused descriptor into an empty zspage.
    pub(super) fn init(&self, class: u8, frames: &[Frame]) {
        for (slot, frame) in self.frames.iter().zip(frames) {
            slot.store(frame.0, Relaxed);
        }
        self.used.store(0, Relaxed);
        self.fresh.store(0, Relaxed);
        self.free.store(NO_OBJECT, Relaxed);
        // Stored last, because a thread that empties a section reads all zspages without their
        // locks, and finds the section's zspages by their frames.
        self.class.store(class, Release);
    }

    pub(super) fn frame(&self, number: usize) -> Frame {
        Frame(self.frames[number].load(Relaxed))
    }

    /// The header of a huge zspage's one object. The object fills its only frame, so the header
    /// takes the place of the numbers of further frames.
    pub(super) fn huge_header(&self) -> u64 {
        let [low, high] = [1, 2].map(|i| u64::from(self.frames[i].load(Relaxed)));
        high << 32 | low
    }

    pub(super) fn set_huge_header(&self, header: u64) {
        self.frames[1].store(header as u32, Relaxed);
        self.frames[2].store((header >> 32) as u32, Relaxed);
    }
}

/// Descriptors to a chunk of the table.
const CHUNK: usize = Zspage::CHUNK;

/// All descriptors.
pub(super) struct Zspages {
    table: ChunkedTable<Zspage, CHUNK>,
    unused: Mutex<FreeDescriptors>,
    /// Locked by the thread that makes descriptors.
    making: Mutex<Making>,
    /// The number of unused descriptors. It is written under the lock of `unused`.
    ready: AtomicUsize,
    durable: Option<Arc<Durable>>,
}

/// The type of a lock. Only maintaining threads take this lock, and they allocate memory under it.
struct Making;

/// The spare descriptors, a list through their `next`.
struct FreeDescriptors {
    first: u32,
}

impl Zspages {
    /// Space for `count_max` zspages; none has memory yet.
    pub(super) fn new(count_max: usize, durable: Option<&Arc<Durable>>) -> Self {
        Self {
            table: ChunkedTable::new(count_max),
            unused: Mutex::new(FreeDescriptors { first: NONE }),
            making: Mutex::new(Making),
            ready: AtomicUsize::new(0),
            durable: durable.cloned(),
        }
    }

    pub(super) fn get(&self, number: u32) -> &Zspage {
        self.table.get(number as usize).expect("a handle names a zspage that was made")
    }

    /// A spare descriptor, if there is one.
    pub(super) fn take(&self) -> Option<u32> {
        let mut unused = lock(&self.unused);
        let number = unused.first;
        if number == NONE {
            return None;
        }
        unused.first = self.get(number).next.load(Relaxed);
        self.ready.fetch_sub(1, Relaxed);
        Some(number)
    }

    pub(super) fn give(&self, number: u32) {
        let zspage = self.get(number);
        zspage.class.store(NO_CLASS, Relaxed);
        let mut unused = lock(&self.unused);
        zspage.next.store(unused.first, Relaxed);
        unused.first = number;
        self.ready.fetch_add(1, Relaxed);
    }

    /// True if `count` zspages find a descriptor, or if there can be no more descriptors.
    pub(super) fn has_ready(&self, count: usize) -> bool {
        self.ready.load(Relaxed) >= count || self.table.is_whole()
    }

    /// Makes spare descriptors for `frames` frames of raw pages, the case with the most zspages,
    /// and for at least a section. Allocates. Fails without memory.
    pub(super) fn provision(&self, frames: usize) -> io::Result<()> {
        let is_enough = || self.has_ready(frames.max(CHUNK));
        if is_enough() {
            return Ok(());
        }
        let _making = lock(&self.making);
        while !is_enough() {
            let chunk = self.table.made();
            if !self.make(chunk)? {
                break;
            }
            let first = (chunk * CHUNK) as u32;
            (first..first + CHUNK as u32).rev().for_each(|number| self.give(number));
        }
        Ok(())
    }

    fn make(&self, chunk: usize) -> io::Result<bool> {
        let Some(durable) = &self.durable else { return self.table.make(chunk, Zspage::new) };
        let made = self.table.put(chunk, || {
            let zspages = durable.descriptors(chunk)?;
            zspages.iter().for_each(Zspage::clear);
            Ok(zspages)
        })?;
        if made {
            durable.note_descriptors(chunk + 1);
        }
        Ok(made)
    }

    /// Takes over the descriptors that another process has left. None is spare yet.
    pub(super) fn adopt(&self, durable: &Arc<Durable>) -> io::Result<()> {
        for chunk in 0..durable.descriptor_chunks() {
            self.table.put(chunk, || durable.descriptors(chunk))?;
        }
        Ok(())
    }

    /// Numbers of all descriptors, in use or not.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        0..(self.table.made() * CHUNK) as u32
    }

    /// Bytes that the table takes.
    pub(super) fn bytes(&self) -> usize {
        self.table.bytes()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::cache::layout::Shape;

    /// In memory that outlives the process, descriptors are cleared when they are made.
    #[test]
    #[cfg_attr(miri, ignore = "maps a file")]
    fn several_threads_make_each_descriptor_once() {
        const CHUNKS: usize = 16;
        for _ in 0..50 {
            let file = uzswap_sys::shared::create("uzswap-zspages").unwrap();
            let shape = Shape { keys: 4096, sections: CHUNKS, backing_bytes: 0, is_sealed: false };
            let durable = shape.open(file).unwrap();
            let zspages = Zspages::new(CHUNKS * CHUNK, Some(&durable));
            let take_all = || {
                let mut taken = Vec::new();
                while !zspages.table.is_whole() {
                    zspages.provision(0).unwrap();
                    while let Some(number) = zspages.take() {
                        zspages.get(number).init(1, &[Frame(number)]);
                        taken.push(number);
                    }
                }
                taken
            };
            let mut taken: Vec<u32> = std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(take_all));
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            for number in &taken {
                assert_eq!(zspages.get(*number).class.load(Relaxed), 1, "{number} was cleared");
            }
            let count = taken.len();
            taken.sort_unstable();
            taken.dedup();
            assert_eq!(taken.len(), count, "some were given out twice");
            assert_eq!(durable.descriptor_chunks(), CHUNKS);
        }
    }
}

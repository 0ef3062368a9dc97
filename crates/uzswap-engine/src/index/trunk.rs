//! A trunk's memory: made as a whole, reached by a pointer, freed when no thread can use it any
//! more.
//!
//! A pointer in the directory comes from [`TrunkMemory::make`]. Only pinned threads read it. The
//! one thread that removes it from the directory [`retire`]s the trunk; threads that are pinned
//! later do not find it. The maintaining thread frees the trunk.

#![expect(
    unsafe_code,
    reason = "trunks are followed by pointer: a trunk is freed two epochs after it left the directory; only pinned threads follow pointers"
)]

use super::{Entry, Index, TRUNK_ENTRIES};
use crate::durable::{Durable, TrunkFrame};
use crate::sync::lock;
use crate::table::boxed;
use crossbeam_epoch::{Atomic, Guard, Shared};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
#[cfg(not(feature = "shuttle"))]
use std::sync::{
    Weak,
    atomic::{AtomicU64, Ordering::*},
};

#[cfg(not(feature = "shuttle"))]
pub(super) type Trunk = [Entry; TRUNK_ENTRIES];

/// Under the model checker the memory stays and is marked, so that a use after free is seen.
#[cfg(feature = "shuttle")]
pub(super) struct Trunk {
    entries: Box<[Entry]>,
    freed: std::sync::atomic::AtomicBool,
}

/// A trunk with one owner: it is spare, in the directory, or to be freed.
///
/// Invariant: the pointer leads to a trunk that [`TrunkMemory::make`] made and that is not freed.
#[derive(Debug)]
pub(super) struct Owned(NonNull<Trunk>);

// SAFETY: a trunk is atomics, and has no tie to the thread that made it.
unsafe impl Send for Owned {}

impl Owned {
    /// The pointer for the directory.
    pub(super) fn shared<'g>(self) -> Shared<'g, Trunk> {
        Shared::from(self.0.as_ptr().cast_const())
    }

    /// The trunk of a pointer that the caller has taken out of the directory; `None` for null.
    ///
    /// # Safety
    /// Only the caller has taken the trunk out, and no other thread can use the trunk any more.
    unsafe fn of(at: *const Trunk) -> Option<Self> {
        NonNull::new(at.cast_mut()).map(Self)
    }
}

/// Makes and frees trunks: in the process's own memory, or in memory that outlives it.
#[derive(Clone)]
pub(super) struct TrunkMemory(pub(super) Option<Arc<Durable>>);

impl TrunkMemory {
    /// A trunk of absent entries, if possible in the home of trunk `number`. Errors: no memory.
    pub(super) fn make(&self, number: usize) -> io::Result<Owned> {
        #[cfg(feature = "shuttle")]
        let _ = number;
        match &self.0 {
            #[cfg(not(feature = "shuttle"))]
            Some(durable) => Ok(Self::in_frame(durable, durable.take_trunk(number)?)),
            _ => Ok(Owned(NonNull::from(Box::leak(new()?)))),
        }
    }

    /// The trunk in a frame. A frame is as large as a trunk and populated, and its zeros are absent
    /// entries.
    #[cfg(not(feature = "shuttle"))]
    pub(super) fn in_frame(durable: &Durable, frame: TrunkFrame) -> Owned {
        Owned(durable.trunk(frame).cast())
    }

    #[cfg(feature = "shuttle")]
    pub(super) fn in_frame(_durable: &Durable, _frame: TrunkFrame) -> Owned {
        unreachable!("the model checker has no memory that outlives it")
    }

    /// The frame of a trunk, where it outlives the process.
    pub(super) fn frame_of(&self, trunk: &Owned) -> Option<TrunkFrame> {
        self.0.as_ref().map(|durable| durable.frame_at(trunk.0.cast()))
    }

    /// True if a trunk is in the home of trunk `number`.
    pub(super) fn is_home(&self, trunk: &Owned, number: usize) -> bool {
        self.frame_of(trunk).is_some_and(|frame| frame.is_home_of(number))
    }

    pub(super) fn free(&self, trunk: Owned) {
        match &self.0 {
            Some(durable) => durable.give_trunk(durable.frame_at(trunk.0.cast())),
            // SAFETY: without other memory `make` made it from a box, and its only owner passes it.
            None => drop(unsafe { Box::from_raw(trunk.0.as_ptr()) }),
        }
    }
}

impl Index {
    /// Keeps at most `trunks` spare trunks, and frees the others.
    pub(crate) fn set_spare_max(&self, trunks: usize) {
        let most = trunks.clamp(1, Self::SPARE);
        self.spare_max.store(most, std::sync::atomic::Ordering::Relaxed);
        let mut spare = lock(&self.spare);
        let kept = spare.len().min(most);
        let surplus = spare.split_off(kept);
        drop(spare);
        surplus.into_iter().for_each(|trunk| self.memory.free(trunk));
    }
}

fn new() -> io::Result<Box<Trunk>> {
    let entries = boxed(TRUNK_ENTRIES, Entry::new)?;
    #[cfg(not(feature = "shuttle"))]
    return Ok(entries.try_into().ok().expect("it has as many entries as a trunk"));
    #[cfg(feature = "shuttle")]
    return Ok(Box::new(Trunk { entries, freed: false.into() }));
}

pub(super) fn entries(trunk: &Trunk) -> &[Entry; TRUNK_ENTRIES] {
    #[cfg(not(feature = "shuttle"))]
    return trunk;
    #[cfg(feature = "shuttle")]
    {
        let freed = trunk.freed.load(std::sync::atomic::Ordering::SeqCst);
        assert!(!freed, "a trunk used after its end");
        trunk.entries[..].try_into().expect("it has as many entries as a trunk")
    }
}

/// The trunk that a pointer of the directory points to.
pub(super) fn get<'g>(at: Shared<'g, Trunk>) -> Option<&'g Trunk> {
    // SAFETY: a thread that is pinned for `'g` read the pointer from the directory. Only `retire`
    // frees such a trunk, after these threads are unpinned. A trunk consists of atomics, so there
    // are only shared references.
    unsafe { at.as_ref() }
}

/// Trunks that no thread can use any more, to be freed: linked by their first entries' second
/// words. Any thread that pins itself may have to add a trunk to this list. A serving thread must
/// not free a trunk, because a thread that waits for memory may have the allocator's lock.
#[cfg(not(feature = "shuttle"))]
pub(super) struct Retired {
    first: AtomicU64,
    /// The memory that outlives the process, if the trunks are in it. It is a weak reference:
    /// otherwise a thread that stays pinned would keep the memory of a cache that no longer exists.
    outlives: Option<Weak<Durable>>,
}

#[cfg(not(feature = "shuttle"))]
impl Retired {
    /// An empty list, of this memory.
    pub(super) fn new(memory: &TrunkMemory) -> Self {
        Self { first: AtomicU64::new(0), outlives: memory.0.as_ref().map(Arc::downgrade) }
    }

    /// The memory of the retired trunks, while the caller uses it; `None` if it was freed with the
    /// cache.
    fn memory(&self) -> Option<TrunkMemory> {
        match &self.outlives {
            None => Some(TrunkMemory(None)),
            Some(outlives) => outlives.upgrade().map(|durable| TrunkMemory(Some(durable))),
        }
    }

    /// Adds a trunk, whose memory the caller keeps.
    fn push(&self, trunk: Owned) {
        let at = trunk.0.expose_provenance().get() as u64;
        // SAFETY: by `Owned`'s invariant.
        let entries = unsafe { trunk.0.as_ref() };
        let link = |first| {
            entries[0].link_of_retired().store(first, Relaxed);
            Some(at)
        };
        // Release: the thread that frees the trunks follows the links. This takes all of them.
        let _ = self.first.fetch_update(Release, Relaxed, link);
    }

    /// Frees all of these trunks.
    pub(super) fn free(&self) {
        let Some(memory) = self.memory() else { return };
        let mut next = self.first.swap(0, Acquire);
        while next != 0 {
            let at = std::ptr::with_exposed_provenance::<Trunk>(next as usize);
            // SAFETY: `push` took it from its owner, and no other thread has taken it off the list.
            let Some(trunk) = (unsafe { Owned::of(at) }) else { return };
            // SAFETY: by `Owned`'s invariant.
            next = unsafe { trunk.0.as_ref() }[0].link_of_retired().load(Relaxed);
            memory.free(trunk);
        }
    }
}

#[cfg(not(feature = "shuttle"))]
impl Drop for Retired {
    fn drop(&mut self) {
        self.free();
    }
}

/// Under the model checker no memory is freed.
#[cfg(feature = "shuttle")]
pub(super) struct Retired;

#[cfg(feature = "shuttle")]
impl Retired {
    pub(super) fn new(_memory: &TrunkMemory) -> Self {
        Self
    }

    pub(super) fn free(&self) {}
}

/// Adds a trunk that only the caller has removed from the directory to the retired ones, as soon as
/// no thread can use it.
pub(super) fn retire(at: Shared<'_, Trunk>, retired: &Arc<Retired>, pinned: &Guard) {
    #[cfg(not(feature = "shuttle"))]
    {
        let (at, retired) = (at.as_raw().expose_provenance(), retired.clone());
        let push = move || {
            let Some(_held) = retired.memory() else { return };
            let at = std::ptr::with_exposed_provenance::<Trunk>(at);
            // SAFETY: the directory does not have it any more. Each entry was made gone, so no
            // thread puts it back. Threads that may use it were pinned before it was retired. The
            // trunk's memory is kept.
            if let Some(trunk) = unsafe { Owned::of(at) } {
                retired.push(trunk);
            }
        };
        // `push` has three words, so the epochs allocate nothing for it. It owns, or keeps alive,
        // everything that it uses.
        pinned.defer(push);
    }
    #[cfg(feature = "shuttle")]
    {
        let at = at.as_raw() as usize;
        let mark = move || {
            // SAFETY: the memory is never freed.
            let trunk = unsafe { &*(at as *const Trunk) };
            trunk.freed.store(true, std::sync::atomic::Ordering::SeqCst);
        };
        pinned.defer(mark);
        let _ = retired;
    }
}

/// Frees the trunk of a directory that no other thread has any more. A trunk in memory that
/// outlives the process stays there.
pub(super) fn drop_in(slot: &mut Atomic<Trunk>, memory: &TrunkMemory) {
    let slot = std::mem::replace(slot, Atomic::null());
    // SAFETY: no other thread has the directory, so none is pinned for a pointer in it.
    let at =
        slot.load(std::sync::atomic::Ordering::Relaxed, unsafe { crossbeam_epoch::unprotected() });
    // SAFETY: the directory is being dropped, so no other thread reads it. A trunk in it is not
    // retired, because retiring takes it out first.
    if let (Some(trunk), None) = (unsafe { Owned::of(at.as_raw()) }, &memory.0) {
        memory.free(trunk);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use crate::index::TRUNK_ENTRIES;
    use crate::testing::{Content, TestBacking, page_of};
    use crate::{Area, Cache, Config, Load, Store};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::sync::atomic::Ordering::Relaxed;

    /// A cache in a file of this name, with an area of `trunks` trunks.
    fn cache_in_file(name: &str, trunks: usize) -> (Cache, Area) {
        let pages = (trunks * TRUNK_ENTRIES) as u32;
        let config = Config {
            pages_max: pages,
            ram_bytes: 8 << 20,
            ram_bytes_max: 8 << 20,
            pool_bytes_max: 8 << 20,
            algorithm: "lz4".parse().expect("a codec"),
            seals_backing: false,
        };
        let (backing, _) = TestBacking::new(4 << 20, 512);
        let memory = memfd_create(name, MemfdFlags::empty()).expect("a file");
        let cache = Cache::in_file(config, Box::new(backing), memory).expect("memory");
        let area = cache.add_area(pages).expect("room for all pages");
        (cache, area)
    }

    #[test]
    fn trunks_that_are_made_in_order_are_at_home() {
        const TRUNKS: usize = 40;
        let (cache, area) = cache_in_file("trunks-at-home", TRUNKS);
        let first = area.first as usize / TRUNK_ENTRIES;
        let directory = cache.durable.as_ref().unwrap().directory();
        let at_home = || {
            let words = (first..first + TRUNKS).map(|number| directory[number].load(Relaxed));
            (first..).zip(words).filter(|(number, word)| *word as usize == number + 1).count()
        };
        let store = |offset: usize| {
            cache.maintain().unwrap();
            let key = area.entry(offset as u32).unwrap();
            assert_eq!(cache.store(key, &page_of(Content::Text, 1)), Store::Stored);
            assert_eq!(cache.load(key, &mut [0; 4096]).unwrap(), Load::Hit);
        };
        (0..TRUNKS).for_each(|number| store(number * TRUNK_ENTRIES));
        assert_eq!(at_home(), TRUNKS);
        // Trunks that are made again in another order get any home.
        let keys = (0..TRUNKS).map(|number| area.entry((number * TRUNK_ENTRIES) as u32).unwrap());
        keys.for_each(|key| cache.invalidate(key));
        (0..2).for_each(|_| _ = cache.maintain());
        (0..TRUNKS).rev().for_each(|number| store(number * TRUNK_ENTRIES));
        cache.check();
    }

    #[test]
    fn a_cache_that_is_dropped_takes_its_memory_along_while_a_thread_is_pinned() {
        const NAME: &str = "trunks-while-pinned";
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(NAME);
        let (cache, area) = cache_in_file(NAME, 2);
        let keys = [0, TRUNK_ENTRIES as u32].map(|offset| area.entry(offset).unwrap());
        let pinned = uzswap_sync::pin();
        cache.maintain().unwrap();
        for key in keys {
            assert_eq!(cache.store(key, &page_of(Content::Text, 1)), Store::Stored);
        }
        keys.into_iter().for_each(|key| cache.invalidate(key));
        let made = || cache.index.made.load(Relaxed);
        let before = made();
        cache.maintain().unwrap();
        assert!(made() < before, "a trunk is retired");
        assert!(is_mapped());
        drop(cache);
        assert!(!is_mapped(), "a trunk that is to be freed keeps all of the memory");
        drop(pinned);
    }
}

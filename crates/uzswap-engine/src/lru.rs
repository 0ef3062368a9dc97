//! The order of age: lists with a second chance.
//!
//! A list for each shard, each under a lock of its own. An entry's shard follows from its key.
//! Sixteen neighbouring keys share a shard, because neighbours were stored together and should be
//! written back together. Links are keys, in the entries themselves, so moving an object or growing
//! an index never touches a list. Taking the oldest of each shard in turn gives nearly the oldest
//! overall, because keys are spread evenly over shards.
//!
//! An entry is on a list exactly while its page is in the pool and no writeback of it is in flight.
//! [`Lru::push`] and [`Lru::remove`] are called with the entry locked, [`Lru::pop`] without.
//! `remove` therefore accepts an entry that `pop` has just taken.

use crate::crash_points::DurableAtomic;
use crate::ids::SwapEntry;
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};
use crossbeam_utils::CachePadded;

/// The links of an entry, which are its second word.
pub(crate) trait Links {
    fn links(&self, key: SwapEntry) -> &DurableAtomic<AtomicU64>;
}

/// No neighbour.
const END: u32 = u32::MAX;
/// The links of an entry on no list. No entry on a list has them: its neighbours would both be
/// entry 0.
pub(crate) const OFF: u64 = 0;

fn pack(older: u32, newer: u32) -> u64 {
    u64::from(older) << 32 | u64::from(newer)
}

fn unpack(links: u64) -> (u32, u32) {
    ((links >> 32) as u32, links as u32)
}

struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

/// See the module.
pub(crate) struct Lru {
    lists: Box<[CachePadded<Mutex<List>>]>,
    /// The shard that [`Self::pop`] takes from.
    turn: AtomicUsize,
    /// The number of entries that `pop` took from this shard in a row.
    row: AtomicU32,
    /// The last of these entries.
    last: AtomicU32,
}

impl Lru {
    /// Neighbouring keys that share a shard, as a power of two.
    const NEIGHBOURS_SHIFT: u32 = 4;

    pub(crate) fn new(shards: usize) -> Self {
        let list = || CachePadded::new(Mutex::new(List { oldest: END, newest: END, len: 0 }));
        Self {
            lists: (0..shards).map(|_| list()).collect(),
            turn: AtomicUsize::new(0),
            row: AtomicU32::new(0),
            last: AtomicU32::new(END),
        }
    }

    fn list(&self, key: SwapEntry) -> &Mutex<List> {
        &self.lists[(key.0 >> Self::NEIGHBOURS_SHIFT) as usize % self.lists.len()]
    }

    /// Puts an entry that is on no list at the newest end. The caller has locked the entry.
    pub(crate) fn push(&self, at: &impl Links, key: SwapEntry) {
        let mut list = lock(self.list(key));
        debug_assert_eq!(at.links(key).load(Ordering::Relaxed), OFF, "{key:?} is on a list");
        let newest = list.newest;
        at.links(key).store(pack(newest, END), Ordering::Relaxed);
        match newest {
            END => list.oldest = key.0,
            newest => set_newer(at, newest, key.0),
        }
        list.newest = key.0;
        list.len += 1;
    }

    /// Puts an entry that [`Self::pop`] took at the oldest end again: it did not fit, or its
    /// writeback failed.
    pub(crate) fn push_oldest(&self, at: &impl Links, key: SwapEntry) {
        self.row.fetch_sub(1, Ordering::Relaxed);
        let mut list = lock(self.list(key));
        debug_assert_eq!(at.links(key).load(Ordering::Relaxed), OFF, "{key:?} is on a list");
        let oldest = list.oldest;
        at.links(key).store(pack(END, oldest), Ordering::Relaxed);
        match oldest {
            END => list.newest = key.0,
            oldest => set_older(at, oldest, key.0),
        }
        list.oldest = key.0;
        list.len += 1;
    }

    /// Takes an entry off its list, unless [`Self::pop`] was quicker. The caller has locked the
    /// entry.
    pub(crate) fn remove(&self, at: &impl Links, key: SwapEntry) {
        let mut list = lock(self.list(key));
        unlink(at, &mut list, key);
    }

    /// Takes the oldest entry of a shard. Shards take turns, and neighbours are taken together. The
    /// caller then locks the entry and checks it: it may be gone, or stored anew and back on the
    /// list.
    pub(crate) fn pop(&self, at: &impl Links) -> Option<SwapEntry> {
        // Sixteen entries from a shard, and then the remaining neighbours of the last entry.
        let turn = self.turn.load(Ordering::Relaxed);
        let is_full = self.row.fetch_add(1, Ordering::Relaxed) >> Self::NEIGHBOURS_SHIFT > 0;
        let last = self.last.load(Ordering::Relaxed);
        let group = |key: u32| key >> Self::NEIGHBOURS_SHIFT;
        (0..=self.lists.len()).find_map(|step| {
            let shard = (turn + step) % self.lists.len();
            let mut list = lock(&self.lists[shard]);
            let oldest = list.oldest;
            // An entry that was spared and is the oldest again is not one of these neighbours.
            let is_rest = group(oldest) == group(last) && oldest >= last;
            if oldest == END || step == 0 && is_full && !is_rest {
                return None;
            }
            unlink(at, &mut list, SwapEntry(oldest));
            if step > 0 {
                self.turn.store(shard, Ordering::Relaxed);
                self.row.store(1, Ordering::Relaxed);
            }
            self.last.store(oldest, Ordering::Relaxed);
            Some(SwapEntry(oldest))
        })
    }

    /// Entries on all lists.
    pub(crate) fn len(&self) -> usize {
        self.lists.iter().map(|list| lock(list).len).sum()
    }

    /// All entries listed, each shard from old to new. Called by checks of a cache at rest.
    pub(crate) fn entries(&self, at: &impl Links) -> Vec<SwapEntry> {
        let mut entries = Vec::new();
        for list in &self.lists {
            let list = lock(list);
            let (mut key, mut before) = (list.oldest, END);
            let first = entries.len();
            while key != END {
                let (older, newer) = unpack(at.links(SwapEntry(key)).load(Ordering::Relaxed));
                assert_eq!(older, before, "the links at {key} disagree");
                entries.push(SwapEntry(key));
                (before, key) = (key, newer);
            }
            assert_eq!(before, list.newest);
            assert_eq!(entries.len() - first, list.len);
        }
        entries
    }
}

fn unlink(at: &impl Links, list: &mut List, key: SwapEntry) {
    let links = at.links(key).swap(OFF, Ordering::Relaxed);
    if links == OFF {
        return;
    }
    let (older, newer) = unpack(links);
    match older {
        END => list.oldest = newer,
        older => set_newer(at, older, newer),
    }
    match newer {
        END => list.newest = older,
        newer => set_older(at, newer, older),
    }
    list.len -= 1;
}

fn set_newer(at: &impl Links, key: u32, newer: u32) {
    let links = at.links(SwapEntry(key));
    let (older, _) = unpack(links.load(Ordering::Relaxed));
    links.store(pack(older, newer), Ordering::Relaxed);
}

fn set_older(at: &impl Links, key: u32, older: u32) {
    let links = at.links(SwapEntry(key));
    let (_, newer) = unpack(links.load(Ordering::Relaxed));
    links.store(pack(older, newer), Ordering::Relaxed);
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    struct LruWords(Vec<DurableAtomic<AtomicU64>>);

    impl Links for LruWords {
        fn links(&self, key: SwapEntry) -> &DurableAtomic<AtomicU64> {
            &self.0[key.0 as usize]
        }
    }

    fn table() -> LruWords {
        LruWords((0..100).map(|_| DurableAtomic::new(OFF)).collect())
    }

    #[test]
    fn the_oldest_comes_first() {
        let (lru, at) = (Lru::new(1), table());
        [3, 1, 0, 2].iter().for_each(|key| lru.push(&at, SwapEntry(*key)));
        lru.push_oldest(&at, SwapEntry(9));
        lru.remove(&at, SwapEntry(0));
        lru.remove(&at, SwapEntry(0));
        assert_eq!(lru.entries(&at), [9, 3, 1, 2].map(SwapEntry));
        let order: Vec<_> = std::iter::from_fn(|| lru.pop(&at)).map(|key| key.0).collect();
        assert_eq!(order, [9, 3, 1, 2]);
        assert_eq!(lru.len(), 0);
        lru.push(&at, SwapEntry(3));
        assert_eq!(lru.pop(&at), Some(SwapEntry(3)));
    }

    #[test]
    fn shards_are_taken_in_turn() {
        let (lru, at) = (Lru::new(2), table());
        (0..96).for_each(|key| lru.push(&at, SwapEntry(key)));
        let order: Vec<_> = std::iter::from_fn(|| lru.pop(&at)).map(|key| key.0).collect();
        assert_eq!(order, (0..96).collect::<Vec<_>>());
    }
}

use super::*;
use crate::index::Entry;
use std::cell::RefCell;
use std::collections::HashMap;

/// A pool with the entries that own its objects, as the cache has them.
struct OwnedPool {
    pool: Pool,
    handles: RefCell<HashMap<u32, (Handle, Vec<u8>)>>,
    next: u32,
    noise: u64,
    /// Contents of objects are parts of this.
    pattern: Vec<u8>,
}

/// The limit of a pool that is filled: little under Miri, which takes 0.2 s an object.
const FULL_BYTES: usize = if cfg!(miri) { SECTION_BYTES / 16 } else { SECTION_BYTES };

impl OwnedPool {
    fn new(bytes_max: usize) -> Self {
        let pool = Pool::new(bytes_max, None, &Arc::new(Nodes::pretended(1, |_| 0)));
        pool.provision(SECTION_BYTES, |_| true).unwrap();
        let pattern = (0..2 * PAGE_BYTES).map(|i| (i * i / 7) as u8).collect();
        Self { pool, handles: RefCell::default(), next: 0, noise: 0x2545_f491_4f6c_dd1d, pattern }
    }

    fn random(&mut self) -> u64 {
        self.noise ^= self.noise << 13;
        self.noise ^= self.noise >> 7;
        self.noise ^= self.noise << 17;
        self.noise
    }

    fn insert(&mut self, bytes: usize) -> bool {
        self.pool.zspages.provision(0).unwrap();
        let Ok(handle) = self.pool.alloc(bytes, false) else { return false };
        let owner = self.next;
        self.next += 1;
        let content = self.pattern[owner as usize * 31 % PAGE_BYTES..][..bytes].to_vec();
        self.pool.write(handle, Header { owner: SwapEntry(owner), checksum: !owner }, &content);
        self.handles.get_mut().insert(owner, (handle, content));
        true
    }

    fn remove(&mut self, owner: u32) {
        let (handle, _) = self.handles.get_mut().remove(&owner).unwrap();
        self.pool.free(handle);
    }

    fn relocate(&self, owner: SwapEntry, from: Handle, to: Handle, copy: &dyn Fn()) -> bool {
        let mut handles = self.handles.borrow_mut();
        let (handle, _) = handles.get_mut(&owner.0).unwrap();
        assert_eq!(*handle, from);
        copy();
        *handle = to;
        true
    }

    fn vacate(&self, section: usize) -> Result<(), Left> {
        self.pool.begin_offline(section).unwrap();
        self.pool.vacate(section, &|o, f, t, c| self.relocate(o, f, t, c))
    }

    fn compact(&self) {
        for class in (0..CLASSES).rev() {
            while self.pool.compact(class, &|o, f, t, c| self.relocate(o, f, t, c)).is_some() {}
        }
    }

    fn check(&self) {
        let handles = self.handles.borrow();
        let owned: Vec<_> = handles.iter().map(|(o, (h, _))| (SwapEntry(*o), *h)).collect();
        self.pool.check(&owned);
        for (owner, (handle, content)) in &*handles {
            let mut out = vec![0; content.len()];
            let header = self.pool.read(*handle, &mut out);
            assert_eq!(header, Header { owner: SwapEntry(*owner), checksum: !owner });
            assert_eq!(&out, content, "object {owner}");
        }
    }

    /// Bytes of the pool for each byte of objects.
    fn overhead(&self) -> f64 {
        let bytes: usize = self.handles.borrow().values().map(|(_, content)| content.len()).sum();
        self.pool.bytes() as f64 / bytes as f64
    }
}

#[test]
fn objects_of_every_size_come_back() {
    let mut owned = OwnedPool::new(64 << 20);
    owned.pool.provision(48 << 20, |_| true).unwrap();
    for bytes in (1..=PAGE_BYTES).step_by(if cfg!(miri) { 397 } else { 1 }) {
        assert!(owned.insert(bytes));
        assert!(owned.insert(bytes));
    }
    owned.check();
    for owner in (0..owned.next).step_by(2) {
        owned.remove(owner);
    }
    owned.check();
}

#[test]
fn freeing_everything_frees_every_frame() {
    let mut owned = OwnedPool::new(8 << 20);
    owned.pool.set_limit(FULL_BYTES);
    while owned.insert(1000) {}
    assert!(owned.pool.bytes() > FULL_BYTES - 9 * PAGE_BYTES);
    for owner in 0..owned.next {
        owned.remove(owner);
    }
    owned.check();
    assert_eq!(owned.pool.bytes(), 0);
    assert_eq!(owned.pool.give_back(0, |_| true), SECTION_BYTES);
    assert_eq!(owned.pool.mapped_bytes(), 0);
}

/// Sizes like those of compressed pages: log-normal around 1150 bytes, and one in twenty raw. With
/// these, zsmalloc's classes take 1.024 times the bytes of fresh objects.
fn fill_as_pages(owned: &mut OwnedPool, objects: usize) {
    for _ in 0..objects {
        let r = owned.random();
        let normal: f64 = (0..8).map(|i| f64::from((r >> (i * 7)) as u8 & 0x7f) / 127.0).sum();
        let bytes = (1150.0 * ((normal - 4.0) * 0.75).exp()) as usize;
        let raw = r >> 56 < 13 || bytes > COMPRESSED_BYTES_MAX;
        assert!(owned.insert(if raw { PAGE_BYTES } else { bytes }));
    }
}

#[test]
#[cfg_attr(miri, ignore = "too many objects; the other tests cover the same paths")]
fn held_bytes_stay_near_object_bytes() {
    let mut owned = OwnedPool::new(512 << 20);
    owned.pool.provision(400 << 20, |_| true).unwrap();
    fill_as_pages(&mut owned, 200_000);
    let fresh = owned.overhead();
    for owner in 0..owned.next {
        if owned.random().is_multiple_of(2) {
            owned.remove(owner);
        }
    }
    let holey = owned.overhead();
    owned.compact();
    let compacted = owned.overhead();
    owned.check();
    println!(
        "bytes held / bytes of objects: {fresh:.4} fresh, {holey:.4} half freed, {compacted:.4} compacted"
    );
    assert!(fresh <= 1.03, "fresh {fresh:.4}");
    assert!(holey > 1.3, "the test frees too regularly: {holey:.4}");
    assert!(compacted <= 1.08, "compacted {compacted:.4}");
}

#[test]
fn compaction_stops_at_an_owner_that_is_busy() {
    let mut owned = OwnedPool::new(8 << 20);
    for _ in 0..200 {
        assert!(owned.insert(1000));
    }
    for owner in 0..200 {
        if owner % 3 != 0 {
            owned.remove(owner);
        }
    }
    let class = class_of(1000);
    assert_eq!(owned.pool.compact(class, &|_, _, _, _| false), None);
    owned.check();
    owned.compact();
    owned.check();
    let stats = owned.pool.class_stats()[class];
    assert!(stats.allocated - stats.used < stats.objects_per_zspage, "{stats:?}");
}

#[test]
fn a_section_is_emptied_into_others_and_given_back() {
    let mut owned = OwnedPool::new(8 << 20);
    let count = if cfg!(miri) { 40 } else { 1500 };
    for i in 0..count {
        assert!(owned.insert(300 + i % 900));
    }
    owned.pool.provision(2 * SECTION_BYTES, |_| true).unwrap();
    let before = owned.pool.sections();
    assert!(before[0].1 > 0, "{before:?}");
    owned.vacate(0).unwrap();
    assert!(owned.pool.finish_offline(0, SectionState::Absent).unwrap());
    owned.check();
    assert_eq!(owned.pool.sections()[0].0, 1, "section 0 is off line");
    assert!(matches!(owned.pool.begin_offline(0), Err(Refused::State(SectionState::Absent))));
}

#[test]
fn an_object_that_stays_makes_no_other_move_twice_and_gets_no_company() {
    let mut owned = OwnedPool::new(8 << 20);
    let count = 40;
    for _ in 0..3 * count {
        assert!(owned.insert(1000));
    }
    // Space in each zspage, where the others' objects would fit.
    (0..3 * count).filter(|owner| owner % 3 != 0).for_each(|owner| owned.remove(owner));
    owned.pool.provision(2 * SECTION_BYTES, |_| true).unwrap();
    owned.pool.begin_offline(0).unwrap();
    let busy = SwapEntry(0);
    let moves = RefCell::new(HashMap::<u32, u32>::new());
    let relocate = |owner: SwapEntry, from, to, copy: &dyn Fn()| {
        *moves.borrow_mut().entry(owner.0).or_default() += 1;
        owner != busy && owned.relocate(owner, from, to, copy)
    };
    for tries in 1..=3 {
        let left = owned.pool.vacate(0, &relocate).unwrap_err();
        assert_eq!((left.stuck, left.objects), (Stuck::Held(busy), 1));
        assert_eq!(moves.borrow()[&busy.0], tries);
    }
    let others = moves.into_inner().into_iter().filter(|(owner, _)| *owner != busy.0);
    assert_eq!(others.inspect(|other| assert_eq!(other.1, 1)).count(), count as usize - 1);
    // New objects go elsewhere, and an object in use may be freed.
    assert!(owned.insert(1000));
    owned.remove(busy.0);
    owned.pool.stay_online(0);
    owned.check();
    assert_eq!(owned.pool.sections()[0], (0, 0));
}

#[test]
fn a_section_with_nowhere_to_go_says_so_and_keeps_its_objects() {
    let mut owned = OwnedPool::new(SECTION_BYTES);
    owned.pool.set_limit(FULL_BYTES);
    while owned.insert(2000) {}
    let inserted = owned.next as usize;
    let left = owned.vacate(0).unwrap_err();
    assert_eq!((left.stuck, left.objects), (Stuck::NoRoom, inserted));
    assert_eq!(left.bytes, owned.pool.bytes());
    owned.pool.stay_online(0);
    owned.check();
}

#[test]
fn a_pool_without_frames_refuses_and_stays_whole() {
    let mut owned = OwnedPool::new(SECTION_BYTES);
    owned.pool.set_limit(FULL_BYTES);
    while owned.insert(PAGE_BYTES) {}
    assert_eq!(owned.pool.bytes(), FULL_BYTES);
    assert!(!owned.insert(100));
    owned.check();
    (0..FRAMES_MAX as u32).for_each(|owner| owned.remove(owner));
    assert!(owned.insert(100));
    owned.check();
}

/// The lock of its entry keeps an object alive and its bytes whole. The bytes are plain memory, so
/// Miri checks here that the lock orders all accesses.
#[test]
fn the_lock_of_an_entry_guards_the_bytes_of_its_object() {
    let owned = OwnedPool::new(SECTION_BYTES);
    let pool = &owned.pool;
    let entry = Entry::new();
    let header = Header { owner: SwapEntry(1), checksum: 0 };
    let handle = pool.alloc(100, false).unwrap();
    pool.write(handle, header, &[0; 100]);
    let rounds = if cfg!(miri) { 20 } else { 20_000 };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let _locked = entry.lock();
                    let mut bytes = [0; 100];
                    let Header { checksum, .. } = pool.read(handle, &mut bytes);
                    assert!(bytes.iter().all(|byte| *byte == checksum as u8), "{bytes:?}");
                    let checksum = checksum + 1;
                    pool.write(handle, Header { checksum, ..header }, &[checksum as u8; 100]);
                }
            });
        }
    });
    assert_eq!(pool.header(handle).checksum, 3 * rounds);
}

/// Each thread finds that memory is short, but one section is enough for all.
#[test]
fn several_threads_that_lack_memory_bring_one_section() {
    for _ in 0..20 {
        let pool = Pool::new(64 << 20, None, &Arc::new(Nodes::pretended(1, |_| 0)));
        assert_eq!(pool.bytes_ahead(256 << 10), SECTION_BYTES);
        let all_are_there = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    all_are_there.wait();
                    pool.provision(256 << 10, |_| true).unwrap();
                });
            }
        });
        assert_eq!(pool.mapped_bytes(), SECTION_BYTES);
        assert_eq!(pool.bytes_ahead(256 << 10), 0);
    }
}

/// The more of the free memory is used, the more of the next section is set aside.
#[test]
fn the_next_section_is_set_aside_as_the_last_one_fills() {
    const RESERVE: usize = SECTION_BYTES / 4;
    let mut owned = OwnedPool::new(2 * SECTION_BYTES);
    let mut before = 0;
    while owned.pool.free_bytes() > RESERVE {
        let ahead = owned.pool.bytes_ahead(RESERVE);
        assert!(ahead >= before && (ahead == 0) == (owned.pool.free_bytes() >= 3 * RESERVE));
        before = ahead;
        assert!(owned.insert(3000));
    }
    assert_eq!(owned.pool.bytes_ahead(RESERVE), SECTION_BYTES);
    owned.pool.provision(SECTION_BYTES, |_| true).unwrap();
    assert_eq!(owned.pool.bytes_ahead(RESERVE), 0, "there is no other section");
}

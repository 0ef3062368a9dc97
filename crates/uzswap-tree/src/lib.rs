//! One budget for a tree of processes: a file that all of them map, with a slot for each process.
//!
//! Each process writes its memory use into its slot, and reads the others' slots. The first process
//! that asks may take all free memory, in steps if others may grow too. But every process may use
//! as much memory as any other process that needs memory. When another process needs memory, each
//! is cut to an equal share, or to three quarters of that share if another process is stuck. No
//! process is cut below the memory that it needs to run. A dead process's memory does not count. If
//! all large processes wait for more memory, the process in the last slot learns that there is no
//! hope.
//!
//! A new process may take its share before the others have given that memory back. Making the new
//! process wait would keep the sum lower, but made a build of 24 compilers take twice the time.

#![expect(unsafe_code, reason = "a file that several processes map: it holds only atomics")]

mod ceiling;
pub mod devices;
pub mod front;
pub mod left;
mod name;
mod rank;

mod remote;
pub mod share;
mod table;
mod text;
pub mod variables;
mod visit;
mod visit_slot;

pub use name::Name;
pub use remote::{Remote, RemoteSums, TIMES};
pub use table::{
    Figures, LeftAlone, MANAGED_MIN, Member, REASONS, SILENT_MAX, SLOTS, Setting, Table,
};
pub use visit::{Guest, Host, Visit};
pub use visit_slot::VISIT_BYTES_MAX;

use rustix::fs::{self, Mode, OFlags};
use rustix::path::Arg;
use share::{Allowance, Other, Own, share};
use std::ffi::{CStr, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::time::Duration;
use table::{ALL_IN, FORM, NO_ROOM, ProcessSlot};

/// If the suspending process has made no check for this long, no process stays suspended.
pub const LOOKS_MAX: Duration = Duration::from_secs(2);

/// The table, and this process's slot in it.
#[derive(Debug)]
#[repr(C)]
pub struct Tree {
    table: &'static Table,
    slot: AtomicUsize,
    /// This process's PID namespace. 0 for the namespace of the process that made the tree, or
    /// before it is known.
    space: AtomicU32,
    /// The number of checks that this process has seen, and the time of the last check in
    /// milliseconds.
    looks: AtomicU32,
    looked_at: AtomicU64,
    /// This process's CPU time at the last measurement, and the time of that measurement, in
    /// milliseconds.
    worked: AtomicU64,
    worked_at: AtomicU64,
    /// A process without a slot has this bell.
    bell: AtomicU32,
}

impl Tree {
    /// Makes the file of a tree with a budget of `total` bytes. The caller watches the tree, and
    /// takes no slot. `space` is the caller's PID namespace; 0 if unknown. Fails if the file
    /// exists.
    pub fn create(path: &Path, total: u64, space: u32) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        fs::ftruncate(&file, size_of::<Table>() as u64)?;
        let tree = Self::at(path)?;
        tree.table.total.store(total, Relaxed);
        tree.table.space.store(space, Relaxed);
        tree.table.leader.store(own_number(), Relaxed);
        // This number is written last, since a process accepts only a file that has it.
        tree.table.form.store(FORM, Release);
        Ok(tree)
    }

    /// Joins the tree of a file. The errors are those of [`Self::look`], by their numbers.
    pub fn join(path: &CStr) -> Result<Self, c_int> {
        let tree = Self::map(path)?.of_this_form()?;
        tree.rejoin();
        Ok(tree)
    }

    /// Opens the tree of a file without joining it. Errors: `EBADMSG`, another version has made the
    /// file.
    pub fn look(path: &Path) -> io::Result<Self> {
        Self::at(path)?.of_this_form().map_err(io::Error::from_raw_os_error)
    }

    fn of_this_form(self) -> Result<Self, c_int> {
        match self.table.form.load(Acquire) {
            FORM => Ok(self),
            _ => Err(libc::EBADMSG),
        }
    }

    fn at(path: &Path) -> io::Result<Self> {
        path.into_with_c_str(|path| Ok(Self::map(path)))?.map_err(io::Error::from_raw_os_error)
    }

    /// Calls the C library directly. Functions that check their arguments contain code for a panic,
    /// which would be most of a small library.
    fn map(path: &CStr) -> Result<Self, c_int> {
        let bytes = size_of::<Table>();
        let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        // SAFETY: the path ends with a zero; the written structure exists. The mapping is new, of a
        // file that is large enough, and stays until the process ends. Its content is atomics,
        // which any process of the tree may write.
        unsafe {
            let file = libc::open(path.as_ptr(), flags);
            let mut status = MaybeUninit::<libc::stat>::zeroed();
            if file < 0 {
                return Err(last_error());
            }
            let is_large = libc::fstat(file, status.as_mut_ptr()) == 0
                && status.assume_init().st_size >= bytes as i64;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let mapped = match is_large {
                true => libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file, 0),
                false => ptr::null_mut(),
            };
            let error = last_error();
            libc::close(file);
            let table = match mapped {
                libc::MAP_FAILED => return Err(error),
                _ => mapped.cast::<Table>().as_ref().ok_or(libc::EBADMSG)?,
            };
            let (looks, looked_at) = (AtomicU32::new(0), AtomicU64::new(0));
            let (worked, worked_at) = (AtomicU64::new(0), AtomicU64::new(0));
            let (slot, space) = (AtomicUsize::new(SLOTS), AtomicU32::new(0));
            let bell = AtomicU32::new(0);
            Ok(Self { table, slot, space, looks, looked_at, worked, worked_at, bell })
        }
    }

    /// The table.
    pub fn table(&self) -> &'static Table {
        self.table
    }

    /// Takes a slot. In a forked child, the new slot takes the place of the parent's slot. If all
    /// slots are taken, this process is not counted.
    pub fn rejoin(&self) {
        self.rejoin_as(self.own_name());
    }

    /// Sets this process's PID namespace. If the tree was made in another namespace, this process
    /// takes another slot: a process of that namespace may have the same number.
    pub fn settle(&self, space: u32) {
        let known = self.table.space.load(Relaxed);
        let space = if space == known || known == 0 { 0 } else { space };
        let before = self.own_name();
        self.space.store(space, Relaxed);
        let name = self.own_name();
        let is_own = self.own().is_some_and(|slot| slot.name() == name);
        if !is_own {
            self.own().inspect(|slot| slot.free(before));
            self.rejoin_as(name);
        }
    }

    /// This process's name.
    pub fn own_name(&self) -> Name {
        Name::new(self.space.load(Relaxed), own_number())
    }

    /// The live processes, as this process sees them.
    pub fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.table.members_seen_from(self.space.load(Relaxed))
    }

    fn rejoin_as(&self, name: Name) {
        let slots = self.table.used_slots();
        // A program that ran in this process before `exec` may have left its slot.
        let before = slots.iter().position(|slot| slot.name() == name);
        // A free slot first: a process that does not know its namespace yet may mistake a living
        // process for a dead one.
        let take = |may_judge| self.table.slots.iter().position(|slot| slot.take(name, may_judge));
        let at = before.or_else(|| take(false)).or_else(|| take(true)).unwrap_or(SLOTS);
        self.table.slots_used.fetch_max((at + 1).min(SLOTS) as u32, Relaxed);
        if let Some(slot) = self.table.slots.get(at) {
            slot.clear();
            slot.began.store(clock(), Relaxed);
        }
        self.slot.store(at, Relaxed);
        // A forked process starts with its parent's value, but has not worked itself.
        self.worked_at.store(0, Relaxed);
    }

    fn own(&self) -> Option<&ProcessSlot> {
        self.table.slots.get(self.slot.load(Relaxed))
    }

    /// True if this process must wait.
    pub fn is_suspended(&self) -> bool {
        self.own().is_some_and(|slot| slot.waits.load(Relaxed) != 0) && self.is_led()
    }

    /// True if the process that would resume this process is active. It is not active if it is
    /// stopped, or has died unnoticed by its parent.
    fn is_led(&self) -> bool {
        let (looks, now) = (self.table.looks.load(Relaxed), clock());
        if looks != self.looks.swap(looks, Relaxed) {
            self.looked_at.store(now, Relaxed);
        }
        now < self.looked_at.load(Relaxed).saturating_add(LOOKS_MAX.as_millis() as u64)
    }

    /// Reports this process's memory. If processes take turns, marks this process as waiting, like
    /// a suspended one, and returns true.
    pub fn queue(&self, used: u64) -> bool {
        let takes_turns = || self.table.takes_turns.load(SeqCst) != 0;
        let Some(slot) = self.own() else { return false };
        slot.grew_to.store(used, Relaxed);
        if !takes_turns() {
            return false;
        }
        slot.waits.store(1, SeqCst);
        // The process that ends the turns resumes all waiting processes, perhaps just before this
        // process was marked.
        let waits = takes_turns();
        if !waits {
            slot.waits.store(0, SeqCst);
        }
        waits
    }

    /// Waits until this process may continue, but no longer than `most`.
    pub fn wait_while_suspended(&self, most: Duration) {
        self.own().inspect(|slot| visit_slot::wait(&slot.waits, 1, most));
    }

    /// Adds this process's activity since its last report to the sums, and notes its pages.
    pub fn note(&self, since: Figures) {
        self.table.faults.fetch_add(since.faults, Relaxed);
        self.table.stored.fetch_add(since.stored, Relaxed);
        if let Some(slot) = self.table.slots.get(self.slot.load(Relaxed)) {
            slot.faults.fetch_add(since.faults, Relaxed);
            slot.stored.fetch_add(since.stored, Relaxed);
            slot.out.store(since.out, Relaxed);
            slot.pool.store(since.pool, Relaxed);
            slot.backing.store(since.backing, Relaxed);
            slot.remote.store(since.remote, Relaxed);
        }
    }

    /// True while another process wants to read all of this process's memory.
    pub fn is_wanted_whole(&self) -> bool {
        self.own().is_some_and(|slot| match slot.reader.load(Acquire) {
            0 => false,
            reader if Name::new(0, reader).may_live(self.space.load(Relaxed)) => true,
            _ => {
                slot.reader.store(0, Relaxed);
                false
            }
        })
    }

    /// Answers the process that wants to read this memory: all pages are in, or there is no memory
    /// for them.
    pub fn answer_whole(&self, is_in: bool) {
        let answer = if is_in { ALL_IN } else { NO_ROOM };
        self.own().inspect(|slot| slot.answer.store(answer, Release));
    }

    /// Makes the other processes leave `bytes` more for this process, which is about to need them.
    pub fn reserve(&self, bytes: u64) {
        if let Some(slot) = self.table.slots.get(self.slot.load(Relaxed)) {
            slot.reserved.store(bytes, Relaxed);
        }
    }

    /// Reports the bytes that this process needs to run at all. Its share is never smaller.
    pub fn need(&self, bytes: u64) {
        if let Some(slot) = self.table.slots.get(self.slot.load(Relaxed)) {
            slot.least.store(bytes, Relaxed);
        }
    }

    /// Reports this process's memory, and if the process is stuck. Returns its allowance.
    pub fn allowance(&self, used: u64, is_starved: bool) -> Allowance {
        self.measure_work();
        let (own, mut least) = (self.slot.load(Relaxed), 0);
        if let Some(slot) = self.table.slots.get(own) {
            slot.used.store(used, Relaxed);
            slot.starved.store(is_starved.into(), Relaxed);
            least = slot.least.load(Relaxed);
        }
        let total = self.table.total.load(Relaxed).saturating_sub(self.table.besides.load(Relaxed));
        let rank = self.own().map(|slot| slot.rank(own));
        let mut others = Vec::new();
        for (at, slot) in self.table.used_slots().iter().enumerate() {
            let (name, used) = (slot.name(), slot.used.load(Relaxed));
            if name == Name::NONE || at == own || used == 0 {
                continue;
            }
            if !name.may_live(self.space.load(Relaxed)) {
                slot.clear();
                continue;
            }
            others.push(Other {
                used,
                reserved: slot.reserved.load(Relaxed),
                least: slot.least.load(Relaxed),
                is_starved: slot.starved.load(Relaxed) != 0,
                is_left_alone: slot.left_alone.load(Relaxed) != 0,
                is_behind: at > own,
                is_idle: slot.idle.load(Relaxed) != 0,
                is_before: rank.is_some_and(|rank| slot.rank(at) < rank),
            });
        }
        let theirs: u64 = others.iter().map(|other| other.used).sum();
        // Small processes are not added: their sum may still contain a process that has just
        // reported.
        self.table.peak.fetch_max(theirs + used, Relaxed);
        let favour = self.table.favour.load(Relaxed);
        let is_idle = rank.is_some_and(|rank| rank.is_idle);
        let cpus = self.cpus();
        share(total, Own { used, least, is_starved, favour, is_idle, cpus }, &others)
    }
}

/// Milliseconds of the system's clock.
pub fn clock() -> u64 {
    milliseconds(libc::CLOCK_MONOTONIC)
}

pub(crate) fn milliseconds(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // The C library has found the kernel's function (vDSO); this library has no code for that.
    // SAFETY: the time is written; the clock exists.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The number of this process.
pub fn own_number() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

fn last_error() -> c_int {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use table::REASON_WORDS;

    fn given(tree: &Tree, used: u64, is_starved: bool) -> (u64, bool) {
        let given = tree.allowance(used, is_starved);
        (given.bytes, given.may_hope)
    }

    fn processes() -> [u32; 3] {
        [1, std::os::unix::process::parent_id(), std::process::id()]
    }

    fn join_as(path: &Path, process: u32) -> Tree {
        let tree = Tree::look(path).unwrap();
        tree.rejoin_as(Name::new(0, process));
        tree
    }

    /// A tree with `total` bytes: its folder, its watcher, and two of its processes.
    fn two_of(total: u64) -> (tempfile::TempDir, Tree, [Tree; 2]) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tree");
        let watcher = Tree::create(&path, total, 5).unwrap();
        let both = [1, 2].map(|number| join_as(&path, processes()[number]));
        (folder, watcher, both)
    }

    #[test]
    fn memory_that_a_process_had_as_another_program_is_not_counted() {
        let (folder, _watcher, [first, second]) = two_of(100);
        let path = folder.path().join("tree");
        assert_eq!(second.allowance(70, false).bytes, 100);
        let second = join_as(&path, processes()[2]);
        assert_eq!(first.allowance(10, false).bytes, 100);
        first.reserve(5);
        assert_eq!(second.allowance(20, false).bytes, 85, "what the other is about to need");
        first.reserve(0);
        assert_eq!(second.allowance(20, false).bytes, 90);
    }

    #[test]
    fn counts_of_processes_are_seen_by_a_watcher_and_stay_when_the_processes_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tree");
        let _watcher = Tree::create(&path, 100, 5).unwrap();
        let own = path.as_path().into_with_c_str(|path| Ok(Tree::join(path))).unwrap().unwrap();
        own.allowance(70, false);
        own.note(Figures { faults: 5, stored: 7, out: 3, pool: 9, backing: 6, remote: 4 });
        own.note(Figures { faults: 1, stored: 0, out: 2, pool: 8, backing: 5, remote: 3 });
        let looked = Tree::look(&path).unwrap();
        let figures = Figures { faults: 6, stored: 7, out: 2, pool: 8, backing: 5, remote: 3 };
        let (process, used, least, grew_to) = (std::process::id(), 70, 0, 0);
        let name = Name::new(0, process);
        let member = Member {
            name,
            process,
            used,
            least,
            grew_to,
            figures,
            is_suspended: false,
            is_wanted_whole: false,
        };
        assert_eq!(looked.table().members().collect::<Vec<_>>(), [member]);
        assert!(
            looked.table().suspend(member.process, true) && !own.is_suspended(),
            "nobody looks"
        );
        looked.table().set_taking_turns(false);
        assert!(own.is_suspended());
        assert_eq!(looked.table().suspended().collect::<Vec<_>>(), [member.process]);
        assert!(!looked.table().suspend(1, true), "it is none of the tree");
        own.rejoin();
        assert!(!own.is_suspended(), "another program");
        assert!(!own.queue(70) && !own.is_suspended(), "nobody takes turns");
        looked.table().set_taking_turns(true);
        assert!(own.queue(70) && own.is_suspended());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| own.wait_while_suspended(Duration::from_secs(100)));
            assert!(looked.table().suspend(member.process, false));
            waits.join().unwrap();
        });
        assert_eq!(looked.table().members().next().map(|m| m.figures), Some(Figures::default()));
        let other = folder.path().join("other");
        std::fs::write(&other, vec![0; size_of::<Table>()]).unwrap();
        assert!(Tree::look(&other).is_err(), "of another version");
        let all = [&looked.table().faults, &looked.table().stored].map(|sum| sum.load(Relaxed));
        assert_eq!((all, looked.table().is_in_use(|_| false)), ([6, 7], true));
    }

    #[test]
    fn a_program_that_is_left_alone_says_why() {
        let (_folder, watcher, [first, _second]) = two_of(100);
        first.leave_alone(&[b"sh", b": ", b"it has no memory of its own"]);
        for mib in [4, 5, 3] {
            first.leave_part(mib << 20, &[&[b'x'; 500], &[b'x'; 500]]);
        }
        (0..2).for_each(|_| first.refuse(&[b"sh: mlockall"]));
        (3..REASONS + 3).for_each(|_| first.leave_alone(&[b"more"]));
        let all = watcher.table().left_alone();
        assert_eq!(all.len(), REASONS);
        let process = std::process::id();
        let text = "sh: it has no memory of its own".into();
        assert_eq!(all[0], LeftAlone { process: Name::new(0, process), part: None, text });
        assert_eq!((all[1].text.len(), all[1].part), (REASON_WORDS * 8, Some(5 << 20)));
        assert_eq!(all[2].part, Some(0));
        assert_eq!(watcher.table().unmanaged.load(Relaxed), REASONS as u64 + 1);
    }

    /// No process has this number.
    const GONE: u32 = i32::MAX as u32;

    #[test]
    fn a_process_of_another_namespace_is_judged_where_the_tree_was_made() {
        let (folder, watcher, [first, second]) = two_of(100);
        let (path, own) = (folder.path().join("tree"), std::process::id());
        let table = watcher.table();
        second.settle(5);
        join_as(&path, GONE).allowance(50, false);
        let inside = Tree::look(&path).unwrap();
        inside.settle(9);
        let name = Name::new(9, own);
        assert_eq!(inside.allowance(20, false).bytes, 50, "one that seems gone may live");
        assert_eq!(inside.members().count(), 4);
        assert_eq!(first.allowance(10, false).bytes, 80, "one that is gone does not");
        inside.leave_alone(&[b"in"]);
        assert_eq!(table.left_alone()[0].process, name);
        let number = || table.members().find(|one| one.name == name).map(|one| one.process);
        assert_eq!((table.has_foreign(), number()), (true, Some(0)));
        table.see(|_| None);
        assert_eq!(number(), Some(0), "it may have come just now");
        table.see(|one| (one == name).then_some(77));
        assert!(number() == Some(77) && table.suspend(77, true) && table.want_whole(77));
        table.forget(|_| false);
        assert_eq!(number(), Some(77));
        table.see(|_| None);
        assert_eq!((table.has_foreign(), number()), (false, None));
        inside.settle(9);
        table.forget(|one| one == 77);
        assert_eq!(number(), Some(0), "it has another slot");
        // If the maker does not know its namespace, all numbers count as numbers of one namespace.
        table.space.store(0, Relaxed);
        inside.settle(9);
        assert_eq!(number(), None);
    }

    #[test]
    fn a_setting_is_whole_or_refused() {
        let (_folder, watcher, [first, _second]) = two_of(100);
        assert!(watcher.table().set(Setting::Backing, b"/var/tmp:5"));
        assert!(!watcher.table().set(Setting::Accesses, &[b'x'; 5000]));
        assert_eq!(first.table().setting(Setting::Backing), Some("/var/tmp:5".into()));
        assert_eq!(first.table().setting(Setting::Store), None);
    }

    #[test]
    fn small_processes_count_once() {
        let (_folder, watcher, [first, _second]) = two_of(100 << 20);
        let has = |own, silent| {
            watcher.table().count_silent(|_| silent);
            first.allowance(own, false).bytes
        };
        assert_eq!(has(0, 10 << 20), 80 << 20, "neither has reported");
        assert_eq!(has(1, 10 << 20), 80 << 20);
        assert_eq!(has(1, 10 << 20), 90 << 20, "one has");
        assert_eq!(has(1, SILENT_MAX), 100 << 20, "a process about to report");
    }

    #[test]
    fn a_tree_is_crowded_when_its_processes_would_not_all_fit_if_they_grew() {
        let (_folder, watcher, [first, second]) = two_of(100);
        first.allowance(26, false);
        assert!(!watcher.table().is_crowded());
        second.allowance(1, false);
        assert!(watcher.table().is_crowded(), "both may have 52");
        watcher.table().suspend(processes()[2], true);
        assert!(!watcher.table().is_crowded(), "a suspended process does not grow");
        first.allowance(50, false);
        assert!(watcher.table().is_crowded());
    }

    #[test]
    fn a_process_never_has_less_than_it_needs() {
        let (_folder, watcher, [first, second]) = two_of(30);
        first.need(20);
        second.need(18);
        first.allowance(25, false);
        assert_eq!(given(&second, 19, false), (18, true));
        assert_eq!(given(&first, 20, false), (20, true));
        second.allowance(18, false);
        assert!(!first.allowance(20, true).may_hope, "the other has its least");
        assert!(watcher.table().members().all(|member| [18, 20].contains(&member.least)));
    }

    #[test]
    fn the_first_process_is_favoured_until_it_is_idle_or_put_last() {
        let (_folder, watcher, [first, second]) = two_of(100);
        let table = watcher.table();
        let shares = || [&first, &second].map(|own| own.allowance(70, false).bytes);
        [&first, &second].into_iter().for_each(|own| own.need(10));
        assert_eq!((shares(), shares()), ([100, 50], [50, 50]));
        table.favour(share::FAVOUR, 1);
        assert_eq!(shares(), [90, 30]);
        let name = |tree: &Tree| tree.own().map(|slot| slot.name().0);
        assert_eq!(table.first(), name(&first));
        let idle = |is_idle: bool| first.own().unwrap().idle.store(is_idle.into(), Relaxed);
        idle(true);
        assert_eq!((shares(), table.first()), ([30, 90], name(&second)));
        idle(false);
        assert_eq!(shares(), [90, 30]);
        table.put_last(name(&first).unwrap(), clock() + 1);
        assert_eq!((shares(), table.first()), ([30, 90], name(&second)));
    }

    #[test]
    fn a_process_that_can_go_on_gives_back_to_a_starved_one_and_the_last_starved_one_has_no_hope() {
        let (_folder, watcher, [first, second]) = two_of(100);
        assert_eq!(given(&first, 60, false), (100, false));
        assert_eq!(given(&second, 40, false), (50, true));
        assert_eq!(first.allowance(60, false).bytes, 60);
        assert_eq!(given(&second, 40, true), (50, true));
        assert_eq!(first.allowance(70, false).bytes, 60);
        assert_eq!(first.allowance(90, false).bytes, 60);
        assert_eq!(given(&second, 70, true), (50, true));
        assert_eq!(first.allowance(70, false).bytes, 38);
        // Both wait: the first may hope that the second ends.
        assert!(first.allowance(50, true).may_hope);
        assert!(!second.allowance(50, true).may_hope);
        assert_eq!(watcher.table().peak.load(Relaxed), 160);
    }
}

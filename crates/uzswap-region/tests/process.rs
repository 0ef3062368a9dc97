//! A process with regions: forks, foreign signals, and deaths that must be.
//!
//! Each case runs in a process of its own: this program again, with the case's name in `CASE`.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "process/forks.rs"]
mod forks;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use uzswap_engine::testing::{Faults, Noise, TestBacking};
use uzswap_region::{Advice, Means, Mode, OnFork, Pager, PagerBuilder, Region, RegionVec};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Runs a case of [`child`] in a process of its own.
fn run(case: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env("CASE", case);
    command.output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn assert_passes(case: &str) {
    let output = run(case);
    assert!(output.status.success(), "{case}: {}\n{}", output.status, stderr(&output));
}

#[track_caller]
fn assert_dies(case: &str, signal: i32, says: &[&str]) {
    let output = run(case);
    let text = stderr(&output);
    assert_eq!(output.status.signal(), Some(signal), "{case}: {}\n{text}", output.status);
    says.iter().for_each(|part| assert!(text.contains(part), "{case}: no '{part}' in: {text}"));
}

#[test]
fn child() {
    match std::env::var("CASE").as_deref() {
        Ok("fork touches") => forks::fork_touches(),
        Ok("fork leaves") => forks::fork_leaves(),
        Ok("fork copies") => forks::fork_copies(),
        Ok("fork copies while threads write") => forks::fork_copies_while_threads_write(),
        Ok("fork cannot copy") => forks::fork_cannot_copy(),
        Ok("fork cannot read") => forks::fork_cannot_read(),
        Ok("foreign handler") => foreign_handler(),
        Ok("foreign default") => _ = touch_beyond_a_file(),
        Ok("after unmap") => after_unmap(),
        Ok("given away, touched") => given_away(|values| _ = std::hint::black_box(values[0])),
        Ok("given away, paged out") => {
            given_away(|values| _ = values.advise(0..values.len(), Advice::PageOut));
        }
        Ok("unreadable backing") => failing_backing(|faults| &faults.fail_reads),
        Ok("damaged backing") => failing_backing(|faults| &faults.damage_reads),
        Ok("no room") => no_room(),
        Ok("budget") => budget(),
        Ok("locked") => locked(),
        Ok("small stack") => small_stack(),
        Ok("later handler") => later_handler(),
        Ok("later handler passes on") => later_handler_passes_on(),
        Ok("small alternate stack") => small_alternate_stack(),
        _ => {}
    }
}

fn builder() -> PagerBuilder {
    Pager::builder().memory("16M").mode(Mode::InThread)
}

fn filled(pager: &Pager, bytes: usize) -> RegionVec<u64> {
    let mut values: RegionVec<u64> = pager.vec_zeroed(bytes / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, value)| *value = i as u64 / 3);
    values
}

fn is_whole(values: &[u64]) -> bool {
    values.iter().enumerate().all(|(i, value)| *value == i as u64 / 3)
}

/// Forks; the child does something and exits, and its status is returned.
fn in_fork(child: impl FnOnce()) -> std::process::ExitStatus {
    // SAFETY: the child only does the acts of each case, and exits.
    match unsafe { libc::fork() } {
        0 => {
            child();
            // SAFETY: the call ends the child without running the parent's functions for the exit.
            unsafe { libc::_exit(0) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the call waits for the child that was just made.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            std::process::ExitStatus::from_raw(status)
        }
    }
}

static CAUGHT: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_bus_error_that_is_not_ours_goes_to_the_handler_that_was_there() {
    assert_passes("foreign handler");
    assert_dies("foreign default", libc::SIGBUS, &[]);
}

/// Touches a mapped file beyond its end.
fn touch_beyond_a_file() -> u8 {
    let pager = builder().build().unwrap();
    assert!(is_whole(&filled(&pager, 24 * MIB)));
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE as u64).unwrap();
    // SAFETY: a new mapping of a file of our own; its only page is read, whatever that does.
    unsafe {
        use std::os::fd::AsRawFd;
        let (read, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let at = libc::mmap(std::ptr::null_mut(), PAGE, read, shared, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        file.set_len(0).unwrap();
        at.cast::<u8>().read_volatile()
    }
}

extern "C" fn repair(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CAUGHT.fetch_add(1, SeqCst);
    // SAFETY: the call maps a page of memory in place of the file's page, so that the read can
    // continue.
    unsafe {
        let page = ((*info).si_addr() as usize & !(PAGE - 1)) as *mut libc::c_void;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(page, PAGE, libc::PROT_READ, flags, -1, 0);
    }
}

fn foreign_handler() {
    // SAFETY: the call sets a handler of the form that its flags say.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = repair as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
    assert_eq!(touch_beyond_a_file(), 0);
    assert_eq!(CAUGHT.load(SeqCst), 1);
}

#[test]
fn a_handler_that_is_set_later_gets_foreign_signals_once_we_take_ours_back() {
    assert_passes("later handler");
    assert_dies("later handler passes on", libc::SIGBUS, &["passed on\n"]);
}

fn later_handler() {
    let pager = builder().build().unwrap();
    let values = filled(&pager, 24 * MIB);
    set_bus_handler(repair as *const () as usize, libc::SA_SIGINFO);
    uzswap_region::signals::take_back().unwrap();
    assert!(is_whole(&values));
    for round in 1..4 {
        // Another pager takes the handler back as well.
        assert_eq!(touch_beyond_a_file(), 0);
        assert_eq!(CAUGHT.load(SeqCst), round);
        set_bus_handler(repair as *const () as usize, libc::SA_SIGINFO);
    }
    let _other = builder().build().unwrap();
    assert!(is_whole(&values));
}

/// Sets a handler, and returns the kernel's former one.
fn set_bus_handler(handler: usize, flags: i32) -> libc::sigaction {
    // SAFETY: the call sets a handler of the form that its flags say.
    unsafe {
        let mut before = std::mem::zeroed();
        let mut action: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        assert_eq!(libc::sigaction(libc::SIGBUS, &action, &mut before), 0);
        before
    }
}

static BEFORE: std::sync::OnceLock<libc::sigaction> = std::sync::OnceLock::new();

/// Like Python's faulthandler: prints, restores the former handler, and raises the signal again.
extern "C" fn pass_on(_: i32) {
    eprintln!("passed on");
    // SAFETY: the kernel gave this action.
    unsafe {
        libc::sigaction(libc::SIGBUS, BEFORE.get().unwrap(), std::ptr::null_mut());
        libc::raise(libc::SIGBUS);
    }
}

fn later_handler_passes_on() {
    let pager = builder().build().unwrap();
    let values = filled(&pager, 24 * MIB);
    // Two frames of Linux 7.2 leave 1 KiB of the 8 that Rust gives a thread. Python's faulthandler
    // has a stack of its own as well.
    set_alternate_stack(2 * signal_frame() + 8192);
    _ = BEFORE.set(set_bus_handler(pass_on as *const () as usize, libc::SA_NODEFER));
    uzswap_region::signals::take_back().unwrap();
    assert!(is_whole(&values));
    touch_beyond_a_file();
}

#[test]
fn a_thread_needs_no_stack_for_its_faults() {
    assert_passes("small stack");
    assert_passes("small alternate stack");
}

/// Most pages are on the backing. Loading these takes the most stack.
fn on_a_backing() -> (Pager, RegionVec<u64>) {
    let (backing, _) = TestBacking::new(64 * MIB, 4096);
    let builder = Pager::builder().memory("8M").mode(Mode::InThread).compressor("zstd");
    let pager = builder.build_on(Box::new(backing)).unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(24 * MIB / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, value)| *value = Noise::new(i as u64 + 1).word());
    (pager, values)
}

/// Sums up one element of each page.
extern "C" fn touch_all(values: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the arguments of the callers below.
    let values = unsafe { &*values.cast::<RegionVec<u64>>() };
    let sum = values.iter().step_by(512).fold(0u64, |sum, value| sum.wrapping_add(*value));
    sum as *mut libc::c_void
}

/// The kernel's frame on the stack at a signal, in whole pages: 3.4 KiB with AVX-512, more with
/// later processors.
fn signal_frame() -> usize {
    // SAFETY: the call returns a value that the kernel has given to this process.
    let bytes = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
    bytes.next_multiple_of(PAGE)
}

/// Touches all values while much of the stack is in use already.
extern "C" fn touch_all_further_down(values: *mut libc::c_void) -> *mut libc::c_void {
    let mut used = [0u8; 6 << 10];
    std::hint::black_box(&mut used);
    let sum = touch_all(values);
    std::hint::black_box(&mut used);
    sum
}

fn small_stack() {
    let (_pager, values) = on_a_backing();
    let mut thread = 0;
    let mut sum = std::ptr::null_mut();
    // SAFETY: the values outlive the thread, which is of the form that is asked for.
    unsafe {
        let mut how: libc::pthread_attr_t = std::mem::zeroed();
        assert_eq!(libc::pthread_attr_init(&mut how), 0);
        let bytes = libc::PTHREAD_STACK_MIN + signal_frame();
        assert_eq!(libc::pthread_attr_setstacksize(&mut how, bytes), 0);
        let given = (&raw const values).cast_mut().cast();
        assert_eq!(libc::pthread_create(&mut thread, &how, touch_all_further_down, given), 0);
        assert_eq!(libc::pthread_join(thread, &mut sum), 0);
    }
    assert_eq!(sum, touch_all((&raw const values).cast_mut().cast()));
}

static VALUES: AtomicUsize = AtomicUsize::new(0);
static SUM: AtomicUsize = AtomicUsize::new(0);

extern "C" fn touch_in_a_handler(_: i32) {
    SUM.store(touch_all(VALUES.load(SeqCst) as *mut libc::c_void) as usize, SeqCst);
}

/// Gives the thread an alternate stack of `size` bytes, with a guard page below.
fn set_alternate_stack(size: usize) {
    // SAFETY: the mapping is new and is never unmapped. Only its lower page becomes inaccessible.
    unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = kind | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), PAGE + size, access, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(at, PAGE, libc::PROT_NONE), 0);
        let stack = libc::stack_t { ss_sp: at.byte_add(PAGE), ss_flags: 0, ss_size: size };
        assert_eq!(libc::sigaltstack(&stack, std::ptr::null_mut()), 0);
    }
}

/// A handler of the program's that runs on an alternate stack and touches a region.
fn small_alternate_stack() {
    // Room for the frames of the program's signal and of a fault, and for the stack of both
    // handlers.
    let size = 2 * signal_frame() + 4096;
    let (_pager, values) = on_a_backing();
    VALUES.store(&raw const values as usize, SeqCst);
    set_alternate_stack(size);
    // SAFETY: a handler of the form that its flags say.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = touch_in_a_handler as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
        assert_eq!(libc::raise(libc::SIGUSR1), 0);
    }
    assert_eq!(SUM.load(SeqCst), touch_all((&raw const values).cast_mut().cast()) as usize);
}

#[test]
fn memory_that_is_taken_away_behind_our_back_is_never_zeros() {
    for case in ["given away, touched", "given away, paged out"] {
        assert_dies(case, libc::SIGABRT, &["its memory is gone", "byte 0", "advise"]);
    }
}

fn given_away(then: impl FnOnce(&RegionVec<u64>)) {
    let pager = builder().build().unwrap();
    let values = filled(&pager, MIB);
    // SAFETY: the call takes the content of a page of ours away, as a program must not.
    let done =
        unsafe { libc::madvise(values.as_ptr().cast_mut().cast(), PAGE, libc::MADV_DONTNEED) };
    assert_eq!(done, 0);
    then(&values);
}

#[test]
fn memory_that_was_unmapped_is_gone() {
    assert_dies("after unmap", libc::SIGSEGV, &[]);
}

fn after_unmap() {
    let pager = builder().build().unwrap();
    let region: Region = pager.map(8 * MIB).unwrap();
    let at = region.as_ptr().as_ptr();
    // SAFETY: the address is inside the region.
    unsafe { at.write_volatile(1) };
    drop(region);
    assert_eq!(pager.region_of(at as usize), None);
    // SAFETY: it is not safe: the test shows that.
    unsafe { at.read_volatile() };
}

#[test]
fn a_page_that_the_backing_does_not_give_back_ends_the_process_and_nothing_else_does() {
    for (case, why) in [
        ("unreadable backing", "the backing cannot be read"),
        ("damaged backing", "its stored copy is damaged"),
    ] {
        let says = ["uzswap: region 0x", "of 25165824 bytes", why, "check"];
        assert_dies(case, libc::SIGABRT, &says);
    }
}

/// 24 MiB of noise in 8 MiB: nearly all of it is on the backing, which then fails.
fn failing_backing(fault: fn(&Faults) -> &AtomicBool) {
    let (backing, faults) = TestBacking::new(64 * MIB, 4096);
    let builder = Pager::builder().memory("8M").mode(Mode::InThread);
    let pager = builder.build_on(Box::new(backing)).unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(24 * MIB / 8).unwrap();
    let noise = |i: usize| {
        let mut word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word ^= word >> 29;
        word.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ word >> 7
    };
    values.iter_mut().enumerate().for_each(|(i, value)| *value = noise(i));
    for round in 0..2 {
        let wrong = (0..values.len()).find(|i| values[*i] != noise(*i));
        assert_eq!(wrong, None, "in round {round}, before the backing failed");
    }
    fault(&faults).store(true, SeqCst);
    eprintln!("the backing fails from now on");
    (0..values.len()).for_each(|i| assert_eq!(values[i], noise(i)));
}

#[test]
fn without_room_anywhere_the_process_ends_with_the_reason() {
    assert_dies("no room", libc::SIGABRT, &["no memory is left for it", "raise the budget"]);
}

fn no_room() {
    let pager = Pager::builder().memory("8M").mode(Mode::InThread).build().unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(24 * MIB / 8).unwrap();
    let mut word = 1u64;
    for value in values.iter_mut() {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *value = word ^ word >> 33;
    }
}

#[test]
fn all_memory_that_the_kernel_counts_is_within_the_budget() {
    assert_passes("budget");
}

/// Bytes of this process in memory, without pages of files, since no budget counts the program's
/// code. This does not read smaps: it walks the page tables, and would count pages twice that move
/// during the walk.
fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mut pages = text.split(' ').map(|pages| pages.parse::<usize>().unwrap()).skip(1);
    let (all, of_files) = (pages.next().unwrap(), pages.next().unwrap());
    (all - of_files) * PAGE
}

/// Codecs' contexts of two CPUs and stacks of two threads, which the budget does not count. They
/// are larger, as are tables and the heap, if the kernel makes huge pages unasked.
fn besides() -> usize {
    let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if huge.is_ok_and(|text| text.contains("[always]")) { 8 * MIB } else { 3 * MIB }
}

fn budget() {
    let before = resident_bytes();
    let pager = Pager::builder().memory("64M").mode(Mode::InThread).build().unwrap();
    let most = AtomicUsize::new(0);
    let over = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while over.load(SeqCst) == 0 {
                most.fetch_max(resident_bytes(), SeqCst);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let mut values = filled(&pager, 128 * MIB);
        assert!(is_whole(&values));
        let mut at = 1;
        for _ in 0..100_000 {
            at = (at * 5 + 12_345) % values.len();
            assert_eq!(values[at], at as u64 / 3);
            values[at] = at as u64 / 3;
        }
        pager.set_memory("48M").unwrap();
        assert!(is_whole(&values));
        let used = resident_bytes() - before;
        assert!(used <= 48 * MIB / 100 * 102 + besides(), "{used} bytes of 48 MiB");
        over.store(1, SeqCst);
    });
    let most = most.load(SeqCst) - before;
    assert!(most <= 64 * MIB / 100 * 102 + besides(), "{most} bytes of 64 MiB at most");
    assert!(most > 56 * MIB, "{most} bytes: the budget is used");
}

#[test]
fn a_program_may_lock_all_of_its_memory() {
    assert_passes("locked");
}

/// Locks all memory: before the pager is made, before its second region is made, or when both
/// regions are in use.
fn locked() {
    let modes = [Mode::InThread, Mode::HandlerThreads];
    let locks_at = |at: usize, now: usize, flags: i32| {
        // SAFETY: takes flags.
        let done = at != now || unsafe { libc::mlockall(flags) } == 0;
        assert!(done, "{}", std::io::Error::last_os_error());
    };
    let both = libc::MCL_CURRENT | libc::MCL_FUTURE;
    for mode in modes.into_iter().filter(|mode| mode.check().is_ok()) {
        for flags in [libc::MCL_CURRENT, libc::MCL_FUTURE, both] {
            let both = [Means::Moves, Means::Copies];
            for (at, means) in (0..3).flat_map(|at| both.map(|means| (at, means))) {
                locks_at(at, 0, flags);
                let before = resident_bytes();
                let pager = builder().mode(mode).means(means).build().unwrap();
                let first = filled(&pager, 24 * MIB);
                locks_at(at, 1, flags);
                let mut second = filled(&pager, 24 * MIB);
                locks_at(at, 2, flags);
                for _ in 0..2 {
                    assert!(is_whole(&first) && is_whole(&second), "{mode}, {flags}, {at}");
                }
                second.advise(0..second.len(), Advice::PageOut).unwrap();
                second.clear(0..MIB / 8).unwrap();
                assert!(second[..MIB / 8].iter().all(|value| *value == 0));
                let used = resident_bytes() - before;
                // Threads' stacks of half a MiB, and buffers, are locked whole.
                assert!(used < (16 + 12) * MIB, "{used} bytes; {mode}, {flags}, {at}, {means:?}");
                // SAFETY: takes nothing.
                assert_eq!(unsafe { libc::munlockall() }, 0);
            }
        }
    }
}

#[test]
fn the_example_sorts_four_times_its_budget() {
    let folder = std::env::current_exe().unwrap();
    let program = folder.parent().unwrap().parent().unwrap().join("examples/sort");
    let output = Command::new(program).env("TMPDIR", "/var/tmp").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("sorted 32 MiB"), "{}", stderr(&output));
}

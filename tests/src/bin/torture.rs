//! Uses its memory in every way that a program may, in several threads, and checks every byte. This
//! program runs in-process, in less memory than it uses.
//!
//! `torture SECONDS SEED FOLDER`: threads write and check pages, map, unmap, move, drop and page
//! out, read and write files, and fork children that check and change their copy. Signals interrupt
//! the threads, and the signals' handler uses memory that may be out, too. Other children are
//! killed at random. Prints one line. Ends with 1 at the first wrong byte.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]

use rustix::process::{Pid, Signal, WaitOptions};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const THREADS: u64 = 4;
/// Pages of a thread's slab, at first and at most.
const PAGES: usize = 3000;
const PAGES_MAX: usize = 4500;
/// Pages that signal handlers use.
const HANDLED: usize = 256;

static IS_OVER: AtomicBool = AtomicBool::new(false);
static OPERATIONS: AtomicU64 = AtomicU64::new(0);
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static HANDLED_AT: AtomicU64 = AtomicU64::new(0);

/// Memory with its expected content: the version of each page, 0 for zeros.
struct Slab {
    at: *mut u64,
    versions: Vec<u32>,
    seed: u64,
    noise: Noise,
}

/// Word `at` of a page. Half of the words are noise, so the page compresses to half.
fn word(seed: u64, page: usize, version: u32, at: usize) -> u64 {
    let mixed = (seed << 40 ^ (page as u64) << 24 ^ u64::from(version)).wrapping_add(at as u64);
    match (version, at % 4) {
        (0, _) => 0,
        (_, 0) => mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ mixed.rotate_left(31),
        (_, 1) => mixed,
        _ => u64::from(version),
    }
}

fn map(at: *mut u64, pages: usize, flags: i32) -> *mut u64 {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags);
    // SAFETY: a new mapping, or one in place of a mapping of the caller's.
    let mapped = unsafe { libc::mmap(at.cast(), pages * PAGE, access, flags, -1, 0) };
    assert!(mapped != libc::MAP_FAILED, "mmap");
    mapped.cast()
}

impl Slab {
    fn new(seed: u64) -> Self {
        let at = map(std::ptr::null_mut(), PAGES, 0);
        Self { at, versions: vec![0; PAGES], seed, noise: Noise::new(seed) }
    }

    fn below(&mut self, end: usize) -> usize {
        self.noise.below(end as u64) as usize
    }

    fn page(&self, page: usize) -> *mut u64 {
        self.at.wrapping_add(page * WORDS)
    }

    fn write(&mut self, page: usize) {
        self.versions[page] += 1;
        for at in 0..WORDS {
            let value = word(self.seed, page, self.versions[page], at);
            // SAFETY: the word is inside the slab, which belongs to this thread.
            unsafe { self.page(page).add(at).write_volatile(value) };
        }
    }

    fn check(&self, page: usize, what: &str) {
        for at in 0..WORDS {
            // SAFETY: the word is inside the slab.
            let is = unsafe { self.page(page).add(at).read_volatile() };
            let should = word(self.seed, page, self.versions[page], at);
            if is != should {
                let version = self.versions[page];
                eprintln!("{what}: page {page} version {version} word {at}: {is:#x} {should:#x}");
                std::process::abort();
            }
        }
    }

    /// A range of at most `most` pages.
    fn range(&mut self, most: usize) -> (usize, usize) {
        let first = self.below(self.versions.len());
        let count = 1 + self.below(most);
        (first, count.min(self.versions.len() - first))
    }

    fn advise(&mut self, advice: i32) {
        let (first, count) = self.range(200);
        // SAFETY: the pages are inside the slab, and the next lines note dropped pages.
        let done = unsafe { libc::madvise(self.page(first).cast(), count * PAGE, advice) };
        assert_eq!(done, 0, "madvise");
        if advice == libc::MADV_DONTNEED {
            self.versions[first..first + count].fill(0);
        }
    }

    fn map_over(&mut self) {
        let (first, count) = self.range(50);
        map(self.page(first), count, libc::MAP_FIXED);
        self.versions[first..first + count].fill(0);
    }

    /// Moves the slab, and grows or shrinks it.
    fn remap(&mut self) {
        let pages = PAGES_MAX - self.below(PAGES_MAX - PAGES / 2);
        let old = self.versions.len() * PAGE;
        // SAFETY: the slab is a sequence of alike mappings, and no other code has pointers to it.
        let moved =
            unsafe { libc::mremap(self.at.cast(), old, pages * PAGE, libc::MREMAP_MAYMOVE) };
        if moved == libc::MAP_FAILED {
            return; // It has become several mappings, of which the kernel moves one at a time.
        }
        self.at = moved.cast();
        self.versions.resize(pages, 0);
    }

    /// Moves the whole slab to a new mapping.
    fn renew(&mut self) {
        let new = map(std::ptr::null_mut(), self.versions.len(), 0);
        let words = self.versions.len() * WORDS;
        // SAFETY: both blocks have this number of words; the old block is not used again.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at, new, words);
            assert_eq!(libc::munmap(self.at.cast(), words * 8), 0, "munmap");
        }
        self.at = new;
    }

    /// Makes pages read-only, checks them, and makes them writable again.
    fn protect(&mut self) {
        let (first, count) = self.range(20);
        for access in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: the pages are inside the slab, which no thread writes now.
            let done = unsafe { libc::mprotect(self.page(first).cast(), count * PAGE, access) };
            if done != 0 {
                return; // Too many mappings.
            }
            (first..first + count).for_each(|page| self.check(page, "protected"));
        }
    }

    /// Copies pages through a file to other memory, only by system calls.
    fn copy(&mut self, file: &File) {
        let (first, count) = self.range(60);
        let bytes = count * PAGE;
        let descriptor = file.as_raw_fd();
        // SAFETY: both calls get memory inside the slab.
        let written =
            unsafe { libc::pwrite(descriptor, self.page(first).cast(), bytes, 0) } as usize;
        assert_eq!(written, bytes, "pwrite");
        let memory = map(std::ptr::null_mut(), count, 0);
        // SAFETY: as many bytes as were mapped.
        let read = unsafe { libc::pread(descriptor, memory.cast(), bytes, 0) } as usize;
        assert_eq!(read, bytes, "pread");
        for at in 0..count * WORDS {
            let (page, in_page) = (first + at / WORDS, at % WORDS);
            // SAFETY: the word is inside the mapping.
            let is = unsafe { memory.add(at).read_volatile() };
            assert_eq!(is, word(self.seed, page, self.versions[page], in_page), "a file");
        }
        // SAFETY: it was mapped here.
        unsafe { libc::munmap(memory.cast(), bytes) };
    }

    /// A child checks its copy, changes it, and checks it again. This process's memory must not
    /// change.
    fn fork(&mut self) {
        // SAFETY: the child uses only memory and system calls, and ends by `_exit`.
        match unsafe { libc::fork() } {
            -1 => {}
            0 => {
                for _ in 0..300 {
                    let page = self.below(self.versions.len());
                    self.check(page, "a child");
                    self.write(page);
                    self.check(page, "a child's own");
                }
                // SAFETY: the call ends the child.
                unsafe { libc::_exit(0) }
            }
            child => {
                for _ in 0..100 {
                    let page = self.below(self.versions.len());
                    self.write(page);
                    self.check(page, "a parent");
                }
                let is_well = status_of(child) == 0;
                assert!(is_well, "a child ended badly");
            }
        }
    }

    /// Makes a child that never ends, and kills it.
    fn kill(&mut self) {
        let wait = Duration::from_millis(self.below(60) as u64);
        // SAFETY: as above.
        match unsafe { libc::fork() } {
            -1 => {}
            0 => loop {
                let page = self.below(self.versions.len());
                self.check(page, "a child to be killed");
                self.write(page);
                match self.below(30) {
                    0 => self.advise(libc::MADV_PAGEOUT),
                    1 => self.advise(libc::MADV_DONTNEED),
                    _ => {}
                }
            },
            child => {
                std::thread::sleep(wait);
                let process = Pid::from_raw(child).expect("a child's number");
                rustix::process::kill_process(process, Signal::KILL).expect("a child to kill");
                assert_eq!(status_of(child), libc::SIGKILL, "a child ended by itself");
            }
        }
    }

    fn go_on(&mut self, file: &File) {
        while !IS_OVER.load(Relaxed) {
            match self.below(1000) {
                0..3 => self.remap(),
                3..5 => self.renew(),
                5..12 => self.map_over(),
                12..20 => self.advise(libc::MADV_DONTNEED),
                20..30 => self.advise(libc::MADV_PAGEOUT),
                30..40 => self.copy(file),
                40..45 => self.protect(),
                45..48 => self.fork(),
                48..50 => self.kill(),
                50..600 => {
                    let page = self.below(self.versions.len());
                    self.check(page, "at random");
                }
                _ => {
                    let page = self.below(self.versions.len());
                    self.write(page);
                }
            }
            OPERATIONS.fetch_add(1, Relaxed);
        }
        (0..self.versions.len()).for_each(|page| self.check(page, "at the end"));
    }
}

/// The status of an ended child: its exit status, or the signal.
fn status_of(child: i32) -> i32 {
    let child = Pid::from_raw(child);
    loop {
        match rustix::process::waitpid(child, WaitOptions::empty()) {
            Ok(Some((_, status))) => {
                return status.exit_status().or(status.terminating_signal()).unwrap_or(-1);
            }
            Err(rustix::io::Errno::INTR) | Ok(None) => {}
            Err(error) => panic!("waitpid: {error}"),
        }
    }
}

/// Counts in memory that may be paged out.
extern "C" fn on_alarm(_: i32) {
    let turn = SIGNALS.fetch_add(1, Relaxed);
    let memory = HANDLED_AT.load(Relaxed) as *mut u64;
    let page = (turn as usize * 97) % HANDLED;
    // SAFETY: this process has these pages; several handlers may run at the same time.
    unsafe {
        let first = std::sync::atomic::AtomicU64::from_ptr(memory.add(page * WORDS));
        let last = std::sync::atomic::AtomicU64::from_ptr(memory.add(page * WORDS + WORDS - 1));
        first.fetch_add(1, Relaxed);
        last.fetch_add(1, Relaxed);
    }
}

fn interrupt() {
    HANDLED_AT.store(map(std::ptr::null_mut(), HANDLED, 0) as u64, Relaxed);
    let every = libc::timeval { tv_sec: 0, tv_usec: 5000 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the handler is a signal handler; an action of zeros is valid; so is the timer.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_alarm as extern "C" fn(i32) as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()), 0);
    }
}

/// True if the handlers' counts in the first and the last word of each page are equal.
fn check_handled() -> bool {
    let memory = HANDLED_AT.load(Relaxed) as *const u64;
    // SAFETY: the block has that many pages.
    let word = |at: usize| unsafe { memory.add(at).read_volatile() };
    let counted: u64 = (0..HANDLED).map(|page| word(page * WORDS)).sum();
    let same = (0..HANDLED).all(|page| word(page * WORDS) == word(page * WORDS + WORDS - 1));
    same && counted == SIGNALS.load(Relaxed)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, seed, folder] = &arguments[..] else {
        eprintln!("usage: torture SECONDS SEED FOLDER");
        return ExitCode::from(2);
    };
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let (seconds, seed) = (number(seconds), number(seed));
    interrupt();
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let file = Path::new(folder).join(format!("torture-{thread}"));
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(file);
            let file = file.expect("a file in the folder");
            std::thread::spawn(move || Slab::new(seed * THREADS + thread + 1).go_on(&file))
        })
        .collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    IS_OVER.store(true, Relaxed);
    let all_ended = threads.into_iter().all(|thread| thread.join().is_ok());
    // SAFETY: ignores this signal from here on.
    unsafe { libc::signal(libc::SIGALRM, libc::SIG_IGN) };
    std::thread::sleep(Duration::from_millis(50));
    if !all_ended || !check_handled() {
        eprintln!("torture: a thread, or what handlers counted, is wrong");
        return ExitCode::FAILURE;
    }
    let (operations, signals) = (OPERATIONS.load(Relaxed), SIGNALS.load(Relaxed));
    println!("torture: {operations} operations, {signals} signals: no wrong byte");
    ExitCode::SUCCESS
}

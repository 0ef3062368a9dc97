//! The comparison: each call of the kernel's table, twice.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]

#[path = "probes.rs"]
mod probes;

use libc::c_void;
use probes::{PROBES, Probe, UNTESTED};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use uzswap_calls::table::{ROWS, Row, Treatment, X86};

const PAGE: usize = 4096;
/// Pages for the memory of calls.
const PAGES: usize = 64;
/// Further memory, which makes memory short.
const BALLAST: usize = 40 << 20;

/// The part of a probe's result that must be the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The number and all bytes.
    Same,
    /// Only the number: the bytes are times, or depend on the machine.
    Number,
    /// The answer is a descriptor, and all bytes are compared.
    File,
    /// Only that the call did not fail.
    Success,
}

/// Memory for calls. Each piece begins on a page of its own.
pub struct World {
    base: *mut u8,
    used: usize,
    is_absent: bool,
    folder: PathBuf,
    /// Reads another effect of the call, after the call.
    then: Option<Box<dyn FnOnce() -> Vec<u8>>>,
}

impl World {
    /// A place for this number of bytes, all zeros.
    pub fn room(&mut self, bytes: usize) -> u64 {
        let at = self.used;
        self.used += bytes.max(1).next_multiple_of(PAGE);
        assert!(self.used <= PAGES * PAGE);
        self.base.wrapping_add(at) as u64
    }

    /// A place with these bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> u64 {
        let at = self.room(bytes.len());
        // SAFETY: room for as many was made.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
        at
    }

    /// A place with a text and a zero at its end.
    pub fn text(&mut self, text: &str) -> u64 {
        self.bytes(&[text.as_bytes(), &[0]].concat())
    }

    /// A place with numbers of eight bytes.
    pub fn longs(&mut self, numbers: &[u64]) -> u64 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }

    /// A place with numbers of four bytes.
    pub fn ints(&mut self, numbers: &[i32]) -> u64 {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }

    /// The path of a name in the folder. Afterwards no file has that name.
    pub fn gone(&mut self, name: &str) -> u64 {
        let path = self.folder.join(name);
        if fs::remove_file(&path).is_err() {
            // The path may be a folder, or not exist.
            let _ = fs::remove_dir(&path);
        }
        self.text(path.to_str().expect("a path of this program's"))
    }

    /// The path of a file in the folder, with content.
    pub fn file(&mut self, name: &str) -> u64 {
        let at = self.gone(name);
        fs::write(self.folder.join(name), b"what the file says").expect("a file of ours");
        at
    }

    /// A descriptor of a file with content, which stays open until the probe is done.
    pub fn open(&mut self, name: &str) -> u64 {
        self.file(name);
        let file = fs::File::options().read(true).write(true).open(self.folder.join(name));
        std::os::fd::IntoRawFd::into_raw_fd(file.expect("a file of ours")) as u64
    }

    /// Calls `look` after the call.
    pub fn then(&mut self, look: impl FnOnce() -> Vec<u8> + 'static) {
        self.then = Some(Box::new(look));
    }

    /// Pages the calls' memory out, until no page is present.
    fn page_out(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.is_any_there() {
            assert!(Instant::now() < deadline, "memory does not leave: is this run in-process?");
            // SAFETY: memory of ours, whose content this does not change.
            let done = unsafe { libc::madvise(self.base.cast(), PAGES * PAGE, libc::MADV_PAGEOUT) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        }
    }

    /// True if a page is present. Asks the kernel, since reading the page would bring it in.
    fn is_any_there(&self) -> bool {
        let file = fs::File::open("/proc/self/pagemap").expect("the kernel's table");
        let mut entries = vec![0; self.used / PAGE * 8];
        file.read_exact_at(&mut entries, (self.base as usize / PAGE * 8) as u64).expect("entries");
        entries.chunks(8).any(|entry| entry[7] & 0x80 != 0)
    }

    fn content(&self) -> Vec<u8> {
        // SAFETY: memory of ours, which no other thread writes now.
        unsafe { std::slice::from_raw_parts(self.base, PAGES * PAGE) }.to_vec()
    }
}

/// The result of a call: its answer, memory, and other effect.
type Observed = (i64, Vec<u8>, Vec<u8>);

/// The number of a call; `None` if this processor does not have it.
fn number_of(name: &str) -> Option<i64> {
    let row = ROWS.iter().find(|row| row.name == name);
    let number = row.unwrap_or_else(|| panic!("there is no call {name}")).number();
    (number != X86).then_some(number.into())
}

fn make(world: &mut World, probe: &Probe, number: i64) -> Observed {
    world.used = 0;
    // SAFETY: memory of ours.
    unsafe { std::ptr::write_bytes(world.base, 0, PAGES * PAGE) };
    let given = (probe.prepare)(world);
    let mut arguments = [0; 6];
    arguments[..given.len()].copy_from_slice(&given);
    if world.is_absent {
        world.page_out();
    }
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the probe has made its arguments.
    let answer = unsafe {
        let answer = libc::syscall(number, a, b, c, d, e, f);
        if answer == -1 { -i64::from(*libc::__errno_location()) } else { answer }
    };
    let looked = world.then.take().map_or(Vec::new(), |look| look());
    let content = world.content();
    if probe.answer == Answer::File && answer >= 0 {
        // SAFETY: a descriptor of ours.
        unsafe { libc::close(answer as i32) };
    }
    (answer, content, looked)
}

/// The difference of two results, if there is one.
fn compare(probe: &Probe, there: &Observed, absent: &Observed) -> Option<String> {
    let is_same = match probe.answer {
        Answer::Same => there.0 == absent.0,
        Answer::Number => there.0 == absent.0,
        Answer::File | Answer::Success => (there.0 < 0) == (absent.0 < 0),
    };
    let compares = matches!(probe.answer, Answer::Same | Answer::File);
    if there.0 == -i64::from(libc::EFAULT) {
        return Some("is given a wrong address".into());
    }
    if !is_same {
        return Some(format!("answers {} and not {}", absent.0, there.0));
    }
    if compares && there.1 != absent.1 {
        let at = there.1.iter().zip(&absent.1).position(|(there, absent)| there != absent);
        return Some(format!("leaves another byte at {at:?}"));
    }
    (there.2 != absent.2).then(|| "has another effect".into())
}

/// Calls with memory that are neither compared nor listed as exempt.
fn forgotten() -> impl Iterator<Item = &'static str> {
    let is_given = |row: &&Row| {
        let has_memory = matches!(
            row.treatment,
            Treatment::Pinned(_) | Treatment::Touched(_) | Treatment::Own(_)
        );
        has_memory && row.number() != X86
    };
    let is_known = |name: &str| {
        PROBES.iter().any(|probe| probe.name == name)
            || UNTESTED.iter().any(|(_, names)| names.split_whitespace().any(|one| one == name))
    };
    ROWS.iter().filter(is_given).map(|row| row.name).filter(move |name| !is_known(name))
}

/// Memory that the kernel joins with no neighbour, since uzswap does not manage a mapping with a
/// thread's block.
fn apart() -> *mut u8 {
    const ROOM: usize = 1 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice, and the middle of it.
    unsafe {
        let bytes = PAGES * PAGE + 2 * ROOM;
        let whole = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(whole, libc::MAP_FAILED);
        let base = whole.byte_add(ROOM);
        assert_eq!(libc::mprotect(base, PAGES * PAGE, access), 0);
        base.cast()
    }
}

/// Compares all calls. Returns the program's status.
pub fn run() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: absent DIRECTORY");
        return ExitCode::from(2);
    };
    let ballast: Vec<u8> = (0..BALLAST).map(|at| (at / 100 % 251) as u8).collect();
    let base = apart();
    // SAFETY: memory of ours. It is written before memory is short, so that it is managed.
    unsafe { std::ptr::write_bytes(base, 1, PAGES * PAGE) };
    let mut world = World { base, used: PAGES * PAGE, is_absent: true, folder, then: None };
    world.page_out();
    let mut failures: Vec<String> =
        forgotten().map(|name| format!("{name} is neither compared nor said why not")).collect();
    let mut count = 0;
    for probe in PROBES {
        let Some(number) = number_of(probe.name) else { continue };
        count += 1;
        world.is_absent = false;
        let there = make(&mut world, probe, number);
        world.is_absent = true;
        let absent = make(&mut world, probe, number);
        let differs = compare(probe, &there, &absent);
        failures.extend(differs.map(|how| format!("{}: {how}", probe.name)));
    }
    failures.iter().for_each(|line| println!("{line}"));
    let sum: u64 = ballast.iter().map(|byte| u64::from(*byte)).sum();
    println!("{count} calls compared, {sum}");
    ExitCode::from(u8::from(!failures.is_empty()))
}

/// An `iovec` of the kernel.
pub fn part(at: u64, bytes: usize) -> [u64; 2] {
    [at, bytes as u64]
}

/// A pair of sockets.
pub fn sockets(kind: i32) -> [i32; 2] {
    let mut pair = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) }, 0);
    pair
}

/// A pipe: the end to read, and the end to write.
pub fn pipe() -> [i32; 2] {
    let mut pair = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pair.as_mut_ptr()) }, 0);
    pair
}

/// The bytes that can be read now. Closes the descriptor.
pub fn drain(file: i32) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    // SAFETY: room for as many; a descriptor of ours.
    let count = unsafe {
        let count = libc::read(file, bytes.as_mut_ptr().cast::<c_void>(), bytes.len());
        libc::close(file);
        count
    };
    bytes.truncate(count.max(0) as usize);
    bytes
}

/// Writes to a descriptor of ours.
pub fn fill(file: i32, bytes: &[u8]) {
    // SAFETY: as many bytes as there are.
    let count = unsafe { libc::write(file, bytes.as_ptr().cast::<c_void>(), bytes.len()) };
    assert_eq!(count, bytes.len() as isize);
}

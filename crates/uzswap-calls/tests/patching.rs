//! The C library of this very program is patched while threads make calls.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

#[cfg(target_arch = "aarch64")]
#[path = "patching/aarch64.rs"]
mod processor;
#[cfg(target_arch = "x86_64")]
#[path = "patching/x86_64.rs"]
mod processor;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use uzswap_calls::{Call, Looks, Outcome, Patcher, raw, sites, stop};

static READS: AtomicU64 = AtomicU64::new(0);
static OTHERS: AtomicU64 = AtomicU64::new(0);

/// Decides one call, and changes every register that a first function may change.
fn first(call: &mut Call) -> Outcome {
    processor::change_registers();
    if call.number != libc::SYS_getppid as u64 {
        return Outcome::Undecided;
    }
    // SAFETY: the program's own call.
    call.result = unsafe { raw(call.number, call.arguments) };
    Outcome::Done
}

fn on_call(call: &mut Call) -> Outcome {
    if call.number == libc::SYS_rt_sigprocmask as u64 {
        return without_ours(call);
    }
    if call.number == libc::SYS_read as u64 {
        READS.fetch_add(1, Relaxed);
        // SAFETY: the program's own call.
        call.result = unsafe { raw(call.number, call.arguments) };
        return Outcome::Done;
    }
    OTHERS.fetch_add(1, Relaxed);
    Outcome::Bare
}

extern "C" fn met(signal: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    if signal == libc::SIGUSR1 {
        _ = stop::stay(0);
        return;
    }
    // SAFETY: the argument of a handler of SIGILL.
    let at = unsafe { processor::instruction(context) };
    match Patcher::resume_at(*at as usize) {
        Some(to) => *at = to as _,
        None => std::process::abort(),
    }
}

fn set_handlers() {
    // SAFETY: an action of zeros is valid; the handler has the form of the flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = met as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
}

/// The C library blocks signals for its own work. It must not block SIGILL, which its replaced
/// calls need now.
fn without_ours(call: &mut Call) -> Outcome {
    let [how, set, old, bytes, ..] = call.arguments;
    if set == 0 || how == libc::SIG_UNBLOCK as u64 {
        return Outcome::Bare;
    }
    // SAFETY: the C library passes a set of eight bytes, as the kernel does.
    let set = unsafe { *(set as *const u64) } & !(1 << (libc::SIGILL - 1));
    // SAFETY: the program's own call, except for that signal.
    call.result = unsafe { raw(call.number, [how, &raw const set as u64, old, bytes, 0, 0]) };
    Outcome::Done
}

/// Calls with numbers in registers and in memory, new threads, processes and floating point,
/// before, during and after the replacement: each has the same result.
#[test]
fn calls_answer_the_same_while_they_are_replaced() {
    set_handlers();
    let mut patcher = Patcher::new(Looks { first, second: on_call }).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = || {
            let mut rounds = 0u64;
            while !done.load(Relaxed) || rounds < 50 {
                round(rounds);
                rounds += 1;
            }
            rounds
        };
        let workers = [(); 3].map(|()| scope.spawn(work));
        std::thread::sleep(std::time::Duration::from_millis(50));
        let modules = sites::modules();
        let ours = |module: &&sites::Module| {
            module.name.contains("/libc.so") || module.name.contains("/ld-linux")
        };
        let found: Vec<_> = modules.iter().filter(ours).flat_map(|one| one.sites()).collect();
        let wants = |number: u32| number != libc::SYS_futex as u32;
        let work = patcher.prepare(&found, wants, &[]).unwrap();
        let mut tries = 0;
        let patched = loop {
            tries += 1;
            // SAFETY: all others stand still.
            let done =
                stop::others(libc::SIGUSR1, &[], stop::threads, stop::waited_call, |_| unsafe {
                    work.apply()
                });
            if let Some(patched) = done {
                break patched;
            }
            assert!(tries < 100, "the threads do not stop");
        };
        drop(work);
        assert!(processor::is_expected(patched), "{patched:?}");
        let again = patcher.prepare(&found, wants, &[]).unwrap();
        // SAFETY: there is nothing to replace.
        assert_eq!(unsafe { again.apply() }.jumps, 0, "they are replaced once");
        std::thread::sleep(std::time::Duration::from_millis(200));
        done.store(true, Relaxed);
        let rounds: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        assert!(rounds >= 150);
    });
    let before = READS.load(Relaxed);
    round(1);
    assert!(READS.load(Relaxed) > before && OTHERS.load(Relaxed) > 0);
    processor::check_registers();
    let output = std::process::Command::new("echo").arg("all is well").output().unwrap();
    assert_eq!(output.stdout, b"all is well\n");
}

fn round(number: u64) {
    let scale = std::hint::black_box(1.5f64);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true);
    let path = std::env::temp_dir().join(format!("uzswap-calls-{:?}", std::thread::current().id()));
    let path = format!("{}-{}", path.display(), std::process::id());
    let mut file = options.open(&path).unwrap();
    let text = number.to_string();
    file.write_all(text.as_bytes()).unwrap();
    let mut read = String::new();
    File::open(&path).unwrap().read_to_string(&mut read).unwrap();
    assert_eq!(read, text);
    std::fs::remove_file(&path).unwrap();
    // SAFETY: neither takes an argument. Of the second, the number is not in the code.
    unsafe {
        assert_eq!(libc::getpid(), libc::syscall(libc::SYS_getpid) as i32);
        assert_eq!(libc::syscall(libc::SYS_close, -1), -1);
    }
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    check_last_argument();
    let joined = std::thread::spawn(move || number as f64 * scale).join().unwrap();
    assert_eq!(joined, number as f64 * 1.5);
}

/// A call of six arguments, whose last the C library's function takes from the stack.
fn check_last_argument() {
    let mut file = tempfile();
    file.write_all(&[1; 4096]).unwrap();
    file.write_all(&[2; 4096]).unwrap();
    // All arguments have the width that the function takes.
    let (access, flags) = (i64::from(libc::PROT_READ), i64::from(libc::MAP_PRIVATE));
    let (none, page, descriptor) = (0i64, 4096i64, i64::from(file.as_raw_fd()));
    // SAFETY: a new mapping, which is read where it is mapped, and then unmapped.
    let byte = unsafe {
        let at = libc::syscall(libc::SYS_mmap, none, page, access, flags, descriptor, page);
        assert!(at > 0);
        let byte = *(at as *const u8);
        assert_eq!(libc::munmap(at as *mut libc::c_void, 4096), 0);
        byte
    };
    assert_eq!(byte, 2, "what is at the offset");
}

fn tempfile() -> File {
    // SAFETY: a name, and flags; the descriptor is new.
    unsafe {
        let file = libc::memfd_create(c"uzswap-calls".as_ptr(), libc::MFD_CLOEXEC);
        assert!(file >= 0);
        File::from_raw_fd(file)
    }
}

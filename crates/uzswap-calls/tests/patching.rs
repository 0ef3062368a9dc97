//! The C library of this very program is patched while threads make calls.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use uzswap_calls::{Call, Looks, Outcome, Patcher, raw, sites, stop};

static READS: AtomicU64 = AtomicU64::new(0);
static OTHERS: AtomicU64 = AtomicU64::new(0);

/// Decides one call, and changes every register that a first function may change.
fn first(call: &mut Call) -> Outcome {
    // SAFETY: every x86-64 has these registers; only the declared clobbers change.
    unsafe {
        std::arch::asm!(
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "pcmpeqd xmm\\number, xmm\\number",
            ".endr",
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack, nomem),
        );
    }
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
    let at = unsafe {
        &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize]
    };
    match Patcher::resume_at(*at as usize) {
        Some(to) => *at = to as i64,
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
        assert!(patched.jumps > 250 && patched.traps > 10 && patched.left > 0, "{patched:?}");
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
    check_registers();
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

/// Checks that vector registers are the same after a call that the first function decides, and
/// after a call that it leaves to the second. Both calls are functions with only a system call.
fn check_registers() {
    for function in [libc::getppid, libc::getpgrp] {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has them.
            unsafe { check_wide(function) };
        } else if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the processor has them.
            unsafe { check_half(function) };
        }
    }
}

/// One test, for registers by name, width, and number.
macro_rules! check_kept {
    ($name:ident, $feature:literal, $register:literal, $move:literal, $bytes:literal,
     $numbers:literal) => {
        #[target_feature(enable = $feature)]
        unsafe fn $name(function: unsafe extern "C" fn() -> libc::pid_t) {
            let before: [u8; 32 * $bytes] = std::array::from_fn(|at| (at * 7 + 3) as u8);
            let mut after = [0u8; 32 * $bytes];
            // SAFETY: loads and stores within the arrays; the C library's function gets the stack
            // alignment that it needs.
            unsafe {
                std::arch::asm!(
                    "mov r13, rsp",
                    "and rsp, -64",
                    concat!(".irp number, ", $numbers),
                    concat!($move, " ", $register, "\\number, [r14 + ", $bytes, " * \\number]"),
                    ".endr",
                    "call r12",
                    concat!(".irp number, ", $numbers),
                    concat!($move, " [r15 + ", $bytes, " * \\number], ", $register, "\\number"),
                    ".endr",
                    "mov rsp, r13",
                    in("r12") function,
                    in("r14") before.as_ptr(),
                    in("r15") after.as_mut_ptr(),
                    out("r13") _,
                    clobber_abi("C"),
                );
            }
            let count = $numbers.split(',').count();
            assert!(before[..count * $bytes] == after[..count * $bytes], "{}", stringify!($name));
        }
    };
}

check_kept!(check_half, "avx", "ymm", "vmovdqu", 32, "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15");
check_kept!(
    check_wide,
    "avx512f",
    "zmm",
    "vmovdqu64",
    64,
    "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"
);

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

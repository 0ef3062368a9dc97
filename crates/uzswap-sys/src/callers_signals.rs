//! The signals that this process's caller ignored or blocked, for a command in its place: as after
//! `nohup`, or in a service of systemd, which ignores SIGPIPE.

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// True if the caller ignored SIGPIPE.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// For a program that starts commands, once: the standard library ignores SIGPIPE before `main`, so
/// the C library looks at that signal before.
#[macro_export]
macro_rules! look_before_main {
    () => {
        #[used]
        #[unsafe(link_section = ".init_array")]
        static LOOK: extern "C" fn() = $crate::callers_signals::look;
    };
}

/// Called by [`look_before_main`].
pub extern "C" fn look() {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call writes the present one to `action`, which has that
    // type. All-zero bytes are a valid action.
    let action = unsafe {
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    PIPE_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Relaxed);
}

/// Two sets of signals, in which signal `n` is bit `n - 1`.
#[derive(Debug, Clone, Copy)]
pub struct CallersSignals {
    ignored: u64,
    blocked: u64,
}

impl CallersSignals {
    /// Reads them, before this process catches or blocks any. From now on the kernel keeps the
    /// status of each child that ends. It dropped the status if the caller ignored SIGCHLD.
    pub fn read() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let set = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
        };
        let ignored = set("SigIgn:") & !bit(libc::SIGPIPE);
        let pipe = if PIPE_IGNORED.load(Relaxed) { bit(libc::SIGPIPE) } else { 0 };
        // SAFETY: the default action has no handler.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        Self { ignored: ignored | pipe, blocked: set("SigBlk:") }
    }

    /// True if the caller ignored the signal.
    pub fn is_ignored(self, signal: i32) -> bool {
        self.ignored & bit(signal) != 0
    }

    /// Starts the command with these signals ignored and blocked. The standard library would start
    /// it without them.
    pub fn give_to(self, command: &mut Command) {
        if self.ignored == 0 && self.blocked == 0 {
            return;
        }
        let blocked = self.blocked;
        let set = move || {
            let (ignore, none) = ([libc::SIG_IGN, 0, 0, 0], std::ptr::null_mut::<usize>());
            for signal in (1..=64).filter(|signal| self.is_ignored(*signal)) {
                // SAFETY: the kernel reads its own form of an action, which has no handler. The C
                // library would refuse its own two signals.
                unsafe {
                    libc::syscall(libc::SYS_rt_sigaction, signal, ignore.as_ptr(), none, 8);
                }
            }
            // SAFETY: the kernel reads a set of 64 signals, and writes nothing.
            unsafe {
                libc::syscall(
                    libc::SYS_rt_sigprocmask,
                    libc::SIG_SETMASK,
                    &raw const blocked,
                    none,
                    8,
                );
            }
            Ok(())
        };
        // SAFETY: the child makes system calls only, so no lock of the parent's matters.
        unsafe { command.pre_exec(set) };
    }
}

/// The bit of a signal in a set.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

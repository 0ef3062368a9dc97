//! SIGBUS and SIGSEGV: faults that are ours are served, all others go to the handler that was there
//! before.
//!
//! The handler runs on the alternate stack of the thread that faulted if it has one, else on its
//! own, of either of which it takes some hundred bytes: faults are served on stacks of ours
//! ([`crate::stack`]). All signals are blocked meanwhile, so that no other handler runs while the
//! thread holds our locks. `errno` is kept.

use crate::stack::Stacks;
use crate::uffd::Fault;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Serves a fault; `false` if it is not ours.
pub type Serve = fn(Fault) -> bool;

/// What a signal is given to, and who had it before.
struct Hook {
    serve: Serve,
    before: libc::sigaction,
}

static BUS: OnceLock<Hook> = OnceLock::new();
static SEGV: OnceLock<Hook> = OnceLock::new();
static STACKS: OnceLock<Stacks> = OnceLock::new();

/// Has `serve` asked about each SIGBUS from now on. Once in a process.
pub fn on_bus(serve: Serve) -> io::Result<()> {
    if STACKS.get().is_none() {
        // Another thread may do the same: then its are taken.
        let _ = STACKS.set(Stacks::new()?);
    }
    hook(libc::SIGBUS, &BUS, serve)
}

/// To be called in a fork, in which only the calling thread goes on.
pub fn forked() {
    STACKS.get().into_iter().for_each(Stacks::give_all);
}

/// Has `serve` asked about each SIGSEGV from now on. Once in a process.
pub fn on_segv(serve: Serve) -> io::Result<()> {
    hook(libc::SIGSEGV, &SEGV, serve)
}

/// Whether the calling thread blocks SIGBUS: a fault then kills the process.
pub fn is_blocked() -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: with no new set, the current one is written to `set`, which is one.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), libc::SIGBUS) == 1
    }
}

/// Blocks all signals that can be in the calling thread until the value is dropped.
#[derive(Debug)]
pub struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    /// See the type.
    pub fn all() -> Self {
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut every = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: both are sets; the second one is filled before it is used. SIGBUS stays: a fault
        // while it is blocked kills.
        unsafe {
            libc::sigfillset(every.as_mut_ptr());
            libc::sigdelset(every.as_mut_ptr(), libc::SIGBUS);
            libc::pthread_sigmask(libc::SIG_BLOCK, every.as_ptr(), before.as_mut_ptr());
            Self { before: before.assume_init() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the kernel gave us.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

fn hook(signal: i32, hook: &OnceLock<Hook>, serve: Serve) -> io::Result<()> {
    if hook.get().is_some() {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with no new action, the present one is written to `before`, which is one.
    let before = unsafe {
        if libc::sigaction(signal, std::ptr::null(), before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        before.assume_init()
    };
    // Before the handler can run.
    if hook.set(Hook { serve, before }).is_err() {
        return Ok(()); // Another thread does the same.
    }
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: an action of zeros is valid; its handler is of the form that SA_SIGINFO asks for.
    unsafe {
        let action = action.assume_init_mut();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&mut action.sa_mask);
        if libc::sigaction(signal, action, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both for a handler with SA_SIGINFO; errno is the thread's own.
    let (errno, address) = unsafe { (*libc::__errno_location(), (*info).si_addr() as usize) };
    // SAFETY: as above.
    let is_write = unsafe { is_write(context) };
    let hook = if signal == libc::SIGBUS { &BUS } else { &SEGV };
    let Some(hook) = hook.get() else { std::process::abort() };
    let mut is_ours = false;
    let mut serve = || is_ours = (hook.serve)(Fault { address, is_write });
    match STACKS.get() {
        Some(stacks) => stacks.run(serve),
        None => serve(),
    }
    if !is_ours {
        // SAFETY: these are the handler's own arguments.
        unsafe { pass_on(hook, signal, info, context) };
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether the access was a write, where the processor says so.
#[cfg(target_arch = "x86_64")]
unsafe fn is_write(context: *mut libc::c_void) -> bool {
    const WRITE: i64 = 1 << 1;
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the third argument of a handler is its context.
    unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0 }
}

/// Whether the access was a write, where the processor says so.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn is_write(_: *mut libc::c_void) -> bool {
    false
}

/// Does what would have happened without us.
///
/// # Safety
/// The arguments are those of a handler of `signal`.
unsafe fn pass_on(
    hook: &Hook,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let before = &hook.before;
    // SAFETY: `before` came from the kernel; the mask is set as the kernel would have for it, and
    // it is called in the form that its flags say.
    unsafe {
        match before.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                // A fault cannot be ignored. The access is done again, and kills the process; a
                // signal that was sent is raised anew.
                let mut default = *before;
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, std::ptr::null_mut());
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
            handler => {
                let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                for other in 1..libc::SIGRTMAX() {
                    let is_asked = libc::sigismember(&before.sa_mask, other) == 1;
                    if is_asked || other == signal && before.sa_flags & libc::SA_NODEFER == 0 {
                        libc::sigaddset(&mut mask, other);
                    }
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    type Long = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
                    std::mem::transmute::<usize, Long>(handler)(signal, info, context);
                } else {
                    std::mem::transmute::<usize, extern "C" fn(i32)>(handler)(signal);
                }
            }
        }
    }
}

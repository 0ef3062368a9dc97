//! Decides how a thread continues after our signal has interrupted its system call.
//!
//! ```text
//!                          the kernel has            no signal of the program's    one that waits
//! read, accept, wait4 …    set it to begin again     as it is                      EINTR, if its
//!                                                                                  handler says so
//! poll, epoll_wait …       answered EINTR            begun again                   EINTR
//! ```
//! A signal of the program's that arrived together with ours, or while the thread stood still,
//! waits until our handler returns. Without us that signal would have ended the call. Otherwise a
//! program whose `read` has to end when an alarm rings would read for ever. The waiting signals are
//! read last. A signal that arrives later counts as if it had arrived just before the call.

use crate::signals::{KernelAction, never_blocked};
use libc::c_long;
use uzswap_calls::stop::WaitedCall;
use uzswap_calls::{Patcher, older, raw};
use uzswap_sys::fault_signals::Stopped;

/// Calls that answer `EINTR` where a handler has no SA_RESTART. Other restarted calls never wait
/// (`fork`), or their callers check again anyway (`futex`).
const ENDED: [c_long; 26] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    older::SYS_open,
    libc::SYS_openat,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_timedreceive,
    libc::SYS_getrandom,
];

/// Sets the address at which the thread continues, as the last act of our handler. `waited` is the
/// system call in which the thread waited when we asked it to stop.
pub fn go_on(thread: &mut Stopped, waited: Option<WaitedCall>) {
    const EINTR: i64 = -(libc::EINTR as i64);
    if thread.result == EINTR {
        // The kernel has closed the file even so.
        let call = processor::interrupted(thread, waited);
        let call = call.filter(|call| call.number != libc::SYS_close);
        if let Some(call) = call.filter(|_| waiting(thread.blocked).is_none()) {
            (thread.instruction, thread.result) = (call.start, call.register);
        }
    } else if let Some((behind, number)) = processor::repeated(thread, waited)
        && ENDED.contains(&number)
        && waiting(thread.blocked).is_some_and(|flags| flags & libc::SA_RESTART as u64 == 0)
    {
        (thread.instruction, thread.result) = (behind, EINTR);
    }
}

/// A call that was answered `EINTR`.
struct Interrupted {
    number: c_long,
    /// The address at which the thread makes it again, and the register that the answer has
    /// overwritten.
    start: usize,
    register: i64,
}

/// True if a thread is where it was when the kernel told its call.
fn is_there(thread: &Stopped, call: &WaitedCall, behind: usize) -> bool {
    (call.stack, call.behind) == (thread.stack, behind)
}

/// The answer overwrites the number of the call.
#[cfg(target_arch = "x86_64")]
mod processor {
    use super::*;

    /// Bytes of a `syscall`.
    const SYSCALL: usize = 2;

    /// The call that was answered `EINTR`. Since 2.41 the C library makes all calls that may wait
    /// by one `syscall`. `waited` has the call's number from the kernel. It is the same call if the
    /// stack, the address and all arguments are the same.
    pub fn interrupted(thread: &Stopped, waited: Option<WaitedCall>) -> Option<Interrupted> {
        let known = Patcher::call_before(thread.instruction);
        let is_same = |call: &WaitedCall| {
            is_there(thread, call, thread.instruction) && call.arguments == thread.arguments
        };
        let told = waited.filter(is_same).map(|call| (call.behind - SYSCALL, call.number));
        let (start, number) = known.map(|(start, number)| (start, number.into())).or(told)?;
        Some(Interrupted { number, start, register: number })
    }

    /// The end and the number of the call that the thread begins again.
    pub fn repeated(thread: &Stopped, _: Option<WaitedCall>) -> Option<(usize, c_long)> {
        let is_repeated = thread.behind == thread.instruction.wrapping_add(SYSCALL);
        is_repeated.then_some((thread.behind, thread.result))
    }
}

/// The answer overwrites the first argument of the call.
#[cfg(target_arch = "aarch64")]
mod processor {
    use super::*;

    /// Bytes of a `svc`.
    const SVC: usize = 4;

    /// The call that was answered `EINTR`: it is the one that the kernel told, if all that is left
    /// of it is the same.
    pub fn interrupted(thread: &Stopped, waited: Option<WaitedCall>) -> Option<Interrupted> {
        let is_same = |call: &WaitedCall| {
            is_there(thread, call, thread.instruction)
                && thread.number == Some(call.number)
                && call.arguments[1..] == thread.arguments[1..]
        };
        let call = waited.filter(is_same)?;
        let start = call.behind - SVC;
        // A replaced call is treated again.
        let start = Patcher::site_of_bare(start).unwrap_or(start);
        Some(Interrupted { number: call.number, start, register: call.arguments[0] as i64 })
    }

    /// The end and the number of the call that the thread begins again.
    pub fn repeated(thread: &Stopped, waited: Option<WaitedCall>) -> Option<(usize, c_long)> {
        let is_same = |call: &WaitedCall| {
            is_there(thread, call, thread.instruction + SVC)
                && thread.number == Some(call.number)
                && call.arguments == thread.arguments
        };
        waited.filter(is_same).map(|call| (call.behind, call.number))
    }
}

/// The flags of the handler of the first signal that waits for this thread and has one; `None` if
/// none has.
fn waiting(blocked: u64) -> Option<u64> {
    let mut set = 0u64;
    // SAFETY: the kernel writes the eight bytes of a set.
    unsafe { raw(libc::SYS_rt_sigpending as u64, [&raw mut set as u64, 8, 0, 0, 0, 0]) };
    let set = set & !blocked & !never_blocked();
    (1..=64u64).filter(|signal| set & 1 << (signal - 1) != 0).find_map(|signal| {
        let mut action = KernelAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
        // SAFETY: without a new action, the kernel writes the present one to `action`, which has
        // that type.
        unsafe {
            let arguments = [signal, 0, &raw mut action as u64, 8, 0, 0];
            raw(libc::SYS_rt_sigaction as u64, arguments);
        }
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&(action.handler as usize));
        is_handled.then_some(action.flags)
    })
}

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
use uzswap_calls::{Patcher, raw};
use uzswap_sys::fault_signals::Stopped;

/// Bytes of a `syscall`.
const SYSCALL: usize = 2;

/// Calls that answer `EINTR` where a handler has no SA_RESTART. Other restarted calls never wait
/// (`fork`), or their callers check again anyway (`futex`).
const ENDED: [c_long; 26] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_open,
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
        let call = interrupted(thread, waited).filter(|(_, number)| *number != libc::SYS_close);
        if let Some((start, number)) = call.filter(|_| waiting(thread.blocked).is_none()) {
            (thread.instruction, thread.result) = (start, number);
        }
    } else if thread.behind == thread.instruction.wrapping_add(SYSCALL)
        && ENDED.contains(&thread.result)
        && waiting(thread.blocked).is_some_and(|flags| flags & libc::SA_RESTART as u64 == 0)
    {
        (thread.instruction, thread.result) = (thread.behind, EINTR);
    }
}

/// The start and the number of the call that was answered `EINTR`. Since 2.41 the C library makes
/// all calls that may wait by one `syscall`. The answer has overwritten the call's number, which
/// `waited` has from the kernel. It is the same call if the stack, the address and all arguments
/// are the same.
fn interrupted(thread: &Stopped, waited: Option<WaitedCall>) -> Option<(usize, i64)> {
    let known = Patcher::call_before(thread.instruction);
    let is_same = |call: &WaitedCall| {
        (call.stack, call.behind) == (thread.stack, thread.instruction)
            && call.arguments == thread.arguments
    };
    let told = waited.filter(is_same).map(|call| (call.behind - SYSCALL, call.number));
    known.map(|(start, number)| (start, i64::from(number))).or(told)
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

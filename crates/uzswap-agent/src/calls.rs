//! The treatment of each system call, as its row says ([`uzswap_calls::table`]). Calls that move
//! data are in `transfer`, others with memory in their arguments in `buffers`. Calls that change
//! maps are in `layout`; those about processes, files and signals in `processes`, `masks` and
//! `stacks`.

use crate::buffers::{pinned, touched};
use crate::pins::{moves_nothing_by_error, refuse, refuse_visibly};
use crate::{
    AGENT, Agent, advice, descriptors, devices, execute, layout, limits, masks, processes,
};
use crate::{robust, seccomp, sharing, splice, stacks, stage, thread, transfer, visits, written};
use libc::c_long;
use uzswap_calls::table::{self, Buffer, Treatment};
use uzswap_calls::{Call, CallFrame, Outcome, older};
use uzswap_region::is_pager_thread;
use uzswap_sys::fault_signals;

/// True if the agent looks at a call even in a program that is left alone. Our handlers stay in
/// such a program, and a replaced instruction raises SIGILL, which no thread may block. A thread
/// without a signal stack of ours no longer gets one. Under a filter of the program's, the kernel
/// uses the program's signal stack.
fn is_kept(number: c_long) -> bool {
    match number {
        libc::SYS_rt_sigaction | libc::SYS_rt_sigprocmask | libc::SYS_pselect6 => true,
        libc::SYS_clone3 => true,
        libc::SYS_sigaltstack => stacks::ours().is_some() && !stage::is_confined(),
        // A filter applies to our remaining calls, too.
        libc::SYS_prctl | libc::SYS_seccomp => !stage::is_confined(),
        _ => masks::argument(number).is_some(),
    }
}

/// The C library's list lacks this newer call.
const MSEAL: c_long = 462;

/// Looks at a call: its number decides.
pub fn on_call(call: &mut Call) -> Outcome {
    let is_left = stage::is_left();
    if is_left && !is_kept(call.number as c_long) {
        return Outcome::Bare;
    }
    let serves_fault = fault_signals::is_on_own_stack();
    let is_ours = crate::is_inside() || is_pager_thread();
    let agent = AGENT.get().filter(|_| !serves_fault && !is_ours);
    if agent.is_some() && !is_left {
        stacks::arm();
    }
    if call.number as c_long == libc::SYS_rt_sigprocmask {
        // This includes calls of our own code, because a replaced instruction may follow before the
        // signals are unblocked.
        return processes::mask(agent, call);
    }
    if serves_fault {
        // The thread holds pages and locks of ours, so it may wait for no other lock. The memory of
        // its call is not the program's.
        return Outcome::Bare;
    }
    let Some(agent) = AGENT.get() else { return Outcome::Bare };
    if is_ours {
        return in_our_code(agent, call);
    }
    if matches!(call.number as c_long, libc::SYS_execve | libc::SYS_execveat) {
        // A child of `vfork` shares its parent's thread variables, and never comes back from this
        // call. Otherwise the parent would seem to be in a call, on a stack that the child has
        // left.
        return treat(agent, call);
    }
    let frame = CallFrame::of(call);
    thread::end_calls_before(frame as usize);
    let before = std::mem::replace(&mut call.result, Call::NOT_MADE);
    if before == -i64::from(libc::EFAULT) && !moves_nothing_by_error(call) {
        // The fast path has already made the call.
        call.result = before;
        return Outcome::Done;
    }
    let before = thread::with(|thread| thread.call.replace(frame));
    let mut outcome = Outcome::Bare;
    stacks::for_call(|| outcome = treat(agent, call));
    thread::with(|thread| thread.call.set(before));
    outcome
}

/// Treats a call as its row says.
fn treat(agent: &Agent, call: &mut Call) -> Outcome {
    match table::treatment(call.number) {
        Treatment::Left | Treatment::Absent => Outcome::Bare,
        Treatment::Pinned(buffers) => pinned(agent, call, buffers),
        Treatment::Touched(arguments) => touched(agent, call, arguments),
        Treatment::Refused(error) => refuse_visibly(call, error),
        Treatment::Own(_) => own(agent, call),
    }
}

/// Treats a call that the C library makes for our code. (Our code's own calls are not replaced.) We
/// bring no page in for such a call, because the thread might wait for a lock that it holds itself.
/// Besides, an unused argument may be an address of the program's by chance. But when we start a
/// thread, the C library asks the program's allocator for memory, and the allocator may then map,
/// drop or trim memory of the program's. So we treat these calls. The thread does not hold the
/// layout's lock: no code under that lock starts a thread.
fn in_our_code(agent: &Agent, call: &mut Call) -> Outcome {
    match call.number as c_long {
        libc::SYS_mmap | libc::SYS_munmap | libc::SYS_mremap | libc::SYS_brk => own(agent, call),
        libc::SYS_mprotect | libc::SYS_madvise => own(agent, call),
        _ => Outcome::Bare,
    }
}

fn own(agent: &Agent, call: &mut Call) -> Outcome {
    match call.number as c_long {
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => {
            transfer::transfer(agent, call)
        }
        libc::SYS_vmsplice => splice::splice(agent, call),
        libc::SYS_mmap => layout::map(agent, call),
        libc::SYS_munmap => layout::unmap(agent, call),
        libc::SYS_brk => layout::grow_heap(agent, call),
        libc::SYS_mremap => layout::remap(agent, call),
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => {
            written::before_protect(agent, call);
            if stage::is_left() { Outcome::Bare } else { layout::protect(agent, call) }
        }
        libc::SYS_madvise => advice::advise(agent, call),
        libc::SYS_process_madvise => advise_process(agent, call),
        libc::SYS_process_vm_readv | libc::SYS_process_vm_writev => visits::on_call(agent, call),
        libc::SYS_mlock | libc::SYS_mlock2 => layout::lock_memory(agent, call),
        MSEAL => layout::seal(agent, call),
        libc::SYS_ioctl => devices::control(agent, call),
        libc::SYS_io_submit => devices::submit(agent, call),
        libc::SYS_mincore => layout::in_core(agent, call),
        libc::SYS_prctl => seccomp::control(agent, call),
        libc::SYS_seccomp => seccomp::seccomp(agent, call),
        libc::SYS_ptrace => seccomp::trace(agent, call),
        libc::SYS_shmat => layout::attach(agent, call),
        libc::SYS_set_tid_address => layout::leave_in(agent, call, 4),
        libc::SYS_set_robust_list => robust::set(agent, call),
        libc::SYS_exit => robust::end(agent, call.arguments[0]),
        libc::SYS_rseq => layout::leave_in(agent, call, call.arguments[1]),
        older::SYS_arch_prctl => sharing::set_block(agent, call),
        libc::SYS_sigaltstack => stacks::set(agent, call),
        libc::SYS_rt_sigaction => processes::action(agent, call),
        libc::SYS_clone => processes::clone(agent, call),
        // The C library makes this call only for shared memory, and falls back to `clone`.
        libc::SYS_clone3 => processes::clone3(agent, call),
        older::SYS_fork => processes::fork(agent, call),
        older::SYS_vfork | older::SYS_pause | libc::SYS_fallocate => Outcome::Bare,
        libc::SYS_getrlimit | libc::SYS_setrlimit | libc::SYS_prlimit64 => {
            limits::limit(agent, call)
        }
        libc::SYS_close => processes::close(call),
        libc::SYS_close_range => descriptors::on_close_range(call),
        older::SYS_dup2 | libc::SYS_dup3 => processes::duplicate(call),
        libc::SYS_execve | libc::SYS_execveat => execute::execute(agent, call),
        libc::SYS_exit_group => {
            // A child of `vfork` that ends leaves the segments to its parent.
            if !fault_signals::is_other_process() {
                agent.pager.leave_store();
            }
            Outcome::Bare
        }
        libc::SYS_unshare | libc::SYS_setns => descriptors::on_unshare(call),
        libc::SYS_pselect6 => masks::select(agent, call),
        number => match masks::argument(number) {
            Some(at) => masks::without_ours(agent, call, at),
            None => crate::die(&[&format!("a bug of uzswap: no code does system call {number}")]),
        },
    }
}

/// `process_madvise`, perhaps of this process's own memory. Advice that is not for the memory of
/// any process gets the answer of kernels before 6.13. Programs then use `madvise`.
pub fn advise_process(agent: &Agent, call: &mut Call) -> Outcome {
    if !advice::FOR_ANY_PROCESS.contains(&(call.arguments[3] as i32)) {
        return refuse(call, libc::EINVAL);
    }
    pinned(agent, call, &[Buffer::Vector(1, 2)])
}

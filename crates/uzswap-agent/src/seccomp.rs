//! Checks if pages can still come in when a program restricts its system calls (seccomp).
//!
//! A filter applies to our calls, too, and we serve a fault by calls that the program never makes.
//! So the agent runs each filter over our calls before the kernel gets the filter. If the filter
//! forbids one of our calls, the agent first brings all memory in, and from then on leaves the
//! program alone.
//!
//! A program that has itself traced is left alone, too. The program's tracer sees the signal of a
//! fault first, and may keep that signal.

use crate::buffers::touched;
use crate::layout::{self, Layout};
use crate::pins::{Pins, peek, refuse};
use crate::{Agent, alone, handlers, limits, stacks, stage, withheld};
use std::sync::atomic::Ordering::Relaxed;
use uzswap_calls::filter::{self, Instruction};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::fault_signals;
use uzswap_tree::front::FILTERED;

const SET_MODE_STRICT: u64 = 0;
const SET_MODE_FILTER: u64 = 1;
/// The filter is for all threads, ours among them.
const FOR_ALL: u64 = 1;
/// `PR_SET_MDWE`: from then on no memory can become executable.
const SET_MDWE: i32 = 65;
/// `PR_SET_SYSCALL_USER_DISPATCH`: a thread's calls from outside of a range become signals.
const SET_DISPATCH: i32 = 59;
/// The kernel's maximum.
const INSTRUCTIONS_MAX: usize = 4096;

/// The kernel's `sock_fprog`.
#[derive(Clone, Copy)]
#[repr(C)]
struct FilterProgram {
    instructions: u16,
    rest: [u16; 3],
    first: u64,
}

pub fn seccomp(agent: &Agent, call: &mut Call) -> Outcome {
    let [operation, flags, program, ..] = call.arguments;
    match operation {
        // The kernel refuses other arguments. Programs pass such arguments to test if the call
        // exists.
        SET_MODE_STRICT if flags == 0 && program == 0 => leave(agent, STRICT),
        SET_MODE_FILTER => look(agent, program, flags & FOR_ALL != 0),
        _ => {}
    }
    if stage::is_left() {
        return Outcome::Bare;
    }
    touched(agent, call, &[2])
}

pub fn control(agent: &Agent, call: &mut Call) -> Outcome {
    let [operation, mode, program, ..] = call.arguments;
    if operation as i32 == libc::PR_SET_SECCOMP {
        match mode as u32 {
            libc::SECCOMP_MODE_STRICT => leave(agent, STRICT),
            libc::SECCOMP_MODE_FILTER => look(agent, program, false),
            _ => {}
        }
    }
    if operation as i32 == SET_MDWE && !stage::is_left() {
        permit_execution();
    }
    if operation as i32 == SET_DISPATCH && mode != 0 {
        // The answer of kernels before 5.11. Our calls would become signals. So would the return of
        // the handler of a replaced instruction, which would then end the process.
        return refuse(call, libc::EINVAL);
    }
    if stage::is_left() {
        return Outcome::Bare;
    }
    touched(agent, call, &[1, 2, 3, 4])
}

pub fn trace(agent: &Agent, call: &mut Call) -> Outcome {
    const TRACE_ME: u64 = 0;
    // A child that borrows its parent's memory (`vfork`) soon becomes another program.
    if call.arguments[0] == TRACE_ME && !fault_signals::is_other_process() {
        leave(agent, TRACED);
        let _inside = crate::inside();
        layout::lock().iter_mut().for_each(Layout::end_traps);
    }
    if stage::is_left() {
        return Outcome::Bare;
    }
    touched(agent, call, &[2, 3])
}

const TRACED: &str = "it has itself traced (PTRACE_TRACEME), and the tracer may keep our signals";
const STRICT: &str = "it forbids itself all calls but four (seccomp)";
const FILTER: &str = "it forbids itself a call that brings pages in (seccomp)";

/// Gives all memory back to the program, ends our threads, and from then on looks at few of the
/// program's calls.
pub fn leave(agent: &Agent, reason: &str) {
    // True in a child whose pages cannot be watched: it has no thread of ours, and all memory is
    // in.
    let was_left = stage::is_left();
    alone::end_watching();
    let _inside = crate::inside();
    if !was_left {
        // The threads give memory back as they end, and take the layout's lock for this. So they
        // end before we take it.
        agent.pager.stop_threads();
    }
    let _layout = layout::lock();
    if stage::is_confined() {
        // Another thread was faster.
        return;
    }
    if !was_left {
        agent.pager.give_all_back();
    }
    withheld::give_all_back();
    limits::tell_kernel();
    stage::confine();
    // Otherwise our handler would make calls that the filter forbids.
    fault_signals::give_back();
    handlers::give_back();
    stacks::give_back();
    if !was_left {
        crate::leave_alone(reason);
    }
}

/// Makes all withheld memory executable, because the kernel will deny that later.
fn permit_execution() {
    let _inside = crate::inside();
    let _layout = layout::lock();
    withheld::end();
}

/// Leaves the program alone if a filter forbids a call that is needed here.
fn look(agent: &Agent, program: u64, is_for_all: bool) {
    let mut pins = Pins::new(agent);
    pins.pin(program, size_of::<FilterProgram>() as u64);
    let Some(program) = peek::<FilterProgram>(program) else { return };
    let count = usize::from(program.instructions).min(INSTRUCTIONS_MAX);
    let bytes = count * size_of::<Instruction>();
    pins.pin(program.first, bytes as u64);
    let _inside = crate::inside();
    let at = |number: usize| program.first.wrapping_add((number * size_of::<Instruction>()) as u64);
    let filter: Vec<Instruction> = (0..count).map_while(|number| peek(at(number))).collect();
    let instruction = raw as *const () as u64;
    let by_threads = is_for_all.then(of_threads).into_iter().flatten();
    let mut needed = needed(agent).into_iter().chain(by_threads);
    let allows = |call: Call| filter::allows(&filter, &call, instruction);
    let (is_enough, permits) = (needed.all(allows), allows(execution()));
    drop((needed, pins, _inside));
    if is_enough && !permits && !stage::is_left() {
        permit_execution();
    }
    match (is_enough, crate::front()) {
        (false, _) => leave(agent, FILTER),
        (true, Some(front)) => _ = front.waits.fetch_and(!FILTERED, Relaxed),
        _ => {}
    }
}

fn call(number: libc::c_long, arguments: [u64; 6]) -> Call {
    Call { number: number as u64, arguments, result: 0 }
}

/// The call that makes written memory executable when it is first executed.
fn execution() -> Call {
    let access = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
    call(libc::SYS_mprotect, [1 << 20, 4096, access, 0, 0, 0])
}

/// The calls by which a thread brings a page in, or takes one out, or begins and ends.
fn needed(agent: &Agent) -> Vec<Call> {
    const COPY: u64 = 0xc028_aa03;
    const ZEROS: u64 = 0xc020_aa04;
    const MOVE: u64 = 0xc028_aa05;
    const REGISTER: u64 = 0xc020_aa00;
    let somewhere = (&raw const *agent).addr() as u64;
    let private = |operation: i32| (operation | libc::FUTEX_PRIVATE_FLAG) as u64;
    let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let (page, anonymous) = (4096, (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64);
    let mut all = vec![
        call(libc::SYS_rt_sigreturn, [0; 6]),
        call(libc::SYS_sigaltstack, [somewhere, 0, 0, 0, 0, 0]),
        call(libc::SYS_rt_sigprocmask, [2, somewhere, somewhere, 8, 0, 0]),
        call(libc::SYS_futex, [somewhere, private(libc::FUTEX_WAIT), 0, 0, 0, 0]),
        call(libc::SYS_futex, [somewhere, private(libc::FUTEX_WAKE), 1, 0, 0, 0]),
        call(libc::SYS_madvise, [somewhere, page, libc::MADV_DONTNEED as u64, 0, 0, 0]),
        call(libc::SYS_mprotect, [somewhere, page, access, 0, 0, 0]),
        call(libc::SYS_mmap, [0, page, access, anonymous, u64::MAX, 0]),
        call(libc::SYS_munmap, [somewhere, page, 0, 0, 0, 0]),
        call(libc::SYS_sched_yield, [0; 6]),
        call(libc::SYS_getpid, [0; 6]),
        call(libc::SYS_gettid, [0; 6]),
        call(libc::SYS_process_vm_readv, [0, somewhere, 1, somewhere, 1, 0]),
    ];
    for file in agent.pager.descriptors() {
        let file = file as u64;
        all.push(call(libc::SYS_pread64, [file, somewhere, 8, 0, 0, 0]));
        all.push(call(libc::SYS_pwrite64, [file, somewhere, page, 0, 0, 0]));
        let requests = if crate::mode() == uzswap_region::Mode::InThread {
            &[COPY, ZEROS, MOVE, REGISTER][..]
        } else {
            &[]
        };
        let ask = |request: &u64| call(libc::SYS_ioctl, [file, *request, somewhere, 0, 0, 0]);
        all.extend(requests.iter().map(ask));
    }
    for socket in agent.pager.sockets() {
        let no_signal = libc::MSG_NOSIGNAL as u64;
        all.push(call(libc::SYS_sendto, [socket as u64, somewhere, 64, no_signal, 0, 0]));
        all.push(call(libc::SYS_recvfrom, [socket as u64, somewhere, page, 0, 0, 0]));
    }
    all
}

/// The further calls that our threads make.
fn of_threads() -> Vec<Call> {
    let directory = libc::AT_FDCWD as u64;
    vec![
        call(libc::SYS_openat, [directory, 0, (libc::O_RDONLY | libc::O_CLOEXEC) as u64, 0, 0, 0]),
        call(libc::SYS_read, [3, 0, 1024, 0, 0, 0]),
        call(libc::SYS_close, [3, 0, 0, 0, 0, 0]),
        call(libc::SYS_clock_nanosleep, [1, 0, 0, 0, 0, 0]),
        call(libc::SYS_io_uring_enter, [3, 1, 1, 1, 0, 8]),
        call(libc::SYS_write, [2, 0, 100, 0, 0, 0]),
        call(libc::SYS_exit, [0; 6]),
    ]
}

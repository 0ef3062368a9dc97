//! The treatment of each system call, as its row says ([`uzswap_calls::table`]). Calls that move
//! data or refer to it are here. Calls that change maps are in `layout`; those about processes,
//! files and signals in `processes`, `masks` and `stacks`.

use crate::whole;
use crate::{
    AGENT, Agent, alone, devices, layout, masks, processes, seccomp, stacks, stage, thread,
};
use libc::c_long;
use uzswap_calls::table::{self, Buffer, Treatment};
use uzswap_calls::{Call, Frame, Outcome, raw};
use uzswap_region::is_pager_thread;
use uzswap_sys::bus;
use uzswap_sys::map::PAGE_BYTES;

/// The most that is held for one call: a length may be anything, the kernel may refuse it, and held
/// memory takes from the budget. `read` and `write` go on with the rest; others are cut short
/// there, if it is absent.
pub const AT_ONCE: u64 = 4 << 20;
/// The bytes that are held of memory whose length the arguments do not tell: the longest path.
const UNTOLD: u64 = 4096;
/// How often a call that answers `EFAULT` is made again, once all memory is adopted.
const TRIES: usize = 8;
/// Until then: how long to wait before each further try. A page that is just being adopted cannot
/// be held yet.
const PAUSE: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };

/// True if a call of a number is looked at.
pub fn wants(number: u32) -> bool {
    !matches!(table::treatment(number.into()), Treatment::Left | Treatment::Absent)
}

/// Calls that are looked at in a program that is left alone, too: our handlers stay.
const KEPT: [c_long; 2] = [libc::SYS_rt_sigaction, libc::SYS_sigaltstack];

/// Looks at a call: its number decides.
pub fn on_call(call: &mut Call) -> Outcome {
    if stage::is_left() && !KEPT.contains(&(call.number as c_long)) {
        return Outcome::Bare;
    }
    // A thread that serves a fault has pages and locks of ours: it may wait for no other lock, and
    // its memory is not the program's.
    let is_inside = crate::is_inside() || bus::is_on_own_stack();
    let is_pagers = is_pager_thread();
    let agent = AGENT.get().filter(|_| !is_inside && !is_pagers);
    if agent.is_some() {
        stacks::arm();
    }
    if call.number as c_long == libc::SYS_rt_sigprocmask {
        // Even if our code makes it: the next replaced instruction may come before the signals are
        // back.
        return processes::mask(agent, call);
    }
    if is_inside {
        return Outcome::Bare;
    }
    let Some(agent) = AGENT.get() else { return Outcome::Bare };
    if is_pagers {
        return on_pagers_call(agent, call);
    }
    if matches!(call.number as c_long, libc::SYS_execve | libc::SYS_execveat) {
        // A child of `vfork` shares its parent's thread variables, and never comes back from this
        // call. The parent would seem to be in a call on a stack that is gone.
        return decide(agent, call);
    }
    let frame = Frame::of(call);
    thread::end_calls_before(frame as usize);
    let before = thread::with(|thread| thread.call.replace(frame));
    let mut outcome = Outcome::Bare;
    stacks::for_call(|| outcome = decide(agent, call));
    thread::with(|thread| thread.call.set(before));
    outcome
}

/// Treats a call as its row says.
fn decide(agent: &Agent, call: &mut Call) -> Outcome {
    match table::treatment(call.number) {
        Treatment::Left | Treatment::Absent => Outcome::Bare,
        Treatment::Held(buffers) => held(agent, call, buffers),
        Treatment::Touched(arguments) => touched(agent, call, arguments),
        Treatment::Refused(error) => refuse(call, error),
        Treatment::Own(_) => own(agent, call),
    }
}

/// A call of a thread that takes pages out. To bring a page in it might have to wait for a lock of
/// its own. An unused argument of its call may be an address of the program's by chance. But the C
/// library may have it trim the heap, which is the program's.
fn on_pagers_call(agent: &Agent, call: &mut Call) -> Outcome {
    match call.number as c_long {
        libc::SYS_mmap | libc::SYS_munmap | libc::SYS_mremap | libc::SYS_brk => own(agent, call),
        libc::SYS_mprotect | libc::SYS_madvise => own(agent, call),
        _ => Outcome::Bare,
    }
}

/// Calls that have something of their own.
fn own(agent: &Agent, call: &mut Call) -> Outcome {
    match call.number as c_long {
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => {
            transfer(agent, call)
        }
        libc::SYS_vmsplice => splice(agent, call),
        libc::SYS_mmap => layout::map(agent, call),
        libc::SYS_munmap => layout::unmap(agent, call),
        libc::SYS_brk => layout::grow_heap(agent, call),
        libc::SYS_mremap => layout::remap(agent, call),
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => layout::protect(agent, call),
        libc::SYS_madvise => layout::advise(agent, call),
        libc::SYS_process_madvise => layout::advise_process(agent, call),
        libc::SYS_mlock | libc::SYS_mlock2 => layout::lock_memory(agent, call),
        MSEAL => layout::seal(agent, call),
        libc::SYS_ioctl => devices::control(agent, call),
        libc::SYS_io_submit => devices::submit(agent, call),
        libc::SYS_mincore => layout::in_core(agent, call),
        libc::SYS_prctl => seccomp::control(agent, call),
        libc::SYS_seccomp => seccomp::seccomp(agent, call),
        libc::SYS_shmat => layout::attach(call),
        libc::SYS_set_tid_address => layout::leave_in(agent, call, 4),
        libc::SYS_set_robust_list | libc::SYS_rseq => {
            layout::leave_in(agent, call, call.arguments[1])
        }
        libc::SYS_sigaltstack => stacks::set(agent, call),
        libc::SYS_rt_sigaction => processes::action(agent, call),
        libc::SYS_clone => processes::clone(agent, call),
        // Only ever with memory in common, by the C library; it falls back to `clone`.
        libc::SYS_clone3 => processes::clone3(agent, call),
        libc::SYS_fork => processes::fork(agent, call),
        libc::SYS_vfork | libc::SYS_pause | libc::SYS_fallocate => Outcome::Bare,
        libc::SYS_close => processes::close(call),
        libc::SYS_close_range => processes::close_range(call),
        libc::SYS_dup2 | libc::SYS_dup3 => processes::duplicate(call),
        libc::SYS_execve | libc::SYS_execveat => processes::execute(agent, call),
        libc::SYS_exit_group => {
            // A child of `vfork` that ends leaves the segments to its parent.
            if !bus::is_other_process() {
                agent.pager.leave_store();
            }
            Outcome::Bare
        }
        libc::SYS_unshare | libc::SYS_setns => alone::on_call(call),
        libc::SYS_pselect6 => masks::select(agent, call),
        number => match masks::argument(number) {
            Some(at) => masks::without_ours(agent, call, at),
            None => crate::die(&[&format!("system call {number} has a row, and nobody does it")]),
        },
    }
}

pub fn refuse(call: &mut Call, error: i32) -> Outcome {
    call.result = -i64::from(error);
    Outcome::Done
}

/// Ranges of memory that are held.
pub struct Holds<'a> {
    agent: &'a Agent,
    /// Bytes that may be held yet.
    left: u64,
    held: thread::Use,
}

impl<'a> Holds<'a> {
    /// Nothing yet.
    pub fn new(agent: &'a Agent) -> Self {
        Self { agent, left: AT_ONCE, held: thread::Use::begin() }
    }

    /// The same, of at most so many bytes.
    pub fn up_to(agent: &'a Agent, bytes: u64) -> Self {
        Self { left: bytes, ..Self::new(agent) }
    }

    /// Holds the adopted part of a range. Returns true if there is one.
    pub fn hold(&mut self, at: u64, bytes: u64) -> bool {
        let mut rest = at as usize..(at as usize).saturating_add(bytes.min(self.left) as usize);
        if !is_address(at) {
            return false;
        }
        let mut any = false;
        while let Some(held) = self.agent.pager.hold(rest.clone()) {
            any = true;
            rest.start = held.end;
            self.left = self.left.saturating_sub(held.len() as u64);
            self.held.note(held);
        }
        any
    }
}

/// `read`, `write` and those at a place: a long one in parts, as far as they are complete.
fn transfer(agent: &Agent, call: &mut Call) -> Outcome {
    let [file, at, bytes, offset, ..] = call.arguments;
    let is_at_place = matches!(call.number as c_long, libc::SYS_pread64 | libc::SYS_pwrite64);
    let is_write = matches!(call.number as c_long, libc::SYS_write | libc::SYS_pwrite64);
    layout::await_complete();
    if is_write && bytes > AT_ONCE && whole::write(agent, call) {
        return Outcome::Done;
    }
    let mut done = 0;
    loop {
        let part = (bytes - done).min(AT_ONCE);
        let mut holds = Holds::new(agent);
        holds.hold(at + done, part);
        let place = if is_at_place { offset + done } else { offset };
        let arguments = [file, at + done, part, place, call.arguments[4], call.arguments[5]];
        // SAFETY: a part of the program's request.
        let result = unsafe { raw(call.number, arguments) };
        drop(holds);
        if result < 0 {
            call.result = if done > 0 { done as i64 } else { result };
            return Outcome::Done;
        }
        done += result as u64;
        let is_whole = result as u64 == part && done < bytes;
        // More of a pipe or a terminal may never come.
        if !is_whole || !is_write && !is_type(file as i32, libc::S_IFREG) {
            call.result = done as i64;
            if call.number as c_long == libc::SYS_pread64 {
                layout::read_own_pagemap(agent, call);
            }
            return Outcome::Done;
        }
    }
}

pub fn is_type(file: i32, wanted: libc::mode_t) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [file as u64, status.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the status to where it is told; zeros are one.
    unsafe {
        raw(libc::SYS_fstat as u64, arguments) == 0
            && status.assume_init().st_mode & libc::S_IFMT == wanted
    }
}

/// `vmsplice`: the kernel would go on using the pages after the call, when they may leave. So the
/// data are copied, as they are where a pipe cannot take pages.
fn splice(agent: &Agent, call: &mut Call) -> Outcome {
    let [file, vector, count, flags, ..] = call.arguments;
    const NO_WAIT: u64 = 2;
    let is_reader = file_flags(file) & libc::O_ACCMODE as i64 == libc::O_RDONLY as i64;
    let number = match (is_reader, flags & NO_WAIT != 0) {
        _ if !is_type(file as i32, libc::S_IFIFO) => return refuse(call, libc::EBADF),
        (true, false) => libc::SYS_readv,
        (false, false) => libc::SYS_writev,
        (true, true) => libc::SYS_preadv2,
        (false, true) => libc::SYS_pwritev2,
    };
    let mut holds = Holds::new(agent);
    hold_vector(&mut holds, vector, count);
    // No place in the file, which for the plain two is no argument.
    let arguments = [file, vector, count, u64::MAX, u64::MAX, libc::RWF_NOWAIT as u64];
    let mut copied = Call { number: number as u64, arguments, result: 0 };
    make_until_it_sees(agent, &mut copied, &[1]);
    call.result = copied.result;
    Outcome::Done
}

fn file_flags(file: u64) -> i64 {
    // SAFETY: asks only.
    unsafe { raw(libc::SYS_fcntl as u64, [file, libc::F_GETFL as u64, 0, 0, 0, 0]) }
}

pub fn held(agent: &Agent, call: &mut Call, buffers: &[Buffer]) -> Outcome {
    layout::await_complete();
    let mut holds = Holds::new(agent);
    for buffer in buffers {
        hold_buffer(&mut holds, call, *buffer);
    }
    if holds.left == 0 {
        // There is more than may be held.
        drop(holds);
        if whole::write(agent, call) {
            return Outcome::Done;
        }
        return held_in_part(agent, call, buffers);
    }
    make(agent, call);
    Outcome::Done
}

/// The same for longer buffers, as far as they may be held.
fn held_in_part(agent: &Agent, call: &mut Call, buffers: &[Buffer]) -> Outcome {
    let mut holds = Holds::new(agent);
    for buffer in buffers {
        hold_buffer(&mut holds, call, *buffer);
    }
    make(agent, call);
    Outcome::Done
}

fn hold_buffer(holds: &mut Holds<'_>, call: &Call, buffer: Buffer) {
    let argument = |at: usize| call.arguments[at];
    let (at, bytes) = match buffer {
        Buffer::Bytes(at, bytes) => (at, argument(bytes)),
        Buffer::Each(at, count, bytes) => (at, argument(count).saturating_mul(bytes)),
        Buffer::Pages(at, bytes) => (at, argument(bytes).div_ceil(PAGE_BYTES as u64)),
        Buffer::Typed(at, bytes) => (at, argument(bytes).saturating_add(8)),
        Buffer::Fixed(at, bytes) => (at, bytes),
        Buffer::Text(at) => (at, UNTOLD),
        Buffer::Vector(at, count) => return hold_vector(holds, argument(at), argument(count)),
        Buffer::Message(at) => return hold_message(holds, argument(at)),
        Buffer::Messages(at, count) => {
            for number in 0..argument(count).min(1024) {
                let bytes = size_of::<libc::mmsghdr>() as u64;
                let message = argument(at).wrapping_add(number * bytes);
                hold_message(holds, message);
                holds.hold(message, bytes);
            }
            return;
        }
    };
    holds.hold(argument(at), bytes);
}

/// Reads memory of the program's, which may be no memory at all.
pub fn peek<T: Copy>(at: u64) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: as many bytes as the value has, all of them zeros now.
    let bytes =
        unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
    let is_read = peek_bytes(at, bytes) == size_of::<T>();
    // SAFETY: all of it was written; the types it is asked for are of numbers and pointers.
    is_read.then(|| unsafe { value.assume_init() })
}

/// The same of bytes; how many there are up to the first that cannot be read.
pub fn peek_bytes(at: u64, bytes: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes.len() };
    // SAFETY: takes nothing.
    let me = unsafe { raw(libc::SYS_getpid as u64, [0; 6]) } as u64;
    let arguments = [me, &raw const local as u64, 1, &raw const remote as u64, 1, 0];
    // SAFETY: the kernel writes the bytes, or says that it cannot read those at the address.
    unsafe { raw(libc::SYS_process_vm_readv as u64, arguments) }.max(0) as usize
}

/// Writes memory of the program's, which may be no memory at all; whether all was written.
pub fn poke<T: Copy>(at: u64, value: &T) -> bool {
    let bytes = size_of::<T>();
    let local =
        libc::iovec { iov_base: std::ptr::from_ref(value).cast_mut().cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes };
    // SAFETY: takes nothing.
    let me = unsafe { raw(libc::SYS_getpid as u64, [0; 6]) } as u64;
    let arguments = [me, &raw const local as u64, 1, &raw const remote as u64, 1, 0];
    // SAFETY: where the program asked for it; the kernel says if it cannot write there.
    unsafe { raw(libc::SYS_process_vm_writev as u64, arguments) == bytes as i64 }
}

pub fn hold_vector(holds: &mut Holds<'_>, at: u64, count: u64) {
    let bytes = size_of::<libc::iovec>() as u64;
    holds.hold(at, count.min(1024) * bytes);
    for number in 0..count.min(1024) {
        if let Some(part) = peek::<libc::iovec>(at.wrapping_add(number * bytes)) {
            holds.hold(part.iov_base as u64, part.iov_len as u64);
        }
    }
}

fn hold_message(holds: &mut Holds<'_>, at: u64) {
    holds.hold(at, size_of::<libc::msghdr>() as u64);
    if let Some(message) = peek::<libc::msghdr>(at) {
        holds.hold(message.msg_name as u64, message.msg_namelen.into());
        holds.hold(message.msg_control as u64, message.msg_controllen as u64);
        hold_vector(holds, message.msg_iov as u64, message.msg_iovlen as u64);
    }
}

/// The memory that these arguments refer to is held: a path, a structure, a result. A call that has
/// done its work when it answers `EFAULT` (`accept`, `wait4`) cannot be repeated: so it waits until
/// its memory can be held.
pub fn touched(agent: &Agent, call: &mut Call, arguments: &[usize]) -> Outcome {
    let is_futex = call.number as c_long == libc::SYS_futex;
    let arguments = if is_futex { used_of_futex(call.arguments[1]) } else { arguments };
    let is_complete = stage::is_complete();
    if !is_complete && !is_wake(call) {
        layout::await_complete();
    }
    let mut holds = Holds::new(agent);
    let any = hold_touched(&mut holds, call, arguments);
    // The memory of these calls may refer to more memory; memory that is not adopted yet may be in
    // a moment.
    if !any && is_complete && !is_deep(call.number as c_long) {
        return Outcome::Bare;
    }
    make_until_it_sees(agent, call, arguments);
    Outcome::Done
}

/// True if threads wait for and wake each other by a call, which first reads one word.
fn is_wake(call: &Call) -> bool {
    call.number as c_long == libc::SYS_futex && used_of_futex(call.arguments[1]).len() < 3
}

/// The arguments of `futex` that an operation uses. Other arguments have values by chance.
pub fn used_of_futex(operation: u64) -> &'static [usize] {
    const OTHER: i32 = libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME;
    match operation as i32 & !OTHER {
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => &[0],
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => &[0, 3],
        _ => &[0, 3, 4],
    }
}

/// Holds the memory that arguments refer to. Returns true if any is adopted.
pub fn hold_touched(holds: &mut Holds<'_>, call: &Call, arguments: &[usize]) -> bool {
    let mut any = false;
    for at in arguments {
        any |= holds.hold(call.arguments[*at], UNTOLD);
    }
    any
}

fn is_deep(number: c_long) -> bool {
    matches!(
        number,
        libc::SYS_ioctl
            | libc::SYS_futex_waitv
            | libc::SYS_prctl
            | libc::SYS_seccomp
            | libc::SYS_bpf
            | libc::SYS_keyctl
            | libc::SYS_ptrace
            | libc::SYS_fsconfig
            | SETXATTRAT
            | GETXATTRAT
    )
}

/// Newer than the C library's list.
const MSEAL: c_long = 462;
const SETXATTRAT: c_long = 463;
const GETXATTRAT: c_long = 464;

/// True if a program can have memory there.
fn is_address(at: u64) -> bool {
    (PAGE_BYTES as u64..1 << 47).contains(&at)
}

/// Makes a call, and again where it answers `EFAULT`.
pub fn make(agent: &Agent, call: &mut Call) {
    make_until_it_sees(agent, call, &[0, 1, 2, 3, 4, 5]);
}

/// Makes a call. Where it answers `EFAULT`, the memory that its arguments may refer to is brought
/// in, more each time, and it is made again.
fn make_until_it_sees(agent: &Agent, call: &mut Call, arguments: &[usize]) {
    let mut turn = 0;
    while turn < TRIES {
        let is_complete = stage::is_complete();
        // SAFETY: the call is the program's, made as it asked.
        call.result = unsafe { raw(call.number, call.arguments) };
        if call.result != -i64::from(libc::EFAULT) {
            break;
        }
        if is_complete {
            turn += 1;
        } else {
            let pause = PAUSE;
            // SAFETY: sleeps; a signal may end it early.
            unsafe { raw(libc::SYS_nanosleep as u64, [(&raw const pause) as u64, 0, 0, 0, 0, 0]) };
        }
        let mut holds = Holds::new(agent);
        let given = arguments.iter().map(|at| call.arguments[*at]);
        for at in given.filter(|at| is_address(*at)) {
            holds.hold(at, UNTOLD << turn);
            for near in 0..4 {
                let inner = peek::<u64>(at + near * 8).filter(|inner| is_address(*inner));
                if let Some(inner) = inner {
                    holds.hold(inner, UNTOLD << turn);
                }
            }
        }
    }
}

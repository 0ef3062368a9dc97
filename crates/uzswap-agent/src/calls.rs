//! What is done for each system call.
//!
//! | treatment | calls | what is done |
//! |---|---|---|
//! | left | those without memory of the program's | nothing: they are not even replaced |
//! | held | those that move data | their buffers are brought in and kept for the time of the call |
//! | own | those that change what is mapped; signals, processes, files | see each |
//! | touched | all others | what an argument refers to is held; at `EFAULT` it is made again |

use crate::{AGENT, Agent, inside, layout, processes};
use libc::c_long;
use std::ops::Range;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;

/// What is held for one call at most: a length may be anything, is the kernel's to refuse, and what
/// is held takes from the budget. `read` and `write` go on with the rest; others are cut short
/// there, if it is absent.
const AT_ONCE: u64 = 4 << 20;
/// What is held of memory whose length the arguments do not tell: a path's longest.
const UNTOLD: u64 = 4096;
/// How often a call that answers `EFAULT` is made again.
const TRIES: usize = 8;

/// Which memory a call is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Buffer {
    /// At argument 0, as many bytes as argument 1 says.
    Bytes(usize, usize),
    /// At argument 0, that many bytes each of argument 1.
    Each(usize, usize, u64),
    /// At argument 0, that many bytes.
    Fixed(usize, u64),
    /// At argument 0, as many `iovec` as argument 1 says, and what they refer to.
    Vector(usize, usize),
    /// At argument 0, a `msghdr`, and what it refers to.
    Message(usize),
    /// At argument 0, as many `mmsghdr` as argument 1 says.
    Messages(usize, usize),
}

use Buffer::{Bytes, Each, Fixed, Message, Messages, Vector};

/// Calls that move data, and their buffers.
const HELD: &[(c_long, &[Buffer])] = &[
    (libc::SYS_readv, &[Vector(1, 2)]),
    (libc::SYS_writev, &[Vector(1, 2)]),
    (libc::SYS_preadv, &[Vector(1, 2)]),
    (libc::SYS_pwritev, &[Vector(1, 2)]),
    (libc::SYS_preadv2, &[Vector(1, 2)]),
    (libc::SYS_pwritev2, &[Vector(1, 2)]),
    (libc::SYS_vmsplice, &[Vector(1, 2)]),
    (libc::SYS_process_vm_readv, &[Vector(1, 2)]),
    (libc::SYS_process_vm_writev, &[Vector(1, 2)]),
    (libc::SYS_sendto, &[Bytes(1, 2), Bytes(4, 5)]),
    (libc::SYS_recvfrom, &[Bytes(1, 2), Fixed(4, 128), Fixed(5, 4)]),
    (libc::SYS_sendmsg, &[Message(1)]),
    (libc::SYS_recvmsg, &[Message(1)]),
    (libc::SYS_sendmmsg, &[Messages(1, 2)]),
    (libc::SYS_recvmmsg, &[Messages(1, 2), Fixed(4, 16)]),
    (libc::SYS_getdents64, &[Bytes(1, 2)]),
    (libc::SYS_getrandom, &[Bytes(0, 1)]),
    (libc::SYS_getcwd, &[Bytes(0, 1)]),
    (libc::SYS_poll, &[Each(0, 1, 8)]),
    (libc::SYS_ppoll, &[Each(0, 1, 8), Fixed(2, 16), Fixed(3, 8)]),
    (libc::SYS_epoll_wait, &[Each(1, 2, 12)]),
    (libc::SYS_epoll_pwait, &[Each(1, 2, 12), Fixed(4, 8)]),
    (libc::SYS_epoll_pwait2, &[Each(1, 2, 12), Fixed(3, 16), Fixed(4, 8)]),
    (libc::SYS_mq_timedsend, &[Bytes(1, 2)]),
    (libc::SYS_mq_timedreceive, &[Bytes(1, 2), Fixed(3, 4)]),
    (libc::SYS_msgsnd, &[Bytes(1, 2)]),
    (libc::SYS_msgrcv, &[Bytes(1, 2)]),
    (libc::SYS_semop, &[Each(1, 2, 6)]),
    (libc::SYS_setxattr, &[Fixed(0, UNTOLD), Fixed(1, 256), Bytes(2, 3)]),
    (libc::SYS_getxattr, &[Fixed(0, UNTOLD), Fixed(1, 256), Bytes(2, 3)]),
    (libc::SYS_fsetxattr, &[Fixed(1, 256), Bytes(2, 3)]),
    (libc::SYS_fgetxattr, &[Fixed(1, 256), Bytes(2, 3)]),
    (libc::SYS_readlink, &[Fixed(0, UNTOLD), Bytes(1, 2)]),
    (libc::SYS_readlinkat, &[Fixed(1, UNTOLD), Bytes(2, 3)]),
    (libc::SYS_mincore, &[Fixed(2, 1 << 20)]),
];

/// Calls that are given no memory, or none that they look at before they end.
const LEFT: &[c_long] = &[
    libc::SYS_lseek,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_dup,
    libc::SYS_pause,
    libc::SYS_alarm,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_kill,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_umask,
    libc::SYS_getuid,
    libc::SYS_getgid,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_geteuid,
    libc::SYS_getegid,
    libc::SYS_setpgid,
    libc::SYS_getppid,
    libc::SYS_getpgrp,
    libc::SYS_setsid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_sync,
    libc::SYS_gettid,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_exit_group,
    libc::SYS_inotify_init1,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_timerfd_create,
    libc::SYS_syncfs,
    libc::SYS_membarrier,
    libc::SYS_pidfd_open,
    libc::SYS_shutdown,
    libc::SYS_listen,
    libc::SYS_socket,
    libc::SYS_flock,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_restart_syscall,
    libc::SYS_sched_setscheduler,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
];

/// How many arguments calls have that are common: what is in the other registers is none. Of all
/// others, six are looked at, which holds too much at worst.
const ARGUMENTS: &[(c_long, usize)] = &[
    (libc::SYS_open, 3),
    (libc::SYS_openat, 4),
    (libc::SYS_stat, 2),
    (libc::SYS_fstat, 2),
    (libc::SYS_lstat, 2),
    (libc::SYS_newfstatat, 4),
    (libc::SYS_statx, 5),
    (libc::SYS_access, 2),
    (libc::SYS_faccessat, 3),
    (libc::SYS_faccessat2, 4),
    (libc::SYS_ioctl, 3),
    (libc::SYS_fcntl, 3),
    (libc::SYS_nanosleep, 2),
    (libc::SYS_clock_nanosleep, 4),
    (libc::SYS_clock_gettime, 2),
    (libc::SYS_gettimeofday, 2),
    (libc::SYS_wait4, 4),
    (libc::SYS_pipe, 1),
    (libc::SYS_pipe2, 2),
    (libc::SYS_unlink, 1),
    (libc::SYS_unlinkat, 3),
    (libc::SYS_mkdir, 2),
    (libc::SYS_rename, 2),
    (libc::SYS_chdir, 1),
    (libc::SYS_uname, 1),
    (libc::SYS_getrusage, 2),
    (libc::SYS_prlimit64, 4),
    (libc::SYS_epoll_ctl, 4),
    (libc::SYS_accept4, 4),
    (libc::SYS_accept, 3),
    (libc::SYS_connect, 3),
    (libc::SYS_bind, 3),
    (libc::SYS_getsockopt, 5),
    (libc::SYS_setsockopt, 5),
    (libc::SYS_set_robust_list, 2),
    (libc::SYS_rseq, 4),
    (libc::SYS_getcpu, 2),
];

/// What is done for a call that has nothing of its own.
#[derive(Clone, Copy)]
enum Treatment {
    Left,
    Held(&'static [Buffer]),
    /// Of so many arguments.
    Touched(usize),
}

/// By number, so that no call searches the lists above.
static TREATMENTS: [Treatment; NUMBERS] = treatments();
/// More than the kernel has calls.
const NUMBERS: usize = 512;
/// Of what is in no list.
const ANY: Treatment = Treatment::Touched(6);

const fn treatments() -> [Treatment; NUMBERS] {
    let mut all = [ANY; NUMBERS];
    let mut at = 0;
    while at < ARGUMENTS.len() {
        all[ARGUMENTS[at].0 as usize] = Treatment::Touched(ARGUMENTS[at].1);
        at += 1;
    }
    at = 0;
    while at < HELD.len() {
        all[HELD[at].0 as usize] = Treatment::Held(HELD[at].1);
        at += 1;
    }
    at = 0;
    while at < LEFT.len() {
        all[LEFT[at] as usize] = Treatment::Left;
        at += 1;
    }
    all
}

fn treatment(number: u64) -> Treatment {
    TREATMENTS.get(number as usize).copied().unwrap_or(ANY)
}

/// Whether a call of a number is looked at.
pub fn wants(number: u32) -> bool {
    !matches!(treatment(number.into()), Treatment::Left)
}

/// Looks at a call: its number decides.
pub fn on_call(call: &mut Call) -> Outcome {
    // Whoever makes it: the next instruction that was replaced may come before the signals are
    // back.
    if call.number as c_long == libc::SYS_rt_sigprocmask {
        return processes::mask(call);
    }
    if crate::is_inside() {
        return Outcome::Bare;
    }
    let Some(agent) = AGENT.get() else { return Outcome::Bare };
    match call.number as c_long {
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => {
            transfer(agent, call)
        }
        libc::SYS_mmap => layout::map(agent, call),
        libc::SYS_munmap => layout::unmap(agent, call),
        libc::SYS_brk => layout::grow_heap(agent, call),
        libc::SYS_mremap => layout::remap(agent, call),
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => layout::protect(agent, call),
        libc::SYS_madvise => layout::advise(agent, call),
        libc::SYS_mlock | libc::SYS_mlock2 => layout::lock_memory(agent, call),
        libc::SYS_sigaltstack => layout::signal_stack(agent, call),
        // Its buffers would be written at any time.
        libc::SYS_mlockall => refuse(call, libc::ENOMEM),
        libc::SYS_io_uring_setup | libc::SYS_io_setup => refuse(call, libc::ENOSYS),
        libc::SYS_rt_sigaction => processes::action(call),
        libc::SYS_clone => processes::clone(agent, call),
        // Only ever with memory in common, by the C library; it falls back to `clone`.
        libc::SYS_clone3 => processes::clone3(call),
        libc::SYS_fork => processes::fork(agent, call),
        libc::SYS_vfork => Outcome::Bare,
        libc::SYS_close => processes::close(call),
        libc::SYS_close_range => processes::close_range(call),
        libc::SYS_dup2 | libc::SYS_dup3 => processes::duplicate(call),
        libc::SYS_execve | libc::SYS_execveat => processes::execute(agent, call),
        _ => match treatment(call.number) {
            Treatment::Left => Outcome::Bare,
            Treatment::Held(buffers) => held(agent, call, buffers),
            Treatment::Touched(count) => touched(agent, call, count),
        },
    }
}

pub fn refuse(call: &mut Call, error: i32) -> Outcome {
    call.result = -i64::from(error);
    Outcome::Done
}

/// Ranges of memory that are held.
struct Holds<'a> {
    agent: &'a Agent,
    /// Bytes that may be held yet.
    left: u64,
    few: [Range<usize>; 4],
    count: usize,
    many: Vec<Range<usize>>,
}

impl<'a> Holds<'a> {
    fn new(agent: &'a Agent) -> Self {
        Self { agent, left: AT_ONCE, few: [0..0, 0..0, 0..0, 0..0], count: 0, many: Vec::new() }
    }

    fn hold(&mut self, at: u64, bytes: u64) {
        let range = at as usize..(at as usize).saturating_add(bytes.min(self.left) as usize);
        if !is_address(at) || range.is_empty() || !self.agent.pager.hold(range.clone()) {
            return;
        }
        self.left -= range.len() as u64;
        if self.count < self.few.len() {
            self.few[self.count] = range;
            self.count += 1;
        } else {
            let _inside = inside();
            self.many.push(range);
        }
    }
}

impl Drop for Holds<'_> {
    fn drop(&mut self) {
        for range in &self.few[..self.count] {
            self.agent.pager.unhold(range.clone());
        }
        if !self.many.is_empty() {
            let _inside = inside();
            let many = std::mem::take(&mut self.many);
            many.into_iter().for_each(|range| self.agent.pager.unhold(range));
        }
    }
}

/// `read`, `write` and those at a place: a long one in parts, as far as they are complete.
fn transfer(agent: &Agent, call: &mut Call) -> Outcome {
    let [file, at, bytes, offset, ..] = call.arguments;
    let is_at_place = matches!(call.number as c_long, libc::SYS_pread64 | libc::SYS_pwrite64);
    let is_write = matches!(call.number as c_long, libc::SYS_write | libc::SYS_pwrite64);
    let mut done = 0;
    loop {
        let part = (bytes - done).min(AT_ONCE);
        let mut holds = Holds::new(agent);
        holds.hold(at + done, part);
        let place = if is_at_place { offset + done } else { offset };
        let arguments = [file, at + done, part, place, call.arguments[4], call.arguments[5]];
        // SAFETY: a part of what the program asked for.
        let result = unsafe { raw(call.number, arguments) };
        drop(holds);
        if result < 0 {
            call.result = if done > 0 { done as i64 } else { result };
            return Outcome::Done;
        }
        done += result as u64;
        let is_whole = result as u64 == part && done < bytes;
        // More of a pipe or a terminal may never come.
        if !is_whole || !is_write && !is_file(file as i32) {
            call.result = done as i64;
            return Outcome::Done;
        }
    }
}

fn is_file(file: i32) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [file as u64, status.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the status to where it is told; zeros are one.
    unsafe {
        raw(libc::SYS_fstat as u64, arguments) == 0
            && status.assume_init().st_mode & libc::S_IFMT == libc::S_IFREG
    }
}

fn held(agent: &Agent, call: &mut Call, buffers: &[Buffer]) -> Outcome {
    let mut holds = Holds::new(agent);
    for buffer in buffers {
        let argument = |at: usize| call.arguments[at];
        match *buffer {
            Bytes(at, bytes) => holds.hold(argument(at), argument(bytes)),
            Each(at, count, bytes) => {
                holds.hold(argument(at), argument(count).saturating_mul(bytes));
            }
            Fixed(at, bytes) => holds.hold(argument(at), bytes),
            Vector(at, count) => hold_vector(&mut holds, argument(at), argument(count)),
            Message(at) => hold_message(&mut holds, argument(at)),
            Messages(at, count) => {
                for number in 0..argument(count).min(1024) {
                    let bytes = size_of::<libc::mmsghdr>() as u64;
                    let message = argument(at).wrapping_add(number * bytes);
                    hold_message(&mut holds, message);
                    holds.hold(message, bytes);
                }
            }
        }
    }
    make_until_it_sees(agent, call)
}

/// Reads memory of the program's, which may be no memory at all.
fn peek<T: Copy>(at: u64) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    let local = libc::iovec { iov_base: value.as_mut_ptr().cast(), iov_len: size_of::<T>() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: size_of::<T>() };
    // SAFETY: takes nothing.
    let me = unsafe { raw(libc::SYS_getpid as u64, [0; 6]) } as u64;
    let arguments = [me, &raw const local as u64, 1, &raw const remote as u64, 1, 0];
    // SAFETY: the kernel writes the value, or says that it cannot read it.
    let read = unsafe { raw(libc::SYS_process_vm_readv as u64, arguments) };
    // SAFETY: all of it was written; the types it is asked for are of numbers and pointers.
    (read == size_of::<T>() as i64).then(|| unsafe { value.assume_init() })
}

fn hold_vector(holds: &mut Holds<'_>, at: u64, count: u64) {
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

/// Whatever an argument refers to is held: a path, a structure, a result.
fn touched(agent: &Agent, call: &mut Call, count: usize) -> Outcome {
    let mut holds = Holds::new(agent);
    let mut any = false;
    for at in call.arguments[..count].iter().copied() {
        if is_address(at) && agent.pager.has_adopted(page_of(at)) {
            holds.hold(at, UNTOLD);
            any = true;
        }
    }
    if !any && call.number as c_long != libc::SYS_ioctl {
        return Outcome::Bare;
    }
    make_until_it_sees(agent, call)
}

/// Whether a program can have memory there.
fn is_address(at: u64) -> bool {
    (PAGE_BYTES as u64..1 << 47).contains(&at)
}

fn page_of(at: u64) -> Range<usize> {
    let start = at as usize / PAGE_BYTES * PAGE_BYTES;
    start..start.saturating_add(PAGE_BYTES)
}

/// Makes a call; where it answers `EFAULT`, what its arguments may refer to is brought in, more
/// each time, and it is made again.
fn make_until_it_sees(agent: &Agent, call: &mut Call) -> Outcome {
    for turn in 0..TRIES {
        // SAFETY: the call is the program's, made as it asked.
        call.result = unsafe { raw(call.number, call.arguments) };
        if call.result != -i64::from(libc::EFAULT) {
            break;
        }
        let mut holds = Holds::new(agent);
        for at in call.arguments.into_iter().filter(|at| is_address(*at)) {
            holds.hold(at, UNTOLD << turn);
            for near in 0..4 {
                let inner = peek::<u64>(at + near * 8).filter(|inner| is_address(*inner));
                inner.into_iter().for_each(|inner| holds.hold(inner, UNTOLD << turn));
            }
        }
    }
    Outcome::Done
}

//! The interface between two libraries. A program preloads a library of two pages, the *front*,
//! which counts the program's allocations. When the allocations are large, the front loads the
//! *agent*, which does the rest.

use crate::{Tree, own_number};
use libc::{c_char, c_int, c_long, pid_t, sigaction};
use rustix::time::Timespec;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

/// The agent's function that the front calls after loading it: a [`Begin`].
pub const BEGIN: &CStr = c"uzswap_agent";

/// Sets the agent up; returns its hooks. Null: the agent is of another version than the front.
pub type Begin = extern "C" fn(&'static Front) -> *const Hooks;

/// A number that changes with the layout below.
pub const FORM: u64 = 0x757a_6672_6f6e_000d;

/// Bytes of the stack of the thread that watches.
pub const STACK: usize = 256 << 10;

/// The stacks of the front's threads lie above this address, by a random number of units. Neither
/// the kernel nor a program puts any mapping there by itself. The agent's mappings end below this
/// address. Otherwise they could collide with these stacks: front and agent both take their random
/// number from the address of their code.
pub const PLACE: usize = 0x4f00_0000_0000;
/// See [`PLACE`].
pub const PLACE_UNIT: usize = 64 << 10;
/// See [`PLACE`]. The stacks are below 2^44 + 2^46.
pub const PLACE_UNITS: usize = (0x5000_0000_0000 - PLACE) / PLACE_UNIT;

/// A process with less memory does not wait for its turn.
pub const QUEUED_LEAST: u64 = 4 << 20;
/// The interval at which a waiting process checks that some process would resume it.
const LOOK: Duration = Duration::from_millis(100);

/// The program is being taken over. A thread that asks for memory waits until the take-over ends.
pub const TAKING: u32 = 1;
/// The program must wait for its turn before it gets more memory.
pub const QUEUED: u32 = 2;
/// The process was forked, and has none of our threads yet.
pub const BARE: u32 = 8;
/// The program has restricted its system calls (seccomp), so this library makes none.
pub const FILTERED: u32 = 16;
/// The program has been told to wait. That happens only once.
const HAS_QUEUED: u32 = 4;

/// The state and functions of the front.
#[derive(Debug)]
#[repr(C)]
pub struct Front {
    /// [`FORM`].
    pub form: u64,
    /// The state that the processes share.
    pub tree: Tree,
    /// The block of the program's first thread.
    pub first_thread: usize,
    /// The distance from a thread's block to the agent's space, which is zeros at first.
    pub room: isize,
    /// Bytes of that space.
    pub room_bytes: usize,
    /// The pthread key whose value [`Hooks::end`] gets when a thread ends.
    pub key: libc::pthread_key_t,
    /// True if faults raise SIGSEGV, because userfaultfd is denied.
    pub protects: bool,
    /// True if the program has an allocator of its own, which the C library uses too. That
    /// allocator may call `mmap` with its locks held. In such a call no thread can be started,
    /// since starting a thread allocates.
    pub has_own_allocator: bool,
    /// This process's number. In a child forked past the C library it is still the parent's number.
    pub process: AtomicU32,
    /// Reasons why a thread that asks for memory waits: [`TAKING`], [`QUEUED`].
    pub waits: AtomicU32,
    /// The number of threads that check the process's memory.
    pub looking: AtomicU32,
    /// The last thread that watched, or that loads the agent to watch: its process and its thread
    /// number, in 32 bits each. The thread may have ended.
    pub watcher: AtomicU64,
    /// The last thread of the program's that was seen to end by a system call: its number, and its
    /// status in the last 8 bits.
    pub ended: AtomicU64,
    /// This process was forked past the C library, which still counts the parent's threads.
    pub is_past_library: AtomicBool,
}

/// The agent's functions for the front.
#[derive(Debug)]
#[repr(C)]
pub struct Hooks {
    /// Checks the process's memory before the process gets `more` bytes.
    pub look: extern "C" fn(more: usize, may_wait: bool),
    /// Waits for the reasons in [`Front::waits`].
    pub wait: extern "C" fn(),
    /// The body of the watching thread. It returns if there is nothing to watch.
    pub watch: extern "C" fn(),
    /// Starts a watching thread.
    pub start_watching: extern "C" fn(),
    /// Forks by the function that the program would use without the front.
    pub fork: unsafe extern "C" fn(next: Fork) -> pid_t,
    /// Runs in each forked child, among the C library's fork handlers. `false` if uzswap leaves the
    /// child alone.
    pub in_child: extern "C" fn() -> bool,
    /// `sigaction`.
    pub sigaction: unsafe extern "C" fn(c_int, *const sigaction, *mut sigaction) -> c_int,
    /// `signal`.
    pub signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// System V's `signal`.
    pub sysv_signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// Calls `unshare` or `setns`, by its number, and returns the kernel's answer. If the program
    /// has only one thread, ours end before the call and start again after it.
    pub alone: extern "C" fn(c_long, u64, u64) -> c_long,
    /// Makes a call by which the program restricts its later calls (seccomp), and writes the
    /// kernel's answer. Our threads end before, since the filter may forbid their calls. `false`
    /// if the caller has to make the call, by an instruction that the agent has replaced.
    pub restrict: unsafe extern "C" fn(c_long, &[u64; 6], &mut c_long) -> bool,
    /// The number of the program's threads, without ours. Takes the folder that lists them, as
    /// `fstatat` does.
    pub threads: unsafe extern "C" fn(c_int, *const c_char) -> u64,
    /// Notes memory that a call of `ioctl` hands to a device: see [`crate::devices`].
    pub hands_over: extern "C" fn(u32, u64),
    /// Makes `process_vm_readv` or `process_vm_writev` of a process whose memory may be visited,
    /// and writes the kernel's answer. `false` if the caller has to make the call, by an
    /// instruction that the agent has replaced.
    pub visit: unsafe extern "C" fn(c_long, &[u64; 6], &mut c_long) -> bool,
    /// Gets the value of an ending thread under [`Front::key`].
    pub end: extern "C" fn(*mut c_void),
}

/// `fork`.
pub type Fork = unsafe extern "C" fn() -> pid_t;

/// A thread that checks the process's memory, by system calls that a filter may forbid.
#[derive(Debug)]
pub struct Looking<'a>(&'a AtomicU32);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Front {
    /// Begins a check of the process's memory. `None` if the program restricts its calls.
    pub fn look(&self) -> Option<Looking<'_>> {
        self.looking.fetch_add(1, SeqCst);
        let looking = Looking(&self.looking);
        (self.waits.load(SeqCst) & FILTERED == 0).then_some(looking)
    }

    /// Notes that the program restricts its calls from now on. Waits a moment for threads that
    /// check the memory.
    pub fn restrict(&self) {
        const MILLISECONDS: u32 = 100;
        self.waits.fetch_or(FILTERED, SeqCst);
        for _ in 0..MILLISECONDS {
            if self.looking.load(SeqCst) == 0 {
                break;
            }
            let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            // A signal may end the sleep early.
            let _ = rustix::thread::nanosleep(&millisecond);
        }
    }

    /// Notes that the calling thread is [`Self::watcher`].
    pub fn set_watcher(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.watcher.store(u64::from(own_number()) << 32 | u64::from(thread), SeqCst);
    }

    /// Notes that the calling thread is about to end by a system call with this status.
    pub fn note_end(&self, status: u64) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u64;
        self.ended.store(thread << 8 | status & 0xff, SeqCst);
    }

    /// The last thread that [`Self::note_end`] noted, and its status.
    pub fn ended(&self) -> Option<(i32, i32)> {
        let ended = self.ended.load(SeqCst);
        (ended != 0).then_some(((ended >> 8) as i32, (ended & 0xff) as i32))
    }

    /// True in a fork that was made past the C library.
    pub fn is_forked(&self) -> bool {
        self.process.load(Relaxed) != own_number()
    }

    /// Half of the budget: a program that may write this much memory without a further request is
    /// watched, however little it has now.
    pub fn late_least(&self) -> u64 {
        self.tree.table().total.load(Relaxed) / 2
    }

    /// If processes take turns, makes a program with `used` bytes wait before it gets memory: the
    /// processes whose turn it is would take the memory away again. A program with an allocator of
    /// its own does not wait, because the thread may hold the allocator's locks.
    pub fn queue(&self, used: u64) {
        if used < QUEUED_LEAST || self.has_own_allocator {
            return;
        }
        let has_queued = || self.waits.load(Relaxed) & HAS_QUEUED != 0;
        if self.tree.is_suspended() || !has_queued() && self.tree.queue(used) {
            self.waits.fetch_or(QUEUED | HAS_QUEUED, Relaxed);
        }
    }

    /// Waits for this program's turn, if it must, or until `is_over`.
    pub fn wait_for_turn(&self, is_over: impl Fn() -> bool) {
        if self.waits.load(Relaxed) & QUEUED != 0 {
            while !is_over() && self.tree.is_suspended() {
                self.tree.wait_while_suspended(LOOK);
            }
            self.waits.fetch_and(!QUEUED, Relaxed);
        }
    }

    /// Adds a forked child that was not taken over to the tree, as a process of its own.
    pub fn forked(&self) {
        self.process.store(own_number(), Relaxed);
        self.ended.store(0, Relaxed);
        self.tree.rejoin();
        self.waits.store(0, Relaxed);
        self.looking.store(0, Relaxed);
    }
}

//! The interface of two libraries. A program preloads a library of two pages, the *front*, which
//! counts the program's allocations. When these are large it loads the *agent*, which does the
//! rest.

use crate::{Tree, own_number};
use libc::{c_int, c_long, pid_t, sigaction};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

/// The agent's function that the front calls after loading it: a [`Begin`].
pub const BEGIN: &CStr = c"uzswap_agent";

/// Sets the agent up; returns its hooks. Null: it is of another version than the front.
pub type Begin = extern "C" fn(&'static Front) -> *const Hooks;

/// Changes with the layout below.
pub const FORM: u64 = 0x757a_6672_6f6e_0008;

/// Bytes of the stack of the thread that watches.
pub const STACK: usize = 256 << 10;

/// Stacks of the front's threads lie from here on, by chance so many units beyond it. Neither the
/// kernel nor a program puts any mapping there by itself. The agent's mappings end before it: the
/// chance of both is the address of their code, and one would lie in the other's way.
pub const PLACE: usize = 0x4f00_0000_0000;
/// See [`PLACE`].
pub const PLACE_UNIT: usize = 64 << 10;
/// See [`PLACE`]: up to 2^44 + 2^46.
pub const PLACE_UNITS: usize = (0x5000_0000_0000 - PLACE) / PLACE_UNIT;

/// A process with less memory does not wait for its turn.
pub const QUEUED_LEAST: u64 = 4 << 20;
/// Interval in which a waiting process checks that another one would resume it.
const LOOK: Duration = Duration::from_millis(100);

/// The program is being taken over: a thread that asks for memory waits for that.
pub const TAKING: u32 = 1;
/// The program must wait for its turn before it gets more.
pub const QUEUED: u32 = 2;
/// The process was forked, and has none of our threads yet.
pub const BARE: u32 = 8;
/// The program permits itself few system calls (seccomp): this library makes none for it.
pub const FILTERED: u32 = 16;
/// It has been told to wait, which happens once.
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
    /// From each thread's block to the agent's space in it, which is zeros at first.
    pub room: isize,
    /// Bytes of that space.
    pub room_bytes: usize,
    /// The key of values that [`Hooks::end`] gets as their threads end.
    pub key: libc::pthread_key_t,
    /// Faults come by SIGSEGV, because userfaultfd is denied.
    pub protects: bool,
    /// The program has an allocator of its own, which the C library uses too. It may call `mmap`
    /// with its locks held, where no thread can be started: that takes memory of it.
    pub has_own_allocator: bool,
    /// The process that the program began as, or was forked as.
    pub process: AtomicU32,
    /// Reasons why a thread that asks for memory waits: [`TAKING`], [`QUEUED`].
    pub waits: AtomicU32,
    /// The last thread that watched, or loads the agent in order to: its process and its number, in
    /// 32 bits each. It may have ended.
    pub watcher: AtomicU64,
}

/// The agent's functions for the front.
#[derive(Debug)]
#[repr(C)]
pub struct Hooks {
    /// Checks the process's memory, when it is about to get `more`.
    pub look: extern "C" fn(more: usize, may_wait: bool),
    /// Waits, with [`Front::waits`].
    pub wait: extern "C" fn(),
    /// The body of the watching thread; it returns where there is nothing to watch.
    pub watch: extern "C" fn(),
    /// Starts such a thread.
    pub start_watching: extern "C" fn(),
    /// Forks by the function that the program would use without the front.
    pub fork: unsafe extern "C" fn(next: Fork) -> pid_t,
    /// In each fork, as the C library's handlers run there. `false`: it is to be left alone.
    pub in_child: extern "C" fn() -> bool,
    /// `sigaction`.
    pub sigaction: unsafe extern "C" fn(c_int, *const sigaction, *mut sigaction) -> c_int,
    /// `signal`.
    pub signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// System V's `signal`.
    pub sysv_signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// Makes `unshare` or `setns`, by its number, with the kernel's answer: with one thread, if the
    /// program has one.
    pub alone: extern "C" fn(c_long, u64, u64) -> c_long,
    /// How many threads the program has, without ours.
    pub threads: extern "C" fn() -> u64,
    /// Notes memory that a call of `ioctl` hands to a device: see [`crate::devices`].
    pub hands_over: extern "C" fn(u32, u64),
    /// Gets the value of an ending thread under [`Front::key`].
    pub end: extern "C" fn(*mut c_void),
}

/// `fork`.
pub type Fork = unsafe extern "C" fn() -> pid_t;

impl Front {
    /// Notes that the calling thread is [`Self::watcher`].
    pub fn set_watcher(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.watcher.store(u64::from(own_number()) << 32 | u64::from(thread), SeqCst);
    }

    /// True in a fork that was made past the C library.
    pub fn is_forked(&self) -> bool {
        self.process.load(Relaxed) != own_number()
    }

    /// A program that may write so much memory without a further request is watched, however little
    /// it has: half of all memory.
    pub fn late_least(&self) -> u64 {
        self.tree.table().total.load(Relaxed) / 2
    }

    /// Makes a program with `used` bytes that asks for memory wait where processes take turns: it
    /// would lose the memory to those whose turn it is. A program with an allocator of its own does
    /// not wait, because it may have the allocator's locks.
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

    /// Called in a fork that was not taken over: it is another process of the tree.
    pub fn forked(&self) {
        self.process.store(own_number(), Relaxed);
        self.tree.rejoin();
        self.waits.store(0, Relaxed);
    }
}

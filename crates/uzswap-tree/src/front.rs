//! What a program preloads is a library of two pages, the *front*: it counts what the program asks
//! for. Only where that is much it loads the *agent*, which can do the rest. Here is what one knows
//! of the other.

use crate::Tree;
use libc::{c_int, pid_t, sigaction, stack_t};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// The agent's function that the front calls once it has loaded it: a [`Begin`].
pub const BEGIN: &CStr = c"uzswap_agent";

/// Sets the agent up; what to ask it from then on. Null: it is of another version than the front.
pub type Begin = extern "C" fn(&'static Front) -> *const Hooks;

/// Changes with what is below.
pub const FORM: u64 = 0x757a_6672_6f6e_0001;

/// Bytes of the stack of the thread that watches.
pub const STACK: usize = 256 << 10;

/// A process that has less does not wait for its turn.
pub const QUEUED_LEAST: u64 = 4 << 20;
/// How often who waits looks whether somebody is left who would release it.
const LOOK: Duration = Duration::from_millis(100);

/// The program is being taken over: who asks for memory waits for that.
pub const TAKING: u32 = 1;
/// The program is to wait for its turn before it gets more.
pub const QUEUED: u32 = 2;
/// It has been told to, which happens once.
const HAS_QUEUED: u32 = 4;

/// What the front has found and does.
#[derive(Debug)]
#[repr(C)]
pub struct Front {
    /// [`FORM`].
    pub form: u64,
    /// What the processes share.
    pub tree: Tree,
    /// The block of the thread that the program began with.
    pub first_thread: usize,
    /// From each thread's block to this library's room in it, which is zeros at first.
    pub room: isize,
    /// Bytes of the room.
    pub room_bytes: usize,
    /// Of values that are given to [`Hooks::end`] as their threads end.
    pub key: libc::pthread_key_t,
    /// Faults come by SIGSEGV, because userfaultfd is denied.
    pub protects: bool,
    /// The program brings an allocator of its own, which the C library uses too. It may call `mmap`
    /// with its locks held, where no thread can be started: that takes memory of it.
    pub has_own_allocator: bool,
    /// Why who asks for memory waits: [`TAKING`], [`QUEUED`].
    pub waits: AtomicU32,
}

/// What the agent does for the front.
#[derive(Debug)]
#[repr(C)]
pub struct Hooks {
    /// Looks how much memory the process has that is about to get `more`.
    pub look: extern "C" fn(more: usize, may_wait: bool),
    /// Waits, with [`Front::waits`].
    pub wait: extern "C" fn(),
    /// What the thread does that watches; it returns where there is nothing to watch.
    pub watch: extern "C" fn(),
    /// Starts such a thread.
    pub start_watching: extern "C" fn(),
    /// Forks by the function that the program would have had without the front.
    pub fork: unsafe extern "C" fn(next: Fork) -> pid_t,
    /// In each fork, as the C library's handlers run there.
    pub in_child: extern "C" fn(),
    /// `sigaction`.
    pub sigaction: unsafe extern "C" fn(c_int, *const sigaction, *mut sigaction) -> c_int,
    /// `signal`.
    pub signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// What that is in programs that ask for System V.
    pub sysv_signal: unsafe extern "C" fn(c_int, usize) -> usize,
    /// `sigaltstack`.
    pub sigaltstack: unsafe extern "C" fn(*const stack_t, *mut stack_t) -> c_int,
    /// Takes what a thread that ends had under [`Front::key`].
    pub end: extern "C" fn(*mut c_void),
}

/// `fork`.
pub type Fork = unsafe extern "C" fn() -> pid_t;

impl Front {
    /// Has a program that asks for memory, and has `used`, wait where processes take turns: what it
    /// took it would lose to those whose turn it is. Not one that brings an allocator of its own,
    /// whose locks it may have.
    pub fn queue(&self, used: u64) {
        if used < QUEUED_LEAST || self.has_own_allocator {
            return;
        }
        let has_queued = || self.waits.load(Relaxed) & HAS_QUEUED != 0;
        if self.tree.is_held() || !has_queued() && self.tree.queue(used) {
            self.waits.fetch_or(QUEUED | HAS_QUEUED, Relaxed);
        }
    }

    /// Waits until it is this program's turn, if it is to, or until `is_over`.
    pub fn wait_for_turn(&self, is_over: impl Fn() -> bool) {
        if self.waits.load(Relaxed) & QUEUED != 0 {
            while !is_over() && self.tree.is_held() {
                self.tree.wait_while_held(LOOK);
            }
            self.waits.fetch_and(!QUEUED, Relaxed);
        }
    }

    /// In a fork that was not taken over: it is another process of the tree.
    pub fn forked(&self) {
        self.tree.rejoin();
        self.waits.store(0, Relaxed);
    }
}

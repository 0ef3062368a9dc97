//! Other processes that read this program's memory see only present pages.
//!
//! So the agent brings all pages in before a signal whose default action is a core dump takes its
//! effect, and while another process asks for the pages (`uzswap status --bring-in`).

use crate::{AGENT, Agent, forking, inside, is_inside, say, stage};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::time::Duration;
use uzswap_sys::cgroup::Hierarchy;
use uzswap_sys::map::PAGE_BYTES;
use uzswap_sys::{cpu, fault_signals};
use uzswap_tree::Tree;

/// Signals whose default action is a dump.
pub const DUMPED: u64 = 1 << (libc::SIGQUIT - 1)
    | 1 << (libc::SIGILL - 1)
    | 1 << (libc::SIGTRAP - 1)
    | 1 << (libc::SIGABRT - 1)
    | 1 << (libc::SIGBUS - 1)
    | 1 << (libc::SIGFPE - 1)
    | 1 << (libc::SIGSEGV - 1)
    | 1 << (libc::SIGXCPU - 1)
    | 1 << (libc::SIGXFSZ - 1)
    | 1 << (libc::SIGSYS - 1);

const NOT_BEGUN: u32 = 0;
const BEGUN: u32 = 1;
const DONE: u32 = 2;
static STATE: AtomicU32 = AtomicU32::new(NOT_BEGUN);
/// The longest time for which another dying thread waits until the pages are in.
const PATIENCE: Duration = Duration::from_secs(60);

/// Brings all pages in, if the kernel is about to write a dump and there is memory for the pages.
/// Called in the handler of a signal that is about to end the process.
pub fn complete() {
    // A process that borrows this memory (`vfork`) is not this program. In our own code the thread
    // may hold locks.
    if stage::is_left() || is_inside() || fault_signals::is_other_process() {
        return;
    }
    match STATE.compare_exchange(NOT_BEGUN, BEGUN, SeqCst, SeqCst) {
        Ok(_) => {
            bring_all_in();
            STATE.store(DONE, SeqCst);
        }
        Err(BEGUN) => {
            let pause = Duration::from_millis(1);
            let turns = PATIENCE.as_millis() / pause.as_millis();
            let is_going_on = |_: &u128| STATE.load(SeqCst) == BEGUN;
            (0..turns).take_while(is_going_on).for_each(|_| std::thread::sleep(pause));
        }
        Err(_) => {}
    }
}

fn bring_all_in() {
    let Some(agent) = AGENT.get().filter(|_| is_written()) else { return };
    let _inside = inside();
    // The watching thread may be about to set a budget that it has decided before the dump.
    drop(forking::at_work());
    if let Err(missing) = bring_in(agent) {
        let mib = missing >> 20;
        say(&[&format!(
            "the core dump lacks up to {mib} MiB: there is no memory to bring them in for it"
        )]);
    }
}

/// Brings all pages in, with a budget in which no page leaves. The error is the number of bytes for
/// which there is no memory.
fn bring_in(agent: &Agent) -> Result<(), u64> {
    let needed = agent.pager.figures().out * PAGE_BYTES as u64;
    if needed > available() {
        return Err(needed);
    }
    agent.pager.bring_all_in();
    Ok(())
}

/// Brings all pages in if another process asks for that, because that process reads this program's
/// memory (`process_vm_readv`, a debugger) and an absent page would be an error. True while no page
/// may leave.
pub fn attend(agent: &Agent, tree: &Tree) -> bool {
    // True if all pages are in for the reader.
    static IS_IN: AtomicBool = AtomicBool::new(false);
    if STATE.load(SeqCst) != NOT_BEGUN {
        return true;
    }
    if !tree.is_wanted_whole() {
        IS_IN.store(false, Relaxed);
        return false;
    }
    if IS_IN.load(Relaxed) {
        return true;
    }
    // A suspended process gets no page. The next orders to the pager suspend the process again.
    agent.pager.set_suspended(false);
    let is_in = bring_in(agent).is_ok();
    IS_IN.store(is_in, Relaxed);
    tree.answer_whole(is_in);
    is_in
}

/// True if the kernel writes a dump of this process, or passes one to a program.
fn is_written() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to a structure of that kind.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit) } == 0;
    let is_piped = || {
        let pattern = fs::read("/proc/sys/kernel/core_pattern").unwrap_or_default();
        pattern.starts_with(b"|")
    };
    // SAFETY: a question with no further arguments.
    let is_dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) } != 0;
    is_dumpable && (!known || limit.rlim_cur > 0 || is_piped())
}

/// Bytes of memory that this process may still have; no limit where that cannot be read.
fn available() -> u64 {
    let free = cpu::memory_info().map_or(u64::MAX, |memory| memory.available);
    let group = Hierarchy::find().map(|groups| groups.own());
    let limit = group.and_then(|group| Some((group.memory_limit()?.0, group.usage().current)));
    limit.map_or(free, |(limit, used)| free.min(limit.saturating_sub(used)))
}

//! Which of a program's mappings the pager adopts, and why it leaves the others alone.
//!
//! The kernel lists each mapping with its treatment ([`uzswap_sys::smaps`]). Access and name alone
//! do not show that a child inherits a mapping empty, or that a key protects it. A mapping of an
//! unknown kind is left alone, and counted by the reason. The kernel merges neighbours into one
//! mapping, from which we cut the parts that must stay.

use crate::{AGENT, allocator, devices, layout, looker, mode, relocated, stacks, withheld};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use uzswap_calls::sites;
use uzswap_calls::stop::Staying;
use uzswap_region::{Contents, Mode};
use uzswap_sys::map::{self, PAGE_BYTES};
use uzswap_sys::smaps::{self, Described};
use uzswap_sys::{own_threads, thread_memory};
use uzswap_tree::Tree;

/// A mapping up to this size is the stack of a thread whose stack pointer is in it. Of a larger
/// mapping only a part is the stack, such as a coroutine's in the heap.
const STACK_MAX: usize = 16 << 20;
/// Bytes around a stack pointer in a larger mapping. These bytes stay in memory for now.
const AROUND_STACK: usize = 64 << 10;
/// Bytes around a thread's own memory that the kernel and this library use, at most.
const MARGIN: usize = 64 << 10;
/// Bytes of the C library's description of a thread at least, since glibc 2.28. Where it is the
/// last of a thread's own memory, it ends less than a page before the mapping. So its last bytes
/// lie in the same page as these.
const BLOCK_LEAST: usize = 2304;

/// Bytes that the variables of all files take in each thread.
static VARIABLES: AtomicUsize = AtomicUsize::new(0);

/// Notes how much of each thread's memory the variables of these files take.
pub fn note_variables(modules: &[sites::Module]) {
    VARIABLES.store(modules.iter().map(|module| module.thread_bytes).sum(), Relaxed);
}

/// The block of a thread with its variables, which serve its faults.
fn around_block(block: usize) -> Range<usize> {
    let own = thread_memory::around(block, VARIABLES.load(Relaxed));
    own.start.saturating_sub(MARGIN)..own.end.saturating_add(MARGIN)
}

/// The own memory of a thread whose stack ends with it. Other memory may lie behind it.
pub fn up_to_end(block: usize) -> Range<usize> {
    let own = thread_memory::around(block, VARIABLES.load(Relaxed));
    own.start.saturating_sub(MARGIN)..own.end - (thread_memory::BLOCK - BLOCK_LEAST)
}

/// Why private memory stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Stays {
    /// A child inherits it empty (`MADV_WIPEONFORK`) or not at all (`MADV_DONTFORK`). The latter
    /// may be memory of a device: it is adopted only where pages leave by a move, which the
    /// device's pin prevents.
    NotInherited,
    /// It grows by itself, and shrinks by no call (`MAP_GROWSDOWN`).
    Grows,
    /// The program has locked it.
    Locked,
    /// The kernel may drop it (`MAP_DROPPABLE`), or `MADV_FREE` pages that nobody may write.
    Droppable,
    /// Its mapping may not change any more (`mseal`).
    Sealed,
    /// A protection key decides which thread may access it.
    Key,
    /// The kernel or the processor has special rules for it: shadow stacks, memory of devices, huge
    /// pages of hugetlbfs, tagged memory.
    Special,
    /// The program serves its faults itself, by userfaultfd.
    OwnFaults,
    /// It is code.
    Code,
    /// It is the stack of a thread.
    Stack,
    /// The program may only read it, and pages leave by their protection.
    ReadOnly,
    /// The pager had no addresses or no mappings left for it.
    Refused,
    /// It is the changed part of a private mapping of a file.
    Copy,
}

impl Stays {
    const ALL: [Self; 13] = [
        Self::NotInherited,
        Self::Grows,
        Self::Locked,
        Self::Droppable,
        Self::Sealed,
        Self::Key,
        Self::Special,
        Self::OwnFaults,
        Self::Code,
        Self::Stack,
        Self::ReadOnly,
        Self::Refused,
        Self::Copy,
    ];

    fn text(self) -> &'static str {
        match self {
            Self::NotInherited => "children do not inherit this memory",
            Self::Grows => "this memory grows by itself",
            Self::Locked => "it has locked this memory",
            Self::Droppable => "the kernel may drop this memory",
            Self::Sealed => "it has sealed this memory",
            Self::Key => "a protection key guards this memory",
            Self::Special => "the kernel has special rules for this memory",
            Self::OwnFaults => "it serves the faults of this memory itself",
            Self::Code => "this memory is code",
            Self::Stack => "this memory is the stack of a thread",
            Self::ReadOnly => "this memory may only be read, and userfaultfd is denied",
            Self::Refused => "it may have no more mappings for this memory (vm.max_map_count)",
            Self::Copy => "this memory is its own copy of a file",
        }
    }
}

const _: () = {
    let mut at = 0;
    while at < Stays::ALL.len() {
        assert!(Stays::ALL[at] as usize == at);
        at += 1;
    }
};

/// Bytes of pages that were left alone at the take-over, by reason.
static LEFT: [AtomicU64; Stays::ALL.len()] = [const { AtomicU64::new(0) }; Stays::ALL.len()];
/// Less is not reported.
pub const LEFT_LEAST: u64 = 4 << 20;

/// Counts bytes that stay.
pub fn note_left(why: Stays, bytes: u64) {
    LEFT[why as usize].fetch_add(bytes, Relaxed);
}

/// Reports the memory that stayed at the take-over, by reason.
pub fn report_left(tree: &Tree, name: &str) {
    report(tree, name, &LEFT.each_ref().map(|bytes| bytes.load(Relaxed)));
}

/// Reports the memory that stays now, by the kernel's description: some of it may be new.
pub fn report_left_now(tree: &Tree, name: &str) {
    let text = looker::apart(|| smaps::read().unwrap_or_default());
    let mut left = [0; Stays::ALL.len()];
    // The flags of adopted memory come from us: it is registered with userfaultfd, or has guards.
    let has_adopted = |range| AGENT.get().is_some_and(|agent| agent.pager.has_adopted(range));
    let is_ours = |one: &Described<'_>| {
        one.has("um") || one.has("uw") || has_adopted(one.mapped.range.clone())
    };
    for one in &smaps::parse(&text) {
        // Memory whose execution is withheld may have joined adopted neighbours.
        let code = withheld::parts(&one.mapped.range);
        if !code.is_empty() {
            left[Stays::Code as usize] += code.into_iter().map(map::bytes_in_core).sum::<u64>();
        } else if !is_ours(one) {
            staying(one).inspect(|(why, bytes)| left[*why as usize] += bytes);
        }
    }
    report(tree, name, &left);
}

fn report(tree: &Tree, name: &str, left: &[u64; Stays::ALL.len()]) {
    for (why, bytes) in Stays::ALL.iter().zip(left) {
        let bytes = *bytes;
        if bytes >= LEFT_LEAST {
            tree.leave_part(bytes, &[name.as_bytes(), b": ", why.text().as_bytes()]);
        }
    }
}

/// The reason why an anonymous private mapping is not adopted, if its description by the kernel has
/// such a reason.
fn stays(one: &Described<'_>) -> Option<Stays> {
    const BY_FLAG: [(&str, Stays); 16] = [
        ("wf", Stays::NotInherited),
        ("gd", Stays::Grows),
        ("lo", Stays::Locked),
        ("lf", Stays::Locked),
        ("dp", Stays::Droppable),
        ("sl", Stays::Sealed),
        ("ss", Stays::Special),
        ("gu", Stays::Special),
        ("io", Stays::Special),
        ("pf", Stays::Special),
        ("mm", Stays::Special),
        ("ht", Stays::Special),
        ("mt", Stays::Special),
        ("um", Stays::OwnFaults),
        ("uw", Stays::OwnFaults),
        ("ui", Stays::OwnFaults),
    ];
    let by_flag = BY_FLAG.iter().find(|(flag, _)| one.has(flag)).map(|(_, why)| *why);
    let is_dropped = one.lazily_free_bytes > 0 && one.mapped.access[1] == b'-';
    let is_absent =
        one.has("dc") && !AGENT.get().is_some_and(|agent| agent.pager.leaves_pinned_in());
    by_flag
        .or(is_absent.then_some(Stays::NotInherited))
        .or((one.key != 0).then_some(Stays::Key))
        .or((one.mapped.access[2] == b'x').then_some(Stays::Code))
        .or(is_dropped.then_some(Stays::Droppable))
}

/// The bytes of a mapping that must stay, whatever is around it, and the reason.
fn staying(one: &Described<'_>) -> Option<(Stays, u64)> {
    match one.mapped.access[3] {
        _ if is_plain(one) => stays(one).map(|why| (why, one.page_bytes)),
        b'p' if one.mapped.has_file => Some((Stays::Copy, one.anonymous_bytes)),
        b'p' if one.mapped.name == "[stack]" => Some((Stays::Stack, one.page_bytes)),
        _ => None,
    }
}

/// Adopts all mappings that may be adopted. Withholds the execution of unwritten memory, except
/// that of the stubs of replaced calls.
pub fn adopt_all(
    modules: &[sites::Module],
    stopped: &[Staying],
    stubs: &[Range<usize>],
) -> layout::Layout {
    let mut layout = layout::Layout::new(current_heap_end());
    // Memory that may only be read stays in the mode of protection.
    let moved = match mode() {
        Mode::Protection => Vec::new(),
        _ => relocated::take_out(modules, |one| stays(one).is_none()),
    };
    // Without the list no memory is adopted; `take_over` has checked that the list can be read.
    let text = looker::apart(|| smaps::read().unwrap_or_default());
    let all = smaps::parse(&text);
    let kept = kept(modules, &moved);
    for one in &all {
        let range = &one.mapped.range;
        let is_free = || kept.iter().all(|kept| !map::overlap(kept, range));
        match (staying(one), &one.mapped.access) {
            (Some((why, bytes)), access) => {
                note_left(why, bytes);
                if why == Stays::Code && access == b"rwxp" {
                    let kept: Vec<_> = kept.iter().chain(stubs).cloned().collect();
                    withheld::withhold_unwritten(range, &kept);
                }
            }
            _ if !is_plain(one) => {}
            (None, b"---p") if is_free() => layout.reserve(range.clone()),
            (None, b"rw-p" | b"r--p") => {
                adopt_around(one, &kept, stopped);
            }
            _ => {}
        }
    }
    layout
}

/// True if a mapping is private memory that the program has requested, and has no file.
fn is_plain(one: &Described<'_>) -> bool {
    let name = one.mapped.name;
    let is_unnamed = name.is_empty() || name.starts_with("[anon:") || name == "[heap]";
    !one.mapped.has_file && is_unnamed && one.mapped.access[3] == b'p'
}

/// The memory that stays, even if the kernel has joined it with other memory. `moved` is the part
/// of the libraries' memory that may leave.
fn kept(modules: &[sites::Module], moved: &[Range<usize>]) -> Vec<Range<usize>> {
    let signal_stacks =
        stacks::FROM_BEFORE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Variables of the program itself may leave; those of libraries serve faults, too.
    let libraries = modules.iter().filter(|module| !module.name.is_empty());
    let of_main = around_block(crate::front().map_or(0, |front| front.first_thread));
    let mut kept = map::own();
    kept.extend(allocator::own());
    kept.extend(devices::handed());
    kept.push(of_main);
    let whole_pages = |range: &Range<usize>| {
        range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES)
    };
    kept.extend(libraries.flat_map(|module| map::cut(whole_pages(&module.range), moved)));
    kept.extend(signal_stacks.iter().cloned());
    kept
}

/// Adopts the parts of a mapping that may be adopted. A stack is recognised by the thread that runs
/// on it, not by a guard below it, since allocators have guards in their memory, too. An unused
/// stack may leave, because a call that starts a thread there first gives back the part that serves
/// the thread's faults.
fn adopt_around(one: &Described<'_>, kept: &[Range<usize>], stopped: &[Staying]) {
    let range = one.mapped.range.clone();
    // A thread's block is at the end of its stack, except for the program's first thread, whose
    // block is elsewhere. The calling thread is also one of ours, but the list lacks it.
    let first = crate::front().map_or(0, |front| front.first_thread);
    let ours = own_threads::blocks().chain([own_threads::own_block()]);
    let blocks = stopped.iter().map(|thread| thread.block).filter(|block| *block != first);
    let blocks = blocks.chain(ours).filter(|block| range.contains(block));
    let end_of = |block| thread_memory::around(block, VARIABLES.load(Relaxed)).end;
    let stacks_end = blocks.map(|block| end_of(block).next_multiple_of(PAGE_BYTES)).max();
    let is_running =
        |thread: &Staying| range.contains(&thread.stack) && !range.contains(&thread.block);
    let is_small = range.len() <= STACK_MAX;
    if is_small && stopped.iter().any(is_running) {
        return note_left(Stays::Stack, one.page_bytes);
    }
    let stacks = stopped.iter().filter(|thread| is_running(thread)).map(|thread| thread.stack);
    let around = |at: usize| at.saturating_sub(AROUND_STACK)..at.saturating_add(AROUND_STACK);
    let stacks: Vec<_> = stacks.map(around).collect();
    let Some(agent) = AGENT.get() else { return };
    let start = stacks_end.unwrap_or(range.start).max(range.start);
    // The kernel's zero page may be mapped. The kernel does not count it as memory.
    let contents = match one.mapped.access[1] {
        b'w' => Contents::Pages,
        _ => Contents::ReadOnlyPages,
    };
    if contents == Contents::ReadOnlyPages && mode() == Mode::Protection {
        return note_left(Stays::ReadOnly, one.page_bytes);
    }
    let parts = map::cut(start..range.end, kept).into_iter();
    for part in parts.flat_map(|part| map::cut(part, &stacks)) {
        let bytes = one.page_bytes.min(part.len() as u64);
        // SAFETY: private, anonymous and readable, by the kernel's own list; no stack, nothing of
        // ours; the layout is locked.
        if unsafe { agent.pager.adopt(part, contents) }.is_err() {
            note_left(Stays::Refused, bytes);
        }
    }
}

fn current_heap_end() -> usize {
    // SAFETY: asks only.
    unsafe { uzswap_calls::raw(libc::SYS_brk as u64, [0; 6]) as usize }
}

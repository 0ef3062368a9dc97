//! What the program has mapped, as far as it is or may be adopted; and the calls that change it.
//!
//! One lock orders these calls, as the kernel's own does. Who holds it has all signals blocked, so
//! that no handler of the program's waits for its own thread.

use crate::calls::{self, refuse};
use crate::{Agent, inside};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_calls::table::Buffer;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_region::{Change, Mode};
use uzswap_sys::map::PAGE_BYTES;

/// Of Linux 6.13.
const MADV_GUARD_INSTALL: i32 = 102;

/// What is smaller is left alone: it would cost more than it holds.
const LEAST: usize = 64 << 10;

/// Where pages may come to be that can be adopted.
#[derive(Default)]
pub struct Layout {
    /// Addresses that are reserved without access, by their start: an allocator makes them
    /// accessible part by part.
    reserved: BTreeMap<usize, usize>,
    /// The end of the heap (brk).
    heap_end: usize,
}

static LAYOUT: Mutex<Option<Layout>> = Mutex::new(None);
/// All memory that may be adopted is.
static IS_COMPLETE: AtomicBool = AtomicBool::new(false);

/// Says that the program's memory has been adopted, which the caller has locked.
pub fn complete() {
    IS_COMPLETE.store(true, Release);
}

/// Whether all memory that may be adopted is.
pub fn is_complete() -> bool {
    IS_COMPLETE.load(Acquire)
}

/// Waits until the program's memory has been adopted. A call that began before would be given
/// memory that nobody keeps there for its time. Not for calls by which threads wake each other:
/// one of ours that is waited for may be among those.
pub fn await_complete() {
    if !is_complete() {
        let _inside = inside();
        drop(lock());
    }
}

/// The layout; whoever has this may change what is mapped.
pub fn lock() -> MutexGuard<'static, Option<Layout>> {
    LAYOUT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Layout {
    /// As it is when the program is taken over.
    pub fn new(heap_end: usize) -> Self {
        Self { reserved: BTreeMap::new(), heap_end }
    }

    /// Notes addresses that are reserved.
    pub fn reserve(&mut self, range: Range<usize>) {
        self.reserved.insert(range.start, range.end);
    }

    /// Forgets that addresses are reserved; those of a range that were.
    fn unreserve(&mut self, range: &Range<usize>) -> Vec<Range<usize>> {
        let overlapping = self.reserved.range(..range.end).rev();
        let overlapping = overlapping.take_while(|(_, end)| **end > range.start);
        let overlapping: Vec<_> = overlapping.map(|(start, end)| *start..*end).collect();
        let mut were = Vec::new();
        for whole in overlapping {
            self.reserved.remove(&whole.start);
            let part = whole.start.max(range.start)..whole.end.min(range.end);
            if whole.start < part.start {
                self.reserved.insert(whole.start, part.start);
            }
            if part.end < whole.end {
                self.reserved.insert(part.end, whole.end);
            }
            were.push(part);
        }
        were
    }
}

impl Agent {
    /// Adopts memory that has just become accessible; what cannot be is left alone.
    fn adopt_fresh(&self, range: Range<usize>) {
        self.adopt_mapped(range, false);
    }

    /// The same of memory of which some may have been touched.
    fn adopt_mapped(&self, range: Range<usize>, has_pages: bool) {
        let (start, end) = (range.start, range.end);
        // It becomes one mapping with what is adopted beside it.
        let is_beside = || {
            [start.saturating_sub(PAGE_BYTES)..start, end..end + PAGE_BYTES]
                .into_iter()
                .any(|page| self.pager.has_adopted(page))
        };
        if range.len() < LEAST && !is_beside() {
            return;
        }
        // SAFETY: private, anonymous, readable and writable, as the caller saw the call that made
        // it so; all calls that change it come here.
        let adopted = unsafe { self.pager.adopt(range, has_pages) };
        // An error leaves the rest as it is: memory of the program's that is not managed.
        let _ = adopted;
    }
}

fn whole(at: u64, bytes: u64) -> Range<usize> {
    let end = (at as usize).saturating_add(bytes as usize);
    at as usize..end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(end)
}

/// Makes a call, with its result noted.
fn make(call: &mut Call) -> bool {
    // SAFETY: the call is the program's, made as it asked.
    call.result = unsafe { raw(call.number, call.arguments) };
    !(-4095..0).contains(&call.result)
}

/// Whether a mapping with these flags is private memory of no file.
pub fn is_plain(flags: i32) -> bool {
    flags & libc::MAP_TYPE == libc::MAP_PRIVATE && flags & libc::MAP_ANONYMOUS != 0
}

/// `mmap`: memory that is mapped over is given up, and a new mapping that fits is adopted.
pub fn map(agent: &Agent, call: &mut Call) -> Outcome {
    let [at, bytes, protection, flags, ..] = call.arguments.map(|argument| argument as i64);
    let (protection, flags) = (protection as i32, flags as i32);
    let _inside = inside();
    let mut layout = lock();
    let is_fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
    let target = whole(at as u64, bytes as u64);
    let is_plain = is_plain(flags);
    if is_plain {
        // Its pages come in as they are touched: all at once they might not fit.
        call.arguments[3] &= !(libc::MAP_POPULATE as u64);
    }
    let done = if is_fixed && agent.pager.has_adopted(target.clone()) {
        agent.pager.change(target, Change::Gone, || {
            let done = make(call);
            (done, done)
        })
    } else {
        make(call)
    };
    let Some(layout) = layout.as_mut().filter(|_| done) else { return Outcome::Done };
    let mapped = whole(call.result as u64, bytes as u64);
    layout.unreserve(&mapped);
    const OTHER: i32 = libc::MAP_STACK
        | libc::MAP_GROWSDOWN
        | libc::MAP_LOCKED
        | libc::MAP_HUGETLB
        | libc::MAP_32BIT;
    if is_plain && flags & OTHER == 0 {
        match protection {
            libc::PROT_NONE => layout.reserve(mapped),
            READ_WRITE => agent.adopt_fresh(mapped),
            _ => {}
        }
    }
    Outcome::Done
}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// `munmap`.
pub fn unmap(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let mut layout = lock();
    let done = agent.pager.change(range.clone(), Change::Gone, || {
        let done = make(call);
        (done, done)
    });
    if let Some(layout) = layout.as_mut().filter(|_| done) {
        layout.unreserve(&range);
    }
    Outcome::Done
}

/// `brk`.
pub fn grow_heap(agent: &Agent, call: &mut Call) -> Outcome {
    let _inside = inside();
    let mut layout = lock();
    let Some(layout) = layout.as_mut() else { return Outcome::Bare };
    let pages = |end: usize| end.next_multiple_of(PAGE_BYTES);
    let (before, wanted) = (layout.heap_end, call.arguments[0] as usize);
    if wanted != 0 && pages(wanted) < pages(before) {
        agent.pager.change(pages(wanted)..pages(before), Change::Gone, || {
            make(call);
            ((), call.result as usize == wanted)
        });
    } else {
        make(call);
    }
    let now = call.result as usize;
    if pages(now) > pages(before) {
        let grown = pages(before)..pages(now);
        // However little: the heap grows by little at a time.
        // SAFETY: as of `adopt_fresh`.
        let _ = unsafe { agent.pager.adopt(grown, false) };
    }
    layout.heap_end = now;
    Outcome::Done
}

/// `mprotect`: what was reserved and can be used now is adopted; code is none of ours.
pub fn protect(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let protection = call.arguments[2] as i32;
    let _inside = inside();
    let mut layout = lock();
    let is_code = protection & libc::PROT_EXEC != 0;
    // Where pages leave by their protection, the program's cannot be had beside ours.
    let given_back = match crate::mode() {
        Mode::Protection => agent.pager.adopted(range.clone()),
        _ => Vec::new(),
    };
    if !given_back.is_empty() || is_code && agent.pager.has_adopted(range.clone()) {
        agent.pager.release(range.clone());
    }
    let done = make(call);
    let Some(layout) = layout.as_mut().filter(|_| done) else { return Outcome::Done };
    for part in given_back.into_iter().filter(|_| !is_code) {
        layout.unreserve(&part);
        layout.reserve(part);
    }
    if protection != libc::PROT_NONE {
        for part in layout.unreserve(&range) {
            if protection == READ_WRITE {
                // Without a least size: an allocator asks for a little at a time.
                // SAFETY: as of `adopt_fresh`; it was reserved without access until now.
                let _ = unsafe { agent.pager.adopt(part, true) };
            }
        }
    }
    Outcome::Done
}

/// `madvise`.
pub fn advise(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let _layout = lock();
    if !agent.pager.has_adopted(range.clone()) {
        make(call);
        return Outcome::Done;
    }
    match call.arguments[2] as i32 {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE | libc::MADV_DONTNEED_LOCKED => {
            call.arguments[2] = libc::MADV_DONTNEED as u64;
            agent.pager.change(range, Change::Zeroed, || {
                let is_done = make(call);
                // Of a range with holes, what is mapped was dropped.
                ((), is_done || call.result == -i64::from(libc::ENOMEM))
            });
        }
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => {
            // They come in as they are touched: all at once they might not fit.
            call.result = 0;
        }
        libc::MADV_PAGEOUT => {
            call.result = 0;
            // What there is no room for stays.
            let _ = agent.pager.page_out(range);
        }
        // A hint, to look for pages that are equal.
        libc::MADV_MERGEABLE => call.result = 0,
        libc::MADV_DONTFORK | libc::MADV_WIPEONFORK | MADV_GUARD_INSTALL => {
            agent.pager.release(range);
            make(call);
        }
        _ => {
            make(call);
        }
    }
    Outcome::Done
}

/// `mremap`.
pub fn remap(agent: &Agent, call: &mut Call) -> Outcome {
    let [from, old, new, flags, to, _] = call.arguments;
    let _inside = inside();
    let mut layout = lock();
    let (range, new_bytes) = (whole(from, old), whole(0, new).end);
    let target = whole(to, new);
    let is_fixed = flags as i32 & libc::MREMAP_FIXED != 0;
    // Else the kernel refuses it, and nothing is mapped over.
    let is_apart = target.start >= range.end || target.end <= range.start;
    if is_fixed && is_apart && target.start.is_multiple_of(PAGE_BYTES) {
        agent.pager.change(target, Change::Gone, || ((), true));
    }
    if !agent.pager.has_adopted(range.clone()) {
        make(call);
        return Outcome::Done;
    }
    if old == 0 || flags as i32 & libc::MREMAP_DONTUNMAP != 0 {
        call.result = -i64::from(libc::EINVAL);
        return Outcome::Done;
    }
    if new_bytes < range.len() {
        let tail = range.start + new_bytes..range.end;
        if !is_fixed {
            // What remains may be several mappings, which the kernel would not look at in one call.
            agent.pager.change(tail.clone(), Change::Gone, || {
                let done = make(call);
                (done, done)
            });
            return Outcome::Done;
        }
        drop_tail(agent, tail);
        call.arguments[1] = new;
    }
    if crate::mode() == Mode::Protection {
        // What is out by its protection is many mappings to the kernel.
        if range.len() as u64 > agent.pager.memory() / 8 {
            // It would not fit in one piece; programs take new memory, and copy.
            return refuse(call, libc::ENOMEM);
        }
        give_back_and_move(agent, call, range);
        return Outcome::Done;
    }
    let kept = range.start..range.start + range.len().min(new_bytes);
    let grown = new_bytes.saturating_sub(range.len());
    // SAFETY: as of `adopt_fresh`; the layout is locked.
    let moved = unsafe {
        agent.pager.move_adopted(kept, grown, || make(call).then_some(call.result as usize))
    };
    if moved.is_err() {
        crate::die("memory that the program has moved cannot be taken along");
    }
    if call.result == -i64::from(libc::EFAULT) {
        // What is adopted in part is several mappings to the kernel, which it does not move at
        // once. Given back it is one, as the program knows it.
        give_back_and_move(agent, call, range);
    }
    let is_done = !(-4095..0).contains(&call.result);
    if let Some(layout) = layout.as_mut().filter(|_| is_done) {
        layout.unreserve(&(call.result as usize..call.result as usize + new_bytes));
    }
    Outcome::Done
}

/// Unmaps the end of a mapping that moves and becomes shorter.
fn drop_tail(agent: &Agent, tail: Range<usize>) {
    let arguments = [tail.start as u64, tail.len() as u64, 0, 0, 0, 0];
    agent.pager.change(tail, Change::Gone, || {
        // SAFETY: what the program asked for, in two steps.
        let done = unsafe { raw(libc::SYS_munmap as u64, arguments) };
        ((), done == 0)
    });
}

/// Moves a mapping as the program knows it: one, all of which is there.
fn give_back_and_move(agent: &Agent, call: &mut Call, range: Range<usize>) {
    let parts = agent.pager.adopted(range.clone());
    agent.pager.release(range);
    if make(call) {
        agent.adopt_mapped(whole(call.result as u64, call.arguments[2]), true);
    } else {
        parts.into_iter().for_each(|part| agent.adopt_mapped(part, true));
    }
}

/// `mlock`: locked memory is left alone; much of it would leave no room.
pub fn lock_memory(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let _layout = lock();
    if range.len() as u64 > agent.pager.memory() / 8 && agent.pager.has_adopted(range.clone()) {
        call.result = -i64::from(libc::ENOMEM);
        return Outcome::Done;
    }
    agent.pager.release(range);
    make(call);
    Outcome::Done
}

/// `process_madvise` of a process's own memory: what drops pages is answered as kernels before
/// 6.13 do, which have it for others' only, and programs then use `madvise`.
pub fn advise_process(agent: &Agent, call: &mut Call) -> Outcome {
    const DROPS: [i32; 4] =
        [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_DONTNEED_LOCKED, MADV_GUARD_INSTALL];
    if DROPS.contains(&(call.arguments[3] as i32)) {
        return refuse(call, libc::EINVAL);
    }
    calls::held(agent, call, &[Buffer::Vector(1, 2)])
}

/// `shmat`: never over memory that is mapped.
pub fn attach(call: &mut Call) -> Outcome {
    match call.arguments[2] as i32 & libc::SHM_REMAP {
        0 => Outcome::Bare,
        _ => refuse(call, libc::EINVAL),
    }
}

/// The kernel uses what the first argument refers to outside of system calls: it is given back to
/// the program.
pub fn leave_in(agent: &Agent, call: &Call, bytes: u64) -> Outcome {
    give_back(agent, call.arguments[0], bytes);
    Outcome::Bare
}

/// Gives the pages of a range back to the program, if any is adopted.
pub fn give_back(agent: &Agent, at: u64, bytes: u64) {
    await_complete();
    let start = at as usize / PAGE_BYTES * PAGE_BYTES;
    let range = start..whole(at, bytes).end;
    if !range.is_empty() && agent.pager.has_adopted(range.clone()) {
        let _inside = inside();
        let _layout = lock();
        agent.pager.release(range);
    }
}

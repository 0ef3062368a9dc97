//! The program's mappings that are or may be adopted; and the calls that change them.
//!
//! One lock orders these calls, as the kernel's own does. The holder blocks all signals. Otherwise
//! a handler of the program's could wait for the thread that it interrupted.

use crate::pins::{self, Pins};
use crate::{Agent, inside, looker, stage, withheld};
use rustix::mm::{MprotectFlags, mprotect};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_calls::{Call, Outcome, Patcher, raw, sites, table};
use uzswap_region::{Change, Contents, Mode};
use uzswap_sys::map::PAGE_BYTES;

/// Smaller mappings are not adopted: they would cost more than they save.
const LEAST: usize = 64 << 10;

/// The addresses where pages that can be adopted may appear.
#[derive(Debug, Default)]
pub struct Layout {
    /// Addresses that are reserved without access, by their start: an allocator makes them
    /// accessible part by part.
    reserved: BTreeMap<usize, usize>,
    /// The end of the heap (brk).
    heap_end: usize,
    /// Replaces the system calls of code that is mapped later.
    patcher: Option<Patcher>,
}

static LAYOUT: Mutex<Option<Layout>> = Mutex::new(None);

/// Waits until the program's memory has been adopted. The buffers of a call that began earlier
/// would not be pinned. Calls by which threads wake each other do not wait here: the thread that
/// adopts may wait for such a call.
pub fn await_complete() {
    if !stage::is_complete() {
        let _inside = inside();
        drop(lock());
    }
}

/// The layout; its holder may change mappings.
pub fn lock() -> MutexGuard<'static, Option<Layout>> {
    LAYOUT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Layout {
    /// The layout at the takeover.
    pub fn new(heap_end: usize) -> Self {
        Self { heap_end, ..Self::default() }
    }

    /// Replaces the system calls of code that is mapped from now on.
    pub fn patch_with(&mut self, patcher: Patcher) {
        self.patcher = Some(patcher);
    }

    /// Replaces no more calls, and makes those that trap the program's own again, because its
    /// tracer may keep their signals. After an error some trap.
    pub fn end_traps(&mut self) {
        let patcher = self.patcher.take();
        patcher.into_iter().for_each(|patcher| _ = looker::apart(|| patcher.end_traps()));
    }

    /// Replaces the system calls in a new mapping of a file's code, which no thread runs yet. The
    /// code is readable during the replacement, and then has its former access again. After an
    /// error no call is replaced.
    fn patch(
        &mut self,
        mapped: &Range<usize>,
        access: MprotectFlags,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<()> {
        const CODE: MprotectFlags = MprotectFlags::READ.union(MprotectFlags::EXEC);
        let Some(patcher) = &mut self.patcher else { return Ok(()) };
        patcher.forget(mapped);
        let set_access = |access| {
            // SAFETY: the mapping is new: no thread has its address before the call returns.
            unsafe { mprotect(mapped.start as *mut c_void, mapped.len(), access) }
        };
        if access != CODE {
            set_access(CODE)?;
        }
        let replaced = replace(patcher, mapped, file, offset);
        if access != CODE {
            set_access(access)?;
        }
        replaced
    }

    /// Notes addresses that are reserved.
    pub fn reserve(&mut self, range: Range<usize>) {
        self.reserved.insert(range.start, range.end);
    }

    /// Forgets the reserved addresses of a range, and returns them.
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

/// Replaces the system calls of new code, which may be read.
fn replace(
    patcher: &mut Patcher,
    mapped: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    let found = sites::of_segment(mapped, file, offset)?;
    if !found.is_empty() {
        // The caller sets its access afterwards.
        let work = patcher.prepare(&found, table::is_looked_at, &[])?;
        // SAFETY: the mapping is new: no thread has its address before the call returns.
        unsafe { work.apply() };
    }
    Ok(())
}

impl Agent {
    /// Adopts those parts of newly accessible memory that can be adopted.
    fn adopt_fresh(&self, range: Range<usize>) {
        let (start, end) = (range.start, range.end);
        // The kernel joins the new memory with adopted memory beside it.
        let is_beside = || {
            [start.saturating_sub(PAGE_BYTES)..start, end..end + PAGE_BYTES]
                .into_iter()
                .any(|page| self.pager.has_adopted(page))
        };
        if range.len() >= LEAST || is_beside() {
            self.adopt(range, Contents::Nothing);
        }
    }

    /// Adopts memory again. The program may have taken its own access away, except in the mode of
    /// protection.
    fn adopt_again(&self, range: Range<usize>) {
        let contents = match crate::mode() {
            Mode::Protection => Contents::Pages,
            _ => Contents::ReadOnlyPages,
        };
        self.adopt(range, contents);
    }

    /// Adopts memory of any size, unless uzswap leaves the program alone. After an error uzswap
    /// does not manage the rest.
    fn adopt(&self, range: Range<usize>, contents: Contents) {
        if !stage::is_left() {
            // SAFETY: private, anonymous, readable and writable: the caller has seen the call that
            // made it so. All calls that change it come here.
            let _ = unsafe { self.pager.adopt(range, contents) };
        }
    }
}

/// A range up to the end of its last page. A range that goes beyond the last address has no page
/// here, since the kernel refuses it.
pub fn whole(at: u64, bytes: u64) -> Range<usize> {
    let (at, end) = (at as usize, at.checked_add(bytes).map(|end| end as usize));
    at..end.and_then(|end| end.checked_next_multiple_of(PAGE_BYTES)).unwrap_or(at)
}

/// Makes a call, and notes its result. True if the result is not an error.
pub fn make(call: &mut Call) -> bool {
    // SAFETY: the program's own call.
    call.result = unsafe { raw(call.number, call.arguments) };
    !(-4095..0).contains(&call.result)
}

/// True if a mapping with these flags is private memory of no file.
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
        // The pages come in when they are touched, since all of them might not fit in memory.
        call.arguments[3] &= !(libc::MAP_POPULATE as u64);
    }
    let done = make_over(agent, call, if is_fixed { target } else { 0..0 });
    let Some(layout) = layout.as_mut().filter(|_| done) else { return Outcome::Done };
    let mapped = whole(call.result as u64, bytes as u64);
    layout.unreserve(&mapped);
    // The kernel found nothing there: an unseen call has unmapped that memory.
    if agent.pager.has_adopted(mapped.clone()) {
        agent.pager.change(mapped.clone(), Change::Gone, || ((), true));
    }
    withheld::change(&mapped, || true);
    const OTHER: i32 = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_LOCKED | libc::MAP_HUGETLB;
    let is_code = protection & libc::PROT_EXEC != 0;
    if is_code && flags & (libc::MAP_TYPE | libc::MAP_ANONYMOUS) == libc::MAP_PRIVATE {
        // SAFETY: the program's descriptor, by which it has just mapped the file.
        let file = unsafe { BorrowedFd::borrow_raw(call.arguments[4] as i32) };
        let access = MprotectFlags::from_bits_retain(protection as u32);
        if let Err(error) = layout.patch(&mapped, access, file, call.arguments[5]) {
            crate::say(&[&format!("system calls of a file that was loaded go unseen: {error}")]);
        }
    }
    if is_plain && flags & OTHER == 0 {
        match protection {
            libc::PROT_NONE | libc::PROT_READ => layout.reserve(mapped),
            READ_WRITE => agent.adopt_fresh(mapped),
            _ if withheld::is_for(protection) => withheld::withhold(mapped),
            _ => {}
        }
    }
    Outcome::Done
}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

pub fn unmap(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let mut layout = lock();
    let done = agent.pager.change(range.clone(), Change::Gone, || {
        let done = withheld::change(&range, || make(call));
        (done, done)
    });
    if let Some(layout) = layout.as_mut().filter(|_| done) {
        layout.unreserve(&range);
    }
    Outcome::Done
}

pub fn grow_heap(agent: &Agent, call: &mut Call) -> Outcome {
    let _inside = inside();
    let mut layout = lock();
    let Some(layout) = layout.as_mut() else { return Outcome::Bare };
    let pages = |end: usize| end.next_multiple_of(PAGE_BYTES);
    let (before, wanted) = (layout.heap_end, call.arguments[0] as usize);
    if wanted != 0 && pages(wanted) < pages(before) {
        let given_up = pages(wanted)..pages(before);
        agent.pager.change(given_up.clone(), Change::Gone, || {
            let is_done = withheld::change(&given_up, || {
                make(call);
                call.result as usize == wanted
            });
            ((), is_done)
        });
    } else {
        make(call);
    }
    let now = call.result as usize;
    if pages(now) > pages(before) {
        let grown = pages(before)..pages(now);
        // We adopt even a single page, because the heap grows in small steps.
        agent.adopt(grown, Contents::Nothing);
    }
    layout.heap_end = now;
    Outcome::Done
}

/// `mprotect`, `pkey_mprotect`: reserved memory that becomes writable is adopted. Code is not
/// adopted. Neither is memory with a protection key, since each thread sets its own access to it.
pub fn protect(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let protection = call.arguments[2] as i32;
    let _inside = inside();
    let mut layout = lock();
    let has_key = call.number == libc::SYS_pkey_mprotect as u64 && call.arguments[3] as i32 > 0;
    let stays = protection & libc::PROT_EXEC != 0 || has_key;
    // In the mode of protection, pages cannot have the program's protection beside ours.
    let given_back = match crate::mode() {
        Mode::Protection => agent.pager.adopted(range.clone()),
        _ => Vec::new(),
    };
    let is_withheld = withheld::is_for(protection);
    let mut plain = if is_withheld { withheld::parts(&range) } else { Vec::new() };
    if !given_back.is_empty() || stays && agent.pager.has_adopted(range.clone()) {
        if is_withheld {
            plain.extend(agent.pager.adopted(range.clone()));
        }
        agent.pager.release(range.clone());
    }
    let done = withheld::change(&range, || make(call));
    let Some(layout) = layout.as_mut().filter(|_| done) else { return Outcome::Done };
    for part in given_back.into_iter().filter(|_| !stays) {
        layout.unreserve(&part);
        layout.reserve(part);
    }
    if stays || protection == READ_WRITE {
        for part in layout.unreserve(&range) {
            if !stays {
                // There is no least size, because an allocator asks for a little at a time.
                agent.adopt(part, Contents::Pages);
            } else if is_withheld {
                plain.push(part);
            }
        }
    }
    plain.into_iter().for_each(withheld::withhold);
    Outcome::Done
}

/// 0 if all of a range is mapped, else the error that the kernel answers for it.
pub fn look_for_holes(range: &Range<usize>) -> i64 {
    let arguments = [range.start as u64, range.len() as u64, libc::MS_ASYNC as u64, 0, 0, 0];
    // SAFETY: this flag does nothing to memory that is mapped.
    unsafe { raw(libc::SYS_msync as u64, arguments) }
}

pub fn remap(agent: &Agent, call: &mut Call) -> Outcome {
    let _inside = inside();
    let mut layout = lock();
    let [from, old_bytes, bytes, flags, ..] = call.arguments;
    let (old, new_bytes) = (whole(from, old_bytes), whole(0, bytes).end);
    let withheld = withheld::give_back(&old);
    move_mapping(agent, call);
    let is_done = !(-4095..0).contains(&call.result);
    if !withheld.is_empty() {
        let stays = !is_done || flags as i32 & libc::MREMAP_DONTUNMAP != 0;
        withheld.iter().filter(|_| stays).for_each(|part| withheld::withhold(part.clone()));
        let to = call.result as usize;
        for part in withheld.into_iter().filter(|_| is_done) {
            // A mapping that grows has the access of its end.
            let end = if part.end == old.end { new_bytes } else { part.end - old.start };
            let (start, end) = (part.start - old.start, end.min(new_bytes));
            withheld::withhold(to + start..to + end.max(start));
        }
    }
    let has_moved = is_done && call.result as u64 != from;
    if let Some(layout) = layout.as_mut().filter(|_| has_moved) {
        layout.unreserve(&whole(call.result as u64, bytes));
    }
    Outcome::Done
}

fn move_mapping(agent: &Agent, call: &mut Call) {
    let [from, old, new, flags, to, _] = call.arguments;
    let (range, new_bytes) = (whole(from, old), whole(0, new).end);
    let target = whole(to, new);
    let is_fixed = flags as i32 & libc::MREMAP_FIXED != 0;
    // Otherwise the kernel refuses the call, and nothing is mapped over.
    let is_apart = target.start >= range.end || target.end <= range.start;
    let is_over = is_fixed && is_apart && target.start.is_multiple_of(PAGE_BYTES);
    let target = if is_over { target } else { 0..0 };
    if !agent.pager.has_adopted(range.clone()) || old == 0 {
        make_over(agent, call, target);
        return;
    }
    if new_bytes == range.len() && matches!(flags as i32, 0 | libc::MREMAP_MAYMOVE) {
        // The kernel moves nothing, and checks only the first page: holes may follow.
        make(call);
        return;
    }
    let tail = range.start + new_bytes.min(range.len())..range.end;
    if !tail.is_empty() && !is_fixed {
        // The rest may be several mappings, which the kernel would not check in one call.
        return agent.pager.change(tail, Change::Gone, || {
            let done = make(call);
            ((), done)
        });
    }
    if crate::mode() == Mode::Protection {
        // Memory that is evicted by its protection is many mappings to the kernel.
        if range.len() as u64 > agent.pager.memory() / 8 {
            // All of the memory would not fit. After this error, programs take new memory, and
            // copy.
            call.result = -i64::from(libc::ENOMEM);
            return;
        }
        return give_back_and_move(agent, call, range, target);
    }
    if !agent.pager.has_adopted(range.start..range.start + PAGE_BYTES) {
        // The kernel would move the mappings before the adopted one, and then fail.
        return give_back_and_move(agent, call, range, target);
    }
    let source = match flags as i32 & libc::MREMAP_DONTUNMAP {
        0 => Change::Gone,
        _ => Change::Zeroed,
    };
    let behind = agent.pager.first_adopted(tail.clone());
    // SAFETY: as of `adopt_fresh`; the layout is locked.
    let moved = unsafe {
        agent.pager.move_adopted(range.clone(), new_bytes, source, || {
            make_over(agent, call, target.clone()).then_some(call.result as usize)
        })
    };
    if moved.is_err() {
        crate::die(&["memory that the program has moved cannot be taken along"]);
    }
    if behind.is_some_and(is_unmapped) {
        // The call has moved the mapping, or has unmapped it and then failed (before Linux 6.17).
        agent.pager.change(tail, Change::Gone, || ((), true));
    }
    if call.result == -i64::from(libc::EFAULT) {
        // Memory that is adopted in part is several mappings to the kernel, which it does not move
        // in one call. After it is given back, it is one mapping, as the program knows it.
        give_back_and_move(agent, call, range, target);
    }
}

/// True if the page at an address, which was mapped before a call, is not mapped any more.
fn is_unmapped(page: usize) -> bool {
    look_for_holes(&(page..page + PAGE_BYTES)) != 0
}

/// Makes a call that maps over a range; true if it succeeded.
fn make_over(agent: &Agent, call: &mut Call, target: Range<usize>) -> bool {
    let Some(mapped) = agent.pager.first_adopted(target.clone()) else {
        return withheld::change(&target, || make(call));
    };
    agent.pager.change(target.clone(), Change::Gone, || {
        let done = withheld::change(&target, || make(call));
        // A call that failed may have unmapped its target all the same.
        (done, done || is_unmapped(mapped))
    })
}

/// Moves a mapping as the program sees it: one mapping, with all of its pages present.
fn give_back_and_move(agent: &Agent, call: &mut Call, range: Range<usize>, target: Range<usize>) {
    let mut parts = agent.pager.adopted(range.clone());
    agent.pager.release(range.clone());
    if make_over(agent, call, target) {
        let (to, bytes) = (call.result as usize, whole(0, call.arguments[2]).end);
        let place = |at: usize| to + (at - range.start).min(bytes);
        for part in &parts {
            agent.adopt_again(place(part.start)..place(part.end));
        }
        if bytes > range.len() {
            agent.adopt(place(range.end)..to + bytes, Contents::Nothing);
        }
        if call.arguments[3] as i32 & libc::MREMAP_DONTUNMAP == 0 {
            parts.clear();
        }
    }
    // A call that failed may nevertheless have unmapped some pages.
    parts.retain(|part| look_for_holes(part) == 0);
    parts.into_iter().for_each(|part| agent.adopt_again(part));
}

/// `mlock`: uzswap leaves locked memory alone. It refuses to lock much memory, which would leave no
/// room.
pub fn lock_memory(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let _layout = lock();
    if range.len() as u64 > agent.pager.memory() / 8 && agent.pager.has_adopted(range.clone()) {
        return pins::refuse_visibly(call, libc::ENOMEM);
    }
    agent.pager.release(range);
    make(call);
    Outcome::Done
}

/// `mincore`: the kernel reports a guard as in memory, but the guard stands where a page is out.
pub fn in_core(agent: &Agent, call: &mut Call) -> Outcome {
    let [at, bytes, answers, ..] = call.arguments;
    await_complete();
    let mut pins = Pins::new(agent);
    let pages = whole(at, bytes).len() / PAGE_BYTES;
    // Answers that are not pinned are not corrected.
    let pinned = pins.left().min(pages as u64) as usize;
    pins.pin(answers, pinned as u64);
    pins::make(agent, call);
    let pages = (0..pinned).map(|page| (page, at as usize));
    for (page, start) in pages.filter(|_| call.result == 0) {
        if agent.pager.is_out(start + page * PAGE_BYTES) {
            // SAFETY: the kernel has just written there, and the page is pinned.
            unsafe { *((answers as usize + page) as *mut u8) &= !1 };
        }
    }
    Outcome::Done
}

/// `mseal`: sealed memory stays in place, and its access stays.
pub fn seal(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let _layout = lock();
    withheld::give_back(&range);
    agent.pager.release(range);
    make(call);
    Outcome::Done
}

/// `shmat`: the pager gives up memory that the call maps over (`SHM_REMAP`).
pub fn attach(agent: &Agent, call: &mut Call) -> Outcome {
    let [segment, at, flags, ..] = call.arguments;
    if flags as i32 & libc::SHM_REMAP == 0 {
        return Outcome::Bare;
    }
    let mut status = std::mem::MaybeUninit::<libc::shmid_ds>::zeroed();
    let ask = [segment, libc::IPC_STAT as u64, status.as_mut_ptr() as u64, 0, 0, 0];
    // SAFETY: the kernel writes the status to the given place; all-zero bytes are a valid status.
    let (result, status) = unsafe { (raw(libc::SYS_shmctl as u64, ask), status.assume_init()) };
    if result < 0 {
        // A program that may not query a segment may not attach it either.
        call.result = result;
        return Outcome::Done;
    }
    let is_rounded = flags as i32 & libc::SHM_RND != 0;
    let start = if is_rounded { at & !(PAGE_BYTES as u64 - 1) } else { at };
    // At another address the kernel refuses the call, and nothing is mapped over.
    let is_over = start.is_multiple_of(PAGE_BYTES as u64);
    let target = if is_over { whole(start, status.shm_segsz as u64) } else { 0..0 };
    let _inside = inside();
    let mut layout = lock();
    let done = make_over(agent, call, target.clone());
    if let Some(layout) = layout.as_mut().filter(|_| done) {
        layout.unreserve(&target);
    }
    Outcome::Done
}

/// Gives the memory of the first argument back to the program, because the kernel uses this memory
/// outside of system calls.
pub fn leave_in(agent: &Agent, call: &Call, bytes: u64) -> Outcome {
    give_back(agent, call.arguments[0], bytes);
    Outcome::Bare
}

/// Gives the adopted pages of a range back to the program.
pub fn give_back(agent: &Agent, at: u64, bytes: u64) {
    await_complete();
    if pins::is_beyond(at, bytes) {
        // The kernel refuses the call.
        return;
    }
    let start = at as usize / PAGE_BYTES * PAGE_BYTES;
    let range = start..whole(at, bytes).end;
    if !range.is_empty() && agent.pager.has_adopted(range.clone()) {
        let _inside = inside();
        let _layout = lock();
        agent.pager.release(range);
    }
}

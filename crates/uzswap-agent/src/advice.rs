//! `madvise`, of memory that is or may be adopted.

use crate::layout::{lock, look_for_holes, make, whole};
use crate::{Agent, inside, looker};
use std::fs;
use std::iter::once;
use std::ops::Range;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_region::{Change, Mode};
use uzswap_sys::map::{self, Mapped, PAGE_BYTES};

/// Since Linux 6.13.
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

/// Advice that `process_madvise` takes for the memory of any process. Before Linux 6.13 it takes
/// only these, even for the calling process.
pub const FOR_ANY_PROCESS: [i32; 4] =
    [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_WILLNEED, MADV_COLLAPSE];
/// The C library's list lacks this newer advice.
const MADV_COLLAPSE: i32 = 25;

pub fn advise(agent: &Agent, call: &mut Call) -> Outcome {
    let range = whole(call.arguments[0], call.arguments[1]);
    let _inside = inside();
    let _layout = lock();
    if !agent.pager.has_adopted(range.clone()) {
        make(call);
        return Outcome::Done;
    }
    match call.arguments[2] as i32 {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_DONTNEED_LOCKED => {
            drop_pages(agent, call, range);
        }
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => populate(agent, call, range),
        libc::MADV_PAGEOUT => {
            // Pages stay if there is no room for their compressed form.
            let _ = agent.pager.page_out(range);
            // `MADV_COLD` is refused for the same memory, so the kernel's answer is the same.
            call.arguments[2] = libc::MADV_COLD as u64;
            make(call);
        }
        // A hint to search for equal pages.
        libc::MADV_MERGEABLE => call.result = look_for_holes(&range),
        // Libraries advise MADV_DONTFORK of memory in use before they hand it to a device.
        libc::MADV_DONTFORK | libc::MADV_WIPEONFORK | MADV_GUARD_INSTALL => {
            agent.pager.release(range);
            make(call);
        }
        MADV_GUARD_REMOVE => remove_guards(agent, call, range),
        // This includes MADV_REMOVE, which the kernel refuses for private memory.
        _ => {
            make(call);
        }
    }
    Outcome::Done
}

/// The kernel's answer to an advice for a part of the program's request.
fn advise_part(bytes: Range<usize>, advice: u64) -> i64 {
    let arguments = [bytes.start as u64, bytes.len() as u64, advice, 0, 0, 0];
    // SAFETY: the program asks for it, and keeps memory that it needs out of the range.
    unsafe { raw(libc::SYS_madvise as u64, arguments) }
}

/// Drops the pages of a range, part by part, as the kernel does: mapping by mapping. If the kernel
/// skips a hole, the answer is an error. If it comes to a mapping that it refuses (locked, of a
/// device), it has dropped the pages before that mapping.
fn drop_pages(agent: &Agent, call: &mut Call, range: Range<usize>) {
    let is_range = [range.start, range.end].iter().all(|end| end.is_multiple_of(PAGE_BYTES));
    if !is_range {
        // The kernel refuses the call, and drops nothing.
        make(call);
        return;
    }
    let [_, _, advice, ..] = call.arguments;
    let mut answer = 0;
    let mut drop = |bytes: Range<usize>, advice: u64| {
        let result = advise_part(bytes, advice);
        answer = if result == 0 { answer } else { result };
        matches!(result, 0 | HOLE)
    };
    let mut at = range.start;
    for part in agent.pager.adopted(range.clone()).into_iter().chain(once(range.end..range.end)) {
        let is_refused = at < part.start && !drop(at..part.start, advice);
        at = part.end;
        if is_refused || part.is_empty() {
            break;
        }
        let is_done = agent.pager.change(part.clone(), Change::Zeroed, || {
            let is_done = drop(part.clone(), libc::MADV_DONTNEED as u64);
            (is_done, is_done)
        });
        if !is_done {
            break;
        }
    }
    call.result = answer;
}

/// Removes the program's guards. Adopted memory has none: any guards there are ours. Like the
/// kernel, this continues behind a hole, and returns an error for the hole at the end.
fn remove_guards(agent: &Agent, call: &mut Call, range: Range<usize>) {
    let advice = call.arguments[2];
    // The kernel may not know this advice, or may refuse such a start.
    call.result = advise_part(range.start..range.start, advice);
    let mut at = range.start;
    for part in agent.pager.adopted(range.clone()).into_iter().chain(once(range.end..range.end)) {
        if at < part.start && matches!(call.result, 0 | HOLE) {
            let result = advise_part(at..part.start, advice);
            call.result = if result == 0 { call.result } else { result };
        }
        at = part.end;
    }
}

/// The kernel's answer where a part of the range was not mapped.
const HOLE: i64 = -(libc::ENOMEM as i64);

/// The first page of each mapping in a range. Each mapping has its own access.
fn starts_of_mappings(range: &Range<usize>) -> Vec<usize> {
    if range.len() == PAGE_BYTES {
        return vec![range.start];
    }
    looker::apart(|| {
        let text = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mapped = text.lines().filter_map(Mapped::parse).map(|one| one.range);
        let inside = mapped.filter(|mapped| map::overlap(mapped, range));
        inside.map(|mapped| mapped.start.max(range.start)).collect()
    })
}

/// Populates a range. Adopted pages come in when they are touched, because all of them might not
/// fit. The kernel still checks the arguments.
fn populate(agent: &Agent, call: &mut Call, range: Range<usize>) {
    let [_, _, advice, ..] = call.arguments;
    let mut at = range.start;
    for part in agent.pager.adopted(range.clone()).into_iter().chain(once(range.end..range.end)) {
        let mut populate = |bytes: Range<usize>| {
            call.result = advise_part(bytes, advice);
            call.result
        };
        if at < part.start && populate(at..part.start) != 0 {
            return;
        }
        // The kernel first checks the access, and then finds that a page is absent.
        const ABSENT: i64 = -(libc::EFAULT as i64);
        let asks = !part.is_empty() && crate::mode() != Mode::Protection;
        for page in asks.then(|| starts_of_mappings(&part)).into_iter().flatten() {
            if !matches!(populate(page..page + PAGE_BYTES), 0 | ABSENT) {
                return;
            }
        }
        at = part.end;
    }
    call.result = 0;
}

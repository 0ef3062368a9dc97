//! Looks into another process's memory (`process_vm_readv`, `process_vm_writev`). The kernel does
//! not see that process's absent pages. If that process is of the tree, its agent brings the pages
//! in and pins them, for one part of the call at a time ([`crate::guests`]).
//!
//! For a read, the kernel's call comes first, and then the request for the pages at which the
//! kernel stopped. With every means by which pages leave, such a read sees no wrong bytes. For a
//! write, the request comes first. With means that copy a page before it leaves, a write after the
//! copy would be lost.
//!
//! In a program that is not taken over, and may be small, the preloaded library calls this file.

use crate::buffers::pinned;
use crate::pins::{BYTES_MAX, GivenMemory, Pins, make_once};
use crate::{AGENT, Agent, inside, layout, stage, tree};
use libc::c_long;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_calls::table::Buffer::Vector;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_region::Means;
use uzswap_sys::map::PAGE_BYTES;
use uzswap_sys::{fault_signals, proc_text};
use uzswap_tree::{Host, Setting, VISIT_BYTES_MAX, Visit, clock};

/// The time for which a visitor waits for its host.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time, in milliseconds, for which a visitor waits less for a host that has not answered.
const SILENT: u64 = 10_000;
const PATIENCE_SILENT: Duration = Duration::from_millis(100);
/// The last host that has not answered, by the tree's name, and until when that is remembered.
static SILENT_HOST: AtomicU64 = AtomicU64::new(0);
static SILENT_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The last host that was stopped when this process asked it. This process may be the host's
/// tracer, and would wait for the host again and again.
static STOPPED_HOST: AtomicU64 = AtomicU64::new(0);

const FAULT: i64 = -(libc::EFAULT as i64);
/// The most bytes of a part, wherever in a page the part begins.
const PART_BYTES: u64 = VISIT_BYTES_MAX - PAGE_BYTES as u64;

/// `process_vm_readv`, `process_vm_writev` of a program that was taken over.
pub fn on_call(agent: &Agent, call: &mut Call) -> Outcome {
    layout::await_complete();
    match make(Some(agent), host_of(call), call) {
        Some(result) => {
            call.result = result;
            Outcome::Done
        }
        None => pinned(agent, call, &[Vector(1, 2), Vector(3, 4)]),
    }
}

/// Makes a call of a program that was not taken over, or is left alone. `false` if the caller has
/// to make it.
pub unsafe extern "C" fn on_early_call(
    number: c_long,
    arguments: &[u64; 6],
    result: &mut c_long,
) -> bool {
    let is_seen = || AGENT.get().is_some() && !stage::is_left();
    let is_other = AGENT.get().is_some() && fault_signals::is_other_process();
    if is_seen() || crate::is_inside() || is_other {
        return false;
    }
    let call = Call { number: number as u64, arguments: *arguments, result: 0 };
    let made = host_of(&call).and_then(|host| make(None, Some(host), &call));
    made.inspect(|made| *result = *made);
    // If the program was taken over during the call, its own memory may have been absent.
    made.is_some() && !is_seen()
}

fn host_of(call: &Call) -> Option<Host<'static>> {
    tree()?.host(call.arguments[0] as u32)
}

/// Makes a call. `None` if the call moves nothing, if its lists cannot be read, or if the kernel
/// refuses it. Then the call was not made.
fn make(agent: Option<&Agent>, host: Option<Host<'_>>, call: &Call) -> Option<i64> {
    let [_, here, here_count, there, there_count, flags] = call.arguments;
    let mut lists = agent.map(Pins::new);
    if let Some(lists) = &mut lists {
        for (at, count) in [(here, here_count), (there, there_count)] {
            lists.pin(at, count.saturating_mul(size_of::<libc::iovec>() as u64));
        }
    }
    let here = GivenMemory::list(here, here_count)?;
    let there = GivenMemory::list_of_other(there, there_count)?;
    if flags != 0 || here.bytes() == 0 || there.bytes() == 0 {
        return None;
    }
    let is_whole = host.is_none() || is_read(call);
    let made = is_whole.then(|| make_whole(agent, host, call, (here, there))).flatten();
    made.or_else(|| Some(in_parts(agent, host, call, (Cursor::new(here), Cursor::new(there)))))
}

/// Makes a call as the program does. `None` if its buffers are too long, or if a host has to bring
/// pages in.
fn make_whole(
    agent: Option<&Agent>,
    host: Option<Host<'_>>,
    call: &Call,
    (here, there): (GivenMemory, GivenMemory),
) -> Option<i64> {
    let mut pins = agent.map(Pins::new);
    if let Some(pins) = &mut pins {
        here.parts().for_each(|(at, bytes)| _ = pins.pin(at, bytes));
        // The other process may be this one.
        let own = there.parts().filter(|_| host.is_none());
        own.for_each(|(at, bytes)| _ = pins.pin(at, bytes));
        if pins.left() == 0 {
            return None;
        }
    }
    let mut whole = *call;
    make_once(&mut whole);
    let is_all = whole.result == here.bytes().min(there.bytes()) as i64;
    let is_refused = whole.result < 0 && whole.result != FAULT;
    (is_all || is_refused || host.is_none()).then_some(whole.result)
}

fn is_read(call: &Call) -> bool {
    call.number as c_long == libc::SYS_process_vm_readv
}

fn in_parts(
    agent: Option<&Agent>,
    host: Option<Host<'_>>,
    call: &Call,
    (mut ours, mut theirs): (Cursor, Cursor),
) -> i64 {
    let mut done = 0;
    while let (Some((here, room)), Some((there, more))) = (ours.rest(), theirs.rest()) {
        let bytes = room.min(more).min(PART_BYTES).min(BYTES_MAX - done as u64);
        if bytes == 0 {
            break;
        }
        let mut pins = agent.map(Pins::new);
        if let Some(pins) = &mut pins {
            pins.pin(here, bytes);
            if host.is_none() {
                pins.pin(there, bytes);
            }
        }
        let part = VisitedPart { call, here, there, bytes };
        let result = host.map_or_else(|| part.move_bytes(0, bytes), |host| part.visit(host));
        if result < 0 && done == 0 {
            return result;
        }
        done += result.max(0);
        if result != bytes as i64 {
            break;
        }
        ours.go(bytes);
        theirs.go(bytes);
    }
    done
}

/// A part of a call: bytes in one piece in both processes.
struct VisitedPart<'a> {
    call: &'a Call,
    here: u64,
    there: u64,
    bytes: u64,
}

impl VisitedPart<'_> {
    /// Moves the part, with pages that a host brings in.
    fn visit(&self, host: Host<'_>) -> i64 {
        let mut done = 0;
        if is_read(self.call) {
            let result = self.move_bytes(0, self.bytes);
            if result == self.bytes as i64 || result < 0 && result != FAULT {
                return result;
            }
            done = result.max(0) as u64;
        }
        while done < self.bytes {
            let left = self.bytes - done;
            // No signal's handler may leave the call while pages of another process are pinned.
            let _inside = inside();
            let visit = ask(host, self.there.wrapping_add(done), left);
            let most = match &visit {
                Some(visit) => visit.bytes(),
                None if is_read(self.call) || !may_write_unasked() => 0,
                None => left,
            };
            let result = if most == 0 { FAULT } else { self.move_bytes(done, most) };
            done += result.max(0) as u64;
            if result < most as i64 || most == 0 {
                return if done > 0 { done as i64 } else { result };
            }
        }
        done as i64
    }

    /// Moves bytes behind those that were moved already.
    fn move_bytes(&self, done: u64, bytes: u64) -> i64 {
        let part = |at: u64| {
            let start = at.wrapping_add(done);
            libc::iovec { iov_base: start as *mut _, iov_len: bytes as usize }
        };
        let (ours, theirs) = (part(self.here), part(self.there));
        let [process, .., flags] = self.call.arguments;
        let arguments = [process, &raw const ours as u64, 1, &raw const theirs as u64, 1, flags];
        // SAFETY: a part of the program's request.
        unsafe { raw(self.call.number, arguments) }
    }
}

/// Asks a host for pages. `None` if it does not answer.
fn ask(host: Host<'_>, from: u64, bytes: u64) -> Option<Visit<'_>> {
    let name = host.name().bits();
    let is_stopped = || proc_text::is_stopped(host.name().number(), host.thread());
    if STOPPED_HOST.load(Relaxed) == name && is_stopped() {
        return None;
    }
    let is_silent = SILENT_HOST.load(Relaxed) == name && clock() < SILENT_UNTIL.load(Relaxed);
    let patience = if is_silent { PATIENCE_SILENT } else { PATIENCE };
    let visit = host.ask((from, bytes), patience, is_stopped);
    if visit.is_some() {
        let _ = SILENT_HOST.compare_exchange(name, 0, Relaxed, Relaxed);
    } else if is_stopped() {
        STOPPED_HOST.store(name, Relaxed);
    } else {
        SILENT_UNTIL.store(clock() + SILENT, Relaxed);
        SILENT_HOST.store(name, Relaxed);
    }
    visit
}

/// True if the kernel does not move a page away while it writes the page for another process. A
/// page that is copied before it leaves would lose the write.
fn may_write_unasked() -> bool {
    let means = tree().and_then(|tree| tree.table().setting(Setting::Means));
    means.is_some_and(|means| means == Means::Moves.name())
}

/// A place in a list of buffers.
struct Cursor {
    list: GivenMemory,
    at: u64,
    moved: u64,
}

impl Cursor {
    fn new(list: GivenMemory) -> Self {
        let mut cursor = Self { list, at: 0, moved: 0 };
        cursor.go(0);
        cursor
    }

    /// The rest of the buffer in which the cursor is.
    fn rest(&self) -> Option<(u64, u64)> {
        let (at, bytes) = self.list.part(self.at)?;
        Some((at.wrapping_add(self.moved), bytes.checked_sub(self.moved)?))
    }

    /// Advances by a number of bytes that the buffer has, and past empty buffers.
    fn go(&mut self, bytes: u64) {
        self.moved += bytes;
        while self.list.part(self.at).is_some_and(|(_, bytes)| self.moved == bytes) {
            self.at += 1;
            self.moved = 0;
        }
    }
}

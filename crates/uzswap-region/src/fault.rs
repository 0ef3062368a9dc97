//! A fault: **start here**.
//!
//! ```text
//! address → region → the page's word: untouched | staged | stored → Busy
//!   untouched   the zero page, or a page of zeros for a write
//!   staged      move the page back from its frame
//!   stored      load it from the cache, copy it in; in order: many at once
//! → Resident, wake the threads that wait
//! ```
//! This code runs in the thread that faulted, on a stack of ours with all signals blocked, or in a
//! handler thread. Nothing allocates (except the index's epochs, at a thread's first fault),
//! nothing logs, and nothing takes a lock that all threads take. A page that cannot be loaded ends
//! the process with a message, because the program would see wrong bytes.

#![expect(
    unsafe_code,
    reason = "pages are moved from and to raw memory: the thread that made a page's word `Busy` has the page alone"
)]

use crate::core::Inner;
use crate::core::registry;
use crate::core::space::Space;
use crate::lane::{Count, Lane};
use crate::on_fork::OnFork;
use crate::page::transition::{FILLED, LOADED, OPENED, TAKEN_BACK, UNCHANGED};
use crate::page::word::{Kind, Word};
use crate::staging::BATCH;
use rustix::io::Errno;
use std::convert::Infallible;
use std::fmt::{self, Write};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::{Error, Load, PAGE_BYTES, Page};
use uzswap_policy::ahead::{self, NORMAL, RANDOM, WRITES, Way};
use uzswap_sys::uffd::Fault;
use uzswap_trace::Log;

/// The most pages that a lane charges at a time: all lanes together charge a 16th of the memory at
/// most, or one page each.
const CREDIT_MAX: i64 = 32;

/// The content of fresh memory.
static ZEROS: Page = [0; PAGE_BYTES];

/// Serves a SIGBUS; `false` if the fault is not ours.
pub(crate) fn serve(fault: Fault) -> bool {
    let Some(space) = registry::find(fault.address) else { return false };
    if space.pager.check_process().is_err() {
        return false; // A region of the parent's had this address.
    }
    let page = space.page_of(fault.address);
    if space.is_window() && space.load(page).kind() == Kind::Untouched {
        return false; // Memory of the program's own, which is not adopted.
    }
    space.pager.fault(space, page, fault);
    true
}

/// The room for a page that comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Credit {
    /// The thread waits for room.
    Awaited,
    /// The thread takes the room, beyond the budget if need be, because others wait for this
    /// thread.
    Taken,
}

impl Inner {
    /// Brings a page in.
    pub(crate) fn fault(&self, space: &Space, page: u32, fault: Fault) {
        let _own_time = self.log.as_ref().map(Log::own_time);
        loop {
            let word = space.load(page);
            match word.kind() {
                Kind::Busy => space.wait(page),
                // Another thread has just brought the page in, or is opening it.
                Kind::Resident if self.door.may_be_absent() => return,
                Kind::Resident => {
                    if space.take(page, word) {
                        return match word.has(Word::GUARDED) {
                            true => self.let_write(space, page, word),
                            false => self.look_again(space, page, word),
                        };
                    }
                }
                // The program has unmapped the page, or the page was released.
                Kind::Untouched if space.is_window() => return,
                Kind::Untouched | Kind::Staged | Kind::Stored | Kind::Empty => {
                    if space.take(page, word) {
                        return self.fill(space, page, word, (fault, Credit::Awaited));
                    }
                }
            }
        }
    }

    /// Serves a fault at a page that is resident, because another thread has just brought it in.
    fn look_again(&self, space: &Space, page: u32, word: Word) {
        self.check_present(space, page);
        space.put(page, UNCHANGED, word);
    }

    /// Ends the process if a page is absent whose word was `Resident` before we made it `Busy`. The
    /// page's content is lost, and zeros would be wrong.
    pub(crate) fn check_present(&self, space: &Space, page: u32) {
        match self.door.pagemap().has_page(space.address(page)) {
            Ok(true) => {}
            Ok(false) => self.die(
                space,
                page,
                &"its memory is gone: the program gave it to the kernel (madvise, munmap), or uzswap has a \
                bug; to drop pages, call the region's advise",
            ),
            Err(error) => self.die(space, page, &Refused("find", &error)),
        }
    }

    /// Serves a write to a guarded page: lets the program write to the page and, if it writes in
    /// order, to the pages behind.
    fn let_write(&self, space: &Space, page: u32, word: Word) {
        let mut lane = self.lanes.here();
        let (most, way) = lane.streams.window(space.id | WRITES, page, NORMAL);
        let mut words = [word; BATCH];
        let is_guarded = |was: Word| was.kind() == Kind::Resident && was.has(Word::GUARDED);
        let seen = |at: usize, was| words[at] = was;
        let pages = take_neighbours(space, page, (most, way), is_guarded, seen);
        let (at, count) = (space.address(pages.start), pages.len());
        let done = self.uffd().protect(at..at + count * PAGE_BYTES, false);
        for (page, was) in (0..count).filter_map(|at| Some((way.from(page, at)?, words[at]))) {
            // An error (the address space is being changed): the next write is a fault again.
            let is = if done.is_ok() { was.without(Word::GUARDED).with(Word::STALE) } else { was };
            space.put(page, OPENED, is);
        }
        lane.count(Count::Faults, 1);
        lane.count(Count::FaultsGuarded, 1);
        lane.streams.brought(space.id | WRITES, page, count, way);
    }

    /// Brings a page in that we have made `Busy`.
    pub(crate) fn fill(
        &self,
        space: &Space,
        page: u32,
        word: Word,
        (fault, credit): (Fault, Credit),
    ) {
        if let Some(log) = &self.log {
            self.note_touch(log, space, page, word, fault);
        }
        let stale = if fault.is_write { Word::STALE } else { 0 };
        if word.kind() == Kind::Staged {
            // A fork takes all lanes, so no child finds a page half brought in.
            let mut lane = self.lanes.here();
            self.take_back(space, page, word.frame());
            // A move removes the guard.
            let copy = word.without(Word::GUARDED).copy_bits();
            let copy = if copy == 0 { 0 } else { copy | stale };
            let level = self.returns.level_from_staging(word);
            let is = Word::RESIDENT.with(Word::USED | copy).with_level(level);
            space.put(page, TAKEN_BACK, is);
            lane.count(Count::Faults, 1);
            lane.count(Count::FaultsStaged, 1);
            return;
        }
        let mut lane = self.lane_with_credit(space, page, credit);
        lane.count(Count::Faults, 1);
        let (window, way) = lane.streams.window(space.id, page, space.advice.load(Relaxed));
        let window = window.max(self.door.least_window()).min(self.window_max());
        let ahead = way.from(page, window).filter(|ahead| *ahead < space.pages());
        let is_stream = window == BATCH && word.kind() == Kind::Stored;
        if let (true, Some(ahead)) = (is_stream, ahead) {
            // The request comes before our own window is read, so that both windows are decoded at
            // the same time.
            let back = if way == Way::Up { 0 } else { window as u32 - 1 };
            self.ahead.ask(space.id, ahead.saturating_sub(back));
        }
        let mut pages = match window {
            1 => 0,
            more => self.fill_many(&mut lane, space, page, (more, way), (word, stale)),
        };
        if pages == 0 {
            lane.credit -= 1;
            self.fill_one(&mut lane, space, page, (word, stale));
            pages = 1;
        }
        lane.count(Count::Around, pages as u64 - 1);
        if space.advice.load(Relaxed) != RANDOM {
            lane.streams.brought(space.id, page, pages, way);
        }
        if is_stream && ahead.is_some() {
            // The page at which the stream continues after the window ahead.
            lane.streams.expect(space.id, way.from(page, 2 * window), pages, way);
        }
    }

    /// The most pages to bring in together. One if each touch must be seen.
    fn window_max(&self) -> usize {
        match self.log {
            Some(_) => 1,
            None => ahead::window_max(self.capacity() as usize, self.lanes.len()),
        }
    }

    /// Makes sure that a lane has at least one charged page; false without room.
    pub(crate) fn has_credit(&self, lane: &mut Lane) -> bool {
        if lane.credit == 0 {
            let all = 16 * self.lanes.len() as i64;
            let credit = (self.budget.limit() / all).clamp(1, CREDIT_MAX);
            lane.credit = if self.budget.try_charge(credit) { credit } else { 0 };
        }
        lane.credit > 0
    }

    /// A lane with at least one charged page. May wait for reclaim, without a lane.
    fn lane_with_credit(
        &self,
        space: &Space,
        page: u32,
        credit: Credit,
    ) -> std::sync::MutexGuard<'_, Lane> {
        let mut waited = 0;
        loop {
            let mut lane = self.lanes.here();
            if self.has_credit(&mut lane) {
                lane.count(Count::FaultsWaited, waited);
                return lane;
            }
            if credit == Credit::Taken {
                self.budget.charge_anyway(1);
                self.budget.ring();
                lane.credit += 1;
                return lane;
            }
            drop(lane);
            waited = 1;
            if self.on_fork == OnFork::Whole && self.reclaim_here() {
                continue;
            }
            if !self.budget.charge_patiently() {
                self.die_full(space, page);
            }
            self.lanes.here().credit += 1;
        }
    }

    /// Ends the process because there is no room for a page.
    pub(crate) fn die_full(&self, space: &Space, page: u32) -> ! {
        self.die(space, page, &Full(self))
    }

    /// Moves a page back from its frame, or copies it.
    pub(crate) fn take_back(&self, space: &Space, page: u32, frame: usize) {
        if self.door.move_back(self, space, page, frame) {
            return self.staging.leave(frame);
        }
        self.budget.charge_anyway(1);
        self.copy_in(space, page, std::slice::from_ref(self.staging.page(frame)), 0);
        self.staging.disown(frame, (space.id, page));
    }

    /// Copies pages to places without pages, guarded unless `guard` is 0.
    pub(crate) fn copy_in(&self, space: &Space, page: u32, from: &[Page], guard: u32) {
        let at = space.address(page);
        let Err(error) = self.door.copy_in(at, from, guard != 0) else { return };
        if !space.is_window() || from.len() == 1 {
            self.die(space, page, &Refused("copy", &error));
        }
        // A program's range may be several mappings, and one call is for one mapping.
        for (page, from) in (page..).zip(from) {
            let at = space.address(page);
            match self.door.copy_in(at, std::slice::from_ref(from), guard != 0) {
                Err(error) if error.raw_os_error() != Some(Errno::EXIST.raw_os_error()) => {
                    self.die(space, page, &Refused("copy", &error));
                }
                _ => {}
            }
        }
    }

    /// `GUARDED` if a page that comes in for a read should be guarded. Such a page is on the
    /// backing, and storing it again unchanged would write to the backing. In a fork's parent the
    /// guarded page would be shared, and could not be moved before a write.
    fn guard(&self, space: &Space, page: u32, (word, stale): (Word, u32)) -> u32 {
        let is_read = word.kind() == Kind::Stored && stale == 0;
        let guards =
            is_read && self.on_fork == OnFork::Absent && self.cache.is_on_backing(space.key(page));
        if guards { Word::GUARDED } else { 0 }
    }

    fn fill_one(&self, lane: &mut Lane, space: &Space, page: u32, (word, stale): (Word, u32)) {
        if word.kind() == Kind::Stored {
            let guard = self.guard(space, page, (word, stale));
            self.returns.count_load();
            self.load(space, page, &mut lane.page);
            self.copy_in(space, page, std::slice::from_ref(&*lane.page), guard);
            let is = Word::RESIDENT.with(Word::USED | Word::KEPT | stale | guard);
            let level = self.returns.level_from_cache(word, self.capacity());
            space.put(page, LOADED, is.with_level(level));
            lane.note_loaded(space.id, page);
            return;
        }
        lane.count(Count::FaultsUntouched, 1);
        let at = space.address(page);
        // A fork does not copy a mapping that has only the kernel's page of zeros: the child would
        // find no page, but its word would say that there is one.
        let is_inherited = self.on_fork == OnFork::Whole;
        if !self.door.let_zeros_in(at..at + PAGE_BYTES, stale != 0 || is_inherited) {
            self.copy_in(space, page, std::slice::from_ref(&ZEROS), 0);
        }
        space.put(page, FILLED, Word::RESIDENT.with(Word::USED));
    }

    /// Brings a window of pages in together; returns their number. 0: one page at a time is as
    /// good.
    pub(crate) fn fill_many(
        &self,
        lane: &mut Lane,
        space: &Space,
        page: u32,
        (most, way): (usize, Way),
        (word, stale): (Word, u32),
    ) -> usize {
        let window = lane.window(most, |pages| self.budget.try_charge(pages));
        let Some((at, most)) = window else { return 0 };
        // Each page that is copied in is charged; the lane's credit pays for the first page.
        lane.credit += self.budget.charge_some(most as i64 - lane.credit);
        let most = most.min(lane.credit as usize);
        let is_same = |other: Word| other.kind() == word.kind();
        let taken = take_neighbours(space, page, (most, way), is_same, |_, _| ());
        let (first, count) = (taken.start, taken.len());
        if count == 1 {
            return 0;
        }
        let guard = self.guard(space, page, (word, stale));
        let (start, end) = (space.address(first), space.address(taken.end));
        // SAFETY: the lane's mapped memory, with room for that many pages. We hold the lane's lock,
        // so no other reference exists.
        let pages = unsafe { std::slice::from_raw_parts_mut(at as *mut Page, count) };
        if word.kind() == Kind::Stored {
            self.returns.count_load();
            self.load_many(space, first, pages);
            self.copy_in(space, first, pages, guard);
        } else if !self.door.let_zeros_in(start..end, true) {
            pages.as_flattened_mut().fill(0);
            self.copy_in(space, first, pages, guard);
        }
        lane.credit -= count as i64;
        let is = Word::RESIDENT;
        let (by, is) = match word.kind() {
            Kind::Stored => (LOADED, is.with(Word::KEPT | stale | guard)),
            _ => (FILLED, is),
        };
        // No page counts as used again, not even the requested one. If that page stayed when the
        // others are evicted, it would cut the next pass's windows in two.
        taken.for_each(|page| space.put(page, by, is));
        if word.kind() != Kind::Stored {
            lane.count(Count::FaultsUntouched, 1);
        }
        count
    }

    pub(crate) fn load(&self, space: &Space, page: u32, to: &mut Page) {
        self.check(space, page, self.cache.load(space.key(page), to));
    }

    pub(crate) fn load_many(&self, space: &Space, mut first: u32, mut to: &mut [Page]) {
        while !to.is_empty() {
            let (part, rest) = to.split_at_mut(space.keys_in_order(first).min(to.len()));
            let loaded = |offset, load, _: &mut Page| {
                self.check(space, first + offset as u32, load);
                Ok::<_, Infallible>(())
            };
            let count = part.len();
            let Ok(()) = self.cache.load_many(space.key(first), part, loaded);
            (first, to) = (first + count as u32, rest);
        }
    }

    /// Ends the process if the cache did not give the page back.
    fn check(&self, space: &Space, page: u32, load: Result<Load, Error>) {
        match load {
            Ok(Load::Hit) => {}
            Ok(Load::Absent) => self.die(space, page, &"its stored copy is gone: a bug of uzswap"),
            Err(Error::Damaged { what, .. }) => self.die(space, page, &Damaged(what)),
            Err(Error::Backing { source, .. }) => self.die(space, page, &Unread(&source)),
        }
    }

    /// Copies a page that is not in the region, and does not bring it in. `false` if it is in the
    /// region, or was never touched. No page goes out during the call ([`Self::steady`]).
    pub(crate) fn peek(&self, space: &Space, page: u32, to: &mut Page) -> io::Result<bool> {
        loop {
            let word = space.load(page);
            match word.kind() {
                Kind::Untouched | Kind::Resident | Kind::Empty => return Ok(false),
                Kind::Busy => space.wait(page),
                Kind::Staged | Kind::Stored if !space.take(page, word) => {}
                kind => {
                    let read = match kind {
                        Kind::Staged => {
                            to.copy_from_slice(self.staging.page(word.frame()));
                            Ok(true)
                        }
                        _ => match self.cache.load(space.key(page), to) {
                            Ok(Load::Hit) => Ok(true),
                            Ok(Load::Absent) | Err(Error::Damaged { .. }) => Err(Errno::IO.into()),
                            Err(Error::Backing { source, .. }) => Err(source),
                        },
                    };
                    space.put(page, UNCHANGED, word);
                    return read;
                }
            }
        }
    }

    /// Ends the process because a page cannot be given back. Allocates nothing: the thread may be
    /// in the allocator.
    pub(crate) fn die(&self, space: &Space, page: u32, reason: &dyn fmt::Display) -> ! {
        let (base, bytes) = (space.base(), space.bytes());
        let offset = page as usize * PAGE_BYTES;
        say(format_args!(
            "region {base:#x} of {bytes} bytes: the page at byte {offset} cannot be given back: \
             {reason}"
        ));
        std::process::abort()
    }
}

/// Makes the neighbours of a page that we have made `Busy` also `Busy`: up to `most` pages in all,
/// in one direction, while `may` allows their words. `seen` gets each word with the distance.
/// Returns all pages that we have now.
fn take_neighbours(
    space: &Space,
    page: u32,
    (most, way): (usize, Way),
    may: impl Fn(Word) -> bool,
    mut seen: impl FnMut(usize, Word),
) -> Range<u32> {
    let mut taken = page..page + 1;
    for distance in 1..most {
        let other = way.from(page, distance).filter(|other| *other < space.pages());
        let Some(other) = other else { break };
        let word = space.load(other);
        if !may(word) || !space.take(other, word) {
            break;
        }
        seen(distance, word);
        taken = taken.start.min(other)..taken.end.max(other + 1);
    }
    taken
}

/// The kernel holds another reference to the page that was to be moved.
pub(crate) fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// Writes a line to standard error. Allocates nothing, and cuts a text that is too long.
pub(crate) fn say(text: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], len: 0 };
    // An error of the line means that it was cut. If the write fails, the message has no reader.
    let _ = writeln!(line, "uzswap: {text}");
    let _ = rustix::io::write(rustix::stdio::stderr(), &line.bytes[..line.len]);
}

struct Full<'a>(&'a Inner);
pub(crate) struct Refused<'a>(pub(crate) &'static str, pub(crate) &'a io::Error);
struct Damaged(&'static str);
struct Unread<'a>(&'a io::Error);

impl fmt::Display for Full<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1 << 20;
        let Self(pager) = self;
        let all = pager.budget.bytes() / MIB;
        let pages = pager.budget.charged().max(0) as u64 * PAGE_BYTES as u64 / MIB;
        let cache = pager.cache.memory_bytes() as u64 / MIB;
        write!(
            f,
            "no memory is left for it: of {all} MiB, pages that cannot leave have {pages} and \
             compressed pages with their tables {cache}, and the backing is full; raise the budget or give a larger \
             backing"
        )
    }
}

impl fmt::Display for Refused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the kernel does not {} it in: {}", self.0, ErrorNumber(self.1))
    }
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its stored copy is damaged ({}); check the memory and the backing", self.0)
    }
}

impl fmt::Display for Unread<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = ErrorNumber(self.0);
        write!(f, "the backing cannot be read: {why}; check the disk, or the store of --backing")
    }
}

/// Displays an error as its number, because the text of the error would be allocated.
pub(crate) struct ErrorNumber<'a>(pub(crate) &'a io::Error);

impl fmt::Display for ErrorNumber<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.raw_os_error() {
            Some(number) => write!(f, "{} (os error {number})", self.0.kind()),
            None => write!(f, "{}", self.0.kind()),
        }
    }
}

/// A line that is written by one call.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = (self.len + text.len()).min(self.bytes.len());
        let taken = end - self.len;
        self.bytes[self.len..end].copy_from_slice(&text.as_bytes()[..taken]);
        self.len = end;
        Ok(())
    }
}

//! The state of the calling thread.
//!
//! A handler of the program's may interrupt a replaced call and never return (`longjmp`). Then the
//! call is over, and the thread's next call lets go of the pages that it had pinned. A frame that
//! lies deeper than the one of that call cannot be in use any more, unless the thread has several
//! stacks and the call is on another one. Letting go is no harm there: a call that is begun again
//! after a signal, and then meets a page that is out, pins it anew.
//!
//! A call may wait for days with its buffers pinned, in each of many threads. So the pages of long
//! buffers are *reserved* before: all threads together have a part of the budget for them.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_calls::{Frame, raw};
use uzswap_region::Pager;

/// Bytes that are reserved for long buffers.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// The state of one thread. All of it is the thread's own and may be used in a handler.
pub struct Thread {
    /// The thread does something of ours: its system calls are not looked at.
    pub is_inside: Cell<bool>,
    /// It has been looked after: see [`crate::stacks::arm`].
    pub is_armed: Cell<bool>,
    /// The replaced call that it is in, but for handlers that have interrupted one; null: none.
    pub call: Cell<*const Frame>,
    /// Where its list of robust locks begins; 0: not known.
    pub robust: Cell<u64>,
    /// The call whose fast path has pinned `pinned`; 0: none.
    first: Cell<usize>,
    pinned: [Cell<usize>; 4],
    /// Null before the thread has been looked after, and while it ends.
    table: Cell<*const PinTable>,
    /// Counts uses of it.
    uses: Cell<u64>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            is_inside: Cell::new(false),
            is_armed: Cell::new(false),
            call: Cell::new(std::ptr::null()),
            robust: Cell::new(0),
            first: Cell::new(0),
            pinned: [const { Cell::new(0) }; 4],
            table: Cell::new(std::ptr::null()),
            uses: Cell::new(0),
        }
    };
    static PINS: RefCell<Option<Box<PinTable>>> = const { RefCell::new(None) };
}

/// The calling thread's.
#[inline(always)]
pub fn with<R>(look: impl FnOnce(&Thread) -> R) -> R {
    THREAD.with(look)
}

impl Thread {
    /// Notes the pages that the fast path of a call has pinned. `false`: another call's are noted
    /// already, which this one has interrupted or comes after.
    #[inline(always)]
    pub fn pin(&self, call: usize, one: &Range<usize>, other: &Range<usize>) -> bool {
        if self.first.get() != 0 {
            return false;
        }
        let [a, b, c, d] = &self.pinned;
        a.set(one.start);
        b.set(one.end);
        c.set(other.start);
        d.set(other.end);
        self.first.set(call);
        true
    }

    /// Unpins the pages of the fast path of a call, unless that was done.
    #[inline(always)]
    pub fn unpin(&self, call: usize) {
        if self.first.get() != call {
            return;
        }
        let [a, b, c, d] = &self.pinned;
        let (one, other) = (a.get()..b.get(), c.get()..d.get());
        self.first.set(0);
        Pager::unpin(other);
        Pager::unpin(one);
    }

    /// Unpins the pages of the fast path of a call that is over.
    fn end_before(&self, here: usize) {
        let first = self.first.get();
        if first != 0 && is_over(first, here) {
            self.unpin(first);
        }
    }
}

/// Calls of one thread that may have something pinned at a time: those that are interrupted by
/// handlers, and those that are over.
const CALLS: usize = 8;

/// The pins of a thread's calls.
struct PinTable([Pins; CALLS]);

/// The pins of a call. A handler may use others of the thread's table at any time.
pub struct Pins {
    /// Which use of the thread's table this is; 0: it is free.
    id: AtomicU64,
    call: Cell<usize>,
    few: [Cell<(usize, usize)>; 4],
    count: Cell<usize>,
    /// In our own code alone: no handler runs.
    many: RefCell<Vec<Range<usize>>>,
    /// Memory that was mapped for the call alone; 0 bytes: none.
    mapping: Cell<(usize, usize)>,
    reserved: Cell<u64>,
}

impl Pins {
    fn new() -> Self {
        let few = [const { Cell::new((0, 0)) }; 4];
        let (id, call, count) = (AtomicU64::new(0), Cell::new(0), Cell::new(0));
        let (many, mapping, reserved) = (RefCell::default(), Cell::new((0, 0)), Cell::new(0));
        Self { id, call, few, count, many, mapping, reserved }
    }

    /// Notes a range.
    fn add(&self, range: Range<usize>) {
        let count = self.count.get();
        match self.few.get(count) {
            Some(place) => {
                place.set((range.start, range.end));
                self.count.set(count + 1);
            }
            None => {
                let _inside = crate::inside();
                self.many.borrow_mut().push(range);
            }
        }
    }

    /// Lets go of all of it.
    fn end(&self) {
        let count = self.count.replace(0);
        for place in self.few.iter().take(count) {
            let (start, end) = place.get();
            Pager::unpin(start..end);
        }
        if count == self.few.len() {
            let _inside = crate::inside();
            self.many.borrow_mut().drain(..).for_each(Pager::unpin);
        }
        let (at, bytes) = self.mapping.replace((0, 0));
        unmap(at, bytes);
        give_back(self.reserved.replace(0));
        self.id.store(0, Relaxed);
    }
}

impl Drop for PinTable {
    /// As the thread ends, which it may do in the midst of a call.
    fn drop(&mut self) {
        let _ = THREAD.try_with(|thread| thread.table.set(std::ptr::null()));
        let used = self.0.iter().filter(|pins| pins.id.load(Relaxed) != 0);
        used.for_each(Pins::end);
    }
}

/// A use of the thread's table. Its pages are unpinned when this is dropped, or once the thread
/// makes another call and this one never came back.
pub struct Use {
    pins: *const Pins,
    id: u64,
    /// Where the thread has no table, or it is full: nobody else knows of these.
    own: Vec<Range<usize>>,
    mapping: (usize, usize),
    reserved: u64,
}

/// Gives reserved bytes back. A child of a fork begins with none, whatever its parent had.
fn give_back(bytes: u64) {
    if bytes > 0 {
        let _ = RESERVED.fetch_update(Relaxed, Relaxed, |all| Some(all.saturating_sub(bytes)));
    }
}

/// In a child, which has none of the threads that reserved bytes.
pub fn forget_reserved() {
    RESERVED.store(0, Relaxed);
}

fn unmap(at: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: mapped for a call that is over, and known to nobody else.
        unsafe { raw(libc::SYS_munmap as u64, [at as u64, bytes as u64, 0, 0, 0, 0]) };
    }
}

impl Use {
    /// Of the call that the thread is in.
    pub fn begin() -> Self {
        THREAD.with(|thread| {
            let id = thread.uses.get() + 1;
            thread.uses.set(id);
            let call = thread.call.get() as usize;
            // SAFETY: null, or the thread's own, which stays until it ends.
            let table = unsafe { thread.table.get().as_ref() };
            let is_taken = |pins: &&Pins| pins.id.compare_exchange(0, id, Relaxed, Relaxed).is_ok();
            let pins = table.and_then(|table| table.0.iter().find(is_taken));
            if let Some(pins) = pins {
                pins.call.set(call);
            }
            Self {
                pins: pins.map_or(std::ptr::null(), std::ptr::from_ref),
                id,
                own: Vec::new(),
                mapping: (0, 0),
                reserved: 0,
            }
        })
    }

    /// Notes a range that is pinned now.
    pub fn note(&mut self, range: Range<usize>) {
        // SAFETY: as above; this is of the thread that made it.
        match unsafe { self.pins.as_ref() } {
            Some(pins) => pins.add(range),
            None => {
                let _inside = crate::inside();
                self.own.push(range);
            }
        }
    }
}

impl Use {
    /// Reserves bytes for a long buffer, of `all` that there are; how many there were yet.
    pub fn reserve(&mut self, bytes: u64, all: u64) -> u64 {
        let granted = |reserved: u64| bytes.min(all.saturating_sub(reserved));
        let reserved = RESERVED.fetch_update(Relaxed, Relaxed, |reserved| {
            Some(reserved + granted(reserved)).filter(|after| *after != reserved)
        });
        let granted = reserved.map_or(0, granted);
        // SAFETY: as above.
        match unsafe { self.pins.as_ref() } {
            Some(pins) => pins.reserved.update(|before| before + granted),
            None => self.reserved += granted,
        }
        granted
    }

    /// Notes memory that was mapped for the call alone.
    pub fn note_mapping(&mut self, range: Range<usize>) {
        let mapping = (range.start, range.len());
        // SAFETY: as above.
        match unsafe { self.pins.as_ref() } {
            Some(pins) => pins.mapping.set(mapping),
            None => self.mapping = mapping,
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // SAFETY: as above.
        let pins = unsafe { self.pins.as_ref() };
        pins.filter(|pins| pins.id.load(Relaxed) == self.id).into_iter().for_each(Pins::end);
        unmap(self.mapping.0, self.mapping.1);
        give_back(self.reserved);
        if !self.own.is_empty() {
            let _inside = crate::inside();
            std::mem::take(&mut self.own).into_iter().for_each(Pager::unpin);
        }
    }
}

/// Makes the thread's table. In our own code.
pub fn prepare() {
    let made = PINS.try_with(|pins| {
        let mut pins = pins.borrow_mut();
        let table =
            pins.get_or_insert_with(|| Box::new(PinTable(std::array::from_fn(|_| Pins::new()))));
        std::ptr::from_ref(&**table)
    });
    // An error: the thread is ending.
    if let Ok(table) = made {
        THREAD.with(|thread| thread.table.set(table));
    }
}

/// Unpins the pages of calls that are over, now that the thread makes another one.
pub fn end_calls_before(here: usize) {
    THREAD.with(|thread| {
        thread.end_before(here);
        // SAFETY: as above.
        let Some(table) = (unsafe { thread.table.get().as_ref() }) else { return };
        for pins in &table.0 {
            if pins.id.load(Relaxed) != 0 && is_over(pins.call.get(), here) {
                pins.end();
            }
        }
    });
}

/// Stacks are at most so long, as far as is known here.
const STACK_MAX: usize = 8 << 20;

/// True if a call cannot be under way any more while the thread makes another one.
fn is_over(call: usize, here: usize) -> bool {
    call < here && here - call < STACK_MAX
}

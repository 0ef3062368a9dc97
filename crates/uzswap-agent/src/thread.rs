//! The state of the calling thread.
//!
//! A handler of the program's may interrupt a replaced call and never return (`longjmp`). Then the
//! call is over, and the thread's next call unpins its pages. A call is over if its frame lies
//! deeper in the stack than that of the next call. This may be wrong if the thread has several
//! stacks. Unpinning is harmless then: a call that is restarted after a signal, and meets an absent
//! page, pins it anew.
//!
//! Each of many threads may wait for days in a call with its buffers pinned. Therefore the agent
//! first *reserves* long buffers, from a part of the budget that all threads share.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_calls::{CallFrame, raw};
use uzswap_region::Pager;
use uzswap_sys::fault_signals;

/// Bytes that are reserved for long buffers.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// The state of one thread. All of it is the thread's own and may be used in a handler.
pub struct Thread {
    /// The thread runs our code: the agent does not look at its system calls.
    pub is_inside: Cell<bool>,
    /// The kernel knows our signal stack for this thread: see [`crate::stacks::arm`].
    pub is_armed: Cell<bool>,
    /// The replaced call that the thread is in; null if there is none, or if a handler has
    /// interrupted the call.
    pub call: Cell<*const CallFrame>,
    /// The start of the thread's list of robust locks; 0 if unknown.
    pub robust: Cell<u64>,
    /// The address of the last faulting fetch of an instruction, if we have not served that fault:
    /// see [`crate::withheld`].
    pub fetched: Cell<usize>,
    /// The call whose fast path has pinned `pinned`; 0 if none has.
    first: Cell<usize>,
    pinned: [Cell<usize>; 4],
    /// Null before [`prepare`], and while the thread ends.
    table: Cell<*const PinTable>,
    /// Counts uses of the table.
    uses: Cell<u64>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            is_inside: Cell::new(false),
            is_armed: Cell::new(false),
            call: Cell::new(std::ptr::null()),
            robust: Cell::new(0),
            fetched: Cell::new(0),
            first: Cell::new(0),
            pinned: [const { Cell::new(0) }; 4],
            table: Cell::new(std::ptr::null()),
            uses: Cell::new(0),
        }
    };
    static PINS: RefCell<Option<Box<PinTable>>> = const { RefCell::new(None) };
}

/// Calls `look` with the calling thread's state.
#[inline(always)]
pub fn with<R>(look: impl FnOnce(&Thread) -> R) -> R {
    THREAD.with(look)
}

impl Thread {
    /// Notes the pages that the fast path of a call has pinned. `false` if the pages of another
    /// call are noted, which this call has interrupted, or which was left by a jump.
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

/// Calls of one thread that may have pages pinned: the present one, interrupted ones, and those
/// left by a jump.
const CALLS: usize = 8;

/// The pins of a thread's calls.
struct PinTable([Pins; CALLS]);

/// The pins of a call. A handler may use other entries of the thread's table at any time.
pub struct Pins {
    /// The number of the [`Use`] that has this entry; 0 if it is free.
    id: AtomicU64,
    call: Cell<usize>,
    few: [Cell<(usize, usize)>; 4],
    count: Cell<usize>,
    /// Used only in our own code, where no handler runs.
    many: RefCell<Vec<Range<usize>>>,
    /// Memory that was mapped only for this call; 0 bytes if none was.
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

    /// Unpins all pages of the call, and unmaps the call's mapping.
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
    /// When the thread ends, perhaps within a call.
    fn drop(&mut self) {
        let _ = THREAD.try_with(|thread| thread.table.set(std::ptr::null()));
        let used = self.0.iter().filter(|pins| pins.id.load(Relaxed) != 0);
        used.for_each(Pins::end);
    }
}

/// A use of the thread's table. Dropping it unpins its pages. If its call never returns, the
/// thread's next call unpins them.
pub struct Use {
    pins: *const Pins,
    id: u64,
    /// The pins of a thread without a table, or with a full one. No table has them, so only this
    /// value can unpin them.
    own: Vec<Range<usize>>,
    mapping: (usize, usize),
    reserved: u64,
}

/// Stands for the call of a [`Use`], where a child that shares this memory executes another program
/// by that call.
const CHILDS: usize = usize::MAX;

/// Gives reserved bytes back. A forked child begins with none, whatever its parent had.
fn give_back(bytes: u64) {
    if bytes > 0 {
        let _ = RESERVED.fetch_update(Relaxed, Relaxed, |all| Some(all.saturating_sub(bytes)));
    }
}

/// Forgets the reservations in a forked child, which has none of the threads that made them.
pub fn forget_reserved() {
    RESERVED.store(0, Relaxed);
}

fn unmap(at: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the memory was mapped for a call that is over, and is unknown to other code.
        unsafe { raw(libc::SYS_munmap as u64, [at as u64, bytes as u64, 0, 0, 0, 0]) };
    }
}

impl Use {
    /// Begins a use for the call that the thread is in.
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

    /// Makes the thread's next call end this use, because a child that shares this memory (`vfork`)
    /// executes another program and never returns here. Until then the thread stands still. `false`
    /// if the use is not in the thread's table, so that no later call would find it.
    pub fn leave_to_parent(&self) -> bool {
        // SAFETY: as above.
        let pins = unsafe { self.pins.as_ref() };
        pins.inspect(|pins| pins.call.set(CHILDS)).is_some()
    }

    pub fn note(&mut self, range: Range<usize>) {
        // SAFETY: as above; the thread that made this uses it.
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
    /// Reserves up to `bytes` bytes for a long buffer, of the `all` bytes that the threads share.
    /// Returns the number of bytes that it reserved.
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

/// Pins the pages of the calling thread's calls again, in a forked child, where no page is pinned.
/// A handler may have forked during such a call.
pub fn pin_again() {
    // Another thread of the parent's may have unmapped the page since. Then the call does not need
    // the page.
    let pin = |range| _ = Pager::pin_present(range);
    THREAD.with(|thread| {
        if thread.first.get() != 0 {
            let [a, b, c, d] = thread.pinned.each_ref().map(Cell::get);
            [a..b, c..d].into_iter().for_each(pin);
        }
        // SAFETY: as above.
        let Some(table) = (unsafe { thread.table.get().as_ref() }) else { return };
        for pins in table.0.iter().filter(|pins| pins.id.load(Relaxed) != 0) {
            let few = pins.few.iter().take(pins.count.get()).map(Cell::get);
            few.for_each(|(start, end)| pin(start..end));
            pins.many.borrow().iter().cloned().for_each(pin);
        }
    });
}

/// Makes the thread's table. Called in our own code.
pub fn prepare() {
    let made = PINS.try_with(|pins| {
        let mut pins = pins.borrow_mut();
        let table =
            pins.get_or_insert_with(|| Box::new(PinTable(std::array::from_fn(|_| Pins::new()))));
        std::ptr::from_ref(&**table)
    });
    // This fails only while the thread ends.
    if let Ok(table) = made {
        THREAD.with(|thread| thread.table.set(table));
    }
}

/// Unpins the pages of the thread's earlier calls, which are over when it makes another call.
pub fn end_calls_before(here: usize) {
    THREAD.with(|thread| {
        thread.end_before(here);
        // SAFETY: as above.
        let Some(table) = (unsafe { thread.table.get().as_ref() }) else { return };
        let is_over = |call| match call {
            CHILDS => !fault_signals::is_other_process(),
            _ => is_over(call, here),
        };
        for pins in &table.0 {
            if pins.id.load(Relaxed) != 0 && is_over(pins.call.get()) {
                pins.end();
            }
        }
    });
}

/// A stack is assumed to be no larger.
const STACK_MAX: usize = 8 << 20;

/// True if a call with the frame `call` is over, because the thread makes one at `here`.
fn is_over(call: usize, here: usize) -> bool {
    call < here && here - call < STACK_MAX
}

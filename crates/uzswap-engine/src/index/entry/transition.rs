//! Every change of an entry: **the one place** where the state of a page changes.
//!
//! A transition changes everything that must change together: the word, the second word, the
//! entry's list, and the counters that follow from states. A row of [`TRANSITIONS`] has its
//! arguments, and the states before and after; builds with debug assertions check them. No other
//! code can change an entry: its words are private to `entry`, and lists to this module.
//!
//! A transition takes the locked entry and unlocks it. The second word changes first, and the word
//! when the entry is unlocked. So a process that is killed between these steps leaves the old state
//! with the new second word. That must do no harm in a state whose second word is needed to load
//! the page (`Placed`, `Member`). There are three cases. Either the page is not needed any more,
//! since the caller repeats the call that replaces it. Or the new second word is the same as the
//! old one. Or both old words are noted first (see [`LockedEntry::moved_on_backing`]).
//!
//! A transition that replaces a state returns the old one. The caller frees its object or record,
//! to which the entry no longer refers.

use super::{Entry, EntryLock};
use crate::compress::Codec;
use crate::counters::Counter::{self, *};
use crate::crash_points::DurableAtomic;
use crate::durable::Intent;
use crate::ids::{Handle, SwapEntry};
use crate::index::{KeyKind, State, UnitMember, View, Word};
use crate::lru::{Links, Lru, OFF};
use crate::object::{Extent, Object};
use crate::sync::atomic::{AtomicU64, Ordering};

/// The states of an entry that transitions distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Absent,
    Filled,
    Pooled,
    /// `Pooled` with the flag `W`.
    InFlight,
    Placed,
    Shared,
    Member,
}

use Is::{Absent as IsAbsent, Filled, InFlight, Placed, Pooled, Shared};

/// Any page. A record is never filled or shared; a piece is never filled, shared or a member.
const ANY: &[Is] = &[IsAbsent, Filled, Pooled, InFlight, Placed, Shared, Is::Member];

/// A row of the table.
pub(crate) struct Transition {
    name: &'static str,
    from: &'static [Is],
    to: &'static [Is],
    /// The effect on the entry's list.
    #[cfg_attr(
        not(all(test, not(feature = "shuttle"))),
        expect(dead_code, reason = "for the document")
    )]
    list: &'static str,
    #[cfg_attr(
        not(all(test, not(feature = "shuttle"))),
        expect(dead_code, reason = "for the document")
    )]
    by: &'static str,
}

macro_rules! transitions {
    ($($name:ident: $from:expr => $to:expr, $list:literal, $by:literal;)*) => {
        $(const $name: Transition = Transition {
            name: stringify!($name),
            from: $from,
            to: $to,
            list: $list,
            by: $by,
        };)*

        /// The table, as docs/design/index.md has it.
        #[cfg(all(test, not(feature = "shuttle")))]
        const TRANSITIONS: &[&Transition] = &[$(&$name),*];

        /// The names of all transitions.
        #[cfg(feature = "simulation")]
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

transitions! {
    STORED: ANY => &[Filled, Pooled, Shared],
        "off; on as the newest if `Pooled`",
        "a store; the making of a record or of a unit's pieces";
    WRITTEN_THROUGH: ANY => &[Placed],
        "off",
        "a store past the pool, when the page is written";
    DROPPED: ANY => &[IsAbsent],
        "off",
        "an invalidate, an exclusive load, a rejected store; the last page to leave a record or a unit";
    RENEWED: &[Pooled] => &[Pooled],
        "becomes the newest",
        "a store of the same page";
    TOUCHED: &[Pooled, InFlight] => &[Pooled, InFlight],
        "stays",
        "a load; sets `R`";
    MOVED: &[Pooled, InFlight] => &[Pooled, InFlight],
        "stays",
        "compaction, emptying a section; another handle";
    SPARED: &[Pooled] => &[Pooled],
        "on as the newest; it was taken off",
        "a pass that meets `R`, and clears it";
    IN_FLIGHT: &[Pooled] => &[InFlight],
        "none; it was taken off",
        "writeback, when it has copied the object; recompression, when it has taken the page in";
    LANDED: &[InFlight] => &[Placed],
        "none",
        "writeback, when the write is done and the entry still knows the place";
    JOINED: &[InFlight, Is::Member] => &[Is::Member],
        "none",
        "recompression, when the unit is made and the entry is still the same";
    RETURNED: &[Pooled, InFlight] => &[Pooled],
        "on as the oldest",
        "a failed write, no room in the segment, a unit that is not made";
    COOLED: &[Pooled, InFlight] => &[Pooled],
        "on as the newest of the cold ones (`C`)",
        "recompression that gains too little, or finds the page damaged";
    MOVED_ON_BACKING: &[Placed] => &[Placed],
        "none",
        "cleaning, packing; another place";
    SHARED: &[Pooled] => &[Shared],
        "off; the record on as the newest",
        "a store of the same page under another key: the object passes to a record";
    TAKEN_OVER: ANY => &[IsAbsent, Pooled, InFlight, Placed, Shared, Is::Member, Filled],
        "on as the newest if `Pooled`, when all are known",
        "recovery: nothing is in flight any more; a sharer refers to its record; records and units without pages are gone";
}

/// An entry that only this thread may read and change. A transition or a drop unlocks it.
pub(crate) struct LockedEntry<'a> {
    lock: EntryLock<'a>,
    view: &'a View<'a>,
    key: SwapEntry,
}

/// Links of a list's entries. Only transitions reach them.
struct SecondWords<'a>(&'a View<'a>);

impl Links for SecondWords<'_> {
    fn links(&self, key: SwapEntry) -> &DurableAtomic<AtomicU64> {
        &self.0.existing(key).second
    }
}

/// The lists of the oldest objects in the pool.
pub(crate) struct Lists {
    /// Objects of the pool, except those that recompression skips.
    lru: Lru,
    /// Pieces of units, and pages that gained nothing in a unit: all colder than those of `lru`.
    cold: Lru,
}

/// One of [`Lists`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Lru,
    Cold,
}

impl Lists {
    /// This number is small enough to take the oldest entry of each shard in turn, and large enough
    /// that 16 CPUs seldom meet.
    const SHARDS: usize = 16;

    pub(crate) fn new() -> Self {
        Self { lru: Lru::new(Self::SHARDS), cold: Lru::new(Self::SHARDS) }
    }

    fn get(&self, list: List) -> &Lru {
        match list {
            List::Lru => &self.lru,
            List::Cold => &self.cold,
        }
    }

    /// The list of an entry with this word, if it is on one.
    fn of(&self, word: Word) -> &Lru {
        self.get(if word.is_cold() { List::Cold } else { List::Lru })
    }

    /// Entries on a list.
    pub(crate) fn len(&self, list: List) -> usize {
        self.get(list).len()
    }
}

impl Is {
    fn of(word: Word) -> Self {
        match word.state() {
            State::Absent => Self::Absent,
            State::Filled(_) => Self::Filled,
            State::Pooled(_) if word.is_in_flight() => Self::InFlight,
            State::Pooled(_) => Self::Pooled,
            State::Placed(_) => Self::Placed,
            State::Shared(_) => Self::Shared,
            State::Member(_) => Self::Member,
        }
    }
}

impl<'a> LockedEntry<'a> {
    pub(crate) fn new(view: &'a View<'a>, key: SwapEntry, lock: EntryLock<'a>) -> Self {
        Self { lock, view, key }
    }

    pub(crate) fn key(&self) -> SwapEntry {
        self.key
    }

    pub(crate) fn word(&self) -> Word {
        self.lock.word
    }

    pub(crate) fn state(&self) -> State {
        self.lock.state()
    }

    /// The proof of the page's record or unit (see [`Entry`]). The entry is `Placed` or a `Member`.
    pub(crate) fn proof(&self) -> u64 {
        debug_assert!(matches!(self.state(), State::Placed(_) | State::Member(_)));
        self.lock.second()
    }

    /// True if the write or recompression with this mark is under way.
    pub(crate) fn is_in_flight_as(&self, mark: u64) -> bool {
        Is::of(self.word()) == InFlight && self.lock.second() == mark
    }

    /// The page is stored in `state`, which refers to nothing on the backing.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn stored(self, state: State) -> State {
        let is_piece =
            matches!(state, State::Pooled(_)) && self.view.kind(self.key) == KeyKind::Piece;
        self.replace(&STORED, Word::new(state).with_cold(is_piece), OFF)
    }

    /// The page was just written to the backing, and is nowhere else.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn written_through(self, to: Extent, proof: u64) -> State {
        self.replace(&WRITTEN_THROUGH, Word::new(State::Placed(to)), proof)
    }

    /// The page is dropped.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn dropped(self) -> State {
        self.replace(&DROPPED, Word::ABSENT, OFF)
    }

    /// The page in the pool was stored again unchanged: only its age changes.
    pub(crate) fn renewed(mut self) {
        self.begin(&RENEWED);
        self.unlist();
        let word = self.word().with_cold(false);
        self.end(&RENEWED, word);
        self.list();
    }

    /// The object was used.
    pub(crate) fn touched(&mut self) {
        self.begin(&TOUCHED);
        let word = self.word().with_referenced(true);
        self.end(&TOUCHED, word);
    }

    /// The object has another handle, to which the caller has copied it.
    pub(crate) fn moved(mut self, to: Handle) {
        self.begin(&MOVED);
        let word = self.word().moved_to(to);
        self.end(&MOVED, word);
        self.view.counters().increment(ObjectsMoved);
    }

    /// Gives a second chance to an entry that was taken off its list, and was used on the list.
    pub(crate) fn spared(mut self) {
        self.begin_off(&SPARED);
        let is_piece = self.view.kind(self.key) == KeyKind::Piece;
        let word = self.word().with_referenced(false).with_cold(is_piece);
        self.end(&SPARED, word);
        self.view.counters().increment(SecondChances);
        self.list();
    }

    /// The object of an entry that was taken off its list was copied, and the copy is in flight.
    /// The entry has `mark` until any other transition, except a move.
    pub(crate) fn in_flight(mut self, mark: u64) {
        self.begin_off(&IN_FLIGHT);
        let word = self.word().with_in_flight(true);
        self.end(&IN_FLIGHT, word);
        self.lock.set_second(mark);
    }

    /// The copy in flight is on the backing.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn landed(self, to: Extent, proof: u64) -> State {
        self.replace(&LANDED, Word::new(State::Placed(to)), proof)
    }

    /// The page is now in a unit. It was in flight, or in another unit.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn joined(self, member: UnitMember, checksum: u32) -> State {
        self.replace(&JOINED, Word::new(State::Member(member)), checksum.into())
    }

    /// The object, in flight or only taken off its list, stays and is the oldest again.
    pub(crate) fn returned(mut self) {
        self.stay(&RETURNED, self.word().is_cold());
        self.lists().of(self.word()).push_oldest(&SecondWords(self.view), self.key);
    }

    /// Puts an object on a list from which only writeback may take it.
    pub(crate) fn cooled(mut self) {
        self.stay(&COOLED, true);
        self.list();
    }

    fn stay(&mut self, transition: &Transition, is_cold: bool) {
        self.begin(transition);
        let word = self.word().with_in_flight(false).with_cold(is_cold);
        self.end(transition, word);
        self.lock.set_second(OFF);
    }

    /// The record on the backing is at another place. If the entries outlive the process, `intent`
    /// notes the change of both words. The caller holds the writer's lock.
    #[must_use = "the caller frees the object or record of the old state"]
    pub(crate) fn moved_on_backing(self, to: Extent, proof: u64) -> State {
        if let Some(intent) = self.view.intent() {
            intent.begin(self.key.0, self.word().0, self.lock.second(), proof);
        }
        self.replace(&MOVED_ON_BACKING, Word::new(State::Placed(to)), proof)
    }

    /// The object becomes the record's, and the entry shares the record. The object's header
    /// already names `record` as its owner. For a moment both refer to the object.
    pub(crate) fn shared(self, record: LockedEntry<'_>) {
        let (state, key) = (self.state(), record.key);
        let old = record.stored(state);
        debug_assert_eq!(old, State::Absent, "of an unused record");
        let _object = self.replace(&SHARED, Word::new(State::Shared(key)), OFF);
    }

    /// Sets another state and second word; returns the old state, to which no entry refers any
    /// more.
    fn replace(mut self, transition: &Transition, word: Word, second: u64) -> State {
        self.begin(transition);
        let old = self.state();
        self.unlist();
        self.end(transition, word);
        self.lock.set_second(second);
        self.list();
        count(self.view, self.key, old, -1);
        count(self.view, self.key, word.state(), 1);
        old
    }

    /// Checks the state before.
    fn begin(&self, transition: &Transition) {
        #[cfg(feature = "simulation")]
        crate::crash_points::note(transition.name);
        let Transition { name, from, .. } = transition;
        debug_assert!(from.contains(&Is::of(self.word())), "{name} of {:?}", self.word());
    }

    /// Checks the state before the transition, of an entry that was taken off its list.
    fn begin_off(&self, transition: &Transition) {
        self.begin(transition);
        debug_assert_eq!(self.lock.second(), OFF, "{} is on a list", self.key.0);
    }

    /// Sets the word, which unlocking publishes, and checks the state after the transition.
    fn end(&mut self, transition: &Transition, word: Word) {
        let Transition { name, to, .. } = transition;
        let is = Is::of(word);
        debug_assert!(to.contains(&is), "{name} to {word:?}");
        let flags = word.is_referenced() || word.is_cold();
        debug_assert!(!flags || matches!(is, Pooled | InFlight), "{name}: flags of {word:?}");
        let kind = self.view.kind(self.key);
        let may_be = match is {
            Filled | Shared => kind == KeyKind::Page,
            Is::Member => kind != KeyKind::Piece,
            IsAbsent | Pooled | InFlight | Placed => true,
        };
        debug_assert!(may_be, "{name}: a {kind:?} to {word:?}");
        debug_assert!(refers_rightly(self.view, word.state()), "{name} to {word:?}");
        if is == IsAbsent {
            // This comes before the entry is published: see `Emptying`.
            self.view.note_absent(self.key);
        }
        self.lock.word = word;
    }

    fn lists(&self) -> &'a Lists {
        self.view.lists()
    }

    /// Removes the entry from its list, if it is on one.
    fn unlist(&self) {
        if Is::of(self.word()) == Pooled {
            self.lists().of(self.word()).remove(&SecondWords(self.view), self.key);
        }
    }

    /// Adds the entry to its list as the newest, if it belongs on one.
    fn list(&self) {
        if Is::of(self.word()) == Pooled {
            self.lists().of(self.word()).push(&SecondWords(self.view), self.key);
        }
    }
}

/// True if a state refers to an existing record or unit.
fn refers_rightly(view: &View<'_>, state: State) -> bool {
    match state {
        State::Shared(record) => view.kind(record) == KeyKind::Record,
        State::Member(member) => view.kind(member.unit) == KeyKind::Piece,
        _ => true,
    }
}

/// The counters that follow from states.
fn count(view: &View<'_>, key: SwapEntry, state: State, by: i64) {
    if state == State::Absent {
        return;
    }
    let counters = view.counters();
    let add = |counter: Counter| counters.add(counter, by);
    if view.kind(key) == KeyKind::Page {
        add(StoredPages);
    }
    match state {
        State::Absent => {}
        State::Filled(_) => add(SameFilledPages),
        State::Pooled(object) => {
            Counter::of_codec(object.form.codec).into_iter().for_each(add);
            counters.add(CompressedBytes, by * i64::from(object.form.bytes));
        }
        State::Placed(extent) if extent.form.codec == Codec::Piece => {}
        State::Placed(_) => add(BackingPages),
        State::Shared(_) => add(SharedPages),
        State::Member(_) => add(RecompressedPages),
    }
}

/// Lists: the oldest entries.
impl View<'_> {
    /// Takes the oldest entry off a list, locked, with its object. The next transition puts it on a
    /// list again, or gives it a state that is on no list.
    pub(crate) fn take_oldest(&self, list: List) -> Option<(LockedEntry<'_>, Object)> {
        let list = self.lists().get(list);
        std::iter::from_fn(|| list.pop(&SecondWords(self))).find_map(|key| {
            // The entry was not locked until here: it may be gone, or stored anew and on a list.
            let locked = self.lock(key)?;
            let State::Pooled(object) = locked.state() else { return None };
            let is_off = !locked.word().is_in_flight() && locked.lock.second() == OFF;
            is_off.then_some((locked, object))
        })
    }

    /// All entries on a list, each shard's from old to new. Called by checks of a cache at rest.
    pub(crate) fn listed(&self, list: List) -> Vec<SwapEntry> {
        self.lists().get(list).entries(&SecondWords(self))
    }
}

/// Entries of a killed process, before other threads use them.
impl View<'_> {
    /// Restores an entry to its last published state, unlocked and not in flight. Repairs the
    /// second word if the process ended during a change of both. Clears it for a page in the pool.
    pub(crate) fn recover(&self, key: SwapEntry, entry: &Entry, intent: &Intent) -> Word {
        let word = entry.peek();
        let second = entry.second.load(Ordering::Relaxed);
        let (word, second) = match word.state() {
            State::Placed(_) | State::Member(_) => {
                (word, intent.undone(key.0, word.0, second).unwrap_or(second))
            }
            State::Absent => (Word::ABSENT, 0),
            State::Filled(_) | State::Pooled(_) | State::Shared(_) => {
                (word.with_in_flight(false), 0)
            }
        };
        if entry.second.load(Ordering::Relaxed) != second {
            entry.second.store(second, Ordering::Relaxed);
        }
        if entry.word.load(Ordering::Relaxed) != word.0 {
            entry.word.store(word.0, Ordering::Release);
        }
        word
    }

    /// Gives an entry another state, before it is listed and counted.
    pub(crate) fn set_recovered(&self, key: SwapEntry, state: State) {
        let mut locked = self.lock_existing(key);
        locked.begin(&TAKEN_OVER);
        locked.lock.set_second(OFF);
        locked.end(&TAKEN_OVER, Word::new(state));
    }

    /// Lists and counts an entry that is repaired.
    pub(crate) fn list_and_count(&self, key: SwapEntry) {
        let locked = self.lock_existing(key);
        locked.list();
        count(self, key, locked.state(), 1);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::fmt::Write;

    fn names(all: &[Is]) -> String {
        if ANY.iter().all(|is| all.contains(is)) {
            return "any".into();
        }
        let name = |is: &Is| match is {
            InFlight => "`Pooled` with `W`".into(),
            is => format!("`{is:?}`"),
        };
        all.iter().map(name).collect::<Vec<_>>().join(" or ")
    }

    #[test]
    fn the_document_has_the_table() {
        let mut table =
            String::from("| transition | from | to | list | by |\n|---|---|---|---|---|\n");
        for Transition { name, from, to, list, by } in TRANSITIONS {
            let name = name.to_lowercase().replace('_', " ");
            let (from, to) = (names(from), names(to));
            writeln!(table, "| {name} | {from} | {to} | {list} | {by} |").unwrap();
        }
        let document = include_str!("../../../../../docs/design/index.md");
        assert!(document.contains(&table), "docs/design/index.md is to have this:\n{table}");
    }

    #[test]
    #[should_panic(expected = "IN_FLIGHT of")]
    #[cfg(debug_assertions)]
    fn a_transition_that_is_not_in_the_table_is_refused() {
        let index = crate::index::Index::new(4096, None);
        index.add_area(4096).unwrap();
        index.provision().unwrap();
        let view = index.view();
        view.lock_made(SwapEntry(0)).unwrap().in_flight(7);
    }
}

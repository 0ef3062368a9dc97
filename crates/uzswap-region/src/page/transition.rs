//! Every change of a page's place: **the one table**.
//!
//! Each change has a row in [`TRANSITIONS`]. A thread that makes a page `Busy` leaves the page's
//! former kind in the word. The thread that ends `Busy` names the row. Builds with debug assertions
//! end the process at a change that is not in the row, since the page would be lost or wrong.
//!
//! Only the thread that made a page `Busy` may end `Busy`. Any thread may change a word that stays
//! `Resident` all the time, by exchange of the whole word.

use super::word::Kind;

/// A row of the table.
pub(crate) struct Transition {
    name: &'static str,
    from: Kinds,
    to: Kinds,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the document"))]
    by: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the document"))]
    effect: &'static str,
}

/// A set of kinds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    Any,
    /// The former kind.
    Same,
    /// The kinds whose bits are set.
    Of(u8),
}

impl Kinds {
    const fn of(kinds: &[Kind]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u8;
            at += 1;
        }
        Self::Of(bits)
    }

    fn have(self, kind: Kind, before: Kind) -> bool {
        match self {
            Self::Any => kind != Kind::Busy,
            Self::Same => kind == before,
            Self::Of(bits) => bits >> kind as u8 & 1 == 1,
        }
    }
}

impl Transition {
    /// Ends the process unless the row has this change, in builds with debug assertions. Other
    /// builds do not call `change`.
    pub(crate) fn check(&self, change: impl FnOnce() -> (Kind, Kind)) {
        if cfg!(debug_assertions) {
            let (from, to) = change();
            if !self.from.have(from, from) || !self.to.have(to, from) {
                self.refuse(from, to);
            }
        }
    }

    #[cold]
    fn refuse(&self, from: Kind, to: Kind) -> ! {
        panic!("{}: a page goes from {from:?} to {to:?}: a bug of uzswap", self.name)
    }
}

macro_rules! transitions {
    (@kinds any) => { Kinds::Any };
    (@kinds same) => { Kinds::Same };
    (@kinds $($kind:ident)|+) => { Kinds::of(&[$(Kind::$kind),+]) };
    ($($name:ident: ($($from:tt)+) => ($($to:tt)+), $by:literal, $effect:literal;)*) => {
        $(pub(crate) const $name: &Transition = &Transition {
            name: stringify!($name),
            from: transitions!(@kinds $($from)+),
            to: transitions!(@kinds $($to)+),
            by: $by,
            effect: $effect,
        };)*

        /// The table, as docs/design/region.md has it.
        #[cfg(test)]
        const TRANSITIONS: &[&Transition] = &[$($name),*];
    };
}

transitions! {
    ADOPTED: (Untouched) => (Untouched | Resident | Empty),
        "adoption, a mapping that grows or moves",
        "`Empty` where no page is; a guard of the program's own stays `Untouched`";
    FOUND: (Empty) => (Resident),
        "a look at a long mapping that was left open",
        "the program has used it; it is charged";
    FILLED: (Untouched | Empty) => (Resident),
        "a fault",
        "the zero page for a read, a page of zeros for a write";
    LOADED: (Stored) => (Resident),
        "a fault, reading ahead",
        "`Cache::load`, then `UFFDIO_COPY`. The copy stays in the cache (`KEPT`); a write marks it out of date (`STALE`). From the backing, and to be read: write-protected (`GUARDED`)";
    TAKEN_BACK: (Staged) => (Resident),
        "a fault; `mremap`; a store that neither pool nor backing took",
        "`UFFDIO_MOVE` back from its frame, no codec";
    OPENED: (Resident) => (Resident),
        "a write to a guarded page",
        "the protection is taken off, the copy is out of date (`STALE`)";
    PASSED: (Resident) => (Resident),
        "the hand",
        "a pass is counted; a copy that is not worth its room is dropped";
    PINNED: (Resident) => (Resident),
        "a pin, the buffer of a system call, the end of either",
        "it stays in its place while it is pinned";
    STAGED: (Resident) => (Staged),
        "reclaim, `PageOut`",
        "`UFFDIO_MOVE` to a frame, up to 64 neighbours in one call";
    REFUSED: (Resident) => (Resident),
        "reclaim, `PageOut`",
        "the kernel does not move it: a device uses it. Counts as used";
    STORED: (Staged) => (Stored),
        "reclaim, `PageOut`",
        "`Cache::store`, unless it was guarded; the frame's memory is given back";
    DROPPED: (any) => (Untouched | Empty | Resident),
        "`DontNeed`, `madvise`, the old place of a mapping that `mremap` leaves there",
        "the memory is given back, the copy dropped; a pinned page stays `Resident`, of zeros";
    GONE: (Resident | Staged | Stored | Empty) => (Untouched),
        "`munmap`, `mmap` in its place, `mremap`; a fork that has not inherited the page",
        "copy and frame are dropped";
    CARRIED: (Untouched) => (Resident | Stored | Empty),
        "`mremap`, at the new place",
        "the content gets the key of its new address";
    RELEASED: (any) => (Untouched),
        "memory that is given back to the program; a fork that cannot have a pager",
        "it was brought in, and stays";
    INHERITED: (any) => (any),
        "a fork, where another thread of the parent's had it `Busy`",
        "the page is where kernel, frames and cache say";
    UNCHANGED: (any) => (same),
        "a thread that had it `Busy` and leaves it as it was",
        "";
}

#[cfg(test)]
mod tests {
    use super::super::word::Word;
    use super::*;
    use std::fmt::Write;

    const ALL: [Kind; 5] =
        [Kind::Untouched, Kind::Resident, Kind::Staged, Kind::Stored, Kind::Empty];

    fn names(kinds: Kinds) -> String {
        match kinds {
            Kinds::Any => "any".into(),
            Kinds::Same => "the same".into(),
            Kinds::Of(_) => {
                let of = ALL.iter().filter(|kind| kinds.have(**kind, **kind));
                of.map(|kind| format!("`{kind:?}`")).collect::<Vec<_>>().join(" or ")
            }
        }
    }

    #[test]
    fn the_document_has_the_table() {
        let mut table =
            String::from("| transition | from | to | by | effect |\n|---|---|---|---|---|\n");
        for Transition { name, from, to, by, effect } in TRANSITIONS {
            let name = name.to_lowercase().replace('_', " ");
            let (from, to) = (names(*from), names(*to));
            writeln!(table, "| {name} | {from} | {to} | {by} | {effect} |").unwrap();
        }
        let document = include_str!("../../../../docs/design/region.md");
        assert!(document.contains(&table), "docs/design/region.md is to have this:\n{table}");
    }

    #[test]
    fn no_row_leads_to_busy_and_each_kind_is_left() {
        for kind in ALL {
            let leaves = |row: &&&Transition| {
                ALL.iter().any(|to| row.from.have(kind, kind) && row.to.have(*to, kind))
            };
            assert!(TRANSITIONS.iter().filter(leaves).count() > 3, "{kind:?}");
        }
        assert!(TRANSITIONS.iter().all(|row| !row.to.have(Kind::Busy, Kind::Stored)));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "STORED: a page goes from Resident to Stored")]
    fn a_page_is_not_stored_from_its_place() {
        STORED.check(|| (Kind::Resident, Kind::Stored));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "UNCHANGED: a page goes from Stored to Empty")]
    fn a_page_that_is_put_back_is_where_it_was() {
        UNCHANGED.check(|| (Word::busy(Kind::Stored).before(), Kind::Empty));
    }
}

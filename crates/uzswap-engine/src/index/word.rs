//! The 64 bits that have a page's state and place.
//!
//! ```text
//!  63           19 18         7 6 5 4 3 2 1 0
//! |     payload (57 bits)      |C|W|R|L| tag |
//! ```
//! `L` locked · `R` referenced since the LRU's last check · `W` its writeback or recompression is
//! in flight · `C` on the list of pages that recompression skips.

use crate::ids::{Handle, Place, SwapEntry};
use crate::object::{Extent, Form, Object};
use crate::page::Pattern;

/// The place of a page, with everything that is needed to load it. `entry::transition` changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// There is no page.
    Absent,
    /// One word repeated; no object is stored.
    Filled(Pattern),
    /// Compressed, in the pool.
    Pooled(Object),
    /// Compressed, on the backing.
    Placed(Extent),
    /// Identical to other entries; their common record, itself an entry, has the place.
    Shared(SwapEntry),
    /// Compressed with others.
    Member(UnitMember),
}

/// A page's place in a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitMember {
    /// The unit's first piece.
    pub(crate) unit: SwapEntry,
    pub(crate) position: u8,
}

/// A [`State`] and its flags, packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u64);

const TAG_MASK: u64 = 0b111;
const ABSENT: u64 = 0;
const FILLED: u64 = 1;
const POOLED: u64 = 2;
const PLACED: u64 = 3;
const SHARED: u64 = 4;
const GONE: u64 = 5;
const MEMBER: u64 = 6;
const PAYLOAD_SHIFT: u32 = 7;
const PAYLOAD_BITS: u32 = 64 - PAYLOAD_SHIFT;

const _: () = assert!(Pattern::BITS <= PAYLOAD_BITS);
const _: () = assert!(Handle::BITS + Form::BITS <= PAYLOAD_BITS);
const _: () = assert!(Place::BITS + Form::BITS <= PAYLOAD_BITS);

impl Word {
    pub(crate) const ABSENT: Self = Self(ABSENT);
    /// The trunk of the entry is being freed, or is freed. The page is absent. If the page has an
    /// entry now, that entry is in another trunk. Set only where the word was `ABSENT`.
    pub(crate) const GONE: Self = Self(GONE);
    pub(crate) const LOCKED: u64 = 1 << 3;
    const REFERENCED: u64 = 1 << 4;
    const IN_FLIGHT: u64 = 1 << 5;
    const COLD: u64 = 1 << 6;

    /// A word with no flag set.
    pub(crate) fn new(state: State) -> Self {
        let (tag, payload) = match state {
            State::Absent => (ABSENT, 0),
            State::Filled(pattern) => (FILLED, pattern.to_bits()),
            State::Pooled(object) => {
                (POOLED, object.handle.0 << Form::BITS | object.form.to_bits())
            }
            State::Placed(extent) => (PLACED, extent.place.0 << Form::BITS | extent.form.to_bits()),
            State::Shared(record) => (SHARED, u64::from(record.0)),
            State::Member(member) => {
                (MEMBER, u64::from(member.unit.0) << 8 | u64::from(member.position))
            }
        };
        Self(payload << PAYLOAD_SHIFT | tag)
    }

    pub(crate) fn state(self) -> State {
        let payload = self.0 >> PAYLOAD_SHIFT;
        match self.0 & TAG_MASK {
            ABSENT | GONE => State::Absent,
            FILLED => State::Filled(Pattern::from_bits(payload)),
            POOLED => State::Pooled(Object {
                handle: Handle(payload >> Form::BITS),
                form: Form::from_bits(payload),
            }),
            PLACED => State::Placed(Extent {
                place: Place(payload >> Form::BITS),
                form: Form::from_bits(payload),
            }),
            SHARED => State::Shared(SwapEntry(payload as u32)),
            MEMBER => State::Member(UnitMember {
                unit: SwapEntry((payload >> 8) as u32),
                position: payload as u8,
            }),
            tag => unreachable!("no word with tag {tag} is ever stored"),
        }
    }

    /// The same state and flags with another handle, for an object that was moved.
    pub(crate) fn moved_to(self, handle: Handle) -> Self {
        debug_assert!(matches!(self.state(), State::Pooled(_)));
        let form = (self.0 >> PAYLOAD_SHIFT) & ((1 << Form::BITS) - 1);
        let payload = handle.0 << Form::BITS | form;
        Self(payload << PAYLOAD_SHIFT | self.0 & ((1 << PAYLOAD_SHIFT) - 1))
    }

    pub(crate) fn is_referenced(self) -> bool {
        self.0 & Self::REFERENCED != 0
    }

    pub(crate) fn with_referenced(self, set: bool) -> Self {
        Self(if set { self.0 | Self::REFERENCED } else { self.0 & !Self::REFERENCED })
    }

    /// True if the object is being written to the backing or recompressed. Then the entry is on no
    /// LRU list, and its second word is the place, or recompression's token.
    pub(crate) fn is_in_flight(self) -> bool {
        self.0 & Self::IN_FLIGHT != 0
    }

    pub(crate) fn with_in_flight(self, set: bool) -> Self {
        Self(if set { self.0 | Self::IN_FLIGHT } else { self.0 & !Self::IN_FLIGHT })
    }

    /// True if the entry belongs on the list of pages that recompression skips.
    pub(crate) fn is_cold(self) -> bool {
        self.0 & Self::COLD != 0
    }

    pub(crate) fn with_cold(self, set: bool) -> Self {
        Self(if set { self.0 | Self::COLD } else { self.0 & !Self::COLD })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::Codec;
    use crate::page::PAGE_BYTES;

    fn states() -> Vec<State> {
        let form = |bytes, codec| Form { bytes, codec };
        let mut states = vec![
            State::Absent,
            State::Filled(Pattern::of(&[0; PAGE_BYTES]).unwrap()),
            State::Filled(Pattern::of(&[0xff; PAGE_BYTES]).unwrap()),
            State::Shared(SwapEntry(u32::MAX)),
            State::Member(UnitMember { unit: SwapEntry(u32::MAX), position: 15 }),
        ];
        for codec in Codec::ALL {
            for bytes in [1, 700, PAGE_BYTES as u16] {
                let handle = Handle::new((1 << 28) - 1, 1023);
                states.push(State::Pooled(Object { handle, form: form(bytes, codec) }));
                let place = Place((1 << Place::BITS) - 1);
                states.push(State::Placed(Extent { place, form: form(bytes, codec) }));
            }
        }
        states
    }

    #[test]
    fn states_round_trip_with_any_flags() {
        for state in states() {
            for flags in 0..8 {
                let word = Word::new(state)
                    .with_referenced(flags & 1 != 0)
                    .with_in_flight(flags & 2 != 0)
                    .with_cold(flags & 4 != 0);
                assert_eq!(word.state(), state);
                assert_eq!(word.is_referenced(), flags & 1 != 0);
                assert_eq!(word.is_in_flight(), flags & 2 != 0);
                assert_eq!(word.is_cold(), flags & 4 != 0);
                assert_eq!(word.0 & Word::LOCKED, 0);
            }
        }
    }

    #[test]
    fn moving_keeps_form_and_flags() {
        let form = Form { bytes: 4096, codec: Codec::Zstd };
        let word = Word::new(State::Pooled(Object { handle: Handle::new(5, 6), form }))
            .with_in_flight(true);
        let moved = word.moved_to(Handle::new(7, 8));
        let object = Object { handle: Handle::new(7, 8), form };
        assert_eq!(moved.state(), State::Pooled(object));
        assert!(moved.is_in_flight() && !moved.is_referenced());
    }
}

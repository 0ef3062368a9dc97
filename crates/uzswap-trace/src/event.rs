//! One event: 24 bytes, three words of 64 bits.
//!
//! ```text
//!          63      58 57 56 55 54   52 51                    0
//! word 0  |  zeros   | I| F| W| what  |  page                 |
//!          63             40 39                              0
//! word 1  |  process        |  time, µs                       |
//!          63      48 47    32 31                            0
//! word 2  |  zeros   | bytes  |  site                         |
//! ```
//! - `W`: it was a write. `F`: the page was same-filled. `I`: it was identical to another page.
//!
//! Zeros in word 0 mean no event: the process was killed while it wrote the event.

/// Bytes of an event.
pub const EVENT_BYTES: usize = 24;

pub(crate) const WORDS: usize = 3;

const _: () = assert!(WORDS * size_of::<u64>() == EVENT_BYTES);

const PAGE_BITS: u32 = 52;
const WHAT_BITS: u32 = 3;
const WRITE: u64 = 1 << 55;
const SAME_FILLED: u64 = 1 << 56;
const IDENTICAL: u64 = 1 << 57;
const KNOWN: u64 = (1 << 58) - 1;
const TIME_BITS: u32 = 40;
/// The maximum number of processes in a trace.
pub(crate) const PROCESSES_MAX: u64 = 1 << (64 - TIME_BITS);
/// Bytes of a page, and the most bytes of its compressed form.
pub(crate) const PAGE_BYTES: u16 = 4096;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A touch of a page that was never touched before, or was given back.
    New,
    /// A touch of a page on its way out that was not compressed yet.
    Staged,
    /// A touch of a compressed page.
    Back,
    /// A page was compressed. The cache had no copy of it.
    Left,
    /// The program gave a page back.
    Gone,
}

impl What {
    const ALL: [Self; 5] = [Self::New, Self::Staged, Self::Back, Self::Left, Self::Gone];

    /// Its name in a listing.
    pub fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Staged => "staged",
            Self::Back => "back",
            Self::Left => "left",
            Self::Gone => "gone",
        }
    }

    /// True if the program touched the page.
    pub fn is_touch(self) -> bool {
        matches!(self, Self::New | Self::Staged | Self::Back)
    }
}

/// An event of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The kind.
    pub what: What,
    /// The number of the page: its address in pages.
    pub page: u64,
    /// The number of the process. A forked child has a new number, and so has a program after
    /// `exec`.
    pub process: u32,
    /// Processor time of the program alone, µs: the time of the process minus that of the pager.
    pub micros: u64,
    /// The lower 32 bits of the address of the instruction that touched the page; 0 for a system
    /// call, or if unknown.
    pub site: u32,
    /// The compressed size, of [`What::Back`] and [`What::Left`]; 0 if unknown, or for a
    /// same-filled page.
    pub bytes: u16,
    /// True if the touch was a write.
    pub is_write: bool,
    /// True if the page was one repeated word.
    pub is_same_filled: bool,
    /// True if another stored page had the same content.
    pub is_identical: bool,
}

impl Event {
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let flag = |is_set: bool, bit| if is_set { bit } else { 0 };
        let page = self.page & ((1 << PAGE_BITS) - 1);
        let time = self.micros.min((1 << TIME_BITS) - 1);
        [
            page | (self.what as u64 + 1) << PAGE_BITS
                | flag(self.is_write, WRITE)
                | flag(self.is_same_filled, SAME_FILLED)
                | flag(self.is_identical, IDENTICAL),
            time | u64::from(self.process) << TIME_BITS,
            u64::from(self.site) | u64::from(self.bytes) << 32,
        ]
    }

    /// `Ok(None)` for no event. Fails if no event has these words.
    pub(crate) fn from_words([first, second, third]: [u64; WORDS]) -> Result<Option<Self>, ()> {
        if first == 0 {
            return Ok(None);
        }
        let what = (first >> PAGE_BITS & ((1 << WHAT_BITS) - 1)) as usize;
        let what = what.checked_sub(1).and_then(|at| What::ALL.get(at)).copied().ok_or(())?;
        let bytes = (third >> 32) as u16;
        if first & !KNOWN != 0 || third >> 48 != 0 || bytes > PAGE_BYTES {
            return Err(());
        }
        Ok(Some(Self {
            what,
            page: first & ((1 << PAGE_BITS) - 1),
            process: (second >> TIME_BITS) as u32,
            micros: second & ((1 << TIME_BITS) - 1),
            site: third as u32,
            bytes,
            is_write: first & WRITE != 0,
            is_same_filled: first & SAME_FILLED != 0,
            is_identical: first & IDENTICAL != 0,
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const EVENT: Event = Event {
        what: What::Back,
        page: (1 << PAGE_BITS) - 1,
        process: PROCESSES_MAX as u32 - 1,
        micros: (1 << TIME_BITS) - 1,
        site: u32::MAX,
        bytes: PAGE_BYTES,
        is_write: true,
        is_same_filled: false,
        is_identical: true,
    };

    #[test]
    fn an_event_goes_there_and_back() {
        for what in What::ALL {
            let flags = [(true, false), (false, true), (true, true), (false, false)];
            for (is_write, is_same_filled) in flags {
                let event = Event { what, is_write, is_same_filled, ..EVENT };
                assert_eq!(Event::from_words(event.to_words()), Ok(Some(event)));
            }
        }
        let least = Event { page: 0, process: 0, micros: 0, site: 0, bytes: 0, ..EVENT };
        assert_eq!(Event::from_words(least.to_words()), Ok(Some(least)));
        assert_eq!(Event::from_words([0; WORDS]), Ok(None));
    }

    #[test]
    fn words_that_no_event_has_are_refused() {
        let words = EVENT.to_words();
        let with = |at: usize, bits: u64| {
            let mut words = words;
            words[at] |= bits;
            Event::from_words(words)
        };
        assert!(with(0, 1 << 58).is_err(), "an unknown flag");
        assert!(with(0, 7 << PAGE_BITS).is_err(), "an unknown kind");
        assert!(with(2, 1 << 48).is_err(), "an unknown field");
        assert!(with(2, 1 << 32).is_err(), "a page of 4097 bytes");
    }
}

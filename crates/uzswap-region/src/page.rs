//! The state of each page, and the one table of its changes.

pub(crate) mod word;

pub(crate) mod transition;

#[expect(unsafe_code, reason = "words are atomics in a mapping")]
pub(crate) mod words;

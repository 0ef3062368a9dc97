//! The state of each page, and the one table of its changes.

pub(crate) mod word;

pub(crate) mod transition;

pub(crate) mod words;

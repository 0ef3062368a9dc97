//! Sizes as a caller gives them.

use crate::error::Error;
use std::sync::OnceLock;
use uzswap_sys::cpu;

/// The least budget of a pager.
const MEMORY_MIN: u64 = 8 << 20;

/// A size in bytes, or as people write it: `512M`, `4G`, `1.5GiB`, in units of 1024.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySize(Size);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Size {
    Bytes(u64),
    Text(String),
}

impl From<u64> for MemorySize {
    fn from(bytes: u64) -> Self {
        Self(Size::Bytes(bytes))
    }
}

impl From<&str> for MemorySize {
    fn from(text: &str) -> Self {
        Self(Size::Text(text.into()))
    }
}

impl From<String> for MemorySize {
    fn from(text: String) -> Self {
        Self(Size::Text(text))
    }
}

impl MemorySize {
    /// The number of bytes; `what` names it in the error.
    pub fn bytes(self, what: &'static str) -> Result<u64, Error> {
        match self.0 {
            Size::Bytes(bytes) => Ok(bytes),
            Size::Text(text) => parse_size(what, &text),
        }
    }
}

pub(crate) fn parse_size(what: &'static str, text: &str) -> Result<u64, Error> {
    let config = parse_size::Config::new().with_binary();
    config.parse_size(text.trim()).map_err(|_| Error::Size { what, text: text.into() })
}

/// The bytes of a budget, if the machine can have it.
pub(crate) fn check_memory(bytes: u64) -> Result<u64, Error> {
    // Read only once, because opening a file takes one of the program's descriptors for a moment.
    static MOST: OnceLock<u64> = OnceLock::new();
    let ask = || cpu::memory_info().map_or(u64::MAX >> 1, |memory| memory.total);
    let most = *MOST.get_or_init(ask);
    if (MEMORY_MIN..=most).contains(&bytes) {
        return Ok(bytes);
    }
    let must = format!("from {MEMORY_MIN} bytes to the machine's {most}");
    Err(Error::Range { what: "the budget", value: bytes, must })
}

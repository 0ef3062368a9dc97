//! Sizes as a caller gives them.

use crate::error::Error;

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

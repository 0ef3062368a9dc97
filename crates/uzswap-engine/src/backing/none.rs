//! No backing: the cache lives in RAM alone.

use super::{Backing, Completion, Write};
use std::io;

/// See the module.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBacking;

impl Backing for NoBacking {
    fn bytes(&self) -> u64 {
        0
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, _offset: u64, _out: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn submit(&self, _write: Write) {
        unreachable!("there is no segment to write");
    }

    fn complete(&self, _wait: bool) -> Option<Completion> {
        None
    }
}

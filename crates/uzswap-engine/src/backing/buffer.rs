//! Memory for direct I/O.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use uzswap_sys::map::Mapping;

/// Page-aligned memory, already faulted in.
pub struct Buffer {
    memory: Mapping,
    bytes: usize,
}

impl Buffer {
    /// `bytes` of zeros. Errors: no memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Ok(Self { memory: Mapping::populated(bytes)?, bytes })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory.as_slice()[..self.bytes]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut_slice()[..self.bytes]
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

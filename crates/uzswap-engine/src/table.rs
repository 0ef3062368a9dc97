//! Tables that grow by chunks and never move their values.
//!
//! Threads read them without a lock. The maintaining thread makes chunks ahead of need. If the
//! machine has no memory for a chunk, the call fails and the process continues.

use crate::durable::Values;
use std::collections::TryReserveError;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `count` values in memory of their own. Fails without memory.
pub(crate) fn boxed<T>(count: usize, new: impl Fn() -> T) -> Result<Box<[T]>, TryReserveError> {
    let mut values = Vec::new();
    values.try_reserve_exact(count)?;
    values.extend((0..count).map(|_| new()));
    Ok(values.into_boxed_slice())
}

/// A table of chunks of `CHUNK` values, which are made in order.
pub(crate) struct ChunkedTable<T, const CHUNK: usize> {
    chunks: Box<[OnceLock<Values<T>>]>,
    made: AtomicUsize,
}

impl<T, const CHUNK: usize> ChunkedTable<T, CHUNK> {
    /// Space for `count_max` values; none has memory yet.
    pub(crate) fn new(count_max: usize) -> Self {
        let chunks = (0..count_max.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Self { chunks, made: AtomicUsize::new(0) }
    }

    /// A value, if its chunk is made.
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        Some(&self.chunks[number / CHUNK].get()?[number % CHUNK])
    }

    /// Makes a chunk, unless it exists or is beyond the table; true if this call made it.
    /// Allocates. Errors: no memory.
    pub(crate) fn make(&self, chunk: usize, new: impl Fn() -> T) -> io::Result<bool> {
        self.put(chunk, || Ok(Values::Own(boxed(CHUNK, new)?)))
    }

    /// Like `make`, with `CHUNK` values from a function.
    pub(crate) fn put(
        &self,
        chunk: usize,
        make: impl FnOnce() -> io::Result<Values<T>>,
    ) -> io::Result<bool> {
        match self.chunks.get(chunk) {
            Some(slot) if slot.get().is_none() => {
                let is_made = slot.set(make()?).is_ok();
                self.made.fetch_max(chunk + 1, Ordering::Release);
                Ok(is_made)
            }
            _ => Ok(false),
        }
    }

    /// The maximum number of chunks.
    pub(crate) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Chunks that are made.
    pub(crate) fn made(&self) -> usize {
        self.made.load(Ordering::Acquire)
    }

    /// True if all chunks are made.
    pub(crate) fn is_whole(&self) -> bool {
        self.chunks.last().is_none_or(|chunk| chunk.get().is_some())
    }

    /// Bytes that the table takes.
    pub(crate) fn bytes(&self) -> usize {
        self.made() * CHUNK * size_of::<T>() + self.chunks.len() * size_of::<OnceLock<Values<T>>>()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_made_once_and_read_where_it_is() {
        let table = ChunkedTable::<u32, 4>::new(9);
        assert_eq!((table.chunks(), table.made(), table.is_whole()), (3, 0, false));
        assert_eq!(table.get(3), None);
        assert_eq!((table.make(0, || 7).unwrap(), table.make(0, || 8).unwrap()), (true, false));
        assert_eq!((table.get(3), table.get(4)), (Some(&7), None));
        (1..3).for_each(|chunk| assert!(table.make(chunk, || 9).unwrap()));
        assert!(!table.make(3, || 9).unwrap());
        assert_eq!((table.made(), table.is_whole()), (3, true));
        assert_eq!(table.bytes(), 48 + 3 * size_of::<OnceLock<Values<u32>>>());
    }
}

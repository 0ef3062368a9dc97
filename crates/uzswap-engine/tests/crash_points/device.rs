//! A backing that is copied in the middle of a write, too.

use super::{BACKING_BYTES, WATCHED, stop};
use std::io;
use std::sync::Arc;
use uzswap_engine::backing::{Backing, Completion, Write};
use uzswap_engine::testing::{Faults, TestBacking};

/// A backing whose writes have a crash point in the middle.
struct Stopping {
    inner: TestBacking,
    content: Arc<Faults>,
}

impl Stopping {
    /// Stops as if only the first half had been written.
    fn stop_in_the_middle(&self, offset: u64, bytes: &[u8]) {
        if WATCHED.with_borrow(Option::is_some) {
            let half = &bytes[..bytes.len() / 2];
            let write = |content: &mut [u8]| {
                content[offset as usize..][..half.len()].copy_from_slice(half);
            };
            self.content.tamper(write);
            stop();
        }
    }
}

impl Backing for Stopping {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.stop_in_the_middle(offset, bytes);
        self.inner.write(offset, bytes)
    }

    fn submit(&self, write: Write) {
        self.stop_in_the_middle(write.offset, write.bytes());
        self.inner.submit(write);
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.discard(offset, bytes)
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        self.inner.complete(wait)
    }
}

/// A backing with some content.
pub fn backing(content: Option<&[u8]>) -> (Box<dyn Backing>, Arc<Faults>) {
    let (inner, faults) = TestBacking::new(BACKING_BYTES, 512);
    if let Some(content) = content {
        faults.tamper(|all| all.copy_from_slice(content));
    }
    (Box::new(Stopping { inner, content: faults.clone() }), faults)
}

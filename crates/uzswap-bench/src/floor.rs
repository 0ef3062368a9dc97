//! The least time of a fault that user space serves: a signal, and a call that copies the page in.
//!
//! There is no cache: the pages are kept uncompressed, and a program's changes are lost when its
//! pages leave. In a region's fault, all further time is ours.

use crate::error::{Context, Failure};
use std::sync::OnceLock;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::fault_signals;
use uzswap_sys::map::Mapping;
use uzswap_sys::uffd::{Delivery, Fault, Uffd};

/// The source of the pages.
struct Source {
    uffd: Uffd,
    /// The start of the memory.
    base: usize,
    pages: Vec<Page>,
}

/// One for each process, since the signal handler has no arguments.
static SOURCE: OnceLock<Source> = OnceLock::new();

/// Memory whose faults bring these pages in.
pub fn memory(pages: Vec<Page>) -> Result<Mapping, Failure> {
    let memory = Mapping::reserved(pages.len() * PAGE_BYTES).context("memory")?;
    memory.keep_apart().context("madvise")?;
    let base = memory.as_ptr() as usize;
    let uffd = Uffd::open(Delivery::Signal).context("userfaultfd")?;
    uffd.register(base..base + memory.len()).context("UFFDIO_REGISTER")?;
    if SOURCE.set(Source { uffd, base, pages }).is_err() {
        return Err(Failure::new("there is such memory already"));
    }
    fault_signals::on_bus(serve).context("SIGBUS")?;
    Ok(memory)
}

fn serve(fault: Fault) -> bool {
    let Some(source) = SOURCE.get() else { return false };
    let Some(offset) = fault.address.checked_sub(source.base) else { return false };
    let number = offset / PAGE_BYTES;
    let Some(page) = source.pages.get(number) else { return false };
    source.uffd.copy(source.base + number * PAGE_BYTES, page, false).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_as_they_were_each_time() {
        let pages: Vec<Page> = (0..8).map(|number| [number; PAGE_BYTES]).collect();
        let mut memory = memory(pages).unwrap();
        for _ in 0..2 {
            for (number, page) in memory.as_slice().as_chunks::<PAGE_BYTES>().0.iter().enumerate() {
                assert!(page.iter().all(|byte| usize::from(*byte) == number));
            }
            memory.as_mut_slice()[0] = 77;
            memory.discard(0, 8 * PAGE_BYTES).unwrap();
        }
    }
}

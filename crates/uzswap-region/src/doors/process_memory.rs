//! Reads and writes this process's memory by `/proc/self`, for the doors that close pages to
//! accesses.

#![expect(
    unsafe_code,
    reason = "pages leave while a program runs: the thread that moves them made their words `Busy`; a thread that touches such a page waits"
)]

use crate::core::Inner;
use crate::core::space::Taken;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::time::Duration;
use uzswap_engine::Page;
use uzswap_sys::map::Pagemap;
use uzswap_sys::proc_mem::{Access, OwnMemory, set_access};

pub(crate) struct ProcessMemory {
    memory: OwnMemory,
    pub(crate) pagemap: Pagemap,
}

impl ProcessMemory {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { memory: OwnMemory::open()?, pagemap: Pagemap::open()? })
    }

    pub(crate) fn renew(&self) -> io::Result<()> {
        self.memory.renew()?;
        self.pagemap.renew()
    }

    pub(crate) fn descriptors(&self) -> Vec<i32> {
        vec![self.memory.descriptor(), self.pagemap.descriptor()]
    }

    /// Copies neighbouring pages to frames. No thread writes to these pages.
    pub(crate) fn read_run(&self, pager: &Inner, run: &[Taken], frame: usize) -> io::Result<()> {
        let from = run[0].space.address(run[0].page);
        self.memory.read(from, pager.staging.frames_mut(frame, run.len()).as_flattened_mut())
    }

    /// Writes pages to their places.
    pub(crate) fn write(&self, at: usize, pages: &[Page]) -> io::Result<()> {
        // SAFETY: adopted memory, private and anonymous. Its words are `Busy`, made so by the
        // caller, and the bytes written are the contents of these pages.
        unsafe { self.memory.write(at, pages.as_flattened()) }
    }
}

/// Sets the access to adopted memory whose words are `Busy`.
pub(crate) fn allow(range: Range<usize>, access: Access) -> io::Result<()> {
    // SAFETY: adopted memory, which the program may access. A thread that accesses it now waits for
    // the words.
    unsafe { set_access(range, access) }
}

/// Changes access in a process that may have no mapping left. Other threads, or pages that leave,
/// may free a mapping. So this tries the call `tries` times, a millisecond apart.
pub(crate) fn allow_patiently(
    range: &Range<usize>,
    access: Access,
    tries: usize,
) -> io::Result<()> {
    for _ in 0..tries {
        match allow(range.clone(), access) {
            Err(error) if error.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) => {}
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    allow(range.clone(), access)
}

/// The first run of unset flags at or after `from`.
pub(crate) fn gap(flags: &[bool], from: usize) -> Option<Range<usize>> {
    let start = from + flags[from..].iter().position(|flag| !flag)?;
    let length = flags[start..].iter().position(|flag| *flag);
    Some(start..length.map_or(flags.len(), |length| start + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_between_pages_that_are_in_are_found() {
        let of = |flags: &[u8]| {
            let flags: Vec<_> = flags.iter().map(|flag| *flag == 1).collect();
            let mut at = 0;
            let next = || {
                let gap = gap(&flags, at)?;
                at = gap.end;
                Some(gap)
            };
            std::iter::from_fn(next).collect::<Vec<_>>()
        };
        assert_eq!(of(&[0, 0, 1, 0, 1, 1, 0]), [0..2, 3..4, 6..7]);
        assert_eq!(of(&[1, 1]), []);
        assert_eq!(of(&[]), []);
    }
}

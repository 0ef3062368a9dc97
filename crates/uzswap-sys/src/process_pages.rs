//! The pages of a process, with the kernel's state of each.

use crate::map::PAGE_BYTES;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Pages whose states are read at a time.
const CHUNK_PAGES: usize = 512;

/// An entry of `/proc/PID/pagemap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageState(u64);

impl PageState {
    /// True if the page is in memory.
    pub fn is_present(self) -> bool {
        self.0 & 1 << 63 != 0
    }

    /// True if the page is swapped out.
    pub fn is_swapped(self) -> bool {
        self.0 & 1 << 62 != 0
    }

    /// True if the page is of a file, or of shared memory.
    pub fn is_of_file(self) -> bool {
        self.0 & 1 << 61 != 0
    }

    /// The page's frame of memory; 0 unless the reader is root.
    pub fn frame(self) -> u64 {
        self.0 & ((1 << 55) - 1)
    }
}

/// The states of this process's pages in a range. Errors: those of opening and reading the file.
pub fn own_states(range: &Range<usize>) -> io::Result<Vec<PageState>> {
    let mut states = vec![0; range.len() / PAGE_BYTES * 8];
    let pagemap = File::open("/proc/thread-self/pagemap")?;
    pagemap.read_exact_at(&mut states, (range.start / PAGE_BYTES * 8) as u64)?;
    Ok(states.as_chunks().0.iter().map(|state| PageState(u64::from_le_bytes(*state))).collect())
}

/// The files that show a process's pages.
#[derive(Debug)]
pub struct ProcessPages {
    /// `/proc/PID/mem`.
    pub memory: File,
    /// `/proc/PID/pagemap`.
    pub pagemap: File,
}

impl ProcessPages {
    /// Calls `each` for each page of a mapping that is in memory or swapped out, except pages that
    /// the process has just unmapped. Errors: those of reading the states, and those of `each`.
    pub fn read(
        &self,
        range: Range<usize>,
        mut each: impl FnMut(PageState, &[u8; PAGE_BYTES]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut states = [0; CHUNK_PAGES * 8];
        let mut page = [0; PAGE_BYTES];
        for chunk in range.clone().step_by(CHUNK_PAGES * PAGE_BYTES) {
            let pages = ((range.end - chunk) / PAGE_BYTES).min(CHUNK_PAGES);
            let states = &mut states[..pages * 8];
            self.pagemap.read_exact_at(states, (chunk / PAGE_BYTES * 8) as u64)?;
            for (address, state) in (chunk..).step_by(PAGE_BYTES).zip(states.as_chunks().0) {
                let state = PageState(u64::from_le_bytes(*state));
                let is_there = state.is_present() || state.is_swapped();
                if is_there && self.memory.read_exact_at(&mut page, address as u64).is_ok() {
                    each(state, &page)?;
                }
            }
        }
        Ok(())
    }
}

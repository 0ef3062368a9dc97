//! The private copy of regions that a forked process gets ([`crate::OnFork::PrivateCopy`]).
//!
//! ```text
//! before the fork   page-outs stop; pages that are not in a region are written to a file
//! the fork          the kernel shares the other pages, copy on write
//! in the parent     page-outs go on
//! in the child      the shared pages are written to the file, too; the file is mapped privately
//!                   over the regions
//! ```
//! While page-outs are stopped (see [`crate::fork`]) pages only come in. So at the moment of the
//! fork each page is in its region, or in the file as it was when it left its region. Threads that
//! use the regions are not delayed. The child gets the content of one moment, as with any memory.
//!
//! The file has no name, so it is removed with the last process that maps it. The file is not kept
//! in memory: the kernel writes it to the disk when it wants to.

use crate::core::Inner;
use crate::core::space::Space;
use crate::page::word::Kind;
use crate::staging::BATCH;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::Pagemap;
use uzswap_sys::process::may_write_to;
use uzswap_sys::shared;

/// The folder of the file.
pub(crate) const FOLDER: &str = "/var/tmp";

/// The most pages that the child writes by one call.
const RUN: usize = 1024;

/// Regions on their way to a child.
pub(crate) struct Copy {
    file: File,
    parts: Vec<CopiedRegion>,
}

/// A region, and where its pages are in the file. A page that was never written is a hole.
struct CopiedRegion {
    space: Arc<Space>,
    offset: u64,
}

impl Copy {
    /// Writes the pages that are not in the regions of `pagers` to a file, and makes the next
    /// forked process inherit the rest. `None` without regions. Page-outs are stopped, and regions
    /// are neither mapped nor unmapped.
    pub(crate) fn make(pagers: &[Arc<Inner>]) -> io::Result<Option<Self>> {
        let mut parts = Vec::new();
        let mut offset = 0;
        for pager in pagers {
            for space in pager.regions().values() {
                parts.push(CopiedRegion { space: space.clone(), offset });
                offset += u64::from(space.pages()) * PAGE_BYTES as u64;
            }
        }
        if parts.is_empty() {
            return Ok(None);
        }
        if !may_write_to(offset) {
            return Err(Errno::FBIG.into());
        }
        let copy = Self { file: unnamed_file()?, parts };
        rustix::fs::ftruncate(&copy.file, offset)?;
        let mut run = PageRun { first: 0, pages: Vec::with_capacity(BATCH) };
        for part in &copy.parts {
            part.write_absent(&copy.file, &mut run)?;
        }
        let inherited = copy.parts.iter().try_for_each(|part| part.space.set_inherited(true));
        if inherited.is_err() {
            copy.keep_apart();
        }
        inherited.map(|()| Some(copy))
    }

    /// Restores the parent: later forks do not inherit the regions.
    pub(crate) fn keep_apart(&self) {
        for part in &self.parts {
            let done = part.space.set_inherited(false);
            done.expect("MADV_DONTFORK of our own mapping");
        }
    }

    /// Puts the regions in place in the child. After an error the child has no regions, and
    /// touching one is a SIGSEGV. Allocates nothing and takes no lock.
    pub(crate) fn put_in_place(&self) -> io::Result<()> {
        let covered = self.cover();
        if covered.is_err() {
            self.parts.iter().for_each(|part| part.space.abandon());
        }
        covered
    }

    fn cover(&self) -> io::Result<()> {
        let pagemap = Pagemap::open()?;
        self.parts.iter().try_for_each(|part| {
            part.write_present(&self.file, &pagemap)?;
            part.space.cover(&self.file, part.offset)
        })
    }
}

impl CopiedRegion {
    /// Writes all pages that are not in the region.
    fn write_absent(&self, file: &File, run: &mut PageRun) -> io::Result<()> {
        let pager = &self.space.pager;
        let mut next = self.space.next_touched(0);
        while let Some(page) = next {
            let mut copy: Page = [0; PAGE_BYTES];
            if pager.peek(&self.space, page, &mut copy)? && copy.iter().any(|byte| *byte != 0) {
                if !run.takes(page) {
                    run.write(file, self.offset)?;
                }
                run.push(page, copy);
            }
            next = self.space.next_touched(page + 1);
        }
        run.write(file, self.offset)
    }

    /// Writes all pages that are in the region, as this process has inherited it.
    fn write_present(&self, file: &File, pagemap: &Pagemap) -> io::Result<()> {
        let space = &self.space;
        let mut next = space.next_touched(0);
        while let Some(first) = next {
            let mut end = first;
            while end < space.pages()
                && end - first < RUN as u32
                && is_present(space, end, pagemap)?
            {
                end += 1;
            }
            if first < end {
                let offset = self.offset + u64::from(first) * PAGE_BYTES as u64;
                space.write_pages(first..end, file, offset)?;
            }
            next = space.next_touched(end.max(first + 1));
        }
        Ok(())
    }
}

/// True if a page is in the region, where it is newer than in the file.
fn is_present(space: &Space, page: u32, pagemap: &Pagemap) -> io::Result<bool> {
    match space.load(page).kind() {
        Kind::Resident => Ok(true),
        Kind::Untouched | Kind::Staged | Kind::Stored | Kind::Empty => Ok(false),
        // A thread of the parent was bringing the page in. Other threads may have written to the
        // page when it was present.
        Kind::Busy => pagemap.has_page(space.address(page)),
    }
}

/// Neighbouring pages that are written by one call.
struct PageRun {
    first: u32,
    pages: Vec<Page>,
}

impl PageRun {
    fn takes(&self, page: u32) -> bool {
        self.pages.is_empty()
            || self.pages.len() < BATCH && page == self.first + self.pages.len() as u32
    }

    fn push(&mut self, page: u32, content: Page) {
        if self.pages.is_empty() {
            self.first = page;
        }
        self.pages.push(content);
    }

    /// Writes the pages to the file, in which their region begins at `offset`.
    fn write(&mut self, file: &File, offset: u64) -> io::Result<()> {
        let at = offset + u64::from(self.first) * PAGE_BYTES as u64;
        let done = file.write_all_at(self.pages.as_flattened(), at);
        self.pages.clear();
        done
    }
}

/// A file without a name: on disk, or in memory if the file system of [`FOLDER`] has no such files.
fn unnamed_file() -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let on_disk = rustix::fs::open(FOLDER, flags, Mode::RUSR | Mode::WUSR);
    Ok(on_disk.or_else(|_| shared::create("uzswap-copy"))?.into())
}

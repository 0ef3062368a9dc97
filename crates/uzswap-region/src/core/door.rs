//! The means by which pages leave a program's memory and come back.
//!
//! ```text
//! out  words → Busy → [`Door::move_out`]: copied or moved to a frame, and closed to the program
//! in   words → Busy → loaded → [`Door::copy_in`]: complete before a thread can touch it
//! ```
//! A signal stops a thread that touches an absent page, and [`crate::fault`] serves it. The callers
//! of a door have made the words of its pages `Busy`.
//!
//! There are three doors, in [`crate::doors`].

use super::Inner;
use super::space::{Space, Taken};
use std::io;
use std::ops::Range;
use uzswap_engine::Page;
use uzswap_sys::map::Pagemap;
use uzswap_sys::uffd::Uffd;

pub(crate) trait Door: Send + Sync {
    /// The userfaultfd, if this door has one.
    fn uffd(&self) -> Option<&Uffd> {
        None
    }

    /// The descriptors that must stay open.
    fn descriptors(&self) -> Vec<i32>;

    /// Opens the descriptors again in a forked child, since the inherited ones refer to the
    /// parent's memory.
    fn renew(&self) -> io::Result<()>;

    /// The kernel's list of the present pages.
    fn pagemap(&self) -> &Pagemap;

    /// True if a page that is resident by its word may be absent, and then reads as zeros.
    /// Otherwise such a page is lost.
    fn may_be_absent(&self) -> bool;

    /// Makes touches of a range's absent pages faults for us from now on.
    fn watch(&self, range: Range<usize>) -> io::Result<()>;

    /// Closes the absent ones of up to 512 adopted pages, so that a touch is a fault. Marks a page
    /// that cannot be closed as present. If `has_pages`, the program may have used some pages since
    /// they were listed.
    fn close(&self, _at: usize, _there: &mut [bool], _has_pages: bool) {}

    /// True if long mappings stay open until their pages are used: closing a page takes memory.
    fn leaves_open(&self) -> bool {
        false
    }

    /// Closes pages that are adopted and were never used, at a cost that does not grow with their
    /// number. Fails if each page must be closed by itself.
    fn close_unused(&self, _range: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    /// Makes absent pages the program's own again: they read as zeros.
    fn open_unused(&self, range: Range<usize>) {
        self.let_go(range);
    }

    /// Makes the pages of a range ordinary memory of the program again. All these pages are
    /// present.
    fn let_go(&self, range: Range<usize>);

    /// Puts absent pages in their places. With `guard`, a write to them is a fault.
    fn copy_in(&self, at: usize, pages: &[Page], guard: bool) -> io::Result<()>;

    /// Brings in pages of zeros; `false` if the caller must copy them in. With `is_made`, each page
    /// gets its own memory.
    fn let_zeros_in(&self, range: Range<usize>, is_made: bool) -> bool;

    /// Moves the first of the victims to the frames that begin with `frame`, neighbours together.
    /// Returns the number of moved pages, and `false` if the next page has to stay.
    fn move_out(&self, pager: &Inner, victims: &[Taken], frame: usize) -> (usize, bool);

    /// Moves a page back from its frame; `false` if the caller must copy it in.
    fn move_back(&self, _pager: &Inner, _space: &Space, _page: u32, _frame: usize) -> bool {
        false
    }

    /// Closes the pages of a range, which the program has dropped. Returns `true` if touches of
    /// them are faults from now on.
    fn close_dropped(&self, range: Range<usize>) -> bool;

    /// `true` if a page may leave now.
    fn may_leave(&self, _space: &Space, _page: u32) -> bool {
        true
    }

    /// The least number of pages that should come in together.
    fn least_window(&self) -> usize {
        1
    }

    /// Names the program's only thread, or 0.
    fn set_only_thread(&self, _thread: i32) {}

    /// Reclaim calls this at intervals.
    fn tend(&self) {}
}

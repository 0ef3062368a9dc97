//! Programs and memory that are left alone, and calls that are refused, each with its reason.

use crate::{Name, Tree};

/// For `io_uring_setup`.
pub const IO_URING: &str = "io_uring is refused, since the kernel would use memory that is out";
/// For `mlockall`, and for `mlock` of much memory.
pub const LOCK: &str = "mlock of much memory is refused, since that memory would have to stay";

impl Tree {
    /// Counts this program as left alone, and keeps the reason: the joined parts of a text, cut to
    /// the available room. Allocates nothing.
    pub fn leave_alone(&self, text: &[&[u8]]) {
        self.leave_alone_as(self.own_name(), text);
    }

    /// As [`Self::leave_alone`], with this process's name, and without a system call.
    pub fn leave_alone_as(&self, own: Name, text: &[&[u8]]) {
        self.table.leave_alone(own, text);
    }

    /// Keeps the reason why `part` bytes of this program's memory are left alone. If several calls
    /// have the same text, the largest part counts.
    pub fn leave_part(&self, part: u64, text: &[&[u8]]) {
        self.table.leave_part(self.own_name(), part, text);
    }

    /// Keeps the reason, one of the above, why a call of this program was refused.
    pub fn refuse(&self, text: &[&[u8]]) {
        self.table.refuse(self.own_name(), text);
    }
}

//! A forked process's share of regions.

use crate::error::Error;
use std::fmt;
use std::str::FromStr;

/// A forked process's share of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFork {
    /// Nothing: a touch ends the child with SIGSEGV and a message.
    #[default]
    Absent,
    /// A copy of its own, as of any memory: neither process sees the writes of the other. In the
    /// child, calls on the region's handles fail, except those that unmap. The child may make
    /// pagers of its own.
    ///
    /// Each `fork` makes the copy, uncompressed, as a file without a name in `/var/tmp` that the
    /// child maps. The copy is beyond any budget, but the kernel need not keep it in memory. `fork`
    /// takes as long as decoding all pages and writing them to a file. If the copy cannot be made,
    /// the child has nothing, as above. Starting another program (`posix_spawn`, `vfork`, and so
    /// [`std::process::Command`] without `pre_exec`) makes no copy.
    ///
    /// While a fork is under way, calls of other threads that map, unmap, drop or page out wait,
    /// and faults may exceed the budget.
    PrivateCopy,
    /// The child inherits everything, the pager too: neither process sees the other's later writes.
    /// It is for code that wraps each fork ([`crate::Pager::before_fork`]), with adopted memory.
    Whole,
}

impl fmt::Display for OnFork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "absent",
            Self::PrivateCopy => "copy",
            Self::Whole => "whole",
        })
    }
}

impl FromStr for OnFork {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "absent" => Ok(Self::Absent),
            "copy" => Ok(Self::PrivateCopy),
            _ => Err(Error::Choice {
                what: "choice for forks",
                text: text.into(),
                known: "absent, copy",
            }),
        }
    }
}

//! The threads that serve faults, and the means that make an access a fault.

use crate::error::Error;
use std::fmt;
use std::str::FromStr;

/// The threads that serve faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The thread that faults, in a handler of SIGBUS. Needs no privilege and is faster. A system
    /// call that is given absent memory of a region fails with `EFAULT`: pin the memory first.
    InThread,
    /// Threads of the pager's own. System calls may be given any memory of a region. Needs access
    /// to `/dev/userfaultfd`, the sysctl `vm.unprivileged_userfaultfd`, or `CAP_SYS_PTRACE`.
    HandlerThreads,
    /// As [`Self::InThread`], in a handler of SIGSEGV: absent pages may not be accessed, or have
    /// guards in their places ([`Means`]). For memory that is adopted ([`crate::Pager::adopt`])
    /// where userfaultfd is denied; slower.
    Protection,
}

/// The means by which pages of adopted memory leave and come back, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// userfaultfd, and pages are moved (Linux 6.8).
    Moves,
    /// userfaultfd, and pages are copied (Linux 5.11).
    Copies,
    /// Guards stand in the places of absent pages (Linux 6.15). Needs `/proc/self/mem`, as does
    /// [`Self::Protection`].
    Guards,
    /// Absent pages may not be accessed.
    Protection,
}

impl Means {
    pub(crate) const ALL: [Self; 4] = [Self::Moves, Self::Copies, Self::Guards, Self::Protection];

    /// The mode that serves the faults of this means.
    pub fn mode(self) -> Mode {
        match self {
            Self::Moves | Self::Copies => Mode::InThread,
            Self::Guards | Self::Protection => Mode::Protection,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Moves => "userfaultfd",
            Self::Copies => "userfaultfd-copies",
            Self::Guards => "guards",
            Self::Protection => "protection",
        }
    }
}

impl FromStr for Means {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|means| means.name() == text);
        found.ok_or_else(|| Error::Choice {
            what: "means",
            text: text.into(),
            known: "userfaultfd, userfaultfd-copies, guards, protection",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InThread => "in-thread",
            Self::HandlerThreads => "handler-threads",
            Self::Protection => "protection",
        })
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "in-thread" => Ok(Self::InThread),
            "handler-threads" => Ok(Self::HandlerThreads),
            _ => Err(Error::Choice {
                what: "mode",
                text: text.into(),
                known: "in-thread, handler-threads",
            }),
        }
    }
}

//! The threads that serve faults, and the means that make an access a fault.

use crate::error::Error;
use crate::granules::Granules;
use std::fmt;
use std::str::FromStr;
use uzswap_sys::uffd::{Delivery, Uffd};

/// The threads that serve faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The thread that faults, in a handler of SIGBUS. Needs no privilege and is the faster one. A
    /// system call that is given absent memory of a region fails with `EFAULT`: pin it before.
    InThread,
    /// Threads of the pager's own. System calls may be given any memory of a region. Needs access
    /// to `/dev/userfaultfd`, the sysctl `vm.unprivileged_userfaultfd`, or `CAP_SYS_PTRACE`.
    HandlerThreads,
    /// As [`Self::InThread`], in a handler of SIGSEGV: pages that are out may not be accessed. For
    /// memory that is adopted ([`crate::Pager::adopt`]) where userfaultfd is denied; slower.
    Protection,
}

impl Mode {
    /// The safest mode that this process may use, or why there is none.
    pub fn available() -> Result<Self, Error> {
        if Uffd::open(Delivery::Message).is_ok() {
            return Ok(Self::HandlerThreads);
        }
        let opened = Uffd::open(Delivery::Signal).map(|_| Self::InThread);
        opened.map_err(|source| Error::Userfaultfd { source })
    }

    /// Checks if this process may use it; the error has the reason.
    pub fn check(self) -> Result<(), Error> {
        self.faults().map(|_| ())
    }

    /// The server of faults.
    pub(crate) fn faults(self) -> Result<Faults, Error> {
        let uffd = |delivery| Uffd::open(delivery).map(Faults::Missing);
        match self {
            Self::InThread => {
                uffd(Delivery::Signal).map_err(|source| Error::Userfaultfd { source })
            }
            Self::HandlerThreads => {
                uffd(Delivery::Message).map_err(|source| Error::HandlerThreads { source })
            }
            Self::Protection => {
                let granules = Granules::new().map(Faults::Forbidden);
                granules.map_err(|source| Error::OwnMemory { source })
            }
        }
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

/// The means that make an access to an evicted page a fault.
pub(crate) enum Faults {
    /// It is absent.
    Missing(Uffd),
    /// It may not be accessed.
    Forbidden(Granules),
}

//! The threads that serve faults, and the means that make an access a fault.

use crate::door::Door;
use crate::error::Error;
use crate::guards::Guards;
use crate::protection::Protection;
use crate::userfaultfd::Userfaultfd;
use std::fmt;
use std::io;
use std::str::FromStr;
use uzswap_sys::map::Pagemap;
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
    /// As [`Self::InThread`], in a handler of SIGSEGV: pages that are out may not be accessed, or
    /// have guards in their places ([`Means`]). For memory that is adopted
    /// ([`crate::Pager::adopt`]) where userfaultfd is denied; slower.
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
        self.door(None).map(|_| ())
    }

    /// The door of this mode; without `means` the fastest that there is.
    pub(crate) fn door(self, means: Option<Means>) -> Result<Box<dyn Door>, Error> {
        // Each door asks there.
        Pagemap::open().map_err(|source| Error::Pagemap { source })?;
        let uffd = |delivery| {
            let mut uffd = Uffd::open(delivery)?;
            if means == Some(Means::Copies) {
                uffd.forgo_moves();
            }
            Ok::<_, io::Error>(Box::new(Userfaultfd(uffd)) as Box<dyn Door>)
        };
        let guards = || Guards::open().map(|door| Box::new(door) as Box<dyn Door>);
        let protection = || Protection::open().map(|door| Box::new(door) as Box<dyn Door>);
        match self {
            Self::InThread => {
                uffd(Delivery::Signal).map_err(|source| Error::Userfaultfd { source })
            }
            Self::HandlerThreads => {
                uffd(Delivery::Message).map_err(|source| Error::HandlerThreads { source })
            }
            Self::Protection => match means {
                Some(Means::Guards) => guards(),
                Some(Means::Protection) => protection(),
                _ => guards().or_else(|_| protection()),
            }
            .map_err(|source| Error::OwnMemory { source }),
        }
    }
}

/// The means by which pages of adopted memory leave and come back, the fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// userfaultfd, and pages are moved (Linux 6.8).
    Moves,
    /// userfaultfd, and pages are copied (Linux 5.11).
    Copies,
    /// Guards in their places (Linux 6.15). Needs `/proc/self/mem`, as the next.
    Guards,
    /// They may not be accessed.
    Protection,
}

impl Means {
    const ALL: [Self; 4] = [Self::Moves, Self::Copies, Self::Guards, Self::Protection];

    /// The fastest that this process may use from `first` on, or why there is none: it is tried.
    pub fn available(first: Self) -> Result<Self, Error> {
        let from_first = Self::ALL.into_iter().skip_while(|means| *means != first);
        let mut tried = from_first.map(|means| means.check().map(|()| means));
        let mut last = tried.next().unwrap_or(Ok(Self::Protection));
        while let (Err(_), Some(next)) = (&last, tried.next()) {
            last = next;
        }
        last
    }

    /// Tries it. Errors: why this process may not use it.
    pub fn check(self) -> Result<(), Error> {
        let door = self.mode().door(Some(self))?;
        match self {
            Self::Moves if !door.uffd().is_some_and(Uffd::can_move) => {
                Err(Error::Userfaultfd { source: io::ErrorKind::Unsupported.into() })
            }
            _ => Ok(()),
        }
    }

    /// The mode that serves faults of such memory.
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

//! The means by which pages leave a program's memory and come back, each a [`Door`]:
//! [`userfaultfd`] or, where that is denied, [`guards`] if the kernel has them, and else
//! [`protection`].

mod guards;
mod process_memory;
mod protection;
mod userfaultfd;

use crate::core::door::Door;
use crate::error::Error;
use crate::mode::{Means, Mode};
use guards::Guards;
use protection::Protection;
use std::io;
use userfaultfd::Userfaultfd;
use uzswap_sys::cpu;
use uzswap_sys::map::Pagemap;
use uzswap_sys::uffd::{Delivery, Uffd};

/// The door of a mode; without `means` the fastest that works.
pub(crate) fn open(mode: Mode, means: Option<Means>) -> Result<Box<dyn Door>, Error> {
    cpu::check_pages()?;
    let uffd = |delivery| {
        let mut uffd = Uffd::open(delivery)?;
        if means == Some(Means::Copies) {
            uffd.forgo_moves();
        }
        Ok::<_, io::Error>(Box::new(Userfaultfd(uffd)) as Box<dyn Door>)
    };
    let guards = || Guards::open().map(|door| Box::new(door) as Box<dyn Door>);
    let protection = || Protection::open().map(|door| Box::new(door) as Box<dyn Door>);
    let opened = match mode {
        Mode::InThread => uffd(Delivery::Signal).map_err(|source| Error::Userfaultfd { source }),
        Mode::HandlerThreads => {
            uffd(Delivery::Message).map_err(|source| Error::HandlerThreads { source })
        }
        Mode::Protection => match means {
            Some(Means::Guards) => guards(),
            Some(Means::Protection) => protection(),
            _ => guards().or_else(|_| protection()),
        }
        .map_err(|source| Error::OwnMemory { source }),
    };
    // Each door reads the kernel's list of pages. If the kernel denies that list, the error says
    // so.
    opened.map_err(|error| match Pagemap::open() {
        Ok(_) => error,
        Err(source) => Error::Pagemap { source },
    })
}

impl Mode {
    /// The safest mode that this process may use, or the reason why there is none.
    pub fn available() -> Result<Self, Error> {
        cpu::check_pages()?;
        if Uffd::open(Delivery::Message).is_ok() {
            return Ok(Self::HandlerThreads);
        }
        let opened = Uffd::open(Delivery::Signal).map(|_| Self::InThread);
        opened.map_err(|source| Error::Userfaultfd { source })
    }

    /// Checks if this process may use this mode; the error has the reason.
    pub fn check(self) -> Result<(), Error> {
        open(self, None).map(|_| ())
    }
}

impl Means {
    /// Tries the means from `first` on; returns the fastest that this process may use, or the last
    /// error.
    pub fn available(first: Self) -> Result<Self, Error> {
        let from_first = Self::ALL.into_iter().skip_while(|means| *means != first);
        let mut tried = from_first.map(|means| means.check().map(|()| means));
        let mut last = tried.next().unwrap_or(Ok(Self::Protection));
        while let (Err(_), Some(next)) = (&last, tried.next()) {
            last = next;
        }
        last
    }

    /// Tries these means. The error has the reason why this process may not use them.
    pub fn check(self) -> Result<(), Error> {
        let door = open(self.mode(), Some(self))?;
        match self {
            Self::Moves if !door.uffd().is_some_and(Uffd::can_move) => {
                Err(Error::Userfaultfd { source: io::ErrorKind::Unsupported.into() })
            }
            _ => Ok(()),
        }
    }
}

//! The parts of a daemon that outlive it, so that another daemon can continue after a kill.
//!
//! The keeper has the descriptors of the cache's memory, of the backing, and over FUSE of the
//! connections to the kernel. (Over ublk the devices stay, and the kernel keeps the requests.) A
//! daemon is started with these descriptors. It passes them on to a new keeper when the old keeper
//! is gone, or to the program that it executes. If keeper and daemon are killed together, the
//! swapped pages are lost.

use crate::device::options::DaemonOptions;
use crate::device::processes::ProcessId;
use crate::error::Failure;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use uzswap_block::{BackingFile, KeptServer, TransportKind, open_backing_file};
use uzswap_sys::{process, shared};

/// The descriptors that outlive a daemon.
pub struct KeptDaemon {
    /// The memory of the cache.
    pub cache: OwnedFd,
    /// The state with which the server continues; `None` over ublk.
    pub server: Option<KeptServer>,
    /// The backing, if there is one.
    pub backing: Option<BackingFile>,
    /// The memory of the table of segments at a store; `None` without a store.
    pub store: Option<OwnedFd>,
}

/// The start data of a daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// The daemon that has started this process, if a keeper is started.
    pub daemon: Option<ProcessId>,
    /// True if that daemon serves. A daemon that failed to take over waits for the keeper's order.
    pub serves: bool,
    /// The requested options.
    pub options: DaemonOptions,
    /// Memory of the machine when the first daemon was started, bytes.
    pub ram: u64,
    /// The numbers of the descriptors that the next daemon continues with.
    pub kept: Option<Numbers>,
    /// The devices of the last daemon; `None` for the first.
    pub devices: Option<Vec<PathBuf>>,
}

/// Descriptors, by their numbers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Numbers {
    cache: i32,
    server: Option<ServerNumbers>,
    backing: Option<BackingNumber>,
    #[serde(default)]
    store: Option<i32>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ServerNumbers {
    requests: i32,
    connections: Vec<i32>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct BackingNumber {
    file: i32,
    bytes: u64,
    discards: bool,
}

impl KeptDaemon {
    /// Opens the descriptors that a daemon with these options needs. The errors are those of the
    /// backing and of FUSE. `Ok(Err(reason))`: nothing can outlive the daemon, since it is plain
    /// memory, or the kernel has no memory that stays locked without a process.
    pub fn open(options: &DaemonOptions) -> Result<Result<Self, String>, Failure> {
        if options.bare {
            return Ok(Err("plain memory ends with it".into()));
        }
        let is_over_fuse = options.transport == TransportKind::Fuse.to_string();
        let files = shared::create_unswappable().and_then(|cache| {
            let requests = is_over_fuse.then(shared::create_unswappable).transpose()?;
            let store = options.store.as_ref().map(|_| shared::create_unswappable()).transpose()?;
            Ok((cache, requests, store))
        });
        let (cache, requests, store) = match files {
            Ok(files) => files,
            Err(error) => return Ok(Err(format!("memory outside of it needs Linux 6.4: {error}"))),
        };
        let cannot = |error: io::Error| {
            Failure::new(format!("cannot serve over fuse: {error}; see `uzswap doctor`"))
        };
        let server = requests.map(|requests| KeptServer::new(options.threads, requests));
        Ok(Ok(Self {
            backing: open_backing_file(&options.backing.spec())?,
            cache,
            server: server.transpose().map_err(cannot)?,
            store,
        }))
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let backing = self.backing.iter().map(|backing| backing.file.as_fd());
        let server = self.server.iter();
        let server = server.flat_map(|server| server.connections().chain([server.requests()]));
        let store = self.store.iter().map(AsFd::as_fd);
        server.chain([self.cache.as_fd()]).chain(backing).chain(store)
    }

    /// Lets the programs that this process starts inherit them, or stops that.
    pub fn let_inherit(&self, is_inherited: bool) -> io::Result<()> {
        let each = if is_inherited { process::let_inherit } else { process::keep_from_inheriting };
        self.descriptors().try_for_each(each)
    }

    /// Their numbers, which are the same in a program that inherits them.
    pub fn numbers(&self) -> Numbers {
        Numbers {
            cache: self.cache.as_raw_fd(),
            server: self.server.as_ref().map(|server| ServerNumbers {
                requests: server.requests().as_raw_fd(),
                connections: server.connections().map(|one| one.as_raw_fd()).collect(),
            }),
            backing: self.backing.as_ref().map(|backing| BackingNumber {
                file: backing.file.as_raw_fd(),
                bytes: backing.bytes,
                discards: backing.discards,
            }),
            store: self.store.as_ref().map(AsRawFd::as_raw_fd),
        }
    }

    /// The descriptors that this process has inherited. A daemon passes [`process::inherited`] as
    /// `take`: the descriptors stay inheritable for another keeper. A keeper passes
    /// [`process::take_inherited`].
    pub fn inherited(
        numbers: &Numbers,
        take: impl Fn(i32) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        let server = numbers.server.as_ref().map(|server| {
            let connections = server.connections.iter().map(|number| take(*number));
            let connections = connections.collect::<io::Result<_>>()?;
            Ok::<_, io::Error>(KeptServer::of(connections, take(server.requests)?))
        });
        let backing = numbers.backing.as_ref().map(|backing| {
            let file = File::from(take(backing.file)?);
            let (bytes, discards) = (backing.bytes, backing.discards);
            Ok::<_, io::Error>(BackingFile { file, bytes, discards })
        });
        Ok(Self {
            cache: take(numbers.cache)?,
            server: server.transpose()?,
            backing: backing.transpose()?,
            store: numbers.store.map(take).transpose()?,
        })
    }
}

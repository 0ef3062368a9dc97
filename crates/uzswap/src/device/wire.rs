//! The messages of the processes to each other: a value a line, as JSON, over a socket that closes
//! when either of them ends.

use crate::device::group_change::GroupChange;
use crate::device::options::DaemonOptions;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SendFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use uzswap_block::{Offer, Room};

/// The requests of `run` to the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// The first: to take part.
    Join {
        /// Its number and command, for people.
        run: RunInfo,
        /// The options of the cache, for a keeper that was just started.
        options: Option<Box<DaemonOptions>>,
    },
    /// The first, to a keeper that has taken over from one that died: it took part already.
    Rejoin(i32),
    /// The only one: that the next daemon is of this program, and starts now.
    Upgrade(PathBuf),
    /// Where its command is about to run, so that somebody can end it.
    Place(GroupChange),
    /// Its command has ended, and nothing of it is left.
    Leave,
}

/// A run, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Number of its process.
    pub pid: i32,
    /// Its command.
    pub command: String,
    /// Its memory limit, bytes.
    pub memory: u64,
}

/// The answers of the keeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Tell {
    /// To [`Ask::Join`].
    Joined(Box<Joined>),
    /// To [`Ask::Join`] and [`Ask::Place`]: why it cannot be.
    Refused(String),
    /// To [`Ask::Join`]: there is another keeper, or this one is about to end. Ask again.
    Busy,
    /// To [`Ask::Place`].
    Noted,
    /// To [`Ask::Leave`].
    Left {
        /// Everything was undone, and the keeper ends.
        is_over: bool,
        /// The changes that could not be undone.
        troubles: Vec<String>,
    },
    /// The daemon died, and its swapped pages are lost, for this reason.
    Lost(String),
    /// The daemon died, and another one, with this number, has gone on with everything. To
    /// [`Ask::Upgrade`]: that is done.
    Replaced(i32),
    /// Pool and backing can take no more, or can again.
    Full(bool),
    /// So many runs use the cache now.
    Runs(usize),
    /// To those that have attached: to let go.
    Detach,
}

/// The cache that a run joins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Joined {
    /// Where the control files are.
    pub mount: PathBuf,
    /// The daemon's process.
    pub daemon: i32,
    /// The options with which the cache was made.
    pub options: DaemonOptions,
    /// How requests come to it.
    pub transport: String,
    /// True if it was made for this run.
    pub is_first: bool,
    /// The kernel's zswap is switched off for it.
    pub zswap_is_off: bool,
    /// The features that it goes on without.
    pub notes: Vec<String>,
    /// The remains of killed runs, and the changes that could not be undone.
    pub cleaned: Vec<String>,
}

/// The orders of the keeper to the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// To make a block device over a part of the disk, bytes.
    Attach(Range<u64>),
    /// That the kernel swaps to these devices, and to no other.
    Settle(Vec<PathBuf>),
    /// To say how much more it can take.
    TellRoom,
    /// To become a daemon of this program, which goes on. It is the same process, so that a process
    /// beside the keeper always has the memory that outlives a daemon.
    Become(PathBuf),
    /// To end: nothing is swapped to it any more. It does not while the kernel says otherwise.
    End,
}

/// The reports of the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum DaemonReport {
    /// It serves.
    Ready {
        /// Over which transport.
        transport: String,
        /// The features that it goes on without.
        notes: Vec<String>,
    },
    /// To [`Order::Attach`].
    Attached(Offer),
    /// To [`Order::TellRoom`], at any time after it.
    Room(Room),
    /// The reason that it cannot follow an order or start; it waits for other orders.
    Failed(String),
}

/// The orders of the keeper to the process that makes an area.
#[derive(Debug, Serialize, Deserialize)]
pub enum AreaOrder {
    /// To make a device over a part of the daemon's space, bytes.
    Make(Offer, Range<u64>),
    /// To have the kernel swap to it, at this priority. It is written down now.
    SwitchOn(u16),
}

/// The reports of that process.
#[derive(Debug, Serialize, Deserialize)]
pub enum AreaReport {
    /// The device that was made.
    Made(PathBuf),
    /// The kernel swaps to it.
    On,
    /// Why it cannot.
    Failed(String),
}

/// One end.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    /// The data that came and were not requested yet.
    come: Vec<u8>,
}

impl Wire {
    /// The end that a stream is.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, come: Vec::new() }
    }

    /// The end that this process was started with, as its standard input.
    pub fn of_stdin() -> io::Result<Self> {
        let stdin = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Self::new(UnixStream::from(stdin)))
    }

    /// Two ends: ours, and one for a process to be started with.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Self::new(ours), theirs.into()))
    }

    /// Another handle of this end, to send with.
    pub fn sender(&self) -> io::Result<Self> {
        Ok(Self::new(self.stream.try_clone()?))
    }

    /// Says something. Waits where the other one does not listen. Errors: nobody is there any more.
    pub fn send(&mut self, what: &impl Serialize) -> io::Result<()> {
        self.stream.write_all(&line(what)?)
    }

    /// Says as much of it as goes without waiting; how many bytes. Errors: nobody is there any
    /// more.
    pub fn send_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match rustix::net::send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            other => Ok(other?),
        }
    }

    /// True once the other process has sent a message or is gone. Waits at most so long; without a
    /// limit, until then.
    pub fn is_ready(&self, within: Option<Duration>) -> io::Result<bool> {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        let time = within.map(|within| Timespec {
            tv_sec: within.as_secs() as i64,
            tv_nsec: within.subsec_nanos().into(),
        });
        match rustix::event::poll(&mut polled, time.as_ref()) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            other => Ok(other? > 0),
        }
    }

    /// Waits for something to be said. Errors: `UnexpectedEof`, nobody is there any more;
    /// `InvalidData`, something else was said.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        loop {
            if let Some(said) = self.said() {
                return said;
            }
            self.read()?;
        }
    }

    /// The same, from the data that have come already, and at most one read; `None` if that is not
    /// a whole line. For a caller that has waited for the descriptor.
    pub fn receive_some<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.read()?;
        self.said().transpose()
    }

    /// The next message of those that have come whole.
    pub fn said<T: DeserializeOwned>(&mut self) -> Option<io::Result<T>> {
        let end = self.come.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.come.drain(..=end).collect();
        Some(serde_json::from_slice(&line).map_err(Into::into))
    }

    /// Takes the bytes that have come, and waits for some where none have. Errors: `UnexpectedEof`,
    /// nobody is there any more.
    pub fn read(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let count = loop {
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.come.extend_from_slice(&bytes[..count]);
        Ok(())
    }
}

/// A value as it is said.
pub fn line(what: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(line)
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_line_by_line() {
        let (mut ours, theirs) = Wire::pair().unwrap();
        let mut theirs = Wire::new(theirs.into());
        ours.send(&Order::Attach(0..4096)).unwrap();
        ours.send(&Order::Settle(Vec::new())).unwrap();
        assert!(matches!(theirs.receive(), Ok(Order::Attach(part)) if part == (0..4096)));
        assert!(matches!(theirs.said(), Some(Ok(Order::Settle(_)))));
        assert!(theirs.said::<Order>().is_none());
        drop(ours);
        let gone = theirs.receive::<Order>().unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::UnexpectedEof);
    }
}

//! The messages between our processes: JSON, one value on a line, over a socket that closes when
//! either process ends.

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

/// The messages of `run` to the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// The first message of a run that wants to take part.
    Join {
        /// The run's number and command, for people.
        run: RunInfo,
        /// The options of the cache, for a keeper that was just started.
        options: Option<Box<DaemonOptions>>,
    },
    /// The first message of a run that already takes part, to a keeper that took over.
    Rejoin(i32),
    /// The only message of `upgrade`: the next daemon is of this program, and starts now.
    Upgrade(PathBuf),
    /// The group of the run's command, so that the keeper can end it.
    Place(GroupChange),
    /// The command has ended, with all its processes.
    Leave,
}

/// A run, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Number of the run's process.
    pub pid: i32,
    pub command: String,
    /// The command's memory limit, bytes.
    pub memory: u64,
}

/// The messages of the keeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Tell {
    /// To [`Ask::Join`].
    Joined(Box<Joined>),
    /// To [`Ask::Join`] and [`Ask::Place`]: the reason for a refusal.
    Refused(String),
    /// Answers [`Ask::Join`] if there is another keeper, or if this keeper is about to end. The run
    /// asks again.
    Busy,
    /// To [`Ask::Place`].
    Noted,
    /// To [`Ask::Leave`].
    Left {
        /// True if everything was undone, and the keeper ends.
        is_over: bool,
        /// The changes that could not be undone.
        troubles: Vec<String>,
    },
    /// The daemon died, and the swapped pages are lost for this reason.
    Lost(String),
    /// A daemon with this number has replaced the dead one. As the answer to [`Ask::Upgrade`]: the
    /// upgrade is done.
    Replaced(i32),
    /// True if pool and backing can take no more, false if they can again.
    Full(bool),
    /// The number of runs that use the cache now.
    Runs(usize),
    /// To `attach`: restore the limit and end.
    Detach,
}

/// The cache that a run joins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Joined {
    /// The mount point of the control files.
    pub mount: PathBuf,
    pub daemon: i32,
    /// The options with which the cache was made.
    pub options: DaemonOptions,
    /// The transport of requests.
    pub transport: String,
    /// True if the cache was made for this run.
    pub is_first: bool,
    /// True if the keeper has switched the kernel's zswap off.
    pub zswap_is_off: bool,
    /// The features that are missing.
    pub notes: Vec<String>,
    /// The remains of killed runs, and the changes that could not be undone.
    pub cleaned: Vec<String>,
}

/// The orders of the keeper to the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Make a block device over this part of the disk, bytes.
    Attach(Range<u64>),
    /// The kernel swaps to these devices, and to no others.
    Settle(Vec<PathBuf>),
    /// Report how much more the cache can take.
    TellRoom,
    /// Execute this program, and continue as its daemon. The process stays the same, so that
    /// besides the keeper there is always a process with the memory that outlives a daemon.
    Become(PathBuf),
    /// The receiver shall end, since the kernel swaps nothing to the daemon any more. The daemon
    /// stays while the kernel lists one of its devices.
    End,
}

/// The messages of the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum DaemonReport {
    /// The daemon serves.
    Ready {
        transport: String,
        /// The features that are missing.
        notes: Vec<String>,
    },
    /// To [`Order::Attach`].
    Attached(Offer),
    /// To [`Order::TellRoom`], any time later.
    Room(Room),
    /// The daemon could not start or follow an order, for this reason. The daemon waits for other
    /// orders.
    Failed(String),
}

/// The orders of the keeper to the process that makes an area.
#[derive(Debug, Serialize, Deserialize)]
pub enum AreaOrder {
    /// Make a device over this part of the disk, bytes.
    Make(Offer, Range<u64>),
    /// The device is on the list now: have the kernel swap to it at this priority.
    SwitchOn(u16),
}

/// The messages of that process.
#[derive(Debug, Serialize, Deserialize)]
pub enum AreaReport {
    Made(PathBuf),
    /// The kernel swaps to the device.
    On,
    /// The reason for a failure.
    Failed(String),
}

/// One end of a socket.
#[derive(Debug)]
pub struct Wire {
    stream: UnixStream,
    /// Data that were read and belong to no whole message yet.
    come: Vec<u8>,
}

impl Wire {
    /// Makes an end of a stream.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, come: Vec::new() }
    }

    /// The end that this process has as its standard input.
    pub fn of_stdin() -> io::Result<Self> {
        let stdin = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Self::new(UnixStream::from(stdin)))
    }

    /// Two ends: ours, and one for a process that is about to be started.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Self::new(ours), theirs.into()))
    }

    /// Another handle of this end, for sending.
    pub fn sender(&self) -> io::Result<Self> {
        Ok(Self::new(self.stream.try_clone()?))
    }

    /// Sends a message. Waits until the other process reads. Fails if that process is gone.
    pub fn send(&mut self, what: &impl Serialize) -> io::Result<()> {
        self.stream.write_all(&line(what)?)
    }

    /// Sends as many bytes as is possible without waiting, and returns their number. Fails if the
    /// other process has closed the wire.
    pub fn send_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match rustix::net::send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            other => Ok(other?),
        }
    }

    /// True once the other process has sent a message or is gone. Waits at most this long, or
    /// without a limit.
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

    /// Waits for a message. Errors: `UnexpectedEof` if the other process has closed the wire;
    /// `InvalidData` for a message of another kind.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        loop {
            if let Some(said) = self.said() {
                return said;
            }
            self.read()?;
        }
    }

    /// The next message, from data that have arrived and at most one read; `None` if no line is
    /// complete. Called after the caller has polled the descriptor.
    pub fn receive_some<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.read()?;
        self.said().transpose()
    }

    /// The next complete message among the data that have come.
    pub fn said<T: DeserializeOwned>(&mut self) -> Option<io::Result<T>> {
        let end = self.come.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.come.drain(..=end).collect();
        Some(serde_json::from_slice(&line).map_err(Into::into))
    }

    /// Reads some bytes, and waits for them if none have come. Error: `UnexpectedEof` if the other
    /// process is gone.
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

/// A message as a line.
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
    fn messages_arrive_line_by_line() {
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

//! The daemon as its keeper has it: started, heard and asked.

use super::phase::Act;
use super::{Keeper, LOOK, cannot_start};
use crate::device::kept::{KeptDaemon, Start};
use crate::device::phase::Phased;
use crate::device::processes::ProcessId;
use crate::device::spared;
use crate::device::wire::{DaemonReport, Order};
use crate::error::Failure;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};
use uzswap_block::Room;
use uzswap_sys::process;

/// The room of the cache, as the daemon reports it. The keeper requests it by a message and does
/// not wait. Before a machine sleeps, the kernel can stop a process that waits for a message, but
/// not one that reads a file of a daemon that is stopped already.
#[derive(Default)]
pub struct RoomLook {
    /// The last answer, until the keeper takes it.
    new: Option<Room>,
    /// True until the answer comes.
    is_awaited: bool,
    asked_at: Option<Instant>,
}

impl RoomLook {
    /// True if no answer is awaited and `pause` has passed since the last request.
    fn is_due(&self, pause: Duration) -> bool {
        !self.is_awaited && self.asked_at.is_none_or(|at| at.elapsed() >= pause)
    }

    fn asked(&mut self) {
        (self.is_awaited, self.asked_at) = (true, Some(Instant::now()));
    }

    fn heard(&mut self, room: Room) {
        (self.new, self.is_awaited) = (Some(room), false);
    }

    /// Begins with a new daemon, which the keeper has not asked yet.
    fn begin_anew(&mut self) {
        (self.is_awaited, self.asked_at) = (false, None);
    }

    /// The last answer. It is returned only once.
    pub fn take_new(&mut self) -> Option<Room> {
        self.new.take()
    }
}

impl Keeper {
    /// Asks the daemon how much more the cache can take, if that is due.
    pub(super) fn ask_for_room(&mut self) {
        if !self.room.is_due(self.space.pause()) {
            return;
        }
        // An error means that the daemon has died. The next one will be asked.
        if self.daemon.as_mut().is_some_and(|daemon| daemon.send(&Order::TellRoom).is_ok()) {
            self.room.asked();
        }
    }

    /// Takes the answer if it has arrived. Fails if the daemon is gone.
    pub(super) fn hear_room(&mut self) -> io::Result<()> {
        let wire = self.daemon.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            match wire.said() {
                Some(Ok(DaemonReport::Room(room))) => self.room.heard(room),
                // The daemon sends any other report only when the keeper waits for it.
                Some(_) => return Err(io::ErrorKind::InvalidData.into()),
                None if wire.is_ready(Some(Duration::ZERO))? => wire.read()?,
                None => return Ok(()),
            }
        }
    }

    /// Starts the first daemon, or a daemon that continues with the devices of the last.
    pub(super) fn start_daemon(&mut self) -> Result<(), Failure> {
        self.phase.require(Act::StartDaemon);
        let before = self.state.daemon;
        let number = self.lock.0.as_raw_fd().to_string();
        self.let_inherit(true).map_err(cannot_start)?;
        let arguments = ["daemon".into(), "--lock".into(), number];
        let started = spared::start_of(&self.program, &arguments);
        self.let_inherit(false).map_err(cannot_start)?;
        let (child, wire) = started.map_err(cannot_start)?;
        self.state.daemon = ProcessId::of(child.id());
        self.daemon_child = Some(child);
        let start = Start {
            daemon: None,
            serves: false,
            options: self.options.clone(),
            ram: self.ram,
            kept: self.kept.as_ref().map(KeptDaemon::numbers),
            devices: before.map(|_| self.state.devices().cloned().collect()),
        };
        // First of all: with this, the daemon can do without a keeper.
        let daemon = self.daemon.insert(wire);
        daemon.send(&start).map_err(cannot_start)?;
        self.save_of_daemon()?;
        self.await_daemon()?.into_iter().for_each(|note| self.note(note));
        Ok(())
    }

    /// Writes the state down at a daemon's start. A daemon that takes over pages must serve even if
    /// there is no space to write. Such a daemon itself reports its number to the next keeper.
    fn save_of_daemon(&mut self) -> Result<(), Failure> {
        let saved = self.save();
        match saved {
            Err(failure) if !self.state.areas.is_empty() => self.trouble(failure.to_string()),
            saved => saved?,
        }
        Ok(())
    }

    /// Waits until the daemon serves, and returns its notes.
    pub(super) fn await_daemon(&mut self) -> Result<Vec<String>, Failure> {
        match self.hear_daemon() {
            Ok(DaemonReport::Ready { transport, notes }) => {
                self.options.transport.clone_from(&transport);
                self.state.transport = transport;
                self.daemon_since = Instant::now();
                self.room.begin_anew();
                self.save_of_daemon().map(|()| notes)
            }
            Ok(DaemonReport::Failed(message)) => Err(Failure::new(message)),
            Ok(DaemonReport::Attached(_) | DaemonReport::Room(_)) | Err(_) => {
                Err(Failure::new("the daemon ended before it was ready"))
            }
        }
    }

    /// Sends the daemon an order that it answers, and returns the answer.
    pub(super) fn ask_daemon(&mut self, order: &Order) -> io::Result<DaemonReport> {
        self.daemon.as_mut().ok_or(io::ErrorKind::NotConnected)?.send(order)?;
        self.hear_daemon()
    }

    /// Waits for the daemon's answer to an order. Fails if the daemon has begun to end. The wire
    /// may never show that, since a process that hangs at its end closes none of its files.
    pub(super) fn hear_daemon(&mut self) -> io::Result<DaemonReport> {
        let wire = self.daemon.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            match wire.said().transpose()? {
                // The answer to an earlier request.
                Some(DaemonReport::Room(room)) => self.room.heard(room),
                Some(said) => return Ok(said),
                None => {
                    let is_ending = self.state.daemon.is_none_or(|daemon| daemon.is_ending());
                    if wire.is_ready(Some(if is_ending { Duration::ZERO } else { LOOK }))? {
                        wire.read()?;
                    } else if is_ending {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
            }
        }
    }

    /// Lets the next started process inherit a daemon's descriptors, or stops that.
    pub(super) fn let_inherit(&self, is_inherited: bool) -> io::Result<()> {
        let lock = self.lock.0.as_fd();
        match is_inherited {
            true => process::let_inherit(lock)?,
            false => process::keep_from_inheriting(lock)?,
        }
        self.kept.iter().try_for_each(|kept| kept.let_inherit(is_inherited))
    }
}

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
use uzswap_sys::process;

impl Keeper {
    /// Starts a daemon: the first, or one that goes on with the devices of the one before.
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
        // Before anything else: once it has this it can do without us.
        let daemon = self.daemon.insert(wire);
        daemon.send(&start).map_err(cannot_start)?;
        self.save_of_daemon()?;
        self.await_daemon()?.into_iter().for_each(|note| self.note(note));
        Ok(())
    }

    /// Writes the state down where a daemon begins. One that goes on with pages has to serve even
    /// where there is no room for that: it tells the keeper that follows us its number.
    fn save_of_daemon(&mut self) -> Result<(), Failure> {
        let saved = self.save();
        match saved {
            Err(failure) if !self.state.areas.is_empty() => self.trouble(failure.to_string()),
            saved => saved?,
        }
        Ok(())
    }

    /// Waits until the daemon serves; its notes.
    pub(super) fn await_daemon(&mut self) -> Result<Vec<String>, Failure> {
        match self.hear_daemon() {
            Ok(DaemonReport::Ready { transport, notes }) => {
                self.options.transport.clone_from(&transport);
                self.state.transport = transport;
                self.daemon_since = Instant::now();
                self.save_of_daemon().map(|()| notes)
            }
            Ok(DaemonReport::Failed(message)) => Err(Failure::new(message)),
            Ok(DaemonReport::Attached(_)) | Err(_) => {
                Err(Failure::new("the daemon ended before it was ready"))
            }
        }
    }

    /// Orders something of the daemon that it answers; its answer.
    pub(super) fn ask_daemon(&mut self, order: &Order) -> io::Result<DaemonReport> {
        self.daemon.as_mut().ok_or(io::ErrorKind::NotConnected)?.send(order)?;
        self.hear_daemon()
    }

    /// Waits for the daemon to say something. Errors: it has begun to end. Its wire may never tell:
    /// a process that waits for something while it ends closes none of its files.
    pub(super) fn hear_daemon(&mut self) -> io::Result<DaemonReport> {
        let wire = self.daemon.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            let is_ending = self.state.daemon.is_none_or(|daemon| daemon.is_ending());
            if wire.is_ready(Some(if is_ending { Duration::ZERO } else { LOOK }))? {
                if let Some(said) = wire.receive_some()? {
                    return Ok(said);
                }
            } else if is_ending {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Has the next process inherit a daemon's descriptors, or ends that.
    pub(super) fn let_inherit(&self, is_inherited: bool) -> io::Result<()> {
        let lock = self.lock.0.as_fd();
        match is_inherited {
            true => process::let_inherit(lock)?,
            false => process::keep_from_inheriting(lock)?,
        }
        self.kept.iter().try_for_each(|kept| kept.let_inherit(is_inherited))
    }
}

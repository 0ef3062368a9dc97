//! Replacing the daemon: after it was killed, or by another version.

use super::phase::{Act, Phase};
use super::{COME_BACK, Keeper};
use crate::device::phase::Phased;
use crate::device::processes::{self, OWN_PROGRAM};
use crate::device::wire::{Order, Tell};
use crate::error::Failure;
use std::path::{Path, PathBuf};
use uzswap_sys::process;

impl Keeper {
    /// Starts a daemon in place of a dead one.
    pub(super) fn daemon_died(&mut self) {
        if !self.phase.may(Act::StartDaemon) {
            // The kernel swaps nothing to the daemon any more.
            self.daemon = None;
            return;
        }
        self.bury_daemon();
        self.go_on();
    }

    /// Starts a daemon where none serves. If that fails, the swapped pages are lost.
    pub(super) fn go_on(&mut self) {
        match self.replace_daemon() {
            Ok(()) => {
                let daemon = self.state.daemon.map_or(0, |daemon| daemon.pid);
                self.tell_all(&Tell::Replaced(daemon));
            }
            Err(failure) => self.lose(&failure),
        }
    }

    /// The swapped pages are lost.
    fn lose(&mut self, why: &Failure) {
        if self.state.is_serving {
            // A run hears of the loss by a message.
            self.trouble(format!("the daemon died: {why}"));
        }
        self.bury_daemon();
        self.phase.become_next(Phase::Lost);
        self.is_lost = true;
        self.tell_all(&Tell::Lost(why.to_string()));
        for place in self.state.runs.iter().filter_map(|run| run.place.as_ref()) {
            place.kill();
        }
        // Closing the last descriptor ends the connection to FUSE, which wakes threads that wait
        // for a page. Over ublk a stand-in must answer them, or they would wait for ever.
        self.kept = None;
        match self.state.stand_in() {
            Ok(stand_in) => self.stand_in = stand_in,
            Err(error) => self.trouble(error.to_string()),
        }
        self.is_told_to_end = true;
    }

    /// Kills the daemon and waits until none of its threads runs: two daemons may never use the
    /// memory at the same time. Does not wait until the daemon's files are closed, which may hang.
    fn bury_daemon(&mut self) {
        self.phase.require(Act::KillDaemon);
        // Closed after the daemon is over. A living daemon would take the closed wire for the
        // keeper's death, and start another keeper.
        let _wire = self.daemon.take();
        if let Some(daemon) = self.state.daemon.filter(|daemon| !daemon.is_over()) {
            // An error means that the daemon has just died.
            let _ = process::kill(daemon.pid, libc::SIGKILL);
            // We wait however long this takes: the daemon may be reading the disk into memory that
            // outlives it.
            while !processes::wait_for(COME_BACK, || daemon.is_over()) {}
        }
        self.buried.extend(self.daemon_child.take());
    }

    fn replace_daemon(&mut self) -> Result<(), Failure> {
        if self.kept.is_none() {
            return Err(Failure::new("no other daemon can take over its memory"));
        }
        self.short_lives.died_after(self.daemon_since.elapsed());
        let mut why = Failure::new("each daemon that takes over its memory ends immediately");
        while let Some(pause) = self.short_lives.pause() {
            std::thread::sleep(pause);
            match self.start_next() {
                Ok(()) => return Ok(()),
                // The new daemon may have been killed like the last.
                Err(failure) => why = failure,
            }
            self.short_lives.failed();
        }
        Err(why)
    }

    /// Starts a daemon after one is gone or has failed to take over. If that fails, the next
    /// attempt uses our own program, since the new version may be gone, or not understand the
    /// memory.
    fn start_next(&mut self) -> Result<(), Failure> {
        let Err(failure) = self.order_or_start() else { return Ok(()) };
        // If the remaining daemon runs another program, only the keeper can start our own.
        if self.program != Path::new(OWN_PROGRAM) || self.has_dead_daemon() {
            self.bury_daemon();
            self.program = OWN_PROGRAM.into();
        }
        Err(failure)
    }

    /// Orders the remaining daemon to become the next daemon, or starts a daemon.
    fn order_or_start(&mut self) -> Result<(), Failure> {
        let order = Order::Become(self.program.clone());
        // An error means that the daemon has died.
        let is_told = self.daemon.as_mut().is_some_and(|daemon| daemon.send(&order).is_ok());
        if is_told { self.await_daemon().map(drop) } else { self.start_daemon() }
    }

    /// Replaces the daemon by one of another program, or by the old program again if that fails. A
    /// keeper of runs is replaced by the daemon too. `serve` stays, since it is the process that a
    /// person or systemd has started.
    pub(super) fn upgrade(&mut self, index: usize, program: PathBuf) {
        let upgraded = self.replace_by(program);
        let daemon = self.state.daemon.map_or(0, |daemon| daemon.pid);
        let answer = match &upgraded {
            Ok(()) => Tell::Replaced(daemon),
            Err(failure) => Tell::Refused(failure.to_string()),
        };
        // Sent before the wire is closed: a few bytes, to a process that waits for them.
        self.members[index].tell(answer);
        self.members.swap_remove(index);
        if upgraded.is_ok() {
            self.tell_all(&Tell::Replaced(daemon));
            if !self.state.is_serving {
                // Exits as if a signal killed the process: nothing is undone.
                std::process::exit(0);
            }
        }
    }

    fn replace_by(&mut self, program: PathBuf) -> Result<(), Failure> {
        if self.kept.is_none() {
            return Err(Failure::new(
                "swapped pages would not outlive the daemon (before Linux 6.4); end all runs and \
                 serve, and start them again",
            ));
        }
        self.program = program;
        let Err(why) = self.start_next() else { return Ok(()) };
        match self.replace_daemon() {
            Ok(()) => Err(Failure::new(format!("{why}; the old version goes on"))),
            Err(failure) => {
                self.lose(&failure);
                Err(why)
            }
        }
    }

    /// True if the daemon has died and has not been replaced.
    pub(super) fn has_dead_daemon(&mut self) -> bool {
        self.hear_room().is_err() || self.state.daemon.is_none_or(|daemon| daemon.is_ending())
    }
}

//! Making swap areas, and having the kernel read them back and forget them.
//!
//! Separate processes do both (area.rs, `switching_off::run`) and wait for the daemon, since the
//! keeper must not wait. Nothing here waits: the keeper polls for their results.

use super::decide::{Emptying, Seen, SwitchOff, refused};
use super::phase::{Act, Phase};
use super::{COME_BACK, Keeper, RETRY};
use crate::device::ledger::AreaChange;
use crate::device::phase::Phased;
use crate::device::processes::{self, ProcessId};
use crate::device::wire::{AreaOrder, AreaReport, DaemonReport, Order, Tell, Wire};
use crate::device::{folder, spared, switching_off};
use crate::error::Failure;
use std::fs;
use std::io;
use std::ops::Range;
use std::process::Child;
use std::time::Instant;
use uzswap_sys::process;
use uzswap_sys::swap::{self, PRIORITY_MAX};

/// A process that makes a further area.
pub struct Maker {
    pub wire: Wire,
    child: Child,
    part: Range<u64>,
    /// The daemon that served when this process began.
    daemon: Option<ProcessId>,
}

impl Keeper {
    /// True if a process of this keeper or of the last one is making an area.
    pub(super) fn has_maker(&self) -> bool {
        self.maker.is_some() || self.state.area_maker.is_some_and(|maker| !maker.is_over())
    }

    /// Starts the process that makes a further area.
    pub(super) fn begin_area(&mut self, part: Range<u64>) -> Result<(), Failure> {
        self.phase.require(Act::MakeArea);
        let gone = |error: io::Error| Failure::new(format!("the daemon does not answer: {error}"));
        let offer = match self.ask_daemon(&Order::Attach(part.clone())).map_err(gone)? {
            DaemonReport::Attached(offer) => offer,
            DaemonReport::Failed(message) => return Err(Failure::new(message)),
            DaemonReport::Ready { .. } | DaemonReport::Room(_) => {
                return Err(gone(io::ErrorKind::InvalidData.into()));
            }
        };
        let cannot = |error: io::Error| Failure::new(format!("cannot make an area: {error}"));
        let (child, mut wire) = spared::start(&["switch-on".into()]).map_err(cannot)?;
        // The state names the child before the child gets an order, so that the next keeper makes
        // no area beside this one.
        self.state.area_maker = ProcessId::of(child.id());
        self.save()?;
        // An error means that the process has ended, as its wire will show.
        let _ = wire.send(&AreaOrder::Make(offer, part.clone()));
        self.maker = Some(Maker { wire, child, part, daemon: self.state.daemon });
        Ok(())
    }

    /// Receives a message of the process that makes an area, or notices that it is gone.
    pub(super) fn hear_maker(&mut self) {
        let Some(maker) = &mut self.maker else { return };
        let said = match maker.wire.receive_some() {
            Ok(None) => return,
            Ok(Some(said)) => said,
            Err(error) => AreaReport::Failed(format!("the process that makes an area: {error}")),
        };
        match said {
            AreaReport::Made(device) => {
                // An earlier device of that name is gone.
                self.state.areas.retain(|area| area.device != device);
                let priority = PRIORITY_MAX.saturating_sub(self.state.areas.len() as u16);
                self.state.areas.push(AreaChange { device, part: maker.part.clone() });
                // If this cannot be saved, the process must not continue: it gets no answer, and
                // gives up.
                let is_told = self.save().and_then(|()| {
                    let order = AreaOrder::SwitchOn(priority);
                    let maker = self.maker.as_mut().ok_or_else(|| Failure::new("it is gone"))?;
                    maker.wire.send(&order).map_err(|error| Failure::new(error.to_string()))
                });
                if let Err(failure) = is_told {
                    self.end_maker(Err(failure));
                }
            }
            AreaReport::On => {
                self.space.has_grown();
                self.end_maker(Ok(()));
            }
            AreaReport::Failed(message) => self.end_maker(Err(Failure::new(message))),
        }
    }

    /// The process that makes an area has ended, or is about to, with `outcome`. The area's device
    /// stays on the list: until that process has ended, it may still switch the area on.
    fn end_maker(&mut self, outcome: Result<(), Failure>) {
        let Some(Maker { child, daemon, .. }) = self.maker.take() else { return };
        self.buried.push(child);
        // If the daemon was killed before the area was on, the device is gone as well. That is no
        // failure: the next daemon is to make the area.
        let is_replaced = self.state.daemon != daemon && !self.is_lost;
        let outcome = if is_replaced { outcome.or(Ok(())) } else { outcome };
        self.tell_devices();
        if let Err(failure) = self.save() {
            self.trouble(failure.to_string());
        }
        self.made = Some(outcome);
    }

    /// Tells the daemon the areas that the kernel swaps to.
    pub(super) fn tell_devices(&mut self) {
        let devices = self.state.devices().cloned().collect();
        // An error means that the daemon has died. The next daemon is told at its start.
        let _ = self.daemon.as_mut().map(|daemon| daemon.send(&Order::Settle(devices)));
    }

    /// Starts making areas while more are wanted. If the daemon is killed during that, the next
    /// daemon serves them.
    pub(super) fn grow(&mut self) -> Result<(), Failure> {
        let grown = match self.made.take() {
            Some(made) => made,
            None if self.has_maker() => return Ok(()),
            None => self.begin_wanted_area(),
        };
        if grown.is_err() && self.kept.is_some() && self.has_dead_daemon() {
            self.daemon_died();
            return if self.is_lost { grown } else { Ok(()) };
        }
        grown
    }

    fn begin_wanted_area(&mut self) -> Result<(), Failure> {
        let areas = self.state.areas_on().map_err(super::cannot_start)?;
        match self.space.wants(&areas, &self.state.taken_parts()) {
            None => Ok(()),
            Some(part) => self.begin_area(part),
        }
    }

    /// No process needs the areas any more.
    pub(super) fn begin_emptying(&mut self) {
        self.space.release();
        self.phase.become_next(Phase::Emptying);
    }

    /// Has a process switch the areas off, and returns the progress of that process.
    pub(super) fn empty(&mut self) {
        let areas = self.state.areas_on();
        let seen = Seen {
            has_maker: self.has_maker(),
            is_listed: areas.as_ref().ok().map(|areas| !areas.is_empty()),
            off: self.look_at_switch_off(),
            has_runs: !self.state.runs.is_empty(),
        };
        match (seen.next(), areas) {
            (Emptying::Wait, _) => {}
            (Emptying::End, _) => self.phase.become_next(Phase::Ending),
            (Emptying::SwitchOff, Ok(areas)) => self.begin_switching_off(&areas),
            (Emptying::Refuse, Ok(areas)) => {
                self.refused(&switching_off::failed(&areas).to_string());
            }
            (_, Err(error)) => self.refused(&format!("/proc/swaps: {error}")),
        }
    }

    /// The state of the process that switches areas off. Its end is reported once.
    fn look_at_switch_off(&mut self) -> SwitchOff {
        let Some(child) = &mut self.off else { return SwitchOff::Idle };
        let state = match child.try_wait() {
            Ok(None) => return SwitchOff::UnderWay,
            Ok(Some(status)) if status.success() => SwitchOff::Done,
            // An error means that the process is not our child.
            Ok(Some(_)) | Err(_) => SwitchOff::Failed,
        };
        self.off = None;
        state
    }

    fn begin_switching_off(&mut self, areas: &[swap::Area]) {
        // Reading lost pages back takes no memory.
        let has_room = self.is_lost
            || switching_off::check_room(areas).map_or_else(
                |error| {
                    self.refused(&error.to_string());
                    false
                },
                |()| true,
            );
        if !has_room || self.retry_at.is_some_and(|at| self.is_lost && Instant::now() < at) {
            return;
        }
        match switching_off::start(areas) {
            Ok(child) => self.off = Some(child),
            Err(error) => self.refused(&error.to_string()),
        }
    }

    /// The kernel cannot read everything back now. Waiting processes learn of this, and the daemon
    /// continues to serve.
    fn refused(&mut self, why: &str) {
        self.retry_at = Some(Instant::now() + RETRY);
        // The sender of the order to end repeats it to `serve`, but not to a keeper that took over.
        let next = refused(self.phase, self.state.is_serving && !self.has_taken_over);
        if next == self.phase {
            return;
        }
        self.trouble(why.to_owned());
        self.phase.become_next(next);
        if next == Phase::Serving {
            self.is_told_to_end = false;
            return;
        }
        let pid = self.state.daemon.map_or(0, |daemon| daemon.pid);
        self.troubles.push(format!("the daemon ({pid}) goes on serving it, and tries again"));
        let troubles = std::mem::take(&mut self.troubles);
        self.tell_all(&Tell::Left { is_over: false, troubles });
    }

    /// Undoes everything.
    pub(super) fn end(&mut self) {
        self.phase.require(Act::Remove);
        // From now on a new process finds no keeper, and waits for the lock.
        let _ = fs::remove_file(folder::socket());
        let (daemon, mut wire, phase) = (self.state.daemon, self.daemon.as_mut(), self.phase);
        let devices: Vec<_> = self.state.devices().cloned().collect();
        let has_daemon = wire.is_some();
        let mut end_daemon = || {
            phase.require(Act::EndDaemon);
            // An error means that the daemon is gone.
            let _ = wire.as_mut().map(|wire| wire.send(&Order::End));
            let is_over = || daemon.is_none_or(|daemon| daemon.is_over());
            let is_gone = || daemon.is_none_or(|daemon| process::is_gone(daemon.pid));
            if processes::wait_for(COME_BACK, is_over) {
                // The daemon's files may take for ever to close, on a disk that does not answer.
                processes::wait_for(COME_BACK, is_gone);
                return Ok(());
            }
            // The daemon does not end while the kernel lists one of its devices.
            let is_listed = |area: &swap::Area| devices.contains(&area.path);
            if swap::areas()?.iter().any(is_listed) {
                return Err(io::Error::other("another process has switched its device on again"));
            }
            daemon.map_or(Ok(()), |daemon| process::kill(daemon.pid, libc::SIGKILL))
        };
        let end_daemon: Option<&mut dyn FnMut() -> _> =
            if has_daemon { Some(&mut end_daemon) } else { None };
        let troubles = self.state.undo(end_daemon);
        if self.state.is_in_use() {
            return self.phase.become_next(Phase::Emptying);
        }
        self.troubles.extend(troubles);
        self.stand_in = None;
        self.phase.become_next(Phase::Over);
        self.tell_all(&Tell::Left { is_over: true, troubles: self.troubles.clone() });
        self.tell_what_waits();
    }
}

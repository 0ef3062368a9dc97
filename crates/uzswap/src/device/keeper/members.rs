//! The processes with a wire to the keeper: runs, and `uzswap upgrade`.

use super::Keeper;
use super::phase::Act;
use crate::device::folder;
use crate::device::group_change::GroupChange;
use crate::device::ledger::RunChange;
use crate::device::phase::Phased;
use crate::device::wire::{self, Ask, Joined, RunInfo, Tell, Wire};
use std::collections::VecDeque;
use std::io;
use std::mem::discriminant;

/// A process with a wire to the keeper.
pub struct Member {
    pub wire: Wire,
    /// The process number of the member, if it is a run.
    pub run: Option<i32>,
    outbox: Outbox,
}

/// Messages that cannot be sent to a member without waiting: the member may be stopped. Only the
/// last of each kind is kept, so the outbox stays small.
#[derive(Default)]
pub struct Outbox {
    waits: VecDeque<Tell>,
    /// The rest of a message that was sent in part.
    rest: Vec<u8>,
}

impl Outbox {
    /// Queues a message.
    pub fn put(&mut self, what: Tell) {
        self.waits.retain(|other| discriminant(other) != discriminant(&what));
        self.waits.push_back(what);
    }

    /// True if no message waits.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty() && self.waits.is_empty()
    }

    /// Sends as many bytes as the wire accepts without waiting. `some` sends bytes and returns the
    /// number of bytes that it sent. An error means that the member is gone, as its wire will show.
    pub fn send(&mut self, mut some: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        loop {
            if self.rest.is_empty() {
                let Some(next) = self.waits.pop_front() else { return Ok(()) };
                self.rest = wire::line(&next)?;
            }
            let sent = some(&self.rest)?;
            self.rest.drain(..sent);
            if !self.rest.is_empty() {
                return Ok(());
            }
        }
    }
}

impl Member {
    pub fn new(wire: Wire) -> Self {
        Self { wire, run: None, outbox: Outbox::default() }
    }

    /// Sends a message now, or when the member reads.
    pub fn tell(&mut self, what: Tell) {
        self.outbox.put(what);
        self.tell_what_waits();
    }

    /// True if a message waits to be sent.
    pub fn has_waiting(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub fn tell_what_waits(&mut self) {
        // An error means that the member is gone, which the next look at its wire shows.
        if self.outbox.send(|bytes| self.wire.send_some(bytes)).is_err() {
            self.outbox = Outbox::default();
        }
    }
}

impl Keeper {
    pub(super) fn tell_all(&mut self, what: &Tell) {
        self.members.iter_mut().for_each(|member| member.tell(what.clone()));
    }

    pub(super) fn tell_what_waits(&mut self) {
        self.members.iter_mut().for_each(Member::tell_what_waits);
    }

    pub(super) fn add(&mut self, wire: Wire) -> usize {
        self.members.push(Member::new(wire));
        self.members.len() - 1
    }

    /// Receives a message of a member, or notices that the member is gone.
    pub(super) fn hear(&mut self, index: usize) {
        let said = self.members[index].wire.receive_some::<Ask>();
        match said {
            Ok(None) => {}
            Ok(Some(Ask::Join { run, .. })) => self.join(index, run),
            Ok(Some(Ask::Rejoin(pid))) => {
                let is_known = self.state.runs.iter().any(|run| run.run.pid == pid);
                let member = &mut self.members[index];
                member.run = is_known.then_some(pid);
                member.tell(match is_known {
                    true => Tell::Noted,
                    false => Tell::Lost("the next keeper does not know this run".into()),
                });
                // The last keeper may have been killed while it replaced the daemon.
                let daemon = self.state.daemon.map_or(0, |daemon| daemon.pid);
                member.tell(Tell::Replaced(daemon));
            }
            Ok(Some(Ask::Upgrade(program))) => self.upgrade(index, program),
            Ok(Some(Ask::Place(place))) => self.place(index, place),
            Ok(Some(Ask::Leave)) => self.leave(index),
            Err(_) => self.gone(index),
        }
    }

    pub(super) fn join(&mut self, index: usize, run: RunInfo) {
        if !self.phase.may(Act::TakeRun) {
            return self.members[index].tell(Tell::Busy);
        }
        let is_first = self.state.runs.is_empty() && !self.state.is_serving;
        let joined = Joined {
            mount: folder::mount(),
            daemon: self.state.daemon.map_or(0, |daemon| daemon.pid),
            options: self.options.clone(),
            transport: self.state.transport.clone(),
            is_first,
            zswap_is_off: self.state.zswap_was_on,
            notes: self.notes.clone(),
            cleaned: std::mem::take(&mut self.cleaned),
        };
        self.members[index].run = Some(run.pid);
        self.state.runs.push(RunChange { run, place: None });
        let answer = match self.save() {
            Ok(()) => Tell::Joined(Box::new(joined)),
            Err(failure) => Tell::Refused(failure.to_string()),
        };
        self.members[index].tell(answer);
        if self.state.runs.len() > 1 {
            self.tell_all(&Tell::Runs(self.state.runs.len()));
        }
    }

    fn place(&mut self, index: usize, place: GroupChange) {
        let pid = self.members[index].run;
        if let Some(run) = self.state.run_in(&place.folder) {
            // The keeper refuses this, since it serializes requests. Otherwise the second run could
            // read the first run's limit as the original.
            let (path, other) = (place.folder.display(), run.run.pid);
            let refusal = format!("process {other} limits {path} already; end that first");
            return self.members[index].tell(Tell::Refused(refusal));
        }
        if let Some(run) = self.state.runs.iter_mut().find(|run| Some(run.run.pid) == pid) {
            run.place = Some(place);
        }
        // If this cannot be written down, the command must not begin: the run hears nothing, and
        // gives up.
        if self.save().is_ok() {
            self.members[index].tell(Tell::Noted);
        }
    }

    /// A run is over. The last run is answered when everything is undone.
    fn leave(&mut self, index: usize) {
        let pid = self.members[index].run.take();
        self.state.runs.retain(|run| Some(run.run.pid) != pid);
        let _ = self.save();
        if !self.state.runs.is_empty() || self.state.is_serving {
            self.members[index].tell(Tell::Left { is_over: false, troubles: Vec::new() });
        }
    }

    /// A member is gone. A run that did not leave before was killed.
    fn gone(&mut self, index: usize) {
        let member = self.members.swap_remove(index);
        let Some(pid) = member.run else { return };
        self.bury_runs(|run| run.run.pid == pid);
    }

    /// Ends the commands of runs that were killed.
    pub(super) fn bury_runs(&mut self, is_dead: impl Fn(&RunChange) -> bool) {
        let (dead, alive) = std::mem::take(&mut self.state.runs).into_iter().partition(is_dead);
        self.state.runs = alive;
        let dead: Vec<RunChange> = dead;
        for place in dead.iter().filter_map(|run| run.place.as_ref()) {
            if let Err(error) = place.end() {
                self.trouble(error.to_string());
            }
        }
        let _ = self.save();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_does_not_listen_keeps_nobody_waiting_and_hears_the_last_of_each() {
        let (ours, theirs) = Wire::pair().unwrap();
        let (mut member, mut theirs) = (Member::new(ours), Wire::new(theirs.into()));
        // More than the socket's buffer takes.
        for count in 0..100_000 {
            member.tell(Tell::Runs(count));
        }
        member.tell(Tell::Full(true));
        member.tell(Tell::Full(false));
        assert!(member.has_waiting() && member.outbox.waits.len() <= 2);
        let mut heard = Vec::new();
        while member.has_waiting() || heard.last() != Some(&"Full(false)".to_owned()) {
            heard.push(format!("{:?}", theirs.receive::<Tell>().unwrap()));
            member.tell_what_waits();
        }
        assert_eq!(heard[..2], ["Runs(0)", "Runs(1)"], "lines are whole");
        assert_eq!(heard[heard.len() - 2..], ["Runs(99999)", "Full(false)"]);
    }

    #[test]
    fn a_message_to_a_member_that_is_gone_is_dropped() {
        let (ours, theirs) = Wire::pair().unwrap();
        drop(theirs);
        let mut member = Member::new(ours);
        member.tell(Tell::Detach);
        assert!(!member.has_waiting());
    }
}

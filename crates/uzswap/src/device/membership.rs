//! The part of a run in the cache of this machine: it joins the cache or has it made, and leaves
//! it.

use crate::cli::CacheArguments;
use crate::device::group_change::GroupChange;
use crate::device::options::DaemonOptions;
use crate::device::signals::{Event, Events};
use crate::device::wire::{Ask, Joined, RunInfo, Tell, Wire};
use crate::device::{folder, keeper, ledger, spared};
use crate::error::Failure;
use crate::stdio::say;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

/// The time that the last keeper may take to end, or the next keeper to take over.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time that may pass without a process that could start a keeper.
const ABANDONED: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// The reason of a loss when keeper and daemon are both gone.
pub const KEEPER_GONE: &str = "the keeper died with it, and no other has taken over";

/// The message when the swapped pages are lost, for this reason.
pub fn pages_lost(why: &str) -> String {
    format!("the daemon died ({why}); the swapped pages are lost")
}

/// A run that has joined a cache.
pub struct Membership {
    pid: i32,
    wire: Wire,
    /// The cache that this run has joined.
    pub joined: Joined,
    /// The keeper's process, if this run has started it.
    keeper: Option<Child>,
    is_gone: bool,
    /// Runs that used the cache when the command began.
    pub runs: usize,
}

impl Membership {
    /// Joins the cache. If there is no cache, has one made with `options`.
    pub fn join(run: &RunInfo, options: &DaemonOptions) -> Result<Self, Failure> {
        let began = Instant::now();
        loop {
            let (mut wire, keeper, options) = match UnixStream::connect(folder::socket()) {
                Ok(stream) => (Wire::new(stream), None, None),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(Failure::new(keeper::cannot_lock(&error)));
                }
                // There is no keeper, or it was killed.
                Err(_) => {
                    let started = spared::start(&["keeper".into()]);
                    let (child, wire) = started.map_err(cannot_start)?;
                    (wire, Some(child), Some(Box::new(options.clone())))
                }
            };
            let asked = wire.send(&Ask::Join { run: run.clone(), options });
            let answer = asked.and_then(|()| wire.receive());
            match answer {
                Ok(Tell::Joined(joined)) => {
                    return Ok(Self {
                        pid: run.pid,
                        wire,
                        joined: *joined,
                        keeper,
                        is_gone: false,
                        runs: 1,
                    });
                }
                Ok(Tell::Refused(message)) => return Err(Failure::new(message)),
                // Another process was faster, or the last run is just leaving.
                Ok(_) | Err(_) if began.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
                Ok(_) | Err(_) => {
                    return Err(Failure::new(
                        "another uzswap has begun to end and does not finish; `uzswap status` \
                         shows its devices",
                    ));
                }
            }
        }
    }

    /// Prints how the joined cache differs from the requested one.
    pub fn say_joined(&self, asked: &CacheArguments, quiet: bool) {
        for line in &self.joined.cleaned {
            say!("uzswap: {line}");
        }
        if self.joined.is_first {
            if self.joined.zswap_is_off && !quiet {
                say!("uzswap: the kernel's zswap is switched off until the last run ends");
            }
        } else if let Some(these) = self.joined.options.differences(asked) {
            say!("uzswap: joins the running cache, so these options do not apply: {these}");
        }
    }

    /// Tells the keeper the command's group. The command may begin only after this.
    pub fn place(&mut self, place: &GroupChange, events: &Events) -> Result<(), Failure> {
        // An error means that the keeper is gone, which the events report.
        let _ = self.wire.send(&Ask::Place(place.clone()));
        loop {
            match events.receiver.recv() {
                Ok(Event::Told(Tell::Noted)) => return Ok(()),
                Ok(Event::Told(Tell::Refused(message))) => return Err(Failure::new(message)),
                Ok(Event::Told(Tell::Runs(runs))) => self.runs = runs,
                Ok(Event::Told(Tell::Replaced(daemon))) => self.joined.daemon = daemon,
                Ok(Event::Told(Tell::Full(_) | Tell::Detach)) => {}
                Ok(Event::Signal { signal, .. }) => {
                    let message = format!("ended by signal {signal} before the command began");
                    return Err(Failure::command(message, 128 + signal as u8));
                }
                Ok(Event::Gone) => {
                    self.is_gone = true;
                    return Err(Failure::new("the keeper died; try again"));
                }
                Ok(_) | Err(_) => return Err(Failure::new("the daemon died; try again")),
            }
        }
    }

    /// Turns messages of the keeper into events from now on. When the keeper dies, the thread
    /// reconnects to the next keeper.
    pub fn watch(&self, events: &Events) -> Result<(), Failure> {
        let mut wire = self.wire.sender().map_err(cannot_start)?;
        let (pid, events) = (self.pid, events.sender.clone());
        std::thread::spawn(move || {
            loop {
                let told = match wire.receive() {
                    Ok(tell) => vec![Event::Told(tell)],
                    Err(_) => match come_back(pid) {
                        Some((Rejoined { wire: fresh, early, .. }, sender)) => {
                            wire = fresh;
                            let early = early.into_iter().map(Event::Told);
                            [Event::CameBack(sender)].into_iter().chain(early).collect()
                        }
                        None => vec![Event::Gone],
                    },
                };
                for told in told {
                    let is_last = matches!(told, Event::Told(Tell::Left { .. }) | Event::Gone);
                    if events.send(told).is_err() || is_last {
                        return;
                    }
                }
            }
        });
        Ok(())
    }

    /// Uses another wire, after the keeper was replaced.
    pub fn came_back(&mut self, wire: Wire) {
        self.wire = wire;
    }

    /// Notes that keeper and daemon are gone.
    pub fn gone(&mut self) {
        self.is_gone = true;
    }

    /// Leaves, after every process of the command has ended. Returns the changes that could not be
    /// undone.
    pub fn leave(mut self, events: &Events) -> Vec<String> {
        if self.is_gone {
            return Vec::new();
        }
        // An error means that the keeper is gone, and has ended the command.
        let _ = self.wire.send(&Ask::Leave);
        let mut lost = Vec::new();
        loop {
            match events.receiver.recv() {
                // The command was killed because of the loss, and its end was noticed first.
                Ok(Event::Told(Tell::Lost(why))) => lost.push(pages_lost(&why)),
                Ok(Event::Told(Tell::Left { is_over, mut troubles })) => {
                    troubles.splice(0..0, lost);
                    if let (Some(mut keeper), true) = (self.keeper.take(), is_over) {
                        // An error means that the process is not our child.
                        let _ = keeper.wait();
                    }
                    return troubles;
                }
                Ok(Event::Gone) | Err(_) => return Vec::new(),
                Ok(Event::CameBack(wire)) => {
                    self.wire = wire;
                    let _ = self.wire.send(&Ask::Leave);
                }
                Ok(_) => {}
            }
        }
    }
}

fn cannot_start(error: io::Error) -> Failure {
    Failure::new(format!("cannot start the keeper: {error}"))
}

/// The answer of a keeper to [`Ask::Rejoin`].
struct Rejoined {
    wire: Wire,
    is_noted: bool,
    /// Messages to all members that arrived before the answer.
    early: Vec<Tell>,
}

fn rejoin(stream: UnixStream, pid: i32) -> io::Result<Rejoined> {
    let mut wire = Wire::new(stream);
    wire.send(&Ask::Rejoin(pid))?;
    let mut early = Vec::new();
    loop {
        let is_noted = match wire.receive()? {
            Tell::Noted => true,
            Tell::Lost(_) | Tell::Left { is_over: true, .. } => false,
            other => {
                early.push(other);
                continue;
            }
        };
        return Ok(Rejoined { wire, is_noted, early });
    }
}

/// A wire to the next keeper, and another handle of that wire; `None` if there is no keeper.
fn come_back(pid: i32) -> Option<(Rejoined, Wire)> {
    let mut attended = Instant::now();
    while attended.elapsed() < ABANDONED {
        match UnixStream::connect(folder::socket()).and_then(|stream| rejoin(stream, pid)) {
            Ok(back) if !back.is_noted => return None,
            Ok(back) => return back.wire.sender().ok().map(|sender| (back, sender)),
            Err(_) => std::thread::sleep(PAUSE),
        }
        // The keeper starts a daemon, and the daemon a keeper. A start takes long when both get
        // little CPU time.
        if ledger::LedgerState::read().is_ok_and(|state| state.is_attended()) {
            attended = Instant::now();
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_awaited_behind_all_that_is_told_to_everybody() {
        let answers = [
            (Tell::Noted, true),
            (Tell::Lost("unknown".into()), false),
            (Tell::Left { is_over: true, troubles: Vec::new() }, false),
        ];
        for (answer, is_noted) in answers {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut keeper = Wire::new(theirs);
            for tell in [Tell::Full(true), Tell::Replaced(7), answer] {
                keeper.send(&tell).unwrap();
            }
            let back = rejoin(ours, 5).unwrap();
            let early: Vec<_> = back.early.iter().map(|tell| format!("{tell:?}")).collect();
            assert_eq!(
                (back.is_noted, early),
                (is_noted, vec!["Full(true)".into(), "Replaced(7)".into()])
            );
            assert!(matches!(keeper.receive(), Ok(Ask::Rejoin(5))));
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        Wire::new(theirs).send(&Tell::Full(true)).unwrap();
        assert!(rejoin(ours, 5).is_err(), "a keeper that ends before it answers is asked again");
    }
}

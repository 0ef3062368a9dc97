//! The modelled daemon. It asks the real phase (daemon/phase.rs) before each act, and starts
//! another keeper when its own is gone.

use super::kernel::{Heard, Message, Pid, Role, Start, Steps, WireId, World};
use crate::device::daemon::Pauses;
pub use crate::device::daemon::phase::Phase;
use crate::device::daemon::phase::{Act, Heard as Asked};
use crate::device::phase::Phased;
use std::time::{Duration, Instant};

pub struct DaemonProcess {
    phase: Phase,
    wire: WireId,
    start: Option<Start>,
    devices: Vec<usize>,
    pauses: Pauses,
    began: Instant,
    /// When the cache is made or taken over, or when the pause is over.
    busy_until: Option<Duration>,
    /// True if the daemon starts a keeper after its pause.
    starts_keeper: bool,
    /// Remaining steps in which the daemon has its own file open.
    opens: u32,
}

impl DaemonProcess {
    pub fn new(wire: WireId) -> Self {
        Self {
            phase: Phase::Starting,
            wire,
            start: None,
            devices: Vec::new(),
            pauses: Pauses::default(),
            began: Instant::now(),
            busy_until: None,
            starts_keeper: false,
            opens: 0,
        }
    }

    fn begin(&mut self, world: &mut World, me: Pid) {
        let Some(start) = &self.start else {
            match world.receive(self.wire, me) {
                Heard::Said(Message::Start(start)) => self.start = Some(start),
                Heard::Said(_) | Heard::Gone => world.exit(me, false),
                Heard::Nothing => {}
            }
            return;
        };
        let takes = Duration::from_millis(world.below(200));
        if world.now < *self.busy_until.get_or_insert(world.now + takes) {
            return;
        }
        self.busy_until = None;
        let takes_over = start.devices.is_some();
        let is_able = world.failing_starts == 0 || !takes_over;
        world.failing_starts = world.failing_starts.saturating_sub(1);
        self.devices = start.devices.clone().unwrap_or_default();
        self.phase.started(is_able, takes_over);
        world.processes[me].serves = self.phase == Phase::Serving;
        world.is_mounted |= is_able;
        world.send(self.wire, me, if is_able { Message::Ready } else { Message::Failed });
    }

    fn start_keeper(&mut self, world: &mut World, me: Pid) {
        self.phase.require(Act::StartKeeper);
        let (keeper, wire) = world.spawn(Role::Keeper, Some(me));
        // The daemon has the first end of this wire. Of other keepers' wires the daemon has the
        // second end.
        self.wire = wire;
        world.processes[keeper].has_memory = true;
        let serves = self.phase == Phase::Serving;
        let start = Start { daemon: Some(me), serves, devices: Some(self.devices.clone()) };
        world.send(wire, me, Message::Start(start));
    }

    fn hear(&mut self, world: &mut World, me: Pid) {
        let message = match world.receive(self.wire, me) {
            Heard::Nothing => return,
            Heard::Said(message) => Some(message),
            Heard::Gone => None,
        };
        let asked = match &message {
            Some(Message::End) => Asked::End,
            Some(Message::Attach) => Asked::Order(Act::MakeDevice),
            Some(Message::Settle(_)) => Asked::Order(Act::Settle),
            Some(Message::TellRoom) => Asked::Order(Act::TellRoom),
            Some(Message::Become) => Asked::Order(Act::Become),
            Some(_) => return world.broke("a message that is no order"),
            None => Asked::Gone,
        };
        let is_listed = || self.devices.iter().any(|device| world.is_listed(*device));
        match self.phase.hear(asked, is_listed) {
            Some(Act::MakeDevice) => {
                let steps = world.below(8) as u32;
                self.opens = 1 + steps;
                world.processes[me].has_own_file = world.faults.daemon_opens_its_file;
            }
            Some(Act::Settle) => {
                if let Some(Message::Settle(devices)) = message {
                    self.devices = devices;
                }
            }
            Some(Act::TellRoom) => {
                world.send(self.wire, me, Message::Room);
            }
            Some(Act::Become) => {
                // The same process executes another program, and keeps its end of the wire.
                world.processes[me].serves = false;
                self.phase = Phase::Starting;
                let devices = Some(self.devices.clone());
                self.start = Some(Start { devices, ..Start::default() });
            }
            Some(Act::StartKeeper) => {
                let now = self.began + world.now;
                self.busy_until = Some(world.now + self.pauses.before_next(now));
                self.starts_keeper = true;
            }
            Some(Act::Close) => {
                self.phase.require(Act::Close);
                world.exit(me, true);
            }
            None if asked == Asked::Order(Act::MakeDevice) => {
                world.send(self.wire, me, Message::Failed);
            }
            None => {}
        }
    }
}

impl Steps for DaemonProcess {
    fn step(&mut self, world: &mut World, me: Pid) {
        let before = self.phase;
        self.work(world, me);
        // A daemon that executes another program begins with the first phase.
        if self.phase != Phase::Starting {
            world.changed(me, before, self.phase);
        }
    }
}

impl DaemonProcess {
    fn work(&mut self, world: &mut World, me: Pid) {
        if self.phase == Phase::Starting {
            self.begin(world, me);
        } else if self.phase == Phase::Ending {
            world.exit(me, false);
        } else if self.opens > 0 {
            self.opens -= 1;
            if self.opens == 0 {
                world.processes[me].has_own_file = false;
                world.send(self.wire, me, Message::Attached);
            }
        } else if self.busy_until.is_some_and(|until| world.now < until) {
        } else if std::mem::take(&mut self.starts_keeper) {
            self.busy_until = None;
            self.start_keeper(world, me);
        } else {
            self.hear(world, me);
        }
    }
}

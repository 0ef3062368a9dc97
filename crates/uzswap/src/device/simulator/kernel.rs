//! The modelled machine: processes that take time, sockets, and the kernel's swap.
//!
//! A process does one step at a time. A killed process ends in the kernel's order: it loses its
//! memory, its files are closed, it is gone. A process that waits for an answer of the device
//! cannot end.

use crate::device::phase::Phased;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::time::Duration;

pub type Pid = usize;
pub type DeviceNumber = usize;

/// Bytes that a socket takes before its reader reads.
const SOCKET_BYTES: usize = 80;

/// Faults of earlier versions, put back to show that the rules find them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// The daemon opens the file that it serves itself.
    pub daemon_opens_its_file: bool,
    /// The kernel sends FLUSH for that file.
    pub flush_is_sent: bool,
    /// The next daemon is started only when the last one is gone entirely.
    pub full_death_is_awaited: bool,
    /// EINVAL of swapoff counts as "off", without a check of the kernel's list.
    pub einval_means_off: bool,
    /// The keeper waits until a socket has room for its message.
    pub sends_block: bool,
    /// The next daemon is started while threads of the last one may still run.
    pub death_is_not_awaited: bool,
    /// The next area is put behind the areas that the kernel lists.
    pub parts_follow_the_list: bool,
}

/// The steps of a process's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Life {
    Alive,
    /// The process's first thread has no memory any more; other threads may run.
    Ending,
    /// No thread has memory.
    Over,
    Gone,
}

/// The program of a process, and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    Keeper,
    Daemon,
    SwitchOn,
    SwitchOff(Vec<DeviceNumber>),
    /// A `swapoff -a` by hand.
    Foreign,
    /// A `swapon` by hand, of a device of ours that no area is on.
    ForeignOn,
    Run,
}

pub trait Steps {
    /// Does one step.
    fn step(&mut self, world: &mut World, me: Pid);
}

pub struct Process {
    pub role: Role,
    pub life: Life,
    pub is_killed: bool,
    pub is_stopped: bool,
    /// True if the process has had a signal, or its command has ended.
    pub is_told_to_end: bool,
    /// True if the process has the memory and the connections that outlive a daemon.
    pub has_memory: bool,
    /// True if the process answers requests of the device.
    pub serves: bool,
    /// True if the process waits in the kernel for the device.
    pub waits_for_device: bool,
    /// True if the process has a file open that the device's server serves.
    pub has_own_file: bool,
    /// After the process has ended: true if it succeeded.
    pub has_succeeded: bool,
    /// The number of turns in which the process does one step.
    pub slowness: u64,
    program: Option<Box<dyn Steps>>,
}

/// A message between processes of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    Start(Start),
    Attach,
    Settle(Vec<DeviceNumber>),
    TellRoom,
    Become,
    End,
    Ready,
    Attached,
    Room,
    Failed,
    Make(DeviceNumber),
    SwitchOn,
    Made(DeviceNumber),
    On,
    Join,
    Rejoin,
    Leave,
}

/// The start data of a daemon, or those that a daemon gives to a keeper.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Start {
    pub daemon: Option<Pid>,
    pub serves: bool,
    /// The devices of the last daemon; `None` for the first.
    pub devices: Option<Vec<DeviceNumber>>,
}

/// The result of reading from a wire.
#[derive(Debug)]
pub enum Heard {
    Nothing,
    Said(Message),
    Gone,
}

/// A socket. One direction carries bytes, for which its room is limited.
pub struct Wire {
    ends: [Option<Pid>; 2],
    waits: [VecDeque<Message>; 2],
    pub bytes: VecDeque<u8>,
}

impl Wire {
    /// The process that was started with this wire, or that has connected.
    pub fn second_end(&self) -> Option<Pid> {
        self.ends[1]
    }
}

pub type WireId = usize;

/// An area that the kernel lists.
pub struct Listed {
    pub device: DeviceNumber,
    pub pages: u32,
    /// The process in swapoff of this area.
    inside: Option<Pid>,
}

/// The list of changes, as it was last written down.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    pub is_there: bool,
    pub is_serving: bool,
    pub keeper: Option<Pid>,
    pub daemon: Option<Pid>,
    pub areas: Vec<DeviceNumber>,
    pub area_maker: Option<Pid>,
    pub runs: Vec<Pid>,
}

pub struct World {
    pub faults: Faults,
    pub now: Duration,
    pub processes: Vec<Process>,
    pub wires: Vec<Wire>,
    /// Connections that the keeper has not accepted; `None` if no keeper listens.
    pub listener: Option<(Pid, VecDeque<WireId>)>,
    pub ledger: Ledger,
    pub areas: Vec<Listed>,
    /// Loop devices, with their makers. A device goes with its maker, or with the area on it.
    pub devices: BTreeMap<DeviceNumber, Pid>,
    /// The part of the disk under each device.
    pub parts: BTreeMap<DeviceNumber, Range<u64>>,
    /// Devices with the signature of an area.
    pub signed: BTreeSet<DeviceNumber>,
    /// True if a detached device stays until no area is on it, as loop devices do.
    pub detach_waits: bool,
    pub is_mounted: bool,
    /// Devices for which swapoff has answered EINVAL.
    einval: BTreeSet<DeviceNumber>,
    pub devices_made: usize,
    /// True if the run for which everything was made has joined.
    pub has_had_run: bool,
    /// Number of daemons that will fail to start.
    pub failing_starts: u32,
    /// True if daemons may fail to start until the keeper gives up.
    pub may_lose: bool,
    /// True if the swapped pages are lost, after too many daemons failed.
    pub is_lost: bool,
    /// The changes of phases so far, by process, from and to.
    pub changes: BTreeSet<String>,
    /// The first rule that was broken.
    pub broken: Option<String>,
    pub story: Option<Vec<String>>,
    random: u64,
    make: fn(&Role, Option<WireId>) -> Box<dyn Steps>,
}

impl World {
    pub fn new(
        seed: u64,
        faults: Faults,
        make: fn(&Role, Option<WireId>) -> Box<dyn Steps>,
    ) -> Self {
        Self {
            faults,
            now: Duration::from_secs(1),
            processes: Vec::new(),
            wires: Vec::new(),
            listener: None,
            ledger: Ledger::default(),
            areas: Vec::new(),
            devices: BTreeMap::new(),
            parts: BTreeMap::new(),
            signed: BTreeSet::new(),
            detach_waits: false,
            is_mounted: false,
            einval: BTreeSet::new(),
            devices_made: 0,
            has_had_run: false,
            failing_starts: 0,
            may_lose: false,
            is_lost: false,
            changes: BTreeSet::new(),
            broken: None,
            story: None,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            make,
        }
    }

    /// A number below `bound` (xorshift64*).
    pub fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    /// A random index below `count`; 0 if there is none.
    pub fn random_of(&mut self, count: usize) -> usize {
        self.below(count.max(1) as u64) as usize
    }

    pub fn tell(&mut self, event: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(story) = &mut self.story {
            story.push(format!("{:>9.3} {}", now.as_secs_f64(), event()));
        }
    }

    /// Notes a change of a phase.
    pub fn changed<P: Phased>(&mut self, me: Pid, from: P, to: P) {
        if from != to {
            self.tell(|| format!("{me} is {to:?}"));
            self.changes.insert(format!("{} {from:?} {to:?}", P::OWNER));
        }
    }

    pub fn broke(&mut self, rule: impl Into<String>) {
        self.broken.get_or_insert(rule.into());
    }

    // Processes.

    /// Starts a process, with one end of a wire where `starter` has the other.
    pub fn spawn(&mut self, role: Role, starter: Option<Pid>) -> (Pid, WireId) {
        let pid = self.processes.len();
        self.tell(|| format!("{pid} starts: {role:?}"));
        self.wires.push(Wire {
            ends: [starter, Some(pid)],
            waits: Default::default(),
            bytes: VecDeque::new(),
        });
        let wire = self.wires.len() - 1;
        let program = (self.make)(&role, starter.map(|_| wire));
        let slowness = 1 + self.below(4) * self.below(4);
        self.processes.push(Process {
            role,
            life: Life::Alive,
            is_killed: false,
            is_stopped: false,
            is_told_to_end: false,
            has_memory: false,
            serves: false,
            waits_for_device: false,
            has_own_file: false,
            has_succeeded: false,
            slowness,
            program: Some(program),
        });
        (pid, wire)
    }

    pub fn life(&self, pid: Option<Pid>) -> Life {
        pid.map_or(Life::Gone, |pid| self.processes[pid].life)
    }

    pub fn kill(&mut self, pid: Pid) {
        let process = &mut self.processes[pid];
        if !process.is_killed {
            process.is_killed = true;
            process.serves = false;
            let role = process.role.clone();
            self.tell(|| format!("{pid} is killed: {role:?}"));
        }
    }

    /// Ends a process by its own exit.
    pub fn exit(&mut self, pid: Pid, has_succeeded: bool) {
        self.processes[pid].has_succeeded = has_succeeded;
        self.processes[pid].is_killed = true;
        self.processes[pid].serves = false;
        self.tell(|| format!("{pid} exits"));
    }

    /// One step of a process: of its program, or of its end.
    pub fn step(&mut self, pid: Pid) {
        let process = &mut self.processes[pid];
        if process.life == Life::Gone || process.is_stopped && !process.is_killed {
            return;
        }
        if process.is_killed {
            return self.die(pid);
        }
        let Some(mut program) = process.program.take() else { return };
        program.step(self, pid);
        self.processes[pid].program = Some(program);
    }

    fn die(&mut self, pid: Pid) {
        let (life, waits) = (self.processes[pid].life, self.processes[pid].waits_for_device);
        if waits && !self.is_served() && self.has_server_to_come() {
            return;
        }
        let next = match life {
            Life::Alive => Life::Ending,
            Life::Ending => Life::Over,
            // With FLUSH, the kernel waits for an answer as it closes the file.
            Life::Over if self.processes[pid].has_own_file && self.faults.flush_is_sent => {
                if self.is_served() || !self.has_server_to_come() { Life::Gone } else { return }
            }
            Life::Over | Life::Gone => Life::Gone,
        };
        self.processes[pid].life = next;
        if next == Life::Ending {
            for area in self.areas.iter_mut().filter(|area| area.inside == Some(pid)) {
                area.inside = None;
            }
        }
        if next == Life::Over {
            self.processes[pid].has_memory = false;
        }
        if next == Life::Gone {
            for wire in &mut self.wires {
                wire.ends.iter_mut().filter(|end| **end == Some(pid)).for_each(|end| *end = None);
            }
            if self.listener.as_ref().is_some_and(|(keeper, _)| *keeper == pid) {
                self.listener = None;
            }
            let areas = &self.areas;
            let is_on = |device| areas.iter().any(|area| area.device == device);
            self.devices.retain(|device, maker| *maker != pid || is_on(*device));
            self.tell(|| format!("{pid} is gone"));
        }
    }

    /// Living processes with the memory that outlives a daemon.
    pub fn owners(&self) -> impl Iterator<Item = Pid> {
        let all = self.processes.iter().enumerate();
        all.filter(|(_, one)| one.has_memory && !one.is_killed).map(|(pid, _)| pid)
    }

    /// True if a daemon answers.
    pub fn is_served(&self) -> bool {
        self.processes.iter().any(|one| one.serves && !one.is_killed && !one.is_stopped)
    }

    /// True if a process holds the connection, so that the kernel waits even if no daemon answers.
    pub fn has_server_to_come(&self) -> bool {
        self.is_mounted && self.processes.iter().any(|one| one.has_memory)
    }

    // Wires.

    /// Connects to the listening keeper.
    pub fn connect(&mut self, me: Pid) -> Option<WireId> {
        let id = self.wires.len();
        let (keeper, waiting) = self.listener.as_mut()?;
        let ends = [Some(*keeper), Some(me)];
        waiting.push_back(id);
        self.wires.push(Wire { ends, waits: Default::default(), bytes: VecDeque::new() });
        Some(id)
    }

    /// Takes a connection that waits for the keeper.
    pub fn accept(&mut self, me: Pid) -> Option<WireId> {
        let (_, waiting) = self.listener.as_mut().filter(|(keeper, _)| *keeper == me)?;
        waiting.pop_front()
    }

    fn end_of(&self, wire: WireId, me: Pid) -> Option<usize> {
        self.wires[wire].ends.iter().position(|end| *end == Some(me))
    }

    /// `false` if the other process is gone.
    pub fn send(&mut self, wire: WireId, me: Pid, message: Message) -> bool {
        let Some(end) = self.end_of(wire, me) else { return false };
        if self.wires[wire].ends[1 - end].is_none() {
            return false;
        }
        self.tell(|| format!("{me} says {message:?}"));
        self.wires[wire].waits[1 - end].push_back(message);
        true
    }

    pub fn receive(&mut self, wire: WireId, me: Pid) -> Heard {
        let Some(end) = self.end_of(wire, me) else { return Heard::Gone };
        match self.wires[wire].waits[end].pop_front() {
            Some(message) => Heard::Said(message),
            None if self.wires[wire].ends[1 - end].is_none() => Heard::Gone,
            None => Heard::Nothing,
        }
    }

    pub fn close(&mut self, wire: WireId, me: Pid) {
        if let Some(end) = self.end_of(wire, me) {
            self.wires[wire].ends[end] = None;
        }
    }

    /// Sends as many bytes to the second end as there is room for. Fails if that process is gone.
    pub fn send_some(&mut self, wire: WireId, bytes: &[u8]) -> io::Result<usize> {
        let wire = &mut self.wires[wire];
        if wire.ends[1].is_none() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = bytes.len().min(SOCKET_BYTES - wire.bytes.len());
        wire.bytes.extend(&bytes[..count]);
        Ok(count)
    }

    // Swap.

    /// True if the kernel lists an area on a device, as our processes read the list.
    pub fn is_listed(&self, device: DeviceNumber) -> bool {
        if self.faults.einval_means_off && self.einval.contains(&device) {
            return false;
        }
        self.areas.iter().any(|area| area.device == device)
    }

    pub fn detach(&mut self, device: DeviceNumber) {
        let is_on = self.areas.iter().any(|area| area.device == device);
        if !(is_on && self.detach_waits) {
            self.devices.remove(&device);
        }
    }

    pub fn swapon(&mut self, device: DeviceNumber) {
        self.tell(|| format!("area {device} is on"));
        self.signed.insert(device);
        self.areas.push(Listed { device, pages: 0, inside: None });
    }

    /// A step of swapoff; `None` while it is not done. swapoff may run out of memory.
    pub fn swapoff(&mut self, me: Pid, device: DeviceNumber) -> Option<io::Result<()>> {
        let is_short = self.below(60) == 0;
        let is_served = self.is_served() || !self.has_server_to_come();
        let Some(area) = self
            .areas
            .iter_mut()
            .find(|area| area.device == device && area.inside.is_none_or(|inside| inside == me))
        else {
            // Only our own processes report to the keeper.
            if matches!(self.processes[me].role, Role::SwitchOff(_)) {
                self.einval.insert(device);
            }
            return Some(Err(io::ErrorKind::InvalidInput.into()));
        };
        area.inside = Some(me);
        self.processes[me].waits_for_device = area.pages > 0;
        if area.pages > 0 && is_short {
            area.inside = None;
            self.processes[me].waits_for_device = false;
            self.tell(|| format!("{me}: no memory for area {device}"));
            return Some(Err(io::ErrorKind::OutOfMemory.into()));
        }
        if area.pages > 0 {
            area.pages -= u32::from(is_served);
            return None;
        }
        self.areas.retain(|area| area.device != device);
        let maker = self.devices.get(&device).copied();
        if self.life(maker) == Life::Gone {
            self.devices.remove(&device);
        }
        self.einval.remove(&device);
        self.tell(|| format!("area {device} is off"));
        Some(Ok(()))
    }

    /// A page is swapped out or needed; `false` if no daemon answers.
    pub fn touch(&mut self) -> bool {
        let (is_served, is_out) = (self.is_served(), self.below(3) > 0);
        let count = self.areas.len() as u64;
        if count == 0 {
            return true;
        }
        let index = self.below(count) as usize;
        let area = &mut self.areas[index];
        match (is_served, is_out) {
            (true, true) if area.inside.is_none() => area.pages = (area.pages + 1).min(8),
            (true, false) => area.pages = area.pages.saturating_sub(1),
            _ => {}
        }
        is_served || self.is_lost || self.areas.iter().all(|area| area.pages == 0)
    }

    /// The rules that hold after every step.
    pub fn check(&mut self) {
        let owners = self.processes.iter().filter(|one| one.has_memory).count();
        for index in 0..self.areas.len() {
            let Listed { device, pages, .. } = self.areas[index];
            if pages == 0 || self.is_lost {
                continue;
            }
            if owners == 0 || !self.is_mounted {
                self.broke(format!("{pages} pages of area {device} are lost"));
            } else if !self.devices.contains_key(&device) {
                self.broke(format!("device {device} is gone with {pages} pages"));
            } else if !self.ledger.is_there {
                self.broke(format!("the folder is gone while area {device} has {pages} pages"));
            }
        }
        for (index, area) in self.areas.iter().enumerate() {
            let part = &self.parts[&area.device];
            let has_other = |other: &Listed| self.parts[&other.device].start == part.start;
            if self.areas[..index].iter().any(has_other) {
                return self.broke(format!("two areas are over part {part:?}"));
            }
        }
        let executes =
            |one: &&Process| one.role == Role::Daemon && one.has_memory && one.life < Life::Over;
        if self.processes.iter().filter(executes).count() > 1 {
            self.broke("two daemons use the memory at once");
        }
    }
}

//! The modelled keeper. Its phase, next steps, pauses, order of undoing and waiting messages are
//! those of the real keeper (keeper/decide.rs, keeper/phase.rs, ledger.rs). Its acts are the
//! model's.

use super::kernel::{DeviceNumber, Heard, Life, Message, Pid, Role, Start, Steps, WireId, World};
use crate::device::keeper::decide::{Emptying, Seen, ShortLives, SwitchOff, Task, refused, task};
use crate::device::keeper::members::Outbox;
use crate::device::keeper::phase::Act;
pub use crate::device::keeper::phase::Phase;
use crate::device::ledger::{UNDO, Undo};
use crate::device::phase::Phased;
use crate::device::space::{CLUSTER_BYTES, free_part};
use crate::device::wire::Tell;
use std::collections::VecDeque;
use std::time::Duration;

/// The value of the real keeper.
const COME_BACK: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(2);

/// Areas, at most.
const AREAS_MAX: usize = 3;

struct Participant {
    wire: WireId,
    run: Option<Pid>,
    outbox: Outbox,
}

struct MakerWire {
    wire: WireId,
}

/// Work that must finish before any other.
#[derive(Clone)]
enum Busy {
    /// The keeper waits for the start data of the daemon that has started it.
    Begin,
    /// The keeper waits for the end of the last keeper.
    AwaitBefore(Start),
    /// The keeper waits until no thread of the daemon runs.
    Bury,
    Pause(Duration),
    WriteDaemon,
    AwaitReady,
    AwaitDevice,
    Undo {
        step: usize,
        until: Duration,
    },
}

pub struct KeeperProcess {
    phase: Phase,
    daemon: Option<WireId>,
    daemon_since: Duration,
    short_lives: ShortLives,
    /// True if the keeper has asked the daemon for its room.
    awaits_room: bool,
    has_new_room: bool,
    members: Vec<Participant>,
    maker: Option<MakerWire>,
    off: Option<Pid>,
    retry_at: Option<Duration>,
    orphans_until: Option<Duration>,
    has_taken_over: bool,
    /// True if no order to end will come any more: it was given, or no process is left to give it.
    is_told_to_end: bool,
    busy: Option<Busy>,
    turn: usize,
}

impl KeeperProcess {
    pub fn new(daemon: Option<WireId>) -> Self {
        Self {
            phase: Phase::Starting,
            daemon,
            daemon_since: Duration::ZERO,
            short_lives: ShortLives::default(),
            awaits_room: false,
            has_new_room: false,
            members: Vec::new(),
            maker: None,
            off: None,
            retry_at: None,
            orphans_until: None,
            has_taken_over: daemon.is_some(),
            is_told_to_end: false,
            busy: Some(Busy::Begin),
            turn: 0,
        }
    }

    // Daemons.

    fn start_daemon(&mut self, world: &mut World, me: Pid) {
        self.phase.require(Act::StartDaemon);
        let devices = world.ledger.daemon.map(|_| world.ledger.areas.clone());
        let (daemon, wire) = world.spawn(Role::Daemon, Some(me));
        world.processes[daemon].has_memory = true;
        self.daemon = Some(wire);
        let start = Start { daemon: None, serves: false, devices };
        world.send(wire, me, Message::Start(start));
        self.busy = Some(Busy::WriteDaemon);
    }

    fn daemon_died(&mut self, world: &mut World, me: Pid) {
        if !self.phase.may(Act::StartDaemon) {
            return self.close_daemon(world, me);
        }
        self.short_lives.died_after(world.now - self.daemon_since);
        self.bury(world, me);
    }

    /// Kills the daemon, and waits for its end before the next attempt.
    fn bury(&mut self, world: &mut World, me: Pid) {
        self.phase.require(Act::KillDaemon);
        match world.ledger.daemon.filter(|daemon| world.life(Some(*daemon)) < Life::Over) {
            Some(daemon) => world.kill(daemon),
            None if !world.faults.full_death_is_awaited => return self.buried(world, me),
            None => {}
        }
        self.busy = Some(Busy::Bury);
    }

    fn close_daemon(&mut self, world: &mut World, me: Pid) {
        if let Some(wire) = self.daemon.take() {
            world.close(wire, me);
        }
    }

    fn buried(&mut self, world: &mut World, me: Pid) {
        self.close_daemon(world, me);
        self.attempt(world, me);
    }

    /// Plans the next attempt to replace the daemon, after a pause.
    fn attempt(&mut self, world: &mut World, me: Pid) {
        match self.short_lives.pause() {
            Some(pause) => self.busy = Some(Busy::Pause(world.now + pause)),
            None => self.lose(world, me),
        }
    }

    fn lose(&mut self, world: &mut World, me: Pid) {
        if !world.may_lose {
            world.broke("the keeper gives the pages up");
        }
        if let Some(daemon) = world.ledger.daemon {
            self.phase.require(Act::KillDaemon);
            world.kill(daemon);
        }
        self.close_daemon(world, me);
        self.phase.become_next(Phase::Lost);
        world.is_lost = true;
        world.processes[me].has_memory = false;
        self.is_told_to_end = true;
        self.busy = None;
        self.tell_all(&Tell::Lost("given up".into()), world);
    }

    fn is_daemon_ending(world: &World) -> bool {
        world.life(world.ledger.daemon) >= Life::Ending
    }

    /// Receives a message of the daemon; `Gone` if the daemon is ending and has sent nothing more.
    fn hear_daemon(&mut self, world: &mut World, me: Pid) -> Heard {
        let Some(wire) = self.daemon else { return Heard::Gone };
        match world.receive(wire, me) {
            Heard::Nothing if Self::is_daemon_ending(world) => Heard::Gone,
            Heard::Said(Message::Room) => {
                (self.awaits_room, self.has_new_room) = (false, true);
                Heard::Nothing
            }
            heard => heard,
        }
    }

    fn be_busy(&mut self, busy: Busy, world: &mut World, me: Pid) {
        match busy {
            Busy::Begin => self.begin(world, me),
            Busy::AwaitBefore(start) => self.take_over(start, world, me),
            Busy::Bury => {
                let enough = match world.faults {
                    faults if faults.full_death_is_awaited => Life::Gone,
                    faults if faults.death_is_not_awaited => Life::Alive,
                    _ => Life::Over,
                };
                if world.life(world.ledger.daemon) >= enough {
                    self.buried(world, me);
                }
            }
            Busy::Pause(until) if world.now < until => {}
            Busy::Pause(_) if self.daemon.is_some() => {
                // A daemon that failed to take over, and has the memory.
                self.daemon.map(|wire| world.send(wire, me, Message::Become));
                self.busy = Some(Busy::AwaitReady);
            }
            Busy::Pause(_) => self.start_daemon(world, me),
            Busy::WriteDaemon => {
                let wire = self.daemon.map(|wire| &world.wires[wire]);
                world.ledger.daemon = wire.and_then(|wire| wire.second_end());
                self.busy = Some(Busy::AwaitReady);
            }
            Busy::AwaitReady => match self.hear_daemon(world, me) {
                Heard::Nothing => {}
                Heard::Said(Message::Ready) => {
                    self.daemon_since = world.now;
                    self.awaits_room = false;
                    self.busy = None;
                    self.tell_all(&Tell::Replaced(0), world);
                }
                Heard::Said(_) if !Self::is_daemon_ending(world) => {
                    self.short_lives.failed();
                    self.attempt(world, me);
                }
                _ => {
                    self.short_lives.failed();
                    self.bury(world, me);
                }
            },
            Busy::AwaitDevice => match self.hear_daemon(world, me) {
                Heard::Nothing => {}
                Heard::Said(Message::Attached) => self.begin_area(world, me),
                // The keeper will ask this daemon again, or the next.
                _ => self.busy = None,
            },
            Busy::Undo { step, until } => self.undo(step, until, world, me),
        }
    }

    // The beginning.

    fn begin(&mut self, world: &mut World, me: Pid) {
        let Some(wire) = self.daemon else {
            world.ledger.is_there = true;
            world.ledger.keeper = Some(me);
            world.processes[me].has_memory = true;
            return self.start_daemon(world, me);
        };
        match world.receive(wire, me) {
            Heard::Nothing => {}
            Heard::Said(Message::Start(start)) => self.busy = Some(Busy::AwaitBefore(start)),
            Heard::Said(_) | Heard::Gone => world.exit(me, false),
        }
    }

    fn take_over(&mut self, start: Start, world: &mut World, me: Pid) {
        if world.life(world.ledger.keeper) < Life::Over {
            return;
        }
        world.ledger.keeper = Some(me);
        world.ledger.daemon = start.daemon;
        self.is_told_to_end = world.ledger.is_serving;
        self.orphans_until = Some(world.now + COME_BACK);
        world.listener = Some((me, VecDeque::new()));
        self.phase.become_next(Phase::Serving);
        self.busy = None;
        match start.serves {
            true => self.tell_devices(world, me),
            false => self.attempt(world, me),
        }
    }

    // Areas.

    fn tell_devices(&self, world: &mut World, me: Pid) {
        self.daemon.map(|wire| world.send(wire, me, Message::Settle(world.ledger.areas.clone())));
    }

    fn has_maker(&self, world: &World) -> bool {
        self.maker.is_some() || world.life(world.ledger.area_maker) < Life::Over
    }

    fn listed(world: &World) -> Vec<DeviceNumber> {
        let areas = world.ledger.areas.iter().copied();
        areas.filter(|device| world.is_listed(*device)).collect()
    }

    fn begin_area(&mut self, world: &mut World, me: Pid) {
        self.phase.require(Act::MakeArea);
        self.busy = None;
        let World { ledger, devices, parts, .. } = world;
        ledger.areas.retain(|device| devices.contains_key(device));
        let taken: Vec<_> = ledger.areas.iter().map(|device| parts[device].clone()).collect();
        let listed = Self::listed(world).len() as u64;
        let part = match world.faults.parts_follow_the_list {
            true => Some(listed * CLUSTER_BYTES..(listed + 1) * CLUSTER_BYTES),
            false => free_part(&taken, CLUSTER_BYTES, AREAS_MAX as u64 * CLUSTER_BYTES),
        };
        let Some(part) = part else { return };
        let (pid, wire) = world.spawn(Role::SwitchOn, Some(me));
        world.ledger.area_maker = Some(pid);
        world.devices_made += 1;
        world.parts.insert(world.devices_made, part);
        world.send(wire, me, Message::Make(world.devices_made));
        self.maker = Some(MakerWire { wire });
    }

    fn hear_maker(&mut self, world: &mut World, me: Pid) {
        let Some(maker) = &mut self.maker else { return };
        match world.receive(maker.wire, me) {
            Heard::Nothing => return,
            Heard::Said(Message::Made(device)) => {
                world.ledger.areas.push(device);
                world.send(maker.wire, me, Message::SwitchOn);
                return;
            }
            Heard::Said(_) | Heard::Gone => {}
        }
        self.maker = None;
        self.tell_devices(world, me);
    }

    fn serve(&mut self, world: &mut World, me: Pid) {
        if self.phase == Phase::Starting && !Self::listed(world).is_empty() {
            self.phase.become_next(Phase::Serving);
            world.listener = Some((me, VecDeque::new()));
        }
        if !self.awaits_room {
            self.daemon.map(|wire| world.send(wire, me, Message::TellRoom));
            self.awaits_room = true;
        }
        if !std::mem::take(&mut self.has_new_room) {
            return;
        }
        if world.below(4) == 0 {
            let is_full = world.below(2) == 0;
            self.tell_all(&Tell::Full(is_full), world);
        }
        let count = Self::listed(world).len();
        let is_wanted = count == 0 || count < AREAS_MAX && world.below(20) == 0;
        if is_wanted && !self.has_maker(world) {
            self.daemon.map(|wire| world.send(wire, me, Message::Attach));
            self.busy = Some(Busy::AwaitDevice);
        }
    }

    // The end.

    fn empty(&mut self, world: &mut World, me: Pid) {
        let off = match self.off {
            None => SwitchOff::Idle,
            Some(pid) if world.life(Some(pid)) < Life::Gone => SwitchOff::UnderWay,
            Some(pid) if world.processes[pid].has_succeeded => SwitchOff::Done,
            Some(_) => SwitchOff::Failed,
        };
        if off != SwitchOff::UnderWay {
            self.off = None;
        }
        let listed = Self::listed(world);
        let seen = Seen {
            has_maker: self.has_maker(world),
            is_listed: Some(!listed.is_empty()),
            off,
            has_runs: !world.ledger.runs.is_empty(),
        };
        match seen.next() {
            Emptying::Wait => {}
            Emptying::End => self.phase.become_next(Phase::Ending),
            Emptying::SwitchOff => {
                let devices = listed.into_iter().collect();
                self.off = Some(world.spawn(Role::SwitchOff(devices), Some(me)).0);
            }
            Emptying::Refuse => {
                self.retry_at = Some(world.now + RETRY);
                let is_told_again = world.ledger.is_serving && !self.has_taken_over;
                let next = refused(self.phase, is_told_again);
                if next == self.phase {
                    return;
                }
                self.phase.become_next(next);
                if is_told_again {
                    self.is_told_to_end = false;
                } else {
                    let troubles = Vec::new();
                    self.tell_all(&Tell::Left { is_over: false, troubles }, world);
                }
            }
        }
    }

    fn is_in_use(world: &World) -> bool {
        world.life(world.ledger.area_maker) < Life::Over || !Self::listed(world).is_empty()
    }

    fn undo(&mut self, step: usize, until: Duration, world: &mut World, me: Pid) {
        let next = Busy::Undo { step: step + 1, until: world.now + COME_BACK };
        self.busy = Some(next);
        match UNDO.get(step) {
            Some(Undo::Look) if Self::is_in_use(world) => self.undone(world),
            Some(Undo::Look) => {}
            Some(Undo::Detach) => {
                for device in world.ledger.areas.clone() {
                    world.detach(device);
                }
            }
            Some(Undo::EndDaemon) => {
                self.phase.require(Act::EndDaemon);
                self.daemon.map(|wire| world.send(wire, me, Message::End));
                let is_over = world.life(world.ledger.daemon) >= Life::Over;
                if !is_over && world.now < until {
                    self.busy = Some(Busy::Undo { step, until });
                } else if !is_over && !Self::listed(world).is_empty() {
                    self.undone(world);
                } else if let Some(daemon) = world.ledger.daemon.filter(|_| !is_over) {
                    world.kill(daemon);
                }
            }
            Some(Undo::Restore) => {
                self.phase.require(Act::Remove);
                world.is_mounted = false;
            }
            Some(Undo::Remove) => {
                world.ledger.is_there = false;
                world.ledger.areas.clear();
            }
            None => self.undone(world),
        }
    }

    fn undone(&mut self, world: &mut World) {
        self.busy = None;
        if Self::is_in_use(world) {
            return self.phase.become_next(Phase::Emptying);
        }
        self.phase.become_next(Phase::Over);
        self.tell_all(&Tell::Left { is_over: true, troubles: Vec::new() }, world);
    }

    // Members.

    fn tell_all(&mut self, what: &Tell, world: &mut World) {
        for member in &mut self.members {
            member.outbox.put(what.clone());
            // An error means that the member is gone, as its wire shows.
            let _ = member.outbox.send(|bytes| world.send_some(member.wire, bytes));
        }
    }

    fn hear_members(&mut self, world: &mut World, me: Pid) {
        for index in (0..self.members.len()).rev() {
            let member = &mut self.members[index];
            let _ = member.outbox.send(|bytes| world.send_some(member.wire, bytes));
            let run = world.wires[member.wire].second_end();
            let answer = match world.receive(member.wire, me) {
                Heard::Said(Message::Join) if self.phase.may(Act::TakeRun) => {
                    member.run = run;
                    world.ledger.runs.extend(run);
                    world.has_had_run = true;
                    Tell::Noted
                }
                Heard::Said(Message::Rejoin)
                    if run.is_some_and(|run| world.ledger.runs.contains(&run)) =>
                {
                    member.run = run;
                    Tell::Noted
                }
                Heard::Said(Message::Rejoin) => Tell::Lost("unknown".into()),
                Heard::Said(Message::Leave) => {
                    world.ledger.runs.retain(|one| Some(*one) != member.run);
                    member.run = None;
                    if world.ledger.runs.is_empty() && !world.ledger.is_serving {
                        continue;
                    }
                    Tell::Left { is_over: false, troubles: Vec::new() }
                }
                Heard::Said(_) => Tell::Busy,
                Heard::Nothing => continue,
                Heard::Gone => {
                    world.ledger.runs.retain(|one| Some(*one) != member.run);
                    self.members.swap_remove(index);
                    continue;
                }
            };
            member.outbox.put(answer);
            let _ = member.outbox.send(|bytes| world.send_some(member.wire, bytes));
        }
    }

    fn look_for_orphans(&mut self, world: &mut World) {
        if self.orphans_until.is_none_or(|until| world.now <= until) {
            return;
        }
        let back: Vec<_> = self.members.iter().filter_map(|member| member.run).collect();
        let processes = &world.processes;
        world.ledger.runs.retain(|run| back.contains(run) || processes[*run].life != Life::Gone);
        let is_complete = world.ledger.runs.iter().all(|run| back.contains(run));
        self.orphans_until = (!is_complete).then(|| world.now + COME_BACK);
    }

    fn tick(&mut self, world: &mut World, me: Pid) {
        self.look_for_orphans(world);
        if self.daemon.is_some() {
            match self.hear_daemon(world, me) {
                Heard::Nothing => {}
                Heard::Gone => return self.daemon_died(world, me),
                Heard::Said(_) => return world.broke("the daemon says something unasked"),
            }
        }
        let is_wanted = self.phase == Phase::Starting
            || !world.ledger.runs.is_empty()
            || world.ledger.is_serving && !self.is_told_to_end
            || self.waits_for_first(world);
        let is_early = self.retry_at.is_some_and(|at| world.now < at);
        match task(self.phase, is_wanted, is_early) {
            Task::Serve => self.serve(world, me),
            Task::BeginEmptying => self.phase.become_next(Phase::Emptying),
            Task::Empty => self.empty(world, me),
            Task::End => {
                world.listener = None;
                self.busy = Some(Busy::Undo { step: 0, until: world.now + COME_BACK });
            }
            Task::Become(next) => self.phase.become_next(next),
            Task::Wait if self.phase == Phase::Over => {
                // The last messages are sent only if that needs no waiting.
                world.exit(me, true);
            }
            Task::Wait => {}
        }
    }

    /// The run that started the keeper must join before all else.
    fn waits_for_first(&self, world: &World) -> bool {
        !self.has_taken_over && !world.ledger.is_serving && !world.has_had_run
    }
}

impl Steps for KeeperProcess {
    fn step(&mut self, world: &mut World, me: Pid) {
        let before = self.phase;
        self.work(world, me);
        world.changed(me, before, self.phase);
    }
}

impl KeeperProcess {
    fn work(&mut self, world: &mut World, me: Pid) {
        if world.faults.sends_block && self.members.iter().any(|one| !one.outbox.is_empty()) {
            // The keeper is in a write that waits for a reader, and does nothing else.
            for member in &mut self.members {
                let _ = member.outbox.send(|bytes| world.send_some(member.wire, bytes));
            }
            return;
        }
        if let Some(busy) = self.busy.clone() {
            return self.be_busy(busy, world, me);
        }
        self.turn = (self.turn + 1) % 4;
        match self.turn {
            0 => self.hear_members(world, me),
            1 => {
                if let Some(wire) = world.accept(me) {
                    self.members.push(Participant { wire, run: None, outbox: Outbox::default() });
                }
            }
            2 => self.hear_maker(world, me),
            _ => {
                if std::mem::take(&mut world.processes[me].is_told_to_end) {
                    self.is_told_to_end = world.ledger.is_serving;
                    self.tell_all(&Tell::Detach, world);
                }
                self.tick(world, me);
            }
        }
    }
}

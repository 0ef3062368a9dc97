//! The modelled processes beside keeper and daemon: runs, the process that makes an area, and those
//! that switch areas off.

use super::kernel::{DeviceNumber, Heard, Life, Message, Pid, Role, Steps, WireId, World};
use crate::device::switching_off::ask_again;
use crate::device::wire::Tell;
use std::time::Duration;

/// `uzswap switch-on`.
pub struct SwitchOn {
    wire: WireId,
    device: Option<DeviceNumber>,
    is_made: bool,
    is_ordered: bool,
}

impl SwitchOn {
    pub fn new(wire: WireId) -> Self {
        Self { wire, device: None, is_made: false, is_ordered: false }
    }
}

impl Steps for SwitchOn {
    fn step(&mut self, world: &mut World, me: Pid) {
        if self.device.is_none() || self.is_made && !self.is_ordered {
            return match (world.receive(self.wire, me), self.device) {
                (Heard::Said(Message::Make(device)), None) => self.device = Some(device),
                (Heard::Said(Message::SwitchOn), Some(_)) => self.is_ordered = true,
                (Heard::Nothing, _) => {}
                (..) => world.exit(me, false),
            };
        }
        // All of these steps wait for a daemon, the present one or the next.
        let is_served = world.is_served();
        world.processes[me].waits_for_device = !is_served;
        if !is_served && !world.has_server_to_come() {
            return world.exit(me, false);
        }
        let Some(device) = self.device.filter(|_| is_served) else { return };
        if !self.is_made {
            self.is_made = true;
            world.devices.insert(device, me);
            world.send(self.wire, me, Message::Made(device));
        } else {
            world.swapon(device);
            world.send(self.wire, me, Message::On);
            world.exit(me, true);
        }
    }
}

/// `uzswap switch-off`, which does not accept EINVAL; or a foreign `swapoff -a`, which does.
pub struct SwitchOff {
    devices: Vec<DeviceNumber>,
    is_ours: bool,
    paused_until: Duration,
}

impl SwitchOff {
    pub fn new(role: &Role) -> Self {
        let devices =
            if let Role::SwitchOff(devices) = role { devices.clone() } else { Vec::new() };
        Self { devices, is_ours: *role != Role::Foreign, paused_until: Duration::ZERO }
    }
}

impl Steps for SwitchOff {
    fn step(&mut self, world: &mut World, me: Pid) {
        if !self.is_ours && self.devices.is_empty() {
            self.devices = world.areas.iter().map(|area| area.device).collect();
        }
        let Some(device) = self.devices.last().copied() else { return world.exit(me, true) };
        if world.now < self.paused_until {
            return;
        }
        let Some(answer) = world.swapoff(me, device) else { return };
        match ask_again(answer, || Ok(world.is_listed(device))) {
            Ok(Some(pause)) if self.is_ours => self.paused_until = world.now + pause,
            Err(_) if self.is_ours => world.exit(me, false),
            _ if self.devices.len() == 1 => world.exit(me, true),
            _ => drop(self.devices.pop()),
        }
    }
}

/// A `swapon` by hand: a device keeps the signature of an area.
pub struct ForeignOn;

impl Steps for ForeignOn {
    fn step(&mut self, world: &mut World, me: Pid) {
        if !world.is_served() && world.has_server_to_come() {
            // swapon reads the signature.
            return;
        }
        let is_off = |device: &DeviceNumber| world.areas.iter().all(|area| area.device != *device);
        let signed = world.signed.iter().filter(|device| world.devices.contains_key(device));
        let off: Vec<_> = signed.copied().filter(is_off).collect();
        let device = off.get(world.random_of(off.len())).copied();
        device.filter(|_| world.is_served()).into_iter().for_each(|device| world.swapon(device));
        world.exit(me, true);
    }
}

/// `uzswap run`: joins, reconnects to the next keeper, leaves.
pub struct Run {
    wire: Option<WireId>,
    is_part: bool,
    /// True if the run has been told to leave, and has told the keeper.
    leaves: bool,
    line: Vec<u8>,
}

impl Run {
    pub fn new() -> Self {
        Self { wire: None, is_part: false, leaves: false, line: Vec::new() }
    }

    fn connect(&mut self, world: &mut World, me: Pid) {
        // The run gives up if keeper and daemon are both gone.
        let is_attended = [world.ledger.keeper, world.ledger.daemon]
            .into_iter()
            .any(|pid| world.life(pid) < Life::Gone);
        if !is_attended && (self.is_part || world.processes[me].is_told_to_end) {
            return world.exit(me, true);
        }
        self.wire = world.connect(me);
        let message = if self.is_part { Message::Rejoin } else { Message::Join };
        self.leaves = false;
        self.line.clear();
        self.wire.map(|wire| world.send(wire, me, message));
    }

    fn hear(&mut self, tell: &Tell, world: &mut World, me: Pid) {
        match tell {
            Tell::Noted => self.is_part = true,
            Tell::Lost(_) => world.exit(me, true),
            Tell::Left { .. } if self.leaves => world.exit(me, true),
            Tell::Busy => drop(self.wire.take().map(|wire| world.close(wire, me))),
            _ => {}
        }
    }
}

impl Steps for Run {
    fn step(&mut self, world: &mut World, me: Pid) {
        let Some(wire) = self.wire else { return self.connect(world, me) };
        // Reading makes room in the socket.
        while let Some(byte) = world.wires[wire].bytes.pop_front() {
            self.line.push(byte);
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                match serde_json::from_slice::<Tell>(&line) {
                    Ok(tell) => return self.hear(&tell, world, me),
                    Err(error) => return world.broke(format!("a line that is none: {error}")),
                }
            }
        }
        if let Heard::Gone = world.receive(wire, me) {
            self.wire = None;
        } else if world.processes[me].is_told_to_end && self.is_part && !self.leaves {
            self.leaves = true;
            world.send(wire, me, Message::Leave);
        }
    }
}

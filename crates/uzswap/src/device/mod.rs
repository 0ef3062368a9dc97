//! The swap device: its keeper and daemon, and every change that they make on the machine.

pub mod area;
pub mod daemon;
pub mod folder;
pub mod group;
pub mod group_change;
pub mod keeper;
pub mod kept;
pub mod ledger;
pub mod membership;
pub mod options;
pub mod phase;
pub mod processes;
pub mod requirements;
pub mod shortage;
pub mod signals;
#[cfg(test)]
mod simulator;
pub mod slots;
pub mod space;
pub mod spared;
pub mod switching_off;
pub mod systemd;
pub mod wire;

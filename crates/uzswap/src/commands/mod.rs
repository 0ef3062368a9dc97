//! The commands that a person gives, each in a file of its own.

pub mod accesses;
pub mod attach;
pub mod attachment;
pub mod config;
pub mod doctor;
pub mod fleet;
pub mod import;
pub mod in_process;
pub mod memory;
pub mod record;
pub mod reload;
pub mod remote;
pub mod run;
pub mod serve;
pub mod simulate;
pub mod status;
pub mod supervise;
pub mod top;
pub mod trace;
pub mod upgrade;
pub mod user;

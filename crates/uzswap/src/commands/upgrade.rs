//! `uzswap upgrade`: this program replaces the one that serves now.
//!
//! An upgrade works like the replacement of a killed daemon (kept.rs), but the next daemon runs
//! this program. If this version cannot read the old daemon's memory, it prints that, and the old
//! program serves again.

use crate::device::wire::{Ask, Tell, Wire};
use crate::device::{folder, keeper};
use crate::error::Failure;
use crate::stdio::show;
use std::io;
use std::os::unix::net::UnixStream;

/// Asks the keeper for the upgrade, and waits.
pub fn upgrade() -> Result<(), Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find the path of this program: {error}")))?;
    let stream = UnixStream::connect(folder::socket()).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::new(keeper::cannot_lock(&error)),
        _ => Failure::new("there is no cache to upgrade: none is running"),
    })?;
    let mut wire = Wire::new(stream);
    let asked = wire.send(&Ask::Upgrade(program.clone()));
    match asked.and_then(|()| wire.receive()) {
        Ok(Tell::Replaced(daemon)) => {
            show!("{} serves now, as process {daemon}; no page was lost", program.display());
            Ok(())
        }
        Ok(Tell::Refused(message)) => Err(Failure::new(message)),
        Ok(_) => {
            Err(Failure::new("the keeper is too old for an upgrade: end it and start it again"))
        }
        Err(error) => {
            Err(Failure::new(format!("the keeper does not answer: {error}; see `uzswap status`")))
        }
    }
}

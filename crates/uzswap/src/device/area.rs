//! `uzswap switch-on`: the process that makes a further area, and has the kernel swap to it.
//!
//! All of this waits for the daemon's answers: opening its file, the loop device's first look, the
//! header. If the daemon is killed, it waits for the next daemon's. The keeper starts that one, so
//! it does not itself wait. And the process that has the connections to the kernel must not wait
//! either, not even by a thread. A process that waits does not end when it is killed, and keeps its
//! descriptors. With keeper and daemon killed nobody may have those, or nobody is ever answered.
//!
//! It goes on when the keeper is killed. Its area is written down before it is switched on.

use crate::device::wire::{AreaOrder, AreaReport, Wire};
use crate::error::Failure;
use std::io;
use std::ops::Range;
use uzswap_block::{AttachError, Device, Offer, switch_on};
use uzswap_sys::process;

/// Does as the keeper orders.
pub fn make() -> Result<(), Failure> {
    let started_by =
        |error: io::Error| Failure::new(format!("switch-on is started by the keeper: {error}"));
    // The keeper's lock and connections are closed by exec; so is whatever a shell has left open.
    process::close_inherited(None).map_err(started_by)?;
    let mut wire = Wire::of_stdin().map_err(started_by)?;
    let AreaOrder::Make(offer, part) = wire.receive().map_err(started_by)? else {
        return Err(started_by(io::ErrorKind::InvalidData.into()));
    };
    let report = match made(offer, part, &mut wire) {
        Ok(()) => AreaReport::On,
        Err(error) => AreaReport::Failed(error.to_string()),
    };
    // An error: the keeper is gone; the next one reads the kernel's list.
    let _ = wire.send(&report);
    Ok(())
}

/// Makes the device, has it written down, and switches it on.
fn made(offer: Offer, part: Range<u64>, wire: &mut Wire) -> Result<(), AttachError> {
    let bytes = part.end - part.start;
    let device = Device::over(offer, part)?;
    wire.send(&AreaReport::Made(device.path().to_owned())).map_err(AttachError::Loop)?;
    match wire.receive().map_err(AttachError::Loop)? {
        AreaOrder::SwitchOn(priority) => switch_on(device.path(), bytes, priority),
        AreaOrder::Make(..) => Err(AttachError::Loop(io::ErrorKind::InvalidData.into())),
    }
}

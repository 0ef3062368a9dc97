//! `uzswap switch-on`: the process that makes a further area and switches it on.
//!
//! Each step waits for the daemon's answers: opening its file, the loop device's first read, the
//! header. If the daemon is killed, the next daemon answers. The keeper starts that daemon, so the
//! keeper must not wait here. Neither may any thread of a process that has the connections to the
//! kernel. A process that waits in the kernel does not end when it is killed, and keeps its
//! descriptors. If such a process had the connections, and keeper and daemon were killed, no
//! request would ever be answered.
//!
//! This process survives a kill of the keeper. The state file has its area before the area is
//! switched on.

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
    // exec has closed the keeper's lock and connections. Descriptors that a shell has left open are
    // closed here.
    process::close_inherited(None).map_err(started_by)?;
    let mut wire = Wire::of_stdin().map_err(started_by)?;
    let AreaOrder::Make(offer, part) = wire.receive().map_err(started_by)? else {
        return Err(started_by(io::ErrorKind::InvalidData.into()));
    };
    let report = match made(offer, part, &mut wire) {
        Ok(()) => AreaReport::On,
        Err(error) => AreaReport::Failed(error.to_string()),
    };
    // An error means that the keeper is gone. The next keeper reads the kernel's list.
    let _ = wire.send(&report);
    Ok(())
}

/// Makes the device, waits until the keeper has written it down, and switches it on.
fn made(offer: Offer, part: Range<u64>, wire: &mut Wire) -> Result<(), AttachError> {
    let bytes = part.end - part.start;
    let device = Device::over(offer, part)?;
    wire.send(&AreaReport::Made(device.path().to_owned())).map_err(AttachError::Loop)?;
    match wire.receive().map_err(AttachError::Loop)? {
        AreaOrder::SwitchOn(priority) => switch_on(device.path(), bytes, priority),
        AreaOrder::Make(..) => Err(AttachError::Loop(io::ErrorKind::InvalidData.into())),
    }
}

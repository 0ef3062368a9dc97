//! Processes of ours that systemd spares at shutdown until swapping is off.

use crate::device::processes::OWN_PROGRAM;
use crate::device::wire::Wire;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The first argument of both processes: when systemd shuts the machine down it spares processes
/// with this in front of their names, until swapping is off.
const SPARED_NAME: &str = "@uzswap";

/// A process of ours, with `arguments`, that is spared at shutdown, and a wire to it.
pub fn start(arguments: &[String]) -> io::Result<(Child, Wire)> {
    start_of(Path::new(OWN_PROGRAM), arguments)
}

/// The same of another program than this process runs.
pub fn start_of(program: &Path, arguments: &[String]) -> io::Result<(Child, Wire)> {
    let (ours, theirs) = Wire::pair()?;
    let child = command(program, arguments, theirs).spawn()?;
    Ok((child, ours))
}

/// A process of ours that is spared at shutdown, of a program, with the end of its wire.
pub fn command(program: &Path, arguments: &[String], wire: OwnedFd) -> Command {
    let mut command = Command::new(program);
    command.arg0(SPARED_NAME).args(arguments).stdin(wire).stdout(Stdio::null());
    command
}

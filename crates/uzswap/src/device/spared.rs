//! Processes of ours that systemd spares at shutdown until swap is off.

use crate::device::processes::OWN_PROGRAM;
use crate::device::wire::Wire;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The prefix of both processes' names. At shutdown, systemd spares processes with it until swap is
/// off.
const SPARED_NAME: &str = "@uzswap";

/// Starts this program with `arguments`, spared at shutdown. Returns the process, and a wire to it.
pub fn start(arguments: &[String]) -> io::Result<(Child, Wire)> {
    start_of(Path::new(OWN_PROGRAM), arguments)
}

/// Starts another program in this way.
pub fn start_of(program: &Path, arguments: &[String]) -> io::Result<(Child, Wire)> {
    let (ours, theirs) = Wire::pair()?;
    let child = command(program, arguments, theirs).spawn()?;
    Ok((child, ours))
}

/// The command for such a process, with its end of the wire.
pub fn command(program: &Path, arguments: &[String], wire: OwnedFd) -> Command {
    let mut command = Command::new(program);
    command.arg0(SPARED_NAME).args(arguments).stdin(wire).stdout(Stdio::null());
    command
}

//! Messages on standard error, and output on standard output.
//!
//! The reader may be gone, as in `uzswap status | head`, or the disk full. That ends nothing here:
//! a command runs, and a device is served, without readers. (`println!` would panic.)

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;

static LOST: OnceLock<io::Error> = OnceLock::new();

/// Writes a line to standard error, if anybody reads it.
pub fn to_error(line: fmt::Arguments) {
    // If this fails, the message has no reader.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes a line to standard output. An error other than a missing reader is kept for [`lost`].
pub fn to_output(line: fmt::Arguments) {
    match writeln!(io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => _ = LOST.set(error),
        _ => {}
    }
}

/// The error that has lost some output.
pub fn lost() -> Option<&'static io::Error> {
    LOST.get()
}

/// [`to_error`] with the arguments of `println!`.
macro_rules! say {
    ($($argument:tt)*) => { $crate::stdio::to_error(format_args!($($argument)*)) };
}

/// [`to_output`] with the arguments of `println!`.
macro_rules! show {
    ($($argument:tt)*) => { $crate::stdio::to_output(format_args!($($argument)*)) };
}

pub(crate) use {say, show};

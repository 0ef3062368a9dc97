//! The message of a command that fails: one line, which has the remedy.

use std::fmt;
use uzswap_block::{AttachError, BackingError};
use uzswap_engine::SetupError;
use uzswap_remote::{AddressError, ConnectError};
use uzswap_trace::TraceError;

/// A failure, in words for the person at the terminal.
#[derive(Debug)]
pub struct Failure {
    message: String,
    exit_code: u8,
}

impl Failure {
    /// A failure of uzswap's own.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit_code: crate::EXIT_FAILURE }
    }

    /// A failure to run the command: 126 or 127.
    pub fn command(message: impl Into<String>, exit_code: u8) -> Self {
        Self { message: message.into(), exit_code }
    }

    /// A failure that another process has reported.
    pub fn silent() -> Self {
        Self::new("")
    }

    /// True if there is no message.
    pub fn is_silent(&self) -> bool {
        self.message.is_empty()
    }

    /// The exit status of the process.
    pub fn exit_code(&self) -> u8 {
        self.exit_code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

macro_rules! from {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::new(error.to_string())
            }
        }
    )*};
}

from!(BackingError, AttachError, SetupError, AddressError, ConnectError, TraceError);

//! A store that cannot be used, and why.

use crate::address::{Address, AddressError};
use std::io;

/// The store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address, or the file of the password.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// This process has no descriptor or memory for it.
    #[error("backing {address}: {source}; raise the limit of open files (ulimit -n)")]
    Own {
        /// The address.
        address: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The store.
    #[error("backing {address}: {reason}")]
    Store {
        /// The address.
        address: String,
        /// The reason and the remedy.
        reason: String,
    },
}

impl ConnectError {
    pub(crate) fn store(address: &Address, reason: impl Into<String>) -> Self {
        Self::Store { address: address.to_string(), reason: reason.into() }
    }
}

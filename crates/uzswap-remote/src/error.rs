//! The reasons why a store cannot be used.

use crate::address::{Address, AddressError};
use std::io;

/// A store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is wrong, or the password's file.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// This process has no descriptor or memory for the store.
    #[error("backing {address}: {source}; raise the limit of open files (ulimit -n)")]
    Own {
        /// The address.
        address: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The store refused, or did not answer.
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

//! The amount that the kernel has swapped to our devices, by its own account.

use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use uzswap_sys::swap;

/// The devices that the kernel may swap to.
#[derive(Debug, Default)]
pub struct Swapped {
    devices: Mutex<Vec<PathBuf>>,
}

/// Of all of them together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InUse {
    /// How many are areas now.
    pub areas: u64,
    /// Bytes of the areas.
    pub bytes: u64,
    /// Bytes of slots that are taken.
    pub used: u64,
}

impl Swapped {
    /// It may swap to these.
    pub fn set(&self, devices: Vec<PathBuf>) {
        *self.devices.lock().unwrap_or_else(PoisonError::into_inner) = devices;
    }

    /// True if the kernel lists one of them as a swap area. It does until the last page is read
    /// back. Errors: it does not say, so it may.
    pub fn is_listed(&self) -> io::Result<bool> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(swap::areas()?.iter().any(|area| devices.contains(&area.path)))
    }

    /// Them.
    pub fn devices(&self) -> Vec<PathBuf> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How they are used now; nothing where the kernel does not say.
    pub fn in_use(&self) -> InUse {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let areas = swap::areas().unwrap_or_default();
        let ours = areas.iter().filter(|area| devices.contains(&area.path));
        ours.fold(InUse::default(), |sum, area| InUse {
            areas: sum.areas + 1,
            bytes: sum.bytes + area.bytes,
            used: sum.used + area.used,
        })
    }
}

//! The pages that the kernel has swapped to our devices, by its own count.

use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use uzswap_sys::swap;

/// The devices that the kernel may swap to.
#[derive(Debug, Default)]
pub struct Swapped {
    devices: Mutex<Vec<PathBuf>>,
}

/// The sums of all devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InUse {
    /// Devices that are swap areas now.
    pub areas: u64,
    /// Bytes of the areas.
    pub bytes: u64,
    /// Bytes of slots that are taken.
    pub used: u64,
}

impl Swapped {
    /// Sets the devices that the kernel may swap to.
    pub fn set(&self, devices: Vec<PathBuf>) {
        *self.devices.lock().unwrap_or_else(PoisonError::into_inner) = devices;
    }

    /// True if the kernel lists one of these devices as a swap area. The kernel lists an area until
    /// its last page is read back. Fails if the list cannot be read. After a failure, an area may
    /// be on.
    pub fn is_listed(&self) -> io::Result<bool> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(swap::areas()?.iter().any(|area| devices.contains(&area.path)))
    }

    /// These devices.
    pub fn devices(&self) -> Vec<PathBuf> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The present use of the devices; zeros if the kernel's list cannot be read.
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

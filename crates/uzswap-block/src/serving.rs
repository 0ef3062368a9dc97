//! Starts a transport of either kind, and removes the remains of one.

use crate::config::ServerConfig;
use crate::device::AttachError;
use crate::disk::Disk;
use crate::kept::KeptServer;
use crate::server::Server;
use crate::traffic::Traffic;
use crate::transport::{Offer, Transport, TransportKind};
use crate::ublk::{self, Devices};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uzswap_engine::CpuState;
use uzswap_sys::{loopdev, shared};

/// Starts serving `disk`. `file` is an existing file, for a transport that needs one. With `kept`
/// (FUSE) or `before` (ublk), another process can take over when this one is killed. `before` has
/// the devices of the last server.
pub fn start(
    kind: TransportKind,
    disk: Arc<dyn Disk>,
    traffic: Arc<Traffic>,
    file: &Path,
    config: ServerConfig,
    kept: Option<KeptServer>,
    before: Option<Vec<PathBuf>>,
) -> io::Result<Box<dyn Transport>> {
    match kind {
        TransportKind::Fuse => {
            let kept = match kept {
                Some(kept) => kept,
                None => KeptServer::new(config.threads, shared::create("uzswap-requests")?)?,
            };
            let server = Server::start(disk, traffic, file, config, kept)?;
            Ok(Box::new(OverFuse { server, file: file.to_owned() }))
        }
        TransportKind::Ublk => Ok(Box::new(Devices::start(disk, traffic, config, before)?)),
    }
}

/// Detaches a device whose process is gone. A device that is gone is no error.
pub fn detach(kind: TransportKind, device: &Path) -> io::Result<()> {
    match kind {
        TransportKind::Fuse => match loopdev::detach(device) {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
            other => other,
        },
        TransportKind::Ublk => ublk::detach(device),
    }
}

/// True if a device is ours, not another of that name: its file is in `folder`, or it has our mark.
pub fn is_ours(kind: TransportKind, device: &Path, folder: &Path) -> bool {
    match kind {
        TransportKind::Fuse => {
            loopdev::backing_file(device).is_some_and(|file| file.starts_with(folder))
        }
        TransportKind::Ublk => ublk::is_ours(device),
    }
}

/// Answers requests with errors while the kernel switches off the devices of a killed process.
/// `None` if the kernel answers by itself. Only ublk keeps requests, and their threads wait.
pub fn stand_in(
    kind: TransportKind,
    devices: &[PathBuf],
) -> io::Result<Option<Box<dyn Transport>>> {
    match kind {
        TransportKind::Ublk if !devices.is_empty() => Ok(Some(Box::new(ublk::stand_in(devices)?))),
        TransportKind::Fuse | TransportKind::Ublk => Ok(None),
    }
}

/// A file that we serve. Another process makes loop devices over it.
struct OverFuse {
    server: Server,
    file: PathBuf,
}

impl Transport for OverFuse {
    fn kind(&self) -> TransportKind {
        TransportKind::Fuse
    }

    fn attach(&mut self, _part: Range<u64>) -> Result<Offer, AttachError> {
        Ok(Offer::File(self.file.clone()))
    }

    /// The kernel removes a loop device with the process that made it.
    fn release_unused(&mut self) {}

    fn cpu_state(&self) -> CpuState {
        self.server.cpu_state()
    }
}

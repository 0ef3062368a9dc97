//! Front end: a swap device, served from user space.
//!
//! ```text
//! kernel swap → loop device (direct I/O) → FUSE file → server ─┬→ [disk] → the engine's cache
//! kernel swap → ublk device → crew ────────────────────────────┘
//! ```
//! Writes of pages are stores, reads are loads, discards are invalidates. The kernel may read a
//! slot several times, so a read drops nothing. Beside the file there are control files
//! ([control]): attributes and statistics, one value a file, as in sysfs.
//!
//! The server's threads are on the path by which the kernel frees memory. So they allocate nothing,
//! and all their memory is locked. Policy is the engine's; processes, cgroups and reports are the
//! binary's.
//!
//! [disk]: Disk
//! [control]: control

mod batch;
mod config;
mod crew;
mod disk;
mod kept;
mod poll;
mod protocol;
mod request;
mod room;
mod server;
mod team;
mod ublk;
mod watch;

pub mod control;
mod device;
mod maintain;
pub mod serving;
mod swapped;
mod traffic;
mod transport;

pub use config::ServerConfig;
pub use device::{AttachError, switch_on};
pub use disk::{CacheDisk, Disk, DiskError, MemoryDisk};
pub use kept::KeptServer;
pub use maintain::Maintainer;
pub use room::Room;
pub use serving::start as start_transport;
pub use swapped::Swapped;
pub use traffic::Traffic;
pub use transport::{Device, Offer, Transport, TransportKind};
pub use uzswap_engine::backing::{BackingError, BackingFile, BackingSpec, open_backing_file};

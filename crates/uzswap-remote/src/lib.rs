//! A backing in another machine's memory: segments like those on a disk, in Valkey or Redis.
//!
//! ```text
//! address      valkey://HOST:PORT/?max=8G      tls       certificates, password
//! protocol     commands and replies            line      one connection
//! nodes        the servers of a cluster        store     read, write, remove, renew
//! connect      how servers are entered         table     where each segment is
//! tiers        the backing: disk and store     connected how it is made
//! fork         a child has a copy              upkeep    the background thread
//! admin        the clients of a store
//! ```
//! The crate speaks the protocol itself. Client libraries allocate memory for each reply, but a
//! thread that faults must not need memory. The library that is loaded into other programs also
//! stays small. `docs/design/remote.md` has the promises.

// In the order in which to read them.
mod address;
mod error;
mod protocol;
mod tls;

mod line;
mod nodes;

mod figures;
mod store;

mod connect;
mod connected;
mod fork;
mod table;
mod tiers;
mod upkeep;

mod admin;
#[cfg(feature = "testing")]
pub mod testing;

pub use address::{Address, AddressError, Seed};
pub use admin::{Admin, Client};
pub use connected::Connected;
pub use error::ConnectError;
pub use fork::BeforeFork;
pub use tiers::Tiers;

//! Regions: memory of a program that is compressed in place.
//!
//! ```no_run
//! use uzswap_region::{Advice, Pager, RegionVec};
//!
//! let pager = Pager::builder().memory("512M").backing("/var/tmp/pages:8G").build()?;
//! let mut values: RegionVec<u64> = pager.vec_zeroed(1 << 28)?; // 2 GiB of addresses in 512 MiB
//! values[12_345_678] = 1;
//! values.advise(0..1 << 20, Advice::PageOut)?;
//! println!("{}", pager.stats());
//! # Ok::<(), uzswap_region::Error>(())
//! ```
//! A [`Pager`] has a budget; its regions take as much memory as that allows. The rest of their
//! pages is kept compressed in the engine's cache, or on its backing. This needs no root, swap
//! device, or setting of the host: the thread that faults serves the fault through userfaultfd
//! ([`Mode`]).
//!
//! Read the modules in their order: a page's word and its states, how faults are served, how pages
//! are taken out.

mod page;

mod ahead_request;
mod budget;
mod error;
mod handlers;
mod lane;
mod layers;
mod mode;
mod on_fork;
mod returns;
mod size;
mod staging;
mod steady;

mod core;

mod accesses;
mod ahead;
mod fault;
mod reclaim;

mod doors;

mod copy;
mod fork;
mod stats;

mod threads;

mod builder;
mod pager;
mod region;
mod vec;

mod adopt;
mod inherit;
mod pin;
mod window;

pub mod io;
pub mod signals;

pub use adopt::Contents;
pub use builder::PagerBuilder;
pub use error::Error;
pub use inherit::BeforeFork;
pub use mode::{Means, Mode};
pub use on_fork::OnFork;
pub use pager::Pager;
pub use region::{Advice, Pinned, Region, RegionRef};
pub use size::MemorySize;
pub use stats::Stats;
pub use threads::is_pager_thread;
pub use uzswap_policy::order::PagerPolicy;
pub use vec::RegionVec;
pub use window::Change;

//! The compressed swap cache.
//!
//! Read it in the order of the modules below. `cache` has the whole flow on one screen, so a reader
//! in a hurry starts there. The engine knows no userfaultfd, block device, cgroup or clock, and
//! starts no threads. Front ends call [`Cache::store`], [`Cache::load`] and [`Cache::invalidate`]
//! from their threads, each of which has called [`compress::prepare_thread`]. One more of their
//! threads calls [`Cache::maintain`].

// In the order in which to read them: a module uses only those of the groups before its own.
mod sync;

mod bits;
mod ids;
mod page;
mod percpu;
pub mod times;

#[cfg(feature = "simulation")]
pub mod crash_points;
#[cfg(not(feature = "simulation"))]
mod crash_points;

#[cfg_attr(
    feature = "shuttle",
    expect(dead_code, reason = "the model checker has no memory that outlives it")
)]
mod durable;

mod lru;
mod table;

pub mod compress;

mod counters;
mod error;
mod object;
mod scratch;

mod index;

pub mod backing;
mod dedup;
mod pool;
mod share;
mod unit;

mod config;

mod cache;

#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(feature = "testing")]
pub mod testing;

pub use cache::{
    Cache, CpuState, Load, Placement, Reject, STATISTICS, StateDoc, Statistic, Store, cpu_states,
};
pub use config::{ATTRIBUTES, Attribute, Config};
pub use error::{AttributeError, CpuError, Error, SectionError, SetupError};
pub use ids::{Area, Place, SwapEntry};
#[cfg(feature = "simulation")]
pub use index::TRANSITIONS;
pub use page::{PAGE_BYTES, Page};
pub use pool::{ClassStats, SectionState};

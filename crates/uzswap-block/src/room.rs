//! The number of further pages that the cache can take.

use crate::traffic::Traffic;
use serde::{Deserialize, Serialize};
use uzswap_engine::Cache;

/// The parts of pool and backing that do not count as room.
const POOL_RESERVE_DIVISOR: u64 = 32;
const BACKING_RESERVE_DIVISOR: u64 = 16;
const BACKING_RESERVE_BYTES: u64 = 1 << 20;

/// The room of a cache at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Bytes of pages that fit into pool and backing, even incompressible ones.
    pub bytes: u64,
    /// Requests that were answered with an error, since the daemon's start.
    pub errors: u64,
}

impl Room {
    /// The room of a cache, by the figures of the cache and of its requests.
    pub fn of(cache: &Cache, traffic: &Traffic) -> Self {
        let figure = |name| cache.statistic(name).unwrap_or(0);
        let left = |all: u64, used: u64, divisor: u64| (all - all / divisor).saturating_sub(used);
        let backing = match figure("writeback_stopped") {
            0 => figure("backing_total_size"),
            _ => 0,
        };
        let bytes = left(figure("pool_limit"), figure("pool_total_size"), POOL_RESERVE_DIVISOR)
            + left(backing, figure("backing_live_size"), BACKING_RESERVE_DIVISOR)
                .saturating_sub(BACKING_RESERVE_BYTES);
        Self { bytes, errors: traffic.errors() }
    }
}

//! The time that a program loses to faults, reckoned from their number.
//!
//! The times were measured in-process with lz4, and include storing the page that makes room
//! (docs/design/policy.md). Only the read of the backing is assumed: that of a solid-state disk.

/// A touch of a page in the pool, µs.
pub const POOL: f64 = 13.0;
/// A touch of a page on its way out, µs.
pub const STAGED: f64 = 5.0;
/// A read of the backing, µs.
pub const BACKING: f64 = 100.0;

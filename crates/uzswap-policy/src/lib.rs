//! Which page leaves: decisions that touch nothing.
//!
//! The pager tells its observations, and asks. Time is a count of pages that left, so that a test
//! or a simulator decides as the pager does. [`order`] decides which page leaves, and [`ahead`]
//! which pages come beside one that is touched. [`replay`] replays the touches of a trace by ours,
//! whose pager is in `model`, and by the policies that ours is measured against. `counted_memory`
//! counts the memory that they take. [`idle`] decides how much of its share a process leaves to
//! others, and [`favour`] how far the oldest processes of a tree go before the others.
//!
//! docs/design/policy.md has the reasons, an example by hand, and the policies that lost.

#![forbid(unsafe_code)]

pub mod ahead;
pub mod costs;
pub mod favour;
pub mod idle;
pub mod order;

mod counted_memory;
mod model;
pub mod replay;

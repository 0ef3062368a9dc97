//! The decisions of a pager: which page leaves, and which pages come. They have no side effects.
//!
//! The pager reports its observations and asks for a decision. Time is a count of pages that left,
//! so that a test or a simulator decides as the pager does. [`order`] decides which page leaves,
//! and [`ahead`] which pages come in beside a touched page. [`replay`] replays a trace with our
//! policy, whose pager is in `model`, and with other policies for comparison. `counted_memory`
//! counts the memory that the pages take. [`idle`] decides how much of its share a process leaves
//! to others, and [`favour`] how much a tree's oldest processes come before the others.
//! [`margin`] decides how much of a container's limit is left beside a budget.
//! [`pool_share`] decides how much of its memory a pager leaves to compressed pages.
//! [`pager_memory`] is the memory of a replay, and the part of it for the pool.
//!
//! docs/design/policy.md has the reasons, an example by hand, and the policies that lost.

#![forbid(unsafe_code)]

pub mod ahead;
pub mod costs;
pub mod favour;
pub mod idle;
pub mod margin;
pub mod order;
pub mod pager_memory;
pub mod pool_share;

mod counted_memory;
mod model;
pub mod replay;

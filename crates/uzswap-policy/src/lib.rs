//! Which page leaves: decisions that touch nothing.
//!
//! The pager tells its observations, and asks. Time is a count of pages that left, so that a test
//! or a simulator decides as the pager does. [`order`] has the decisions. [`replay`] has a pager
//! without memory, and the policies that ours is measured against.
//!
//! docs/design/policy.md has the reasons, an example by hand, and the policies that lost.

#![forbid(unsafe_code)]

pub mod order;
pub mod replay;

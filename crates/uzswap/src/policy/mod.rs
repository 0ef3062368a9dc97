//! Which processes run, and how much memory each has: decisions, and limits that follow from them.

pub mod load;
pub mod pressure;
pub mod relief;
pub mod squeeze;

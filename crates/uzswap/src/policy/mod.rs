//! Decides which processes run, and how much memory each may use.

pub mod load;
pub mod pressure;
pub mod relief;
pub mod squeeze;

//! Traces: which pages a program touched, in order, without their contents.
//!
//! ```text
//! a fault in a recorded program → Log: a file that its processes map          (log)
//! the file → Trace: checked, summed up, cut, exported                         (read, summary,
//!                                                                             export)
//! a Trace → the steps that `uzswap_policy::replay` takes                      (steps)
//! ```
//! docs/design/traces.md has the format, and the limits of a trace's accuracy.

mod event;
mod export;
mod header;
mod log;
mod read;
mod steps;
mod summary;

pub use event::{EVENT_BYTES, Event, What};
pub use header::{Header, TraceError};
pub use log::Log;
pub use read::Trace;
pub use steps::Steps;
pub use summary::Summary;

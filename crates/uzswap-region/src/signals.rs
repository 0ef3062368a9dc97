//! The handler of SIGBUS in a program whose faults are served in-thread
//! ([`crate::Mode::InThread`]) is the pager's. The program's own handler gets the signals that
//! come from outside of regions.
//!
//! A handler that was set before the first pager is kept. A later one must not replace ours: a
//! library that stands before the C library routes `sigaction` and `signal` to [`set_action`],
//! [`set_handler`] and [`set_handler_once`]. All other programs call [`take_back`] after they set
//! one.

pub use uzswap_sys::fault_signals::{set_action, take_back};
#[cfg(target_env = "gnu")]
pub use uzswap_sys::fault_signals::{set_handler, set_handler_once};

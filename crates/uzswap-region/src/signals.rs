//! The handler of SIGBUS in a program whose faults are served in-thread
//! ([`crate::Mode::InThread`]) is the pager's. The program's own handler gets the signals that
//! come from outside of regions.
//!
//! We keep a handler that was set before the first pager. A later handler must not replace ours. So
//! a library that stands before the C library routes `sigaction` and `signal` to [`set_action`],
//! [`set_handler`] and [`set_handler_once`]. A program without such a library calls [`take_back`]
//! after it has set a handler.

pub use uzswap_sys::fault_signals::{set_action, take_back};
#[cfg(target_env = "gnu")]
pub use uzswap_sys::fault_signals::{set_handler, set_handler_once};

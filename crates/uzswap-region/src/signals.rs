//! SIGBUS of a program whose faults are served in-thread ([`crate::Mode::InThread`]): it is the
//! pager's, and the program's own handler gets the signals that are not of a region.
//!
//! A handler that was there before the first pager is kept. One that is set later must not take its
//! place: a library that stands before the C library has `sigaction` and `signal` end in
//! [`set_action`], [`set_handler`] and [`set_handler_once`]. All others call [`take_back`] once one
//! was set.

pub use uzswap_sys::fault_signals::{set_action, take_back};
#[cfg(target_env = "gnu")]
pub use uzswap_sys::fault_signals::{set_handler, set_handler_once};

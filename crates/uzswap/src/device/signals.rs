//! The events that the main thread waits for: signals, the command's end, messages of the keeper.

use crate::device::wire::{Tell, Wire};
use crate::error::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, channel};
use uzswap_sys::callers_signals::CallersSignals;

#[derive(Debug)]
pub enum Event {
    Signal {
        /// Its number.
        signal: i32,
        /// True if the kernel sent the signal for a key of the terminal. Then the whole foreground
        /// group has it.
        from_terminal: bool,
    },
    CommandEnded(ExitStatus),
    /// The keeper sent a message.
    Told(Tell),
    /// The keeper and the daemon are gone.
    Gone,
    /// Another keeper took over, and listens on this wire.
    CameBack(Wire),
}

/// The queue of events.
pub struct Events {
    /// The main thread takes events from this end.
    pub receiver: Receiver<Event>,
    /// Watchers put events into it.
    pub sender: Sender<Event>,
    /// The signals that the command ignores and blocks from its start.
    pub callers: CallersSignals,
}

impl Events {
    /// Catches signals from now on, except those that the caller ignores, as `nohup` does.
    pub fn new() -> Result<Self, Failure> {
        let callers = CallersSignals::read();
        let (sender, receiver) = channel();
        let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
        let caught = all.into_iter().filter(|signal| !callers.is_ignored(*signal));
        let mut signals = SignalsInfo::<WithOrigin>::new(caught)
            .map_err(|error| Failure::new(format!("cannot catch signals: {error}")))?;
        let to = sender.clone();
        std::thread::spawn(move || {
            for origin in signals.forever() {
                let from_terminal = matches!(origin.cause, Cause::Kernel);
                // An error means that the main thread is ending.
                let _ = to.send(Event::Signal { signal: origin.signal, from_terminal });
            }
        });
        Ok(Self { receiver, sender, callers })
    }

    /// Reports the end of the command.
    pub fn watch_command(&self, mut child: Child) {
        let to = self.sender.clone();
        std::thread::spawn(move || {
            if let Ok(status) = child.wait() {
                let _ = to.send(Event::CommandEnded(status));
            }
        });
    }
}

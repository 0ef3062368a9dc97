//! The phases of the daemon from its beginning to its end. **This is the only place** that changes
//! them.
//!
//! The daemon has the memory that outlives it. So while the kernel may ask for a page, the daemon
//! neither ends nor closes anything. It does both only in its last phase, and the kernel's list of
//! areas decides when that phase begins.

use crate::device::phase::Phased;
use crate::device::wire::Order;
use std::io;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The daemon makes the cache, or takes it over.
    Starting,
    /// The daemon answers requests.
    Serving,
    /// The daemon failed to take over another daemon's memory. It keeps that memory and waits for
    /// the order to try again.
    Unable,
    /// No process needs the daemon any more.
    Ending,
}

use Phase::{Ending, Serving, Starting, Unable};

/// The acts that only some phases permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Make a block device.
    MakeDevice,
    /// Forget the devices that have no area.
    Settle,
    /// Report the room of the cache.
    TellRoom,
    /// Execute another program in place of this one. Its first phase begins.
    Become,
    /// Start another keeper, since the daemon's keeper is gone.
    StartKeeper,
    /// Close everything, and end.
    Close,
}

use Act::{Become, Close, MakeDevice, Settle, StartKeeper, TellRoom};

impl Phased for Phase {
    type Act = Act;

    const OWNER: &'static str = "daemon";

    const TRANSITIONS: &'static [(Self, Self, &'static str)] = &[
        (Starting, Serving, "it has made the cache, or taken it over"),
        (Starting, Unable, "it cannot take the cache over"),
        (Starting, Ending, "it cannot make the cache: there are no pages yet"),
        (Serving, Ending, "told to end, and the kernel lists none of its devices"),
        (Unable, Ending, "told to end, and the kernel lists none of its devices"),
    ];

    const PERMITTED: &'static [(Self, &'static [Act])] = &[
        (Starting, &[]),
        (Serving, &[MakeDevice, Settle, TellRoom, Become, StartKeeper]),
        (Unable, &[Become, StartKeeper]),
        (Ending, &[Close]),
    ];
}

/// A message of the keeper, without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// [`Order::End`].
    End,
    /// Another order.
    Order(Act),
    /// The keeper's end.
    Gone,
}

impl Heard {
    /// The kind of a message.
    pub fn of(message: &io::Result<Order>) -> Self {
        match message {
            Ok(Order::Attach(_)) => Self::Order(MakeDevice),
            Ok(Order::Settle(_)) => Self::Order(Settle),
            Ok(Order::TellRoom) => Self::Order(TellRoom),
            Ok(Order::Become(_)) => Self::Order(Become),
            Ok(Order::End) => Self::End,
            Err(_) => Self::Gone,
        }
    }
}

impl Phase {
    /// The phase after the start. `takes_over` if a daemon served before this one.
    pub fn started(&mut self, is_able: bool, takes_over: bool) {
        self.become_next(match (is_able, takes_over) {
            (true, _) => Serving,
            (false, true) => Unable,
            (false, false) => Ending,
        });
    }

    /// The act that a message asks for; `None` if this phase does not permit it. The order to end
    /// begins the last phase, unless the kernel lists one of the daemon's devices, since it may
    /// then ask for any page.
    pub fn hear(&mut self, heard: Heard, is_listed: impl FnOnce() -> bool) -> Option<Act> {
        let act = match heard {
            Heard::End if is_listed() => return None,
            Heard::End => {
                self.become_next(Ending);
                Close
            }
            Heard::Order(act) => act,
            Heard::Gone => StartKeeper,
        };
        self.may(act).then_some(act)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::phase::tests::{all, check_tables};

    #[test]
    fn every_phase_is_reached_comes_to_an_end_and_is_documented() {
        check_tables(Starting, Ending);
    }

    #[test]
    fn a_daemon_closes_nothing_until_the_kernel_lists_none_of_its_devices() {
        for mut phase in [Serving, Unable] {
            assert_eq!(phase.hear(Heard::End, || true), None);
            assert!(phase != Ending && !phase.may(Close));
            assert_eq!(phase.hear(Heard::End, || false), Some(Close));
            assert_eq!(phase, Ending);
        }
        assert!(all::<Phase>().all(|phase| phase.may(Close) == (phase == Ending)));
    }

    /// In an earlier version each of these orders ended the daemon, and its memory was lost.
    #[test]
    fn a_daemon_that_does_not_serve_stays_whatever_it_is_told() {
        let mut phase = Starting;
        phase.started(false, true);
        for order in [MakeDevice, Settle, TellRoom] {
            assert_eq!(phase.hear(Heard::Order(order), || false), None);
            assert_eq!(phase, Unable);
        }
        assert_eq!(phase.hear(Heard::Gone, || false), Some(StartKeeper));
        assert_eq!(phase.hear(Heard::Order(Become), || false), Some(Become));
    }

    #[test]
    #[should_panic(expected = "a daemon that is Serving may not Close")]
    fn a_serving_daemon_does_not_end() {
        Serving.require(Close);
    }
}

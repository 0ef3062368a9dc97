//! `uzswap hold-slots`: the process that takes slots of the areas. The kernel then finds them full.
//!
//! Its pages are to be swapped out, and the kernel refuses that in a process that has locked all of
//! its memory: so this is a process of its own. It waits for the device, so it shares no memory
//! that outlives the daemon (area.rs). It ends with the keeper that has started it, and gives all
//! slots back.

use crate::device::processes::OWN_PROGRAM;
use crate::device::wire::{self, Wire};
use crate::error::Failure;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_sys::ballast::Ballast;
use uzswap_sys::process;

/// Slots that are taken before it is looked again how many are wanted.
const TAKEN_AT_ONCE: u64 = 2 << 20;

/// How long after its start it is started again where it was killed.
const AGAIN: Duration = Duration::from_secs(2);

/// How often it tries again where none could be taken.
const PAUSE: Duration = Duration::from_millis(20);

/// Holds as many as the keeper says.
pub fn hold() -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(format!("hold-slots: {error}"));
    // An error: the system is older than the call, and closed them by exec.
    let _ = process::close_inherited(None);
    // Marked as its parent is, it could not have its pages swapped out.
    let _ = process::set_io_flusher(false);
    let mut wire = Wire::of_stdin().map_err(failed)?;
    let mut ballast = Ballast::new().map_err(failed)?;
    let mut wanted = 0;
    loop {
        let bytes = ballast.bytes();
        // Errors leave the slots as they are, for the next look.
        let is_done = if wanted > bytes {
            ballast.grow((wanted - bytes).min(TAKEN_AT_ONCE)).map_or(true, |more| more == 0)
        } else {
            let _ = ballast.shrink_to(wanted);
            true
        };
        if ballast.bytes() != bytes {
            // An error: the keeper is gone, as the next look shows.
            let _ = wire.send(&ballast.bytes());
        }
        let wait = match (wanted > ballast.bytes(), is_done) {
            (false, _) => None,
            // There was no slot, or the device takes its time.
            (true, true) => Some(PAUSE),
            (true, false) => Some(Duration::ZERO),
        };
        if wire.is_ready(wait).map_err(failed)? {
            match wire.receive_some() {
                Ok(said) => wanted = said.unwrap_or(wanted),
                Err(_) => return Ok(()),
            }
            while let Some(Ok(later)) = wire.said() {
                wanted = later;
            }
        }
    }
}

/// The process, seen by the keeper. It is started when slots are first wanted, and never waited
/// for. Dropped, it ends.
#[derive(Default)]
pub struct Holder {
    process: Option<(Child, Wire)>,
    started: Option<Instant>,
    wanted: u64,
    bytes: u64,
    /// The part of a message that could not be sent without waiting.
    rest: Vec<u8>,
}

impl Holder {
    /// Bytes of slots that it has taken, as far as was heard.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hears how many it has taken.
    pub fn hear(&mut self) {
        let Some((_, wire)) = &mut self.process else { return };
        while wire.is_ready(Some(Duration::ZERO)).unwrap_or(true) {
            match wire.receive_some() {
                Ok(said) => self.bytes = said.unwrap_or(self.bytes),
                Err(_) => return self.end(),
            }
            while let Some(Ok(later)) = wire.said() {
                self.bytes = later;
            }
        }
        self.say();
    }

    /// Has it take so many.
    pub fn set(&mut self, bytes: u64) {
        if self.process.is_none() && !self.start(bytes) || self.wanted == bytes {
            return;
        }
        self.wanted = bytes;
        if self.rest.is_empty()
            && let Ok(line) = wire::line(&bytes)
        {
            self.rest = line;
            self.say();
        }
    }

    /// Starts it, if any are wanted; whether it was.
    fn start(&mut self, bytes: u64) -> bool {
        if bytes == 0 || self.started.is_some_and(|at| at.elapsed() < AGAIN) {
            return false;
        }
        self.started = Some(Instant::now());
        // An error: no memory for a process, most likely; it is tried again.
        let started = Wire::pair().and_then(|(wire, theirs)| {
            let mut command = Command::new(OWN_PROGRAM);
            command.arg0("@uzswap").arg("hold-slots").stdin(theirs);
            Ok((command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?, wire))
        });
        self.process = started.ok();
        (self.wanted, self.bytes) = (0, 0);
        self.process.is_some()
    }

    fn say(&mut self) {
        let Some((_, wire)) = &mut self.process else { return };
        match wire.send_some(&self.rest) {
            Ok(sent) => drop(self.rest.drain(..sent)),
            Err(_) => self.end(),
        }
    }

    fn end(&mut self) {
        if let Some((mut child, wire)) = self.process.take() {
            drop(wire);
            // Errors: it has ended. Its slots are given back as it ends; nobody waits for that.
            let _ = child.kill();
            let _ = child.try_wait();
        }
        (self.wanted, self.bytes) = (0, 0);
        self.rest.clear();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.end();
    }
}

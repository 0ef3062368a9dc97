//! `uzswap hold-slots`: the process that takes slots of the areas, so that the kernel finds them
//! full.
//!
//! The process has its own pages swapped out, and so takes slots. The kernel refuses that in a
//! process that has locked all of its memory, so this process is separate. It waits for the device,
//! so it must not have the memory that outlives the daemon (area.rs). When its keeper ends, the
//! process ends too, and the kernel frees all its slots.

use crate::device::processes::OWN_PROGRAM;
use crate::device::wire::{self, Wire};
use crate::error::Failure;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_sys::ballast::Ballast;
use uzswap_sys::process;

/// Bytes of slots that the process takes before it reads again how many are wanted.
const TAKEN_AT_ONCE: u64 = 2 << 20;

/// A process that was killed is started again this long after its last start.
const AGAIN: Duration = Duration::from_secs(2);

/// The pause between attempts when no slot could be taken.
const PAUSE: Duration = Duration::from_millis(20);

/// Takes as many slots as the keeper orders.
pub fn hold() -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(format!("hold-slots: {error}"));
    // An error means that the kernel lacks the call. exec has closed the descriptors.
    let _ = process::close_inherited(None);
    // With its parent's mark (PR_SET_IO_FLUSHER), this process's pages could not be swapped out.
    let _ = process::set_io_flusher(false);
    let mut wire = Wire::of_stdin().map_err(failed)?;
    let mut ballast = Ballast::new().map_err(failed)?;
    let mut wanted = 0;
    loop {
        let bytes = ballast.bytes();
        // After an error the slots stay as they are until the next look.
        let is_done = if wanted > bytes {
            ballast.grow((wanted - bytes).min(TAKEN_AT_ONCE)).map_or(true, |more| more == 0)
        } else {
            let _ = ballast.shrink_to(wanted);
            true
        };
        if ballast.bytes() != bytes {
            // An error means that the keeper is gone. The next read notices that.
            let _ = wire.send(&ballast.bytes());
        }
        let wait = match (wanted > ballast.bytes(), is_done) {
            (false, _) => None,
            // There was no free slot, or the device is slow.
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

/// The keeper's side of the process. The keeper starts it when slots are first wanted, and never
/// waits for it. Dropping this value ends the process.
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
    /// Bytes of slots that the process has reported.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the number of slots that the process has taken.
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

    /// Orders the process to hold this many bytes of slots.
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

    /// Starts the process, if slots are wanted. Returns true if it runs.
    fn start(&mut self, bytes: u64) -> bool {
        if bytes == 0 || self.started.is_some_and(|at| at.elapsed() < AGAIN) {
            return false;
        }
        self.started = Some(Instant::now());
        // An error most likely means that there is no memory for a process. A later call tries
        // again.
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
            // Fails if the process has ended. The kernel then frees its slots. No process waits for
            // that.
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

//! `serve` and a machine whose memory runs out.
//!
//! With pool and backing full, no more can be swapped out. The kernel then ends a process once it
//! finds nothing to reclaim. That may never happen: the kernel can drop programs' files and read
//! them again without end. So a thread watches how long all processes stand still for want of
//! memory (PSI). When they stand still most of the time, and no page can be stored, the thread has
//! the kernel end a process (SysRq f). The kernel makes its usual choice.
//!
//! The thread has opened and touched ahead all that it uses. The thread runs in real time, so that
//! it gets a CPU and may use a part of the kernel's reserve.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
use uzswap_block::Room;
use uzswap_sys::cpu::MemoryInfo;
use uzswap_sys::{pressure, process};

const MEMORY: &str = "/proc/meminfo";
const TRIGGER: &str = "/proc/sysrq-trigger";

/// "End a process for want of memory" (Documentation/admin-guide/sysrq.rst).
const END_ONE: &[u8] = b"f";

/// The interval of the checks.
const PAUSE: Duration = Duration::from_millis(250);

/// The time on which a decision is based, and the share of it in which all processes must stand
/// still.
const WINDOW: Duration = Duration::from_secs(5);
const STILL_PERCENT: u32 = 50;

/// Memory is short when less than this share of it is available.
const SHORT_DIVISOR: u64 = 10;

/// A keeper whose last look is older than this is itself waiting for memory.
const LATE: Duration = Duration::from_secs(2);

/// The interval at which the keeper checks for refused writes.
const REFUSED_PAUSE: Duration = Duration::from_millis(500);

/// The state that the keeper and the thread share.
struct ShortageState {
    began: Instant,
    /// When the keeper last looked at the cache, milliseconds after `began`.
    looked: AtomicU64,
    /// True if the cache is full, or has refused a page.
    refuses: AtomicBool,
    /// Processes that the kernel was asked to end.
    ended: AtomicU64,
}

/// The keeper's side. The thread ends with the process.
pub struct Shortage {
    shared: Arc<ShortageState>,
    /// Refused writes at the last check, and its time.
    refused: u64,
    refused_at: Instant,
    /// The part of `ended` that was reported.
    told: u64,
}

impl Shortage {
    /// Starts the thread. Fails on a kernel without PSI, and in a container that may not use SysRq.
    pub fn start() -> io::Result<Self> {
        let named =
            |path: &str, error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
        let open = |path| File::open(path).map_err(|error| named(path, error));
        let trigger = File::options().write(true).open(TRIGGER);
        let trigger = trigger.map_err(|error| named(TRIGGER, error))?;
        let mut watch = ShortageWatch {
            pressure: open(pressure::MACHINE)?,
            memory: open(MEMORY)?,
            trigger,
            judge: Judge::default(),
        };
        // The file may exist and not be readable: PSI can be switched off at boot.
        watch.look(true).map_err(|error| named(pressure::MACHINE, error))?;
        let began = Instant::now();
        let shared = Arc::new(ShortageState {
            began,
            looked: AtomicU64::new(0),
            refuses: AtomicBool::new(false),
            ended: AtomicU64::new(0),
        });
        let of_thread = shared.clone();
        thread::Builder::new().name("uzswap-shortage".into()).spawn(move || {
            // After an error the thread still works, when it gets a CPU.
            let _ = process::run_in_real_time();
            let _ = process::lock_memory();
            watch.keep(&of_thread);
        })?;
        Ok(Self { shared, refused: 0, refused_at: began, told: 0 })
    }

    /// Called by the keeper when the daemon has reported how much more the cache can take. Returns
    /// the number of processes ended since the last call.
    pub fn looked(&mut self, is_full: bool, room: Room) -> u64 {
        let now = Instant::now();
        if now - self.refused_at > REFUSED_PAUSE {
            self.shared.refuses.store(is_full || room.errors > self.refused, Relaxed);
            (self.refused, self.refused_at) = (room.errors, now);
        }
        let looked = now.duration_since(self.shared.began).as_millis() as u64;
        self.shared.looked.store(looked, Relaxed);
        let ended = self.shared.ended.load(Relaxed);
        ended - std::mem::replace(&mut self.told, ended)
    }
}

/// The thread's side.
struct ShortageWatch {
    pressure: File,
    memory: File,
    trigger: File,
    judge: Judge,
}

impl ShortageWatch {
    fn keep(&mut self, shared: &ShortageState) {
        loop {
            thread::sleep(PAUSE);
            let looked = shared.began + Duration::from_millis(shared.looked.load(Relaxed));
            let refuses = shared.refuses.load(Relaxed) || looked.elapsed() > LATE;
            // If the check fails, the next check tries again. If this write fails, the write of the
            // next window decides.
            if self.look(refuses).is_ok_and(|is_time| is_time)
                && self.trigger.write_at(END_ONE, 0).is_ok()
            {
                shared.ended.fetch_add(1, Relaxed);
            }
        }
    }

    /// True if a process is to be ended now. `refuses` if no page can be stored.
    fn look(&mut self, refuses: bool) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        let info = MemoryInfo::parse(read(&self.memory, &mut buffer)?);
        let is_short = refuses && info.available < info.total / SHORT_DIVISOR;
        let still = stood_still(read(&self.pressure, &mut buffer)?);
        let still = still.ok_or(io::ErrorKind::InvalidData)?;
        Ok(self.judge.judge(Instant::now(), still, is_short))
    }
}

fn read<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let bytes = file.read_at(buffer, 0)?;
    std::str::from_utf8(&buffer[..bytes]).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The time for which all processes with work stood still, since boot: `full avg10=0.00 avg60=0.00
/// avg300=0.00 total=1234`, in microseconds.
fn stood_still(text: &str) -> Option<Duration> {
    let line = text.lines().find(|line| line.starts_with("full "))?;
    let total = line.rsplit_once("total=")?.1;
    Some(Duration::from_micros(total.trim().parse().ok()?))
}

/// Decides by comparing figures of several checks.
#[derive(Default)]
struct Judge {
    /// The start of the window, and the time stood still until then. A window begins when memory
    /// becomes short, and after each request.
    since: Option<(Instant, Duration)>,
}

impl Judge {
    fn judge(&mut self, now: Instant, still: Duration, is_short: bool) -> bool {
        if !is_short {
            self.since = None;
            return false;
        }
        let (began, before) = *self.since.get_or_insert((now, still));
        let window = now - began;
        if window < WINDOW {
            return false;
        }
        self.since = Some((now, still));
        still.saturating_sub(before) * 100 >= window * STILL_PERCENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_all_stood_still_is_read() {
        let text = "some avg10=1.00 avg60=0.50 avg300=0.10 total=900\n\
                    full avg10=0.50 avg60=0.20 avg300=0.05 total=700\n";
        assert_eq!(stood_still(text), Some(Duration::from_micros(700)));
        assert_eq!(stood_still("some avg10=0.00 total=1\n"), None);
    }

    #[test]
    fn a_process_is_ended_when_all_stand_still_for_most_of_the_window_and_not_before() {
        let (mut judge, begin) = (Judge::default(), Instant::now());
        let mut at = |seconds: u64, still: u64, is_short| {
            let now = begin + Duration::from_secs(seconds);
            judge.judge(now, Duration::from_secs(still), is_short)
        };
        assert!(!at(0, 100, true));
        assert!(!at(4, 104, true), "too early");
        assert!(at(5, 103, true));
        assert!(!at(6, 104, true), "that one needs time to go");
        assert!(!at(10, 105, true), "most of the time something ran");
        assert!(!at(14, 109, false));
        assert!(!at(15, 110, true), "it begins anew");
        assert!(at(20, 115, true));
    }
}

//! The transport over ublk: a device for each part of the disk, and a thread for each device.
//!
//! A fault waits for two wake-ups: the device's thread, and the faulting task. While the thread
//! polls, the first wake-up is saved. The thread answers and sleeps in one system call. The
//! [`crew`](crate::crew) does the long work. Each device has its own buffers, made and faulted in
//! with it.
//!
//! A device whose server was killed stays, since the kernel may be swapping to it, and its requests
//! wait. The next server takes the device over, and gets the requests that were taken and not
//! answered. These requests may have been served. Serving them again changes nothing, since the
//! kernel sends no other request for a page before it has the answer. If no stored page outlives
//! the server, [`stand_in`] answers with errors until the device is switched off.

use crate::config::{STACK_BYTES, ServerConfig};
use crate::crew::{Crew, Desk, TAGS_MAX};
use crate::device::AttachError;
use crate::disk::{Disk, DiskError};
use crate::poll::Poll;
use crate::team::Team;
use crate::traffic::Traffic;
use crate::transport::{Offer, Transport, TransportKind};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use uzswap_engine::{CpuState, PAGE_BYTES};
use uzswap_sys::swap;
use uzswap_sys::ublk::{self, Control, Handover, Io, Queue, QueueEvent, Shape};

/// The number of requests of one device under way: a fault of each of many jobs, and writes
/// besides. The buffers take 4 MiB of locked memory (32 × 128 KiB).
const DEPTH: u16 = 32;
const _: () = assert!(DEPTH as usize <= TAGS_MAX);

/// Longest read or write: the 32 pages that the kernel reclaims at a time.
const IO_BYTES_MAX: u32 = 128 << 10;

/// Longest discard: half a million pages, some 10 ms of work of the crew.
const DISCARD_BYTES_MAX: u64 = 2 << 30;

/// Pages of a read that the device's thread serves itself: a fault with neighbours.
const SHORT_PAGES: usize = 8;

/// Size of the device that is made for a trial.
const TRIAL_BYTES: u64 = 16 * PAGE_BYTES as u64;

/// The interval at which the kernel checks if a server is dead (6.1).
const LOOKS: Duration = Duration::from_secs(5);

/// The timeout of requests if the kernel's setting cannot be read: the kernel's default.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The interval at which to ask if the kernel has noticed a server's death. Later kernels notice
/// when the process ends.
const RETRY: Duration = Duration::from_millis(2);

/// The devices, and the threads that serve them.
pub(crate) struct Devices {
    control: Control,
    team: Arc<Team<Crew>>,
    config: ServerConfig,
    /// True if another server can take the devices over when this process is killed.
    outlived: bool,
    devices: Vec<UblkDevice>,
}

/// A device that we serve.
struct UblkDevice {
    id: u32,
    thread: Option<JoinHandle<()>>,
}

impl Devices {
    /// Starts the threads, and tries to make a device. `before` has the devices of the last server,
    /// which are served from now on; `None` if no server can take over from another.
    pub(crate) fn start(
        disk: Arc<dyn Disk>,
        traffic: Arc<Traffic>,
        config: ServerConfig,
        before: Option<Vec<PathBuf>>,
    ) -> io::Result<Self> {
        let mut devices = Self::without_devices(disk, traffic, config)?;
        devices.outlived = before.is_some();
        let before = before.unwrap_or_default();
        devices.remove_left(&before);
        before.iter().try_for_each(|path| devices.adopt(path))?;
        if before.is_empty() {
            let trial = devices.make(0..TRIAL_BYTES)?;
            devices.remove(trial);
        }
        Ok(devices)
    }

    fn without_devices(
        disk: Arc<dyn Disk>,
        traffic: Arc<Traffic>,
        config: ServerConfig,
    ) -> io::Result<Self> {
        let crew = Arc::new(Crew::new(disk, traffic, config));
        let control = Control::open()?;
        let team = Team::start(crew, &config)?;
        Ok(Self { control, team, config, outlived: false, devices: Vec::new() })
    }

    /// Makes a device over a part of the disk and starts it.
    fn make(&mut self, part: Range<u64>) -> io::Result<UblkDevice> {
        let shape = Shape {
            start: part.start,
            bytes: part.end - part.start,
            outlives_server: self.outlived,
            depth: DEPTH,
            io_bytes_max: IO_BYTES_MAX,
            discard_bytes_max: DISCARD_BYTES_MAX,
        };
        let id = self.control.add(&shape)?;
        let queue = self.control.queue(id, DEPTH, IO_BYTES_MAX);
        let made = queue.and_then(|queue| self.serve(id, part.start, queue, None));
        made.inspect_err(|_| {
            // The first error is returned.
            let _ = self.control.delete(id);
        })
    }

    /// Serves a device without a server. With `handover`, the device had a server before.
    fn serve(
        &mut self,
        id: u32,
        start: u64,
        queue: Queue,
        handover: Option<Handover>,
    ) -> io::Result<UblkDevice> {
        let depth = queue.depth();
        self.team.work.make_room(depth, queue.io_bytes_max());
        let desk = Arc::new(Desk::new(start, depth, queue.bell()));
        let number = self.devices.len();
        let server = UblkServer {
            number: number % self.config.threads,
            queue,
            desk,
            crew: self.team.work.clone(),
            poll: Poll::new(self.config.poll),
        };
        let (config, (tell, told)) = (self.config, channel());
        let thread = Builder::new().name(format!("uzswap-disk-{number}"));
        let thread = thread.stack_size(STACK_BYTES).spawn(move || {
            config.prepare_thread();
            server.run(move |outcome| drop(tell.send(outcome)));
        })?;
        let device = UblkDevice { id, thread: Some(thread) };
        let is_recovered = handover.is_some();
        let started = fetched(&told).and_then(|()| match handover {
            Some(handover) => handover.wait(),
            None => self.control.start(id),
        });
        if let Err(error) = started {
            // A device that the kernel swaps to stays as it is, for the next server to try.
            if !(is_recovered && self.outlived) {
                // An error means that the device was not started. That ends its thread as well.
                let _ = self.control.stop(id);
                device.join();
            }
            return Err(error);
        }
        Ok(device)
    }

    /// Serves a device whose server died, unless the device is gone or another's by now.
    fn adopt(&mut self, path: &Path) -> io::Result<()> {
        let id = ublk::id(path).ok_or(io::ErrorKind::InvalidInput)?;
        let found = match self.control.find(id) {
            Err(error) if is_gone(&error) => return Ok(()),
            other => other?,
        };
        if !found.is_ours || self.devices.iter().any(|device| device.id == id) {
            return Ok(());
        }
        let (began, patience) = (Instant::now(), patience(id));
        let (queue, handover) = loop {
            match self.control.take_over(id, &found) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    if began.elapsed() > patience {
                        return Err(error);
                    }
                    std::thread::sleep(RETRY);
                }
                other => break other?,
            }
        };
        let device = self.serve(id, found.start, queue, Some(handover))?;
        self.devices.push(device);
        Ok(())
    }

    /// Removes devices that a killed server was making: they are not among the `known`, no server
    /// serves them, and no area can be on them.
    fn remove_left(&mut self, known: &[PathBuf]) {
        // If the list cannot be read, each device may be an area.
        let Ok(areas) = swap::areas() else { return };
        let is_used = |path: &PathBuf| areas.iter().any(|area| area.path == *path);
        for id in ublk::all() {
            let path = ublk::path(id);
            let is_left = self.control.find(id).is_ok_and(|one| one.is_ours && !one.is_live);
            if is_left && !known.contains(&path) && !is_used(&path) {
                // After an error the next server tries again.
                let _ = self.control.stop(id);
                let _ = self.control.delete(id);
            }
        }
    }

    /// Removes a device, unless another process has done so. Then its thread has ended, and another
    /// device may have its number.
    fn remove(&mut self, device: UblkDevice) {
        if device.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            // The call fails if the device is gone already.
            let _ = self.control.stop(device.id);
            let id = device.id;
            device.join();
            let _ = self.control.delete(id);
        }
    }
}

impl UblkDevice {
    fn join(mut self) {
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Waits until a device's thread has fetched requests.
fn fetched(told: &Receiver<io::Result<()>>) -> io::Result<()> {
    told.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")))
}

impl Transport for Devices {
    fn kind(&self) -> TransportKind {
        TransportKind::Ublk
    }

    fn attach(&mut self, part: Range<u64>) -> Result<Offer, AttachError> {
        let device = self.make(part).map_err(AttachError::Ublk)?;
        let path = ublk::path(device.id);
        self.devices.push(device);
        Ok(Offer::Device(path))
    }

    fn release_unused(&mut self) {
        let Ok(areas) = swap::areas() else { return };
        let is_used =
            |device: &UblkDevice| areas.iter().any(|area| area.path == ublk::path(device.id));
        let (used, unused) = std::mem::take(&mut self.devices).into_iter().partition(is_used);
        self.devices = used;
        let unused: Vec<UblkDevice> = unused;
        unused.into_iter().for_each(|device| self.remove(device));
    }

    fn cpu_state(&self) -> CpuState {
        self.team.cpu_state()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        if self.outlived {
            // A device that the kernel swaps to is left for the next server, since this process is
            // ending.
            self.release_unused();
            self.devices.clear();
        }
        for device in std::mem::take(&mut self.devices) {
            self.remove(device);
        }
        self.team.work.close();
    }
}

/// The state of a device's thread.
struct UblkServer {
    number: usize,
    queue: Queue,
    desk: Arc<Desk>,
    crew: Arc<Crew>,
    poll: Poll,
}

impl UblkServer {
    /// Serves until the device is stopped. Calls `tell` with the outcome of the start.
    fn run(mut self, tell: impl FnOnce(io::Result<()>)) {
        let begun = self.queue.fetch();
        let has_begun = begun.is_ok();
        tell(begun);
        if !has_begun {
            return;
        }
        while !self.queue.has_ended() {
            // The last event has no request, only the end of the queue.
            if self.look() || self.queue.has_ended() {
                self.poll.begin();
                continue;
            }
            // A thread that continues to poll sends its answers now. A thread that is about to
            // sleep sends them with the call in which it waits.
            if self.poll.is_patient() {
                self.queue.submit();
            }
            if !self.poll.again() {
                let Self { desk, queue, .. } = &mut self;
                desk.sleep(|| queue.wait());
            }
        }
    }

    /// Serves the requests that have arrived. True if there were requests.
    fn look(&mut self) -> bool {
        let mut is_busy = false;
        while let Some(event) = self.queue.take() {
            is_busy = true;
            if let QueueEvent::Request(io) = event {
                self.take(io);
            }
        }
        let Self { desk, queue, .. } = self;
        desk.collect(|io, errno| {
            is_busy = true;
            answer(queue, io, errno);
        });
        is_busy
    }

    fn take(&mut self, mut io: Io) {
        let disk = self.crew.disk();
        if self.desk.takes_long(&io, disk, SHORT_PAGES) {
            self.crew.take(&self.desk, io);
        } else {
            let errno = self.desk.serve(&mut io, disk, self.crew.counts(self.number));
            answer(&mut self.queue, io, errno);
        }
    }
}

fn answer(queue: &mut Queue, io: Io, errno: i32) {
    let bytes = i32::try_from(io.bytes).unwrap_or(i32::MAX);
    queue.commit(io, if errno == 0 { bytes } else { -errno });
}

/// The longest time until the kernel notices that a device's server is dead. The kernel notices at
/// a check, or when requests are one to two timeouts old. On a busy machine this may take twice as
/// long.
fn patience(id: u32) -> Duration {
    2 * (LOOKS + 2 * ublk::timeout(id).unwrap_or(TIMEOUT))
}

/// True if there is no such device any more.
fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}

/// Removes a device whose process is gone. A device that is gone is no error.
pub(crate) fn detach(path: &Path) -> io::Result<()> {
    let id = ublk::id(path).ok_or(io::ErrorKind::InvalidInput)?;
    let mut control = Control::open()?;
    for done in [control.stop(id), control.delete(id)] {
        match done {
            Err(error) if is_gone(&error) => {}
            other => other?,
        }
    }
    Ok(())
}

/// True if we made the device. The answer is cached, since callers ask many times a second. The key
/// is the inode number of its folder in sysfs, which no other device gets.
pub(crate) fn is_ours(path: &Path) -> bool {
    static KNOWN: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());
    let Some(id) = ublk::id(path) else { return false };
    let folder = std::fs::metadata(format!("/sys/block/ublkb{id}")).map_or(0, |found| found.ino());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if folder != 0 && known.get(&id) == Some(&folder) {
        return true;
    }
    let is_ours =
        Control::open().and_then(|mut control| control.find(id)).is_ok_and(|found| found.is_ours);
    if is_ours {
        known.insert(id, folder);
    }
    is_ours
}

/// A disk whose pages are all lost.
struct Lost;

impl Disk for Lost {
    fn bytes(&self) -> u64 {
        u64::MAX
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DiskError> {
        Err(DiskError::Lost)
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), DiskError> {
        Err(DiskError::Lost)
    }

    fn discard(&self, _: u64, _: u64) -> Result<(), DiskError> {
        Ok(())
    }

    fn is_slow(&self, _: u64) -> bool {
        false
    }
}

/// Answers requests with errors, for devices whose server was killed. The devices go when this
/// value is dropped.
pub(crate) fn stand_in(paths: &[PathBuf]) -> io::Result<Devices> {
    let config = ServerConfig {
        threads: 1,
        threads_per_cpu: 0,
        poll: Duration::ZERO,
        raise_priority: false,
    };
    let traffic = Arc::new(Traffic::new(config.threads));
    let mut devices = Devices::without_devices(Arc::new(Lost), traffic, config)?;
    paths.iter().try_for_each(|path| devices.adopt(path))?;
    Ok(devices)
}

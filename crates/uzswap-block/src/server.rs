//! The threads that answer the kernel.
//!
//! A fault waits for three wake-ups: the loop device's worker, one of these threads, and the
//! faulting task. Ours is the one that can be saved. Of the threads that *watch* the queue, the
//! last to find it empty polls for a while before it sleeps; the others park, so that no request
//! wakes a thread only for it to find the request gone. Measured on two idle virtual CPUs, p50 of a
//! random fault with memory behind the device: 48 µs with two threads that sleep, 43 µs with two
//! that poll, 24 µs with one that polls.
//!
//! A thread watches while it serves what takes microseconds. Before anything longer — several
//! pages, or a page on the backing — it makes sure that another one watches. A thread that never
//! finds the queue empty calls for help as well.

use crate::disk::{Disk, DiskError};
use crate::protocol::{Ask, Reply, Request, WRITE_OVERHEAD};
use crate::traffic::Traffic;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::backing::Buffer;
use uzswap_engine::compress::prepare_thread;
use uzswap_sys::{fuse, process};

/// How the device is served.
#[derive(Debug, Clone, Copy)]
pub struct ServerConfig {
    /// Threads. More than CPUs, since some may wait for the backing.
    pub threads: usize,
    /// How long the last watcher polls after a request before it sleeps.
    pub poll: Duration,
    /// Whether threads run before ordinary ones of the machine.
    pub raise_priority: bool,
}

impl ServerConfig {
    /// What measures best: see the module.
    pub fn for_cpus(cpus: usize) -> Self {
        Self { threads: 6 + 2 * cpus, poll: Duration::from_micros(100), raise_priority: true }
    }
}

/// Longest request, bytes of data: the kernel writes a swap cluster of 64 pages at most at a time
/// into one bio chain that a loop device splits here.
const REQUEST_BYTES_MAX: usize = 256 << 10;

/// Pages that a thread serves while it watches; more take longer than a wake-up.
const SHORT_PAGES: usize = 4;

/// Requests in a row without finding the queue empty, after which a watcher calls for another.
const BUSY_STREAK: u32 = 8;

/// Stack of a thread, bytes: the deepest path reads a record through a bounce buffer.
const STACK_BYTES: usize = 256 << 10;

/// Which threads watch the queue.
struct Watch {
    /// Those that do. At least one, unless all threads are at long work.
    watchers: AtomicUsize,
    /// Watchers that are worth having: no more than CPUs.
    watchers_max: usize,
    parked: Mutex<Parked>,
    call: Condvar,
}

#[derive(Default)]
struct Parked {
    threads: usize,
    /// Threads called that have not left yet.
    called: usize,
    closed: bool,
}

impl Watch {
    fn parked(&self) -> std::sync::MutexGuard<'_, Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Parks the caller, a watcher, unless it is the last; `true` when it was called back.
    fn park(&self) -> bool {
        if self.watchers.load(Relaxed) <= 1 {
            return false;
        }
        let mut parked = self.parked();
        let less = |watchers: usize| (watchers > 1 && !parked.closed).then(|| watchers - 1);
        if self.watchers.fetch_update(SeqCst, SeqCst, less).is_err() {
            return false;
        }
        parked.threads += 1;
        while parked.called == 0 && !parked.closed {
            parked = self.call.wait(parked).unwrap_or_else(PoisonError::into_inner);
        }
        parked.called = parked.called.saturating_sub(1);
        parked.threads -= 1;
        true
    }

    /// Makes a parked thread a watcher, if there is one.
    fn call(&self) {
        let mut parked = self.parked();
        if parked.threads > parked.called {
            parked.called += 1;
            self.watchers.fetch_add(1, SeqCst);
            self.call.notify_one();
        }
    }

    /// The caller stops watching for a while; another takes over if it was the last.
    fn leave(&self) {
        if self.watchers.fetch_sub(1, SeqCst) == 1 {
            self.call();
        }
    }

    fn come_back(&self) {
        self.watchers.fetch_add(1, SeqCst);
    }

    fn close(&self) {
        self.parked().closed = true;
        self.call.notify_all();
    }
}

/// What the server's threads share.
pub(crate) struct Shared {
    disk: Arc<dyn Disk>,
    watch: Watch,
    config: ServerConfig,
    traffic: Arc<Traffic>,
}

/// A FUSE file in service. Dropped, it is unmounted and its threads end.
pub struct Server {
    shared: Arc<Shared>,
    path: std::path::PathBuf,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Mounts `disk` over the file at `path` and starts the threads, which count in `traffic`, made
    /// for as many of them.
    pub fn start(
        disk: Arc<dyn Disk>,
        traffic: Arc<Traffic>,
        path: &Path,
        config: ServerConfig,
    ) -> io::Result<Self> {
        let connection = fuse::open()?;
        fuse::mount_file(&connection, path)?;
        let shared = Arc::new(Shared {
            disk,
            watch: Watch {
                watchers: AtomicUsize::new(1),
                watchers_max: uzswap_sys::cpu::allowed(),
                parked: Mutex::default(),
                call: Condvar::new(),
            },
            config,
            traffic,
        });
        let mut server = Self { shared, path: path.to_owned(), threads: Vec::new() };
        server.greet(&connection)?;
        let clones = (1..config.threads).map(|_| fuse::clone(&connection));
        let clones = clones.collect::<io::Result<Vec<_>>>()?;
        for (number, connection) in std::iter::once(connection).chain(clones).enumerate() {
            let shared = server.shared.clone();
            let worker = Worker::new(number, connection, shared)?;
            let thread = std::thread::Builder::new().name(format!("uzswap-{number}"));
            server.threads.push(thread.stack_size(STACK_BYTES).spawn(move || worker.run())?);
        }
        Ok(server)
    }

    /// Answers the kernel's first request, before which it takes no clone.
    fn greet(&self, connection: &OwnedFd) -> io::Result<()> {
        let mut buffer = vec![0; 16 << 10];
        let bytes = rustix::io::read(connection, &mut buffer)?;
        let unexpected = || io::Error::other("the kernel's first FUSE request is not INIT");
        let request = Request::parse(&buffer[..bytes]).ok_or_else(unexpected)?;
        let Ask::Init { minor, flags } = request.ask else { return Err(unexpected()) };
        let mut reply = Reply::init(request.unique, minor, flags, REQUEST_BYTES_MAX);
        rustix::io::write(connection, reply.finish(0))?;
        Ok(())
    }

    /// What has been served so far.
    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.shared.traffic
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The connection ends with the mount, and with it the threads. An error: it is not mounted
        // any more.
        let _ = fuse::unmount(&self.path);
        self.shared.watch.close();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// One thread's part.
struct Worker {
    number: usize,
    connection: OwnedFd,
    shared: Arc<Shared>,
    buffer: Buffer,
    /// Requests in a row that were there at the first look.
    streak: u32,
}

/// What came of waiting for a request.
enum Received {
    Bytes(usize),
    Gone,
}

impl Worker {
    fn new(number: usize, connection: OwnedFd, shared: Arc<Shared>) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&connection)?;
        rustix::fs::fcntl_setfl(&connection, flags | OFlags::NONBLOCK)?;
        let buffer = Buffer::new(REQUEST_BYTES_MAX + WRITE_OVERHEAD)?;
        Ok(Self { number, connection, shared, buffer, streak: 0 })
    }

    fn run(mut self) {
        if self.shared.config.raise_priority {
            // Not permitted in a container without CAP_SYS_NICE: slower under load, no worse.
            let _ = process::raise_priority();
        }
        prepare_thread();
        if self.number > 0 {
            // The first watches from the start; the others wait to be called.
            self.shared.watch.come_back();
            self.shared.watch.park();
        }
        while let Received::Bytes(bytes) = self.receive() {
            let began = Instant::now();
            let Some(request) = Request::parse(&self.buffer[..bytes]) else {
                continue; // The kernel does not send such; it could not be answered either.
            };
            if request.ask == Ask::Destroy {
                break;
            }
            let long = self.takes_long(&request.ask);
            if long {
                self.shared.watch.leave();
            }
            self.serve(&request, began);
            if long {
                self.shared.watch.come_back();
            }
        }
        // The device is gone for all of them.
        self.shared.watch.close();
    }

    /// Takes the next request, polling, parking or sleeping meanwhile.
    fn receive(&mut self) -> Received {
        let mut waited = false;
        let mut last = Instant::now();
        loop {
            match rustix::io::read(&self.connection, &mut self.buffer[..]) {
                Ok(bytes) => {
                    self.call_if_busy(waited);
                    return Received::Bytes(bytes);
                }
                Err(Errno::AGAIN) => {}
                // Interrupted, or the request was aborted before we took it.
                Err(Errno::INTR | Errno::NOENT) => continue,
                Err(_) => return Received::Gone,
            }
            waited = true;
            if self.shared.watch.park() {
                last = Instant::now();
            } else if last.elapsed() < self.shared.config.poll {
                std::hint::spin_loop();
            } else {
                let mut wait = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::IN)];
                // Any error shows in the read that follows.
                let _ = rustix::event::poll(&mut wait, None);
            }
        }
    }

    /// Calls for another watcher when this one keeps finding requests without waiting.
    fn call_if_busy(&mut self, waited: bool) {
        self.streak = if waited { 0 } else { self.streak + 1 };
        let watch = &self.shared.watch;
        if self.streak >= BUSY_STREAK && watch.watchers.load(Relaxed) < watch.watchers_max {
            self.streak = 0;
            watch.call();
        }
    }

    fn takes_long(&self, ask: &Ask) -> bool {
        match ask {
            Ask::Read { offset, bytes } => {
                let pages = bytes / PAGE_BYTES;
                pages > SHORT_PAGES
                    || (0..pages as u64)
                        .any(|page| self.shared.disk.is_slow(offset + page * PAGE_BYTES as u64))
            }
            Ask::Write { .. } | Ask::Discard { .. } => true,
            _ => false,
        }
    }

    fn serve(&mut self, request: &Request, began: Instant) {
        let unique = request.unique;
        let disk = &*self.shared.disk;
        let traffic = self.shared.traffic.thread(self.number);
        let outcome = match request.ask {
            Ask::Read { offset, bytes } => {
                let bytes = bytes.min(REQUEST_BYTES_MAX);
                let read = disk.read(offset, &mut self.buffer[..bytes]);
                self.answer(unique, read.map(|()| (Reply::ok(unique), bytes)));
                traffic.read(bytes, began.elapsed());
                return;
            }
            Ask::Write { offset, bytes } => {
                traffic.written(bytes);
                let data = &self.buffer[WRITE_OVERHEAD..WRITE_OVERHEAD + bytes];
                disk.write(offset, data).map(|()| Reply::written(unique, bytes))
            }
            Ask::Discard { offset, bytes } => {
                traffic.discarded(bytes);
                disk.discard(offset, bytes).map(|()| Reply::ok(unique))
            }
            Ask::GetAttributes => Ok(Reply::attributes(unique, disk.bytes())),
            Ask::Open => Ok(Reply::opened(unique)),
            Ask::Nothing => Ok(Reply::ok(unique)),
            Ask::Silent | Ask::Destroy => return,
            Ask::Init { .. } | Ask::Unknown => Ok(Reply::error(unique, libc::ENOSYS)),
        };
        self.answer(unique, outcome.map(|reply| (reply, 0)));
    }

    /// Sends a reply, with `data` bytes of the buffer, or the failure.
    fn answer(&self, unique: u64, outcome: Result<(Reply, usize), DiskError>) {
        let (mut reply, data) = outcome.unwrap_or_else(|error| {
            self.shared.traffic.thread(self.number).failed();
            (Reply::error(unique, errno(error)), 0)
        });
        let parts = [IoSlice::new(reply.finish(data)), IoSlice::new(&self.buffer[..data])];
        // An error: the requester was killed, or the device is gone, which the next read shows.
        let _ = rustix::io::writev(&self.connection, &parts[..if data > 0 { 2 } else { 1 }]);
    }
}

fn errno(error: DiskError) -> i32 {
    match error {
        DiskError::Range => libc::EINVAL,
        DiskError::Full => libc::ENOSPC,
        DiskError::Lost => libc::EIO,
    }
}

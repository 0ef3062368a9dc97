//! The threads that answer the kernel.
//!
//! A fault waits for three wake-ups: the loop device's worker, one of these threads, and the
//! faulting task. Only the wake-up of our thread can be saved. Some threads *watch* the queue. When
//! they find it empty, the last of them polls for a while before it sleeps, and the others park. So
//! no request wakes a thread that then finds the request gone. Measured on two idle virtual CPUs,
//! with memory behind the device: p50 of a random fault is 48 µs with two threads that sleep. With
//! two polling threads it is 43 µs, and with one 24 µs. A polling thread yields its CPU after each
//! check, because the loop device's worker may be waiting for that CPU. (p90 of a fault is 42 µs,
//! and 76 with a spin; a build with 12 jobs takes 5 s instead of 7.)
//!
//! A thread watches while it serves requests of microseconds. Before longer work — several pages,
//! or a page on the backing — it makes sure that another thread watches. A thread that never finds
//! the queue empty calls for another watcher as well. Parked threads help with large writes.

use crate::batch::{BATCH_PAGES_MIN, Batch};
use crate::config::ServerConfig;
use crate::disk::{Disk, DiskError};
use crate::kept::{KeptServer, RequestBuffer};
use crate::poll::Poll;
use crate::protocol::{Ask, Reply, Request, WRITE_OVERHEAD};
use crate::request;
use crate::team::{Team, Work};
use crate::traffic::Traffic;
use crate::watch::{Parking, Watch};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::{Arc, Once, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Instant;
use uzswap_engine::{CpuState, PAGE_BYTES};
use uzswap_sys::fuse;

/// Longest request, bytes of data. The kernel writes a swap cluster of at most 64 pages into one
/// bio chain at a time, which a loop device splits here.
const REQUEST_BYTES_MAX: usize = 256 << 10;

/// The offset of a read's data: behind the request, which stays until it is answered.
const DATA_AT: usize = PAGE_BYTES;

const BUFFER_BYTES: usize = DATA_AT + REQUEST_BYTES_MAX;

const _: () = assert!(WRITE_OVERHEAD <= DATA_AT);

/// Pages that a watching thread serves itself: more take longer than a wake-up.
const SHORT_PAGES: usize = 4;

/// After this many requests without an empty queue, a watcher calls another thread.
const BUSY_STREAK: u32 = 8;

/// The state that the server's threads share.
pub(crate) struct ServerState {
    disk: Arc<dyn Disk>,
    watch: Watch,
    config: ServerConfig,
    traffic: Arc<Traffic>,
    /// A connection and a desk for each thread.
    connections: Box<[OwnedFd]>,
    desks: Box<[Desk]>,
}

/// The place of a thread's work. Other threads come to it only to help with its batch.
struct Desk {
    /// The request, and the data of the reply.
    buffer: RwLock<RequestBuffer>,
    batch: Batch,
    /// Requests that the last process left here are answered before a thread takes a request here.
    answered_left: Once,
}

impl Desk {
    fn new(buffer: RequestBuffer) -> Self {
        Self { buffer: RwLock::new(buffer), batch: Batch::default(), answered_left: Once::new() }
    }

    fn buffer(&self) -> RwLockWriteGuard<'_, RequestBuffer> {
        self.buffer.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerState {
    /// Takes part in the batch of thread `number`.
    fn work(&self, number: usize) {
        let desk = &self.desks[number];
        let buffer = desk.buffer.read().unwrap_or_else(PoisonError::into_inner);
        desk.batch.work(&*self.disk, &buffer.bytes()[WRITE_OVERHEAD..]);
    }
}

/// A FUSE file in service. Dropping the server unmounts the file and ends the server's threads.
pub struct Server {
    team: Arc<Team<ServerState>>,
    path: std::path::PathBuf,
}

impl Server {
    /// Mounts `disk` over the file at `path` and starts the threads that always exist. With the
    /// threads for CPUs, there are as many threads as connections. `traffic` must have counts for
    /// all of them. If a former server used the connections, the file stays mounted and this server
    /// continues.
    pub fn start(
        disk: Arc<dyn Disk>,
        traffic: Arc<Traffic>,
        path: &Path,
        config: ServerConfig,
        kept: KeptServer,
    ) -> io::Result<Self> {
        let (connections, mut greeted, buffers) = kept.open(BUFFER_BYTES)?;
        let config = ServerConfig { threads: connections.len(), ..config };
        if !greeted.is_set() {
            begin(&connections, path)?;
            greeted.set();
        }
        for connection in &connections {
            let flags = rustix::fs::fcntl_getfl(connection)?;
            rustix::fs::fcntl_setfl(connection, flags | OFlags::NONBLOCK)?;
        }
        let shared = ServerState {
            disk,
            watch: Watch::new(config.threads_always(), config.threads),
            config,
            traffic,
            connections: connections.into(),
            desks: buffers.into_iter().map(Desk::new).collect(),
        };
        let team = Team::start(Arc::new(shared), &config)?;
        Ok(Self { team, path: path.to_owned() })
    }

    /// The part of each CPU in the server.
    pub(crate) fn cpu_state(&self) -> CpuState {
        self.team.cpu_state()
    }
}

/// Mounts the first connection, and makes the others take requests too.
fn begin(connections: &[OwnedFd], path: &Path) -> io::Result<()> {
    let [connection, others @ ..] = connections else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fuse::mount_file(connection, path)?;
    greet(connection)?;
    others.iter().try_for_each(|other| fuse::join(other, connection))
}

/// Answers the kernel's first request. Before that the kernel accepts no clone.
fn greet(connection: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    let bytes = rustix::io::read(connection, &mut buffer)?;
    let unexpected = || io::Error::other("the kernel's first FUSE request is not INIT");
    let request = Request::parse(&buffer[..bytes]).ok_or_else(unexpected)?;
    let Ask::Init { minor, flags } = request.ask else { return Err(unexpected()) };
    let mut reply = Reply::init(request.unique, minor, flags, REQUEST_BYTES_MAX);
    rustix::io::write(connection, reply.finish(0))?;
    Ok(())
}

impl Drop for Server {
    fn drop(&mut self) {
        // Unmounting ends the connection, and so the threads. An error means that the file is not
        // mounted any more.
        let _ = fuse::unmount(&self.path);
        self.team.work.watch.close();
    }
}

/// The state of one thread.
struct Worker {
    number: usize,
    shared: Arc<ServerState>,
    /// The number of consecutive requests that the first check found.
    streak: u32,
    poll: Poll,
}

/// The outcome of waiting for a request.
enum Received {
    Bytes(usize),
    /// The thread is to leave.
    Left,
    Gone,
}

impl Work for ServerState {
    type Rest = Watch;

    fn run(self: Arc<Self>, number: usize) {
        self.config.prepare_thread();
        Worker::new(number, self.clone()).answer_left_once();
        // The threads of CPUs may never start again, and may have left requests too.
        let others = (number..self.desks.len()).step_by(self.config.threads_always()).skip(1);
        others.for_each(|other| Worker::new(other, self.clone()).answer_left_once());
        Worker::new(number, self).run();
    }

    fn rest(&self) -> &Watch {
        &self.watch
    }
}

impl Worker {
    fn new(number: usize, shared: Arc<ServerState>) -> Self {
        let poll = Poll::new(shared.config.poll);
        Self { number, shared, streak: 0, poll }
    }

    fn run(mut self) {
        // The first thread watches. The others wait for a call.
        self.shared.watch.come_back();
        if self.park() == Parking::Left {
            return;
        }
        loop {
            let bytes = match self.receive() {
                Received::Bytes(bytes) => bytes,
                Received::Left => return,
                Received::Gone => break,
            };
            let began = Instant::now();
            let Some(request) = Request::parse(&self.desk().buffer().bytes()[..bytes]) else {
                continue; // The kernel sends no such request, and it cannot be answered.
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
        // The device is gone for all threads.
        self.shared.watch.close();
    }

    /// Answers the requests that the last process left at this desk, once. Other threads at the
    /// desk wait until this is done, since the next request overwrites the buffer.
    fn answer_left_once(&self) {
        self.desk().answered_left.call_once(|| self.answer_left());
    }

    /// Answers the request in the buffer. Serves the request first if it has no outcome.
    fn answer_left(&self) {
        let buffer = self.desk().buffer();
        let request = buffer.has_request().then(|| Request::parse(buffer.bytes())).flatten();
        let outcome = buffer.outcome();
        drop(buffer);
        let Some(request) = request else { return };
        match (outcome, &request.ask) {
            (None, _) | (_, Ask::Read { .. }) => self.serve(&request, Instant::now()),
            (Some(0), Ask::Write { bytes, .. }) => {
                self.send(Reply::written(request.unique, *bytes), &[]);
            }
            (Some(0), _) => self.send(Reply::ok(request.unique), &[]),
            (Some(errno), _) => self.send(Reply::error(request.unique, errno), &[]),
        }
        self.desk().buffer().clear();
    }

    fn desk(&self) -> &Desk {
        &self.shared.desks[self.number]
    }

    fn connection(&self) -> &OwnedFd {
        &self.shared.connections[self.number]
    }

    fn park(&self) -> Parking {
        self.shared.watch.park(self.number, |number| {
            self.shared.work(number);
            self.shared.desks[number].batch.leave();
        })
    }

    /// Takes the next request. Polls, parks or sleeps until it comes.
    fn receive(&mut self) -> Received {
        let mut waited = false;
        self.poll.begin();
        loop {
            let read = rustix::io::read(self.connection(), self.desk().buffer().bytes_mut());
            match read {
                Ok(bytes) => {
                    self.call_if_busy(waited);
                    return Received::Bytes(bytes);
                }
                Err(Errno::AGAIN) => {}
                // Interrupted, or the request was aborted before it was taken.
                Err(Errno::INTR | Errno::NOENT) => continue,
                Err(_) => return Received::Gone,
            }
            waited = true;
            match self.park() {
                Parking::Left => return Received::Left,
                Parking::Called => self.poll.begin(),
                Parking::Refused if self.poll.again() => {}
                Parking::Refused => {
                    let connection = self.connection().as_fd();
                    let mut wait = [PollFd::from_borrowed_fd(connection, PollFlags::IN)];
                    // An error shows in the next read.
                    let _ = rustix::event::poll(&mut wait, None);
                }
            }
        }
    }

    /// Calls another watcher if this one keeps finding requests without a wait.
    fn call_if_busy(&mut self, waited: bool) {
        self.streak = if waited { 0 } else { self.streak + 1 };
        let watch = &self.shared.watch;
        if self.streak >= BUSY_STREAK && watch.has_room() {
            self.streak = 0;
            watch.call();
        }
    }

    fn takes_long(&self, ask: &Ask) -> bool {
        match ask {
            Ask::Read { offset, bytes } => {
                let bytes = *bytes as u64;
                request::takes_long(&*self.shared.disk, *offset, bytes, SHORT_PAGES)
            }
            Ask::Write { .. } | Ask::Discard { .. } => true,
            _ => false,
        }
    }

    fn serve(&self, request: &Request, began: Instant) {
        let unique = request.unique;
        let disk = &*self.shared.disk;
        let traffic = self.shared.traffic.thread(self.number);
        let outcome = match request.ask {
            Ask::Read { offset, bytes } => {
                let bytes = bytes.min(REQUEST_BYTES_MAX);
                let mut buffer = self.desk().buffer();
                let data = &mut buffer.bytes_mut()[DATA_AT..][..bytes];
                let read = disk.read(offset, data);
                self.answer(read.map(|()| Reply::ok(unique)), unique, data);
                buffer.clear();
                traffic.read(bytes, began.elapsed());
                return;
            }
            Ask::Write { offset, bytes } => {
                traffic.written(bytes);
                self.done(self.write(offset, bytes)).map(|()| Reply::written(unique, bytes))
            }
            Ask::Discard { offset, bytes } => {
                traffic.discarded(bytes);
                self.done(disk.discard(offset, bytes)).map(|()| Reply::ok(unique))
            }
            Ask::GetAttributes => Ok(Reply::attributes(unique, disk.bytes())),
            Ask::Open => Ok(Reply::opened(unique)),
            Ask::Nothing => Ok(Reply::ok(unique)),
            Ask::Silent | Ask::Destroy => return self.desk().buffer().clear(),
            Ask::Init { .. } | Ask::Flush | Ask::Unknown => Ok(Reply::error(unique, libc::ENOSYS)),
        };
        self.answer(outcome, unique, &[]);
        self.desk().buffer().clear();
    }

    /// Notes the outcome of a request that must not be repeated after its answer.
    fn done(&self, outcome: Result<(), DiskError>) -> Result<(), DiskError> {
        self.desk().buffer().set_outcome(outcome);
        outcome
    }

    /// Writes the buffer's pages, alone or with the help of parked threads.
    fn write(&self, offset: u64, bytes: usize) -> Result<(), DiskError> {
        let ServerState { watch, .. } = &*self.shared;
        let batch = &self.desk().batch;
        let shared = bytes >= BATCH_PAGES_MIN * PAGE_BYTES;
        batch.start(offset, bytes);
        if shared {
            watch.share(self.number, batch);
        }
        self.shared.work(self.number);
        if shared {
            watch.unshare(self.number, batch);
        }
        batch.finish()
    }

    /// Sends a reply with `data`, or the failure.
    fn answer(&self, outcome: Result<Reply, DiskError>, unique: u64, data: &[u8]) {
        match outcome {
            Ok(reply) => self.send(reply, data),
            Err(error) => {
                self.shared.traffic.thread(self.number).failed();
                self.send(Reply::error(unique, request::errno(error)), &[]);
            }
        }
    }

    fn send(&self, mut reply: Reply, data: &[u8]) {
        let parts = [IoSlice::new(reply.finish(data.len())), IoSlice::new(data)];
        // An error means that the requester was killed, or that the device is gone, which the next
        // read shows.
        let _ =
            rustix::io::writev(self.connection(), &parts[..if data.is_empty() { 1 } else { 2 }]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::opcode;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::time::Duration;

    const CPUS: usize = 2;

    /// A slow disk, like a cache that waits for room.
    struct Slow;

    impl Disk for Slow {
        fn bytes(&self) -> u64 {
            1 << 30
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DiskError> {
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        }

        fn write(&self, _: u64, _: &[u8]) -> Result<(), DiskError> {
            self.read(0, &mut [])
        }

        fn discard(&self, _: u64, _: u64) -> Result<(), DiskError> {
            Ok(())
        }

        fn is_slow(&self, _: u64) -> bool {
            false
        }
    }

    fn request(opcode: u32, unique: u64) -> Vec<u8> {
        let mut bytes = vec![0; WRITE_OVERHEAD + PAGE_BYTES];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        bytes[WRITE_OVERHEAD - 24..][..4].copy_from_slice(&(PAGE_BYTES as u32).to_ne_bytes());
        bytes
    }

    /// The numbers of the requests that this server has answered.
    fn answered(kernel: &OwnedFd, numbers: &mut Vec<u64>) {
        let mut reply = [0; 64];
        while rustix::io::read(kernel, &mut reply).is_ok_and(|bytes| bytes > 0) {
            numbers.push(u64::from_ne_bytes(reply[8..16].try_into().unwrap()));
        }
    }

    #[test]
    fn requests_that_a_dead_daemon_has_left_are_answered_once() {
        let config = ServerConfig { raise_priority: false, ..ServerConfig::for_cpus(CPUS) };
        let pair = |_| {
            let flags = SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
        };
        let (kernels, connections): (Vec<_>, Vec<_>) = (0..config.threads).map(pair).unzip();
        let file = uzswap_sys::shared::create("uzswap-test").unwrap();
        let (connections, _, mut buffers) =
            KeptServer::of(connections, file).open(BUFFER_BYTES).unwrap();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let left = request(opcode::WRITE, 100 + number as u64);
            buffer.bytes_mut()[..left.len()].copy_from_slice(&left);
        }
        let shared = ServerState {
            disk: Arc::new(Slow),
            watch: Watch::new(config.threads_always(), config.threads),
            config,
            traffic: Arc::new(Traffic::new(config.threads)),
            connections: connections.into(),
            desks: buffers.into_iter().map(Desk::new).collect(),
        };
        for (number, kernel) in kernels.iter().enumerate() {
            rustix::io::write(kernel, &request(opcode::WRITE, 200 + number as u64)).unwrap();
        }
        let team = Team::start(Arc::new(shared), &config).unwrap();
        (0..CPUS).for_each(|_| team.cpu_came().unwrap());
        let mut numbers = vec![Vec::new(); kernels.len()];
        let began = Instant::now();
        let has_left = |(number, answered): (usize, &Vec<u64>)| {
            answered.first() == Some(&(100 + number as u64))
        };
        let look = |numbers: &mut Vec<Vec<u64>>| {
            kernels.iter().zip(numbers).for_each(|(kernel, own)| answered(kernel, own));
        };
        while !numbers.iter().enumerate().all(has_left) && began.elapsed() < Duration::from_secs(60)
        {
            look(&mut numbers);
            std::thread::sleep(Duration::from_millis(1));
        }
        for kernel in &kernels {
            rustix::io::write(kernel, &request(opcode::DESTROY, 1)).unwrap();
        }
        drop(team);
        look(&mut numbers);
        for (number, own) in numbers.iter().enumerate() {
            let left = own.iter().filter(|unique| **unique == 100 + number as u64).count();
            assert!(left == 1 && has_left((number, own)), "{numbers:?}");
        }
    }
}

//! Threads that do the long work for the threads that serve queues of ublk.
//!
//! The kernel takes answers of a queue only from the thread that fetches its requests. A page on
//! the backing, or a write of many pages, must not delay the faults behind it. So the queue's
//! thread puts the request on its [`Desk`], and a [`Job`] for each part into the crew's list. The
//! crew's thread that does the last part marks the desk, and wakes the queue's thread if that
//! sleeps. The list's lock is taken for such jobs alone: a fault from the pool never takes it.

use crate::config::ServerConfig;
use crate::disk::Disk;
use crate::request;
use crate::team::{CpuCount, Rest, Rota, Work};
use crate::traffic::{ThreadTraffic, Traffic};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};
use std::sync::atomic::{Ordering::AcqRel, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::ublk::{Bell, Io, Operation};

/// Pages of a write that one thread takes: some 40 µs of work, twice the cost of waking a thread.
const PART_PAGES: usize = 8;

/// Requests that may be under way in a device: their marks are bits of a word.
pub(crate) const TAGS_MAX: usize = 64;

/// The requests of a device that the crew works on or has finished.
pub(crate) struct Desk {
    /// The device's start on the disk.
    start: u64,
    places: Box<[TaggedIo]>,
    /// A bit for each tag: all parts of its request are done.
    done: AtomicU64,
    /// True if the queue's thread sleeps, or is about to.
    is_asleep: AtomicBool,
    bell: Bell,
}

/// The request with a tag.
#[derive(Default)]
struct TaggedIo {
    /// Several threads may read the pages of a write; one thread fills the pages of a read.
    io: RwLock<Option<Io>>,
    parts_left: AtomicUsize,
    /// The result for the kernel: 0, or an error number.
    errno: AtomicI32,
}

impl Desk {
    /// Makes a crew for a device with this number of tags.
    pub(crate) fn new(start: u64, tags: usize, bell: Bell) -> Self {
        assert!(tags <= TAGS_MAX);
        Self {
            start,
            places: (0..tags).map(|_| TaggedIo::default()).collect(),
            done: AtomicU64::new(0),
            is_asleep: AtomicBool::new(false),
            bell,
        }
    }

    /// Serves a request of which no other thread has a part. Returns the result for the kernel.
    pub(crate) fn serve(&self, io: &mut Io, disk: &dyn Disk, counts: &ThreadTraffic) -> i32 {
        let (began, offset) = (Instant::now(), self.start + io.offset);
        let outcome = match io.operation {
            Operation::Read => {
                let read = disk.read(offset, io.data_mut());
                counts.read(io.bytes as usize, began.elapsed());
                read
            }
            Operation::Write => {
                counts.written(io.bytes as usize);
                disk.write(offset, io.data())
            }
            Operation::Discard => {
                counts.discarded(io.bytes);
                disk.discard(offset, io.bytes)
            }
            Operation::Flush => Ok(()),
            Operation::Unknown => return libc::EOPNOTSUPP,
        };
        outcome.map_or_else(
            |error| {
                counts.failed();
                request::errno(error)
            },
            |()| 0,
        )
    }

    /// True if serving takes longer than handing over. `pages_max` is the limit for reads.
    pub(crate) fn takes_long(&self, io: &Io, disk: &dyn Disk, pages_max: usize) -> bool {
        match io.operation {
            Operation::Read => {
                request::takes_long(disk, self.start + io.offset, io.bytes, pages_max)
            }
            Operation::Write | Operation::Discard => true,
            Operation::Flush | Operation::Unknown => false,
        }
    }

    /// Serves a job: a whole request, or some pages of a write.
    fn serve_part(&self, job: &Job, disk: &dyn Disk, counts: &ThreadTraffic) {
        let place = &self.places[job.tag];
        let errno = if job.bytes == 0 {
            let mut io = place.io.write().unwrap_or_else(PoisonError::into_inner);
            io.as_mut().map_or(0, |io| self.serve(io, disk, counts))
        } else {
            let io = place.io.read().unwrap_or_else(PoisonError::into_inner);
            io.as_ref().map_or(0, |io| {
                let data = &io.data()[job.from..][..job.bytes];
                let offset = self.start + io.offset + job.from as u64;
                counts.written(job.bytes);
                disk.write(offset, data).map_or_else(request::errno, |()| 0)
            })
        };
        if errno != 0 {
            place.errno.store(errno, Relaxed);
        }
        // Release: a thread that sees the mark also sees the work.
        if place.parts_left.fetch_sub(1, AcqRel) == 1 {
            self.done.fetch_or(1 << job.tag, SeqCst);
            // Either the thread that goes to sleep sees the mark, or this thread sees that it
            // sleeps.
            if self.is_asleep.swap(false, SeqCst) {
                self.bell.ring();
            }
        }
    }

    /// Takes back the requests that are done, with their results for the kernel. Called by the
    /// queue's thread.
    pub(crate) fn collect(&self, mut take: impl FnMut(Io, i32)) {
        let mut done = self.done.swap(0, SeqCst);
        while done != 0 {
            let place = &self.places[done.trailing_zeros() as usize];
            done &= done - 1;
            let io = place.io.write().unwrap_or_else(PoisonError::into_inner).take();
            take(io.expect("a place that is marked holds its request"), place.errno.load(Relaxed));
        }
    }

    /// Calls `sleep`, unless a request is done already.
    pub(crate) fn sleep(&self, sleep: impl FnOnce()) {
        self.is_asleep.store(true, SeqCst);
        if self.done.load(SeqCst) == 0 {
            sleep();
        }
        self.is_asleep.store(false, SeqCst);
    }
}

/// Bytes of a write that one thread takes: whole pages, in no more parts than there are CPUs.
fn part_bytes(bytes: usize, cpus: usize) -> usize {
    let of_one = bytes.div_ceil(cpus).next_multiple_of(PAGE_BYTES);
    of_one.max(PART_PAGES * PAGE_BYTES)
}

/// A request on a desk, or a part of one.
struct Job {
    desk: Arc<Desk>,
    tag: usize,
    from: usize,
    /// 0 for the whole request.
    bytes: usize,
}

struct JobQueue {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    /// The maximum number of jobs of all desks together. The list has room for them.
    room: usize,
    rota: Rota,
    is_closed: bool,
}

/// The threads' state: see the module.
pub(crate) struct Crew {
    disk: Arc<dyn Disk>,
    traffic: Arc<Traffic>,
    config: ServerConfig,
    /// CPUs that are up: more threads do not write faster.
    cpus: CpuCount,
    list: Mutex<JobQueue>,
    bell: Condvar,
}

impl Crew {
    pub(crate) fn new(disk: Arc<dyn Disk>, traffic: Arc<Traffic>, config: ServerConfig) -> Self {
        let rota = Rota::new(config.threads_always(), config.threads);
        let list = JobQueue { jobs: VecDeque::new(), idle: 0, room: 0, rota, is_closed: false };
        let cpus = CpuCount::default();
        Self { disk, traffic, config, cpus, list: Mutex::new(list), bell: Condvar::new() }
    }

    fn list(&self) -> MutexGuard<'_, JobQueue> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    pub(crate) fn counts(&self, number: usize) -> &ThreadTraffic {
        self.traffic.thread(number)
    }

    /// Makes room for the jobs of a further device.
    pub(crate) fn make_room(&self, tags: usize, io_bytes_max: usize) {
        let parts = io_bytes_max.div_ceil(PART_PAGES * PAGE_BYTES);
        let mut list = self.list();
        list.room += tags * parts;
        let more = list.room - list.jobs.len();
        list.jobs.reserve(more);
    }

    /// Hands a request over to the crew.
    pub(crate) fn take(&self, desk: &Arc<Desk>, io: Io) {
        let (tag, bytes) = (io.tag(), io.bytes as usize);
        let part = match io.operation {
            Operation::Write => part_bytes(bytes, self.cpus.get().max(1)),
            _ => bytes,
        };
        let parts = if part < bytes { bytes.div_ceil(part) } else { 1 };
        let place = &desk.places[tag];
        place.errno.store(0, Relaxed);
        place.parts_left.store(parts, Relaxed);
        *place.io.write().unwrap_or_else(PoisonError::into_inner) = Some(io);
        let mut list = self.list();
        debug_assert!(list.jobs.len() + parts <= list.jobs.capacity(), "a push would allocate");
        for index in 0..parts {
            let from = index * part;
            let bytes = if parts == 1 { 0 } else { part.min(bytes - from) };
            list.jobs.push_back(Job { desk: desk.clone(), tag, from, bytes });
        }
        let wakes = parts.min(list.idle);
        drop(list);
        (0..wakes).for_each(|_| self.bell.notify_one());
    }

    /// Ends the crew: no more jobs will come.
    pub(crate) fn close(&self) {
        self.list().is_closed = true;
        self.bell.notify_all();
    }
}

impl Work for Crew {
    type Rest = Self;

    fn run(self: Arc<Self>, number: usize) {
        self.config.prepare_thread();
        let mut list = self.list();
        loop {
            if let Some(job) = list.jobs.pop_front() {
                drop(list);
                job.desk.serve_part(&job, self.disk(), self.counts(number));
                list = self.list();
            } else if list.is_closed || list.rota.leaves(number) {
                return;
            } else {
                list.idle += 1;
                list = self.bell.wait(list).unwrap_or_else(PoisonError::into_inner);
                list.idle -= 1;
            }
        }
    }

    fn rest(&self) -> &Self {
        self
    }
}

impl Rest for Crew {
    fn cpus(&self) -> &CpuCount {
        &self.cpus
    }

    fn with_rota<T>(&self, change: impl FnOnce(&mut Rota) -> T) -> T {
        change(&mut self.list().rota)
    }

    fn wake_one(&self) {
        self.bell.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_shared_among_the_cpus_there_are() {
        const MAX: usize = 128 << 10;
        let parts = |bytes: usize, cpus| bytes.div_ceil(part_bytes(bytes, cpus));
        assert_eq!((parts(MAX, 1), parts(MAX, 2), parts(MAX, 3)), (1, 2, 3));
        assert_eq!(parts(MAX, 64), MAX / (PART_PAGES * PAGE_BYTES), "too small a part is no gain");
        assert_eq!(parts(PAGE_BYTES, 2), 1);
        assert_eq!(part_bytes(9 * PAGE_BYTES, 2) % PAGE_BYTES, 0);
    }
}

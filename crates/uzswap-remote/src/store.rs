//! A store of segments: Valkey or Redis, one server or a cluster.
//!
//! ```text
//! read     the server that has the key → a free reader's line → GETRANGE, checked by its length
//!          no answer in 200 ms: that line is closed → the replicas, in turn
//! upkeep   lines are opened again; servers are learned anew; segments are written and removed
//! ```
//! A key is `uz:CLIENT:EPOCH:NUMBER`. The epoch is a random number of this cache, and each write of
//! a segment gets the next number. So a key is written only once. A stale replica lacks the key; it
//! never has old bytes. `GETRANGE` of a missing key returns no bytes, so a short answer means
//! *lost*.
//!
//! A reader only sends and receives. It takes one line, and no lock that all threads share.
//! `Keeper`, with the lines for writes, belongs to the background thread.

use crate::address::Address;
use crate::figures::StoreFigures;
use crate::line::{Endpoint, Fault, Line};
use crate::nodes::Map;
use crate::protocol::{Decimal, KEY_BYTES_MAX, Refusal, Reply, Short, begin, part, slot};
use crate::tls::Secrets;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::*};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// If a server does not answer a read within this time, another copy is read.
pub(crate) const READ_PATIENCE: Duration = Duration::from_millis(200);
/// How long a server may take to answer a write.
pub(crate) const WRITE_PATIENCE: Duration = Duration::from_secs(2);
/// How long replicas may take to acknowledge a segment, ms.
const COPY_PATIENCE: &[u8] = b"200";
/// Keys of one command or pipeline.
const BATCH: usize = 128;

/// The outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Got {
    Whole,
    /// The store no longer has the segment, or has less of it.
    Lost,
    /// No server that could have the segment answers.
    Down,
}

/// The outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// Written. This many replicas have it.
    Done(u8),
    /// The store is full.
    Full,
    Down,
}

/// A line for reads.
pub(crate) struct Reader {
    pub(crate) line: Mutex<Line>,
    /// The line's server, and true while the line may be used.
    pub(crate) node: AtomicU16,
    pub(crate) is_open: AtomicBool,
}

/// A store, with its connections.
pub(crate) struct Store {
    pub(crate) address: Address,
    /// Unset in a process that took over, until this process has read the secrets.
    pub(crate) secrets: OnceLock<Secrets>,
    pub(crate) client: String,
    pub(crate) epoch: AtomicU64,
    pub(crate) map: Map,
    pub(crate) readers: Box<[Reader]>,
    pub(crate) keeper: Mutex<Keeper>,
    pub(crate) figures: StoreFigures,
    /// True while each server with keys answers.
    pub(crate) is_up: AtomicBool,
    /// True if the store would drop segments, so that nothing may be written to it.
    pub(crate) is_unfit: AtomicBool,
    pub(crate) rung: Mutex<bool>,
    pub(crate) bell: Condvar,
}

/// The state of the background thread.
pub(crate) struct Keeper {
    pub(crate) seeds: Vec<Endpoint>,
    /// Servers by their numbers. The servers in `active` are in use.
    pub(crate) known: Vec<Endpoint>,
    pub(crate) active: Vec<usize>,
    /// Active servers with keys of their own.
    pub(crate) primaries: Vec<usize>,
    /// A line for writes to each known server.
    pub(crate) writers: Vec<Line>,
    pub(crate) tried: Option<Instant>,
    pub(crate) looked: Option<Instant>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic elsewhere, a line is closed or usable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A key on the stack.
pub(crate) struct Key {
    bytes: [u8; KEY_BYTES_MAX],
    count: usize,
}

impl Key {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.count]
    }
}

/// The limits of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes of all servers together; `None` for no limit.
    pub(crate) bytes: Option<u64>,
}

impl Store {
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The part of the keys that marks this cache.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// The numbers of the store's descriptors, which never change.
    pub(crate) fn descriptors(&self) -> Vec<i32> {
        let readers = self.readers.iter().map(|reader| lock(&reader.line).descriptor());
        readers.chain(lock(&self.keeper).writers.iter().map(Line::descriptor)).collect()
    }

    /// True while each server with keys answers.
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Relaxed)
    }

    /// True if segments may be written to the store.
    pub(crate) fn is_fit(&self) -> bool {
        self.is_up() && !self.is_unfit.load(Relaxed)
    }

    pub(crate) fn keeper(&self) -> MutexGuard<'_, Keeper> {
        lock(&self.keeper)
    }

    fn named(&self, end: &[u8]) -> Key {
        let mut key = Key { bytes: [0; KEY_BYTES_MAX], count: 0 };
        let mut out = &mut key.bytes[..];
        let epoch = self.epoch.load(Relaxed);
        let written =
            write!(out, "uz:{}:{epoch:016x}:", self.client).and_then(|()| out.write_all(end));
        written.expect("a client's name has a limit");
        let left = out.len();
        key.count = KEY_BYTES_MAX - left;
        key
    }

    pub(crate) fn key(&self, number: u64) -> Key {
        self.named(Decimal::new(number).bytes())
    }

    /// Reads a part of a segment.
    pub(crate) fn get(&self, number: u64, offset: usize, out: &mut [u8]) -> Got {
        let key = self.key(number);
        let primary = self.map.owner(slot(key.bytes()));
        let began = Instant::now();
        let mut got = self.get_from(primary, &key, offset, out);
        if got == Got::Down {
            self.figures.failed();
            self.ring();
            // A replica that lacks the segment may not have received it yet.
            let has = |node: usize| self.get_from(node, &key, offset, out) == Got::Whole;
            if self.map.replicas(primary).any(has) {
                got = Got::Whole;
            }
        }
        match got {
            Got::Whole => self.figures.read(out.len(), began.elapsed()),
            Got::Lost => self.figures.lost(),
            Got::Down => {}
        }
        got
    }

    fn get_from(&self, node: usize, key: &Key, offset: usize, out: &mut [u8]) -> Got {
        let is_it = |reader: &&Reader| {
            reader.is_open.load(Relaxed) && usize::from(reader.node.load(Relaxed)) == node
        };
        let open = || self.readers.iter().filter(is_it);
        let free = open().find_map(|reader| Some((reader, reader.line.try_lock().ok()?)));
        let first = || open().next().map(|reader| (reader, lock(&reader.line)));
        let Some((reader, mut line)) = free.or_else(first) else { return Got::Down };
        if usize::from(reader.node.load(Relaxed)) != node {
            return Got::Down;
        }
        let got = get_on(&mut line, key, offset, out);
        reader.is_open.store(line.is_open(), Relaxed);
        got
    }

    /// Writes a segment. Waits for `copies` replicas for a short time.
    pub(crate) fn put(&self, keeper: &mut Keeper, number: u64, bytes: &[u8], copies: u8) -> Put {
        let key = self.key(number);
        let node = self.map.owner(slot(key.bytes()));
        let put = self.put_on(keeper, node, &key, bytes, copies).unwrap_or_else(|fault| {
            self.figures.failed();
            match fault {
                Fault::Refused(Refusal::Full) => Put::Full,
                _ => Put::Down,
            }
        });
        match put {
            Put::Done(_) => self.figures.written(bytes.len()),
            Put::Full => self.figures.full(),
            Put::Down => {
                self.is_up.store(false, Relaxed);
                self.ring();
            }
        }
        put
    }

    fn put_on(
        &self,
        keeper: &mut Keeper,
        node: usize,
        key: &Key,
        bytes: &[u8],
        copies: u8,
    ) -> Result<Put, Fault> {
        let line = keeper.writers.get_mut(node).ok_or(Fault::Down)?;
        let ttl = Decimal::new(self.address.ttl.as_millis() as u64);
        let mut head = Vec::with_capacity(key.count + 64);
        let begun = begin(&mut head, 5)
            .and_then(|()| part(&mut head, b"SET"))
            .and_then(|()| part(&mut head, key.bytes()))
            .and_then(|()| write!(head, "${}\r\n", bytes.len()));
        begun.expect("memory takes all bytes");
        let tail = [&b"\r\n$2\r\nPX\r\n"[..], &one_part(ttl.bytes())].concat();
        line.send(&head, true)?;
        line.send(bytes, true)?;
        if copies == 0 {
            line.send(&tail, false)?;
            line.answer()?;
            return Ok(Put::Done(0));
        }
        let wanted = Decimal::new(copies.into());
        let wait = Short::new(&[b"WAIT", wanted.bytes(), COPY_PATIENCE]);
        line.send(&tail, true)?;
        line.send(wait.bytes(), false)?;
        let written = line.answer();
        let count = match line.answer()? {
            Reply::Integer(count) => count.clamp(0, 255) as u8,
            _ => 0,
        };
        written.map(|_| Put::Done(count))
    }

    /// Removes segments. Errors do not matter: segments expire.
    pub(crate) fn remove(&self, keeper: &mut Keeper, numbers: &[u64]) {
        self.each(keeper, numbers, |key| one_command(&[b"UNLINK", key]));
    }

    /// Renews segments; `false` if a server did not renew some.
    pub(crate) fn renew(&self, keeper: &mut Keeper, numbers: &[u64]) -> bool {
        let ttl = Decimal::new(self.address.ttl.as_millis() as u64);
        self.each(keeper, numbers, |key| one_command(&[b"PEXPIRE", key, ttl.bytes()]))
    }

    /// Renews the lease that shows that this cache lives.
    pub(crate) fn show_life(&self, keeper: &mut Keeper, life: Duration) {
        let key = self.named(b"lease");
        let node = self.map.owner(slot(key.bytes()));
        let owner = format!("{} {}", machine(), std::process::id());
        let life = Decimal::new(life.as_millis() as u64);
        if let Some(line) = keeper.writers.get_mut(node) {
            // After an error the next renewal tries again soon.
            let _ = line.ask(&[b"SET", key.bytes(), owner.as_bytes(), b"PX", life.bytes()]);
        }
    }

    /// Removes the lease when the cache ends.
    pub(crate) fn end_life(&self, keeper: &mut Keeper) {
        let key = self.named(b"lease");
        let node = self.map.owner(slot(key.bytes()));
        if let Some(line) = keeper.writers.get_mut(node) {
            // After an error the lease expires by itself.
            let _ = line.ask(&[b"UNLINK", key.bytes()]);
        }
    }

    /// Sends a command for each of these keys, in batches. True if all commands were answered.
    fn each(
        &self,
        keeper: &mut Keeper,
        numbers: &[u64],
        command: impl Fn(&[u8]) -> Vec<u8>,
    ) -> bool {
        let mut is_done = true;
        for batch in numbers.chunks(BATCH) {
            let owner = |number: &u64| self.map.owner(slot(self.key(*number).bytes()));
            for node in 0..keeper.writers.len() {
                let line = &mut keeper.writers[node];
                let own = || batch.iter().filter(|number| owner(number) == node);
                let all: Vec<u8> =
                    own().flat_map(|number| command(self.key(*number).bytes())).collect();
                let told = all.is_empty()
                    || line.send(&all, false).is_ok() && own().all(|_| line.reply().is_ok());
                is_done &= told;
            }
        }
        if !is_done {
            self.figures.failed();
        }
        is_done
    }

    /// Wakes the background thread.
    pub(crate) fn ring(&self) {
        *lock(&self.rung) = true;
        self.bell.notify_one();
    }

    /// Waits for [`Self::ring`], or for at most this time.
    pub(crate) fn wait(&self, most: Duration) {
        let rung = lock(&self.rung);
        let waited = self.bell.wait_timeout_while(rung, most, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }

    /// Becomes a client of its own in a fork, with its own connections. Fails without a random
    /// number.
    pub(crate) fn go_on_in_fork(&self, keeper: &mut Keeper) -> io::Result<()> {
        for reader in &self.readers {
            reader.is_open.store(false, Relaxed);
            lock(&reader.line).forget();
        }
        keeper.writers.iter_mut().for_each(Line::forget);
        keeper.tried = None;
        self.is_up.store(false, Relaxed);
        self.epoch.store(random()?, Relaxed);
        Ok(())
    }
}

fn one_part(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 16);
    part(&mut out, bytes).expect("memory takes all bytes");
    out
}

fn one_command(parts: &[&[u8]]) -> Vec<u8> {
    crate::protocol::command(parts)
}

fn get_on(line: &mut Line, key: &Key, offset: usize, out: &mut [u8]) -> Got {
    let (first, last) =
        (Decimal::new(offset as u64), Decimal::new((offset + out.len() - 1) as u64));
    let command = Short::new(&[b"GETRANGE", key.bytes(), first.bytes(), last.bytes()]);
    if line.send(command.bytes(), false).is_err() {
        return Got::Down;
    }
    match line.answer() {
        Ok(Reply::Bulk(count)) if count <= out.len() => match line.bulk(&mut out[..count]) {
            Ok(()) if count == out.len() => Got::Whole,
            Ok(()) => Got::Lost,
            Err(_) => Got::Down,
        },
        Ok(Reply::Nil) => Got::Lost,
        Ok(_) => {
            line.close();
            Got::Down
        }
        // The server will serve on this line later.
        Err(Fault::Refused(Refusal::Later)) => Got::Down,
        // The key is elsewhere. A closed line makes the background thread learn the servers again.
        Err(Fault::Refused(_)) => {
            line.close();
            Got::Down
        }
        Err(Fault::Down) => Got::Down,
    }
}

/// The machine's name, as a part of keys.
pub(crate) fn machine() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    let is_plain = |letter: &char| letter.is_ascii_alphanumeric() || "-_.".contains(*letter);
    let name: String = name.chars().filter(is_plain).take(64).collect();
    if name.is_empty() { "machine".into() } else { name }
}

pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

//! A proxy between a client and its server, which delays, changes or cuts the replies to reads.
//!
//! A thread for each connection takes a command, lets the server answer, and passes the reply on.
//! Only replies to `GETRANGE` are damaged, so a client can connect and write.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A kind of damage to the replies to reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// No damage.
    None,
    /// Replies are late by this time.
    Delayed(Duration),
    /// Replies are from another segment, at the same offset.
    Swapped,
    /// Replies are from an older write, at the same offset.
    Replayed,
    /// Replies have half of the bytes, and the length of that half.
    Truncated,
    /// One bit is flipped.
    Flipped,
    /// All bytes are zero.
    Zeroed,
    /// Replies have more bytes than requested.
    Longer,
    /// The connection ends in the middle of a reply.
    Cut,
}

/// Segments that were written: keys and values, in order.
type Writes = Vec<(Vec<u8>, Vec<u8>)>;

/// A proxy. It ends when the value is dropped.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    server: u16,
    harm: Mutex<Harm>,
    harmed: AtomicU64,
    is_done: AtomicBool,
    keeps_writes: bool,
    writes: Mutex<Writes>,
    streams: Mutex<Vec<TcpStream>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Proxy {
    /// Starts a proxy before a server's port. With `keeps_writes` it keeps all written segments,
    /// which swaps and replays need.
    pub fn before(server: u16, keeps_writes: bool) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("it listens").port();
        let shared = Arc::new(Shared {
            server,
            harm: Mutex::new(Harm::None),
            harmed: AtomicU64::new(0),
            is_done: AtomicBool::new(false),
            keeps_writes,
            writes: Mutex::default(),
            streams: Mutex::default(),
        });
        let own = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if own.is_done.load(Relaxed) {
                    return;
                }
                let own = own.clone();
                // An error means that one side has closed the connection.
                thread::spawn(move || _ = own.serve(client));
            }
        });
        Self { port, shared }
    }

    /// Its address as a backing, with parameters.
    pub fn backing(&self, parameters: &str) -> String {
        format!("valkey://127.0.0.1:{}/?{parameters}", self.port)
    }

    /// Damages replies from now on.
    pub fn set(&self, harm: Harm) {
        *lock(&self.shared.harm) = harm;
    }

    /// Replies that were damaged.
    pub fn harmed(&self) -> u64 {
        self.shared.harmed.load(Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_done.store(true, Relaxed);
        // Fails if the proxy or a connection has ended already.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        lock(&self.shared.streams).iter().for_each(|one| _ = one.shutdown(Shutdown::Both));
    }
}

impl Shared {
    fn serve(&self, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(("127.0.0.1", self.server))?;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            lock(&self.streams).push(stream.try_clone()?);
        }
        let (mut to_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
        let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
        let ended = loop {
            let parts = match command(&mut client) {
                Ok(parts) => parts,
                Err(error) => break Err(error),
            };
            let passed = self.pass(&parts, &mut server, &mut to_server, &mut to_client);
            if !matches!(passed, Ok(true)) {
                break passed.map(|_| ());
            }
        };
        // Fails if the connection has ended already.
        let _ = to_client.shutdown(Shutdown::Both);
        let _ = to_server.shutdown(Shutdown::Both);
        ended
    }

    /// Passes a command and its reply on. `false` if the connection was cut.
    fn pass(
        &self,
        parts: &[Vec<u8>],
        server: &mut BufReader<TcpStream>,
        to_server: &mut TcpStream,
        to_client: &mut TcpStream,
    ) -> io::Result<bool> {
        let began = Instant::now();
        to_server.write_all(&crate::protocol::command(
            &parts.iter().map(Vec::as_slice).collect::<Vec<_>>(),
        ))?;
        let mut reply = Vec::new();
        let content = take_reply(server, &mut reply)?;
        if self.keeps_writes && parts[0] == b"SET" && parts.len() == 5 {
            lock(&self.writes).push((parts[1].clone(), parts[2].clone()));
        }
        let harm = *lock(&self.harm);
        let Some(mut bytes) = content.filter(|_| parts[0] == b"GETRANGE" && harm != Harm::None)
        else {
            to_client.write_all(&reply)?;
            return Ok(true);
        };
        let turn = self.harmed.fetch_add(1, Relaxed);
        match harm {
            Harm::None => {}
            Harm::Delayed(time) => wait_until(began + time),
            Harm::Swapped | Harm::Replayed => {
                let other = self.other(harm, parts, bytes.len(), turn as usize);
                bytes = other.unwrap_or(bytes);
            }
            Harm::Truncated => bytes.truncate(bytes.len() / 2),
            Harm::Flipped if !bytes.is_empty() => {
                let bit = turn as usize * 7919 % (bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            Harm::Zeroed | Harm::Flipped => bytes.fill(0),
            Harm::Longer => bytes.extend([7; 100]),
            Harm::Cut => {
                to_client.write_all(&reply[..reply.len() / 2])?;
                return Ok(false);
            }
        }
        to_client.write_all(format!("${}\r\n", bytes.len()).as_bytes())?;
        to_client.write_all(&bytes)?;
        to_client.write_all(b"\r\n")?;
        Ok(true)
    }

    /// The same range of another value: of any value, or of one that was written earlier.
    fn other(&self, harm: Harm, parts: &[Vec<u8>], count: usize, turn: usize) -> Option<Vec<u8>> {
        let writes = lock(&self.writes);
        let own = writes.iter().position(|(key, _)| *key == parts[1])?;
        let from: usize = std::str::from_utf8(&parts[2]).ok()?.parse().ok()?;
        let others = if harm == Harm::Replayed { own } else { writes.len() };
        let at = turn.checked_rem(others)?;
        let (_, value) = &writes[if at == own { (at + 1) % others } else { at }];
        value.get(from..from + count).map(<[u8]>::to_vec)
    }
}

/// Waits until `time`, exact to microseconds: a sleep lasts some 50 µs longer than asked.
fn wait_until(time: Instant) {
    const SLACK: Duration = Duration::from_micros(80);
    thread::sleep(time.saturating_duration_since(Instant::now()).saturating_sub(SLACK));
    while Instant::now() < time {
        std::hint::spin_loop();
    }
}

/// Reads a line and adds it to `out`, with its end. Returns its kind and its number.
fn line(from: &mut impl BufRead, out: &mut Vec<u8>) -> io::Result<(u8, i64)> {
    let start = out.len();
    from.read_until(b'\n', out)?;
    let text = std::str::from_utf8(&out[start..]).unwrap_or_default().trim_end();
    let kind = *text.as_bytes().first().ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((kind, text.get(1..).and_then(|number| number.parse().ok()).unwrap_or(-1)))
}

fn bytes(from: &mut impl Read, count: usize, out: &mut Vec<u8>) -> io::Result<Vec<u8>> {
    let mut content = vec![0; count + 2];
    from.read_exact(&mut content)?;
    out.extend(&content);
    content.truncate(count);
    Ok(content)
}

fn command(client: &mut impl BufRead) -> io::Result<Vec<Vec<u8>>> {
    let mut seen = Vec::new();
    let (_, count) = line(client, &mut seen)?;
    let part = |_| {
        let (_, count) = line(client, &mut seen)?;
        bytes(client, count.max(0) as usize, &mut seen)
    };
    let parts: Vec<_> = (0..count).map(part).collect::<io::Result<_>>()?;
    if parts.is_empty() { Err(io::ErrorKind::InvalidData.into()) } else { Ok(parts) }
}

/// Reads a whole reply and adds it to `out`. Returns the content of a string.
fn take_reply(server: &mut impl BufRead, out: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    match line(server, out)? {
        (b'$', count) if count >= 0 => bytes(server, count as usize, out).map(Some),
        (b'*', count) => {
            for _ in 0..count {
                take_reply(server, out)?;
            }
            Ok(None)
        }
        _ => Ok(None),
    }
}

//! A line: one connection to a server, over TCP or a Unix socket.
//!
//! The descriptor keeps its number when the line connects again, because the program in which this
//! code runs may close or reuse any other number. The line has its buffer from the start, so
//! sending and receiving allocate nothing. After any error the line is closed: a late reply must
//! not be taken for that of the next command.

use crate::protocol::{Refusal, Reply, command, reply};
use crate::tls::Tls;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use rustls::ClientConnection;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use uzswap_sys::process;

/// The maximum bytes of one receive: a page, or some neighbours.
const BUFFER_BYTES: usize = 32 << 10;

/// The maximum length of a reply's first line, in bytes. Error messages are the longest.
const LINE_BYTES_MAX: usize = 1024;

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_millis(500);

/// The place of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A command without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// There is no connection, or it broke, or the reply was late.
    Down,
    /// The server has answered with an error.
    Refused(Refusal),
}

/// A reply with its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Status(String),
    Integer(i64),
    Bulk(Vec<u8>),
    Nil,
    Array(Vec<Self>),
    Error(Refusal, String),
}

/// A connection to a server, open or closed.
pub(crate) struct Line {
    /// The connection's descriptor. Its number stays taken while there is no connection.
    descriptor: OwnedFd,
    is_open: bool,
    tls: Option<Box<ClientConnection>>,
    buffer: Box<[u8; BUFFER_BYTES]>,
    /// The received bytes that the caller has not taken yet.
    start: usize,
    end: usize,
}

impl Line {
    /// A closed line. Fails without a free descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        let (one, _) = UnixStream::pair()?;
        Ok(Self {
            descriptor: process::out_of_the_way(one.into())?,
            is_open: false,
            tls: None,
            buffer: Box::new([0; BUFFER_BYTES]),
            start: 0,
            end: 0,
        })
    }

    pub(crate) fn descriptor(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Connects, with TLS if `tls` is given. A reply may take `patience`. `InvalidData`: the
    /// server's certificate is wrong.
    pub(crate) fn open(
        &mut self,
        place: &Endpoint,
        patience: Duration,
        tls: Option<&Tls>,
    ) -> io::Result<()> {
        self.close();
        let new: OwnedFd = match place {
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, CONNECT)?;
                stream.set_nodelay(true)?;
                stream.into()
            }
            Endpoint::Unix(path) => UnixStream::connect(path)?.into(),
        };
        sockopt::set_socket_timeout(&new, sockopt::Timeout::Recv, Some(patience))?;
        sockopt::set_socket_timeout(&new, sockopt::Timeout::Send, Some(patience))?;
        process::take_place(&new, &self.descriptor)?;
        if let Some(tls) = tls {
            let mut tls = tls.begin()?;
            while tls.is_handshaking() {
                tls.complete_io(&mut Socket(&self.descriptor))?;
            }
            self.tls = Some(Box::new(tls));
        }
        self.is_open = true;
        Ok(())
    }

    /// Closes the connection.
    pub(crate) fn close(&mut self) {
        if self.is_open {
            // An error means that the server has ended the connection.
            let _ = rustix::net::shutdown(&self.descriptor, Shutdown::Both);
        }
        self.forget();
    }

    /// Closes the connection in a fork, whose parent still uses it.
    pub(crate) fn forget(&mut self) {
        (self.is_open, self.start, self.end) = (false, 0, 0);
        self.tls = None;
    }

    /// Sends all bytes. `more`: the rest of the command follows.
    pub(crate) fn send(&mut self, bytes: &[u8], more: bool) -> Result<(), Fault> {
        let mut left = bytes;
        let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
        while self.is_open && !left.is_empty() {
            let sent = match &mut self.tls {
                Some(tls) => send_by(tls, &self.descriptor, left),
                None => rustix::net::send(&self.descriptor, left, flags),
            };
            match sent {
                Ok(sent) => left = &left[sent..],
                Err(Errno::INTR) => {}
                Err(_) => self.close(),
            }
        }
        if self.is_open { Ok(()) } else { Err(Fault::Down) }
    }

    fn receive(&mut self) -> Result<(), Fault> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == BUFFER_BYTES {
            self.buffer.copy_within(self.start.., 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.is_open {
            let room = &mut self.buffer[self.end..];
            match receive_by(&mut self.tls, &self.descriptor, room) {
                Ok(0) => self.close(),
                Ok(count) => {
                    self.end += count;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(_) => self.close(),
            }
        }
        Err(Fault::Down)
    }

    /// The range of the next line in the buffer, without its end.
    fn next_line(&mut self) -> Result<std::ops::Range<usize>, Fault> {
        loop {
            let there = &self.buffer[self.start..self.end];
            if let Some(at) = there.windows(2).position(|two| two == b"\r\n") {
                let line = self.start..self.start + at;
                self.start += at + 2;
                return Ok(line);
            }
            if there.len() > LINE_BYTES_MAX {
                self.close();
                return Err(Fault::Down);
            }
            self.receive()?;
        }
    }

    /// The first line of a reply.
    pub(crate) fn reply(&mut self) -> Result<Reply, Fault> {
        let line = self.next_line()?;
        reply(&self.buffer[line]).ok_or_else(|| {
            self.close();
            Fault::Down
        })
    }

    /// The first line of a reply. A refusal is an error.
    pub(crate) fn answer(&mut self) -> Result<Reply, Fault> {
        match self.reply()? {
            Reply::Error(refusal) => Err(Fault::Refused(refusal)),
            other => Ok(other),
        }
    }

    /// Takes the content of a [`Reply::Bulk`], whose length is that of `out`.
    pub(crate) fn bulk(&mut self, out: &mut [u8]) -> Result<(), Fault> {
        let mut at = 0;
        while at < out.len() {
            if self.start < self.end {
                let count = (self.end - self.start).min(out.len() - at);
                out[at..][..count].copy_from_slice(&self.buffer[self.start..][..count]);
                (self.start, at) = (self.start + count, at + count);
                continue;
            }
            match receive_by(&mut self.tls, &self.descriptor, &mut out[at..]) {
                Ok(count) if count > 0 => at += count,
                Err(Errno::INTR) => {}
                _ => {
                    self.close();
                    return Err(Fault::Down);
                }
            }
        }
        self.end_of_bulk()
    }

    fn end_of_bulk(&mut self) -> Result<(), Fault> {
        while self.end - self.start < 2 {
            self.receive()?;
        }
        if &self.buffer[self.start..][..2] != b"\r\n" {
            self.close();
            return Err(Fault::Down);
        }
        self.start += 2;
        Ok(())
    }

    /// Sends a command and takes the whole reply. Allocates.
    pub(crate) fn ask(&mut self, parts: &[&[u8]]) -> Result<Value, Fault> {
        self.send(&command(parts), false)?;
        self.value()
    }

    /// Takes a whole reply. Allocates.
    pub(crate) fn value(&mut self) -> Result<Value, Fault> {
        /// Replies to our commands have fewer bytes, and fewer parts.
        const MOST: usize = 64 << 20;
        let line = self.next_line()?;
        let text = String::from_utf8_lossy(&self.buffer[line.clone()][1..]).into_owned();
        let found = reply(&self.buffer[line]);
        let value = match found {
            Some(Reply::Status) => Value::Status(text),
            Some(Reply::Integer(number)) => Value::Integer(number),
            Some(Reply::Nil) => Value::Nil,
            Some(Reply::Error(refusal)) => Value::Error(refusal, text),
            Some(Reply::Bulk(count)) if count <= MOST => {
                let mut bytes = vec![0; count];
                self.bulk(&mut bytes)?;
                Value::Bulk(bytes)
            }
            Some(Reply::Array(count)) if count <= MOST => {
                Value::Array((0..count).map(|_| self.value()).collect::<Result<_, _>>()?)
            }
            _ => {
                self.close();
                return Err(Fault::Down);
            }
        };
        Ok(value)
    }
}

/// Encrypts and sends some bytes. Returns their number.
fn send_by(tls: &mut ClientConnection, descriptor: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
    let taken = tls.writer().write(bytes).map_err(|_| Errno::IO)?;
    flush(tls, descriptor)?;
    Ok(taken)
}

fn flush(tls: &mut ClientConnection, descriptor: &OwnedFd) -> Result<(), Errno> {
    while tls.wants_write() {
        match tls.write_tls(&mut Socket(descriptor)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => _ = other.map_err(|_| Errno::IO)?,
        }
    }
    Ok(())
}

/// Receives some bytes; 0 if the server has closed the connection.
fn receive_by(
    tls: &mut Option<Box<ClientConnection>>,
    descriptor: &OwnedFd,
    out: &mut [u8],
) -> Result<usize, Errno> {
    let Some(tls) = tls else {
        return rustix::net::recv(descriptor, out, RecvFlags::empty()).map(|(count, _)| count);
    };
    loop {
        match tls.reader().read(out) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other.map_err(|_| Errno::IO),
        }
        match tls.read_tls(&mut Socket(descriptor)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) => return Ok(0),
            other => _ = other.map_err(|_| Errno::IO)?,
        }
        tls.process_new_packets().map_err(|_| Errno::IO)?;
        flush(tls, descriptor)?;
    }
}

/// The connection, for the TLS library.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(self.0, out, RecvFlags::empty())?.0)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// A line to a server that answers each request with the next of these replies, in small
    /// pieces.
    fn line(answers: &'static [&'static [u8]]) -> (Line, thread::JoinHandle<()>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut line = Line::new().unwrap();
        line.open(&Endpoint::Unix(path), Duration::from_millis(200), None).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                let mut request = [0; 64];
                assert!(stream.read(&mut request).unwrap() > 0);
                for part in answer.chunks(3) {
                    // An error means that the line was closed after an earlier piece.
                    let _ = stream.write_all(part);
                    thread::yield_now();
                }
            }
        });
        (line, server)
    }

    #[test]
    fn replies_arrive_whole_however_they_are_cut() {
        let (mut line, server) =
            line(&[b"$5\r\nhello\r\n:7\r\n", b"*2\r\n$-1\r\n*1\r\n+OK\r\n", b"-OOM full\r\n"]);
        line.send(b"x", false).unwrap();
        assert_eq!(line.reply(), Ok(Reply::Bulk(5)));
        let mut out = [0; 5];
        line.bulk(&mut out).unwrap();
        assert_eq!((&out, line.reply()), (b"hello", Ok(Reply::Integer(7))));
        let inner = Value::Array(vec![Value::Status("OK".into())]);
        assert_eq!(line.ask(&[b"x"]), Ok(Value::Array(vec![Value::Nil, inner])));
        assert_eq!(line.ask(&[b"x"]), Ok(Value::Error(Refusal::Full, "OOM full".into())));
        assert!(line.is_open());
        server.join().unwrap();
    }

    #[test]
    fn a_server_that_says_nothing_or_nonsense_is_left() {
        let (mut line, server) = line(&[b"HTTP/1.1 400 Bad Request\r\n"]);
        line.send(b"x", false).unwrap();
        assert_eq!(line.reply(), Err(Fault::Down));
        assert!(!line.is_open());
        assert_eq!(line.send(b"x", false), Err(Fault::Down));
        server.join().unwrap();
    }

    #[test]
    fn a_reply_that_comes_too_late_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut line = Line::new().unwrap();
        let number = line.descriptor();
        line.open(&Endpoint::Unix(path.clone()), Duration::from_millis(20), None).unwrap();
        line.send(b"x", false).unwrap();
        assert_eq!(line.reply(), Err(Fault::Down));
        assert!(!line.is_open());
        line.open(&Endpoint::Unix(path), Duration::from_millis(20), None).unwrap();
        assert!(line.is_open() && line.descriptor() == number);
    }
}

//! RESP, the protocol of Valkey and Redis: encoding commands, and telling replies apart.
//!
//! A command is an array of strings. Nothing here allocates: a thread that needs a page must not
//! need memory first.

use std::io::{self, Write};

/// The maximum length of a key in bytes: `uz:`, a client, an epoch and a number.
pub(crate) const KEY_BYTES_MAX: usize = 128;

/// The maximum length of an encoded command with one key and a few numbers, in bytes.
pub(crate) const COMMAND_BYTES_MAX: usize = 320;

/// Writes the start of a command with this number of parts.
pub(crate) fn begin(out: &mut impl Write, parts: usize) -> io::Result<()> {
    write!(out, "*{parts}\r\n")
}

pub(crate) fn part(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    write!(out, "${}\r\n", bytes.len())?;
    out.write_all(bytes)?;
    out.write_all(b"\r\n")
}

/// A command in a vector, for the background thread.
pub(crate) fn command(parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(parts.iter().map(|part| part.len() + 16).sum());
    encode(&mut out, parts).expect("memory takes all bytes");
    out
}

fn encode(out: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    begin(out, parts.len())?;
    parts.iter().try_for_each(|bytes| part(out, bytes))
}

/// A command on the stack.
pub(crate) struct Short {
    bytes: [u8; COMMAND_BYTES_MAX],
    count: usize,
}

impl Short {
    /// A command of at most [`COMMAND_BYTES_MAX`] bytes.
    pub(crate) fn new(parts: &[&[u8]]) -> Self {
        let mut bytes = [0; COMMAND_BYTES_MAX];
        let mut out = &mut bytes[..];
        encode(&mut out, parts).expect("a key has a limit");
        let left = out.len();
        Self { bytes, count: COMMAND_BYTES_MAX - left }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.count]
    }
}

/// A number in decimal, on the stack.
pub(crate) struct Decimal {
    bytes: [u8; 20],
    start: usize,
}

impl Decimal {
    pub(crate) fn new(mut number: u64) -> Self {
        let mut bytes = [0; 20];
        let mut start = bytes.len();
        loop {
            start -= 1;
            bytes[start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return Self { bytes, start };
            }
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// The first line of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Done.
    Status,
    Integer(i64),
    /// A string of this number of bytes follows, and an end of line.
    Bulk(usize),
    Nil,
    /// This number of replies follows.
    Array(usize),
    Error(Refusal),
}

/// The reason of a server's refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another server has this key, now or soon.
    Elsewhere,
    /// The server cannot serve now: it loads, fails over, or its cluster has no majority.
    Later,
    /// `maxmemory` is reached.
    Full,
    /// Anything else: a command is missing, or not permitted.
    Other,
}

impl Refusal {
    fn of(text: &[u8]) -> Self {
        let begins = |words: &[&str]| words.iter().any(|word| text.starts_with(word.as_bytes()));
        match () {
            () if begins(&["MOVED", "ASK"]) => Self::Elsewhere,
            () if begins(&["OOM"]) => Self::Full,
            () if begins(&["LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "READONLY"]) => {
                Self::Later
            }
            () if begins(&["NOREPLICAS", "BUSY", "MISCONF"]) => Self::Later,
            () => Self::Other,
        }
    }
}

/// Parses the first line of a reply, without its end; `None` if it is no reply.
pub(crate) fn reply(line: &[u8]) -> Option<Reply> {
    let (kind, rest) = line.split_first()?;
    let number = || std::str::from_utf8(rest).ok()?.parse::<i64>().ok();
    Some(match kind {
        b'+' => Reply::Status,
        b'-' => Reply::Error(Refusal::of(rest)),
        b':' => Reply::Integer(number()?),
        b'$' | b'*' if number()? < 0 => Reply::Nil,
        b'$' => Reply::Bulk(number()? as usize),
        b'*' => Reply::Array(number()? as usize),
        _ => return None,
    })
}

/// The cluster's slot of a key: CRC16 (XMODEM), as the servers compute it. Braces would select a
/// part of a key, and our keys have none.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let crc = key.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % SLOTS as u16
}

/// Slots of a cluster.
pub(crate) const SLOTS: usize = 16384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_an_array_of_strings() {
        let expected = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n";
        assert_eq!(command(&[b"SET", b"k", b"\r\n"]), expected);
        assert_eq!(Short::new(&[b"SET", b"k", b"\r\n"]).bytes(), expected);
        for number in [0, 7, 10, 4_294_967_296, u64::MAX] {
            assert_eq!(Decimal::new(number).bytes(), number.to_string().as_bytes());
        }
    }

    #[test]
    fn the_longest_command_fits_on_the_stack() {
        let most = Decimal::new(u64::MAX);
        let parts: [&[u8]; 4] = [b"GETRANGE", &[b'k'; KEY_BYTES_MAX], most.bytes(), most.bytes()];
        assert!(Short::new(&parts).bytes().len() < COMMAND_BYTES_MAX);
    }

    #[test]
    fn replies_are_told_apart() {
        for (line, expected) in [
            ("+OK", Some(Reply::Status)),
            (":-3", Some(Reply::Integer(-3))),
            ("$0", Some(Reply::Bulk(0))),
            ("$-1", Some(Reply::Nil)),
            ("*2", Some(Reply::Array(2))),
            ("-MOVED 5 10.0.0.1:7001", Some(Reply::Error(Refusal::Elsewhere))),
            ("-OOM command not allowed", Some(Reply::Error(Refusal::Full))),
            ("-CLUSTERDOWN The cluster is down", Some(Reply::Error(Refusal::Later))),
            ("-ERR unknown command", Some(Reply::Error(Refusal::Other))),
            ("$x", None),
            ("", None),
            ("HTTP/1.1 400 Bad Request", None),
        ] {
            assert_eq!(reply(line.as_bytes()), expected, "{line}");
        }
    }

    /// The example in the specification of clusters.
    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12182);
    }
}

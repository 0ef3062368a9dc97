//! The first 128 bytes of a trace, and the errors for traces that cannot be used.
//!
//! All numbers are little-endian; docs/design/traces.md has the table of fields.

use crate::event::{EVENT_BYTES, PROCESSES_MAX};
use std::io;
use std::path::{Path, PathBuf};

pub(crate) const HEADER_BYTES: usize = 128;

const MAGIC: [u8; 8] = *b"uztrace\n";
const VERSION: u32 = 1;
/// A machine of the other byte order reads this number with its bytes reversed.
const ORDER: u32 = 0x0102_0304;

const ROOM_AT: usize = 24;
pub(crate) const CURSOR_AT: usize = 32;
const MEMORY_AT: usize = 40;
pub(crate) const PROCESSES_AT: usize = 48;
const COMPRESSOR_AT: usize = 56;
const PROGRAM_AT: usize = 88;
const NAME_BYTES: usize = 32;
const ZEROS_AT: usize = PROGRAM_AT + NAME_BYTES;

/// The program of a trace, and its number of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Events for which the file has room.
    pub room: u64,
    /// Events that the processes tried to write. Those beyond the room are lost.
    pub asked: u64,
    /// Memory for the pages of each recorded process, bytes.
    pub memory: u64,
    /// Processes that were recorded.
    pub processes: u64,
    /// The compressor of the sizes, with its level.
    pub compressor: String,
    /// The name of the program, cut to 32 bytes.
    pub program: String,
}

/// The reason why a trace cannot be read or made: one line, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// An error of the file system.
    #[error("{}: {source}; name a trace that can be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// An error of the file system.
    #[error("{}: {source}; name a file that is not there, in a folder with room for it", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file does not begin like a trace.
    #[error("{}: no trace of accesses; make one: uzswap record --accesses FILE -- COMMAND", .0.display())]
    Foreign(PathBuf),
    /// A trace of another version.
    #[error(
        "{}: a trace of version {version}, and this program reads version {VERSION}; record it \
         again, or use the uzswap that made it", path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The numbers are in the other byte order.
    #[error("{}: made on a machine of the other byte order; read it on such a machine", .0.display())]
    ByteOrder(PathBuf),
    /// The file is shorter than its header says.
    #[error(
        "{}: cut off: {found} of {wanted} bytes are there; copy it again from its origin",
        path.display()
    )]
    Cut {
        /// The file.
        path: PathBuf,
        /// Bytes that the file has.
        found: u64,
        /// Bytes that the file should have.
        wanted: u64,
    },
    /// A part of the file is impossible.
    #[error("{}: damaged: {part}; copy it again from its origin, or record it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The part.
        part: String,
    },
}

impl Header {
    /// Events in the file.
    pub fn events(&self) -> u64 {
        self.asked.min(self.room)
    }

    /// Events for which there was no room.
    pub fn lost(&self) -> u64 {
        self.asked - self.events()
    }

    pub(crate) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        let numbers = [VERSION, ORDER, HEADER_BYTES as u32, EVENT_BYTES as u32];
        for (at, number) in (MAGIC.len()..).step_by(size_of::<u32>()).zip(numbers) {
            put(at, &number.to_le_bytes());
        }
        put(ROOM_AT, &self.room.to_le_bytes());
        put(CURSOR_AT, &self.asked.to_le_bytes());
        put(MEMORY_AT, &self.memory.to_le_bytes());
        put(PROCESSES_AT, &self.processes.to_le_bytes());
        put(COMPRESSOR_AT, name(&self.compressor));
        put(PROGRAM_AT, name(&self.program));
        bytes
    }

    /// Parses and checks a header. `bytes` is the size of the whole file.
    pub(crate) fn read(path: &Path, start: &[u8], bytes: u64) -> Result<Self, TraceError> {
        if !start.starts_with(&MAGIC) {
            return Err(TraceError::Foreign(path.into()));
        }
        let cut = |wanted: u64| TraceError::Cut { path: path.into(), found: bytes, wanted };
        let Some((start, _)) = start.split_first_chunk::<HEADER_BYTES>() else {
            return Err(cut(HEADER_BYTES as u64));
        };
        let small = |at: usize| u32::from_le_bytes(part(start, at));
        let large = |at: usize| u64::from_le_bytes(part(start, at));
        match (small(8), small(12)) {
            (_, order) if order == ORDER.swap_bytes() => {
                return Err(TraceError::ByteOrder(path.into()));
            }
            (VERSION, _) => {}
            (version, _) => return Err(TraceError::Version { path: path.into(), version }),
        }
        let damaged = |part: String| TraceError::Damaged { path: path.into(), part };
        let sizes = [small(16), small(20)];
        if small(12) != ORDER || sizes != [HEADER_BYTES as u32, EVENT_BYTES as u32] {
            return Err(damaged("its header has sizes that version 1 has not".into()));
        }
        let header = Self {
            room: large(ROOM_AT),
            asked: large(CURSOR_AT),
            memory: large(MEMORY_AT),
            processes: large(PROCESSES_AT),
            compressor: text(&start[COMPRESSOR_AT..PROGRAM_AT]),
            program: text(&start[PROGRAM_AT..ZEROS_AT]),
        };
        if header.processes > PROCESSES_MAX || start[ZEROS_AT..].iter().any(|byte| *byte != 0) {
            return Err(damaged("its header has numbers that cannot be".into()));
        }
        let wanted = header.events().saturating_mul(EVENT_BYTES as u64);
        let wanted = wanted.saturating_add(HEADER_BYTES as u64);
        if bytes < wanted { Err(cut(wanted)) } else { Ok(header) }
    }
}

fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|byte| bytes[at + byte])
}

/// The beginning of a text that fits, in whole characters.
fn name(text: &str) -> &[u8] {
    let end = (0..=NAME_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text.as_bytes()[..end.unwrap_or(0)]
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    // A damaged name is shown, but cannot control the terminal.
    let text = String::from_utf8_lossy(&bytes[..end]);
    text.chars().map(|one| if one.is_control() { '?' } else { one }).collect()
}

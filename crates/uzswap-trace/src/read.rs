//! A finished trace, read and checked as a whole.

use crate::event::{EVENT_BYTES, Event, WORDS};
use crate::header::{HEADER_BYTES, Header, TraceError};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Its header.
    pub header: Header,
    /// The events, in the order in which they were written.
    pub events: Vec<Event>,
}

impl Trace {
    /// Reads a file. Fails if the file is not a trace, or if a part of it is impossible.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let bytes = fs::read(path);
        let bytes = bytes.map_err(|source| TraceError::Read { path: path.into(), source })?;
        Self::from_bytes(path, &bytes)
    }

    /// Parses a trace. `path` names it in errors.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, TraceError> {
        let header = Header::read(path, bytes, bytes.len() as u64)?;
        let damaged = |at: usize| {
            let part = format!("event {at} has values that no event has");
            TraceError::Damaged { path: path.into(), part }
        };
        let count = header.events() as usize;
        let slots = bytes[HEADER_BYTES..].as_chunks::<EVENT_BYTES>().0;
        let mut events = Vec::with_capacity(count);
        for (at, slot) in slots[..count].iter().enumerate() {
            let (words, _) = slot.as_chunks();
            let words: [u64; WORDS] = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
            let event = Event::from_words(words).map_err(|()| damaged(at))?;
            if event.is_some_and(|event| u64::from(event.process) >= header.processes) {
                return Err(damaged(at));
            }
            events.extend(event);
        }
        Ok(Self { header, events })
    }

    /// Writes the trace to a new file.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        let write = || {
            let mut file = BufWriter::new(create(path)?);
            self.write_to(&mut file)?;
            file.flush()
        };
        write().map_err(|source| TraceError::Write { path: path.into(), source })
    }

    fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        let room = self.events.len() as u64;
        let asked = room + self.header.lost();
        to.write_all(&Header { room, asked, ..self.header.clone() }.to_bytes())?;
        for word in self.events.iter().flat_map(|event| event.to_words()) {
            to.write_all(&word.to_le_bytes())?;
        }
        Ok(())
    }

    /// A trace of a range of its events; `None` if it has no such range.
    pub fn cut(&self, range: Range<usize>) -> Option<Self> {
        let events = self.events.get(range)?.to_vec();
        // A part has lost no events.
        let asked = events.len() as u64;
        Some(Self { header: Header { room: asked, asked, ..self.header.clone() }, events })
    }
}

/// Makes a file that only its owner may read, because the order of accesses may reveal a secret.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

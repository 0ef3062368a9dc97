//! The content of a segment: records, one after the other.
//!
//! ```text
//! offset  bytes
//!      0      4  owner: the swap entry
//!      4      4  the segment it was copied from by cleaning, plus one; 0: it came from the pool
//!      8      2  bytes of the object
//!     10      1  codec
//!     11      1  0x5a, so that a zeroed block is no record
//!     12      4  checksum of the page     | sealed: both encrypted
//!     16      …  the object               |
//!      …     16  the tag, if it is sealed
//! ```
//! Numbers are little-endian; records are padded to a multiple of 16, and may cross blocks. The
//! cache believes a record only if the entry that it names has the record's place. Cleaning finds a
//! record's owner by the header. A load checks the header, and so notices a read from a wrong
//! place.

use super::seal::{Generation, Identity, Seal, Tag};
use super::shape::Segment;
use crate::compress::Codec;
use crate::ids::{Place, SwapEntry};
use crate::object::{Extent, Form};
use crate::page::PAGE_BYTES;

pub(crate) const HEADER_BYTES: usize = 16;
pub(crate) const RECORD_BYTES_MAX: usize = HEADER_BYTES + PAGE_BYTES + size_of::<Tag>();

const MARK: u8 = 0x5a;
/// The offset of the encrypted part.
const SECRET: usize = 12;

const _: () = assert!(HEADER_BYTES as u64 == Place::UNIT, "so that objects are aligned too");

/// A record's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: SwapEntry,
    pub(crate) checksum: u32,
    pub(crate) form: Form,
    pub(crate) moved_from: Option<Segment>,
}

/// The layout of records, sealed or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Not encrypted.
    Plain,
    /// Encrypted, with a tag.
    Sealed,
}

impl Layout {
    /// Bytes behind the object.
    pub(crate) fn tag_bytes(self) -> usize {
        if self == Self::Sealed { size_of::<Tag>() } else { 0 }
    }

    /// Bytes of a record with an object of this form, without its padding.
    pub(crate) fn bytes(self, form: Form) -> usize {
        HEADER_BYTES + usize::from(form.bytes) + self.tag_bytes()
    }

    /// Bytes of a record on the backing.
    pub(crate) fn record_bytes(self, form: Form) -> usize {
        self.bytes(form).next_multiple_of(HEADER_BYTES)
    }
}

impl Record {
    pub(crate) fn write(&self, out: &mut [u8]) {
        out[0..4].copy_from_slice(&self.owner.0.to_le_bytes());
        let from = self.moved_from.map_or(0, |segment| segment.0 + 1);
        out[4..8].copy_from_slice(&from.to_le_bytes());
        out[8..10].copy_from_slice(&self.form.bytes.to_le_bytes());
        out[10] = self.form.codec as u8;
        out[11] = MARK;
        out[SECRET..HEADER_BYTES].copy_from_slice(&self.checksum.to_le_bytes());
    }

    /// True if `bytes` starts with the header of an object of this owner and form.
    pub(crate) fn is_of(bytes: &[u8], owner: SwapEntry, form: Form) -> bool {
        Self::read(bytes).is_some_and(|record| (record.owner, record.form) == (owner, form))
    }

    /// The header at the start of `bytes`, if there is one. `bytes` is not trusted.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i]));
        let length = u16::from_le_bytes([header[8], header[9]]);
        if header[11] != MARK || !(1..=PAGE_BYTES).contains(&usize::from(length)) {
            return None;
        }
        let codec = Codec::try_from_bits(header[10])?;
        let form = Form { bytes: length, codec };
        let moved_from = word(4).checked_sub(1).map(Segment);
        Some(Self { owner: SwapEntry(word(0)), checksum: word(SECRET), form, moved_from })
    }
}

/// Seals the records of a segment that is written at offset `start`.
pub(crate) fn seal_records(seal: &Seal, generation: Generation, start: u64, bytes: &mut [u8]) {
    let mut at = 0;
    while let Some(record) = record_at(bytes, at, Layout::Sealed) {
        let extent = Extent { place: Place::at(start + at as u64), form: record.form };
        let (secret, tag) = parts(&mut bytes[at..], record.form);
        *tag = seal.seal(Identity { owner: record.owner, extent, generation }, secret);
        at += Layout::Sealed.record_bytes(record.form);
    }
}

/// Opens a sealed record in place, if it has this identity, and returns the page's checksum.
pub(crate) fn open_record(seal: &Seal, identity: Identity, bytes: &mut [u8]) -> Option<u32> {
    let (secret, tag) = parts(bytes, identity.extent.form);
    let opened = seal.open(identity, secret, *tag);
    let checksum = secret.first_chunk().copied().map(u32::from_le_bytes);
    checksum.filter(|_| opened)
}

/// The encrypted part of a record, and its tag.
fn parts(record: &mut [u8], form: Form) -> (&mut [u8], &mut Tag) {
    let (secret, rest) =
        record[SECRET..].split_at_mut(HEADER_BYTES - SECRET + usize::from(form.bytes));
    (secret, rest.first_chunk_mut().expect("a whole record"))
}

/// The complete records at the start of `bytes`, each with its offset.
pub(crate) fn records(bytes: &[u8], layout: Layout) -> impl Iterator<Item = (usize, Record)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let here = at;
        let record = record_at(bytes, here, layout)?;
        at += layout.record_bytes(record.form);
        Some((here, record))
    })
}

/// The record at an offset, if it is complete.
pub(crate) fn record_at(bytes: &[u8], at: usize, layout: Layout) -> Option<Record> {
    let record = Record::read(bytes.get(at..)?)?;
    (at + layout.record_bytes(record.form) <= bytes.len()).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_end_at_bytes_that_are_no_record() {
        for layout in [Layout::Plain, Layout::Sealed] {
            round_trip(layout);
        }
    }

    fn round_trip(layout: Layout) {
        let mut segment = vec![0; 16384];
        let mut at = 0;
        let all: Vec<Record> = Codec::ALL
            .into_iter()
            .zip([1, 16, 1000, PAGE_BYTES as u16])
            .map(|(codec, bytes)| Record {
                owner: SwapEntry(u32::from(bytes) * 7),
                checksum: 0xdead_beef,
                form: Form { bytes, codec },
                moved_from: (bytes == 16).then_some(Segment(0)),
            })
            .collect();
        for record in &all {
            record.write(&mut segment[at..]);
            at += layout.record_bytes(record.form);
        }
        let read: Vec<_> = records(&segment, layout).collect();
        assert_eq!(read.iter().map(|(_, r)| *r).collect::<Vec<_>>(), all);
        assert_eq!(read[2].0, 2 * (32 + layout.tag_bytes()));
        assert_eq!(
            records(&segment[..at - 1], layout).count(),
            3,
            "a record that is cut off is none"
        );
        segment[8..10].copy_from_slice(&5000u16.to_le_bytes());
        assert_eq!(records(&segment, layout).count(), 0);
    }
}

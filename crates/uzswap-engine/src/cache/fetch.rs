//! From an entry back to its page.
//!
//! ```text
//! lock → fetch: copy out what the entry refers to → unlock → give: decompress, verify
//! ```
//! The lock is held while an object is copied, not while it is decompressed. `read_back` reads
//! records from the backing.

use super::{Cache, Load};
use crate::backing::record::RECORD_BYTES_MAX;
use crate::compress::{UNIT_BYTES_MAX, Undecodable, UnitDecoder};
use crate::counters::Counter::*;
use crate::error::Error;
use crate::ids::SwapEntry;
use crate::index::{LockedEntry, State, UnitMember};
use crate::object::{Extent, Form, Object};
use crate::page::{Page, Pattern, checksum_of, content_hash};
use crate::percpu::Here;
use crate::pool::Header;
use crate::scratch::Scratch;
use crate::unit::Units;

/// The data of a page, copied while its entry was locked.
pub(crate) enum Fetched<'a> {
    Absent,
    Filled(Pattern),
    /// An object, in `scratch.object`.
    Object {
        scratch: Here<'a, Scratch>,
        form: Form,
        checksum: u32,
    },
    /// A page of a unit; `scratch` has the part of the unit that the page needs.
    Member {
        scratch: Here<'a, Scratch>,
        bytes: usize,
        position: u8,
        checksum: u32,
    },
}

/// Checks that a decoded page is the one that was stored.
pub(crate) fn verify(
    decoded: Result<(), Undecodable>,
    checksum: u32,
    page: &Page,
) -> Result<(), &'static str> {
    decoded.map_err(|Undecodable| "it does not decompress")?;
    if checksum_of(content_hash(page)) != checksum {
        return Err("its checksum does not match");
    }
    Ok(())
}

impl Cache {
    /// Copies out everything that a locked entry refers to. The caller may then unlock the entry.
    pub(crate) fn fetch(
        &self,
        key: SwapEntry,
        locked: &mut LockedEntry<'_>,
    ) -> Result<Fetched<'_>, Error> {
        match locked.state() {
            State::Absent => Ok(Fetched::Absent),
            State::Filled(pattern) => Ok(Fetched::Filled(pattern)),
            State::Pooled(object) => {
                let mut scratch = self.scratch.lock_here();
                let bytes = usize::from(object.form.bytes);
                let Header { checksum, .. } =
                    self.pool.read(object.handle, &mut scratch.object[..bytes]);
                locked.touched();
                Ok(Fetched::Object { scratch, form: object.form, checksum })
            }
            State::Placed(extent) => self.fetch_placed(key, locked.proof(), extent),
            State::Member(member) => self.fetch_member(key, locked.proof() as u32, member),
            // The share record stays while this entry, which shares it, is locked.
            State::Shared(record) => {
                self.fetch(record, &mut self.index.view().lock_existing(record))
            }
        }
    }

    /// Copies out the part of a unit that a page needs. Its entry is locked, so the unit stays.
    fn fetch_member(
        &self,
        key: SwapEntry,
        checksum: u32,
        member: UnitMember,
    ) -> Result<Fetched<'_>, Error> {
        let mut unit = [0; UNIT_BYTES_MAX];
        let (mut there, mut needed) = (0, 1);
        for piece in Units::pieces(member.unit) {
            if there >= needed {
                break;
            }
            let read = self.fetch_piece(piece, &mut unit[there..])?;
            there += read.ok_or_else(|| self.damaged(key, "a piece of its unit is missing"))?;
            needed = UnitDecoder::bytes_for(&unit[..there], member.position.into())
                .ok_or_else(|| self.damaged(key, "it is not in its unit"))?;
        }
        if there < needed {
            return Err(self.damaged(key, "its unit is too short"));
        }
        let mut scratch = self.scratch.lock_here();
        scratch.keep_unit(&unit[..needed]);
        Ok(Fetched::Member { scratch, bytes: needed, position: member.position, checksum })
    }

    /// Copies out a piece of a unit. Returns its length, or `None` if it is absent or too long.
    pub(crate) fn fetch_piece(
        &self,
        piece: SwapEntry,
        out: &mut [u8],
    ) -> Result<Option<usize>, Error> {
        let view = self.index.view();
        let mut locked = view.lock_existing(piece);
        let form = match locked.state() {
            State::Pooled(Object { form, .. }) | State::Placed(Extent { form, .. }) => form,
            _ => return Ok(None),
        };
        let Some(out) = out.get_mut(..form.bytes.into()) else { return Ok(None) };
        match locked.state() {
            State::Pooled(object) => {
                self.pool.read(object.handle, out);
                locked.touched();
            }
            State::Placed(extent) => {
                let mut record = [0; RECORD_BYTES_MAX];
                let proof = locked.proof();
                out.copy_from_slice(self.read_record(piece, extent, proof, &mut record)?.object);
            }
            _ => return Ok(None),
        }
        Ok(Some(out.len()))
    }

    /// Decompresses the fetched page, and verifies it.
    pub(crate) fn give(
        &self,
        key: SwapEntry,
        fetched: Fetched<'_>,
        page: &mut Page,
    ) -> Result<Load, Error> {
        match fetched {
            Fetched::Absent => {
                self.counters.increment(Absent);
                return Ok(Load::Absent);
            }
            Fetched::Filled(pattern) => {
                self.counters.increment(LoadsFilled);
                pattern.fill(page);
            }
            Fetched::Object { mut scratch, form, checksum } => {
                let decoded = scratch.decompress(form.codec, form.bytes.into(), page);
                drop(scratch);
                self.verify(key, decoded, checksum, page)?;
            }
            Fetched::Member { mut scratch, bytes, position, checksum } => {
                let decoded = scratch.decompress_member(bytes, position, page);
                drop(scratch);
                self.verify(key, decoded, checksum, page)?;
                self.counters.increment(LoadsRecompressed);
            }
        }
        self.counters.increment(Loads);
        Ok(Load::Hit)
    }

    fn verify(
        &self,
        key: SwapEntry,
        decoded: Result<(), Undecodable>,
        checksum: u32,
        page: &Page,
    ) -> Result<(), Error> {
        verify(decoded, checksum, page).map_err(|what| self.damaged(key, what))
    }

    pub(crate) fn damaged(&self, key: SwapEntry, what: &'static str) -> Error {
        self.counters.increment(DecompressFail);
        Error::Damaged { entry: key.0, what }
    }
}

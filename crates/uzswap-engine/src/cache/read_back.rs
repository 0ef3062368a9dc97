//! Reads pages back from the backing, one record at a time.
//!
//! The index has the place of a record, its form and its *proof*: the page's checksum or, where
//! records are sealed, the generation of its write. Nothing that the record says of itself is
//! believed.

use super::Cache;
use super::fetch::Fetched;
use crate::backing::record::{HEADER_BYTES, RECORD_BYTES_MAX, Record, open_record};
use crate::backing::seal::{Generation, Identity};
use crate::backing::shape::Slot;
use crate::counters::Counter::*;
use crate::error::Error;
use crate::ids::SwapEntry;
use crate::object::Extent;
use crate::page::{Page, checksum_of, content_hash};

pub(crate) struct OpenRecord<'a> {
    pub(crate) object: &'a [u8],
    /// The page's checksum.
    pub(crate) checksum: u32,
}

impl Cache {
    pub(crate) fn fetch_placed(
        &self,
        key: SwapEntry,
        proof: u64,
        extent: Extent,
    ) -> Result<Fetched<'_>, Error> {
        let mut record = [0; RECORD_BYTES_MAX];
        let OpenRecord { object, checksum } = self.read_record(key, extent, proof, &mut record)?;
        let mut scratch = self.scratch.lock_here();
        scratch.object[..object.len()].copy_from_slice(object);
        Ok(Fetched::Object { scratch, form: extent.form, checksum })
    }

    /// Reads a record. Its entry is locked, so the record can be neither cleaned away nor
    /// overwritten.
    pub(crate) fn read_record<'a>(
        &self,
        key: SwapEntry,
        extent: Extent,
        proof: u64,
        record: &'a mut [u8; RECORD_BYTES_MAX],
    ) -> Result<OpenRecord<'a>, Error> {
        let record = &mut record[..self.slots.bytes_to_read(extent)];
        let byte = extent.place.byte();
        if let Err(source) = self.backing.read(byte, record) {
            self.counters.increment(ReadFail);
            return Err(Error::Backing { entry: key.0, source });
        }
        self.counters.increment(BackingReads);
        self.counters.increment(LoadsBacking);
        self.counters.add(BackingBytesRead, record.len() as i64);
        let what = match self.open_read(key, extent, proof, record) {
            // The borrow of the checked record ends here: it is opened already.
            Ok(OpenRecord { checksum, .. }) => {
                return Ok(self.opened(extent, record, checksum));
            }
            Err(what) => what,
        };
        match self.backing.read_other(byte, record) {
            Some(Ok(())) => {}
            Some(Err(_)) | None => return Err(self.damaged(key, what)),
        }
        self.open_read(key, extent, proof, record).map_err(|what| self.damaged(key, what))
    }

    /// A record that has been opened in place.
    fn opened<'a>(&self, extent: Extent, record: &'a [u8], checksum: u32) -> OpenRecord<'a> {
        let header = if self.slots.is_single(extent.place) { 0 } else { HEADER_BYTES };
        OpenRecord { object: &record[header..][..extent.form.bytes.into()], checksum }
    }

    /// The content of a record, decrypted in place, or the reason why it is not the record that was
    /// written. Its entry is locked.
    pub(crate) fn open_read<'a>(
        &self,
        owner: SwapEntry,
        extent: Extent,
        proof: u64,
        record: &'a mut [u8],
    ) -> Result<OpenRecord<'a>, &'static str> {
        if self.slots.is_single(extent.place) {
            return self.open_single(owner, extent, proof, record);
        }
        if !Record::is_of(record, owner, extent.form) {
            return Err("the backing returned another record");
        }
        let checksum = match &self.seal {
            Some(seal) => {
                let identity = Identity { owner, extent, generation: Generation(proof) };
                open_record(seal, identity, record).ok_or(NOT_WHAT_WAS_WRITTEN)?
            }
            None => proof as u32,
        };
        let object = &record[HEADER_BYTES..][..extent.form.bytes.into()];
        Ok(OpenRecord { object, checksum })
    }

    /// Opens a page written through, which has a slot to itself and no header.
    fn open_single<'a>(
        &self,
        owner: SwapEntry,
        extent: Extent,
        proof: u64,
        object: &'a mut [u8],
    ) -> Result<OpenRecord<'a>, &'static str> {
        let Some(seal) = &self.seal else {
            return Ok(OpenRecord { object, checksum: proof as u32 });
        };
        let tag = self.slots.tag(Slot::at(extent.place.byte()));
        let identity = Identity { owner, extent, generation: Generation(proof) };
        if !seal.open(identity, object, tag) {
            return Err(NOT_WHAT_WAS_WRITTEN);
        }
        let page: &Page = (&*object).try_into().expect("a slot holds a page");
        Ok(OpenRecord { object, checksum: checksum_of(content_hash(page)) })
    }
}

const NOT_WHAT_WAS_WRITTEN: &str = "the backing returned other bytes than were written there";

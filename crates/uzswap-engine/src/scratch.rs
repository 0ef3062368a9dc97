//! What a thread needs while it compresses or decompresses a page: one of it per CPU.

use crate::compress::{
    Algorithm, Codec, Codecs, Dictionaries, Encoder, Trial, UNIT_BYTES_MAX, Undecodable,
    UnitDecoder,
};
use crate::page::{PAGE_BYTES, Page};
use std::sync::Arc;

/// Contexts and buffers. Never held while waiting for anything but the CPU.
pub(crate) struct Scratch {
    codecs: Codecs,
    /// The object just made: its size is known only now, so it cannot be made in place.
    made: Page,
    /// A copy of an object in the pool: decoders get memory that nobody else can write.
    pub(crate) object: Page,
    /// A page decompressed for comparison.
    pub(crate) page: Page,
    /// For pages in units; made with the first unit.
    unit: Option<Box<UnitScratch>>,
}

struct UnitScratch {
    decoder: UnitDecoder,
    /// A copy of a unit, as much as is needed of it.
    bytes: [u8; UNIT_BYTES_MAX],
}

impl Scratch {
    pub(crate) fn new(algorithm: Algorithm, dictionaries: Arc<Dictionaries>) -> Self {
        Self {
            codecs: Codecs::with_dictionaries(algorithm, dictionaries),
            made: [0; PAGE_BYTES],
            object: [0; PAGE_BYTES],
            page: [0; PAGE_BYTES],
            unit: None,
        }
    }

    /// Makes what [`Self::decompress_member`] needs, once. Allocates.
    pub(crate) fn provision_units(&mut self) {
        let make = || UnitScratch { decoder: UnitDecoder::new(), bytes: [0; UNIT_BYTES_MAX] };
        self.unit.get_or_insert_with(|| Box::new(make()));
    }

    /// Keeps a copy of a unit's start for [`Self::decompress_member`].
    pub(crate) fn keep_unit(&mut self, bytes: &[u8]) {
        let unit = self.unit.as_mut().expect("made before the first unit");
        unit.bytes[..bytes.len()].copy_from_slice(bytes);
    }

    /// Decompresses a page of the unit kept, of which `bytes` are there.
    pub(crate) fn decompress_member(
        &mut self,
        bytes: usize,
        position: u8,
        page: &mut Page,
    ) -> Result<(), Undecodable> {
        let unit = self.unit.as_mut().expect("made before the first unit");
        unit.decoder.page(&unit.bytes[..bytes], position.into(), page).map(drop)
    }

    pub(crate) fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.codecs.set_algorithm(algorithm);
    }

    /// See [`Codecs::use_dictionary`].
    pub(crate) fn use_dictionary(&mut self, encoder: Option<Arc<Encoder>>) {
        self.codecs.use_dictionary(encoder);
    }

    /// See [`Codecs::take_trial`].
    pub(crate) fn take_trial(&mut self) -> Option<Trial> {
        self.codecs.take_trial()
    }

    /// Compresses a page to at most `bytes_max`, if it can be.
    pub(crate) fn compress(&mut self, page: &Page, bytes_max: usize) -> Option<(Codec, &[u8])> {
        let (codec, bytes) = self.codecs.compress(page, &mut self.made[..bytes_max])?;
        Some((codec, &self.made[..bytes]))
    }

    /// Decompresses the first `bytes` of `self.object` into `page`.
    pub(crate) fn decompress(
        &mut self,
        codec: Codec,
        bytes: usize,
        page: &mut Page,
    ) -> Result<(), Undecodable> {
        self.codecs.decompress(codec, &self.object[..bytes], page)
    }

    /// Decompresses the first `bytes` of `self.object` into `self.page`.
    pub(crate) fn decompress_here(
        &mut self,
        codec: Codec,
        bytes: usize,
    ) -> Result<(), Undecodable> {
        self.codecs.decompress(codec, &self.object[..bytes], &mut self.page)
    }
}

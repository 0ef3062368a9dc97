//! Zstandard: frames without magic number or content checksum. The frame takes 6 bytes for each
//! page, and 7 if it names a dictionary.

use super::dictionary::{Dictionaries, Encoder, dictionary_of};
use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
use std::sync::Arc;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

/// One page in this many is compressed with and without the dictionary, to measure the gain. This
/// costs 3 % of the time.
const TRIAL_PAGES: u32 = 32;

/// With a dictionary, zstd uses the dictionary's statistics of small pages, which make large
/// objects larger than necessary. An object above this is also made without the dictionary, and the
/// smaller object is kept.
const SURE_BYTES: usize = PAGE_BYTES / 4;

/// The start of a frame, which zstd writes with a dictionary; it is cut off here.
const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

pub(super) struct Zstd {
    plain: Plain,
    decompress: DCtx<'static>,
    pub(super) dictionaries: Arc<Dictionaries>,
    with: Option<WithDictionary>,
    /// The number of pages so far.
    pages: u32,
    /// The trial of the last page, if that page was one.
    pub(super) trial: Option<Trial>,
}

/// The bytes of one page with the dictionary in use, and without it. They are the same if there is
/// no dictionary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trial {
    pub(crate) with: usize,
    pub(crate) without: usize,
}

/// Compresses without a dictionary.
pub(super) struct Plain {
    context: CCtx<'static>,
    level: i32,
}

/// Compresses with a dictionary.
pub(crate) struct WithDictionary {
    encoder: Arc<Encoder>,
    context: CCtx<'static>,
    /// A frame, with its magic number.
    frame: [u8; MAGIC.len() + PAGE_BYTES],
}

impl Zstd {
    const LEVEL: i32 = -1;

    pub(super) fn new(dictionaries: Arc<Dictionaries>) -> Self {
        let mut decompress = DCtx::create();
        let set = decompress.set_parameter(DParameter::Format(FrameFormat::Magicless));
        debug_assert!(set.is_ok());
        Self {
            plain: Plain::new(Self::LEVEL),
            decompress,
            dictionaries,
            with: None,
            pages: 0,
            trial: None,
        }
    }

    /// Exchanges the contexts for those of another level.
    pub(super) fn exchange(&mut self, plain: &mut Plain) {
        std::mem::swap(&mut self.plain, plain);
    }

    /// Compresses without a dictionary and without a trial.
    pub(super) fn compress_plain(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        self.plain.context.compress2(out, page).ok()
    }

    pub(super) fn level(&self) -> i32 {
        self.plain.level
    }

    /// True if zstd compresses with this dictionary.
    pub(super) fn uses_dictionary(&self, encoder: Option<&Arc<Encoder>>) -> bool {
        let used = self.with.as_ref().map(|with| &with.encoder);
        used.map(Arc::as_ptr) == encoder.map(Arc::as_ptr)
    }

    /// Exchanges the dictionary for another, or for none.
    pub(super) fn exchange_dictionary(&mut self, with: &mut Option<WithDictionary>) {
        std::mem::swap(&mut self.with, with);
    }
}

impl Plain {
    /// A context that does not allocate later. A context of zstd allocates at its first page. It
    /// allocates again when another level needs more memory, or has needed much less for a hundred
    /// pages. Each level therefore has a context of its own, which has seen a page.
    pub(super) fn new(level: i32) -> Self {
        let mut context = CCtx::create();
        for parameter in
            [CParameter::Format(FrameFormat::Magicless), CParameter::CompressionLevel(level)]
        {
            let set = context.set_parameter(parameter);
            debug_assert!(set.is_ok(), "every level that `levels` lists is one of the library's");
        }
        let compressed = context.compress2(&mut [0; PAGE_BYTES][..], &[0; PAGE_BYTES]);
        debug_assert!(compressed.is_ok());
        Self { context, level }
    }
}

impl WithDictionary {
    /// `None` if there is no memory for a context: then pages are compressed without a dictionary.
    pub(crate) fn new(encoder: Arc<Encoder>) -> Option<Self> {
        let frame = [0; MAGIC.len() + PAGE_BYTES];
        let mut with = Self { encoder, context: CCtx::try_create()?, frame };
        // Compresses a page now, so that no later call allocates: see `Plain`.
        with.compress(&[0; PAGE_BYTES])?;
        Some(with)
    }

    /// Compresses with the dictionary, if possible.
    fn compress(&mut self, page: &Page) -> Option<&[u8]> {
        // The function that takes a dictionary by reference has no parameter for the format.
        let made =
            self.context.compress_using_cdict(&mut self.frame[..], page, &self.encoder.prepared);
        self.frame[..made.ok()?].strip_prefix(&MAGIC)
    }
}

impl Compressor for Zstd {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        self.pages = self.pages.wrapping_add(1);
        let is_trial = self.pages.is_multiple_of(TRIAL_PAGES);
        let with = self.with.as_mut().filter(|with| is_trial || with.encoder.is_worth_it());
        let object = with.and_then(|with| with.compress(page));
        let object = object.filter(|object| object.len() <= out.len());
        let is_sure = object.is_some_and(|object| object.len() <= SURE_BYTES);
        let mut plain = || self.plain.context.compress2(&mut *out, page).ok();
        let without = if is_trial || !is_sure { plain() } else { None };
        let best = match object {
            Some(object) if without.is_none_or(|bytes| bytes >= object.len()) => {
                out[..object.len()].copy_from_slice(object);
                Some(object.len())
            }
            _ => without,
        };
        if is_trial {
            let sure = object.filter(|_| is_sure).map(<[u8]>::len);
            let with = sure.or(best).unwrap_or(PAGE_BYTES);
            self.trial = Some(Trial { with, without: without.unwrap_or(PAGE_BYTES) });
        }
        best
    }

    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        let decoded = match dictionary_of(object) {
            None => self.decompress.decompress(&mut page[..], object),
            Some(number) => {
                let decoder = self.dictionaries.decoder(number).ok_or(Undecodable)?;
                self.decompress.decompress_using_ddict(&mut page[..], object, decoder)
            }
        };
        match decoded {
            Ok(PAGE_BYTES) => Ok(()),
            _ => Err(Undecodable),
        }
    }
}

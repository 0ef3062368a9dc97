//! Zstandard: frames without magic number, content checksum or dictionary id, so 5 bytes of frame
//! to a page.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

pub(super) struct Zstd {
    compress: CCtx<'static>,
    decompress: DCtx<'static>,
    level: i32,
}

impl Zstd {
    const LEVEL: i32 = -1;

    pub(super) fn new() -> Self {
        let mut decompress = DCtx::create();
        let set = decompress.set_parameter(DParameter::Format(FrameFormat::Magicless));
        debug_assert!(set.is_ok());
        Self { compress: context(Self::LEVEL), decompress, level: Self::LEVEL }
    }

    pub(super) fn set_level(&mut self, level: i32) {
        if level != self.level {
            self.compress = context(level);
            self.level = level;
        }
    }
}

/// A context that allocates no more. One takes its memory with its first page, and again when
/// another level needs more, or has needed much less for a hundred pages: so each level has a
/// context of its own, which has seen a page.
fn context(level: i32) -> CCtx<'static> {
    let mut context = CCtx::create();
    for parameter in
        [CParameter::Format(FrameFormat::Magicless), CParameter::CompressionLevel(level)]
    {
        let set = context.set_parameter(parameter);
        debug_assert!(set.is_ok(), "every level that `levels` lists is one of the library's");
    }
    let compressed = context.compress2(&mut [0; PAGE_BYTES][..], &[0; PAGE_BYTES]);
    debug_assert!(compressed.is_ok());
    context
}

impl Compressor for Zstd {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        self.compress.compress2(out, page).ok()
    }

    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        match self.decompress.decompress(&mut page[..], object) {
            Ok(PAGE_BYTES) => Ok(()),
            _ => Err(Undecodable),
        }
    }
}

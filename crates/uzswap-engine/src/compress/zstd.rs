//! Zstandard: frames without magic number, content checksum or dictionary id, so 5 bytes of frame
//! to a page.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

pub(super) struct Zstd {
    compress: CCtx<'static>,
    decompress: DCtx<'static>,
}

impl Zstd {
    pub(super) fn new() -> Self {
        let mut compress = CCtx::create();
        let mut decompress = DCtx::create();
        let set = compress.set_parameter(CParameter::Format(FrameFormat::Magicless));
        debug_assert!(set.is_ok());
        let set = decompress.set_parameter(DParameter::Format(FrameFormat::Magicless));
        debug_assert!(set.is_ok());
        Self { compress, decompress }
    }

    pub(super) fn set_level(&mut self, level: i32) {
        let set = self.compress.set_parameter(CParameter::CompressionLevel(level));
        debug_assert!(set.is_ok(), "every level that `levels` lists is one of the library's");
    }
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

//! Raw deflate, by libdeflate.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
use libdeflater::{CompressionLvl, Decompressor};

pub(super) struct Deflate {
    compress: libdeflater::Compressor,
    decompress: Decompressor,
    level: i32,
}

impl Deflate {
    const LEVEL: i32 = 1;

    pub(super) fn new() -> Self {
        Self { compress: context(Self::LEVEL), decompress: Decompressor::new(), level: Self::LEVEL }
    }

    pub(super) fn set_level(&mut self, level: i32) {
        if level != self.level {
            self.compress = context(level);
            self.level = level;
        }
    }
}

fn context(level: i32) -> libdeflater::Compressor {
    let level = CompressionLvl::new(level).expect("`levels` lists only levels of the library");
    libdeflater::Compressor::new(level)
}

impl Compressor for Deflate {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        self.compress.deflate_compress(page, out).ok()
    }

    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        match self.decompress.deflate_decompress(object, page) {
            Ok(PAGE_BYTES) => Ok(()),
            _ => Err(Undecodable),
        }
    }
}

//! Raw deflate, by libdeflate.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
use libdeflater::{CompressionLvl, Decompressor};

pub(super) struct Deflate {
    compress: libdeflater::Compressor,
    decompress: Decompressor,
}

impl Deflate {
    pub(super) const LEVEL: i32 = 1;

    pub(super) fn new(level: i32) -> Self {
        let level = CompressionLvl::new(level).expect("`levels` lists only levels of the library");
        Self { compress: libdeflater::Compressor::new(level), decompress: Decompressor::new() }
    }
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

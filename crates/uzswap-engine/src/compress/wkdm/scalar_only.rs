//! The scalar form alone, for processors other than x86-64.
//!
//! The vector form needs instructions that NEON lacks: they find the lanes of a register with equal
//! values, and bring chosen lanes together.

use super::Parts;
use crate::page::Page;

/// The vector form, which does not exist here.
#[derive(Clone, Copy)]
pub(super) enum Vector {}

impl Vector {
    pub(super) fn detect() -> Option<Self> {
        None
    }

    pub(super) fn compress(self, _: &mut Parts, _: &Page, _: &mut [u8]) -> Option<usize> {
        match self {}
    }

    pub(super) fn decompress(self, _: &mut Parts, _: &[u8], _: &mut Page) -> Option<()> {
        match self {}
    }
}

//! Objects: the bytes of a page as a codec made them, or a piece of a unit of pages.

use crate::compress::Codec;
use crate::ids::{Handle, Place};
use crate::page::PAGE_BYTES;

/// An object of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) handle: Handle,
    pub(crate) form: Form,
}

/// A record on the backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) place: Place,
    pub(crate) form: Form,
}

/// The length and codec of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Form {
    /// Bytes of the object, 1 to [`PAGE_BYTES`].
    pub(crate) bytes: u16,
    pub(crate) codec: Codec,
}

const _: () = assert!(PAGE_BYTES < 1 << Form::BYTES_BITS);

impl Form {
    const BYTES_BITS: u32 = 13;
    /// Width of a form in a word.
    pub(crate) const BITS: u32 = Self::BYTES_BITS + Codec::BITS;

    pub(crate) fn to_bits(self) -> u64 {
        debug_assert!((1..=PAGE_BYTES).contains(&usize::from(self.bytes)));
        u64::from(self.codec as u8) << Self::BYTES_BITS | u64::from(self.bytes)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self {
            bytes: (bits & ((1 << Self::BYTES_BITS) - 1)) as u16,
            codec: Codec::from_bits((bits >> Self::BYTES_BITS) as u8 & ((1 << Codec::BITS) - 1)),
        }
    }
}

//! A vector in a region.

#![expect(
    unsafe_code,
    reason = "unmapping by address; a region as a slice: the caller's promise; zeros are a valid value, without a destructor"
)]

use crate::error::Error;
use crate::pager::Pager;
use crate::region::{Advice, Pinned, Region};
use bytemuck::Zeroable;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

/// Values of a type without a destructor, in a region: a slice like any other.
///
/// Ranges of its methods are of elements.
pub struct RegionVec<T> {
    region: Region,
    len: usize,
    values: PhantomData<T>,
}

impl Pager {
    /// A vector of `len` zeros in a region of its own.
    ///
    /// A type that must be dropped is refused when the program is compiled.
    pub fn vec_zeroed<T: bytemuck::Zeroable>(&self, len: usize) -> Result<RegionVec<T>, Error> {
        RegionVec::zeroed(self, len)
    }
}

impl<T: Zeroable> RegionVec<T> {
    fn zeroed(pager: &Pager, len: usize) -> Result<Self, Error> {
        const {
            assert!(!std::mem::needs_drop::<T>(), "a type in a region has no destructor");
            assert!(align_of::<T>() <= 4096, "a type in a region is aligned to a page at most");
        }
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::Addresses {
            bytes: usize::MAX,
            max: pager.inner().cache.pages_max() as u64 * 4096,
        })?;
        let region = pager.map(bytes.max(1))?;
        Ok(Self { region, len, values: PhantomData })
    }
}

impl<T> RegionVec<T> {
    /// The region of this vector.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// [`crate::RegionRef::pin`] of a range of elements.
    pub fn pin(&self, range: Range<usize>) -> Result<Pinned, Error> {
        self.region.pin(self.bytes(range))
    }

    /// [`crate::RegionRef::touch`] of a range of elements.
    pub fn touch(&self, range: Range<usize>) -> Result<(), Error> {
        self.region.touch(self.bytes(range))
    }

    /// [`crate::RegionRef::advise`] of a range of elements, other than
    /// [`Advice::DontNeed`], which changes them: see [`Self::clear`].
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Error> {
        match advice {
            Advice::DontNeed => Ok(()),
            other => self.region.advise(self.bytes(range), other),
        }
    }

    fn bytes(&self, range: Range<usize>) -> Range<usize> {
        let byte = |at: usize| at.saturating_mul(size_of::<T>());
        byte(range.start)..byte(range.end)
    }
}

impl<T: Zeroable> RegionVec<T> {
    /// Sets a range of elements to zeros, and gives the memory of whole pages back.
    pub fn clear(&mut self, range: Range<usize>) -> Result<(), Error> {
        let bytes = self.bytes(range.clone());
        self.region.advise(bytes.clone(), Advice::DontNeed)?;
        // The content of pages that the range covers only in part.
        let page = 4096;
        let elements = |bytes: Range<usize>| {
            let size = size_of::<T>().max(1);
            (bytes.start / size).max(range.start)..bytes.end.div_ceil(size).min(range.end)
        };
        let head = elements(bytes.start..bytes.start.next_multiple_of(page).min(bytes.end));
        let tail = elements((bytes.end / page * page).max(bytes.start)..bytes.end);
        for part in [head, tail] {
            self[part].fill_with(T::zeroed);
        }
        Ok(())
    }
}

impl<T> Deref for RegionVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the region has that many bytes, is aligned to more than a page, and holds values:
        // zeros at first, which are valid (`Zeroable`), or values written through `deref_mut`. It
        // is only changed otherwise by methods that borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().cast().as_ptr(), self.len) }
    }
}

impl<T> DerefMut for RegionVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.region.as_ptr().cast().as_ptr(), self.len) }
    }
}

impl<T: fmt::Debug> fmt::Debug for RegionVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionVec").field("len", &self.len).field("region", &self.region).finish()
    }
}

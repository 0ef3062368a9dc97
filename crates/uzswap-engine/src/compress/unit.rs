//! Sixteen pages as one: the format of recompressed pages.
//!
//! ```text
//! offset  bytes
//!      0     64  keys of the pages, 32 bits each, in their order
//!     64      8  where each group of four pages ends, 15 bits each; 0: there is no such group.
//!                The sixteenth: it has pages of numbers
//!     72      …  one zstd stream without magic number, cut off after the last group
//! ```
//! A group with pages of numbers begins with a header for each page, and these pages are taken
//! apart (`numbers`). Numbers are little-endian. Each group is flushed: it refers back to all
//! groups before it, and can be decoded without the following groups. A page of the second group
//! costs the decoding of two groups.
//!
//! Blocks of four pages trade size against time: docs/design/recompression.md.

use super::{Undecodable, numbers};
use crate::page::{PAGE_BYTES, Page};
use crate::table::boxed;
use zstd_safe::ResetDirective::SessionOnly;
use zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat, InBuffer, OutBuffer};

/// The maximum number of pages of a unit.
pub(crate) const UNIT_PAGES: usize = 16;
/// Pages of a group: a unit has whole groups.
pub(crate) const GROUP_PAGES: usize = 4;
/// The maximum bytes of a unit. Sixteen pages that do not fit are divided among several units.
pub(crate) const UNIT_BYTES_MAX: usize = 14 << 10;

const GROUPS: usize = UNIT_PAGES / GROUP_PAGES;
const GROUP_BYTES: usize = GROUP_PAGES * PAGE_BYTES;
/// Bytes before the pages of a group with numbers.
const HEADERS_BYTES: usize = GROUP_PAGES * numbers::HEADER_BYTES;
const ENDS_AT: usize = UNIT_PAGES * size_of::<u32>();
const HEADER_BYTES: usize = ENDS_AT + GROUPS * size_of::<u16>();

/// Back references reach over the whole unit.
const WINDOW_LOG: u32 = (UNIT_PAGES * PAGE_BYTES).ilog2();

/// Set in the end of a group with pages of numbers.
const NUMBERS: u16 = 1 << 15;

const _: () = assert!(UNIT_BYTES_MAX < NUMBERS as usize, "ends have 15 bits");

/// Makes units. Allocates some megabytes, when it is made and with its first unit.
pub(crate) struct UnitEncoder {
    context: CCtx<'static>,
    /// A group with pages of numbers.
    group: Box<[u8]>,
}

impl UnitEncoder {
    /// This level takes 45 µs a page. Level 6 takes 27 µs and makes units 1.5 % larger. Level 12
    /// takes 190 µs and makes units 1 % smaller.
    const LEVEL: i32 = 9;

    /// `None` without memory.
    pub(crate) fn new() -> Option<Self> {
        let mut context = CCtx::try_create()?;
        for parameter in [
            CParameter::Format(FrameFormat::Magicless),
            CParameter::CompressionLevel(Self::LEVEL),
            CParameter::SrcSizeHint((UNIT_PAGES * PAGE_BYTES) as u32),
            CParameter::WindowLog(WINDOW_LOG),
        ] {
            let set = context.set_parameter(parameter);
            debug_assert!(set.is_ok());
        }
        Some(Self { context, group: boxed(HEADERS_BYTES + GROUP_BYTES, || 0).ok()? })
    }

    /// Makes a unit of the first pages: as many whole groups as fit in `out`. Returns the unit's
    /// length and the number of its pages, or `None` when not even one group fits. `keys` are those
    /// of the pages; `numbers` marks pages of numbers. `out` has space for [`UNIT_BYTES_MAX`].
    pub(crate) fn encode(
        &mut self,
        keys: &[u32],
        pages: &[Page],
        numbers: &[bool],
        out: &mut [u8],
    ) -> Option<(usize, usize)> {
        self.context.reset(SessionOnly).ok()?;
        out[..HEADER_BYTES].fill(0);
        let (mut end, mut count) = (HEADER_BYTES, 0);
        let groups = pages.chunks_exact(GROUP_PAGES).zip(numbers.chunks_exact(GROUP_PAGES));
        for (number, (group, numbers)) in groups.enumerate() {
            let has_numbers = numbers.contains(&true);
            let bytes = match has_numbers {
                true => take_apart(group, numbers, &mut self.group),
                false => group.as_flattened(),
            };
            let mut output = OutBuffer::around_pos(&mut *out, end);
            let mut input = InBuffer::around(bytes);
            match self.context.compress_stream2(&mut output, &mut input, ZSTD_e_flush) {
                Ok(0) => end = output.pos(),
                _ => break, // The group does not fit.
            }
            count += GROUP_PAGES;
            let mark = if has_numbers { NUMBERS } else { 0 };
            out[ENDS_AT + number * 2..][..2].copy_from_slice(&(end as u16 | mark).to_le_bytes());
        }
        for (slot, key) in out[..ENDS_AT].as_chunks_mut::<4>().0.iter_mut().zip(&keys[..count]) {
            *slot = key.to_le_bytes();
        }
        (count > 0).then_some((end, count))
    }
}

/// Makes a group with pages of numbers, and returns its bytes.
fn take_apart<'a>(group: &[Page], numbers: &[bool], out: &'a mut [u8]) -> &'a [u8] {
    let (headers, pages) = out.split_at_mut(HEADERS_BYTES);
    let slots = headers.as_chunks_mut().0.iter_mut().zip(pages.as_chunks_mut().0);
    for ((page, is_number), (header, planes)) in group.iter().zip(numbers).zip(slots) {
        let taken = is_number.then(|| numbers::take_apart(page, usize::MAX, planes)).flatten();
        *header = taken.unwrap_or_else(|| {
            *planes = *page;
            numbers::AS_IT_IS
        });
    }
    out
}

/// Decodes pages of units. Allocates when it is made, and never after.
pub(crate) struct UnitDecoder {
    context: DCtx<'static>,
    /// The groups, one after the other.
    groups: Box<[u8]>,
}

impl UnitDecoder {
    /// `None` without memory.
    pub(crate) fn new() -> Option<Self> {
        let mut context = DCtx::try_create()?;
        for parameter in
            [DParameter::Format(FrameFormat::Magicless), DParameter::StableOutBuffer(true)]
        {
            let set = context.set_parameter(parameter);
            debug_assert!(set.is_ok());
        }
        let groups = boxed(GROUPS * (HEADERS_BYTES + GROUP_BYTES), || 0).ok()?;
        let mut decoder = Self { context, groups };
        // A context allocates its window when it reads the header of its first frame. This is a
        // frame header with the window, and a block of one repeated byte.
        let block = (GROUP_BYTES as u32) << 3 | 1 << 1;
        let [low, middle, high, _] = block.to_le_bytes();
        let stream = [0, ((WINDOW_LOG - 10) << 3) as u8, low, middle, high, 0];
        decoder.decode(&stream, GROUP_BYTES).ok()?;
        Some(decoder)
    }

    /// Bytes of a unit that decoding the page at `position` needs. `None` when it has no such page
    /// or is no unit. `start` is at least its first 72 bytes.
    pub(crate) fn bytes_for(start: &[u8], position: usize) -> Option<usize> {
        let end = usize::from(Self::mark(start, position / GROUP_PAGES)? & !NUMBERS);
        (HEADER_BYTES + 1..=UNIT_BYTES_MAX).contains(&end).then_some(end)
    }

    /// Bytes of the headers of a group.
    fn headers_bytes(start: &[u8], group: usize) -> usize {
        let has_numbers = Self::mark(start, group).is_some_and(|mark| mark & NUMBERS != 0);
        if has_numbers { HEADERS_BYTES } else { 0 }
    }

    /// The end of a group, and its mark for numbers.
    fn mark(start: &[u8], group: usize) -> Option<u16> {
        start.get(ENDS_AT + group * 2..)?.first_chunk().map(|mark| u16::from_le_bytes(*mark))
    }

    /// The key of the page at `position` in a unit's start.
    pub(crate) fn key_of(start: &[u8], position: usize) -> Option<u32> {
        start[..ENDS_AT].as_chunks().0.get(position).map(|key| u32::from_le_bytes(*key))
    }

    /// Decodes the page at `position`; true if it is a page of numbers. The bytes are not trusted:
    /// a whole unit, or the part that [`Self::bytes_for`] gives.
    pub(crate) fn page(
        &mut self,
        unit: &[u8],
        position: usize,
        page: &mut Page,
    ) -> Result<bool, Undecodable> {
        let end = Self::bytes_for(unit, position).ok_or(Undecodable)?;
        let stream = unit.get(HEADER_BYTES..end).ok_or(Undecodable)?;
        let (group, position) = (position / GROUP_PAGES, position % GROUP_PAGES);
        let headers_bytes = |group| Self::headers_bytes(unit, group);
        let start = group * GROUP_BYTES + (0..group).map(headers_bytes).sum::<usize>();
        let bytes = start + headers_bytes(group) + GROUP_BYTES;
        self.decode(stream, bytes)?;
        let (headers, pages) = self.groups[start..bytes].split_at(headers_bytes(group));
        let found = &pages.as_chunks().0[position];
        match headers.as_chunks().0.get(position) {
            Some(header) if *header != numbers::AS_IT_IS => {
                numbers::together(header, found, page).map(|()| true)
            }
            _ => {
                *page = *found;
                Ok(false)
            }
        }
    }

    fn decode(&mut self, stream: &[u8], bytes: usize) -> Result<(), Undecodable> {
        self.context.reset(SessionOnly).map_err(|_| Undecodable)?;
        let mut output = OutBuffer::around(&mut self.groups[..bytes]);
        let mut input = InBuffer::around(stream);
        let decoded = self.context.decompress_stream(&mut output, &mut input);
        let whole = input.pos() == stream.len() && output.pos() == bytes;
        if decoded.is_ok() && whole { Ok(()) } else { Err(Undecodable) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::samples::{Random, pointers as pointer_page};
    use crate::testing::{Content, page_of};

    fn unit(pages: &[Page]) -> (Vec<u8>, usize) {
        unit_of(pages, &[false; UNIT_PAGES])
    }

    fn unit_of(pages: &[Page], numbers: &[bool]) -> (Vec<u8>, usize) {
        let keys: Vec<u32> = (7..).take(pages.len()).collect();
        let mut out = [0xa5; UNIT_BYTES_MAX];
        let (bytes, count) =
            UnitEncoder::new().unwrap().encode(&keys, pages, numbers, &mut out).unwrap();
        (out[..bytes].to_vec(), count)
    }

    fn pointers(count: usize) -> Vec<Page> {
        let mut random = Random(7);
        (0..count).map(|_| pointer_page(&mut random)).collect()
    }

    #[test]
    fn every_page_comes_out_of_as_much_as_it_needs() {
        let pages = pointers(UNIT_PAGES);
        let mut decoder = UnitDecoder::new().unwrap();
        // Compressible pages of one kind, then groups that fit less and less.
        for noisy in 0..UNIT_PAGES {
            let mut pages: Vec<Page> = pages.iter().map(|_| pages[0]).collect();
            pages[noisy] = Random(noisy as u64 + 1).page();
            let (unit, count) = unit(&pages);
            assert_eq!(count, UNIT_PAGES);
            for position in (0..count).rev() {
                let end = UnitDecoder::bytes_for(&unit, position).unwrap();
                assert_eq!(UnitDecoder::key_of(&unit, position), Some(7 + position as u32));
                let mut page = [0; PAGE_BYTES];
                assert_eq!(decoder.page(&unit[..end], position, &mut page), Ok(false));
                assert!(page == pages[position]);
                assert!(decoder.page(&unit[..end - 1], position, &mut page).is_err());
            }
        }
    }

    #[test]
    fn pages_of_numbers_are_taken_apart_and_their_neighbours_are_not() {
        let mut pages = [pointers(1)[0]; 12];
        let numbers = (0..).map(|seed| page_of(Content::Numbers, seed));
        pages.iter_mut().skip(4).zip(numbers.take(2)).for_each(|(page, number)| *page = number);
        // Two of the three groups have such pages.
        let is_number = |at: usize| matches!(at, 4 | 5 | 10);
        pages[10] = page_of(Content::Prices, 1);
        let numbers: Vec<bool> = (0..12).map(is_number).collect();
        let (unit, count) = unit_of(&pages, &numbers);
        assert_eq!(count, 12);
        let mut decoder = UnitDecoder::new().unwrap();
        for (position, page) in pages.iter().enumerate() {
            let end = UnitDecoder::bytes_for(&unit, position).unwrap();
            let mut back = [0; PAGE_BYTES];
            assert_eq!(decoder.page(&unit[..end], position, &mut back), Ok(is_number(position)));
            assert!(back == *page);
        }
        let numbers: Vec<Page> = (0..4).map(|seed| page_of(Content::Numbers, seed)).collect();
        let encode = |is_number| {
            let mut out = [0; UNIT_BYTES_MAX];
            UnitEncoder::new().unwrap().encode(&[0; 4], &numbers, &[is_number; 4], &mut out)
        };
        let [plain, apart] = [false, true].map(|is_number| encode(is_number).unwrap().0);
        assert!(apart + 1000 < plain, "{apart} and {plain}");
    }

    #[test]
    fn a_unit_has_as_many_groups_as_fit() {
        let mut encoder = UnitEncoder::new().unwrap();
        let mut encode = |pages: &[Page]| {
            encoder.encode(&[0; 16], pages, &[false; 16], &mut [0; UNIT_BYTES_MAX])
        };
        let noise = Random(3).page();
        assert_eq!(encode(&[noise; 3]), None);
        let mut random = Random(5);
        let pages: Vec<Page> = (0..UNIT_PAGES).map(|_| random.page()).collect();
        assert_eq!(encode(&pages), None);
        let mut pages = pointers(GROUP_PAGES);
        pages.extend((0..12).map(|_| random.page()));
        let (whole, count) = unit(&pages);
        assert_eq!(count, GROUP_PAGES);
        assert_eq!(UnitDecoder::bytes_for(&whole, GROUP_PAGES), None, "no second group");
        // The same encoder continues with the pages that did not fit.
        let mut page = [0; PAGE_BYTES];
        assert_eq!(UnitDecoder::new().unwrap().page(&whole, 3, &mut page), Ok(false));
        assert!(page == pages[3]);
        assert_eq!(UnitDecoder::new().unwrap().page(&whole, 4, &mut page), Err(Undecodable));
    }

    #[test]
    fn damaged_units_do_no_harm() {
        let (whole, _) =
            unit_of(&pointers(UNIT_PAGES), &std::array::from_fn::<_, 16, _>(|at| at < 6));
        let (mut decoder, mut page) = (UnitDecoder::new().unwrap(), [0; PAGE_BYTES]);
        let mut random = Random(11);
        for _ in 0..2000 {
            let mut damaged = whole.clone();
            for _ in 0..random.skewed(20) {
                let at = random.below(damaged.len());
                damaged[at] = random.byte();
            }
            damaged.truncate(random.below(damaged.len() * 2));
            let _ = decoder.page(&damaged, random.below(UNIT_PAGES), &mut page);
        }
        assert!(decoder.page(&whole, 0, &mut page).is_ok(), "and the decoder goes on");
    }
}

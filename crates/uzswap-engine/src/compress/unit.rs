//! Sixteen pages as one: what recompression makes of cold pages.
//!
//! ```text
//! offset  bytes
//!      0     64  keys of the pages, 32 bits each, in their order
//!     64      8  where each group of four pages ends, 15 bits each; 0: there is no such group.
//!                The sixteenth: its pages are shuffled
//!     72      …  one zstd stream without magic number, cut off after the last group
//! ```
//! Little-endian. A group is flushed, so it can be decoded with nothing of what follows it, and
//! refers back to all before it. A page of the second group costs the decoding of two.
//!
//! Blocks of four pages are a trade of size against time: docs/design/recompression.md.

use super::{Undecodable, shuffle};
use crate::page::{PAGE_BYTES, Page};
use zstd_safe::ResetDirective::SessionOnly;
use zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat, InBuffer, OutBuffer};

/// Pages of a unit, at most.
pub(crate) const UNIT_PAGES: usize = 16;
/// Pages of a group: a unit has whole groups.
pub(crate) const GROUP_PAGES: usize = 4;
/// Bytes of a unit, at most: what leaves fewer than sixteen pages in it is kept in more units.
pub(crate) const UNIT_BYTES_MAX: usize = 14 << 10;

const GROUPS: usize = UNIT_PAGES / GROUP_PAGES;
const GROUP_BYTES: usize = GROUP_PAGES * PAGE_BYTES;
const ENDS_AT: usize = UNIT_PAGES * size_of::<u32>();
const HEADER_BYTES: usize = ENDS_AT + GROUPS * size_of::<u16>();

/// Back references reach over the whole unit.
const WINDOW_LOG: u32 = (UNIT_PAGES * PAGE_BYTES).ilog2();

/// With the end of a group whose pages are shuffled.
const SHUFFLED: u16 = 1 << 15;

const _: () = assert!(UNIT_BYTES_MAX < SHUFFLED as usize, "ends have 15 bits");

/// Makes units. Allocates when made and with its first unit: some megabytes.
pub(crate) struct UnitEncoder {
    context: CCtx<'static>,
    /// The pages of a group, shuffled.
    shuffled: Box<[Page; GROUP_PAGES]>,
}

impl UnitEncoder {
    /// 45 us a page; 6 takes 27 and makes units 1.5 % larger, 12 takes 190 and makes them 1 %
    /// smaller.
    const LEVEL: i32 = 9;

    pub(crate) fn new() -> Self {
        let mut context = CCtx::create();
        for parameter in [
            CParameter::Format(FrameFormat::Magicless),
            CParameter::CompressionLevel(Self::LEVEL),
            CParameter::SrcSizeHint((UNIT_PAGES * PAGE_BYTES) as u32),
            CParameter::WindowLog(WINDOW_LOG),
        ] {
            let set = context.set_parameter(parameter);
            debug_assert!(set.is_ok());
        }
        Self { context, shuffled: Box::new([[0; PAGE_BYTES]; GROUP_PAGES]) }
    }

    /// Makes a unit of the first pages, whole groups of them, as many as fit in `out`; the bytes of
    /// the unit and its pages, or `None` when not even one group fits. `keys` are the pages', and
    /// `numbers` says which are numbers: where half of a group is, it is shuffled.
    pub(crate) fn encode(
        &mut self,
        keys: &[u32],
        pages: &[Page],
        numbers: &[bool],
        out: &mut [u8; UNIT_BYTES_MAX],
    ) -> Option<(usize, usize)> {
        self.context.reset(SessionOnly).ok()?;
        out[..HEADER_BYTES].fill(0);
        let (mut end, mut count) = (HEADER_BYTES, 0);
        let groups = pages.chunks_exact(GROUP_PAGES).zip(numbers.chunks_exact(GROUP_PAGES));
        for (number, (mut group, numbers)) in groups.enumerate() {
            let is_shuffled =
                numbers.iter().filter(|is_number| **is_number).count() >= GROUP_PAGES / 2;
            if is_shuffled {
                for (page, shuffled) in group.iter().zip(&mut self.shuffled[..]) {
                    shuffle::shuffle(page, shuffled);
                }
                group = &self.shuffled[..];
            }
            let mut output = OutBuffer::around_pos(&mut out[..], end);
            let mut input = InBuffer::around(group.as_flattened());
            match self.context.compress_stream2(&mut output, &mut input, ZSTD_e_flush) {
                Ok(0) => end = output.pos(),
                _ => break, // It does not fit.
            }
            count += GROUP_PAGES;
            let mark = if is_shuffled { SHUFFLED } else { 0 };
            out[ENDS_AT + number * 2..][..2].copy_from_slice(&(end as u16 | mark).to_le_bytes());
        }
        for (slot, key) in out[..ENDS_AT].as_chunks_mut::<4>().0.iter_mut().zip(&keys[..count]) {
            *slot = key.to_le_bytes();
        }
        (count > 0).then_some((end, count))
    }
}

/// Takes pages out of units. Allocates when it is made, never after.
pub(crate) struct UnitDecoder {
    context: DCtx<'static>,
    pages: Box<[Page; UNIT_PAGES]>,
    /// A page put together that was shuffled.
    page: Page,
}

impl UnitDecoder {
    pub(crate) fn new() -> Self {
        let mut context = DCtx::create();
        for parameter in
            [DParameter::Format(FrameFormat::Magicless), DParameter::StableOutBuffer(true)]
        {
            let set = context.set_parameter(parameter);
            debug_assert!(set.is_ok());
        }
        let pages = vec![[0; PAGE_BYTES]; UNIT_PAGES].into_boxed_slice();
        let pages = pages.try_into().expect("as many pages as were made");
        let mut decoder = Self { context, pages, page: [0; PAGE_BYTES] };
        // A context takes its memory, a window, with the header of its first frame. So: a frame
        // header that says nothing but the window, and a block of one byte over and over.
        let block = (GROUP_BYTES as u32) << 3 | 1 << 1;
        let [low, middle, high, _] = block.to_le_bytes();
        let stream = [0, ((WINDOW_LOG - 10) << 3) as u8, low, middle, high, 0];
        let decoded = decoder.decode(&stream, 1);
        debug_assert!(decoded.is_ok());
        decoder
    }

    /// Bytes of a unit that decoding the page at `position` needs: `None` when it has no such page
    /// or is none. `start` is at least its first 72 bytes.
    pub(crate) fn bytes_for(start: &[u8], position: usize) -> Option<usize> {
        let end = usize::from(Self::mark(start, position)? & !SHUFFLED);
        (HEADER_BYTES + 1..=UNIT_BYTES_MAX).contains(&end).then_some(end)
    }

    /// Whether the page at `position` is one of numbers, as a unit's start says.
    pub(crate) fn is_number(start: &[u8], position: usize) -> bool {
        Self::mark(start, position).is_some_and(|mark| mark & SHUFFLED != 0)
    }

    /// Where the group of the page at `position` ends, and whether it is shuffled.
    fn mark(start: &[u8], position: usize) -> Option<u16> {
        let group = position / GROUP_PAGES;
        start.get(ENDS_AT + group * 2..)?.first_chunk().map(|mark| u16::from_le_bytes(*mark))
    }

    /// The key of the page at `position`, as a unit's start says.
    pub(crate) fn key_of(start: &[u8], position: usize) -> Option<u32> {
        start[..ENDS_AT].as_chunks().0.get(position).map(|key| u32::from_le_bytes(*key))
    }

    /// The page at `position`. Any bytes may come in, a whole unit or as much of it as
    /// [`Self::bytes_for`] says.
    pub(crate) fn page(&mut self, unit: &[u8], position: usize) -> Result<&Page, Undecodable> {
        let end = Self::bytes_for(unit, position).ok_or(Undecodable)?;
        let stream = unit.get(HEADER_BYTES..end).ok_or(Undecodable)?;
        self.decode(stream, position / GROUP_PAGES + 1)?;
        if !Self::is_number(unit, position) {
            return Ok(&self.pages[position]);
        }
        shuffle::unshuffle(&self.pages[position], &mut self.page);
        Ok(&self.page)
    }

    fn decode(&mut self, stream: &[u8], groups: usize) -> Result<(), Undecodable> {
        self.context.reset(SessionOnly).map_err(|_| Undecodable)?;
        let pages = &mut self.pages.as_flattened_mut()[..groups * GROUP_BYTES];
        let bytes = pages.len();
        let mut output = OutBuffer::around(pages);
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
        let (bytes, count) = UnitEncoder::new().encode(&keys, pages, numbers, &mut out).unwrap();
        (out[..bytes].to_vec(), count)
    }

    fn pointers(count: usize) -> Vec<Page> {
        let mut random = Random(7);
        (0..count).map(|_| pointer_page(&mut random)).collect()
    }

    #[test]
    fn every_page_comes_out_of_as_much_as_it_needs() {
        let pages = pointers(UNIT_PAGES);
        let mut decoder = UnitDecoder::new();
        // Compressible pages of one kind, then groups that fit less and less.
        for noisy in 0..UNIT_PAGES {
            let mut pages: Vec<Page> = pages.iter().map(|_| pages[0]).collect();
            pages[noisy] = Random(noisy as u64 + 1).page();
            let (unit, count) = unit(&pages);
            assert_eq!(count, UNIT_PAGES);
            for position in (0..count).rev() {
                let end = UnitDecoder::bytes_for(&unit, position).unwrap();
                assert_eq!(UnitDecoder::key_of(&unit, position), Some(7 + position as u32));
                assert!(decoder.page(&unit[..end], position).unwrap() == &pages[position]);
                assert_eq!(decoder.page(&unit[..end - 1], position), Err(Undecodable));
            }
        }
    }

    #[test]
    fn groups_of_which_half_are_numbers_are_shuffled() {
        let mut pages = [pointers(1)[0]; 12];
        let numbers = (0..).map(|seed| page_of(Content::Numbers, seed));
        pages.iter_mut().skip(4).zip(numbers.take(2)).for_each(|(page, number)| *page = number);
        // Of the groups one page, two, and none.
        let numbers: Vec<bool> = (0..12).map(|at| matches!(at, 0 | 4 | 5)).collect();
        let (unit, count) = unit_of(&pages, &numbers);
        assert_eq!(count, 12);
        let mut decoder = UnitDecoder::new();
        for (position, page) in pages.iter().enumerate() {
            assert_eq!(UnitDecoder::is_number(&unit, position), (4..8).contains(&position));
            let end = UnitDecoder::bytes_for(&unit, position).unwrap();
            assert!(decoder.page(&unit[..end], position).unwrap() == page);
        }
        let numbers: Vec<Page> = (0..4).map(|seed| page_of(Content::Numbers, seed)).collect();
        let encode = |is_number| {
            let mut out = [0; UNIT_BYTES_MAX];
            UnitEncoder::new().encode(&[0; 4], &numbers, &[is_number; 4], &mut out)
        };
        let [plain, shuffled] = [false, true].map(|is_number| encode(is_number).unwrap().0);
        assert!(shuffled + 1000 < plain, "{shuffled} and {plain}");
    }

    #[test]
    fn a_unit_has_as_many_groups_as_fit() {
        let mut encoder = UnitEncoder::new();
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
        // The same encoder goes on with what did not fit.
        assert!(UnitDecoder::new().page(&whole, 3).unwrap() == &pages[3]);
        assert_eq!(UnitDecoder::new().page(&whole, 4), Err(Undecodable));
    }

    #[test]
    fn damaged_units_do_no_harm() {
        let (whole, _) = unit(&pointers(UNIT_PAGES));
        let mut decoder = UnitDecoder::new();
        let mut random = Random(11);
        for _ in 0..2000 {
            let mut damaged = whole.clone();
            for _ in 0..random.skewed(20) {
                let at = random.below(damaged.len());
                damaged[at] = random.byte();
            }
            damaged.truncate(random.below(damaged.len() * 2));
            let _ = decoder.page(&damaged, random.below(UNIT_PAGES));
        }
        assert!(decoder.page(&whole, 0).is_ok(), "and the decoder goes on");
    }
}

//! LZO1X for whole memory pages: a one-pass compressor and a decoder that trusts nothing.
//!
//! A stream is a chain of instructions. Each copies earlier output and then up to three literal
//! bytes. Their number S is in the two low bits of the instruction or of its distance; more
//! literals take an instruction of their own. The meaning of a first byte below 16 depends on the
//! number of literals just before it.
//!
//! | first byte | comes after    | means                     | distance             | bytes |
//! |------------|----------------|---------------------------|----------------------|-------|
//! | `0000LLLL` | no literals    | 3 + L literals            |                      | 1     |
//! | `0000DDSS` | 1 to 3         | copy 2                    | 1 + D + 4 H          | 2     |
//! | `0000DDSS` | 4 or more      | copy 3                    | 2049 + D + 4 H       | 2     |
//! | `0001GLLL` | anything       | copy 2 + L, or the end    | 16384 + 16384 G + D  | 3     |
//! | `001LLLLL` | anything       | copy 2 + L                | 1 + D                | 3     |
//! | `LLLDDDSS` | anything       | copy 1 + L, L being 2..=7 | 1 + D + 8 H          | 2     |
//!
//! H is the second byte. In the three-byte forms D and S share a little-endian word, with S at its
//! low end. L = 0 stands for the field's maximum, plus 255 for every following zero byte, plus the
//! first byte that is not zero. The distance comes after those bytes. A stream's very first byte N,
//! if above 17, stands for N − 17 literals. The end is `11 00 00`.
//!
//! A page is shorter than the reach of `0001GLLL`, so that form is always the end.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES as PAGE, Page};
use std::hint::select_unpredictable as select;

/// Twice the slots would make objects 0.3 % smaller, but the table is cleared for every page.
const SLOT_BITS: u32 = 11;
const SLOTS: usize = 1 << SLOT_BITS;

/// The last position that eight bytes can be loaded from, and so the last to look for a match.
const LAST: usize = PAGE - 8;

/// The greatest distance and length of a two-byte copy.
const NEAR: usize = 2048;
const SHORT: usize = 8;

/// The greatest length of a three-byte copy without further length bytes.
const MEDIUM: usize = 33;

/// The maximum number of literals of an instruction byte, and of a stream's first byte.
const RUN: usize = 18;
const FIRST_RUN: usize = 255 - 17;

const END: [u8; 3] = [0x11, 0, 0];

/// A codec with its working memory, so that no call allocates.
pub(super) struct Lzo {
    /// The place in the page where bytes with this hash were last seen.
    table: Box<[u16; SLOTS]>,
}

impl Lzo {
    pub(super) fn new() -> Self {
        Self { table: Box::new([0; SLOTS]) }
    }
}

impl Compressor for Lzo {
    /// Writes the object of `page` to the front of `out` and returns its length, or `None` when it
    /// does not fit. The same page always makes the same object.
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A cleared slot names position 0, which lies before every position looked up.
        self.table.fill(0);
        let mut writer = Writer { out, len: 0 };
        let mut from = 0;
        let mut at = 1;
        while let Some(found) = seek(&mut self.table, page, from, at) {
            let len = equal_after(page, found);
            let back = equal_before(page, found, from);
            writer.emit(page, from, found.at - back, len + back, found.at - found.old)?;
            from = found.at + len;
            at = from;
            // The next match often starts one byte before the end of this one.
            if from - 1 <= LAST {
                self.table[slot(load(page, from - 1))] = (from - 1) as u16;
            }
        }
        writer.finish(page, from)
    }

    /// Restores `page` from `object`. After an error the page is garbage.
    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        decode(object, page).ok_or(Undecodable)
    }
}

/// Two places in a page that start with the same five or more bytes, `old` before `at`.
#[derive(Clone, Copy)]
struct Match {
    old: usize,
    at: usize,
    /// The exclusive or of the first eight bytes.
    differ: u64,
}

/// Loads eight bytes. Beyond [`LAST`], where no caller reads, it returns zero instead of a panic.
#[inline(always)]
fn load(page: &Page, at: usize) -> u64 {
    page.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Hashes the first five bytes. Four would find the shortest matches too, but on heap pages those
/// only split longer matches: objects would be as large, with up to a fifth more copies. (Text and
/// machine code would be 5 to 7 % smaller, and take a tenth to a quarter longer.)
#[inline(always)]
fn slot(bytes: u64) -> usize {
    ((bytes << 24).wrapping_mul(0x9E37_79B1_85EB_CA87) >> (64 - SLOT_BITS)) as usize
}

/// Finds the first match at or after `at`, in strides that grow with the bytes passed since `from`,
/// so that a page without matches takes little time.
#[inline(always)]
fn seek(table: &mut [u16; SLOTS], page: &Page, from: usize, mut at: usize) -> Option<Match> {
    while at <= LAST {
        let bytes = load(page, at);
        let entry = &mut table[slot(bytes)];
        let old = *entry as usize;
        *entry = at as u16;
        let differ = load(page, old) ^ bytes;
        if differ << 24 == 0 {
            // Slots only hold positions already passed; the check tells the compiler so.
            return (old < at).then_some(Match { old, at, differ });
        }
        at += 1 + ((at - from) >> 5);
    }
    None
}

/// The length of a match that begins at `found.at`.
#[inline(always)]
fn equal_after(page: &Page, found: Match) -> usize {
    let Match { old, at, differ } = found;
    if differ != 0 {
        return differ.trailing_zeros() as usize / 8;
    }
    let mut len = 8;
    while at + len <= LAST {
        let differ = load(page, old + len) ^ load(page, at + len);
        if differ != 0 {
            return len + differ.trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    let tail = page[at + len..].iter().zip(&page[old + len..]);
    len + tail.take_while(|(new, old)| new == old).count()
}

/// How far a match can be extended before `found.at`, up to the literals' start at `from`.
#[inline(always)]
fn equal_before(page: &Page, found: Match, from: usize) -> usize {
    let room = (found.at - from).min(found.old);
    let mut back = 0;
    while back < room && page[found.at - back - 1] == page[found.old - back - 1] {
        back += 1;
    }
    back
}

/// An object being written to the front of `out`.
struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl Writer<'_> {
    /// Appends the bytes `from..to` of the page as literals, and a copy.
    #[inline(always)]
    fn emit(&mut self, page: &Page, from: usize, to: usize, len: usize, dist: usize) -> Option<()> {
        let count = to - from;
        if count <= 16
            && let Some(literals) = page.get(from..)?.first_chunk::<16>()
            && let Some(before) = self.len.checked_sub(2)
            && let Some(out) = self.out.get_mut(before..)?.first_chunk_mut::<24>()
        {
            // All fields are written at their widest and only their valid bytes are counted:
            // branches on the number of literals and the form of the copy predict badly.
            let run = count > 3;
            out[0] |= select(run, 0, count as u8);
            out[2] = (count as u8).wrapping_sub(3);
            let start = 2 + usize::from(run);
            out[start..start + 16].copy_from_slice(literals);
            let end = start + count;
            self.len += end - 2;
            if len > MEDIUM {
                return self.copy(len, dist);
            }
            let two = len <= SHORT && dist <= NEAR;
            let near = (len - 1) << 5 | ((dist - 1) & 7) << 2 | (dist - 1) >> 3 << 8;
            let far = 0x20 | (len - 2) | (dist - 1) << 10;
            let word = select(two, near, far) as u32;
            *out.get_mut(end..)?.first_chunk_mut()? = word.to_le_bytes();
            self.len += select(two, 2, 3);
            return Some(());
        }
        self.literals(page.get(from..to)?)?;
        self.copy(len, dist)
    }

    #[inline(never)]
    fn copy(&mut self, len: usize, dist: usize) -> Option<()> {
        let dist = dist - 1;
        if len <= SHORT && dist < NEAR {
            return self.put(&[((len - 1) << 5 | (dist & 7) << 2) as u8, (dist >> 3) as u8]);
        }
        if len <= MEDIUM {
            self.put(&[(0x20 | (len - 2)) as u8])?;
        } else {
            self.put(&[0x20])?;
            self.length(len - MEDIUM)?;
        }
        self.put(&((dist << 2) as u16).to_le_bytes())
    }

    /// Appends literals. Their number may be zero only after a copy.
    #[inline(never)]
    fn literals(&mut self, literals: &[u8]) -> Option<()> {
        let count = literals.len();
        if self.len == 0 && count <= FIRST_RUN {
            self.put(&[(17 + count) as u8])?;
        } else if count <= 3 {
            // In either form, a copy has its S in the last byte but one.
            *self.out.get_mut(self.len.checked_sub(2)?)? |= count as u8;
        } else if count <= RUN {
            self.put(&[(count - 3) as u8])?;
        } else {
            self.put(&[0])?;
            self.length(count - RUN)?;
        }
        self.put(literals)
    }

    /// Appends the continuation of a length field of zero.
    fn length(&mut self, mut beyond: usize) -> Option<()> {
        while beyond > 255 {
            self.put(&[0])?;
            beyond -= 255;
        }
        self.put(&[beyond as u8])
    }

    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        self.out.get_mut(self.len..)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
        self.len += bytes.len();
        Some(())
    }

    fn finish(mut self, page: &Page, from: usize) -> Option<usize> {
        self.literals(page.get(from..)?)?;
        self.put(&END)?;
        Some(self.len)
    }
}

/// The position of a decoder.
#[derive(Clone, Copy)]
struct Cursor {
    /// The place of the next instruction in the object.
    input: usize,
    /// The place of the next byte in the page.
    at: usize,
    /// The number of literals just before: 0 to 3, or 4 for any larger number.
    state: usize,
}

/// Decodes an object; `None` if the bytes are not one.
fn decode(object: &[u8], page: &mut Page) -> Option<()> {
    let mut cursor = Cursor { input: 0, at: 0, state: 0 };
    let count = usize::from(*object.first()?).saturating_sub(17);
    if count > 0 {
        cursor = literals(object, page, Cursor { input: 1, at: 0, state: count.min(4) }, count)?;
    }
    loop {
        cursor = ordinary(object, page, cursor)?;
        if object.get(cursor.input..)? == END {
            return (cursor.at == PAGE).then_some(());
        }
        cursor = any(object, page, cursor)?;
    }
}

/// A copy of earlier output with the literals after it.
struct Copy {
    dist: usize,
    len: usize,
    /// The number of literals that follow, and four bytes that start with them.
    count: usize,
    literals: [u8; 4],
    /// The bytes of the instruction and of its literals.
    size: usize,
}

impl Copy {
    /// Reads the two- or three-byte form. The form is nearly random, so this reads both and selects
    /// one. Where length bytes follow, `len` is 34 and no other field is valid.
    #[inline(always)]
    fn read(window: &[u8; 8]) -> Self {
        let (first, second) = (usize::from(window[0]), usize::from(window[1]));
        let two = first >= 0x40;
        let near = second << 3 | (first >> 2 & 7);
        Self {
            dist: 1 + select(two, near, word::<1>(window) >> 2),
            len: 1 + select(two, first >> 5, ((first - 1) & 31) + 2),
            count: select(two, first, second) & 3,
            literals: select(two, part::<2, 4>(window), part::<3, 4>(window)),
            // Not `count` plus 2 or 3: the next instruction waits for this sum alone.
            size: select(two, (first & 3) + 2, (second & 3) + 3),
        }
    }

    /// Reads the three-byte form with a single length byte, which is not zero.
    #[inline(always)]
    fn read_long(window: &[u8; 8]) -> Self {
        let (len, word) = (MEDIUM + usize::from(window[1]), word::<2>(window));
        let count = word & 3;
        Self { dist: 1 + (word >> 2), len, count, literals: part::<4, 4>(window), size: 4 + count }
    }
}

#[inline(always)]
fn part<const AT: usize, const N: usize>(window: &[u8; 8]) -> [u8; N] {
    window[AT..].first_chunk().copied().unwrap_or([0; N])
}

#[inline(always)]
fn word<const AT: usize>(window: &[u8; 8]) -> usize {
    usize::from(u16::from_le_bytes(part::<AT, 2>(window)))
}

/// The rest of the page that [`ordinary`] needs for its wide writes: a copy of 32 bytes and the
/// four that start with its literals.
const SLACK: usize = 36;

/// Decodes the common instructions while enough page and object is left to move bytes in fixed
/// amounts. Later writes overwrite surplus bytes.
#[inline(always)]
fn ordinary(object: &[u8], page: &mut Page, cursor: Cursor) -> Option<Cursor> {
    let Cursor { input, mut at, mut state } = cursor;
    let mut rest = object.get(input..)?;
    while at <= PAGE - SLACK
        && let Some(window) = rest.first_chunk::<8>()
    {
        let first = usize::from(window[0]);
        if first < 0x20 {
            if state == 0
                && (1..16).contains(&first)
                && let Some(literals) = rest.get(1..)?.first_chunk::<24>()
            {
                *page.get_mut(at..)?.first_chunk_mut()? = *literals;
                rest = rest.get(first + 4..)?;
                at += first + 3;
                state = 4;
                continue;
            }
            break;
        }
        let mut copy = Copy::read(window);
        if (copy.dist < 16) | (copy.len > 32) {
            if first == 0x20 {
                if window[1] == 0 {
                    break;
                }
                copy = Copy::read_long(window);
            }
            if at + copy.len + 16 > PAGE {
                break;
            }
            repeat(page, at, copy.dist, copy.len)?;
        } else {
            let from = at.wrapping_sub(copy.dist);
            if from >= at {
                return None;
            }
            // One after the other, so that the second can copy bytes that the first has written.
            shift::<16>(page, from, at)?;
            shift::<16>(page, from + 16, at + 16)?;
        }
        *page.get_mut(at + copy.len..)?.first_chunk_mut()? = copy.literals;
        at += copy.len + copy.count;
        rest = rest.get(copy.size..)?;
        state = copy.count;
    }
    Some(Cursor { input: object.len() - rest.len(), at, state })
}

#[inline(always)]
fn shift<const N: usize>(page: &mut Page, from: usize, to: usize) -> Option<()> {
    let bytes = *page.get(from..)?.first_chunk::<N>()?;
    *page.get_mut(to..)?.first_chunk_mut()? = bytes;
    Some(())
}

/// For a distance up to 8: the factor that fills eight bytes with a pattern of that length, and the
/// number of bytes in whole patterns.
const PATTERNS: [(u64, usize); 9] = {
    let mut table = [(0, 8); 9];
    let mut dist = 1;
    while dist <= 8 {
        let mut byte = 0;
        while byte < 8 {
            table[dist].0 |= 1 << (8 * byte);
            byte += dist;
        }
        table[dist].1 = 8 / dist * dist;
        dist += 1;
    }
    table
};

/// The eight bytes that start with those at `from` and continue with a period of `dist`, which is 1
/// to 8, and the number of bytes to advance.
#[inline(always)]
fn pattern(page: &Page, from: usize, dist: usize) -> ([u8; 8], usize) {
    let (factor, step) = PATTERNS[dist];
    let bytes = load(page, from) & (u64::MAX >> (64 - 8 * dist));
    (bytes.wrapping_mul(factor).to_le_bytes(), step)
}

/// Copies within the page, up to 15 bytes more than `len`.
#[inline(always)]
fn repeat(page: &mut Page, at: usize, dist: usize, len: usize) -> Option<()> {
    let end = at + len;
    let mut from = at.checked_sub(dist)?;
    let mut to = at;
    if dist >= 16 {
        while to < end {
            shift::<16>(page, from, to)?;
            from += 16;
            to += 16;
        }
    } else if dist > 8 {
        while to < end {
            shift::<8>(page, from, to)?;
            from += 8;
            to += 8;
        }
    } else {
        let (bytes, step) = pattern(page, from, dist);
        while to < end {
            *page.get_mut(to..)?.first_chunk_mut()? = bytes;
            to += step;
        }
    }
    Some(())
}

/// Copies within the page, `len` bytes and no more.
fn repeat_exactly(page: &mut Page, at: usize, dist: usize, len: usize) -> Option<()> {
    let end = at.checked_add(len).filter(|end| *end <= PAGE)?;
    let from = at.checked_sub(dist)?;
    let mut to = at;
    if dist > 8 {
        while end - to >= 8 {
            shift::<8>(page, to - dist, to)?;
            to += 8;
        }
    } else {
        let (bytes, step) = pattern(page, from, dist);
        while end - to >= 8 {
            *page.get_mut(to..)?.first_chunk_mut()? = bytes;
            to += step;
        }
    }
    while to < end {
        page[to] = page[to - dist];
        to += 1;
    }
    Some(())
}

/// Decodes one instruction of any form, except the end.
#[inline(never)]
fn any(object: &[u8], page: &mut Page, cursor: Cursor) -> Option<Cursor> {
    let Cursor { mut input, at, state } = cursor;
    let first = take(object, &mut input)?;
    if first < 0x10 && state == 0 {
        let count = 3 + if first == 0 { 15 + length(object, &mut input)? } else { first };
        return literals(object, page, Cursor { input, at, state: 4 }, count);
    }
    let (dist, len, count);
    if first >= 0x40 {
        let second = take(object, &mut input)?;
        (dist, len, count) = (1 + (second << 3 | (first >> 2 & 7)), 1 + (first >> 5), first & 3);
    } else if first >= 0x20 {
        len = 2 + if first == 0x20 { 31 + length(object, &mut input)? } else { first & 31 };
        let word = take(object, &mut input)? | take(object, &mut input)? << 8;
        (dist, count) = (1 + (word >> 2), word & 3);
    } else if first >= 0x10 {
        return None;
    } else {
        let near = take(object, &mut input)? << 2 | first >> 2;
        (dist, len) = if state == 4 { (2049 + near, 3) } else { (1 + near, 2) };
        count = first & 3;
    }
    repeat_exactly(page, at, dist, len)?;
    literals(object, page, Cursor { input, at: at + len, state: count }, count)
}

fn take(object: &[u8], input: &mut usize) -> Option<usize> {
    let byte = *object.get(*input)?;
    *input += 1;
    Some(usize::from(byte))
}

/// Reads the continuation of a length field of zero.
fn length(object: &[u8], input: &mut usize) -> Option<usize> {
    let zeros = object.get(*input..)?.iter().position(|byte| *byte != 0)?;
    *input += zeros;
    Some(zeros.checked_mul(255)? + take(object, input)?)
}

/// Moves literals to the page; the caller sets the cursor's `state`.
fn literals(object: &[u8], page: &mut Page, cursor: Cursor, count: usize) -> Option<Cursor> {
    let Cursor { input, at, state } = cursor;
    let literals = object.get(input..)?.get(..count)?;
    page.get_mut(at..)?.get_mut(..count)?.copy_from_slice(literals);
    Some(Cursor { input: input + count, at: at + count, state })
}

#[cfg(test)]
mod tests;

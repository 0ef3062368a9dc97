//! Size classes: the sizes of objects, and the number of frames in a zspage of each.
//!
//! Sizes go up in steps of 16 bytes. Each size gets the number of frames (1 to 8) with the least
//! waste at the end. Sizes with the same frames and the same number of objects share one class,
//! that of the largest. A size that fits only once in a frame is in the *huge* class: one raw page
//! in one frame, with its header elsewhere.

use crate::page::PAGE_BYTES;

/// Bytes of the header in front of every object that is not huge.
pub(crate) const HEADER_BYTES: usize = 8;
/// Frames of the longest zspage.
pub(crate) const FRAMES_MAX: usize = 8;

const STEP: usize = 16;
const SMALLEST: usize = 32;
/// The possible sizes: 32, 48, … 4096.
const SIZES: usize = (PAGE_BYTES - SMALLEST) / STEP + 1;

const _: () = assert!(STEP.is_multiple_of(align_of::<u64>()), "headers must be aligned");
const _: () = assert!(PAGE_BYTES.is_multiple_of(STEP), "no header may straddle two frames");
const _: () =
    assert!(FRAMES_MAX * PAGE_BYTES / SMALLEST <= 1 << 10, "a handle has ten bits for it");

/// One class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SizeClass {
    /// Bytes of an object, its header included.
    pub(crate) size: u16,
    /// Frames of a zspage.
    pub(crate) frames: u8,
    /// Objects in a zspage.
    pub(crate) objects: u16,
}

impl SizeClass {
    const fn of_size(size: usize) -> Self {
        let mut best = 1;
        let mut frames = 2;
        while frames <= FRAMES_MAX {
            // waste(frames) / frames < waste(best) / best, without the division.
            if (frames * PAGE_BYTES % size) * best < (best * PAGE_BYTES % size) * frames {
                best = frames;
            }
            frames += 1;
        }
        let objects = best * PAGE_BYTES / size;
        Self { size: size as u16, frames: best as u8, objects: objects as u16 }
    }

    /// True if this is the huge class.
    pub(crate) const fn is_huge(&self) -> bool {
        self.size as usize == PAGE_BYTES
    }

    const fn fits_once_a_frame(&self) -> bool {
        self.objects as usize <= self.frames as usize
    }
}

struct ClassTable {
    classes: [SizeClass; SIZES],
    count: usize,
    /// The class of each size, which is counted in steps.
    class_of: [u8; PAGE_BYTES / STEP + 1],
}

static TABLE: ClassTable = build();

/// Number of classes, the huge one (the last) included.
pub(crate) const CLASSES: usize = build().count;

/// Bytes of the largest object that is not huge: a page that compresses to more is kept raw.
pub(crate) const COMPRESSED_BYTES_MAX: usize = {
    let table = build();
    table.classes[table.count - 2].size as usize - HEADER_BYTES
};

const fn build() -> ClassTable {
    let huge = SizeClass { size: PAGE_BYTES as u16, frames: 1, objects: 1 };
    // From large to small, so that each size can join the class above; then reversed.
    let mut down = [huge; SIZES];
    let mut count = 1;
    let mut of_step = [0u8; PAGE_BYTES / STEP + 1];
    let mut step = PAGE_BYTES / STEP;
    while step > 0 {
        step -= 1;
        let size = if step * STEP < SMALLEST { SMALLEST } else { step * STEP };
        let class = SizeClass::of_size(size);
        let above = down[count - 1];
        let joins = class.fits_once_a_frame()
            || (class.frames == above.frames && class.objects == above.objects);
        if !joins {
            down[count] = class;
            count += 1;
        }
        of_step[step] = (count - 1) as u8;
    }
    let mut table = ClassTable { classes: [huge; SIZES], count, class_of: of_step };
    let mut i = 0;
    while i < count {
        table.classes[i] = down[count - 1 - i];
        i += 1;
    }
    let mut step = 0;
    while step < table.class_of.len() {
        table.class_of[step] = (count - 1) as u8 - table.class_of[step];
        step += 1;
    }
    table
}

/// All classes, by number, from small to large.
pub(crate) fn classes() -> &'static [SizeClass] {
    &TABLE.classes[..TABLE.count]
}

/// Number of the class for an object of `bytes` (without header), at most a page.
pub(crate) fn class_of(bytes: usize) -> usize {
    debug_assert!((1..=PAGE_BYTES).contains(&bytes));
    if bytes > COMPRESSED_BYTES_MAX {
        return CLASSES - 1;
    }
    usize::from(TABLE.class_of[(bytes + HEADER_BYTES).div_ceil(STEP)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_fits_its_class_and_no_smaller_one() {
        for bytes in 1..=PAGE_BYTES {
            let number = class_of(bytes);
            let class = classes()[number];
            let header = if class.is_huge() { 0 } else { HEADER_BYTES };
            assert!(usize::from(class.size) >= bytes + header, "{bytes} in {class:?}");
            if number > 0 && !class.is_huge() {
                let below = classes()[number - 1];
                assert!(usize::from(below.size) < bytes + header, "{bytes} would fit {below:?}");
            }
        }
    }

    #[test]
    fn objects_fit_their_zspage() {
        for class in classes() {
            let bytes = usize::from(class.frames) * PAGE_BYTES;
            assert!(usize::from(class.objects) * usize::from(class.size) <= bytes, "{class:?}");
            assert!(usize::from(class.frames) <= FRAMES_MAX);
        }
        assert!(classes().is_sorted_by_key(|class| class.size));
        assert!(classes()[CLASSES - 1].is_huge());
    }

    #[test]
    fn two_thirds_of_a_page_go_three_to_two_frames() {
        let class = classes()[class_of(PAGE_BYTES * 2 / 3 - HEADER_BYTES - STEP)];
        assert_eq!((class.frames, class.objects), (2, 3), "{class:?}");
    }

    #[test]
    fn the_table_wastes_little_on_evenly_spread_sizes() {
        let (mut held, mut used) = (0.0, 0.0);
        for bytes in 64..=COMPRESSED_BYTES_MAX {
            let class = classes()[class_of(bytes)];
            let zspage = f64::from(u32::from(class.frames)) * PAGE_BYTES as f64;
            held += zspage / f64::from(class.objects);
            used += (bytes + HEADER_BYTES) as f64;
        }
        assert!(held / used < 1.025, "{}", held / used);
    }
}

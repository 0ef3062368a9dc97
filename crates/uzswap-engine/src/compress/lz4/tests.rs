use super::super::samples::{Random, assert_room, mixed, pointers, samples};
use super::{BY_PAGE, Lz4};
use crate::compress::Compressor;
use crate::page::{PAGE_BYTES as PAGE, Page};

/// Both of our encoders.
fn ours() -> [Lz4; 2] {
    [0, -1].map(|level| {
        let mut encoder = Lz4::new();
        encoder.set_level(level);
        encoder
    })
}

fn compress(encoder: &mut Lz4, page: &Page) -> Vec<u8> {
    let mut out = vec![0; 2 * PAGE];
    let len = encoder.compress(page, &mut out).expect("twice a page is plenty");
    out.truncate(len);
    out
}

/// The rest of an object.
struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    /// The number that a field begins.
    fn number(&mut self, field: u8) -> usize {
        let mut number = usize::from(field);
        let mut goes_on = field == 15;
        while goes_on {
            let byte = self.take(1)[0];
            number += usize::from(byte);
            goes_on = byte == 255;
        }
        number
    }
}

/// Decodes by the description of the format, with its conditions for the end of a block, which
/// not every decoder checks.
fn decode_strictly(object: &[u8]) -> Vec<u8> {
    let mut reader = ByteReader(object);
    let mut page: Vec<u8> = vec![];
    let mut last_match = 0..0;
    loop {
        let token = reader.take(1)[0];
        let count = reader.number(token >> 4);
        page.extend(reader.take(count));
        if reader.0.is_empty() {
            assert!(last_match.is_empty() || count >= 5);
            assert!(last_match.is_empty() || last_match.start + 12 <= page.len());
            return page;
        }
        let dist = usize::from(u16::from_le_bytes(reader.take(2).try_into().unwrap()));
        let len = 4 + reader.number(token & 15);
        last_match = page.len()..page.len() + len;
        for at in last_match.clone() {
            page.push(page[at - dist]);
        }
    }
}

/// Passes a page through our encoders and every decoder; returns the objects.
fn cross(ours: &mut [Lz4; 2], page: &Page) -> [Vec<u8>; 2] {
    ours.each_mut().map(|encoder| cross_one(encoder, page))
}

fn cross_one(encoder: &mut Lz4, page: &Page) -> Vec<u8> {
    let object = compress(encoder, page);
    assert!(decode_strictly(&object) == page);
    let mut back = [0xA5; PAGE];
    Lz4::new().decompress(&object, &mut back).expect("an object of ours");
    assert!(back == *page, "by liblz4");
    let mut back = [0x5A; PAGE];
    assert_eq!(lz4_flex::block::decompress_into(&object, &mut back).unwrap(), PAGE);
    assert!(back == *page, "by lz4_flex");
    object
}

#[test]
fn samples_pass_through_every_decoder() {
    let mut ours = ours();
    let mut random = Random(0xDEAD_BEEF);
    for page in samples() {
        cross(&mut ours, &page);
    }
    for _ in 0..3000 {
        cross(&mut ours, &mixed(&mut random));
        cross(&mut ours, &pointers(&mut random));
    }
}

#[test]
fn a_real_program_passes_through_every_decoder() {
    let mut ours = ours();
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let pages = program.as_chunks::<PAGE>().0;
    for page in pages.iter().step_by(1 + pages.len() / 1000) {
        cross(&mut ours, page);
    }
}

#[test]
fn sizes_are_as_expected() {
    for mut encoder in ours() {
        let mut bytes = |page: &Page| cross_one(&mut encoder, page).len();
        // 4096 = 15 + 16 * 255 + 1 literals.
        assert_eq!(bytes(&Random(99).page()), 1 + 17 + PAGE);
        // An array of structures of 48 bytes with four that differ: a match to each.
        let noise = Random(98).page();
        let page = std::array::from_fn(|at| noise[if at % 48 < 4 { at } else { at % 48 }]);
        let (array, each) = (bytes(&page), 1 + 4 + 2 + 1);
        assert!(array < 48 + each * (PAGE / 48 + 1), "{array}");
    }
    // A literal, extended back by the first possible sequence; a match up to five bytes before the
    // end. 4090 = 4 + 15 + 15 * 255 + 246, and 4083 = 4 + 15 + 15 * 255 + 239.
    let [words, bytes] = cross(&mut ours(), &[7; PAGE]).map(|object| object.len());
    assert_eq!(words, (1 + 4 + 2 + 16) + (1 + 5));
    assert_eq!(bytes, (1 + 8 + 2 + 16) + (1 + 5));
}

#[test]
fn a_longer_match_one_byte_on_is_taken() {
    // Two sequences before the strides grow. Then a place where one of them matches for five
    // bytes; the other sequence matches for seven bytes, one byte later.
    let mut page = Random(4).page();
    page[10..17].copy_from_slice(b"xabcdez");
    page[20..29].copy_from_slice(b"ybcdefghz");
    let [words, bytes] = cross(&mut ours(), &page).map(|object| object.len());
    page[40..50].copy_from_slice(b"wabcdefghw");
    let [words_now, bytes_now] = cross(&mut ours(), &page).map(|object| object.len());
    // Seven bytes for a token and a distance.
    assert_eq!(bytes - bytes_now, 7 - 3);
    assert_eq!(words, words_now, "no word of it is where a word was");
}

#[test]
fn an_object_does_not_depend_on_earlier_ones() {
    let mut used = ours();
    for page in samples() {
        let again = used.each_mut().map(|encoder| compress(encoder, &page));
        assert!(again == ours().each_mut().map(|encoder| compress(encoder, &page)));
    }
}

#[test]
fn literal_runs_of_every_length_come_back() {
    let mut ours = ours();
    let noise = Random(5).page();
    for count in 1..=600 {
        // As the first literals, before a near match.
        let mut page: Page = std::array::from_fn(|at| noise[at % (count + 20)]);
        cross(&mut ours, &page);
        // Between matches, and last.
        page[..1000].fill(1);
        page[1000..1000 + count].copy_from_slice(&noise[..count]);
        page[1000 + count..PAGE - count].fill(2);
        page[PAGE - count..].copy_from_slice(&noise[1000..1000 + count]);
        cross(&mut ours, &page);
    }
}

#[test]
fn matches_of_every_length_come_back() {
    let mut ours = ours();
    let noise = Random(6).page();
    // All short lengths, and the lengths that need one more length byte.
    for len in (1..PAGE - 16).filter(|len| *len < 800 || (len + 236) % 255 < 8) {
        let mut page = noise;
        page[16..16 + len].fill(3);
        cross(&mut ours, &page);
    }
    for (dist, len) in (1..=2100).step_by(7).flat_map(|d| (3..70).step_by(3).map(move |l| (d, l))) {
        let mut page = noise;
        for at in 2100..2100 + len {
            page[at] = page[at - dist];
        }
        cross(&mut ours, &page);
    }
}

#[test]
fn matches_at_the_end_of_the_page_come_back() {
    let mut ours = ours();
    let noise = Random(9).page();
    for start in PAGE - 80..PAGE {
        for end in start..=PAGE {
            for dist in [1, 4, 8, 12, 16, 28] {
                let mut page = noise;
                // After many literals the encoder would stride past the match.
                page[..start - 30].fill(0);
                for at in start..end {
                    page[at] = page[at - dist];
                }
                cross(&mut ours, &page);
            }
        }
    }
}

#[test]
fn room_for_the_object_is_enough_and_less_is_not() {
    let mut random = Random(8);
    for page in [[0; PAGE], random.page(), pointers(&mut random), mixed(&mut random)] {
        for mut encoder in ours() {
            assert_room(&page, |page, out| encoder.compress(page, out));
        }
    }
}

/// Compresses a page at the very end of a thread: destructors of its variables run in reverse
/// order.
struct Last;

thread_local! {
    static LAST: Last = const { Last };
}

impl Drop for Last {
    fn drop(&mut self) {
        let (mut page, mut object) = ([7; PAGE], [0; PAGE]);
        page[100..200].fill(8);
        let mut encoder = Lz4::new();
        let bytes = encoder.compress(&page, &mut object).expect("two bytes, repeated");
        let mut back = [0; PAGE];
        assert!(encoder.decompress(&object[..bytes], &mut back).is_ok() && back == page);
    }
}

#[test]
fn a_thread_that_is_ending_can_compress() {
    let thread = std::thread::spawn(|| {
        LAST.with(|_| ());
        Lz4::new().compress(&[1; PAGE], &mut [0; PAGE]).expect("a byte, repeated");
    });
    thread.join().expect("it only compresses");
}

/// Under the bare name the encoder for words makes objects of heaps, and the library makes those of
/// text.
#[test]
fn an_encoder_is_chosen_by_page() {
    let text: Page =
        std::array::from_fn(|at| b"it takes pages on their way out of memory "[at % 42]);
    let at_level = |level, page: &Page| {
        let mut encoder = Lz4::new();
        encoder.set_level(level);
        compress(&mut encoder, page)
    };
    let mut random = Random(7);
    for _ in 0..20 {
        let heap = pointers(&mut random);
        assert!(at_level(BY_PAGE, &heap) == at_level(0, &heap));
        assert!(at_level(0, &heap) != at_level(1, &heap), "the two differ");
    }
    assert!(at_level(BY_PAGE, &text) == at_level(1, &text));
    assert!(at_level(0, &text) != at_level(1, &text), "the two differ");
}

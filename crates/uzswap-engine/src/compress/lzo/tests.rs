use super::super::samples::{Random, assert_room, mixed, pointers, samples};
use super::super::{Compressor, Undecodable};
use super::Lzo;
use crate::page::{PAGE_BYTES as PAGE, Page};

const END: [u8; 3] = [0x11, 0, 0];

fn compress(lzo: &mut Lzo, page: &Page) -> Vec<u8> {
    let mut out = vec![0; 2 * PAGE];
    let len = lzo.compress(page, &mut out).expect("twice a page is plenty");
    out.truncate(len);
    out
}

fn decompress(lzo: &mut Lzo, object: &[u8]) -> Result<Page, Undecodable> {
    let mut page = [0xA5; PAGE];
    lzo.decompress(object, &mut page).map(|()| page)
}

fn lzokay_decompress(object: &[u8]) -> Option<Page> {
    let mut page = [0x5A; PAGE];
    let len = lzokay::decompress::decompress(object, &mut page).ok()?;
    (len == PAGE).then_some(page)
}

/// Passes a page through both codecs in every combination; returns our object's length.
fn cross(lzo: &mut Lzo, page: &Page) -> usize {
    let object = compress(lzo, page);
    assert!(object.ends_with(&END));
    assert_ne!(object[0], 17, "a first byte of 17 announces another version of the format");
    assert!(decompress(lzo, &object).as_ref() == Ok(page), "ours by ours");
    assert!(lzokay_decompress(&object).as_ref() == Some(page), "ours by lzokay");
    let theirs = lzokay::compress::compress(page).unwrap();
    assert!(decompress(lzo, &theirs).as_ref() == Ok(page), "lzokay's by ours");
    object.len()
}

/// Decodes arbitrary bytes. Our decoder may only be stricter than lzokay, and only about objects
/// that are not a page and about a stream's begin and end.
fn judge(lzo: &mut Lzo, object: &[u8]) -> bool {
    let ours = decompress(lzo, object).ok();
    let theirs = lzokay_decompress(object);
    let regular = object.first() != Some(&17) && object.ends_with(&END);
    match (ours, theirs) {
        (Some(ours), theirs) => assert!(theirs == Some(ours), "{object:02x?}"),
        (None, Some(_)) => assert!(!regular, "{object:02x?}"),
        (None, None) => {}
    }
    ours.is_some()
}

#[test]
fn samples_pass_through_both_codecs() {
    let mut lzo = Lzo::new();
    for page in samples() {
        cross(&mut lzo, &page);
    }
}

#[test]
fn sizes_are_as_expected() {
    let mut lzo = Lzo::new();
    // A literal, then a copy of 4095 = 33 + 15 * 255 + 237.
    assert_eq!(cross(&mut lzo, &[7; PAGE]), 2 + 1 + 16 + 2 + 3);
    // A run of 4096 = 18 + 15 * 255 + 253.
    let page = Random(99).page();
    assert_eq!(cross(&mut lzo, &page), 1 + 16 + PAGE + 3);
}

#[test]
fn an_object_does_not_depend_on_earlier_ones() {
    let mut used = Lzo::new();
    for page in samples() {
        assert!(compress(&mut used, &page) == compress(&mut Lzo::new(), &page));
    }
}

#[test]
fn literal_runs_of_every_length_come_back() {
    let mut lzo = Lzo::new();
    let noise = Random(5).page();
    for count in 1..=600 {
        // As the first literals, before a near match.
        let mut page: Page = std::array::from_fn(|at| noise[at % (count + 20)]);
        cross(&mut lzo, &page);
        // Between matches, and last.
        page[..1000].fill(1);
        page[1000..1000 + count].copy_from_slice(&noise[..count]);
        page[1000 + count..PAGE - count].fill(2);
        page[PAGE - count..].copy_from_slice(&noise[1000..1000 + count]);
        cross(&mut lzo, &page);
    }
}

#[test]
fn matches_of_every_length_come_back() {
    let mut lzo = Lzo::new();
    let noise = Random(6).page();
    // All short lengths, and the lengths that need one more length byte.
    for len in (1..PAGE - 16).filter(|len| *len < 800 || (len + 226) % 255 < 8) {
        let mut page = noise;
        page[16..16 + len].fill(3);
        cross(&mut lzo, &page);
    }
    for (dist, len) in (1..=2100).step_by(7).flat_map(|d| (3..70).map(move |l| (d, l))) {
        let mut page = noise;
        for at in 2100..2100 + len {
            page[at] = page[at - dist];
        }
        let object = compress(&mut lzo, &page);
        assert!(decompress(&mut lzo, &object) == Ok(page));
        assert!(lzokay_decompress(&object) == Some(page));
    }
}

#[test]
fn matches_at_the_end_of_the_page_come_back() {
    let mut lzo = Lzo::new();
    let noise = Random(9).page();
    for start in PAGE - 80..PAGE {
        for end in start..=PAGE {
            for dist in [1, 3, 8, 9, 16, 17, 30] {
                let mut page = noise;
                // After many literals the compressor would stride past the match.
                page[..start - 30].fill(0);
                for at in start..end {
                    page[at] = page[at - dist];
                }
                let object = compress(&mut lzo, &page);
                assert!(decompress(&mut lzo, &object) == Ok(page));
            }
        }
    }
}

#[test]
fn mixtures_pass_through_both_codecs() {
    let mut lzo = Lzo::new();
    let mut random = Random(0xDEAD_BEEF);
    for _ in 0..3000 {
        cross(&mut lzo, &mixed(&mut random));
    }
}

#[test]
fn room_for_the_object_is_enough_and_less_is_not() {
    let mut lzo = Lzo::new();
    let mut random = Random(8);
    for page in [[0; PAGE], random.page(), pointers(&mut random), mixed(&mut random)] {
        assert_room(&page, |page, out| lzo.compress(page, out));
    }
}

/// A made-up stream and the page it makes.
struct BitStream {
    object: Vec<u8>,
    page: Vec<u8>,
    state: usize,
}

impl BitStream {
    /// Instructions of all forms that reach within a page, in any order that is allowed.
    fn new(random: &mut Random) -> Self {
        let mut stream = Self { object: vec![], page: vec![], state: 0 };
        if random.below(4) > 0 {
            let count = 1 + random.below(238);
            stream.object.push(17 + count as u8);
            stream.literals(random, count);
        }
        let longest = random.skewed(2000);
        while stream.page.len() < PAGE - 20 {
            let most = (PAGE - 9 - stream.page.len()).min(5 + longest);
            if stream.state == 0 && (stream.page.is_empty() || random.below(3) == 0) {
                stream.run(random, most);
            } else {
                stream.copy(random, most);
            }
        }
        let room = PAGE - stream.page.len();
        if stream.state == 0 && random.below(2) == 0 {
            stream.length(0, room - 3, 15);
            stream.literals(random, room);
        } else {
            let count = random.below(4);
            let dist = random.skewed(stream.page.len());
            stream.medium(random, dist, room - count, count);
        }
        assert_eq!(stream.page.len(), PAGE);
        stream.object.extend(END);
        stream
    }

    fn literals(&mut self, random: &mut Random, count: usize) {
        for _ in 0..count {
            let byte = random.byte();
            self.object.push(byte);
            self.page.push(byte);
        }
        self.state = count.min(4);
    }

    fn run(&mut self, random: &mut Random, most: usize) {
        let count = 3 + random.skewed(most - 3);
        self.length(0, count - 3, 15);
        self.literals(random, count);
    }

    /// Pushes a first byte with a length in it, or after it.
    fn length(&mut self, code: u8, value: usize, most: usize) {
        if (1..=most).contains(&value) {
            return self.object.push(code | value as u8);
        }
        self.object.push(code);
        let beyond = value - most - 1;
        self.object.resize(self.object.len() + beyond / 255, 0);
        self.object.push((beyond % 255 + 1) as u8);
    }

    /// A copy of at most `most` bytes, and up to 3 literals.
    fn copy(&mut self, random: &mut Random, most: usize) {
        let dist = random.skewed(self.page.len());
        let count = random.below(4);
        let form = random.below(5);
        match self.state {
            1..4 if form < 2 => {
                let dist = dist.min(1024);
                self.two(random, (dist - 1) << 2 & 12, (dist - 1) >> 2, (dist, 2), count);
            }
            4 if form < 2 && dist > 2048 && dist <= 3072 => {
                let code = dist - 2049;
                self.two(random, code << 2 & 12, code >> 2, (dist, 3), count);
            }
            _ if form < 4 => {
                let (dist, len) = (dist.min(2048), 3 + random.below(6.min(most - 2)));
                let first = (len - 1) << 5 | (dist - 1) << 2 & 28;
                self.two(random, first, (dist - 1) >> 3, (dist, len), count);
            }
            _ => {
                let len = 2 + random.skewed(most - 2);
                self.medium(random, dist, len, count);
            }
        }
    }

    fn two(
        &mut self,
        random: &mut Random,
        first: usize,
        second: usize,
        (dist, len): (usize, usize),
        count: usize,
    ) {
        self.object.extend([(first | count) as u8, second as u8]);
        self.repeat(dist, len);
        self.literals(random, count);
    }

    fn medium(&mut self, random: &mut Random, dist: usize, len: usize, count: usize) {
        self.length(0x20, len - 2, 31);
        self.object.extend((((dist - 1) << 2 | count) as u16).to_le_bytes());
        self.repeat(dist, len);
        self.literals(random, count);
    }

    fn repeat(&mut self, dist: usize, len: usize) {
        for _ in 0..len {
            self.page.push(self.page[self.page.len() - dist]);
        }
    }
}

#[test]
fn streams_of_any_encoder_decode() {
    let mut lzo = Lzo::new();
    let mut random = Random(0xFEED_F00D);
    for _ in 0..10_000 {
        let stream = BitStream::new(&mut random);
        assert!(lzokay_decompress(&stream.object).is_some_and(|page| page[..] == stream.page));
        let ours = decompress(&mut lzo, &stream.object);
        assert!(ours.is_ok_and(|page| page[..] == stream.page), "{:02x?}", stream.object);
    }
}

#[test]
fn damaged_streams_never_panic() {
    let mut lzo = Lzo::new();
    let mut random = Random(0xBAD_CAFE);
    let mut survivors = 0;
    for _ in 0..10_000 {
        let BitStream { mut object, .. } = BitStream::new(&mut random);
        for _ in 0..random.skewed(4) {
            let at = random.below(object.len());
            match random.below(4) {
                0 => object[at] = random.byte(),
                1 => object[at] ^= 1 << random.below(8),
                2 => drop(object.remove(at)),
                _ => object.insert(at, random.byte() & random.byte()),
            }
        }
        survivors += usize::from(judge(&mut lzo, &object));
    }
    assert!(survivors > 0, "literals can change without further damage");
}

#[test]
fn noise_never_panics() {
    let mut lzo = Lzo::new();
    let mut random = Random(0xABAD_1DEA);
    for _ in 0..20_000 {
        let mask = random.byte();
        let mut object: Vec<u8> = vec![18 + random.byte() % 8; 1 + random.skewed(2000)];
        object[1..].fill_with(|| random.byte() & mask);
        judge(&mut lzo, &object);
    }
}

#[test]
fn both_decoders_agree_on_every_corruption_of_one_byte() {
    let mut lzo = Lzo::new();
    let mut random = Random(0x0DD);
    for page in [[0; PAGE], pointers(&mut random), mixed(&mut random), mixed(&mut random)] {
        let object = compress(&mut lzo, &page);
        for at in 0..object.len() {
            let mut object = object.clone();
            let few = [0, 1, 0x11, 0x20, 0xFF, object[at] ^ 1, object[at] ^ 0x80];
            let all: Vec<u8> = (0..=255).collect();
            for byte in if object.len() < 300 { &all[..] } else { &few[..] } {
                object[at] = *byte;
                judge(&mut lzo, &object);
            }
        }
    }
}

#[test]
fn an_object_cut_short_or_drawn_out_is_undecodable() {
    let mut lzo = Lzo::new();
    for page in samples() {
        let mut object = compress(&mut lzo, &page);
        for len in 0..object.len() {
            assert!(decompress(&mut lzo, &object[..len]) == Err(Undecodable), "{len}");
            if len % 64 < 2 {
                let ended = [&object[..len], &END[..]].concat();
                judge(&mut lzo, &ended);
            }
        }
        object.push(0);
        assert!(decompress(&mut lzo, &object) == Err(Undecodable));
    }
}

#[test]
fn a_stream_that_is_not_one_page_long_is_undecodable() {
    let mut lzo = Lzo::new();
    let noise = Random(77).page();
    let run = |len: usize| {
        let beyond = len - 19;
        let mut object = vec![0; 1 + beyond / 255];
        object.push((beyond % 255 + 1) as u8);
        object.extend(noise.iter().cycle().take(len));
        object.extend(END);
        object
    };
    assert!(decompress(&mut lzo, &run(PAGE)) == Ok(noise));
    for len in [19, PAGE - 1, PAGE + 1, PAGE + 4096] {
        assert!(decompress(&mut lzo, &run(len)) == Err(Undecodable));
    }
    let object = run(PAGE);
    let last = object.len() - 3;
    // The end in any other form, an instruction that reaches too far, a zero run of the
    // other version of the format, and nothing at all.
    for end in [[0x11, 1, 0], [0x12, 0, 0], [0x11, 0, 4], [0x19, 0, 0], [0x18, 0xFC, 0xFF]] {
        let object = [&object[..last], &end[..]].concat();
        assert!(decompress(&mut lzo, &object) == Err(Undecodable));
    }
    let versioned = [&[17, 0], &object[..]].concat();
    for object in [&versioned[..], &END[..], &[17, 1, 0x11, 0, 0], &[0; 5000], &[]] {
        assert!(decompress(&mut lzo, object) == Err(Undecodable));
    }
}

#[test]
fn first_literals_set_the_state_by_their_number() {
    let mut lzo = Lzo::new();
    // After three literals these two bytes copy 2 from near by. After four they copy 3, from before
    // the start of the page.
    for (count, valid) in [(1, true), (2, true), (3, true), (4, false)] {
        let mut object = vec![17 + count];
        object.extend(&[b'a', b'b', b'c', b'd'][..count as usize]);
        object.extend([0, 0]);
        let beyond = PAGE - count as usize - 2 - 34;
        object.push(0x20);
        object.resize(object.len() + beyond / 255, 0);
        object.extend([(beyond % 255 + 1) as u8, 0, 0]);
        object.extend(END);
        assert_eq!(judge(&mut lzo, &object), valid, "{count}");
    }
}

#[test]
fn a_real_program_passes_through_both_codecs() {
    let mut lzo = Lzo::new();
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let pages = program.as_chunks::<PAGE>().0;
    for page in pages.iter().step_by(1 + pages.len() / 1000) {
        cross(&mut lzo, page);
    }
}

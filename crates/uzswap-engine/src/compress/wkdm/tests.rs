use super::super::samples::{Random, assert_room, mixed, pointers, samples};
use super::super::{Compressor, Undecodable};
use super::{Counts, TAGS, Wkdm};
use crate::page::{PAGE_BYTES as PAGE, Page};
use proptest::prelude::*;

fn compress(wkdm: &mut Wkdm, page: &Page) -> Vec<u8> {
    let mut out = vec![0; 2 * PAGE];
    let len = wkdm.compress(page, &mut out).expect("twice a page is plenty");
    out.truncate(len);
    out
}

fn decompress(wkdm: &mut Wkdm, object: &[u8]) -> Result<Page, Undecodable> {
    let mut page = [0xA5; PAGE];
    wkdm.decompress(object, &mut page).map(|()| page)
}

/// Both forms; where the processor lacks the instructions of the vector form, the scalar one twice.
struct Forms {
    scalar: Wkdm,
    vector: Wkdm,
}

impl Forms {
    fn new() -> Self {
        Self { scalar: Wkdm::scalar(), vector: Wkdm::new() }
    }

    /// Passes a page through both forms in every combination.
    fn cross(&mut self, page: &Page) -> Vec<u8> {
        let object = compress(&mut self.scalar, page);
        assert!(compress(&mut self.vector, page) == object);
        assert!(self.judge(&object) == Ok(*page));
        object
    }

    /// Decodes arbitrary bytes; both forms must give the same result.
    fn judge(&mut self, object: &[u8]) -> Result<Page, Undecodable> {
        let page = decompress(&mut self.scalar, object);
        assert!(decompress(&mut self.vector, object) == page, "{object:02x?}");
        page
    }
}

fn page_of(words: &[u32]) -> Page {
    let mut page = [0; PAGE];
    for (bytes, word) in page.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

/// Words that are mostly old or nearly so, some of which share a slot.
fn words(random: &mut Random) -> Page {
    let known: Vec<u32> = (0..random.skewed(64)).map(|_| random.next() as u32).collect();
    let zeros = random.below(8);
    let news = random.below(8);
    let words: Vec<u32> = (0..PAGE / 4)
        .map(|_| match random.below(16) {
            kind if kind < zeros => 0,
            kind if kind >= 16 - news => random.next() as u32,
            _ => known[random.below(known.len())] ^ random.skewed(2048) as u32 >> 1,
        })
        .collect();
    page_of(&words)
}

#[test]
fn samples_pass_through_both_forms() {
    let mut forms = Forms::new();
    let mut random = Random(0x5EED);
    for page in samples() {
        forms.cross(&page);
    }
    for _ in 0..3000 {
        forms.cross(&words(&mut random));
    }
}

#[test]
fn a_real_program_passes_through_both_forms() {
    let mut forms = Forms::new();
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let pages = program.as_chunks::<PAGE>().0;
    for page in pages.iter().step_by(1 + pages.len() / 1000) {
        forms.cross(page);
    }
}

/// Checks the format by hand: a literal, the same word, a word near it, a zero, and a small number.
/// The last is near the zero that all slots begin with.
#[test]
fn an_object_is_laid_out_as_described() {
    let word = 0x1234_5678;
    let page = page_of(&[word, word, word ^ 0x3ff, 0, 5]);
    let object = Forms::new().cross(&page);
    let mut expected = vec![0; TAGS];
    expected[0] = 0b10110;
    expected[2] = 0b00011;
    expected.extend(word.to_le_bytes());
    // Slots of the second, third and fifth word.
    let slot = ((word >> 10).wrapping_mul(0xC2B2_AE35) >> 28) as u8;
    expected.extend([slot | slot << 4, 0]);
    let low = (word ^ 0x3ff) & 0x3ff;
    let lows = low | 5 << 10;
    expected.extend(&lows.to_le_bytes()[..3]);
    assert_eq!(object, expected);
}

#[test]
fn sizes_are_as_expected() {
    let mut forms = Forms::new();
    assert_eq!(forms.cross(&[0; PAGE]).len(), TAGS);
    // One literal, and 1023 times its slot.
    assert_eq!(forms.cross(&[7; PAGE]).len(), TAGS + 4 + 512);
    // Of 1024 random words hardly one is near another.
    let len = forms.cross(&Random(99).page()).len();
    assert!((TAGS + PAGE - 64..=TAGS + PAGE).contains(&len), "{len}");
}

#[test]
fn sections_of_every_length_come_back() {
    let mut forms = Forms::new();
    let mut random = Random(11);
    for count in 0..=PAGE / 4 {
        let new = random.next() as u32;
        let partial: Vec<u32> = (0..count).map(|i| new ^ i as u32 & 0x3ff).collect();
        forms.cross(&page_of(&partial));
        forms.cross(&page_of(&vec![new; count]));
        let literal: Vec<u32> = (0..count).map(|_| random.next() as u32).collect();
        forms.cross(&page_of(&literal));
    }
}

#[test]
fn an_object_does_not_depend_on_earlier_ones() {
    let mut used = Forms::new();
    for page in samples() {
        assert!(used.cross(&page) == Forms::new().cross(&page));
    }
}

#[test]
fn room_for_the_object_is_enough_and_less_is_not() {
    let mut random = Random(8);
    for page in [[0; PAGE], random.page(), pointers(&mut random), words(&mut random)] {
        for mut wkdm in [Wkdm::scalar(), Wkdm::new()] {
            assert_room(&page, |page, out| wkdm.compress(page, out));
        }
    }
}

#[test]
fn an_object_cut_short_or_drawn_out_is_undecodable() {
    let mut forms = Forms::new();
    for page in samples() {
        let mut object = forms.cross(&page);
        for len in 0..object.len() {
            assert!(forms.judge(&object[..len]) == Err(Undecodable), "{len}");
        }
        object.push(0);
        assert!(forms.judge(&object) == Err(Undecodable));
    }
}

/// Most changes of tags change the length and are noticed. Changes in other sections change the
/// page, and the checksum notices them. A wrong slot may have the same word, at first zero.
#[test]
fn both_decoders_agree_on_every_corruption_of_one_byte() {
    let mut forms = Forms::new();
    let mut random = Random(0x0DD);
    for page in [pointers(&mut random), mixed(&mut random), words(&mut random)] {
        let object = forms.cross(&page);
        let [literals, slots, _] = Counts::of(object.first_chunk().unwrap()).ends();
        let mut undecodable = 0;
        for at in 0..object.len() {
            let mut object = object.clone();
            for byte in (0..=255).filter(|byte| at < 2 * TAGS || byte % 15 == 0) {
                if byte == object[at] {
                    continue;
                }
                let whole = std::mem::replace(&mut object[at], byte);
                match forms.judge(&object) {
                    Ok(damaged) => {
                        let is_brought = (TAGS..literals).contains(&at) || at >= slots;
                        assert!(damaged != page || !is_brought, "{at}: {byte}");
                    }
                    Err(Undecodable) => undecodable += 1,
                }
                object[at] = whole;
            }
        }
        assert!(undecodable > 0);
    }
}

#[test]
fn filling_bits_that_are_not_zero_are_undecodable() {
    let mut forms = Forms::new();
    for partial in 1..9 {
        let words: Vec<u32> = (1..=partial).collect();
        let object = forms.cross(&page_of(&words));
        let slots = TAGS + words.len().div_ceil(2);
        for (section, bits) in [(TAGS..slots, 4), (slots..object.len(), 10)] {
            for bit in bits * words.len()..8 * section.len() {
                let mut object = object.clone();
                object[section.start + bit / 8] |= 1 << (bit % 8);
                assert!(forms.judge(&object) == Err(Undecodable), "{partial}: {bit}");
            }
        }
    }
}

/// Any tags, with sections of the length that they need.
#[test]
fn noise_decodes_to_the_same_in_both_forms() {
    let mut forms = Forms::new();
    let mut random = Random(0xABAD_1DEA);
    let mut decoded = 0;
    for _ in 0..20_000 {
        let (set, unset) = (random.next() as u32, random.next() as u32);
        let mut tags = [0; TAGS];
        for group in tags.as_chunks_mut::<4>().0 {
            let sparse = random.next() as u32 & set | random.next() as u32 & unset;
            *group = sparse.to_le_bytes();
        }
        let [.., end] = Counts::of(&tags).ends();
        let mut object = tags.to_vec();
        object.resize_with(end, || random.byte());
        decoded += usize::from(forms.judge(&object).is_ok());
    }
    assert!(decoded > 100, "{decoded}");
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(object in prop::collection::vec(any::<u8>(), 0..6000)) {
        let _ = Forms::new().judge(&object);
    }
}

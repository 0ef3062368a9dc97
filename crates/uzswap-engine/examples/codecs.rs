//! What each codec makes of a file of pages: `codecs FILE [PAGES [ROUNDS]]`.
//!
//! Prints nanoseconds a page out and in, and the ratio of pages' bytes to objects', a page that
//! does not fit counting as it is. Pages of one repeated word are left out, as the cache does.
//! Algorithms take turns and medians of the rounds are shown, so that what else a machine does
//! meets all of them. Pages have just been read when they are compressed, as in a store, where
//! their checksum has been; objects have not.

use std::hint::black_box;
use std::time::Instant;
use uzswap_engine::compress::{Codec, Codecs, prepare_thread};
use uzswap_engine::{PAGE_BYTES, Page};

const ALGORITHMS: [&str; 7] = ["lz4", "lz4:0", "lzo", "zstd", "zstd:1", "deflate", "wkdm"];

/// Pages that are read, then compressed: 256 KiB, within the second cache.
const BATCH_PAGES: usize = 64;

/// What one algorithm has done.
struct Figures {
    name: &'static str,
    codecs: Codecs,
    out_ns: Vec<f64>,
    in_ns: Vec<f64>,
    bytes: usize,
}

impl Figures {
    fn new(name: &'static str) -> Self {
        let codecs = Codecs::new(name.parse().expect("one of the codecs"));
        Self { name, codecs, out_ns: vec![], in_ns: vec![], bytes: 0 }
    }

    fn round(&mut self, pages: &[Page]) {
        let mut objects = vec![(Codec::Raw, 0, [0; PAGE_BYTES]); pages.len()];
        let mut out_ns = 0;
        for (pages, objects) in pages.chunks(BATCH_PAGES).zip(objects.chunks_mut(BATCH_PAGES)) {
            black_box(pages.as_flattened().iter().fold(0u8, |all, byte| all ^ byte));
            objects.iter_mut().for_each(|(.., object)| object.fill(0));
            let start = Instant::now();
            for (page, (codec, bytes, object)) in pages.iter().zip(objects) {
                if let Some(made) = self.codecs.compress(black_box(page), object) {
                    (*codec, *bytes) = made;
                }
            }
            out_ns += start.elapsed().as_nanos();
        }
        self.bytes =
            objects.iter().map(|(_, bytes, _)| if *bytes > 0 { *bytes } else { PAGE_BYTES }).sum();
        let objects: Vec<_> = objects.into_iter().filter(|(_, bytes, _)| *bytes > 0).collect();
        let mut page = [0; PAGE_BYTES];
        let start = Instant::now();
        for (codec, bytes, object) in &objects {
            self.codecs.decompress(*codec, &object[..*bytes], &mut page).expect("a whole object");
            black_box(&page);
        }
        let in_ns = start.elapsed().as_nanos();
        self.out_ns.push(out_ns as f64 / pages.len() as f64);
        self.in_ns.push(in_ns as f64 / objects.len().max(1) as f64);
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("usage: codecs FILE [PAGES [ROUNDS]]");
    let [count, rounds] = [2000, 15]
        .map(|default| arguments.next().map_or(default, |text| text.parse().expect("a number")));
    let bytes = std::fs::read(path).expect("a file of pages");
    let mut pages = bytes.as_chunks::<PAGE_BYTES>().0.to_vec();
    pages.retain(|page| page.as_chunks::<8>().0.windows(2).any(|pair| pair[0] != pair[1]));
    let pages: Vec<Page> =
        pages.iter().step_by((pages.len() / count).max(1)).take(count).copied().collect();
    assert!(!pages.is_empty(), "the file has no page that is not one word over and over");
    prepare_thread();
    let mut figures = ALGORITHMS.map(Figures::new);
    for _ in 0..rounds {
        figures.iter_mut().for_each(|figures| figures.round(&pages));
    }
    println!("{} pages, {rounds} rounds", pages.len());
    println!("| compressor | out, ns | in, ns | ratio |\n|---|---:|---:|---:|");
    for figures in &mut figures {
        let ratio = (pages.len() * PAGE_BYTES) as f64 / figures.bytes as f64;
        let (out_ns, in_ns) = (median(&mut figures.out_ns), median(&mut figures.in_ns));
        println!("| {} | {out_ns:.0} | {in_ns:.0} | {ratio:.2} |", figures.name);
    }
}

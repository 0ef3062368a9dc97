//! The bodies of the fuzzers (`fuzz/`) on a few inputs, so that they keep working.

use uzswap_engine::testing::{Noise, fuzz_cache_ops, fuzz_decompress_damaged, trained_codecs};

fn input(noise: &mut Noise, bytes_max: u64) -> Vec<u8> {
    (0..noise.below(bytes_max)).map(|_| noise.word() as u8).collect()
}

#[test]
fn cache_ops() {
    let mut noise = Noise::new(1);
    (0..80).for_each(|_| fuzz_cache_ops(&input(&mut noise, 6000)));
}

#[test]
fn decompress_damaged() {
    let mut noise = Noise::new(2);
    let mut codecs = trained_codecs();
    for round in 0..4000 {
        // Short inputs damage an object a little; long inputs are whole objects.
        let bytes_max = if round % 2 == 0 { 16 } else { 5000 };
        fuzz_decompress_damaged(&mut codecs, &input(&mut noise, bytes_max));
    }
}

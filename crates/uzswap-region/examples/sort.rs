//! Sorts four times as much data as the budget, with the standard library's sort.

use uzswap_region::{Pager, RegionVec};

fn main() -> Result<(), uzswap_region::Error> {
    let folder = std::env::temp_dir();
    let backing = format!("{}:128M", folder.join("uzswap-sort").display());
    let pager = Pager::builder().memory("8M").compressor("zstd").backing(&backing).build()?;
    let mut values: RegionVec<u32> = pager.vec_zeroed(8 << 20)?;
    let mut state = 1u32;
    for value in values.iter_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *value = state;
    }
    values.sort_unstable();
    assert!(values.is_sorted());
    let stats = pager.stats();
    for name in ["memory_budget", "memory_used", "faults", "pool_pages", "backing_pages"] {
        println!("{name} {}", stats.get(name).unwrap_or(0));
    }
    println!("sorted {} MiB", size_of_val(&values[..]) >> 20);
    Ok(())
}

//! Operations that histories leave out because of a known fault. A row is deleted when its fault is
//! mended. With `UZSWAP_FUZZ_ALL=1` nothing is left out.

/// A name from [`super::generate`] or `found.txt`, and the reason.
const UNMENDED: &[(&str, &str)] = &[
    ("small stack", "a thread of 20 KiB with large variables has no room for ours: EINVAL"),
    ("order", "by userfaultfd mremap forgets advice of order, which keeps two mappings apart"),
    ("large move", "by protection mremap refuses ranges of more than an eighth of the budget"),
];

/// True if histories perform these operations.
pub fn is_mended(name: &str) -> bool {
    std::env::var_os("UZSWAP_FUZZ_ALL").is_some() || UNMENDED.iter().all(|row| row.0 != name)
}

pub fn rows() -> &'static [(&'static str, &'static str)] {
    UNMENDED
}

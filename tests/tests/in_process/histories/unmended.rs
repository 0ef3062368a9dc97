//! Operations that histories leave out because of a known fault. A row is deleted once its fault is
//! mended. `UZSWAP_FUZZ_ALL=1` leaves nothing out.

/// A name in [`super::generate`] or `found.txt`, and the reason.
const UNMENDED: &[(&str, &str)] = &[
    ("undumpable", "a child opens its own pagemap, which it may not once undumpable"),
    (
        "only read",
        "a fault on adopted memory that is only read ends the program, or a child may write it",
    ),
    ("filter later", "a child that forbids itself calls is killed by SIGSYS for one of ours"),
    ("small stack", "a thread of 20 KiB with large variables has no room for ours: EINVAL"),
    ("faulting receive", "a call that received and answers EFAULT is made again, and takes more"),
    ("large move", "by protection mremap refuses ranges of more than an eighth of the budget"),
    ("limit nofile", "a fork needs descriptors above the limit: the child ends"),
    ("storm", "memory differs after a storm of signals in some runs (seed 0x1a)"),
    ("limit fsize", "a fork makes files as large as what it copies: ENOMEM"),
];

/// True if histories perform these operations.
pub fn is_mended(name: &str) -> bool {
    std::env::var_os("UZSWAP_FUZZ_ALL").is_some() || UNMENDED.iter().all(|row| row.0 != name)
}

/// All rows.
pub fn rows() -> &'static [(&'static str, &'static str)] {
    UNMENDED
}

//! All that the kernel says of each mapping of this process (`/proc/self/smaps`).
//!
//! Access and name alone (`maps`) do not show if a child inherits a mapping, if it grows, or which
//! key protects it.

use crate::map::Mapped;
use std::fs;
use std::io;

/// A mapping, and the kernel's treatment of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Described<'a> {
    /// Its addresses and access.
    pub mapped: Mapped<'a>,
    /// The kernel's flags, two letters each, as `VmFlags` lists them (proc_pid_smaps(5)).
    flags: &'a str,
    /// The number of its protection key; 0 for the default key.
    pub key: u32,
    /// Bytes of it that are in memory, or that the kernel has swapped out.
    pub page_bytes: u64,
    /// Bytes of it that are in memory and of no file. In a private mapping of a file, these are the
    /// changed pages.
    pub anonymous_bytes: u64,
    /// Bytes that the kernel may drop at any time (`MADV_FREE`).
    pub lazily_free_bytes: u64,
}

impl Described<'_> {
    /// True if the kernel lists a flag.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|one| one == flag)
    }
}

const PATH: &str = "/proc/thread-self/smaps";

/// The text of all mappings of this process. Read by the calling thread's name: `/proc/self` is the
/// first thread's folder, and shows no memory once that thread has ended.
///
/// Errors: `NotFound` where `/proc` is not mounted, or where the kernel was built without this
/// file.
pub fn read() -> io::Result<String> {
    fs::read_to_string(PATH)
}

/// Fails where [`read`] would fail, with the same error.
pub fn check() -> io::Result<()> {
    fs::File::open(PATH).map(drop)
}

/// The mappings that a text of [`read`] lists, by address.
pub fn parse(text: &str) -> Vec<Described<'_>> {
    let mut all: Vec<Described<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(mapped) = Mapped::parse(line) {
            all.push(Described {
                mapped,
                flags: "",
                key: 0,
                page_bytes: 0,
                anonymous_bytes: 0,
                lazily_free_bytes: 0,
            });
            continue;
        }
        let (Some(one), Some((name, value))) = (all.last_mut(), line.split_once(':')) else {
            continue;
        };
        let number = || value.split_ascii_whitespace().next()?.parse::<u64>().ok();
        let bytes = || number().unwrap_or(0) << 10;
        match name {
            "Rss" | "Swap" => one.page_bytes += bytes(),
            "Anonymous" => one.anonymous_bytes = bytes(),
            "LazyFree" => one.lazily_free_bytes = bytes(),
            "ProtectionKey" => one.key = number().unwrap_or(0) as u32,
            "VmFlags" => one.flags = value,
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{Mapping, PAGE_BYTES};

    #[test]
    fn a_mapping_has_its_flags_and_its_bytes_in_memory() {
        let text = "\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \n\
Size:               2048 kB\n\
Rss:                  12 kB\n\
Anonymous:            12 kB\n\
LazyFree:              4 kB\n\
Swap:                  8 kB\n\
VmFlags: rd wr mr mw me ac wf sd \n\
ProtectionKey:         3\n\
7f0000200000-7f0000400000 r--p 00000000 08:01 77                         /lib/x.so\n\
VmFlags: rd mr mw me sd\n";
        let all = parse(text);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].page_bytes, all[0].lazily_free_bytes), (20 << 10, 4 << 10));
        assert_eq!((all[0].anonymous_bytes, all[1].anonymous_bytes), (12 << 10, 0));
        assert!(all[0].has("wf") && !all[0].has("w") && all[0].key == 3);
        assert!(all[1].mapped.has_file && all[1].key == 0 && !all[1].has("wf"));
    }

    #[test]
    fn the_kernel_lists_a_mapping_that_a_child_finds_empty() {
        let mapping = Mapping::reserved(4 * PAGE_BYTES).unwrap();
        mapping.keep_private().unwrap();
        let text = read().unwrap();
        let all = parse(&text);
        let at = mapping.as_ptr() as usize;
        let found = all.iter().find(|one| one.mapped.range.contains(&at)).unwrap();
        assert!(found.has("wf") && found.has("dd"), "{found:?}");
    }
}

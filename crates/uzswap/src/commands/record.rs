//! `uzswap record`: the pages of a running program, to measure with.

use crate::error::Failure;
use crate::size;
use crate::stdio::say;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::map::Mapped;

/// Bits of an entry of /proc/PID/pagemap: the page is swapped; it is in memory.
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// Pages read at a time.
const CHUNK_PAGES: usize = 256;

/// Writes down the anonymous pages of a process: heap and private memory, no files, no stack.
pub fn record(pid: i32, out: &Path) -> Result<(), Failure> {
    let cannot = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| {
            Failure::new(format!("{what}: {error}; it needs root and a process that lives"))
        }
    };
    let maps_path = format!("/proc/{pid}/maps");
    let maps = fs::read_to_string(&maps_path).map_err(cannot(&maps_path))?;
    let open = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        File::open(&path).map_err(cannot(&path))
    };
    let (memory, pagemap) = (open("mem")?, open("pagemap")?);
    // Not for others to read: it holds whatever the program does.
    let file = File::options().write(true).create_new(true).mode(0o600).open(out);
    let out = out.display().to_string();
    let file = file.map_err(|error| {
        Failure::new(format!("{out}: {error}; name a file that is not there and can be made"))
    })?;
    let mut file = BufWriter::new(file);
    let mut pages = 0;
    for (start, end) in maps.lines().filter_map(anonymous) {
        pages += copy(&memory, &pagemap, start, end, &mut file).map_err(cannot(&out))?;
    }
    file.flush().map_err(cannot(&out))?;
    say!(
        "uzswap: {pages} pages ({}) of process {pid} are in {out}, with every secret that the \
         program holds: keep the file to yourself",
        size::show(pages * PAGE_BYTES as u64)
    );
    Ok(())
}

/// Start and end of a mapping that holds data of the program.
fn anonymous(line: &str) -> Option<(u64, u64)> {
    let mapped = Mapped::parse(line).filter(Mapped::is_heap)?;
    Some((mapped.range.start as u64, mapped.range.end as u64))
}

/// Copies the pages of a mapping that there are; their number.
fn copy(
    memory: &File,
    pagemap: &File,
    start: u64,
    end: u64,
    out: &mut impl Write,
) -> io::Result<u64> {
    let page_bytes = PAGE_BYTES as u64;
    let mut copied = 0;
    let mut states = [0; CHUNK_PAGES * 8];
    let mut page = [0; PAGE_BYTES];
    for chunk in (start..end).step_by(CHUNK_PAGES * PAGE_BYTES) {
        let pages = ((end - chunk) / page_bytes).min(CHUNK_PAGES as u64) as usize;
        let states = &mut states[..pages * 8];
        pagemap.read_exact_at(states, chunk / page_bytes * 8)?;
        for (address, state) in (chunk..).step_by(PAGE_BYTES).zip(states.as_chunks().0) {
            let is_there = u64::from_le_bytes(*state) & (PRESENT | SWAPPED) != 0;
            // An error: the program has just unmapped it.
            if is_there && memory.read_exact_at(&mut page, address).is_ok() {
                out.write_all(&page)?;
                copied += 1;
            }
        }
    }
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_of_no_file_is_recorded() {
        let range = |rest: &str| anonymous(&format!("7f0000-7f2000 {rest}"));
        assert_eq!(range("rw-p 00000000 00:00 0"), Some((0x7f_0000, 0x7f_2000)));
        assert_eq!(range("rw-p 00000000 00:00 0   [heap]"), Some((0x7f_0000, 0x7f_2000)));
        for other in [
            "r--p 00000000 00:00 0",
            "rw-s 00000000 00:00 0",
            "rw-p 00000000 fe:01 1234   /usr/lib/libc.so",
            "rw-p 00000000 00:00 0   [stack]",
        ] {
            assert_eq!(range(other), None, "{other}");
        }
    }
}

//! `uzswap record`: the pages of a running program, to measure with.

use crate::error::Failure;
use crate::size;
use crate::stdio::say;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::map::Mapped;
use uzswap_sys::process_pages::ProcessPages;

/// Writes the anonymous pages of a process to a file: heap and private memory, no files, no stack.
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
    let there = ProcessPages { memory: open("mem")?, pagemap: open("pagemap")? };
    // Readable by the owner alone: the file holds the program's memory.
    let file = File::options().write(true).create_new(true).mode(0o600).open(out);
    let out = out.display().to_string();
    let file = file.map_err(|error| {
        Failure::new(format!("{out}: {error}; name a new file in a folder that you may write"))
    })?;
    let mut file = BufWriter::new(file);
    let mut pages = 0u64;
    for range in maps.lines().filter_map(anonymous) {
        let copied = there.read(range, |_, page| {
            pages += 1;
            file.write_all(page)
        });
        copied.map_err(cannot(&out))?;
    }
    file.flush().map_err(cannot(&out))?;
    say!(
        "uzswap: {pages} pages ({}) of process {pid} are in {out}, with every secret that the \
         program holds: keep the file to yourself",
        size::show(pages * PAGE_BYTES as u64)
    );
    Ok(())
}

/// The range of a mapping that holds data of the program.
fn anonymous(line: &str) -> Option<Range<usize>> {
    Some(Mapped::parse(line).filter(Mapped::is_heap)?.range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_of_no_file_is_recorded() {
        let range = |rest: &str| anonymous(&format!("7f0000-7f2000 {rest}"));
        assert_eq!(range("rw-p 00000000 00:00 0"), Some(0x7f_0000..0x7f_2000));
        assert_eq!(range("rw-p 00000000 00:00 0   [heap]"), Some(0x7f_0000..0x7f_2000));
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

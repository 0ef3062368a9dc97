//! Swap areas: their header, switching them on and off, and their list.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of the header, one page.
pub const HEADER_BYTES: usize = crate::map::PAGE_BYTES;

/// Highest priority of an area: the kernel fills it before any other.
pub const PRIORITY_MAX: u16 = 0x7fff;

const FLAG_PREFER: i32 = 0x8000;
const FLAG_DISCARD: i32 = 0x1_0000;
const FLAG_DISCARD_PAGES: i32 = 0x4_0000;

/// The header of an area of `pages` pages, itself included: version 1, no bad pages.
///
/// Layout (mm/swapfile.c, `union swap_header`). At 1024: version, last page and number of bad
/// pages, 32 bits each, then a UUID and a label of 16 bytes; in the last ten bytes "SWAPSPACE2".
pub fn header(pages: u32, label: &str) -> Box<[u8; HEADER_BYTES]> {
    let mut page = Box::new([0; HEADER_BYTES]);
    page[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&(pages - 1).to_ne_bytes());
    let label = &label.as_bytes()[..label.len().min(15)];
    page[1052..1052 + label.len()].copy_from_slice(label);
    page[HEADER_BYTES - 10..].copy_from_slice(b"SWAPSPACE2");
    page
}

/// Writes the header of an area of `pages` to a device's first page.
pub fn write_header(device: &Path, pages: u32, label: &str) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(device)?;
    file.write_all_at(&header(pages, label)[..], 0)?;
    file.sync_all()
}

/// Switches swapping to `device` on, at `priority` (0 to [`PRIORITY_MAX`]); freed clusters of slots
/// are discarded. Errors: `PermissionDenied` without CAP_SYS_ADMIN, those of the device.
pub fn on(device: &Path, priority: u16) -> io::Result<()> {
    let path = c_path(device)?;
    let priority = i32::from(priority.min(PRIORITY_MAX));
    let flags = FLAG_PREFER | priority | FLAG_DISCARD | FLAG_DISCARD_PAGES;
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapon(path.as_ptr(), flags) })
}

/// Reads everything back from `device` and switches swapping to it off. This may take long. A
/// signal makes the call fail, and the area stays on. Errors: `OutOfMemory` when the area's pages
/// do not fit in memory.
pub fn off(device: &Path) -> io::Result<()> {
    let path = c_path(device)?;
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::swapoff(path.as_ptr()) })
}

/// Checks that this process may switch areas on, by a path without an area. Errors:
/// `PermissionDenied` without CAP_SYS_ADMIN, or where a container's filter forbids the call;
/// `Unsupported` (ENOSYS) for a kernel without swap.
pub fn may_switch_on() -> io::Result<()> {
    match on(Path::new("/proc/self/no-such-area"), 0) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A line of `/proc/swaps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// Device or file.
    pub path: PathBuf,
    /// Bytes.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// Its priority.
    pub priority: i32,
}

/// The areas that are on.
pub fn areas() -> io::Result<Vec<Area>> {
    Ok(parse(&std::fs::read_to_string("/proc/swaps")?))
}

fn parse(text: &str) -> Vec<Area> {
    let area = |line: &str| {
        let mut fields = line.split_whitespace();
        // A space in a path is written as \040.
        let path = PathBuf::from(fields.next()?.replace("\\040", " "));
        let kib = |field: Option<&str>| field?.parse::<u64>().ok().map(|kib| kib * 1024);
        let bytes = kib(fields.nth(1))?;
        let used = kib(fields.next())?;
        Some(Area { path, bytes, used, priority: fields.next()?.parse().ok()? })
    };
    text.lines().skip(1).filter_map(area).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_areas_is_read() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                    /swap\\040file                           file\t\t2097148\t\t16\t\t-2\n\
                    /dev/loop0                              partition\t4194300\t\t0\t\t32767\n";
        let areas = parse(text);
        assert_eq!(areas.len(), 2);
        assert_eq!(areas[0].path, Path::new("/swap file"));
        assert_eq!((areas[0].bytes, areas[0].used), (2097148 * 1024, 16384));
        assert_eq!((areas[1].priority, areas[0].priority), (32767, -2));
        assert_eq!(parse("Filename Type Size Used Priority\n"), []);
    }

    #[test]
    fn the_header_has_the_kernel_s_layout() {
        let header = header(1 << 20, "uzswap-with-a-long-name");
        assert_eq!(header[1024..1032], [1, 0, 0, 0, 0xff, 0xff, 0x0f, 0]);
        assert_eq!(&header[1052..1068], b"uzswap-with-a-l\0");
        assert_eq!(&header[4086..], b"SWAPSPACE2");
    }
}

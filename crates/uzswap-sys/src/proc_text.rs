//! Short texts of /proc, read in a thread of the program's.

use rustix::fd::IntoRawFd;
use rustix::fs::PROC_SUPER_MAGIC;

/// Reads the beginning of a file of /proc.
pub(crate) fn read(path: &str, bytes: &mut [u8]) -> Option<usize> {
    let file = std::fs::File::open(path).ok()?;
    // Another thread of the program may close all descriptors at this moment, and open a file of
    // its own under this number. `pread` does not move that file's position, and the check below
    // keeps us from closing that file.
    let read = rustix::io::pread(&file, bytes, 0).unwrap_or(0);
    let is_ours = rustix::fs::fstatfs(&file).is_ok_and(|system| system.f_type == PROC_SUPER_MAGIC);
    let number = file.into_raw_fd();
    if is_ours {
        // SAFETY: this value owned it, and no other code of ours has its number.
        unsafe { rustix::io::close(number) };
    }
    Some(read)
}

/// True if a thread of a process is stopped, by a signal or by its tracer. False if that is
/// unknown.
pub fn is_stopped(process: u32, thread: u32) -> bool {
    let mut stat = [0; 160];
    let read = read(&format!("/proc/{process}/task/{thread}/stat"), &mut stat);
    let stat = &stat[..read.unwrap_or(0)];
    // The state is behind the name, which may have any characters.
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    let state = name_end.and_then(|end| stat.get(end + 2));
    matches!(state, Some(b'T' | b't'))
}

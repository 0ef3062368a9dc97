//! The time that programs wait for memory, as the kernel measures it (PSI, Linux 4.20): for the
//! whole machine, and with cgroup v2 for each group.

use std::io;

/// The file of the machine.
pub const MACHINE: &str = "/proc/pressure/memory";

/// The percentage of the last ten seconds in which programs waited: at least one (`some`), or all
/// at the same time (`full`). `text` is the content of such a file; `None` if it has no such value.
pub fn average(text: &str, kind: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// The percentage for at least one program of the machine. Fails on a kernel without PSI.
pub fn of_machine() -> io::Result<f64> {
    average(&std::fs::read_to_string(MACHINE)?, "some")
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_lines_are_read() {
        let text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=7\n\
                    full avg10=1.25 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!((average(text, "some"), average(text, "full")), (Some(12.5), Some(1.25)));
        assert_eq!(average("", "some"), None);
    }
}

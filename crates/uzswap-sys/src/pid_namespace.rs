//! PID namespaces: a sandbox numbers its processes anew.

use std::os::unix::fs::MetadataExt;

/// The PID namespace of this process, by the number of its file; `None` if `/proc` does not show
/// it.
pub fn own() -> Option<u32> {
    of("/proc/thread-self")
}

fn of(folder: &str) -> Option<u32> {
    let file = std::fs::metadata(format!("{folder}/ns/pid")).ok()?;
    u32::try_from(file.ino()).ok()
}

/// True if `/proc` is mounted and is of another PID namespace: it lists this process by another
/// number.
pub fn has_foreign_proc() -> bool {
    let listed = std::fs::read_link("/proc/self").ok();
    listed.is_some_and(|listed| listed.as_os_str() != std::process::id().to_string().as_str())
}

/// A process in another PID namespace than this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elsewhere {
    /// Its namespace.
    pub space: u32,
    /// Its number in its own namespace.
    pub number: u32,
    /// Its number in our namespace.
    pub seen_as: u32,
}

/// The processes in other namespaces that this process sees, and that its user may inspect.
pub fn others() -> Vec<Elsewhere> {
    let own = own();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let elsewhere = numbers.filter_map(|seen_as| {
        let folder = format!("/proc/{seen_as}");
        let space = of(&folder).filter(|space| Some(*space) != own)?;
        let status = std::fs::read_to_string(folder + "/status").ok()?;
        // Its numbers, from that in our namespace to its own.
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let number = numbers.split_whitespace().last()?.parse().ok()?;
        Some(Elsewhere { space, number, seen_as })
    });
    elsewhere.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_its_own_number_where_it_is() {
        assert_eq!(own(), of("/proc/self"));
        assert!(own().is_some() && !has_foreign_proc());
        assert!(others().iter().all(|one| Some(one.space) != own() && one.number > 0));
    }
}

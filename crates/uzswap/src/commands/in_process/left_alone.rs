//! Programs of an in-process run whose memory is not kept small, with the reason and their size.
//!
//! A program that could not be taken over says why itself ([`Table::leave_alone`]). One that never
//! loaded the library cannot: it is found among the command's processes while it runs, and its file
//! tells why.

use crate::commands::in_process::executable::{self, Linkage};
use crate::commands::in_process::numbers::Numbers;
use crate::commands::in_process::{AGENT, LIBRARY};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use uzswap_sys::process;
use uzswap_tree::Table;

/// A program with less anonymous memory is not looked at: there is little to keep small.
const LEAST: u64 = 16 << 20;

/// A program that was left alone.
#[derive(Debug, Serialize)]
pub struct Alone {
    /// Its number.
    pub process: u32,
    /// Its name, and why: `NAME: REASON`.
    pub program: String,
    /// Only a part of its memory is left alone.
    pub is_part: bool,
    /// Bytes of that part; of a whole program, most anonymous memory that it was seen with.
    pub bytes: u64,
}

/// The observed state of them.
#[derive(Debug, Default)]
pub struct LeftAlone {
    /// Most anonymous memory of each process that is none of the tree's own, bytes.
    peaks: BTreeMap<u32, u64>,
    /// Those that never loaded the library, with their names and reasons.
    strangers: BTreeMap<u32, String>,
    /// The program that each process was last seen to run, and true if that has the library.
    programs: BTreeMap<u32, (String, bool)>,
}

impl LeftAlone {
    /// Looks at the processes that a command has started.
    pub fn look(&mut self, command: i32, table: &Table, numbers: &Numbers) {
        let noted = table.left_alone();
        for process in process::tree(command) {
            let Some(bytes) = process::anonymous_bytes(process).filter(|bytes| *bytes >= LEAST)
            else {
                continue;
            };
            // It is counted as the parent's, which has our library.
            if process::has_parents_memory(process) {
                continue;
            }
            let number = process as u32;
            let is_it = |one: &uzswap_tree::LeftAlone| numbers.of(one.process) == number;
            let is_noted = noted.iter().any(|one| is_it(one) && one.part.is_none());
            let member = table.members().find(|member| member.process == number);
            // It may be the program before that has told its memory.
            let is_watched = member.is_some() && self.has_library(process);
            if !is_noted && is_watched && member.is_some_and(|member| member.used > 0) {
                continue;
            }
            // A child that was forked just now has not joined the others yet, and a program that
            // has grown just now is being watched in a moment.
            let was_seen = self.peaks.contains_key(&number);
            let peak = self.peaks.entry(number).or_default();
            *peak = bytes.max(*peak);
            if !is_noted && was_seen {
                // A child of a fork begins to report when it asks for memory.
                if is_watched && has_mapped(process, AGENT) {
                    continue;
                }
                self.strangers.entry(number).or_insert_with(|| describe(process, is_watched));
            }
        }
    }

    /// True if the program that a process runs has loaded the library. Another one may have before,
    /// so that the process is of the tree. Looked at once for each program.
    fn has_library(&mut self, process: i32) -> bool {
        let program = program(process);
        let known = self.programs.get(&(process as u32)).filter(|(known, _)| *known == program);
        known.map(|(_, has_library)| *has_library).unwrap_or_else(|| {
            let has_library = has_mapped(process, LIBRARY);
            self.programs.insert(process as u32, (program, has_library));
            has_library
        })
    }

    /// How many never loaded the library.
    pub fn strangers(&self) -> u64 {
        self.strangers.len() as u64
    }

    /// All of them.
    pub fn all(&self, table: &Table, numbers: &Numbers) -> Vec<Alone> {
        let noted = table.left_alone();
        // A fork may have said why after it was seen.
        let is_noted = |process| {
            noted.iter().any(|one| numbers.of(one.process) == process && one.part.is_none())
        };
        let strangers = self.strangers.iter().filter(|(process, _)| !is_noted(**process));
        let strangers: Vec<_> =
            strangers.map(|(process, text)| (*process, text.clone(), None)).collect();
        let noted = noted.into_iter().map(|one| (numbers.of(one.process), one.text, one.part));
        let alone = |(process, program, part): (u32, String, Option<u64>)| {
            let peak = || self.peaks.get(&process).copied().unwrap_or(0);
            let bytes = part.unwrap_or_else(peak);
            Alone { process, program, is_part: part.is_some(), bytes }
        };
        noted.chain(strangers).map(alone).collect()
    }
}

/// True if a process has mapped a library of this name. One whose mappings are not shown has.
fn has_mapped(process: i32, library: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"));
    maps.map_or(true, |maps| maps.contains(&format!("/{library}")))
}

/// The places of a process's code and stack, which the kernel chooses as it starts a program.
fn program(process: i32) -> String {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // After the name the state is the first field, and the places are the 24th and the 26th.
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    fields.get(23..26).map(|places| places.join(" ")).unwrap_or_default()
}

/// True if a program was started with the library in its environment.
fn is_told(process: i32) -> bool {
    let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    variables.split(|byte| *byte == 0).any(|variable| {
        let libraries = variable.strip_prefix(b"LD_PRELOAD=");
        libraries.is_some_and(|libraries| String::from_utf8_lossy(libraries).contains(LIBRARY))
    })
}

/// Name and reason of a process that has not loaded the library, or past which it grows.
fn describe(process: i32, has_library: bool) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    let sees_itself = Path::new(&format!("/proc/{process}/root/proc/self")).is_symlink();
    let reason = match File::open(format!("/proc/{process}/exe")).as_ref().map(executable::kind) {
        Ok(_) if has_library && !sees_itself => "it has no /proc, which tells its memory",
        Ok(_)
            if process::call_filters(process)
                > process::call_filters(std::process::id() as i32) =>
        {
            "it forbids itself system calls (seccomp), or answers them"
        }
        _ if has_library => "it takes memory by system calls of its own, past the C library",
        Err(_) => "it is privileged, so no library can be preloaded",
        Ok(Some(Linkage::Static)) => "it is linked statically, so no library can be preloaded",
        Ok(Some(Linkage::Glibc)) if has_mapped(process, LIBRARY) => {
            "the file that the run's processes share is out of its reach (a /dev of its own)"
        }
        Ok(Some(Linkage::Glibc)) if is_told(process) => {
            "its dynamic linker has not found the library, which is out of its reach (chroot)"
        }
        Ok(Some(Linkage::Glibc)) => {
            "its LD_PRELOAD lacks the library, as the program that started it has set or removed it"
        }
        Ok(Some(Linkage::OtherLibrary(_))) => "its C library is not glibc",
        Ok(Some(Linkage::Not64Bit) | None) => "it is no 64-bit program",
    };
    format!("{}: {reason}", name.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_never_told_of_the_library_is_named_with_the_reason() {
        let this = describe(std::process::id() as i32, false);
        assert!(this.contains(": its LD_PRELOAD lacks the library"), "{this}");
        assert!(describe(-1, false).ends_with("no library can be preloaded"));
    }
}

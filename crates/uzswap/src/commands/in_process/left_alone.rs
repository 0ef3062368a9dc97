//! Programs of an in-process run whose memory is not kept small, with the reasons and their sizes.
//!
//! A program that the agent could not take over gives the reason itself ([`Table::leave_alone`]). A
//! program that never loaded the library cannot. The run finds that program among the command's
//! processes, and derives the reason from its file.

use crate::commands::in_process::executable::{self, Linkage};
use crate::commands::in_process::libraries::{AGENT, LIBRARY};
use crate::commands::in_process::numbers::Numbers;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use uzswap_sys::process;
use uzswap_tree::Table;

/// Programs with less anonymous memory are ignored.
const LEAST: u64 = 16 << 20;

/// A program that was left alone.
#[derive(Debug, Serialize)]
pub struct Alone {
    /// Its process number.
    pub process: u32,
    /// Its name and the reason: `NAME: REASON`.
    pub program: String,
    /// True if only a part of the program's memory is left alone, or if a call was refused.
    pub is_part: bool,
    /// Bytes of that part, 0 for a call. For a whole program, the peak of its anonymous memory.
    pub bytes: u64,
}

/// The state of the programs that are left alone.
#[derive(Debug, Default)]
pub struct LeftAlone {
    /// Peak of anonymous memory of each process that the tree does not keep small, bytes.
    peaks: BTreeMap<u32, u64>,
    /// Processes that never loaded the library, with their names and reasons.
    strangers: BTreeMap<u32, String>,
    /// The program that each process was last seen to run, and true if that program has the
    /// library.
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
            // A child of vfork: its memory is counted as the parent's.
            if process::has_parents_memory(process) {
                continue;
            }
            let number = process as u32;
            let is_it = |one: &uzswap_tree::LeftAlone| numbers.of(one.process) == number;
            let is_noted = noted.iter().any(|one| is_it(one) && one.part.is_none());
            let member = table.members().find(|member| member.process == number);
            // The reported memory may be that of the program before an exec.
            let is_watched = member.is_some() && self.has_library(process);
            if !is_noted && is_watched && member.is_some_and(|member| member.used > 0) {
                continue;
            }
            // A new child has not joined the tree yet, and a program that has just grown will be
            // watched in a moment. So a process must be seen twice.
            let was_seen = self.peaks.contains_key(&number);
            let peak = self.peaks.entry(number).or_default();
            *peak = bytes.max(*peak);
            if !is_noted && was_seen {
                // A child of a fork joins the tree after the fork, and begins to report when it
                // asks for memory.
                if has_mapped(process, AGENT) {
                    continue;
                }
                self.strangers.entry(number).or_insert_with(|| describe(process, is_watched));
            }
        }
    }

    /// True if the program that a process runs has loaded the library. The process may be in the
    /// tree for the program that it ran before. We check each program only once.
    fn has_library(&mut self, process: i32) -> bool {
        let program = program(process);
        let known = self.programs.get(&(process as u32)).filter(|(known, _)| *known == program);
        known.map(|(_, has_library)| *has_library).unwrap_or_else(|| {
            let has_library = has_mapped(process, LIBRARY);
            self.programs.insert(process as u32, (program, has_library));
            has_library
        })
    }

    /// Number of processes that never loaded the library.
    pub fn strangers(&self) -> u64 {
        self.strangers.len() as u64
    }

    /// All programs that were left alone.
    pub fn all(&self, table: &Table, numbers: &Numbers) -> Vec<Alone> {
        let noted = table.left_alone();
        // A forked process may have given its reason after this check saw the process.
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

/// True if a process has mapped a file of this name, or if its mappings cannot be read.
pub fn has_mapped(process: i32, file: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"));
    let end = format!("/{file}");
    let is_it = |line: &str| line.strip_suffix(" (deleted)").unwrap_or(line).ends_with(&end);
    maps.map_or(true, |maps| maps.lines().any(is_it))
}

/// The addresses of a process's code and stack. The kernel chooses them anew at each exec.
fn program(process: i32) -> String {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // After the name, the state is the first field, and the addresses are the 24th to the 26th.
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    fields.get(23..26).map(|places| places.join(" ")).unwrap_or_default()
}

/// True if the library was in a program's environment at its start.
fn is_told(process: i32) -> bool {
    let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    variables.split(|byte| *byte == 0).any(|variable| {
        let libraries = variable.strip_prefix(b"LD_PRELOAD=");
        libraries.is_some_and(|libraries| String::from_utf8_lossy(libraries).contains(LIBRARY))
    })
}

/// Name and reason of a process that has not loaded the library, or that grows although it has.
fn describe(process: i32, has_library: bool) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    let sees_itself = Path::new(&format!("/proc/{process}/root/proc/self")).is_symlink();
    let reason = match File::open(format!("/proc/{process}/exe")).as_ref().map(executable::kind) {
        Ok(_) if has_library && !sees_itself => {
            "it has no /proc, where uzswap would read its mappings"
        }
        Ok(_)
            if process::call_filters(process)
                > process::call_filters(std::process::id() as i32) =>
        {
            "it filters its own system calls (seccomp)"
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
            "its LD_PRELOAD lacks the library: the program that started it has changed the variable"
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

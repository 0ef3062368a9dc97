//! Programs of an in-process run whose memory is not kept small, with the reason and their size.
//!
//! A program that could not be taken over says why itself ([`Table::leave_alone`]). One that never
//! loaded the library cannot: it is found among the command's processes while it runs, and its file
//! tells why.

use object::LittleEndian;
use object::elf::{FileHeader64, PT_INTERP};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
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
    /// Most anonymous memory that it was seen with, bytes.
    pub bytes: u64,
}

/// The observed state of them.
#[derive(Debug, Default)]
pub struct LeftAlone {
    /// Most anonymous memory of each process that is none of the tree's own, bytes.
    peaks: BTreeMap<u32, u64>,
    /// Those that never loaded the library, with their names and reasons.
    strangers: BTreeMap<u32, String>,
}

impl LeftAlone {
    /// Looks at the processes that a command has started.
    pub fn look(&mut self, command: i32, table: &Table) {
        let noted = table.left_alone();
        for process in process::tree(command) {
            let Some(bytes) = process::anonymous_bytes(process).filter(|bytes| *bytes >= LEAST)
            else {
                continue;
            };
            let number = process as u32;
            let is_noted = noted.iter().any(|one| one.process == number);
            if !is_noted && table.members().any(|member| member.process == number) {
                continue;
            }
            let peak = self.peaks.entry(number).or_default();
            *peak = bytes.max(*peak);
            if !is_noted {
                self.strangers.entry(number).or_insert_with(|| describe(process));
            }
        }
    }

    /// How many never loaded the library.
    pub fn strangers(&self) -> u64 {
        self.strangers.len() as u64
    }

    /// All of them.
    pub fn all(&self, table: &Table) -> Vec<Alone> {
        let noted = table.left_alone().into_iter().map(|one| (one.process, one.text));
        let strangers = self.strangers.iter().map(|(process, text)| (*process, text.clone()));
        let alone = |(process, program)| {
            let bytes = self.peaks.get(&process).copied().unwrap_or(0);
            Alone { process, program, bytes }
        };
        noted.chain(strangers).map(alone).collect()
    }
}

/// Name and reason of a process that has not loaded the library.
fn describe(process: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    let reason = match is_static(process) {
        Err(_) => "it is privileged, so no library can be preloaded",
        Ok(None) => "it is no 64-bit program",
        Ok(Some(true)) => "it is linked statically, so no library can be preloaded",
        Ok(Some(false)) => "it was started without LD_PRELOAD, or its C library is not glibc",
    };
    format!("{}: {reason}", name.trim_end())
}

/// True if a process's program has no dynamic linker; `None` if it is no 64-bit program. Errors: it
/// may not be read.
fn is_static(process: i32) -> io::Result<Option<bool>> {
    let file = ReadCache::new(File::open(format!("/proc/{process}/exe"))?);
    let headers = FileHeader64::<LittleEndian>::parse(&file)
        .and_then(|header| header.program_headers(LittleEndian, &file));
    let has_linker = |headers: &[object::elf::ProgramHeader64<_>]| {
        headers.iter().any(|header| header.p_type(LittleEndian) == PT_INTERP)
    };
    Ok(headers.ok().map(|headers| !has_linker(headers)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_program_s_file_tells_whether_a_library_can_be_preloaded() {
        assert_eq!(is_static(std::process::id() as i32).unwrap(), Some(false));
        assert!(is_static(-1).is_err());
    }
}

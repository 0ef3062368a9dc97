//! Which commands load a library that is preloaded, by the head of their file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Why a command is not kept small in-process.
#[derive(Debug, PartialEq, Eq)]
pub struct Unmanaged {
    pub reason: String,
    /// Its dynamic linker would end it if it were told of our library. Otherwise programs that the
    /// command starts may be managed all the same.
    pub refuses_library: bool,
}

/// Scripts of scripts that the kernel follows.
const SCRIPTS_MAX: usize = 5;
/// Bytes of the first line of a script that the kernel reads.
const LINE_BYTES: usize = 256;

/// Looks at a command, or at the program that runs it if it is a script. A file that cannot be read
/// is taken for one that can be managed.
pub fn why_unmanaged(command: &Path) -> Option<Unmanaged> {
    let mut path = command.to_owned();
    for _ in 0..SCRIPTS_MAX {
        let file = File::open(&path).ok()?;
        match interpreter(&file) {
            Some(interpreter) => path = interpreter,
            None => return of_program(&file, &path),
        }
    }
    None
}

/// The program that runs a script.
fn interpreter(file: &File) -> Option<PathBuf> {
    let mut head = Vec::new();
    file.take(LINE_BYTES as u64).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let word = line.trim_ascii_start().split(|byte| byte.is_ascii_whitespace()).next()?;
    Some(PathBuf::from(OsString::from_vec(word.to_vec())))
}

fn of_program(file: &File, path: &Path) -> Option<Unmanaged> {
    const HEADER_BYTES: usize = 64;
    const CLASS: usize = 4;
    const IS_64_BIT: u8 = 2;
    const INTERPRETER: u32 = 3;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    let name = path.display();
    let because = |reason: String, refuses_library| Some(Unmanaged { reason, refuses_library });
    if header[CLASS] != IS_64_BIT {
        return because(format!("{name} is no 64-bit program"), true);
    }
    let [at, size, count] =
        [number(&header, 32, 8)?, number(&header, 54, 2)?, number(&header, 56, 2)?];
    for index in 0..count {
        let mut segment = [0; 56];
        file.read_exact_at(&mut segment, at.checked_add(index.checked_mul(size)?)?).ok()?;
        if number(&segment, 0, 4)? != u64::from(INTERPRETER) {
            continue;
        }
        let mut linker = vec![0; usize::try_from(number(&segment, 32, 8)?).ok()?.min(4096)];
        file.read_exact_at(&mut linker, number(&segment, 8, 8)?).ok()?;
        let linker = OsStr::from_bytes(linker.strip_suffix(b"\0").unwrap_or(&linker));
        let linker_name = Path::new(linker).file_name()?.to_string_lossy().into_owned();
        return match linker_name.starts_with("ld-linux") {
            true => None,
            false => {
                because(format!("{name} has another C library than glibc ({linker_name})"), true)
            }
        };
    }
    because(format!("{name} is statically linked and loads no library"), false)
}

/// A number of the file's, whose bytes begin with the lowest.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program for 64-bit machines, with a dynamic linker or without.
    fn program(linker: Option<&str>) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..5].copy_from_slice(b"\x7fELF\x02");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64] = if linker.is_some() { 3 } else { 1 };
        bytes[64 + 8] = 120;
        let linker = linker.map_or(Vec::new(), |linker| [linker.as_bytes(), b"\0"].concat());
        bytes[64 + 32] = linker.len() as u8;
        bytes.extend(linker);
        bytes
    }

    /// The result for a command whose file has these bytes.
    fn look(bytes: &[u8]) -> Option<Unmanaged> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        std::fs::write(&path, bytes).unwrap();
        why_unmanaged(&path)
    }

    #[test]
    fn dynamically_linked_programs_of_glibc_are_managed() {
        assert_eq!(look(&program(Some("/lib64/ld-linux-x86-64.so.2"))), None);
        assert_eq!(why_unmanaged(&std::env::current_exe().unwrap()), None);
    }

    #[test]
    fn a_static_program_is_named_and_its_children_may_load_the_library() {
        let unmanaged = look(&program(None)).unwrap();
        assert!(unmanaged.reason.ends_with("is statically linked and loads no library"));
        assert!(!unmanaged.refuses_library);
    }

    #[test]
    fn a_program_of_another_c_library_must_not_be_told_of_ours() {
        let unmanaged = look(&program(Some("/lib/ld-musl-x86_64.so.1"))).unwrap();
        assert!(unmanaged.reason.contains("ld-musl-x86_64.so.1"), "{unmanaged:?}");
        assert!(unmanaged.refuses_library);
        let mut of_32_bits = program(Some("/lib/ld-linux.so.2"));
        of_32_bits[4] = 1;
        assert!(look(&of_32_bits).unwrap().refuses_library);
    }

    #[test]
    fn a_script_is_looked_at_by_the_program_that_runs_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("static");
        std::fs::write(&path, program(None)).unwrap();
        assert!(look(format!("#! {} -x\nscript", path.display()).as_bytes()).is_some());
        assert_eq!(look(b"#!/bin/sh\n"), None);
        // One that runs itself, half a header, and text.
        assert_eq!(look(b"#!"), None);
        assert_eq!(look(b"\x7fELF\x02"), None);
        assert_eq!(look(b"echo"), None);
    }
}

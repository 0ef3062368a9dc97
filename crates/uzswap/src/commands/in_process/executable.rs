//! Decides, by the head of a command's file, whether the command loads a preloaded library.

use object::elf::FileHeader64;
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{FileKind, LittleEndian};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Why a command is not kept small in-process.
#[derive(Debug, PartialEq, Eq)]
pub struct Unmanaged {
    pub reason: String,
    /// True if the dynamic linker would end the command because of our library. If it is `false`,
    /// uzswap may still manage programs that the command starts.
    pub refuses_library: bool,
}

/// The number of nested script interpreters that the kernel follows.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const LINE_BYTES: usize = 256;

/// The dynamic linker of musl, at the path that programs built for musl name.
pub const MUSL_LINKER: &str = if cfg!(target_arch = "aarch64") {
    "/lib/ld-musl-aarch64.so.1"
} else {
    "/lib/ld-musl-x86_64.so.1"
};
/// The path from glibc's folder of libraries below /usr up to the root. Further `..` stay at the
/// root.
const TO_ROOT: &str = "/usr/$LIB/../../../../../../../..";

/// The path of a library that only glibc's dynamic linker finds. That linker replaces `$LIB` by the
/// name of its own folder, such as `lib64`. The linker of musl silently skips a library that it
/// does not find. A managed program may start a program of musl. With a plain path, musl's linker
/// would load our library and end that program, because functions of glibc are missing.
pub fn for_glibc_alone(library: PathBuf) -> PathBuf {
    match library.strip_prefix("/") {
        Ok(below) => Path::new(TO_ROOT).join(below),
        Err(_) => library,
    }
}

/// Looks at a command, or at the interpreter of a script. A file that cannot be read counts as
/// manageable.
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
    let name = path.display();
    let (reason, refuses_library) = match kind(file)? {
        Linkage::Not64Bit => (format!("{name} is no 64-bit program"), true),
        Linkage::Static => (format!("{name} is statically linked and loads no library"), false),
        Linkage::OtherLibrary(linker) => {
            (format!("{name} has another C library than glibc ({linker})"), true)
        }
        Linkage::Glibc => return None,
    };
    Some(Unmanaged { reason, refuses_library })
}

/// A program, by how it loads libraries.
#[derive(Debug, PartialEq, Eq)]
pub enum Linkage {
    /// Linked by glibc's dynamic linker.
    Glibc,
    /// Linked by the dynamic linker of this name.
    OtherLibrary(String),
    /// The program loads no libraries.
    Static,
    /// The program is of another architecture.
    Not64Bit,
}

/// The kind of a program; `None` if the file is not a program, or cannot be read.
pub fn kind(file: &File) -> Option<Linkage> {
    let file = ReadCache::new(file);
    match FileKind::parse(&file).ok()? {
        FileKind::Elf64 => {}
        FileKind::Elf32 => return Some(Linkage::Not64Bit),
        _ => return None,
    }
    let header = FileHeader64::<LittleEndian>::parse(&file).ok()?;
    let segments = header.program_headers(LittleEndian, &file).ok()?;
    let mut linkers =
        segments.iter().filter_map(|one| one.interpreter(LittleEndian, &file).ok().flatten());
    let Some(linker) = linkers.next() else { return Some(Linkage::Static) };
    let name = Path::new(OsStr::from_bytes(linker)).file_name()?.to_string_lossy().into_owned();
    Some(if name.starts_with("ld-linux") { Linkage::Glibc } else { Linkage::OtherLibrary(name) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program for 64-bit machines, with a dynamic linker or without.
    fn program(linker: Option<&str>) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
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
    fn a_path_for_glibc_alone_is_the_library_s_once_its_folder_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().canonicalize().unwrap().join("library");
        std::fs::write(&library, "").unwrap();
        let path = for_glibc_alone(library.clone());
        assert!(!path.exists());
        for folder in ["lib", "../bin"] {
            let path = path.to_str().unwrap().replace("$LIB", folder);
            assert_eq!(Path::new(&path).canonicalize().unwrap(), library);
        }
    }

    #[test]
    fn a_script_is_looked_at_by_the_program_that_runs_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("static");
        std::fs::write(&path, program(None)).unwrap();
        assert!(look(format!("#! {} -x\nscript", path.display()).as_bytes()).is_some());
        assert_eq!(look(b"#!/bin/sh\n"), None);
        // A script without an interpreter, half a header, and text.
        assert_eq!(look(b"#!"), None);
        assert_eq!(look(b"\x7fELF\x02"), None);
        assert_eq!(look(b"echo"), None);
    }
}

//! Installs the C library: what `make install` would.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The library's name says with what it is compatible; crates/uzswap-c/build.rs puts it in the
/// file.
const SONAME: &str = "libuzswap.so.0";

/// `--prefix DIR` (/usr/local), where it will be found, `--destdir DIR`, what to put before
/// that when files are copied, and `--built DIR`, where the libraries are already.
pub fn run(root: &Path, mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let mut prefix = PathBuf::from("/usr/local");
    let mut destdir = String::new();
    let mut built = None;
    while let Some(name) = arguments.next() {
        match (name.as_str(), arguments.next()) {
            ("--prefix", Some(folder)) if folder.starts_with('/') => prefix = folder.into(),
            ("--destdir", Some(folder)) => destdir = folder,
            ("--built", Some(folder)) => built = Some(PathBuf::from(folder)),
            _ => {
                eprintln!(
                    "usage: cargo run -p xtask -- install [--prefix /DIR] [--destdir DIR] \
                     [--built DIR]"
                );
                return ExitCode::from(2);
            }
        }
    }
    let built = built.map_or_else(|| build(root), Ok);
    match built.and_then(|built| install(root, &built, &prefix, &destdir)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("install: {error}");
            ExitCode::FAILURE
        }
    }
}

fn install(root: &Path, built: &Path, prefix: &Path, destdir: &str) -> io::Result<()> {
    let to = PathBuf::from(format!("{destdir}{}", prefix.display()));
    let library = to.join("lib");
    copy(&built.join("libuzswap.so"), &library.join(format!("libuzswap.so.{VERSION}")), 0o755)?;
    link(&format!("libuzswap.so.{VERSION}"), &library.join(SONAME))?;
    link(SONAME, &library.join("libuzswap.so"))?;
    copy(&built.join("libuzswap.a"), &library.join("libuzswap.a"), 0o644)?;
    copy(&built.join("libuzswap_malloc.so"), &library.join("libuzswap_malloc.so"), 0o755)?;
    // Where `uzswap run --in-process` looks for it, from a folder `bin` beside.
    copy(&built.join("libuzswap_agent.so"), &library.join("libuzswap_agent.so"), 0o755)?;
    let header = root.join("crates/uzswap-c/include/uzswap.h");
    copy(&header, &to.join("include/uzswap.h"), 0o644)?;
    let template = fs::read_to_string(root.join("crates/uzswap-c/uzswap.pc.in"))
        .map_err(|error| named(&root.join("crates/uzswap-c/uzswap.pc.in"), &error))?;
    let text =
        template.replace("@prefix@", &prefix.display().to_string()).replace("@version@", VERSION);
    let file = library.join("pkgconfig/uzswap.pc");
    make_folder(&file)?;
    fs::write(&file, text).map_err(|error| named(&file, &error))?;
    println!("{}", file.display());
    if destdir.is_empty() {
        println!("for the loader to find it: ldconfig, or LD_LIBRARY_PATH={}", library.display());
    }
    Ok(())
}

/// Builds the libraries; the folder they are in.
fn build(root: &Path) -> io::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .current_dir(root)
        .args(["build", "--quiet", "--profile", "library"])
        .args(["--package", "uzswap-c", "--package", "uzswap-malloc", "--package", "uzswap-agent"])
        .status()?;
    if !built.success() {
        return Err(io::Error::other("cargo could not build the libraries"));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Ok(target.unwrap_or_else(|| root.join("target")).join("library"))
}

/// Replaces a file as a whole, so that a program that has it mapped keeps the old one.
fn copy(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    make_folder(to)?;
    let new = to.with_extension("new");
    fs::copy(from, &new).map_err(|error| named(from, &error))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
    fs::rename(&new, to).map_err(|error| named(to, &error))?;
    println!("{}", to.display());
    Ok(())
}

fn link(to: &str, name: &Path) -> io::Result<()> {
    match fs::remove_file(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(named(name, &error)),
        _ => symlink(to, name).map_err(|error| named(name, &error))?,
    }
    println!("{}", name.display());
    Ok(())
}

fn make_folder(file: &Path) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(|error| named(folder, &error))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

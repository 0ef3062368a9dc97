//! Installs the C library like `make install`. `--system` also installs the program and its files
//! for a system.

use crate::manual;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name states the library's compatibility. crates/uzswap-c/build.rs puts it into the file.
const SONAME: &str = "libuzswap.so.0";

/// `--prefix DIR` (/usr/local): the final folder. `--destdir DIR`: a folder before the prefix for
/// the copies. `--built DIR`: libraries that are built already. `--system`: also the program, its
/// unit, configuration, man pages and completions.
pub fn run(root: &Path, mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let mut prefix = PathBuf::from("/usr/local");
    let mut destdir = String::new();
    let mut built = None;
    let mut is_system = false;
    while let Some(name) = arguments.next() {
        if name == "--system" {
            is_system = true;
            continue;
        }
        match (name.as_str(), arguments.next()) {
            ("--prefix", Some(folder)) if folder.starts_with('/') => prefix = folder.into(),
            ("--destdir", Some(folder)) => destdir = folder,
            ("--built", Some(folder)) => built = Some(PathBuf::from(folder)),
            _ => {
                eprintln!(
                    "usage: cargo run -p xtask -- install [--prefix /DIR] [--destdir DIR] \
                     [--built DIR] [--system]"
                );
                return ExitCode::from(2);
            }
        }
    }
    let place = |profile, packages: &[&str]| match &built {
        Some(built) => Ok(built.clone()),
        None => build(root, profile, packages),
    };
    let installed = place("library", &["uzswap-c", "uzswap-preload", "uzswap-agent"])
        .and_then(|libraries| install(root, &libraries, &prefix, &destdir))
        .and_then(|()| match is_system {
            true => {
                let program = place("release", &["uzswap"])?;
                install_system(root, &program, &prefix, &destdir)
            }
            false => Ok(()),
        });
    match installed {
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
    // `uzswap run`, which is in the folder `bin` beside, finds them here.
    for name in ["libuzswap_preload.so", "libuzswap_agent.so"] {
        copy(&built.join(name), &library.join("uzswap").join(name), 0o755)?;
    }
    let header = root.join("crates/uzswap-c/include/uzswap.h");
    copy(&header, &to.join("include/uzswap.h"), 0o644)?;
    let template = fs::read_to_string(root.join("crates/uzswap-c/uzswap.pc.in"))
        .map_err(|error| named(&root.join("crates/uzswap-c/uzswap.pc.in"), &error))?;
    let text =
        template.replace("@prefix@", &prefix.display().to_string()).replace("@version@", VERSION);
    write(&library.join("pkgconfig/uzswap.pc"), &text)?;
    if destdir.is_empty() {
        println!("for the loader to find it: ldconfig, or LD_LIBRARY_PATH={}", library.display());
    }
    Ok(())
}

/// Installs the program, and the files by which a system starts, configures and documents it. An
/// existing configuration stays.
fn install_system(root: &Path, program: &Path, prefix: &Path, destdir: &str) -> io::Result<()> {
    let to = PathBuf::from(format!("{destdir}{}", prefix.display()));
    let share = to.join("share");
    copy(&program.join("uzswap"), &to.join("bin/uzswap"), 0o755)?;
    let packaging = root.join("packaging");
    let unit = fs::read_to_string(packaging.join("uzswap.service"))?;
    let unit = unit.replace("/usr/bin/uzswap", &prefix.join("bin/uzswap").display().to_string());
    write(&to.join("lib/systemd/system/uzswap.service"), &unit)?;
    let configuration = PathBuf::from(format!("{destdir}/etc/uzswap/uzswap.conf"));
    if !configuration.exists() {
        copy(&packaging.join("uzswap.conf"), &configuration, 0o644)?;
    }
    for folder in ["examples", "prometheus"] {
        for entry in fs::read_dir(packaging.join(folder))? {
            let example = entry?;
            let to = share.join("doc/uzswap/examples").join(example.file_name());
            copy(&example.path(), &to, 0o644)?;
        }
    }
    for (name, text) in manual::pages() {
        write(&share.join("man/man1").join(name), &text)?;
    }
    for (name, text) in manual::completions() {
        let place = match name.as_str() {
            "uzswap.bash" => "bash-completion/completions/uzswap",
            "uzswap.fish" => "fish/vendor_completions.d/uzswap.fish",
            _ => "zsh/site-functions/_uzswap",
        };
        write(&share.join(place), &text)?;
    }
    Ok(())
}

/// Builds packages. Returns their folder. Libraries that run in other programs have their own
/// profile.
fn build(root: &Path, profile: &str, packages: &[&str]) -> io::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .current_dir(root)
        .args(["build", "--quiet", "--profile", profile])
        .args(packages.iter().flat_map(|package| ["--package", package]))
        .status()?;
    if !built.success() {
        return Err(io::Error::other(format!("cargo could not build {}", packages.join(", "))));
    }
    Ok(crate::target(root).join(profile))
}

/// Replaces a file by a new one, so that a program that has mapped the old one keeps it.
fn copy(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    make_folder(to)?;
    let new = to.with_extension("new");
    fs::copy(from, &new).map_err(|error| named(from, &error))?;
    fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
    fs::rename(&new, to).map_err(|error| named(to, &error))?;
    println!("{}", to.display());
    Ok(())
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    make_folder(file)?;
    fs::write(file, text).map_err(|error| named(file, &error))?;
    println!("{}", file.display());
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

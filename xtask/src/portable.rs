//! A wheel and a tarball with the program, its two libraries and the Python module. They are built
//! against an old C library, so they run on every distribution of the last years.
//!
//! The C library is that of Debian 11, which mmdebstrap unpacks below target/. Compiler and linker
//! are this machine's, or Debian's cross compiler. Only functions of version 2.28 are used.

use crate::release::{Dist, succeed};
use crate::{Result, manual, output, wheel};
use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A processor to build for.
#[derive(Debug)]
struct Processor {
    /// The name in targets, wheels and folders.
    name: &'static str,
    /// Debian's name.
    debian: &'static str,
    /// The prefix of compiler and binary tools.
    tools: &'static str,
    /// The first version of the C library for this processor.
    first_version: &'static str,
}

static X86: Processor =
    Processor { name: "x86_64", debian: "amd64", tools: "", first_version: "2.2.5" };
static ARM: Processor = Processor {
    name: "aarch64",
    debian: "arm64",
    tools: "aarch64-linux-gnu-",
    first_version: "2.17",
};

impl Processor {
    /// Rust's name of the target.
    fn target(&self) -> String {
        format!("{}-unknown-linux-gnu", self.name)
    }

    /// Debian's name for the folders of this processor.
    fn multiarch(&self) -> String {
        format!("{}-linux-gnu", self.name)
    }

    /// A command of the compiler or a binary tool.
    fn tool(&self, name: &str) -> Command {
        Command::new(format!("{}{name}", self.tools))
    }
}

/// The oldest Debian release that gets updates, and the runtime of its compiler.
const SUITE: &str = "bullseye";
const PACKAGES: &str = "libc6-dev,libgcc-10-dev,libstdc++-10-dev";
pub const MIRROR: &str = "http://deb.debian.org/debian";
/// pip's name for systems with this C library.
const PLATFORM: &str = "manylinux_2_28";

const VERSION: &str = env!("CARGO_PKG_VERSION");

const WHEEL_BYTES_MAX: u64 = 6 << 20;

/// Functions that got new versions in 2.29: they are linked by their old versions.
const OLD_MATH: &str = r#"
#define OLD(name, parameters, arguments)                      \
    __asm__(".symver old_" #name ", " #name "@GLIBC_" FIRST); \
    double old_##name parameters;                             \
    __attribute__((visibility("hidden"))) double name parameters { return old_##name arguments; }
OLD(exp, (double x), (x))
OLD(exp2, (double x), (x))
OLD(log, (double x), (x))
OLD(log2, (double x), (x))
OLD(pow, (double x, double y), (x, y))
"#;

/// Functions newer than 2.28 that the standard library uses if they exist. Even a weak reference
/// would need the newer C library.
/// `statx` is of 2.28 itself. A program may have its own C library, older than the system's, and
/// inherit our preloaded library. If that library asked for 2.28, the dynamic linker would not
/// start the program.
const LATE_NAMES: &str = r#"
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((visibility("hidden"))) pid_t gettid(void) { return syscall(SYS_gettid); }
__attribute__((visibility("hidden")))
int statx(int folder, const char *path, int flags, unsigned mask, void *result) {
    return syscall(SYS_statx, folder, path, flags, mask, result);
}
__asm__(".globl posix_spawn_file_actions_addchdir_np\n"
        ".hidden posix_spawn_file_actions_addchdir_np\n"
        ".set posix_spawn_file_actions_addchdir_np, 0\n");
"#;

/// The folder, beside the libraries, of the preloaded library for glibc 2.34 and later, and the
/// variable by which its build script makes it (`uzswap-preload/build.rs`).
const UNIFIED: &str = "glibc-2.34";
const UNIFIED_VARIABLE: &str = "UZSWAP_UNIFIED_GLIBC";

const PRELOADED: &str = "libuzswap_preload.so";

/// The stripped files, and the folder of their debug information.
struct Built {
    program: PathBuf,
    libraries: Vec<PathBuf>,
    /// The preloaded library for newer systems.
    unified: PathBuf,
    sysroot: Sysroot,
}

fn build(dist: &Dist, processor: &'static Processor) -> Result<Built> {
    let sysroot = Sysroot::new(&dist.target, processor)?;
    let target = processor.target();
    let build = |profile: &str, packages: &[&str]| {
        let mut command = sysroot.cargo();
        command.current_dir(&dist.root).args(["build", "--quiet", "--locked", "--target", &target]);
        command.args(["--profile", profile]);
        command.args(packages.iter().flat_map(|package| ["--package", package]));
        command
    };
    let cargo = |profile: &str, packages: &[&str]| succeed(&mut build(profile, packages));
    let (of_program, of_libraries) = profiles(dist);
    let libraries = [PRELOADED, "libuzswap_agent.so"];
    let packages = ["uzswap-preload", "uzswap-agent"];
    match of_program == of_libraries {
        // One build for all: separate builds would ask their crates for other features, and build
        // them twice.
        true => cargo(of_program, &[&["uzswap"][..], &packages].concat())?,
        false => {
            cargo(of_program, &["uzswap"])?;
            cargo(of_libraries, &packages)?;
        }
    }
    let built = dist.target.join(&target);
    let debug = dist.stage.join(format!("debug-{}", processor.name));
    fs::create_dir_all(&debug)?;
    let take = |profile: &str, name: &str| {
        split(processor, &built.join(profile).join(name), &dist.stage, &debug)
    };
    let program = take(of_program, "uzswap")?;
    let libraries: Vec<_> =
        libraries.iter().map(|name| take(of_libraries, name)).collect::<Result<_>>()?;
    libraries.iter().try_for_each(|library| check_needs(processor, library, &[UNWINDER]))?;
    // Without link-time optimization, unused code of the standard library would need functions that
    // may be missing.
    succeed(build(PROFILE, &["uzswap-preload"]).env(UNIFIED_VARIABLE, "1"))?;
    let folders = [&dist.stage, &debug].map(|folder| folder.join(UNIFIED));
    folders.iter().try_for_each(fs::create_dir_all)?;
    let from = built.join(PROFILE).join(PRELOADED);
    let unified = split(processor, &from, &folders[0], &folders[1])?;
    check_needs(processor, &unified, &[UNWINDER, "libpthread", "libdl"])?;
    let name = format!("uzswap-{VERSION}-{}-linux-debug.tar.xz", processor.name);
    let mut tar = Command::new("tar");
    succeed(tar.arg("-cJf").arg(dist.folder.join(name)).arg("-C").arg(&debug).arg("."))?;
    Ok(Built { program, libraries, unified, sysroot })
}

/// A cargo command that builds in the repository for this processor, against the old C library.
pub fn cargo(root: &Path, target: &Path) -> Result<Command> {
    let mut command = Sysroot::new(target, &X86)?.cargo();
    command.current_dir(root).env("CARGO_BUILD_TARGET", X86.target());
    Ok(command)
}

const UNWINDER: &str = "libgcc_s";

/// Fails if a library needs one of these, which programs in C do not load. Each start of a program
/// would load one library more. With the unwinder, unwinding would call functions of the program's.
fn check_needs(processor: &Processor, library: &Path, unwanted: &[&str]) -> Result<()> {
    let needs = output(processor.tool("readelf").arg("--dynamic").arg(library))?;
    match unwanted.iter().find(|name| needs.contains(&format!("[{name}.so"))) {
        Some(name) => {
            let library = library.display();
            Err(format!("{library} needs {name}; see build.rs of its crate").into())
        }
        None => Ok(()),
    }
}

/// The profile of published libraries.
const PROFILE: &str = "library";

/// The profiles of the program and of the libraries.
fn profiles(dist: &Dist) -> (&'static str, &'static str) {
    if dist.is_quick { ("quick", "quick") } else { ("release", PROFILE) }
}

/// Copies a file to a folder without its debug information, which goes into a file in `debug`. A
/// debugger finds that file by its name, beside the program or in the debugger's folder for such
/// files.
fn split(processor: &Processor, from: &Path, folder: &Path, debug: &Path) -> Result<PathBuf> {
    let name = from.file_name().ok_or("a file without a name")?;
    let mut debug_name = name.to_owned();
    debug_name.push(".debug");
    let (to, debug) = (folder.join(name), debug.join(debug_name));
    succeed(processor.tool("objcopy").arg("--only-keep-debug").arg(from).arg(&debug))?;
    succeed(processor.tool("strip").arg("-o").arg(&to).arg(from))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    succeed(processor.tool("objcopy").arg(link).arg(&to))?;
    Ok(to)
}

/// `uzswap-VERSION-cp39-abi3-manylinux_2_28_x86_64.whl`. pip puts its files below the prefix, so
/// `uzswap` is on the PATH and `import uzswap` finds the module.
pub fn wheel(dist: &Dist) -> Result<()> {
    wheel_for(dist, &X86)
}

/// The wheel for aarch64, by a cross compiler.
pub fn wheel_for_arm(dist: &Dist) -> Result<()> {
    wheel_for(dist, &ARM)
}

fn wheel_for(dist: &Dist, processor: &'static Processor) -> Result<()> {
    let built = build(dist, processor)?;
    let stage = dist.stage.join(format!("wheel-{}", processor.name));
    let mut maturin = dist.python_tool("maturin")?;
    built.sysroot.equip(&mut maturin);
    let (_, profile) = profiles(dist);
    maturin.current_dir(&dist.root).args(["build", "--quiet", "--locked"]);
    maturin.args(["--manifest-path", "python/Cargo.toml", "--profile", profile]);
    maturin.args(["--target", &processor.target(), "--compatibility", PLATFORM]);
    maturin.arg("--out").arg(&stage);
    succeed(&mut maturin)?;
    let made = fs::read_dir(&stage)?.next().ok_or("maturin has made no wheel")??.path();
    // At the start the wheel has only the module. This adds the other files, and makes the wheel's
    // list of files again.
    let mut unpack = dist.python_tool("wheel")?;
    output(unpack.arg("unpack").arg("--dest").arg(&stage).arg(made))?;
    let name = format!("uzswap-{VERSION}");
    let data = stage.join(&name).join(format!("{name}.data"));
    lay_out(&built, &data.join("scripts"), &data.join("data"))?;
    let packed = stage.join("packed");
    fs::create_dir_all(&packed)?;
    let mut pack = dist.python_tool("wheel")?;
    output(pack.arg("pack").arg("--dest-dir").arg(&packed).arg(stage.join(name)))?;
    let packed = fs::read_dir(&packed)?.next().ok_or("wheel has packed nothing")??.path();
    publish(dist, &packed)
}

/// Puts a wheel into the folder of results, compressed again. Fails if a published wheel is too
/// large to download with pleasure. (A quick one is a fifth larger.)
fn publish(dist: &Dist, packed: &Path) -> Result<()> {
    let name = packed.file_name().ok_or("a wheel without a name")?;
    let bytes = wheel::recompress(&fs::read(packed)?)?;
    let count = bytes.len() as u64;
    if !dist.is_quick && count > WHEEL_BYTES_MAX {
        let name = name.display();
        return Err(format!("{name} has {count} bytes, more than 6 MiB").into());
    }
    Ok(fs::write(dist.folder.join(name), bytes)?)
}

/// `uzswap-VERSION-x86_64-linux.tar.gz`. `bin/uzswap` runs wherever it is unpacked.
pub fn tarball(dist: &Dist) -> Result<()> {
    tarball_for(dist, &X86)
}

/// The tarball for aarch64.
pub fn tarball_for_arm(dist: &Dist) -> Result<()> {
    tarball_for(dist, &ARM)
}

fn tarball_for(dist: &Dist, processor: &'static Processor) -> Result<()> {
    let built = build(dist, processor)?;
    let name = format!("uzswap-{VERSION}-{}-linux", processor.name);
    let folder = dist.stage.join(&name);
    lay_out(&built, &folder.join("bin"), &folder)?;
    for file in ["README.md", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(dist.root.join(file), folder.join(file))?;
    }
    manual::write(&folder.join("share/completions"), manual::completions())?;
    let archive = dist.folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--sort=name", "-czf"]).arg(archive);
    succeed(tar.arg("-C").arg(&dist.stage).arg(name))
}

/// Copies the program to `programs`, and its other files below `prefix`.
fn lay_out(built: &Built, programs: &Path, prefix: &Path) -> Result<()> {
    let copy = |from: &Path, folder: &Path, mode: u32| -> Result<()> {
        let to = folder.join(from.file_name().ok_or("a file without a name")?);
        fs::create_dir_all(folder)?;
        fs::copy(from, &to)?;
        Ok(fs::set_permissions(&to, fs::Permissions::from_mode(mode))?)
    };
    copy(&built.program, programs, 0o755)?;
    for library in &built.libraries {
        copy(library, &prefix.join("lib/uzswap"), 0o755)?;
    }
    copy(&built.unified, &prefix.join("lib/uzswap").join(UNIFIED), 0o755)?;
    Ok(manual::write(&prefix.join("share/man/man1"), manual::pages())?)
}

/// Headers and libraries of the old system, and a compiler that uses those.
struct Sysroot {
    compiler: PathBuf,
    processor: &'static Processor,
}

impl Sysroot {
    /// Makes the system, if it does not exist.
    fn new(target: &Path, processor: &'static Processor) -> Result<Self> {
        let folder = target.join("sysroot").join(processor.name);
        let compiler = folder.join("cc");
        if !compiler.exists() {
            // An interrupted run begins again. The folder may not exist.
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder)?;
            let root = folder.join(SUITE);
            let mut unpack = Command::new("mmdebstrap");
            unpack.args(["--quiet", "--variant=extract", &format!("--include={PACKAGES}")]);
            unpack.arg(format!("--architectures={}", processor.debian)).arg(SUITE);
            output(unpack.arg(&root).arg(MIRROR)).map_err(|error| {
                format!("{error}; it needs mmdebstrap, and a way to Debian's packages")
            })?;
            make_links_relative(&root, &root)?;
            // The headers are the old compiler's. Because of -B, this machine's compiler would find
            // these files first.
            fs::remove_dir_all(runtime(&root, processor).join("include"))?;
            add_old_math(&root, processor)?;
        }
        // Written each time: another version of this program may have made the file.
        write_compiler(&folder.join(SUITE), processor, &compiler)?;
        Ok(Self { compiler, processor })
    }

    fn cargo(&self) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
        self.equip(&mut command);
        command
    }

    /// Makes cargo, and the programs that it runs, compile and link with this system.
    ///
    /// Cargo's variable for the linker would also hold for build scripts and macros, which run
    /// here. Other builds of the repository have those in the same folder, without that linker. So
    /// cargo would make all of them again each time. With `--target`, rustc's flags hold for the
    /// target alone.
    fn equip(&self, command: &mut Command) {
        let compiler = self.compiler.display();
        let flags = flags(["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS"].map(|name| env::var(name).ok()));
        command.env("CARGO_ENCODED_RUSTFLAGS", format!("{flags}-Clinker={compiler}"));
        command.env(format!("CC_{}", self.processor.target().replace('-', "_")), &self.compiler);
    }
}

/// The character by which cargo separates flags.
const SEPARATOR: &str = "\x1f";

/// The caller's flags for rustc, each with cargo's separator behind it. The first form, in which
/// that separator is between them, has precedence.
fn flags([encoded, plain]: [Option<String>; 2]) -> String {
    let plain = || plain.map(|flags| flags.split_whitespace().collect::<Vec<_>>().join(SEPARATOR));
    let flags = encoded.or_else(plain).filter(|flags| !flags.is_empty());
    flags.map_or_else(String::new, |flags| flags + SEPARATOR)
}

/// Makes absolute links of that system lead to its own files.
fn make_links_relative(root: &Path, folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type()))?;
        if kind?.is_dir() {
            make_links_relative(root, &path)?;
            continue;
        }
        let Ok(to) = fs::read_link(&path) else { continue };
        let Ok(below) = to.strip_prefix("/") else { continue };
        let depth = folder.strip_prefix(root)?.components().count();
        let relative: PathBuf = std::iter::repeat_n("..", depth).collect();
        fs::remove_file(&path)?;
        symlink(relative.join(below), &path)?;
    }
    Ok(())
}

/// Compiles C code and returns the object.
fn compile(root: &Path, processor: &Processor, name: &str, text: &str) -> Result<PathBuf> {
    let folder = root.join("usr/lib").join(processor.multiarch());
    let (source, object) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.o")));
    fs::write(&source, text)?;
    let mut compile = processor.tool("gcc");
    compile.args(["-O2", "-fPIC", "-fno-builtin", "-ffunction-sections", "-c"]);
    compile.arg(format!("-DFIRST=\"{}\"", processor.first_version));
    succeed(compile.arg(&source).arg("-o").arg(&object))?;
    Ok(object)
}

fn add_old_math(root: &Path, processor: &Processor) -> Result<()> {
    let multiarch = processor.multiarch();
    let libraries = root.join("usr/lib").join(&multiarch);
    let object = compile(root, processor, "old_math", OLD_MATH)?;
    let archive = libraries.join("libold_math.a");
    succeed(Command::new("ar").arg("rcs").arg(archive).arg(&object))?;
    // The linker looks below the root for names in a script there.
    let vectors = match root.join("lib").join(&multiarch).join("libmvec.so.1").exists() {
        true => format!("AS_NEEDED(/lib/{multiarch}/libmvec.so.1)"),
        false => String::new(),
    };
    let script =
        format!("GROUP(/usr/lib/{multiarch}/libold_math.a /lib/{multiarch}/libm.so.6 {vectors})\n");
    let library = libraries.join("libm.so");
    match fs::remove_file(&library) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(fs::write(library, script)?),
    }
}

/// The folder of the compiler's own libraries.
fn runtime(root: &Path, processor: &Processor) -> PathBuf {
    root.join("usr/lib/gcc").join(processor.multiarch()).join("10")
}

/// Debian's gcc looks for libraries beside itself, even with another root, unless it finds them
/// earlier.
fn write_compiler(root: &Path, processor: &Processor, compiler: &Path) -> Result<()> {
    let multiarch = processor.multiarch();
    let libraries = ["usr/lib", "lib"].map(|folder| root.join(folder).join(&multiarch));
    let folders = [&[runtime(root, processor)][..], &libraries].concat();
    let all = |option: &str, end: &str| -> String {
        folders.iter().map(|folder| format!(" '{option}{}{end}'", folder.display())).collect()
    };
    // The folders of libraries come last: a crate's own folder may have another `libgcc_s.so`.
    let (programs, libraries) = (all("-B", "/"), all("-L", ""));
    let late = compile(root, processor, "late_names", LATE_NAMES)?;
    let (late, root) = (late.display(), root.display());
    let text = format!(
        "#!/bin/sh\n\
         case \" $* \" in *' -c '*) ;; *) set -- \"$@\" '{late}' ;; esac\n\
         exec {}gcc '--sysroot={root}'{programs} \"$@\"{libraries}\n",
        processor.tools
    );
    fs::write(compiler, text)?;
    Ok(fs::set_permissions(compiler, fs::Permissions::from_mode(0o755))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_the_caller_come_before_the_linker() {
        let flags = |encoded: Option<&str>, plain: Option<&str>| {
            flags([encoded, plain].map(|flags| flags.map(str::to_owned)))
        };
        assert_eq!(flags(None, None), "");
        assert_eq!(flags(Some(""), Some("-g")), "");
        assert_eq!(flags(None, Some(" -g  -O ")), "-g\x1f-O\x1f");
        assert_eq!(flags(Some("-C\x1fa b"), Some("-g")), "-C\x1fa b\x1f");
    }
}

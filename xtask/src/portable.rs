//! A wheel and a tarball with the program, its two libraries and the Python module. They are built
//! against an old C library, and so run on every distribution of the last years.
//!
//! The C library is Debian 11's, which mmdebstrap unpacks below target/; compiler and linker are
//! this machine's. Of that library only functions that version 2.28 has are used.

use crate::release::{Dist, succeed};
use crate::{Result, output};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// As Debian names folders for this machine's kind.
const MULTIARCH: &str = "x86_64-linux-gnu";
/// The oldest release that still gets updates, and its compiler's runtime.
const SUITE: &str = "bullseye";
const PACKAGES: &str = "libc6-dev,libgcc-10-dev,libstdc++-10-dev";
const MIRROR: &str = "http://deb.debian.org/debian";
/// Pip's name for systems with this C library.
const PLATFORM: &str = "manylinux_2_28";

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Functions that became others in 2.29: linked by the names that they had before.
const OLD_MATH: &str = r#"
#define OLD(name, parameters, arguments)                      \
    __asm__(".symver old_" #name ", " #name "@GLIBC_2.2.5");  \
    double old_##name parameters;                             \
    __attribute__((visibility("hidden"))) double name parameters { return old_##name arguments; }
OLD(exp, (double x), (x))
OLD(exp2, (double x), (x))
OLD(log, (double x), (x))
OLD(log2, (double x), (x))
OLD(pow, (double x, double y), (x, y))
"#;

/// Functions that are later than 2.28, and that the standard library uses where they are there. A
/// name that it only asks for would still need the later C library.
const LATE_NAMES: &str = r#"
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((visibility("hidden"))) pid_t gettid(void) { return syscall(SYS_gettid); }
__asm__(".globl posix_spawn_file_actions_addchdir_np\n"
        ".hidden posix_spawn_file_actions_addchdir_np\n"
        ".set posix_spawn_file_actions_addchdir_np, 0\n");
"#;

/// The stripped files. Their debug information is in files of its own.
struct Built {
    program: PathBuf,
    libraries: [PathBuf; 2],
    sysroot: Sysroot,
}

fn build(dist: &Dist) -> Result<Built> {
    let sysroot = Sysroot::new(&dist.target)?;
    let cargo = |profile: &str, packages: &[&str]| {
        let mut command = sysroot.cargo();
        command.current_dir(&dist.root).args(["build", "--quiet", "--locked", "--target", TARGET]);
        command.args(["--profile", profile]);
        succeed(command.args(packages.iter().flat_map(|package| ["--package", package])))
    };
    let (of_program, of_libraries) = profiles(dist);
    cargo(of_program, &["uzswap"])?;
    cargo(of_libraries, &["uzswap-preload", "uzswap-agent"])?;
    let built = dist.target.join(TARGET);
    let debug = dist.stage.join("debug");
    fs::create_dir_all(&debug)?;
    let take =
        |profile: &str, name: &str| split(&built.join(profile).join(name), &dist.stage, &debug);
    let program = take(of_program, "uzswap")?;
    let libraries =
        [take(of_libraries, "libuzswap_preload.so")?, take(of_libraries, "libuzswap_agent.so")?];
    let name = format!("uzswap-{VERSION}-x86_64-linux-debug.tar.xz");
    let mut tar = Command::new("tar");
    succeed(tar.arg("-cJf").arg(dist.folder.join(name)).arg("-C").arg(&debug).arg("."))?;
    Ok(Built { program, libraries, sysroot })
}

/// Of the program and of the libraries.
fn profiles(dist: &Dist) -> (&'static str, &'static str) {
    if dist.is_quick { ("quick", "quick") } else { ("release", "library") }
}

/// Copies a file to a folder without its debug information, which gets a file in another one. A
/// debugger finds that by its name, beside the program or in its own folder for such files.
fn split(from: &Path, folder: &Path, debug: &Path) -> Result<PathBuf> {
    let name = from.file_name().ok_or("a file without a name")?;
    let mut debug_name = name.to_owned();
    debug_name.push(".debug");
    let (to, debug) = (folder.join(name), debug.join(debug_name));
    succeed(Command::new("objcopy").arg("--only-keep-debug").arg(from).arg(&debug))?;
    succeed(Command::new("strip").arg("-o").arg(&to).arg(from))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    succeed(Command::new("objcopy").arg(link).arg(&to))?;
    Ok(to)
}

/// `uzswap-VERSION-cp39-abi3-manylinux_2_28_x86_64.whl`: files that pip puts below its prefix, so
/// that `uzswap` is on the PATH and `import uzswap` finds the module.
pub fn wheel(dist: &Dist) -> Result<()> {
    let built = build(dist)?;
    let stage = dist.stage.join("wheel");
    let mut maturin = dist.python_tool("maturin")?;
    built.sysroot.equip(&mut maturin);
    let (_, profile) = profiles(dist);
    maturin.current_dir(&dist.root).args(["build", "--quiet", "--locked"]);
    maturin.args(["--manifest-path", "python/Cargo.toml", "--profile", profile]);
    maturin.args(["--target", TARGET, "--compatibility", PLATFORM, "--out"]).arg(&stage);
    succeed(&mut maturin)?;
    let made = fs::read_dir(&stage)?.next().ok_or("maturin has made no wheel")??.path();
    // The module alone; then all else, and its list of files once more.
    let mut unpack = dist.python_tool("wheel")?;
    output(unpack.arg("unpack").arg("--dest").arg(&stage).arg(made))?;
    let name = format!("uzswap-{VERSION}");
    let data = stage.join(&name).join(format!("{name}.data"));
    lay_out(dist, &built, &data.join("scripts"), &data.join("data"))?;
    let mut pack = dist.python_tool("wheel")?;
    output(pack.arg("pack").arg("--dest-dir").arg(&dist.folder).arg(stage.join(name)))?;
    Ok(())
}

/// `uzswap-VERSION-x86_64-linux.tar.gz`: unpacked anywhere, `bin/uzswap` runs.
pub fn tarball(dist: &Dist) -> Result<()> {
    let built = build(dist)?;
    let name = format!("uzswap-{VERSION}-x86_64-linux");
    let folder = dist.stage.join(&name);
    lay_out(dist, &built, &folder.join("bin"), &folder)?;
    for file in ["README.md", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(dist.root.join(file), folder.join(file))?;
    }
    let completions = dist.root.join("docs/completions");
    succeed(Command::new("cp").arg("-r").arg(completions).arg(folder.join("share/completions")))?;
    let archive = dist.folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "--sort=name", "-czf"]).arg(archive);
    succeed(tar.arg("-C").arg(&dist.stage).arg(name))
}

/// The program in a folder for programs, and its other files below a prefix.
fn lay_out(dist: &Dist, built: &Built, programs: &Path, prefix: &Path) -> Result<()> {
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
    for page in fs::read_dir(dist.root.join("docs/man"))? {
        copy(&page?.path(), &prefix.join("share/man/man1"), 0o644)?;
    }
    Ok(())
}

/// Headers and libraries of the old system, and a compiler that uses those.
struct Sysroot {
    compiler: PathBuf,
}

impl Sysroot {
    /// Makes it once.
    fn new(target: &Path) -> Result<Self> {
        let folder = target.join("sysroot");
        let compiler = folder.join("cc");
        if !compiler.exists() {
            // An interrupted run starts anew; the folder may not exist.
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder)?;
            let root = folder.join(SUITE);
            let mut unpack = Command::new("mmdebstrap");
            unpack.args(["--quiet", "--variant=extract", &format!("--include={PACKAGES}"), SUITE]);
            output(unpack.arg(&root).arg(MIRROR)).map_err(|error| {
                format!("{error}; it needs mmdebstrap, and a way to Debian's packages")
            })?;
            make_links_relative(&root, &root)?;
            // That compiler's; -B would have this machine's find them first.
            fs::remove_dir_all(runtime(&root).join("include"))?;
            add_old_math(&root)?;
            write_compiler(&root, &compiler)?;
        }
        Ok(Self { compiler })
    }

    fn cargo(&self) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        self.equip(&mut command);
        command
    }

    /// Has cargo, and the programs that it runs, compile and link with this.
    fn equip(&self, command: &mut Command) {
        let variables =
            ["CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER", "CC_x86_64_unknown_linux_gnu"];
        variables.iter().for_each(|name| _ = command.env(name, &self.compiler));
    }
}

/// Links that begin at the root of that system lead to this one's.
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

/// Compiles C for a library or a program; returns the object.
fn compile(root: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let folder = root.join("usr/lib").join(MULTIARCH);
    let (source, object) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.o")));
    fs::write(&source, text)?;
    let mut compile = Command::new("gcc");
    compile.args(["-O2", "-fPIC", "-fno-builtin", "-ffunction-sections", "-c"]);
    succeed(compile.arg(&source).arg("-o").arg(&object))?;
    Ok(object)
}

fn add_old_math(root: &Path) -> Result<()> {
    let libraries = root.join("usr/lib").join(MULTIARCH);
    let object = compile(root, "old_math", OLD_MATH)?;
    let archive = libraries.join("libold_math.a");
    succeed(Command::new("ar").arg("rcs").arg(archive).arg(&object))?;
    // The linker looks below the root for names in a script that is there.
    let script = format!(
        "GROUP(/usr/lib/{MULTIARCH}/libold_math.a /lib/{MULTIARCH}/libm.so.6 \
         AS_NEEDED(/lib/{MULTIARCH}/libmvec.so.1))\n"
    );
    let library = libraries.join("libm.so");
    match fs::remove_file(&library) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(fs::write(library, script)?),
    }
}

/// Where the compiler's own libraries are.
fn runtime(root: &Path) -> PathBuf {
    root.join("usr/lib/gcc").join(MULTIARCH).join("10")
}

/// Debian's gcc looks for libraries beside itself, whatever root it is given, unless it finds them
/// earlier.
fn write_compiler(root: &Path, compiler: &Path) -> Result<()> {
    let folders =
        [runtime(root), root.join("usr/lib").join(MULTIARCH), root.join("lib").join(MULTIARCH)];
    let option = |folder: &PathBuf| format!(" '-B{0}/' '-L{0}'", folder.display());
    let options: String = folders.iter().map(option).collect();
    let late = compile(root, "late_names", LATE_NAMES)?;
    let (late, root) = (late.display(), root.display());
    let text = format!(
        "#!/bin/sh\n\
         case \" $* \" in *' -c '*) ;; *) set -- \"$@\" '{late}' ;; esac\n\
         exec gcc '--sysroot={root}'{options} \"$@\"\n"
    );
    fs::write(compiler, text)?;
    Ok(fs::set_permissions(compiler, fs::Permissions::from_mode(0o755))?)
}

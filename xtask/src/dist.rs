//! Makes the files to publish in target/dist, with checksums. Ordinary users install the wheel or
//! the tarball (portable.rs). The others are a Debian package, the Python module's sources, the
//! program as one file without libraries, its crates, and a list of its parts (SBOM).

use crate::release::{Dist, succeed};
use crate::{Result, manual, output, portable};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The target of the file without libraries.
const STATIC: &str = "x86_64-unknown-linux-musl";

/// Makes one kind of file.
type Make = fn(&Dist) -> Result<()>;

/// The kinds, by their names for `--only`.
const KINDS: [(&str, Make); 9] = [
    ("wheel", portable::wheel),
    ("tarball", portable::tarball),
    ("wheel-aarch64", portable::wheel_for_arm),
    ("tarball-aarch64", portable::tarball_for_arm),
    ("deb", deb),
    ("sdist", sdist),
    ("static", program),
    ("crates", crates),
    ("sbom", sbom),
];

/// `--only NAME`: makes one kind. `--quick`: makes a wheel and a tarball of the profile `quick`,
/// for tests.
pub fn run(root: &Path, arguments: impl Iterator<Item = String>) -> ExitCode {
    let (quick, arguments): (Vec<_>, Vec<_>) = arguments.partition(|name| name == "--quick");
    let kinds: Vec<_> = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => KINDS.to_vec(),
        ["--only", only] => KINDS.into_iter().filter(|(name, _)| *name == only).collect(),
        _ => Vec::new(),
    };
    if kinds.is_empty() {
        let names = KINDS.map(|(name, _)| name).join("|");
        eprintln!("usage: cargo run -p xtask -- dist [--quick] [--only {names}]");
        return ExitCode::from(2);
    }
    match Dist::new(root, !quick.is_empty()).and_then(|dist| make(&dist, &kinds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dist: {error}");
            ExitCode::FAILURE
        }
    }
}

fn make(dist: &Dist, kinds: &[(&str, Make)]) -> Result<()> {
    for (name, make) in kinds {
        println!("dist: {name}");
        make(dist)?;
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&dist.folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() && name != SUMS {
            names.push(name);
        }
    }
    names.sort();
    let sums = output(Command::new("sha256sum").current_dir(&dist.folder).args(&names))?;
    fs::write(dist.folder.join(SUMS), sums)?;
    for name in names {
        println!("{}", dist.folder.join(name).display());
    }
    Ok(fs::remove_dir_all(&dist.stage)?)
}

const SUMS: &str = "SHA256SUMS";

/// Makes the Debian package, by debhelper.
fn deb(dist: &Dist) -> Result<()> {
    // debhelper's conventions for the folder and the name of a package's sources.
    let source = dist.stage.join("uzswap");
    fs::create_dir_all(&source)?;
    let debian = dist.root.join("packaging/debian");
    succeed(Command::new("cp").arg("-r").arg(debian).arg(source.join("debian")))?;
    // dpkg does not know the Rust of rustup, and debhelper gives a build another HOME.
    let mut command = Command::new("dpkg-buildpackage");
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    for (name, folder) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        command.env(name, std::env::var_os(name).unwrap_or(home.join(folder).into()));
    }
    command.current_dir(source).env("XTASK", std::env::current_exe()?).args([
        "--build=binary",
        "--no-sign",
        "--no-check-builddeps",
    ]);
    output(&mut command)
        .map_err(|error| format!("{error}; it needs dpkg-dev, debhelper and lintian"))?;
    for entry in fs::read_dir(&dist.stage)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            if !path.to_string_lossy().contains("-dbgsym_") {
                succeed(Command::new("lintian").args(["--fail-on", "error"]).arg(&path))?;
            }
            dist.take(&path)?;
        }
    }
    Ok(())
}

/// Makes cargo take crates from the folder that `cargo vendor` has made.
const VENDORED: &str = "[source.crates-io]
replace-with = \"vendor\"

[source.vendor]
directory = \"vendor\"
";

/// Makes the Python module's source, with that of all crates. Builds a module from it without a
/// network, to show that nothing is missing.
fn sdist(dist: &Dist) -> Result<()> {
    let stage = dist.stage.join("python");
    fs::create_dir_all(&stage)?;
    let sdist = ["sdist", "--manifest-path", "python/Cargo.toml", "--out"];
    succeed(dist.python_tool("maturin")?.current_dir(&dist.root).args(sdist).arg(&stage))?;
    let name = concat!("uzswap-", env!("CARGO_PKG_VERSION"));
    let archive = format!("{name}.tar.gz");
    let tar = || {
        let mut command = Command::new("tar");
        command.current_dir(&stage);
        command
    };
    succeed(tar().args(["-xzf", &archive]))?;
    let source = stage.join(name);
    // Without --locked: packages that the module does not need leave the workspace's lock file.
    let vendor = ["vendor", "--quiet", "--versioned-dirs"];
    succeed(Command::new("cargo").current_dir(&source).args(vendor))?;
    fs::create_dir_all(source.join(".cargo"))?;
    fs::write(source.join(".cargo/config.toml"), VENDORED)?;
    let build = ["build", "--quiet", "--locked", "--offline", "--auditwheel", "check", "--out"];
    succeed(
        dist.python_tool("maturin")?
            .current_dir(&source)
            // A new CARGO_HOME, so without earlier downloads.
            .env("CARGO_HOME", stage.join("home"))
            .env("CARGO_TARGET_DIR", stage.join("target"))
            .args(build)
            .arg(stage.join("wheel")),
    )?;
    succeed(tar().args(["-czf", &archive, name]))?;
    dist.take(&stage.join(archive))
}

/// Makes the program without libraries, for every Linux system.
fn program(dist: &Dist) -> Result<()> {
    succeed(Command::new("rustup").args(["--quiet", "target", "add", STATIC]))?;
    succeed(
        Command::new("cargo")
            .current_dir(&dist.root)
            .args(["build", "--quiet", "--release", "--locked", "--package", "uzswap"])
            .args(["--target", STATIC]),
    )?;
    let name = concat!("uzswap-", env!("CARGO_PKG_VERSION"), "-x86_64-linux-static");
    let folder = dist.stage.join(name);
    fs::create_dir_all(&folder)?;
    fs::copy(dist.target.join(STATIC).join("release/uzswap"), folder.join("uzswap"))?;
    for file in ["README.md", "LICENSE", "LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(dist.root.join(file), folder.join(file))?;
    }
    manual::write(&folder.join("man"), manual::pages())?;
    manual::write(&folder.join("completions"), manual::completions())?;
    let archive = dist.folder.join(format!("{name}.tar.xz"));
    succeed(Command::new("tar").arg("-cJf").arg(archive).arg("-C").arg(&dist.stage).arg(name))
}

/// Makes the crates that `cargo install uzswap` needs: all that may be published. Builds each from
/// its file.
fn crates(dist: &Dist) -> Result<()> {
    let mut command = Command::new("cargo");
    command.current_dir(&dist.root).args(["package", "--locked", "--quiet"]);
    for entry in fs::read_dir(dist.root.join("crates"))? {
        let folder = entry?.path();
        let is_published = !fs::read_to_string(folder.join("Cargo.toml"))?.contains("publish");
        if let (true, Some(name)) = (is_published, folder.file_name()) {
            command.arg("--package").arg(name);
        }
    }
    succeed(&mut command)?;
    for entry in fs::read_dir(dist.target.join("package"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "crate") {
            dist.take(&path)?;
        }
    }
    Ok(())
}

/// Makes the list of the program's parts, with versions and licenses, in the CycloneDX format.
fn sbom(dist: &Dist) -> Result<()> {
    let tools = dist.target.join("tools");
    if !tools.join("bin/cargo-sbom").exists() {
        // The newest version. CycloneDX' own tool writes into the sources.
        let version = "cargo-sbom@0.10.0";
        let mut install = Command::new("cargo");
        install.args(["install", "--quiet", "--locked", version, "--root"]).arg(&tools);
        succeed(&mut install)?;
    }
    let mut command = Command::new(tools.join("bin/cargo-sbom"));
    command.current_dir(&dist.root).args(["sbom", "--cargo-package", "uzswap"]);
    let text = output(command.args(["--output-format", "cyclone_dx_json_1_6"]))?;
    let name = concat!("uzswap-", env!("CARGO_PKG_VERSION"), ".cdx.json");
    Ok(fs::write(dist.folder.join(name), text)?)
}

//! Debian's kernels, unpacked.

use super::processor::Processor;
use super::{Lab, Result};
use crate::output;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kernel for tests.
pub struct KnownKernel {
    /// The kernel's name in the lab.
    pub name: &'static str,
    /// The Debian suite of the kernel's package.
    pub suite: &'static str,
    pub processor: Processor,
}

/// All of them.
pub const KNOWN: [KnownKernel; 5] = [
    KnownKernel { name: "5.10", suite: "bullseye", processor: Processor::X86 },
    KnownKernel { name: "6.1", suite: "bookworm", processor: Processor::X86 },
    KnownKernel { name: "6.12", suite: "bookworm-backports", processor: Processor::X86 },
    KnownKernel { name: "6.12-arm64", suite: "bookworm-backports", processor: Processor::Arm },
    KnownKernel { name: "newest", suite: "sid", processor: Processor::X86 },
];

/// Modules that guests load, with their dependencies. Built-in and missing ones are skipped.
const MODULES: [&str; 21] = [
    "virtio_pci",
    "virtio_blk",
    "9pnet_virtio",
    "9p",
    "overlay",
    // ext4 requests these by function, not by name.
    "crc32c_generic",
    "crc32c_intel",
    "ext4",
    "loop",
    "fuse",
    "zram",
    "lz4",
    "lz4_compress",
    "zstd",
    "ublk_drv",
    "nbd",
    "dm_mod",
    "dm_flakey",
    "null_blk",
    "virtio_mem",
    "virtio_balloon",
];

/// A kernel on this machine.
pub struct Kernel {
    /// The kernel's release, as in `uname -r`.
    pub release: String,
    /// The file to boot.
    pub image: PathBuf,
    /// Modules to load, in order.
    pub modules: Vec<PathBuf>,
}

pub fn known(name: &str) -> Result<&'static KnownKernel> {
    KNOWN.iter().find(|known| known.name == name).ok_or_else(|| {
        let names: Vec<_> = KNOWN.iter().map(|known| known.name).collect();
        format!("there is no kernel '{name}'; known are {}", names.join(", ")).into()
    })
}

/// A kernel by name. Downloads it if this machine does not have it.
pub fn get(lab: &Lab, name: &str) -> Result<Kernel> {
    let known = known(name)?;
    let folder = lab.folder.join("kernels").join(name);
    // The modules that were kept of the packages then.
    let kept = modules(known.processor).join(" ");
    if !fs::read_to_string(folder.join("complete")).is_ok_and(|text| text == kept) {
        println!("vm: fetching kernel {name} ({})", known.suite);
        // An interrupted download begins again. The folder may not exist.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        fetch(lab, known, &folder)?;
        fs::write(folder.join("complete"), kept)?;
    }
    open(&folder)
}

/// The names of modules that guests load.
fn modules(processor: Processor) -> Vec<&'static str> {
    [&MODULES[..], processor.modules()].concat()
}

/// Runs apt with the lists of one suite and processor, separate from this machine's.
fn apt(lab: &Lab, known: &KnownKernel, arguments: &[&str], at: &Path) -> Result<String> {
    let (suite, processor) = (known.suite, known.processor.debian());
    let state = lab.folder.join("apt").join(format!("{suite}-{processor}"));
    fs::create_dir_all(state.join("lists/partial"))?;
    fs::create_dir_all(state.join("cache/archives/partial"))?;
    fs::write(state.join("status"), "")?;
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let source = format!("deb [signed-by={keys}] http://deb.debian.org/debian {suite} main\n");
    fs::write(state.join("sources.list"), source)?;
    let path = state.display();
    let configuration = format!(
        "Dir::State \"{path}\"; Dir::State::status \"{path}/status\"; Dir::Cache \"{path}/cache\";\n\
         Dir::Etc::SourceList \"{path}/sources.list\"; Dir::Etc::SourceParts \"-\";\n\
         APT::Architecture \"{processor}\"; Acquire::Languages \"none\"; APT::Sandbox::User \"root\";\n"
    );
    fs::write(state.join("apt.conf"), configuration)?;
    let (program, rest) = arguments.split_first().ok_or("no program")?;
    let mut command = Command::new(program);
    command.env("APT_CONFIG", state.join("apt.conf")).args(rest).current_dir(at);
    output(&mut command)
}

/// Downloads the packages of a suite's kernel, and unpacks the parts that guests need.
fn fetch(lab: &Lab, known: &KnownKernel, folder: &Path) -> Result<()> {
    apt(lab, known, &["apt-get", "-qq", "update"], folder)?;
    let depends = |package: &str| -> Result<Vec<String>> {
        let text = apt(lab, known, &["apt-cache", "depends", package], folder)?;
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    };
    // This package depends on the newest kernel. Since 7 its image is split.
    let newest = depends(&format!("linux-image-{}", known.processor.debian()))?;
    let image = newest.iter().find(|name| name.starts_with("linux-image-"));
    let image = image.ok_or_else(|| format!("no kernel in {}", known.suite))?;
    let mut packages = vec![image.clone()];
    let parts = ["linux-binary-", "linux-modules-"];
    packages.extend(
        depends(image)?.into_iter().filter(|name| parts.iter().any(|part| name.starts_with(part))),
    );
    for package in &packages {
        apt(lab, known, &["apt-get", "-qq", "download", package], folder)?;
    }
    let everything = folder.join("unpacked");
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            output(Command::new("dpkg-deb").arg("-x").arg(&path).arg(&everything))?;
            fs::remove_file(path)?;
        }
    }
    pick(&everything, folder, &modules(known.processor))?;
    Ok(fs::remove_dir_all(everything)?)
}

/// Keeps the kernel and the wanted modules with their dependencies, in loading order.
fn pick(from: &Path, to: &Path, modules_wanted: &[&str]) -> Result<()> {
    let modules = ["lib/modules", "usr/lib/modules"].map(|folder| from.join(folder));
    let folder = modules.iter().find(|folder| folder.exists()).ok_or("a kernel without modules")?;
    let release = fs::read_dir(folder)?.next().ok_or("a kernel without modules")??;
    let name = release.file_name().into_string().map_err(|_| "a kernel without a name")?;
    let images = [from.join(format!("boot/vmlinuz-{name}")), release.path().join("vmlinuz")];
    let image = images.iter().find(|image| image.exists()).ok_or("a package without a kernel")?;
    fs::copy(image, to.join("vmlinuz"))?;
    let mut files = BTreeMap::new();
    find_modules(&release.path(), &mut files)?;
    fs::create_dir_all(to.join("modules"))?;
    let mut order = Vec::new();
    for module in modules_wanted {
        take(module, &files, &to.join("modules"), &mut order)?;
    }
    fs::write(to.join("modules/order"), order.join("\n") + "\n")?;
    Ok(fs::write(to.join("release"), name)?)
}

fn find_modules(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if let Some((name, _)) =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.split_once(".ko"))
        {
            found.insert(name.replace('-', "_"), path.clone());
        }
    }
    Ok(())
}

/// Unpacks a module, after its dependencies.
fn take(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    to: &Path,
    order: &mut Vec<String>,
) -> Result<()> {
    let Some(file) = files.get(name).filter(|_| !order.contains(&name.to_owned())) else {
        return Ok(());
    };
    let unpacked = to.join(format!("{name}.ko"));
    let content = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => unpack("xz", file)?,
        Some("zst") => unpack("zstd", file)?,
        _ => fs::read(file)?,
    };
    for needed in needs(&content) {
        take(&needed.replace('-', "_"), files, to, order)?;
    }
    fs::write(unpacked, content)?;
    order.push(name.to_owned());
    Ok(())
}

fn unpack(program: &str, file: &Path) -> Result<Vec<u8>> {
    let output = Command::new(program).arg("-dc").arg(file).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let is_done = output.status.success();
    if is_done { Ok(output.stdout) } else { Err(format!("{program}: {}", output.status).into()) }
}

/// The dependencies of a module: its field `depends=a,b` between zero bytes.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else {
        return Vec::new();
    };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value);
    value.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn open(folder: &Path) -> Result<Kernel> {
    let order = fs::read_to_string(folder.join("modules/order"))?;
    let modules = order.lines().map(|name| folder.join("modules").join(format!("{name}.ko")));
    Ok(Kernel {
        release: fs::read_to_string(folder.join("release"))?,
        image: folder.join("vmlinuz"),
        modules: modules.collect(),
    })
}

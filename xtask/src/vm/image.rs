//! The boot files of a guest: the systems, and an initramfs that loads modules and mounts a system.
//!
//! *busybox*: this machine's files, read-only over 9p, under a layer in memory. So a guest has all
//! programs of this machine at the same paths, and nothing is copied. For another processor, the
//! files are from some Debian packages, unpacked below the lab.
//!
//! *Debian*: a disk made by mmdebstrap, with systemd as init and the job as a unit. The repository
//! and its builds have the same paths as on this machine.

use super::kernel::Kernel;
use super::processor::Processor;
use super::{Lab, Machine, Result};
use crate::output;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages of the Debian image, besides those that every Debian has.
const PACKAGES: &str = "systemd-sysv,systemd-oomd,udev,dbus,kmod,procps,sudo,python3-minimal";

/// Serial numbers by which guests know their disks (init.sh): the system's,
pub const ROOT_DISK: &str = "root";
/// the disk of /var/tmp,
pub const SPACE_DISK: &str = "space";
/// and the bad disk.
pub const BAD_DISK: &str = "bad";

/// Size of the disk of /var/tmp, which is sparse.
const SPACE_BYTES: u64 = 4 << 30;

/// Writes the initramfs of a guest to `path`.
pub fn write_initramfs(
    path: &Path,
    lab: &Lab,
    machine: &Machine,
    kernel: &Kernel,
    job: &Path,
) -> Result<()> {
    let mut archive = Archive(Vec::new());
    for folder in ["bin", "modules", "proc", "sys", "dev", "host", "new", "layer"] {
        archive.folder(folder);
    }
    let system = system(lab, machine.processor()?)?;
    let busybox = system.clone().unwrap_or("/".into()).join("bin/busybox");
    let busybox = fs::read(busybox)
        .map_err(|error| format!("/bin/busybox: {error}; install busybox-static"))?;
    archive.file("bin/busybox", 0o755, &busybox);
    let mut order = String::new();
    for (number, module) in kernel.modules.iter().enumerate() {
        let name = format!("modules/{number}.ko");
        archive.file(&name, 0o644, &fs::read(module)?);
        order += &format!("{name}\n");
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    archive.file("init", 0o755, init(lab, machine, kernel, job, system).as_bytes());
    archive.end();
    Ok(fs::write(path, archive.0)?)
}

/// The first program of a guest.
fn init(
    lab: &Lab,
    machine: &Machine,
    kernel: &Kernel,
    job: &Path,
    system: Option<PathBuf>,
) -> String {
    let (root, release, job) = (lab.root.display(), &kernel.release, job.display());
    let target = lab.folder.parent().unwrap_or(&lab.folder).display();
    let (image, cgroup) = (machine.image, machine.cgroup);
    let out = if machine.out.is_some() { "yes" } else { "no" };
    let files = system.unwrap_or_default();
    format!(
        "#!/bin/busybox sh\nimage={image} cgroup={cgroup} release={release} out={out}\n\
         root='{root}' target='{target}' job='{job}' files='{}'\n{}",
        files.display(),
        include_str!("init.sh")
    )
}

/// The disk of /var/tmp. It is made once and never written, since guests write to a copy.
pub fn space(lab: &Lab) -> Result<PathBuf> {
    let path = lab.folder.join("space.ext4");
    if !path.exists() {
        let fresh = path.with_extension("new");
        fs::File::create(&fresh)?.set_len(SPACE_BYTES)?;
        output(Command::new("/sbin/mkfs.ext4").args(["-q", "-F"]).arg(&fresh))?;
        fs::rename(fresh, &path)?;
    }
    Ok(path)
}

/// The folder of the files for guests with another processor than this machine's. It is made once.
/// None of its programs runs here, so packages are only unpacked.
fn system(lab: &Lab, processor: Processor) -> Result<Option<PathBuf>> {
    const PACKAGES: &str = "busybox-static,bash,dash,coreutils,util-linux,mount,procps,debianutils,\
                            python3-minimal,libpython3-stdlib,libstdc++6,kmod,gcc,libc6-dev,\
                            elfutils";
    if processor == Processor::X86 {
        return Ok(None);
    }
    let folder = lab.folder.join(format!("system-{}", processor.debian()));
    if !folder.join("etc/passwd").exists() {
        println!("vm: unpacking the files of a Debian for {}", processor.debian());
        // An interrupted run begins again. The folder may not exist.
        let _ = fs::remove_dir_all(&folder);
        output(
            Command::new("mmdebstrap")
                .args(["--variant=extract", "--quiet", "--include", PACKAGES])
                .args(["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"])
                .arg(format!("--architectures={}", processor.debian()))
                .arg("bookworm")
                .arg(&folder)
                .arg("http://deb.debian.org/debian"),
        )?;
        // Files that the packages' own scripts would make.
        for (to, name) in [("dash", "bin/sh"), ("gcc", "usr/bin/cc")] {
            std::os::unix::fs::symlink(to, folder.join(name)).or_else(already_there)?;
        }
        let users = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n";
        fs::write(folder.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
        fs::write(folder.join("etc/passwd"), users)?;
    }
    Ok(Some(folder))
}

fn already_there(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
}

/// The disk of a Debian image, which is made only once.
pub fn debian(lab: &Lab, suite: &str) -> Result<PathBuf> {
    let path = lab.folder.join(format!("{suite}.ext4"));
    if path.exists() {
        return Ok(path);
    }
    println!("vm: making the image of Debian {suite}");
    let folder = lab.folder.join(suite);
    // An interrupted run begins again. The folder may not exist.
    let _ = fs::remove_dir_all(&folder);
    output(
        Command::new("mmdebstrap")
            .args(["--variant=minbase", "--quiet", "--include", PACKAGES, suite])
            .arg(&folder)
            .arg("http://deb.debian.org/debian"),
    )?;
    // No login is needed: the job is a unit.
    fs::write(folder.join("etc/fstab"), "")?;
    fs::write(folder.join("etc/hostname"), "lab\n")?;
    let fresh = path.with_extension("new");
    fs::File::create(&fresh)?.set_len(2 << 30)?;
    output(Command::new("/sbin/mkfs.ext4").args(["-q", "-F", "-d"]).arg(&folder).arg(&fresh))?;
    fs::remove_dir_all(folder)?;
    fs::rename(fresh, &path)?;
    Ok(path)
}

/// A cpio archive in the form that the kernel takes ("newc").
struct Archive(Vec<u8>);

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        let fields = [
            self.0.len() as u32, // A number of its own for each file.
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.0.extend_from_slice(b"070701");
        for field in fields {
            // Writing to memory does not fail.
            let _ = write!(self.0, "{field:08x}");
        }
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(0);
        self.pad();
        self.0.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.entry(name, 0o100_000 | permissions, content);
    }

    fn end(&mut self) {
        self.entry("TRAILER!!!", 0, &[]);
    }
}

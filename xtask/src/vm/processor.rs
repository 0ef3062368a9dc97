//! The processors of guests, and all that differs by them.

use std::fs;

/// The processor of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// x86-64, as this machine's.
    X86,
    /// aarch64, always emulated.
    Arm,
}

impl Processor {
    /// Debian's name.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// The emulator, and Debian's package of it.
    pub fn emulator(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// True if KVM works for it.
    pub fn has_kvm(self) -> bool {
        // Some virtual machines have the device, but no processor for it.
        let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let has_extension = flags.contains(" vmx") || flags.contains(" svm");
        let device = || fs::File::options().read(true).write(true).open("/dev/kvm");
        self == Self::X86 && has_extension && device().is_ok()
    }

    /// Options of the emulator for the board and the processor. The architected algorithm of
    /// pointer authentication takes half of all time in emulation.
    pub fn board(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &["-cpu", "max"],
            Self::Arm => &["-machine", "virt", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// The line of the kernel's log.
    pub fn console(self) -> &'static str {
        match self {
            Self::X86 => "ttyS0",
            Self::Arm => "ttyAMA0",
        }
    }

    /// The line of the job's output.
    pub fn job_line(self) -> &'static str {
        match self {
            Self::X86 => "ttyS1",
            Self::Arm => "hvc0",
        }
    }

    /// Options of the emulator for the job's line, whose other end is named `job`. The board has a
    /// single serial line.
    pub fn job_device(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &["-serial", "chardev:job"],
            Self::Arm => &["-device", "virtio-serial-pci", "-device", "virtconsole,chardev=job"],
        }
    }

    /// Modules that its guests load besides.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &[],
            Self::Arm => &["virtio_console"],
        }
    }

    /// Calls of cargo that build the programs of guests.
    pub fn builds(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::X86 => &[&["build", "--workspace", "--lib", "--bins", "--examples", "--tests"]],
            Self::Arm => &ARM_BUILDS,
        }
    }
}

/// The tests that the matrix has for it, and no others.
const ARM_BUILDS: [&[&str]; 2] = [
    &[
        "build",
        "--target=aarch64-unknown-linux-gnu",
        "--package=uzswap",
        "--package=uzswap-tests",
        "--bin=uzswap",
        "--bin=torture",
    ],
    &[
        "test",
        "--no-run",
        "--target=aarch64-unknown-linux-gnu",
        "--package=uzswap-engine",
        "--package=uzswap-ranges",
        "--package=uzswap-region",
        "--package=uzswap-tests",
        "--lib",
        "--test=memory",
        "--test=process",
        "--test=torture",
        "--test=run",
    ],
];

//! The processors of guests, and everything that depends on them.

use std::fs;

/// The processor of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// x86-64, like this machine.
    X86,
    /// aarch64, always emulated.
    Arm,
}

impl Processor {
    /// Debian's name of the processor.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// The emulator, and its Debian package.
    pub fn emulator(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// True if KVM works for this processor.
    pub fn has_kvm(self) -> bool {
        // Some virtual machines have /dev/kvm, but no processor that supports it.
        let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let has_extension = flags.contains(" vmx") || flags.contains(" svm");
        let device = || fs::File::options().read(true).write(true).open("/dev/kvm");
        self == Self::X86 && has_extension && device().is_ok()
    }

    /// The emulator's options for the board and the processor. The architected algorithm of pointer
    /// authentication would take half of all time in emulation.
    pub fn board(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &["-cpu", "max"],
            Self::Arm => &["-machine", "virt", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// The device of the kernel's log.
    pub fn console(self) -> &'static str {
        match self {
            Self::X86 => "ttyS0",
            Self::Arm => "ttyAMA0",
        }
    }

    /// The device of the job's output.
    pub fn job_line(self) -> &'static str {
        match self {
            Self::X86 => "ttyS1",
            Self::Arm => "hvc0",
        }
    }

    /// The emulator's options for the job's line, whose other end is named `job`. The board has
    /// only one serial line.
    pub fn job_device(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &["-serial", "chardev:job"],
            Self::Arm => &["-device", "virtio-serial-pci", "-device", "virtconsole,chardev=job"],
        }
    }

    /// Further modules that guests with this processor load.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Self::X86 => &[],
            Self::Arm => &["virtio_console"],
        }
    }

    /// The cargo commands that build the programs of its guests.
    pub fn builds(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::X86 => &[&["build", "--workspace", "--lib", "--bins", "--examples", "--tests"]],
            Self::Arm => &ARM_BUILDS,
        }
    }
}

/// Builds only the tests that the matrix runs on it, and the programs that they start.
const ARM_BUILDS: [&[&str]; 2] = [
    &[
        "build",
        "--target=aarch64-unknown-linux-gnu",
        "--package=uzswap",
        "--package=uzswap-agent",
        "--package=uzswap-preload",
        "--package=uzswap-region",
        "--package=uzswap-tests",
        "--lib",
        "--bins",
        "--example=sort",
    ],
    &[
        "test",
        "--no-run",
        "--target=aarch64-unknown-linux-gnu",
        "--package=uzswap-calls",
        "--package=uzswap-engine",
        "--package=uzswap-ranges",
        "--package=uzswap-region",
        "--package=uzswap-tests",
        "--lib",
        "--test=denied",
        "--test=executed",
        "--test=habits",
        "--test=histories",
        "--test=in_process",
        "--test=memory",
        "--test=patching",
        "--test=preload",
        "--test=process",
        "--test=run",
        "--test=seen",
        "--test=stopping",
        "--test=taken_over",
        "--test=torture",
        "--test=unmanaged",
    ],
];

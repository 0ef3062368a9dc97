//! Processors and the machine's memory.

use crate::cgroup::Hierarchy;
use crate::map::PAGE_BYTES;
use std::fmt;
use std::io;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The processor that runs the caller, as a hint: the thread may have migrated by the time this
/// returns.
pub fn current() -> usize {
    #[cfg(miri)]
    return 0;
    #[cfg(not(miri))]
    {
        if let Some(cpus) = pretended() {
            static TURN: AtomicUsize = AtomicUsize::new(0);
            return TURN.fetch_add(1, Relaxed) % cpus;
        }
        // SAFETY: the call takes nothing, returns a number, or −1 on a kernel without it. The C
        // library reads the number from memory that the kernel keeps up to date; rustix would make
        // a system call.
        let cpu = unsafe { libc::sched_getcpu() };
        usize::try_from(cpu).unwrap_or(0)
    }
}

/// `UZSWAP_TEST_CPUS`, in builds with debug assertions: tests then run as on a machine with that
/// number of processors, and each thread is on all of them in turn.
fn pretended() -> Option<usize> {
    static CPUS: LazyLock<Option<usize>> =
        LazyLock::new(|| std::env::var("UZSWAP_TEST_CPUS").ok()?.parse().ok());
    if cfg!(debug_assertions) { *CPUS } else { None }
}

/// Processors that may ever be online, at least 1. CPU numbers are below this.
pub fn possible() -> usize {
    static POSSIBLE: LazyLock<usize> = LazyLock::new(|| {
        // "0-3" or "0,2-5": the last number is the highest.
        std::fs::read_to_string("/sys/devices/system/cpu/possible")
            .ok()
            .and_then(|list| list.trim().rsplit([',', '-']).next()?.parse::<usize>().ok())
            .map_or(1, |highest| highest + 1)
    });
    pretended().unwrap_or(*POSSIBLE)
}

/// Processors that the calling process may use at present.
pub fn allowed() -> usize {
    pretended().unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// A set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSet(Box<[u64]>);

impl CpuSet {
    /// The online CPUs that the cpuset and the affinity of the calling thread allow. All possible
    /// CPUs where the kernel does not report them.
    pub fn of_caller() -> Self {
        let possible = possible();
        #[cfg(not(miri))]
        if pretended().is_none()
            && let Ok(set) = rustix::thread::sched_getaffinity(None)
        {
            return (0..possible).filter(|cpu| set.is_set(*cpu)).collect();
        }
        (0..possible).collect()
    }

    /// Adds or removes a CPU.
    pub fn set(&mut self, cpu: usize, is_in: bool) {
        let bit = 1 << (cpu % 64);
        let word = &mut self.0[cpu / 64];
        *word = if is_in { *word | bit } else { *word & !bit };
    }

    /// True if a CPU is in the set.
    pub fn has(&self, cpu: usize) -> bool {
        self.0.get(cpu / 64).is_some_and(|word| word & 1 << (cpu % 64) != 0)
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> Self {
        let mut set = Self(vec![0; possible().div_ceil(64)].into());
        cpus.into_iter().for_each(|cpu| set.set(cpu, true));
        set
    }
}

/// Bytes in a page of the running kernel.
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Checks that the running kernel has pages of [`PAGE_BYTES`].
pub fn check_pages() -> Result<(), OtherPages> {
    OtherPages::check(page_bytes())
}

/// The kernel has larger pages, as kernels for aarch64 may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherPages {
    /// Bytes in a page.
    pub bytes: usize,
}

impl OtherPages {
    fn check(bytes: usize) -> Result<(), Self> {
        if bytes == PAGE_BYTES { Ok(()) } else { Err(Self { bytes }) }
    }
}

impl fmt::Display for OtherPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (have, need) = (self.bytes >> 10, PAGE_BYTES >> 10);
        write!(
            f,
            "this kernel's pages have {have} KiB, and uzswap works with pages of {need} KiB; boot a \
             kernel that has those (Debian: linux-image-arm64; Red Hat: kernel, not kernel-64k)"
        )
    }
}

impl std::error::Error for OtherPages {}

/// Values of `/proc/meminfo`, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// `MemTotal`.
    pub total: u64,
    /// `MemAvailable`: the kernel's estimate of the memory that can be allocated without swapping.
    pub available: u64,
}

/// Reads `/proc/meminfo`.
pub fn memory_info() -> io::Result<MemoryInfo> {
    Ok(MemoryInfo::parse(&std::fs::read_to_string("/proc/meminfo")?))
}

/// Bytes of memory that the calling process may have: the machine's, or less where its control
/// group or a group above has a limit. Memory and limit may change at any time.
pub fn memory_of_caller() -> io::Result<u64> {
    let total = memory_info()?.total;
    let limit = Hierarchy::find().and_then(|groups| groups.own().memory_limit());
    Ok(limit.map_or(total, |(limit, _)| limit.min(total)))
}

impl MemoryInfo {
    /// Parses the text of `/proc/meminfo` without allocating.
    pub fn parse(text: &str) -> Self {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
                .map_or(0, |kib| kib * 1024)
        };
        Self { total: field("MemTotal"), available: field("MemAvailable") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_with_other_pages_is_named_with_the_remedy() {
        assert_eq!(OtherPages::check(PAGE_BYTES), Ok(()));
        for (bytes, size) in [(16 << 10, "16 KiB"), (64 << 10, "64 KiB")] {
            let text = OtherPages::check(bytes).unwrap_err().to_string();
            assert!(text.contains(size) && text.contains("boot a kernel"), "{text}");
        }
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24684096 kB\nMemFree: 1 kB\nMemAvailable:   24449024 kB\n";
        let info = MemoryInfo::parse(text);
        assert_eq!(info, MemoryInfo { total: 24684096 * 1024, available: 24449024 * 1024 });
        assert_eq!(MemoryInfo::parse(""), MemoryInfo::default());
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files of the kernel")]
    fn no_process_may_have_more_than_the_machine() {
        let (bytes, machine) = (memory_of_caller().unwrap(), memory_info().unwrap().total);
        assert!(bytes > 0 && bytes <= machine, "{bytes} of {machine}");
    }

    #[test]
    fn current_cpu_is_a_possible_one() {
        assert!(current() < possible());
    }
}

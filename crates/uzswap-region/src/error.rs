//! The errors that a caller gets. A page that cannot be loaded ends the process instead (see
//! [`crate::fault`]).

use std::io;
use uzswap_engine::backing::BackingError;
use uzswap_engine::compress::AlgorithmError;
use uzswap_sys::uffd::FIRST_KERNEL;
use uzswap_trace::TraceError;

/// A pager or a region could not be made, or refused a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Page faults may not be served.
    #[error(
        "userfaultfd is not permitted ({source}): in a container, allow the system call \
         (--security-opt seccomp=…) or pass --device /dev/userfaultfd; on a host, set the sysctl \
         vm.unprivileged_userfaultfd=1 or use a kernel from {FIRST_KERNEL} on"
    )]
    Userfaultfd {
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel has larger pages.
    #[error(transparent)]
    Pages(#[from] uzswap_sys::cpu::OtherPages),
    /// The kernel does not list the present pages.
    #[error(
        "this process may not read its own /proc/self/pagemap ({source}), as one that has become \
         another user or not dumpable (prctl): start it as the user that it becomes"
    )]
    Pagemap {
        /// The kernel's error.
        source: io::Error,
    },
    /// Memory that may not be accessed cannot be filled.
    #[error(
        "this process may not write its own memory by /proc/self/mem ({source}): mount /proc, or \
         boot without proc_mem.force_override=never"
    )]
    OwnMemory {
        /// The kernel's error.
        source: io::Error,
    },
    /// Handler threads were asked for, and may not be.
    #[error(
        "mode handler-threads is not permitted ({source}): give access to /dev/userfaultfd (in a \
         container, --device /dev/userfaultfd), set the sysctl vm.unprivileged_userfaultfd=1, or \
         use mode in-thread, in which system calls need pinned memory"
    )]
    HandlerThreads {
        /// The kernel's error.
        source: io::Error,
    },
    /// A size could not be read.
    #[error("{what}: '{text}' is not a size; write for example 512M or 2G")]
    Size {
        /// The option.
        what: &'static str,
        /// The given value.
        text: String,
    },
    /// A number is out of range.
    #[error("{what} is {value}; it must be {must}")]
    Range {
        /// The number.
        what: &'static str,
        /// The given value.
        value: u64,
        /// The accepted values.
        must: String,
    },
    /// No such choice.
    #[error("no {what} '{text}'; there are {known}")]
    Choice {
        /// The option.
        what: &'static str,
        /// The given value.
        text: String,
        /// The existing choices.
        known: &'static str,
    },
    /// The trace of accesses cannot be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No such compressor.
    #[error(transparent)]
    Compressor(#[from] AlgorithmError),
    /// The backing cannot be used.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// The store in another machine's memory cannot be used.
    #[error(transparent)]
    Store(#[from] uzswap_remote::ConnectError),
    /// The cache cannot be made.
    #[error(transparent)]
    Setup(#[from] uzswap_engine::SetupError),
    /// The kernel gives no memory or address space.
    #[error("cannot map {bytes} bytes: {source}; raise the limit (ulimit -v) or map less")]
    Map {
        /// The requested size.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// All keys are taken.
    #[error(
        "cannot map {bytes} bytes: all regions of a pager together may have {max} bytes of \
         addresses; unmap some or use another pager"
    )]
    Addresses {
        /// The requested size.
        bytes: usize,
        /// The largest permitted size.
        max: u64,
    },
    /// The address is not the start of a region of this pager.
    #[error("{address:#x} is not the start of a region of this pager; pass its first address")]
    Foreign {
        /// The given value.
        address: usize,
    },
    /// Pinning would leave too little for everything else.
    #[error(
        "cannot pin {bytes} bytes more: pinned memory may take half of the budget of {memory} \
         bytes; unpin some or raise the budget"
    )]
    Pinned {
        /// The requested size.
        bytes: usize,
        /// The budget.
        memory: u64,
    },
    /// A page cannot be taken out now.
    #[error("no room to take pages out: {reason}; raise the budget or give a backing")]
    Full {
        /// The reason.
        reason: &'static str,
    },
    /// A thread could not be started, or a signal handler could not be set.
    #[error("cannot {what}: {source}; check the limits of the process (ulimit -a)")]
    System {
        /// The failed act.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The calling process is a fork of the process that made the pager.
    #[error("this process is a fork of the pager's: make a pager of its own, or use spawn")]
    Forked,
}

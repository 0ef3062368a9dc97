//! The settings of a server: its threads.

use std::time::Duration;
use uzswap_engine::compress::prepare_thread;
use uzswap_sys::process;

/// Stack of a thread, bytes. The deepest path reads a record through a bounce buffer.
pub(crate) const STACK_BYTES: usize = 256 << 10;

/// The settings of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServerConfig {
    /// Threads in all. There are more threads than CPUs, since some threads may wait for the
    /// backing.
    pub threads: usize,
    /// Threads that begin and end with each CPU. The others always exist.
    pub threads_per_cpu: usize,
    /// How long the last watcher polls after a request before it sleeps.
    pub poll: Duration,
    /// True if the threads have priority over ordinary threads of the machine.
    pub raise_priority: bool,
}

impl ServerConfig {
    /// The best measured time to poll.
    pub const POLL: Duration = Duration::from_micros(100);
    const THREADS_ALWAYS: usize = 6;

    /// The best measured settings for this many CPUs: see `server`.
    pub fn for_cpus(cpus: usize) -> Self {
        Self {
            threads: Self::THREADS_ALWAYS + 2 * cpus,
            threads_per_cpu: 2,
            poll: Self::POLL,
            raise_priority: true,
        }
    }

    /// The number of threads that always exist.
    pub(crate) fn threads_always(&self) -> usize {
        match self.threads_per_cpu {
            0 => self.threads,
            _ => self.threads.min(Self::THREADS_ALWAYS),
        }
    }

    /// Prepares the calling thread for serving.
    pub(crate) fn prepare_thread(&self) {
        if self.raise_priority {
            // The call fails in a container without CAP_SYS_NICE. The thread is then slower under
            // load.
            let _ = process::raise_priority();
        }
        prepare_thread();
    }
}

//! The name of a process in a tree: its number, and the PID namespace that the number is of.
//!
//! A sandbox numbers its processes anew, so that several processes of a tree may be number 2. A
//! number from another namespace is useless, because in this namespace it names no process, or a
//! different process.

/// A process of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(pub(crate) u64);

impl Name {
    /// No process.
    pub(crate) const NONE: Self = Self(0);

    /// A process by its own number. `space` is its PID namespace: the number of the file
    /// `/proc/self/ns/pid`. 0 for the namespace of the process that made the tree, or before it is
    /// known.
    pub fn new(space: u32, number: u32) -> Self {
        Self(u64::from(space) << 32 | u64::from(number))
    }

    /// Its number in its own namespace.
    pub fn number(self) -> u32 {
        self.0 as u32
    }

    /// The namespace.
    pub fn space(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The name as one number; 0 for no process.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// False if a process of the namespace `space` sees that the process is gone.
    pub(crate) fn may_live(self, space: u32) -> bool {
        self != Self::NONE && (self.space() != space || exists(self.number()))
    }
}

fn exists(process: u32) -> bool {
    // Another user's process cannot be signalled, and exists.
    let process = rustix::process::Pid::from_raw(process as i32);
    let Some(process) = process else { return false };
    rustix::process::test_kill_process(process) != Err(rustix::io::Errno::SRCH)
}

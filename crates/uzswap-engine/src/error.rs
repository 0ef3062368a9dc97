//! Failures. Expected outcomes are values.

use crate::compress::AlgorithmError;
use std::io;

/// The page cannot be given back now. It is never `Absent`, and never zeros.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kept bytes of the page are not the stored ones.
    #[error("page {entry}: its stored copy is damaged ({what}); the page is lost")]
    Damaged {
        /// The page's key, as a number.
        entry: u32,
        /// The sign of the damage.
        what: &'static str,
    },
    /// The backing would not read.
    #[error("page {entry}: cannot read its copy from the backing: {source}; check the device")]
    Backing {
        /// The page's key, as a number.
        entry: u32,
        /// The backing's error.
        source: io::Error,
    },
}

/// The cache cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A size is out of range.
    #[error("{what} is {value}; it must be {must}")]
    Size {
        /// The size's name.
        what: &'static str,
        /// The given value.
        value: u64,
        /// The accepted values.
        must: &'static str,
    },
    /// The memory that another process has left has no cache, a cache of another version, or an
    /// unfinished cache.
    #[error(
        "cannot take over the cache that another process has left: it was made with other sizes or \
         by another version; what is swapped to it cannot be read by this one"
    )]
    Left,
    /// The memory that another process has left has a damaged cache, with this fault.
    #[error("cannot take over the cache that another process has left: {0}")]
    NotWhole(&'static str),
    /// No key for the backing.
    #[error(
        "cannot make a key for the backing: {0}; allow a page of locked memory (ulimit -l), or \
         use a plain backing on an encrypted disk"
    )]
    Key(io::Error),
    /// There is no memory for the first sections, or for the buffers of writeback.
    #[error("cannot get memory for the cache: {0}; free some or make the pool smaller")]
    Memory(#[from] io::Error),
}

/// A CPU did not reach the requested state.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// No such CPU.
    #[error("there is no CPU {cpu}; the last one is {last}")]
    NoCpu {
        /// The CPU's number.
        cpu: usize,
        /// The highest possible number.
        last: usize,
    },
    /// No such state.
    #[error("'{state}' is no state of a CPU; use one of {states}")]
    NoState {
        /// The given state.
        state: String,
        /// The known states, in order.
        states: String,
    },
    /// The CPU is the last one online.
    #[error("CPU {cpu} is the last one that is online; bring another one online first")]
    Last {
        /// The CPU's number.
        cpu: usize,
    },
    /// A state could not be started or stopped. The CPU has its old state, or that of `stays`.
    #[error(
        "CPU {cpu}: {state}: {why}; it {}",
        stays.map_or_else(|| "is as it was".into(), |stays| format!("stays at {stays}"))
    )]
    Step {
        /// The CPU's number.
        cpu: usize,
        /// The state.
        state: &'static str,
        /// The reason.
        why: io::Error,
        /// The state of the CPU, if the steps that were done could not be undone.
        stays: Option<&'static str>,
    },
}

/// A section of the pool did not reach the requested state, and has its old state.
#[derive(Debug, thiserror::Error)]
pub enum SectionError {
    /// No such section.
    #[error("there is no section {section}; the last one is {last}")]
    NoSection {
        /// The section's number.
        section: usize,
        /// The highest possible number.
        last: usize,
    },
    /// No such node.
    #[error("there is no node {node}; the last one is {last}")]
    NoNode {
        /// The node's number.
        node: usize,
        /// The highest possible number.
        last: usize,
    },
    /// The node is the last one that the pool may lie on.
    #[error("node {node} is the last one that the pool may lie on; bring another one online")]
    LastNode {
        /// The node's number.
        node: usize,
    },
    /// The pool cannot bring a section to this state.
    #[error("'{0}' is no state to bring a section to; use online or offline")]
    NoState(String),
    /// The section's state is changing, or the section has no memory to empty.
    #[error("section {section} is {state}")]
    Standing {
        /// The section's number.
        section: usize,
        /// The section's state.
        state: &'static str,
    },
    /// The section is the last one of the pool.
    #[error("section {section} is the last one that the pool may have; bring another one online")]
    Last {
        /// The section's number.
        section: usize,
    },
    /// There is no space for the section's objects.
    #[error(
        "section {section} still holds {objects} objects: neither other sections nor the backing          have room for {bytes} bytes; free memory, raise max_pool_bytes or add a backing"
    )]
    NoRoom {
        /// The section's number.
        section: usize,
        /// The section's objects.
        objects: usize,
        /// Bytes of their frames.
        bytes: usize,
    },
    /// An object was in use at each attempt.
    #[error("section {section} still holds {objects} objects, one of {what}; try again")]
    Held {
        /// The section's number.
        section: usize,
        /// The section's objects.
        objects: usize,
        /// The object, and its user.
        what: String,
    },
    /// The section's memory cannot be made.
    #[error("section {section}: {why}; free memory")]
    Memory {
        /// The section's number.
        section: usize,
        /// The kernel's error.
        why: io::Error,
    },
}

/// An attribute was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttributeError {
    /// No such attribute.
    #[error("no attribute '{0}'; `uzswap status` lists them")]
    Unknown(String),
    /// The attribute does not accept the value.
    #[error("{name}: '{value}' is not {must}")]
    Value {
        /// The attribute.
        name: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        must: &'static str,
    },
    /// Not a compressor.
    #[error(transparent)]
    Algorithm(#[from] AlgorithmError),
}

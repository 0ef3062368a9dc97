//! What can go wrong, as far as it is not an expected outcome.

use crate::compress::AlgorithmError;
use std::io;

/// The page cannot be given back now. It is never `Absent`, and never zeros.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes that were kept for the page are not the bytes that were stored.
    #[error("page {entry}: its stored copy is damaged ({what}); the page is lost")]
    Damaged {
        /// The page's key, as a number.
        entry: u32,
        /// What showed it.
        what: &'static str,
    },
    /// The backing would not read.
    #[error("page {entry}: cannot read its copy from the backing: {source}; check the device")]
    Backing {
        /// The page's key, as a number.
        entry: u32,
        /// What the backing said.
        source: io::Error,
    },
}

/// The cache cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A size is out of range.
    #[error("{what} is {value}; it must be {must}")]
    Size {
        /// Which.
        what: &'static str,
        /// What was given.
        value: u64,
        /// What is accepted.
        must: &'static str,
    },
    /// What another process has left is no cache, or one of another version, or not whole.
    #[error(
        "cannot take over the cache that another process has left: it was made with other sizes or \
         by another version; what is swapped to it cannot be read by this one"
    )]
    Left,
    /// The same, with what is wrong.
    #[error("cannot take over the cache that another process has left: {0}")]
    NotWhole(&'static str),
    /// No key for what is written to the backing.
    #[error(
        "cannot make a key for the backing: {0}; allow a page of locked memory (ulimit -l), or \
         use a plain backing on an encrypted disk"
    )]
    Key(io::Error),
    /// Memory for the first sections or the writeback buffers could not be had.
    #[error("cannot get memory for the cache: {0}; free some or make the pool smaller")]
    Memory(#[from] io::Error),
}

/// A CPU is not in the state that it was to be brought to.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// No such CPU.
    #[error("there is no CPU {cpu}; the last one is {last}")]
    NoCpu {
        /// Its number.
        cpu: usize,
        /// The highest that there may be.
        last: usize,
    },
    /// No such state.
    #[error("'{state}' is no state of a CPU; use one of {states}")]
    NoState {
        /// What was given.
        state: String,
        /// What there is, in order.
        states: String,
    },
    /// All would be gone.
    #[error("CPU {cpu} is the last one that is online; bring another one online first")]
    Last {
        /// Its number.
        cpu: usize,
    },
    /// A state could not be started or stopped. The CPU is where it was, or where `stays` says.
    #[error(
        "CPU {cpu}: {state}: {why}; it {}",
        stays.map_or_else(|| "is as it was".into(), |stays| format!("stays at {stays}"))
    )]
    Step {
        /// Its number.
        cpu: usize,
        /// Which state.
        state: &'static str,
        /// Why.
        why: io::Error,
        /// Where the CPU is, if the steps done could not be undone.
        stays: Option<&'static str>,
    },
}

/// A section of the pool is not where it was to be brought; it is where it was.
#[derive(Debug, thiserror::Error)]
pub enum SectionError {
    /// No such section.
    #[error("there is no section {section}; the last one is {last}")]
    NoSection {
        /// Its number.
        section: usize,
        /// The highest that there may be.
        last: usize,
    },
    /// No such node.
    #[error("there is no node {node}; the last one is {last}")]
    NoNode {
        /// Its number.
        node: usize,
        /// The highest that there may be.
        last: usize,
    },
    /// The pool would have nowhere to lie.
    #[error("node {node} is the last one that the pool may lie on; bring another one online")]
    LastNode {
        /// Its number.
        node: usize,
    },
    /// Not a state that somebody can bring a section to.
    #[error("'{0}' is no state to bring a section to; use online or offline")]
    NoState(String),
    /// It is on its way, or has no memory to empty.
    #[error("section {section} is {state}")]
    Standing {
        /// Its number.
        section: usize,
        /// Where it stands.
        state: &'static str,
    },
    /// All would be gone.
    #[error("section {section} is the last one that the pool may have; bring another one online")]
    Last {
        /// Its number.
        section: usize,
    },
    /// What it holds has nowhere to go.
    #[error(
        "section {section} still holds {objects} objects: neither other sections nor the backing          have room for {bytes} bytes; free memory, raise max_pool_bytes or add a backing"
    )]
    NoRoom {
        /// Its number.
        section: usize,
        /// Objects in it.
        objects: usize,
        /// Bytes of the frames that they lie in.
        bytes: usize,
    },
    /// An object was in use at each try.
    #[error("section {section} still holds {objects} objects, one of {what}; try again")]
    Held {
        /// Its number.
        section: usize,
        /// Objects in it.
        objects: usize,
        /// Which object, and who holds it.
        what: String,
    },
    /// It cannot be made.
    #[error("section {section}: {why}; free memory")]
    Memory {
        /// Its number.
        section: usize,
        /// What the kernel said.
        why: io::Error,
    },
}

/// An attribute was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttributeError {
    /// No such attribute.
    #[error("no attribute '{0}'; `uzswap status` lists them")]
    Unknown(String),
    /// Not a value of it.
    #[error("{name}: '{value}' is not {must}")]
    Value {
        /// The attribute.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is accepted.
        must: &'static str,
    },
    /// Not a compressor.
    #[error(transparent)]
    Algorithm(#[from] AlgorithmError),
}

//! Nodes: memory that is nearer to some processors than to others.

use crate::cpu::{self, CpuSet};
use std::fs;
use std::io;
use std::ptr::NonNull;

/// The kernel's folder of nodes.
const FOLDER: &str = "/sys/devices/system/node";

/// The maximum number of nodes that we distinguish. We choose no memory of further nodes.
const NODES_MAX: usize = 64;

/// The nodes of a machine. There is always one, number 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// For each possible processor, its node.
    of_cpu: Box<[usize]>,
    /// For each node, all nodes, the nearest first. The first is the node itself.
    nearest: Box<[Box<[usize]>]>,
    /// True if memory can be requested by these numbers.
    is_real: bool,
}

impl Nodes {
    /// The possible nodes of this machine: with processors, memory, or neither yet.
    pub fn of_machine() -> Self {
        let list = |name: &str| fs::read_to_string(format!("{FOLDER}/{name}")).ok();
        let possible = list("possible").map(|text| parse_list(&text)).unwrap_or_default();
        let count = possible.last().map_or(1, |last| last + 1).clamp(1, NODES_MAX);
        let mut of_cpu = vec![0; cpu::possible()];
        for node in 0..count {
            let cpus = list(&format!("node{node}/cpulist")).unwrap_or_default();
            for cpu in parse_list(&cpus) {
                of_cpu.get_mut(cpu).into_iter().for_each(|of| *of = node);
            }
        }
        // Columns are the online nodes, in order.
        let online = list("online").map(|text| parse_list(&text)).unwrap_or_default();
        let distances = |node: usize| {
            let text = list(&format!("node{node}/distance")).unwrap_or_default();
            let row = text.split_whitespace().filter_map(|number| number.parse().ok());
            online.iter().copied().zip(row).collect::<Vec<(usize, usize)>>()
        };
        let nearest = (0..count).map(|node| order(node, count, &distances(node))).collect();
        Self { of_cpu: of_cpu.into(), nearest, is_real: count > 1 }
    }

    /// This number of nodes with the given processors, for tests on any machine. No memory is
    /// requested from these nodes.
    pub fn pretended(count: usize, of_cpu: impl Fn(usize) -> usize) -> Self {
        Self {
            of_cpu: (0..cpu::possible()).map(|cpu| of_cpu(cpu) % count).collect(),
            nearest: (0..count).map(|node| order(node, count, &[])).collect(),
            is_real: false,
        }
    }

    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.nearest.len()
    }

    /// All nodes, the nearest to `node` first. The first is `node` itself.
    pub fn nearest(&self, node: usize) -> &[usize] {
        &self.nearest[node]
    }

    /// A hint: the node of the processor that runs the caller.
    pub fn here(&self) -> usize {
        if self.count() == 1 { 0 } else { self.of_cpu[cpu::current() % self.of_cpu.len()] }
    }

    /// True if a node has processors.
    pub fn has_cpus(&self, node: usize) -> bool {
        self.of_cpu.contains(&node)
    }

    /// Makes the calling thread run on those of a node's processors that it may use. Fails if there
    /// are none.
    pub fn run_on(&self, node: usize) -> io::Result<()> {
        let allowed = CpuSet::of_caller();
        let mut set = rustix::thread::CpuSet::new();
        let cpus = self.of_cpu.iter().enumerate().filter(|(_, of)| **of == node);
        cpus.filter(|(cpu, _)| allowed.has(*cpu)).for_each(|(cpu, _)| set.set(cpu));
        Ok(rustix::thread::sched_setaffinity(None, &set)?)
    }

    /// Makes the kernel place new pages of a range on a node, while the node has memory. `start` is
    /// page-aligned, and the range is mapped.
    pub fn prefer(&self, start: NonNull<u8>, bytes: usize, node: usize) -> io::Result<()> {
        if !self.is_real {
            return Ok(());
        }
        const MPOL_PREFERRED: i32 = 1;
        let mask = [1_u64 << node];
        // SAFETY: the kernel changes where pages will lie, not their content. The mask is as long
        // as stated, and only read. The kernel subtracts one from the number of bits.
        let done = unsafe {
            let bits = NODES_MAX + 1;
            libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, mask.as_ptr(), bits, 0)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The node of a page, which was requested on `node`.
    pub fn of_page(&self, page: NonNull<u8>, node: usize) -> usize {
        if !self.is_real {
            return node;
        }
        const MPOL_F_NODE: u64 = 1;
        const MPOL_F_ADDR: u64 = 2;
        let mut found = -1_i32;
        // SAFETY: the kernel writes one number to `found`, and reads no mask.
        let done = unsafe {
            let (mask, bits) = (std::ptr::null_mut::<u64>(), 0);
            let flags = MPOL_F_NODE | MPOL_F_ADDR;
            libc::syscall(libc::SYS_get_mempolicy, &raw mut found, mask, bits, page, flags)
        };
        let found = usize::try_from(found).ok().filter(|found| *found < self.count());
        found.filter(|_| done == 0).unwrap_or(node)
    }

    /// Nodes with memory at present. `None` if the kernel does not report them, or if the nodes are
    /// for tests.
    pub fn with_memory(&self) -> Option<Vec<usize>> {
        let read = || fs::read_to_string(format!("{FOLDER}/has_memory")).ok();
        self.is_real.then(read).flatten().map(|text| parse_list(&text))
    }
}

/// A list such as `0-2,4`.
fn parse_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// All nodes, by their distances from a node. Nodes without a distance follow the others.
fn order(node: usize, count: usize, distances: &[(usize, usize)]) -> Box<[usize]> {
    let distance = |other: usize| {
        let known = distances.iter().find(|(at, _)| *at == other);
        (other != node, known.map_or(usize::MAX, |(_, distance)| *distance), other.abs_diff(node))
    };
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|other| distance(*other));
    order.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_list("3\n"), [3]);
        assert!(parse_list("\n").is_empty());
    }

    #[test]
    fn the_nearest_node_is_the_node_itself_and_then_by_distance() {
        assert_eq!(*order(1, 4, &[(0, 20), (1, 10), (2, 30), (3, 15)]), [1, 3, 0, 2]);
        assert_eq!(*order(2, 3, &[(0, 10)]), [2, 0, 1], "one that is not online comes last");
        assert_eq!(*order(0, 2, &[]), [0, 1]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn memory_lies_on_the_node_that_was_asked_for() {
        let nodes = Nodes { is_real: true, ..Nodes::of_machine() };
        let mapping = crate::map::Mapping::reserved(1 << 20).unwrap();
        let start = NonNull::new(mapping.as_ptr()).unwrap();
        for node in nodes.with_memory().unwrap_or_default() {
            nodes.prefer(start, mapping.len(), node).unwrap();
            if node == 0 {
                mapping.populate().unwrap();
                assert_eq!(nodes.of_page(start, 7), 0);
            }
        }
    }
}

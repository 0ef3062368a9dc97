//! The numbers that this process sees of processes in other PID namespaces.
//!
//! A sandbox numbers its processes anew. The tree has them by the sandbox's numbers, but everything
//! here needs the numbers of our own namespace.

use std::collections::BTreeMap;
use uzswap_sys::pid_namespace;
use uzswap_tree::{Name, Table};

/// The numbers seen so far, including those of ended processes.
#[derive(Debug, Default)]
pub struct Numbers(BTreeMap<Name, u32>);

impl Numbers {
    /// Finds the numbers that our namespace gives to processes of the tree in other namespaces.
    pub fn look(&mut self, table: &Table) {
        if !table.has_foreign() {
            return;
        }
        let found = pid_namespace::others().into_iter();
        let found: BTreeMap<Name, u32> =
            found.map(|one| (Name::new(one.space, one.number), one.seen_as)).collect();
        table.see(|name| found.get(&name).copied());
        let members = table.members().filter(|member| member.name.space() != 0);
        self.0.extend(members.filter_map(|one| found.get_key_value(&one.name)));
    }

    /// The number of a process in our namespace. For a process that was never seen, the number in
    /// the sandbox.
    pub fn of(&self, name: Name) -> u32 {
        self.0.get(&name).copied().unwrap_or(name.number())
    }
}

//! Numbers of processes that have PID namespaces of their own, as this process sees them.
//!
//! A sandbox numbers its processes anew. The tree has them by these numbers, and everything here
//! needs ours.

use std::collections::BTreeMap;
use uzswap_sys::pid_namespace;
use uzswap_tree::{Name, Table};

/// The numbers that were seen, also of processes that have ended.
#[derive(Debug, Default)]
pub struct Numbers(BTreeMap<Name, u32>);

impl Numbers {
    /// Looks where the processes of the tree are that have others.
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

    /// The number of a process here; where it was never seen, its own.
    pub fn of(&self, name: Name) -> u32 {
        self.0.get(&name).copied().unwrap_or(name.number())
    }
}

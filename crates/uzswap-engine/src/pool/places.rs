//! Where the pool lies, for who takes sections and nodes off and brings them back.

use super::{Pool, Refused, SectionState};

impl Pool {
    /// Where each section stands.
    pub(crate) fn section_states(&self) -> Vec<SectionState> {
        self.sections.states()
    }

    /// Sections that the pool is made for.
    pub(crate) fn sections_possible(&self) -> usize {
        self.sections.possible()
    }

    /// Whether only one section may have memory.
    pub(crate) fn is_last_section(&self) -> bool {
        self.sections.is_last()
    }

    /// Brings a section online. One that is stays so.
    pub(crate) fn bring_online(&self, section: usize) -> Result<(), Refused> {
        self.sections.bring_online(section)
    }

    /// Keeps a section that has no memory from getting any.
    pub(crate) fn keep_offline(&self, section: usize) -> Result<(), Refused> {
        self.sections.keep_offline(section)
    }

    /// Gives back the memory of a section that is going offline; `false` if it is in use.
    pub(crate) fn finish_offline(&self, section: usize, to: SectionState) -> Result<bool, Refused> {
        self.sections.finish_offline(section, to)
    }

    /// Brings one more section online. Errors: no memory, or no section.
    pub(crate) fn grow_section(&self) -> std::io::Result<()> {
        let here = self.nodes.here();
        let open = self.nodes.nearest(here).iter().find(|node| !self.sections.is_closed(**node));
        self.sections.bring_any_online(*open.unwrap_or(&here))
    }

    /// How many nodes the machine may have.
    pub(crate) fn nodes_count(&self) -> usize {
        self.nodes.count()
    }

    /// Nodes that have memory at the moment, where the kernel says so.
    pub(crate) fn nodes_with_memory(&self) -> Option<Vec<usize>> {
        self.nodes.with_memory()
    }

    /// The node of a section that has memory.
    pub(crate) fn node_of_section(&self, section: usize) -> usize {
        self.sections.node_of(section)
    }

    /// Whether a node is to have no memory of the pool.
    pub(crate) fn is_closed(&self, node: usize) -> bool {
        self.sections.is_closed(node)
    }

    /// Has a node get no memory from now on, or get some again. `false`: it is the last one that
    /// does.
    pub(crate) fn close(&self, node: usize, is_closed: bool) -> bool {
        let others = (0..self.nodes.count()).filter(|other| *other != node);
        let may = !is_closed || others.into_iter().any(|other| !self.sections.is_closed(other));
        if may {
            self.sections.close(node, is_closed);
        }
        may
    }
}

//! Sections and nodes, for taking them offline and bringing them back.

use super::{Pool, Refused, SectionState};

impl Pool {
    pub(crate) fn section_states(&self) -> Vec<SectionState> {
        self.sections.states()
    }

    /// The number of sections that the pool is made for.
    pub(crate) fn sections_possible(&self) -> usize {
        self.sections.possible()
    }

    /// True if only one section may have memory.
    pub(crate) fn is_last_section(&self) -> bool {
        self.sections.is_last()
    }

    /// Brings a section online, if it is not.
    pub(crate) fn bring_online(&self, section: usize) -> Result<(), Refused> {
        self.sections.bring_online(section)
    }

    /// Keeps a section that has no memory from getting memory.
    pub(crate) fn keep_offline(&self, section: usize) -> Result<(), Refused> {
        self.sections.keep_offline(section)
    }

    /// Gives back the memory of a section that is going offline; `false` if the section is in use.
    pub(crate) fn finish_offline(&self, section: usize, to: SectionState) -> Result<bool, Refused> {
        self.sections.finish_offline(section, to)
    }

    /// Brings one more section online. Fails without memory, or without a section.
    pub(crate) fn grow_section(&self) -> std::io::Result<()> {
        let here = self.nodes.here();
        let open = self.nodes.nearest(here).iter().find(|node| !self.sections.is_closed(**node));
        self.sections.bring_any_online(*open.unwrap_or(&here))
    }

    /// The number of nodes that the machine may have.
    pub(crate) fn nodes_count(&self) -> usize {
        self.nodes.count()
    }

    /// The nodes that have memory at the moment, if the kernel reports them.
    pub(crate) fn nodes_with_memory(&self) -> Option<Vec<usize>> {
        self.nodes.with_memory()
    }

    /// The node of a section that has memory.
    pub(crate) fn node_of_section(&self, section: usize) -> usize {
        self.sections.node_of(section)
    }

    /// True if a node must have no memory of the pool.
    pub(crate) fn is_closed(&self, node: usize) -> bool {
        self.sections.is_closed(node)
    }

    /// Stops a node from getting memory, or lets it get memory again. `false` if the node is the
    /// last that gets memory.
    pub(crate) fn close(&self, node: usize, is_closed: bool) -> bool {
        let others = (0..self.nodes.count()).filter(|other| *other != node);
        let may = !is_closed || others.into_iter().any(|other| !self.sections.is_closed(other));
        if may {
            self.sections.close(node, is_closed);
        }
        may
    }
}

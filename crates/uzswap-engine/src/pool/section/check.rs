//! Recounts the sections at rest.

use super::{Frame, SECTION_FRAMES, Sections};
use crate::ids::SwapEntry;
use crate::pool::SectionState;
use crate::sync::lock;
use std::sync::atomic::Ordering;

impl Sections {
    /// Recounts; panics with the difference.
    pub(in crate::pool) fn check(&self, used: &[(Frame, SwapEntry)]) {
        let inner = lock(&self.inner);
        let (mut free, mut online, mut offline) = (0, 0, 0);
        for (number, slot) in inner.slots.iter().enumerate() {
            let free_count = slot.section.as_ref().map_or(0, |section| {
                let bits: u32 = section.free.iter().map(|word| word.count_ones()).sum();
                assert_eq!(bits as usize, section.free_count);
                section.free_count
            });
            let (is_absent, gives) =
                (slot.state == SectionState::Absent, slot.state == SectionState::Online);
            assert!(gives || is_absent || slot.state == SectionState::Offline, "{:?}", slot.state);
            assert_eq!(slot.section.is_some(), gives, "section {number}");
            assert_eq!(inner.absent.has(number), is_absent, "section {number}");
            let is_empty = free_count == SECTION_FRAMES;
            for (node, on_node) in inner.nodes.iter().enumerate() {
                let gives = gives && node == self.node_of(number);
                let has = on_node.with_room.has(number);
                assert_eq!(has, gives && free_count > 0, "section {number} on node {node}");
                assert_eq!(on_node.empty.has(number), gives && is_empty, "section {number}");
            }
            free += free_count;
            online += usize::from(gives);
            offline += usize::from(slot.state == SectionState::Offline);
        }
        assert_eq!(online, self.online());
        assert_eq!(offline, self.offline.load(Ordering::Relaxed));
        assert_eq!(online * SECTION_FRAMES - free, self.used_frames());
        let on_nodes: usize = (0..self.free.len()).map(|node| self.free_on(node)).sum();
        assert_eq!(on_nodes, free);
        for (frame, owner) in used {
            let section = inner.slots[frame.section()].section.as_ref();
            let section = section.unwrap_or_else(|| panic!("{frame:?} of {owner:?} is off line"));
            assert!(!section.is_free(frame.0 as usize % SECTION_FRAMES), "{frame:?} is free");
        }
    }
}

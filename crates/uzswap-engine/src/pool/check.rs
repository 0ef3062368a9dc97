//! Recounts the pool at rest.

use super::size_class::{CLASSES, classes};
use super::zspage::{NO_CLASS, NONE};
use super::{FULL, Pool};
use crate::ids::{Handle, SwapEntry};
use crate::sync::lock;
use std::sync::atomic::Ordering::Relaxed;

impl Pool {
    /// Recounts everything; `owned` are the objects that entries refer to. Panics with the
    /// difference. The pool must be at rest.
    pub(crate) fn check(&self, owned: &[(SwapEntry, Handle)]) {
        let mut frames = Vec::new();
        let mut live = 0;
        let mut by_class = vec![Vec::new(); self.classes.len()];
        for at in self.zspages.numbers() {
            let class = self.zspages.get(at).class.load(Relaxed);
            if class != NO_CLASS {
                by_class[self.node_of(at) * CLASSES + usize::from(class)].push(at);
            }
        }
        for (place, all) in by_class.into_iter().enumerate() {
            let (state, number) = (lock(&self.classes[place].class), place % CLASSES);
            let slack = self.classes[place].slack.load(Relaxed);
            self.note_slack(number, &state);
            assert_eq!(slack, self.classes[place].slack.load(Relaxed), "class {number}");
            assert_eq!(state.node, place / CLASSES);
            let mut listed = 0;
            for (group, head) in state.heads.iter().enumerate() {
                let mut at = *head;
                let mut prev = NONE;
                while at != NONE {
                    let zspage = self.zspages.get(at);
                    assert_eq!(usize::from(zspage.group.load(Relaxed)), group);
                    assert_eq!(usize::from(Self::group_of(number, zspage)), group);
                    assert_eq!(zspage.prev.load(Relaxed), prev);
                    (prev, at) = (at, zspage.next.load(Relaxed));
                    listed += 1;
                }
            }
            let full = |n: &&u32| self.zspages.get(**n).group.load(Relaxed) == FULL;
            assert_eq!(listed + all.iter().filter(full).count(), state.zspages, "class {number}");
            assert_eq!(all.len(), state.zspages, "class {number}");
            let used = |n: &u32| usize::from(self.zspages.get(*n).used.load(Relaxed));
            assert_eq!(all.iter().map(used).sum::<usize>(), state.used, "class {number}");
            live += state.used;
            for at in all {
                let count = usize::from(classes()[number].frames);
                let owner = SwapEntry(at);
                frames.extend((0..count).map(|i| (self.zspages.get(at).frame(i), owner)));
            }
        }
        self.sections.check(&frames);
        assert_eq!(frames.len(), self.sections.used_frames());
        assert_eq!(owned.len(), live, "objects that no entry refers to, or the reverse");
        for (owner, handle) in owned {
            assert_eq!(self.header(*handle).owner, *owner, "owner of {handle:?}");
        }
    }
}

//! Tags of pages written through: tables of them, one for each cluster that needs one.

use super::seal::Tag;
use super::slots::CLUSTER_SLOTS;
use crate::durable::{Durable, TAGS_BYTES, Values};
use crate::stops::Kept;
use crate::sync::{Mutex, lock};
use crate::table::boxed;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// A table of tags: two words for each slot of a cluster.
pub(super) struct Tags {
    words: Values<TagWord>,
    /// Its number, in memory that outlives the process.
    pub(super) number: u32,
}

type TagWord = Kept<AtomicU64>;

const _: () = assert!(TAGS_BYTES == CLUSTER_SLOTS * 2 * size_of::<TagWord>());

impl Tags {
    pub(super) fn get(&self, at: usize) -> Tag {
        let halves = [2 * at, 2 * at + 1].map(|at| self.words[at].load(Relaxed).to_ne_bytes());
        let mut tag = Tag::default();
        tag.iter_mut().zip(halves.as_flattened()).for_each(|(to, byte)| *to = *byte);
        tag
    }

    pub(super) fn set(&self, at: usize, tag: Tag) {
        let (halves, _) = tag.as_chunks::<8>();
        for (word, half) in self.words[2 * at..].iter().zip(halves) {
            word.store(u64::from_ne_bytes(*half), Relaxed);
        }
    }
}

/// Where tables of tags come from and go to.
pub(super) struct TagMemory {
    /// In memory that outlives the process: which table each cluster has, and the numbers that are
    /// given back, and below which all were used.
    durable: Option<(Arc<Durable>, Values<Kept<AtomicU32>>)>,
    unused: Mutex<UnusedTags>,
}

#[derive(Default)]
struct UnusedTags {
    given_back: Vec<u32>,
    used: u32,
}

impl TagMemory {
    pub(super) fn new(durable: Option<&Arc<Durable>>) -> Self {
        let durable = durable.map(|durable| (durable.clone(), durable.tag_homes()));
        Self { durable, unused: Mutex::new(UnusedTags::default()) }
    }

    /// A table. Errors: no memory.
    pub(super) fn make(&self) -> io::Result<Tags> {
        let Some((durable, homes)) = &self.durable else {
            let words = boxed(CLUSTER_SLOTS * 2, TagWord::default)?;
            return Ok(Tags { words: Values::Own(words), number: 0 });
        };
        let mut unused = lock(&self.unused);
        let number = unused.given_back.pop().unwrap_or_else(|| {
            unused.used += 1;
            unused.used - 1
        });
        drop(unused);
        let made = if (number as usize) < homes.len() {
            durable.tags(number as usize)
        } else {
            Err(io::ErrorKind::OutOfMemory.into())
        };
        if made.is_err() {
            lock(&self.unused).given_back.push(number);
        }
        Ok(Tags { words: made?, number })
    }

    pub(super) fn free(&self, tags: Tags) {
        if let Some((durable, _)) = &self.durable {
            durable.release_tags(tags.number as usize);
            lock(&self.unused).given_back.push(tags.number);
        }
    }

    /// A cluster has a table from now on, or none.
    pub(super) fn note(&self, cluster: u32, tags: Option<&Tags>) {
        if let Some((_, homes)) = &self.durable {
            homes[cluster as usize].store(tags.map_or(0, |tags| tags.number + 1), Release);
        }
    }
}

impl TagMemory {
    /// The table that a cluster had in the process before. Errors: no memory.
    pub(super) fn retake(&self, cluster: u32) -> io::Result<Option<Tags>> {
        let Some((durable, homes)) = &self.durable else { return Ok(None) };
        let Some(number) = homes[cluster as usize].load(Acquire).checked_sub(1) else {
            return Ok(None);
        };
        if number as usize >= homes.len() {
            return Err(io::Error::other("a table of tags is none"));
        }
        Ok(Some(Tags { words: durable.tags(number as usize)?, number }))
    }

    /// Makes all tables but these unused.
    pub(super) fn settle(&self, used: &[u32]) {
        let Some((durable, homes)) = &self.durable else { return };
        let mut unused = lock(&self.unused);
        let is_used = |number: &u32| used.contains(number);
        unused.used = used.iter().max().map_or(0, |last| last + 1);
        unused.given_back = (0..unused.used).filter(|number| !is_used(number)).collect();
        // What was ready, and never given to a cluster, is behind the last one or among these.
        let behind = unused.used..homes.len() as u32;
        let all = unused.given_back.iter().copied().chain(behind);
        all.for_each(|number| durable.release_tags(number as usize));
    }
}

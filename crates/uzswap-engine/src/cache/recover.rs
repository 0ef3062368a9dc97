//! Takes over the cache of a killed process.
//!
//! ```text
//! map its memory → each entry: as it was published last
//!   → claim the objects that entries refer to → all others are free
//!   → the backing: records of entries; the rest is free → lists, counts, unused records and units
//! ```
//! Whenever the process ends, an entry has the place of its page. A thread writes an object before
//! an entry refers to it, and frees the object only after no entry does. Everything is therefore
//! rebuilt from the entries. Besides them, recovery believes only the data that finds an object:
//! its zspage's descriptor, the use of its segment, its tag.
//!
//! Two entries refer to one object only if a thread was about to share a page. Then the object
//! belongs to the record, which is its owner.

use super::Cache;
use super::layout::Shape;
use crate::backing::Backing;
use crate::backing::SEGMENT_BYTES;
use crate::backing::segments::Use;
use crate::config::{Config, check_backing};
use crate::counters::Counter::RecompressedPages;
use crate::durable::Durable;
use crate::error::SetupError;
use crate::ids::SwapEntry;
use crate::index::{Entry, State, View, Word};
use crate::object::Object;
use crate::pool::{Claim, Claims, sections_of};
use crate::sync::atomic::Ordering::Relaxed;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use uzswap_sys::node::Nodes;

impl Cache {
    /// A cache in the memory of a file from [`uzswap_sys::shared::create`], which outlives the
    /// process. If the file is that of a killed process, this takes its cache over: each page is as
    /// it was last stored. The page of an unfinished store or invalidation may be neither the old
    /// nor the new page, so the caller repeats that call. `config` and the size of `backing` must
    /// be the same as before; a changed attribute keeps its value. No other process may use the
    /// file.
    ///
    /// The errors are those of [`Self::new`], and [`SetupError::Left`].
    pub fn in_file(
        config: Config,
        backing: Box<dyn Backing>,
        file: OwnedFd,
    ) -> Result<Self, SetupError> {
        let shape = Shape {
            keys: config.keys()?,
            sections: sections_of(config.pool_bytes_ever()),
            backing_bytes: backing.bytes(),
            is_sealed: config.seals_backing,
        };
        check_backing(backing.bytes())?;
        let durable = shape.open(file)?;
        Self::make(config, backing, Some(&durable), Nodes::of_machine())
    }

    /// Takes over the cache in the memory, if there is one. No other thread uses this cache yet.
    pub(crate) fn take_over(&self, durable: &Arc<Durable>) -> Result<(), SetupError> {
        if !durable.is_held() {
            return Ok(());
        }
        self.retake_attributes(durable);
        self.index.adopt(durable)?;
        self.pool.adopt(durable)?;
        self.shares.adopt(&self.index)?;
        self.units.adopt(&self.index)?;
        self.slots.adopt();
        let view = self.index.view();
        self.recover_entries(&view, durable)?;
        let claims = self.claim_objects(&view)?;
        if !self.pool.recover(&claims) {
            return Err(SetupError::NotWhole("two objects are in one place"));
        }
        self.recover_backing(&view)?;
        self.list_and_count(&view);
        let is_absent = |key| view.peek(key) == Word::ABSENT;
        self.shares.recover(is_absent)?;
        self.units.recover()?;
        if self.counters.get(RecompressedPages) > 0 {
            let out_of_memory = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            self.provide_units().ok_or_else(out_of_memory)?;
        }
        Ok(())
    }

    /// Restores every entry to its last published state, and counts the entries of each record and
    /// unit.
    fn recover_entries(&self, view: &View<'_>, durable: &Durable) -> Result<(), SetupError> {
        for (key, entry) in entries(view) {
            let word = view.recover(key, entry, durable.intent());
            match word.state() {
                State::Shared(record) if self.shares.has_made(record) => {
                    self.shares.count(record).fetch_add(1, Relaxed);
                }
                State::Member(member) if self.units.retake(member) => {}
                State::Shared(_) | State::Member(_) => {
                    return Err(SetupError::NotWhole(
                        "a page is in a record or unit that does not exist",
                    ));
                }
                State::Absent | State::Filled(_) | State::Pooled(_) | State::Placed(_) => {}
            }
        }
        Ok(())
    }

    /// Claims the objects that entries refer to. Entries of records and units without pages are
    /// absent afterwards. Records precede pages in the index, so of two entries that claim an
    /// object the second is the page's.
    fn claim_objects(&self, view: &View<'_>) -> Result<Claims, SetupError> {
        let mut claims = Claims::new(&self.pool);
        for (key, entry) in entries(view) {
            let State::Pooled(object) = entry.peek().state() else { continue };
            match claims.claim(&self.pool, object.handle, object.form.bytes.into()) {
                Claim::Granted => self.own(view, key, object),
                Claim::Taken => self.join_owner(view, key, object)?,
                Claim::None => return Err(SetupError::NotWhole("an object is not in the pool")),
            }
        }
        for (key, entry) in entries(view).filter(|(key, _)| self.is_deserted(*key)) {
            match entry.peek().state() {
                State::Pooled(object) => claims.give_up(object.handle),
                // A record in a unit. If it was the unit's last page, the unit's pieces, which come
                // later, are deserted too.
                State::Member(member) => _ = self.units.leave(member),
                _ => {}
            }
            view.set_recovered(key, State::Absent);
        }
        Ok(claims)
    }

    /// Sets an object's owner, unless the owner is a record that a page was about to share.
    fn own(&self, view: &View<'_>, key: SwapEntry, object: Object) {
        let owner = self.pool.header(object.handle).owner;
        let is_records = owner != key
            && self.shares.has_made(owner)
            && view.peek(owner).state() == State::Pooled(object);
        if !is_records {
            self.pool.set_owner(object.handle, key);
        }
    }

    fn join_owner(
        &self,
        view: &View<'_>,
        key: SwapEntry,
        object: Object,
    ) -> Result<(), SetupError> {
        let record = self.pool.header(object.handle).owner;
        if !self.shares.has_made(record) || view.peek(record).state() != State::Pooled(object) {
            return Err(SetupError::NotWhole("two pages have one object"));
        }
        self.shares.count(record).fetch_add(1, Relaxed);
        view.set_recovered(key, State::Shared(record));
        Ok(())
    }

    /// True if an entry is of a record or a unit without pages.
    fn is_deserted(&self, key: SwapEntry) -> bool {
        let record = self.shares.has_made(key) && self.shares.count(key).load(Relaxed) == 0;
        let is_piece = self.units.contains(key) && self.units.has_made(key);
        record || is_piece && self.units.taken(self.units.first_of(key)) == 0
    }

    /// Rebuilds the backing's space. Segments to which a write may still be under way stay taken if
    /// the backing cannot wait for that write.
    fn recover_backing(&self, view: &View<'_>) -> Result<(), SetupError> {
        for (key, entry) in entries(view) {
            if let State::Placed(extent) = entry.peek().state()
                && !self.slots.retake(key, extent)?
            {
                return Err(SetupError::NotWhole("two records are in one place"));
            }
        }
        for segment in self.slots.recover()? {
            if self.backing.wait_for_left_writes(segment.start(), SEGMENT_BYTES as u64).is_ok() {
                self.slots.give_segment(segment, Use::Open);
            }
        }
        Ok(())
    }

    /// Puts the objects of the pool on the lists, in the order of their keys, and counts
    /// everything.
    fn list_and_count(&self, view: &View<'_>) {
        for (key, entry) in entries(view) {
            if entry.peek() != Word::ABSENT {
                view.list_and_count(key);
            }
        }
    }
}

/// All entries, by their keys.
fn entries<'a>(view: &'a View<'_>) -> impl Iterator<Item = (SwapEntry, &'a Entry)> {
    view.trunks().flat_map(|(first, entries)| (first.0..).map(SwapEntry).zip(entries))
}

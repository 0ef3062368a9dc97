//! Identical pages: a page that is stored again unchanged, and pages that share one object.
//!
//! ```text
//! store → the same as before under this key? → only its age changes
//!       → the same as under another key? → its object passes to a record, which both share
//! ```
//! `dedup` finds candidates for the same page; `share` has the records.

use super::Cache;
use crate::ids::SwapEntry;
use crate::index::{LockedEntry, State};
use crate::object::Object;
use crate::page::{PAGE_BYTES, Page, checksum_of};
use crate::pool::Header;
use crate::sync::atomic::Ordering;

impl Cache {
    /// True if the pool already has this page for this entry. Then the page only becomes the newest
    /// of the LRU. A different page costs one read of the header. The same page costs a
    /// decompression, a quarter of the time of a compression.
    pub(crate) fn is_unchanged(&self, key: SwapEntry, page: &Page, hash: u64) -> bool {
        let view = self.index.view();
        let State::Pooled(object) = view.peek(key).state() else { return false };
        let ratio = self.attributes.max_compression_ratio() as usize;
        let Some(locked) = view.lock(key) else { return false };
        let is_same = usize::from(object.form.bytes) <= PAGE_BYTES * ratio / 100
            && locked.state() == State::Pooled(object)
            && self.pool.header(object.handle).checksum == checksum_of(hash)
            && self.holds(object, page);
        if is_same && !locked.word().is_in_flight() {
            locked.renewed();
        }
        is_same
    }

    /// Finds another entry with the same page and shares its object; returns the record's key.
    pub(crate) fn share(&self, key: SwapEntry, page: &Page, hash: u64) -> Option<SwapEntry> {
        let view = self.index.view();
        self.candidates.find(hash).filter(|candidate| *candidate != key).find_map(|candidate| {
            let locked = view.try_lock(candidate)?;
            let State::Pooled(object) = locked.state() else { return None };
            let looks_same = self.pool.header(object.handle).checksum == checksum_of(hash);
            (looks_same && self.holds(object, page))
                .then(|| self.join(candidate, locked, object, hash))?
        })
    }

    /// True if an object is this very page. Its entry is locked.
    fn holds(&self, object: Object, page: &Page) -> bool {
        let mut scratch = self.scratch.lock_here();
        let bytes = usize::from(object.form.bytes);
        self.pool.read(object.handle, &mut scratch.object[..bytes]);
        scratch.decompress_here(object.form.codec, bytes).is_ok() && scratch.page == *page
    }

    /// Adds a sharer to `holder`'s object. Unless `holder` is a share record, the object first
    /// passes to a new record.
    fn join(
        &self,
        holder: SwapEntry,
        locked: LockedEntry<'_>,
        object: Object,
        hash: u64,
    ) -> Option<SwapEntry> {
        if self.shares.contains(holder) {
            self.shares.count(holder).fetch_add(1, Ordering::Relaxed);
            return Some(holder);
        }
        if locked.word().is_in_flight() {
            return None; // The record on the backing will name the holder as owner.
        }
        let record = self.shares.take()?;
        let view = self.index.view();
        let locked_record = view.lock_existing(record);
        self.shares.count(record).store(2, Ordering::Relaxed);
        self.pool.set_header(object.handle, Header { owner: record, checksum: checksum_of(hash) });
        locked.shared(locked_record);
        self.candidates.insert(hash, record, Some(holder));
        Some(record)
    }

    /// Removes a sharer from a record; the last one frees the object.
    pub(crate) fn leave_record(&self, record: SwapEntry) {
        let view = self.index.view();
        let locked = view.lock_existing(record);
        if self.shares.count(record).fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        self.dispose(locked.dropped());
        self.shares.give(record);
    }
}

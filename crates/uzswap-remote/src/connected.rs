//! From an address to a backing: the connected store, and the bytes that it may take.

use crate::address::Address;
use crate::error::ConnectError;
use crate::store::{Limits, Store};
use crate::table::{NONE, SegmentTable, TableHeader};
use crate::tiers::{DEAD_MAX, Inner, LocalSpace, Tiers, UpkeepState};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Condvar, Mutex};
use uzswap_engine::backing::{Backing, SEGMENT_BYTES};

/// The default size at a store that has no limit of its own.
const BYTES_MAX: u64 = 8 << 30;
/// By default one cache takes the store's memory divided by this.
const SHARE: u64 = 2;
/// A connected store, before its backing is made.
pub struct Connected {
    store: Store,
    limits: Limits,
    table: Option<OwnedFd>,
    /// The table's header, if the last process has left one.
    kept: Option<TableHeader>,
}

impl Connected {
    /// Connects to a store. The error has the reason why the store cannot be used, and the remedy.
    pub fn to(address: &Address) -> Result<Self, ConnectError> {
        let (store, limits) = Store::connect(address)?;
        if let (Some(wanted), Some(there)) = (address.bytes_max, limits.bytes)
            && wanted > there
        {
            let reason = format!(
                "max={wanted} is more than its servers may take together ({there}, maxmemory); give less"
            );
            return Err(ConnectError::store(address, reason));
        }
        Ok(Self { store, limits, table: None, kept: None })
    }

    /// Connects to a store, with a table in memory that outlives the process: new, or as the last
    /// process has left it. If a process has left it, only the store may have a page. So a store
    /// that does not answer or cannot be used is no error: reads wait for it.
    pub fn with_table(address: &Address, table: OwnedFd) -> Result<Self, ConnectError> {
        let kept = SegmentTable::header(&table);
        let Some(TableHeader { epoch, readers, .. }) = kept else {
            return Ok(Self { table: Some(table), ..Self::to(address)? });
        };
        let store = Store::resume(address, epoch, readers);
        let store =
            store.map_err(|source| ConnectError::Own { address: address.to_string(), source })?;
        Ok(Self { store, limits: Limits { bytes: None }, table: Some(table), kept })
    }

    /// The maximum bytes at the store, beside a local disk of `local` bytes.
    fn bytes_max(&self, local: u64) -> u64 {
        let address = self.store.address();
        let there = self.limits.bytes.map_or(BYTES_MAX, |bytes| bytes / SHARE);
        address.bytes_max.unwrap_or(if address.copies == 0 { local } else { there })
    }

    /// Bytes that the local file must have room for, if the backing stores at most `most`. In a
    /// fork the file may have to take all pages of the store as well.
    pub fn file_bytes(&self, most: u64) -> u64 {
        if self.store.address().copies == 0 { most } else { most + self.bytes_max(most) }
    }

    /// Makes the backing over a local one, of which it uses at most `most` bytes. Fails without
    /// memory, or without a local backing for a second copy.
    pub fn over(self, local: Box<dyn Backing>, most: u64) -> Result<Tiers, ConnectError> {
        let address = self.store.address().clone();
        let slots = (local.bytes() / SEGMENT_BYTES as u64) as usize;
        let limit = slots.min((most / SEGMENT_BYTES as u64) as usize);
        if address.copies == 0 && slots == 0 {
            let reason = "with --remote-copies 0 a local disk has each page, too; give one (--backing PATH:SIZE), or replicas and --remote-copies 1";
            return Err(ConnectError::store(&address, reason));
        }
        let (segments, bytes_max) = match (address.copies, self.kept) {
            (0, _) => (slots, self.bytes_max(most)),
            (_, Some(TableHeader { segments, .. })) => {
                (segments, (segments.saturating_sub(limit) * SEGMENT_BYTES) as u64)
            }
            (_, None) => {
                let there = self.bytes_max(most);
                (limit + (there / SEGMENT_BYTES as u64) as usize, there)
            }
        };
        let own = |source| ConnectError::Own { address: address.to_string(), source };
        let (epoch, readers) = (self.store.epoch(), self.store.readers.len());
        let header = TableHeader { epoch, segments, readers };
        let table = match self.table {
            Some(file) => SegmentTable::kept(file, header).map_err(own)?,
            None => SegmentTable::new(segments),
        };
        if address.copies == 0 {
            let length = |at| table.length(at);
            (0..segments).for_each(|at| table.set_place(at, at as u32, length(at)));
        }
        let (owners, space) = LocalSpace::of(&table, slots, limit, address.copies);
        let bytes = table.remote().iter().map(|at| table.length(*at) as u64).sum();
        let inner = Inner {
            copies: address.copies,
            bytes_max,
            owners: Mutex::new(owners),
            local,
            space: Mutex::new(space),
            room: Condvar::new(),
            dead: Mutex::new(Vec::with_capacity(DEAD_MAX)),
            done: Mutex::new(Vec::with_capacity(64)),
            bytes: AtomicU64::new(bytes),
            next: AtomicU64::new(table.next()),
            table,
            has_failed: AtomicBool::new(false),
            has_recovered: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            process: AtomicU32::new(std::process::id()),
            remote_ns: AtomicU64::new(0),
            local_ns: AtomicU64::new(u64::MAX),
            turn: AtomicU64::new(1),
            work: Mutex::new(UpkeepState::new().map_err(own)?),
            store: self.store,
        };
        Ok(Tiers(Arc::new(inner)))
    }
}

impl LocalSpace {
    /// The owners of a table's slots, and the free slots.
    fn of(table: &SegmentTable, slots: usize, limit: usize, copies: u8) -> (Vec<u32>, Self) {
        let mut owners = vec![NONE; slots];
        for segment in 0..table.count() {
            if let Some(owner) = owners.get_mut(table.slot(segment) as usize) {
                *owner = segment as u32;
            }
        }
        let mut free = Vec::with_capacity(slots);
        if copies > 0 {
            free.extend((0..slots as u32).rev().filter(|slot| owners[*slot as usize] == NONE));
        }
        let used = slots - free.len();
        (owners, Self { free, used, limit })
    }
}

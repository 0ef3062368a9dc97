//! A pager: a budget, the cache behind it, and the regions that share both.

use crate::core::Inner;
use crate::core::registry;
use crate::error::Error;
use crate::layers::Layers;
use crate::mode::Mode;
use crate::size::{MemorySize, check_memory};
use crate::stats::Stats;
use crate::threads::Handle;
use std::fmt;
use std::sync::Arc;
use uzswap_sys::fault_signals::Blocked;

/// A budget of memory, shared by the regions that are made with it. Cheap to clone.
#[derive(Clone)]
pub struct Pager {
    handle: Arc<Handle>,
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager").field("memory", &self.memory()).field("mode", &self.mode()).finish()
    }
}

impl Pager {
    /// Changes the budget. Takes effect immediately; pages above a smaller budget are evicted
    /// within moments.
    pub fn set_memory(&self, memory: impl Into<MemorySize>) -> Result<(), Error> {
        let inner = self.inner();
        inner.check_process()?;
        let bytes = check_memory(memory.into().bytes("the budget")?)?;
        let _blocked = Blocked::all();
        inner.budget.set_bytes(bytes);
        inner.keep_ahead();
        inner.account();
        inner.budget.changed();
        inner.budget.ring();
        Ok(())
    }

    /// Decides if a thread without room waits for a larger budget. By default it does not, and ends
    /// the process.
    pub fn set_patient(&self, is_patient: bool) {
        self.inner().budget.set_patient(is_patient);
    }

    /// True if a thread waits for a larger budget, because no page can be evicted any more.
    pub fn is_starved(&self) -> bool {
        self.inner().budget.is_starved()
    }

    /// The budget, bytes.
    pub fn memory(&self) -> u64 {
        self.inner().budget.bytes()
    }

    /// The least budget with which threads make progress, in bytes. It covers the empty cache, a
    /// section of its pool, the pages that cannot leave at present, and a few moving pages.
    pub fn least_memory(&self) -> u64 {
        self.inner().least_bytes()
    }

    /// The threads that serve faults.
    pub fn mode(&self) -> Mode {
        self.inner().mode
    }

    /// Figures, by the names of the engine's control files, and the region's own.
    pub fn stats(&self) -> Stats {
        let _blocked = Blocked::all();
        Stats::of(self.inner())
    }

    /// Start and bytes of the region of this pager that an address lies in.
    pub fn region_of(&self, address: usize) -> Option<(usize, usize)> {
        let space = registry::find(address)?;
        let is_ours = Arc::ptr_eq(&space.pager, self.inner());
        is_ours.then_some((space.base(), space.bytes()))
    }

    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle: Arc::new(handle) }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    /// Does `work` without any thread of the pager's. Threads of the program still serve their
    /// faults, and evict pages themselves if they find no room.
    pub fn without_threads<R>(&self, work: impl FnOnce() -> R) -> std::io::Result<R> {
        self.handle.stop();
        let result = work();
        self.handle.start(1).map(|()| result)
    }

    /// Opens all descriptors again, under the same numbers, because the program has closed some. No
    /// page is adopted yet, and no thread of the program runs. Fails if a descriptor cannot be
    /// opened.
    pub fn renew_descriptors(&self) -> std::io::Result<()> {
        let inner = self.inner();
        if inner.tiers.is_some() {
            // The connections to a store cannot be made again.
            return Err(std::io::ErrorKind::NotConnected.into());
        }
        inner.door.renew()?;
        inner.staging.renew()?;
        inner.layers.as_ref().map_or(Ok(()), Layers::renew)
    }

    /// Ends the pager's threads. Faults are served all the same.
    pub fn stop_threads(&self) {
        self.handle.stop();
    }

    /// Starts the threads again in a fork, which has none of its parent's threads.
    pub(crate) fn restart_threads(&self) -> std::io::Result<()> {
        self.handle.restart()
    }
}

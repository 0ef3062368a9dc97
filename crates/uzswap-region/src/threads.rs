//! The threads of a pager.

use crate::core::Inner;
use crate::fault;
use crate::handlers::HANDLERS_MAX;
use crate::mode::Mode;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, mem};
use uzswap_engine::PAGE_BYTES;
use uzswap_remote::Tiers;
use uzswap_sys::fault_signals::Blocked;
use uzswap_sys::uffd::{Message, Uffd};
use uzswap_sys::{cpu, map, own_threads};
use uzswap_tree::variables::variables_bytes;

/// Bytes of a thread's stack.
const STACK: usize = 512 << 10;

thread_local! {
    static IS_PAGERS: Cell<bool> = const { Cell::new(false) };
}

/// True if the calling thread is a pager's own. An allocator that gives out memory of regions must
/// give none of it to such a thread, because other threads may wait for that thread at a fault.
pub fn is_pager_thread() -> bool {
    IS_PAGERS.get()
}

pub(crate) struct Handle {
    pub(crate) inner: Arc<Inner>,
    threads: Mutex<Vec<own_threads::Started>>,
}

impl Handle {
    pub(crate) fn new(inner: Arc<Inner>) -> Self {
        Self { inner, threads: Mutex::default() }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<own_threads::Started>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn start(&self, reclaim_threads: usize) -> io::Result<()> {
        // Threads inherit the mask: ours handle no signal of the program's.
        let _blocked = Blocked::all();
        let bytes = STACK + variables_bytes();
        let start = |name: &'static CStr, run: fn(&Inner)| {
            let inner = self.inner.clone();
            let coming = own_threads::announce();
            let run = move || {
                let _entered = coming.enter();
                IS_PAGERS.set(true);
                map::remember_stack(STACK, bytes - STACK);
                run(&inner);
            };
            let thread = own_threads::start(name, bytes, run)?;
            self.threads().push(thread);
            Ok::<_, io::Error>(())
        };
        for _ in 0..reclaim_threads {
            start(c"uzswap-reclaim", Inner::run_reclaim)?;
        }
        start(c"uzswap-ahead", Inner::run_ahead)?;
        if self.inner.tiers.is_some() {
            start(c"uzswap-remote", Inner::run_store)?;
        }
        if self.inner.mode == Mode::HandlerThreads {
            for _ in 0..cpu::allowed().min(HANDLERS_MAX) {
                start(c"uzswap-fault", Inner::run_handler)?;
            }
        }
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.inner.stop_reclaim();
        self.inner.ahead.bell().ring();
        self.inner.tiers.iter().for_each(Tiers::ring);
        self.inner.door.uffd().into_iter().for_each(Uffd::stop);
        let mut threads = self.threads();
        for thread in threads.drain(..) {
            thread.join();
        }
        self.inner.door.uffd().into_iter().for_each(Uffd::go_on);
        self.inner.set_stopping(false);
    }

    pub(crate) fn restart(&self) -> io::Result<()> {
        // These are threads of the parent, which do not exist here.
        self.threads().clear();
        self.start(1)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.inner.check_process().is_err() {
            // The threads and the memory are the parent's. In the child, other memory may be at
            // these addresses.
            mem::forget(self.inner.clone());
            return;
        }
        self.stop();
        self.inner.tiers.iter().for_each(Tiers::clear);
    }
}

impl Inner {
    /// The work of a handler thread.
    fn run_handler(&self) {
        let turns = self.handlers.next();
        loop {
            match self.uffd().next() {
                Ok(Message::Fault(fault)) => {
                    turns.serve(|| fault::serve(fault));
                    let page = fault.address & !(PAGE_BYTES - 1);
                    // An error would mean that the region has been unmapped.
                    let _ = self.uffd().wake(page..page + PAGE_BYTES);
                }
                Ok(Message::Other) => {}
                Ok(Message::Stop) => return,
                // Otherwise a thread that waits for a page would wait for ever.
                Err(error) => panic!("cannot read from userfaultfd: {error}"),
            }
        }
    }

    /// The work of the thread that tends the store.
    fn run_store(&self) {
        self.tiers.iter().for_each(|tiers| tiers.run(|| self.is_stopping()));
    }
}

//! The budget of a run in a container, which follows the container's own count of its memory.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use uzswap_policy::margin::{EVERY, EVERY_NEAR, Margin, Reading};
use uzswap_sys::cgroup::{Group, Hierarchy};
use uzswap_tree::Table;

/// Looks at the container, in a thread of its own.
pub struct Container {
    /// Dropped to end the thread.
    stop: Sender<()>,
    thread: JoinHandle<Margin>,
}

impl Container {
    /// Begins to look, if there is a limit. Error: no thread can be started.
    pub fn watch(table: &'static Table) -> io::Result<Option<Self>> {
        let group = Hierarchy::find().and_then(|groups| groups.own().limiting());
        let Some((limit, group)) = group else { return Ok(None) };
        // A look before the thread's first, so that the first processes take no more than there is.
        let margin = look(table, &group, limit, Margin::new(table.total.load(Relaxed))).0;
        let (stop, stopped) = channel();
        let follow = move || follow(table, &group, margin, &stopped);
        let thread = std::thread::Builder::new().name("uzswap-margin".into()).spawn(follow)?;
        Ok(Some(Self { stop, thread }))
    }

    /// Ends the thread. Returns the most bytes by which the budget was below the given budget.
    pub fn end(self) -> u64 {
        drop(self.stop);
        self.thread.join().map_or(0, |margin| margin.learnt())
    }
}

fn follow(table: &Table, group: &Group, mut margin: Margin, stopped: &Receiver<()>) -> Margin {
    let mut wait = EVERY;
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        // The limit may be changed while the container runs.
        let limit = group.memory_limit().map_or(u64::MAX, |(limit, _)| limit);
        let is_near;
        (margin, is_near) = look(table, group, limit, margin);
        wait = if is_near { EVERY_NEAR } else { EVERY };
    }
    margin
}

/// Looks once, and sets the budget. True: the container is near its limit.
fn look(table: &Table, group: &Group, limit: u64, margin: Margin) -> (Margin, bool) {
    let Some(needed) = group.needed_bytes() else { return (margin, false) };
    let seen = Reading { limit, needed, counted: table.counted_bytes() };
    let margin = margin.after(seen);
    table.total.store(margin.budget(), Relaxed);
    table.ceiling.store(margin.ceiling(), Relaxed);
    (margin, seen.is_near())
}

//! The watching thread's look at the program, and its orders to a pager.

use crate::decide::{self, Keep, Managed, Observation, Unmanaged};
use crate::stage::{self, Stage};
use crate::{AGENT, Agent, adoption, alone, ask, ask_unmanaged, copies, forking, is_recorded};
use crate::{looker, request, seen};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_policy::idle::{self, FaultCounts, Idleness};
use uzswap_sys::process;
use uzswap_tree::front::{FILTERED, Front};
use uzswap_tree::{Figures, RemoteSums, Tree, clock, own_number};

/// Memory besides the pager's, in bytes, at the last search of mappings that were left open. A
/// forked child continues with the values of this and the next variables.
static BESIDES: AtomicU64 = AtomicU64::new(0);
/// The figures of this process's last report: faults, stored pages, activity at a store.
static TOLD: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static TOLD_REMOTE: RemoteSums = RemoteSums::new();

/// The state of a watching thread.
pub struct Watcher {
    front: &'static Front,
    shared: SharedSize,
    hopeless: u32,
    next_tell: Instant,
    idle: Idle,
    named: Named,
}

impl Watcher {
    /// Called in a thread that begins to watch.
    pub fn new(front: &'static Front) -> Self {
        // A forked child shares memory with its parent.
        forking::note();
        looker::start();
        let now = Instant::now();
        let shared = SharedSize { bytes: 0, fell: 0, next: now, wait: decide::WAIT_MIN };
        let (idle, named) = (Idle::new(&front.tree), Named { at: None, next: now });
        Self { front, shared, hopeless: 0, next_tell: now, idle, named }
    }

    /// Looks at the program, and reports its memory to the tree.
    pub fn look(&mut self) -> Observation {
        let agent = AGENT.get();
        if alone::is_wanted() {
            return Observation::EndWanted;
        }
        // After the take-over the agent checks a filter when the program sets it (`seccomp`).
        if agent.is_none() && self.front.waits.load(Relaxed) & FILTERED != 0 {
            return Observation::Filtered;
        }
        let whole = looker::apart(process::own_anonymous_bytes);
        let whole = match (whole, agent) {
            (Some(whole), _) => whole,
            // A program may have lost access to /proc since its take-over.
            (None, Some(agent)) => agent.pager.used_bytes(),
            (None, None) => return Observation::Unmeasured,
        };
        let tree = &self.front.tree;
        match agent {
            None => {
                let stage = stage::now();
                tree.need(decide::least_unmanaged(whole));
                if matches!(stage, Stage::Watched | Stage::TakingOver) {
                    request::reserve(tree, whole);
                }
                Observation::Unmanaged(Unmanaged {
                    is_wanted: stage == Stage::TakingOver,
                    is_refused: !matches!(stage, Stage::Watched | Stage::TakingOver),
                    used: whole,
                    is_recorded: is_recorded(),
                    allowance: ask_unmanaged(tree, whole),
                })
            }
            Some(agent) => Observation::Managed(self.look_at(agent, tree, whole)),
        }
    }

    fn look_at(&mut self, agent: &Agent, tree: &Tree, whole: u64) -> Managed {
        let shared = self.shared.bytes();
        let is_starved = agent.pager.is_starved();
        let is_suspended = tree.is_suspended();
        (self.idle.used, self.idle.waits) =
            (whole.saturating_sub(shared), is_starved || is_suspended);
        let besides = if is_recorded() { 0 } else { besides(agent, whole) };
        self.named.keep_up(besides, tree);
        let least = agent.pager.least_memory();
        tree.need(decide::least_managed(besides, least).saturating_sub(shared));
        let given = ask(tree, whole.saturating_sub(shared), is_starved);
        let whole_most = copies::allowance(tree, whole);
        let is_read = seen::attend(agent, tree);
        Managed {
            is_starved,
            may_hope: given.may_hope,
            hopeless: self.hopeless,
            is_suspended,
            is_slowed: decide::is_slowed(given.ahead, tree.cpus(), clock(), own_number().into()),
            is_read,
            is_recorded: is_recorded(),
            allowance: given.bytes,
            soon: given.soon,
            kept_idle: self.idle.idleness.most(),
            shared,
            whole_most,
            besides,
            budget: agent.pager.memory(),
            least,
        }
    }

    /// Gives a pager its orders, and reports its activity at times.
    pub fn keep(&mut self, agent: &Agent, keep: &Keep) {
        self.hopeless = keep.hopeless;
        agent.pager.set_patient(keep.is_patient);
        agent.pager.set_suspended(keep.is_suspended);
        if let Some(budget) = keep.budget {
            // If a budget is refused, the old one stays.
            let _ = agent.pager.set_memory(budget);
        }
        if Instant::now() >= self.next_tell {
            tell(agent, &self.front.tree);
            self.idle.count(&self.front.tree);
            self.next_tell = Instant::now() + decide::TELL;
        }
    }
}

/// How idle this process is: its faults and those of all processes at the last count.
struct Idle {
    idleness: Idleness,
    own: u64,
    all: u64,
    next: Instant,
    /// As of the last look: the process's memory in bytes, and true if the process waited for
    /// memory or was suspended.
    used: u64,
    waits: bool,
}

impl Idle {
    fn new(tree: &Tree) -> Self {
        let (own, all) = (TOLD[0].load(Relaxed), tree.table().faults.load(Relaxed));
        let next = Instant::now() + idle::EVERY;
        Self { idleness: Idleness::default(), own, all, next, used: 0, waits: false }
    }

    fn count(&mut self, tree: &Tree) {
        if Instant::now() < self.next {
            return;
        }
        let now = Self::new(tree);
        let own = now.own.saturating_sub(self.own);
        let others = now.all.saturating_sub(self.all).saturating_sub(own);
        let counted = tree.members().filter(|member| member.used > 0).count() as u64;
        let faults = FaultCounts { own, others, processes: counted.saturating_sub(1) };
        let idleness = match self.waits {
            // A waiting process has few faults, and is not idle.
            true => Idleness::default(),
            false => self.idleness.after(faults, self.used),
        };
        *self = Self { idleness, ..now };
    }
}

/// The memory that stays, as the report names it.
struct Named {
    /// Memory besides the pager's at the last report, bytes.
    at: Option<u64>,
    next: Instant,
}

impl Named {
    /// Reports memory that stays and was mapped after the take-over. The kernel describes much
    /// memory slowly, so this may take a ninth of the time at most.
    fn keep_up(&mut self, besides: u64, tree: &Tree) {
        let at = *self.at.get_or_insert(besides);
        let start = Instant::now();
        if besides < at + adoption::LEFT_LEAST || start < self.next {
            return;
        }
        self.at = Some(besides);
        adoption::report_left_now(tree, &crate::name());
        self.next = Instant::now() + start.elapsed() * 8;
    }
}

/// Memory besides the pager's, bytes. All that the pager takes is anonymous memory, too.
fn besides(agent: &Agent, whole: u64) -> u64 {
    let besides = || whole.saturating_sub(agent.pager.used_bytes());
    if decide::has_grown(besides(), BESIDES.load(Relaxed)) {
        agent.pager.find_used();
        BESIDES.store(besides(), Relaxed);
    }
    let besides = besides();
    BESIDES.fetch_min(besides, Relaxed);
    besides
}

/// Reports the activity since the last time to the tree.
fn tell(agent: &Agent, tree: &Tree) {
    let now = agent.pager.figures();
    let since = |told: &AtomicU64, now| now - told.swap(now, Relaxed);
    let (faults, stored) = (since(&TOLD[0], now.faults), since(&TOLD[1], now.stored));
    tree.note(Figures { faults, stored, ..now });
    if let Some(remote) = agent.pager.remote() {
        tree.table().remote.add(&TOLD_REMOTE.advance(&remote));
    }
}

/// This process's memory that it shares with others since a fork. Each process that was taken over
/// counts such memory, as do its children from their start.
struct SharedSize {
    bytes: u64,
    /// Size of the last decrease. Until the next reading we assume another decrease of the same
    /// size.
    fell: u64,
    next: Instant,
    wait: Duration,
}

impl SharedSize {
    /// Reads the size after a fork, and again while memory is shared.
    fn bytes(&mut self) -> u64 {
        let is_new = forking::take_note();
        if is_new || self.bytes > 0 && Instant::now() >= self.next {
            let start = Instant::now();
            let bytes =
                decide::counted_shared(looker::apart(|| process::own_shared_bytes().unwrap_or(0)));
            self.fell = if is_new { 0 } else { self.bytes.saturating_sub(bytes) };
            self.bytes = bytes;
            self.wait = decide::shared_wait(is_new, self.wait, start.elapsed());
            self.next = Instant::now() + self.wait;
        }
        self.bytes.saturating_sub(self.fell)
    }
}

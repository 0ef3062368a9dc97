//! Load control: which processes of a command run when their memory does not fit.
//!
//! More processes may be busy than there are CPUs, and swap rather than compute. Then each takes
//! memory that another is about to use, and all run at the speed of the swap device. So the
//! youngest are suspended until no more processes are busy than there are CPUs. When CPUs become
//! idle, suspended processes are resumed one by one. The oldest is first, since it finishes and
//! frees its memory.
//!
//! No process is suspended for good. If others wait for a suspended process, CPUs become idle, and
//! the process is resumed. After ten seconds of suspension a process runs for three in any case.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::Group;
use uzswap_sys::freezer::Freezer;
use uzswap_sys::process::Activity;
use uzswap_tree::{Member, Table};

/// The interval at which the processes are checked.
const TICK: Duration = Duration::from_millis(50);

/// The weight of a new look in the smoothed figures: they follow a change in a fifth of a second.
const WEIGHT: f64 = 0.3;

/// With more major faults a second for each CPU, the processes swap rather than compute. This many
/// faults through our device take a tenth of a CPU's time, and more of the processes' time.
const FAULTS_PER_CPU: f64 = 1000.0;

/// A slow disk is recognised by the processes that wait for it: more than this many for each CPU,
/// with more than this many major faults a second in all.
const WAITING_PER_CPU: f64 = 0.75;
const FAULTS_WAITED_FOR: f64 = 30.0;

/// Busy processes that may run beyond the number of CPUs. With fewer, CPUs idle during faults.
const SLACK: f64 = 0.5;

/// The time after which a suspended process resumes, if no process is spared.
const SUSPENDED_MAX: Duration = Duration::from_secs(10);
/// The least time for which such a process is spared from suspension after it resumes.
const SPARED: Duration = Duration::from_secs(3);

/// The acts of load control.
#[derive(Debug, Default, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Suspensions {
    /// Times that a process was suspended.
    pub suspensions: u64,
    /// The time of all suspensions together, seconds.
    pub seconds: f64,
}

impl fmt::Display for Suspensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { suspensions, seconds } = self;
        write!(f, "suspended a process {suspensions} times, {seconds:.1} s in all")
    }
}

/// A process at a look.
#[derive(Debug, Clone, Copy)]
struct ProcessSample {
    pid: i32,
    activity: Activity,
    is_suspended: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Suspend(Vec<i32>),
    Resume(Vec<i32>),
    Leave,
}

/// Decides at each look.
struct Policy {
    cpus: usize,
    /// Smoothed: running processes, processes that wait for a device, and major faults a second.
    running: f64,
    waiting: f64,
    faults: f64,
    /// The major faults of each process at the last look.
    before: HashMap<i32, u64>,
    /// The time for which each process has been suspended, and the time for which each spared
    /// process may not be suspended.
    suspended: HashMap<i32, Duration>,
    spared: HashMap<i32, Duration>,
}

impl Policy {
    fn new(cpus: usize) -> Self {
        let (before, suspended, spared) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self { cpus, running: 0.0, waiting: 0.0, faults: 0.0, before, suspended, spared }
    }

    /// The next act for these processes. `passed` is the time since the last look.
    fn decide(&mut self, seen: &[ProcessSample], passed: Duration) -> Decision {
        let swapping = self.look(seen, passed);
        self.count_time(seen, passed);
        if let Some(pid) = self.has_waited_enough() {
            return self.resume(vec![pid]);
        }
        let (cpus, over) = (self.cpus as f64, self.over());
        let waits = self.waiting > WAITING_PER_CPU * cpus && self.faults > FAULTS_WAITED_FOR;
        let thrashes = waits || self.faults > FAULTS_PER_CPU * cpus;
        if over <= SLACK {
            // The oldest, one for each CPU that is idle.
            let mut suspended: Vec<_> =
                seen.iter().filter(|process| process.is_suspended).collect();
            suspended.sort_by_key(|process| process.activity.started);
            let pids =
                suspended.into_iter().map(|process| process.pid).take((-over).max(1.0) as usize);
            return self.resume(pids.collect());
        }
        if thrashes { self.suspend(swapping, over) } else { Decision::Leave }
    }

    /// Number of busy processes above the number of CPUs.
    fn over(&self) -> f64 {
        self.running + self.waiting - self.cpus as f64
    }

    /// Updates the figures. Returns the processes that swap and may be suspended.
    fn look(&mut self, seen: &[ProcessSample], passed: Duration) -> Vec<ProcessSample> {
        let free = || seen.iter().filter(|process| !process.is_suspended);
        let since = |process: &ProcessSample| {
            let before = self.before.get(&process.pid).copied().unwrap_or(0);
            process.activity.major_faults.saturating_sub(before)
        };
        let faults: u64 = free().map(since).sum();
        let swaps = |process: &&ProcessSample| since(process) > 0 || process.activity.is_waiting;
        let spared = |process: &&ProcessSample| self.spared.contains_key(&process.pid);
        let swapping = free().filter(swaps).filter(|process| !spared(process)).copied().collect();
        let running = free().filter(|process| process.activity.is_running).count() as f64;
        let waiting = free().filter(|process| process.activity.is_waiting).count() as f64;
        let smooth = |figure: &mut f64, now: f64| *figure += WEIGHT * (now - *figure);
        smooth(&mut self.running, running);
        smooth(&mut self.waiting, waiting);
        smooth(&mut self.faults, faults as f64 / passed.as_secs_f64().max(1e-3));
        self.before =
            seen.iter().map(|process| (process.pid, process.activity.major_faults)).collect();
        swapping
    }

    fn count_time(&mut self, seen: &[ProcessSample], passed: Duration) {
        let suspended = seen.iter().filter(|process| process.is_suspended);
        let time = |pid| self.suspended.get(&pid).copied().unwrap_or_default() + passed;
        self.suspended = suspended.map(|process| (process.pid, time(process.pid))).collect();
        self.spared.retain(|_, left| {
            *left = left.saturating_sub(passed);
            !left.is_zero()
        });
    }

    /// The process that has been suspended for longest, if it has waited long enough and no process
    /// is spared.
    fn has_waited_enough(&self) -> Option<i32> {
        let (pid, time) = self.suspended.iter().max_by_key(|(_, time)| **time)?;
        (*time >= SUSPENDED_MAX && self.spared.is_empty()).then_some(*pid)
    }

    fn resume(&mut self, pids: Vec<i32>) -> Decision {
        if pids.is_empty() {
            return Decision::Leave;
        }
        for pid in &pids {
            if self.suspended.get(pid).is_some_and(|time| *time >= SUSPENDED_MAX) {
                self.spared.insert(*pid, SPARED);
            }
        }
        // The next looks will see the resumed processes. Until then they count as running.
        self.running += pids.len() as f64;
        Decision::Resume(pids)
    }

    /// Suspends the youngest of the swapping processes: half of the surplus, but leaves one for
    /// each CPU.
    fn suspend(&mut self, mut swapping: Vec<ProcessSample>, over: f64) -> Decision {
        swapping.sort_by_key(|process| process.activity.started);
        let count = (1 + (over / 2.0) as usize).min(swapping.len().saturating_sub(self.cpus));
        if count == 0 {
            return Decision::Leave;
        }
        let busy = self.running + self.waiting;
        let left = (1.0 - count as f64 / busy).max(0.0);
        self.running *= left;
        self.waiting *= left;
        let youngest = swapping.iter().rev().take(count);
        Decision::Suspend(youngest.map(|process| process.pid).collect())
    }
}

/// Processes that can be suspended.
pub trait Suspendable: Send + 'static {
    fn suspended(&self) -> Vec<i32>;
    /// All processes, with their activity.
    fn all(&self) -> Vec<(i32, Activity)>;
    /// Suspends a process; `false` if it is gone.
    fn suspend(&self, pid: i32) -> bool;
    /// Resumes a process, if it exists.
    fn resume(&self, pid: i32);
    /// Resumes all processes.
    fn release_all(&self);
    /// True if the processes will need more memory than there is.
    fn is_crowded(&self) -> bool {
        false
    }
    /// Sets if growing processes wait before they get memory that they would lose again.
    fn take_turns(&self, _: bool) {}
}

/// The processes of a group, suspended by the freezer.
pub struct InGroup {
    group: Group,
    freezer: Freezer,
}

impl InGroup {
    /// Fails if there is no freezer.
    pub fn new(group: Group) -> io::Result<Self> {
        let freezer = Freezer::create(&group)?;
        Ok(Self { group, freezer })
    }
}

impl Suspendable for InGroup {
    fn suspended(&self) -> Vec<i32> {
        // Read anew each time: a process may have forked in the freezer while it was being
        // suspended.
        self.freezer.processes()
    }

    fn all(&self) -> Vec<(i32, Activity)> {
        let all = self.group.processes().into_iter();
        all.filter_map(|pid| Some((pid, Activity::of(pid)?))).collect()
    }

    fn suspend(&self, pid: i32) -> bool {
        // An error means that the process is gone, or in a group of its own.
        self.freezer.suspend(pid).is_ok()
    }

    fn resume(&self, pid: i32) {
        // An error means that the process is gone.
        let _ = self.freezer.resume(pid);
    }

    fn release_all(&self) {
        self.freezer.thaw();
    }
}

/// Processes whose memory is kept small in-process. A suspended process waits when it needs an
/// absent page, and its other pages leave memory.
pub struct InTree(pub &'static Table);

/// This many faults in-process take as long as one fault through the device.
const FAULTS_AT_ONCE: u64 = 10;

impl Suspendable for InTree {
    fn suspended(&self) -> Vec<i32> {
        self.0.suspended().map(|process| process as i32).collect()
    }

    fn all(&self) -> Vec<(i32, Activity)> {
        let is_seen = |member: &Member| member.used.max(member.grew_to) > 0 || member.is_suspended;
        let seen = self.0.members().filter(is_seen).filter_map(|member| {
            let pid = member.process as i32;
            let mut activity = Activity::of(pid)?;
            activity.major_faults = member.figures.faults / FAULTS_AT_ONCE;
            if member.figures.stored == 0 {
                // The process has stored no page, so it waits for something else, and counts as
                // running.
                activity.is_running |= activity.is_waiting;
                activity.is_waiting = false;
            }
            Some((pid, activity))
        });
        seen.collect()
    }

    fn suspend(&self, pid: i32) -> bool {
        self.0.suspend(pid as u32, true)
    }

    fn resume(&self, pid: i32) {
        self.0.suspend(pid as u32, false);
    }

    fn release_all(&self) {
        self.suspended().into_iter().for_each(|pid| self.resume(pid));
    }

    fn is_crowded(&self) -> bool {
        self.0.is_crowded()
    }

    fn take_turns(&self, takes_turns: bool) {
        self.0.set_taking_turns(takes_turns);
    }
}

/// Load control over processes, in a thread of its own.
pub struct LoadControl {
    /// Dropped to end the thread.
    stop: Sender<()>,
    thread: JoinHandle<Suspensions>,
    now: Arc<AtomicUsize>,
}

impl LoadControl {
    /// Starts the thread. Fails if the thread cannot be started.
    pub fn start(processes: impl Suspendable, cpus: usize) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let now = Arc::new(AtomicUsize::new(0));
        let shown = now.clone();
        let control = move || control(&processes, Policy::new(cpus), &stopped, &shown);
        let thread = std::thread::Builder::new().name("uzswap-load".into()).spawn(control)?;
        Ok(Self { stop, thread, now })
    }

    /// Number of processes that are suspended now.
    pub fn now(&self) -> usize {
        self.now.load(Relaxed)
    }

    /// Resumes all processes and ends the thread. Returns its acts.
    pub fn end(self) -> Suspensions {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

fn control(
    processes: &impl Suspendable,
    mut policy: Policy,
    stopped: &Receiver<()>,
    shown: &AtomicUsize,
) -> Suspensions {
    let mut done = Suspensions::default();
    let mut last = Instant::now();
    while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let passed = last.elapsed();
        last = Instant::now();
        let suspended = processes.suspended();
        shown.store(suspended.len(), Relaxed);
        done.suspensions +=
            suspended.iter().filter(|pid| !policy.suspended.contains_key(pid)).count() as u64;
        done.seconds += suspended.len() as f64 * passed.as_secs_f64();
        let look = |(pid, activity)| ProcessSample {
            pid,
            activity,
            is_suspended: suspended.contains(&pid),
        };
        let seen: Vec<ProcessSample> = processes.all().into_iter().map(look).collect();
        // The policy would not resume a process that is gone, or cannot be seen.
        let is_seen = |pid: &i32| seen.iter().any(|process| process.pid == *pid);
        suspended.iter().filter(|pid| !is_seen(pid)).for_each(|pid| processes.resume(*pid));
        let decision = policy.decide(&seen, passed);
        let is_short = !suspended.is_empty() || matches!(decision, Decision::Suspend(_));
        let is_crowded = processes.is_crowded();
        let is_over = policy.over() > SLACK;
        processes.take_turns(if is_over { is_short || is_crowded } else { is_short && is_crowded });
        match decision {
            Decision::Suspend(pids) => {
                // A process that is gone needs no memory.
                pids.into_iter().for_each(|pid| _ = processes.suspend(pid));
            }
            Decision::Resume(pids) => pids.into_iter().for_each(|pid| processes.resume(pid)),
            Decision::Leave => {}
        }
    }
    processes.take_turns(false);
    processes.release_all();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes without a kernel. Each that runs makes `faults` major faults between looks.
    struct Play {
        policy: Policy,
        seen: Vec<ProcessSample>,
        faults: u64,
        suspensions: usize,
    }

    impl Play {
        fn new(cpus: usize, processes: i32, faults: u64) -> Self {
            let process = |pid| {
                let started = pid as u64;
                let (major_faults, is_running, is_waiting) = (0, true, false);
                let is_fork = false;
                let activity = Activity { started, major_faults, is_running, is_waiting, is_fork };
                ProcessSample { pid, activity, is_suspended: false }
            };
            let seen = (1..=processes).map(process).collect();
            Self { policy: Policy::new(cpus), seen, faults, suspensions: 0 }
        }

        fn look(&mut self) {
            for process in self.seen.iter_mut().filter(|process| !process.is_suspended) {
                process.activity.major_faults += self.faults;
            }
            let decision = self.policy.decide(&self.seen, TICK);
            for process in &mut self.seen {
                match &decision {
                    Decision::Suspend(pids) if pids.contains(&process.pid) => {
                        assert!(!process.is_suspended);
                        process.is_suspended = true;
                        self.suspensions += 1;
                    }
                    Decision::Resume(pids) if pids.contains(&process.pid) => {
                        process.is_suspended = false;
                    }
                    _ => {}
                }
            }
        }

        fn free(&self) -> Vec<i32> {
            let free = self.seen.iter().filter(|process| !process.is_suspended);
            free.map(|process| process.pid).collect()
        }

        fn looks(&mut self, time: Duration) {
            (0..time.as_millis() / TICK.as_millis()).for_each(|_| self.look());
        }
    }

    #[test]
    fn as_many_run_as_there_are_cpus_the_oldest() {
        let mut play = Play::new(2, 24, 100);
        play.looks(Duration::from_secs(2));
        for _ in 0..100 {
            play.look();
            // Load control tries one more process at times, because only running it shows whether
            // it fits.
            assert!(play.free() == [1, 2] || play.free() == [1, 2, 3], "{:?}", play.free());
        }
    }

    #[test]
    fn no_process_that_computes_or_has_a_cpu_is_suspended() {
        let mut computing = Play::new(2, 24, 1);
        computing.looks(Duration::from_secs(5));
        assert_eq!(computing.suspensions, 0, "24 x 20 faults a second");
        let mut two = Play::new(2, 2, 1000);
        two.looks(Duration::from_secs(5));
        assert_eq!(two.suspensions, 0);
    }

    #[test]
    fn as_many_are_released_as_cpus_are_idle() {
        let mut play = Play::new(64, 100, 0);
        play.seen.iter_mut().for_each(|process| process.is_suspended = true);
        play.looks(5 * TICK);
        assert!((64..=70).contains(&play.free().len()), "{:?}", play.free());
    }

    /// Has a suspended process that no look sees. Notes the last process resumed.
    struct Unseen(AtomicUsize);

    impl Suspendable for Arc<Unseen> {
        fn suspended(&self) -> Vec<i32> {
            vec![7]
        }
        fn all(&self) -> Vec<(i32, Activity)> {
            Vec::new()
        }
        fn suspend(&self, _: i32) -> bool {
            false
        }
        fn resume(&self, pid: i32) {
            self.0.store(pid as usize, Relaxed);
        }
        fn release_all(&self) {}
    }

    #[test]
    fn processes_that_can_no_longer_be_seen_are_released() {
        let unseen = Arc::new(Unseen(AtomicUsize::new(0)));
        let control = LoadControl::start(unseen.clone(), 2).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while unseen.0.load(Relaxed) != 7 && Instant::now() < until {
            std::thread::sleep(TICK);
        }
        control.end();
        assert_eq!(unseen.0.load(Relaxed), 7);
    }

    #[test]
    fn a_slow_disk_is_noticed_by_the_processes_that_wait_for_it() {
        let mut play = Play::new(2, 10, 1);
        for process in &mut play.seen {
            process.activity.is_running = false;
            process.activity.is_waiting = true;
        }
        play.looks(Duration::from_secs(2));
        assert!(play.free().len() <= 3, "{:?}: 200 faults a second, waited for", play.free());
    }

    #[test]
    fn a_process_that_ends_makes_room_for_the_oldest_suspended_one() {
        let mut play = Play::new(2, 8, 100);
        play.looks(Duration::from_secs(2));
        play.seen.remove(0);
        play.looks(Duration::from_secs(1));
        assert!(play.free().starts_with(&[2, 3]) && play.free().len() <= 3);
    }

    #[test]
    fn when_no_process_is_busy_all_are_released() {
        let mut play = Play::new(2, 8, 100);
        play.looks(Duration::from_secs(2));
        assert!(play.free().len() < 8);
        // The two running processes wait for a suspended one. Each process that is resumed waits,
        // too.
        for process in &mut play.seen {
            process.activity.is_running = false;
        }
        play.faults = 0;
        play.looks(Duration::from_secs(5));
        assert_eq!(play.free().len(), 8);
    }

    #[test]
    fn each_process_gets_a_turn() {
        let mut play = Play::new(2, 6, 100);
        play.looks(Duration::from_secs(5));
        let mut ran = std::collections::HashSet::new();
        for _ in 0..(60_000 / TICK.as_millis()) {
            play.look();
            ran.extend(play.free());
        }
        assert_eq!(ran.len(), 6, "{ran:?}");
        assert!(play.free().len() <= 4);
    }
}

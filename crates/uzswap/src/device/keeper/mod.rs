//! The process that is responsible for the changes on the machine. There is one on a machine.
//!
//! ```text
//! run ─┐                  ┌─ starts, and watches over, the daemon
//! run ─┼─ join ─> keeper ─┼─ has the kernel swap to as many areas as are needed (space.rs)
//! run ─┘                  └─ undoes everything when the last run has left (ledger.rs)
//! ```
//! A run takes part while its socket is open. The keeper notices a killed run, ends its command and
//! removes its group. `serve` is the same process, in the foreground, until it gets a signal to
//! end.
//!
//! When the keeper is killed, the daemon starts another keeper. The new keeper takes over, and the
//! runs reconnect to it. When the daemon is killed, the keeper starts another daemon, which
//! continues with the same memory (kept.rs); programs notice only a pause. When both are killed,
//! the swapped pages are lost, and the next keeper undoes the remaining changes.

mod areas;
mod daemon;
pub(super) mod decide;
pub(super) mod members;
pub(super) mod phase;
mod replace;

use crate::device::folder::{self, Lock};
use crate::device::group;
use crate::device::kept::{KeptDaemon, Start};
use crate::device::ledger::{self, LedgerState, RunChange, StandIn};
use crate::device::options::DaemonOptions;
use crate::device::phase::Phased;
use crate::device::processes::{self, OWN_PROGRAM, ProcessId};
use crate::device::shortage::Shortage;
use crate::device::space::{Full, Space};
use crate::device::wire::{Ask, Tell, Wire};
use crate::error::Failure;
use crate::stdio::say;
use areas::Maker;
use daemon::RoomLook;
use decide::{ShortLives, Task, task};
use members::Member;
use phase::Phase;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};
use uzswap_block::Room;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::{cgroup, cpu, process};

/// The time in which runs must reconnect to a keeper that took over.
const COME_BACK: Duration = Duration::from_secs(10);

/// The interval at which the keeper, while it waits for the daemon's answer, checks that the daemon
/// lives.
const LOOK: Duration = Duration::from_millis(10);

/// The pause between attempts to switch off an area whose pages do not fit in memory.
const RETRY: Duration = Duration::from_secs(2);

/// `uzswap keeper`: started by the first run, or by a daemon whose keeper died.
pub fn keeper(adopted_lock: Option<i32>) -> Result<(), Failure> {
    // After an error inherited descriptors stay open, and processes that wait for their end wait
    // longer.
    if adopted_lock.is_none() {
        let _ = process::close_inherited(None);
    }
    let wire = Wire::of_stdin().map_err(started_by)?;
    // The call fails if a shell with job control has made this process the leader of a group. Such
    // a group suffices.
    let _ = process::leave_session();
    let Some(number) = adopted_lock else { return first(wire) };
    let lock = process::take_inherited(number).map_err(started_by)?;
    let mut keeper = Keeper::take_over(Lock(lock.into()), wire)?;
    keeper.keep(|| ());
    Ok(())
}

fn started_by(error: io::Error) -> Failure {
    Failure::new(format!("the keeper is started by run: {error}"))
}

/// Begins for a run, to which it reports every failure.
fn first(mut wire: Wire) -> Result<(), Failure> {
    let Ask::Join { run, options: Some(options) } = wire.receive().map_err(started_by)? else {
        return Err(Failure::new("the keeper is started by run"));
    };
    // Errors of sending are ignored: the run is gone, and no other process reads the message.
    let lock = match Lock::take() {
        Ok(Some(lock)) => lock,
        Ok(None) => {
            let _ = wire.send(&Tell::Busy);
            return Ok(());
        }
        Err(error) => {
            let _ = wire.send(&Tell::Refused(cannot_lock(&error)));
            return Ok(());
        }
    };
    // A later message on standard error would appear amid the output of other commands.
    let _ = process::silence_errors();
    match Keeper::begin(lock, *options, false) {
        Ok(mut keeper) => {
            let index = keeper.add(wire);
            keeper.join(index, run);
            keeper.keep(|| ());
        }
        Err(failure) => _ = wire.send(&Tell::Refused(failure.to_string())),
    }
    Ok(())
}

/// The message if the lock cannot be made.
pub fn cannot_lock(error: &io::Error) -> String {
    format!("cannot make {}: {error}; it needs root", folder::FOLDER)
}

/// See the module.
pub struct Keeper {
    phase: Phase,
    state: LedgerState,
    /// Held until the end.
    lock: Lock,
    /// The wire to the daemon; `None` before the daemon's start and after its death.
    daemon: Option<Wire>,
    /// The daemon's process, if this keeper started it.
    daemon_child: Option<Child>,
    /// The memory that outlives a daemon.
    kept: Option<KeptDaemon>,
    /// The program of the next daemon.
    program: PathBuf,
    /// When the daemon started, and the consecutive daemons that died soon after their start.
    daemon_since: Instant,
    short_lives: ShortLives,
    options: DaemonOptions,
    /// Memory of the machine, bytes.
    ram: u64,
    space: Space,
    /// The room of the cache, as the daemon reports it.
    room: RoomLook,
    /// Watches, with `serve`, for a machine that stands still.
    shortage: Option<Shortage>,
    listener: UnixListener,
    members: Vec<Member>,
    /// The signal handlers write a byte here for each signal.
    signals: UnixStream,
    /// The time after which runs of a dead keeper that have not reconnected count as ended.
    orphans_until: Option<Instant>,
    /// The process that makes a further area, and its result until the keeper looks at it.
    maker: Option<Maker>,
    made: Option<Result<(), Failure>>,
    /// The process that switches the areas off.
    off: Option<Child>,
    /// The time from which the kernel may be asked again to read everything back.
    retry_at: Option<Instant>,
    /// Processes that are over, until they can be reaped.
    buried: Vec<Child>,
    notes: Vec<String>,
    cleaned: Vec<String>,
    is_told_to_end: bool,
    has_taken_over: bool,
    /// True if no daemon can continue, so that the swapped pages are lost.
    is_lost: bool,
    /// Once the pages are lost, answers for the dead daemon's devices.
    stand_in: Option<StandIn>,
    /// The changes that could not be undone.
    troubles: Vec<String>,
}

impl Keeper {
    /// Sets everything up: undoes the changes that others left, starts the daemon, and has the
    /// kernel swap to it.
    pub fn begin(lock: Lock, options: DaemonOptions, is_serving: bool) -> Result<Self, Failure> {
        spare();
        let cleaned = ledger::clean_up(&lock);
        if cleaned.is_in_use {
            return Err(Failure::new(cleaned.left.join("; ")));
        }
        // The clean-up may have removed the folder, with the lock in it.
        let lock = match cleaned.done.is_empty() {
            true => lock,
            false => retake(lock)?,
        };
        let state = LedgerState { keeper: ProcessId::own(), is_serving, ..LedgerState::default() };
        folder::make_mount_points().map_err(cannot_start)?;
        let ram = cpu::memory_info().map_err(cannot_start)?.total;
        let mut keeper = Self::new(lock, state, options, ram)?;
        keeper.cleaned = cleaned.done.into_iter().chain(cleaned.left).collect();
        match keeper.set_up() {
            Ok(()) => {
                keeper.phase.become_next(Phase::Serving);
                Ok(keeper)
            }
            Err(failure) => {
                if keeper.phase == Phase::Starting {
                    keeper.begin_emptying();
                }
                keeper.keep(|| ());
                Err(failure)
            }
        }
    }

    /// A keeper without a daemon and areas.
    fn new(
        lock: Lock,
        state: LedgerState,
        options: DaemonOptions,
        ram: u64,
    ) -> Result<Self, Failure> {
        let (signals, notify) = UnixStream::pair().map_err(cannot_start)?;
        catch_signals(&notify, state.is_serving)?;
        Ok(Self {
            phase: Phase::Starting,
            lock,
            daemon: None,
            daemon_child: None,
            kept: None,
            program: OWN_PROGRAM.into(),
            daemon_since: Instant::now(),
            short_lives: ShortLives::default(),
            space: Space::new(u64::from(options.pages) * PAGE_BYTES as u64),
            room: RoomLook::default(),
            options,
            ram,
            shortage: None,
            listener: listen()?,
            members: Vec::new(),
            signals,
            orphans_until: None,
            maker: None,
            made: None,
            off: None,
            retry_at: None,
            buried: Vec::new(),
            notes: Vec::new(),
            cleaned: Vec::new(),
            is_told_to_end: false,
            has_taken_over: false,
            is_lost: false,
            stand_in: None,
            troubles: Vec::new(),
            state,
        })
    }

    fn set_up(&mut self) -> Result<(), Failure> {
        self.save()?;
        match group::for_daemon() {
            Ok(place) => self.state.group = place,
            Err(failure) => self.notes.push(failure.to_string()),
        }
        self.save()?;
        match KeptDaemon::open(&self.options)? {
            Ok(kept) => {
                self.kept = Some(kept);
                self.state.outlives_daemon = true;
            }
            Err(why) => self
                .notes
                .push(format!("if the daemon is killed, the swapped pages are lost: {why}")),
        }
        self.start_daemon()?;
        if self.state.is_serving {
            match Shortage::start() {
                Ok(shortage) => self.shortage = Some(shortage),
                Err(error) => self.notes.push(format!(
                    "when memory runs out the machine may stand still for long: {error}"
                )),
            }
        }
        if self.state.is_serving || !cgroup_refuses_zswap() {
            self.state.switch_zswap_off().map_err(|error| {
                Failure::new(format!("cannot switch the kernel's zswap off: {error}"))
            })?;
        }
        self.make_first_area()
    }

    fn make_first_area(&mut self) -> Result<(), Failure> {
        let mut has_looked = false;
        loop {
            self.ask_for_room();
            if let Some(room) = self.room.take_new() {
                let areas = self.state.areas_on().map_err(cannot_start)?;
                self.space.look(&areas, room.bytes);
                has_looked = true;
            }
            if has_looked {
                self.grow()?;
                if !self.has_maker() && self.made.is_none() {
                    return Ok(());
                }
            }
            self.wait().map_err(cannot_start)?;
            if self.is_lost {
                return Err(Failure::new("no daemon can serve"));
            }
        }
    }

    /// Takes over from a keeper that died. The daemon of that keeper has started this process.
    fn take_over(lock: Lock, mut daemon: Wire) -> Result<Self, Failure> {
        spare();
        let start: Start = daemon.receive().map_err(cannot_start)?;
        let Start { daemon: daemon_id, serves, options, ram, kept, .. } = start;
        let take = |numbers| KeptDaemon::inherited(&numbers, process::take_inherited);
        // After an error, a kill of the daemon loses the swapped pages.
        let kept = kept.and_then(|numbers| take(numbers).ok());
        let mut state = LedgerState::read().map_err(cannot_start)?;
        // There may never be two keepers, and the old keeper may write the list until it ends.
        if let Some(before) = state.keeper {
            while !processes::wait_for(COME_BACK, || before.is_over()) {}
            state = LedgerState::read().map_err(cannot_start)?;
        }
        state.outlives_daemon = kept.is_some();
        state.keeper = ProcessId::own();
        // The old keeper may have been killed before it wrote the daemon's number down.
        state.daemon = daemon_id;
        // No process is left that could order `serve` to end.
        let is_told_to_end = state.is_serving;
        let mut keeper = Self::new(lock, state, options, ram)?;
        keeper.is_told_to_end = is_told_to_end;
        keeper.has_taken_over = true;
        keeper.daemon = Some(daemon);
        keeper.kept = kept;
        keeper.orphans_until = Some(Instant::now() + COME_BACK);
        keeper.phase.become_next(Phase::Serving);
        keeper.save()?;
        match serves {
            true => keeper.tell_devices(),
            false => keeper.go_on(),
        }
        Ok(keeper)
    }

    fn save(&self) -> Result<(), Failure> {
        self.state.write().map_err(cannot_write)
    }

    /// Works until no process needs the cache, and undoes everything. Calls `also` several times a
    /// second.
    pub fn keep(&mut self, mut also: impl FnMut()) {
        while self.phase != Phase::Over {
            if let Err(error) = self.wait() {
                self.trouble(format!("the keeper cannot wait: {error}"));
            }
            self.tick();
            also();
        }
    }

    /// The changes that could not be undone, at the end.
    pub fn troubles(&mut self) -> Vec<String> {
        std::mem::take(&mut self.troubles)
    }

    /// True if the swapped pages are lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// The devices that the kernel swaps to.
    pub fn devices(&self) -> Vec<String> {
        self.state.devices().map(|device| device.display().to_string()).collect()
    }

    /// The features that are missing, and the remains of others that were found.
    pub fn remarks(&self) -> impl Iterator<Item = &String> {
        self.cleaned.iter().chain(&self.notes)
    }

    /// True if the keeper has switched the kernel's zswap off.
    pub fn has_switched_zswap_off(&self) -> bool {
        self.state.zswap_was_on
    }

    /// Notes a missing feature, once.
    fn note(&mut self, what: String) {
        if !self.notes.contains(&what) {
            self.notes.push(what);
        }
    }

    /// With `serve` it prints the trouble now; otherwise the last run gets it.
    fn trouble(&mut self, what: String) {
        match self.state.is_serving {
            true => say!("uzswap: {what}"),
            false => self.troubles.push(what),
        }
    }

    /// True if a process needs the cache, or may need it later.
    fn is_wanted(&self) -> bool {
        !self.state.runs.is_empty() || self.state.is_serving && !self.is_told_to_end
    }

    /// Waits for an event and handles it.
    fn wait(&mut self) -> io::Result<()> {
        let timeout = self.space.pause();
        let listens = self.phase != Phase::Starting;
        let of = |fd, is_asked| {
            PollFd::from_borrowed_fd(fd, if is_asked { PollFlags::IN } else { PollFlags::empty() })
        };
        let mut polled = vec![of(self.signals.as_fd(), true), of(self.listener.as_fd(), listens)];
        let daemon = self.daemon.as_ref().map(|daemon| polled.push(of(daemon.as_fd(), true)));
        let maker = self.maker.as_ref().map(|maker| polled.push(of(maker.wire.as_fd(), true)));
        let others = polled.len();
        polled.extend(self.members.iter().map(|member| {
            let more = if member.has_waiting() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(&member.wire, PollFlags::IN | more)
        }));
        let time = Timespec { tv_sec: 0, tv_nsec: timeout.as_nanos() as i64 };
        match poll(&mut polled, Some(&time)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            other => other?,
        };
        let ready: Vec<_> = polled.iter().map(PollFd::revents).collect();
        let is_ready = |index: usize| !ready[index].is_empty();
        // The keeper handles members first, since the other events may change their indices.
        for index in (others..ready.len()).rev().filter(|index| is_ready(*index)) {
            self.members[index - others].tell_what_waits();
            if ready[index] != PollFlags::OUT {
                self.hear(index - others);
            }
        }
        if listens && is_ready(1) {
            let (stream, _) = self.listener.accept()?;
            self.add(Wire::new(stream));
        }
        if maker.is_some() && is_ready(others - 1) {
            self.hear_maker();
        }
        if daemon.is_some() && is_ready(2) && self.has_dead_daemon() {
            self.daemon_died();
        }
        if is_ready(0) {
            self.signalled()?;
        }
        Ok(())
    }

    fn signalled(&mut self) -> io::Result<()> {
        io::Read::read(&mut self.signals, &mut [0; 64])?;
        let places = self.state.runs.iter().filter_map(|run| run.place.as_ref());
        for place in places.filter(|place| place.borrowed.is_none()) {
            place.group().signal(SIGTERM);
        }
        self.tell_all(&Tell::Detach);
        self.is_told_to_end = self.state.is_serving;
        Ok(())
    }

    /// The periodic work.
    fn tick(&mut self) {
        // An error means that the process is not our child.
        self.buried.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.look_for_orphans();
        if self.daemon.is_some() && self.state.daemon.is_some_and(|daemon| daemon.is_ending()) {
            self.daemon_died();
        }
        let is_early = self.retry_at.is_some_and(|at| Instant::now() < at);
        match task(self.phase, self.is_wanted(), is_early) {
            Task::Serve => self.serve(),
            Task::BeginEmptying => self.begin_emptying(),
            Task::Empty => self.empty(),
            Task::End => self.end(),
            Task::Become(next) => self.phase.become_next(next),
            Task::Wait => {}
        }
    }

    /// Ends the commands of runs that are gone since the last keeper died.
    fn look_for_orphans(&mut self) {
        if self.orphans_until.is_none_or(|until| Instant::now() <= until) {
            return;
        }
        let back: Vec<_> = self.members.iter().filter_map(|member| member.run).collect();
        let is_back = |run: &RunChange| back.contains(&run.run.pid);
        // A run that is stopped or gets no CPU reconnects later.
        self.bury_runs(|run| !is_back(run) && process::is_gone(run.run.pid));
        let is_complete = self.state.runs.iter().all(is_back);
        self.orphans_until = (!is_complete).then(|| Instant::now() + COME_BACK);
    }

    fn serve(&mut self) {
        self.ask_for_room();
        let Some(room) = self.room.take_new() else { return };
        // If the kernel's list cannot be read now, the next call tries again.
        let Ok(areas) = self.state.areas_on() else { return };
        if let Some(is_full) = self.space.look(&areas, room.bytes) {
            self.tell_all(&Tell::Full(is_full == Full::Yes));
        }
        self.watch_shortage(room);
        if let Err(failure) = self.grow()
            && !self.is_lost
        {
            self.space.cannot_grow();
            self.note(format!("swap space could not grow: {failure}; uzswap tries again"));
        }
    }
}

impl Keeper {
    /// Passes the state of the cache at the last look to the thread that watches for a shortage of
    /// memory.
    fn watch_shortage(&mut self, room: Room) {
        let Some(shortage) = &mut self.shortage else { return };
        for _ in 0..shortage.looked(self.space.is_full(), room) {
            say!(
                "uzswap: the cache is full and the machine stands still for want of memory: the \
                 kernel was asked to end a process; see its log"
            );
        }
    }
}

/// Makes this process independent of its own device. The keeper starts the next daemon while no
/// page is served. So none of the keeper's memory may be swapped out, and its allocations must not
/// wait for a page to be swapped out. Without the permission the keeper continues unprotected.
fn spare() {
    process::raise_descriptor_limit();
    let _ = process::lock_memory();
    let _ = process::set_io_flusher(true);
}

fn cannot_write(error: io::Error) -> Failure {
    Failure::new(format!("cannot write in {}: {error}", folder::FOLDER))
}

fn cannot_start(error: io::Error) -> Failure {
    Failure::new(format!("cannot start the daemon: {error}"))
}

/// Takes the lock again after its folder was removed.
fn retake(lock: Lock) -> Result<Lock, Failure> {
    drop(lock);
    let cannot = |error| Failure::new(cannot_lock(&error));
    let lock = Lock::take().map_err(cannot)?;
    lock.ok_or_else(|| Failure::new("another run has just started; try again"))
}

fn listen() -> Result<UnixListener, Failure> {
    let path = folder::socket();
    // A socket that a dead keeper left.
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(cannot_start)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(cannot_start)?;
    Ok(listener)
}

fn catch_signals(notify: &UnixStream, is_serving: bool) -> Result<(), Failure> {
    let hangup = ends_on_hangup(is_serving).then_some(SIGHUP);
    for signal in [SIGTERM, SIGINT].into_iter().chain(hangup) {
        let end = notify.try_clone().map_err(cannot_start)?;
        signal_hook::low_level::pipe::register(signal, end).map_err(cannot_start)?;
    }
    Ok(())
}

/// True if SIGHUP means that the terminal is gone. For `serve` without a terminal it means that the
/// configuration is to be read again.
pub fn ends_on_hangup(is_serving: bool) -> bool {
    !is_serving || std::io::stdin().is_terminal()
}

/// True if groups can keep their pages from the kernel's zswap. Then zswap may stay on for the rest
/// of the machine.
fn cgroup_refuses_zswap() -> bool {
    cgroup::Hierarchy::find().is_some_and(|hierarchy| hierarchy.can_refuse_zswap())
}

//! The process that answers for what is changed on the machine: one a machine.
//!
//! ```text
//! run ─┐                  ┌─ starts, and watches over, the daemon
//! run ─┼─ join ─> keeper ─┼─ has the kernel swap to as many areas as are needed (space.rs)
//! run ─┘                  └─ undoes everything when the last run has left (changes.rs)
//! ```
//! A run takes part as long as its socket is open: one that was killed is noticed, its command
//! ended and its group removed. `serve` is the same process, in the foreground, until it is told to
//! end. When the keeper is killed, the daemon starts another one, which takes over, and the runs
//! come back to it. When the daemon is killed, the keeper starts another one, which goes on where
//! it was (kept.rs); nobody notices but by a pause. When both are, what is swapped out is lost, and
//! whoever comes next undoes what they left.

mod replace;

use crate::changes::{self, AreaChange, Lock, OWN_PROGRAM, ProcessId, RunChange, StandIn, State};
use crate::error::Failure;
use crate::group;
use crate::kept::{Kept, Start};
use crate::options::DaemonOptions;
use crate::say::say;
use crate::shortage::Shortage;
use crate::space::{self, Full, Space};
use crate::wire::{Ask, Joined, Order, Place, Report, RunInfo, Tell, Wire};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use uzswap_block::switch_on;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::swap::{self, PRIORITY_MAX};
use uzswap_sys::{cgroup, cpu, process};

/// How long runs have to come back to a keeper that took over.
const COME_BACK: Duration = Duration::from_secs(10);

/// How often it looks whether the daemon lives while it waits for its answers.
const LOOK: Duration = Duration::from_millis(10);

/// How often it tries again to switch off what does not fit in memory.
const RETRY: Duration = Duration::from_secs(2);

/// The first argument of both processes: systemd spares who has this in front of its name when it
/// shuts the machine down, until swapping is off.
const SPARED_NAME: &str = "@uzswap";

/// A process of ours, with `arguments`, that is spared at shutdown, and a wire to it.
pub fn start_spared(arguments: &[String]) -> io::Result<(Child, Wire)> {
    start_spared_of(Path::new(OWN_PROGRAM), arguments)
}

/// The same of another program than this process runs.
fn start_spared_of(program: &Path, arguments: &[String]) -> io::Result<(Child, Wire)> {
    let (ours, theirs) = Wire::pair()?;
    let child = spared(program, arguments, theirs).spawn()?;
    Ok((child, ours))
}

/// A process of ours that is spared at shutdown, of a program, with the end of its wire.
pub fn spared(program: &Path, arguments: &[String], wire: OwnedFd) -> Command {
    let mut command = Command::new(program);
    command.arg0(SPARED_NAME).args(arguments).stdin(wire).stdout(std::process::Stdio::null());
    command
}

/// `uzswap keeper`: started by the first run, or by a daemon whose keeper died.
pub fn keeper(adopted_lock: Option<i32>) -> Result<(), Failure> {
    // An error: they stay open, for whoever waits for their end.
    if adopted_lock.is_none() {
        let _ = process::close_inherited(None);
    }
    let wire = Wire::of_stdin().map_err(started_by)?;
    // Already a leader when started from a shell with job control: as good.
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

/// Begins for a run, which is told of everything.
fn first(mut wire: Wire) -> Result<(), Failure> {
    let Ask::Join { run, options: Some(options) } = wire.receive().map_err(started_by)? else {
        return Err(Failure::new("the keeper is started by run"));
    };
    // An error of sending: the run is gone, and nobody else is there to hear.
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
    // What it could say later, nobody would connect with the run that reads it.
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

/// Why the lock cannot be had.
pub fn cannot_lock(error: &io::Error) -> String {
    format!("cannot make {}: {error}; it needs root", changes::FOLDER)
}

/// Somebody who has a wire to us.
struct Member {
    wire: Wire,
    /// The run that it is, by the number of its process.
    run: Option<i32>,
}

/// See the module.
pub struct Keeper {
    state: State,
    /// Held until the end.
    lock: Lock,
    /// `None` before it was started, and after it died.
    daemon: Option<Wire>,
    /// Its process, where this one has started it.
    daemon_child: Option<Child>,
    /// What outlives it.
    kept: Option<Kept>,
    /// What the next one runs.
    program: PathBuf,
    /// When it was started, and how many in a row were so for no time.
    daemon_since: Instant,
    short_lives: u32,
    options: DaemonOptions,
    /// Memory of the machine, bytes.
    ram: u64,
    space: Space,
    /// Of `serve`: looks whether the machine stands still.
    shortage: Option<Shortage>,
    listener: UnixListener,
    members: Vec<Member>,
    /// Signals come out here.
    signals: UnixStream,
    /// Runs that took part under a keeper that died, until then.
    orphans_until: Option<Instant>,
    /// Areas are being switched off, by this process.
    off: Option<(Child, Vec<swap::Area>)>,
    notes: Vec<String>,
    cleaned: Vec<String>,
    is_told_to_end: bool,
    /// The daemon died.
    is_lost: bool,
    /// Answers for its devices then.
    stand_in: Option<StandIn>,
    /// What could not be undone.
    troubles: Vec<String>,
}

impl Keeper {
    /// Makes everything: undoes what others left, starts the daemon, and has the kernel swap to it.
    pub fn begin(lock: Lock, options: DaemonOptions, is_serving: bool) -> Result<Self, Failure> {
        spare();
        let cleaned = changes::clean_up(&lock);
        // The folder may have gone with what was in it.
        let lock = match cleaned.done.is_empty() {
            true => lock,
            false => retake(lock)?,
        };
        let state = State { keeper: ProcessId::own(), is_serving, ..State::default() };
        let (signals, notify) = UnixStream::pair().map_err(cannot_start)?;
        catch_signals(&notify, is_serving)?;
        changes::make_mount_points().map_err(cannot_start)?;
        let ram = cpu::memory_info().map_err(cannot_start)?.total;
        let listener = listen()?;
        let space = Space::new(u64::from(options.pages) * PAGE_BYTES as u64);
        let mut keeper = Self {
            state,
            lock,
            daemon: None,
            daemon_child: None,
            kept: None,
            program: OWN_PROGRAM.into(),
            daemon_since: Instant::now(),
            short_lives: 0,
            options,
            ram,
            space,
            shortage: None,
            listener,
            members: Vec::new(),
            signals,
            orphans_until: None,
            off: None,
            notes: Vec::new(),
            cleaned: cleaned.done.into_iter().chain(cleaned.left).collect(),
            is_told_to_end: false,
            is_lost: false,
            stand_in: None,
            troubles: Vec::new(),
        };
        let begun = keeper.set_up();
        if begun.is_err() {
            keeper.end();
        }
        begun.map(|()| keeper)
    }

    fn set_up(&mut self) -> Result<(), Failure> {
        self.save()?;
        match group::for_daemon() {
            Ok(place) => self.state.group = place,
            Err(failure) => self.notes.push(failure.to_string()),
        }
        self.save()?;
        match Kept::open(&self.options)? {
            Ok(kept) => {
                self.kept = Some(kept);
                self.state.outlives_daemon = true;
            }
            Err(why) => self
                .notes
                .push(format!("if the daemon is killed, what is swapped out goes with it: {why}")),
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
        loop {
            let areas = self.state.areas_on();
            self.space.look(&areas, space::room(&changes::mount()));
            let Some(part) = self.space.wants(&areas) else { return Ok(()) };
            self.extend(part)?;
        }
    }

    /// Starts a daemon: the first, or one that goes on with the devices of the one before.
    fn start_daemon(&mut self) -> Result<(), Failure> {
        let before = self.state.daemon;
        let number = self.lock.0.as_raw_fd().to_string();
        self.let_inherit(true).map_err(cannot_start)?;
        let arguments = ["daemon".into(), "--lock".into(), number];
        let started = start_spared_of(&self.program, &arguments);
        self.let_inherit(false).map_err(cannot_start)?;
        let (child, wire) = started.map_err(cannot_start)?;
        self.state.daemon = ProcessId::of(child.id());
        self.daemon_child = Some(child);
        let start = Start {
            daemon: None,
            serves: false,
            options: self.options.clone(),
            ram: self.ram,
            kept: self.kept.as_ref().map(Kept::numbers),
            devices: before.map(|_| self.state.devices().cloned().collect()),
        };
        // Before anything else: once it has this it can do without us.
        let daemon = self.daemon.insert(wire);
        daemon.send(&start).map_err(cannot_start)?;
        self.state.write().map_err(cannot_write)?;
        let notes = self.await_daemon()?;
        if before.is_none() {
            self.notes.extend(notes);
        }
        Ok(())
    }

    /// Waits until the daemon serves; its notes.
    fn await_daemon(&mut self) -> Result<Vec<String>, Failure> {
        match self.daemon.as_mut().map(Wire::receive) {
            Some(Ok(Report::Ready { transport, notes })) => {
                self.options.transport.clone_from(&transport);
                self.state.transport = transport;
                self.daemon_since = Instant::now();
                self.save().map(|()| notes)
            }
            Some(Ok(Report::Failed(message))) => Err(Failure::new(message)),
            Some(Ok(Report::Attached(_)) | Err(_)) | None => {
                Err(Failure::new("the daemon ended before it was ready"))
            }
        }
    }

    /// Has the next process inherit what a daemon needs; or no more.
    fn let_inherit(&self, is_inherited: bool) -> io::Result<()> {
        let lock = self.lock.0.as_fd();
        match is_inherited {
            true => process::let_inherit(lock)?,
            false => process::keep_from_inheriting(lock)?,
        }
        self.kept.iter().try_for_each(|kept| kept.let_inherit(is_inherited))
    }

    /// Takes over from a keeper that died: its daemon has started us.
    fn take_over(lock: Lock, mut daemon: Wire) -> Result<Self, Failure> {
        spare();
        let start: Start = daemon.receive().map_err(cannot_start)?;
        let Start { daemon: daemon_id, serves, options, ram, kept, .. } = start;
        let take = |numbers| Kept::inherited(&numbers, process::take_inherited);
        // An error: a daemon that is killed from now on takes what is swapped out with it.
        let kept = kept.and_then(|numbers| take(numbers).ok());
        let mut state = State::read().map_err(cannot_start)?;
        // Two may never answer for one machine, and what is written down is its last word.
        if let Some(before) = state.keeper {
            while !changes::wait_for(COME_BACK, || before.is_gone()) {}
            state = State::read().map_err(cannot_start)?;
        }
        state.outlives_daemon = kept.is_some();
        state.keeper = ProcessId::own();
        // The keeper before may have been killed before it wrote that down.
        state.daemon = daemon_id;
        let (signals, notify) = UnixStream::pair().map_err(cannot_start)?;
        catch_signals(&notify, false)?;
        let is_told_to_end = state.is_serving;
        let mut keeper = Self {
            lock,
            daemon: Some(daemon),
            daemon_child: None,
            kept,
            program: OWN_PROGRAM.into(),
            daemon_since: Instant::now(),
            short_lives: 0,
            space: Space::new(u64::from(options.pages) * PAGE_BYTES as u64),
            ram,
            shortage: None,
            options,
            listener: listen()?,
            members: Vec::new(),
            signals,
            orphans_until: Some(Instant::now() + COME_BACK),
            off: None,
            notes: Vec::new(),
            cleaned: Vec::new(),
            // Nobody is left who could tell us to.
            is_told_to_end,
            is_lost: false,
            stand_in: None,
            troubles: Vec::new(),
            state,
        };
        keeper.save()?;
        if !serves {
            keeper.go_on();
        }
        Ok(keeper)
    }

    fn save(&self) -> Result<(), Failure> {
        self.state.write().map_err(cannot_write)
    }

    /// Makes a further area, unless the daemon is killed meanwhile: a loop device that the kernel
    /// has not opened yet goes with it. Then another daemon serves, and the area is still wanted.
    fn extend(&mut self, part: std::ops::Range<u64>) -> Result<(), Failure> {
        let daemon = self.state.daemon;
        let attached = self.attach(part);
        if attached.is_err() && self.kept.is_some() && self.has_dead_daemon() {
            self.daemon_died();
        }
        let is_replaced = self.state.daemon != daemon && !self.is_lost;
        if is_replaced { Ok(()) } else { attached }
    }

    fn attach(&mut self, part: std::ops::Range<u64>) -> Result<(), Failure> {
        let gone = |error: io::Error| Failure::new(format!("the daemon does not answer: {error}"));
        let daemon = self
            .daemon
            .as_mut()
            .ok_or(io::ErrorKind::NotConnected)
            .map_err(|kind| gone(kind.into()))?;
        daemon.send(&Order::Attach(part.clone())).map_err(gone)?;
        let device = match daemon.receive().map_err(gone)? {
            Report::Attached(device) => device,
            Report::Failed(message) => return Err(Failure::new(message)),
            Report::Ready { .. } => return Err(gone(io::ErrorKind::InvalidData.into())),
        };
        let bytes = part.end - part.start;
        let index = self.state.areas.len() as u16;
        self.state.areas.push(AreaChange { device: device.clone(), bytes });
        self.save()?;
        let on = self.switch_on(device, bytes, PRIORITY_MAX - index);
        if on.is_err() {
            self.state.areas.pop();
        }
        if let Some(daemon) = &mut self.daemon {
            daemon.send(&Order::Settle).map_err(gone)?;
        }
        on
    }

    /// Has the kernel swap to a device. A thread waits for the daemon's answers to that, and if it
    /// is killed for the next one's, which this one starts.
    fn switch_on(&mut self, device: PathBuf, bytes: u64, priority: u16) -> Result<(), Failure> {
        let (tell, told) = channel();
        let switch = move || drop(tell.send(switch_on(&device, bytes, priority)));
        std::thread::Builder::new().spawn(switch).map_err(cannot_start)?;
        loop {
            match told.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if self.is_lost || !self.has_dead_daemon() => {}
                Err(RecvTimeoutError::Timeout) => self.daemon_died(),
                Ok(on) => return Ok(on?),
                Err(error) => return Err(cannot_start(io::Error::other(error))),
            }
        }
    }

    /// Works until nobody needs it any more, and undoes everything. Calls `also` several times a
    /// second.
    pub fn keep(&mut self, mut also: impl FnMut()) {
        while !self.is_over() {
            if let Err(error) = self.wait() {
                self.trouble(format!("the keeper cannot wait: {error}"));
            }
            self.tick();
            also();
        }
    }

    /// What could not be undone, once it is over.
    pub fn troubles(&mut self) -> Vec<String> {
        std::mem::take(&mut self.troubles)
    }

    /// Whether what was swapped out is lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// The devices that the kernel swaps to.
    pub fn devices(&self) -> Vec<String> {
        self.state.devices().map(|device| device.display().to_string()).collect()
    }

    /// What it goes on without, and what it found left by others.
    pub fn remarks(&self) -> impl Iterator<Item = &String> {
        self.cleaned.iter().chain(&self.notes)
    }

    /// Whether the kernel's zswap was switched off for it.
    pub fn has_switched_zswap_off(&self) -> bool {
        self.state.zswap_was_on
    }

    fn trouble(&mut self, what: String) {
        if self.state.is_serving {
            say!("uzswap: {what}");
        }
        self.troubles.push(what);
    }

    /// Whether anybody needs it, or may.
    fn is_wanted(&self) -> bool {
        let has_runs = !self.state.runs.is_empty();
        has_runs || self.off.is_some() || self.state.is_serving && !self.is_told_to_end
    }

    /// Ends, if it is time to; whether it has.
    fn is_over(&mut self) -> bool {
        !self.is_wanted() && self.end()
    }

    /// Undoes everything; `false` while it cannot.
    fn end(&mut self) -> bool {
        self.space.release();
        // From now on who comes finds nobody, and waits for the lock.
        let _ = fs::remove_file(changes::socket());
        let (daemon, mut wire) = (self.state.daemon, self.daemon.as_mut());
        let is_alive = wire.is_some();
        let mut end_daemon = || {
            // An error: it is gone.
            let _ = wire.as_mut().map(|wire| wire.send(&Order::End));
            let is_gone = || daemon.is_none_or(|daemon| !daemon.is_alive());
            if changes::wait_for(COME_BACK, is_gone) {
                return Ok(());
            }
            daemon.map_or(Ok(()), |daemon| process::kill(daemon.pid, libc::SIGKILL))
        };
        let stand_in = self.stand_in.take();
        let end_daemon: Option<&mut dyn FnMut() -> _> =
            if is_alive { Some(&mut end_daemon) } else { None };
        self.troubles = self.state.undo(end_daemon, stand_in);
        let is_done = !is_alive || !self.state.is_in_use();
        if !is_done {
            let pid = daemon.map_or(0, |daemon| daemon.pid);
            self.troubles.push(format!("the daemon ({pid}) goes on serving it, and tries again"));
        }
        if let (Some(mut daemon), true) = (self.daemon_child.take(), is_done) {
            // An error: it is not there to be waited for.
            let _ = daemon.wait();
        }
        self.tell_all(&Tell::Left { is_over: is_done, troubles: self.troubles.clone() });
        if !is_done {
            std::thread::sleep(RETRY);
        }
        is_done
    }

    fn tell_all(&mut self, what: &Tell) {
        for member in &mut self.members {
            // An error: it is gone, which its wire shows.
            let _ = member.wire.send(what);
        }
    }

    /// Waits until somebody wants something, and serves them.
    fn wait(&mut self) -> io::Result<()> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: self.space.pause().as_nanos() as i64 };
        let mut polled = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
        ];
        polled.extend(self.daemon.as_ref().map(|daemon| PollFd::new(daemon, PollFlags::IN)));
        let others = polled.len();
        let members = self.members.iter().map(|member| PollFd::new(&member.wire, PollFlags::IN));
        polled.extend(members);
        match poll(&mut polled, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            other => other?,
        };
        let ready: Vec<_> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
        // Members first: the others may change who they are.
        for index in (others..ready.len()).rev().filter(|index| ready[*index]) {
            self.hear(index - others);
        }
        if ready[1] {
            let (stream, _) = self.listener.accept()?;
            self.add(Wire::new(stream));
        }
        if others > 2 && ready[2] {
            self.daemon_died();
        }
        if ready[0] {
            self.signalled()?;
        }
        Ok(())
    }

    fn add(&mut self, wire: Wire) -> usize {
        self.members.push(Member { wire, run: None });
        self.members.len() - 1
    }

    /// Hears what a member says, or that it is gone.
    fn hear(&mut self, index: usize) {
        let said = self.members[index].wire.receive_some::<Ask>();
        match said {
            Ok(None) => {}
            Ok(Some(Ask::Join { run, .. })) => self.join(index, run),
            Ok(Some(Ask::Rejoin(pid))) => {
                let is_known = self.state.runs.iter().any(|run| run.run.pid == pid);
                self.members[index].run = is_known.then_some(pid);
                let answer = if is_known { Tell::Noted } else { Tell::Lost };
                let _ = self.members[index].wire.send(&answer);
                // The keeper before may have been killed while it replaced the daemon.
                let daemon = self.state.daemon.map_or(0, |daemon| daemon.pid);
                let _ = self.members[index].wire.send(&Tell::Replaced(daemon));
            }
            Ok(Some(Ask::Upgrade(program))) => self.upgrade(index, program),
            Ok(Some(Ask::Place(place))) => self.place(index, place),
            Ok(Some(Ask::Leave)) => self.leave(index),
            Err(_) => self.gone(index),
        }
    }

    fn join(&mut self, index: usize, run: RunInfo) {
        let is_first = self.state.runs.is_empty() && !self.state.is_serving;
        let joined = Joined {
            mount: changes::mount(),
            daemon: self.state.daemon.map_or(0, |daemon| daemon.pid),
            options: self.options.clone(),
            transport: self.state.transport.clone(),
            is_first,
            zswap_is_off: self.state.zswap_was_on,
            notes: self.notes.clone(),
            cleaned: std::mem::take(&mut self.cleaned),
        };
        self.members[index].run = Some(run.pid);
        self.state.runs.push(RunChange { run, place: None });
        let answer = match self.save() {
            Ok(()) => Tell::Joined(Box::new(joined)),
            Err(failure) => Tell::Refused(failure.to_string()),
        };
        // An error: it is gone, which the next look shows.
        let _ = self.members[index].wire.send(&answer);
        if self.state.runs.len() > 1 {
            self.tell_all(&Tell::Runs(self.state.runs.len()));
        }
    }

    fn place(&mut self, index: usize, place: Place) {
        let pid = self.members[index].run;
        if let Some(run) = self.state.run_in(&place.folder) {
            // Asked here, where one comes after the other: what the second one has seen as the
            // group's limit may be the first one's.
            let (path, other) = (place.folder.display(), run.run.pid);
            let refusal = format!("process {other} limits {path} already; end that first");
            let _ = self.members[index].wire.send(&Tell::Refused(refusal));
            return;
        }
        if let Some(run) = self.state.runs.iter_mut().find(|run| Some(run.run.pid) == pid) {
            run.place = Some(place);
        }
        // Not written down, the command must not begin: the run hears nothing, and gives up.
        if self.save().is_ok() {
            let _ = self.members[index].wire.send(&Tell::Noted);
        }
    }

    /// A run is over. The last one is answered when everything is undone.
    fn leave(&mut self, index: usize) {
        let pid = self.members[index].run.take();
        self.state.runs.retain(|run| Some(run.run.pid) != pid);
        let _ = self.save();
        if !self.state.runs.is_empty() || self.state.is_serving {
            let left = Tell::Left { is_over: false, troubles: Vec::new() };
            let _ = self.members[index].wire.send(&left);
        }
    }

    /// A member is gone; a run that has not left was killed.
    fn gone(&mut self, index: usize) {
        let member = self.members.swap_remove(index);
        let Some(pid) = member.run else { return };
        self.bury(|run| run.run.pid == pid);
    }

    /// Ends the commands of runs that were killed.
    fn bury(&mut self, is_dead: impl Fn(&RunChange) -> bool) {
        let (dead, alive) = std::mem::take(&mut self.state.runs).into_iter().partition(is_dead);
        self.state.runs = alive;
        let dead: Vec<RunChange> = dead;
        for place in dead.iter().filter_map(|run| run.place.as_ref()) {
            if let Err(error) = place.end() {
                self.trouble(error.to_string());
            }
        }
        let _ = self.save();
    }

    fn signalled(&mut self) -> io::Result<()> {
        io::Read::read(&mut self.signals, &mut [0; 64])?;
        let places = self.state.runs.iter().filter_map(|run| run.place.as_ref());
        for place in places.filter(|place| place.borrowed.is_none()) {
            place.group().signal(SIGTERM);
        }
        self.tell_all(&Tell::Detach);
        if self.state.is_serving {
            self.start_switching_off();
        }
        Ok(())
    }

    /// Has the kernel read everything back, by a process of its own, while we go on.
    fn start_switching_off(&mut self) {
        if self.off.is_some() {
            return;
        }
        self.space.release();
        let areas = self.state.areas_on();
        match changes::start_switching_off(&areas) {
            Ok(child) => self.off = Some((child, areas)),
            Err(error) => self.trouble(error.to_string()),
        }
    }

    /// What is to be done again and again.
    fn tick(&mut self) {
        if self.orphans_until.is_some_and(|until| Instant::now() > until) {
            let back: Vec<_> = self.members.iter().filter_map(|member| member.run).collect();
            let is_back = |run: &RunChange| back.contains(&run.run.pid);
            // One that is stopped, or starved of its CPU, comes back later.
            self.bury(|run| !is_back(run) && process::is_gone(run.run.pid));
            let is_complete = self.state.runs.iter().all(is_back);
            self.orphans_until = (!is_complete).then(|| Instant::now() + COME_BACK);
        }
        if let Some((mut child, areas)) = self.off.take() {
            match child.try_wait() {
                Ok(None) => self.off = Some((child, areas)),
                Ok(Some(status)) => {
                    match changes::wait_for_switching_off(&areas, status.success()) {
                        Ok(()) => self.is_told_to_end = true,
                        Err(error) => self.trouble(error.to_string()),
                    }
                }
                Err(error) => self.trouble(format!("swapoff: {error}")),
            }
            return;
        }
        if !self.is_wanted() {
            return;
        }
        let areas = self.state.areas_on();
        if let Some(is_full) = self.space.look(&areas, space::room(&changes::mount())) {
            self.tell_all(&Tell::Full(is_full == Full::Yes));
        }
        self.watch_shortage();
        if let Some(part) = self.space.wants(&areas)
            && let Err(failure) = self.extend(part)
            && !self.has_dead_daemon()
        {
            self.space.cannot_grow();
            self.notes.push(format!("swap space does not grow: {failure}"));
        }
    }
}

impl Keeper {
    /// Tells the thread that watches for a machine without memory of the last look at the cache.
    fn watch_shortage(&mut self) {
        let Some(shortage) = &mut self.shortage else { return };
        for _ in 0..shortage.looked(self.space.is_full(), &changes::mount()) {
            say!(
                "uzswap: the cache is full and the machine stands still for want of memory: the \
                 kernel was asked to end a process; see its log"
            );
        }
    }
}

/// Keeps this process out of what it answers for: it starts the next daemon when nobody answers, so
/// none of its memory may be swapped out, and to find memory it may not wait until something else
/// is. Where that is not permitted, it does without.
fn spare() {
    let _ = process::lock_memory();
    let _ = process::set_io_flusher(true);
}

fn cannot_write(error: io::Error) -> Failure {
    Failure::new(format!("cannot write in {}: {error}", changes::FOLDER))
}

fn cannot_start(error: io::Error) -> Failure {
    Failure::new(format!("cannot start the daemon: {error}"))
}

/// The lock again, after its folder was removed.
fn retake(lock: Lock) -> Result<Lock, Failure> {
    drop(lock);
    let cannot = |error| Failure::new(cannot_lock(&error));
    let lock = Lock::take().map_err(cannot)?;
    lock.ok_or_else(|| Failure::new("another run has just started; try again"))
}

fn listen() -> Result<UnixListener, Failure> {
    let path = changes::socket();
    // One that a keeper left which died.
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

/// What SIGHUP means: that the terminal is gone, or, to `serve` without one, that it should read
/// its configuration again.
pub fn ends_on_hangup(is_serving: bool) -> bool {
    !is_serving || std::io::stdin().is_terminal()
}

/// Whether groups can keep the kernel's zswap away from their pages: then it need not be switched
/// off for the whole machine.
fn cgroup_refuses_zswap() -> bool {
    cgroup::Hierarchy::find().is_some_and(|hierarchy| hierarchy.can_refuse_zswap())
}

//! The process that serves the device.
//!
//! The daemon is on the path by which the kernel frees memory. So it must never wait for memory,
//! and all its memory is locked. It runs in its own session, which the terminal's keys do not
//! reach, and in its own group. It ends only when its keeper orders that. It ignores signals: the
//! keeper answers a signal to all processes of a unit.
//!
//! When the keeper is gone, the daemon starts another keeper. When the daemon is killed, the keeper
//! starts another daemon, which continues with the memory that outlives a daemon (kept.rs). A
//! daemon that fails to take over stays alive, and an upgrade execs in place. Otherwise only the
//! keeper would have that memory, and a kill of the keeper would lose it (daemon/phase.rs).

pub mod phase;

use crate::cli::InheritArguments;
use crate::device::folder::{self, disk};
use crate::device::kept::{KeptDaemon, Start};
use crate::device::options::DaemonOptions;
use crate::device::phase::Phased;
use crate::device::processes::ProcessId;
use crate::device::spared;
use crate::device::wire::{DaemonReport, Order, Wire};
use crate::error::Failure;
use phase::{Act, Heard, Phase};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_block::control::Control;
use uzswap_block::{BackingFile, KeptServer, Room, TransportKind};
use uzswap_block::{CacheDisk, Disk, Maintainer, MemoryDisk, Swapped, Traffic, Transport};
use uzswap_block::{open_backing_file, start_transport};
use uzswap_engine::backing::Backing;
use uzswap_engine::{Cache, Config, PAGE_BYTES};
use uzswap_remote::{Address, Connected, Tiers};
use uzswap_sys::{fuse, process};

/// Memory may be added to a running machine: up to this multiple of the memory at the start.
const MEMORY_GROWS: u64 = 2;

/// The pause before the next try, where a keeper could not be started.
const PAUSE: Duration = Duration::from_secs(2);

/// A keeper that lives for less than this most likely ended by itself, and the next keeper will
/// too. Each pause before a start is twice as long as the last.
const KEEPER_LIFE_MIN: Duration = Duration::from_secs(1);
const KEEPER_PAUSE: Duration = Duration::from_millis(20);

/// Decides when keepers are started.
#[derive(Default)]
pub struct Pauses {
    last: Option<Instant>,
    short_lives: u32,
}

impl Pauses {
    /// The time to wait before a keeper is started `now`.
    pub fn before_next(&mut self, now: Instant) -> Duration {
        let is_short = self.last.is_some_and(|last| now - last < KEEPER_LIFE_MIN);
        self.short_lives = if is_short { self.short_lives + 1 } else { 0 };
        let pause = KEEPER_PAUSE * ((1 << self.short_lives.min(7)) - 1);
        self.last = Some(now + pause);
        pause
    }
}

/// Serves until the keeper orders the end.
pub fn daemon(arguments: &InheritArguments) -> Result<(), Failure> {
    let started_by =
        |error: io::Error| Failure::new(format!("the daemon is started by run and serve: {error}"));
    let mut wire = Wire::of_stdin().map_err(started_by)?;
    let mut start: Start = match arguments.start {
        Some(number) => said_by_predecessor(number),
        None => wire.receive(),
    }
    .map_err(started_by)?;
    ignore_signals().map_err(started_by)?;
    process::raise_descriptor_limit();
    die_of_panics();
    let mut notes = prepare();
    let swapped = Arc::new(Swapped::default());
    swapped.set(start.devices.clone().unwrap_or_default());
    let mut phase = Phase::Starting;
    let mut service = Service::start(&start, &swapped, &mut notes);
    phase.started(service.is_ok(), start.devices.is_some());
    let report = match &service {
        Ok(service) => {
            notes.extend(lock());
            start.options.transport = service.transport.kind().to_string();
            DaemonReport::Ready { transport: start.options.transport.clone(), notes }
        }
        Err(failure) => DaemonReport::Failed(failure.to_string()),
    };
    start.serves = service.is_ok();
    // An error means that the keeper is gone. The loop below notices that.
    let _ = wire.send(&report);
    let mut pauses = Pauses::default();
    while phase != Phase::Ending {
        let heard = wire.receive();
        let act = phase.hear(Heard::of(&heard), || swapped.is_listed().unwrap_or(true));
        match (act, heard, &mut service) {
            (Some(Act::MakeDevice), Ok(Order::Attach(part)), Ok(service)) => {
                let report = match service.transport.attach(part) {
                    Ok(offer) => DaemonReport::Attached(offer),
                    Err(error) => DaemonReport::Failed(error.to_string()),
                };
                let _ = wire.send(&report);
            }
            (Some(Act::Settle), Ok(Order::Settle(devices)), Ok(service)) => {
                swapped.set(devices);
                service.transport.release_unused();
            }
            (Some(Act::TellRoom), _, Ok(service)) => {
                let room = Room::of(&service.cache, &service.traffic);
                let _ = wire.send(&DaemonReport::Room(room));
            }
            (Some(Act::Become), Ok(Order::Become(program)), _) => {
                start.devices = Some(swapped.devices());
                become_another(&program, &mut wire, arguments, &start);
            }
            (Some(Act::StartKeeper), ..) => {
                start.devices = Some(swapped.devices());
                std::thread::sleep(pauses.before_next(Instant::now()));
                wire = replace_keeper(arguments, &mut start);
            }
            (_, Ok(Order::Attach(_)), _) => {
                let _ = wire.send(&DaemonReport::Failed("this daemon does not serve".into()));
            }
            _ => {}
        }
    }
    phase.require(Act::Close);
    Ok(())
}

/// Executes a daemon of `program` in place of this daemon. The threads of this daemon stop at any
/// instruction, as if it were killed, but the descriptors stay open. Returns only if exec fails,
/// after reporting the reason.
fn become_another(program: &Path, wire: &mut Wire, arguments: &InheritArguments, start: &Start) {
    let execute = || -> io::Result<io::Error> {
        // The start data stay in the socket until the new program reads them.
        let (mut ours, theirs) = Wire::pair()?;
        ours.send(start)?;
        process::let_inherit(theirs.as_fd())?;
        let mut words = role("daemon", arguments);
        words.extend(["--start".into(), theirs.as_raw_fd().to_string()]);
        Ok(spared::command(program, &words, wire.as_fd().try_clone_to_owned()?).exec())
    };
    let (Ok(error) | Err(error)) = execute();
    let why = format!("cannot execute {}: {error}", program.display());
    // An error means that the keeper is gone. The main loop notices that.
    let _ = wire.send(&DaemonReport::Failed(why));
}

/// The arguments that start a process of ours, which inherits the lock.
fn role(name: &str, arguments: &InheritArguments) -> Vec<String> {
    let lock = arguments.lock.map(|number| ["--lock".into(), number.to_string()]);
    [name.to_owned()].into_iter().chain(lock.into_iter().flatten()).collect()
}

/// The start data, from the daemon that this process was.
fn said_by_predecessor(number: i32) -> io::Result<Start> {
    Wire::new(UnixStream::from(process::take_inherited(number)?)).receive()
}

/// Starts another keeper, which takes over the list of changes.
fn replace_keeper(arguments: &InheritArguments, start: &mut Start) -> Wire {
    process::reap_children();
    start.daemon = ProcessId::own();
    loop {
        let started = spared::start(&role("keeper", arguments));
        match started.and_then(|(_, mut wire)| wire.send(&*start).map(|()| wire)) {
            Ok(wire) => return wire,
            // Most likely there is no memory for a process.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// The steps before threads exist. Returns the failures.
fn prepare() -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            notes.push(format!("{what}: {error}"));
        }
    };
    // The call fails if a shell with job control has made this process the leader of a group. Such
    // a group suffices.
    let _ = process::leave_session();
    note("the daemon's memory may be dumped", process::set_undumpable());
    note("the daemon is not spared when memory runs out", process::spare_from_oom());
    note(
        "the daemon may wait for its own device (PR_SET_IO_FLUSHER)",
        process::set_io_flusher(true),
    );
    notes
}

fn lock() -> Option<String> {
    let error = process::lock_memory().err()?;
    Some(format!("the daemon's memory is not locked: {error}"))
}

/// A thread that ended alone would leave its clients waiting. When the whole process ends, the next
/// daemon answers them. (In the release profile a panic aborts anyway.)
fn die_of_panics() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

/// Catches the signals that would end the daemon, and ignores them.
fn ignore_signals() -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let (_, nobody) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, nobody.try_clone()?)?;
    }
    Ok(())
}

/// All that serves. Dropped from the first field to the last.
struct Service {
    transport: Box<dyn Transport>,
    _maintainer: Maintainer,
    _control: Option<Control>,
    cache: Arc<Cache>,
    traffic: Arc<Traffic>,
    _store: Option<StoreKeeper>,
}

impl Service {
    fn start(
        start: &Start,
        swapped: &Arc<Swapped>,
        notes: &mut Vec<String>,
    ) -> Result<Self, Failure> {
        let options = &start.options;
        let kept =
            start.kept.as_ref().map(|numbers| KeptDaemon::inherited(numbers, process::inherited));
        let kept = kept.transpose().map_err(|error| {
            Failure::new(format!("the daemon was not given its start data: {error}"))
        })?;
        let takes_over = start.devices.is_some();
        let before = kept.is_some().then(|| start.devices.clone().unwrap_or_default());
        let Opened { cache, server, tiers } = open_cache(start, kept)?;
        if cache.statistic("backing_total_size") == Some(0) && !takes_over {
            // Without a backing nothing is written back, so the pool accepts pages up to its limit.
            let set = cache.set_attribute("accept_threshold_percent", "100");
            set.map_err(|error| Failure::new(error.to_string()))?;
        }
        // The last daemon may have been killed before it did this. Then no area exists yet.
        let has_areas = start.devices.as_ref().is_some_and(|devices| !devices.is_empty());
        if !options.keeps_same_once && !has_areas {
            let set = cache.set_attribute("same_pages_enabled", "N");
            set.map_err(|error| Failure::new(error.to_string()))?;
        }
        let store = tiers.map(StoreKeeper::start).transpose();
        let store = store.map_err(|error| Failure::new(format!("the store's thread: {error}")))?;
        let served = served(options, &cache)?;
        let traffic = Arc::new(Traffic::new(options.threads));
        let control = match control(&cache, &traffic, swapped, takes_over) {
            Ok(control) => Some(control),
            // The pages that the daemon has taken over do not need the control files.
            Err(failure) if takes_over => {
                notes.push(format!("there are no control files and no figures: {failure}"));
                None
            }
            Err(failure) => return Err(failure),
        };
        let maintainer = Maintainer::start(cache.clone());
        let maintainer = maintainer
            .map_err(|error| Failure::new(format!("cannot start the maintainer: {error}")))?;
        let transport = transport(options, &served, &traffic, server, before)?;
        let added = cache.add_cpu_state(transport.cpu_state());
        added.map_err(|error| Failure::new(error.to_string()))?;
        let (_maintainer, _control, _store) = (maintainer, control, store);
        Ok(Self { transport, _maintainer, _control, cache, traffic, _store })
    }
}

/// Mounts the control files. Unmounts those of a killed daemon first.
fn control(
    cache: &Arc<Cache>,
    traffic: &Arc<Traffic>,
    swapped: &Arc<Swapped>,
    takes_over: bool,
) -> Result<Control, Failure> {
    let folder = folder::mount();
    let mount = || {
        if takes_over && fuse::is_mounted(&folder) {
            fuse::unmount(&folder)?;
        }
        Control::mount(cache.clone(), traffic.clone(), swapped.clone(), &folder)
    };
    mount().map_err(|error| {
        let folder = folder.display();
        Failure::new(format!("cannot mount on {folder}: {error}; see `uzswap doctor`"))
    })
}

/// A cache, new or taken over.
struct Opened {
    cache: Arc<Cache>,
    /// The server's state, if the cache was taken over.
    server: Option<KeptServer>,
    /// The backing, if a part of it is in a store.
    tiers: Option<Tiers>,
}

/// The cache, new or as another daemon has left it. The cache lies in memory that outlives this
/// process, if there is such memory. A cache that is taken over brings the server's state.
fn open_cache(start: &Start, kept: Option<KeptDaemon>) -> Result<Opened, Failure> {
    let options = &start.options;
    let algorithm = options.compressor.parse();
    let config = Config {
        pages_max: options.pages,
        ram_bytes: start.ram,
        ram_bytes_max: start.ram * MEMORY_GROWS,
        pool_bytes_max: options.pool,
        algorithm: algorithm.map_err(|error| Failure::new(format!("{error}")))?,
        seals_backing: !options.plain_backing,
    };
    let (backing, memory, server, table) = match kept {
        Some(KeptDaemon { cache, server, backing, store }) => (backing, Some(cache), server, store),
        None => (open_backing_file(&options.backing.spec())?, None, None, None),
    };
    let backing = BackingFile::backing(backing);
    let backing = backing.map_err(|error| Failure::new(format!("backing: {error}")))?;
    let (backing, tiers) = tiers(options, backing, table)?;
    let cache = match memory {
        Some(memory) => Cache::in_file(config, backing, memory)?,
        None => Cache::new(config, backing)?,
    };
    Ok(Opened { cache: Arc::new(cache), server, tiers })
}

/// The backing, over its store if there is one. The store's table may lie in memory that outlives
/// us.
fn tiers(
    options: &DaemonOptions,
    local: Box<dyn Backing>,
    table: Option<OwnedFd>,
) -> Result<(Box<dyn Backing>, Option<Tiers>), Failure> {
    let Some(address) = &options.store else { return Ok((local, None)) };
    let address = Address::parse(address)?;
    let connected = match table {
        Some(table) => Connected::with_table(&address, table),
        None => Connected::to(&address),
    };
    let bytes = local.bytes();
    let tiers = connected?.over(local, bytes)?;
    Ok((Box::new(tiers.clone()), Some(tiers)))
}

/// The thread that tends the store. When it ends, it removes the cache's segments from the store.
struct StoreKeeper {
    tiers: Tiers,
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl StoreKeeper {
    fn start(tiers: Tiers) -> io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name("uzswap-remote".into());
        let (own, stops) = (tiers.clone(), is_stopping.clone());
        let thread = thread.spawn(move || own.run(|| stops.load(Relaxed)))?;
        Ok(Self { tiers, is_stopping, thread: Some(thread) })
    }
}

impl Drop for StoreKeeper {
    fn drop(&mut self) {
        self.is_stopping.store(true, Relaxed);
        self.tiers.ring();
        // A panic has ended the process before this.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        self.tiers.clear();
    }
}

/// Starts the chosen transport. `kept` and `before` are those of [`start_transport`].
fn transport(
    options: &DaemonOptions,
    served: &Arc<dyn Disk>,
    traffic: &Arc<Traffic>,
    kept: Option<KeptServer>,
    before: Option<Vec<PathBuf>>,
) -> Result<Box<dyn Transport>, Failure> {
    let kind: TransportKind = options.transport.parse().map_err(Failure::new)?;
    let (served, traffic) = (served.clone(), traffic.clone());
    start_transport(kind, served, traffic, &disk(), options.server(), kept, before).map_err(
        |error| Failure::new(format!("cannot serve over {kind}: {error}; see `uzswap doctor`")),
    )
}

/// The disk behind the device.
fn served(options: &DaemonOptions, cache: &Arc<Cache>) -> Result<Arc<dyn Disk>, Failure> {
    if options.bare {
        return Ok(Arc::new(MemoryDisk::new(options.pages as usize * PAGE_BYTES)));
    }
    let disk = CacheDisk::new(cache.clone(), options.pages)
        .ok_or_else(|| Failure::new("the device does not fit the cache's address space"))?;
    Ok(Arc::new(disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepers_that_end_soon_are_restarted_ever_more_slowly_and_one_that_lived_long_immediately() {
        let (mut pauses, mut now) = (Pauses::default(), Instant::now());
        let mut all = Vec::new();
        for life in [3600, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3600].map(Duration::from_secs) {
            let pause = pauses.before_next(now);
            all.push(pause.as_millis());
            now += pause + life;
        }
        assert_eq!(all, [0, 0, 20, 60, 140, 300, 620, 1260, 2540, 2540, 2540]);
        assert_eq!(pauses.before_next(now), Duration::ZERO);
    }
}

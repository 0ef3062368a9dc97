//! The process that serves the device.
//!
//! It is on the path by which the kernel frees memory, so it must never wait for memory itself:
//! everything it touches is locked. It lives outside the command's cgroup, in a session of its own
//! that the terminal's keys do not reach. When whoever started it is gone, it undoes what they
//! changed.

use crate::error::Failure;
use crate::leftovers;
use crate::options::DaemonOptions;
use crate::session::{Greeting, State};
use std::io::{self, BufRead};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use uzswap_block::control::{Control, DISK};
use uzswap_block::{CacheDisk, Disk, Maintainer, MemoryDisk, Server, Traffic, open_backing};
use uzswap_engine::{Cache, Config, Locks, PAGE_BYTES};
use uzswap_sys::{cpu, process};

/// How often to try again when the kernel cannot read its pages back.
const RETRY: Duration = Duration::from_secs(2);

/// Serves until told to end.
pub fn daemon() -> Result<(), Failure> {
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    let options: DaemonOptions = read
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str(&line).map_err(|error| error.to_string()))
        .map_err(|error| {
            Failure::new(format!("the daemon is started by run and serve: {error}"))
        })?;
    let (end, ended) = channel();
    watch_signals(end.clone())?;
    let mut notes = prepare();
    let service = match Service::start(&options) {
        Ok(service) => service,
        Err(failure) => {
            greet(&Greeting::Failed { message: failure.to_string() });
            return Ok(()); // Said to whoever started us.
        }
    };
    notes.extend(lock());
    greet(&Greeting::Ready { notes });
    watch_owner(end)?;
    // An error: nobody is left who could tell us to end.
    let _ = ended.recv();
    undo(&options);
    drop(service);
    Ok(())
}

fn greet(greeting: &Greeting) {
    // An error: nobody listens any more, which `watch_owner` finds out.
    if let Ok(line) = serde_json::to_string(greeting) {
        println!("{line}");
    }
}

/// What must be done before there are threads; what could not be.
fn prepare() -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            notes.push(format!("{what}: {error}"));
        }
    };
    // Already a leader when started from a shell with job control: as good.
    let _ = process::leave_session();
    note("memory may be dumped", process::set_undumpable());
    note("not spared when memory runs out", process::spare_from_oom());
    note("not marked as serving I/O (PR_SET_IO_FLUSHER)", process::set_io_flusher());
    notes
}

fn lock() -> Option<String> {
    let error = process::lock_memory().err()?;
    Some(format!("memory is not locked: {error}"))
}

/// Everything that serves; dropped from the first field to the last.
struct Service {
    _server: Server,
    _maintainer: Maintainer,
    _control: Control,
}

impl Service {
    fn start(options: &DaemonOptions) -> Result<Self, Failure> {
        let memory = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
        let algorithm = options.compressor.parse();
        let config = Config {
            pages_max: options.pages,
            ram_bytes: memory.total,
            pool_bytes_max: options.pool,
            algorithm: algorithm.map_err(|error| Failure::new(format!("{error}")))?,
        };
        let backing = open_backing(&options.backing.spec())?;
        let locks = if options.one_writer { Locks::OneWriter } else { Locks::SlotCaches };
        let cache = Arc::new(Cache::with_locks(config, backing, locks)?);
        let disk = disk(options, &cache)?;
        let mount = |error: io::Error| {
            let folder = options.folder.display();
            Failure::new(format!("cannot mount on {folder}: {error}; see `uzswap doctor`"))
        };
        let server = options.server();
        let traffic = Arc::new(Traffic::new(server.threads));
        let control =
            Control::mount(cache.clone(), traffic.clone(), &options.folder).map_err(mount)?;
        let maintainer = Maintainer::start(cache).map_err(mount)?;
        let path = options.folder.join(DISK);
        let server = Server::start(disk, traffic, &path, server).map_err(mount)?;
        Ok(Self { _server: server, _maintainer: maintainer, _control: control })
    }
}

/// What is behind the device.
fn disk(options: &DaemonOptions, cache: &Arc<Cache>) -> Result<Arc<dyn Disk>, Failure> {
    if options.bare {
        return Ok(Arc::new(MemoryDisk::new(options.pages as usize * PAGE_BYTES)));
    }
    let disk = CacheDisk::new(cache.clone(), options.pages)
        .ok_or_else(|| Failure::new("the device does not fit the cache's address space"))?;
    Ok(Arc::new(disk))
}

fn watch_signals(end: Sender<()>) -> Result<(), Failure> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]);
    let mut signals = signals.map_err(|error| Failure::new(format!("signals: {error}")))?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            // An error: it is ending already.
            let _ = end.send(());
        }
    });
    Ok(())
}

/// The owner holds the other end of our standard input until it ends, however it ends.
fn watch_owner(end: Sender<()>) -> Result<(), Failure> {
    let watch = move || {
        let mut rest = String::new();
        while io::stdin().read_line(&mut rest).is_ok_and(|bytes| bytes > 0) {}
        let _ = end.send(());
    };
    std::thread::Builder::new()
        .name("uzswap-owner".into())
        .spawn(watch)
        .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
    Ok(())
}

/// Undoes what a dead owner changed, while we still serve: the kernel reads pages back from us, and
/// we stay until it has. A living owner has done it before it told us to end.
fn undo(options: &DaemonOptions) {
    let Some(folder) = options.folder.parent() else { return };
    while let Ok(state) = State::read(folder) {
        let in_use = leftovers::is_in_use(&state);
        if in_use || !state.owner.is_some_and(|owner| owner.is_alive()) {
            leftovers::undo(folder, &state);
        }
        if !leftovers::is_in_use(&state) {
            return;
        }
        // Whoever reads the owner's errors from a pipe must not wait for us. An error: they do.
        let _ = process::silence_errors();
        std::thread::sleep(RETRY);
    }
}

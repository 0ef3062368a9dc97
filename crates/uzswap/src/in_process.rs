//! `uzswap run --in-process`: the command's memory is kept in the budget inside of its processes,
//! by a library that they preload. It needs no root, no swap and no cgroup.

use crate::cli::RunArguments;
use crate::error::Failure;
use crate::options::{self, Backing};
use crate::run;
use crate::say::say;
use crate::signals::{Event, Events};
use crate::size;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use uzswap_region::tree::{Table, Tree};
use uzswap_region::{Mode, Pager};
use uzswap_sys::{cpu, process};

/// The library, as it is installed and as it is built.
const LIBRARY: &str = "libuzswap_agent.so";

/// How pages leave here. Error: why they cannot, and what becomes of the command.
pub fn check() -> Result<Mode, String> {
    let Err(denied) = Mode::InThread.check() else { return Ok(Mode::InThread) };
    let protects = Mode::Protection.check().map(|()| Mode::Protection);
    protects.map_err(|error| format!("{denied}; {error}; until then commands run without"))
}

/// Runs it; the command's exit status. Where it cannot work, the command runs as without it.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    refuse_others(arguments)?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    crate::options::check_memory(arguments.memory, machine)?;
    run::find_command(&arguments.command[0])?;
    let events = Events::new()?;
    let mut command = Command::new(&arguments.command[0]);
    command.args(&arguments.command[1..]);
    let backing = backing(arguments)?;
    let file = match check() {
        Ok(mode) => Some(preload(arguments, backing, mode, &mut command)?),
        Err(missing) => {
            say!("uzswap: in-process: {missing}");
            None
        }
    };
    let child = command.spawn();
    let child =
        child.map_err(|error| Failure::new(format!("cannot start the command: {error}")))?;
    let pid = child.id() as i32;
    events.watch_command(child);
    let status = wait(pid, &events)?;
    if let Some(file) = file.filter(|_| !arguments.quiet) {
        report(arguments.memory, file.tree.table(), file.mode);
    }
    Ok(run::exit_code(status).into())
}

/// Has a command load the library, and the library find what its processes share.
fn preload(
    arguments: &RunArguments,
    backing: Option<(PathBuf, u64)>,
    mode: Mode,
    command: &mut Command,
) -> Result<TreeFile, Failure> {
    let library = library().map_err(Failure::new)?;
    let file = TreeFile::create(arguments.memory, mode)?;
    command.env("UZSWAP_TREE", &file.path);
    match mode {
        Mode::Protection => command.env("UZSWAP_PROTECTS", "1"),
        // Of a run outside of this one.
        _ => command.env_remove("UZSWAP_PROTECTS"),
    };
    if let Some((folder, bytes)) = backing {
        let mut place = folder.into_os_string();
        place.push(format!(":{bytes}"));
        command.env("UZSWAP_BACKING", place);
    }
    if let Some(compressor) = &arguments.cache.compressor {
        command.env("UZSWAP_COMPRESSOR", compressor.to_string());
    }
    let others = env::var_os("LD_PRELOAD").unwrap_or_default();
    let mut preload = library.into_os_string();
    if !others.is_empty() {
        preload.push(":");
        preload.push(others);
    }
    // A program that was built with it refuses to start behind any library that is preloaded.
    let mut sanitizer = env::var_os("ASAN_OPTIONS").unwrap_or_default();
    sanitizer.push(if sanitizer.is_empty() { "" } else { ":" });
    sanitizer.push("verify_asan_link_order=0");
    command.env("ASAN_OPTIONS", sanitizer).env("LD_PRELOAD", preload);
    Ok(file)
}

/// What is for the swap device alone.
fn refuse_others(arguments: &RunArguments) -> Result<(), Failure> {
    let cache = &arguments.cache;
    let given = [
        ("--pool", cache.pool.is_some()),
        ("--plain-backing", cache.plain_backing),
        ("--size", arguments.size.is_some()),
        ("--user", arguments.user.is_some()),
        ("--include-pool", arguments.include_pool),
        ("--load-control", arguments.load_control),
        ("--report", arguments.report.is_some()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => Err(Failure::new(format!(
            "{name} is for the swap device; leave it out with --in-process, of which the pool is a \
             part of --memory"
        ))),
        None => Ok(()),
    }
}

/// The folder in which each process keeps pages, and how many bytes at most; `None` for none.
fn backing(arguments: &RunArguments) -> Result<Option<(PathBuf, u64)>, Failure> {
    let given = arguments.cache.backing.as_deref();
    let (folder, bytes) = match options::backing(given, arguments.memory.saturating_mul(PARTS))? {
        Backing::None => return Ok(None),
        Backing::Unnamed(folder, bytes) => (folder, bytes),
        Backing::Path(folder, Some(bytes)) if folder.is_dir() => (folder, bytes),
        Backing::Path(path, _) => {
            let path = path.display();
            return Err(Failure::new(format!(
                "--backing {path}: each process has a file of its own; name a folder and the size \
                 of each file, as in /var/tmp:4G"
            )));
        }
    };
    match Pager::check_unnamed_backing(&folder) {
        Ok(()) => Ok(Some((folder, bytes))),
        // Nobody asked for it.
        Err(_) if given.is_none() => Ok(None),
        Err(error) => Err(Failure::new(format!(
            "--backing {}: {error}; name a folder on a disk that you may write",
            folder.display()
        ))),
    }
}

/// Without `--backing`, a process has room on the disk for eight times the memory.
const PARTS: u64 = 16;

/// The library: beside this program, or where packages put it. Error: where it should be, and what
/// to do.
pub fn library() -> Result<PathBuf, String> {
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    let found = places.iter().find(|place| place.exists()).cloned();
    found.ok_or_else(|| {
        let place = places[1].display();
        format!("there is no {place}; cargo run -p xtask -- install --prefix DIR puts it there")
    })
}

/// The file that the processes share; removed at the end.
struct TreeFile {
    path: PathBuf,
    tree: Tree,
    mode: Mode,
}

impl TreeFile {
    fn create(memory: u64, mode: Mode) -> Result<Self, Failure> {
        let folder = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let folder = folder.filter(|folder| folder.is_dir()).unwrap_or("/dev/shm".into());
        let path = folder.join(format!("uzswap-{}", std::process::id()));
        let tree = Tree::create(&path, memory).map_err(|error| {
            Failure::new(format!("cannot make {}: {error}; remove it", path.display()))
        })?;
        Ok(Self { path, tree, mode })
    }
}

impl Drop for TreeFile {
    fn drop(&mut self) {
        // Somebody has removed it: nothing is left.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Waits for the command, passing signals on.
fn wait(pid: i32, events: &Events) -> Result<ExitStatus, Failure> {
    loop {
        match events.receiver.recv() {
            Ok(Event::CommandEnded(status)) => return Ok(status),
            Ok(Event::Signal { signal, from_terminal }) if !from_terminal => {
                // An error: it has just ended.
                let _ = process::kill(pid, signal);
            }
            Ok(_) => {}
            Err(_) => return Err(Failure::new("the command's end was missed")),
        }
    }
}

fn report(memory: u64, table: &Table, mode: Mode) {
    use std::sync::atomic::Ordering::Relaxed;
    let (managed, unmanaged) = (table.managed.load(Relaxed), table.unmanaged.load(Relaxed));
    say!(
        "uzswap: in-process: {} at most, of {} allowed; memory of {managed} processes was kept \
         small{}",
        size::show(table.peak.load(Relaxed)),
        size::show(memory),
        match unmanaged {
            0 => String::new(),
            some => format!(", of {some} it could not be"),
        }
    );
    if mode == Mode::Protection {
        say!("  by protection, which is slower, since userfaultfd is denied: uzswap doctor");
    }
}

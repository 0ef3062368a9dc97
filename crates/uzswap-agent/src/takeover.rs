//! Takes a program over. After that its memory may leave.
//!
//! ```text
//! find the system calls → make a pager → stop all threads → replace the calls → let them go on
//! lock the layout → read the mappings → adopt those that may be → unlock
//! ```
//! The stop interrupts each thread's system call, and the thread repeats it through a replaced
//! instruction. So the agent sees every call from then on.

use crate::code::{Code, modules};
use crate::stage::{self, Stage};
use crate::written;
use crate::{
    AGENT, Agent, adoption, calls, children, devices, fast_path, handlers, looker, restart, robust,
};
use crate::{layout, own_descriptors, own_files, seen, sharing, signals, stacks, threads, tree};
use rustix::process::{Resource, getrlimit};
use std::ffi::{CStr, OsStr};
use std::fs;
use std::io;
use std::iter::successors;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::*;
use std::time::Duration;
use uzswap_calls::sites;
use uzswap_calls::stop;
use uzswap_calls::{Looks, Patcher};
use uzswap_region::{Mode, OnFork, Pager, PagerBuilder};
use uzswap_sys::fault_signals::{self, Stopped};
use uzswap_sys::{map, own_threads, smaps};
use uzswap_tree::Setting;
use uzswap_tree::front::STACK;
use uzswap_tree::variables::variables_bytes;

/// How often we retry to stop the threads.
const TRIES: usize = 50;
fn stay(thread: &mut Stopped) -> bool {
    let is_asked = thread.value == Some(stop::VALUE) || thread.has_lost_value && stop::is_asking();
    if !is_asked {
        return false;
    }
    if crate::is_inside() {
        // This thread may have a lock that other threads need before they can stop. The thread will
        // be asked again.
        return true;
    }
    stacks::prepare(&thread.signal_stack);
    let waited = stop::stay(thread.stack);
    if stage::is_taken_over() {
        // From now on the pages of the program's own signal stack may leave.
        stacks::arm_in_handler(&mut thread.signal_stack);
        robust::note();
    }
    restart::go_on(thread, waited);
    true
}

/// The call in which a thread waits, read without a descriptor among the program's.
fn waited_call(thread: i32) -> Option<stop::WaitedCall> {
    looker::apart(|| stop::waited_call(thread))
}

/// Finds a reason against the take-over that shows before anything is changed. `thread` has the
/// program's descriptors.
fn check(modules: &[sites::Module], thread: i32) -> Result<(), String> {
    if let Some(user) = looker::apart(|| devices::user(thread)) {
        return Err(format!("it has {user} open, which may use its memory at any time"));
    }
    looker::apart(|| own_files::note_open(devices::open_files(thread)));
    if let Err(error) = looker::apart(smaps::check) {
        return Err(format!("uzswap cannot read its mappings from /proc/self/smaps: {error}"));
    }
    if let Some(watcher) = watcher() {
        return Err(format!("{watcher}, which would see our faults as its own"));
    }
    check_code(modules)
}

fn check_code(modules: &[sites::Module]) -> Result<(), String> {
    let has_go = modules.iter().any(|module| module.is_go);
    let reason = "it has Go code, whose stacks have no room to bring in memory of system calls";
    if has_go { Err(reason.into()) } else { Ok(()) }
}

/// Takes the program over, with this budget. An error names the reason. Nothing has changed then.
pub fn take_over(memory: u64) -> Result<(), String> {
    let modules = modules().map_err(|error| error.to_string())?;
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    check(&modules, me)?;
    let said = |error: &dyn std::fmt::Display| error.to_string();
    map::remember_own();
    map::remember_stack(STACK, variables_bytes());
    let looks = Looks { first: fast_path::on_call, second: calls::on_call };
    let mut patcher = Patcher::new(looks).map_err(|error| said(&error))?;
    adoption::note_variables(&modules);
    let code = Code::new(modules, &mut patcher).map_err(why_not_replaced)?;
    let pager = pager(memory).map_err(|error| why_no_pager(&error))?;
    if !has_room_for_fork() {
        return Err(too_few_descriptors());
    }
    // Our handler is to run after the pager's own.
    children::watch().map_err(|error| said(&error))?;
    let own_files = files_of(&pager.descriptors());
    own_descriptors::keep(&pager.descriptors());
    fast_path::HAS_GUARDS.store(crate::mode() == Mode::Protection, Relaxed);
    take_signals().map_err(|error| said(&error))?;
    if !looker::apart(has_threads) {
        return Err("its threads do not start".into());
    }
    let mut agent = Some(Agent::new(pager));
    let mut layout = layout::lock();
    let (code, stopped) = stop_and_replace(&mut agent, &own_files, code, &mut patcher)?;
    let Some(stopped) = stopped else {
        // The pager's descriptors may be the program's now, so they must not be closed.
        std::mem::forget(agent);
        return Err("it has taken descriptors of ours for files of its own".into());
    };
    *layout = Some(adoption::adopt_all(&code.modules, &stopped, patcher.stubs()));
    if let Some(layout) = &mut *layout {
        layout.patch_with(patcher);
    }
    // The layout's lock is held.
    stage::enter(Stage::Managed);
    Ok(())
}

/// Stops all threads, and replaces the calls. Returns the code of that moment and the threads, or
/// no threads if the program has taken descriptors of ours.
fn stop_and_replace(
    agent: &mut Option<Agent>,
    own_files: &[(i32, Option<PathBuf>)],
    mut code: Code,
    patcher: &mut Patcher,
) -> Result<(Code, Option<Vec<stop::Staying>>), String> {
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    let ours = looker::apart(threads::ours);
    let me = (!ours.contains(&me)).then_some(me);
    let mut sharer = None;
    for _ in 0..TRIES {
        handlers::begin_on_stack(libc::SIGBUS, false);
        let all = || looker::apart(stop::threads);
        // The handler of the stop uses thread variables, so two threads that share one set must not
        // both run it. A beginning thread has no set of its own yet, and is checked again.
        sharer = sharing::find_thread(&ours);
        if sharer.is_none() {
            let stopped = stop::others(libc::SIGBUS, &ours, all, waited_call, |stopped| {
                sharer = sharing::find(&ours);
                if sharer.is_some() {
                    return None;
                }
                if let Err(reason) = renew(&mut code, patcher) {
                    return Some(Err(reason));
                }
                let taken = agent.take_if(|agent| has_descriptors(&agent.pager, own_files));
                let Some(agent) = taken else { return Some(Ok(None)) };
                begin(agent, stopped.iter().map(|one| one.thread).chain(me).collect());
                // SAFETY: all other threads stand still, but for ours, which make no calls that
                // `on_call` would do anything about.
                unsafe { code.replace() };
                // A stopped thread has no lock of our allocator's.
                Some(Ok(Some(stopped.to_vec())))
            });
            if let Some(stopped) = stopped.flatten() {
                return Ok((code, stopped?));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(why_not_stopped(sharer))
}

/// Takes in the code that the program has loaded since it was listed, and looks at the code that it
/// has written.
fn renew(code: &mut Code, patcher: &mut Patcher) -> Result<(), String> {
    if written::is_there() {
        return Err(written::REASON.into());
    }
    if code.renew(patcher).map_err(why_not_replaced)? {
        check_code(&code.modules)?;
        adoption::note_variables(&code.modules);
    }
    Ok(())
}

fn why_not_replaced(error: io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            "its code is sealed (mseal), so its system calls stay as they are".into()
        }
        _ => format!("its system calls cannot be replaced: {error}"),
    }
}

fn why_no_pager(error: &uzswap_region::Error) -> String {
    match os_error(error) {
        Some(libc::EMFILE) => too_few_descriptors(),
        _ => error.to_string(),
    }
}

fn why_not_stopped(sharer: Option<sharing::Sharer>) -> String {
    let blocked = || "its threads do not stop: they block SIGBUS".into();
    sharer.map_or_else(blocked, sharing::reason)
}

/// Routes all replaced calls to us before the program's threads go on: these could start others.
fn begin(agent: Agent, threads: Vec<i32>) {
    let only = threads.first().copied().filter(|_| threads.len() == 1);
    agent.pager.set_only_thread(only);
    let _ = AGENT.set(agent);
    stage::enter(Stage::Adopting);
}

/// Sets the functions that our handlers of signals call.
fn take_signals() -> io::Result<()> {
    fault_signals::on_sent(stay);
    fault_signals::deliver_by(handlers::deliver_from);
    fault_signals::before_default(seen::complete);
    // Where faults of pages raise SIGSEGV, the pager has its function.
    fault_signals::on_segv(|_| false)?;
    fault_signals::on_fetch(written::on_fetch);
    fault_signals::on_illegal(Patcher::resume_at)
}

/// The files of descriptors, by the kernel's names.
fn files_of(descriptors: &[i32]) -> Vec<(i32, Option<PathBuf>)> {
    descriptors.iter().map(|descriptor| (*descriptor, file_of(*descriptor))).collect()
}

fn file_of(descriptor: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/thread-self/fd/{descriptor}")).ok()
}

/// True if a pager has its descriptors. The program may have closed some descriptors before the
/// agent saw its calls. These are opened again, unless the program has files under their numbers.
/// Called while the program stands still.
fn has_descriptors(pager: &Pager, files: &[(i32, Option<PathBuf>)]) -> bool {
    let (mut is_whole, mut is_free) = (true, true);
    for (descriptor, file) in files {
        let now = file_of(*descriptor);
        is_whole &= now == *file;
        is_free &= now.is_none() || now == *file;
    }
    is_whole || is_free && pager.renew_descriptors().is_ok()
}

/// Makes a pager, a second time if the program has just closed all descriptors, ours included.
fn pager(memory: u64) -> Result<Pager, uzswap_region::Error> {
    let made = match try_pager(memory) {
        // A call found a descriptor closed.
        Err(error) if os_error(&error) == Some(libc::EBADF) => try_pager(memory),
        other => other,
    };
    // The pager may be short of memory before the watching thread looks at it.
    made.inspect(|pager| pager.set_patient(true))
}

fn os_error(error: &uzswap_region::Error) -> Option<i32> {
    let sources = successors(std::error::Error::source(error), |error| error.source());
    sources.filter_map(|error| error.downcast_ref()).find_map(io::Error::raw_os_error)
}

/// Our descriptors have numbers below this. A fork needs [`FORK_DESCRIPTORS`] before there is a
/// child: two files of the backing, one of them opened twice.
const DESCRIPTORS_MAX: u64 = 1024;
const FORK_DESCRIPTORS: usize = 3;

/// True if a fork will find room for its files. Without this room, a `fork` that succeeds without
/// uzswap would fail. The fork raises the soft limit to the hard one for that time.
fn has_room_for_fork() -> bool {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX).min(DESCRIPTORS_MAX);
    let is_free = |number: &u64| {
        let arguments = [*number, libc::F_GETFD as u64, 0, 0, 0, 0];
        // SAFETY: the call asks for the flags of a number that may not be an open descriptor.
        let flags = unsafe { uzswap_calls::raw(libc::SYS_fcntl as u64, arguments) };
        flags == -i64::from(libc::EBADF)
    };
    (0..most).filter(is_free).take(FORK_DESCRIPTORS).count() == FORK_DESCRIPTORS
}

fn too_few_descriptors() -> String {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    format!("its limit of {limit} descriptors leaves too few for ours: raise it (ulimit -n)")
}

fn try_pager(memory: u64) -> Result<Pager, uzswap_region::Error> {
    let set = |setting| tree()?.table().setting(setting);
    let text = |setting| set(setting)?.into_string().ok();
    let compressor = text(Setting::Compressor).unwrap_or_else(|| "lz4".into());
    let pager = Pager::builder().memory(memory).compressor(&compressor);
    // No process has a larger share than the whole budget. If accesses are recorded, the pool does
    // not count in the budget.
    let all = tree().filter(|_| !crate::is_recorded()).map(|tree| tree.table().total.load(Relaxed));
    let pager = all.into_iter().fold(pager, PagerBuilder::memory_max);
    let pager = pager.mode(crate::mode()).on_fork(OnFork::Whole);
    // `uzswap run` has tried these means.
    let means = text(Setting::Means).and_then(|name| name.parse().ok());
    let pager = means.into_iter().fold(pager, PagerBuilder::means);
    let policy = text(Setting::Policy).and_then(|name| name.parse().ok());
    let pager = policy.into_iter().fold(pager, PagerBuilder::policy);
    let pager = set(Setting::Accesses).into_iter().fold(pager, PagerBuilder::accesses);
    let store = text(Setting::Store);
    let pager = store.iter().fold(pager, |pager, store| pager.backing(store));
    let backing = set(Setting::Backing).unwrap_or_default();
    match folder_and_size(&backing) {
        Some((folder, bytes)) => pager.unnamed_backing(folder, bytes).build(),
        None => pager.build(),
    }
}

/// The parts of [`Setting::Backing`].
fn folder_and_size(backing: &OsStr) -> Option<(&OsStr, u64)> {
    let bytes = backing.as_bytes();
    let colon = bytes.iter().rposition(|byte| *byte == b':')?;
    let size = str::from_utf8(bytes.get(colon + 1..)?).ok()?.parse().ok()?;
    Some((OsStr::from_bytes(bytes.get(..colon)?), size))
}

/// True if this library's threads run, and are known. A thread that is being made blocks all
/// signals, and a replaced instruction would kill it.
fn has_threads() -> bool {
    (0..1000).any(|turn| {
        if turn > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // We would stop an unknown thread of ours like the program's threads, while it holds our
        // locks.
        !own_threads::are_coming() && threads::ours().into_iter().all(is_reached)
    })
}

/// True if our signals reach a thread.
fn is_reached(thread: i32) -> bool {
    threads::blocked(thread).is_some_and(|mask| mask & signals::OURS == 0)
}

/// Another library that manages this program's memory or signals.
fn watcher() -> Option<&'static str> {
    let status = || fs::read_to_string("/proc/self/status").unwrap_or_default();
    let status = looker::apart(status);
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    if tracer.is_some_and(|tracer| tracer.trim() != "0") {
        return Some("a debugger traces it");
    }
    const SANITIZERS: [&CStr; 4] =
        [c"__asan_init", c"__tsan_init", c"__msan_init", c"__hwasan_init"];
    let has = |name: &CStr| {
        // SAFETY: a name.
        unsafe { !libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).is_null() }
    };
    SANITIZERS.into_iter().any(has).then_some("it was built with a sanitizer")
}

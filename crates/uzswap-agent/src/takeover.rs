//! Taking a program over: from here on its memory may leave.
//!
//! ```text
//! find the system calls → make a pager → stop all threads → replace the calls → let them go on
//! lock the layout → read the mappings → adopt those that may be → unlock
//! ```
//! A thread that was in the kernel was brought out of it by the stop, and comes back through the
//! replaced instruction: from then on no call goes unseen.

use crate::{AGENT, Agent, calls, first_look, forking, interrupted, layout, memory, processes};
use std::ffi::CStr;
use std::fs;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use uzswap_calls::sites::{self, Site};
use uzswap_calls::stop::{self, Staying};
use uzswap_calls::{Looks, Patcher};
use uzswap_region::{OnFork, Pager};
use uzswap_sys::bus::{self, Stopped};
use uzswap_sys::map::{self, Mapped};
use uzswap_tree::front::STACK;

/// How often threads that do not stop are tried again.
const TRIES: usize = 50;
/// A guard below a stack is at most so long.
const GUARD_MAX: usize = 64 << 10;

/// Alternate stacks for signals, from before: the kernel writes to them.
pub static SIGNAL_STACKS: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

fn stay(thread: &mut Stopped) -> bool {
    if thread.value != Some(stop::VALUE) {
        return false;
    }
    if crate::is_inside() {
        // It may have what the others are stopped with, and is asked again.
        return true;
    }
    stop::stay(thread.stack);
    interrupted::go_on(thread);
    true
}

/// Takes the program over, with this budget. Errors say why it cannot be; then all is as before.
pub fn take_over(memory: u64, compressor: &str) -> Result<(), String> {
    if has_ring() {
        return Err("it has an io_uring, whose buffers the kernel writes at any time".into());
    }
    if let Some(watcher) = watcher() {
        return Err(format!("{watcher}, which would see our faults as its own"));
    }
    let said = |error: &dyn std::fmt::Display| error.to_string();
    map::remember_own();
    map::remember_stack(STACK);
    let looks = Looks { first: first_look::on_call, second: calls::on_call };
    let mut patcher = Patcher::new(looks).map_err(|error| said(&error))?;
    let modules = sites::modules();
    VARIABLES.store(modules.iter().map(|module| module.thread_bytes).sum(), Relaxed);
    let found = sites_of(&modules);
    let work = patcher.prepare(&found, calls::wants).map_err(|error| said(&error))?;
    let pager = pager(memory, compressor).map_err(|error| said(&error))?;
    // After the pager's own handler.
    forking::watch().map_err(|error| said(&error))?;
    processes::keep(&pager.descriptors());
    bus::on_sent(stay);
    bus::on_illegal(Patcher::resume_at).map_err(|error| said(&error))?;
    if !has_threads() {
        return Err("its threads do not start".into());
    }
    let mut agent = Some(Agent::new(pager));
    let mut layout = layout::lock();
    let stopped = (0..TRIES).find_map(|_| {
        let stopped = stop::others(libc::SIGBUS, &ours(), |stopped| {
            if let Some(agent) = agent.take() {
                // It is set once.
                let _ = AGENT.set(agent);
            }
            // SAFETY: all other threads stand still, but for ours, which make no calls that
            // `on_call` would do anything about.
            unsafe { work.apply() };
            // Who stands still has no lock of our allocator's.
            stopped.to_vec()
        });
        if stopped.is_none() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        stopped
    });
    drop(work);
    let Some(stopped) = stopped else {
        return Err("its threads do not stop: they block SIGBUS".into());
    };
    *layout = Some(adopt_all(&modules, &stopped));
    layout::complete();
    drop(layout);
    // The patcher's stubs stay; it is not needed again.
    std::mem::forget(patcher);
    Ok(())
}

/// The system calls of a file, which is known by its name and where it is.
struct Known {
    name: String,
    range: Range<usize>,
    sites: Vec<Site>,
}

static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());

/// Looks for system calls before memory is short: a program with many libraries has much code, and
/// would grow by tens of MiB meanwhile.
pub fn look_ahead() {
    sites_of(&sites::modules());
}

/// The system calls of all files but this library; of those that are not known yet, they are found.
fn sites_of(modules: &[sites::Module]) -> Vec<Site> {
    let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut found = Vec::new();
    for module in modules {
        if module.contains(calls::on_call as fn(&mut _) -> _ as usize) {
            continue;
        }
        let is_it = |known: &Known| known.range == module.range && known.name == module.name;
        let at = known.iter().position(is_it).unwrap_or_else(|| {
            let (name, range) = (module.name.clone(), module.range.clone());
            known.push(Known { name, range, sites: module.sites() });
            known.len() - 1
        });
        found.extend_from_slice(&known[at].sites);
    }
    found
}

fn pager(memory: u64, compressor: &str) -> Result<Pager, uzswap_region::Error> {
    let pager = Pager::builder().memory(memory).compressor(compressor);
    let pager = pager.mode(crate::mode()).on_fork(OnFork::Whole);
    let backing = std::env::var("UZSWAP_BACKING").unwrap_or_default();
    match backing.rsplit_once(':').and_then(|(folder, size)| Some((folder, size.parse().ok()?))) {
        Some((folder, bytes)) => pager.unnamed_backing(folder, bytes).build(),
        None => pager.build(),
    }
}

/// Whether this library's threads run: while one is being made it blocks all signals, and a
/// replaced instruction would kill it.
fn has_threads() -> bool {
    const THREADS: usize = 3;
    (0..1000).any(|turn| {
        if turn > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let ours = ours();
        ours.len() >= THREADS && ours.into_iter().all(is_reached)
    })
}

/// Whether our signals reach a thread.
fn is_reached(thread: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap_or_default();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let blocked = blocked.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    blocked.is_some_and(|mask| mask & processes::ours() == 0)
}

/// Threads of this library's own.
fn ours() -> Vec<i32> {
    let is_ours = |thread: &i32| {
        let name = fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
        name.is_ok_and(|name| name.starts_with("uzswap-"))
    };
    stop::threads().unwrap_or_default().into_iter().filter(is_ours).collect()
}

/// Who else looks after this program's memory or signals.
fn watcher() -> Option<&'static str> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
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

fn has_ring() -> bool {
    let links = fs::read_dir("/proc/thread-self/fd").into_iter().flatten().flatten();
    links
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| target.to_string_lossy().contains("io_uring"))
}

/// What the kernel and this library use around the block of a thread: the C library's description
/// of the thread behind it, and a margin.
const BLOCK: usize = 64 << 10;

/// Bytes that variables of all files take before the block of a thread.
static VARIABLES: AtomicUsize = AtomicUsize::new(0);

/// The block of a thread with its variables, which serve its faults.
pub fn around_block(block: usize) -> Range<usize> {
    block.saturating_sub(VARIABLES.load(Relaxed) + BLOCK)..block.saturating_add(BLOCK)
}

/// Adopts the mappings that may be adopted. The kernel joins neighbours to one: so what has to stay
/// is cut out of them.
fn adopt_all(modules: &[sites::Module], stopped: &[Staying]) -> layout::Layout {
    let maps = fs::read_to_string("/proc/thread-self/maps").unwrap_or_default();
    let all: Vec<_> = maps.lines().filter_map(Mapped::parse).collect();
    let kept = kept(modules);
    let mut layout = layout::Layout::new(current_heap_end());
    let mut before: Option<&Mapped<'_>> = None;
    for one in &all {
        let has_guard = before.is_some_and(|before| {
            before.range.end == one.range.start
                && before.access.starts_with(b"---")
                && before.range.len() <= GUARD_MAX
        });
        before = Some(one);
        let is_heap = one.name == "[heap]";
        let is_unnamed = one.name.is_empty() || one.name.starts_with("[anon:");
        if one.has_file || !(is_unnamed || is_heap) {
            continue;
        }
        match &one.access {
            b"rw-p" => {
                adopt_around(one.range.clone(), (&kept, stopped), has_guard && !is_heap);
            }
            b"---p" if kept.iter().all(|kept| !map::overlap(kept, &one.range)) => {
                layout.reserve(one.range.clone());
            }
            _ => {}
        }
    }
    layout
}

/// What stays, whatever it is joined with.
fn kept(modules: &[sites::Module]) -> Vec<Range<usize>> {
    let signal_stacks = SIGNAL_STACKS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Variables of the program itself may leave; those of libraries serve faults, too.
    let libraries = modules.iter().filter(|module| !module.name.is_empty());
    let of_main = around_block(crate::front().map_or(0, |front| front.first_thread));
    let mut kept = map::own();
    kept.extend([memory::own(), of_main]);
    kept.extend(libraries.map(|module| module.range.clone()));
    kept.extend(signal_stacks.iter().cloned());
    kept
}

/// Adopts what may be adopted of a mapping, which begins with the stack of a thread if there is a
/// guard before it.
fn adopt_around(
    range: Range<usize>,
    (kept, stopped): (&[Range<usize>], &[Staying]),
    has_guard: bool,
) {
    // The block of a thread is at the end of its stack.
    let blocks = stopped.iter().filter(|thread| range.contains(&thread.block));
    let stacks_end = blocks.map(|thread| thread.block + BLOCK).max();
    let is_running =
        |thread: &Staying| range.contains(&thread.stack) && !range.contains(&thread.block);
    let is_ours = kept.iter().any(|kept| kept.start <= range.start && range.start < kept.end);
    let is_stack = has_guard && stacks_end.is_none() && !is_ours;
    if is_stack || stopped.iter().any(is_running) {
        return;
    }
    let Some(agent) = AGENT.get() else { return };
    let start = stacks_end.unwrap_or(range.start).max(range.start);
    for part in map::cut(start..range.end, kept) {
        // SAFETY: private, anonymous, readable and writable, by the kernel's own list; no stack,
        // nothing of ours; the layout is locked.
        let adopted = unsafe { agent.pager.adopt(part, true) };
        // What cannot be is left as it is.
        let _ = adopted;
    }
}

fn current_heap_end() -> usize {
    // SAFETY: asks only.
    unsafe { uzswap_calls::raw(libc::SYS_brk as u64, [0; 6]) as usize }
}

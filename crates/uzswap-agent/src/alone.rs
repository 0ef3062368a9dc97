//! Calls before which our threads end.
//!
//! The kernel permits some to a process of one thread only, such as `unshare` of the user
//! namespace. If the program has only one thread, ours end before the call and start again after
//! it. Others restrict the calls that all threads may make (seccomp).

use crate::decide::FILTERS;
use crate::{AGENT, front, inside, is_inside, looker, name, say, stage, threads};
use libc::{c_char, c_int, c_long};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_calls::{raw, stop};
use uzswap_sys::own_threads;
use uzswap_tree::front::FILTERED;

/// A request to the watching thread to end, in any stage of the program.
static IS_WANTED: AtomicBool = AtomicBool::new(false);
/// The longest wait for the end of the watching thread, which may be taking the program over.
const PATIENCE: Duration = Duration::from_secs(20);

/// True while the thread that watches must end.
pub fn is_wanted() -> bool {
    IS_WANTED.load(Relaxed)
}

/// True if a call with these arguments needs a single thread.
fn is_for_one_thread(number: c_long, arguments: [u64; 2]) -> bool {
    const ONE: c_int =
        libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;
    match number {
        libc::SYS_unshare => arguments[0] & ONE as u64 != 0,
        // For `setns`, this does not look at the kind of the namespace.
        _ => true,
    }
}

/// `unshare`, `setns`: the kernel's answer.
pub extern "C" fn call(number: c_long, first: u64, second: u64) -> c_long {
    // SAFETY: given numbers only.
    let make = || unsafe { raw(number as u64, [first, second, 0, 0, 0, 0]) };
    if !is_for_one_thread(number, [first, second]) {
        return make();
    }
    let deadline = Instant::now() + PATIENCE;
    let mut looks = 0;
    while looks < LOOKS && Instant::now() < deadline {
        if is_alone() {
            return without_our_threads(make);
        }
        let result = make();
        if result != -c_long::from(libc::EINVAL) {
            return result;
        }
        threads::pause();
        looks += u32::from(!own_threads::are_coming());
    }
    make()
}

/// Makes a call by which a program that was not taken over restricts its later calls, and writes
/// the kernel's answer. After that no thread of ours makes a call. `false` if the caller has to
/// make the call.
pub unsafe extern "C" fn restrict(
    number: c_long,
    arguments: &[u64; 6],
    answer: &mut c_long,
) -> bool {
    let Some(front) = front().filter(|_| !stage::is_taken_over()) else { return false };
    // Below an earlier filter we have no thread, and look for none.
    if is_inside() || front.waits.load(SeqCst) & FILTERED != 0 {
        return false;
    }
    let inside = inside();
    let (own, name, ours) = (front.tree.own_name(), name(), looker::apart(threads::ours));
    drop(inside);
    let is_watched = threads::watcher().is_some_and(|watcher| ours.contains(&watcher));
    end_watching();
    ours.into_iter().for_each(await_end);
    IS_WANTED.store(false, Relaxed);
    // The watching thread may have just taken the program over.
    let is_here = !stage::is_taken_over();
    if is_here {
        front.restrict();
        // SAFETY: the program's own call.
        *answer = unsafe { raw(number as u64, *arguments) } as c_long;
    }
    if is_here && *answer == 0 {
        if stage::refuse() {
            front.tree.leave_alone_as(own, &[name.as_bytes(), b": ", FILTERS.as_bytes()]);
        }
    } else if is_watched {
        if is_here {
            front.waits.fetch_and(!FILTERED, Relaxed);
        }
        watch_again();
    }
    is_here
}

/// How often we count the other threads. The kernel still lists a thread of ours for a moment after
/// our list has dropped it.
const LOOKS: u32 = 100;

fn is_alone() -> bool {
    of_program() == 1
}

/// The number of the program's threads; the largest number if the kernel does not list them.
fn of_program() -> usize {
    let _inside = inside();
    stop::threads().map_or(usize::MAX, |all| all.len().saturating_sub(threads::ours().len()))
}

/// The number of the program's threads, for a program that counts them itself by the links of a
/// folder.
pub unsafe extern "C" fn count(folder: c_int, path: *const c_char) -> u64 {
    settled(|| match of_program() {
        // The program may have left its /proc, but for a descriptor.
        // SAFETY: the caller's folder and path.
        usize::MAX => unsafe { links(folder, path) }.saturating_sub(2 + threads::count() as u64),
        count => count as u64,
    })
}

/// The number of the program's threads, by the kernel's list.
pub fn count_by_list() -> u64 {
    settled(|| of_program() as u64)
}

/// A count of the program's threads, after a moment for those of ours that begin or end.
fn settled(count: impl Fn() -> u64) -> u64 {
    let mut looks = 0;
    while looks < LOOKS && count() > 1 {
        threads::pause();
        looks += u32::from(!own_threads::are_coming());
    }
    count()
}

/// The links of a folder; the largest number if it cannot be found.
unsafe fn links(folder: c_int, path: *const c_char) -> u64 {
    let mut status = MaybeUninit::<libc::stat>::zeroed();
    let at = status.as_mut_ptr();
    let arguments = [folder as u64, path as u64, at as u64, 0, 0, 0];
    // SAFETY: the kernel reads the path, and writes the status, which may be all zeros.
    unsafe {
        match raw(libc::SYS_newfstatat as u64, arguments) {
            0 => status.assume_init().st_nlink as _,
            _ => u64::MAX,
        }
    }
}

pub fn end_watching() {
    IS_WANTED.store(true, Relaxed);
    crate::ring();
    // This thread waits outside of our code, so that the take-over can stop it.
    threads::watcher().into_iter().for_each(await_end);
}

fn without_our_threads<R>(work: impl FnOnce() -> R) -> R {
    end_watching();
    let _inside = inside();
    let work = || {
        // Our list may have dropped an ending thread that the kernel still counts.
        await_others();
        IS_WANTED.store(false, Relaxed);
        work()
    };
    let result = match AGENT.get() {
        Some(agent) => agent.pager.without_threads(work),
        None => Ok(work()),
    };
    let result = result.unwrap_or_else(|_| crate::die(&["its threads cannot be started again"]));
    watch_again();
    result
}

fn watch_again() {
    if crate::start().is_err() {
        stage::refuse();
        say(&["this program is no longer watched: no thread can be started; raise its limit of \
               processes (ulimit -u)"]);
    }
}

fn await_end(thread: i32) {
    await_false(|| threads::lives(thread));
}

/// Waits until the calling thread is the only one.
fn await_others() {
    await_false(|| !stop::threads().is_ok_and(|all| all.len() == 1));
}

fn await_false(goes_on: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while goes_on() && Instant::now() < deadline {
        threads::pause();
    }
}

//! Settings of this process, and information about others.

use crate::proc_text;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::io::FdFlags;
use rustix::process::{DumpableBehavior, Gid, Pid, PidfdFlags, Resource, Rlimit, Signal, Uid};
use rustix::process::{getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use std::io;

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps every page of this process in memory once it is touched, in present and future mappings.
/// (`MCL_ONFAULT`: reserved memory that is never used costs nothing.)
/// Errors: `OutOfMemory` beyond `RLIMIT_MEMLOCK` without CAP_IPC_LOCK.
pub fn lock_memory() -> io::Result<()> {
    let flags = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: the call takes flags and touches no memory of ours.
    check(unsafe { libc::mlockall(flags) })
}

/// A privilege of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// CAP_SYS_ADMIN: mount, switch swapping on and off.
    SysAdmin,
    /// CAP_SYS_RESOURCE: PR_SET_IO_FLUSHER, a lower `oom_score_adj`.
    SysResource,
}

/// True if the calling thread has the capability.
pub fn has_capability(capability: Capability) -> bool {
    let wanted = match capability {
        Capability::SysAdmin => CapabilitySet::SYS_ADMIN,
        Capability::SysResource => CapabilitySet::SYS_RESOURCE,
    };
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted))
}

/// Tells the kernel that this process serves block I/O, or that it no longer does. While the kernel
/// looks for memory for such a process, it does not write to the device that the process serves.
/// Child processes inherit this. Errors: `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn set_io_flusher(is_one: bool) -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(is_one)?)
}

/// Keeps the process's memory out of core dumps and away from other users' debuggers.
pub fn set_undumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Lets programs that are started from now on inherit a descriptor.
pub fn let_inherit(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::empty())?)
}

/// Closes a descriptor in programs that are started from now on.
pub fn keep_from_inheriting(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// Takes over a descriptor with which this program was started, by its number. The descriptor with
/// that number is closed afterwards. Fails if there is none.
pub fn take_inherited(number: i32) -> io::Result<OwnedFd> {
    let fd = inherited(number)?;
    // SAFETY: a number; the program that started this one left it open only for this call.
    unsafe { libc::close(number) };
    Ok(fd)
}

/// A descriptor that this program was started with, by its number. Fails if there is none.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: it is only duplicated, which fails if the number is no descriptor.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

/// Closes all descriptors but the standard ones and `kept`, because the program that started this
/// one may wait until they are closed. Called before this process has descriptors of its own.
/// Errors: `Unsupported` before Linux 5.9.
pub fn close_inherited(kept: Option<i32>) -> io::Result<()> {
    let close = |first: u32, last: u32| {
        // SAFETY: the call takes numbers; no code in this process has a descriptor yet, as the
        // caller promises.
        let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    match kept.and_then(|kept| u32::try_from(kept).ok()).filter(|kept| *kept >= 3) {
        None => close(3, u32::MAX),
        Some(3) => close(4, u32::MAX),
        Some(kept) => close(3, kept - 1).and_then(|()| close(kept + 1, u32::MAX)),
    }
}

/// Gives up root for good: the calling thread becomes another user, in these groups. For a process
/// with one thread, before it starts another program. Errors: `PermissionDenied`.
pub fn become_user(user: u32, group: u32, groups: &[u32]) -> io::Result<()> {
    use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
    let groups: Vec<_> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    set_thread_groups(&groups)?;
    set_thread_gid(Gid::from_raw(group))?;
    set_thread_uid(Uid::from_raw(user))?;
    Ok(())
}

/// Makes the descriptor `of` refer to the file of `new`. Closed by `exec`.
pub fn take_place(new: &impl AsFd, of: &impl AsFd) -> io::Result<()> {
    // SAFETY: both are open descriptors, and keep their owners.
    match unsafe { libc::dup3(number(new), number(of), libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Moves a descriptor to a high number, closed by `exec`, because the program may use low numbers
/// of its choice (`dup2`). If no high number is free, the descriptor keeps its number. Fails if the
/// program has closed the descriptor already, because some programs close all descriptors that they
/// do not know.
pub fn out_of_the_way(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // The kernel's table of descriptors reaches up to the highest.
    let least = limit.min(1024).saturating_sub(64) as i32;
    let high = match rustix::io::fcntl_dupfd_cloexec(&descriptor, least) {
        Ok(high) => high,
        Err(rustix::io::Errno::BADF) => {
            // The number may belong to another file by now.
            std::mem::forget(descriptor);
            return Err(rustix::io::Errno::BADF.into());
        }
        Err(_) => return Ok(descriptor),
    };
    let file = |of: &OwnedFd| rustix::fs::fstat(of).ok().map(|file| (file.st_dev, file.st_ino));
    let is_still_ours = file(&descriptor) == file(&high);
    let low = descriptor.into_raw_fd();
    if is_still_ours {
        // SAFETY: this value owned it, and no other code of ours has its number.
        unsafe { rustix::io::close(low) };
    }
    Ok(high)
}

/// Lets this process, and those that it starts, have as many descriptors as it may. Each serving
/// thread has a connection, and two while the next daemon takes over: from some 240 CPUs on these
/// are more than the usual 1024.
pub fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // After an error the limit is unchanged.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Soft limits that were raised to the hard ones. Dropping this value restores them.
#[derive(Debug)]
pub struct Lifted(Vec<(Resource, Rlimit)>);

impl Lifted {
    /// Raises each limit that is below a number. A limit may still be lower: see [`may_write_to`].
    pub fn new(wanted: &[(Resource, u64)]) -> Self {
        let with_limits =
            wanted.iter().map(|(resource, least)| (*resource, *least, getrlimit(*resource)));
        let low =
            with_limits.filter(|(_, least, limit)| limit.current.is_some_and(|now| now < *least));
        let before: Vec<_> = low.map(|(resource, _, limit)| (resource, limit)).collect();
        for (resource, limit) in &before {
            // After an error the limit is unchanged.
            let _ = setrlimit(*resource, Rlimit { current: limit.maximum, ..*limit });
        }
        Self(before)
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        for (resource, limit) in self.0.drain(..) {
            // To lower a limit is always permitted.
            let _ = setrlimit(resource, limit);
        }
    }
}

/// True if this process may write a file up to an offset. Beyond the limit a write does not only
/// fail, but also raises a signal.
pub fn may_write_to(end: u64) -> bool {
    getrlimit(Resource::Fsize).current.is_none_or(|limit| end <= limit)
}

fn number(descriptor: &impl AsFd) -> i32 {
    descriptor.as_fd().as_raw_fd()
}

/// Registers functions that each `fork` of this process calls from now on: before the fork, after
/// it in the parent, and after it in the child. The child's function must be safe in a signal
/// handler.
pub fn at_fork(
    prepare: Option<unsafe extern "C" fn()>,
    parent: Option<unsafe extern "C" fn()>,
    child: Option<unsafe extern "C" fn()>,
) -> io::Result<()> {
    // SAFETY: the call takes functions, which stay where they are.
    match unsafe { libc::pthread_atfork(prepare, parent, child) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Runs the calling thread before ordinary threads of the machine (nice −20). Errors:
/// `PermissionDenied` without CAP_SYS_NICE.
pub fn raise_priority() -> io::Result<()> {
    // SAFETY: the call takes numbers; `who` 0 is the calling thread.
    check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) })
}

/// Gives the calling thread precedence over all threads that are not in real time (SCHED_RR, its
/// lowest priority). The kernel lets such threads take memory when other threads must wait for
/// memory. This is for a thread that works only briefly. Errors: `PermissionDenied` without
/// CAP_SYS_NICE.
pub fn run_in_real_time() -> io::Result<()> {
    // The kernel's structure has this one member. This does not use the C library, because musl's
    // function fails.
    let priority: i32 = 1;
    // SAFETY: the priority outlives the call; `who` 0 is the calling thread.
    let done = unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_RR, &raw const priority)
    };
    check(done as i32)
}

/// Asks the kernel to end other processes first when memory runs out.
/// Errors: `PermissionDenied` without CAP_SYS_RESOURCE.
pub fn spare_from_oom() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "-1000")
}

/// Undoes [`spare_from_oom`], which child processes inherit. Errors: `PermissionDenied` if the
/// process lacks CAP_SYS_RESOURCE and was not spared before.
pub fn do_not_spare_from_oom() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "0")
}

/// Waits for children that have ended, including those that were started before this process's last
/// `exec`. No other process can wait for them.
pub fn reap_children() {
    while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
}

/// The start of a process, in clock ticks since boot: with its number, its identity. `None` when
/// there is no such process.
pub fn start_time(pid: i32) -> Option<u64> {
    Some(Activity::of(pid)?.started)
}

/// True if the process with this number has no thread left. A killed process may have a dead first
/// thread while others are still in a system call.
pub fn is_gone(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads == 0 || threads == 1 && Activity::of(pid).is_none()
}

/// True if the process with this number has ended, and its parent has not waited for it. A
/// process's first thread may end before others.
pub fn has_ended(pid: i32) -> bool {
    let stat = read_stat(format!("/proc/{pid}").into());
    stat.is_some_and(|stat| {
        Activity::parse(&stat).is_none()
            && memory_and_threads(&stat).is_some_and(|(_, threads)| threads <= 1)
    })
}

/// True if a process has the memory of its parent, not a copy (`CLONE_VM`). Never true where the
/// kernel does not let this process compare the two.
pub fn has_parents_memory(pid: i32) -> bool {
    /// KCMP_VM of the kernel.
    const MEMORY: i32 = 1;
    let stat = read_stat(format!("/proc/{pid}").into()).unwrap_or_default();
    // After the name: the state, the parent.
    let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
    let parent: Option<i32> = parent.and_then(|parent| parent.parse().ok());
    // SAFETY: takes numbers.
    parent.is_some_and(|one| unsafe { libc::syscall(libc::SYS_kcmp, pid, one, MEMORY, 0, 0) } == 0)
}

/// True if two threads have different tables of descriptors. Never true where the kernel does not
/// compare these.
pub fn has_other_descriptors(thread: i32, other: i32) -> bool {
    /// KCMP_FILES of the kernel.
    const FILES: i32 = 2;
    // SAFETY: takes numbers.
    unsafe { libc::syscall(libc::SYS_kcmp, thread, other, FILES, 0, 0) > 0 }
}

/// True if any thread of the process with this number has memory. Such a thread may execute code,
/// or the kernel may write to the memory for it. A killed thread first gives up its memory, and
/// then closes its files, which may take for ever. So this may become false long before [`is_gone`]
/// becomes true.
pub fn has_memory(pid: i32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let stats = tasks.flatten().filter_map(|task| read_stat(task.path()));
    let mut seen = 0;
    for stat in stats {
        match memory_and_threads(&stat) {
            Some((0, _)) => seen += 1,
            _ => return true,
        }
    }
    // The kernel's list of threads may be cut short when a thread ends during the listing.
    let threads =
        read_stat(format!("/proc/{pid}").into()).and_then(|stat| memory_and_threads(&stat));
    threads.is_some_and(|(bytes, threads)| bytes != 0 || threads > seen)
}

/// True if a process has begun to end: its first thread has given up its memory, or there is no
/// such process. Makes one check, where [`has_memory`] checks each thread.
pub fn is_ending(pid: i32) -> bool {
    let stat = read_stat(format!("/proc/{pid}").into());
    stat.and_then(|stat| memory_and_threads(&stat)).is_none_or(|(bytes, _)| bytes == 0)
}

fn read_stat(folder: std::path::PathBuf) -> Option<String> {
    std::fs::read_to_string(folder.join("stat")).ok()
}

/// The size of a thread's mappings in bytes, and the number of threads of its process.
fn memory_and_threads(stat: &str) -> Option<(u64, u64)> {
    // Counted from the state, which follows the name: threads are the 18th field, addresses the
    // 21st.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let threads = fields.nth(17)?.parse().ok()?;
    Some((fields.nth(2)?.parse().ok()?, threads))
}

/// The activity of a process, by its first thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// Its start, in clock ticks since boot.
    pub started: u64,
    /// The number of its major faults so far, which waited for a device.
    pub major_faults: u64,
    /// True if the process runs, or waits only for a CPU.
    pub is_running: bool,
    /// True if the process waits for a device, as in a major fault.
    pub is_waiting: bool,
    /// True if the process was forked, and runs the program of its parent.
    pub is_fork: bool,
}

impl Activity {
    /// The present activity of a process; `None` when there is no such process.
    pub fn of(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(stat: &str) -> Option<Self> {
        /// PF_FORKNOEXEC of the kernel: the process has not called `execve` since its fork.
        const FORKED: u32 = 0x40;
        // The name, in parentheses, may have any characters. After it: the state, as the seventh
        // field the flags, as the tenth the major faults, as the twentieth the start.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        let state = fields.next()?;
        let flags: u32 = fields.nth(5)?.parse().ok()?;
        let major_faults = fields.nth(2)?.parse().ok()?;
        let started = fields.nth(9)?.parse().ok()?;
        let (is_running, is_waiting) = (state == "R", state == "D");
        let is_fork = flags & FORKED != 0;
        (state != "Z").then_some(Self { started, major_faults, is_running, is_waiting, is_fork })
    }
}

/// A process and those descendants that are still linked to it; empty when the process is gone.
pub fn tree(pid: i32) -> Vec<i32> {
    let mut all = Vec::from([pid]);
    all.retain(|pid| Activity::of(*pid).is_some());
    let mut next = 0;
    while let Some(parent) = all.get(next) {
        let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten();
        let texts =
            tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("children")));
        let texts: String = texts.filter_map(Result::ok).collect();
        all.extend(texts.split_whitespace().filter_map(|word| word.parse::<i32>().ok()));
        next += 1;
    }
    all
}

/// Asks the kernel to swap out a range of another process' addresses (Linux 5.10). Errors:
/// `PermissionDenied` without CAP_SYS_NICE or the right to trace the process; `InvalidInput` for
/// locked memory; `OutOfMemory` where nothing is mapped; ESRCH when the process is gone.
pub fn page_out(pid: i32, range: std::ops::Range<usize>) -> io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    let part = libc::iovec { iov_base: range.start as *mut _, iov_len: range.len() };
    // SAFETY: the call reads one iovec; the addresses in it are the other process', and its content
    // does not change.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            &raw const part,
            1usize,
            libc::MADV_PAGEOUT,
            0usize,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// True if a thread of the process waits for a device.
pub fn has_waiting_thread(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.filter_map(|stat| Activity::parse(&stat)).any(|activity| activity.is_waiting)
}

/// Memory of a process, its program included, in bytes; `None` when there is no such process.
pub fn resident_bytes(pid: i32) -> Option<u64> {
    resident_and_shared(&format!("/proc/{pid}/statm")).map(|[resident, _]| resident)
}

/// Anonymous memory of a process that is not shared, in bytes.
pub fn anonymous_bytes(pid: i32) -> Option<u64> {
    unshared(&format!("/proc/{pid}/statm"))
}

/// The number of system-call filters (seccomp) of a process. The strict mode counts as one.
pub fn call_filters(pid: i32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = |name| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let [mode, filters] = ["Seccomp:", "Seccomp_filters:"].map(|name| value(name).unwrap_or(0));
    filters.max(u32::from(mode == 1))
}

/// [`anonymous_bytes`] of this process. This works also after the first thread, which `/proc/self`
/// names, has ended.
pub fn own_anonymous_bytes() -> Option<u64> {
    unshared("/proc/thread-self/statm")
}

fn unshared(path: &str) -> Option<u64> {
    resident_and_shared(path).map(|[resident, shared]| resident.saturating_sub(shared))
}

/// Bytes of anonymous memory that this process shares with others since a fork, less its own part,
/// so that all processes together count a page once. The kernel visits each page for this.
pub fn own_shared_bytes() -> Option<u64> {
    let sums = std::fs::read_to_string("/proc/thread-self/smaps_rollup").ok()?;
    Some(sum(&sums, "Anonymous:")?.saturating_sub(sum(&sums, "Pss_Anon:")?))
}

/// Anonymous memory of a process in bytes; a page that several processes share counts in part for
/// each. The kernel visits each page for this.
pub fn anonymous_part_bytes(pid: i32) -> Option<u64> {
    let sums = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    sum(&sums, "Pss_Anon:")
}

fn sum(sums: &str, name: &str) -> Option<u64> {
    let rest = sums.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

fn resident_and_shared(path: &str) -> Option<[u64; 2]> {
    statm(path).map(|[resident, shared, ..]| [resident, shared])
}

/// Anonymous memory of this process, and all private memory that it may write without a further
/// request.
pub fn own_used_and_usable_bytes() -> Option<[u64; 2]> {
    let [resident, shared, .., usable] = statm("/proc/thread-self/statm")?;
    Some([resident.saturating_sub(shared), usable])
}

/// Bytes: resident, the shared part of it, code, libraries (0), private memory that may be written.
fn statm(path: &str) -> Option<[u64; 5]> {
    // Seven numbers, read into a buffer on the stack: at the first check of a program we have no
    // memory yet.
    let mut statm = [0; 160];
    let bytes = proc_text::read(path, &mut statm)?;
    let statm = str::from_utf8(&statm[..bytes]).ok()?;
    let mut fields = statm.split_whitespace().skip(1).map(str::parse::<u64>);
    let mut next = || fields.next()?.ok()?.checked_mul(rustix::param::page_size() as u64);
    Some([next()?, next()?, next()?, next()?, next()?])
}

/// Redirects standard error to `/dev/null`.
pub fn silence_errors() -> io::Result<()> {
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stderr(null)?)
}

/// Sends a signal. Errors: `NotFound` when the process is gone.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
    match rustix::process::kill_process(pid, signal) {
        Err(rustix::io::Errno::SRCH) => Err(io::ErrorKind::NotFound.into()),
        other => Ok(other?),
    }
}

/// Makes the calling process the leader of a session of its own, so that keys of the terminal no
/// longer signal it.
pub fn leave_session() -> io::Result<()> {
    rustix::process::setsid()?;
    Ok(())
}

/// Makes the kernel kill the calling process when the thread that started it ends. Errors:
/// `NotFound` when that process, which must be `parent`, has ended already.
pub fn die_with_parent(parent: i32) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    match rustix::process::getppid() == Pid::from_raw(parent) {
        true => Ok(()),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Bytes that a process may still write to the file system of `folder`.
pub fn free_disk_bytes(folder: &std::path::Path) -> io::Result<u64> {
    let statistics = rustix::fs::statvfs(folder)?;
    Ok(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}

/// True if this process runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_is_read_whatever_the_name() {
        let stat = "7 (a) R 1 (b) D 1 2 3 4 5 4194368 70 80 90 10 11 12 13 14 15 16 17 18 1234 0 0";
        let seen = Activity::parse(stat).unwrap();
        let expected = Activity {
            started: 1234,
            major_faults: 90,
            is_running: false,
            is_waiting: true,
            is_fork: true,
        };
        assert_eq!(seen, expected);
        assert_eq!(Activity::parse(&stat.replace("(b) D", "(b) Z")), None);
    }

    #[test]
    fn a_process_may_have_as_many_descriptors_as_it_is_allowed() {
        let before = getrlimit(Resource::Nofile);
        raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!((limit.current, limit.maximum), (before.maximum, before.maximum));
    }

    #[test]
    fn a_process_has_memory_until_it_is_killed_though_no_parent_waits_for_it() {
        let own = std::process::id() as i32;
        assert!(has_memory(own) && !is_ending(own));
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(has_memory(pid));
        kill(pid, libc::SIGKILL).unwrap();
        // The process stays a zombie until its parent waits for it.
        let began = std::time::Instant::now();
        while has_memory(pid) {
            assert!(began.elapsed().as_secs() < 60, "it does not end");
            std::thread::yield_now();
        }
        assert!(is_ending(pid));
        while !has_ended(pid) {
            assert!(began.elapsed().as_secs() < 60, "it is not listed as one that has ended");
        }
        child.wait().unwrap();
        assert!(!has_ended(pid) && !has_ended(own));
    }

    #[test]
    fn a_process_is_known_by_its_start_until_it_is_gone() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let pid = child.id() as i32;
        let start = start_time(pid).unwrap();
        assert!(start >= start_time(std::process::id() as i32).unwrap());
        kill(pid, libc::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(is_gone(pid) && !is_gone(std::process::id() as i32));
        assert!(!has_memory(pid) && is_ending(pid));
        assert_eq!(start_time(pid), None);
        assert_eq!(kill(pid, libc::SIGKILL).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

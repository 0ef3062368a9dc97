//! Replacing `syscall` instructions, while all other threads stand still ([`crate::stop`]).
//! A site becomes a
//! jump to its stub, or on x86-64 a trap if there is no room for a jump.

#[cfg(target_arch = "aarch64")]
#[path = "patch/aarch64.rs"]
mod processor;
#[cfg(target_arch = "x86_64")]
#[path = "patch/x86_64.rs"]
mod processor;

use crate::entry::{self, Looks};
use crate::sites::{SYSCALL, Site, mapped_code};
use processor::{BARE, REACH, RESUME, STUB};
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};
use rustix::thread::{MembarrierCommand, membarrier};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fs;
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::*};
use uzswap_sys::map::{Mapped, PAGE_BYTES};

/// The result of a replacement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Patched {
    /// Sites that jump to their stub.
    pub jumps: usize,
    /// Sites that trap, because their number is not in the instruction before them.
    pub traps: usize,
    /// Sites whose number is not wanted.
    pub left: usize,
}

/// The address at which a thread continues, for the address of each trap. A table with open
/// addressing. One thread fills it before the traps exist; signal handlers read it.
struct Traps {
    slots: Box<[(usize, usize)]>,
}

static TRAPS: AtomicPtr<Traps> = AtomicPtr::new(ptr::null_mut());

impl Traps {
    fn new(all: &HashMap<usize, usize>) -> Self {
        let len = (all.len() * 2).next_power_of_two().max(16);
        let mut slots = vec![(0, 0); len].into_boxed_slice();
        for (from, to) in all {
            let mut at = Self::first(*from, len);
            while slots[at].0 != 0 {
                at = (at + 1) % len;
            }
            slots[at] = (*from, *to);
        }
        Self { slots }
    }

    fn first(address: usize, len: usize) -> usize {
        address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 & (len - 1)
    }

    fn find(&self, address: usize) -> Option<usize> {
        let mut at = Self::first(address, self.slots.len());
        loop {
            match self.slots[at] {
                (0, _) => return None,
                (from, to) if from == address => return Some(to),
                _ => at = (at + 1) % self.slots.len(),
            }
        }
    }
}

/// Replaces sites; one for each process.
#[derive(Debug)]
pub struct Patcher {
    traps: HashMap<usize, usize>,
    /// Space for stubs: the address of the next stub, and the end of its page.
    rooms: BTreeMap<usize, usize>,
    /// All memory for stubs.
    stubs: Vec<Range<usize>>,
}

impl Patcher {
    /// Sets the functions that handle calls, and directs the traps to the stubs. Replaces nothing
    /// yet. Fails on an x86-64 without XSAVE, or on a kernel without `membarrier`.
    pub fn new(looks: Looks) -> io::Result<Self> {
        if let Some(reason) = entry::why_unsupported() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        membarrier(MembarrierCommand::RegisterPrivateExpeditedSyncCore)?;
        entry::set(looks);
        Ok(Self { traps: HashMap::new(), rooms: BTreeMap::new(), stubs: Vec::new() })
    }

    /// The memory of all stubs.
    pub fn stubs(&self) -> &[Range<usize>] {
        &self.stubs
    }

    /// The address at which a thread continues after it executed the `ud2` at `address`; `None` if
    /// the `ud2` is not ours. For the handler of SIGILL, which the caller sets. Safe in a signal
    /// handler.
    pub fn resume_at(address: usize) -> Option<usize> {
        // SAFETY: a table, once made, stays.
        let traps = unsafe { TRAPS.load(Acquire).as_ref() }?;
        traps.find(address)
    }

    /// The start and number of a call whose `syscall` ends at an address, there or in its stub, if
    /// it was replaced and its number is known. A thread that continues at that start repeats the
    /// call. Safe in a signal handler.
    #[cfg(target_arch = "x86_64")]
    pub fn call_before(behind: usize) -> Option<(usize, u32)> {
        let stub = Self::resume_at(behind.wrapping_sub(SYSCALL.len()))? - RESUME;
        // SAFETY: a stub of ours, which is never freed.
        unsafe { processor::number_in(stub) }.map(|number| (stub, number))
    }

    /// Forgets the sites of a range: other code has been mapped there.
    pub fn forget(&mut self, range: &Range<usize>) {
        self.traps.retain(|address, _| !range.contains(address));
    }

    /// Makes the calls that trap the program's own again: they raise no signal from then on, and
    /// are not seen. Calls that jump to their stubs still do.
    ///
    /// # Errors
    /// The kernel does not tell the mappings, or code may not be written.
    pub fn end_traps(&self) -> io::Result<()> {
        let (code, writable) = (mapped_code()?, writable_code()?);
        // Code of some of these addresses may have been unmapped.
        let is_there = |at: usize| code.iter().any(|part| part.start <= at && at + 1 < part.end);
        let all = self.traps.keys().copied().filter(|at| is_there(*at));
        // SAFETY: mapped code, which was read when it was searched.
        let traps: Vec<usize> = all.filter(|at| unsafe { processor::is_trap(*at) }).collect();
        let changed = traps.iter().flat_map(|at| [*at, at + 1]);
        let pages = pages_of(changed, |page| writable.iter().any(|part| part.contains(&page)));
        let work = PreparedPatch { sites: Vec::new(), pages, patched: Patched::default() };
        work.access(MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)?;
        // SAFETY: the code is writable until `work` is dropped.
        traps.iter().for_each(|at| unsafe { processor::end_trap(*at) });
        // As in `apply`.
        let _ = membarrier(MembarrierCommand::PrivateExpeditedSyncCore);
        Ok(())
    }

    /// The place, as the program knows it, of a thread that makes a bare call, or has just made it:
    /// at the replaced `syscall`, or behind it. `None` if the thread is at no bare call. Safe in a
    /// signal handler.
    pub fn site_of_bare(instruction: usize) -> Option<usize> {
        let is_bare = |at: usize| Self::resume_at(at) == Some(at.wrapping_sub(BARE) + RESUME);
        let behind = instruction.wrapping_sub(SYSCALL.len());
        // SAFETY: a stub of ours has a bare call there.
        unsafe {
            match (is_bare(instruction), is_bare(behind)) {
                (true, _) => Some(entry::behind_site(instruction) - SYSCALL.len()),
                (_, true) => Some(entry::behind_site(behind)),
                _ => None,
            }
        }
    }

    /// Prepares the replacement of sites whose number is unknown or wanted. Sites that were
    /// replaced before stay as they are. Code in `writable` stays writable.
    pub fn prepare(
        &mut self,
        sites: &[Site],
        wants: impl Fn(u32) -> bool,
        writable: &[Range<usize>],
    ) -> io::Result<PreparedPatch> {
        let mut patched = Patched::default();
        let mut work = Vec::new();
        for site in sites {
            if self.traps.contains_key(&site.address) {
                continue;
            }
            match site.number.known() {
                Some(number) if !wants(number) => patched.left += 1,
                None if site.number.is_trap() => patched.traps += 1,
                _ => patched.jumps += 1,
            }
            if site.number.known().is_none_or(&wants) {
                work.push((*site, self.stub(site)?));
            }
        }
        // A stub's own call is no trap, but a signal may interrupt it: so it is in the table as
        // well.
        let known = |(site, stub): &(Site, usize)| {
            [(site.address, stub + RESUME), (stub + BARE, stub + RESUME)]
        };
        self.traps.extend(work.iter().flat_map(known));
        // The old table is never freed: a handler may read it.
        TRAPS.store(Box::into_raw(Box::new(Traps::new(&self.traps))), Release);
        let stays = |page: usize| writable.iter().any(|range| range.contains(&page));
        let changed = work.iter().flat_map(|(site, _)| processor::changed(site));
        let pages = pages_of(changed, stays);
        let work = PreparedPatch { sites: work, pages, patched };
        work.access(MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC)?;
        Ok(work)
    }

    /// Writes the stub of a site, and returns its address.
    fn stub(&mut self, site: &Site) -> io::Result<usize> {
        let stub = self.room(site.address)?;
        let code = processor::stub_code(site, stub);
        // SAFETY: writable space of ours, and no thread has its address yet.
        unsafe { ptr::copy_nonoverlapping(code.as_ptr(), stub as *mut u8, STUB) };
        processor::forget_instructions(stub, STUB);
        Ok(stub)
    }

    /// Space for a stub within reach of an address.
    fn room(&mut self, near: usize) -> io::Result<usize> {
        let reach = near.saturating_sub(REACH)..near.saturating_add(REACH);
        let found = self.rooms.range(reach).find(|(next, end)| *next < *end);
        let (next, end) = match found {
            Some((next, end)) => (*next, *end),
            None => {
                let (start, end) = map_near(near)?;
                self.stubs.push(start..end);
                (start, end)
            }
        };
        self.rooms.remove(&next);
        self.rooms.insert(next + STUB, end);
        Ok(next)
    }
}

/// Maps memory for stubs in a gap near an address.
fn map_near(near: usize) -> io::Result<(usize, usize)> {
    const BYTES: usize = 16 * PAGE_BYTES;
    let maps = fs::read_to_string("/proc/thread-self/maps")?;
    let taken = maps.lines().filter_map(|line| {
        let mut mapped = Mapped::parse(line)?;
        if mapped.name == "[stack]" {
            // A stack may grow up to its limit.
            mapped.range.start = mapped.range.start.saturating_sub(stack_growth());
        }
        Some(mapped.range)
    });
    // Gaps, the nearest first.
    let mut before = 1 << 16;
    let mut gaps = Vec::new();
    for range in taken {
        if range.start.saturating_sub(before) >= 3 * BYTES {
            gaps.push(before + BYTES..range.start - BYTES);
        }
        before = before.max(range.end);
    }
    let at = |gap: &Range<usize>| near.clamp(gap.start, gap.end - BYTES) / PAGE_BYTES * PAGE_BYTES;
    gaps.sort_by_key(|gap| at(gap).abs_diff(near));
    for place in gaps.iter().map(at).filter(|at| at.abs_diff(near) < REACH).take(8) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let access = ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC;
        // SAFETY: it replaces no mapping.
        let mapped = unsafe { mm::mmap_anonymous(place as *mut c_void, BYTES, access, flags) };
        match mapped {
            Ok(start) => return Ok((start as usize, start as usize + BYTES)),
            // This system denies memory that is both written and executed, at any address.
            Err(Errno::ACCESS | Errno::PERM) => {
                let reason = "it may have no memory that is both written and executed";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
            }
            Err(_) => {}
        }
    }
    Err(io::Error::new(io::ErrorKind::OutOfMemory, "no addresses are free near the C library"))
}

/// Bytes by which the first thread's stack may grow, at most, with the gap that the kernel keeps
/// below it.
fn stack_growth() -> usize {
    const GAP: u64 = 1 << 20;
    const UNLIMITED: u64 = 1 << 30;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    (limit.unwrap_or(UNLIMITED).min(UNLIMITED) + GAP) as usize
}

/// Sites whose replacement is prepared. Their code is writable until this value is dropped, and
/// then has its former access.
#[derive(Debug)]
#[must_use = "nothing is replaced before `apply`"]
pub struct PreparedPatch {
    sites: Vec<(Site, usize)>,
    /// The pages that were not writable.
    pages: Vec<Range<usize>>,
    patched: Patched,
}

impl PreparedPatch {
    fn access(&self, flags: MprotectFlags) -> io::Result<()> {
        self.pages.iter().try_for_each(|pages| {
            // SAFETY: code stays code; being writable meanwhile is the purpose.
            Ok(unsafe { mm::mprotect(pages.start as *mut c_void, pages.len(), flags) }?)
        })
    }

    /// Replaces the sites. Allocates nothing and takes no lock.
    ///
    /// # Safety
    /// No other thread of the process runs, except threads that make no call through these sites.
    pub unsafe fn apply(&self) -> Patched {
        for (site, stub) in &self.sites {
            // SAFETY: the caller's promise; `prepare` has made the code writable.
            unsafe { processor::replace(site, *stub) };
        }
        // Makes all CPUs drop instructions that they have fetched before. `membarrier` was
        // registered, so this cannot fail.
        let _ = membarrier(MembarrierCommand::PrivateExpeditedSyncCore);
        self.patched
    }
}

impl Drop for PreparedPatch {
    fn drop(&mut self) {
        // After an error the code stays writable, which does not harm its function.
        let _ = self.access(MprotectFlags::READ | MprotectFlags::EXEC);
    }
}

/// All code that may be written. A program that was linked by `ld -N` has its variables beside its
/// code.
pub fn writable_code() -> io::Result<Vec<Range<usize>>> {
    let maps = fs::read_to_string("/proc/thread-self/maps")?;
    let all = maps.lines().filter_map(Mapped::parse);
    Ok(all.filter(|one| one.access[1..3] == *b"wx").map(|one| one.range).collect())
}

/// The pages of changed addresses that do not stay writable, neighbours together.
fn pages_of(
    changed: impl Iterator<Item = usize>,
    stays: impl Fn(usize) -> bool,
) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = changed
        .map(|address| address / PAGE_BYTES * PAGE_BYTES)
        .filter(|page| !stays(*page))
        .collect();
    starts.sort_unstable();
    starts.dedup();
    let mut pages: Vec<Range<usize>> = Vec::new();
    for start in starts {
        match pages.last_mut() {
            Some(last) if last.end == start => last.end += PAGE_BYTES,
            _ => pages.push(start..start + PAGE_BYTES),
        }
    }
    pages
}

//! Constants of loaded files that hold addresses: tables of functions, types, texts. At the start
//! the dynamic linker writes the addresses into them (RELRO), which makes each process's copy of
//! these pages its own. In a browser or a compiler that is some 10 MiB in each process.
//!
//! A page of a file leaves by none of our means. So at the take-over such pages move to memory of
//! no file, at the same addresses. Nobody writes them, so the program's threads go on meanwhile.
//!
//! Some code runs while a fault is served: ours, the C library's, that of a library which has put
//! itself in place of the C library's functions. Constants that such code reads stay.

use crate::pins::peek_bytes;
use crate::{front, looker};
use rustix::mm::{self, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::ptr;
use uzswap_calls::sites::Module;
use uzswap_sys::map::{self, PAGE_BYTES};
use uzswap_sys::process_pages::{self, PageState};
use uzswap_sys::smaps::{self, Described};

/// Fewer constants of a file stay, since each part that moves takes mappings.
const LEAST: usize = 256 << 10;
/// Pages move in runs of at least this length. A run may have a few pages that are not relocated.
const RUN_LEAST: usize = 64 << 10;
const GAP: usize = 4 * PAGE_BYTES;
/// Bytes that exist twice for a moment.
const CHUNK: usize = 1 << 20;

/// Moves the constants of `modules` to memory of no file. Returns the addresses that moved, in
/// order. `is_plain` is true for a mapping without special rules. The layout is locked.
pub fn take_out(modules: &[Module], is_plain: fn(&Described<'_>) -> bool) -> Vec<Range<usize>> {
    let has_many = |module: &Module| bytes(&module.constants) >= LEAST;
    if !modules.iter().any(has_many) {
        return Vec::new();
    }
    // Without the list nothing moves.
    let text = looker::apart(|| smaps::read().unwrap_or_default());
    let mut mapped = smaps::parse(&text);
    mapped.retain(|one| one.mapped.has_file && one.mapped.access[3] == b'p');
    let serving = serving(modules, &mapped);
    mapped.retain(|one| &one.mapped.access == b"r--p" && one.anonymous_bytes > 0 && is_plain(one));
    let mut moved = Vec::new();
    for (module, serves) in modules.iter().zip(serving) {
        if serves || !has_many(module) {
            continue;
        }
        for part in &module.constants {
            for one in mapped.iter().filter(|one| map::overlap(&one.mapped.range, part)) {
                let range = &one.mapped.range;
                let part = part.start.max(range.start)..part.end.min(range.end);
                for run in looker::apart(|| own_copies(&part)).unwrap_or_default() {
                    moved.extend(take_from_file(run));
                }
            }
        }
    }
    moved
}

fn bytes(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).sum()
}

/// For each module, true if its code may run while a fault is served: it is ours, or a serving
/// module holds its address. The program itself never serves faults.
fn serving(modules: &[Module], mapped: &[Described<'_>]) -> Vec<bool> {
    let agent = take_out as *const () as usize;
    let preloaded = front().map_or(0, |front| ptr::from_ref(front) as usize);
    let is_ours = |module: &Module| [agent, preloaded].iter().any(|at| module.range.contains(at));
    let mut serving: Vec<_> = modules.iter().map(is_ours).collect();
    let mut new: Vec<_> = (0..modules.len()).filter(|module| serving[*module]).collect();
    while let Some(module) = new.pop() {
        let module = &modules[module];
        // Where functions are found before the start, their addresses are in the constants. The
        // variables hold others: ours those of the program's handlers, the dynamic linker's those
        // of tables.
        let has_variables = !is_ours(module) && !module.name.contains("/ld-");
        let is_read = |one: &&Described<'_>| {
            map::overlap(&one.mapped.range, &module.range)
                && one.anonymous_bytes > 0
                && (has_variables || one.mapped.access[1] != b'w')
        };
        for one in mapped.iter().filter(is_read) {
            for_each_word(&one.mapped.range, |word| {
                let found = modules.iter().position(|module| module.range.contains(&word));
                let found = found.filter(|found| !modules[*found].name.is_empty());
                if let Some(found) = found.filter(|found| !serving[*found]) {
                    serving[found] = true;
                    new.push(found);
                }
            });
        }
    }
    serving
}

/// Calls `each` for each word of readable memory.
fn for_each_word(range: &Range<usize>, mut each: impl FnMut(usize)) {
    let mut page = [0; PAGE_BYTES];
    for at in range.clone().step_by(PAGE_BYTES) {
        let read = peek_bytes(at as u64, &mut page);
        page[..read].as_chunks().0.iter().for_each(|word| each(usize::from_ne_bytes(*word)));
    }
}

/// The runs of pages that are the process's own copies.
fn own_copies(range: &Range<usize>) -> io::Result<Vec<Range<usize>>> {
    let states = process_pages::own_states(range)?;
    let is_own =
        |state: &PageState| state.is_present() && !state.is_of_file() || state.is_swapped();
    let pages = (range.start..).step_by(PAGE_BYTES).zip(&states);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (page, _) in pages.filter(|(_, state)| is_own(state)) {
        match runs.last_mut() {
            Some(run) if page - run.end <= GAP => run.end = page + PAGE_BYTES,
            _ => runs.push(page..page + PAGE_BYTES),
        }
    }
    runs.retain(|run| run.len() >= RUN_LEAST);
    Ok(runs)
}

/// Moves pages to memory of no file. Returns the part that moved: all of it, unless memory or
/// mappings are short.
fn take_from_file(run: Range<usize>) -> Option<Range<usize>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let copy = unsafe { mm::mmap_anonymous(ptr::null_mut(), run.len(), access, MapFlags::PRIVATE) };
    let copy = copy.ok()?;
    // The pages of a huge page do not leave one by one. If the kernel refuses, it has none.
    // SAFETY: our own new mapping.
    let _ = unsafe { mm::madvise(copy, run.len(), mm::Advice::LinuxNoHugepage) };
    let mut done = 0;
    while done < run.len() {
        let length = CHUNK.min(run.len() - done);
        // SAFETY: a part of our own mapping, which has not moved yet.
        let chunk = unsafe { copy.byte_add(done) };
        if replace(chunk, run.start + done, length).is_none() {
            break;
        }
        done += length;
    }
    if done < run.len() {
        // SAFETY: the rest of our own mapping, which has not moved.
        let _ = unsafe { mm::munmap(copy.byte_add(done), run.len() - done) };
    }
    (done > 0).then(|| run.start..run.start + done)
}

/// Fills `chunk` with the bytes at an address, and moves it there.
fn replace(chunk: *mut c_void, at: usize, length: usize) -> Option<()> {
    // SAFETY: our own writable mapping, which only this function uses.
    let bytes = unsafe { std::slice::from_raw_parts_mut(chunk.cast::<u8>(), length) };
    if peek_bytes(at as u64, bytes) < length {
        return None;
    }
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: our own mapping moves over private pages of a file that nobody may write, with the
    // same bytes and the same access. The kernel replaces them at once, as other threads see it. No
    // call changes the mapping meanwhile, because the layout is locked.
    unsafe {
        mm::mprotect(chunk, length, MprotectFlags::READ).ok()?;
        mm::mremap_fixed(chunk, length, length, flags, at as *mut c_void).ok()?;
    }
    Some(())
}

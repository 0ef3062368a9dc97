//! The program's code, and the replacement of its system calls.

use crate::{calls, forking, handlers, looker};
use std::io;
use std::iter::successors;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::*};
use uzswap_calls::sites::{self, Module, Site};
use uzswap_calls::{Patcher, PreparedPatch, table, writable_code};

/// Files with code, and the replacement of their calls, which is prepared.
pub struct Code {
    pub modules: Vec<Module>,
    /// The first is for the files, the second for the kernel's own code. If the kernel has sealed
    /// its code, the agent does not see the few calls there.
    patches: Vec<PreparedPatch>,
}

impl Code {
    /// Prepares the replacement of all calls.
    pub fn new(modules: Vec<Module>, patcher: &mut Patcher) -> io::Result<Self> {
        let mut code = Self { modules, patches: Vec::new() };
        code.prepare(patcher)?;
        Ok(code)
    }

    fn prepare(&mut self, patcher: &mut Patcher) -> io::Result<()> {
        let (kernels, files): (Vec<_>, Vec<_>) =
            self.modules.iter().partition(|one| one.is_kernels());
        let writable = looker::apart(writable_code)?;
        let mut prepare = |modules: &[_]| {
            let sites = || sites_of(modules);
            looker::apart(|| patcher.prepare(&sites(), table::is_looked_at, &writable))
        };
        self.patches.push(prepare(&files)?);
        self.patches.extend(prepare(&kernels));
        Ok(())
    }

    /// Adds code that the program has loaded since the search, and drops unloaded code. True if
    /// there was any such code. The program's threads stand still, and one of them may have the
    /// dynamic linker's lock.
    pub fn renew(&mut self, patcher: &mut Patcher) -> io::Result<bool> {
        let before = self.modules.len();
        let mapped = looker::apart(sites::mapped_code)?;
        // Another file may be mapped at the same addresses by now.
        let is_there = |module: &Module| sites_of(&[module]).iter().all(Site::is_there);
        self.modules.retain(|module| module.is_mapped(&mapped) && is_there(module));
        let new = looker::apart(|| sites::unlisted(&self.modules))?;
        if self.modules.len() == before && new.is_empty() {
            return Ok(false);
        }
        self.modules.extend(new);
        // Unloaded code has no former access. Nothing was replaced.
        self.patches.clear();
        patcher.forget(&(0..usize::MAX));
        self.prepare(patcher)?;
        Ok(true)
    }

    /// Replaces the calls and the handlers.
    ///
    /// # Safety
    /// As of [`PreparedPatch::apply`].
    pub unsafe fn replace(&self) {
        for patch in &self.patches {
            // SAFETY: the caller's promise.
            unsafe { patch.apply() };
        }
        handlers::take_over();
        handlers::begin_on_stack(libc::SIGBUS, true);
    }
}

/// All files with code.
pub fn modules() -> io::Result<Vec<Module>> {
    let mut modules = sites::modules();
    modules.extend(looker::apart(|| sites::unlisted(&modules))?);
    Ok(modules)
}

/// The system calls of a file, which is known by its name and where it is.
struct FileSites {
    name: String,
    range: Range<usize>,
    sites: Vec<Site>,
    /// The file that was found before this file.
    before: Option<&'static Self>,
}

/// The file that was found last. Entries of the list are never changed or freed, so that a child
/// forked at any time has the whole list. Only one thread adds to it.
static KNOWN: AtomicPtr<FileSites> = AtomicPtr::new(ptr::null_mut());

fn last_known() -> Option<&'static FileSites> {
    // SAFETY: null, or an entry that is never freed.
    unsafe { KNOWN.load(Acquire).as_ref() }
}

/// Looks for system calls before memory is short. In a program with many libraries the search takes
/// so long that the program could grow by tens of MiB.
pub fn look_ahead() {
    let modules = {
        // During that work this thread holds the dynamic linker's lock.
        let _busy = forking::busy();
        sites::make_tables();
        modules()
    };
    // If the list fails, the take-over will report the reason.
    let Ok(modules) = modules else { return };
    looker::apart(|| sites_of(&modules.iter().collect::<Vec<_>>()));
}

/// The system calls of all files but this library. Searches the files that are not known yet.
fn sites_of(modules: &[&Module]) -> Vec<Site> {
    let mut found = Vec::new();
    for module in modules {
        if module.contains(calls::on_call as fn(&mut _) -> _ as usize) {
            continue;
        }
        let is_it = |known: &&FileSites| known.range == module.range && known.name == module.name;
        let known = successors(last_known(), |known| known.before).find(is_it);
        let known = known.unwrap_or_else(|| {
            let (name, range) = (module.name.clone(), module.range.clone());
            let (sites, before) = (module.sites(), last_known());
            let new = Box::leak(Box::new(FileSites { name, range, sites, before }));
            KNOWN.store(new, Release);
            new
        });
        found.extend_from_slice(&known.sites);
    }
    found
}

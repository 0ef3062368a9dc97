//! `uzswap memory`: the sections that the pool lies in.

use crate::cli::{MemoryArguments, MemoryChange};
use crate::commands::status::{NONE_RUNS, Running, require_root};
use crate::device::folder;
use crate::error::Failure;
use crate::size;
use crate::stdio::show;
use std::fs;
use uzswap_block::control;

/// Changes a section if asked to, and otherwise shows all sections.
pub fn memory(arguments: &MemoryArguments) -> Result<(), Failure> {
    require_root()?;
    if !Running::read().is_some_and(|running| running.alive) {
        return Err(Failure::new(NONE_RUNS));
    }
    match &arguments.change {
        Some(MemoryChange::Offline { section }) => change(section, "offline"),
        Some(MemoryChange::Online { section }) => change(section, "online"),
        None => print(),
    }
}

fn change(section: &str, state: &str) -> Result<(), Failure> {
    let file = folder::mount().join(control::PARAMETERS).join(control::MEMORY);
    fs::write(file, format!("{section} {state}")).map_err(|error| {
        let why = read(control::MEMORY_FAILURE).ok().filter(|why| !why.trim().is_empty());
        Failure::new(why.map_or_else(|| error.to_string(), |why| why.trim().into()))
    })
}

fn read(name: &str) -> Result<String, Failure> {
    let file = folder::mount().join(control::STATISTICS_FOLDER).join(name);
    fs::read_to_string(&file).map_err(|error| Failure::new(format!("{}: {error}", file.display())))
}

fn print() -> Result<(), Failure> {
    show!("{:<14} {:<14} {:<5} {:>12}", "sections", "state", "node", "used");
    for line in read(control::SECTIONS)?.lines().skip(1) {
        let fields = line.split(' ').collect::<Vec<_>>();
        let [sections, state, node, used] = fields[..] else { continue };
        let used = used.parse().map(size::show).unwrap_or_default();
        show!("{sections:<14} {state:<14} {node:<5} {used:>12}");
    }
    Ok(())
}

//! The files of the libraries that the command's processes load.

use std::env;
use std::path::{Path, PathBuf};
use uzswap_sys::c_library;

/// The preloaded library, under its name when installed and when built.
pub const LIBRARY: &str = "libuzswap_preload.so";
/// The library that the preloaded library loads, from the same folder.
pub const AGENT: &str = "libuzswap_agent.so";
/// The folder, beside both libraries, of the preloaded library for newer systems
/// (`uzswap-preload/src/c_library.rs`). Only published files have it.
const UNIFIED: &str = "glibc-2.34";

/// The path of the preloaded library. The libraries are next to this program, or where packages put
/// them. The error has the places that were tried, and the remedy.
pub fn preloaded() -> Result<PathBuf, String> {
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [folder.to_owned(), folder.join("../lib/uzswap")];
    let all = |place: &&PathBuf| [LIBRARY, AGENT].iter().all(|name| place.join(name).exists());
    let found = places.iter().find(all).map(|place| {
        let unified = place.join(UNIFIED).join(LIBRARY);
        let is_chosen = c_library::is_unified() && unified.exists();
        if is_chosen { unified } else { place.join(LIBRARY) }
    });
    found.ok_or_else(|| {
        let (own, place) = (own.display(), places[1].display());
        format!(
            "{LIBRARY} and {AGENT} are neither beside {own} nor in {place}; `pip install uzswap`, \
             or the tarball of a release, brings program and libraries"
        )
    })
}

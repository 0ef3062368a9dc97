//! One pager for the process, made at its first large block, and regions of it as blocks.

use std::cell::Cell;
use std::env;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::ptr;
use std::sync::OnceLock;
use uzswap_region::{Advice, Error, MemorySize, Mode, OnFork, Pager, is_pager_thread};

/// No block below this is large, whatever UZSWAP_ABOVE says: each takes a mapping of its own.
pub const LEAST_BYTES: usize = 64 << 10;
pub const PAGE: usize = 4096;
/// What regions begin at multiples of.
pub const ALIGNMENT: usize = 2 << 20;
const ABOVE_DEFAULT: u64 = 1 << 20;

struct Blocks {
    pager: Pager,
    above: usize,
}

/// `None` once it is known that the program runs without.
static BLOCKS: OnceLock<Option<Blocks>> = OnceLock::new();

thread_local! {
    /// This thread is making the pager: what the C library allocates for it meanwhile is its own.
    static IS_MAKING: Cell<bool> = const { Cell::new(false) };
}

/// A block of the pager; null if it has no room. `None` if the program is to have an ordinary one.
pub fn take(bytes: usize) -> Option<*mut c_void> {
    // Training a dictionary takes megabytes.
    if IS_MAKING.get() || is_pager_thread() {
        return None;
    }
    let blocks = BLOCKS.get_or_init(|| {
        IS_MAKING.set(true);
        let blocks = make();
        IS_MAKING.set(false);
        blocks
    });
    let blocks = blocks.as_ref()?;
    if bytes < blocks.above {
        return None;
    }
    match blocks.pager.map(bytes) {
        Ok(region) => Some(region.into_raw().as_ptr().cast()),
        // A fork has no pager.
        Err(Error::Forked) => None,
        Err(error) => {
            say(&error.to_string());
            Some(ptr::null_mut())
        }
    }
}

/// The pager that the environment asks for. A program is never worse off for having been started
/// with this library: where memory cannot be paged it says so once, and everything is as without
/// it.
fn make() -> Option<Blocks> {
    let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    let memory = variable("UZSWAP_MEMORY").or_else(|| {
        say("UZSWAP_MEMORY is not set; set it to the memory for large blocks, for example 512M");
        None
    })?;
    let blocks = || -> Result<Blocks, String> {
        let size = |name: &'static str, text: &str| {
            MemorySize::from(text).bytes(name).map_err(|error| error.to_string())
        };
        let above = match variable("UZSWAP_ABOVE") {
            Some(text) => size("UZSWAP_ABOVE", &text)?,
            None => ABOVE_DEFAULT,
        };
        let memory = size("UZSWAP_MEMORY", &memory)?;
        let is_in_thread = match variable("UZSWAP_MODE").as_deref() {
            None | Some("handler-threads") => false,
            Some("in-thread") => true,
            Some(other) => {
                return Err(format!("UZSWAP_MODE: {other}; use handler-threads or in-thread"));
            }
        };
        // A program that knows nothing of this library gives its blocks to system calls.
        let mode = if is_in_thread { Mode::InThread } else { Mode::HandlerThreads };
        let mut builder = Pager::builder().memory(memory).mode(mode);
        if let Some(name) = variable("UZSWAP_COMPRESSOR") {
            builder = builder.compressor(&name);
        }
        if let Some(on_fork) = variable("UZSWAP_FORK") {
            let on_fork = on_fork.parse::<OnFork>();
            builder = builder.on_fork(on_fork.map_err(|error| format!("UZSWAP_FORK: {error}"))?);
        }
        if let Some(backing) = variable("UZSWAP_BACKING") {
            builder = builder.backing(&backing);
        }
        let pager = builder.build().map_err(|error| error.to_string())?;
        Ok(Blocks { pager, above: above as usize })
    };
    blocks().inspect_err(|error| say(&format!("{error}; running without"))).ok()
}

/// Length of a block of the pager.
pub fn length(block: *mut c_void) -> Option<usize> {
    BLOCKS.get()?.as_ref()?.pager.region_of(block.addr()).map(|(_, bytes)| bytes)
}

/// Gives back what lies behind the first `bytes` of a block of `length`.
pub fn drop_behind(block: *mut c_void, bytes: usize, length: usize) {
    let kept = bytes.next_multiple_of(PAGE);
    if kept < length {
        // An error means that this is a fork, whose memory is its own.
        let _ = advise(block.wrapping_byte_add(kept), length - kept, libc::MADV_DONTNEED);
    }
}

/// Frees a block of the pager.
pub fn give_back(block: *mut c_void) {
    if let Some(Some(blocks)) = BLOCKS.get() {
        // An error means that this is a fork without a copy, in which there is no block.
        // SAFETY: the program gives the block up with the call; `take` has kept no region of it.
        let _ = unsafe { blocks.pager.unmap(block.addr()) };
    }
}

/// `madvise` of a range that begins in a block of the pager: an error number, or 0. `None` for all
/// other memory.
///
/// The kernel may not be told: what it takes away itself is lost, and ends the process.
pub fn advise(at: *mut c_void, bytes: usize, advice: c_int) -> Option<c_int> {
    let block = BLOCKS.get()?.as_ref()?.pager.region_at(at.addr())?;
    let start = at.addr() - block.as_ptr().addr().get();
    if !start.is_multiple_of(PAGE) {
        return Some(libc::EINVAL);
    }
    let range = start..start.saturating_add(bytes).min(block.len());
    let advised = match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => block.advise(range, Advice::DontNeed),
        libc::MADV_PAGEOUT => block.advise(range, Advice::PageOut),
        // Of huge pages, of what to read ahead: the pager decides.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_WILLNEED
        | libc::MADV_COLD
        | libc::MADV_HUGEPAGE
        | libc::MADV_NOHUGEPAGE
        | libc::MADV_DONTFORK => Ok(()),
        _ => return Some(libc::EINVAL),
    };
    match advised {
        Ok(()) => Some(0),
        // A fork has ordinary memory there.
        Err(Error::Forked) => None,
        // There is no room for all of what is to go out: the rest stays.
        Err(_) => Some(libc::EBUSY),
    }
}

fn say(text: &str) {
    // Where standard error is closed there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "uzswap: {text}");
}

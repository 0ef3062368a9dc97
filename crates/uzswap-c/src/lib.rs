//! The C API. `include/uzswap.h` is generated from this file (`cargo run -p xtask -- docs`), so the
//! comments on exported items address programs in C.
//!
//! No logic lives here. Each function turns its arguments into those of `uzswap-region`, and an
//! error into a return value and a text. A panic is a defect of ours and becomes an error as well:
//! no panic crosses into C.

#![expect(
    unsafe_code,
    reason = "pointers and signals from C, NumPy's interface for allocators: null is an error; headers state the rest"
)]
#![expect(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "C, which calls these, has no word for it: the header states the conditions"
)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_region::{Advice, Mode, OnFork, Pinned, RegionRef, io};

// It replaces functions of the C library, which the C library's headers declare.
/// cbindgen:ignore
mod signals;

/// A memory budget for any number of regions. Its functions may be called from any thread.
pub struct Pager {
    pager: uzswap_region::Pager,
    /// The pinned ranges, by address and length. A range stays in memory while it is in this map.
    pins: Mutex<HashMap<(usize, usize), Vec<Pinned>>>,
}

/// Options of a pager. Begin with UZSWAP_OPTIONS_INIT. A member that stays 0 or NULL has its
/// default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// sizeof(uzswap_options) when the program was compiled: later versions add members at the end.
    pub size: usize,
    /// Bytes for everything: pages in memory, compressed pages, and tables. Must be given.
    pub memory: u64,
    /// "lz4:0" (the default: LZ4 made for heaps), "lz4", "zstd", "lzo", "deflate", "wkdm" or "raw";
    /// ":LEVEL" if the compressor has levels.
    pub compressor: *const c_char,
    /// "PATH" or "PATH:SIZE": a file for the coldest pages. NULL: all pages stay in memory.
    pub backing: *const c_char,
    /// UZSWAP_MODE_...
    pub mode: u32,
    /// UZSWAP_ON_FORK_...
    pub on_fork: u32,
    /// Threads that page out and compress, 1 to 64; 0 for one.
    pub reclaim_threads: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// The safest mode that the process may use.
pub const MODE_DEFAULT: u32 = 0;
/// Each thread serves its own faults. Needs no privilege. A system call on memory that is paged out
/// fails with EFAULT: pin the memory first, or use uzswap_read and uzswap_write.
pub const MODE_IN_THREAD: u32 = 1;
/// Threads of the pager serve all faults, also those of system calls. Needs root, or read and write
/// access to /dev/userfaultfd.
pub const MODE_HANDLER_THREADS: u32 = 2;

/// A child has no regions: an access to one is a SIGSEGV.
pub const ON_FORK_ABSENT: u32 = 0;
/// A child has a private copy of each region, as of the fork. It is ordinary memory, which
/// uzswap_unmap unmaps. In the child all other functions fail for the parent's pagers; the child
/// may make its own. A fork writes all pages to a file without a name in /var/tmp. If it cannot,
/// the child has no regions, as above. A lock that a handler of pthread_atfork takes must not be
/// held over uzswap_map, uzswap_unmap or uzswap_advise.
pub const ON_FORK_COPY: u32 = 1;

/// No particular use; withdraws other advice.
pub const ADVICE_NORMAL: u32 = 0;
/// Pages will be used in order.
pub const ADVICE_SEQUENTIAL: u32 = 1;
/// Pages will be used in no order.
pub const ADVICE_RANDOM: u32 = 2;
/// Pages will be used soon.
pub const ADVICE_WILL_NEED: u32 = 3;
/// Compress these pages now.
pub const ADVICE_PAGE_OUT: u32 = 4;
/// Drop the content of these pages: they read as zeros.
pub const ADVICE_DONT_NEED: u32 = 5;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs `body`. After an error or a panic, sets the thread's last error and returns `failure`.
fn answer<T>(failure: T, body: impl FnOnce() -> Result<T, String>) -> T {
    let text = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return value,
        Ok(Err(text)) => text,
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().copied().map(str::to_owned);
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
            format!("a defect in uzswap: {}", said.unwrap_or_default())
        }
    };
    // Only a path from the caller could have a zero byte, and a C string has none.
    LAST_ERROR.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
    failure
}

fn said(error: uzswap_region::Error) -> String {
    error.to_string()
}

fn pager<'a>(pager: *const Pager) -> Result<&'a Pager, String> {
    // SAFETY: the header demands a pager of uzswap_pager_new that was not passed to
    // uzswap_pager_free; null is an error.
    unsafe { pager.as_ref() }.ok_or_else(|| "the pager is NULL".to_owned())
}

fn text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>, String> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the header demands a string that ends with a zero byte.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| format!("{name}: not UTF-8"))
}

impl Pager {
    /// The region at an address, and the offset in it.
    fn part(
        &self,
        address: *mut c_void,
        bytes: usize,
    ) -> Result<(RegionRef, Range<usize>), String> {
        let region = self.pager.region_at(address.addr()).ok_or_else(|| {
            format!("{address:p} is not in a region of this pager; pass an address that uzswap_map returned")
        })?;
        let start = address.addr() - region.as_ptr().addr().get();
        Ok((region, start..start.saturating_add(bytes)))
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<(usize, usize), Vec<Pinned>>> {
        // The table is consistent after any panic: each change is one call.
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason why this thread's last failed call failed: one line with the remedy. It is valid
/// until the thread's next failed call, and empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

/// The options in this library's form. The program may be compiled with an older or a newer header.
/// Members that the older one lacks have their defaults. Members that only the newer one has must
/// be 0.
fn options(given: *const Options) -> Result<Options, String> {
    const OURS: usize = size_of::<Options>();
    // The size itself, and the members that must be given.
    const LEAST: usize = offset_of!(Options, compressor);
    const MOST: usize = 4096;
    // SAFETY: the header demands options that begin with their size; null is an error.
    let size = *unsafe { given.cast::<usize>().as_ref() }.ok_or("the options are NULL")?;
    if !(LEAST..=MOST).contains(&size) || !size.is_multiple_of(align_of::<Options>()) {
        return Err(format!(
            "options of {size} bytes, not of {OURS}; begin with UZSWAP_OPTIONS_INIT"
        ));
    }
    // SAFETY: the options are of this size, by the header.
    let beyond = unsafe { slice::from_raw_parts(given.cast::<u8>(), size) }.get(OURS..);
    if beyond.is_some_and(|beyond| beyond.iter().any(|byte| *byte != 0)) {
        return Err(format!(
            "options of {size} bytes, not of {OURS}, ask for options that this library does not know; \
             install the libuzswap that the program was compiled with"
        ));
    }
    let mut options = MaybeUninit::<Options>::zeroed();
    // SAFETY: copies within both structures; zeros are a valid value of each member, and so is the
    // value from C.
    unsafe {
        let to = options.as_mut_ptr().cast::<u8>();
        ptr::copy_nonoverlapping(given.cast::<u8>(), to, size.min(OURS));
        Ok(options.assume_init())
    }
}

/// Makes a pager with these options. Returns NULL on failure, with uzswap_last_error(). Maps
/// nothing.
///
/// The options are only read during the call.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_pager_new(options: *const Options) -> *mut Pager {
    answer(ptr::null_mut(), || {
        let options = self::options(options)?;
        let mut builder = uzswap_region::Pager::builder().memory(options.memory);
        if let Some(name) = text("compressor", options.compressor)? {
            builder = builder.compressor(name);
        }
        if let Some(backing) = text("backing", options.backing)? {
            builder = builder.backing(backing);
        }
        builder = match options.mode {
            MODE_DEFAULT => builder,
            MODE_IN_THREAD => builder.mode(Mode::InThread),
            MODE_HANDLER_THREADS => builder.mode(Mode::HandlerThreads),
            other => return Err(format!("mode {other}: there is no such mode; see uzswap.h")),
        };
        builder = match options.on_fork {
            ON_FORK_ABSENT => builder,
            ON_FORK_COPY => builder.on_fork(OnFork::PrivateCopy),
            other => return Err(format!("on_fork {other}: there is no such choice; see uzswap.h")),
        };
        if options.reclaim_threads > 0 {
            builder = builder.reclaim_threads(options.reclaim_threads as usize);
        }
        if options.reserved != 0 {
            return Err("reserved is not 0; begin with UZSWAP_OPTIONS_INIT".to_owned());
        }
        let pager = builder.build().map_err(said)?;
        Ok(Box::into_raw(Box::new(Pager { pager, pins: Mutex::default() })))
    })
}

/// Frees a pager. Returns 0, or -1 if a region of it is still mapped; nothing changes then. The
/// pager may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_pager_free(pager: *mut Pager) -> c_int {
    if pager.is_null() {
        return 0;
    }
    answer(-1, || {
        let regions = self::pager(pager)?.pager.regions();
        if regions > 0 {
            return Err(format!("{regions} regions are still mapped; uzswap_unmap them first"));
        }
        // SAFETY: the header demands a pager of uzswap_pager_new, passed here once.
        drop(unsafe { Box::from_raw(pager) });
        Ok(0)
    })
}

/// Maps at least `bytes` of zeros at a page boundary. Returns NULL on failure, with
/// uzswap_last_error(). Pages take the pager's memory only after their first use.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_map(pager: *mut Pager, bytes: usize) -> *mut c_void {
    answer(ptr::null_mut(), || {
        let region = self::pager(pager)?.pager.map(bytes).map_err(said)?;
        Ok(region.into_raw().as_ptr().cast())
    })
}

/// Unmaps the region that begins at `address`. Returns 0, or -1 if no region of the pager does.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_unmap(pager: *mut Pager, address: *mut c_void) -> c_int {
    answer(-1, || {
        let pager = self::pager(pager)?;
        // SAFETY: the header demands memory that is no longer used.
        unsafe { pager.pager.unmap(address.addr()) }.map_err(said)?;
        Ok(0)
    })
}

/// Brings a range into memory and pins it until uzswap_unpin. Returns 0, or -1 if it does not fit.
///
/// A pinned range may be used by system calls, in any mode, and by devices. Ranges may overlap.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_pin(pager: *mut Pager, address: *mut c_void, bytes: usize) -> c_int {
    answer(-1, || {
        let pager = self::pager(pager)?;
        let (region, range) = pager.part(address, bytes)?;
        let pinned = region.pin(range).map_err(said)?;
        pager.pins().entry((address.addr(), bytes)).or_default().push(pinned);
        Ok(0)
    })
}

/// Undoes one uzswap_pin of the same range. Returns 0, or -1 if the range is not pinned.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_unpin(pager: *mut Pager, address: *mut c_void, bytes: usize) -> c_int {
    answer(-1, || {
        let mut pins = self::pager(pager)?.pins();
        let range = (address.addr(), bytes);
        let held = pins.get_mut(&range).ok_or_else(|| {
            format!("{bytes} bytes at {address:p} are not pinned; give the range as to uzswap_pin")
        })?;
        held.pop();
        if held.is_empty() {
            pins.remove(&range);
        }
        Ok(0)
    })
}

/// Brings a range into memory now, as far as the pager's memory suffices. Returns 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_touch(pager: *mut Pager, address: *mut c_void, bytes: usize) -> c_int {
    answer(-1, || {
        let (region, range) = self::pager(pager)?.part(address, bytes)?;
        region.touch(range).map_err(said)?;
        Ok(0)
    })
}

/// Announces the use of a range by one of UZSWAP_ADVICE_.... Returns 0 or -1.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_advise(
    pager: *mut Pager,
    address: *mut c_void,
    bytes: usize,
    advice: u32,
) -> c_int {
    answer(-1, || {
        let advice = match advice {
            ADVICE_NORMAL => Advice::Normal,
            ADVICE_SEQUENTIAL => Advice::Sequential,
            ADVICE_RANDOM => Advice::Random,
            ADVICE_WILL_NEED => Advice::WillNeed,
            ADVICE_PAGE_OUT => Advice::PageOut,
            ADVICE_DONT_NEED => Advice::DontNeed,
            other => return Err(format!("advice {other}: there is no such advice; see uzswap.h")),
        };
        let (region, range) = self::pager(pager)?.part(address, bytes)?;
        region.advise(range, advice).map_err(said)?;
        Ok(0)
    })
}

/// Changes the pager's memory. Returns 0, or -1 if that is impossible; nothing changes then.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_set_memory(pager: *mut Pager, bytes: u64) -> c_int {
    answer(-1, || {
        self::pager(pager)?.pager.set_memory(bytes).map_err(said)?;
        Ok(0)
    })
}

/// The pager's mode: UZSWAP_MODE_IN_THREAD or UZSWAP_MODE_HANDLER_THREADS; 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_mode(pager: *const Pager) -> u32 {
    answer(MODE_DEFAULT, || match self::pager(pager)?.pager.mode() {
        Mode::InThread => Ok(MODE_IN_THREAD),
        Mode::HandlerThreads => Ok(MODE_HANDLER_THREADS),
        Mode::Protection => unreachable!("no pager is made with it here"),
    })
}

/// Calls `visit` with the name and value of each statistic (docs/statistics.md) and with `context`,
/// until it returns other than 0. Returns that value, or else 0; -1 on failure, with
/// uzswap_last_error(). A name is valid only during the call.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_stats(
    pager: *const Pager,
    visit: Option<extern "C" fn(name: *const c_char, value: u64, context: *mut c_void) -> c_int>,
    context: *mut c_void,
) -> c_int {
    answer(-1, || {
        let visit = visit.ok_or("visit is NULL")?;
        for (name, value) in self::pager(pager)?.pager.stats().iter() {
            let name = CString::new(name).map_err(|error| error.to_string())?;
            let answered = visit(name.as_ptr(), value, context);
            if answered != 0 {
                return Ok(answered);
            }
        }
        Ok(0)
    })
}

/// Writes the value of a statistic to `value`. Returns 0, or -1 if there is no such statistic.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_stat(pager: *const Pager, name: *const c_char, value: *mut u64) -> c_int {
    answer(-1, || {
        let wanted = text("name", name)?.ok_or("the name is NULL")?;
        let statistics = self::pager(pager)?.pager.stats();
        let found = statistics.iter().find(|(name, _)| *name == wanted);
        let (_, found) = found.ok_or_else(|| format!("{wanted}: there is no such statistic"))?;
        // SAFETY: the header demands a place for the value; null is an error.
        *unsafe { value.as_mut() }.ok_or("the place for the value is NULL")? = found;
        Ok(0)
    })
}

/// Like read(2), into memory that may be paged out, in any mode.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_read(file: c_int, into: *mut c_void, bytes: usize) -> isize {
    transfer(file, |file| io::read(file, memory(into, bytes)?))
}

/// Like write(2), from memory that may be paged out, in any mode.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_write(file: c_int, from: *const c_void, bytes: usize) -> isize {
    transfer(file, |file| io::write(file, memory(from.cast_mut(), bytes)?))
}

/// Like pread(2), into memory that may be paged out, in any mode.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_pread(file: c_int, into: *mut c_void, bytes: usize, offset: i64) -> isize {
    transfer(file, |file| io::read_at(file, memory(into, bytes)?, place(offset)?))
}

/// Like pwrite(2), from memory that may be paged out, in any mode.
#[unsafe(no_mangle)]
pub extern "C" fn uzswap_pwrite(
    file: c_int,
    from: *const c_void,
    bytes: usize,
    offset: i64,
) -> isize {
    transfer(file, |file| io::write_at(file, memory(from.cast_mut(), bytes)?, place(offset)?))
}

/// The memory of a call like read(2).
fn memory<'a>(address: *mut c_void, bytes: usize) -> std::io::Result<&'a mut [u8]> {
    match address.is_null() && bytes > 0 {
        true => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
        false if bytes == 0 => Ok(&mut []),
        // SAFETY: the header demands memory of this length, which no other thread uses during the
        // call.
        false => Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), bytes) }),
    }
}

fn place(offset: i64) -> std::io::Result<u64> {
    u64::try_from(offset).map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns as a system call does: a number of bytes, or -1 and errno.
fn transfer(file: c_int, body: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<usize>) -> isize {
    let done = match file {
        0.. => answer(Err(libc::EIO), || {
            // SAFETY: not -1. The kernel answers EBADF for a number that is not open.
            let done = body(unsafe { BorrowedFd::borrow_raw(file) });
            Ok(done.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
        }),
        _ => Err(libc::EBADF),
    };
    match done {
        Ok(bytes) => bytes.cast_signed(),
        Err(number) => {
            // SAFETY: the address of the thread's own errno.
            unsafe { *libc::__errno_location() = number };
            -1
        }
    }
}

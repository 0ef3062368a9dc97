//! NumPy's own allocations, in regions. It uses NumPy's interface for allocators (NEP 49, NumPy
//! 1.22 and later).
//!
//! A handler is a table of functions in a capsule. For a new array, NumPy calls the handler of the
//! current context, and the array keeps a reference to that handler. Ours takes a region for a
//! large array, and passes other requests to the former handler.
//!
//! The functions recognize blocks of regions by address, so each accepts any block.

#![expect(
    unsafe_code,
    reason = "pointers and signals from C, NumPy's interface for allocators: null is an error; headers state the rest"
)]

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_char, c_void};
use std::ptr;
use uzswap_region::{Error, Pager};

/// `PyDataMemAllocator` of numpy/ndarraytypes.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Allocator {
    context: *mut c_void,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// `PyDataMem_Handler` of numpy/ndarraytypes.h, version 1.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
    version: u8,
    allocator: Allocator,
}

/// The context that NumPy passes to the functions.
struct Context {
    pager: Pager,
    /// Blocks of at least this many bytes are regions.
    above: usize,
    small: Allocator,
    /// Keeps the former handler, and so `small`, alive.
    _before: Py<PyAny>,
    /// Our handler for NumPy. It points to this context.
    handler: Handler,
}

const CAPSULE: &std::ffi::CStr = c"mem_handler";
/// Indices in NumPy's table of functions, the same since 1.22.
const SET_HANDLER: usize = 304;
const GET_HANDLER: usize = 305;

type SetHandler = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;
type GetHandler = unsafe extern "C" fn() -> *mut ffi::PyObject;

/// Makes a handler that puts arrays of at least `above` bytes into regions of the pager.
pub fn handler<'py>(py: Python<'py>, pager: Pager, above: usize) -> PyResult<Bound<'py, PyAny>> {
    let table = table(py)?;
    // SAFETY: the place has this function in every NumPy since 1.22 (`table` has checked that).
    let get: GetHandler = unsafe { std::mem::transmute(*table.add(GET_HANDLER)) };
    // SAFETY: called with the interpreter attached; the answer is a new reference, or null with an
    // exception set.
    let before = unsafe { Bound::from_owned_ptr_or_err(py, get())? };
    // SAFETY: NumPy's handlers are capsules of this name; anything else is an exception.
    let raw = unsafe { ffi::PyCapsule_GetPointer(before.as_ptr(), CAPSULE.as_ptr()) };
    if raw.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a capsule of this name points to a handler, which lives as long as the capsule.
    let small = unsafe { (*raw.cast::<Handler>()).allocator };
    let mut name = [0; 127];
    for (to, from) in name.iter_mut().zip(c"uzswap".to_bytes()) {
        *to = *from as c_char;
    }
    let allocator = Allocator { context: ptr::null_mut(), malloc, calloc, realloc, free };
    let handler = Handler { name, version: 1, allocator };
    let context = Context { pager, above, small, _before: before.unbind(), handler };
    let context = Box::into_raw(Box::new(context));
    // SAFETY: `context` was just made, is not null, and nothing else knows it yet.
    let capsule = unsafe {
        (*context).handler.allocator.context = context.cast();
        let handler = &raw mut (*context).handler;
        ffi::PyCapsule_New(handler.cast(), CAPSULE.as_ptr(), Some(forget))
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Installs `handler` in the current context. Returns the former handler.
pub fn install<'py>(handler: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = handler.py();
    let table = table(py)?;
    // SAFETY: the place has this function in every NumPy since 1.22 (`table` has checked that).
    let set: SetHandler = unsafe { std::mem::transmute(*table.add(SET_HANDLER)) };
    // SAFETY: called with the interpreter attached, with an object that NumPy checks to be a
    // handler's capsule; the answer is a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, set(handler.as_ptr())) }
}

/// NumPy's table of functions.
fn table(py: Python<'_>) -> PyResult<*const *const c_void> {
    let numpy = py.import("numpy")?;
    let version: String = numpy.getattr("__version__")?.extract()?;
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    if (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < (1, 22) {
        return Err(PyImportError::new_err(format!(
            "numpy {version} cannot change its allocator; install numpy 1.22 or later"
        )));
    }
    let core = py
        .import("numpy._core._multiarray_umath")
        .or_else(|_| py.import("numpy.core._multiarray_umath"))?;
    let capsule = core.getattr("_ARRAY_API")?;
    // SAFETY: a capsule without a name; anything else is an exception.
    let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), ptr::null()) };
    match table.is_null() {
        true => Err(PyErr::fetch(py)),
        false => Ok(table.cast()),
    }
}

/// The capsule's destructor. No array of this handler is left.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule that `handler` made, whose pointer is a `Handler` in
    // a `Context` from `Box::into_raw`; nothing can use it any more.
    unsafe {
        let handler = ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr()).cast::<Handler>();
        if !handler.is_null() {
            drop(Box::from_raw((*handler).allocator.context.cast::<Context>()));
        }
    }
}

/// The functions never unwind. The pager returns a region or an error. For an error they return
/// null, of which NumPy makes a `MemoryError`.
unsafe extern "C" fn malloc(context: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: NumPy gives back the context of the handler, which lives as long as the handler.
    let context = unsafe { &*context.cast::<Context>() };
    let large = if bytes < context.above { None } else { take(context, bytes) };
    // SAFETY: NumPy would make the same call.
    large.unwrap_or_else(|| unsafe { (context.small.malloc)(context.small.context, bytes) })
}

unsafe extern "C" fn calloc(context: *mut c_void, count: usize, each: usize) -> *mut c_void {
    // SAFETY: as in `malloc`.
    let context = unsafe { &*context.cast::<Context>() };
    let Some(bytes) = count.checked_mul(each) else { return ptr::null_mut() };
    // Pages of a region that were never written are zeros.
    let large = if bytes < context.above { None } else { take(context, bytes) };
    // SAFETY: NumPy would make the same call.
    large.unwrap_or_else(|| unsafe { (context.small.calloc)(context.small.context, count, each) })
}

unsafe extern "C" fn free(context: *mut c_void, block: *mut c_void, bytes: usize) {
    // SAFETY: as in `malloc`.
    let context = unsafe { &*context.cast::<Context>() };
    if length(context, block).is_none() {
        // SAFETY: no region has this block, so it came from the previous handler.
        unsafe { (context.small.free)(context.small.context, block, bytes) };
    } else {
        give_back(context, block);
    }
}

unsafe extern "C" fn realloc(
    context: *mut c_void,
    mut block: *mut c_void,
    bytes: usize,
) -> *mut c_void {
    let raw = context;
    // SAFETY: as in `malloc`.
    let context = unsafe { &*raw.cast::<Context>() };
    let held = match length(context, block) {
        Some(held) => held,
        None => {
            // Only the handler that made the block knows the block's length. So that handler
            // lengthens the block, which then moves to a region.
            // SAFETY: NumPy would make the same call.
            let small = unsafe { (context.small.realloc)(context.small.context, block, bytes) };
            if small.is_null() || bytes < context.above {
                return small;
            }
            block = small;
            bytes
        }
    };
    // SAFETY: NumPy would make the same call.
    let new = unsafe { malloc(raw, bytes) };
    if !new.is_null() {
        // SAFETY: both blocks are at least this long, and they are apart.
        unsafe { ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), held.min(bytes)) };
        // SAFETY: `realloc` may free the block, and no code uses it any more.
        unsafe { free(raw, block, held) };
    }
    new
}

const PAGE: usize = 4096;

/// A block of the pager, or null. `None` in a fork, which has no pager. There the program gets
/// ordinary memory.
fn take(context: &Context, bytes: usize) -> Option<*mut c_void> {
    match context.pager.map(bytes) {
        Ok(region) => Some(region.into_raw().as_ptr().cast()),
        Err(Error::Forked) => None,
        Err(_) => Some(ptr::null_mut()),
    }
}

/// The length of a pager's block; `None` for other blocks, which rarely begin at a page.
fn length(context: &Context, block: *mut c_void) -> Option<usize> {
    if block.is_null() || !block.addr().is_multiple_of(PAGE) {
        return None;
    }
    context.pager.region_of(block.addr()).map(|(_, bytes)| bytes)
}

fn give_back(context: &Context, block: *mut c_void) {
    // An error means that this is a fork, which has no regions. SAFETY: NumPy gives the block up
    // with the call; `take` has kept no region of it.
    let _ = unsafe { context.pager.unmap(block.addr()) };
}

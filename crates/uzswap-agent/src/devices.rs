//! Memory that the kernel or a device uses outside of the calls that name it.
//!
//! If a virtual machine's guest, a driver or an asynchronous read meets an absent page, no thread
//! can bring the page in. So such memory stays: at the calls that name it, the agent gives it back
//! to the program. Before the take-over the preloaded library reports these calls. If a program has
//! such a device open, but no such call was reported, it may have given the device memory in
//! another way. No call lists that memory, so uzswap leaves the program alone.

use crate::buffers::touched;
use crate::pins::{BUFFERS_MAX, Pins, buffer_of, make, peek, pin_vector};
use crate::{Agent, inside, layout};
use rustix::fs::{Dir, DirEntry, Mode, OFlags};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use uzswap_calls::{Call, Outcome};
use uzswap_sys::map::PAGE_BYTES;

/// The beginnings of the names of open files by which the kernel uses a program's memory at any
/// time: rings, and drivers to which programs hand memory.
const USERS: [&str; 5] =
    ["anon_inode:[io_uring]", "/dev/iommu", "/dev/infiniband/", "/dev/nvidia", "/dev/kfd"];
/// Devices that get memory by calls that [`note`] knows.
const TOLD: [&str; 3] = ["anon_inode:kvm-vm", "/dev/vhost-", "/dev/vfio/"];

/// The name of an open file by which the kernel may use memory that we do not know of. Looks at the
/// files of `thread`, since the program's first thread may have ended.
pub fn user(thread: i32) -> Option<String> {
    let told: &[&str] = if handed().is_empty() { &TOLD } else { &[] };
    let is_user = |name: &str| USERS.iter().chain(told).any(|user| name.starts_with(user));
    let mut names = open_files(thread).map(|name| name.to_string_lossy().into_owned());
    names.find(|name| is_user(name))
}

/// The names of the files that a thread has open.
pub fn open_files(thread: i32) -> impl Iterator<Item = PathBuf> {
    let folder = format!("/proc/self/task/{thread}/fd");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&folder, flags, Mode::empty()).and_then(Dir::new);
    let files = opened.into_iter().flatten().flatten();
    let number = |file: DirEntry| file.file_name().to_string_lossy().into_owned();
    files.filter_map(move |file| fs::read_link(format!("{folder}/{}", number(file))).ok())
}

/// Memory that the program handed to a device before it was taken over.
static HANDED: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// Memory that stays, since a device uses it.
pub fn handed() -> Vec<Range<usize>> {
    HANDED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The preloaded library calls this before an `ioctl` that hands memory to a device.
pub extern "C" fn note(number: u32, at: u64) {
    // The program may hold its allocator's locks. No signal handler may run while this thread holds
    // a lock of ours.
    let _inside = inside();
    let mut handed = HANDED.lock().unwrap_or_else(PoisonError::into_inner);
    each_range(number, at, |address, bytes| {
        let start = address as usize & !(PAGE_BYTES - 1);
        let end = (address as usize).saturating_add(bytes as usize);
        handed.push(start..end.next_multiple_of(PAGE_BYTES));
    });
}

/// Calls `each` with the address and the length of all memory that an `ioctl` hands to a device.
fn each_range(number: u32, at: u64, each: impl FnMut(u64, u64)) {
    let word = |place: u64| peek::<u64>(at.wrapping_add(place * 8)).unwrap_or(0);
    uzswap_tree::devices::each_range(number, word, each);
}

/// `ioctl`: the agent first gives memory that the call hands to a device back to the program.
pub fn control(agent: &Agent, call: &mut Call) -> Outcome {
    let [_, number, at, ..] = call.arguments;
    each_range(number as u32, at, |address, bytes| layout::give_back(agent, address, bytes));
    let mut pins = Pins::new(agent);
    if number as u32 == UFFDIO_COPY {
        // If the structure's end were absent, the kernel would copy the present part, and answer
        // that the caller has to continue.
        pins.pin(at, size_of::<UffdCopy>() as u64);
        peek::<UffdCopy>(at).inspect(|copy| _ = pins.pin(copy.from, copy.bytes));
    }
    touched(agent, call, &[2])
}

const UFFDIO_COPY: u32 = 0xc028_aa03;

/// The beginning of the kernel's `uffdio_copy`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UffdCopy {
    to: u64,
    from: u64,
    bytes: u64,
}

/// A request of an asynchronous read or write (`linux/aio_abi.h`).
#[derive(Clone, Copy)]
#[repr(C)]
struct Iocb {
    data: u64,
    key: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    rest: [u64; 3],
}

const _: () = assert!(size_of::<Iocb>() == 64);
const READ: u16 = 0;
const WRITE: u16 = 1;
const READ_VECTOR: u16 = 7;
const WRITE_VECTOR: u16 = 8;

/// `io_submit`: the kernel accesses the buffers before it answers, and pins those that a device
/// writes later. Where pages leave by a move, a pinned page does not leave. Where pages leave by a
/// copy, the agent gives the buffers back to the program.
pub fn submit(agent: &Agent, call: &mut Call) -> Outcome {
    layout::await_complete();
    let [_, count, list, ..] = call.arguments;
    let mut pins = Pins::new(agent);
    let pointers = count.min(4096);
    pins.pin(list, pointers * 8);
    for at in 0..pointers {
        let Some(request) = peek::<u64>(list.wrapping_add(at * 8)) else { break };
        pins.pin(request, size_of::<Iocb>() as u64);
        let Some(iocb) = peek::<Iocb>(request) else { continue };
        let stays = !agent.pager.leaves_pinned_in();
        match iocb.opcode {
            READ | WRITE if stays => layout::give_back(agent, iocb.buffer, iocb.bytes),
            READ | WRITE => _ = pins.pin(iocb.buffer, iocb.bytes),
            READ_VECTOR | WRITE_VECTOR => pin_vector(&mut pins, iocb.buffer, iocb.bytes),
            _ => {}
        }
        if stays && matches!(iocb.opcode, READ_VECTOR | WRITE_VECTOR) {
            let all = 0..iocb.bytes.min(BUFFERS_MAX);
            for (at, bytes) in all.filter_map(|number| buffer_of(iocb.buffer, number)) {
                layout::give_back(agent, at, bytes);
            }
        }
    }
    make(agent, call);
    Outcome::Done
}

//! Memory that the kernel or a device uses outside of the calls that name it.
//!
//! A virtual machine's guest, a driver or an asynchronous read finds an absent page where nobody
//! can bring it in. So such memory stays: the calls that name it give it back to the program. A
//! device that was told of memory before the take-over does not say which it was; a program that
//! has one open is left alone.

use crate::calls::{Holds, hold_vector, make, peek, touched};
use crate::{Agent, layout};
use std::fs;
use uzswap_calls::{Call, Outcome};

/// Open files by which the kernel uses a program's memory at any time, by the beginning of their
/// names: rings, virtual machines, drivers that programs hand their memory to.
const USERS: [&str; 8] = [
    "anon_inode:[io_uring]",
    "anon_inode:kvm-vm",
    "/dev/vhost-",
    "/dev/vfio/",
    "/dev/iommu",
    "/dev/infiniband/",
    "/dev/nvidia",
    "/dev/kfd",
];

/// The name of an open file by which the kernel may use this program's memory at any time.
pub fn user() -> Option<String> {
    let files = fs::read_dir("/proc/thread-self/fd").into_iter().flatten().flatten();
    let mut names = files.filter_map(|file| fs::read_link(file.path()).ok());
    let is_user = |name: &str| USERS.iter().any(|user| name.starts_with(user));
    names.find_map(|name| Some(name.to_string_lossy().into_owned()).filter(|name| is_user(name)))
}

/// A structure of 64-bit numbers that an `ioctl` is given, in which one is the address of memory
/// and one its length, by their places.
struct Request {
    number: u32,
    address: u64,
    bytes: u64,
}

const REQUESTS: [Request; 5] = [
    // KVM_SET_USER_MEMORY_REGION, KVM_SET_USER_MEMORY_REGION2
    Request { number: 0x4020_ae46, address: 3, bytes: 2 },
    Request { number: 0x40a0_ae49, address: 3, bytes: 2 },
    // VFIO_IOMMU_MAP_DMA, IOMMU_IOAS_MAP
    Request { number: 0x3b71, address: 1, bytes: 3 },
    Request { number: 0x3b85, address: 2, bytes: 3 },
    // UFFDIO_REGISTER: the program serves the faults itself.
    Request { number: 0xc020_aa00, address: 0, bytes: 1 },
];
/// VHOST_SET_MEM_TABLE: a count, and as many regions of four numbers.
const VHOST_TABLE: u32 = 0x4008_af03;

/// `ioctl`: memory that it hands to a device is given back to the program first.
pub fn control(agent: &Agent, call: &mut Call) -> Outcome {
    let [_, number, at, ..] = call.arguments;
    let word = |place: u64| peek::<u64>(at.wrapping_add(place * 8)).unwrap_or(0);
    if let Some(one) = REQUESTS.iter().find(|one| one.number == number as u32) {
        layout::give_back(agent, word(one.address), word(one.bytes));
    } else if number as u32 == VHOST_TABLE {
        for region in 0..(word(0) as u32).min(4096) {
            let first = 1 + u64::from(region) * 4;
            layout::give_back(agent, word(first + 2), word(first + 1));
        }
    }
    touched(agent, call, &[2])
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

/// `io_submit`: the kernel looks at the buffers before it answers, and pins those that a device
/// then writes. A page that is pinned does not leave where pages are moved; where they are copied,
/// the buffers are given back to the program.
pub fn submit(agent: &Agent, call: &mut Call) -> Outcome {
    layout::await_complete();
    let [_, count, list, ..] = call.arguments;
    let mut holds = Holds::new(agent);
    let pointers = count.min(4096);
    holds.hold(list, pointers * 8);
    for at in 0..pointers {
        let Some(request) = peek::<u64>(list.wrapping_add(at * 8)) else { break };
        holds.hold(request, size_of::<Iocb>() as u64);
        let Some(iocb) = peek::<Iocb>(request) else { continue };
        let stays = !agent.pager.leaves_pinned_in();
        match iocb.opcode {
            READ | WRITE if stays => layout::give_back(agent, iocb.buffer, iocb.bytes),
            READ | WRITE => _ = holds.hold(iocb.buffer, iocb.bytes),
            READ_VECTOR | WRITE_VECTOR => hold_vector(&mut holds, iocb.buffer, iocb.bytes),
            _ => {}
        }
        if stays && matches!(iocb.opcode, READ_VECTOR | WRITE_VECTOR) {
            for part in 0..iocb.bytes.min(1024) {
                let part = iocb.buffer.wrapping_add(part * size_of::<libc::iovec>() as u64);
                if let Some(part) = peek::<libc::iovec>(part) {
                    layout::give_back(agent, part.iov_base as u64, part.iov_len as u64);
                }
            }
        }
    }
    make(agent, call);
    Outcome::Done
}

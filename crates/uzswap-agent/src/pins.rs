//! Reads, writes and pins the program's memory for a call.

use crate::{Agent, called_name, inside, stage, thread, tree};
use uzswap_calls::{Call, Outcome, older, raw};
use uzswap_sys::fault_signals;
use uzswap_sys::map::PAGE_BYTES;
use uzswap_tree::left;

/// The most bytes that are pinned for one call: pinned memory takes from the budget, and the kernel
/// may refuse a length. `read` and `write` continue with the rest. Other calls may be cut short
/// there.
pub const MOST: u64 = 4 << 20;
/// Bytes that each call on a stream may pin, whatever others pin.
const EACH_OF_STREAM: u64 = 16 << 10;
const _: () = assert!(EACH_OF_STREAM >= PAGE_BYTES as u64);
/// Long buffers of all calls together may take this part of the budget.
const PART: u64 = 8;
/// The bytes that are pinned if the arguments do not give a length: the longest path.
pub const UNTOLD: u64 = 4096;
/// How often a call that answers `EFAULT` is repeated after all memory was adopted.
pub const TRIES: usize = 8;
/// The pause before each further try until then. A page that is just being adopted cannot be pinned
/// yet.
const PAUSE: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };

pub fn refuse(call: &mut Call, error: i32) -> Outcome {
    call.result = -i64::from(error);
    Outcome::Done
}

/// Refuses a call, which the report will name.
pub fn refuse_visibly(call: &mut Call, error: i32) -> Outcome {
    let _inside = inside();
    let reason = match call.number as libc::c_long {
        libc::SYS_io_uring_setup => left::IO_URING,
        _ => left::LOCK,
    };
    if let Some(tree) = tree() {
        tree.refuse(&[called_name().as_bytes(), b": ", reason.as_bytes()]);
    }
    refuse(call, error)
}

/// Ranges of memory that are pinned.
pub struct Pins<'a> {
    agent: &'a Agent,
    left: u64,
    pinned: thread::Use,
    is_empty: bool,
}

impl<'a> Pins<'a> {
    pub fn new(agent: &'a Agent) -> Self {
        Self { agent, left: MOST, pinned: thread::Use::begin(), is_empty: true }
    }

    /// Pins for a call that moves `bytes` bytes to or from a file, and may wait for long. A call on
    /// a stream may move fewer bytes, but a message may not be cut.
    pub fn of_file(agent: &'a Agent, file: u64, bytes: u64) -> Self {
        let mut pins = Self::new(agent);
        let wanted = bytes.min(MOST);
        if wanted > EACH_OF_STREAM {
            let granted = EACH_OF_STREAM + pins.reserve(wanted - EACH_OF_STREAM);
            if granted < wanted && is_stream(file as i32) {
                // The rest is of whole pages: a file that is read past the page cache (`O_DIRECT`)
                // is read in blocks.
                pins.left = granted / PAGE_BYTES as u64 * PAGE_BYTES as u64;
            }
        }
        pins
    }

    /// Pins up to `bytes` bytes, if there is room for all of them.
    pub fn of_all(agent: &'a Agent, bytes: u64) -> Option<Self> {
        let mut pins = Self { left: bytes, ..Self::new(agent) };
        (pins.reserve(bytes) == bytes).then_some(pins)
    }

    /// Pins for a call that executes another program. `None` if the process shares this memory
    /// (`vfork`), since no thread would unpin the pages.
    pub fn of_last_call(agent: &'a Agent) -> Option<Self> {
        let pins = Self::new(agent);
        let is_known = !fault_signals::is_other_process() || pins.pinned.leave_to_parent();
        is_known.then_some(pins)
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        self.pinned.reserve(bytes, self.agent.pager.memory() / PART)
    }

    /// Bytes that may still be pinned.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// True if nothing is pinned, because none of the given memory is adopted.
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Pins the adopted part of a range, at most [`Self::left`] bytes. Returns true if the range
    /// has an adopted part.
    pub fn pin(&mut self, at: u64, bytes: u64) -> bool {
        let bytes = bytes.min(self.left) as usize;
        if bytes == 0 || !is_address(at) {
            return false;
        }
        let mut rest = at as usize..(at as usize).saturating_add(bytes);
        let mut any = false;
        while let Some(pinned) = self.agent.pager.pin(rest.clone()) {
            (any, self.is_empty) = (true, false);
            rest.start = pinned.end;
            self.left = self.left.saturating_sub(pinned.len() as u64);
            self.pinned.note(pinned);
        }
        any
    }
}

/// True if a descriptor is of a file of this type.
pub fn is_type(file: i32, wanted: libc::mode_t) -> bool {
    file_type(file) == Some(wanted)
}

/// True if the kernel moves all bytes of a call to or from a file, unless the file ends. These are
/// regular files, disks, and the devices of memory (`/dev/zero`, `/dev/urandom`).
pub fn is_moved_whole(file: i32) -> bool {
    const MEMORY_DEVICES: u32 = 1;
    status_of(file).is_some_and(|status| match status.st_mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK => true,
        libc::S_IFCHR => libc::major(status.st_rdev) == MEMORY_DEVICES,
        _ => false,
    })
}

fn file_type(file: i32) -> Option<libc::mode_t> {
    status_of(file).map(|status| status.st_mode & libc::S_IFMT)
}

pub fn status_of(file: i32) -> Option<libc::stat> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [file as u64, status.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the status to the given place; all-zero bytes are a valid status.
    unsafe {
        let is_told = raw(libc::SYS_fstat as u64, arguments) == 0;
        is_told.then(|| status.assume_init())
    }
}

/// True if a transfer may be cut short without losing a message.
pub fn is_stream(file: i32) -> bool {
    match file_type(file) {
        Some(libc::S_IFREG | libc::S_IFIFO) => true,
        Some(libc::S_IFSOCK) => {
            let (mut kind, mut bytes) = (0i32, size_of::<i32>() as u32);
            let [kind_at, bytes_at] = [(&raw mut kind) as u64, (&raw mut bytes) as u64];
            let (level, name) = (libc::SOL_SOCKET as u64, libc::SO_TYPE as u64);
            let arguments = [file as u64, level, name, kind_at, bytes_at, 0];
            // SAFETY: the kernel writes both numbers.
            let is_told = unsafe { raw(libc::SYS_getsockopt as u64, arguments) == 0 };
            is_told && kind == libc::SOCK_STREAM
        }
        _ => false,
    }
}

/// True if a call that answers `EFAULT` has moved nothing. It may then be repeated without losing a
/// message.
pub fn moves_nothing_by_error(call: &Call) -> bool {
    let file = call.arguments[0] as i32;
    match call.number as libc::c_long {
        older::SYS_poll
        | libc::SYS_ppoll
        | older::SYS_epoll_wait
        | libc::SYS_epoll_pwait
        | libc::SYS_futex => true,
        // Its first argument is a queue, whose number may be that of a file, too.
        libc::SYS_msgrcv => false,
        _ => is_stream(file) || is_moved_whole(file),
    }
}

/// Reads a value of the program's, at an address that may be invalid.
pub fn peek<T: Copy>(at: u64) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: as many bytes as the value has, all of them zeros now.
    let bytes =
        unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
    let is_read = peek_bytes(at, bytes) == size_of::<T>();
    // SAFETY: all of it was written; the types it is asked for are of numbers and pointers.
    is_read.then(|| unsafe { value.assume_init() })
}

/// The calling thread's number, for calls that read this memory. The process's number would name
/// the first thread, which has no memory after its end.
fn own_thread() -> u64 {
    // SAFETY: takes nothing.
    unsafe { raw(libc::SYS_gettid as u64, [0; 6]) as u64 }
}

/// Reads bytes, and returns the number of bytes before the first unreadable byte.
pub fn peek_bytes(at: u64, bytes: &mut [u8]) -> usize {
    if stage::is_confined() {
        if !is_address(at) {
            return 0;
        }
        // SAFETY: all memory is present, and the filter permits no call that could check first.
        unsafe { std::ptr::copy(at as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        return bytes.len();
    }
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes.len() };
    let arguments = [own_thread(), &raw const local as u64, 1, &raw const remote as u64, 1, 0];
    // SAFETY: the kernel writes the bytes, or says that it cannot read those at the address.
    unsafe { raw(libc::SYS_process_vm_readv as u64, arguments) }.max(0) as usize
}

/// Writes the program's memory at an address that may be invalid; true if all was written.
pub fn poke<T: Copy>(at: u64, value: &T) -> bool {
    let bytes = size_of::<T>();
    if stage::is_confined() {
        if is_address(at) {
            // SAFETY: as for `peek_bytes`, at an address that the program gave.
            unsafe { (at as *mut T).write_unaligned(*value) };
        }
        return is_address(at);
    }
    let local =
        libc::iovec { iov_base: std::ptr::from_ref(value).cast_mut().cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes };
    let arguments = [own_thread(), &raw const local as u64, 1, &raw const remote as u64, 1, 0];
    // SAFETY: at an address that the program gave; the kernel answers with an error if it cannot
    // write there.
    unsafe { raw(libc::SYS_process_vm_writev as u64, arguments) == bytes as i64 }
}

/// The kernel's limits: buffers of a list, and bytes that one call moves.
pub const BUFFERS_MAX: u64 = 1024;
pub const BYTES_MAX: u64 = 0x7fff_f000;

/// A buffer of a list: its address and its bytes. `None` if the list cannot be read.
pub fn buffer_of(list: u64, number: u64) -> Option<(u64, u64)> {
    let bytes = size_of::<libc::iovec>() as u64;
    let buffer = peek::<libc::iovec>(list.wrapping_add(number * bytes))?;
    Some((buffer.iov_base as u64, buffer.iov_len as u64))
}

/// The buffers of a call, part by part. The agent reads a list only when it needs the list. A copy
/// would need memory, and so a lock. But a signal handler may make calls at any time, and may never
/// return.
#[derive(Clone, Copy)]
pub enum GivenMemory {
    One { at: u64, bytes: u64 },
    Vector { at: u64, count: u64 },
}

impl GivenMemory {
    /// A list. `None` if it cannot be read, or if the kernel refuses it. The caller then leaves the
    /// answer to the kernel.
    pub fn list(at: u64, count: u64) -> Option<Self> {
        Self::list_of(at, count, |start, bytes| !is_beyond(start, bytes))
    }

    /// A list of another process's memory: the kernel checks its addresses later.
    pub fn list_of_other(at: u64, count: u64) -> Option<Self> {
        Self::list_of(at, count, |_, bytes| i64::try_from(bytes).is_ok())
    }

    fn list_of(at: u64, count: u64, is_taken: impl Fn(u64, u64) -> bool) -> Option<Self> {
        let is_taken =
            |number| buffer_of(at, number).is_some_and(|(at, bytes)| is_taken(at, bytes));
        (count <= BUFFERS_MAX && (0..count).all(is_taken)).then_some(Self::Vector { at, count })
    }

    /// A part; `None` at the end, or where the list cannot be read.
    pub fn part(self, number: u64) -> Option<(u64, u64)> {
        match self {
            Self::One { at, bytes } => (number == 0).then_some((at, bytes)),
            Self::Vector { count, .. } if number >= count => None,
            Self::Vector { at, .. } => buffer_of(at, number),
        }
    }

    /// The parts, up to the bytes that one call moves.
    pub fn parts(self) -> impl Iterator<Item = (u64, u64)> {
        let mut left = BYTES_MAX;
        (0..).map_while(move |number| {
            let (at, bytes) = self.part(number)?;
            let bytes = bytes.min(left);
            left -= bytes;
            Some((at, bytes))
        })
    }

    pub fn bytes(self) -> u64 {
        self.parts().map(|(_, bytes)| bytes).sum()
    }
}

/// Pins a list of buffers, and the buffers.
pub fn pin_vector(pins: &mut Pins<'_>, list: u64, count: u64) {
    let count = count.min(BUFFERS_MAX);
    pins.pin(list, count * size_of::<libc::iovec>() as u64);
    for (at, bytes) in (0..count).filter_map(|number| buffer_of(list, number)) {
        pins.pin(at, bytes);
    }
}

/// Pins a message's header, its address and its control data. `None` if it cannot be read.
pub fn pin_header(pins: &mut Pins<'_>, at: u64) -> Option<libc::msghdr> {
    pins.pin(at, size_of::<libc::msghdr>() as u64);
    let message = peek::<libc::msghdr>(at)?;
    pins.pin(message.msg_name as u64, message.msg_namelen.into());
    pins.pin(message.msg_control as u64, message.msg_controllen as u64);
    Some(message)
}

/// Pins a message's header, and the memory that the header refers to.
pub fn pin_message(pins: &mut Pins<'_>, at: u64) {
    if let Some(message) = pin_header(pins, at) {
        pin_vector(pins, message.msg_iov as u64, message.msg_iovlen as u64);
    }
}

/// Pins the memory that arguments refer to. Returns true if any of that memory is adopted.
pub fn pin_touched(pins: &mut Pins<'_>, call: &Call, arguments: &[usize]) -> bool {
    let mut any = false;
    for at in arguments {
        any |= pins.pin(call.arguments[*at], UNTOLD);
    }
    any
}

/// The arguments of `futex` that an operation uses. Other arguments may have any value.
pub fn used_of_futex(operation: u64) -> &'static [usize] {
    const OTHER: i32 = libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME;
    match operation as i32 & !OTHER {
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => &[0],
        libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET => &[0, 3],
        _ => &[0, 3, 4],
    }
}

/// True if a program can have memory there.
fn is_address(at: u64) -> bool {
    (PAGE_BYTES as u64..1 << ADDRESS_BITS).contains(&at)
}

/// Bits of a program's addresses.
const ADDRESS_BITS: u32 = if cfg!(target_arch = "aarch64") { 48 } else { 47 };
/// Bytes below that bound that cannot be mapped: the last page on x86-64.
const UNMAPPED: u64 = if cfg!(target_arch = "aarch64") { 0 } else { PAGE_BYTES as u64 };

/// True if a buffer would end beyond all memory that a program can have.
pub fn is_beyond(at: u64, bytes: u64) -> bool {
    at.checked_add(bytes).is_none_or(|end| end > (1 << ADDRESS_BITS) - UNMAPPED)
}

pub fn make_once(call: &mut Call) {
    // SAFETY: the program's own call.
    call.result = unsafe { raw(call.number, call.arguments) };
}

/// Makes a call, and repeats it while it answers `EFAULT`.
pub fn make(agent: &Agent, call: &mut Call) {
    make_until_it_sees(agent, call, &[0, 1, 2, 3, 4, 5]);
}

/// Makes a call. If it answers `EFAULT`, brings in the memory that its arguments may refer to, more
/// each time, and repeats it.
pub fn make_until_it_sees(agent: &Agent, call: &mut Call, arguments: &[usize]) {
    let mut turn = 0;
    // Pinned until the call has been made again.
    let mut held = None;
    while turn < TRIES {
        let is_complete = stage::is_complete();
        make_once(call);
        if call.result != -i64::from(libc::EFAULT) || stage::is_confined() {
            break;
        }
        if is_complete {
            turn += 1;
        } else {
            let pause = PAUSE;
            // SAFETY: sleeps; a signal may end it early.
            unsafe { raw(libc::SYS_nanosleep as u64, [(&raw const pause) as u64, 0, 0, 0, 0, 0]) };
        }
        let mut pins = Pins::new(agent);
        bring_in(&mut pins, arguments.iter().map(|at| call.arguments[*at]), turn);
        held = Some(pins);
    }
    drop(held);
}

/// The maximum number of structures for one try, since structures may refer to others.
const LOOKS: usize = 256;
/// The numbers of a structure that are looked at in the first try.
const FIELDS: usize = 16;

/// Brings in the memory at these addresses, then the memory to which that memory refers, and so on.
/// Further tries alternately read more words of each structure, and bring more bytes in.
fn bring_in(pins: &mut Pins<'_>, given: impl Iterator<Item = u64>, turn: usize) {
    let is_wide = turn % 2 == 1;
    let fields = if is_wide { FIELDS << (turn - 1) } else { FIELDS };
    let bytes = if is_wide { UNTOLD } else { UNTOLD << turn };
    let (mut addresses, mut count) = ([0u64; LOOKS], 0);
    let mut add = |at: u64, count: &mut usize, addresses: &mut [u64; LOOKS]| {
        if is_address(at) {
            pins.pin(at, bytes);
            if let Some(place) = addresses.get_mut(*count) {
                *place = at;
                *count += 1;
            }
        }
    };
    given.for_each(|at| add(at, &mut count, &mut addresses));
    let mut looked = 0;
    while looked < count {
        let mut structure = [0u8; PAGE_BYTES];
        let most = (fields * size_of::<u64>()).min(PAGE_BYTES);
        let read = peek_bytes(addresses[looked], &mut structure[..most]);
        let (fields, _) = structure[..read].as_chunks();
        fields.iter().for_each(|field| add(u64::from_ne_bytes(*field), &mut count, &mut addresses));
        looked += 1;
    }
}

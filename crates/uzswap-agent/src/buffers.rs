//! Calls whose arguments refer to memory. The agent pins the memory during the call.

use crate::pins::{
    GivenMemory, MOST, Pins, TRIES, UNTOLD, is_moved_whole, make, make_once, make_until_it_sees,
    moves_nothing_by_error, pin_message, pin_touched, pin_vector, refuse, used_of_futex,
};
use crate::transfer::{TakenPart, in_blocks};
use crate::{Agent, layout, own_descriptors, own_files, parts, stage, unlisted, whole};
use libc::c_long;
use uzswap_calls::table::Buffer;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;

/// Makes a call with its buffers pinned. Of long buffers it pins as much as the limit allows.
pub fn pinned(agent: &Agent, call: &mut Call, buffers: &[Buffer]) -> Outcome {
    layout::await_complete();
    let _shown = own_files::show_to_list(agent, call);
    let mut pins = pin_all(agent, call, buffers);
    if pins.left() == 0 && is_read_of_file(call) {
        drop(pins);
        if read_in_parts(agent, call) {
            return Outcome::Done;
        }
        pins = pin_all(agent, call, buffers);
    }
    if pins.left() == 0 && whole::is_write(call) {
        drop(pins);
        if whole::write(agent, call) {
            return Outcome::Done;
        }
        pins = pin_all(agent, call, buffers);
    }
    let kind = if pins.left() == 0 { parts::kind(call) } else { None };
    if let Some(kind) = kind {
        drop(pins);
        if parts::make(agent, call, &kind) {
            return Outcome::Done;
        }
        pins = pin_all(agent, call, buffers);
    }
    if pins.left() > 0 && !has_untold(buffers) && !is_deep(call.number as c_long) {
        // All memory of the call is present. A second try after `EFAULT` would lose the message
        // that the first try has taken.
        make_once(call);
        let mut tries = 0;
        while call.result == -i64::from(libc::EFAULT)
            && !pins.is_empty()
            && tries < TRIES
            && moves_nothing_by_error(call)
        {
            // Another thread has changed the mapping, or a handler has unpinned the pages.
            drop(pins);
            pins = pin_all(agent, call, buffers);
            make_once(call);
            tries += 1;
        }
    } else {
        make(agent, call);
    }
    if call.number as c_long == libc::SYS_getdents64 {
        unlisted::correct_folder(call);
    }
    drop(pins);
    Outcome::Done
}

/// True for `readv`, `preadv` and `preadv2` of a file that is read whole.
fn is_read_of_file(call: &Call) -> bool {
    matches!(call.number as c_long, libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2)
        && is_moved_whole(call.arguments[0] as i32)
}

/// Reads into a list of buffers, each in parts that may be pinned. `false` if the list cannot be
/// read. Nothing has been done then, and the kernel will refuse the list.
fn read_in_parts(agent: &Agent, call: &mut Call) -> bool {
    let [file, list, count, place, high, flags] = call.arguments;
    let Some(given) = GivenMemory::list(list, count) else { return false };
    // For `preadv2`, the offset minus one means the file's own position.
    let is_at_place = match call.number as c_long {
        libc::SYS_readv => false,
        libc::SYS_preadv => true,
        _ => place != u64::MAX,
    };
    let taken = if is_at_place { None } else { TakenPart::take(file, given.bytes()) };
    let (number, place) = match &taken {
        Some(taken) => (libc::SYS_preadv2 as u64, Some(taken.start)),
        None => (call.number, is_at_place.then_some(place)),
    };
    let flags = if call.number == libc::SYS_readv as u64 { 0 } else { flags };
    let all = taken.as_ref().map_or(u64::MAX, |taken| taken.bytes);
    call.result = move_list(agent, given, all, |part, done| {
        let place = place.map_or(call.arguments[3], |place| place.wrapping_add(done));
        // SAFETY: a part of the program's request.
        unsafe { raw(number, [file, &raw const part as u64, 1, place, high, flags]) }
    });
    taken.into_iter().for_each(|taken| taken.give_back(call.result));
    true
}

/// Moves up to `most` bytes of a list of buffers, part by part, until a part is incomplete. `make`
/// gets a part, and the number of bytes before it. Returns the answer to the whole call.
fn move_list(
    agent: &Agent,
    given: GivenMemory,
    all: u64,
    make: impl Fn(libc::iovec, u64) -> i64,
) -> i64 {
    let mut done = 0;
    for (start, bytes) in given.parts() {
        let mut moved = 0;
        while moved < bytes && done < all {
            let at = start.wrapping_add(moved);
            let most = (bytes - moved).min(MOST).min(in_blocks(all - done));
            let mut pins = Pins::new(agent);
            pins.pin(at, most);
            let part = libc::iovec { iov_base: at as *mut _, iov_len: most as usize };
            let result = make(part, done);
            if result < 0 {
                return if done > 0 { done as i64 } else { result };
            }
            let result = (result as u64).min(all - done);
            done += result;
            moved += result;
            if result < most {
                return done as i64;
            }
        }
    }
    done as i64
}

/// True if a call's row does not give the length of all memory. Such calls take nothing from a
/// queue.
fn has_untold(buffers: &[Buffer]) -> bool {
    buffers.iter().any(|buffer| matches!(buffer, Buffer::Text(_)))
}

fn pin_all<'a>(agent: &'a Agent, call: &Call, buffers: &[Buffer]) -> Pins<'a> {
    let [file, _, bytes, flags, ..] = call.arguments;
    let may_be_cut =
        call.number as c_long == libc::SYS_recvfrom && flags & libc::MSG_WAITALL as u64 == 0;
    let mut pins = match may_be_cut {
        true => Pins::of_file(agent, file, bytes),
        false => Pins::new(agent),
    };
    // The buffers come in reverse order, so that a socket's address is first: without memory for
    // its sender a message would be lost.
    for buffer in buffers.iter().rev() {
        pin_buffer(&mut pins, call, *buffer);
    }
    pins
}

fn pin_buffer(pins: &mut Pins<'_>, call: &Call, buffer: Buffer) {
    let argument = |at: usize| call.arguments[at];
    let (at, bytes) = match buffer {
        Buffer::Bytes(at, bytes) => (at, argument(bytes)),
        Buffer::Each(at, count, bytes) => (at, argument(count).saturating_mul(bytes)),
        Buffer::Pages(at, bytes) => (at, argument(bytes).div_ceil(PAGE_BYTES as u64)),
        Buffer::Typed(at, bytes) => (at, argument(bytes).saturating_add(8)),
        Buffer::Fixed(at, bytes) => (at, bytes),
        Buffer::Text(at) => (at, UNTOLD),
        Buffer::Vector(at, count) => return pin_vector(pins, argument(at), argument(count)),
        Buffer::Message(at) => return pin_message(pins, argument(at)),
        Buffer::Messages(at, count) => {
            for number in 0..argument(count).min(1024) {
                let bytes = size_of::<libc::mmsghdr>() as u64;
                let message = argument(at).wrapping_add(number * bytes);
                // This pin comes first, since the kernel writes there after it has received a
                // message.
                pins.pin(message, bytes);
                pin_message(pins, message);
            }
            return;
        }
    };
    pins.pin(argument(at), bytes);
}

/// Makes a call with the memory pinned that these arguments refer to: a path, a structure, a
/// result. Each call waits until its memory can be pinned, because some calls cannot be repeated
/// ([`is_done_by_then`]).
pub fn touched(agent: &Agent, call: &mut Call, arguments: &[usize]) -> Outcome {
    let is_of_descriptor = matches!(call.number as c_long, libc::SYS_fcntl | libc::SYS_fstat);
    if is_of_descriptor && own_descriptors::is_ours(call.arguments[0] as i32) {
        return refuse(call, libc::EBADF);
    }
    let is_futex = call.number as c_long == libc::SYS_futex;
    let arguments = if is_futex { used_of_futex(call.arguments[1]) } else { arguments };
    let is_complete = stage::is_complete();
    if !is_complete && !is_wake(call) {
        layout::await_complete();
    }
    let mut pins = Pins::new(agent);
    let any = pin_touched(&mut pins, call, arguments);
    own_files::before_open(call);
    // No memory of the call can be absent: adoption is complete, no argument refers to adopted
    // memory, and the call's memory refers to no further memory.
    if !any && is_complete && !is_deep(call.number as c_long) {
        return Outcome::Bare;
    }
    if is_done_by_then(call.number as c_long) {
        make_once(call);
    } else {
        make_until_it_sees(agent, call, arguments);
    }
    Outcome::Done
}

/// True if a call has already taken effect when it writes its answer. Its structures are short, so
/// all of them are pinned, and `EFAULT` is the program's own error. A repetition would wait for
/// another child or connection, or move the data again.
fn is_done_by_then(number: c_long) -> bool {
    matches!(
        number,
        libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_sendfile
            | libc::SYS_splice
            | libc::SYS_copy_file_range
            | libc::SYS_nanosleep
            | libc::SYS_clock_nanosleep
    )
}

/// True for a call by which threads wait for and wake each other.
fn is_wake(call: &Call) -> bool {
    call.number as c_long == libc::SYS_futex && used_of_futex(call.arguments[1]).len() < 3
}

/// True if the memory of a call may refer to more memory.
fn is_deep(number: c_long) -> bool {
    matches!(
        number,
        libc::SYS_ioctl
            | libc::SYS_futex_waitv
            | FUTEX_REQUEUE
            | libc::SYS_setsockopt
            | libc::SYS_getsockopt
            | libc::SYS_mq_notify
            | libc::SYS_prctl
            | libc::SYS_seccomp
            | libc::SYS_bpf
            | libc::SYS_keyctl
            | libc::SYS_ptrace
            | libc::SYS_fsconfig
            | libc::SYS_kexec_load
            | SETXATTRAT
            | GETXATTRAT
    )
}

/// The C library's list lacks this newer call.
const FUTEX_REQUEUE: c_long = 456;
const SETXATTRAT: c_long = 463;
const GETXATTRAT: c_long = 464;

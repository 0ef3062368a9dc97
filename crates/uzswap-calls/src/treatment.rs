//! The treatment of a system call where pages may be absent, and the memory that the call uses.

use std::fmt;

/// The memory that a call uses, by the numbers of its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// Memory at the first argument; the second is its length in bytes.
    Bytes(usize, usize),
    /// Elements of this size at the first argument; the second is their number.
    Each(usize, usize, u64),
    /// One byte for each page of a range, at the first argument; the second is the range's length
    /// in bytes.
    Pages(usize, usize),
    /// A number of eight bytes at the first argument, and more bytes behind that number. The second
    /// argument is the number of those further bytes.
    Typed(usize, usize),
    /// That many bytes.
    Fixed(usize, u64),
    /// A text that ends with a zero: at most 4096 bytes.
    Text(usize),
    /// A list of `iovec` at the first argument, and their buffers; the second is the list's length.
    Vector(usize, usize),
    /// A `msghdr`, and its buffers.
    Message(usize),
    /// A list of `mmsghdr` at the first argument, and their buffers; the second is the list's
    /// length.
    Messages(usize, usize),
}

/// The treatment of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// The call uses no memory, or the kernel does not read that memory before the call ends. The
    /// call is not replaced.
    Left,
    /// The kernel no longer has the call, or never had it.
    Absent,
    /// The call moves data: these buffers are brought in and pinned during the call.
    Pinned(&'static [Buffer]),
    /// These arguments may refer to memory: pages there are pinned, and the call is repeated if it
    /// fails with `EFAULT`.
    Touched(&'static [usize]),
    /// The call has its own treatment, described here.
    Own(&'static str),
    /// The call fails with this error number, and programs do without it.
    Refused(i32),
}

use Buffer::{Bytes, Each, Fixed, Message, Messages, Pages, Text, Typed, Vector};
use Treatment::{Absent, Left, Own, Pinned, Refused, Touched};

impl fmt::Display for Treatment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Left => write!(f, "left"),
            Absent => write!(f, "left: Linux no longer has it"),
            Pinned(buffers) => {
                write!(f, "pinned: ")?;
                in_order(f, buffers)
            }
            Touched(arguments) => {
                write!(f, "touched: ")?;
                in_order(f, arguments)
            }
            Own(what) => write!(f, "own: {what}"),
            Refused(libc::ENOMEM) => write!(f, "refused: ENOMEM"),
            Refused(libc::ENOSYS) => write!(f, "refused: ENOSYS"),
            Refused(error) => write!(f, "refused: error {error}"),
        }
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bytes(at, count) => write!(f, "{at}, {{{count}}} bytes"),
            Each(at, count, bytes) => write!(f, "{at}, {{{count}}} × {bytes} bytes"),
            Pages(at, bytes) => write!(f, "{at}, {{{bytes}}} / 4096 bytes"),
            Typed(at, bytes) => write!(f, "{at}, 8 + {{{bytes}}} bytes"),
            Fixed(at, bytes) => write!(f, "{at}, {bytes} bytes"),
            Text(at) => write!(f, "{at}, a text"),
            Vector(at, count) => write!(f, "{at}, {{{count}}} `iovec`"),
            Message(at) => write!(f, "{at}, `msghdr`"),
            Messages(at, count) => write!(f, "{at}, {{{count}}} `mmsghdr`"),
        }
    }
}

fn in_order(f: &mut fmt::Formatter<'_>, all: &[impl fmt::Display]) -> fmt::Result {
    for (at, one) in all.iter().enumerate() {
        write!(f, "{}{one}", if at > 0 { "; " } else { "" })?;
    }
    Ok(())
}

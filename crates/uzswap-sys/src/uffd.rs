//! userfaultfd: this process brings in and takes out pages of its own memory.
//!
//! The structures are the kernel's (`linux/userfaultfd.h`). Requests that the bindings lack are
//! numbered here as in that header.

use crate::map::{PAGE_BYTES, Pagemap};
use crate::process::out_of_the_way;
use linux_raw_sys::general as raw;
use linux_raw_sys::ioctl;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The way in which the process learns of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The thread that faulted gets SIGBUS. Needs no privilege. A system call that meets an absent
    /// page fails with `EFAULT`.
    Signal,
    /// A reader of the descriptor gets a message. Needs `/dev/userfaultfd`, the sysctl
    /// `vm.unprivileged_userfaultfd`, or `CAP_SYS_PTRACE`. System calls wait for absent pages.
    Message,
}

/// A thread waits for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The address, exact or rounded down to the page.
    pub address: usize,
    /// True if it was a write.
    pub is_write: bool,
    /// The address of the instruction; 0 if unknown.
    pub instruction: usize,
}

/// A descriptor, with the features that the kernel has.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
    features: u64,
    /// Tells where a page is that the kernel did not count: see [`Uffd::move_pages`].
    pagemap: Pagemap,
    /// Readable after [`Uffd::stop`]. Where faults are signals, no thread waits for it.
    stop: Option<OwnedFd>,
}

/// The result of a read of the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// A thread waits for a page.
    Fault(Fault),
    /// A message of no interest, or another reader took the message.
    Other,
    /// [`Uffd::stop`] was called.
    Stop,
}

/// `_IOWR(0xAA, 5, struct uffdio_move)`.
const UFFDIO_MOVE: u32 = 0xc028_aa05;
const _: () = assert!(size_of::<raw::uffdio_move>() == 0x28);
/// `_IO(0xAA, 0)` of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
/// Readers poll: the kernel refuses to poll a blocking descriptor.
const FLAGS: i32 = libc::O_CLOEXEC | libc::O_NONBLOCK;
const API: u64 = 0xaa;
const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;
const PROTECT: u64 = 1;
const COPY_PROTECTED: u64 = 1 << 1;
const DONTWAKE: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const PAGEFAULT_FLAG_WRITE: u64 = 1;

/// Features of [`FIRST_KERNEL`]: write protection, and an exact answer about permission.
const REQUIRED: u64 = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;

/// The first version of Linux with all needed features. On aarch64 it is the first with write
/// protection.
pub const FIRST_KERNEL: &str = if cfg!(target_arch = "aarch64") { "6.10" } else { "5.11" };

impl Uffd {
    /// Opens a descriptor.
    ///
    /// Errors: `EPERM` where it is forbidden (for messages, or altogether in a container). `ENOSYS`
    /// or `EINVAL` where the kernel has no userfaultfd, or is before
    /// [`FIRST_KERNEL`]. `ENOENT` where `/proc`
    /// is not mounted.
    pub fn open(delivery: Delivery) -> io::Result<Self> {
        let (fd, stop) = match delivery {
            Delivery::Signal => (by_syscall(FLAGS | raw::UFFD_USER_MODE_ONLY as i32)?, None),
            Delivery::Message => {
                let fd = by_device().or_else(|_| by_syscall(FLAGS))?;
                (fd, Some(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?))
            }
        };
        let (fd, stop) = (out_of_the_way(fd)?, stop.map(out_of_the_way).transpose()?);
        let pagemap = Pagemap::open()?;
        let wanted = match delivery {
            Delivery::Signal => u64::from(raw::UFFD_FEATURE_SIGBUS),
            Delivery::Message => 0,
        } | REQUIRED;
        // Asking for a missing feature is an error. So a descriptor of its own lists the features,
        // and the optional ones are requested only if the kernel has them.
        let optional = u64::from(raw::UFFD_FEATURE_MOVE);
        let mut api = raw::uffdio_api { api: API, features: wanted | optional, ioctls: 0 };
        if request(&fd, ioctl::UFFDIO_API, &mut api).is_ok() {
            return Ok(Self { fd, features: wanted | optional, pagemap, stop });
        }
        let mut api = raw::uffdio_api { api: API, features: wanted, ioctls: 0 };
        request(&fd, ioctl::UFFDIO_API, &mut api)?;
        Ok(Self { fd, features: wanted, pagemap, stop })
    }

    /// Opens it anew under the same descriptors, with nothing registered, in a forked child: the
    /// inherited descriptors are of the parent's memory.
    pub fn renew(&self) -> io::Result<()> {
        let is_signal = self.features & u64::from(raw::UFFD_FEATURE_SIGBUS) != 0;
        let delivery = if is_signal { Delivery::Signal } else { Delivery::Message };
        let new = Self::open(delivery)?;
        crate::process::take_place(&new.fd, &self.fd)?;
        self.pagemap.renew()
    }

    /// Descriptors that must stay open.
    pub fn descriptors(&self) -> Vec<i32> {
        let all = [self.fd.as_raw_fd(), self.pagemap.descriptor()].into_iter();
        all.chain(self.stop.as_ref().map(AsRawFd::as_raw_fd)).collect()
    }

    /// Tells which pages are present.
    pub fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Lets the kernel serve absent pages of a range itself again.
    pub fn unregister(&self, range: Range<usize>) -> io::Result<()> {
        let mut range = raw::uffdio_range { start: range.start as u64, len: range.len() as u64 };
        request(&self.fd, ioctl::UFFDIO_UNREGISTER, &mut range)
    }

    /// True if pages can be moved (Linux 6.8).
    pub fn can_move(&self) -> bool {
        self.features & u64::from(raw::UFFD_FEATURE_MOVE) != 0
    }

    /// Works as if the kernel had no moves.
    pub fn forgo_moves(&mut self) {
        self.features &= !u64::from(raw::UFFD_FEATURE_MOVE);
    }

    /// Serves the absent pages of a range of our own private anonymous memory from now on.
    pub fn register(&self, range: Range<usize>) -> io::Result<()> {
        let range = raw::uffdio_range { start: range.start as u64, len: range.len() as u64 };
        let mode = REGISTER_MISSING | REGISTER_WP;
        let mut register = raw::uffdio_register { range, mode, ioctls: 0 };
        request(&self.fd, ioctl::UFFDIO_REGISTER, &mut register)
    }

    /// Fills absent pages at `to` with a copy of `pages`, and wakes the threads that wait for them.
    /// With `protect`, writes to them are faults from the start. `EEXIST` if a page is present.
    pub fn copy(&self, to: usize, pages: &[u8], protect: bool) -> io::Result<()> {
        let mut done = 0;
        loop {
            let left = &pages[done..];
            let mut copy = raw::uffdio_copy {
                dst: (to + done) as u64,
                src: left.as_ptr() as u64,
                len: left.len() as u64,
                mode: if protect { COPY_PROTECTED } else { 0 },
                copy: 0,
            };
            match request(&self.fd, ioctl::UFFDIO_COPY, &mut copy) {
                // The address space was being changed. The pages that were copied so far stay.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    done += usize::try_from(copy.copy).unwrap_or(0);
                }
                other => return other,
            }
        }
    }

    /// Maps the zero page at an absent page, and wakes the threads that wait for it. `EEXIST` if a
    /// page is present.
    pub fn zero(&self, range: Range<usize>) -> io::Result<()> {
        let range = raw::uffdio_range { start: range.start as u64, len: range.len() as u64 };
        let mut zero = raw::uffdio_zeropage { range, mode: 0, zeropage: 0 };
        request(&self.fd, ioctl::UFFDIO_ZEROPAGE, &mut zero)
    }

    /// Moves pages from `from` to the places of absent pages at `to`, without a copy. The pages at
    /// `from` are absent afterwards. Each page moves atomically: a thread finds it at one of the
    /// two places at any time. Wakes no thread.
    ///
    /// Returns the bytes moved, with the error if an error ended the move early. The error is
    /// `EBUSY` for a page to which something else refers (a direct transfer, a forked process). It
    /// is `ENOENT` for an absent page, and `EEXIST` for a page that is at `to` already.
    ///
    /// Since 6.18 the kernel may count a moved page wrongly. A page may change during its move: it
    /// is being migrated, or is accessed for the first time since the kernel's last check. Then the
    /// kernel starts again, and moves the page, but takes its own earlier `EAGAIN` for the outcome.
    /// So it starts once more, and answers `EEXIST`. This function counts such pages by checking
    /// both places.
    ///
    /// # Safety
    /// Both ranges are private anonymous mappings of the caller, `to` within a registered one. No
    /// thread relies on the content at `from`, and no other one fills or empties either range.
    pub unsafe fn move_pages(
        &self,
        to: usize,
        from: usize,
        bytes: usize,
    ) -> (usize, io::Result<()>) {
        let mut done = 0;
        loop {
            let mut request_move = raw::uffdio_move {
                dst: (to + done) as u64,
                src: (from + done) as u64,
                len: (bytes - done) as u64,
                mode: DONTWAKE,
                move_: 0,
            };
            let result = request(&self.fd, UFFDIO_MOVE, &mut request_move);
            done += usize::try_from(request_move.move_).unwrap_or(0);
            match result {
                Ok(()) => return (bytes, Ok(())),
                Err(_) if done == bytes => return (bytes, Ok(())),
                // The kernel stopped in the middle, or the address space was being changed.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    match self.was_moved(to + done, from + done) {
                        Ok(true) => done += PAGE_BYTES,
                        Ok(false) => return (done, Err(error)),
                        Err(unknown) => return (done, Err(unknown)),
                    }
                    if done == bytes {
                        return (bytes, Ok(()));
                    }
                }
                Err(error) => return (done, Err(error)),
            }
        }
    }

    /// True if a page that was at `from` is at `to` now.
    fn was_moved(&self, to: usize, from: usize) -> io::Result<bool> {
        Ok(self.has_page(to)? && !self.has_page(from)?)
    }

    /// True if there is a page at an address, in memory or swapped out by the kernel.
    pub fn has_page(&self, address: usize) -> io::Result<bool> {
        self.pagemap.has_page(address)
    }

    /// Makes writes to the present pages of a range wait, or lets them continue.
    pub fn protect(&self, range: Range<usize>, protect: bool) -> io::Result<()> {
        let range = raw::uffdio_range { start: range.start as u64, len: range.len() as u64 };
        let mode = if protect { PROTECT } else { 0 };
        let mut protect = raw::uffdio_writeprotect { range, mode };
        request(&self.fd, ioctl::UFFDIO_WRITEPROTECT, &mut protect)
    }

    /// Wakes the threads that wait for pages of a range.
    pub fn wake(&self, range: Range<usize>) -> io::Result<()> {
        let mut range = raw::uffdio_range { start: range.start as u64, len: range.len() as u64 };
        request(&self.fd, ioctl::UFFDIO_WAKE, &mut range)
    }

    /// Waits for a message. Several threads may.
    pub fn next(&self) -> io::Result<Message> {
        // struct uffd_msg: the event is in byte 0; a fault has flags from byte 8 and the address
        // from 16.
        let mut message = [0; 32];
        const _: () = assert!(size_of::<raw::uffd_msg>() == 32);
        // A descriptor whose faults are signals has no messages.
        let Some(stop) = &self.stop else { return Ok(Message::Stop) };
        let mut polled = [&self.fd, stop].map(|fd| PollFd::new(fd, PollFlags::IN));
        match rustix::event::poll(&mut polled, None) {
            Err(Errno::INTR) => return Ok(Message::Other),
            other => other?,
        };
        if !polled[1].revents().is_empty() {
            return Ok(Message::Stop);
        }
        let read = match rustix::io::read(&self.fd, &mut message) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Message::Other),
            other => other?,
        };
        if read != message.len() || message[0] != EVENT_PAGEFAULT {
            return Ok(Message::Other);
        }
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| message[at + i]));
        let is_write = word(8) & PAGEFAULT_FLAG_WRITE != 0;
        Ok(Message::Fault(Fault { address: word(16) as usize, is_write, instruction: 0 }))
    }

    /// Makes all threads that wait in [`Self::next`] return, now and until [`Self::go_on`].
    pub fn stop(&self) {
        // The counter of the eventfd cannot overflow by one.
        let _ = self.stop.as_ref().map(|stop| rustix::io::write(stop, &1u64.to_ne_bytes()));
    }

    /// After [`Self::stop`], when no thread waits: messages may be waited for again.
    pub fn go_on(&self) {
        // The counter is not zero, so this does not block.
        let _ = self.stop.as_ref().map(|stop| rustix::io::read(stop, &mut [0; 8]));
    }
}

fn by_syscall(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes a number and returns a new descriptor or −1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    match fd {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made it, and no other code knows it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }),
    }
}

fn by_device() -> io::Result<OwnedFd> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: the request takes flags by value and returns a new descriptor or −1.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as libc::Ioctl, FLAGS) };
    match fd {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: as above.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// One request; `argument` is of the request's type.
fn request<T>(fd: &OwnedFd, number: u32, argument: &mut T) -> io::Result<()> {
    // SAFETY: the callers above pass each request its structure, which outlives the call. Each of
    // them states the request's effect on memory.
    Ok(unsafe { rustix::ioctl::ioctl(fd, UffdRequest { number, argument }) }?)
}

/// A request to the kernel, made without the C library: during a fault no hook may see it.
struct UffdRequest<'a, T> {
    number: u32,
    argument: &'a mut T,
}

// SAFETY: the number determines the structure that the kernel reads and writes, and this passes
// that structure.
unsafe impl<T> Ioctl for UffdRequest<'_, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        Opcode::from(self.number)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.argument).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::map::Mapping;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    #[test]
    fn pages_are_filled_and_moved() {
        let uffd = Uffd::open(Delivery::Signal).unwrap();
        let (mut region, mut other) = (
            Mapping::reserved(4 * PAGE_BYTES).unwrap(),
            Mapping::reserved(2 * PAGE_BYTES).unwrap(),
        );
        let at = region.as_ptr() as usize;
        uffd.register(at..at + region.len()).unwrap();
        uffd.copy(at, &[7; PAGE_BYTES], false).unwrap();
        assert!(uffd.copy(at, &[7; PAGE_BYTES], true).is_err(), "it is there");
        uffd.zero(at + PAGE_BYTES..at + 2 * PAGE_BYTES).unwrap();
        if uffd.can_move() {
            other.as_mut_slice().fill(9);
            // SAFETY: both are ours, and `other` is only used here afterwards.
            let moved = unsafe {
                uffd.move_pages(at + 2 * PAGE_BYTES, other.as_ptr() as usize, 2 * PAGE_BYTES)
            };
            assert_eq!(moved.0, 2 * PAGE_BYTES);
            assert_eq!(region.as_mut_slice()[3 * PAGE_BYTES], 9);
            assert!(other.as_mut_slice().iter().all(|byte| *byte == 0), "moved away");
        }
        assert_eq!((region.as_slice()[0], region.as_slice()[PAGE_BYTES]), (7, 0));
    }

    /// Without [`Uffd::was_moved`] this test fails on Linux 6.18 and later with an Intel processor.
    /// With an AMD processor only pages that are being migrated show the error, and a test of the
    /// regions covers these.
    #[test]
    fn pages_that_are_looked_at_while_they_move_are_counted() {
        const PAGES: usize = 64;
        let Ok(uffd) = Uffd::open(Delivery::Message) else { return };
        if !uffd.can_move() {
            return;
        }
        let places = [(); 2].map(|()| Mapping::reserved(PAGES * PAGE_BYTES).unwrap());
        let at = places.each_ref().map(|place| place.as_ptr() as usize);
        at.iter().for_each(|at| uffd.register(*at..at + PAGES * PAGE_BYTES).unwrap());
        uffd.copy(at[0], &[7; PAGES * PAGE_BYTES], false).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let marks = File::options().write(true).open("/proc/self/clear_refs").unwrap();
                while !done.load(Relaxed) {
                    // Makes the kernel forget which pages were accessed.
                    marks.write_all_at(b"1", 0).unwrap();
                }
            });
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    for page in 0..PAGES {
                        // SAFETY: the page is mapped. If it is absent, the read waits.
                        unsafe { ((at[0] + page * PAGE_BYTES) as *const u8).read_volatile() };
                    }
                }
            });
            scope.spawn(|| while uffd.next().unwrap() != Message::Stop {});
            let moved = (0..20_000).map(|turn| {
                let (from, to) = (at[turn % 2], at[(turn + 1) % 2]);
                // SAFETY: both are ours, and a reader of either waits.
                let moved = unsafe { uffd.move_pages(to, from, PAGES * PAGE_BYTES) };
                uffd.wake(to..to + PAGES * PAGE_BYTES).unwrap();
                moved
            });
            let short = moved.filter(|(bytes, end)| *bytes < PAGES * PAGE_BYTES || end.is_err());
            let short = short.take(3).collect::<Vec<_>>();
            done.store(true, Relaxed);
            uffd.stop();
            for page in (at[0]..at[0] + PAGES * PAGE_BYTES).step_by(PAGE_BYTES) {
                // Brings in missing pages, so that the reader can end. An error means that the page
                // is present.
                let _ = uffd.zero(page..page + PAGE_BYTES);
            }
            assert!(short.is_empty(), "{short:?}");
        });
    }
}

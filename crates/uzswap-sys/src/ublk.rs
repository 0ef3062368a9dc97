//! ublk: block devices that a program serves, over io_uring (Linux 6.1).
//!
//! Commands to `/dev/ublk-control` make, start and remove devices ([`Control`]). Each device has a
//! character device, over which one thread takes requests and answers them ([`Queue`]). Each
//! command that asks for a request passes a buffer to the kernel. For a write, the buffer has the
//! data when the command completes. For a read, the next command passes the data in the buffer. A
//! buffer belongs to the kernel while its [`Io`] is in the queue, and otherwise to the [`Io`]'s
//! holder.
//!
//! A device outlives its server (`USER_RECOVERY`). Otherwise the kernel would remove the device
//! under a swap area when the server is killed, and an area without a device cannot be switched
//! off. Another server takes the device over ([`Control::take_over`]). If that server continues
//! with the first server's pages, the kernel sends it again the requests that the first had taken
//! but not answered (`USER_RECOVERY_REISSUE`).
//!
//! Numbers and layouts are those of <linux/ublk_cmd.h>.

mod queue;

use crate::map::PAGE_BYTES;
use io_uring::{IoUring, opcode, squeue, types};
pub use queue::{Bell, Io, Operation, Queue, QueueEvent};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CONTROL: &str = "/dev/ublk-control";

/// Bytes of a sector, the unit of the interface.
const SECTOR_BYTES: u64 = 512;

/// Device flags. By the first, another server may take the device over from a dead one. By the
/// second, the kernel does not fail the requests that the dead server had taken, but sends them
/// again, to the new server. By the third (since 6.13), requests that arrive while there is no
/// server fail, too, and do not wait for the next server.
const USER_RECOVERY: u64 = 1 << 3;
const USER_RECOVERY_REISSUE: u64 = 1 << 4;
const USER_RECOVERY_FAIL_IO: u64 = 1 << 9;
const CMD_IOCTL_ENCODE: u64 = 1 << 6;

/// The device's `server_flags`, which the kernel only keeps. (The number of the server's process
/// would be useless: the kernel forgets it when the server ends.)
///
/// ```text
/// 63           32 31             0
/// │ first page    │ whose it is   │
/// ```
struct Mark;

impl Mark {
    const OURS: u64 = u32::from_le_bytes(*b"uzs\x02") as u64;

    /// The mark of a device of ours that begins at byte `start`.
    fn of(start: u64) -> u64 {
        let page = start / PAGE_BYTES as u64;
        assert!(page <= u32::MAX.into(), "no disk has so many pages");
        page << 32 | Self::OURS
    }

    fn is_ours(flags: u64) -> bool {
        flags & u64::from(u32::MAX) == Self::OURS
    }

    /// The start of the device, in bytes.
    fn start(flags: u64) -> u64 {
        (flags >> 32) * PAGE_BYTES as u64
    }
}

/// Asks for a free number.
const ANY: u32 = u32::MAX;
/// The command is for no queue.
const NO_QUEUE: u16 = u16::MAX;

/// Commands to the control device: their numbers, and true if the structure is only read.
#[derive(Clone, Copy)]
enum Command {
    GetDevInfo = 0x02,
    AddDev = 0x04,
    DelDev = 0x05,
    StartDev = 0x06,
    StopDev = 0x07,
    SetParams = 0x08,
    StartUserRecovery = 0x10,
    EndUserRecovery = 0x11,
    GetFeatures = 0x13,
}

/// `_IOWR('u', number, bytes)`, or `_IOR`: the numbers of commands since 6.4.
const fn encoded(number: u32, bytes: usize, is_read: bool) -> u32 {
    let direction = if is_read { 2 } else { 3 };
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ControlCommand {
    device: u32,
    queue: u16,
    bytes: u16,
    address: u64,
    data: [u64; 2],
}
const _: () = assert!(size_of::<ControlCommand>() == 32);

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DeviceInfo {
    queues: u16,
    depth: u16,
    state: u16,
    pad: u16,
    io_bytes_max: u32,
    device: u32,
    server: i32,
    pad_1: u32,
    flags: u64,
    server_flags: u64,
    owner: [u32; 2],
    reserved: [u64; 2],
}
const _: () = assert!(size_of::<DeviceInfo>() == 64);

/// `state` of a device that is being served.
const LIVE: u16 = 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Parameters {
    bytes: u32,
    kinds: u32,
    attributes: u32,
    logical_block_shift: u8,
    physical_block_shift: u8,
    io_opt_shift: u8,
    io_min_shift: u8,
    sectors_max: u32,
    chunk_sectors: u32,
    device_sectors: u64,
    virtual_boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    discard_sectors_max: u32,
    write_zeroes_sectors_max: u32,
    discard_segments_max: u16,
    reserved: u16,
}
const _: () = assert!(size_of::<Parameters>() == 64);

/// `kinds`: the basic parameters and those of discards.
const BASIC_AND_DISCARD: u32 = 0b11;

/// Parameters of a new device. It has one queue.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Its start on its server's disk, in whole pages: kept with it, for the next server.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// True if another server continues after the device's server dies. Otherwise requests fail
    /// after its death.
    pub outlives_server: bool,
    /// The maximum number of requests under way.
    pub depth: u16,
    /// Longest read or write.
    pub io_bytes_max: u32,
    /// Longest discard.
    pub discard_bytes_max: u64,
}

/// An existing device.
#[derive(Debug, Clone, Copy)]
pub struct ExistingDevice {
    /// True if this program made the device.
    pub is_ours: bool,
    /// True if a server serves the device.
    pub is_live: bool,
    /// See [`Shape`].
    pub start: u64,
    /// See [`Shape`].
    pub depth: u16,
    /// See [`Shape`].
    pub io_bytes_max: u32,
}

/// The path of the block device.
pub fn path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// Sets the time after which the kernel checks requests of a device without an answer. Up to Linux
/// 6.14 only this check shows the kernel that a server which had all requests was killed. (If the
/// kernel still has commands of the server's, it notices by those.) By default the kernel checks
/// after 30 s. This call waits until every request has its answer, even if this process is killed,
/// so the server must not make it. Fails if sysfs is read-only, as in containers.
pub fn set_timeout(id: u32, timeout: Duration) -> io::Result<()> {
    std::fs::write(timeout_file(id), timeout.as_millis().to_string())
}

/// The time that [`set_timeout`] has set, or the kernel's default. Fails if there is no such
/// device.
pub fn timeout(id: u32) -> io::Result<Duration> {
    let millis = std::fs::read_to_string(timeout_file(id))?;
    let millis = millis.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Duration::from_millis(millis))
}

fn timeout_file(id: u32) -> String {
    format!("/sys/block/ublkb{id}/queue/io_timeout")
}

/// The number of the device at such a path.
pub fn id(path: &Path) -> Option<u32> {
    path.to_str()?.strip_prefix("/dev/ublkb")?.parse().ok()
}

/// All devices, of any program.
pub fn all() -> Vec<u32> {
    // Without this folder, the kernel has no ublk.
    let entries = std::fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Checks that this process may make a device. The error has the reason if not.
pub fn check() -> io::Result<()> {
    File::options().read(true).write(true).open(CONTROL).map(drop)
}

/// The control device, with a ring for commands to it, since it takes no ioctl.
pub struct Control {
    ring: IoUring<squeue::Entry128>,
    file: File,
    is_encoded: bool,
    /// The structure of a command. `None` after a command without an answer: the kernel may still
    /// use it.
    structure: Option<Box<Structure>>,
}

/// Room for the structure of any command.
type Structure = [u64; 8];

impl Control {
    /// Opens the control device. Errors: `NotFound` where the kernel has no ublk, or its module is
    /// not loaded; `PermissionDenied`, also where io_uring is forbidden.
    pub fn open() -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(CONTROL)?;
        let mut control = Self::of_file(file, true)?;
        // A kernel that does not know the command (before 6.5) knows the old numbers.
        let mut features = 0u64;
        let asked = control.ask(Command::GetFeatures, ANY, &mut features, [0; 2]);
        control.is_encoded = asked.is_ok() && features & CMD_IOCTL_ENCODE != 0;
        Ok(control)
    }

    fn of_file(file: File, is_encoded: bool) -> io::Result<Self> {
        let ring = IoUring::<squeue::Entry128>::builder().build(4)?;
        Ok(Self { ring, file, is_encoded, structure: Some(Box::new([0; 8])) })
    }

    /// Sends one command and returns its answer. The command reads or writes `structure`. Errors:
    /// the kernel's. Once io_uring has failed to answer, every further command returns that error.
    fn ask<T: Copy>(
        &mut self,
        command: Command,
        device: u32,
        structure: &mut T,
        data: [u64; 2],
    ) -> io::Result<()> {
        const { assert!(size_of::<T>() <= size_of::<Structure>() && align_of::<T>() <= 8) };
        let mut kept = self.structure.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let place = kept.as_mut_ptr().cast::<T>();
        // SAFETY: it is large enough and aligned, as asserted, and no command uses it now.
        unsafe { place.write(*structure) };
        let bytes = size_of::<T>();
        let address = if bytes == 0 { 0 } else { place.expose_provenance() as u64 };
        // SAFETY: the callers below pass the structure of the command's type. It stays in place
        // until the command has completed, or for ever.
        unsafe { self.push(command, device, address, bytes as u16, data) };
        let answer = match self.wait() {
            Ok(answer) => answer,
            Err(error) => {
                // The command may still be under way, and use the structure.
                std::mem::forget(kept);
                return Err(error);
            }
        };
        // SAFETY: as above; the command has completed, and wrote a value of its type, or nothing.
        *structure = unsafe { place.read() };
        self.structure = Some(kept);
        outcome(answer)
    }

    /// # Safety
    ///
    /// `address` is the structure of the command until the command has completed; 0 if it has none.
    unsafe fn push(
        &mut self,
        command: Command,
        device: u32,
        address: u64,
        bytes: u16,
        data: [u64; 2],
    ) {
        let header = ControlCommand { device, queue: NO_QUEUE, bytes, address, data };
        let mut words = [0; 80];
        // SAFETY: the header is plain numbers without padding, read as bytes.
        let plain: [u8; 32] = unsafe { std::mem::transmute(header) };
        words[..plain.len()].copy_from_slice(&plain);
        let is_read = matches!(command, Command::GetDevInfo | Command::GetFeatures);
        let number = match self.is_encoded {
            true => encoded(command as u32, size_of::<ControlCommand>(), is_read),
            false => command as u32,
        };
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), number).cmd(words);
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.submission().push(&entry.build()) };
        pushed.expect("there is never more than one command");
    }

    fn submit(&mut self) -> io::Result<()> {
        loop {
            match self.ring.submit() {
                Err(error) if is_passing(&error) => {}
                other => return other.map(drop),
            }
        }
    }

    /// Waits for the answer to the command that was put in.
    fn wait(&mut self) -> io::Result<i32> {
        loop {
            match self.ring.submit_and_wait(1) {
                // A signal, or a moment without memory: the command stays in the ring.
                Err(error) if is_passing(&error) => {}
                other => _ = other?,
            }
            if let Some(answer) = self.ring.completion().next() {
                return Ok(answer.result());
            }
        }
    }

    /// Makes a device without starting it; its number. Errors: the kernel's; `Unsupported` before
    /// 6.1.
    pub fn add(&mut self, shape: &Shape) -> io::Result<u32> {
        let of_the_taken =
            if shape.outlives_server { USER_RECOVERY_REISSUE } else { USER_RECOVERY_FAIL_IO };
        let mut info = DeviceInfo {
            queues: 1,
            depth: shape.depth,
            io_bytes_max: shape.io_bytes_max,
            device: ANY,
            flags: USER_RECOVERY | of_the_taken | CMD_IOCTL_ENCODE,
            server_flags: Mark::of(shape.start),
            ..DeviceInfo::default()
        };
        self.ask(Command::AddDev, ANY, &mut info, [0; 2])?;
        let id = info.device;
        // The kernel clears flags that it does not know.
        let needed = USER_RECOVERY | if shape.outlives_server { USER_RECOVERY_REISSUE } else { 0 };
        let is_fit = info.flags & needed == needed && info.depth == shape.depth;
        let set = match is_fit {
            true => self.set_parameters(id, shape),
            false => Err(io::ErrorKind::Unsupported.into()),
        };
        if set.is_err() {
            // This function returns the first error, not this one.
            let _ = self.delete(id);
        }
        set.map(|()| id)
    }

    fn set_parameters(&mut self, id: u32, shape: &Shape) -> io::Result<()> {
        let shift = PAGE_BYTES.ilog2() as u8;
        let sectors = |bytes: u64| (bytes / SECTOR_BYTES).min(u32::MAX.into()) as u32;
        let mut parameters = Parameters {
            bytes: size_of::<Parameters>() as u32,
            kinds: BASIC_AND_DISCARD,
            // Not rotational, and without a cache that must be flushed.
            attributes: 0,
            logical_block_shift: shift,
            physical_block_shift: shift,
            io_opt_shift: shift,
            io_min_shift: shift,
            sectors_max: sectors(shape.io_bytes_max.into()),
            device_sectors: shape.bytes / SECTOR_BYTES,
            discard_granularity: PAGE_BYTES as u32,
            discard_sectors_max: sectors(shape.discard_bytes_max),
            discard_segments_max: 1,
            ..Parameters::default()
        };
        self.ask(Command::SetParams, id, &mut parameters, [0; 2])
    }

    /// Opens the queue of a device, for the thread that will serve it. Errors: `ResourceBusy` while
    /// another process has it open.
    pub fn queue(&self, id: u32, depth: u16, io_bytes_max: u32) -> io::Result<Queue> {
        Queue::open(id, depth, io_bytes_max, self.is_encoded)
    }

    /// Makes the block device, once its queue has fetched. This process is its server.
    pub fn start(&mut self, id: u32) -> io::Result<()> {
        self.ask(Command::StartDev, id, &mut (), [std::process::id().into(), 0])
    }

    /// Takes over a device whose server died. Returns its queue, for the serving thread, and a
    /// handover to wait for once the queue has fetched. Errors: `ResourceBusy` while the kernel has
    /// not noticed the death (6.1 checks every 5 s; see [`set_timeout`]).
    ///
    /// The end of the recovery is requested before the queue can fetch, so that the kernel gives
    /// the device to this process at that moment. The kernel does not check if this process was
    /// killed after it had fetched, and a device that is given to a dead server cannot be taken
    /// over again.
    pub fn take_over(&mut self, id: u32, found: &ExistingDevice) -> io::Result<(Queue, Handover)> {
        match self.ask(Command::StartUserRecovery, id, &mut (), [0; 2]) {
            // A server has begun a recovery, and died before it had a queue.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            other => other?,
        }
        let mut control = Self::of_file(self.file.try_clone()?, self.is_encoded)?;
        let data = [std::process::id().into(), 0];
        // SAFETY: the command takes no structure.
        unsafe { control.push(Command::EndUserRecovery, id, 0, 0, data) };
        control.submit()?;
        let handover = Handover(control);
        let queue = self.queue(id, found.depth, found.io_bytes_max)?;
        Ok((queue, handover))
    }

    /// Removes the block device. Its server learns that there are no more requests.
    pub fn stop(&mut self, id: u32) -> io::Result<()> {
        self.ask(Command::StopDev, id, &mut (), [0; 2])
    }

    /// Frees the device's number; waits until its server has closed the device.
    pub fn delete(&mut self, id: u32) -> io::Result<()> {
        self.ask(Command::DelDev, id, &mut (), [0; 2])
    }

    /// Describes a device. Errors: ENODEV if no device has this number.
    pub fn find(&mut self, id: u32) -> io::Result<ExistingDevice> {
        let mut info = DeviceInfo::default();
        self.ask(Command::GetDevInfo, id, &mut info, [0; 2])?;
        Ok(ExistingDevice {
            is_ours: Mark::is_ours(info.server_flags),
            is_live: info.state == LIVE,
            start: Mark::start(info.server_flags),
            depth: info.depth,
            io_bytes_max: info.io_bytes_max,
        })
    }
}

/// A device that is about to be this process's: see [`Control::take_over`]. If it is dropped before
/// it was waited for, the kernel cancels the handover.
pub struct Handover(Control);

impl Handover {
    /// Waits until the queue has fetched and the device is served.
    pub fn wait(mut self) -> io::Result<()> {
        outcome(self.0.wait()?)
    }
}

fn outcome(answer: i32) -> io::Result<()> {
    match answer {
        0.. => Ok(()),
        // The kernel's internal number for "not supported", which the C library does not know.
        -524 => Err(io::ErrorKind::Unsupported.into()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// True if a call of the ring must be repeated.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        // From <linux/ublk_cmd.h>, as a C compiler computes them.
        let command = |command: Command, is_read| encoded(command as u32, 32, is_read);
        assert_eq!(command(Command::AddDev, false), 0xc020_7504);
        assert_eq!(command(Command::GetDevInfo, true), 0x8020_7502);
        assert_eq!(std::mem::offset_of!(DeviceInfo, server_flags), 32);
        assert_eq!(std::mem::offset_of!(Parameters, device_sectors), 24);
        assert_eq!(std::mem::offset_of!(Parameters, discard_alignment), 40);
    }

    #[test]
    fn a_mark_says_whose_a_device_is_and_where_it_begins() {
        let last = u64::from(u32::MAX) * PAGE_BYTES as u64;
        for start in [0, 256 << 20, last] {
            let mark = Mark::of(start);
            assert!(Mark::is_ours(mark));
            assert_eq!(Mark::start(mark), start);
        }
        // Other servers set the same values.
        for flags in [0, 1, u64::MAX, 7 << 32] {
            assert!(!Mark::is_ours(flags));
        }
    }

    #[test]
    fn a_device_is_known_by_its_path() {
        assert_eq!(id(&path(7)), Some(7));
        for other in ["/dev/ublkb", "/dev/ublkbx", "/dev/ublkc7", "/dev/loop7"] {
            assert_eq!(id(Path::new(other)), None);
        }
    }
}

//! The backing of a pager whose process may be forked: files without a name, in layers.
//!
//! A child keeps its parent's index, which has each page's place on the backing. So the file that
//! the parent has written becomes a *layer*: both processes read it, and neither writes to it
//! again. From then on each writes to a file of its own, the *top*.
//!
//! ```text
//! before the fork    after it, in the parent    in the child
//! top      A         top      B                 top      C
//!                    layer    A                 layer    A
//! ```
//! For each granule of the backing, a byte says which file has it. A fork costs a new file, however
//! much was written. If the parent has written little, the child gets a copy of those bytes
//! instead, so that many forks do not make many layers. If no number is left for a layer, the
//! smallest layers are copied into one.
//!
//! A layer takes its space on the disk until neither process needs a granule of it, or both have
//! ended.
//!
//! Writes do not use io_uring: parent and child would share one ring.

#![expect(
    unsafe_code,
    reason = "words and granules lie in a mapping: both are atomics, and the mapping stays as long as its owner"
)]

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::*};
use std::time::Instant;
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::backing::{Backing, Completion, FileBacking, Write};
use uzswap_sys::map::Mapping;
use uzswap_sys::{past_limit, process, shared};

/// The most files: the top, and the layers below it.
const FILES: usize = 6;
/// A child gets a copy of a top with at most this many granules (1 MiB).
const COPIED: u64 = 256;
/// Bytes of a granule. A write begins at a granule. If a write ends within a granule, the rest of
/// that granule is not read before it is written.
const GRANULE: u64 = PAGE_BYTES as u64;

/// The backing. Clones of this value are the same backing.
#[derive(Clone)]
pub(crate) struct Layers(Arc<LayerFiles>);

struct LayerFiles {
    folder: PathBuf,
    /// A number whose file is not in use refers to `empty`.
    files: [FileBacking; FILES],
    empty: File,
    /// The number of the top. It changes only while no thread reads or writes.
    top: AtomicUsize,
    granules: Granules,
    /// The number of granules of each file.
    counts: [AtomicU64; FILES],
    /// The time of all reads, ns.
    read_nanos: AtomicU64,
}

/// The child's top, made before the fork.
pub(crate) struct ForChild {
    file: File,
    /// Granules that the parent wrote only to this file, not to one of its own files.
    written: Vec<Range<u64>>,
}

impl Layers {
    /// Files in a folder that take space as they are written. Each has at most `bytes`.
    pub(crate) fn create(folder: &Path, bytes: u64) -> io::Result<Self> {
        let empty = open(folder, bytes)?;
        let mut files = Vec::with_capacity(FILES);
        for number in 0..FILES {
            let file = if number == 0 { open(folder, bytes)? } else { again(&empty)? };
            files.push(FileBacking::new(file, bytes)?.without_io_uring().with_discard());
        }
        let files = files.try_into().ok().expect("as many as there may be");
        Ok(Self(Arc::new(LayerFiles {
            folder: folder.into(),
            files,
            empty,
            top: AtomicUsize::new(0),
            granules: Granules::new(bytes.div_ceil(GRANULE))?,
            counts: [const { AtomicU64::new(0) }; FILES],
            read_nanos: AtomicU64::new(0),
        })))
    }

    /// The time of all reads, ns.
    pub(crate) fn read_nanos(&self) -> u64 {
        self.0.read_nanos.load(Relaxed)
    }

    /// Opens new files under the same descriptors. The caller has not written to the backing yet.
    pub(crate) fn renew(&self) -> io::Result<()> {
        let inner = &*self.0;
        for file in [&inner.empty, inner.files[inner.top.load(Relaxed)].file()] {
            process::take_place(direct(&inner.open()?)?, file)?;
        }
        inner.close_unused()
    }

    /// The descriptors that must stay open.
    pub(crate) fn descriptors(&self) -> Vec<i32> {
        let files = self.0.files.iter().map(FileBacking::file);
        files.chain([&self.0.empty]).map(AsRawFd::as_raw_fd).collect()
    }

    /// Makes the child's top. No thread reads or writes until the fork was made, or failed. Fails
    /// if the disk has no room, or if the process may not have another file. Nothing has changed
    /// then.
    pub(crate) fn before_fork(&self) -> io::Result<ForChild> {
        let inner = &*self.0;
        inner.close_unused()?;
        let top = inner.top.load(Relaxed);
        let file = inner.open()?;
        if inner.counts[top].load(Relaxed) <= COPIED {
            inner.copy(|number| number == top, &file)?;
        } else {
            let number = match inner.unused() {
                Some(number) => number,
                None => inner.join_smallest()?,
            };
            process::take_place(&direct(&inner.open()?)?, inner.files[number].file())?;
            inner.top.store(number, Relaxed);
        }
        direct(&file)?;
        Ok(ForChild { file, written: Vec::new() })
    }

    /// Makes that file the child's top.
    pub(crate) fn in_child(&self, own: &ForChild) -> io::Result<()> {
        let inner = &*self.0;
        let top = inner.top.load(Relaxed);
        process::take_place(&own.file, inner.files[top].file())?;
        own.written.iter().cloned().for_each(|range| inner.set(range, Some(top)));
        Ok(())
    }
}

impl ForChild {
    /// Writes data for the child alone. Offset and length are multiples of a granule.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.written.push(granules(offset, bytes.len()));
        self.file.write_all_at(bytes, offset)
    }
}

impl LayerFiles {
    /// A new file. If the folder is out of reach by now (`chroot`, Landlock), the file is in
    /// memory, beside the budget, so that the program's fork does not fail.
    fn open(&self) -> io::Result<File> {
        let bytes = self.files[0].bytes();
        open(&self.folder, bytes).or_else(|error| match Errno::from_io_error(&error) {
            Some(Errno::ACCESS | Errno::PERM | Errno::NOENT | Errno::NOTDIR | Errno::ROFS) => {
                open_in_memory(bytes)
            }
            _ => Err(error),
        })
    }

    /// Frees the space of layers of which this process needs no granule.
    fn close_unused(&self) -> io::Result<()> {
        self.unused_numbers()
            .try_for_each(|number| process::take_place(&self.empty, self.files[number].file()))
    }

    fn unused(&self) -> Option<usize> {
        self.unused_numbers().next()
    }

    fn unused_numbers(&self) -> impl Iterator<Item = usize> {
        let top = self.top.load(Relaxed);
        (0..FILES).filter(move |&number| number != top && self.counts[number].load(Relaxed) == 0)
    }

    /// Copies the smaller half of the layers into one layer, and returns the number of a file that
    /// is unused now.
    fn join_smallest(&self) -> io::Result<usize> {
        let top = self.top.load(Relaxed);
        let mut layers: Vec<_> = (0..FILES).filter(|number| *number != top).collect();
        layers.sort_by_key(|number| self.counts[*number].load(Relaxed));
        layers.truncate(layers.len().div_ceil(2));
        let joined = self.open()?;
        self.copy(|number| layers.contains(&number), &joined)?;
        process::take_place(&direct(&joined)?, self.files[layers[0]].file())?;
        for range in self.runs(|number| layers[1..].contains(&number)) {
            self.set(range, Some(layers[0]));
        }
        self.close_unused()?;
        Ok(layers[1])
    }

    /// Copies the granules of some files to the same place in another file.
    fn copy(&self, is_copied: impl Fn(usize) -> bool, to: &File) -> io::Result<()> {
        for number in (0..FILES).filter(|number| is_copied(*number)) {
            for range in self.runs(|one| one == number) {
                copy_part(self.files[number].file(), to, range)?;
            }
        }
        Ok(())
    }

    /// The runs of granules that some files have.
    fn runs(&self, is_one: impl Fn(usize) -> bool) -> Vec<Range<u64>> {
        let counts = (0..FILES).filter(|number| is_one(*number));
        let mut left = counts.map(|number| self.counts[number].load(Relaxed)).sum::<u64>();
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut granule = 0;
        while left > 0 {
            if self.granules.get(granule).is_some_and(&is_one) {
                left -= 1;
                match runs.last_mut() {
                    Some(run) if run.end == granule => run.end += 1,
                    _ => runs.push(granule..granule + 1),
                }
            }
            granule += 1;
        }
        runs
    }

    /// Notes which file has the granules of a range; `None` if no process reads them.
    fn set(&self, range: Range<u64>, to: Option<usize>) {
        for granule in range {
            let before = self.granules.set(granule, to);
            if before != to {
                before.inspect(|number| _ = self.counts[*number].fetch_sub(1, Relaxed));
                to.inspect(|number| _ = self.counts[*number].fetch_add(1, Relaxed));
            }
        }
    }

    fn of(&self, granule: u64) -> &FileBacking {
        &self.files[self.granules.get(granule).unwrap_or(self.top.load(Relaxed))]
    }

    /// Notes that the top has a range, and returns the top.
    fn top_for(&self, offset: u64, bytes: usize) -> &FileBacking {
        let top = self.top.load(Relaxed);
        self.set(granules(offset, bytes), Some(top));
        &self.files[top]
    }
}

/// The file that has each granule: a byte that is 0, or the file's number and 1.
struct Granules {
    memory: Mapping,
    count: u64,
}

impl Granules {
    fn new(count: u64) -> io::Result<Self> {
        let memory = Mapping::for_pages(count as usize, PAGE_BYTES)?;
        memory.set_inherited(0, memory.len(), true)?;
        Ok(Self { memory, count })
    }

    fn byte(&self, granule: u64) -> &AtomicU8 {
        assert!(granule < self.count);
        // SAFETY: the byte is inside the mapping, which `self` keeps. All accesses are atomic, and
        // zero is a valid value.
        unsafe { &*self.memory.as_ptr().cast::<AtomicU8>().add(granule as usize) }
    }

    fn get(&self, granule: u64) -> Option<usize> {
        usize::from(self.byte(granule).load(Relaxed)).checked_sub(1)
    }

    /// Sets the file of a granule, and returns the earlier one.
    fn set(&self, granule: u64, to: Option<usize>) -> Option<usize> {
        let before = self.byte(granule).swap(to.map_or(0, |number| number as u8 + 1), Relaxed);
        usize::from(before).checked_sub(1)
    }
}

/// The granules of a range, including a partial last one.
fn granules(offset: u64, bytes: usize) -> Range<u64> {
    offset / GRANULE..(offset + bytes as u64).div_ceil(GRANULE)
}

/// Fails if the program has limited the size of its files to less.
fn check_limit(end: u64) -> io::Result<()> {
    if process::may_write_to(end) { Ok(()) } else { Err(Errno::FBIG.into()) }
}

/// A file without a name.
fn open(folder: &Path, bytes: u64) -> io::Result<File> {
    check_limit(bytes)?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?;
    let file = File::from(process::out_of_the_way(file)?);
    file.set_len(bytes)?;
    Ok(file)
}

fn open_in_memory(bytes: u64) -> io::Result<File> {
    let file = File::from(process::out_of_the_way(shared::create("uzswap-backing")?)?);
    file.set_len(bytes)?;
    Ok(file)
}

fn again(file: &File) -> io::Result<File> {
    Ok(process::out_of_the_way(OwnedFd::from(file.try_clone()?))?.into())
}

/// Sets a file to direct reads and writes. Before Linux 6.6 a file in memory refuses that.
fn direct(file: &File) -> io::Result<&File> {
    match fs::fcntl_setfl(file, fs::fcntl_getfl(file)? | OFlags::DIRECT) {
        Ok(()) | Err(Errno::INVAL) => Ok(file),
        Err(error) => Err(error.into()),
    }
}

fn copy_part(from: &File, to: &File, granules: Range<u64>) -> io::Result<()> {
    let (mut read, end) = (granules.start * GRANULE, granules.end * GRANULE);
    let mut written = read;
    while read < end {
        let left = (end - read) as usize;
        let part = match fs::copy_file_range(from, Some(&mut read), to, Some(&mut written), left) {
            Err(Errno::XDEV) => {
                fs::seek(to, fs::SeekFrom::Start(written))?;
                let sent = fs::sendfile(to, from, Some(&mut read), left)?;
                written += sent as u64;
                sent
            }
            part => part?,
        };
        if part == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

impl Backing for Layers {
    fn bytes(&self) -> u64 {
        self.0.files[0].bytes()
    }

    fn block_bytes(&self) -> usize {
        self.0.files[0].block_bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let began = Instant::now();
        let (mut at, end) = (offset, offset + out.len() as u64);
        while at < end {
            let file = self.0.of(at / GRANULE);
            let mut next = at / GRANULE + 1;
            while next * GRANULE < end && std::ptr::eq(self.0.of(next), file) {
                next += 1;
            }
            let until = (next * GRANULE).min(end);
            file.read(at, &mut out[(at - offset) as usize..(until - offset) as usize])?;
            at = until;
        }
        self.0.read_nanos.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let top = self.0.top_for(offset, bytes.len());
        match process::may_write_to(offset + bytes.len() as u64) {
            true => top.write(offset, bytes),
            // The program has lowered the limit since the file was made.
            false => past_limit::write(top.file(), offset, bytes),
        }
    }

    fn submit(&self, write: Write) {
        let top = self.0.top_for(write.offset, write.bytes);
        match process::may_write_to(write.offset + write.bytes as u64) {
            true => top.submit(write),
            false => {
                let result = past_limit::write(top.file(), write.offset, write.bytes());
                top.end(write, result);
            }
        }
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.0.set(granules(offset, bytes as usize), None);
        self.0.files[self.0.top.load(Relaxed)].discard(offset, bytes)
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        // A write to a file that was the top before the last fork may have ended, too.
        self.0.files.iter().find_map(|file| file.complete(wait))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::backing::{Buffer, SEGMENT_BYTES};

    const SEGMENTS: u64 = 8;
    const SEGMENT: u64 = SEGMENT_BYTES as u64;

    /// A process: its backing, and the content that it expects in each granule.
    struct LayerHistory {
        layers: Layers,
        expected: Vec<Option<u64>>,
        random: u64,
        depth: u32,
    }

    impl LayerHistory {
        fn new(folder: &Path, seed: u64) -> Self {
            let layers = Layers::create(folder, SEGMENTS * SEGMENT).unwrap();
            let expected = vec![None; (SEGMENTS * SEGMENT / GRANULE) as usize];
            Self { layers, expected, random: seed * 2 + 1, depth: 0 }
        }

        fn below(&mut self, end: u64) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            (self.random >> 11) % end
        }

        /// Writes a segment, or a page, by one call.
        fn write(&mut self) {
            let page = self.below(SEGMENTS * SEGMENT / GRANULE) * GRANULE;
            let is_page = self.below(3) == 0;
            let (offset, bytes) =
                if is_page { (page, GRANULE) } else { (page / SEGMENT * SEGMENT, SEGMENT) };
            let content = self.random;
            let mut buffer = Buffer::new(bytes as usize).unwrap();
            for (at, word) in buffer.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&(content ^ (at as u64 * 8 / GRANULE)).to_le_bytes());
            }
            if is_page {
                self.layers.write_page(offset, &buffer).unwrap();
            } else {
                self.layers.submit(Write { offset, buffer, bytes: bytes as usize });
                while let Some(done) = self.layers.complete(true) {
                    done.result.unwrap();
                }
            }
            for (at, granule) in granules(offset, bytes as usize).enumerate() {
                self.expected[granule as usize] = Some(content ^ at as u64);
            }
        }

        fn discard(&mut self) {
            let segment = self.below(SEGMENTS);
            self.layers.discard(segment * SEGMENT, SEGMENT).unwrap();
            for granule in granules(segment * SEGMENT, SEGMENT_BYTES) {
                self.expected[granule as usize] = None;
            }
        }

        /// Reads all that was written as records are read: across granules, and not aligned.
        fn check(&self) {
            let mut found = vec![0; 3 * GRANULE as usize];
            for (at, three) in self.expected.windows(3).enumerate() {
                let offset = at as u64 * GRANULE + 100;
                let bytes = &mut found[..2 * GRANULE as usize];
                self.layers.read(offset, bytes).unwrap();
                let word = |at: usize| {
                    let bytes = found[at..at + 8].try_into().unwrap();
                    u64::from_le_bytes(bytes)
                };
                let seen = [4, 4 + GRANULE as usize, 2 * GRANULE as usize - 12].map(word);
                for (expected, seen) in three.iter().zip(seen) {
                    assert!(expected.is_none_or(|expected| expected == seen), "{at}");
                }
            }
        }

        /// Parent and child both continue.
        fn fork(&mut self) {
            let own = self.layers.before_fork().unwrap();
            // SAFETY: the child reads and writes files, and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let ends_well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    self.layers.in_child(&own).unwrap();
                    (self.depth, self.random) = (self.depth + 1, self.random ^ 0x5555);
                    self.go_on(12);
                }));
                // SAFETY: nothing of the parent's is to run.
                unsafe { libc::_exit(i32::from(ends_well.is_err())) };
            }
            assert!(child > 0);
            drop(own);
            self.go_on(3);
            let mut status = 0;
            // SAFETY: the status is written.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child has found other bytes");
        }

        fn go_on(&mut self, steps: u32) {
            self.check();
            for _ in 0..steps {
                match self.below(16) {
                    0 | 1 => self.discard(),
                    2 if self.depth < 3 => self.fork(),
                    _ => self.write(),
                }
            }
            self.check();
        }
    }

    #[test]
    fn parents_and_children_read_their_own_writes_and_those_before_the_fork() {
        let folder = tempfile::tempdir().unwrap();
        for seed in 0..4 {
            LayerHistory::new(folder.path(), seed).go_on(60);
        }
    }

    #[test]
    fn forks_go_on_where_the_folder_is_out_of_reach() {
        for seed in 0..8 {
            let folder = tempfile::tempdir_in("/var/tmp").unwrap();
            let mut process = LayerHistory::new(folder.path(), seed);
            folder.close().unwrap();
            process.go_on(30);
        }
    }

    #[test]
    fn many_forks_make_no_more_layers_than_there_may_be() {
        let folder = tempfile::tempdir().unwrap();
        let mut process = LayerHistory::new(folder.path(), 1);
        process.depth = 3;
        for _ in 0..40 {
            // More than fits a copy, so each fork makes a layer.
            (0..6).for_each(|_| process.write());
            process.fork();
        }
        process.check();
        let live = process.expected.iter().flatten().count() as u64;
        let counts = process.layers.0.counts.iter().map(|count| count.load(Relaxed));
        assert!(counts.sum::<u64>() >= live);
    }

    #[test]
    fn a_layer_that_no_process_needs_gives_its_space_back_at_the_next_fork() {
        let folder = tempfile::tempdir().unwrap();
        let mut process = LayerHistory::new(folder.path(), 1);
        process.depth = 3;
        let blocks = |process: &LayerHistory| -> i64 {
            let numbers = process.layers.descriptors();
            let files = process.layers.0.files.iter().map(FileBacking::file);
            assert_eq!(numbers.len(), FILES + 1);
            files.map(|file| fs::fstat(file).unwrap().st_blocks as i64).sum()
        };
        (0..30).for_each(|_| process.write());
        drop(process.layers.before_fork().unwrap());
        assert!(blocks(&process) > 1 << 11);
        for segment in 0..SEGMENTS {
            process.layers.discard(segment * SEGMENT, SEGMENT).unwrap();
        }
        drop(process.layers.before_fork().unwrap());
        assert_eq!(blocks(&process), 0);
    }
}

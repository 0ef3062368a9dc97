//! Memory of a cache that outlives its process.
//!
//! This memory has the index, the pool, the use of each segment of the backing with its seals, the
//! dictionaries and the attributes. All else (lists, free space, counts) follows from these, and
//! `recover` rebuilds it. So a process that is killed at any instruction leaves a cache that the
//! next process can take over.
//!
//! Everything has its place in the file from the start: the header, and then a [`DurableArray`] for
//! each kind of thing. `cache::layout` knows the types, and so their sizes. Only things in use have
//! memory.
//!
//! A killed thread ends between two instructions, and all its earlier stores are complete.
//! `Release` keeps the compiler from reordering stores.
//!
//! A process believes a file only if [`Durable::is_held`]: it makes an unfinished cache anew.

#![expect(
    unsafe_code,
    reason = "memory that several processes map, one after the other: one of them serves at a time; it holds atomics, or data of a single thread"
)]

use crate::bits::Bits;
use crate::crash_points::{self, DurableAtomic};
use crate::page::PAGE_BYTES;
use crate::sync::{Mutex, lock};
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::*};
use uzswap_sys::processor;
use uzswap_sys::shared::SharedMemory;

/// The maximum number of dictionaries of a cache: 60 KiB each, never freed.
pub(crate) const DICTIONARIES_MAX: usize = 64;

/// The maximum bytes of an attribute's name and value, and the maximum number of attributes.
const VALUE_BYTES: usize = 63;
const VALUES_MAX: usize = 32;

/// Bytes of the key that a backing is sealed with.
pub(crate) const KEY_BYTES: usize = 32;

/// Items of one size, one after another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DurableArray {
    /// Bytes from the start of the memory.
    pub(crate) start: usize,
    /// Bytes of each thing.
    pub(crate) unit: usize,
    pub(crate) count: usize,
}

impl DurableArray {
    fn at(self, number: usize) -> usize {
        assert!(number < self.count, "{number} of {self:?}");
        self.start + number * self.unit
    }

    fn end(self) -> usize {
        self.start + self.count * self.unit
    }
}

/// The place of each part, in this order, behind the page of the header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// The frame of each trunk of the index: a word.
    pub(crate) directory: DurableArray,
    /// For each section of the pool, a word: 1 if it is on line.
    pub(crate) sections_on_line: DurableArray,
    /// The table of tags of each cluster of the backing: a word.
    pub(crate) tag_homes: DurableArray,
    /// The use of each segment of the backing: a word.
    pub(crate) segments: DurableArray,
    pub(crate) dictionaries: DurableArray,
    /// Tables of tags.
    pub(crate) tags: DurableArray,
    /// Chunks of descriptors of zspages.
    pub(crate) descriptors: DurableArray,
    /// Frames of trunks.
    pub(crate) trunks: DurableArray,
    /// True if trunks lie in huge pages.
    pub(crate) are_trunks_huge: bool,
    pub(crate) sections: DurableArray,
}

const _: () = assert!(size_of::<DurableHeader>() <= PAGE_BYTES);

#[repr(C)]
struct DurableHeader {
    magic: DurableAtomic<AtomicU64>,
    shape: [DurableAtomic<AtomicU64>; 4],
    is_held: DurableAtomic<AtomicU64>,
    generation: DurableAtomic<AtomicU64>,
    key: [DurableAtomic<AtomicU8>; KEY_BYTES],
    descriptor_chunks: DurableAtomic<AtomicU64>,
    intent: Intent,
    dictionary_bytes: [DurableAtomic<AtomicU32>; DICTIONARIES_MAX],
    /// For each changed attribute, the length, and its name and value. The name is needed because
    /// another version may have other attributes, or another order.
    values: [[DurableAtomic<AtomicU8>; VALUE_BYTES + 1]; VALUES_MAX],
}

/// A change of both words of an entry on the backing: the place of its record and its proof.
/// `entry` is the key plus one, 0 for none.
#[repr(C)]
pub(crate) struct Intent {
    entry: DurableAtomic<AtomicU64>,
    word: DurableAtomic<AtomicU64>,
    aux: DurableAtomic<AtomicU64>,
    new_aux: DurableAtomic<AtomicU64>,
}

/// A frame that a trunk of the index may be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TrunkFrame(u32);

impl TrunkFrame {
    /// The number in the directory.
    pub(crate) fn word(self) -> u32 {
        self.0 + 1
    }

    /// True if this frame is the home of the trunk with this number.
    pub(crate) fn is_home_of(self, number: usize) -> bool {
        self.0 as usize == number
    }
}

/// Frames without a trunk.
struct FreeFrames(Bits);

impl FreeFrames {
    /// All frames.
    fn new(frames: usize) -> Self {
        let unused = Bits::new(frames);
        (0..frames).for_each(|frame| unused.set(frame, true));
        Self(unused)
    }

    /// Takes the frame `home`, or else a free frame that is no trunk's home while there is any.
    fn take(&self, home: usize) -> Option<TrunkFrame> {
        let frame = if self.0.has(home) { home } else { self.0.last()? };
        self.0.set(frame, false);
        Some(TrunkFrame(frame as u32))
    }

    fn give(&self, frame: TrunkFrame) {
        self.0.set(frame.0 as usize, true);
    }
}

/// See the module.
pub(crate) struct Durable {
    memory: SharedMemory,
    parts: Parts,
    unused: Mutex<FreeFrames>,
}

/// Types that may lie in memory that outlives the process. Any bytes are a valid value, zeros too,
/// and all changes are atomic.
///
/// # Safety
/// The type is as said, and has no destructor.
pub(crate) unsafe trait Lasting: Sync {}

// SAFETY: any bytes are a number, and it is atomic.
unsafe impl Lasting for DurableAtomic<AtomicU8> {}
// SAFETY: as above.
unsafe impl Lasting for DurableAtomic<AtomicU32> {}
// SAFETY: as above.
unsafe impl Lasting for DurableAtomic<AtomicU64> {}

/// A slice of values, in the process's memory or in memory that outlives it.
pub(crate) enum Values<T> {
    /// The values are in the process's own memory.
    Own(Box<[T]>),
    /// Invariant: `first` begins `count` values in a populated part of the memory.
    Lasting { first: NonNull<T>, count: usize, _memory: Arc<Durable> },
}

// SAFETY: like a shared slice of `T`; the memory, which no thread owns alone, keeps it alive.
unsafe impl<T: Send + Sync> Send for Values<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Values<T> {}

impl<T> Deref for Values<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Own(values) => values,
            Self::Lasting { first, count, .. } => {
                // SAFETY: the variant's invariant; the memory stays mapped while `_memory` lives.
                unsafe { std::slice::from_raw_parts(first.as_ptr(), *count) }
            }
        }
    }
}

impl Durable {
    /// Opens a file from [`uzswap_sys::shared::create`]: a new one, or one with a cache of this
    /// version and shape. `parts` follow from the shape. `None` if the file has a cache of another
    /// version or shape. Fails without memory.
    pub(crate) fn open(
        file: OwnedFd,
        version: u64,
        shape: [u64; 4],
        parts: Parts,
    ) -> io::Result<Option<Arc<Self>>> {
        let memory = SharedMemory::map(file, parts.sections.end())?;
        memory.populate(0, parts.dictionaries.start)?;
        let unused = Mutex::new(FreeFrames::new(parts.trunks.count));
        if parts.are_trunks_huge {
            memory.prefer_huge(parts.trunks.start, parts.sections.start - parts.trunks.start);
        }
        let durable = Arc::new(Self { memory, parts, unused });
        let header = durable.header();
        let shapes = || header.shape.iter().zip(shape);
        if !durable.is_held() {
            durable.forget();
            shapes().for_each(|(word, value)| word.store(value, Relaxed));
            header.magic.store(version, Release);
        } else if header.magic.load(Relaxed) != version
            || shapes().any(|(word, value)| word.load(Relaxed) != value)
        {
            return Ok(None);
        }
        Ok(Some(durable))
    }

    /// Removes an unfinished cache.
    fn forget(&self) {
        crash_points::store();
        // SAFETY: only this process has mapped the memory, and there is no cache in it.
        let released = unsafe { self.memory.release(0, self.parts.sections.end()) };
        // After an error the memory is new, or the part of it that is read is zeros.
        let _ = released.and_then(|()| self.memory.populate(0, self.parts.dictionaries.start));
    }

    fn header(&self) -> &DurableHeader {
        // SAFETY: the first page of the mapping is populated, aligned, and consists of atomics.
        unsafe { &*self.memory.as_ptr().cast() }
    }

    /// True if the memory has a cache that can be taken over.
    pub(crate) fn is_held(&self) -> bool {
        self.header().is_held.load(Acquire) != 0
    }

    /// From now on the memory has a cache.
    pub(crate) fn set_held(&self) {
        self.header().is_held.store(1, Release);
    }

    /// Values at an offset. They are populated.
    fn values<T: Lasting>(self: &Arc<Self>, at: usize, count: usize) -> Values<T> {
        assert!(at + count * size_of::<T>() <= self.memory.len());
        assert!(at.is_multiple_of(align_of::<T>()));
        // SAFETY: by the assertion, the address is aligned and inside the mapping, so it is not
        // null.
        let first = unsafe { NonNull::new_unchecked(self.memory.as_ptr().add(at).cast::<T>()) };
        Values::Lasting { first, count, _memory: self.clone() }
    }

    fn words(self: &Arc<Self>, part: DurableArray) -> Values<DurableAtomic<AtomicU32>> {
        self.values(part.start, part.count)
    }

    /// For each trunk of the index, the number of its frame plus one, or 0.
    pub(crate) fn directory(self: &Arc<Self>) -> Values<DurableAtomic<AtomicU32>> {
        self.words(self.parts.directory)
    }

    /// For each section, 1 if it is on line.
    pub(crate) fn sections_on_line(self: &Arc<Self>) -> Values<DurableAtomic<AtomicU32>> {
        self.words(self.parts.sections_on_line)
    }

    /// For each cluster of the backing, the number of its table of tags plus one, or 0.
    pub(crate) fn tag_homes(self: &Arc<Self>) -> Values<DurableAtomic<AtomicU32>> {
        self.words(self.parts.tag_homes)
    }

    /// For each segment of the backing, its use.
    pub(crate) fn segments(self: &Arc<Self>) -> Values<DurableAtomic<AtomicU32>> {
        self.words(self.parts.segments)
    }

    /// A frame of zeros for the trunk with this number: its home if that is free. Errors: no
    /// memory.
    pub(crate) fn take_trunk(&self, number: usize) -> io::Result<TrunkFrame> {
        let frame = lock(&self.unused).take(number).ok_or(io::ErrorKind::OutOfMemory)?;
        let populated = self.memory.populate(self.trunk_at(frame), self.parts.trunks.unit);
        if populated.is_err() {
            lock(&self.unused).give(frame);
        }
        populated.map(|()| frame)
    }

    /// Gives a frame's memory back. The caller promises that no thread uses it.
    pub(crate) fn give_trunk(&self, frame: TrunkFrame) {
        crash_points::store();
        // SAFETY: the caller's promise.
        let released = unsafe { self.memory.release(self.trunk_at(frame), self.parts.trunks.unit) };
        // After an error the frame may not be zeros, so it is not used again.
        if released.is_ok() {
            lock(&self.unused).give(frame);
        }
    }

    fn trunk_at(&self, frame: TrunkFrame) -> usize {
        self.parts.trunks.at(frame.0 as usize)
    }

    /// The memory of a frame.
    pub(crate) fn trunk(&self, frame: TrunkFrame) -> NonNull<u8> {
        // SAFETY: the mapping contains all parts, so the address is inside it, and not null.
        unsafe { NonNull::new_unchecked(self.memory.as_ptr().add(self.trunk_at(frame))) }
    }

    /// Prefetches the bytes at an offset from the first frame.
    pub(crate) fn prefetch(&self, offset: usize) {
        let offset = self.parts.trunks.start + offset;
        processor::prefetch(self.memory.as_ptr().wrapping_add(offset));
    }

    /// The frame that begins at an address.
    pub(crate) fn frame_at(&self, trunk: NonNull<u8>) -> TrunkFrame {
        let DurableArray { start, unit, .. } = self.parts.trunks;
        let offset = trunk.addr().get() - self.memory.as_ptr().addr() - start;
        TrunkFrame((offset / unit) as u32)
    }

    /// The frames in use by the directory; all others become free.
    pub(crate) fn adopt_trunks(self: &Arc<Self>) -> io::Result<Vec<(usize, TrunkFrame)>> {
        let mut used = Vec::new();
        let mut is_used = vec![false; self.parts.trunks.count];
        for (number, word) in self.directory().iter().enumerate() {
            let Some(frame) = word.load(Relaxed).checked_sub(1) else { continue };
            let slot = is_used.get_mut(frame as usize).filter(|is_used| !**is_used);
            *slot.ok_or_else(|| io::Error::other("two trunks of the index are one"))? = true;
            lock(&self.unused).0.set(frame as usize, false);
            self.memory.populate(self.trunk_at(TrunkFrame(frame)), self.parts.trunks.unit)?;
            used.push((number, TrunkFrame(frame)));
        }
        let end = is_used.iter().rposition(|is_used| *is_used).map_or(0, |last| last + 1);
        for (number, _) in (0..).zip(&is_used[..end]).filter(|(_, is_used)| !**is_used) {
            lock(&self.unused).0.set(number as usize, false);
            self.give_trunk(TrunkFrame(number));
        }
        let behind = self.parts.trunks.start + end * self.parts.trunks.unit;
        crash_points::store();
        // SAFETY: no trunk is in this part.
        unsafe { self.memory.release(behind, self.parts.sections.start - behind) }?;
        Ok(used)
    }

    /// The address of a section's memory.
    pub(crate) fn section(&self, number: usize) -> NonNull<u8> {
        // SAFETY: the mapping contains all parts, so the address is inside it, and not null.
        unsafe { NonNull::new_unchecked(self.memory.as_ptr().add(self.parts.sections.at(number))) }
    }

    /// Makes a section's memory. Errors: no memory.
    pub(crate) fn populate_section(&self, number: usize) -> io::Result<NonNull<u8>> {
        self.memory.populate(self.parts.sections.at(number), self.parts.sections.unit)?;
        Ok(self.section(number))
    }

    /// Gives a section's memory back. The caller promises that the section has no object.
    pub(crate) fn release_section(&self, number: usize) {
        let at = self.parts.sections.at(number);
        crash_points::store();
        // SAFETY: the caller's promise. After an error the memory stays, and the next use of the
        // section reuses it.
        let _ = unsafe { self.memory.release(at, self.parts.sections.unit) };
    }

    /// Chunks of descriptors that are made.
    pub(crate) fn descriptor_chunks(&self) -> usize {
        self.header().descriptor_chunks.load(Acquire) as usize
    }

    /// Notes that the next chunk is made.
    pub(crate) fn note_descriptors(&self, chunks: usize) {
        self.header().descriptor_chunks.store(chunks as u64, Release);
    }

    /// A chunk of descriptors. Errors: no memory.
    pub(crate) fn descriptors<T: Lasting>(self: &Arc<Self>, chunk: usize) -> io::Result<Values<T>> {
        self.populated(self.parts.descriptors, chunk)
    }

    /// A table of tags. Errors: no memory.
    pub(crate) fn tags(
        self: &Arc<Self>,
        number: usize,
    ) -> io::Result<Values<DurableAtomic<AtomicU64>>> {
        self.populated(self.parts.tags, number)
    }

    /// Makes the memory of this item of a part, and returns it as values. Errors: no memory.
    fn populated<T: Lasting>(
        self: &Arc<Self>,
        part: DurableArray,
        number: usize,
    ) -> io::Result<Values<T>> {
        self.memory.populate(part.at(number), part.unit)?;
        Ok(self.values(part.at(number), part.unit / size_of::<T>()))
    }

    /// Gives the memory of consecutive tables back. No segment of their clusters is broken up.
    pub(crate) fn release_tags(&self, numbers: Range<usize>) {
        crash_points::store();
        let DurableArray { start, unit, .. } = self.parts.tags;
        // SAFETY: the caller's promise. After an error the memory stays.
        let _ = unsafe { self.memory.release(start + numbers.start * unit, numbers.len() * unit) };
    }

    /// Keeps a dictionary. Errors: no memory.
    pub(crate) fn keep_dictionary(self: &Arc<Self>, at: usize, content: &[u8]) -> io::Result<()> {
        let values: Values<DurableAtomic<AtomicU8>> =
            self.populated(self.parts.dictionaries, at)?;
        values.iter().zip(content).for_each(|(to, byte)| to.store(*byte, Relaxed));
        self.header().dictionary_bytes[at].store(content.len() as u32, Release);
        Ok(())
    }

    /// All kept dictionaries.
    pub(crate) fn dictionaries(self: &Arc<Self>) -> io::Result<Vec<Vec<u8>>> {
        let lengths = self.header().dictionary_bytes.iter().map(|bytes| bytes.load(Acquire));
        let mut dictionaries = Vec::new();
        for (at, bytes) in lengths.take_while(|bytes| *bytes > 0).enumerate() {
            let values: Values<DurableAtomic<AtomicU8>> =
                self.populated(self.parts.dictionaries, at)?;
            let bytes = values.iter().take(bytes as usize);
            dictionaries.push(bytes.map(|byte| byte.load(Relaxed)).collect());
        }
        Ok(dictionaries)
    }

    /// The generation of the newest sealed write.
    pub(crate) fn generation(&self) -> &DurableAtomic<AtomicU64> {
        &self.header().generation
    }

    /// The key that the backing is sealed with.
    pub(crate) fn key(&self) -> [u8; KEY_BYTES] {
        self.header().key.each_ref().map(|byte| byte.load(Relaxed))
    }

    /// Keeps the key that the backing is sealed with.
    pub(crate) fn keep_key(&self, key: &[u8; KEY_BYTES]) {
        self.header().key.iter().zip(key).for_each(|(to, byte)| to.store(*byte, Relaxed));
    }

    /// Keeps an attribute's value. One that is too long is not kept.
    pub(crate) fn keep_value(&self, name: &str, value: &str) {
        let is_its = |place: &usize| self.value_at(*place).is_some_and(|(kept, _)| kept == name);
        let is_free = |place: &usize| self.value_at(*place).is_none();
        let place = (0..VALUES_MAX).find(is_its).or_else(|| (0..VALUES_MAX).find(is_free));
        let Some(place) = place else { return };
        let [length, bytes @ ..] = &self.header().values[place];
        // A kill at this point leaves the attribute with its first value.
        length.store(0, Release);
        let value = format!("{name} {value}");
        if value.len() <= VALUE_BYTES {
            bytes.iter().zip(value.bytes()).for_each(|(to, byte)| to.store(byte, Relaxed));
            length.store(value.len() as u8, Release);
        }
    }

    /// The value that was kept of an attribute.
    pub(crate) fn value(&self, name: &str) -> Option<String> {
        let values = (0..VALUES_MAX).filter_map(|place| self.value_at(place));
        values.into_iter().find(|(kept, _)| kept == name).map(|(_, value)| value)
    }

    fn value_at(&self, place: usize) -> Option<(String, String)> {
        let [length, bytes @ ..] = self.header().values.get(place)?;
        let length = usize::from(length.load(Acquire)).min(VALUE_BYTES);
        let bytes = bytes[..length].iter().map(|byte| byte.load(Relaxed)).collect();
        let text = String::from_utf8(bytes).ok()?;
        text.split_once(' ').map(|(name, value)| (name.to_owned(), value.to_owned()))
    }

    /// The change that was begun last.
    pub(crate) fn intent(&self) -> &Intent {
        &self.header().intent
    }
}

impl Intent {
    /// Notes that an entry with these words is about to get another second word, and then another
    /// first word. The caller holds the writer's lock, so there is one such change at a time.
    pub(crate) fn begin(&self, key: u32, word: u64, aux: u64, new_aux: u64) {
        self.entry.store(0, Release);
        self.word.store(word, Release);
        self.aux.store(aux, Release);
        self.new_aux.store(new_aux, Release);
        self.entry.store(u64::from(key) + 1, Release);
    }

    /// The second word that an entry must have, if a killed process had changed only that word.
    pub(crate) fn undone(&self, key: u32, word: u64, aux: u64) -> Option<u64> {
        let is_it = self.entry.load(Acquire) == u64::from(key) + 1
            && self.word.load(Acquire) == word
            && self.new_aux.load(Acquire) == aux;
        is_it.then(|| self.aux.load(Acquire))
    }
}

//! Decides when a dictionary is trained, on which pages, and if it is used.
//!
//! ```text
//! maintain → what did trials show? → use it, or only try it
//!          → time for another? → copies of pages stored last → train → all CPUs use it
//! ```
//! A store compresses every 32nd page with and without the dictionary, adds up both sizes, and
//! notes the page's key. The maintaining thread trains a dictionary on noted pages that are still
//! in the pool. If the thread has no memory for this, the cache works without a dictionary.

use super::Cache;
use crate::compress::{Codec, Dictionaries, Encoder, Prepared, SAMPLES, Trial, WithDictionary};
use crate::counters::Counter::*;
use crate::durable::{DICTIONARIES_MAX, Durable};
use crate::ids::SwapEntry;
use crate::index::State;
use crate::object::Object;
use crate::page::Page;
use crate::scratch::Scratch;
use crate::sync::{Mutex, lock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

/// Pages that must be stored before the first dictionary, and be in the pool: 16 MiB. The gain on
/// these pages, some 80 bytes each, is twice the memory of a dictionary.
const FIRST_PAGES: u64 = 4096;

/// The wait for the next training, in multiples of the pages stored before: a program changes most
/// at its start.
const WAIT_FACTOR: u64 = 3;

/// The divisor of that wait if the dictionary has fallen behind. Even so, the 64 dictionaries that
/// a cache may have last for some 40 TiB.
const BEHIND_DIVISOR: u64 = 4;

/// Bytes of trials, without the dictionary, between two decisions: some 100 pages, so that chance
/// moves the gain by one or two in a hundred.
const WINDOW_BYTES: u64 = 64 << 10;

/// Thousandths that a dictionary must gain to be used.
const WORTH_IT: u64 = 30;

/// Larger objects teach nothing, and neither do numbers.
const SAMPLE_BYTES_MAX: u16 = 2048;

/// The number of noted pages, some of which will be gone.
const NOTED: usize = 2 * SAMPLES;

/// The state of training.
pub(crate) struct Training {
    dictionaries: Arc<Dictionaries>,
    trainer: Mutex<Trainer>,
    /// Pages for training.
    recent: Recent,
    /// Bytes of the newest encoder.
    encoder_bytes: AtomicUsize,
}

impl Training {
    /// Without dictionaries, or with those that a process has left. Errors: no memory.
    pub(crate) fn new(durable: Option<&Arc<Durable>>) -> io::Result<Self> {
        Ok(Self {
            dictionaries: Arc::new(Dictionaries::kept_in(durable)?),
            trainer: Mutex::new(Trainer::new()),
            recent: Recent::new(),
            encoder_bytes: AtomicUsize::new(0),
        })
    }

    /// The dictionaries that objects may need.
    pub(crate) fn dictionaries(&self) -> &Arc<Dictionaries> {
        &self.dictionaries
    }
}

/// The state of decisions about dictionaries.
struct Trainer {
    /// Pages stored until the last training, even if that failed.
    trained_at: u64,
    /// The newest dictionary, for the level in use; `None` if the compressor uses none.
    encoder: Option<Arc<Encoder>>,
    /// Bytes of trials until the last decision, with the dictionary and without.
    judged: [u64; 2],
    /// The best gain of the newest dictionary, in thousandths.
    best_gain: u64,
    /// Pages stored until the dictionary was first seen to have fallen behind.
    behind_since: Option<u64>,
}

/// Pages of recent trials: the next pages are probably like these.
struct Recent {
    keys: [AtomicU32; NOTED],
    noted: AtomicUsize,
}

impl Recent {
    fn new() -> Self {
        Self { keys: [const { AtomicU32::new(u32::MAX) }; NOTED], noted: AtomicUsize::new(0) }
    }

    fn note(&self, key: SwapEntry) {
        let at = self.noted.fetch_add(1, Relaxed) % NOTED;
        self.keys[at].store(key.0, Relaxed);
    }

    /// The newest keys first. Until [`NOTED`] pages were noted, the other keys name no page.
    fn newest(&self) -> impl Iterator<Item = SwapEntry> {
        let next = self.noted.load(Relaxed);
        let key = move |back| self.keys[next.wrapping_sub(back) % NOTED].load(Relaxed);
        (1..=NOTED).map(key).map(SwapEntry)
    }
}

impl Trainer {
    fn new() -> Self {
        Self { trained_at: 0, encoder: None, judged: [0; 2], best_gain: 0, behind_since: None }
    }

    /// True if it is time to train, after `stored` pages. When the pages have changed, training
    /// waits until the noted pages are of the new kind.
    fn is_due(&self, stored: u64) -> bool {
        let (wait, since) = match self.behind_since {
            None => (self.trained_at * WAIT_FACTOR, 0),
            Some(since) => (self.trained_at / BEHIND_DIVISOR, since),
        };
        let next = (self.trained_at + wait.max(FIRST_PAGES)).max(since + FIRST_PAGES);
        stored >= next
    }

    /// Adds the bytes of trials, after `stored` pages, and decides when there were enough.
    fn judge(&mut self, trials: [u64; 2], stored: u64) {
        let [with, without] = [0, 1].map(|i| trials[i].saturating_sub(self.judged[i]));
        let Some(encoder) = self.encoder.as_ref().filter(|_| without >= WINDOW_BYTES) else {
            return;
        };
        let gain = without.saturating_sub(with) * 1000 / without;
        encoder.set_worth_it(gain >= WORTH_IT);
        self.judged = trials;
        self.best_gain = self.best_gain.max(gain);
        let is_behind = gain < (self.best_gain / 2).max(WORTH_IT);
        self.behind_since = is_behind.then(|| self.behind_since.unwrap_or(stored));
    }
}

impl Cache {
    /// Judges the dictionary, and trains another when it is time. Called by the maintaining thread.
    pub(crate) fn tend_dictionary(&self) {
        let mut trainer = lock(&self.training.trainer);
        if !self.wants_dictionary() {
            return;
        }
        let stored = self.counters.get(Stores);
        trainer.judge(self.trials(), stored);
        let is_due =
            trainer.is_due(stored) && self.training.dictionaries.count() < DICTIONARIES_MAX;
        if is_due && self.pool_pages() >= FIRST_PAGES {
            trainer.trained_at = stored;
            self.train_on_recent(&mut trainer);
        }
    }

    /// Trains a dictionary on the pages stored last, however few; true if one was made.
    #[cfg(feature = "testing")]
    pub fn train(&self) -> bool {
        self.train_on_recent(&mut lock(&self.training.trainer))
    }

    fn train_on_recent(&self, trainer: &mut Trainer) -> bool {
        let is_trained =
            self.samples().is_some_and(|samples| self.training.dictionaries.train(&samples));
        if is_trained {
            let trained_at = trainer.trained_at;
            *trainer = Trainer { trained_at, judged: self.trials(), ..Trainer::new() };
            self.equip(trainer);
        }
        is_trained
    }

    /// Makes all CPUs use the compressor and the dictionary of the attributes.
    pub(crate) fn equip_all(&self) {
        let mut trainer = lock(&self.training.trainer);
        let algorithm = self.attributes.algorithm();
        let prepared = || Some(Prepared::new(algorithm));
        self.scratch.provide(|scratch| !scratch.uses(algorithm), prepared, Scratch::exchange);
        self.equip(&mut trainer);
    }

    /// Makes all CPUs use the newest dictionary, if attributes allow it, for the level in use.
    fn equip(&self, trainer: &mut Trainer) {
        let level = self.attributes.algorithm().level;
        let kept = trainer.encoder.take().filter(|encoder| encoder.level() == level);
        if self.wants_dictionary() {
            trainer.encoder = kept.or_else(|| self.training.dictionaries.encoder(level));
        }
        let bytes = trainer.encoder.as_ref().map_or(0, |encoder| encoder.bytes());
        self.training.encoder_bytes.store(bytes, Relaxed);
        let encoder = trainer.encoder.as_ref();
        let with = || Some(encoder.cloned().and_then(WithDictionary::new));
        let lacks = |scratch: &Scratch| !scratch.uses_dictionary(encoder);
        self.scratch.provide(lacks, with, Scratch::exchange_dictionary);
    }

    fn wants_dictionary(&self) -> bool {
        self.attributes.dictionary_enabled() && self.attributes.algorithm().codec == Codec::Zstd
    }

    fn trials(&self) -> [u64; 2] {
        [DictionaryBytes, DictionaryPlainBytes].map(|counter| self.counters.get(counter))
    }

    /// Copies of recently stored pages that are in the pool; `None` without memory for them.
    fn samples(&self) -> Option<Vec<Page>> {
        let mut samples = Vec::new();
        samples.try_reserve_exact(SAMPLES).ok()?;
        samples
            .extend(self.training.recent.newest().filter_map(|key| self.sample(key)).take(SAMPLES));
        Some(samples)
    }

    /// A copy of a page that may teach something.
    fn sample(&self, key: SwapEntry) -> Option<Page> {
        let view = self.index.view();
        let locked = view.lock(key)?;
        let State::Pooled(Object { handle, form }) = locked.state() else { return None };
        let is_page = form.codec != Codec::Piece && !form.codec.is_for_numbers();
        if !is_page || form.bytes > SAMPLE_BYTES_MAX {
            return None;
        }
        let mut scratch = self.scratch.lock_here();
        let bytes = usize::from(form.bytes);
        self.pool.read(handle, &mut scratch.object[..bytes]);
        scratch.decompress_here(form.codec, bytes).ok().map(|()| scratch.page)
    }

    /// Notes the result of a trial on a page, and the page for training.
    pub(crate) fn note_trial(&self, key: SwapEntry, trial: Trial) {
        self.counters.add(DictionaryBytes, trial.with as i64);
        self.counters.add(DictionaryPlainBytes, trial.without as i64);
        self.training.recent.note(key);
    }

    /// Bytes of all dictionaries, and of the encoder.
    pub(crate) fn dictionary_bytes(&self) -> usize {
        self.training.dictionaries.bytes() + self.training.encoder_bytes.load(Relaxed)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::testing::{Content, page_of};

    #[test]
    fn waits_grow_with_the_stored_pages_and_are_shorter_when_the_dictionary_is_behind() {
        let mut trainer = Trainer::new();
        assert!(!trainer.is_due(4095) && trainer.is_due(4096));
        trainer.trained_at = 4096;
        assert!(!trainer.is_due(4 * 4096 - 1) && trainer.is_due(4 * 4096));
        trainer.behind_since = Some(4096);
        assert!(!trainer.is_due(2 * 4096 - 1) && trainer.is_due(2 * 4096));
        trainer.behind_since = Some(5000);
        assert!(!trainer.is_due(5000 + 4095) && trainer.is_due(5000 + 4096));
        trainer.trained_at = 1 << 30;
        assert!(!trainer.is_due((5 << 28) - 1) && trainer.is_due(5 << 28));
    }

    #[test]
    fn a_dictionary_that_gains_half_as_much_as_before_is_behind_and_below_3_percent_unused() {
        let pages: Vec<Page> =
            (0..SAMPLES as u64).map(|seed| page_of(Content::Pointers, seed)).collect();
        let dictionaries = Dictionaries::default();
        assert!(dictionaries.train(&pages));
        let mut trainer = Trainer { encoder: dictionaries.encoder(1), ..Trainer::new() };
        let (mut with, mut without, mut stored) = (0, 0, 0);
        let mut judge = |thousandths: u64, bytes: u64| {
            without += bytes;
            with += bytes * thousandths / 1000;
            stored += 1;
            trainer.judge([with, without], stored);
            (trainer.encoder.as_ref().unwrap().is_worth_it(), trainer.behind_since)
        };
        assert_eq!(judge(1000, WINDOW_BYTES - 1), (true, None), "too few to tell");
        assert_eq!(judge(0, 10_000), (true, None), "with those before");
        assert_eq!(judge(880, WINDOW_BYTES), (true, None));
        assert_eq!(judge(950, WINDOW_BYTES), (true, Some(4)));
        assert_eq!(judge(980, WINDOW_BYTES), (false, Some(4)));
        assert_eq!(judge(1100, WINDOW_BYTES), (false, Some(4)));
        assert_eq!(judge(890, WINDOW_BYTES), (true, None));
    }

    #[test]
    fn a_dictionary_that_never_gained_enough_is_behind_too() {
        let pages: Vec<Page> =
            (0..SAMPLES as u64).map(|seed| page_of(Content::Pointers, seed)).collect();
        let dictionaries = Dictionaries::default();
        assert!(dictionaries.train(&pages));
        let mut trainer = Trainer { encoder: dictionaries.encoder(1), ..Trainer::new() };
        trainer.judge([WINDOW_BYTES * 98 / 100, WINDOW_BYTES], 5000);
        assert_eq!(trainer.behind_since, Some(5000));
        trainer.judge([WINDOW_BYTES * 193 / 100, WINDOW_BYTES * 2], 6000);
        assert_eq!(trainer.behind_since, None, "it gains 5 in 100 of late");
    }

    #[test]
    fn the_newest_pages_are_noted() {
        let recent = Recent::new();
        recent.note(SwapEntry(5));
        assert_eq!(recent.newest().next(), Some(SwapEntry(5)));
        (0..1000).for_each(|key| recent.note(SwapEntry(key)));
        let newest = (0..1000).rev().take(NOTED).map(SwapEntry);
        assert!(recent.newest().eq(newest));
    }
}

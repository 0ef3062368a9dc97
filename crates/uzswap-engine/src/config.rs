//! Settings: those fixed when the cache is made, and the attributes that change while it runs.
//!
//! Only the table below has an attribute's name, meaning and range. The control files, `uzswap
//! status`, the command line and docs/attributes.md are made from it.

use crate::backing::BYTES_MAX;
use crate::backing::SEGMENT_BYTES;
use crate::compress::{Algorithm, Codec};
use crate::error::{AttributeError, SetupError};
use crate::page::PAGE_BYTES;
use crate::share::Shares;
use crate::sync::{Mutex, lock};
use crate::unit::Units;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The parameters of a cache.
#[derive(Debug, Clone)]
pub struct Config {
    /// Pages of address space over all areas; 16 bytes of memory for each page in use.
    pub pages_max: u32,
    /// Memory of the machine in bytes, for `max_pool_percent`.
    pub ram_bytes: u64,
    /// The maximum memory that the machine may get ([`crate::Cache::follow_memory`]). Each 2 MiB of
    /// it take some 100 bytes.
    pub ram_bytes_max: u64,
    /// First value of `max_pool_bytes`.
    pub pool_bytes_max: u64,
    /// First value of `compressor`.
    pub algorithm: Algorithm,
    /// True if writes to the backing are encrypted and authenticated. This should be true, unless a
    /// layer below the backing encrypts.
    pub seals_backing: bool,
}

impl Config {
    /// Keys of pages, and of records about them.
    pub(crate) fn keys(&self) -> Result<u32, SetupError> {
        let more = Shares::keys_for(self.pages_max) + Units::keys_for(self.pages_max);
        let keys = self.pages_max.saturating_add(more);
        if self.pages_max == 0 || keys == u32::MAX {
            let must = "from 1 page to 11 TiB";
            let value = u64::from(self.pages_max) * PAGE_BYTES as u64;
            return Err(SetupError::Size { what: "the address space", value, must });
        }
        Ok(keys)
    }

    /// The number of CPUs with their own codec contexts, or their own buffer for a segment. Either
    /// takes some 256 KiB, and all together a 16th of the pool. Further CPUs share these.
    pub(crate) fn cpus_apart(&self) -> usize {
        (self.pool_bytes_max / (16 * SEGMENT_BYTES as u64)).clamp(1, u64::from(u32::MAX)) as usize
    }

    /// The largest size that the pool may ever have, in bytes.
    pub(crate) fn pool_bytes_ever(&self) -> usize {
        self.ram_bytes.max(self.ram_bytes_max).max(self.pool_bytes_max) as usize
    }
}

pub(crate) fn check_backing(bytes: u64) -> Result<(), SetupError> {
    const BYTES_MIN: u64 = 8 * SEGMENT_BYTES as u64;
    let must = match bytes {
        0 | BYTES_MIN..=BYTES_MAX => return Ok(()),
        ..BYTES_MIN => "at least 2 MiB",
        _ => "at most 16 TiB: give a size",
    };
    Err(SetupError::Size { what: "the backing", value: bytes, must })
}

/// The attributes' values.
pub(crate) struct Attributes {
    enabled: AtomicBool,
    algorithm: Mutex<Algorithm>,
    max_pool_percent: AtomicU32,
    max_pool_bytes: AtomicU64,
    accept_threshold_percent: AtomicU32,
    max_compression_ratio: AtomicU32,
    shrinker_enabled: AtomicBool,
    same_pages_enabled: AtomicBool,
    dictionary_enabled: AtomicBool,
    recompress_idle_seconds: AtomicU32,
    /// Memory of the machine, which may change.
    ram_bytes: AtomicU64,
}

impl Attributes {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            enabled: AtomicBool::new(true),
            algorithm: Mutex::new(config.algorithm),
            max_pool_percent: AtomicU32::new(100),
            max_pool_bytes: AtomicU64::new(config.pool_bytes_max),
            accept_threshold_percent: AtomicU32::new(90),
            max_compression_ratio: AtomicU32::new(100),
            shrinker_enabled: AtomicBool::new(true),
            same_pages_enabled: AtomicBool::new(true),
            dictionary_enabled: AtomicBool::new(true),
            recompress_idle_seconds: AtomicU32::new(30),
            ram_bytes: AtomicU64::new(config.ram_bytes),
        }
    }

    pub(crate) fn enabled(&self) -> bool {
        self.enabled.load(Relaxed)
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        *lock(&self.algorithm)
    }

    pub(crate) fn same_pages_enabled(&self) -> bool {
        self.same_pages_enabled.load(Relaxed)
    }

    pub(crate) fn dictionary_enabled(&self) -> bool {
        self.dictionary_enabled.load(Relaxed)
    }

    /// The time in the pool after which a page is recompressed; `None` if it never is.
    pub(crate) fn recompress_idle(&self) -> Option<Duration> {
        let seconds = self.recompress_idle_seconds.load(Relaxed);
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    pub(crate) fn shrinker_enabled(&self) -> bool {
        self.shrinker_enabled.load(Relaxed)
    }

    pub(crate) fn max_compression_ratio(&self) -> u32 {
        self.max_compression_ratio.load(Relaxed)
    }

    /// Sets the memory of the machine; true if it changed.
    pub(crate) fn set_ram_bytes(&self, bytes: u64) -> bool {
        self.ram_bytes.swap(bytes, Relaxed) != bytes
    }

    /// The limit of the pool, bytes: the lower of the two that can be set.
    pub(crate) fn pool_bytes_max(&self) -> u64 {
        let percent = u64::from(self.max_pool_percent.load(Relaxed));
        self.max_pool_bytes.load(Relaxed).min(self.ram_bytes.load(Relaxed) / 100 * percent)
    }

    /// The size to which writeback brings the pool, bytes.
    pub(crate) fn pool_bytes_accept(&self) -> u64 {
        let percent = u64::from(self.accept_threshold_percent.load(Relaxed));
        self.pool_bytes_max() / 100 * percent
    }
}

/// One attribute.
pub struct Attribute {
    /// Its name, and that of its control file.
    pub name: &'static str,
    /// Its effect.
    pub doc: &'static str,
    /// The accepted values.
    pub accepts: &'static str,
    pub(crate) get: fn(&Attributes) -> String,
    pub(crate) set: fn(&Attributes, &str) -> bool,
}

impl Attribute {
    /// Checks a value without setting it; the error names the accepted ones.
    pub fn check(&self, value: &str) -> Result<(), AttributeError> {
        let tried = Config {
            pages_max: 0,
            ram_bytes: 0,
            ram_bytes_max: 0,
            pool_bytes_max: 0,
            algorithm: Algorithm { codec: Codec::Raw, level: 0 },
            seals_backing: true,
        };
        self.change(&Attributes::new(&tried), value)
    }

    /// Sets a value; after an error the old one stays.
    pub(crate) fn change(
        &self,
        attributes: &Attributes,
        value: &str,
    ) -> Result<(), AttributeError> {
        if self.name == "compressor" {
            value.parse::<Algorithm>()?; // For its own message.
        }
        match (self.set)(attributes, value) {
            true => Ok(()),
            false => Err(AttributeError::Value {
                name: self.name,
                value: value.into(),
                must: self.accepts,
            }),
        }
    }
}

const PERCENT: &str = "a whole number from 1 to 100";
const SWITCH: &str = "Y or N (1 or 0)";

/// All attributes.
pub const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "enabled",
        doc: "Y: pages are stored. N: stored pages stay readable, and new pages go to the backing \
              uncompressed or, without one, are refused.",
        accepts: SWITCH,
        get: |a| switch(a.enabled()),
        set: |a, text| set_switch(&a.enabled, text),
    },
    Attribute {
        name: "compressor",
        doc: "The compressor of new pages; stored pages stay as they are.",
        accepts: "a compressor: lz4, zstd, lzo, deflate, wkdm or raw, some with a level, as in zstd:3",
        get: |a| a.algorithm().to_string(),
        set: |a, text| text.parse().map(|to| *lock(&a.algorithm) = to).is_ok(),
    },
    Attribute {
        name: "max_pool_percent",
        doc: "Limit of the pool, in percent of the machine's present memory, or of the limit of the \
              daemon's control group where that is lower.",
        accepts: PERCENT,
        get: |a| a.max_pool_percent.load(Relaxed).to_string(),
        set: |a, text| set_number(&a.max_pool_percent, text, 1, 100),
    },
    Attribute {
        name: "max_pool_bytes",
        doc: "Limit of the pool in bytes; the lower of the two limits holds.",
        accepts: "a number of bytes, at least 1048576",
        get: |a| a.max_pool_bytes.load(Relaxed).to_string(),
        set: |a, text| match text.parse() {
            Ok(bytes) if bytes >= 1 << 20 => {
                a.max_pool_bytes.store(bytes, Relaxed);
                true
            }
            _ => false,
        },
    },
    Attribute {
        name: "accept_threshold_percent",
        doc: "Writeback starts when the pool is above this share of its limit, in percent, and \
              brings it back there. A pool that hit its limit takes no page until then.",
        accepts: PERCENT,
        get: |a| a.accept_threshold_percent.load(Relaxed).to_string(),
        set: |a, text| set_number(&a.accept_threshold_percent, text, 1, 100),
    },
    Attribute {
        name: "max_compression_ratio",
        doc: "A page that does not compress to this share of its size, in percent, is rejected. At \
              100, incompressible pages are kept as they are.",
        accepts: PERCENT,
        get: |a| a.max_compression_ratio.load(Relaxed).to_string(),
        set: |a, text| set_number(&a.max_compression_ratio, text, 1, 100),
    },
    Attribute {
        name: "shrinker_enabled",
        doc: "Y: the pool is also written back when the machine runs short of memory.",
        accepts: SWITCH,
        get: |a| switch(a.shrinker_enabled()),
        set: |a, text| set_switch(&a.shrinker_enabled, text),
    },
    Attribute {
        name: "same_pages_enabled",
        doc: "Y: identical pages are kept once. Off at first under serve, which holds the pages of \
              all users: by figures or by time a user could find out that another one has the same \
              page.",
        accepts: SWITCH,
        get: |a| switch(a.same_pages_enabled()),
        set: |a, text| set_switch(&a.same_pages_enabled, text),
    },
    Attribute {
        name: "dictionary_enabled",
        doc: "Y: zstd compresses new pages with a dictionary. It is trained once 16 MiB of pages are \
              stored, and again as they change; stored pages stay as they are.",
        accepts: SWITCH,
        get: |a| switch(a.dictionary_enabled()),
        set: |a, text| set_switch(&a.dictionary_enabled, text),
    },
    Attribute {
        name: "recompress_idle_seconds",
        doc: "Pages that have been in the pool for so long, unused, are compressed again while the \
              machine is idle. Sixteen pages become one object, of some 0.7 times the size that \
              zstd makes of them one by one. Loading one of them takes some 15 us more. 0: never.",
        accepts: "a number of seconds, from 0 to 86400",
        get: |a| a.recompress_idle_seconds.load(Relaxed).to_string(),
        set: |a, text| set_number(&a.recompress_idle_seconds, text, 0, 86400),
    },
];

fn switch(on: bool) -> String {
    if on { "Y" } else { "N" }.into()
}

fn set_switch(value: &AtomicBool, text: &str) -> bool {
    let to = match text {
        "Y" | "y" | "1" => true,
        "N" | "n" | "0" => false,
        _ => return false,
    };
    value.store(to, Relaxed);
    true
}

fn set_number(value: &AtomicU32, text: &str, low: u32, high: u32) -> bool {
    match text.parse() {
        Ok(number) if (low..=high).contains(&number) => {
            value.store(number, Relaxed);
            true
        }
        _ => false,
    }
}

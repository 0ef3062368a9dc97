//! Makes the daemon's options from arguments: fills in defaults, and checks everything.

use crate::cli::{CacheArguments, Transport};
use crate::device::requirements;
use crate::error::Failure;
use crate::size;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use uzswap_block::{BackingSpec, ServerConfig, TransportKind};
use uzswap_engine::PAGE_BYTES;
use uzswap_remote::Address;
use uzswap_sys::cpu::{self, MemoryInfo};

/// The compressor, unless another is requested.
const COMPRESSOR: &str = "zstd";

/// The folder of an unnamed backing.
const BACKING_FOLDER: &str = "/var/tmp";

/// The least memory of a command, and of a pool.
const MEMORY_MIN: u64 = 4 << 20;
/// A pool that is a part of the command's memory takes at most this share of it.
const INCLUDED_POOL_DIVISOR: u64 = 2;
const POOL_MIN: u64 = 4 << 20;
const SIZE_MIN: u64 = 16 << 20;

/// The daemon's options, passed to it as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonOptions {
    /// The maximum number of pages of the device.
    pub pages: u32,
    /// The transport: `fuse` or `ublk`.
    pub transport: String,
    /// Bytes of the pool.
    pub pool: u64,
    /// The compressor, by name.
    pub compressor: String,
    pub backing: Backing,
    /// The address of the store beside the backing.
    #[serde(default)]
    pub store: Option<String>,
    /// True if the backing is not sealed.
    pub plain_backing: bool,
    /// True if identical pages are kept once from the start. The device does not know the owner of
    /// a page, so one user could find out that another has the same page.
    pub keeps_same_once: bool,
    /// Threads at start.
    pub threads: usize,
    /// Threads that begin and end with each CPU.
    pub threads_per_cpu: usize,
    /// True for plain memory instead of a cache.
    pub bare: bool,
}

/// [`BackingSpec`], for JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    None,
    /// A file or device.
    Path(PathBuf, Option<u64>),
    /// A file without a name in a folder.
    Unnamed(PathBuf, u64),
}

impl Backing {
    /// The backing's path, if it has a name.
    fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path, _) => Some(path),
            Self::None | Self::Unnamed(..) => None,
        }
    }

    /// The backing, as the front end takes it.
    pub fn spec(&self) -> BackingSpec {
        match self.clone() {
            Self::None => BackingSpec::None,
            Self::Path(path, bytes) => BackingSpec::Path { path, bytes },
            Self::Unnamed(folder, bytes) => BackingSpec::Unnamed { folder, bytes },
        }
    }
}

impl DaemonOptions {
    /// The options of the server, for the front end.
    pub fn server(&self) -> ServerConfig {
        ServerConfig {
            threads: self.threads,
            threads_per_cpu: self.threads_per_cpu,
            poll: ServerConfig::POLL,
            raise_priority: true,
        }
    }
}

/// Checks `--memory` against the machine.
pub fn check_memory(bytes: u64, machine: MemoryInfo) -> Result<(), Failure> {
    let asked = size::show(bytes);
    if bytes < MEMORY_MIN {
        let least = size::show(MEMORY_MIN);
        return Err(Failure::new(format!("--memory {asked} is too little; give at least {least}")));
    }
    if bytes > machine.total {
        let total = size::show(machine.total);
        return Err(Failure::new(format!(
            "--memory {asked} is more than this machine has ({total}); give less"
        )));
    }
    Ok(())
}

/// The maximum bytes of a pool that is a part of the command's memory.
pub fn included_pool(memory: u64) -> u64 {
    (memory / INCLUDED_POOL_DIVISOR).max(POOL_MIN)
}

/// Size of the device for a command with this limit. Address space costs nothing until it is used.
pub fn default_size(memory: u64, machine: MemoryInfo) -> u64 {
    machine.total.max(memory.saturating_mul(16))
}

/// Fills in the defaults and checks the rest. `memory` is the command's limit, 0 for none; `bytes`
/// is the size of the device.
pub fn daemon_options(
    arguments: &CacheArguments,
    memory: u64,
    bytes: u64,
    machine: MemoryInfo,
) -> Result<DaemonOptions, Failure> {
    let pages = bytes / PAGE_BYTES as u64;
    // Shared pages need keys too: see the engine's `Config::pages_max`.
    let most = u64::from(u32::MAX / 10 * 8);
    if bytes < SIZE_MIN || pages > most {
        return Err(Failure::new(format!(
            "--size {} is out of range; give between {} and {}",
            size::show(bytes),
            size::show(SIZE_MIN),
            size::show(most * PAGE_BYTES as u64)
        )));
    }
    let free = machine.available.saturating_sub(memory);
    let pool = arguments.pool.unwrap_or((free / 2).max(POOL_MIN));
    if pool < POOL_MIN || pool > machine.total {
        return Err(Failure::new(format!(
            "--pool {} is out of range; give between {} and {} (all of this machine's memory)",
            size::show(pool),
            size::show(POOL_MIN),
            size::show(machine.total)
        )));
    }
    let server = ServerConfig::for_cpus(cpu::allowed());
    Ok(DaemonOptions {
        pages: pages as u32,
        transport: transport(arguments.transport)?.to_string(),
        pool,
        compressor: arguments.compressor.as_ref().map_or(COMPRESSOR.into(), ToString::to_string),
        backing: backing(places(&arguments.backing).0.as_deref(), bytes)?,
        store: store(arguments)?.map(|address| address.to_string()),
        plain_backing: arguments.plain_backing,
        keeps_same_once: true,
        threads: arguments.threads.map_or(server.threads, usize::from),
        threads_per_cpu: if arguments.threads.is_some() { 0 } else { server.threads_per_cpu },
        bare: arguments.bare,
    })
}

/// The requested transport, if this machine has it. `auto` takes FUSE, over which all tests have
/// run, or ublk if only ublk is available.
fn transport(asked: Transport) -> Result<TransportKind, Failure> {
    let has = |kind: TransportKind| kind.check().is_ok();
    let kind = match asked {
        Transport::Auto if !has(TransportKind::Fuse) && has(TransportKind::Ublk) => {
            TransportKind::Ublk
        }
        Transport::Auto | Transport::Fuse => TransportKind::Fuse,
        Transport::Ublk => TransportKind::Ublk,
    };
    let missing = |what| Failure::new(format!("transport {kind}: {what}; or use --transport auto"));
    requirements::transport(kind).map_err(missing)?;
    Ok(kind)
}

impl DaemonOptions {
    /// Names the options of `asked` that differ from these; `None` if none does.
    pub fn differences(&self, asked: &CacheArguments) -> Option<String> {
        let size = |bytes: u64| size::show(bytes);
        let pool = asked.pool.filter(|pool| *pool != self.pool);
        let pool = pool.map(|pool| format!("--pool {} (it is {})", size(pool), size(self.pool)));
        let compressor = asked.compressor.as_ref().map(ToString::to_string);
        let compressor = compressor.filter(|name| *name != self.compressor);
        let compressor =
            compressor.map(|name| format!("--compressor {name} (it is {})", self.compressor));
        let is_other = |name: &OsString| match (self.backing.path(), split_size(name)) {
            (Some(path), Ok((asked, _))) => path != asked,
            (path, _) => path.is_some() || *name != "none",
        };
        let (local, _) = places(&asked.backing);
        let backing = local.filter(is_other);
        let backing = backing.map(|name| format!("--backing {}", name.display()));
        let store = store(asked).ok().flatten().map(|address| address.to_string());
        let store = store.filter(|address| self.store.as_ref() != Some(address));
        let store = store.map(|address| format!("--backing {address}"));
        let seal = match (asked.plain_backing, self.plain_backing) {
            _ if self.backing == Backing::None && self.store.is_none() => None,
            (true, false) => Some("--plain-backing (it is sealed)".to_owned()),
            (false, true) => Some("a sealed backing (it is plain)".to_owned()),
            _ => None,
        };
        let transport = match asked.transport {
            Transport::Auto => None,
            other if other.to_string() == self.transport => None,
            other => Some(format!("--transport {other} (it is {})", self.transport)),
        };
        let all: Vec<_> =
            [pool, compressor, backing, store, seal, transport].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// The disk and the store that `--backing` names. The last value of each counts. One value may name
/// both, the disk first.
pub fn places(given: &[OsString]) -> (Option<OsString>, Option<String>) {
    let (mut local, mut store) = (None, None);
    for value in given {
        let text = value.to_string_lossy();
        match Address::split(&text) {
            // A path need not be valid UTF-8.
            (_, None) => local = Some(value.clone()),
            (path, address) => {
                local = path.map(OsString::from).or(local);
                store = address.map(str::to_owned);
            }
        }
    }
    (local, store)
}

/// The address of the store, with its options.
pub fn store(arguments: &CacheArguments) -> Result<Option<Address>, Failure> {
    let copies =
        arguments.remote_copies.map(|copies| ("--remote-copies", format!("copies={copies}")));
    let seconds = arguments.remote_timeout;
    let timeout = seconds.map(|seconds| ("--remote-timeout", format!("timeout={seconds}")));
    let password = arguments.remote_password_file.as_ref().map(|path| {
        // Absolute, since programs change their working directory.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        ("--remote-password-file", format!("password-file={}", path.display()))
    });
    let options: Vec<_> = [copies, timeout, password].into_iter().flatten().collect();
    let Some(mut address) = places(&arguments.backing).1 else {
        return match options.first() {
            None => Ok(None),
            Some((name, _)) => Err(Failure::new(format!(
                "{name} is for a store; name the store, as in --backing valkey://HOST:PORT/?max=8G"
            ))),
        };
    };
    for (_, option) in options {
        address.push(if address.contains('?') { '&' } else { '?' });
        address.push_str(&option);
    }
    Ok(Some(Address::parse(&address)?))
}

/// The backing that `--backing` names, or the default one for a device of `device` bytes.
pub fn backing(argument: Option<&OsStr>, device: u64) -> Result<Backing, Failure> {
    let Some(argument) = argument else {
        let bytes = default_backing_bytes(Path::new(BACKING_FOLDER), device);
        return Ok(match bytes {
            Some(bytes) => Backing::Unnamed(BACKING_FOLDER.into(), bytes),
            None => Backing::None,
        });
    };
    if argument == "none" {
        return Ok(Backing::None);
    }
    let (path, bytes) = split_size(argument)?;
    Ok(Backing::Path(path, bytes))
}

/// `PATH[:SIZE]`: the size follows the last colon, unless a file of the whole name exists.
fn split_size(argument: &OsStr) -> Result<(PathBuf, Option<u64>), Failure> {
    let bytes = argument.as_bytes();
    let colon = bytes.iter().rposition(|byte| *byte == b':');
    match colon {
        Some(at) if !Path::new(argument).exists() => {
            let path = OsString::from_vec(bytes[..at].to_vec());
            let text = String::from_utf8_lossy(&bytes[at + 1..]);
            let size = size::parse(&text).map_err(|error| {
                Failure::new(format!("backing {}: {error}", Path::new(argument).display()))
            })?;
            Ok((path.into(), Some(size)))
        }
        _ => Ok((argument.into(), None)),
    }
}

/// Half of the device's size, as for a ratio of two, but at most half of the disk's free space;
/// `None` if that is too little.
fn default_backing_bytes(folder: &Path, device: u64) -> Option<u64> {
    let free = uzswap_sys::process::free_disk_bytes(folder).ok()?;
    let bytes = (device / 2).min(free / 2) & !0xf_ffff;
    (bytes >= 64 << 20).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MemoryInfo = MemoryInfo { total: 8 << 30, available: 6 << 30 };

    fn arguments() -> CacheArguments {
        CacheArguments {
            pool: None,
            compressor: None,
            transport: Transport::Fuse,
            backing: vec!["none".into()],
            remote_copies: None,
            remote_timeout: None,
            remote_password_file: None,
            plain_backing: false,
            threads: None,
            metrics: None,
            bare: false,
        }
    }

    #[test]
    fn the_pool_is_half_of_the_free_memory_beyond_the_limit() {
        let options = daemon_options(&arguments(), 2 << 30, 16 << 30, MACHINE).unwrap();
        assert_eq!(options.pool, 2 << 30);
        assert_eq!(options.pages, 4 << 20);
    }

    #[test]
    fn sizes_out_of_range_are_refused_with_the_range() {
        let error = |arguments: &CacheArguments, bytes| {
            daemon_options(arguments, 0, bytes, MACHINE).unwrap_err().to_string()
        };
        assert!(error(&arguments(), 0).contains("16.0 MiB"));
        assert!(error(&arguments(), 1 << 50).contains("TiB"));
        let pool = CacheArguments { pool: Some(9 << 30), ..arguments() };
        assert!(error(&pool, 1 << 30).contains("all of this machine's memory"));
        assert!(check_memory(0, MACHINE).is_err());
        assert!(check_memory(9 << 30, MACHINE).unwrap_err().to_string().contains("8.00 GiB"));
        assert!(check_memory(1 << 30, MACHINE).is_ok());
    }

    #[test]
    fn a_disk_and_a_store_are_named_by_one_option_or_two_and_the_last_of_each_counts() {
        let named = |given: &[&str]| {
            let given: Vec<OsString> = given.iter().map(OsString::from).collect();
            let (local, store) = places(&given);
            (local.map(|local| local.into_string().unwrap()), store)
        };
        let both = (Some("/var/tmp/x y:4G".into()), Some("valkey://b/?max=1G".into()));
        assert_eq!(named(&["/var/tmp/x y:4G", "valkey://a", "valkey://b/?max=1G"]), both);
        assert_eq!(named(&["none", "/var/tmp/x y:4G valkey://b/?max=1G"]), both);
        assert_eq!(named(&["valkey://a"]), (None, Some("valkey://a".into())));
        assert_eq!(named(&[]), (None, None));
    }

    #[test]
    fn options_of_a_store_become_a_part_of_its_address() {
        let given = CacheArguments {
            backing: vec!["valkey://a".into()],
            remote_copies: Some(1),
            remote_timeout: Some(3),
            remote_password_file: Some("/etc/word".into()),
            ..arguments()
        };
        let address = store(&given).unwrap().unwrap();
        assert_eq!(address.to_string(), "valkey://a?copies=1&timeout=3&password-file=/etc/word");
        let alone = CacheArguments { remote_copies: Some(1), ..arguments() };
        assert!(store(&alone).unwrap_err().to_string().contains("--remote-copies is for a store"));
        let wrong = CacheArguments { backing: vec!["http://a".into()], ..arguments() };
        assert!(store(&wrong).unwrap_err().to_string().contains("is no scheme"));
    }

    #[test]
    fn a_backing_is_a_path_and_a_size() {
        let split = |text: &str| split_size(OsStr::new(text)).map_err(|e| e.to_string());
        assert_eq!(split("/no/file:4G"), Ok(("/no/file".into(), Some(4 << 30))));
        assert_eq!(split("/dev/vdb"), Ok(("/dev/vdb".into(), None)));
        assert!(split("/no/file:4Q").unwrap_err().contains("'4Q' is not a size"));
    }
}

//! The address of a store, as `--backing` names it:
//!
//! ```text
//! valkey://[USER@]HOST[:PORT][,HOST[:PORT] …][/][?NAME=VALUE&…]      unix:///PATH[?…]
//! ```
//! The password is never in the address: every user of the machine can read command lines.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default port.
const PORT: u16 = 6379;
/// A client that does not renew its segments for this time loses them.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// How long a read waits for a page that only the store has.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum length of a client's name, in bytes.
const CLIENT_MAX: usize = 64;

/// A server to ask first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seed {
    /// A host and a port (TCP).
    Tcp(String, u16),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The address of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    text: String,
    /// Servers to ask first, in this order. Several must be of one cluster.
    pub seeds: Vec<Seed>,
    /// True for TLS, with a check of the servers' certificates.
    pub is_tls: bool,
    /// The file with the authorities' certificates; `None` for the system's.
    pub authorities: Option<PathBuf>,
    /// The file with our certificate and its key, for servers that ask for one.
    pub certificate: Option<PathBuf>,
    /// The user, if the store has users.
    pub user: Option<String>,
    /// The file with the password.
    pub password_file: Option<PathBuf>,
    /// The maximum bytes of one cache's segments; `None` for as many as fit.
    pub bytes_max: Option<u64>,
    /// The part of the keys after `uz:`; `None` for the machine's name.
    pub client: Option<String>,
    /// The number of replicas that must have a segment before its local copy may be freed. With 0
    /// the local copy stays.
    pub copies: u8,
    /// How long a read waits for a page that only the store has.
    pub timeout: Duration,
    /// How long a segment lives without a renewal.
    pub ttl: Duration,
}

/// A text that is no address of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backing {address}: {reason}")]
pub struct AddressError {
    address: String,
    reason: String,
}

/// Schemes, and true for those that ask for TLS.
const SCHEMES: [(&str, bool); 4] =
    [("valkey", false), ("redis", false), ("valkeys", true), ("rediss", true)];

impl Address {
    /// True if a text is an address, and no path.
    fn is_one(text: &str) -> bool {
        text.contains("://")
    }

    /// The disk and the store that a text names: either, or both with a space between, the disk
    /// first.
    pub fn split(text: &str) -> (Option<&str>, Option<&str>) {
        let text = text.trim_end();
        let (path, last) = text.rsplit_once(char::is_whitespace).unwrap_or(("", text));
        if !Self::is_one(last) {
            return (Some(text), None);
        }
        (Some(path.trim()).filter(|path| !path.is_empty()), Some(last))
    }

    /// Parses an address.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let wrong = |reason: String| AddressError { address: shown(text), reason };
        let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut address = Self {
            text: text.into(),
            seeds: Vec::new(),
            is_tls: false,
            authorities: None,
            certificate: None,
            user: None,
            password_file: None,
            bytes_max: None,
            client: None,
            copies: 0,
            timeout: TIMEOUT,
            ttl: TTL,
        };
        if scheme == "unix" {
            if !place.starts_with('/') || place == "/" {
                let reason = "a socket is named by its whole path, as in unix:///run/valkey.sock";
                return Err(wrong(reason.into()));
            }
            address.seeds.push(Seed::Unix(place.into()));
        } else {
            match SCHEMES.into_iter().find(|(name, _)| *name == scheme) {
                Some((_, is_tls)) => address.is_tls = is_tls,
                None => {
                    let reason = format!(
                        "'{scheme}' is no scheme; use valkey://HOST:PORT, valkeys:// for TLS, or unix:///PATH"
                    );
                    return Err(wrong(reason));
                }
            }
            address.set_place(place).map_err(wrong)?;
        }
        let mut parts = query.split('&').filter(|part| !part.is_empty());
        parts.try_for_each(|part| address.set(part)).map_err(wrong)?;
        Ok(address)
    }

    /// Parses user and seeds.
    fn set_place(&mut self, place: &str) -> Result<(), String> {
        let (place, path) = place.split_once('/').unwrap_or((place, ""));
        if !path.is_empty() {
            return Err(format!(
                "'/{path}' names a database; leave it out: an ACL user keeps clients apart"
            ));
        }
        let hosts = match place.rsplit_once('@') {
            Some((user, _)) if user.contains(':') => {
                return Err("a password on the command line can be read by every user; write it to a file and give --remote-password-file, or set UZSWAP_REMOTE_PASSWORD".into());
            }
            Some((user, hosts)) => {
                self.user = Some(user.into()).filter(|user: &String| !user.is_empty());
                hosts
            }
            None => place,
        };
        for host in hosts.split(',') {
            self.seeds.push(seed(host)?);
        }
        Ok(())
    }

    fn set(&mut self, part: &str) -> Result<(), String> {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let must = |what: &str| format!("{name}={value}: give {what}");
        match name {
            "max" => {
                let bytes = parse_size::Config::new().with_binary().parse_size(value);
                let bytes = bytes.ok().filter(|bytes| *bytes >= 2 << 20);
                self.bytes_max = Some(bytes.ok_or_else(|| must("at least 2M, as in max=8G"))?);
            }
            "client" => {
                let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
                let is_name =
                    (1..=CLIENT_MAX).contains(&value.len()) && value.bytes().all(is_plain);
                if !is_name {
                    return Err(must("a name of letters, digits, '-', '_' and '.', at most 64"));
                }
                self.client = Some(value.into());
            }
            "copies" => {
                let copies = value.parse().ok().filter(|copies| *copies <= 2);
                self.copies = copies.ok_or_else(|| must("0, 1 or 2"))?;
            }
            "timeout" => {
                let seconds = value.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
                let seconds = seconds.ok_or_else(|| must("seconds, from 1 to 3600"))?;
                self.timeout = Duration::from_secs(seconds);
            }
            "ttl" => {
                let seconds = value.parse().ok().filter(|seconds| (2..=604_800).contains(seconds));
                let seconds = seconds.ok_or_else(|| must("seconds, from 2 to 604800 (a week)"))?;
                self.ttl = Duration::from_secs(seconds);
            }
            "password-file" => self.password_file = Some(value.into()),
            "ca" if self.is_tls => self.authorities = Some(value.into()),
            "certificate" if self.is_tls => self.certificate = Some(value.into()),
            "ca" | "certificate" => return Err(must("it with valkeys://, which is TLS")),
            _ => {
                return Err(format!(
                    "'{name}' is no parameter; there are max, client, copies, timeout, ttl, password-file, ca and certificate"
                ));
            }
        }
        Ok(())
    }

    /// The password, from the file, or else from `UZSWAP_REMOTE_PASSWORD`.
    pub(crate) fn password(&self) -> Result<Option<String>, AddressError> {
        let Some(path) = &self.password_file else {
            return Ok(std::env::var("UZSWAP_REMOTE_PASSWORD").ok());
        };
        let wrong = |reason: String| AddressError { address: self.to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| {
            let path = path.display();
            wrong(format!("the file of its password, {path}: {error}; name one that you may read"))
        })?;
        match text.lines().next().map(str::trim_end).filter(|line| !line.is_empty()) {
            Some(line) => Ok(Some(line.into())),
            None => Err(wrong(format!(
                "{} is empty; write the password to it",
                Path::new(path).display()
            ))),
        }
    }
}

fn seed(text: &str) -> Result<Seed, String> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err("a host is missing, as in valkey://cache.example:6379".into());
    }
    let Some(port) = port else { return Ok(Seed::Tcp(host.into(), PORT)) };
    let port = port.parse().ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| format!("'{text}' has no port from 1 to 65535"))?;
    Ok(Seed::Tcp(host.into(), port))
}

/// A text without a password in it.
fn shown(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.into() };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    match rest[..end].rfind('@') {
        Some(at) if rest[..at].contains(':') => format!("{scheme}://…{}", &rest[at..]),
        _ => text.into(),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Address, String> {
        Address::parse(text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_address_names_servers_a_limit_and_a_client() {
        let one = parse("valkey://cache:7000/?max=8G&client=web-1").unwrap();
        assert_eq!(one.seeds, [Seed::Tcp("cache".into(), 7000)]);
        assert_eq!((one.bytes_max, one.client.as_deref()), (Some(8 << 30), Some("web-1")));
        assert_eq!((one.copies, one.timeout), (0, TIMEOUT));
        let three = parse("redis://me@a,b:7001,[::1]:7002?copies=2&timeout=3").unwrap();
        let seeds = [("a", 6379), ("b", 7001), ("::1", 7002)];
        assert_eq!(three.seeds, seeds.map(|(host, port)| Seed::Tcp(host.into(), port)));
        assert_eq!((three.user.as_deref(), three.copies), (Some("me"), 2));
        let socket = parse("unix:///run/valkey.sock?max=1G").unwrap();
        assert_eq!(socket.seeds, [Seed::Unix("/run/valkey.sock".into())]);
        let secret = parse("valkeys://a/?ca=/etc/ca.pem").unwrap();
        assert!(secret.is_tls && secret.authorities == Some("/etc/ca.pem".into()) && !one.is_tls);
        assert_eq!(Address::split("valkey://x"), (None, Some("valkey://x")));
        assert_eq!(Address::split("/a b:4G valkey://x"), (Some("/a b:4G"), Some("valkey://x")));
        assert_eq!(Address::split("/a b:4G"), (Some("/a b:4G"), None));
    }

    #[test]
    fn each_wrong_address_is_refused_with_the_remedy_on_one_line() {
        for (text, part) in [
            ("http://x", "'http' is no scheme; use valkey://HOST:PORT"),
            ("valkey://x?ca=/etc/ca.pem", "with valkeys://, which is TLS"),
            ("valkey://", "a host is missing"),
            ("valkey://a,,b", "a host is missing"),
            ("valkey://a:0", "no port"),
            ("valkey://a:70000", "no port"),
            ("valkey://a/3", "names a database"),
            ("valkey://a?max=1", "at least 2M"),
            ("valkey://a?max=lots", "at least 2M"),
            ("valkey://a?copies=3", "0, 1 or 2"),
            ("valkey://a?timeout=0", "from 1 to 3600"),
            ("valkey://a?ttl=1", "from 2"),
            ("valkey://a?client=a:b", "a name of letters"),
            ("valkey://a?client={x}", "a name of letters"),
            ("valkey://a?limit=1G", "'limit' is no parameter"),
            ("unix://run/x", "whole path"),
            ("unix:///", "whole path"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_in_an_address_is_refused_and_not_repeated() {
        let error = parse("valkey://me:secret@host/?max=1G").unwrap_err();
        assert!(error.contains("--remote-password-file") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn a_password_is_the_first_line_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let address = |path: &Path| {
            parse(&format!("valkey://host?password-file={}", path.display())).unwrap()
        };
        std::fs::write(&path, "secret\n").unwrap();
        assert_eq!(address(&path).password().unwrap().as_deref(), Some("secret"));
        std::fs::write(&path, "\n").unwrap();
        assert!(address(&path).password().unwrap_err().to_string().contains("is empty"));
        let missing = folder.path().join("none");
        assert!(address(&missing).password().unwrap_err().to_string().contains("may read"));
    }
}

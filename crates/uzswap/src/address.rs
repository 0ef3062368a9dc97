//! Where metrics are served: a Unix socket, or a port that only this machine reaches.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// An address of metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket's path; only its owner may connect.
    Unix(PathBuf),
    /// A port of this machine, which all of its users can reach.
    Loopback(SocketAddr),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let example = "write a socket's path, or a port as in 127.0.0.1:9811";
        let numeric = match text.strip_prefix("localhost:") {
            Some(port) => format!("127.0.0.1:{port}"),
            None => text.to_owned(),
        };
        let address: SocketAddr =
            numeric.parse().map_err(|_| format!("'{text}' is not an address; {example}"))?;
        match address.ip().is_loopback() {
            true => Ok(Self::Loopback(address)),
            false => Err(format!(
                "'{text}' can be reached from other machines; {example}, and a proxy before it"
            )),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Loopback(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_of_this_machine() {
        let parse = |text: &str| text.parse::<Address>();
        assert_eq!(parse("/run/m").unwrap().to_string(), "/run/m");
        assert_eq!(parse("localhost:9811").unwrap().to_string(), "127.0.0.1:9811");
        assert_eq!(parse("[::1]:9811").unwrap().to_string(), "[::1]:9811");
        for elsewhere in ["0.0.0.0:9811", "[::]:9811", "192.0.2.1:80"] {
            assert!(parse(elsewhere).unwrap_err().contains("other machines"), "{elsewhere}");
        }
        for wrong in ["", "9811", "example.org:80", "127.0.0.1", "metrics.sock"] {
            assert!(parse(wrong).unwrap_err().contains("not an address"), "{wrong}");
        }
    }
}

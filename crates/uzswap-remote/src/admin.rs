//! The clients of a store, for people: the bytes of each, and the removal of dead clients'
//! segments.
//!
//! This reads every key of the store. So the store's user needs more rights here than for a cache:
//! `SCAN`, `STRLEN` and `GET`.

use crate::address::Address;
use crate::connect::{enter, name};
use crate::error::ConnectError;
use crate::line::{Endpoint, Fault, Line, Value};
use crate::tls::Secrets;
use crate::{nodes, protocol};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a server may take to scan a part of its keys.
const PATIENCE: Duration = Duration::from_secs(10);
/// Keys that the server scans for one command.
const COUNT: &[u8] = b"1000";

/// One life of a cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Client {
    /// The client's name: the machine's, or the parameter `client`.
    pub client: String,
    /// The number of this life, in hexadecimal.
    pub epoch: String,
    /// Its machine and process, while its lease lasts.
    pub owner: Option<String>,
    /// Segments at the store.
    pub segments: u64,
    /// Bytes of these segments.
    pub bytes: u64,
}

/// A connected store.
pub struct Admin {
    address: Address,
    secrets: Secrets,
    primaries: Vec<Endpoint>,
}

impl Admin {
    /// Connects to the first server that answers. Fails if no server answers, or one refuses.
    pub fn connect(address: &Address) -> Result<Self, ConnectError> {
        let secrets = Secrets::of(address)?;
        let wrong = |reason: String| ConnectError::store(address, reason);
        let mut line = Line::new()
            .map_err(|source| ConnectError::Own { address: address.to_string(), source })?;
        let mut reason = String::new();
        for seed in &address.seeds {
            let places = nodes::places(seed);
            let places =
                places.map_err(|error| wrong(format!("{seed}: {error}; check the name")))?;
            for place in places {
                let info = enter(&mut line, &place, address, &secrets, PATIENCE);
                let learned = info.and_then(|info| {
                    nodes::learn(&mut line, &place, &info)
                        .unwrap_or_else(|_| Err("no reply".into()))
                });
                match learned {
                    Ok(primaries) => {
                        let primaries = primaries.into_iter().map(|one| one.place).collect();
                        return Ok(Self { address: address.clone(), secrets, primaries });
                    }
                    Err(why) => reason = format!("{}: {why}", name(&place)),
                }
            }
        }
        Err(wrong(reason))
    }

    /// The clients, by name and epoch.
    pub fn clients(&self) -> Result<Vec<Client>, ConnectError> {
        let mut all: BTreeMap<(String, String), Client> = BTreeMap::new();
        self.each(|line, keys| {
            for key in keys {
                let Some((client, epoch, end)) = parts(key) else { continue };
                let at = (client.to_owned(), epoch.to_owned());
                let one = all.entry(at).or_insert_with(|| Client {
                    client: client.into(),
                    epoch: epoch.into(),
                    ..Client::default()
                });
                if end == "lease" {
                    if let Value::Bulk(owner) = line.ask(&[b"GET", key.as_bytes()])? {
                        one.owner = Some(String::from_utf8_lossy(&owner).into_owned());
                    }
                } else if let Value::Integer(bytes) = line.ask(&[b"STRLEN", key.as_bytes()])? {
                    one.segments += 1;
                    one.bytes += bytes as u64;
                }
            }
            Ok(())
        })?;
        Ok(all.into_values().collect())
    }

    /// Removes the segments of all clients without a lease. Returns their number and bytes.
    pub fn remove_dead(&self) -> Result<(u64, u64), ConnectError> {
        let dead: Vec<_> =
            self.clients()?.into_iter().filter(|client| client.owner.is_none()).collect();
        let is_dead = |key: &str| {
            let parts = parts(key);
            parts.is_some_and(|(client, epoch, _)| {
                dead.iter().any(|dead| (&*dead.client, &*dead.epoch) == (client, epoch))
            })
        };
        self.each(|line, keys| {
            let keys: Vec<_> = keys.iter().filter(|key| is_dead(key)).collect();
            let commands: Vec<u8> = keys
                .iter()
                .flat_map(|key| protocol::command(&[b"UNLINK", key.as_bytes()]))
                .collect();
            line.send(&commands, false)?;
            keys.iter().try_for_each(|_| line.reply().map(drop))
        })?;
        let sum = |figure: fn(&Client) -> u64| dead.iter().map(figure).sum();
        Ok((sum(|client| client.segments), sum(|client| client.bytes)))
    }

    /// Passes all our keys to `visit`, in batches, with the line to their server.
    fn each(
        &self,
        mut visit: impl FnMut(&mut Line, &[String]) -> Result<(), Fault>,
    ) -> Result<(), ConnectError> {
        let wrong = |place: &Endpoint, why: &str| {
            let reason = format!("{}: {why}", name(place));
            ConnectError::store(&self.address, reason)
        };
        for place in &self.primaries {
            let failed = |_| wrong(place, "no reply; try again");
            let mut line = Line::new().map_err(|error| wrong(place, &error.to_string()))?;
            enter(&mut line, place, &self.address, &self.secrets, PATIENCE)
                .map_err(|why| wrong(place, &why))?;
            let mut cursor = b"0".to_vec();
            loop {
                let reply = line.ask(&[b"SCAN", &cursor, b"MATCH", b"uz:*", b"COUNT", COUNT]);
                let (next, keys) = match reply.map_err(failed)? {
                    Value::Error(_, text) => {
                        let why = format!("SCAN: {text}; use a user that may look at all keys");
                        return Err(wrong(place, &why));
                    }
                    Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
                        Ok([Value::Bulk(next), Value::Array(keys)]) => (next, keys),
                        _ => return Err(wrong(place, "SCAN: no list of keys")),
                    },
                    _ => return Err(wrong(place, "SCAN: no list of keys")),
                };
                let text = |key| match key {
                    Value::Bulk(bytes) => String::from_utf8(bytes).ok(),
                    _ => None,
                };
                let keys: Vec<String> = keys.into_iter().filter_map(text).collect();
                visit(&mut line, &keys).map_err(failed)?;
                if next == b"0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(())
    }
}

/// The client, the epoch and the rest of a key of ours.
fn parts(key: &str) -> Option<(&str, &str, &str)> {
    let (client, rest) = key.strip_prefix("uz:")?.split_once(':')?;
    let (epoch, end) = rest.split_once(':')?;
    let is_number = end == "lease" || end.bytes().all(|byte| byte.is_ascii_digit());
    (epoch.len() == 16 && is_number).then_some((client, epoch, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_others_are_none_of_ours() {
        let epoch = "0123456789abcdef";
        assert_eq!(parts("uz:web:0123456789abcdef:17"), Some(("web", epoch, "17")));
        assert_eq!(parts("uz:web:0123456789abcdef:lease"), Some(("web", epoch, "lease")));
        for key in ["user:7", "uz:web", "uz:web:12:17", "uz:web:0123456789abcdef:name"] {
            assert_eq!(parts(key), None, "{key}");
        }
    }
}

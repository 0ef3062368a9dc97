//! The servers of a store: which server has a key, and its replicas.
//!
//! A thread that reads a page finds the server here, by atomics. The background thread learns the
//! servers anew when a server is gone, or answers that a key is elsewhere. A server keeps its
//! number while we know it.

use crate::address::Seed;
use crate::line::{Endpoint, Fault, Line, Value};
use crate::protocol::SLOTS;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// The maximum number of servers of a cluster.
pub(crate) const NODES_MAX: usize = 64;
/// Replicas of one server that are read from.
const REPLICAS_MAX: usize = 2;
/// No server.
const NONE: u16 = u16::MAX;

/// A server with its slots and its replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Primary {
    pub(crate) place: Endpoint,
    pub(crate) slots: Vec<RangeInclusive<u16>>,
    pub(crate) replicas: Vec<Endpoint>,
}

/// The numbers of the servers, by slot.
pub(crate) struct Map {
    owners: Box<[AtomicU16]>,
    replicas: Box<[[AtomicU16; REPLICAS_MAX]]>,
}

impl Map {
    /// Server 0 has all keys.
    pub(crate) fn new() -> Self {
        let none = |_| std::array::from_fn(|_| AtomicU16::new(NONE));
        Self {
            owners: (0..SLOTS).map(|_| AtomicU16::new(0)).collect(),
            replicas: (0..NODES_MAX).map(none).collect(),
        }
    }

    /// The server that has a slot.
    pub(crate) fn owner(&self, slot: u16) -> usize {
        self.owners[usize::from(slot)].load(Relaxed).into()
    }

    /// The replicas of a server.
    pub(crate) fn replicas(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        let all = self.replicas[node].iter().map(|replica| replica.load(Relaxed));
        all.filter(|replica| *replica != NONE).map(usize::from)
    }

    /// Takes over the learned servers. `number` returns a server's number.
    pub(crate) fn set(&self, primaries: &[Primary], mut number: impl FnMut(&Endpoint) -> usize) {
        for primary in primaries {
            let own = number(&primary.place);
            for slot in primary.slots.iter().cloned().flatten() {
                self.owners[usize::from(slot) % SLOTS].store(own as u16, Relaxed);
            }
            for (at, replica) in self.replicas[own].iter().enumerate() {
                let other = primary.replicas.get(at).map_or(NONE, |place| number(place) as u16);
                replica.store(other, Relaxed);
            }
        }
    }
}

/// The endpoints of a seed. Fails if its name does not resolve.
pub(crate) fn places(seed: &Seed) -> std::io::Result<Vec<Endpoint>> {
    Ok(match seed {
        Seed::Unix(path) => vec![Endpoint::Unix(path.clone())],
        Seed::Tcp(host, port) => {
            (host.as_str(), *port).to_socket_addrs()?.map(Endpoint::Tcp).collect()
        }
    })
}

/// The value of a field of `INFO`.
pub(crate) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    info.lines().find_map(value).map(str::trim_end)
}

/// The servers of a store, as the server on this line knows them. `Ok(Err)`: the reason why these
/// servers cannot be used.
pub(crate) fn learn(
    line: &mut Line,
    place: &Endpoint,
    info: &str,
) -> Result<Result<Vec<Primary>, String>, Fault> {
    if field(info, "cluster_enabled") == Some("1") || field(info, "redis_mode") == Some("cluster") {
        let slots = line.ask(&[b"CLUSTER", b"SLOTS"])?;
        return Ok(of_cluster(&slots, place));
    }
    if field(info, "role") == Some("slave") {
        let (host, port) = (field(info, "master_host"), field(info, "master_port"));
        return Ok(Err(format!(
            "it is a replica of {}:{}; name that server",
            host.unwrap_or("another"),
            port.unwrap_or("?")
        )));
    }
    let replicas = (0..REPLICAS_MAX).filter_map(|number| {
        let row = field(info, &format!("slave{number}"))?;
        let part = |name: &str| row.split(',').find_map(|part| part.strip_prefix(name));
        let (host, port) = (part("ip=")?, part("port=")?.parse().ok()?);
        Some(Endpoint::Tcp(SocketAddr::new(host.parse().ok()?, port)))
    });
    let slots = vec![0..=(SLOTS - 1) as u16];
    Ok(Ok(vec![Primary { place: place.clone(), slots, replicas: replicas.collect() }]))
}

fn of_cluster(reply: &Value, asked: &Endpoint) -> Result<Vec<Primary>, String> {
    let mut primaries: Vec<Primary> = Vec::new();
    let mut covered = 0;
    let rows = match reply {
        Value::Array(rows) => rows,
        Value::Error(_, text) => {
            return Err(format!("CLUSTER SLOTS: {text}; permit it to the user (+cluster|slots)"));
        }
        _ => return Err("CLUSTER SLOTS: no list of servers; is it a Valkey or Redis?".into()),
    };
    for row in rows {
        let Value::Array(row) = row else { continue };
        let [Value::Integer(first), Value::Integer(last), servers @ ..] = &row[..] else {
            continue;
        };
        let slots = *first as u16..=*last as u16;
        let mut servers = servers.iter().filter_map(|server| of_server(server, asked));
        let Some(place) = servers.next() else { continue };
        covered += slots.len();
        match primaries.iter_mut().find(|primary| primary.place == place) {
            Some(primary) => primary.slots.push(slots),
            None => {
                let replicas = servers.take(REPLICAS_MAX).collect();
                primaries.push(Primary { place, slots: vec![slots], replicas });
            }
        }
    }
    if covered < SLOTS {
        return Err(format!(
            "{} of its {SLOTS} slots have no server; repair the cluster (valkey-cli --cluster fix)",
            SLOTS - covered
        ));
    }
    if primaries.iter().map(|primary| 1 + primary.replicas.len()).sum::<usize>() > NODES_MAX {
        return Err(format!("its cluster has more than {NODES_MAX} servers; use a smaller one"));
    }
    Ok(primaries)
}

/// A server's address and port. The address may be empty for the server that was asked.
fn of_server(value: &Value, asked: &Endpoint) -> Option<Endpoint> {
    let Value::Array(parts) = value else { return None };
    let Some(Value::Integer(port)) = parts.get(1) else { return None };
    let port = u16::try_from(*port).ok()?;
    let host = match parts.first() {
        Some(Value::Bulk(host)) => String::from_utf8_lossy(host).into_owned(),
        _ => String::new(),
    };
    let address = match (host.parse::<IpAddr>(), asked) {
        (Ok(address), _) => SocketAddr::new(address, port),
        (Err(_), Endpoint::Tcp(asked)) if host.is_empty() || host == "?" => {
            SocketAddr::new(asked.ip(), port)
        }
        (Err(_), _) => (host.as_str(), port).to_socket_addrs().ok()?.next()?,
    };
    Some(Endpoint::Tcp(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &str, port: i64) -> Value {
        Value::Array(vec![
            Value::Bulk(host.into()),
            Value::Integer(port),
            Value::Bulk(b"id".into()),
        ])
    }

    fn row(first: i64, last: i64, servers: &[(&str, i64)]) -> Value {
        let servers = servers.iter().map(|(host, port)| server(host, *port));
        Value::Array(
            [Value::Integer(first), Value::Integer(last)].into_iter().chain(servers).collect(),
        )
    }

    fn place(text: &str) -> Endpoint {
        Endpoint::Tcp(text.parse().unwrap())
    }

    #[test]
    fn a_cluster_is_known_by_its_slots() {
        let asked = place("10.0.0.9:7000");
        let reply = Value::Array(vec![
            row(0, 5000, &[("10.0.0.1", 7001), ("10.0.0.4", 7004)]),
            row(5001, 10000, &[("", 7002)]),
            row(10001, 16383, &[("10.0.0.1", 7001), ("10.0.0.4", 7004)]),
        ]);
        let primaries = of_cluster(&reply, &asked).unwrap();
        assert_eq!(primaries.len(), 2);
        assert_eq!(primaries[1].place, place("10.0.0.9:7002"));
        let map = Map::new();
        let mut known: Vec<Endpoint> = Vec::new();
        map.set(&primaries, |place| {
            known.iter().position(|known| known == place).unwrap_or_else(|| {
                known.push(place.clone());
                known.len() - 1
            })
        });
        assert_eq!([0, 5000, 5001, 16383].map(|slot| map.owner(slot)), [0, 0, 2, 0]);
        assert_eq!(map.replicas(0).collect::<Vec<_>>(), [1]);
        assert_eq!(map.replicas(2).count(), 0);
    }

    #[test]
    fn slots_without_a_server_are_counted() {
        let reply = Value::Array(vec![row(0, 16000, &[("10.0.0.1", 7001)])]);
        let error = of_cluster(&reply, &place("10.0.0.1:7001")).unwrap_err();
        assert!(error.contains("383 of its 16384 slots"), "{error}");
    }

    #[test]
    fn a_field_of_info_is_found_by_its_whole_name() {
        let info = "# Memory\r\nused_memory:5\r\nmaxmemory_policy:noeviction\r\nmaxmemory:7\r\n";
        assert_eq!(field(info, "maxmemory"), Some("7"));
        assert_eq!(field(info, "maxmemory_policy"), Some("noeviction"));
        assert_eq!(field(info, "used"), None);
    }
}

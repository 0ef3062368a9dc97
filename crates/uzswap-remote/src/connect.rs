//! Connecting to a store, and learning its servers: at the start, and whenever a server is gone.

use crate::address::{Address, Seed};
use crate::error::ConnectError;
use crate::figures::StoreFigures;
use crate::line::{Endpoint, Line, Value};
use crate::nodes::{Map, NODES_MAX, Primary, field, learn, places};
use crate::protocol::slot;
use crate::store::{
    Keeper, Limits, READ_PATIENCE, Reader, Store, WRITE_PATIENCE, lock, machine, random,
};
use crate::tls::Secrets;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The number of lines for reads: for each server, and the minimum. A line serves one thread at a
/// time.
const READERS_EACH: usize = 2;
const READERS_MIN: usize = 4;
/// The pause between attempts to open the lines of a server.
const RETRY: Duration = Duration::from_millis(500);
/// How often to check the policy and the memory of the servers. A store that begins to drop keys
/// may lose pages for this long.
const LOOK: Duration = Duration::from_secs(10);

impl Store {
    /// Connects, and tries each command that will be needed. The error has the reason why the store
    /// cannot be used, and the remedy.
    pub(crate) fn connect(address: &Address) -> Result<(Self, Limits), ConnectError> {
        let own = |source| ConnectError::Own { address: address.to_string(), source };
        let wrong = |reason: String| ConnectError::store(address, reason);
        let secrets = Secrets::of(address)?;
        let seeds = seeds(address)?;
        let learned = first_answer(&seeds, address, &secrets).map_err(own)?;
        let primaries = learned.map_err(wrong)?;
        let servers: usize = primaries.iter().map(|primary| 1 + primary.replicas.len()).sum();
        let epoch = random().map_err(own)?;
        let store = Self::closed(address, epoch, servers * READERS_EACH).map_err(own)?;
        // This fails only if the store has secrets already.
        let _ = store.secrets.set(secrets);
        let mut keeper = lock(&store.keeper);
        keeper.seeds = seeds;
        store.take_in(&mut keeper, &primaries);
        let limits = store.look(&mut keeper).map_err(wrong)?;
        store.try_commands(&mut keeper).map_err(wrong)?;
        store.open_lines(&mut keeper);
        drop(keeper);
        Ok((store, limits))
    }

    /// Continues with the keys of a process that has ended, and that had `readers` lines for reads.
    /// A store that is gone, full or unfit is no error, since it may have the only copy of a page:
    /// [`Store::tend`] tries again. Fails without a free descriptor.
    pub(crate) fn resume(address: &Address, epoch: u64, readers: usize) -> io::Result<Self> {
        let store = Self::closed(address, epoch, readers)?;
        store.tend(&mut lock(&store.keeper));
        Ok(store)
    }

    /// A store whose lines are all closed. Fails without a free descriptor.
    fn closed(address: &Address, epoch: u64, readers: usize) -> io::Result<Self> {
        let reader = |_| {
            Ok::<_, io::Error>(Reader {
                line: Mutex::new(Line::new()?),
                node: AtomicU16::new(u16::MAX),
                is_open: AtomicBool::new(false),
            })
        };
        let keeper = Keeper {
            seeds: Vec::new(),
            known: Vec::with_capacity(NODES_MAX),
            active: Vec::with_capacity(NODES_MAX),
            primaries: Vec::with_capacity(NODES_MAX),
            writers: Vec::with_capacity(NODES_MAX),
            tried: None,
            looked: None,
        };
        Ok(Self {
            address: address.clone(),
            secrets: OnceLock::new(),
            client: address.client.clone().unwrap_or_else(machine),
            epoch: AtomicU64::new(epoch),
            map: Map::new(),
            readers: (0..readers.max(READERS_MIN)).map(reader).collect::<io::Result<_>>()?,
            keeper: Mutex::new(keeper),
            figures: StoreFigures::default(),
            is_up: AtomicBool::new(false),
            is_unfit: AtomicBool::new(false),
            rung: Mutex::new(false),
            bell: Condvar::new(),
        })
    }

    /// Opens closed lines, learns the servers again if one is gone, and checks their memory at
    /// intervals.
    pub(crate) fn tend(&self, keeper: &mut Keeper) {
        let is_whole =
            self.is_up() && self.readers.iter().all(|reader| reader.is_open.load(Relaxed));
        let is_soon = keeper.tried.is_some_and(|tried| tried.elapsed() < RETRY);
        if !is_whole && !is_soon {
            keeper.tried = Some(Instant::now());
            if let Some(primaries) = self.learn_again(keeper) {
                self.take_in(keeper, &primaries);
            }
            self.open_lines(keeper);
        }
        if self.is_up() && keeper.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            // Unfit, or a server did not answer for a moment.
            let is_unfit = self.look(keeper).is_err();
            self.is_unfit.store(is_unfit, Relaxed);
        }
    }

    fn learn_again(&self, keeper: &mut Keeper) -> Option<Vec<Primary>> {
        // After taking over, seeds or secrets may be missing: a name does not resolve now, or a
        // file is gone. The next call tries again.
        if keeper.seeds.is_empty() {
            keeper.seeds = seeds(&self.address).ok()?;
        }
        if self.secrets.get().is_none() {
            let _ = self.secrets.set(Secrets::of(&self.address).ok()?);
        }
        let mut line = Line::new().ok()?;
        let known = keeper.active.iter().map(|number| &keeper.known[*number]);
        known.chain(&keeper.seeds).find_map(|place| {
            let info = self.enter(&mut line, place, READ_PATIENCE).ok()?;
            ask(&mut line, place, &info).ok()
        })
    }

    fn enter(
        &self,
        line: &mut Line,
        place: &Endpoint,
        patience: Duration,
    ) -> Result<String, String> {
        let secrets =
            self.secrets.get().ok_or("its password and certificates were not read yet")?;
        enter(line, place, &self.address, secrets, patience)
    }

    /// Gives the learned servers numbers.
    fn take_in(&self, keeper: &mut Keeper, primaries: &[Primary]) {
        let known = &mut keeper.known;
        let mut number = |place: &Endpoint| {
            known.iter().position(|known| known == place).unwrap_or_else(|| {
                // When all numbers are taken, those of servers that are gone are used again.
                if known.len() == NODES_MAX {
                    known.clear();
                    keeper.writers.iter_mut().for_each(Line::close);
                    self.readers.iter().for_each(|one| one.node.store(u16::MAX, Relaxed));
                }
                known.push(place.clone());
                known.len() - 1
            })
        };
        keeper.active.clear();
        keeper.primaries.clear();
        for primary in primaries {
            let own = number(&primary.place);
            keeper.primaries.push(own);
            keeper.active.push(own);
            keeper.active.extend(primary.replicas.iter().map(&mut number));
        }
        self.map.set(primaries, number);
        while keeper.writers.len() < keeper.known.len() {
            // Without a free descriptor, the server cannot be written to.
            let Ok(line) = Line::new() else { break };
            keeper.writers.push(line);
        }
    }

    /// Opens each line that is closed, or connected to the wrong server.
    fn open_lines(&self, keeper: &mut Keeper) {
        if keeper.active.is_empty() {
            // No server has answered yet.
            return;
        }
        let is_primary_up = keeper.primaries.iter().all(|number| {
            let (Some(line), place) = (keeper.writers.get_mut(*number), &keeper.known[*number])
            else {
                return false;
            };
            line.is_open() || self.enter(line, place, WRITE_PATIENCE).is_ok()
        });
        for (at, reader) in self.readers.iter().enumerate() {
            let number = keeper.active[at % keeper.active.len()];
            let is_right = usize::from(reader.node.load(Relaxed)) == number;
            if is_right && reader.is_open.load(Relaxed) {
                continue;
            }
            reader.is_open.store(false, Relaxed);
            let mut line = lock(&reader.line);
            let entered = self.enter(&mut line, &keeper.known[number], READ_PATIENCE);
            let is_replica = !keeper.primaries.contains(&number);
            let is_readable = entered.is_ok_and(|info| {
                !is_replica
                    || field(&info, "cluster_enabled") != Some("1")
                    || matches!(line.ask(&[b"READONLY"]), Ok(Value::Status(_)))
            });
            reader.node.store(number as u16, Relaxed);
            reader.is_open.store(is_readable, Relaxed);
        }
        self.is_up.store(is_primary_up, Relaxed);
    }

    /// Checks the policy and the memory of the servers. The error has the reason and the remedy.
    fn look(&self, keeper: &mut Keeper) -> Result<Limits, String> {
        keeper.looked = Some(Instant::now());
        let mut limits = Limits { bytes: Some(0) };
        for at in 0..keeper.primaries.len() {
            let number = keeper.primaries[at];
            let place = keeper.known[number].clone();
            let line = keeper.writers.get_mut(number).ok_or("no descriptor for a connection")?;
            let info = self.enter(line, &place, WRITE_PATIENCE)?;
            let policy = field(&info, "maxmemory_policy").unwrap_or("noeviction");
            let most = field(&info, "maxmemory").and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
            if policy != "noeviction" {
                return Err(format!(
                    "{} drops keys when it is full (maxmemory-policy {policy}); set it to noeviction",
                    name(&place)
                ));
            }
            limits.bytes = limits.bytes.filter(|_| most > 0).map(|bytes| bytes + most);
        }
        Ok(limits)
    }

    /// Tries each command on each server with keys.
    fn try_commands(&self, keeper: &mut Keeper) -> Result<(), String> {
        // Numbers that no segment gets: enough to find a key for each server.
        let mut left = keeper.primaries.clone();
        let numbers = (0..u64::from(u16::MAX)).map(|number| u64::MAX - number);
        for number in numbers {
            let key = self.key(number);
            let node = self.map.owner(slot(key.bytes()));
            let Some(at) = left.iter().position(|left| *left == node) else { continue };
            left.swap_remove(at);
            let place = name(&keeper.known[node]);
            let line = keeper.writers.get_mut(node).ok_or("no descriptor for a connection")?;
            let commands: [&[&[u8]]; 5] = [
                &[b"SET", key.bytes(), b"uzswap", b"PX", b"60000"],
                &[b"GETRANGE", key.bytes(), b"1", b"2"],
                &[b"PEXPIRE", key.bytes(), b"60000"],
                &[b"WAIT", b"0", b"1"],
                &[b"UNLINK", key.bytes()],
            ];
            for parts in commands {
                let command = String::from_utf8_lossy(parts[0]);
                match line.ask(parts) {
                    Ok(Value::Error(_, text)) => return Err(refused(&place, &command, &text)),
                    Ok(Value::Bulk(bytes)) if bytes != b"zs" => {
                        return Err(format!(
                            "{place}: GETRANGE returned other bytes; use a Valkey"
                        ));
                    }
                    Ok(_) => {}
                    Err(_) => {
                        return Err(format!("{place}: {command}: no reply; check the server"));
                    }
                }
            }
            if left.is_empty() {
                break;
            }
        }
        Ok(())
    }
}

/// The servers, as the first seed that answers knows them. `Ok(Err)`: the reason why no seed can be
/// used.
fn first_answer(
    seeds: &[Endpoint],
    address: &Address,
    secrets: &Secrets,
) -> io::Result<Result<Vec<Primary>, String>> {
    let mut line = Line::new()?;
    let mut reason = String::new();
    for place in seeds {
        let info = enter(&mut line, place, address, secrets, WRITE_PATIENCE);
        match info.and_then(|info| ask(&mut line, place, &info)) {
            Ok(primaries) => return Ok(Ok(primaries)),
            Err(why) => reason = format!("{}: {why}", name(place)),
        }
    }
    Ok(Err(reason))
}

/// The endpoints of all seeds. Fails if a name does not resolve.
fn seeds(address: &Address) -> Result<Vec<Endpoint>, ConnectError> {
    let mut all = Vec::new();
    for seed in &address.seeds {
        let found = places(seed).map_err(|error| {
            let reason = format!("{seed}: {error}; check the name, and that it can be reached");
            ConnectError::store(address, reason)
        })?;
        all.extend(found);
    }
    Ok(all)
}

fn refused(place: &str, command: &str, text: &str) -> String {
    let remedy = if text.starts_with("NOPERM") {
        format!("permit it to the user (+{})", command.to_lowercase())
    } else if text.starts_with("OOM") {
        "it is full; raise its maxmemory or remove keys".into()
    } else {
        "use Valkey 7.2 or Redis 6, or a newer one".into()
    };
    format!("{place}: {command}: {text}; {remedy}")
}

/// Connects a line and authenticates. Returns the server's `INFO`.
pub(crate) fn enter(
    line: &mut Line,
    place: &Endpoint,
    address: &Address,
    secrets: &Secrets,
    patience: Duration,
) -> Result<String, String> {
    line.open(place, patience, secrets.tls.as_ref()).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => {
            format!("{error}; check the server's certificate, and its authority (ca=FILE)")
        }
        _ => format!("{error}; check that the server runs, and that this machine reaches it"),
    })?;
    let silent = |_| "no reply; check that it is a Valkey or Redis without TLS".to_owned();
    if let Some(password) = &secrets.password {
        let reply = match &address.user {
            Some(user) => line.ask(&[b"AUTH", user.as_bytes(), password.as_bytes()]),
            None => line.ask(&[b"AUTH", password.as_bytes()]),
        };
        if let Value::Error(_, text) = reply.map_err(silent)? {
            line.close();
            return Err(format!("{text}; check the user and the password"));
        }
    }
    match line.ask(&[b"INFO"]).map_err(silent)? {
        Value::Bulk(info) => Ok(String::from_utf8_lossy(&info).into_owned()),
        Value::Error(_, text) => {
            line.close();
            let remedy = if text.starts_with("NOAUTH") {
                "give --remote-password-file or UZSWAP_REMOTE_PASSWORD"
            } else {
                "permit INFO to the user (+info)"
            };
            Err(format!("{text}; {remedy}"))
        }
        _ => {
            line.close();
            Err("INFO: no text; is it a Valkey or Redis?".into())
        }
    }
}

fn ask(line: &mut Line, place: &Endpoint, info: &str) -> Result<Vec<Primary>, String> {
    learn(line, place, info).unwrap_or_else(|_| Err("CLUSTER SLOTS: no reply".into()))
}

/// A server's name in messages.
pub(crate) fn name(place: &Endpoint) -> String {
    match place {
        Endpoint::Tcp(address) => Seed::Tcp(address.ip().to_string(), address.port()).to_string(),
        Endpoint::Unix(path) => path.display().to_string(),
    }
}

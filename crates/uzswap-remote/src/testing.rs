//! Servers that a test starts and ends, and a proxy that damages their replies.

mod proxy;

pub use proxy::{Harm, Proxy};

use crate::line::{Endpoint, Line, Value};
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_sys::process;

/// A server must start, or finish its work, within this time.
const MOMENT: Duration = Duration::from_secs(60);

/// The Redis server in Debian's redis-tools. The program is a server under any other name.
const PROGRAM: &str = "/usr/bin/redis-check-rdb";

/// True if this machine has a server.
pub fn has_server() -> bool {
    std::path::Path::new(PROGRAM).exists()
}

/// A server on a port of this machine, in a folder of its own. It ends when the value is dropped.
pub struct Server {
    child: Child,
    folder: tempfile::TempDir,
    port: u16,
    tls_port: String,
    arguments: Vec<String>,
}

impl Server {
    /// Starts a server with further arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("room for a folder");
        let port = free_port();
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).into()).collect();
        symlink(PROGRAM, folder.path().join("redis-server")).expect("a new folder");
        let child = spawn(folder.path(), port, &arguments);
        let server = Self { child, folder, port, tls_port: String::new(), arguments };
        server.await_ready();
        server
    }

    /// Starts a server that only speaks TLS, with certificates in a folder: see [`certificates`].
    pub fn with_tls(folder: &std::path::Path, name: &str) -> Self {
        let file = |name: &str| folder.join(name).display().to_string();
        let (own, key, all) = (file(&format!("{name}.crt")), file("key.pem"), file("ca.crt"));
        let port = free_port().to_string();
        let tls = ["--tls-port", &port, "--tls-cert-file", &own, "--tls-key-file", &key];
        let rest = ["--tls-ca-cert-file", &all, "--tls-auth-clients", "no"];
        let mut server = Self::start(&[&tls[..], &rest].concat());
        server.tls_port = port;
        server
    }

    /// Its address with TLS.
    pub fn backing_with_tls(&self, parameters: &str) -> String {
        format!("valkeys://localhost:{}/?{parameters}", self.tls_port)
    }

    /// Starts a replica of another server, and waits until it has that server's content.
    pub fn replica_of(primary: &Self) -> Self {
        let replica = Self::start(&["--replicaof", "127.0.0.1", &primary.port.to_string()]);
        let is_online = || primary.ask(&["INFO", "replication"]).contains("state=online");
        await_that("a replica is there", is_online);
        replica
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its address as a backing, with parameters.
    pub fn backing(&self, parameters: &str) -> String {
        format!("valkey://127.0.0.1:{}/?{parameters}", self.port)
    }

    /// The path of the server's Unix socket.
    pub fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("socket")
    }

    /// Sends a command. Returns the reply as text; `None` without a reply.
    pub fn try_ask(&self, parts: &[&str]) -> Option<String> {
        let mut line = Line::new().ok()?;
        let place = Endpoint::Tcp(SocketAddr::from(([127, 0, 0, 1], self.port)));
        line.open(&place, Duration::from_secs(5), None).ok()?;
        let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
        line.ask(&parts).ok().map(|value| text(&value))
    }

    /// Sends a command to a server, and returns its reply.
    pub fn ask(&self, parts: &[&str]) -> String {
        self.try_ask(parts).unwrap_or_else(|| panic!("no reply to {parts:?}"))
    }

    /// The server's keys that match a pattern.
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let all = self.ask(&["KEYS", pattern]);
        all.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// Bytes of all values together.
    pub fn value_bytes(&self) -> u64 {
        let length = |key: String| self.ask(&["STRLEN", &key]).parse::<u64>().unwrap_or(0);
        self.keys("uz:*").into_iter().map(length).sum()
    }

    /// Kills the server, as `kill -9` does.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }

    /// Starts the server again, empty.
    pub fn restart(&mut self) {
        self.child = spawn(self.folder.path(), self.port, &self.arguments);
        self.await_ready();
    }

    /// Suspends the server, which has the effect of a network partition.
    pub fn suspend(&self) {
        process::kill(self.child.id() as i32, 19).expect("it is ours");
    }

    /// Lets the server continue.
    pub fn resume(&self) {
        process::kill(self.child.id() as i32, 18).expect("it is ours");
    }

    fn await_ready(&self) {
        let is_ready = || {
            let reply = self.try_ask(&["PING"]);
            reply.is_some_and(|text| text == "PONG" || text.starts_with("NOAUTH"))
        };
        await_that("the server is ready", is_ready);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the server has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes certificates in a folder: `ca.crt` is the authority's, `other.crt` another authority's.
/// `good.crt` is for localhost, and so is `expired.crt`, which has expired. The key of the
/// certificates is `key.pem`.
pub fn certificates(folder: &std::path::Path) {
    const SCRIPT: &str = include_str!("testing/certificates.sh");
    let made = Command::new("sh").args(["-c", SCRIPT]).current_dir(folder).output();
    let made = made.expect("a shell");
    assert!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
}

/// Waits until a condition holds.
pub fn await_that(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + MOMENT;
    while !condition() {
        assert!(Instant::now() < until, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn spawn(folder: &std::path::Path, port: u16, arguments: &[String]) -> Child {
    let mut command = Command::new("./redis-server");
    command.current_dir(folder).args(["--port", &port.to_string(), "--save", ""]);
    command.args(["--appendonly", "no", "--unixsocket", "socket", "--unixsocketperm", "777"]);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("a server: ./setup tests installs it")
}

/// A port that is free now, like the one 10000 above, on which the servers of a cluster talk.
fn free_port() -> u16 {
    loop {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let port = listener.local_addr().expect("it listens").port();
        if port < 55000 && TcpListener::bind(("127.0.0.1", port + 10000)).is_ok() {
            return port;
        }
    }
}

/// A reply as text, one line for each part.
fn text(value: &Value) -> String {
    match value {
        Value::Status(text) | Value::Error(_, text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Nil => String::new(),
        Value::Array(values) => values.iter().fold(String::new(), |mut all, value| {
            writeln!(all, "{}", text(value)).expect("memory takes all bytes");
            all
        }),
    }
}

/// A cluster of three primaries, with a replica of each.
pub struct Cluster {
    /// The servers.
    pub servers: Vec<Server>,
}

impl Cluster {
    /// Starts a cluster. A server that is gone for `timeout` ms is replaced by its replica.
    pub fn start(timeout: u32) -> Self {
        let timeout = timeout.to_string();
        let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", &timeout];
        let servers: Vec<_> = (0..6).map(|_| Server::start(&arguments)).collect();
        let mut command = Command::new("redis-cli");
        command.args(["--cluster", "create"]);
        command.args(servers.iter().map(|server| format!("127.0.0.1:{}", server.port)));
        command.args(["--cluster-replicas", "1", "--cluster-yes"]);
        let made = command.output().expect("redis-cli, of the same package");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stdout));
        let cluster = Self { servers };
        let is_whole =
            |server: &Server| server.ask(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
        await_that("the cluster is whole", || cluster.servers.iter().all(is_whole));
        let has_replica = |server: &Server| {
            let info = server.ask(&["INFO", "replication"]);
            info.contains("role:slave") || info.contains("state=online")
        };
        await_that("replicas have joined", || cluster.servers.iter().all(has_replica));
        cluster
    }

    /// Its address as a backing, with parameters.
    pub fn backing(&self, parameters: &str) -> String {
        let seeds: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        format!("valkey://{}/?{parameters}", seeds.join(","))
    }

    /// The indices of the servers with keys of their own.
    pub fn primaries(&self) -> Vec<usize> {
        let is_one = |at: &usize| {
            let role = self.servers[*at].try_ask(&["ROLE"]);
            role.is_some_and(|role| role.starts_with("master"))
        };
        (0..self.servers.len()).filter(is_one).collect()
    }
}

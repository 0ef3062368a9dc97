//! The process that serves metrics and the page, for `--metrics`.
//!
//! The exporter is a separate process, and one thread serves. Its memory is not locked, and no
//! process waits for it: it reads the control files as any program could. It ends with its parent.

use crate::address::Address;
use crate::device::folder;
use crate::device::ledger::LedgerState;
use crate::device::processes::OWN_PROGRAM;
use crate::device::wire::Wire;
use crate::error::Failure;
use crate::metrics::{self, Scrape};
use crate::show::page::{self, History};
use crate::stdio::{say, show};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST};
use hyper::http::uri::Authority;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;
use uzswap_block::control::{ALL, FAULT_TIMES, STATISTICS_FOLDER};

/// The time that a client may take to send its request, and the time that it may stay connected.
const PATIENCE: Duration = Duration::from_secs(5);
const CONNECTED: Duration = Duration::from_secs(60);

/// The maximum number of connections at the same time. Beyond that, the oldest is closed: any user
/// can open connections to a port.
const CONNECTIONS_MAX: usize = 64;

/// Longest header.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// The pause after a connection could not be accepted for want of a descriptor.
const PAUSE: Duration = Duration::from_millis(50);

/// Figures that reveal if the cache already had a page, and so if another user has the same page.
/// On a port, which every user of the machine can read, they are rounded to steps.
const OF_SAME_PAGES: [&str; 2] = ["shared_pages", "duplicate_pages"];
const STEP: u64 = 1024;

const NOT_HERE: &str = "call it by localhost, or have the proxy do so\n";

/// The file with the address, for `uzswap dashboard`.
fn note() -> PathBuf {
    Path::new(folder::FOLDER).join("metrics")
}

/// A process that was killed is started again this long after its last start.
const AGAIN: Duration = Duration::from_secs(2);

/// The process, seen by its parent. The process ends when this value is dropped.
pub struct Exporter {
    wire: Option<Wire>,
    child: Child,
    address: String,
    since: Instant,
}

impl Exporter {
    /// Starts the process. It listens at `address` when this returns.
    pub fn start(address: &Address) -> Result<Self, Failure> {
        let cannot = |error: io::Error| Failure::new(format!("cannot serve metrics: {error}"));
        let (mut wire, child) = spawn(&address.to_string()).map_err(cannot)?;
        match wire.receive::<Result<String, String>>().map_err(cannot)? {
            Ok(address) => Ok(Self { wire: Some(wire), child, address, since: Instant::now() }),
            Err(why) => Err(Failure::new(why)),
        }
    }

    /// Starts the process again if it was killed. Waits neither for the process nor for its
    /// messages.
    pub fn tend(&mut self) {
        if self.since.elapsed() < AGAIN || matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        self.since = Instant::now();
        // An error most likely means that there is no memory for a process. A later call tries
        // again.
        if let Ok((wire, child)) = spawn(&self.address) {
            (self.wire, self.child) = (Some(wire), child);
        }
    }

    /// Writes the address into a file, once the folder exists.
    pub fn announce(&self) {
        // An error: `uzswap dashboard` serves the page itself.
        let _ = folder::write(&note(), self.address.as_bytes());
    }
}

fn spawn(address: &str) -> io::Result<(Wire, Child)> {
    let (wire, theirs) = Wire::pair()?;
    let child = Command::new(OWN_PROGRAM)
        .arg0("uzswap")
        .args(["exporter", address])
        .stdin(theirs)
        .stdout(Stdio::null())
        // In a group of its own, which Ctrl-C does not reach.
        .process_group(0)
        .spawn()?;
    Ok((wire, child))
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.wire = None;
        // An error means that the process was reaped already.
        let _ = self.child.wait();
        if fs::read_to_string(note()).is_ok_and(|address| address == self.address) {
            // An error means that the file was removed with its folder.
            let _ = fs::remove_file(note());
        }
    }
}

/// `uzswap exporter`: serves until its parent is gone.
pub fn exporter(address: &Address) -> Result<(), Failure> {
    let mut wire = Wire::of_stdin().map_err(|error| Failure::new(error.to_string()))?;
    // An error means that the keeper that started it is not spared from the OOM killer either.
    let _ = uzswap_sys::process::do_not_spare_from_oom();
    serve(address, |bound| {
        // An error means that the parent is gone, which the thread below notices.
        let _ = wire.send(&bound);
        // On failure, the file at the path belongs to another process.
        if bound.is_err() {
            return;
        }
        let socket = match address {
            Address::Unix(path) => Some(path.clone()),
            Address::Loopback(_) => None,
        };
        let until_gone = move || {
            let _ = wire.receive::<()>();
            socket.map(fs::remove_file);
            std::process::exit(0);
        };
        // After an error we serve until we are killed.
        let _ = std::thread::Builder::new().name("uzswap-parent".into()).spawn(until_gone);
    })
}

/// `uzswap dashboard`: prints where the page is served, or serves it here if no exporter does.
pub fn dashboard(address: &Address) -> Result<(), Failure> {
    if !uzswap_sys::process::is_root() {
        return Err(Failure::new("only root may read the figures; use sudo"));
    }
    if let Ok(running) = fs::read_to_string(note())
        && let Ok(running) = running.parse()
        && is_heard(&running)
    {
        show!("{}", url(&running.to_string()));
        return Ok(());
    }
    serve(address, |bound| match bound {
        Ok(bound) => show!("{} shows the cache; Ctrl-C ends it", url(bound)),
        Err(why) => say!("uzswap: {why}"),
    })
}

fn url(address: &str) -> String {
    match address.starts_with('/') {
        true => format!("curl --unix-socket {address} http://localhost/"),
        false => format!("http://{address}/"),
    }
}

fn is_heard(address: &Address) -> bool {
    match address {
        Address::Unix(path) => UnixStream::connect(path).is_ok(),
        Address::Loopback(address) => std::net::TcpStream::connect(address).is_ok(),
    }
}

enum Listener {
    Unix(UnixListener),
    Loopback(TcpListener),
}

impl Listener {
    async fn bind(address: &Address) -> io::Result<(Self, String)> {
        match address {
            Address::Unix(path) => {
                let is_socket =
                    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
                if is_socket && !is_heard(address) {
                    fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                Ok((Self::Unix(listener), address.to_string()))
            }
            Address::Loopback(address) => {
                let listener = TcpListener::bind(address).await?;
                let bound = listener.local_addr()?.to_string();
                Ok((Self::Loopback(listener), bound))
            }
        }
    }

    /// Serves connections, each until it is closed.
    async fn serve(self, history: Rc<RefCell<History>>) -> Infallible {
        let mut connections = VecDeque::with_capacity(CONNECTIONS_MAX);
        loop {
            let history = history.clone();
            let accepted = match &self {
                Self::Unix(listener) => {
                    listener.accept().await.map(|(stream, _)| answer(stream, false, history))
                }
                Self::Loopback(listener) => {
                    listener.accept().await.map(|(stream, _)| answer(stream, true, history))
                }
            };
            match accepted {
                Ok(connection) => connections.push_back(connection),
                // Either no descriptor is left, or the client has closed the connection already.
                Err(_) => {
                    connections.pop_front().iter().for_each(JoinHandle::abort);
                    tokio::time::sleep(PAUSE).await;
                }
            }
            connections.retain(|connection: &JoinHandle<()>| !connection.is_finished());
            if connections.len() > CONNECTIONS_MAX {
                connections.pop_front().iter().for_each(JoinHandle::abort);
            }
        }
    }
}

fn serve(address: &Address, say: impl FnOnce(Result<&str, &str>)) -> Result<(), Failure> {
    let wrong = |error: io::Error| {
        format!("cannot serve metrics at {address}: {error}; choose another address")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(wrong(error)))?;
    let local = tokio::task::LocalSet::new();
    let served: io::Result<Infallible> = local.block_on(&runtime, async {
        let (listener, bound) = match Listener::bind(address).await {
            Ok(bound) => bound,
            Err(error) => {
                let why = wrong(error);
                say(Err(&why));
                return Err(io::Error::other(why));
            }
        };
        say(Ok(&bound));
        let history = Rc::new(RefCell::new(History::default()));
        let sampled = history.clone();
        tokio::task::spawn_local(async move {
            let mut every = tokio::time::interval(page::EVERY);
            every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                every.tick().await;
                sampled.borrow_mut().add(&read());
            }
        });
        Ok(listener.serve(history).await)
    });
    match served {
        Ok(never) => match never {},
        Err(_) => Err(Failure::silent()),
    }
}

fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    is_port: bool,
    history: Rc<RefCell<History>>,
) -> JoinHandle<()> {
    let service = service_fn(move |request| {
        let response = match is_port && !names_this_machine(&request) {
            true => respond_with(StatusCode::MISDIRECTED_REQUEST, "text/plain", NOT_HERE.into()),
            false => respond(&request, &history.borrow(), is_port),
        };
        async move { Ok::<_, Infallible>(response) }
    });
    tokio::task::spawn_local(async move {
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(HEADER_BYTES_MAX);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        // An error means that the client is gone, speaks no HTTP, or takes too long.
        let _ = tokio::time::timeout(CONNECTED, connection).await;
    })
}

/// True if the request names this machine. Otherwise a page from elsewhere, whose name was made to
/// resolve to this machine, could have a browser here read the answer (DNS rebinding).
fn names_this_machine(request: &Request<Incoming>) -> bool {
    let host = request.headers().get(HOST).and_then(|value| value.to_str().ok());
    let Some(host) = host.and_then(|host| host.parse::<Authority>().ok()) else { return false };
    let name = host.host().trim_matches(['[', ']']);
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn respond(request: &Request<Incoming>, history: &History, is_port: bool) -> Response<Full<Bytes>> {
    let read = || if is_port { in_steps(read()) } else { read() };
    let wants_openmetrics = || {
        let accepts = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
        accepts.is_some_and(|accepts| accepts.contains("application/openmetrics-text"))
    };
    let (kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") if wants_openmetrics() => {
            ("application/openmetrics-text; version=1.0.0; charset=utf-8", read().openmetrics())
        }
        (&Method::GET, "/metrics") => ("text/plain; version=0.0.4; charset=utf-8", read().plain()),
        (&Method::GET, "/") => ("text/html; charset=utf-8", history.page(&read())),
        (&Method::GET, "/style.css") => ("text/css; charset=utf-8", page::STYLE.into()),
        _ => {
            return respond_with(
                StatusCode::NOT_FOUND,
                "text/plain",
                "see / and /metrics\n".into(),
            );
        }
    };
    respond_with(StatusCode::OK, kind, text)
}

fn respond_with(status: StatusCode, kind: &str, text: String) -> Response<Full<Bytes>> {
    // The browser loads nothing from other servers, and runs no scripts.
    const POLICY: &str = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action \
                          'none'; frame-ancestors 'none'";
    Response::builder()
        .status(status)
        .header(CONTENT_TYPE, kind)
        .header(CONTENT_SECURITY_POLICY, POLICY)
        .header("X-Content-Type-Options", "nosniff")
        .header(CACHE_CONTROL, "no-store")
        .body(Full::new(Bytes::from(text)))
        .expect("constants are headers")
}

/// Reads the present figures; empty if no daemon answers.
fn read() -> Scrape {
    let mut figures = Scrape { started: started(), ..Scrape::default() };
    let metrics = metrics::metrics();
    for (name, value) in all().lines().filter_map(|line| line.rsplit_once(' ')) {
        let Ok(value) = value.parse() else { continue };
        if let Some((file, bound)) = name.split_once(' ') {
            match file {
                FAULT_TIMES => figures.faults.add(bound, value),
                _ => figures.remote_reads.add(bound, value),
            }
        } else if let Some(metric) = metrics.iter().find(|metric| metric.statistic == name) {
            figures.statistics.insert(metric.statistic, value);
        }
    }
    figures
}

/// Rounds the figures that not every user may know exactly.
fn in_steps(mut figures: Scrape) -> Scrape {
    for name in OF_SAME_PAGES {
        figures.statistics.entry(name).and_modify(|value| *value -= *value % STEP);
    }
    figures
}

/// All statistics, by one read, since the daemon makes the text anew for each read.
fn all() -> String {
    let mut text = vec![0; 64 << 10];
    let file = File::open(folder::mount().join(STATISTICS_FOLDER).join(ALL));
    let count = file.and_then(|mut file| file.read(&mut text)).unwrap_or(0);
    String::from_utf8_lossy(&text[..count]).into_owned()
}

/// When the daemon started, seconds since the epoch.
fn started() -> Option<f64> {
    let daemon = LedgerState::read().ok()?.daemon?;
    let since_boot = daemon.started as f64 / rustix::param::clock_ticks_per_second() as f64;
    let up = fs::read_to_string("/proc/uptime").ok()?;
    let up: f64 = up.split(' ').next()?.parse().ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    // Rounded to seconds, since the clocks are not read at the same time.
    Some((now - up + since_boot).round())
}

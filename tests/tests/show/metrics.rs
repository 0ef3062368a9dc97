//! `--metrics`: Prometheus scrapes the metrics while the kernel swaps. Rules and dashboard name
//! only metrics that exist. A browser shows the page.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uzswap_tests::{Limited, Machine, Served, process_of, program, wait_for};

/// Swaps 96 MiB out, and reads them in again until it is told to end.
const SWAPPING: &str = "import os\n\
                        a=[b'page %d ' % i * 400 for i in range(24576)]\n\
                        print('filled', flush=True)\n\
                        while True: sum(map(len, map(bytes.upper, a)))";

/// A process that is killed when the value is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn ask(stream: impl Read + Write, path: &str) -> String {
    ask_by("localhost", stream, path)
}

fn ask_by(host: &str, mut stream: impl Read + Write, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: &str, path: &str) -> String {
    ask(TcpStream::connect(address).unwrap(), path)
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

fn serve(address: &str) -> Served {
    Served::start(&["--size", "1G", "--pool", "400M", "--backing", "none", "--metrics", address])
}

fn end(mut served: Served) {
    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
}

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/prometheus").join(name)
}

#[test]
fn prometheus_scrapes_the_metrics_while_the_kernel_swaps() {
    let Some(machine) = Machine::take() else { return };
    let address = format!("127.0.0.1:{}", free_port());
    let served = serve(&address);
    let limited = Limited::new(32 << 20);
    let mut swapping = Killed(limited.start(&["python3", "-c", SWAPPING]));
    let mut said = BufReader::new(swapping.0.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "filled");

    let scraped = get(&address, "/metrics");
    check("metrics", &[], body(&scraped));
    let folder = tempfile::tempdir().unwrap();
    let configuration = folder.path().join("prometheus.yml");
    let rules = packaging("uzswap.rules.yml").canonicalize().unwrap();
    let text = format!(
        "global: {{ scrape_interval: 1s }}\nrule_files: ['{}']\nscrape_configs:\n\
         - {{ job_name: uzswap, static_configs: [{{ targets: ['{address}'] }}] }}\n",
        rules.display()
    );
    fs::write(&configuration, text).unwrap();
    let listens = format!("127.0.0.1:{}", free_port());
    let prometheus = Command::new("prometheus")
        .arg(format!("--config.file={}", configuration.display()))
        .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
        .arg(format!("--web.listen-address={listens}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("prometheus is installed by ./setup tests");
    let prometheus = Killed(prometheus);
    assert!(wait_for(|| TcpStream::connect(&listens).is_ok()));
    let query = "/api/v1/query?query=uzswap_pages_swapped_out_total%20%3E%2012000";
    let knows = || get(&listens, query).contains("\"__name__\":\"uzswap_pages_swapped_out_total\"");
    assert!(wait_for(knows), "{}", get(&listens, query));
    let query = "/api/v1/query?query=uzswap_fault_seconds_count%20%3E%200";
    assert!(wait_for(|| get(&listens, query).contains("uzswap_fault_seconds_count")));
    drop(prometheus);
    let each = cost_of_a_scrape(&served, &address);
    println!("a scrape takes {each:?} of CPU");
    assert!(each < Duration::from_millis(5), "a scrape takes {each:?} of CPU");
    drop((swapping, limited));
    end(served);
    machine.assert_as_before();
}

/// CPU time of a scrape while the kernel swaps: of the exporter, and of the daemon's thread for
/// control files.
fn cost_of_a_scrape(served: &Served, address: &str) -> Duration {
    const SCRAPES: u32 = 100;
    let used = || cpu_of(exporter_of(served), "") + cpu_of(process_of("daemon"), "fuser-");
    let before = used();
    for _ in 0..SCRAPES {
        assert!(body(&get(address, "/metrics")).contains("uzswap_pages_swapped_out_total"));
    }
    (used() - before) / SCRAPES
}

/// CPU time of a process's threads whose names begin with `name`.
fn cpu_of(pid: i32, name: &str) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|thread| thread.unwrap());
    let read = |folder: &Path, file: &str| fs::read_to_string(folder.join(file)).unwrap();
    let threads = threads.filter(|thread| read(&thread.path(), "comm").starts_with(name));
    let used = threads.map(|thread| {
        let text = read(&thread.path(), "schedstat");
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    });
    let used: Vec<_> = used.collect();
    assert!(!used.is_empty(), "no thread of {pid} is named {name}");
    used.into_iter().sum()
}

fn exporter_of(served: &Served) -> i32 {
    let pid = served.child.id();
    let mut exporter = None;
    assert!(wait_for(|| {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let mut children = children.split_whitespace();
        exporter = children.find_map(|child| {
            let command = fs::read_to_string(format!("/proc/{child}/cmdline")).ok()?;
            command.contains("exporter").then(|| child.parse().unwrap())
        });
        exporter.is_some()
    }));
    exporter.unwrap()
}

#[test]
fn a_killed_exporter_is_started_again_at_the_same_address() {
    let Some(machine) = Machine::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    for address in [folder.path().join("metrics").to_str().unwrap(), "127.0.0.1:0"] {
        let served = serve(address);
        let dashboard =
            || Command::new(program("uzswap")).arg("dashboard").output().unwrap().stdout;
        let before = dashboard();
        let killed = exporter_of(&served);
        uzswap_sys::process::kill(killed, libc::SIGKILL).unwrap();
        assert!(wait_for(|| exporter_of(&served) != killed));
        let is_there = || match String::from_utf8_lossy(&before).strip_prefix("http://") {
            Some(port) => TcpStream::connect(port.trim_end().trim_end_matches('/')).is_ok(),
            None => UnixStream::connect(address).is_ok(),
        };
        assert!(wait_for(is_there));
        assert_eq!(dashboard(), before);
        end(served);
    }
    machine.assert_as_before();
}

/// Checks a text with promtool.
fn check(what: &str, arguments: &[&str], text: &str) {
    let mut promtool = Command::new("promtool")
        .args(["check", what])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("prometheus is installed by ./setup tests");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let checked = promtool.wait_with_output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    assert!(checked.stderr.is_empty(), "{checked:?}");
}

#[test]
fn rules_and_dashboard_name_metrics_that_there_are() {
    let Some(_machine) = Machine::take() else { return };
    check("rules", &[packaging("uzswap.rules.yml").to_str().unwrap()], "");
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let served = serve(socket.to_str().unwrap());
    let scraped = ask(UnixStream::connect(&socket).unwrap(), "/metrics");
    let there: BTreeSet<_> = names(body(&scraped)).collect();
    for file in ["uzswap.rules.yml", "grafana.json"] {
        let text = fs::read_to_string(packaging(file)).unwrap();
        let named: Vec<_> = names(&text).collect();
        assert!(named.len() > 5, "{named:?}");
        for name in named {
            assert!(there.contains(&name), "{file}: {name}");
        }
    }
    end(served);
    assert!(!socket.exists());
}

/// The words in a text that look like our metrics.
fn names(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("uzswap_")).map(str::to_owned)
}

#[test]
fn an_address_of_other_machines_or_in_use_is_refused_and_nothing_is_changed() {
    let Some(machine) = Machine::take() else { return };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "somebody's").unwrap();
    let cases = [
        ("0.0.0.0:9811", "other machines"),
        (taken.as_str(), "choose another address"),
        (file.to_str().unwrap(), "choose another address"),
    ];
    for (address, why) in cases {
        let output = Command::new(program("uzswap"))
            .args(["serve", "--size", "64M", "--backing", "none", "--metrics", address])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{address}: {said}");
        assert!(said.contains(why) && said.contains(address), "{address}: {said}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "somebody's");
    machine.assert_as_before();
}

#[test]
fn a_browser_draws_the_page_with_nothing_from_elsewhere() {
    let Some(machine) = Machine::take() else { return };
    let address = format!("127.0.0.1:{}", free_port());
    let served = serve(&address);
    let answer = get(&address, "/");
    assert!(answer.contains("default-src 'none'; style-src 'self'"), "{answer}");
    for (host, status) in [("127.0.0.1:80", 200), ("[::1]", 200), ("page.example", 421)] {
        let answer = ask_by(host, TcpStream::connect(&address).unwrap(), "/");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{host}: {answer}");
    }
    let output = Command::new(program("uzswap")).arg("dashboard").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("http://{address}/\n"));
    let profile = tempfile::tempdir().unwrap();
    let browser = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("http://{address}/"))
        .output()
        .expect("chromium is installed by ./setup tests");
    let drawn = String::from_utf8_lossy(&browser.stdout);
    assert_eq!(drawn.matches("<svg").count(), 6, "{drawn} {browser:?}");
    assert!(drawn.contains("Pages a second") && !drawn.contains("<script"), "{drawn}");
    end(served);
    machine.assert_as_before();
}

#[test]
fn many_connections_neither_end_the_exporter_nor_make_it_large() {
    use std::os::fd::OwnedFd;
    let address = format!("127.0.0.1:{}", free_port());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    // The exporter has few descriptors left, as after a client has opened many connections.
    let child = Command::new("prlimit")
        .arg("--nofile=40:40")
        .arg(program("uzswap"))
        .args(["exporter", &address])
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut exporter = Killed(child);
    let mut said = [0; 64];
    assert!(ours.read(&mut said).unwrap() > 0);
    let bytes = || uzswap_sys::process::resident_bytes(exporter.0.id() as i32).unwrap_or(u64::MAX);
    let before = bytes();
    let header = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}", "a".repeat(300_000));
    let connect = |_| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_nonblocking(true).unwrap();
        // An error means that the exporter accepts no more.
        let _ = stream.write(header.as_bytes());
        stream
    };
    let connections: Vec<_> = (0..200).map(connect).collect();
    std::thread::sleep(Duration::from_secs(1));
    let most = bytes();
    assert!(most < before + (16 << 20), "{before} bytes before, {most} now");
    drop(connections);
    assert!(get(&address, "/metrics").starts_with("HTTP/1.1 200"));
    assert!(exporter.0.try_wait().unwrap().is_none());
}

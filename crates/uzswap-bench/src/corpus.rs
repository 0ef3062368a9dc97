//! Pages to measure with, recorded from the memory of real programs on this machine.
//!
//! Each program is started and runs until its heap is full. Then `uzswap record` records it.
//! Recordings are kept, so that all benchmarks on a machine use the same pages.

use crate::bench::Bench;
use crate::error::{Context, Failure};
use crate::install::{is_there, packages, shell};
use crate::peer::{FOLDER, uzswap};
use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::process;

/// The maximum number of pages that are kept of a program: 96 MiB.
const PAGES_MAX: usize = 96 << 20 >> 12;
/// If there are more, runs of this length are kept or left out, because neighbours are alike.
const RUN_PAGES: usize = 16;
/// Pages of a corpus in a test.
const SMOKE_PAGES: usize = 512;

/// A program whose memory is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Parses its standard library, and keeps the syntax trees.
    Python,
    /// Compiles C++ with many templates.
    Compiler,
    /// A key-value server loaded with JSON.
    Redis,
    /// Arrays of floats.
    Numpy,
    /// Parses its own library, and keeps the syntax trees.
    Node,
}

pub const ALL: [Program; 5] =
    [Program::Python, Program::Compiler, Program::Redis, Program::Numpy, Program::Node];

/// Memory of one program.
pub struct Corpus {
    /// The program.
    pub name: &'static str,
    /// The file of the pages.
    pub file: PathBuf,
    /// Pages that are neither one word repeated nor equal to an earlier one.
    pub pages: Vec<Page>,
    /// All pages, in their order.
    pub all: Vec<Page>,
    /// Pages of one repeated word.
    pub same_filled: usize,
    /// Pages equal to an earlier one.
    pub duplicates: usize,
}

/// When its heap is full, it waits until its standard input ends.
const PYTHON: &str = "
import ast, pathlib, sys, sysconfig
kept = []
for path in sorted(pathlib.Path(sysconfig.get_paths()['stdlib']).glob('*.py')):
    try: kept.append(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError): pass
print('ready', flush=True)
sys.stdin.read()
";

/// A third are random walks, like measured series. The rest is typical of programs: single
/// precision, rounded, sorted times, labels, and an eighth of plain noise.
const NUMPY: &str = "
import sys, numpy
rng = numpy.random.default_rng(1)
n = 1 << 20
walks = [numpy.cumsum(rng.standard_normal(n)) for _ in range(3)]
singles = [numpy.cumsum(rng.standard_normal(n)).astype('f4') for _ in range(4)]
rounded = [numpy.round(100 + numpy.cumsum(rng.standard_normal(n)), 2) for _ in range(2)]
times = [numpy.cumsum(rng.integers(1, 2000, n)) for _ in range(2)]
labels = [rng.integers(0, 50, n).astype('i4') for _ in range(2)]
noise = rng.random(n)
print('ready', flush=True)
sys.stdin.read()
";

const NODE: &str = "
const parser = require('internal/deps/acorn/acorn/dist/acorn');
const { natives } = require('internal/test/binding').internalBinding('builtins');
const kept = [];
for (const [name, text] of Object.entries(natives)) {
  try {
    kept.push(parser.parse(text, { ecmaVersion: 'latest', sourceType: 'module', locations: true,
                                   allowReturnOutsideFunction: true }));
  } catch { }
}
console.log('ready');
process.stdin.resume();
process.stdin.on('end', () => process.exit(kept.length === 0));
";

const COMPILER: &str = "
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <regex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>
template <int N> struct Shape {
  std::map<std::string, std::vector<std::tuple<int, std::string, Shape<N - 1>>>> parts;
  std::unordered_map<std::string, std::function<bool(const Shape<N - 1> &)>> tests;
  std::variant<int, std::string, std::vector<Shape<N - 1>>> value;
  int count(const std::regex &pattern) const {
    int n = 0;
    for (auto &[name, list] : parts) {
      if (std::regex_search(name, pattern)) ++n;
      for (auto &[a, b, c] : list) n += a + std::regex_match(b, pattern) + c.count(pattern);
    }
    return n;
  }
  void sort() {
    for (auto &[name, list] : parts)
      std::stable_sort(list.begin(), list.end(),
                       [](auto &a, auto &b) { return std::get<1>(a) < std::get<1>(b); });
  }
};
template <> struct Shape<0> {
  int count(const std::regex &) const { return 0; }
};
int main() { Shape<60> shape; shape.sort(); return shape.count(std::regex(\"a+b\")); }
";

/// The compiler is recorded at this size.
const COMPILER_BYTES: u64 = 150 << 20;
const DOCUMENTS_BYTES: usize = 90 << 20;

impl Program {
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Compiler => "c++ compiler",
            Self::Redis => "redis, JSON",
            Self::Numpy => "numpy",
            Self::Node => "node",
        }
    }

    fn path(self) -> PathBuf {
        let name = match self {
            Self::Python => "python",
            Self::Compiler => "compiler",
            Self::Redis => "redis",
            Self::Numpy => "numpy",
            Self::Node => "node",
        };
        Path::new(FOLDER).join(name).with_extension("pages")
    }

    /// The file of the program's pages. If there is no file, the program is recorded now.
    pub fn file(self) -> Result<PathBuf, Failure> {
        let path = self.path();
        if path.exists() {
            return Ok(path);
        }
        eprintln!("uzswap-bench: recording the memory of {}", self.name());
        fs::create_dir_all(FOLDER).context(FOLDER)?;
        let program = match self {
            Self::Python => ready(Command::new("python3").args(["-c", PYTHON])),
            Self::Numpy => ready(Command::new(numpy()?).args(["-c", NUMPY])),
            Self::Node => node(),
            Self::Redis => redis(),
            Self::Compiler => compiler(),
        }?;
        record(program.recorded(), &path)?;
        Ok(path)
    }

    pub fn corpus(self, pages_max: usize) -> Result<Corpus, Failure> {
        read(self.name(), self.file()?, pages_max)
    }
}

pub fn read(name: &'static str, path: PathBuf, pages_max: usize) -> Result<Corpus, Failure> {
    let bytes = fs::read(&path).context(&path.display().to_string())?;
    let all: Vec<Page> = bytes.as_chunks().0.iter().take(pages_max).copied().collect();
    let mut seen = HashSet::new();
    let (mut pages, mut same_filled, mut duplicates) = (Vec::new(), 0, 0);
    for page in &all {
        if is_same_filled(page) {
            same_filled += 1;
        } else if seen.insert(page) {
            pages.push(*page);
        } else {
            duplicates += 1;
        }
    }
    match pages.is_empty() {
        true => Err(Failure::new(format!("{}: no pages; remove it", path.display()))),
        false => Ok(Corpus { name, file: path, pages, all, same_filled, duplicates }),
    }
}

fn is_same_filled(page: &Page) -> bool {
    page.as_chunks::<8>().0.windows(2).all(|pair| pair[0] == pair[1])
}

pub struct Corpora {
    /// The corpora that could be recorded.
    pub found: Vec<Corpus>,
    /// Name and reason of each of the others.
    pub missing: Vec<(String, String)>,
}

/// All corpora. Records the missing corpora.
pub fn corpora(bench: &Bench) -> Result<Corpora, Failure> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    let programs = bench.pick(&ALL[..1], &ALL[..], &ALL[..]);
    for program in programs {
        bench.interrupt.check()?;
        match program.corpus(bench.pick(SMOKE_PAGES, PAGES_MAX, PAGES_MAX)) {
            Ok(corpus) => found.push(corpus),
            Err(failure) => missing.push((program.name().into(), failure.to_string())),
        }
    }
    match found.is_empty() {
        true => Err(Failure::new(format!("no pages to measure with: {missing:?}"))),
        false => Ok(Corpora { found, missing }),
    }
}

/// A running program, which ends when this value is dropped.
pub struct Running {
    child: Child,
    /// The process to record, if that is not the child.
    pid: Option<i32>,
    /// The folder of its files.
    _folder: Option<tempfile::TempDir>,
}

impl Running {
    fn recorded(&self) -> i32 {
        self.pid.unwrap_or(self.child.id() as i32)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        if let Some(pid) = self.pid {
            let _ = process::kill(pid, 9);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a program that prints a line when its heap is full, and waits for the line.
fn ready(command: &mut Command) -> Result<Running, Failure> {
    let what = command.get_program().to_string_lossy().into_owned();
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut running = Running { child: spawned.context(&what)?, pid: None, _folder: None };
    let mut line = String::new();
    let stdout = running.child.stdout.take();
    let stdout = stdout.ok_or_else(|| Failure::new(format!("{what}: no pipe")))?;
    BufReader::new(stdout).read_line(&mut line).context(&what)?;
    match line.trim() {
        "ready" => Ok(running),
        _ => Err(Failure::new(format!("{what}: it ended before its heap was full"))),
    }
}

/// A Python with numpy: the system's, or one that is installed in its own folder.
fn numpy() -> Result<PathBuf, Failure> {
    let has = |python: &Path| {
        let mut command = Command::new(python);
        command.args(["-c", "import numpy"]).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let own = Path::new(FOLDER).join("venv/bin/python3");
    if let Some(python) = [PathBuf::from("python3"), own.clone()].into_iter().find(|p| has(p)) {
        return Ok(python);
    }
    eprintln!("uzswap-bench: installing numpy into {FOLDER}/venv");
    shell("python3 -m venv venv && venv/bin/pip -q install numpy", Path::new(FOLDER))?;
    Ok(own)
}

fn node() -> Result<Running, Failure> {
    if !is_there("node") {
        packages(&["nodejs"])?;
    }
    // The parser is among node's internals.
    ready(Command::new("node").args(["--expose-internals", "--no-warnings", "-e", NODE]))
}

/// A running server full of documents.
fn redis() -> Result<Running, Failure> {
    let (running, socket) = server()?;
    let stream = UnixStream::connect(&socket).context("redis-server")?;
    load(stream).context("redis-server")?;
    Ok(running)
}

/// Starts a server that writes no file. Returns it with its socket.
pub fn server() -> Result<(Running, PathBuf), Failure> {
    const SERVER: &str = "redis-server";
    // The package of tools installs no service. One of the tools is the server under another name.
    const TOOL: &str = "redis-check-rdb";
    if !is_there(SERVER) && !is_there(TOOL) {
        packages(&["redis-tools"])?;
    }
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let socket = folder.path().join("socket");
    let mut command = Command::new(if is_there(SERVER) { SERVER } else { TOOL });
    command.arg0(SERVER).args(["--port", "0", "--save", "", "--appendonly", "no"]);
    command.arg("--unixsocket").arg(&socket).arg("--dir").arg(folder.path());
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context(SERVER)?;
    let running = Running { child, pid: None, _folder: Some(folder) };
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match UnixStream::connect(&socket) {
            Ok(_) => return Ok((running, socket)),
            Err(error) if Instant::now() > end => {
                return Err(error).context("redis-server does not answer");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Loads documents like those of a shop, in the server's protocol.
fn load(stream: UnixStream) -> std::io::Result<()> {
    const NAMES: [&str; 8] =
        ["Ada", "Björn", "Chiara", "Dmitri", "Emeka", "Fatima", "Grace", "Hiroshi"];
    const CITIES: [&str; 6] = ["Lisboa", "Kraków", "Nairobi", "Osaka", "Quito", "Tromsø"];
    const ITEMS: [&str; 6] = ["kettle", "lamp", "notebook", "bicycle bell", "rope", "chair"];
    let mut noise = Noise::new(11);
    let mut values = Values::begin(&stream)?;
    let (mut number, mut bytes) = (0, 0);
    while bytes < DOCUMENTS_BYTES {
        let mut pick = |from: &[&'static str]| from[noise.below(from.len() as u64) as usize];
        let (name, city) = (pick(&NAMES), pick(&CITIES));
        let lines: Vec<String> = (0..1 + number % 4)
            .map(|_| {
                let item = pick(&ITEMS);
                let price = 1.0 + number as f64 % 97.0;
                format!(r#"{{"item":"{item}","quantity":{},"price":{price:.2}}}"#, number % 5 + 1)
            })
            .collect();
        let document = format!(
            r#"{{"id":"{:016x}","customer":{{"name":"{name}","email":"{}{}@example.com","city":"{city}"}},"created":"2026-{:02}-{:02}T{:02}:{:02}:00Z","paid":{},"lines":[{}]}}"#,
            noise.word(),
            name.to_lowercase(),
            noise.below(10_000),
            noise.below(12) + 1,
            noise.below(28) + 1,
            noise.below(24),
            noise.below(60),
            number % 3 > 0,
            lines.join(",")
        );
        values.set(&format!("order:{number}"), &document)?;
        bytes += document.len();
        number += 1;
    }
    values.end()
}

/// Writes values to a server, in its protocol.
pub struct Values<'a> {
    out: BufWriter<&'a UnixStream>,
    reader: JoinHandle<std::io::Result<u64>>,
}

impl<'a> Values<'a> {
    /// Starts a thread that reads the answers. Otherwise the server would wait for us.
    pub fn begin(stream: &'a UnixStream) -> std::io::Result<Self> {
        let mut answers = stream.try_clone()?;
        let reader = std::thread::spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
        Ok(Self { out: BufWriter::new(stream), reader })
    }

    pub fn set(&mut self, key: &str, value: &str) -> std::io::Result<()> {
        write!(self.out, "*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n", key.len())?;
        write!(self.out, "${}\r\n{value}\r\n", value.len())
    }

    /// Waits until the server has all values.
    pub fn end(mut self) -> std::io::Result<()> {
        self.out.write_all(b"*1\r\n$4\r\nQUIT\r\n")?;
        self.out.flush()?;
        // The server answers QUIT last, and closes the connection.
        match self.reader.join() {
            Ok(read) => read.map(drop),
            Err(_) => Err(std::io::ErrorKind::Other.into()),
        }
    }
}

/// A compiler, suspended in the middle of its work.
fn compiler() -> Result<Running, Failure> {
    if !is_there("g++") {
        packages(&["g++"])?;
    }
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let source = folder.path().join("shape.cpp");
    fs::write(&source, COMPILER).context("the source to compile")?;
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O2", "-g", "-c", "-o", "/dev/null"]).arg(&source);
    let child = command.stdin(Stdio::null()).spawn().context("g++")?;
    let mut running = Running { child, pid: None, _folder: Some(folder) };
    let id = running.child.id();
    loop {
        if running.child.try_wait().context("g++")?.is_some() {
            return Err(Failure::new("g++ ended before it had grown; is it a C++17 compiler?"));
        }
        let children = format!("/proc/{id}/task/{id}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        let pid = children.split_whitespace().find_map(|pid| pid.parse::<i32>().ok());
        if let Some(pid) =
            pid.filter(|pid| process::resident_bytes(*pid).unwrap_or(0) >= COMPILER_BYTES)
        {
            process::kill(pid, signal_hook::consts::SIGSTOP).context("g++")?;
            running.pid = Some(pid);
            return Ok(running);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Records a process, and keeps at most [`PAGES_MAX`] of its pages, from all parts of its memory.
fn record(pid: i32, path: &Path) -> Result<(), Failure> {
    let fresh = path.with_extension("new");
    // An error means that there is no file of an interrupted run.
    let _ = fs::remove_file(&fresh);
    let mut command = Command::new(uzswap()?);
    command.args(["record", "--pid", &pid.to_string(), "--out"]).arg(&fresh);
    let output = command.output().context("uzswap record")?;
    if !output.status.success() {
        return Err(Failure::new(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let what = fresh.display().to_string();
    let bytes = fs::read(&fresh).context(&what)?;
    let runs: Vec<&[u8]> = bytes.chunks(RUN_PAGES * PAGE_BYTES).collect();
    let step = bytes.len().div_ceil(PAGES_MAX * PAGE_BYTES).max(1);
    let kept: Vec<u8> = runs.into_iter().step_by(step).flatten().copied().collect();
    fs::write(&fresh, kept).context(&what)?;
    fs::rename(&fresh, path).context(&what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_word_repeated_is_same_filled() {
        let mut page = [7; PAGE_BYTES];
        assert!(is_same_filled(&page));
        page[4095] = 8;
        assert!(!is_same_filled(&page));
    }
}

//! `calls`: the cost of an idle `run --in-process` for loops of system calls and for programs, each
//! run alone and in-process. Also the time of a call after a program's calls were replaced.

use crate::bench::{Bench, Candidate, Turns};
use crate::error::{Context, Failure};
use crate::figures::median;
use crate::install::{is_there, packages};
use crate::machine::Changes;
use crate::peer::{Peer, Room};
use crate::report::{Section, Table};
use crate::starts;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub struct CallsArguments {
    /// Calls of each kind in a round [default: 2 000 000].
    #[arg(long)]
    pub calls: Option<usize>,
}

/// Arguments of the measured program.
#[derive(Debug, Args)]
pub struct MakeArguments {
    /// Calls of each kind.
    #[arg(long)]
    calls: usize,
    /// Memory to touch first, MiB.
    #[arg(long)]
    mib: usize,
}

/// Times of a call, ns, for each kind in [`KINDS`].
#[derive(Debug, Serialize, Deserialize)]
struct CallTimes {
    ns: Vec<f64>,
}

const KINDS: [&str; 3] = ["getppid", "read of a byte", "write of a byte"];
/// The calls of each kind are made in this many parts, and the median part counts.
const PARTS: usize = 20;
/// Memory of a program that is taken over, and the part that the program uses, MiB.
const TAKEN: (u64, usize) = (64, 56);
/// After this time a takeover is complete.
const SETTLED: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Alone,
    Spare,
    TakenOver,
}

/// A way to run a command.
struct Runner {
    how: How,
}

/// Programs: the name, the number of runs, and the shell command for one run.
const SCRIPTS: [(&str, usize, &str); 2] = [
    ("git status", 200, "git status > /dev/null"),
    ("tar of /usr/share/doc", 20, "tar cf - /usr/share/doc | cat > /dev/null"),
];

impl Candidate for Runner {
    fn name(&self) -> String {
        match self.how {
            How::Alone => "alone".into(),
            How::Spare => "in-process, memory to spare".into(),
            How::TakenOver => "in-process, taken over".into(),
        }
    }

    fn missing(&self) -> Option<String> {
        match self.how {
            How::Alone => None,
            _ => Peer::IN_PROCESS.missing(),
        }
    }
}

pub fn run(bench: &Bench, arguments: &CallsArguments) -> Result<Section, Failure> {
    if !is_there("git") {
        packages(&["git"])?;
    }
    let calls = arguments.calls.unwrap_or(bench.pick(10_000, 500_000, 2_000_000));
    let calls = calls.next_multiple_of(PARTS);
    let rounds = bench.rounds(5, 15);
    let ways = |hows: &[How]| hows.iter().map(|how| Runner { how: *how }).collect();
    let made: Vec<Runner> = ways(&[How::Alone, How::Spare, How::TakenOver]);
    let own = std::env::current_exe().context("the path of this program")?;
    let turns = bench.take_turns(&made, rounds, |way| {
        let (memory, mib) = match way.how {
            How::TakenOver => (TAKEN.0 << 20, TAKEN.1),
            _ => (8 << 30, 1),
        };
        let command = [
            own.display().to_string(),
            "make-calls".into(),
            format!("--calls={calls}"),
            format!("--mib={mib}"),
        ];
        let (_, stdout) = measure(bench, way.how, memory, &command)?;
        serde_json::from_str::<CallTimes>(&stdout).context("the program's output")
    })?;
    let mut section = Section::new("calls", "System calls, and programs with memory to spare")
        .text(format!(
            "{calls} calls of each kind, ns a call; medians of {rounds} rounds. Taken over, the \
             program has {} MiB and has touched {}.",
            TAKEN.0, TAKEN.1
        ))
        .table(of_calls(&turns))
        .raw("calls", &turns)?;
    let starts = bench.pick(5, 300, 1500);
    let command = [own.display().to_string(), "make-starts".into(), format!("--starts={starts}")];
    let (_, stdout) = measure(bench, How::Spare, 8 << 30, &command)?;
    let made: Vec<starts::StartTimes> =
        serde_json::from_str(&stdout).context("the program's output")?;
    section = section
        .text(format!("Programs, each started {starts} times in each way, in turns; medians."))
        .table(starts::table(&made))
        .raw("starts", &made)?;
    let mut rows = Vec::new();
    for (name, times, once) in SCRIPTS {
        let times = bench.pick(times / 20, times, times);
        let name = format!("{name}, {times} times");
        let ways: Vec<Runner> = ways(&[How::Alone, How::Spare]);
        let script = format!("for i in $(seq {times}); do {once}; done");
        let command = ["sh".into(), "-c".into(), script];
        let turns = bench.take_turns(&ways, rounds, |way| {
            measure(bench, way.how, 8 << 30, &command).map(|(seconds, _)| seconds)
        })?;
        let [alone, spare] = [0, 1].map(|at| turns[at].median(|seconds| *seconds));
        let ratio = turns[1].paired(&turns[0], |own, alone| own / alone);
        rows.push(vec![
            name.clone(),
            format!("{alone:.3}"),
            format!("{spare:.3}"),
            format!("{ratio:.3}"),
        ]);
        section = section.raw(&name, &turns)?;
    }
    let header = ["program", "alone (s)", "in-process, memory to spare (s)", "ratio"];
    Ok(section.table(Table::new(&header, rows)))
}

/// Runs a command in the folder of this program's sources. Returns the seconds and the output.
fn measure(
    bench: &Bench,
    how: How,
    memory: u64,
    command: &[String],
) -> Result<(f64, String), Failure> {
    let room = Room::beside_the_pool(memory);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    std::env::set_current_dir(folder).context("the sources of this program")?;
    let peer = match how {
        How::Alone => Peer::Alone,
        _ => Peer::IN_PROCESS,
    };
    let measured = peer.run(&mut Changes::begin(), room, command, &bench.interrupt)?;
    Ok((measured.seconds, measured.stdout))
}

fn of_calls(turns: &[Turns<CallTimes>]) -> Table {
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let cell = |kind: usize| {
                let more = own.paired(&turns[0], |own, alone| own.ns[kind] - alone.ns[kind]);
                format!("{:.0} ({more:+.0})", own.median(|run| run.ns[kind]))
            };
            (0..KINDS.len()).map(cell).collect()
        })
    });
    let header: Vec<_> = ["ns a call"].into_iter().chain(KINDS).collect();
    Table::new(&header, rows.collect())
}

/// The measured program: makes calls, and prints a [`CallTimes`] as JSON.
pub fn make(arguments: &MakeArguments) -> Result<(), Failure> {
    let memory = vec![1u8; arguments.mib << 20];
    if arguments.mib > 1 {
        std::thread::sleep(SETTLED);
    }
    let mut zero = File::open("/dev/zero").context("/dev/zero")?;
    let mut null = File::options().write(true).open("/dev/null").context("/dev/null")?;
    let mut byte = [0u8; 1];
    let ns = vec![
        time(arguments.calls, || {
            black_box(std::os::unix::process::parent_id());
            Ok(())
        })?,
        time(arguments.calls, || zero.read(&mut byte).map(drop))?,
        time(arguments.calls, || null.write(&[1]).map(drop))?,
    ];
    black_box(&memory);
    println!("{}", serde_json::to_string(&CallTimes { ns }).context("the times")?);
    Ok(())
}

/// The time of a call, ns.
fn time(calls: usize, mut call: impl FnMut() -> std::io::Result<()>) -> Result<f64, Failure> {
    let mut parts = Vec::with_capacity(PARTS);
    for _ in 0..PARTS {
        let began = Instant::now();
        for _ in 0..calls / PARTS {
            call().context("a system call")?;
        }
        parts.push(began.elapsed().as_nanos() as f64 / (calls / PARTS) as f64);
    }
    Ok(median(parts))
}

//! `forks`: the time of a fork, for a program with more data than memory.

use crate::bench::{Bench, Turns};
use crate::error::{Context, Failure};
use crate::figures::median;
use crate::install::{is_there, packages};
use crate::machine::Changes;
use crate::peer::{Peer, Room};
use crate::report::{Section, Table};
use clap::Args;
use serde::{Deserialize, Serialize};

#[derive(Debug, Args)]
pub struct ForksArguments {
    /// Data of the program, MiB [default: 512]. Its memory is a third of that.
    #[arg(long, value_parser = clap::value_parser!(u64).range(64..))]
    pub mib: Option<u64>,
}

/// The output of the measured program.
#[derive(Debug, Serialize, Deserialize)]
struct Forked {
    mib: u64,
    ms: Vec<f64>,
}

/// Data, as a multiple of the memory.
const RATIO: u64 = 3;
const PROGRAM: &str = include_str!("forks.py");

pub fn run(bench: &Bench, arguments: &ForksArguments) -> Result<Section, Failure> {
    if !is_there("python3") {
        packages(&["python3"])?;
    }
    let mib = arguments.mib.unwrap_or(bench.pick(96, 192, 512));
    let forks = bench.pick(5, 30, 100);
    let rounds = bench.rounds(1, 5);
    let memory = (mib << 20) / RATIO;
    let peers =
        [Peer::Alone, Peer::Plain, Peer::Zram { compressor: "lz4".into() }, Peer::IN_PROCESS];
    let arguments = [mib.to_string(), forks.to_string()];
    let command = ["python3", "-c", PROGRAM].into_iter().map(str::to_owned).chain(arguments);
    let command: Vec<_> = command.collect();
    let turns = bench.take_turns(&peers, rounds, |peer| {
        let room = Room { pool: Some(memory), ..Room::beside_the_pool(memory) };
        let measured = peer.run(&mut Changes::begin(), room, &command, &bench.interrupt)?;
        serde_json::from_str::<Forked>(&measured.stdout).context("the program's output")
    })?;
    let header = ["fork", "median (ms)", "at most (ms)", "against alone"];
    Section::new("forks", "A fork of a program with more data than memory")
        .text(format!(
            "A Python program with {mib} MiB of the contents of files in {} MiB, zram's pool \
             included, or in all memory. It forks {forks} times, and writes to 100 of its pages \
             before each. The time of the call of fork; medians of {rounds} rounds.",
            memory >> 20
        ))
        .table(Table::new(&header, rows(&turns)))
        .raw("forks", &turns)
}

fn rows(turns: &[Turns<Forked>]) -> Vec<Vec<String>> {
    let middle = |run: &Forked| median(run.ms.iter().copied());
    let most = |run: &Forked| run.ms.iter().copied().fold(0.0, f64::max);
    let row = |own: &Turns<Forked>| {
        let against = own.paired(&turns[0], |own, alone| middle(own) / middle(alone));
        let figures = [own.median(middle), own.median(most), against];
        figures.map(|figure| format!("{figure:.2}")).to_vec()
    };
    turns.iter().map(|own| own.row(row)).collect()
}

//! `java`: transactions on a heap that grows beyond its memory, beside zram, with equal memory in
//! total. SPECjbb, the common benchmark of this kind, must be bought.

use crate::bench::{Bench, Turns};
use crate::error::{Context, Failure};
use crate::install::{is_there, packages, shell};
use crate::machine::Changes;
use crate::peer::{FOLDER, Peer, Room};
use crate::report::{Section, Table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

#[derive(Debug, Args)]
pub struct JavaArguments {
    /// Memory of the virtual machine and the pool together, MiB.
    #[arg(long, default_value_t = 320)]
    pub memory_mib: u64,
}

/// The result for one number of warehouses.
#[derive(Debug, Serialize, Deserialize)]
struct Growth {
    warehouses: u32,
    /// Transactions a second.
    rate: f64,
    /// The 99th percentile of the transactions' time, ms.
    p99_ms: f64,
}

const SOURCE: &str = include_str!("Warehouses.java");
const HEAP_MIB: u64 = 400;
const COLLECTORS: [(&str, &str); 2] = [("G1", "UseG1GC"), ("parallel", "UseParallelGC")];

pub fn run(bench: &Bench, arguments: &JavaArguments) -> Result<Section, Failure> {
    if !is_there("javac") {
        packages(&["openjdk-17-jdk-headless"])?;
    }
    let folder = Path::new(FOLDER).join("java");
    fs::create_dir_all(&folder).context(FOLDER)?;
    fs::write(folder.join("Warehouses.java"), SOURCE).context("Warehouses.java")?;
    shell("javac Warehouses.java", &folder)?;
    let memory = arguments.memory_mib << 20;
    let seconds = bench.pick(1, 5, 10);
    let steps: &[&str] = bench.pick(&["4"], &["10", "30", "50"], &["10", "20", "30", "40", "50"]);
    let rounds = bench.rounds(1, 3);
    let peers = [Peer::Zram { compressor: "lz4".into() }, Peer::IN_PROCESS];
    let room = Room { pool: Some(memory), ..Room::beside_the_pool(memory) };
    let mut rows = Vec::new();
    let mut section = Section::new("java", "Transactions on a heap that grows").text(format!(
        "Two threads make orders, payments and deliveries in some warehouses, and then in more, \
         {seconds} s each. One takes 6 MiB of a heap of {HEAP_MIB} MiB; there are {} MiB, zram's \
         pool included. Transactions a second, and in brackets the 99th percentile of their time \
         in ms: medians of {rounds} rounds.",
        arguments.memory_mib
    ));
    for (collector, option) in COLLECTORS {
        bench.label(collector);
        let (least, most) = (format!("-Xms{HEAP_MIB}m"), format!("-Xmx{HEAP_MIB}m"));
        let collect = format!("-XX:+{option}");
        let path = folder.display().to_string();
        let time = seconds.to_string();
        let words = ["java", &least, &most, &collect, "-cp", &path, "Warehouses", &time];
        let command: Vec<_> = words.iter().chain(steps).map(|word| (*word).to_owned()).collect();
        let turns = bench.take_turns(&peers, rounds, |peer| {
            let measured = peer.run(&mut Changes::begin(), room, &command, &bench.interrupt)?;
            serde_json::from_str::<Vec<Growth>>(&measured.stdout).context("the program's output")
        })?;
        rows.extend(turns.iter().map(|own| row(collector, own, steps.len())));
        section = section.raw(collector, &turns)?;
    }
    let numbers = steps.iter().map(|number| format!("{number} warehouses"));
    let header: Vec<_> = ["collector: held by".to_owned()].into_iter().chain(numbers).collect();
    let header: Vec<_> = header.iter().map(String::as_str).collect();
    Ok(section.table(Table::new(&header, rows)))
}

fn row(collector: &str, turns: &Turns<Vec<Growth>>, steps: usize) -> Vec<String> {
    let mut row = turns.row(|turns| {
        let cell = |at: usize| {
            let rate = turns.median(|run| run[at].rate);
            format!("{rate:.0} ({:.2})", turns.median(|run| run[at].p99_ms))
        };
        (0..steps).map(cell).collect()
    });
    row[0] = format!("{collector}: {}", row[0]);
    row
}

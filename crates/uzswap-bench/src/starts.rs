//! The time of programs from start to end, in-process and alone. Each is started in turns with and
//! without the preloaded libraries of `run --in-process`, so that other load on the machine affects
//! all. This is a part of `calls`.

use crate::error::{Context, Failure};
use crate::figures::median;
use crate::report::Table;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The started programs.
const PROGRAMS: [&[&str]; 2] = [&["true"], &["git", "status"]];

/// A library of glibc without code.
const EMPTY: &str = "libdl.so.2";

/// Arguments of the program that starts the measured programs.
#[derive(Debug, Args)]
pub struct MakeArguments {
    /// Starts of each program in each way.
    #[arg(long)]
    starts: usize,
}

/// Medians for one program, us.
#[derive(Debug, Serialize, Deserialize)]
pub struct StartTimes {
    program: String,
    alone: f64,
    empty: f64,
    in_process: f64,
}

/// Runs in-process. Starts programs, and prints a list of [`StartTimes`] as JSON.
pub fn make(arguments: &MakeArguments) -> Result<(), Failure> {
    let made = PROGRAMS.iter().map(|program| time(program, arguments.starts));
    let made = made.collect::<Result<Vec<_>, _>>()?;
    println!("{}", serde_json::to_string(&made).context("the times")?);
    Ok(())
}

fn time(program: &[&str], starts: usize) -> Result<StartTimes, Failure> {
    let mut took: [Vec<f64>; 3] = Default::default();
    for _ in 0..starts {
        for (way, took) in took.iter_mut().enumerate() {
            let mut command = Command::new(program[0]);
            command.args(&program[1..]).stdin(Stdio::null()).stdout(Stdio::null());
            match way {
                0 => drop(command.env_remove("LD_PRELOAD").env_remove("UZSWAP_TREE")),
                1 => drop(command.env("LD_PRELOAD", EMPTY).env_remove("UZSWAP_TREE")),
                _ => {}
            }
            let began = Instant::now();
            // Outside a repository, git reports an error and takes less time.
            command.stderr(Stdio::null()).status().context(program[0])?;
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    let [alone, empty, in_process] = took.map(median);
    Ok(StartTimes { program: program.join(" "), alone, empty, in_process })
}

pub fn table(made: &[StartTimes]) -> Table {
    let empty = format!("{EMPTY} preloaded");
    let header = ["us from start to end (to alone)", "alone", &empty, "in-process"];
    let rows = made.iter().map(|made| {
        let StartTimes { program, alone, empty, in_process } = made;
        let cells = [alone, empty, in_process].map(|us| format!("{us:.0} ({:.3})", us / alone));
        [vec![program.clone()], cells.to_vec()].concat()
    });
    Table::new(&header, rows.collect())
}

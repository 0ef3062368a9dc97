//! `numpy`: numpy on an array four times as large as its memory, in a region and in a mapped file,
//! beside an array with enough memory.

use crate::bench::{Bench, Candidate, Interrupt, Turns};
use crate::error::{Context, Failure};
use crate::install::shell;
use crate::machine::Changes;
use crate::peer::{FOLDER, uzswap, wait};
use crate::report::{Section, Table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Debug, Args)]
pub struct NumpyArguments {
    /// Size of the array, MiB [default: 512]. Its memory is a quarter of that.
    #[arg(long, value_parser = clap::value_parser!(u16).range(32..))]
    pub mib: Option<u16>,
    /// Compressors of ours.
    #[arg(long, value_delimiter = ',', default_value = "lz4,zstd")]
    pub compressors: Vec<String>,
}

/// The array's size, as a multiple of its memory.
const RATIO: u64 = 4;
/// Memory of numpy's temporary arrays. A region's budget does not include them, but a group's limit
/// does. With 8 MiB they leave the file so little that the kernel kills the program.
const TEMPORARIES_BYTES: u64 = 16 << 20;
/// Memory of Python and numpy themselves, which counts in-process, too.
const INTERPRETER_BYTES: u64 = 24 << 20;
const PROGRAM: &str = include_str!("numpy.py");
/// The steps on the array, in order. Each is a column.
const STEPS: [(&str, &str); 4] = [
    ("sum", "sum (s)"),
    ("add", "in-place add (s)"),
    ("gather", "random gathers (us each)"),
    ("sort", "sort (s)"),
];

enum ArrayKind {
    Plain,
    Memmap,
    Region { compressor: String },
    InProcess,
}

/// A way to store a kind of numbers.
struct Array {
    data: &'static str,
    memory: ArrayKind,
}

impl Candidate for Array {
    fn name(&self) -> String {
        match &self.memory {
            ArrayKind::Plain => format!("{}: plain numpy, all in memory", self.data),
            ArrayKind::Memmap => format!("{}: numpy.memmap in a cgroup", self.data),
            ArrayKind::Region { compressor } => format!("{}: region, {compressor}", self.data),
            ArrayKind::InProcess => format!("{}: plain numpy, in-process", self.data),
        }
    }
}

/// The output of the program.
#[derive(Debug, Serialize, Deserialize)]
struct RunOutput {
    seconds: BTreeMap<String, f64>,
    digest: String,
}

struct NumpySetting {
    python: PathBuf,
    count: u64,
    gathers: u64,
    budget: u64,
}

/// Python with numpy and this repository's module, as it is now.
fn python() -> Result<PathBuf, Failure> {
    let folder = Path::new(FOLDER);
    std::fs::create_dir_all(folder).context(FOLDER)?;
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let module = module.canonicalize().context("the Python module's source")?;
    eprintln!("uzswap-bench: installing numpy and {} into {FOLDER}/python", module.display());
    // Cleared, since files for another version of Python do not work.
    let install = format!(
        "python3 -m venv --clear python && python/bin/pip -q install numpy {}",
        module.display()
    );
    shell(&install, folder)?;
    Ok(folder.join("python/bin/python3"))
}

impl NumpySetting {
    fn run(&self, array: &Array, interrupt: &Interrupt) -> Result<RunOutput, Failure> {
        let file = Path::new(FOLDER).join("numbers");
        let mut command = match array.memory {
            ArrayKind::InProcess => {
                let memory = self.budget + TEMPORARIES_BYTES + INTERPRETER_BYTES;
                let mut command = Command::new(uzswap()?);
                command.args(["run", "--in-process", "--quiet", &format!("--memory={memory}")]);
                command.arg("--").arg(&self.python);
                command
            }
            _ => Command::new(&self.python),
        };
        command.args(["-c", PROGRAM, "--data", array.data]);
        command.args(["--count", &self.count.to_string(), "--gathers", &self.gathers.to_string()]);
        let mut changes = Changes::begin();
        match &array.memory {
            ArrayKind::Plain | ArrayKind::InProcess => command.args(["--memory", "plain"]),
            ArrayKind::Memmap => {
                let group = changes.group(self.budget + TEMPORARIES_BYTES)?;
                command.args(["--memory", "memmap", "--file"]).arg(&file);
                command.arg("--group").arg(group.entrance())
            }
            ArrayKind::Region { compressor } => {
                command.args(["--memory", "region", "--file"]).arg(&file);
                command.args(["--compressor", compressor, "--budget", &self.budget.to_string()])
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let ended = wait(command.spawn().context("python3")?, interrupt, None, || 0);
        // The file exists only if the program was killed.
        let _ = std::fs::remove_file(&file);
        serde_json::from_str(&ended?.stdout).context("the program's output")
    }

    /// A table for one kind of numbers. The first of `turns` is plain numpy.
    fn table(&self, turns: &[Turns<RunOutput>]) -> Table {
        let mut header = vec!["array"];
        header.extend(STEPS.map(|(_, column)| column));
        let rows = turns.iter().map(|own| {
            own.row(|own| {
                let cell = |(step, _): (&str, &str)| {
                    let seconds = own.median(|run| run.seconds[step]);
                    let factor =
                        own.paired(&turns[0], |own, plain| own.seconds[step] / plain.seconds[step]);
                    match step {
                        "gather" => {
                            format!("{:.2} ({factor:.1} x)", seconds * 1e6 / self.gathers as f64)
                        }
                        _ => format!("{seconds:.2} ({factor:.1} x)"),
                    }
                };
                STEPS.map(cell).into()
            })
        });
        Table::new(&header, rows.collect())
    }
}

pub fn run(bench: &Bench, arguments: &NumpyArguments) -> Result<Section, Failure> {
    let mib = arguments.mib.map_or(bench.pick(32, 48, 512), u64::from);
    let setting = NumpySetting {
        python: python()?,
        count: (mib << 20) / 8,
        // With memmap each gather takes 3 to 5 ms.
        gathers: bench.pick(2_000, 4_000, 5_000),
        budget: (mib << 20) / RATIO,
    };
    let rounds = bench.rounds(2, 3);
    let mut section =
        Section::new("numpy", "An array four times its memory, with numpy").text(format!(
            "{mib} MiB of numbers in {} MiB, medians of {rounds} rounds, and in brackets how many \
             times plain numpy in the same round. Prices are random walks rounded to cents \
             (float64), counts are Poisson with mean 20 (int64). A region's backing and memmap's \
             file lie in {FOLDER}; memmap's pages are charged to a cgroup of that size, a region \
             keeps to it by itself. In-process is the plain array under 'uzswap run', with {} MiB \
             more for numpy's temporary arrays and the interpreter. Every byte of every result is \
             compared.",
            mib / RATIO,
            (TEMPORARIES_BYTES + INTERPRETER_BYTES) >> 20,
        ));
    for data in ["prices", "counts"] {
        let memory = |memory| Array { data, memory };
        let mut arrays = vec![memory(ArrayKind::Plain), memory(ArrayKind::Memmap)];
        let regions = arguments
            .compressors
            .iter()
            .map(|compressor| ArrayKind::Region { compressor: compressor.clone() });
        arrays.extend(regions.chain([ArrayKind::InProcess]).map(memory));
        let turns =
            bench.take_turns(&arrays, rounds, |array| setting.run(array, &bench.interrupt))?;
        let digests: Vec<_> =
            turns.iter().flat_map(|turn| &turn.rounds).map(|run| &run.digest).collect();
        if digests.iter().any(|digest| *digest != digests[0]) {
            return Err(Failure::new(format!("{data}: the results differ; see results.json")));
        }
        section = section.table(setting.table(&turns)).raw(data, &turns)?;
    }
    Ok(section)
}

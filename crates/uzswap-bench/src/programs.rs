//! `programs`: programs in about half of their memory, beside zram, with equal memory in total.
//! Their memory is not idle: they read and write it in no order.

use crate::bench::{Bench, Turns};
use crate::error::{Context, Failure};
use crate::install::require;
use crate::machine::Changes;
use crate::peer::{FOLDER, Measured, Peer, Room};
use crate::report::{Section, Table};
use clap::Args;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;
use uzswap_engine::testing::Noise;

#[derive(Debug, Args)]
pub struct ProgramsArguments {
    /// Programs whose names begin with these texts [default: all].
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
}

/// A program, and the memory for it and its pool, MiB: about half, and three quarters, of its own.
struct Confined {
    name: &'static str,
    memories_mib: [u64; 2],
    /// A shell command in a folder with the input. Its output is the same each time.
    command: &'static str,
    /// A shell command that succeeds if the program is installed, and its Debian packages.
    is_there: &'static str,
    packages: &'static [&'static str],
}

const fn program(
    name: &'static str,
    memories_mib: [u64; 2],
    (is_there, packages): (&'static str, &'static [&'static str]),
    command: &'static str,
) -> Confined {
    Confined { name, memories_mib, command, is_there, packages }
}

const PROGRAMS: [Confined; 5] = [
    program(
        "sort",
        [30, 36],
        ("command -v sort", &["coreutils"]),
        "sort --buffer-size=400M numbers > sorted && md5sum sorted",
    ),
    program(
        "perl",
        [36, 44],
        ("command -v perl", &["perl"]),
        "perl -e 'my %h; while (<>) { chomp; $h{$_} = length; last if $. > 200000 } my $s = 0; \
         for my $k (sort keys %h) { $s = ($s * 31 + $k) % 1000003 } print \"$s\\n\"' numbers",
    ),
    program(
        "frames.py",
        [73, 100],
        ("/usr/bin/python3 -c 'import pandas'", &["python3-pandas"]),
        "/usr/bin/python3 -I frames.py",
    ),
    program("luajit", [80, 110], ("command -v luajit", &["luajit"]), "luajit tables.lua"),
    program(
        "node",
        [72, 100],
        ("command -v node", &["nodejs"]),
        "node -e 'const a = []; for (let i = 0; i < 600000; i++) a.push({id: i, name: \"item \" + \
         i, v: [i, i * 2]}); let s = 0; for (let r = 0; r < 3; r++) for (let i = 0; i < a.length; \
         i += 7) s = (s * 31 + a[(i * 7919) % a.length].id + a[i].name.length) % 1000003; \
         console.log(s)'",
    ),
];

const FRAMES: &str = include_str!("../../../tests/programs/frames.py");

/// A table of many small tables and strings, which the garbage collector marks.
const TABLES: &str = r#"
local t, s = {}, 0
for i = 1, 700000 do t[i] = { i, "name " .. i } end
for i = 1, #t do if i % 4 == 0 then t[i] = false end end
collectgarbage("collect")
for i = 1, #t do local e = t[i]; if e then s = s + e[1] + #e[2] end end
print(s)
"#;

/// A command that takes longer is stopped.
const TIME_MAX: Duration = Duration::from_secs(240);

/// The status of a shell whose command the kernel has killed.
const KILLED: &str = "exit status: 137";

pub fn run(bench: &Bench, arguments: &ProgramsArguments) -> Result<Section, Failure> {
    let is_asked = |program: &&Confined| {
        arguments.only.is_empty()
            || arguments.only.iter().any(|name| program.name.starts_with(name))
    };
    let few = bench.pick(1, PROGRAMS.len(), PROGRAMS.len());
    let programs: Vec<_> = PROGRAMS.iter().filter(is_asked).take(few).collect();
    if programs.is_empty() {
        let names = PROGRAMS.map(|program| program.name).join(", ");
        return Err(Failure::new(format!("--only names no program; there are {names}")));
    }
    for program in &programs {
        require(program.is_there, program.packages)?;
    }
    let folder = Path::new(FOLDER).join("programs");
    make_input(&folder)?;
    let rounds = bench.rounds(3, 5);
    let mut section = Section::new("programs", "Programs in a part of their memory").text(format!(
        "Seconds and, in brackets, the whole machine's processor seconds. zram's pool is part of \
         its memory. Medians of {rounds} rounds; *to zram* is the median of the rounds' ratios. \
         The output was the same each time."
    ));
    let mut rows = Vec::new();
    let sizes = |program: &'static Confined| program.memories_mib.map(|mib| (program, mib));
    for (program, mib) in programs.into_iter().flat_map(sizes) {
        let name = format!("{}, {mib} MiB", program.name);
        bench.label(&name);
        let script = format!("cd {} && export LC_ALL=C && {}", folder.display(), program.command);
        let command = ["sh", "-c", &script].map(str::to_owned);
        let turns = measure(bench, &command, mib << 20, rounds)?;
        rows.push(row(program.name, mib, &turns));
        section = section.raw(&name, &turns)?;
    }
    let header = ["program", "memory (MiB)", "alone", "zram, lz4", "in-process", "to zram"];
    Ok(section.table(Table::new(&header, rows)))
}

/// `None` if the kernel killed the command for want of memory.
fn measure(
    bench: &Bench,
    command: &[String],
    memory: u64,
    rounds: usize,
) -> Result<Vec<Turns<Option<Measured>>>, Failure> {
    let peers = [Peer::Alone, Peer::Zram { compressor: "lz4".into() }, Peer::IN_PROCESS];
    let room =
        Room { pool: Some(memory), time_max: Some(TIME_MAX), ..Room::beside_the_pool(memory) };
    let is_last = |run: &Option<Measured>| run.as_ref().is_none_or(|run| !run.is_whole);
    let mut expected = None;
    let run = |peer: &Peer| {
        let measured = peer.run(&mut Changes::begin(), room, command, &bench.interrupt);
        let measured = match (peer, measured) {
            (Peer::Zram { .. }, Err(failure)) if failure.to_string().contains(KILLED) => {
                return Ok(None);
            }
            (_, measured) => measured?,
        };
        let expected = expected.get_or_insert_with(|| measured.stdout.clone());
        match !measured.is_whole || *expected == measured.stdout {
            true => Ok(Some(measured)),
            false => Err(Failure::new("the output is not that of the program alone")),
        }
    };
    bench.take_turns_until(&peers, |_| rounds, is_last, run)
}

fn row(name: &str, mib: u64, turns: &[Turns<Option<Measured>>]) -> Vec<String> {
    let figure =
        |run: &Option<Measured>, of: fn(&Measured) -> f64| run.as_ref().map_or(f64::NAN, of);
    let seconds = |run: &_| figure(run, |run| run.seconds);
    let cell = |turn: &Turns<Option<Measured>>| match (&turn.missing, turn.rounds.last()) {
        (Some(why), _) => why.clone(),
        (None, Some(None)) => "ended by the kernel".into(),
        (None, Some(Some(last))) if !last.is_whole => {
            format!("not done after {} s", TIME_MAX.as_secs())
        }
        _ => {
            let cpu = turn.median(|run| figure(run, |run| run.cpu_seconds));
            format!("{:.1} ({cpu:.1})", turn.median(seconds))
        }
    };
    let mut row = vec![name.to_owned(), mib.to_string()];
    row.extend(turns.iter().map(cell));
    let ratio = turns[2].paired(&turns[1], |own, zram| seconds(own) / seconds(zram));
    row.push(if ratio.is_nan() { "-".into() } else { format!("{ratio:.2}") });
    row
}

fn make_input(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).context(FOLDER)?;
    let mut noise = Noise::new(1);
    let mut numbers = String::new();
    for _ in 0..600_000 {
        let _ = writeln!(numbers, "{}", noise.word() >> 4);
    }
    for (name, text) in [("numbers", &*numbers), ("frames.py", FRAMES), ("tables.lua", TABLES)] {
        fs::write(folder.join(name), text).context(name)?;
    }
    Ok(())
}

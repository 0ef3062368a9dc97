//! `uzswap record --accesses`: runs a command in-process and writes its touches to a trace.
//!
//! The command's processes write to a log beside the trace. The log has all of its space from the
//! start. A process that outlives the command still writes to the log after the log's name was
//! removed.

use crate::cli::{Cli, Command, RecordArguments};
use crate::commands::in_process;
use crate::error::Failure;
use crate::size;
use crate::stdio::say;
use clap::Parser;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use uzswap_trace::{EVENT_BYTES, Header, Log, Summary, Trace, TraceError};

/// The compressor of an in-process run unless another is requested.
const COMPRESSOR: &str = "lz4";

/// The least memory of a pager.
const MEMORY_MIN: u64 = 8 << 20;
const EVENTS_MIN: u64 = 1000;

/// Runs the command and writes the trace. Returns the command's exit status.
pub fn record(arguments: &RecordArguments, trace: &Path) -> Result<ExitCode, Failure> {
    if arguments.memory < MEMORY_MIN {
        let given = size::show(arguments.memory);
        return Err(Failure::new(format!(
            "--memory {given}: a pager needs 8M; give at least that"
        )));
    }
    let room = arguments.max / EVENT_BYTES as u64;
    if room < EVENTS_MIN {
        let given = size::show(arguments.max);
        return Err(Failure::new(format!("--max {given}: too small for a trace; give 1M or more")));
    }
    // The path is absolute, since the processes may have other working directories.
    let path = std::path::absolute(trace)
        .map_err(|error| Failure::new(format!("{}: {error}; name a file", trace.display())))?;
    if path.exists() {
        let path = trace.display();
        return Err(Failure::new(format!("{path}: the file exists; name a new one")));
    }
    let compressor = arguments.compressor.as_ref().map(ToString::to_string);
    let name = Path::new(&arguments.command[0]).file_name().unwrap_or_default();
    let header = Header {
        room,
        asked: 0,
        memory: arguments.memory,
        processes: 0,
        compressor: compressor.clone().unwrap_or_else(|| COMPRESSOR.into()),
        program: name.to_string_lossy().into_owned(),
    };
    let log = LogFile::create(&path, &header)?;
    // The words that a user would type.
    let memory = arguments.memory.to_string();
    let words = ["uzswap", "run", "--in-process", "--no-load-control", "--quiet", "--backing"];
    let words = words.into_iter().chain(["none", "--memory", &memory]).map(OsString::from);
    let compressor = compressor.map(|name| format!("--compressor={name}").into());
    let words = words.chain(compressor).chain(["--".into()]);
    let typed = Cli::try_parse_from(words.chain(arguments.command.iter().cloned()));
    let Ok(Cli { command: Command::Run(typed) }) = typed else {
        return Err(Failure::new("record: the command cannot be run; try it with uzswap run"));
    };
    let status = in_process::run(&typed, Some(&log.0))?;
    let recorded = Trace::read(&log.0)?;
    recorded.write(&path)?;
    tell(&recorded, trace, arguments.max);
    Ok(status)
}

fn tell(recorded: &Trace, path: &Path, max: u64) {
    let (path, lost) = (path.display(), recorded.header.lost());
    let Summary { touches, processes, .. } = Summary::of(recorded);
    say!("uzswap: {touches} touches of {processes} processes are in {path}");
    if touches == 0 {
        say!(
            "uzswap: no program had more than 16 MiB, or none could be kept small; `uzswap run` names \
             the reason"
        );
    }
    if lost > 0 {
        let max = size::show(max);
        say!("uzswap: {lost} more events had no room in {max}; record again with a larger --max");
    }
}

/// The log; removed at the end.
struct LogFile(PathBuf);

impl LogFile {
    fn create(trace: &Path, header: &Header) -> Result<Self, TraceError> {
        let mut path = trace.as_os_str().to_owned();
        path.push(".part");
        let path = PathBuf::from(path);
        // An existing file may be another recording's. That file stays, and `create` fails.
        Log::create(&path, header)?;
        Ok(Self(path))
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        // An error means that the file was removed already.
        let _ = fs::remove_file(&self.0);
    }
}

//! The `uzswap` command. Each folder uses only those before it: `device`, `policy`, `show`,
//! `commands`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr, reason = "they panic where nobody reads")]

mod commands;
mod device;
mod error;
mod policy;
mod show;
mod stdio;

use clap::Parser;
use cli::{Cli, Command};
use commands::{
    accesses, attach, config, doctor, fleet, memory, record, remote, run, serve, simulate, status,
    top, trace, upgrade,
};
use device::{area, daemon, keeper, slots, switching_off};
use error::Failure;
use show::exporter;
use std::process::ExitCode;
use stdio::say;
use uzswap_cli::{address, cli, metrics, size};

uzswap_sys::look_before_main!();

/// Exit status when uzswap itself fails, the same as for `env` and `timeout`. 126 and 127 are about
/// the command.
const EXIT_FAILURE: u8 = 125;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no failures.
            let _ = error.print();
            return if error.use_stderr() { EXIT_FAILURE.into() } else { ExitCode::SUCCESS };
        }
    };
    match (dispatch(cli.command), stdio::lost()) {
        (Ok(_), Some(error)) => {
            say!("uzswap: cannot write to standard output: {error}");
            EXIT_FAILURE.into()
        }
        (Ok(code), None) => code,
        (Err(failure), _) => {
            if !failure.is_silent() {
                say!("uzswap: {failure}");
            }
            failure.exit_code().into()
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Serve(arguments) => serve::serve(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Remote(arguments) => remote::remote(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Config(arguments) => config::config(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Status(arguments) => status::status(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Memory(arguments) => memory::memory(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Top(arguments) => top::top(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Attach(arguments) => attach::attach(&arguments),
        Command::Detach(arguments) => attach::detach(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Doctor(arguments) => doctor::doctor(&arguments),
        Command::Clean => status::clean().map(|()| ExitCode::SUCCESS),
        Command::Upgrade => upgrade::upgrade().map(|()| ExitCode::SUCCESS),
        Command::Record(arguments) => match (&arguments.accesses, arguments.pid, &arguments.out) {
            (Some(trace), ..) => accesses::record(&arguments, trace),
            (None, Some(pid), Some(out)) => record::record(pid, out).map(|()| ExitCode::SUCCESS),
            _ => Err(Failure::new("record: give --pid and --out, or --accesses and a command")),
        },
        Command::Trace(arguments) => trace::trace(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Simulate(arguments) => {
            let simulate =
                if arguments.fleet.is_empty() { simulate::simulate } else { fleet::fleet };
            simulate(&arguments).map(|()| ExitCode::SUCCESS)
        }
        Command::Dashboard(arguments) => {
            exporter::dashboard(&arguments.address).map(|()| ExitCode::SUCCESS)
        }
        Command::Exporter(arguments) => {
            exporter::exporter(&arguments.address).map(|()| ExitCode::SUCCESS)
        }
        Command::Daemon(arguments) => daemon::daemon(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Keeper(arguments) => keeper::keeper(arguments.lock).map(|()| ExitCode::SUCCESS),
        Command::SwitchOn => area::make().map(|()| ExitCode::SUCCESS),
        Command::HoldSlots => slots::hold().map(|()| ExitCode::SUCCESS),
        Command::SwitchOff(arguments) => Ok(match switching_off::run(&arguments.devices) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        }),
        Command::Enter(arguments) => Err(run::enter(&arguments)),
    }
}

//! Settings of a running `serve`: its configuration is applied at the start, and again on SIGHUP.
//!
//! A separate thread of the keeper's process does this. Writing a control file may wait for the
//! daemon, and reading a file may wait for memory. The keeper's main thread may wait for neither.

use crate::cli::ServeArguments;
use crate::commands::config::Configuration;
use crate::device::{folder, keeper, options};
use crate::error::Failure;
use crate::stdio::say;
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use uzswap_block::control::PARAMETERS;

/// The options with which `serve` was started.
pub struct Reload {
    file: Option<PathBuf>,
    /// The options on the command line.
    said: Vec<OsString>,
    /// The options that are in force.
    now: ServeArguments,
    /// SIGHUP is caught from the start, since it would end a process that does not catch it.
    signals: Option<Signals>,
}

/// The options that only a new start can change.
fn fixed(arguments: &ServeArguments) -> [(&'static str, String); 9] {
    let cache = &arguments.cache;
    [
        ("size", format!("{:?}", arguments.size)),
        ("backing", format!("{:?}", options::places(&cache.backing))),
        ("remote-copies", format!("{:?}", cache.remote_copies)),
        ("remote-timeout", format!("{:?}", cache.remote_timeout)),
        ("remote-password-file", format!("{:?}", cache.remote_password_file)),
        ("plain-backing", cache.plain_backing.to_string()),
        ("transport", cache.transport.to_string()),
        ("threads", format!("{:?}", cache.threads)),
        ("metrics", format!("{:?}", cache.metrics)),
    ]
}

impl Reload {
    /// Reads the configuration for the first time; `said` are the options on the command line.
    pub fn new(
        arguments: &ServeArguments,
        said: Vec<OsString>,
    ) -> Result<(Self, Configuration), Failure> {
        let configuration = Configuration::read(arguments.config.as_deref())?;
        let now = configuration.with(said.iter().cloned())?;
        let signals = (!keeper::ends_on_hangup(true)).then(|| Signals::new([SIGHUP])).transpose();
        let signals = signals.map_err(cannot)?;
        Ok((Self { file: arguments.config.clone(), said, now, signals }, configuration))
    }

    /// The options to serve with.
    pub fn arguments(&self) -> &ServeArguments {
        &self.now
    }

    /// Reloads at every SIGHUP, unless SIGHUP means that the terminal is gone.
    pub fn start(mut self) -> Result<(), Failure> {
        let Some(mut signals) = self.signals.take() else { return Ok(()) };
        let work = move || signals.forever().for_each(|_| self.reload());
        std::thread::Builder::new().name("uzswap-reload".into()).spawn(work).map_err(cannot)?;
        Ok(())
    }

    /// Applies all settings of the files, or none if the files have a mistake.
    fn reload(&mut self) {
        let read = Configuration::read(self.file.as_deref());
        let read = read.and_then(|read| Ok((read.with(self.said.iter().cloned())?, read)));
        let (new, configuration) = match read {
            Ok(read) => read,
            Err(failure) => return say!("uzswap: {failure}; nothing was changed"),
        };
        let changed = fixed(&self.now).into_iter().zip(fixed(&new));
        for ((name, _), _) in changed.filter(|(before, after)| before != after) {
            say!("uzswap: {name} has changed: it takes effect after a restart");
        }
        let (before, after) = (&self.now.cache, &new.cache);
        if before.pool != after.pool {
            match after.pool {
                Some(pool) => set("max_pool_bytes", &pool.to_string()),
                None => say!("uzswap: pool is no longer set: that takes effect after a restart"),
            }
        }
        if before.compressor != after.compressor {
            match after.compressor {
                Some(compressor) => set("compressor", &compressor.to_string()),
                None => {
                    say!("uzswap: compressor is no longer set: that takes effect after a restart")
                }
            }
        }
        apply(&configuration);
        self.now = new;
        say!("uzswap: the configuration was read again");
    }
}

fn cannot(error: io::Error) -> Failure {
    Failure::new(format!("cannot wait for SIGHUP: {error}; try again"))
}

/// Sets the attributes that the configuration names.
pub fn apply(configuration: &Configuration) {
    configuration.parameters.iter().for_each(|setting| set(&setting.name, &setting.value));
}

fn set(name: &str, value: &str) {
    let file = folder::mount().join(PARAMETERS).join(name);
    if let Err(error) = fs::write(&file, value) {
        say!("uzswap: {}: {error}; it stays as it was", file.display());
    }
}

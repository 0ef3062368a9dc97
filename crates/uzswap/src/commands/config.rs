//! How `serve` is configured: `/etc/uzswap/uzswap.conf` and its drop-ins.
//!
//! ```toml
//! size = "ram"              # the names of serve's options, and what they accept
//! plain-backing = false
//! [parameters]              # the names of the control files
//! same_pages_enabled = true
//! ```
//! Every setting is turned into the option of its name and parsed as an option. So there is one
//! list of names and one set of rules. A later file overrides an earlier one, and the command line
//! overrides both. Lines that are overridden are checked as well.

use super::import;
use crate::cli::{CONFIGURATION, Cli, Command, ConfigArguments, ConfigCommand, ServeArguments};
use crate::device::options;
use crate::error::Failure;
use crate::stdio::show;
use clap::{Args, Parser};
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};
use uzswap_engine::ATTRIBUTES;
use uzswap_sys::cpu;

/// The table of attributes.
const PARAMETERS: &str = "parameters";
/// The size beside another setting that is checked, since `serve` needs a size.
const TRIED_SIZE: &str = "--size=1G";
/// Attributes that have their own option.
const BY_OPTION: [(&str, &str); 2] = [("compressor", "compressor"), ("max_pool_bytes", "pool")];

/// One line of a file.
#[derive(Debug)]
pub struct Setting {
    file: PathBuf,
    line: usize,
    /// The name of the option or the attribute.
    pub name: String,
    /// The value, as an option or a control file takes it.
    pub value: String,
}

impl Setting {
    fn wrong(&self, why: impl std::fmt::Display) -> Failure {
        wrong(&self.file, self.line, why)
    }

    /// The option on a command line. `None` for a switch that stays off.
    fn argument(&self) -> Option<String> {
        match (self.value.as_str(), is_switch(&self.name)) {
            ("true", true) => Some(format!("--{}", self.name)),
            ("false", true) => None,
            (value, _) => Some(format!("--{}={value}", self.name)),
        }
    }
}

fn wrong(file: &Path, line: usize, why: impl std::fmt::Display) -> Failure {
    Failure::new(format!("{}:{line}: {why}", file.display()))
}

/// The settings of the files, checked. Of several settings with one name, only the last.
#[derive(Debug, Default)]
pub struct Configuration {
    options: Vec<Setting>,
    /// Attributes, to be written into their control files.
    pub parameters: Vec<Setting>,
}

impl Configuration {
    /// Reads `file` and its drop-ins. An absent file is an error only if the caller named it.
    pub fn read(file: Option<&Path>) -> Result<Self, Failure> {
        let path = file.unwrap_or(Path::new(CONFIGURATION));
        let mut configuration = Self::default();
        match fs::read_to_string(path) {
            Ok(text) => configuration.add(path, &text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && file.is_none() => {}
            Err(error) => return Err(unreadable(path, &error)),
        }
        for path in drop_ins(path)? {
            let text = fs::read_to_string(&path).map_err(|error| unreadable(&path, &error))?;
            configuration.add(&path, &text)?;
        }
        Ok(configuration)
    }

    fn add(&mut self, file: &Path, text: &str) -> Result<(), Failure> {
        let table = DeTable::parse(text).map_err(|error| {
            let what = error.message().lines().collect::<Vec<_>>().join("; ");
            let example = "write NAME = \"VALUE\"";
            wrong(
                file,
                line_of(text, error.span().unwrap_or_default()),
                format!("{what}; {example}"),
            )
        })?;
        for (name, value) in table.get_ref() {
            if let (PARAMETERS, DeValue::Table(table)) = (&**name.get_ref(), value.get_ref()) {
                for (name, value) in table {
                    let line = line_of(text, name.span());
                    let setting = setting(file, line, name.get_ref(), value.get_ref())?;
                    replace(&mut self.parameters, check_parameter(setting)?);
                }
            } else {
                let line = line_of(text, name.span());
                let setting = setting(file, line, name.get_ref(), value.get_ref())?;
                check_option(&setting)?;
                replace(&mut self.options, setting);
            }
        }
        Ok(())
    }

    /// The settings of `serve`: from the files, and from the command line, which overrides them.
    pub fn with(&self, said: impl Iterator<Item = OsString>) -> Result<ServeArguments, Failure> {
        parse(self.options.iter().filter_map(Setting::argument).map(OsString::from).chain(said))
            .map_err(Failure::new)
    }

    fn print(&self, as_json: bool) {
        let all = || self.options.iter().chain(&self.parameters);
        if as_json {
            let each = all().map(|setting| {
                json!({ "name": setting.name, "value": setting.value,
                    "file": setting.file, "line": setting.line })
            });
            show!("{:#}", json!(each.collect::<Vec<_>>()));
            return;
        }
        for Setting { file, line, name, value } in all() {
            show!("{name} = {value:?}  # {}:{line}", file.display());
        }
        if all().next().is_none() {
            show!("nothing is set; write settings into {CONFIGURATION}");
        }
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    Failure::new(format!("{path}: {error}; see that it is there and may be read"))
}

/// The drop-ins, sorted by name.
fn drop_ins(file: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut folder = file.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|error| unreadable(&folder, &error))?,
    };
    let paths: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.map_err(|error| unreadable(&folder, &error))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "conf"));
    paths.sort();
    Ok(paths)
}

fn replace(settings: &mut Vec<Setting>, new: Setting) {
    settings.retain(|setting| setting.name != new.name);
    settings.push(new);
}

fn line_of(text: &str, span: Range<usize>) -> usize {
    let before = text.as_bytes().get(..span.start).unwrap_or_default();
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

fn setting(file: &Path, line: usize, name: &str, value: &DeValue) -> Result<Setting, Failure> {
    let value = match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
        DeValue::Boolean(value) => value.to_string(),
        other => {
            let kind = other.type_str();
            let must = "give a text in quotes, a whole number, true or false";
            return Err(wrong(file, line, format!("{name} is of type {kind}; {must}")));
        }
    };
    Ok(Setting { file: file.to_owned(), line, name: name.to_owned(), value })
}

/// True if the option of this name takes no value.
fn is_switch(name: &str) -> bool {
    settable().into_iter().any(|(known, takes_value)| known == name && !takes_value)
}

/// The options of `serve` that a file may set, and whether they take a value.
fn settable() -> Vec<(String, bool)> {
    let command = ServeArguments::augment_args(clap::Command::new("serve"));
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let named = shown.filter_map(|argument| {
        Some((argument.get_long()?.to_owned(), argument.get_action().takes_values()))
    });
    named.filter(|(name, _)| name != "config").collect()
}

/// Parses options of `serve`; the message is one line.
fn parse(arguments: impl Iterator<Item = OsString>) -> Result<ServeArguments, String> {
    let words = ["uzswap", "serve"].into_iter().map(OsString::from).chain(arguments);
    let cli = Cli::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("For more"));
        let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        lines.join("; ").trim_start_matches("error: ").to_owned()
    })?;
    match cli.command {
        Command::Serve(arguments) => Ok(arguments),
        _ => Err("these are no options of serve".into()),
    }
}

/// Checks the name and value of an option as if it were the only option.
fn check_option(setting: &Setting) -> Result<(), Failure> {
    let known = settable();
    let Some((_, takes_value)) = known.iter().find(|(name, _)| *name == setting.name) else {
        let names: Vec<_> = known.into_iter().map(|(name, _)| name).collect();
        return Err(setting.wrong(format!(
            "there is no setting '{}'; there are {} and the table [{PARAMETERS}]",
            setting.name,
            names.join(", ")
        )));
    };
    if !takes_value && !matches!(setting.value.as_str(), "true" | "false") {
        return Err(setting.wrong(format!("{} is true or false, without quotes", setting.name)));
    }
    let words = [Some(TRIED_SIZE.to_owned()), setting.argument()].into_iter().flatten();
    let arguments = parse(words.map(OsString::from)).map_err(|why| setting.wrong(why))?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    let bytes = arguments.size.unwrap_or_default();
    let options = options::daemon_options(&arguments.cache, 0, bytes, machine);
    options.map(drop).map_err(|why| setting.wrong(why))
}

fn check_parameter(mut setting: Setting) -> Result<Setting, Failure> {
    if let Some((name, option)) = BY_OPTION.iter().find(|(name, _)| *name == setting.name) {
        let why = format!("{name} is set by {option}, above [{PARAMETERS}]; write it there");
        return Err(setting.wrong(why));
    }
    let Some(attribute) = ATTRIBUTES.iter().find(|known| known.name == setting.name) else {
        let known = ATTRIBUTES.iter().map(|known| known.name);
        let names: Vec<_> = known.filter(|name| BY_OPTION.iter().all(|(n, _)| n != name)).collect();
        return Err(setting.wrong(format!(
            "there is no parameter '{}'; there are {}",
            setting.name,
            names.join(", ")
        )));
    };
    // The control files take Y and N.
    setting.value = match setting.value.as_str() {
        "true" => "Y".into(),
        "false" => "N".into(),
        _ => setting.value,
    };
    attribute.check(&setting.value).map_err(|why| setting.wrong(format!("{why}; change it")))?;
    Ok(setting)
}

pub fn config(arguments: &ConfigArguments) -> Result<(), Failure> {
    match &arguments.what {
        ConfigCommand::Check(which) => {
            Configuration::read(which.file.as_deref())?.with(std::iter::empty())?;
            Ok(())
        }
        ConfigCommand::Show(show) => {
            Configuration::read(show.which.file.as_deref())?.print(show.json);
            Ok(())
        }
        ConfigCommand::Import(which) => import::import(which.file.as_deref()),
    }
}

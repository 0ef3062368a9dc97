//! Man pages and completions, from the definition of the command line. Each package has them.

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use roff::{Roff, bold, roman};
use std::fs;
use std::io;
use std::path::Path;
use uzswap_cli::cli::Cli;

/// The meaning of each exit status, and the only command that has it; empty if several have.
const STATUSES: [(&str, &str, &str); 7] = [
    ("0", "", "Success."),
    ("1", "doctor", "No front end works on this machine."),
    ("125", "", "uzswap itself failed; one line on standard error has the reason and the remedy."),
    ("126", "run", "The command could not be executed."),
    ("127", "run", "There is no such command."),
    ("128 + n", "run", "Signal n ended the command."),
    ("any other", "run", "The command's own status."),
];

/// Files and their purpose.
const FILES: [(&str, &str); 6] = [
    ("/etc/uzswap/uzswap.conf", "The configuration of serve: names and values of its options."),
    (
        "/etc/uzswap/uzswap.conf.d/*.conf",
        "Drop-ins, which override it in the order of their names.",
    ),
    ("/run/uzswap/mnt/parameters/", "Attributes, readable and writable while a cache runs."),
    ("/run/uzswap/mnt/stats/", "Statistics, one value a file."),
    ("/run/uzswap/state.json", "The changes to the machine; clean undoes them."),
    (
        "/var/tmp",
        "The folder of the backing, an unnamed file, unless --backing names another place.",
    ),
];

/// Writes files, given by name and text, to a folder, which is made.
pub fn write(folder: &Path, files: Vec<(String, String)>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    files.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))
}

/// Name and text of the man page of uzswap, and of each of its commands.
pub fn pages() -> Vec<(String, String)> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages("uzswap", &command, &mut pages);
    pages
}

fn add_pages(name: &str, command: &Command, pages: &mut Vec<(String, String)>) {
    pages.push((format!("{name}.1"), page(name, command.clone())));
    for sub in command.get_subcommands() {
        if !sub.is_hide_set() && sub.get_name() != "help" {
            add_pages(&format!("{name}-{}", sub.get_name()), sub, pages);
        }
    }
}

/// Writing to a vector does not fail.
fn page(name: &str, command: Command) -> String {
    let example = command.get_after_help().map(ToString::to_string);
    let (is_whole, has_commands) = (name == "uzswap", command.has_subcommands());
    let man = Man::new(command).title(name).source(concat!("uzswap ", env!("CARGO_PKG_VERSION")));
    let mut bytes = Vec::new();
    let _ = man.render_title(&mut bytes);
    let _ = man.render_name_section(&mut bytes);
    let _ = man.render_synopsis_section(&mut bytes);
    let _ = man.render_description_section(&mut bytes);
    let _ = man.render_options_section(&mut bytes);
    if has_commands {
        let _ = man.render_subcommands_section(&mut bytes);
    }
    let mut rest = Roff::new();
    if let Some(text) = example {
        rest.control("SH", ["EXAMPLES"]).control("nf", []);
        text.lines().skip(1).for_each(|line| _ = rest.text([roman(line.trim())]));
        rest.control("fi", []);
    }
    let own = STATUSES.iter().filter(|(_, of, _)| of.is_empty() || name.ends_with(of) || is_whole);
    let text = |of: &str, text: &str| match is_whole && !of.is_empty() {
        true => format!("{of}: {text}"),
        false => text.to_owned(),
    };
    let own: Vec<_> = own.map(|(status, of, meaning)| (*status, text(of, meaning))).collect();
    list(&mut rest, "EXIT STATUS", &own);
    if is_whole {
        list(&mut rest, "FILES", &FILES.map(|(file, purpose)| (file, purpose.to_owned())));
        rest.control("SH", ["ENVIRONMENT"]);
        rest.control("TP", []).text([bold("NO_COLOR")]);
        rest.text([roman("Set to any value: no colours, not even on a terminal.")]);
    }
    let _ = rest.to_writer(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn list(page: &mut Roff, title: &str, rows: &[(&str, String)]) {
    page.control("SH", [title]);
    for (name, text) in rows {
        page.control("TP", []).text([bold(*name)]).text([roman(text.as_str())]);
    }
}

/// Name and text of the completions of each shell.
pub fn completions() -> Vec<(String, String)> {
    let shells =
        [(Shell::Bash, "uzswap.bash"), (Shell::Zsh, "_uzswap"), (Shell::Fish, "uzswap.fish")];
    let text = |shell| {
        let mut bytes = Vec::new();
        clap_complete::generate(shell, &mut shown(), "uzswap", &mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    shells.map(|(shell, name)| (name.to_owned(), text(shell))).into()
}

/// The command line without internal commands, which a shell must not offer.
fn shown() -> Command {
    let whole = Cli::command();
    let hidden = |sub: &&Command| !sub.is_hide_set();
    let subs: Vec<_> = whole.get_subcommands().filter(hidden).cloned().collect();
    let about = whole.get_about().cloned().unwrap_or_default();
    Command::new("uzswap").version(env!("CARGO_PKG_VERSION")).about(about).subcommands(subs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_shown_has_a_page_with_an_example() {
        let pages = pages();
        for sub in shown().get_subcommands() {
            let name = format!("uzswap-{}.1", sub.get_name());
            let (_, text) = pages.iter().find(|(page, _)| *page == name).unwrap();
            let example = text.split(".SH EXAMPLES").nth(1).unwrap().lines().nth(2).unwrap();
            assert!(example.contains(&format!("uzswap {}", sub.get_name())), "{name}: {example}");
        }
        assert!(!pages.iter().any(|(name, _)| name.contains("keeper")));
    }

    #[test]
    fn completions_offer_options_and_nothing_that_is_hidden() {
        for (name, text) in completions() {
            assert!(text.contains("compressor") && text.contains("in-process"), "{name}");
            assert!(!text.contains("keeper") && !text.contains("switch-off"), "{name}");
        }
    }
}

//! The line that `run` shows while the command runs.

use crate::show::stats::Stats;
use crate::size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A line at the bottom of the terminal. If standard error is no terminal, this prints nothing.
pub struct Live {
    bar: Option<ProgressBar>,
}

impl Live {
    /// Shows the line, unless `quiet`.
    pub fn new(quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar }
    }

    /// Shows the present figures. `memory` is the command's memory in bytes, and `suspended` the
    /// number of its suspended processes.
    pub fn show(&self, stats: &Stats, memory: u64, suspended: usize) {
        let suspended =
            if suspended > 0 { format!("; {suspended} suspended") } else { String::new() };
        self.say(format!(
            "{} in memory, {} swapped out as {} ({:.1} : 1), {} on disk; {} pages in, {} out{suspended}",
            size::show(memory),
            size::show(stats.get("stored_pages") * 4096),
            size::show(stats.get("pool_total_size")),
            stats.ratio().unwrap_or(0.0),
            size::show(stats.get("backing_live_size")),
            stats.get("pages_swapped_in"),
            stats.get("pages_swapped_out"),
        ));
    }

    pub fn say(&self, text: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.tick();
        }
    }

    /// Removes the line.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

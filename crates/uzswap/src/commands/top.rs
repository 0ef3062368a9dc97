//! `uzswap top`: the cache, its rates and the swapped processes on a whole screen, with keys for
//! the most frequent changes. Like any user could, it reads and writes control files, reads /proc
//! and calls `uzswap attach`. The screen has no colours.

use crate::cli::TopArguments;
use crate::commands::attachment::Attachment;
use crate::commands::status::{self, NONE_RUNS, Running};
use crate::device::folder;
use crate::error::Failure;
use crate::show::stats::Stats;
use crate::size;
use crate::stdio::show;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::symbols;
use ratatui::text::Line;
use ratatui::widgets::{LineGauge, Paragraph, Row, Sparkline, Table};
use ratatui::{Frame, Terminal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use uzswap_engine::compress::Codec;
use uzswap_sys::pressure;

/// The size of the screen that `--once` prints, and the least that everything fits on.
const COLUMNS: u16 = 80;
const ROWS: u16 = 24;
/// Looks that the line of reads remembers: one for each column of a wide screen.
const HISTORY: usize = 256;

/// The interval of checks for a signal.
const SIGNALS: Duration = Duration::from_millis(100);

const KEYS: &str = "c compressor  + - pool  p pause  w resume writeback  ↑ ↓ a attach  q end";

/// The compressors that `c` selects in turn: all but `raw`, which is the first codec.
const COMPRESSORS: &[Codec] = Codec::CHOICES.split_at(Codec::Raw as usize + 1).1;

/// `+` and `-` change the pool's limit by the limit divided by this.
const POOL_STEP: u64 = 8;

/// The figures of one look.
struct Look {
    at: Instant,
    running: Option<Running>,
    /// Pressure on memory, in the kernel's words.
    pressure: String,
    /// Bytes swapped out, process and name; the largest first.
    swapped: Vec<(u64, i32, String)>,
}

impl Look {
    fn take() -> Self {
        let pressure = fs::read_to_string(pressure::MACHINE).unwrap_or_default();
        let pressure = match pressure.lines().next() {
            Some(line) => line.split(" total").next().unwrap_or(line).to_owned(),
            None => "not reported by this kernel".to_owned(),
        };
        Self { at: Instant::now(), running: Running::read(), pressure, swapped: swapped() }
    }

    fn stats(&self) -> Option<&Stats> {
        self.running.as_ref().map(|running| &running.stats)
    }
}

/// Every process that has swapped memory out.
fn swapped() -> Vec<(u64, i32, String)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut all: Vec<_> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            // An error means that the process has ended.
            let text = fs::read_to_string(entry.path().join("status")).ok()?;
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
            let kib: u64 = field("VmSwap:")?.split_whitespace().next()?.parse().ok()?;
            (kib > 0).then(|| (kib << 10, pid, field("Name:").unwrap_or("?").trim().to_owned()))
        })
        .collect();
    all.sort_by(|a, b| b.cmp(a));
    all
}

/// The displayed data: the last two looks, the reads per second of earlier looks, and the outcome
/// of the last key.
struct View {
    before: Option<Look>,
    now: Look,
    reads: Vec<u64>,
    message: String,
    /// The process that `a` limits, by its place in the list.
    selected: usize,
    attaching: Attachment,
}

impl View {
    fn advance(&mut self, look: Look) {
        self.before = Some(std::mem::replace(&mut self.now, look));
        self.reads.insert(0, self.rate("pages_swapped_in"));
        self.reads.truncate(HISTORY);
        self.selected = self.selected.min(self.now.swapped.len().saturating_sub(1));
        if let Some(said) = self.attaching.look() {
            self.message = said;
        }
    }

    /// The growth of a statistic per second; 0 at the first look.
    fn rate(&self, name: &str) -> u64 {
        let Some(before) = &self.before else { return 0 };
        let (Some(then), Some(now)) = (before.stats(), self.now.stats()) else { return 0 };
        let grown = now.get(name).saturating_sub(then.get(name));
        (grown as f64 / (self.now.at - before.at).as_secs_f64()).round() as u64
    }

    fn draw(&self, frame: &mut Frame) {
        let Some(running) = self.now.running.as_ref().filter(|running| running.alive) else {
            return frame.render_widget(Paragraph::new(NONE_RUNS), frame.area());
        };
        let lines = self.figures(running);
        // With a store, there is one more line.
        let height = lines.len().max(8) as u16;
        let heights = [1, 1, height, 1, 3].map(Constraint::Length);
        let rows = heights.into_iter().chain([Constraint::Min(3), Constraint::Length(1)]);
        let [title, pool, figures, label, reads, processes, keys] =
            Layout::vertical(rows).areas(frame.area());
        let areas = running.state.areas.iter().map(|area| area.device.display().to_string());
        let areas = areas.collect::<Vec<_>>().join(" ");
        let text = format!("uzswap {areas} ({})", running.state.transport);
        frame.render_widget(Line::from(text).bold(), title);
        let stats = &running.stats;
        let (used, limit) = (stats.get("pool_total_size"), stats.get("pool_limit"));
        let share = used as f64 / limit.max(1) as f64;
        let gauge = LineGauge::default()
            .label(format!("pool {} of {}", size::show(used), size::show(limit)))
            .filled_style(Style::new().bold())
            .filled_symbol(symbols::line::THICK_HORIZONTAL)
            .unfilled_symbol(symbols::line::LIGHT_DOUBLE_DASH_HORIZONTAL)
            .ratio(share.clamp(0.0, 1.0));
        frame.render_widget(gauge, pool);
        frame.render_widget(Paragraph::new(lines), figures);
        let text = format!("reads a second: {} now", self.rate("pages_swapped_in"));
        frame.render_widget(Line::from(text), label);
        frame.render_widget(Sparkline::default().data(&self.reads), reads);
        self.draw_processes(frame, processes);
        let text = match self.attaching.prompt() {
            Some(prompt) => prompt,
            None if self.message.is_empty() => KEYS.to_owned(),
            None => self.message.clone(),
        };
        frame.render_widget(Line::from(text).bold(), keys);
    }

    fn is_end(&self, key: KeyCode, modifiers: KeyModifiers) -> bool {
        let is_interrupt = key == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
        let asks = self.attaching.prompt().is_some();
        is_interrupt || !asks && matches!(key, KeyCode::Char('q') | KeyCode::Esc)
    }

    /// Does the action of a key.
    fn press(&mut self, key: KeyCode) {
        if self.attaching.prompt().is_some() {
            self.message = self.attaching.press(key);
            return;
        }
        match (key, self.now.swapped.get(self.selected)) {
            (KeyCode::Up, _) => self.selected = self.selected.saturating_sub(1),
            (KeyCode::Down, _) => {
                self.selected = (self.selected + 1).min(self.now.swapped.len().saturating_sub(1));
            }
            (KeyCode::Char('a'), Some((_, pid, name))) => self.attaching.begin(*pid, name),
            _ => self.change(key),
        }
    }

    /// Writes to a control file.
    fn change(&mut self, key: KeyCode) {
        let read = |file: &str| {
            // An error means that the cache is gone. The write reports it.
            let text = fs::read_to_string(folder::mount().join(file)).unwrap_or_default();
            text.trim().to_owned()
        };
        let limit: u64 = read("stats/pool_limit").parse().unwrap_or(0);
        let (name, value) = match key {
            KeyCode::Char('c') => {
                let now = read("parameters/compressor");
                let now = now.split(':').next();
                let place = COMPRESSORS.iter().position(|codec| Some(codec.name()) == now);
                let next = place.map_or(0, |place| (place + 1) % COMPRESSORS.len());
                ("compressor", COMPRESSORS[next].name().to_owned())
            }
            KeyCode::Char('+') => ("max_pool_bytes", (limit + limit / POOL_STEP).to_string()),
            KeyCode::Char('-') => ("max_pool_bytes", (limit - limit / POOL_STEP).to_string()),
            KeyCode::Char('p') => {
                let is_on = read("parameters/enabled") == "Y";
                ("enabled", if is_on { "N" } else { "Y" }.to_owned())
            }
            KeyCode::Char('w') => ("writeback_enabled", "Y".to_owned()),
            _ => return self.message.clear(),
        };
        let file = folder::mount().join("parameters").join(name);
        self.message = match fs::write(file, &value) {
            Ok(()) => format!("{name} is now {value}"),
            Err(error) => format!("{name} stays as it is: {error}"),
        };
    }

    fn figures(&self, running: &Running) -> Vec<Line<'static>> {
        let stats = &running.stats;
        let get = |name: &str| stats.get(name);
        let us = |name: &str| get(name) as f64 / 1000.0;
        let compressor = stats.parameters.get("compressor").map_or("?", String::as_str);
        let mut lines = vec![
            format!(
                "pages    {}: {} pool, {} backing, {} shared, {} same-filled",
                get("stored_pages"),
                get("pool_pages"),
                get("backing_pages"),
                get("shared_pages"),
                get("same_filled_pages"),
            ),
            format!("codecs   {}", by_codec(stats)),
            format!(
                "ages     {} in use, {} idle, {} recompressed",
                get("pool_pages").saturating_sub(get("pool_idle_pages")),
                get("pool_idle_pages"),
                get("recompressed_pages"),
            ),
            format!("ratio    {:.2} : 1 with {compressor}", stats.ratio().unwrap_or(0.0)),
            format!(
                "swap     {} pages/s in, {} out; a read: {:.1} us (p50), {:.1} us (p99)",
                self.rate("pages_swapped_in"),
                self.rate("pages_swapped_out"),
                us("fault_ns_p50"),
                us("fault_ns_p99"),
            ),
            format!(
                "backing  {} live; {}/s written, {}/s read",
                size::show(get("backing_live_size")),
                size::show(self.rate("backing_bytes_written")),
                size::show(self.rate("backing_bytes_read")),
            ),
        ];
        if get("remote_limit") > 0 {
            lines.push(format!(
                "remote   {} there, {}; {} reads/s in {:.0} us (p50), {:.0} us (p99); {} errors",
                size::show(get("remote_size")),
                if get("remote_up") == 1 { "up" } else { "DOWN" },
                self.rate("remote_reads"),
                us("remote_read_ns_p50"),
                us("remote_read_ns_p99"),
                get("remote_errors"),
            ));
        }
        lines.push(format!("pressure {}", self.now.pressure));
        if !stats.writeback_error.is_empty() {
            let error = &stats.writeback_error;
            lines.push(format!("WRITEBACK STOPPED: {error}; see `uzswap status`"));
        }
        lines.into_iter().map(Line::from).collect()
    }

    fn draw_processes(&self, frame: &mut Frame, area: ratatui::layout::Rect) {
        let rows = self.now.swapped.iter().enumerate().map(|(index, (bytes, pid, name))| {
            let row = Row::new([pid.to_string(), size::show(*bytes), name.clone()]);
            if index == self.selected { row.reversed() } else { row }
        });
        let widths = [Constraint::Length(9), Constraint::Length(12), Constraint::Min(10)];
        let table = Table::new(rows, widths);
        let header = Row::new(["PID", "SWAPPED OUT", "NAME"]).bold();
        frame.render_widget(table.header(header), area);
    }
}

/// Pages in the pool by compressor; compressors without pages are left out.
fn by_codec(stats: &Stats) -> String {
    let of = |codec: &Codec| (codec.name(), stats.get(&format!("pool_pages_{}", codec.name())));
    let raw = ("incompressible", stats.get("stored_incompressible_pages"));
    let counts = COMPRESSORS.iter().map(of).chain([raw]);
    let there = counts.filter(|(_, count)| *count > 0);
    there.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

/// Shows the screen until the user quits.
pub fn top(arguments: &TopArguments) -> Result<(), Failure> {
    status::require_root()?;
    if !arguments.once && !io::stdout().is_terminal() {
        return Err(Failure::new("standard output is no terminal; use uzswap top --once"));
    }
    let interval = Duration::from_secs(arguments.interval);
    let now = Look::take();
    let mut view = View {
        before: None,
        now,
        reads: Vec::new(),
        message: String::new(),
        selected: 0,
        attaching: Attachment::default(),
    };
    if arguments.once {
        std::thread::sleep(interval);
        view.advance(Look::take());
        return print(&view);
    }
    let is_told_to_end = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register(signal, is_told_to_end.clone()).map_err(cannot)?;
    }
    let mut terminal = ratatui::try_init().map_err(cannot)?;
    let drawn = draw(&mut terminal, &mut view, interval, &is_told_to_end);
    ratatui::restore();
    drawn.map_err(cannot)
}

fn cannot(error: io::Error) -> Failure {
    Failure::new(format!("cannot draw on this terminal: {error}; use uzswap top --once"))
}

fn draw(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut View,
    interval: Duration,
    is_told_to_end: &AtomicBool,
) -> io::Result<()> {
    let events = events();
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        let next = view.now.at + interval;
        while Instant::now() < next {
            if is_told_to_end.load(Relaxed) {
                return Ok(());
            }
            let left = next.saturating_duration_since(Instant::now());
            match events.recv_timeout(left.min(SIGNALS)) {
                Ok(Event::Key(key)) if view.is_end(key.code, key.modifiers) => return Ok(()),
                Ok(Event::Key(key)) => view.press(key.code),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            terminal.draw(|frame| view.draw(frame))?;
        }
        view.advance(Look::take());
    }
}

/// Reads the terminal in a thread of its own, which may wait for ever: crossterm reads a closed
/// terminal again and again.
fn events() -> Receiver<Event> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Prints the screen as text.
fn print(view: &View) -> Result<(), Failure> {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(COLUMNS, ROWS));
    let Ok(_) = terminal.draw(|frame| view.draw(frame));
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(COLUMNS));
    let line =
        |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
    let text = rows.map(|row| line(row).trim_end().to_owned()).collect::<Vec<_>>().join("\n");
    show!("{}", text.trim_end());
    Ok(())
}

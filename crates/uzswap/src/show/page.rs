//! The page that plots the last hour: HTML with SVG, drawn here, without scripts.

use crate::metrics::Scrape;
use crate::size;
use std::collections::VecDeque;
use std::fmt::Write;
use std::fs;
use std::time::{Duration, Instant};
use uzswap_sys::pressure;

/// The interval of the samples, and of the page's reloads.
pub const EVERY: Duration = Duration::from_secs(10);
/// The least time that a plot shows.
const SECONDS_MIN: f64 = 240.0;
/// Samples of an hour.
const SAMPLES: usize = 360;
/// The look of the page.
pub const STYLE: &str = include_str!("page.css");

/// The size of a plot, in units of its own.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 160.0;

struct Sample {
    at: Instant,
    figures: Scrape,
    /// Percent of the last ten seconds in which some programs, and all programs, waited for memory.
    pressure: [f64; 2],
}

/// The samples of the last hour.
#[derive(Default)]
pub struct History {
    samples: VecDeque<Sample>,
}

/// A value of a sample, with the sample before it.
type Reading = fn(&Sample, &Sample) -> f64;

/// A plot: lines, each with its name.
struct Plot {
    title: &'static str,
    lines: &'static [(&'static str, Reading)],
    show: fn(f64) -> String,
}

fn rate(name: &str, now: &Sample, before: &Sample) -> f64 {
    let seconds = (now.at - before.at).as_secs_f64();
    let (now, before) = (now.figures.get(name), before.figures.get(name));
    // The counts of another daemon begin at 0.
    if seconds > 0.0 { now.saturating_sub(before) as f64 / seconds } else { 0.0 }
}

fn bytes(value: f64) -> String {
    size::show(value as u64)
}

fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

fn ratio(figures: &Scrape) -> f64 {
    let pool = figures.get("pool_total_size");
    if pool == 0 { 0.0 } else { (figures.get("pool_pages") * 4096) as f64 / pool as f64 }
}

const PLOTS: [Plot; 6] = [
    Plot {
        title: "Pool",
        lines: &[
            ("pool", |now, _| now.figures.get("pool_total_size") as f64),
            ("pages in it", |now, _| (now.figures.get("pool_pages") * 4096) as f64),
            ("limit", |now, _| now.figures.get("pool_limit") as f64),
        ],
        show: bytes,
    },
    Plot { title: "Ratio", lines: &[("ratio", |now, _| ratio(&now.figures))], show: number },
    Plot {
        title: "Pages a second",
        lines: &[
            ("in (faults)", |now, before| rate("pages_swapped_in", now, before)),
            ("out", |now, before| rate("pages_swapped_out", now, before)),
        ],
        show: number,
    },
    Plot {
        title: "Time of a fault, µs",
        lines: &[("mean", |now, before| {
            let count = |sample: &Sample| sample.figures.faults.count();
            let faults = count(now).saturating_sub(count(before));
            let ns = now.figures.faults.sum.saturating_sub(before.figures.faults.sum);
            if faults == 0 { 0.0 } else { ns as f64 / faults as f64 / 1000.0 }
        })],
        show: number,
    },
    Plot {
        title: "Backing, bytes a second",
        lines: &[
            ("written", |now, before| rate("backing_bytes_written", now, before)),
            ("read", |now, before| rate("backing_bytes_read", now, before)),
        ],
        show: bytes,
    },
    Plot {
        title: "Waiting for memory, % of the time",
        lines: &[("some", |now, _| now.pressure[0]), ("all", |now, _| now.pressure[1])],
        show: number,
    },
];

impl History {
    /// Adds a sample, and removes the oldest.
    pub fn add(&mut self, figures: &Scrape) {
        self.samples.truncate(SAMPLES);
        while self.samples.len() >= SAMPLES {
            self.samples.pop_front();
        }
        let (at, pressure) = (Instant::now(), pressure());
        self.samples.push_back(Sample { at, figures: figures.clone(), pressure });
    }

    /// The page. `now` are the present figures.
    pub fn page(&self, now: &Scrape) -> String {
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>uzswap</title>\
             <meta name=\"viewport\" content=\"width=device-width\">\
             <meta http-equiv=\"refresh\" content=\"{}\">\
             <link rel=\"stylesheet\" href=\"/style.css\"></head><body><h1>uzswap</h1>\n",
            EVERY.as_secs()
        );
        if now.statistics.is_empty() {
            html += "<p>No cache is running.</p>";
        }
        let pool = now.get("pool_total_size");
        let cells = [
            ("pool", format!("{} of {}", size::show(pool), size::show(now.get("pool_limit")))),
            ("ratio", format!("{:.2} : 1", ratio(now))),
            ("pages held", now.get("stored_pages").to_string()),
            ("backing", size::show(now.get("backing_live_size"))),
            ("lost", (now.get("decompress_fail") + now.get("read_fail")).to_string()),
        ];
        html += "<dl>";
        for (name, value) in cells {
            // Writing to a string does not fail.
            let _ = write!(html, "<div><dt>{name}</dt><dd>{value}</dd></div>");
        }
        html += "</dl><main>\n";
        PLOTS.iter().for_each(|plot| self.draw(plot, &mut html));
        html += "</main><footer>The last hour at most, a sample each 10 s. <a href=\"/metrics\">metrics</a>\
                 </footer></body></html>\n";
        html
    }

    /// The time that the plots show: the time with samples, within limits.
    fn seconds(&self) -> f64 {
        let ends = self.samples.front().zip(self.samples.back());
        let seconds = ends.map_or(0.0, |(first, last)| (last.at - first.at).as_secs_f64());
        seconds.clamp(SECONDS_MIN, EVERY.as_secs_f64() * SAMPLES as f64)
    }

    fn draw(&self, plot: &Plot, html: &mut String) {
        let pairs = || self.samples.iter().zip(self.samples.iter().skip(1));
        let values =
            |value: Reading| pairs().map(move |(before, now)| (now.at, value(now, before)));
        let all = plot.lines.iter().flat_map(|(_, value)| values(*value));
        let top = all.map(|(_, value)| value).fold(0.0, f64::max);
        let scale = if top > 0.0 { top } else { 1.0 };
        let end = self.samples.back().map(|sample| sample.at);
        let seconds = self.seconds();
        let _ = write!(html, "<section><h2>{}</h2><p>", plot.title);
        for (index, (name, value)) in plot.lines.iter().enumerate() {
            let now =
                values(*value).next_back().map_or("–".into(), |(_, value)| (plot.show)(value));
            let _ = write!(html, "<span class=\"line{index}\">{name} <b>{now}</b></span>");
        }
        let _ = write!(
            html,
            "</p><svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">",
            HEIGHT + 20.0,
            plot.title
        );
        let shares: &[f64] = if top > 0.0 { &[0.0, 0.5, 1.0] } else { &[0.0] };
        for share in shares {
            let y = HEIGHT - share * (HEIGHT - 16.0);
            let label = (plot.show)(scale * share);
            let _ = write!(
                html,
                "<path class=\"grid\" d=\"M0 {y}H{WIDTH}\"/><text x=\"2\" y=\"{}\">{label}</text>",
                y - 3.0
            );
        }
        let ago = |share: f64| format!("-{:.0} min", seconds * share / 60.0);
        for (x, label) in [(0.0, ago(1.0)), (0.5, ago(0.5)), (0.93, "now".into())] {
            let (x, y) = (x * WIDTH, HEIGHT + 15.0);
            let _ = write!(html, "<text x=\"{x}\" y=\"{y}\">{label}</text>");
        }
        for (index, (_, value)) in plot.lines.iter().enumerate() {
            let points = values(*value).map(|(at, value)| {
                let ago = end.map_or(0.0, |end| (end - at).as_secs_f64());
                let y = HEIGHT - value / scale * (HEIGHT - 16.0);
                format!("{:.1},{y:.1}", WIDTH * (1.0 - ago / seconds).max(0.0))
            });
            let points = points.collect::<Vec<_>>().join(" ");
            let _ = write!(html, "<polyline class=\"line{index}\" points=\"{points}\"/>");
        }
        *html += "</svg></section>\n";
    }
}

/// Zeros if the kernel reports no pressure.
fn pressure() -> [f64; 2] {
    let text = fs::read_to_string(pressure::MACHINE).unwrap_or_default();
    ["some", "full"].map(|kind| pressure::average(&text, kind).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_drawn_and_no_more() {
        let mut history = History::default();
        for i in 0..SAMPLES as u64 + 100 {
            let statistics = [("pool_total_size", i << 20), ("pool_pages", i << 9)].into();
            history.add(&Scrape { statistics, ..Scrape::default() });
        }
        assert_eq!(history.samples.len(), SAMPLES);
        let html = history.page(&history.samples.back().unwrap().figures);
        assert_eq!(html.matches("<polyline").count(), 11);
        assert!(!html.contains("NaN") && !html.contains("<script"), "{html}");
        assert!(html.contains("2.00 : 1"), "{html}");
    }
}

//! Draws the README's figure from the tables of docs/benchmarks.md.

use std::fmt::Write;

/// A bar: the name of a measurement, and its time as a multiple of zram's.
struct Bar {
    name: &'static str,
    ratio: f64,
}

/// The drawing: times of uzswap relative to zram's, at equal memory. Empty if a table is not as
/// expected.
pub fn svg(benchmarks: &str) -> String {
    bars(benchmarks).map_or_else(String::new, |bars| draw(&bars))
}

fn bars(text: &str) -> Option<Vec<Bar>> {
    let (_, in_process) = text.split_once("\n### In-process\n")?;
    let (_, device) = text.split_once("\n### A fault\n")?;
    let build = after(in_process, "**A kernel build.**")?;
    let faults = after(in_process, "**Faults.**")?;
    let in_order = cell(faults, "in-process, lz4", 5)? / cell(faults, "zram, lz4", 5)?;
    let (before, _) = in_process.split_once(" times zram's time. The aim was 1.15")?;
    let without_turns = before.rsplit([' ', '\n']).next()?.parse().ok()?;
    Some(vec![
        Bar { name: "pages in order, each", ratio: in_order },
        Bar { name: "kernel build, 24 jobs in 512 MiB", ratio: cell(build, "in-process", 2)? },
        // The tables have requests a second. The time of a request is the inverse.
        Bar { name: "Redis, GETs, first pass", ratio: 1.0 / cell(in_process, "in-process", 2)? },
        Bar { name: "Redis, GETs, second pass", ratio: 1.0 / cell(in_process, "in-process", 5)? },
        Bar { name: "a page at random (median)", ratio: cell(faults, "in-process, lz4", 3)? },
        Bar { name: "the same by the swap device", ratio: cell(device, "swap device, lz4", 5)? },
        Bar { name: "the build, not in turns", ratio: without_turns },
    ])
}

fn after<'a>(text: &'a str, heading: &str) -> Option<&'a str> {
    Some(text.split_once(heading)?.1)
}

/// A number in the row with this name, or the mean if there are several such rows.
fn cell(text: &str, name: &str, column: usize) -> Option<f64> {
    let cells = |line: &str| line.split('|').skip(1).map(|cell| cell.trim().to_owned()).collect();
    let mut rows = text.lines().map(cells);
    let row: Vec<String> =
        rows.find(|row: &Vec<String>| row.first().is_some_and(|cell| cell == name))?;
    let values =
        row.get(column)?.split(", ").map(str::parse).collect::<Result<Vec<f64>, _>>().ok()?;
    Some(values.iter().sum::<f64>() / values.len() as f64)
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 270.0;
const TOP: f64 = 62.0;
const ROW: f64 = 30.0;
/// Pixels for zram's time.
const UNIT: f64 = 120.0;

fn draw(bars: &[Bar]) -> String {
    let height = TOP + ROW * bars.len() as f64 + 16.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"17\">Time that it takes, zram at equal memory = 1 \
         (shorter is better)</text>\n"
    );
    for (row, bar) in bars.iter().enumerate() {
        let top = TOP + ROW * row as f64;
        let (width, colour) =
            (bar.ratio * UNIT, if bar.ratio <= 1.1 { "#0072b2" } else { "#e69f00" });
        let (base, end, bar_height) = (top + 16.0, LEFT + width + 8.0, ROW - 8.0);
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{base}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LEFT}\" y=\"{top}\" width=\"{width:.1}\" height=\"{bar_height}\" \
             fill=\"{colour}\"/><text x=\"{end:.1}\" y=\"{base}\">{:.2}</text>",
            LEFT - 10.0,
            bar.name,
            bar.ratio
        );
    }
    let (at, bottom) = (LEFT + UNIT, height - 12.0);
    let _ = write!(
        svg,
        "<path d=\"M{at} {} V{bottom}\" stroke=\"black\" stroke-dasharray=\"4 3\"/>\
         <text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">zram</text>\n</svg>\n",
        TOP - 8.0,
        TOP - 12.0
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_is_a_figure_of_the_benchmarks() {
        let bars = bars(include_str!("../../docs/benchmarks.md")).unwrap();
        assert_eq!(bars.len(), 7);
        assert!(bars.iter().all(|bar| bar.ratio > 0.1 && bar.ratio < 5.0));
    }

    #[test]
    fn a_table_that_changed_gives_no_wrong_figure() {
        assert!(svg("\n### In-process\n\n### A fault\n").is_empty());
        let row = "| in-process | 1.0, 2.0 |\n";
        assert_eq!(cell(row, "in-process", 1), Some(1.5));
        assert_eq!(cell(row, "in-process", 2), None);
    }
}

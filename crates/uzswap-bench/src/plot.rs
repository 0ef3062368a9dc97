//! Plots, drawn as SVG.

use crate::error::{Context, Failure};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use serde::{Deserialize, Serialize};

/// Points with a name.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Series {
    name: String,
    points: Vec<[f64; 2]>,
}

/// The way in which points are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Style {
    Lines,
    /// Points with the names of their series.
    Dots,
    /// A bar with a name for each series, from zero to the x of its first point.
    Bars,
}

/// A plot: series over two axes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plot {
    /// Part of its file's name.
    pub name: String,
    /// Its heading.
    pub title: String,
    x: String,
    y: String,
    x_log: bool,
    style: Style,
    series: Vec<Series>,
}

const SIZE: (u32, u32) = (860, 460);

/// Colours for the colour-blind, too (Okabe and Ito's, without yellow).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
];

impl Plot {
    /// Lines, on linear axes with these names.
    pub fn new(name: &str, title: &str, x: &str, y: &str) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            x: x.into(),
            y: y.into(),
            x_log: false,
            style: Style::Lines,
            series: Vec::new(),
        }
    }

    /// Makes the first axis logarithmic.
    pub fn log_x(mut self) -> Self {
        self.x_log = true;
        self
    }

    /// Draws points with the names of their series, not lines.
    pub fn dots(mut self) -> Self {
        self.style = Style::Dots;
        self
    }

    /// Draws bars with the names of their series. A bar's length is the x of its first point.
    pub fn bars(mut self) -> Self {
        self.style = Style::Bars;
        self
    }

    /// Adds a series. Leaves points out that are not numbers.
    pub fn series(mut self, name: &str, points: Vec<[f64; 2]>) -> Self {
        let points = points.into_iter().filter(|[x, y]| x.is_finite() && y.is_finite()).collect();
        self.series.push(Series { name: name.into(), points });
        self
    }

    /// Adds the share of `values`, in per cent, that are not above x.
    pub fn distribution(self, name: &str, mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let last = values.len().saturating_sub(1) as f64;
        // A point for each half per cent, and more in the tail. The last few values are left out,
        // since they would stretch the axis.
        let shares = (1..=198).map(|i| f64::from(i) / 200.0);
        let shares = shares.chain((1..=9).map(|i| 0.99 + f64::from(i) / 1000.0));
        let points = shares.filter_map(|share| {
            let value = values.get((last * share).round() as usize)?;
            Some([*value, share * 100.0])
        });
        let points = points.collect();
        self.series(name, points)
    }

    pub fn svg(&self) -> Result<String, Failure> {
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let (xs, mut ys) = (self.range(0), self.range(1));
        if self.style == Style::Bars {
            ys = (0.0, self.series.len() as f64);
        }
        let what = format!("the plot {}", self.name);
        let drawn = match self.x_log {
            true => self.draw(&area, (xs.0..xs.1).log_scale(), ys.0..ys.1),
            false => self.draw(&area, xs.0..xs.1, ys.0..ys.1),
        };
        drawn.map_err(|error| Failure::new(format!("{what}: {error}")))?;
        area.present().context(&what)?;
        drop(area);
        Ok(svg)
    }

    /// The ends of an axis, with a margin.
    fn range(&self, axis: usize) -> (f64, f64) {
        let values = self.series.iter().flat_map(|series| &series.points).map(|point| point[axis]);
        let (low, high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        match (low.is_finite(), axis == 0 && self.x_log) {
            (false, _) => (1.0, 2.0),
            // Names stand to the right of their dots.
            (_, true) if self.style == Style::Dots => (low.max(1e-9) / 1.2, high.max(2e-9) * 1.8),
            (_, true) => (low.max(1e-9) / 1.2, high.max(2e-9) * 1.2),
            // From zero, so that lengths are proportional.
            _ => (0.0, if high > 0.0 { high * 1.05 } else { 1.0 }),
        }
    }

    fn draw<X>(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        xs: X,
        ys: std::ops::Range<f64>,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let plain = |error: DrawingAreaErrorKind<_>| -> Box<dyn std::error::Error> {
            error.to_string().into()
        };
        area.fill(&WHITE).map_err(plain)?;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(62)
            .build_cartesian_2d(xs, ys)
            .map_err(plain)?;
        let mut mesh = chart.configure_mesh();
        let number = |value: &f64| show(*value);
        mesh.x_desc(&self.x).y_desc(&self.y).light_line_style(WHITE).x_labels(10);
        mesh.x_label_formatter(&number).y_label_formatter(&number);
        if self.style == Style::Bars {
            mesh.disable_y_mesh().disable_y_axis();
        }
        mesh.draw().map_err(plain)?;
        for (at, (series, colour)) in self.series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            self.draw_series(&mut chart, at, series, *colour).map_err(plain)?;
        }
        if self.style == Style::Lines {
            let mut legend = chart.configure_series_labels();
            legend.background_style(WHITE.mix(0.85)).border_style(BLACK.mix(0.3));
            legend.position(SeriesLabelPosition::LowerRight).draw().map_err(plain)?;
        }
        Ok(())
    }

    fn draw_series<'a, X>(
        &self,
        chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, RangedCoordf64>>,
        at: usize,
        series: &Series,
        colour: RGBColor,
    ) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>
    where
        X: Ranged<ValueType = f64>,
    {
        let mut points = series.points.iter().map(|[x, y]| (*x, *y));
        match self.style {
            Style::Lines => {
                let line = LineSeries::new(points, colour.stroke_width(2));
                chart.draw_series(line)?.label(&series.name).legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
                });
            }
            Style::Dots => {
                // Names of neighbours are offset, so that they do not overlap.
                let below = if at.is_multiple_of(2) { -14 } else { 3 };
                chart.draw_series(points.map(|at| {
                    let name = Text::new(series.name.clone(), (7, below), ("sans-serif", 13));
                    EmptyElement::at(at) + Circle::new((0, 0), 4, colour.filled()) + name
                }))?;
            }
            Style::Bars => {
                // The first series is on top.
                let row = (self.series.len() - 1 - at) as f64;
                let value = points.next().map_or(0.0, |(x, _)| x);
                let corners = [(0.0, row + 0.15), (value, row + 0.85)];
                let bar = Rectangle::new(corners, colour.mix(0.6).filled());
                chart.draw_series(std::iter::once(bar))?;
                let name = format!("{}: {}", series.name, show(value));
                let name = Text::new(name, (8, -6), ("sans-serif", 13));
                let name = EmptyElement::at((0.0, row + 0.5)) + name;
                chart.draw_series(std::iter::once(name))?;
            }
        }
        Ok(())
    }
}

/// A number with three digits, without useless zeros.
fn show(value: f64) -> String {
    match value.abs() {
        small if small < 10.0 => {
            format!("{value:.2}").trim_end_matches('0').trim_end_matches('.').into()
        }
        middle if middle < 100.0 => format!("{value:.1}").trim_end_matches(".0").into(),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_shows_its_series_and_axes() {
        let plot = Plot::new("cdf", "Faults", "time (us)", "share (%)").log_x();
        let svg = plot
            .distribution("zram", (1..=1000).map(f64::from).collect())
            .distribution("nothing", Vec::new())
            .svg()
            .unwrap();
        for text in ["Faults", "time (us)", "share (%)", "zram"] {
            assert!(svg.contains(text), "{text}");
        }
        let dots = Plot::new("p", "Codecs", "ns", "ratio").dots().series("lz4", vec![[1.0, 2.0]]);
        assert!(dots.svg().unwrap().contains("lz4"));
        let bars = Plot::new("p", "Bytes", "bytes", "").bars().series("zram", vec![[7.0, 0.0]]);
        assert!(bars.svg().unwrap().contains("zram: 7"));
        assert!(Plot::new("p", "Empty", "x", "y").svg().is_ok());
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, 0.25, 3.0, 12.5, 1500.0].map(show), ["0", "0.25", "3", "12.5", "1500"]);
    }
}

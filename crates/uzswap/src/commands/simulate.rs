//! `uzswap simulate`: replays a trace of accesses with other memory and other policies.

use crate::cli::{ReadTime, SimulateArguments};
use crate::error::Failure;
use crate::size;
use crate::stdio::show;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Rect};
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};
use std::path::Path;
use uzswap_policy::pager_memory::PagerMemory;
use uzswap_policy::replay::{self, PAGE_BYTES, Policy, ReplayCounts};
use uzswap_trace::{Steps, Trace};

/// Part of the program's time that faults may take.
pub const PART: f64 = 0.1;

/// Step of the search for the least memory, bytes.
const STEP: u64 = 1 << 20;

/// Reads a trace. One without touches is refused.
pub fn read(file: &Path) -> Result<(Trace, Steps), Failure> {
    let trace = Trace::read(file)?;
    let steps = Steps::of(&trace);
    match steps.touches() {
        0 => Err(Failure::new(format!(
            "{}: the trace has no touch; record a program of more than 16 MiB",
            file.display()
        ))),
        _ => Ok((trace, steps)),
    }
}

/// Prints a table, a plot, or the memory that suffices.
pub fn simulate(arguments: &SimulateArguments) -> Result<(), Failure> {
    let (trace, steps) = read(&arguments.file)?;
    let recorded = trace.header.memory;
    if let Some(small) = arguments.memory.iter().find(|memory| **memory < recorded) {
        let (small, recorded) = (size::show(*small), size::show(recorded));
        let file = arguments.file.display();
        return Err(Failure::new(format!(
            "--memory {small}: {file} was recorded with {recorded}, and lacks touches of pages \
             in that memory; simulate with {recorded} or more, or record with less"
        )));
    }
    let policies: &[Policy] =
        if arguments.policy.is_empty() { &Policy::ALL } else { &arguments.policy };
    if arguments.fit {
        fit(&trace, &steps, policies, arguments.backing);
        return Ok(());
    }
    let lines = match arguments.plot {
        true => plot(&trace, &steps, arguments, policies)?,
        false => table(&trace, &steps, arguments, policies),
    };
    lines.iter().for_each(|line| show!("{line}"));
    Ok(())
}

/// Number of sizes in a plot, unless sizes are given.
const PLOTTED: u64 = 16;

/// Cells of a plot.
const PLOT_SIZE: (u16, u16) = (100, 24);

/// Faults over memory, drawn with characters.
fn plot(
    trace: &Trace,
    steps: &Steps,
    arguments: &SimulateArguments,
    policies: &[Policy],
) -> Result<Vec<String>, Failure> {
    let least = trace.header.memory;
    let whole = (steps.pages as u64 * PAGE_BYTES + least / 2).max(least + PLOTTED);
    let between = |at| least + (whole - least) * at / (PLOTTED - 1);
    let memories = match &*arguments.memory {
        [] => (0..PLOTTED).map(between).collect(),
        given => given.to_vec(),
    };
    let curve = |policy: &Policy| {
        let point = |memory: &u64| {
            let counts = replay(*policy, steps, (*memory, arguments.backing));
            (*memory as f64, counts.faults() as f64)
        };
        memories.iter().map(point).collect::<Vec<_>>()
    };
    let curves: Vec<_> = policies.iter().map(curve).collect();
    let most = curves.iter().flatten().map(|(_, faults)| *faults).fold(1.0, f64::max);
    let (first, last) = (memories.iter().min(), memories.iter().max());
    let (first, last) = (*first.unwrap_or(&0), *last.unwrap_or(&0));
    let sets = policies.iter().zip(&curves).map(|(policy, points)| {
        let (sign, marker, graph) = mark(*policy);
        let name = format!("{sign} {policy}");
        Dataset::default().name(name).marker(marker).graph_type(graph).data(points)
    });
    let chart = Chart::new(sets.collect())
        .x_axis(
            Axis::default()
                .title("memory")
                .bounds([first as f64, last.max(first + 1) as f64])
                .labels([first, first.midpoint(last), last].map(size::show)),
        )
        .y_axis(Axis::default().title("faults").bounds([0.0, most]).labels([
            "0".to_owned(),
            format!("{:.0}", most / 2.0),
            format!("{most:.0}"),
        ]))
        .hidden_legend_constraints((Constraint::Percentage(50), Constraint::Percentage(50)));
    let area = Rect::new(0, 0, PLOT_SIZE.0, PLOT_SIZE.1);
    let mut buffer = Buffer::empty(area);
    chart.render(area, &mut buffer);
    let row = |y| {
        let cells = (0..PLOT_SIZE.0).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    let rows = (0..PLOT_SIZE.1).map(row);
    Ok([about(trace, steps)].into_iter().chain(rows).collect())
}

/// Replays the steps in this memory, less the pager's part, with or without a backing.
pub fn replay(policy: Policy, steps: &Steps, (memory, backing): (u64, ReadTime)) -> ReplayCounts {
    let room = PagerMemory::of_pager(memory, backing.0);
    replay::simulate(policy, &steps.all, Some(&steps.places), room, 0)
}

/// The sign, the marker and the kind of graph of a policy, by which a plot is read without colours.
fn mark(policy: Policy) -> (char, Marker, GraphType) {
    match policy {
        Policy::ORDER => ('─', Marker::Braille, GraphType::Line),
        Policy::CLOCK => ('▄', Marker::Bar, GraphType::Scatter),
        Policy::Fifo => ('⠂', Marker::Braille, GraphType::Scatter),
        Policy::Lru => ('•', Marker::Dot, GraphType::Scatter),
        Policy::Belady => ('█', Marker::Block, GraphType::Scatter),
    }
}

/// The heading of the columns, aligned with the rows.
fn heading() -> String {
    format!(
        "{:>9} {:8} {:>10} {:>7} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "memory", "policy", "faults", "share", "resident", "pool", "written", "lost", "x belady"
    )
}

fn table(
    trace: &Trace,
    steps: &Steps,
    SimulateArguments { memory: memories, backing, .. }: &SimulateArguments,
    policies: &[Policy],
) -> Vec<String> {
    let mut lines = vec![about(trace, steps), heading()];
    let (mut has_marks, mut lacks_room) = (false, false);
    for memory in memories {
        let best = replay(Policy::Belady, steps, (*memory, *backing)).faults();
        for policy in policies {
            let counts = replay(*policy, steps, (*memory, *backing));
            let resident = counts.there_mean() * PAGE_BYTES;
            let for_pages = PagerMemory::of_pager(*memory, backing.0).bytes();
            let is_below = for_pages < trace.header.memory + counts.pool_max;
            has_marks |= is_below;
            lacks_room |= !has_room(&counts, *backing);
            lines.push(format!(
                "{:>9} {:8} {:>10} {:>5.1} % {:>9} {:>9} {:>9} {:>6.1} % {:>8}{}",
                short(*memory),
                policy.name(),
                counts.faults(),
                counts.faults() as f64 * 100.0 / counts.touches as f64,
                short(resident),
                short(counts.pool_max),
                short(counts.written),
                lost(&counts, steps) * 100.0,
                distance(counts.faults(), best),
                if is_below { " *" } else { "" }
            ));
        }
    }
    if has_marks {
        lines.push(
            "* when the pool is largest, pages have less memory than at the recording: the trace \
             lacks touches of pages that were in memory then"
                .to_owned(),
        );
    }
    if lacks_room {
        lines.push(
            "without a backing a run has no room for the bytes in the column 'written', and ends \
             there"
                .to_owned(),
        );
    }
    lines
}

/// True if a run has room for all pages: memory, or a backing.
fn has_room(counts: &ReplayCounts, backing: ReadTime) -> bool {
    backing.0.is_some() || counts.written == 0
}

fn about(trace: &Trace, steps: &Steps) -> String {
    let lost = match trace.header.lost() {
        0 => String::new(),
        lost => format!("; its last {lost} events were lost"),
    };
    format!(
        "{}: {} touches of {} pages ({}) in {:.1} s, sizes of {}{lost}",
        trace.header.program,
        steps.touches(),
        steps.pages,
        size::show(steps.pages as u64 * PAGE_BYTES),
        steps.micros as f64 / 1e6,
        trace.header.compressor
    )
}

/// A size without a space, for a table.
pub fn short(bytes: u64) -> String {
    size::show(bytes).replace(' ', "")
}

/// Faults, as a multiple of those of `best`, the policy that knows the future.
fn distance(faults: u64, best: u64) -> String {
    match best {
        0 if faults == 0 => "1.00".into(),
        0 => "-".into(),
        best => format!("{:.2}", faults as f64 / best as f64),
    }
}

/// The time of faults, as a part of the program's own time.
fn lost(counts: &ReplayCounts, steps: &Steps) -> f64 {
    counts.lost_micros() / steps.micros.max(1) as f64
}

/// The least memory in which all pages have room and faults take less than [`PART`] of a program's
/// time.
pub fn least(trace: &Trace, steps: &Steps, policy: Policy, backing: ReadTime) -> u64 {
    let fits = |memory: u64| {
        let counts = replay(policy, steps, (memory, backing));
        has_room(&counts, backing) && lost(&counts, steps) < PART
    };
    // Enough memory for all pages together.
    let whole = 2 * (steps.pages as u64 * PAGE_BYTES + trace.header.memory);
    let least = trace.header.memory;
    let (mut small, mut large) = (least, whole.max(least));
    if fits(small) {
        large = small;
    }
    while large - small > STEP {
        let middle = small + (large - small) / 2;
        if fits(middle) { large = middle } else { small = middle }
    }
    large.div_ceil(STEP) * STEP
}

/// Prints the least memory of each policy, and the least without a backing if that is more.
fn fit(trace: &Trace, steps: &Steps, policies: &[Policy], backing: ReadTime) {
    show!("{}", about(trace, steps));
    for policy in policies {
        let memory = least(trace, steps, *policy, backing);
        let alone = least(trace, steps, *policy, ReadTime(None));
        let counts = replay(*policy, steps, (memory, backing));
        let is_least = match memory <= trace.header.memory.next_multiple_of(STEP) {
            true => " or less (the trace was recorded with this memory)",
            false => "",
        };
        let without = match alone > memory {
            true => format!(" ({} without a backing)", size::show(alone)),
            false => String::new(),
        };
        show!(
            "{policy}: {}{is_least}{without}; {} faults take {:.1} % of its time",
            size::show(memory),
            counts.faults(),
            lost(&counts, steps) * 100.0
        );
    }
}

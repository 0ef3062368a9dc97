//! `uzswap trace`: sums up a trace of accesses, prints, cuts and exports it.

use crate::cli::TraceArguments;
use crate::error::Failure;
use crate::size;
use crate::stdio::{say, show};
use uzswap_engine::PAGE_BYTES;
use uzswap_trace::{Event, Steps, Summary, Trace};

pub fn trace(arguments: &TraceArguments) -> Result<(), Failure> {
    let trace = Trace::read(&arguments.file)?;
    if let (Some(range), Some(out)) = (&arguments.cut, &arguments.out) {
        let (file, count) = (arguments.file.display(), trace.events.len());
        let (start, end) = (range.start, range.end);
        let cut = trace.cut(range.clone()).ok_or_else(|| {
            Failure::new(format!(
                "--cut {start}..{end}: {file} has {count} events; end at {count} at most"
            ))
        })?;
        return Ok(cut.write(out)?);
    }
    if let Some(out) = &arguments.export {
        let touches = Steps::of(&trace).export(&trace, out)?;
        say!("uzswap: {touches} touches are in {}", out.display());
        return Ok(());
    }
    if arguments.print {
        let end = arguments.to.unwrap_or(usize::MAX).min(trace.events.len());
        let range = arguments.from.min(end)..end;
        show!("event time_us process page kind access bytes site");
        for (at, event) in range.clone().zip(&trace.events[range]) {
            show!("{at} {}", line(event));
        }
        return Ok(());
    }
    summary(&trace).iter().for_each(|line| show!("{line}"));
    Ok(())
}

fn line(event: &Event) -> String {
    let Event { what, page, process, micros, site, bytes, .. } = event;
    let access = match (what.is_touch(), event.is_write) {
        (false, _) => "-",
        (_, true) => "write",
        (_, false) => "read",
    };
    let kept = match (event.is_same_filled, event.is_identical) {
        (true, _) => "same-filled".to_owned(),
        (_, true) => format!("{bytes}=identical"),
        _ => bytes.to_string(),
    };
    format!("{micros} {process} {page:#x} {} {access} {kept} {site:#x}", what.name())
}

fn summary(trace: &Trace) -> Vec<String> {
    let header = &trace.header;
    let (summary, steps) = (Summary::of(trace), Steps::of(trace));
    let percent = |part: u64| part as f64 * 100.0 / summary.touches.max(1) as f64;
    let memory = size::show(header.memory);
    let mut lines = vec![
        format!(
            "{}: recorded with {memory} for pages, sizes of {}",
            header.program, header.compressor
        ),
        format!(
            "{} touches, {:.1} % of them writes, in {} events of {} processes; {} were lost",
            summary.touches,
            percent(summary.writes),
            trace.events.len(),
            summary.processes,
            header.lost()
        ),
        format!(
            "{} pages ({}), {:.3} s of the program's processor time",
            summary.pages,
            size::show(summary.pages as u64 * PAGE_BYTES as u64),
            steps.micros as f64 / 1e6
        ),
    ];
    if let Some([least, lower, median, upper, most]) = summary.sizes {
        lines.push(format!(
            "compressed to {median} bytes (quartiles {lower} and {upper}, from {least} to {most}); \
             {} came back same-filled, {} identical to others",
            summary.same_filled, summary.identical
        ));
    }
    lines.push("most touches from the instructions at".to_owned());
    lines.extend(summary.sites.iter().map(|(site, touches)| match site {
        0 => format!("  system calls, or not known: {touches} ({:.1} %)", percent(*touches)),
        _ => format!("  {site:#010x}: {touches} ({:.1} %)", percent(*touches)),
    }));
    lines
}

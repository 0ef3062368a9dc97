//! A trace has all that its processes wrote; foreign and damaged files are refused in one line.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use uzswap_trace::{EVENT_BYTES, Event, Header, Log, Steps, Summary, Trace, TraceError, What};

const HEADER_BYTES: usize = 128;

fn header(room: u64) -> Header {
    Header {
        room,
        asked: 0,
        memory: 16 << 20,
        processes: 0,
        compressor: "lz4:0".into(),
        program: "sort".into(),
    }
}

fn event(what: What, page: u64) -> Event {
    Event {
        what,
        page,
        process: 0,
        micros: 0,
        site: 0x1234,
        bytes: if what == What::Back { 1000 } else { 0 },
        is_write: page.is_multiple_of(2),
        is_same_filled: false,
        is_identical: false,
    }
}

/// A log with this room and these events, in a new folder.
fn log(room: u64, pages: u64) -> (tempfile::TempDir, PathBuf, Log) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    Log::create(&path, &header(room)).unwrap();
    let log = Log::join(&path).unwrap();
    (0..pages).for_each(|page| log.add(event(What::New, page)));
    (folder, path, log)
}

#[test]
fn events_of_several_threads_and_processes_are_all_there() {
    const THREADS: u64 = 4;
    const PAGES: u64 = 5000;
    let (folder, path, first) = log(1 << 20, 0);
    let second = Log::join(&path).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let log = if thread % 2 == 0 { &first } else { &second };
            let pages = thread * PAGES..(thread + 1) * PAGES;
            scope.spawn(move || pages.for_each(|page| log.add(event(What::New, page))));
        }
    });
    let trace = Trace::read(&path).unwrap();
    assert_eq!((trace.header.processes, trace.header.lost()), (2, 0));
    let mut pages: Vec<u64> = trace.events.iter().map(|event| event.page).collect();
    pages.sort_unstable();
    assert!(pages.into_iter().eq(0..THREADS * PAGES));
    let is_second = |event: &Event| event.page / PAGES % 2 == 1;
    assert!(trace.events.iter().all(|event| (event.process == 1) == is_second(event)));
    // A copy has room for its events alone, and is otherwise equal.
    let copy = folder.path().join("copy");
    trace.write(&copy).unwrap();
    let again = Trace::read(&copy).unwrap();
    assert_eq!((&again.events, &again.header.program), (&trace.events, &trace.header.program));
    let bytes = (THREADS * PAGES) as usize * EVENT_BYTES + HEADER_BYTES;
    assert_eq!(fs::metadata(&copy).unwrap().len(), bytes as u64);
    assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o600, "for its owner alone");
}

#[test]
fn a_full_log_takes_no_more_and_counts_the_rest() {
    let (folder, path, log) = log(100, 130);
    let trace = Trace::read(&path).unwrap();
    assert_eq!((trace.events.len(), trace.header.lost()), (100, 30));
    assert!(trace.events.iter().map(|event| event.page).eq(0..100));
    let copy = folder.path().join("copy");
    trace.write(&copy).unwrap();
    assert_eq!(Trace::read(&copy).unwrap().header.lost(), 30);
    assert_eq!(trace.cut(90..100).unwrap().header.lost(), 0, "none of a part is lost");
    assert_eq!(trace.cut(90..101), None);
    drop(log);
}

#[test]
fn time_is_the_processes_own_without_the_pagers() {
    let (_folder, path, log) = log(100, 0);
    let spin = |nanos: u64| {
        let begin = uzswap_trace_clock();
        while uzswap_trace_clock() - begin < nanos {}
    };
    log.add(event(What::New, 0));
    spin(20_000_000);
    log.add(event(What::New, 1));
    {
        let _own = log.own_time();
        spin(50_000_000);
    }
    log.add(event(What::New, 2));
    let times: Vec<u64> = Trace::read(&path).unwrap().events.iter().map(|one| one.micros).collect();
    // Other tests of this process take time as well.
    assert!(times[1] - times[0] >= 19_000, "{times:?}");
    assert!(times[2] - times[0] >= times[1] - times[0], "{times:?}");
    log.forked();
    log.add(event(What::New, 3));
    assert_eq!(Trace::read(&path).unwrap().events[3].process, 1);
}

/// Processor time of this thread, ns.
fn uzswap_trace_clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The error for a file with these bytes.
fn error(bytes: &[u8]) -> TraceError {
    Trace::from_bytes(Path::new("some.trace"), bytes).unwrap_err()
}

#[test]
fn a_file_that_is_no_trace_is_refused_in_one_line() {
    let (_folder, path, _log) = log(50, 20);
    let whole = fs::read(&path).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let first = HEADER_BYTES;
    for (bytes, says, remedy) in [
        (b"\x7fELF and more".to_vec(), "no trace of accesses", "uzswap record --accesses"),
        (Vec::new(), "no trace of accesses", "uzswap record --accesses"),
        (whole[..100].to_vec(), "cut off: 100 of 128 bytes", "copy it again"),
        (whole[..128 + 19 * 24].to_vec(), "cut off: 584 of 608 bytes", "copy it again"),
        (with(8, &9u32.to_le_bytes()), "of version 9", "record it again"),
        (with(12, &0x0102_0304u32.to_be_bytes()), "the other byte order", "such a machine"),
        (with(20, &32u32.to_le_bytes()), "sizes that version 1 has not", "copy it again"),
        (with(48, &u64::MAX.to_le_bytes()), "numbers that cannot be", "copy it again"),
        (with(120, &[1]), "numbers that cannot be", "copy it again"),
        (with(first + 7, &[0xff]), "event 0 has values", "copy it again"),
        (with(first + 24 + 8 + 5, &[7]), "event 1 has values", "record it again"),
    ] {
        let text = error(&bytes).to_string();
        assert!(text.starts_with("some.trace: ") && text.contains(says), "{text}");
        assert!(text.contains(remedy) && !text.contains('\n'), "{text}");
    }
    let missing = Trace::read(Path::new("/nowhere/some.trace")).unwrap_err().to_string();
    assert!(missing.starts_with("/nowhere/some.trace: No such file"), "{missing}");
    let there = Log::create(&path, &header(50)).unwrap_err().to_string();
    assert!(there.contains("name a file that is not there"), "{there}");
    assert_eq!(fs::read(&path).unwrap(), whole, "it stays as it was");
}

#[test]
fn an_event_that_its_process_did_not_finish_is_left_out() {
    let (_folder, path, _log) = log(50, 20);
    let mut bytes = fs::read(&path).unwrap();
    bytes[HEADER_BYTES + 5 * EVENT_BYTES..][..8].fill(0);
    let trace = Trace::from_bytes(&path, &bytes).unwrap();
    assert_eq!(trace.events.len(), 19);
}

#[test]
fn any_bytes_are_read_or_refused_and_nothing_else() {
    let (_folder, path, _log) = log(40, 40);
    let whole = fs::read(&path).unwrap();
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let mut refused = 0;
    for _ in 0..5000 {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        let mut bytes = whole.clone();
        let at = (noise >> 8) as usize % bytes.len();
        bytes[at] ^= (noise as u8).max(1);
        match Trace::from_bytes(Path::new("x"), &bytes) {
            Ok(trace) => _ = (Summary::of(&trace), Steps::of(&trace)),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn libcachesim_gets_each_touch_with_its_size_and_its_next() {
    let (folder, path, log) = log(50, 0);
    [(What::New, 7), (What::New, 9), (What::Back, 7), (What::Left, 9), (What::Gone, 7)]
        .into_iter()
        .for_each(|(what, page)| log.add(event(what, page)));
    log.add(event(What::New, 7));
    let trace = Trace::read(&path).unwrap();
    let out = folder.path().join("oracle");
    assert_eq!(Steps::of(&trace).export(&trace, &out).unwrap(), 4);
    let bytes = fs::read(&out).unwrap();
    let number = |record: usize, at: usize, bytes_of: usize| {
        let mut word = [0; 8];
        word[..bytes_of].copy_from_slice(&bytes[record * 24 + at..][..bytes_of]);
        u64::from_le_bytes(word)
    };
    let records = (0..bytes.len() / 24).map(|record| {
        let (object, size) = (number(record, 4, 8), number(record, 12, 4));
        (object, size, number(record, 16, 8) as i64)
    });
    // Page 7, page 9 whose size is unknown, page 7 again, and page 7 after it was given back.
    assert_eq!(
        records.collect::<Vec<_>>(),
        [(0, 1000, 2), (2, 1000, -1), (0, 1000, -1), (1, 1000, -1)]
    );
}

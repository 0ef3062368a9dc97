//! Uses more memory than it has, and checks every byte.
//!
//! `churn MIB UNTIL PROCESSES`: each process fills its share of the memory with text, pointers,
//! noise, mixtures and zeros. Then it checks and rewrites pages at random, and at the end checks
//! all of them. `UNTIL` is a number of seconds, or a file whose removal ends the rewriting. Prints
//! one line; ends with 1 at the first wrong byte.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::testing::{Content, Noise, make_page};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|argument| argument.parse::<u64>().ok());
    let (Some(mib), Some(until), Some(processes)) = (number(0), arguments.get(1), number(2)) else {
        eprintln!("usage: churn MIB SECONDS|FILE PROCESSES");
        return ExitCode::from(2);
    };
    match number(3) {
        Some(seed) => churn(mib, until, seed),
        None => spread(mib / processes.max(1), until, processes),
    }
}

/// Starts the processes and waits for all of them.
fn spread(mib: u64, until: &str, processes: u64) -> ExitCode {
    let program = std::env::current_exe().expect("the path of this program");
    let start = |seed: u64| {
        let [mib, one, seed] = [mib, 1, seed + 1].map(|number| number.to_string());
        Command::new(&program).args([&mib, until, &one, &seed]).spawn().expect("a process")
    };
    let children: Vec<_> = (0..processes).map(start).collect();
    let mut worst = ExitCode::SUCCESS;
    for mut child in children {
        let status = child.wait().expect("a child");
        if !status.success() {
            eprintln!("churn: a process ended with {status}");
            worst = ExitCode::FAILURE;
        }
    }
    worst
}

/// The content of page `number` in a `version`. Some pages are identical to others.
fn page_of(seed: u64, number: usize, version: u16, page: &mut [u8; PAGE_BYTES]) {
    let content = Content::ALL[(number / 7 + usize::from(version)) % Content::ALL.len()];
    let twin = if number.is_multiple_of(11) { 0 } else { number as u64 };
    make_page(content, seed * 1_000_003 + twin * 65_537 + u64::from(version), page);
}

fn churn(mib: u64, until: &str, seed: u64) -> ExitCode {
    let pages = (mib as usize) << 20 >> 12;
    let mut memory = vec![0u8; pages * PAGE_BYTES];
    let mut versions = vec![0u16; pages];
    let (frames, _) = memory.as_chunks_mut::<PAGE_BYTES>();
    for (number, frame) in frames.iter_mut().enumerate() {
        page_of(seed, number, 0, frame);
    }
    let mut noise = Noise::new(seed);
    let end = until.parse().map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let goes_on = || match end {
        Ok(end) => Instant::now() < end,
        Err(_) => Path::new(until).exists(),
    };
    let mut expected = [0; PAGE_BYTES];
    let mut rounds = 0u64;
    let mut check = |frames: &[[u8; PAGE_BYTES]], number: usize, version: u16| {
        page_of(seed, number, version, &mut expected);
        let right = frames[number] == expected;
        if !right {
            let at = frames[number].iter().zip(&expected).position(|(a, b)| a != b);
            eprintln!("churn {seed}: page {number} version {version} is wrong at {at:?}");
        }
        right
    };
    while goes_on() {
        // Like other programs, this mostly uses a few neighbouring pages.
        let first = noise.below(pages as u64) as usize;
        let count = 1 + noise.below(8) as usize;
        for number in first..(first + count).min(pages) {
            if !check(frames, number, versions[number]) {
                return ExitCode::FAILURE;
            }
            if noise.below(3) > 0 {
                versions[number] += 1;
                page_of(seed, number, versions[number], &mut frames[number]);
            }
            rounds += 1;
        }
    }
    if !(0..pages).all(|number| check(frames, number, versions[number])) {
        return ExitCode::FAILURE;
    }
    println!("churn {seed}: {pages} pages, {rounds} visits, every byte right");
    ExitCode::SUCCESS
}

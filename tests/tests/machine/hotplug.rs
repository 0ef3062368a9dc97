//! CPUs, memory and nodes of a large virtual machine come and go while programs swap. The
//! command is `cargo run -p xtask -- vm --cpus 16 --nodes 4 --memory 2G --hot-memory 512M
//! hotplug`.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use uzswap_tests::{Machine, Run, process_of, program, skip, wait_for};

const CPUS: &str = "/sys/devices/system/cpu";
const BLOCKS: &str = "/sys/devices/system/memory";
const PAGE: u64 = 4096;

/// The node that memory is plugged into, and the node that is emptied.
const NODE: usize = 1;

/// The emulator's monitor, at the other end of a serial line.
struct Monitor(File);

impl Monitor {
    /// The virtual machine's monitor. `None`, with a message, if the test runs elsewhere.
    fn open() -> Option<Self> {
        let Ok(line) = std::env::var("UZSWAP_TEST_MONITOR") else {
            skip("no virtual machine whose memory can be changed (vm --hot-memory)");
            return None;
        };
        let file = File::options().write(true).open(&line).unwrap();
        // The line must be raw, and without an echo.
        let set = Command::new("stty").args(["-F", &line, "raw", "-echo"]).status().unwrap();
        assert!(set.success());
        Some(Self(file))
    }

    fn ask(&mut self, command: &str) {
        println!("monitor: {command}");
        self.0.write_all(format!("{command}\n").as_bytes()).unwrap();
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[test]
fn sixteen_cpus_go_to_one_and_come_back() {
    let Some(_monitor) = Monitor::open() else { return };
    let Some(_machine) = Machine::take() else { return };
    let last: usize = read(format!("{CPUS}/online")).strip_prefix("0-").unwrap().parse().unwrap();
    let run = Run::churn("16M");
    let states = || read(run.mount().join("parameters/cpus"));
    let expect = |wanted: &str| {
        assert!(wait_for(|| states() == wanted), "{}, not {wanted}", states());
        println!("{wanted}");
    };
    let all = format!("0-{last} online");
    expect(&all);
    let began = Instant::now();
    for (value, order) in [("0", (1..=last).rev().collect::<Vec<_>>()), ("1", (1..=last).collect())]
    {
        for cpu in order {
            fs::write(format!("{CPUS}/cpu{cpu}/online"), value).unwrap();
        }
        match value {
            "0" => expect(&format!("0 online, 1-{last} offline")),
            _ => expect(&all),
        }
    }
    println!("{last} CPUs went and came in {} s", began.elapsed().as_secs());
    run.finish().assert_whole(4);
}

/// Blocks of the machine's memory, by number.
fn blocks() -> BTreeSet<u64> {
    let names = fs::read_dir(BLOCKS).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix("memory")?.parse().ok()).collect()
}

fn block_file(block: u64, name: &str) -> PathBuf {
    PathBuf::from(format!("{BLOCKS}/memory{block}/{name}"))
}

fn frames(blocks: &BTreeSet<u64>) -> Vec<Range<u64>> {
    let bytes = u64::from_str_radix(&read(format!("{BLOCKS}/block_size_bytes")), 16).unwrap();
    let frames = bytes / PAGE;
    blocks.iter().map(|block| block * frames..(block + 1) * frames).collect()
}

/// Number of a process's pages in these frames, by the kernel's tables.
fn pages_in(process: i32, frames: &[Range<u64>]) -> usize {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let mut pagemap = File::open(format!("/proc/{process}/pagemap")).unwrap();
    let mut count = 0;
    for line in maps.lines().filter(|line| !line.ends_with("[vsyscall]")) {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let [start, end] = [start, end].map(|hex| u64::from_str_radix(hex, 16).unwrap() / PAGE);
        pagemap.seek(SeekFrom::Start(start * 8)).unwrap();
        // Most of the address space is empty, so it is read in pieces.
        let mut left = end - start;
        let mut words = vec![0; 8 << 16];
        while left > 0 {
            let now = left.min(1 << 16) as usize;
            // An error means that the mapping is gone.
            let Ok(()) = pagemap.read_exact(&mut words[..now * 8]) else { break };
            let (entries, _) = words[..now * 8].as_chunks::<8>();
            let frame = |entry: &[u8; 8]| u64::from_ne_bytes(*entry);
            let present = entries.iter().map(frame).filter(|entry| entry >> 63 == 1);
            let number = |entry: u64| entry & ((1 << 55) - 1);
            let there = |entry: &u64| frames.iter().any(|part| part.contains(&number(*entry)));
            count += present.filter(there).count();
            left -= now as u64;
        }
    }
    count
}

/// Writes a block's state until the kernel accepts it. Returns the number of refusals.
fn set_block(block: u64, state: &str) -> usize {
    let mut refused = 0;
    let is_set = wait_for(|| {
        let done = fs::write(block_file(block, "state"), state).is_ok();
        refused += usize::from(!done);
        done
    });
    assert!(is_set, "block {block} does not become {state}");
    refused
}

fn total_mib() -> u64 {
    uzswap_sys::cpu::memory_info().unwrap().total >> 20
}

#[test]
fn memory_is_plugged_in_used_and_taken_out_while_it_is_in_use() {
    let Some(mut monitor) = Monitor::open() else { return };
    let Some(_machine) = Machine::take() else { return };
    let (before, total) = (blocks(), total_mib());
    monitor.ask("object_add memory-backend-ram,id=hot,size=512M");
    monitor.ask(&format!("device_add pc-dimm,id=dimm,memdev=hot,node={NODE}"));
    let plugged = || blocks().difference(&before).copied().collect::<BTreeSet<_>>();
    let bytes = u64::from_str_radix(&read(format!("{BLOCKS}/block_size_bytes")), 16).unwrap();
    let wanted = (512 << 20) / bytes;
    assert!(wait_for(|| plugged().len() as u64 == wanted), "{:?} came", plugged());
    let dimm = plugged();
    for block in &dimm {
        if read(block_file(*block, "state")) == "offline" {
            set_block(*block, "online_movable");
        }
        assert_eq!(read(block_file(*block, "state")), "online");
    }
    let more = total_mib();
    println!("blocks {dimm:?} of {} MiB came; {total} MiB, then {more}", bytes >> 20);
    assert!(more > total + 400, "{total}, then {more}");
    let run = Run::churn("64M");
    let daemon = process_of("daemon");
    let used = || pages_in(daemon, &frames(&dimm));
    assert!(wait_for(|| used() > 2000), "{} pages of the daemon are there", used());
    println!("{} pages of the daemon are there", used());
    let began = Instant::now();
    let refused: usize = dimm.iter().map(|block| set_block(*block, "offline")).sum();
    let took = began.elapsed().as_secs();
    println!("off line in {took} s, {refused} times not at once, {} MiB", total_mib());
    assert_eq!(used(), 0);
    assert!(total_mib() < total + 100);
    monitor.ask("device_del dimm");
    assert!(wait_for(|| plugged().is_empty()), "{:?} stay", plugged());
    println!("unplugged");
    run.finish().assert_whole(4);
}

/// Bytes of the pool that are used on a node.
fn used_on(run: &Run, node: usize) -> u64 {
    let table = read(run.mount().join("stats/sections"));
    let of_node = table.lines().skip(1).filter_map(|line| {
        let fields = line.split(' ').collect::<Vec<_>>();
        let [_, _, of, used] = fields[..] else { return None };
        (of == node.to_string()).then(|| used.parse::<u64>().unwrap_or_default())
    });
    of_node.sum()
}

#[test]
fn a_node_is_emptied_whole_while_programs_use_it() {
    let Some(_monitor) = Monitor::open() else { return };
    let Some(_machine) = Machine::take() else { return };
    let run = Run::churn("48M");
    assert!(wait_for(|| used_on(&run, NODE) > 1 << 20), "nothing comes to node {NODE}");
    let before = used_on(&run, NODE);
    let change = |change: &str| {
        let node = format!("node{NODE}");
        let output = Command::new(program("uzswap")).args(["memory", change, &node]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let began = Instant::now();
    change("offline");
    println!("{} KiB left node {NODE} in {} s", before >> 10, began.elapsed().as_secs());
    assert_eq!(used_on(&run, NODE), 0);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(used_on(&run, NODE), 0, "nothing comes back");
    change("online");
    assert!(wait_for(|| used_on(&run, NODE) > 0), "nothing comes to node {NODE} again");
    run.finish().assert_whole(4);
}

//! Code that the program writes as it runs, and that makes system calls itself. These calls are not
//! replaced ([`uzswap_calls::sites::makes_call`]), and would not see memory that is out. So the
//! agent leaves such a program alone. It looks at code when the code becomes executable, and at the
//! take-over. If the program may still write the code's memory, the agent looks at the code when it
//! is first executed ([`crate::withheld`]).

use crate::pins::{Pins, peek_bytes};
use crate::withheld::{self, Fetched};
use crate::{AGENT, Agent, inside, looker, seccomp, stacks};
use std::fs;
use std::ops::Range;
use uzswap_calls::{Call, sites, table};
use uzswap_sys::fault_signals::OnFetch;
use uzswap_sys::map::Mapped;

pub const REASON: &str = "it generates code that makes system calls itself";

/// Bytes that are looked at together.
const PART: usize = 64 << 10;

/// Before `mprotect`, `pkey_mprotect`: leaves the program alone if the memory has code that makes
/// system calls itself.
pub fn before_protect(agent: &Agent, call: &Call) {
    let [at, bytes, access, ..] = call.arguments;
    if access as i32 & libc::PROT_EXEC == 0 {
        return;
    }
    let range = at as usize..at.saturating_add(bytes) as usize;
    let bring = |part| _ = Pins::new(agent).pin(part, PART as u64);
    let inside = inside();
    let found = makes_call(range, bring);
    drop(inside);
    if found {
        seccomp::leave(agent, REASON);
    }
}

/// Before the take-over: true if the program has generated code that makes system calls itself.
pub fn is_there() -> bool {
    looker::apart(|| {
        let maps = fs::read_to_string("/proc/thread-self/maps").unwrap_or_default();
        let written = maps.lines().filter_map(Mapped::parse).filter(|one| {
            let is_kernels = one.name.starts_with("[v");
            one.access[2] == b'x' && one.access[3] == b'p' && !one.has_file && !is_kernels
        });
        written.map(|one| one.range).any(|range| makes_call(range, |_| {}))
    })
}

/// True if a range has code that makes system calls itself, as far as the range can be read. Calls
/// `bring` before it reads a part.
fn makes_call(range: Range<usize>, bring: impl Fn(u64)) -> bool {
    let mut code = vec![0; PART];
    let mut at = range.start;
    while at < range.end {
        let bytes = PART.min(range.end - at);
        bring(at as u64);
        let read = peek_bytes(at as u64, &mut code[..bytes]);
        if sites::makes_call(&code[..read], table::is_looked_at) {
            return true;
        }
        if read < PART {
            break;
        }
        // A call may lie across the end of a part.
        at += PART - sites::OVERLAP;
    }
    false
}

/// Serves a fault at the fetch of an instruction ([`withheld::fetch`]).
pub fn on_fetch(address: usize) -> OnFetch {
    match withheld::fetch(address) {
        Fetched::Permitted => OnFetch::Again,
        Fetched::Call => OnFetch::Run(leave),
        Fetched::Foreign => OnFetch::Pass,
    }
}

/// Leaves the program alone. Runs like a handler of the program's, before the generated code runs.
extern "C" fn leave(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    stacks::for_call(|| {
        AGENT.get().into_iter().for_each(|agent| seccomp::leave(agent, REASON));
    });
}

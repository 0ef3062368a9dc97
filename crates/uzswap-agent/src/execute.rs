//! `execve`: the agent pins the path and all strings while the kernel copies them. The kernel
//! answers `EFAULT` if a string is absent. While the agent pins strings, other threads may need all
//! memory.

use crate::pins::{Pins, TRIES, peek_bytes};
use crate::{Agent, limits, stacks};
use libc::c_long;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;

/// See the module.
pub fn execute(agent: &Agent, call: &mut Call) -> Outcome {
    limits::tell_kernel();
    let _ = (0..TRIES).any(|_| try_to_execute(agent, call));
    Outcome::Done
}

/// True if no further try is needed.
fn try_to_execute(agent: &Agent, call: &mut Call) -> bool {
    let strings = match call.number as c_long {
        libc::SYS_execve => [1, 2],
        _ => [2, 3],
    };
    let mut strings_in = StringsIn { agent, pins: Pins::of_last_call(agent), page: 0 };
    strings_in.bring_string(call.arguments[strings[0] - 1]);
    for list in strings.map(|argument| call.arguments[argument]) {
        strings_in.bring_list(list);
    }
    let stack = stacks::disclaim();
    // SAFETY: the program's own call; after a success this is another program.
    call.result = unsafe { raw(call.number, call.arguments) };
    stack.map(stacks::set_in_kernel);
    call.result != -i64::from(libc::EFAULT)
}

/// The strings that were brought in.
struct StringsIn<'a> {
    agent: &'a Agent,
    /// Pins strings, as far as they may be pinned; `None` if none may be.
    pins: Option<Pins<'a>>,
    /// The last page that was pinned for a string. The next string is most likely in the same page.
    page: u64,
}

impl StringsIn<'_> {
    /// Brings memory in, if it is adopted.
    fn bring(&mut self, at: u64, bytes: u64) {
        match self.pins.as_mut().filter(|pins| pins.left() > 0) {
            Some(pins) => pins.pin(at, bytes),
            None => Pins::new(self.agent).pin(at, bytes),
        };
    }

    /// Brings in a list of strings, which ends with a null. If a part cannot be read, the kernel
    /// will refuse the list.
    fn bring_list(&mut self, list: u64) {
        let mut at = list;
        while at != 0 {
            self.bring(at, 8);
            let mut strings = [0u64; 32];
            // Up to the end of the page, so that all of these words are present or all are absent.
            let count = ((page_end(at) - at) as usize / 8).clamp(1, strings.len());
            let read = peek_bytes(at, bytes_of(&mut strings[..count])) / 8;
            for string in &strings[..read] {
                if *string == 0 {
                    return;
                }
                self.bring_string(*string);
            }
            if read == 0 {
                return;
            }
            at += read as u64 * 8;
        }
    }

    /// Brings a string in, page by page up to its end. A string may begin in memory that stays and
    /// end in memory that is out.
    fn bring_string(&mut self, string: u64) {
        let mut at = string;
        while at != 0 {
            let end = page_end(at);
            if end != self.page {
                self.bring(at, 1);
            }
            self.page = end;
            while at < end {
                let mut part = [0u8; 256];
                let count = ((end - at) as usize).min(part.len());
                let read = peek_bytes(at, &mut part[..count]);
                if read < count || part[..read].contains(&0) {
                    return;
                }
                at += read as u64;
            }
        }
    }
}

/// The bytes of some words.
pub fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: any bytes are valid words, and the length is that of the words.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

fn page_end(at: u64) -> u64 {
    (at | (PAGE_BYTES as u64 - 1)).saturating_add(1)
}

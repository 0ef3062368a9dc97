//! Takes our threads and descriptors out of the lists that the program reads about itself: the
//! number of threads in `/proc/self/stat` and `status`, and the folders `task` and `fd`. CPython
//! warns of a fork in a process with several threads, and daemons close all descriptors of the
//! folder.

use crate::own_files::{self, Listing};
use crate::pins::{Pins, make_once};
use crate::{Agent, inside, own_descriptors, threads};
use std::ops::Range;
use std::ptr;
use uzswap_calls::Call;

/// A longer text is none of these.
const TEXT_MAX: usize = 4096;

/// Corrects the number of threads in the text that a call has read.
pub fn correct_text(agent: &Agent, call: &mut Call) {
    let bytes = call.result.max(0) as usize;
    let Some(Listing::Text(number)) = own_files::list_of(call, libc::S_IFREG) else { return };
    if bytes > TEXT_MAX {
        return;
    }
    let mut pins = Pins::new(agent);
    pins.pin(call.arguments[1], bytes as u64);
    let to = call.arguments[1] as *mut u8;
    let mut text = [0; TEXT_MAX];
    // SAFETY: the kernel has just written there, and the pages are pinned.
    unsafe { ptr::copy_nonoverlapping(to, text.as_mut_ptr(), bytes) };
    let is_status = number == 1;
    let Some(place) = number_of_threads(&text[..bytes], is_status) else { return };
    let kernels = text[place.clone()].iter().fold(0, |sum, digit| sum * 10 + (digit - b'0') as u32);
    let mut left = kernels.saturating_sub(threads::count() as u32).max(1);
    let mut digits = [0; 10];
    let mut at = digits.len();
    while left > 0 {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
    }
    let digits = &digits[at..];
    let end = place.start + digits.len();
    text[place.start..end].copy_from_slice(digits);
    text.copy_within(place.end..bytes, end);
    // SAFETY: as above; the text has become no longer.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), to, bytes) };
    call.result -= (place.end - end) as i64;
}

/// The digits of the number of threads, if the text has all of them.
fn number_of_threads(text: &[u8], is_status: bool) -> Option<Range<usize>> {
    const LABEL: &[u8] = b"\nThreads:\t";
    /// Fields between the name, which ends with the last parenthesis, and the number.
    const FIELDS: usize = 18;
    let start = match is_status {
        true => text.windows(LABEL.len()).position(|part| part == LABEL)? + LABEL.len(),
        false => {
            let name = text.iter().rposition(|byte| *byte == b')')?;
            let blanks = (name..text.len()).filter(|at| text[*at] == b' ');
            blanks.take(FIELDS).last().filter(|_| text[0].is_ascii_digit())? + 1
        }
    };
    let digits = text[start..].iter().position(|byte| !byte.is_ascii_digit())?;
    (digits > 0 && digits < 10).then_some(start..start + digits)
}

/// Takes our entries out of a list of a folder, and reads on if no other is left.
pub fn correct_folder(call: &mut Call) {
    while let Some(list) = own_files::list_of(call, libc::S_IFDIR) {
        call.result = without_ours(call, list) as i64;
        if call.result > 0 {
            return;
        }
        make_once(call);
    }
}

/// Returns the bytes of the entries that stay.
fn without_ours(call: &Call, list: Listing) -> usize {
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let _inside = inside();
    let at = call.arguments[1] as *mut u8;
    let mut entries = vec![0; call.result as usize];
    // SAFETY: the kernel has just written there, and the pages are pinned.
    unsafe { ptr::copy_nonoverlapping(at, entries.as_mut_ptr(), entries.len()) };
    let mut kept = Vec::with_capacity(entries.len());
    let mut rest = &entries[..];
    while rest.len() > NAME {
        let bytes = usize::from(u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]));
        let Some((entry, others)) = rest.split_at_checked(bytes) else { break };
        let name = entry.get(NAME..).unwrap_or_default().split(|byte| *byte == 0).next();
        let number = name.and_then(|name| str::from_utf8(name).ok()?.parse::<i32>().ok());
        let is_ours = |number| match list {
            Listing::Descriptors => own_descriptors::is_ours(number),
            _ => threads::is_ours(number),
        };
        if !number.is_some_and(is_ours) {
            kept.extend_from_slice(entry);
        }
        if bytes == 0 {
            break;
        }
        rest = others;
    }
    // SAFETY: as above; no more than the kernel has written.
    unsafe { ptr::copy_nonoverlapping(kept.as_ptr(), at, kept.len()) };
    kept.len()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_is_found_where_all_of_it_was_read() {
        let fields: Vec<String> = (3..25).map(|field| field.to_string()).collect();
        let stat = format!("77 (a) b 5) {}", fields.join(" "));
        let place = number_of_threads(stat.as_bytes(), false).unwrap();
        assert_eq!(&stat[place.clone()], "20");
        assert_eq!(number_of_threads(&stat.as_bytes()[..place.end], false), None);
        let status = "Name:\tThreads:\nThreads:\t5\nSigQ:\t0\n";
        assert_eq!(&status[number_of_threads(status.as_bytes(), true).unwrap()], "5");
        assert_eq!(number_of_threads(b"Threads", true), None);
    }
}

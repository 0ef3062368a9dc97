//! A trace as steps for a replay.
//!
//! A page lives from its first event until the event that it is gone, or the last event of its
//! process. After that, another page has the address. Pages are numbered by process and address,
//! the order in which the pager's hand moves.

use crate::event::{Event, What};
use crate::read::Trace;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use uzswap_policy::replay::Step;

/// The steps of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steps {
    /// The steps, in order.
    pub all: Vec<Step>,
    /// The index of each step's event.
    pub events: Vec<usize>,
    /// Number of pages.
    pub pages: usize,
    /// The place of each page. Neighbours have consecutive numbers.
    pub places: Vec<u32>,
    /// Processor time of all processes up to their last events, µs.
    pub micros: u64,
}

/// A page's life: process, address, and the number of the life at that address.
type Life = (u32, u64, u32);

/// A step whose page has no number yet, and whose compressed size is not known yet.
struct Draft {
    life: Life,
    is_touch: bool,
    event: usize,
}

impl Steps {
    /// The steps of a trace.
    pub fn of(trace: &Trace) -> Self {
        let drafts = drafts(&trace.events);
        let after = after(&trace.events, &drafts);
        let mut numbers: BTreeMap<Life, u32> = drafts.iter().map(|one| (one.life, 0)).collect();
        numbers.values_mut().zip(0..).for_each(|(number, at)| *number = at);
        let places = places(numbers.keys());
        let step = |(draft, after): (&Draft, After)| {
            let page = numbers[&draft.life];
            let is_write = trace.events[draft.event].is_write;
            let After { bytes, changes } = after;
            match draft.is_touch {
                true => Step::Touch { page, bytes, is_write, changes: changes || is_write },
                false => Step::Gone { page },
            }
        };
        let all = drafts.iter().zip(after).map(step).collect();
        let mut last = BTreeMap::new();
        for event in &trace.events {
            let micros: &mut u64 = last.entry(event.process).or_default();
            *micros = event.micros.max(*micros);
        }
        let events = drafts.iter().map(|draft| draft.event).collect();
        Self { all, events, pages: numbers.len(), places, micros: last.values().sum() }
    }

    /// Number of touches.
    pub fn touches(&self) -> u64 {
        self.all.iter().filter(|step| matches!(step, Step::Touch { .. })).count() as u64
    }
}

fn drafts(events: &[Event]) -> Vec<Draft> {
    let last: BTreeMap<u32, usize> =
        events.iter().enumerate().map(|(at, event)| (event.process, at)).collect();
    let mut drafts = Vec::with_capacity(events.len());
    // For each address, the number of its life, and true if that life continues.
    let mut lives: BTreeMap<(u32, u64), (u32, bool)> = BTreeMap::new();
    for (event, of) in events.iter().enumerate() {
        let place = (of.process, of.page);
        let (number, was_alive) = *lives.entry(place).or_default();
        let life = (of.process, of.page, number);
        let next = (of.process, of.page, number + 1);
        let mut draft = |life, is_touch| drafts.push(Draft { life, is_touch, event });
        match of.what {
            What::Gone if was_alive => {
                draft(life, false);
                lives.insert(place, (number + 1, false));
            }
            What::Gone => {}
            // The page was given back without an event.
            What::New if was_alive => {
                draft(life, false);
                draft(next, true);
                lives.insert(place, (number + 1, true));
            }
            // The page existed before the recording began, and was touched since.
            What::Left if was_alive => {}
            What::New | What::Staged | What::Back | What::Left => {
                draft(life, true);
                lives.insert(place, (number, true));
            }
        }
        if last[&of.process] == event {
            let of_process = (of.process, 0)..=(of.process, u64::MAX);
            for ((process, page), (number, is_alive)) in lives.range_mut(of_process) {
                if std::mem::take(is_alive) {
                    let life = (*process, *page, *number);
                    drafts.push(Draft { life, is_touch: false, event });
                }
            }
        }
    }
    drafts
}

/// The places of pages. One number is left out between pages that are not neighbours.
fn places<'a>(lives: impl Iterator<Item = &'a Life>) -> Vec<u32> {
    let mut places = Vec::new();
    let mut before: Option<&Life> = None;
    let mut place = 0;
    for life in lives {
        place += match before {
            None => 0,
            Some((process, page, _)) if (*process, *page) == (life.0, life.1) => 0,
            Some((process, page, _)) if (*process, *page + 1) == (life.0, life.1) => 1,
            Some(_) => 2,
        };
        places.push(place);
        before = Some(life);
    }
    places
}

/// A page as it leaves after a step.
#[derive(Clone, Copy)]
struct After {
    /// Bytes in the pool.
    bytes: u16,
    /// True if the size has changed, so the content has.
    changes: bool,
}

/// The page that leaves after each step. A page's size is its next known size, or else its last
/// known size, or else the median of all sizes.
fn after(events: &[Event], drafts: &[Draft]) -> Vec<After> {
    let mut known: Vec<u16> = events.iter().filter_map(size).collect();
    known.sort_unstable();
    let median = known.get(known.len() / 2).copied().unwrap_or(crate::event::PAGE_BYTES / 2);
    // An event that is not a step may also have its page's size.
    let mut of_event: Vec<Option<Life>> = vec![None; events.len()];
    let mut living: BTreeMap<(u32, u64), Life> = BTreeMap::new();
    let mut at = 0;
    for (event, of) in events.iter().enumerate() {
        while let Some(draft) = drafts.get(at).filter(|draft| draft.event == event) {
            if draft.is_touch {
                living.insert((draft.life.0, draft.life.1), draft.life);
            }
            at += 1;
        }
        of_event[event] = living.get(&(of.process, of.page)).copied();
    }
    let mut next: BTreeMap<Life, u16> = BTreeMap::new();
    let mut after = vec![After { bytes: median, changes: false }; drafts.len()];
    let mut at = drafts.len();
    for (event, of) in events.iter().enumerate().rev() {
        while at > 0 && drafts[at - 1].event == event {
            at -= 1;
            let before = size(of).filter(|_| drafts[at].is_touch);
            if let Entry::Occupied(seen) = next.entry(drafts[at].life) {
                let bytes = *seen.get();
                after[at] = After { bytes, changes: before.is_some_and(|before| before != bytes) };
            } else if let Some(bytes) = before {
                after[at] = After { bytes, changes: false };
            }
        }
        if let (Some(life), Some(bytes)) = (of_event[event], size(of)) {
            next.insert(life, bytes);
        }
    }
    after
}

/// The bytes of an event's page in the pool. A page of one repeated word takes none. Each of two
/// identical pages takes half.
fn size(event: &Event) -> Option<u16> {
    match event.bytes {
        _ if event.is_same_filled => Some(0),
        0 => None,
        bytes if event.is_identical => Some(bytes / 2),
        bytes => Some(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Header;

    fn event(what: What, page: u64, bytes: u16, micros: u64) -> Event {
        Event {
            what,
            page,
            process: 0,
            micros,
            site: 0,
            bytes,
            is_write: false,
            is_same_filled: false,
            is_identical: false,
        }
    }

    fn steps(events: &[Event]) -> Steps {
        let header = Header {
            room: events.len() as u64,
            asked: events.len() as u64,
            memory: 16 << 20,
            processes: 2,
            compressor: "lz4".into(),
            program: "test".into(),
        };
        Steps::of(&Trace { header, events: events.to_vec() })
    }

    #[test]
    fn a_page_takes_the_size_to_which_it_was_next_compressed() {
        let steps = steps(&[
            event(What::New, 7, 0, 1),
            event(What::Left, 7, 1000, 2),
            event(What::New, 5, 0, 3),
            event(What::Back, 7, 1000, 4),
            event(What::Back, 7, 1200, 5),
        ]);
        let touch = |page, bytes, changes| Step::Touch { page, bytes, is_write: false, changes };
        assert_eq!(
            steps.all,
            [
                touch(1, 1000, false),
                // The page never left: the median.
                touch(0, 1000, false),
                touch(1, 1200, true),
                // The page does not leave again: the same size as before.
                touch(1, 1200, false),
                Step::Gone { page: 0 },
                Step::Gone { page: 1 },
            ]
        );
        assert_eq!((steps.pages, steps.micros, steps.touches()), (2, 5, 4));
        assert_eq!(steps.places, [0, 2], "5 and 7 are no neighbours");
    }

    #[test]
    fn a_page_that_was_given_back_is_another_one_afterwards() {
        let is_filled = Event { is_same_filled: true, ..event(What::Back, 7, 0, 9) };
        let steps = steps(&[
            event(What::Left, 7, 500, 1),
            event(What::Gone, 7, 0, 2),
            event(What::Gone, 7, 0, 3),
            event(What::New, 7, 0, 4),
            is_filled,
            event(What::New, 7, 0, 10),
        ]);
        let [touch, gone] = [
            |page, bytes| Step::Touch { page, bytes, is_write: false, changes: false },
            |page, _| Step::Gone { page },
        ];
        let all: Vec<Step> = vec![
            touch(0, 500),
            gone(0, 0),
            touch(1, 0),
            touch(1, 0),
            gone(1, 0),
            touch(2, 0),
            gone(2, 0),
        ];
        let pages = |steps: &[Step]| {
            let page = |step: &Step| match *step {
                Step::Touch { page, .. } => (page, true),
                Step::Gone { page } => (page, false),
            };
            steps.iter().map(page).collect::<Vec<_>>()
        };
        assert_eq!(pages(&steps.all), pages(&all));
        assert_eq!(steps.all[..4], all[..4], "one word repeated takes nothing");
    }

    #[test]
    fn processes_have_pages_of_their_own() {
        let other = |event: Event| Event { process: 1, ..event };
        let steps = steps(&[
            event(What::New, 7, 0, 10),
            other(event(What::New, 7, 0, 5)),
            event(What::Back, 7, 900, 20),
            other(event(What::Staged, 7, 0, 6)),
        ]);
        assert_eq!((steps.pages, steps.micros), (2, 26));
        let gone: Vec<_> =
            steps.all.iter().filter(|step| matches!(step, Step::Gone { .. })).collect();
        assert_eq!(gone, [&Step::Gone { page: 0 }, &Step::Gone { page: 1 }]);
        assert_eq!(steps.all[3], Step::Gone { page: 0 }, "as its process ends");
    }
}

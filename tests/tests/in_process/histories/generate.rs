//! Makes histories by seeds: operations before, during and after the take-over. `tests/history`
//! defines the words.
//!
//! Each history uses only some kinds of operations, so that these kinds meet more often.

#[path = "generate/files.rs"]
mod files;
#[path = "generate/memory.rs"]
mod memory;
#[path = "generate/processes.rs"]
mod processes;
#[path = "generate/signals.rs"]
mod signals;

use uzswap_engine::testing::Noise;

const SLOTS: u64 = 12;
const FILES: u64 = 8;
/// Depth to which blocks nest.
const DEPTH_MAX: usize = 3;

/// The place of an operation. Some kinds are possible only in certain places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Main,
    Child,
    Thread,
    Handler,
    /// A child in its parent's memory, or a process whose filter forbids nearly all calls.
    Narrow,
}

type Make = fn(&mut Maker, Place, usize);

/// A kind of operations: its weight, its places, and the function that makes one.
struct OperationKind {
    weight: u64,
    places: &'static [Place],
    make: Make,
}

const fn kind(weight: u64, places: &'static [Place], make: Make) -> OperationKind {
    OperationKind { weight, places, make }
}

use Place::{Child, Handler, Main, Narrow, Thread};
const ANYWHERE: &[Place] = &[Main, Child, Thread, Handler, Narrow];
const WIDE: &[Place] = &[Main, Child, Thread, Handler];
const CALM: &[Place] = &[Main, Child, Thread];
const FIRST: &[Place] = &[Main];

const KINDS: &[OperationKind] = &[
    kind(10, WIDE, Maker::map),
    kind(8, ANYWHERE, Maker::fill),
    kind(6, ANYWHERE, Maker::check),
    kind(4, WIDE, Maker::unmap),
    kind(6, WIDE, Maker::protect),
    kind(14, WIDE, Maker::advise),
    kind(8, WIDE, Maker::page_out),
    kind(3, WIDE, Maker::lazy),
    kind(8, WIDE, Maker::relocate),
    kind(2, WIDE, Maker::lock),
    kind(1, WIDE, Maker::seal),
    kind(1, FIRST, Maker::grow_down),
    kind(2, WIDE, Maker::key),
    kind(2, CALM, Maker::heap),
    kind(1, WIDE, Maker::deep),
    kind(1, FIRST, Maker::sparse),
    kind(10, WIDE, Maker::fork),
    kind(3, CALM, Maker::vfork),
    kind(3, FIRST, Maker::later),
    kind(3, CALM, Maker::forks),
    kind(2, FIRST, Maker::crowd),
    kind(3, CALM, Maker::spawn),
    kind(2, FIRST, Maker::give_up),
    kind(2, FIRST, Maker::limit),
    kind(5, CALM, Maker::handle),
    kind(6, CALM, Maker::raise),
    kind(2, CALM, Maker::alternate),
    kind(2, WIDE, Maker::mask),
    kind(2, CALM, Maker::take),
    kind(2, CALM, Maker::own_fault),
    kind(2, FIRST, Maker::storm),
    kind(4, CALM, Maker::thread),
    kind(3, FIRST, Maker::noise),
    kind(3, FIRST, Maker::cancel),
    kind(4, FIRST, Maker::interrupt),
    kind(5, WIDE, Maker::open),
    kind(10, ANYWHERE, Maker::write),
    kind(10, WIDE, Maker::read),
    kind(4, WIDE, Maker::look_at_file),
    kind(3, WIDE, Maker::copy),
    kind(1, FIRST, Maker::append),
    kind(3, CALM, Maker::descriptors),
    kind(1, FIRST, Maker::library),
    kind(16, WIDE, Maker::call),
];

/// A history in the making.
struct Maker {
    noise: Noise,
    lines: Vec<String>,
    kinds: Vec<&'static OperationKind>,
    /// The assumed number of pages of each slot, 0 for none. When the history runs, the real number
    /// may differ.
    pages: [u64; SLOTS as usize],
    /// True until the history has grown beyond its budget.
    is_before: bool,
    has_jumping_handler: bool,
}

pub fn history(seed: u64) -> String {
    let mut maker = Maker {
        noise: Noise::new(seed),
        lines: Vec::new(),
        kinds: Vec::new(),
        pages: [0; SLOTS as usize],
        is_before: true,
        has_jumping_handler: false,
    };
    (0..8).for_each(|_| _ = maker.noise.word());
    let share = 2 + maker.noise.below(3);
    maker.kinds = KINDS.iter().filter(|_| maker.noise.below(4) < share).collect();
    maker.make_all();
    maker.lines.concat()
}

impl Maker {
    fn make_all(&mut self) {
        self.map(Main, 0);
        self.map(Main, 0);
        self.open(Main, 0);
        for _ in 0..self.noise.below(16) {
            self.step(Main, 0);
        }
        self.is_before = false;
        let (mib, rate) = (36 + self.noise.below(24), self.pick(&[0, 300, 1000, 4000]));
        self.line(0, &format!("grow {mib} {rate}"));
        for _ in 0..self.noise.below(4) {
            self.step(Main, 0);
        }
        if self.one_in(6) {
            self.line(0, "walk");
        } else {
            self.line(0, "settle");
        }
        for _ in 0..8 + self.noise.below(24) {
            self.step(Main, 0);
        }
        for last in ["quiet", "join", "mask-now", "check-all", "walk"] {
            self.line(0, last);
        }
    }

    fn step(&mut self, place: Place, depth: usize) {
        let all: Vec<_> =
            self.kinds.iter().copied().filter(|kind| kind.places.contains(&place)).collect();
        let whole = all.iter().map(|kind| kind.weight).sum::<u64>();
        let mut at = self.noise.below(whole.max(1));
        for kind in all {
            if at < kind.weight {
                return (kind.make)(self, place, depth);
            }
            at -= kind.weight;
        }
    }

    fn line(&mut self, depth: usize, text: &str) {
        self.lines.push(format!("{depth} {text}\n"));
    }

    fn block(&mut self, place: Place, depth: usize) {
        if depth > DEPTH_MAX {
            return self.check(place, depth);
        }
        let before = self.pages;
        for _ in 0..1 + self.noise.below(4) {
            self.step(place, depth);
        }
        if place == Child {
            self.pages = before;
        }
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.noise.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.noise.below(from.len() as u64) as usize]
    }

    /// Any slot, but preferably one with memory.
    fn slot(&mut self) -> u64 {
        let any = self.noise.below(SLOTS);
        (any..any + SLOTS).map(|at| at % SLOTS).find(|at| self.pages[*at as usize] > 0).unwrap_or(0)
    }

    /// A slot and some of its pages, as arguments.
    fn range(&mut self) -> String {
        let slot = self.slot();
        let pages = self.pages[slot as usize].max(1);
        let first = if self.one_in(3) { 0 } else { self.noise.below(pages) };
        let count = match self.noise.below(4) {
            0 => pages - first,
            1 => 1,
            _ => 1 + self.noise.below(pages - first),
        };
        format!("{slot} {first} {count}")
    }

    fn seed(&mut self) -> u64 {
        1 + self.noise.below(1000)
    }
}

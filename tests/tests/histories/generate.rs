//! Makes histories by seeds: operations before, during and after the take-over. `tests/history`
//! defines the words.
//!
//! Each history uses only some kinds of operations, so that these meet each other more often.

use super::unmended::is_mended;
use uzswap_engine::testing::Noise;

const SLOTS: u64 = 12;
const FILES: u64 = 8;
/// Blocks nest this deep.
const DEPTH_MAX: usize = 3;

/// By their numbers in `tests/history/calls.c`.
const RECEIVE_MESSAGE: u64 = 29;
const WAIT_CHILD: u64 = 38;

/// The place of an operation: some kinds are limited to certain places.
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
struct Kind {
    weight: u64,
    places: &'static [Place],
    make: Make,
}

const fn kind(weight: u64, places: &'static [Place], make: Make) -> Kind {
    Kind { weight, places, make }
}

use Place::{Child, Handler, Main, Narrow, Thread};
const ANYWHERE: &[Place] = &[Main, Child, Thread, Handler, Narrow];
const WIDE: &[Place] = &[Main, Child, Thread, Handler];
const CALM: &[Place] = &[Main, Child, Thread];
const FIRST: &[Place] = &[Main];

const KINDS: &[Kind] = &[
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

/// A history that is being made.
struct Maker {
    noise: Noise,
    lines: Vec<String>,
    kinds: Vec<&'static Kind>,
    /// Assumed pages of each slot; 0: none. A history may do otherwise.
    pages: [u64; SLOTS as usize],
    /// True until the history grows beyond its budget.
    is_before: bool,
    has_jumping_handler: bool,
}

/// The history of a seed.
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

    /// Prefers slots with memory.
    fn slot(&mut self) -> u64 {
        let any = self.noise.below(SLOTS);
        (any..any + SLOTS).map(|at| at % SLOTS).find(|at| self.pages[*at as usize] > 0).unwrap_or(0)
    }

    /// A slot and pages of it, as arguments.
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

    fn map(&mut self, _: Place, depth: usize) {
        let slot = self.noise.below(SLOTS);
        let pages = match self.noise.below(5) {
            0 => 1 + self.noise.below(4),
            1 => 500 + self.noise.below(600),
            _ => 4 + self.noise.below(60),
        };
        let flags = match self.noise.below(10) {
            0 => "shared",
            1 => "private+noreserve",
            2 => "private+populate",
            3 => "private-file",
            4 if self.one_in(2) => "shared-file",
            _ => "private",
        };
        let access = if self.one_in(8) {
            self.pick(if is_mended("only read") { &["none", "rw", "r"] } else { &["none", "rw"] })
        } else {
            "rw"
        };
        let file = if flags.contains("file") { self.noise.below(FILES) } else { 0 };
        let (place, seed) = (self.noise.below(2), self.seed());
        self.line(depth, &format!("map {slot} {pages} {access} {flags} {place} {seed} {file}"));
        self.pages[slot as usize] = pages;
    }

    fn fill(&mut self, _: Place, depth: usize) {
        let (range, seed) = (self.range(), self.seed());
        self.line(depth, &format!("fill {range} {seed}"));
    }

    fn check(&mut self, _: Place, depth: usize) {
        match self.noise.below(6) {
            0 => self.line(depth, "check-all"),
            _ => {
                let slot = self.slot();
                self.line(depth, &format!("check {slot}"));
            }
        }
    }

    fn unmap(&mut self, _: Place, depth: usize) {
        let range = self.range();
        self.line(depth, &format!("unmap {range}"));
    }

    fn protect(&mut self, _: Place, depth: usize) {
        let (range, access) = (
            self.range(),
            self.pick(if is_mended("only read") {
                &["none", "rw", "rw", "r", "rx"]
            } else {
                &["none", "rw", "rw"]
            }),
        );
        self.line(depth, &format!("protect {range} {access}"));
    }

    fn advise(&mut self, _: Place, depth: usize) {
        let range = self.range();
        let advice = self.pick(&[
            "normal",
            "random",
            "sequential",
            "willneed",
            "dontneed",
            "dontneed",
            "remove",
            "dontfork",
            "dofork",
            "hugepage",
            "nohugepage",
            "dontdump",
            "dodump",
            "wipeonfork",
            "wipeonfork",
            "keeponfork",
            "cold",
            "populate-read",
            "populate-write",
            "unknown",
        ]);
        let is_allowed = match advice {
            "wipeonfork" => !self.is_before || is_mended("wipe before"),
            "dontfork" => !self.is_before || is_mended("dontfork before"),
            "remove" => is_mended("remove private"),
            "populate-read" | "populate-write" => is_mended("populate holes"),
            _ => true,
        };
        if is_allowed {
            let is_looked_at = self.noise.below(2);
            self.line(depth, &format!("advise {range} {advice} {is_looked_at}"));
        }
    }

    fn page_out(&mut self, _: Place, depth: usize) {
        let range = self.range();
        self.line(depth, &format!("advise {range} pageout 0"));
    }

    fn lazy(&mut self, _: Place, depth: usize) {
        let (range, seed) = (self.range(), self.seed());
        self.line(depth, &format!("lazy {range} {seed}"));
    }

    fn relocate(&mut self, _: Place, depth: usize) {
        let (slot, to) = (self.slot(), self.noise.below(SLOTS));
        let pages = self.pages[slot as usize].max(1);
        let (first, count) = match self.noise.below(3) {
            0 => (self.noise.below(pages), 1 + self.noise.below(4)),
            _ => (0, pages),
        };
        if count > 256 && !is_mended("large move") {
            return;
        }
        let more = match self.noise.below(3) {
            0 => count,
            1 => count + 1 + self.noise.below(40),
            _ => 1 + self.noise.below(count),
        };
        let flags = self.pick(&["maymove", "maymove", "none", "maymove+to", "maymove+dontunmap"]);
        let is_allowed = match flags {
            "maymove+to" => is_mended("failing move"),
            "maymove+dontunmap" => is_mended("dontunmap"),
            _ => true,
        };
        if !is_allowed {
            return;
        }
        let count = if flags == "maymove+dontunmap" { more } else { count };
        self.line(depth, &format!("move {slot} {first} {count} {more} {flags} {to}"));
        if flags == "maymove+to" {
            self.pages[to as usize] = more;
        } else if first == 0 {
            self.pages[slot as usize] = more;
        }
    }

    fn lock(&mut self, _: Place, depth: usize) {
        let (range, which) = (self.range(), self.pick(&["lock", "unlock"]));
        self.line(depth, &format!("{which} {range}"));
    }

    fn seal(&mut self, _: Place, depth: usize) {
        if is_mended("seal") {
            let range = self.range();
            self.line(depth, &format!("seal {range}"));
        }
    }

    fn grow_down(&mut self, _: Place, depth: usize) {
        if is_mended("grow down") {
            let (slot, pages, seed) =
                (self.noise.below(SLOTS), 2 + self.noise.below(60), self.seed());
            self.line(depth, &format!("grow-down {slot} {pages} {seed}"));
            self.pages[slot as usize] = pages;
        }
    }

    fn key(&mut self, _: Place, depth: usize) {
        if is_mended("keys") {
            let (range, rights) = (self.range(), self.noise.below(3));
            self.line(depth, &format!("key {range} {rights}"));
        }
    }

    fn heap(&mut self, _: Place, depth: usize) {
        let (pages, seed) = (2 + self.noise.below(300), self.seed());
        self.line(depth, &format!("heap {pages} {seed}"));
    }

    fn deep(&mut self, _: Place, depth: usize) {
        let kib = 4 + self.noise.below(30);
        self.line(depth, &format!("deep {kib}"));
    }

    fn sparse(&mut self, _: Place, depth: usize) {
        let (slot, gib) = (self.noise.below(SLOTS), self.pick(&[1, 16, 64]));
        let seed = self.seed();
        self.line(depth, &format!("sparse {slot} {gib} 100 {seed}"));
    }
}

/// Processes.
impl Maker {
    fn fork(&mut self, place: Place, depth: usize) {
        let how = if self.one_in(3) { self.noise.below(5) } else { 0 };
        // The C library resets its locks only in children of its own `fork`.
        let is_plain = how == 0 || place != Main;
        let is_allowed = match how {
            1..4 => is_mended("raw fork"),
            4 => is_mended("clone with a stack"),
            _ => true,
        };
        let how = if is_plain || !is_allowed { 0 } else { how };
        self.line(depth, &format!("fork {how}"));
        self.block(if how == 0 { Child } else { Narrow }, depth + 1);
    }

    fn vfork(&mut self, _: Place, depth: usize) {
        self.line(depth, "vfork");
        self.block(Narrow, depth + 1);
    }

    fn later(&mut self, _: Place, depth: usize) {
        self.line(depth, "later");
        self.block(Child, depth + 1);
        for _ in 0..1 + self.noise.below(3) {
            self.step(Main, depth);
        }
        self.line(depth, "join");
    }

    fn forks(&mut self, _: Place, depth: usize) {
        let count = 1 + self.noise.below(20);
        self.line(depth, &format!("forks {count}"));
    }

    fn crowd(&mut self, _: Place, depth: usize) {
        let (count, slot) = (1 + self.noise.below(4), self.slot());
        self.line(depth, &format!("crowd {count} {slot}"));
    }

    fn spawn(&mut self, _: Place, depth: usize) {
        let (how, slot) = (self.noise.below(3), self.slot());
        self.line(depth, &format!("spawn {how} {slot}"));
        self.block(Child, depth + 1);
    }

    fn give_up(&mut self, _: Place, depth: usize) {
        match self.noise.below(4) {
            0 if is_mended("undumpable") => self.line(depth, "dumpable 0"),
            1 if is_mended("filter later") => {
                self.line(depth, "filtered 1");
                for _ in 0..1 + self.noise.below(4) {
                    match self.noise.below(3) {
                        0 => self.deep(Narrow, depth + 1),
                        1 => self.fill(Narrow, depth + 1),
                        _ => self.check(Narrow, depth + 1),
                    }
                }
            }
            2 if is_mended("unshare") => {
                self.line(depth, "unshare");
                self.block(Child, depth + 1);
            }
            3 if is_mended("bad exec") => self.line(depth, "bad-exec"),
            _ => {}
        }
    }

    fn limit(&mut self, _: Place, depth: usize) {
        match self.noise.below(6) {
            0 if is_mended("limit as") => self.line(depth, "limit as 0x180000000"),
            1 if is_mended("limit fsize") => {
                self.line(depth, "ignore xfsz");
                let bytes = self.pick(&[0, 50_000, 150_000]);
                self.line(depth, &format!("limit fsize {bytes}"));
            }
            2 => self.line(depth, "limit stack-size 0x100000"),
            3 if is_mended("no queued signals") => self.line(depth, "limit sigpending 0"),
            4 if is_mended("limit nofile") => self.line(depth, "limit nofile 100"),
            5 => self.line(depth, "limit core 0"),
            _ => {}
        }
    }
}

/// Signals and threads.
impl Maker {
    fn handle(&mut self, _: Place, depth: usize) {
        let signal = self.pick(&["usr1", "usr2", "hup", "rt"]);
        let mut flags = String::from("plain");
        for flag in ["onstack", "restart", "nodefer", "resethand"] {
            if self.one_in(3) {
                flags += "+";
                flags += flag;
            }
        }
        let kind = match self.noise.below(8) {
            1 if is_mended("large frame") => 1,
            2 if is_mended("mask in context") => 2,
            3 if is_mended("jump from a stack") || !flags.contains("onstack") => 3,
            4 => 4,
            _ => 0,
        };
        self.has_jumping_handler |= kind == 3;
        self.line(depth, &format!("handle {signal} {flags} {kind}"));
        self.block(Handler, depth + 1);
    }

    fn raise(&mut self, _: Place, depth: usize) {
        let (signal, how) = (self.pick(&["usr1", "usr2", "hup", "rt"]), self.noise.below(4));
        // An unhandled signal would end the history.
        if !self.lines.iter().any(|line| line.contains(&format!("0 handle {signal}"))) {
            self.line(depth, &format!("ignore {signal}"));
        }
        self.line(depth, &format!("raise {signal} {how}"));
        if self.lines.iter().any(|line| line.contains("resethand")) {
            self.line(depth, &format!("ignore {signal}"));
        }
    }

    fn alternate(&mut self, _: Place, depth: usize) {
        if self.one_in(4) {
            let how = self.noise.below(2);
            return self.line(depth, &format!("stack-now {how}"));
        }
        let is_raw = !self.is_before || is_mended("raw stack before");
        let kind = if is_raw { self.noise.below(4) } else { self.pick(&[0, 2]) };
        let least = if is_mended("large frame") { 512 } else { 64 };
        let kib = self.pick(&[0, least, least + 36]);
        self.line(depth, &format!("stack {kind} {kib}"));
    }

    fn mask(&mut self, _: Place, depth: usize) {
        let (how, signal) = (self.pick(&["block", "unblock"]), self.pick(&["usr1", "hup", "bus"]));
        let signal = if how == "block" && signal == "bus" { "winch" } else { signal };
        self.line(depth, &format!("mask {how} {signal}"));
        if self.one_in(2) {
            self.line(depth, "mask-now");
        }
    }

    fn take(&mut self, _: Place, depth: usize) {
        let (signal, how) = (self.pick(&["usr1", "chld", "rt"]), self.noise.below(4));
        self.line(depth, &format!("take {signal} {how}"));
    }

    fn own_fault(&mut self, _: Place, depth: usize) {
        let is_allowed = is_mended("jump from a stack");
        let flags = if is_allowed { self.pick(&["onstack", "plain", "nodefer"]) } else { "plain" };
        let (slot, count) = (self.slot(), 1 + self.noise.below(4));
        self.line(depth, &format!("own-fault {slot} {flags} {count}"));
    }

    fn storm(&mut self, _: Place, depth: usize) {
        let (slot, flags) = (self.slot(), self.pick(&["plain", "onstack"]));
        if is_mended("storm") {
            self.line(depth, &format!("storm {slot} 8 {flags}"));
        }
    }

    fn thread(&mut self, _: Place, depth: usize) {
        let kind = self.noise.below(3);
        let least = if is_mended("small stack") { 20 } else { 128 };
        let kib = least + 16 * self.noise.below(20);
        self.line(depth, &format!("thread {kind} {kib}"));
        self.block(Thread, depth + 1);
    }

    fn noise(&mut self, _: Place, depth: usize) {
        if is_mended("fork with a lock") && self.one_in(2) {
            self.line(depth, "atfork");
        }
        let kind = if is_mended("stop the world") { 4 } else { 3 };
        let kind = self.noise.below(kind);
        self.line(depth, &format!("noise {kind}"));
        for _ in 0..1 + self.noise.below(3) {
            self.step(Main, depth);
        }
        if self.one_in(2) {
            self.forks(Main, depth);
        }
        if self.one_in(2) {
            self.line(depth, "quiet");
        }
    }

    fn cancel(&mut self, _: Place, depth: usize) {
        if !is_mended("cancel") {
            return;
        }
        let (call, slot) = (self.noise.below(3), self.slot());
        self.line(depth, &format!("cancel {call} {slot}"));
    }

    fn interrupt(&mut self, _: Place, depth: usize) {
        if self.has_jumping_handler && !is_mended("jump out of a call") {
            return;
        }
        let (call, slot) = (self.noise.below(14), self.slot());
        let signal = self.pick(&["usr1", "usr2", "winch", "rt"]);
        if signal != "winch"
            && !self.lines.iter().any(|line| line.starts_with(&format!("0 handle {signal}")))
        {
            self.line(depth, &format!("ignore {signal}"));
        }
        self.line(depth, &format!("interrupt {call} {signal} {slot}"));
    }
}

/// Files and calls.
impl Maker {
    fn open(&mut self, _: Place, depth: usize) {
        let (file, name) = (self.noise.below(FILES), self.noise.below(4));
        match self.noise.below(4) {
            0 => self.line(depth, &format!("pipe {file}")),
            1 => {
                let kinds = if is_mended("faulting receive") { 3 } else { 1 };
                let kind = self.noise.below(kinds);
                self.line(depth, &format!("pair {file} {kind}"));
            }
            _ => {
                let flags = self.pick(&[
                    "read-write",
                    "read-write+append",
                    "read-only",
                    "read-write+cloexec",
                ]);
                self.line(depth, &format!("open {file} {name} {flags}"));
            }
        }
    }

    /// A slot and bytes of it, as arguments.
    fn bytes(&mut self, most: u64) -> String {
        let slot = self.slot();
        let whole = self.pages[slot as usize].max(1) * 4096;
        let at = if self.one_in(3) {
            4096 * self.noise.below(whole / 4096)
        } else {
            self.noise.below(whole)
        };
        let bytes = match self.noise.below(4) {
            0 => self.noise.below(100),
            1 => whole - at,
            _ => self.noise.below(20_000),
        };
        format!("{slot} {at} {}", bytes.min(most))
    }

    fn write(&mut self, _: Place, depth: usize) {
        let (how, file, bytes) =
            (self.noise.below(10), self.noise.below(FILES), self.bytes(1 << 23));
        let place = self.noise.below(100_000);
        self.line(depth, &format!("write {how} {file} {bytes} {place}"));
    }

    fn read(&mut self, _: Place, depth: usize) {
        let (how, file, bytes) =
            (self.noise.below(10), self.noise.below(FILES), self.bytes(1 << 23));
        let place = self.noise.below(100_000);
        self.line(depth, &format!("read {how} {file} {bytes} {place}"));
    }

    fn look_at_file(&mut self, _: Place, depth: usize) {
        let file = self.noise.below(FILES);
        match self.noise.below(4) {
            0 => {
                let place = self.noise.below(100_000);
                self.line(depth, &format!("seek {file} {place}"));
            }
            1 => {
                let bytes = self.noise.below(300_000);
                self.line(depth, &format!("resize {file} {bytes}"));
            }
            _ => self.line(depth, &format!("content {file}")),
        }
    }

    fn copy(&mut self, _: Place, depth: usize) {
        let (how, from, to) =
            (self.noise.below(4), self.noise.below(FILES), self.noise.below(FILES));
        let (bytes, slot) = (self.noise.below(50_000), self.slot());
        self.line(depth, &format!("copy {how} {from} {to} {bytes} {slot}"));
    }

    fn append(&mut self, _: Place, depth: usize) {
        let kib = match is_mended("append much") {
            true => self.pick(&[100, 5000, 9000]),
            false => self.pick(&[4, 100, 1000]),
        };
        let how = self.noise.below(2);
        self.line(depth, &format!("append {how} {kib} 4"));
    }

    fn descriptors(&mut self, place: Place, depth: usize) {
        if !is_mended("close all") {
            return;
        }
        match self.noise.below(4) {
            0 => {
                let how = self.noise.below(3);
                self.line(depth, &format!("close-all {how}"));
            }
            1 if place != Thread => self.line(depth, "reopen 60"),
            2 => self.line(depth, "lowest"),
            _ => {
                let (file, to) = (self.noise.below(FILES), 3 + self.noise.below(60));
                self.line(depth, &format!("number {file} {to}"));
            }
        }
    }

    fn library(&mut self, _: Place, depth: usize) {
        if is_mended("library later") {
            let slot = self.slot();
            let at = self.noise.below(self.pages[slot as usize].max(1) * 4096);
            self.line(depth, "open 0 0 read-write");
            self.line(depth, &format!("library {slot} {at}"));
        }
    }

    fn call(&mut self, place: Place, depth: usize) {
        let (slot, is_out) = (self.slot(), self.noise.below(4).min(1));
        let pages = self.pages[slot as usize].max(1);
        // Across the end of a page, or anywhere.
        let at = match self.noise.below(3) {
            0 => 4096 * (1 + self.noise.below(pages)) - 8 * (1 + self.noise.below(20)),
            _ => 8 * self.noise.below(pages * 512),
        };
        let call = self.noise.below(51);
        let is_allowed = call != RECEIVE_MESSAGE || is_mended("faulting receive");
        // A handler may run while the history waits for another child.
        if is_allowed && (place != Handler || call != WAIT_CHILD) {
            self.line(depth, &format!("call {call} {slot} {at} {is_out}"));
        }
    }
}

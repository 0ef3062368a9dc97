//! Operations on memory: mappings, their protection, advice, and places.

use super::{FILES, Maker, Place, SLOTS};
use crate::unmended::is_mended;

impl Maker {
    pub(super) fn map(&mut self, _: Place, depth: usize) {
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

    pub(super) fn fill(&mut self, _: Place, depth: usize) {
        let (range, seed) = (self.range(), self.seed());
        self.line(depth, &format!("fill {range} {seed}"));
    }

    pub(super) fn check(&mut self, _: Place, depth: usize) {
        match self.noise.below(6) {
            0 => self.line(depth, "check-all"),
            _ => {
                let slot = self.slot();
                self.line(depth, &format!("check {slot}"));
            }
        }
    }

    pub(super) fn unmap(&mut self, _: Place, depth: usize) {
        let range = self.range();
        self.line(depth, &format!("unmap {range}"));
    }

    pub(super) fn protect(&mut self, _: Place, depth: usize) {
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

    pub(super) fn advise(&mut self, _: Place, depth: usize) {
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
            "random" | "sequential" => is_mended("order"),
            "populate-read" | "populate-write" => is_mended("populate holes"),
            _ => true,
        };
        if is_allowed {
            let is_looked_at = self.noise.below(2);
            self.line(depth, &format!("advise {range} {advice} {is_looked_at}"));
        }
    }

    pub(super) fn page_out(&mut self, _: Place, depth: usize) {
        let range = self.range();
        self.line(depth, &format!("advise {range} pageout 0"));
    }

    pub(super) fn lazy(&mut self, _: Place, depth: usize) {
        let (range, seed) = (self.range(), self.seed());
        self.line(depth, &format!("lazy {range} {seed}"));
    }

    pub(super) fn relocate(&mut self, _: Place, depth: usize) {
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

    pub(super) fn lock(&mut self, _: Place, depth: usize) {
        let (range, which) = (self.range(), self.pick(&["lock", "unlock"]));
        // uzswap refuses to lock much memory if there is little.
        if self.pages.iter().all(|pages| *pages < 512) {
            self.line(depth, &format!("{which} {range}"));
        }
    }

    pub(super) fn seal(&mut self, _: Place, depth: usize) {
        if is_mended("seal") {
            let range = self.range();
            self.line(depth, &format!("seal {range}"));
        }
    }

    pub(super) fn grow_down(&mut self, _: Place, depth: usize) {
        if is_mended("grow down") {
            let (slot, pages, seed) =
                (self.noise.below(SLOTS), 2 + self.noise.below(60), self.seed());
            self.line(depth, &format!("grow-down {slot} {pages} {seed}"));
            self.pages[slot as usize] = pages;
        }
    }

    pub(super) fn key(&mut self, _: Place, depth: usize) {
        if is_mended("keys") {
            let (range, rights) = (self.range(), self.noise.below(3));
            self.line(depth, &format!("key {range} {rights}"));
        }
    }

    pub(super) fn heap(&mut self, _: Place, depth: usize) {
        let (pages, seed) = (2 + self.noise.below(300), self.seed());
        self.line(depth, &format!("heap {pages} {seed}"));
    }

    pub(super) fn deep(&mut self, _: Place, depth: usize) {
        let kib = 4 + self.noise.below(30);
        self.line(depth, &format!("deep {kib}"));
    }

    pub(super) fn sparse(&mut self, _: Place, depth: usize) {
        let (slot, gib) = (self.noise.below(SLOTS), self.pick(&[1, 16, 64]));
        let seed = self.seed();
        self.line(depth, &format!("sparse {slot} {gib} 100 {seed}"));
    }
}

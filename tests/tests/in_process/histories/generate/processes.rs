//! Operations that make processes, or change the abilities of a process.

use super::Maker;
use super::Place::{self, Child, Main, Narrow};
use crate::unmended::is_mended;

impl Maker {
    pub(super) fn fork(&mut self, place: Place, depth: usize) {
        let how = if self.one_in(3) { self.noise.below(5) } else { 0 };
        // The C library resets its locks only in children that its own `fork` makes.
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

    pub(super) fn vfork(&mut self, _: Place, depth: usize) {
        self.line(depth, "vfork");
        self.block(Narrow, depth + 1);
    }

    pub(super) fn later(&mut self, _: Place, depth: usize) {
        self.line(depth, "later");
        self.block(Child, depth + 1);
        for _ in 0..1 + self.noise.below(3) {
            self.step(Main, depth);
        }
        self.line(depth, "join");
    }

    pub(super) fn forks(&mut self, _: Place, depth: usize) {
        let count = 1 + self.noise.below(20);
        self.line(depth, &format!("forks {count}"));
    }

    pub(super) fn crowd(&mut self, _: Place, depth: usize) {
        let (count, slot) = (1 + self.noise.below(4), self.slot());
        self.line(depth, &format!("crowd {count} {slot}"));
    }

    pub(super) fn spawn(&mut self, _: Place, depth: usize) {
        let (how, slot) = (self.noise.below(3), self.slot());
        self.line(depth, &format!("spawn {how} {slot}"));
        self.block(Child, depth + 1);
    }

    pub(super) fn give_up(&mut self, _: Place, depth: usize) {
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

    pub(super) fn limit(&mut self, _: Place, depth: usize) {
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

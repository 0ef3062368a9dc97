//! Operations on signals and threads.

use super::Maker;
use super::Place::{self, Handler, Main, Thread};
use crate::unmended::is_mended;

impl Maker {
    pub(super) fn handle(&mut self, _: Place, depth: usize) {
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

    pub(super) fn raise(&mut self, _: Place, depth: usize) {
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

    pub(super) fn alternate(&mut self, _: Place, depth: usize) {
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

    pub(super) fn mask(&mut self, _: Place, depth: usize) {
        let (how, signal) = (self.pick(&["block", "unblock"]), self.pick(&["usr1", "hup", "bus"]));
        let signal = if how == "block" && signal == "bus" { "winch" } else { signal };
        self.line(depth, &format!("mask {how} {signal}"));
        if self.one_in(2) {
            self.line(depth, "mask-now");
        }
    }

    pub(super) fn take(&mut self, _: Place, depth: usize) {
        let (signal, how) = (self.pick(&["usr1", "chld", "rt"]), self.noise.below(4));
        self.line(depth, &format!("take {signal} {how}"));
    }

    pub(super) fn own_fault(&mut self, _: Place, depth: usize) {
        let is_allowed = is_mended("jump from a stack");
        let flags = if is_allowed { self.pick(&["onstack", "plain", "nodefer"]) } else { "plain" };
        let (slot, count) = (self.slot(), 1 + self.noise.below(4));
        self.line(depth, &format!("own-fault {slot} {flags} {count}"));
    }

    pub(super) fn storm(&mut self, _: Place, depth: usize) {
        let (slot, flags) = (self.slot(), self.pick(&["plain", "onstack"]));
        if is_mended("storm") {
            self.line(depth, &format!("storm {slot} 8 {flags}"));
        }
    }

    pub(super) fn thread(&mut self, _: Place, depth: usize) {
        let kind = self.noise.below(3);
        let least = if is_mended("small stack") { 20 } else { 128 };
        let kib = least + 16 * self.noise.below(20);
        self.line(depth, &format!("thread {kind} {kib}"));
        self.block(Thread, depth + 1);
    }

    pub(super) fn noise(&mut self, _: Place, depth: usize) {
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

    pub(super) fn cancel(&mut self, _: Place, depth: usize) {
        if !is_mended("cancel") {
            return;
        }
        let (call, slot) = (self.noise.below(3), self.slot());
        self.line(depth, &format!("cancel {call} {slot}"));
    }

    pub(super) fn interrupt(&mut self, _: Place, depth: usize) {
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

//! Operations on files, and other system calls.

use super::Place::{self, Handler, Thread};
use super::{FILES, Maker};
use crate::unmended::is_mended;

/// Calls by their numbers in `tests/history/calls.c`.
const RECEIVE_MESSAGE: u64 = 29;
const WAIT_CHILD: u64 = 38;

impl Maker {
    pub(super) fn open(&mut self, _: Place, depth: usize) {
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

    /// A slot and some of its bytes, as arguments.
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

    pub(super) fn write(&mut self, _: Place, depth: usize) {
        let (how, file, bytes) =
            (self.noise.below(10), self.noise.below(FILES), self.bytes(1 << 23));
        let place = self.noise.below(100_000);
        self.line(depth, &format!("write {how} {file} {bytes} {place}"));
    }

    pub(super) fn read(&mut self, _: Place, depth: usize) {
        let (how, file, bytes) =
            (self.noise.below(10), self.noise.below(FILES), self.bytes(1 << 23));
        let place = self.noise.below(100_000);
        self.line(depth, &format!("read {how} {file} {bytes} {place}"));
    }

    pub(super) fn look_at_file(&mut self, _: Place, depth: usize) {
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

    pub(super) fn copy(&mut self, _: Place, depth: usize) {
        let (how, from, to) =
            (self.noise.below(4), self.noise.below(FILES), self.noise.below(FILES));
        let (bytes, slot) = (self.noise.below(50_000), self.slot());
        self.line(depth, &format!("copy {how} {from} {to} {bytes} {slot}"));
    }

    pub(super) fn append(&mut self, _: Place, depth: usize) {
        let kib = match is_mended("append much") {
            true => self.pick(&[100, 5000, 9000]),
            false => self.pick(&[4, 100, 1000]),
        };
        let how = self.noise.below(2);
        self.line(depth, &format!("append {how} {kib} 4"));
    }

    pub(super) fn descriptors(&mut self, place: Place, depth: usize) {
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

    pub(super) fn library(&mut self, _: Place, depth: usize) {
        if is_mended("library later") {
            let slot = self.slot();
            let at = self.noise.below(self.pages[slot as usize].max(1) * 4096);
            self.line(depth, "open 0 0 read-write");
            self.line(depth, &format!("library {slot} {at}"));
        }
    }

    pub(super) fn call(&mut self, place: Place, depth: usize) {
        let (slot, is_out) = (self.slot(), self.noise.below(4).min(1));
        let pages = self.pages[slot as usize].max(1);
        // The memory is across the end of a page, or anywhere.
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

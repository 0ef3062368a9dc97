//! A process reads or writes another's memory (`process_vm_readv`). The kernel cannot read absent
//! pages, so the *visitor* asks the *host* for the pages. The host keeps them in memory during the
//! visit.
//!
//! ```text
//! visitor   free → being written → asked; rings the host's bell, and waits
//! host      asked → granted: so many bytes are pinned
//! visitor   makes the call; → free, with the next number
//! host      sees at its next look that the visit is over, and unpins
//! ```
//! A visit is in the visitor's slot, so that visitors of one host share no lock that one of them
//! could die with. A visitor that dies loses its slot. The slot of a visitor that executes another
//! program is cleared. So the host sees the end of each visit. A visitor waits for a limited time.
//! One thread of a process visits at a time.

use crate::table::ProcessSlot;
use crate::visit_slot::{PAGE_BYTES, VISIT_BYTES_MAX, VisitSlot, VisitWord, ring, wait};
use crate::{Name, Tree, clock, own_number};
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

/// The interval at which a visitor checks that its host lives.
const LOOK: Duration = Duration::from_millis(50);

/// A process whose memory may be visited.
#[derive(Debug, Clone, Copy)]
pub struct Host<'a> {
    tree: &'a Tree,
    slot: &'a ProcessSlot,
    name: Name,
}

impl<'a> Host<'a> {
    /// Its name.
    pub fn name(self) -> Name {
        self.name
    }

    /// The thread that answers, by the host's own number.
    pub fn thread(self) -> u32 {
        self.slot.host.load(SeqCst)
    }

    /// True if the host still answers.
    fn is_there(self) -> bool {
        self.slot.name() == self.name && self.slot.is_host() && self.tree.may_live(self.name)
    }

    /// Asks for pages, [`VISIT_BYTES_MAX`] at most, and waits for `patience` at most, and not while
    /// the host is stopped. `None` if the host has not answered. Until the visit ends, no signal
    /// handler may jump out of this thread's call.
    pub fn ask(
        self,
        (from, bytes): (u64, u64),
        patience: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> Option<Visit<'a>> {
        let own = self.tree.own().filter(|own| own.name().number() == own_number())?;
        let visit = &own.visit;
        let word = visit.await_free(patience)?;
        let until = clock() + patience.as_millis() as u64;
        visit.host.store(self.name.0, Relaxed);
        visit.from.store(from, Relaxed);
        visit.bytes.store(bytes, Relaxed);
        let asked = visit.ask(word);
        self.slot.ring();
        while visit.load() == asked {
            visit.wait(asked, LOOK.min(patience));
            let is_over = || clock() >= until || !self.is_there() || is_stopped();
            if visit.load() == asked && is_over() && visit.change(asked, asked.next()) {
                return None;
            }
        }
        let granted = visit.load();
        let behind = u64::from(granted.pages()) * PAGE_BYTES;
        let bytes = behind.saturating_sub(from % PAGE_BYTES).min(bytes);
        let is_granted = granted.state() == VisitWord::GRANTED;
        is_granted.then_some(Visit { visit, granted, bytes })
    }
}

/// Pages of a host that stay in until this is dropped.
#[derive(Debug)]
pub struct Visit<'a> {
    visit: &'a VisitSlot,
    granted: VisitWord,
    bytes: u64,
}

impl Visit<'_> {
    /// The number of granted bytes, from the first byte that was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // When a process learns its namespace, it takes another slot, and another process may have
        // this slot now.
        self.visit.change(self.granted, self.granted.next());
    }
}

/// A visit as its host sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guest {
    slot: usize,
    visitor: Name,
    word: VisitWord,
    /// The first byte, and how many are asked for.
    pub from: u64,
    /// See `from`.
    pub bytes: u64,
}

impl Tree {
    /// Another process, by the number that this process sees, if its memory may be visited.
    pub fn host(&self, process: u32) -> Option<Host<'_>> {
        let space = self.space.load(Relaxed);
        let is_it = |slot: &&ProcessSlot| match space {
            0 => slot.number() == process,
            _ => slot.name() == Name::new(space, process),
        };
        let is_other = process != 0 && process != own_number();
        let slot = self.table.used_slots().iter().find(is_it).filter(|_| is_other)?;
        let host = Host { tree: self, slot, name: slot.name() };
        host.is_there().then_some(host)
    }

    /// Sets if the calling thread answers the visitors that ask for this process's pages.
    pub fn set_host(&self, is_host: bool) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.own().inspect(|slot| slot.host.store(if is_host { thread } else { 0 }, SeqCst));
    }

    /// The visitors that ask for pages of this process.
    pub fn guests(&self) -> impl Iterator<Item = Guest> + '_ {
        let own = self.own().map_or(Name::NONE, ProcessSlot::name);
        let slots = self.table.used_slots().iter().enumerate();
        slots.filter_map(move |(slot, one)| {
            let (visit, visitor) = (&one.visit, one.name());
            let word = visit.load();
            let is_ours = word.state() == VisitWord::ASKED && visit.host.load(Relaxed) == own.0;
            let (from, bytes) = (visit.from.load(Relaxed), visit.bytes.load(Relaxed));
            // If the word has changed, the numbers may be those of the next visit.
            let is_same = || visit.load() == word;
            let guest = Guest { slot, visitor, word, from, bytes: bytes.min(VISIT_BYTES_MAX) };
            (is_ours && own != Name::NONE && is_same()).then_some(guest)
        })
    }

    /// Tells a guest that `pages` pages are present, from the page of its first byte. `None` if the
    /// guest is gone.
    pub fn grant(&self, guest: &Guest, pages: u32) -> Option<Guest> {
        let visit = &self.table.slots.get(guest.slot)?.visit;
        let word = guest.word.with(VisitWord::GRANTED, pages);
        let is_there = visit.change(guest.word, word);
        is_there.then_some(Guest { word, ..*guest })
    }

    /// True while a guest with granted pages may use them.
    pub fn is_visiting(&self, guest: &Guest) -> bool {
        self.table.slots.get(guest.slot).is_some_and(|slot| {
            slot.visit.load() == guest.word
                && slot.name() == guest.visitor
                && self.may_live(guest.visitor)
        })
    }

    fn may_live(&self, name: Name) -> bool {
        name.may_live(self.space.load(Relaxed))
    }

    /// The number of times that this process's bell was rung.
    pub fn rung(&self) -> u32 {
        self.bell().load(SeqCst)
    }

    /// Rings this process's bell, so that the watching thread looks.
    pub fn ring(&self) {
        ring(self.bell());
    }

    /// Waits until the bell is rung once more, but no longer than `most`.
    pub fn await_bell(&self, rung: u32, most: Duration) {
        wait(self.bell(), rung, most);
    }

    fn bell(&self) -> &AtomicU32 {
        self.own().map_or(&self.bell, |slot| &slot.bell)
    }
}

impl ProcessSlot {
    fn is_host(&self) -> bool {
        self.host.load(SeqCst) != 0 && self.left_alone.load(Relaxed) == 0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::path::Path;

    const NO_TIME: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(100);

    /// A tree of three processes: this process as a visitor, its parent as the host, and another
    /// process.
    fn tree(folder: &Path) -> [Tree; 3] {
        let path = folder.join("tree");
        Tree::create(&path, 100, 5).unwrap();
        let all = [own_number(), std::os::unix::process::parent_id(), 1];
        let join = |process| {
            let tree = Tree::look(&path).unwrap();
            tree.rejoin_as(Name::new(0, process));
            tree
        };
        all.map(join)
    }

    #[test]
    fn a_visit_is_granted_once_and_over_when_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let [own, host, other] = tree(folder.path());
        let number = std::os::unix::process::parent_id();
        assert!(own.host(number).is_none(), "it does not say that it answers");
        host.set_host(true);
        assert!(own.host(own_number()).is_none() && own.host(0).is_none());
        std::thread::scope(|scope| {
            let visitor = scope.spawn(|| {
                let visit = own.host(number).unwrap().ask((0x1ffe, 5000), LONG, || false).unwrap();
                // Two bytes of the first page, and all of the second.
                (visit.bytes(), host.rung())
            });
            while host.guests().next().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(other.guests().count(), 0, "it is another one's");
            let guest = host.guests().next().unwrap();
            assert_eq!((guest.from, guest.bytes), (0x1ffe, 5000));
            let granted = host.grant(&guest, 2).unwrap();
            assert_eq!((host.grant(&guest, 2), host.guests().next()), (None, None));
            assert_eq!(visitor.join().unwrap(), (4098, 1));
            assert!(!host.is_visiting(&granted), "the thread has dropped it");
        });
    }

    #[test]
    fn a_visitor_that_is_not_answered_goes_and_its_host_sees_it() {
        let folder = tempfile::tempdir().unwrap();
        let [own, host, _other] = tree(folder.path());
        let number = std::os::unix::process::parent_id();
        host.set_host(true);
        assert!(own.host(number).unwrap().ask((0, 1), NO_TIME, || false).is_none());
        assert!(own.host(number).unwrap().ask((0, 1), LONG, || true).is_none());
        assert_eq!((host.guests().count(), host.rung()), (0, 2));
        // A visitor that dies, or becomes another program, in the midst of a visit.
        for end in [Tree::rejoin, |own: &Tree| own.own().unwrap().free(own.own_name())] {
            let visit = &own.own().unwrap().visit;
            let taken = visit.take().unwrap();
            visit.host.store(host.own().unwrap().name().0, Relaxed);
            visit.ask(taken);
            assert!(
                own.host(number).unwrap().ask((0, 1), NO_TIME, || false).is_none(),
                "another thread's"
            );
            let granted = host.guests().next().and_then(|guest| host.grant(&guest, 1)).unwrap();
            assert!(host.is_visiting(&granted));
            end(&own);
            assert!(!host.is_visiting(&granted));
            own.rejoin();
        }
        host.own().unwrap().left_alone.store(1, Relaxed);
        assert!(own.host(number).is_none());
    }
}

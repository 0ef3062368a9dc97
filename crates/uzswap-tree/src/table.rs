//! The file that all processes of a tree map: a slot for each, sums, and the programs left alone.

use crate::name::Name;
use crate::text::Text;
use crate::visit_slot::{VisitSlot, ring, wake};
use crate::{RemoteSums, own_number};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// The most processes that are counted at the same time.
pub const SLOTS: usize = 1000;

/// A number that changes with the layout below, so that no process accepts a file of another
/// version.
pub(crate) const FORM: u64 = 0x757a_7472_6565_0010;

/// A process with less memory need not report it: the maker of the tree counts it.
pub const SILENT_MAX: u64 = 12 << 20;
/// A process with less is not taken over, and gives nothing back: there is little to win.
pub const MANAGED_MIN: u64 = 16 << 20;

/// The maximum number of programs left alone whose reasons are kept. Later programs are only
/// counted.
pub const REASONS: usize = 32;
/// Words of eight bytes for a program's name and reason.
pub(crate) const REASON_WORDS: usize = 24;

/// The file's content.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    pub(crate) form: AtomicU64,
    /// Bytes for all processes.
    pub total: AtomicU64,
    /// See [`crate::Tree::whole_allowance`].
    pub ceiling: AtomicU64,
    /// The PID namespace of the process that made the tree; 0 if unknown.
    pub space: AtomicU32,
    /// Bytes of processes that are too small to report.
    pub(crate) besides: AtomicU64,
    /// Processes that were taken over, in total.
    pub managed: AtomicU64,
    /// Processes that could not be taken over, in total.
    pub unmanaged: AtomicU64,
    /// The most memory that all processes had at the same time, in bytes.
    pub peak: AtomicU64,
    /// Faults that were served, in total.
    pub faults: AtomicU64,
    /// Pages that were stored, in total.
    pub stored: AtomicU64,
    /// The activity at the store in another machine's memory, in total.
    pub remote: RemoteSums,
    /// The process that made the tree.
    pub(crate) leader: AtomicU32,
    /// No process ever took a slot at or after this index.
    pub(crate) slots_used: AtomicU32,
    /// 1 if some processes are suspended, and a process that grows waits for its turn.
    pub(crate) takes_turns: AtomicU32,
    /// Counts the checks of the process that suspends and resumes: while it does not advance, no
    /// process is suspended.
    pub(crate) looks: AtomicU32,
    /// Reasons noted in total, of which the first [`REASONS`] are kept.
    reasons_used: AtomicU32,
    reasons: [Reason; REASONS],
    pub(crate) slots: [ProcessSlot; SLOTS],
    /// 1 if faults raise SIGSEGV, because userfaultfd is denied.
    pub protects: AtomicU32,
    settings: [Text<SETTING_WORDS>; Setting::COUNT],
    /// The favour of the first processes: see [`crate::share::Own`].
    pub(crate) favour: AtomicU64,
    /// The CPUs that the processes of the tree may use.
    pub(crate) cpus: AtomicU64,
}

/// Words of eight bytes for a setting: no path is longer than 4096 bytes.
const SETTING_WORDS: usize = 512;

/// A text that the agent needs when it takes a process over. The environment cannot carry it:
/// servers clear their environment, or write their title there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Setting {
    /// The name of the means by which pages leave.
    Means,
    /// The compressor of new pages.
    Compressor,
    /// The policy that decides which page leaves.
    Policy,
    /// The folder of each process's backing, a colon, and its size in bytes.
    Backing,
    /// The address of a store in another machine's memory.
    Store,
    /// The log that accesses are written to.
    Accesses,
}

impl Setting {
    const COUNT: usize = Self::Accesses as usize + 1;
}

/// [`Reason::part`] of a program whose call was refused.
const CALL: u64 = u64::MAX;

/// A program that was left alone, a part of its memory, or a call that was refused, and the reason.
#[derive(Debug)]
#[repr(C)]
struct Reason {
    process: AtomicU64,
    /// Bytes of the part; 0 for the whole program; [`CALL`].
    part: AtomicU64,
    text: Text<REASON_WORDS>,
}

/// A program that was left alone, whole or in part, or whose call was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftAlone {
    /// The process.
    pub process: Name,
    /// Bytes of the part, 0 for a call that was refused; `None` for the whole program.
    pub part: Option<u64>,
    /// Its name and the reason, as one sentence: `NAME: REASON`.
    pub text: String,
}

/// The activity of a process since its last report, and its pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Faults that were served.
    pub faults: u64,
    /// Pages that were stored.
    pub stored: u64,
    /// The number of absent pages at present.
    pub out: u64,
    /// Bytes of memory of their pool.
    pub pool: u64,
    /// Bytes of their records on the backing.
    pub backing: u64,
    /// Bytes of their segments at a store in another machine's memory.
    pub remote: u64,
}

/// A process of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The process.
    pub name: Name,
    /// Its number in the PID namespace of the process that made the tree; 0 before that is known.
    pub process: u32,
    /// Anonymous memory in bytes; 0 if the process has not reported, and may be small.
    pub used: u64,
    /// Bytes that it needs to make progress.
    pub least: u64,
    /// Its memory when it last asked for much, in bytes.
    pub grew_to: u64,
    /// Its activity in total, and its pages.
    pub figures: Figures,
    /// True if it is suspended: see [`Table::suspend`].
    pub is_suspended: bool,
    /// True while another process wants to read all of its memory. Its pages then stay.
    pub is_wanted_whole: bool,
}

impl Table {
    /// Counts a program as left alone, and keeps the reason.
    pub(crate) fn leave_alone(&self, own: Name, text: &[&[u8]]) {
        self.unmanaged.fetch_add(1, Relaxed);
        let slot = self.used_slots().iter().find(|slot| slot.name() == own);
        slot.inspect(|slot| slot.left_alone.store(1, Relaxed));
        self.note(own, 0, text);
    }

    pub(crate) fn refuse(&self, own: Name, text: &[&[u8]]) {
        self.leave_part(own, CALL, text);
    }

    pub(crate) fn leave_part(&self, own: Name, part: u64, text: &[&[u8]]) {
        let is_it =
            |reason: &&Reason| reason.process.load(Acquire) == own.0 && reason.text.says(text);
        match self.noted().iter().find(is_it) {
            Some(reason) => _ = reason.part.fetch_max(part, Relaxed),
            None => self.note(own, part, text),
        }
    }

    /// The reasons whose places are taken, even if a text is not written yet.
    fn noted(&self) -> &[Reason] {
        &self.reasons[..(self.reasons_used.load(Relaxed) as usize).min(REASONS)]
    }

    fn note(&self, own: Name, part: u64, text: &[&[u8]]) {
        let at = self.reasons_used.fetch_add(1, Relaxed) as usize;
        let Some(reason) = self.reasons.get(at) else { return };
        reason.text.write(text);
        reason.part.store(part, Relaxed);
        // The store that publishes the reason: readers accept it from now on.
        reason.process.store(own.0, Release);
    }

    /// The programs that were left alone and whose reasons were kept, in order.
    pub fn left_alone(&self) -> Vec<LeftAlone> {
        let noted = self.noted().iter().filter_map(|reason| {
            let process = Name(reason.process.load(Acquire));
            let text: Vec<u8> = reason.text.bytes().collect();
            let text = String::from_utf8_lossy(&text).into_owned();
            let part = match reason.part.load(Relaxed) {
                0 => None,
                CALL => Some(0),
                bytes => Some(bytes),
            };
            (process != Name::NONE).then_some(LeftAlone { process, part, text })
        });
        noted.collect()
    }

    /// Keeps a setting for the processes that will be started. `false` if the value is too long.
    pub fn set(&self, setting: Setting, value: &[u8]) -> bool {
        self.settings[setting as usize].write(&[value])
    }

    /// A setting's value; `None` if it was not set.
    pub fn setting(&self, setting: Setting) -> Option<OsString> {
        let bytes: Vec<u8> = self.settings[setting as usize].bytes().collect();
        (!bytes.is_empty()).then(|| OsString::from_vec(bytes))
    }

    /// Asks a process of the tree to bring all of its pages in, and to keep them in memory while
    /// the caller lives. `false` if there is no such process.
    pub fn want_whole(&self, process: u32) -> bool {
        let slot = self.slot_of(process);
        slot.inspect(|slot| {
            slot.answer.store(0, Relaxed);
            slot.reader.store(own_number(), Release);
        });
        slot.is_some()
    }

    /// The answer of that process; `None` if it has not answered yet.
    pub fn is_whole(&self, process: u32) -> Option<bool> {
        let slot = self.slot_of(process)?;
        match slot.answer.load(Acquire) {
            ALL_IN => Some(true),
            NO_ROOM => Some(false),
            _ => None,
        }
    }

    /// The slot of a process, by its number where the tree was made.
    fn slot_of(&self, process: u32) -> Option<&ProcessSlot> {
        self.used_slots().iter().find(|slot| slot.number() == process)
    }

    pub(crate) fn used_slots(&self) -> &[ProcessSlot] {
        &self.slots[..(self.slots_used.load(Relaxed) as usize).min(SLOTS)]
    }

    /// The live processes, with their last reports, as the process that made the tree sees them.
    pub fn members(&self) -> impl Iterator<Item = Member> + '_ {
        self.members_seen_from(0)
    }

    pub(crate) fn members_seen_from(&self, space: u32) -> impl Iterator<Item = Member> + '_ {
        let slots = self.used_slots().iter().filter(move |slot| slot.name().may_live(space));
        slots.map(|slot| Member {
            name: slot.name(),
            process: slot.number(),
            used: slot.used.load(Relaxed),
            least: slot.least.load(Relaxed),
            grew_to: slot.grew_to.load(Relaxed),
            is_suspended: slot.waits.load(Relaxed) != 0,
            is_wanted_whole: slot.reader.load(Relaxed) != 0,
            figures: Figures {
                faults: slot.faults.load(Relaxed),
                stored: slot.stored.load(Relaxed),
                out: slot.out.load(Relaxed),
                pool: slot.pool.load(Relaxed),
                backing: slot.backing.load(Relaxed),
                remote: slot.remote.load(Relaxed),
            },
        })
    }

    /// True if a process of the tree has its number from another PID namespace. Then only
    /// [`Self::see`] finds the process, and knows if it lives.
    pub fn has_foreign(&self) -> bool {
        self.used_slots().iter().any(|slot| slot.name().space() != 0)
    }

    /// Notes the number that each process of another PID namespace has here, and frees the slots of
    /// dead ones. `number` returns that number of a live process.
    pub fn see(&self, number: impl Fn(Name) -> Option<u32>) {
        for slot in self.used_slots().iter().filter(|slot| slot.name().space() != 0) {
            let name = slot.name();
            match (number(name), slot.seen_as.load(Relaxed)) {
                (Some(number), _) => slot.seen_as.store(number, Relaxed),
                // The process may have started after the caller looked.
                (None, 0) => slot.seen_as.store(MISSED, Relaxed),
                (None, _) => slot.free(name),
            }
        }
    }

    /// Counts the memory of processes that are too small to report. `bytes` returns the memory of a
    /// process by its number.
    pub fn count_silent(&self, bytes: impl Fn(u32) -> u64) {
        let (mut used, mut silent) = (0, 0);
        for member in self.members() {
            used += member.used;
            if member.used == 0 {
                // A larger process is about to report, and may share most of its memory with its
                // parent.
                silent += Some(bytes(member.process)).filter(|b| *b < SILENT_MAX).unwrap_or(0);
            }
        }
        self.besides.store(silent, Relaxed);
        self.peak.fetch_max(used + silent, Relaxed);
    }

    /// Bytes of all processes, by their last reports.
    pub fn counted_bytes(&self) -> u64 {
        self.members().map(|member| member.used).sum::<u64>() + self.besides.load(Relaxed)
    }

    /// Suspends a process, so that it leaves its memory to the others, or resumes it. The process
    /// stays suspended only while [`Self::set_taking_turns`] is called at least every
    /// [`crate::LOOKS_MAX`]. `false` if the process is not of the tree.
    pub fn suspend(&self, process: u32, is_suspended: bool) -> bool {
        let slot = self.slot_of(process);
        slot.inspect(|slot| slot.set_waits(is_suspended)).is_some()
    }

    /// True if the budget is too small for the suspended processes and, for each other process,
    /// twice the memory of the largest. Processes that never asked for much are not counted.
    pub fn is_crowded(&self) -> bool {
        let total = self.total.load(Relaxed);
        let (mut count, mut largest, mut suspended) = (0, 0, 0);
        for member in self.members() {
            let has = member.used.max(member.grew_to);
            if member.is_suspended {
                suspended += has;
            } else if has > 0 {
                count += 1;
                largest = largest.max(has);
            }
        }
        suspended + count * 2 * largest > total
    }

    /// Makes processes that grow wait for their turn ([`crate::Tree::queue`]), or ends that. A
    /// waiting process counts as suspended.
    pub fn set_taking_turns(&self, takes_turns: bool) {
        self.looks.fetch_add(1, Relaxed);
        self.takes_turns.store(takes_turns.into(), SeqCst);
    }

    /// The suspended processes, including those that are gone, or seem gone in this PID namespace.
    pub fn suspended(&self) -> impl Iterator<Item = u32> + '_ {
        let suspended = self.used_slots().iter().filter(|slot| slot.waits.load(SeqCst) != 0);
        suspended.map(ProcessSlot::number).filter(|process| *process != 0)
    }

    /// Frees the slots of processes that are gone, and of zombies (`has_ended`). Other processes
    /// may then use their memory.
    pub fn forget(&self, has_ended: impl Fn(u32) -> bool) {
        for slot in self.used_slots() {
            let (name, number) = (slot.name(), slot.number());
            if !name.may_live(0) || number != 0 && has_ended(number) {
                slot.free(name);
            }
        }
    }

    /// True if the process that made the tree, or a process of the tree, lives. `has_ended` is true
    /// for a zombie.
    pub fn is_in_use(&self, has_ended: impl Fn(u32) -> bool) -> bool {
        let leader = self.leader.load(Relaxed);
        let leader = Some(leader).filter(|leader| Name::new(0, *leader).may_live(0));
        let members = self.members().map(|member| member.process);
        leader.into_iter().chain(members).any(|process| process == 0 || !has_ended(process))
    }
}

#[derive(Debug)]
#[repr(C)]
pub(crate) struct ProcessSlot {
    /// The [`Name`] of the process.
    process: AtomicU64,
    /// Its number in the PID namespace where the tree was made, if its own number is of another
    /// one: see [`Table::see`].
    seen_as: AtomicU32,
    /// 1 if its pages fit neither in its share nor on its backing, and it waits for a larger share.
    pub(crate) starved: AtomicU32,
    /// 1 if the process must wait, and leave its memory to others.
    pub(crate) waits: AtomicU32,
    /// The process that wants to read all of its memory; 0 if none does.
    pub(crate) reader: AtomicU32,
    /// The answer to that: [`ALL_IN`], [`NO_ROOM`], or 0.
    pub(crate) answer: AtomicU32,
    /// 1: it is left alone, and gives no memory back before it ends.
    pub(crate) left_alone: AtomicU32,
    /// Anonymous memory in bytes, now and when the process last asked for much.
    pub(crate) used: AtomicU64,
    pub(crate) grew_to: AtomicU64,
    /// The same, with memory that forks share counted in full, and with a child that the process is
    /// about to make.
    pub(crate) whole: AtomicU64,
    /// Bytes that the process is about to need besides.
    pub(crate) reserved: AtomicU64,
    /// Bytes that it needs to make progress.
    pub(crate) least: AtomicU64,
    pub(crate) faults: AtomicU64,
    pub(crate) stored: AtomicU64,
    pub(crate) out: AtomicU64,
    pub(crate) pool: AtomicU64,
    pub(crate) backing: AtomicU64,
    pub(crate) remote: AtomicU64,
    /// The time at which it began, or at which [`Table::put_last`] moved it, milliseconds.
    pub(crate) began: AtomicU64,
    /// Its recent work, in thousandths of a CPU's time.
    pub(crate) worked: AtomicU64,
    /// 1: the process works much less than others do.
    pub(crate) idle: AtomicU32,
    /// Counts the requests that the watching thread look immediately.
    pub(crate) bell: AtomicU32,
    /// Its thread that answers visitors; 0 if none does.
    pub(crate) host: AtomicU32,
    /// Its visit of another process.
    pub(crate) visit: VisitSlot,
}

/// [`ProcessSlot::seen_as`] of a process that [`Table::see`] has looked for once, and not found.
const MISSED: u32 = u32::MAX;
/// All pages of a process are in.
pub(crate) const ALL_IN: u32 = 1;
/// There is no memory for the pages.
pub(crate) const NO_ROOM: u32 = 2;

impl ProcessSlot {
    /// Resets the slot: no memory, no activity.
    pub(crate) fn clear(&self) {
        let Self { seen_as, starved, waits, reader, answer, left_alone, idle, host, .. } = self;
        for number in [seen_as, starved, waits, reader, answer, left_alone, idle, host] {
            number.store(0, Relaxed);
        }
        self.visit.clear();
        let Self { used, grew_to, whole, reserved, least, worked, .. } = self;
        let Self { faults, stored, out, pool, backing, remote, .. } = self;
        for number in [used, grew_to, whole, reserved, least, worked] {
            number.store(0, Relaxed);
        }
        for number in [faults, stored, out, pool, backing, remote] {
            number.store(0, Relaxed);
        }
    }

    fn set_waits(&self, waits: bool) {
        self.waits.store(waits.into(), SeqCst);
        wake(&self.waits);
        self.ring();
    }

    /// Makes the process's watching thread look.
    pub(crate) fn ring(&self) {
        ring(&self.bell);
    }

    pub(crate) fn name(&self) -> Name {
        Name(self.process.load(Relaxed))
    }

    /// The number of its process in the namespace where the tree was made; 0 if it has none, or if
    /// the number is not known yet.
    pub(crate) fn number(&self) -> u32 {
        match (self.name().space(), self.seen_as.load(Relaxed)) {
            (0, _) => self.name().number(),
            (_, MISSED) => 0,
            (_, seen) => seen,
        }
    }

    /// Takes the slot for a process, if the slot is free. A dead process's slot counts as free if
    /// `may_judge`.
    pub(crate) fn take(&self, process: Name, may_judge: bool) -> bool {
        let before = self.name();
        let is_free = before == Name::NONE || may_judge && !before.may_live(process.space());
        is_free && self.process.compare_exchange(before.0, process.0, Relaxed, Relaxed).is_ok()
    }

    /// Frees the slot, unless a new process has taken it already.
    pub(crate) fn free(&self, process: Name) {
        let _ = self.process.compare_exchange(process.0, Name::NONE.0, SeqCst, Relaxed);
    }
}

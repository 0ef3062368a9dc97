//! A pool that another process has left, and the objects in it that entries own.
//!
//! A descriptor has its zspage's class and frames, and does not change while an object is live in
//! the zspage. All else is rebuilt here from the entries of the index.

use super::size_class::{HEADER_BYTES, classes};
use super::zspage::{NO_CLASS, NO_OBJECT, NONE};
use super::{FREE, Header, LEAVING, Pool};
use crate::durable::Durable;
use crate::ids::{Handle, SwapEntry};
use crate::sync::lock;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The objects that entries refer to, with a bit for each possible object.
pub(crate) struct Claims {
    /// The first bit of each zspage.
    first: Vec<usize>,
    bits: Vec<u64>,
}

/// The result of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// This claim is the first on the object.
    Granted,
    /// Another entry has claimed the object.
    Taken,
    /// There is no such object.
    None,
}

impl Claims {
    /// No claims, in a pool whose descriptors were taken over.
    pub(crate) fn new(pool: &Pool) -> Self {
        let mut end = 0;
        let mut first = Vec::new();
        for number in pool.zspages.numbers() {
            first.push(end);
            let class = classes().get(usize::from(pool.zspages.get(number).class.load(Relaxed)));
            end += class.map_or(0, |class| usize::from(class.objects));
        }
        first.push(end);
        Self { first, bits: vec![0; end.div_ceil(64)] }
    }

    /// The bit of an object; `None` if an object of `bytes` does not fit at this handle.
    fn bit(&self, pool: &Pool, handle: Handle, bytes: usize) -> Option<usize> {
        let zspage = handle.zspage() as usize;
        let (start, end) = (*self.first.get(zspage)?, *self.first.get(zspage + 1)?);
        let bit = start + usize::from(handle.index());
        // An unused descriptor has no bits.
        let class = (bit < end).then(|| classes()[pool.class_number(handle.zspage())])?;
        let header = if class.is_huge() { 0 } else { HEADER_BYTES };
        (bytes + header <= usize::from(class.size)).then_some(bit)
    }

    /// Claims an object of `bytes`.
    pub(crate) fn claim(&mut self, pool: &Pool, handle: Handle, bytes: usize) -> Claim {
        let Some(bit) = self.bit(pool, handle, bytes) else { return Claim::None };
        let (word, bit) = (&mut self.bits[bit / 64], 1 << (bit % 64));
        let claim = if *word & bit == 0 { Claim::Granted } else { Claim::Taken };
        *word |= bit;
        claim
    }

    /// Gives up a claimed object.
    pub(crate) fn give_up(&mut self, handle: Handle) {
        let bit = self.first[handle.zspage() as usize] + usize::from(handle.index());
        self.bits[bit / 64] &= !(1 << (bit % 64));
    }

    fn has(&self, zspage: u32, index: u16) -> bool {
        let bit = self.first[zspage as usize] + usize::from(index);
        self.bits[bit / 64] & 1 << (bit % 64) != 0
    }
}

impl Pool {
    /// Takes over the memory that another process has left.
    pub(crate) fn adopt(&self, durable: &Arc<Durable>) -> io::Result<()> {
        self.zspages.adopt(durable)?;
        self.sections.adopt()
    }

    /// Frees everything that was not claimed. `false` if claimed objects lie in frames that do not
    /// exist or belong to others. Called once, after [`Self::adopt`].
    pub(crate) fn recover(&self, claims: &Claims) -> bool {
        for at in self.zspages.numbers().collect::<Vec<_>>().into_iter().rev() {
            if !self.recover_zspage(claims, at) {
                return false;
            }
        }
        true
    }

    fn recover_zspage(&self, claims: &Claims, at: u32) -> bool {
        let zspage = self.zspages.get(at);
        let number = usize::from(zspage.class.load(Relaxed));
        let Some(class) = classes().get(number) else {
            debug_assert_eq!(number, usize::from(NO_CLASS));
            self.zspages.give(at);
            return true;
        };
        let live = (0..class.objects).filter(|index| claims.has(at, *index)).count() as u16;
        if live == 0 {
            self.zspages.give(at);
            return true;
        }
        let frames = (0..usize::from(class.frames)).map(|frame| zspage.frame(frame));
        if !self.sections.retake(frames) {
            return false;
        }
        zspage.used.store(live, Relaxed);
        zspage.fresh.store(class.objects, Relaxed);
        zspage.free.store(NO_OBJECT, Relaxed);
        zspage.prev.store(NONE, Relaxed);
        zspage.next.store(NONE, Relaxed);
        for index in (0..class.objects).rev().filter(|index| !claims.has(at, *index)) {
            let next = zspage.free.swap(index, Relaxed);
            self.set_header_bits(Handle::new(at, index), u64::from(FREE) << 32 | u64::from(next));
        }
        let mut state = lock(self.class(number, self.node_of(at)));
        state.zspages += 1;
        state.used += usize::from(live);
        self.note_slack(number, &state);
        zspage.group.store(LEAVING, Relaxed);
        self.link(number, &mut state, at);
        true
    }

    /// Sets the owner in an object's header.
    pub(crate) fn set_owner(&self, handle: Handle, owner: SwapEntry) {
        let header = self.header(handle);
        if header.owner != owner {
            self.set_header(handle, Header { owner, ..header });
        }
    }
}

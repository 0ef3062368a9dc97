//! The bias of histories: the actions of threads, and the chances of faults.

use uzswap_engine::testing::{Content, Noise};

/// The chances of faults, in thousandths.
#[derive(Debug, Clone, Copy)]
pub struct Chances {
    pub write_fails: u64,
    pub read_fails: u64,
    pub bit_turns: u64,
    pub memory_is_refused: u64,
    pub segment_is_lost: u64,
    pub reply_is_wrong: u64,
}

/// An action of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Store,
    StoreThrough,
    Load,
    LoadMany,
    LoadExclusive,
    Discard,
    DiscardMany,
    Resume,
    TurnBit,
    Set,
    Shrink,
}

/// The order in which a thread uses its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// At random; a thread that stores may also go in order.
    Any,
    /// In order, again and again.
    Around,
    /// Like the above, but each round drops all pages but this percentage, and stores others, with
    /// fewer or more to a frame.
    Tides(u64),
    /// Once the pool is full, each page in a new trunk of the index; then the history ends.
    Trunks,
}

/// The task of a thread.
#[derive(Debug)]
pub struct Role {
    /// The actions of a thread, with their weights.
    pub kinds: &'static [(Kind, u64)],
    /// The content that a thread stores; `None` for pages of all kinds.
    pub content: Option<Content>,
    pub order: Pattern,
}

/// One item, by its weight.
pub fn one_of<'a, T>(all: &'a [T], weight: impl Fn(&T) -> u64, noise: &mut Noise) -> &'a T {
    let mut chosen = noise.below(all.iter().map(&weight).sum());
    let is_chosen = |one: &&T| match chosen.checked_sub(weight(one)) {
        Some(left) => {
            chosen = left;
            false
        }
        None => true,
    };
    all.iter().find(is_chosen).expect("less than all")
}

impl Role {
    pub fn kind(&self, noise: &mut Noise) -> Kind {
        one_of(self.kinds, |(_, often)| *often, noise).0
    }
}

pub const EVERYTHING: Role = Role {
    kinds: &[
        (Kind::Store, 45),
        (Kind::StoreThrough, 10),
        (Kind::Load, 13),
        (Kind::LoadMany, 5),
        (Kind::LoadExclusive, 3),
        (Kind::Discard, 8),
        (Kind::DiscardMany, 3),
        (Kind::Resume, 3),
        (Kind::TurnBit, 2),
        (Kind::Set, 1),
        (Kind::Shrink, 5),
    ],
    content: None,
    order: Pattern::Any,
};

/// Stores incompressible pages.
pub const FILL: Role = Role {
    kinds: &[(Kind::Store, 100), (Kind::Load, 1)],
    content: Some(Content::Random),
    order: Pattern::Around,
};

/// Stores pages past the pool, and drops most of them from time to time.
pub const THROUGH: Role = Role {
    kinds: &[(Kind::StoreThrough, 80), (Kind::Discard, 5), (Kind::Load, 2)],
    content: Some(Content::Random),
    order: Pattern::Tides(20),
};

/// The bias of histories: one value of each slice. Without a bias some events would hardly ever
/// occur together.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    /// Its weight among all profiles.
    pub share: u64,
    /// The roles that the storing threads take, in order and repeated.
    pub roles: &'static [Role],
    pub workers: &'static [u64],
    /// Actions of each worker.
    pub count: &'static [u64],
    pub pages: &'static [u64],
    pub pool_kib: &'static [u64],
    pub accept_percent: &'static str,
    pub backing_mib: &'static [u64],
    /// In thousandths.
    pub write_fails: &'static [u64],
    pub read_fails: &'static [u64],
    pub bit_turns: &'static [u64],
    pub memory_is_refused: &'static [u64],
    /// Of a store in another machine's memory: reads that find their segment gone, and reads that
    /// bring other bytes.
    pub segment_is_lost: &'static [u64],
    pub reply_is_wrong: &'static [u64],
    /// True if all memory is refused, not only large blocks.
    pub is_starved: bool,
    /// The maintaining thread does nothing else.
    pub only_maintains: bool,
    /// See [`Pace`].
    pub turn: &'static [u64],
    pub hold: &'static [u64],
}

/// A bit of everything.
pub const ANYTHING: Profile = Profile {
    name: "anything",
    share: 6,
    roles: &[EVERYTHING],
    workers: &[1, 2, 2, 3],
    count: &[60, 60, 200, 700],
    pages: &[600, 3000, 90_000],
    pool_kib: &[1024, 1024, 3072],
    accept_percent: "90",
    backing_mib: &[2, 2, 3, 6],
    write_fails: &[0, 0, 3, 30],
    read_fails: &[0, 0, 10],
    bit_turns: &[0, 0, 300],
    memory_is_refused: &[0, 0, 0, 200, 1000],
    segment_is_lost: &[0],
    reply_is_wrong: &[0],
    is_starved: false,
    only_maintains: false,
    turn: &[4, 30, 30, 200],
    hold: &[8, 64, u64::MAX],
};

pub const PROFILES: &[Profile] = &[
    ANYTHING,
    // Pages are written through and dropped beside pages of the pool, on a backing with hardly any
    // space.
    Profile {
        name: "through",
        share: 8,
        roles: &[
            THROUGH,
            Role { order: Pattern::Tides(0), ..FILL },
            THROUGH,
            Role { order: Pattern::Tides(0), ..FILL },
            THROUGH,
        ],
        workers: &[5],
        count: &[1500],
        pages: &[700, 750, 800, 850],
        pool_kib: &[256],
        backing_mib: &[3],
        write_fails: &[0],
        memory_is_refused: &[0],
        only_maintains: true,
        turn: &[8],
        ..ANYTHING
    },
    // Writes that fail, and are tried again immediately.
    Profile {
        name: "failing",
        share: 3,
        roles: &[Role {
            kinds: &[
                (Kind::Store, 20),
                (Kind::StoreThrough, 30),
                (Kind::Load, 8),
                (Kind::Discard, 5),
                (Kind::Resume, 40),
            ],
            ..EVERYTHING
        }],
        workers: &[3],
        write_fails: &[200],
        turn: &[4],
        ..ANYTHING
    },
    // Incompressible pages, without memory for tables.
    Profile {
        name: "starved",
        share: 1,
        roles: &[FILL],
        workers: &[2],
        count: &[1200],
        pages: &[3000],
        pool_kib: &[8192],
        memory_is_refused: &[1000],
        is_starved: true,
        ..ANYTHING
    },
    // New pages all over a large address space, while others keep the pool full.
    Profile {
        name: "flood",
        share: 2,
        roles: &[
            Role {
                kinds: &[(Kind::Store, 1)],
                content: Some(Content::Text),
                order: Pattern::Trunks,
            },
            FILL,
        ],
        workers: &[2, 3],
        count: &[20_000],
        pages: &[400_000],
        pool_kib: &[3072],
        accept_percent: "50",
        backing_mib: &[96],
        write_fails: &[0],
        memory_is_refused: &[0],
        only_maintains: true,
        turn: &[8],
        ..ANYTHING
    },
    // Many pages in each frame, then one in each.
    Profile {
        name: "tides",
        share: 2,
        roles: &[Role {
            kinds: &[(Kind::Store, 1)],
            content: Some(Content::Mixed),
            order: Pattern::Tides(0),
        }],
        workers: &[1],
        count: &[20_000],
        pages: &[6000],
        pool_kib: &[8192],
        write_fails: &[0],
        memory_is_refused: &[0],
        only_maintains: true,
        turn: &[200],
        hold: &[64],
        ..ANYTHING
    },
];

/// A store in another machine's memory, with or without a copy on a disk. This profile has seeds of
/// its own.
pub const REMOTE: Profile = Profile {
    name: "remote",
    count: &[200, 700, 2000],
    pages: &[600, 3000],
    pool_kib: &[256, 1024],
    backing_mib: &[3, 6, 12],
    write_fails: &[0, 0, 10],
    read_fails: &[0, 10, 100],
    bit_turns: &[0],
    memory_is_refused: &[0],
    segment_is_lost: &[0, 2, 30],
    reply_is_wrong: &[0, 30, 300],
    ..ANYTHING
};

/// The bit that marks the seeds of [`REMOTE`].
pub const REMOTE_SEEDS: u64 = 1 << 56;

//! The states of a section of the pool, and their changes.

/// The state of a section of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionState {
    /// The section has no memory, and gets some when the pool needs it.
    Absent,
    /// The section's memory is being made.
    GoingOnline,
    /// The section has objects, or space for them.
    Online,
    /// The section's objects are being moved elsewhere.
    GoingOffline,
    /// The section has no memory, and gets none until it is brought online by hand.
    Offline,
}

impl SectionState {
    /// All states, in the order of a section's life.
    pub const ALL: [Self; 5] =
        [Self::Absent, Self::GoingOnline, Self::Online, Self::GoingOffline, Self::Offline];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::GoingOnline => "going-online",
            Self::Online => "online",
            Self::GoingOffline => "going-offline",
            Self::Offline => "offline",
        }
    }

    /// The content of a section in this state.
    pub fn doc(self) -> &'static str {
        match self {
            Self::Absent => "No memory. It gets some when the pool needs it.",
            Self::GoingOnline => "Its memory is being made, faulted in whole. It is empty.",
            Self::Online => "Objects, or space for them. Each can be moved.",
            Self::GoingOffline => {
                "Its objects are being moved elsewhere; it gets no new ones. Objects still in it are \
                 read and freed as before."
            }
            Self::Offline => "No memory. It gets none before it is brought online by hand.",
        }
    }

    /// The next states, each with its condition.
    pub fn next(self) -> &'static [(Self, &'static str)] {
        match self {
            Self::Absent => &[
                (Self::GoingOnline, "the pool needs memory, or by hand"),
                (Self::Offline, "by hand"),
            ],
            Self::GoingOnline => &[
                (Self::Online, "its memory is there"),
                (Self::Absent, "the machine has none"),
                (Self::Offline, "the machine has none, and it was offline"),
            ],
            Self::Online => {
                &[(Self::GoingOffline, "by hand, or its memory is not needed any more")]
            }
            Self::GoingOffline => &[
                (Self::Online, "an object could not be moved"),
                (Self::Absent, "it is empty, and was not needed any more"),
                (Self::Offline, "it is empty, and stays so"),
            ],
            Self::Offline => &[(Self::GoingOnline, "by hand")],
        }
    }
}

//! The part of a container's limit that the budget of a run leaves free.
//!
//! The limit also counts memory that the run does not: page tables and other memory of the
//! kernel, files in memory, dirty pages of files, and programs of others. The size of that memory
//! shows only as the container runs. So the run reads the container's own count, and keeps the sum
//! of the budget and of that memory below the limit. File pages that the kernel can drop do not
//! count.
//!
//! Processes report their memory up to 100 ms late, so the run counts too little memory of a
//! process that grows. Far from the limit, the run uses the least difference between the two counts
//! in three seconds, since growth ends by then. Near the limit it uses each difference, and the
//! margin grows immediately. The margin falls slowly.

use std::time::Duration;

/// Time between two looks, far from the limit.
pub const EVERY: Duration = Duration::from_millis(100);
/// The same near the limit.
pub const EVERY_NEAR: Duration = Duration::from_millis(10);

/// Looks of which the least difference counts.
const LOOKS: usize = 32;

/// Memory that processes may take between two looks: the limit divided by this, within these bounds
/// in bytes.
const SPARE_PART: u64 = 32;
const SPARE_MIN: u64 = 2 << 20;
const SPARE_MAX: u64 = 64 << 20;

/// The margin falls by one part in this many at a look.
const FALLS: u64 = 256;

/// The budget never falls below the given budget divided by this: other programs of the container
/// must not take all of it.
const PART_LEAST: u64 = 4;

/// One look at a container, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The container's limit.
    pub limit: u64,
    /// The container's memory, without file pages that the kernel can drop.
    pub needed: u64,
    /// The memory that the processes of the run have reported.
    pub counted: u64,
}

impl Reading {
    fn spare(&self) -> u64 {
        (self.limit / SPARE_PART).clamp(SPARE_MIN, SPARE_MAX)
    }

    /// True if the container is so near its limit that each look counts.
    pub fn is_near(&self) -> bool {
        self.needed > self.limit.saturating_sub(2 * self.spare())
    }
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Margin {
    /// The budget that the user or the limit gave, and the least that it became, bytes.
    given: u64,
    least: u64,
    /// The last differences of the container's count and the run's, bytes; the oldest first.
    uncounted: [u64; LOOKS],
    /// The part of the limit that is left free, bytes, and that limit.
    margin: u64,
    limit: u64,
}

impl Margin {
    /// The margin of a run with this budget, before the first look.
    pub fn new(given: u64) -> Self {
        Self { given, least: given, uncounted: [0; LOOKS], margin: 0, limit: u64::MAX }
    }

    /// The margin after a look.
    #[must_use]
    pub fn after(self, seen: Reading) -> Self {
        let now = seen.needed.saturating_sub(seen.counted);
        let mut uncounted = self.uncounted;
        uncounted.rotate_left(1);
        uncounted[LOOKS - 1] = now;
        let least = uncounted.iter().copied().min().unwrap_or(now);
        let wanted = seen.spare() + if seen.is_near() { now } else { least };
        let margin = wanted.max(self.margin - self.margin / FALLS).min(seen.limit);
        let next = Self { uncounted, margin, limit: seen.limit, ..self };
        Self { least: self.least.min(next.budget()), ..next }
    }

    /// Bytes that all processes of the run may have.
    pub fn budget(&self) -> u64 {
        self.given.min(self.ceiling())
    }

    /// Bytes that all processes of the run may have if each page that forks share is copied.
    pub fn ceiling(&self) -> u64 {
        (self.limit - self.margin.min(self.limit)).max(self.given / PART_LEAST)
    }

    /// The most bytes by which the budget was below the given budget.
    pub fn learnt(&self) -> u64 {
        self.given - self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn seen(needed: u64, counted: u64) -> Reading {
        Reading { limit: 100 * MIB, needed: needed * MIB, counted: counted * MIB }
    }

    fn after(looks: &[Reading]) -> Margin {
        looks.iter().fold(Margin::new(87 * MIB), |margin, look| margin.after(*look))
    }

    #[test]
    fn a_program_alone_has_the_budget_that_was_given() {
        let margin = after(&[seen(4, 0), seen(50, 44), seen(87, 80), seen(91, 87), seen(91, 87)]);
        assert_eq!((margin.budget(), margin.learnt()), (87 * MIB, 0));
    }

    #[test]
    fn a_report_that_is_late_changes_nothing_far_from_the_limit() {
        let mut looks = vec![seen(10, 8); LOOKS];
        looks.push(seen(80, 20));
        assert_eq!(after(&looks).budget(), 87 * MIB);
        // It stays so: the run does not count that memory.
        looks.extend([seen(80, 20); LOOKS]);
        assert_eq!(after(&looks).budget(), 40 * MIB - 100 * MIB / SPARE_PART);
    }

    #[test]
    fn near_the_limit_the_budget_shrinks_immediately_and_grows_again_slowly() {
        let near = after(&[seen(10, 8), seen(97, 80)]);
        assert_eq!(near.budget(), 83 * MIB - 100 * MIB / SPARE_PART);
        assert_eq!(near.learnt(), 87 * MIB - near.budget());
        let next = near.after(seen(70, 68));
        assert!(next.budget() > near.budget() && next.budget() < near.budget() + MIB);
        let later = (0..1000).fold(near, |margin, _| margin.after(seen(70, 68)));
        assert_eq!(later.budget(), 87 * MIB);
        assert_eq!(later.learnt(), near.learnt(), "the most is reported");
    }

    #[test]
    fn other_programs_of_the_container_leave_a_quarter() {
        assert_eq!(after(&[seen(99, 1)]).budget(), 87 * MIB / PART_LEAST);
    }

    #[test]
    fn copies_have_room_up_to_the_limit_less_the_margin() {
        let margin = after(&[seen(60, 56); LOOKS]);
        assert_eq!(margin.ceiling(), 96 * MIB - 100 * MIB / SPARE_PART);
        assert_eq!(Margin::new(9).budget(), 9, "without a look");
    }
}

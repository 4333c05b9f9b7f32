//! Time: values that the caller read from a clock. This crate reads no clock.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A point in time: nanoseconds since boot, including suspended time (`CLOCK_BOOTTIME`).
///
/// Suspended time must count, because keys have to age while a laptop sleeps. Arithmetic saturates;
/// 2^64 ns are 584 years.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// The moment of boot.
    pub const BOOT: Instant = Instant(0);

    /// The point `nanos` nanoseconds after boot.
    pub const fn from_nanos(nanos: u64) -> Self {
        Instant(nanos)
    }

    /// Nanoseconds since boot.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn duration_since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Whether `age` or more has passed since `self` at the time `now`.
    pub fn has_expired(self, age: Duration, now: Instant) -> bool {
        now.duration_since(self) >= age
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_add(nanos(rhs)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;
    fn sub(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_sub(nanos(rhs)))
    }
}

impl Sub<Instant> for Instant {
    type Output = Duration;
    fn sub(self, rhs: Instant) -> Duration {
        self.duration_since(rhs)
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot+{:?}", Duration::from_nanos(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let second = Duration::from_secs(1);
        assert_eq!(Instant::BOOT - second, Instant::BOOT);
        assert_eq!(
            Instant::from_nanos(u64::MAX) + Duration::MAX,
            Instant::from_nanos(u64::MAX)
        );
        assert_eq!(Instant::BOOT - (Instant::BOOT + second), Duration::ZERO);
    }

    #[test]
    fn an_age_is_reached_at_its_last_nanosecond() {
        let birth = Instant::from_nanos(5);
        let age = Duration::from_nanos(10);
        assert!(!birth.has_expired(age, Instant::from_nanos(14)));
        assert!(birth.has_expired(age, Instant::from_nanos(15)));
    }
}

//! A limit for events of one object: a number of them at once, and then one in each interval.

use crate::time::Instant;
use std::time::Duration;

/// A bucket of `BURST` tokens that gains one every `MILLIS` milliseconds. It is full by default.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenBucket<const BURST: u32, const MILLIS: u64> {
    /// When it is full, if no token is taken until then.
    full_at: Instant,
}

impl<const BURST: u32, const MILLIS: u64> TokenBucket<BURST, MILLIS> {
    const INTERVAL: Duration = Duration::from_millis(MILLIS);

    /// When there is a token. May be in the past.
    pub fn available_at(&self) -> Instant {
        self.full_at - Self::INTERVAL * (BURST - 1)
    }

    /// Whether there is a token.
    pub fn is_available(&self, now: Instant) -> bool {
        self.available_at() <= now
    }

    /// Takes a token. Returns false if there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        let is_available = self.is_available(now);
        if is_available {
            self.full_at = self.full_at.max(now) + Self::INTERVAL;
        }
        is_available
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_event_in_each_interval() {
        let at = |millis: u64| Instant::from_nanos((100_000 + millis) * 1_000_000);
        let mut bucket = TokenBucket::<4, 500>::default();
        let mut taken = |from: u64, to: u64| (from..to).filter(|ms| bucket.take(at(*ms))).count();
        assert_eq!(taken(0, 499), 4);
        assert_eq!(taken(499, 10_500), 20);
        // After a long pause there is a burst again and no more.
        assert_eq!(taken(1_000_000, 1_000_400), 4);
    }

    #[test]
    fn a_token_is_available_at_the_time_that_it_says() {
        let now = Instant::from_nanos(1 << 40);
        let mut bucket = TokenBucket::<2, 1000>::default();
        assert!(bucket.take(now) && bucket.is_available(now) && bucket.take(now));
        let next = bucket.available_at();
        assert_eq!(next - now, Duration::from_secs(1));
        assert!(!bucket.take(next - Duration::from_nanos(1)));
        assert!(bucket.take(next));
    }
}

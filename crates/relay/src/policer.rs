//! A rate limit with a burst of a quarter of a second.

use std::time::Duration;

use seikan_proto::time::Instant;

/// Maximum burst, as the time that it takes at the full rate.
const BURST: Duration = Duration::from_millis(250);
/// Nanoseconds in a second.
const SECOND: u128 = 1_000_000_000;

/// A rate limit (generic cell rate algorithm, ITU-T I.371). It keeps the theoretical arrival time of the next byte.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policer {
    /// When all admitted bytes are sent at the full rate. A time in the past means an unused limit.
    next_arrival: Instant,
}

impl Policer {
    /// Returns how many of `length` bytes are within `rate` bytes per second (at least 1), and counts them. The bytes are
    /// datagrams of `segment` bytes (at least 1); the last one may be shorter. Only whole datagrams are admitted.
    pub fn admit(&mut self, length: usize, segment: usize, rate: u64, now: Instant) -> usize {
        let from = self.next_arrival.max(now);
        let available = (now + BURST).duration_since(from).as_nanos() * u128::from(rate) / SECOND;
        let available = usize::try_from(available).unwrap_or(usize::MAX);
        let admitted = if available >= length {
            length
        } else {
            available / segment * segment
        };
        let takes = (admitted as u128 * SECOND).div_ceil(u128::from(rate));
        self.next_arrival = from + Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 8_000_000;

    fn at(milliseconds: u64) -> Instant {
        Instant::BOOT + Duration::from_millis(1_000 + milliseconds)
    }

    #[test]
    fn the_burst_is_a_quarter_of_a_second_in_whole_datagrams() {
        let mut policer = Policer::default();
        // 2,000,000 bytes are 1,333 datagrams of 1,500 and 500 bytes.
        assert_eq!(policer.admit(3_000_000, 1_500, RATE, at(0)), 1_999_500);
        assert_eq!(policer.admit(1_500, 1_500, RATE, at(0)), 0);
        assert_eq!(policer.admit(500, 1_500, RATE, at(0)), 500);
        assert_eq!(policer.admit(1, 1_500, RATE, at(0)), 0);
    }

    #[test]
    fn the_long_term_average_is_the_rate() {
        let mut policer = Policer::default();
        let mut sent = 0;
        for milliseconds in 0..4_000 {
            sent += policer.admit(100_000, 1_000, RATE, at(milliseconds));
        }
        // 4 s (less a millisecond) and the quarter at the start.
        let most = 8_000 * 3_999 + 2_000_000;
        assert!((most - 1_000..=most).contains(&sent), "{sent}");
    }

    #[test]
    fn an_idle_limit_saves_up_one_burst() {
        let mut policer = Policer::default();
        policer.admit(2_000_000, 1_000, RATE, at(0));
        assert_eq!(policer.admit(3_000_000, 1_000, RATE, at(60_000)), 2_000_000);
    }
}

//! How much a member may send: so many bytes a second, a quarter of a second's at once.

use std::time::Duration;

use seikan_proto::time::Instant;

/// What may come at once.
const BURST: Duration = Duration::from_millis(250);
/// Nanoseconds in a second.
const SECOND: u128 = 1_000_000_000;

/// What a member has sent, as the time that it takes at the rate that it has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policer {
    /// When all of it would be through; once past, it does not matter when that was.
    through: Instant,
}

impl Policer {
    /// How many of `length` bytes, in datagrams of `segment` bytes each (at least 1; the last may be shorter), are within
    /// `rate` bytes a second (at least 1): these are counted.
    pub fn admit(&mut self, length: usize, segment: usize, rate: u64, now: Instant) -> usize {
        let from = self.through.max(now);
        let room = (now + BURST).duration_since(from).as_nanos() * u128::from(rate) / SECOND;
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let admitted = match room >= length {
            true => length,
            false => room / segment * segment,
        };
        let takes = (admitted as u128 * SECOND).div_ceil(u128::from(rate));
        self.through = from + Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
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
    fn a_quarter_of_a_second_may_come_at_once_and_no_datagram_more() {
        let mut policer = Policer::default();
        // 2,000,000 bytes are 1,333 datagrams of 1,500 and 500 bytes.
        assert_eq!(policer.admit(3_000_000, 1_500, RATE, at(0)), 1_999_500);
        assert_eq!(policer.admit(1_500, 1_500, RATE, at(0)), 0);
        assert_eq!(policer.admit(500, 1_500, RATE, at(0)), 500);
        assert_eq!(policer.admit(1, 1_500, RATE, at(0)), 0);
    }

    #[test]
    fn over_time_it_is_the_rate() {
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
    fn silence_saves_up_a_quarter_of_a_second_and_no_more() {
        let mut policer = Policer::default();
        policer.admit(2_000_000, 1_000, RATE, at(0));
        assert_eq!(policer.admit(3_000_000, 1_000, RATE, at(60_000)), 2_000_000);
    }
}

//! TAI64N: the timestamp in an initiation that prevents replays.
//!
//! A peer accepts an initiation only if its timestamp is greater than every earlier one. Timestamps
//! must be ordered and strictly increasing; they need not be accurate. Format:
//! <https://cr.yp.to/libtai/tai64.html>, big-endian, so their bytes have the same order.

use std::fmt;
use std::time::Duration;

use crate::constants::{INITIATIONS_PER_SECOND, TAI64N_LEN};

/// TAI64 label of 1970-01-01 00:00:00 UTC: 2^62 plus the 10 s by which TAI was ahead of UTC.
const UNIX_EPOCH: u64 = (1 << 62) + 10;
/// Timestamps are multiples of this many nanoseconds: the largest power of two below the interval
/// between two initiations at [`INITIATIONS_PER_SECOND`] (kernel `noise.c`, `tai64n_now`).
const GRAIN: u32 = 1 << (1_000_000_000 / INITIATIONS_PER_SECOND).ilog2();

/// A TAI64N timestamp: seconds and nanoseconds, as on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tai64n([u8; TAI64N_LEN]);

impl Tai64n {
    /// The timestamp of the wall-clock time `since_epoch` (UTC, Unix epoch), rounded down to a
    /// multiple of about 17 ms, which hides the fine phase of the clock.
    pub fn from_unix(since_epoch: Duration) -> Self {
        let nanos = since_epoch.subsec_nanos();
        Self::new(
            UNIX_EPOCH.wrapping_add(since_epoch.as_secs()),
            nanos - nanos % GRAIN,
        )
    }

    /// The stamp with these wire bytes.
    pub const fn from_bytes(bytes: [u8; TAI64N_LEN]) -> Self {
        Tai64n(bytes)
    }

    /// The wire bytes.
    pub const fn as_bytes(&self) -> &[u8; TAI64N_LEN] {
        &self.0
    }

    fn new(seconds: u64, nanos: u32) -> Self {
        let mut bytes = [0; TAI64N_LEN];
        bytes[..8].copy_from_slice(&seconds.to_be_bytes());
        bytes[8..].copy_from_slice(&nanos.to_be_bytes());
        Tai64n(bytes)
    }

    fn parts(self) -> (u64, u32) {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = self.0;
        (
            u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            u32::from_be_bytes([i, j, k, l]),
        )
    }

    /// The next greater timestamp.
    fn next(self) -> Self {
        let (seconds, nanos) = self.parts();
        match nanos - nanos % GRAIN + GRAIN {
            nanos @ ..1_000_000_000 => Self::new(seconds, nanos),
            _ => Self::new(seconds + 1, 0),
        }
    }
}

impl fmt::Debug for Tai64n {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = self.parts();
        write!(f, "@{seconds:016x}{nanos:08x}")
    }
}

/// Source of strictly increasing timestamps.
///
/// A clock set back, or two initiations within one grain, would otherwise yield a timestamp that
/// the peer refuses. In that case the successor of the last timestamp is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tai64nClock {
    last: Option<Tai64n>,
}

impl Tai64nClock {
    /// Returns a timestamp for the wall-clock time `since_epoch`, greater than every earlier one.
    pub fn stamp(&mut self, since_epoch: Duration) -> Tai64n {
        let mut stamp = Tai64n::from_unix(since_epoch);
        if let Some(last) = self.last
            && stamp <= last
        {
            stamp = last.next();
        }
        self.last = Some(stamp);
        stamp
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_of_the_reference_page() {
        // libtai: 1992-06-02 08:07:09 UTC is 2^62 + 707472429 + 26 leap seconds of TAI then; the
        // constant 10 of the epoch stands for them all, as in every WireGuard.
        let stamp = Tai64n::from_unix(Duration::new(707_472_429, 0));
        assert_eq!(format!("{stamp:?}"), "@400000002a2b2c3700000000");
    }

    #[test]
    fn nanoseconds_are_rounded_down_to_the_grain() {
        assert_eq!(GRAIN, 16_777_216);
        let stamp = Tai64n::from_unix(Duration::new(0, 16_777_216 * 3 + 5));
        assert_eq!(stamp.parts().1, 16_777_216 * 3);
    }

    #[test]
    fn timestamps_rise_when_the_clock_stops_or_goes_back() {
        let mut clock = Tai64nClock::default();
        let mut last = clock.stamp(Duration::new(1000, 999_999_999));
        for second in [1000, 1000, 999, 0, 1000, 1001] {
            let stamp = clock.stamp(Duration::new(second, 999_000_000));
            assert!(stamp > last, "{stamp:?} after {last:?}");
            last = stamp;
        }
    }

    #[test]
    fn an_ordinary_clock_is_followed() {
        let mut clock = Tai64nClock::default();
        clock.stamp(Duration::from_secs(10));
        assert_eq!(
            clock.stamp(Duration::from_secs(15)),
            Tai64n::from_unix(Duration::from_secs(15))
        );
    }
}

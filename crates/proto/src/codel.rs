//! Active queue management for the TUN device's queue: the control law of CoDel (RFC 8289) over
//! sampled delays.
//!
//! The kernel does not report how long a packet has been in that queue, but a reader that finds the
//! queue empty knows that the delay is zero. So the delay is measured only where it can matter.
//! Once the queue has not been empty for [`INTERVAL`], the reader drains it and measures how long
//! that takes. From there the law is the RFC's: while the delay is [`TARGET`] or more, one packet
//! is dropped or marked at intervals that shrink with the square root of their number, until the
//! queue is empty or short.

use crate::time::Instant;
use std::time::Duration;

/// Acceptable standing delay (RFC 8289 section 4.2).
pub const TARGET: Duration = Duration::from_millis(5);
/// Time for which the delay must exceed the target before the queue counts as a standing queue (RFC
/// 8289 section 4.3).
pub const INTERVAL: Duration = Duration::from_millis(100);

/// The state of one queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct Codel {
    /// When the queue was last empty or short.
    good: Instant,
    /// Number of signals since the delay became too long; 0 while it is not.
    count: u32,
    /// Time of the last signal, and its number.
    last: Option<Signal>,
}

#[derive(Clone, Copy, Debug)]
struct Signal {
    at: Instant,
    count: u32,
}

impl Codel {
    /// The queue was found empty.
    pub fn emptied(&mut self, now: Instant) {
        self.good = now;
        self.count = 0;
    }

    /// Whether the delay must be measured: the queue has been occupied for an interval, or the next
    /// signal is due.
    pub fn is_due(&self, now: Instant) -> bool {
        match self.last {
            Some(last) if self.count > 0 => last.at.has_expired(spacing(last.count), now),
            _ => self.good.has_expired(INTERVAL, now),
        }
    }

    /// Handles a measured `delay`. Returns true if a packet must be marked or dropped.
    pub fn measured(&mut self, delay: Duration, now: Instant) -> bool {
        if delay < TARGET {
            self.emptied(now);
            return false;
        }
        self.count = match self.last {
            // Shortly after the last episode, its rate is nearly right (RFC 8289 section 5.4).
            Some(last) if self.count == 0 && !last.at.has_expired(16 * INTERVAL, now) => {
                last.count.saturating_sub(2).max(1)
            }
            _ => self.count.saturating_add(1),
        };
        self.last = Some(Signal {
            at: now,
            count: self.count,
        });
        true
    }
}

/// Interval from one signal to the next.
fn spacing(count: u32) -> Duration {
    INTERVAL.div_f64(f64::from(count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: f64) -> Instant {
        Instant::BOOT + Duration::from_secs_f64(ms / 1000.0)
    }

    /// Times in ms at which a queue of constant `delay`, polled every 0.1 ms, is signalled.
    fn signals(codel: &mut Codel, delay: Duration, from: u32, to: u32) -> Vec<f64> {
        (from * 10..to * 10)
            .map(|t| f64::from(t) / 10.0)
            .filter(|t| codel.is_due(at(*t)) && codel.measured(delay, at(*t)))
            .collect()
    }

    #[test]
    fn signals_come_at_intervals_over_the_square_root_of_their_number() {
        let mut codel = Codel::default();
        codel.emptied(at(0.0));
        let signals = signals(&mut codel, TARGET, 0, 400);
        // 100, + 100, + 100/sqrt(2), + 100/sqrt(3), + 100/2: each up to the next tenth.
        let expected = [100.0, 200.0, 270.8, 328.6, 378.6];
        assert_eq!(signals.len(), expected.len(), "{signals:?}");
        for (signal, expected) in signals.iter().zip(expected) {
            assert!((signal - expected).abs() < 0.2, "{signals:?}");
        }
    }

    #[test]
    fn an_empty_or_short_queue_is_not_signalled() {
        let mut codel = Codel::default();
        for ms in 0..1000 {
            codel.emptied(at(f64::from(ms)));
            assert!(!codel.is_due(at(f64::from(ms) + 99.0)));
        }
        let short = TARGET - Duration::from_nanos(1);
        assert!(signals(&mut codel, short, 1000, 3000).is_empty());
    }

    #[test]
    fn a_queue_that_soon_fills_again_is_signalled_at_nearly_the_previous_rate() {
        let mut codel = Codel::default();
        codel.emptied(at(0.0));
        assert_eq!(signals(&mut codel, TARGET, 0, 400).len(), 5);
        codel.emptied(at(400.0));
        let again = signals(&mut codel, TARGET, 400, 600);
        // 5 - 2 = 3: the next one 100/sqrt(3) = 57.7 ms behind the first.
        assert!((again[0] - 500.0).abs() < 0.2, "{again:?}");
        assert!((again[1] - 557.8).abs() < 0.2, "{again:?}");
    }

    #[test]
    fn a_queue_that_fills_again_much_later_starts_over() {
        let mut codel = Codel::default();
        codel.emptied(at(0.0));
        signals(&mut codel, TARGET, 0, 400);
        codel.emptied(at(5000.0));
        let again = signals(&mut codel, TARGET, 5000, 5250);
        assert_eq!(again.len(), 2, "{again:?}");
    }
}

//! Protection from floods: while strangers send many datagrams, the socket filter limits every source that is not the
//! endpoint of a peer ([`DatagramFilter::limit_sources`](seikan_sys::udp::DatagramFilter::limit_sources)).
//!
//! One thread receives the datagrams of peers and of strangers from the same buffer. Without a limit, a flood fills
//! the buffer and takes most of the thread's time. A cookie, WireGuard's protection, saves the computation for
//! initiations, but not the reception, and it saves nothing for other datagrams.

use seikan_proto::time::Instant;
use std::time::Duration;

/// Time over which datagrams are counted. During a flood, known sources and allowances are renewed after it.
const INTERVAL: Duration = Duration::from_millis(100);
/// Rejected datagrams in an interval that are a flood. They take a few percent of a processor.
const FLOOD: u64 = 1000;
/// Rejected and limited datagrams in an interval below which a flood is over.
const CALM: u64 = 500;
/// Datagrams of each type that the sources of an IPv4 address or an IPv6 /64 may send in an interval. A handshake
/// takes one or two of a type, so a hundred peers behind one NAT connect within seconds.
pub(crate) const ALLOWANCE: u32 = 16;

/// The next step of the socket filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Limits sources that are not known now, and renews the allowances.
    Limit,
    /// Lifts the limit.
    Lift,
}

/// Detection of floods.
#[derive(Debug, Default)]
pub struct FloodDetector {
    /// Start of the interval.
    since: Instant,
    /// Datagrams that were rejected or limited before it.
    before: u64,
    /// Whether sources are limited.
    limits: bool,
}

impl FloodDetector {
    /// Returns when the next step is due although nothing is received.
    pub(crate) fn wakeup(&self) -> Option<Instant> {
        self.limits.then(|| self.since + INTERVAL)
    }

    /// Returns the next step; `unwanted` is the total of rejected and limited datagrams so far.
    pub(crate) fn poll(&mut self, now: Instant, unwanted: u64) -> Option<Step> {
        let count = unwanted.saturating_sub(self.before);
        let ended = now.duration_since(self.since) >= INTERVAL;
        let step = match (self.limits, ended) {
            (false, false) if count >= FLOOD => Some(Step::Limit),
            (true, true) if count >= CALM => Some(Step::Limit),
            (true, true) => Some(Step::Lift),
            (_, false) => return None,
            (false, true) => None,
        };
        self.since = now;
        self.before = unwanted;
        self.limits = step == Some(Step::Limit);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::BOOT + Duration::from_millis(1000 + milliseconds)
    }

    fn calm() -> FloodDetector {
        let mut detector = FloodDetector::default();
        assert_eq!(detector.poll(at(0), 0), None);
        detector
    }

    #[test]
    fn a_flood_is_limited_before_its_interval_ends() {
        let mut detector = calm();
        assert_eq!(detector.poll(at(20), 999), None);
        assert_eq!(detector.wakeup(), None);
        assert_eq!(detector.poll(at(30), 1000), Some(Step::Limit));
        assert_eq!(detector.wakeup(), Some(at(130)));
    }

    #[test]
    fn as_many_over_a_longer_time_are_no_flood() {
        let mut detector = calm();
        for step in 1..100 {
            assert_eq!(detector.poll(at(step * 100), step * 900), None);
        }
    }

    #[test]
    fn the_limit_is_renewed_until_the_flood_ends() {
        let mut detector = calm();
        assert_eq!(detector.poll(at(1), 1000), Some(Step::Limit));
        assert_eq!(detector.poll(at(50), 9000), None);
        assert_eq!(detector.poll(at(101), 9000), Some(Step::Limit));
        assert_eq!(detector.poll(at(201), 9499), Some(Step::Lift));
        assert_eq!(detector.wakeup(), None);
        assert_eq!(detector.poll(at(250), 9999), None);
    }
}

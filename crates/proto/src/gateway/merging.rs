//! Detects whether the local network's interface loses super-packets.
//!
//! Some network cards and drivers damage or lose super-packets that they have to segment, and no
//! call reports it. Only TCP shows it, by retransmitting everything. If many segments sent in
//! super-packets are lost, super-packets are segmented here for a while. If fewer are lost then,
//! that stays so and is tested again later. If it makes no difference, the network is the cause,
//! and super-packets are used again.

use crate::time::Instant;
use std::time::Duration;

/// How long losses are counted before an evaluation.
const WINDOW: Duration = Duration::from_secs(5);
/// Minimum number of segments, lost or sent, for an evaluation. A connection that loses every
/// super-packet sends few.
const ENOUGH: u64 = 8;
/// How long segmentation is tested.
const TRIAL: Duration = Duration::from_secs(5);
/// Time for which a broken interface gets no super-packets.
const BROKEN_FOR: Duration = Duration::from_secs(600);
/// Time for which an interface that was not the cause is not tested again.
const TRUSTED_FOR: Duration = Duration::from_secs(60);

/// Segments sent to the local network since the last evaluation, and lost ones among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sent {
    segments: u64,
    lost: u64,
}

impl Sent {
    /// Lost segments per thousand.
    fn loss(&self) -> u64 {
        self.lost * 1000 / self.segments.max(1)
    }
}

/// The verdict on the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The interface gets super-packets, and is not tested before this time.
    Trusted(Instant),
    /// Super-packets are segmented until this time, as a test. Holds the losses per thousand
    /// before.
    Testing(Instant, u64),
    /// The test helped: super-packets are segmented until this time.
    Broken(Instant),
}

/// Detects lost super-packets.
#[derive(Clone, Debug)]
pub struct Merging {
    verdict: Verdict,
    since: Instant,
    /// Segments in super-packets or, while they are segmented, all segments.
    sent: Sent,
}

impl Default for Merging {
    fn default() -> Self {
        Merging {
            verdict: Verdict::Trusted(Instant::BOOT),
            since: Instant::BOOT,
            sent: Sent::default(),
        }
    }
}

impl Merging {
    /// Whether super-packets must be segmented here.
    pub fn is_cut(&self) -> bool {
        !matches!(self.verdict, Verdict::Trusted(_))
    }

    /// Whether the interface was found to lose super-packets.
    pub fn is_broken(&self) -> bool {
        matches!(self.verdict, Verdict::Broken(_))
    }

    /// Counts `segments` sent to the local network, merged in a super-packet or not, and `lost`
    /// earlier segments, of which `lost_merged` were in super-packets.
    pub(super) fn sent(
        &mut self,
        now: Instant,
        segments: u64,
        merged: bool,
        lost: u64,
        lost_merged: u64,
    ) {
        if self.is_cut() {
            // Super-packets that are segmented here are single packets for the interface.
            self.sent.segments += segments;
            self.sent.lost += lost;
        } else {
            self.sent.segments += if merged { segments } else { 0 };
            self.sent.lost += lost_merged;
        }
        self.update(now);
    }

    fn update(&mut self, now: Instant) {
        let next = match self.verdict {
            Verdict::Trusted(from) => {
                // TCP does not survive a network that loses a quarter.
                let bad = self.sent.lost >= ENOUGH && self.sent.loss() >= 250;
                if bad && now >= from {
                    Some(Verdict::Testing(now + TRIAL, self.sent.loss()))
                } else {
                    self.since
                        .has_expired(WINDOW, now)
                        .then_some(Verdict::Trusted(from))
                }
            }
            Verdict::Testing(until, before) if now >= until => {
                Some(if self.sent.segments < ENOUGH {
                    Verdict::Trusted(now)
                } else if self.sent.loss() * 2 < before {
                    Verdict::Broken(now + BROKEN_FOR)
                } else {
                    Verdict::Trusted(now + TRUSTED_FOR)
                })
            }
            Verdict::Broken(until) if now >= until => Some(Verdict::Trusted(now)),
            _ => None,
        };
        if let Some(verdict) = next {
            (self.verdict, self.since) = (verdict, now);
            self.sent = Sent::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_millis(ms)
    }

    /// Ten super-packets of ten segments a second over an interface that loses `whole` per thousand
    /// segments in super-packets and `cut` per thousand of others; the state at the end.
    fn after(seconds: u64, whole: u64, cut: u64) -> Merging {
        let mut merging = Merging::default();
        let mut owed = 0;
        for i in 0..seconds * 10 {
            let rate = if merging.is_cut() { cut } else { whole };
            owed += 10 * rate;
            let lost = owed / 1000;
            owed %= 1000;
            let merged = if merging.is_cut() { 0 } else { lost };
            merging.sent(at(i * 100), 10, true, lost, merged);
        }
        merging
    }

    #[test]
    fn an_interface_that_loses_super_packets_gets_segments() {
        let merging = after(30, 900, 5);
        assert!(merging.is_cut() && merging.is_broken());
    }

    #[test]
    fn it_is_tried_again_later() {
        assert!(!after(607, 900, 5).is_broken());
        assert!(after(600, 900, 5).is_broken());
    }

    #[test]
    fn a_network_that_loses_all_packets_equally_keeps_super_packets() {
        let merging = after(30, 300, 300);
        assert!(!merging.is_cut() && !merging.is_broken());
    }

    #[test]
    fn ordinary_loss_is_no_reason() {
        assert!(!after(30, 50, 0).is_cut());
    }

    #[test]
    fn a_trial_without_traffic_says_nothing() {
        let mut merging = Merging::default();
        merging.sent(at(0), 20, true, 20, 20);
        assert!(merging.is_cut());
        merging.sent(at(6000), 1, false, 0, 0);
        assert!(!merging.is_cut() && !merging.is_broken());
        // It is suspected again.
        merging.sent(at(6100), 20, true, 20, 20);
        assert!(merging.is_cut());
    }

    #[test]
    fn losses_that_are_not_ascribed_to_super_packets_do_not_hide_the_others() {
        let mut merging = Merging::default();
        for i in 0..10 {
            merging.sent(at(i), 2, true, 1, 1);
            merging.sent(at(i), 1, false, 1, 0);
        }
        assert!(merging.is_cut());
    }
}

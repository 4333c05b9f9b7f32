//! Address validation: how much may be sent to an endpoint until the peer is known to receive there
//! (RFC 9000, sections 8 and 9.3).
//!
//! The source address of an authenticated datagram can be forged by a malicious peer and changed by
//! an attacker on the path. Without a limit, this host could be made to flood a third party.
//! Therefore an endpoint that only such a datagram names is sent at most [`FACTOR`] times the bytes
//! received from it, and packets wait. A *check*, a PROBE with a random number and size, is sent at
//! once. Its acknowledgement validates the endpoint, and so does the first record of a session
//! whose response was sent to that address only. If an endpoint is not validated within
//! [`GIVE_UP`], the previous one is used again.
//!
//! Native protocol only: WireGuard has no message that could validate an address before a session
//! is renewed.

use crate::native::check::{Check, LARGEST_SHORT};
use crate::rng::Rng;
use crate::time::Instant;
use std::time::Duration;

/// Bytes that may be sent for each byte received (RFC 9000, section 8.1).
pub const FACTOR: usize = 3;
/// Interval between two checks of an endpoint.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Time from the first datagram until an unvalidated endpoint is abandoned.
const GIVE_UP: Duration = Duration::from_secs(3);
/// Unknown acknowledgements after which the check is replaced, so that it cannot be guessed.
const MAX_WRONG: u8 = 4;
/// Maximum size of a check in bytes of UDP payload.
const LARGEST_CHECK: usize = LARGEST_SHORT as usize;

/// Validation state of one endpoint. The default is a validated endpoint.
#[derive(Debug, Default)]
pub struct AddressValidation(Option<Claim>);

/// An endpoint that only a datagram has named.
#[derive(Debug)]
struct Claim {
    /// Bytes that may still be sent there.
    credit: usize,
    /// When a datagram first arrived from there, or arrived again after a pause.
    since: Instant,
    ask_at: Instant,
    check: Option<Check>,
    wrong: u8,
}

impl AddressValidation {
    /// State of an endpoint that a datagram has just named.
    pub fn required(now: Instant) -> AddressValidation {
        AddressValidation(Some(Claim {
            credit: 0,
            since: now,
            ask_at: now,
            check: None,
            wrong: 0,
        }))
    }

    /// Whether the endpoint is validated, so that there is no limit.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.0.is_none()
    }

    /// Adds credit for an authenticated datagram of this many bytes.
    #[inline]
    pub fn received(&mut self, bytes: usize, now: Instant) {
        if let Some(claim) = &mut self.0 {
            claim.credit = claim.credit.saturating_add(FACTOR * bytes);
            if claim.is_abandoned(now) {
                claim.since = now;
                claim.ask_at = now;
            }
        }
    }

    /// Whether this many bytes may be sent.
    pub fn allows(&self, bytes: usize) -> bool {
        self.0.as_ref().is_none_or(|claim| bytes <= claim.credit)
    }

    /// Bytes of packets that may be sent, with credit for two checks held back. Unlimited once
    /// validated.
    pub fn for_packets(&self) -> usize {
        self.0.as_ref().map_or(usize::MAX, |claim| {
            claim.credit.saturating_sub(2 * LARGEST_CHECK)
        })
    }

    /// Takes this many bytes of credit. Returns false if there is less.
    #[inline]
    pub fn take(&mut self, bytes: usize) -> bool {
        match &mut self.0 {
            None => true,
            Some(claim) => match claim.credit.checked_sub(bytes) {
                Some(rest) => {
                    claim.credit = rest;
                    true
                }
                None => false,
            },
        }
    }

    /// Returns the check to send if one is due. The same check is repeated until it is answered.
    pub fn ask(&mut self, now: Instant, rng: &mut dyn Rng) -> Option<Check> {
        let claim = self.0.as_mut()?;
        if now < claim.ask_at || claim.is_abandoned(now) {
            return None;
        }
        claim.ask_at = now + ASK_EVERY;
        let check = *claim.check.get_or_insert_with(|| Check::short(rng));
        (usize::from(check.size) <= claim.credit).then_some(check)
    }

    /// When to send the next check or to abandon the endpoint.
    pub fn next_wakeup(&self, now: Instant) -> Option<Instant> {
        let claim = self.0.as_ref()?;
        (!claim.is_abandoned(now)).then(|| claim.ask_at.min(claim.since + GIVE_UP))
    }

    /// Whether validation has failed.
    pub fn is_abandoned(&self, now: Instant) -> bool {
        self.0.as_ref().is_some_and(|claim| claim.is_abandoned(now))
    }

    /// Handles an acknowledged check. Returns true if it was this endpoint's: it is then validated.
    pub fn acknowledged(&mut self, check: Check) -> bool {
        let fits = self.0.as_ref().is_some_and(|c| c.check == Some(check));
        if fits {
            self.0 = None;
        }
        fits
    }

    /// Handles an acknowledgement of a check that was never sent.
    pub fn on_unknown_ack(&mut self) {
        if let Some(claim) = &mut self.0 {
            claim.wrong += 1;
            if claim.wrong >= MAX_WRONG {
                (claim.check, claim.wrong) = (None, 0);
            }
        }
    }
}

impl Claim {
    fn is_abandoned(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= GIVE_UP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counting(u8);

    impl Rng for Counting {
        fn fill(&mut self, destination: &mut [u8]) {
            for byte in destination {
                self.0 = self.0.wrapping_add(37);
                *byte = self.0;
            }
        }
    }

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn three_times_the_received_bytes_may_be_sent_until_validation() {
        let mut validation = AddressValidation::required(at(0));
        assert!(!validation.take(1));
        validation.received(100, at(0));
        let check = validation.ask(at(0), &mut Counting(0)).expect("a check");
        assert!(validation.take(check.size.into()));
        assert!(!validation.take(301 - usize::from(check.size)));
        assert!(validation.take(300 - usize::from(check.size)));
        assert!(!validation.take(1));
        assert!(validation.acknowledged(check));
        assert!(validation.is_complete() && validation.take(1 << 30));
    }

    #[test]
    fn the_least_datagram_pays_for_two_checks() {
        let mut validation = AddressValidation::required(at(0));
        validation.received(35, at(0));
        let mut rng = Counting(7);
        let first = validation.ask(at(0), &mut rng).expect("a check");
        assert!(validation.take(first.size.into()));
        assert_eq!(validation.ask(at(499), &mut rng), None);
        assert_eq!(validation.ask(at(500), &mut rng), Some(first));
        assert!(validation.take(first.size.into()));
        assert_eq!(validation.ask(at(1000), &mut rng), None, "nothing left");
    }

    #[test]
    fn guessing_replaces_the_check() {
        let mut validation = AddressValidation::required(at(0));
        validation.received(1000, at(0));
        let mut rng = Counting(0);
        let check = validation.ask(at(0), &mut rng).expect("a check");
        (0..4).for_each(|_| validation.on_unknown_ack());
        assert!(!validation.acknowledged(check));
        assert_ne!(validation.ask(at(500), &mut rng), Some(check));
    }

    #[test]
    fn it_is_given_up_after_three_seconds_until_something_comes_again() {
        let mut validation = AddressValidation::required(at(0));
        validation.received(100, at(0));
        assert!(!validation.is_abandoned(at(2999)));
        assert!(validation.is_abandoned(at(3000)));
        assert_eq!(validation.next_wakeup(at(3000)), None);
        validation.received(100, at(4000));
        assert!(validation.ask(at(4000), &mut Counting(0)).is_some());
    }
}

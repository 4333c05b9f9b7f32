//! How often a source may fail to join, and how often a member may have the others told something.
//! Tokens cannot be guessed; the first is so that trying costs the coordinator little, and its notes are
//! not filled by one who tries. Members are told of every change of another: the second is so that one
//! gone bad does not keep all of them busy.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::time::Duration;

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::store::MemberId;

/// Failures of one source in a minute, and at once.
const FAILURES: NonZeroU32 = NonZeroU32::new(10).expect("not zero");
/// Failures of all sources together in a second of which a note is kept.
const NOTES: NonZeroU32 = NonZeroU32::new(10).expect("not zero");
/// Sources that are remembered, at most.
const MAX_SOURCES: usize = 100_000;
/// When another failure of a source that has had its share is judged again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(60 / FAILURES.get() as u64);

/// Changes of where one member may be reached: each of a minute, which may come at once. A host that moves
/// about has a few.
const MOVES: NonZeroU32 = NonZeroU32::new(60).expect("not zero");
/// Calls of one member in a second; four times as many may come at once, as after a restart.
const CALLS: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
const CALLS_AT_ONCE: NonZeroU32 = NonZeroU32::new(256).expect("not zero");

/// Who is taken for one: an IPv4 address, or the /64 of an IPv6 address, whose host has all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Source(IpAddr);

impl Source {
    fn of(address: IpAddr) -> Source {
        Source(match address.to_canonical() {
            IpAddr::V6(v6) => {
                let network = v6.to_bits() & !u128::from(u64::MAX);
                Ipv6Addr::from_bits(network).into()
            }
            v4 => v4,
        })
    }
}

/// What became of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It is told why; worth a note.
    Noted,
    /// It is told why.
    Passed,
    /// It has had its share.
    TooMany,
}

/// What a member may do so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// It says where it may be reached.
    Moving,
    /// It calls another.
    Calling,
}

/// Counts failures to join, and what members do. A join that succeeds is not counted, and never held up.
pub(super) struct Limits {
    sources: DefaultKeyedRateLimiter<Source>,
    notes: DefaultDirectRateLimiter,
    moves: DefaultKeyedRateLimiter<MemberId>,
    calls: DefaultKeyedRateLimiter<MemberId>,
}

impl Limits {
    pub fn new() -> Limits {
        Limits {
            sources: RateLimiter::keyed(Quota::per_minute(FAILURES)),
            notes: RateLimiter::direct(Quota::per_second(NOTES)),
            moves: RateLimiter::keyed(Quota::per_minute(MOVES)),
            calls: RateLimiter::keyed(Quota::per_second(CALLS).allow_burst(CALLS_AT_ONCE)),
        }
    }

    /// Counts what a member does; whether it may.
    pub fn may(&self, member: MemberId, doing: Doing) -> bool {
        let limiter = match doing {
            Doing::Moving => &self.moves,
            Doing::Calling => &self.calls,
        };
        limiter.check_key(&member).is_ok()
    }

    /// Counts one.
    pub fn failed(&self, from: IpAddr) -> Failure {
        // With so many, whoever it is is taken for one too many until the table is swept.
        if self.sources.len() >= MAX_SOURCES || self.sources.check_key(&Source::of(from)).is_err() {
            return Failure::TooMany;
        }
        match self.notes.check() {
            Ok(()) => Failure::Noted,
            Err(_) => Failure::Passed,
        }
    }

    /// Forgets the sources and members that have their whole share again.
    pub fn sweep(&self) {
        self.sources.retain_recent();
        self.sources.shrink_to_fit();
        for members in [&self.moves, &self.calls] {
            members.retain_recent();
            members.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_source_is_an_address_or_a_network_of_64_bits() {
        let same = [
            ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
        ];
        for (a, b) in same {
            assert_eq!(Source::of(ip(a)), Source::of(ip(b)), "{a} {b}");
        }
        let other = [
            ("2001:db8:0:1::1", "2001:db8:0:2::1"),
            ("192.0.2.1", "192.0.2.2"),
        ];
        for (a, b) in other {
            assert_ne!(Source::of(ip(a)), Source::of(ip(b)), "{a} {b}");
        }
    }

    #[test]
    fn ten_failures_of_a_source_pass_and_the_next_does_not() {
        let limits = Limits::new();
        for _ in 0..10 {
            assert_ne!(limits.failed(ip("192.0.2.1")), Failure::TooMany);
        }
        assert_eq!(limits.failed(ip("192.0.2.1")), Failure::TooMany);
        assert_ne!(limits.failed(ip("192.0.2.2")), Failure::TooMany);
    }

    #[test]
    fn the_notes_of_all_sources_together_are_bounded() {
        let limits = Limits::new();
        let noted = (0..100u8).filter(|n| {
            let from = IpAddr::from([192, 0, 2, *n]);
            limits.failed(from) == Failure::Noted
        });
        // Ten at once, and one more for each tenth of a second that this takes.
        assert!((10..20).contains(&noted.count()));
    }
}

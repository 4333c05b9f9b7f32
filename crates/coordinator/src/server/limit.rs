//! How often a source may show what is not good, and how often a member may have the others told something.
//! Tokens and credentials cannot be guessed; the first is so that trying costs the coordinator, and etcd, little, and its notes are
//! not filled by one who tries. Who shows a good one is never held up by others behind the same address. Members are told of every
//! change of another: the second is so that one gone bad does not keep all of them busy.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::store::MemberId;

/// Failures of one source in a minute, and at once.
const FAILURES: u32 = 10;
/// Until the share of a source that fails no more is whole again.
const WHOLE: Duration = Duration::from_secs(60);
/// Failures of all sources together in a second of which a note is kept.
const NOTES: NonZeroU32 = NonZeroU32::new(10).expect("not zero");
/// Sources that are remembered, at most.
const MAX_SOURCES: usize = 100_000;
/// When another failure of a source that has had its share is judged again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(WHOLE.as_secs() / FAILURES as u64);

/// Changes of where one member may be reached: each of a minute, which may come at once. A host that moves
/// about has a few.
const MOVES: NonZeroU32 = NonZeroU32::new(60).expect("not zero");
/// Calls of one member in a second; four times as many may come at once, as after a restart.
const CALLS: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
const CALLS_AT_ONCE: NonZeroU32 = NonZeroU32::new(256).expect("not zero");

/// Questions of one member in a second: it has one again after each answer, which comes 50 ms after a change at the earliest. More may come
/// at once, as the parts of a long list.
const QUESTIONS: NonZeroU32 = NonZeroU32::new(32).expect("not zero");
const QUESTIONS_AT_ONCE: NonZeroU32 = NonZeroU32::new(128).expect("not zero");
/// New connections of a source in a second, each of which is a TLS handshake; a mesh that comes at once behind one address has as many
/// more.
const CONNECTIONS: NonZeroU32 = NonZeroU32::new(50).expect("not zero");
const CONNECTIONS_AT_ONCE: NonZeroU32 = NonZeroU32::new(4096).expect("not zero");

/// Who is taken for one: an IPv4 address, or the /64 of an IPv6 address, whose host has all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    pub fn of(address: IpAddr) -> Source {
        Source(match address.to_canonical() {
            IpAddr::V6(v6) => {
                let network = v6.to_bits() & !u128::from(u64::MAX);
                Ipv6Addr::from_bits(network).into()
            }
            v4 => v4,
        })
    }
}

/// What a member may do so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// It says where it may be reached.
    Moving,
    /// It calls another.
    Calling,
    /// It asks for changes.
    Asking,
}

/// Failures of sources. The same as governor's, which cannot be asked without counting, nor take a try for a failure only once it is one.
#[derive(Default)]
struct Failures(Mutex<HashMap<Source, Failed>>);

/// What a source has had of its share.
struct Failed {
    /// Until when it would have failed if it had no more than one in [`RETRY_AFTER`].
    until: Instant,
    /// Tries that are not judged yet.
    trying: u32,
}

impl Failed {
    /// The same if all that it tries fails.
    fn at_worst(&self, now: Instant) -> Instant {
        now.max(self.until) + RETRY_AFTER * self.trying
    }
}

impl Failures {
    /// Begins one, unless the source has had its share. With so many sources, whoever is new is taken for one too many until the table is
    /// swept.
    fn begin(&self, source: Source) -> Option<Try<'_>> {
        let now = Instant::now();
        let mut all = self.all();
        if all.len() >= MAX_SOURCES && !all.contains_key(&source) {
            return None;
        }
        let failed = all.entry(source).or_insert(Failed {
            until: now,
            trying: 0,
        });
        if failed.at_worst(now) > now + (WHOLE - RETRY_AFTER) {
            return None;
        }
        failed.trying += 1;
        Some(Try {
            failures: self,
            source,
            is_failure: true,
        })
    }

    fn sweep(&self) {
        let now = Instant::now();
        let mut all = self.all();
        all.retain(|_, failed| failed.at_worst(now) > now);
        all.shrink_to_fit();
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Source, Failed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A try of a source: part of its share until it is dropped, and a failure then, also if its end was not waited for.
#[must_use = "it fails when it is dropped"]
pub(super) struct Try<'a> {
    failures: &'a Failures,
    source: Source,
    is_failure: bool,
}

impl Try<'_> {
    /// What was shown is good, or nobody knows whether it is.
    pub fn forgive(mut self) {
        self.is_failure = false;
    }
}

impl Drop for Try<'_> {
    fn drop(&mut self) {
        if let Some(failed) = self.failures.all().get_mut(&self.source) {
            failed.trying -= 1;
            if self.is_failure {
                failed.until = Instant::now().max(failed.until) + RETRY_AFTER;
            }
        }
    }
}

/// Counts failures, and what members do. What is known to be good is not counted, and never held up.
pub(super) struct Limits {
    /// Connections that ended as their answers were not taken in time, since this was last told.
    pub late: AtomicU64,
    sources: Failures,
    notes: DefaultDirectRateLimiter,
    moves: DefaultKeyedRateLimiter<MemberId>,
    calls: DefaultKeyedRateLimiter<MemberId>,
    questions: DefaultKeyedRateLimiter<MemberId>,
    connections: DefaultKeyedRateLimiter<Source>,
}

impl Limits {
    pub fn new() -> Limits {
        Limits {
            late: AtomicU64::new(0),
            sources: Failures::default(),
            notes: RateLimiter::direct(Quota::per_second(NOTES)),
            moves: RateLimiter::keyed(Quota::per_minute(MOVES)),
            calls: RateLimiter::keyed(Quota::per_second(CALLS).allow_burst(CALLS_AT_ONCE)),
            questions: RateLimiter::keyed(
                Quota::per_second(QUESTIONS).allow_burst(QUESTIONS_AT_ONCE),
            ),
            connections: RateLimiter::keyed(
                Quota::per_second(CONNECTIONS).allow_burst(CONNECTIONS_AT_ONCE),
            ),
        }
    }

    /// Counts what a member does; whether it may.
    pub fn may(&self, member: MemberId, doing: Doing) -> bool {
        let limiter = match doing {
            Doing::Moving => &self.moves,
            Doing::Calling => &self.calls,
            Doing::Asking => &self.questions,
        };
        limiter.check_key(&member).is_ok()
    }

    /// Counts a connection; whether its source may have it. With too many sources to count all may, as far as there are places.
    pub fn may_connect(&self, from: IpAddr) -> bool {
        let source = Source::of(from);
        self.connections.len() >= MAX_SOURCES || self.connections.check_key(&source).is_ok()
    }

    /// Begins what may become a failure while others are asked, which may take long; `None` if the source has had its share: what it shows
    /// is looked for here alone then, and nobody else is asked for it.
    pub fn begin(&self, from: IpAddr) -> Option<Try<'_>> {
        self.sources.begin(Source::of(from))
    }

    /// Counts a failure; whether the source had not had its share.
    pub fn count(&self, from: IpAddr) -> bool {
        self.begin(from).is_some()
    }

    /// Whether a note is kept of a failure to join, of all that there are.
    pub fn may_note(&self) -> bool {
        self.notes.check().is_ok()
    }

    /// Forgets the sources and members that have their whole share again.
    pub fn sweep(&self) {
        self.sources.sweep();
        for members in [&self.moves, &self.calls, &self.questions] {
            members.retain_recent();
            members.shrink_to_fit();
        }
        self.connections.retain_recent();
        self.connections.shrink_to_fit();
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
            assert!(limits.count(ip("192.0.2.1")));
        }
        assert!(!limits.count(ip("192.0.2.1")));
        assert!(limits.count(ip("192.0.2.2")));
        // A sweep forgets nobody who has not his whole share.
        limits.sweep();
        assert!(!limits.count(ip("192.0.2.1")));
    }

    #[test]
    fn what_was_no_failure_is_not_counted_and_takes_back_no_other() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        for _ in 0..9 {
            assert!(limits.count(from));
        }
        for _ in 0..100 {
            limits.begin(from).expect("a tenth").forgive();
        }
        assert!(limits.count(from));
        assert!(!limits.count(from));
    }

    #[test]
    fn who_tries_ten_at_once_tries_no_more_until_they_are_judged() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        let tries: Vec<_> = (0..10).map_while(|_| limits.begin(from)).collect();
        assert_eq!(tries.len(), 10);
        // Nor are they forgotten meanwhile.
        limits.sweep();
        assert!(limits.begin(from).is_none());
        tries.into_iter().for_each(Try::forgive);
        assert!(limits.count(from));
    }

    #[test]
    fn a_source_connects_so_often_and_another_beside_it() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        let connected = (0..10_000).filter(|_| limits.may_connect(from)).count();
        // As many as may come at once, and a few for the time that this takes.
        assert!((4096..4200).contains(&connected), "{connected}");
        assert!(limits.may_connect(ip("192.0.2.2")));
    }

    #[test]
    fn the_notes_of_all_sources_together_are_bounded() {
        let limits = Limits::new();
        let noted = (0..100).filter(|_| limits.may_note());
        // Ten at once, and one more for each tenth of a second that this takes.
        assert!((10..20).contains(&noted.count()));
    }
}

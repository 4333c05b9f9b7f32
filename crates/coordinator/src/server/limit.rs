//! Rate limits of failed authentication by source, and of requests by member.
//!
//! Tokens and credentials cannot be guessed. The limit of failures bounds the work that failed
//! attempts cost the coordinator and etcd, and the entries in the log. Valid credentials are never
//! delayed by others behind the same address. Every change of a member is reported to all others:
//! the limits of members keep a faulty member from keeping all of them busy.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use tokio::sync::Semaphore;

use crate::lock;
use crate::store::{MemberId, TokenId};

/// Failures of one source per minute, and as a burst.
const FAILURES: u32 = 10;
/// Time after which a source without further failures has its full burst again.
const RECOVERY: Duration = Duration::from_secs(60);
/// Failures of all sources per second that the log records.
const LOGGED_FAILURES: NonZeroU32 = NonZeroU32::new(10).expect("not zero");
/// Maximum number of sources in the table.
const MAX_SOURCES: usize = 100_000;
/// Time after which a source that has used up its burst may fail once more.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(RECOVERY.as_secs() / FAILURES as u64);

/// Changes of endpoints of one member per minute, and as a burst. A roaming host has a few.
const MOVES: NonZeroU32 = NonZeroU32::new(60).expect("not zero");
/// Maximum number of calls by one member per second. The burst is four times as large, for example
/// for a restart.
const CALLS: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
const CALL_BURST: NonZeroU32 = NonZeroU32::new(256).expect("not zero");

/// Polls of one member per second. A member polls again after each answer, which follows a change
/// by 50 ms or more. The burst allows the parts of a long list.
const POLLS: NonZeroU32 = NonZeroU32::new(32).expect("not zero");
const POLL_BURST: NonZeroU32 = NonZeroU32::new(128).expect("not zero");
/// Hosts that may join with one token per second. Members that have left are kept forever, and each
/// join and each leave is an entry of the log. The burst allows a large mesh to join at once.
const JOINS: NonZeroU32 = NonZeroU32::new(1).expect("not zero");
const JOIN_BURST: NonZeroU32 = NonZeroU32::new(16_384).expect("not zero");
/// New connections of one source per second; each costs a TLS handshake. The burst allows a mesh
/// behind one address to connect at once.
const CONNECTIONS: NonZeroU32 = NonZeroU32::new(50).expect("not zero");
const CONNECTION_BURST: NonZeroU32 = NonZeroU32::new(4096).expect("not zero");

/// A source of requests: an IPv4 address, or the /64 of an IPv6 address, because one host may use
/// all of it.
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

/// Permits that each source has of its own.
#[derive(Debug)]
pub(super) struct BySource {
    permits: usize,
    sources: Mutex<HashMap<Source, Arc<Semaphore>>>,
}

impl BySource {
    pub fn new(permits: usize) -> BySource {
        BySource {
            permits,
            sources: Mutex::default(),
        }
    }

    pub fn of(&self, from: IpAddr) -> Arc<Semaphore> {
        let mut all = lock(&self.sources);
        // Before the table grows.
        if all.len() == all.capacity() {
            all.retain(|_, source| Arc::strong_count(source) > 1);
            all.shrink_to_fit();
        }
        let new = || Arc::new(Semaphore::new(self.permits));
        Arc::clone(all.entry(Source::of(from)).or_insert_with(new))
    }
}

/// Kind of a member's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Changes endpoints or the key.
    SetEndpoints,
    /// Calls another member.
    Call,
    /// Polls for changes.
    Poll,
}

/// Failures by source, by the generic cell rate algorithm as in governor. Unlike governor, this
/// table counts an attempt only once its outcome is known.
#[derive(Default)]
struct Failures(Mutex<HashMap<Source, SourceFailures>>);

/// Failures of one source.
struct SourceFailures {
    /// Theoretical arrival time of the algorithm, with one failure per [`RETRY_AFTER`].
    next_arrival: Instant,
    /// Attempts without an outcome yet.
    open_attempts: u32,
}

impl SourceFailures {
    /// Returns the next arrival time if all open attempts fail.
    fn if_all_fail(&self, now: Instant) -> Instant {
        now.max(self.next_arrival) + RETRY_AFTER * self.open_attempts
    }
}

impl Failures {
    /// Begins an attempt, unless the source has used up its burst. When the table is full, new
    /// sources are refused until the next sweep.
    fn begin(&self, source: Source) -> Option<Attempt<'_>> {
        let now = Instant::now();
        let mut all = self.all();
        if all.len() >= MAX_SOURCES && !all.contains_key(&source) {
            return None;
        }
        let failed = all.entry(source).or_insert(SourceFailures {
            next_arrival: now,
            open_attempts: 0,
        });
        if failed.if_all_fail(now) > now + (RECOVERY - RETRY_AFTER) {
            return None;
        }
        failed.open_attempts += 1;
        Some(Attempt {
            failures: self,
            source,
            is_failure: true,
        })
    }

    fn sweep(&self) {
        let now = Instant::now();
        let mut all = self.all();
        all.retain(|_, failed| failed.if_all_fail(now) > now);
        all.shrink_to_fit();
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Source, SourceFailures>> {
        lock(&self.0)
    }
}

/// An attempt of a source. It counts as a failure when it is dropped, also if its outcome was not
/// awaited.
#[must_use = "it counts as a failure when it is dropped"]
pub(super) struct Attempt<'a> {
    failures: &'a Failures,
    source: Source,
    is_failure: bool,
}

impl Attempt<'_> {
    /// Does not count the attempt: it succeeded, or its outcome is unknown.
    pub fn forgive(mut self) {
        self.is_failure = false;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(failed) = self.failures.all().get_mut(&self.source) {
            failed.open_attempts -= 1;
            if self.is_failure {
                failed.next_arrival = Instant::now().max(failed.next_arrival) + RETRY_AFTER;
            }
        }
    }
}

/// Counters of failures by source and of requests by member. Known credentials are neither counted
/// as failures nor delayed by them.
pub(super) struct Limits {
    /// Connections that were closed because an answer was read too slowly, since the last report.
    pub slow_connections: AtomicU64,
    sources: Failures,
    logged_failures: DefaultDirectRateLimiter,
    /// Rate limiters of members, by [`RequestKind`].
    members: [DefaultKeyedRateLimiter<MemberId>; 3],
    connections: DefaultKeyedRateLimiter<Source>,
    /// Successful joins by token.
    joins: DefaultKeyedRateLimiter<TokenId>,
}

impl Limits {
    pub fn new() -> Limits {
        Limits {
            slow_connections: AtomicU64::new(0),
            sources: Failures::default(),
            logged_failures: RateLimiter::direct(Quota::per_second(LOGGED_FAILURES)),
            members: [
                Quota::per_minute(MOVES),
                Quota::per_second(CALLS).allow_burst(CALL_BURST),
                Quota::per_second(POLLS).allow_burst(POLL_BURST),
            ]
            .map(RateLimiter::keyed),
            connections: RateLimiter::keyed(
                Quota::per_second(CONNECTIONS).allow_burst(CONNECTION_BURST),
            ),
            joins: RateLimiter::keyed(Quota::per_second(JOINS).allow_burst(JOIN_BURST)),
        }
    }

    /// Counts a host that is about to join with a valid token; returns whether it may.
    pub fn may_join(&self, token: TokenId) -> bool {
        self.joins.check_key(&token).is_ok()
    }

    /// Counts a request of a member; returns whether it is allowed.
    pub fn allow(&self, member: MemberId, kind: RequestKind) -> bool {
        self.members[kind as usize].check_key(&member).is_ok()
    }

    /// Counts a connection; returns whether its source may have it. When the table is full, every
    /// source may have connections, within the number of slots.
    pub fn may_connect(&self, from: IpAddr) -> bool {
        let source = Source::of(from);
        self.connections.len() >= MAX_SOURCES || self.connections.check_key(&source).is_ok()
    }

    /// Begins an attempt that takes long because etcd is queried; `None` if the source has used up
    /// its burst. Its credentials are then looked up in the local copy only.
    pub fn begin_attempt(&self, from: IpAddr) -> Option<Attempt<'_>> {
        self.sources.begin(Source::of(from))
    }

    /// Counts a failure; returns whether the source was within its limit.
    pub fn count_failure(&self, from: IpAddr) -> bool {
        self.begin_attempt(from).is_some()
    }

    /// Counts a failed join of any source; returns whether the log records it.
    pub fn may_log(&self) -> bool {
        self.logged_failures.check().is_ok()
    }

    /// Removes the sources and members that have their full burst.
    pub fn sweep(&self) {
        self.sources.sweep();
        for members in &self.members {
            members.retain_recent();
            members.shrink_to_fit();
        }
        self.connections.retain_recent();
        self.connections.shrink_to_fit();
        self.joins.retain_recent();
        self.joins.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_source_is_an_ipv4_address_or_an_ipv6_64() {
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
    fn a_source_may_fail_ten_times() {
        let limits = Limits::new();
        for _ in 0..10 {
            assert!(limits.count_failure(ip("192.0.2.1")));
        }
        assert!(!limits.count_failure(ip("192.0.2.1")));
        assert!(limits.count_failure(ip("192.0.2.2")));
        // A sweep keeps a source that does not have its full burst.
        limits.sweep();
        assert!(!limits.count_failure(ip("192.0.2.1")));
    }

    #[test]
    fn forgiven_attempts_are_not_counted() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        for _ in 0..9 {
            assert!(limits.count_failure(from));
        }
        for _ in 0..100 {
            limits.begin_attempt(from).expect("a tenth").forgive();
        }
        assert!(limits.count_failure(from));
        assert!(!limits.count_failure(from));
    }

    #[test]
    fn open_attempts_count_as_failures() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        let attempts: Vec<_> = (0..10).map_while(|_| limits.begin_attempt(from)).collect();
        assert_eq!(attempts.len(), 10);
        // A sweep keeps open attempts.
        limits.sweep();
        assert!(limits.begin_attempt(from).is_none());
        attempts.into_iter().for_each(Attempt::forgive);
        assert!(limits.count_failure(from));
    }

    #[test]
    fn each_source_has_its_own_limit_of_connections() {
        let limits = Limits::new();
        let from = ip("192.0.2.1");
        let connected = (0..10_000).filter(|_| limits.may_connect(from)).count();
        // The burst, and a few for the time that this takes.
        assert!((4096..4200).contains(&connected), "{connected}");
        assert!(limits.may_connect(ip("192.0.2.2")));
    }

    #[test]
    fn each_token_has_its_own_limit_of_joins() {
        let limits = Limits::new();
        let joined = (0..20_000).filter(|_| limits.may_join(TokenId(1)));
        // The burst, and a few for the time that this takes.
        assert!((16_384..16_420).contains(&joined.count()));
        // A sweep keeps a token that does not have its full burst.
        limits.sweep();
        let again = (0..100).filter(|_| limits.may_join(TokenId(1)));
        assert!(again.count() < 20);
        assert!(limits.may_join(TokenId(2)));
    }

    #[test]
    fn logged_failures_of_all_sources_are_bounded() {
        let limits = Limits::new();
        let logged = (0..100).filter(|_| limits.may_log());
        // The burst of ten, and one more for each tenth of a second that this takes.
        assert!((10..20).contains(&logged.count()));
    }
}

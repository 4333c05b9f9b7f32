//! Rate limits for handshakes under load: a token bucket per IPv4 address or IPv6 /64, with the
//! constants of the kernel's `ratelimiter.c`. Each proxied address has a bucket,
//! and each port of this host, where a program may forward for another peer.
//!
//! Only sources that proved their address with mac2 get a bucket of a [`RateLimiter`], so forged
//! addresses cannot fill the table. It is bounded as well, and new sources are refused when it is
//! full. A source that is sent a cookie has proved nothing yet, so [`ReplyLimiter`] has no table to
//! fill.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::constants::*;
use crate::proxied;
use crate::time::Instant;

/// Cost of one message: the time in which a bucket gains it.
const COST: Duration = Duration::from_nanos(1_000_000_000 / RATE_LIMIT_PACKETS_PER_SECOND as u64);
/// Content of a full bucket.
const FULL: Duration = Duration::from_nanos(COST.as_nanos() as u64 * RATE_LIMIT_BURST as u64);
/// Idle time after which a bucket, which is full by then, is dropped.
const FORGET_AFTER: Duration = Duration::from_secs(1);

/// Key of a bucket. The map is a tree and not a hash table because attackers choose the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Source {
    V4(u32),
    V6Slash64(u64),
    Here(u16),
    Proxied(u64),
}

impl From<SocketAddr> for Source {
    fn from(address: SocketAddr) -> Self {
        match address.ip().to_canonical() {
            ip if ip.is_loopback() => Source::Here(address.port()),
            IpAddr::V4(address) => Source::V4(address.to_bits()),
            IpAddr::V6(address) => match proxied::id(address.into()) {
                Some(id) => Source::Proxied(id),
                None => Source::V6Slash64((address.to_bits() >> 64) as u64),
            },
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: Duration,
    last: Instant,
}

impl Bucket {
    fn full(now: Instant) -> Bucket {
        Bucket {
            tokens: FULL,
            last: now,
        }
    }

    /// Takes the cost of one message if the bucket has it.
    fn take(&mut self, now: Instant) -> bool {
        self.tokens = FULL.min(self.tokens + now.duration_since(self.last));
        self.last = now;
        match self.tokens.checked_sub(COST) {
            Some(rest) => {
                self.tokens = rest;
                true
            }
            None => false,
        }
    }
}

/// Token buckets by source.
#[derive(Clone, Debug, Default)]
pub struct RateLimiter {
    buckets: BTreeMap<Source, Bucket>,
    last_sweep: Instant,
}

impl RateLimiter {
    /// Whether one more message from `source` may be processed at `now`.
    pub fn allow(&mut self, source: SocketAddr, now: Instant) -> bool {
        self.sweep(now);
        let source = Source::from(source);
        if self.buckets.len() >= RATE_LIMIT_SOURCES && !self.buckets.contains_key(&source) {
            return false;
        }
        self.buckets
            .entry(source)
            .or_insert(Bucket::full(now))
            .take(now)
    }

    /// Number of sources in the table; at most [`RATE_LIMIT_SOURCES`].
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }

    fn sweep(&mut self, now: Instant) {
        if self.last_sweep.has_expired(FORGET_AFTER, now) {
            self.last_sweep = now;
            self.buckets
                .retain(|_, bucket| !bucket.last.has_expired(FORGET_AFTER, now));
        }
    }
}

/// Limits cookie replies. A reply costs more than the checks before it, and anyone who knows this
/// host's public key can request one from any address.
///
/// Sources share [`REPLY_BUCKETS`] token buckets, by a hash keyed with the cookie secret. A source
/// that floods from its own address uses up its own bucket and affects hardly anyone else. A flood
/// from forged addresses uses up all of them, which bounds its cost; the retries of a legitimate
/// peer still find a token now and then.
#[derive(Clone, Debug)]
pub struct ReplyLimiter {
    buckets: Box<[Bucket]>,
}

/// Shares reserved for the endpoints of live sessions. Each has its own allowance of cookie replies
/// and handshakes, which only datagrams from that address and port can use.
#[derive(Clone, Debug, Default)]
pub struct Reserved {
    shares: BTreeMap<SocketAddr, Share>,
    /// When the endpoints were last updated.
    updated_at: Option<Instant>,
}

/// The remaining share of one endpoint.
#[derive(Clone, Copy, Debug)]
struct Share {
    replies: Bucket,
    handshakes: Bucket,
}

impl Reserved {
    /// Whether the endpoints need an update: once a second, as sessions come and go.
    pub fn is_stale(&self, now: Instant) -> bool {
        self.updated_at
            .is_none_or(|updated_at| updated_at.has_expired(FORGET_AFTER, now))
    }

    /// Sets the endpoints of live sessions. Those that stay keep their remaining share.
    pub fn set(&mut self, endpoints: impl Iterator<Item = SocketAddr>, now: Instant) {
        let mut old = std::mem::take(&mut self.shares);
        self.updated_at = Some(now);
        self.shares = endpoints
            .map(|endpoint| {
                let endpoint = canonical(endpoint);
                let full = Bucket::full(now);
                let share = old.remove(&endpoint).unwrap_or(Share {
                    replies: full,
                    handshakes: full,
                });
                (endpoint, share)
            })
            .collect();
    }

    /// Whether `source` may have a cookie reply; `None` if it has no share.
    pub fn allow_reply(&mut self, source: SocketAddr, now: Instant) -> Option<bool> {
        Some(self.of(source)?.replies.take(now))
    }

    /// Whether a message from `source` may be processed; `None` if it has no share.
    pub fn allow_handshake(&mut self, source: SocketAddr, now: Instant) -> Option<bool> {
        Some(self.of(source)?.handshakes.take(now))
    }

    fn of(&mut self, source: SocketAddr) -> Option<&mut Share> {
        self.shares.get_mut(&canonical(source))
    }
}

/// Converts an IPv4-mapped address to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Buckets of a [`ReplyLimiter`]; together they allow some 5,000 replies a second.
const REPLY_BUCKETS: usize = 256;

impl Default for ReplyLimiter {
    fn default() -> Self {
        ReplyLimiter {
            buckets: vec![Bucket::full(Instant::BOOT); REPLY_BUCKETS].into(),
        }
    }
}

impl ReplyLimiter {
    /// Whether `source` may have a cookie reply at `now`. With another `secret`, sources are
    /// assigned to other buckets.
    pub fn allow(&mut self, source: SocketAddr, secret: &[u8; 32], now: Instant) -> bool {
        let mut hasher = DefaultHasher::new();
        (secret, Source::from(source)).hash(&mut hasher);
        self.buckets[hasher.finish() as usize % REPLY_BUCKETS].take(now)
    }
}

/// Keeps the state "under load" for [`UNDER_LOAD_HOLD`], so that the defence does not flap between
/// two messages of one flood (kernel `receive.c`).
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadMeter {
    last: Option<Instant>,
}

impl LoadMeter {
    /// Whether there was load lately.
    pub fn is_on(&self, now: Instant) -> bool {
        self.last
            .is_some_and(|last| !last.has_expired(UNDER_LOAD_HOLD, now))
    }

    /// Whether to act as under load. `busy` says whether the caller is busy at `now`.
    pub fn observe(&mut self, busy: bool, now: Instant) -> bool {
        if busy {
            self.last = Some(now);
        }
        self.is_on(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const START: Instant = Instant::from_nanos(1 << 40);
    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

    fn at(ip: IpAddr) -> SocketAddr {
        SocketAddr::new(ip, 51820)
    }

    fn allowed(limiter: &mut RateLimiter, source: IpAddr, now: Instant, tries: usize) -> usize {
        (0..tries)
            .filter(|&port| limiter.allow(SocketAddr::new(source, port as u16), now))
            .count()
    }

    #[test]
    fn a_burst_of_five_then_one_per_fiftieth_of_a_second() {
        let mut limiter = RateLimiter::default();
        assert_eq!(allowed(&mut limiter, HOST, START, 20), 5);
        assert_eq!(
            allowed(&mut limiter, HOST, START + Duration::from_millis(49), 1),
            0
        );
        assert_eq!(
            allowed(&mut limiter, HOST, START + Duration::from_millis(50), 2),
            1
        );
    }

    #[test]
    fn a_second_of_flood_gives_the_rate_and_the_burst() {
        let mut limiter = RateLimiter::default();
        let allowed = (0..1000)
            .filter(|&ms| limiter.allow(at(HOST), START + Duration::from_millis(ms)))
            .count();
        assert_eq!(allowed, 5 + 19);
    }

    #[test]
    fn ipv6_is_counted_by_its_64_bit_prefix() {
        let mut limiter = RateLimiter::default();
        let host =
            |prefix, host| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, prefix, 0, 0, 0, host));
        let in_one: usize = (0..20)
            .map(|i| allowed(&mut limiter, host(1, i), START, 1))
            .sum();
        assert_eq!(in_one, 5);
        assert!(limiter.allow(at(host(2, 0)), START));
    }

    #[test]
    fn a_mapped_address_shares_the_bucket_of_its_ipv4_form() {
        let mut limiter = RateLimiter::default();
        allowed(&mut limiter, HOST, START, 5);
        let mapped = Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped();
        assert!(!limiter.allow(at(IpAddr::V6(mapped)), START));
    }

    #[test]
    fn each_port_of_this_host_has_its_own_bucket() {
        for loopback in ["127.0.0.1", "127.0.0.53", "::1", "::ffff:127.0.0.1"] {
            let ip: IpAddr = loopback.parse().expect(loopback);
            let mut limiter = RateLimiter::default();
            let mut allow = |port| limiter.allow(SocketAddr::new(ip, port), START);
            let first = (0..20).filter(|_| allow(40_001)).count();
            assert_eq!((first, allow(40_002)), (5, true), "{loopback}");
        }
        // All ports of another host are one source.
        let mut limiter = RateLimiter::default();
        assert_eq!(allowed(&mut limiter, HOST, START, 20), 5);
    }

    #[test]
    fn each_proxied_address_has_its_own_bucket() {
        let mut limiter = RateLimiter::default();
        let mut allow = |id| limiter.allow(proxied::address(id, 3478), START);
        let first = (0..20).filter(|_| allow(1)).count();
        assert_eq!((first, allow(2)), (5, true));
    }

    #[test]
    fn the_table_is_bounded_and_forgets() {
        let mut limiter = RateLimiter::default();
        for i in 0..RATE_LIMIT_SOURCES as u32 + 100 {
            limiter.allow(at(IpAddr::V4(Ipv4Addr::from_bits(i))), START);
        }
        assert_eq!(limiter.len(), RATE_LIMIT_SOURCES);
        assert!(limiter.allow(at(HOST), START + FORGET_AFTER));
        assert_eq!(limiter.len(), 1);
    }

    #[test]
    fn one_source_has_its_share_of_replies_and_leaves_others_theirs() {
        let mut limiter = ReplyLimiter::default();
        let mut allow = |host: u8, ms| {
            let at = START + Duration::from_millis(ms);
            limiter.allow(
                self::at(Ipv4Addr::new(192, 0, 2, host).into()),
                &[1; 32],
                at,
            )
        };
        let allowed = (0..1000).filter(|&ms| allow(1, ms)).count();
        assert_eq!(allowed, 5 + 19);
        let others = (2..=250).filter(|&host| allow(host, 1000)).count();
        assert!(others > 230, "{others} of 249");
    }

    #[test]
    fn forged_sources_get_a_bounded_number_of_replies() {
        let mut limiter = ReplyLimiter::default();
        let allowed = (0..100_000_u32)
            .filter(|&n| {
                let at = START + Duration::from_micros(u64::from(n) * 10);
                limiter.allow(self::at(Ipv4Addr::from_bits(n).into()), &[1; 32], at)
            })
            .count();
        assert!(allowed <= (5 + 20) * REPLY_BUCKETS, "{allowed}");
    }

    #[test]
    fn load_is_remembered_for_a_second() {
        let mut meter = LoadMeter::default();
        assert!(!meter.observe(false, START));
        assert!(meter.observe(true, START));
        assert!(meter.observe(false, START + Duration::from_millis(999)));
        assert!(!meter.observe(false, START + Duration::from_millis(1000)));
    }

    /// A flood of a hundred thousand messages a second, each from a different /64 of the same /48.
    /// Every live session requests a cookie every 5 s, from its rekeying at 120 s to its end at 180
    /// s. Returns the number of sessions that get none in that time.
    fn without_renewal(reserved: bool) -> usize {
        const SESSIONS: u16 = 100;
        let endpoint = |n: u16| SocketAddr::from(([198, 51, (n >> 8) as u8, n as u8], 51820));
        let (mut replies, mut shares) = (ReplyLimiter::default(), Reserved::default());
        let mut renewed = [false; SESSIONS as usize];
        for n in 0..60 * 100_000_u64 {
            let now = START + Duration::from_micros(n * 10);
            let prefix = (n % 65_536) as u16;
            let outside = Ipv6Addr::new(0x2001, 0xdb8, 0, prefix, 0, 0, 0, 1);
            replies.allow(at(outside.into()), &[1; 32], now);
            // The peers are spread over the 5 s, a little later each time.
            let turn = (n + n / 500_000 * 487_655) % 500_000;
            if turn % 5000 == 0 {
                let peer = (turn / 5000) as u16;
                if reserved && shares.is_stale(now) {
                    shares.set((0..SESSIONS).map(endpoint), now);
                }
                let source = endpoint(peer);
                let allowed = shares.allow_reply(source, now);
                renewed[usize::from(peer)] |=
                    allowed.unwrap_or_else(|| replies.allow(source, &[1; 32], now));
            }
        }
        renewed.iter().filter(|renewed| !**renewed).count()
    }

    #[test]
    fn a_flood_from_many_networks_does_not_prevent_the_renewal_of_sessions() {
        let without = without_renewal(false);
        println!("of 100 sessions not renewed: {without} without shares of their own");
        assert!(without > 20, "{without}: the flood is none");
        assert_eq!(without_renewal(true), 0);
    }

    #[test]
    fn a_share_is_its_endpoints_alone_and_bounded() {
        let mut shares = Reserved::default();
        let own = at(HOST);
        shares.set([own].into_iter(), START);
        let other_port = SocketAddr::new(HOST, 1);
        assert_eq!(shares.allow_reply(other_port, START), None);
        let allowed = (0..20).filter(|_| shares.allow_reply(own, START) == Some(true));
        assert_eq!(allowed.count(), 5);
        // An update keeps the used share.
        shares.set([own].into_iter(), START);
        assert_eq!(shares.allow_reply(own, START), Some(false));
        assert_eq!(shares.allow_handshake(own, START), Some(true));
    }
}

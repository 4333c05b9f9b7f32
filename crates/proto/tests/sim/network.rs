//! One direction of a seeded network path, with its faults.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::net::SocketAddr;
use std::time::Duration;

/// A datagram in flight.
#[derive(Clone, Debug)]
pub struct Parcel {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub traffic_class: u8,
    /// Whether it has a hop limit that does not suffice for the whole path.
    pub is_opener: bool,
    pub bytes: Vec<u8>,
}

/// Losses in bursts, by the model of Gilbert and Elliott: a path is in a good or a bad state, and
/// changes it with fixed probabilities at each datagram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bursts {
    /// Mean number of datagrams in the bad state, one after the other; at least 1.
    pub length: f64,
    /// Share of datagrams in the bad state; less than 1.
    pub share: f64,
    /// Loss in the bad state; that of the good state is [`Path::loss`].
    pub loss: f64,
}

impl Bursts {
    /// Returns the probability of a change of state.
    fn change(&self, is_bad: bool) -> f64 {
        let ends = 1.0 / self.length;
        let begins = ends * self.share / (1.0 - self.share);
        if is_bad { ends } else { begins.min(1.0) }
    }
}

/// Properties of a path.
#[derive(Clone, Debug)]
pub struct Path {
    pub latency: Duration,
    pub jitter: Duration,
    /// Loss of each datagram, independent of others.
    pub loss: f64,
    /// Losses in bursts, in addition.
    pub bursts: Option<Bursts>,
    /// Share of datagrams that are delayed by up to ten times the latency.
    pub reordering: f64,
    pub duplication: f64,
    /// Share of datagrams with a flipped bit.
    pub corruption: f64,
    /// Share of ECN-capable datagrams that are marked CE.
    pub marking: f64,
    /// Largest IP packet.
    pub mtu: usize,
    /// The kernel knows `mtu` and refuses larger packets (EMSGSIZE).
    pub local: bool,
    /// Bytes per second.
    pub rate: Option<u64>,
    /// Maximum number of bytes queued for the rate.
    pub queue: u64,
    /// Only the first datagram of a batch survives.
    pub mangles_gso: bool,
    /// All datagrams are lost.
    pub down: bool,
}

impl Default for Path {
    fn default() -> Path {
        Path {
            latency: Duration::from_millis(10),
            jitter: Duration::ZERO,
            loss: 0.0,
            bursts: None,
            reordering: 0.0,
            duplication: 0.0,
            corruption: 0.0,
            marking: 0.0,
            mtu: 1500,
            local: false,
            rate: None,
            queue: 200_000,
            mangles_gso: false,
            down: false,
        }
    }
}

impl Path {
    pub fn keeps_order(&self) -> bool {
        self.jitter.is_zero() && self.reordering == 0.0
    }

    pub fn ip_size(parcel: &Parcel) -> usize {
        parcel.bytes.len() + if parcel.to.is_ipv6() { 48 } else { 28 }
    }
}

/// Counts of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub sent: u64,
    pub batches: u64,
    /// Sent after the first of their batch.
    pub later: u64,
    pub lost: u64,
    pub too_big: u64,
    pub arrived: u64,
    pub marked: u64,
}

/// One direction.
#[derive(Debug)]
pub struct Link {
    pub path: Path,
    pub counts: Counts,
    /// Whether the last datagram found the path in the bad state of its bursts.
    is_bad: bool,
    /// Until when the queue keeps the link busy, in nanoseconds.
    busy_until: u64,
}

impl Link {
    pub fn new(path: Path) -> Link {
        Link {
            path,
            counts: Counts::default(),
            is_bad: false,
            busy_until: 0,
        }
    }

    /// Sends datagram `position` of a batch at `now`. Returns the times and bytes of arrival.
    pub fn send(
        &mut self,
        now: u64,
        position: usize,
        mut parcel: Parcel,
        rng: &mut ChaCha8Rng,
    ) -> Vec<(u64, Parcel)> {
        let path = &self.path;
        self.counts.sent += 1;
        self.counts.batches += u64::from(position == 0);
        self.counts.later += u64::from(position > 0);
        if Path::ip_size(&parcel) > path.mtu {
            self.counts.too_big += 1;
            return Vec::new();
        }
        let mut leaves = now;
        let mut full = false;
        if let Some(rate) = path.rate {
            let wait = self.busy_until.saturating_sub(now);
            full = u128::from(wait) * u128::from(rate) / 1_000_000_000 > u128::from(path.queue);
            if !full {
                let size = Path::ip_size(&parcel) as u64;
                self.busy_until = now + wait + size * 1_000_000_000 / rate;
                leaves = self.busy_until;
            }
        }
        let mangled = path.mangles_gso && position > 0;
        let mut loss = path.loss;
        match path.bursts {
            Some(bursts) => {
                self.is_bad ^= rng.random_bool(bursts.change(self.is_bad));
                if self.is_bad {
                    loss = bursts.loss;
                }
            }
            None => self.is_bad = false,
        }
        if full || mangled || path.down || rng.random_bool(loss) {
            self.counts.lost += 1;
            return Vec::new();
        }
        if path.corruption > 0.0 && rng.random_bool(path.corruption) && !parcel.bytes.is_empty() {
            let at = rng.random_range(0..parcel.bytes.len());
            parcel.bytes[at] ^= 1 << rng.random_range(0..8);
        }
        if parcel.traffic_class & 3 != 0 && path.marking > 0.0 && rng.random_bool(path.marking) {
            parcel.traffic_class |= 3;
            self.counts.marked += 1;
        }
        let copies = 1 + usize::from(path.duplication > 0.0 && rng.random_bool(path.duplication));
        self.counts.arrived += copies as u64;
        (0..copies)
            .map(|_| {
                let mut at = leaves + path.latency.as_nanos() as u64;
                if !path.jitter.is_zero() {
                    at += rng.random_range(0..path.jitter.as_nanos() as u64);
                }
                if path.reordering > 0.0 && rng.random_bool(path.reordering) {
                    at += rng.random_range(0..10 * path.latency.as_nanos() as u64 + 1);
                }
                (at, parcel.clone())
            })
            .collect()
    }
}

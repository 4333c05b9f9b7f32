//! Path MTU discovery by probing: datagram packetization layer path MTU discovery (RFC 8899).
//!
//! A probe is a padded record of a candidate size. Its acknowledgement proves that the size passes
//! in this direction; ICMP is not trusted. The search tries common sizes, largest first, that were
//! not refused, then bisects to within [`GRANULARITY`].
//!
//! The confirmed size is probed again after every refused size, and every [`CONFIRM_INTERVAL`]
//! while data flows once the search is over. After [`MAX_PROBES`] failed confirmations in a row,
//! the path has become a black hole for that size, or is down. Then the base size is used and
//! probed until it passes, so that an outage does not make every size look refused. After that the
//! search starts again.
//!
//! A probe that was too large leaves a gap in the counters. The next record reports this
//! ([`Stamp::follows_probe`](super::stamp::Stamp::follows_probe)), so the peer counts no loss.

use super::fold::{SLICE4, SLICE6};
use super::frame::{LAST_SAVES, SLICE_OVERHEAD};
use super::repair::parity;
use super::stamp::RECORD_OVERHEAD;
use crate::time::Instant;
use std::time::Duration;

/// UDP payload that every path carries: the minimum MTU of IPv6 less IPv6 and UDP headers
/// (BASE_PLPMTU).
pub const BASE: u16 = 1280 - 48;
/// Maximum UDP payload.
pub const MAX: u16 = 65_507;
/// Probes of one size before it counts as refused (MAX_PROBES of RFC 8899).
const MAX_PROBES: u8 = 3;
/// Time to wait for an acknowledgement (PROBE_TIMER; RFC 8899 requires at least one RTT).
const PROBE_TIMER: Duration = Duration::from_secs(1);
/// Interval between confirmations of the confirmed size.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);
/// Interval after which larger sizes are tried again (PMTU_RAISE_TIMER is 600 s).
const RAISE_INTERVAL: Duration = Duration::from_secs(600);
/// Bisection ends when the bounds are this close.
const GRANULARITY: u16 = 8;
/// Common MTUs, as IP packet sizes: minimum IPv6, tunnels, PPPoE, Ethernet, clouds, jumbo.
const COMMON: [u16; 9] = [1280, 1360, 1420, 1460, 1492, 1500, 4096, 9001, 65_535];

/// Path MTU discovery for one direction of one path.
#[derive(Clone, Debug)]
pub struct PathMtu {
    /// IP and UDP header bytes.
    overhead: u16,
    /// Largest size known to pass.
    confirmed: u16,
    /// Smallest size believed not to pass.
    refused: u16,
    /// The path may be down: no size is known until the base passes.
    base_unsure: bool,
    /// A larger size failed: the confirmed size is probed again before the next candidate.
    doubtful: bool,
    probe: Option<Probe>,
    next_id: u16,
    /// When to confirm the current size again, or to try larger ones.
    idle_until: Option<Instant>,
    raise_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    id: u16,
    size: u16,
    sent: u8,
    sent_at: Instant,
    deadline: Instant,
}

impl PathMtu {
    /// Creates the state of an unknown path. `v6` determines the size of its headers.
    pub fn new(v6: bool) -> PathMtu {
        PathMtu {
            overhead: if v6 { 48 } else { 28 },
            confirmed: BASE,
            refused: MAX,
            base_unsure: false,
            doubtful: false,
            probe: None,
            next_id: 0,
            idle_until: None,
            raise_at: None,
        }
    }

    /// Creates the state of another path to the same peer. Acknowledgements of probes on this path
    /// do not match its probes.
    pub fn moved(&self, v6: bool) -> PathMtu {
        PathMtu {
            next_id: self.next_id,
            ..PathMtu::new(v6)
        }
    }

    /// Returns the number of UDP payload bytes that pass.
    pub fn size(&self) -> usize {
        usize::from(self.confirmed)
    }

    /// Returns the path MTU in the usual sense: the size of an IP packet that passes, in bytes.
    pub fn mtu(&self) -> usize {
        self.size() + usize::from(self.overhead)
    }

    /// Returns the inner MTU for TCP, at most `mtu`: a segment in a slice, with its IP header (IPv4
    /// with DF, or IPv6) at `ip_at`, fits one record, so that a lost datagram costs no second segment. It is `mtu` until
    /// the search has refused the record or is over.
    pub fn segment_mtu(&self, mtu: usize, ip_at: usize, is_v6: bool, repairs: bool) -> usize {
        let room = if repairs { parity::ROOM } else { 0 };
        let folded = if is_v6 { SLICE6 } else { SLICE4 };
        let slice = SLICE_OVERHEAD - LAST_SAVES;
        let overhead = RECORD_OVERHEAD + slice + ip_at + room - folded;
        let record = mtu + overhead;
        let known = record >= usize::from(self.refused) || self.candidate().is_none();
        if known && !self.base_unsure {
            record.min(self.size()) - overhead
        } else {
            mtu
        }
    }

    /// Returns the id and UDP payload size of the probe to send now, if one is due.
    pub fn poll(&mut self, now: Instant) -> Option<(u16, usize)> {
        let (id, size) = self.due(now)?;
        Some((id, usize::from(size)))
    }

    fn due(&mut self, now: Instant) -> Option<(u16, u16)> {
        if let Some(probe) = &mut self.probe {
            if now < probe.deadline {
                return None;
            }
            if probe.sent < MAX_PROBES {
                probe.sent += 1;
                probe.deadline = now + PROBE_TIMER;
                return Some((probe.id, probe.size));
            }
            let size = probe.size;
            self.failed(size);
        }
        let size = match self.candidate() {
            _ if self.doubtful => self.confirmed,
            Some(size) => size,
            None => self.rest(now)?,
        };
        self.doubtful = false;
        self.next_id = self.next_id.wrapping_add(1);
        self.probe = Some(Probe {
            id: self.next_id,
            size,
            sent: 1,
            sent_at: now,
            deadline: now + PROBE_TIMER,
        });
        Some((self.next_id, size))
    }

    /// When [`Self::poll`] has work to do.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.probe.map(|p| p.deadline).or(self.idle_until)
    }

    /// Handles an acknowledged probe. Returns the round-trip time, unless the probe had been
    /// repeated (Karn's algorithm).
    pub fn acknowledged(&mut self, id: u16, size: u16, now: Instant) -> Option<Duration> {
        let probe = self.probe.filter(|p| p.id == id && p.size == size)?;
        self.probe = None;
        self.base_unsure = false;
        self.confirmed = self.confirmed.max(probe.size);
        self.refused = self.refused.max(self.confirmed.saturating_add(1));
        let sent = probe.sent_at;
        (probe.sent == 1).then(|| now.duration_since(sent))
    }

    /// The kernel refused a datagram of `size` bytes (EMSGSIZE): the first link is smaller.
    pub fn too_large(&mut self, size: usize) {
        let size = size.min(usize::from(MAX)) as u16;
        // The base is probed at its own pace, since there is nothing smaller to try.
        if self.probe.is_some_and(|p| p.size >= size && p.size > BASE) {
            self.probe = None;
        }
        if size <= self.confirmed {
            self.confirmed = BASE;
            self.doubtful = false;
        }
        self.refused = size.max(BASE + 1);
        self.idle_until = None;
    }

    fn failed(&mut self, size: u16) {
        self.probe = None;
        if size <= self.confirmed {
            // A black hole: the confirmed size does not pass any more.
            *self = PathMtu {
                base_unsure: true,
                ..self.moved(self.overhead == 48)
            };
        } else {
            self.refused = size;
            self.doubtful = self.confirmed > BASE;
        }
    }

    /// Returns the next size of the search, or `None` when it is over.
    fn candidate(&self) -> Option<u16> {
        if self.base_unsure {
            return Some(BASE);
        }
        let open = |size: &u16| *size > self.confirmed && *size < self.refused;
        let common = COMMON.iter().map(|mtu| (mtu - self.overhead).min(MAX - 1));
        // Upwards: Ethernet's size first, since most paths have it, then from the confirmed size
        // on.
        let ethernet = 1500 - self.overhead;
        let next = if open(&ethernet) && self.confirmed == BASE {
            Some(ethernet)
        } else if self.confirmed < ethernet {
            common.rev().find(open)
        } else {
            common.into_iter().find(open)
        };
        next.or_else(|| {
            let middle = self.confirmed + (self.refused - self.confirmed) / 2;
            (self.refused - self.confirmed > GRANULARITY && middle > self.confirmed)
                .then_some(middle)
        })
    }

    /// The search is over: confirm regularly, and rarely try larger sizes.
    fn rest(&mut self, now: Instant) -> Option<u16> {
        let raise_at = *self.raise_at.get_or_insert(now + RAISE_INTERVAL);
        if now >= raise_at {
            self.raise_at = None;
            self.refused = MAX;
            self.idle_until = None;
            return self.candidate();
        }
        match self.idle_until {
            Some(until) if now >= until => {
                self.idle_until = Some(now + CONFIRM_INTERVAL);
                Some(self.confirmed)
            }
            Some(_) => None,
            None => {
                self.idle_until = Some(now + CONFIRM_INTERVAL);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the search until `end` seconds over a path that carries `limit` bytes of UDP payload.
    fn search(path: &mut PathMtu, from: u64, end: u64, limit: usize) -> usize {
        let mut probes = 0;
        for ms in from * 1000..end * 1000 {
            let now = Instant::from_nanos(ms * 1_000_000);
            if let Some((id, size)) = path.poll(now) {
                probes += 1;
                if size <= limit {
                    path.acknowledged(id, size as u16, now);
                }
            }
        }
        probes
    }

    #[test]
    fn the_search_ends_within_the_granularity_of_the_truth() {
        for limit in [
            1232, 1233, 1300, 1392, 1440, 1452, 1464, 1472, 1473, 4068, 8973, 65_506,
        ] {
            for v6 in [false, true] {
                let mut path = PathMtu::new(v6);
                search(&mut path, 0, 120, limit);
                let found = path.size();
                assert!(
                    found <= limit && found + usize::from(GRANULARITY) >= limit,
                    "{limit}: {found}"
                );
            }
        }
    }

    #[test]
    fn segments_are_limited_once_the_search_has_refused_them() {
        let overhead = RECORD_OVERHEAD + SLICE_OVERHEAD - LAST_SAVES - SLICE4;
        let mut path = PathMtu::new(true);
        assert_eq!(
            path.segment_mtu(1444, 0, false, false),
            1444,
            "nothing is known"
        );
        search(&mut path, 0, 120, 1452);
        assert_eq!(path.segment_mtu(1444, 0, false, false), 1452 - overhead);
        assert_eq!(
            path.segment_mtu(1444, 14, false, false),
            1452 - overhead - 14
        );
        assert_eq!(path.segment_mtu(1400, 0, false, false), 1400);
        let mut path = PathMtu::new(true);
        path.too_large(1460);
        assert_eq!(
            path.segment_mtu(1444, 0, false, false),
            usize::from(BASE) - overhead,
            "the interface has refused the record"
        );
    }

    #[test]
    fn the_default_mtu_fits_a_path_of_1500_bytes_with_room_for_parity() {
        let mut path = PathMtu::new(false);
        search(&mut path, 0, 120, 1472);
        assert_eq!(path.segment_mtu(9000, 0, false, true), 1444);
        assert_eq!(path.segment_mtu(9000, 0, true, true), 1440);
        assert_eq!(path.segment_mtu(9000, 0, true, false), 1445);
    }

    #[test]
    fn ethernet_is_found_by_the_first_probe() {
        let mut path = PathMtu::new(false);
        let (id, size) = path.poll(Instant::BOOT).unwrap();
        assert_eq!(size, 1472);
        path.acknowledged(id, 1472, at(0));
        assert_eq!(path.mtu(), 1500);
    }

    #[test]
    fn a_black_hole_is_left_and_the_new_size_found() {
        let mut path = PathMtu::new(false);
        search(&mut path, 0, 60, 1472);
        assert_eq!(path.size(), 1472);
        search(&mut path, 60, 180, 1372);
        assert!((1364..=1372).contains(&path.size()), "{}", path.size());
    }

    #[test]
    fn a_black_hole_during_the_search_is_left_as_soon() {
        for shrinks_after in 3..40 {
            let mut path = PathMtu::new(false);
            search(&mut path, 0, shrinks_after, 1472);
            assert_eq!(path.size(), 1472);
            search(&mut path, shrinks_after, shrinks_after + 10, 1300);
            assert!(
                path.size() <= 1300,
                "after {shrinks_after} s: {}",
                path.size()
            );
        }
    }

    #[test]
    fn an_outage_does_not_shrink_the_path_for_long() {
        let mut path = PathMtu::new(false);
        search(&mut path, 0, 60, 1472);
        search(&mut path, 60, 120, 0);
        assert_eq!(path.size(), usize::from(BASE));
        search(&mut path, 120, 130, 1472);
        assert_eq!(path.size(), 1472);
    }

    #[test]
    fn a_wider_path_is_found_after_the_raise_timer() {
        let mut path = PathMtu::new(false);
        search(&mut path, 0, 60, 1472);
        search(&mut path, 60, 800, 8972);
        assert!(path.size() > 8900);
    }

    #[test]
    fn an_acknowledgement_for_another_probe_proves_nothing() {
        let mut path = PathMtu::new(false);
        let (id, _) = path.poll(Instant::BOOT).unwrap();
        path.acknowledged(id.wrapping_add(1), 1472, at(0));
        path.acknowledged(id, 65_000, at(0));
        assert_eq!(path.size(), usize::from(BASE));
    }

    #[test]
    fn the_round_trip_is_measured_unless_the_probe_was_repeated() {
        let after = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let mut path = PathMtu::new(false);
        let (id, size) = path.poll(after(100)).unwrap();
        let rtt = path.acknowledged(id, size as u16, after(135));
        assert_eq!(rtt, Some(Duration::from_millis(35)));
        let (id, size) = path.poll(after(200)).unwrap();
        assert_eq!(path.poll(after(1200)), Some((id, size)));
        assert_eq!(path.acknowledged(id, size as u16, after(1210)), None);
    }

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }
}

//! NAT traversal by port probing: a direct path between two ends, one of which is behind a
//! symmetric NAT, which creates a new mapping for each destination.
//!
//! The outer port of such an end is unknown, and the NAT of the other end admits only addresses to
//! which something was sent. The symmetric end therefore *punches*: it sends from [`PORTS`] sockets
//! to the outer address of the other end. Its NAT maps each socket to an outer port that admits
//! replies from that address. It then sends a *probe request* over the relay. The other end
//! *probes*: it sends a PROBE to one port after another of the requested addresses, in a random
//! order. A probe that gets through is an authenticated datagram from a direct address, which
//! [`Paths`](crate::paths::Paths) checks and takes like any other.
//!
//! [`PORTS`] of [`RANGE`] ports are open. No port is probed twice, so `k` probes hit an open port
//! with a probability of at least `1 - (1 - PORTS / RANGE)^k` (the birthday problem for two
//! groups): 98.3 % for 1,024 probes, 99.97 % for 2,048.
//!
//! This is a pure state machine for each peer, without sockets. The driver opens them on request
//! ([`Punch`]).

use crate::constants::OPENER_HOPS;
use crate::native::check::Check;
use crate::native::probe_request::{MAX_ADDRESSES, ProbeRequest};
use crate::paths::{Candidate, CandidateKind, is_private};
use crate::rng::Rng;
use crate::time::Instant;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU8;
use std::time::Duration;

/// Number of ports opened for one peer.
pub const PORTS: u16 = 256;
/// Lowest port that is probed. NATs map source ports above 1023 to outer ports above 1023 (RFC
/// 4787, section 4.2.2).
const FIRST_PORT: u16 = 1024;
/// Number of ports that can be probed.
pub const RANGE: u32 = 65_536 - FIRST_PORT as u32;
/// Maximum number of addresses that ports are opened towards, for one peer.
const MAX_DESTINATIONS: usize = 2;
/// Time with a relay in use and without a direct path after which ports are opened.
pub const AFTER: Duration = Duration::from_millis(500);
/// The same if neither end is behind a symmetric NAT, for the end with the lower key. Probably the
/// outer port of one end is used by another host behind its NAT. Probes of that end come from
/// another port, so the end with the higher key opens ports too, after twice this time.
pub(crate) const LAST_RESORT_AFTER: Duration = Duration::from_secs(20);
/// Retry interval when there is no address to punch towards, or other peers' ports are open.
const RETRY: Duration = Duration::from_secs(3);
/// Pauses after failed attempts; the last one repeats.
const PAUSES: [Duration; 3] = [
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
];
/// Interval between two punches, and between two probe requests. NATs drop unanswered mappings
/// after 30 s (Linux, `nf_conntrack_udp_timeout`), and packets may be lost.
const REPEAT: Duration = Duration::from_secs(5);
/// Time from the first punch of an attempt to the second: half the time of the other end's probes.
/// The first punch consists of openers, which do not open a second NAT further out. The second one
/// consists of datagrams that reach the other end. If the NAT there tracks them, they occupy the
/// ports that the other end's probes need
/// ([`Paths::is_behind_nat`](crate::paths::Paths::is_behind_nat)).
const OPENERS_FIRST: Duration = Duration::from_secs(2);
/// Maximum number of punches for one peer within [`WINDOW`]. Ports stay open until the last one has
/// been repeated: enough time for all probes and for the request.
const PUNCHES: u32 = 3;
/// Time to wait for a proven path once something has arrived on an open port.
const SUCCESS_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of peers with open ports at the same time.
pub(crate) const MAX_OPENING: usize = 2;
/// Maximum number of probes for one peer within [`WINDOW`].
pub const PROBES: u32 = 2048;
/// Interval between two bursts of probes, and probes per burst: 500 per second.
const TICK: Duration = Duration::from_millis(50);
const PER_TICK: u32 = 25;
/// Delay after which a stalled run of probes is abandoned.
const STALLED: Duration = Duration::from_secs(1);
/// Length of the window for [`PUNCHES`] and [`PROBES`]. For punches it starts at the last punch,
/// for probes at the start of the last run. Hence the requesting end always waits longer than the
/// probing end.
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of peers that are probed for at the same time.
pub(crate) const MAX_PROBING: usize = 4;

/// Mapping behaviour of the NAT in front of this host, for one address family (RFC 4787, section
/// 4.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mapping {
    /// Not known yet.
    #[default]
    Unknown,
    /// The mapping is the same for all destinations, as far as is known, or there is no NAT.
    EndpointIndependent,
    /// A new mapping for each destination, at these outer addresses. At most [`MAX_ADDRESSES`] are
    /// used.
    AddressAndPortDependent(Vec<IpAddr>),
}

/// Mapping behaviour of the NATs in front of this host, by address family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NatMappings {
    /// IPv4.
    pub v4: Mapping,
    /// IPv6.
    pub v6: Mapping,
    /// Public IPv4 addresses at which this host is seen, if its mapping is endpoint-independent.
    pub outer: Vec<IpAddr>,
}

impl NatMappings {
    /// Whether no NAT is in front of this host for IPv4.
    pub fn is_open4(&self) -> bool {
        self.v4 == Mapping::EndpointIndependent && self.outer.is_empty()
    }

    fn of(&self, ip: IpAddr) -> &Mapping {
        match ip {
            IpAddr::V4(_) => &self.v4,
            IpAddr::V6(_) => &self.v6,
        }
    }

    /// Whether the NAT of either family is symmetric.
    pub fn is_symmetric(&self) -> bool {
        let symmetric = |mapping| matches!(mapping, &Mapping::AddressAndPortDependent(_));
        symmetric(&self.v4) || symmetric(&self.v6)
    }
}

/// An instruction to the driver: send one datagram from each of [`PORTS`] sockets, and open them
/// first if they are not open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Punch {
    /// The peer to punch for.
    pub peer: crate::indices::PeerId,
    /// One or two addresses; the sockets are divided between them.
    pub destinations: Vec<SocketAddr>,
    /// Hop limit of the datagrams; `None`: the kernel's default.
    pub hop_limit: Option<NonZeroU8>,
}

/// Stage of the attempt at the symmetric end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No ports are open.
    Idle,
    /// This many ports are open. Zero until the driver has reported.
    Open {
        ports: u16,
        until: Instant,
        again: Instant,
    },
    /// A datagram arrived on an open port.
    Succeeded { until: Instant },
}

/// The addresses between which a port is searched, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SearchAddresses {
    /// Addresses that ports are opened towards.
    destinations: Vec<SocketAddr>,
    /// Outer addresses of this host.
    own_addresses: Vec<IpAddr>,
}

/// Stage of the attempt, for status reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PunchState {
    /// No ports are open. Holds the time of the next attempt, provided that nothing changes and
    /// packets are sent.
    Idle(Option<Instant>),
    /// This many ports are open.
    Open(u16),
    /// A datagram arrived on an open port.
    Succeeded,
}

/// An action that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Have the driver punch towards these addresses, with this hop limit.
    Punch(Vec<SocketAddr>, Option<NonZeroU8>),
    /// Send this request over the path in use.
    Request(ProbeRequest),
    /// Send this probe to each of these addresses.
    Probe(Check, Vec<SocketAddr>),
}

/// Input of [`Birthday::due`].
pub(crate) struct Context<'a> {
    /// Whether a relay is in use.
    pub relayed: bool,
    /// Whether packets were sent lately.
    pub active: bool,
    /// All candidates of the peer.
    pub candidates: &'a [Candidate],
    /// Mapping behaviour of this host's NATs.
    pub nat_mappings: &'a NatMappings,
    /// Time after which ports are opened here although this host's NATs are not symmetric.
    pub last_resort: Option<Duration>,
    /// Number of other peers with open ports.
    pub opening_peers: usize,
    /// Number of other peers that are probed for.
    pub probing_peers: usize,
}

impl Context<'_> {
    /// Public addresses that the peer signalled; server-reflexive ones come first.
    fn signalled(&self) -> impl Iterator<Item = SocketAddr> {
        let signalled = self
            .candidates
            .iter()
            .filter(|c| c.kind == CandidateKind::Signalled);
        signalled
            .map(|c| c.address)
            .filter(|address| !is_private(address.ip()))
    }

    /// Addresses to punch towards: one for each address of the peer, in the families with a
    /// symmetric NAT. A peer with the same outer address as this host is behind the same NAT and is
    /// left out.
    fn destinations(&self) -> Vec<SocketAddr> {
        let mut destinations: Vec<SocketAddr> = Vec::new();
        for address in self.signalled() {
            let ip = address.ip();
            let same = |known: &SocketAddr| known.ip() == ip;
            let of_use = match self.nat_mappings.of(ip) {
                Mapping::AddressAndPortDependent(own) => !own.contains(&ip),
                Mapping::EndpointIndependent => {
                    self.last_resort.is_some()
                        && ip.is_ipv4()
                        && !self.nat_mappings.outer.contains(&ip)
                }
                Mapping::Unknown => false,
            };
            if of_use && destinations.len() < MAX_DESTINATIONS && !destinations.iter().any(same) {
                destinations.push(address);
            }
        }
        destinations
    }

    fn search_addresses(&self) -> SearchAddresses {
        let mut destinations = self.destinations();
        let mut own_addresses = self.own_addresses(&destinations);
        destinations.sort_unstable();
        own_addresses.sort_unstable();
        SearchAddresses {
            destinations,
            own_addresses,
        }
    }

    /// Outer addresses of this host, in the families of `destinations`.
    fn own_addresses(&self, destinations: &[SocketAddr]) -> Vec<IpAddr> {
        let mut seen = Vec::new();
        for v6 in [false, true] {
            let first = destinations.iter().find(|to| to.is_ipv6() == v6);
            let own = match first.map(|to| self.nat_mappings.of(to.ip())) {
                Some(Mapping::AddressAndPortDependent(own)) => own,
                Some(Mapping::EndpointIndependent) => &self.nat_mappings.outer,
                Some(Mapping::Unknown) | None => continue,
            };
            seen.extend(own.iter().take(MAX_ADDRESSES));
        }
        seen
    }

    /// The subset of `addresses` that may be probed: those that the peer signalled, in families
    /// where this host's NAT keeps the outer port that the peer has opened its ports towards.
    fn probe_targets(&self, addresses: &[IpAddr]) -> Vec<IpAddr> {
        let signalled = |ip: &IpAddr| self.signalled().any(|signalled| signalled.ip() == *ip);
        let endpoint_independent =
            |ip: &IpAddr| *self.nat_mappings.of(*ip) == Mapping::EndpointIndependent;
        let mut all: Vec<IpAddr> = Vec::new();
        for ip in addresses {
            if signalled(ip) && endpoint_independent(ip) && !all.contains(ip) {
                all.push(*ip);
            }
        }
        all
    }
}

/// Ports in pseudo-random order, by a linear congruential generator of period 2^16 (Hull and
/// Dobell, 1962). Each port occurs once.
#[derive(Clone, Debug)]
struct Ports {
    state: u16,
    factor: u16,
    step: u16,
}

impl Ports {
    fn random(rng: &mut dyn Rng) -> Ports {
        let mut bytes = [0; 6];
        rng.fill(&mut bytes);
        let [a, b, c, d, e, f] = bytes;
        Ports {
            state: u16::from_le_bytes([a, b]),
            // The factor is one more than a multiple of four, the step is odd.
            factor: u16::from_le_bytes([c, d]) & !3 | 1,
            step: u16::from_le_bytes([e, f]) | 1,
        }
    }

    fn next(&mut self) -> u16 {
        loop {
            let factor = self.factor;
            self.state = self.state.wrapping_mul(factor).wrapping_add(self.step);
            if self.state >= FIRST_PORT {
                return self.state;
            }
        }
    }
}

/// A run of probes.
#[derive(Clone, Debug)]
struct PortProbing {
    targets: Vec<IpAddr>,
    ports: Ports,
    /// Addresses still to probe at the current port.
    rest: Vec<SocketAddr>,
    next: Instant,
    /// End of the run if it never stalls.
    until: Instant,
}

impl PortProbing {
    /// A run of `probes` probes. A run that stalls ends early: probes sent later would fall into
    /// the next window and exceed its limit.
    fn new(targets: Vec<IpAddr>, probes: u32, now: Instant, rng: &mut dyn Rng) -> PortProbing {
        PortProbing {
            targets,
            ports: Ports::random(rng),
            rest: Vec::new(),
            next: now,
            until: now + TICK * probes.div_ceil(PER_TICK),
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.until.min(self.next + STALLED)
    }

    fn burst(&mut self, probes: u32) -> Vec<SocketAddr> {
        (0..probes).filter_map(|_| self.probe()).collect()
    }

    fn probe(&mut self) -> Option<SocketAddr> {
        if self.rest.is_empty() {
            let port = self.ports.next();
            let targets = self.targets.iter();
            self.rest
                .extend(targets.map(|ip| SocketAddr::new(*ip, port)));
        }
        self.rest.pop()
    }
}

/// Maximum use of a resource for one peer within [`WINDOW`], whatever the peer signals or requests.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    whole: u32,
    left: u32,
    /// When the full amount is available again.
    renews_at: Instant,
}

impl Allowance {
    fn new(whole: u32) -> Allowance {
        Allowance {
            whole,
            left: whole,
            renews_at: Instant::BOOT,
        }
    }

    fn left(&self, now: Instant) -> u32 {
        if now < self.renews_at {
            self.left
        } else {
            self.whole
        }
    }

    /// Opens a new window.
    fn begin(&mut self, now: Instant) {
        self.left = self.left(now);
        self.renews_at = now + WINDOW;
    }

    /// Takes up to `wanted` of the remaining amount, and returns the amount taken.
    fn take(&mut self, wanted: u32) -> u32 {
        let taken = wanted.min(self.left);
        self.left -= taken;
        taken
    }
}

/// The state of port probing with one peer, at either end.
#[derive(Clone, Debug)]
pub struct Birthday {
    /// Since when a relay is in use.
    relayed_since: Option<Instant>,
    /// Time with a relay in use before ports are opened.
    delay: Duration,
    /// The peer has requested probes so early that its NAT is symmetric.
    peer_opens: bool,
    stage: Stage,
    /// Addresses of the latest attempt.
    search_addresses: SearchAddresses,
    /// The NAT of either end has changed since the last call of [`Self::due`].
    nat_changed: bool,
    /// Time of the next attempt.
    next: Option<Instant>,
    /// Failed attempts since the last success.
    failed_attempts: usize,
    /// Remaining [`PUNCHES`].
    punches: Allowance,
    /// Ports were opened, and the probe request has not been sent yet.
    request_due: bool,
    /// Both ends are behind symmetric NATs.
    both_symmetric: bool,
    /// The last request from the peer, until it is processed.
    received_request: Option<ProbeRequest>,
    /// The last request and its time, if some of its addresses may not be probed yet. That may
    /// change soon.
    unserved: Option<(ProbeRequest, Instant)>,
    probing: Option<PortProbing>,
    /// Remaining [`PROBES`].
    allowed: Allowance,
    /// The probe of the latest run.
    probe: Option<Check>,
    probes: u64,
}

impl Default for Birthday {
    fn default() -> Birthday {
        Birthday {
            relayed_since: None,
            delay: AFTER,
            peer_opens: false,
            stage: Stage::Idle,
            search_addresses: SearchAddresses::default(),
            nat_changed: false,
            next: None,
            failed_attempts: 0,
            punches: Allowance::new(PUNCHES),
            request_due: false,
            both_symmetric: false,
            received_request: None,
            unserved: None,
            probing: None,
            allowed: Allowance::new(PROBES),
            probe: None,
            probes: 0,
        }
    }
}

/// Status.
impl Birthday {
    /// The stage of this end's attempt.
    pub fn punch_state(&self) -> PunchState {
        match self.stage {
            Stage::Idle => PunchState::Idle(self.next),
            Stage::Open { ports, .. } => PunchState::Open(ports),
            Stage::Succeeded { .. } => PunchState::Succeeded,
        }
    }

    /// Failed attempts since the last success, or since this host's NAT changed.
    pub fn failed_attempts(&self) -> usize {
        self.failed_attempts
    }

    /// Whether both ends are behind symmetric NATs, so that neither can probe.
    pub fn is_both_symmetric(&self) -> bool {
        self.both_symmetric
    }

    /// Number of probes sent for this peer.
    pub fn probes(&self) -> u64 {
        self.probes
    }

    /// Whether probes are being sent for this peer.
    pub fn is_probing(&self, now: Instant) -> bool {
        let goes_on = |probing: &PortProbing| !probing.is_over(now);
        self.probing.as_ref().is_some_and(goes_on)
    }

    /// Whether `check` is a probe of the latest run.
    pub(crate) fn is_port_probe(&self, check: Check) -> bool {
        self.probe == Some(check)
    }

    /// Whether this peer's ports must be open.
    pub(crate) fn is_open(&self, now: Instant) -> bool {
        matches!(self.stage, Stage::Open { until, .. } if now < until)
    }
}

/// Events.
impl Birthday {
    /// Handles a probe request from the peer.
    pub(crate) fn on_request(&mut self, request: ProbeRequest) {
        self.received_request = Some(request);
    }

    /// The driver has punched from this many sockets. Zero: it could open none.
    pub(crate) fn on_punched(&mut self, opened: u16, now: Instant) {
        let Stage::Open { ports, .. } = &mut self.stage else {
            return;
        };
        *ports = opened;
        match opened {
            0 => self.fail(now),
            _ => self.request_due = true,
        }
    }

    /// This many probes were sent. None are sent without a session.
    pub(crate) fn on_probed(&mut self, probes: usize) {
        self.probes += probes as u64;
    }

    /// An authenticated datagram arrived on an open port.
    pub(crate) fn on_punch_succeeded(&mut self, now: Instant) {
        if matches!(self.stage, Stage::Open { .. }) {
            let until = now + SUCCESS_TIMEOUT;
            self.stage = Stage::Succeeded { until };
        }
    }

    /// The NAT of either end has changed, so an attempt that was hopeless may succeed now.
    pub(crate) fn on_nat_change(&mut self, now: Instant) {
        self.both_symmetric = false;
        self.failed_attempts = 0;
        self.nat_changed = true;
        // If an attempt between the same addresses is running, its end sets the next time.
        self.next = self.relayed_since.map(|_| self.soon(now));
    }

    /// Time of the next attempt after a change. A short earlier attempt leaves punches for it, and
    /// probes at the other end.
    fn soon(&self, now: Instant) -> Instant {
        let soon = now + self.delay;
        match self.punches.left(now) {
            0 => soon.max(self.punches.renews_at),
            _ => soon,
        }
    }

    /// Restarts an attempt that ran between other addresses. It does not count as failed.
    fn restart(&mut self, now: Instant) {
        self.stage = Stage::Idle;
        self.next = Some(self.soon(now));
    }

    fn fail(&mut self, now: Instant) {
        self.stage = Stage::Idle;
        let pause = if self.both_symmetric {
            PAUSES.len() - 1
        } else {
            self.failed_attempts.min(PAUSES.len() - 1)
        };
        self.failed_attempts += 1;
        self.next = Some(now + PAUSES[pause]);
    }
}

/// Timers.
impl Birthday {
    /// When [`Self::due`] has work to do. Ports are opened only at an end that `opens` them, and only
    /// until `active_until`, while packets are sent.
    pub(crate) fn next_wakeup(&self, opens: bool, active_until: Instant) -> Option<Instant> {
        let at_once = (self.request_due || self.received_request.is_some() || self.nat_changed)
            .then_some(Instant::BOOT);
        let stage = match self.stage {
            Stage::Idle => self.next.filter(|next| opens && *next < active_until),
            Stage::Open { until, again, .. } => Some(until.min(again)),
            Stage::Succeeded { until } => Some(until),
        };
        let probing = self.probing.as_ref().map(|probing| probing.next);
        at_once.into_iter().chain(stage).chain(probing).min()
    }

    /// Returns the actions that are due.
    pub(crate) fn due(
        &mut self,
        context: &Context<'_>,
        now: Instant,
        rng: &mut dyn Rng,
    ) -> Vec<Due> {
        let mut due = Vec::new();
        if !context.relayed {
            *self = Birthday {
                punches: self.punches,
                allowed: self.allowed,
                probe: self.probe,
                probes: self.probes,
                ..Birthday::default()
            };
            return due;
        }
        let delay = context.last_resort.unwrap_or(AFTER);
        if std::mem::replace(&mut self.delay, delay) != delay && self.relayed_since.is_some() {
            self.next = Some(self.soon(now));
        }
        if self.relayed_since.is_none() {
            self.relayed_since = Some(now);
            self.next = Some(self.soon(now));
        }
        let nat_changed = std::mem::take(&mut self.nat_changed);
        // A run that is over must not keep another peer's from starting.
        self.probing.take_if(|probing| probing.is_over(now));
        let received = self.received_request.take().map(|request| (request, now));
        let earlier = self.unserved.take_if(|_| nat_changed || received.is_some());
        // An older request will be repeated by the peer.
        let earlier = earlier.filter(|(_, at)| now < *at + REPEAT);
        if let Some((request, at)) = received.or(earlier) {
            due.extend(self.answer(request, at, context, now, rng));
        }
        let punch = self.open(context, now);
        if std::mem::take(&mut self.request_due)
            && let Stage::Open { ports, .. } = self.stage
        {
            let addresses = self.search_addresses.own_addresses.clone();
            due.push(Due::Request(ProbeRequest { ports, addresses }));
        }
        due.extend(punch);
        if let Some(probing) = self.probing.as_mut().filter(|probing| probing.next <= now)
            && let Some(probe) = self.probe
        {
            let burst = probing.burst(self.allowed.take(PER_TICK));
            // Probes missed during a sleep are not sent later.
            probing.next = now + TICK;
            self.probing.take_if(|_| self.allowed.left == 0);
            due.push(Due::Probe(probe, burst));
        }
        due
    }

    /// Advances the stage. Returns the punch that is due.
    fn open(&mut self, context: &Context<'_>, now: Instant) -> Option<Due> {
        match &mut self.stage {
            // Ports opened for other addresses are of no use, however long they would stay open. A
            // datagram that arrived may still lead to a path.
            Stage::Open { .. } if self.search_addresses != context.search_addresses() => {
                self.restart(now);
                None
            }
            Stage::Succeeded { until }
                if *until <= now && self.search_addresses != context.search_addresses() =>
            {
                self.restart(now);
                None
            }
            Stage::Open { until, .. } | Stage::Succeeded { until } if *until <= now => {
                self.fail(now);
                None
            }
            Stage::Open { again, until, .. } if *again <= now && self.punches.left(now) == 0 => {
                *again = *until;
                None
            }
            Stage::Open { again, .. } if *again <= now => {
                *again = now + REPEAT;
                self.punches.begin(now);
                self.punches.take(1);
                Some(Due::Punch(self.search_addresses.destinations.clone(), None))
            }
            Stage::Idle if self.next.is_some_and(|next| next <= now) => {
                self.search_addresses = context.search_addresses();
                if self.search_addresses.destinations.is_empty()
                    || (context.last_resort.is_some() && self.peer_opens)
                    || !context.active
                    || context.opening_peers >= MAX_OPENING
                {
                    self.next = Some(now + RETRY);
                    return None;
                }
                self.stage = Stage::Open {
                    ports: 0,
                    until: now + REPEAT * self.punches.left(now),
                    again: now + OPENERS_FIRST,
                };
                self.punches.begin(now);
                self.punches.take(1);
                let destinations = self.search_addresses.destinations.clone();
                Some(Due::Punch(destinations, Some(OPENER_HOPS)))
            }
            _ => None,
        }
    }

    /// Handles a request that arrived at `at`. Returns the answer if probing is hopeless.
    fn answer(
        &mut self,
        request: ProbeRequest,
        at: Instant,
        context: &Context<'_>,
        now: Instant,
        rng: &mut dyn Rng,
    ) -> Option<Due> {
        let symmetric = |ip: &IpAddr| {
            matches!(
                context.nat_mappings.of(*ip),
                Mapping::AddressAndPortDependent(_)
            )
        };
        let is_early = |since| now.duration_since(since) < LAST_RESORT_AFTER / 2;
        self.peer_opens |= request.ports > 0 && self.relayed_since.is_some_and(is_early);
        let targets = context.probe_targets(&request.addresses);
        let both = targets.is_empty() && request.addresses.iter().any(symmetric);
        if request.ports == 0 || both {
            self.both_symmetric = true;
            if matches!(self.stage, Stage::Open { .. }) {
                self.fail(now);
            }
            self.next = self
                .next
                .map(|next| next.max(now + PAUSES[PAUSES.len() - 1]));
            let none = ProbeRequest {
                ports: 0,
                addresses: Vec::new(),
            };
            return both.then_some(Due::Request(none));
        }
        if request.addresses.iter().any(|ip| !targets.contains(ip)) {
            self.unserved = Some((request, at));
        }
        if let Some(probing) = &mut self.probing {
            // The rest of the run uses the current addresses of the peer.
            if !targets.is_empty() && probing.targets != targets {
                probing.targets = targets;
                probing.ports = Ports::random(rng);
                probing.rest.clear();
            }
            return None;
        }
        let busy = context.probing_peers >= MAX_PROBING;
        if !targets.is_empty() && !busy && self.allowed.left(now) > 0 {
            self.allowed.begin(now);
            self.probe = Some(Check::least(rng));
            self.probing = Some(PortProbing::new(targets, self.allowed.left, now, rng));
        }
        None
    }
}

#[cfg(test)]
mod tests;

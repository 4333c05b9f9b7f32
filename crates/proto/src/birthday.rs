//! A direct way between two ends of which one is behind a NAT that maps anew for each destination: symmetric.
//!
//! Nobody knows by which port such an end comes, and the NAT before the other lets in only whom something was sent to. So the
//! symmetric end *opens* ports: it sends from [`PORTS`] sockets to the address as which the other is seen, and its NAT maps each to an outer
//! port that lets that address in. By the relay it *asks* the other to *spray*: to send a PROBE to one port after the other, in an
//! order drawn for it, of the addresses as which the first is seen. What gets through is an authentic datagram from a direct address,
//! which [`Paths`](crate::paths::Paths) has checked, and takes, as any other.
//!
//! Of [`RANGE`] ports [`PORTS`] are open. As no port is tried twice, `k` probes meet one with a probability of at least
//! `1 - (1 - PORTS / RANGE)^k` (the birthday problem with two kinds of people): 98.3 % of 1,024, 99.97 % of 2,048.
//!
//! A pure state machine for each peer, without sockets: its driver opens them when it is told to [`Punch`].

use crate::paths::{Candidate, CandidateKind, Check};
use crate::rng::Rng;
use crate::time::Instant;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Ports that are opened for one peer.
pub const PORTS: u16 = 256;
/// The least port that is tried: NATs map what is sent from ports above 1023 to such ones (RFC 4787, section 4.2.2).
const FIRST_PORT: u16 = 1024;
/// Ports that there are to try.
pub const RANGE: u32 = 65_536 - FIRST_PORT as u32;
/// Addresses of one family in one asking, at most.
pub const MAX_ADDRESSES: usize = 2;
/// Addresses that ports are opened towards for one peer, at most.
const MAX_DESTINATIONS: usize = 2;
/// How long a relay was in use, and nothing direct was proven, before ports are opened.
pub const AFTER: Duration = Duration::from_millis(500);
/// When it is time, but there is nowhere to open ports towards, or others' are open: how long until that is looked at again.
const RETRY: Duration = Duration::from_secs(3);
/// From the end of an attempt that met nothing to the next; the last counts for all that follow.
const PAUSES: [Duration; 3] = [
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
];
/// How often is sent from open ports, and asked again: NATs forget what was not answered after 30 s (Linux,
/// `nf_conntrack_udp_timeout`), and something may be lost.
const REPEAT: Duration = Duration::from_secs(5);
/// Knocks at one peer within [`WINDOW`]. Ports are open until the last was repeated: what a spray takes, and some time for the asking.
const PUNCHES: u32 = 3;
/// How long a way is waited for once something came in by a port.
const SUCCESS_TIMEOUT: Duration = Duration::from_secs(5);
/// Peers that ports are open for at a time, at most.
pub(crate) const MAX_OPENING: usize = 2;
/// Probes for one peer within [`WINDOW`], in one spray unless that met a port before.
pub const PROBES: u32 = 2048;
/// Between two bursts of a spray, and the probes of each: 500 a second.
const TICK: Duration = Duration::from_millis(50);
const PER_TICK: u32 = 25;
/// A spray that is so late does not go on.
const STALLED: Duration = Duration::from_secs(1);
/// From the latest knock, and from the beginning of the latest spray, until all that is allowed for the peer is so anew. The end that
/// asks waits longer by that than the one that is asked.
const WINDOW: Duration = Duration::from_secs(60);
/// Peers that are sprayed for at a time, at most.
pub(crate) const MAX_PROBING: usize = 4;

/// How the NAT before this host maps, for one family of addresses (RFC 4787, section 4.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mapping {
    /// Nobody has told.
    #[default]
    Unknown,
    /// Alike for all destinations, as far as is known; or there is no NAT.
    EndpointIndependent,
    /// Anew for each destination, to ports of these addresses: [`MAX_ADDRESSES`] at most are used.
    AddressAndPortDependent(Vec<IpAddr>),
}

/// What is before this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NatMappings {
    /// For IPv4.
    pub v4: Mapping,
    /// For IPv6.
    pub v6: Mapping,
}

impl NatMappings {
    fn of(&self, ip: IpAddr) -> &Mapping {
        match ip {
            IpAddr::V4(_) => &self.v4,
            IpAddr::V6(_) => &self.v6,
        }
    }

    /// Whether it maps anew for each destination in any family.
    pub fn is_symmetric(&self) -> bool {
        let symmetric = |mapping| matches!(mapping, &Mapping::AddressAndPortDependent(_));
        symmetric(&self.v4) || symmetric(&self.v6)
    }
}

/// What a symmetric end asks of the other: the PORTS frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRequest {
    /// How many ports are open; 0 says that the one that was asked is behind a symmetric NAT itself, and sends nothing.
    pub ports: u16,
    /// At which addresses: [`MAX_ADDRESSES`] of each family at most.
    pub addresses: Vec<IpAddr>,
}

impl ProbeRequest {
    /// Bytes of the number of ports, and of each address.
    pub const PORTS_LEN: usize = 2;
    /// IPv4 as an IPv4-mapped address (RFC 4291, section 2.5.5.2).
    pub const ADDRESS_LEN: usize = 16;

    /// Reads a frame's body; bytes behind the last whole address, and addresses beyond the bound, are passed over. `None` if it is too
    /// short.
    pub fn read(body: &[u8]) -> Option<ProbeRequest> {
        let (ports, addresses) = body.split_first_chunk()?;
        let (addresses, _) = addresses.as_chunks::<{ ProbeRequest::ADDRESS_LEN }>();
        let addresses = addresses.iter().take(2 * MAX_ADDRESSES);
        Some(ProbeRequest {
            ports: u16::from_le_bytes(*ports),
            addresses: addresses
                .map(|bytes| Ipv6Addr::from(*bytes).to_canonical())
                .collect(),
        })
    }

    /// Bytes of a frame's body.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        ProbeRequest::PORTS_LEN + self.addresses.len() * ProbeRequest::ADDRESS_LEN
    }

    /// A frame's body.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mapped = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        let addresses = self.addresses.iter().flat_map(mapped);
        self.ports
            .to_le_bytes()
            .into_iter()
            .chain(addresses)
            .collect()
    }
}

/// Addresses that mean something on some networks only (RFC 1918, RFC 6598, RFC 4193): nobody is seen as one of them from everywhere.
pub fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || (ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// What the driver is to do: send something from [`PORTS`] sockets to these, and open them before if they are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Punch {
    /// For whom.
    pub peer: crate::indices::PeerId,
    /// The sockets are shared out among these; one or two.
    pub destinations: Vec<SocketAddr>,
}

/// Where the symmetric end stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing is open.
    Idle,
    /// So many ports are, or none yet.
    Open {
        ports: u16,
        until: Instant,
        again: Instant,
    },
    /// Something came in by one of them.
    Succeeded { until: Instant },
}

/// Between which addresses a port is searched for, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SearchAddresses {
    /// Where ports are opened towards.
    destinations: Vec<SocketAddr>,
    /// As what this host is seen there.
    own_addresses: Vec<IpAddr>,
}

/// Where it stands, for others to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PunchState {
    /// Nothing is open; when it will be if nothing changes and something is sent.
    Idle(Option<Instant>),
    /// So many ports are.
    Open(u16),
    /// Something came in by one of them.
    Succeeded,
}

/// What is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Have the driver knock.
    Punch(Vec<SocketAddr>),
    /// Send this, by the way in use.
    Request(ProbeRequest),
    /// Send this probe to each of these.
    Probe(Check, Vec<SocketAddr>),
}

/// What is known when it is asked what is due.
pub(crate) struct Context<'a> {
    /// A relay is in use.
    pub relayed: bool,
    /// Packets were sent lately.
    pub active: bool,
    /// All ways to the peer.
    pub candidates: &'a [Candidate],
    /// What is before this host.
    pub nat_mappings: &'a NatMappings,
    /// Other peers that ports are open for, and that are sprayed for.
    pub opening_peers: usize,
    /// Likewise.
    pub probing_peers: usize,
}

impl Context<'_> {
    /// Addresses as which the peer may be seen from everywhere, as it told its coordinator: what it was seen as comes first.
    fn signalled(&self) -> impl Iterator<Item = SocketAddr> {
        let signalled = self
            .candidates
            .iter()
            .filter(|c| c.kind == CandidateKind::Signalled);
        signalled
            .map(|c| c.address)
            .filter(|address| !is_private(address.ip()))
    }

    /// Where to open ports towards: one for each address of the peer, in families that need it. Who is seen as the same address as
    /// this host is behind the same NAT.
    fn destinations(&self) -> Vec<SocketAddr> {
        let mut destinations: Vec<SocketAddr> = Vec::new();
        for address in self.signalled() {
            let ip = address.ip();
            let same = |known: &SocketAddr| known.ip() == ip;
            let of_use = matches!(self.nat_mappings.of(ip), Mapping::AddressAndPortDependent(own) if !own.contains(&ip));
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

    /// As what this host is seen there.
    fn own_addresses(&self, destinations: &[SocketAddr]) -> Vec<IpAddr> {
        let mut seen = Vec::new();
        for v6 in [false, true] {
            let first = destinations.iter().find(|to| to.is_ipv6() == v6);
            if let Some(Mapping::AddressAndPortDependent(own)) =
                first.map(|to| self.nat_mappings.of(to.ip()))
            {
                seen.extend(own.iter().take(MAX_ADDRESSES));
            }
        }
        seen
    }

    /// What of these addresses may be sprayed: what the peer has told its coordinator, where this end's NAT has the port that the peer
    /// has opened its own towards.
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

/// Ports in an order drawn by a linear congruential generator with the period 2^16 (Hull and Dobell, 1962): each comes once.
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
            // One more than a multiple of four, and an odd one.
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

/// Probes that are being sent.
#[derive(Clone, Debug)]
struct PortProbing {
    targets: Vec<IpAddr>,
    ports: Ports,
    /// To be tried before the next port is drawn.
    rest: Vec<SocketAddr>,
    next: Instant,
    /// When it would be over, had it never been late.
    until: Instant,
}

impl PortProbing {
    /// Of so many probes. One that lags ends without some of them: made up for late, they would be sent in the same minute as
    /// those that are allowed anew.
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

/// What may be sent for one peer, whatever it tells or asks, within [`WINDOW`].
#[derive(Clone, Copy, Debug)]
struct Allowance {
    whole: u32,
    left: u32,
    /// When it is whole again.
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
        match now < self.renews_at {
            true => self.left,
            false => self.whole,
        }
    }

    /// Something of it is used from now on.
    fn begin(&mut self, now: Instant) {
        self.left = self.left(now);
        self.renews_at = now + WINDOW;
    }

    /// So much of `wanted` as is left.
    fn take(&mut self, wanted: u32) -> u32 {
        let taken = wanted.min(self.left);
        self.left -= taken;
        taken
    }
}

/// What there is with one peer, at either end.
#[derive(Clone, Debug)]
pub struct Birthday {
    /// A relay is in use since.
    relayed_since: Option<Instant>,
    stage: Stage,
    /// Of the latest attempt.
    search_addresses: SearchAddresses,
    /// What is before either end is different, which is to be looked at.
    nat_changed: bool,
    /// When to open next.
    next: Option<Instant>,
    /// Attempts that met nothing since something did.
    failed_attempts: usize,
    /// Of [`PUNCHES`].
    punches: Allowance,
    /// Ports were opened: the peer is to be asked.
    request_due: bool,
    /// The peer is behind a symmetric NAT, too.
    both_symmetric: bool,
    /// What the peer asked, until it is looked at.
    received_request: Option<ProbeRequest>,
    /// What the peer asked last, and when, if it was not known that all of it may be sprayed: that may be known soon.
    unserved: Option<(ProbeRequest, Instant)>,
    probing: Option<PortProbing>,
    /// Of [`PROBES`].
    allowed: Allowance,
    /// What is sprayed, or was.
    probe: Option<Check>,
    probes: u64,
}

impl Default for Birthday {
    fn default() -> Birthday {
        Birthday {
            relayed_since: None,
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

/// How it stands.
impl Birthday {
    /// With this end's ports.
    pub fn punch_state(&self) -> PunchState {
        match self.stage {
            Stage::Idle => PunchState::Idle(self.next),
            Stage::Open { ports, .. } => PunchState::Open(ports),
            Stage::Succeeded { .. } => PunchState::Succeeded,
        }
    }

    /// Attempts that met nothing since something did, or since what is before this host changed.
    pub fn failed_attempts(&self) -> usize {
        self.failed_attempts
    }

    /// Whether both ends are behind symmetric NATs: neither can spray.
    pub fn is_both_symmetric(&self) -> bool {
        self.both_symmetric
    }

    /// Probes that were sprayed for the peer.
    pub fn probes(&self) -> u64 {
        self.probes
    }

    /// Whether they are being sprayed.
    pub fn is_probing(&self, now: Instant) -> bool {
        let goes_on = |probing: &PortProbing| !probing.is_over(now);
        self.probing.as_ref().is_some_and(goes_on)
    }

    /// Whether that is a probe of the latest spray.
    pub(crate) fn is_port_probe(&self, check: Check) -> bool {
        self.probe == Some(check)
    }

    /// Whether ports are to be open now.
    pub(crate) fn is_open(&self, now: Instant) -> bool {
        matches!(self.stage, Stage::Open { until, .. } if now < until)
    }
}

/// What happened.
impl Birthday {
    /// The peer asks.
    pub(crate) fn on_request(&mut self, request: ProbeRequest) {
        self.received_request = Some(request);
    }

    /// The driver has knocked from so many sockets; none: it could not.
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

    /// So many probes were sent: none, where there is no session.
    pub(crate) fn on_probed(&mut self, probes: usize) {
        self.probes += probes as u64;
    }

    /// Something authentic came in by one of the ports.
    pub(crate) fn on_punch_succeeded(&mut self, now: Instant) {
        if matches!(self.stage, Stage::Open { .. }) {
            let until = now + SUCCESS_TIMEOUT;
            self.stage = Stage::Succeeded { until };
        }
    }

    /// What is before either end is different: what was in vain need not be now.
    pub(crate) fn on_nat_change(&mut self, now: Instant) {
        self.both_symmetric = false;
        self.failed_attempts = 0;
        self.nat_changed = true;
        // An attempt that goes on between the same ends tells when the next one is.
        self.next = self.relayed_since.map(|_| self.soon(now));
    }

    /// The next attempt where there is a new reason for one. One that met something early has left some knocks for it, and probes at
    /// the other end.
    fn soon(&self, now: Instant) -> Instant {
        let soon = now + AFTER;
        match self.punches.left(now) {
            0 => soon.max(self.punches.renews_at),
            _ => soon,
        }
    }

    /// The attempt was between other ends: it is none in vain.
    fn restart(&mut self, now: Instant) {
        self.stage = Stage::Idle;
        self.next = Some(self.soon(now));
    }

    fn fail(&mut self, now: Instant) {
        self.stage = Stage::Idle;
        let pause = match self.both_symmetric {
            true => PAUSES.len() - 1,
            false => self.failed_attempts.min(PAUSES.len() - 1),
        };
        self.failed_attempts += 1;
        self.next = Some(now + PAUSES[pause]);
    }
}

/// The passing of time.
impl Birthday {
    /// When [`Self::due`] has something to say. Ports are opened before a symmetric NAT alone, and while packets are sent: until
    /// `active_until`.
    pub(crate) fn next_wakeup(&self, symmetric: bool, active_until: Instant) -> Option<Instant> {
        let at_once = (self.request_due || self.received_request.is_some() || self.nat_changed)
            .then_some(Instant::BOOT);
        let stage = match self.stage {
            Stage::Idle => self.next.filter(|next| symmetric && *next < active_until),
            Stage::Open { until, again, .. } => Some(until.min(again)),
            Stage::Succeeded { until } => Some(until),
        };
        let probing = self.probing.as_ref().map(|probing| probing.next);
        at_once.into_iter().chain(stage).chain(probing).min()
    }

    /// What is to be done now.
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
        if self.relayed_since.is_none() {
            self.relayed_since = Some(now);
            self.next = Some(self.soon(now));
        }
        let nat_changed = std::mem::take(&mut self.nat_changed);
        // Others may have begun since.
        self.probing.take_if(|probing| probing.is_over(now));
        let received = self.received_request.take().map(|request| (request, now));
        let earlier = self.unserved.take_if(|_| nat_changed || received.is_some());
        // Later than that it is asked again.
        let earlier = earlier.filter(|(_, at)| now < *at + REPEAT);
        if let Some((request, at)) = received.or(earlier) {
            due.extend(self.answer(request, at, context, now, rng));
        }
        let destinations = self.open(context, now);
        if std::mem::take(&mut self.request_due)
            && let Stage::Open { ports, .. } = self.stage
        {
            let addresses = self.search_addresses.own_addresses.clone();
            due.push(Due::Request(ProbeRequest { ports, addresses }));
        }
        due.extend(destinations.map(Due::Punch));
        if let Some(probing) = self.probing.as_mut().filter(|probing| probing.next <= now)
            && let Some(probe) = self.probe
        {
            let burst = probing.burst(self.allowed.take(PER_TICK));
            // After a sleep nothing is made up for.
            probing.next = now + TICK;
            self.probing.take_if(|_| self.allowed.left == 0);
            due.push(Due::Probe(probe, burst));
        }
        due
    }

    /// Moves from stage to stage; where to knock, if it is time.
    fn open(&mut self, context: &Context<'_>, now: Instant) -> Option<Vec<SocketAddr>> {
        match &mut self.stage {
            // What is open is of no more use, however much time it has left. What came in may still be.
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
            Stage::Open { again, .. } if *again <= now => {
                *again = now + REPEAT;
                self.punches.begin(now);
                self.punches.take(1);
                Some(self.search_addresses.destinations.clone())
            }
            Stage::Idle if self.next.is_some_and(|next| next <= now) => {
                self.search_addresses = context.search_addresses();
                if self.search_addresses.destinations.is_empty()
                    || !context.active
                    || context.opening_peers >= MAX_OPENING
                {
                    self.next = Some(now + RETRY);
                    return None;
                }
                self.stage = Stage::Open {
                    ports: 0,
                    until: now + REPEAT * self.punches.left(now),
                    again: now + REPEAT,
                };
                self.punches.begin(now);
                self.punches.take(1);
                Some(self.search_addresses.destinations.clone())
            }
            _ => None,
        }
    }

    /// What follows from what the peer has asked `at` some time: an answer, if it asks in vain for good.
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
            // What is left goes to where the peer is now.
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

//! The candidate paths to a peer: their addresses, the state of their checks, and the next check.
//!
//! A candidate is *direct* (an address of the peer's own) or *relayed* (an address of a relay that
//! forwards to the peer). One is in use: the endpoint of the peer. A *check* is a PROBE smaller than
//! any probe for the MTU. Its acknowledgement may return over any path; it proves the direction from this host to the peer, and this host chooses only that
//! direction. The other end chooses its own direction in the same way. The checks of both ends open
//! the NATs between them.
//!
//! - While a relay is in use, direct candidates are checked in rounds at growing intervals, and the
//!   first one that answers is taken. If the relay in use is to be left, other relays are checked
//!   as well.
//! - A direct path stays in use when something arrives over a relay, and a relay stays in use when
//!   something arrives directly: either may work in one direction only. A datagram from another
//!   direct address is followed at once, because the peer has roamed.
//! - While IPv4 is in use directly, IPv6 is checked for a few rounds and preferred if it is no
//!   slower: IPv6 has no NAT that could drop the mapping.
//! - If nothing has returned [`PATIENCE`] after a packet was sent, the path in use is checked. At
//!   [`SILENCE`] it counts as lost, and all others are tried. If the kernel refuses to send over it,
//!   before and after [`REFUSAL`], it counts as lost as well, unless it refuses all other paths too.
//!
//! This is a pure state machine without I/O. For a peer with a single address it keeps no state and
//! sends nothing.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::constants::MAX_CANDIDATES;
use crate::native::check::Check;
use crate::proxied;
use crate::rng::Rng;
use crate::time::Instant;
use crate::token_bucket::TokenBucket;

/// Maximum number of relays for one peer.
pub const MAX_RELAYS: usize = 8;
/// Time from an unanswered packet to the first check of the path in use.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Interval between two such checks.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Time from an unanswered packet until the path in use counts as lost.
pub const SILENCE: Duration = Duration::from_secs(3);
/// Time after which the path in use is checked if the kernel refuses to send over it. An address or a
/// route that is being replaced is gone for a moment.
pub const REFUSAL: Duration = Duration::from_millis(200);
/// Maximum number of outstanding checks of one candidate.
const MAX_CHECKS: usize = 16;
/// Age at which an outstanding check expires.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Unknown acknowledgements after which all outstanding checks are forgotten, so that none can be
/// guessed.
const MAX_WRONG: u8 = 16;
/// Intervals between rounds of checks; the last one repeats. It is shorter than the 30 s after which
/// a NAT may drop a mapping without an answer (Linux, `nf_conntrack_udp_timeout`): a check must not
/// arrive at the NAT of a peer whose own checks no longer keep a mapping for it
/// ([`Paths::is_behind_nat`]).
const ROUNDS: [Duration; 8] = [
    Duration::from_millis(200),
    Duration::from_millis(300),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(25),
];
/// Number of rounds in which IPv6 is checked while IPv4 is in use directly.
const IPV6_ROUNDS: usize = 5;
/// Extra round-trip time that IPv6 may have and still be preferred: the minimum head start of RFC
/// 8305, section 8.
const IPV6_LAG: Duration = Duration::from_millis(10);
/// Length of a punching period: the time for which handshakes go to the NATs of a peer that does not
/// answer.
const PUNCH_FOR: Duration = Duration::from_secs(20);
/// Pause after a punching period. In a pause of both ends, their NATs forget everything that a
/// datagram at a wrong moment has left ([`Paths::is_behind_nat`]): Linux after 30 s
/// (`nf_conntrack_udp_timeout`).
const PUNCH_PAUSE: Duration = Duration::from_secs(35);
/// The longer pause. One end always makes it, the other after every second period. It has room for
/// a short pause, a period and another short pause of the other end, so that both ends soon pause
/// together, whenever each began.
const LONG_PUNCH_PAUSE: Duration =
    Duration::from_secs(2 * PUNCH_PAUSE.as_secs() + PUNCH_FOR.as_secs());
/// Time after a switch in which the initiator of the session does not follow the peer to another
/// address. The peer follows instead; without this pause both ends could follow each other forever.
const SETTLE: Duration = Duration::from_secs(1);

/// Type of a candidate (RFC 8445, section 5.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateKind {
    /// An address that the peer signalled through the coordinator.
    Signalled,
    /// The source address of an authenticated datagram.
    PeerReflexive,
    /// The address of a relay, a proxied address ([`proxied`]), or a loopback address. No other host
    /// has a loopback address, so a program on this host must be forwarding there.
    Relayed,
}

/// State of the checks of a candidate, in the direction from this host to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckState {
    /// No check was sent.
    Unchecked,
    /// A check was sent, and its answer may still arrive.
    Checking,
    /// A check was answered.
    Works {
        /// Time from the check to its acknowledgement, which may have returned over another path.
        rtt: Duration,
    },
    /// No check of the last round was answered, or nothing returned while the candidate was in use.
    Silent,
    /// The kernel refused to send there: no route, or no socket of that address family.
    NoRoute,
}

/// An address by which the peer may be reached.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The address to send to.
    pub address: SocketAddr,
    /// Its type.
    pub kind: CandidateKind,
    /// The state of its checks.
    pub state: CheckState,
    /// Outstanding checks, newest last. A round trip may take longer than the interval between
    /// checks.
    checks: Vec<Sent>,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    check: Check,
    at: Instant,
}

impl Sent {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.at) >= ANSWER_WITHIN
    }
}

/// Whether an address is local to some network (RFC 1918, RFC 6598, RFC 4193), so that no host has
/// it as its public address.
pub fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || (ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// Whether this host forwards datagrams to this address ([`CandidateKind::Relayed`]).
fn is_forwarder(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    ip.is_loopback() || proxied::id(ip).is_some()
}

/// All candidate paths to one peer, except an endpoint that was configured or learned from the
/// peer.
#[derive(Debug, Default)]
pub struct Paths {
    candidates: Vec<Candidate>,
    /// Rounds since the last restart, and the time of the next one.
    rounds: usize,
    next_round: Option<Instant>,
    /// How many rounds may begin: the peer restarts them by sending from another address.
    allowed_rounds: TokenBucket<16, 1000>,
    /// The oldest packet without an answer on the path in use.
    unanswered: Option<Unanswered>,
    /// The kernel refused the last datagram over the path in use. Datagrams that arrive do not end it:
    /// they prove nothing about the other direction.
    refusal: Option<Refusal>,
    /// The path in use counts as lost, until something arrives over it or another one is taken.
    lost: bool,
    /// An initiation went over all other paths since the path in use was lost.
    tried_without_lost: bool,
    settled_until: Option<Instant>,
    /// IPv6 was in use and was lost. It is not preferred again until the peer signals a new
    /// address.
    ipv6_lost: bool,
    /// A relay that will stop serving this peer. It stays in use until another path is proven.
    ends: Option<SocketAddr>,
    /// When something last arrived over a relay.
    by_relay: Option<Instant>,
    /// When the last call-me-maybe from the peer arrived: nothing from this host reaches it.
    last_call: Option<Instant>,
    /// Unknown acknowledgements since the checks were last forgotten.
    wrong: u8,
    /// The latest punching period since the peer was last reached.
    punching: Option<PunchWindow>,
    /// Initiations and rounds of checks to direct candidates since something last arrived over a
    /// direct path.
    direct_tries: u32,
}

/// A punching period and the pause after it.
#[derive(Clone, Copy, Debug)]
struct PunchWindow {
    /// Number of periods before it since the peer was last reached.
    number: u32,
    pause_at: Instant,
    ends_at: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Unanswered {
    since: Instant,
    ask_at: Instant,
}

/// A refusal of the kernel to send over the path in use.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    address: SocketAddr,
    step: RefusalStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RefusalStep {
    /// [`Paths::due`] has not seen it yet.
    New,
    /// The path is checked at this time.
    Waiting(Instant),
    /// The path is being checked.
    Asked,
    /// The kernel refused the check too.
    Again,
    /// The path counts as lost.
    Lost,
}

/// An action that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send this check to this address.
    Check(Check, SocketAddr),
    /// The path in use is lost: start a handshake over all other paths.
    Lost,
}

/// Result of an acknowledged check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The path in use works.
    InUse,
    /// Another candidate works but is no better than the path in use.
    Keep,
    /// Switch to this address.
    Switch(SocketAddr),
}

impl Candidate {
    fn is_direct(&self) -> bool {
        self.kind != CandidateKind::Relayed && !is_forwarder(self.address)
    }

    /// Whether this candidate replaces the relay `used` if it works. `ends` is a relay that is to
    /// be left.
    fn is_better(&self, used: SocketAddr, ends: Option<SocketAddr>) -> bool {
        self.is_direct() || (ends == Some(used) && self.address != used)
    }

    /// Whether this candidate is preferred over the direct path `used` if it works equally well.
    fn is_preferred(&self, used: SocketAddr) -> bool {
        self.is_direct()
            && self.address.is_ipv6()
            && used.is_ipv4()
            && self.state != CheckState::NoRoute
    }

    fn begin(&mut self, check: Check, now: Instant) -> Due {
        self.checks.retain(|sent| !sent.is_over(now));
        let late = |sent: &Sent| now.duration_since(sent.at) >= PATIENCE;
        if self.checks.iter().any(late) {
            self.state = CheckState::Silent;
        } else if matches!(self.state, CheckState::Unchecked | CheckState::NoRoute) {
            self.state = CheckState::Checking;
        }
        self.send(check, now)
    }

    fn send(&mut self, check: Check, now: Instant) -> Due {
        if self.checks.len() >= MAX_CHECKS {
            self.checks.remove(0);
        }
        self.checks.push(Sent { check, at: now });
        Due::Check(check, self.address)
    }
}

/// Candidates.
impl Paths {
    /// Returns all candidates. Signalled ones come first, in the peer's order.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Returns the candidates that answered a check.
    pub fn working(&self) -> impl Iterator<Item = SocketAddr> {
        let works = |c: &&Candidate| matches!(c.state, CheckState::Works { .. });
        self.candidates.iter().filter(works).map(|c| c.address)
    }

    /// Whether there are no candidates besides the endpoint.
    pub fn is_empty(&self) -> bool {
        self.candidates.is_empty()
    }

    /// Whether `address` belongs to a relay.
    pub fn is_relay(&self, address: SocketAddr) -> bool {
        let relay = |candidate: &Candidate| {
            candidate.kind == CandidateKind::Relayed && candidate.address == address
        };
        is_forwarder(address) || self.candidates.iter().any(relay)
    }

    /// Returns the number of initiations and rounds of checks to direct candidates since something
    /// last arrived over a direct path in use.
    pub fn direct_tries(&self) -> u32 {
        self.direct_tries
    }

    /// Whether a NAT probably has one of the peer's addresses.
    pub fn has_nat(&self) -> bool {
        let mut candidates = self.candidates.iter();
        candidates.any(|candidate| self.is_behind_nat(candidate.address))
    }

    /// Whether a NAT probably has `address`: it is a public IPv4 address of a peer that signalled a
    /// private one too.
    ///
    /// A datagram that arrives at some NATs before their host has sent to its source makes the NAT
    /// use another port for that host and this source from then on: Linux, if no firewall rule
    /// drops the datagram, tracks it as a connection of the NAT's own (`nf_nat_used_tuple`).
    pub fn is_behind_nat(&self, address: SocketAddr) -> bool {
        let private = |candidate: &Candidate| {
            candidate.kind == CandidateKind::Signalled
                && candidate.address.is_ipv4()
                && is_private(candidate.address.ip())
        };
        address.is_ipv4()
            && !is_private(address.ip())
            && !self.is_relay(address)
            && self.candidates.iter().any(private)
    }

    /// Whether something arrived over a relay within `time`: the peer may have no other path to
    /// this host.
    pub fn received_by_relay_within(&self, time: Duration, now: Instant) -> bool {
        self.by_relay
            .is_some_and(|at| now.duration_since(at) < time)
    }

    /// Whether a call-me-maybe arrived after `established`, the start of the session in use. If so,
    /// the session proves nothing: a peer that has sent nothing lately does not notice a dead path.
    /// The handshake that answers the call creates a session that does.
    pub fn call_received_since(&self, established: Instant) -> bool {
        self.last_call.is_some_and(|at| at > established)
    }

    /// Whether the path in use counts as lost.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Whether the next initiation leaves out the lost path in use: the first one since the loss.
    pub fn leaves_out_lost(&self) -> bool {
        self.lost && !self.tried_without_lost
    }

    /// Sets the signalled candidates, best first. Those beyond [`MAX_CANDIDATES`] are ignored.
    /// Returns true if one is new.
    pub fn set_signalled(&mut self, addresses: &[SocketAddr]) -> bool {
        let new = self.replace(CandidateKind::Signalled, addresses, MAX_CANDIDATES);
        if new {
            self.ipv6_lost = false;
            self.punching = None;
            self.restart_checks();
        }
        new
    }

    /// Sets the relays of this peer, at most [`MAX_RELAYS`], while `used` is the path in use.
    /// Returns true if one is new. A relay in use that is not listed, even if the list is empty,
    /// stays until another path is proven: it may still work.
    pub fn set_relays(&mut self, addresses: &[SocketAddr], used: Option<SocketAddr>) -> bool {
        let ends = |used: &SocketAddr| self.is_relay(*used) && !addresses.contains(used);
        self.ends = used.filter(ends);
        let others = addresses.iter().copied();
        let others = others.take(MAX_RELAYS - usize::from(self.ends.is_some()));
        let all: Vec<SocketAddr> = others.chain(self.ends).collect();
        let new = self.replace(CandidateKind::Relayed, &all, MAX_RELAYS);
        if new && self.ends.is_some() {
            self.restart_checks();
        }
        new
    }

    /// Replaces all candidates of one kind. Candidates that stay keep their state. Returns true if
    /// one is new.
    fn replace(&mut self, kind: CandidateKind, addresses: &[SocketAddr], most: usize) -> bool {
        let old = std::mem::take(&mut self.candidates);
        let (mut same, mut others): (Vec<Candidate>, Vec<Candidate>) =
            old.into_iter().partition(|c| c.kind == kind);
        let mut new = false;
        let mut candidates: Vec<Candidate> = Vec::new();
        for address in addresses {
            if candidates.len() >= most || candidates.iter().any(|c| c.address == *address) {
                continue;
            }
            let known = same.iter().position(|c| c.address == *address);
            let known = known.map(|at| same.swap_remove(at)).or_else(|| {
                let at = others.iter().position(|c| c.address == *address)?;
                Some(others.remove(at))
            });
            new |= known.is_none();
            candidates.push(match known {
                Some(known) => Candidate { kind, ..known },
                None => Candidate {
                    address: *address,
                    kind,
                    state: CheckState::Unchecked,
                    checks: Vec::new(),
                },
            });
        }
        match kind {
            CandidateKind::Signalled => candidates.append(&mut others),
            CandidateKind::PeerReflexive | CandidateKind::Relayed => {
                others.append(&mut candidates);
                candidates = others;
            }
        }
        self.candidates = candidates;
        new
    }

    /// Restarts the rounds of checks: the first is due at once, the next ones at growing intervals.
    pub fn restart_checks(&mut self) {
        self.rounds = 0;
        self.next_round = Some(Instant::BOOT);
    }
}

/// Events.
impl Paths {
    /// Packets were sent over the path in use.
    pub fn sent(&mut self, now: Instant) {
        if !self.candidates.is_empty() && self.unanswered.is_none() {
            self.unanswered = Some(Unanswered {
                since: now,
                ask_at: now + PATIENCE,
            });
        }
    }

    /// Whether a pause of [`Self::may_punch`] lasts, in which the peer is not called either.
    pub fn is_pausing(&self, now: Instant) -> bool {
        let window = self.punching.as_ref();
        self.has_nat()
            && window.is_some_and(|window| window.pause_at <= now && now < window.ends_at)
    }

    /// Whether an initiation without a session may go to the NATs of the peer: in a period of
    /// [`PUNCH_FOR`], and not in the pause after it. Of both ends, one `pauses_longer`.
    pub fn may_punch(&mut self, now: Instant, pauses_longer: bool) -> bool {
        let window = match self.punching {
            Some(window) if now < window.ends_at => window,
            former => {
                let number = former.map_or(0, |former| former.number.wrapping_add(1));
                let pause = if pauses_longer || number % 2 == 1 {
                    LONG_PUNCH_PAUSE
                } else {
                    PUNCH_PAUSE
                };
                let pause_at = now + PUNCH_FOR;
                PunchWindow {
                    number,
                    pause_at,
                    ends_at: pause_at + pause,
                }
            }
        };
        self.punching = Some(window);
        now < window.pause_at
    }

    /// An initiation goes to these addresses. To a peer behind a NAT it is a try only if one of them
    /// is the NAT's: in a pause it goes to the others alone ([`PUNCH_FOR`]).
    pub fn on_initiation(&mut self, to: &[SocketAddr]) {
        self.tried_without_lost = true;
        let has_nat = self.has_nat();
        let mut is_tried = to.iter().any(|address| self.is_behind_nat(*address));
        let is_sent = |c: &&mut Candidate| c.is_direct() && to.contains(&c.address);
        for candidate in self.candidates.iter_mut().filter(is_sent) {
            is_tried |= !has_nat;
            candidate.state = match candidate.state {
                CheckState::Unchecked => CheckState::Checking,
                CheckState::Checking => CheckState::Silent,
                state => state,
            };
        }
        self.direct_tries = self.direct_tries.saturating_add(u32::from(is_tried));
    }

    /// Handles the source address of the newest authenticated datagram. `used` is the path in use;
    /// `began` is true if this end initiated the session. Returns whether to send to `from` from
    /// now on.
    pub fn on_datagram(
        &mut self,
        from: SocketAddr,
        used: Option<SocketAddr>,
        began: bool,
        now: Instant,
    ) -> bool {
        if self.candidates.is_empty() {
            return true;
        }
        let relayed = self.is_relay(from);
        if relayed {
            self.by_relay = Some(now);
        }
        let Some(used) = used.filter(|used| *used != from) else {
            self.answered();
            if !relayed {
                self.direct_tries = 0;
            }
            return true;
        };
        match (self.is_relay(used), relayed) {
            (false, true) => false,
            (true, false) => {
                self.on_peer_reflexive(from, now);
                false
            }
            // The peer checks IPv6 from both ends, so a datagram over IPv6 does not prove the
            // direction from this host to the peer.
            (false, false)
                if began && used.is_ipv4() && from.is_ipv6() && !self.is_proven(from) =>
            {
                self.on_peer_reflexive(from, now);
                false
            }
            (true, true) | (false, false) => {
                let settled = self.settled_until.is_some_and(|until| now < until);
                let follows = !(began && settled);
                if follows {
                    self.moved();
                    if began {
                        self.settled_until = Some(now + SETTLE);
                    }
                }
                follows
            }
        }
    }

    fn is_proven(&self, address: SocketAddr) -> bool {
        let works = |candidate: &Candidate| matches!(candidate.state, CheckState::Works { .. });
        let mut candidates = self.candidates.iter();
        !self.ipv6_lost && candidates.any(|c| c.address == address && works(c))
    }

    /// Handles the source address of an authenticated datagram that a newer one has overtaken. It
    /// does not show where the peer is now. But a direct path that a relay has overtaken is worth a
    /// check.
    pub fn on_late_datagram(&mut self, from: SocketAddr, used: Option<SocketAddr>, now: Instant) {
        if used.is_some_and(|used| self.is_relay(used)) && !self.is_relay(from) {
            self.on_peer_reflexive(from, now);
        }
    }

    /// The peer sends from this address, so it may be reachable there.
    fn on_peer_reflexive(&mut self, from: SocketAddr, now: Instant) {
        match self.candidates.iter().find(|c| c.address == from) {
            None => {
                self.replace(CandidateKind::PeerReflexive, &[from], 1);
                self.restart_checks();
            }
            Some(candidate) => {
                // An earlier check may have been sent before the peer opened its NAT.
                let soon = candidate
                    .checks
                    .last()
                    .map_or(now, |sent| sent.at + ASK_EVERY);
                self.next_round = Some(self.next_round.map_or(soon, |at| at.min(soon)));
            }
        }
    }

    /// Handles the acknowledgement of a check. `used` is the path in use; `began` is true if this
    /// end initiated the session. Returns the round-trip time and the result, or `None` if the
    /// check is not outstanding.
    pub fn acknowledged(
        &mut self,
        check: Check,
        used: Option<SocketAddr>,
        began: bool,
        now: Instant,
    ) -> Option<(Duration, CheckOutcome)> {
        let fits = |sent: &Sent| sent.check == check && !sent.is_over(now);
        let (candidate, at) = self.candidates.iter_mut().find_map(|candidate| {
            let index = candidate.checks.iter().position(fits)?;
            // Older checks of this candidate count as answered too.
            let at = candidate.checks.drain(..=index).next_back()?.at;
            Some((candidate, at))
        })?;
        let rtt = now.duration_since(at);
        candidate.state = CheckState::Works { rtt };
        let (address, direct) = (candidate.address, candidate.is_direct());
        if used == Some(address) {
            self.answered();
            return Some((rtt, CheckOutcome::InUse));
        }
        let better = match used {
            None => direct,
            Some(used) if self.is_relay(used) => direct || self.ends == Some(used),
            // Only the initiator switches, and the peer follows. If both switched, each could
            // follow the other back.
            Some(used) => began && self.is_preferred_candidate(address, used, rtt),
        };
        if !better && !self.lost {
            return Some((rtt, CheckOutcome::Keep));
        }
        self.moved();
        self.settled_until = Some(now + SETTLE);
        Some((rtt, CheckOutcome::Switch(address)))
    }

    /// Handles an acknowledgement of a check that was never sent.
    pub fn on_unknown_ack(&mut self) {
        self.wrong += 1;
        if self.wrong >= MAX_WRONG {
            self.wrong = 0;
            self.candidates.iter_mut().for_each(|c| c.checks.clear());
        }
    }

    /// Whether `address`, which answers after `rtt`, is preferred over the direct path `used`. Both
    /// were checked in the same round.
    fn is_preferred_candidate(&self, address: SocketAddr, used: SocketAddr, rtt: Duration) -> bool {
        let mut candidates = self.candidates.iter();
        let candidate = candidates.find(|c| c.address == address);
        let used_takes = self
            .candidates
            .iter()
            .find_map(|candidate| match candidate.state {
                CheckState::Works { rtt } if candidate.address == used => Some(rtt),
                _ => None,
            });
        !self.ipv6_lost
            && candidate.is_some_and(|c| c.is_preferred(used))
            // A path that has not answered yet is slower.
            && used_takes.is_none_or(|used| rtt <= used + IPV6_LAG)
    }

    /// Handles a call-me-maybe: nothing from this host reaches the peer.
    pub fn on_call_me_maybe(&mut self, now: Instant) {
        self.last_call = Some(now);
    }

    /// The kernel refused to send to this address. Returns whether [`Self::due`] has work to do because
    /// `used`, the path in use, has it.
    pub fn refused(&mut self, address: SocketAddr, used: Option<SocketAddr>) -> bool {
        if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == address) {
            candidate.state = CheckState::NoRoute;
            candidate.checks.clear();
        }
        if used != Some(address) {
            return false;
        }
        let known = self.refusal.filter(|known| known.address == address);
        let step = match known.map(|known| known.step) {
            None if !self.lost && self.candidates.iter().any(|c| c.address != address) => {
                RefusalStep::New
            }
            Some(RefusalStep::Asked) => RefusalStep::Again,
            _ => return false,
        };
        self.refusal = Some(Refusal { address, step });
        true
    }

    /// The kernel sent a datagram over the path in use.
    pub fn accepted(&mut self) {
        if let Some(refusal) = self.refusal.take() {
            self.lost &= refusal.step != RefusalStep::Lost;
        }
    }

    /// A handshake completed over the path in use, or another path was taken.
    pub fn moved(&mut self) {
        self.refusal = None;
        self.punching = None;
        self.answered();
        self.restart_checks();
    }

    fn answered(&mut self) {
        self.unanswered = None;
        let is_refused = |refusal: Refusal| refusal.step == RefusalStep::Lost;
        self.lost &= self.refusal.is_some_and(is_refused);
        self.punching = None;
    }
}

/// Timers.
impl Paths {
    /// When [`Self::due`] has work to do. `used` is the path in use.
    pub fn next_wakeup(&self, used: Option<SocketAddr>) -> Option<Instant> {
        let used = used?;
        let round = self.next_round.filter(|_| self.is_checking(used));
        let round = round.map(|at| at.max(self.allowed_rounds.available_at()));
        let ask = self.unanswered.map(|unanswered| unanswered.ask_at);
        let refusal = self.refusal.filter(|refusal| refusal.address == used);
        let refusal = refusal.and_then(|refusal| match refusal.step {
            RefusalStep::New | RefusalStep::Again => Some(Instant::BOOT),
            RefusalStep::Waiting(at) => Some(at),
            RefusalStep::Asked | RefusalStep::Lost => None,
        });
        round.into_iter().chain(ask).chain(refusal).min()
    }

    /// Returns the actions that are due. `used` is the path in use.
    pub fn due(&mut self, used: Option<SocketAddr>, now: Instant, rng: &mut dyn Rng) -> Vec<Due> {
        let mut due = Vec::new();
        let Some(used) = used else { return due };
        if self.is_checking(used)
            && self.next_round.is_some_and(|at| at <= now)
            && self.allowed_rounds.take(now)
        {
            let pause = ROUNDS[self.rounds.min(ROUNDS.len() - 1)];
            self.rounds += 1;
            self.next_round = Some(now + pause);
            let (ends, relayed) = (self.ends, self.is_relay(used));
            if !relayed && !self.candidates.iter().any(|c| c.address == used) {
                self.replace(CandidateKind::PeerReflexive, &[used], 1);
            }
            let wanted = |candidate: &&mut Candidate| {
                if relayed {
                    candidate.is_better(used, ends)
                } else {
                    candidate.is_preferred(used) || candidate.address == used
                }
            };
            let mut is_tried = false;
            for candidate in self.candidates.iter_mut().filter(wanted) {
                is_tried |= relayed && candidate.is_direct();
                due.push(candidate.begin(Check::random(rng), now));
            }
            self.direct_tries = self.direct_tries.saturating_add(u32::from(is_tried));
        }
        if let Some(unanswered) = &mut self.unanswered
            && unanswered.ask_at <= now
        {
            if now.duration_since(unanswered.since) >= SILENCE {
                self.ipv6_lost |= used.is_ipv6() && !is_forwarder(used);
                due.extend(self.lose(used, CheckState::Silent));
            } else {
                unanswered.ask_at = now + ASK_EVERY;
                let since = unanswered.since;
                if !self.candidates.iter().any(|c| c.address == used) {
                    self.replace(CandidateKind::PeerReflexive, &[used], 1);
                }
                if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == used) {
                    // Repeat the same check: the answer to the first one may still arrive.
                    let sent = candidate.checks.last().filter(|sent| sent.at >= since);
                    let again = sent.map(|sent| Due::Check(sent.check, used));
                    due.push(again.unwrap_or_else(|| candidate.send(Check::random(rng), now)));
                }
            }
        }
        self.due_after_refusal(used, now, rng, &mut due);
        due
    }

    fn due_after_refusal(
        &mut self,
        used: SocketAddr,
        now: Instant,
        rng: &mut dyn Rng,
        due: &mut Vec<Due>,
    ) {
        let Some(refusal) = &mut self.refusal else {
            return;
        };
        match refusal.step {
            _ if refusal.address != used => {}
            RefusalStep::New => refusal.step = RefusalStep::Waiting(now + REFUSAL),
            RefusalStep::Waiting(at) if at <= now => {
                refusal.step = RefusalStep::Asked;
                if !self.candidates.iter().any(|c| c.address == used) {
                    self.replace(CandidateKind::PeerReflexive, &[used], 1);
                }
                // Others were perhaps refused long ago.
                let wanted = |c: &&mut Candidate| {
                    c.address == used || matches!(c.state, CheckState::NoRoute)
                };
                let refused = self.candidates.iter_mut().filter(wanted);
                due.extend(refused.map(|candidate| candidate.begin(Check::random(rng), now)));
            }
            RefusalStep::Again => {
                let has_route =
                    |c: &Candidate| c.address != used && !matches!(c.state, CheckState::NoRoute);
                if self.candidates.iter().any(has_route) {
                    refusal.step = RefusalStep::Lost;
                    due.extend(self.lose(used, CheckState::NoRoute));
                } else {
                    // No path can be sent over. Silence decides.
                    self.refusal = None;
                }
            }
            RefusalStep::Waiting(_) | RefusalStep::Asked | RefusalStep::Lost => {}
        }
    }

    /// The path in use counts as lost from now on, for a reason that the state of its candidate shows.
    fn lose(&mut self, used: SocketAddr, state: CheckState) -> Option<Due> {
        self.unanswered = None;
        if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == used) {
            candidate.state = state;
        }
        // Only once: the handshake that follows is repeated by its own timer.
        let is_new = !std::mem::replace(&mut self.lost, true);
        self.tried_without_lost &= !is_new;
        is_new.then_some(Due::Lost)
    }

    /// Whether candidates are being checked: better ones while a relay is in use, preferred ones
    /// for the first few rounds.
    fn is_checking(&self, used: SocketAddr) -> bool {
        let mut candidates = self.candidates.iter();
        if self.is_relay(used) {
            candidates.any(|c| c.is_better(used, self.ends))
        } else {
            let tries = self.rounds < IPV6_ROUNDS && !self.ipv6_lost;
            tries && candidates.any(|c| c.is_preferred(used))
        }
    }
}

#[cfg(test)]
mod tests;

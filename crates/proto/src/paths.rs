//! The ways to a peer that may be in several places: which there are, what became of each, and when to look again.
//!
//! A way is *direct*, to an address of the peer's own, or goes by a *relay*, which sends on what comes to it; one is in use
//! ([`Path::endpoint`](crate::peer::Path::endpoint)). A *check* is a PROBE below the size of those for the MTU: its acknowledgement, whichever way it
//! comes back, proves the direction from here to there, which is the one that is chosen here. The other end chooses the other one
//! likewise, and what both send opens the NATs between them.
//!
//! - While a relay is in use, direct ways are checked in rounds that become rarer; the first that is proven is taken. So are other
//!   relays if the one in use is to be left.
//! - A direct way in use is not left because something comes by a relay, nor a relay because something comes directly: both may be
//!   half open. What comes directly from elsewhere is followed at once, as the peer has roamed.
//! - While IPv4 is in use directly, IPv6 is checked beside it for a few rounds, and preferred if it is no slower: it has no NAT that could
//!   forget the pair.
//! - When something was sent and nothing comes back for [`PATIENCE`], the way in use is checked; at [`SILENCE`] it counts as lost,
//!   and all others are tried.
//!
//! A pure state machine without anything of the network in it. Of a peer that has one address only, nothing is kept and nothing sent.

use std::net::SocketAddr;
use std::time::Duration;

use crate::constants::MAX_CANDIDATES;
use crate::native::frame::PROBE_LEN;
use crate::native::path_mtu::BASE;
use crate::native::record::RECORD_OVERHEAD;
use crate::rng::Rng;
use crate::time::Instant;

/// Relays by which one peer is reached, at most.
pub const MAX_RELAYS: usize = 8;
/// From what was sent until the way in use is asked whether it carries anything.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Between two such questions.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// From what was sent until the way in use counts as lost.
pub const SILENCE: Duration = Duration::from_secs(3);
/// Checks of one way whose answers are waited for, at most.
const MAX_CHECKS: usize = 16;
/// An acknowledgement that takes longer proves nothing.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Acknowledgements of what was never sent, from which on the checks that are waited for count no more: none can be guessed.
const MAX_WRONG: u8 = 16;
/// The least size of a check in UDP payload bytes; the largest is below that of any probe for the MTU.
const LEAST_CHECK: u16 = (RECORD_OVERHEAD + PROBE_LEN) as u16;
/// Time between two rounds of checks, the first few; the last counts for all that follow.
const ROUNDS: [Duration; 8] = [
    Duration::from_millis(200),
    Duration::from_millis(300),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];
/// Rounds in which IPv6 is checked while IPv4 is in use directly.
const IPV6_ROUNDS: usize = 5;
/// By how much a round trip may be longer by IPv6: the least head start that RFC 8305, section 8, gives it.
const IPV6_LAG: Duration = Duration::from_millis(10);
/// After a way was taken by a check, or the peer was followed, the end that began the session does not follow it elsewhere for so
/// long: the peer follows instead, or both would for ever.
const SETTLE: Duration = Duration::from_secs(1);

/// What kind of a way it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateKind {
    /// To an address that the peer told of.
    Signalled,
    /// To an address that something authentic came from.
    PeerReflexive,
    /// To a relay, or to a loopback address: no other host has one, so it is where a client of a TURN server on this host forwards.
    Relayed,
}

/// What is known of a way, in the direction from here to there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckState {
    /// It was not checked.
    Unchecked,
    /// A check may be on its way.
    Checking,
    /// A check was answered.
    Works {
        /// From the check to its acknowledgement, which may have come by another way.
        rtt: Duration,
    },
    /// No check of the last round was answered, or nothing came back by it while it was in use.
    Silent,
    /// This host refused to send there: it has no route, or no socket of that family.
    NoRoute,
}

/// A way.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Where to send.
    pub address: SocketAddr,
    /// What is there.
    pub kind: CandidateKind,
    /// What became of it.
    pub state: CheckState,
    /// Checks that may still be answered, the latest last: a round trip may be longer than the time between two.
    checks: Vec<Sent>,
}

/// A check: a PROBE of this number and size. Both are random, so that who has not received it does not know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its number.
    pub id: u16,
    /// Its size: UDP payload bytes.
    pub size: u16,
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

impl Check {
    pub(crate) fn random(rng: &mut dyn Rng) -> Check {
        let mut bytes = [0; 4];
        rng.fill(&mut bytes);
        let [a, b, c, d] = bytes;
        let sizes = BASE - LEAST_CHECK;
        Check {
            id: u16::from_le_bytes([a, b]),
            size: LEAST_CHECK + u16::from_le_bytes([c, d]) % sizes,
        }
    }

    /// One that little credit pays for ([`crate::address_validation`]).
    pub(crate) fn short(rng: &mut dyn Rng) -> Check {
        let Check { id, size } = Check::random(rng);
        Check {
            id,
            size: LEAST_CHECK + size % 13,
        }
    }

    /// One that is as small as can be, since many are sent. Its acknowledgement proves nothing.
    pub(crate) fn least(rng: &mut dyn Rng) -> Check {
        Check {
            size: LEAST_CHECK,
            ..Check::random(rng)
        }
    }
}

/// Whether this host itself forwards what is sent there ([`CandidateKind::Relayed`]).
fn is_forwarder(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// All ways to one peer, besides one that a configuration or the peer itself gave.
#[derive(Debug, Default)]
pub struct Paths {
    candidates: Vec<Candidate>,
    /// Rounds since there was a reason to look, and when the next one is due.
    rounds: usize,
    next_round: Option<Instant>,
    /// Since when something that was sent the way in use is without an answer, and when to ask next.
    unanswered: Option<Unanswered>,
    /// The way in use counts as lost; until something comes by it, or another is taken.
    lost: bool,
    settled_until: Option<Instant>,
    /// IPv6 was in use and carried nothing any more: it is not preferred until the peer is somewhere else.
    ipv6_lost: bool,
    /// The peer is not reached by this relay much longer: it is left for another while it still carries something.
    ends: Option<SocketAddr>,
    /// When something last came by a relay.
    by_relay: Option<Instant>,
    /// When the peer last had this host called, because nothing from here reaches it.
    last_call: Option<Instant>,
    /// Acknowledgements of what was never sent, since checks were last forgotten for them.
    wrong: u8,
}

#[derive(Clone, Copy, Debug)]
struct Unanswered {
    since: Instant,
    ask_at: Instant,
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send this there.
    Check(Check, SocketAddr),
    /// The way in use carries nothing: begin a handshake by all others.
    Lost,
}

/// What follows from a check that was acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The way in use works.
    InUse,
    /// Another works, and is no better.
    Keep,
    /// Send there from now on.
    Switch(SocketAddr),
}

impl Candidate {
    fn is_direct(&self) -> bool {
        self.kind != CandidateKind::Relayed && !is_forwarder(self.address)
    }

    /// Whether it is to be taken in the place of the relay that is `used`, if it works; `ends` is one that is to be left.
    fn is_better(&self, used: SocketAddr, ends: Option<SocketAddr>) -> bool {
        self.is_direct() || (ends == Some(used) && self.address != used)
    }

    /// Whether it is to be preferred to a direct way that is `used`, if it works as well.
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

/// Which ways there are.
impl Paths {
    /// All of them: what the peer told of first, in its order.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Whether the peer has no other way than one.
    pub fn is_empty(&self) -> bool {
        self.candidates.is_empty()
    }

    /// Whether an address is a relay's.
    pub fn is_relay(&self, address: SocketAddr) -> bool {
        let relay = |candidate: &Candidate| {
            candidate.kind == CandidateKind::Relayed && candidate.address == address
        };
        is_forwarder(address) || self.candidates.iter().any(relay)
    }

    /// Whether something came by a relay within `time`: the peer may have no other way to here.
    pub fn received_by_relay_within(&self, time: Duration, now: Instant) -> bool {
        self.by_relay
            .is_some_and(|at| now.duration_since(at) < time)
    }

    /// Whether the peer has had this host called since `established`, when the session in use began. Such a session proves nothing: who
    /// has sent nothing lately does not notice that its way has died. The handshake with which a call is answered makes one that does.
    pub fn call_received_since(&self, established: Instant) -> bool {
        self.last_call.is_some_and(|at| at > established)
    }

    /// Whether the way in use counts as lost.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// The peer tells where it may be, the best first: [`MAX_CANDIDATES`] at most, the others are passed over. True if one is new.
    pub fn set_signalled(&mut self, addresses: &[SocketAddr]) -> bool {
        let new = self.replace(CandidateKind::Signalled, addresses, MAX_CANDIDATES);
        if new {
            self.ipv6_lost = false;
            self.restart_checks();
        }
        new
    }

    /// Relays by which the peer is reached now, while `used` is the way in use: [`MAX_RELAYS`] at most. True if one is new. If
    /// that in use is none of them, and be there none, it stays until another way is proven: it may still carry something.
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

    /// Puts `addresses` in the place of those of a kind; true if one is new. What is known of the others stays.
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

    /// There is a new reason to check direct ways: at once, and then ever less often.
    pub fn restart_checks(&mut self) {
        self.rounds = 0;
        self.next_round = Some(Instant::BOOT);
    }
}

/// What happened.
impl Paths {
    /// Packets were sent the way in use.
    pub fn sent(&mut self, now: Instant) {
        if !self.candidates.is_empty() && self.unanswered.is_none() {
            self.unanswered = Some(Unanswered {
                since: now,
                ask_at: now + PATIENCE,
            });
        }
    }

    /// The newest authentic datagram came from somewhere, while `used` is the way in use; `began` says whether this end began the
    /// session. Whether to send there from now on.
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
            return true;
        };
        match (self.is_relay(used), relayed) {
            (false, true) => false,
            (true, false) => {
                self.on_peer_reflexive(from, now);
                false
            }
            // The peer checks IPv6 from both ends, which says nothing of the direction from here to there.
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

    /// An authentic datagram that is not the newest came from somewhere, while `used` is the way in use: it was overtaken, and does
    /// not say where the peer is now. But if it came directly, and what overtook it by a relay, that way is looked at.
    pub fn on_late_datagram(&mut self, from: SocketAddr, used: Option<SocketAddr>, now: Instant) {
        if used.is_some_and(|used| self.is_relay(used)) && !self.is_relay(from) {
            self.on_peer_reflexive(from, now);
        }
    }

    /// The peer sends directly, from there: what is sent there may get through.
    fn on_peer_reflexive(&mut self, from: SocketAddr, now: Instant) {
        match self.candidates.iter().find(|c| c.address == from) {
            None => {
                self.replace(CandidateKind::PeerReflexive, &[from], 1);
                self.restart_checks();
            }
            Some(candidate) => {
                // A check that was sent before may have been too early.
                let soon = candidate
                    .checks
                    .last()
                    .map_or(now, |sent| sent.at + ASK_EVERY);
                self.next_round = Some(self.next_round.map_or(soon, |at| at.min(soon)));
            }
        }
    }

    /// A check was acknowledged while `used` is the way in use: how long that took, and what follows; `began` says whether this end
    /// began the session. `None` if it was none of the latest.
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
            // Those before are answered with it.
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
            // The peer follows: each on its own could be led back by the other.
            Some(used) => began && self.is_preferred_candidate(address, used, rtt),
        };
        if !better && !self.lost {
            return Some((rtt, CheckOutcome::Keep));
        }
        self.moved();
        self.settled_until = Some(now + SETTLE);
        Some((rtt, CheckOutcome::Switch(address)))
    }

    /// Something was acknowledged that was never sent.
    pub fn on_unknown_ack(&mut self) {
        self.wrong += 1;
        if self.wrong >= MAX_WRONG {
            self.wrong = 0;
            self.candidates.iter_mut().for_each(|c| c.checks.clear());
        }
    }

    /// Whether an address that answers after `rtt` is preferred to a direct way that is `used`, which was checked along with it.
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
            // Without an answer yet it takes longer.
            && used_takes.is_none_or(|used| rtt <= used + IPV6_LAG)
    }

    /// The peer does not reach this host, it had it told.
    pub fn on_call_me_maybe(&mut self, now: Instant) {
        self.last_call = Some(now);
    }

    /// The kernel refused to send there.
    pub fn refused(&mut self, address: SocketAddr) {
        if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == address) {
            candidate.state = CheckState::NoRoute;
            candidate.checks.clear();
        }
    }

    /// A handshake was completed by the way in use, or another was taken.
    pub fn moved(&mut self) {
        self.answered();
        self.restart_checks();
    }

    fn answered(&mut self) {
        self.unanswered = None;
        self.lost = false;
    }
}

/// The passing of time.
impl Paths {
    /// When [`Self::due`] has something to say, while `used` is the way in use.
    pub fn next_wakeup(&self, used: Option<SocketAddr>) -> Option<Instant> {
        let used = used?;
        let round = self.next_round.filter(|_| self.is_checking(used));
        let ask = self.unanswered.map(|unanswered| unanswered.ask_at);
        round.into_iter().chain(ask).min()
    }

    /// What is to be done now, while `used` is the way in use.
    pub fn due(&mut self, used: Option<SocketAddr>, now: Instant, rng: &mut dyn Rng) -> Vec<Due> {
        let mut due = Vec::new();
        let Some(used) = used else { return due };
        if self.is_checking(used) && self.next_round.is_some_and(|at| at <= now) {
            let pause = ROUNDS[self.rounds.min(ROUNDS.len() - 1)];
            self.rounds += 1;
            self.next_round = Some(now + pause);
            let (ends, relayed) = (self.ends, self.is_relay(used));
            if !relayed && !self.candidates.iter().any(|c| c.address == used) {
                self.replace(CandidateKind::PeerReflexive, &[used], 1);
            }
            let wanted = |candidate: &&mut Candidate| match relayed {
                true => candidate.is_better(used, ends),
                false => candidate.is_preferred(used) || candidate.address == used,
            };
            for candidate in self.candidates.iter_mut().filter(wanted) {
                due.push(candidate.begin(Check::random(rng), now));
            }
        }
        if let Some(unanswered) = &mut self.unanswered
            && unanswered.ask_at <= now
        {
            if now.duration_since(unanswered.since) >= SILENCE {
                self.unanswered = None;
                if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == used) {
                    candidate.state = CheckState::Silent;
                }
                self.ipv6_lost |= used.is_ipv6();
                // Once: what is begun then is repeated by its own timer.
                if !std::mem::replace(&mut self.lost, true) {
                    due.push(Due::Lost);
                }
            } else {
                unanswered.ask_at = now + ASK_EVERY;
                let since = unanswered.since;
                if !self.candidates.iter().any(|c| c.address == used) {
                    self.replace(CandidateKind::PeerReflexive, &[used], 1);
                }
                if let Some(candidate) = self.candidates.iter_mut().find(|c| c.address == used) {
                    // The same again: the answer to the first may still be on its way.
                    let sent = candidate.checks.last().filter(|sent| sent.at >= since);
                    let again = sent.map(|sent| Due::Check(sent.check, used));
                    due.push(again.unwrap_or_else(|| candidate.send(Check::random(rng), now)));
                }
            }
        }
        due
    }

    /// Better ways are looked for while a relay is in use and there are any; preferred ones for a while.
    fn is_checking(&self, used: SocketAddr) -> bool {
        let mut candidates = self.candidates.iter();
        match self.is_relay(used) {
            true => candidates.any(|c| c.is_better(used, self.ends)),
            false => {
                let tries = self.rounds < IPV6_ROUNDS && !self.ipv6_lost;
                tries && candidates.any(|c| c.is_preferred(used))
            }
        }
    }
}

#[cfg(test)]
mod tests;

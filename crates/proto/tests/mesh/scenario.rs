//! Scenarios of a mesh: connecting, changes, silence; with the expected state after each.

use super::nat::By;
use super::theory::{PathKind, expected_path, failures};
use super::world::{Before, CLOSED_PORT, OPEN_PORT, World};
use crate::sim::{MILLISECOND, SECOND};
use rand::Rng as _;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// The network loses one datagram of a thousand.
const LOSS: f64 = 0.001;
/// When the first talk begins, and how long after it the last one. All members know each other by
/// then.
const BEGINS: u64 = 5 * SECOND;
const WITHIN: u64 = 10 * SECOND;
/// Interval between packets of most talks, and of watched talks.
const SELDOM: u64 = 10 * SECOND;
const OFTEN: u64 = SECOND;
/// Interval of most talks after connecting.
const RARELY: u64 = 30 * SECOND;
/// Approximate number of talks that each member begins.
const TALKS: usize = 5;
/// Number of members without talks.
const SILENT: usize = 10;
/// Number of peers with open ports at a time (`birthday`).
const OPEN_AT_A_TIME: usize = 2;

pub struct Mesh {
    pub world: World,
    /// Members without talks.
    silent: BTreeSet<usize>,
    /// When each talk was first direct in both directions.
    direct: Vec<Option<u64>>,
}

/// Distribution of NATs: mostly homes.
fn before(world: &mut World) -> Before {
    match world.rng.random_range(0..100) {
        0..8 => Before::Open,
        8..20 => Before::FullCone,
        20..28 => Before::Restricted,
        28..60 => Before::PortRestricted,
        60..75 => Before::Tracking,
        75..78 => Before::AddressDependent,
        78..87 => Before::Symmetric,
        87..90 => Before::NoUdp,
        90..95 => Before::Carrier(world.rng.random_range(0..5)),
        _ => Before::Hairpin(world.rng.random_range(5..10)),
    }
}

/// Construction of the mesh.
impl Mesh {
    /// All join at once, and know each other before the first talk begins.
    pub fn new(seed: u64, members: usize) -> Mesh {
        let mut world = World::new(seed, LOSS);
        for m in 0..members {
            let tag = format!("t{}", m / 2 % 4);
            let mate = (m % 40 == 1 && world.before(m - 1) != Before::Open).then(|| m - 1);
            let before = match mate {
                Some(mate) => world.before(mate),
                None => before(&mut world),
            };
            world.join(before, mate, &tag);
        }
        let mut mesh = Mesh {
            world,
            silent: (members - SILENT..members).collect(),
            direct: Vec::new(),
        };
        for m in 0..members - SILENT {
            if m % 40 == 1 {
                mesh.talk([m, m - 1], OPEN_PORT, SELDOM);
            }
            for _ in 0..TALKS {
                mesh.talk_with_any(m, OPEN_PORT, SELDOM);
            }
            if m % 10 == 0 {
                mesh.talk_with_any(m, OPEN_PORT, OFTEN);
                mesh.talk_with_any(m, CLOSED_PORT, SELDOM);
            }
        }
        mesh
    }

    /// A member begins a talk with one that admits it, or at a closed port of one that does not.
    fn talk_with_any(&mut self, m: usize, port: u16, every: u64) {
        for _ in 0..100_000 {
            let other = self.world.rng.random_range(0..self.world.members.len());
            let free = self.world.talk_between(m, other).is_none() && other != m;
            let fits = self.world.may_begin(m, other, port) == (port == OPEN_PORT);
            if free && fits && !self.silent.contains(&other) && self.world.members[other].is_on {
                return self.talk([m, other], port, every);
            }
        }
        panic!("nobody is left to whom {m} could talk");
    }

    fn talk(&mut self, ends: [usize; 2], port: u16, every: u64) {
        let begins = self.world.time + BEGINS + self.world.rng.random_range(0..WITHIN);
        if self.world.talk_between(ends[0], ends[1]).is_none() {
            self.world.add_talk(ends, port, every, begins);
            self.direct.push(None);
        }
    }

    /// Advances time, and records ten times a second which talks are direct.
    fn run(&mut self, by: u64) {
        let end = self.world.time + by;
        while self.world.time < end {
            self.world.run(100 * MILLISECOND);
            for talk in 0..self.direct.len() {
                let began = self.world.talks[talk].began;
                if self.direct[talk].is_none()
                    && began <= self.world.time
                    && self.path_in_use(talk) == Some(PathKind::Direct)
                {
                    self.direct[talk] = Some(self.world.time - began);
                }
            }
        }
    }

    /// The endpoints in use at both ends of a talk.
    fn endpoints(&self, talk: usize) -> Option<[SocketAddr; 2]> {
        let [a, b] = self.world.talks[talk].ends;
        Some([self.endpoint(a, b)?.0, self.endpoint(b, a)?.0])
    }

    /// The endpoint in use at a member for another, and whether it is a relay.
    fn endpoint(&self, m: usize, other: usize) -> Option<(SocketAddr, bool)> {
        let tunnel = &self.world.members[m].tunnel;
        let id = tunnel.peer_by_key(&self.world.members[other].key)?;
        let peer = tunnel.peer(id)?;
        let at = peer.path.endpoint?;
        peer.has_session(self.world.now().mono)
            .then_some((at, peer.paths.is_relay(at)))
    }

    /// The path of a talk; direct only if both ends use a direct one.
    fn path_in_use(&self, talk: usize) -> Option<PathKind> {
        let [a, b] = self.world.talks[talk].ends;
        let (there, back) = (self.endpoint(a, b)?, self.endpoint(b, a)?);
        Some(if there.1 || back.1 {
            PathKind::Relay
        } else {
            PathKind::Direct
        })
    }

    /// The expected path of a talk.
    fn expected(&self, talk: usize) -> PathKind {
        let [a, b] = self.world.talks[talk].ends;
        let world = &self.world;
        let realm = |m: usize| world.members[m].location.realm;
        let same_home = realm(a) == realm(b) && world.before(a) != Before::Open;
        expected_path(world.before(a), world.before(b), same_home)
    }
}

/// Connecting.
impl Mesh {
    /// Runs until all members know each other.
    pub fn know_each_other(&mut self) {
        self.run(BEGINS - 1);
        assert!(self.world.is_known());
    }

    /// Each pair is reached over the expected path, in time.
    pub fn check_connectivity(&mut self) {
        self.run(BEGINS + WITHIN + 25 * SECOND - self.world.time);
        let mut shares: BTreeMap<PathKind, usize> = BTreeMap::new();
        let (mut ports, mut soon, mut late, mut unmet) = (0, 0, 0, 0);
        let (mut tracking, mut soon_tracking) = (0, 0);
        for number in 0..self.world.talks.len() {
            let expected = self.expected(number);
            *shares.entry(expected).or_default() += 1;
            let kind = self.kind(number);
            let (direct, talk) = (self.direct[number], &self.world.talks[number]);
            // A packet lost by the network is followed by the next one.
            if talk.is_allowed && talk.lost[0] == 0 {
                let first = talk.first[0].unwrap_or_else(|| panic!("{kind}: nothing arrives"));
                assert!(
                    first - talk.began <= SECOND,
                    "{kind}: {}",
                    first - talk.began
                );
            }
            if let Some(path_in_use) = self.path_in_use(number)
                && direct.is_some()
            {
                assert_eq!(path_in_use, PathKind::Direct, "{kind}: not any more");
            }
            match expected {
                PathKind::Direct => {
                    let direct = direct.unwrap_or_else(|| panic!("{kind}: not direct"));
                    assert!(direct <= 3 * SECOND, "{kind}: after {direct}");
                }
                PathKind::Relay => assert_eq!(direct, None, "{kind}: direct"),
                PathKind::Port => {
                    let before = talk.ends.map(|m| self.world.before(m));
                    let tracks = usize::from(before.contains(&Before::Tracking));
                    tracking += tracks;
                    ports += 1;
                    unmet += usize::from(direct.is_none());
                    // Other searches wait for these.
                    if self.searches(talk.ends) <= OPEN_AT_A_TIME {
                        soon += 1;
                        soon_tracking += tracks;
                        // A request lost by the network is repeated after 5 s.
                        late += usize::from(direct.is_none_or(|direct| direct > 11 * SECOND));
                    }
                }
            }
        }
        assert!(
            late <= failures(soon - soon_tracking, soon_tracking),
            "{late} of {soon} have not met in time"
        );
        let most = failures(ports - tracking, tracking);
        assert!(unmet <= most, "{unmet} of {ports} have not met");
        self.nothing_passes_that_may_not();
        self.everything_is_accounted_for();
        println!("ways: {shares:?}; {unmet} of {ports} ports not met");
    }

    /// The first packet of a talk arrives within a second, over any path.
    fn arrives_in_time(&self, number: usize) {
        let (talk, kind) = (&self.world.talks[number], self.kind(number));
        // A packet lost by the network is followed by the next one.
        if talk.is_allowed && talk.lost[0] == 0 {
            let first = talk.first[0].unwrap_or_else(|| panic!("{kind}: nothing arrives"));
            assert!(
                first - talk.began <= SECOND,
                "{kind}: after {}",
                first - talk.began
            );
        }
    }

    /// Number of talks of the end behind the symmetric NAT that need a port search.
    fn searches(&self, ends: [usize; 2]) -> usize {
        let symmetric = |m: &usize| self.world.before(*m).behaviour().mapping != By::Nothing;
        let m = ends.into_iter().find(symmetric).expect("one is");
        let of_it = |talk: &usize| {
            self.world.talks[*talk].ends.contains(&m) && self.expected(*talk) == PathKind::Port
        };
        (0..self.world.talks.len()).filter(of_it).count()
    }

    fn kind(&self, talk: usize) -> String {
        let [a, b] = self.world.talks[talk].ends;
        let before = |m: usize| self.world.before(m);
        let seed = self.world.seed;
        format!(
            "seed {seed}, {a} ({:?}) and {b} ({:?})",
            before(a),
            before(b)
        )
    }

    fn nothing_passes_that_may_not(&self) {
        let closed = self.world.talks.iter().filter(|talk| !talk.is_allowed);
        let arrived: u64 = closed.clone().map(|talk| talk.refused[0]).sum();
        assert!(arrived > 0, "they came, and were not let in");
        assert_eq!(closed.map(|talk| talk.got[0]).max(), Some(0));
    }

    /// Accounts for every datagram and packet.
    pub fn everything_is_accounted_for(&self) {
        let (ledger, (datagrams, packets)) = (&self.world.ledger, self.world.flying());
        let lost: u64 = ledger.lost.values().map(|(datagrams, _)| datagrams).sum();
        assert_eq!(ledger.datagrams, ledger.arrived + lost + datagrams);
        let lost: u64 = ledger.lost.values().map(|(_, packets)| packets).sum();
        let (mut out, mut dropped) = (0, 0);
        for member in &self.world.members {
            let totals = member.tunnel.totals();
            for direction in [&totals.outbound, &totals.inbound] {
                assert_eq!(direction.unaccounted(), 0, "{direction:?}");
            }
            out += totals.outbound.pending + totals.outbound.drops.total();
            dropped += totals.inbound.drops.total();
        }
        let known = ledger.delivered + ledger.refused + lost + out + packets;
        assert_eq!(ledger.packets, known, "{:?}", ledger.lost);
        // Among other drops, the tunnels have counted those that they refused.
        assert!(ledger.refused <= dropped);
        // A polled tunnel nearly always has something to send.
        let sent: u64 = self
            .world
            .sent
            .iter()
            .flat_map(|sent| sent.to.values())
            .sum();
        assert!(self.world.wakes <= sent, "{} wake-ups", self.world.wakes);
    }
}

/// A change of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The host moves behind another NAT of the same kind, with another address.
    Moves,
    LosesItsNat,
    RotatesKey,
    /// The member leaves, and is off.
    Leaves,
    /// The member is removed without its knowledge, and continues.
    Revoked,
    Joins,
}

/// A tenth of all members change each minute, in this order.
const CHANGES: [Change; 8] = [
    Change::Moves,
    Change::RotatesKey,
    Change::Leaves,
    Change::Joins,
    Change::LosesItsNat,
    Change::RotatesKey,
    Change::Revoked,
    Change::Joins,
];
/// Maximum time until everybody knows of a change: detection by the host, a STUN server without an
/// answer, and the delays to and from the coordinator.
const NOTICE: u64 = 8 * SECOND;
/// Maximum silence when a path dies: 3 s until it counts as lost, a handshake over all others, and
/// the interval between two packets.
const DEAD: u64 = 5 * SECOND + OFTEN;

/// Maximum silence when a network heals: an initiation, then the time for connecting, and the
/// interval between two packets.
const HEALS: u64 = AGAIN + SECOND + OFTEN;
/// Maximum delay of a repeated initiation: `REKEY_TIMEOUT` and its jitter.
const AGAIN: u64 = 5334 * MILLISECOND;
/// Number of datagrams whose loss delays another path. Requests to a relay and their answers,
/// twice, at either end, both over the network; a handshake and the packet, over a relay.
const NEEDED: f64 = 14.0;
/// Maximum number of watched talks at a time.
const WATCHED: usize = 60;

impl Mesh {
    /// A tenth of the members change each minute. Pairs without a change stay as before; the others
    /// are reached again.
    pub fn changes(&mut self, minutes: u64) {
        self.calms_down(SELDOM);
        let members = self.world.members.len() as u64;
        let closely: Vec<usize> = self.talks(|mesh, talk| {
            let talk = &mesh.world.talks[talk];
            talk.is_allowed && talk.every == OFTEN
        });
        // Half of the watched talks stay unchanged.
        let (steady, others) = closely.split_at(closely.len() / 2);
        let steady: Vec<usize> = steady.to_vec();
        let mut stay = self.silent.clone();
        for talk in &steady {
            stay.extend(self.world.talks[*talk].ends);
        }
        let mut to_change: Vec<usize> = Vec::new();
        for talk in others {
            to_change.extend(self.world.talks[*talk].ends);
        }
        to_change.extend(0..members as usize);
        let mut seen = stay.clone();
        to_change.retain(|m| seen.insert(*m));
        let before: Vec<_> = steady.iter().map(|talk| self.path_state(*talk)).collect();
        let pause = 60 * SECOND * 10 / members;
        let mut revoked: Vec<(usize, u64)> = Vec::new();
        let mut over: Vec<(u64, Change, usize, Vec<usize>)> = Vec::new();
        let mut to_change = to_change.into_iter();
        for n in 0..minutes * members / 10 {
            let change = CHANGES[n as usize % CHANGES.len()];
            let member = match change {
                Change::Joins => Some(self.joins(n)),
                _ => to_change.next(),
            };
            if let Some(m) = member {
                let watched = self.change(m, change);
                if change == Change::Revoked {
                    revoked.push((m, self.world.time));
                }
                over.push((self.world.time, change, m, watched));
            }
            self.run(pause);
            while let Some((time, ..)) = over.first()
                && *time + WITHIN + 10 * SECOND <= self.world.time
            {
                let (_, change, m, watched) = over.remove(0);
                self.check_effect(change, m, &watched);
                match change {
                    Change::Revoked => self.gives_up(m),
                    Change::Joins => watched
                        .iter()
                        .for_each(|talk| self.world.talks[*talk].every = RARELY),
                    _ => {}
                }
            }
        }
        self.run(WITHIN + 12 * SECOND);
        for (_, change, m, watched) in over {
            self.check_effect(change, m, &watched);
        }
        assert!(self.world.is_known(), "everybody has heard of everything");
        for (talk, before) in steady.iter().zip(before) {
            self.is_as_before(*talk, before);
        }
        for (m, at) in revoked {
            let late = |talk: &&usize| self.world.last_from(m, **talk) > Some(at + NOTICE);
            let of_it = self.talks(|mesh, talk| mesh.world.talks[talk].ends.contains(&m));
            let late = of_it.iter().find(late);
            assert_eq!(late, None, "{m} was revoked at {at}");
        }
        self.nobody_else_is_sent_to();
        self.everything_is_accounted_for();
    }

    fn talks(&self, wanted: impl Fn(&Mesh, usize) -> bool) -> Vec<usize> {
        let all = 0..self.world.talks.len();
        all.filter(|talk| wanted(self, *talk)).collect()
    }

    /// State of a talk that stays the same without changes.
    fn path_state(&self, talk: usize) -> PathState {
        let at = self.endpoints(talk);
        let talk = &self.world.talks[talk];
        PathState {
            at,
            missing: [0, 1].map(|i| u64::from(talk.sent[i] - talk.got[i]) - talk.lost[i]),
        }
    }

    /// No packets are missing except those lost by the network or in flight, and the path is the
    /// same.
    fn is_as_before(&self, talk: usize, before: PathState) {
        let now = self.path_state(talk);
        let kind = self.kind(talk);
        assert_eq!(now.at, before.at, "{kind}: the way is another");
        for i in 0..2 {
            assert!(now.missing[i] <= before.missing[i] + 1, "{kind}: {now:?}");
        }
    }

    /// All talks of a member end.
    fn gives_up(&mut self, m: usize) {
        for talk in &mut self.world.talks {
            if talk.ends.contains(&m) {
                talk.every = 0;
            }
        }
    }

    /// Talks of this interval become rare.
    fn calms_down(&mut self, every: u64) {
        let talks = self.world.talks.iter_mut();
        for talk in talks.filter(|talk| talk.every == every) {
            talk.every = RARELY;
        }
    }

    /// A new member joins and begins some talks.
    fn joins(&mut self, n: u64) -> usize {
        let before = before(&mut self.world);
        self.world.join(before, None, &format!("t{}", n % 4))
    }

    /// Performs a change. Returns the talks to watch.
    fn change(&mut self, m: usize, change: Change) -> Vec<usize> {
        match change {
            Change::Moves => self.world.moves(m),
            Change::LosesItsNat => self.world.loses_its_nat(m),
            Change::RotatesKey => self.world.rotates(m),
            Change::Leaves => self.world.leaves(m),
            Change::Revoked => self.world.revoked(m),
            Change::Joins => {
                let first = self.world.talks.len();
                for _ in 0..3 {
                    self.talk_with_any(m, OPEN_PORT, OFTEN);
                }
                return (first..self.world.talks.len()).collect();
            }
        }
        let on = |m: usize| self.world.is_member(m);
        let watched = self.talks(|mesh, number| {
            let talk = &mesh.world.talks[number];
            let both = talk.ends.into_iter().all(on) && talk.ends.contains(&m);
            both && talk.is_allowed && talk.every == OFTEN
        });
        for talk in &watched {
            self.world.talks[*talk].silence = [0; 2];
        }
        watched
    }

    /// Checks the effect of a change.
    fn check_effect(&self, change: Change, m: usize, watched: &[usize]) {
        for number in watched {
            let talk = &self.world.talks[*number];
            let kind = format!("{m} {change:?}: {}", self.kind(*number));
            // The other end has left meanwhile.
            if !talk.ends.into_iter().all(|m| self.world.is_member(m)) {
                continue;
            }
            let path_state = self.path_state(*number);
            match change {
                Change::Joins => self.arrives_in_time(*number),
                Change::Moves | Change::LosesItsNat => {
                    self.silent_no_longer_than(DEAD, &[*number]);
                }
                Change::RotatesKey => {
                    assert!(
                        path_state.missing.iter().all(|n| *n <= 1),
                        "{kind}: {path_state:?}"
                    );
                }
                Change::Leaves | Change::Revoked => {}
            }
        }
    }
}

/// Outages and silence.
impl Mesh {
    /// A relay stops and starts again: its pairs use their other relay.
    pub fn a_relay_dies(&mut self) {
        let relayed =
            self.talks(|mesh, talk| mesh.lives(talk) && mesh.expected(talk) == PathKind::Relay);
        let watched: Vec<_> = relayed.into_iter().take(WATCHED).collect();
        self.watch(watched.clone());
        let before = self.world.relays[0].pairs();
        assert!(before > 0, "somebody uses it");
        self.world.relays[0].stop();
        self.run(30 * SECOND);
        for talk in &watched {
            let silence = self.world.talks[*talk].silence;
            let kind = self.kind(*talk);
            assert!(
                silence[0].max(silence[1]) <= DEAD,
                "{kind}: silent for {silence:?}"
            );
        }
        let path_state: Vec<_> = watched.iter().map(|talk| self.path_state(*talk)).collect();
        self.world.relays[0].is_on = true;
        self.run(40 * SECOND);
        for (talk, before) in watched.iter().zip(path_state) {
            let now = self.path_state(*talk);
            let lost = [0, 1].map(|i| now.missing[i].saturating_sub(before.missing[i]));
            assert!(lost[0].max(lost[1]) <= 1, "{}: {lost:?}", self.kind(*talk));
        }
    }

    /// The network splits: a tenth of the hosts reach only each other for a while.
    pub fn falls_apart(&mut self) {
        let apart: BTreeSet<usize> = (0..self.world.members.len()).step_by(10).collect();
        let ends = |mesh: &Mesh, talk: usize| {
            let [a, b] = mesh.world.talks[talk].ends;
            [a, b].map(|m| apart.contains(&m))
        };
        let across = self.talks(|mesh, talk| {
            let [a, b] = ends(mesh, talk);
            mesh.lives(talk) && a != b
        });
        let inside = self.talks(|mesh, talk| {
            let [a, b] = ends(mesh, talk);
            let direct = mesh.path_in_use(talk) == Some(PathKind::Direct);
            mesh.lives(talk) && a && b && direct
        });
        let across = across.into_iter().take(WATCHED);
        let inside = inside.into_iter().take(WATCHED);
        let (across, inside): (Vec<_>, Vec<_>) = (across.collect(), inside.collect());
        self.watch([across.clone(), inside.clone()].concat());
        let before: Vec<_> = inside.iter().map(|talk| self.path_state(*talk)).collect();
        self.world.apart = apart;
        self.run(20 * SECOND);
        for (talk, before) in inside.iter().zip(before) {
            self.is_as_before(*talk, before);
        }
        self.world.apart.clear();
        self.look_from_now(&across);
        self.run(20 * SECOND);
        self.silent_no_longer_than(HEALS, &across);
    }

    /// All talks end: members send STUN requests and nothing else.
    pub fn falls_silent(&mut self) {
        for talk in &mut self.world.talks {
            talk.every = 0;
        }
        // Silent peers are given up after 90 s. A session expires after 180 s, and one that is
        // renewed meanwhile after as long again.
        self.world.run(420 * SECOND);
        let (before, wakes) = (self.world.sent.clone(), self.world.wakes);
        self.world.run(100 * SECOND);
        let servers = self.world.stun.len() as u64;
        for (m, before) in before.iter().enumerate() {
            let now = &self.world.sent[m];
            assert_eq!(now.to, before.to, "{m} has nothing to say to anybody");
            let request = now.outside_tunnel - before.outside_tunnel;
            // Each request is sent three times where no UDP passes. Four rounds begin in 100 s, or
            // one more; lost requests are repeated.
            let (least, most) = match (self.world.members[m].is_on, self.world.before(m)) {
                (false, _) => (0, 0),
                (true, Before::NoUdp) => (3 * 3 * servers, 3 * 5 * servers),
                (true, _) => (3 * servers, 5 * servers + 2),
            };
            assert!(
                (least..=most).contains(&request),
                "{m} has asked {request} times"
            );
        }
        // Keys are erased, once for each session.
        let wakes = self.world.wakes - wakes;
        let sessions = 2 * self.world.talks.len() as u64;
        assert!(wakes <= sessions, "{wakes} wake-ups");
        self.nobody_else_is_sent_to();
        self.everything_is_accounted_for();
    }

    /// A member sends only to the members that it talks with.
    fn nobody_else_is_sent_to(&self) {
        for (m, sent) in self.world.sent.iter().enumerate() {
            let unrelated = |other: &&usize| self.world.talk_between(m, **other).is_none();
            assert_eq!(
                sent.to.keys().find(unrelated),
                None,
                "{m} does not talk with it"
            );
            assert!(!self.silent.contains(&m) || sent.to.is_empty());
        }
    }

    /// The silence of talks is bounded, except when the network has lost a datagram needed to find
    /// another path.
    fn silent_no_longer_than(&self, most: u64, talks: &[usize]) {
        let mut late = 0;
        for talk in talks {
            let (silence, kind) = (self.world.talks[*talk].silence, self.kind(*talk));
            let silence = silence[0].max(silence[1]);
            assert!(silence <= most + AGAIN, "{kind}: silent for {silence}");
            late += usize::from(silence > most);
        }
        let lost = talks.len() as f64 * NEEDED * LOSS;
        let at_most = (lost + 4.0 * lost.sqrt()).ceil() as usize;
        assert!(late <= at_most, "{late} of {} are late", talks.len());
    }

    /// Whether both ends are members and one may initiate.
    fn lives(&self, talk: usize) -> bool {
        let talk = &self.world.talks[talk];
        talk.is_allowed && talk.ends.into_iter().all(|m| self.world.is_member(m))
    }

    /// Makes these talks frequent, and no others.
    fn watch(&mut self, talks: Vec<usize>) {
        self.calms_down(OFTEN);
        for talk in &talks {
            self.world.talks[*talk].every = OFTEN;
        }
        self.run(RARELY + 2 * SECOND);
        self.look_from_now(&talks);
    }

    fn look_from_now(&mut self, talks: &[usize]) {
        let now = self.world.time;
        for talk in talks {
            let talk = &mut self.world.talks[*talk];
            (talk.silence, talk.last) = ([0; 2], [now; 2]);
        }
    }
}

/// Endpoints of both ends of a talk, and packets missing without a loss of the network.
#[derive(Clone, Debug)]
struct PathState {
    at: Option<[SocketAddr; 2]>,
    missing: [u64; 2],
}

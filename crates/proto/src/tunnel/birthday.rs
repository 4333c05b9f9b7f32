//! Port probing: the link between the state of a peer, the driver and the session.

use super::{Now, Tunnel};
use crate::birthday::{Birthday, Context, Due, LAST_RESORT_AFTER, Mapping, NatMappings, Punch};
use crate::constants::{REKEY_ON_RECEIVE_AFTER, REKEY_TIMEOUT};
use crate::indices::PeerId;
use crate::keys::Identity;
use crate::native::check::Check;
use crate::native::probe_request::ProbeRequest;
use crate::native::record::{Outgoing, RecordWriter};
use crate::outbox::Outbox;
use crate::peer::Peer;
use crate::time::Instant;
use crate::timers::SessionAge;
use std::net::SocketAddr;
use std::time::Duration;

/// The peers with open ports and the peers that are probed for. Both lists are short, so each
/// request can be compared with all of them.
#[derive(Debug, Default)]
pub(super) struct Searches {
    opening: Vec<PeerId>,
    probing: Vec<PeerId>,
}

impl Searches {
    /// Number of open and of probed peers other than `id`.
    fn others(&mut self, peers: &[Option<Peer>], id: PeerId, now: Instant) -> (usize, usize) {
        let busy = |id: PeerId, is: fn(&Birthday, Instant) -> bool| {
            let peer = peers.get(id.0 as usize).and_then(Option::as_ref);
            peer.is_some_and(|peer| is(&peer.birthday, now))
        };
        self.opening.retain(|id| busy(*id, Birthday::is_open));
        self.probing.retain(|id| busy(*id, Birthday::is_probing));
        let others = |all: &[PeerId]| all.iter().filter(|other| **other != id).count();
        (others(&self.opening), others(&self.probing))
    }

    /// Adds a peer to the lists that it belongs to now.
    fn enter(&mut self, id: PeerId, birthday: &Birthday, now: Instant) {
        if birthday.is_open(now) && !self.opening.contains(&id) {
            self.opening.push(id);
        }
        if birthday.is_probing(now) && !self.probing.contains(&id) {
            self.probing.push(id);
        }
    }
}

impl Tunnel {
    /// Sets the mapping behaviour of this host's NATs. A change restarts the attempts that were
    /// hopeless.
    pub fn set_nat_mappings(&mut self, nat_mappings: NatMappings, now: Instant) {
        if nat_mappings == self.nat_mappings {
            return;
        }
        self.nat_mappings = nat_mappings;
        for id in self.by_key.values().copied().collect::<Vec<_>>() {
            if let Some(peer) = self.peer_mut(id) {
                peer.birthday.on_nat_change(now);
            }
            self.reschedule(id, now, now);
        }
    }

    /// The mapping behaviour of this host's NATs.
    pub fn nat_mappings(&self) -> &NatMappings {
        &self.nat_mappings
    }

    /// Takes the punches that are due since the last call. The driver performs them and reports by
    /// [`Tunnel::on_punched`].
    pub fn take_punches(&mut self) -> Vec<Punch> {
        std::mem::take(&mut self.punches)
    }

    /// The driver has punched from this many sockets. Zero: it could open none.
    pub fn on_punched(&mut self, id: PeerId, ports: u16, now: Instant) {
        if let Some(peer) = self.peer_mut(id) {
            peer.birthday.on_punched(ports, now);
        }
        self.reschedule(id, now, now);
    }

    /// An authenticated datagram arrived on one of the punch sockets. The driver keeps that socket
    /// and closes the others.
    pub fn on_punch_succeeded(&mut self, id: PeerId, now: Instant) {
        if let Some(peer) = self.peer_mut(id) {
            peer.birthday.on_punch_succeeded(now);
            // Earlier checks left from another socket.
            peer.paths.restart_checks();
        }
        self.reschedule(id, now, now);
    }

    /// Whether the punch sockets of a peer are still needed.
    pub fn is_open(&self, id: PeerId, now: Instant) -> bool {
        self.peer(id).is_some_and(|peer| {
            let relay = |used| peer.paths.is_relay(used);
            peer.birthday.is_open(now) && peer.path.endpoint.is_some_and(relay)
        })
    }

    /// Sends a keepalive if `address` is the peer's path in use, so that the NATs keep its mapping.
    /// It stops near the end of the session: a datagram then would have the peer renew the session,
    /// and so on forever.
    pub fn keep_alive(&mut self, now: Now, id: PeerId, address: SocketAddr, outbox: &mut Outbox) {
        let kept = self.peer(id).is_some_and(|peer| {
            let session = peer.sessions.current.as_ref();
            let is_young = |age: SessionAge| {
                let until = REKEY_ON_RECEIVE_AFTER - REKEY_TIMEOUT;
                !age.derived.has_expired(until, now.mono)
            };
            peer.path.endpoint == Some(address) && session.is_some_and(|s| is_young(s.age()))
        });
        if kept {
            self.send_keepalive(now, id, outbox);
        }
    }

    /// Whether ports are opened at this end of the pair if there is no direct path.
    pub(super) fn opens_ports(&self, peer: &Peer) -> bool {
        self.nat_mappings.is_symmetric()
            || last_resort(&self.identity, &self.nat_mappings, peer).is_some()
    }

    pub(super) fn search_ports(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let (opening, probing) = self.searches.others(&self.peers, id, now.mono);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let context = Context {
            relayed: peer
                .path
                .endpoint
                .is_some_and(|used| peer.paths.is_relay(used)),
            active: now.mono < peer.path.active_until,
            candidates: peer.paths.candidates(),
            nat_mappings: &self.nat_mappings,
            last_resort: last_resort(&self.identity, &self.nat_mappings, peer),
            opening_peers: opening,
            probing_peers: probing,
        };
        let due = peer.birthday.due(&context, now.mono, &mut *self.rng);
        self.searches.enter(id, &peer.birthday, now.mono);
        for due in due {
            match due {
                Due::Punch(destinations, hop_limit) => {
                    self.punches.retain(|punch| punch.peer != id);
                    self.punches.push(Punch {
                        peer: id,
                        destinations,
                        hop_limit,
                    });
                }
                Due::Request(request) => self.send_probe_request(now, id, &request, outbox),
                Due::Probe(probe, ports) => self.probe_ports(now, id, probe, &ports, outbox),
            }
        }
    }

    /// Sends a probe request over the path in use. A lost one is repeated with the next punch.
    fn send_probe_request(
        &mut self,
        now: Now,
        id: PeerId,
        request: &ProbeRequest,
        outbox: &mut Outbox,
    ) {
        let sending = self.sending(now);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let Some(envelope) = super::outbound::envelope(peer, &sending, 0) else {
            return;
        };
        let current = &mut peer.sessions.current;
        let Some(mut session) = current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        let mut writer = RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
        if writer.ports(request).is_ok() && writer.finish().is_ok() {
            peer.timers.any_authenticated_packet_sent(now.mono);
        }
        peer.sessions.current = Some(session);
    }

    /// Sends the same record to all `ports`. The first copy that arrives is taken, the others are
    /// replays; the peer misses one record at most.
    fn probe_ports(
        &mut self,
        now: Now,
        id: PeerId,
        probe: Check,
        ports: &[SocketAddr],
        outbox: &mut Outbox,
    ) {
        let sending = self.sending(now);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let (Some((first, others)), Some(mut envelope)) = (
            ports.split_first(),
            super::outbound::envelope(peer, &sending, 0),
        ) else {
            return;
        };
        let current = &mut peer.sessions.current;
        let Some(mut session) = current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        envelope.destination.address = *first;
        envelope.destination.source = None;
        // The probe is a GSO run of its own.
        envelope.gso = false;
        // Probes have a limit of their own.
        let mut outgoing = Outgoing::default();
        let mut writer = RecordWriter::new(outbox, &mut session, &mut outgoing, envelope);
        if writer.probe(probe.id, probe.size.into()).is_ok() {
            for port in others {
                outbox.repeat(*port);
            }
            peer.birthday.on_probed(ports.len());
        }
        peer.sessions.current = Some(session);
    }
}

/// Time after which ports are opened here although no NAT of this host is symmetric, if the peer is
/// probably behind a NAT too.
fn last_resort(identity: &Identity, nat_mappings: &NatMappings, peer: &Peer) -> Option<Duration> {
    let is_behind_nat = !nat_mappings.is_symmetric()
        && nat_mappings.v4 == Mapping::EndpointIndependent
        && !nat_mappings.outer.is_empty();
    let factor = if *identity.public() < peer.public_key {
        1
    } else {
        2
    };
    (is_behind_nat && peer.paths.has_nat()).then_some(factor * LAST_RESORT_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::birthday::{MAX_PROBING, PORTS};
    use crate::keys::{PrivateKey, PublicKey};
    use crate::noise::Protocol;
    use crate::rng::Rng;
    use crate::tunnel::TunnelConfig;

    struct Zeros;

    impl Rng for Zeros {
        fn fill(&mut self, destination: &mut [u8]) {
            destination.fill(0);
        }
    }

    fn at(millis: u64) -> Now {
        Now {
            mono: Instant::BOOT + Duration::from_millis(1_000_000 + millis),
            wall: Duration::ZERO,
        }
    }

    /// A tunnel behind this NAT with ten thousand peers, all relayed and with the same outer
    /// address.
    fn tunnel(v4: Mapping) -> Tunnel {
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol: Protocol::Native,
            mode: crate::mode::Mode::Ip,
            private_key: PrivateKey::from_bytes([1; 32]),
            inner_mtu: 1420,
            offload: false,
            ciphers: Vec::new(),
            copy_dscp: false,
            repair: None,
            rng: Box::new(Zeros),
        });
        let v6 = Mapping::Unknown;
        tunnel.set_nat_mappings(
            NatMappings {
                v4,
                v6,
                outer: Vec::new(),
            },
            at(0).mono,
        );
        let relay: SocketAddr = "192.0.2.1:50000".parse().expect("an address");
        let address: SocketAddr = "203.0.113.9:4000".parse().expect("an address");
        for n in 0..10_000_u32 {
            let mut key = [7; 32];
            key[..4].copy_from_slice(&n.to_le_bytes());
            let id = tunnel.add_peer(PublicKey::from_bytes(key)).expect("a peer");
            tunnel.set_endpoint(id, relay);
            tunnel.set_relays(id, &[relay]);
            tunnel.set_candidates(id, &[address], at(0).mono);
            tunnel.peer_mut(id).expect("a peer").path.active_until = at(1_000_000).mono;
        }
        tunnel
    }

    /// Polls these peers; returns all busy ones.
    fn look(
        tunnel: &mut Tunnel,
        ids: std::ops::Range<u32>,
        millis: u64,
        is: fn(&Birthday, Instant) -> bool,
    ) -> Vec<u32> {
        let mut outbox = Outbox::new(1 << 20);
        for id in ids {
            tunnel.search_ports(at(millis), PeerId(id), &mut outbox);
        }
        let busy = |peer: &&Peer| is(&peer.birthday, at(millis).mono);
        let mut busy: Vec<u32> = tunnel.peers().filter(busy).map(|peer| peer.id.0).collect();
        busy.sort_unstable();
        busy
    }

    #[test]
    fn four_of_ten_thousand_requesting_peers_are_probed_for() {
        let mut tunnel = tunnel(Mapping::EndpointIndependent);
        for peer in tunnel.peers.iter_mut().flatten() {
            peer.birthday.on_request(ProbeRequest {
                ports: PORTS,
                addresses: vec!["203.0.113.9".parse().expect("an address")],
            });
        }
        let mut look = |ids, millis, expected: [u32; MAX_PROBING]| {
            let busy = look(&mut tunnel, ids, millis, Birthday::is_probing);
            assert_eq!(busy, expected);
            assert_eq!(tunnel.searches.probing.len(), MAX_PROBING);
        };
        look(0..5000, 0, [0, 1, 2, 3]);
        // They have no sessions, so their runs stall within two seconds and make way for others.
        look(5000..10_000, 2000, [5000, 5001, 5002, 5003]);
        look(0..10_000, 2050, [5000, 5001, 5002, 5003]);
        let sent = tunnel.peers().map(|peer| peer.birthday.probes());
        assert_eq!(sent.sum::<u64>(), 0);
    }

    #[test]
    fn a_removed_peer_frees_its_slot_and_is_not_punched_for() {
        let own = vec!["198.51.100.7".parse().expect("an address")];
        let mut tunnel = tunnel(Mapping::AddressAndPortDependent(own));
        look(&mut tunnel, 0..10_000, 0, Birthday::is_open);
        look(&mut tunnel, 0..10_000, 3000, Birthday::is_open);
        tunnel.remove_peer(PeerId(0));
        // The next peer gets the number of the removed one.
        let punches = tunnel.take_punches();
        let punches: Vec<PeerId> = punches.iter().map(|punch| punch.peer).collect();
        assert_eq!(punches, [PeerId(1)]);
        let next = look(&mut tunnel, 0..10_000, 6000, Birthday::is_open);
        assert_eq!(next, [1, 2]);
    }

    #[test]
    fn ports_are_open_for_two_of_ten_thousand_unreachable_peers() {
        let own = vec!["198.51.100.7".parse().expect("an address")];
        let mut tunnel = tunnel(Mapping::AddressAndPortDependent(own));
        let mut look = |millis, expected: &[u32]| {
            let busy = look(&mut tunnel, 0..10_000, millis, Birthday::is_open);
            assert_eq!(busy, expected);
            assert_eq!(tunnel.searches.opening.len(), expected.len());
        };
        look(0, &[]);
        look(3000, &[0, 1]);
        // Their ports close after 15 s.
        look(18_000, &[2, 3]);
    }
}

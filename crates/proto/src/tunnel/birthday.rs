//! The search for a port of a symmetric NAT: between a peer's part of it, the driver and the session.

use super::{Now, Tunnel};
use crate::birthday::{Ask, Birthday, Due, Knock, Outside, Scene};
use crate::constants::{REKEY_ON_RECEIVE_AFTER, REKEY_TIMEOUT};
use crate::indices::PeerId;
use crate::native::record::{Outgoing, RecordWriter};
use crate::outbox::Outbox;
use crate::paths::Check;
use crate::peer::Peer;
use crate::time::Instant;
use crate::timers::SessionAge;
use std::net::SocketAddr;

/// The peers that ports are open for, and that are sprayed for: so few that each asking is looked at with all of them.
#[derive(Debug, Default)]
pub(super) struct Searches {
    opening: Vec<PeerId>,
    spraying: Vec<PeerId>,
}

impl Searches {
    /// How many there are of each, without one.
    fn others(&mut self, peers: &[Option<Peer>], id: PeerId, now: Instant) -> (usize, usize) {
        let busy = |id: PeerId, is: fn(&Birthday, Instant) -> bool| {
            let peer = peers.get(id.0 as usize).and_then(Option::as_ref);
            peer.is_some_and(|peer| is(&peer.birthday, now))
        };
        self.opening.retain(|id| busy(*id, Birthday::is_open));
        self.spraying.retain(|id| busy(*id, Birthday::is_spraying));
        let others = |all: &[PeerId]| all.iter().filter(|other| **other != id).count();
        (others(&self.opening), others(&self.spraying))
    }

    /// What one is at now.
    fn enter(&mut self, id: PeerId, birthday: &Birthday, now: Instant) {
        if birthday.is_open(now) && !self.opening.contains(&id) {
            self.opening.push(id);
        }
        if birthday.is_spraying(now) && !self.spraying.contains(&id) {
            self.spraying.push(id);
        }
    }
}

impl Tunnel {
    /// Tells what is before this host. What was in vain before may not be now.
    pub fn set_outside(&mut self, outside: Outside, now: Instant) {
        if outside == self.outside {
            return;
        }
        self.outside = outside;
        for id in self.by_key.values().copied().collect::<Vec<_>>() {
            if let Some(peer) = self.peer_mut(id) {
                peer.birthday.look_again(now);
            }
            self.reschedule(id, now, now);
        }
    }

    /// What is before this host.
    pub fn outside(&self) -> &Outside {
        &self.outside
    }

    /// Where ports are to be opened, or kept open, since this was last asked: the driver knocks, and reports by [`Tunnel::knocked`].
    pub fn take_knocks(&mut self) -> Vec<Knock> {
        std::mem::take(&mut self.knocks)
    }

    /// The driver has knocked from so many sockets; none: it could not.
    pub fn knocked(&mut self, id: PeerId, ports: u16, now: Instant) {
        if let Some(peer) = self.peer_mut(id) {
            peer.birthday.knocked(ports, now);
        }
        self.reschedule(id, now, now);
    }

    /// Something authentic came in by one of the sockets, which is kept; the others need not be.
    pub fn met(&mut self, id: PeerId, now: Instant) {
        if let Some(peer) = self.peer_mut(id) {
            peer.birthday.met(now);
            // Checks that were sent before went by another socket.
            peer.paths.restart_checks();
        }
        self.reschedule(id, now, now);
    }

    /// Whether sockets that were opened for a peer are still needed.
    pub fn is_open(&self, id: PeerId, now: Instant) -> bool {
        self.peer(id).is_some_and(|peer| {
            let relay = |used| peer.paths.is_relay(used);
            peer.birthday.is_open(now) && peer.path.endpoint.is_some_and(relay)
        })
    }

    /// Has a peer's way that is in use stay open in the NATs, if it is that address, for no longer than the session lasts: what came
    /// near its end would have the peer renew it, and that for ever.
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

    pub(super) fn search_ports(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let (opening, spraying) = self.searches.others(&self.peers, id, now.mono);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let scene = Scene {
            relayed: peer
                .path
                .endpoint
                .is_some_and(|used| peer.paths.is_relay(used)),
            active: now.mono < peer.path.active_until,
            candidates: peer.paths.candidates(),
            outside: &self.outside,
            opening,
            spraying,
        };
        let due = peer.birthday.due(&scene, now.mono, &mut *self.rng);
        self.searches.enter(id, &peer.birthday, now.mono);
        for due in due {
            match due {
                Due::Knock(towards) => {
                    self.knocks.retain(|knock| knock.peer != id);
                    self.knocks.push(Knock { peer: id, towards });
                }
                Due::Ask(ask) => self.send_ask(now, id, &ask, outbox),
                Due::Spray(probe, ports) => self.spray(now, id, probe, &ports, outbox),
            }
        }
    }

    /// By the way in use. What is lost is asked again with the next knock.
    fn send_ask(&mut self, now: Now, id: PeerId, ask: &Ask, outbox: &mut Outbox) {
        let sending = self.sending(now);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let Some(envelope) = super::outbound::envelope(peer, &sending, 0) else {
            return;
        };
        let may_send = |s: &mut Box<_>| super::outbound::may_send(s, now.mono);
        let Some(mut session) = peer.sessions.current.take_if(may_send) else {
            return;
        };
        let mut writer = RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
        if writer.ports(ask).is_ok() && writer.finish().is_ok() {
            peer.timers.any_authenticated_packet_sent(now.mono);
        }
        peer.sessions.current = Some(session);
    }

    /// One record goes to all: of those that arrive the first is the record, and the others are repeats of it, so that the far end
    /// misses one at most.
    fn spray(
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
        let may_send = |s: &mut Box<_>| super::outbound::may_send(s, now.mono);
        let Some(mut session) = peer.sessions.current.take_if(may_send) else {
            return;
        };
        envelope.destination.address = *first;
        envelope.destination.source = None;
        // In a run of its own.
        envelope.gso = false;
        // What is sprayed has a bound of its own.
        let mut outgoing = Outgoing::default();
        let mut writer = RecordWriter::new(outbox, &mut session, &mut outgoing, envelope);
        if writer.probe(probe.id, probe.size.into()).is_ok() {
            peer.path.mtu.check_sent(session.local_index);
            for port in others {
                outbox.repeat(*port);
            }
            peer.birthday.sprayed(ports.len());
        }
        peer.sessions.current = Some(session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::birthday::{MAX_SPRAYING, Mapping, PORTS};
    use crate::keys::{PrivateKey, PublicKey};
    use crate::noise::Protocol;
    use crate::rng::Rng;
    use crate::tunnel::TunnelConfig;
    use std::time::Duration;

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

    /// A tunnel behind this with ten thousand peers, all by a relay and seen as one address.
    fn tunnel(v4: Mapping) -> Tunnel {
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol: Protocol::Native,
            private_key: PrivateKey::from_bytes([1; 32]),
            inner_mtu: 1420,
            offload: false,
            ciphers: Vec::new(),
            copy_dscp: false,
            rng: Box::new(Zeros),
        });
        let v6 = Mapping::Unknown;
        tunnel.set_outside(Outside { v4, v6 }, at(0).mono);
        let relay: SocketAddr = "192.0.2.1:50000".parse().expect("an address");
        let told: SocketAddr = "203.0.113.9:4000".parse().expect("an address");
        for n in 0..10_000_u32 {
            let mut key = [7; 32];
            key[..4].copy_from_slice(&n.to_le_bytes());
            let id = tunnel.add_peer(PublicKey::from_bytes(key)).expect("a peer");
            tunnel.set_endpoint(id, relay);
            tunnel.set_relays(id, &[relay]);
            tunnel.set_candidates(id, &[told], at(0).mono);
            tunnel.peer_mut(id).expect("a peer").path.active_until = at(1_000_000).mono;
        }
        tunnel
    }

    /// Has all of these looked at; which of all are busy then.
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
    fn of_ten_thousand_that_ask_four_are_sprayed_for_and_no_more_are_remembered_than_those() {
        let mut tunnel = tunnel(Mapping::Alike);
        for peer in tunnel.peers.iter_mut().flatten() {
            peer.birthday.asked(Ask {
                ports: PORTS,
                addresses: vec!["203.0.113.9".parse().expect("an address")],
            });
        }
        let mut look = |ids, millis, expected: [u32; MAX_SPRAYING]| {
            let busy = look(&mut tunnel, ids, millis, Birthday::is_spraying);
            assert_eq!(busy, expected);
            assert_eq!(tunnel.searches.spraying.len(), MAX_SPRAYING);
        };
        look(0..5000, 0, [0, 1, 2, 3]);
        // They have no sessions: two seconds later their sprays have come to a standstill, and do not go on beside others'.
        look(5000..10_000, 2000, [5000, 5001, 5002, 5003]);
        look(0..10_000, 2050, [5000, 5001, 5002, 5003]);
        let sent = tunnel.peers().map(|peer| peer.birthday.probes());
        assert_eq!(sent.sum::<u64>(), 0);
    }

    #[test]
    fn who_is_removed_makes_room_for_another_and_is_not_knocked_at() {
        let own = vec!["198.51.100.7".parse().expect("an address")];
        let mut tunnel = tunnel(Mapping::PerDestination(own));
        look(&mut tunnel, 0..10_000, 0, Birthday::is_open);
        look(&mut tunnel, 0..10_000, 3000, Birthday::is_open);
        tunnel.remove_peer(PeerId(0));
        // Who comes next is given its number.
        let knocks = tunnel.take_knocks();
        let knocks: Vec<PeerId> = knocks.iter().map(|knock| knock.peer).collect();
        assert_eq!(knocks, [PeerId(1)]);
        let next = look(&mut tunnel, 0..10_000, 6000, Birthday::is_open);
        assert_eq!(next, [1, 2]);
    }

    #[test]
    fn of_ten_thousand_that_are_out_of_reach_ports_are_open_for_two() {
        let own = vec!["198.51.100.7".parse().expect("an address")];
        let mut tunnel = tunnel(Mapping::PerDestination(own));
        let mut look = |millis, expected: &[u32]| {
            let busy = look(&mut tunnel, 0..10_000, millis, Birthday::is_open);
            assert_eq!(busy, expected);
            assert_eq!(tunnel.searches.opening.len(), expected.len());
        };
        look(0, &[]);
        look(3000, &[0, 1]);
        // 15 s later they are closed.
        look(18_000, &[2, 3]);
    }
}

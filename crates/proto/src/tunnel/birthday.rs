//! The search for a port of a symmetric NAT: between a peer's part of it, the driver and the session.

use super::{Now, Tunnel};
use crate::birthday::{Ask, Birthday, Due, Knock, Outside, Scene};
use crate::indices::PeerId;
use crate::native::record::RecordWriter;
use crate::outbox::Outbox;
use crate::paths::Check;
use crate::time::Instant;
use std::net::SocketAddr;

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
        }
    }

    /// Whether sockets that were opened for a peer are still needed.
    pub fn is_open(&self, id: PeerId, now: Instant) -> bool {
        self.peer(id).is_some_and(|peer| {
            let relay = |used| peer.paths.is_relay(used);
            peer.birthday.is_open(now) && peer.path.endpoint.is_some_and(relay)
        })
    }

    /// Has a peer's way that is in use stay open in the NATs, if it is that address.
    pub fn keep_alive(&mut self, now: Now, id: PeerId, address: SocketAddr, outbox: &mut Outbox) {
        let used = self.peer(id).and_then(|peer| peer.path.endpoint);
        if used == Some(address) {
            self.send_keepalive(now, id, outbox);
        }
    }

    pub(super) fn search_ports(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let others = |busy: fn(&Birthday, Instant) -> bool| {
            let others = self.peers.iter().flatten().filter(|peer| peer.id != id);
            others.filter(|peer| busy(&peer.birthday, now.mono)).count()
        };
        let Some(peer) = self.peer(id) else { return };
        // Counting the others takes time: only if it counts.
        let matters = peer.birthday.is_due(now.mono);
        let opening = if matters {
            others(Birthday::is_open)
        } else {
            0
        };
        let spraying = match matters {
            true => others(Birthday::is_spraying),
            false => 0,
        };
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let scene = Scene {
            relayed: peer
                .path
                .endpoint
                .is_some_and(|used| peer.paths.is_relay(used)),
            active: now.mono < peer.path.active_until,
            ways: peer.paths.ways(),
            outside: &self.outside,
            opening,
            spraying,
        };
        for due in peer.birthday.due(&scene, now.mono, &mut *self.rng) {
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
        let mut writer = RecordWriter::new(outbox, &mut session, &mut peer.path.next_id, envelope);
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
        let mut writer = RecordWriter::new(outbox, &mut session, &mut peer.path.next_id, envelope);
        if writer.probe(probe.id, probe.size.into()).is_ok() {
            peer.path.mtu.check_sent(session.local_index);
            for port in others {
                outbox.repeat(*port);
            }
        }
        peer.sessions.current = Some(session);
    }
}

//! The punch sockets' part of the worker's loop.

use crate::node::Node;
use crate::system::now;
use seikan_proto::indices::PeerId;
use seikan_sys::poll::Epoll;
use seikan_sys::udp::ReceiveMeta;

/// A batch received by a punch socket, before the tunnel has authenticated it.
pub(super) struct PunchedReceive {
    token: u64,
    peer: PeerId,
    /// Authentic bytes received from the peer before.
    received: u64,
}

impl Node {
    /// Returns the expected sender of a batch, if one of its datagrams has the expected source address.
    pub(super) fn punched_receive(
        &self,
        token: u64,
        metas: &[ReceiveMeta],
    ) -> Option<PunchedReceive> {
        let peer = self.sockets.punch.expected_peer(token, metas)?;
        let received = self.received_bytes(peer);
        Some(PunchedReceive {
            token,
            peer,
            received,
        })
    }

    /// Marks the socket if the tunnel has authenticated a datagram of the batch.
    pub(super) fn on_punched_receive(&mut self, receive: &PunchedReceive) {
        if self.received_bytes(receive.peer) <= receive.received {
            return;
        }
        let now = now().mono;
        if let Some(peer) = self.sockets.punch.note_received(receive.token, now) {
            self.tunnel.on_punch_succeeded(peer, now);
        }
    }

    fn received_bytes(&self, peer: PeerId) -> u64 {
        let peer = self.tunnel.peer(peer);
        peer.map_or(0, |peer| peer.counters.received_bytes)
    }

    /// Opens requested sockets, and closes useless ones.
    pub(super) fn poll_punches(&mut self, epoll: &Epoll) {
        let punches = self.tunnel.take_punches();
        if punches.is_empty() && self.sockets.punch.wakeup().is_none() {
            return;
        }
        let now = now();
        let is_open = |peer| self.tunnel.is_open(peer, now.mono);
        self.sockets.punch.add_requests(punches, is_open);
        if let Some((peer, ports)) = self.sockets.continue_punch(epoll, now.mono) {
            self.tunnel.on_punched(peer, ports, now.mono);
        }
        if !self.sockets.punch.is_check_due(now.mono) {
            return;
        }
        let tunnel = &self.tunnel;
        let is_open = |peer| tunnel.is_open(peer, now.mono);
        let is_used = |peer, address| {
            let peer = tunnel.peer(peer);
            peer.is_some_and(|p| p.path.endpoint == Some(address) && p.has_session(now.mono))
        };
        let keepalives = self.sockets.punch.check(now.mono, is_open, is_used);
        for (peer, address) in keepalives {
            self.tunnel.keep_alive(now, peer, address, &mut self.outbox);
        }
        self.transmit();
    }
}

//! Two gateways on one local network: active and standby.
//!
//! The standby gateway listens on the local network and sends nothing else: no ARP answers, and nothing to
//! remotes, which know both gateways as the same peer.

use super::GatewayNode;
use crate::node::{Node, SystemRandom, now};
use seikan_observe::DropReason;
use seikan_proto::time::Instant;
use seikan_wire::VNET_HDR_LEN;

impl GatewayNode {
    /// Whether this gateway is on standby.
    pub fn is_standby(&self) -> bool {
        self.lan
            .as_ref()
            .is_some_and(|lan| !lan.responder.is_active())
    }

    /// Drops `packets` received from the TUN device or a socket, without handling them.
    pub(crate) fn drop_as_standby(&mut self, packets: u64) {
        self.gateway.drop_unattributed(DropReason::Standby, packets);
    }

    /// Handles an advert of the other gateway.
    pub(super) fn receive(&mut self, payload: &[u8]) {
        let election = self.lan.as_mut().and_then(|lan| lan.election.as_mut());
        if let Some(election) = election {
            // An advert that fails authentication has no effect; it was counted as consumed nevertheless.
            election.receive(now().mono, payload);
        }
    }

    pub(super) fn election_wakeup(&self) -> Option<Instant> {
        let election = self.lan.as_ref()?.election.as_ref()?;
        Some(election.next_wakeup())
    }
}

impl Node {
    /// Sends an advert if one is due, and acts on the election's result.
    pub(crate) fn poll_election(&mut self) {
        let Some(GatewayNode {
            lan: Some(lan),
            gateway,
            ..
        }) = &mut self.gateway
        else {
            return;
        };
        let card = lan.link.mac;
        let now = now();
        let Some(election) = &mut lan.election else {
            return;
        };
        let frame = election.poll(now.mono, card, &mut SystemRandom);
        let active = election.is_active();
        if let Some(frame) = frame {
            lan.send_own(&[&[0; VNET_HDR_LEN][..], &frame].concat());
        }
        if active == lan.responder.is_active() {
            return;
        }
        lan.responder.set_active(active);
        if active {
            lan.responder.announce(now.mono, gateway);
            self.tunnel.greet(now, &mut self.outbox);
            self.transmit();
            self.send_made();
        } else {
            self.tunnel.end_sessions();
        }
    }

    /// Tells the other gateway that this one stops.
    pub(crate) fn leave_election(&mut self) {
        let lan = self
            .gateway
            .as_mut()
            .and_then(|gateway| gateway.lan.as_mut());
        if let Some(lan) = lan
            && let Some(election) = &mut lan.election
        {
            let frame = election.leave(lan.link.mac, &mut SystemRandom);
            lan.send_own(&[&[0; VNET_HDR_LEN][..], &frame].concat());
        }
    }
}

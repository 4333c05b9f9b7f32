//! Two gateways on one local network: becoming active, and standing by.
//!
//! One that stands by listens on the local network and is silent everywhere else: no ARP answers, and
//! nothing to remotes, for whom it is the same peer as the active one.

use super::GatewayNode;
use crate::node::{Node, SystemRandom, now};
use seikan_observe::DropReason;
use seikan_proto::time::Instant;
use seikan_wire::VNET_HDR_LEN;

impl GatewayNode {
    /// Whether the other gateway is active.
    pub fn stands_by(&self) -> bool {
        self.lan
            .as_ref()
            .is_some_and(|lan| !lan.responder.is_active())
    }

    /// Passes over what the TUN device or a socket has, `packets` of it.
    pub(crate) fn drop_standing_by(&mut self, packets: u64) {
        self.gateway.drop_unattributed(DropReason::Standby, packets);
    }

    /// An advert of the other gateway.
    pub(super) fn receive(&mut self, payload: &[u8]) {
        let election = self.lan.as_mut().and_then(|lan| lan.election.as_mut());
        if let Some(election) = election {
            // One that is not believed says nothing; it was counted as consumed all the same.
            election.receive(now().mono, payload);
        }
    }

    pub(super) fn election_wakeup(&self) -> Option<Instant> {
        let election = self.lan.as_ref()?.election.as_ref()?;
        Some(election.next_wakeup())
    }
}

impl Node {
    /// Sends the advert that is due, and acts on what the election says.
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

    /// Tells the other gateway that this one ends.
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

//! Two gateways on one local network: active and standby.
//!
//! The standby gateway listens on the local network and sends nothing else: no ARP answers, and nothing to
//! remotes, which know both gateways as the same peer.

use super::GatewayNode;
use crate::system::now;
use seikan_observe::DropReason;
use seikan_proto::time::Instant;

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
    pub(crate) fn receive(&mut self, payload: &[u8]) {
        let election = self.lan.as_mut().and_then(|lan| lan.election.as_mut());
        if let Some(election) = election {
            // An advert that fails authentication has no effect; it was counted as consumed nevertheless.
            election.receive(now().mono, payload);
        }
    }

    pub(crate) fn election_wakeup(&self) -> Option<Instant> {
        let election = self.lan.as_ref()?.election.as_ref()?;
        Some(election.next_wakeup())
    }
}

//! Datagrams between an allocation and the tunnel.

use super::{Allocation, By, may_call, open_peer, turn_time};
use crate::transport::{Core, Message};
use seikan_observe::DropReason;
use seikan_proto::time::Instant;
use std::net::SocketAddr;
use std::ops::Range;
use std::slice::Chunks;
use stun_types::attribute::ErrorCode;
use stun_types::message::{Message as StunMessage, MessageClass};
use turn_client_proto::api::{Transmit as TurnTransmit, TurnRecvRet};
use turn_client_proto::prelude::{DelayedTransmitBuild as _, TurnClientApi as _};
use turn_client_proto::types::TransportType;

/// Maximum length of one message, in bytes.
const MAX_MESSAGE: usize = 1 << 16;

impl Allocation {
    /// Handles one message from the server.
    pub(super) fn take(&mut self, core: &mut Core, now: Instant, message: &mut Message<'_>) {
        self.last_received = now;
        self.unanswered_keepalives = 0;
        let bytes = message.bytes();
        if let Some(code) = error_code(bytes) {
            self.code = code;
        }
        let transport = match self.at.by {
            By::Udp => TransportType::Udp,
            By::Tcp | By::Tls => TransportType::Tcp,
        };
        let received = TurnTransmit::new(bytes, transport, self.at.server, self.own);
        let (peer, position) = match self.client.recv(received, turn_time(now)) {
            TurnRecvRet::PeerData(data) => (data.peer, position(bytes, data.data())),
            // The answer to a keepalive.
            TurnRecvRet::Ignored(_) if bytes.starts_with(&[0x01, 0x01]) => return,
            TurnRecvRet::Ignored(_) => return core.drop(DropReason::UnknownType, 1),
            TurnRecvRet::Handled | TurnRecvRet::PeerIcmp { .. } => return,
        };
        let start = message.range.start;
        let data = position.map(|part| start + part.start..start + part.end);
        match (peer_address(core, peer, now), data) {
            (Some(local), Some(data)) => {
                core.report(local);
                message.deliver(core, local, data);
            }
            _ => core.drop(DropReason::NoChannel, 1),
        }
    }

    /// Sends datagrams from the tunnel to a peer.
    pub(super) fn forward_out(
        &mut self,
        core: &mut Core,
        now: Instant,
        to: SocketAddr,
        datagrams: Chunks<'_, u8>,
    ) {
        // A channel is requested only now: a peer that the tunnel does not answer needs none.
        // Datagrams are sent without a channel too.
        if let Some(local) = core.peers.at(&to) {
            let _ = self.bind(core, local, now);
        }
        for datagram in datagrams {
            let message = self
                .client
                .send_to(TransportType::Udp, to, datagram, turn_time(now));
            let Ok(Some(message)) = message else {
                core.drop(DropReason::NoChannel, 1);
                continue;
            };
            let length = message.data.len();
            if length > MAX_MESSAGE {
                core.drop(DropReason::SendTooLarge, 1);
                continue;
            }
            if !self.outward.fits(length) {
                self.flush_outward(core);
            }
            message.data.write_into(self.outward.reserve(length));
        }
        self.flush_outward(core);
    }

    fn flush_outward(&mut self, core: &mut Core) {
        let counters = &mut core.counters;
        counters.sent += core.link.send(&self.outward, &mut counters.drops);
        self.outward.clear();
    }
}

/// Returns the tunnel's address for the sender of a datagram, and opens one if necessary; `None` if
/// none may be opened.
pub(super) fn peer_address(core: &mut Core, peer: SocketAddr, now: Instant) -> Option<SocketAddr> {
    match core.peers.at(&peer) {
        Some(local) => Some(local),
        None if may_call(core, peer) => open_peer(core, peer, now),
        None => None,
    }
}

/// Returns the position of `part` in `message`; `None` if `part` is empty or outside of the
/// message. The library returns a copy only for incomplete messages, which are never passed to it.
fn position(message: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let start = part.as_ptr().addr().checked_sub(message.as_ptr().addr())?;
    let end = start.checked_add(part.len())?;
    (start < end && end <= message.len()).then_some(start..end)
}

/// Returns the error code of a response (RFC 8489, section 14.8).
fn error_code(bytes: &[u8]) -> Option<u16> {
    // Error responses have class 0b11; this fast check excludes data.
    let [high, low] = *bytes.first_chunk()?;
    if high & 0xc1 != 0x01 || low & 0x10 == 0 {
        return None;
    }
    let message = StunMessage::from_bytes(bytes).ok()?;
    if !message.has_class(MessageClass::Error) {
        return None;
    }
    message
        .attribute::<ErrorCode>()
        .ok()
        .map(|code| code.code())
}

#[cfg(test)]
mod tests {
    use super::*;
    use stun_types::message::{
        BINDING, Message, MessageWrite as _, MessageWriteExt as _, MessageWriteVec,
    };

    #[test]
    fn an_error_is_known_by_its_code_and_data_is_none() {
        let request = Message::builder_request(BINDING, MessageWriteVec::new()).finish();
        let request = Message::from_bytes(&request).expect("a request");
        let mut error = Message::builder_error(&request, MessageWriteVec::new());
        let code = ErrorCode::builder(486).build().expect("a code");
        error.add_attribute(&code).expect("room");
        assert_eq!(error_code(&error.finish()), Some(486));
        let success = Message::builder_success(&request, MessageWriteVec::new()).finish();
        assert_eq!(error_code(&success), None);
        // A ChannelData message; the beginning of an error response.
        for other in [&[0x41, 0x11, 0, 1, 1][..], &[0x01, 0x11], &[]] {
            assert_eq!(error_code(other), None, "{other:?}");
        }
    }
}

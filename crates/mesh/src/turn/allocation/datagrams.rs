//! Datagrams between an allocation and the tunnel.

use super::{Allocation, Ended};
use crate::forward::{MAX_MESSAGE, MAX_RECEIVES, SERVER};
use crate::turn::link::Link;
use seikan_observe::DropReason;
use seikan_sys::udp::ReceiveBatch;
use std::net::SocketAddr;
use std::time::Instant;
use stun_types::attribute::ErrorCode;
use stun_types::message::{Message, MessageClass};
use turn_client_proto::api::{Transmit as TurnTransmit, TurnRecvRet};
use turn_client_proto::prelude::{DelayedTransmitBuild as _, TurnClientApi as _};
use turn_client_proto::types::TransportType;

impl Allocation {
    /// Forwards messages of the server to the tunnel.
    pub(super) fn forward_in(&mut self, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        for _ in 0..MAX_RECEIVES {
            let more = match &mut self.link {
                Link::Udp(..) => self.datagrams(batch)?,
                Link::Stream(_) => self.messages()?,
            };
            if !more {
                break;
            }
        }
        self.hub.proxies.flush();
        self.flush_stream()
    }

    /// Receives one batch from the server; returns whether there may be more.
    fn datagrams(&mut self, batch: &mut ReceiveBatch) -> Result<bool, Ended> {
        let Link::Udp(socket, overflow) = &mut self.link else {
            return Ok(false);
        };
        // An error belongs to an earlier send, whose loss is detected elsewhere.
        if !socket.receive(batch).is_ok_and(|filled| filled > 0) {
            overflow.count(socket, &mut self.hub.proxies.counters.drops);
            return Ok(false);
        }
        let (metas, arena) = batch.parts_mut();
        for meta in metas {
            let count = meta.length.div_ceil(meta.segment_size.max(1)).max(1) as u64;
            if meta.source != self.server {
                self.hub
                    .proxies
                    .counters
                    .drops
                    .add(DropReason::UnknownSource, count);
            } else if meta.truncated {
                self.hub
                    .proxies
                    .counters
                    .drops
                    .add(DropReason::Truncated, count);
            } else {
                for segment in meta.segments() {
                    self.take(arena.get(segment).unwrap_or_default())?;
                }
            }
        }
        Ok(true)
    }

    /// Reads messages from the stream; returns whether there may be more.
    fn messages(&mut self) -> Result<bool, Ended> {
        let Link::Stream(stream) = &mut self.link else {
            return Ok(false);
        };
        if !stream.receive().map_err(|error| self.lost(error))? {
            return Ok(false);
        }
        let mut message = Vec::new();
        while let Link::Stream(stream) = &mut self.link {
            let Some(next) = stream.peek().map_err(Ended::Lost)? else {
                break;
            };
            message.clear();
            message.extend_from_slice(next);
            stream.take();
            self.take(&message)?;
        }
        Ok(true)
    }

    /// Handles one message of the server.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        self.last_received = Instant::now();
        self.unanswered_keepalives = 0;
        if let Some(code) = error_code(bytes) {
            self.code = code;
        }
        let now = self.now();
        let transport = match self.link {
            Link::Udp(..) => TransportType::Udp,
            Link::Stream(_) => TransportType::Tcp,
        };
        let message = TurnTransmit::new(bytes, transport, self.server, self.own);
        match self.client.recv(message, now) {
            TurnRecvRet::PeerData(data) => self.forward_inward(data.peer, data.data()),
            // The answer to a keepalive.
            TurnRecvRet::Ignored(_) if bytes.starts_with(&[0x01, 0x01]) => Ok(()),
            TurnRecvRet::Ignored(_) => {
                self.hub
                    .proxies
                    .counters
                    .drops
                    .add(DropReason::UnknownType, 1);
                Ok(())
            }
            TurnRecvRet::Handled | TurnRecvRet::PeerIcmp { .. } => Ok(()),
        }
    }

    /// Forwards a datagram of a peer to the tunnel.
    pub(super) fn forward_inward(&mut self, peer: SocketAddr, data: &[u8]) -> Result<(), Ended> {
        let proxy = match self.hub.proxies.at(&peer) {
            Some(token) => Some(token),
            None if self.may_call(peer) => self.open(peer),
            None => None,
        };
        let Some(token) = proxy.filter(|_| !data.is_empty()) else {
            self.hub
                .proxies
                .counters
                .drops
                .add(DropReason::NoChannel, 1);
            return Ok(());
        };
        self.hub.report_proxy(token)?;
        self.hub.proxies.deliver(token, data);
        Ok(())
    }

    /// Forwards datagrams of the tunnel from a proxy socket.
    pub(super) fn forward_out(
        &mut self,
        token: u64,
        batch: &mut ReceiveBatch,
    ) -> Result<(), Ended> {
        let Some(peer) = self.hub.proxies.get_mut(token).map(|proxy| proxy.peer) else {
            return Ok(());
        };
        for _ in 0..MAX_RECEIVES {
            if !self.hub.proxies.receive(token, batch) {
                break;
            }
            // Only now: a peer without an answer of the tunnel needs no channel. Without one, datagrams are
            // sent as well.
            let _ = self.bind(token);
            let (metas, arena) = batch.parts_mut();
            for meta in metas {
                if self.hub.proxies.is_whole(meta) {
                    for segment in meta.segments() {
                        self.forward_outward(peer, arena.get(segment).unwrap_or_default());
                    }
                }
            }
        }
        self.flush_outward();
        self.flush_stream()
    }

    /// Forwards a datagram of the tunnel to a peer.
    fn forward_outward(&mut self, peer: SocketAddr, data: &[u8]) {
        let now = self.now();
        let Ok(Some(message)) = self.client.send_to(TransportType::Udp, peer, data, now) else {
            return self
                .hub
                .proxies
                .counters
                .drops
                .add(DropReason::NoChannel, 1);
        };
        let length = message.data.len();
        if length > MAX_MESSAGE {
            return self
                .hub
                .proxies
                .counters
                .drops
                .add(DropReason::SendTooLarge, 1);
        }
        if !self.outward.fits(SERVER, length) {
            self.flush_outward();
        }
        message
            .data
            .write_into(self.outward.reserve(SERVER, length));
    }

    fn flush_outward(&mut self) {
        let counters = &mut self.hub.proxies.counters;
        let sent = self
            .link
            .send(self.server, &self.outward, &mut counters.drops);
        counters.sent += sent;
        self.outward.clear();
    }
}

/// Returns the error code of a response (RFC 8489, section 14.8).
fn error_code(bytes: &[u8]) -> Option<u16> {
    // Error responses have class 0b11; this fast check excludes data.
    let [high, low] = *bytes.first_chunk()?;
    if high & 0xc1 != 0x01 || low & 0x10 == 0 {
        return None;
    }
    let message = Message::from_bytes(bytes).ok()?;
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
    use stun_types::message::{BINDING, MessageWrite as _, MessageWriteExt as _, MessageWriteVec};

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

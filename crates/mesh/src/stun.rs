//! STUN binding requests (RFC 8489), sent from the tunnel's socket to learn this host's reflexive addresses.
//!
//! The worker sends the requests and passes datagrams that [`is_answer`] recognises to the agent instead of the
//! tunnel; no message of either tunnel protocol begins like them.

use crate::event::{AgentEvent, Gone, Worker};
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use stun_types::attribute::{AttributeStaticType as _, XorMappedAddress};
use stun_types::message::{
    BINDING, Message, MessageClass, MessageHeader, MessageWrite as _, MessageWriteVec,
    TransactionId,
};
use tokio::sync::oneshot;

/// The magic cookie (RFC 8489, section 5).
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// Types of binding responses, success and error (sections 5 and 18.2).
const RESPONSES: [[u8; 2]; 2] = [[0x01, 0x01], [0x01, 0x11]];
/// Size of a header in bytes.
const HEADER: usize = 20;
/// First byte and minimum length in bytes of a binding response.
pub const SHORTEST_ANSWER: (u8, u16) = (RESPONSES[0][0], HEADER as u16);
/// Maximum size of a response in bytes.
const MAX_ANSWER: usize = 1500;

/// Number of transmissions of a request.
const ATTEMPTS: u32 = 3;
/// Timeout of the first transmission; doubled for each further one (RFC 8489, section 6.2.1).
const FIRST_PATIENCE: Duration = Duration::from_millis(500);

/// Transaction id, which matches a response to its request.
type Transaction = [u8; 12];

/// Requests from the tunnel's socket that wait for a response.
#[derive(Default)]
pub(super) struct PendingRequests {
    pending: RefCell<HashMap<Transaction, oneshot::Sender<Box<[u8]>>>>,
}

impl PendingRequests {
    /// Sends a request to a server, again after each timeout; returns the response. The transaction id is the
    /// message's.
    pub(super) async fn ask(
        &self,
        worker: &Worker,
        server: SocketAddr,
        message: &[u8],
    ) -> Result<Option<Box<[u8]>>, Gone> {
        let Some(id) = transaction(message) else {
            return Ok(None);
        };
        let (answer, mut answered) = oneshot::channel();
        self.pending.borrow_mut().insert(id, answer);
        // The caller may be cancelled before a response arrives.
        let _pending = Pending { requests: self, id };
        let mut patience = FIRST_PATIENCE;
        for _ in 0..ATTEMPTS {
            worker.send(AgentEvent::Send {
                bytes: message.to_vec(),
                to: server,
            })?;
            if let Ok(Ok(answer)) = tokio::time::timeout(patience, &mut answered).await {
                return Ok(Some(answer));
            }
            patience *= 2;
        }
        Ok(None)
    }

    /// Passes a response to its requester; drops it if there is none.
    pub(super) fn answered(&self, bytes: Box<[u8]>) {
        let requester = transaction(&bytes).and_then(|id| self.pending.borrow_mut().remove(&id));
        if let Some(requester) = requester {
            // The requester may have given up.
            let _ = requester.send(bytes);
        }
    }
}

/// Removes a request when dropped.
struct Pending<'a> {
    requests: &'a PendingRequests,
    id: Transaction,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.requests.pending.borrow_mut().remove(&self.id);
    }
}

/// Returns the transaction id of a message (section 5).
fn transaction(message: &[u8]) -> Option<Transaction> {
    message.get(8..HEADER)?.try_into().ok()
}

/// A request for this host's reflexive address.
pub(super) struct BindingRequest {
    id: TransactionId,
    /// The message.
    pub bytes: Vec<u8>,
}

impl BindingRequest {
    /// Creates a request with a random transaction id of 96 bits, so that only an on-path host can forge a
    /// response.
    pub(super) fn new() -> BindingRequest {
        let request = Message::builder_request(BINDING, MessageWriteVec::new());
        let bytes = request.finish();
        let id = MessageHeader::from_bytes(&bytes).map(|header| header.transaction_id());
        BindingRequest {
            // A message that was just created has a header.
            id: id.unwrap_or_else(|_| TransactionId::generate()),
            bytes,
        }
    }

    /// Returns the reflexive address in a response, in canonical form; `None` if it is not the response to this
    /// request, or has no address that a host can have.
    pub(super) fn answered(&self, bytes: &[u8]) -> Option<SocketAddr> {
        let message = Message::from_bytes(bytes).ok()?;
        let fits = message.has_class(MessageClass::Success) && message.has_method(BINDING);
        if !fits || message.transaction_id() != self.id {
            return None;
        }
        let raw = message.raw_attribute(XorMappedAddress::TYPE)?;
        let address = XorMappedAddress::try_from(&raw).ok()?.addr(self.id);
        let (ip, port) = (address.ip().to_canonical(), address.port());
        let broadcast = ip == IpAddr::from([255; 4]);
        let usable = port != 0 && !ip.is_unspecified() && !ip.is_multicast() && !broadcast;
        usable.then_some(SocketAddr::new(ip, port))
    }
}

/// Returns a binding indication, which has no response (section 6.3.2); it opens a NAT.
pub fn indication() -> Vec<u8> {
    Message::builder_indication(BINDING, MessageWriteVec::new()).finish()
}

/// Whether a datagram is a response of a STUN server, by its first bytes.
pub fn is_answer(datagram: &[u8]) -> bool {
    (HEADER..=MAX_ANSWER).contains(&datagram.len())
        && RESPONSES.iter().any(|kind| datagram.starts_with(kind))
        && datagram[4..8] == COOKIE
}

#[cfg(test)]
mod tests {
    use super::*;
    use stun_types::message::{MessageType, MessageWriteExt as _};

    fn answer(id: TransactionId, attribute: &[u8]) -> Vec<u8> {
        let id = u128::from(id).to_be_bytes();
        let length = (attribute.len() as u16).to_be_bytes();
        [&[1, 1], &length[..], &COOKIE, &id[4..], attribute].concat()
    }

    #[test]
    fn the_address_in_a_response_is_found() {
        // RFC 5769, section 2.2: 192.0.2.1 port 32853.
        let attribute = [0, 0x20, 0, 8, 0, 1, 0xa1, 0x47, 0xe1, 0x12, 0xa6, 0x43];
        let request = BindingRequest::new();
        assert_eq!(request.bytes.len(), HEADER);
        let good = answer(request.id, &attribute);
        assert!(is_answer(&good));
        let address = request.answered(&good).expect("an address");
        assert_eq!(address.to_string(), "192.0.2.1:32853");
        // A response to another request.
        assert_eq!(BindingRequest::new().answered(&good), None);
        for end in 0..good.len() {
            assert_eq!(request.answered(&good[..end]), None, "{end}");
        }
        // Without an address, and with port 0: 0x2112 xor 0x2112.
        assert_eq!(request.answered(&answer(request.id, &[])), None);
        let nowhere = [0, 0x20, 0, 8, 0, 1, 0x21, 0x12, 0xe1, 0x12, 0xa6, 0x43];
        assert_eq!(request.answered(&answer(request.id, &nowhere)), None);
    }

    #[test]
    fn an_address_that_no_host_has_is_no_answer() {
        let request = BindingRequest::new();
        let said = |address: &str| {
            let address: SocketAddr = address.parse().expect(address);
            let mut message = Message::builder(
                MessageType::from_class_method(MessageClass::Success, BINDING),
                request.id,
                MessageWriteVec::new(),
            );
            let attribute = XorMappedAddress::new(address, request.id);
            message.add_attribute(&attribute).expect("added");
            request.answered(&message.finish())
        };
        for nowhere in [
            "0.0.0.0:7",
            "[::]:7",
            "[::ffff:0.0.0.0]:7",
            "224.0.0.1:7",
            "[ff02::1]:7",
            "255.255.255.255:7",
            "[::ffff:255.255.255.255]:7",
            "192.0.2.1:0",
        ] {
            assert_eq!(said(nowhere), None, "{nowhere}");
        }
        let canonical = said("[::ffff:192.0.2.1]:7").expect("an address");
        assert_eq!(canonical.to_string(), "192.0.2.1:7");
    }

    #[test]
    fn neither_protocol_has_messages_that_look_like_an_answer() {
        // An initiation of WireGuard begins with 1, 0, 0, 0; of the native protocol with 0x11.
        for kind in [1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14] {
            let mut message = [0; 148];
            message[0] = kind;
            message[4..8].copy_from_slice(&COOKIE);
            assert!(!is_answer(&message), "{kind}");
        }
    }
}

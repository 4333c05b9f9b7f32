//! Messages between members and a relay: STUN binding requests (RFC 8489) that bind two members to
//! one port.
//!
//! A relay has one UDP port for each pair of members. It forwards datagrams that one member sends
//! to that port, from the same port, to the address from which the other member has bound itself.
//! To the tunnel, a relay is one more endpoint. A member sends the same request to two ports: once
//! to the relay's main port, which opens the pair's port, and then repeatedly to the pair's port,
//! which binds the member's side to the source address of the request.
//!
//! | attribute | type | in | value |
//! |---|---|---|---|
//! | USERNAME | 0x0006 | request | that of the [`Ticket`] |
//! | SEIKAN-PEER | 0xC5E1 | request | public key of the other member, 32 bytes |
//! | SEIKAN-STAMP | 0xC5E2 | request | 64-bit number, larger than in every earlier request of this side |
//! | XOR-MAPPED-ADDRESS | 0x0020 | answer | source address of the request |
//! | SEIKAN-PORT | 0xC5E3 | answer | the pair's port, 16 bits |
//! | SEIKAN-PRESENT | 0xC5E4 | answer | one byte: 1 if the other side is bound, otherwise 0 |
//! | ERROR-CODE | 0x0009 | error | a [`RelayRefusal`] |
//! | MESSAGE-INTEGRITY-SHA256 | 0x001C | all, except answers to requests without a ticket; last | short-term mechanism (section 9.1), key: the ticket's password |
//!
//! The SEIKAN attributes are comprehension-optional: a STUN server that is not a relay gives an
//! ordinary answer without a port. A request without SEIKAN-PEER is an ordinary one.

use std::net::SocketAddr;

use aws_lc_rs::hmac;
pub use stun_types::message::TransactionId;

use stun_types::attribute::{
    AttributeFromRaw, AttributeStaticType, AttributeType, ErrorCode, MessageIntegritySha256,
    RawAttribute, Username, XorMappedAddress,
};
use stun_types::message::{
    BINDING, Message, MessageClass, MessageType, MessageWrite as _, MessageWriteVec,
};

use super::ticket::{RelayPassword, Ticket, parse_username};
use crate::keys::PublicKey;
use crate::rng::Rng;

const PEER: AttributeType = AttributeType::new(0xc5e1);
const STAMP: AttributeType = AttributeType::new(0xc5e2);
const PORT: AttributeType = AttributeType::new(0xc5e3);
const PRESENT: AttributeType = AttributeType::new(0xc5e4);

/// Message type of a binding request (RFC 8489, sections 5 and 18.2).
const REQUEST: [u8; 2] = [0x00, 0x01];
/// The magic cookie (section 5).
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// Length of a header in bytes.
const HEADER: usize = 20;
/// Maximum length of a message in bytes.
const MAX_MESSAGE: usize = 1500;
/// Length of HMAC-SHA256, which is not truncated (section 14.6), in bytes.
const INTEGRITY: usize = 32;
const INTEGRITY_ATTRIBUTE: usize = 4 + INTEGRITY;

/// Whether a datagram is a binding request, by its first bytes. Tunnel messages never begin with 0.
pub fn is_request(datagram: &[u8]) -> bool {
    (HEADER..=MAX_MESSAGE).contains(&datagram.len())
        && datagram.starts_with(&REQUEST)
        && datagram[4..8] == COOKIE
}

/// The transaction of a binding request, whatever its attributes; `None` for any other datagram.
pub fn request_id(datagram: &[u8]) -> Option<TransactionId> {
    let id = is_request(datagram).then(|| datagram.get(8..HEADER))??;
    Some(transaction(id))
}

/// A request of a member for the port that it shares with another, or to bind itself to that port.
#[derive(Clone, Copy, Debug)]
pub struct ClientRequest<'a> {
    /// The ticket of the member.
    pub ticket: &'a Ticket,
    /// The other member.
    pub peer: PublicKey,
    /// Nanoseconds since 1970, or one more than the last stamp if the clock has not advanced. A
    /// copy of a request, sent from elsewhere, is then older than what the relay has seen.
    pub stamp: u64,
}

impl ClientRequest<'_> {
    /// Encodes the request. Returns its transaction as well: 96 random bits, so that only somebody
    /// who sees the request can answer it.
    pub fn write(&self, rng: &mut dyn Rng) -> (TransactionId, Vec<u8>) {
        let mut id = [0; 12];
        rng.fill(&mut id);
        let id = transaction(&id);
        let (username, peer) = (self.ticket.username.as_bytes(), self.peer.as_bytes());
        let attributes = [
            RawAttribute::new(Username::TYPE, username),
            RawAttribute::new(PEER, peer),
            RawAttribute::new(STAMP, &self.stamp.to_be_bytes()).into_owned(),
        ];
        let key = Some(&self.ticket.password);
        (id, message(MessageClass::Request, id, &attributes, key))
    }
}

/// A request as received by a server.
#[derive(Debug)]
pub enum ServerRequest {
    /// An ordinary request for the sender's address.
    Address(TransactionId),
    /// A request for a port. It is not authenticated before [`PortRequest::verify`].
    Port(PortRequest),
}

/// A member's request for a port.
#[derive(Debug)]
pub struct PortRequest {
    /// The transaction to answer.
    pub id: TransactionId,
    /// The username of its ticket, from which the password is derived.
    pub username: String,
    /// When the ticket expires, in seconds since 1970.
    pub expires: u64,
    /// The number of the member, which stays the same when its key changes.
    pub holder: u64,
    /// The member's key.
    pub member: PublicKey,
    /// The key of the other member, never the same one.
    pub peer: PublicKey,
    /// Larger than every earlier stamp.
    pub stamp: u64,
    /// The message without MESSAGE-INTEGRITY-SHA256, and the value of that attribute.
    signed: Vec<u8>,
    integrity: [u8; INTEGRITY],
}

/// Why a datagram is not a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not to be answered.
    #[error("not a binding request")]
    NotARequest,
    /// A request for a port with a missing or invalid attribute.
    #[error("invalid request: {1}")]
    Refused(TransactionId, RelayRefusal),
}

impl ServerRequest {
    /// Parses a datagram.
    ///
    /// # Errors
    /// [`RequestError`].
    pub fn parse(datagram: &[u8]) -> Result<ServerRequest, RequestError> {
        let id = request_id(datagram).ok_or(RequestError::NotARequest)?;
        let message = whole(datagram).ok_or(RequestError::NotARequest)?;
        let Some(peer) = message.raw_attribute(PEER) else {
            return Ok(ServerRequest::Address(id));
        };
        let unauthorized = RequestError::Refused(id, RelayRefusal::Unauthorized);
        let malformed = RequestError::Refused(id, RelayRefusal::Malformed);
        let username = attribute::<Username>(&message).ok_or(unauthorized)?;
        let (expires, holder, member) = parse_username(username.username()).ok_or(unauthorized)?;
        let (signed, integrity) = signed(&message).ok_or(unauthorized)?;
        let peer = peer.value.as_ref().try_into().map_err(|_| malformed)?;
        let peer = PublicKey::from_bytes(peer);
        let stamp = message.raw_attribute(STAMP).ok_or(malformed)?;
        let stamp = stamp.value.as_ref().try_into().map_err(|_| malformed)?;
        if peer == member {
            return Err(malformed);
        }
        Ok(ServerRequest::Port(PortRequest {
            id,
            username: username.username().to_owned(),
            expires,
            holder,
            member,
            peer,
            stamp: u64::from_be_bytes(stamp),
            signed: signed.to_vec(),
            integrity,
        }))
    }
}

impl PortRequest {
    /// Whether the sender knows the ticket's password.
    pub fn verify(&self, password: &RelayPassword) -> bool {
        verify(&self.signed, &self.integrity, password.reveal().as_bytes())
    }
}

/// The answer of a relay, or of any other STUN server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The source address of the request.
    pub mapped: SocketAddr,
    /// The pair's port; `None` if the server is not a relay.
    pub port: Option<u16>,
    /// Whether the other side is bound.
    pub present: bool,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayError {
    /// Not an answer to this request, or not from a server that knows the ticket's password.
    #[error("not an answer to this request")]
    NotAnAnswer,
    /// The relay refuses the request.
    #[error("{0}")]
    Refused(RelayRefusal),
}

impl Answer {
    /// Parses the answer to a request. It has a port only if the server knows the ticket's
    /// password.
    ///
    /// # Errors
    /// [`RelayError`]. Refusals before the ticket is verified are not authenticated.
    pub fn parse(
        bytes: &[u8],
        id: TransactionId,
        password: &RelayPassword,
    ) -> Result<Answer, RelayError> {
        let message = whole(bytes).ok_or(RelayError::NotAnAnswer)?;
        if message.transaction_id() != id || !message.has_method(BINDING) {
            return Err(RelayError::NotAnAnswer);
        }
        let key = password.reveal().as_bytes();
        let proven = match signed(&message) {
            Some((signed, integrity)) if verify(signed, &integrity, key) => true,
            None if !message.has_attribute(MessageIntegritySha256::TYPE) => false,
            _ => return Err(RelayError::NotAnAnswer),
        };
        match message.class() {
            MessageClass::Success => {
                let mapped = attribute::<XorMappedAddress>(&message);
                let mapped = mapped.ok_or(RelayError::NotAnAnswer)?.addr(id);
                let short = |kind| Some(message.raw_attribute(kind)?.value.as_ref().to_vec());
                let port = short(PORT).filter(|_| proven);
                let port = port.map(|port| port.try_into().map(u16::from_be_bytes));
                if port == Some(Ok(0)) || matches!(port, Some(Err(_))) {
                    return Err(RelayError::NotAnAnswer);
                }
                Ok(Answer {
                    mapped,
                    port: port.and_then(Result::ok),
                    present: proven && short(PRESENT).is_some_and(|p| p == [1]),
                })
            }
            MessageClass::Error => {
                let code = attribute::<ErrorCode>(&message).ok_or(RelayError::NotAnAnswer)?;
                Err(RelayError::Refused(RelayRefusal::of(code.code())))
            }
            MessageClass::Request | MessageClass::Indication => Err(RelayError::NotAnAnswer),
        }
    }

    /// The answer to an ordinary request from this address.
    pub fn address(mapped: SocketAddr) -> Answer {
        Answer {
            mapped,
            port: None,
            present: false,
        }
    }

    /// Encodes the answer; authenticated if the request had a valid ticket.
    pub fn write(&self, id: TransactionId, password: Option<&RelayPassword>) -> Vec<u8> {
        // A dual-stack socket reports IPv4 addresses as IPv4-mapped ones.
        let mapped = SocketAddr::new(self.mapped.ip().to_canonical(), self.mapped.port());
        let mapped = XorMappedAddress::new(mapped, id);
        let mut attributes = vec![RawAttribute::from(&mapped).into_owned()];
        if let Some(port) = self.port {
            let present = [u8::from(self.present)];
            attributes.push(RawAttribute::new(PORT, &port.to_be_bytes()).into_owned());
            attributes.push(RawAttribute::new(PRESENT, &present).into_owned());
        }
        message(MessageClass::Success, id, &attributes, password)
    }
}

/// Why a relay refuses a request, by the numbers of STUN and TURN (RFC 8489, section 14.8; RFC
/// 8656, section 19).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayRefusal {
    /// 400.
    #[error("the relay does not understand the request")]
    Malformed,
    /// 401.
    #[error("the relay rejects the ticket: it has expired, or the relay has another secret")]
    Unauthorized,
    /// 438.
    #[error("the relay has seen a newer request; does another host use this key?")]
    Stale,
    /// 486.
    #[error("this member has used its share of the relay's ports")]
    Quota,
    /// 508.
    #[error("the relay has no free port")]
    Full,
    /// Any other.
    #[error("the relay refuses with error {0}")]
    Other(u16),
}

impl RelayRefusal {
    fn of(code: u16) -> RelayRefusal {
        match code {
            400 => RelayRefusal::Malformed,
            401 => RelayRefusal::Unauthorized,
            438 => RelayRefusal::Stale,
            486 => RelayRefusal::Quota,
            508 => RelayRefusal::Full,
            other => RelayRefusal::Other(other),
        }
    }

    /// Its number.
    pub fn code(self) -> u16 {
        match self {
            RelayRefusal::Malformed => 400,
            RelayRefusal::Unauthorized => 401,
            RelayRefusal::Stale => 438,
            RelayRefusal::Quota => 486,
            RelayRefusal::Full => 508,
            RelayRefusal::Other(code) => code,
        }
    }

    /// Encodes the refusal without a reason phrase: 28 bytes, and 36 more for authentication if the
    /// request had a valid ticket.
    pub fn write(self, id: TransactionId, password: Option<&RelayPassword>) -> Vec<u8> {
        let code = self.code();
        let value = [0, 0, (code / 100) as u8, (code % 100) as u8];
        let code = RawAttribute::new(ErrorCode::TYPE, &value);
        message(MessageClass::Error, id, &[code], password)
    }
}

fn transaction(id: &[u8]) -> TransactionId {
    let id = id.iter().take(12);
    id.fold(0, |id, byte| id << 8 | u128::from(*byte)).into()
}

fn message(
    class: MessageClass,
    id: TransactionId,
    attributes: &[RawAttribute<'_>],
    password: Option<&RelayPassword>,
) -> Vec<u8> {
    let kind = MessageType::from_class_method(class, BINDING);
    let mut message = Message::builder(kind, id, MessageWriteVec::new());
    for attribute in attributes {
        message.push_attribute_unchecked(attribute);
    }
    let Some(password) = password else {
        return message.finish();
    };
    let key = hmac::Key::new(hmac::HMAC_SHA256, password.reveal().as_bytes());
    // Computed here because the library would log the key in a trace. The length in the header
    // includes this attribute (section 14.6).
    let placeholder = RawAttribute::new(MessageIntegritySha256::TYPE, &[0; INTEGRITY]);
    message.push_attribute_unchecked(&placeholder);
    let mut bytes = message.finish();
    if let Some((signed, tail)) = bytes.split_last_chunk_mut::<INTEGRITY_ATTRIBUTE>() {
        tail[4..].copy_from_slice(hmac::sign(&key, signed).as_ref());
    }
    bytes
}

/// Parses a message that fills the whole datagram.
fn whole(bytes: &[u8]) -> Option<Message<'_>> {
    let message = (bytes.len() <= MAX_MESSAGE).then(|| Message::from_bytes(bytes).ok())??;
    let length = bytes.get(2..4)?.try_into().map(u16::from_be_bytes).ok()?;
    (HEADER + usize::from(length) == bytes.len()).then_some(message)
}

fn attribute<'a, A: AttributeFromRaw<'a> + AttributeStaticType>(
    message: &Message<'_>,
) -> Option<A> {
    A::from_raw_ref(&message.raw_attribute(A::TYPE)?).ok()
}

/// The part of the message that MESSAGE-INTEGRITY-SHA256 covers, and its value, if it is the last
/// attribute.
fn signed<'a>(message: &'a Message<'_>) -> Option<(&'a [u8], [u8; INTEGRITY])> {
    let (at, raw) = message.raw_attribute_and_offset(MessageIntegritySha256::TYPE)?;
    let integrity = raw.value.as_ref().try_into().ok()?;
    let bytes = message.as_bytes();
    (at + INTEGRITY_ATTRIBUTE == bytes.len()).then_some((bytes.get(..at)?, integrity))
}

fn verify(signed: &[u8], integrity: &[u8], key: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, key), signed, integrity).is_ok()
}

#[cfg(test)]
mod tests;

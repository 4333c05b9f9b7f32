//! The handshake: Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s, in WireGuard's form or the native one.
//!
//! ```text
//! initiator                                   responder
//! Initiation::write  --- initiation --->  consume_initiation   (key, timestamp, offer)
//! Initiator                               ReceivedInitiation
//! consume_response   <--- response ----   create_response      (psk, chosen capabilities)
//! Established                             Established          (mirrored keys)
//! ```
//!
//! Both [`Protocol`]s use the same code. They differ in prologue, mac labels, message types, and in
//! the payload, which WireGuard does not have. Initiation: `type, 0, 0, 0, sender index (LE),
//! ephemeral, sealed static, sealed (TAI64N, payload), mac1, mac2`. Response: `type, 0, 0, 0,
//! sender index, receiver index, ephemeral, sealed payload, mac1, mac2`.
//!
//! The caller has to check that the static key is a known peer's and that the timestamp is newer
//! than the last one. Cookies and load are handled before a message is read
//! (`cookie.rs`). The cryptography is `snow`'s, except for the resolver here: it takes
//! ephemeral keys from the caller's random source, and its X25519 refuses points of low order and
//! erases private keys.

use std::fmt;
use std::ops::RangeInclusive;

use snow::HandshakeState;
use zeroize::Zeroizing;

use crate::constants::*;
use crate::fields::{get_u32, put_u32};
pub use crate::keys::{Identity, PresharedKey, PrivateKey, PublicKey};
use crate::mac::{self, MacKey};
pub use crate::protocol::Protocol;
use crate::rng::Rng;
use crate::tai64n::Tai64n;

use self::resolver::EphemeralSeed;

mod resolver;

/// The Noise protocol name, the paper's CONSTRUCTION.
pub const PROTOCOL_NAME: &str = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";

/// Why a handshake message was not created or not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Not the expected message: another type, or reserved bytes that are not zero.
    #[error("message header {found:#010x} where {expected:#04x} was expected")]
    UnexpectedType {
        /// The first four bytes, little-endian.
        found: u32,
        /// The type that was expected.
        expected: u8,
    },
    /// A size that this message cannot have.
    #[error("handshake message of {found} bytes: truncated, oversized, or another protocol")]
    Length {
        /// Size of the message in bytes.
        found: usize,
    },
    /// mac1 is not the one for this host's public key.
    #[error("mac1 does not match: the sender uses another public key for this host")]
    Mac1,
    /// A response to an initiation that is not this one.
    #[error("response to index {found:#010x} of another handshake")]
    ReceiverIndex {
        /// The receiver index in the message.
        found: u32,
    },
    /// The sender's index has more bits than the protocol's data messages.
    #[error("sender index {found:#x} has too many bits")]
    SenderIndex {
        /// The sender index in the message.
        found: u32,
    },
    /// The AEAD does not verify: the message was altered, is for another key, or uses another
    /// preshared key.
    #[error(
        "handshake message does not authenticate: altered on the way, or the keys (preshared key \
         included) differ between the ends"
    )]
    Authentication,
    /// A Diffie-Hellman result was zero.
    #[error("public key of low order: no shared secret can be derived from it")]
    LowOrderPoint,
    /// The payload exceeds the maximum of this protocol.
    #[error("handshake payload of {found} bytes, more than {maximum}")]
    PayloadTooLong {
        /// Size of the payload in bytes.
        found: usize,
        /// Largest size allowed.
        maximum: usize,
    },
    /// The buffer for the message is too small.
    #[error("buffer of {found} bytes for a handshake message of {needed}")]
    BufferTooSmall {
        /// Size of the buffer in bytes.
        found: usize,
        /// Size of the message.
        needed: usize,
    },
    /// This initiation has been answered already.
    #[error("a response to this initiation was accepted before")]
    AlreadyComplete,
    /// The Noise library refused for a reason that no message can cause.
    #[error("the Noise library failed: a defect of this program; please report it")]
    Library,
}

impl From<snow::Error> for HandshakeError {
    fn from(error: snow::Error) -> Self {
        match error {
            snow::Error::Decrypt => HandshakeError::Authentication,
            snow::Error::Dh => HandshakeError::LowOrderPoint,
            _ => HandshakeError::Library,
        }
    }
}

/// The result of a handshake, for the session.
pub struct Established {
    /// Index that the peer puts on datagrams to this host.
    pub local_index: u32,
    /// Index to put on datagrams to the peer.
    pub remote_index: u32,
    /// Key for sending.
    pub send: Zeroizing<[u8; KEY_LEN]>,
    /// Key for receiving.
    pub receive: Zeroizing<[u8; KEY_LEN]>,
    /// Noise handshake hash: the same at both ends, over the whole transcript; a channel binding.
    pub handshake_hash: [u8; 32],
    /// The peer's payload: its offer at the responder, its choice at the initiator.
    pub payload: Vec<u8>,
}

impl fmt::Debug for Established {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Established")
            .field("local_index", &self.local_index)
            .field("remote_index", &self.remote_index)
            .finish_non_exhaustive()
    }
}

/// An initiation, to be written by [`Initiation::write`].
#[derive(Clone, Copy, Debug)]
pub struct Initiation<'a> {
    /// The protocol of the handshake.
    pub protocol: Protocol,
    /// The sender.
    pub identity: &'a Identity,
    /// The static key of the receiver.
    pub remote: &'a PublicKey,
    /// The preshared key.
    pub psk: &'a PresharedKey,
    /// Index that the receiver puts on its messages.
    pub sender_index: u32,
    /// Must be greater than in any earlier initiation.
    pub timestamp: Tai64n,
    /// The sender's capabilities; must be empty for WireGuard.
    pub payload: &'a [u8],
}

impl Initiation<'_> {
    /// Writes the initiation into `out` and returns its length. mac2 is left zero: the caller's
    /// `CookieJar` fills it in.
    pub fn write(
        &self,
        rng: &mut dyn Rng,
        out: &mut [u8],
    ) -> Result<(Initiator, usize), HandshakeError> {
        let len = INITIATION_LEN + self.payload.len();
        let out = message_buffer(self.protocol, self.payload, len, out)?;
        out[..4].copy_from_slice(&u32::from(self.protocol.initiation_type()).to_le_bytes());
        put_u32(out, SENDER_INDEX_OFFSET, self.sender_index);

        let ephemeral = EphemeralSeed::default();
        let mut state = ephemeral
            .builder(self.protocol, self.identity)?
            .remote_public_key(self.remote.as_bytes())?
            .psk(2, self.psk.as_bytes())?
            .build_initiator()?;
        ephemeral.refill(rng);
        let mut plaintext = [0; TAI64N_LEN + MAX_PAYLOAD_LEN];
        plaintext[..TAI64N_LEN].copy_from_slice(self.timestamp.as_bytes());
        plaintext[TAI64N_LEN..][..self.payload.len()].copy_from_slice(self.payload);
        let noise = &mut out[INITIATION_NOISE_OFFSET..len - MACS_LEN];
        state.write_message(&plaintext[..TAI64N_LEN + self.payload.len()], noise)?;
        mac::write_mac1(&self.remote.mac1_key(self.protocol), out);

        let initiator = Initiator {
            protocol: self.protocol,
            local_index: self.sender_index,
            mac1_key: *self.identity.mac1_key(self.protocol),
            state: Box::new(state),
        };
        Ok((initiator, len))
    }
}

/// An initiation that was sent and waits for its response.
pub struct Initiator {
    protocol: Protocol,
    local_index: u32,
    mac1_key: MacKey,
    state: Box<HandshakeState>,
}

impl Initiator {
    /// The receiver index that the response must have.
    pub const fn local_index(&self) -> u32 {
        self.local_index
    }

    /// Completes the handshake with a response. A refused message changes nothing: the true
    /// response may still arrive.
    pub fn consume_response(&mut self, message: &[u8]) -> Result<Established, HandshakeError> {
        let protocol = self.protocol;
        check_header(message, protocol.response_type(), &protocol.response_len())?;
        let receiver = get_u32(message, RESPONSE_RECEIVER_OFFSET);
        if receiver != self.local_index {
            return Err(HandshakeError::ReceiverIndex { found: receiver });
        }
        if !mac::verify_mac1(&self.mac1_key, message) {
            return Err(HandshakeError::Mac1);
        }
        if self.state.is_handshake_finished() {
            return Err(HandshakeError::AlreadyComplete);
        }
        let sender = sender_index(message, protocol)?;
        let mut payload = [0; MAX_PAYLOAD_LEN];
        let noise = &message[RESPONSE_NOISE_OFFSET..message.len() - MACS_LEN];
        let len = self.state.read_message(noise, &mut payload)?;
        Ok(established(
            &mut self.state,
            self.local_index,
            sender,
            payload[..len].to_vec(),
        ))
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator")
            .field("local_index", &self.local_index)
            .finish_non_exhaustive()
    }
}

/// Reads an initiation. Success proves only that a holder of the private key of
/// [`remote`](ReceivedInitiation::remote) created it once for this host. The caller still has to
/// check that the key is a peer's and that the timestamp is greater than that peer's last.
pub fn consume_initiation(
    protocol: Protocol,
    identity: &Identity,
    message: &[u8],
) -> Result<ReceivedInitiation, HandshakeError> {
    check_header(
        message,
        protocol.initiation_type(),
        &protocol.initiation_len(),
    )?;
    if !mac::verify_mac1(identity.mac1_key(protocol), message) {
        return Err(HandshakeError::Mac1);
    }
    let sender_index = sender_index(message, protocol)?;
    let ephemeral = EphemeralSeed::default();
    let mut state = ephemeral.builder(protocol, identity)?.build_responder()?;
    let mut plaintext = [0; TAI64N_LEN + MAX_PAYLOAD_LEN];
    let noise = &message[INITIATION_NOISE_OFFSET..message.len() - MACS_LEN];
    let len = state.read_message(noise, &mut plaintext)?;

    let remote = state
        .get_remote_static()
        .and_then(|key| key.try_into().ok());
    let (timestamp, payload) = plaintext[..len]
        .split_first_chunk()
        .ok_or(HandshakeError::Library)?;
    Ok(ReceivedInitiation {
        protocol,
        remote: PublicKey::from_bytes(remote.ok_or(HandshakeError::Library)?),
        timestamp: Tai64n::from_bytes(*timestamp),
        payload: payload.to_vec(),
        sender_index,
        ephemeral,
        state: Box::new(state),
    })
}

/// An authenticated initiation that the caller has not accepted yet.
pub struct ReceivedInitiation {
    /// The sender's static key.
    pub remote: PublicKey,
    /// When it was created, by the sender's clock.
    pub timestamp: Tai64n,
    /// The sender's capabilities; empty for WireGuard.
    pub payload: Vec<u8>,
    /// The sender's index.
    pub sender_index: u32,
    protocol: Protocol,
    ephemeral: EphemeralSeed,
    state: Box<HandshakeState>,
}

impl ReceivedInitiation {
    /// Writes the response into `out` and returns the session with the response's length. mac2 is
    /// left zero, as in the initiation. `payload` must be empty for WireGuard.
    ///
    /// The session must not send data before it has received some: the response may be lost, and
    /// the initiation may be a replay.
    pub fn create_response(
        mut self,
        psk: &PresharedKey,
        local_index: u32,
        payload: &[u8],
        rng: &mut dyn Rng,
        out: &mut [u8],
    ) -> Result<(Established, usize), HandshakeError> {
        let len = RESPONSE_LEN + payload.len();
        let out = message_buffer(self.protocol, payload, len, out)?;
        out[..4].copy_from_slice(&u32::from(self.protocol.response_type()).to_le_bytes());
        put_u32(out, SENDER_INDEX_OFFSET, local_index);
        put_u32(out, RESPONSE_RECEIVER_OFFSET, self.sender_index);

        self.state.set_psk(2, psk.as_bytes())?;
        self.ephemeral.refill(rng);
        let noise = &mut out[RESPONSE_NOISE_OFFSET..len - MACS_LEN];
        self.state.write_message(payload, noise)?;
        mac::write_mac1(&self.remote.mac1_key(self.protocol), out);
        let session = established(
            &mut self.state,
            local_index,
            self.sender_index,
            self.payload,
        );
        Ok((session, len))
    }
}

impl fmt::Debug for ReceivedInitiation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedInitiation")
            .field("remote", &self.remote)
            .field("timestamp", &self.timestamp)
            .field("sender_index", &self.sender_index)
            .finish_non_exhaustive()
    }
}

/// Extracts the transport keys of a finished handshake.
fn established(
    state: &mut HandshakeState,
    local_index: u32,
    remote_index: u32,
    payload: Vec<u8>,
) -> Established {
    let (from_initiator, from_responder) = state.dangerously_get_raw_split();
    let (from_initiator, from_responder) = (
        Zeroizing::new(from_initiator),
        Zeroizing::new(from_responder),
    );
    let (send, receive) = if state.is_initiator() {
        (from_initiator, from_responder)
    } else {
        (from_responder, from_initiator)
    };
    let mut handshake_hash = [0; 32];
    handshake_hash.copy_from_slice(state.get_handshake_hash());
    Established {
        local_index,
        remote_index,
        send,
        receive,
        handshake_hash,
        payload,
    }
}

/// Returns the first `len` bytes of `out`, zeroed, if payload and buffer are within bounds.
fn message_buffer<'a>(
    protocol: Protocol,
    payload: &[u8],
    len: usize,
    out: &'a mut [u8],
) -> Result<&'a mut [u8], HandshakeError> {
    let maximum = protocol.max_payload();
    if payload.len() > maximum {
        return Err(HandshakeError::PayloadTooLong {
            found: payload.len(),
            maximum,
        });
    }
    let found = out.len();
    let out = out
        .get_mut(..len)
        .ok_or(HandshakeError::BufferTooSmall { found, needed: len })?;
    out.fill(0);
    Ok(out)
}

fn check_header(
    message: &[u8],
    expected: u8,
    sizes: &RangeInclusive<usize>,
) -> Result<(), HandshakeError> {
    if !sizes.contains(&message.len()) {
        return Err(HandshakeError::Length {
            found: message.len(),
        });
    }
    match get_u32(message, 0) {
        found if found == u32::from(expected) => Ok(()),
        found => Err(HandshakeError::UnexpectedType { found, expected }),
    }
}

fn sender_index(message: &[u8], protocol: Protocol) -> Result<u32, HandshakeError> {
    let found = get_u32(message, SENDER_INDEX_OFFSET);
    if found <= protocol.max_index() {
        Ok(found)
    } else {
        Err(HandshakeError::SenderIndex { found })
    }
}

#[cfg(test)]
mod tests;

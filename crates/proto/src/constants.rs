//! Every number of the protocol, by its name in the WireGuard paper (section 6) or the kernel, and
//! the layout of the messages that carry the handshake.
//!
//! Order: limits of a session, times of the timers, cookies and rate limits, messages.

use std::num::NonZeroU8;
use std::time::Duration;

/// Number of messages after which the initiator of a session starts the next handshake (paper 6.1).
pub const REKEY_AFTER_MESSAGES: u64 = 1 << 60;
/// Counter values from here on are never sent nor accepted (paper 6.1: 2^64 - 2^13 - 1).
///
/// The margin of 2^13 keeps a window of unsent counters below the wrap.
pub const REJECT_AFTER_MESSAGES: u64 = u64::MAX - (1 << 13);
/// Age at which the initiator of a session starts the next handshake when it has something to send.
pub const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
/// Age from which a session neither sends nor receives.
pub const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// Time for which unanswered initiations are repeated before the attempt ends.
pub const REKEY_ATTEMPT_TIME: Duration = Duration::from_secs(90);
/// Pause between two initiations to the same peer, before jitter.
pub const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
/// Upper bound (exclusive) of the random addition to the handshake timers (kernel `messages.h`).
pub const REKEY_TIMEOUT_JITTER_MAX: Duration = Duration::from_millis(333);
/// Silence after which a peer that received data and sent none answers with an empty packet.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Initiations sent before giving up: one at the start and one per [`REKEY_TIMEOUT`] that passes
/// within [`REKEY_ATTEMPT_TIME`].
pub const MAX_HANDSHAKE_ATTEMPTS: u32 =
    (REKEY_ATTEMPT_TIME.as_secs() / REKEY_TIMEOUT.as_secs()) as u32;
/// Hop limit of an *opener*, a datagram that makes the NAT in front of this host map and admit a
/// destination, and does not arrive there: this NAT forwards it, and the next router drops it.
pub const OPENER_HOPS: NonZeroU8 = NonZeroU8::new(2).unwrap();
/// Time after an opener until the same datagram follows with the usual hop limit, unless something
/// has arrived from the peer. By then a call-me-maybe has made the peer open its own NAT, if it has
/// one.
pub const OPENING_TIME: Duration = Duration::from_secs(1);
/// Maximum number of addresses, besides the endpoint, that an initiation is sent to.
pub const MAX_CANDIDATES: usize = 16;
/// Minimum interval between two initiations in answer to call-me-maybes of the same peer.
pub const CALL_INTERVAL: Duration = Duration::from_millis(500);
/// Age of the youngest session at which all key material of a peer is erased (paper 6.3).
pub const ZERO_KEYS_AFTER: Duration = Duration::from_secs(3 * REJECT_AFTER_TIME.as_secs());
/// Age at which the initiator, on receipt of data, starts the next handshake before this session
/// expires.
pub const REKEY_ON_RECEIVE_AFTER: Duration = Duration::from_secs(
    REJECT_AFTER_TIME.as_secs() - KEEPALIVE_TIMEOUT.as_secs() - REKEY_TIMEOUT.as_secs(),
);

/// Lifetime of the secret of the cookies, and therefore of a cookie (paper 5.4.7).
pub const COOKIE_REFRESH_TIME: Duration = Duration::from_secs(120);
/// Shortening of a cookie's life at its receiver, so that it is not used just as the sender's
/// secret changes (kernel `COOKIE_SECRET_LATENCY`).
pub const COOKIE_LATENCY: Duration = Duration::from_secs(5);
/// Handshake messages a source may have processed per second while the receiver is under load
/// (kernel `ratelimiter.c`).
pub const RATE_LIMIT_PACKETS_PER_SECOND: u32 = 20;
/// Handshake messages a silent source may send at once while the receiver is under load.
pub const RATE_LIMIT_BURST: u32 = 5;
/// Sources remembered by the rate limiter (kernel: eight per hash bucket of 1024).
pub const RATE_LIMIT_SOURCES: usize = 8192;
/// How long the receiver stays under load after the last sign of load.
pub const UNDER_LOAD_HOLD: Duration = Duration::from_secs(1);
/// Initiations per second that a peer is expected to send at most; also the grain of the TAI64N
/// stamps, which are rounded down so that they do not leak the clock's fine phase.
pub const INITIATIONS_PER_SECOND: u32 = 50;

/// Message type of the WireGuard handshake initiation.
pub const WIREGUARD_INITIATION: u8 = 1;
/// Message type of the WireGuard handshake response.
pub const WIREGUARD_RESPONSE: u8 = 2;
/// Message type of the WireGuard cookie reply.
pub const WIREGUARD_COOKIE_REPLY: u8 = 3;
/// Message type of WireGuard transport data.
pub const WIREGUARD_DATA: u8 = 4;
/// Message type of the native handshake initiation.
///
/// The native types share no value with WireGuard's 1 to 4, so that a datagram of one protocol is
/// an unknown message to the other before any cryptography is spent on it.
pub const NATIVE_INITIATION: u8 = 0x11;
/// Message type of the native handshake response.
pub const NATIVE_RESPONSE: u8 = 0x12;
/// Message type of the native cookie reply.
pub const NATIVE_COOKIE_REPLY: u8 = 0x13;
/// Message type of native transport data.
pub const NATIVE_DATA: u8 = 0x14;

/// Bytes of a public, private, preshared or session key.
pub const KEY_LEN: usize = 32;
/// Bytes of an AEAD tag.
pub const TAG_LEN: usize = 16;
/// Bytes of a mac1 or mac2 field, and of a cookie.
pub const MAC_LEN: usize = 16;
/// Bytes of a TAI64N stamp.
pub const TAI64N_LEN: usize = 12;
/// Largest payload of capabilities in a native initiation or response, in bytes.
pub const MAX_PAYLOAD_LEN: usize = 256;

/// Offset of the sender's index in an initiation and in a response.
pub const SENDER_INDEX_OFFSET: usize = 4;
/// Offset of the receiver's index in a response.
pub const RESPONSE_RECEIVER_OFFSET: usize = 8;
/// Offset of the receiver's index in a cookie reply.
pub const RECEIVER_INDEX_OFFSET: usize = 4;
/// Offset of the Noise message in an initiation: type, reserved, sender.
pub const INITIATION_NOISE_OFFSET: usize = 8;
/// Offset of the Noise message in a response: type, reserved, sender, receiver.
pub const RESPONSE_NOISE_OFFSET: usize = 12;
/// Bytes of mac1 and mac2, the last two fields of an initiation and of a response.
pub const MACS_LEN: usize = 2 * MAC_LEN;
/// Bytes of an initiation without payload; WireGuard's have exactly this size.
pub const INITIATION_LEN: usize =
    INITIATION_NOISE_OFFSET + KEY_LEN + (KEY_LEN + TAG_LEN) + (TAI64N_LEN + TAG_LEN) + MACS_LEN;
/// Bytes of a response without payload; WireGuard's have exactly this size.
pub const RESPONSE_LEN: usize = RESPONSE_NOISE_OFFSET + KEY_LEN + TAG_LEN + MACS_LEN;
/// Bytes of the nonce of a cookie reply (XChaCha20-Poly1305).
pub const COOKIE_NONCE_LEN: usize = 24;
/// Bytes of a cookie reply.
pub const COOKIE_REPLY_LEN: usize = 8 + COOKIE_NONCE_LEN + MAC_LEN + TAG_LEN;
/// A buffer of this size holds any handshake message of either protocol.
pub const MAX_HANDSHAKE_LEN: usize = INITIATION_LEN + MAX_PAYLOAD_LEN;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_sizes_are_the_papers() {
        assert_eq!(
            (INITIATION_LEN, RESPONSE_LEN, COOKIE_REPLY_LEN),
            (148, 92, 64)
        );
    }

    #[test]
    fn reject_after_messages_is_the_papers() {
        // Paper 6.1: 2^64 - 2^13 - 1.
        assert_eq!(REJECT_AFTER_MESSAGES as u128, (1u128 << 64) - (1 << 13) - 1);
    }
}

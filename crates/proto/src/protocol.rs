//! Differences between the native and the WireGuard handshake.

use std::ops::RangeInclusive;

use crate::constants::*;
use seikan_wire::message::{DATA_HEADER_LEN, MAX_RECORD_INDEX, RECORD_HEADER_LEN};

/// The protocol of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// WireGuard, bit for bit.
    WireGuard,
    /// Seikan's own: the same handshake with another prologue, and with a payload of capabilities.
    Native,
}

impl Protocol {
    /// The Noise prologue, the paper's IDENTIFIER.
    pub const fn identifier(self) -> &'static [u8] {
        match self {
            Protocol::WireGuard => b"WireGuard v1 zx2c4 Jason@zx2c4.com",
            Protocol::Native => b"Seikan v1 native tunnel handshake",
        }
    }

    /// The label of the mac1 key, the paper's LABEL_MAC1.
    pub const fn mac1_label(self) -> &'static [u8; 8] {
        match self {
            Protocol::WireGuard => b"mac1----",
            Protocol::Native => b"skn-mac1",
        }
    }

    /// The label of the cookie encryption key, the paper's LABEL_COOKIE.
    pub const fn cookie_label(self) -> &'static [u8; 8] {
        match self {
            Protocol::WireGuard => b"cookie--",
            Protocol::Native => b"skn-cook",
        }
    }

    /// Message type of an initiation.
    pub const fn initiation_type(self) -> u8 {
        match self {
            Protocol::WireGuard => WIREGUARD_INITIATION,
            Protocol::Native => NATIVE_INITIATION,
        }
    }

    /// Message type of a response.
    pub const fn response_type(self) -> u8 {
        match self {
            Protocol::WireGuard => WIREGUARD_RESPONSE,
            Protocol::Native => NATIVE_RESPONSE,
        }
    }

    /// Message type of a cookie reply.
    pub const fn cookie_reply_type(self) -> u8 {
        match self {
            Protocol::WireGuard => WIREGUARD_COOKIE_REPLY,
            Protocol::Native => NATIVE_COOKIE_REPLY,
        }
    }

    /// Message type of transport data.
    pub const fn data_type(self) -> u8 {
        match self {
            Protocol::WireGuard => WIREGUARD_DATA,
            Protocol::Native => NATIVE_DATA,
        }
    }

    /// Bytes before the sealed part of a data message.
    pub const fn data_header_len(self) -> usize {
        match self {
            Protocol::WireGuard => DATA_HEADER_LEN,
            Protocol::Native => RECORD_HEADER_LEN,
        }
    }

    /// Maximum index of a session or a pending handshake.
    pub const fn max_index(self) -> u32 {
        match self {
            Protocol::WireGuard => u32::MAX,
            Protocol::Native => MAX_RECORD_INDEX,
        }
    }

    /// Each message type with the shortest length of its messages, in bytes. The type is the first byte.
    pub const fn message_types(self) -> [(u8, u16); 4] {
        [
            (self.initiation_type(), INITIATION_LEN as u16),
            (self.response_type(), RESPONSE_LEN as u16),
            (self.cookie_reply_type(), COOKIE_REPLY_LEN as u16),
            (self.data_type(), (self.data_header_len() + TAG_LEN) as u16),
        ]
    }

    /// Largest payload of capabilities, in bytes: WireGuard has none.
    pub const fn max_payload(self) -> usize {
        match self {
            Protocol::WireGuard => 0,
            Protocol::Native => MAX_PAYLOAD_LEN,
        }
    }

    /// Sizes that an initiation can have, in bytes.
    pub const fn initiation_len(self) -> RangeInclusive<usize> {
        INITIATION_LEN..=INITIATION_LEN + self.max_payload()
    }

    /// Sizes that a response can have, in bytes.
    pub const fn response_len(self) -> RangeInclusive<usize> {
        RESPONSE_LEN..=RESPONSE_LEN + self.max_payload()
    }
}

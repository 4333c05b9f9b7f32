//! Packet formats as types, over borrowed bytes.
//!
//! Nothing here performs I/O, or allocates by a number read from the network. Each file holds one
//! format: the parser first ([`IpPacket::parse`], [`VnetHdr::read`]), then functions that change a
//! packet in place ([`ip::set_ecn`], [`tcp::clamp_mss`]).
#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
pub mod ethernet;
pub mod icmp;
pub mod ip;
pub mod message;
pub mod neighbour;
pub mod tcp;
pub mod udp;
pub mod vnet;

pub use ethernet::{Ethernet, Mac};
pub use ip::{IpPacket, ParseError};
pub use vnet::{GsoType, VNET_HDR_LEN, VnetHdr};

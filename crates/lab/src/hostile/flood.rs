//! Hostile traffic: prepared datagrams of each kind, and a loop that sends them without a limit.
//!
//! The messages are laid out here once more, byte by byte from docs/internals/protocol.md: an
//! attacker does not use our code either.

use std::io::Read;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use seikan_load::Pattern;
use seikan_proto::keys::PublicKey;
use seikan_proto::mac::write_mac1;
use seikan_proto::protocol::Protocol;
use seikan_ui::Interrupt;
use serde::Serialize;

use crate::arguments;
use crate::error::{Doing, Result};

/// Sizes of an initiation, a response and a cookie reply (WireGuard whitepaper, 5.4).
const SIZES: [usize; 3] = [148, 92, 64];
/// Bytes of mac1 and of mac2, the end of an initiation and of a response.
const MAC: usize = 16;
/// The largest payload of UDP over IPv4.
const LARGEST: usize = 65_507;
/// Datagrams prepared of each kind, sent in turn.
const PREPARED: u64 = 256;
/// `AF_PACKET` and `ETH_P_ALL` of Linux, which the socket library has no names for.
const AF_PACKET: i32 = 17;
const ETH_P_ALL: u16 = 3;

/// A kind of hostile traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Flood {
    /// Random bytes of many lengths, including none.
    Garbage,
    /// Messages of every type, each cut short.
    Truncated,
    /// Far larger than the link's MTU, up to the maximum of UDP.
    Oversized,
    /// Copies of genuine data.
    Replayed,
    /// Genuine data with another counter and a byte changed.
    Forged,
    /// Handshakes without knowledge of the public key.
    BadMac1,
    /// Initiations of random content, made with knowledge of the public key.
    Initiations,
}

impl std::fmt::Display for Flood {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&arguments::name(self))
    }
}

/// The attacker's knowledge of the target.
#[derive(Clone, Debug)]
pub struct Target {
    /// The native protocol rather than WireGuard's.
    pub native: bool,
    /// Its public key.
    pub public_key: [u8; 32],
    /// Datagrams of data that it has been sent, for the kinds that are made of them.
    pub genuine: Vec<Vec<u8>>,
}

impl Target {
    /// Message types: initiation, response, cookie reply, data.
    pub const fn types(&self) -> [u8; 4] {
        if self.native {
            [0x11, 0x12, 0x13, 0x14]
        } else {
            [1, 2, 3, 4]
        }
    }

    /// Minimum size of the messages of each type.
    const fn sizes(&self) -> [usize; 4] {
        let [initiation, response, cookie_reply] = SIZES;
        [
            initiation,
            response,
            cookie_reply,
            if self.native { 24 } else { 32 },
        ]
    }

    /// Datagrams of a kind; the same `seed` makes the same. Empty when there is nothing genuine to
    /// make them of.
    pub fn datagrams(&self, flood: Flood, seed: u64) -> Vec<Vec<u8>> {
        let random = |n: u64, length: usize| {
            let mut bytes = vec![0; length];
            Pattern::new(seed ^ (n << 20)).fill(0, &mut bytes);
            bytes
        };
        let message = |n: u64, kind: usize, length: usize| {
            let mut bytes = random(n, length);
            let head = [self.types()[kind], 0, 0, 0];
            let known = length.min(head.len());
            bytes[..known].copy_from_slice(&head[..known]);
            bytes
        };
        let all = 0..PREPARED;
        let kinds = |n: u64| (n % 4) as usize;
        match flood {
            Flood::Garbage => all.map(|n| random(n, n as usize * 23 % 1472)).collect(),
            Flood::Truncated => all
                .map(|n| {
                    message(
                        n,
                        kinds(n),
                        1 + n as usize * 7 % (self.sizes()[kinds(n)] - 1),
                    )
                })
                .collect(),
            Flood::Oversized => all
                .map(|n| message(n, kinds(n), [LARGEST, 1473, 9000, 30_000][kinds(n / 4)]))
                .collect(),
            Flood::Replayed => self.genuine.clone(),
            Flood::Forged => self.genuine.iter().map(|data| self.forged(data)).collect(),
            Flood::BadMac1 => all
                .map(|n| message(n, (n % 2) as usize, SIZES[(n % 2) as usize]))
                .collect(),
            Flood::Initiations => all
                .map(|n| {
                    let mut initiation = message(n, 0, SIZES[0]);
                    self.write_macs(&mut initiation);
                    initiation
                })
                .collect(),
        }
    }

    /// Returns a forged data message: its counter is far ahead, so that only the tag reveals it.
    fn forged(&self, genuine: &[u8]) -> Vec<u8> {
        let mut bytes = genuine.to_vec();
        if let [.., last] = bytes.as_mut_slice() {
            *last ^= 1;
        }
        // A high byte of the counter.
        let at = if self.native { 7 } else { 13 };
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 0x40;
        }
        bytes
    }

    /// Writes a correct mac1 and an empty mac2 at the end of a message.
    fn write_macs(&self, message: &mut [u8]) {
        let protocol = if self.native {
            Protocol::Native
        } else {
            Protocol::WireGuard
        };
        let key = PublicKey::from_bytes(self.public_key).mac1_key(protocol);
        write_mac1(&key, message);
        let mac2 = message.len() - MAC;
        message[mac2..].fill(0);
    }
}

/// Sends the datagrams in rotation until `stop` is set; returns the number sent. Datagrams that the
/// kernel refuses do not count.
pub fn shoot(socket: &UdpSocket, datagrams: &[Vec<u8>], stop: &Interrupt) -> u64 {
    let mut sent = 0;
    for datagram in datagrams.iter().cycle() {
        if stop.is_raised() {
            break;
        }
        sent += u64::from(socket.send(datagram).is_ok());
    }
    sent
}

/// Sees every IPv4 packet of the host in which it is opened.
#[derive(Debug)]
pub struct Capture(socket2::Socket);

impl Capture {
    /// Opens the packet socket.
    ///
    /// # Errors
    /// Without `CAP_NET_RAW` in this host.
    pub fn open() -> Result<Self> {
        let protocol = socket2::Protocol::from(i32::from(ETH_P_ALL.to_be()));
        // Type DGRAM: without the link's header.
        let socket = socket2::Socket::new(AF_PACKET.into(), socket2::Type::DGRAM, Some(protocol))
            .and_then(|socket| {
                socket.set_read_timeout(Some(Duration::from_millis(20)))?;
                Ok(socket)
            });
        socket.map(Self).doing("open a packet socket")
    }

    /// Returns the payloads of datagrams to `port` seen within `time`. A payload larger than a
    /// packet of the usual MTU consists of several merged datagrams, and is left out.
    pub fn datagrams(&mut self, port: u16, time: Duration) -> Vec<Vec<u8>> {
        let until = Instant::now() + time;
        let (mut found, mut packet) = (Vec::new(), vec![0; 65_536]);
        while Instant::now() < until {
            // After a timeout there is no packet.
            let length = self.0.read(&mut packet).unwrap_or(0);
            if length <= 1500
                && let Some(payload) = udp_payload(&packet[..length], port)
            {
                found.push(payload.to_vec());
            }
        }
        found
    }
}

/// The payload of a UDP datagram to `port` in an IPv4 packet.
fn udp_payload(packet: &[u8], port: u16) -> Option<&[u8]> {
    let header = usize::from(packet.first()? & 15) * 4;
    let udp = packet.get(header..)?;
    let is_udp = packet[0] >> 4 == 4 && packet.get(9) == Some(&17);
    (is_udp && udp.get(2..4)? == port.to_be_bytes()).then(|| udp.get(8..))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(genuine: Vec<Vec<u8>>) -> Target {
        Target {
            native: false,
            public_key: [9; 32],
            genuine,
        }
    }

    #[test]
    fn truncated_messages_are_shorter_than_their_type() {
        let target = target(Vec::new());
        for datagram in target.datagrams(Flood::Truncated, 1) {
            let kind = usize::from(datagram[0]) - 1;
            assert!((1..target.sizes()[kind]).contains(&datagram.len()));
        }
    }

    #[test]
    fn a_forged_datagram_differs_in_counter_and_tag_alone() {
        let forged = &target(vec![vec![0; 48]]).datagrams(Flood::Forged, 1)[0];
        let changed: Vec<usize> = (0..48).filter(|&i| forged[i] != 0).collect();
        assert_eq!(changed, [13, 47]);
    }

    #[test]
    fn of_packets_only_datagrams_to_the_port_are_seen() {
        let mut packet = [0; 31];
        (packet[0], packet[9], packet[23]) = (0x45, 17, 80);
        packet[28..].copy_from_slice(b"abc");
        assert_eq!(udp_payload(&packet, 80), Some(&b"abc"[..]));
        assert_eq!(udp_payload(&packet, 81), None);
        assert_eq!(udp_payload(&packet[..22], 80), None);
        packet[9] = 6;
        assert_eq!(udp_payload(&packet, 80), None);
    }
}

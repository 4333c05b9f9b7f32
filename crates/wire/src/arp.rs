//! ARP for IPv4 over Ethernet (RFC 826), with the probes and announcements of RFC 5227.

use crate::ethernet::{ETHERTYPE_IPV4, Mac};
use std::net::Ipv4Addr;

/// Length in bytes of a message for IPv4 over Ethernet.
pub const ARP_LEN: usize = 28;

/// The first six bytes: hardware type Ethernet, protocol IPv4, and the lengths of their addresses.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// The operation of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Who has the target address?
    Request,
    /// The sender has the sender address.
    Reply,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// Request or reply.
    pub operation: Operation,
    /// Hardware address of the sender.
    pub sender_mac: Mac,
    /// Protocol address of the sender; 0.0.0.0 in a probe.
    pub sender: Ipv4Addr,
    /// Hardware address of the target; without meaning in a request.
    pub target_mac: Mac,
    /// Protocol address of the target.
    pub target: Ipv4Addr,
}

/// A message that is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArpError {
    /// Fewer than [`ARP_LEN`] bytes.
    #[error("ARP message truncated")]
    Truncated,
    /// Not Ethernet (1).
    #[error("ARP for hardware type {0}, not 1 (Ethernet)")]
    HardwareType(u16),
    /// Not IPv4 (0x0800).
    #[error("ARP for protocol {0:#06x}, not 0x0800 (IPv4)")]
    ProtocolType(u16),
    /// Hardware addresses do not have six bytes, or protocol addresses do not have four.
    #[error("ARP with addresses of {hardware} and {protocol} bytes, not 6 and 4")]
    AddressLength {
        /// Bytes of a hardware address.
        hardware: u8,
        /// Bytes of a protocol address.
        protocol: u8,
    },
    /// Neither request (1) nor reply (2).
    #[error("ARP operation {0}, neither 1 (request) nor 2 (reply)")]
    Operation(u16),
}

impl Arp {
    /// Parses the payload of a frame. Padding after the message is ignored.
    pub fn parse(payload: &[u8]) -> Result<Arp, ArpError> {
        let message: &[u8; ARP_LEN] = payload.first_chunk().ok_or(ArpError::Truncated)?;
        let word = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
        if word(0) != 1 {
            return Err(ArpError::HardwareType(word(0)));
        }
        if word(2) != ETHERTYPE_IPV4 {
            return Err(ArpError::ProtocolType(word(2)));
        }
        if (message[4], message[5]) != (6, 4) {
            return Err(ArpError::AddressLength {
                hardware: message[4],
                protocol: message[5],
            });
        }
        let operation = match word(6) {
            1 => Operation::Request,
            2 => Operation::Reply,
            other => return Err(ArpError::Operation(other)),
        };
        let mac = |at: usize| Mac(std::array::from_fn(|i| message[at + i]));
        let address = |at: usize| Ipv4Addr::from(std::array::from_fn(|i| message[at + i]));
        Ok(Arp {
            operation,
            sender_mac: mac(8),
            sender: address(14),
            target_mac: mac(18),
            target: address(24),
        })
    }

    /// The message as bytes.
    pub fn to_bytes(&self) -> [u8; ARP_LEN] {
        let mut message = [0; ARP_LEN];
        message[..6].copy_from_slice(&ETHERNET_IPV4);
        message[7] = match self.operation {
            Operation::Request => 1,
            Operation::Reply => 2,
        };
        message[8..14].copy_from_slice(&self.sender_mac.0);
        message[14..18].copy_from_slice(&self.sender.octets());
        message[18..24].copy_from_slice(&self.target_mac.0);
        message[24..].copy_from_slice(&self.target.octets());
        message
    }

    /// "Who has `target`? Tell `sender` at `mac`." For [`Mac::BROADCAST`].
    pub fn request(mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Arp {
        Arp {
            operation: Operation::Request,
            sender_mac: mac,
            sender,
            target_mac: Mac::default(),
            target,
        }
    }

    /// "Does anybody use `target`?", without claiming it (RFC 5227 section 2.1.1). For broadcast.
    pub fn probe(mac: Mac, target: Ipv4Addr) -> Arp {
        Arp::request(mac, Ipv4Addr::UNSPECIFIED, target)
    }

    /// "`address` is at `mac`", for all caches (RFC 5227 section 2.3). For broadcast.
    pub fn announcement(mac: Mac, address: Ipv4Addr) -> Arp {
        Arp::request(mac, address, address)
    }

    /// The answer to this request: its target is at `by`. For its `sender_mac`.
    pub fn reply(&self, by: Mac) -> Arp {
        Arp {
            operation: Operation::Reply,
            sender_mac: by,
            sender: self.target,
            target_mac: self.sender_mac,
            target: self.sender,
        }
    }

    /// Whether this is a probe, a request of a host that has no address yet and considers the
    /// target (RFC 5227).
    pub fn is_probe(&self) -> bool {
        self.operation == Operation::Request && self.sender.is_unspecified()
    }

    /// Whether the sender announces its own address, by request or by reply ("gratuitous").
    pub fn is_announcement(&self) -> bool {
        self.sender == self.target && !self.sender.is_unspecified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The request of 192.0.2.1 for 192.0.2.2, laid out by hand from RFC 826.
    const REQUEST: [u8; ARP_LEN] = [
        0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0x5e, 0x10, 0, 1, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2,
        2,
    ];
    const MAC: Mac = Mac([2, 0, 0x5e, 0x10, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0x5e, 0x10, 0, 2]);

    #[test]
    fn a_request_is_read_field_by_field_and_its_padding_ignored() {
        let mut padded = REQUEST.to_vec();
        padded.resize(46, 0xaa);
        let arp = Arp::parse(&padded).unwrap();
        assert_eq!(arp.operation, Operation::Request);
        assert_eq!((arp.sender_mac, arp.target_mac), (MAC, Mac([0; 6])));
        assert_eq!(arp.sender, Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(arp.target, Ipv4Addr::new(192, 0, 2, 2));
    }

    #[test]
    fn a_request_is_encoded_as_specified() {
        let request = Arp::request(MAC, [192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        assert_eq!(request.to_bytes(), REQUEST);
    }

    #[test]
    fn a_reply_turns_the_request_round() {
        let reply = Arp::parse(&REQUEST).unwrap().reply(OTHER).to_bytes();
        assert_eq!(reply[..8], [0, 1, 8, 0, 6, 4, 0, 2]);
        assert_eq!(reply[8..18], [2, 0, 0x5e, 0x10, 0, 2, 192, 0, 2, 2]);
        assert_eq!(reply[18..], REQUEST[8..18]);
    }

    #[test]
    fn probes_and_announcements_are_distinguished() {
        let address = Ipv4Addr::new(192, 0, 2, 7);
        let probe = Arp::probe(MAC, address);
        assert!(probe.is_probe() && !probe.is_announcement());
        let announcement = Arp::announcement(MAC, address);
        assert!(announcement.is_announcement() && !announcement.is_probe());
        let request = Arp::parse(&REQUEST).unwrap();
        assert!(!request.is_probe() && !request.is_announcement());
    }

    #[test]
    fn every_parse_error_has_its_variant() {
        let with = |at: usize, value: u8| {
            let mut message = REQUEST;
            message[at] = value;
            Arp::parse(&message)
        };
        let length = |hardware, protocol| Err(ArpError::AddressLength { hardware, protocol });
        assert_eq!(Arp::parse(&REQUEST[..27]), Err(ArpError::Truncated));
        assert_eq!(with(1, 6), Err(ArpError::HardwareType(6)));
        assert_eq!(with(3, 6), Err(ArpError::ProtocolType(0x0806)));
        assert_eq!(with(4, 8), length(8, 4));
        assert_eq!(with(5, 16), length(6, 16));
        assert_eq!(with(7, 3), Err(ArpError::Operation(3)));
    }
}

//! The flow of a packet, from its headers.

use super::DeviceId;
use super::flows::{Direction, FlowKey};
use crate::time::Instant;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use std::net::IpAddr;
use std::time::Duration;

/// Maximum number of fragmented packets whose ports are remembered.
const FRAGMENTED: usize = 64;
/// Time for which fragmented packets are remembered (RFC 1122 section 3.3.2 allows a receiver 60 s;
/// fragments follow each other closely).
const FRAGMENTED_FOR: Duration = Duration::from_secs(10);

/// The two ends of a packet, and its direction.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// The device.
    pub device: DeviceId,
    /// The address of the remote end in the tunnel.
    pub remote: IpAddr,
    /// Whether the packet leaves the device's network or enters it.
    pub direction: Direction,
}

/// Input to the rules: the flow of a packet, and the port of the service.
pub(super) struct Query {
    /// The flow.
    pub key: FlowKey,
    /// Whether it may open the flow: not an ICMP error.
    pub opens: bool,
    /// Whether the key has ports.
    pub has_ports: bool,
    /// The packet, if it is a first fragment.
    pub first: Option<FirstFragment>,
}

/// Returns the flow of a packet.
pub(super) fn query(
    fragments: &Fragments,
    now: Instant,
    packet: &[u8],
    ip: &IpPacket,
    ends: Ends,
) -> Query {
    let transport = packet.get(ip.header_len..).unwrap_or_default();
    let mut first = None;
    let (source, destination, has_ports, opens) = match ip.protocol {
        _ if ip.fragment => {
            let key = fragment_key(packet, ip);
            let ports = if ip.fragment_offset(packet) > 0 {
                key.and_then(|key| fragments.ports(key, now))
            } else {
                first = key.and_then(|key| FirstFragment::read(key, transport));
                first.map(|first| first.ports)
            };
            let (source, destination) = ports.unwrap_or_default();
            (source, destination, ports.is_some(), true)
        }
        PROTO_TCP | PROTO_UDP => match transport.first_chunk() {
            Some(&[a, b, c, d]) => (
                u16::from_be_bytes([a, b]),
                u16::from_be_bytes([c, d]),
                true,
                true,
            ),
            None => (0, 0, false, true),
        },
        PROTO_ICMP | PROTO_ICMPV6 => {
            let (identifier, error) = icmp_of(ip.protocol, transport);
            if let Some(quoted) = error
                && let Some(key) = quoted_flow(quoted, ends)
            {
                return Query {
                    key,
                    opens: false,
                    has_ports: false,
                    first: None,
                };
            }
            (identifier, identifier, false, error.is_none())
        }
        _ => (0, 0, false, true),
    };
    let (device_port, remote_port) = match ends.direction {
        Direction::Out => (source, destination),
        Direction::In => (destination, source),
    };
    Query {
        key: FlowKey {
            device: ends.device.0,
            remote: ends.remote,
            protocol: ip.protocol,
            device_port,
            remote_port,
        },
        opens,
        has_ports,
        first,
    }
}

/// Returns the identifier of an ICMP query, which is the same in both directions, or the packet
/// that an error quotes (RFC 792, RFC 4443).
fn icmp_of(protocol: u8, message: &[u8]) -> (u16, Option<&[u8]>) {
    let Some(&kind) = message.first() else {
        return (0, None);
    };
    let is_error = match protocol {
        PROTO_ICMP => matches!(kind, 3 | 4 | 5 | 11 | 12),
        _ => kind < 128,
    };
    let is_query = match protocol {
        PROTO_ICMP => matches!(kind, 0 | 8 | 13 | 14),
        _ => matches!(kind, 128 | 129),
    };
    let identifier = match message.get(4..6) {
        Some(&[a, b]) if is_query => u16::from_be_bytes([a, b]),
        _ => 0,
    };
    (
        identifier,
        is_error.then(|| message.get(8..).unwrap_or_default()),
    )
}

/// The flow of the packet that an ICMP error quotes: it went against the error's direction.
fn quoted_flow(quoted: &[u8], ends: Ends) -> Option<FlowKey> {
    let ip = IpPacket::parse_headers(quoted).ok()?;
    let transport = quoted.get(ip.header_len..)?;
    let (source, destination) = match ip.protocol {
        PROTO_TCP | PROTO_UDP => {
            let &[a, b, c, d] = transport.first_chunk()?;
            (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
        }
        PROTO_ICMP | PROTO_ICMPV6 => {
            let (identifier, _) = icmp_of(ip.protocol, transport);
            (identifier, identifier)
        }
        _ => (0, 0),
    };
    // A router of the overlay may have sent the error. The quote names the remote, by its overlay
    // addresses.
    let (remote, device_port, remote_port) = match ends.direction {
        Direction::In => (ip.dst, source, destination),
        Direction::Out => (ends.remote, destination, source),
    };
    Some(FlowKey {
        device: ends.device.0,
        remote,
        protocol: ip.protocol,
        device_port,
        remote_port,
    })
}

/// The ports of packets whose first fragment passed. Later fragments have no ports.
#[derive(Debug, Default)]
pub(super) struct Fragments {
    known: Vec<(FirstFragment, Instant)>,
    next: usize,
}

/// The first fragment of a packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstFragment {
    key: FragmentKey,
    /// Source and destination.
    ports: (u16, u16),
}

type FragmentKey = (IpAddr, IpAddr, u8, u32);

impl FirstFragment {
    /// Reads it, if it holds the ports.
    fn read(key: FragmentKey, transport: &[u8]) -> Option<FirstFragment> {
        let &[a, b, c, d] = transport.first_chunk()?;
        let ports = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Some(FirstFragment { key, ports })
    }
}

impl Fragments {
    /// The ports of the packet that a later fragment is of.
    fn ports(&self, key: FragmentKey, now: Instant) -> Option<(u16, u16)> {
        let known = self.known.iter();
        let mut recent = known.filter(|(_, at)| !at.has_expired(FRAGMENTED_FOR, now));
        let (first, _) = recent.find(|(first, _)| first.key == key)?;
        Some(first.ports)
    }

    /// A packet passed; `first` is set if it was a first fragment.
    pub(super) fn passed(&mut self, first: Option<FirstFragment>, now: Instant) {
        let Some(first) = first else { return };
        if self.known.len() < FRAGMENTED {
            self.known.push((first, now));
        } else {
            self.known[self.next] = (first, now);
            self.next = (self.next + 1) % FRAGMENTED;
        }
    }
}

/// Identifies the packet of a fragment, by the identification of IPv4 or that of the fragment header,
/// which ends where the walk ended.
fn fragment_key(packet: &[u8], ip: &IpPacket) -> Option<FragmentKey> {
    let id = match ip.src {
        IpAddr::V4(_) => u32::from(u16::from_be_bytes(*packet.get(4..6)?.first_chunk()?)),
        IpAddr::V6(_) => {
            let field = packet.get(ip.header_len - 4..ip.header_len)?;
            u32::from_be_bytes(*field.first_chunk()?)
        }
    };
    Some((ip.src, ip.dst, ip.protocol, id))
}

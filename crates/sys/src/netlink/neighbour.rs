//! Neighbours: hardware addresses of the hosts on a link (ARP, RFC 826; neighbour discovery, RFC
//! 4861), and proxy entries, for which this host answers.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE, NlasIterator, ParseableParametrized};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourHeader, NeighbourMessage,
    NeighbourState,
};

use super::{Family, Netlink, NetlinkError};

/// `struct ndmsg`.
const NEIGHBOUR_HEADER_SIZE: usize = 12;

/// An entry of the kernel's neighbour table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// The address of the neighbour.
    pub address: IpAddr,
    /// Hardware address; `None` while it is unknown, and on links without hardware addresses.
    pub mac: Option<[u8; 6]>,
    /// State of reachability (RFC 4861, section 7.3.2).
    pub state: NeighbourState,
}

impl Netlink {
    /// Answers ARP or neighbour solicitations for `address` on an interface with its hardware
    /// address. An existing entry is no error.
    ///
    /// The kernel answers only under further conditions (`arp_process()`, net/ipv4/arp.c;
    /// `ndisc_recv_ns()`, net/ipv6/ndisc.c): for IPv4, its route to the address leaves through
    /// another interface and `forwarding` is on; for IPv6, `forwarding` and `proxy_ndp` are on. It
    /// waits a random time up to `net.ipv4.neigh.INTERFACE.proxy_delay` (0.8 s) before it answers a
    /// broadcast: set that to 0.
    pub fn add_proxy(&self, index: u32, address: IpAddr) -> Result<(), NetlinkError> {
        let message = RouteNetlinkMessage::NewNeighbour(proxy_message(index, address));
        self.change(message, NLM_F_CREATE | NLM_F_REPLACE, |netlink| {
            format!("answer for {address} on {}", netlink.describe_link(index))
        })
    }

    /// Stops answering for `address` on an interface.
    pub fn delete_proxy(&self, index: u32, address: IpAddr) -> Result<(), NetlinkError> {
        let message = RouteNetlinkMessage::DelNeighbour(proxy_message(index, address));
        self.change(message, 0, |netlink| {
            format!(
                "stop answering for {address} on {}",
                netlink.describe_link(index)
            )
        })
    }

    /// Returns the neighbours on an interface, of both families, without the kernel's own group and
    /// broadcast addresses (`Noarp`).
    pub fn neighbours(&self, index: u32) -> Result<Vec<Neighbour>, NetlinkError> {
        let entries = self.dump(
            RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()),
            |_, payload| parse_neighbour(payload),
            |_| "list the neighbours".into(),
        )?;
        let own = entries.into_iter().filter(|entry| entry.index == index);
        Ok(own
            .map(|entry| entry.neighbour)
            .filter(|neighbour| neighbour.state != NeighbourState::Noarp)
            .collect())
    }
}

fn proxy_message(index: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = Family::of(address).into();
    message.header.ifindex = index;
    message.header.flags = NeighbourFlags::Proxy;
    message.attributes = vec![NeighbourAttribute::Destination(address.into())];
    message
}

struct Entry {
    index: u32,
    neighbour: Neighbour,
}

/// Parses `RTM_NEWNEIGH`.
fn parse_neighbour(payload: &[u8]) -> Option<Entry> {
    let header = NeighbourHeader::parse(payload).ok()?;
    let (mut address, mut mac) = (None, None);
    for nla in NlasIterator::new(payload.get(NEIGHBOUR_HEADER_SIZE..)?).map_while(Result::ok) {
        match NeighbourAttribute::parse_with_param(&nla, header.family) {
            Ok(NeighbourAttribute::Destination(NeighbourAddress::Inet(v4))) => {
                address = Some(IpAddr::V4(v4));
            }
            Ok(NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6))) => {
                address = Some(IpAddr::V6(v6));
            }
            Ok(NeighbourAttribute::LinkLayerAddress(bytes)) => mac = bytes[..].try_into().ok(),
            _ => {}
        }
    }
    Some(Entry {
        index: header.ifindex,
        neighbour: Neighbour {
            address: address?,
            mac,
            state: header.state,
        },
    })
}

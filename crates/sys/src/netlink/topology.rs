//! Relations of interfaces: master, lower link, the underlay of a tunnel, the queueing discipline,
//! and the properties of a tun device. They are parsed attribute by attribute from one listing
//! (include/uapi/linux/if_link.h), with the same care as bytes from the network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkMessage;

use super::link::{LINK_HEADER_SIZE, parse_link};
use super::{LinkInfo, Netlink, NetlinkError};

const IFLA_LINK: u16 = 5;
const IFLA_QDISC: u16 = 6;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_STATS64: u16 = 23;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_VNET_HDR: u16 = 5;
/// `IFF_TAP` (include/uapi/linux/if_tun.h), as in `IFLA_TUN_TYPE`.
const TYPE_TAP: u8 = 2;
/// Mask that removes the flags of an attribute's type: nested, byte order
/// (include/uapi/linux/netlink.h).
const NLA_TYPE_MASK: u16 = 0x3fff;

/// An interface and its relations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkNode {
    /// The interface. The kind of a tap is `tap`, although the kernel calls both `tun`.
    pub info: LinkInfo,
    /// Index of the bridge, bond or VRF it belongs to.
    pub master: Option<u32>,
    /// Index of the lower interface (VLAN, macvlan) or of the other end (veth), in this namespace.
    pub lower: Option<u32>,
    /// Whether the lower interface, or the other end, is in another network namespace.
    pub lower_elsewhere: bool,
    /// The root queueing discipline.
    pub qdisc: String,
    /// Bytes carried in both directions.
    pub bytes: u64,
    /// Whether a tun or tap device carries super-packets (`IFF_VNET_HDR`); `None` for other kinds,
    /// and on kernels before 4.20, which do not report it.
    pub vnet_hdr: Option<bool>,
    /// For a kernel tunnel: index of the interface that it is bound to.
    pub underlay: Option<u32>,
    /// For a kernel tunnel: the remote end, if there is only one.
    pub remote: Option<IpAddr>,
}

impl Netlink {
    /// Returns all interfaces of the namespace with their relations.
    pub fn topology(&self) -> Result<Vec<LinkNode>, NetlinkError> {
        self.dump(
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            |_, payload| parse_node(payload),
            |_| "list the interfaces".into(),
        )
    }
}

/// Parses `RTM_NEWLINK`.
fn parse_node(payload: &[u8]) -> Option<LinkNode> {
    let mut node = LinkNode {
        info: parse_link(payload)?,
        ..LinkNode::default()
    };
    let (mut kind, mut data): (&[u8], &[u8]) = (&[], &[]);
    for (attribute, value) in attributes(payload.get(LINK_HEADER_SIZE..)?) {
        match attribute {
            IFLA_LINK => node.lower = number(value).filter(|index| *index != 0),
            IFLA_LINK_NETNSID => node.lower_elsewhere = true,
            IFLA_MASTER => node.master = number(value).filter(|index| *index != 0),
            IFLA_QDISC => node.qdisc = text(value),
            IFLA_STATS64 => node.bytes = carried(value).unwrap_or(0),
            IFLA_LINKINFO => {
                for (attribute, value) in attributes(value) {
                    match attribute {
                        IFLA_INFO_KIND => kind = value,
                        IFLA_INFO_DATA => data = value,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if node.lower_elsewhere || node.lower == Some(node.info.index) {
        node.lower = None;
    }
    let kind = text(kind);
    if kind == "tun" {
        read_tun(&mut node, data);
    } else if let Some(layout) = Layout::of(&kind) {
        layout.read(&mut node, data);
    }
    Some(node)
}

fn read_tun(node: &mut LinkNode, data: &[u8]) {
    for (attribute, value) in attributes(data) {
        match (attribute, value) {
            (IFLA_TUN_TYPE, [TYPE_TAP, ..]) => node.info.kind = "tap".into(),
            (IFLA_TUN_VNET_HDR, [flag, ..]) => node.vnet_hdr = Some(*flag != 0),
            _ => {}
        }
    }
}

/// The attributes in which a kind of tunnel stores its underlay.
struct Layout {
    link: Option<u16>,
    remote: &'static [u16],
}

impl Layout {
    fn of(kind: &str) -> Option<Self> {
        let (link, remote): (Option<u16>, &'static [u16]) = match kind {
            // IFLA_VXLAN_LINK; IFLA_VXLAN_GROUP and _GROUP6.
            "vxlan" => (Some(3), &[2, 16]),
            // IFLA_GENEVE_REMOTE and _REMOTE6.
            "geneve" => (None, &[2, 7]),
            // IFLA_GRE_LINK, IFLA_GRE_REMOTE.
            "gre" | "gretap" | "ip6gre" | "ip6gretap" | "erspan" | "ip6erspan" => (Some(1), &[7]),
            // IFLA_IPTUN_LINK, IFLA_IPTUN_REMOTE.
            "ipip" | "sit" | "ip6tnl" => (Some(1), &[3]),
            // IFLA_VTI_LINK, IFLA_VTI_REMOTE.
            "vti" | "vti6" => (Some(1), &[5]),
            // IFLA_XFRM_LINK.
            "xfrm" => (Some(1), &[]),
            _ => return None,
        };
        Some(Self { link, remote })
    }

    fn read(&self, node: &mut LinkNode, data: &[u8]) {
        for (attribute, value) in attributes(data) {
            if Some(attribute) == self.link {
                node.underlay = number(value).filter(|index| *index != 0);
            } else if self.remote.contains(&attribute) {
                // A multicast group is not a single remote end.
                let one = |ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast();
                node.remote = node.remote.or(address(value).filter(one));
            }
        }
    }
}

/// Iterates over the attributes in `bytes`, up to the first malformed one.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind & NLA_TYPE_MASK, value))
    })
}

/// Decodes a string attribute, without the terminating zero.
pub(super) fn text(value: &[u8]) -> String {
    let length = value.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&value[..length.unwrap_or(value.len())]).into_owned()
}

/// Decodes a number of 32 bits in host order.
pub(super) fn number(value: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(*value.first_chunk()?))
}

/// Returns the sum of `rx_bytes` and `tx_bytes`, the third and fourth fields of `struct
/// rtnl_link_stats64`.
fn carried(value: &[u8]) -> Option<u64> {
    let word = |at: usize| Some(u64::from_ne_bytes(*value.get(8 * at..)?.first_chunk()?));
    Some(word(2)?.saturating_add(word(3)?))
}

fn address(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => Some(Ipv4Addr::from(*value.first_chunk()?).into()),
        16 => Some(Ipv6Addr::from(*value.first_chunk()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_namespace::namespace;

    #[test]
    fn attributes_end_at_the_first_that_is_malformed() {
        // Length 6, type 1 (nested), two bytes, padding; then a length beyond the end.
        let bytes = [
            6u16.to_ne_bytes(),
            0x8001u16.to_ne_bytes(),
            [7, 8],
            [0, 0],
            99u16.to_ne_bytes(),
            2u16.to_ne_bytes(),
        ]
        .concat();
        let found: Vec<_> = attributes(&bytes).collect();
        assert_eq!(found, [(1, &[7u8, 8][..])]);
        for length in 0..bytes.len() {
            assert!(attributes(&bytes[..length]).count() <= 1);
        }
        assert_eq!(attributes(&[0; 64]).count(), 0);
    }

    #[test]
    fn a_veth_in_a_bridge_knows_its_bridge_and_its_peer() {
        let Some(namespace) = namespace() else { return };
        let netlink = namespace.netlink().unwrap();
        let bridge = netlink.create_bridge("b0").unwrap();
        let port = netlink.create_veth("v0", "v1", None).unwrap();
        netlink.set_master(port, Some(bridge)).unwrap();
        let nodes = netlink.topology().unwrap();
        let node = |name: &str| nodes.iter().find(|node| node.info.name == name).unwrap();
        assert_eq!(node("v0").master, Some(bridge));
        assert_eq!(node("v0").lower, Some(node("v1").info.index));
        assert_eq!(node("v1").lower, Some(port));
        assert_eq!(node("b0").info.kind, "bridge");
        assert_eq!(node("lo").qdisc, "noqueue");
    }

    #[test]
    fn a_veth_with_a_peer_in_another_namespace_is_marked() {
        use std::os::fd::AsFd;
        let (Some(here), Some(there)) = (namespace(), namespace()) else {
            return;
        };
        let netlink = here.netlink().unwrap();
        netlink
            .create_veth("v0", "v1", Some(there.as_fd()))
            .unwrap();
        let nodes = netlink.topology().unwrap();
        let node = nodes.iter().find(|node| node.info.name == "v0").unwrap();
        assert!(node.lower_elsewhere && node.lower.is_none(), "{node:?}");
    }

    #[test]
    fn the_underlay_of_a_vxlan_is_read() {
        // IFLA_VXLAN_ID 42, IFLA_VXLAN_GROUP 192.0.2.7, IFLA_VXLAN_LINK 3.
        let attribute = |kind: u16, value: &[u8]| {
            let length = (4 + value.len() as u16).to_ne_bytes();
            [&length[..], &kind.to_ne_bytes(), value].concat()
        };
        let data = [
            attribute(1, &42u32.to_ne_bytes()),
            attribute(2, &[192, 0, 2, 7]),
            attribute(3, &3u32.to_ne_bytes()),
        ]
        .concat();
        let mut node = LinkNode::default();
        Layout::of("vxlan").unwrap().read(&mut node, &data);
        assert_eq!(node.underlay, Some(3));
        assert_eq!(node.remote, Some("192.0.2.7".parse().unwrap()));
        let group = attribute(2, &[239, 1, 1, 1]);
        let mut node = LinkNode::default();
        Layout::of("vxlan").unwrap().read(&mut node, &group);
        assert_eq!(node.remote, None);
    }
}

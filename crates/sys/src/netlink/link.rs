//! Network interfaces: look up, create, change, delete, count.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NlasIterator, ParseableParametrized};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader,
    LinkInfo as LinkInfoAttribute, LinkMessage,
};
use netlink_packet_route::stats::{StatsAttribute, StatsFilterMask, StatsMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use super::error::Fault;
use super::{Netlink, NetlinkError};

/// The counters of one interface (`struct rtnl_link_stats64`, include/uapi/linux/if_link.h, which
/// also defines each). `tx_dropped` of a TUN interface counts packets that found its ring full.
pub use netlink_packet_route::link::Stats64 as LinkStats;

/// `struct ifinfomsg`.
pub(super) const LINK_HEADER_SIZE: usize = 16;
/// `IFNAMSIZ` without the terminating zero.
const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// Properties of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkInfo {
    /// Interface index, unique in the namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Driver kind (`tun`, `veth`, `bridge`, `wireguard` ...); empty for hardware and loopback.
    pub kind: String,
    /// Type of its frames (`ARPHRD_*`, include/uapi/linux/if_arp.h); 1 is Ethernet.
    pub hardware_type: u16,
    /// Hardware address; empty for TUN. [`LinkInfo::mac`] returns it as six bytes.
    pub address: Vec<u8>,
    /// Maximum packet size in bytes, without link header.
    pub mtu: u32,
    /// Transmit queue length in packets; for TUN the size of its ring.
    pub tx_queue_len: u32,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Has a carrier (`IFF_LOWER_UP`).
    pub carrier: bool,
    /// Number of receive queues.
    pub num_rx_queues: u32,
    /// Maximum size of a segmentation-offload packet in bytes.
    pub gso_max_size: u32,
    /// Maximum number of segments in such a packet.
    pub gso_max_segs: u32,
    /// Maximum size of a GSO packet in bytes for IPv4; 0 before Linux 6.3, which has no separate
    /// limit.
    pub gso_ipv4_max_size: u32,
}

impl LinkInfo {
    /// Returns the hardware address if it is an Ethernet address.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.address[..].try_into().ok()
    }
}

impl Netlink {
    /// Returns the index of the interface with this name, or `None`.
    pub fn link_index(&self, name: &str) -> Result<Option<u32>, NetlinkError> {
        match self.link(name) {
            Ok(link) => Ok(Some(link.index)),
            Err(NetlinkError::NoSuchDevice { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the interface with this name.
    pub fn link(&self, name: &str) -> Result<LinkInfo, NetlinkError> {
        check_name(name)?;
        let attributes = vec![LinkAttribute::IfName(name.into())];
        self.find_link(0, attributes, || format!("look up interface {name}"))
    }

    /// Returns the interface with this index.
    pub fn link_by_index(&self, index: u32) -> Result<LinkInfo, NetlinkError> {
        self.find_link(index, vec![], || format!("look up interface {index}"))
    }

    /// Returns all interfaces of the namespace.
    pub fn links(&self) -> Result<Vec<LinkInfo>, NetlinkError> {
        let message = link_message(
            0,
            vec![LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])],
        );
        self.dump(
            RouteNetlinkMessage::GetLink(message),
            |_, payload| parse_link(payload),
            |_| "list the interfaces".into(),
        )
    }

    /// Returns the counters of an interface.
    pub fn link_stats(&self, index: u32) -> Result<LinkStats, NetlinkError> {
        let mut message = StatsMessage::default();
        message.header.ifindex = index;
        message.header.filter_mask = StatsFilterMask::Link64;
        let action =
            |netlink: &Self| format!("read the counters of {}", netlink.describe_link(index));
        self.get(RouteNetlinkMessage::GetStats(message), parse_stats, action)?
            .ok_or_else(|| NetlinkError::Malformed {
                action: action(self),
                reason: "no IFLA_STATS_LINK_64 in it".into(),
            })
    }

    /// Sets an interface up.
    pub fn set_up(&self, index: u32) -> Result<(), NetlinkError> {
        self.set_flags(index, LinkFlags::Up, "up")
    }

    /// Sets an interface down. The kernel removes its routes and its IPv6 addresses.
    pub fn set_down(&self, index: u32) -> Result<(), NetlinkError> {
        self.set_flags(index, LinkFlags::empty(), "down")
    }

    /// Set the MTU in bytes.
    pub fn set_mtu(&self, index: u32, mtu: u32) -> Result<(), NetlinkError> {
        self.set(index, vec![LinkAttribute::Mtu(mtu)], || {
            format!("set the MTU to {mtu}")
        })
    }

    /// Set the transmit queue length in packets.
    pub fn set_tx_queue_len(&self, index: u32, packets: u32) -> Result<(), NetlinkError> {
        self.set(index, vec![LinkAttribute::TxQueueLen(packets)], || {
            format!("set the transmit queue length to {packets}")
        })
    }

    /// Limits the packets that the stack passes to the interface for segmentation: bytes, segments,
    /// and bytes for IPv4. Kernels before 6.3 ignore the last.
    pub fn set_gso_max(
        &self,
        index: u32,
        gso_max_size: u32,
        gso_max_segs: u32,
        gso_ipv4_max_size: u32,
    ) -> Result<(), NetlinkError> {
        let attributes = vec![
            LinkAttribute::GsoMaxSize(gso_max_size),
            LinkAttribute::GsoMaxSegs(gso_max_segs),
            LinkAttribute::GsoIpv4MaxSize(gso_ipv4_max_size),
        ];
        self.set(index, attributes, || {
            format!(
                "set the GSO limits to {gso_max_size} bytes, {gso_max_segs} segments and \
                 {gso_ipv4_max_size} bytes for IPv4"
            )
        })
    }

    /// Renames an interface. Before Linux 6.2 it must be down.
    pub fn rename(&self, index: u32, name: &str) -> Result<(), NetlinkError> {
        check_name(name)?;
        self.set(index, vec![LinkAttribute::IfName(name.into())], || {
            format!("set the name {name}")
        })
    }

    /// Set the hardware address.
    pub fn set_hardware_address(&self, index: u32, address: [u8; 6]) -> Result<(), NetlinkError> {
        self.set(
            index,
            vec![LinkAttribute::Address(address.to_vec())],
            || format!("set the hardware address {address:02x?}"),
        )
    }

    /// Makes an interface a port of a bridge (or another master), or releases it with `None`.
    pub fn set_master(&self, index: u32, master: Option<u32>) -> Result<(), NetlinkError> {
        self.set(
            index,
            vec![LinkAttribute::Controller(master.unwrap_or(0))],
            || match master {
                Some(master) => format!("set the master {}", self.describe_link(master)),
                None => "release the master".into(),
            },
        )
    }

    /// Creates a pair of virtual Ethernet interfaces, the second in `peer_netns` if given. Returns
    /// the index of the first.
    pub fn create_veth(
        &self,
        name: &str,
        peer_name: &str,
        peer_netns: Option<BorrowedFd<'_>>,
    ) -> Result<u32, NetlinkError> {
        check_name(peer_name)?;
        let mut peer = link_message(0, vec![LinkAttribute::IfName(peer_name.into())]);
        if let Some(netns) = peer_netns {
            peer.attributes
                .push(LinkAttribute::NetNsFd(netns.as_raw_fd()));
        }
        let data = InfoData::Veth(InfoVeth::Peer(peer));
        self.create(name, InfoKind::Veth, Some(data), || {
            format!("create the veth pair {name} and {peer_name}")
        })
    }

    /// Creates a bridge. Returns its index.
    pub fn create_bridge(&self, name: &str) -> Result<u32, NetlinkError> {
        self.create(name, InfoKind::Bridge, None, || {
            format!("create the bridge {name}")
        })
    }

    /// Creates a WireGuard interface in `netns`. Its own datagrams leave through this socket's namespace, where the kernel
    /// keeps its UDP sockets ("The New Namespace Solution", wireguard.com/netns).
    pub fn create_wireguard(&self, name: &str, netns: BorrowedFd<'_>) -> Result<(), NetlinkError> {
        check_name(name)?;
        let attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::NetNsFd(netns.as_raw_fd()),
            LinkAttribute::LinkInfo(vec![LinkInfoAttribute::Kind(InfoKind::Wireguard)]),
        ];
        let message = RouteNetlinkMessage::NewLink(link_message(0, attributes));
        self.change(message, NLM_F_CREATE | NLM_F_EXCL, |_| {
            format!("create the WireGuard interface {name}")
        })
    }

    /// Deletes an interface (of a veth pair, both).
    pub fn delete_link(&self, index: u32) -> Result<(), NetlinkError> {
        self.change(
            RouteNetlinkMessage::DelLink(link_message(index, vec![])),
            0,
            |netlink| format!("delete {}", netlink.describe_link(index)),
        )
    }

    /// Returns "interface eth0", or "interface 7" if it no longer has a name.
    pub(super) fn describe_link(&self, index: u32) -> String {
        match self.link_by_index(index) {
            Ok(link) => format!("interface {}", link.name),
            Err(_) => format!("interface {index}"),
        }
    }

    fn find_link(
        &self,
        index: u32,
        mut attributes: Vec<LinkAttribute>,
        action: impl Fn() -> String,
    ) -> Result<LinkInfo, NetlinkError> {
        attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let message = RouteNetlinkMessage::GetLink(link_message(index, attributes));
        self.get(message, |_, payload| parse_link(payload), |_| action())?
            .ok_or_else(|| NetlinkError::Malformed {
                action: action(),
                reason: "no interface in it".into(),
            })
    }

    fn set_flags(&self, index: u32, flags: LinkFlags, state: &str) -> Result<(), NetlinkError> {
        let mut message = link_message(index, vec![]);
        message.header.flags = flags;
        message.header.change_mask = LinkFlags::Up;
        self.change(RouteNetlinkMessage::SetLink(message), 0, |netlink| {
            format!("set {} {state}", netlink.describe_link(index))
        })
    }

    /// Changes an interface. `action` starts with the verb and does not name the interface.
    fn set(
        &self,
        index: u32,
        attributes: Vec<LinkAttribute>,
        action: impl FnOnce() -> String,
    ) -> Result<(), NetlinkError> {
        let message = RouteNetlinkMessage::SetLink(link_message(index, attributes));
        self.change(message, 0, |netlink| {
            format!("{} of {}", action(), netlink.describe_link(index))
        })
    }

    fn create(
        &self,
        name: &str,
        kind: InfoKind,
        data: Option<InfoData>,
        action: impl Fn() -> String,
    ) -> Result<u32, NetlinkError> {
        check_name(name)?;
        let mut info = vec![LinkInfoAttribute::Kind(kind)];
        info.extend(data.map(LinkInfoAttribute::Data));
        let attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::LinkInfo(info),
        ];
        let message = RouteNetlinkMessage::NewLink(link_message(0, attributes));
        let outcome = self.exchange(
            message,
            netlink_packet_core::NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
            |_, _| (),
        );
        match outcome {
            Ok(()) => Ok(self.link(name)?.index),
            // The kind is unknown, not a parameter (rtnl_newlink(), net/core/rtnetlink.c).
            Err(fault) if fault.is(Errno::EOPNOTSUPP) => Err(NetlinkError::Refused {
                action: action(),
                errno: Errno::EOPNOTSUPP,
                detail: String::new(),
                remedy: "the kernel lacks this kind of interface: load its module (modprobe)",
            }),
            Err(fault) => Err(Fault::into_error(fault, action())),
        }
    }
}

/// Refuses names that `dev_valid_name()` (net/core/dev.c) refuses, with the reason, and `%`, which
/// the kernel would replace by a number.
pub fn check_name(name: &str) -> Result<(), NetlinkError> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > NAME_MAX {
        "it is longer than 15 bytes"
    } else if name == "." || name == ".." {
        "it is the name of a directory"
    } else if name.contains(['/', ':', '%', '\0'])
        || name.contains(|c: char| c.is_ascii_whitespace() || c == '\x0b')
    {
        "it contains a space, '/', ':', '%' or a zero byte"
    } else {
        return Ok(());
    };
    Err(NetlinkError::InvalidName {
        name: name.into(),
        reason,
    })
}

fn link_message(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

/// Parses `RTM_NEWLINK` or `RTM_DELLINK`. Messages of a bridge about its ports (`AF_BRIDGE`) are
/// ignored: one of them "deletes" a port that merely leaves the bridge.
pub(super) fn parse_link(payload: &[u8]) -> Option<LinkInfo> {
    let header = LinkHeader::parse(payload).ok()?;
    if header.interface_family != AddressFamily::Unspec {
        return None;
    }
    let mut link = LinkInfo {
        index: header.index,
        up: header.flags.contains(LinkFlags::Up),
        carrier: header.flags.contains(LinkFlags::LowerUp),
        hardware_type: header.link_layer_type.into(),
        ..LinkInfo::default()
    };
    for nla in NlasIterator::new(payload.get(LINK_HEADER_SIZE..)?).map_while(Result::ok) {
        let Ok(attribute) = LinkAttribute::parse_with_param(&nla, AddressFamily::Unspec) else {
            continue;
        };
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(address) => link.address = address,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::TxQueueLen(packets) => link.tx_queue_len = packets,
            LinkAttribute::NumRxQueues(queues) => link.num_rx_queues = queues,
            LinkAttribute::GsoMaxSize(bytes) => link.gso_max_size = bytes,
            LinkAttribute::GsoMaxSegs(segments) => link.gso_max_segs = segments,
            LinkAttribute::GsoIpv4MaxSize(bytes) => link.gso_ipv4_max_size = bytes,
            LinkAttribute::LinkInfo(info) => {
                link.kind = info
                    .iter()
                    .find_map(|info| match info {
                        LinkInfoAttribute::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    })
                    .unwrap_or_default();
            }
            _ => {}
        }
    }
    Some(link)
}

fn parse_stats(_: u16, payload: &[u8]) -> Option<LinkStats> {
    use netlink_packet_core::Parseable;
    let message = StatsMessage::parse(payload).ok()?;
    message
        .attributes
        .into_iter()
        .find_map(|attribute| match attribute {
            StatsAttribute::Link64(stats) => Some(stats),
            _ => None,
        })
}

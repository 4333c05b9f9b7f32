//! The sockets of the namespace and of the program, and the connections through the tunnel.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use seikan_observe::path::{SocketFacts, Transport, Unseen};

use super::network::Network;
use super::procfs;
use crate::netlink::NetlinkError;
use crate::netlink::diag::{self, TcpConnection, UdpSocket};
use crate::netns::NetNs;

/// Maximum number of connections that are reported.
const FLOWS_MAX: usize = 4096;
/// Maximum number of destinations whose route is looked up.
const LOOKUPS_MAX: usize = 1024;
/// `ETH_P_ALL` and `ETH_P_IP` as `/proc/net/packet` writes them. A socket for either receives the
/// packets of others.
const WHOLE_PROTOCOLS: [&str; 2] = ["0003", "0800"];
/// Flags of a listening Unix socket (`__SO_ACCEPTCON`, include/linux/net.h), as `/proc/net/unix`
/// writes them.
const LISTENS: &str = "00010000";

/// A packet socket.
#[derive(Debug, PartialEq, Eq)]
struct Packet {
    inode: u64,
    /// Index of the interface it is bound to; 0 for all.
    interface: u32,
    /// Whether it receives all protocols, or all of IPv4.
    every: bool,
    /// Whether it receives super-packets; `None` if the kernel does not report it.
    vnet_hdr: Option<bool>,
}

/// The sockets of a network namespace.
#[derive(Default)]
pub(super) struct Sockets {
    inet: HashMap<u64, SocketFacts>,
    packets: Vec<Packet>,
}

/// The sockets of a program.
#[derive(Default)]
pub(super) struct Own {
    /// Its sockets to the outside. Connected ones come first, those to the host itself last.
    pub(super) facts: Vec<SocketFacts>,
    /// Interfaces that its packet sockets are bound to.
    pub(super) bound: Vec<u32>,
}

impl Sockets {
    /// Reads the sockets of the calling thread's namespace.
    pub(super) fn read(unseen: &mut Vec<Unseen>) -> Self {
        let mut sockets = Self::default();
        sockets.read_inet(unseen);
        for file in ["raw", "raw6"] {
            let text = procfs::read(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
            for inode in text.lines().skip(1).filter_map(parse_raw) {
                sockets.inet.insert(inode, raw(inode));
            }
        }
        let text = procfs::read("/proc/thread-self/net/packet").unwrap_or_default();
        sockets.packets = text.lines().skip(1).filter_map(parse_packet).collect();
        // This needs the kernel module packet_diag.
        let listed = diag::packet_sockets().unwrap_or_default();
        for packet in &mut sockets.packets {
            let socket = listed.iter().find(|(inode, _)| *inode == packet.inode);
            packet.vnet_hdr = socket.map(|(_, vnet_hdr)| *vnet_hdr);
        }
        sockets
    }

    fn read_inet(&mut self, unseen: &mut Vec<Unseen>) {
        let refused = |kind: &str, error: NetlinkError| {
            // There is no socket of the kind, or the kernel module for listing them is missing.
            let why = format!("{error}; the module tcp_diag or udp_diag may have to be loaded");
            Unseen {
                what: kind.to_owned(),
                why,
            }
        };
        match diag::tcp_connections() {
            Ok(connections) => self.extend(connections.into_iter().map(tcp)),
            Err(error) => unseen.push(refused("TCP connections", error)),
        }
        match diag::udp_sockets() {
            Ok(sockets) => self.extend(sockets.into_iter().map(udp)),
            Err(error) => unseen.push(refused("UDP sockets", error)),
        }
    }

    /// Adds sockets that a process holds. Inode 0 means that none does.
    fn extend(&mut self, sockets: impl Iterator<Item = SocketFacts>) {
        let open = sockets.filter(|socket| socket.inode != 0);
        self.inet.extend(open.map(|socket| (socket.inode, socket)));
    }

    /// Returns the facts of an Internet socket of this namespace.
    pub(super) fn facts(&self, inode: u64) -> Option<&SocketFacts> {
        self.inet.get(&inode)
    }

    /// Returns the packet sockets that receive all packets of an interface.
    pub(super) fn packets_on(&self, interface: u32) -> Vec<u64> {
        let packets = self.packets.iter();
        let on =
            packets.filter(|packet| packet.every && [0, interface].contains(&packet.interface));
        on.map(|packet| packet.inode).collect()
    }

    /// Returns the interface that a packet socket is bound to.
    pub(super) fn bound_to(&self, inode: u64) -> Option<u32> {
        let packet = self.packets.iter().find(|packet| packet.inode == inode)?;
        (packet.interface != 0).then_some(packet.interface)
    }

    /// Returns the sockets of a process. If the program is in another namespace than its tun
    /// device, they are looked up there.
    pub(super) fn of(&self, pid: u32, unseen: &mut Vec<Unseen>) -> Own {
        let Ok(open) = procfs::descriptors(pid) else {
            unseen.push(Unseen {
                what: format!("the sockets of process {pid}"),
                why: "/proc/PID/fd of other users cannot be read; run the doctor as root".into(),
            });
            return Own::default();
        };
        let inodes: Vec<u64> = open
            .iter()
            .filter_map(|(_, target)| procfs::socket_inode(target))
            .collect();
        let mut own = self.pick(&inodes);
        if own.facts.is_empty() && procfs::namespace(pid) != procfs::namespace("thread-self") {
            let there = NetNs::open(format!("/proc/{pid}/ns/net"));
            let there = there.and_then(|there| there.run(|| Self::read(&mut Vec::new())));
            let why = match there {
                Ok(there) => {
                    own = there.pick(&inodes);
                    own.bound.clear(); // an index means another interface there
                    "another network namespace than the interface: its counters are not visible from here; run the doctor there too (`nsenter -t PID -n`)"
                        .to_owned()
                }
                Err(error) => format!("another network namespace, and {error}"),
            };
            unseen.push(Unseen {
                what: format!("the state of the sockets of process {pid}"),
                why: format!("they are in {why}"),
            });
        }
        own
    }

    fn pick(&self, inodes: &[u64]) -> Own {
        let mut own = Own::default();
        for inode in inodes {
            own.facts.extend(self.inet.get(inode).cloned());
            if let Some(packet) = self.packets.iter().find(|packet| packet.inode == *inode) {
                own.facts.push(SocketFacts {
                    vnet_hdr: packet.vnet_hdr,
                    ..raw(*inode)
                });
                own.bound
                    .extend(Some(packet.interface).filter(|index| *index != 0));
            }
        }
        own.bound.sort_unstable();
        own.bound.dedup();
        own.facts.sort_by_key(|socket| {
            let host = socket.local.ip().is_loopback();
            (host, socket.remote.is_none(), socket.inode)
        });
        own.facts.dedup_by_key(|socket| socket.inode);
        own
    }

    /// Returns the TCP connections of this host that have an address of the interface, or whose
    /// peer is routed through it.
    pub(super) fn flows(
        &self,
        network: &Network,
        interface: u32,
        unseen: &mut Vec<Unseen>,
    ) -> Vec<SocketFacts> {
        let own: Vec<IpAddr> = network
            .addresses(interface)
            .iter()
            .map(ipnet::IpNet::addr)
            .collect();
        let mut routes: HashMap<IpAddr, bool> = HashMap::new();
        let mut flows: Vec<&SocketFacts> = Vec::new();
        let mut passed_over = 0usize;
        for facts in self.inet.values() {
            let Some(remote) = facts.remote.map(|remote| remote.ip()) else {
                continue;
            };
            if facts.transport != Transport::Tcp || facts.local.ip().is_loopback() {
                continue;
            }
            let through = own.contains(&facts.local.ip()) || {
                if routes.len() >= LOOKUPS_MAX && !routes.contains_key(&remote) {
                    passed_over += 1;
                    continue;
                }
                *routes.entry(remote).or_insert_with(|| {
                    let route = network.netlink.route_get(remote, None);
                    route.is_ok_and(|route| route.device == interface)
                })
            };
            if through {
                flows.push(facts);
            }
        }
        flows.sort_by_key(|flow| flow.inode);
        passed_over += flows.len().saturating_sub(FLOWS_MAX);
        flows.truncate(FLOWS_MAX);
        if passed_over > 0 {
            unseen.push(Unseen {
                what: format!("{passed_over} more TCP connections"),
                why: format!("there are more than {FLOWS_MAX}, or too many peers to look up"),
            });
        }
        flows.into_iter().cloned().collect()
    }
}

fn tcp(connection: TcpConnection) -> SocketFacts {
    let memory = connection.memory.unwrap_or_default();
    SocketFacts {
        inode: connection.inode,
        transport: Transport::Tcp,
        local: connection.local,
        remote: Some(connection.remote),
        receive_buffer: memory.receive_buffer,
        send_buffer: memory.send_buffer,
        congestion: connection.congestion,
        vnet_hdr: None,
    }
}

fn udp(socket: UdpSocket) -> SocketFacts {
    let memory = socket.memory.unwrap_or_default();
    SocketFacts {
        inode: socket.inode,
        transport: Transport::Udp,
        local: socket.local,
        remote: socket.remote,
        receive_buffer: memory.receive_buffer,
        send_buffer: memory.send_buffer,
        congestion: None,
        vnet_hdr: None,
    }
}

/// A socket whose transport is unknown. Its address is not used.
fn raw(inode: u64) -> SocketFacts {
    SocketFacts {
        inode,
        transport: Transport::Raw,
        local: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        remote: None,
        receive_buffer: 0,
        send_buffer: 0,
        congestion: None,
        vnet_hdr: None,
    }
}

/// Parses the inode in a line of `/proc/net/raw` (`raw_sock_seq_show()`, net/ipv4/raw.c).
fn parse_raw(line: &str) -> Option<u64> {
    line.split_whitespace().nth(9)?.parse().ok()
}

/// Parses a line of `/proc/net/packet`: address, references, type, protocol, interface, running,
/// memory, user, inode (`packet_seq_show()`, net/packet/af_packet.c).
fn parse_packet(line: &str) -> Option<Packet> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    Some(Packet {
        inode: fields.get(8)?.parse().ok()?,
        interface: fields.get(4)?.parse().ok()?,
        every: WHOLE_PROTOCOLS.contains(fields.get(3)?),
        vnet_hdr: None,
    })
}

/// Returns the paths of a process's listening Unix sockets, in its own view of the file system.
pub(crate) fn listening(pid: u32) -> io::Result<Vec<String>> {
    let open = procfs::descriptors(pid)?;
    let inodes: Vec<u64> = open
        .iter()
        .filter_map(|(_, target)| procfs::socket_inode(target))
        .collect();
    let text = procfs::read(format!("/proc/{pid}/net/unix"))?;
    let lines = text.lines().skip(1).filter_map(parse_unix);
    let own = lines.filter(|(inode, _)| inodes.contains(inode));
    Ok(own.map(|(_, path)| path).collect())
}

/// Parses inode and path of a listening socket in a line of `/proc/net/unix`: address, references,
/// protocol, flags, type, state, inode, path (`unix_seq_show()`, net/unix/af_unix.c).
fn parse_unix(line: &str) -> Option<(u64, String)> {
    let mut rest = line;
    let mut fields = [""; 7];
    for field in &mut fields {
        let (word, after) = rest.trim_start().split_once(' ')?;
        (*field, rest) = (word, after);
    }
    let listens = fields[3] == LISTENS && rest.starts_with('/');
    let inode = fields[6].parse().ok()?;
    listens.then(|| (inode, rest.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_socket_is_known_by_its_inode_and_interface() {
        let line = "000000007a1e4c1b 3      3    0003   2     1 0      0      71844";
        let expected = Packet {
            inode: 71844,
            interface: 2,
            every: true,
            vnet_hdr: None,
        };
        assert_eq!(parse_packet(line), Some(expected));
        let four = "000000007a1e4c1b 3      2    0800   0     1 0      0      71846";
        assert!(parse_packet(four).unwrap().every);
        let other = "000000007a1e4c1b 3      2    888e   2     1 0      0      71845";
        assert!(!parse_packet(other).unwrap().every);
        assert_eq!(parse_packet("000000007a1e4c1b 3 3 0003"), None);
    }

    #[test]
    fn a_socket_that_listens_is_known_by_its_path() {
        let line =
            "00000000dd454255: 00000002 00000000 00010000 0001 01 632510 /run/a b/switch.ctl";
        let expected = (632_510, "/run/a b/switch.ctl".to_owned());
        assert_eq!(parse_unix(line), Some(expected));
        for other in [
            "00000000dd454255: 00000003 00000000 00000000 0001 03 632510 /run/switch.ctl",
            "00000000dd454255: 00000002 00000000 00010000 0001 01 632510 @abstract",
            "00000000dd454255: 00000002 00000000 00010000 0001 01 632510",
            "Num",
        ] {
            assert_eq!(parse_unix(other), None);
        }
    }

    #[test]
    fn a_raw_socket_is_known_by_its_inode() {
        let line = "  1: 00000000:0001 00000000:0000 07 00000000:00000000 00:00000000 00000000     \
                    0        0 24680 2 00000000d1a2b3c4 0";
        assert_eq!(parse_raw(line), Some(24680));
        assert_eq!(parse_raw("  1: 00000000:0001"), None);
    }
}

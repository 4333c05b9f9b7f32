//! A deliberately naive encapsulator, used as a fault: it puts one header before each packet that
//! the packet socket returns.
//!
//! Out: it reads a packet from the NIC with a packet socket (or from a TUN device), puts one
//! overlay header before it, sends both as one UDP datagram, and lets the kernel fragment the
//! datagram. In: it reads the outer NIC with a packet socket, removes the header, and passes the
//! packet to the kernel. This design assumes that packets are the frames on the wire. But receive
//! offload (GRO) merges packets before a packet socket sees them. Then the datagram exceeds the
//! MTU, all fragments but the first have no overlay header, and the whole datagram is lost. Without
//! GRO it works.
//!
//! It has one thread, handles one packet at a time, supports only IPv4, and uses a public key: it
//! is suitable only for comparison.

mod frame;

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use clap::Args;
use ipnet::{IpNet, Ipv4Net};
use nix::errno::Errno;
use nix::sys::socket::{LinkAddr, recvfrom, setsockopt, sockopt};
use seikan_sys::netlink::{Netlink, Route};
use seikan_sys::tun::{Tun, TunOptions, VNET_HEADER_LEN};
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};

use crate::error::{Doing, Result, usage};
use crate::tunnel::device::{readable, set_up};

pub use frame::PORT;
use frame::{Arrival, HEADER, complete_checksum, destination, open, seal};

/// MTU inside, in bytes: a TCP segment of 1460 bytes less virtual IP header, protocol header and
/// UDP header. Only the end with a TUN device sets it: TCP uses the smaller maximum segment size of
/// the two ends.
pub const MTU: u32 = 1460 - 20 - 64 - 8;

/// MTU of Ethernet, in bytes.
const ETHERNET_MTU: usize = 1500;
/// Size of a buffer: the headers and the largest packet, in bytes.
const BUFFER: usize = HEADER + 65_536;
/// Receive buffer of the packet socket in bytes, enough for some thousand packets.
const RECEIVE_BUFFER: usize = 8 << 20;

/// `AF_PACKET`, `ETH_P_IP` and `IPPROTO_RAW` of Linux, which the socket library has no names for.
const AF_PACKET: i32 = 17;
const ETH_P_IP: u16 = 0x0800;
const IPPROTO_RAW: i32 = 255;
/// `BPF_RET` with a constant (linux/filter.h): the number of bytes of a packet to accept.
const RETURN: u16 = 0x06;

/// Options of one end: the outer network, and the traffic that it carries.
#[derive(Clone, Debug, Args)]
pub struct NaiveOptions {
    /// Interface to the outside
    #[arg(long, value_name = "INTERFACE")]
    pub wan: String,
    /// Address of the other end
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Ipv4Addr,
    /// Carry packets that hosts on this NIC send
    #[arg(
        long,
        value_name = "INTERFACE",
        requires = "overlay",
        conflicts_with = "tun",
        required_unless_present = "tun"
    )]
    pub lan: Option<String>,
    /// Destinations of the packets to carry from --lan
    #[arg(long, value_name = "NETWORK", default_value = "10.77.0.0/24")]
    pub overlay: Ipv4Net,
    /// Create this TUN device, and carry packets sent into it
    #[arg(long, value_name = "INTERFACE", requires = "address")]
    pub tun: Option<String>,
    /// Address of the TUN device
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Option<Ipv4Net>,
    /// Networks to route into the TUN device
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',')]
    pub network: Vec<Ipv4Net>,
    /// Number of ports from which packets are sent alternately
    // Other programs then do not see that the packets belong to one tunnel.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub ports: u8,
}

/// Packet counts. `out` is towards the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NaiveCounts {
    /// Packets sent to the other end; a merged packet counts once.
    pub out: u64,
    /// Packets, sent or not, that were larger than the 1500 bytes of an Ethernet frame, because the
    /// kernel had merged them.
    pub merged: u64,
    /// Bytes of the largest packet for the other end, as the packet socket or TUN device gave it.
    pub largest: u64,
    /// Packets not sent because they were too large for a UDP datagram.
    pub oversized: u64,
    /// Packets not sent for another reason.
    pub unsent: u64,
    /// Packets from the other end handed to the kernel.
    pub arrived: u64,
    /// Dropped first fragments, which have the header but not the whole packet.
    pub cut: u64,
    /// Dropped further fragments, which have no overlay header.
    pub headless: u64,
    /// Dropped packets without the HMAC of the other end.
    pub foreign: u64,
    /// Packets that the kernel refused.
    pub undelivered: u64,
}

/// One end, ready to run. Its sockets belong to the namespace in which it was opened.
#[derive(Debug)]
pub struct Naive {
    nic: Socket,
    /// Sockets that send packets alternately. The first is bound to [`PORT`].
    udp: Vec<UdpSocket>,
    peer: SocketAddr,
    wan: u32,
    side: Side,
    number: u64,
    counts: NaiveCounts,
}

#[derive(Debug)]
enum Side {
    Lan {
        index: u32,
        overlay: Ipv4Net,
        raw: Socket,
    },
    Tun(Box<Tun>),
}

impl Naive {
    /// Opens the sockets and the TUN device, in the calling thread's network namespace.
    ///
    /// # Errors
    /// An interface does not exist; `CAP_NET_RAW` or `CAP_NET_ADMIN` is missing; no port is free.
    pub fn open(options: &NaiveOptions) -> Result<Self> {
        let netlink = Netlink::open()?;
        let index = |name: &str| netlink.link(name).map(|link| link.index);
        let wan = index(&options.wan)?;
        let mut nics = vec![wan];
        let side = match (&options.lan, &options.tun, options.address) {
            (Some(nic), ..) => {
                let index = index(nic)?;
                nics.push(index);
                let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(IPPROTO_RAW)));
                Side::Lan {
                    index,
                    overlay: options.overlay,
                    raw: raw.doing("open a raw IP socket (needs CAP_NET_RAW)")?,
                }
            }
            (None, Some(device), Some(address)) => {
                let tun = open_tun(&netlink, device, address, &options.network)?;
                Side::Tun(Box::new(tun))
            }
            _ => {
                let missing = "give either --lan, or --tun with --address";
                return Err(usage(missing));
            }
        };
        let ports = [PORT].into_iter().chain((1..options.ports).map(|_| 0));
        Ok(Self {
            nic: packet_socket(&nics).doing("open a packet socket")?,
            udp: ports.map(sending_socket).collect::<Result<_>>()?,
            peer: SocketAddrV4::new(options.peer, PORT).into(),
            wan,
            side,
            number: 0,
            counts: NaiveCounts::default(),
        })
    }

    /// Carries packets until `stop` is set.
    ///
    /// # Errors
    /// A socket has failed permanently.
    pub fn run(&mut self, stop: &Interrupt) -> Result<()> {
        let mut buffer = vec![0; BUFFER];
        while !stop.is_raised() {
            let [nic, tun] = self.wait().doing("wait for packets")?;
            if nic {
                self.read_nic(&mut buffer)
                    .doing("read from a packet socket")?;
            }
            if tun {
                self.read_tun(&mut buffer).doing("read from a TUN device")?;
            }
        }
        Ok(())
    }

    /// Returns the packet counts so far.
    pub fn counts(&self) -> NaiveCounts {
        self.counts
    }

    /// Returns whether the NIC and the TUN device have packets to read.
    fn wait(&self) -> io::Result<[bool; 2]> {
        let nic = self.nic.as_fd();
        match &self.side {
            Side::Lan { .. } => Ok([readable([nic])?[0], false]),
            Side::Tun(tun) => readable([nic, tun.queues()[0].as_fd()]),
        }
    }

    fn read_nic(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let read = recvfrom::<LinkAddr>(self.nic.as_raw_fd(), &mut buffer[HEADER..]);
        let (length, from) = match read {
            Ok((length, Some(from))) => (length, from.ifindex()),
            Ok((_, None)) | Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
            // The interface went down for a moment.
            Err(Errno::ENETDOWN) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        let end = HEADER + length;
        match &self.side {
            _ if from == self.wan as usize => self.inwards(&mut buffer[HEADER..end]),
            Side::Lan { index, overlay, .. } if from == *index as usize => {
                let carried = destination(&buffer[HEADER..end])
                    .is_some_and(|destination| overlay.contains(&destination));
                if carried {
                    self.outwards(&mut buffer[..end]);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn read_tun(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let Side::Tun(tun) = &self.side else {
            return Ok(());
        };
        // The overlay header overwrites the header of the device.
        match tun.queues()[0].read(&mut buffer[HEADER - VNET_HEADER_LEN..]) {
            Ok(length) => {
                let end = HEADER - VNET_HEADER_LEN + length;
                // The device carries only IPv4, but the kernel sends IPv6 to any device.
                if destination(&buffer[HEADER..end]).is_some() {
                    self.outwards(&mut buffer[..end]);
                }
                Ok(())
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Puts the header before the packet, and sends both as one datagram of any size. The kernel
    /// fragments a datagram that exceeds the MTU (its default, `IP_PMTUDISC_WANT`, only forbids
    /// fragmentation by routers).
    fn outwards(&mut self, datagram: &mut [u8]) {
        self.number += 1;
        seal(datagram, self.number);
        let by_turns = (self.number % self.udp.len() as u64) as usize;
        let sent = self.udp[by_turns].send_to(datagram, self.peer);
        let size = datagram.len() - HEADER;
        let counts = &mut self.counts;
        counts.merged += u64::from(size > ETHERNET_MTU);
        counts.largest = counts.largest.max(size as u64);
        *match sent {
            Ok(_) => &mut counts.out,
            Err(e) if e.raw_os_error() == Some(Errno::EMSGSIZE as i32) => &mut counts.oversized,
            Err(_) => &mut counts.unsent,
        } += 1;
    }

    /// Receives one IP packet from outside, and passes the packet that it contains to the kernel.
    fn inwards(&mut self, packet: &mut [u8]) {
        let counts = &mut self.counts;
        match open(packet) {
            Arrival::NotOurs => {}
            Arrival::Headless => counts.headless += 1,
            Arrival::Cut => counts.cut += 1,
            Arrival::Foreign => counts.foreign += 1,
            Arrival::Packet(inner) => {
                complete_checksum(inner);
                match deliver(&self.side, inner) {
                    Ok(_) => counts.arrived += 1,
                    Err(_) => counts.undelivered += 1,
                }
            }
        }
    }
}

/// Opens a socket that only sends, because the packet socket receives. Port 0 chooses a free port.
fn sending_socket(port: u16) -> Result<UdpSocket> {
    let udp =
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).doing(format!("bind to UDP port {port}"))?;
    SockRef::from(&udp)
        .attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)])
        .doing("attach a filter to a socket")?;
    Ok(udp)
}

/// Opens a TUN device without offloads, with its address and routes.
fn open_tun(
    netlink: &Netlink,
    device: &str,
    address: Ipv4Net,
    networks: &[Ipv4Net],
) -> Result<Tun> {
    let tun = Tun::create(&TunOptions {
        name: device.to_owned(),
        mtu: MTU,
        queues: 1,
        offload: false,
    })?;
    let index = set_up(netlink, device, &[address.into()])?;
    for network in networks {
        let route = Route::to(IpNet::V4(*network)).device(index);
        netlink.add_route(&route)?;
    }
    Ok(tun)
}

/// Opens a packet socket for packets that arrive on these interfaces, without the link header.
fn packet_socket(interfaces: &[u32]) -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from(ETH_P_IP.to_be()));
    let socket = Socket::new(AF_PACKET.into(), Type::DGRAM, Some(protocol))?;
    socket.attach_filter(&filter(interfaces))?;
    socket.set_nonblocking(true)?;
    // A loss here would be attributed to the tunnel. In a user namespace the size cannot be forced,
    // and the default stays.
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    }
    Ok(socket)
}

/// A classic BPF program that accepts packets of these interfaces (linux/filter.h: `SKF_AD_OFF`,
/// `SKF_AD_IFINDEX`).
fn filter(interfaces: &[u32]) -> Vec<SockFilter> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const INTERFACE: u32 = (-0x1000_i32 + 8) as u32;
    let mut program = vec![SockFilter::new(LOAD_WORD, 0, 0, INTERFACE)];
    for (index, interface) in interfaces.iter().enumerate() {
        // Jump over the remaining comparisons and the refusal.
        let to_acceptance = (interfaces.len() - index) as u8;
        program.push(SockFilter::new(JUMP_IF_EQUAL, to_acceptance, 0, *interface));
    }
    program.push(SockFilter::new(RETURN, 0, 0, 0));
    program.push(SockFilter::new(RETURN, 0, 0, u32::MAX));
    program
}

fn deliver(side: &Side, packet: &[u8]) -> io::Result<usize> {
    match side {
        Side::Lan { raw, .. } => {
            let to = destination(packet).ok_or(ErrorKind::InvalidData)?;
            raw.send_to(packet, &SocketAddrV4::new(to, 0).into())
        }
        Side::Tun(tun) => {
            let none = [0; VNET_HEADER_LEN];
            tun.queues()[0].write_vectored(&[IoSlice::new(&none), IoSlice::new(packet)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_s_mtu() {
        assert_eq!(MTU, 1368);
        assert!(20 + 8 + HEADER + MTU as usize <= 1500);
    }

    #[test]
    fn the_filter_jumps_to_acceptance() {
        assert_eq!(filter(&[3, 9]).len(), 5);
    }
}

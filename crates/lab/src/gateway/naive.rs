//! A deliberately naive encapsulator, as a fault: one header on whatever the packet socket hands up.
//!
//! Out: read a packet from the card by packet socket (or from a TUN device), put one overlay header on the whole of it,
//! send that as one UDP datagram, and let the outside fragment it. In: read the card again by packet socket, take the
//! header off, hand the packet to the kernel. It is what one writes who thinks of packets as what is on the wire. But
//! receive offload (GRO) merges packets before a packet socket sees them, so that the datagram becomes larger than the
//! MTU, and its fragments but the first bear no overlay header: all of it is lost. Without GRO it works.
//!
//! One thread, one packet at a time, IPv4 only, and a key that everybody knows: nothing for any use but comparison.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use blake2::Blake2sMac;
use blake2::digest::Mac;
use blake2::digest::consts::U32;
use ipnet::{IpNet, Ipv4Net};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{LinkAddr, recvfrom, setsockopt, sockopt};
use seikan_sys::netlink::{Netlink, NetlinkError, Route};
use seikan_sys::tun::{Tun, TunOptions, VNET_HEADER_LEN};
use seikan_wire::checksum;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};

use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::Host;

/// MTU inside: what a TCP segment of 1460 bytes leaves beside virtual IP header, protocol header and UDP header. Only the
/// host's end sets it, on its TUN device: TCP takes the smaller maximum segment size of the two ends.
pub const MTU: u32 = 1460 - 20 - 64 - 8;
/// UDP port of both ends.
pub const PORT: u16 = 7777;

/// Bytes of the virtual IP header.
const VIRTUAL_IP: usize = 20;
/// Bytes of the protocol header: magic, length, number, fill, and the MAC.
const PROTOCOL: usize = 64;
/// Bytes of the MAC, the end of the protocol header.
const MAC: usize = 32;
/// Bytes before the packet.
const HEADER: usize = VIRTUAL_IP + PROTOCOL;
const MAGIC: [u8; 4] = *b"nave";
const KEY: [u8; 32] = *b"a key that everybody knows, once";
/// The largest packet and what goes before it.
const BUFFER: usize = HEADER + 65_536;
/// Receive buffer of the packet socket, in bytes: some thousand packets.
const RECEIVE_BUFFER: usize = 8 << 20;
/// A waiting loop looks at its flag this often, in milliseconds.
const PATIENCE: u16 = 50;

/// `AF_PACKET`, `ETH_P_IP` and `IPPROTO_RAW` of Linux, which the socket library has no names for.
const AF_PACKET: i32 = 17;
const ETH_P_IP: u16 = 0x0800;
const IPPROTO_RAW: i32 = 255;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// One end of the naive tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NaiveOptions {
    /// Name of the interface to the outside.
    pub wan: String,
    /// Address of the other end, outside.
    pub peer: Ipv4Addr,
    /// Where packets come from and go to.
    pub inside: Inside,
}

/// The inside of an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inside {
    /// A gateway: packets of other machines on a LAN.
    Lan {
        /// Name of the card.
        card: String,
        /// Destinations that are carried.
        overlay: Ipv4Net,
    },
    /// A host with a TUN device of its own.
    Tun {
        /// Name of the device, which is made.
        device: String,
        /// Its address and network.
        address: Ipv4Net,
        /// Networks routed into it, beside its own.
        networks: Vec<Ipv4Net>,
    },
}

/// What became of packets. `out` is towards the other end.
#[derive(Debug, Default)]
struct Counters {
    out: AtomicU64,
    oversized: AtomicU64,
    unsent: AtomicU64,
    arrived: AtomicU64,
    cut: AtomicU64,
    headless: AtomicU64,
    foreign: AtomicU64,
    undelivered: AtomicU64,
}

/// What became of packets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NaiveCounts {
    /// Packets sent to the other end, merged ones counted once.
    pub out: u64,
    /// Not sent: too large for a UDP datagram.
    pub oversized: u64,
    /// Not sent for another reason.
    pub unsent: u64,
    /// Packets from the other end handed to the kernel.
    pub arrived: u64,
    /// Dropped: first fragments, which have the header but not the whole.
    pub cut: u64,
    /// Dropped: further fragments, which have no overlay header.
    pub headless: u64,
    /// Dropped: without the MAC of the other end.
    pub foreign: u64,
    /// Not taken by the kernel.
    pub undelivered: u64,
}

impl Counters {
    fn now(&self) -> NaiveCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NaiveCounts {
            out: read(&self.out),
            oversized: read(&self.oversized),
            unsent: read(&self.unsent),
            arrived: read(&self.arrived),
            cut: read(&self.cut),
            headless: read(&self.headless),
            foreign: read(&self.foreign),
            undelivered: read(&self.undelivered),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// An end, ready to run. Its sockets belong to the namespace it was opened in.
#[derive(Debug)]
pub struct Naive {
    card: Socket,
    udp: UdpSocket,
    peer: SocketAddr,
    wan: u32,
    side: Side,
    number: u64,
    counters: Arc<Counters>,
}

#[derive(Debug)]
enum Side {
    Lan {
        index: u32,
        overlay: Ipv4Net,
        raw: Socket,
    },
    Tun(Tun),
}

impl Naive {
    /// Opens the sockets, and the TUN device, in the calling thread's network namespace.
    ///
    /// # Errors
    /// Interfaces that are not there; no `CAP_NET_RAW` or `CAP_NET_ADMIN`.
    pub fn open(options: &NaiveOptions) -> Result<Self> {
        let netlink = Netlink::open().map_err(refuse)?;
        let index = |name: &str| netlink.link(name).map(|link| link.index).map_err(refuse);
        let wan = index(&options.wan)?;
        let (side, cards) = match &options.inside {
            Inside::Lan { card, overlay } => {
                let index = index(card)?;
                let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(IPPROTO_RAW)));
                let side = Side::Lan {
                    index,
                    overlay: *overlay,
                    raw: raw.map_err(LabError::io("open a raw IP socket (needs CAP_NET_RAW)"))?,
                };
                (side, vec![wan, index])
            }
            Inside::Tun {
                device,
                address,
                networks,
            } => (
                Side::Tun(open_tun(&netlink, device, *address, networks)?),
                vec![wan],
            ),
        };
        let udp = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))
            .map_err(LabError::io(format!("bind to UDP port {PORT}")))?;
        // It only sends: what arrives there, the packet socket has seen already.
        SockRef::from(&udp)
            .set_recv_buffer_size(0)
            .map_err(LabError::io("shrink a receive buffer"))?;
        Ok(Self {
            card: packet_socket(&cards).map_err(LabError::io("open a packet socket"))?,
            udp,
            peer: SocketAddrV4::new(options.peer, PORT).into(),
            wan,
            side,
            number: 0,
            counters: Arc::default(),
        })
    }

    /// Carries packets until `stop` is raised.
    ///
    /// # Errors
    /// A socket that fails for good.
    pub fn run(&mut self, stop: &Interrupt) -> Result<()> {
        let mut buffer = vec![0; BUFFER];
        while !stop.is_raised() {
            let (card, tun) = self
                .wait()
                .map_err(|errno| LabError::io("wait for packets")(errno.into()))?;
            if card {
                self.from_card(&mut buffer)
                    .map_err(LabError::io("read from a packet socket"))?;
            }
            if tun {
                self.from_tun(&mut buffer)
                    .map_err(LabError::io("read from a TUN device"))?;
            }
        }
        Ok(())
    }

    /// What became of packets so far.
    #[must_use]
    pub fn counts(&self) -> NaiveCounts {
        self.counters.now()
    }

    /// Whether the card and whether the TUN device have something.
    fn wait(&self) -> nix::Result<(bool, bool)> {
        let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![wanted(self.card.as_fd())];
        if let Side::Tun(tun) = &self.side {
            fds.push(wanted(tun.queues()[0].as_fd()));
        }
        match poll(&mut fds, PollTimeout::from(PATIENCE)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        let ready = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
        Ok((ready(&fds[0]), fds.get(1).is_some_and(ready)))
    }

    fn from_card(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let read = recvfrom::<LinkAddr>(self.card.as_raw_fd(), &mut buffer[HEADER..]);
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

    fn from_tun(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let Side::Tun(tun) = &self.side else {
            return Ok(());
        };
        // The device's own header is where ours will end.
        match tun.queues()[0].read(&mut buffer[HEADER - VNET_HEADER_LEN..]) {
            Ok(length) => {
                let end = HEADER - VNET_HEADER_LEN + length;
                // The device is IPv4's, but the kernel tries IPv6 on any.
                if destination(&buffer[HEADER..end]).is_some() {
                    self.outwards(&mut buffer[..end]);
                }
                Ok(())
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Puts the one header before the packet and sends the whole as one datagram, however large: the kernel fragments
    /// what is larger than the MTU (its default, `IP_PMTUDISC_WANT`, forbids that to routers only).
    fn outwards(&mut self, datagram: &mut [u8]) {
        self.number += 1;
        seal(datagram, self.number);
        let counter = match self.udp.send_to(datagram, self.peer) {
            Ok(_) => &self.counters.out,
            Err(e) if e.raw_os_error() == Some(Errno::EMSGSIZE as i32) => &self.counters.oversized,
            Err(_) => &self.counters.unsent,
        };
        count(counter);
    }

    /// Takes one IP packet from the outside, and the packet within to the kernel.
    fn inwards(&mut self, packet: &mut [u8]) {
        let counters = &self.counters;
        match open(packet) {
            Arrival::NotOurs => {}
            Arrival::Headless => count(&counters.headless),
            Arrival::Cut => count(&counters.cut),
            Arrival::Foreign => count(&counters.foreign),
            Arrival::Packet(inner) => {
                complete_checksum(inner);
                let done = deliver(&self.side, inner);
                count(match done {
                    Ok(_) => &counters.arrived,
                    Err(_) => &counters.undelivered,
                });
            }
        }
    }
}

fn refuse(error: NetlinkError) -> LabError {
    LabError::Setup(error.to_string())
}

/// A TUN device that is up, with its address and routes; no offloads, as one who does not know of them has it.
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
    })
    .map_err(|e| LabError::Setup(e.to_string()))?;
    netlink
        .add_address(tun.index(), IpNet::V4(address))
        .map_err(refuse)?;
    netlink.set_up(tun.index()).map_err(refuse)?;
    for network in networks {
        let route = Route::to(IpNet::V4(*network)).device(tun.index());
        netlink.add_route(&route).map_err(refuse)?;
    }
    Ok(tun)
}

/// A packet socket without the link's header for what arrives on these interfaces.
fn packet_socket(interfaces: &[u32]) -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from(ETH_P_IP.to_be()));
    let socket = Socket::new(AF_PACKET.into(), Type::DGRAM, Some(protocol))?;
    socket.attach_filter(&filter(interfaces))?;
    socket.set_nonblocking(true)?;
    // What is lost here would be blamed on something else. Refused in a user namespace: then as much as anybody gets.
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    }
    Ok(socket)
}

/// A classic BPF program that accepts packets of these interfaces (linux/filter.h: `SKF_AD_OFF`, `SKF_AD_IFINDEX`).
fn filter(interfaces: &[u32]) -> Vec<SockFilter> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const INTERFACE: u32 = (-0x1000_i32 + 8) as u32;
    let mut program = vec![SockFilter::new(LOAD_WORD, 0, 0, INTERFACE)];
    for (index, interface) in interfaces.iter().enumerate() {
        // Over the other comparisons and the refusal.
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

/// The destination of an IPv4 packet.
fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let header = packet.first_chunk::<20>()?;
    (header[0] >> 4 == 4).then(|| Ipv4Addr::new(header[16], header[17], header[18], header[19]))
}

/// Fills in the header before the packet, which starts at [`HEADER`]: a virtual IP header with the packet's own
/// addresses, then the protocol header, its MAC over everything else.
fn seal(datagram: &mut [u8], number: u64) {
    let (header, packet) = datagram.split_at_mut(HEADER);
    header.fill(0);
    header[0] = 0x45;
    header[2..4].copy_from_slice(&((HEADER + packet.len()) as u16).to_be_bytes());
    header[8..10].copy_from_slice(&[64, 253]);
    header[12..20].copy_from_slice(&packet[12..20]);
    header[20..24].copy_from_slice(&MAGIC);
    header[24..28].copy_from_slice(&(packet.len() as u32).to_be_bytes());
    header[28..36].copy_from_slice(&number.to_be_bytes());
    let (clear, tag) = header.split_at_mut(HEADER - MAC);
    tag.copy_from_slice(&mac(clear, packet).finalize().into_bytes());
}

fn mac(clear: &[u8], packet: &[u8]) -> Blake2sMac<U32> {
    let mut mac = <Blake2sMac<U32> as blake2::digest::KeyInit>::new(&KEY.into());
    Mac::update(&mut mac, clear);
    Mac::update(&mut mac, packet);
    mac
}

/// What an IP packet from the outside is.
#[derive(Debug, PartialEq, Eq)]
enum Arrival<'a> {
    /// Not for this port, and no fragment either.
    NotOurs,
    /// A fragment that does not begin with the header.
    Headless,
    /// The first fragment of something larger.
    Cut,
    /// Not sealed by the other end.
    Foreign,
    /// The packet within.
    Packet(&'a mut [u8]),
}

/// Looks for the header where it is in an unfragmented packet.
fn open(packet: &mut [u8]) -> Arrival<'_> {
    let Some(&ip) = packet.first_chunk::<20>() else {
        return Arrival::NotOurs;
    };
    let start = usize::from(ip[0] & 15) * 4;
    let fragment = u16::from_be_bytes([ip[6], ip[7]]);
    if ip[0] >> 4 != 4 || ip[9] != UDP {
        return Arrival::NotOurs;
    }
    if fragment & 0x1fff != 0 {
        return Arrival::Headless;
    }
    let ours = packet.get(start + 2..start + 4) == Some(&PORT.to_be_bytes());
    if !ours {
        return Arrival::NotOurs;
    }
    if fragment & 0x2000 != 0 {
        return Arrival::Cut;
    }
    let Some((header, inner)) = packet
        .get_mut(start + 8..)
        .and_then(|datagram| datagram.split_at_mut_checked(HEADER))
    else {
        return Arrival::Foreign;
    };
    let (clear, tag) = header.split_at(HEADER - MAC);
    let genuine = clear[20..24] == MAGIC && mac(clear, inner).verify_slice(tag).is_ok();
    if genuine {
        Arrival::Packet(inner)
    } else {
        Arrival::Foreign
    }
}

/// Fills in the checksum of TCP and UDP: where the sender's card was to do that, the packet socket saw it undone.
fn complete_checksum(packet: &mut [u8]) {
    let Some(&ip) = packet.first_chunk::<20>() else {
        return;
    };
    let is_fragment = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
    let field = match ip[9] {
        TCP => 16,
        UDP => 6,
        _ => return,
    };
    let start = usize::from(ip[0] & 15) * 4;
    let Some(segment) = packet.get_mut(start..).filter(|_| !is_fragment) else {
        return;
    };
    if segment.len() < field + 2 {
        return;
    }
    segment[field..field + 2].fill(0);
    let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]).into();
    let pseudo = checksum::pseudo_header(address(12), address(16), ip[9], segment.len());
    let sum = match checksum::fold(pseudo + checksum::sum(segment)) {
        // To UDP, zero means that there is none (RFC 768).
        0 if ip[9] == UDP => 0xffff,
        sum => sum,
    };
    segment[field..field + 2].copy_from_slice(&sum.to_be_bytes());
}

/// An end that runs in a thread of this process until it is dropped.
#[derive(Debug)]
pub struct Worker {
    stop: Interrupt,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Worker {
    /// Opens an end inside `host` and runs it.
    ///
    /// # Errors
    /// As [`Naive::open`].
    pub fn start(host: &Host, options: &NaiveOptions) -> Result<Self> {
        let mut naive = host.run(|| Naive::open(options))??;
        let (stop, counters) = (Interrupt::new(), Arc::clone(&naive.counters));
        let flag = stop.clone();
        let thread = std::thread::Builder::new()
            .name("naive".to_owned())
            .spawn(move || naive.run(&flag))
            .map_err(LabError::io("start a thread"))?;
        Ok(Self {
            stop,
            counters,
            thread: Some(thread),
        })
    }

    /// What became of packets so far.
    #[must_use]
    pub fn counts(&self) -> NaiveCounts {
        self.counters.now()
    }

    /// An error if the thread has ended.
    ///
    /// # Errors
    /// What ended it.
    pub fn check_alive(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) else {
            return Ok(());
        };
        let ended = || LabError::Setup("the naive encapsulator ended early".to_owned());
        thread.join().map_err(|_| ended())??;
        Err(ended())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            // Its outcome no longer matters.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IP packet around a datagram with our header on `inner`, cut to fragment `offset` (in units of 8 bytes).
    fn outside(inner: &[u8], fragment: u16) -> Vec<u8> {
        let mut datagram = vec![0; HEADER];
        datagram.extend(inner);
        seal(&mut datagram, 1);
        let mut packet = vec![0x45, 0, 0, 0, 0, 0];
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend([PORT, PORT, 0, 0].map(u16::to_be_bytes).concat());
        packet.extend(datagram);
        packet
    }

    fn inner() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 30, 0, 0, 0, 0, 64, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8,
        ];
        packet.extend([7; 10]);
        packet
    }

    #[test]
    fn the_source_s_mtu() {
        assert_eq!(MTU, 1368);
        assert!(20 + 8 + HEADER + MTU as usize <= 1500);
    }

    #[test]
    fn a_whole_packet_comes_out_as_it_went_in() {
        assert_eq!(
            open(&mut outside(&inner(), 0x4000)),
            Arrival::Packet(&mut inner())
        );
    }

    #[test]
    fn fragments_are_lost() {
        assert_eq!(open(&mut outside(&inner(), 0x2000)), Arrival::Cut);
        assert_eq!(open(&mut outside(&inner(), 0x2001)), Arrival::Headless);
        assert_eq!(open(&mut outside(&inner(), 0x0001)), Arrival::Headless);
    }

    #[test]
    fn what_was_changed_is_foreign() {
        let mut packet = outside(&inner(), 0);
        *packet.last_mut().expect("bytes") ^= 1;
        assert_eq!(open(&mut packet), Arrival::Foreign);
        assert_eq!(open(&mut outside(&inner(), 0)[..60]), Arrival::Foreign);
    }

    #[test]
    fn checksums_are_completed() {
        // UDP 10.0.0.1:1 to 10.0.0.2:2 without payload: the words 0a00 0001 0a00 0002 0011 0008, 0001 0002 0008 add
        // up to 1427.
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, UDP, 0, 0];
        packet.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2, 0, 8, 0xab, 0xcd]);
        complete_checksum(&mut packet);
        assert_eq!(packet[26..28], (!0x1427_u16).to_be_bytes());
    }

    #[test]
    fn the_filter_jumps_to_acceptance() {
        assert_eq!(filter(&[3, 9]).len(), 5);
    }
}

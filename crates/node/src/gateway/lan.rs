//! The interface of the local network in transparent mode: a packet socket, and the responder that uses it.

use crate::batch_reader::BatchReader;
use crate::system::{SystemRandom, now};
use ipnet::IpNet;
use seikan_config::GatewaySettings;
use seikan_observe::{DirectionCounters, DropReason, Histogram, Stopped};
use seikan_proto::gateway::election::Election;
use seikan_proto::gateway::responder::Responder;
use seikan_proto::inbox::{MAX_PIECES, Write};
use seikan_proto::keys::Identity;
use seikan_proto::segment::SuperPacket;
use seikan_sys::netlink::{LinkInfo, Netlink, NetlinkError};
use seikan_sys::packet::{Accept, PacketError, PacketOptions, PacketSocket};
use seikan_wire::ethernet::{Mac, TAGGED_HEADER_LEN};
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr};
use std::io::{self, IoSlice};

/// Why there can be no gateway on an interface.
#[derive(Debug, thiserror::Error)]
pub enum LanError {
    /// No such interface.
    #[error(
        "there is no interface {0} for the gateway's devices: see `ip link`, and the `interface` of [gateway]"
    )]
    Missing(String),
    /// Not an Ethernet interface.
    #[error(
        "{0} carries no Ethernet frames: a transparent gateway needs an Ethernet interface or bridge of the local \
         network; otherwise use `mode = \"routed\"`"
    )]
    NotEthernet(String),
    /// The packet socket.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The lookup of the interface.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Another routed gateway uses the interface.
    #[error(
        "cannot be a routed gateway on {interface}: tunnel {other} is one there, and only one is possible; stop it \
         with `seikan down {other}`, or move its devices to this tunnel"
    )]
    Taken {
        /// Which interface.
        interface: String,
        /// The tunnel of the other gateway.
        other: String,
    },
    /// Another routed gateway has turned on forwarding of IPv6, for itself alone.
    #[error(
        "cannot be a routed gateway for IPv6: this host forwards IPv6 only for the gateway of tunnel {other}, which \
         turned it on; set net.ipv6.conf.all.forwarding to 1 and restart that tunnel, or list no IPv6 addresses of \
         devices"
    )]
    Ipv6Taken {
        /// The tunnel of the other gateway.
        other: String,
    },
    /// The interface does not accept the responder's address.
    #[error("cannot receive for the gateway's address on {interface}: {error}")]
    Responder {
        /// Which interface.
        interface: String,
        /// The system's error.
        error: io::Error,
    },
}

/// State of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub index: u32,
    pub mtu: u32,
    /// Up, with a carrier.
    pub up: bool,
    /// Its own address.
    pub mac: Mac,
}

impl Link {
    pub fn find(netlink: &Netlink, name: &str) -> Result<Link, LanError> {
        let index = netlink.link_index(name)?;
        let index = index.ok_or_else(|| LanError::Missing(name.to_owned()))?;
        let link = netlink.link_by_index(index)?;
        Ok(Link::of(&link))
    }

    pub fn of(link: &LinkInfo) -> Link {
        Link {
            index: link.index,
            mtu: link.mtu,
            up: link.up && link.carrier,
            mac: Mac(link.mac().unwrap_or_default()),
        }
    }
}

/// Counters of the interface.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct LanCounters {
    /// Frames per batch read.
    pub frames_per_read: Histogram,
    /// Frames that the kernel could not queue, on sockets that were closed since.
    pub lost_before: u64,
    /// Super-packets that the NIC's driver refused and that were segmented here instead.
    pub gso_refused: u64,
    /// Frames made here: answers, requests, adverts, errors to devices.
    pub own: DirectionCounters,
}

/// Settings of the interface.
pub(crate) struct LanOptions<'a> {
    pub settings: &'a GatewaySettings,
    /// Prefixes of the overlay for which the responder answers.
    pub answer_for: Vec<IpNet>,
    /// Pass super-packets to the kernel.
    pub offload: bool,
    /// Maximum bytes of packets to read at once.
    pub read_limit: usize,
}

/// The interface with its socket and responder.
pub struct Lan {
    /// `None` while the interface is gone.
    pub(crate) socket: Option<PacketSocket>,
    pub(crate) link: Link,
    /// Answers ARP and neighbour discovery.
    pub responder: Responder,
    /// Present if a second gateway is configured.
    pub election: Option<Election>,
    pub(crate) reader: BatchReader,
    /// Its counters.
    pub counters: LanCounters,
    /// Super-packets are passed to the kernel; otherwise they are segmented here.
    gso: bool,
}

impl Lan {
    pub(crate) fn open(
        options: LanOptions<'_>,
        identity: &Identity,
        link: Link,
    ) -> Result<Lan, LanError> {
        let settings = options.settings;
        let address = Responder::address_of(identity.public());
        let mut responder = Responder::new(address, options.answer_for);
        let now = now().mono;
        let private = identity.private();
        let stand = |priority| Election::new(private, priority, &mut SystemRandom, now);
        let election = settings.priority.map(stand);
        responder.set_active(election.is_none());
        let mut lan = Lan {
            socket: None,
            link,
            responder,
            election,
            reader: BatchReader::new(options.read_limit),
            counters: LanCounters::default(),
            gso: options.offload,
        };
        lan.connect(link, settings.interface.as_str())?;
        Ok(lan)
    }

    /// Opens a socket on the interface in its current state.
    pub(crate) fn connect(&mut self, link: Link, interface: &str) -> Result<(), LanError> {
        let address = self.responder.mac().0;
        let opened = PacketSocket::open(link.index, &PacketOptions::new(Accept::Host(address)));
        let socket = match opened {
            Err(PacketError::NotEthernet { .. }) => {
                return Err(LanError::NotEthernet(interface.to_owned()));
            }
            other => other?,
        };
        let listens = || {
            // A NIC that cannot filter for one more address becomes promiscuous by itself, for no more than
            // that (Linux `net/core/dev_addr_lists.c`).
            socket.join_unicast(address)?;
            // Neighbour solicitations are sent to the groups of the addresses, of which there may be many.
            socket.join_all_multicast()
        };
        listens().map_err(|error| LanError::Responder {
            interface: interface.to_owned(),
            error,
        })?;
        self.disconnect();
        (self.link, self.socket) = (link, Some(socket));
        Ok(())
    }

    /// The interface is gone: closes the socket.
    pub(crate) fn disconnect(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.counters.lost_before += socket.drops();
        }
        self.link.up = false;
    }

    /// Returns the socket, to be polled.
    pub fn socket(&self) -> Option<&PacketSocket> {
        self.socket.as_ref()
    }

    /// Whether the interface is there, up and has a carrier.
    pub fn is_up(&self) -> bool {
        self.socket.is_some() && self.link.up
    }

    /// Returns the number of frames that the kernel could not queue.
    pub fn lost(&self) -> u64 {
        self.counters.lost_before + self.socket.as_ref().map_or(0, PacketSocket::drops)
    }

    /// Whether super-packets are passed to the interface.
    pub fn gso(&self) -> bool {
        self.gso
    }

    /// Sends a complete frame, `[virtio-net header][frame]`.
    pub(crate) fn send(&self, frame: &[u8]) -> Result<(), DropReason> {
        self.write(&[IoSlice::new(frame)])
            .map_err(|_| DropReason::LanWriteRefused)
    }

    /// Sends a frame made here and counts it. A lost one needs no retry: requests are repeated by their sender,
    /// adverts are periodic, and an error is sent again for the next packet.
    pub(crate) fn send_own(&mut self, frame: &[u8]) {
        let result = self.send(frame);
        let own = &mut self.counters.own;
        own.packets_in += 1;
        match result {
            Ok(()) => {
                own.packets_out += 1;
                own.bytes_out += (frame.len() - VNET_HDR_LEN) as u64;
            }
            Err(reason) => own.drops.add(reason, 1),
        }
    }

    /// Counts a packet made here for a device whose MAC address is unknown.
    pub(crate) fn drop_own(&mut self, reason: DropReason) {
        self.counters.own.packets_in += 1;
        self.counters.own.drops.add(reason, 1);
    }

    /// Sends a write of the tunnel to a device, behind this Ethernet header; `cut` disables super-packets. An error
    /// tells the number of packets that were sent.
    pub(crate) fn deliver(
        &mut self,
        ethernet: &[u8],
        write: &Write,
        arena: &[u8],
        cut: bool,
    ) -> Result<(), Stopped> {
        let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
        let n = write.parts(arena, &mut parts);
        let vnet = VnetHdr::read(&parts[0]).map_err(|_| DropReason::BadOffload)?;
        let merged = vnet.gso_type != GsoType::None;
        if merged && (cut || !self.gso) {
            return self.deliver_segments(ethernet, &parts[..n]);
        }
        let mut head = [0; VNET_HDR_LEN + TAGGED_HEADER_LEN];
        head[..VNET_HDR_LEN].copy_from_slice(&behind(vnet, ethernet.len()).to_bytes());
        let length = VNET_HDR_LEN + ethernet.len();
        head[VNET_HDR_LEN..length].copy_from_slice(ethernet);
        let mut frame = [IoSlice::new(&[]); MAX_PIECES + 3];
        frame[0] = IoSlice::new(&head[..length]);
        frame[1] = IoSlice::new(&parts[0][VNET_HDR_LEN..]);
        frame[2..=n].copy_from_slice(&parts[1..n]);
        match self.write(&frame[..=n]) {
            Ok(()) => Ok(()),
            Err(error) if merged && error.kind() == io::ErrorKind::InvalidInput => {
                self.counters.gso_refused += 1;
                self.deliver_segments(ethernet, &parts[..n])
            }
            Err(_) => Err(DropReason::LanWriteRefused.into()),
        }
    }

    /// Segments a super-packet and sends the segments.
    fn deliver_segments(&self, ethernet: &[u8], parts: &[IoSlice<'_>]) -> Result<(), Stopped> {
        let whole: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).collect();
        let packet = SuperPacket::parse(&whole)?;
        let start = VNET_HDR_LEN + ethernet.len();
        let mut frame = vec![0; start + packet.segment_len(0)];
        frame[VNET_HDR_LEN..start].copy_from_slice(ethernet);
        for i in 0..packet.segments() {
            packet.segment(i, false, &mut frame[start..]);
            let sent = self.send(&frame[..start + packet.segment_len(i)]);
            sent.map_err(|reason| Stopped {
                done: i as u64,
                reason,
            })?;
        }
        Ok(())
    }

    fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NetworkDown);
        let socket = self.socket.as_ref().ok_or_else(gone)?;
        // If the NIC's queue is full, it drops the frame and TCP reacts, as at any router.
        socket.send_vectored(parts).map(|_| ())
    }
}

/// Moves the offsets of a virtio-net header behind an Ethernet header of this length.
fn behind(mut vnet: VnetHdr, ethernet: usize) -> VnetHdr {
    if vnet.needs_csum {
        vnet.csum_start += ethernet as u16;
    }
    if vnet.hdr_len > 0 {
        vnet.hdr_len += ethernet as u16;
    }
    vnet
}

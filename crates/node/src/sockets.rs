//! The sockets of a tunnel: two on its port, and punch sockets.

pub(crate) mod punch;

use punch::PunchSockets;
use seikan_proto::indices::PeerId;
use seikan_proto::time::Instant;
use seikan_sys::poll::Epoll;
use seikan_sys::udp::{UdpError, UdpOptions, UdpSocket};
use std::cell::Cell;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

/// The sockets of a tunnel: two on its port, and punch sockets.
#[derive(Debug)]
pub struct Sockets {
    /// IPv4.
    pub v4: Option<UdpSocket>,
    /// IPv6.
    pub v6: Option<UdpSocket>,
    /// Punch sockets.
    pub punch: PunchSockets,
    options: UdpOptions,
    /// Counters of sockets that were replaced.
    replaced: SocketCounts,
    /// Largest reported value of [`SocketCounts::receive_queue_drops`], which is the difference of two counters
    /// that are not read at the same time.
    reported: Cell<u64>,
}

/// Counters of the sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCounts {
    /// Datagrams dropped because the receive buffer was full; a merged batch counts once.
    pub receive_queue_drops: u64,
    /// Datagrams longer than any of a peer, dropped by the socket filter (`Node::limit_datagrams`).
    pub oversized_drops: u64,
    /// Datagrams of an unknown type, or too short for their type, dropped by the socket filter
    /// (`Node::filter_types`).
    pub malformed_drops: u64,
    /// Datagrams of sources that are not the endpoint of a peer, dropped by the socket filter during a flood
    /// (`Node::poll_floods`).
    pub flood_drops: u64,
    /// Sends that failed with segmentation offload and were repeated without.
    pub gso_fallbacks: u64,
}

impl SocketCounts {
    pub(crate) fn add(&mut self, socket: &UdpSocket) {
        self.receive_queue_drops += socket.receive_queue_drops();
        self.gso_fallbacks += socket.gso_fallbacks();
    }
}

impl Sockets {
    /// Binds both families to `port`; 0 lets the kernel choose one for both. One family may be
    /// absent from the host.
    pub fn bind(port: u16, options: UdpOptions) -> Result<Sockets, UdpError> {
        let v4 = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port).into(), &options);
        let v4 = match v4 {
            Err(UdpError::NoFamily { .. }) => None,
            other => Some(other?),
        };
        let chosen = v4
            .as_ref()
            .and_then(|s| s.local_addr().ok())
            .map_or(port, |a| a.port());
        let v6 = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, chosen).into(), &options) {
            Err(error) if v4.is_none() => return Err(error),
            Err(UdpError::NoFamily { .. } | UdpError::AddressNotAvailable { .. }) => None,
            other => Some(other?),
        };
        Ok(Sockets {
            v4,
            v6,
            punch: PunchSockets::default(),
            options,
            replaced: SocketCounts::default(),
            reported: Cell::default(),
        })
    }

    /// Moves to another port; 0 lets the kernel choose. The old sockets and all punch sockets are closed after
    /// the new ones are bound, so that an error changes nothing. Counters are kept.
    pub fn rebind(&mut self, port: u16) -> Result<(), UdpError> {
        let Sockets { v4, v6, .. } = Sockets::bind(port, self.options.clone())?;
        let former = [
            std::mem::replace(&mut self.v4, v4),
            std::mem::replace(&mut self.v6, v6),
        ];
        for socket in former.iter().flatten() {
            self.replaced.add(socket);
        }
        self.punch.close_all();
        Ok(())
    }

    /// Sets the firewall mark of everything sent from now on; 0 is none.
    pub fn set_fwmark(&mut self, mark: u32) -> Result<(), UdpError> {
        for socket in self.iter().chain(self.punch.iter()) {
            socket.set_fwmark(mark)?;
        }
        self.options.fwmark = Some(mark).filter(|mark| *mark != 0);
        Ok(())
    }

    /// Returns the totals, including closed sockets.
    pub fn counts(&self) -> SocketCounts {
        let mut sum = self.replaced;
        let closed = self.punch.closed();
        sum.receive_queue_drops += closed.receive_queue_drops;
        sum.gso_fallbacks += closed.gso_fallbacks;
        for socket in self.iter().chain(self.punch.iter()) {
            sum.add(socket);
        }
        if let Ok(filter) = &self.options.datagram_filter {
            // The kernel counts these as drops of the socket too.
            let filtered = filter.filtered();
            sum.receive_queue_drops = sum.receive_queue_drops.saturating_sub(filtered.buffers);
            sum.oversized_drops = filtered.oversized;
            sum.malformed_drops = filtered.malformed;
            sum.flood_drops = filtered.limited;
        }
        self.reported
            .set(self.reported.get().max(sum.receive_queue_drops));
        sum.receive_queue_drops = self.reported.get();
        sum
    }

    /// Returns the port of both sockets.
    pub fn port(&self) -> u16 {
        let any = self.v4.as_ref().or(self.v6.as_ref());
        any.and_then(|s| s.local_addr().ok())
            .map_or(0, |a| a.port())
    }

    /// Returns the firewall mark of sent datagrams.
    pub fn fwmark(&self) -> Option<u32> {
        self.options.fwmark
    }

    /// Returns the options of the sockets.
    pub(crate) fn options(&self) -> &UdpOptions {
        &self.options
    }

    /// Returns the socket for an address: the kept punch socket if there is one, otherwise the
    /// socket of the tunnel's port.
    #[inline]
    pub(crate) fn towards(&self, address: SocketAddr, peer: Option<PeerId>) -> Option<&UdpSocket> {
        self.punch.to(address, peer).or(match address {
            SocketAddr::V4(_) => self.v4.as_ref(),
            SocketAddr::V6(_) => self.v6.as_ref(),
        })
    }

    /// Continues the first punch request, see [`PunchSockets::continue_punch`].
    pub(crate) fn continue_punch(&mut self, epoll: &Epoll, now: Instant) -> Option<(PeerId, u16)> {
        self.punch.continue_punch(&self.options, epoll, now)
    }

    /// Returns the sockets on the port.
    pub fn iter(&self) -> impl Iterator<Item = &UdpSocket> {
        self.v4.iter().chain(&self.v6)
    }
}

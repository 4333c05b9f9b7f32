//! The gateway's part in reading and writing packets.

use super::GatewayNode;
use seikan_observe::{DropReason, Stopped};
use seikan_proto::gateway::{DeviceId, Inbound, Origin, Outbound};
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::time::Instant;
use seikan_wire::VNET_HDR_LEN;
use seikan_wire::ip::IpPacket;
use std::io::{self, IoSlice};

/// Maximum number of frames examined at a time, including those that are not for the tunnel.
pub(crate) const MAX_FRAMES: usize = 256;

/// Destination of a write of the inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The TUN device: for the host, or a device behind its routes.
    Tun(Option<DeviceId>),
    /// A device on the local network.
    Lan(DeviceId),
    /// The packet has no destination and is dropped.
    Dropped(DropReason),
}

impl GatewayNode {
    /// Reads the TUN device for the gateway: returns a packet that may pass the stage, and skips refused ones.
    pub(crate) fn read(
        &mut self,
        space: &mut [u8],
        now: Instant,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        for _ in 0..MAX_FRAMES {
            let length = read(space)?;
            if self.lan.is_some() {
                match self.gateway.from_host(&space[..length]) {
                    Ok(()) => return Ok(length),
                    Err(_) => continue, // counted
                }
            }
            let outcome = self
                .gateway
                .outbound(now, &mut space[..length], Origin::Tun);
            if let Ok(Outbound::Whole) = outcome {
                return Ok(length);
            }
        }
        // The rest is read after other work.
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Determines the destination of a write of the inbox, and translates its addresses for the
    /// side of the destination.
    pub(crate) fn destination(
        &mut self,
        inbox: &mut Inbox,
        i: usize,
        arena: &mut [u8],
        now: Instant,
    ) -> Destination {
        let Some(write) = inbox.write_mut(i) else {
            return Destination::Tun(None);
        };
        let (packets, bytes) = (write.packets, write.bytes);
        let (vnet, headers) = write.headers_mut(arena);
        match self.gateway.inbound(now, headers, &vnet, packets, bytes) {
            Ok(Inbound::Host) => Destination::Tun(None),
            Ok(Inbound::Device(id)) if self.lan.is_some() => Destination::Lan(id),
            Ok(Inbound::Device(id)) => Destination::Tun(Some(id)),
            Err(reason) => Destination::Dropped(reason),
        }
    }

    /// Sends a write of the inbox to a device. An error tells the number of packets that were sent; one of whose
    /// fragments some are missing counts as dropped.
    pub(crate) fn deliver(
        &mut self,
        id: DeviceId,
        inbox: &Inbox,
        i: usize,
        arena: &[u8],
        now: Instant,
    ) -> Result<(), Stopped> {
        let (Some(lan), Some(write)) = (&mut self.lan, inbox.writes().get(i)) else {
            return Err(DropReason::LanWriteRefused.into());
        };
        let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
        let n = write.parts(arena, &mut parts);
        let first = if parts[0].len() > VNET_HDR_LEN {
            parts[0].get(VNET_HDR_LEN)
        } else {
            parts[1..n].first().and_then(|part| part.first())
        };
        let v6 = first.is_some_and(|byte| byte >> 4 == 6);
        let Some((header, length)) = lan.responder.header_to(&self.gateway, id, v6) else {
            lan.responder.resolve(now, &self.gateway, id);
            return Err(DropReason::DeviceUnresolved.into());
        };
        let header = &header[..length];
        let too_long = write.packets == 1 && write.bytes > u64::from(self.gateway.mtu().lan);
        if !too_long {
            let cut = self.gateway.merging().is_cut();
            return lan.deliver(header, write, arena, cut);
        }
        let whole: Vec<u8> = parts[..n].iter().flat_map(|p| p.iter().copied()).collect();
        let packet = &whole[VNET_HDR_LEN..];
        let partial = seikan_wire::VnetHdr::read(&whole).is_ok_and(|vnet| vnet.needs_csum);
        let ip = IpPacket::parse(packet).map_err(|_| DropReason::NotIp)?;
        let fragments = self
            .gateway
            .fragments_for_lan(&packet[..ip.total_len], partial);
        if fragments.is_empty() {
            return Err(DropReason::TooBig.into());
        }
        for fragment in fragments {
            lan.send(&[&[0; VNET_HDR_LEN][..], header, &fragment].concat())?;
        }
        Ok(())
    }
}

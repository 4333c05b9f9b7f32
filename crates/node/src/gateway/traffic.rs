//! The gateway's part of the worker's loop.

use super::GatewayNode;
use crate::node::{Node, now};
use seikan_observe::DropReason;
use seikan_proto::batch::PacketBatch;
use seikan_proto::gateway::responder::Frame;
use seikan_proto::gateway::{DeviceId, Inbound, Made, Origin, Outbound};
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::time::Instant;
use seikan_wire::VNET_HDR_LEN;
use seikan_wire::ip::IpPacket;
use std::io::{self, IoSlice};

/// Maximum number of frames examined at a time, including those that are not for the tunnel.
const FRAMES_PER_TURN: usize = 256;

/// Destination of a write of the inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// The TUN device: for the host, or a device behind its routes.
    Tun(Option<DeviceId>),
    /// A device on the local network.
    Lan(DeviceId),
    /// None: it is dropped.
    Dropped(DropReason),
}

impl Node {
    /// Whether frames were read that were not sent yet.
    pub(crate) fn lan_waits(&self) -> bool {
        let lan = self.gateway.as_ref().and_then(|g| g.lan.as_ref());
        lan.is_some_and(|lan| lan.reader.waits())
    }

    /// Reads from the interface of the local network once, and sends the packets for the tunnel.
    pub(crate) fn read_from_lan(&mut self) {
        let Some(GatewayNode {
            gateway,
            lan: Some(lan),
            ..
        }) = &mut self.gateway
        else {
            return;
        };
        let now = now();
        let (mut frames, mut adverts) = (0, Vec::new());
        let (socket, responder) = (&lan.socket, &mut lan.responder);
        let read = |space: &mut [u8]| {
            let socket = socket.as_ref().ok_or(io::ErrorKind::NetworkDown)?;
            for _ in 0..FRAMES_PER_TURN {
                let received = match socket.receive(space) {
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                        // Merged in an unsupported form (SCTP, tunnels): the frame is lost.
                        frames += 1;
                        gateway.drop_unattributed(DropReason::BadOffload, 1);
                        continue;
                    }
                    // The queue is empty, or the interface is down, which its link event reports.
                    other => other?,
                };
                frames += 1;
                if received.truncated || received.vlan_protocol == PROVIDER_TAG {
                    gateway.drop_unattributed(DropReason::BadFrameType, 1);
                    continue;
                }
                let frame = &mut space[..received.length];
                match responder.frame(now.mono, gateway, frame, received.vlan) {
                    Frame::Packet { start, mac, vlan } => {
                        let origin = Origin::Lan { mac, vlan };
                        let outcome = gateway.outbound(now.mono, &mut frame[start..], origin);
                        // Refused packets were counted.
                        if let Ok(Outbound::Whole) = outcome {
                            return Ok(start..received.length);
                        }
                    }
                    Frame::Advert { start } => adverts.push(frame[start..].to_vec()),
                    Frame::Done => {}
                }
            }
            // The rest is read after other work.
            Err(io::ErrorKind::WouldBlock.into())
        };
        let (batch, _) = lan.reader.next(read, now.mono);
        if frames > 0 {
            lan.counters.frames_per_read.record(frames);
        }
        if !batch.is_empty() {
            self.tunnel
                .outbound(now, batch, &mut self.outbox, &mut self.inbox);
            self.transmit();
            self.deliver(&mut []);
        }
        if let Some(gateway) = &mut self.gateway {
            adverts.iter().for_each(|advert| gateway.receive(advert));
        }
        self.send_made();
    }

    /// Handles the timers of responder and election.
    pub(crate) fn poll_gateway(&mut self) {
        self.poll_election();
        let Some(GatewayNode { gateway, lan, .. }) = &mut self.gateway else {
            return;
        };
        let Some(lan) = lan else { return };
        let now = now().mono;
        if lan.responder.next_wakeup() <= now {
            lan.responder.poll(now, gateway);
            self.send_made();
        }
    }

    /// Returns the time of the next call of [`Self::poll_gateway`].
    pub(crate) fn gateway_wakeup(&self) -> Option<Instant> {
        let gateway = self.gateway.as_ref()?;
        let responder = gateway.lan.as_ref()?.responder.next_wakeup();
        Some(
            gateway
                .election_wakeup()
                .map_or(responder, |at| at.min(responder)),
        )
    }

    /// Sends the packets and frames that responder and gateway have made.
    pub(crate) fn send_made(&mut self) {
        let Some(GatewayNode { gateway, lan, .. }) = &mut self.gateway else {
            return;
        };
        let made = gateway.take_made();
        let mut to_tunnel = Vec::new();
        for made in made {
            match (made, &mut *lan) {
                (Made::ToTunnel(packet), _) => to_tunnel.push(packet),
                (Made::ToDevice(id, packet), Some(lan)) => {
                    let v6 = packet.first().is_some_and(|b| b >> 4 == 6);
                    match lan.responder.header_to(gateway, id, v6) {
                        Some((header, length)) => lan.send_own(
                            &[&[0; VNET_HDR_LEN][..], &header[..length], &packet].concat(),
                        ),
                        None => lan.drop_own(DropReason::DeviceUnresolved),
                    }
                }
                // In routed mode the kernel makes such errors.
                (Made::ToDevice(..), None) => {}
            }
        }
        if let Some(lan) = lan {
            for frame in lan.responder.take_frames() {
                lan.send_own(&frame);
            }
        }
        if to_tunnel.is_empty() {
            return;
        }
        let mut batch = PacketBatch::new(0, to_tunnel.len());
        for packet in to_tunnel {
            if !batch.push(&packet) {
                self.send_batch(&mut batch);
                batch.clear();
                batch.push(&packet);
            }
        }
        self.send_batch(&mut batch);
    }

    fn send_batch(&mut self, batch: &mut PacketBatch) {
        self.tunnel
            .outbound(now(), batch, &mut self.outbox, &mut self.inbox);
        self.transmit();
        self.deliver(&mut []);
    }
}

/// TPID of IEEE 802.1ad.
const PROVIDER_TAG: u16 = 0x88a8;

impl GatewayNode {
    /// Reads the TUN device for the gateway: returns a packet that may pass the stage, and skips refused ones.
    pub(crate) fn read(
        &mut self,
        space: &mut [u8],
        now: Instant,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        for _ in 0..FRAMES_PER_TURN {
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

    /// Determines the destination of a write of the inbox, and translates its addresses to those of that side.
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

    /// Sends a write of the inbox to a device.
    pub(crate) fn deliver(
        &mut self,
        id: DeviceId,
        inbox: &Inbox,
        i: usize,
        arena: &[u8],
        now: Instant,
    ) -> Result<(), DropReason> {
        let (Some(lan), Some(write)) = (&mut self.lan, inbox.writes().get(i)) else {
            return Err(DropReason::LanWriteRefused);
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
            return Err(DropReason::DeviceUnresolved);
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
            return Err(DropReason::TooBig);
        }
        for fragment in fragments {
            lan.send(&[&[0; VNET_HDR_LEN][..], header, &fragment].concat())?;
        }
        Ok(())
    }
}

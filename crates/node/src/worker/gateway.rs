//! The gateway's part of the worker's loop.

use crate::gateway::{GatewayNode, MAX_FRAMES};
use crate::node::Node;
use crate::system::{SystemRandom, now};
use seikan_observe::DropReason;
use seikan_proto::batch::PacketBatch;
use seikan_proto::gateway::responder::Frame;
use seikan_proto::gateway::{Made, Origin, Outbound};
use seikan_proto::time::Instant;
use seikan_proto::tunnel::Now;
use seikan_wire::VNET_HDR_LEN;
use std::io;

/// TPID of IEEE 802.1ad.
const PROVIDER_TAG: u16 = 0x88a8;

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
            for _ in 0..MAX_FRAMES {
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
                // In routed mode the kernel sends such errors.
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
                self.send_batch(now(), &mut batch);
                batch.clear();
                batch.push(&packet);
            }
        }
        self.send_batch(now(), &mut batch);
    }

    pub(super) fn send_batch(&mut self, now: Now, batch: &mut PacketBatch) {
        self.tunnel
            .outbound(now, batch, &mut self.outbox, &mut self.inbox);
        self.transmit();
        self.deliver(&mut []);
    }

    /// Sends an advert if one is due, and acts on the election's result.
    pub(crate) fn poll_election(&mut self) {
        let Some(GatewayNode {
            lan: Some(lan),
            gateway,
            ..
        }) = &mut self.gateway
        else {
            return;
        };
        let mac = lan.link.mac;
        let now = now();
        let Some(election) = &mut lan.election else {
            return;
        };
        let frame = election.poll(now.mono, mac, &mut SystemRandom);
        let active = election.is_active();
        if let Some(frame) = frame {
            lan.send_own(&[&[0; VNET_HDR_LEN][..], &frame].concat());
        }
        if active == lan.responder.is_active() {
            return;
        }
        lan.responder.set_active(active);
        if let Some(mesh) = &self.mesh {
            mesh.set_active(active);
        }
        if active {
            lan.responder.announce(now.mono, gateway);
            self.tunnel.greet(now, &mut self.outbox);
            self.transmit();
            self.send_made();
        } else {
            self.tunnel.stand_by();
            self.discard_removed();
            self.pacer.take_all(|run, _| {
                self.tunnel.dequeued(run);
                self.tunnel.sent(run, Err(DropReason::Standby.into()));
            });
        }
    }

    /// Tells the other gateway that this one stops.
    pub(crate) fn leave_election(&mut self) {
        let lan = self
            .gateway
            .as_mut()
            .and_then(|gateway| gateway.lan.as_mut());
        if let Some(lan) = lan
            && let Some(election) = &mut lan.election
        {
            let frame = election.leave(lan.link.mac, &mut SystemRandom);
            lan.send_own(&[&[0; VNET_HDR_LEN][..], &frame].concat());
        }
    }
}

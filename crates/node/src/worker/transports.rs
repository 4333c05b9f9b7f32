//! The proxied transports' part of the worker's loop.

use super::Buffers;
use crate::node::Node;
use crate::system::now;
use seikan_mesh::event::WorkerEvent;
use seikan_mesh::stun;

impl Node {
    /// Receives once from each transport that is ready, and delivers the packets. Returns whether
    /// there were any.
    pub(super) fn receive_proxied(&mut self, buffers: &mut Buffers) -> bool {
        let mut delivers = false;
        for token in self.transports.readable() {
            delivers |= self.receive_from_transport(token, buffers);
        }
        delivers
    }

    fn receive_from_transport(&mut self, token: u64, buffers: &mut Buffers) -> bool {
        let (now, mut arrived) = (now(), Vec::new());
        self.transports
            .receive(token, now.mono, &mut buffers.receive, &mut arrived);
        if let Some(gateway) = self.gateway.as_mut().filter(|g| g.is_standby()) {
            gateway.drop_as_standby(arrived.len() as u64);
            return false;
        }
        let arena = buffers.receive.parts_mut().1;
        if let Some(mesh) = &self.mesh {
            arrived.retain(|datagram| {
                let bytes = &arena[datagram.range.clone()];
                let is_answer = stun::is_answer(bytes) && mesh.is_queried(&datagram.source);
                if is_answer {
                    // If the agent's queue is full, this answer is lost, and the agent repeats its
                    // request.
                    mesh.notify_agent(WorkerEvent::Stun(bytes.into()));
                }
                !is_answer
            });
        }
        if arrived.is_empty() {
            return false;
        }
        let datagrams = arrived.len() as u64;
        self.batches.datagrams_per_receive.record(datagrams);
        let arrived = arrived.into_iter();
        self.tunnel
            .inbound(now, arrived, arena, &mut self.inbox, &mut self.outbox);
        self.finish_receive(arena)
    }
}

//! The worker: a single loop that runs each step to completion, without queues in between except for the
//! [`Pacer`](crate::pacer::Pacer).
//!
//! Each iteration, in this order: receive from the sockets, write the packets to the TUN device, send answers;
//! read a batch from the TUN device, seal it, send it; handle timers; serve the control sockets. Receiving
//! comes first because received packets contain the acknowledgements that the sender waits for.

mod gateway;
mod punch;
mod transports;

use crate::batch_reader::BatchReader;
use crate::gateway::Destination;
use crate::node::{Node, NodeError};
use crate::pacer::{Delays, Pace};
use crate::sockets::Sockets;
use crate::sockets::punch::FIRST_TOKEN;
use crate::system::now;
use seikan_mesh::event::WorkerEvent;
use seikan_mesh::stun;
use seikan_mesh::transport::Transports;
use seikan_observe::{DropReason, Stopped};
use seikan_proto::inbox::{MAX_PIECES, Write};
use seikan_proto::mode::Mode;
use seikan_proto::outbox::Run;
use seikan_proto::proxied;
use seikan_proto::segment::{self, SuperPacket};
use seikan_proto::time::Instant;
use seikan_proto::tunnel::Datagram;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::signal::{Signal, Signals};
use seikan_sys::tun::TunQueue;
use seikan_sys::udp::{ReceiveBatch, ReceiveMeta, Transmit, UdpSocket};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::Duration;

/// Receive buffers, each for one GRO batch. All are used while datagrams arrive one by one.
const RECEIVE_BUFFERS: usize = 64;
/// Buffers used while GRO merges datagrams: half a megabyte at a time stays in the cache.
const RECEIVE_BUFFERS_MERGED: usize = 8;
/// Mean bytes per buffer above which GRO merges.
const MERGED_BYTES: usize = 4096;
/// Maximum time for which the worker waits for a full send buffer before it drops datagrams.
const SEND_PATIENCE: Duration = Duration::from_millis(100);
/// Time after which a tunnel has run everything that only its start needs: a member has reached its coordinator.
const START: Duration = Duration::from_secs(10);

const TOKEN_V4: u64 = 0;
const TOKEN_V6: u64 = 1;
const TOKEN_TUN: u64 = 2;
const TOKEN_SIGNAL: u64 = 3;
/// The interface of a gateway's local network.
pub(crate) const TOKEN_LAN: u64 = 4;
/// First token of services.
pub const FIRST_SERVICE_TOKEN: u64 = 16;

/// A part of the loop besides the data path, such as the control sockets.
pub trait Service {
    /// Registers descriptors, with tokens from [`FIRST_SERVICE_TOKEN`] on.
    fn start(&mut self, epoll: &Epoll) -> io::Result<()>;
    /// Handles SIGHUP: the file of the configuration has changed.
    fn hang_up(&mut self) {}
    /// Handles a ready descriptor. Must not block.
    fn ready(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow;
}

/// Effect of a service on the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlFlow {
    /// The loop continues.
    Continue,
    /// The sockets were replaced (another port) and have to be registered.
    SocketsChanged,
    /// The loop ends.
    Stop,
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Requested by a signal or the control socket.
    Requested,
    /// The interface was deleted, or the stack in this process has ended.
    InterfaceGone,
}

struct Buffers {
    reader: BatchReader,
    receive: ReceiveBatch,
}

/// Runs the tunnel until it is stopped, by a signal if `signals` are given.
pub fn run(
    node: &mut Node,
    signals: Option<&Signals>,
    service: &mut dyn Service,
) -> Result<Ended, NodeError> {
    let ended = run_loop(node, signals, service);
    node.send_rest();
    ended
}

fn run_loop(
    node: &mut Node,
    signals: Option<&Signals>,
    service: &mut dyn Service,
) -> Result<Ended, NodeError> {
    let failed = |operation| move |error| NodeError::System { operation, error };
    let mut epoll = Epoll::new(64).map_err(failed("cannot create an epoll instance"))?;
    let register = |epoll: &Epoll, node: &Node| -> io::Result<()> {
        for (socket, token) in [(&node.sockets.v4, TOKEN_V4), (&node.sockets.v6, TOKEN_V6)] {
            if let Some(socket) = socket {
                epoll.add(socket, token, Interest::Read)?;
            }
        }
        Ok(())
    };
    register(&epoll, node).map_err(failed("cannot watch the sockets"))?;
    epoll
        .add(&node.tun.queues()[0], TOKEN_TUN, Interest::Read)
        .and_then(|()| match signals {
            Some(signals) => epoll.add(signals.as_fd(), TOKEN_SIGNAL, Interest::Read),
            None => Ok(()),
        })
        .and_then(|()| match node.lan_socket() {
            Some(socket) => epoll.add(socket, TOKEN_LAN, Interest::Read),
            None => Ok(()),
        })
        .and_then(|()| service.start(&epoll))
        .map_err(failed("cannot watch the descriptors"))?;
    let mut buffers = Buffers {
        reader: BatchReader::new(node.pacer.read_limit()),
        receive: ReceiveBatch::new(RECEIVE_BUFFERS, 65_536),
    };
    let mut served = Vec::new();
    let mut punch_ready = Vec::new();
    let mut reads = true;
    // Not of a program that embeds the tunnel.
    let mut unmap_at = signals.map(|_| now().mono + START);
    loop {
        if unmap_at.take_if(|at| *at <= now().mono).is_some() {
            seikan_sys::memory::unmap_code();
        }
        // Packets wait in the device's queue while datagrams wait for the uplink.
        let is_at_limit = node.pacer.is_at_limit();
        if reads == is_at_limit {
            reads = !is_at_limit;
            node.watch_tun(&epoll, reads)
                .map_err(failed("cannot watch the device"))?;
        }
        let timeout = if reads && buffers.reader.waits() || node.lan_waits() {
            Some(Duration::ZERO)
        } else {
            let tunnel = node.tunnel.next_wakeup().filter(|_| !node.is_standby());
            let punch = node.sockets.punch.wakeup();
            let wakeups = [
                tunnel.map(|(at, _)| at),
                node.gateway_wakeup(),
                punch,
                node.floods.wakeup(),
                node.pacer.wakeup(),
                node.transports.wakeup(),
                unmap_at,
            ];
            let next = wakeups.into_iter().flatten().min();
            next.map(|at| at.duration_since(now().mono))
        };
        let (mut receive, mut read, mut gone) = ([false; 2], false, false);
        let mut read_lan = false;
        served.clear();
        punch_ready.clear();
        for event in epoll
            .wait(timeout)
            .map_err(failed("cannot wait for events"))?
        {
            match event.token {
                TOKEN_V4 | TOKEN_V6 => receive[event.token as usize] = true,
                TOKEN_LAN => read_lan = true,
                TOKEN_TUN => {
                    read = true;
                    gone = event.failed && !event.readable;
                }
                token if token >= FIRST_TOKEN => punch_ready.push(token),
                token if Transports::owns(token) => node.transports.ready(token),
                token => served.push(token),
            }
        }
        // The local stack runs within the write and may have answered already: reading at once costs less than
        // another wakeup, and halves a round trip.
        read |= receive[0] && node.receive_from(TOKEN_V4, &mut buffers);
        read |= receive[1] && node.receive_from(TOKEN_V6, &mut buffers);
        for token in &punch_ready {
            read |= node.receive_from(*token, &mut buffers);
        }
        read |= node.receive_proxied(&mut buffers);
        node.send_paced(now().mono);
        // A gateway answers ARP there, so it reads on, and drops what is too much for the uplink.
        if read_lan || node.lan_waits() {
            node.read_from_lan();
        }
        if (read || buffers.reader.waits()) && !node.pacer.is_at_limit() {
            gone |= node.read_from_tun(&mut buffers.reader);
        }
        // Packets that were read before are sent first. The event comes again.
        if gone && !buffers.reader.waits() {
            return Ok(Ended::InterfaceGone);
        }
        node.poll_timers(&mut buffers);
        node.poll_punches(&epoll);
        node.transports.poll(now().mono);
        node.report_unanswered();
        node.poll_gateway();
        for token in served.drain(..) {
            let flow = match token {
                TOKEN_SIGNAL => match signals.map(Signals::next) {
                    Some(Ok(Some(Signal::Interrupt | Signal::Terminate))) => ControlFlow::Stop,
                    Some(Ok(Some(Signal::Hangup))) => {
                        service.hang_up();
                        ControlFlow::Continue
                    }
                    _ => ControlFlow::Continue,
                },
                token => service.ready(token, &epoll, node),
            };
            match flow {
                ControlFlow::Continue => {}
                ControlFlow::Stop => return Ok(Ended::Requested),
                ControlFlow::SocketsChanged => {
                    register(&epoll, node).map_err(failed("cannot watch the sockets"))?
                }
            }
        }
    }
}

impl Node {
    /// Receives once from a socket and delivers; returns whether packets were delivered.
    fn receive_from(&mut self, token: u64, buffers: &mut Buffers) -> bool {
        let socket = match token {
            TOKEN_V4 => self.sockets.v4.as_ref(),
            TOKEN_V6 => self.sockets.v6.as_ref(),
            // Closed since it was ready.
            token => self.sockets.punch.socket(token),
        };
        let Some(socket) = socket else { return false };
        // An error belongs to an earlier send (unreachable, refused), and was counted there.
        let Ok(received) = socket.receive(&mut buffers.receive) else {
            return false;
        };
        let (metas, arena) = buffers.receive.parts_mut();
        let metas = &metas[..received];
        let datagrams = metas.iter().map(ReceiveMeta::datagrams).sum();
        if let Some(gateway) = self.gateway.as_mut().filter(|g| g.is_standby()) {
            gateway.drop_as_standby(datagrams);
            return false;
        }
        self.batches.datagrams_per_receive.record(datagrams);
        let bytes: usize = metas.iter().map(|m| m.length).sum();
        let merged = bytes > received * MERGED_BYTES;
        let mut others = Vec::new();
        let mut taken = self.refuse_proxied(metas);
        taken |= self.take_stun_answers(metas, taken, arena, &mut others);
        let punched_receive = (token >= FIRST_TOKEN)
            .then(|| self.punched_receive(token, metas))
            .flatten();
        let arrived = metas.iter().enumerate();
        let arrived = arrived.filter(|(index, _)| taken & (1 << index) == 0);
        let arrived = arrived.map(|(_, meta)| datagram(meta));
        let arrived = arrived.chain(others);
        self.tunnel
            .inbound(now(), arrived, arena, &mut self.inbox, &mut self.outbox);
        if let Some(punched_receive) = punched_receive {
            self.on_punched_receive(&punched_receive);
        }
        let delivers = self.finish_receive(arena);
        buffers.receive.set_limit(if merged {
            RECEIVE_BUFFERS_MERGED
        } else {
            RECEIVE_BUFFERS
        });
        delivers
    }

    /// Delivers packets that were received, and sends answers; returns whether there were packets.
    fn finish_receive(&mut self, arena: &mut [u8]) -> bool {
        let delivers = !self.inbox.writes().is_empty();
        self.deliver(arena);
        self.transmit();
        self.release(arena);
        self.send_made();
        delivers
    }

    /// Drops datagrams of a sender that uses the address of a peer behind a relay or a TURN server: those arrive by
    /// their transport alone. Returns a bit for each such receive.
    fn refuse_proxied(&mut self, metas: &[ReceiveMeta]) -> u64 {
        const { assert!(RECEIVE_BUFFERS <= u64::BITS as usize) };
        let mut refused = 0;
        for (index, meta) in metas.iter().enumerate() {
            if proxied::id(meta.source.ip()).is_some() {
                refused |= 1 << index;
                self.tunnel
                    .drop_datagrams(DropReason::UnknownSource, meta.datagrams());
            }
        }
        refused
    }

    /// Passes answers of STUN servers and relays to the mesh's agent, except in receives whose bit in `refused` is
    /// set. Returns a bit for each receive that contained one; other datagrams of these receives are added to
    /// `others`, since GRO may have merged a relay's answers with its datagrams.
    fn take_stun_answers(
        &self,
        metas: &[ReceiveMeta],
        refused: u64,
        arena: &[u8],
        others: &mut Vec<Datagram>,
    ) -> u64 {
        let Some(mesh) = &self.mesh else { return 0 };
        let mut taken = 0;
        for (index, meta) in metas.iter().enumerate() {
            // Answers of unknown servers go to the tunnel, which counts them as of unknown source.
            if refused & (1 << index) != 0 || !mesh.is_queried(&meta.source) {
                continue;
            }
            let is_answer = |range: &Range<usize>| stun::is_answer(&arena[range.clone()]);
            if !meta.segments().any(|range| is_answer(&range)) {
                continue;
            }
            taken |= 1 << index;
            for range in meta.segments() {
                if is_answer(&range) {
                    // A request without an answer is repeated.
                    mesh.notify_agent(WorkerEvent::Stun(arena[range].into()));
                } else {
                    others.push(Datagram {
                        range,
                        ..datagram(meta)
                    });
                }
            }
        }
        taken
    }

    /// Sends a datagram of the mesh's agent from the tunnel's socket. The agent repeats a lost one.
    pub(crate) fn send_from_port(&mut self, bytes: &[u8], to: SocketAddr) {
        if proxied::id(to.ip()).is_some() {
            let now = now().mono;
            let _ = self.transports.send(now, to, bytes, bytes.len());
            return;
        }
        let socket = match to {
            SocketAddr::V4(_) => &self.sockets.v4,
            SocketAddr::V6(_) => &self.sockets.v6,
        };
        if let Some(socket) = socket {
            let _ = socket.send(&Transmit {
                destination: to,
                source: None,
                traffic_class: 0,
                hop_limit: None,
                segment_size: None,
                payload: bytes,
            });
        }
    }

    /// Tells the mesh's agent of members that do not answer.
    fn report_unanswered(&mut self) {
        let Some(mesh) = &self.mesh else { return };
        let now = now().mono;
        for id in self.tunnel.take_peers_to_call() {
            if let Some(peer) = self.tunnel.peer(id) {
                // The next initiation comes here again.
                mesh.notify_agent(WorkerEvent::Sought {
                    key: peer.public_key,
                    lost: peer.paths.is_lost(),
                    calls: !peer.paths.is_pausing(now),
                });
            }
        }
    }

    /// Sends a batch of packets of the TUN device. Returns true if the device is gone.
    fn read_from_tun(&mut self, reader: &mut BatchReader) -> bool {
        let now = now();
        let queue = &self.tun.queues()[0];
        let (batch, gone) = match &mut self.gateway {
            None => reader.next(|space| queue.read(space).map(|length| 0..length), now.mono),
            Some(gateway) => reader.next(
                |space| {
                    let length = gateway.read(space, now.mono, |space| queue.read(space))?;
                    Ok(0..length)
                },
                now.mono,
            ),
        };
        if let Some(gateway) = self.gateway.as_mut().filter(|g| g.is_standby()) {
            let reads = 0..batch.len();
            let packets = reads.map(|i| segment::packets_in(batch.packet(i))).sum();
            gateway.drop_as_standby(packets);
            return gone;
        }
        if !batch.is_empty() {
            self.batches.packets_per_read.record(batch.len() as u64);
            self.send_batch(now, batch);
        }
        self.send_made();
        gone
    }

    fn poll_timers(&mut self, buffers: &mut Buffers) {
        let now = now();
        self.poll_floods(now.mono);
        if self.is_standby()
            || self
                .tunnel
                .next_wakeup()
                .is_none_or(|(at, _)| at > now.mono)
        {
            return;
        }
        loop {
            let more = self.tunnel.poll(now, &mut self.outbox, &mut self.inbox);
            self.transmit();
            self.deliver(&mut []);
            if !more {
                break;
            }
        }
        self.release(buffers.receive.parts_mut().1);
    }

    /// Processes records that loss repair restored or held back, in `arena`, which is free.
    fn release(&mut self, arena: &mut [u8]) {
        loop {
            let more = self
                .tunnel
                .release(now(), arena, &mut self.inbox, &mut self.outbox);
            if !self.inbox.writes().is_empty() {
                self.deliver(arena);
            }
            if !self.outbox.is_empty() {
                self.transmit();
            }
            if !more {
                break;
            }
        }
    }

    /// Sends everything in the outbox, or lets it wait in the pacer.
    pub(crate) fn transmit(&mut self) {
        self.discard_removed();
        let now = now().mono;
        for run in self.outbox.runs() {
            let bytes = self.outbox.bytes(run);
            let peer = run.peer.and_then(|id| self.tunnel.peer(id));
            let delays = peer.map_or(Delays::default(), |peer| Delays {
                round_trip: peer.path.least_rtt,
                queueing: peer.path.report.map_or(Duration::ZERO, |report| {
                    Duration::from_micros(u64::from(report.queueing_delay))
                }),
            });
            let pace = self.pacer.push(run, bytes, delays, now);
            if let Some(id) = run.peer {
                self.tunnel.set_wait(id, self.pacer.hold(id));
            }
            let result = match pace {
                Ok(Pace::Later) => {
                    self.tunnel.queued(run);
                    continue;
                }
                Ok(Pace::Now) => {
                    self.batches.datagrams_per_send.record(run.segments as u64);
                    send(&self.sockets, &mut self.transports, run, bytes)
                }
                Err(stopped) => Err(stopped),
            };
            self.tunnel.sent(run, result);
        }
        self.outbox.clear();
        self.send_paced(now);
    }

    /// Sends the datagrams whose time has come.
    fn send_paced(&mut self, now: Instant) {
        self.discard_removed();
        self.pacer.send(now, |run, bytes| {
            self.batches.datagrams_per_send.record(run.segments as u64);
            let result = send(&self.sockets, &mut self.transports, run, bytes);
            self.tunnel.dequeued(run);
            self.tunnel.sent(run, result);
        });
    }

    /// Sends the datagrams that wait in the pacer at once: the tunnel ends.
    fn send_rest(&mut self) {
        self.discard_removed();
        let mut full = Ok(());
        self.pacer.take_all(|run, bytes| {
            // A full send buffer is waited for once, so that the end does not take minutes.
            let result = full.and_then(|()| send(&self.sockets, &mut self.transports, run, bytes));
            if let Err(stopped) = result
                && stopped.reason == DropReason::SendNoBuffers
            {
                full = Err(DropReason::SendNoBuffers.into());
            }
            self.tunnel.dequeued(run);
            self.tunnel.sent(run, result);
        });
    }

    /// Discards the datagrams to removed peers that wait in the pacer.
    fn discard_removed(&mut self) {
        for id in self.tunnel.take_removed_peers() {
            self.pacer.remove(id);
        }
    }

    /// Starts or stops waiting for packets of the TUN device.
    fn watch_tun(&self, epoll: &Epoll, watch: bool) -> io::Result<()> {
        let tun = &self.tun.queues()[0];
        if watch {
            epoll.add(tun, TOKEN_TUN, Interest::Read)
        } else {
            epoll.delete(tun)
        }
    }

    /// Writes everything in the inbox to the TUN device, or sends it to the gateway's devices.
    pub(crate) fn deliver(&mut self, arena: &mut [u8]) {
        let queue = &self.tun.queues()[0];
        let mode = self.tunnel.mode();
        let Some(gateway) = &mut self.gateway else {
            for write in self.inbox.writes() {
                let result = deliver_one(queue, mode, write, arena);
                self.batches.packets_per_write.record(write.packets);
                self.tunnel.delivered(write, result);
            }
            self.inbox.clear();
            return;
        };
        let now = now().mono;
        for i in 0..self.inbox.writes().len() {
            let destination = gateway.destination(&mut self.inbox, i, arena, now);
            let write = &self.inbox.writes()[i];
            let (packets, bytes) = (write.packets, write.bytes);
            let result = match destination {
                Destination::Tun(Some(_)) if gateway.gateway.merging().is_cut() => {
                    deliver_cut(queue, mode, write, arena)
                }
                Destination::Tun(_) => deliver_one(queue, mode, write, arena),
                Destination::Lan(id) => gateway.deliver(id, &self.inbox, i, arena, now),
                Destination::Dropped(reason) => Err(reason.into()),
            };
            if let Destination::Tun(Some(id)) | Destination::Lan(id) = destination {
                gateway.gateway.delivered(id, packets, bytes, result);
            }
            let write = &self.inbox.writes()[i];
            self.batches.packets_per_write.record(packets);
            self.tunnel.delivered(write, result);
        }
        self.inbox.clear();
    }
}

fn datagram(meta: &ReceiveMeta) -> Datagram {
    Datagram {
        source: meta.source,
        destination: meta.destination,
        traffic_class: meta.traffic_class,
        range: meta.offset..meta.offset + meta.length,
        segment_size: meta.segment_size,
        truncated: meta.truncated,
    }
}

/// Sends a run by the way that its destination needs.
fn send(
    sockets: &Sockets,
    transports: &mut Transports,
    run: &Run,
    bytes: &[u8],
) -> Result<(), Stopped> {
    let to = run.destination.address;
    if proxied::id(to.ip()).is_some() {
        let sent = transports.send(now().mono, to, bytes, run.segment_size);
        sent.map_err(Stopped::from)
    } else if let Some(socket) = sockets.towards(to, run.peer) {
        send_udp(socket, run, bytes)
    } else {
        Err(DropReason::SendRefused.into())
    }
}

/// Sends a run; waits if the send buffer is full, and leaves out the source address if the kernel no longer has
/// it. An error tells the number of datagrams that were sent.
fn send_udp(socket: &UdpSocket, run: &Run, bytes: &[u8]) -> Result<(), Stopped> {
    let mut transmit = Transmit {
        destination: run.destination.address,
        source: run.destination.source,
        traffic_class: run.destination.traffic_class,
        hop_limit: run.destination.hop_limit,
        segment_size: (run.segments > 1).then_some(run.segment_size as u16),
        payload: bytes,
    };
    loop {
        let Err(stopped) = socket.send(&transmit) else {
            return Ok(());
        };
        transmit.payload = &transmit.payload[stopped.bytes..];
        let full = stopped.error.kind() == io::ErrorKind::WouldBlock;
        match stopped.reason() {
            _ if full && wait_writable(socket) => {}
            DropReason::SendRefused if transmit.source.is_some() => transmit.source = None,
            reason => {
                let sent = bytes.len() - transmit.payload.len();
                let done = (sent / run.segment_size.max(1)) as u64;
                return Err(Stopped { done, reason });
            }
        }
    }
}

/// Waits until the send buffer has space; returns false after a timeout. Meanwhile arrivals wait in the receive
/// buffer and packets in the TUN device's queue, so that the senders slow down.
fn wait_writable(socket: &UdpSocket) -> bool {
    let Ok(mut epoll) = Epoll::new(1) else {
        return false;
    };
    epoll.add(socket, 0, Interest::Write).is_ok()
        && epoll
            .wait(Some(SEND_PATIENCE))
            .is_ok_and(|ready| ready.len() > 0)
}

/// Writes one packet or super-packet. A super-packet that the device refuses is written packet by packet
/// (kernels 6.6.44 and 6.10.3 refuse valid ones).
fn deliver_one(queue: &TunQueue, mode: Mode, write: &Write, arena: &[u8]) -> Result<(), Stopped> {
    let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
    let n = write.parts(arena, &mut parts);
    match queue.write_vectored(&parts[..n]) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput && write.packets > 1 => {
            deliver_cut(queue, mode, write, arena)
        }
        Err(error) => Err(refusal(&error).into()),
    }
}

/// Returns why a device did not take a packet. Only a stack in this process makes it wait.
fn refusal(error: &io::Error) -> DropReason {
    match error.kind() {
        io::ErrorKind::WouldBlock => DropReason::StackQueueFull,
        _ => DropReason::TunWriteRefused,
    }
}

/// Writes a super-packet packet by packet. An error tells the number of packets that were written.
fn deliver_cut(queue: &TunQueue, mode: Mode, write: &Write, arena: &[u8]) -> Result<(), Stopped> {
    let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
    let n = write.parts(arena, &mut parts);
    let whole: Vec<u8> = parts[..n].iter().flat_map(|p| p.iter().copied()).collect();
    let ip_at = mode.ip_at(&whole[seikan_wire::VNET_HDR_LEN..])?;
    let packet = SuperPacket::parse_at(&whole, ip_at.ok_or(DropReason::NotIp)?)?;
    let mut out = vec![0; seikan_wire::VNET_HDR_LEN + packet.segment_len(0)];
    for i in 0..packet.segments() {
        let length = packet.segment_len(i);
        packet.segment(i, false, &mut out[seikan_wire::VNET_HDR_LEN..]);
        let one = &out[..seikan_wire::VNET_HDR_LEN + length];
        if let Err(error) = queue.write_vectored(&[IoSlice::new(one)]) {
            let (done, reason) = (i as u64, refusal(&error));
            return Err(Stopped { done, reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::inbox::{Inbox, Packet};
    use seikan_proto::indices::PeerId;
    use seikan_proto::outbox::{Destination, Payload};
    use seikan_sys::netns::NetNs;
    use seikan_sys::tun::{Tun, TunOptions};
    use seikan_sys::udp::UdpOptions;
    use seikan_wire::ip::IpPacket;
    use std::fs::File;
    use std::io::Read;

    #[test]
    fn a_packet_for_a_stack_that_is_behind_is_counted_as_such() {
        let (tun, _stack) = Tun::pair("pair").expect("a pair");
        let write = || tun.queues()[0].write_vectored(&[IoSlice::new(&[0; 1500])]);
        let error = std::iter::repeat_with(write).find_map(Result::err);
        let reason = refusal(&error.expect("full"));
        assert_eq!(reason, DropReason::StackQueueFull);
    }

    /// A super-packet of this many datagrams of 1000 bytes.
    fn super_packet(datagrams: usize) -> (Inbox, Vec<u8>) {
        // From 192.0.2.1 to 192.0.2.2, with a checksum for the device to complete.
        let mut packet = vec![
            0x45, 0, 0x04, 0x04, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0,
            7, 0x03, 0xf0, 0, 1,
        ];
        packet.resize(1028, 0);
        let arena = packet.repeat(datagrams);
        let mut inbox = Inbox::new(true, true);
        for start in (0..arena.len()).step_by(packet.len()) {
            let one = Packet {
                range: start..start + packet.len(),
                ip_at: 0,
                ip: IpPacket::parse(&packet).expect("a packet"),
                partial: true,
            };
            inbox.packet(&arena, &one, PeerId(0));
        }
        inbox.finish(&arena);
        (inbox, arena)
    }

    #[test]
    fn a_device_that_stops_within_a_super_packet_has_taken_the_packets_before() {
        let (tun, stack) = Tun::pair("pair").expect("a pair");
        let (inbox, arena) = super_packet(50);
        let write = &inbox.writes()[0];
        assert_eq!(write.packets, 50);
        let mut taken = 0;
        let stopped = loop {
            match deliver_cut(&tun.queues()[0], Mode::Ip, write, &arena) {
                Ok(()) => taken += 50,
                Err(stopped) => break stopped,
            }
        };
        assert_eq!(stopped.reason, DropReason::StackQueueFull);
        taken += stopped.done;
        let (mut stack, mut packet) = (File::from(stack), [0; 2000]);
        let arrived = std::iter::from_fn(|| stack.read(&mut packet).ok()).count();
        assert_eq!(arrived as u64, taken);
        assert_ne!(arrived % 50, 0, "it stopped between two super-packets");
    }

    #[test]
    fn a_run_that_stops_tells_how_many_datagrams_were_sent() {
        let namespace = NetNs::create().expect("namespace");
        let stopped = namespace.run(|| {
            // An Ethernet without an answer to ARP, so that datagrams stay in the send buffer.
            let options = TunOptions {
                name: "silent".to_owned(),
                mtu: 1500,
                queues: 1,
                offload: false,
            };
            let tap = Tun::create_tap(&options).expect("a TAP device");
            let index = tap.index().expect("an index");
            let netlink = seikan_sys::netlink::Netlink::open().expect("netlink");
            let address = "192.0.2.1/24".parse().expect("an address");
            netlink.add_address(index, address).expect("address");
            netlink.set_up(index).expect("up");
            let options = UdpOptions {
                send_buffer: 20_000,
                gso: false,
                ..UdpOptions::default()
            };
            let any = "0.0.0.0:0".parse().expect("an address");
            let socket = UdpSocket::bind(any, &options).expect("a socket");
            let run = Run {
                destination: Destination {
                    address: "192.0.2.2:7".parse().expect("an address"),
                    source: None,
                    traffic_class: 0,
                    hop_limit: None,
                },
                peer: None,
                segment_size: 1000,
                segments: 60,
                first: 0,
                payload: Payload::default(),
                range: 0..60_000,
            };
            send_udp(&socket, &run, &[0; 60_000])
        });
        let stopped = stopped.expect("namespace").expect_err("a full buffer");
        assert_eq!(stopped.reason, DropReason::SendNoBuffers);
        assert!((1..60).contains(&stopped.done), "{stopped:?}");
    }
}

//! The thread of the stack: one epoll loop over the device, the sockets of the host, and timers.
//!
//! Each packet is classified and passed to its connection. A packet without a connection is passed
//! to a set without sockets, with which smoltcp answers pings, refuses connections and reports
//! unreachable ports. Connections with work to do are queued, and each is advanced once for all
//! packets and events of an iteration, so that one acknowledgement covers a batch.

mod connections;
mod datagrams;
mod own;

use crate::counters::{Counters, ServiceCounters};
use crate::device::{Device, Read};
use crate::inside::{self, Net};
use crate::options::{Exposed, Forward, Limits, Transport};
use crate::packet::{self, FlowKey, Inbound, Kind};
use crate::service::{Names, Service};
use crate::sockets::Command;
use crate::target::{Failure, Host, Target};
use crate::waker::Waker;
use connections::Connection;
use datagrams::Datagrams;
use ipnet::IpNet;
use own::Own;
use seikan_observe::DropReason;
use seikan_sys::poll::{Epoll, Event, Interest};
use seikan_wire::ip::PROTO_TCP;
use seikan_wire::{VNET_HDR_LEN, VnetHdr};
use slab::Slab;
use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::wire::{HardwareAddress, IpCidr};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Maximum number of packets that are read before connections are advanced.
const PACKETS_PER_ROUND: usize = 64;
/// Maximum number of connections that are advanced before packets are read.
const CONNECTIONS_PER_ROUND: usize = 256;
/// Maximum interval between two sweeps, which find idle UDP flows and silent far ends.
const SWEEP_EVERY: Duration = Duration::from_secs(10);
/// First local port of connections to the inside, and their number: the ephemeral ports of Linux.
const EPHEMERAL_PORTS: (u16, u16) = (32_768, 28_232);

const KIND_SHIFT: u32 = 60;
const DEVICE: u64 = 0;
const WAKE: u64 = 1;
const LISTENER: u64 = 2;
const CONNECTION: u64 = 3;
const UDP_LISTENER: u64 = 4;
const UDP_FLOW: u64 = 5;
const ASSOCIATION: u64 = 6;
const OWN_PORT: u64 = 7;

/// A reference to an entry of a slab: its index, and a number that tells the entry from others that
/// reuse the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Id {
    index: u32,
    generation: u32,
}

impl Id {
    fn token(self, kind: u64) -> u64 {
        let generation = u64::from(self.generation) & 0x0fff_ffff;
        kind << KIND_SHIFT | generation << 32 | u64::from(self.index)
    }

    fn of(token: u64) -> Id {
        Id {
            index: token as u32,
            generation: (token >> 32) as u32 & 0x0fff_ffff,
        }
    }
}

/// A listening TCP socket of the host.
#[derive(Debug)]
pub(crate) struct Entrance {
    pub service: Service,
    pub socket: TcpListener,
    /// The destination of a forwarded port.
    pub target: Option<Target>,
}

/// A UDP socket of the host that leads to one destination.
#[derive(Debug)]
pub(crate) struct UdpEntrance {
    pub socket: UdpSocket,
    pub target: Target,
}

/// The parts that [`crate::Stack`] has prepared.
pub(crate) struct Parts {
    pub device: Device,
    pub addresses: Vec<IpNet>,
    pub mtu: usize,
    pub entrances: Vec<Entrance>,
    pub udp_entrances: Vec<UdpEntrance>,
    pub exposed: Vec<Exposed>,
    pub limits: Limits,
    pub names: Names,
    pub commands: mpsc::Receiver<Command>,
    pub seed: u64,
}

/// State shared with the handle.
#[derive(Debug)]
pub(crate) struct Shared {
    pub counters: Mutex<Counters>,
    pub waker: Arc<Waker>,
}

/// The stack, driven by [`Engine::run`].
pub(crate) struct Engine {
    parts: Parts,
    shared: Arc<Shared>,
    epoll: Epoll,
    interface: Interface,
    /// An empty set, for packets that belong to no connection.
    nobody: SocketSet<'static>,
    epoch: Instant,
    now: Instant,
    connections: Slab<Connection>,
    flows: HashMap<FlowKey, usize>,
    datagrams: Datagrams,
    own: Own,
    timers: BTreeSet<(Instant, usize)>,
    /// Connections to advance.
    queue: VecDeque<usize>,
    /// Connections that wait for the device.
    blocked: Vec<usize>,
    sweep_at: Instant,
    /// Events of an iteration; kept to reuse its memory.
    events: Vec<Event>,
    device_readable: bool,
    buffer_bytes: usize,
    next_port: u16,
    next_generation: u32,
    counters: Counters,
}

impl Engine {
    /// Prepares the loop.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2) and epoll_pwait2(2).
    pub fn new(mut parts: Parts, shared: Arc<Shared>) -> io::Result<Engine> {
        let epoll = Epoll::new(256)?;
        epoll.add_edge(&parts.device, DEVICE << KIND_SHIFT)?;
        epoll.add(&*shared.waker, WAKE << KIND_SHIFT, Interest::Read)?;
        for (index, entrance) in parts.entrances.iter().enumerate() {
            let token = LISTENER << KIND_SHIFT | index as u64;
            epoll.add(&entrance.socket, token, Interest::Read)?;
        }
        for (index, entrance) in parts.udp_entrances.iter().enumerate() {
            let token = UDP_LISTENER << KIND_SHIFT | index as u64;
            epoll.add(&entrance.socket, token, Interest::Read)?;
        }
        let now = Instant::now();
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = parts.seed;
        let mut interface = Interface::new(config, &mut parts.device, smoltcp::time::Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            for net in &parts.addresses {
                // Bounded by `Stack::start`.
                let _ = addresses.push(IpCidr::new(net.addr().into(), net.prefix_len()));
            }
        });
        Ok(Engine {
            next_port: (parts.seed >> 16) as u16 % EPHEMERAL_PORTS.1,
            parts,
            shared,
            epoll,
            interface,
            nobody: SocketSet::new(Vec::new()),
            epoch: now,
            now,
            connections: Slab::new(),
            flows: HashMap::new(),
            datagrams: Datagrams::default(),
            own: Own::default(),
            timers: BTreeSet::new(),
            queue: VecDeque::new(),
            blocked: Vec::new(),
            sweep_at: now,
            events: Vec::new(),
            device_readable: false,
            buffer_bytes: 0,
            next_generation: 0,
            counters: Counters::default(),
        })
    }

    /// Runs until the handle is dropped, a command to finish is complete, or the other end of the
    /// device is closed. Then resets all remaining connections.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2) and epoll_pwait2(2).
    pub fn run(&mut self) -> io::Result<()> {
        let ended = self.run_until_end();
        self.reset_all();
        self.publish();
        ended
    }

    fn run_until_end(&mut self) -> io::Result<()> {
        while self.run_once(None)? {}
        Ok(())
    }

    /// Waits for events, for at most `patience`, and handles them. Returns false when the stack has
    /// ended.
    ///
    /// # Errors
    /// Errors of epoll_ctl(2) and epoll_pwait2(2).
    pub fn run_once(&mut self, patience: Option<Duration>) -> io::Result<bool> {
        self.publish();
        if self.is_finished() {
            return Ok(false);
        }
        let timeout = [self.timeout(), patience].into_iter().flatten().min();
        let mut events = std::mem::take(&mut self.events);
        events.extend(self.epoll.wait(timeout)?);
        self.now = Instant::now();
        let mut ends = false;
        for event in events.drain(..) {
            match event.token >> KIND_SHIFT {
                DEVICE => {
                    self.device_readable |= event.readable || event.failed;
                    if event.writable {
                        self.on_device_writable();
                    }
                }
                WAKE => {
                    self.shared.waker.clear();
                    ends = self.shared.waker.ends();
                    self.take_commands();
                }
                LISTENER => self.accept(event.token as u32 as usize),
                CONNECTION => self.on_host_event(Id::of(event.token), &event),
                UDP_LISTENER => self.read_forwarded(event.token as u32 as usize),
                UDP_FLOW => self.read_exposed(Id::of(event.token)),
                ASSOCIATION => self.read_association(Id::of(event.token)),
                OWN_PORT => self.own.on_readable(Id::of(event.token)),
                _ => {}
            }
        }
        self.events = events;
        if ends {
            return Ok(false);
        }
        if self.device_readable {
            match self.read_device() {
                Read::Packet(_) => {}
                Read::Empty => self.device_readable = false,
                Read::Closed => return Ok(false),
            }
        }
        self.expire();
        self.read_own();
        for _ in 0..self.queue.len().min(CONNECTIONS_PER_ROUND) {
            if let Some(index) = self.queue.pop_front() {
                self.advance(index);
            }
        }
        Ok(true)
    }

    fn timeout(&self) -> Option<Duration> {
        let reads = self.own.is_ready() && !self.parts.device.is_blocked();
        if self.device_readable || !self.queue.is_empty() || reads {
            return Some(Duration::ZERO);
        }
        let sweeps = self.datagrams.has_flows() || self.counters.exposed.open > 0;
        let sweep = sweeps.then_some(self.sweep_at);
        let timer = self.timers.first().map(|(at, _)| *at);
        let next = [sweep, timer, self.own.finish_at()];
        let next = next.into_iter().flatten().min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn publish(&mut self) {
        self.counters.packets_out = self.parts.device.packets_out;
        let dropped = std::mem::take(&mut self.parts.device.dropped);
        self.counters
            .drops
            .add(DropReason::TunWriteRefused, dropped);
        let shared = &mut *self
            .shared
            .counters
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        shared.clone_from(&self.counters);
    }

    fn expire(&mut self) {
        while let Some((at, index)) = self.timers.first().copied() {
            if at > self.now {
                break;
            }
            self.timers.pop_first();
            if let Some(connection) = self.connections.get_mut(index) {
                connection.timer = None;
            }
            self.enqueue(index);
        }
        if self.sweep_at <= self.now {
            let probes_every = self.parts.limits.silent_for / 20;
            self.sweep_at = self.now + SWEEP_EVERY.min(probes_every);
            self.sweep_datagrams();
            self.sweep_silent();
        }
    }

    fn on_device_writable(&mut self) {
        if self.parts.device.flush() {
            for index in std::mem::take(&mut self.blocked) {
                self.enqueue(index);
            }
        }
    }

    /// Reads a batch of packets. Returns the result of the last read.
    fn read_device(&mut self) -> Read {
        for _ in 0..PACKETS_PER_ROUND {
            match self.parts.device.read() {
                Read::Packet(length) => {
                    self.counters.packets_in += 1;
                    if let Err(reason) = self.inbound(length) {
                        self.counters.drops.add(reason, 1);
                    }
                }
                end => return end,
            }
        }
        Read::Packet(0)
    }

    /// Handles the packet in the device's inbox.
    fn inbound(&mut self, length: usize) -> Result<(), DropReason> {
        let addresses = &self.parts.addresses;
        let buf = &self.parts.device.inbox()[..length];
        let vnet = VnetHdr::read(buf).map_err(|_| DropReason::BadOffload)?;
        let is_local = |address| addresses.iter().any(|net| net.addr() == address);
        let packet = packet::classify(&vnet, &buf[VNET_HDR_LEN..], is_local)?;
        match packet.kind {
            Kind::Tcp { flow, opens } => {
                if let Some(&index) = self.flows.get(&flow) {
                    self.segment(index, &packet);
                    return Ok(());
                }
                if opens && let Some(exposed) = self.exposed(Transport::Tcp, flow.local.port()) {
                    return match self.open_exposed(flow, exposed) {
                        Ok(index) => {
                            self.segment(index, &packet);
                            Ok(())
                        }
                        // Answer with a refusal, so that the far end does not wait.
                        Err(reason) => self.answer_unclaimed(&packet).or(Err(reason)),
                    };
                }
                if opens && let Some(queue) = self.listening(flow.local.port()) {
                    // Without an answer, the far end tries again.
                    let index = self.open_listening(flow, queue?)?;
                    self.segment(index, &packet);
                    return Ok(());
                }
                self.answer_unclaimed(&packet)
            }
            Kind::Udp { flow, size } => {
                if self.receive_datagrams(&flow, &packet, size)? {
                    Ok(())
                } else {
                    self.answer_unclaimed(&packet)
                }
            }
            Kind::Error {
                protocol,
                flow,
                seq,
                is_port,
            } => {
                if protocol == PROTO_TCP
                    && let Some(&index) = self.flows.get(&flow)
                    && self.on_unreachable(index, seq, is_port)
                {
                    return Ok(());
                }
                Err(DropReason::NoService)
            }
            Kind::Other => {
                let before = self.parts.device.packets_out;
                let dropped = self.answer_unclaimed(&packet);
                // Only a ping is answered; other packets are counted as dropped.
                let device = &self.parts.device;
                if device.packets_out > before || device.is_blocked() {
                    return Ok(());
                }
                dropped
            }
        }
    }

    /// Lets smoltcp answer a packet that belongs to no connection, and returns the reason by which
    /// the packet is counted: always [`DropReason::NoService`].
    fn answer_unclaimed(&mut self, packet: &Inbound) -> Result<(), DropReason> {
        let range = VNET_HDR_LEN..VNET_HDR_LEN + packet.end;
        self.parts.device.arrive(range);
        let now = inside::clock(self.epoch, self.now);
        self.interface
            .poll_ingress_single(now, &mut self.parts.device, &mut self.nobody);
        self.parts.device.sent.clear();
        Err(DropReason::NoService)
    }

    /// Passes a segment to its connection, which is advanced later.
    fn segment(&mut self, index: usize, packet: &Inbound) {
        let mut net = net(&mut self.interface, &mut self.parts, self.epoch, self.now);
        if let Some(inside) = &mut self.connections[index].inside {
            inside.ingress(&mut net, packet);
            self.enqueue(index);
        }
    }

    fn enqueue(&mut self, index: usize) {
        if let Some(connection) = self.connections.get_mut(index)
            && !connection.queued
        {
            connection.queued = true;
            self.queue.push_back(index);
        }
    }

    fn exposed(&self, transport: Transport, port: u16) -> Option<Exposed> {
        let mut exposed = self.parts.exposed.iter();
        exposed
            .find(|e| e.transport == transport && e.port == port)
            .copied()
    }

    fn generation(&mut self) -> u32 {
        self.next_generation = (self.next_generation + 1) & 0x0fff_ffff;
        self.next_generation
    }

    /// Returns the addresses of a host.
    fn find(&self, host: &Host) -> Vec<IpAddr> {
        match host {
            Host::Address(address) => vec![*address],
            Host::Name(name) => (self.parts.names)(name),
        }
    }

    /// Resolves a destination. Returns an own address of the same family, and the destination's
    /// address with its port.
    fn resolve(&self, target: &Target) -> Result<(IpAddr, SocketAddr), Failure> {
        let found = self.find(&target.host);
        let own = |to: &IpAddr| {
            let addresses = || self.parts.addresses.iter();
            let near = addresses().find(|net| net.contains(to));
            near.or_else(|| addresses().find(|net| net.addr().is_ipv4() == to.is_ipv4()))
                .map(IpNet::addr)
        };
        let usable = |to: &IpAddr| !to.is_unspecified() && !to.is_multicast();
        let pair = found
            .into_iter()
            .filter(usable)
            .find_map(|to| Some((own(&to)?, to)));
        // Packets to this host would go to the tunnel, where nobody answers.
        let is_here = |to: IpAddr| {
            to.is_loopback() || self.parts.addresses.iter().any(|net| net.addr() == to)
        };
        match (pair, &target.host) {
            (Some((_, to)), _) if is_here(to) => Err(Failure::Unreachable),
            (Some((own, to)), _) => Ok((own, SocketAddr::new(to, target.port))),
            (None, Host::Name(_)) => Err(Failure::UnknownName),
            (None, Host::Address(_)) => Err(Failure::Unreachable),
        }
    }

    /// Chooses a local port for a flow to `remote` for which `is_used` returns false.
    fn free_flow(
        &mut self,
        own: IpAddr,
        remote: SocketAddr,
        is_used: impl Fn(&Engine, &FlowKey) -> bool,
    ) -> Option<FlowKey> {
        let (first, count) = EPHEMERAL_PORTS;
        for _ in 0..count {
            self.next_port = (self.next_port + 1) % count;
            let local = SocketAddr::new(own, first + self.next_port);
            let flow = FlowKey { local, remote };
            let port = local.port();
            let exposed = self.parts.exposed.iter().any(|e| e.port == port);
            if !exposed && !self.own.has_port(port) && !is_used(self, &flow) {
                return Some(flow);
            }
        }
        None
    }

    /// Returns the number of connections and the bytes of their buffers.
    #[cfg(fuzzing)]
    pub fn usage(&self) -> (usize, usize) {
        (self.connections.len(), self.buffer_bytes)
    }

    /// Whether the limit of connections and flows is reached.
    fn is_full(&self) -> bool {
        self.connections.len() + self.datagrams.len() + self.own.len()
            >= self.parts.limits.connections
    }

    /// Whether connections opened from the inside have reached their share, half of the limit, so
    /// that peers cannot use up the limit for the host's own connections.
    fn is_full_for_inside(&self) -> bool {
        self.is_full() || self.counters.exposed.open >= self.parts.limits.connections as u64 / 2
    }

    fn service(&mut self, service: Service) -> &mut ServiceCounters {
        match service {
            Service::Socks => &mut self.counters.socks,
            Service::Http => &mut self.counters.http,
            Service::Forward => &mut self.counters.forwards,
            Service::Exposed => &mut self.counters.exposed,
            Service::Own => &mut self.counters.own,
        }
    }
}

impl From<&Forward> for Target {
    fn from(forward: &Forward) -> Target {
        Target {
            // A name with invalid characters is never found.
            host: Host::parse(&forward.host).unwrap_or(Host::Name(String::new())),
            port: forward.port,
        }
    }
}

/// The stack below the connections.
fn net<'a>(
    interface: &'a mut Interface,
    parts: &'a mut Parts,
    epoch: Instant,
    now: Instant,
) -> Net<'a> {
    Net {
        interface,
        device: &mut parts.device,
        epoch,
        now,
        mtu: parts.mtu,
    }
}

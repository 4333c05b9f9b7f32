//! UDP: flows of forwarded ports, of SOCKS5 associations, and of exposed ports.

use super::{ASSOCIATION, Engine, Id, UDP_FLOW};
use crate::options::Transport;
use crate::packet::{self, FlowKey, Inbound};
use crate::service::Service;
use crate::socks;
use crate::target::{Failure, Target};
use seikan_observe::DropReason;
use seikan_sys::poll::Interest;
use seikan_wire::{VNET_HDR_LEN, udp};
use slab::Slab;
use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// Time without datagrams after which a flow ends: more than the two minutes that RFC 4787, REQ-5,
/// requires.
const IDLE_FOR: Duration = Duration::from_secs(180);
/// Maximum number of datagrams that are read from one socket at a time.
const DATAGRAMS: usize = 64;

/// All flows and associations.
#[derive(Debug, Default)]
pub(super) struct Datagrams {
    flows: Slab<Flow>,
    by_key: HashMap<FlowKey, usize>,
    by_client: HashMap<Client, usize>,
    associations: HashMap<Id, Association>,
    pub buf: Vec<u8>,
    out: Vec<u8>,
}

impl Datagrams {
    /// Returns an upper bound of the number of sockets of flows and associations.
    pub fn len(&self) -> usize {
        self.flows.len() + self.associations.len()
    }

    pub fn has_flows(&self) -> bool {
        !self.flows.is_empty()
    }
}

/// A UDP flow.
#[derive(Debug)]
struct Flow {
    key: FlowKey,
    generation: u32,
    end: HostEnd,
    used_at: Instant,
}

/// The host's end of a flow.
#[derive(Debug)]
enum HostEnd {
    /// A client of a forwarded port or of an association.
    Client(Client),
    /// A connected socket to the target of an exposed port.
    Socket(UdpSocket),
}

/// A client and the destination of its datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client {
    via: Via,
    address: SocketAddr,
    remote: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Via {
    /// The index of a forwarded port.
    Forward(usize),
    Association(Id),
}

impl Via {
    fn service(self) -> Service {
        match self {
            Via::Forward(_) => Service::Forward,
            Via::Association(_) => Service::Socks,
        }
    }
}

/// The UDP socket of a SOCKS5 association.
#[derive(Debug)]
struct Association {
    socket: UdpSocket,
    /// Address of the client. Datagrams are accepted only from this address, and from the port of
    /// the first datagram.
    client: IpAddr,
    port: Option<u16>,
}

impl Engine {
    /// Reads datagrams for a forwarded port.
    pub(super) fn read_forwarded(&mut self, index: usize) {
        let mut buf = self.take_buf();
        for _ in 0..DATAGRAMS {
            let Some(entrance) = self.parts.udp_entrances.get(index) else {
                break;
            };
            match entrance.socket.recv_from(&mut buf) {
                Ok((length, address)) => {
                    let target = entrance.target.clone();
                    let sent = self.send_to(Via::Forward(index), address, &target, &buf[..length]);
                    self.count(sent);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {}
            }
        }
        self.datagrams.buf = buf;
    }

    /// Reads datagrams of a client's association.
    pub(super) fn read_association(&mut self, id: Id) {
        let mut buf = self.take_buf();
        for _ in 0..DATAGRAMS {
            let Some(association) = self.datagrams.associations.get_mut(&id) else {
                break;
            };
            let (length, address) = match association.socket.recv_from(&mut buf) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => continue,
            };
            let is_client = address.ip() == association.client
                && *association.port.get_or_insert(address.port()) == address.port();
            let datagram = socks::datagram(&buf[..length]);
            let sent = match datagram {
                _ if !is_client => Err(DropReason::UnknownSource),
                Some((target, at)) => {
                    self.send_to(Via::Association(id), address, &target, &buf[at..length])
                }
                None => Err(DropReason::BadFrame),
            };
            self.count(sent);
        }
        self.datagrams.buf = buf;
    }

    /// Reads answers of the host's program behind an exposed port.
    pub(super) fn read_exposed(&mut self, id: Id) {
        let mut buf = self.take_buf();
        let index = id.index as usize;
        for _ in 0..DATAGRAMS {
            let Some(Flow {
                end: HostEnd::Socket(socket),
                key,
                generation,
                used_at,
            }) = self.datagrams.flows.get_mut(index)
            else {
                break;
            };
            if *generation != id.generation {
                break;
            }
            match socket.recv(&mut buf) {
                Ok(length) => {
                    *used_at = self.now;
                    let key = *key;
                    let sent = self.send_inside(&key, Service::Exposed, &buf[..length]);
                    self.count(sent);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Nothing listens on the host's port, or no longer.
                Err(_) => {}
            }
        }
        self.datagrams.buf = buf;
    }

    pub(super) fn take_buf(&mut self) -> Vec<u8> {
        let mut buf = std::mem::take(&mut self.datagrams.buf);
        buf.resize(65_536, 0);
        buf
    }

    pub(super) fn count(&mut self, sent: Result<(), DropReason>) {
        if let Err(reason) = sent {
            self.counters.drops.add(reason, 1);
        }
    }

    /// Sends a client's datagram to the inside, over its flow or a new one.
    fn send_to(
        &mut self,
        via: Via,
        address: SocketAddr,
        target: &Target,
        payload: &[u8],
    ) -> Result<(), DropReason> {
        let (own, remote) = self.resolve(target).map_err(|_| DropReason::NoRoute)?;
        let client = Client {
            via,
            address,
            remote,
        };
        let index = match self.datagrams.by_client.get(&client) {
            Some(index) => *index,
            None => {
                let is_used =
                    |engine: &Engine, key: &FlowKey| engine.datagrams.by_key.contains_key(key);
                let key = self
                    .free_flow(own, remote, is_used)
                    .ok_or(DropReason::FlowLimit)?;
                let index = self.insert_flow(key, HostEnd::Client(client))?;
                self.datagrams.by_client.insert(client, index);
                index
            }
        };
        let flow = &mut self.datagrams.flows[index];
        flow.used_at = self.now;
        let key = flow.key;
        self.send_inside(&key, via.service(), payload)
    }

    pub(super) fn send_inside(
        &mut self,
        key: &FlowKey,
        service: Service,
        payload: &[u8],
    ) -> Result<(), DropReason> {
        let out = &mut self.datagrams.out;
        packet::build_udp(key, payload, self.parts.mtu, out)?;
        self.parts.device.send(out)?;
        self.service(service).bytes_out += payload.len() as u64;
        Ok(())
    }

    fn insert_flow(&mut self, key: FlowKey, end: HostEnd) -> Result<usize, DropReason> {
        if self.is_full() {
            return Err(DropReason::FlowLimit);
        }
        let service = end.service();
        let generation = self.generation();
        let index = self.datagrams.flows.insert(Flow {
            key,
            generation,
            end,
            used_at: self.now,
        });
        self.datagrams.by_key.insert(key, index);
        let counters = self.service(service);
        counters.open += 1;
        counters.accepted += 1;
        Ok(index)
    }

    /// Passes datagrams from the inside to their flow, or to a new flow of an exposed port. Returns
    /// false if there is neither.
    pub(super) fn receive_datagrams(
        &mut self,
        key: &FlowKey,
        packet: &Inbound,
        size: usize,
    ) -> Result<bool, DropReason> {
        let index = match self.datagrams.by_key.get(key) {
            Some(index) => *index,
            None => match self.exposed(Transport::Udp, key.local.port()) {
                Some(exposed) => self.open_udp(key, exposed.target)?,
                None => return Ok(self.receive_own(key, packet, size)),
            },
        };
        let flow = &mut self.datagrams.flows[index];
        flow.used_at = self.now;
        let service = flow.end.service();
        let start = VNET_HDR_LEN + packet.transport_at + udp::HEADER_LEN;
        let payload = &self.parts.device.inbox()[start..VNET_HDR_LEN + packet.end];
        let (mut bytes, mut refused) = (0, 0);
        for range in packet::datagrams(payload.len(), size) {
            let datagram = &payload[range];
            let sent = match &flow.end {
                HostEnd::Socket(socket) => socket.send(datagram).is_ok(),
                HostEnd::Client(client) => match client.via {
                    Via::Forward(index) => {
                        let entrance = &self.parts.udp_entrances[index];
                        entrance.socket.send_to(datagram, client.address).is_ok()
                    }
                    Via::Association(id) => {
                        let out = &mut self.datagrams.out;
                        out.clear();
                        socks::write_datagram_header(out, key.remote);
                        out.extend(datagram);
                        let association = self.datagrams.associations.get(&id);
                        association.is_some_and(|a| a.socket.send_to(out, client.address).is_ok())
                    }
                },
            };
            if sent {
                bytes += datagram.len() as u64;
            } else {
                refused += 1;
            }
        }
        self.service(service).bytes_in += bytes;
        self.counters.drops.add(DropReason::HostRefused, refused);
        Ok(true)
    }

    /// Opens a flow of an exposed port.
    fn open_udp(&mut self, key: &FlowKey, target: SocketAddr) -> Result<usize, DropReason> {
        if self.is_full_for_inside() {
            return Err(DropReason::FlowLimit);
        }
        let any: IpAddr = match target {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))
            .and_then(|socket| {
                socket.connect(target)?;
                socket.set_nonblocking(true)?;
                Ok(socket)
            })
            .map_err(|_| DropReason::HostRefused)?;
        let index = self.insert_flow(*key, HostEnd::Socket(socket))?;
        let flow = &self.datagrams.flows[index];
        if let HostEnd::Socket(socket) = &flow.end {
            let id = Id {
                index: index as u32,
                generation: flow.generation,
            };
            // Without events, answers of the host would not be read.
            if self
                .epoll
                .add(socket, id.token(UDP_FLOW), Interest::Read)
                .is_err()
            {
                self.remove_flow(index);
                return Err(DropReason::FlowLimit);
            }
        }
        Ok(index)
    }

    /// Opens the UDP socket of an association on the address that the client has reached.
    pub(super) fn associate(&mut self, index: usize) -> Result<SocketAddr, Failure> {
        if self.is_full() {
            return Err(Failure::Limit);
        }
        let connection = &self.connections[index];
        let host = &connection.splice.host;
        let id = Id {
            index: index as u32,
            generation: connection.generation,
        };
        let opened = host.client().and_then(|(local, client)| {
            let socket = UdpSocket::bind((local.ip(), 0))?;
            socket.set_nonblocking(true)?;
            self.epoll
                .add(&socket, id.token(ASSOCIATION), Interest::Read)?;
            let bound = socket.local_addr()?;
            let association = Association {
                socket,
                client: client.ip(),
                port: None,
            };
            Ok((association, bound))
        });
        let (association, bound) = opened.map_err(|_| Failure::Limit)?;
        self.datagrams.associations.insert(id, association);
        Ok(bound)
    }

    /// Ends the association when the client closes its connection.
    pub(super) fn follow_association(&mut self, index: usize) {
        let splice = &mut self.connections[index].splice;
        let mut chunk = [0; 512];
        while splice.readable {
            match splice.host.read(&mut chunk) {
                Ok(0) => return self.remove(index),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => splice.readable = false,
                Err(_) => return self.remove(index),
            }
        }
    }

    /// Removes an association and its flows.
    pub(super) fn end_association(&mut self, id: Id) {
        self.datagrams.associations.remove(&id);
        self.remove_flows(|flow| match &flow.end {
            HostEnd::Client(client) => client.via == Via::Association(id),
            HostEnd::Socket(_) => false,
        });
    }

    /// Ends flows without datagrams.
    pub(super) fn sweep_datagrams(&mut self) {
        let now = self.now;
        self.remove_flows(|flow| now.saturating_duration_since(flow.used_at) >= IDLE_FOR);
    }

    fn remove_flows(&mut self, ends: impl Fn(&Flow) -> bool) {
        let flows = self.datagrams.flows.iter();
        let ended: Vec<usize> = flows
            .filter(|(_, flow)| ends(flow))
            .map(|(index, _)| index)
            .collect();
        for index in ended {
            self.remove_flow(index);
        }
    }

    fn remove_flow(&mut self, index: usize) {
        let flow = self.datagrams.flows.remove(index);
        self.datagrams.by_key.remove(&flow.key);
        if let HostEnd::Client(client) = &flow.end {
            self.datagrams.by_client.remove(client);
        }
        self.service(flow.end.service()).open -= 1;
    }
}

impl HostEnd {
    fn service(&self) -> Service {
        match self {
            HostEnd::Client(client) => client.via.service(),
            HostEnd::Socket(_) => Service::Exposed,
        }
    }
}

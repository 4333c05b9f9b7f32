//! Sockets of this process: commands, listening ports, ports for datagrams, and the orderly end of
//! the stack.

use super::{EPHEMERAL_PORTS, Engine, Id, OWN_PORT};
use crate::options::Transport;
use crate::packet::{self, FlowKey, Inbound};
use crate::service::Service;
use crate::sockets::{
    ADDRESS_LEN, Command, MAX_COMMANDS, SocketError, Stream, read_address, write_address,
};
use crate::target::{Host, Target};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};
use seikan_observe::DropReason;
use seikan_wire::{VNET_HDR_LEN, udp};
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// Maximum number of datagrams that are read from one port before others get their share.
const DATAGRAMS: usize = 64;

/// Ports of this process.
#[derive(Debug, Default)]
pub(super) struct Own {
    listening: HashMap<u16, mpsc::Sender<Stream>>,
    ports: HashMap<u16, Port>,
    /// Ports with datagrams to read.
    ready: VecDeque<Id>,
    finish: Option<Finish>,
}

/// A port for datagrams.
#[derive(Debug)]
struct Port {
    socket: OwnedFd,
    generation: u32,
}

/// A pending command to finish.
#[derive(Debug)]
struct Finish {
    at: Instant,
    /// Dropped with the engine, which reports its end to the caller.
    _answer: oneshot::Sender<()>,
}

impl Own {
    /// Number of ports for datagrams.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Whether a port for datagrams waits to be read.
    pub fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Records that a port can be read.
    pub fn on_readable(&mut self, id: Id) {
        if !self.ready.contains(&id) {
            self.ready.push_back(id);
        }
    }

    /// Whether connections or datagrams arrive at this port.
    pub fn has_port(&self, port: u16) -> bool {
        self.listening.contains_key(&port) || self.ports.contains_key(&port)
    }

    /// Returns the time at which the stack ends at the latest, if it was told to finish.
    pub fn finish_at(&self) -> Option<Instant> {
        self.finish.as_ref().map(|finish| finish.at)
    }
}

impl Engine {
    /// Executes pending commands.
    pub(super) fn take_commands(&mut self) {
        for _ in 0..MAX_COMMANDS {
            match self.parts.commands.try_recv() {
                Ok(command) => self.carry_out(command),
                Err(_) => return,
            }
        }
        // There may be more commands.
        self.shared.waker.wake();
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Connect {
                target,
                stream,
                answer,
            } => self.open_own(&target, stream, answer),
            Command::Listen {
                port,
                queue,
                answer,
            } => {
                let _ = answer.send(self.listen(port, queue));
            }
            Command::Bind {
                port,
                socket,
                answer,
            } => {
                let _ = answer.send(self.bind(port, socket));
            }
            Command::Find { host, answer } => {
                let found = self.find(&host);
                let found = if found.is_empty() {
                    Err(SocketError::UnknownName)
                } else {
                    Ok(found)
                };
                let _ = answer.send(found);
            }
            Command::Finish { within, answer } => {
                self.own.finish = Some(Finish {
                    at: self.now + within,
                    _answer: answer,
                });
            }
        }
    }

    /// Whether a pending command to finish is complete.
    pub(super) fn is_finished(&self) -> bool {
        self.own
            .finish_at()
            .is_some_and(|at| at <= self.now || self.queue.is_empty() && !self.is_delivering())
    }

    fn listen(&mut self, port: u16, queue: mpsc::Sender<Stream>) -> Result<u16, SocketError> {
        self.own.listening.retain(|_, queue| !queue.is_closed());
        let is_used = |engine: &Engine, port| engine.own.listening.contains_key(&port);
        let port = self.free_port(port, Transport::Tcp, is_used)?;
        self.own.listening.insert(port, queue);
        Ok(port)
    }

    fn bind(&mut self, port: u16, socket: OwnedFd) -> Result<u16, SocketError> {
        if self.is_full() {
            return Err(SocketError::Limit);
        }
        let is_used = |engine: &Engine, port| engine.own.ports.contains_key(&port);
        let port = self.free_port(port, Transport::Udp, is_used)?;
        let generation = self.generation();
        let id = Id {
            index: port.into(),
            generation,
        };
        self.epoll.add_edge(&socket, id.token(OWN_PORT))?;
        self.own.ports.insert(port, Port { socket, generation });
        self.service(Service::Own).open += 1;
        Ok(port)
    }

    /// Returns the port, or a free port if it is 0.
    fn free_port(
        &mut self,
        port: u16,
        transport: Transport,
        is_used: impl Fn(&Engine, u16) -> bool,
    ) -> Result<u16, SocketError> {
        let is_free = |engine: &Engine, port| {
            engine.exposed(transport, port).is_none() && !is_used(engine, port)
        };
        if port != 0 {
            let free = is_free(self, port).then_some(port);
            return free.ok_or(SocketError::PortInUse);
        }
        let (first, count) = EPHEMERAL_PORTS;
        for _ in 0..count {
            self.next_port = (self.next_port + 1) % count;
            let port = first + self.next_port;
            if is_free(self, port) {
                return Ok(port);
            }
        }
        Err(SocketError::PortInUse)
    }

    /// Returns the queue of the socket that listens on a port.
    ///
    /// # Errors
    /// [`DropReason::FlowLimit`] if too many connections wait in it.
    pub(super) fn listening(
        &mut self,
        port: u16,
    ) -> Option<Result<mpsc::Sender<Stream>, DropReason>> {
        let queue = self.own.listening.get(&port)?;
        if queue.is_closed() {
            self.own.listening.remove(&port);
            return None;
        }
        let has_space = queue.capacity() > 0;
        Some(
            has_space
                .then(|| queue.clone())
                .ok_or(DropReason::FlowLimit),
        )
    }

    /// Sends datagrams of this process, as long as the device takes them.
    pub(super) fn read_own(&mut self) {
        for _ in 0..self.own.ready.len() {
            if self.parts.device.is_blocked() {
                return;
            }
            if let Some(id) = self.own.ready.pop_front()
                && self.read_port(id)
            {
                self.own.on_readable(id);
            }
        }
    }

    /// Returns whether there may be more to read.
    fn read_port(&mut self, id: Id) -> bool {
        let number = id.index as u16;
        let mut buf = self.take_buf();
        let mut more = true;
        for _ in 0..DATAGRAMS {
            let Some(port) = self.own.ports.get(&number) else {
                more = false;
                break;
            };
            if port.generation != id.generation || self.parts.device.is_blocked() {
                more = port.generation == id.generation;
                break;
            }
            match nix::unistd::read(&port.socket, &mut buf) {
                Ok(length @ 1..) => {
                    let sent = self.send_own(number, &buf[..length]);
                    self.count(sent);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    more = false;
                    break;
                }
                // The program has closed its end. The error is ECONNRESET if it left datagrams
                // unread.
                Ok(_) | Err(_) => {
                    self.own.ports.remove(&number);
                    self.service(Service::Own).open -= 1;
                }
            }
        }
        self.datagrams.buf = buf;
        more
    }

    fn send_own(&mut self, port: u16, message: &[u8]) -> Result<(), DropReason> {
        let (address, payload) = message
            .split_first_chunk::<ADDRESS_LEN>()
            .ok_or(DropReason::BadFrame)?;
        let remote = read_address(address);
        let target = Target {
            host: Host::Address(remote.ip()),
            port: remote.port(),
        };
        let (own, remote) = self.resolve(&target).map_err(|_| DropReason::NoRoute)?;
        let key = FlowKey {
            local: SocketAddr::new(own, port),
            remote,
        };
        self.send_inside(&key, Service::Own, payload)
    }

    /// Passes datagrams from the inside to a port of this process. Returns false if it has no such
    /// port.
    pub(super) fn receive_own(&mut self, key: &FlowKey, packet: &Inbound, size: usize) -> bool {
        let Some(port) = self.own.ports.get(&key.local.port()) else {
            return false;
        };
        let start = VNET_HDR_LEN + packet.transport_at + udp::HEADER_LEN;
        let payload = &self.parts.device.inbox()[start..VNET_HDR_LEN + packet.end];
        let address = write_address(key.remote);
        let (mut bytes, mut refused) = (0, 0);
        for range in packet::datagrams(payload.len(), size) {
            let datagram = &payload[range];
            let message = [IoSlice::new(&address), IoSlice::new(datagram)];
            let flags = MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(port.socket.as_raw_fd(), &message, &[], flags, None) {
                Ok(_) => bytes += datagram.len() as u64,
                // The program that reads from the port is behind.
                Err(_) => refused += 1,
            }
        }
        self.service(Service::Own).bytes_in += bytes;
        self.counters.drops.add(DropReason::HostRefused, refused);
        true
    }
}

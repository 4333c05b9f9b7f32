//! Parts of the stack for fuzz targets: the parsers of requests, and a stack without its thread.

use crate::device::Device;
use crate::engine::{Engine, Parts, Shared};
use crate::http;
use crate::options::{Exposed, Limits, Transport};
use crate::sockets::{Datagrams, Incoming, Sockets};
use crate::socks::{self, Parsed};
use crate::waker::Waker;
use ipnet::IpNet;
use seikan_sys::packet_pair::packet_pair;
use seikan_sys::tun::READ_BUFFER_LEN;
use std::fmt::Debug;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker as TaskWaker};
use std::time::Duration;

/// Messages of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The greeting of SOCKS5.
    SocksGreeting,
    /// The request of SOCKS5.
    SocksRequest,
    /// The head of an HTTP request.
    HttpHead,
}

/// The message at the start of a client's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A part of a message.
    Partial,
    /// A message of `length` bytes.
    Complete {
        /// Its content.
        content: String,
        /// Its bytes.
        length: usize,
    },
    /// Something else.
    Invalid,
}

/// Reads a message.
pub fn read(message: Message, bytes: &[u8]) -> Outcome {
    match message {
        Message::SocksGreeting => outcome(socks::greeting(bytes)),
        Message::SocksRequest => outcome(socks::request(bytes)),
        Message::HttpHead => outcome(http::request(bytes)),
    }
}

fn outcome(parsed: Parsed<impl Debug>) -> Outcome {
    match parsed {
        Parsed::Partial => Outcome::Partial,
        Parsed::Complete(content, length) => Outcome::Complete {
            content: format!("{content:?}"),
            length,
        },
        Parsed::Invalid => Outcome::Invalid,
    }
}

/// Returns the length of the header of a SOCKS5 client's datagram; `None` if the datagram is
/// invalid.
pub fn datagram_header(bytes: &[u8]) -> Option<usize> {
    socks::datagram(bytes).map(|(_, length)| length)
}

/// A stack with a listening port 80, a port 53 for datagrams, and an exposed port 22. Nothing reads
/// from ports 80 and 53.
pub struct Machine {
    engine: Engine,
    device: OwnedFd,
    _incoming: Incoming,
    _datagrams: Datagrams,
}

impl Machine {
    /// Makes a stack with these addresses, for packets of at most 1420 bytes and 64 connections.
    pub fn new(addresses: Vec<IpNet>) -> Machine {
        let (device, end) = packet_pair().expect("a pair of sockets");
        let waker = Arc::new(Waker::new().expect("an event"));
        let (sockets, commands) = Sockets::new(Arc::clone(&waker));
        let shared = Shared {
            counters: Mutex::default(),
            waker,
        };
        let parts = Parts {
            device: Device::new(end, 1420),
            addresses,
            mtu: 1420,
            entrances: Vec::new(),
            udp_entrances: Vec::new(),
            exposed: vec![Exposed {
                port: 22,
                // Nothing listens there.
                target: ([127, 0, 0, 1], 1).into(),
                transport: Transport::Tcp,
            }],
            limits: Limits {
                connections: 64,
                buffer_bytes: 64 << 20,
                ..Limits::default()
            },
            names: Box::new(|_| Vec::new()),
            commands,
            seed: 1,
        };
        let mut engine = Engine::new(parts, Arc::new(shared)).expect("epoll");
        let incoming = answered(&mut engine, sockets.listen(80)).expect("a port");
        let datagrams = answered(&mut engine, sockets.bind(53)).expect("a port");
        Machine {
            engine,
            device,
            _incoming: incoming,
            _datagrams: datagrams,
        }
    }

    /// Delivers a virtio-net header with a packet, and returns the packets that the stack sends.
    pub fn deliver(&mut self, packet: &[u8]) -> Vec<Vec<u8>> {
        let _ = nix::unistd::write(&self.device, packet);
        for _ in 0..3 {
            self.engine.run_once(Some(Duration::ZERO)).expect("epoll");
        }
        let mut sent = Vec::new();
        let mut buf = vec![0; READ_BUFFER_LEN];
        while let Ok(length @ 1..) = nix::unistd::read(&self.device, &mut buf) {
            sent.push(buf[..length].to_vec());
        }
        sent
    }

    /// Returns the number of connections and the bytes of their buffers.
    pub fn usage(&self) -> (usize, usize) {
        self.engine.usage()
    }
}

fn answered<T>(engine: &mut Engine, command: impl Future<Output = T>) -> T {
    let mut command = pin!(command);
    let mut context = Context::from_waker(TaskWaker::noop());
    loop {
        if let Poll::Ready(answer) = command.as_mut().poll(&mut context) {
            return answer;
        }
        engine.run_once(Some(Duration::ZERO)).expect("epoll");
    }
}

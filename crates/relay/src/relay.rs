//! The loop: wait, serve what is ready, look for sides that are gone.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use seikan_proto::mesh::RelaySecret;
use seikan_proto::time::Instant;
use seikan_sys::clock;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::signal::{Signal, Signals};
use seikan_sys::udp::{ReceiveBatch, UdpError, UdpOptions, UdpSocket};

use crate::Counters;
use crate::streams::{FIRST_TOKEN as FIRST_STREAM_TOKEN, LISTENER_TOKEN, Streams};
use crate::table::Table;

/// Receive buffers, each for what GRO joins.
const RECEIVE_BUFFERS: usize = 64;
/// Bytes of one.
const RECEIVE_BUFFER: usize = 65_536;
/// Descriptors looked at in one turn.
const EVENTS: usize = 64;
/// How often sides that are gone are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// The main sockets have the numbers of their families.
const TOKEN_SIGNAL: u64 = 2;
/// Two for each pair, by its place and the family; 3 is the listener's for TLS.
pub(crate) const FIRST_PAIR_TOKEN: u64 = 4;

/// What a relay needs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its main port; port 0 takes any that is free. `[::]` is IPv4, too. The pairs' ports are of the same address.
    pub listen: SocketAddr,
    /// How it is spoken to by TLS, if it is.
    pub tls: Option<TlsOptions>,
    /// What tickets are judged by.
    pub secret: RelaySecret,
    /// How much of what it gives.
    pub limits: Limits,
}

/// A relay by TLS over TCP, for members that have no answer by UDP.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// Where it listens; port 0 takes any that is free. `[::]` is IPv4, too.
    pub listen: SocketAddr,
    /// How TLS is spoken there.
    pub config: ServerConfig,
}

/// How much a relay gives.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Pairs in total.
    pub pairs: usize,
    /// Pairs that one member has asked for.
    pub pairs_per_member: usize,
    /// The ports that pairs get.
    pub ports: RangeInclusive<u16>,
    /// What a member may send, in bytes a second.
    pub rate: u64,
    /// Connections by TLS, at least 1. A quarter of them may be of strangers.
    pub streams: usize,
}

impl Default for Limits {
    /// 10,000 pairs, 256 of one member, the dynamic ports (RFC 6335), one gigabit a second, 1,000 connections.
    fn default() -> Limits {
        Limits {
            pairs: 10_000,
            pairs_per_member: 256,
            ports: 49_152..=65_535,
            rate: 1_000_000_000 / 8,
            streams: 1_000,
        }
    }
}

/// Why there is no relay, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The main port cannot be had.
    #[error(transparent)]
    Listen(#[from] UdpError),
    /// The port of TLS cannot be had.
    #[error("cannot listen for TLS on {address}: {source}")]
    ListenTls {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// What the system says.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// What the clocks show.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// For how long something lasts.
    pub mono: Instant,
    /// For tickets: seconds since 1970.
    pub unix: u64,
}

impl Now {
    /// As the system's do.
    pub fn read() -> Now {
        Now {
            mono: Instant::BOOT + clock::monotonic(),
            unix: clock::wall().as_secs(),
        }
    }
}

/// A relay that has its main port.
#[derive(Debug)]
pub struct Relay {
    epoll: Epoll,
    batch: ReceiveBatch,
    ready: Vec<u64>,
    table: Table,
    swept: Instant,
    shared: Arc<Mutex<Counters>>,
}

impl Relay {
    /// Takes the main port, and that of TLS.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn bind(options: Options) -> Result<Relay, RelayError> {
        let failed = |what| move |source| RelayError::System { what, source };
        let main = bind_both(options.listen)?;
        let epoll = Epoll::new(EVENTS).map_err(failed("cannot create an epoll instance"))?;
        for (token, socket) in main.iter().enumerate() {
            if let Some(socket) = socket {
                let added = epoll.add(socket, token as u64, Interest::Read);
                added.map_err(failed("cannot watch the sockets"))?;
            }
        }
        let streams = match options.tls {
            None => Streams::default(),
            Some(TlsOptions { listen, config }) => TcpListener::bind(listen)
                .and_then(|listener| {
                    Streams::listen(listener, config, options.limits.streams, &epoll)
                })
                .map_err(|source| RelayError::ListenTls {
                    address: listen,
                    source,
                })?,
        };
        Ok(Relay {
            epoll,
            batch: ReceiveBatch::new(RECEIVE_BUFFERS, RECEIVE_BUFFER),
            ready: Vec::with_capacity(EVENTS),
            table: Table::new(main, streams, options.secret, options.limits),
            swept: Instant::BOOT,
            shared: Arc::default(),
        })
    }

    /// Where it listens, by IPv4, by IPv6 or both.
    ///
    /// # Errors
    /// What getsockname(2) says.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let sockets = self.table.main.iter().flatten();
        sockets.map(UdpSocket::local_addr).collect()
    }

    /// Where it listens for TLS, if it does.
    ///
    /// # Errors
    /// What getsockname(2) says.
    pub fn tls_address(&self) -> io::Result<Option<SocketAddr>> {
        self.table.streams.address().transpose()
    }

    /// What it has done, as of the last turn.
    pub fn counters(&self) -> Arc<Mutex<Counters>> {
        Arc::clone(&self.shared)
    }

    /// Relays until SIGINT or SIGTERM.
    ///
    /// # Errors
    /// [`RelayError::System`].
    pub fn run(&mut self, signals: &Signals) -> Result<(), RelayError> {
        let added = self
            .epoll
            .add(signals.as_fd(), TOKEN_SIGNAL, Interest::Read);
        added.map_err(|source| RelayError::System {
            what: "cannot watch for signals",
            source,
        })?;
        loop {
            self.turn(SWEEP, Now::read)?;
            if self.ready.contains(&TOKEN_SIGNAL)
                && let Ok(Some(Signal::Interrupt | Signal::Terminate)) = signals.next()
            {
                return Ok(());
            }
        }
    }

    /// Waits for something to do, for `patience` at most, and does it. The clock is read when there is.
    ///
    /// # Errors
    /// [`RelayError::System`].
    pub fn turn(&mut self, patience: Duration, clock: impl Fn() -> Now) -> Result<(), RelayError> {
        let events = self.epoll.wait(Some(patience));
        let events = events.map_err(|source| RelayError::System {
            what: "cannot wait for events",
            source,
        })?;
        self.ready.clear();
        self.ready.extend(events.map(|event| event.token));
        let now = clock();
        for &token in &self.ready {
            match token {
                TOKEN_SIGNAL => {}
                LISTENER_TOKEN => self.table.streams.accept(&self.epoll, now.mono),
                FIRST_STREAM_TOKEN.. => {
                    let id = token - FIRST_STREAM_TOKEN;
                    self.table.serve_stream(id, &self.epoll, now);
                }
                0..TOKEN_SIGNAL => {
                    self.table
                        .serve_main(token as usize, &mut self.batch, &self.epoll, now);
                }
                _ => {
                    let place = token - FIRST_PAIR_TOKEN;
                    let (slot, family) = ((place / 2) as usize, (place % 2) as usize);
                    self.table
                        .serve_pair(slot, family, &mut self.batch, &self.epoll, now);
                }
            }
        }
        // Behind the events: a place that a pair leaves here is named by none of them.
        if self.swept.has_expired(SWEEP, now.mono) {
            self.swept = now.mono;
            self.table.sweep(now.mono);
            for id in self.table.streams.sweep(&self.epoll, now.mono) {
                self.table.end_stream(id);
            }
        }
        self.table.flush_streams(&self.epoll);
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.clone_from(self.table.told());
        Ok(())
    }
}

/// The main sockets by family; of `[::]` both.
fn bind_both(listen: SocketAddr) -> Result<[Option<UdpSocket>; 2], RelayError> {
    let options = UdpOptions::default();
    let v4 = |port| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port).into(), &options);
    match UdpSocket::bind(listen, &options) {
        Ok(socket) if listen.is_ipv4() => Ok([Some(socket), None]),
        Ok(socket) if !listen.ip().is_unspecified() => Ok([None, Some(socket)]),
        Ok(v6) => {
            let address = v6.local_addr().map_err(|source| RelayError::System {
                what: "cannot ask for the port",
                source,
            })?;
            Ok([Some(v4(address.port())?), Some(v6)])
        }
        // A kernel without IPv6.
        Err(UdpError::NoFamily { .. } | UdpError::AddressNotAvailable { .. })
            if listen.ip().is_unspecified() && listen.is_ipv6() =>
        {
            Ok([Some(v4(listen.port())?), None])
        }
        Err(error) => Err(error.into()),
    }
}

//! The event loop: waits, serves the sockets that are ready, and removes expired sides and connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use seikan_proto::time::Instant;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::signal::{Signal, Signals};
use seikan_sys::udp::{ReceiveBatch, UdpError, UdpOptions, UdpSocket};

use crate::streams::Streams;
use crate::table::Table;
use crate::{Counters, Now, Options, TlsOptions, token};

/// Number of receive buffers; each takes a batch that GRO has joined.
const RECEIVE_BUFFERS: usize = 64;
/// Size of a receive buffer in bytes.
const RECEIVE_BUFFER: usize = 65_536;
/// Maximum number of events that one poll handles.
const EVENTS: usize = 64;
/// Interval between two searches for expired sides and connections.
const SWEEP: Duration = Duration::from_secs(1);

/// Why a relay could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The main port could not be opened.
    #[error(transparent)]
    Listen(#[from] UdpError),
    /// The port for TLS could not be opened.
    #[error("cannot listen for TLS on {address}: {source}")]
    ListenTls {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    System {
        /// The action that failed, as "cannot ...".
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// A relay with its sockets.
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
    /// Opens the main port and the port for TLS.
    ///
    /// # Errors
    /// [`RelayError`].
    pub fn bind(options: Options) -> Result<Relay, RelayError> {
        let failed = |action| move |source| RelayError::System { action, source };
        let main = bind_both(options.listen)?;
        let epoll = Epoll::new(EVENTS).map_err(failed("cannot create an epoll instance"))?;
        for (family, socket) in main.iter().enumerate() {
            if let Some(socket) = socket {
                let added = epoll.add(socket, family as u64, Interest::Read);
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

    /// Returns the addresses of the main port: for IPv4, IPv6 or both.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let sockets = self.table.main.iter().flatten();
        sockets.map(UdpSocket::local_addr).collect()
    }

    /// Returns the address of the port for TLS, if there is one.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn tls_address(&self) -> io::Result<Option<SocketAddr>> {
        self.table.streams.address().transpose()
    }

    /// Returns the counters, which each poll updates.
    pub fn counters(&self) -> Arc<Mutex<Counters>> {
        Arc::clone(&self.shared)
    }

    /// Runs until SIGINT or SIGTERM.
    ///
    /// # Errors
    /// [`RelayError::System`].
    pub fn run(&mut self, signals: &Signals) -> Result<(), RelayError> {
        let added = self
            .epoll
            .add(signals.as_fd(), token::SIGNAL, Interest::Read);
        added.map_err(|source| RelayError::System {
            action: "cannot watch for signals",
            source,
        })?;
        loop {
            self.poll(SWEEP, Now::read)?;
            if self.ready.contains(&token::SIGNAL)
                && let Ok(Some(Signal::Interrupt | Signal::Terminate)) = signals.next()
            {
                return Ok(());
            }
        }
    }

    /// Waits for events, for `timeout` at most, and handles them. Reads `clock` after the wait.
    ///
    /// # Errors
    /// [`RelayError::System`].
    pub fn poll(&mut self, timeout: Duration, clock: impl Fn() -> Now) -> Result<(), RelayError> {
        let events = self.epoll.wait(Some(timeout));
        let events = events.map_err(|source| RelayError::System {
            action: "cannot wait for events",
            source,
        })?;
        self.ready.clear();
        self.ready.extend(events.map(|event| event.token));
        let now = clock();
        for &token in &self.ready {
            match token {
                token::SIGNAL => {}
                token::LISTENER => self.table.streams.accept(&self.epoll, now.mono),
                token::FIRST_STREAM.. => {
                    let id = token - token::FIRST_STREAM;
                    self.table.serve_stream(id, &self.epoll, now);
                }
                0..token::SIGNAL => {
                    self.table
                        .serve_main(token as usize, &mut self.batch, &self.epoll, now);
                }
                _ => {
                    let index = token - token::FIRST_PAIR;
                    let (slot, family) = ((index / 2) as usize, (index % 2) as usize);
                    self.table
                        .serve_pair(slot, family, &mut self.batch, &self.epoll, now);
                }
            }
        }
        // After the events, because they name slots that this frees.
        if self.swept.has_expired(SWEEP, now.mono) {
            self.swept = now.mono;
            self.table.sweep(now.mono);
            for id in self.table.streams.sweep(&self.epoll, now.mono) {
                self.table.end_stream(id);
            }
        }
        self.table.flush_streams(&self.epoll);
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.clone_from(self.table.counters());
        Ok(())
    }
}

/// Opens the main sockets, by family. `[::]` opens one for each family.
fn bind_both(listen: SocketAddr) -> Result<[Option<UdpSocket>; 2], RelayError> {
    let options = UdpOptions::default();
    let v4 = |port| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port).into(), &options);
    match UdpSocket::bind(listen, &options) {
        Ok(socket) if listen.is_ipv4() => Ok([Some(socket), None]),
        Ok(socket) if !listen.ip().is_unspecified() => Ok([None, Some(socket)]),
        Ok(v6) => {
            let address = v6.local_addr().map_err(|source| RelayError::System {
                action: "cannot get the address of the main socket",
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

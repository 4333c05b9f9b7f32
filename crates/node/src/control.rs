//! The control sockets, served by the worker's loop between packets: the socket for `wg` ([`crate::uapi`]),
//! Seikan's own ([`json`]) and, if configured, metrics ([`crate::metrics`]).
//!
//! [`Control::new`] reserves the interface's name on this host and binds all sockets, so that errors appear
//! before any device exists. As a [`Service`] it then accepts clients, does a bounded piece of work for each
//! that is ready ([`client::Client::run_once`]), and closes slow ones. Nothing here blocks. Dropping it removes
//! the sockets and releases the name, so it must be dropped last. [`ask`] is the client side.

pub mod ask;
pub mod client;
pub mod json;
pub mod ping;
pub mod socket;

use crate::dialogue::Dialogue;
use crate::node::Node;
use crate::subject::{Record, Subject};
use crate::system::now;
use crate::worker::{ControlFlow, FIRST_SERVICE_TOKEN, Service};
use crate::{metrics, uapi};
use client::{Client, Fate, Stream};
use seikan_config::Config;
use seikan_proto::time::Instant;
use seikan_sys::netlink::Netlink;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::timer::Timer;
pub use socket::{ControlError, RuntimeDirs};
use socket::{Listener, Lock};
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

/// Clients at a time over both local sockets.
const MAX_LOCAL: usize = 32;
/// Scrapes at a time.
const MAX_METRICS: usize = 8;
/// Interval at which the state of a pending reply, such as that to a ping, is polled.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Pause before clients are accepted again after descriptors or memory ran out.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

const TOKEN_TIMER: u64 = FIRST_SERVICE_TOKEN;
const TOKEN_LISTENERS: u64 = FIRST_SERVICE_TOKEN + 1;
/// First token of clients; none is used twice, so that a late event matches no client.
const TOKEN_CLIENTS: u64 = FIRST_SERVICE_TOKEN + 16;

/// The control sockets of one instance.
pub struct Control {
    /// Token of each: [`TOKEN_LISTENERS`] plus its index.
    listeners: Vec<ListeningSocket>,
    clients: BTreeMap<u64, Client>,
    next_token: u64,
    timer: Timer,
    /// No client is accepted until then.
    paused_until: Option<Instant>,
    record: Record,
    // Dropped last: fields are dropped in order of declaration.
    lock: Lock,
}

/// A listening socket and its protocol.
enum ListeningSocket {
    Uapi(Listener),
    Json(Listener),
    Metrics(TcpListener),
}

impl Control {
    /// Reserves the interface's name on this host and binds the sockets, including the metrics socket if
    /// `config` has an address for it.
    ///
    /// # Errors
    /// Another instance runs under the name on this host, in any network namespace; a directory or socket
    /// cannot be created; the metrics address cannot be bound. A missing right to write to `wg`'s directory is
    /// no error: `status` reports it.
    pub fn new(dirs: &RuntimeDirs, config: &Config) -> Result<Control, ControlError> {
        Control::with_uapi(dirs, config, None)
    }

    /// Like [`Control::new`], with a listening socket for `wg` that another program has bound, if there is one.
    ///
    /// # Errors
    /// As with [`Control::new`].
    pub fn with_uapi(
        dirs: &RuntimeDirs,
        config: &Config,
        given: Option<UnixListener>,
    ) -> Result<Control, ControlError> {
        let name = config.name.as_str();
        let lock = Lock::take(dirs, name)?;
        let uapi = match given {
            Some(socket) => Ok(Listener::adopt(socket, &dirs.uapi(name))?),
            None => socket::bind_uapi(dirs, name)?,
        };
        let mut listeners = vec![ListeningSocket::Json(Listener::bind(&dirs.control(name))?)];
        if let Some(address) = config.metrics {
            let metrics = TcpListener::bind(address).and_then(|listener| {
                listener.set_nonblocking(true)?;
                Ok(listener)
            });
            listeners.push(ListeningSocket::Metrics(
                metrics.map_err(|error| ControlError::Metrics { address, error })?,
            ));
        }
        let without_uapi = match uapi {
            Ok(listener) => {
                listeners.push(ListeningSocket::Uapi(listener));
                None
            }
            Err(reason) => Some(reason),
        };
        let named = config.peers.iter();
        let named = named.filter_map(|peer| Some((peer.public_key, peer.name.clone()?)));
        Ok(Control {
            listeners,
            clients: BTreeMap::new(),
            next_token: TOKEN_CLIENTS,
            timer: Timer::new().map_err(|error| ControlError::System {
                operation: "cannot create a timer",
                error,
            })?,
            paused_until: None,
            record: Record {
                name: name.into(),
                names: named.collect(),
                keyless: false,
                netlink: None,
                without_uapi,
                config: None,
                log: None,
            },
            lock,
        })
    }

    /// Reports no private key until a client sets one.
    pub fn set_keyless(&mut self) {
        self.record.keyless = true;
    }

    /// Reports these files in `status`: configuration and log.
    pub fn set_files(&mut self, config: Option<PathBuf>, log: Option<PathBuf>) {
        self.record.config = config;
        self.record.log = log;
    }

    /// Leaves the removal of the sockets and the release of the name to another process. Returns
    /// whether that process has to remove a socket for `wg`.
    pub fn leave_sockets(&mut self) -> bool {
        let mut uapi = false;
        for listener in &mut self.listeners {
            match listener {
                ListeningSocket::Uapi(listener) => uapi = listener.leave_file(),
                ListeningSocket::Json(listener) => {
                    listener.leave_file();
                }
                ListeningSocket::Metrics(_) => {}
            }
        }
        self.lock.leave_file();
        uapi
    }

    /// Accepts all clients that wait at a socket.
    fn accept(&mut self, listener: usize, epoll: &Epoll) {
        while let Some(listener) = self.listeners.get(listener) {
            let accepted = match listener {
                ListeningSocket::Uapi(listener) | ListeningSocket::Json(listener) => {
                    listener.socket.accept().and_then(|(stream, _)| {
                        stream.set_nonblocking(true)?;
                        Ok(Stream::Unix(stream))
                    })
                }
                ListeningSocket::Metrics(listener) => listener.accept().and_then(|(stream, _)| {
                    stream.set_nonblocking(true)?;
                    Ok(Stream::Tcp(stream))
                }),
            };
            let dialogue: Box<dyn Dialogue> = match listener {
                ListeningSocket::Uapi(_) => Box::<uapi::Dialogue>::default(),
                ListeningSocket::Json(_) => Box::<json::Dialogue>::default(),
                ListeningSocket::Metrics(_) => Box::<metrics::Dialogue>::default(),
            };
            match accepted {
                Ok(stream) => self.admit(Client::new(stream, dialogue, now().mono), epoll),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The client has closed the connection again.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => return self.pause(epoll),
            }
        }
    }

    fn admit(&mut self, client: Client, epoll: &Epoll) {
        let local = |client: &Client| matches!(client.stream, Stream::Unix(_));
        let same_kind = |other: &&Client| local(other) == local(&client);
        let most = if local(&client) {
            MAX_LOCAL
        } else {
            MAX_METRICS
        };
        // Above the limit, the new client is closed at once.
        if self.clients.values().filter(same_kind).count() < most
            && epoll
                .add(&client.stream, self.next_token, client.interest)
                .is_ok()
        {
            self.clients.insert(self.next_token, client);
            self.next_token += 1;
        }
    }

    /// Stops listening: without descriptors, waiting clients would wake the loop again and again.
    fn pause(&mut self, epoll: &Epoll) {
        for listener in &self.listeners {
            let _ = epoll.delete(listener);
        }
        self.paused_until = Some(now().mono + ACCEPT_PAUSE);
    }

    fn watch_listeners(&self, epoll: &Epoll) -> io::Result<()> {
        for (token, listener) in (TOKEN_LISTENERS..).zip(&self.listeners) {
            epoll.add(listener, token, Interest::Read)?;
        }
        Ok(())
    }

    /// Closes slow clients, and listens again after the pause.
    fn expire(&mut self, epoll: &Epoll) {
        let now = now().mono;
        self.clients.retain(|_, client| client.deadline > now);
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = self
                .watch_listeners(epoll)
                .err()
                .map(|_| now + ACCEPT_PAUSE);
        }
    }

    /// Sets the timer to the next deadline.
    fn arm(&self) {
        let deadlines = self.clients.values().map(|client| client.deadline);
        let waits = self.clients.values().any(Client::waits);
        let look = waits.then(|| now().mono + LOOK_EVERY);
        let next = deadlines.chain(self.paused_until).chain(look).min();
        // If the timer cannot be set, a client is only closed later.
        let _ = match next {
            Some(next) => self.timer.set(next.duration_since(now().mono)),
            None => self.timer.stop(),
        };
    }

    fn serve(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        let Some(client) = self.clients.get_mut(&token) else {
            return ControlFlow::Continue;
        };
        let mut subject = Subject {
            node,
            record: &mut self.record,
            flow: ControlFlow::Continue,
        };
        let before = client.interest;
        let fate = client.run_once(&mut subject);
        let flow = subject.flow;
        let stays = fate == Fate::Stays
            && (client.interest == before
                || epoll.modify(&client.stream, token, client.interest).is_ok());
        if !stays {
            self.clients.remove(&token);
        }
        flow
    }
}

impl Service for Control {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        self.record.netlink = Netlink::open().ok();
        epoll.add(&self.timer, TOKEN_TIMER, Interest::Read)?;
        self.watch_listeners(epoll)
    }

    fn ready(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        let mut flow = ControlFlow::Continue;
        match token {
            TOKEN_TIMER => {
                self.expire(epoll);
                let waiting = self.clients.iter().filter(|(_, client)| client.waits());
                for token in waiting.map(|(token, _)| *token).collect::<Vec<_>>() {
                    // A client that waits for a reply cannot change the sockets.
                    self.serve(token, epoll, node);
                }
            }
            TOKEN_LISTENERS..TOKEN_CLIENTS => {
                self.accept((token - TOKEN_LISTENERS) as usize, epoll)
            }
            client => flow = self.serve(client, epoll, node),
        }
        self.arm();
        flow
    }
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListeningSocket::Uapi(listener) | ListeningSocket::Json(listener) => {
                listener.socket.as_fd()
            }
            ListeningSocket::Metrics(listener) => listener.as_fd(),
        }
    }
}

//! Connections to relays over TLS, for a host that gets no answer over UDP: one for each relay in use, in a
//! thread of its own ([`stream`]), while a proxy socket of it is requested.

use super::stream::{self, Connection, Ended};
use crate::mesh::agent::{Gone, LegTo, News, Worker};
use crate::mesh::client;
use crate::mesh::endpoints::{is_own, is_routable};
use crate::mesh::forward::{Ends, Event, Handle, Heard, Over};
use crate::mesh::resolve::{one_of_each, resolve};
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use ipnet::IpNet;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection};
use seikan_proto::mesh::{Pin, Relay, RelayTls};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Timeout of a proxy socket, including name resolution and connection.
const LEG_WITHIN: Duration = Duration::from_secs(5);
/// Head start of the first of two addresses (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);
/// Timeout of a TCP connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(4);
/// Time after the last request for which a proxy socket is kept; those in use are requested every 20 s.
const KEPT: Duration = Duration::from_secs(60);
/// Interval at which expired ones are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// All connections.
pub(in crate::mesh) struct Streams<'a> {
    worker: &'a Worker,
    /// The mesh's networks, whose addresses are reached through the tunnel and cannot carry it.
    inside: &'a [IpNet],
    /// The tunnel's port.
    port: Arc<AtomicU16>,
    tls: RefCell<BTreeMap<Option<Pin>, Arc<ClientConfig>>>,
    held: RefCell<BTreeMap<String, Rc<Held>>>,
    /// New connections that have no task yet.
    fresh: RefCell<Vec<Rc<Held>>>,
    begun: Notify,
}

/// A connection, or an attempt.
struct Held {
    name: String,
    host: String,
    tls: RelayTls,
    handle: RefCell<Option<Handle<BTreeSet<u16>>>>,
    /// Ports that need a proxy socket, with the time of the last request.
    wanted: RefCell<BTreeMap<u16, Instant>>,
    legs: RefCell<BTreeMap<u16, SocketAddr>>,
    ended: RefCell<Option<String>>,
    dropped: Cell<bool>,
    changed: Notify,
}

impl Held {
    fn is_for(&self, tls: RelayTls) -> bool {
        self.tls == tls && self.ended.borrow().is_none() && !self.dropped.get()
    }

    fn has(&self, leg: SocketAddr) -> bool {
        self.legs.borrow().values().any(|local| *local == leg)
    }

    fn want(&self, port: u16) {
        self.wanted.borrow_mut().insert(port, Instant::now());
        self.apply();
    }

    fn apply(&self) {
        if let Some(handle) = &*self.handle.borrow() {
            handle.set(self.wanted.borrow().keys().copied().collect());
        }
    }

    fn end(&self, reason: String) {
        self.ended.borrow_mut().get_or_insert(reason);
        self.changed.notify_waiters();
    }
}

impl<'a> Streams<'a> {
    pub(in crate::mesh) fn new(
        worker: &'a Worker,
        inside: &'a [IpNet],
        port: Arc<AtomicU16>,
    ) -> Streams<'a> {
        Streams {
            worker,
            inside,
            port,
            tls: RefCell::default(),
            held: RefCell::default(),
            fresh: RefCell::default(),
            begun: Notify::new(),
        }
    }

    /// Returns the proxy socket for a port of a relay over TLS, 0 being its main port; or why there is none, as
    /// a text for the user.
    pub(super) async fn leg(
        &self,
        relay: &Relay,
        tls: RelayTls,
        port: u16,
    ) -> Result<SocketAddr, String> {
        let held = self.hold(relay, tls);
        held.want(port);
        let there = async {
            loop {
                // Registered before the state is read, so that no change is missed.
                let changed = held.changed.notified();
                if let Some(local) = held.legs.borrow().get(&port) {
                    return Ok(*local);
                }
                if let Some(reason) = &*held.ended.borrow() {
                    return Err(reason.clone());
                }
                changed.await;
            }
        };
        match tokio::time::timeout(LEG_WITHIN, there).await {
            Ok(there) => there,
            Err(_) => Err("no connection".to_owned()),
        }
    }

    /// Marks the connection of this proxy socket as failed, since the relay does not answer over it; the next
    /// request creates another one. Returns the reason, as a text for the user.
    pub(super) fn give_up(&self, relay: &Relay, leg: SocketAddr) -> String {
        let name = relay.address.to_string();
        let mut all = self.held.borrow_mut();
        // Another connection may have replaced it. One that has ended has no proxy sockets, and knows its
        // reason.
        let over = |held: &Rc<Held>| held.has(leg) || held.ended.borrow().is_some();
        if !all.get(&name).is_some_and(over) {
            return "no answer".to_owned();
        }
        let Some(held) = all.remove(&name) else {
            return "no answer".to_owned();
        };
        held.dropped.set(true);
        held.changed.notify_waiters();
        let why = held.ended.borrow().clone();
        why.unwrap_or_else(|| "no answer".to_owned())
    }

    /// Whether datagrams to this proxy socket are forwarded.
    pub(super) fn has(&self, leg: SocketAddr) -> bool {
        self.held.borrow().values().any(|held| held.has(leg))
    }

    fn hold(&self, relay: &Relay, tls: RelayTls) -> Rc<Held> {
        let name = relay.address.to_string();
        let mut all = self.held.borrow_mut();
        match all.get(&name) {
            Some(held) if held.is_for(tls) => return Rc::clone(held),
            Some(other) => {
                other.dropped.set(true);
                other.changed.notify_waiters();
            }
            None => {}
        }
        let held = Rc::new(Held {
            name: name.clone(),
            host: relay.address.host().to_owned(),
            tls,
            handle: RefCell::default(),
            wanted: RefCell::default(),
            legs: RefCell::default(),
            ended: RefCell::default(),
            dropped: Cell::new(false),
            changed: Notify::new(),
        });
        all.insert(name, Rc::clone(&held));
        self.fresh.borrow_mut().push(Rc::clone(&held));
        self.begun.notify_one();
        held
    }

    /// Serves all required connections; ends when the worker has ended.
    pub(in crate::mesh) async fn keep(&self) -> Result<(), Gone> {
        let mut tasks = FuturesUnordered::new();
        loop {
            for held in self.fresh.take() {
                tasks.push(self.live(held));
            }
            tokio::select! {
                Some(ended) = tasks.next() => ended?,
                () = self.begun.notified() => {}
            }
        }
    }

    /// Runs one connection from its beginning to its end.
    async fn live(&self, held: Rc<Held>) -> Result<(), Gone> {
        match self.start(&held).await {
            Ok((handle, heard)) => {
                held.handle.replace(Some(handle));
                held.apply();
                let ended = self.listen(&held, heard).await?;
                held.end(ended.to_string());
            }
            Err(reason) => held.end(reason),
        }
        held.handle.replace(None);
        for local in held.legs.take().into_values() {
            self.worker.tell(News::Leg { local, to: None })?;
        }
        // If another connection has replaced it, that one reports the state.
        let held_now = self.held.borrow().get(&held.name).cloned();
        if held_now.is_none_or(|now| Rc::ptr_eq(&now, &held)) {
            self.worker.tell(News::StreamEnded(held.name.clone()))?;
        }
        Ok(())
    }

    /// Connects, and starts a thread on the connection.
    async fn start(&self, held: &Held) -> Result<Ends<Connection>, String> {
        let text = |error: io::Error| error.to_string();
        let config = self.config(held.tls.pin)?;
        let name = ServerName::try_from(held.host.clone());
        let name = name.map_err(|_| format!("{} is neither a name nor an address", held.host))?;
        let tls = ClientConnection::new(config, name).map_err(|error| error.to_string())?;
        let found = self.resolve(held).await?;
        let connected = tokio::time::timeout(CONNECT_WITHIN, connect(&found)).await;
        let socket = connected.map_err(|_| "no answer".to_owned())?;
        let socket = socket.map_err(text)?;
        let socket = socket.into_std().map_err(text)?;
        stream::start(socket, tls, self.port.clone()).map_err(text)
    }

    /// Returns a relay's addresses for TLS, one of each family, IPv6 first.
    async fn resolve(&self, held: &Held) -> Result<Vec<SocketAddr>, String> {
        let mut found = resolve(&held.host, held.tls.port.get()).await?;
        // A relay on this host would answer over UDP, and the source of relays' names must not direct
        // connections to other programs here.
        found.retain(|at| {
            let ip = at.ip().to_canonical();
            is_routable(ip) && !is_own(ip) && !self.inside.iter().any(|net| net.contains(&ip))
        });
        match found.is_empty() {
            true => Err("its name resolves to no usable address".to_owned()),
            false => Ok(one_of_each(&found)),
        }
    }

    fn config(&self, pin: Option<Pin>) -> Result<Arc<ClientConfig>, String> {
        let mut known = self.tls.borrow_mut();
        if let Some(config) = known.get(&pin) {
            return Ok(Arc::clone(config));
        }
        // Pins of former relays are no longer needed.
        known.clear();
        let config = client::tls(pin, &[&TLS13]).map_err(|error| error.to_string())?;
        let config = Arc::new(config);
        known.insert(pin, Arc::clone(&config));
        Ok(config)
    }

    /// Handles the events of a thread until it ends or is no longer needed.
    async fn listen(&self, held: &Held, mut heard: Heard<Connection>) -> Result<Ended, Gone> {
        let name = || held.name.clone();
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            if held.dropped.get() {
                return Ok(Over::Unwanted.into());
            }
            let event = tokio::select! {
                event = heard.recv() => event,
                () = held.changed.notified() => continue,
                _ = look.tick() => {
                    let over = |asked: &Instant| asked.elapsed() >= KEPT;
                    held.wanted.borrow_mut().retain(|_, asked| !over(asked));
                    if held.wanted.borrow().is_empty() {
                        return Ok(Over::Unwanted.into());
                    }
                    held.apply();
                    continue;
                }
            };
            match event {
                Some(Event::Leg { peer: to, local }) => {
                    held.legs.borrow_mut().insert(to.port(), local);
                    let to = Some(LegTo::Relay { relay: name(), to });
                    self.worker.tell(News::Leg { local, to })?;
                    held.changed.notify_waiters();
                }
                Some(Event::LegClosed { peer, local }) => {
                    held.legs.borrow_mut().remove(&peer.port());
                    self.worker.tell(News::Leg { local, to: None })?;
                }
                Some(Event::Serves(())) => self.worker.tell(News::Stream(name()))?,
                Some(Event::Counted(counters)) => {
                    let address = name();
                    self.worker.tell(News::Streamed { address, counters })?;
                }
                Some(Event::Ended(ended)) => return Ok(ended),
                // The thread reports the reason, unless it panicked.
                None => return Ok(Ended::NoAnswer),
            }
        }
    }
}

/// Connects to the first of at most two addresses that accepts, the second with a delay.
async fn connect(found: &[SocketAddr]) -> io::Result<TcpStream> {
    let (Some(first), second) = (found.first(), found.get(1)) else {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    };
    let first = TcpStream::connect(first);
    let Some(second) = second else {
        return first.await;
    };
    let second = async {
        tokio::time::sleep(HEAD_START).await;
        TcpStream::connect(second).await
    };
    match select(pin!(first), pin!(second)).await {
        Either::Left((Err(_), second)) => second.await,
        Either::Right((Err(_), first)) => first.await,
        Either::Left((Ok(socket), _)) | Either::Right((Ok(socket), _)) => Ok(socket),
    }
}

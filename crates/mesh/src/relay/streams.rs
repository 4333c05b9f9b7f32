//! Connections to relays over TLS, for a host that gets no answer over UDP: one for each relay in use, in the worker's
//! loop ([`stream`]), while a port of it is requested.

use crate::client;
use crate::endpoints::{is_own, is_routable};
use crate::event::{AgentEvent, Gone};
use crate::resolve::{one_of_each, resolve};
use crate::shared::Shared;
use crate::transport::{Handle, Opened, State, Wanted, stream};
use crate::web_proxy::{self, WebProxies};
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection};
use seikan_proto::mesh::framing::{Framing, MAIN_PORT};
use seikan_proto::mesh::{Pin, Relay, RelayTls};
use seikan_tls::Stream;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

/// Timeout of a connection, including name resolution; a web proxy has its own in addition.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// Head start of the first of two addresses (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);
/// Timeout of a TCP connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(4);
/// Time after the last request for which a port is kept; those in use are requested every 20 s.
const KEPT: Duration = Duration::from_secs(60);
/// Interval at which expired ones are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// All connections.
pub(crate) struct Streams<'a> {
    shared: &'a Shared,
    web_proxies: &'a WebProxies,
    tls: RefCell<BTreeMap<Option<Pin>, Arc<ClientConfig>>>,
    connections: RefCell<BTreeMap<String, Rc<RelayConnection>>>,
    /// New connections that have no task yet.
    fresh: RefCell<Vec<Rc<RelayConnection>>>,
    added: Notify,
}

/// A connection, or an attempt.
struct RelayConnection {
    name: String,
    host: String,
    tls: RelayTls,
    handle: RefCell<Option<Handle>>,
    /// The relay's IP address, unspecified if only a web proxy knows it.
    relay: Cell<IpAddr>,
    /// Required ports, with the time of the last request.
    wanted: RefCell<BTreeMap<u16, Instant>>,
    /// The tunnel's addresses for them.
    proxies: RefCell<BTreeMap<u16, SocketAddr>>,
    ended: RefCell<Option<String>>,
    dropped: Cell<bool>,
    changed: Notify,
}

impl RelayConnection {
    fn new(name: String, host: String, tls: RelayTls) -> RelayConnection {
        RelayConnection {
            name,
            host,
            tls,
            handle: RefCell::default(),
            relay: Cell::new(Ipv4Addr::UNSPECIFIED.into()),
            wanted: RefCell::default(),
            proxies: RefCell::default(),
            ended: RefCell::default(),
            dropped: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// Returns the relay's server as https://HOST:PORT, or why it has none, as a text for the user.
    fn server(&self) -> Result<Uri, String> {
        let (host, port) = (&self.host, self.tls.port);
        let url = match host.parse() {
            Ok(IpAddr::V6(v6)) => format!("https://[{v6}]:{port}"),
            _ => format!("https://{host}:{port}"),
        };
        url.parse().map_err(|_| format!("{host} is no host"))
    }

    fn is_for(&self, tls: RelayTls) -> bool {
        self.tls == tls && self.ended.borrow().is_none() && !self.dropped.get()
    }

    fn has(&self, proxy: SocketAddr) -> bool {
        self.proxies.borrow().values().any(|local| *local == proxy)
    }

    fn want(&self, port: u16) {
        self.wanted.borrow_mut().insert(port, Instant::now());
        self.apply();
    }

    fn apply(&self) {
        if let Some(handle) = &*self.handle.borrow() {
            let wanted = self.wanted.borrow();
            // The main port has an address for as long as the connection: all ports are requested over it.
            let ports = wanted.keys().copied().chain([MAIN_PORT]);
            handle.set(Wanted {
                peers: ports
                    .map(|port| SocketAddr::new(self.relay.get(), port))
                    .collect(),
                ..Wanted::default()
            });
        }
    }

    fn end(&self, reason: String) {
        self.ended.borrow_mut().get_or_insert(reason);
        self.changed.notify_waiters();
    }
}

impl<'a> Streams<'a> {
    pub(crate) fn new(shared: &'a Shared, web_proxies: &'a WebProxies) -> Streams<'a> {
        Streams {
            shared,
            web_proxies,
            tls: RefCell::default(),
            connections: RefCell::default(),
            fresh: RefCell::default(),
            added: Notify::new(),
        }
    }

    /// Returns the tunnel's address for a port of a relay over TLS, 0 being its main port; or why there is none, as
    /// a text for the user.
    pub(super) async fn proxy(
        &self,
        relay: &Relay,
        tls: RelayTls,
        port: u16,
    ) -> Result<SocketAddr, String> {
        let connection = self.connection(relay, tls);
        connection.want(port);
        let there = async {
            loop {
                // Registered before the state is read, so that no change is missed.
                let changed = connection.changed.notified();
                if let Some(local) = connection.proxies.borrow().get(&port) {
                    return Ok(*local);
                }
                if let Some(reason) = &*connection.ended.borrow() {
                    return Err(reason.clone());
                }
                changed.await;
            }
        };
        let is_through = |server| self.web_proxies.of(&server).is_some();
        let within = if connection.server().is_ok_and(is_through) {
            CONNECTED_WITHIN + web_proxy::THROUGH_WITHIN
        } else {
            CONNECTED_WITHIN
        };
        match tokio::time::timeout(within, there).await {
            Ok(there) => there,
            Err(_) => Err("no connection".to_owned()),
        }
    }

    /// Marks the connection of this address as failed, since the relay does not answer over it; the next
    /// request creates another one. Returns the reason, as a text for the user.
    pub(super) fn give_up(&self, relay: &Relay, proxy: SocketAddr) -> String {
        let name = relay.address.to_string();
        let mut all = self.connections.borrow_mut();
        // Another connection may have replaced this one. A connection that has ended has no
        // addresses, and knows the reason.
        let over = |connection: &Rc<RelayConnection>| {
            connection.has(proxy) || connection.ended.borrow().is_some()
        };
        if !all.get(&name).is_some_and(over) {
            return "no answer".to_owned();
        }
        let Some(connection) = all.remove(&name) else {
            return "no answer".to_owned();
        };
        connection.dropped.set(true);
        connection.changed.notify_waiters();
        let why = connection.ended.borrow().clone();
        why.unwrap_or_else(|| "no answer".to_owned())
    }

    /// Whether datagrams to this address are forwarded.
    pub(super) fn has(&self, proxy: SocketAddr) -> bool {
        self.connections
            .borrow()
            .values()
            .any(|connection| connection.has(proxy))
    }

    fn connection(&self, relay: &Relay, tls: RelayTls) -> Rc<RelayConnection> {
        let name = relay.address.to_string();
        let mut all = self.connections.borrow_mut();
        match all.get(&name) {
            Some(connection) if connection.is_for(tls) => return Rc::clone(connection),
            Some(other) => {
                other.dropped.set(true);
                other.changed.notify_waiters();
            }
            None => {}
        }
        let host = relay.address.host().to_owned();
        let connection = Rc::new(RelayConnection::new(name.clone(), host, tls));
        all.insert(name, Rc::clone(&connection));
        self.fresh.borrow_mut().push(Rc::clone(&connection));
        self.added.notify_one();
        connection
    }

    /// Serves all required connections; ends when the worker has ended.
    pub(crate) async fn run(&self) -> Result<(), Gone> {
        let mut tasks = FuturesUnordered::new();
        loop {
            for connection in self.fresh.take() {
                tasks.push(self.live(connection));
            }
            tokio::select! {
                Some(ended) = tasks.next() => ended?,
                () = self.added.notified() => {}
            }
        }
    }

    /// Runs one connection from its beginning to its end.
    async fn live(&self, connection: Rc<RelayConnection>) -> Result<(), Gone> {
        match self.start(&connection).await {
            Ok(opened) => {
                self.shared.send(AgentEvent::Opened(opened.transport))?;
                connection.handle.replace(Some(opened.handle));
                connection.apply();
                let reason = self.follow(&connection, opened.state).await?;
                connection.end(reason);
            }
            Err(reason) => connection.end(reason),
        }
        connection.handle.replace(None);
        connection.proxies.take();
        Ok(())
    }

    /// Connects, and opens a transport on the connection.
    async fn start(&self, connection: &RelayConnection) -> Result<Opened, String> {
        let text = |error: io::Error| error.to_string();
        let config = self.config(connection.tls.pin)?;
        let name = ServerName::try_from(connection.host.clone());
        let name =
            name.map_err(|_| format!("{} is neither a name nor an address", connection.host))?;
        let tls = ClientConnection::new(config, name).map_err(|error| error.to_string())?;
        let (socket, relay) = self.open(connection).await?;
        connection.relay.set(relay);
        let socket = socket.into_std().map_err(text)?;
        let stream = Stream::new(socket, Some(tls.into()), Framing::Relay).map_err(text)?;
        let waker = self.shared.worker.waker.clone();
        Ok(stream::open(connection.name.clone(), stream, relay, waker))
    }

    /// Opens the TCP connection, through a web proxy if there is one for the relay. Returns the relay's address as
    /// well, which is unspecified if only the proxy knows it.
    async fn open(&self, connection: &RelayConnection) -> Result<(TcpStream, IpAddr), String> {
        let server = connection.server()?;
        if let Some(proxy) = self.web_proxies.of(&server) {
            let address: Option<IpAddr> = connection.host.parse().ok();
            if address.is_some_and(|ip| !self.is_outside(ip)) {
                return Err("its address is loopback, link-local or inside of the mesh".to_owned());
            }
            let socket = proxy.connect(HttpConnector::new(), &server).await;
            let socket = socket.map_err(|error| error.to_string())?;
            let unknown = Ipv4Addr::UNSPECIFIED.into();
            return Ok((socket.into_inner(), address.unwrap_or(unknown)));
        }
        let found = self.resolve(connection).await?;
        let connected = tokio::time::timeout(CONNECT_WITHIN, connect(&found)).await;
        let socket = connected.map_err(|_| "no answer".to_owned())?;
        let socket = socket.map_err(|error| error.to_string())?;
        let relay = socket.peer_addr().map_err(|error| error.to_string())?.ip();
        Ok((socket, relay))
    }

    /// Whether an address can be another host's outside of the mesh.
    fn is_outside(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        is_routable(ip) && !self.shared.tunnel.has_inside(&SocketAddr::new(ip, 0))
    }

    /// Returns a relay's addresses for TLS, one of each family, IPv6 first.
    async fn resolve(&self, connection: &RelayConnection) -> Result<Vec<SocketAddr>, String> {
        let mut found = resolve(&connection.host, connection.tls.port.get()).await?;
        // A relay on this host would answer over UDP, and the source of relays' names must not direct
        // connections to other programs here.
        found.retain(|at| {
            let ip = at.ip().to_canonical();
            self.is_outside(ip) && !is_own(ip)
        });
        if found.is_empty() {
            Err("its name resolves to no usable address".to_owned())
        } else {
            Ok(one_of_each(&found))
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

    /// Follows a transport until it ends or is no longer needed; returns why.
    async fn follow(
        &self,
        connection: &RelayConnection,
        mut state: watch::Receiver<State>,
    ) -> Result<String, Gone> {
        let mut look = tokio::time::interval(LOOK_EVERY);
        let unwanted = || Ok("it is not needed".to_owned());
        loop {
            if connection.dropped.get() {
                return unwanted();
            }
            tokio::select! {
                changed = state.changed() => changed.map_err(|_| Gone)?,
                () = connection.changed.notified() => continue,
                _ = look.tick() => {
                    let over = |requested_at: &Instant| requested_at.elapsed() >= KEPT;
                    connection.wanted.borrow_mut().retain(|_, requested_at| !over(requested_at));
                    if connection.wanted.borrow().is_empty() {
                        return unwanted();
                    }
                    connection.apply();
                    continue;
                }
            }
            let state = state.borrow_and_update().clone();
            if let Some(reason) = state.ended {
                return Ok(reason);
            }
            let peers = state.peers.into_iter();
            let proxies = peers.map(|(to, local)| (to.port(), local));
            connection.proxies.replace(proxies.collect());
            connection.changed.notify_waiters();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{Transports, Waker, now};
    use seikan_sys::poll::Epoll;
    use std::num::NonZeroU16;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_main_port_keeps_its_address_while_other_ports_are_requested() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let socket = std::net::TcpStream::connect(server).expect("connected");
        let stream = Stream::new(socket, None, Framing::Relay).expect("a stream");
        let (waker, _agent) = UnixStream::pair().expect("a pair");
        let relay = server.ip();
        let opened = stream::open("north".into(), stream, relay, Waker(Arc::new(waker)));
        let (mut transports, epoll) = (Transports::default(), Epoll::new(1).expect("epoll"));
        transports.add(*opened.transport, &epoll);
        let tls = RelayTls {
            port: NonZeroU16::MIN,
            pin: None,
        };
        let connection = RelayConnection::new("north".into(), "north".into(), tls);
        connection.handle.replace(Some(opened.handle));
        connection.relay.set(relay);
        let mut addresses = || {
            transports.woken();
            transports.poll(now());
            let state = opened.state.borrow();
            [MAIN_PORT, 7].map(|port| state.peers.get(&(relay, port).into()).copied())
        };
        connection.want(MAIN_PORT);
        connection.want(7);
        let [main, pair] = addresses();
        assert!(main.is_some() && pair.is_some());
        // The last request for the main port was long ago.
        connection.wanted.borrow_mut().remove(&MAIN_PORT);
        connection.apply();
        assert_eq!(addresses(), [main, pair]);
        connection.wanted.borrow_mut().clear();
        connection.apply();
        assert_eq!(addresses(), [main, None]);
    }
}

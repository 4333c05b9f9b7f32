//! Client of TURN servers (RFC 8656): while there are members without another path, it keeps an allocation at
//! one or two servers, each in the worker's loop ([`allocation`]).
//!
//! The relayed addresses are reported to the members as further relays. Members without another path get a
//! permission for each of their addresses. Their datagrams reach the tunnel from a proxied address, and the tunnel's
//! answers go back by it. If this host cannot send UDP itself, it sends from its allocation to the other's relayed
//! address.

use crate::client;
use crate::endpoints::{any_port, is_routable, may_serve};
use crate::event::{AgentEvent, Gone, RelayAnswer};
use crate::resolve::{one_of_each, resolve};
use crate::shared::{Pause, RelayEvent, Shared, Tunnel};
use crate::state::LOG;
use crate::transport::allocation::{self, At, By, MAX_PERMITTED};
use crate::transport::link::Link;
use crate::transport::{Ended, Handle, Wanted, now};
use futures_util::stream::{FuturesUnordered, StreamExt};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::framing::Framing;
use seikan_proto::mesh::{MAX_RELAYED, Relay, RelayKind, in_turn};
use seikan_sys::udp::{UdpOptions, UdpSocket};
use seikan_tls::Stream;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tracing::info;

/// Number of servers with an allocation, so that one can fail.
const SERVERS: usize = 2;
/// Time for which an allocation is kept after it was last needed.
const KEPT: Duration = Duration::from_secs(300);
/// Lifetime of an allocation after which pauses start small again.
const SETTLED: Duration = Duration::from_secs(60);
/// Timeout of a TCP connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of permissions, and of channels, of one allocation for the addresses of one member: three times as many
/// addresses as it can signal at once. An allocation keeps them, and ends at [`MAX_PERMITTED`] permissions.
const MAX_OF_A_MEMBER: usize = 64;
/// Time after which an allocation may have another address of each member: a member that moves needs new ones for weeks.
const ANOTHER_AFTER: Duration = Duration::from_secs(900);
/// Interval at which unneeded allocations are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// All allocations.
pub(super) struct TurnAllocations<'a> {
    own: PublicKey,
    shared: &'a Shared,
    tls: RefCell<Option<Arc<ClientConfig>>>,
    /// Members without another path.
    needed: RefCell<BTreeSet<PublicKey>>,
    /// Time since which no member needs the server.
    unneeded: Cell<Option<Instant>>,
    changed: Notify,
    servers: RefCell<BTreeMap<String, ServerState>>,
}

/// An allocation, or an attempt.
struct ServerState {
    handle: Handle,
    relayed: Option<SocketAddr>,
    /// The tunnel's address for each peer.
    proxies: BTreeMap<SocketAddr, SocketAddr>,
    permissions: Granted<IpAddr>,
    channels: Granted<SocketAddr>,
}

/// Addresses of each member for which an allocation has requested permissions or channels.
struct Granted<T> {
    since: Instant,
    of: BTreeMap<PublicKey, BTreeSet<T>>,
}

impl<T: Copy + Ord> Granted<T> {
    fn new(since: Instant) -> Granted<T> {
        let of = BTreeMap::new();
        Granted { since, of }
    }

    /// Returns the addresses of a member that may be requested: those that have been, and others up to
    /// [`MAX_OF_A_MEMBER`] and one for each [`ANOTHER_AFTER`].
    fn of(&mut self, key: PublicKey, addresses: &BTreeSet<T>, now: Instant) -> BTreeSet<T> {
        let age = now.duration_since(self.since);
        let more = age.as_secs() / ANOTHER_AFTER.as_secs();
        let most = MAX_OF_A_MEMBER + more as usize;
        let granted = self.of.entry(key).or_default();
        let may_have =
            |at: &T| granted.contains(at) || (granted.len() < most && granted.insert(*at));
        addresses.iter().copied().filter(may_have).collect()
    }
}

impl<'a> TurnAllocations<'a> {
    pub(super) fn new(shared: &'a Shared) -> TurnAllocations<'a> {
        TurnAllocations {
            own: shared.tunnel.own_key.get(),
            shared,
            tls: RefCell::default(),
            needed: RefCell::default(),
            unneeded: Cell::new(Some(Instant::now())),
            changed: Notify::new(),
            servers: RefCell::default(),
        }
    }

    /// Requires an allocation for a member.
    pub(super) fn need(&self, key: PublicKey) {
        self.unneeded.set(None);
        if self.needed.borrow_mut().insert(key) {
            self.changed.notify_one();
        }
    }

    /// Releases the requirement of a member.
    pub(super) fn release(&self, key: &PublicKey) {
        let mut needed = self.needed.borrow_mut();
        if needed.remove(key) && needed.is_empty() {
            self.unneeded.set(Some(Instant::now()));
        }
        self.changed.notify_one();
    }

    /// Returns a member's relayed addresses at TURN servers, and the proxied addresses that lead there.
    pub(super) fn relayed_paths(&self, key: &PublicKey) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
        let addresses = self.relayed_of(key);
        let servers = self.servers.borrow();
        let proxies = |peer: &SocketAddr| -> Vec<SocketAddr> {
            let proxies = servers
                .values()
                .filter_map(|server| server.proxies.get(peer));
            proxies.copied().collect()
        };
        let proxies = addresses.iter().flat_map(proxies).collect();
        (addresses, proxies)
    }

    fn relayed_of(&self, key: &PublicKey) -> Vec<SocketAddr> {
        let membership = self.shared.membership.borrow();
        let relayed = membership.members().get(key).map(|member| &member.relayed);
        let usable = |at: &&SocketAddr| is_routable(at.ip().to_canonical()) && at.port() != 0;
        let usable = relayed.into_iter().flatten().filter(usable);
        usable.copied().collect()
    }

    /// Keeps the required allocations; ends when the worker has ended.
    pub(super) async fn run(&self) -> Result<(), Gone> {
        let mut tasks = FuturesUnordered::new();
        let mut running = BTreeSet::new();
        loop {
            self.apply();
            for relay in self.chosen() {
                let name = relay.address.to_string();
                if running.insert(name.clone()) {
                    tasks.push(self.hold(name));
                }
            }
            tokio::select! {
                Some(ended) = tasks.next() => {
                    running.remove(&ended?);
                }
                () = self.changed.notified() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    /// Returns the servers that should have an allocation now, with this host's tickets.
    fn chosen(&self) -> Vec<Relay> {
        let over = |since: Instant| since.elapsed() >= KEPT;
        let idle = self.needed.borrow().is_empty() && self.servers.borrow().is_empty();
        if idle || self.unneeded.get().is_some_and(over) {
            return Vec::new();
        }
        let membership = self.shared.membership.borrow();
        // Any two: the other end learns which.
        let all = in_turn(membership.relays(), [&self.own; 2], RelayKind::is_turn);
        all.into_iter().take(SERVERS).cloned().collect()
    }

    /// Keeps an allocation at one server while it is chosen.
    async fn hold(&self, name: String) -> Result<String, Gone> {
        let mut pause = Pause::default();
        loop {
            let chosen = self.chosen();
            let Some(relay) = chosen.iter().find(|r| r.address.to_string() == name) else {
                return Ok(name);
            };
            let (lasted, reason) = self.allocate(relay, &name).await?;
            self.forget(&name);
            if let Some(reason) = reason {
                let (address, state) = (name.clone(), Err(reason));
                self.shared.send(AgentEvent::Relay { address, state })?;
            }
            if lasted.is_some_and(|lasted| lasted >= SETTLED) {
                pause = Pause::default();
            }
            pause.wait().await;
        }
    }

    /// Tries the transports of a server until one gives an allocation, and keeps that until it ends. Returns
    /// how long it existed and the reason for the user, unless it is no longer needed.
    async fn allocate(
        &self,
        relay: &Relay,
        name: &str,
    ) -> Result<(Option<Duration>, Option<String>), Gone> {
        let mut reason = "its name resolves to no usable address".to_owned();
        let found = resolve(relay.address.host(), relay.address.port()).await;
        let found = match found.and_then(|found| servers(found, &self.shared.tunnel)) {
            Ok(found) => found,
            Err(reason) => return Ok((None, Some(reason))),
        };
        let transports: &[By] = match relay.kind {
            RelayKind::Turns => &[By::Tls],
            _ => &[By::Udp, By::Tcp],
        };
        for by in transports {
            for server in found.iter().copied() {
                let at = At { server, by: *by };
                let (lasted, ended) = self.live(relay, at, name).await?;
                match ended {
                    None => return Ok((lasted, None)),
                    ended if lasted.is_some() => return Ok((lasted, ended)),
                    Some(ended) => reason = ended,
                }
            }
        }
        Ok((None, Some(reason)))
    }

    fn tls(&self) -> Result<Arc<ClientConfig>, String> {
        let mut known = self.tls.borrow_mut();
        if let Some(tls) = &*known {
            return Ok(tls.clone());
        }
        // coturn of Debian 12 supports TLS 1.2 only.
        let tls = client::tls(None, rustls::ALL_VERSIONS).map_err(|error| error.to_string())?;
        Ok(known.insert(Arc::new(tls)).clone())
    }

    /// Opens a link to a server.
    async fn link(&self, host: &str, at: At) -> Result<Link, Ended> {
        let At { server, by } = at;
        let unconnected = |source| Ended::Unconnected { by, source };
        let tls = match by {
            By::Udp => {
                let options = UdpOptions {
                    fwmark: self.shared.tunnel.fwmark,
                    ..UdpOptions::default()
                };
                let mut socket = UdpSocket::bind(any_port(server), &options)?;
                // Strangers cost no system call. After a change of this host's address the keepalives get no answer, and
                // another link follows; the server would not know the allocation by another address.
                socket.connect(server).map_err(unconnected)?;
                return Ok(Link::Udp { socket, server });
            }
            By::Tcp => None,
            By::Tls => {
                let config = self.tls().map_err(io::Error::other).map_err(unconnected)?;
                let name = ServerName::try_from(host.to_owned());
                let name = name.map_err(|_| Ended::Name(host.to_owned()))?;
                let connection = ClientConnection::new(config, name);
                Some(connection.map_err(|error| unconnected(io::Error::other(error)))?)
            }
        };
        let connected = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(server)).await;
        connected
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .and_then(TcpStream::into_std)
            .and_then(|socket| Stream::new(socket, tls.map(Into::into), Framing::Turn))
            .map(Link::Stream)
            .map_err(unconnected)
    }

    /// Keeps one transport. Returns how long there was an allocation, and why there is none now, unless it is no longer
    /// needed.
    async fn live(
        &self,
        relay: &Relay,
        at: At,
        name: &str,
    ) -> Result<(Option<Duration>, Option<String>), Gone> {
        let started_at = Instant::now();
        let link = match self.link(relay.address.host(), at).await {
            Ok(link) => link,
            Err(ended) => return Ok((None, Some(ended.to_string()))),
        };
        let waker = self.shared.worker.waker.clone();
        let opened = allocation::open(name.to_owned(), link, at, &relay.ticket, now(), waker);
        let mut state = opened.state;
        self.shared.send(AgentEvent::Opened(opened.transport))?;
        let server = ServerState {
            handle: opened.handle,
            relayed: None,
            proxies: BTreeMap::new(),
            permissions: Granted::new(Instant::now()),
            channels: Granted::new(Instant::now()),
        };
        self.servers.borrow_mut().insert(name.to_owned(), server);
        self.apply();
        let mut there: Option<Instant> = None;
        let lasted = |there: Option<Instant>| there.map(|since| since.elapsed());
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                changed = state.changed() => changed.map_err(|_| Gone)?,
                _ = look.tick() => {
                    if !self.chosen().iter().any(|r| r.address.to_string() == name) {
                        return Ok((lasted(there), None));
                    }
                    continue;
                }
            }
            let now = state.borrow_and_update().clone();
            if let Some(relayed) = now.serves.filter(|_| there.is_none()) {
                there = Some(Instant::now());
                let transport = at.by.name();
                info!(
                    target: LOG, address = ?name, %relayed, transport, "TURN server allocated an address"
                );
                self.with(name, |server| server.relayed = Some(relayed));
                self.publish();
                let state = Ok(RelayAnswer {
                    rtt: started_at.elapsed(),
                    by_tls: false,
                });
                let address = name.to_owned();
                self.shared.send(AgentEvent::Relay { address, state })?;
            }
            let before = self.with(name, |server| {
                std::mem::replace(&mut server.proxies, now.peers.clone())
            });
            let before = before.unwrap_or_default();
            for (peer, local) in &now.peers {
                if before.get(peer) != Some(local) {
                    self.nudge(*peer);
                }
            }
            if let Some(ended) = now.ended {
                return Ok((lasted(there), Some(ended)));
            }
        }
    }

    fn with<T>(&self, name: &str, change: impl FnOnce(&mut ServerState) -> T) -> Option<T> {
        self.servers.borrow_mut().get_mut(name).map(change)
    }

    /// Handles the end of an allocation: its relayed address is withdrawn.
    fn forget(&self, name: &str) {
        let server = self.servers.borrow_mut().remove(name);
        if server.is_some_and(|server| server.relayed.is_some()) {
            info!(target: LOG, address = ?name, "allocation at the TURN server ended");
        }
        self.publish();
    }

    /// Has the relayed addresses reported to the coordinator.
    fn publish(&self) {
        let servers = self.servers.borrow();
        let mut relayed: Vec<_> = servers
            .values()
            .filter_map(|server| server.relayed)
            .collect();
        relayed.truncate(MAX_RELAYED);
        if self.shared.relayed.replace(relayed.clone()) != relayed {
            self.shared.endpoints_changed.notify_one();
        }
    }

    /// Tells the task of relays that a new proxied address leads to a member.
    fn nudge(&self, peer: SocketAddr) {
        for key in self.needed.borrow().iter() {
            if self.relayed_of(key).contains(&peer) {
                self.shared.notify_relays(RelayEvent::Moved(*key));
            }
        }
    }

    /// Sets the permissions of all allocations to the addresses of members that need them.
    fn apply(&self) {
        let mut members = Vec::new();
        for key in self.needed.borrow().iter() {
            let relayed = self.relayed_of(key);
            let membership = self.shared.membership.borrow();
            let endpoints = membership
                .members()
                .get(key)
                .map(|member| &member.endpoints);
            let all = endpoints.into_iter().flatten().chain(&relayed);
            let all = all.map(|at| at.ip().to_canonical());
            let ips: BTreeSet<IpAddr> = all.filter(|ip| is_routable(*ip)).collect();
            members.push((*key, ips, BTreeSet::from_iter(relayed)));
        }
        let now = Instant::now();
        for server in self.servers.borrow_mut().values_mut() {
            let mut wanted = Wanted::default();
            for (key, ips, relayed) in &members {
                wanted
                    .permitted
                    .extend(server.permissions.of(*key, ips, now));
                wanted.peers.extend(server.channels.of(*key, relayed, now));
            }
            while wanted.permitted.len() > MAX_PERMITTED {
                wanted.permitted.pop_last();
            }
            server.handle.set(wanted);
        }
    }
}

/// Returns usable addresses of a server, one of each family, IPv6 first.
fn servers(mut found: Vec<SocketAddr>, tunnel: &Tunnel) -> Result<Vec<SocketAddr>, String> {
    if found.iter().any(|at| tunnel.has_inside(at)) {
        return Err("its address is inside the mesh, which it has to carry".to_owned());
    }
    let own = tunnel.current_port();
    found.retain(|at| may_serve(*at, own));
    Ok(one_of_each(&found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::OwnKey;

    #[test]
    fn a_member_that_signals_ever_new_addresses_gets_few_permissions() {
        let [hostile, other] = [1, 2].map(|n| PublicKey::from_bytes([n; 32]));
        let addresses = |first: u8| -> BTreeSet<IpAddr> {
            let all = first..first + 16;
            all.map(|host| IpAddr::from([192, 0, 2, host])).collect()
        };
        let now = Instant::now();
        let mut granted = Granted::new(now);
        let mut all = BTreeSet::new();
        for first in 0..240 {
            all.extend(granted.of(hostile, &addresses(first), now));
        }
        assert_eq!(all.len(), MAX_OF_A_MEMBER);
        // Those that have a permission keep it, and other members have their own share.
        assert_eq!(granted.of(hostile, &addresses(0), now), addresses(0));
        assert_eq!(granted.of(hostile, &addresses(200), now), BTreeSet::new());
        assert_eq!(granted.of(other, &addresses(200), now), addresses(200));
        // It moves on for weeks.
        let later = now + 3 * ANOTHER_AFTER;
        assert_eq!(granted.of(hostile, &addresses(200), later).len(), 3);
    }

    #[test]
    fn a_turn_server_may_be_where_a_relay_may_be() {
        let at = |text: &str| -> SocketAddr { text.parse().expect(text) };
        let tunnel = Tunnel {
            networks: vec!["100.80.0.0/12".parse().expect("a network")],
            port: Arc::new(51_820.into()),
            fwmark: None,
            own_key: OwnKey::new(PublicKey::from_bytes([1; 32])),
        };
        let found = [
            "127.0.0.1:443",
            "10.0.0.1:443",
            "[::1]:443",
            "[fe80::1]:443",
        ]
        .map(at);
        assert_eq!(servers(found.to_vec(), &tunnel), Ok(vec![found[1]]));
        let found = ["10.0.0.1:3478", "127.0.0.1:3478", "[::1]:3478"].map(at);
        let one = Ok(vec![found[2], found[0]]);
        assert_eq!(servers(found.to_vec(), &tunnel), one);
        let inside = at("[::ffff:100.80.0.9]:3478");
        assert!(servers(vec![found[0], inside], &tunnel).is_err());
    }
}

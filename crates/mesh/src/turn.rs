//! Client of TURN servers (RFC 8656): while there are members without another path, it keeps an allocation at
//! one or two servers, each in a thread of its own ([`allocation`]).
//!
//! The relayed addresses are reported to the members as further relays. Members without another path get a
//! permission for each of their addresses. Their datagrams reach the tunnel from a proxy socket on a loopback
//! address, and the tunnel's answers go back by it. If this host cannot send UDP itself, it sends from its
//! allocation to the other's relayed address.

mod allocation;
mod ended;
mod link;

use crate::client;
use crate::endpoints::{is_routable, may_serve};
use crate::event::{self, AgentEvent, Gone, ProxyTarget, RelayAnswer};
use crate::forward::{Event, Handle, Over};
use crate::proxy::Counters;
use crate::resolve::{one_of_each, resolve};
use crate::shared::{Pause, RelayEvent, Shared, Tunnel};
use allocation::{MAX_PERMITTED, Wanted};
use ended::Ended;
use futures_util::stream::{FuturesUnordered, StreamExt};
use link::{Target, Transport};
use rustls::ClientConfig;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{MAX_RELAYED, Relay, RelayKind, in_turn};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Number of servers with an allocation, so that one can fail.
const SERVERS: usize = 2;
/// Time for which an allocation is kept after it was last needed.
const KEPT: Duration = Duration::from_secs(300);
/// Lifetime of an allocation after which pauses start small again.
const SETTLED: Duration = Duration::from_secs(60);
/// Interval at which unneeded allocations are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// All allocations.
pub(super) struct TurnAllocations<'a> {
    own: PublicKey,
    shared: &'a Shared,
    tls: RefCell<Option<Arc<ClientConfig>>>,
    /// Members without another path.
    needed: RefCell<BTreeSet<PublicKey>>,
    /// Since when there has been no such member.
    unneeded: Cell<Option<Instant>>,
    changed: Notify,
    servers: RefCell<BTreeMap<String, ServerState>>,
}

/// An allocation, or an attempt.
struct ServerState {
    handle: Handle<Wanted>,
    relayed: Option<SocketAddr>,
    /// Proxy socket of each peer.
    proxies: BTreeMap<SocketAddr, SocketAddr>,
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

    /// Returns a member's relayed addresses at TURN servers, and the proxy sockets that lead there.
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
            self.forget(&name)?;
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
        let transports: &[Transport] = match relay.kind {
            RelayKind::Turns => &[Transport::Tls],
            _ => &[Transport::Udp, Transport::Tcp],
        };
        for transport in transports {
            for server in &found {
                let tls = match self.tls() {
                    Ok(tls) => tls,
                    Err(error) => return Ok((None, Some(error))),
                };
                let target = Target {
                    server: *server,
                    transport: *transport,
                    host: relay.address.host().to_owned(),
                    tls,
                    ticket: relay.ticket.clone(),
                    fwmark: self.shared.tunnel.fwmark,
                };
                let (lasted, ended) = self.live(target, name).await?;
                match ended {
                    Ended::Over(Over::Unwanted) => return Ok((lasted, None)),
                    ended if lasted.is_some() => return Ok((lasted, Some(ended.to_string()))),
                    ended => reason = ended.to_string(),
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

    /// Runs one thread. Returns how long there was an allocation, and why there is none now.
    async fn live(&self, target: Target, name: &str) -> Result<(Option<Duration>, Ended), Gone> {
        let started_at = Instant::now();
        let transport = target.transport;
        let (handle, mut events) = match allocation::start(target, self.shared.tunnel.port.clone())
        {
            Ok(started) => started,
            Err(error) => return Ok((None, Over::System(error).into())),
        };
        let server = ServerState {
            handle,
            relayed: None,
            proxies: BTreeMap::new(),
        };
        self.servers.borrow_mut().insert(name.to_owned(), server);
        self.apply();
        let mut there: Option<Instant> = None;
        let lasted = |there: Option<Instant>| there.map(|since| since.elapsed());
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                _ = look.tick() => {
                    if !self.chosen().iter().any(|r| r.address.to_string() == name) {
                        return Ok((lasted(there), Over::Unwanted.into()));
                    }
                    continue;
                }
            };
            match event {
                Some(Event::Serves(relayed)) => {
                    there = Some(Instant::now());
                    self.with(name, |server| server.relayed = Some(relayed));
                    self.publish();
                    let state = Ok(RelayAnswer {
                        rtt: started_at.elapsed(),
                        by_tls: false,
                    });
                    let address = name.to_owned();
                    self.shared.send(AgentEvent::Relay { address, state })?;
                    self.send_state(name, transport, Box::default())?;
                }
                Some(Event::ProxyOpened { peer, local }) => {
                    self.with(name, |server| server.proxies.insert(peer, local));
                    let server = name.to_owned();
                    let to = Some(ProxyTarget::Turn { server, to: peer });
                    self.shared.send(AgentEvent::Proxy { local, to })?;
                    self.nudge(peer);
                }
                Some(Event::ProxyClosed { peer, local }) => {
                    self.with(name, |server| server.proxies.remove(&peer));
                    self.shared.send(AgentEvent::Proxy { local, to: None })?;
                }
                Some(Event::Counted(counters)) => self.send_state(name, transport, counters)?,
                Some(Event::Ended(ended)) => return Ok((lasted(there), ended)),
                // The thread reports the reason, unless it panicked.
                None => return Ok((lasted(there), Ended::Failed)),
            }
        }
    }

    fn with<T>(&self, name: &str, change: impl FnOnce(&mut ServerState) -> T) {
        if let Some(server) = self.servers.borrow_mut().get_mut(name) {
            change(server);
        }
    }

    /// Handles the end of an allocation: its relayed address and proxy sockets are withdrawn.
    fn forget(&self, name: &str) -> Result<(), Gone> {
        let server = self.servers.borrow_mut().remove(name);
        for local in server.iter().flat_map(|server| server.proxies.values()) {
            let (local, to) = (*local, None);
            self.shared.send(AgentEvent::Proxy { local, to })?;
        }
        let address = name.to_owned();
        self.shared.send(AgentEvent::Turn {
            address,
            allocation: None,
        })?;
        self.publish();
        Ok(())
    }

    /// Reports an allocation and its counters to the worker.
    fn send_state(
        &self,
        name: &str,
        transport: Transport,
        counters: Box<Counters>,
    ) -> Result<(), Gone> {
        let servers = self.servers.borrow();
        let relayed = servers.get(name).and_then(|server| server.relayed);
        let allocation = relayed.map(|relayed| {
            Box::new(event::Allocation {
                relayed,
                transport: transport.name(),
                counters: *counters,
            })
        });
        self.shared.send(AgentEvent::Turn {
            address: name.to_owned(),
            allocation,
        })
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

    /// Tells the task of relays that a new proxy socket leads to a member.
    fn nudge(&self, peer: SocketAddr) {
        for key in self.needed.borrow().iter() {
            if self.relayed_of(key).contains(&peer) {
                self.shared.notify_relays(RelayEvent::Moved(*key));
            }
        }
    }

    /// Sets the permissions of all allocations to the addresses of members that need them.
    fn apply(&self) {
        let mut wanted = Wanted::default();
        for key in self.needed.borrow().iter() {
            let relayed = self.relayed_of(key);
            let membership = self.shared.membership.borrow();
            let endpoints = membership
                .members()
                .get(key)
                .map(|member| &member.endpoints);
            let all = endpoints.into_iter().flatten().chain(&relayed);
            let all = all.map(|at| at.ip().to_canonical());
            wanted.permitted.extend(all.filter(|ip| is_routable(*ip)));
            wanted.proxies.extend(relayed);
        }
        while wanted.permitted.len() > MAX_PERMITTED {
            wanted.permitted.pop_last();
        }
        for server in self.servers.borrow().values() {
            server.handle.set(wanted.clone());
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

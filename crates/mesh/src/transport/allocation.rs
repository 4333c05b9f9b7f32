//! Keeps one allocation at a TURN server (RFC 8656), and forwards between it and the tunnel. The protocol is implemented
//! by a sans-I/O library.

mod datagrams;

use super::ended::Ended;
use super::link::Link;
use super::proxied::Run;
use super::{Core, LOOK_EVERY, Message, Opened, Server, Transport, Waker, Wanted};
use crate::endpoints::{any_port, is_routable};
use crate::stun::BindingRequest;
use seikan_proto::mesh::Ticket;
use seikan_proto::time::Instant;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::slice::Chunks;
use std::time::Duration;
use turn_client_proto::api::{BindChannelError, TurnConfig, TurnEvent, TurnPollRet};
use turn_client_proto::client::TurnClient;
use turn_client_proto::prelude::TurnClientApi as _;
use turn_client_proto::stun::Instant as TurnInstant;
use turn_client_proto::tcp::TurnClientTcp;
use turn_client_proto::types::{AddressFamily, TransportType, TurnCredentials};
use turn_client_proto::udp::TurnClientUdp;

/// Maximum number of peers of one allocation. An allocation has at most 16,384 channels (RFC 8656,
/// section 12).
const MAX_PEERS: usize = 128;
/// Maximum number of peers with one IP address that the tunnel has not answered yet, so that one
/// host cannot use up [`MAX_PEERS`].
const MAX_UNANSWERED: usize = 16;
/// Maximum number of permissions of one allocation. The library keeps each as long as the allocation.
pub(crate) const MAX_PERMITTED: usize = 1024;
/// Timeout of the allocation, including the TLS handshake, from the established connection.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(4);
/// Interval of keepalives while the server is silent: shorter than any NAT's timeout.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(20);
/// Interval of repeated keepalives without an answer, and number of unanswered keepalives after
/// which the server counts as silent.
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(1);
const MAX_QUESTIONS: u32 = 6;

/// Transport protocol to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Udp,
    Tcp,
    Tls,
}

impl By {
    pub(crate) fn name(self) -> &'static str {
        match self {
            By::Udp => "UDP",
            By::Tcp => "TCP",
            By::Tls => "TLS",
        }
    }
}

/// A server, and the transport protocol to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    pub server: SocketAddr,
    pub by: By,
}

/// An allocation, or an attempt at one.
#[derive(Debug)]
struct Allocation {
    at: At,
    /// Local address that is passed to the library, which only compares it.
    own: SocketAddr,
    client: TurnClient,
    wanted: Wanted,
    /// Peers with a permission, or a pending request for one.
    permitted: BTreeSet<IpAddr>,
    relayed: Option<SocketAddr>,
    /// Error code of the server's last error response.
    code: u16,
    started_at: Instant,
    last_received: Instant,
    unanswered_keepalives: u32,
    next_keepalive: Instant,
    /// Time of the next check, which closes idle peers and requests refused permissions again.
    next_look: Instant,
    /// Messages to the server.
    outward: Run,
}

/// Opens a transport that allocates at a server; `name` is its address as configured.
pub(crate) fn open(
    name: String,
    link: Link,
    at: At,
    ticket: &Ticket,
    now: Instant,
    waker: Waker,
) -> Opened {
    let server = Allocation::new(at, ticket, now);
    Transport::open(name, link, Box::new(server), waker)
}

impl Allocation {
    fn new(at: At, ticket: &Ticket, now: Instant) -> Allocation {
        let At { server, by } = at;
        let family = match server {
            SocketAddr::V4(_) => AddressFamily::IPV4,
            SocketAddr::V6(_) => AddressFamily::IPV6,
        };
        let own = any_port(server);
        let credentials = TurnCredentials::new(&ticket.username, ticket.password.reveal());
        let mut config = TurnConfig::new(credentials);
        config.set_address_family(family);
        let client = match by {
            By::Udp => TurnClientUdp::allocate(own, server, config).into(),
            By::Tcp | By::Tls => TurnClientTcp::allocate(own, server, config).into(),
        };
        Allocation {
            at,
            own,
            client,
            wanted: Wanted::default(),
            permitted: BTreeSet::new(),
            relayed: None,
            code: 0,
            started_at: now,
            last_received: now,
            unanswered_keepalives: 0,
            next_keepalive: now + KEEPALIVE_EVERY,
            next_look: now + LOOK_EVERY,
            outward: Run::default(),
        }
    }
}

fn turn_time(now: Instant) -> TurnInstant {
    TurnInstant::from_nanos(now.as_nanos().try_into().unwrap_or(i64::MAX))
}

impl Server for Allocation {
    fn turn(&self) -> Option<&'static str> {
        Some(self.at.by.name())
    }

    fn poll(&mut self, core: &mut Core, now: Instant) -> Result<Instant, Ended> {
        if let Some(wanted) = core.changed()? {
            self.wanted = wanted;
            self.apply(core, now)?;
        }
        let mut wait = LOOK_EVERY;
        // The number of steps is bounded. Further ones follow at the next poll.
        for _ in 0..MAX_PEERS {
            self.transmit(core, now);
            while let Some(event) = self.client.poll_event() {
                self.note(core, event, now)?;
            }
            let now = turn_time(now);
            wait = match self.client.poll(now) {
                TurnPollRet::WaitUntil(at) => at.saturating_duration_since(now).min(LOOK_EVERY),
                TurnPollRet::Closed => return Err(self.closed()),
                // These occur only with TCP allocations, which are never requested here.
                TurnPollRet::AllocateTcpSocket { .. } | TurnPollRet::TcpClose { .. } => continue,
            };
            if !wait.is_zero() {
                break;
            }
        }
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            self.close_idle(core, now);
            self.apply(core, now)?;
        }
        let until = self.started_at + ALLOCATE_WITHIN;
        let next = match self.relayed {
            Some(_) => self.ask(core, now)?,
            None if now < until => until,
            None => return Err(self.closed()),
        };
        Ok(next.min(self.next_look).min(now + wait))
    }

    fn receive(&mut self, core: &mut Core, now: Instant, message: &mut Message<'_>) {
        self.take(core, now, message);
    }

    fn send(&mut self, core: &mut Core, now: Instant, to: SocketAddr, datagrams: Chunks<'_, u8>) {
        self.forward_out(core, now, to, datagrams);
    }

    fn lost(&self, source: io::Error) -> Ended {
        let by = self.at.by;
        match self.relayed {
            Some(_) => Ended::Lost(source),
            None => Ended::Unconnected { by, source },
        }
    }

    fn leave(&mut self, core: &mut Core, now: Instant) {
        if self.client.delete(turn_time(now)).is_ok() {
            self.transmit(core, now);
        }
    }
}

/// Protocol of the allocation.
impl Allocation {
    /// Requests missing permissions and channels.
    fn apply(&mut self, core: &mut Core, now: Instant) -> Result<(), Ended> {
        let Some(relayed) = self.relayed else {
            return Ok(());
        };
        for ip in &self.wanted.permitted {
            if ip.is_ipv4() != relayed.is_ipv4() || self.permitted.contains(ip) {
                continue;
            }
            if self.permitted.len() >= MAX_PERMITTED {
                return Err(Ended::Full);
            }
            // The library refuses only a permission that exists already.
            let _ = self
                .client
                .create_permission(TransportType::Udp, *ip, turn_time(now));
            self.permitted.insert(*ip);
        }
        for peer in self.wanted.peers.clone() {
            let other = peer.is_ipv4() == relayed.is_ipv4() && peer != relayed;
            if !other || core.peers.at(&peer).is_some() {
                continue;
            }
            let Some(local) = open_peer(core, peer, now) else {
                continue;
            };
            match self.bind(core, local, now) {
                Ok(()) => {}
                // The channel of an address that was closed still exists and can be used.
                Err(BindChannelError::AlreadyExists) => core.report(local),
                // The next check retries.
                Err(_) => core.close(local),
            }
        }
        Ok(())
    }

    /// Returns why the client is done.
    fn closed(&self) -> Ended {
        let by = self.at.by;
        match (self.relayed, self.code) {
            (None, 0) => Ended::NoAnswer(by),
            (None, code) => Ended::Refused { by, code },
            (Some(_), code) => Ended::TakenBack(code),
        }
    }

    /// Sends the client's messages to the server.
    fn transmit(&mut self, core: &mut Core, now: Instant) {
        while let Some(transmit) = self.client.poll_transmit(turn_time(now)) {
            core.link.say(&transmit.data);
        }
    }

    fn note(&mut self, core: &mut Core, event: TurnEvent, now: Instant) -> Result<(), Ended> {
        match event {
            TurnEvent::AllocationCreated(_, relayed) => {
                self.relayed = Some(relayed);
                // The error code before was the server's request for credentials.
                self.code = 0;
                core.serve(relayed);
                self.apply(core, now)?;
            }
            TurnEvent::AllocationCreateFailed(_) => return Err(self.closed()),
            TurnEvent::PermissionCreateFailed(_, ip) => {
                // Requested again at the next check.
                self.permitted.remove(&ip);
            }
            TurnEvent::ChannelCreated(_, peer) => {
                if let Some(local) = core.peers.at(&peer) {
                    core.report(local);
                }
            }
            TurnEvent::ChannelCreateFailed(_, peer) => {
                if let Some(local) = core.peers.at(&peer) {
                    core.close(local);
                }
            }
            TurnEvent::PermissionCreated(..)
            | TurnEvent::TcpConnected(_)
            | TurnEvent::TcpConnectFailed(_) => {}
        }
        Ok(())
    }

    /// Sends a keepalive if the server has been silent. It also keeps the mapping of a NAT. Returns
    /// the time of the next keepalive.
    fn ask(&mut self, core: &mut Core, now: Instant) -> Result<Instant, Ended> {
        if now < self.next_keepalive {
            return Ok(self.next_keepalive);
        }
        if now.duration_since(self.last_received) < KEEPALIVE_EVERY / 2 {
            self.unanswered_keepalives = 0;
            self.next_keepalive = now + KEEPALIVE_EVERY;
            return Ok(self.next_keepalive);
        }
        if self.unanswered_keepalives >= MAX_QUESTIONS {
            return Err(Ended::Silent);
        }
        self.unanswered_keepalives += 1;
        self.next_keepalive = now + KEEPALIVE_AGAIN;
        core.link.say(&BindingRequest::new().bytes);
        Ok(self.next_keepalive)
    }

    /// Requests a channel for a peer, unless one was requested before. Until the channel exists,
    /// datagrams to the peer have a longer header.
    fn bind(
        &mut self,
        core: &mut Core,
        local: SocketAddr,
        now: Instant,
    ) -> Result<(), BindChannelError> {
        match core.peers.get_mut(local).filter(|peer| !peer.bound) {
            Some(peer) => {
                peer.bound = true;
                self.client
                    .bind_channel(TransportType::Udp, peer.to, turn_time(now))
            }
            None => Ok(()),
        }
    }

    fn close_idle(&self, core: &mut Core, now: Instant) {
        let wanted = &self.wanted.peers;
        for local in core
            .peers
            .of(|peer| peer.is_idle(now) && !wanted.contains(&peer.to))
        {
            core.close(local);
        }
    }
}

/// Gives a peer an address in the tunnel; `None` at the limit.
fn open_peer(core: &mut Core, peer: SocketAddr, now: Instant) -> Option<SocketAddr> {
    (core.peers.len() < MAX_PEERS).then(|| core.peers.open(peer, now))
}

/// Whether an address in the tunnel may be opened for a peer because it sent a datagram.
fn may_call(core: &Core, peer: SocketAddr) -> bool {
    let ip = peer.ip().to_canonical();
    is_routable(ip) && core.peers.unanswered(ip) < MAX_UNANSWERED
}
#[cfg(test)]
mod tests {
    use super::datagrams::peer_address;
    use super::*;
    use crate::transport::{State, proxied};
    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::{RelayKind, RelaySecret};
    use seikan_sys::udp::{UdpOptions, UdpSocket};
    use std::net::Ipv4Addr;
    use tokio::sync::watch;

    /// An allocation whose server does not exist.
    fn allocation() -> (Allocation, Core) {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let ticket = Ticket::new(&secret, 1, &PublicKey::from_bytes([1; 32]), 7);
        let (server, by) = ((Ipv4Addr::LOCALHOST, 9).into(), By::Udp);
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let socket = UdpSocket::bind(any, &UdpOptions::default()).expect("bind");
        let core = Core {
            link: Link::Udp { socket, server },
            peers: proxied::Peers::default(),
            counters: proxied::Counters::default(),
            wanted: watch::channel(Wanted::default()).1,
            state: watch::channel(State::default()).0,
        };
        let at = At { server, by };
        (Allocation::new(at, &ticket, Instant::BOOT), core)
    }

    #[test]
    fn an_unanswered_host_gets_few_addresses() {
        let (_, mut core) = allocation();
        let open = |core: &mut Core, ip: [u8; 4], port: u16| {
            peer_address(core, SocketAddr::from((ip, port)), Instant::BOOT).is_some()
        };
        let opened = (1..=100).filter(|port| open(&mut core, [192, 0, 2, 1], *port));
        assert_eq!(opened.count(), MAX_UNANSWERED);
        assert!(open(&mut core, [192, 0, 2, 2], 1));
        for local in core.peers.of(|_| true) {
            let peer = core.peers.get_mut(local).expect("a peer");
            peer.answered = Some(Instant::BOOT);
        }
        assert!(open(&mut core, [192, 0, 2, 1], 101));
        let ips = (3..=255).flat_map(|host| [[192, 0, 2, host]; MAX_UNANSWERED]);
        let many = ips
            .enumerate()
            .filter(|(n, ip)| open(&mut core, *ip, *n as u16));
        assert_eq!(many.count(), MAX_PEERS - MAX_UNANSWERED - 2);
    }

    #[test]
    fn no_proxied_address_leads_to_this_host() {
        let (_, mut core) = allocation();
        for peer in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            let at = peer_address(&mut core, peer.parse().expect(peer), Instant::BOOT);
            assert_eq!(at, None, "{peer}");
        }
    }

    #[test]
    fn each_peer_requests_one_channel() {
        let (mut allocation, mut core) = allocation();
        let peer = SocketAddr::from(([192, 0, 2, 1], 7));
        let local = open_peer(&mut core, peer, Instant::BOOT).expect("an address");
        let mut bind = || allocation.bind(&mut core, local, Instant::BOOT);
        assert!(bind().is_err(), "there is no allocation");
        // The second time, the library is not asked: it would return the same error.
        assert!(bind().is_ok());
    }

    #[test]
    fn an_address_that_the_tunnel_does_not_answer_is_closed_after_a_while() {
        let (mut allocation, mut core) = allocation();
        let [unwanted, wanted] = [1, 2].map(|host| SocketAddr::from(([192, 0, 2, host], 7)));
        let opened = [unwanted, wanted].map(|peer| open_peer(&mut core, peer, Instant::BOOT));
        allocation.wanted.peers.insert(wanted);
        allocation.close_idle(&mut core, Instant::BOOT + Duration::from_secs(29));
        assert_eq!(core.peers.len(), 2);
        allocation.close_idle(&mut core, Instant::BOOT + Duration::from_secs(30));
        assert_eq!(
            (core.peers.at(&unwanted), core.peers.at(&wanted)),
            (None, opened[1])
        );
    }
}

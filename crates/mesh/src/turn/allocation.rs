//! Keeps one allocation at a TURN server (RFC 8656), and forwards between it and the tunnel.
//!
//! The protocol is implemented by a sans-I/O library; the sockets are here. Each peer of the allocation has a
//! proxy socket ([`crate::proxy`]).

mod datagrams;

use super::ended::Ended;
use super::link::{Link, Target, Transport};
use crate::endpoints::{any_port, is_routable};
use crate::forward::{self, Ends, Event, Forwarder, Hub, LOOK_EVERY};
use crate::proxy::{ProxySocket, Run};
use crate::stun::BindingRequest;
use seikan_sys::udp::ReceiveBatch;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::{Duration, Instant};
use turn_client_proto::api::{BindChannelError, TurnConfig, TurnEvent, TurnPollRet};
use turn_client_proto::client::TurnClient;
use turn_client_proto::prelude::TurnClientApi as _;
use turn_client_proto::stun::Instant as TurnInstant;
use turn_client_proto::tcp::TurnClientTcp;
use turn_client_proto::types::{AddressFamily, TransportType, TurnCredentials};
use turn_client_proto::udp::TurnClientUdp;

/// Maximum number of proxy sockets. A server has 16,384 channels, but this host needs its descriptors.
const MAX_PROXIES: usize = 128;
/// Of those, maximum for one IP address that the tunnel has not answered yet, so that one peer cannot use up
/// all.
const MAX_UNANSWERED: usize = 16;
/// Maximum number of permissions of one allocation. The library keeps each as long as the allocation.
pub(super) const MAX_PERMITTED: usize = 1024;
/// Timeout of the allocation after the connection, including TLS.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(4);
/// Interval of keepalives if the server is silent: shorter than any NAT's timeout.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(20);
/// Interval and number of repeated keepalives without an answer.
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(1);
const MAX_QUESTIONS: u32 = 6;

/// Requirements of an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Peers with a permission.
    pub permitted: BTreeSet<IpAddr>,
    /// Peers that the tunnel sends to first.
    pub proxies: BTreeSet<SocketAddr>,
}

/// Starts the thread. `port` is the tunnel's port.
pub(super) fn start(target: Target, port: Arc<AtomicU16>) -> io::Result<Ends<Allocation>> {
    forward::start("turn", port, |hub| Allocation::new(target, hub))
}

/// An allocation, or an attempt.
pub(super) struct Allocation {
    transport: Transport,
    server: SocketAddr,
    /// Local address as passed to the library, which only compares it.
    own: SocketAddr,
    client: TurnClient,
    link: Link,
    hub: Hub<Allocation>,
    /// Peers with a permission, or a pending request for one.
    permitted: BTreeSet<IpAddr>,
    relayed: Option<SocketAddr>,
    /// Error code of the server's last error response.
    code: u16,
    started_at: Instant,
    last_received: Instant,
    unanswered_keepalives: u32,
    next_keepalive: Instant,
    /// Time of the next check for idle proxy sockets, and for refused permissions to request again.
    next_look: Instant,
    /// Datagrams to the server.
    outward: Run,
}

impl Allocation {
    fn new(target: Target, hub: Hub<Allocation>) -> Result<Allocation, Ended> {
        let (server, transport) = (target.server, target.transport);
        let family = match server {
            SocketAddr::V4(_) => AddressFamily::IPV4,
            SocketAddr::V6(_) => AddressFamily::IPV6,
        };
        let own = any_port(server);
        let link = Link::open(&target, own)?;
        hub.watch(&link)?;
        let ticket = &target.ticket;
        let credentials = TurnCredentials::new(&ticket.username, ticket.password.reveal());
        let mut config = TurnConfig::new(credentials);
        config.set_address_family(family);
        let client = match transport {
            Transport::Udp => TurnClientUdp::allocate(own, server, config).into(),
            Transport::Tcp | Transport::Tls => TurnClientTcp::allocate(own, server, config).into(),
        };
        let now = Instant::now();
        Ok(Allocation {
            transport,
            server,
            own,
            client,
            link,
            hub,
            permitted: BTreeSet::new(),
            relayed: None,
            code: 0,
            started_at: now,
            last_received: now,
            unanswered_keepalives: 0,
            next_keepalive: now + KEEPALIVE_EVERY,
            next_look: now + LOOK_EVERY,
            outward: Run::default(),
        })
    }

    fn now(&self) -> TurnInstant {
        TurnInstant::from_std(self.started_at)
    }
}

impl Forwarder for Allocation {
    type Wanted = Wanted;
    type Serves = SocketAddr;
    type Ended = Ended;

    fn hub(&mut self) -> &mut Hub<Allocation> {
        &mut self.hub
    }

    /// Requests missing permissions and channels.
    fn apply(&mut self) -> Result<(), Ended> {
        let Some(relayed) = self.relayed else {
            return Ok(());
        };
        let wanted = self.hub.wanted().clone();
        let now = self.now();
        for ip in wanted.permitted {
            if ip.is_ipv4() != relayed.is_ipv4() || self.permitted.contains(&ip) {
                continue;
            }
            if self.permitted.len() >= MAX_PERMITTED {
                return Err(Ended::Full);
            }
            // It is refused only if it exists already.
            let _ = self.client.create_permission(TransportType::Udp, ip, now);
            self.permitted.insert(ip);
        }
        for peer in wanted.proxies {
            let other = peer.is_ipv4() == relayed.is_ipv4() && peer != relayed;
            if !other || self.hub.proxies.at(&peer).is_some() {
                continue;
            }
            let Some(token) = self.open(peer) else {
                continue;
            };
            match self.bind(token) {
                Ok(()) => {}
                // The channel of a closed proxy socket exists still, and can be used.
                Err(BindChannelError::AlreadyExists) => self.hub.report_proxy(token)?,
                // The next check retries.
                Err(_) => self.hub.close(token)?,
            }
        }
        Ok(())
    }

    fn drive(&mut self) -> Result<Instant, Ended> {
        let now = self.now();
        let mut wait = LOOK_EVERY;
        // Bounded; the rest follows soon.
        for _ in 0..MAX_PROXIES {
            self.transmit();
            while let Some(event) = self.client.poll_event() {
                self.note(event)?;
            }
            wait = match self.client.poll(now) {
                TurnPollRet::WaitUntil(at) => at.saturating_duration_since(now).min(LOOK_EVERY),
                TurnPollRet::Closed => return Err(self.closed()),
                // For TCP allocations, which are never requested here.
                TurnPollRet::AllocateTcpSocket { .. } | TurnPollRet::TcpClose { .. } => continue,
            };
            if !wait.is_zero() {
                break;
            }
        }
        self.flush_stream()?;
        let now = Instant::now();
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            self.close_idle(now)?;
            self.apply()?;
        }
        let until = self.started_at + ALLOCATE_WITHIN;
        let next = match self.relayed {
            Some(_) => self.ask(now)?,
            None if now < until => until,
            None => return Err(self.closed()),
        };
        Ok(next.min(self.next_look).min(now + wait))
    }

    fn read_server(&mut self, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        self.forward_in(batch)
    }

    fn read_proxy(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        self.forward_out(token, batch)
    }

    fn leave(&mut self) {
        if self.client.delete(self.now()).is_ok() {
            self.transmit();
            // The connection ends in any case.
            let _ = self.flush_stream();
        }
    }
}

/// Protocol of the allocation.
impl Allocation {
    /// Returns why the client is done.
    fn closed(&self) -> Ended {
        match (self.relayed, self.code) {
            (None, 0) => Ended::NoAnswer(self.transport),
            (None, code) => Ended::Refused {
                transport: self.transport,
                code,
            },
            (Some(_), code) => Ended::TakenBack(code),
        }
    }

    /// Sends the client's messages to the server.
    fn transmit(&mut self) {
        let now = self.now();
        while let Some(transmit) = self.client.poll_transmit(now) {
            self.link.say(self.server, &transmit.data);
        }
    }

    fn note(&mut self, event: TurnEvent) -> Result<(), Ended> {
        match event {
            TurnEvent::AllocationCreated(_, relayed) => {
                self.relayed = Some(relayed);
                // The error code before was the server's request for credentials.
                self.code = 0;
                self.hub.send(Event::Serves(relayed))?;
                self.apply()
            }
            TurnEvent::AllocationCreateFailed(_) => Err(self.closed()),
            TurnEvent::PermissionCreateFailed(_, ip) => {
                // Requested again at the next check.
                self.permitted.remove(&ip);
                Ok(())
            }
            TurnEvent::ChannelCreated(_, peer) => match self.hub.proxies.at(&peer) {
                Some(token) => Ok(self.hub.report_proxy(token)?),
                None => Ok(()),
            },
            TurnEvent::ChannelCreateFailed(_, peer) => match self.hub.proxies.at(&peer) {
                Some(token) => Ok(self.hub.close(token)?),
                None => Ok(()),
            },
            TurnEvent::PermissionCreated(..)
            | TurnEvent::TcpConnected(_)
            | TurnEvent::TcpConnectFailed(_) => Ok(()),
        }
    }

    /// Sends a keepalive if the server has been silent, which also keeps a NAT's mapping. Returns the time of
    /// the next one.
    fn ask(&mut self, now: Instant) -> Result<Instant, Ended> {
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
        self.link.say(self.server, &BindingRequest::new().bytes);
        self.flush_stream()?;
        Ok(self.next_keepalive)
    }

    /// Sends pending bytes of a stream.
    fn flush_stream(&mut self) -> Result<(), Ended> {
        match &mut self.link {
            Link::Udp(..) => Ok(()),
            Link::Stream(stream) => self.hub.flush(stream).map_err(|error| self.lost(error)),
        }
    }

    /// Returns the error of a lost connection.
    fn lost(&self, source: io::Error) -> Ended {
        let transport = self.transport;
        match self.relayed {
            Some(_) => Ended::Lost(source),
            None => Ended::Unconnected { transport, source },
        }
    }
}

/// Proxy sockets.
impl Allocation {
    /// Opens a proxy socket; `None` at the limit or if the system lacks resources.
    fn open(&mut self, peer: SocketAddr) -> Option<u64> {
        let reserve = self.hub.proxies.len() < MAX_PROXIES;
        reserve.then(|| self.hub.open(peer))?
    }

    /// Whether a datagram of a peer may open a proxy socket.
    fn may_call(&self, peer: SocketAddr) -> bool {
        let ip = peer.ip().to_canonical();
        is_routable(ip) && self.hub.proxies.unanswered(ip) < MAX_UNANSWERED
    }

    /// Requests a channel, once for each proxy socket. Until there is one, datagrams have a longer header.
    fn bind(&mut self, token: u64) -> Result<(), BindChannelError> {
        let now = self.now();
        match self.hub.proxies.get_mut(token).filter(|proxy| !proxy.bound) {
            Some(proxy) => {
                proxy.bound = true;
                let peer = proxy.peer;
                self.client.bind_channel(TransportType::Udp, peer, now)
            }
            None => Ok(()),
        }
    }

    fn close_idle(&mut self, now: Instant) -> Result<(), Ended> {
        let wanted = self.hub.wanted().clone();
        let is_over =
            |proxy: &ProxySocket| proxy.is_idle(now) && !wanted.proxies.contains(&proxy.peer);
        for token in self.hub.proxies.of(is_over) {
            self.hub.close(token)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client;
    use seikan_observe::DropReason;
    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::{RelayKind, RelaySecret, Ticket};
    use std::io::{Read as _, Write as _};
    use std::net::Ipv4Addr;

    fn target() -> Target {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let tls = client::tls(None, rustls::ALL_VERSIONS).expect("TLS");
        Target {
            server: (Ipv4Addr::LOCALHOST, 9).into(),
            transport: Transport::Udp,
            host: "localhost".to_owned(),
            tls: Arc::new(tls),
            ticket: Ticket::new(&secret, 1, &PublicKey::from_bytes([1; 32]), 7),
            fwmark: None,
        }
    }

    /// An allocation whose server does not exist, and the ends that keep it alive.
    fn allocation() -> (Allocation, Ends<Allocation>) {
        let (hub, ends) = Hub::new(Arc::default()).expect("a hub");
        (Allocation::new(target(), hub).expect("an attempt"), ends)
    }

    #[test]
    fn an_unanswered_address_gets_few_proxy_sockets() {
        let (mut allocation, _ends) = allocation();
        let receive = |allocation: &mut Allocation, ip: [u8; 4], port: u16| {
            let taken = allocation.forward_inward(SocketAddr::from((ip, port)), &[0]);
            taken.expect("it goes on");
            allocation.hub.proxies.len()
        };
        for port in 1..=100 {
            receive(&mut allocation, [192, 0, 2, 1], port);
        }
        assert_eq!(allocation.hub.proxies.len(), MAX_UNANSWERED);
        let dropped = allocation
            .hub
            .proxies
            .counters
            .drops
            .get(DropReason::NoChannel);
        assert_eq!(dropped, 100 - MAX_UNANSWERED as u64);
        let another = receive(&mut allocation, [192, 0, 2, 2], 1);
        assert_eq!(another, MAX_UNANSWERED + 1);
        for token in allocation.hub.proxies.of(|_| true) {
            let proxy = allocation
                .hub
                .proxies
                .get_mut(token)
                .expect("a proxy socket");
            proxy.answered = Some(Instant::now());
        }
        let more = receive(&mut allocation, [192, 0, 2, 1], 101);
        assert_eq!(more, MAX_UNANSWERED + 2);
    }

    #[test]
    fn kernel_drops_of_the_servers_socket_are_counted() {
        let (mut allocation, _ends) = allocation();
        let Link::Udp(socket, _) = &allocation.link else {
            panic!("it is by UDP");
        };
        let port = socket.local_addr().expect("an address").port();
        let sender = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        // More than the largest buffer can hold, with the kernel's overhead for each.
        for _ in 0..20_000 {
            let sent = sender.send_to(&[4; 1000], (Ipv4Addr::LOCALHOST, port));
            sent.expect("sent");
        }
        let mut batch = ReceiveBatch::new(16, 1 << 16);
        let until = Instant::now() + Duration::from_secs(10);
        let mut counts = [0; 2];
        while counts[1] == 0 && Instant::now() < until {
            allocation.read_server(&mut batch).expect("it goes on");
            counts = [DropReason::UnknownSource, DropReason::ReceiveQueueFull]
                .map(|reason| allocation.hub.proxies.counters.drops.get(reason));
        }
        let [came, dropped] = counts;
        assert!(dropped > 0, "nothing overflowed");
        assert_eq!(came + dropped, 20_000);
    }

    #[test]
    fn no_proxy_socket_leads_to_this_host() {
        let (mut allocation, _ends) = allocation();
        for peer in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            let taken = allocation.forward_inward(peer.parse().expect(peer), &[0]);
            taken.expect("it goes on");
            assert_eq!(allocation.hub.proxies.len(), 0, "{peer}");
        }
    }

    /// The last event of a thread that allocates over TLS, and the time until it.
    fn ended_by_tls(server: SocketAddr) -> (Ended, Duration) {
        let started_at = Instant::now();
        let target = Target {
            transport: Transport::Tls,
            server,
            ..target()
        };
        let (_handle, mut last_received) = start(target, Arc::default()).expect("started");
        while let Some(event) = last_received.blocking_recv() {
            if let Event::Ended(ended) = event {
                return (ended, started_at.elapsed());
            }
        }
        panic!("it did not end in order");
    }

    #[test]
    fn a_server_has_four_seconds_for_tls_and_the_allocation_whatever_it_sends_meanwhile() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let slowly = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("accepted");
            // RFC 8446, section 5.1: a record of 16 KiB that arrives byte by byte, until the client has left.
            let mut bytes = [22, 3, 3, 0x40, 0, 2].into_iter();
            while socket.write_all(&[bytes.next().unwrap_or(0)]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let (ended, took) = ended_by_tls(server);
        assert!(matches!(ended, Ended::NoAnswer(Transport::Tls)), "{ended}");
        assert!(
            (ALLOCATE_WITHIN..ALLOCATE_WITHIN * 2).contains(&took),
            "{took:?}"
        );
        slowly.join().expect("it has ended");
    }

    #[test]
    fn a_server_without_tls_is_no_connection() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let other = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("accepted");
            socket
                .write_all(b"220 mail.example.org\r\n")
                .expect("written");
            let _ = socket.read(&mut [0; 4096]);
        });
        let (ended, _) = ended_by_tls(server);
        assert!(
            ended.to_string().starts_with("cannot connect by TLS"),
            "{ended}"
        );
        other.join().expect("it has ended");
    }

    #[test]
    fn each_proxy_socket_requests_one_channel() {
        let (mut allocation, _ends) = allocation();
        let peer = SocketAddr::from(([192, 0, 2, 1], 7));
        let token = allocation.open(peer).expect("a proxy socket");
        assert!(allocation.bind(token).is_err(), "there is no allocation");
        // The second time, the library is not asked: it would return the same error.
        assert!(allocation.bind(token).is_ok());
    }
}

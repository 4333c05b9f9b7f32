//! What this host looks like from outside, and the router before it.

use super::{Agent, Gone, News, Shared, View, Worker};
use crate::config::Host;
use crate::mesh::mapping::{self, Held, Router};
use crate::mesh::nat;
use crate::mesh::stun::Question;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use seikan_proto::mesh::{Relay, RelayKind};
use seikan_sys::netlink::Netlink;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU16;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Rounds without an answer after which what a STUN server said is not believed any more.
const MAX_MISSES: u32 = 5;
/// STUN servers that are asked, at most.
const MAX_SERVERS: usize = 16;
/// How often STUN servers are asked: NATs forget a mapping after half a minute at the soonest (RFC 4787, section 4.3, asks for
/// two minutes).
const REFLECT_EVERY: Duration = Duration::from_secs(25);
/// Least time between two rounds of questions, where no address is another one.
const REFLECT_LEAST: Duration = Duration::from_secs(5);

impl Agent {
    /// Asks what this host looks like from outside: again and again, which keeps what NATs have made of it as it is; and at
    /// once when an address is another one, or when a way to a member has died, since a NAT may have started anew.
    pub(super) async fn reflect(&self, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
        // In the order in which servers were asked, with how often each has not answered since: what is lost on the way is no
        // news of a NAT.
        let mut last: Vec<(View, u32)> = Vec::new();
        loop {
            let begun = tokio::time::Instant::now();
            let servers = self.servers(shared).await;
            last = servers
                .into_iter()
                .map(|(name, server)| {
                    let known = last.iter().find(|(known, _)| known.server == server);
                    known.cloned().unwrap_or_else(|| {
                        let view = View {
                            name,
                            server,
                            seen: None,
                            rtt: None,
                        };
                        (view, 0)
                    })
                })
                .collect();
            // A server of a family that this host does not have would be waited for in vain.
            let mut asked = Vec::new();
            for (at, (view, misses)) in last.iter_mut().enumerate() {
                match has_way(view.server) {
                    true => asked.push((at, view.server)),
                    false => (view.seen, view.rtt, *misses) = (None, None, 0),
                }
            }
            let mut asked: FuturesUnordered<_> = asked
                .into_iter()
                .map(|(at, server)| async move {
                    let question = Question::new();
                    let begun = Instant::now();
                    let answer = shared.questions.ask(worker, server, &question.bytes);
                    let seen = answer.await?.and_then(|answer| question.answered(&answer));
                    Ok((at, seen, begun.elapsed()))
                })
                .collect();
            let mut moved = [false; 2];
            // What one says is told before all have: who does not answer is waited for.
            while let Some(answer) = asked.next().await {
                let (at, seen, rtt) = answer?;
                if let Some((view, misses)) = last.get_mut(at) {
                    moved[usize::from(view.server.is_ipv6())] |=
                        seen.is_some() && view.seen.is_some() && seen != view.seen;
                    if seen.is_some() || *misses + 1 >= MAX_MISSES {
                        (view.seen, view.rtt) = (seen, seen.map(|_| rtt));
                        *misses = 0;
                    } else {
                        *misses += 1;
                    }
                }
                shared.see(first_seen(&last));
            }
            // What others saw before that tells nothing of the NAT that is there now.
            for (view, misses) in &mut last {
                if *misses > 0 && moved[usize::from(view.server.is_ipv6())] {
                    (view.seen, view.rtt, *misses) = (None, None, 0);
                }
            }
            shared.see(first_seen(&last));
            worker.tell(News::Reflexive {
                addresses: shared.reflexive.borrow().clone(),
                views: last.iter().map(|(view, _)| view.clone()).collect(),
            })?;
            let lost = async {
                shared.lost.notified().await;
                tokio::time::sleep_until(begun + REFLECT_LEAST).await;
            };
            tokio::select! {
                () = shared.moved.notified() => {}
                () = lost => {}
                () = tokio::time::sleep(REFLECT_EVERY) => {}
            }
        }
    }

    /// STUN servers: the coordinator, the relays, and those of the configuration, each at one address of each family.
    async fn servers(&self, shared: &Shared) -> Vec<(String, SocketAddr)> {
        let mut named = Vec::new();
        for endpoint in
            std::iter::once(self.settings.coordinator.endpoint()).chain(&self.settings.stun)
        {
            let host = match &endpoint.host {
                Host::Address(ip) => ip.to_string(),
                Host::Name(name) => name.clone(),
            };
            named.push((endpoint.to_string(), host, endpoint.port));
        }
        // Behind TLS nobody answers by UDP.
        let by_udp = |relay: &&Relay| relay.kind != RelayKind::Turns;
        for relay in shared.book.borrow().relays().iter().filter(by_udp) {
            let (host, port) = (relay.address.host().to_owned(), relay.address.port());
            named.push((relay.address.to_string(), host, port));
        }
        named.truncate(MAX_SERVERS);
        let looked_up = named.into_iter().map(|(name, host, port)| async move {
            // What cannot be resolved now is asked for with the next question.
            let found = tokio::net::lookup_host((host.as_str(), port)).await;
            let found: Vec<SocketAddr> = found.map_or_else(|_| Vec::new(), Iterator::collect);
            let v6 = found.iter().find(|address| address.is_ipv6());
            let v4 = found.iter().find(|address| address.is_ipv4());
            let both = v6.into_iter().chain(v4);
            both.map(|address| (name.clone(), *address))
                .collect::<Vec<_>>()
        });
        join_all(looked_up).await.concat()
    }

    /// Has the router before this host, if there is one, send on a port for as long as it does.
    pub(super) async fn map(&self, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
        let secret = self.settings.credential.digest();
        // What was asked for last: of a router that looks different from outside nothing is known any more.
        let mut asked: Option<(Router, Ipv4Addr, NonZeroU16)> = None;
        let mut again = Instant::now();
        loop {
            let seen = shared
                .reflexive
                .borrow()
                .iter()
                .find_map(|seen| match seen.ip() {
                    IpAddr::V4(ip) => Some(ip),
                    IpAddr::V6(_) => None,
                });
            let port = NonZeroU16::new(self.port.load(Ordering::Relaxed));
            let netlink = Netlink::open().ok();
            let seen = seen.filter(|_| self.settings.port_mapping);
            let wanted = seen.zip(netlink).and_then(|(seen, netlink)| {
                let router = Router::before(seen, &netlink, self.own_interface)?;
                Some((router, seen, port?))
            });
            // It stays there meanwhile, to be given back if this ends.
            let before = shared.held.borrow().clone();
            let held = match (wanted, before) {
                (Some(wanted), Some(mut held)) if asked == Some(wanted) => {
                    let renewed = match held.renew_at <= Instant::now() {
                        true => held.renew().await,
                        false => Ok(()),
                    };
                    match renewed {
                        Err(_) if Instant::now() < held.expires_at => {
                            held.put_off();
                            Ok(Some(held))
                        }
                        renewed => renewed.map(|()| Some(held)),
                    }
                }
                (Some(wanted), None) if asked == Some(wanted) && Instant::now() < again => Ok(None),
                (wanted, before) => {
                    if let Some(before) = before {
                        before.give_back().await;
                    }
                    shared.held.replace(None);
                    match wanted {
                        Some((router, _, port)) => Held::ask(router, port, &secret).await.map(Some),
                        None => Ok(None),
                    }
                }
            };
            asked = wanted;
            let known = shared.mapped.borrow().clone();
            let standing = match held {
                Ok(Some(held)) => {
                    let mapping = held.mapping;
                    shared.held.replace(Some(held));
                    Some(Ok(mapping))
                }
                // Nothing was asked for, as lately nothing was given.
                Ok(None) if wanted.is_some() => known.clone(),
                Ok(None) => None,
                Err(reason) => {
                    shared.held.replace(None);
                    again = Instant::now() + mapping::RETRY;
                    Some(Err(reason))
                }
            };
            if standing != known {
                shared.mapped.replace(standing.clone());
                shared.different.notify_one();
                worker.tell(News::Mapped(standing))?;
            }
            // The port and the way out are looked at, too: both may change without anybody's notice.
            let _ = tokio::time::timeout(REFLECT_EVERY, shared.outside.notified()).await;
        }
    }
}

/// The first that was seen of each family, IPv6 before IPv4: those of a symmetric NAT help nobody else. Seen from a network of this
/// host's own it is one that others cannot use.
fn first_seen(views: &[(View, u32)]) -> Vec<SocketAddr> {
    let first = |v6: bool| {
        let seen = views.iter().filter_map(|(view, _)| view.seen);
        let mut seen = seen.filter(|seen| seen.is_ipv6() == v6);
        let first = seen.clone().find(nat::is_outside);
        first.or_else(|| seen.next())
    };
    [true, false].into_iter().filter_map(first).collect()
}

/// Whether this host could send there. Nothing is sent.
fn has_way(server: SocketAddr) -> bool {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let unreachable = |error: io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::AddrNotAvailable
                | io::ErrorKind::Unsupported
        )
    };
    let connected = UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(server));
    // Anything else may be different for the tunnel's socket.
    !connected.is_err_and(unreachable)
}

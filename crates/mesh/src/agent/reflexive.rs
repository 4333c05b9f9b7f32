//! Reflexive addresses of this host, and its port mapping.

use super::Agent;
use crate::endpoints::{any_port, is_routable};
use crate::event::{AgentEvent, Gone, View};
use crate::mapping::{self, Lease, Router};
use crate::nat;
use crate::resolve::one_of_each;
use crate::shared::Shared;
use crate::stun::BindingRequest;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use seikan_config::Host;
use seikan_proto::mesh::{Relay, RelayKind};
use seikan_sys::netlink::Netlink;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

/// Rounds without an answer after which a STUN server's result is dropped.
const MAX_MISSES: u32 = 5;
/// Maximum number of STUN servers.
const MAX_SERVERS: usize = 16;
/// Interval between two rounds. NATs forget a mapping after 30 s at the soonest (RFC 4787, section 4.3,
/// requires two minutes).
const REFLECT_EVERY: Duration = Duration::from_secs(25);
/// First interval if an address family of this host had no answer; doubled each time.
const REFLECT_SOON: Duration = Duration::from_secs(1);
/// Minimum interval between two rounds while no address has changed.
const REFLECT_LEAST: Duration = Duration::from_secs(5);
/// Minimum duration of a round before it may be aborted.
const ROUND_LEAST: Duration = Duration::from_millis(200);

impl Agent {
    /// Queries STUN servers periodically, which also keeps NAT mappings alive; at once when an address changes,
    /// or when a path to a member is lost, since a NAT may have restarted.
    pub(super) async fn reflect(&self, shared: &Shared) -> Result<(), Gone> {
        let mut known = Vec::new();
        // Rounds in a row in which an address family had no answer.
        let mut silent = 0;
        loop {
            let started_at = tokio::time::Instant::now();
            let servers = self.servers(shared).await;
            let mut round = Round::begin(servers, &known, has_route);
            let mut requests: FuturesUnordered<_> = round
                .queried()
                .map(|(at, server)| async move {
                    let request = BindingRequest::new();
                    let started_at = Instant::now();
                    let answer = shared
                        .stun_requests
                        .ask(&shared.worker, server, &request.bytes);
                    let seen = answer.await?.and_then(|answer| request.answered(&answer));
                    Ok((at, seen, started_at.elapsed()))
                })
                .collect();
            let report = |round: &Round| {
                shared.send(AgentEvent::Reflexive {
                    addresses: shared.reflexive.borrow().clone(),
                    views: round.views().cloned().collect(),
                })
            };
            // A result is reported before the round ends, since a silent server takes the full timeout.
            let whole = loop {
                let moved = async {
                    tokio::time::sleep_until(started_at + ROUND_LEAST).await;
                    shared.moved.notified().await;
                };
                let answer = tokio::select! {
                    answer = requests.next() => answer,
                    () = moved => break false,
                };
                let Some(answer) = answer else { break true };
                let (at, seen, rtt) = answer?;
                round.answered(at, seen.map(|seen| (seen, rtt)));
                shared.set_reflexive(first_seen(&round));
                // If the NAT has changed or restarted, results are reported only after the round, without the
                // old ones.
                if seen.is_some() && !round.has_moved() {
                    report(&round)?;
                }
            };
            drop(requests);
            // End the round even if it was aborted. Otherwise the next round could not tell which
            // results are old.
            round.end();
            if whole {
                shared.set_reflexive(first_seen(&round));
                report(&round)?;
            }
            silent = if whole && round.is_silent() {
                silent + 1
            } else {
                0
            };
            known = round.0;
            if !whole {
                continue;
            }
            let lost = async {
                shared.path_lost.notified().await;
                tokio::time::sleep_until(started_at + REFLECT_LEAST).await;
            };
            tokio::select! {
                () = shared.moved.notified() => silent = 0,
                () = lost => {}
                () = tokio::time::sleep(pause(silent)) => {}
            }
        }
    }

    /// Returns the STUN servers: the coordinator, the relays and the configured ones, each with one address per
    /// family.
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
        // A TURN server behind TLS does not answer over UDP.
        let by_udp = |relay: &&Relay| relay.kind != RelayKind::Turns;
        for relay in shared.membership.borrow().relays().iter().filter(by_udp) {
            let (host, port) = (relay.address.host().to_owned(), relay.address.port());
            named.push((relay.address.to_string(), host, port));
        }
        named.truncate(MAX_SERVERS);
        let looked_up = named.into_iter().map(|(name, host, port)| async move {
            // A name that cannot be resolved is resolved again in the next round.
            let found = tokio::net::lookup_host((host.as_str(), port)).await;
            let found: Vec<SocketAddr> = found.map_or_else(|_| Vec::new(), Iterator::collect);
            let found = one_of_each(&found).into_iter();
            found
                .map(|address| (name.clone(), address))
                .collect::<Vec<_>>()
        });
        join_all(looked_up).await.concat()
    }

    /// Keeps a port mapping at the router, if there is one and it supports that.
    pub(super) async fn map(&self, shared: &Shared) -> Result<(), Gone> {
        let secret = self.settings.credential.digest();
        // The last request; if the external address has changed, the mapping there is unknown.
        let mut requested: Option<MappingRequest> = None;
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
            let port = NonZeroU16::new(shared.tunnel.current_port());
            let netlink = Netlink::open().ok();
            let seen = seen.filter(|_| self.settings.port_mapping);
            let wanted = seen.zip(netlink).and_then(|(seen, netlink)| {
                Some(MappingRequest {
                    router: Router::before(seen, &netlink, self.interface)?,
                    seen,
                    port: port?,
                })
            });
            // The lease stays in `shared`, so that it is returned if this task ends.
            let before = shared.lease.borrow().clone();
            let lease = match (wanted, before) {
                (Some(wanted), Some(mut lease)) if requested == Some(wanted) => {
                    let renewed = if lease.renew_at <= Instant::now() {
                        lease.renew().await
                    } else {
                        Ok(())
                    };
                    match renewed {
                        Err(_) if Instant::now() < lease.expires_at => {
                            lease.put_off();
                            Ok(Some(lease))
                        }
                        renewed => renewed.map(|()| Some(lease)),
                    }
                }
                (Some(wanted), None) if requested == Some(wanted) && Instant::now() < again => {
                    Ok(None)
                }
                (wanted, before) => {
                    if let Some(before) = before {
                        before.give_back().await;
                    }
                    shared.lease.replace(None);
                    match wanted {
                        Some(wanted) => Lease::ask(wanted.router, wanted.port, &secret)
                            .await
                            .map(Some),
                        None => Ok(None),
                    }
                }
            };
            requested = wanted;
            let known = shared.mapped.borrow().clone();
            let state = match lease {
                Ok(Some(lease)) => {
                    let mapping = lease.mapping;
                    shared.lease.replace(Some(lease));
                    Some(Ok(mapping))
                }
                // No request was sent, because a recent one failed.
                Ok(None) if wanted.is_some() => known.clone(),
                Ok(None) => None,
                Err(reason) => {
                    shared.lease.replace(None);
                    again = Instant::now() + mapping::RETRY;
                    Some(Err(reason))
                }
            };
            if state != known {
                shared.mapped.replace(state.clone());
                shared.endpoints_changed.notify_one();
                shared.send(AgentEvent::Mapped(state))?;
            }
            // The port and the default route are checked as well: both may change without an event.
            let _ = tokio::time::timeout(REFLECT_EVERY, shared.reflexive_changed.notified()).await;
        }
    }
}

/// Parameters of a port mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MappingRequest {
    router: Router,
    /// This host's reflexive address.
    seen: Ipv4Addr,
    /// The tunnel's port.
    port: NonZeroU16,
}

/// Returns the time until the next round after `silent` rounds in a row in which a family had no answer; the
/// router may not have been ready.
fn pause(silent: u32) -> Duration {
    match silent.checked_sub(1) {
        None => REFLECT_EVERY,
        Some(more) => REFLECT_EVERY.min(REFLECT_SOON.saturating_mul(2u32.saturating_pow(more))),
    }
}

/// A STUN server and its results.
#[derive(Clone)]
struct Server {
    view: View,
    /// Whether there is a route to the server.
    has_route: bool,
    /// Rounds in a row without an answer; a single loss says nothing about a NAT.
    misses: u32,
    /// The server has answered in this round.
    answered: bool,
    /// Whether the result of this round differs from that of the previous round.
    moved: bool,
}

/// Requests to all servers at the same time.
struct Round(Vec<Server>);

impl Round {
    /// Starts a round with the results of the last one.
    fn begin(
        servers: Vec<(String, SocketAddr)>,
        last: &[Server],
        has_route: impl Fn(SocketAddr) -> bool,
    ) -> Round {
        let server = |(name, server): (String, SocketAddr)| {
            let has_route = has_route(server);
            let known = last.iter().find(|known| known.view.server == server);
            // A family without a route is not queried.
            let known = known.filter(|_| has_route);
            Server {
                view: known.map_or_else(
                    || View {
                        name,
                        server,
                        seen: None,
                        rtt: None,
                    },
                    |known| known.view.clone(),
                ),
                has_route,
                misses: known.map_or(0, |known| known.misses),
                answered: false,
                moved: false,
            }
        };
        Round(servers.into_iter().map(server).collect())
    }

    /// Returns the servers to query.
    fn queried(&self) -> impl Iterator<Item = (usize, SocketAddr)> {
        let all = self.0.iter().enumerate().filter(|(_, one)| one.has_route);
        all.map(|(at, one)| (at, one.view.server))
    }

    /// Stores a result: the reflexive address with the round-trip time, or `None` without an answer.
    fn answered(&mut self, at: usize, seen: Option<(SocketAddr, Duration)>) {
        let Some(one) = self.0.get_mut(at) else {
            return;
        };
        let before = one.view.seen;
        one.answered = seen.is_some();
        one.moved = before.is_some() && one.answered && before != seen.map(|(seen, _)| seen);
        one.misses = match seen {
            Some(_) => 0,
            None => one.misses + 1,
        };
        if one.answered || one.misses >= MAX_MISSES {
            (one.view.seen, one.view.rtt) = seen.unzip();
            one.misses = 0;
        }
    }

    /// Ends the round for servers that have not answered.
    fn end(&mut self) {
        for v6 in [false, true] {
            let moved = self.of(v6).any(|one| one.moved);
            let silent = |one: &&mut Server| one.view.server.is_ipv6() == v6 && !one.answered;
            // Older results of other servers say nothing about the changed NAT.
            for one in self.0.iter_mut().filter(silent).filter(|_| moved) {
                (one.view.seen, one.view.rtt, one.misses) = (None, None, 0);
            }
        }
    }

    fn of(&self, v6: bool) -> impl Iterator<Item = &Server> + Clone {
        let all = self.0.iter();
        all.filter(move |one| one.view.server.is_ipv6() == v6)
    }

    fn has_moved(&self) -> bool {
        self.0.iter().any(|one| one.moved)
    }

    /// Whether no server of a queried family has answered.
    fn is_silent(&self) -> bool {
        [false, true].into_iter().any(|v6| {
            let mut queried = self.of(v6).filter(|one| one.has_route).peekable();
            queried.peek().is_some() && queried.all(|one| !one.answered)
        })
    }

    fn views(&self) -> impl Iterator<Item = &View> {
        self.0.iter().map(|one| &one.view)
    }
}

/// Returns the first reflexive address of each family, IPv6 before IPv4; further ones, of a symmetric NAT, help
/// nobody. A public address precedes one seen from inside this host's networks. An address at which no other host
/// reaches this one, such as a loopback address, takes nobody's place.
fn first_seen(round: &Round) -> Vec<SocketAddr> {
    let first = |v6: bool| {
        let seen = round.of(v6).filter_map(|one| one.view.seen);
        let mut seen = seen.filter(|seen| is_routable(seen.ip()));
        let first = seen.clone().find(nat::is_public);
        first.or_else(|| seen.next())
    };
    [true, false].into_iter().filter_map(first).collect()
}

/// Whether this host has a route to the server. Sends nothing.
fn has_route(server: SocketAddr) -> bool {
    let unreachable = |error: io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::AddrNotAvailable
                | io::ErrorKind::Unsupported
        )
    };
    let connected = UdpSocket::bind(any_port(server)).and_then(|socket| socket.connect(server));
    // With another error, the tunnel's socket may still succeed.
    !connected.is_err_and(unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: [&str; 3] = ["192.0.2.1:3478", "192.0.2.2:3478", "192.0.2.3:3478"];
    const V6: &str = "[2001:db8::1]:3478";
    const HERE: &str = "203.0.113.9:4000";
    const THERE: &str = "203.0.113.9:5000";

    fn at(text: &str) -> SocketAddr {
        text.parse().expect(text)
    }

    fn round(servers: &[&str], last: &Round) -> Round {
        let servers = servers.iter().map(|one| (one.to_string(), at(one)));
        Round::begin(servers.collect(), &last.0, |_| true)
    }

    /// A complete round with these answers, in order.
    fn whole(servers: &[&str], last: &Round, said: &[Option<&str>]) -> Round {
        let mut round = round(servers, last);
        for (n, said) in said.iter().enumerate() {
            round.answered(n, said.map(|said| (at(said), Duration::ZERO)));
        }
        round.end();
        round
    }

    fn nobody() -> Round {
        Round(Vec::new())
    }

    fn seen(round: &Round) -> Vec<Option<SocketAddr>> {
        round.views().map(|view| view.seen).collect()
    }

    #[test]
    fn a_result_is_dropped_after_five_rounds_without_an_answer() {
        let mut last = whole(&V4[..2], &nobody(), &[Some(HERE), Some(HERE)]);
        for misses in 1..=5 {
            last = whole(&V4[..2], &last, &[Some(HERE), None]);
            let believed = (misses < 5).then(|| at(HERE));
            assert_eq!(seen(&last), [Some(at(HERE)), believed], "{misses}");
        }
    }

    #[test]
    fn results_from_before_a_nat_restart_are_dropped_after_the_round() {
        let last = whole(&V4, &nobody(), &[Some(HERE); 3]);
        let mut now = round(&V4, &last);
        now.answered(0, Some((at(THERE), Duration::ZERO)));
        // Reported now, the old and new results would look like a symmetric NAT.
        assert!(now.has_moved());
        now.answered(1, Some((at(THERE), Duration::ZERO)));
        now.answered(2, None);
        now.end();
        assert_eq!(seen(&now), [Some(at(THERE)), Some(at(THERE)), None]);
        // Its old result was dropped.
        let next = whole(&V4, &now, &[Some(THERE); 3]);
        assert!(!next.has_moved());
        // The other family is behind another NAT, or none.
        let last = whole(
            &[V4[0], V6],
            &nobody(),
            &[Some(HERE), Some("[2001:db8::9]:4000")],
        );
        let now = whole(&[V4[0], V6], &last, &[Some(THERE), None]);
        assert_eq!(
            seen(&now),
            [THERE, "[2001:db8::9]:4000"].map(|seen| Some(at(seen)))
        );
    }

    #[test]
    fn a_false_address_of_one_server_hides_that_of_no_other() {
        for said in ["127.0.0.1:7", "169.254.1.1:7", "255.255.255.255:7"] {
            let round = whole(&V4[..2], &nobody(), &[Some(said), Some("10.0.0.5:7")]);
            assert_eq!(first_seen(&round), [at("10.0.0.5:7")], "{said}");
            let round = whole(&V4[..1], &nobody(), &[Some(said)]);
            assert_eq!(first_seen(&round), [], "{said}");
        }
    }

    #[test]
    fn a_family_of_which_nobody_answers_is_silent_if_this_host_has_it() {
        for (said, silent) in [
            ([None, None, None], true),
            ([None, Some(HERE), None], true),
            ([None, None, Some("[2001:db8::9]:4000")], true),
            ([None, Some(HERE), Some("[2001:db8::9]:4000")], false),
        ] {
            let round = whole(&[V4[0], V4[1], V6], &nobody(), &said);
            assert_eq!(round.is_silent(), silent, "{said:?}");
        }
        let servers = [V4[0], V6].map(|one| (one.to_owned(), at(one)));
        let mut round = Round::begin(servers.into(), &[], |server| server.is_ipv4());
        assert_eq!(round.queried().collect::<Vec<_>>(), [(0, at(V4[0]))]);
        round.answered(0, Some((at(HERE), Duration::ZERO)));
        assert!(!round.is_silent());
    }

    #[test]
    fn a_family_without_a_route_has_no_result() {
        let last = whole(&[V4[0]], &nobody(), &[Some(HERE)]);
        let servers = vec![(V4[0].to_owned(), at(V4[0]))];
        assert_eq!(seen(&Round::begin(servers, &last.0, |_| false)), [None]);
    }

    #[test]
    fn a_silent_family_is_queried_sooner_at_first() {
        let pauses: Vec<u64> = (0..8).map(|silent| pause(silent).as_secs()).collect();
        assert_eq!(pauses, [25, 1, 2, 4, 8, 16, 25, 25]);
        assert_eq!(pause(u32::MAX), REFLECT_EVERY);
    }
}

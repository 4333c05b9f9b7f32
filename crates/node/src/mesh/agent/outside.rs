//! What this host looks like from outside, and the router before it.

use super::{Agent, Gone, News, Shared, View, Worker};
use crate::mesh::mapping::{self, Held, Router};
use crate::mesh::nat;
use crate::mesh::stun::Question;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use seikan_config::Host;
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
/// The same where a family that this host has had no answer once; twice as long each time after.
const REFLECT_SOON: Duration = Duration::from_secs(1);
/// Least time between two rounds of questions, where no address is another one.
const REFLECT_LEAST: Duration = Duration::from_secs(5);
/// How long answers are waited for, at least, before others are asked, or from elsewhere.
const ROUND_LEAST: Duration = Duration::from_millis(200);

impl Agent {
    /// Asks what this host looks like from outside: again and again, which keeps what NATs have made of it as it is; and at
    /// once when an address is another one, or when a way to a member has died, since a NAT may have started anew.
    pub(super) async fn reflect(&self, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
        let mut known = Vec::new();
        // Rounds in which a family had no answer, one after the other.
        let mut silent = 0;
        loop {
            let begun = tokio::time::Instant::now();
            let servers = self.servers(shared).await;
            let mut round = Round::begin(servers, &known, has_way);
            let mut asked: FuturesUnordered<_> = round
                .asked()
                .map(|(at, server)| async move {
                    let question = Question::new();
                    let begun = Instant::now();
                    let answer = shared.questions.ask(worker, server, &question.bytes);
                    let seen = answer.await?.and_then(|answer| question.answered(&answer));
                    Ok((at, seen, begun.elapsed()))
                })
                .collect();
            let told = |round: &Round| {
                worker.tell(News::Reflexive {
                    addresses: shared.reflexive.borrow().clone(),
                    views: round.views().cloned().collect(),
                })
            };
            // What one says is told before all have: who does not answer is waited for.
            let whole = loop {
                let moved = async {
                    tokio::time::sleep_until(begun + ROUND_LEAST).await;
                    shared.moved.notified().await;
                };
                let answer = tokio::select! {
                    answer = asked.next() => answer,
                    () = moved => break false,
                };
                let Some(answer) = answer else { break true };
                let (at, seen, rtt) = answer?;
                round.answered(at, seen.map(|seen| (seen, rtt)));
                shared.see(first_seen(&round));
                // Of a NAT that is another one, or has started anew, not before all that was seen before has gone.
                if seen.is_some() && !round.has_moved() {
                    told(&round)?;
                }
            };
            drop(asked);
            // In one that was broken off, too: the next would not know who has moved.
            round.end();
            if whole {
                shared.see(first_seen(&round));
                told(&round)?;
            }
            silent = match whole && round.is_silent() {
                true => silent + 1,
                false => 0,
            };
            known = round.0;
            if !whole {
                continue;
            }
            let lost = async {
                shared.lost.notified().await;
                tokio::time::sleep_until(begun + REFLECT_LEAST).await;
            };
            tokio::select! {
                () = shared.moved.notified() => silent = 0,
                () = lost => {}
                () = tokio::time::sleep(pause(silent)) => {}
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
        for relay in shared.membership.borrow().relays().iter().filter(by_udp) {
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

/// How long until all are asked again, after so many rounds, one after the other, in which a family had no answer: what was asked may
/// have come too early, as to a router that is not up yet.
fn pause(silent: u32) -> Duration {
    match silent.checked_sub(1) {
        None => REFLECT_EVERY,
        Some(more) => REFLECT_EVERY.min(REFLECT_SOON.saturating_mul(2u32.saturating_pow(more))),
    }
}

/// A STUN server, and what is known of what it sees.
#[derive(Clone)]
struct Server {
    view: View,
    /// This host could send there.
    has_way: bool,
    /// Rounds without an answer since the latest: what is lost on the way is no news of a NAT.
    misses: u32,
    /// In this round.
    answered: bool,
    /// It has seen another address in this round than before.
    moved: bool,
}

/// Questions to all servers at once, in their order.
struct Round(Vec<Server>);

impl Round {
    /// What the last round has found of a server stays until there is news of it.
    fn begin(
        servers: Vec<(String, SocketAddr)>,
        last: &[Server],
        has_way: impl Fn(SocketAddr) -> bool,
    ) -> Round {
        let server = |(name, server): (String, SocketAddr)| {
            let has_way = has_way(server);
            let known = last.iter().find(|known| known.view.server == server);
            // One of a family that this host does not have would be waited for in vain.
            let known = known.filter(|_| has_way);
            Server {
                view: known.map_or_else(|| View::none(name, server), |known| known.view.clone()),
                has_way,
                misses: known.map_or(0, |known| known.misses),
                answered: false,
                moved: false,
            }
        };
        Round(servers.into_iter().map(server).collect())
    }

    /// Who is to be asked.
    fn asked(&self) -> impl Iterator<Item = (usize, SocketAddr)> {
        let all = self.0.iter().enumerate().filter(|(_, one)| one.has_way);
        all.map(|(at, one)| (at, one.view.server))
    }

    /// Where a server sees this host, after how long; `None`: it does not answer.
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

    /// Who has not answered by now does not in this round.
    fn end(&mut self) {
        for v6 in [false, true] {
            let moved = self.of(v6).any(|one| one.moved);
            let silent = |one: &&mut Server| one.view.server.is_ipv6() == v6 && !one.answered;
            // What others saw before that tells nothing of the NAT that is there now.
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

    /// Whether nobody of a family has answered that was asked.
    fn is_silent(&self) -> bool {
        [false, true].into_iter().any(|v6| {
            let mut asked = self.of(v6).filter(|one| one.has_way).peekable();
            asked.peek().is_some() && asked.all(|one| !one.answered)
        })
    }

    fn views(&self) -> impl Iterator<Item = &View> {
        self.0.iter().map(|one| &one.view)
    }
}

/// The first that was seen of each family, IPv6 before IPv4: those of a symmetric NAT help nobody else. Seen from a network of this
/// host's own it is one that others cannot use.
fn first_seen(round: &Round) -> Vec<SocketAddr> {
    let first = |v6: bool| {
        let mut seen = round.of(v6).filter_map(|one| one.view.seen);
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

    /// A whole round, in which they say this in their order.
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
    fn what_a_server_saw_is_believed_until_it_has_not_answered_five_times() {
        let mut last = whole(&V4[..2], &nobody(), &[Some(HERE), Some(HERE)]);
        for misses in 1..=5 {
            last = whole(&V4[..2], &last, &[Some(HERE), None]);
            let believed = (misses < 5).then(|| at(HERE));
            assert_eq!(seen(&last), [Some(at(HERE)), believed], "{misses}");
        }
    }

    #[test]
    fn what_others_saw_before_a_nat_started_anew_has_gone_when_all_have_had_their_time() {
        let last = whole(&V4, &nobody(), &[Some(HERE); 3]);
        let mut now = round(&V4, &last);
        now.answered(0, Some((at(THERE), Duration::ZERO)));
        // Told now, it would look as if there were a port for each.
        assert!(now.has_moved());
        now.answered(1, Some((at(THERE), Duration::ZERO)));
        now.answered(2, None);
        now.end();
        assert_eq!(seen(&now), [Some(at(THERE)), Some(at(THERE)), None]);
        // It has not seen anything else before.
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
        assert_eq!(round.asked().collect::<Vec<_>>(), [(0, at(V4[0]))]);
        round.answered(0, Some((at(HERE), Duration::ZERO)));
        assert!(!round.is_silent());
    }

    #[test]
    fn a_family_without_a_way_any_more_is_seen_nowhere() {
        let last = whole(&[V4[0]], &nobody(), &[Some(HERE)]);
        let servers = vec![(V4[0].to_owned(), at(V4[0]))];
        assert_eq!(seen(&Round::begin(servers, &last.0, |_| false)), [None]);
    }

    #[test]
    fn a_silent_family_is_asked_sooner_and_then_as_often_as_any() {
        let pauses: Vec<u64> = (0..8).map(|silent| pause(silent).as_secs()).collect();
        assert_eq!(pauses, [25, 1, 2, 4, 8, 16, 25, 25]);
        assert_eq!(pause(u32::MAX), REFLECT_EVERY);
    }
}

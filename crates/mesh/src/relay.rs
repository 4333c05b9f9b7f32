//! Client of relays: for each member without a direct path, it requests and binds the pair's port periodically,
//! from the tunnel's socket ([`seikan_proto::mesh::relay`]), while the port is needed.
//!
//! If there are at least two relays, two of them serve each pair, so that one can fail. Both ends
//! choose the same two ([`in_turn`]). A direct path has a head start before a relay is used at all,
//! and UDP one before TLS ([`streams`]). A relay over TLS is reached through a proxied transport.

mod streams;

use crate::event::{AgentEvent, Gone, RelayAnswer};
use crate::random::SystemRandom;
use crate::resolve::{one_of_each, resolve};
use crate::shared::{RelayEvent, Shared};
use crate::turn::TurnAllocations;
use futures_util::future::{Either, join_all, select, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::framing::MAIN_PORT;
use seikan_proto::mesh::relay::{Answer, ClientRequest};
use seikan_proto::mesh::{MAX_RELAYS, Relay, RelayKind, RelayTls, in_turn};
use seikan_proto::tunnel::Reachability;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
pub(super) use streams::Streams;
use tokio::sync::{Notify, mpsc};

/// Maximum number of pairs at a time. Another member takes the place of one that has not been reached for long, or is
/// handled when it is reported again.
const MAX_PAIRS: usize = 256;
/// Time without being reached after which another member may take a pair's place: longer than the first binding and all
/// checks take.
const TRIED_FOR: Duration = Duration::from_secs(10);
/// Number of relays for one pair.
const RELAYS_OF_A_PAIR: usize = 2;
/// Head start of a direct path before a relay is used.
const HEAD_START: Duration = Duration::from_millis(200);
/// Head start of UDP before TLS is tried, unless UDP has failed before.
const TLS_HEAD_START: Duration = Duration::from_millis(300);
/// Interval between two bindings of a side: a third of the time after which a relay forgets it, and shorter
/// than any NAT's timeout.
const BIND_EVERY: Duration = Duration::from_secs(20);
/// Number of checks of a member at a relay when both may be bound, and their interval.
const CHECKS: u32 = 4;
const CHECK_EVERY: Duration = Duration::from_millis(550);
/// Time after a member was reported as not answering for which it is waited for at a relay.
const SOUGHT_LATELY: Duration = Duration::from_secs(30);
/// Timeout of the worker's answer how a member is reached.
const WORKER_PATIENCE: Duration = Duration::from_secs(2);

/// A successful binding.
struct Bound {
    binding: Binding,
    /// The other side is bound.
    present: bool,
    /// Response time of the relay.
    rtt: Duration,
}

/// Why a binding failed.
enum Failure {
    /// The worker has ended.
    Gone,
    /// A text for the user.
    Reason(String),
}

impl From<Gone> for Failure {
    fn from(_: Gone) -> Failure {
        Failure::Gone
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Failure {
        Failure::Reason(reason)
    }
}

/// Splits off the end of the worker, after which nothing else is tried.
fn split<T>(result: Result<T, Failure>) -> Result<Result<T, String>, Gone> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(Failure::Reason(reason)) => Ok(Err(reason)),
        Err(Failure::Gone) => Err(Gone),
    }
}

/// All pairs.
pub(super) struct Relays<'a> {
    shared: &'a Shared,
    turn: &'a TurnAllocations<'a>,
    streams: &'a Streams<'a>,
    /// Relays that did not answer over UDP the last time.
    mute: RefCell<BTreeSet<String>>,
    pairs: RefCell<BTreeMap<PublicKey, Rc<Pair>>>,
    /// The last stamp, of all pairs.
    stamp: Cell<u64>,
}

/// Signals and state of a pair's task.
struct Pair {
    sought: Cell<Instant>,
    /// Time since which the member is not reached; `None` while it is.
    unreached_since: Cell<Option<Instant>>,
    /// Another member takes the place of this one.
    displaced: Notify,
    /// The member was reported again.
    reported_again: Notify,
    /// The member's relayed addresses may have changed.
    moved: Notify,
    reached: Cell<Option<Reachability>>,
    answered: Notify,
    /// Bindings by relay.
    bindings: RefCell<BTreeMap<String, Binding>>,
}

/// The binding of this host's side of a pair.
#[derive(Clone, Copy)]
struct Binding {
    /// The pair's port.
    port: u16,
    /// Destination of the tunnel's datagrams: the relay's address, or a proxied one.
    at: SocketAddr,
    by_tls: bool,
}

impl<'a> Relays<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        turn: &'a TurnAllocations<'a>,
        streams: &'a Streams<'a>,
    ) -> Relays<'a> {
        Relays {
            shared,
            turn,
            streams,
            mute: RefCell::default(),
            pairs: RefCell::default(),
            stamp: Cell::new(0),
        }
    }

    /// Serves all reported pairs; ends when the worker has ended.
    pub(crate) async fn run(&self, events: &mut mpsc::Receiver<RelayEvent>) -> Result<(), Gone> {
        let mut tasks = FuturesUnordered::new();
        loop {
            let event = tokio::select! {
                event = events.recv() => event.ok_or(Gone)?,
                Some(ended) = tasks.next() => {
                    let (key, pair): (PublicKey, Rc<Pair>) = ended?;
                    let mut pairs = self.pairs.borrow_mut();
                    // The member may have been reported again since it was displaced.
                    if pairs.get(&key).is_some_and(|current| Rc::ptr_eq(current, &pair)) {
                        pairs.remove(&key);
                    }
                    continue;
                }
            };
            let (RelayEvent::Sought(key) | RelayEvent::Moved(key) | RelayEvent::Reached(key, _)) =
                event;
            let pair = self.pairs.borrow().get(&key).cloned();
            match (event, pair) {
                (RelayEvent::Sought(_), Some(pair)) => {
                    pair.sought.set(Instant::now());
                    pair.reported_again.notify_one();
                }
                (RelayEvent::Sought(_), None) => {
                    let has_relays = !self.shared.membership.borrow().relays().is_empty();
                    let mut pairs = self.pairs.borrow_mut();
                    if has_relays && has_room(&mut pairs, Instant::now()) {
                        let pair = Rc::new(Pair::new());
                        pairs.insert(key, Rc::clone(&pair));
                        tasks.push(self.pair_until_displaced(key, pair));
                    }
                }
                (RelayEvent::Reached(_, reached), Some(pair)) => {
                    pair.on_reached(reached, Instant::now());
                    pair.answered.notify_one();
                }
                (RelayEvent::Moved(_), Some(pair)) => pair.moved.notify_one(),
                (RelayEvent::Moved(_) | RelayEvent::Reached(..), None) => {}
            }
        }
    }

    /// Serves one pair while it is needed, and until another one takes its place.
    async fn pair_until_displaced(
        &self,
        key: PublicKey,
        pair: Rc<Pair>,
    ) -> Result<(PublicKey, Rc<Pair>), Gone> {
        tokio::select! {
            ended = self.pair(key, Rc::clone(&pair)) => {
                ended?;
            }
            () = pair.displaced.notified() => self.turn.release(&key),
        }
        Ok((key, pair))
    }

    /// Serves one pair while it is needed.
    async fn pair(&self, key: PublicKey, pair: Rc<Pair>) -> Result<PublicKey, Gone> {
        tokio::time::sleep(HEAD_START).await;
        let mut fresh = false;
        while self.is_needed(key, &pair).await? {
            let relays = self.shared.membership.borrow().relays().to_vec();
            let own = self.shared.tunnel.own_key.get();
            let mut ours = in_turn(&relays, [&own, &key], |kind| kind == RelayKind::Seikan);
            ours.truncate(RELAYS_OF_A_PAIR);
            let addresses: Vec<String> = ours.iter().map(|r| r.address.to_string()).collect();
            let is_ours = |address: &String, _: &mut Binding| addresses.contains(address);
            pair.bindings.borrow_mut().retain(is_ours);
            let all = ours
                .into_iter()
                .map(|relay| self.bind_at(relay, key, &pair, fresh));
            for outcome in join_all(all).await {
                outcome?;
            }
            // A TURN server helps only where Seikan's relays do not.
            let bound = !pair.bindings.borrow().is_empty();
            let reached = bound && self.check_path(key, &pair).await?;
            if !reached && relays.iter().any(|relay| relay.kind.is_turn()) {
                self.turn.need(key);
                self.check_path(key, &pair).await?;
            }
            fresh = self.rest(key, &pair).await?;
        }
        self.turn.release(&key);
        // The tunnel keeps the addresses: datagrams from them may arrive for a minute, and must not count as
        // direct.
        Ok(key)
    }

    /// Checks the relayed path repeatedly, since the other side may bind in a moment and earlier datagrams were
    /// lost. Returns whether the member is reached.
    async fn check_path(&self, key: PublicKey, pair: &Pair) -> Result<bool, Gone> {
        for _ in 0..CHECKS {
            tokio::time::sleep(CHECK_EVERY).await;
            self.is_needed(key, pair).await?;
            if pair.reached.get() != Some(Reachability::Unreachable) {
                return Ok(true);
            }
            self.report_relays(key, pair, true)?;
        }
        Ok(false)
    }

    /// Waits until the sides have to be bound again. Returns whether the member was reported again, so that the
    /// old path is lost and the relays' state has to be verified.
    async fn rest(&self, key: PublicKey, pair: &Pair) -> Result<bool, Gone> {
        let over = tokio::time::sleep(BIND_EVERY);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => return Ok(false),
                () = pair.reported_again.notified() => return Ok(true),
                () = pair.moved.notified() => self.report_relays(key, pair, true)?,
            }
        }
    }

    /// Whether a member is reached by a relay, or not at all although it was reported.
    async fn is_needed(&self, key: PublicKey, pair: &Pair) -> Result<bool, Gone> {
        pair.reached.set(None);
        self.shared.send(AgentEvent::Reached(key))?;
        // Without an answer, the worker's loop is busy, and the state does not change.
        let _ = tokio::time::timeout(WORKER_PATIENCE, pair.answered.notified()).await;
        Ok(match pair.reached.get() {
            Some(Reachability::Direct) => false,
            Some(Reachability::Unreachable) => pair.sought.get().elapsed() < SOUGHT_LATELY,
            Some(Reachability::Relayed) | None => true,
        })
    }

    /// Binds this side at one relay: a refresh, or `fresh`, without assuming that the relay knows it.
    async fn bind_at(
        &self,
        relay: &Relay,
        key: PublicKey,
        pair: &Pair,
        fresh: bool,
    ) -> Result<(), Gone> {
        let address = relay.address.to_string();
        let known = pair.bindings.borrow().get(&address).copied();
        let bound = self.bind(relay, key, known.filter(|_| !fresh)).await;
        let state = match split(bound)? {
            Ok(bound) => {
                self.on_bound(key, pair, &address, &bound)?;
                Ok(RelayAnswer {
                    rtt: bound.rtt,
                    by_tls: bound.binding.by_tls,
                })
            }
            // The former binding remains a path until the tunnel finds it silent.
            Err(reason) => Err(reason),
        };
        self.shared.send(AgentEvent::Relay { address, state })
    }

    /// Stores a successful binding.
    fn on_bound(
        &self,
        key: PublicKey,
        pair: &Pair,
        address: &str,
        bound: &Bound,
    ) -> Result<(), Gone> {
        let mut mute = self.mute.borrow_mut();
        if !bound.binding.by_tls {
            mute.remove(address);
        } else if mute.len() < MAX_RELAYS || mute.pop_first().is_some() {
            // Includes relays that are no longer listed.
            mute.insert(address.to_owned());
        }
        drop(mute);
        let mut bindings = pair.bindings.borrow_mut();
        bindings.insert(address.to_owned(), bound.binding);
        drop(bindings);
        self.report_relays(key, pair, bound.present)
    }

    async fn bind(
        &self,
        relay: &Relay,
        key: PublicKey,
        known: Option<Binding>,
    ) -> Result<Bound, Failure> {
        if let Some(known) = known {
            // A binding over TLS is replaced by one over UDP if that works again.
            if known.by_tls {
                let bound = self.bind_by_udp(relay, key, &Cell::default()).await;
                if let Ok(bound) = split(bound)? {
                    return Ok(bound);
                }
            }
            if let Some(bound) = self.refresh(relay, key, known).await? {
                return Ok(bound);
            }
        }
        self.bind_anew(relay, key).await
    }

    /// Refreshes a binding; `None` if that fails.
    async fn refresh(
        &self,
        relay: &Relay,
        key: PublicKey,
        binding: Binding,
    ) -> Result<Option<Bound>, Gone> {
        let at = match relay.tls.filter(|_| binding.by_tls) {
            Some(tls) => self.streams.proxy(relay, tls, binding.port).await.ok(),
            None => Some(binding.at).filter(|_| !binding.by_tls),
        };
        let Some(at) = at else { return Ok(None) };
        let requested_at = Instant::now();
        let answer = split(self.ask(relay, key, at).await)?.ok().flatten();
        let answer = answer.filter(|answer| answer.port == Some(binding.port));
        Ok(answer.map(|_| Bound {
            binding: Binding { at, ..binding },
            present: false,
            rtt: requested_at.elapsed(),
        }))
    }

    /// Requests and binds the pair's port over UDP and, after a head start, over TLS if the relay supports it;
    /// the first success counts.
    async fn bind_anew(&self, relay: &Relay, key: PublicKey) -> Result<Bound, Failure> {
        let answers = Cell::new(false);
        let Some(tls) = relay.tls else {
            return self.bind_by_udp(relay, key, &answers).await;
        };
        let mute = self.mute.borrow().contains(&relay.address.to_string());
        let udp = pin!(self.bind_by_udp(relay, key, &answers));
        let tls = pin!(async {
            if !mute {
                tokio::time::sleep(TLS_HEAD_START).await;
            }
            self.bind_by_tls(relay, tls, key).await
        });
        let (by_udp, by_tls) = match select(udp, tls).await {
            Either::Left((udp, tls)) => match split(udp)? {
                Ok(bound) => return Ok(bound),
                Err(by_udp) => (by_udp, split(tls.await)?),
            },
            Either::Right((tls, udp)) => match split(tls)? {
                // A distant relay that answers over UDP is preferred to TLS.
                Ok(bound) if answers.get() => return Ok(split(udp.await)?.unwrap_or(bound)),
                Ok(bound) => return Ok(bound),
                Err(by_tls) => match split(udp.await)? {
                    Ok(bound) => return Ok(bound),
                    Err(by_udp) => (by_udp, Err(by_tls)),
                },
            },
        };
        by_tls.map_err(|by_tls| Failure::Reason(format!("{by_udp}; by TLS: {by_tls}")))
    }

    /// Binds likewise, but over TLS only.
    async fn bind_by_tls(
        &self,
        relay: &Relay,
        tls: RelayTls,
        key: PublicKey,
    ) -> Result<Bound, Failure> {
        let silent = |proxy| Failure::Reason(self.streams.give_up(relay, proxy));
        let main = self.streams.proxy(relay, tls, MAIN_PORT).await?;
        let answer = self.ask(relay, key, main).await?;
        let answer = answer.ok_or_else(|| silent(main))?;
        let port = answer.port.ok_or("it is not a relay".to_owned())?;
        let at = self.streams.proxy(relay, tls, port).await?;
        let requested_at = Instant::now();
        let answer = self.ask(relay, key, at).await?;
        let present = answer.ok_or_else(|| silent(at))?.present;
        let by_tls = true;
        Ok(Bound {
            binding: Binding { port, at, by_tls },
            present,
            rtt: requested_at.elapsed(),
        })
    }

    /// Requests and binds the pair's port over UDP; sets `answers` as soon as the relay answers.
    async fn bind_by_udp(
        &self,
        relay: &Relay,
        key: PublicKey,
        answers: &Cell<bool>,
    ) -> Result<Bound, Failure> {
        let started_at = Instant::now();
        let found = resolve(relay.address.host(), relay.address.port()).await?;
        let mut open: Vec<_> = one_of_each(&found)
            .into_iter()
            .map(|main| Box::pin(self.port(relay, key, main)))
            .collect();
        let mut reason = "its name resolves to no address".to_owned();
        while !open.is_empty() {
            let (outcome, _, others) = select_all(open).await;
            open = others;
            let at = match split(outcome)? {
                Ok(at) => at,
                Err(why) => {
                    reason = why;
                    continue;
                }
            };
            answers.set(true);
            // Bind over one family only, because a relay knows a side by its last binding.
            match split(self.ask(relay, key, at).await)? {
                Ok(Some(answer)) => {
                    let (port, by_tls) = (at.port(), false);
                    return Ok(Bound {
                        binding: Binding { port, at, by_tls },
                        present: answer.present,
                        // Two requests: to the main port and to the pair's.
                        rtt: started_at.elapsed() / 2,
                    });
                }
                Ok(None) => reason = format!("no answer from its port {}", at.port()),
                Err(why) => reason = why,
            }
        }
        Err(Failure::Reason(reason))
    }

    /// Requests the pair's port at one of the relay's addresses.
    async fn port(
        &self,
        relay: &Relay,
        key: PublicKey,
        main: SocketAddr,
    ) -> Result<SocketAddr, Failure> {
        let answer = self.ask(relay, key, main).await?;
        let answer = answer.ok_or("no answer".to_owned())?;
        let port = answer.port;
        let port = port.ok_or("it is a STUN server, not a relay".to_owned())?;
        Ok(SocketAddr::new(main.ip(), port))
    }

    /// Sends a request to a relay's main port or a pair's port; `None` if it does not answer.
    async fn ask(
        &self,
        relay: &Relay,
        key: PublicKey,
        to: SocketAddr,
    ) -> Result<Option<Answer>, Failure> {
        let request = ClientRequest {
            ticket: &relay.ticket,
            peer: key,
            stamp: self.stamp(),
        };
        let (id, message) = request.write(&mut SystemRandom);
        let Shared {
            stun_requests,
            worker,
            ..
        } = self.shared;
        let answer = stun_requests.ask(worker, to, &message).await?;
        let password = &relay.ticket.password;
        let answer = answer.map(|answer| Answer::parse(&answer, id, password));
        answer
            .transpose()
            .map_err(|error| Failure::Reason(error.to_string()))
    }

    /// Returns a stamp larger than all before.
    fn stamp(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_nanos().min(u64::MAX.into()) as u64);
        let stamp = now.max(self.stamp.get() + 1);
        self.stamp.set(stamp);
        stamp
    }

    fn report_relays(&self, key: PublicKey, pair: &Pair, present: bool) -> Result<(), Gone> {
        let (relayed, proxies) = self.turn.relayed_paths(&key);
        let bindings = pair.bindings.borrow();
        let by = |tls: bool| {
            let bindings = bindings
                .values()
                .filter(move |binding| binding.by_tls == tls);
            bindings.map(|binding| binding.at)
        };
        self.shared.send(AgentEvent::Relays {
            key,
            addresses: by(false).chain(relayed).collect(),
            proxies: by(true)
                .filter(|at| self.streams.has(*at))
                .chain(proxies)
                .collect(),
            present,
        })
    }
}

/// Whether there is room for another pair. If there is none, displaces the pair that has not been reached for longest,
/// if that is [`TRIED_FOR`] or more, so that members that never answer do not keep others from the relays.
fn has_room(pairs: &mut BTreeMap<PublicKey, Rc<Pair>>, now: Instant) -> bool {
    if pairs.len() < MAX_PAIRS {
        return true;
    }
    let unreached = pairs.iter().filter_map(|(key, pair)| {
        let since = pair.unreached_since.get()?;
        (now.saturating_duration_since(since) >= TRIED_FOR).then_some((since, *key))
    });
    let Some((_, key)) = unreached.min() else {
        return false;
    };
    if let Some(pair) = pairs.remove(&key) {
        pair.displaced.notify_one();
    }
    true
}

impl Pair {
    /// Stores how the member is reached.
    fn on_reached(&self, reached: Reachability, now: Instant) {
        self.reached.set(Some(reached));
        let since = self.unreached_since.get().unwrap_or(now);
        let unreached = reached == Reachability::Unreachable;
        self.unreached_since.set(unreached.then_some(since));
    }

    fn new() -> Pair {
        Pair {
            sought: Cell::new(Instant::now()),
            unreached_since: Cell::new(Some(Instant::now())),
            displaced: Notify::new(),
            reported_again: Notify::new(),
            moved: Notify::new(),
            reached: Cell::new(None),
            answered: Notify::new(),
            bindings: RefCell::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_are_not_reached_give_way_to_others() {
        let key = |n: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&n.to_be_bytes());
            PublicKey::from_bytes(bytes)
        };
        let start = Instant::now();
        let later = start + Duration::from_secs(60);
        let mut pairs = BTreeMap::new();
        for n in 0..MAX_PAIRS {
            assert!(has_room(&mut pairs, start));
            pairs.insert(key(n), Rc::new(Pair::new()));
        }
        // Each is tried for a while first.
        assert!(!has_room(&mut pairs, start + TRIED_FOR / 2));
        for pair in pairs.values() {
            pair.on_reached(Reachability::Relayed, start);
        }
        assert!(!has_room(&mut pairs, later));
        for (n, seconds) in [(7, 20), (5, 10), (9, 30)] {
            let since = start + Duration::from_secs(seconds);
            pairs[&key(n)].on_reached(Reachability::Unreachable, since);
            // Asked again later.
            pairs[&key(n)].on_reached(Reachability::Unreachable, later);
        }
        let longest = Rc::clone(&pairs[&key(5)]);
        assert!(has_room(&mut pairs, later));
        assert!(!pairs.contains_key(&key(5)) && pairs.len() == MAX_PAIRS - 1);
        let notified = std::pin::pin!(longest.displaced.notified());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(notified.poll(&mut context).is_ready());
    }
}

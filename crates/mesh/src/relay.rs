//! Client of relays: for each member without a direct path, it requests and binds the pair's port periodically,
//! from the tunnel's socket ([`seikan_proto::mesh::relay`]), while the port is needed.
//!
//! Two relays serve a pair if there are as many, so that one can fail: both ends choose the same two
//! ([`in_turn`]). A direct path has a head start before a relay is used at all, and UDP one before TLS
//! ([`streams`]). A relay over TLS is reached through proxy sockets on this host.

mod stream;
mod streams;

use crate::event::{AgentEvent, Gone, RelayAnswer, Worker};
use crate::random::SystemRandom;
use crate::resolve::{one_of_each, resolve};
use crate::shared::{OwnKey, RelayEvent, Shared};
use crate::turn::TurnAllocations;
use futures_util::future::{Either, join_all, select, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::framing::MAIN_PORT;
use seikan_proto::mesh::relay::{Answer, ClientRequest, RelayError};
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

/// Maximum number of pairs at a time; another member is handled when it is reported again.
const MAX_PAIRS: usize = 256;
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
/// How long a member that does not answer is waited for at a relay after it was reported.
const SOUGHT_LATELY: Duration = Duration::from_secs(30);
/// Timeout of the worker's answer how a member is reached.
const WORKER_PATIENCE: Duration = Duration::from_secs(2);

/// The binding of this side, whether the other side is bound, and the response time; or why binding failed, as
/// a text for the user.
type BindResult = Result<(Binding, bool, Duration), String>;

/// All pairs.
pub(super) struct Relays<'a> {
    own: OwnKey,
    worker: &'a Worker,
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
    /// Destination of the tunnel's datagrams: the relay's address, or a proxy socket.
    at: SocketAddr,
    by_tls: bool,
}

impl<'a> Relays<'a> {
    pub(super) fn new(
        own: OwnKey,
        worker: &'a Worker,
        shared: &'a Shared,
        turn: &'a TurnAllocations<'a>,
        streams: &'a Streams<'a>,
    ) -> Relays<'a> {
        Relays {
            own,
            worker,
            shared,
            turn,
            streams,
            mute: RefCell::default(),
            pairs: RefCell::default(),
            stamp: Cell::new(0),
        }
    }

    /// Serves all reported pairs; ends when the worker has ended.
    pub(crate) async fn run(&self, mut events: mpsc::Receiver<RelayEvent>) -> Result<(), Gone> {
        let mut tasks = FuturesUnordered::new();
        loop {
            let event = tokio::select! {
                event = events.recv() => event.ok_or(Gone)?,
                Some(ended) = tasks.next() => {
                    let key: PublicKey = ended?;
                    self.pairs.borrow_mut().remove(&key);
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
                    let has_capacity = self.pairs.borrow().len() < MAX_PAIRS;
                    if has_capacity && !self.shared.membership.borrow().relays().is_empty() {
                        let pair = Rc::new(Pair::new());
                        self.pairs.borrow_mut().insert(key, Rc::clone(&pair));
                        tasks.push(self.pair(key, pair));
                    }
                }
                (RelayEvent::Reached(_, reached), Some(pair)) => {
                    pair.reached.set(Some(reached));
                    pair.answered.notify_one();
                }
                (RelayEvent::Moved(_), Some(pair)) => pair.moved.notify_one(),
                (RelayEvent::Moved(_) | RelayEvent::Reached(..), None) => {}
            }
        }
    }

    /// Serves one pair while it is needed.
    async fn pair(&self, key: PublicKey, pair: Rc<Pair>) -> Result<PublicKey, Gone> {
        tokio::time::sleep(HEAD_START).await;
        let mut fresh = false;
        while self.is_needed(key, &pair).await? {
            let relays = self.shared.membership.borrow().relays().to_vec();
            let own = self.own.get();
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
        self.worker.send(AgentEvent::Reached(key))?;
        // Without an answer the loop is busy, and the state does not change.
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
        let known = pair
            .bindings
            .borrow()
            .get(&relay.address.to_string())
            .copied();
        let known = known.filter(|_| !fresh);
        // A binding over TLS is replaced by one over UDP if that works again.
        if known.is_some_and(|binding| binding.by_tls)
            && let Ok((binding, present, rtt)) =
                self.bind_by_udp(relay, key, &Cell::default()).await?
        {
            return self.on_bound(relay, key, pair, binding, present, rtt);
        }
        if let Some(binding) = known
            && let Some((binding, rtt)) = self.refresh(relay, key, binding).await?
        {
            return self.on_bound(relay, key, pair, binding, false, rtt);
        }
        match self.bind_pair(relay, key).await? {
            Ok((binding, present, rtt)) => self.on_bound(relay, key, pair, binding, present, rtt),
            // The former binding remains a path until the tunnel finds it silent.
            Err(reason) => {
                let (address, state) = (relay.address.to_string(), Err(reason));
                self.worker.send(AgentEvent::Relay { address, state })
            }
        }
    }

    /// Stores a successful binding.
    fn on_bound(
        &self,
        relay: &Relay,
        key: PublicKey,
        pair: &Pair,
        binding: Binding,
        present: bool,
        rtt: Duration,
    ) -> Result<(), Gone> {
        let address = relay.address.to_string();
        let by_tls = binding.by_tls;
        let mut mute = self.mute.borrow_mut();
        if !by_tls {
            mute.remove(&address);
        } else if mute.len() < MAX_RELAYS || mute.pop_first().is_some() {
            // Includes relays that are no longer listed.
            mute.insert(address.clone());
        }
        drop(mute);
        pair.bindings.borrow_mut().insert(address.clone(), binding);
        self.report_relays(key, pair, present)?;
        let state = Ok(RelayAnswer { rtt, by_tls });
        self.worker.send(AgentEvent::Relay { address, state })
    }

    /// Refreshes a binding.
    async fn refresh(
        &self,
        relay: &Relay,
        key: PublicKey,
        binding: Binding,
    ) -> Result<Option<(Binding, Duration)>, Gone> {
        let at = match relay.tls.filter(|_| binding.by_tls) {
            Some(tls) => self.streams.proxy(relay, tls, binding.port).await.ok(),
            None => Some(binding.at).filter(|_| !binding.by_tls),
        };
        let Some(at) = at else { return Ok(None) };
        let requested_at = Instant::now();
        let answer = self.ask(relay, key, at).await?;
        let rtt = requested_at.elapsed();
        let still = matches!(answer, Some(Ok(answer)) if answer.port == Some(binding.port));
        Ok(still.then_some((Binding { at, ..binding }, rtt)))
    }

    /// Requests and binds the pair's port over UDP and, after a head start, over TLS if the relay supports it;
    /// the first success counts.
    async fn bind_pair(&self, relay: &Relay, key: PublicKey) -> Result<BindResult, Gone> {
        let Some(tls) = relay.tls else {
            return self.bind_by_udp(relay, key, &Cell::default()).await;
        };
        let mute = self.mute.borrow().contains(&relay.address.to_string());
        let answers = Cell::new(false);
        let udp = pin!(self.bind_by_udp(relay, key, &answers));
        let tls = pin!(async {
            if !mute {
                tokio::time::sleep(TLS_HEAD_START).await;
            }
            self.bind_by_tls(relay, tls, key).await
        });
        let (by_udp, by_tls) = match select(udp, tls).await {
            Either::Left((udp, tls)) => match udp? {
                Ok(binding) => return Ok(Ok(binding)),
                Err(by_udp) => (by_udp, tls.await?),
            },
            Either::Right((tls, udp)) => match tls? {
                // A distant relay that answers over UDP is preferred to TLS.
                Ok(binding) if answers.get() => return Ok(Ok(udp.await?.unwrap_or(binding))),
                Ok(binding) => return Ok(Ok(binding)),
                Err(by_tls) => match udp.await? {
                    Ok(binding) => return Ok(Ok(binding)),
                    Err(by_udp) => (by_udp, Err(by_tls)),
                },
            },
        };
        Ok(by_tls.map_err(|by_tls| format!("{by_udp}; by TLS: {by_tls}")))
    }

    /// The same over TLS only.
    async fn bind_by_tls(
        &self,
        relay: &Relay,
        tls: RelayTls,
        key: PublicKey,
    ) -> Result<BindResult, Gone> {
        let main = match self.streams.proxy(relay, tls, MAIN_PORT).await {
            Ok(main) => main,
            Err(reason) => return Ok(Err(reason)),
        };
        let port = match self.ask(relay, key, main).await? {
            Some(Ok(Answer {
                port: Some(port), ..
            })) => port,
            Some(Ok(_)) => return Ok(Err("it is not a relay".to_owned())),
            Some(Err(error)) => return Ok(Err(error.to_string())),
            None => return Ok(Err(self.streams.give_up(relay, main))),
        };
        let at = match self.streams.proxy(relay, tls, port).await {
            Ok(at) => at,
            Err(reason) => return Ok(Err(reason)),
        };
        let requested_at = Instant::now();
        Ok(match self.ask(relay, key, at).await? {
            Some(Ok(answer)) => {
                let by_tls = true;
                Ok((
                    Binding { port, at, by_tls },
                    answer.present,
                    requested_at.elapsed(),
                ))
            }
            Some(Err(error)) => Err(error.to_string()),
            None => Err(self.streams.give_up(relay, at)),
        })
    }

    /// Requests and binds the pair's port over UDP; sets `answers` as soon as the relay answers.
    async fn bind_by_udp(
        &self,
        relay: &Relay,
        key: PublicKey,
        answers: &Cell<bool>,
    ) -> Result<BindResult, Gone> {
        let started_at = Instant::now();
        let found = match resolve(relay.address.host(), relay.address.port()).await {
            Ok(found) => one_of_each(&found),
            Err(reason) => return Ok(Err(reason)),
        };
        let mut open: Vec<_> = found
            .into_iter()
            .map(|main| Box::pin(self.port(relay, key, main)))
            .collect();
        let mut reason = "its name resolves to no address".to_owned();
        while !open.is_empty() {
            let (outcome, _, others) = select_all(open).await;
            open = others;
            // Over one family only: a relay knows a side by its last binding.
            let outcome = outcome?;
            answers.set(answers.get() || outcome.is_ok());
            let bound = match outcome {
                Ok(at) => self.bind(relay, key, at).await?.map(|there| (at, there)),
                Err(why) => Err(why),
            };
            match bound {
                Ok((at, present)) => {
                    let (port, by_tls) = (at.port(), false);
                    // Two requests: to the main port and to the pair's.
                    let rtt = started_at.elapsed() / 2;
                    return Ok(Ok((Binding { port, at, by_tls }, present, rtt)));
                }
                Err(why) => reason = why,
            }
        }
        Ok(Err(reason))
    }

    /// Requests the pair's port at one of the relay's addresses.
    async fn port(
        &self,
        relay: &Relay,
        key: PublicKey,
        main: SocketAddr,
    ) -> Result<Result<SocketAddr, String>, Gone> {
        Ok(match self.ask(relay, key, main).await? {
            Some(Ok(Answer {
                port: Some(port), ..
            })) => Ok(SocketAddr::new(main.ip(), port)),
            Some(Ok(_)) => Err("it is a STUN server, not a relay".to_owned()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("no answer".to_owned()),
        })
    }

    /// Binds this side; returns whether the other is bound.
    async fn bind(
        &self,
        relay: &Relay,
        key: PublicKey,
        binding: SocketAddr,
    ) -> Result<Result<bool, String>, Gone> {
        Ok(match self.ask(relay, key, binding).await? {
            Some(Ok(answer)) => Ok(answer.present),
            Some(Err(error)) => Err(error.to_string()),
            None => Err(format!("no answer from its port {}", binding.port())),
        })
    }

    /// Sends a request to a relay's main port or a pair's port.
    async fn ask(
        &self,
        relay: &Relay,
        key: PublicKey,
        to: SocketAddr,
    ) -> Result<Option<Result<Answer, RelayError>>, Gone> {
        let ask = ClientRequest {
            ticket: &relay.ticket,
            peer: key,
            stamp: self.stamp(),
        };
        let (id, message) = ask.write(&mut SystemRandom);
        let answer = self
            .shared
            .stun_requests
            .ask(self.worker, to, &message)
            .await?;
        let password = &relay.ticket.password;
        Ok(answer.map(|answer| Answer::parse(&answer, id, password)))
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
        let (relayed, proxies) = self.turn.ways(&key);
        let bindings = pair.bindings.borrow();
        let by = |tls: bool| {
            let bindings = bindings
                .values()
                .filter(move |binding| binding.by_tls == tls);
            bindings.map(|binding| binding.at)
        };
        self.worker.send(AgentEvent::Relays {
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

impl Pair {
    fn new() -> Pair {
        Pair {
            sought: Cell::new(Instant::now()),
            reported_again: Notify::new(),
            moved: Notify::new(),
            reached: Cell::new(None),
            answered: Notify::new(),
            bindings: RefCell::default(),
        }
    }
}

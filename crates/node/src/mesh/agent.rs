//! The thread that talks to the coordinator.
//!
//! Tasks on one thread: one asks for what changed, each question waiting at the coordinator until there is something
//! ([`Agent::follow`]); one asks by STUN what this host looks like from outside ([`Agent::reflect`]); one tells where it may be
//! reached whenever that is different ([`Agent::tell`]); one has the router before it send on a port ([`Agent::map`]); one has
//! members called that do not answer ([`Agent::call`]); one binds this host to relays for those that no direct way reaches
//! ([`super::relay`]), or has TURN servers relay ([`super::turn`]); some answer questions for members' names
//! ([`names::serve`]). None gives up: when a coordinator does not answer another one of the mesh
//! is asked at once; when none does they are asked again, ever less often.

use super::client::{Client, ClientError};
use super::known::{Doubts, Judge, Known};
use super::legs::Counters;
use super::mapping::{self, Held, Mapping, Router};
use super::relay::{Relays, Streams, Wish};
use super::stun::{Question, Questions};
use super::turn::Turns;
use super::{Contact, Heard, OwnKey, cache, endpoints, names, nat};
use crate::config::{Host, MeshSettings};
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use ipnet::IpNet;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    Book, Call, Change, Endpoints, MAX_CALLS, MAX_ENDPOINTS, Reason, Relay, RelayKind,
};
use seikan_sys::netlink::Netlink;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU16;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, mpsc};

/// How long a question for changes waits at the coordinator.
const WAIT: Duration = Duration::from_secs(50);
/// Least time between an answer and the next question.
const BREATH: Duration = Duration::from_millis(20);
/// The same after too many answers in a row that came sooner than this and said nothing.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// Such answers that are no reason to ask more slowly: what this host tells of itself as it starts ends a question each time.
const IDLE_ANSWERS: u32 = 8;
/// Rounds without an answer after which what a STUN server said is not believed any more.
const MAX_MISSES: u32 = 5;
/// STUN servers that are asked, at most.
const MAX_SERVERS: usize = 16;
/// First pause after something failed; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often the host's addresses are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Least time between two versions of what is kept on disk.
const STORE_EVERY: Duration = Duration::from_secs(5);
/// News that wait for the worker, at most.
const MAX_NEWS: usize = 16;
/// How often STUN servers are asked: NATs forget a mapping after half a minute at the soonest (RFC 4787, section 4.3, asks for
/// two minutes).
const REFLECT_EVERY: Duration = Duration::from_secs(25);
/// Least time between two rounds of questions, where no address is another one.
const REFLECT_LEAST: Duration = Duration::from_secs(5);
/// How often this host's key is told, changed or not: what became of it, if an answer was lost, nobody knows.
const TELL_KEY_EVERY: Duration = Duration::from_secs(120);
/// How long the router may take at the end to take its port back.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// Members to be called that wait, at most.
const MAX_SOUGHT: usize = 64;
/// Least time between two calls of one member.
const CALL_EVERY: Duration = Duration::from_secs(1);

/// What the thread has to say.
#[derive(Debug)]
pub(super) enum News {
    /// How it stands with the coordinator.
    Contact(Contact),
    /// The one that answers.
    Coordinator(String),
    /// Members are different, or what they may begin here.
    Changes {
        /// Everything up to this revision is told.
        revision: u64,
        /// In this order.
        changes: Vec<Change>,
    },
    /// What is odd about members' keys is different.
    Doubts(Doubts),
    /// What this host looks like from outside.
    Reflexive {
        /// To all.
        addresses: Vec<SocketAddr>,
        /// To each server that was asked.
        views: Vec<View>,
    },
    /// A port of the router before this host, or why there is none; `None` if none is needed.
    Mapped(Option<Result<Mapping, String>>),
    /// To be sent from the tunnel's socket.
    Send {
        /// A datagram.
        bytes: Vec<u8>,
        /// To whom.
        to: SocketAddr,
    },
    /// Members that try to reach this host.
    Called(Vec<PublicKey>),
    /// Where a member is reached by relays.
    Relays {
        /// The member.
        key: PublicKey,
        /// Ports that it shares with this host, and its relayed addresses.
        addresses: Vec<SocketAddr>,
        /// Where this host itself forwards to it.
        legs: Vec<SocketAddr>,
        /// At one of them the member was there already: it is to be met.
        present: bool,
    },
    /// How is a member reached?
    Reached(PublicKey),
    /// How it stands with a relay, for people.
    Relay {
        /// Which.
        address: String,
        /// How it answers, or why it does not.
        standing: Result<Answers, String>,
    },
    /// What the tunnel sends to a loopback address is forwarded by this host, or is not any more.
    Leg {
        /// The address.
        local: SocketAddr,
        /// Where to.
        to: Option<LegTo>,
    },
    /// A relay of ours answers by TLS.
    Stream(String),
    /// What was forwarded by that.
    Streamed {
        /// Which relay.
        address: String,
        /// Since it began.
        counters: Box<Counters>,
    },
    /// There is no connection to it any more.
    StreamEnded(String),
    /// There is an allocation at a TURN server.
    Turn {
        /// Which.
        address: String,
        /// Where others send.
        relayed: SocketAddr,
        /// How it is spoken to.
        transport: &'static str,
    },
    /// What was forwarded by it.
    Turned {
        /// Which.
        address: String,
        /// Since it began.
        counters: Box<Counters>,
    },
    /// There is none any more.
    TurnEnded(String),
    /// The worker is to look whether its port is still the same.
    Tick,
}

/// How a relay answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// After how long.
    pub rtt: Duration,
    /// By TLS: it does not by UDP.
    pub by_tls: bool,
}

impl Answers {
    /// By UDP, or as a TURN server does.
    pub(super) fn after(rtt: Duration) -> Answers {
        let by_tls = false;
        Answers { rtt, by_tls }
    }
}

/// Where this host forwards what the tunnel sends to a leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LegTo {
    /// To a peer, by a TURN server.
    Turn {
        /// Which server.
        server: String,
        /// Where from there.
        to: SocketAddr,
    },
    /// To a port of a relay of ours, by TLS; 0 is the main one.
    Relay {
        /// Which relay.
        relay: String,
        /// Its address, and the port.
        to: SocketAddr,
    },
}

/// What one STUN server said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// As the configuration or the coordinator calls it.
    pub name: String,
    /// Where it was asked.
    pub server: SocketAddr,
    /// Where it sees this host; `None`: it does not answer.
    pub seen: Option<SocketAddr>,
    /// From the question to the answer.
    pub rtt: Option<Duration>,
}

/// What the thread needs.
pub(super) struct Agent {
    pub settings: MeshSettings,
    /// The mesh's interface.
    pub own_interface: u32,
    /// Its addresses with the mesh's networks.
    pub networks: Vec<IpNet>,
    /// The port that peers are to send to.
    pub port: Arc<AtomicU16>,
    /// The firewall mark of what the tunnel sends.
    pub fwmark: Option<u32>,
    /// Where the others are kept.
    pub cache: PathBuf,
    /// Where it is remembered who was who.
    pub known: PathBuf,
    /// This host's identity.
    pub own_key: OwnKey,
    /// What the others are called.
    pub names: names::Names,
    /// Who says so, if names are on.
    pub name_server: Option<names::Server>,
}

/// The way to the worker. Who sends while it is gone is to end.
pub(super) struct Worker {
    wake: UnixStream,
    news: SyncSender<News>,
}

/// The worker is gone.
#[derive(Debug)]
pub(super) struct Gone;

impl Worker {
    pub(super) fn tell(&self, news: News) -> Result<(), Gone> {
        self.news.send(news).map_err(|_| Gone)?;
        // A full pair wakes the loop anyway.
        let _ = (&self.wake).write(&[0]);
        Ok(())
    }
}

impl Agent {
    /// Starts it; it ends when the receiver is dropped.
    pub(super) fn start(
        self,
        wake: UnixStream,
        heard: mpsc::Receiver<Heard>,
    ) -> io::Result<(Receiver<News>, JoinHandle<()>)> {
        let (news, receiver) = sync_channel(MAX_NEWS);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let worker = Worker { wake, news };
        let thread = std::thread::Builder::new()
            .name("mesh".into())
            .spawn(move || runtime.block_on(self.live(worker, heard)))?;
        Ok((receiver, thread))
    }

    async fn live(mut self, worker: Worker, mut heard: mpsc::Receiver<Heard>) {
        let name_server = self.name_server.take();
        let client = match Client::new(
            &self.settings.coordinator,
            self.settings.pin,
            Some(self.settings.credential.clone()),
        ) {
            Ok(client) => client,
            Err(error) => {
                let _ = worker.tell(News::Contact(Contact::Lost(error.to_string())));
                // This host's other names may depend on it.
                return names::serve(name_server, self.names).await;
            }
        };
        let (wishes, wished) = mpsc::channel(MAX_SOUGHT);
        let shared = Shared::new(wishes);
        let (sought, seeking) = mpsc::channel(MAX_SOUGHT);
        let networks = self.networks.clone();
        let own_key = self.own_key.clone();
        let turns = Turns::new(
            own_key.get(),
            &worker,
            &shared,
            &networks,
            self.port.clone(),
            self.fwmark,
        );
        let streams = Streams::new(&worker, &networks, self.port.clone());
        let relays = Relays::new(own_key, &worker, &shared, &turns, &streams);
        let sort = async {
            // What finds no room comes again.
            while let Some(heard) = heard.recv().await {
                match heard {
                    Heard::Stun(bytes) => shared.questions.answered(bytes),
                    Heard::Sought { key, lost } => {
                        let _ = sought.try_send(key);
                        shared.wish(Wish::Sought(key));
                        if lost {
                            shared.lost.notify_one();
                        }
                    }
                    Heard::Reached(key, reached) => shared.wish(Wish::Reached(key, reached)),
                }
            }
        };
        // Whichever ends found the worker gone.
        tokio::select! {
            _ = self.follow(&client, &worker, &shared) => {}
            _ = self.tell(&client, &worker, &shared) => {}
            _ = self.reflect(&worker, &shared) => {}
            _ = self.map(&worker, &shared) => {}
            _ = relays.keep(wished) => {}
            _ = turns.keep() => {}
            _ = streams.keep() => {}
            _ = self.call(&client, seeking) => {}
            () = sort => {}
            () = names::serve(name_server, self.names.clone()) => {}
        }
        let held = shared.held.take();
        if let Some(held) = held {
            let _ = tokio::time::timeout(LAST_WORDS, held.give_back()).await;
        }
    }

    /// Asks for changes, again and again.
    async fn follow(&self, client: &Client, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
        shared.book.replace(cache::load(&self.cache));
        client.know(shared.book.borrow().coordinators());
        // Coordinators in a row that did not answer.
        let mut silent = 0;
        let known: Known = cache::load(&self.known);
        let mut judge = Judge::new(self.settings.trust.clone(), known);
        let (revision, changes) = {
            let book = shared.book.borrow();
            let access = Change::Access(book.access().clone());
            let members = book.members().values().cloned().map(Change::Set);
            (
                book.revision,
                std::iter::once(access).chain(members).collect(),
            )
        };
        self.believe(&mut judge, changes, revision, worker)?;
        // What is on disk may be of another coordinator: it tells of everybody once.
        let (mut since, mut epoch, mut idle) = (0, 0, 0);
        let mut pause = Pause::default();
        let mut stored = tokio::time::Instant::now() - STORE_EVERY;
        judge.keep(&self.known);
        let mut dirty = false;
        loop {
            // The first answer comes at once; then what was kept has time to be written before the next question.
            let wait = if since == 0 { Duration::ZERO } else { WAIT };
            let asked = Instant::now();
            // What waits at an address that this host has no more may wait for long.
            let question = async {
                tokio::select! {
                    answer = client.changes(since, epoch, wait) => Some(answer),
                    () = shared.elsewhere.notified() => None,
                }
            };
            let answer = match dirty || judge.is_dirty() {
                true => match tokio::time::timeout_at(stored + STORE_EVERY, question).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        (stored, dirty) = (tokio::time::Instant::now(), false);
                        self.keep(&shared.book.borrow());
                        judge.keep(&self.known);
                        continue;
                    }
                },
                false => question.await,
            };
            let Some(answer) = answer else { continue };
            match answer {
                Ok(mut changes) => {
                    (pause, silent) = (Pause::default(), 0);
                    (since, epoch) = (changes.revision, changes.epoch);
                    let mut calls = std::mem::take(&mut changes.calls);
                    calls.truncate(MAX_CALLS);
                    if changes.whole {
                        // It may know as little of this host as it takes this host to know of others.
                        shared.retell.set(true);
                        shared.different.notify_one();
                    }
                    let (before, changes, after, revision) = {
                        let mut book = shared.book.borrow_mut();
                        let before = book.relays().to_vec();
                        let coordinators = book.coordinators().to_vec();
                        let changes = book.take(changes);
                        if coordinators != book.coordinators() {
                            client.know(book.coordinators());
                            dirty = true;
                        }
                        (before, changes, book.relays().to_vec(), book.revision)
                    };
                    dirty |= !changes.is_empty() || before != after;
                    let addresses = |relays: &[Relay]| -> Vec<_> {
                        relays.iter().map(|relay| relay.address.clone()).collect()
                    };
                    if addresses(&before) != addresses(&after) {
                        // They are STUN servers, too: with them it is seen what kind of a NAT there is.
                        shared.moved.notify_one();
                    }
                    for change in &changes {
                        if let Change::Set(member) = change
                            && !member.relayed.is_empty()
                        {
                            shared.wish(Wish::Moved(member.public_key));
                        }
                    }
                    let nothing = changes.is_empty() && calls.is_empty();
                    worker.tell(News::Coordinator(client.url()))?;
                    worker.tell(News::Contact(Contact::Connected))?;
                    self.believe(&mut judge, changes, revision, worker)?;
                    if !calls.is_empty() {
                        calls.iter().for_each(|key| shared.wish(Wish::Sought(*key)));
                        worker.tell(News::Called(calls))?;
                    }
                    // A coordinator that answers at once and says nothing is not asked as fast as it answers.
                    idle = if nothing && asked.elapsed() < IDLE_PAUSE {
                        idle + 1
                    } else {
                        0
                    };
                    let slow = idle > IDLE_ANSWERS;
                    tokio::time::sleep(if slow { IDLE_PAUSE } else { BREATH }).await;
                }
                Err(ClientError::Refused(refusal)) if refusal.reason == Reason::NotAMember => {
                    cache::forget(&self.cache);
                    // Who was who is remembered: it may be made a member of this mesh again.
                    judge.keep(&self.known);
                    dirty = false;
                    let changes = shared.book.borrow_mut().clear();
                    (since, epoch) = (0, 0);
                    worker.tell(News::Contact(Contact::Revoked))?;
                    self.believe(&mut judge, changes, 0, worker)?;
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(error) => {
                    // Another coordinator of the mesh says the same: it is asked at once, and it is no loss unless none answers.
                    client.turn();
                    silent += 1;
                    if silent >= client.known() {
                        silent = 0;
                        worker.tell(News::Contact(Contact::Lost(error.to_string())))?;
                        pause.wait().await;
                    }
                }
            }
        }
    }

    /// Has what of the changes is to be believed taken in by the names and by the worker.
    fn believe(
        &self,
        judge: &mut Judge,
        changes: Vec<Change>,
        revision: u64,
        worker: &Worker,
    ) -> Result<(), Gone> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let changes = judge.judge(changes, since_epoch.unwrap_or_default().as_secs());
        if let Some(doubts) = judge.news() {
            worker.tell(News::Doubts(doubts))?;
        }
        self.names.with(|zone| zone.take(&changes));
        worker.tell(News::Changes { revision, changes })
    }

    fn keep(&self, book: &Book) {
        // Without it, a host that starts without a coordinator has no peers: worth a try, not an end.
        let _ = cache::store(&self.cache, book);
    }

    /// Tells where this host may be reached, whenever that is different; likewise its key, which may have become another one while
    /// nobody could be told.
    async fn tell(&self, client: &Client, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
        let mut told_key = None;
        let mut key_told_at = Instant::now();
        let mut told: Option<Endpoints> = None;
        let mut known = Vec::new();
        let mut had = BTreeSet::new();
        let mut pause = Pause::default();
        loop {
            worker.tell(News::Tick)?;
            let port = self.port.load(Ordering::Relaxed);
            let local = Netlink::open().and_then(|n| {
                endpoints::local(&n, self.own_interface, &self.networks, self.fwmark, port)
            });
            // What cannot be asked for now is asked for again.
            if let Ok(local) = local {
                if local != known {
                    known = local;
                    shared.moved.notify_one();
                }
                let mut now = shared.reflexive.borrow().clone();
                if let Some(Ok(mapping)) = &*shared.mapped.borrow()
                    && !now.contains(&mapping.address)
                {
                    now.push(mapping.address);
                }
                let outside = now.iter().map(|address| (false, address.ip()));
                let inside = known.iter().map(|address| (true, address.ip()));
                let has: BTreeSet<(bool, IpAddr)> = outside.chain(inside).collect();
                // Connections may be of the address that is gone.
                if !has.is_superset(&had) {
                    client.connect_anew();
                    shared.elsewhere.notify_one();
                }
                had = has;
                let others = known.iter().filter(|address| !now.contains(address));
                let others: Vec<SocketAddr> = others.copied().collect();
                now.extend(others);
                now.truncate(MAX_ENDPOINTS);
                // IPv6 first, else the best first as before.
                now.sort_by_key(SocketAddr::is_ipv4);
                let now = Endpoints {
                    endpoints: now,
                    relayed: shared.relayed.borrow().clone(),
                };
                let retell = shared.retell.take();
                let own_key = self.own_key.get();
                let again = key_told_at.elapsed() > TELL_KEY_EVERY;
                if retell || again || told_key != Some(own_key) {
                    told_key = match client.rotate(own_key).await {
                        Ok(()) => Some(own_key),
                        // Now it cannot, or will not hear of it.
                        Err(ClientError::Refused(refusal))
                            if !matches!(
                                refusal.reason,
                                Reason::Unavailable | Reason::NotAMember
                            ) =>
                        {
                            Some(own_key)
                        }
                        Err(_) => None,
                    };
                    key_told_at = Instant::now();
                    if told_key.is_none() {
                        pause.wait().await;
                    }
                }
                if retell || told.as_ref() != Some(&now) {
                    match client.tell(&now).await {
                        Ok(()) => {
                            told = Some(now);
                            pause = Pause::default();
                        }
                        // What is wrong is told by the task that asks.
                        Err(_) => {
                            told = None;
                            pause.wait().await;
                        }
                    }
                }
            }
            // Sooner if it is known that something is different.
            let _ = tokio::time::timeout(LOOK_EVERY, shared.different.notified()).await;
        }
    }

    /// Asks what this host looks like from outside: again and again, which keeps what NATs have made of it as it is; and at
    /// once when an address is another one, or when a way to a member has died, since a NAT may have started anew.
    async fn reflect(&self, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
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

    /// Has the router before this host, if there is one, send on a port for as long as it does.
    async fn map(&self, worker: &Worker, shared: &Shared) -> Result<(), Gone> {
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

    /// Has members called that do not answer: what they send back opens the NATs before them.
    async fn call(&self, client: &Client, mut seeking: mpsc::Receiver<PublicKey>) {
        let mut called: BTreeMap<PublicKey, Instant> = BTreeMap::new();
        while let Some(key) = seeking.recv().await {
            called.retain(|_, at| at.elapsed() < CALL_EVERY);
            if called.contains_key(&key) {
                continue;
            }
            called.insert(key, Instant::now());
            // Without a coordinator nobody can be called; the next initiation comes here again.
            let _ = client.call(&Call { public_key: key }).await;
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

/// What the tasks tell each other.
pub(super) struct Shared {
    /// What this host looks like from outside.
    reflexive: RefCell<Vec<SocketAddr>>,
    /// Its relayed addresses at TURN servers.
    pub relayed: RefCell<Vec<SocketAddr>>,
    /// Something of what is told to the coordinator is different.
    pub different: Notify,
    /// What this host looks like from outside is.
    outside: Notify,
    /// The router's port, and how it stands with it.
    held: RefCell<Option<Held>>,
    mapped: RefCell<Option<Result<Mapping, String>>>,
    /// This host's own addresses are.
    moved: Notify,
    /// They have become others: what waits for an answer at the former ones may wait in vain.
    elsewhere: Notify,
    /// A way to a member has died.
    lost: Notify,
    /// What was told has to be told again.
    retell: Cell<bool>,
    /// What waits for an answer.
    pub questions: Questions,
    /// The others, and the mesh's relays with this host's tickets.
    pub book: RefCell<Book>,
    wishes: mpsc::Sender<Wish>,
}

impl Shared {
    fn new(wishes: mpsc::Sender<Wish>) -> Shared {
        Shared {
            reflexive: RefCell::default(),
            relayed: RefCell::default(),
            different: Notify::new(),
            outside: Notify::new(),
            held: RefCell::default(),
            mapped: RefCell::default(),
            moved: Notify::new(),
            elsewhere: Notify::new(),
            lost: Notify::new(),
            retell: Cell::new(false),
            questions: Questions::default(),
            book: RefCell::default(),
            wishes,
        }
    }

    /// This host looks like this from outside.
    fn see(&self, seen: Vec<SocketAddr>) {
        if *self.reflexive.borrow() != seen {
            self.reflexive.replace(seen);
            self.different.notify_one();
            self.outside.notify_one();
        }
    }

    /// For the task of relays. What finds no room comes again.
    pub(super) fn wish(&self, wish: Wish) {
        let _ = self.wishes.try_send(wish);
    }
}

/// Pauses that grow, each up to half as long again by chance: members that lost a coordinator at the same time do not come back at
/// the same time.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) async fn wait(&mut self) {
        let pause = (FIRST_PAUSE * (1 << self.0)).min(LONGEST_PAUSE);
        self.0 = (self.0 + 1).min(7);
        let mut chance = [0];
        // Without chance they are all as long as they are.
        let _ = seikan_sys::random::fill(&mut chance);
        tokio::time::sleep(pause + pause * u32::from(chance[0]) / 512).await;
    }
}

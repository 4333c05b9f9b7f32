//! The thread that talks to the coordinator.
//!
//! Tasks on one thread: one asks for what changed, each question waiting at the coordinator until there is something
//! ([`Agent::follow`]); one asks by STUN what this host looks like from outside ([`Agent::reflect`]); one tells where it may be
//! reached whenever that is different ([`Agent::tell`]); one has the router before it send on a port ([`Agent::map`]); one has
//! members called that do not answer ([`Agent::call`]); one binds this host to relays for those that no direct way reaches
//! ([`super::relay`]), or has TURN servers relay ([`super::turn`]); some answer questions for members' names
//! ([`names::serve`]). None gives up: when a coordinator does not answer another one of the mesh
//! is asked at once; when none does they are asked again, ever less often.

mod follow;
mod outside;
mod tell;

use super::client::Client;
use super::known::{Doubts, Known};
use super::legs::Counters;
use super::mapping::{Held, Mapping};
use super::relay::{Relays, Streams, Wish};
use super::stun::Questions;
use super::turn::Turns;
use super::{Contact, Heard, OwnKey, names};
use ipnet::IpNet;
use seikan_config::MeshSettings;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, Membership};
use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// First pause after something failed; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// News that wait for the worker, at most.
const MAX_NEWS: usize = 16;
/// How long the router may take at the end to take its port back.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// Members to be called that wait, at most.
const MAX_SOUGHT: usize = 64;

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

impl View {
    fn none(name: String, server: SocketAddr) -> View {
        View {
            name,
            server,
            seen: None,
            rtt: None,
        }
    }
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
    /// What was remembered; taken once.
    pub remembered: Cell<Known>,
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
    pub membership: RefCell<Membership>,
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
            membership: RefCell::default(),
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

//! The thread that talks to the coordinator.
//!
//! Two tasks on one thread: one asks for what changed, each question waiting at the coordinator until there is something
//! ([`follow`]); one tells where this host may be reached whenever that is different ([`tell`]). Neither gives up:
//! a coordinator that does not answer is asked again, ever less often.

use super::client::{Client, ClientError};
use super::{Contact, cache, endpoints};
use crate::config::MeshSettings;
use ipnet::IpNet;
use seikan_proto::mesh::{Book, Change, Endpoints, Reason};
use seikan_sys::netlink::Netlink;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// How long a question for changes waits at the coordinator.
const WAIT: Duration = Duration::from_secs(50);
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

/// What the thread has to say.
#[derive(Debug)]
pub(super) enum News {
    /// How it stands with the coordinator.
    Contact(Contact),
    /// Members are different.
    Changes {
        /// Everything up to this revision is told.
        revision: u64,
        /// In this order.
        changes: Vec<Change>,
    },
    /// The worker is to look whether its port is still the same.
    Tick,
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
    /// Where the others are kept.
    pub cache: PathBuf,
}

/// The way to the worker. Who sends while it is gone is to end.
struct Worker {
    wake: UnixStream,
    news: SyncSender<News>,
}

/// The worker is gone.
#[derive(Debug)]
struct Gone;

impl Worker {
    fn tell(&self, news: News) -> Result<(), Gone> {
        self.news.send(news).map_err(|_| Gone)?;
        // A full pair wakes the loop anyway.
        let _ = (&self.wake).write(&[0]);
        Ok(())
    }
}

impl Agent {
    /// Starts it; it ends when the receiver is dropped.
    pub(super) fn start(self, wake: UnixStream) -> io::Result<Receiver<News>> {
        let (news, receiver) = sync_channel(MAX_NEWS);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let worker = Worker { wake, news };
        std::thread::Builder::new()
            .name("mesh".into())
            .spawn(move || runtime.block_on(self.live(worker)))?;
        Ok(receiver)
    }

    async fn live(self, worker: Worker) {
        let client = match Client::new(
            &self.settings.coordinator,
            self.settings.pin,
            Some(self.settings.credential.clone()),
        ) {
            Ok(client) => client,
            Err(error) => {
                let _ = worker.tell(News::Contact(Contact::Lost(error.to_string())));
                return;
            }
        };
        // Whichever ends found the worker gone.
        tokio::select! {
            _ = self.follow(&client, &worker) => {}
            _ = self.tell(&client, &worker) => {}
        }
    }

    /// Asks for changes, again and again.
    async fn follow(&self, client: &Client, worker: &Worker) -> Result<(), Gone> {
        let mut book = cache::load(&self.cache);
        worker.tell(News::Changes {
            revision: book.revision,
            changes: book.members().values().cloned().map(Change::Set).collect(),
        })?;
        // What is on disk may be of another coordinator: it tells of everybody once.
        let mut since = 0;
        let mut pause = Pause::default();
        let mut stored = tokio::time::Instant::now() - STORE_EVERY;
        let mut dirty = false;
        loop {
            // The first answer comes at once; then what was kept has time to be written before the next question.
            let wait = if since == 0 { Duration::ZERO } else { WAIT };
            let question = client.changes(since, wait);
            let answer = match dirty {
                true => match tokio::time::timeout_at(stored + STORE_EVERY, question).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        (stored, dirty) = (tokio::time::Instant::now(), false);
                        self.keep(&book);
                        continue;
                    }
                },
                false => question.await,
            };
            match answer {
                Ok(changes) => {
                    pause = Pause::default();
                    since = changes.revision;
                    let changes = book.take(changes);
                    dirty |= !changes.is_empty();
                    worker.tell(News::Contact(Contact::Connected))?;
                    worker.tell(News::Changes {
                        revision: book.revision,
                        changes,
                    })?;
                }
                Err(ClientError::Refused(refusal)) if refusal.reason == Reason::NotAMember => {
                    cache::forget(&self.cache);
                    dirty = false;
                    let changes = book.clear();
                    since = 0;
                    worker.tell(News::Contact(Contact::Revoked))?;
                    worker.tell(News::Changes {
                        revision: 0,
                        changes,
                    })?;
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(error) => {
                    worker.tell(News::Contact(Contact::Lost(error.to_string())))?;
                    // Another coordinator in its place may count revisions anew, which its answer says.
                    pause.wait().await;
                }
            }
        }
    }

    fn keep(&self, book: &Book) {
        // Without it, a host that starts without a coordinator has no peers: worth a try, not an end.
        let _ = cache::store(&self.cache, book);
    }

    /// Tells where this host may be reached, whenever that is different.
    async fn tell(&self, client: &Client, worker: &Worker) -> Result<(), Gone> {
        let mut told: Option<Vec<SocketAddr>> = None;
        let mut pause = Pause::default();
        loop {
            worker.tell(News::Tick)?;
            let port = self.port.load(Ordering::Relaxed);
            let now = Netlink::open()
                .and_then(|n| endpoints::local(&n, self.own_interface, &self.networks, port));
            // What cannot be asked for now is asked for again.
            if let Ok(now) = now
                && told.as_ref() != Some(&now)
            {
                let endpoints = Endpoints {
                    endpoints: now.clone(),
                };
                match client.tell(&endpoints).await {
                    Ok(()) => {
                        told = Some(now);
                        pause = Pause::default();
                    }
                    // What is wrong is told by the other task.
                    Err(_) => pause.wait().await,
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// Pauses that grow, each up to half as long again by chance: members that lost a coordinator at the same time do not come back at
/// the same time.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    async fn wait(&mut self) {
        let pause = (FIRST_PAUSE * (1 << self.0)).min(LONGEST_PAUSE);
        self.0 = (self.0 + 1).min(7);
        let mut chance = [0];
        // Without chance they are all as long as they are.
        let _ = seikan_sys::random::fill(&mut chance);
        tokio::time::sleep(pause + pause * u32::from(chance[0]) / 512).await;
    }
}

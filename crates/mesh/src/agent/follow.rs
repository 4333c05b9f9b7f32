//! Follows the changes of the membership at the coordinator.

use super::Agent;
use crate::cache;
use crate::client::{Client, ClientError};
use crate::event::{AgentEvent, Contact, Gone};
use crate::shared::{LONGEST_PAUSE, Pause, RelayEvent, Shared};
use crate::trust::TrustStore;
use seikan_proto::mesh::{Change, Cursor, MAX_CALLS, Reason, Relay};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::MutexGuard;

/// Time for which the coordinator may hold a request for changes.
const WAIT: Duration = Duration::from_secs(50);
/// Minimum pause between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause after [`IDLE_ANSWERS`] consecutive answers that were empty and came sooner than this.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// Early empty answers that are tolerated: each report of this host at its start ends a pending request.
const IDLE_ANSWERS: u32 = 8;
/// Minimum interval between two writes of the state on disk.
const STORE_EVERY: Duration = Duration::from_secs(5);

impl Agent {
    /// Requests changes, forever.
    pub(super) async fn follow(&self, client: &Client, shared: &Shared) -> Result<(), Gone> {
        // Number of coordinators in a row that did not answer.
        let mut silent = 0;
        let mut on_disk = OnDisk {
            agent: self,
            shared,
            trust_store: self.trust_store.lock().await,
            is_changed: false,
            written_at: tokio::time::Instant::now() - STORE_EVERY,
        };
        let (revision, changes) = {
            let membership = shared.membership.borrow();
            let access = Change::Access(membership.access().clone());
            let members = membership.members().values().cloned().map(Change::Set);
            (
                membership.revision,
                std::iter::once(access).chain(members).collect(),
            )
        };
        self.apply_trusted(&mut on_disk.trust_store, changes, revision, shared)?;
        // The stored state may be of another coordinator, so the first answer contains all members.
        let (mut cursor, mut idle) = (Cursor::default(), 0);
        let mut pause = Pause::default();
        on_disk.trust_store.store(&self.known_file);
        loop {
            // The first answer comes at once; then the state on disk is written before the next request.
            let wait = if cursor.revision == 0 {
                Duration::ZERO
            } else {
                WAIT
            };
            let requested_at = Instant::now();
            // A request from an address that this host has lost may hang for long.
            let request = async {
                tokio::select! {
                    answer = client.changes(cursor, wait) => Some(answer),
                    () = shared.connections_stale.notified() => None,
                }
            };
            let answer = if on_disk.is_dirty() {
                let due = on_disk.written_at + STORE_EVERY;
                match tokio::time::timeout_at(due, request).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        on_disk.write();
                        continue;
                    }
                }
            } else {
                request.await
            };
            let Some(answer) = answer else { continue };
            match answer {
                Ok(mut changes) => {
                    (pause, silent) = (Pause::default(), 0);
                    cursor = changes.cursor();
                    let mut calls = std::mem::take(&mut changes.calls);
                    calls.truncate(MAX_CALLS);
                    if changes.whole {
                        // A coordinator that sends everything may also have lost this host's endpoints.
                        shared.report_again.set(true);
                        shared.endpoints_changed.notify_one();
                    }
                    let (before, changes, after, revision) = {
                        let mut membership = shared.membership.borrow_mut();
                        let before = membership.relays().to_vec();
                        let coordinators = membership.coordinators().to_vec();
                        let changes = membership.take(changes);
                        if coordinators != membership.coordinators() {
                            client.set_others(membership.coordinators());
                            on_disk.is_changed = true;
                        }
                        (
                            before,
                            changes,
                            membership.relays().to_vec(),
                            membership.revision,
                        )
                    };
                    on_disk.is_changed |= !changes.is_empty() || before != after;
                    let addresses = |relays: &[Relay]| -> Vec<_> {
                        relays.iter().map(|relay| relay.address.clone()).collect()
                    };
                    if addresses(&before) != addresses(&after) {
                        // Relays are STUN servers too; together they show the type of the NAT.
                        shared.moved.notify_one();
                    }
                    for change in &changes {
                        if let Change::Set(member) = change
                            && !member.relayed.is_empty()
                        {
                            shared.notify_relays(RelayEvent::Moved(member.public_key));
                        }
                    }
                    let nothing = changes.is_empty() && calls.is_empty();
                    shared.send(AgentEvent::Coordinator(client.url()))?;
                    shared.send(AgentEvent::Contact(Contact::Connected))?;
                    self.apply_trusted(&mut on_disk.trust_store, changes, revision, shared)?;
                    if !calls.is_empty() {
                        calls
                            .iter()
                            .for_each(|key| shared.notify_relays(RelayEvent::Sought(*key)));
                        shared.send(AgentEvent::CallRequests(calls))?;
                    }
                    // A coordinator that returns early empty answers is polled more slowly.
                    idle = if nothing && requested_at.elapsed() < IDLE_PAUSE {
                        idle + 1
                    } else {
                        0
                    };
                    let slow = idle > IDLE_ANSWERS;
                    tokio::time::sleep(if slow { IDLE_PAUSE } else { PAUSE }).await;
                }
                Err(ClientError::Refused(refusal)) if refusal.reason == Reason::NotAMember => {
                    cache::remove(&self.cache);
                    // Known keys are kept: this host may join the mesh again.
                    on_disk.trust_store.store(&self.known_file);
                    on_disk.is_changed = false;
                    let changes = shared.membership.borrow_mut().clear();
                    cursor = Cursor::default();
                    shared.send(AgentEvent::Contact(Contact::Revoked))?;
                    self.apply_trusted(&mut on_disk.trust_store, changes, 0, shared)?;
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(error) => {
                    // All coordinators of a mesh have the same state: the next one is used at once, and contact
                    // is lost only if none answers.
                    client.use_next();
                    silent += 1;
                    if silent >= client.count() {
                        silent = 0;
                        shared.send(AgentEvent::Contact(Contact::Lost(error.to_string())))?;
                        pause.wait().await;
                    }
                }
            }
        }
    }

    /// Passes the changes that pass the trust store to the names and to the worker.
    fn apply_trusted(
        &self,
        trust_store: &mut TrustStore,
        changes: Vec<Change>,
        revision: u64,
        shared: &Shared,
    ) -> Result<(), Gone> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let changes = trust_store.filter(changes, since_epoch.unwrap_or_default().as_secs());
        if let Some(key_conflicts) = trust_store.take_changed_conflicts() {
            shared.send(AgentEvent::KeyConflicts(key_conflicts))?;
        }
        self.names.with(|zone| zone.take(&changes));
        shared.send(AgentEvent::Changes { revision, changes })
    }
}

/// The state on disk. It is written at most once per [`STORE_EVERY`], and when this task ends because the tunnel
/// stops or this host becomes the standby gateway.
struct OnDisk<'a> {
    agent: &'a Agent,
    shared: &'a Shared,
    trust_store: MutexGuard<'a, TrustStore>,
    /// The membership has changed since it was written.
    is_changed: bool,
    written_at: tokio::time::Instant,
}

impl OnDisk<'_> {
    fn is_dirty(&self) -> bool {
        self.is_changed || self.trust_store.is_dirty()
    }

    fn write(&mut self) {
        (self.written_at, self.is_changed) = (tokio::time::Instant::now(), false);
        // If this fails, this host starts without peers while no coordinator answers, which is no reason to
        // stop.
        let _ = cache::store(&self.agent.cache, &*self.shared.membership.borrow());
        self.trust_store.store(&self.agent.known_file);
    }
}

impl Drop for OnDisk<'_> {
    fn drop(&mut self) {
        if self.is_dirty() {
            self.write();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Worker;
    use crate::names;
    use crate::random::SystemRandom;
    use crate::shared::{OwnKey, Tunnel};
    use crate::transport::Waker;
    use crate::web_proxy::WebProxies;
    use seikan_config::{MeshSettings, Trust};
    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::{BASE, Changes, Credential, Member, Membership};
    use seikan_tls::Certificate;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;
    use tokio::sync::mpsc;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn member(n: u8) -> Member {
        Member {
            name: format!("m{n}").parse().expect("a name"),
            public_key: PublicKey::from_bytes([n; 32]),
            addresses: vec![[100, 80, 0, n].into()],
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// A coordinator that answers each request with one more member, up to this number.
    fn serve(listener: &TcpListener, tls: &Arc<rustls::ServerConfig>, members: u64) {
        for socket in listener.incoming() {
            let (socket, tls) = (socket.expect("a connection"), tls.clone());
            // A client that ends its request breaks its connection.
            std::thread::spawn(move || drop(answer(socket, tls, members)));
        }
    }

    fn answer(
        socket: TcpStream,
        tls: Arc<rustls::ServerConfig>,
        members: u64,
    ) -> std::io::Result<()> {
        let connection = rustls::ServerConnection::new(tls).map_err(std::io::Error::other)?;
        let mut stream = BufReader::new(rustls::StreamOwned::new(connection, socket));
        loop {
            let mut lines = Vec::new();
            while lines.last().is_none_or(|line: &String| line != "\r\n") {
                let mut line = String::new();
                if stream.read_line(&mut line)? == 0 {
                    return Ok(());
                }
                lines.push(line);
            }
            let request = format!("GET {BASE}/changes?since=");
            let since = lines[0].strip_prefix(&request).expect("a poll");
            let since: u64 = since
                .split('&')
                .next()
                .unwrap_or_default()
                .parse()
                .expect("a number");
            if since == members {
                std::thread::sleep(PATIENCE);
            }
            let changes = Changes {
                revision: since + 1,
                whole: since == 0,
                members: vec![member(since as u8 + 1)],
                ..Changes::default()
            };
            let body = serde_json::to_string(&changes)?;
            let length = body.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
            stream.get_mut().write_all(answer.as_bytes())?;
        }
    }

    fn agent(url: &str, certificate: &Certificate, state: &Path) -> Agent {
        Agent {
            settings: MeshSettings {
                coordinator: url.parse().expect("a URL"),
                pin: Some(certificate.pin()),
                credential: Credential::generate(&mut SystemRandom),
                stun: Vec::new(),
                names: false,
                port_mapping: false,
                trust: Trust::default(),
            },
            interface: Some(1),
            tunnel: Tunnel {
                networks: Vec::new(),
                port: Arc::default(),
                fwmark: None,
                own_key: OwnKey::new(PublicKey::from_bytes([9; 32])),
            },
            devices: None,
            cache: cache::file(state),
            known_file: cache::known_file(state),
            trust_store: tokio::sync::Mutex::new(TrustStore::new(
                Trust::default(),
                cache::load(&cache::known_file(state)),
            )),
            names: names::Names::new(Vec::new()),
            web_proxies: WebProxies::default(),
        }
    }

    #[test]
    fn changes_shortly_before_the_end_are_stored() {
        let folder = tempfile::tempdir().expect("a folder");
        let names = ["127.0.0.1".to_owned()];
        let certificate = Certificate::own(&folder.path().join("tls"), "a server", &names);
        let certificate = certificate.expect("a certificate");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let url = format!("https://{}", listener.local_addr().expect("an address"));
        let tls = Arc::new(certificate.server_config().expect("a configuration"));
        std::thread::spawn(move || serve(&listener, &tls, 2));

        let state = folder.path().join("state");
        let agent = agent(&url, &certificate, &state);
        let (wake, _awake) = UnixStream::pair().expect("a pair");
        let (events, _received) = sync_channel(1000);
        let (relay_events, _for_relays) = mpsc::channel(1);
        let waker = Waker(Arc::new(wake));
        let worker = Worker { waker, events };
        let shared = Shared::new(worker, agent.tunnel.clone(), relay_events);
        let MeshSettings {
            coordinator,
            pin,
            credential,
            ..
        } = &agent.settings;
        let client = Client::new(
            coordinator,
            *pin,
            Some(credential.clone()),
            WebProxies::default(),
        )
        .expect("a client");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            // The state is written after the first answer, and the second one follows at once.
            let knows_both = async {
                while shared.membership.borrow().revision < 2 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                _ = agent.follow(&client, &shared) => unreachable!("the worker lives"),
                both = tokio::time::timeout(PATIENCE, knows_both) => both.expect("both members"),
            }
        });
        let stored: Membership = cache::load(&agent.cache);
        assert_eq!(stored.members().len(), 2);
        assert_eq!(stored, *shared.membership.borrow());
        let known = std::fs::read_to_string(&agent.known_file).expect("the known keys");
        assert!(known.contains("m1") && known.contains("m2"), "{known}");
    }
}

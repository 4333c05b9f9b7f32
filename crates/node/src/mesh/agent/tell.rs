//! What the coordinator is told, and asked to tell others.

use super::{Agent, Gone, News, Pause, Shared, Worker};
use crate::mesh::client::{Client, ClientError};
use crate::mesh::endpoints;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Call, Endpoints, MAX_ENDPOINTS, Reason};
use seikan_sys::netlink::Netlink;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often the host's addresses are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How often this host's key is told, changed or not: what became of it, if an answer was lost, nobody knows.
const TELL_KEY_EVERY: Duration = Duration::from_secs(120);
/// Least time between two calls of one member.
const CALL_EVERY: Duration = Duration::from_secs(1);

impl Agent {
    /// Tells where this host may be reached, whenever that is different; likewise its key, which may have become another one while
    /// nobody could be told.
    pub(super) async fn tell(
        &self,
        client: &Client,
        worker: &Worker,
        shared: &Shared,
    ) -> Result<(), Gone> {
        let mut told_key = None;
        let mut key_told_at = Instant::now();
        let mut told: Option<Endpoints> = None;
        let mut known = Vec::new();
        let mut outside: BTreeMap<bool, IpAddr> = BTreeMap::new();
        let mut pause = Pause::default();
        loop {
            worker.tell(News::Tick)?;
            let port = self.port.load(Ordering::Relaxed);
            let local = Netlink::open().and_then(|n| {
                endpoints::local(&n, self.own_interface, &self.networks, self.fwmark, port)
            });
            // What cannot be asked for now is asked for again.
            if let Ok(local) = local {
                // Connections may be of an address that this host has no more, or the NAT before it.
                let mut elsewhere = false;
                if local != known {
                    elsewhere = !known.is_empty();
                    known = local;
                    shared.moved.notify_one();
                }
                let mut now = shared.reflexive.borrow().clone();
                // What merely is not seen any more may be there as before.
                for seen in &now {
                    let before = outside.insert(seen.is_ipv6(), seen.ip());
                    elsewhere |= before.is_some_and(|before| before != seen.ip());
                }
                if elsewhere {
                    client.connect_anew();
                    shared.elsewhere.notify_one();
                }
                if let Some(Ok(mapping)) = &*shared.mapped.borrow()
                    && !now.contains(&mapping.address)
                {
                    now.push(mapping.address);
                }
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

    /// Has members called that do not answer: what they send back opens the NATs before them.
    pub(super) async fn call(&self, client: &Client, mut seeking: mpsc::Receiver<PublicKey>) {
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

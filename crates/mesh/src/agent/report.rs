//! Reports of this host to the coordinator.

use super::Agent;
use crate::client::{Client, ClientError};
use crate::endpoints::{self, is_routable};
use crate::event::{AgentEvent, Gone};
use crate::shared::{Pause, Shared};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Call, Devices, Endpoints, MAX_ENDPOINTS, Reason};
use seikan_sys::netlink::Netlink;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Interval between two checks of the host's addresses.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Interval between two reports of an unchanged key: a lost answer leaves the last report's result unknown.
const REPORT_KEY_EVERY: Duration = Duration::from_secs(120);
/// Minimum interval between two calls of one member.
const CALL_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of calls without an answer of the coordinator.
const CALLS_AT_A_TIME: usize = 16;
/// How long a reflexive address counts as current: longer than two rounds of STUN requests.
const LATELY: Duration = Duration::from_secs(60);
/// Maximum number of current reflexive addresses of one family.
const MAX_SIGHTS: usize = 4;

impl Agent {
    /// Reports this host's endpoints whenever they change, its key, which may have changed while no coordinator
    /// answered, and the devices behind it.
    pub(super) async fn report(&self, client: &Client, shared: &Shared) -> Result<(), Gone> {
        let mut reported_key = None;
        let mut key_reported_at = Instant::now();
        let mut reported: Option<Endpoints> = None;
        let mut devices_reported = false;
        let mut local = Vec::new();
        let mut sights: [Sights; 2] = Default::default();
        let mut pause = Pause::default();
        loop {
            shared.send(AgentEvent::Tick)?;
            // If the kernel does not answer now, the next check retries.
            if let Some(addresses) = self.local_addresses(shared) {
                let mut has_moved = false;
                if addresses != local {
                    has_moved = !local.is_empty();
                    local = addresses;
                    shared.moved.notify_one();
                }
                for seen in &*shared.reflexive.borrow() {
                    let sights = &mut sights[usize::from(seen.is_ipv6())];
                    has_moved |= sights.is_elsewhere(seen.ip(), Instant::now());
                }
                if has_moved {
                    // Connections may be from an address that this host or its NAT no longer has.
                    client.reconnect();
                    shared.connections_stale.notify_one();
                }
                let endpoints = endpoints_of(&local, shared);
                let report_again = shared.report_again.take();
                let own_key = shared.tunnel.own_key.get();
                let key_is_due = key_reported_at.elapsed() > REPORT_KEY_EVERY;
                if report_again || key_is_due || reported_key != Some(own_key) {
                    reported_key = report_key(client, own_key).await.then_some(own_key);
                    key_reported_at = Instant::now();
                    if reported_key.is_none() {
                        pause.wait().await;
                    }
                }
                // Send a refused list again too: there may be space now.
                let devices_are_due = key_is_due && self.devices.is_some();
                if report_again || devices_are_due || !devices_reported {
                    devices_reported = self.report_devices(client, shared).await?;
                    if !devices_reported {
                        pause.wait().await;
                    }
                }
                if report_again || reported.as_ref() != Some(&endpoints) {
                    // The task that follows the changes reports an error.
                    let result = client.report_endpoints(&endpoints).await;
                    reported = result.is_ok().then_some(endpoints);
                    match reported {
                        Some(_) => pause = Pause::default(),
                        None => pause.wait().await,
                    }
                }
            }
            // Earlier if a change is signalled.
            let _ = tokio::time::timeout(LOOK_EVERY, shared.endpoints_changed.notified()).await;
        }
    }

    /// Reports the devices behind this host; returns whether the coordinator has decided about them. A host that
    /// is no gateway reports that it has none, since it may have been one, and does not know of pending devices.
    async fn report_devices(&self, client: &Client, shared: &Shared) -> Result<bool, Gone> {
        let none = Devices::default();
        let devices = self.devices.as_ref().unwrap_or(&none);
        let refusal = match client.report_devices(devices).await {
            Ok(()) => None,
            Err(ClientError::Refused(refusal)) if is_decision(refusal.reason) => {
                if self.devices.is_none() && refusal.reason == Reason::TooMany {
                    return Ok(false);
                }
                // A coordinator that knows no devices has none of this host.
                self.devices.is_some().then_some(refusal.message)
            }
            Err(_) => return Ok(false),
        };
        shared.send(AgentEvent::DevicesReported { refusal })?;
        Ok(true)
    }

    fn local_addresses(&self, shared: &Shared) -> Option<Vec<SocketAddr>> {
        let netlink = Netlink::open().ok()?;
        let (tunnel, port) = (&shared.tunnel, shared.tunnel.current_port());
        endpoints::local(
            &netlink,
            self.interface,
            &tunnel.networks,
            tunnel.fwmark,
            port,
        )
        .ok()
    }

    /// Asks the coordinator to call members that do not answer: their datagrams open their NATs.
    pub(super) async fn call(&self, client: &Client, to_call: mpsc::Receiver<PublicKey>) {
        let call = async |key| {
            // If this fails, no member is called. The next initiation calls again.
            let _ = client.call(&Call { public_key: key }).await;
        };
        call_all(to_call, call).await;
    }
}

/// Calls members, [`CALLS_AT_A_TIME`]: the whole initiation follows an opener after a second
/// ([`seikan_proto::constants::OPENING_TIME`]), and the member should have sent by then.
async fn call_all(mut to_call: mpsc::Receiver<PublicKey>, call: impl AsyncFn(PublicKey)) {
    let mut requested_at: BTreeMap<PublicKey, Instant> = BTreeMap::new();
    let mut pending = FuturesUnordered::new();
    loop {
        tokio::select! {
            key = to_call.recv(), if pending.len() < CALLS_AT_A_TIME => {
                let Some(key) = key else { return };
                requested_at.retain(|_, at| at.elapsed() < CALL_EVERY);
                if let Entry::Vacant(entry) = requested_at.entry(key) {
                    entry.insert(Instant::now());
                    pending.push(call(key));
                }
            }
            Some(()) = pending.next() => {}
        }
    }
}

/// Returns the endpoints to report: reflexive addresses, a mapped port, and local addresses.
fn endpoints_of(local: &[SocketAddr], shared: &Shared) -> Endpoints {
    let reflexive = shared.reflexive.borrow();
    let mapped = shared.mapped.borrow();
    let mapped = mapped.iter().flatten().map(|mapping| &mapping.address);
    let mut endpoints = usable(reflexive.iter().chain(mapped).chain(local));
    endpoints.truncate(MAX_ENDPOINTS);
    // IPv6 first, otherwise the order of preference as before.
    endpoints.sort_by_key(SocketAddr::is_ipv4);
    Endpoints {
        endpoints,
        relayed: usable(&*shared.relayed.borrow()),
    }
}

/// Returns the addresses that other hosts could send to, each once and in canonical form. Servers supply some of
/// them, so they may be anything.
fn usable<'a>(addresses: impl IntoIterator<Item = &'a SocketAddr>) -> Vec<SocketAddr> {
    let mut usable = Vec::new();
    for address in addresses {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let is_usable = address.port() != 0 && is_routable(address.ip());
        if is_usable && !usable.contains(&address) {
            usable.push(address);
        }
    }
    usable
}

/// Reports this host's key; returns whether the coordinator has decided about it, also if it rejects the key.
async fn report_key(client: &Client, own_key: PublicKey) -> bool {
    match client.rotate(own_key).await {
        Err(ClientError::Refused(refusal)) => is_decision(refusal.reason),
        result => result.is_ok(),
    }
}

/// Whether a refusal is about the reported values, so that a repetition changes nothing.
fn is_decision(reason: Reason) -> bool {
    !matches!(reason, Reason::Unavailable | Reason::NotAMember)
}

/// The current reflexive addresses of one family, the latest first. A router with several uplinks uses them in
/// turn: a host seen at the same addresses again has not moved.
#[derive(Default)]
struct Sights(Vec<(IpAddr, Instant)>);

impl Sights {
    /// Whether this host has moved to a new address. An address that was merely not observed for a while is not
    /// new.
    fn is_elsewhere(&mut self, seen: IpAddr, now: Instant) -> bool {
        let latest = self.0.first().map(|(latest, _)| *latest);
        self.0
            .retain(|(ip, at)| Some(*ip) == latest || now.duration_since(*at) < LATELY);
        let known = self.0.iter().any(|(ip, _)| *ip == seen);
        self.0.retain(|(ip, _)| *ip != seen);
        self.0.insert(0, (seen, now));
        self.0.truncate(MAX_SIGHTS);
        latest.is_some() && !known
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn a_call_does_not_wait_for_the_calls_before_it() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let key = |n: usize| PublicKey::from_bytes([n as u8; 32]);
        let called = RefCell::new(Vec::new());
        let waits_forever = async |key| {
            called.borrow_mut().push(key);
            std::future::pending().await
        };
        runtime.expect("a runtime").block_on(async {
            let (sought, to_call) = mpsc::channel(64);
            for n in 0..=CALLS_AT_A_TIME {
                // Twice: a member is called once a second.
                sought.send(key(n)).await.expect("sent");
                sought.send(key(n)).await.expect("sent");
            }
            let calling = call_all(to_call, waits_forever);
            let ended = tokio::time::timeout(Duration::from_millis(100), calling).await;
            assert!(ended.is_err(), "calls are pending");
        });
        let expected: Vec<PublicKey> = (0..CALLS_AT_A_TIME).map(key).collect();
        assert_eq!(called.into_inner(), expected);
    }

    #[test]
    fn only_addresses_that_others_can_send_to_are_reported() {
        let at = |text: &str| text.parse::<SocketAddr>().expect(text);
        let all = [
            "0.0.0.0:7",
            "[::ffff:0.0.0.0]:7",
            "192.0.2.1:0",
            "255.255.255.255:7",
            "[::ffff:255.255.255.255]:7",
            "224.0.0.1:7",
            "127.0.0.1:7",
            "[::ffff:127.0.0.1]:7",
            "169.254.1.1:7",
            "[fe80::1%2]:7",
            "[2001:db8::1]:7",
            "[::ffff:192.0.2.1]:7",
            "192.0.2.1:7",
            "10.0.0.5:7",
        ];
        let expected = ["[2001:db8::1]:7", "192.0.2.1:7", "10.0.0.5:7"];
        assert_eq!(usable(&all.map(at)), expected.map(at));
    }

    /// Whether a host has moved, for each observation of a second and a host number.
    fn moves(seen: &[(u64, u8)]) -> Vec<bool> {
        let start = Instant::now();
        let mut sights = Sights::default();
        let mut is_elsewhere = |(at, host): &(u64, u8)| {
            let ip = IpAddr::from([192, 0, 2, *host]);
            sights.is_elsewhere(ip, start + Duration::from_secs(*at))
        };
        seen.iter().map(&mut is_elsewhere).collect()
    }

    #[test]
    fn alternating_uplinks_count_as_one_move() {
        let turns: Vec<_> = (0..10).map(|n| (25 * n, n as u8 % 2)).collect();
        let mut expected = [false; 10];
        expected[1] = true;
        assert_eq!(moves(&turns), expected);
    }

    #[test]
    fn a_return_after_a_minute_is_another_move() {
        let seen = [(0, 1), (2, 1), (4, 2), (34, 2), (61, 2), (62, 1), (63, 1)];
        let expected = [false, false, true, false, false, true, false];
        assert_eq!(moves(&seen), expected);
    }

    #[test]
    fn after_a_long_gap_only_a_new_address_is_a_move() {
        assert_eq!(moves(&[(0, 1), (900, 1)]), [false, false]);
        assert_eq!(moves(&[(0, 1), (900, 2)]), [false, true]);
        // The address before the last is no longer current.
        assert_eq!(moves(&[(0, 1), (2, 2), (900, 1)]), [false, true, true]);
    }

    #[test]
    fn a_new_address_each_time_is_a_move_each_time() {
        let seen: Vec<_> = (0..=MAX_SIGHTS as u8).cycle().take(11).collect();
        let seen: Vec<_> = (0..).zip(seen).collect();
        let moved = moves(&seen);
        assert!(!moved[0] && moved[1..].iter().all(|moved| *moved));
    }
}

//! Checks that this host stays reachable for its operators while it is being changed.
//!
//! Pings the next hop of each default route, and the client of this SSH session. Hosts that answer
//! before the first change are pinged continuously. If one of them misses [`TRIES`] requests in a
//! row, the change must be reverted.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use seikan_sys::echo::{Echo, Outcome};
use seikan_sys::netlink::{Family, Netlink, TABLE_MAIN};
use seikan_ui::Interrupt;

use crate::ssh;

/// Interval of requests.
const PAUSE: Duration = Duration::from_millis(250);
/// Timeout of a response; full queues delay it.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Unanswered requests in a row that count as unreachable: one may be lost.
const TRIES: u32 = 3;
/// Maximum number of hosts to ping.
const MAX_TARGETS: usize = 4;

/// Pings until it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Interrupt,
    threads: Vec<JoinHandle<()>>,
    watched: Vec<IpAddr>,
    silent: Arc<OnceLock<IpAddr>>,
}

impl Watchdog {
    /// Finds the hosts that answer, for at most a second, and starts to ping them.
    pub fn start() -> Watchdog {
        let probes: Vec<JoinHandle<Option<(IpAddr, Echo)>>> = targets()
            .into_iter()
            .map(|(target, link)| {
                std::thread::spawn(move || {
                    let echo = Echo::open(target, &link).ok()?;
                    let answered = echo.ping(0, echo.smallest(), TIMEOUT);
                    matches!(answered, Ok(Outcome::Answered(_))).then_some((target, echo))
                })
            })
            .collect();
        let mut watchdog = Watchdog {
            stop: Interrupt::new(),
            threads: Vec::new(),
            watched: Vec::new(),
            silent: Arc::default(),
        };
        for (target, echo) in probes.into_iter().filter_map(|thread| thread.join().ok()?) {
            watchdog.watched.push(target);
            let (stop, silent) = (watchdog.stop.clone(), Arc::clone(&watchdog.silent));
            let ask = move || watch(target, &echo, &stop, &silent);
            watchdog.threads.push(std::thread::spawn(ask));
        }
        watchdog
    }

    /// Hosts that are pinged; empty if none answered.
    pub fn watched(&self) -> &[IpAddr] {
        &self.watched
    }

    /// The first host that has stopped answering.
    pub fn silent(&self) -> Option<IpAddr> {
        self.silent.get().copied()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.raise();
        for thread in self.threads.drain(..) {
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}

fn watch(target: IpAddr, echo: &Echo, stop: &Interrupt, silent: &OnceLock<IpAddr>) {
    let mut missed = 0;
    for sequence in (0..=u16::MAX).cycle() {
        if stop.sleep(PAUSE).is_err() {
            return;
        }
        match echo.ping(sequence, echo.smallest(), TIMEOUT) {
            Ok(Outcome::Answered(_)) => missed = 0,
            // A request that cannot be sent counts as unanswered.
            Ok(Outcome::Silent | Outcome::TooBig) | Err(_) => missed += 1,
        }
        if missed == TRIES {
            // Only the first one is kept.
            let _ = silent.set(target);
            return;
        }
    }
}

/// Returns the hosts to ping, and the interfaces towards them.
fn targets() -> Vec<(IpAddr, String)> {
    // If routes cannot be read, only the tunnel is checked.
    let Ok(netlink) = Netlink::open() else {
        return Vec::new();
    };
    let routes = [Family::V4, Family::V6]
        .into_iter()
        .flat_map(|family| netlink.routes(family, TABLE_MAIN).unwrap_or_default());
    let hops = routes
        .filter(|route| route.destination.prefix_len() == 0)
        .filter_map(|route| Some((route.gateway?, route.device?)));
    let user = ssh::session().map(|session| session.client);
    let user = user.and_then(|user| Some((user, netlink.route_get(user, None).ok()?.device)));
    let mut found: Vec<(IpAddr, String)> = user
        .into_iter()
        .chain(hops)
        .filter_map(|(target, device)| Some((target, netlink.link_by_index(device).ok()?.name)))
        .collect();
    found.sort();
    found.dedup();
    found.truncate(MAX_TARGETS);
    found
}

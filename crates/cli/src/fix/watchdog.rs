//! Checks that this host stays reachable for its operators while it is being changed.
//!
//! Pings the next hop of each default route, and the client of this SSH session. Hosts that answer
//! before the first change are pinged continuously. If one of them misses [`TRIES`] requests in a
//! row, the change must be reverted.

use std::fs;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use seikan_sys::echo::{Echo, Outcome};
use seikan_sys::netlink::{Family, Netlink, TABLE_MAIN};
use seikan_ui::Interrupt;

/// Interval of requests.
const PAUSE: Duration = Duration::from_millis(250);
/// Timeout of a response; full queues delay it.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Unanswered requests in a row that count as unreachable: one may be lost.
const TRIES: u32 = 3;
/// Maximum number of hosts to ping.
const MAX_TARGETS: usize = 4;
/// Maximum number of ancestors of this process to search for an SSH session: shells, sudo, tmux and
/// others are in between.
const MAX_PARENTS: usize = 16;

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
    // Without routes only the tunnel is checked.
    let Ok(netlink) = Netlink::open() else {
        return Vec::new();
    };
    let routes = [Family::V4, Family::V6]
        .into_iter()
        .flat_map(|family| netlink.routes(family, TABLE_MAIN).unwrap_or_default());
    let hops = routes
        .filter(|route| route.destination.prefix_len() == 0)
        .filter_map(|route| Some((route.gateway?, route.device?)));
    let user = session().and_then(|user| Some((user, netlink.route_get(user, None).ok()?.device)));
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

/// Returns the client of this process's SSH session. `sudo` removes the variable, so the ancestors
/// of this process are searched.
fn session() -> Option<IpAddr> {
    let mut pid = std::process::id();
    for _ in 0..MAX_PARENTS {
        if let Some(client) = fs::read(format!("/proc/{pid}/environ"))
            .ok()
            .and_then(|environment| client(&environment))
        {
            return Some(client);
        }
        pid = parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    }
    None
}

/// The first address of `SSH_CONNECTION`: `client port server port` (ssh(1), ENVIRONMENT).
fn client(environment: &[u8]) -> Option<IpAddr> {
    let mut variables = environment.split(|byte| *byte == 0);
    let value = variables.find_map(|variable| variable.strip_prefix(b"SSH_CONNECTION="))?;
    let address = std::str::from_utf8(value).ok()?.split(' ').next()?;
    // A link-local address is followed by a percent sign and its interface.
    let address: IpAddr = address.split('%').next()?.parse().ok()?;
    Some(address.to_canonical())
}

/// Returns the parent from `/proc/PID/stat`: the second field after the name, which may contain any
/// character (proc_pid_stat(5)).
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let parent = rest.split(' ').nth(1)?.parse().ok()?;
    (parent > 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_session_is_found() {
        let environment = b"A=1\0SSH_CONNECTION=2001:db8::7 50000 2001:db8::1 22\0B=2\0";
        assert_eq!(client(environment), "2001:db8::7".parse().ok());
        let mapped = b"SSH_CONNECTION=::ffff:192.0.2.7 50000 ::ffff:192.0.2.1 22";
        assert_eq!(client(mapped), "192.0.2.7".parse().ok());
        let local = b"SSH_CONNECTION=fe80::1%eth0 50000 fe80::2%eth0 22\0";
        assert_eq!(client(local), "fe80::1".parse().ok());
        assert_eq!(client(b"SSH_CONNECTION=nonsense\0"), None);
        assert_eq!(client(b""), None);
    }

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent("77 (a) b) S 12 77 77 0"), Some(12));
        assert_eq!(parent("1 (init) S 0 1 1 0"), None);
        assert_eq!(parent("77"), None);
    }
}

//! Configures this host's resolver to query the mesh's name server ([`seikan_mesh::names`]).
//!
//! systemd-resolved sends only queries for [`DOMAIN`] to it. resolv.conf has no such routing, so there it is
//! the first server and forwards other queries. If the configuration has name servers (`DNS =`), it replaces
//! them and forwards to them.

use super::Recorder;
use crate::journal::change::Change;
use seikan_config::Config;
use seikan_mesh::names::{DOMAIN, Found, Server, Upstream};
use seikan_sys::dns::{self, AppliedDns, DnsSettings};
use seikan_sys::resolv_conf::{FILE, ResolvConf};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::warn;

/// State of the names while the tunnel runs.
#[derive(Debug)]
pub struct Names {
    /// Whether and how members are found.
    pub found: Found,
    /// The bound name server, until the agent takes it.
    pub server: Option<Server>,
}

impl Names {
    /// The host's resolver does not change: it could not reach a member without an interface.
    pub fn of_proxies() -> Names {
        Names {
            found: Found::Off("only the proxies and forwards find members".to_owned()),
            server: None,
        }
    }

    /// Sets the names up. A failure affects the names only.
    pub fn set(config: &Config, recorder: &mut Recorder<'_>) -> Names {
        match Names::try_set(config, recorder) {
            Ok(names) => names,
            Err(reason) => Names {
                found: Found::Off(reason),
                server: None,
            },
        }
    }

    fn try_set(config: &Config, recorder: &mut Recorder<'_>) -> Result<Names, String> {
        if !config.mesh.as_ref().is_some_and(|mesh| mesh.names) {
            return Err("disabled in the configuration".to_owned());
        }
        let mut answering = Server::bind(&config.addresses).map_err(|e| e.to_string())?;
        let at = address(config).ok_or("the interface has no address")?;
        let interface = config.name.to_string();
        let by = if !config.dns.is_empty() {
            answering.upstream = Upstream::Servers(config.dns.clone());
            replace_configured(&interface, &settings(config), at)?
        } else if dns::uses_resolved() {
            let applied = dns::route(&interface, at, DOMAIN).map_err(|e| e.to_string())?;
            applied.keep();
            "systemd-resolved"
        } else {
            let server = at;
            recorder.note(Change::ResolvConf { interface, server });
            let file = resolv_conf(config, at);
            file.add().map_err(|e| e.to_string())?;
            answering.upstream = Upstream::ResolvConf(file);
            "resolv.conf"
        };
        Ok(Names {
            found: Found::By(by.to_owned()),
            server: Some(answering),
        })
    }
}

/// Returns the address for the resolver: IPv4 if there is one, since every program can use it.
fn address(config: &Config) -> Option<IpAddr> {
    let mut all = config.addresses.iter().map(|net| net.addr());
    let first = config.addresses.first().map(|net| net.addr());
    all.find(IpAddr::is_ipv4).or(first)
}

fn settings(config: &Config) -> DnsSettings {
    DnsSettings {
        servers: config.dns.clone(),
        search: config.dns_search.clone(),
    }
}

fn resolv_conf(config: &Config, server: IpAddr) -> ResolvConf {
    ResolvConf {
        path: FILE.into(),
        interface: config.name.to_string(),
        server,
    }
}

/// Restores the entry in resolv.conf if another program has rewritten the file. Logs the first of consecutive
/// failures.
pub fn keep(config: &Config) {
    /// Of this process, the monitor of one tunnel.
    static FAILED: AtomicBool = AtomicBool::new(false);
    if let Some(server) = address(config)
        && config.dns.is_empty()
        && !dns::uses_resolved()
    {
        let kept = resolv_conf(config, server).keep();
        let failed_before = FAILED.swap(kept.is_err(), Ordering::Relaxed);
        // The next call retries.
        if let (Err(error), false) = (kept, failed_before) {
            warn!(target: "mesh", %error, "cannot add the name server again, so members have no names");
        }
    }
}

/// Undoes [`Names::set`] when the name server has ended: before the hooks of the end, which could not resolve
/// names otherwise. Failures are retried with the journal.
pub fn take_back(config: &Config) {
    let _ = match address(config) {
        _ if !config.dns.is_empty() => dns::apply(config.name.as_str(), &settings(config))
            .map(AppliedDns::keep)
            .map_err(drop),
        _ if dns::uses_resolved() => dns::unroute(config.name.as_str()).map_err(drop),
        Some(server) => resolv_conf(config, server).remove().map_err(drop),
        None => Ok(()),
    };
}

/// Replaces the configured name servers, which the journal has, by the mesh's; restores them if that fails.
fn replace_configured(
    interface: &str,
    settings: &DnsSettings,
    at: IpAddr,
) -> Result<&'static str, String> {
    let ours = DnsSettings {
        servers: vec![at],
        search: settings.search.clone(),
    };
    match dns::apply(interface, &ours) {
        Ok(applied) => {
            let by = applied.by();
            applied.keep();
            Ok(by)
        }
        Err(error) => {
            let _ = dns::apply(interface, settings).map(AppliedDns::keep);
            Err(error.to_string())
        }
    }
}

//! Have this host's programs ask our name server for members of its mesh ([`crate::mesh::names`]).
//!
//! systemd-resolved knows whom to ask for which names: ours, for those under [`DOMAIN`], and nobody else's come to us. Where programs go
//! by resolv.conf, which knows no such difference, ours is asked first and forwards the others. Where the configuration has name servers
//! of its own (`DNS =`), ours takes their place and forwards to them.

use super::{Change, note};
use crate::mesh::names::{DOMAIN, Server, Upstream};
use crate::state::Notes;
use seikan_config::{Config, Diagnostic};
use seikan_sys::dns::{self, AppliedDns, DnsSettings};
use seikan_sys::resolv_conf::{FILE, ResolvConf};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// How names of members are found on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// By way of this: `systemd-resolved`, `resolv.conf`, `resolvconf`.
    By(String),
    /// They are not, for this reason.
    Off(String),
}

/// Names on this host, from set-up to the end.
#[derive(Debug)]
pub struct Names {
    /// Whether and how they are found.
    pub found: Found,
    /// Who answers, until the mesh's thread has it.
    pub server: Option<Server>,
}

impl Names {
    /// Sets all up. What fails costs the names, and nothing else.
    pub fn set(
        config: &Config,
        journal: &mut dyn Notes,
        warn: &mut dyn FnMut(Diagnostic),
    ) -> Names {
        match Names::try_set(config, journal, warn) {
            Ok(names) => names,
            Err(reason) => Names {
                found: Found::Off(reason),
                server: None,
            },
        }
    }

    fn try_set(
        config: &Config,
        journal: &mut dyn Notes,
        warn: &mut dyn FnMut(Diagnostic),
    ) -> Result<Names, String> {
        if !config.mesh.as_ref().is_some_and(|mesh| mesh.names) {
            return Err("disabled in the configuration".to_owned());
        }
        let mut answering = Server::bind(&config.addresses).map_err(|e| e.to_string())?;
        let at = address(config).ok_or("the interface has no address")?;
        let interface = config.name.to_string();
        let by = if !config.dns.is_empty() {
            answering.upstream = Upstream::Servers(config.dns.clone());
            in_place_of(&interface, &settings(config), at)?
        } else if dns::is_resolved_asked() {
            let applied = dns::route(&interface, at, DOMAIN).map_err(|e| e.to_string())?;
            applied.keep();
            "systemd-resolved"
        } else {
            let server = at;
            note(journal, Change::ResolvConf { interface, server }, warn);
            let file = resolv_conf(config, at);
            file.add().map_err(|e| e.to_string())?;
            answering.upstream = Upstream::Beside(file);
            "resolv.conf"
        };
        Ok(Names {
            found: Found::By(by.to_owned()),
            server: Some(answering),
        })
    }
}

/// What a program that looks names up is told to ask: an IPv4 address if there is one, which any program asks.
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

/// Has us in resolv.conf, if that is how names are found, whoever wrote it anew.
pub fn keep(config: &Config) {
    if let Some(server) = address(config)
        && config.dns.is_empty()
        && !dns::is_resolved_asked()
    {
        // What cannot be written now is tried again.
        let _ = resolv_conf(config, server).keep();
    }
}

/// Takes back what [`Names::set`] has set up, once nobody answers any more: before the hooks of the end, whose names would be asked for
/// in vain. What fails is tried again with the journal.
pub fn take_back(config: &Config) {
    let _ = match address(config) {
        _ if !config.dns.is_empty() => dns::apply(config.name.as_str(), &settings(config))
            .map(AppliedDns::keep)
            .map_err(drop),
        _ if dns::is_resolved_asked() => dns::unroute(config.name.as_str()).map_err(drop),
        Some(server) => resolv_conf(config, server).remove().map_err(drop),
        None => Ok(()),
    };
}

/// Our server instead of those of the configuration, which are noted already; if that fails, they are as before.
fn in_place_of(
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

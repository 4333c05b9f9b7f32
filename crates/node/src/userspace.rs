//! A tunnel without root: a TCP/IP stack in this process ([`seikan_userspace`]) in place of the kernel's and an interface.
//!
//! Programs of the host use the tunnel by proxies and forwarded ports, and peers reach exposed ports. Nothing of the host is
//! changed, so settings that would do so are ignored with a warning ([`adapt`]).

use ipnet::IpNet;
use seikan_config::{Config, Diagnostic, Hooks, Mode, PeerConfig, Severity, Table};
use seikan_mesh::names::Names as MemberNames;
use seikan_userspace::{Counters, Exposed, Forward, Handle, Limits, Listener, Options, Sockets};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

pub use seikan_userspace::StackError;

/// The services of a tunnel without root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Services {
    /// Addresses of the SOCKS5 proxy.
    pub socks: Vec<SocketAddr>,
    /// Addresses of the HTTP CONNECT proxy.
    pub http: Vec<SocketAddr>,
    /// Ports of the host that lead into the tunnel.
    pub forwards: Vec<Forward>,
    /// Ports inside the tunnel that lead to the host.
    pub exposed: Vec<Exposed>,
}

/// Why a configuration does not fit a tunnel without root.
#[derive(Debug, thiserror::Error)]
pub enum UserspaceError {
    /// A gateway.
    #[error(
        "{0} is a gateway, which needs root: start it without --userspace, or remove the gateway from the file"
    )]
    Gateway(String),
    /// Ethernet mode.
    #[error(
        "{0} carries Ethernet frames, which need a TAP device: start it without --userspace, or set the mode to `ip`"
    )]
    Ethernet(String),
    /// No address.
    #[error("{0} has no address inside the tunnel: add `Address` (TOML: `address`) to the file")]
    NoAddress(String),
}

/// Returns the configuration without the settings that change the host. `warn` gets each of them.
///
/// # Errors
/// See [`UserspaceError`].
pub fn adapt(config: &Config, warn: &mut dyn FnMut(Diagnostic)) -> Result<Config, UserspaceError> {
    let name = || config.name.to_string();
    if config.gateway.is_some() {
        return Err(UserspaceError::Gateway(name()));
    }
    if config.mode == Mode::Ethernet {
        return Err(UserspaceError::Ethernet(name()));
    }
    if config.addresses.is_empty() {
        return Err(UserspaceError::NoAddress(name()));
    }
    let mut ignored = |is_set: bool, setting: &str, help: &str| {
        if is_set {
            let message = format!("{setting} ignored: the tunnel runs without root");
            let warning = Diagnostic::new(Severity::Warning, config.name.as_str(), message);
            warn(warning.with_help(help));
        }
    };
    ignored(
        !config.hooks.is_empty(),
        "`PreUp`, `PostUp`, `PreDown` and `PostDown` are",
        "there is no interface that these commands could change",
    );
    ignored(
        !config.dns.is_empty() || !config.dns_search.is_empty(),
        "`DNS` is",
        "programs keep their name servers; the proxies find names of peers and of members of the mesh",
    );
    ignored(
        matches!(config.table, Table::Number(_)),
        "`Table` is",
        "there are no routes into the tunnel; use the proxies or forwarded ports",
    );
    ignored(
        config.fwmark.is_some_and(|mark| mark != 0),
        "`FwMark` is",
        "only root can mark the tunnel's datagrams",
    );
    ignored(
        config.save_config,
        "`SaveConfig` is",
        "change the file, and run `seikan reload`",
    );
    Ok(Config {
        hooks: Hooks::default(),
        dns: Vec::new(),
        dns_search: Vec::new(),
        table: Table::Off,
        fwmark: None,
        save_config: false,
        ..config.clone()
    })
}

/// A running stack with its services. Dropping it closes all connections.
#[derive(Debug)]
pub struct Stack {
    handle: Handle,
    services: Services,
}

impl Stack {
    /// Starts the stack on `end`, its end of [`seikan_sys::tun::Tun::pair`]. `members` are the names of the mesh, if this
    /// host is a member of one.
    ///
    /// # Errors
    /// See [`StackError`].
    pub fn start(
        config: &Config,
        services: &Services,
        end: OwnedFd,
        mtu: u32,
        members: Option<MemberNames>,
    ) -> Result<Stack, StackError> {
        let options = Options {
            addresses: config.addresses.clone(),
            mtu,
            socks: services.socks.clone(),
            http: services.http.clone(),
            forwards: services.forwards.clone(),
            exposed: services.exposed.clone(),
            limits: Limits::default(),
        };
        let names = Names {
            peers: peer_names(&config.peers),
            members,
        };
        let handle =
            seikan_userspace::Stack::start(end, options, Box::new(move |name| names.find(name)))?;
        Ok(Stack {
            handle,
            services: services.clone(),
        })
    }

    /// Returns the addresses of the host that lead into the tunnel.
    pub fn listeners(&self) -> &[Listener] {
        self.handle.listeners()
    }

    /// Returns what opens sockets inside the tunnel for this process.
    pub fn sockets(&self) -> &Sockets {
        self.handle.sockets()
    }

    /// Returns the forwarded port that listens there.
    pub fn forward(&self, listener: &Listener) -> Option<&Forward> {
        let mut forwards = self.services.forwards.iter();
        forwards.find(|forward| {
            forward.listen == listener.address && forward.transport == listener.transport
        })
    }

    /// Returns the exposed ports.
    pub fn exposed(&self) -> &[Exposed] {
        &self.services.exposed
    }

    /// Returns the counters, at most a second old.
    pub fn counters(&self) -> Counters {
        self.handle.counters()
    }
}

/// Names of hosts inside the tunnel.
struct Names {
    /// Peers of the configuration, in lower case.
    peers: BTreeMap<String, Vec<IpAddr>>,
    members: Option<MemberNames>,
}

impl Names {
    /// Returns the addresses of a peer, or else of a member of the mesh; none if the name is unknown.
    fn find(&self, name: &str) -> Vec<IpAddr> {
        let peer = self.peers.get(&name.to_ascii_lowercase());
        let member = || self.members.as_ref().map(|members| members.find(name));
        peer.cloned().or_else(member).unwrap_or_default()
    }
}

/// Returns the names of peers, with those of their allowed IPs that are single addresses.
fn peer_names(peers: &[PeerConfig]) -> BTreeMap<String, Vec<IpAddr>> {
    let is_host = |net: &&IpNet| net.prefix_len() == net.max_prefix_len();
    let named = peers.iter().filter_map(|peer| {
        let hosts = peer.allowed_ips.iter().filter(is_host);
        let hosts: Vec<IpAddr> = hosts.map(IpNet::addr).collect();
        Some((peer.name.as_ref()?.to_ascii_lowercase(), hosts))
    });
    named.filter(|(_, hosts)| !hosts.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse};
    use zeroize::Zeroizing;

    const BASE: &str = "[Interface]\nPrivateKey = yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=\n";

    fn config(lines: &str) -> Config {
        parsed(Syntax::Ini, format!("{BASE}{lines}"))
    }

    fn parsed(syntax: Syntax, text: String) -> Config {
        let source = Source {
            file: "wg0".into(),
            syntax,
            text: Zeroizing::new(text),
        };
        let parsed = parse(&source, &Overrides::default(), &|_| unreachable!());
        parsed.config.expect("a configuration")
    }

    /// The warnings for these lines, and the rest of the configuration.
    fn adapted(lines: &str) -> (Vec<String>, Config) {
        let mut warnings = Vec::new();
        let rest = adapt(&config(lines), &mut |warning| {
            warnings.push(warning.message)
        });
        (warnings, rest.expect("it fits"))
    }

    #[test]
    fn settings_of_the_host_are_ignored_with_a_warning_each() {
        for (line, setting) in [
            ("PostUp = touch /tmp/%i", "`PostUp`"),
            ("DNS = 10.0.0.53", "`DNS`"),
            ("Table = 42", "`Table`"),
            ("FwMark = 7", "`FwMark`"),
            ("SaveConfig = true", "`SaveConfig`"),
        ] {
            let (warnings, rest) = adapted(&format!("Address = 10.0.0.1/24\n{line}\n"));
            assert_eq!(warnings.len(), 1, "{line}: {warnings:?}");
            assert!(warnings[0].contains(setting), "{line}: {warnings:?}");
            assert!(rest.hooks.is_empty() && rest.dns.is_empty() && !rest.save_config);
            assert_eq!((rest.table, rest.fwmark), (Table::Off, None));
        }
    }

    #[test]
    fn a_plain_file_and_one_without_routes_give_no_warning() {
        let (warnings, _) = adapted("Address = 10.0.0.1/24\nTable = off\nMTU = 1400\n");
        assert!(warnings.is_empty(), "{warnings:?}");
    }

    #[test]
    fn gateways_and_ethernet_frames_are_refused() {
        let own = "private-key = \"yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=\"";
        let text = format!("{own}\naddress = \"10.0.0.1/24\"\n[gateway]\ninterface = \"eth1\"\n");
        let gateway = adapt(&parsed(Syntax::Toml, text), &mut |_| ()).expect_err("refused");
        assert!(matches!(gateway, UserspaceError::Gateway(_)), "{gateway}");
        let text = format!("{own}\nmode = \"ethernet\"\n");
        let ethernet = adapt(&parsed(Syntax::Toml, text), &mut |_| ()).expect_err("refused");
        assert!(
            matches!(ethernet, UserspaceError::Ethernet(_)),
            "{ethernet}"
        );
    }

    #[test]
    fn a_tunnel_without_an_address_is_refused() {
        let error = adapt(&config(""), &mut |_| ()).expect_err("nothing to answer for");
        assert!(matches!(error, UserspaceError::NoAddress(_)), "{error}");
    }

    #[test]
    fn peers_are_found_by_name_if_they_have_an_address_of_their_own() {
        let key = "PublicKey = xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
        let peer = |allowed: &str| {
            let lines = format!("Address = 10.0.0.1/24\n[Peer]\n{key}\nAllowedIPs = {allowed}\n");
            let mut peers = config(&lines).peers;
            peers[0].name = Some("Db-1".to_owned());
            let names = Names {
                peers: peer_names(&peers),
                members: None,
            };
            names.find("dB-1")
        };
        let found: Vec<IpAddr> = vec![[10, 0, 0, 2].into()];
        assert_eq!(peer("10.0.0.2/32, 10.9.0.0/16"), found);
        assert_eq!(peer("10.9.0.0/16"), Vec::<IpAddr>::new());
    }
}

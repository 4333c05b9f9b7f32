//! Checks a draft and completes it: required keys, and keys that conflict.
//!
//! Order: the interface's own keys, each peer, peers against each other, the gateway. Checking
//! continues after an error.

use std::collections::{HashMap, HashSet};

use ipnet::IpNet;

use super::endpoint::Host;
use super::gateway;
use super::key::PublicKey;
use super::overrides::Overrides;
use super::read::Draft;
use super::report::Reporter;
use super::schema::Site;
use super::sections::{At, Interface, Peer};
use super::source::Syntax;
use super::types::{
    Config, Hooks, InterfaceName, InterfaceNameError, MeshSettings, Mode, PeerConfig, Protocol,
    Repair, Trust,
};

/// Smallest MTU in bytes that IPv4 hosts must accept (RFC 791: 576-byte datagrams).
const MIN_MTU: u32 = 576;
/// Smallest MTU in bytes that IPv6 allows (RFC 8200, section 5).
const MIN_MTU_V6: u32 = 1280;
/// Largest IP packet in bytes.
const MAX_MTU_NATIVE: u32 = 65535;
/// Largest payload of an Ethernet frame in bytes.
const MAX_MTU_ETHERNET: u32 = seikan_proto::mode::MAX_ETHERNET_MTU;
/// Largest multiple of 16 (the padding) that, with 32 bytes of header and tag, fits a UDP datagram
/// over IPv4 (65535 - 20 - 8 bytes).
const MAX_MTU_WIREGUARD: u32 = 65472;

/// Completes a draft and reports its faults; `None` if something is missing.
pub(super) fn check(
    draft: &Draft,
    name: Result<InterfaceName, InterfaceNameError>,
    overrides: &Overrides,
    reporter: &mut Reporter<'_>,
) -> Option<Config> {
    let name = name.map_err(|error| {
        reporter.error(
            Site::FILE,
            format!("the file's name cannot name its interface: {error}"),
            "the interface is named after the file without its extension, such as `wg0` for `wg0.conf`: rename the file",
        );
    });
    let interface = &draft.interface;
    let protocol = overrides.protocol.or(interface.protocol.get());
    let protocol = protocol.unwrap_or(Protocol::default_of(reporter.syntax));
    check_mode(draft, protocol, reporter);
    check_private_key(interface, reporter);
    check_addresses(interface, reporter);
    check_mtu(interface, protocol, overrides.mtu, reporter);
    check_native(interface, protocol, overrides, reporter);
    check_identities(interface, &draft.peers, reporter);
    check_allowed_ips(interface, &draft.peers, reporter);
    check_reach(draft, reporter);
    check_mesh(interface, reporter);
    let gateway = gateway::check(draft, name.as_ref().ok(), reporter);
    Some(Config {
        name: name.ok()?,
        protocol,
        mode: mode(interface),
        private_key: interface.private_key.get()?,
        listen_port: interface.listen_port.get(),
        addresses: interface.address.all(),
        mtu: overrides.mtu.or(interface.mtu.get()),
        dns: interface.dns.all_of(|item| match item {
            Host::Address(server) => Some(*server),
            Host::Name(_) => None,
        }),
        dns_search: interface.dns.all_of(|item| match item {
            Host::Address(_) => None,
            Host::Name(domain) => Some(domain.clone()),
        }),
        table: interface.table.get().unwrap_or_default(),
        fwmark: interface.fwmark.get().flatten(),
        hooks: Hooks {
            pre_up: interface.pre_up.texts(),
            post_up: interface.post_up.texts(),
            pre_down: interface.pre_down.texts(),
            post_down: interface.post_down.texts(),
        },
        save_config: interface.save_config.get().unwrap_or(false),
        offload: overrides
            .offload
            .or(interface.offload.get())
            .unwrap_or(true),
        metrics: overrides.metrics.or(interface.metrics.get()),
        cipher: interface.cipher.get().unwrap_or_default(),
        copy_dscp: interface.copy_dscp.get().unwrap_or(false),
        repair: interface.repair.get().unwrap_or_default(),
        uplink_rate: interface.uplink_rate.get(),
        peers: draft.peers.iter().filter_map(complete_peer).collect(),
        gateway,
        mesh: complete_mesh(interface),
    })
}

/// Content of the tunnel: IP packets or Ethernet frames.
fn mode(interface: &Interface) -> Mode {
    interface.mode.get().unwrap_or_default()
}

/// Checks that nothing is configured that Ethernet mode excludes.
fn check_mode(draft: &Draft, protocol: Protocol, reporter: &mut Reporter<'_>) {
    let interface = &draft.interface;
    let Some(At {
        value: Mode::Ethernet,
        site,
    }) = interface.mode.last()
    else {
        return;
    };
    let example = reporter.example(interface.protocol.spec, "native");
    let mut exclude = |is_so: bool, reason: &str, help: &str| {
        if is_so {
            reporter.error(
                *site,
                format!("is `ethernet`, which is not possible here: {reason}"),
                format!("{help}, or remove this key"),
            );
        }
    };
    exclude(
        protocol == Protocol::Wireguard,
        "the WireGuard protocol carries only IP packets",
        &format!("use the native protocol ({example}) at both ends"),
    );
    exclude(
        interface.coordinator.is_given() || interface.credential.is_given(),
        "a mesh carries only IP packets",
        "use an interface that is not a member of a mesh",
    );
    exclude(
        draft.gateway.site.line != 0,
        "a gateway forwards only IP packets",
        "remove the gateway, and make the interface a port of a bridge instead",
    );
}

fn check_private_key(interface: &Interface, reporter: &mut Reporter<'_>) {
    if interface.private_key.is_given() || interface.private_key_file.is_given() {
        return;
    }
    let name = reporter.name(interface.private_key.spec);
    let file = reporter.name(interface.private_key_file.spec);
    let help = format!(
        "add `{name} = ...` with a key from `seikan genkey`, or `{file} = ...` with the path of a key file"
    );
    let (site, message) = match (interface.site.line, reporter.syntax) {
        (0, Syntax::Ini) => {
            let message = format!("there is no [Interface] section, and so no `{name}`");
            (Site::FILE, message)
        }
        (_, Syntax::Ini) => (interface.site, format!("[Interface] has no `{name}`")),
        (_, Syntax::Toml) => (Site::FILE, format!("there is no `{name}`")),
    };
    reporter.error(site, message, help);
}

fn check_addresses(interface: &Interface, reporter: &mut Reporter<'_>) {
    let addresses = &interface.address;
    // The interface of a bridge has the addresses of its ports.
    let needs_one = mode(interface) == Mode::Ip && interface.site.line != 0;
    if needs_one && !addresses.is_given() {
        let name = reporter.name(addresses.spec);
        let example = match reporter.syntax {
            Syntax::Ini => "`Address = 10.0.0.1/24`",
            Syntax::Toml => "`address = \"10.0.0.1/24\"`",
        };
        reporter.warn(
            Site::FILE,
            format!("the interface has no `{name}`"),
            format!("add the interface's own address, such as {example}"),
        );
    }
    let mut seen = HashMap::new();
    for At { value, site } in &addresses.values {
        if let Some(first) = seen.insert(value.addr(), site.line) {
            reporter.repeated_value(*site, value.addr(), first);
        }
    }
}

fn check_mtu(
    interface: &Interface,
    protocol: Protocol,
    over: Option<u32>,
    reporter: &mut Reporter<'_>,
) {
    let given = interface.mtu.last();
    let Some(mtu) = over.or(given.map(|mtu| mtu.value)) else {
        return;
    };
    let addresses = &interface.address.values;
    let (least, reason) = if addresses.iter().any(|a| a.value.addr().is_ipv6()) {
        (MIN_MTU_V6, "the minimum of IPv6")
    } else {
        (MIN_MTU, "the minimum that every IPv4 host accepts")
    };
    let most = match (protocol, mode(interface)) {
        (Protocol::Native, Mode::Ethernet) => MAX_MTU_ETHERNET,
        (Protocol::Native, Mode::Ip) => MAX_MTU_NATIVE,
        (Protocol::Wireguard, _) => MAX_MTU_WIREGUARD,
    };
    let message = if mtu < least {
        format!("is {mtu}, less than {least}, {reason}")
    } else if mtu > most {
        format!("is {mtu}, more than {most}, the maximum of the {protocol} protocol")
    } else {
        return;
    };
    // The command line and the environment have no line.
    let line = given
        .filter(|_| over.is_none())
        .map_or(0, |mtu| mtu.site.line);
    reporter.error(
        interface.mtu.spec.at(line),
        message,
        format!("write a number of bytes from {least} to {most}"),
    );
}

fn check_native(
    interface: &Interface,
    protocol: Protocol,
    overrides: &Overrides,
    reporter: &mut Reporter<'_>,
) {
    if protocol == Protocol::Wireguard {
        let help = "remove it, or use the native protocol";
        if let Some(At { site, .. }) = interface.cipher.last() {
            reporter.warn(
                *site,
                "has no effect: WireGuard supports only ChaCha20-Poly1305",
                help,
            );
        }
        if let Some(At { value, site }) = interface.repair.last()
            && *value != Repair::Off
        {
            reporter.warn(*site, "has no effect: WireGuard cannot repair losses", help);
        }
    }
    let given = interface.metrics.last().cloned();
    // The command line and the environment have no line.
    let over = overrides.metrics.map(|value| At {
        value,
        site: interface.metrics.spec.at(0),
    });
    if let Some(At {
        value: address,
        site,
    }) = over.or(given)
        && !address.ip().is_loopback()
    {
        reporter.warn(
            site,
            format!(
                "is {address}: anyone who can reach it can see which peers communicate, and when"
            ),
            "listen on loopback, such as `127.0.0.1:9586`",
        );
    }
}

/// Checks that coordinator and credential are both given if any key about a coordinator is.
fn check_mesh(interface: &Interface, reporter: &mut Reporter<'_>) {
    let required = [
        (interface.coordinator.spec, interface.coordinator.is_given()),
        (interface.credential.spec, interface.credential.is_given()),
    ];
    let others = [
        interface.coordinator_pin.is_given(),
        interface.stun.is_given(),
        interface.names.is_given(),
        interface.pins.is_given(),
        interface.pin_first_use.is_given(),
        interface.port_mapping.is_given(),
    ];
    let is_member = others.contains(&true) || required.iter().any(|(_, given)| *given);
    for (key, _) in required.iter().filter(|(_, given)| is_member && !given) {
        let name = reporter.name(key);
        reporter.error(
            Site::FILE,
            format!("a member of a mesh needs `{name}`, which is not there"),
            "run `seikan join`, which writes the file, or remove all keys about a coordinator",
        );
    }
    let mut pinned = HashMap::new();
    for At {
        value: (name, key),
        site,
    } in &interface.pins.values
    {
        if let Some((first, before)) = pinned.insert(name, (site.line, key))
            && before != key
        {
            reporter.error(
                *site,
                format!("has `{name}` with another key, first in line {first}"),
                "a member has one key: keep the line that is right",
            );
        }
    }
}

/// Checks public keys: missing, the interface's own, or used twice.
fn check_identities(interface: &Interface, peers: &[Peer], reporter: &mut Reporter<'_>) {
    let own = interface.private_key.last().map(|key| &key.value);
    let own_public = own.map(|own| own.public());
    let mut seen: HashMap<PublicKey, &Peer> = HashMap::new();
    for peer in peers {
        let name = reporter.name(peer.public_key.spec);
        let Some(At { value: key, site }) = peer.public_key.last() else {
            if !peer.public_key.is_given() {
                reporter.error(
                    peer.site,
                    format!("this peer has no `{name}`"),
                    "add the key that `seikan pubkey < private.key` prints on the peer",
                );
            }
            continue;
        };
        if own.is_some_and(|own| own.as_bytes() == key.as_bytes()) {
            reporter.hide_line(site.line);
            reporter.error(
                *site,
                "is this interface's own private key",
                "make a new private key, for this one may have been seen, and write the peer's public key here",
            );
        } else if own_public == Some(*key) {
            reporter.error(
                *site,
                "is this interface's own public key",
                "write the peer's public key: the peer prints it with `seikan pubkey < private.key`",
            );
        }
        if let Some(first) = seen.insert(*key, peer) {
            let message = format!("this is the same peer as {}", first.described());
            let help = "merge both into one section, or correct the key of one of them";
            reporter.named_error(*site, name, &message, help);
        }
    }
}

/// Checks allowed IPs: missing, with host bits, or at two peers.
fn check_allowed_ips(interface: &Interface, peers: &[Peer], reporter: &mut Reporter<'_>) {
    let own = interface.address.values.iter();
    let own: HashSet<_> = own.map(|at| IpNet::from(at.value.addr())).collect();
    let mut owners: HashMap<IpNet, (&Peer, usize)> = HashMap::new();
    for peer in peers {
        // In Ethernet mode, a peer without allowed IPs may use any address.
        if mode(interface) == Mode::Ip && !peer.allowed_ips.is_given() {
            let name = reporter.name(peer.allowed_ips.spec);
            reporter.warn(
                peer.site,
                format!("this peer has no `{name}`: nothing is sent to it or accepted from it"),
                "add the addresses behind the peer, such as `10.0.0.2/32`",
            );
        }
        for At { value, site } in &peer.allowed_ips.values {
            let masked = reporter.truncate_prefix(*site, *value);
            match owners.insert(masked, (peer, site.line)) {
                Some((owner, first)) if std::ptr::eq(owner, peer) => {
                    reporter.repeated_value(*site, masked, first);
                }
                Some((owner, first)) => {
                    let owner = owner.described();
                    reporter.error(
                        *site,
                        format!("has `{masked}`, which {owner} has already, in line {first}"),
                        "a prefix belongs to one peer only; a longer prefix inside it may belong to another",
                    );
                }
                None => {}
            }
            if own.contains(&masked) {
                reporter.warn(
                    *site,
                    format!("has `{masked}`, this interface's own address"),
                    "write the peer's address",
                );
            }
        }
    }
}

/// Checks for each peer that a side can begin a session: this side, if it knows the peer's endpoint,
/// or the peer, if this side has a port that the peer can know.
fn check_reach(draft: &Draft, reporter: &mut Reporter<'_>) {
    let (interface, peers) = (&draft.interface, &draft.peers);
    let has_port = match interface.listen_port.last() {
        Some(port) => port.value != 0,
        None => interface.listen_port.is_given(),
    };
    let Some(first) = peers.first() else {
        return;
    };
    if interface.site.line == 0 || has_port {
        return;
    }
    let endpoint = reporter.name(first.endpoint.spec);
    let port = reporter.name(interface.listen_port.spec);
    let unknown = peers.iter().filter(|peer| !peer.endpoint.is_given());
    if unknown.clone().count() == peers.len() {
        reporter.warn(
            Site::FILE,
            format!(
                "no peer has an `{endpoint}` and there is no `{port}`: neither side can find the other"
            ),
            format!("add an `{endpoint}` to a peer, or a fixed `{port}`"),
        );
    } else {
        unknown.for_each(|peer| {
            reporter.warn(
                peer.site,
                format!(
                    "this peer has no `{endpoint}` and there is no `{port}`: neither side can find the other"
                ),
                format!("add its `{endpoint}`, or a fixed `{port}`"),
            );
        });
    }
    note_silence(draft, reporter);
}

/// Notes that a NAT or firewall here may forget a peer that is silent, which then cannot reach this
/// host. Many clients need no more, so the file gets one note. Members of a mesh get none: they keep
/// their paths open.
fn note_silence(draft: &Draft, reporter: &mut Reporter<'_>) {
    let interface = &draft.interface;
    if interface.coordinator.is_given() {
        return;
    }
    let is_silent = |peer: &&Peer| {
        let keepalive = &peer.persistent_keepalive;
        let is_off = keepalive.last().is_some_and(|at| at.value.is_none());
        peer.endpoint.is_given() && (is_off || !keepalive.is_given())
    };
    let mut silent = draft.peers.iter().filter(is_silent);
    let Some(peer) = silent.next() else {
        return;
    };
    let others = match silent.count() {
        0 => String::new(),
        1 => " and another one".to_owned(),
        count => format!(" and {count} others"),
    };
    let port = reporter.name(interface.listen_port.spec);
    let name = reporter.name(peer.persistent_keepalive.spec);
    reporter.note(
        peer.site,
        format!(
            "this peer{others} may be unable to reach this host after a silence: there is no `{port}` and no `{name}`"
        ),
        format!("add `{name} = 25` if the peer has to send first and a NAT or firewall is on this side"),
    );
}

/// Completes a peer; `None` if something is missing.
fn complete_peer(peer: &Peer) -> Option<PeerConfig> {
    Some(PeerConfig {
        name: peer.name.get(),
        public_key: peer.public_key.get()?,
        preshared_key: peer.preshared_key.get().flatten(),
        allowed_ips: peer.allowed_ips.unique(),
        endpoint: peer.endpoint.get(),
        persistent_keepalive: peer.persistent_keepalive.get().flatten(),
    })
}

/// Completes a member of a mesh; `None` if something is missing.
fn complete_mesh(interface: &Interface) -> Option<MeshSettings> {
    Some(MeshSettings {
        coordinator: interface.coordinator.get()?,
        pin: interface.coordinator_pin.get(),
        credential: interface.credential.get()?,
        stun: interface.stun.all(),
        names: interface.names.get().unwrap_or(true),
        port_mapping: interface.port_mapping.get().unwrap_or(true),
        trust: Trust {
            pins: interface.pins.all(),
            first_use: interface.pin_first_use.get().unwrap_or(false),
        },
    })
}

//! Checks a draft and completes it: required keys, and keys that conflict.
//!
//! Order: the interface's own keys, each peer, peers against each other, the gateway. Checking
//! continues after an error.

use std::collections::HashMap;

use ipnet::IpNet;

use super::diagnostic::Severity;
use super::draft::{At, Draft, GatewaySection, InterfaceDraft, PeerDraft, unique_prefixes};
use super::gateway;
use super::key::{PrivateKey, PublicKey};
use super::overrides::Overrides;
use super::report::Reporter;
use super::schema::Field;
use super::source::Syntax;
use super::types::{
    CipherPreference, Config, InterfaceName, InterfaceNameError, MeshSettings, Mode, PeerConfig,
    Protocol, Repair, Trust,
};
use super::values::DnsItem;

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
    draft: Draft,
    name: Result<InterfaceName, InterfaceNameError>,
    overrides: &Overrides,
    reporter: &mut Reporter<'_>,
) -> Option<Config> {
    let Draft {
        interface,
        peers,
        gateway,
    } = draft;
    let name = check_name(name, reporter);
    let protocol =
        overrides
            .protocol
            .or(interface.native.protocol)
            .unwrap_or(match reporter.syntax {
                Syntax::Ini => Protocol::Wireguard,
                Syntax::Toml => Protocol::Native,
            });
    check_mode(&interface, protocol, gateway.section.as_ref(), reporter);
    check_private_key(&interface, reporter);
    check_addresses(&interface, reporter);
    check_mtu(&interface, protocol, overrides.mtu, reporter);
    check_native(&interface, protocol, overrides, reporter);
    check_identities(&interface, &peers, reporter);
    check_allowed_ips(&interface, &peers, reporter);
    check_reach(&interface, &peers, reporter);
    check_mesh(&interface, reporter);
    let gateway = gateway::check(gateway, name.as_ref(), &interface, &peers, reporter);
    let peers = peers.into_iter().filter_map(complete_peer).collect();
    let config = complete(interface, name?, protocol, overrides, peers)?;
    Some(Config { gateway, ..config })
}

/// Checks that nothing is configured that Ethernet mode excludes.
fn check_mode(
    interface: &InterfaceDraft,
    protocol: Protocol,
    gateway: Option<&GatewaySection>,
    reporter: &mut Reporter<'_>,
) {
    let Some(At {
        value: Mode::Ethernet,
        line,
    }) = interface.native.mode
    else {
        return;
    };
    let example = reporter.example(Field::Protocol, "native");
    let excluded = [
        (
            protocol == Protocol::Wireguard,
            "the WireGuard protocol carries only IP packets",
            format!("use the native protocol ({example}) at both ends, or remove this key"),
        ),
        (
            interface.given.has(Field::Coordinator) || interface.given.has(Field::Credential),
            "a mesh carries only IP packets",
            "use an interface that is not a member of a mesh, or remove this key".to_owned(),
        ),
        (
            gateway.is_some(),
            "a gateway forwards only IP packets",
            "remove the gateway, and make the interface a port of a bridge instead, or remove this key"
                .to_owned(),
        ),
    ];
    for (_, why, help) in excluded.into_iter().filter(|(is_so, ..)| *is_so) {
        let message = format!("is `ethernet`, which is not possible here: {why}");
        reporter.key_error(Field::Mode, line, &message, help);
    }
}

fn check_name(
    name: Result<InterfaceName, InterfaceNameError>,
    reporter: &mut Reporter<'_>,
) -> Option<InterfaceName> {
    name.inspect_err(|error| {
        let message = format!("the file's name cannot name its interface: {error}");
        let help = "the interface is named after the file without its extension, such as `wg0` for `wg0.conf`: rename the file";
        reporter.whole(Severity::Error, &message, help);
    })
    .ok()
}

fn check_private_key(interface: &InterfaceDraft, reporter: &mut Reporter<'_>) {
    if interface.given.has(Field::PrivateKey) || interface.given.has(Field::PrivateKeyFile) {
        return;
    }
    let name = reporter.name(Field::PrivateKey);
    let file = reporter.name(Field::PrivateKeyFile);
    let help = format!(
        "add `{name} = ...` with a key from `seikan genkey`, or `{file} = ...` with the path of a key file"
    );
    match (interface.line, reporter.syntax) {
        (Some(line), Syntax::Ini) => {
            let message = format!("[Interface] has no `{name}`");
            reporter.error(line, &message, help);
        }
        (None, Syntax::Ini) => {
            let message = format!("there is no [Interface] section, and so no `{name}`");
            reporter.whole(Severity::Error, &message, help);
        }
        (_, Syntax::Toml) => {
            let message = format!("there is no `{name}`");
            reporter.whole(Severity::Error, &message, help);
        }
    }
}

fn check_addresses(interface: &InterfaceDraft, reporter: &mut Reporter<'_>) {
    let name = reporter.name(Field::Address);
    // The interface of a bridge has the addresses of its ports.
    let needs_one = interface.native.mode() == Mode::Ip;
    if needs_one && interface.line.is_some() && !interface.given.has(Field::Address) {
        let message = format!("the interface has no `{name}`");
        let help = match reporter.syntax {
            Syntax::Ini => "add the interface's own address, such as `Address = 10.0.0.1/24`",
            Syntax::Toml => "add the interface's own address, such as `address = \"10.0.0.1/24\"`",
        };
        reporter.whole(Severity::Warning, &message, help);
    }
    let mut seen = HashMap::new();
    for address in &interface.addresses {
        if let Some(first) = seen.insert(address.value.addr(), address.line) {
            let value = address.value.addr();
            reporter.repeated_value(Field::Address, value, address.line, first);
        }
    }
}

fn check_mtu(
    interface: &InterfaceDraft,
    protocol: Protocol,
    over: Option<u32>,
    reporter: &mut Reporter<'_>,
) {
    let Some(mtu) = over.or(interface.mtu.as_ref().map(|mtu| mtu.value)) else {
        return;
    };
    let has_v6 = interface.addresses.iter().any(|a| a.value.addr().is_ipv6());
    let (least, why) = if has_v6 {
        (MIN_MTU_V6, "the minimum of IPv6")
    } else {
        (MIN_MTU, "the minimum that every IPv4 host accepts")
    };
    let most = match (protocol, interface.native.mode()) {
        (Protocol::Native, Mode::Ethernet) => MAX_MTU_ETHERNET,
        (Protocol::Native, Mode::Ip) => MAX_MTU_NATIVE,
        (Protocol::Wireguard, _) => MAX_MTU_WIREGUARD,
    };
    let message = if mtu < least {
        format!("is {mtu}, less than {least}, {why}")
    } else if mtu > most {
        format!("is {mtu}, more than {most}, the maximum of the {protocol} protocol")
    } else {
        return;
    };
    let help = format!("write a number of bytes from {least} to {most}");
    match (&interface.mtu, over) {
        (Some(mtu), None) => reporter.key_error(Field::Mtu, mtu.line, &message, help),
        _ => {
            let message = format!("`{}` {message}", reporter.name(Field::Mtu));
            reporter.whole(Severity::Error, &message, help);
        }
    }
}

fn check_native(
    interface: &InterfaceDraft,
    protocol: Protocol,
    overrides: &Overrides,
    reporter: &mut Reporter<'_>,
) {
    let native = &interface.native;
    if let (Some(cipher), Protocol::Wireguard) = (&native.cipher, protocol) {
        let message = "has no effect: WireGuard supports only ChaCha20-Poly1305";
        let help = "remove it, or use the native protocol";
        reporter.key_warning(Field::Cipher, cipher.line, message, help);
    }
    if let (Some(repair), Protocol::Wireguard) = (&native.repair, protocol)
        && repair.value != Repair::Off
    {
        let message = "has no effect: WireGuard cannot repair losses";
        let help = "remove it, or use the native protocol";
        reporter.key_warning(Field::Repair, repair.line, message, help);
    }
    let message = |address| {
        format!("is {address}: anyone who can reach it can see which peers communicate, and when")
    };
    let help = "listen on loopback, such as `127.0.0.1:9586`";
    match (overrides.metrics, &native.metrics) {
        (Some(address), _) if !address.ip().is_loopback() => {
            let message = format!("`{}` {}", reporter.name(Field::Metrics), message(address));
            reporter.whole(Severity::Warning, &message, help);
        }
        (None, Some(At { value, line })) if !value.ip().is_loopback() => {
            reporter.key_warning(Field::Metrics, *line, &message(*value), help);
        }
        _ => {}
    }
}

/// Checks that coordinator and credential are both given, as are those of dependent keys.
fn check_mesh(interface: &InterfaceDraft, reporter: &mut Reporter<'_>) {
    let keys = [Field::Coordinator, Field::Credential];
    let given = keys.map(|key| interface.given.has(key));
    let others = [
        Field::CoordinatorPin,
        Field::Stun,
        Field::Names,
        Field::Pins,
        Field::PinFirstUse,
        Field::PortMapping,
    ];
    let more = others.iter().any(|key| interface.given.has(*key));
    for (key, _) in keys.iter().zip(given).filter(|(_, given)| !given) {
        if given == [false; 2] && !more {
            return;
        }
        let name = reporter.name(*key);
        let message = format!("a member of a mesh needs `{name}`, which is not there");
        let help =
            "run `seikan join`, which writes the file, or remove all keys about a coordinator";
        reporter.whole(Severity::Error, &message, help);
    }
    let mut pinned = HashMap::new();
    for At { value, line } in &interface.mesh.pins {
        let (name, key) = value;
        if let Some((first, before)) = pinned.insert(name, (*line, *key))
            && before != *key
        {
            let message = format!("has `{name}` with another key, first in line {first}");
            let help = "a member has one key: keep the line that is right";
            reporter.key_error(Field::Pins, *line, &message, help);
        }
    }
}

/// Checks public keys: missing, the interface's own, or used twice.
fn check_identities(interface: &InterfaceDraft, peers: &[PeerDraft], reporter: &mut Reporter<'_>) {
    let name = reporter.name(Field::PublicKey);
    let own = interface.private_key.as_ref().map(|key| &key.value);
    let own_public = own.map(PrivateKey::public);
    let mut seen: HashMap<PublicKey, &PeerDraft> = HashMap::new();
    for peer in peers {
        let Some(At { value: key, line }) = peer.public_key else {
            if !peer.given.has(Field::PublicKey) {
                let message = format!("this peer has no `{name}`");
                let help = "add the key that `seikan pubkey < private.key` prints on the peer";
                reporter.error(peer.line, &message, help);
            }
            continue;
        };
        if own.is_some_and(|own| own.as_bytes() == key.as_bytes()) {
            reporter.hide_line(line);
            let message = "is this interface's own private key";
            let help = "make a new private key, for this one may have been seen, and write the peer's public key here";
            reporter.key_error(Field::PublicKey, line, message, help);
        } else if own_public == Some(key) {
            let message = "is this interface's own public key";
            let help = "write the peer's public key: the peer prints it with `seikan pubkey < private.key`";
            reporter.key_error(Field::PublicKey, line, message, help);
        }
        if let Some(first) = seen.insert(key, peer) {
            let message = format!("this is the same peer as {}", first.described());
            let help = "merge both into one section, or correct the key of one of them";
            let key = Some(Field::PublicKey);
            reporter.add(Severity::Error, line, key, &message, help);
        }
    }
}

/// Checks allowed IPs: missing, with host bits, or at two peers.
fn check_allowed_ips(interface: &InterfaceDraft, peers: &[PeerDraft], reporter: &mut Reporter<'_>) {
    let name = reporter.name(Field::AllowedIps);
    let mut owners: HashMap<IpNet, (usize, usize)> = HashMap::new();
    for (index, peer) in peers.iter().enumerate() {
        // In Ethernet mode, a peer without them may use any address.
        let needs_some = interface.native.mode() == Mode::Ip;
        if needs_some && !peer.given.has(Field::AllowedIps) {
            let message =
                format!("this peer has no `{name}`: nothing is sent to it or accepted from it");
            let help = "add the addresses behind the peer, such as `10.0.0.2/32`";
            reporter.warn(peer.line, &message, help);
        }
        for At { value, line } in &peer.allowed_ips {
            let masked = reporter.truncate_prefix(Field::AllowedIps, *value, *line);
            match owners.insert(masked, (index, *line)) {
                Some((owner, first)) if owner == index => {
                    reporter.repeated_value(Field::AllowedIps, masked, *line, first);
                }
                Some((owner, first)) => {
                    let message = format!(
                        "has `{masked}`, which {} has already, in line {first}",
                        peers[owner].described()
                    );
                    let help = "a prefix belongs to one peer only; a longer prefix inside it may belong to another";
                    reporter.key_error(Field::AllowedIps, *line, &message, help);
                }
                None => {}
            }
            let own = |address: &At<IpNet>| IpNet::from(address.value.addr()) == masked;
            if interface.addresses.iter().any(own) {
                let message = format!("has `{masked}`, this interface's own address");
                let help = "write the peer's address";
                reporter.key_warning(Field::AllowedIps, *line, &message, help);
            }
        }
    }
}

/// Checks that one side can reach the other first.
fn check_reach(interface: &InterfaceDraft, peers: &[PeerDraft], reporter: &mut Reporter<'_>) {
    if interface.line.is_none() {
        return;
    }
    let endpoint = reporter.name(Field::Endpoint);
    let port = reporter.name(Field::ListenPort);
    let nobody = peers.iter().all(|peer| !peer.given.has(Field::Endpoint));
    let no_port = match interface.listen_port {
        Some(port) => port == 0,
        None => !interface.given.has(Field::ListenPort),
    };
    if !peers.is_empty() && nobody && no_port {
        let message = format!(
            "no peer has an `{endpoint}` and there is no `{port}`: neither side can find the other"
        );
        let help = format!("add an `{endpoint}` to a peer, or a fixed `{port}`");
        reporter.whole(Severity::Warning, &message, help);
    }
}

/// Completes a peer; `None` if something is missing.
fn complete_peer(draft: PeerDraft) -> Option<PeerConfig> {
    Some(PeerConfig {
        name: draft.name,
        public_key: draft.public_key?.value,
        preshared_key: draft.preshared_key,
        allowed_ips: unique_prefixes(&draft.allowed_ips),
        endpoint: draft.endpoint,
        persistent_keepalive: draft.persistent_keepalive,
    })
}

fn complete(
    interface: InterfaceDraft,
    name: InterfaceName,
    protocol: Protocol,
    overrides: &Overrides,
    peers: Vec<PeerConfig>,
) -> Option<Config> {
    let (mut dns, mut dns_search) = (Vec::new(), Vec::new());
    for item in interface.dns {
        match item {
            DnsItem::Server(address) => dns.push(address),
            DnsItem::Search(domain) => dns_search.push(domain),
        }
    }
    let native = interface.native;
    let mesh = interface.mesh;
    let mesh = mesh
        .coordinator
        .zip(mesh.credential)
        .map(|(coordinator, credential)| MeshSettings {
            coordinator: coordinator.value,
            pin: mesh.pin.map(|pin| pin.value),
            credential: credential.value,
            stun: mesh.stun.into_iter().map(|server| server.value).collect(),
            names: mesh.names.unwrap_or(true),
            port_mapping: mesh.port_mapping.unwrap_or(true),
            trust: Trust {
                pins: mesh.pins.into_iter().map(|pin| pin.value).collect(),
                first_use: mesh.first_use.unwrap_or(false),
            },
        });
    Some(Config {
        name,
        protocol,
        mode: native.mode(),
        private_key: interface.private_key?.value,
        listen_port: interface.listen_port,
        addresses: interface.addresses.into_iter().map(|a| a.value).collect(),
        mtu: overrides.mtu.or(interface.mtu.map(|mtu| mtu.value)),
        dns,
        dns_search,
        table: interface.table.unwrap_or_default(),
        fwmark: interface.fwmark,
        hooks: interface.hooks,
        save_config: interface.save_config.unwrap_or(false),
        offload: overrides.offload.or(native.offload).unwrap_or(true),
        metrics: overrides.metrics.or(native.metrics.map(|m| m.value)),
        cipher: native
            .cipher
            .map_or(CipherPreference::Auto, |cipher| cipher.value),
        copy_dscp: native.copy_dscp.unwrap_or(false),
        repair: native
            .repair
            .map_or(Repair::default(), |repair| repair.value),
        peers,
        gateway: None,
        mesh,
    })
}

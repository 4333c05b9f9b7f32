//! The table of keys: type, parser, form and names of each, and its value in a [`Config`].
//!
//! [`KEYS`], the struct of each section, its reader and its writer follow from the one table below.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use seikan_proto::gateway::rules::Rule;
use seikan_proto::gateway::{DeviceConfig, Remote as RemoteConfig};
use seikan_proto::mesh::{Credential, Name, Pin};
use seikan_wire::ethernet::Mac;

use super::endpoint::{CoordinatorUrl, Endpoint, Host};
use super::key::{PresharedKey, PrivateKey, PublicKey, encode_key};
use super::report::Reporter;
use super::schema::{Entry, Form, Item, KeySpec, Section, SectionKind, Site};
use super::text::Text;
use super::types::{
    BitRate, CipherPreference, Config, GatewayMode, GatewaySettings, InterfaceName, MeshSettings,
    Mode, PeerConfig, Protocol, Repair, Table,
};
use super::values::{self, Problem};

/// A valid value and its site.
#[derive(Clone)]
pub(super) struct At<T> {
    pub value: T,
    pub site: Site,
}

/// The values of one key of a section, in the order of the file.
pub(super) struct Key<T> {
    pub spec: &'static KeySpec,
    /// Line of the last entry, valid or not; 0 without any.
    pub line: usize,
    /// Number of values, valid or not.
    count: usize,
    /// Valid values. The last one counts for a key that takes a single value.
    pub values: Vec<At<T>>,
}

impl<T> Key<T> {
    fn new(spec: &'static KeySpec) -> Self {
        Self {
            spec,
            line: 0,
            count: 0,
            values: Vec::new(),
        }
    }

    /// Returns whether the section has the key, valid or not.
    pub fn is_given(&self) -> bool {
        self.line != 0
    }

    /// Returns the value that counts.
    pub fn last(&self) -> Option<&At<T>> {
        self.values.last()
    }

    /// Reports that the section, which messages call `subject`, lacks this key. `example` is a
    /// value of it, described by `wanted`.
    pub fn require(
        &self,
        site: Site,
        subject: &str,
        [wanted, example]: [&str; 2],
        reporter: &mut Reporter<'_>,
    ) {
        if !self.is_given() {
            let example = reporter.example(self.spec, example);
            reporter.error(
                site,
                format!("{subject} has no `{}`", reporter.name(self.spec)),
                format!("add {wanted}, such as {example}"),
            );
        }
    }

    /// Converts the values of an entry; reports invalid ones, and the repetition of a key that
    /// takes one value.
    fn read(
        &mut self,
        entry: Entry,
        parse: fn(&str) -> Result<T, Problem>,
        reporter: &mut Reporter<'_>,
    ) {
        if self.count > 0 && !entry.items.is_empty() && !self.spec.is_list() {
            reporter.warn(
                self.spec.at(entry.line),
                "is given again: only the last one counts",
                "remove the others",
            );
        }
        self.line = entry.line;
        self.count += entry.items.len();
        for Item { text, line } in entry.items {
            let site = self.spec.at(line);
            match parse(&text) {
                Ok(value) => self.values.push(At { value, site }),
                Err(problem) => reporter.error(site, problem.message, problem.help),
            }
        }
    }
}

impl<T: Clone> Key<T> {
    /// Returns the value that counts.
    pub fn get(&self) -> Option<T> {
        self.last().map(|at| at.value.clone())
    }

    /// Returns all values.
    pub fn all<C: FromIterator<T>>(&self) -> C {
        self.values.iter().map(|at| at.value.clone()).collect()
    }

    /// Returns all values for which the function returns something.
    pub fn all_of<U>(&self, select: fn(&T) -> Option<U>) -> Vec<U> {
        self.values
            .iter()
            .filter_map(|at| select(&at.value))
            .collect()
    }
}

impl Key<String> {
    /// Returns the texts that are not empty.
    pub fn texts(&self) -> Vec<String> {
        self.all_of(|text| Some(text.clone()).filter(|text| !text.is_empty()))
    }
}

impl Key<IpNet> {
    /// Returns the prefixes without their host bits, each once.
    pub fn unique(&self) -> Vec<IpNet> {
        let mut seen = HashSet::new();
        let masked = self.values.iter().map(|at| at.value.trunc());
        masked.filter(|prefix| seen.insert(*prefix)).collect()
    }
}

/// Defines sections and their keys. A row: the field and the type of its values = the parser in
/// `values`, the form, the names in both syntaxes => the values to write, none of which leaves the
/// key out.
macro_rules! sections {
    ($($(#[$doc:meta])* $section:ident($config:ident: $source:ty, $text:ident) {
        $($key:ident: $type:ty = $parse:ident, $form:ident, $ini:literal, $toml:literal => $value:expr;)*
    })*) => {
        /// All keys, in the order of the table.
        pub(super) static KEYS: &[KeySpec] = &[$($(KeySpec {
            section: SectionKind::$section,
            form: Form::$form,
            ini: $ini,
            toml: $toml,
        },)*)*];

        $($(#[$doc])*
        pub(super) struct $section {
            /// Line of the header; 0 if there is no section.
            pub site: Site,
            $(pub $key: Key<$type>,)*
        }

        impl Default for $section {
            fn default() -> Self {
                Self {
                    site: Site::FILE,
                    $($key: Key::new(&KeySpec {
                        section: SectionKind::$section,
                        form: Form::$form,
                        ini: $ini,
                        toml: $toml,
                    }),)*
                }
            }
        }

        impl $section {
            /// Adds the values of a section; reports invalid ones.
            pub fn read(mut self, section: Section, reporter: &mut Reporter<'_>) -> Self {
                if self.site.line == 0 {
                    self.site.line = section.line;
                }
                for entry in section.entries {
                    match entry.key.toml {
                        $($toml => self.$key.read(entry, values::$parse, reporter),)*
                        // The splitters pass only keys that belong to the section.
                        _ => {}
                    }
                }
                self
            }

            /// Writes the section's header and its keys that have values.
            pub fn write($config: &$source, $text: &mut Text) {
                let keys = Self::default();
                $text.header(SectionKind::$section);
                $($text.write(keys.$key.spec, $value);)*
            }
        })*
    };
}

sections! {
    /// The interface.
    Interface(config: Config, text) {
        protocol: Protocol = protocol, Text, "Protocol", "protocol"
            => unless(config.protocol, Protocol::default_of(text.syntax));
        mode: Mode = mode, Text, "Mode", "mode" => unless(config.mode, Mode::Ip);
        private_key: PrivateKey = private_key, Secret, "PrivateKey", "private-key"
            => [&*encode_key(config.private_key.as_bytes())];
        private_key_file: String = text, Text, "PrivateKeyFile", "private-key-file" => None::<&str>;
        listen_port: u16 = port, Plain, "ListenPort", "listen-port" => config.listen_port;
        address: IpNet = prefix, List, "Address", "address" => &config.addresses;
        mtu: u32 = mtu, Plain, "MTU", "mtu" => config.mtu;
        dns: Host = dns, List, "DNS", "dns" => dns(config);
        table: Table = table, Text, "Table", "table" => unless(config.table, Table::Auto);
        fwmark: Option<u32> = fwmark, Plain, "FwMark", "fwmark"
            => config.fwmark.map(|mark| format!("{mark:#x}"));
        pre_up: String = text, Commands, "PreUp", "pre-up" => &config.hooks.pre_up;
        post_up: String = text, Commands, "PostUp", "post-up" => &config.hooks.post_up;
        pre_down: String = text, Commands, "PreDown", "pre-down" => &config.hooks.pre_down;
        post_down: String = text, Commands, "PostDown", "post-down" => &config.hooks.post_down;
        save_config: bool = boolean, Plain, "SaveConfig", "save-config" => unless(config.save_config, false);
        offload: bool = boolean, Plain, "Offload", "offload" => unless(config.offload, true);
        metrics: SocketAddr = socket, Text, "Metrics", "metrics" => config.metrics;
        cipher: CipherPreference = cipher, Text, "Cipher", "cipher"
            => unless(config.cipher, CipherPreference::Auto);
        copy_dscp: bool = boolean, Plain, "CopyDSCP", "copy-dscp" => unless(config.copy_dscp, false);
        repair: Repair = repair, Text, "Repair", "repair" => unless(config.repair, Repair::Auto);
        uplink_rate: BitRate = rate, Text, "UplinkRate", "uplink-rate" => config.uplink_rate;
        coordinator: CoordinatorUrl = coordinator, Text, "Coordinator", "coordinator"
            => config.mesh.as_ref().map(|mesh| &mesh.coordinator);
        coordinator_pin: Pin = pin, Text, "CoordinatorPin", "coordinator-pin"
            => config.mesh.as_ref().and_then(|mesh| mesh.pin);
        credential: Credential = credential, Secret, "Credential", "credential"
            => config.mesh.as_ref().map(|mesh| mesh.credential.reveal()).as_deref();
        stun: Endpoint = endpoint, List, "STUN", "stun" => config.mesh.iter().flat_map(|mesh| &mesh.stun);
        names: bool = boolean, Plain, "Names", "names"
            => config.mesh.as_ref().and_then(|mesh| unless(mesh.names, true));
        port_mapping: bool = boolean, Plain, "PortMapping", "port-mapping"
            => config.mesh.as_ref().and_then(|mesh| unless(mesh.port_mapping, true));
        pins: (Name, PublicKey) = member_pin, Lines, "Pins", "pins" => config.mesh.iter().flat_map(pins);
        pin_first_use: bool = boolean, Plain, "PinFirstUse", "pin-first-use"
            => config.mesh.as_ref().and_then(|mesh| unless(mesh.trust.first_use, false));
    }

    /// One peer.
    Peer(peer: PeerConfig, text) {
        name: String = name, Text, "Name", "name" => &peer.name;
        public_key: PublicKey = public_key, Text, "PublicKey", "public-key" => [peer.public_key];
        preshared_key: Option<PresharedKey> = preshared_key, Secret, "PresharedKey", "preshared-key"
            => peer.preshared_key.as_ref().map(|key| encode_key(key.as_bytes())).as_deref();
        preshared_key_file: String = text, Text, "PresharedKeyFile", "preshared-key-file" => None::<&str>;
        allowed_ips: IpNet = prefix, List, "AllowedIPs", "allowed-ips" => &peer.allowed_ips;
        endpoint: Endpoint = endpoint, Text, "Endpoint", "endpoint" => &peer.endpoint;
        persistent_keepalive: Option<u16> = keepalive, Plain, "PersistentKeepalive", "persistent-keepalive"
            => peer.persistent_keepalive;
    }

    /// The gateway.
    Gateway(gateway: GatewaySettings, text) {
        interface: InterfaceName = interface, Text, "Interface", "interface" => [&gateway.interface];
        mode: GatewayMode = gateway_mode, Text, "Mode", "mode"
            => unless(gateway.mode, GatewayMode::Transparent);
        answer_for: IpNet = prefix, List, "AnswerFor", "answer-for" => &gateway.answer_for;
        proxy_arp: bool = boolean, Plain, "ProxyARP", "proxy-arp" => unless(gateway.proxy_arp, false);
        priority: u8 = priority, Plain, "Priority", "priority" => gateway.priority;
    }

    /// One device behind the gateway.
    Device(device: DeviceConfig, text) {
        name: String = device_name, Text, "Name", "name" => [&device.name];
        mac: Mac = mac, Text, "MAC", "mac" => device.mac;
        vlan: u16 = vlan, Plain, "VLAN", "vlan" => device.vlan;
        lan: IpAddr = host_address, List, "LAN", "lan" => &device.lan;
        overlay: IpAddr = host_address, List, "Overlay", "overlay" => &device.overlay;
        allow_from: Rule = rule, Rules, "AllowFrom", "allow-from" => &device.allow_from;
        allow_to: Rule = rule, Rules, "AllowTo", "allow-to" => &device.allow_to;
    }

    /// One address of the overlay, mapped to an address on the local network.
    Remote(remote: RemoteConfig, text) {
        overlay: IpAddr = host_address, Text, "Overlay", "overlay" => [remote.overlay];
        lan: IpAddr = host_address, Text, "LAN", "lan" => [remote.lan];
    }
}

impl Peer {
    /// Returns the peer's name for messages.
    pub fn described(&self) -> String {
        described("peer", &self.name, self.site)
    }
}

impl Device {
    /// Returns the device's name for messages.
    pub fn described(&self) -> String {
        described("device", &self.name, self.site)
    }
}

fn described(kind: &str, name: &Key<String>, site: Site) -> String {
    match name.last() {
        Some(name) => format!("the {kind} `{}`", name.value),
        None => format!("the {kind} in line {}", site.line),
    }
}

/// Returns the value unless it is the default.
fn unless<T: PartialEq>(value: T, default: T) -> Option<T> {
    Some(value).filter(|value| *value != default)
}

/// Returns name servers and search domains.
fn dns(config: &Config) -> impl Iterator<Item = String> {
    let servers = config.dns.iter().map(ToString::to_string);
    servers.chain(config.dns_search.iter().cloned())
}

/// Returns names and pinned keys.
fn pins(mesh: &MeshSettings) -> impl Iterator<Item = String> {
    let pins = mesh.trust.pins.iter();
    pins.map(|(name, key)| format!("{name} {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_on_the_page_of_the_documentation() {
        let page = include_str!("../../../docs/reference/configuration.md");
        let is_there = |name: &str| page.contains(&format!("`{name}`"));
        let missing: Vec<&str> = KEYS
            .iter()
            .flat_map(|key| [key.ini, key.toml])
            .filter(|name| !is_there(name))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

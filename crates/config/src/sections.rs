//! The table of keys: names in both syntaxes, form, type and parser of each key of each section.
//!
//! [`KEYS`] and the structs of the sections follow from the one table below.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use seikan_proto::gateway::rules::Rule;
use seikan_proto::mesh::{Credential, Name, Pin};
use seikan_wire::ethernet::Mac;

use super::endpoint::{CoordinatorUrl, Endpoint, Host};
use super::key::{PresharedKey, PrivateKey, PublicKey};
use super::report::{Reporter, did_you_mean, word};
use super::schema::{Entry, Form, Item, KeySpec, Section, SectionKind, Site};
use super::source::Syntax;
use super::types::{CipherPreference, GatewayMode, InterfaceName, Mode, Protocol, Repair, Table};
use super::values::{self, Problem};

/// Maximum length of a word that may be a misspelt key, in bytes.
const LONGEST_SLIP: usize = 32;

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
    /// Valid values; of a key that takes one, the last one counts.
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

    /// Reports that the section, `subject`, has no such key. `example`: a value of it, described by `wanted`.
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

    /// Converts the values of an entry; reports invalid ones, and the repetition of a key that takes one value.
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

impl Key<IpNet> {
    /// Returns the prefixes without their host bits, each once.
    pub fn unique(&self) -> Vec<IpNet> {
        let mut seen = HashSet::new();
        let masked = self.values.iter().map(|at| at.value.trunc());
        masked.filter(|prefix| seen.insert(*prefix)).collect()
    }
}

macro_rules! sections {
    ($($(#[$doc:meta])* $section:ident {
        $($key:ident: $type:ty = $parse:ident, $form:ident, $ini:literal, $toml:literal;)*
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
        })*
    };
}

sections! {
    /// The interface.
    Interface {
        private_key: PrivateKey = private_key, Secret, "PrivateKey", "private-key";
        private_key_file: String = text, Text, "PrivateKeyFile", "private-key-file";
        listen_port: u16 = port, Plain, "ListenPort", "listen-port";
        address: IpNet = prefix, List, "Address", "address";
        mtu: u32 = mtu, Plain, "MTU", "mtu";
        dns: Host = dns, List, "DNS", "dns";
        table: Table = table, Text, "Table", "table";
        fwmark: Option<u32> = fwmark, Plain, "FwMark", "fwmark";
        pre_up: String = text, Commands, "PreUp", "pre-up";
        post_up: String = text, Commands, "PostUp", "post-up";
        pre_down: String = text, Commands, "PreDown", "pre-down";
        post_down: String = text, Commands, "PostDown", "post-down";
        save_config: bool = boolean, Plain, "SaveConfig", "save-config";
        protocol: Protocol = protocol, Text, "Protocol", "protocol";
        mode: Mode = mode, Text, "Mode", "mode";
        offload: bool = boolean, Plain, "Offload", "offload";
        metrics: SocketAddr = socket, Text, "Metrics", "metrics";
        cipher: CipherPreference = cipher, Text, "Cipher", "cipher";
        copy_dscp: bool = boolean, Plain, "CopyDSCP", "copy-dscp";
        repair: Repair = repair, Text, "Repair", "repair";
        coordinator: CoordinatorUrl = coordinator, Text, "Coordinator", "coordinator";
        coordinator_pin: Pin = pin, Text, "CoordinatorPin", "coordinator-pin";
        credential: Credential = credential, Secret, "Credential", "credential";
        stun: Endpoint = endpoint, List, "STUN", "stun";
        names: bool = boolean, Plain, "Names", "names";
        pins: (Name, PublicKey) = member_pin, Lines, "Pins", "pins";
        pin_first_use: bool = boolean, Plain, "PinFirstUse", "pin-first-use";
        port_mapping: bool = boolean, Plain, "PortMapping", "port-mapping";
    }

    /// One peer.
    Peer {
        name: String = name, Text, "Name", "name";
        public_key: PublicKey = public_key, Text, "PublicKey", "public-key";
        preshared_key: Option<PresharedKey> = preshared_key, Secret, "PresharedKey", "preshared-key";
        preshared_key_file: String = text, Text, "PresharedKeyFile", "preshared-key-file";
        allowed_ips: IpNet = prefix, List, "AllowedIPs", "allowed-ips";
        endpoint: Endpoint = endpoint, Text, "Endpoint", "endpoint";
        persistent_keepalive: Option<u16> = keepalive, Plain, "PersistentKeepalive", "persistent-keepalive";
    }

    /// The gateway.
    Gateway {
        interface: InterfaceName = interface, Text, "Interface", "interface";
        mode: GatewayMode = gateway_mode, Text, "Mode", "mode";
        answer_for: IpNet = prefix, List, "AnswerFor", "answer-for";
        proxy_arp: bool = boolean, Plain, "ProxyARP", "proxy-arp";
        priority: u8 = priority, Plain, "Priority", "priority";
    }

    /// One device behind the gateway.
    Device {
        name: String = device_name, Text, "Name", "name";
        mac: Mac = mac, Text, "MAC", "mac";
        vlan: u16 = vlan, Plain, "VLAN", "vlan";
        lan: IpAddr = host_address, List, "LAN", "lan";
        overlay: IpAddr = host_address, List, "Overlay", "overlay";
        allow_from: Rule = rule, Rules, "AllowFrom", "allow-from";
        allow_to: Rule = rule, Rules, "AllowTo", "allow-to";
    }

    /// One address of the overlay, mapped to an address on the local network.
    Remote {
        overlay: IpAddr = host_address, Text, "Overlay", "overlay";
        lan: IpAddr = host_address, Text, "LAN", "lan";
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

impl Section {
    /// Adds a key with its values; `None` if they are invalid, which was reported.
    pub fn add(
        &mut self,
        key: &'static KeySpec,
        line: usize,
        items: Option<Vec<Item>>,
        reporter: &mut Reporter<'_>,
    ) {
        if items.as_ref().is_some_and(Vec::is_empty) {
            // An empty list is equivalent to none.
            if key.form != Form::Rules {
                return;
            }
            let name = reporter.name(key);
            reporter.error(
                key.at(line),
                "is empty",
                format!("write which hosts are allowed; without `{name}` all are"),
            );
        }
        let items = items.unwrap_or_default();
        self.entries.push(Entry { key, line, items });
    }

    /// Returns the key of this section with a name (INI: case-insensitive). Reports another name, and marks the key
    /// that was meant, if that is clear, as invalid.
    pub fn find(
        &mut self,
        name: &str,
        line: usize,
        reporter: &mut Reporter<'_>,
    ) -> Option<&'static KeySpec> {
        let syntax = reporter.syntax;
        let named: Vec<_> = KEYS
            .iter()
            .filter(|key| is_named(key, name, syntax))
            .collect();
        if let Some(own) = named.iter().find(|key| key.section == self.kind) {
            return Some(own);
        }
        let Some(elsewhere) = named.first() else {
            self.unknown_key(name, line, reporter);
            return None;
        };
        let locations: Vec<_> = named
            .iter()
            .map(|key| key.section.location(syntax))
            .collect();
        reporter.error(
            elsewhere.at(line),
            format!("does not belong {}", self.kind.location(syntax)),
            format!(
                "`{}` belongs {}",
                elsewhere.name(syntax),
                locations.join(" or ")
            ),
        );
        None
    }

    fn unknown_key(&mut self, name: &str, line: usize, reporter: &mut Reporter<'_>) {
        let syntax = reporter.syntax;
        let own = KEYS.iter().filter(|key| key.section == self.kind);
        let known: Vec<_> = own.map(|key| key.name(syntax)).collect();
        let near = nearest(name, self.kind);
        let otherwise = format!("known keys: {}", known.join(", "));
        let help = did_you_mean(near.map(|key| key.name(syntax)), otherwise);
        let location = self.kind.location(syntax);
        let message = format!("unknown key `{}` {location}", word(name));
        reporter.named_error(Site { line, key: near }, name, &message, help);
        if let Some(key) = near.filter(|key| key.section == self.kind) {
            self.add(key, line, None, reporter);
        }
    }
}

/// Returns whether a key has a name (INI: case-insensitive).
pub(super) fn is_named(key: &KeySpec, name: &str, syntax: Syntax) -> bool {
    match syntax {
        Syntax::Ini => key.ini.eq_ignore_ascii_case(name),
        Syntax::Toml => key.toml == name,
    }
}

/// Returns the key with the most similar name, preferably of the section, if it is similar enough.
fn nearest(name: &str, section: SectionKind) -> Option<&'static KeySpec> {
    let plain = |text: &str| text.replace(['-', '_', ' '], "").to_ascii_lowercase();
    // Time and memory of the distance grow with the product of the lengths.
    if name.len() > LONGEST_SLIP {
        return None;
    }
    let given = plain(name);
    let candidates = KEYS.iter().filter_map(|key| {
        let known = plain(key.ini);
        let distance = strsim::damerau_levenshtein(&given, &known);
        let rank = if distance <= (known.len() / 3).max(1) {
            distance
        } else if given.len() >= 4 && known.contains(&given) {
            // "keepalive" has a large distance to "PersistentKeepalive", but is clear.
            usize::MAX
        } else {
            return None;
        };
        Some((rank, key.section != section, key))
    });
    let nearest = candidates.min_by_key(|(rank, elsewhere, _)| (*rank, *elsewhere));
    nearest.map(|(.., key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_finds_its_neighbour() {
        let near = |name| nearest(name, SectionKind::Peer).map(|key| key.ini);
        assert_eq!(near("AllowedIP"), Some("AllowedIPs"));
        assert_eq!(near("Adress"), Some("Address"));
        assert_eq!(near("PersistantKeepAlive"), Some("PersistentKeepalive"));
        assert_eq!(near("keepalive"), Some("PersistentKeepalive"));
        assert_eq!(near("Colour"), None);
        assert_eq!(near("listen_port"), Some("ListenPort"));
    }

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

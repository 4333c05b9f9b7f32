//! The table of keys, and the structure of a file before its values are converted.
//!
//! Both syntaxes produce a [`Document`]: sections of entries, each value a text with its line.
//! [`KEYS`] is the only definition of each key's names, section and secrecy.

use zeroize::Zeroizing;

use super::source::Syntax;

/// Kinds of sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SectionKind {
    Interface,
    Peer,
    Gateway,
    /// One device behind the gateway.
    Device,
    /// One address of the overlay, mapped to an address on the local network.
    Remote,
}

/// Number of values of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// One.
    One,
    /// Any number, separated by commas or repeated.
    List,
    /// Any number, each on a line of its own.
    Lines,
}

/// Definition of a key.
#[derive(Debug)]
pub(super) struct FieldSpec {
    pub key: Field,
    pub section: SectionKind,
    pub shape: Shape,
    ini: &'static str,
    toml: &'static str,
}

macro_rules! keys {
    ($($key:ident: $section:ident, $shape:ident, $ini:literal, $toml:literal;)*) => {
        /// All keys.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Field {
            $($key,)*
        }

        /// The schema, in the order of [`Field`].
        pub(super) static KEYS: &[FieldSpec] = &[
            $(FieldSpec {
                key: Field::$key,
                section: SectionKind::$section,
                shape: Shape::$shape,
                ini: $ini,
                toml: $toml,
            },)*
        ];
    };
}

keys! {
    PrivateKey: Interface, One, "PrivateKey", "private-key";
    PrivateKeyFile: Interface, One, "PrivateKeyFile", "private-key-file";
    ListenPort: Interface, One, "ListenPort", "listen-port";
    Address: Interface, List, "Address", "address";
    Mtu: Interface, One, "MTU", "mtu";
    Dns: Interface, List, "DNS", "dns";
    Table: Interface, One, "Table", "table";
    FwMark: Interface, One, "FwMark", "fwmark";
    PreUp: Interface, Lines, "PreUp", "pre-up";
    PostUp: Interface, Lines, "PostUp", "post-up";
    PreDown: Interface, Lines, "PreDown", "pre-down";
    PostDown: Interface, Lines, "PostDown", "post-down";
    SaveConfig: Interface, One, "SaveConfig", "save-config";
    Protocol: Interface, One, "Protocol", "protocol";
    Mode: Interface, One, "Mode", "mode";
    Offload: Interface, One, "Offload", "offload";
    Metrics: Interface, One, "Metrics", "metrics";
    Cipher: Interface, One, "Cipher", "cipher";
    CopyDscp: Interface, One, "CopyDSCP", "copy-dscp";
    Repair: Interface, One, "Repair", "repair";
    Coordinator: Interface, One, "Coordinator", "coordinator";
    CoordinatorPin: Interface, One, "CoordinatorPin", "coordinator-pin";
    Credential: Interface, One, "Credential", "credential";
    Stun: Interface, List, "STUN", "stun";
    Names: Interface, One, "Names", "names";
    Pins: Interface, Lines, "Pins", "pins";
    PinFirstUse: Interface, One, "PinFirstUse", "pin-first-use";
    PortMapping: Interface, One, "PortMapping", "port-mapping";
    Name: Peer, One, "Name", "name";
    PublicKey: Peer, One, "PublicKey", "public-key";
    PresharedKey: Peer, One, "PresharedKey", "preshared-key";
    PresharedKeyFile: Peer, One, "PresharedKeyFile", "preshared-key-file";
    AllowedIps: Peer, List, "AllowedIPs", "allowed-ips";
    Endpoint: Peer, One, "Endpoint", "endpoint";
    PersistentKeepalive: Peer, One, "PersistentKeepalive", "persistent-keepalive";
    GatewayInterface: Gateway, One, "Interface", "interface";
    GatewayMode: Gateway, One, "Mode", "mode";
    AnswerFor: Gateway, List, "AnswerFor", "answer-for";
    ProxyArp: Gateway, One, "ProxyARP", "proxy-arp";
    Priority: Gateway, One, "Priority", "priority";
    DeviceName: Device, One, "Name", "name";
    DeviceMac: Device, One, "MAC", "mac";
    DeviceVlan: Device, One, "VLAN", "vlan";
    DeviceLan: Device, List, "LAN", "lan";
    DeviceOverlay: Device, List, "Overlay", "overlay";
    AllowFrom: Device, Lines, "AllowFrom", "allow-from";
    AllowTo: Device, Lines, "AllowTo", "allow-to";
    RemoteOverlay: Remote, One, "Overlay", "overlay";
    RemoteLan: Remote, One, "LAN", "lan";
}

impl Field {
    /// Returns the definition of the key.
    pub fn spec(self) -> &'static FieldSpec {
        &KEYS[self as usize]
    }

    /// Returns the key's name in a syntax.
    pub fn name(self, syntax: Syntax) -> &'static str {
        self.spec().name(syntax)
    }

    /// Returns whether the value is secret.
    pub fn is_secret(self) -> bool {
        matches!(
            self,
            Self::PrivateKey | Self::PresharedKey | Self::Credential
        )
    }

    /// Returns whether a report for others may contain the value: it is neither a secret nor a command, which may
    /// contain one. Without a wildcard, so that a new key needs a decision.
    pub fn is_reportable(self) -> bool {
        match self {
            Self::PrivateKey
            | Self::PresharedKey
            | Self::Credential
            | Self::PreUp
            | Self::PostUp
            | Self::PreDown
            | Self::PostDown => false,
            Self::PrivateKeyFile
            | Self::ListenPort
            | Self::Address
            | Self::Mtu
            | Self::Dns
            | Self::Table
            | Self::FwMark
            | Self::SaveConfig
            | Self::Protocol
            | Self::Mode
            | Self::Offload
            | Self::Metrics
            | Self::Cipher
            | Self::CopyDscp
            | Self::Repair
            | Self::Coordinator
            | Self::CoordinatorPin
            | Self::Stun
            | Self::Names
            | Self::Pins
            | Self::PinFirstUse
            | Self::PortMapping
            | Self::Name
            | Self::PublicKey
            | Self::PresharedKeyFile
            | Self::AllowedIps
            | Self::Endpoint
            | Self::PersistentKeepalive
            | Self::GatewayInterface
            | Self::GatewayMode
            | Self::AnswerFor
            | Self::ProxyArp
            | Self::Priority
            | Self::DeviceName
            | Self::DeviceMac
            | Self::DeviceVlan
            | Self::DeviceLan
            | Self::DeviceOverlay
            | Self::AllowFrom
            | Self::AllowTo
            | Self::RemoteOverlay
            | Self::RemoteLan => true,
        }
    }

    /// Returns whether an empty list differs from no list: it reads as "nobody", and would allow
    /// anybody.
    pub fn must_have_values(self) -> bool {
        matches!(self, Self::AllowFrom | Self::AllowTo)
    }
}

impl FieldSpec {
    /// Returns the key's name in a syntax.
    pub fn name(&self, syntax: Syntax) -> &'static str {
        match syntax {
            Syntax::Ini => self.ini,
            Syntax::Toml => self.toml,
        }
    }
}

impl SectionKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Interface,
        Self::Peer,
        Self::Gateway,
        Self::Device,
        Self::Remote,
    ];

    /// Returns the section's header; an interface has none in TOML.
    pub fn header(self, syntax: Syntax) -> Option<&'static str> {
        match (self, syntax) {
            (Self::Interface, Syntax::Ini) => Some("[Interface]"),
            (Self::Peer, Syntax::Ini) => Some("[Peer]"),
            (Self::Gateway, Syntax::Ini) => Some("[Gateway]"),
            (Self::Device, Syntax::Ini) => Some("[Device]"),
            (Self::Remote, Syntax::Ini) => Some("[Remote]"),
            (Self::Interface, Syntax::Toml) => None,
            (Self::Peer, Syntax::Toml) => Some("[[peer]]"),
            (Self::Gateway, Syntax::Toml) => Some("[gateway]"),
            (Self::Device, Syntax::Toml) => Some("[[gateway.device]]"),
            (Self::Remote, Syntax::Toml) => Some("[[gateway.remote]]"),
        }
    }

    /// Returns the location of the section's keys, for messages.
    pub fn location(self, syntax: Syntax) -> String {
        match self.header(syntax) {
            Some(header) => format!("in {header}"),
            None => "at the top of the file".to_owned(),
        }
    }
}

/// Returns the key of a section by its name (INI: case-insensitive).
pub(super) fn find(name: &str, section: SectionKind, syntax: Syntax) -> Option<&'static FieldSpec> {
    find_anywhere(name, syntax).find(|spec| spec.section == section)
}

/// Returns the keys of all sections with a name.
pub(super) fn find_anywhere(
    name: &str,
    syntax: Syntax,
) -> impl Iterator<Item = &'static FieldSpec> {
    KEYS.iter().filter(move |spec| match syntax {
        Syntax::Ini => spec.ini.eq_ignore_ascii_case(name),
        Syntax::Toml => spec.toml == name,
    })
}

/// Maximum length of a word that may be a misspelt key, in bytes.
const LONGEST_SLIP: usize = 32;

/// Returns the key with the most similar name, preferably of the section, if it is similar enough.
pub(super) fn nearest(name: &str, section: SectionKind) -> Option<&'static FieldSpec> {
    let plain = |text: &str| text.replace(['-', '_', ' '], "").to_ascii_lowercase();
    // Time and memory of the distance grow with the product of the lengths.
    if name.len() > LONGEST_SLIP {
        return None;
    }
    let given = plain(name);
    let by_distance = KEYS
        .iter()
        .map(|spec| {
            let known = plain(spec.ini);
            let distance = strsim::damerau_levenshtein(&given, &known);
            (spec, distance, (known.len() / 3).max(1))
        })
        .filter(|(_, distance, enough)| distance <= enough)
        .min_by_key(|(spec, distance, _)| (*distance, spec.section != section))
        .map(|(spec, ..)| spec);
    // "keepalive" has a large distance to "PersistentKeepalive", but is clear.
    by_distance.or_else(|| {
        let part_of = |spec: &&FieldSpec| given.len() >= 4 && plain(spec.ini).contains(&given);
        let mut all = KEYS.iter().filter(part_of);
        all.clone()
            .find(|spec| spec.section == section)
            .or_else(|| all.next())
    })
}

/// A file, split into sections.
#[derive(Default)]
pub(super) struct Document {
    pub sections: Vec<Section>,
}

/// One section.
pub(super) struct Section {
    pub kind: SectionKind,
    /// Line of its header (1 if there is none).
    pub line: usize,
    pub entries: Vec<Entry>,
}

impl Section {
    /// A section without entries.
    pub fn new(kind: SectionKind, line: usize) -> Self {
        Self {
            kind,
            line,
            entries: Vec::new(),
        }
    }
}

/// A key and its values. An entry without items was present but invalid, which was reported: it is
/// not missing.
pub(super) struct Entry {
    pub key: Field,
    pub line: usize,
    pub items: Vec<Item>,
}

impl Entry {
    /// Returns an entry for a key with an invalid value.
    pub fn invalid(key: Field, line: usize) -> Self {
        Self {
            key,
            line,
            items: Vec::new(),
        }
    }
}

/// One value as text.
pub(super) struct Item {
    pub text: Zeroizing<String>,
    pub line: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_finds_its_neighbour() {
        let near = |name| nearest(name, SectionKind::Peer).map(|spec| spec.ini);
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
            .flat_map(|spec| [spec.ini, spec.toml])
            .filter(|name| !is_there(name))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}

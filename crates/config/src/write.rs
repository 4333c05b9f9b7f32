//! Writes a configuration as text in either syntax, for `SaveConfig`, bug reports and tests.
//!
//! Only values that differ from the default are written. The text contains keys: it is wiped on
//! drop. That of a bug report contains none.

use seikan_proto::gateway::DeviceConfig;
use zeroize::Zeroizing;

use super::key::encode_key;
use super::schema::{Field, SectionKind, Shape};
use super::source::Syntax;
use super::types::{
    CipherPreference, Config, GatewayMode, GatewaySettings, MeshSettings, Mode, PeerConfig,
    Protocol, Repair, Table,
};

/// A value that the wg-quick syntax cannot express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{key}` has a `#` or a line break, which a .conf file cannot hold: keep this configuration in a .toml file"
)]
pub struct NotInIni {
    key: &'static str,
}

/// Replaces values that [`Config::to_redacted`] leaves out.
const REDACTED: &str = "(redacted)";

/// Text under construction; wiped on drop.
struct Text {
    syntax: Syntax,
    /// Values that are secret or may contain a secret are left out.
    is_redacted: bool,
    out: Zeroizing<String>,
    /// The first key with a value that wg-quick's syntax cannot express.
    not_in_ini: Option<Field>,
}

impl Config {
    /// Returns the configuration in wg-quick's syntax.
    pub fn to_ini(&self) -> Result<Zeroizing<String>, NotInIni> {
        let text = Text::of(self, Syntax::Ini, false);
        match text.not_in_ini {
            Some(key) => Err(NotInIni {
                key: key.name(Syntax::Ini),
            }),
            None => Ok(text.out),
        }
    }

    /// Returns the configuration in TOML.
    pub fn to_toml(&self) -> Zeroizing<String> {
        Text::of(self, Syntax::Toml, false).out
    }

    /// Returns the configuration for readers on other hosts: without keys, the credential and the commands of hooks.
    /// The keys' names remain, each with `(redacted)`. The text is for people: it cannot be parsed again.
    pub fn to_redacted(&self, syntax: Syntax) -> String {
        Text::of(self, syntax, true).out.to_string()
    }
}

impl Text {
    fn of(config: &Config, syntax: Syntax, is_redacted: bool) -> Self {
        let mut text = Self {
            syntax,
            is_redacted,
            out: Zeroizing::default(),
            not_in_ini: None,
        };
        text.interface(config);
        for peer in &config.peers {
            text.peer(peer);
        }
        if let Some(gateway) = &config.gateway {
            text.gateway(gateway);
        }
        text
    }

    fn interface(&mut self, config: &Config) {
        if self.syntax == Syntax::Ini {
            self.push("[Interface]\n");
        }
        let protocol = match self.syntax {
            Syntax::Ini => Protocol::Wireguard,
            Syntax::Toml => Protocol::Native,
        };
        self.unless_default(Field::Protocol, config.protocol, protocol);
        self.unless_default(Field::Mode, config.mode, Mode::Ip);
        self.one(
            Field::PrivateKey,
            &encode_key(config.private_key.as_bytes()),
        );
        self.option(Field::ListenPort, config.listen_port);
        self.list(Field::Address, &config.addresses);
        self.option(Field::Mtu, config.mtu);
        let servers = config.dns.iter().map(ToString::to_string);
        self.list(Field::Dns, servers.chain(config.dns_search.iter().cloned()));
        self.unless_default(Field::Table, config.table, Table::Auto);
        let mark = config.fwmark.map(|mark| format!("{mark:#x}"));
        self.option(Field::FwMark, mark);
        self.list(Field::PreUp, &config.hooks.pre_up);
        self.list(Field::PostUp, &config.hooks.post_up);
        self.list(Field::PreDown, &config.hooks.pre_down);
        self.list(Field::PostDown, &config.hooks.post_down);
        self.unless_default(Field::SaveConfig, config.save_config, false);
        self.unless_default(Field::Offload, config.offload, true);
        self.option(Field::Metrics, config.metrics);
        self.unless_default(Field::Cipher, config.cipher, CipherPreference::Auto);
        self.unless_default(Field::CopyDscp, config.copy_dscp, false);
        self.unless_default(Field::Repair, config.repair, Repair::default());
        if let Some(mesh) = &config.mesh {
            self.mesh(mesh);
        }
    }

    fn mesh(&mut self, mesh: &MeshSettings) {
        self.one(Field::Coordinator, &mesh.coordinator.to_string());
        self.option(Field::CoordinatorPin, mesh.pin);
        self.one(Field::Credential, &mesh.credential.reveal());
        self.list(Field::Stun, &mesh.stun);
        self.unless_default(Field::Names, mesh.names, true);
        self.unless_default(Field::PortMapping, mesh.port_mapping, true);
        let pins = mesh.trust.pins.iter();
        self.list(Field::Pins, pins.map(|(name, key)| format!("{name} {key}")));
        self.unless_default(Field::PinFirstUse, mesh.trust.first_use, false);
    }

    fn peer(&mut self, peer: &PeerConfig) {
        self.header(SectionKind::Peer);
        self.option(Field::Name, peer.name.as_deref());
        self.one(Field::PublicKey, &peer.public_key.to_string());
        if let Some(key) = &peer.preshared_key {
            self.one(Field::PresharedKey, &encode_key(key.as_bytes()));
        }
        self.list(Field::AllowedIps, &peer.allowed_ips);
        self.option(Field::Endpoint, peer.endpoint.as_ref());
        self.option(Field::PersistentKeepalive, peer.persistent_keepalive);
    }

    fn gateway(&mut self, gateway: &GatewaySettings) {
        self.header(SectionKind::Gateway);
        self.one(Field::GatewayInterface, gateway.interface.as_str());
        self.unless_default(Field::GatewayMode, gateway.mode, GatewayMode::default());
        self.list(Field::AnswerFor, &gateway.answer_for);
        self.unless_default(Field::ProxyArp, gateway.proxy_arp, false);
        self.option(Field::Priority, gateway.priority);
        for device in &gateway.devices {
            self.device(device);
        }
        for remote in &gateway.remotes {
            self.header(SectionKind::Remote);
            self.one(Field::RemoteOverlay, &remote.overlay.to_string());
            self.one(Field::RemoteLan, &remote.lan.to_string());
        }
    }

    fn device(&mut self, device: &DeviceConfig) {
        self.header(SectionKind::Device);
        self.one(Field::DeviceName, &device.name);
        self.option(Field::DeviceMac, device.mac);
        self.option(Field::DeviceVlan, device.vlan);
        self.list(Field::DeviceLan, &device.lan);
        self.list(Field::DeviceOverlay, &device.overlay);
        self.list(Field::AllowFrom, &device.allow_from);
        self.list(Field::AllowTo, &device.allow_to);
    }

    fn header(&mut self, kind: SectionKind) {
        if let Some(header) = kind.header(self.syntax) {
            self.push("\n");
            self.push(header);
            self.push("\n");
        }
    }

    fn unless_default<T: PartialEq + ToString>(&mut self, key: Field, value: T, default: T) {
        if value != default {
            self.one(key, &value.to_string());
        }
    }

    fn option(&mut self, key: Field, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.one(key, &value.to_string());
        }
    }

    /// Writes `key = value`.
    fn one(&mut self, key: Field, value: &str) {
        self.name(key);
        self.value(key, value);
        self.push("\n");
    }

    /// Writes many values of one key: in INI one line, or a line each for commands; in TOML an
    /// array.
    fn list(&mut self, key: Field, values: impl IntoIterator<Item: ToString>) {
        let mut values = values.into_iter().map(|value| value.to_string()).peekable();
        if values.peek().is_none() {
            return;
        }
        if self.syntax == Syntax::Ini && key.spec().shape == Shape::Lines {
            for value in values {
                self.one(key, &value);
            }
            return;
        }
        let (open, close) = match self.syntax {
            Syntax::Ini => ("", "\n"),
            Syntax::Toml => ("[", "]\n"),
        };
        self.name(key);
        self.push(open);
        for (index, value) in values.enumerate() {
            if index > 0 {
                self.push(", ");
            }
            self.value(key, &value);
        }
        self.push(close);
    }

    fn name(&mut self, key: Field) {
        self.push(key.name(self.syntax));
        self.push(" = ");
    }

    /// Writes a value; in TOML every value is a string except numbers and booleans.
    fn value(&mut self, key: Field, value: &str) {
        let plain = matches!(
            key,
            Field::ListenPort
                | Field::Mtu
                | Field::FwMark
                | Field::PersistentKeepalive
                | Field::SaveConfig
                | Field::Offload
                | Field::CopyDscp
                | Field::Names
                | Field::PortMapping
                | Field::PinFirstUse
                | Field::ProxyArp
                | Field::Priority
                | Field::DeviceVlan
        );
        let value = if self.is_redacted && !key.is_reportable() {
            REDACTED
        } else {
            value
        };
        if self.syntax == Syntax::Ini && value.contains(['#', '\n', '\r']) {
            self.not_in_ini.get_or_insert(key);
        }
        if plain || self.syntax == Syntax::Ini {
            self.push(value);
        } else {
            self.quoted(value);
        }
    }

    /// Writes a basic string of TOML (v1.0.0, "String"). Implemented here so that no copy of a key
    /// remains in memory.
    fn quoted(&mut self, value: &str) {
        self.push("\"");
        for c in value.chars() {
            match c {
                '"' => self.push("\\\""),
                '\\' => self.push("\\\\"),
                c if c.is_control() => self.push(&format!("\\u{:04X}", u32::from(c))),
                c => self.push(c.encode_utf8(&mut [0; 4])),
            }
        }
        self.push("\"");
    }

    /// Appends text. A full buffer is replaced by one of twice the size, and wiped: growing it in
    /// place could leave copies of the keys in freed memory.
    fn push(&mut self, text: &str) {
        let length = self.out.len() + text.len();
        if length > self.out.capacity() {
            let mut larger = Zeroizing::new(String::with_capacity(1024.max(2 * length)));
            larger.push_str(&self.out);
            self.out = larger;
        }
        self.out.push_str(text);
    }
}

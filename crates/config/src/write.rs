//! Writes a configuration as text in either syntax, for `SaveConfig`, bug reports and tests.
//!
//! Only values that differ from the default are written. The text contains keys: it is wiped on
//! drop. That of a bug report contains none.

use zeroize::Zeroizing;

use super::key::encode_key;
use super::schema::{Form, SectionKind};
use super::sections::{Device, Gateway, Interface, Key, Peer, Remote};
use super::source::Syntax;
use super::types::{Config, GatewaySettings, MeshSettings, Mode, PeerConfig, Protocol};

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
    not_in_ini: Option<&'static str>,
}

impl Config {
    /// Returns the configuration in wg-quick's syntax.
    pub fn to_ini(&self) -> Result<Zeroizing<String>, NotInIni> {
        let text = Text::of(self, Syntax::Ini, false);
        match text.not_in_ini {
            Some(key) => Err(NotInIni { key }),
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

/// Returns the value unless it is the default.
fn unless<T: PartialEq>(value: T, default: T) -> Option<T> {
    Some(value).filter(|value| *value != default)
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
        let keys = Interface::default();
        let protocol = Protocol::default_of(self.syntax);
        self.write(&keys.protocol, unless(config.protocol, protocol));
        self.write(&keys.mode, unless(config.mode, Mode::Ip));
        self.write(
            &keys.private_key,
            [encode_key(config.private_key.as_bytes()).as_str()],
        );
        self.write(&keys.listen_port, config.listen_port);
        self.write(&keys.address, &config.addresses);
        self.write(&keys.mtu, config.mtu);
        let servers = config.dns.iter().map(ToString::to_string);
        self.write(&keys.dns, servers.chain(config.dns_search.iter().cloned()));
        self.write(&keys.table, unless(config.table, Default::default()));
        self.write(&keys.fwmark, config.fwmark.map(|mark| format!("{mark:#x}")));
        self.write(&keys.pre_up, &config.hooks.pre_up);
        self.write(&keys.post_up, &config.hooks.post_up);
        self.write(&keys.pre_down, &config.hooks.pre_down);
        self.write(&keys.post_down, &config.hooks.post_down);
        self.write(&keys.save_config, unless(config.save_config, false));
        self.write(&keys.offload, unless(config.offload, true));
        self.write(&keys.metrics, config.metrics);
        self.write(&keys.cipher, unless(config.cipher, Default::default()));
        self.write(&keys.copy_dscp, unless(config.copy_dscp, false));
        self.write(&keys.repair, unless(config.repair, Default::default()));
        if let Some(mesh) = &config.mesh {
            self.mesh(&keys, mesh);
        }
    }

    fn mesh(&mut self, keys: &Interface, mesh: &MeshSettings) {
        self.write(&keys.coordinator, [&mesh.coordinator]);
        self.write(&keys.coordinator_pin, mesh.pin);
        self.write(&keys.credential, [mesh.credential.reveal().as_str()]);
        self.write(&keys.stun, &mesh.stun);
        self.write(&keys.names, unless(mesh.names, true));
        self.write(&keys.port_mapping, unless(mesh.port_mapping, true));
        let pins = mesh.trust.pins.iter();
        self.write(&keys.pins, pins.map(|(name, key)| format!("{name} {key}")));
        self.write(&keys.pin_first_use, unless(mesh.trust.first_use, false));
    }

    fn peer(&mut self, peer: &PeerConfig) {
        self.header(SectionKind::Peer);
        let keys = Peer::default();
        self.write(&keys.name, &peer.name);
        self.write(&keys.public_key, [peer.public_key]);
        let preshared_key = peer.preshared_key.as_ref();
        let preshared_key = preshared_key.map(|key| encode_key(key.as_bytes()));
        self.write(
            &keys.preshared_key,
            preshared_key.as_ref().map(|key| key.as_str()),
        );
        self.write(&keys.allowed_ips, &peer.allowed_ips);
        self.write(&keys.endpoint, &peer.endpoint);
        self.write(&keys.persistent_keepalive, peer.persistent_keepalive);
    }

    fn gateway(&mut self, gateway: &GatewaySettings) {
        self.header(SectionKind::Gateway);
        let keys = Gateway::default();
        self.write(&keys.interface, [&gateway.interface]);
        self.write(&keys.mode, unless(gateway.mode, Default::default()));
        self.write(&keys.answer_for, &gateway.answer_for);
        self.write(&keys.proxy_arp, unless(gateway.proxy_arp, false));
        self.write(&keys.priority, gateway.priority);
        for device in &gateway.devices {
            self.header(SectionKind::Device);
            let keys = Device::default();
            self.write(&keys.name, [&device.name]);
            self.write(&keys.mac, device.mac);
            self.write(&keys.vlan, device.vlan);
            self.write(&keys.lan, &device.lan);
            self.write(&keys.overlay, &device.overlay);
            self.write(&keys.allow_from, &device.allow_from);
            self.write(&keys.allow_to, &device.allow_to);
        }
        for remote in &gateway.remotes {
            self.header(SectionKind::Remote);
            let keys = Remote::default();
            self.write(&keys.overlay, [remote.overlay]);
            self.write(&keys.lan, [remote.lan]);
        }
    }

    fn header(&mut self, kind: SectionKind) {
        self.push("\n");
        self.push(kind.header(self.syntax));
        self.push("\n");
    }

    /// Writes all values of a key: in TOML a list as an array; in INI on one line, or a line each.
    fn write<T>(&mut self, key: &Key<T>, values: impl IntoIterator<Item: ToString>) {
        let key = key.spec;
        let name = key.name(self.syntax);
        let (separator, end) = match (self.syntax, key.form) {
            (Syntax::Toml, _) if key.is_list() => (", ", "]\n"),
            (Syntax::Ini, Form::List) => (", ", "\n"),
            _ => ("\n", "\n"),
        };
        let mut is_first = true;
        for value in values {
            let value = Zeroizing::new(value.to_string());
            if !is_first {
                self.push(separator);
            }
            if is_first || separator == "\n" {
                self.push(name);
                self.push(" = ");
            }
            if is_first && end == "]\n" {
                self.push("[");
            }
            is_first = false;
            if self.is_redacted && !key.is_reportable() {
                self.value(key.form, REDACTED);
                continue;
            }
            if self.syntax == Syntax::Ini && value.contains(['#', '\n', '\r']) {
                self.not_in_ini.get_or_insert(key.ini);
            }
            self.value(key.form, &value);
        }
        if !is_first {
            self.push(end);
        }
    }

    /// Writes a value; in TOML all but numbers and booleans are basic strings (v1.0.0, "String"). Implemented here so
    /// that no copy of a key remains in memory.
    fn value(&mut self, form: Form, value: &str) {
        if self.syntax == Syntax::Ini || form == Form::Plain {
            return self.push(value);
        }
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

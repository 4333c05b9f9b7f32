//! Writes a configuration as text in either syntax, for `SaveConfig` and tests.
//!
//! Only values that differ from the default are written. The text contains keys: it is wiped on
//! drop.

use seikan_proto::gateway::DeviceConfig;
use zeroize::Zeroizing;

use super::key::encode_key;
use super::schema::{Field, SectionKind, Shape};
use super::source::Syntax;
use super::types::{
    CipherPreference, Config, GatewayMode, GatewaySettings, PeerConfig, Protocol, Table,
};

/// A value that the wg-quick syntax cannot express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{key}` has a `#` or a line break, which a .conf file cannot hold: keep this configuration in a .toml file"
)]
pub struct NotInIni {
    key: &'static str,
}

/// Text under construction; wiped on drop.
struct Text {
    syntax: Syntax,
    out: Zeroizing<String>,
}

impl Config {
    /// Returns the configuration in wg-quick's syntax.
    pub fn to_ini(&self) -> Result<Zeroizing<String>, NotInIni> {
        let hooks = &self.hooks;
        let lists = [
            (Field::PreUp, &hooks.pre_up),
            (Field::PostUp, &hooks.post_up),
            (Field::PreDown, &hooks.pre_down),
            (Field::PostDown, &hooks.post_down),
        ];
        let hooks = lists
            .iter()
            .flat_map(|(key, all)| all.iter().map(|c| (*key, c)));
        let names = self.peers.iter().filter_map(|p| p.name.as_ref());
        let names = names.map(|name| (Field::Name, name));
        let devices = self.gateway.iter().flat_map(|gateway| &gateway.devices);
        let devices = devices.map(|device| (Field::DeviceName, &device.name));
        for (key, text) in hooks.chain(names).chain(devices) {
            if text.contains(['#', '\n', '\r']) {
                let key = key.name(Syntax::Ini);
                return Err(NotInIni { key });
            }
        }
        Ok(self.to_text(Syntax::Ini))
    }

    /// Returns the configuration in TOML.
    pub fn to_toml(&self) -> Zeroizing<String> {
        self.to_text(Syntax::Toml)
    }

    fn to_text(&self, syntax: Syntax) -> Zeroizing<String> {
        // Sufficient capacity: growing would leave copies of the keys in freed memory.
        let hooks = &self.hooks;
        let hooks = [
            &hooks.pre_up,
            &hooks.post_up,
            &hooks.pre_down,
            &hooks.post_down,
        ];
        let hooks: usize = hooks.into_iter().flatten().map(|c| 32 + 8 * c.len()).sum();
        let peers: usize = self
            .peers
            .iter()
            .map(|p| 1024 + 64 * p.allowed_ips.len())
            .sum();
        let pins = self.mesh.iter().map(|mesh| 128 * mesh.trust.pins.len());
        let lists = 64 * (self.addresses.len() + self.dns.len()) + 272 * self.dns_search.len();
        let mut text = Text {
            syntax,
            out: Zeroizing::new(String::with_capacity(
                1024 + hooks
                    + lists
                    + peers
                    + pins.sum::<usize>()
                    + self.gateway.as_ref().map_or(0, gateway_capacity),
            )),
        };
        text.interface(self);
        for peer in &self.peers {
            text.peer(peer);
        }
        if let Some(gateway) = &self.gateway {
            text.gateway(gateway);
        }
        text.out
    }
}

/// Returns the maximum bytes of a gateway's text.
fn gateway_capacity(gateway: &GatewaySettings) -> usize {
    let device = |device: &DeviceConfig| {
        let rules = device.allow_from.len() + device.allow_to.len();
        // A rule has a prefix and up to sixteen ranges of ports.
        512 + 8 * device.name.len() + 320 * rules
    };
    let devices: usize = gateway.devices.iter().map(device).sum();
    512 + 64 * gateway.answer_for.len() + devices + 192 * gateway.remotes.len()
}

impl Text {
    fn interface(&mut self, config: &Config) {
        if self.syntax == Syntax::Ini {
            self.out.push_str("[Interface]\n");
        }
        let default = match self.syntax {
            Syntax::Ini => Protocol::Wireguard,
            Syntax::Toml => Protocol::Native,
        };
        if config.protocol != default {
            self.one(Field::Protocol, &config.protocol.to_string());
        }
        self.one(
            Field::PrivateKey,
            &encode_key(config.private_key.as_bytes()),
        );
        self.option(Field::ListenPort, config.listen_port);
        self.list(
            Field::Address,
            config.addresses.iter().map(ToString::to_string),
        );
        self.option(Field::Mtu, config.mtu);
        let servers = config.dns.iter().map(ToString::to_string);
        self.list(Field::Dns, servers.chain(config.dns_search.iter().cloned()));
        if config.table != Table::Auto {
            self.one(Field::Table, &config.table.to_string());
        }
        let mark = config.fwmark.map(|mark| format!("{mark:#x}"));
        self.option(Field::FwMark, mark);
        self.list(Field::PreUp, config.hooks.pre_up.iter().cloned());
        self.list(Field::PostUp, config.hooks.post_up.iter().cloned());
        self.list(Field::PreDown, config.hooks.pre_down.iter().cloned());
        self.list(Field::PostDown, config.hooks.post_down.iter().cloned());
        if config.save_config {
            self.one(Field::SaveConfig, "true");
        }
        if !config.offload {
            self.one(Field::Offload, "false");
        }
        self.option(Field::Metrics, config.metrics);
        if config.cipher != CipherPreference::Auto {
            self.one(Field::Cipher, &config.cipher.to_string());
        }
        if config.copy_dscp {
            self.one(Field::CopyDscp, "true");
        }
        if let Some(mesh) = &config.mesh {
            self.one(Field::Coordinator, &mesh.coordinator.to_string());
            self.option(Field::CoordinatorPin, mesh.pin);
            self.one(Field::Credential, &mesh.credential.reveal());
            self.list(Field::Stun, mesh.stun.iter().map(ToString::to_string));
            if !mesh.names {
                self.one(Field::Names, "false");
            }
            if !mesh.port_mapping {
                self.one(Field::PortMapping, "false");
            }
            let pins = mesh.trust.pins.iter();
            self.list(Field::Pins, pins.map(|(name, key)| format!("{name} {key}")));
            if mesh.trust.first_use {
                self.one(Field::PinFirstUse, "true");
            }
        }
    }

    fn peer(&mut self, peer: &PeerConfig) {
        self.header(SectionKind::Peer);
        self.option(Field::Name, peer.name.as_deref());
        self.one(Field::PublicKey, &encode_key(peer.public_key.as_bytes()));
        if let Some(key) = &peer.preshared_key {
            self.one(Field::PresharedKey, &encode_key(key.as_bytes()));
        }
        let prefixes = peer.allowed_ips.iter().map(ToString::to_string);
        self.list(Field::AllowedIps, prefixes);
        self.option(Field::Endpoint, peer.endpoint.as_ref());
        self.option(Field::PersistentKeepalive, peer.persistent_keepalive);
    }

    fn gateway(&mut self, gateway: &GatewaySettings) {
        self.header(SectionKind::Gateway);
        self.one(Field::GatewayInterface, gateway.interface.as_str());
        if gateway.mode != GatewayMode::default() {
            self.one(Field::GatewayMode, &gateway.mode.to_string());
        }
        let prefixes = gateway.answer_for.iter().map(ToString::to_string);
        self.list(Field::AnswerFor, prefixes);
        if gateway.proxy_arp {
            self.one(Field::ProxyArp, "true");
        }
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
        self.list(Field::DeviceLan, device.lan.iter().map(ToString::to_string));
        let overlay = device.overlay.iter().map(ToString::to_string);
        self.list(Field::DeviceOverlay, overlay);
        let from = device.allow_from.iter().map(ToString::to_string);
        self.list(Field::AllowFrom, from);
        let to = device.allow_to.iter().map(ToString::to_string);
        self.list(Field::AllowTo, to);
    }

    fn header(&mut self, kind: SectionKind) {
        if let Some(header) = kind.header(self.syntax) {
            self.out.push('\n');
            self.out.push_str(header);
            self.out.push('\n');
        }
    }

    fn option(&mut self, key: Field, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.one(key, &value.to_string());
        }
    }

    /// Writes `key = value`; in TOML every value is a string except numbers and booleans.
    fn one(&mut self, key: Field, value: &str) {
        self.name(key);
        let plain = matches!(
            key,
            Field::ListenPort
                | Field::Mtu
                | Field::FwMark
                | Field::PersistentKeepalive
                | Field::SaveConfig
                | Field::Offload
                | Field::CopyDscp
                | Field::ProxyArp
                | Field::Priority
                | Field::DeviceVlan
        );
        if plain || self.syntax == Syntax::Ini {
            self.out.push_str(value);
        } else {
            self.quoted(value);
        }
        self.out.push('\n');
    }

    /// Writes many values of one key: in INI one line, or a line each for commands; in TOML an
    /// array.
    fn list(&mut self, key: Field, values: impl Iterator<Item = String>) {
        let mut values = values.peekable();
        if values.peek().is_none() {
            return;
        }
        if self.syntax == Syntax::Ini && key.spec().shape == Shape::Lines {
            for value in values {
                self.one(key, &value);
            }
            return;
        }
        self.name(key);
        let (open, close) = match self.syntax {
            Syntax::Ini => ("", "\n"),
            Syntax::Toml => ("[", "]\n"),
        };
        self.out.push_str(open);
        for (index, value) in values.enumerate() {
            if index > 0 {
                self.out.push_str(", ");
            }
            match self.syntax {
                Syntax::Ini => self.out.push_str(&value),
                Syntax::Toml => self.quoted(&value),
            }
        }
        self.out.push_str(close);
    }

    fn name(&mut self, key: Field) {
        self.out.push_str(key.name(self.syntax));
        self.out.push_str(" = ");
    }

    /// Writes a basic string of TOML (v1.0.0, "String"). Implemented here so that no copy of a key
    /// remains in memory.
    fn quoted(&mut self, value: &str) {
        self.out.push('"');
        for c in value.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                c if c.is_control() => self.out.push_str(&format!("\\u{:04X}", u32::from(c))),
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

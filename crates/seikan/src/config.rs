//! Configurations from files, texts and code.
//!
//! The builder writes a text in the syntax of files, so that the same checks and messages apply to
//! both.

use crate::error::Error;
use seikan_config::{Overrides, Parsed, Source, Syntax, load, parse};
use seikan_mesh::web_proxy::WebProxies;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf, absolute};
use tracing::warn;
use zeroize::Zeroizing;

/// Name of a tunnel whose configuration does not come from a file.
const NAME: &str = "tunnel";

/// The configuration of a tunnel. It holds secrets, which its `Debug` does not show.
#[derive(Clone)]
pub struct Config {
    pub(crate) settings: seikan_config::Config,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) web_proxies: WebProxies,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Config");
        shown.field("name", &self.settings.name.as_str());
        shown.field("addresses", &self.settings.addresses);
        shown.field("peers", &self.settings.peers.len());
        shown.finish_non_exhaustive()
    }
}

impl Config {
    /// Reads a file in the syntax of TOML (`.toml`) or wg-quick (any other name). Warnings are
    /// logged, for example about settings that need root. A member of a mesh keeps its state in a
    /// directory beside the file, `NAME.state` for `NAME.toml`.
    ///
    /// # Errors
    /// [`Error::Config`], also if the file cannot be read; [`Error::File`] if the path is not UTF-8.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Config, Error> {
        let path = path.as_ref();
        let failed = |source| Error::File {
            path: path.to_owned(),
            source,
        };
        let full = absolute(path).map_err(failed)?;
        let text = full
            .to_str()
            .ok_or_else(|| failed(io::ErrorKind::InvalidFilename.into()))?;
        let mut config = Config::of(load(text, &Overrides::default()))?;
        config.state_dir = Some(full.with_extension("state"));
        Ok(config)
    }

    /// Reads a text in the syntax of TOML. Paths of key files in it are relative to the working directory.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn from_toml(text: &str) -> Result<Config, Error> {
        Config::from_text(Syntax::Toml, Zeroizing::new(text.to_owned()))
    }

    /// Reads a text in the syntax of wg-quick.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn from_wg_quick(text: &str) -> Result<Config, Error> {
        Config::from_text(Syntax::Ini, Zeroizing::new(text.to_owned()))
    }

    /// Starts a configuration in code.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Sets the directory in which a member of a mesh keeps its state. It is created if necessary.
    /// Only one tunnel at a time may use it.
    pub fn state_dir(mut self, path: impl Into<PathBuf>) -> Config {
        self.state_dir = Some(path.into());
        self
    }

    /// Makes a member of a mesh use the web proxy given by `HTTPS_PROXY`, `ALL_PROXY` and
    /// `NO_PROXY`.
    ///
    /// # Errors
    /// [`Error::Config`]: a variable names no usable proxy.
    pub fn web_proxy_from_env(mut self) -> Result<Config, Error> {
        let proxies = WebProxies::from_env();
        self.web_proxies = proxies.map_err(|error| Error::Config(error.to_string()))?;
        Ok(self)
    }

    fn from_text(syntax: Syntax, text: Zeroizing<String>) -> Result<Config, Error> {
        let source = Source {
            file: NAME.to_owned(),
            syntax,
            text,
        };
        let read_key = |path: &Path| Ok(Zeroizing::new(std::fs::read_to_string(path)?));
        Config::of(parse(&source, &Overrides::default(), &read_key))
    }

    fn of(parsed: Parsed) -> Result<Config, Error> {
        let (settings, warnings) = parsed
            .into_result()
            .map_err(|error| Error::Config(error.to_string()))?;
        for warning in warnings.iter() {
            warn!(target: "tunnel", "{}: {}", warning.file, warning.message);
        }
        Ok(Config {
            settings,
            state_dir: None,
            web_proxies: WebProxies::default(),
        })
    }
}

/// Builds a configuration in code. Values have the same form as in files; [`Builder::build`] checks
/// them.
#[derive(Clone, Default)]
pub struct Builder {
    lines: Text,
    addresses: Vec<String>,
    peers: Vec<Peer>,
}

impl Builder {
    /// Sets the private key of this host in Base64, as `seikan genkey` prints it.
    pub fn private_key(mut self, key: &str) -> Builder {
        self.lines.string("private-key", key);
        self
    }

    /// Adds an address of this host inside the tunnel, such as `10.9.0.2/24`.
    pub fn address(mut self, address: &str) -> Builder {
        self.addresses.push(address.to_owned());
        self
    }

    /// Sets the UDP port to listen on [default: chosen by the kernel].
    pub fn listen_port(mut self, port: u16) -> Builder {
        self.lines.number("listen-port", port);
        self
    }

    /// Sets the MTU inside the tunnel in bytes, 576 to 65535 (with IPv6 at least 1280) [default:
    /// 1444; with WireGuard's protocol 1420, or less if the path to a peer has a smaller MTU].
    pub fn mtu(mut self, bytes: u16) -> Builder {
        self.lines.number("mtu", bytes);
        self
    }

    /// Uses WireGuard's protocol with all peers [default: Seikan's native protocol].
    pub fn wireguard(mut self) -> Builder {
        self.lines.string("protocol", "wireguard");
        self
    }

    /// Adds a peer.
    pub fn peer(mut self, peer: Peer) -> Builder {
        self.peers.push(peer);
        self
    }

    /// Checks the configuration.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn build(self) -> Result<Config, Error> {
        let mut text = self.lines;
        text.list("address", &self.addresses);
        for peer in &self.peers {
            text.push("[[peer]]\n");
            text.push(&peer.lines.0);
            text.list("allowed-ips", &peer.allowed_ips);
        }
        Config::from_text(Syntax::Toml, text.0)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Builder");
        shown.field("addresses", &self.addresses);
        shown.field("peers", &self.peers).finish_non_exhaustive()
    }
}

/// A peer of a configuration in code.
#[derive(Clone)]
pub struct Peer {
    lines: Text,
    allowed_ips: Vec<String>,
}

impl Peer {
    /// Creates a peer with this public key in Base64.
    pub fn new(public_key: &str) -> Peer {
        let mut lines = Text::default();
        lines.string("public-key", public_key);
        Peer {
            lines,
            allowed_ips: Vec::new(),
        }
    }

    /// Sets the peer's name. [`Tunnel::tcp_connect`](crate::Tunnel::tcp_connect) finds the name if
    /// one of the peer's allowed IPs is a single address.
    pub fn name(mut self, name: &str) -> Peer {
        self.lines.string("name", name);
        self
    }

    /// Sets the peer's address outside of the tunnel, `HOST:PORT`.
    pub fn endpoint(mut self, endpoint: &str) -> Peer {
        self.lines.string("endpoint", endpoint);
        self
    }

    /// Adds a prefix that is routed to the peer and accepted from it, such as `10.9.0.1/32`.
    pub fn allowed_ip(mut self, prefix: &str) -> Peer {
        self.allowed_ips.push(prefix.to_owned());
        self
    }

    /// Sets a symmetric key shared with the peer, in Base64.
    pub fn preshared_key(mut self, key: &str) -> Peer {
        self.lines.string("preshared-key", key);
        self
    }

    /// Sets the interval between two keepalives in seconds, 1 to 65535. A host behind a NAT needs
    /// it to be reachable for the peer.
    pub fn persistent_keepalive(mut self, seconds: u16) -> Peer {
        self.lines.number("persistent-keepalive", seconds);
        self
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Peer");
        shown.field("allowed_ips", &self.allowed_ips);
        shown.finish_non_exhaustive()
    }
}

/// Text of a configuration, which may hold secrets; wiped on drop.
#[derive(Clone, Default)]
struct Text(Zeroizing<String>);

impl Text {
    fn string(&mut self, key: &str, value: &str) {
        self.push(key);
        self.push(" = ");
        self.quoted(value);
        self.push("\n");
    }

    fn number(&mut self, key: &str, value: u16) {
        self.push(&format!("{key} = {value}\n"));
    }

    fn list(&mut self, key: &str, values: &[String]) {
        if values.is_empty() {
            return;
        }
        self.push(key);
        self.push(" = [");
        for value in values {
            self.quoted(value);
            self.push(", ");
        }
        self.push("]\n");
    }

    /// Adds a basic string of TOML. The value is not copied elsewhere, because it may be a secret.
    fn quoted(&mut self, value: &str) {
        self.push("\"");
        for character in value.chars() {
            match character {
                '"' => self.push("\\\""),
                '\\' => self.push("\\\\"),
                control if control.is_control() => {
                    self.push(&format!("\\u{:04X}", u32::from(control)));
                }
                other => self.push(other.encode_utf8(&mut [0; 4])),
            }
        }
        self.push("\"");
    }

    /// Appends text. A full buffer is replaced by one of twice the size, and wiped: growing it in place could leave copies of
    /// the keys in freed memory.
    fn push(&mut self, text: &str) {
        let length = self.0.len() + text.len();
        if length > self.0.capacity() {
            let mut larger = Zeroizing::new(String::with_capacity(1024.max(2 * length)));
            larger.push_str(&self.0);
            self.0 = larger;
        }
        self.0.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7748, section 6.1: the keys of Alice and Bob.
    const ALICE: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
    const BOB: &str = "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=";

    fn builder() -> Builder {
        let bob = Peer::new(BOB).name("bob").allowed_ip("10.9.0.1/32");
        Config::builder()
            .private_key(ALICE)
            .address("10.9.0.2/24")
            .peer(bob.endpoint("192.0.2.1:51820"))
    }

    #[test]
    fn a_configuration_in_code_is_that_of_a_file() {
        let config = builder().listen_port(7).mtu(1400).build().expect("built");
        let settings = config.settings;
        assert_eq!((settings.listen_port, settings.mtu), (Some(7), Some(1400)));
        assert_eq!(settings.addresses, ["10.9.0.2/24".parse().unwrap()]);
        assert_eq!(settings.peers[0].name.as_deref(), Some("bob"));
        assert_eq!(settings.peers[0].allowed_ips.len(), 1);
    }

    #[test]
    fn values_cannot_add_lines() {
        let error = builder()
            .private_key("x\"\nmtu = 1400\n#")
            .build()
            .expect_err("refused");
        assert!(matches!(error, Error::Config(_)), "{error}");
        let named = Peer::new(BOB).name("a\"\npre-up = \"touch /tmp/x");
        let config = Config::builder()
            .private_key(ALICE)
            .address("10.9.0.2/24")
            .peer(named)
            .build();
        assert!(config.is_err_and(|error| matches!(error, Error::Config(_))));
    }

    #[test]
    fn errors_name_the_key_and_no_secret() {
        let error = builder()
            .private_key("secret")
            .build()
            .expect_err("refused");
        let text = error.to_string();
        assert!(
            text.contains("private-key") && !text.contains("secret\""),
            "{text}"
        );
    }

    #[test]
    fn no_secret_is_shown() {
        let shown = format!("{:?} {:?}", builder(), builder().build());
        assert!(!shown.contains(ALICE), "{shown}");
    }
}

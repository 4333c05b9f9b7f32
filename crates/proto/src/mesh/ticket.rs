//! Tickets for relays: usernames with an expiry, and passwords derived from them, as in coturn's
//! REST API.

use std::fmt;
use std::net::Ipv6Addr;
use std::num::NonZeroU16;
use std::str::FromStr;

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use zeroize::{Zeroize as _, Zeroizing};

use super::pin::Pin;
use super::secret::SECRET_LEN;
use crate::keys::PublicKey;
use crate::rng::Rng;

/// Maximum number of relays of a mesh.
pub const MAX_RELAYS: usize = 8;
/// Maximum length of secrets, usernames and passwords in characters.
const MAX_TEXT: usize = 256;
/// Maximum length of a DNS name (RFC 1035, section 2.3.4, as text).
const MAX_HOST: usize = 253;
/// Prefix of the secrets of `seikan relay`.
const PREFIX: &str = "skr_";

/// A relay, with the ticket of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relay {
    /// Its address.
    pub address: RelayAddress,
    /// The protocol that it speaks.
    pub kind: RelayKind,
    /// The TLS port of a `seikan relay`, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<RelayTls>,
    /// The member's ticket.
    #[serde(flatten)]
    pub ticket: Ticket,
}

/// TLS access to a `seikan relay`, for members whose UDP is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RelayTls {
    /// The TCP port.
    pub port: NonZeroU16,
    /// The pin of its certificate; absent if the certificate is trusted by the system, for the host
    /// of the relay's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub pin: Option<Pin>,
}

/// The relays of the given kinds in the order in which two members try them. Both ends get the same
/// order, and pairs spread over all relays (rendezvous hashing).
pub fn in_turn<'a>(
    relays: &'a [Relay],
    pair: [&PublicKey; 2],
    is_of_kind: impl Fn(RelayKind) -> bool,
) -> Vec<&'a Relay> {
    let (first, second) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
    let weight = |relay: &Relay| {
        let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        context.update(first.as_bytes());
        context.update(second.as_bytes());
        context.update(relay.address.to_string().as_bytes());
        context.finish().as_ref().to_vec()
    };
    let mut all: Vec<&Relay> = relays
        .iter()
        .filter(|relay| is_of_kind(relay.kind))
        .collect();
    all.sort_by_cached_key(|relay| weight(relay));
    all
}

/// The protocol of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RelayKind {
    /// A `seikan relay`.
    Seikan,
    /// A TURN server (RFC 8656) over UDP and TCP at the same port, with a shared secret for its
    /// REST API, as coturn with `use-auth-secret`.
    Turn,
    /// A TURN server over TLS (`turns` of RFC 7065).
    Turns,
    /// A kind that this version does not know.
    #[serde(other)]
    Other,
}

impl RelayKind {
    /// Whether it is a TURN server.
    pub fn is_turn(self) -> bool {
        matches!(self, RelayKind::Turn | RelayKind::Turns)
    }

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            RelayKind::Seikan => "seikan",
            RelayKind::Turn => "turn",
            RelayKind::Turns => "turns",
            RelayKind::Other => "other",
        }
    }
}

/// Credentials of a member for a relay, valid until they expire (draft-uberti-behave-turn-rest-00,
/// section 2.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// `EXPIRY:HOLDER:PUBLICKEY`: the expiry in seconds since 1970, the number of the member, which
    /// stays the same when its key changes, and its key in base64.
    #[serde(deserialize_with = "username")]
    pub username: String,
    /// HMAC-SHA1 of the username, keyed with the relay's secret, in base64.
    pub password: RelayPassword,
}

impl Ticket {
    /// Creates a ticket that is valid until `expires`, in seconds since 1970. A relay accounts for
    /// its use by `holder`.
    pub fn new(secret: &RelaySecret, holder: u64, member: &PublicKey, expires: u64) -> Ticket {
        let username = format!("{expires}:{holder}:{member}");
        let password = secret.password(&username);
        Ticket { username, password }
    }

    /// When the ticket expires, in seconds since 1970; `None` if the username has no expiry.
    pub fn expires(&self) -> Option<u64> {
        self.username.split(':').next()?.parse().ok()
    }
}

/// Parses the username of a ticket: expiry, holder and key.
pub(super) fn parse_username(text: &str) -> Option<(u64, u64, PublicKey)> {
    let (expires, rest) = text.split_once(':')?;
    let (holder, member) = rest.split_once(':')?;
    Some((
        expires.parse().ok()?,
        holder.parse().ok()?,
        member.parse().ok()?,
    ))
}

fn username<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    if !is_visible(&text) {
        return Err(serde::de::Error::custom(NotVisible));
    }
    Ok(text)
}

/// Empty, too long, or with characters other than visible ASCII.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("1 to {MAX_TEXT} visible ASCII characters are expected")]
struct NotVisible;

fn is_visible(text: &str) -> bool {
    (1..=MAX_TEXT).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic())
}

/// The password of a ticket. Erased when dropped; [`Self::reveal`] is the only way to see it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelayPassword(Zeroizing<String>);

impl RelayPassword {
    /// The password as text, for the relay.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl PartialEq for RelayPassword {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl Eq for RelayPassword {}

impl fmt::Debug for RelayPassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RelayPassword(redacted)")
    }
}

impl TryFrom<String> for RelayPassword {
    type Error = String;

    fn try_from(mut text: String) -> Result<Self, Self::Error> {
        if !is_visible(&text) {
            text.zeroize();
            return Err(NotVisible.to_string());
        }
        Ok(Self(Zeroizing::new(text)))
    }
}

impl From<RelayPassword> for String {
    fn from(password: RelayPassword) -> String {
        password.0.to_string()
    }
}

/// The secret that a relay shares with the coordinators. Erased when dropped; [`Self::reveal`] is
/// the only way to see it.
#[derive(Clone)]
pub struct RelaySecret(Zeroizing<String>);

/// Why a text is not a relay secret. The error never contains the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelaySecretError {
    /// The text is not a secret of `seikan relay`.
    #[error(
        "the secret of a relay is `{PREFIX}` followed by 32 of A-Z a-z 0-9 - _, as `seikan relay secret` \
         prints it; for the secret of a TURN server, add --turn or --turns"
    )]
    NotOurs,
    /// The text is not a secret of a TURN server.
    #[error("the secret of a TURN server has 1 to {MAX_TEXT} visible ASCII characters")]
    NotVisible,
}

impl RelaySecret {
    /// Generates a new secret for `seikan relay`.
    pub fn generate(rng: &mut dyn Rng) -> Self {
        let mut bytes = Zeroizing::new([0; SECRET_LEN]);
        rng.fill(&mut *bytes);
        let text = Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice()));
        Self(Zeroizing::new(format!("{PREFIX}{}", *text)))
    }

    /// Parses the secret of a relay of this kind. Secrets of `seikan relay` begin with `skr_`;
    /// those of TURN servers are any visible ASCII.
    ///
    /// # Errors
    /// [`RelaySecretError`].
    pub fn parse(text: &str, kind: RelayKind) -> Result<Self, RelaySecretError> {
        let own = |text: &str| {
            let mut bytes = Zeroizing::new([0; SECRET_LEN]);
            let text = text.strip_prefix(PREFIX)?;
            let length = URL_SAFE_NO_PAD.decode_slice(text, &mut *bytes).ok()?;
            (length == SECRET_LEN).then_some(())
        };
        if kind == RelayKind::Seikan && own(text).is_none() {
            return Err(RelaySecretError::NotOurs);
        }
        if !is_visible(text) {
            return Err(RelaySecretError::NotVisible);
        }
        Ok(Self(Zeroizing::new(text.to_owned())))
    }

    /// The secret as text, to be handed over.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The password for a ticket's username.
    pub fn password(&self, username: &str) -> RelayPassword {
        let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, self.0.as_bytes());
        let tag = hmac::sign(&key, username.as_bytes());
        RelayPassword(Zeroizing::new(STANDARD.encode(tag)))
    }
}

impl fmt::Debug for RelaySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RelaySecret(redacted)")
    }
}

/// `HOST:PORT`: a DNS name, an IPv4 address or an IPv6 address in brackets, and a UDP port other
/// than 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelayAddress {
    host: String,
    port: u16,
}

/// Why a text is not the address of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RelayAddressError {
    /// The port is missing or invalid.
    #[error("a relay's address is HOST:PORT, with a port of 1 to 65535; none was given")]
    Port,
    /// The host is invalid.
    #[error(
        "the host of a relay's address is a DNS name, an IPv4 address, or an IPv6 address in brackets"
    )]
    Host,
}

impl RelayAddress {
    /// The host to resolve: a name or an address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The UDP port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for RelayAddress {
    type Err = RelayAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, port) = text.rsplit_once(':').ok_or(RelayAddressError::Port)?;
        // `parse` would accept a sign.
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        let port = port.parse().ok().filter(|port| *port != 0 && digits);
        let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(v6) => v6.parse::<Ipv6Addr>().map(|v6| v6.to_string()).ok(),
            None => is_name(host).then(|| host.to_ascii_lowercase()),
        };
        Ok(Self {
            host: host.ok_or(RelayAddressError::Host)?,
            port: port.ok_or(RelayAddressError::Port)?,
        })
    }
}

/// Whether a text is a DNS name (RFC 1123, section 2.1) or an IPv4 address, which has the same
/// form.
fn is_name(text: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= MAX_HOST && text.split('.').all(label)
}

impl fmt::Display for RelayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl TryFrom<String> for RelayAddress {
    type Error = RelayAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<RelayAddress> for String {
    fn from(address: RelayAddress) -> String {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::testing::Scripted;

    const KEY: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";

    #[test]
    fn a_ticket_has_the_form_of_coturn() {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let ticket = Ticket::new(&secret, 42, &KEY.parse().expect("a key"), 1_700_000_000);
        assert_eq!(ticket.username, format!("1700000000:42:{KEY}"));
        // printf %s 1700000000:42:hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo= | openssl dgst -sha1
        // -hmac north -binary | base64
        assert_eq!(ticket.password.reveal(), "yYh0ezuY1DYnPMJmLQf7ZaZHDsM=");
        assert_eq!(ticket.expires(), Some(1_700_000_000));
    }

    #[test]
    fn a_secret_is_shown_by_reveal_only() {
        let secret = RelaySecret::generate(&mut Scripted((0..24).collect()));
        // Bytes 0 to 23 in base64url (RFC 4648, section 5).
        assert_eq!(secret.reveal(), "skr_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX");
        assert!(RelaySecret::parse(secret.reveal(), RelayKind::Seikan).is_ok());
        let ticket = Ticket::new(&secret, 42, &KEY.parse().expect("a key"), 7);
        let shown = format!("{secret:?} {ticket:?}");
        assert!(shown.starts_with("RelaySecret(redacted) Ticket"), "{shown}");
        assert!(!shown.contains(ticket.password.reveal()), "{shown}");
    }

    #[test]
    fn other_texts_are_no_secrets() {
        let long = "x".repeat(MAX_TEXT + 1);
        for bad in ["", "a b", "ä", &long] {
            let error = RelaySecret::parse(bad, RelayKind::Turn).map(|_| ());
            assert_eq!(error, Err(RelaySecretError::NotVisible), "{bad}");
        }
        for bad in ["", "skr_", "north", "skr_AAECAwQFBgcICQoLDA0ODxAREhMUFRY"] {
            let error = RelaySecret::parse(bad, RelayKind::Seikan).map(|_| ());
            assert_eq!(error, Err(RelaySecretError::NotOurs), "{bad}");
        }
    }

    #[test]
    fn hosts_with_a_port_are_addresses_and_nothing_else_is() {
        for (good, host, port) in [
            ("relay.example.org:3478", "relay.example.org", 3478),
            ("192.0.2.1:1", "192.0.2.1", 1),
            ("[2001:db8::1]:65535", "2001:db8::1", 65535),
        ] {
            let address: RelayAddress = good.parse().expect(good);
            assert_eq!((address.host(), address.port()), (host, port));
            assert_eq!(address.to_string(), good);
        }
        let long = format!("{}:1", "a.".repeat(127) + "a");
        for bad in ["a", "a:0", "a:+1", "a:65536", "a:"] {
            assert_eq!(
                bad.parse::<RelayAddress>(),
                Err(RelayAddressError::Port),
                "{bad}"
            );
        }
        for bad in [
            ":1",
            "a b:1",
            "2001:db8::1:1",
            "[a]:1",
            "a..b:1",
            "-a:1",
            "a/:1",
            &long,
        ] {
            assert_eq!(
                bad.parse::<RelayAddress>(),
                Err(RelayAddressError::Host),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_relay_is_as_documented() {
        let text = format!(
            r#"{{"address":"relay.example.org:3478","kind":"seikan","username":"7:{KEY}","password":"cGFzcw=="}}"#
        );
        let relay: Relay = serde_json::from_str(&text).expect("a relay");
        assert_eq!(relay.kind, RelayKind::Seikan);
        assert_eq!(relay.ticket.expires(), Some(7));
        assert_eq!(serde_json::to_string(&relay).expect("text"), text);
        for (from, to) in [
            ("cGFzcw==", ""),
            ("cGFzcw==", "a b"),
            (":3478", ""),
            (KEY, "\\n"),
        ] {
            let bad = text.replace(from, to);
            assert!(serde_json::from_str::<Relay>(&bad).is_err(), "{bad}");
        }
        let later = text.replace("\"seikan\"", "\"quic\"");
        let later: Relay = serde_json::from_str(&later).expect("a relay");
        assert_eq!(later.kind, RelayKind::Other);
    }

    #[test]
    fn the_tls_access_of_a_relay_is_encoded_as_documented() {
        // FIPS 180-2, appendix B.1: the digest of "abc".
        let pin = "sha256:ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0";
        let text = |tls: &str| {
            format!(
                r#"{{"address":"r:3478","kind":"seikan","tls":{tls},"username":"7:{KEY}","password":"cGFzcw=="}}"#
            )
        };
        let pinned = format!(r#"{{"port":443,"pin":"{pin}"}}"#);
        for (tls, known) in [
            (pinned.as_str(), pin.parse().ok()),
            (r#"{"port":443}"#, None),
        ] {
            let relay: Relay = serde_json::from_str(&text(tls)).expect("a relay");
            let expected = relay.tls.expect("it is by TLS");
            assert_eq!((expected.port.get(), expected.pin), (443, known));
            assert_eq!(serde_json::to_string(&relay).expect("text"), text(tls));
        }
        for bad in [r#"{"port":0}"#, r#"{"port":443,"pin":"sha256:"}"#, "443"] {
            assert!(serde_json::from_str::<Relay>(&text(bad)).is_err(), "{bad}");
        }
    }
}

//! Parsers of single values. Each takes a trimmed text and returns the value, or a [`Problem`] that
//! completes the sentence "`Key` ..." and suggests the right form.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use seikan_proto::gateway::rules::{Rule, RuleError};
use seikan_proto::mesh::{Credential, Name, Pin};
use seikan_wire::ethernet::Mac;

use super::endpoint::{self, CoordinatorUrl, Endpoint, Host};
use super::key::{self, KeyError, PresharedKey, PrivateKey, PublicKey};
use super::types::{CipherPreference, GatewayMode, InterfaceName, Mode, Protocol, Repair, Table};

/// A fault of a value, and a suggested correction.
#[derive(Debug)]
pub(super) struct Problem {
    /// Follows the key's name: "is `x`, not a port".
    pub message: String,
    pub help: String,
}

fn problem(message: impl Into<String>, help: impl Into<String>) -> Problem {
    Problem {
        message: message.into(),
        help: help.into(),
    }
}

/// Returns the problem of a text that is not what its key needs.
fn invalid(text: &str, not: &str, help: impl Into<String>) -> Problem {
    problem(format!("is `{text}`, {not}"), help)
}

/// Returns the parsed value, or the problem that `text` is not what its key needs.
fn parsed<T>(
    value: Option<T>,
    text: &str,
    not: &str,
    help: impl Into<String>,
) -> Result<T, Problem> {
    value.ok_or_else(|| invalid(text, not, help))
}

/// Any text.
pub(super) fn text(text: &str) -> Result<String, Problem> {
    Ok(text.to_owned())
}

/// `true` or `false`.
pub(super) fn boolean(text: &str) -> Result<bool, Problem> {
    let value = text.to_ascii_lowercase().parse().ok();
    parsed(
        value,
        text,
        "neither true nor false",
        "write `true` or `false`",
    )
}

/// A UDP port to listen on; 0: any.
pub(super) fn port(text: &str) -> Result<u16, Problem> {
    let help = "write a number from 0 (any free port) to 65535, such as `51820`";
    parsed(decimal(text), text, "not a port", help)
}

/// Seconds between keepalives, or `off`.
pub(super) fn keepalive(text: &str) -> Result<Option<u16>, Problem> {
    let help = "write `off` or a number of seconds from 1 to 65535, such as `25`";
    parsed(
        unless_off(text, decimal),
        text,
        "not a number of seconds",
        help,
    )
}

/// A firewall mark, or `off`.
pub(super) fn fwmark(text: &str) -> Result<Option<u32>, Problem> {
    let help = "write `off` or a 32-bit number, decimal or hexadecimal, such as `0xca6c`";
    parsed(unless_off(text, decimal_or_hex), text, "not a mark", help)
}

/// A routing table. The names are those in every iproute2's `rt_tables`.
pub(super) fn table(text: &str) -> Result<Table, Problem> {
    let table = match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Table::Auto),
        "off" => Some(Table::Off),
        "default" => Some(Table::Number(253)),
        "main" => Some(Table::Number(254)),
        "local" => Some(Table::Number(255)),
        _ => decimal_or_hex(text)
            .filter(|number| *number != 0)
            .map(Table::Number),
    };
    let help = "write `auto`, `off`, `main` or the number of a table, such as `51820`";
    parsed(table, text, "not a routing table", help)
}

/// The URL of a coordinator.
pub(super) fn coordinator(text: &str) -> Result<CoordinatorUrl, Problem> {
    let help = "write `https://HOST` or `https://HOST:PORT`, as given to `seikan join`";
    parsed(
        text.parse().ok(),
        text,
        "not the address of a coordinator",
        help,
    )
}

/// The pin of a certificate.
pub(super) fn pin(text: &str) -> Result<Pin, Problem> {
    text.parse().map_err(|error| {
        problem(
            format!("is `{text}`, not a pin: {error}"),
            "copy it from the output of `seikan coordinator`",
        )
    })
}

/// A member's credential. An invalid one is not repeated in the message: it may be almost the right
/// one.
pub(super) fn credential(text: &str) -> Result<Credential, Problem> {
    text.parse().map_err(|error| {
        problem(
            format!("is not a member's credential: {error}"),
            "ask for a token and run `seikan join` again",
        )
    })
}

/// A member's name and its key.
pub(super) fn member_pin(text: &str) -> Result<(Name, PublicKey), Problem> {
    let right = "write a member's name, a space and its public key, as `seikan status` shows them";
    let Some((name, key)) = text.split_once(char::is_whitespace) else {
        return Err(invalid(text, "not a name and a key", right));
    };
    let name = name.parse().map_err(|error| {
        let message = format!("has `{name}`, which is no member's name: {error}");
        problem(message, right)
    })?;
    Ok((name, public_key(key.trim())?))
}

/// An MTU; its range depends on the rest of the file.
pub(super) fn mtu(text: &str) -> Result<u32, Problem> {
    let help = "write a number of bytes, such as `1420`";
    parsed(decimal(text), text, "not a number of bytes", help)
}

/// An address with or without its prefix length, host bits kept.
pub(super) fn prefix(text: &str) -> Result<IpNet, Problem> {
    let right = "write an address with its prefix length, such as `10.0.0.1/24` or `fd00::1/64`";
    let Some((address, length)) = text.split_once('/') else {
        return IpAddr::from_str(text)
            .map(IpNet::from)
            .map_err(|_| problem(format!("has `{text}`, not an IP address"), right));
    };
    let Ok(address) = IpAddr::from_str(address) else {
        let message = format!("has `{text}`: `{address}` is not an IP address");
        return Err(problem(message, right));
    };
    let (longest, usual) = if address.is_ipv4() {
        (32, 24)
    } else {
        (128, 64)
    };
    match decimal::<u8>(length) {
        Some(length) if length <= longest => {
            IpNet::new(address, length).map_err(|_| problem(format!("has `{text}`"), right))
        }
        _ => Err(problem(
            format!("has `{text}`: `/{length}` is not a prefix length"),
            format!("write a length from 0 to {longest}, such as `{address}/{usual}`"),
        )),
    }
}

/// `host:port` or `[IPv6]:port`.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, Problem> {
    Endpoint::from_str(text).map_err(|error| {
        problem(
            format!("is `{text}`: {error}"),
            "write `host:port`, such as `vpn.example.com:51820`, `192.0.2.1:51820` or `[2001:db8::1]:51820`",
        )
    })
}

/// A name server's address or a search domain, distinguished as in wg-quick.
pub(super) fn dns(text: &str) -> Result<Host, Problem> {
    let address = text.parse().map(Host::Address).ok();
    address.or_else(|| endpoint::plain_host(text)).ok_or_else(|| {
        problem(
            format!("has `{text}`, neither an IP address nor a domain"),
            "write addresses of name servers and search domains, such as `10.0.0.53, example.com`",
        )
    })
}

/// `address:port`.
pub(super) fn socket(text: &str) -> Result<SocketAddr, Problem> {
    let help = "write `address:port`, such as `127.0.0.1:9586`";
    parsed(text.parse().ok(), text, "not an address and a port", help)
}

/// A protocol's name.
pub(super) fn protocol(text: &str) -> Result<Protocol, Problem> {
    let help = format!("write one of {}", Protocol::CHOICES);
    parsed(text.parse().ok(), text, "not a protocol", help)
}

/// Content of a tunnel: IP packets or Ethernet frames.
pub(super) fn mode(text: &str) -> Result<Mode, Problem> {
    let help = format!("write one of {}", Mode::CHOICES);
    parsed(text.parse().ok(), text, "not a mode", help)
}

/// A cipher's name.
pub(super) fn cipher(text: &str) -> Result<CipherPreference, Problem> {
    let help = format!("write one of {}", CipherPreference::CHOICES);
    parsed(text.parse().ok(), text, "not a cipher", help)
}

/// Loss repair.
pub(super) fn repair(text: &str) -> Result<Repair, Problem> {
    let help = format!("write one of {}", Repair::CHOICES);
    parsed(text.parse().ok(), text, "not a kind of loss repair", help)
}

/// A display name: printable, one line.
pub(super) fn name(text: &str) -> Result<String, Problem> {
    if text.chars().any(char::is_control) || text.chars().count() > 64 {
        return Err(problem(
            "has control characters, or more than 64",
            "write a short name on one line",
        ));
    }
    Ok(text.to_owned())
}

/// The name of a device, which must not be empty.
pub(super) fn device_name(text: &str) -> Result<String, Problem> {
    if text.is_empty() {
        return Err(problem("is empty", "write a short name on one line"));
    }
    name(text)
}

/// The name of a network interface.
pub(super) fn interface(text: &str) -> Result<InterfaceName, Problem> {
    InterfaceName::from_str(text).map_err(|error| {
        problem(
            format!("is not the name of an interface: {error}"),
            "write the name that `ip link` shows, such as `eth1`",
        )
    })
}

/// A gateway's mode.
pub(super) fn gateway_mode(text: &str) -> Result<GatewayMode, Problem> {
    let help = format!("write one of {}", GatewayMode::CHOICES);
    parsed(text.parse().ok(), text, "not a mode", help)
}

/// A gateway's priority, 1 to 254.
pub(super) fn priority(text: &str) -> Result<u8, Problem> {
    let priority = decimal(text).filter(|priority| (1..=254).contains(priority));
    let help = "write a number from 1 to 254: of two gateways on one network the one with the higher number is active";
    parsed(priority, text, "not a priority", help)
}

/// An IEEE 802.1Q VLAN identifier, 1 to 4094 (0 and 4095 are reserved).
pub(super) fn vlan(text: &str) -> Result<u16, Problem> {
    let vlan = decimal(text).filter(|vlan| (1..=4094).contains(vlan));
    let help = "write a number from 1 to 4094, or remove it for untagged frames";
    parsed(vlan, text, "not a VLAN", help)
}

/// The MAC address of one interface.
pub(super) fn mac(text: &str) -> Result<Mac, Problem> {
    let right = "write six pairs of hexadecimal digits, such as `02:00:5e:10:00:01`";
    match Mac::from_str(text) {
        Ok(mac) if mac.is_multicast() => Err(invalid(
            text,
            "a multicast address",
            "write the address of one interface: the second digit of its first pair is even",
        )),
        Ok(mac) if mac == Mac::default() => Err(invalid(
            text,
            "which is not the address of an interface",
            right,
        )),
        Ok(mac) => Ok(mac),
        Err(_) => Err(invalid(text, "not a MAC address", right)),
    }
}

/// A unicast address that routers forward.
pub(super) fn host_address(text: &str) -> Result<IpAddr, Problem> {
    let right = "write an address without a prefix length, such as `192.168.1.10` or `fd00:1::10`";
    let Ok(address) = IpAddr::from_str(text) else {
        return Err(problem(format!("has `{text}`, not an IP address"), right));
    };
    let no_host = address.is_unspecified() || address.is_multicast() || address.is_loopback();
    match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Err(problem(
            format!("has `{text}`, a link-local address"),
            "write a global or unique local address, such as `fd00:1::10`",
        )),
        _ if no_host || address == IpAddr::V4(Ipv4Addr::BROADCAST) => Err(problem(
            format!("has `{text}`, which is not the address of a single host"),
            right,
        )),
        _ => Ok(address),
    }
}

/// A rule: `WHO [WHAT]`.
pub(super) fn rule(text: &str) -> Result<Rule, Problem> {
    Rule::from_str(text).map_err(|error| {
        let subject = match error {
            RuleError::Words(_) | RuleError::Ranges => "it ",
            RuleError::Address(_) | RuleError::Service(_) => "",
        };
        let error = error.to_string();
        let (fault, right) = error.split_once("; ").unwrap_or((&error, "write WHO WHAT"));
        problem(format!("has `{text}`: {subject}{fault}"), right)
    })
}

/// A private key. All zeros is no key (`wg` takes it as "remove the key").
pub(super) fn private_key(text: &str) -> Result<PrivateKey, Problem> {
    if is_zero(text) {
        return Err(problem("is all zeros, which is no key", MAKE_PRIVATE));
    }
    key::parse_private_key(text).map_err(|e| key_problem(e, MAKE_PRIVATE))
}

/// A public key.
pub(super) fn public_key(text: &str) -> Result<PublicKey, Problem> {
    let right = "a public key is 44 characters of base64, ending in `=`: the peer prints its own with `seikan pubkey < private.key`";
    if is_zero(text) {
        return Err(problem("is all zeros, which is no key", right));
    }
    key::parse_public_key(text).map_err(|e| key_problem(e, right))
}

/// A preshared key. All zeros is the protocol's "none".
pub(super) fn preshared_key(text: &str) -> Result<Option<PresharedKey>, Problem> {
    let right = "a preshared key is 44 characters of base64, ending in `=`: make one with `seikan genpsk` and give it to both ends";
    if is_zero(text) {
        return Ok(None);
    }
    key::parse_preshared_key(text)
        .map(Some)
        .map_err(|e| key_problem(e, right))
}

const MAKE_PRIVATE: &str =
    "a private key is 44 characters of base64, ending in `=`: make one with `seikan genkey`";

fn key_problem(error: KeyError, help: &str) -> Problem {
    problem(format!("is not a key: it {error}"), help)
}

/// Whether the text is the base64 of 32 zero bytes.
fn is_zero(text: &str) -> bool {
    key::parse_public_key(text).is_ok_and(|key| key.as_bytes().iter().all(|b| *b == 0))
}

/// Digits only: `FromStr` of the integers would take a sign as well.
fn decimal<T: FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// Returns `Some(None)` for `off` and 0, and `None` if the text is no number.
fn unless_off<T: Default + PartialEq>(
    text: &str,
    parse: fn(&str) -> Option<T>,
) -> Option<Option<T>> {
    if text.eq_ignore_ascii_case("off") {
        return Some(None);
    }
    parse(text).map(|number| Some(number).filter(|number| *number != T::default()))
}

fn decimal_or_hex(text: &str) -> Option<u32> {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    match hex {
        Some(digits) if digits.bytes().all(|b| b.is_ascii_hexdigit()) => {
            u32::from_str_radix(digits, 16).ok()
        }
        Some(_) => None,
        None => decimal(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_decimal_or_hexadecimal_or_off() {
        assert_eq!(fwmark("51820").unwrap(), Some(51820));
        assert_eq!(fwmark("0xca6c").unwrap(), Some(0xca6c));
        assert_eq!(fwmark("0xFFFFFFFF").unwrap(), Some(u32::MAX));
        assert_eq!(fwmark("off").unwrap(), None);
        assert_eq!(fwmark("0").unwrap(), None);
        for text in [
            "",
            "0x",
            "0x100000000",
            "4294967296",
            "-1",
            "+1",
            "0x+1",
            "x",
        ] {
            assert!(fwmark(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_table_is_off_auto_a_name_or_a_number() {
        assert_eq!(table("off").unwrap(), Table::Off);
        assert_eq!(table("AUTO").unwrap(), Table::Auto);
        assert_eq!(table("main").unwrap(), Table::Number(254));
        assert_eq!(table("1234").unwrap(), Table::Number(1234));
        assert!(table("0").is_err());
        assert!(table("vpn").is_err());
    }

    #[test]
    fn a_prefix_may_leave_out_its_length() {
        assert_eq!(prefix("10.0.0.1").unwrap().to_string(), "10.0.0.1/32");
        assert_eq!(prefix("fd00::1").unwrap().to_string(), "fd00::1/128");
        assert_eq!(prefix("10.0.0.1/24").unwrap().to_string(), "10.0.0.1/24");
        for text in [
            "10.0.0.1/33",
            "10.0.0/8",
            "fd00::/129",
            "10.0.0.1/",
            "/8",
            "10.0.0.1/+8",
        ] {
            assert!(prefix(text).is_err(), "{text}");
        }
    }

    #[test]
    fn dns_distinguishes_servers_from_domains() {
        assert_eq!(
            dns("10.0.0.53").unwrap(),
            Host::Address([10, 0, 0, 53].into())
        );
        assert_eq!(
            dns("corp.example").unwrap(),
            Host::Name("corp.example".into())
        );
        assert!(dns("10.0.0").is_err());
        assert!(dns("fd00::x").is_err());
    }

    #[test]
    fn keepalive_off_and_zero_are_none() {
        assert_eq!(keepalive("off").unwrap(), None);
        assert_eq!(keepalive("0").unwrap(), None);
        assert_eq!(keepalive("25").unwrap(), Some(25));
        assert!(keepalive("65536").is_err());
    }
}

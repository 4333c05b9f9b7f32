//! Parsers of single values. Each takes a trimmed text and returns the value, or a [`Problem`] that
//! completes the sentence "`Key` ..." and suggests the right form.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use seikan_proto::gateway::rules::{Rule, RuleError};
use seikan_proto::mesh::{Credential, Name, Pin};
use seikan_wire::ethernet::Mac;

use super::endpoint::{self, CoordinatorUrl, Endpoint, Host};
use super::key::{self, KeyError, PresharedKey, PrivateKey, PublicKey};
use super::types::{
    BitRate, CipherPreference, GatewayMode, InterfaceName, Mode, Protocol, Repair, Table,
};

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

/// Returns the value, or a problem: `message`, followed by the error.
fn checked<T>(
    value: Result<T, impl Display>,
    message: impl Display,
    help: &str,
) -> Result<T, Problem> {
    value.map_err(|error| problem(format!("{message} {error}"), help))
}

/// Defines parsers that report one kind of fault: name, type and function, the fault, and the right
/// form.
macro_rules! parsers {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $parse:expr, $fault:literal, $help:expr;)*) => {
        $($(#[$doc])*
        pub(super) fn $name(text: &str) -> Result<$type, Problem> {
            let parse: fn(&str) -> Option<$type> = $parse;
            parse(text).ok_or_else(|| problem(format!("is `{text}`, {}", $fault), $help))
        })*
    };
}

parsers! {
    /// `true` or `false`.
    boolean: bool = |text| text.to_ascii_lowercase().parse().ok(),
        "neither true nor false", "write `true` or `false`";
    /// A UDP port to listen on; 0: any.
    port: u16 = decimal,
        "not a port", "write a number from 0 (any free port) to 65535, such as `51820`";
    /// Seconds between keepalives, or `off`.
    keepalive: Option<u16> = |text| unless_off(text, decimal),
        "not a number of seconds", "write `off` or a number of seconds from 1 to 65535, such as `25`";
    /// A firewall mark, or `off`.
    fwmark: Option<u32> = |text| unless_off(text, decimal_or_hex),
        "not a mark", "write `off` or a 32-bit number, decimal or hexadecimal, such as `0xca6c`";
    /// A routing table. The names are those in every iproute2's `rt_tables`.
    table: Table = |text| match text.to_ascii_lowercase().as_str() {
        "auto" => Some(Table::Auto),
        "off" => Some(Table::Off),
        "default" => Some(Table::Number(253)),
        "main" => Some(Table::Number(254)),
        "local" => Some(Table::Number(255)),
        _ => decimal_or_hex(text).filter(|number| *number != 0).map(Table::Number),
    }, "not a routing table", "write `auto`, `off`, `main` or the number of a table, such as `51820`";
    /// The URL of a coordinator.
    coordinator: CoordinatorUrl = any, "not the address of a coordinator",
        "write `https://HOST` or `https://HOST:PORT`, as given to `seikan join`";
    /// An MTU; its range depends on the rest of the file.
    mtu: u32 = decimal, "not a number of bytes", "write a number of bytes, such as `1420`";
    /// `address:port`.
    socket: SocketAddr = any,
        "not an address and a port", "write `address:port`, such as `127.0.0.1:9586`";
    /// A protocol's name.
    protocol: Protocol = any, "not a protocol", format!("write one of {}", Protocol::CHOICES);
    /// Content of a tunnel: IP packets or Ethernet frames.
    mode: Mode = any, "not a mode", format!("write one of {}", Mode::CHOICES);
    /// A cipher's name.
    cipher: CipherPreference = any,
        "not a cipher", format!("write one of {}", CipherPreference::CHOICES);
    /// Loss repair.
    repair: Repair = any, "not a kind of loss repair", format!("write one of {}", Repair::CHOICES);
    /// A rate.
    rate: BitRate = any, "not a rate", format!("write {}", BitRate::CHOICES);
    /// A gateway's mode.
    gateway_mode: GatewayMode = any,
        "not a mode", format!("write one of {}", GatewayMode::CHOICES);
    /// A gateway's priority, 1 to 254.
    priority: u8 = |text| decimal(text).filter(|priority| (1..=254).contains(priority)),
        "not a priority", "write a number from 1 to 254: of two gateways on one network the one with the higher number is active";
    /// An IEEE 802.1Q VLAN identifier, 1 to 4094 (0 and 4095 are reserved).
    vlan: u16 = |text| decimal(text).filter(|vlan| (1..=4094).contains(vlan)),
        "not a VLAN", "write a number from 1 to 4094, or remove it for untagged frames";
}

/// Any text.
pub(super) fn text(text: &str) -> Result<String, Problem> {
    Ok(text.to_owned())
}

/// The pin of a certificate.
pub(super) fn pin(text: &str) -> Result<Pin, Problem> {
    let help = "copy it from the output of `seikan coordinator`";
    checked(text.parse(), format!("is `{text}`, not a pin:"), help)
}

/// A member's credential. An invalid one is not repeated in the message: it may be almost the right
/// one.
pub(super) fn credential(text: &str) -> Result<Credential, Problem> {
    let help = "ask for a token and run `seikan join` again";
    checked(text.parse(), "is not a member's credential:", help)
}

/// A member's name and its key.
pub(super) fn member_pin(text: &str) -> Result<(Name, PublicKey), Problem> {
    let help = "write a member's name, a space and its public key, as `seikan status` shows them";
    let Some((name, key)) = text.split_once(char::is_whitespace) else {
        return Err(problem(format!("is `{text}`, not a name and a key"), help));
    };
    let message = format!("has `{name}`, which is not the name of a member:");
    Ok((
        checked(name.parse(), message, help)?,
        public_key(key.trim())?,
    ))
}

/// An address with or without its prefix length, host bits kept.
pub(super) fn prefix(text: &str) -> Result<IpNet, Problem> {
    let help = "write an address with its prefix length, such as `10.0.0.1/24` or `fd00::1/64`";
    let Some((address, length)) = text.split_once('/') else {
        let address = text.parse().map(|address: IpAddr| address.into());
        return address.map_err(|_| problem(format!("has `{text}`, not an IP address"), help));
    };
    let Some(address) = any::<IpAddr>(address) else {
        let message = format!("has `{text}`: `{address}` is not an IP address");
        return Err(problem(message, help));
    };
    let prefix = decimal(length).and_then(|length| IpNet::new(address, length).ok());
    prefix.ok_or_else(|| {
        let (longest, usual) = if address.is_ipv4() {
            (32, 24)
        } else {
            (128, 64)
        };
        problem(
            format!("has `{text}`: `/{length}` is not a prefix length"),
            format!("write a length from 0 to {longest}, such as `{address}/{usual}`"),
        )
    })
}

/// `host:port` or `[IPv6]:port`.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, Problem> {
    let help = "write `host:port`, such as `vpn.example.com:51820`, `192.0.2.1:51820` or `[2001:db8::1]:51820`";
    checked(text.parse(), format!("is `{text}`:"), help)
}

/// A name server's address or a search domain, distinguished as in wg-quick.
pub(super) fn dns(text: &str) -> Result<Host, Problem> {
    let host = any(text)
        .map(Host::Address)
        .or_else(|| endpoint::plain_host(text));
    let help =
        "write addresses of name servers and search domains, such as `10.0.0.53, example.com`";
    let message = || format!("has `{text}`, neither an IP address nor a domain");
    host.ok_or_else(|| problem(message(), help))
}

/// A display name: printable, one line.
pub(super) fn name(text: &str) -> Result<String, Problem> {
    if text.chars().any(char::is_control) || text.chars().count() > 64 {
        let message = "has control characters, or more than 64 characters";
        return Err(problem(message, "write a short name on one line"));
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
    let help = "write the name that `ip link` shows, such as `eth1`";
    checked(text.parse(), "is not the name of an interface:", help)
}

/// The MAC address of one interface.
pub(super) fn mac(text: &str) -> Result<Mac, Problem> {
    let pairs = "write six pairs of hexadecimal digits, such as `02:00:5e:10:00:01`";
    let (fault, help) = match Mac::from_str(text) {
        Ok(mac) if mac.is_multicast() => (
            "a multicast address",
            "write the address of one interface: the second digit of its first pair is even",
        ),
        Ok(mac) if mac == Mac::default() => ("which is not the address of an interface", pairs),
        Ok(mac) => return Ok(mac),
        Err(_) => ("not a MAC address", pairs),
    };
    Err(problem(format!("is `{text}`, {fault}"), help))
}

/// A unicast address that routers forward.
pub(super) fn host_address(text: &str) -> Result<IpAddr, Problem> {
    let right = "write an address without a prefix length, such as `192.168.1.10` or `fd00:1::10`";
    let (fault, help) = match text.parse() {
        Ok(IpAddr::V6(v6)) if v6.is_unicast_link_local() => (
            "a link-local address",
            "write a global or unique local address, such as `fd00:1::10`",
        ),
        Ok(ip)
            if ip.is_unspecified()
                || ip.is_multicast()
                || ip.is_loopback()
                || ip == Ipv4Addr::BROADCAST =>
        {
            ("which is not the address of a single host", right)
        }
        Ok(address) => return Ok(address),
        Err(_) => ("not an IP address", right),
    };
    Err(problem(format!("has `{text}`, {fault}"), help))
}

/// A rule: `WHO [WHAT]`.
pub(super) fn rule(text: &str) -> Result<Rule, Problem> {
    Rule::from_str(text).map_err(|error| {
        let subject = match error {
            RuleError::Words(_) | RuleError::Ranges => "it ",
            RuleError::Address(_) | RuleError::Service(_) => "",
        };
        let error = error.to_string();
        let (fault, help) = error.split_once("; ").unwrap_or((&error, "write WHO WHAT"));
        problem(format!("has `{text}`: {subject}{fault}"), help)
    })
}

/// A private key. All zeros is no key (`wg` takes it as "remove the key").
pub(super) fn private_key(text: &str) -> Result<PrivateKey, Problem> {
    let help =
        "a private key is 44 characters of base64, ending in `=`: make one with `seikan genkey`";
    required(key(text, key::parse_private_key, help), help)
}

/// A public key.
pub(super) fn public_key(text: &str) -> Result<PublicKey, Problem> {
    let help = "a public key is 44 characters of base64, ending in `=`: the peer prints its own with `seikan pubkey < private.key`";
    required(key(text, key::parse_public_key, help), help)
}

/// A preshared key. All zeros is the protocol's "none".
pub(super) fn preshared_key(text: &str) -> Result<Option<PresharedKey>, Problem> {
    let help = "a preshared key is 44 characters of base64, ending in `=`: make one with `seikan genpsk` and give it to both ends";
    key(text, key::parse_preshared_key, help)
}

/// Returns a key; `None` if it is all zeros.
fn key<T>(
    text: &str,
    parse: fn(&str) -> Result<T, KeyError>,
    help: &str,
) -> Result<Option<T>, Problem> {
    let is_zero = key::parse_public_key(text).is_ok_and(|key| *key.as_bytes() == [0; 32]);
    let key = checked(parse(text), "is not a key: it", help)?;
    Ok(Some(key).filter(|_| !is_zero))
}

fn required<T>(key: Result<Option<T>, Problem>, help: &str) -> Result<T, Problem> {
    key?.ok_or_else(|| problem("is all zeros, which is no key", help))
}

/// Any text that the type takes.
fn any<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

/// Digits only: `FromStr` of the integers would take a sign as well.
fn decimal<T: FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    any(text).filter(|_| digits)
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
    let Some(digits) = hex else {
        return decimal(text);
    };
    // Digits only, as above.
    let number = u32::from_str_radix(digits, 16).ok();
    number.filter(|_| !digits.starts_with('+'))
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

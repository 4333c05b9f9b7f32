//! A `set=1` request, applied line by line: first the device's keys, then those of each peer, which start with
//! its `public_key`.

use super::{Device, Refusal};
use ipnet::IpNet;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{PresharedKey, PrivateKey, PublicKey};
use seikan_sys::netlink::Netlink;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;
use std::time::Duration;
use zeroize::Zeroizing;

/// State of a request.
#[derive(Debug, Default)]
pub struct Set {
    subject: Subject,
    /// The first error; the lines after it are ignored.
    refusal: Option<Refusal>,
}

/// The object of the next line.
#[derive(Clone, Copy, Debug, Default)]
enum Subject {
    #[default]
    Device,
    /// A peer; `created` by this request.
    Peer { id: PeerId, created: bool },
    /// A peer that must not exist: values are checked and ignored.
    Nobody,
}

impl Set {
    /// Applies one line.
    pub fn line(&mut self, line: &[u8], device: &mut dyn Device) {
        if self.refusal.is_none() {
            self.refusal = self.carry_out(line, device).err();
        }
    }

    /// Returns the result.
    pub fn result(&self) -> Result<(), Refusal> {
        self.refusal.map_or(Ok(()), Err)
    }

    fn carry_out(&mut self, line: &[u8], device: &mut dyn Device) -> Result<(), Refusal> {
        let text = std::str::from_utf8(line).map_err(|_| Refusal::Protocol)?;
        let (key, value) = text.split_once('=').ok_or(Refusal::Protocol)?;
        match (key, self.subject) {
            ("public_key", _) => self.select(value, device),
            (_, Subject::Device) => set_device(key, value, device),
            (_, Subject::Peer { .. } | Subject::Nobody) => self.set_peer(key, value, device),
        }
    }

    /// Finds or creates the peer of the next lines. This host's own key cannot be a peer's.
    fn select(&mut self, value: &str, device: &mut dyn Device) -> Result<(), Refusal> {
        let key = PublicKey::from_bytes(*parse_key(value)?);
        let created = device.tunnel().peer_by_key(&key).is_none();
        self.subject = match device.tunnel_mut().add_peer(key) {
            Some(id) => Subject::Peer { id, created },
            None => Subject::Nobody,
        };
        Ok(())
    }

    fn set_peer(&mut self, key: &str, value: &str, device: &mut dyn Device) -> Result<(), Refusal> {
        let subject = self.subject;
        let now = device.now().mono;
        let tunnel = device.tunnel_mut();
        let id = match subject {
            Subject::Peer { id, .. } => Some(id),
            Subject::Device | Subject::Nobody => None,
        };
        match key {
            "update_only" => {
                require_true(value)?;
                if let Subject::Peer { id, created: true } = subject {
                    tunnel.remove_peer(id);
                    self.subject = Subject::Nobody;
                }
            }
            "remove" => {
                require_true(value)?;
                id.into_iter().for_each(|id| tunnel.remove_peer(id));
                self.subject = Subject::Nobody;
            }
            "preshared_key" => {
                let key = PresharedKey::from_bytes(*parse_key(value)?);
                if let Some(id) = id {
                    tunnel.set_preshared_key(id, key);
                }
            }
            "endpoint" => {
                let endpoint = parse_endpoint(value)?;
                id.into_iter()
                    .for_each(|id| tunnel.set_endpoint(id, endpoint));
            }
            "persistent_keepalive_interval" => {
                let interval = Duration::from_secs(parse_number::<u16>(value)?.into());
                id.into_iter()
                    .for_each(|id| tunnel.set_persistent_keepalive(id, interval, now));
            }
            "replace_allowed_ips" => {
                require_true(value)?;
                id.into_iter().for_each(|id| tunnel.clear_allowed_ips(id));
            }
            "allowed_ip" => {
                let (prefix, remove) = match value.strip_prefix('-') {
                    Some(prefix) => (parse_prefix(prefix)?, true),
                    None => (parse_prefix(value)?, false),
                };
                match id {
                    Some(id) if remove => tunnel.remove_allowed_ip(id, prefix),
                    Some(id) => tunnel.add_allowed_ip(id, prefix),
                    None => {}
                }
            }
            "protocol_version" if value == "1" => {}
            _ => return Err(Refusal::Invalid),
        }
        Ok(())
    }
}

fn set_device(key: &str, value: &str, device: &mut dyn Device) -> Result<(), Refusal> {
    match key {
        "private_key" => {
            let mut bytes = parse_key(value)?;
            let none = *bytes == [0; 32];
            // Clamped (RFC 7748, section 5), as everywhere else.
            bytes[0] &= 248;
            bytes[31] = bytes[31] & 127 | 64;
            let new = (!none).then(|| PrivateKey::from_bytes(*bytes));
            let same = match (&new, device.private_key()) {
                (Some(new), Some(old)) => new.as_bytes() == old.as_bytes(),
                (None, None) => true,
                _ => false,
            };
            // Setting the same key again keeps sessions: `wg syncconf` always sends the key.
            if !same {
                device.set_private_key(new);
            }
            Ok(())
        }
        "listen_port" => match parse_number::<u16>(value)? {
            port if port == device.listen_port() => Ok(()),
            port => device.set_listen_port(port),
        },
        "fwmark" => match parse_number::<u32>(value)? {
            mark if mark == device.fwmark() => Ok(()),
            mark => device.set_fwmark(mark),
        },
        "replace_peers" => {
            require_true(value)?;
            let all: Vec<_> = device.tunnel().peers().map(|peer| peer.id).collect();
            for id in all {
                device.tunnel_mut().remove_peer(id);
            }
            Ok(())
        }
        _ => Err(Refusal::Invalid),
    }
}

fn require_true(value: &str) -> Result<(), Refusal> {
    match value {
        "true" => Ok(()),
        _ => Err(Refusal::Invalid),
    }
}

/// Decimal digits and nothing else.
fn parse_number<T: FromStr>(value: &str) -> Result<T, Refusal> {
    let digits = value.bytes().all(|b| b.is_ascii_digit());
    let number = value.parse().ok().filter(|_| digits);
    number.ok_or(Refusal::Invalid)
}

/// 64 hexadecimal digits.
fn parse_key(value: &str) -> Result<Zeroizing<[u8; 32]>, Refusal> {
    let digits = value.as_bytes();
    if digits.len() != 64 {
        return Err(Refusal::Invalid);
    }
    let digit = |d: u8| char::from(d).to_digit(16).ok_or(Refusal::Invalid);
    let mut key = Zeroizing::new([0; 32]);
    for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Ok(key)
}

/// Parses a prefix with its length.
fn parse_prefix(value: &str) -> Result<IpNet, Refusal> {
    value.parse().map_err(|_| Refusal::Invalid)
}

/// `address:port` or `[address]:port`; a link-local address may name its interface
/// (`[fe80::1%eth0]:51820`), as `wg` writes it.
fn parse_endpoint(value: &str) -> Result<SocketAddr, Refusal> {
    if let Ok(endpoint) = value.parse() {
        return Ok(endpoint);
    }
    let scoped = || {
        let (host, port) = value.strip_prefix('[')?.split_once("]:")?;
        let (address, interface) = host.split_once('%')?;
        let address: Ipv6Addr = address.parse().ok()?;
        let port = parse_number(port).ok()?;
        let index = Netlink::open().ok()?.link_index(interface).ok()??;
        Some(SocketAddrV6::new(address, port, 0, index).into())
    };
    scoped().ok_or(Refusal::Invalid)
}

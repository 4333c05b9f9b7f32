//! Diagnosis of both ends of a tunnel: `--listen` serves another doctor, `--peer` connects to one.
//!
//! [`channel`] carries the messages of `seikan_diagnose::exchange`; [`client`] and [`server`] are
//! the two ends of a session. The server measures, and takes part in a load if it was started with
//! `--allow-load`; it changes nothing.

mod channel;
mod client;
mod server;

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use seikan_config::{PresharedKey, parse_preshared_key};
use seikan_diagnose::Evidence;
use seikan_diagnose::exchange::{Load, LoadKind};
use seikan_load::{Flow, Meter, Transport};
use seikan_sys::discover;
use seikan_sys::netlink::Netlink;
use seikan_ui::Interrupt;
use zeroize::Zeroizing;

pub use client::Peer;
pub use server::listen;

/// Default port of a listening doctor.
const PORT: u16 = 9587;
/// Time without a message after which the other end is dead.
const DEAD: Duration = Duration::from_secs(10);
/// Time between two keepalives.
const KEEPALIVE: Duration = Duration::from_secs(1);
/// Interval at which a waiting thread checks its flags.
const POLL: Duration = Duration::from_millis(100);
/// Largest key file, bytes.
const KEY_FILE: u64 = 4096;

/// Arguments for the far end.
#[derive(Debug, Args)]
#[command(next_help_heading = "Both ends")]
#[group(id = "ends")]
pub struct Arguments {
    /// Also measure the far end, which runs `seikan doctor --listen`; preferably its address in the
    /// tunnel
    #[arg(long, value_name = "HOST[:PORT]", requires = "key", value_parser = other)]
    peer: Option<String>,
    /// Serve the doctor of the far end [default: every address, port 9587]
    #[arg(long, value_name = "ADDRESS[:PORT]", requires = "key", num_args = 0..=1, default_missing_value = "",
        conflicts_with_all = ["peer", "pid", "seconds", "expect", "interval", "json", "map", "level", "no_probe", "verbose",
        "fix", "prove", "undo", "exit_code"])]
    listen: Option<String>,
    /// Secret of both ends, as printed by `seikan genpsk`
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Send load to the address of --peer during the measurement; it passes the tunnel only if that
    /// address is inside it
    #[arg(long, value_name = "KIND", requires = "peer", num_args = 0..=1, default_missing_value = "tcp",
        conflicts_with_all = ["fix", "prove"])]
    load: Option<Kind>,
    /// Maximum rate of the load in Mbit/s; required for UDP
    #[arg(long, value_name = "MBIT", requires = "load", value_parser = super::measure::megabits)]
    load_rate: Option<f64>,
    /// Send the load from the far end to this one
    #[arg(long, requires = "load")]
    reverse: bool,
    /// With --listen: take part in a load, in either direction
    #[arg(long, requires = "listen")]
    allow_load: bool,
}

/// Protocol of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// One connection, at full rate
    Tcp,
    /// Datagrams
    Udp,
}

fn other(text: &str) -> Result<String, String> {
    split(text).map(|_| text.to_owned())
}

/// Returns an address without the brackets around it, if it has any.
fn bare(text: &str) -> &str {
    let inside = text.strip_prefix('[');
    let inside = inside.and_then(|text| text.strip_suffix(']'));
    inside.unwrap_or(text)
}

/// A host and a port: `10.8.0.1`, `host:9000`, `fd00::1`, `[fd00::1]:9000`.
fn split(text: &str) -> Result<(String, u16), String> {
    let wrong =
        || format!("`{text}` is not HOST or HOST:PORT, such as 10.8.0.1 or [fd00::1]:{PORT}");
    let bare = bare(text);
    if bare.parse::<Ipv6Addr>().is_ok() {
        return Ok((bare.to_owned(), PORT));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
        None => (text, PORT),
    };
    let host = self::bare(host);
    let fits = !host.is_empty() && port != 0 && !host.contains(['[', ']', '/', ' ']);
    if fits && (!host.contains(':') || host.parse::<Ipv6Addr>().is_ok()) {
        Ok((host.to_owned(), port))
    } else {
        Err(wrong())
    }
}

impl Arguments {
    /// The address of `--listen`.
    pub fn listen(&self) -> Option<&str> {
        self.listen.as_deref()
    }

    /// The rate of the load, bits per second.
    pub fn offered(&self) -> Option<f64> {
        self.load_rate.map(|megabits| megabits * 1e6)
    }

    fn load(&self) -> anyhow::Result<Option<Load>> {
        let Some(kind) = self.load else {
            return Ok(None);
        };
        if kind == Kind::Udp && self.load_rate.is_none() {
            bail!("--load udp needs a maximum rate: add --load-rate MBIT");
        }
        Ok(Some(Load {
            kind: match kind {
                Kind::Tcp => LoadKind::Tcp,
                Kind::Udp => LoadKind::Udp,
            },
            rate: self.load_rate,
            reverse: self.reverse,
        }))
    }

    fn key(&self) -> anyhow::Result<PresharedKey> {
        let path = self.key.as_deref().context("--key FILE is missing")?;
        read_key(path).with_context(|| {
            format!(
                "cannot use the key {}; `umask 077; seikan genpsk > FILE` creates one for both ends",
                path.display()
            )
        })
    }
}

fn read_key(path: &Path) -> anyhow::Result<PresharedKey> {
    let file = File::open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        eprintln!(
            "warning: other users can read or change the secret {0}; chmod 600 {0}",
            path.display()
        );
    }
    // Allocated once, so that no copy of the secret remains.
    let mut text = Zeroizing::new(String::with_capacity(KEY_FILE as usize));
    file.take(KEY_FILE).read_to_string(&mut text)?;
    let key = parse_preshared_key(&text)?;
    if !key.is_set() {
        bail!("the key is all zero");
    }
    Ok(key)
}

/// Returns the tunnel that has this address, if there is one.
fn tunnel_of(address: IpAddr) -> anyhow::Result<Option<String>> {
    let address = address.to_canonical();
    let netlink = Netlink::open()?;
    let addresses = netlink.all_addresses()?;
    let Some(own) = addresses.iter().find(|own| own.net.addr() == address) else {
        return Ok(None);
    };
    let name = netlink.link_by_index(own.index)?.name;
    let tunnels = discover::candidates()?;
    Ok(tunnels
        .into_iter()
        .map(|tunnel| tunnel.interface)
        .find(|tunnel| *tunnel == name))
}

/// Removes the doctors' own connection from the connections through the tunnel.
fn remove_own_flow(evidence: &mut Evidence, stream: &TcpStream) -> std::io::Result<()> {
    let plain = |address: SocketAddr| (address.ip().to_canonical(), address.port());
    let (local, remote) = (plain(stream.local_addr()?), plain(stream.peer_addr()?));
    evidence
        .map
        .flows
        .retain(|flow| plain(flow.local) != local || flow.remote.map(plain) != Some(remote));
    Ok(())
}

/// Parses the address of `--listen`; empty: every address.
fn listen_addresses(text: &str) -> anyhow::Result<Vec<SocketAddr>> {
    if text.is_empty() {
        // The second address is for hosts without IPv6.
        return Ok(vec![
            (Ipv6Addr::UNSPECIFIED, PORT).into(),
            (Ipv4Addr::UNSPECIFIED, PORT).into(),
        ]);
    }
    let address = text.parse().or_else(|_| {
        let address = bare(text).parse::<IpAddr>();
        address.map(|address| SocketAddr::new(address, PORT))
    });
    let address = address.with_context(|| {
        format!("`{text}` is not an address of this host, such as 10.8.0.1 or 0.0.0.0:{PORT}")
    })?;
    Ok(vec![address])
}

fn transport(kind: LoadKind) -> Transport {
    match kind {
        LoadKind::Tcp => Transport::Tcp,
        LoadKind::Udp => Transport::Udp,
    }
}

/// Sends or receives the load.
fn carry(flow: &Flow, load: Load, sends: bool, stop: &Interrupt) {
    if sends {
        flow.send(load.rate, stop)
    } else {
        flow.receive(&Meter::default(), stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_with_or_without_a_port() {
        let of = |text: &str| split(text).ok();
        let host = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(of("10.8.0.1"), host("10.8.0.1", PORT));
        assert_eq!(of("far.example:9000"), host("far.example", 9000));
        assert_eq!(of("fd00::1"), host("fd00::1", PORT));
        assert_eq!(of("[fd00::1]:9000"), host("fd00::1", 9000));
        assert_eq!(of("[fd00::1]"), host("fd00::1", PORT));
        for wrong in [
            "",
            ":9000",
            "host:",
            "host:70000",
            "host:0",
            "a b",
            "[host",
            "a:b:1",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_doctor_listens_everywhere_or_at_one_address() {
        let of = |text: &str| listen_addresses(text).ok().map(|all| all[0].to_string());
        assert_eq!(of("").as_deref(), Some("[::]:9587"));
        assert_eq!(of("10.8.0.1").as_deref(), Some("10.8.0.1:9587"));
        assert_eq!(of("[fd00::1]:9000").as_deref(), Some("[fd00::1]:9000"));
        assert_eq!(of("somewhere"), None);
    }
}

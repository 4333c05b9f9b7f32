//! Both ends of a tunnel: `--listen` serves another doctor, `--peer` asks one.
//!
//! [`channel`] carries the messages of `seikan_diagnose::exchange`; [`asking`] and [`listening`] are the two ends of a session.
//! The end that listens measures, and is one end of a load if it was started for that; it changes nothing.

mod asking;
mod channel;
mod listening;

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use seikan_config::{PresharedKey, parse_preshared_key};
use seikan_diagnose::Evidence;
use seikan_diagnose::exchange::{Load, LoadKind};
use seikan_load::Transport;
use seikan_sys::discover;
use seikan_sys::netlink::Netlink;
use zeroize::Zeroizing;

pub use asking::Peer;
pub use listening::listen;

/// Where a doctor listens unless told otherwise.
const PORT: u16 = 9587;
/// Nobody is waited for who has said nothing for so long.
const DEAD: Duration = Duration::from_secs(10);
/// Between two signs of life.
const PULSE: Duration = Duration::from_secs(1);
/// How often whoever waits looks around.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of a key's file, at most.
const KEY_FILE: u64 = 4096;

/// What `doctor` is told about the other end.
#[derive(Debug, Args)]
#[command(next_help_heading = "Both ends")]
#[group(id = "ends")]
pub struct Arguments {
    /// Measure the other end as well: a `seikan doctor --listen` there, best by its address in the tunnel
    #[arg(long, value_name = "HOST[:PORT]", requires = "key", value_parser = other)]
    peer: Option<String>,
    /// Serve the doctor of the other end [default: every address, port 9587]
    #[arg(long, value_name = "ADDRESS[:PORT]", requires = "key", num_args = 0..=1, default_missing_value = "",
        conflicts_with_all = ["peer", "pid", "seconds", "expect", "interval", "json", "map", "level", "no_probe", "verbose",
        "fix", "prove", "undo", "exit_code"])]
    listen: Option<String>,
    /// The secret of both ends, as `seikan genpsk` makes it
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Send load to the other end meanwhile: to the address given with --peer, so through the tunnel if it is one in it
    #[arg(long, value_name = "KIND", requires = "peer", num_args = 0..=1, default_missing_value = "tcp", conflicts_with_all = ["fix", "prove"])]
    load: Option<Kind>,
    /// Send no more than that, in Mbit/s; UDP, which has no brake of its own, needs it
    #[arg(long, value_name = "MBIT", requires = "load", value_parser = super::measure::megabits)]
    load_rate: Option<f64>,
    /// Load from the other end to this one
    #[arg(long, requires = "load")]
    reverse: bool,
    /// With --listen: load may be sent here, and from here if that is asked for
    #[arg(long, requires = "listen")]
    allow_load: bool,
}

/// What load is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// One connection, as fast as it goes
    Tcp,
    /// Datagrams
    Udp,
}

fn other(text: &str) -> Result<String, String> {
    split(text).map(|_| text.to_owned())
}

/// A host and a port: `10.8.0.1`, `host:9000`, `fd00::1`, `[fd00::1]:9000`.
fn split(text: &str) -> Result<(String, u16), String> {
    let wrong =
        || format!("`{text}` is no HOST or HOST:PORT, such as 10.8.0.1 or [fd00::1]:{PORT}");
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let bare = bare.unwrap_or(text);
    if bare.parse::<Ipv6Addr>().is_ok() {
        return Ok((bare.to_owned(), PORT));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| wrong())?),
        None => (text, PORT),
    };
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let fits = !host.is_empty() && port != 0 && !host.contains(['[', ']', '/', ' ']);
    match fits && (!host.contains(':') || host.parse::<Ipv6Addr>().is_ok()) {
        true => Ok((host.to_owned(), port)),
        false => Err(wrong()),
    }
}

impl Arguments {
    /// Where to listen, if this end shall.
    pub fn listen(&self) -> Option<&str> {
        self.listen.as_deref()
    }

    /// The rate of the load, bits per second: what should go through.
    pub fn offered(&self) -> Option<f64> {
        self.load_rate.map(|megabits| megabits * 1e6)
    }

    fn load(&self) -> anyhow::Result<Option<Load>> {
        let Some(kind) = self.load else {
            return Ok(None);
        };
        if kind == Kind::Udp && self.load_rate.is_none() {
            bail!("--load udp has no brake of its own: say how much with --load-rate MBIT");
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
                "cannot use the key {}; `umask 077; seikan genpsk > FILE` makes one, for both ends",
                path.display()
            )
        })
    }
}

fn read_key(path: &Path) -> anyhow::Result<PresharedKey> {
    let file = File::open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        eprintln!(
            "warning: {0} holds a secret, and others than its owner may read or change it; chmod 600 {0}",
            path.display()
        );
    }
    // Of the right size from the start, so that no copy is left behind.
    let mut text = Zeroizing::new(String::with_capacity(KEY_FILE as usize));
    file.take(KEY_FILE).read_to_string(&mut text)?;
    let key = parse_preshared_key(&text)?;
    if !key.is_set() {
        bail!("it is all zero, which is no secret");
    }
    Ok(key)
}

/// The tunnel that has this address, if one has.
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

/// Takes the doctors' own connection out of those that use the tunnel.
fn forget_own(evidence: &mut Evidence, stream: &TcpStream) -> std::io::Result<()> {
    let plain = |address: SocketAddr| (address.ip().to_canonical(), address.port());
    let (local, remote) = (plain(stream.local_addr()?), plain(stream.peer_addr()?));
    evidence
        .map
        .flows
        .retain(|flow| plain(flow.local) != local || flow.remote.map(plain) != Some(remote));
    Ok(())
}

/// Where to listen: everywhere, or where somebody said.
fn own_addresses(text: &str) -> anyhow::Result<Vec<SocketAddr>> {
    if text.is_empty() {
        // The second is for hosts without IPv6.
        return Ok(vec![
            (Ipv6Addr::UNSPECIFIED, PORT).into(),
            (Ipv4Addr::UNSPECIFIED, PORT).into(),
        ]);
    }
    let address = text.parse().or_else(|_| {
        let bare = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'));
        let address = bare.unwrap_or(text).parse::<IpAddr>();
        address.map(|address| SocketAddr::new(address, PORT))
    });
    let address = address.with_context(|| {
        format!("`{text}` is no address of this host, such as 10.8.0.1 or 0.0.0.0:{PORT}")
    })?;
    Ok(vec![address])
}

fn transport(kind: LoadKind) -> Transport {
    match kind {
        LoadKind::Tcp => Transport::Tcp,
        LoadKind::Udp => Transport::Udp,
    }
}

/// Raises a flag when dropped, so that threads that look at it end whatever happens to the one that waits for them.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
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
        let of = |text: &str| own_addresses(text).ok().map(|all| all[0].to_string());
        assert_eq!(of("").as_deref(), Some("[::]:9587"));
        assert_eq!(of("10.8.0.1").as_deref(), Some("10.8.0.1:9587"));
        assert_eq!(of("[fd00::1]:9000").as_deref(), Some("[fd00::1]:9000"));
        assert_eq!(of("somewhere"), None);
    }
}

//! Both ends: starting them, and measurements between them.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use seikan_sys::netns::NetNs;
use tempfile::TempDir;

use crate::side::{Implementation, Peer, Side, UPLINK, USABLE_AT_ONCE, run, underlay_net};

/// UDP port of both ends until they roam.
const PORT: u16 = 51820;

/// The end that knows the other's endpoint, and so initiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knows {
    /// `a` initiates.
    A,
    /// `b` initiates.
    B,
    /// Both may initiate.
    Both,
}

/// The family of the outer packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Underlay {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Implementations and settings of a pair.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Implementation on host a.
    pub a: Implementation,
    /// Implementation on host b.
    pub b: Implementation,
    /// The end that knows the other's endpoint.
    pub knows: Knows,
    /// Family of the outer packets.
    pub underlay: Underlay,
    /// Use a preshared key.
    pub preshared_key: bool,
    /// Persistent keepalive of both ends in seconds; 0: none.
    pub keepalive: u16,
}

impl Setup {
    /// `a` initiates to `b` over IPv4, without preshared key and keepalives.
    pub fn new(a: Implementation, b: Implementation) -> Setup {
        Setup {
            a,
            b,
            knows: Knows::A,
            underlay: Underlay::V4,
            preshared_key: false,
            keepalive: 0,
        }
    }
}

/// Two hosts with a WireGuard implementation running on each.
pub struct Tunnel {
    /// Host a.
    pub a: Side,
    /// Host b.
    pub b: Side,
    _folder: TempDir,
}

impl Tunnel {
    /// Starts both ends. Returns `None`, with a message, if the machine lacks something.
    pub fn up(setup: Setup) -> Result<Option<Tunnel>> {
        Tunnel::up_changed(setup, |_| Ok(()))
    }

    /// The same, with another preshared key at `b`.
    pub fn up_with_unequal_preshared_keys(setup: Setup) -> Result<Option<Tunnel>> {
        Tunnel::up_changed(setup, |tunnel| {
            tunnel.a.peer.preshared_key = Some(generate(&tunnel.a.host, "genpsk")?);
            tunnel.b.peer.preshared_key = Some(generate(&tunnel.b.host, "genpsk")?);
            Ok(())
        })
    }

    fn up_changed(
        setup: Setup,
        change: impl FnOnce(&mut Tunnel) -> Result<()>,
    ) -> Result<Option<Tunnel>> {
        let host_a = match NetNs::create() {
            Ok(host) => host,
            Err(error) => {
                crate::skip(&format!("no network namespace: {error}"));
                return Ok(None);
            }
        };
        if crate::find_program("wg").is_none() {
            crate::skip("wg is not installed (make deps)");
            return Ok(None);
        }
        for implementation in [setup.a, setup.b] {
            if let Err(error) = implementation.program() {
                crate::skip(&format!("{error:#}"));
                return Ok(None);
            }
        }
        let mut tunnel = Tunnel::make(setup, host_a)?;
        change(&mut tunnel)?;
        // The responder starts first, so that it receives the first initiation.
        tunnel.b.start()?;
        tunnel.a.start()?;
        Ok(Some(tunnel))
    }

    fn make(setup: Setup, host_a: NetNs) -> Result<Tunnel> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let host_b = NetNs::create()?;
        join(&host_a, &host_b)?;

        let outer = |side: u8| -> Result<IpAddr> {
            Ok(match setup.underlay {
                Underlay::V4 => format!("10.66.0.{side}").parse()?,
                Underlay::V6 => format!("fd66::{side}").parse()?,
            })
        };
        let inner = |side: u8| -> Result<[IpNet; 2]> {
            Ok([
                format!("10.67.0.{side}/24").parse()?,
                format!("fd67::{side}/64").parse()?,
            ])
        };
        let preshared_key = if setup.preshared_key {
            Some(generate(&host_a, "genpsk")?)
        } else {
            None
        };
        let (keys_a, keys_b) = (key_pair(&host_a)?, key_pair(&host_a)?);
        let peer = |side: u8, public_key: &str, known: bool| -> Result<Peer> {
            Ok(Peer {
                public_key: public_key.to_owned(),
                preshared_key: preshared_key.clone(),
                endpoint: if known {
                    Some(SocketAddr::new(outer(side)?, PORT))
                } else {
                    None
                },
                allowed_ips: inner(side)?.map(|net| IpNet::from(net.addr())),
                keepalive: setup.keepalive,
            })
        };
        let (peer_a, peer_b) = (
            peer(1, &keys_a.1, setup.knows != Knows::A)?,
            peer(2, &keys_b.1, setup.knows != Knows::B)?,
        );
        let folder = tempfile::Builder::new()
            .prefix("seikan-interop.")
            .tempdir()?;
        let make = |number_of: u8, host, implementation, private_key, peer| -> Result<Side> {
            Ok(Side {
                host,
                implementation,
                interface: format!(
                    "sk{:x}i{}",
                    std::process::id(),
                    2 * number + u32::from(number_of) - 1
                ),
                inner: inner(number_of)?,
                outer: outer(number_of)?,
                port: PORT,
                private_key,
                peer,
                folder: folder.path().to_owned(),
                daemon: None,
            })
        };
        Ok(Tunnel {
            a: make(1, host_a, setup.a, keys_a.0, peer_b)?,
            b: make(2, host_b, setup.b, keys_b.0, peer_a)?,
            _folder: folder,
        })
    }

    /// Pings `to` from the other end until `count` responses have arrived, with a payload of `size`
    /// bytes that must not be fragmented.
    pub fn ping(&self, to: &Side, v6: bool, count: u32, size: u32) -> Result<()> {
        let from = self.other(to);
        let target = to.inner[usize::from(v6)].addr().to_string();
        let (count, size) = (count.to_string(), size.to_string());
        let arguments = [
            "-q", "-n", "-c", &count, "-i", "0.2", "-w", "20", "-s", &size, "-M", "do", &target,
        ];
        run(&from.host, Command::new("ping").args(arguments))
            .map(|_| ())
            .with_context(|| self.logs())
    }

    /// Sends a datagram every 50 ms from the other end to `to`, which echoes them. Returns the time
    /// until the first response. Both ends may restart meanwhile.
    pub fn time_to_answer(&self, to: &Side, limit: Duration) -> Result<Duration> {
        let from = self.other(to);
        let bind = || {
            UdpSocket::bind(("0.0.0.0", 7)).and_then(|s| {
                s.set_read_timeout(Some(Duration::from_millis(50)))
                    .map(|()| s)
            })
        };
        let (server, client) = (to.host.run(bind)??, from.host.run(bind)??);
        let target = SocketAddr::new(to.inner[0].addr(), 7);
        let stop = AtomicBool::new(false);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut datagram = [0; 8];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((length, source)) = server.recv_from(&mut datagram) {
                        let _ = server.send_to(&datagram[..length], source);
                    }
                }
            });
            let mut answer = [0; 8];
            let outcome = loop {
                // There is no route while an interface is missing.
                if client.send_to(b"anybody?", target).is_err() {
                    std::thread::sleep(Duration::from_millis(50));
                }
                if client.recv_from(&mut answer).is_ok() {
                    break Ok(begin.elapsed());
                }
                if begin.elapsed() > limit {
                    break Err(());
                }
            };
            stop.store(true, Ordering::Relaxed);
            match outcome {
                Ok(time) => Ok(time),
                Err(()) => bail!("no answer within {limit:?}\n{}", self.logs()),
            }
        })
    }

    /// Returns the output of both daemons, for error messages.
    pub fn logs(&self) -> String {
        let one = |side: &Side| {
            format!(
                "-- {:?}, {}:\n{}",
                side.implementation,
                side.interface,
                side.log_text()
            )
        };
        format!("{}\n{}", one(&self.a), one(&self.b))
    }

    /// Returns the other end.
    pub fn other(&self, side: &Side) -> &Side {
        if side.interface == self.a.interface {
            &self.b
        } else {
            &self.a
        }
    }
}

/// Joins two hosts by a veth pair with addresses of both families.
fn join(a: &NetNs, b: &NetNs) -> Result<()> {
    a.netlink()?
        .create_veth(UPLINK, UPLINK, Some(std::os::fd::AsFd::as_fd(b)))?;
    for (host, number) in [(a, 1), (b, 2)] {
        let netlink = host.netlink()?;
        let uplink = netlink.link(UPLINK)?.index;
        for address in [format!("10.66.0.{number}"), format!("fd66::{number}")] {
            netlink.add_address_with(uplink, underlay_net(address.parse()?)?, USABLE_AT_ONCE)?;
        }
        netlink.set_up(uplink)?;
    }
    Ok(())
}

/// A key of the kind that this command of `wg` makes.
fn generate(host: &NetNs, kind: &str) -> Result<String> {
    Ok(run(host, Command::new("wg").arg(kind))?.trim().to_owned())
}

/// A private key and its public one, made by `wg`.
fn key_pair(host: &NetNs) -> Result<(String, String)> {
    let private = generate(host, "genkey")?;
    let mut child = Command::new("wg")
        .arg("pubkey")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    child
        .stdin
        .take()
        .context("wg pubkey has no input")?
        .write_all(private.as_bytes())?;
    let public = String::from_utf8(child.wait_with_output()?.stdout)?
        .trim()
        .to_owned();
    Ok((private, public))
}

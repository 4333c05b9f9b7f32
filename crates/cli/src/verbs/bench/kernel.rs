//! A temporary interface of the kernel's WireGuard at each end, for comparison.
//!
//! Each is alone in a network namespace without a name, which the kernel removes with the interface
//! when this process ends, also by SIGKILL. So neither its addresses nor its routes exist on the
//! host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Context;
use ipnet::{IpNet, Ipv4Net};
use nix::unistd::geteuid;
use seikan_proto::keys::PrivateKey;
use seikan_sys::netlink::Netlink;
use seikan_sys::netlink::wireguard::{WireguardSettings, configure_wireguard};
use seikan_sys::netns::NetNs;

use super::control::KernelRequest;
use crate::verbs::genkey::random_bytes;

/// Name of the interface in its namespace.
const NAME: &str = "wg-bench";
/// Addresses here and at the far end, of the network for benchmarks (RFC 2544, appendix C.2.2).
const HERE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// MTU of wg-quick, bytes.
const MTU: u32 = 1420;

/// The interface at one end; removed when dropped.
#[derive(Debug)]
pub struct Kernel {
    namespace: NetNs,
}

/// Address of the far end inside.
pub const fn far_address() -> IpAddr {
    IpAddr::V4(FAR)
}

/// Returns why the kernel's WireGuard cannot be used on this host; `None` if it can.
pub fn missing() -> Option<String> {
    // A loaded module, or one that is part of the kernel. Loading it would change the host.
    if !Path::new("/sys/module/wireguard").exists() {
        return Some("not loaded (`modprobe wireguard` loads it)".to_owned());
    }
    (!geteuid().is_root()).then(|| "needs root".to_owned())
}

/// Returns a new key.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_key() -> anyhow::Result<PrivateKey> {
    Ok(PrivateKey::from_bytes(*random_bytes()?))
}

impl Kernel {
    /// Creates the interface of the far end; returns its public key as well.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn far(request: &KernelRequest) -> anyhow::Result<(Kernel, [u8; 32])> {
        let key = new_key()?;
        let kernel = Kernel::create(
            FAR,
            &WireguardSettings {
                private_key: key.as_bytes(),
                listen_port: request.port,
                peer: request.public_key,
                endpoint: None,
                allowed: Ipv4Net::from(HERE).into(),
            },
        )?;
        Ok((kernel, *key.public().as_bytes()))
    }

    /// Creates the interface of this end. `peer` is the far end's public key, `endpoint` its
    /// address.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn near(key: &PrivateKey, peer: [u8; 32], endpoint: SocketAddr) -> anyhow::Result<Kernel> {
        Kernel::create(
            HERE,
            &WireguardSettings {
                private_key: key.as_bytes(),
                listen_port: 0,
                peer,
                endpoint: Some(endpoint),
                allowed: Ipv4Net::from(FAR).into(),
            },
        )
    }

    /// The namespace of the interface.
    pub fn namespace(&self) -> &NetNs {
        &self.namespace
    }

    fn create(address: Ipv4Addr, settings: &WireguardSettings<'_>) -> anyhow::Result<Kernel> {
        use std::os::fd::AsFd;
        const FAILED: &str = "cannot create an interface of the kernel's WireGuard";
        let namespace = NetNs::create().context(FAILED)?;
        let host = Netlink::open().context(FAILED)?;
        host.create_wireguard(NAME, namespace.as_fd())?;
        namespace.run(|| -> anyhow::Result<()> {
            configure_wireguard(NAME, settings)?;
            let netlink = Netlink::open()?;
            let index = netlink.link(NAME)?.index;
            netlink.set_mtu(index, MTU)?;
            netlink.add_address(index, IpNet::V4(Ipv4Net::new(address, 30)?))?;
            Ok(netlink.set_up(index)?)
        })??;
        Ok(Kernel { namespace })
    }
}

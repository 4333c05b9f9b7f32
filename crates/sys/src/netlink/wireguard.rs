//! Settings of the kernel's WireGuard: generic netlink, family `wireguard` (include/uapi/linux/wireguard.h).

use std::fmt::Debug;
use std::net::SocketAddr;

use ipnet::IpNet;
use netlink_packet_core::{Emitable, NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NlasIterator};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlMessage};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute,
    WireguardCmd, WireguardMessage, WireguardPeer, WireguardPeerAttribute,
};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::error::{Fault, NetlinkError};
use super::link::check_name;
use super::{BUFFER_SIZE, connected, converse};

/// Bytes of a generic netlink header (`struct genlmsghdr`).
const HEADER: usize = 4;
/// Attribute with the number of a family (`CTRL_ATTR_FAMILY_ID`, include/uapi/linux/genetlink.h).
const FAMILY_ID: u16 = 1;
/// Name of the family.
const FAMILY: &str = "wireguard";

/// Settings of an interface with one peer.
#[derive(Clone, Copy)]
pub struct WireguardSettings<'a> {
    /// Private key of the interface.
    pub private_key: &'a [u8; 32],
    /// UDP port; 0: the kernel chooses one.
    pub listen_port: u16,
    /// Public key of the peer.
    pub peer: [u8; 32],
    /// Address and port of the peer, if this end begins.
    pub endpoint: Option<SocketAddr>,
    /// Addresses of the peer inside the tunnel.
    pub allowed: IpNet,
}

/// Configures a WireGuard interface of the calling thread's network namespace.
///
/// # Errors
/// The kernel has no WireGuard or no such interface, or the caller lacks CAP_NET_ADMIN.
pub fn configure_wireguard(
    name: &str,
    settings: &WireguardSettings<'_>,
) -> Result<(), NetlinkError> {
    check_name(name)?;
    let action = || format!("configure the WireGuard interface {name}");
    let family = request(
        GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![GenlCtrlAttrs::FamilyName(FAMILY.into())],
        }),
        family_id,
    );
    let family = family.map_err(|fault| fault.into_error(action()))?;
    let family = family.ok_or_else(|| NetlinkError::Malformed {
        action: action(),
        reason: "no number of the family in it".into(),
    })?;
    let mut message = GenlMessage::from_payload(WireguardMessage {
        cmd: WireguardCmd::SetDevice,
        attributes: attributes(name, settings),
    });
    message.set_resolved_family_id(family);
    let set = request(message, |_| None::<()>);
    set.map(drop).map_err(|fault| fault.into_error(action()))
}

fn attributes(name: &str, settings: &WireguardSettings<'_>) -> Vec<WireguardAttribute> {
    let allowed = vec![
        WireguardAllowedIpAttr::Family(match settings.allowed {
            IpNet::V4(_) => WireguardAddressFamily::Ipv4,
            IpNet::V6(_) => WireguardAddressFamily::Ipv6,
        }),
        WireguardAllowedIpAttr::IpAddr(settings.allowed.network()),
        WireguardAllowedIpAttr::Cidr(settings.allowed.prefix_len()),
    ];
    let mut peer = vec![WireguardPeerAttribute::PublicKey(settings.peer)];
    peer.extend(settings.endpoint.map(WireguardPeerAttribute::Endpoint));
    peer.push(WireguardPeerAttribute::AllowedIps(vec![
        WireguardAllowedIp(allowed),
    ]));
    vec![
        WireguardAttribute::IfName(name.into()),
        WireguardAttribute::PrivateKey(*settings.private_key),
        WireguardAttribute::ListenPort(settings.listen_port),
        WireguardAttribute::Peers(vec![WireguardPeer(peer)]),
    ]
}

/// Sends a request on a socket of its own; returns what `parse` finds in the replies.
fn request<F: GenlFamily + Emitable + Debug, T>(
    message: GenlMessage<F>,
    mut parse: impl FnMut(&[u8]) -> Option<T>,
) -> Result<Option<T>, Fault> {
    let socket = connected(NETLINK_GENERIC).map_err(Fault::Io)?;
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK;
    request.header.sequence_number = 1;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    let mut found = None;
    let mut buffer = vec![0; BUFFER_SIZE];
    converse(&socket, &bytes, 1, &mut buffer, &mut |_, payload| {
        found = found.take().or_else(|| parse(payload));
    })?;
    Ok(found)
}

/// Returns the number in an answer of the controller.
fn family_id(payload: &[u8]) -> Option<u16> {
    let attributes = NlasIterator::new(payload.get(HEADER..)?);
    let id = attributes
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == FAMILY_ID)?;
    Some(u16::from_ne_bytes(*id.value().first_chunk()?))
}

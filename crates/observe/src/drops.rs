//! The reasons for which Seikan drops packets.

use serde::ser::{Serialize, SerializeMap, Serializer};

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped. Each value indexes [`DropCounts`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $($(#[doc = $doc])+ $variant,)+ }

        impl DropReason {
            /// All reasons, in the order of the table.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$variant,)+];

            /// The stable name, used in JSON and as a Prometheus label.
            pub fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)+ }
            }

            /// A sentence for the user.
            pub fn describe(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc,)+).trim_ascii(),)+ }
            }
        }
    };
}

drop_reasons! {
    /// The bytes from the TUN device or in a record are not an IP packet.
    NotIp = "not_ip",
    /// The virtio-net header contradicts its packet.
    BadOffload = "bad_offload",
    /// No peer's allowed IPs cover the destination; in Ethernet mode, there is no peer.
    NoRoute = "no_route",
    /// The peer has no endpoint to send to yet.
    NoEndpoint = "no_endpoint",
    /// The queue of packets waiting for a handshake was full; the oldest was dropped.
    HandshakeQueueFull = "handshake_queue_full",
    /// The TUN device's queue was delayed for too long, and the packet is not ECN-capable (RFC
    /// 8289).
    QueueDelay = "queue_delay",
    /// No handshake succeeded within REKEY_ATTEMPT_TIME, so the waiting packets were dropped.
    HandshakeTimeout = "handshake_timeout",
    /// The packet exceeds the MTU of the interface that it would leave by; an ICMP
    /// "too big" was returned if it is an IP packet.
    TooBig = "too_big",
    /// The session's keys have reached REJECT_AFTER_TIME or REJECT_AFTER_MESSAGES.
    KeyExpired = "key_expired",
    /// The send batch was full.
    OutboxFull = "outbox_full",
    /// The kernel refused the datagram because it exceeds the MTU (EMSGSIZE).
    SendTooLarge = "send_too_large",
    /// The kernel refused the datagram: no route, unreachable, blocked by a filter.
    SendRefused = "send_refused",
    /// There was no space for the datagram: in the kernel's send buffer, in the connection to a relay
    /// or TURN server, or in the queue of a limited uplink.
    SendNoBuffers = "send_no_buffers",
    /// The datagram is too short for its type, or was truncated by the receive buffer.
    Truncated = "truncated",
    /// The message type is unknown in this protocol.
    UnknownType = "unknown_type",
    /// No session has this receiver index.
    UnknownIndex = "unknown_index",
    /// The sender of a handshake message does not know this host's public key (wrong mac1).
    BadMac1 = "bad_mac1",
    /// Under load: a handshake message without a valid cookie; a cookie reply was sent.
    CookieRequired = "cookie_required",
    /// Under load: this source sent more handshakes than its share.
    RateLimited = "rate_limited",
    /// A handshake message does not decrypt, or its answer is late.
    BadHandshake = "bad_handshake",
    /// The key of a handshake does not belong to a peer.
    UnknownPeer = "unknown_peer",
    /// The timestamp of a handshake initiation is not newer than the last one.
    ReplayedHandshake = "replayed_handshake",
    /// The peer requires a capability that this version does not have, or has another `mode`.
    UnsupportedCapability = "unsupported_capability",
    /// The record does not authenticate.
    BadTag = "bad_tag",
    /// The record's counter was seen before or is behind the replay window.
    Replayed = "replayed",
    /// The inner source address is not among the peer's allowed IPs.
    SourceNotAllowed = "source_not_allowed",
    /// The Ethernet frame is shorter than its header, or its source is not the MAC address of one
    /// interface.
    BadEthernet = "bad_ethernet",
    /// The source MAC address of a peer's frame belongs to this host's device or to another peer.
    MacConflict = "mac_conflict",
    /// The mesh's policy does not allow the member to open this flow, and it is not a reply to a
    /// flow of this host.
    PolicyDenied = "policy_denied",
    /// An authenticated record contains an invalid frame.
    BadFrame = "bad_frame",
    /// A packet in slices was not complete in time, so its slices were dropped.
    ReassemblyTimeout = "reassembly_timeout",
    /// The outer packet carries CE but the inner one cannot (RFC 6040 section 4.2).
    EcnNotCapable = "ecn_not_capable",
    /// The TUN device refused the packet.
    TunWriteRefused = "tun_write_refused",
    /// The TCP/IP stack in user space has not yet read the packets that wait for it.
    StackQueueFull = "stack_queue_full",
    /// The transport header is truncated or cannot be found, so its checksum cannot be updated for
    /// a translated address.
    TransportTruncated = "transport_truncated",
    /// An IPv4 source route or IPv6 routing header leads to another address than the translated
    /// destination.
    SourceRouted = "source_routed",
    /// An ICMP redirect, which names routers that are unknown behind translated addresses.
    IcmpRedirect = "icmp_redirect",
    /// The packet is neither from nor for a device of the gateway.
    UnlistedDevice = "unlisted_device",
    /// The packet's source address and MAC address are not of the same device, or a packet from the
    /// tunnel has a source address of the gateway's side.
    DeviceMismatch = "device_mismatch",
    /// The device's MAC address or its address on the local network is unknown.
    DeviceUnresolved = "device_unresolved",
    /// None of the device's `allow-to` rules allows this destination and service.
    DeniedTo = "denied_to",
    /// None of the device's `allow-from` rules allows this source and service.
    DeniedFrom = "denied_from",
    /// A device used the overlay address of a remote that is mapped to another address for devices.
    ShownOtherwise = "shown_otherwise",
    /// The IPv4 fragment ends beyond the longest possible packet, 65,535 bytes.
    FragmentTooLong = "fragment_too_long",
    /// A broadcast or multicast packet, which a gateway does not forward.
    NotUnicast = "not_unicast",
    /// A frame of the local network is neither IP nor ARP, or has more than one VLAN tag.
    BadFrameType = "bad_frame_type",
    /// The hop limit is used up.
    HopLimit = "hop_limit",
    /// The interface on the local network refused the frame, or is down.
    LanWriteRefused = "lan_write_refused",
    /// Another gateway of this local network is active.
    Standby = "standby",
    /// At a relay's port of a pair: the sender is neither of its members. At a tunnel's port: it has
    /// an address in 100::/64, which only peers behind a relay or a TURN server have here.
    UnknownSource = "unknown_source",
    /// At a relay's port of a pair: the other member is not bound.
    NotBound = "not_bound",
    /// A member exceeded its rate at a relay.
    OverRate = "over_rate",
    /// At a TURN server: there is no permission for the remote end yet, or no free channel.
    NoChannel = "no_channel",
    /// The kernel's receive buffer was full at a socket that forwards to or from a relay; merged
    /// datagrams count once.
    ReceiveQueueFull = "receive_queue_full",
    /// In user space: the packet is for none of this host's addresses in the tunnel.
    NotAddressed = "not_addressed",
    /// In user space: a fragment of a packet, which is not reassembled.
    Fragment = "fragment",
    /// In user space: the transport checksum is wrong.
    BadChecksum = "bad_checksum",
    /// In user space: no service accepts packets of this protocol and port; the sender was
    /// notified.
    NoService = "no_service",
    /// In user space: the limit of connections and UDP flows is reached.
    FlowLimit = "flow_limit",
    /// In user space: the socket of a program on this host refused the datagram.
    HostRefused = "host_refused",
    /// The peer was removed while the packet was waiting.
    PeerRemoved = "peer_removed",
}

/// Why a batch of datagrams or packets was not passed on as a whole: the rest of it was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Number of datagrams or packets that were passed on before.
    pub done: u64,
    /// Why the next one was not.
    pub reason: DropReason,
}

impl From<DropReason> for Stopped {
    /// Nothing was passed on.
    fn from(reason: DropReason) -> Stopped {
        Stopped { done: 0, reason }
    }
}

/// One counter for each [`DropReason`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DropCounts([u64; DropReason::ALL.len()]);

impl Default for DropCounts {
    fn default() -> Self {
        DropCounts([0; DropReason::ALL.len()])
    }
}

impl DropCounts {
    /// Counts `packets` more for `reason`.
    pub fn add(&mut self, reason: DropReason, packets: u64) {
        self.0[reason as usize] += packets;
    }

    /// The count for `reason`.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// All drops.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The reasons that have occurred, with their counts.
    pub fn nonzero(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL
            .iter()
            .map(|r| (*r, self.get(*r)))
            .filter(|(_, n)| *n > 0)
    }
}

impl Serialize for DropCounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (reason, count) in self.nonzero() {
            map.serialize_entry(reason.name(), &count)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_indexes_dense() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
        for (i, reason) in DropReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, i);
        }
    }
}

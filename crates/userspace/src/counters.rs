//! Counters of a stack.

use seikan_observe::DropCounts;

/// Counts since the start, and current numbers. "In" means from the tunnel, "out" means to the
/// tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The SOCKS5 proxy.
    pub socks: ServiceCounters,
    /// The HTTP CONNECT proxy.
    pub http: ServiceCounters,
    /// Forwarded ports of the host.
    pub forwards: ServiceCounters,
    /// Exposed ports, and listening sockets of this process.
    pub exposed: ServiceCounters,
    /// Other sockets of this process.
    pub own: ServiceCounters,
    /// Packets from the tunnel.
    pub packets_in: u64,
    /// Packets to the tunnel; a super-packet counts as one.
    pub packets_out: u64,
    /// Packets that were dropped, by reason.
    pub drops: DropCounts,
}

/// Counters of one service. A flow of UDP counts as a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounters {
    /// Current number of connections, including those that are being opened.
    pub open: u64,
    /// Connections whose far end answered.
    pub accepted: u64,
    /// Connections that were refused: bad request, unknown name, no answer, refused by the far end,
    /// or over a limit.
    pub refused: u64,
    /// Payload bytes from the tunnel.
    pub bytes_in: u64,
    /// Payload bytes to the tunnel.
    pub bytes_out: u64,
}

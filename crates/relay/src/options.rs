//! The options of a relay.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use rustls::ServerConfig;
use seikan_proto::mesh::RelaySecret;

/// Options of a relay.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the main port. Port 0 takes any free port; `[::]` includes IPv4. The ports of pairs use the same IP address.
    pub listen: SocketAddr,
    /// Whether and where to listen for TLS.
    pub tls: Option<TlsOptions>,
    /// The secret that tickets are checked with.
    pub secret: RelaySecret,
    /// Limits on pairs, rates and connections.
    pub limits: Limits,
}

/// Options for members that use TLS over TCP because UDP is blocked.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// Address to listen on. Port 0 takes any free port; `[::]` includes IPv4.
    pub listen: SocketAddr,
    /// The TLS configuration.
    pub config: ServerConfig,
}

/// Limits of a relay.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of pairs.
    pub pairs: usize,
    /// Maximum number of pairs that one member has requested.
    pub pairs_per_member: usize,
    /// Ports for pairs.
    pub ports: RangeInclusive<u16>,
    /// Maximum rate of one member, in bytes per second.
    pub rate: u64,
    /// Maximum number of TLS connections, at least 1. At most a quarter may be unauthenticated.
    pub streams: usize,
}

impl Default for Limits {
    /// 10,000 pairs, 256 of one member, the dynamic ports (RFC 6335), 1 Gbit/s, 1,000 TLS connections.
    fn default() -> Limits {
        Limits {
            pairs: 10_000,
            pairs_per_member: 256,
            ports: 49_152..=65_535,
            rate: 1_000_000_000 / 8,
            streams: 1_000,
        }
    }
}

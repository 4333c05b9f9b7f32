//! Services of the stack, and names inside the tunnel.

use std::net::IpAddr;

/// Looks up a name inside the tunnel, such as that of a member of the mesh. The name is in lower
/// case, without a dot at its end, and never an IP address. An empty result means that the name is
/// unknown. The function runs in the thread of the stack and must not block.
pub type Names = Box<dyn Fn(&str) -> Vec<IpAddr> + Send>;

/// A service of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Service {
    /// The SOCKS5 proxy.
    Socks,
    /// The HTTP CONNECT proxy.
    Http,
    /// A forwarded port.
    Forward,
    /// An exposed port, or a port inside the tunnel on which a socket of this process listens.
    Exposed,
    /// Sockets of this process that connect or that send and receive datagrams
    /// ([`crate::Sockets`]).
    Own,
}

//! Services of the stack, and names inside the tunnel.

use std::net::IpAddr;

/// Looks a name up inside the tunnel, such as that of a member of the mesh, in lower case and without a dot at its end. No
/// address: the name is unknown. It runs in the thread of the stack and must not block. IP addresses are not looked up.
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
    /// A port inside the tunnel that is exposed, or that a socket of this process listens on.
    Exposed,
    /// Sockets of this process that connect, or have a port for datagrams ([`crate::Sockets`]).
    Own,
}

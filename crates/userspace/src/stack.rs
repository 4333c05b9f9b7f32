//! The thread of the stack and its handle.

use crate::counters::Counters;
use crate::options::{Options, Transport};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Looks a name up inside the tunnel, such as that of a member of the mesh. No address: the name is unknown. Runs in the
/// thread of the stack and must not block. IP addresses are not looked up.
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
    /// An exposed port.
    Exposed,
}

/// An address of the host on which the stack listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The service, never [`Service::Exposed`].
    pub service: Service,
    /// The transport protocol.
    pub transport: Transport,
    /// The address, with the port that a request for port 0 has got.
    pub address: SocketAddr,
}

/// Why a stack cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// A listening address is not available.
    #[error("cannot listen on {address}/{transport}: {source}; choose another address or port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The transport protocol.
        transport: Transport,
        /// The cause.
        source: io::Error,
    },
    /// The addresses inside the tunnel do not fit the stack.
    #[error("cannot use {count} addresses inside the tunnel; use 1 to {max}")]
    Addresses {
        /// Their number.
        count: usize,
        /// The maximum.
        max: usize,
    },
    /// The MTU is out of range.
    #[error("cannot use an MTU of {mtu} bytes; use {min} to 65535")]
    Mtu {
        /// The MTU.
        mtu: u32,
        /// The least that these addresses permit.
        min: u32,
    },
    /// A system call failed.
    #[error("cannot start the stack: {operation}: {source}")]
    System {
        /// The failed operation.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// A TCP/IP stack in user space.
pub struct Stack;

impl Stack {
    /// Starts the stack on its end of a SOCK_SEQPACKET socket pair, in a thread named `stack`. All addresses of the host are
    /// bound when it returns. The thread ends when the handle is dropped or the other end of the pair is closed.
    ///
    /// # Errors
    /// See [`StackError`].
    pub fn start(device: OwnedFd, options: Options, names: Names) -> Result<Handle, StackError> {
        let _ = (device, options, names);
        Ok(Handle {
            listeners: Vec::new(),
            counters: Arc::default(),
        })
    }
}

/// A running stack. Dropping it ends the thread and all connections.
#[derive(Debug)]
pub struct Handle {
    listeners: Vec<Listener>,
    counters: Arc<Mutex<Counters>>,
}

impl Handle {
    /// Returns the addresses of the host on which the stack listens.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Returns the counters, at most a second old.
    pub fn counters(&self) -> Counters {
        self.counters
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }
}

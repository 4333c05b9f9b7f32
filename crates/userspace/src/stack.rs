//! The thread of the stack and its handle.

use crate::counters::Counters;
use crate::device::Device;
use crate::engine::{Engine, Entrance, Parts, Shared, UdpEntrance};
use crate::options::{Limits, Options, Transport};
use crate::service::{Names, Service};
use crate::sockets::Sockets;
use crate::target::Target;
use crate::waker::Waker;
use ipnet::IpNet;
use nix::sys::resource::{Resource, getrlimit};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Maximum number of addresses inside the tunnel, set by smoltcp's feature
/// `iface-max-addr-count-8`.
const MAX_ADDRESSES: usize = 8;
/// Number of descriptors that are left to the rest of the process.
const OTHER_DESCRIPTORS: usize = 256;

/// An address of the host on which the stack listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The service, never [`Service::Exposed`].
    pub service: Service,
    /// The transport protocol.
    pub transport: Transport,
    /// The address, with the port that was chosen for port 0.
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
    /// There are no addresses inside the tunnel, or too many.
    #[error("cannot use {count} addresses inside the tunnel; use 1 to {max}")]
    Addresses {
        /// Number of addresses.
        count: usize,
        /// The maximum.
        max: usize,
    },
    /// An address inside the tunnel is not a unicast address.
    #[error("cannot use {address} as an address inside the tunnel: it is not a unicast address")]
    NotUnicast {
        /// The address.
        address: IpAddr,
    },
    /// The MTU is out of range.
    #[error("cannot use an MTU of {mtu} bytes; use {min} to 65535")]
    Mtu {
        /// The MTU.
        mtu: u32,
        /// The minimum for these addresses.
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
#[derive(Debug)]
pub struct Stack;

impl Stack {
    /// Starts the stack on its end of a pair of sockets ([`packet_pair`](crate::packet_pair)), in a thread named `stack`.
    /// All addresses of the host are bound when it returns. The thread ends when the handle is dropped or the other end of
    /// the pair is closed.
    ///
    /// # Errors
    /// See [`StackError`].
    pub fn start(device: OwnedFd, options: Options, names: Names) -> Result<Handle, StackError> {
        check(&options)?;
        let system = |operation| move |source| StackError::System { operation, source };
        let mut seed = [0; 8];
        seikan_sys::random::fill(&mut seed).map_err(system("random bytes"))?;
        let (entrances, udp_entrances) = listen(&options)?;
        let mut listeners = Vec::new();
        for entrance in &entrances {
            listeners.push(Listener {
                service: entrance.service,
                transport: Transport::Tcp,
                address: entrance
                    .socket
                    .local_addr()
                    .map_err(system("the address of a socket"))?,
            });
        }
        for entrance in &udp_entrances {
            listeners.push(Listener {
                service: Service::Forward,
                transport: Transport::Udp,
                address: entrance
                    .socket
                    .local_addr()
                    .map_err(system("the address of a socket"))?,
            });
        }
        let waker = Arc::new(Waker::new().map_err(system("an event descriptor"))?);
        let (sockets, commands) = Sockets::new(Arc::clone(&waker));
        let shared = Arc::new(Shared {
            counters: Mutex::default(),
            waker,
        });
        let mtu = options.mtu as usize;
        // Without ports of the host, all connections are streams of this process. Each takes two
        // descriptors, both ends of a pair of sockets.
        let is_own = entrances.is_empty() && udp_entrances.is_empty() && options.exposed.is_empty();
        let each = if is_own { 2 } else { 1 };
        let parts = Parts {
            device: Device::new(device, mtu),
            addresses: options.addresses,
            mtu,
            entrances,
            udp_entrances,
            exposed: options.exposed,
            limits: Limits {
                connections: options
                    .limits
                    .connections
                    .min((descriptors() / each).max(1)),
                ..options.limits
            },
            names,
            commands,
            seed: u64::from_ne_bytes(seed),
        };
        let mut engine = Engine::new(parts, Arc::clone(&shared)).map_err(system("epoll"))?;
        let thread = thread::Builder::new()
            .name("stack".to_owned())
            .spawn(move || {
                if let Err(error) = engine.run() {
                    tracing::error!(%error, "the stack in user space has ended");
                }
            })
            .map_err(system("its thread"))?;
        Ok(Handle {
            listeners,
            sockets,
            shared,
            thread: Some(thread),
        })
    }
}

/// A running stack. Dropping it ends the thread and all connections.
#[derive(Debug)]
pub struct Handle {
    listeners: Vec<Listener>,
    sockets: Sockets,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Returns the addresses of the host on which the stack listens.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Returns the handle that opens sockets inside the tunnel for this process.
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// Returns the counters as of the stack's last activity.
    pub fn counters(&self) -> Counters {
        self.shared
            .counters
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.waker.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the number of descriptors that connections may take. If none were left, a listening
/// socket would be reported as readable again and again.
fn descriptors() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(limit)
        .unwrap_or(usize::MAX)
        .saturating_sub(OTHER_DESCRIPTORS)
        .max(1)
}

fn check(options: &Options) -> Result<(), StackError> {
    let count = options.addresses.len();
    if !(1..=MAX_ADDRESSES).contains(&count) {
        return Err(StackError::Addresses {
            count,
            max: MAX_ADDRESSES,
        });
    }
    let unicast = |net: &&IpNet| {
        let address = net.addr();
        let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
        address.is_unspecified() || address.is_multicast() || broadcast
    };
    if let Some(net) = options.addresses.iter().find(unicast) {
        return Err(StackError::NotUnicast {
            address: net.addr(),
        });
    }
    // The minimum MTUs of RFC 791 and RFC 8200 section 5.
    let is_v6 = options.addresses.iter().any(|net| net.addr().is_ipv6());
    let min = if is_v6 { 1280 } else { 576 };
    if !(min..=65_535).contains(&options.mtu) {
        return Err(StackError::Mtu {
            mtu: options.mtu,
            min,
        });
    }
    Ok(())
}

/// Binds all addresses of the host.
fn listen(options: &Options) -> Result<(Vec<Entrance>, Vec<UdpEntrance>), StackError> {
    let mut wanted = Vec::new();
    wanted.extend(options.socks.iter().map(|a| (Service::Socks, *a, None)));
    wanted.extend(options.http.iter().map(|a| (Service::Http, *a, None)));
    let forwards = |transport| {
        let forwards = options.forwards.iter();
        forwards.filter(move |forward| forward.transport == transport)
    };
    wanted.extend(forwards(Transport::Tcp).map(|forward| {
        let target = Some(Target::from(forward));
        (Service::Forward, forward.listen, target)
    }));
    let mut entrances = Vec::new();
    for (service, address, target) in wanted {
        let socket = TcpListener::bind(address).and_then(|socket| {
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        entrances.push(Entrance {
            service,
            socket: socket.map_err(refused(address, Transport::Tcp))?,
            target,
        });
    }
    let mut udp_entrances = Vec::new();
    for forward in forwards(Transport::Udp) {
        let socket = UdpSocket::bind(forward.listen).and_then(|socket| {
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        udp_entrances.push(UdpEntrance {
            socket: socket.map_err(refused(forward.listen, Transport::Udp))?,
            target: Target::from(forward),
        });
    }
    Ok((entrances, udp_entrances))
}

fn refused(address: SocketAddr, transport: Transport) -> impl Fn(io::Error) -> StackError {
    move |source| StackError::Listen {
        address,
        transport,
        source,
    }
}

//! A tunnel without root inside of another program: [`run`] is the worker in a thread of that program.
//!
//! It installs no signal handlers, has no control sockets, starts no process, and leaves the privileges and the confinement of
//! the program as they are. The tunnel ends with its stack: see [`Sockets::end`] and [`Sockets::finish`].

use crate::endpoints;
use crate::mesh::Mesh;
use crate::network::{NetworkMonitor, NetworkMonitorError, Settings};
use crate::node::{Node, NodeError};
use crate::setup::mtu;
use crate::setup::names::Names;
use crate::status::{self, Status};
use crate::subject::Record;
use crate::system::now;
use crate::userspace::{Services, Stack, StackError, UserspaceError, adapt};
use crate::worker::{self, ControlFlow, FIRST_SERVICE_TOKEN, Service};
use seikan_config::{Config, Diagnostic, Severity};
use seikan_mesh::agent::AgentError;
use seikan_mesh::web_proxy::WebProxies;
use seikan_sys::netlink::{Netlink, NetlinkError};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::tun::Tun;
use seikan_userspace::Sockets;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

/// Maximum number of requests that wait for the worker.
const MAX_REQUESTS: usize = 16;

/// Why a tunnel cannot start or continue in a program.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// The configuration does not fit.
    #[error(transparent)]
    Userspace(#[from] UserspaceError),
    /// The host's network cannot be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The host's network cannot be monitored.
    #[error(transparent)]
    NetworkMonitor(#[from] NetworkMonitorError),
    /// The node.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// This host cannot take part in its mesh.
    #[error(transparent)]
    Mesh(#[from] AgentError),
    /// The stack.
    #[error(transparent)]
    Stack(#[from] StackError),
}

/// Parameters of a tunnel.
#[derive(Debug)]
pub struct Options<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// An existing directory for the state of a member of a mesh, for this tunnel alone.
    pub state: &'a Path,
    /// The web proxy of a member of a mesh.
    pub web_proxies: WebProxies,
}

/// A tunnel that has started.
#[derive(Debug)]
pub struct Started {
    /// Opens sockets inside the tunnel.
    pub sockets: Sockets,
    /// MTU inside the tunnel in bytes.
    pub mtu: u32,
}

/// Sends requests to the worker.
#[derive(Debug)]
pub struct Requester {
    queue: mpsc::Sender<oneshot::Sender<Status>>,
    wake: UnixStream,
}

/// Requests for the worker.
#[derive(Debug)]
pub struct Requests {
    queue: mpsc::Receiver<oneshot::Sender<Status>>,
    wake: UnixStream,
}

/// Makes the two ends of a channel to the worker.
///
/// # Errors
/// Those of socketpair(2): out of descriptors or memory.
pub fn requests() -> io::Result<(Requester, Requests)> {
    let (queue, received) = mpsc::channel(MAX_REQUESTS);
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let requester = Requester { queue, wake: ours };
    let requests = Requests {
        queue: received,
        wake: theirs,
    };
    Ok((requester, requests))
}

impl Requester {
    /// Returns the status of the tunnel; `None` if it has ended.
    pub async fn status(&self) -> Option<Status> {
        let (answer, answered) = oneshot::channel();
        self.queue.send(answer).await.ok()?;
        // If the socket pair is full, the loop wakes anyway.
        let _ = (&self.wake).write(&[0]);
        answered.await.ok()
    }
}

/// Starts a tunnel and runs it until its stack ends. `started` is called once, when the tunnel is
/// usable. The tunnel uses the network namespace of the calling thread.
///
/// # Errors
/// See [`EmbeddedError`].
pub fn run(
    options: Options<'_>,
    requests: Requests,
    started: impl FnOnce(Started),
) -> Result<(), EmbeddedError> {
    let config = adapt(options.config, &mut log)?;
    if config.metrics.is_some() {
        let message = "`Metrics` is ignored: the program has the tunnel's status";
        log(Diagnostic::new(
            Severity::Warning,
            config.name.as_str(),
            message,
        ));
    }
    let netlink = Netlink::open()?;
    let resolved = endpoints::resolve_all(&config);
    resolved.warn(&mut log);
    let (mut resolved, addresses) = (resolved.config, resolved.addresses);
    resolved.mtu = Some(mtu::inner_mtu(&resolved, &addresses, None, &netlink));
    let (device, end) = Tun::pair(config.name.as_str()).map_err(NodeError::Tun)?;
    let mut node = Node::with_device(&resolved, device)?;
    let network = NetworkMonitor::new(&config, Settings::default(), &mut node)?;
    let mesh = match &config.mesh {
        Some(settings) => Some(Mesh::start(
            &config,
            settings,
            options.state,
            &mut node,
            Some(&mut Names::of_proxies()),
            options.web_proxies,
            Box::new(log),
        )?),
        None => None,
    };
    let members = mesh.as_ref().map(Mesh::names);
    let mtu = node.tunnel.inner_mtu();
    let stack = Stack::start(&config, &Services::default(), end, mtu, members)?;
    let sockets = stack.sockets().clone();
    node.stack = Some(stack);
    let mut parts = Parts {
        network,
        mesh,
        requests,
        record: record(&config, netlink),
    };
    started(Started { sockets, mtu });
    let ended = worker::run(&mut node, None, &mut parts);
    if let Some(mesh) = parts.mesh.take() {
        mesh.end(&mut node);
    }
    ended?;
    Ok(())
}

fn log(warning: Diagnostic) {
    match warning.help {
        Some(help) => warn!(target: "tunnel", "{}; {help}", warning.message),
        None => warn!(target: "tunnel", "{}", warning.message),
    }
}

fn record(config: &Config, netlink: Netlink) -> Record {
    let peers = config.peers.iter();
    let names = peers.filter_map(|peer| Some((peer.public_key, peer.name.clone()?)));
    Record {
        name: config.name.to_string(),
        names: names.collect(),
        keyless: false,
        netlink: Some(netlink),
        without_uapi: None,
        config: None,
        log: None,
    }
}

/// The services of the worker's loop.
struct Parts<'a> {
    network: NetworkMonitor,
    mesh: Option<Mesh<'a>>,
    requests: Requests,
    record: Record,
}

impl Parts<'_> {
    fn answer(&mut self, node: &Node, epoll: &Epoll) {
        let mut drain = [0; 64];
        loop {
            match self.requests.wake.read(&mut drain) {
                // Nobody owns the tunnel any more. The loop ends after the stack, whose resets it still sends.
                Ok(0) => {
                    let _ = epoll.delete(&self.requests.wake);
                    if let Some(stack) = &node.stack {
                        stack.sockets().end();
                    }
                    break;
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        while let Ok(answer) = self.requests.queue.try_recv() {
            let now = now();
            let mut status = status::without_peers(node, &self.record);
            let peers = node.tunnel.peers();
            status.peers = peers
                .map(|peer| status::peer(node, &self.record, peer, now))
                .collect();
            // Nobody waits any more.
            let _ = answer.send(status);
        }
    }
}

impl Service for Parts<'_> {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        epoll.add(&self.requests.wake, FIRST_SERVICE_TOKEN, Interest::Read)?;
        self.network.start(epoll)?;
        match &mut self.mesh {
            Some(mesh) => mesh.start(epoll),
            None => Ok(()),
        }
    }

    fn ready(&mut self, token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        match &mut self.mesh {
            _ if NetworkMonitor::owns(token) => self.network.ready(token, epoll, node),
            Some(mesh) if Mesh::owns(token) => mesh.ready(token, epoll, node),
            _ => {
                self.answer(node, epoll);
                ControlFlow::Continue
            }
        }
    }
}

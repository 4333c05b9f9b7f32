//! The coordinator's server: JSON over HTTPS on the paths of `seikan_proto::mesh`.
//!
//! [`Sockets::bind`] binds the address, [`Server::new`] takes the certificate, and
//! [`Server::serve`] answers requests. A connection first takes one of a bounded number of slots
//! ([`admit`]), then performs a TLS handshake. Each request must arrive in time. [`routes`]
//! validates requests. Work on the store runs on blocking threads, a bounded number at a time
//! ([`app`], which also wakes members that wait for changes). [`stun`] answers STUN binding
//! requests on the same port over UDP.
//!
//! - [`refused`]: the one form of error responses
//! - [`limit`]: rate limits of failed authentication and of members' requests
//! - [`answers`]: limits of memory for answers that are not read yet

mod admit;
mod answers;
mod app;
mod limit;
mod refused;
mod routes;
mod stun;

#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use axum_server::Handle;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use rustls::ServerConfig;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::store::{Store, StoreError};
use admit::{Admit, Pace};
use app::App;
use seikan_tls::{Certificate, TlsError};

/// Maximum number of simultaneous connections.
const MAX_CONNECTIONS: usize = 10_000;
/// Maximum number of simultaneous connections of one source: an IPv4 address or the /64 of an IPv6
/// address.
const MAX_CONNECTIONS_PER_SOURCE: usize = 4096;
/// Backlog of the listening socket, in connections.
const BACKLOG: i32 = 4096;
/// Timeout of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a request's head, the first and every later one. It exceeds the time for which a
/// client keeps an idle connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(40);
/// Timeout of the first head of a connection.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Time for open requests to end after the shutdown signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum rate at which a client must read an answer. A link of 128 kbit/s is fast enough.
const PACE: Pace = Pace {
    grace: Duration::from_secs(30),
    rate: 16.0 * 1024.0,
};

/// Bound sockets. The TCP socket does not listen yet.
#[derive(Debug)]
pub struct Sockets {
    tcp: Socket,
    /// Answers STUN binding requests.
    stun: UdpSocket,
    address: SocketAddr,
}

impl Sockets {
    /// Binds TCP and UDP sockets to an address. Port 0 selects a free port; `[::]` accepts IPv4,
    /// too. A port below 1024 needs `CAP_NET_BIND_SERVICE`. The server needs no capability
    /// afterwards.
    ///
    /// # Errors
    /// [`ServerError::Listen`] if the address cannot be bound.
    pub fn bind(at: SocketAddr) -> Result<Sockets, ServerError> {
        let failed = |source| ServerError::Listen {
            address: at,
            source,
        };
        let bound = || {
            let tcp = bind(at, Type::STREAM, Protocol::TCP)?;
            let address = tcp.local_addr()?.as_socket();
            let address = address.ok_or(io::ErrorKind::AddrNotAvailable)?;
            let stun = bind(address, Type::DGRAM, Protocol::UDP)?;
            stun.set_nonblocking(true)?;
            Ok(Sockets {
                tcp,
                stun: stun.into(),
                address,
            })
        };
        bound().map_err(failed)
    }
}

/// Parameters of a server.
#[derive(Debug)]
pub struct Options {
    /// Bound sockets.
    pub sockets: Sockets,
    /// State of the mesh; its networks must be set.
    pub store: Store,
    /// Certificate that hosts verify.
    pub certificate: Certificate,
}

/// Error of the server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A system call failed.
    #[error("cannot run the server: {0}")]
    System(#[from] io::Error),
}

/// A server with bound sockets.
pub struct Server {
    listener: TcpListener,
    /// Answers STUN binding requests.
    stun: UdpSocket,
    address: SocketAddr,
    tls: ServerConfig,
    pace: Pace,
    app: Arc<App>,
}

impl Server {
    /// Starts to listen. Connections wait in the backlog until [`Server::serve`] runs.
    ///
    /// # Errors
    /// [`ServerError::Listen`], [`ServerError::Tls`]; [`ServerError::Store`], also if the mesh has
    /// no networks.
    pub fn new(options: Options) -> Result<Server, ServerError> {
        if options.store.networks()?.is_none() {
            return Err(StoreError::NoNetworks.into());
        }
        let Sockets { tcp, stun, address } = options.sockets;
        tcp.listen(BACKLOG)
            .map_err(|source| ServerError::Listen { address, source })?;
        let mut tls = options.certificate.renewing_server_config(report_renewal)?;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Server {
            listener: tcp.into(),
            stun,
            address,
            tls,
            pace: PACE,
            app: Arc::new(App::new(options.store)),
        })
    }

    /// Address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves. Requests that wait for changes are then answered at once;
    /// other requests get five seconds. Needs a tokio runtime with all drivers enabled.
    ///
    /// # Errors
    /// [`ServerError::System`].
    pub async fn serve<F>(self, shutdown: F) -> Result<(), ServerError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let handle: Handle<SocketAddr> = Handle::new();
        let acceptor = RustlsAcceptor::new(RustlsConfig::from_config(Arc::new(self.tls)))
            .handshake_timeout(HANDSHAKE_TIMEOUT)
            .acceptor(Admit::new(
                MAX_CONNECTIONS,
                MAX_CONNECTIONS_PER_SOURCE,
                self.pace,
                Arc::clone(&self.app.limits),
            ));
        let mut server = axum_server::from_tcp(self.listener)?
            .http1_only()
            .first_request_timeout(FIRST_HEAD_TIMEOUT)
            .acceptor(acceptor)
            .handle(handle.clone());
        server
            .http_builder()
            .http1()
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD);

        // The set aborts its tasks when it is dropped.
        let mut tasks = JoinSet::new();
        tasks.spawn(app::run_background(Arc::clone(&self.app)));
        let stun = tokio::net::UdpSocket::from_std(self.stun)?;
        tasks.spawn(async {
            let _ = stun::answer(stun).await;
        });
        let app = Arc::clone(&self.app);
        tasks.spawn(async move {
            shutdown.await;
            app.stop();
            handle.graceful_shutdown(Some(SHUTDOWN_TIMEOUT));
        });
        let routes = routes::router(self.app).into_make_service_with_connect_info::<SocketAddr>();
        Ok(server.serve(routes).await?)
    }

    /// Runs [`Server::serve`] on a new runtime until SIGINT or SIGTERM, and blocks until then.
    /// `ready` is called once both signals are handled.
    ///
    /// # Errors
    /// [`ServerError::System`].
    pub fn run(self, ready: impl FnOnce() -> io::Result<()>) -> Result<(), ServerError> {
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            ready()?;
            self.serve(async move {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            })
            .await
        })
    }
}

/// Logs that the files of the certificate have changed, or cannot be read again.
fn report_renewal(outcome: Result<(), TlsError>) {
    match outcome {
        Ok(()) => info!(target: "coordinator", "renewed certificate in use"),
        Err(error) => warn!(
            target: "coordinator",
            "cannot read the certificate again: {error}; the former one stays until the files can be used, or until a restart"
        ),
    }
}

/// Binds a socket as the standard library does, but does not listen: the backlog of `TcpListener`
/// is too short for a whole mesh that connects at once.
fn bind(address: SocketAddr, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    if kind == Type::STREAM {
        socket.set_reuse_address(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

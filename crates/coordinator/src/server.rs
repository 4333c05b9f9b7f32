//! The coordinator as hosts see it: JSON over HTTPS, the four paths of `seikan_proto::mesh`.
//!
//! [`Sockets::bind`] takes the address, [`Server::new`] the certificate, and [`Server::serve`] answers. A connection
//! first gets a place ([`admit`]), of which there is a bounded number, then a TLS handshake and
//! requests, each of which has to come in time. [`routes`] judges what was asked; what it asks of the
//! store waits for a turn and is done beside the event loop ([`app`]), which also tells those who wait
//! for changes. At the same port of UDP hosts are told what they look like from here ([`stun`]). What is refused has one form ([`refused`]). Who shows what is not good is let try again only so
//! often ([`limit`]), and what is not read takes only so much memory ([`answers`]).

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

use crate::store::{Store, StoreError};
use admit::{Admit, Pace};
use app::App;
use seikan_tls::{Certificate, TlsError};

/// Connections at a time.
const MAX_CONNECTIONS: usize = 10_000;
/// The same of one source: an IPv4 address or the /64 of an IPv6 address.
const MAX_OF_SOURCE: usize = 4096;
/// Connections that the kernel has accepted and that have not been looked at, at most.
const BACKLOG: i32 = 4096;
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long the head of a request may take, the first and every later one: longer than a client keeps
/// an idle connection.
const HEAD: Duration = Duration::from_secs(40);
/// How long the first head may take.
const FIRST_HEAD: Duration = Duration::from_secs(10);
/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// How long those who are being answered are waited for at the end.
const GRACE: Duration = Duration::from_secs(5);

/// The slowest that a client may take an answer. A link of 128 kbit/s does.
const PACE: Pace = Pace {
    grace: Duration::from_secs(30),
    rate: 16.0 * 1024.0,
};

/// An address that is taken, and where nobody can connect yet.
#[derive(Debug)]
pub struct Sockets {
    tcp: Socket,
    /// For those who want to know what they look like from here.
    stun: UdpSocket,
    address: SocketAddr,
}

impl Sockets {
    /// Takes an address; port 0 is any that is free, and `[::]` is IPv4, too. A port below 1024 takes `CAP_NET_BIND_SERVICE`, and nothing
    /// that a server does later takes any capability.
    ///
    /// # Errors
    /// [`ServerError::Listen`].
    pub fn bind(at: SocketAddr) -> Result<Sockets, ServerError> {
        let failed = |source| ServerError::Listen {
            address: at,
            source,
        };
        let (tcp, address) = tcp(at).map_err(failed)?;
        let stun = beside(address).map_err(failed)?;
        Ok(Sockets { tcp, stun, address })
    }
}

/// What a server needs.
#[derive(Debug)]
pub struct Options {
    /// Where it listens.
    pub sockets: Sockets,
    /// What it knows; its networks have to be set.
    pub store: Store,
    /// What hosts know it by.
    pub certificate: Certificate,
}

/// Why there is no server, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the system says.
    #[error("the server cannot run: {0}")]
    System(#[from] io::Error),
}

/// A server that has its address.
pub struct Server {
    listener: TcpListener,
    /// For those who want to know what they look like from here.
    stun: UdpSocket,
    address: SocketAddr,
    tls: ServerConfig,
    pace: Pace,
    app: Arc<App>,
}

impl Server {
    /// Listens. Connections made from then on wait until the server serves.
    ///
    /// # Errors
    /// [`ServerError::Listen`], [`ServerError::Tls`]; [`ServerError::Store`], also if the mesh has no
    /// networks.
    pub fn new(options: Options) -> Result<Server, ServerError> {
        if options.store.networks()?.is_none() {
            return Err(StoreError::NoNetworks.into());
        }
        let Sockets { tcp, stun, address } = options.sockets;
        tcp.listen(BACKLOG)
            .map_err(|source| ServerError::Listen { address, source })?;
        let mut tls = options.certificate.server_config()?;
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `shutdown` is there. Questions that wait for changes are answered then as they
    /// stand; after five seconds nobody is waited for. To be run by a tokio runtime with everything
    /// enabled.
    ///
    /// # Errors
    /// [`ServerError::System`].
    pub async fn serve<F>(self, shutdown: F) -> Result<(), ServerError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let handle: Handle<SocketAddr> = Handle::new();
        let acceptor = RustlsAcceptor::new(RustlsConfig::from_config(Arc::new(self.tls)))
            .handshake_timeout(HANDSHAKE)
            .acceptor(Admit::new(
                MAX_CONNECTIONS,
                MAX_OF_SOURCE,
                self.pace,
                Arc::clone(&self.app.limits),
            ));
        let mut server = axum_server::from_tcp(self.listener)?
            .http1_only()
            .first_request_timeout(FIRST_HEAD)
            .acceptor(acceptor)
            .handle(handle.clone());
        server
            .http_builder()
            .http1()
            .header_read_timeout(HEAD)
            .max_buf_size(MAX_HEAD);

        // They end with this, however this ends.
        let mut beside = JoinSet::new();
        beside.spawn(app::keep(Arc::clone(&self.app)));
        let stun = tokio::net::UdpSocket::from_std(self.stun)?;
        beside.spawn(async {
            let _ = stun::answer(stun).await;
        });
        let app = Arc::clone(&self.app);
        beside.spawn(async move {
            shutdown.await;
            app.stop();
            handle.graceful_shutdown(Some(GRACE));
        });
        let routes = routes::router(self.app).into_make_service_with_connect_info::<SocketAddr>();
        Ok(server.serve(routes).await?)
    }

    /// [`Server::serve`] on a runtime of its own, until SIGINT or SIGTERM; blocks that long. `ready` is called once these end it.
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

/// The same port for UDP.
fn beside(address: SocketAddr) -> io::Result<UdpSocket> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// As `TcpListener::bind` does it. It is not listened there yet, for which that has a backlog that a whole mesh that connects at once overruns.
fn tcp(address: SocketAddr) -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    let address = socket.local_addr()?.as_socket();
    let address = address.ok_or(io::ErrorKind::AddrNotAvailable)?;
    Ok((socket, address))
}

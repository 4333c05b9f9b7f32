//! A tunnel in this process.

use crate::config::{Builder, Config};
use crate::destination::{Destination, IntoDestination};
use crate::error::Error;
use crate::join::Join;
use crate::listener::TcpListener;
use crate::status::Status;
use crate::stream::TcpStream;
use crate::udp::UdpSocket;
use seikan_node::embedded::{self, Options, Requester, Requests, Started};
use seikan_userspace::Sockets;
use std::fs::DirBuilder;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::thread;
use std::time::Duration;
use tokio::sync::oneshot;
use tracing::error;

/// Time that [`Tunnel::close`] waits for bytes that are not delivered yet.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// A tunnel. Dropping it ends it at once. [`Tunnel::close`] first delivers what dropped streams
/// have written.
#[derive(Debug)]
pub struct Tunnel {
    sockets: Sockets,
    requester: Requester,
    addresses: Vec<IpAddr>,
    mtu: u32,
    /// Never receives a value: the sender is dropped when the thread has ended.
    ended: oneshot::Receiver<()>,
}

/// Reports whether the thread of the tunnel has started.
type Starting = oneshot::Sender<Result<Started, Error>>;

impl Tunnel {
    /// Starts a configuration in code, as [`Config::builder`] does.
    pub fn builder() -> Builder {
        Config::builder()
    }

    /// Starts a tunnel. It does not wait for peers: a session is established when there is
    /// something to send.
    ///
    /// # Errors
    /// [`Error::Start`], [`Error::NoStateDir`], [`Error::File`], [`Error::System`]; [`Error::Ended`] if
    /// the thread of the tunnel panicked.
    pub async fn connect(config: Config) -> Result<Tunnel, Error> {
        let (starting, started) = oneshot::channel();
        let (ending, ended) = oneshot::channel::<()>();
        let (requester, requests) = embedded::requests()?;
        let addresses = config.settings.addresses.iter();
        let addresses = addresses.map(|net| net.addr()).collect();
        spawn("tunnel", move || {
            run(&config, requests, starting);
            drop(ending);
        })?;
        // If there is no answer, the thread has panicked.
        let Started { sockets, mtu } = started.await.unwrap_or(Err(Error::Ended))?;
        Ok(Tunnel {
            sockets,
            requester,
            addresses,
            mtu,
            ended,
        })
    }

    /// Makes this program a member of a mesh, and starts its tunnel. If the file of the member
    /// already exists, only starts the tunnel.
    ///
    /// If the future is dropped, no tunnel starts, but the registration continues in a thread. The
    /// program may then become a member, and the next call with the same file starts its tunnel. If
    /// the program ends during the registration, the coordinator may list a member without a file;
    /// its name is free again after it has been revoked at the coordinator.
    ///
    /// # Errors
    /// [`Error::Join`], [`Error::Config`], and those of [`Tunnel::connect`].
    pub async fn join(join: Join) -> Result<Tunnel, Error> {
        let (answer, answered) = oneshot::channel();
        spawn("join", move || {
            let _ = answer.send(join.run());
        })?;
        let config = answered.await.unwrap_or(Err(Error::Ended))?;
        Tunnel::connect(config).await
    }

    /// Connects to a port inside the tunnel, such as `("db-1", 5432)` or `"10.9.0.1:80"`. The
    /// attempt times out after 30 seconds.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn tcp_connect(&self, to: impl IntoDestination) -> Result<TcpStream, Error> {
        let to = to.into_destination()?;
        let stream = self.sockets.connect(&to.host, to.port).await;
        TcpStream::new(stream.map_err(|error| Error::of_socket(error, &to))?)
    }

    /// Listens on a port of this host's addresses inside the tunnel; port 0 chooses a free port.
    /// Ports below 1024 need no privilege.
    ///
    /// # Errors
    /// [`Error::PortInUse`], [`Error::Ended`].
    pub async fn tcp_listen(&self, port: u16) -> Result<TcpListener, Error> {
        let incoming = self.sockets.listen(port).await;
        let incoming = incoming.map_err(|error| Error::of_socket(error, &own(port)))?;
        Ok(TcpListener::new(incoming))
    }

    /// Opens a port for datagrams on this host's addresses inside the tunnel; port 0 chooses a free
    /// port.
    ///
    /// # Errors
    /// [`Error::PortInUse`], [`Error::Limit`], [`Error::Ended`], [`Error::NoRuntime`], [`Error::System`].
    pub async fn udp_bind(&self, port: u16) -> Result<UdpSocket, Error> {
        let datagrams = self.sockets.bind(port).await;
        let datagrams = datagrams.map_err(|error| Error::of_socket(error, &own(port)))?;
        UdpSocket::new(datagrams, self.addresses.clone(), self.mtu)
    }

    /// Returns the addresses of a name inside the tunnel: at least one.
    ///
    /// # Errors
    /// [`Error::UnknownName`], [`Error::Destination`], [`Error::Ended`].
    pub async fn lookup(&self, name: &str) -> Result<Vec<IpAddr>, Error> {
        let found = self.sockets.find(name).await;
        let host = name.to_owned();
        found.map_err(|error| Error::of_socket(error, &Destination { host, port: 0 }))
    }

    /// Returns the addresses of this host inside the tunnel.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Returns the status of the tunnel.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn status(&self) -> Result<Status, Error> {
        let status = self.requester.status().await.ok_or(Error::Ended)?;
        Ok(Status::of(status, self.addresses.clone(), self.mtu))
    }

    /// Ends the tunnel, and waits until its threads have ended. Streams that were dropped or shut down before have up to 5
    /// seconds to deliver what was written; all others are reset.
    pub async fn close(mut self) {
        self.sockets.finish(CLOSE_WITHIN).await;
        let _ = (&mut self.ended).await;
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.sockets.end();
    }
}

fn own(port: u16) -> Destination {
    let host = String::new();
    Destination { host, port }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

/// The thread of a tunnel.
fn run(config: &Config, requests: Requests, starting: Starting) {
    let mut starting = Some(starting);
    let mut answer = |outcome: Result<Started, Error>| match starting.take() {
        Some(starting) => starting.send(outcome),
        None => Err(outcome),
    };
    let state = match &config.settings.mesh {
        Some(_) => create_state(config),
        None => Ok(Path::new("")),
    };
    let state = match state {
        Ok(state) => state,
        Err(error) => {
            let _ = answer(Err(error));
            return;
        }
    };
    let options = Options {
        config: &config.settings,
        state,
        web_proxies: config.web_proxies.clone(),
    };
    let ended = embedded::run(options, requests, |started| {
        // The caller no longer waits for the tunnel.
        if let Err(Ok(started)) = answer(Ok(started)) {
            started.sockets.end();
        }
    });
    if let Err(error) = ended
        && let Err(Err(error)) = answer(Err(Error::Start(Box::new(error))))
    {
        error!(target: "tunnel", %error, "the tunnel has ended");
    }
}

/// Creates the directory of a member's state, which only its owner can read.
fn create_state(config: &Config) -> Result<&Path, Error> {
    let path = config.state_dir.as_deref().ok_or(Error::NoStateDir)?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })?;
    Ok(path)
}

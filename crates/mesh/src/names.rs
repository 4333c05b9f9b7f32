//! Names of members: a DNS server on the interface's own addresses, for this host only.
//!
//! [`zone`] answers queries for names of the mesh; other queries are forwarded to the servers that were
//! configured before ([`forward`]).

mod forward;
pub mod zone;

pub use forward::Upstream;
pub use zone::DOMAIN;

use forward::{Forwarder, framed};
use ipnet::IpNet;
use seikan_sys::netlink::Netlink;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{self, IpAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use zone::{Reply, Transport, Zone};

/// UDP and TCP port of DNS (RFC 1035, section 4.2).
const PORT: u16 = 53;
/// Maximum size of a query in bytes: a name, and space for EDNS.
const MAX_QUERY: usize = 4096;
/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 64;
/// Timeout of an idle connection (RFC 7766, section 6.2.3: a few seconds), and of sending an answer.
const IDLE: Duration = Duration::from_secs(5);
/// Maximum wait for a new IPv6 address: the kernel accepts it a moment after its interface is up.
const SETTLE: Duration = Duration::from_secs(1);
/// Interval between two attempts to bind it.
const SETTLE_PAUSE: Duration = Duration::from_millis(10);
/// Pause after an error of a socket.
const PAUSE: Duration = Duration::from_millis(100);
/// Minimum interval between two reads of the host's addresses.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How names of members are found on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// Through this resolver: `systemd-resolved`, `resolv.conf` or `resolvconf`.
    By(String),
    /// Names are not found, for this reason.
    Off(String),
}

/// Why there is no name server.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The interface has no address.
    #[error("the interface has no address")]
    NoAddress,
    /// An address and port cannot be bound.
    #[error("cannot listen on {ip} port {PORT}: {source}{}", remedy(source))]
    Address {
        /// The address.
        ip: IpAddr,
        /// The system's error.
        source: io::Error,
    },
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::AddrInUse => {
            "; configure the name server there to listen on its own addresses only"
        }
        io::ErrorKind::PermissionDenied => "; that takes CAP_NET_BIND_SERVICE",
        _ => "",
    }
}

/// Names of the members, shared by the agent, the name server and the daemon.
#[derive(Clone, Debug)]
pub struct Names(Arc<Mutex<Zone>>);

impl Names {
    /// No members yet, in these networks.
    pub(super) fn new(networks: Vec<IpNet>) -> Names {
        Names(Arc::new(Mutex::new(Zone::new(networks))))
    }

    /// Returns the addresses of a member or of a device behind one, as [`Zone::find`].
    pub fn find(&self, name: &str) -> Vec<IpAddr> {
        self.with(|zone| zone.find(name))
    }

    /// Reads or changes the names.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Zone) -> T) -> T {
        // A panic leaves them consistent: each change is complete.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Bound sockets of the name server. Created while the process is privileged, for the port.
#[derive(Debug)]
pub struct Server {
    sockets: Vec<(net::UdpSocket, net::TcpListener)>,
    own: Vec<IpAddr>,
    /// Servers for other names.
    pub upstream: Upstream,
}

impl Server {
    /// Binds the port at these addresses, which are the interface's.
    ///
    /// # Errors
    /// One of them cannot be bound.
    pub fn bind(addresses: &[IpNet]) -> Result<Server, BindError> {
        let own: Vec<IpAddr> = addresses.iter().map(IpNet::addr).collect();
        let until = Instant::now() + SETTLE;
        let bind = |ip: &IpAddr| {
            loop {
                match sockets(*ip) {
                    Err(error)
                        if error.kind() == io::ErrorKind::AddrNotAvailable
                            && Instant::now() < until =>
                    {
                        std::thread::sleep(SETTLE_PAUSE);
                    }
                    other => break other.map_err(|source| BindError::Address { ip: *ip, source }),
                }
            }
        };
        let sockets = own.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        if sockets.is_empty() {
            Err(BindError::NoAddress)
        } else {
            Ok(Server {
                sockets,
                own,
                upstream: Upstream::Nobody,
            })
        }
    }
}

fn sockets(ip: IpAddr) -> io::Result<(net::UdpSocket, net::TcpListener)> {
    let udp = net::UdpSocket::bind((ip, PORT))?;
    let tcp = net::TcpListener::bind((ip, PORT))?;
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    Ok((udp, tcp))
}

/// Answers queries, forever; waits forever without a server.
pub(super) async fn serve(server: Option<Server>, names: Names) {
    let mut tasks = JoinSet::new();
    if let Some(server) = server {
        let responder = Arc::new(Responder {
            names,
            forwarder: Forwarder::new(server.upstream),
            own: server.own,
            others: Mutex::default(),
        });
        for (udp, tcp) in server.sockets {
            // If the runtime rejects a socket, that address is not served.
            if let (Ok(udp), Ok(tcp)) = (UdpSocket::from_std(udp), TcpListener::from_std(tcp)) {
                tasks.spawn(datagrams(Arc::new(udp), responder.clone()));
                tasks.spawn(connections(tcp, responder.clone()));
            }
        }
    }
    while tasks.join_next().await.is_some() {}
    std::future::pending().await
}

/// State to answer queries.
struct Responder {
    names: Names,
    forwarder: Forwarder,
    /// Addresses of the interface.
    own: Vec<IpAddr>,
    /// All addresses of the host, and when they were read.
    others: Mutex<Option<(Instant, Vec<IpAddr>)>>,
}

impl Responder {
    /// Whether a query is from this host; peers and neighbours can reach the addresses too.
    fn is_here(&self, ip: IpAddr) -> bool {
        if self.own.contains(&ip) {
            return true;
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = |(at, _): &&(Instant, Vec<IpAddr>)| at.elapsed() < LOOK_EVERY;
        if others.as_ref().filter(fresh).is_none() {
            let all = Netlink::open().and_then(|netlink| netlink.all_addresses());
            let all = all.unwrap_or_default();
            let all = all.iter().map(|address| address.net.addr()).collect();
            *others = Some((Instant::now(), all));
        }
        let mut all = others.iter().flat_map(|(_, all)| all);
        all.any(|own| *own == ip)
    }

    fn reply(&self, query: &[u8], transport: Transport) -> Reply {
        let recursive = self.forwarder.is_there();
        self.names
            .with(|zone| zone.reply(query, transport, recursive))
    }
}

async fn datagrams(socket: Arc<UdpSocket>, responder: Arc<Responder>) {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            sleep(PAUSE).await;
            continue;
        };
        let query = buffer.get(..length).unwrap_or_default();
        // Other hosts get no answer.
        let reply = if responder.is_here(from.ip()) {
            responder.reply(query, Transport::Udp)
        } else {
            Reply::Silence
        };
        match reply {
            // A client that misses its answer retries.
            Reply::Answer(answer) => drop(socket.send_to(&answer, from).await),
            Reply::Forward => {
                let (socket, responder, query) =
                    (socket.clone(), responder.clone(), query.to_vec());
                tokio::spawn(async move {
                    if let Some(answer) = responder.forwarder.ask(&query, Transport::Udp).await {
                        let _ = socket.send_to(&answer, from).await;
                    }
                });
            }
            Reply::Silence => {}
        }
    }
}

async fn connections(listener: TcpListener, responder: Arc<Responder>) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                // Connections of other hosts are closed, and those above the limit.
                if let (true, Ok(permit)) = (
                    responder.is_here(from.ip()),
                    connections.clone().try_acquire_owned(),
                ) {
                    let responder = responder.clone();
                    tokio::spawn(async move {
                        let _ = connection(stream, &responder).await;
                        drop(permit);
                    });
                }
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Answers queries one after the other, until the connection is idle or sends something else.
async fn connection(mut stream: TcpStream, responder: &Responder) -> io::Result<()> {
    loop {
        let query = timeout(IDLE, async {
            let length = usize::from(stream.read_u16().await?);
            if length > MAX_QUERY {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
            let mut query = vec![0; length];
            stream.read_exact(&mut query).await?;
            Ok(query)
        });
        let query = query.await??;
        let answer = match responder.reply(&query, Transport::Tcp) {
            Reply::Answer(answer) => Some(answer),
            Reply::Forward => responder.forwarder.ask(&query, Transport::Tcp).await,
            Reply::Silence => None,
        };
        let Some(answer) = answer else { return Ok(()) };
        timeout(IDLE, stream.write_all(&framed(&answer)?)).await??;
    }
}

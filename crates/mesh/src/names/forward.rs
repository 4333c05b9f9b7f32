//! Forwards queries for other names to the servers that were configured before.

use super::zone::{Transport, failure, is_answer};
use crate::endpoints::any_port;
use seikan_sys::resolv_conf::ResolvConf;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Maximum number of forwarded queries that wait for an answer.
const MAX_WAITING: usize = 128;
/// Timeout of an answer; the client gives up after 5 s (resolv.conf(5), `timeout`).
const PATIENCE: Duration = Duration::from_millis(4500);
/// Time without an answer after which the next server is queried as well.
const STAGGER: Duration = Duration::from_millis(1500);
/// Maximum number of servers; resolv.conf(5) allows no more (`MAXNS`).
const MAX_SERVERS: usize = 3;
/// Response codes after which the next server is queried, as by the C library: SERVFAIL, NOTIMP, REFUSED (RFC
/// 1035, section 4.1.1).
const UNWILLING: [u8; 3] = [2, 4, 5];
/// Maximum size of a message in bytes.
const MAX_MESSAGE: usize = u16::MAX as usize;

/// Servers for other names.
#[derive(Clone, Debug)]
pub enum Upstream {
    /// No server: such queries do not arrive here.
    Nobody,
    /// These servers.
    Servers(Vec<IpAddr>),
    /// The other servers of resolv.conf, read for each query.
    ResolvConf(ResolvConf),
}

/// Forwards queries.
#[derive(Debug)]
pub(super) struct Forwarder {
    upstream: Upstream,
    permits: Arc<Semaphore>,
}

impl Forwarder {
    pub(super) fn new(upstream: Upstream) -> Forwarder {
        Forwarder {
            upstream,
            permits: Arc::new(Semaphore::new(MAX_WAITING)),
        }
    }

    pub(super) fn is_there(&self) -> bool {
        !matches!(self.upstream, Upstream::Nobody)
    }

    /// Forwards a query as it is and returns the answer; SERVFAIL if there is none.
    pub(super) async fn ask(&self, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let Ok(_permit) = self.permits.try_acquire() else {
            return failure(query);
        };
        let answer = first(self.servers(), query, transport).await;
        answer.or_else(|| failure(query))
    }

    fn servers(&self) -> Vec<SocketAddr> {
        let mut servers = match &self.upstream {
            Upstream::Nobody => Vec::new(),
            Upstream::Servers(all) => all.iter().map(|ip| (*ip, 53).into()).collect(),
            // A file that cannot be read is read again for the next query.
            Upstream::ResolvConf(file) => file.others().unwrap_or_default(),
        };
        servers.truncate(MAX_SERVERS);
        servers
    }
}

/// Queries servers in order, staggered, and returns the first answer. A refusal counts only if there is nothing
/// else.
async fn first(servers: Vec<SocketAddr>, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let mut servers = servers.into_iter();
    let mut queries = JoinSet::new();
    let mut unwilling = None;
    loop {
        let next = servers.next();
        if next.is_none() && queries.is_empty() {
            return unwilling;
        }
        if let Some(server) = next {
            let query = query.to_vec();
            queries.spawn(async move {
                match transport {
                    Transport::Udp => by_datagram(server, &query).await,
                    Transport::Tcp => by_connection(server, &query).await,
                }
            });
        }
        let until = match servers.len() {
            0 => deadline,
            _ => deadline.min(Instant::now() + STAGGER),
        };
        match timeout_at(until, queries.join_next()).await {
            Ok(Some(Ok(Ok(answer)))) => match answer.get(3).map(|flags| flags & 0xf) {
                Some(code) if UNWILLING.contains(&code) => unwilling = Some(answer),
                _ => return Some(answer),
            },
            // A server that cannot be queried is skipped.
            Ok(_) => {}
            Err(_) if until == deadline => return unwilling,
            Err(_) => {}
        }
    }
}

async fn by_datagram(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    // Each query has its own random port, which the kernel chooses: a forger must guess it together with the
    // query's id (RFC 5452, section 9.2).
    let socket = UdpSocket::bind(any_port(server)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; MAX_MESSAGE];
    loop {
        let length = socket.recv(&mut answer).await?;
        answer.truncate(length);
        if is_answer(query, &answer) {
            return Ok(answer);
        }
        answer.resize(MAX_MESSAGE, 0);
    }
}

async fn by_connection(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    stream.write_all(&framed(query)?).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    if is_answer(query, &answer) {
        Ok(answer)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// Prepends the length of a message for TCP, in one buffer (RFC 7766, section 8).
pub(super) fn framed(message: &[u8]) -> io::Result<Vec<u8>> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok([&length.to_be_bytes(), message].concat())
}

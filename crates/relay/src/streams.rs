//! TLS connections of members that cannot use UDP: their limits, their lifetimes and their send queues. To a pair, a
//! connection is one of the transports of a side.
//!
//! A connection is unauthenticated until it shows a valid ticket. It has five seconds for that, including the TLS handshake,
//! and may send nothing else. Unauthenticated connections are limited in total and for each source. Datagrams for which a
//! connection has no space are dropped, so no connection delays another.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustls::{ServerConfig, ServerConnection};
use seikan_proto::mesh::framing::{Framing, PORT, split_port};
use seikan_proto::mesh::relay::is_request;
use seikan_proto::rate_limiter::RateLimiter;
use seikan_proto::time::Instant;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::MAX_GSO_SEGMENTS;
use seikan_tls::Stream;

use crate::pair::LIFETIME;
use crate::policer::Policer;
use crate::token;

/// Time from the TCP connection to a valid ticket.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(5);
/// One in this many connections may be unauthenticated.
const UNAUTHENTICATED_SHARE: usize = 4;
/// Maximum number of unauthenticated connections from one source, which is an IPv4 address or an IPv6 /64.
const UNAUTHENTICATED_PER_SOURCE: usize = 8;
/// Maximum number of connections from one source. Many members may be behind one NAT.
const CONNECTIONS_PER_SOURCE: usize = 256;
/// Maximum number of new connections per second, a quarter of them at once. It limits the time spent on TLS handshakes, in
/// which nothing is forwarded.
const CONNECTIONS_PER_SECOND: u64 = 200;
/// Maximum number of runs shorter than [`LONG_RUN`] that a connection may send per second, a quarter of them at once. Each run
/// costs a system call, and over TLS a short datagram costs its sender little.
const RUNS_PER_SECOND: u64 = 4_000;
/// Runs of this many bytes or more are not limited.
const LONG_RUN: usize = 1024;
/// Number of runs that a request counts as.
const REQUEST_RUNS: usize = 4;
/// Maximum number of connections accepted in one poll.
const ACCEPTS: usize = 8;
/// Maximum length in bytes of a frame of an unauthenticated connection.
const MAX_REQUEST: usize = 1502;
/// Maximum length of a run in bytes.
const MAX_RUN: usize = 60_000;

/// All TLS connections.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    listening: Option<(TcpListener, Arc<ServerConfig>)>,
    /// Maximum number of connections.
    limit: usize,
    /// By number. Numbers are never reused, so a message for an old connection cannot reach a new one.
    all: BTreeMap<u64, Connection>,
    /// Number of authenticated connections.
    pub members: usize,
    next: u64,
    limiter: RateLimiter,
    /// Limits new connections from all sources together.
    pace: Policer,
    /// Whether accepting is suspended until the next sweep, because there were no descriptors left.
    suspended: bool,
    /// Connections with new data since the last flush.
    unflushed: Vec<u64>,
    /// Number of connections that were rejected, or that ended without a valid ticket.
    pub turned_away: u64,
}

#[derive(Debug)]
struct Connection {
    stream: Stream,
    remote: SocketAddr,
    /// Whether it has shown a valid ticket.
    is_member: bool,
    /// When it ends. A valid ticket extends it.
    until: Instant,
    interest: Interest,
    unflushed: bool,
    /// Limits its runs.
    pace: Policer,
}

/// Consecutive datagrams for one port. All have the same length, except that the last may be shorter. A request is a run of
/// its own.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub port: u16,
    pub size: usize,
    pub bytes: Vec<u8>,
}

/// Result of [`Streams::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Sent,
    /// The send queue is full.
    Full,
    /// There is no such connection.
    Gone,
}

impl Streams {
    /// Starts accepting connections, at most `limit` at a time.
    pub fn listen(
        listener: TcpListener,
        config: ServerConfig,
        limit: usize,
        epoll: &Epoll,
    ) -> io::Result<Streams> {
        listener.set_nonblocking(true)?;
        epoll.add(&listener, token::LISTENER, Interest::Read)?;
        Ok(Streams {
            listening: Some((listener, Arc::new(config))),
            limit,
            ..Streams::default()
        })
    }

    /// Returns the address that connections are accepted at.
    pub fn address(&self) -> Option<io::Result<SocketAddr>> {
        self.listening
            .as_ref()
            .map(|(listener, _)| listener.local_addr())
    }

    /// Returns the remote address of a connection, if it exists.
    pub fn remote_address(&self, id: u64) -> Option<SocketAddr> {
        self.all.get(&id).map(|connection| connection.remote)
    }

    /// Accepts waiting connections.
    pub fn accept(&mut self, epoll: &Epoll, now: Instant) {
        for _ in 0..ACCEPTS {
            let Some((listener, config)) = &self.listening else {
                return;
            };
            let (socket, remote) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    // The client has closed the connection already.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => continue,
                    // There are no descriptors or memory left. An immediate retry would fail as
                    // well.
                    _ => {
                        self.suspended = epoll.delete(listener).is_ok();
                        return;
                    }
                },
            };
            let config = Arc::clone(config);
            let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
            if !self.admits(remote.ip(), now)
                || self.add(socket, remote, config, epoll, now).is_err()
            {
                self.turned_away += 1;
            }
        }
    }

    /// Whether the limits allow one more unauthenticated connection from this address.
    fn admits(&mut self, ip: IpAddr, now: Instant) -> bool {
        let source = source(ip);
        let (mut unauthenticated, mut unauthenticated_here, mut all_here) = (0, 0, 0);
        for connection in self.all.values() {
            let same_source = source == self::source(connection.remote.ip());
            unauthenticated += usize::from(!connection.is_member);
            unauthenticated_here += usize::from(!connection.is_member && same_source);
            all_here += usize::from(same_source);
        }
        self.all.len() < self.limit
            && unauthenticated < self.limit.div_ceil(UNAUTHENTICATED_SHARE)
            && unauthenticated_here < UNAUTHENTICATED_PER_SOURCE
            && all_here < CONNECTIONS_PER_SOURCE
            // Port 0, so that all ports of a host count as one source.
            && self.limiter.allow(SocketAddr::new(ip, 0), now)
            && self.pace.admit(1, 1, CONNECTIONS_PER_SECOND, now) == 1
    }

    fn add(
        &mut self,
        socket: TcpStream,
        remote: SocketAddr,
        config: Arc<ServerConfig>,
        epoll: &Epoll,
        now: Instant,
    ) -> io::Result<()> {
        let tls = ServerConnection::new(config).map_err(io::Error::other)?;
        let stream = Stream::new(socket, Some(tls.into()), Framing::Relay)?;
        let id = self.next;
        epoll.add(&stream, token::FIRST_STREAM + id, Interest::Read)?;
        self.next += 1;
        let connection = Connection {
            stream,
            remote,
            is_member: false,
            until: now + AUTHENTICATION_TIMEOUT,
            interest: Interest::Read,
            unflushed: false,
            pace: Policer::default(),
        };
        self.all.insert(id, connection);
        Ok(())
    }

    /// Reads available data. Returns whether there may be more.
    ///
    /// # Errors
    /// The connection has ended or failed.
    pub fn receive(&mut self, id: u64) -> io::Result<bool> {
        let Some(connection) = self.all.get_mut(&id) else {
            return Ok(false);
        };
        // TLS may have a message of its own to send.
        mark_unflushed(&mut self.unflushed, id, connection);
        connection.stream.receive()
    }

    /// Replaces `run` by the next datagrams of a connection. Returns false if there are none.
    ///
    /// # Errors
    /// The data is invalid, and the connection must end.
    pub fn next_run(&mut self, id: u64, run: &mut Run) -> io::Result<bool> {
        run.bytes.clear();
        let mut count = 0;
        let Some(connection) = self.all.get_mut(&id) else {
            return Ok(false);
        };
        loop {
            let next = match connection.stream.peek() {
                Ok(next) => next.and_then(split_port),
                // The datagrams before the error go first. The next call finds the same error.
                Err(_) if count > 0 => return Ok(true),
                Err(error) => return Err(error),
            };
            let Some((port, datagram)) = next else { break };
            let request = is_request(datagram);
            let joins = port == run.port
                && !request
                && datagram.len() <= run.size
                && run.bytes.len() == count * run.size
                && run.bytes.len() + datagram.len() <= MAX_RUN
                && count < MAX_GSO_SEGMENTS;
            if count > 0 && !joins {
                return Ok(true);
            }
            if count == 0 {
                (run.port, run.size) = (port, datagram.len());
            }
            run.bytes.extend_from_slice(datagram);
            count += 1;
            connection.stream.take();
            // Empty datagrams are not joined.
            if request || run.size == 0 {
                return Ok(true);
            }
        }
        if !connection.is_member && connection.stream.waiting() > MAX_REQUEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(count > 0)
    }

    /// Counts a received run. Returns false if the connection has exceeded its rate.
    pub fn admit_run(&mut self, id: u64, run: &Run, now: Instant) -> bool {
        let weight = if is_request(&run.bytes) {
            REQUEST_RUNS
        } else if run.bytes.len() >= LONG_RUN {
            return self.all.contains_key(&id);
        } else {
            1
        };
        let connection = self.all.get_mut(&id);
        connection.is_some_and(|c| c.pace.admit(weight, weight, RUNS_PER_SECOND, now) == weight)
    }

    /// Whether the connection has shown a valid ticket.
    pub fn is_member(&self, id: u64) -> bool {
        self.all.get(&id).is_some_and(|c| c.is_member)
    }

    /// Marks a connection as authenticated by a valid ticket and extends its lifetime.
    pub fn set_member(&mut self, id: u64, now: Instant) {
        if let Some(connection) = self.all.get_mut(&id) {
            self.members += usize::from(!connection.is_member);
            connection.is_member = true;
            connection.until = now + LIFETIME;
        }
    }

    /// Queues a datagram from a port.
    pub fn push(&mut self, id: u64, port: u16, datagram: &[u8]) -> Pushed {
        self.queue(id, |stream| stream.push(&[&port.to_be_bytes(), datagram]))
    }

    /// Queues an answer from a port. If it is lost, the client repeats the request.
    pub fn answer(&mut self, id: u64, port: u16, answer: &[u8]) {
        self.queue(id, |stream| {
            stream.push_request(&[&port.to_be_bytes(), answer])
        });
    }

    fn queue(&mut self, id: u64, push: impl FnOnce(&mut Stream) -> bool) -> Pushed {
        const { assert!(PORT == size_of::<u16>()) };
        let Some(connection) = self.all.get_mut(&id) else {
            return Pushed::Gone;
        };
        if !push(&mut connection.stream) {
            return Pushed::Full;
        }
        mark_unflushed(&mut self.unflushed, id, connection);
        Pushed::Sent
    }

    /// Sends the queued data. Returns the connections that failed.
    pub fn flush(&mut self, epoll: &Epoll) -> Vec<u64> {
        let mut failed = Vec::new();
        for id in self.unflushed.drain(..) {
            let Some(connection) = self.all.get_mut(&id) else {
                continue;
            };
            connection.unflushed = false;
            let interest = match connection.stream.flush() {
                Ok(true) => Interest::ReadWrite,
                Ok(false) => Interest::Read,
                Err(_) => {
                    failed.push(id);
                    continue;
                }
            };
            if interest != connection.interest {
                connection.interest = interest;
                if epoll
                    .modify(&connection.stream, token::FIRST_STREAM + id, interest)
                    .is_err()
                {
                    failed.push(id);
                }
            }
        }
        failed
    }

    /// Ends a connection. Returns whether it was authenticated.
    pub fn end(&mut self, id: u64) -> bool {
        let ended = self.all.remove(&id);
        let was_member = ended.as_ref().is_some_and(|ended| ended.is_member);
        self.members -= usize::from(was_member);
        self.turned_away += u64::from(ended.is_some() && !was_member);
        was_member
    }

    /// Returns the connections that have expired. Resumes accepting if it was suspended.
    pub fn sweep(&mut self, epoll: &Epoll, now: Instant) -> Vec<u64> {
        if self.suspended
            && let Some((listener, _)) = &self.listening
        {
            let resumed = epoll.add(listener, token::LISTENER, Interest::Read);
            self.suspended = resumed.is_err();
        }
        let expired = self.all.iter().filter(|(_, c)| c.until <= now);
        expired.map(|(id, _)| *id).collect()
    }
}

fn mark_unflushed(unflushed: &mut Vec<u64>, id: u64, connection: &mut Connection) {
    if !std::mem::replace(&mut connection.unflushed, true) {
        unflushed.push(id);
    }
}

/// The source that an address belongs to: itself for IPv4, its /64 for IPv6.
fn source(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn new_connections_of_all_sources_together_are_limited() {
        let mut streams = Streams {
            limit: 1000,
            ..Streams::default()
        };
        let mut admitted = |second: u64| {
            let now = Instant::BOOT + Duration::from_secs(second);
            let source = |n: u32| IpAddr::from(Ipv4Addr::from_bits(0xc000_0200 + n));
            (0..1000)
                .filter(|n| streams.admits(source(*n), now))
                .count() as u64
        };
        assert_eq!([admitted(1), admitted(2)], [CONNECTIONS_PER_SECOND / 4; 2]);
    }
}

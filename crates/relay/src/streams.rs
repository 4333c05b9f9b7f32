//! Members that have no answer by UDP, and come by TLS over TCP instead: their connections, for how long each stays, and what waits for
//! it. To pairs a connection is one more place where a side is.
//!
//! Who connects is a stranger until he shows a good ticket, for which he has five seconds, TLS included, and nothing else is taken of
//! him meanwhile. Strangers have a part of all connections, and each source a small one. Nobody waits for anybody: what a connection does
//! not take is dropped.

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

use crate::pair::LIFE;
use crate::policer::Policer;

/// How long it may take from a connection to a good ticket, all in all.
const PROVE_WITHIN: Duration = Duration::from_secs(5);
/// One of so many connections may be a stranger's.
const ONE_IN: usize = 4;
/// Connections of strangers from one source, an IPv4 address or an IPv6 /64, at most; and of everybody there, as behind one NAT.
const STRANGERS_OF_A_SOURCE: usize = 8;
const MEMBERS_OF_A_SOURCE: usize = 256;
/// Connections that are taken in a second, of all sources, a quarter of them at once: handshakes of TLS are not to take the time in which
/// datagrams go on.
const A_SECOND: u64 = 200;
/// Runs of datagrams of less than [`LONG_RUN`] bytes that a connection may bring in a second, a quarter of them at once. Each is a call of the kernel, however short it is:
/// at a connection a datagram takes few bytes.
const RUNS: u64 = 4_000;
/// Bytes of a run that is not counted.
const LONG_RUN: usize = 1024;
/// Runs for which a request counts.
const REQUEST_RUNS: usize = 4;
/// Connections that are taken before others have their turn.
const ACCEPTS: usize = 8;
/// Bytes of a frame that a stranger sends, at most.
const MAX_REQUEST: usize = 1502;
/// Bytes of datagrams that go on together, at most.
const MAX_RUN: usize = 60_000;

/// The listener's token, and what those of connections begin at.
pub(crate) const LISTENER_TOKEN: u64 = 3;
pub(crate) const FIRST_TOKEN: u64 = 1 << 32;

/// All connections.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    listening: Option<(TcpListener, Arc<ServerConfig>)>,
    /// At a time, at most.
    most: usize,
    /// By numbers that are never used again, so that nobody gets what was for somebody else.
    all: BTreeMap<u64, Connection>,
    /// Members' of them.
    pub members: usize,
    next: u64,
    limiter: RateLimiter,
    /// What all sources together may begin.
    pace: Policer,
    /// There was no descriptor left for another one: nobody is accepted until the next sweep.
    rests: bool,
    /// Something was put in since these were flushed.
    unflushed: Vec<u64>,
    /// Connections that were not taken, or ended without a good ticket.
    pub turned_away: u64,
}

#[derive(Debug)]
struct Connection {
    stream: Stream,
    from: SocketAddr,
    /// He has shown a good ticket.
    is_member: bool,
    /// It ends then; a good ticket gives it a minute more.
    until: Instant,
    interest: Interest,
    unflushed: bool,
    /// What it brings.
    pace: Policer,
}

/// Datagrams for one port as they came one behind the other: of one length, the last may be shorter. A request is alone.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub port: u16,
    pub size: usize,
    pub bytes: Vec<u8>,
}

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Sent,
    /// Too much waits there.
    Full,
    /// There is no such connection any more.
    Gone,
}

impl Streams {
    /// Takes connections there, so many at a time.
    pub fn listen(
        listener: TcpListener,
        config: ServerConfig,
        most: usize,
        epoll: &Epoll,
    ) -> io::Result<Streams> {
        listener.set_nonblocking(true)?;
        epoll.add(&listener, LISTENER_TOKEN, Interest::Read)?;
        Ok(Streams {
            listening: Some((listener, Arc::new(config))),
            most,
            ..Streams::default()
        })
    }

    /// Where connections are taken.
    pub fn address(&self) -> Option<io::Result<SocketAddr>> {
        self.listening
            .as_ref()
            .map(|(listener, _)| listener.local_addr())
    }

    /// Who is at the other end; `None`: nobody.
    pub fn from(&self, id: u64) -> Option<SocketAddr> {
        self.all.get(&id).map(|connection| connection.from)
    }

    /// Takes connections that wait.
    pub fn accept(&mut self, epoll: &Epoll, now: Instant) {
        for _ in 0..ACCEPTS {
            let Some((listener, config)) = &self.listening else {
                return;
            };
            let (socket, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    // Who has gone meanwhile.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => continue,
                    // Out of descriptors or memory, which asking again at once does not change.
                    _ => {
                        self.rests = epoll.delete(listener).is_ok();
                        return;
                    }
                },
            };
            let config = Arc::clone(config);
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            if !self.admits(from.ip(), now) || self.add(socket, from, config, epoll, now).is_err() {
                self.turned_away += 1;
            }
        }
    }

    /// Whether there is room for one more stranger from there.
    fn admits(&mut self, ip: IpAddr, now: Instant) -> bool {
        let source = source(ip);
        let (mut strangers, mut strangers_there, mut all_there) = (0, 0, 0);
        for connection in self.all.values() {
            let there = source == self::source(connection.from.ip());
            strangers += usize::from(!connection.is_member);
            strangers_there += usize::from(!connection.is_member && there);
            all_there += usize::from(there);
        }
        self.all.len() < self.most
            && strangers < self.most.div_ceil(ONE_IN)
            && strangers_there < STRANGERS_OF_A_SOURCE
            && all_there < MEMBERS_OF_A_SOURCE
            // All ports of this host are one source here.
            && self.limiter.allow(SocketAddr::new(ip, 0), now)
            && self.pace.admit(1, 1, A_SECOND, now) == 1
    }

    fn add(
        &mut self,
        socket: TcpStream,
        from: SocketAddr,
        config: Arc<ServerConfig>,
        epoll: &Epoll,
        now: Instant,
    ) -> io::Result<()> {
        let tls = ServerConnection::new(config).map_err(io::Error::other)?;
        let stream = Stream::new(socket, Some(tls.into()), Framing::Relay)?;
        let id = self.next;
        epoll.add(&stream, FIRST_TOKEN + id, Interest::Read)?;
        self.next += 1;
        let connection = Connection {
            stream,
            from,
            is_member: false,
            until: now + PROVE_WITHIN,
            interest: Interest::Read,
            unflushed: false,
            pace: Policer::default(),
        };
        self.all.insert(id, connection);
        Ok(())
    }

    /// Reads what is there; whether there may be more.
    ///
    /// # Errors
    /// It is over.
    pub fn receive(&mut self, id: u64) -> io::Result<bool> {
        let Some(connection) = self.all.get_mut(&id) else {
            return Ok(false);
        };
        // TLS may have something to say to it.
        note(&mut self.unflushed, id, connection);
        connection.stream.receive()
    }

    /// The next datagrams that have come by a connection, in the place of those in `run`; whether there are any.
    ///
    /// # Errors
    /// What comes there is no such thing: it is over.
    pub fn next_run(&mut self, id: u64, run: &mut Run) -> io::Result<bool> {
        run.bytes.clear();
        let mut count = 0;
        let Some(connection) = self.all.get_mut(&id) else {
            return Ok(false);
        };
        loop {
            let next = match connection.stream.peek() {
                Ok(next) => next.and_then(split_port),
                // What came before goes first; it is as wrong the next time.
                Err(_) if count > 0 => return Ok(true),
                Err(error) => return Err(error),
            };
            let Some((port, datagram)) = next else { break };
            let request = is_request(datagram);
            let goes_along = port == run.port
                && !request
                && datagram.len() <= run.size
                && run.bytes.len() == count * run.size
                && run.bytes.len() + datagram.len() <= MAX_RUN
                && count < MAX_GSO_SEGMENTS;
            if count > 0 && !goes_along {
                return Ok(true);
            }
            if count == 0 {
                (run.port, run.size) = (port, datagram.len());
            }
            run.bytes.extend_from_slice(datagram);
            count += 1;
            connection.stream.take();
            // Nothing of no length is joined.
            if request || run.size == 0 {
                return Ok(true);
            }
        }
        if !connection.is_member && connection.stream.waiting() > MAX_REQUEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(count > 0)
    }

    /// Counts a run that came by a connection; whether it has not brought too many.
    pub fn may_bring(&mut self, id: u64, run: &Run, now: Instant) -> bool {
        let weight = match is_request(&run.bytes) {
            true => REQUEST_RUNS,
            // Its bytes pay for it.
            false if run.bytes.len() >= LONG_RUN => return self.all.contains_key(&id),
            false => 1,
        };
        let connection = self.all.get_mut(&id);
        connection.is_some_and(|c| c.pace.admit(weight, weight, RUNS, now) == weight)
    }

    /// Whether a good ticket was shown there.
    pub fn is_member(&self, id: u64) -> bool {
        self.all.get(&id).is_some_and(|c| c.is_member)
    }

    /// A good ticket was shown: it stays for another minute.
    pub fn prove(&mut self, id: u64, now: Instant) {
        if let Some(connection) = self.all.get_mut(&id) {
            self.members += usize::from(!connection.is_member);
            connection.is_member = true;
            connection.until = now + LIFE;
        }
    }

    /// Has a datagram of a port sent by a connection.
    pub fn push(&mut self, id: u64, port: u16, datagram: &[u8]) -> Pushed {
        self.put(id, |stream| stream.push(&[&port.to_be_bytes(), datagram]))
    }

    /// Has an answer of a port sent; one that is lost is asked for again.
    pub fn answer(&mut self, id: u64, port: u16, answer: &[u8]) {
        self.put(id, |stream| {
            stream.push_request(&[&port.to_be_bytes(), answer])
        });
    }

    fn put(&mut self, id: u64, put: impl FnOnce(&mut Stream) -> bool) -> Pushed {
        const { assert!(PORT == size_of::<u16>()) };
        let Some(connection) = self.all.get_mut(&id) else {
            return Pushed::Gone;
        };
        if !put(&mut connection.stream) {
            return Pushed::Full;
        }
        note(&mut self.unflushed, id, connection);
        Pushed::Sent
    }

    /// Hands over what was put in since the last time; the connections that are over.
    pub fn flush(&mut self, epoll: &Epoll) -> Vec<u64> {
        let mut over = Vec::new();
        for id in self.unflushed.drain(..) {
            let Some(connection) = self.all.get_mut(&id) else {
                continue;
            };
            connection.unflushed = false;
            let interest = match connection.stream.flush() {
                Ok(true) => Interest::ReadWrite,
                Ok(false) => Interest::Read,
                Err(_) => {
                    over.push(id);
                    continue;
                }
            };
            if interest != connection.interest {
                connection.interest = interest;
                if epoll
                    .modify(&connection.stream, FIRST_TOKEN + id, interest)
                    .is_err()
                {
                    over.push(id);
                }
            }
        }
        over
    }

    /// Ends a connection; whether it was a member's.
    pub fn end(&mut self, id: u64) -> bool {
        let ended = self.all.remove(&id);
        let was_member = ended.as_ref().is_some_and(|ended| ended.is_member);
        self.members -= usize::from(was_member);
        self.turned_away += u64::from(ended.is_some() && !was_member);
        was_member
    }

    /// Connections whose time is over; who rested listens again.
    pub fn sweep(&mut self, epoll: &Epoll, now: Instant) -> Vec<u64> {
        if self.rests
            && let Some((listener, _)) = &self.listening
        {
            let listens = epoll.add(listener, LISTENER_TOKEN, Interest::Read);
            self.rests = listens.is_err();
        }
        let over = self.all.iter().filter(|(_, c)| c.until <= now);
        over.map(|(id, _)| *id).collect()
    }
}

/// To be flushed.
fn note(unflushed: &mut Vec<u64>, id: u64, connection: &mut Connection) {
    if !std::mem::replace(&mut connection.unflushed, true) {
        unflushed.push(id);
    }
}

/// What counts as one source.
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
    fn all_sources_together_begin_so_many_connections_a_second() {
        let mut streams = Streams {
            most: 1000,
            ..Streams::default()
        };
        let mut admitted = |second: u64| {
            let now = Instant::BOOT + Duration::from_secs(second);
            let source = |n: u32| IpAddr::from(Ipv4Addr::from_bits(0xc000_0200 + n));
            (0..1000)
                .filter(|n| streams.admits(source(*n), now))
                .count() as u64
        };
        assert_eq!([admitted(1), admitted(2)], [A_SECOND / 4; 2]);
    }
}

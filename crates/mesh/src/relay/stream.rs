//! Forwards between the tunnel and a relay over TLS. Each port of the relay that this host uses, including the
//! main one, has a proxy socket ([`crate::proxy`]).

use crate::forward::{self, Ends, Event, Forwarder, Hub, LOOK_EVERY, MAX_RECEIVES, Over};
use rustls::ClientConnection;
use seikan_observe::DropReason;
use seikan_proto::mesh::framing::{Framing, MAIN_PORT, split_port};
use seikan_proto::mesh::relay::is_request;
use seikan_sys::udp::ReceiveBatch;
use seikan_tls::Stream;
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::{Duration, Instant};

/// Timeout of the relay's first answer, including the TLS handshake.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("no answer")]
    NoAnswer,
    #[error("{0}")]
    Lost(#[from] io::Error),
    #[error(transparent)]
    Over(#[from] Over),
}

/// Starts the thread on a TCP connection; the TLS handshake follows. `relay` is the relay's address, `port` the tunnel's
/// port.
pub(super) fn start(
    socket: TcpStream,
    relay: IpAddr,
    tls: ClientConnection,
    port: Arc<AtomicU16>,
) -> io::Result<Ends<Connection>> {
    forward::start("relay", port, move |hub| {
        let stream = Stream::new(socket, Some(tls.into()), Framing::Relay)?;
        hub.watch(&stream)?;
        Ok(Connection {
            relay,
            stream,
            hub,
            started_at: Instant::now(),
            answers: false,
        })
    })
}

/// A connection to a relay.
pub(super) struct Connection {
    relay: IpAddr,
    stream: Stream,
    hub: Hub<Connection>,
    started_at: Instant,
    answers: bool,
}

impl Forwarder for Connection {
    /// Ports of the relay that need a proxy socket, in addition to the main one.
    type Wanted = BTreeSet<u16>;
    type Serves = ();
    type Ended = Ended;

    fn hub(&mut self) -> &mut Hub<Connection> {
        &mut self.hub
    }

    /// Opens required proxy sockets and closes the others.
    fn apply(&mut self) -> Result<(), Ended> {
        let mut wanted = self.hub.wanted().clone();
        wanted.insert(MAIN_PORT);
        for token in self
            .hub
            .proxies
            .of(|proxy| !wanted.contains(&proxy.peer.port()))
        {
            self.hub.close(token)?;
        }
        for port in wanted {
            let at = SocketAddr::new(self.relay, port);
            if self.hub.proxies.at(&at).is_some() {
                continue;
            }
            // If the system lacks resources, the requester times out.
            if let Some(token) = self.hub.open(at) {
                self.hub.report_proxy(token)?;
            }
        }
        Ok(())
    }

    fn drive(&mut self) -> Result<Instant, Ended> {
        self.hub.flush(&mut self.stream)?;
        let now = Instant::now();
        let until = self.started_at + ANSWER_WITHIN;
        if self.answers {
            Ok(now + LOOK_EVERY)
        } else if now < until {
            Ok(until)
        } else {
            Err(Ended::NoAnswer)
        }
    }

    fn read_server(&mut self, _: &mut ReceiveBatch) -> Result<(), Ended> {
        for _ in 0..MAX_RECEIVES {
            if !self.stream.receive()? {
                break;
            }
            let mut came = false;
            while let Some(frame) = self.stream.peek()? {
                came = true;
                let proxies = &mut self.hub.proxies;
                let proxy = split_port(frame).and_then(|(port, datagram)| {
                    let token = proxies.at(&SocketAddr::new(self.relay, port))?;
                    (!datagram.is_empty()).then_some((token, datagram))
                });
                match proxy {
                    Some((token, datagram)) => proxies.deliver(token, datagram),
                    None => proxies.counters.drops.add(DropReason::NoChannel, 1),
                }
                self.stream.take();
            }
            if came && !self.answers {
                self.answers = true;
                self.hub.send(Event::Serves(()))?;
            }
        }
        self.hub.proxies.flush();
        Ok(())
    }

    fn read_proxy(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        let proxies = &mut self.hub.proxies;
        let Some(port) = proxies.get_mut(token).map(|proxy| proxy.peer.port()) else {
            return Ok(());
        };
        for _ in 0..MAX_RECEIVES {
            if !proxies.receive(token, batch) {
                break;
            }
            let (metas, arena) = batch.parts_mut();
            for meta in metas {
                if !proxies.is_whole(meta) {
                    continue;
                }
                for segment in meta.segments() {
                    let datagram = arena.get(segment).unwrap_or_default();
                    let parts = [&port.to_be_bytes()[..], datagram];
                    let pushed = if is_request(datagram) {
                        self.stream.push_request(&parts)
                    } else {
                        self.stream.push(&parts)
                    };
                    if pushed {
                        proxies.counters.sent += 1
                    } else {
                        proxies.counters.drops.add(DropReason::SendNoBuffers, 1)
                    }
                }
            }
        }
        Ok(())
    }
}

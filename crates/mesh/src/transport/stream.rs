//! A connection to a relay over TLS. Each port of the relay that this host uses, including the main one, has an address
//! in the tunnel.

use super::ended::Ended;
use super::link::Link;
use super::{Core, LOOK_EVERY, Message, Opened, Server, Transport, Waker, now};
use seikan_observe::DropReason;
use seikan_proto::mesh::framing::{MAIN_PORT, PORT, split_port};
use seikan_proto::mesh::relay::is_request;
use seikan_proto::time::Instant;
use seikan_tls::Stream;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::slice::Chunks;
use std::time::Duration;

/// Timeout of the relay's first answer, including the TLS handshake.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A connection to a relay.
#[derive(Debug)]
struct Connection {
    relay: IpAddr,
    started_at: Instant,
    answers: bool,
}

/// Opens a transport on a connection whose TLS handshake is still to be done. `name` is the relay's
/// address as configured.
pub(crate) fn open(name: String, stream: Stream, relay: IpAddr, waker: Waker) -> Opened {
    let server = Connection {
        relay,
        started_at: now(),
        answers: false,
    };
    let link = Link::Stream(stream);
    Transport::open(name, link, Box::new(server), waker)
}

impl Server for Connection {
    fn turn(&self) -> Option<&'static str> {
        None
    }

    fn poll(&mut self, core: &mut Core, now: Instant) -> Result<Instant, Ended> {
        if let Some(wanted) = core.changed()? {
            for local in core.peers.of(|peer| !wanted.peers.contains(&peer.to)) {
                core.close(local);
            }
            for to in wanted.peers {
                if core.peers.at(&to).is_none() {
                    let local = core.peers.open(to, now);
                    core.report(local);
                }
            }
        }
        let until = self.started_at + ANSWER_WITHIN;
        if self.answers {
            Ok(now + LOOK_EVERY)
        } else if now < until {
            Ok(until)
        } else {
            Err(Ended::Mute)
        }
    }

    fn receive(&mut self, core: &mut Core, _: Instant, message: &mut Message<'_>) {
        let local = split_port(message.bytes()).and_then(|(port, datagram)| {
            let local = core.peers.at(&SocketAddr::new(self.relay, port))?;
            (!datagram.is_empty()).then_some(local)
        });
        match local {
            Some(local) => {
                let datagram = message.range.start + PORT..message.range.end;
                message.deliver(core, local, datagram);
            }
            None => core.drop(DropReason::NoChannel, 1),
        }
        if !self.answers {
            self.answers = true;
            core.serve(SocketAddr::new(self.relay, MAIN_PORT));
        }
    }

    fn send(&mut self, core: &mut Core, _: Instant, to: SocketAddr, datagrams: Chunks<'_, u8>) {
        let Link::Stream(stream) = &mut core.link else {
            return;
        };
        for datagram in datagrams {
            let parts = [&to.port().to_be_bytes()[..], datagram];
            let pushed = if is_request(datagram) {
                stream.push_request(&parts)
            } else {
                stream.push(&parts)
            };
            if pushed {
                core.counters.sent += 1
            } else {
                core.counters.drops.add(DropReason::SendNoBuffers, 1)
            }
        }
    }

    fn lost(&self, error: io::Error) -> Ended {
        Ended::Stream(error)
    }
}

//! The client of a session: connects, starts the measurement of both ends, and receives the
//! evidence of the far end.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use seikan_diagnose::exchange::{LONGEST, Load, Message, Ready, Request};
use seikan_diagnose::{Evidence, Recording};
use seikan_load::{Flow, reach};
use seikan_observe::path::{PathMap, Unseen};
use seikan_ui::{Interrupt, Stop};
use socket2::{Domain, Protocol, Socket, Type};

use super::channel::{Channel, ChannelError};
use super::{
    Arguments, DEAD, KEEPALIVE, POLL, carry, remove_own_flow, split, transport, tunnel_of,
};
use crate::screen::printable;
use crate::verbs::doctor::measure::{self, Options};

/// Timeout of the connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Timeout of the far end while it finds its path.
const DISCOVER: Duration = Duration::from_secs(30);
/// Load before the measurement, so that TCP has found its rate.
const WARM_UP: Duration = Duration::from_millis(500);
/// Segment size of the connection between the doctors, bytes: it works where large packets are lost.
const SEGMENT: u32 = 1_000;

/// The far end, before it measures.
pub struct Peer {
    channel: Channel,
    /// The argument of `--peer`.
    name: String,
    load: Option<Load>,
}

impl Peer {
    /// Connects, if the arguments name a far end.
    ///
    /// # Errors
    /// It does not answer, or has another key.
    pub fn connect(arguments: &Arguments) -> anyhow::Result<Option<Peer>> {
        let Some(name) = &arguments.peer else {
            return Ok(None);
        };
        let (key, load) = (arguments.key()?, arguments.load()?);
        let failed = || format!("cannot connect to the doctor at {name}");
        let stream = connect(name).with_context(failed)?;
        let channel = Channel::connect(stream, &key, LONGEST).with_context(failed)?;
        Ok(Some(Peer {
            channel,
            name: name.clone(),
            load,
        }))
    }

    /// Returns the tunnel through which it is connected, if there is one.
    pub fn tunnel(&self) -> Option<String> {
        let local = self.channel.stream().local_addr().ok()?;
        tunnel_of(local.ip()).ok()?
    }

    /// Measures both ends at the same time. If the far end is lost during the measurement, its
    /// evidence is listed as unavailable.
    ///
    /// # Errors
    /// One end cannot start, or this one cannot measure.
    pub fn measure(
        mut self,
        map: PathMap,
        options: &Options,
        interrupt: &Interrupt,
    ) -> anyhow::Result<(Recording, Option<Evidence>)> {
        let request = Request {
            seconds: options.length.as_secs() as u32,
            interval: options.interval.as_millis() as u32,
            level: options.level,
            probe: options.probe,
            load: self.load,
        };
        let name = self.name.clone();
        if self.load.is_some() && self.tunnel() != map.inner {
            let inner = printable(map.inner.as_deref().unwrap_or("the tunnel"));
            eprintln!(
                "warning: {name} is not reached through {inner}, so the load does not go through it"
            );
        }
        let stop = Interrupt::new();
        let flow = self
            .prepare(request, interrupt, &stop)
            .with_context(|| format!("the doctor at {name} cannot start"))?;
        let (measured, received) = std::thread::scope(|scope| {
            let _raise = Stop(&stop);
            if let Some((load, flow)) = &flow {
                let (load, flow, stop) = (*load, flow, &stop);
                scope.spawn(move || carry(flow, load, !load.reverse, stop));
                interrupt.sleep(WARM_UP)?;
            }
            self.channel.send(&Message::Begin)?;
            let (over, stop) = (Interrupt::new(), &stop);
            std::thread::scope(|scope| {
                let raise = Stop(&over);
                let (channel, over) = (&mut self.channel, &over);
                let loaded = self.load.is_some();
                let received = scope.spawn(move || {
                    let received = follow(channel, over, stop, interrupt);
                    if received.is_err() && loaded {
                        // Without load there is nothing to measure.
                        interrupt.raise();
                    }
                    received
                });
                let measured = measure::whole(map, options, interrupt);
                drop(raise);
                let received = received.join().map_err(|_| anyhow!("a thread panicked"))?;
                anyhow::Ok((measured, received))
            })
        })?;
        let mut recording = match (measured, &received) {
            (Err(_), Err(error)) => bail!("the doctor at {name} was lost: {error:#}"),
            (measured, _) => measured?,
        };
        let evidence = &mut recording.evidence;
        remove_own_flow(evidence, self.channel.stream())?;
        match received {
            Ok(far) => Ok((recording, Some(far))),
            Err(error) => {
                evidence.map.unseen.push(Unseen {
                    what: format!("the far end, {name}"),
                    why: format!("{error:#}"),
                });
                Ok((recording, None))
            }
        }
    }

    /// Waits until the far end has found its path, and connects the load.
    fn prepare(
        &mut self,
        request: Request,
        interrupt: &Interrupt,
        stop: &Interrupt,
    ) -> anyhow::Result<Option<(Load, Flow)>> {
        let load = request.load;
        self.channel.send(&Message::Request(request))?;
        let until = Instant::now() + DISCOVER;
        let Ready { sink } = loop {
            interrupt.check()?;
            match self.channel.receive(Instant::now() + POLL) {
                Ok(Some(Message::Ready(ready))) => break ready,
                Ok(Some(Message::Refused(why))) => bail!("{why}"),
                Ok(Some(Message::Alive)) => {}
                Ok(Some(_)) => bail!("unexpected message"),
                Ok(None) if Instant::now() < until => {}
                Ok(None) => return Err(ChannelError::Silent.into()),
                Err(error) => return Err(error.into()),
            }
        };
        let (Some(load), Some(sink)) = (load, sink) else {
            return match load {
                Some(_) => bail!("the far end did not announce a port for the load"),
                None => Ok(None),
            };
        };
        let mut to = self.channel.stream().peer_addr()?;
        to.set_port(sink.port);
        let flow = reach(transport(load.kind), to, &sink.token.0, stop)?;
        Ok(Some((load, flow)))
    }
}

/// Exchanges keepalives until the far end has sent its evidence. The load ends with the connection.
fn follow(
    channel: &mut Channel,
    over: &Interrupt,
    stop: &Interrupt,
    interrupt: &Interrupt,
) -> anyhow::Result<Evidence> {
    let raise = Stop(stop);
    let mut last_keepalive = Instant::now();
    let mut ended = false;
    loop {
        if interrupt.is_raised() && !ended {
            ended = true;
            stop.raise();
            channel.send(&Message::End)?;
        }
        if last_keepalive.elapsed() >= KEEPALIVE {
            last_keepalive = Instant::now();
            channel.send(&Message::Alive)?;
        }
        match channel.receive(Instant::now() + POLL)? {
            Some(Message::Measurement(measurement)) => {
                // This end may have started a little later; the load continues until it has finished.
                while !over.is_raised() && !interrupt.is_raised() {
                    std::thread::sleep(POLL / 5);
                }
                drop(raise);
                return Ok(measurement.evidence()?);
            }
            Some(Message::Alive) => {}
            Some(Message::Refused(why)) => bail!("{why}"),
            Some(_) => bail!("unexpected message"),
            None if channel.last_received().elapsed() > DEAD => {
                bail!("no message for {} s", DEAD.as_secs())
            }
            None => {}
        }
    }
}

fn connect(name: &str) -> anyhow::Result<TcpStream> {
    let (host, port) = split(name).map_err(|error| anyhow!("{error}"))?;
    let addresses: Vec<SocketAddr> = (host.as_str(), port).to_socket_addrs()?.collect();
    let mut last = anyhow!("the name has no address");
    for address in addresses {
        let one = || -> std::io::Result<TcpStream> {
            let socket = Socket::new(
                Domain::for_address(address),
                Type::STREAM,
                Some(Protocol::TCP),
            )?;
            socket.set_tcp_mss(SEGMENT)?;
            socket.connect_timeout(&address.into(), CONNECT)?;
            socket.set_tcp_nodelay(true)?;
            Ok(socket.into())
        };
        match one() {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                last = anyhow!("{address}: {error}; is `seikan doctor --listen` running there?");
            }
        }
    }
    Err(last)
}

//! The end that asks: connects, has the other end measure while it measures itself, and takes in what that tells.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use seikan_diagnose::exchange::{Ask, LONGEST, Load, Message, Ready};
use seikan_diagnose::{Evidence, Recording};
use seikan_load::{Flow, Meter, reach};
use seikan_observe::path::{PathMap, Unseen};
use seikan_ui::Interrupt;
use socket2::{Domain, Protocol, Socket, Type};

use super::channel::{Channel, ChannelError};
use super::{Arguments, DEAD, LOOK, PULSE, Raise, forget_own, split, transport, tunnel_of};
use crate::screen::printable;
use crate::verbs::doctor::measure::{self, Options};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the other end may look for its path.
const DISCOVER: Duration = Duration::from_secs(30);
/// Load before the measurement, so that TCP has found its rate.
const WARM_UP: Duration = Duration::from_millis(500);
/// Segments on the connection between the doctors, bytes: it works where large packets do not get through.
const SEGMENT: u32 = 1_000;

/// The other end, before it measures.
pub struct Peer {
    channel: Channel,
    /// As it was given.
    name: String,
    load: Option<Load>,
}

impl Peer {
    /// Connects, if another end was named.
    ///
    /// # Errors
    /// It is not there, or has another key.
    pub fn connect(arguments: &Arguments) -> anyhow::Result<Option<Peer>> {
        let Some(name) = &arguments.peer else {
            return Ok(None);
        };
        let (key, load) = (arguments.key()?, arguments.load()?);
        let failed = || format!("cannot ask the doctor at {name}");
        let stream = connect(name).with_context(failed)?;
        let channel = Channel::ask(stream, &key, LONGEST).with_context(failed)?;
        Ok(Some(Peer {
            channel,
            name: name.clone(),
            load,
        }))
    }

    /// The tunnel through which it was reached, if it was through one.
    pub fn tunnel(&self) -> Option<String> {
        let local = self.channel.stream().local_addr().ok()?;
        // Then one is looked for.
        tunnel_of(local.ip()).ok()?
    }

    /// Measures both ends at the same time. The far one's evidence is missing, and that is told, if it is lost meanwhile.
    ///
    /// # Errors
    /// One end cannot begin, or this one cannot measure.
    pub fn measure(
        mut self,
        map: PathMap,
        options: &Options,
        interrupt: &Interrupt,
    ) -> anyhow::Result<(Recording, Option<Evidence>)> {
        let ask = Ask {
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
        let stop = AtomicBool::new(false);
        let flow = self
            .prepare(ask, interrupt, &stop)
            .with_context(|| format!("the doctor at {name} cannot begin"))?;
        let (measured, told) = std::thread::scope(|scope| {
            let _raise = Raise(&stop);
            if let Some((load, flow)) = &flow {
                let (load, flow, stop) = (*load, flow, &stop);
                scope.spawn(move || carry(flow, load, stop));
                interrupt.sleep(WARM_UP)?;
            }
            self.channel.send(&Message::Begin)?;
            let (over, stop) = (AtomicBool::new(false), &stop);
            std::thread::scope(|scope| {
                let raise = Raise(&over);
                let (channel, over) = (&mut self.channel, &over);
                let loaded = self.load.is_some();
                let told = scope.spawn(move || {
                    let told = follow(channel, over, stop, interrupt);
                    if told.is_err() && loaded {
                        // Without load there is nothing left to look at.
                        interrupt.raise();
                    }
                    told
                });
                let measured = measure::whole(map, options, interrupt);
                drop(raise);
                let told = told.join().map_err(|_| anyhow!("a thread panicked"))?;
                anyhow::Ok((measured, told))
            })
        })?;
        let mut recording = match (measured, &told) {
            (Err(_), Err(error)) => bail!("the doctor at {name} was lost: {error:#}"),
            (measured, _) => measured?,
        };
        let evidence = &mut recording.evidence;
        forget_own(evidence, self.channel.stream())?;
        match told {
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

    /// Has the other end find its path, and connects the load.
    fn prepare(
        &mut self,
        ask: Ask,
        interrupt: &Interrupt,
        stop: &AtomicBool,
    ) -> anyhow::Result<Option<(Load, Flow)>> {
        let load = ask.load;
        self.channel.send(&Message::Ask(ask))?;
        let until = Instant::now() + DISCOVER;
        let Ready { sink } = loop {
            interrupt.check()?;
            match self.channel.receive(Instant::now() + LOOK) {
                Ok(Some(Message::Ready(ready))) => break ready,
                Ok(Some(Message::Refused(why))) => bail!("{why}"),
                Ok(Some(Message::Alive)) => {}
                Ok(Some(_)) => bail!("it says something out of turn"),
                Ok(None) if Instant::now() < until => {}
                Ok(None) => return Err(ChannelError::Silent.into()),
                Err(error) => return Err(error.into()),
            }
        };
        let (Some(load), Some(sink)) = (load, sink) else {
            return match load {
                Some(_) => bail!("it names no port for the load"),
                None => Ok(None),
            };
        };
        let mut to = self.channel.stream().peer_addr()?;
        to.set_port(sink.port);
        let flow = reach(transport(load.kind), to, &sink.token.0, stop)?;
        Ok(Some((load, flow)))
    }
}

/// This end's part of the load.
fn carry(flow: &Flow, load: Load, stop: &AtomicBool) {
    match load.reverse {
        true => flow.receive(&Meter::default(), stop),
        false => flow.send(load.rate, stop),
    }
}

/// Keeps in touch until the other end has told what it measured. The load ends with the touch.
fn follow(
    channel: &mut Channel,
    over: &AtomicBool,
    stop: &AtomicBool,
    interrupt: &Interrupt,
) -> anyhow::Result<Evidence> {
    let raise = Raise(stop);
    let mut pulse = Instant::now();
    let mut ended = false;
    loop {
        if interrupt.is_raised() && !ended {
            ended = true;
            stop.store(true, Ordering::Relaxed);
            channel.send(&Message::End)?;
        }
        if pulse.elapsed() >= PULSE {
            pulse = Instant::now();
            channel.send(&Message::Alive)?;
        }
        match channel.receive(Instant::now() + LOOK)? {
            Some(Message::Told(told)) => {
                // This end may have begun a little later; its load goes on until it is through.
                while !over.load(Ordering::Relaxed) && !interrupt.is_raised() {
                    std::thread::sleep(LOOK / 5);
                }
                drop(raise);
                return Ok(told.evidence()?);
            }
            Some(Message::Alive) => {}
            Some(Message::Refused(why)) => bail!("{why}"),
            Some(_) => bail!("it says something out of turn"),
            None if channel.heard().elapsed() > DEAD => bail!("it has fallen silent"),
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

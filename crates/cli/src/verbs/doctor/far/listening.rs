//! The end that listens: one session at a time, as long as the program runs.
//!
//! Every connection has a thread, and few may be at the handshake at once. Who comes through it and asks while nobody else is
//! served gets a session: this host is measured by the same code as its own doctor's, and the evidence told. A session ends
//! with its measurement, with its client, when that falls silent, or with the program.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use sd_notify::NotifyState;
use seikan_config::PresharedKey;
use seikan_diagnose::Evidence;
use seikan_diagnose::exchange::{Ask, LONGEST_ASK, Load, Message, Ready, Sink, Token, Told};
use seikan_load::Meter;
use seikan_observe::path::PathMap;
use seikan_sys::discover::{self, Subject};
use seikan_ui::Interrupt;

use super::channel::{Channel, PATIENCE};
use super::{Arguments, DEAD, LOOK, PULSE, Raise, forget_own, own_addresses, transport, tunnel_of};
use crate::screen::printable;
use crate::verbs::doctor::measure::{self, Options};

/// Connections that are served or may become so, at once; more are closed unheard.
const CONNECTIONS: usize = 8;
/// How long a client may take from what this end says to its beginning.
const BEGIN: Duration = Duration::from_secs(15);
/// How long a client may take to hear what was told.
const TAKE_IN: Duration = Duration::from_secs(60);

/// What all sessions share.
struct Server<'a> {
    key: PresharedKey,
    interface: Option<&'a str>,
    allow_load: bool,
    busy: AtomicBool,
    connections: AtomicUsize,
    interrupt: &'a Interrupt,
}

/// Serves until it is told to stop.
pub fn listen(
    arguments: &Arguments,
    interface: Option<&str>,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitCode> {
    let key = arguments.key()?;
    let listener = bind(&own_addresses(arguments.listen().unwrap_or_default())?)?;
    let line = format!("listening on {}", listener.local_addr()?);
    eprintln!("{line}");
    // Nobody is told where no service manager asked.
    let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(&line)]);
    let server = Server {
        key,
        interface,
        allow_load: arguments.allow_load,
        busy: AtomicBool::new(false),
        connections: AtomicUsize::new(0),
        interrupt,
    };
    std::thread::scope(|scope| {
        while !interrupt.is_raised() {
            match listener.accept() {
                Ok((stream, from)) => {
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    let Some(place) = server.place() else {
                        continue;
                    };
                    let server = &server;
                    scope.spawn(move || {
                        let _place = place;
                        server.serve(stream, from);
                    });
                }
                // Nobody yet; or an error of one connection, or want of descriptors, which do not end the service.
                Err(_) => {
                    let _ = interrupt.sleep(LOOK);
                }
            }
        }
    });
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    Ok(ExitCode::SUCCESS)
}

fn bind(addresses: &[SocketAddr]) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(addresses)
        .with_context(|| format!("cannot listen on {}", addresses[0]))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Counts a connection for as long as it lives.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The one session at a time.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Server<'_> {
    fn place(&self) -> Option<Place<'_>> {
        let place = Place(&self.connections);
        (self.connections.fetch_add(1, Ordering::Relaxed) < CONNECTIONS).then_some(place)
    }

    fn turn(&self) -> Option<Turn<'_>> {
        let free = !self.busy.swap(true, Ordering::Relaxed);
        free.then(|| Turn(&self.busy))
    }

    /// Who does not know the key, or asks nothing, goes without a word and without a line.
    fn serve(&self, stream: TcpStream, from: SocketAddr) {
        let Ok(()) = stream.set_nonblocking(false) else {
            return;
        };
        let Ok(mut channel) = Channel::listen(stream, &self.key, LONGEST_ASK) else {
            return;
        };
        let asked = channel.receive(Instant::now() + PATIENCE);
        let ask = match asked {
            Ok(Some(Message::Ask(ask))) => ask,
            Ok(_) => return,
            Err(error) => {
                let _ = channel.send(&Message::Refused(error.to_string()));
                return;
            }
        };
        let Some(_turn) = self.turn() else {
            let busy = "it is busy with another doctor; try again in a moment";
            let _ = channel.send(&Message::Refused(busy.into()));
            eprintln!("{from}: refused, busy with another");
            return;
        };
        match self.session(&mut channel, &ask, from) {
            Ok(told) => eprintln!("{from}: {told}"),
            Err(error) => {
                let _ = channel.send(&Message::Refused(format!("{error:#}")));
                eprintln!("{from}: {}", printable(&format!("{error:#}")));
            }
        }
    }

    /// Measures and tells; gives the line for the log.
    fn session(
        &self,
        channel: &mut Channel,
        ask: &Ask,
        from: SocketAddr,
    ) -> anyhow::Result<String> {
        let local = channel.stream().local_addr()?;
        if ask.load.is_some() && !self.allow_load {
            bail!("it takes no load: it was started without --allow-load");
        }
        let map = self.path(local)?;
        let interface = map.inner.clone().unwrap_or_default();
        let sink = ask
            .load
            .map(|load| seikan_load::Sink::open(transport(load.kind), local));
        let sink = sink.transpose()?;
        let mut token = Token([0; 16]);
        getrandom::fill(&mut token.0).context("the kernel gives no random bytes")?;
        let port = sink.as_ref().map(seikan_load::Sink::port).transpose()?;
        let told = port.map(|port| Sink { port, token });
        channel.send(&Message::Ready(Ready { sink: told }))?;
        let stop = AtomicBool::new(false);
        let evidence = std::thread::scope(|scope| {
            let _raise = Raise(&stop);
            if let Some((load, sink)) = ask.load.zip(sink) {
                let stop = &stop;
                scope.spawn(move || {
                    // Who does not come is missed by nobody: the client says so itself.
                    if let Ok(flow) = sink.accept(from.ip(), &token.0, stop) {
                        carry(&flow, load, stop);
                    }
                });
            }
            self.begin(channel)?;
            let mut evidence = self.measure(channel, map, ask)?;
            forget_own(&mut evidence, channel.stream())?;
            channel.send(&Message::Told(Box::new(Told::of(&evidence))))?;
            self.until_taken_in(channel);
            anyhow::Ok(evidence)
        })?;
        let with = match ask.load {
            Some(Load { reverse: false, .. }) => ", with load from there",
            Some(Load { reverse: true, .. }) => ", with load to there",
            None => "",
        };
        Ok(format!(
            "looked at {} for {:.1} s{with}",
            printable(&interface),
            evidence.seconds()
        ))
    }

    /// The path of the interface that was given, of the tunnel that the client came through, or of what there is.
    fn path(&self, local: SocketAddr) -> anyhow::Result<PathMap> {
        let tunnel = match self.interface {
            Some(name) => Some(name.to_owned()),
            None => tunnel_of(local.ip())?,
        };
        let subject = tunnel.map_or(Subject::Anything, Subject::Interface);
        Ok(discover::path(&subject)?)
    }

    fn begin(&self, channel: &mut Channel) -> anyhow::Result<()> {
        let until = Instant::now() + BEGIN;
        while Instant::now() < until {
            self.interrupt.check()?;
            match channel.receive(Instant::now() + LOOK)? {
                Some(Message::Begin) => return Ok(()),
                Some(Message::Alive) | None => {}
                Some(_) => bail!("it was ended before it began"),
            }
        }
        Err(anyhow!("it did not begin"))
    }

    /// Measures, in touch with the client: it ends early with that, or with this program.
    fn measure(&self, channel: &mut Channel, map: PathMap, ask: &Ask) -> anyhow::Result<Evidence> {
        let options = Options {
            length: Duration::from_secs(ask.seconds.into()),
            interval: Duration::from_millis(ask.interval.into()),
            probe: ask.probe,
            expected: None,
            level: ask.level,
            stacks: false,
        };
        let (over, session) = (AtomicBool::new(false), Interrupt::new());
        std::thread::scope(|scope| {
            let raise = Raise(&over);
            let (over, early) = (&over, &session);
            let followed = scope.spawn(move || {
                let followed = self.follow(channel, over, early);
                early.raise();
                followed
            });
            let measured = measure::whole(map, &options, &session);
            drop(raise);
            followed
                .join()
                .map_err(|_| anyhow!("a thread panicked"))??;
            Ok(measured?.evidence)
        })
    }

    fn follow(
        &self,
        channel: &mut Channel,
        over: &AtomicBool,
        session: &Interrupt,
    ) -> anyhow::Result<()> {
        let mut pulse = Instant::now();
        while !over.load(Ordering::Relaxed) {
            self.interrupt.check().context("it was stopped")?;
            if pulse.elapsed() >= PULSE {
                pulse = Instant::now();
                channel.send(&Message::Alive)?;
            }
            match channel.receive(Instant::now() + LOOK)? {
                Some(Message::End) => session.raise(),
                Some(Message::Alive) => {}
                Some(_) => bail!("it says something out of turn"),
                None if channel.heard().elapsed() > DEAD => bail!("the client has fallen silent"),
                None => {}
            }
        }
        Ok(())
    }

    /// The load goes on until the client is through, too.
    fn until_taken_in(&self, channel: &mut Channel) {
        let until = Instant::now() + TAKE_IN;
        while Instant::now() < until
            && !self.interrupt.is_raised()
            && channel.heard().elapsed() < DEAD
            && channel.receive(Instant::now() + LOOK).is_ok()
        {}
    }
}

/// This end's part of the load.
fn carry(flow: &seikan_load::Flow, load: Load, stop: &AtomicBool) {
    match load.reverse {
        true => flow.send(load.rate, stop),
        false => flow.receive(&Meter::default(), stop),
    }
}

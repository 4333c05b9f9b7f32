//! The server: one session at a time, until the program ends.
//!
//! Every connection has a thread; [`CONNECTIONS`] limits them. A client that completes the
//! handshake and sends a request gets a session if none is active: this host is measured by the
//! same code as for its own doctor, and the client gets the evidence. A session ends after its
//! measurement, when the client disconnects or is silent, or with the program.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use sd_notify::NotifyState;
use seikan_config::PresharedKey;
use seikan_diagnose::Evidence;
use seikan_diagnose::exchange::{
    LONGEST_REQUEST, Load, Measurement, Message, Ready, Request, Sink, Token,
};
use seikan_observe::path::PathMap;
use seikan_sys::discover::{self, Subject};
use seikan_ui::{Interrupt, Stop};

use super::channel::{Channel, HANDSHAKE_TIMEOUT};
use super::{
    Arguments, DEAD, KEEPALIVE, POLL, carry, listen_addresses, remove_own_flow, transport,
    tunnel_of,
};
use crate::screen::printable;
use crate::verbs::doctor::measure::{self, Options};

/// Concurrent connections; others are closed at once.
const CONNECTIONS: usize = 8;
/// Time in which a client has to start the measurement.
const BEGIN: Duration = Duration::from_secs(15);
/// Time in which a client has to receive the evidence.
const RECEIVE: Duration = Duration::from_secs(60);

/// State shared by all sessions.
struct Server<'a> {
    key: PresharedKey,
    interface: Option<&'a str>,
    allow_load: bool,
    /// Held by the active session.
    busy: Mutex<()>,
    interrupt: &'a Interrupt,
}

/// Serves until the interrupt is raised.
pub fn listen(
    arguments: &Arguments,
    interface: Option<&str>,
    interrupt: &Interrupt,
) -> anyhow::Result<ExitCode> {
    let key = arguments.key()?;
    let listener = bind(&listen_addresses(arguments.listen().unwrap_or_default())?)?;
    let line = format!("listening on {}", listener.local_addr()?);
    eprintln!("{line}");
    // Fails without a service manager, which is no error.
    let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(&line)]);
    let server = Server {
        key,
        interface,
        allow_load: arguments.allow_load,
        busy: Mutex::new(()),
        interrupt,
    };
    // Each connection has a clone.
    let connections = Arc::new(());
    std::thread::scope(|scope| {
        while !interrupt.is_raised() {
            match listener.accept() {
                Ok((stream, from)) => {
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    if Arc::strong_count(&connections) > CONNECTIONS {
                        continue;
                    }
                    let (server, connection) = (&server, Arc::clone(&connections));
                    scope.spawn(move || {
                        server.serve(stream, from);
                        drop(connection);
                    });
                }
                // No connection yet, an error of one connection, or no free descriptor: the service
                // continues.
                Err(_) => {
                    let _ = interrupt.sleep(POLL);
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

impl Server<'_> {
    /// Serves a connection. A client without the key or without a request gets no answer, and no
    /// line is logged.
    fn serve(&self, stream: TcpStream, from: SocketAddr) {
        let Ok(()) = stream.set_nonblocking(false) else {
            return;
        };
        let Ok(mut channel) = Channel::listen(stream, &self.key, LONGEST_REQUEST) else {
            return;
        };
        let request = match channel.receive(Instant::now() + HANDSHAKE_TIMEOUT) {
            Ok(Some(Message::Request(request))) => request,
            Ok(_) => return,
            Err(error) => {
                let _ = channel.send(&Message::Refused(error.to_string()));
                return;
            }
        };
        // A session that panicked has ended, too.
        let Some(_session) = (match self.busy.try_lock() {
            Ok(session) => Some(session),
            Err(TryLockError::Poisoned(session)) => Some(session.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }) else {
            let busy = "the doctor is busy with another session; try again later";
            let _ = channel.send(&Message::Refused(busy.into()));
            eprintln!("{from}: refused, busy with another session");
            return;
        };
        match self.session(&mut channel, &request, from) {
            Ok(line) => eprintln!("{from}: {line}"),
            Err(error) => {
                let _ = channel.send(&Message::Refused(format!("{error:#}")));
                eprintln!("{from}: {}", printable(&format!("{error:#}")));
            }
        }
    }

    /// Measures and sends the evidence; returns the line for the log.
    fn session(
        &self,
        channel: &mut Channel,
        request: &Request,
        from: SocketAddr,
    ) -> anyhow::Result<String> {
        let local = channel.stream().local_addr()?;
        if request.load.is_some() && !self.allow_load {
            bail!("load is not allowed: the listening doctor needs --allow-load");
        }
        let map = self.path(local)?;
        let interface = map.inner.clone().unwrap_or_default();
        let sink = request
            .load
            .map(|load| seikan_load::Sink::open(transport(load.kind), (local.ip(), 0).into()));
        let sink = sink.transpose()?;
        let mut token = Token([0; 16]);
        getrandom::fill(&mut token.0).context("the kernel gives no random bytes")?;
        let port = sink.as_ref().map(seikan_load::Sink::port).transpose()?;
        let announced = port.map(|port| Sink { port, token });
        channel.send(&Message::Ready(Ready { sink: announced }))?;
        let stop = Interrupt::new();
        let evidence = std::thread::scope(|scope| {
            let _raise = Stop(&stop);
            if let Some((load, sink)) = request.load.zip(sink) {
                let stop = &stop;
                scope.spawn(move || {
                    // If the client does not connect, it reports that itself.
                    if let Ok(flow) = sink.accept(Some(from.ip()), &token.0, stop) {
                        carry(&flow, load, load.reverse, stop);
                    }
                });
            }
            self.begin(channel)?;
            let mut evidence = self.measure(channel, map, request)?;
            remove_own_flow(&mut evidence, channel.stream())?;
            channel.send(&Message::Measurement(Box::new(Measurement::of(&evidence))))?;
            self.wait_for_client(channel);
            anyhow::Ok(evidence)
        })?;
        let with = match request.load {
            Some(Load { reverse: false, .. }) => ", with load from the client",
            Some(Load { reverse: true, .. }) => ", with load to the client",
            None => "",
        };
        Ok(format!(
            "measured {} for {:.1} s{with}",
            printable(&interface),
            evidence.seconds()
        ))
    }

    /// Returns the path of the interface of `--iface`, of the tunnel of the connection, or of the
    /// tunnel that carries most.
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
            match channel.receive(Instant::now() + POLL)? {
                Some(Message::Begin) => return Ok(()),
                Some(Message::Alive) | None => {}
                Some(_) => bail!("the client ended the session before the measurement"),
            }
        }
        Err(anyhow!("the client did not start the measurement"))
    }

    /// Measures while the client is connected; ends early with the client or with this program.
    fn measure(
        &self,
        channel: &mut Channel,
        map: PathMap,
        request: &Request,
    ) -> anyhow::Result<Evidence> {
        let options = Options {
            length: Duration::from_secs(request.seconds.into()),
            interval: Duration::from_millis(request.interval.into()),
            probe: request.probe,
            expected: None,
            level: request.level,
            stacks: false,
        };
        let (over, session) = (Interrupt::new(), Interrupt::new());
        std::thread::scope(|scope| {
            let raise = Stop(&over);
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
        over: &Interrupt,
        session: &Interrupt,
    ) -> anyhow::Result<()> {
        let mut last_keepalive = Instant::now();
        while !over.is_raised() {
            self.interrupt
                .check()
                .context("the listening doctor was stopped")?;
            if last_keepalive.elapsed() >= KEEPALIVE {
                last_keepalive = Instant::now();
                channel.send(&Message::Alive)?;
            }
            match channel.receive(Instant::now() + POLL)? {
                Some(Message::End) => session.raise(),
                Some(Message::Alive) => {}
                Some(_) => bail!("unexpected message"),
                None if channel.last_received().elapsed() > DEAD => {
                    bail!("no message of the client for {} s", DEAD.as_secs())
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Waits until the client has finished: it still receives the load.
    fn wait_for_client(&self, channel: &mut Channel) {
        let until = Instant::now() + RECEIVE;
        while Instant::now() < until
            && !self.interrupt.is_raised()
            && channel.last_received().elapsed() < DEAD
            && channel.receive(Instant::now() + POLL).is_ok()
        {}
    }
}

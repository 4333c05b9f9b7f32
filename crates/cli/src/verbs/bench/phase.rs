//! A phase of the measurement, in which both ends take part: connects two flows, and runs the load
//! over them.
//!
//! Each end has its own clock, so that no message has to pass a full path: the sender stops by
//! itself. The receiver counts in the measured window, and continues for a moment.

use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use seikan_diagnose::Recording;
use seikan_load::{
    Counter, Flow, LatencyOptions, LatencyReport, LoadError, Meter, Sink, Token, Transport,
    UdpOptions, answer, reach, receive_flood, round_trips, send_flood,
};
use seikan_observe::path::PathMap;
use seikan_sys::process::CpuClock;
use seikan_ui::{Interrupt, Stop};

use super::control::{Counts, Kind, Phase};
use crate::verbs::doctor::measure::{self, Options};

/// Load before the measured time, so that TCP has found its rate.
const WARM_UP: Duration = Duration::from_millis(500);
/// Load after the measured time: the windows of the two ends do not begin at the same instant.
const TAIL: Duration = Duration::from_millis(300);
/// Additional time of the receiver with the doctor, which needs a moment to start.
const DOCTOR_TAIL: Duration = Duration::from_millis(1_000);
/// Maximum round trip; a longer one counts as lost.
const LOST: Duration = Duration::from_secs(1);
/// Time between two requests for a round trip.
const INTERVAL: Duration = Duration::from_millis(10);
/// Lowest rate of a load, bits per second.
pub const SLOWEST: f64 = 1e4;
/// Payload of a datagram, bytes: fits into any tunnel in one piece.
pub const DATAGRAM: usize = 1_200;

/// The two flows of a phase.
#[derive(Debug)]
pub struct Flows {
    tcp: TcpStream,
    udp: UdpSocket,
}

/// The role of this process in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The end that connects, and measures round trips.
    Near,
    /// The end that listens, and echoes.
    Far,
}

/// Result of a phase at one end.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Its counts.
    pub counts: Counts,
    /// Round trips, at the near end.
    pub round_trips: Option<LatencyReport>,
    /// Measurement of the doctor, if one was requested.
    pub recording: Option<Recording>,
}

/// Returns the time for which a phase carries a load.
pub fn loaded(phase: &Phase) -> Duration {
    let tail = if phase.diagnose { DOCTOR_TAIL } else { TAIL };
    WARM_UP + Duration::from_secs_f64(phase.seconds) + tail
}

/// Opens the port at each of these addresses.
///
/// # Errors
/// The port is in use.
pub fn listen(at: &[IpAddr], port: u16) -> anyhow::Result<Vec<Sink>> {
    let open = |ip: &IpAddr| Sink::open(Transport::Tcp, (*ip, port).into());
    let sinks: Result<Vec<_>, _> = at.iter().map(open).collect();
    sinks.with_context(|| {
        format!("cannot open port {port}: another bench or program may use it; choose another with --port")
    })
}

/// Waits for the two flows with this token.
///
/// # Errors
/// They do not come.
pub fn accept(sinks: Vec<Sink>, token: &Token, interrupt: &Interrupt) -> anyhow::Result<Flows> {
    let found = Interrupt::new();
    let tcp = std::thread::scope(|scope| {
        let waiting = sinks.into_iter().map(|sink| {
            scope.spawn(|| {
                let flow = sink.accept(None, token, &found);
                if flow.is_ok() {
                    found.raise();
                }
                flow
            })
        });
        let waiting: Vec<_> = waiting.collect();
        let come = waiting
            .into_iter()
            .filter_map(|thread| thread.join().ok()?.ok());
        come.last()
    });
    let Some(Flow::Tcp(tcp)) = tcp else {
        return Err(anyhow!("no connection arrived at the port"));
    };
    interrupt.check()?;
    // Its address is proven by the connection: a flood cannot be directed at another host.
    let from = tcp.peer_addr()?.ip();
    let udp = Sink::open(Transport::Udp, tcp.local_addr()?)?;
    let Flow::Udp(udp) = udp.accept(Some(from), token, &Interrupt::new())? else {
        return Err(anyhow!("no datagram arrived at the port"));
    };
    Ok(Flows { tcp, udp })
}

/// Connects the two flows with this token.
///
/// # Errors
/// The port cannot be reached.
pub fn connect(to: IpAddr, port: u16, token: &Token) -> anyhow::Result<Flows> {
    let target = SocketAddr::new(to, port);
    let connect = |transport, name: &str| {
        let flow = reach(transport, target, token, &Interrupt::new());
        flow.map_err(|error| Blocked {
            address: to,
            port,
            transport: name.to_owned(),
            reason: error.to_string(),
        })
    };
    let tcp = connect(Transport::Tcp, "TCP")?;
    let udp = connect(Transport::Udp, "UDP")?;
    match (tcp, udp) {
        (Flow::Tcp(tcp), Flow::Udp(udp)) => Ok(Flows { tcp, udp }),
        _ => Err(anyhow!("a flow of another transport")),
    }
}

/// The port of the far end cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error(
    "{transport} port {port} of {address} does not answer ({reason}); open it there for TCP and UDP, such as with \
     `nft insert rule inet filter input meta l4proto '{{ tcp, udp }}' th dport {port} accept`, or choose an open one with \
     --port"
)]
pub struct Blocked {
    address: IpAddr,
    port: u16,
    transport: String,
    reason: String,
}

/// Carries the load of a phase. `map`: path of the tunnel at this end, if the flows pass it;
/// `seed`: the same at both ends.
///
/// # Errors
/// The interrupt was raised, or a socket failed.
pub fn carry(
    flows: &Flows,
    phase: &Phase,
    end: End,
    seed: u64,
    map: Option<PathMap>,
    interrupt: &Interrupt,
) -> anyhow::Result<Outcome> {
    let is_sender = (end == End::Near) != phase.reverse;
    let (stop, echo_stop) = (Interrupt::new(), Interrupt::new());
    let (meter, counter) = (Meter::default(), Counter::default());
    let pid = map.as_ref().and_then(|map| Some(map.program.as_ref()?.pid));
    let tcp = Flow::Tcp(flows.tcp.try_clone()?);
    let flood = UdpOptions {
        datagram: DATAGRAM,
        rate: phase.rate,
        seed,
        ..UdpOptions::default()
    };
    std::thread::scope(|scope| {
        let (stop, echo_stop) = (&stop, &echo_stop);
        let _guards = [Stop(stop), Stop(echo_stop)];
        let load = scope.spawn(|| match (phase.kind, is_sender) {
            (Kind::Idle, _) => Ok(()),
            (Kind::Tcp, true) => {
                tcp.send(phase.rate.map(|bits| bits / 1e6), stop);
                Ok(())
            }
            (Kind::Tcp, false) => {
                tcp.receive(&meter, stop);
                Ok(())
            }
            (Kind::Udp, true) => send_flood(&flows.udp, &flood, &counter, stop),
            (Kind::Udp, false) => receive_flood(&flows.udp, &flood, &counter, stop),
        });
        if phase.kind != Kind::Udp && end == End::Far {
            scope.spawn(|| answer(&flows.udp, echo_stop));
        }
        let started = Instant::now();
        interrupt.sleep(WARM_UP)?;
        let probes = (phase.kind != Kind::Udp && end == End::Near)
            .then(|| scope.spawn(|| probe(&flows.udp, phase, interrupt)));
        let doctor = map
            .filter(|_| phase.diagnose)
            .map(|map| scope.spawn(|| diagnose(map, phase, interrupt)));
        let bytes = || match phase.kind {
            Kind::Udp => counter.datagrams() * DATAGRAM as u64,
            Kind::Idle | Kind::Tcp => meter.bytes(),
        };
        let (clock, first) = (CpuClock::start(pid)?, bytes());
        interrupt.sleep(Duration::from_secs_f64(phase.seconds))?;
        let (used, last) = (clock.elapsed()?, bytes());
        // A receiver of a flood waits until the sender has stopped.
        let until = started + loaded(phase);
        let rest = if is_sender { Duration::ZERO } else { TAIL };
        interrupt.sleep_until(until + rest)?;
        stop.raise();
        let join = |_| anyhow!("a thread panicked");
        load.join().map_err(join)??;
        let round_trips = probes
            .map(|thread| thread.join().map_err(join))
            .transpose()?;
        let recording = doctor
            .map(|thread| thread.join().map_err(join))
            .transpose()?;
        if phase.kind != Kind::Udp && end == End::Far {
            interrupt.sleep_until(until + LOST)?;
        }
        Ok(Outcome {
            counts: Counts {
                seconds: used.wall.as_secs_f64(),
                bytes: last - first,
                datagrams: counter.datagrams(),
                host_cpu: used.machine.busy.as_secs_f64(),
                tunnel_cpu: pid.map(|_| used.processes.total().as_secs_f64()),
            },
            round_trips: round_trips.transpose()?,
            recording: recording.transpose()?,
        })
    })
}

fn probe(
    socket: &UdpSocket,
    phase: &Phase,
    interrupt: &Interrupt,
) -> Result<LatencyReport, LoadError> {
    let options = LatencyOptions {
        count: (phase.seconds / INTERVAL.as_secs_f64()) as u32,
        interval: INTERVAL,
        timeout: LOST,
        within: Some(Duration::from_secs_f64(phase.seconds)),
    };
    round_trips(socket, &options, interrupt)
}

fn diagnose(map: PathMap, phase: &Phase, interrupt: &Interrupt) -> anyhow::Result<Recording> {
    let options = Options {
        length: Duration::from_secs_f64(phase.seconds),
        interval: Duration::from_millis(100),
        probe: true,
        expected: None,
        level: 2,
        stacks: false,
    };
    measure::whole(map, &options, interrupt)
}

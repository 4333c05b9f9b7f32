//! `seikan lab hostile`: the throughput that an established flow keeps while attackers flood the
//! tunnel's port.
//!
//! Making the flood takes a processor, and receiving it takes the kernel's time, whatever the
//! target. So the flow is compared with the same flow while the same flood hits another port of the
//! same host, where a plain socket receives it. The difference is the tunnel's own part. Rounds are
//! interleaved, figures are medians.

mod flood;

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use clap::{Args, ValueEnum};
use seikan_load::stats::{Spread, ratio};
use seikan_load::{LatencyOptions, TcpOptions, ping, tcp_bulk};
use seikan_proto::keys::PublicKey;
use seikan_ui::{Interrupt, Progress};
use serde::Serialize;

use crate::arguments::{seconds, whole};
use crate::error::{Doing, LabError, Result, setup};
use crate::site::{Hosts, Link};
use crate::tunnel::{self, PORT, Running};

pub use flood::{Capture, Flood, Target, shoot};

/// Time for which genuine datagrams are collected.
const COLLECT: Duration = Duration::from_millis(300);
/// Time for a flood to reach its full rate, and for the flow to find its own.
const WARMUP: Duration = Duration::from_millis(500);

/// Options of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Args)]
pub struct HostileOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = whole(1..=100))]
    pub rounds: u32,
    /// Floods to send [default: all]
    #[arg(long, value_name = "FLOOD,...", value_delimiter = ',', default_values_t = Flood::value_variants().to_vec(), hide_default_value = true)]
    pub floods: Vec<Flood>,
}

/// A flow during a flood, in one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Shot {
    /// Throughput of the flow, in Gbit/s.
    pub gbit_per_second: f64,
    /// Hostile datagrams sent per second.
    pub datagrams_per_second: f64,
}

/// One kind of flood over all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct HostileRow {
    /// The tunnel.
    pub tunnel: String,
    /// The kind.
    pub flood: Flood,
    /// The flow in Gbit/s while the flood hits another port.
    pub baseline: Spread,
    /// The flow in Gbit/s while the flood hits the tunnel's port.
    pub under: Spread,
    /// Median of `under` divided by the median of `baseline`.
    pub ratio: Option<f64>,
    /// Median of hostile datagrams per second, to the other port and to the tunnel's port.
    pub datagrams_per_second: [f64; 2],
}

/// All kinds, in both protocols.
#[derive(Clone, Debug, Serialize)]
pub struct HostileReport {
    /// Options of the run.
    pub options: HostileOptions,
    /// The figures.
    pub rows: Vec<HostileRow>,
}

/// Measures all floods, and calls `progress` before every step.
///
/// # Errors
/// A tunnel does not start, or ends during a flood; [`LabError::Interrupted`].
pub fn hostile(
    options: &HostileOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<HostileReport> {
    let tunnels: Vec<_> = tunnel::all(0, None)
        .into_iter()
        .filter(|tunnel| tunnel.is_own() && tunnel.by_default())
        .collect();
    let steps = options.rounds as usize * tunnels.len() * options.floods.len();
    let mut shots: Vec<Vec<[Shot; 2]>> = vec![Vec::new(); tunnels.len() * options.floods.len()];
    let mut done = 0;
    for round in 0..options.rounds {
        for (t, tunnel) in tunnels.iter().enumerate() {
            let mut running = tunnel::start(tunnel, Link::default(), interrupt)?;
            let target = spy(tunnel.name(), &running, interrupt)?;
            for (f, &flood) in options.floods.iter().enumerate() {
                progress(Progress {
                    fraction: done as f64 / steps as f64,
                    step: format!("round {}  {}  {flood}", round + 1, tunnel.name()),
                });
                done += 1;
                let datagrams = target.datagrams(flood, u64::from(round));
                let mut shot = |at_tunnel| {
                    let shot =
                        under_fire(&running.hosts, &datagrams, at_tunnel, options, interrupt);
                    shot.and_then(|shot| running.check_alive().map(|()| shot))
                };
                // Alternate the order, so that neither port is always measured first.
                let pair = if round % 2 == 0 {
                    let baseline = shot(false)?;
                    [baseline, shot(true)?]
                } else {
                    let under = shot(true)?;
                    [shot(false)?, under]
                };
                shots[t * options.floods.len() + f].push(pair);
            }
        }
    }
    let names = tunnels
        .iter()
        .flat_map(|tunnel| options.floods.iter().map(|flood| (tunnel.name(), *flood)));
    let rows = names
        .zip(&shots)
        .filter_map(|((tunnel, flood), shots)| summarise(tunnel, flood, shots));
    Ok(HostileReport {
        options: options.clone(),
        rows: rows.collect(),
    })
}

fn summarise(tunnel: &str, flood: Flood, shots: &[[Shot; 2]]) -> Option<HostileRow> {
    let spread = |i: usize, figure: fn(&Shot) -> f64| {
        let figures = shots.iter().map(|pair| figure(&pair[i]));
        Spread::of(&figures.collect::<Vec<_>>())
    };
    let [baseline, under] = [0, 1].map(|i| spread(i, |shot| shot.gbit_per_second));
    let [slow, fast] = [0, 1].map(|i| spread(i, |shot| shot.datagrams_per_second));
    let (baseline, under) = (baseline?, under?);
    Some(HostileRow {
        tunnel: tunnel.to_owned(),
        flood,
        baseline,
        under,
        ratio: ratio(under.median, baseline.median),
        datagrams_per_second: [slow?.median, fast?.median],
    })
}

/// Returns an attacker's knowledge about host B: its public key, and datagrams captured on the path
/// to it.
fn spy(name: &str, running: &Running, interrupt: &Interrupt) -> Result<Target> {
    let hosts = &running.hosts;
    let mut capture = hosts.b.run(Capture::open)??;
    let seen = std::thread::scope(|scope| {
        let seen = scope.spawn(|| capture.datagrams(PORT, COLLECT));
        let pinged = ping(&running.ends(), &LatencyOptions::default(), interrupt);
        pinged.and_then(|_| seikan_load::join(seen))
    })?;
    let unknown = || setup(format!("{name} does not report its public key"));
    let status = running.status();
    let key = status
        .get(1)
        .and_then(|status| status["interface"]["public_key"].as_str())
        .and_then(|key| key.parse::<PublicKey>().ok());
    let mut target = Target {
        native: !name.ends_with("wireguard"),
        public_key: *key.ok_or_else(unknown)?.as_bytes(),
        genuine: Vec::new(),
    };
    let data = target.types()[3];
    target.genuine = seen;
    target
        .genuine
        .retain(|datagram| datagram.first() == Some(&data));
    if target.genuine.is_empty() {
        let unseen = format!("no datagram of {name} was seen on its way");
        return Err(setup(unseen));
    }
    Ok(target)
}

/// Measures one stream through the tunnel while A floods a port of B: the tunnel's, or one with a
/// plain socket.
fn under_fire(
    hosts: &Hosts,
    datagrams: &[Vec<u8>],
    at_tunnel: bool,
    options: &HostileOptions,
    interrupt: &Interrupt,
) -> Result<Shot> {
    let tcp = TcpOptions {
        warmup: WARMUP,
        duration: Duration::from_secs_f64(options.seconds),
        ..TcpOptions::default()
    };
    let open = |what| LabError::io(format!("open a UDP socket for {what}"));
    let drain = hosts
        .b
        .run(|| UdpSocket::bind(SocketAddr::new(hosts.b.address, 0)))?;
    let drain = drain.map_err(open("the other port"))?;
    let timeout = drain.set_read_timeout(Some(Duration::from_millis(50)));
    timeout.doing("set a read time-out")?;
    let port = if at_tunnel {
        PORT
    } else {
        drain.local_addr().doing("read a port")?.port()
    };
    let to = SocketAddr::new(hosts.b.address, port);
    let gun = hosts.a.run(|| {
        let socket = UdpSocket::bind(SocketAddr::new(hosts.a.address, 0))?;
        socket.connect(to).map(|()| socket)
    })?;
    let gun = gun.map_err(open("the flood"))?;
    let stop = Interrupt::new();
    let begin = std::time::Instant::now();
    std::thread::scope(|scope| {
        let shooting = scope.spawn(|| shoot(&gun, datagrams, &stop));
        scope.spawn(|| {
            let mut buffer = vec![0; 65_536];
            while !stop.is_raised() {
                // A timeout only means that there was no datagram.
                let _ = drain.recv(&mut buffer);
            }
        });
        let report = tcp_bulk(&hosts.through_tunnel(), &tcp, interrupt);
        let seconds = begin.elapsed().as_secs_f64();
        stop.raise();
        let sent = seikan_load::join(shooting)?;
        Ok(Shot {
            gbit_per_second: report?.gbit_per_second,
            datagrams_per_second: sent as f64 / seconds,
        })
    })
}

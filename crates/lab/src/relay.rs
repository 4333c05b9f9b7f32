//! `seikan lab relay`: two members of a mesh whose direct path comes and goes, and a relay.
//!
//! ```text
//! A 10.77.1.1 ---- 10.77.1.3 M 10.77.2.3 ---- 10.77.2.1 B
//!              coordinators, relay, coturn
//! ```
//! M is a router between A and B that forwards or does not; without forwarding, only the relay on M
//! reaches both. A TCP stream runs through the tunnel throughout. Each round measures four values:
//! the rate by the relay, the longest gap during the change to the direct path, the rate of the
//! direct path, and the gap after the direct path ends. A stream without a limit overflows the
//! relay's receive buffer; a slower stream shows the loss during the change alone.
//!
//! With coturn installed, it is the only relay of another mesh with members C and D, who are
//! attached to M in the same way. Then streams through seikan's relay and through coturn alternate, while
//! M does not forward. The processor time of relay and members shows which of them is the
//! bottleneck.

mod site;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use clap::Args;
use seikan_load::stats::{Spread, ratio};
use seikan_load::{LiveOptions, Meter};
use seikan_ui::{Interrupt, Progress};
use serde::Serialize;

use self::site::Site;
use crate::arguments::{seconds, whole};
use crate::cleanup::private_directory;
use crate::error::{Doing, Result, setup};
use crate::load::{live, wait_reachable};

/// Maximum time to wait for one event.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rate of the stream that shows the loss of a change, in Mbit/s: too little to fill a queue.
const PACED: f64 = 500.0;
/// Time until a stream reaches its rate after the path has changed.
const WARMUP: Duration = Duration::from_secs(2);

/// Options of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Args)]
pub struct RelayOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 3, value_parser = whole(1..=100))]
    pub rounds: u32,
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RelayRound {
    /// Rate through the relay, in Gbit/s.
    pub relayed: f64,
    /// Rate over the direct path, in Gbit/s.
    pub direct: f64,
    /// Time from the moment a direct path exists until both ends use it, in seconds.
    pub found_after: f64,
    /// Longest time without received data during that change, in seconds.
    pub stall: f64,
    /// Longest time without received data after the direct path ended, in seconds.
    pub outage: f64,
    /// Datagrams lost until the path changed to direct, including those of all the time on the
    /// relay.
    pub missing: Missing,
}

/// Lost datagrams, by location.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Missing {
    /// Datagrams that the ends reported missing to each other.
    pub reported: u64,
    /// Datagrams that the ends dropped.
    pub dropped: u64,
    /// Sends (up to 64 datagrams each) that the kernel dropped at the relay's full receive buffer.
    pub relay_queue: u64,
}

/// All rounds.
#[derive(Clone, Debug, Serialize)]
pub struct RelayReport {
    /// Options of the run.
    pub options: RelayOptions,
    /// Time from the first packet until an answer came through the relay, in seconds.
    pub first_answer: f64,
    /// Each round.
    pub rounds: Vec<RelayRound>,
    /// Losses of the same number of changes to the direct path, under a stream of 500 Mbit/s.
    pub paced: Vec<Missing>,
    /// Rate through the relay, in Gbit/s.
    pub relayed: Spread,
    /// Rate over the direct path, in Gbit/s.
    pub direct: Spread,
    /// Median through the relay divided by the median of the direct path.
    pub ratio: Option<f64>,
    /// Comparison with coturn, if it is installed.
    pub coturn: Option<CoturnReport>,
}

/// Alternating streams through `seikan relay` and through coturn.
#[derive(Clone, Debug, Serialize)]
pub struct CoturnReport {
    /// Results through Seikan's relay and through coturn, for each round.
    pub rounds: Vec<[Relayed; 2]>,
    /// Through Seikan's relay, in Gbit/s.
    pub ours: Spread,
    /// Through coturn, in Gbit/s.
    pub coturn: Spread,
    /// Median of Seikan's relay divided by the median of coturn.
    pub ratio: Option<f64>,
}

/// Rate of a stream through a relay, and its cost.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Relayed {
    /// Rate in Gbit/s.
    pub rate: f64,
    /// Processor time of the relay divided by elapsed time: the number of processors it kept busy.
    pub relay_busy: f64,
    /// The same ratio for the two members together: their tunnels and, with coturn, their TURN
    /// clients.
    pub members_busy: f64,
}

/// Measures all rounds, and calls `progress` before every step.
///
/// # Errors
/// A program does not start, or a path is not found; [`Interrupted`](crate::error::LabError::Interrupted).
pub fn relay(
    options: &RelayOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<RelayReport> {
    let dir = private_directory()?;
    // The services run as the daemons' user and must be able to enter their directories below it.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755))
        .doing("open the folder to the services")?;
    let site = Site::create(dir.path(), interrupt)?;
    let (ours, relay) = site.with_relay(interrupt)?;
    let started_at = Instant::now();
    wait_reachable(&site.ends(&ours), PATIENCE, interrupt, || {
        site.check_alive()
    })?;
    let first_answer = started_at.elapsed().as_secs_f64();
    let mut rounds = Vec::new();
    let coturn = site.with_coturn(interrupt)?;
    // Each round of the comparison, and of the slower stream, counts as one of four parts.
    let steps = options.rounds * if coturn.is_some() { 6 } else { 5 };
    let mut done = 0;
    let mut step = |round: u32, what: &str| {
        progress(Progress {
            fraction: f64::from(done) / f64::from(steps),
            step: format!("round {}  {what}", round + 1),
        });
        done += 1;
    };
    live(
        &site.ends(&ours),
        &LiveOptions::default(),
        interrupt,
        |meter| {
            for round in 0..options.rounds {
                step(round, "by the relay");
                site.wait_for(&ours, true, meter, interrupt)?;
                let relayed = rate(meter, options, interrupt)?;
                step(round, "a direct path opens");
                let (change, missing) = site.open(&ours, meter, interrupt)?;
                step(round, "directly");
                let direct = rate(meter, options, interrupt)?;
                step(round, "the direct path dies");
                site.middle.forward(false)?;
                let death = site.wait_for(&ours, true, meter, interrupt)?;
                rounds.push(RelayRound {
                    relayed,
                    direct,
                    found_after: change.time.as_secs_f64(),
                    stall: change.longest.as_secs_f64(),
                    outage: death.longest.as_secs_f64(),
                    missing,
                });
            }
            Ok(())
        },
    )?;
    let slower = LiveOptions {
        rate: Some(PACED),
        ..LiveOptions::default()
    };
    let paced = live(&site.ends(&ours), &slower, interrupt, |meter| {
        let mut all = Vec::new();
        for round in 0..options.rounds {
            step(round, "a direct path opens, 500 Mbit/s");
            site.wait_for(&ours, true, meter, interrupt)?;
            all.push(site.open(&ours, meter, interrupt)?.1);
            site.middle.forward(false)?;
        }
        Ok(all)
    })?;
    let mut compared = Vec::new();
    if let Some((theirs, coturn)) = &coturn {
        for round in 0..options.rounds {
            step(round, "by the relay, by coturn");
            compared.push([
                site.relayed(&ours, relay, options, interrupt)?,
                site.relayed(theirs, *coturn, options, interrupt)?,
            ]);
        }
    }
    let spread = |of: fn(&RelayRound) -> f64| spread(rounds.iter().map(of));
    let (relayed, direct) = (spread(|r| r.relayed)?, spread(|r| r.direct)?);
    Ok(RelayReport {
        options: *options,
        first_answer,
        paced,
        relayed,
        direct,
        ratio: ratio(relayed.median, direct.median),
        coturn: if compared.is_empty() {
            None
        } else {
            Some(CoturnReport::of(compared)?)
        },
        rounds,
    })
}

fn spread(all: impl Iterator<Item = f64>) -> Result<Spread> {
    Spread::of(&all.collect::<Vec<_>>()).ok_or_else(|| setup("nothing was measured"))
}

impl CoturnReport {
    fn of(rounds: Vec<[Relayed; 2]>) -> Result<CoturnReport> {
        let ours = spread(rounds.iter().map(|[ours, _]| ours.rate))?;
        let coturn = spread(rounds.iter().map(|[_, coturn]| coturn.rate))?;
        Ok(CoturnReport {
            ours,
            coturn,
            ratio: ratio(ours.median, coturn.median),
            rounds,
        })
    }
}

/// Returns the rate of the stream, in Gbit/s.
fn rate(meter: &Meter, options: &RelayOptions, interrupt: &Interrupt) -> Result<f64> {
    interrupt.sleep(WARMUP)?;
    let time = Duration::from_secs_f64(options.seconds);
    Ok(meter.rate_over(time, interrupt)? / 1000.0)
}

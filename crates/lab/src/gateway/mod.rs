//! `seikan lab gateway`: from a device that runs nothing of ours, through a gateway, to a remote host.
//!
//! A [`site`] is made anew for every row and round; a way brings packets over it; the loads of the bench run from the
//! device. Rounds are interleaved, figures are medians. The yardstick is our tunnel between two hosts that run it
//! themselves, without a gateway; the kernel's forwarding without a tunnel is the base of added latency.

mod figures;
pub mod naive;
pub mod site;
mod ways;

use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::bench::{Absent, Load, Plan, START_SECONDS, check_length, run_loads};
use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::Link;
use crate::load::{Ends, wait_reachable};
use crate::machine::{Machine, utc_now};
use crate::tunnel::seikan::Seikan;
use crate::tunnel::{self, READY_PATIENCE, Started, Tunnel, private_directory};

pub use figures::{GatewayReport, GatewayRound, GatewayRow, RowLoad};
use figures::{summarise, with_ratios};
use site::{Card, Lan, MAX_DEVICES, Site};
use ways::Way;

/// Name of the row that ratios refer to.
pub const YARDSTICK: &str = "host-to-host";
/// Name of the row that added latency refers to.
pub const FORWARDING: &str = "forwarding";

/// What to compare, and how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatewayOptions {
    /// Measured seconds per load.
    pub seconds: f64,
    /// Rounds over all rows.
    pub rounds: u32,
    /// Only the rows of these names; `None` takes all that are available.
    pub only: Option<Vec<String>>,
    /// Loads to run, from the device.
    pub loads: Vec<Load>,
    /// What the cards of the LAN do; the naive rows have plain ones whatever this says.
    pub card: Card,
    /// Load over IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Devices on the LAN, 1 to 100; all but the first are idle, and with more than one there is a switch.
    pub devices: u8,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            seconds: 4.0,
            rounds: 3,
            only: None,
            loads: vec![Load::Tcp1, Load::Rev],
            card: Card::Plain,
            ipv6: false,
            devices: 1,
        }
    }
}

impl GatewayOptions {
    fn plan(&self) -> Plan<'_> {
        Plan {
            loads: &self.loads,
            seconds: self.seconds,
        }
    }

    fn lan(&self) -> Lan {
        Lan {
            card: self.card,
            gro: true,
            rps: false,
            devices: self.devices,
        }
    }
}

/// A row of the comparison.
enum Row {
    /// Two hosts that run ours themselves.
    HostToHost(Seikan),
    /// A device behind a gateway.
    Gateway(Way),
}

impl Row {
    fn name(&self) -> &'static str {
        match self {
            Self::HostToHost(_) => YARDSTICK,
            Self::Gateway(way) => way.name(),
        }
    }

    fn is_own(&self) -> bool {
        match self {
            Self::HostToHost(_) => true,
            Self::Gateway(way) => way.is_own(),
        }
    }

    fn by_default(&self) -> bool {
        match self {
            Self::HostToHost(_) => true,
            Self::Gateway(way) => way.by_default(),
        }
    }

    fn version(&self) -> Option<String> {
        match self {
            Self::HostToHost(tunnel) => tunnel.version(),
            Self::Gateway(way) => way.version(),
        }
    }

    fn availability(&self, ipv6: bool) -> std::result::Result<(), String> {
        match self {
            Self::HostToHost(tunnel) => tunnel.availability(),
            Self::Gateway(way) => way.availability(ipv6),
        }
    }
}

/// Compares ways through a gateway; calls `progress` before every step.
///
/// # Errors
/// Options without meaning; [`LabError::Interrupted`]. A row's own failure is in the report.
pub fn gateway(
    options: &GatewayOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<GatewayReport> {
    check_length(options.rounds, &options.loads, options.seconds)?;
    if !(1..=MAX_DEVICES).contains(&options.devices) {
        return Err(LabError::Usage(format!(
            "{} devices: 1 to {MAX_DEVICES} are possible",
            options.devices
        )));
    }
    let (present, absent) = choose(options)?;
    let mut rounds: Vec<Vec<GatewayRound>> = present.iter().map(|_| Vec::new()).collect();
    let per_row = START_SECONDS + options.loads.len() as f64 * (options.seconds + 1.0);
    let total = per_row * present.len() as f64 * f64::from(options.rounds);
    let mut done = 0.0;
    for round in 1..=options.rounds {
        for (row, rounds) in present.iter().zip(&mut rounds) {
            let mut step = |within: f64, what: &str| {
                progress(Progress {
                    fraction: ((done + within) / total).min(1.0),
                    what: format!("round {round}/{}  {}  {what}", options.rounds, row.name()),
                });
            };
            rounds.push(measure(row, options, interrupt, &mut step)?);
            done += per_row;
        }
    }
    let rows = present
        .iter()
        .zip(rounds)
        .map(|(row, rounds)| summarise(row.name(), row.is_own(), row.version(), rounds));
    Ok(GatewayReport {
        date: utc_now(),
        machine: Machine::this(),
        options: options.clone(),
        rows: with_ratios(rows.collect()),
        absent,
    })
}

/// Brings a transparent gateway up and hands the device and the remote to `then`.
///
/// # Errors
/// What cannot be made or does not come up, and what `then` says.
pub(crate) fn behind(
    card: Card,
    interrupt: &Interrupt,
    then: &mut dyn FnMut(&Ends<'_>, &Started) -> Result<()>,
) -> Result<()> {
    let way = Way::Seikan {
        mode: ways::Mode::Transparent,
        crowd: false,
    };
    let dir = private_directory()?;
    let site = Site::create(&Lan {
        card,
        gro: true,
        rps: false,
        devices: 1,
    })?;
    let mut carriers = way.up(&site, dir.path(), interrupt)?;
    let sources = way.sources(false);
    let ends = Ends {
        client: &site.device,
        server: &site.remote,
        target: way.target(false),
        sources: &sources,
    };
    wait_reachable(&ends, READY_PATIENCE, interrupt, || carriers.check_alive())
        .map_err(|e| carriers.started.explain(e))?;
    let outcome = then(&ends, &carriers.started);
    carriers.check_alive().and(outcome)
}

/// The rows asked for that can run, and those that cannot.
fn choose(options: &GatewayOptions) -> Result<(Vec<Row>, Vec<Absent>)> {
    let mut all = vec![Row::HostToHost(Seikan::new("native", 0))];
    all.extend(ways::all().into_iter().map(Row::Gateway));
    let only = options.only.as_deref();
    let known: Vec<&str> = all.iter().map(Row::name).collect();
    if let Some(unknown) = only
        .unwrap_or_default()
        .iter()
        .find(|name| !known.contains(&name.as_str()))
    {
        return Err(LabError::Usage(format!(
            "there is no row `{unknown}`; known are {}",
            known.join(", ")
        )));
    }
    let (mut present, mut absent) = (Vec::new(), Vec::new());
    for row in all {
        let wanted = only.map_or(row.by_default(), |names| {
            names.iter().any(|name| name == row.name())
        });
        match row.availability(options.ipv6) {
            _ if !wanted => {}
            Ok(()) => present.push(row),
            Err(reason) => absent.push(Absent {
                name: row.name().to_owned(),
                reason,
            }),
        }
    }
    Ok((present, absent))
}

/// One row in one round. Only an interruption ends the run.
fn measure(
    row: &Row,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<GatewayRound> {
    step(0.0, "starting");
    let mut round = GatewayRound::default();
    let outcome = match row {
        Row::HostToHost(tunnel) => host_to_host(tunnel, &mut round, options, interrupt, step),
        Row::Gateway(way) => through_gateway(way, &mut round, options, interrupt, step),
    };
    match outcome {
        Err(LabError::Interrupted) => return Err(LabError::Interrupted),
        Err(error) => round.figures.error = Some(error.to_string()),
        Ok(()) => {}
    }
    Ok(round)
}

fn host_to_host(
    tunnel: &Seikan,
    round: &mut GatewayRound,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<()> {
    let mut running = tunnel::start(tunnel, Link::default(), interrupt)?;
    let (hosts, started) = running.parts();
    let mut ends = tunnel.ends(hosts);
    if options.ipv6 {
        ends.target = hosts.b.inner6;
    }
    let plan = options.plan();
    run_loads(&ends, started, &mut round.figures, plan, interrupt, step)
}

fn through_gateway(
    way: &Way,
    round: &mut GatewayRound,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<()> {
    // Dropped in the order programs, hosts, directory.
    let dir = private_directory()?;
    let site = Site::create(&way.lan(options.lan()))?;
    let mut carriers = way.up(&site, dir.path(), interrupt)?;
    let sources = way.sources(options.ipv6);
    let ends = Ends {
        client: &site.device,
        server: &site.remote,
        target: way.target(options.ipv6),
        sources: &sources,
    };
    wait_reachable(&ends, READY_PATIENCE, interrupt, || carriers.check_alive())
        .map_err(|e| carriers.started.explain(e))?;
    let (started, plan) = (&mut carriers.started, options.plan());
    run_loads(&ends, started, &mut round.figures, plan, interrupt, step)?;
    round.said = way.said(&carriers, &site, dir.path());
    carriers.check_alive()
}

//! `seikan lab gateway`: from a device without Seikan, through a gateway, to a remote host.
//!
//! Every row and round has a new [`site`], on which a carrier takes packets to the remote host; the
//! loads of the bench run from the device. Rounds are interleaved, figures are medians. The
//! reference is our tunnel between two hosts that run it themselves, without a gateway. Plain
//! forwarding of the kernel is the base of added latency.

mod figures;
mod mesh;
pub mod naive;
mod setup;
pub mod site;

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use seikan_load::Ends;
use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use crate::arguments::seconds;
use crate::bench::{Absent, Load, Plan, START_SECONDS, check_length, refuse_path_loads, run_loads};
use crate::cleanup::private_directory;
use crate::error::{LabError, Result, in_words};
use crate::host::Congestion;
use crate::link::Link;
use crate::load::wait_reachable;
use crate::machine::Machine;
use crate::tunnel::{self, READY_PATIENCE, Running, Started, Tunnel};

pub use figures::{GatewayReport, GatewayRound, GatewayRow, RowLoad};
use figures::{summarise, with_ratios};
use setup::{Carriers, Setup};
use site::{Lan, MAX_DEVICES, Mode, Nic, Site};

/// Name of the row that ratios refer to.
pub const YARDSTICK: &str = "host-to-host";
/// Name of the row that added latency refers to.
pub const FORWARDING: &str = "forwarding";

/// Options of a comparison of gateways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Args)]
pub struct GatewayOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Rows to measure [default: all that are installed]; run only if named: WireGuard
    /// implementations other than in Go, and Seikan with 1,000 devices and an address for each of
    /// 200 streams (seikan-transparent+1000, seikan-routed+1000)
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Option<Vec<String>>,
    /// Loads to run, from the device
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',', default_values_t = [Load::Tcp1, Load::Rev])]
    pub loads: Vec<Load>,
    /// NICs of the LAN; those of the naive encapsulator are always plain
    #[arg(long = "nic", value_name = "NIC", default_value_t = Nic::Plain, value_enum)]
    pub nic: Nic,
    /// Load over IPv6
    #[arg(long)]
    pub ipv6: bool,
    /// Make gateway and remote members of a mesh, each behind a NAT, and the device one of its
    /// devices
    #[arg(long)]
    #[serde(default)]
    pub mesh: bool,
    /// Devices on the LAN, all but one idle; more than one are joined by a switch
    #[arg(long, value_name = "DEVICES", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub devices: u8,
    /// Rate of every NIC in bit/s; `None`: as fast as the processors are.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Congestion control of all hosts, whatever this machine's default is
    #[arg(long, value_name = "NAME", default_value_t, value_enum)]
    pub congestion: Congestion,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            seconds: 4.0,
            rounds: 3,
            only: None,
            loads: vec![Load::Tcp1, Load::Rev],
            nic: Nic::Plain,
            ipv6: false,
            mesh: false,
            devices: 1,
            rate: None,
            congestion: Congestion::default(),
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
            nic: self.nic,
            gro: true,
            rps: false,
            devices: self.devices,
            rate: self.rate,
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
    refuse_path_loads(&options.loads)?;
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
                    step: format!("round {round}/{}  {}  {what}", options.rounds, row.name()),
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
    nic: Nic,
    interrupt: &Interrupt,
    then: &mut dyn FnMut(&Ends<'_>, &Started) -> Result<()>,
) -> Result<()> {
    let setup = Setup::Seikan {
        mode: Mode::Transparent,
        many: false,
    };
    let options = GatewayOptions {
        nic,
        ..GatewayOptions::default()
    };
    let then = &mut |ends: &Ends<'_>, carriers: &mut Carriers, _: &Site, _: &Path| {
        then(ends, &carriers.started)
    };
    through_gateway(&setup, &options, interrupt, then)
}

/// Returns the selected rows that can run, and those that cannot.
fn choose(options: &GatewayOptions) -> Result<(Vec<Setup>, Vec<Absent>)> {
    let all = setup::all();
    let only = options.only.as_deref();
    let known: Vec<&str> = all.iter().map(Setup::name).collect();
    if let Some(unknown) = only
        .unwrap_or_default()
        .iter()
        .find(|name| !known.contains(&name.as_str()))
    {
        return Err(LabError::Usage(format!(
            "unknown row `{unknown}`; known rows: {}",
            known.join(", ")
        )));
    }
    let (mut present, mut absent) = (Vec::new(), Vec::new());
    for row in all {
        let is_possible = !options.mesh || row.in_mesh();
        let wanted = only.map_or(row.by_default() && is_possible, |names| {
            names.iter().any(|name| name == row.name())
        });
        match row.availability(options.ipv6) {
            _ if !wanted => {}
            _ if !is_possible => absent.push(Absent {
                name: row.name().to_owned(),
                reason: "it does not run in a mesh".to_owned(),
            }),
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
    setup: &Setup,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<GatewayRound> {
    step(0.0, "starting");
    let mut round = GatewayRound::default();
    let GatewayRound { figures, said } = &mut round;
    let mut load = |ends: &Ends<'_>, started: &mut Started| {
        run_loads(ends, started, figures, options.plan(), interrupt, step)
    };
    let outcome = match setup {
        Setup::HostToHost(tunnel) if !options.mesh => {
            host_to_host(tunnel, options, interrupt, &mut load)
        }
        Setup::NaiveHosts(tunnel) => host_to_host(tunnel, options, interrupt, &mut load),
        _ => {
            let measure =
                &mut |ends: &Ends<'_>, carriers: &mut Carriers, site: &Site, dir: &Path| {
                    load(ends, &mut carriers.started)?;
                    *said = setup.said(carriers, site, dir);
                    Ok(())
                };
            through_gateway(setup, options, interrupt, measure)
        }
    };
    round.figures.error = in_words(outcome)?.err();
    Ok(round)
}

fn host_to_host(
    tunnel: &Arc<dyn Tunnel>,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    load: &mut dyn FnMut(&Ends<'_>, &mut Started) -> Result<()>,
) -> Result<()> {
    let link = Link {
        rate: options.rate,
        congestion: options.congestion,
        ..Link::default()
    };
    let Running {
        hosts, mut started, ..
    } = tunnel::start(tunnel, link, interrupt)?;
    let mut ends = tunnel.ends(&hosts);
    if options.ipv6 {
        ends.target = hosts.b.inner6;
    }
    load(&ends, &mut started)
}

/// Brings a gateway up and hands the device and the remote to `then`.
fn through_gateway(
    setup: &Setup,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    then: &mut dyn FnMut(&Ends<'_>, &mut Carriers, &Site, &Path) -> Result<()>,
) -> Result<()> {
    // Dropped in the order programs, hosts, directory.
    let dir = private_directory()?;
    let lan = setup.lan(options.lan());
    let site = if options.mesh {
        Site::behind_nats(&lan)?
    } else {
        Site::create(&lan)?
    };
    // Without a device, the load is between the two members.
    let from = match setup {
        Setup::HostToHost(_) => &site.gateway,
        _ => &site.device,
    };
    for host in [from, &site.remote] {
        host.set_congestion_control(options.congestion)?;
    }
    let mut carriers = setup.up(&site, dir.path(), options.ipv6, interrupt)?;
    let sources = setup.sources(options.ipv6);
    let ends = Ends {
        sources: &sources,
        ..from.to(&site.remote, carriers.target)
    };
    wait_reachable(&ends, READY_PATIENCE, interrupt, || carriers.check_alive())
        .map_err(|e| carriers.started.explain(e))?;
    then(&ends, &mut carriers, &site, dir.path())?;
    carriers.check_alive()
}

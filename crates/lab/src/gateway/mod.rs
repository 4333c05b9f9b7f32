//! `seikan lab gateway`: from a device without Seikan, through a gateway, to a remote host.
//!
//! Every row and round has a new [`site`], on which a carrier takes packets to the remote host; the
//! loads of the bench run from the device. Rounds are interleaved, figures are medians. The
//! reference is our tunnel between two hosts that run it themselves, without a gateway. Plain
//! forwarding of the kernel is the base of added latency.

mod mesh;
pub mod naive;
mod setup;
pub mod site;

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use seikan_load::{Ends, LatencyReport};
use seikan_ui::{Interrupt, Progress};
use serde::Serialize;

use crate::arguments::{defaults, seconds, whole};
use crate::bench::{
    Comparison, Load, Plan, Round, Rounds, Row, check_length, choose, refuse_path_loads, run_loads,
    summarise, with_ratios,
};
use crate::cleanup::private_directory;
use crate::error::{Result, in_words, setup, usage};
use crate::site::{Congestion, Link};
use crate::tunnel::{self, Running, Started, Tunnel};

pub use crate::bench::FORWARDING;
use setup::{Carriers, Setup, Way};
use site::{Lan, MAX_DEVICES, Mode, Nic, Site};

/// Name of the row that ratios refer to.
pub const YARDSTICK: &str = "host-to-host";

/// Options of a comparison of gateways.
#[derive(Clone, Debug, PartialEq, Serialize, Args)]
pub struct GatewayOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = whole(1..=100))]
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
    pub mesh: bool,
    /// Devices on the LAN, all but one idle; more than one are joined by a switch
    #[arg(long, value_name = "DEVICES", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub devices: u8,
    /// Rate of every NIC in bit/s; `None`: as fast as the processors are.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Congestion control of all hosts, whatever this machine's default is
    #[arg(long, value_name = "NAME", default_value_t, value_enum)]
    pub congestion: Congestion,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        defaults()
    }
}

/// A comparison of gateways.
pub type GatewayReport = Comparison<GatewayOptions>;

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
            devices: self.devices,
            rate: self.rate,
            congestion: self.congestion,
            nats: self.mesh,
            ..Lan::default()
        }
    }
}

/// Compares the rows; calls `progress` before every step.
///
/// # Errors
/// Options without meaning; [`Interrupted`](crate::error::LabError::Interrupted). A row's own failure is in the report.
pub fn gateway(
    options: &GatewayOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<GatewayReport> {
    check_length(options.rounds, &options.loads, options.seconds)?;
    refuse_path_loads(&options.loads)?;
    if !(1..=MAX_DEVICES).contains(&options.devices) {
        return Err(usage(format!(
            "cannot make {} devices: use 1 to {MAX_DEVICES}",
            options.devices
        )));
    }
    let (mesh, ipv6) = (options.mesh, options.ipv6);
    let is_possible = |row: &Setup| !mesh || row.in_mesh();
    let (present, absent) = choose(
        setup::all(),
        options.only.as_deref(),
        |row| &row.name,
        |row| row.by_default && is_possible(row),
        |row| {
            if !is_possible(row) {
                return Err(setup("it does not run in a mesh"));
            }
            row.availability(ipv6)
        },
    )?;
    let rounds = Rounds {
        count: options.rounds,
        each: options.plan().time(),
    };
    let name = |row: &Setup| row.name.clone();
    let measured = rounds.interleave(&present, name, progress, |row, _, step| {
        measure(row, options, interrupt, step)
    })?;
    let rows = present.iter().zip(measured).map(|(row, rounds)| {
        let median = |latency: &LatencyReport| latency.p50_us;
        summarise(&row.name, &*row.carrier, rounds, median)
    });
    let rows = with_added_latency(with_ratios(rows.collect(), YARDSTICK));
    Ok(Comparison::of(options.clone(), rows, absent))
}

/// Fills in the latency beyond plain forwarding, where that was measured. The row without a gateway
/// is left out, because its path has one hop less.
fn with_added_latency(mut rows: Vec<Row>) -> Vec<Row> {
    let forwarding = rows.iter().find(|row| row.name == FORWARDING);
    let forwarding = forwarding.and_then(|row| row.ping_us);
    for row in rows.iter_mut().filter(|row| row.name != YARDSTICK) {
        let both = row.ping_us.zip(forwarding);
        row.added_us = both.map(|(ping, base)| (ping.median - base.median) / 2.0);
    }
    rows
}

/// Brings a transparent gateway up and hands the device and the remote to `then`.
///
/// # Errors
/// The site or the gateway does not start; the error of `then`.
pub(crate) fn behind(
    nic: Nic,
    interrupt: &Interrupt,
    then: &mut dyn FnMut(&Ends<'_>, &Started) -> Result<()>,
) -> Result<()> {
    let setup = Setup::seikan(Mode::Transparent, false);
    let options = GatewayOptions {
        nic,
        ..GatewayOptions::default()
    };
    let then = &mut |ends: &Ends<'_>, carriers: &mut Carriers, _: &Site, _: &Path| {
        then(ends, &carriers.started)
    };
    through_gateway(&setup, &options, interrupt, then)
}

/// Measures one row in one round. Only an interruption ends the run.
fn measure(
    setup: &Setup,
    options: &GatewayOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<Round> {
    step(0.0, "starting");
    let (mut round, mut said) = (Round::default(), Vec::new());
    let mut load = |ends: &Ends<'_>, started: &mut Started| {
        run_loads(ends, started, &mut round, options.plan(), interrupt, step)
    };
    let outcome = match setup.way {
        Way::Hosts if !(options.mesh && setup.carrier.is_own()) => {
            host_to_host(&setup.carrier, options, interrupt, &mut load)
        }
        _ => {
            let measure =
                &mut |ends: &Ends<'_>, carriers: &mut Carriers, site: &Site, dir: &Path| {
                    load(ends, &mut carriers.started)?;
                    said = setup.said(carriers, site, dir)?;
                    Ok(())
                };
            through_gateway(setup, options, interrupt, measure)
        }
    };
    round.error = in_words(outcome)?.err();
    Ok(Round { said, ..round })
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
    let site = Site::create(&lan)?;
    // Without a device, the load runs between the two members.
    let from = match setup.way {
        Way::Hosts => &site.gateway,
        _ => &site.device,
    };
    let mut carriers = setup.up(&site, dir.path(), options.ipv6, interrupt)?;
    let sources = setup.sources(options.ipv6);
    let ends = Ends {
        sources: &sources,
        ..from.to(&site.remote, carriers.target)
    };
    carriers.started.wait(&ends, interrupt)?;
    then(&ends, &mut carriers, &site, dir.path())?;
    carriers.started.check_alive()
}

#[cfg(test)]
mod tests {
    use seikan_load::stats::Spread;

    use super::*;
    use crate::tunnel::raw::RAW_LINK;

    #[test]
    fn latency_is_beyond_forwarding() {
        let row = |(name, ping): (&str, f64)| Row {
            ping_us: Spread::of(&[ping]),
            ..summarise(name, &RAW_LINK, Vec::new(), |latency| latency.p50_us)
        };
        let rows = [(YARDSTICK, 70.0), (FORWARDING, 40.0), ("ours", 100.0)].map(row);
        let rows = with_added_latency(rows.into());
        let added: Vec<_> = rows.iter().map(|row| row.added_us).collect();
        assert_eq!(added, [None, Some(0.0), Some(30.0)]);
    }
}

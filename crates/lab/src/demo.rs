//! `seikan demo`: the product in one command on one machine.
//!
//! Two hosts and a link. It measures the raw link, then our tunnel in both protocols, then a device
//! without Seikan that reaches a host through a gateway: TCP in both directions, UDP, latency idle
//! and under load. Then it breaks the tunnel, and the doctor finds the cause and repairs it.
//! Nothing is left behind. Takes about a minute with the default options.

mod broken;

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use seikan_load::stats::ratio;
use seikan_load::{
    Direction, Ends, LatencyOptions, LatencyReport, TcpOptions, UdpOptions, UdpReport,
    loaded_latency, ping, tcp_bulk, udp_flood,
};
use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};
use serde::Serialize;

use crate::arguments::seconds;
use crate::error::{Result, in_words, setup};
use crate::gateway;
use crate::gateway::site::Nic;
use crate::machine::Machine;
use crate::program::need_tun;
use crate::site::Link;
use crate::tunnel::{self, Tunnel};

pub use broken::Chapter;

/// The tunnels shown. The first is the raw link, to which ratios refer.
const SHOWN: [&str; 3] = ["raw", "seikan-native", "seikan-wireguard"];
/// Name of the row of the device behind a gateway.
pub const GATEWAY: &str = "seikan-gateway";
/// Time between latency probes under load: rare enough not to be load itself.
const PROBE_INTERVAL: Duration = Duration::from_millis(10);
const WARMUP: Duration = Duration::from_millis(500);
/// Steps per tunnel, for the progress bar.
const STEPS: usize = 4;

/// Duration of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Args)]
pub struct DemoOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds::<60>)]
    pub seconds: f64,
}

/// Measurements of one tunnel, or of the raw link.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DemoRow {
    /// Name of the tunnel.
    pub name: String,
    /// TCP, one stream from A to B, in Gbit/s.
    pub forward_gbit_per_second: Option<f64>,
    /// TCP, one stream from B to A, in Gbit/s.
    pub reverse_gbit_per_second: Option<f64>,
    /// Forward throughput divided by the raw link's.
    pub ratio_to_raw: Option<f64>,
    /// Busy CPU seconds of the whole machine per Gbit, B to A.
    pub cpu_seconds_per_gbit: Option<f64>,
    /// UDP flood.
    pub udp: Option<UdpReport>,
    /// Round trips without load.
    pub idle: Option<LatencyReport>,
    /// Round trips during the transfer from A to B.
    pub loaded: Option<LatencyReport>,
    /// Time from the start of the tunnel to the first answer through it, in milliseconds.
    pub ready_ms: Option<f64>,
    /// Largest resident memory of a process of the tunnel, in bytes.
    pub peak_rss: Option<u64>,
    /// Output of `seikan status --json` at both ends of the tunnel, host A first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub status: Vec<serde_json::Value>,
    /// Error that ended the row.
    pub error: Option<String>,
}

/// The demonstration's result.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// When it ended, UTC.
    pub date: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// Options of the run.
    pub options: DemoOptions,
    /// The raw link, then our tunnel in each protocol.
    pub rows: Vec<DemoRow>,
    /// The broken tunnel, and the doctor's diagnosis.
    pub doctor: Option<Chapter>,
    /// Why no run of the doctor's part was convincing.
    pub doctor_error: Option<String>,
}

impl DemoReport {
    /// Whether anything failed.
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|r| r.error.is_some()) || self.doctor_error.is_some()
    }
}

/// Prepares a process without privileges: enters a user namespace in which it may make hosts. Does
/// nothing for root. Must be called before the process starts a second thread.
///
/// # Errors
/// No user namespaces, or no `/dev/net/tun`; the text says what to do.
pub fn enter_sandbox() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        seikan_sys::netns::unshare_user().map_err(|e| {
            setup(format!(
                "without root this needs a user namespace, which failed: {e}"
            ))
        })?;
    }
    need_tun()
}

/// Runs the demonstration; calls `progress` before every step.
///
/// # Errors
/// [`Interrupted`](crate::error::LabError::Interrupted); hosts that cannot be made; a raw link that does not work. The report
/// has the failures of single tunnels.
pub fn demo(
    options: &DemoOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<DemoReport> {
    let mut rows: Vec<DemoRow> = Vec::new();
    let shown = tunnel::all(0, None)
        .into_iter()
        .filter(|t| SHOWN.contains(&t.name()));
    let shows = (SHOWN.len() + 1) * STEPS;
    // The doctor's chapter takes as long as all the others.
    let share = 0.4;
    let mut report = |number: usize, name: &str, within: usize, what: &str| {
        let fraction = share * (number * STEPS + within) as f64 / shows as f64;
        progress(Progress {
            fraction,
            step: format!("{name}  {what}"),
        });
    };
    for (number, tunnel) in shown.enumerate() {
        let mut step = |within: usize, what: &str| report(number, tunnel.name(), within, what);
        let mut row = DemoRow {
            name: tunnel.name().to_owned(),
            ..DemoRow::default()
        };
        let shown = show(&tunnel, options, &mut row, interrupt, &mut step);
        if number == 0 {
            shown?;
        } else {
            row.error = in_words(shown)?.err();
        }
        rows.push(row);
    }
    let mut row = DemoRow {
        name: GATEWAY.to_owned(),
        ..DemoRow::default()
    };
    let mut step = |within: usize, what: &str| report(SHOWN.len(), GATEWAY, within, what);
    let shown = show_gateway(options, &mut row, interrupt, &mut step);
    row.error = in_words(shown)?.err();
    rows.push(row);
    let mut done = share;
    let mut step = |what: &str| {
        progress(Progress {
            fraction: done,
            step: format!("a broken tunnel  {what}"),
        });
        // Six steps, or more if it is played again.
        done += (1.0 - done) / 6.0;
    };
    let doctor = in_words(broken::play(interrupt, &mut step))?;
    let raw = rows.first().and_then(|r| r.forward_gbit_per_second);
    for row in &mut rows {
        let both = row.forward_gbit_per_second.zip(raw);
        row.ratio_to_raw = both.and_then(|(value, base)| ratio(value, base));
    }
    Ok(DemoReport {
        date: utc_now(),
        machine: Machine::this(),
        options: *options,
        rows,
        doctor_error: doctor.as_ref().err().cloned(),
        doctor: doctor.ok(),
    })
}

/// Measures one row.
fn show(
    tunnel: &Arc<dyn Tunnel>,
    options: &DemoOptions,
    row: &mut DemoRow,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(usize, &str),
) -> Result<()> {
    step(0, "starting");
    tunnel.availability()?;
    let mut running = tunnel::start(tunnel, Link::default(), interrupt)?;
    let ready = running.ready_after.as_secs_f64() * 1e3;
    let outcome = measure(&running.ends(), options, row, interrupt, step);
    row.peak_rss = running.started.peak_rss();
    row.ready_ms = row.peak_rss.map(|_| ready);
    row.status = running.status();
    // A tunnel that died explains the load that failed.
    running.check_alive().and(outcome)
}

/// The row of the device, which knows the remote by an address of its own network.
fn show_gateway(
    options: &DemoOptions,
    row: &mut DemoRow,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(usize, &str),
) -> Result<()> {
    step(0, "starting");
    gateway::behind(Nic::Whole, interrupt, &mut |ends, started| {
        let outcome = measure(ends, options, row, interrupt, step);
        row.peak_rss = started.peak_rss();
        outcome
    })
}

fn measure(
    ends: &Ends<'_>,
    options: &DemoOptions,
    row: &mut DemoRow,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(usize, &str),
) -> Result<()> {
    let duration = Duration::from_secs_f64(options.seconds);
    let tcp = TcpOptions {
        warmup: WARMUP,
        duration,
        ..TcpOptions::default()
    };
    step(0, "idle latency");
    row.idle = Some(ping(ends, &LatencyOptions::default(), interrupt)?);
    step(1, "TCP from A to B, and latency meanwhile");
    let forward = loaded_latency(ends, &tcp, ping, PROBE_INTERVAL, interrupt)?;
    row.forward_gbit_per_second = Some(forward.gbit_per_second);
    row.loaded = Some(forward.latency);
    step(2, "TCP from B to A");
    let reverse = TcpOptions {
        direction: Direction::Reverse,
        ..tcp
    };
    let reverse = tcp_bulk(ends, &reverse, interrupt)?;
    row.reverse_gbit_per_second = Some(reverse.gbit_per_second);
    row.cpu_seconds_per_gbit = reverse.cpu_seconds_per_gbit;
    step(3, "UDP flood from A to B");
    let udp = UdpOptions {
        duration: duration / 2,
        ..UdpOptions::default()
    };
    row.udp = Some(udp_flood(ends, &udp, interrupt)?);
    Ok(())
}

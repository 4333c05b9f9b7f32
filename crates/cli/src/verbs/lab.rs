//! `seikan lab`: the test bench.

mod coordinators;
mod cost;
mod crowd;
mod mesh;
mod nat;
mod reproduce;
mod scenario;
mod score;
mod subjects;

use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use ipnet::Ipv4Net;
use seikan_lab::gateway::naive::{Inside, Naive, NaiveOptions};
use seikan_lab::hostile::Flood;
use seikan_lab::report::{ProgressBar, Sheet, Style, html, svg, terminal};
use seikan_lab::{BenchOptions, GatewayOptions, HostileOptions, Interrupt, LabError, RelayOptions};

use crate::output;

/// What `lab` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab bench               measure every tunnel on PATH side by side\n  \
    sudo seikan lab gateway             from a device that runs nothing of ours, through a gateway\n  \
    sudo seikan lab hostile             what flows keep while strangers flood\n  \
    sudo seikan lab run shaper          a tunnel made slow, and what the doctor says\n  \
    sudo seikan lab reproduce queue     what others have published, done again\n  \
    sudo seikan lab relay               a flow by a relay, and while its path changes\n  \
    sudo seikan lab nat                 which pairs find a direct path through which NATs\n  \
    sudo seikan lab crowd               many daemons, and a thousand members beside them\n  \
    seikan lab mesh                     a thousand members at one coordinator\n  \
    seikan lab coordinators             the same at three over etcd, of which some are killed")]
pub struct Arguments {
    #[command(subcommand)]
    verb: LabVerb,
}

/// What the lab does.
#[derive(Debug, Subcommand)]
pub enum LabVerb {
    /// Measure tunnels side by side, rounds interleaved
    Bench(BenchArguments),
    /// Measure ways from a device through a gateway, rounds interleaved
    Gateway(GatewayArguments),
    /// Run one end of the naive encapsulator, a fault to compare with and to find
    #[command(hide = true)]
    Naive(NaiveArguments),
    /// Carry frames between two TAP devices, with faults
    #[command(hide = true)]
    Wire(subjects::WireArguments),
    /// Run one end of the crude tunnel, sick in chosen ways
    #[command(hide = true)]
    Crude(subjects::CrudeArguments),
    /// Measure what flows keep while strangers flood the tunnel's port
    Hostile(HostileArguments),
    /// Make a tunnel slow and ask the doctor why
    Run(scenario::RunArguments),
    /// Make tunnels slow in every way and count how often the doctor is right
    Score(score::ScoreArguments),
    /// Measure what looking costs a tunnel's throughput
    Cost(cost::CostArguments),
    /// Have many members join one coordinator, and change
    Mesh(mesh::MeshArguments),
    /// Kill a coordinator and a member of etcd while members change
    Coordinators(coordinators::CoordinatorsArguments),
    /// Measure a flow by a relay and directly, and while the path changes
    Relay(RelayArguments),
    /// Have pairs of hosts find each other through NATs, and compare with theory
    Nat(nat::NatArguments),
    /// Have many daemons in one mesh with a thousand members beside, and measure what they need
    Crowd(crowd::CrowdArguments),
    /// Do again what others have published about slow tunnels, and ask the doctor
    Reproduce(reproduce::ReproduceArguments),
}

/// What `lab hostile` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab hostile --rounds 3 --floods garbage,replayed")]
pub struct HostileArguments {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// How often each measurement is made
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these floods; all if left out
    #[arg(long, value_name = "FLOOD,...", value_delimiter = ',')]
    pub floods: Vec<Flood>,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// What `lab relay` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab relay --rounds 5 --seconds 4")]
pub struct RelayArguments {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// How often each measurement is made
    #[arg(long, value_name = "ROUNDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
}

/// What `lab bench` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab bench --rounds 5 --seconds 4 --json bench.json --plot bench.svg\n  \
    sudo seikan lab bench --only raw,native --loads tcp1,udp")]
pub struct BenchArguments {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// How often each measurement is made
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these tunnels; all that are found if left out. Ours with other people's at the far end (seikan+wireguard-go) run only when named
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these loads; tcp1, tcp4, rev and udp if left out
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',')]
    pub loads: Vec<Load>,
    /// Measure Seikan also with so many peers that are never heard of
    #[arg(long, value_name = "PEERS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub idle_peers: u32,
    /// Take the offloads away from the link, as on a plain card
    #[arg(long)]
    pub no_offload: bool,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Draw the medians as a picture
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    pub plot: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// What `lab gateway` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab gateway --rounds 5 --seconds 4 --json gateway.json\n  \
    sudo seikan lab gateway --only host-to-host,seikan-transparent --loads tcp1,rev,udp")]
pub struct GatewayArguments {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// How often each measurement is made
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these ways; those that are found if left out. Run only when named: WireGuards that are not in Go, and ours with 1,000 devices configured and an address for each of 200 streams (seikan-transparent+1000, seikan-routed+1000)
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these loads, from the device; tcp1 (out) and rev (in) if left out
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',')]
    pub loads: Vec<Load>,
    /// What the LAN's cards do; the naive encapsulator always has plain ones
    #[arg(long, value_name = "CARD", default_value = "plain")]
    pub card: Card,
    /// Load over IPv6
    #[arg(long)]
    pub ipv6: bool,
    /// Devices on the LAN, all but one idle; more than one are joined by a switch
    #[arg(long, value_name = "DEVICES", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub devices: u8,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Draw the medians as a picture
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    pub plot: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// What the cards of the LAN do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Card {
    /// Packets of the MTU cross, which the gateway's kernel merges, as with a physical card
    Plain,
    /// Super-packets cross whole
    Whole,
}

impl From<Card> for seikan_lab::gateway::site::Card {
    fn from(card: Card) -> Self {
        match card {
            Card::Plain => Self::Plain,
            Card::Whole => Self::Whole,
        }
    }
}

/// What `lab naive` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.2 --lan lan0 --overlay 10.77.0.0/24\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.1 --tun naive0 --address 10.77.0.2/24 --network 192.168.1.0/24")]
pub struct NaiveArguments {
    /// Interface to the outside
    #[arg(long, value_name = "INTERFACE")]
    pub wan: String,
    /// Address of the other end
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Ipv4Addr,
    /// Carry what machines on this card send
    #[arg(
        long,
        value_name = "INTERFACE",
        requires = "overlay",
        conflicts_with = "tun",
        required_unless_present = "tun"
    )]
    pub lan: Option<String>,
    /// to these destinations
    #[arg(long, value_name = "NETWORK", default_value = "10.77.0.0/24")]
    pub overlay: Ipv4Net,
    /// Carry what this machine sends into a TUN device, which is made
    #[arg(long, value_name = "INTERFACE", requires = "address")]
    pub tun: Option<String>,
    /// with this address
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Option<Ipv4Net>,
    /// and these networks routed into it
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',')]
    pub network: Vec<Ipv4Net>,
}

/// What is sent through a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// One TCP stream
    Tcp1,
    /// Four TCP streams
    Tcp4,
    /// 128 TCP streams
    Tcp128,
    /// 200 TCP streams
    Tcp200,
    /// One TCP stream the other way
    Rev,
    /// One TCP stream each way at once
    Bidir,
    /// UDP, as much as goes
    Udp,
    /// UDP the other way, as much as goes
    UdpRev,
}

impl From<Load> for seikan_lab::bench::Load {
    fn from(load: Load) -> Self {
        match load {
            Load::Tcp1 => Self::Tcp1,
            Load::Tcp4 => Self::Tcp4,
            Load::Tcp128 => Self::Tcp128,
            Load::Tcp200 => Self::Tcp200,
            Load::Rev => Self::Rev,
            Load::Bidir => Self::Bidir,
            Load::Udp => Self::Udp,
            Load::UdpRev => Self::UdpRev,
        }
    }
}

/// Runs what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        LabVerb::Bench(arguments) => bench(arguments),
        LabVerb::Gateway(arguments) => gateway(arguments),
        LabVerb::Naive(arguments) => naive(arguments),
        LabVerb::Wire(arguments) => subjects::wire(arguments),
        LabVerb::Crude(arguments) => subjects::crude(arguments),
        LabVerb::Hostile(arguments) => hostile(arguments),
        LabVerb::Run(arguments) => scenario::play(arguments),
        LabVerb::Score(arguments) => score::count(arguments),
        LabVerb::Cost(arguments) => cost::measure(arguments),
        LabVerb::Mesh(arguments) => mesh::run(arguments),
        LabVerb::Coordinators(arguments) => coordinators::run(arguments),
        LabVerb::Relay(arguments) => relay(arguments),
        LabVerb::Nat(arguments) => nat::run(arguments),
        LabVerb::Crowd(arguments) => crowd::run(arguments),
        LabVerb::Reproduce(arguments) => reproduce::run(arguments),
    }
}

/// Runs the side-by-side measurement, shows it, and writes what was asked for.
fn bench(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let outcome = seikan_lab::bench(&options(arguments), &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let report = match outcome {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        outcome => outcome?,
    };
    let sheet = Sheet::from(&report);
    let files = [&arguments.json, &arguments.plot, &arguments.html];
    show(&report, &sheet, files)?;
    Ok(exit_code(report.failed()))
}

/// Runs the comparison of gateways, shows it, and writes what was asked for.
fn gateway(arguments: &GatewayArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let defaults = GatewayOptions::default();
    let options = GatewayOptions {
        seconds: f64::from(arguments.seconds),
        rounds: arguments.rounds,
        only: (!arguments.only.is_empty()).then(|| arguments.only.clone()),
        loads: match arguments.loads.as_slice() {
            [] => defaults.loads,
            some => some.iter().map(|&load| load.into()).collect(),
        },
        card: arguments.card.into(),
        ipv6: arguments.ipv6,
        devices: arguments.devices,
    };
    let outcome = seikan_lab::gateway(&options, &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let report = match outcome {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        outcome => outcome?,
    };
    let sheet = Sheet::from(&report);
    let files = [&arguments.json, &arguments.plot, &arguments.html];
    show(&report, &sheet, files)?;
    Ok(exit_code(report.failed()))
}

/// Runs one end of the naive encapsulator until a signal.
fn naive(arguments: &NaiveArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let inside = match (&arguments.lan, &arguments.tun, arguments.address) {
        (Some(card), ..) => Inside::Lan {
            card: card.clone(),
            overlay: arguments.overlay,
        },
        (None, Some(device), Some(address)) => Inside::Tun {
            device: device.clone(),
            address,
            networks: arguments.network.clone(),
        },
        _ => anyhow::bail!("either --lan, or --tun with --address"),
    };
    let mut naive = Naive::open(&NaiveOptions {
        wan: arguments.wan.clone(),
        peer: arguments.peer,
        inside,
    })?;
    naive.run(&interrupt)?;
    writeln!(
        io::stdout(),
        "{}",
        serde_json::to_string_pretty(&naive.counts())?
    )?;
    Ok(ExitCode::SUCCESS)
}

fn wrong_usage(error: LabError) -> anyhow::Result<ExitCode> {
    output::error(&error.into());
    Ok(ExitCode::from(2))
}

fn exit_code(failed: bool) -> ExitCode {
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Writes the files that were asked for (JSON, picture, page), and the sheet to standard output.
fn show(
    report: &impl serde::Serialize,
    sheet: &Sheet,
    [json, plot, page]: [&Option<PathBuf>; 3],
) -> anyhow::Result<()> {
    if let Some(file) = json {
        output::write_file(file, &(serde_json::to_string_pretty(report)? + "\n"))?;
    }
    if let Some(file) = plot {
        output::write_file(file, &svg(sheet)?)?;
    }
    if let Some(file) = page {
        output::write_file(file, &html(sheet)?)?;
    }
    write!(io::stdout(), "{}", terminal(sheet, Style::of_stdout()))?;
    Ok(())
}

/// Runs the measurement under fire and shows it.
fn hostile(arguments: &HostileArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let options = HostileOptions {
        seconds: f64::from(arguments.seconds),
        rounds: arguments.rounds,
        floods: match arguments.floods.as_slice() {
            [] => Flood::ALL.to_vec(),
            some => some.to_vec(),
        },
    };
    let report = seikan_lab::hostile(&options, &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let report = report?;
    if let Some(file) = &arguments.json {
        output::write_file(file, &(serde_json::to_string_pretty(&report)? + "\n"))?;
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "One TCP stream in Gbit/s while the flood hits another port (beside) and the tunnel's (under)\n\n\
         {:<18}{:<13}{:>8}{:>8}{:>7}{:>14}{:>14}",
        "tunnel", "flood", "beside", "under", "ratio", "beside, 1/s", "under, 1/s"
    )?;
    for row in &report.rows {
        let [beside, under] = row.datagrams_per_second;
        writeln!(
            out,
            "{:<18}{:<13}{:>8.2}{:>8.2}{:>7.2}{beside:>14.0}{under:>14.0}",
            row.tunnel,
            row.flood.name(),
            row.beside.median,
            row.under.median,
            row.ratio.unwrap_or(f64::NAN),
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures flows by a relay, shows them, and writes what was asked for.
fn relay(arguments: &RelayArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let options = RelayOptions {
        seconds: f64::from(arguments.seconds),
        rounds: arguments.rounds,
    };
    let report = seikan_lab::relay(&options, &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let report = report?;
    if let Some(file) = &arguments.json {
        output::write_file(file, &(serde_json::to_string_pretty(&report)? + "\n"))?;
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "One TCP stream between two members; the first answer came by the relay after {:.2} s\n\n\
         {:<7}{:>16}{:>16}{:>18}{:>14}{:>20}",
        report.first_answer,
        "round",
        "relayed, Gbit/s",
        "direct, Gbit/s",
        "direct found, s",
        "stall, ms",
        "direct dies, s"
    )?;
    for (number, round) in report.rounds.iter().enumerate() {
        writeln!(
            out,
            "{:<7}{:>16.2}{:>16.2}{:>18.1}{:>14.0}{:>20.1}",
            number + 1,
            round.relayed,
            round.direct,
            round.found_after,
            1000.0 * round.stall,
            round.outage,
        )?;
    }
    writeln!(
        out,
        "\nWhile it goes over to the direct path: datagrams that did not arrive, those that the ends dropped, and sends (up to 64\n\
         datagrams each) dropped at the relay's full receive buffer\n\n{:<7}{:>30}{:>30}",
        "round", "a stream of all it can", "a stream of 500 Mbit/s"
    )?;
    for (number, (round, paced)) in (1..).zip(report.rounds.iter().zip(&report.paced)) {
        let [full, paced] = [round.missing, *paced]
            .map(|of| format!("{} / {} / {}", of.reported, of.dropped, of.relay_queue));
        writeln!(out, "{number:<7}{full:>30}{paced:>30}")?;
    }
    if let Some(ratio) = report.ratio {
        let (relayed, direct) = (report.relayed, report.direct);
        writeln!(
            out,
            "\nmedian {:.2} by the relay ({:.2} to {:.2}), {:.2} directly ({:.2} to {:.2}): {ratio:.2} x",
            relayed.median, relayed.min, relayed.max, direct.median, direct.min, direct.max
        )?;
    }
    let Some(coturn) = &report.coturn else {
        writeln!(
            out,
            "\nno `turnserver` here to compare with: Debian's package coturn has it"
        )?;
        return Ok(ExitCode::SUCCESS);
    };
    writeln!(
        out,
        "\nIn turns with coturn, and how many processors each kept busy\n\n{:<7}{:>14}{:>9}{:>9}{:>18}{:>9}{:>9}",
        "round", "ours, Gbit/s", "relay", "members", "coturn, Gbit/s", "coturn", "members"
    )?;
    for (number, [ours, coturn]) in (1..).zip(&coturn.rounds) {
        writeln!(
            out,
            "{number:<7}{:>14.2}{:>9.2}{:>9.2}{:>18.2}{:>9.2}{:>9.2}",
            ours.rate,
            ours.relay_busy,
            ours.members_busy,
            coturn.rate,
            coturn.relay_busy,
            coturn.members_busy
        )?;
    }
    if let Some(ratio) = coturn.ratio {
        let (ours, theirs) = (coturn.ours, coturn.coturn);
        writeln!(
            out,
            "\nmedian {:.2} by ours ({:.2} to {:.2}), {:.2} by coturn ({:.2} to {:.2}): {ratio:.2} x",
            ours.median, ours.min, ours.max, theirs.median, theirs.min, theirs.max
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The lab's options for ours.
fn options(arguments: &BenchArguments) -> BenchOptions {
    let defaults = BenchOptions::default();
    let loads: Vec<seikan_lab::bench::Load> =
        arguments.loads.iter().map(|&load| load.into()).collect();
    BenchOptions {
        seconds: f64::from(arguments.seconds),
        rounds: arguments.rounds,
        only: (!arguments.only.is_empty()).then(|| arguments.only.clone()),
        loads: if loads.is_empty() {
            defaults.loads
        } else {
            loads
        },
        offload: !arguments.no_offload,
        idle_peers: arguments.idle_peers,
        ..defaults
    }
}

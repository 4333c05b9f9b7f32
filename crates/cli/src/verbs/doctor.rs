//! `seikan doctor`: finds out what makes a tunnel slow, by looking on for some seconds.
//!
//! [`measure`] finds the path and samples it, [`probe`] sends a handful of echo requests meanwhile, the rules of
//! `seikan_diagnose` name the cause, [`view`] writes it down and [`drawing`] draws the path. With `--prove` or `--fix`,
//! [`repair`] then tries what helps on this host. With `--peer`, [`far`] has another doctor
//! measure the other end meanwhile.

mod drawing;
mod far;
pub mod measure;
mod probe;
mod repair;
pub mod text;
mod view;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use seikan_diagnose::trial::{Attempt, LEAST_GAIN};
use seikan_diagnose::{Cause, Verdict, both, diagnose};
use seikan_lab::Interrupt;
use serde::Serialize;

use crate::fix::Fix;
use text::Page;

/// What `doctor` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan doctor                          find the tunnel of this host, and what is wrong with it\n  \
    sudo seikan doctor --iface tun0 --expect 900\n  \
    sudo seikan doctor --pid $(pidof openvpn) --json\n  \
    sudo seikan doctor --iface wg0 --map        draw the path only\n  \
    sudo seikan doctor --prove                  and prove it: change it, and back, in turns\n  \
    sudo seikan doctor --fix                    and try what helps; keep it if it does\n  \
    sudo seikan doctor --undo                   take back what was kept\n  \
    sudo seikan doctor --listen --key doctor.key --allow-load     on the other host, then here:\n  \
    sudo seikan doctor --peer 10.8.0.1 --key doctor.key --load    measure both ends under load\n\n\
    Works on any tunnel or virtual network. It looks at counters of the kernel while the tunnel is in use, so\n\
    let something run through it. Without --prove or --fix nothing is changed; no packet is captured, no payload read. It sends\n\
    a handful of ICMP echo requests through the tunnel (5 small ones, and some to find out which sizes pass,\n\
    2 s at most) unless --no-probe. Without root less can be seen, and it says what.\n\
    Ctrl-C ends it early, with what there is after a second. With --json: fields keep their names and\n\
    meaning as long as `version` stays the same (docs/DOCTOR.md).\n\
    Exit status: 0 if a diagnosis was made, also if nothing is wrong; 1 if none could be made. With\n\
    --exit-code, 3 if something is wrong or it is slow for an unknown reason.")]
pub struct Arguments {
    /// The tunnel's interface; if neither this nor --pid is given, it is looked for
    #[arg(long, value_name = "INTERFACE", conflicts_with = "pid")]
    iface: Option<String>,
    /// The tunnel's process
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// How long to look
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=3600))]
    seconds: u32,
    /// How much should go through, in Mbit/s: less by a tenth is slow
    #[arg(long, value_name = "MBIT", value_parser = megabits)]
    expect: Option<f64>,
    /// Time between two samples, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=1000))]
    interval: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw the path and end, without sampling
    #[arg(long)]
    map: bool,
    /// How deep to look: 0 counters that everybody may read, 1 dropped packets by reason too, 2 processor time by
    /// function too
    #[arg(long, value_name = "LEVEL", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=2))]
    level: u32,
    /// Send nothing
    #[arg(long)]
    no_probe: bool,
    /// Show every cause that was ruled out with its number, and everything that could not be seen
    #[arg(long, short)]
    verbose: bool,
    /// Try what helps on this host: shown first, measured with and without it in turns, kept only if it helps
    #[arg(long, group = "tries", conflicts_with = "map")]
    fix: bool,
    /// Prove it: make the change that should help and take it back, in turns
    #[arg(long, group = "tries", conflicts_with = "map")]
    prove: bool,
    /// Do not ask before --prove or --fix changes something
    #[arg(long, requires = "tries")]
    yes: bool,
    /// How much must be gained for a change to stay, in per cent
    #[arg(long, value_name = "PERCENT", requires = "fix", default_value_t = LEAST_GAIN * 100.0)]
    min_gain: f64,
    /// Take back everything that --fix kept in this network namespace, and end
    #[arg(long, conflicts_with_all = ["fix", "prove", "map", "iface", "pid"])]
    undo: bool,
    /// Exit with 3 if it is not healthy
    #[arg(long)]
    exit_code: bool,
    #[command(flatten)]
    far: far::Arguments,
}

/// The status of `--exit-code` for a tunnel that is not healthy.
const UNHEALTHY: u8 = 3;

/// Megabits per second on a command line.
pub fn megabits(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err("must be above 0, such as 900".into()),
    }
}

/// Looks, and says what was seen.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot examine the tunnel";
    if arguments.undo {
        return repair::undo();
    }
    let tries = arguments.fix || arguments.prove;
    if tries && arguments.json && !arguments.yes {
        bail!("it asks before it changes something, which --json leaves no room for: add --yes");
    }
    // Before the first thread.
    let fix = tries.then(Fix::prepare).transpose()?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    if arguments.far.listen().is_some() {
        return far::listen(&arguments.far, arguments.iface.as_deref(), &interrupt);
    }
    let peer = far::Peer::connect(&arguments.far)?;
    let iface = arguments.iface.clone();
    let towards = || peer.as_ref().filter(|_| arguments.pid.is_none())?.tunnel();
    let iface = iface.or_else(towards);
    let map = measure::path(iface.as_deref(), arguments.pid).context(FAILED)?;
    let page = Page::of_stdout();
    if arguments.map {
        match arguments.json {
            true => print_json(&map)?,
            false => print(&drawing::draw(&map, None, &page))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let expected = arguments.expect.map(|megabits| megabits * 1e6);
    let options = measure::Options {
        length: Duration::from_secs(arguments.seconds.into()),
        interval: Duration::from_millis(arguments.interval.into()),
        probe: !arguments.no_probe,
        expected: expected.or_else(|| arguments.far.offered()),
        level: arguments.level,
    };
    let (evidence, cost, far) = match peer {
        Some(peer) => peer.measure(map, &options, &interrupt),
        None => measure::measure(map, &options, &interrupt).map(|(near, cost)| (near, cost, None)),
    }
    .context(FAILED)?;
    let mut verdict = match &far {
        Some(far) => both(&evidence, far),
        None => diagnose(&evidence),
    };
    verdict.cost = cost;
    if !arguments.json {
        print(&view::render(&verdict, arguments.verbose, &page))?;
    }
    let mut report = Report {
        verdict,
        fixes: Vec::new(),
    };
    if let Some(fix) = fix {
        let options = repair::Options {
            yes: arguments.yes,
            quiet: arguments.json,
            keep: arguments.fix.then_some(arguments.min_gain / 100.0),
        };
        let verdict = &mut report.verdict;
        report.fixes = repair::repair(verdict, &evidence, &fix, &options, &interrupt)?;
    }
    let Report { verdict, .. } = &report;
    if arguments.json {
        print_json(&report)?;
    }
    Ok(
        match arguments.exit_code && verdict.cause != Cause::Healthy {
            true => ExitCode::from(UNHEALTHY),
            false => ExitCode::SUCCESS,
        },
    )
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    verdict: Verdict,
    /// What was tried, in order; empty without --prove or --fix.
    fixes: Vec<Attempt>,
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    writeln!(std::io::stdout(), "{json}")?;
    Ok(())
}

fn print(text: &str) -> anyhow::Result<()> {
    // Takes colours out unless it is a terminal, and under NO_COLOR.
    let mut out = anstream::AutoStream::auto(std::io::stdout()).lock();
    write!(out, "{text}")?;
    Ok(())
}

//! `seikan doctor`: measures a tunnel for some seconds and names the cause of a low throughput.
//!
//! [`measure`] finds the path and samples it (or a recording holds the samples), [`probe`] sends
//! some echo requests meanwhile, the rules of `seikan_diagnose` name the cause, [`view`] writes the
//! answer and [`drawing`] draws the path. With `--prove` or `--fix`, [`repair`] then tests the
//! remedies of this host. With `--peer`, [`far`] has another doctor measure the far end at the same
//! time.

mod calls;
pub mod drawing;
mod far;
pub mod loss_repair;
pub mod measure;
mod probe;
mod repair;
pub mod text;
pub mod view;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use seikan_diagnose::trial::{Attempt, LEAST_GAIN};
use seikan_diagnose::{Evidence, Recording, Severity, Verdict, both, concluded, diagnose};
use seikan_observe::path::PathMap;
use seikan_ui::Interrupt;
use serde::Serialize;
use text::Page;

use self::loss_repair::LossRepair;

use crate::fix::Fix;
use crate::output;
use crate::recording::{self, Draft};

/// Arguments of `seikan doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan doctor                          find the tunnel of this host and diagnose it\n  \
    sudo seikan doctor --iface tun0 --expect 900\n  \
    sudo seikan doctor --pid $(pidof openvpn) --json\n  \
    sudo seikan doctor --iface wg0 --map        draw the path only\n  \
    sudo seikan doctor --prove                  test the remedy, then revert it\n  \
    sudo seikan doctor --fix                    test the remedy, and keep it if it helps\n  \
    sudo seikan doctor --undo                   revert the changes that --fix kept\n  \
    sudo seikan doctor --record slow.parquet    also write the measurement to a file\n  \
    sudo seikan doctor --from slow.parquet      diagnose a recording, on any host\n  \
    sudo seikan doctor --listen --key doctor.key --allow-load     on the other host, then here:\n  \
    sudo seikan doctor --peer 10.8.0.1 --key doctor.key --load    measure both ends under load\n\n\
    The doctor works on any tunnel or virtual network. It reads counters of the kernel while the tunnel is in use: keep \
    traffic running. It changes nothing without --prove or --fix, captures no packet and reads no payload. Unless --no-probe, \
    it sends ICMP echo requests through the tunnel (5 small ones, and some to find the sizes that pass, for 2 s at most). \
    Without root, less data is available; the answer counts the missing sources.\n\
    Ctrl-C ends the measurement early; one second of data is needed. With --json, fields keep their names and meaning as \
    long as `version` stays the same (docs/reference/doctor.md).\n\
    Exit status: 0 if a diagnosis was made, also if nothing is wrong; 1 if none could be made. With --exit-code, 3 if there \
    is a fault or the tunnel is slow for an unknown reason; an idle tunnel is neither.")]
pub struct Arguments {
    #[command(flatten)]
    sampling: measure::SamplingArguments,
    /// Duration of the measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=3600))]
    seconds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw the path and end, without a measurement
    #[arg(long)]
    map: bool,
    /// Show the path, all remedies, every excluded cause with its figure, all unavailable data, and
    /// with level 3 the calls per packet
    #[arg(long, short)]
    verbose: bool,
    /// Test the remedies of this host: measure with and without each, alternating, and keep one that helps
    #[arg(long, group = "tries", conflicts_with = "map")]
    fix: bool,
    /// Test the remedies as --fix does, and revert them
    #[arg(long, group = "tries", conflicts_with = "map")]
    prove: bool,
    /// Do not ask before --prove or --fix changes a setting
    #[arg(long, requires = "tries")]
    yes: bool,
    /// Gain in per cent from which --fix keeps a change
    #[arg(long, value_name = "PERCENT", requires = "fix", default_value_t = LEAST_GAIN * 100.0)]
    min_gain: f64,
    /// Revert everything that --fix kept in this network namespace, and end
    #[arg(long, conflicts_with_all = ["fix", "prove", "map", "iface", "pid"])]
    undo: bool,
    /// Write the measurement to this file, with call stacks and the tests of --fix
    #[arg(long, value_name = "FILE", conflicts_with_all = ["map", "undo", "peer"])]
    record: Option<PathBuf>,
    /// Diagnose a file of `record` or --record instead of this host
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["iface", "pid", "seconds", "interval", "level", "no_probe", "tries", "undo", "record", "peer"]
    )]
    from: Option<PathBuf>,
    /// Exit with 3 if the verdict is neither healthy nor idle
    #[arg(long)]
    exit_code: bool,
    #[command(flatten)]
    far: far::Arguments,
}

/// The status of `--exit-code` for a tunnel that is not healthy.
const UNHEALTHY: u8 = 3;

/// Measures the tunnel and prints the diagnosis.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot examine the tunnel";
    if arguments.undo {
        return repair::undo();
    }
    let tries = arguments.fix || arguments.prove;
    if tries && arguments.json && !arguments.yes {
        bail!("cannot ask before a change with --json: add --yes");
    }
    if let Some(file) = &arguments.from {
        let mut recording = recording::read(file)?;
        let evidence = &mut recording.evidence;
        evidence.expected = arguments.sampling.tunnel.expected().or(evidence.expected);
        return from(&recording, arguments);
    }
    // The process that reverts changes is forked before the first thread starts.
    let fix = tries.then(Fix::prepare).transpose()?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let tunnel = &arguments.sampling.tunnel;
    if arguments.far.listen().is_some() {
        return far::listen(&arguments.far, tunnel.interface(), &interrupt);
    }
    let peer = far::Peer::connect(&arguments.far)?;
    let towards = peer.as_ref().and_then(far::Peer::tunnel);
    let map = tunnel.path_or(towards).context(FAILED)?;
    if arguments.map {
        return show_map(&map, arguments.json);
    }
    let draft = arguments.record.as_deref().map(Draft::create).transpose()?;
    let mut options = arguments
        .sampling
        .options(arguments.seconds, draft.is_some());
    options.expected = options.expected.or_else(|| arguments.far.offered());
    let mut watch = loss_repair::Watch::start(&map);
    let (mut recording, far) = match peer {
        Some(peer) => peer.measure(map, &options, &interrupt),
        None => measure::whole(map, &options, &interrupt).map(|near| (near, None)),
    }
    .context(FAILED)?;
    let first = verdict(&recording, far.as_ref());
    let loss_repair = watch.as_mut().and_then(loss_repair::Watch::next);
    let loss_repair = loss_repair.unwrap_or_default();
    if !arguments.json {
        let repaired = loss_repair::render(&loss_repair, first.cause, &Page::of_stdout());
        let screen = screen(&first, &recording, arguments);
        write!(output::stdout(), "{screen}{repaired}")?;
    }
    let mut tried = Ok(Vec::new());
    if let Some(fix) = fix {
        let options = repair::Options {
            yes: arguments.yes,
            quiet: arguments.json,
            keep: arguments.fix.then_some(arguments.min_gain / 100.0),
        };
        tried = repair::repair(&first, &recording.evidence, &fix, &options, &interrupt);
    }
    // The measurement is written even if a test of a remedy failed.
    if let Ok(attempts) = &tried {
        recording.attempts.clone_from(attempts);
    }
    if let Some(draft) = draft {
        recording.write(draft.file())?;
        draft.keep_for_user()?;
    }
    let report = Report {
        fixes: tried?,
        loss_repair,
        verdict: verdict(&recording, far.as_ref()),
    };
    if arguments.json {
        output::print_json(&report)?;
    }
    Ok(exit_code(&report.verdict, arguments))
}

/// Prints the diagnosis of a recording.
fn from(recording: &Recording, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.map {
        return show_map(&recording.evidence.map, arguments.json);
    }
    let report = Report {
        verdict: verdict(recording, None),
        fixes: recording.attempts.clone(),
        loss_repair: Vec::new(),
    };
    if arguments.json {
        output::print_json(&report)?;
    } else {
        let screen = screen(&report.verdict, recording, arguments);
        let tried = repair::tried(&report.fixes);
        write!(output::stdout(), "{screen}{tried}")?;
    }
    Ok(exit_code(&report.verdict, arguments))
}

fn screen(verdict: &Verdict, recording: &Recording, arguments: &Arguments) -> String {
    let page = Page::of_stdout();
    if arguments.verbose {
        return view::details(verdict, &page) + &calls::render(&recording.evidence);
    }
    let tries = arguments.fix || arguments.prove;
    view::summary(verdict, !tries && arguments.from.is_none(), &page)
}

/// Diagnoses a recording, together with the measurement of the far end if there is one.
pub fn verdict(recording: &Recording, far: Option<&Evidence>) -> Verdict {
    let near = &recording.evidence;
    let verdict = match far {
        Some(far) => both(near, far),
        None => diagnose(near),
    };
    Verdict {
        cost: recording.cost,
        ..concluded(verdict, near, &recording.attempts)
    }
}

fn show_map(map: &PathMap, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        output::print_json(map)?
    } else {
        let drawing = drawing::draw(map, None, &Page::of_stdout());
        write!(output::stdout(), "{drawing}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn exit_code(verdict: &Verdict, arguments: &Arguments) -> ExitCode {
    if arguments.exit_code && verdict.cause.spec().severity >= Severity::Warning {
        ExitCode::from(UNHEALTHY)
    } else {
        ExitCode::SUCCESS
    }
}

/// The diagnosis with the tests of its remedies.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    #[serde(flatten)]
    verdict: Verdict,
    /// Tests of remedies, in order; empty without --prove or --fix.
    fixes: Vec<Attempt>,
    /// Loss repair of the tunnel during the measurement, by peer; empty for other tunnels and recordings.
    loss_repair: Vec<LossRepair>,
}

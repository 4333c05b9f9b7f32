//! `seikan doctor`: finds out what makes a tunnel slow, by looking on for some seconds.
//!
//! [`measure`] finds the path and samples it (or a recording has it), [`probe`] sends a handful of echo requests meanwhile,
//! the rules of `seikan_diagnose` name the cause, [`view`] writes it down and [`drawing`] draws the path. With `--prove` or
//! `--fix`, [`repair`] then tries what helps on this host. With `--peer`, [`far`] has another doctor measure the other end
//! meanwhile.

mod calls;
pub mod drawing;
mod far;
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
use seikan_diagnose::{Cause, Evidence, Recording, Verdict, both, concluded, diagnose};
use seikan_observe::path::PathMap;
use seikan_ui::Interrupt;
use serde::Serialize;
use text::Page;

use crate::fix::Fix;
use crate::recording::{self, Draft};

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
    sudo seikan doctor --record slow.parquet    and keep what was measured\n  \
    seikan doctor --from slow.parquet           what that says, here or anywhere\n  \
    sudo seikan doctor --listen --key doctor.key --allow-load     on the other host, then here:\n  \
    sudo seikan doctor --peer 10.8.0.1 --key doctor.key --load    measure both ends under load\n\n\
    Works on any tunnel or virtual network. It looks at counters of the kernel while the tunnel is in use, so \
    let something run through it. Without --prove or --fix nothing is changed; no packet is captured, no payload read. It sends \
    a handful of ICMP echo requests through the tunnel (5 small ones, and some to find out which sizes pass, \
    2 s at most) unless --no-probe. Without root less can be seen, and it says what.\n\
    Ctrl-C ends it early, with what there is after a second. With --json: fields keep their names and \
    meaning as long as `version` stays the same (docs/reference/doctor.md).\n\
    Exit status: 0 if a diagnosis was made, also if nothing is wrong; 1 if none could be made. With \
    --exit-code, 3 if something is wrong or it is slow for an unknown reason; an idle tunnel is neither.")]
pub struct Arguments {
    #[command(flatten)]
    looking: measure::Looking,
    /// How long to look
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=3600))]
    seconds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw the path and end, without sampling
    #[arg(long)]
    map: bool,
    /// Show every cause that was ruled out with its number, everything that could not be seen, and with level 3 the calls
    /// per packet
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
    /// Keep what was measured in this file, with call stacks, and with what --fix tried
    #[arg(long, value_name = "FILE", conflicts_with_all = ["map", "undo", "peer"])]
    record: Option<PathBuf>,
    /// Read what `record` or --record kept, instead of looking at this host
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["iface", "pid", "seconds", "interval", "level", "no_probe", "tries", "undo", "record", "peer"]
    )]
    from: Option<PathBuf>,
    /// Exit with 3 if it is not healthy
    #[arg(long)]
    exit_code: bool,
    #[command(flatten)]
    far: far::Arguments,
}

/// The status of `--exit-code` for a tunnel that is not healthy.
const UNHEALTHY: u8 = 3;

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
    if let Some(file) = &arguments.from {
        let mut recording = recording::read(file)?;
        let evidence = &mut recording.evidence;
        evidence.expected = arguments.looking.which.expected().or(evidence.expected);
        return from(&recording, arguments);
    }
    // Before the first thread.
    let fix = tries.then(Fix::prepare).transpose()?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let which = &arguments.looking.which;
    if arguments.far.listen().is_some() {
        return far::listen(&arguments.far, which.interface(), &interrupt);
    }
    let peer = far::Peer::connect(&arguments.far)?;
    let towards = peer.as_ref().and_then(far::Peer::tunnel);
    let map = which.path_or(towards).context(FAILED)?;
    if arguments.map {
        return show_map(&map, arguments.json);
    }
    let draft = arguments.record.as_deref().map(Draft::create).transpose()?;
    let mut options = arguments
        .looking
        .options(arguments.seconds, draft.is_some());
    options.expected = options.expected.or_else(|| arguments.far.offered());
    let (mut recording, far) = match peer {
        Some(peer) => peer.measure(map, &options, &interrupt),
        None => measure::whole(map, &options, &interrupt).map(|near| (near, None)),
    }
    .context(FAILED)?;
    let first = verdict(&recording, far.as_ref());
    if !arguments.json {
        let mut screen = view::render(&first, arguments.verbose, &Page::of_stdout());
        if arguments.verbose {
            screen += &calls::render(&recording.evidence);
        }
        print(&screen)?;
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
    // What was measured is kept also where the remedies could not be tried to the end.
    if let Ok(attempts) = &tried {
        recording.attempts.clone_from(attempts);
    }
    if let Some(draft) = draft {
        recording.write(draft.file())?;
        draft.keep()?;
    }
    let report = Report {
        fixes: tried?,
        verdict: verdict(&recording, far.as_ref()),
    };
    if arguments.json {
        print_json(&report)?;
    }
    Ok(exit_code(&report.verdict, arguments))
}

/// Says what a recording shows.
fn from(recording: &Recording, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.map {
        return show_map(&recording.evidence.map, arguments.json);
    }
    let report = Report {
        verdict: verdict(recording, None),
        fixes: recording.attempts.clone(),
    };
    if arguments.json {
        print_json(&report)?;
    } else {
        let mut screen = view::render(&report.verdict, arguments.verbose, &Page::of_stdout());
        if arguments.verbose {
            screen += &calls::render(&recording.evidence);
        }
        print(&(screen + &repair::tried(&report.fixes)))?;
    }
    Ok(exit_code(&report.verdict, arguments))
}

/// What a recording says, with what was measured at the far end if it was.
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
    match json {
        true => print_json(map)?,
        false => print(&drawing::draw(map, None, &Page::of_stdout()))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn exit_code(verdict: &Verdict, arguments: &Arguments) -> ExitCode {
    match arguments.exit_code && !matches!(verdict.cause, Cause::Healthy | Cause::Idle) {
        true => ExitCode::from(UNHEALTHY),
        false => ExitCode::SUCCESS,
    }
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

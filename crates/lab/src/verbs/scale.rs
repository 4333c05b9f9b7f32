//! `seikan lab crowd`: many daemons in one mesh, and the cost of a large mesh for each.
//!
//! 1. the first packet to a known member, over links of several delays;
//! 2. real members join and send at once; pairs of them reach each other;
//! 3. simulated members join, until the requested number is reached. Then it measures the resources
//!    of a daemon without traffic and of one that talks to ten members, and the rate of a stream
//!    between two members. The last two are also measured while a tenth of the members change each
//!    minute.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use seikan_lab::arguments::whole;
use seikan_lab::nat::first_packets;
use seikan_lab::scale::{MOST, ScaleTest, Used};
use seikan_load::join;
use seikan_load::stats::{Spread, ratio};
use seikan_proto::mesh::Token;
use seikan_sys::process;
use seikan_ui::{Interrupt, Progress, ProgressBar, Stop};
use serde::Serialize;

use super::JsonFile;
use super::members::{Access, join_all, quantile};

/// One-way delays with which the first packet is measured, in milliseconds.
const DELAYS: [u64; 4] = [0, 5, 25, 50];
/// Members that join and send at once.
const NEW: usize = 5;
/// Number of members that one daemon talks to from time to time.
const ACTIVE: usize = 10;
/// Time until a stream reaches its rate.
const WARMUP: Duration = Duration::from_secs(2);
/// Interval of checks whether members should change.
const LOOK: Duration = Duration::from_millis(50);

/// Options of `lab crowd`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab crowd --members 1000 --real 50      some minutes on two cores")]
pub struct ScaleArguments {
    /// Number of members
    #[arg(long, default_value_t = 1000, value_parser = whole(20..=10_000))]
    pub members: u32,
    /// Number of members with a daemon
    #[arg(long, default_value_t = 50, value_parser = whole(16..=MOST as i64))]
    pub real: u32,
    /// Pairs of daemons that connect
    #[arg(long, default_value_t = 50, value_parser = whole(1..=1000))]
    pub pairs: u32,
    /// Length of each measurement of a mostly idle daemon's processor time
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = whole(1..=3600))]
    pub idle: u32,
    /// Length of each measurement of a stream
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = whole(1..=600))]
    pub seconds: u32,
    /// Number of stream measurements with and without changes
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = whole(1..=100))]
    pub rounds: u32,
    #[command(flatten)]
    json: JsonFile,
}

/// Results. Times are in seconds.
#[derive(Debug, Serialize)]
struct Figures {
    members: u32,
    real: u32,
    /// For each one-way delay in milliseconds, the time from the first packet to a known member
    /// until its answer.
    first_packet: Vec<(u64, f64)>,
    /// For each new member, the time from the start of `seikan join` until the first answer of
    /// another member.
    join_to_answer: Vec<f64>,
    /// Time from the first packet of a pair until its answer: median and maximum.
    pairs: [f64; 2],
    /// Share of a processor that a daemon uses that knows all members and has no traffic.
    silent: f64,
    /// How often that daemon wakes up, per second.
    silent_wakeups: f64,
    /// Share of a processor that a daemon uses that talks to ten members.
    idle: f64,
    /// The same share while a tenth of the members change each minute.
    idle_changing: f64,
    /// Rate of a stream without changes, and with a tenth of the members changing each minute, in
    /// Gbit/s.
    still: Spread,
    changing: Spread,
    /// Median with changes divided by the median without.
    ratio: Option<f64>,
    /// Number of changes during the measurements.
    changes: u32,
    /// Peak memory of the daemons in bytes: median and maximum.
    memory: [f64; 2],
    /// Processor time of the daemons since their start: median and maximum.
    processor: [f64; 2],
    /// Resources used by the coordinator.
    coordinator: Used,
}

/// Commands for the simulated members.
#[derive(Default)]
struct Orders {
    change: AtomicBool,
    stop: Interrupt,
    changed: AtomicU32,
}

/// Runs the measurements and prints the results.
pub fn run(arguments: &ScaleArguments) -> anyhow::Result<ExitCode> {
    process::allow_more_files().context("cannot have more files open")?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let figures = measure(arguments, &interrupt, &|fraction, what| {
        bar.show(Progress {
            fraction,
            step: what,
        });
    });
    drop(bar);
    let figures = figures?;
    arguments.json.write(&figures)?;
    show(&figures)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(
    arguments: &ScaleArguments,
    interrupt: &Interrupt,
    progress: &dyn Fn(f64, String),
) -> anyhow::Result<Figures> {
    progress(0.0, "the first packet".to_owned());
    let times = first_packets(&DELAYS.map(Duration::from_millis), interrupt)?;
    let mut test = ScaleTest::create(interrupt)?;
    let real = arguments.real as usize;
    for number in 0..real - NEW {
        progress(
            0.1 + 0.2 * number as f64 / real as f64,
            format!("daemon {number}"),
        );
        test.add()?;
        interrupt.check()?;
    }
    test.wait_known(0, real - NEW - 1, interrupt)?;
    let mut join_to_answer = Vec::new();
    for new in 0..NEW {
        join_to_answer.push(test.join_and_reach(new, interrupt)?);
    }
    let orders = Orders::default();
    let test = &test;
    std::thread::scope(|scope| {
        let stop = Stop(&orders.stop);
        let (joined, all_joined) = mpsc::channel();
        let orders = &orders;
        let namespace = test.coordinator_namespace()?;
        let url = format!("https://{}", test.coordinator());
        let [token, pin] = test.token_and_pin();
        let access = Access {
            url: url.parse()?,
            pin: pin.parse()?,
        };
        let token = token.parse()?;
        let others = scope.spawn(move || -> anyhow::Result<()> {
            namespace.run(|| simulate(arguments, (access, token), orders, &joined))?
        });
        progress(0.3, "many join".to_owned());
        // The thread has ended with an error, which is reported below.
        if all_joined.recv().is_err() {
            drop(stop);
            join(others)??;
            anyhow::bail!("the simulated members have ended");
        }
        for number in 0..real {
            test.wait_known(number, arguments.members as usize - 1, interrupt)?;
        }
        let mut reached = Vec::new();
        for number in 0..arguments.pairs as usize {
            // Each pair connects another two members, with a larger stride in each pass. The first
            // member is left out, because it is measured below.
            let (from, stride) = (number % (real - 1), 1 + number / (real - 1) * 7);
            let to = (from + stride) % (real - 1);
            progress(
                0.4 + 0.2 * number as f64 / f64::from(arguments.pairs),
                "pairs".to_owned(),
            );
            reached.push(test.reach([1 + from, 1 + to], interrupt)?);
        }
        reached.sort_by(f64::total_cmp);
        let active: Vec<usize> = (1..=ACTIVE).collect();
        progress(0.6, "a daemon that talks to nobody, and to ten".to_owned());
        let time = Duration::from_secs(arguments.idle.into());
        let silent = test.idle(0, &[], time, interrupt)?;
        let idle = test.idle(0, &active, time, interrupt)?;
        orders.change.store(true, Ordering::Relaxed);
        let idle_changing = test.idle(0, &active, time, interrupt)?;
        let [still, changing] = compare(arguments, test, orders, interrupt, progress)?;
        let mut used = (0..real)
            .map(|number| test.used(number))
            .collect::<Result<Vec<_>, _>>()?;
        let mut spread = |of: fn(&Used) -> f64| {
            used.sort_by(|a, b| of(a).total_cmp(&of(b)));
            let all: Vec<f64> = used.iter().map(of).collect();
            [quantile(&all, 0.5), quantile(&all, 1.0)]
        };
        let figures = Figures {
            members: arguments.members,
            real: arguments.real,
            first_packet: DELAYS.into_iter().zip(times).collect(),
            join_to_answer,
            pairs: [quantile(&reached, 0.5), quantile(&reached, 1.0)],
            silent: silent.processor,
            silent_wakeups: silent.wakeups,
            idle: idle.processor,
            idle_changing: idle_changing.processor,
            ratio: ratio(changing.median, still.median),
            still,
            changing,
            changes: orders.changed.load(Ordering::Relaxed),
            memory: spread(|used| used.memory as f64),
            processor: spread(|used| used.processor),
            coordinator: test.coordinator_used()?,
        };
        drop(stop);
        join(others)??;
        Ok(figures)
    })
}

/// Joins the members without daemons, and changes a tenth of them each minute on request.
fn simulate(
    arguments: &ScaleArguments,
    (access, token): (Access, Token),
    orders: &Orders,
    joined: &mpsc::Sender<()>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let numbers = arguments.real..arguments.members;
        let joined_now = join_all(numbers, &[access], &token, &[], Duration::ZERO).await?;
        let members = joined_now.members;
        for member in &members {
            member.report(0).await?;
        }
        joined.send(())?;
        let every = Duration::from_secs(600) / arguments.members;
        let turns = members.iter().cycle().zip(0_u32..);
        for (member, turn) in turns {
            while !orders.change.load(Ordering::Relaxed) {
                if orders.stop.is_raised() {
                    return Ok(());
                }
                tokio::time::sleep(LOOK).await;
            }
            if orders.stop.is_raised() {
                break;
            }
            let change = 1 + turn / members.len() as u32;
            member.report(change as u16).await?;
            orders.changed.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(every).await;
        }
        Ok(())
    })
}

/// Measures the rate of a stream, alternating between no changes of members and changes.
fn compare(
    arguments: &ScaleArguments,
    test: &ScaleTest,
    orders: &Orders,
    interrupt: &Interrupt,
    progress: &dyn Fn(f64, String),
) -> anyhow::Result<[Spread; 2]> {
    let time = Duration::from_secs(arguments.seconds.into());
    let mut rates = [Vec::new(), Vec::new()];
    test.stream([1, 2], interrupt, |meter| {
        for round in 0..arguments.rounds {
            // Alternate the order, so that neither variant is always measured first.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for which in order {
                let fraction = 0.7 + 0.3 * f64::from(round) / f64::from(arguments.rounds);
                progress(fraction, format!("a stream, round {}", round + 1));
                orders.change.store(which == 1, Ordering::Relaxed);
                interrupt.sleep(WARMUP)?;
                rates[which].push(meter.rate_over(time, interrupt)? / 1000.0);
            }
        }
        Ok(())
    })?;
    let [still, changing] = rates.each_ref().map(|rates| Spread::of(rates));
    let both = still.zip(changing).context("nothing was measured")?;
    Ok([both.0, both.1])
}

fn show(figures: &Figures) -> std::io::Result<()> {
    let mut out = anstream::stdout();
    writeln!(out, "the first packet to a known member:")?;
    for (delay, time) in &figures.first_packet {
        let bar = 4 * delay + 50;
        let time = 1000.0 * time;
        writeln!(
            out,
            "  round trip {:>3} ms: {time:.0} ms until its answer, of {bar}",
            2 * delay
        )?;
    }
    let all: Vec<String> = figures
        .join_to_answer
        .iter()
        .map(|time| format!("{time:.2}"))
        .collect();
    writeln!(
        out,
        "from `seikan join` to the first answer: {} s",
        all.join(", ")
    )?;
    let Figures {
        members,
        real,
        pairs,
        silent,
        silent_wakeups,
        idle,
        idle_changing,
        still,
        changing,
        ..
    } = figures;
    writeln!(
        out,
        "{members} members, {real} of them daemons: pairs reach each other after {:.0} ms (median), {:.0} ms (the last)",
        1000.0 * pairs[0],
        1000.0 * pairs[1]
    )?;
    writeln!(
        out,
        "a daemon that talks to nobody keeps {:.3} % of a processor busy and wakes {silent_wakeups:.1} times a second; to {ACTIVE}, {:.2} %, and {:.2} % while a tenth of the members change each minute",
        100.0 * silent,
        100.0 * idle,
        100.0 * idle_changing
    )?;
    writeln!(
        out,
        "one TCP stream: {:.2} Gbit/s ({:.2} to {:.2}) while nobody changes, {:.2} ({:.2} to {:.2}) while a tenth do each minute: {:.2} x",
        still.median,
        still.min,
        still.max,
        changing.median,
        changing.min,
        changing.max,
        figures.ratio.unwrap_or(f64::NAN)
    )?;
    writeln!(
        out,
        "daemons have {:.0} MB of memory at their peak ({:.0} at most) and have used {:.1} s of a processor ({:.1} at most); the coordinator {:.0} MB and {:.1} s",
        figures.memory[0] / 1e6,
        figures.memory[1] / 1e6,
        figures.processor[0],
        figures.processor[1],
        figures.coordinator.memory as f64 / 1e6,
        figures.coordinator.processor
    )
}

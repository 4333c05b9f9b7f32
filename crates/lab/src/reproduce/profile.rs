//! Eight guests behind a virtual switch, some sending and some busy: a profile shows why they are
//! slow.
//!
//! Guests are network namespaces, each on a port of a bridge of the kernel's or of Open vSwitch
//! with its datapath in user space; all send to one host behind the same switch. The source
//! profiled the kernel's functions and compared the number of their calls with the throughput, as
//! [`counters`](super::counters) does. The cost of sampling is measured, too.

use std::time::{Duration, Instant};

use seikan_diagnose::Cause;
use seikan_load::join;
use seikan_load::stats::percentile;
use seikan_observe::profile::Share;

use super::counters::growing;
use super::figures::interleaved;
use super::guests::{Network, Switch, UPLINK};
use super::look::{LOOK, Looker};
use super::{Bench, Curve, Curves, Figures, Found, List, Row, titled};
use crate::error::{LabError, Result};

/// Sending and busy guests: name, number of each, and the published figure in Mbit/s.
const PATTERNS: [(&str, usize, usize, Option<f64>); 6] = [
    ("A", 2, 0, Some(9_200.0)),
    ("B", 4, 0, Some(9_200.0)),
    ("C", 8, 0, Some(9_200.0)),
    ("D", 2, 2, None),
    ("E", 2, 4, None),
    ("F", 2, 6, None),
];
/// Interval of the throughput, as in the source.
pub(super) const BIN: f64 = 0.5;
/// Functions of a profile that are verdict.
const SHOWN: usize = 5;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    bench.expect(3 * rounds * PATTERNS.len() + LEVELS.len() * rounds + 2 * PATTERNS.len() + 2);
    let mut found = Found::default();
    let limit = Some(bench.source.rate());
    for switch in [Switch::Bridge, Switch::OpenVSwitch] {
        patterns(bench, switch, None, &mut found)?;
        let done = functions(bench, switch, &mut found);
        found.note_failure(done)?;
    }
    // Open vSwitch in user space is slower than that.
    patterns(bench, Switch::Bridge, limit, &mut found)?;
    for part in [costs, growing] {
        let done = part(bench, &mut found);
        found.note_failure(done)?;
    }
    Ok(found)
}

/// Mbit/s of every interval of `time`.
fn rates(bench: &Bench<'_>, time: Duration, arrived: &dyn Fn() -> Vec<u64>) -> Result<Vec<f64>> {
    let arrived = || arrived().iter().sum::<u64>();
    let bins = (time.as_secs_f64() / BIN).round().max(2.0) as usize;
    let mut before = arrived();
    let mut rates = Vec::new();
    let mut begin = Instant::now();
    for _ in 0..bins {
        bench.interrupt.sleep(Duration::from_secs_f64(BIN))?;
        let (now, end) = (arrived(), Instant::now());
        // A sampler is late on a busy machine.
        let seconds = end.duration_since(begin).as_secs_f64();
        rates.push((now - before) as f64 * 8.0 / 1e6 / seconds);
        (before, begin) = (now, end);
    }
    Ok(rates)
}

/// Of one pattern in one round: Mbit/s of every interval, and [`least_share`].
type Measured = (Vec<f64>, Option<f64>);

/// The slowest guest's part of an equal share of all bytes; `None` if nothing arrived.
fn least_share(bytes: &[u64]) -> Option<f64> {
    let all: u64 = bytes.iter().sum();
    let least = bytes.iter().min()?;
    (all > 0).then(|| *least as f64 * bytes.len() as f64 / all as f64)
}

/// Throughput by pattern: how much, how much it swings, how it is distributed.
fn patterns(
    bench: &mut Bench<'_>,
    switch: Switch,
    limit: Option<u64>,
    found: &mut Found,
) -> Result<()> {
    let names = PATTERNS.map(|(name, ..)| name);
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let (_, senders, hogs, _) = pattern(name);
        let network = Network::create(switch, limit, bench)?;
        let _hogs = network.spinning(hogs)?;
        let time = bench.time();
        network.sending(senders, bench, |arrived| {
            let before = arrived();
            let rates = rates(bench, time, arrived)?;
            let after = arrived();
            let bytes = after
                .iter()
                .zip(&before)
                .map(|(after, before)| after - before);
            Ok((rates, least_share(&bytes.collect::<Vec<u64>>())))
        })
    })?;
    let label = |(name, senders, hogs, _): (&str, usize, usize, Option<f64>)| {
        format!("{name}: {senders} send, {hogs} spin")
    };
    let figures =
        |title: String, unit: &str, published: bool, of: fn(&Measured) -> Option<f64>| Figures {
            title: titled(&title, limit),
            unit: unit.to_owned(),
            base: label(PATTERNS[0]),
            rows: PATTERNS
                .into_iter()
                .zip(&measured)
                .map(|(pattern, rounds)| Row {
                    rounds: rounds.iter().map(|round| of(round.as_ref()?)).collect(),
                    ..Row::new(label(pattern), pattern.3.filter(|_| published))
                })
                .collect(),
        };
    let throughput = figures(format!("throughput, {switch}"), "Mbit/s", true, |round| {
        at(&round.0, 0.5)
    });
    let swing = figures(
        format!("swing, {switch}"),
        "of the median",
        false,
        |(rates, _)| Some((at(rates, 0.95)? - at(rates, 0.05)?) / at(rates, 0.5)?),
    );
    let fairness = figures(
        format!("the slowest guest, {switch}"),
        "of an equal share",
        false,
        |(_, least)| *least,
    );
    let [a, .., f] = PATTERNS.map(label);
    let d = label(PATTERNS[3]);
    if limit.is_none() {
        found.claims.push(throughput.claim(&a, &d));
    }
    found.claims.push(throughput.claim(&d, &f));
    found.claims.push(swing.claim(&f, &a));
    found.figures.extend([throughput, swing, fairness]);
    let lines = PATTERNS
        .into_iter()
        .zip(&measured)
        .map(|(pattern, rounds)| {
            let rates = rounds.iter().flatten().flat_map(|(rates, _)| rates);
            let mut all: Vec<f64> = rates.copied().collect();
            all.sort_by(f64::total_cmp);
            let count = all.len() as f64;
            let points = all.iter().enumerate();
            Curve {
                name: label(pattern),
                own: false,
                published: false,
                points: points
                    .map(|(i, rate)| [*rate, 100.0 * (i + 1) as f64 / count])
                    .collect(),
            }
        });
    found.curves.push(Curves {
        name: match limit {
            Some(_) => format!("profile-distribution-{}-limited", switch.slug()),
            None => format!("profile-distribution-{}", switch.slug()),
        },
        title: titled(
            &format!("share of half seconds with so much or less, {switch}"),
            limit,
        ),
        x: "Mbit/s".to_owned(),
        y: "%".to_owned(),
        logarithmic: [false, false],
        curves: lines.collect(),
    });
    Ok(())
}

fn pattern(name: &str) -> (&'static str, usize, usize, Option<f64>) {
    let found = PATTERNS.into_iter().find(|pattern| pattern.0 == name);
    found.unwrap_or(PATTERNS[0])
}

fn at(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, share)
}

/// Measures the processor time of each pattern, and runs the doctor on the one with most busy
/// guests.
fn functions(bench: &mut Bench<'_>, switch: Switch, found: &mut Found) -> Result<()> {
    let mut columns: Vec<(String, Vec<Share>)> = Vec::new();
    let good = found
        .figures
        .iter()
        .find(|f| f.title == format!("throughput, {switch}"));
    let expected = good
        .and_then(|f| f.rows[0].spread())
        .map_or(1e3, |s| s.median);
    let last = PATTERNS[PATTERNS.len() - 1].0;
    for (name, ..) in PATTERNS {
        bench.step(format!("functions, {switch}, {name}"))?;
        let (_, senders, hogs, _) = pattern(name);
        let network = Network::create(switch, None, bench)?;
        let _hogs = network.spinning(hogs)?;
        let of = format!("{switch}, {name}");
        let looker = Looker {
            expected,
            right: &[Cause::CpuContention],
            // Functions are sampled quickly; a verdict needs the usual time.
            seconds: if name == last { LOOK } else { LOOK / 2.0 },
            ..Looker::new(&of, &network.switch, UPLINK)
        };
        let (look, recording) = network.sending(senders, bench, |_| looker.look(bench.desk()))?;
        let Some(recording) = recording else {
            found.problems.extend(look.problem);
            continue;
        };
        let profile = recording.evidence.profile.unwrap_or_default();
        columns.push((name.to_owned(), profile.machine));
        // The bridge has no program that could wait for a processor; the senders at the guests do.
        if name == last && switch == Switch::OpenVSwitch {
            found.looks.push(look);
        }
    }
    let mut names: Vec<String> = Vec::new();
    for (_, shares) in &columns {
        for share in shares.iter().take(SHOWN) {
            if !names.contains(&share.symbol) {
                names.push(share.symbol.clone());
            }
        }
    }
    let rows = names.iter().map(|name| {
        let of = columns.iter().map(|(_, shares)| {
            let share = shares.iter().find(|share| share.symbol == *name);
            share.map_or_else(
                || "–".to_owned(),
                |share| format!("{:.1}", 100.0 * share.share),
            )
        });
        std::iter::once(name.clone()).chain(of).collect()
    });
    let headings = columns.iter().map(|(name, _)| format!("pattern {name}, %"));
    found.lists.push(List {
        title: format!("processor time by function, {switch}"),
        columns: std::iter::once("function".to_owned())
            .chain(headings)
            .collect(),
        rows: rows.collect(),
    });
    Ok(())
}

/// How deep a recording looks, as rows.
const LEVELS: [(&str, Option<u32>); 4] = [
    ("nothing recorded", None),
    ("counters (L0)", Some(0)),
    ("drops by reason, too (L1)", Some(1)),
    ("functions, too (L2)", Some(2)),
];

/// Measures the cost of recording for two guests that send through Open vSwitch.
fn costs(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let names = LEVELS.map(|(name, _)| name);
    let network = Network::create(Switch::OpenVSwitch, None, bench)?;
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let level = LEVELS
            .iter()
            .find(|level| level.0 == name)
            .and_then(|level| level.1);
        network.sending(2, bench, |arrived| {
            let arrived = || arrived().iter().sum::<u64>();
            std::thread::scope(|scope| {
                let looker = Looker {
                    level,
                    // The doctor looks for whole seconds, and not for less.
                    seconds: bench.options.seconds.ceil().max(2.0),
                    ..Looker::new(name, &network.switch, UPLINK)
                };
                let desk = bench.desk();
                let looking = level.map(|_| scope.spawn(move || looker.look(desk)));
                // Writing and reading after the measurement do not count.
                let (before, begin) = (arrived(), Instant::now());
                let slept = bench
                    .interrupt
                    .sleep(Duration::from_secs_f64(looker.seconds));
                let bits = (arrived() - before) as f64 * 8.0;
                let seconds = begin.elapsed().as_secs_f64();
                if let Some(looking) = looking {
                    let (look, _) = join(looking)??;
                    if let Some(problem) = look.problem {
                        return Err(LabError::Setup(problem));
                    }
                }
                slept?;
                Ok(bits / 1e6 / seconds)
            })
        })
    })?;
    found.figures.push(Figures {
        title: "throughput while it is recorded, Open vSwitch".to_owned(),
        unit: "Mbit/s".to_owned(),
        base: names[0].to_owned(),
        rows: names
            .into_iter()
            .zip(measured)
            .map(|(name, rounds)| Row {
                rounds,
                ..Row::new(name, None)
            })
            .collect(),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_share_is_one_and_a_guest_without_any_has_none() {
        assert_eq!(least_share(&[70, 70]), Some(1.0));
        assert_eq!(least_share(&[50, 150]), Some(0.5));
        assert_eq!(least_share(&[0, 9, 9]), Some(0.0));
        assert_eq!(least_share(&[0, 0]), None);
        assert_eq!(least_share(&[]), None);
    }
}

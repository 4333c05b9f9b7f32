//! Eight guests behind a virtual switch, some sending and some busy: a profile shows why they are
//! slow.
//!
//! Guests are network namespaces, each on a port of a bridge of the kernel's or of Open vSwitch
//! with its datapath in user space; all send to one host behind the same switch. The source
//! profiled the kernel's functions and compared the number of their calls with the throughput, as
//! [`counters`](super::counters) does. The cost of sampling, of counting calls and of a capture is
//! measured, too.

use std::time::{Duration, Instant};

use seikan_load::join;
use seikan_load::stats::{Spread, mean};

use super::counters::growing;
use super::figures::{cell, named, quantile};
use super::guests::{GUESTS, Network, Switch, UPLINK};
use super::limit;
use super::look::Looker;
use super::patterns::functions;
use super::tracepoints::Counted;
use super::{Bench, Curve, Curves, Experiment, Figures, List, Row, titled};
use crate::capture::Capture;
use crate::cleanup::private_directory;
use crate::error::{Result, setup};

/// A pattern of the source.
#[derive(Clone, Copy)]
pub(super) struct Pattern {
    /// Its name.
    pub(super) name: &'static str,
    /// Guests that send.
    pub(super) senders: usize,
    /// Guests that spin.
    pub(super) hogs: usize,
    /// The published throughput of all, in Mbit/s.
    published: Option<f64>,
}

impl Pattern {
    const fn new(name: &'static str, senders: usize, hogs: usize, published: Option<f64>) -> Self {
        Self {
            name,
            senders,
            hogs,
            published,
        }
    }

    fn label(self) -> String {
        format!("{}: {} send, {} spin", self.name, self.senders, self.hogs)
    }
}

/// The source's patterns.
pub(super) const PATTERNS: [Pattern; 6] = [
    Pattern::new("A", 2, 0, Some(9_200.0)),
    Pattern::new("B", 4, 0, Some(9_200.0)),
    Pattern::new("C", 8, 0, Some(9_200.0)),
    Pattern::new("D", 2, 2, None),
    Pattern::new("E", 2, 4, None),
    Pattern::new("F", 2, 6, None),
];
/// Place of the pattern whose guests the source shows one by one.
const SHOWN: usize = 1;
/// Interval of the throughput, as in the source.
pub(super) const BIN: f64 = 0.5;

pub(super) fn run(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let rate = bench.source.rate();
    found.attempt(|found| limit::check(bench, rate, found))?;
    // Open vSwitch in user space is slower than that limit.
    let setups = [
        (Switch::Bridge, None),
        (Switch::Bridge, Some(rate)),
        (Switch::OpenVSwitch, None),
    ];
    for (switch, limit) in setups {
        patterns(bench, switch, limit, found)?;
    }
    for setup in &setups[1..] {
        found.attempt(|found| functions(bench, *setup, found))?;
    }
    found.attempt_all(bench, &[costs, growing])
}

/// Results of one pattern in one round: the rate of each guest in every interval in Mbit/s, and
/// [`least_share`].
struct Measured {
    rates: Vec<Vec<f64>>,
    least: Option<f64>,
}

impl Measured {
    /// Returns the rate of all guests together in each interval, in Mbit/s.
    fn sums(&self) -> Vec<f64> {
        self.rates.iter().map(|bin| bin.iter().sum()).collect()
    }

    /// Returns the mean rate of each guest, in Mbit/s.
    fn means(&self) -> Vec<f64> {
        let guests = self.rates.first().map_or(0, Vec::len);
        (0..guests)
            .map(|guest| mean(self.rates.iter().map(|bin| bin[guest])))
            .collect()
    }
}

/// Measures the guests that send for `time`.
fn measure(bench: &Bench<'_>, time: Duration, arrived: &dyn Fn() -> Vec<u64>) -> Result<Measured> {
    let bins = (time.as_secs_f64() / BIN).round().max(2.0) as usize;
    let first = arrived();
    let (mut before, mut begin) = (first.clone(), Instant::now());
    let mut rates = Vec::new();
    for _ in 0..bins {
        bench.interrupt.sleep(Duration::from_secs_f64(BIN))?;
        let (now, end) = (arrived(), Instant::now());
        // On a busy machine, the sampler is late.
        let seconds = end.duration_since(begin).as_secs_f64();
        let grown = now.iter().zip(&before).map(|(now, before)| now - before);
        let megabits = grown.map(|bytes| bytes as f64 * 8.0 / 1e6 / seconds);
        rates.push(megabits.collect());
        (before, begin) = (now, end);
    }
    let all = before.iter().zip(&first).map(|(last, first)| last - first);
    let least = least_share(&all.collect::<Vec<u64>>());
    Ok(Measured { rates, least })
}

/// Returns the bytes of the slowest guest divided by an equal share of all bytes; `None` if nothing
/// arrived.
fn least_share(bytes: &[u64]) -> Option<f64> {
    let all: u64 = bytes.iter().sum();
    let least = bytes.iter().min()?;
    (all > 0).then(|| *least as f64 * bytes.len() as f64 / all as f64)
}

/// Adds the throughput by pattern: of all guests and of each, its variation over time, and its
/// distribution.
fn patterns(
    bench: &mut Bench<'_>,
    switch: Switch,
    limit: Option<u64>,
    found: &mut Experiment,
) -> Result<()> {
    let measured = bench.rounds(
        &PATTERNS,
        |of| of.name,
        found,
        |bench, pattern| {
            let network = Network::create(switch, limit, bench)?;
            let _hogs = network.spinning(pattern.hogs)?;
            network.sending(pattern.senders, bench, |arrived| {
                measure(bench, bench.time(), arrived)
            })
        },
    )?;
    let figures = |title: &str, unit: &str, of: fn(&Measured) -> Option<f64>| {
        let published = title == "throughput";
        let row = |of: &Pattern| Row::new(of.label(), of.published.filter(|_| published));
        let title = titled(&format!("{title}, {switch}"), limit);
        Figures::new(title, unit, measured.rows(row, of))
    };
    let throughput = figures("throughput", "Mbit/s", |round| quantile(round.sums(), 0.5));
    let swing = figures("swing", "of the median", |round| {
        let at = |share| quantile(round.sums(), share);
        Some((at(0.95)? - at(0.05)?) / at(0.5)?)
    });
    let fairness = figures("the slowest guest", "of an equal share", |round| {
        round.least
    });
    let [a, _, _, d, _, f] = PATTERNS.map(Pattern::label);
    if limit.is_none() {
        found.claims.push(throughput.claim(&a, &d));
    }
    found.claims.push(throughput.claim(&d, &f));
    found.claims.push(swing.claim(&f, &a));
    found.figures.extend([throughput, swing, fairness]);
    let (setup, measured) = ((switch, limit), &measured.results);
    found.lists.push(each_guest(setup, measured));
    let curves = over_time(setup, &measured[SHOWN]).into_iter();
    found
        .curves
        .extend(curves.chain([distribution(setup, measured)]));
    Ok(())
}

/// Name of a picture.
fn picture(of: &str, (switch, limit): (Switch, Option<u64>)) -> String {
    let limited = limit.map_or("", |_| "-limited");
    format!("profile-{of}-{}{limited}", switch.slug())
}

/// Table of the throughput of each guest: medians over the rounds.
fn each_guest((switch, limit): (Switch, Option<u64>), measured: &[Vec<Option<Measured>>]) -> List {
    let rows = PATTERNS.into_iter().zip(measured).map(|(pattern, rounds)| {
        let means: Vec<Vec<f64>> = rounds.iter().flatten().map(Measured::means).collect();
        let cells = (0..GUESTS.len()).map(|guest| {
            let values: Vec<f64> = means.iter().filter_map(|m| m.get(guest).copied()).collect();
            cell(Spread::of(&values).map(|spread| spread.median), 0)
        });
        named(pattern.label(), cells)
    });
    List {
        title: titled(&format!("Mbit/s of each guest, {switch}"), limit),
        columns: named("pattern", GUESTS.map(str::to_owned)),
        rows: rows.collect(),
    }
}

/// The source's figure of single guests in a pattern: each over time, in the first round that did
/// not fail.
fn over_time(
    (switch, limit): (Switch, Option<u64>),
    rounds: &[Option<Measured>],
) -> Option<Curves> {
    let measured = rounds.iter().flatten().next()?;
    let guests = measured.rates.first()?.len();
    let curves = (0..guests).map(|guest| {
        let points = measured.rates.iter().enumerate();
        let points = points.map(|(bin, rates)| [(bin + 1) as f64 * BIN, rates[guest]]);
        Curve::new(GUESTS[guest], points)
    });
    let title = format!("each guest of pattern {}, {switch}", PATTERNS[SHOWN].name);
    Some(Curves::new(
        picture("guests", (switch, limit)),
        titled(&title, limit),
        ["seconds", "Mbit/s"],
        curves,
    ))
}

/// Draws the source's figure of distributions: the share of all intervals of all rounds with at
/// most a given throughput.
fn distribution(
    (switch, limit): (Switch, Option<u64>),
    measured: &[Vec<Option<Measured>>],
) -> Curves {
    let curves = PATTERNS.into_iter().zip(measured).map(|(pattern, rounds)| {
        let rates = rounds.iter().flatten().flat_map(Measured::sums);
        Curve::new(pattern.label(), steps(rates.collect()))
    });
    let title = format!("share of half seconds with so much or less, {switch}");
    Curves::new(
        picture("distribution", (switch, limit)),
        titled(&title, limit),
        ["Mbit/s", "%"],
        curves,
    )
}

/// The steps of a cumulative distribution, in percent: two points for each value.
fn steps(mut values: Vec<f64>) -> Vec<[f64; 2]> {
    values.sort_by(f64::total_cmp);
    let share = |count: usize| 100.0 * count as f64 / values.len() as f64;
    let values = values.iter().enumerate();
    values
        .flat_map(|(below, value)| [[*value, share(below)], [*value, share(below + 1)]])
        .collect()
}

/// A method to record events while guests send.
#[derive(Clone, Copy, PartialEq)]
enum Recorder {
    Nothing,
    /// The doctor's sampler, at this level.
    Doctor(u32),
    /// Counters of calls, as in the parts on functions.
    Calls,
    /// The first bytes of every packet of the uplink, into a file.
    Capture,
}

/// The rows.
const RECORDERS: [(&str, Recorder); 6] = [
    ("nothing recorded", Recorder::Nothing),
    ("counters (L0)", Recorder::Doctor(0)),
    ("drops by reason, too (L1)", Recorder::Doctor(1)),
    ("functions, too (L2)", Recorder::Doctor(2)),
    ("calls of functions counted", Recorder::Calls),
    ("packets captured", Recorder::Capture),
];

/// Measures the cost of recording for two guests that send through Open vSwitch.
fn costs(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let network = Network::create(Switch::OpenVSwitch, None, bench)?;
    let mut captured = Vec::new();
    let measured = bench.rounds(
        &RECORDERS,
        |of| of.0,
        found,
        |bench, (name, recorder)| {
            network.sending(2, bench, |arrived| {
                let arrived = || arrived().iter().sum::<u64>();
                let dir = private_directory()?;
                let _counted = match recorder {
                    Recorder::Calls => Some(Counted::functions()?),
                    _ => None,
                };
                let capture = match recorder {
                    Recorder::Capture => {
                        let file = dir.path().join("uplink.pcap");
                        Some(Capture::start(&network.switch, UPLINK, &file)?)
                    }
                    _ => None,
                };
                let rate = std::thread::scope(|scope| {
                    let level = match recorder {
                        Recorder::Doctor(level) => Some(*level),
                        _ => None,
                    };
                    let looker = Looker {
                        level,
                        // The doctor measures for a whole number of seconds.
                        seconds: bench.options.seconds.ceil().max(2.0),
                        ..Looker::new(name, &network.switch, UPLINK)
                    };
                    let time = Duration::from_secs_f64(looker.seconds);
                    let desk = bench.desk;
                    let looking = level.map(|_| scope.spawn(move || looker.look(desk)));
                    // Writing and reading after the measurement do not count.
                    let (before, begin) = (arrived(), Instant::now());
                    let slept = bench.interrupt.sleep(time);
                    let bits = (arrived() - before) as f64 * 8.0;
                    let seconds = begin.elapsed().as_secs_f64();
                    if let Some(looking) = looking {
                        let (look, _) = join(looking)??;
                        if let Some(problem) = look.problem {
                            return Err(setup(problem));
                        }
                    }
                    slept?;
                    Ok(bits / 1e6 / seconds)
                })?;
                captured.extend(capture.map(Capture::finish).transpose()?);
                Ok(rate)
            })
        },
    )?;
    found.notes.extend(captured.iter().map(|captured| {
        let kept = captured.packets.len() as u64;
        let all = kept + captured.lost;
        format!(
            "A capture of the uplink lost {} of {all} packets ({:.1} %).",
            captured.lost,
            100.0 * captured.lost as f64 / all.max(1) as f64
        )
    }));
    let rows = measured.rows(|(name, _)| Row::new(*name, None), |rate| Some(*rate));
    let title = "throughput while it is recorded, Open vSwitch";
    found.figures.push(Figures::new(title, "Mbit/s", rows));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_rises_in_steps_from_nothing_to_all() {
        let expected = [[1.0, 0.0], [1.0, 50.0], [4.0, 50.0], [4.0, 100.0]];
        assert_eq!(steps(vec![4.0, 1.0]), expected);
        assert!(steps(Vec::new()).is_empty());
    }

    #[test]
    fn guests_are_averaged_over_time_and_added_up_by_interval() {
        let measured = Measured {
            rates: vec![vec![10.0, 30.0], vec![20.0, 10.0]],
            least: None,
        };
        assert_eq!(measured.means(), [15.0, 20.0]);
        assert_eq!(measured.sums(), [40.0, 30.0]);
    }

    #[test]
    fn an_equal_share_is_one_and_a_guest_without_any_has_none() {
        assert_eq!(least_share(&[70, 70]), Some(1.0));
        assert_eq!(least_share(&[50, 150]), Some(0.5));
        assert_eq!(least_share(&[0, 9, 9]), Some(0.0));
        assert_eq!(least_share(&[0, 0]), None);
        assert_eq!(least_share(&[]), None);
    }
}

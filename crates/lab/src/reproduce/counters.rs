//! One guest sends while more and more others spin: which counter correlates with the throughput?
//! The source used the number of calls of a kernel function. Here the candidates are all counters
//! that the doctor samples, and the calls that tracepoints count.
//!
//! A counter of packets, of batches of packets, or of the time spent on them is the throughput in
//! another unit, so its correlation says nothing about its use for a diagnosis. Such counters are
//! listed separately ([`Counts`]).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use seikan_diagnose::stats::{correlate, strongest};
use seikan_diagnose::{Evidence, Recording};
use seikan_load::join;
use seikan_load::stats::{Spread, mean};
use seikan_observe::{Subject, metric};
use seikan_sys::calls;
use seikan_ui::{Interrupt, Stop};

use super::guests::{GUESTS, Network, Switch, UPLINK};
use super::look::Looker;
use super::profile::BIN;
use super::steps;
use super::tracepoints::Counted;
use super::{Bench, Curve, Curves, Experiment, List};
use crate::error::Result;
use crate::scenario::Hog;

/// Intervals over which the source's figures are smoothed: 10 s.
const SMOOTH: usize = 20;
/// Interval after which one more guest starts to spin, as a multiple of a load's time: 25 s with
/// the usual 3 s.
const EVERY: f64 = 25.0 / 3.0;
/// The source compared values of the same interval.
const NO_LAG: usize = 0;
/// Number of counters of each kind that are drawn: those with the highest correlation.
const DRAWN: usize = 4;
/// The published correlation.
const PUBLISHED_R: f64 = 0.605;

/// Whether a counter counts packets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counts {
    /// Packets, batches of packets, or the time of the work on them: the throughput itself.
    Packets,
    /// Something else.
    Other,
}

/// Counters that may explain the throughput: name, subjects to sum, counter, its file, and what it
/// counts.
const EVENTS: [(&str, Of, &str, &str, Counts); 8] = [
    (
        "packets handled in softirqs",
        Of::Cpus,
        metric::SOFTNET_PROCESSED,
        "/proc/self/net/softnet_stat",
        Counts::Packets,
    ),
    (
        "runs of the receive softirq",
        Of::Cpus,
        metric::NET_RX,
        "/proc/softirqs",
        Counts::Packets,
    ),
    (
        "time in softirqs",
        Of::Cpus,
        metric::SOFTIRQ_NS,
        "/proc/stat",
        Counts::Packets,
    ),
    (
        "time in user mode",
        Of::Cpus,
        metric::USER_NS,
        "/proc/stat",
        Counts::Other,
    ),
    (
        "time in which a task waited for a processor",
        Of::Host,
        metric::PRESSURE_CPU_US,
        "/proc/pressure/cpu",
        Counts::Other,
    ),
    (
        "time that the switch waited for a processor",
        Of::Threads,
        metric::RUN_DELAY_NS,
        "/proc/thread-self/schedstat",
        Counts::Other,
    ),
    (
        "times that the switch had to give way",
        Of::Threads,
        metric::INVOLUNTARY_SWITCHES,
        "/proc/thread-self/status",
        Counts::Other,
    ),
    (
        "time that the switch ran",
        Of::Threads,
        metric::RUN_NS,
        "/proc/thread-self/schedstat",
        Counts::Packets,
    ),
];
/// Functions whose calls are no packets; all others that are counted are on the path of packets.
const NOT_OF_PACKETS: [&str; 4] = [
    "futex_wake",
    "sys_enter",
    "sched_switch",
    "vcpu_enter_guest",
];
/// Maximum interval, because the doctor measures for at most an hour.
const MOST_EVERY: Duration = Duration::from_secs(3_600 / GUESTS.len() as u64);
/// Difference of correlations below which they count as equal.
const EQUAL_WITHIN: f64 = 0.05;
/// Number of readings whose median is used.
const READINGS: usize = 101;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Host,
    Cpus,
    Threads,
}

impl Of {
    fn has(self, subject: &Subject) -> bool {
        match self {
            Self::Host => *subject == Subject::Host,
            Self::Cpus => matches!(subject, Subject::Cpu(_)),
            Self::Threads => matches!(subject, Subject::Thread { .. }),
        }
    }
}

/// Calls of functions and Mbit/s at the receiver, by interval.
#[derive(Default)]
struct CallSeries {
    names: Vec<String>,
    calls: Vec<Vec<f64>>,
    throughput: Vec<f64>,
}

/// Runs the experiment: one guest sends, and at intervals one more starts to spin.
pub(super) fn growing(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let every = bench.time().mul_f64(EVERY).min(MOST_EVERY);
    let seconds = (every.as_secs_f64() * GUESTS.len() as f64).ceil();
    let network = Network::create(Switch::OpenVSwitch, None, bench)?;
    bench.step(format!(
        "one guest sends for {seconds:.0} s, ever more spin"
    ))?;
    let (look, called) = network.sending(1, bench, |arrived| {
        let looker = Looker {
            seconds,
            // The deepest level adds calls of functions; without them the cheapest level suffices.
            level: Some(if calls::can_be_counted() { 3 } else { 0 }),
            ..Looker::new("ever more spin", &network.switch, UPLINK)
        };
        let (stop, guests) = (Interrupt::new(), &network.guests[1..]);
        std::thread::scope(|scope| {
            let (stop, interrupt, desk) = (&stop, bench.interrupt, bench.desk);
            let hogs = scope.spawn(move || -> Result<()> {
                let mut hogs = Vec::new();
                // The first guest sends.
                for guest in guests {
                    wait(every, stop, interrupt)?;
                    if stop.is_raised() {
                        break;
                    }
                    hogs.push(Hog::start(guest)?);
                }
                wait(Duration::MAX / 4, stop, interrupt)
            });
            let looking = scope.spawn(move || {
                let _stop = Stop(stop);
                looker.look(desk)
            });
            let called = count_calls(stop, interrupt, arrived);
            let looked = join(looking)?;
            join(hogs)??;
            Ok((looked?, called))
        })
    })?;
    let every = every.as_secs_f64();
    let mut candidates = Vec::new();
    if let Some(called) = found.unless_failed("calls of functions", called)? {
        candidates.extend(called_candidates(&called, every));
    }
    let Some(recording) = look.1 else {
        found.problems.extend(look.0.problem);
        return Ok(());
    };
    let throughput = throughput(&recording.evidence);
    candidates.extend(sampled_candidates(&recording, &throughput, every));
    show(candidates, &throughput, every, found);
    Ok(())
}

/// Counts calls and received bytes in each interval until the flag is raised.
fn count_calls(
    stop: &Interrupt,
    interrupt: &Interrupt,
    arrived: &dyn Fn() -> Vec<u64>,
) -> Result<CallSeries> {
    let mut counted = Counted::functions()?;
    let mut series = CallSeries {
        names: counted.names().to_vec(),
        calls: vec![Vec::new(); counted.names().len()],
        throughput: Vec::new(),
    };
    let (mut before, mut bytes) = (counted.read()?, arrived()[0]);
    let mut begin = Instant::now();
    let bin = Duration::from_secs_f64(BIN);
    loop {
        wait(bin.saturating_sub(begin.elapsed()), stop, interrupt)?;
        if stop.is_raised() {
            return Ok(series);
        }
        let (calls, now, at) = (counted.read()?, arrived()[0], Instant::now());
        let seconds = at.duration_since(begin).as_secs_f64();
        let grown = calls.iter().zip(&before).map(|(now, before)| now - before);
        for (values, calls) in series.calls.iter_mut().zip(grown) {
            // Scale the count to an interval of the usual length.
            values.push(calls as f64 * BIN / seconds);
        }
        series
            .throughput
            .push((now - bytes) as f64 * 8.0 / 1e6 / seconds);
        (before, bytes, begin) = (calls, now, at);
    }
}

/// Whether the calls of a function are packets.
fn counts(function: &str) -> Counts {
    if NOT_OF_PACKETS.iter().any(|name| function.contains(name)) {
        Counts::Other
    } else {
        Counts::Packets
    }
}

/// A quantity that may correlate with the throughput.
struct Event<'a> {
    name: String,
    of: Of,
    counter: &'a str,
    /// File that contains the counter; `None` for calls of a function, which the kernel counts as
    /// they happen.
    file: Option<&'static str>,
    counts: Counts,
}

/// Returns all of [`EVENTS`], and the functions whose calls were counted.
fn events(evidence: &Evidence) -> Vec<Event<'_>> {
    let known = EVENTS
        .iter()
        .map(|(name, of, counter, file, counts)| Event {
            name: (*name).to_owned(),
            of: *of,
            counter,
            file: Some(*file),
            counts: *counts,
        });
    let columns = evidence.series.columns.keys();
    let function_calls = columns.filter_map(|key| {
        let function = key.name.strip_prefix(metric::CALL_PREFIX)?;
        Some(Event {
            name: format!("calls of {function}"),
            of: Of::Host,
            counter: key.name.as_ref(),
            file: None,
            counts: counts(function),
        })
    });
    known.chain(function_calls).collect()
}

/// Returns the time in microseconds that one reading of a file takes.
fn reading(file: &str) -> Option<f64> {
    let file = File::open(file).ok()?;
    let mut buffer = vec![0; 1 << 16];
    let mut times = Vec::with_capacity(READINGS);
    for _ in 0..READINGS {
        let begin = Instant::now();
        file.read_at(&mut buffer, 0).ok()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Spread::of(&times).map(|spread| spread.median)
}

/// A counter that is compared with the throughput.
struct Candidate {
    name: String,
    counts: Counts,
    /// Growth of the counter in each interval.
    values: Vec<f64>,
    /// Correlation of smoothed values.
    r: f64,
    /// Correlation of single values, with its confidence interval; `None` if there are too few.
    single: Option<String>,
    /// Time of one reading in microseconds; `None` if events are counted as they happen.
    cost: Option<f64>,
}

impl Candidate {
    /// Compares values and throughput of the same intervals; `None` where one of them is constant.
    fn of(name: String, counts: Counts, values: Vec<f64>, series: (&[f64], f64)) -> Option<Self> {
        let (throughput, every) = series;
        let (_, r) = strongest(&smoothed(&values), &smoothed(throughput), NO_LAG)?;
        // A block is as long as a step of the load, because values within a step resemble each
        // other.
        let block = (every / BIN).round() as usize;
        let single = correlate(&values, throughput, NO_LAG, block);
        let single =
            single.map(|c| format!("{:.2} ({:.2} to {:.2})", c.r.value, c.r.low, c.r.high));
        Some(Self {
            name,
            counts,
            values,
            r,
            single,
            cost: None,
        })
    }
}

/// Compares calls of functions with the throughput at the receiver, as the source did.
fn called_candidates(called: &CallSeries, every: f64) -> Vec<Candidate> {
    let series = (&called.throughput[..], every);
    let all = called.names.iter().zip(&called.calls);
    all.filter_map(|(name, calls)| {
        let label = format!("calls: {name}");
        Candidate::of(label, counts(name), calls.clone(), series)
    })
    .collect()
}

/// Returns the rate of the switch's uplink in each interval, in Mbit/s.
fn throughput(evidence: &Evidence) -> Vec<f64> {
    let inner = evidence.map.inner.clone().unwrap_or_default();
    let link = |subject: &Subject| matches!(subject, Subject::Link(name) if *name == inner);
    let sent = binned(evidence, metric::TX_BYTES, link);
    let received = binned(evidence, metric::RX_BYTES, link);
    let bytes = if sent.iter().sum::<f64>() > received.iter().sum::<f64>() {
        sent
    } else {
        received
    };
    bytes.iter().map(|bytes| bytes * 8.0 / 1e6 / BIN).collect()
}

/// Compares each counter of a recording with the throughput.
fn sampled_candidates(recording: &Recording, throughput: &[f64], every: f64) -> Vec<Candidate> {
    let evidence = &recording.evidence;
    let candidate = |event: Event<'_>| {
        let values = binned(evidence, event.counter, |subject| event.of.has(subject));
        // Every thread has a file of its own.
        let files = match event.of {
            Of::Threads => evidence.map.program.as_ref().map_or(1, |p| p.threads.len()),
            Of::Host | Of::Cpus => 1,
        };
        let cost = event.file.and_then(reading).map(|us| us * files as f64);
        let candidate = Candidate::of(event.name, event.counts, values, (throughput, every))?;
        Some(Candidate { cost, ..candidate })
    };
    events(evidence).into_iter().filter_map(candidate).collect()
}

/// Lists and draws all candidates, and looks for the rise that the source saw.
fn show(mut candidates: Vec<Candidate>, throughput: &[f64], every: f64, found: &mut Experiment) {
    candidates.sort_by(|a, b| b.r.abs().total_cmp(&a.r.abs()));
    let of_kind = |kind: Counts| candidates.iter().filter(move |of| of.counts == kind);
    let others: Vec<&Candidate> = of_kind(Counts::Other).collect();
    found.notes.extend(cheapest(&others));
    for (kind, words) in [
        (Counts::Other, "that count neither packets nor work on them"),
        (
            Counts::Packets,
            "of packets, batches of them or work on them, which is the throughput itself",
        ),
    ] {
        let title = format!(
            "counters {words}, against throughput while ever more spin; published for the calls of handle_tx: r {PUBLISHED_R} of \
             single values"
        );
        let columns = [
            "counter",
            "r, smoothed over 10 s",
            "r of single values (95 %)",
            "µs for a reading",
        ];
        found
            .lists
            .push(List::new(title, &columns, of_kind(kind).map(cells)));
    }
    let drawn = [Counts::Other, Counts::Packets]
        .into_iter()
        .flat_map(|kind| of_kind(kind).take(DRAWN));
    let mut curves = vec![relative("throughput", throughput)];
    curves.extend(drawn.map(|of| relative(&of.name, &of.values)));
    curves[0].own = true;
    let title = "throughput and counters, smoothed over 10 s, of their largest values";
    let axes = ["seconds; from time to time one more guest spins", "%"];
    found
        .curves
        .push(Curves::new("profile-events", title, axes, curves));
    let series = candidates.iter().map(|of| (&of.name[..], &of.values[..]));
    steps::show(series.collect(), throughput, every, found);
}

fn cells(of: &Candidate) -> Vec<String> {
    vec![
        of.name.clone(),
        format!("{:.2}", of.r),
        of.single.clone().unwrap_or_else(|| "too short".to_owned()),
        of.cost
            .map_or_else(|| "at each event".to_owned(), |us| format!("{us:.0}")),
    ]
}

/// Returns a line of smoothed values in percent of the largest.
fn relative(name: &str, values: &[f64]) -> Curve {
    let smooth = smoothed(values);
    let most = smooth.iter().copied().fold(1e-9, f64::max);
    let points = smooth.iter().enumerate();
    let points = points.map(|(bin, value)| [bin as f64 * BIN, 100.0 * value / most]);
    Curve::new(name, points)
}

/// Returns the cheapest of the candidates whose correlation equals the highest.
fn cheapest(candidates: &[&Candidate]) -> Option<String> {
    let best = candidates.first()?;
    let close = candidates
        .iter()
        .filter(|of| of.r.abs() >= best.r.abs() - EQUAL_WITHIN);
    let (cost, cheapest) = close
        .filter_map(|of| Some((of.cost?, of)))
        .min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(format!(
        "Cheapest to record of the counters that count neither packets nor work on them and go with the throughput as closely as any (r within \
         {EQUAL_WITHIN}): {} (r {:.2}), {cost:.0} µs for a reading, with no function traced.",
        cheapest.name, cheapest.r
    ))
}

/// Returns the total growth of all counters with this name in each interval.
fn binned(evidence: &Evidence, name: &str, wanted: impl Fn(&Subject) -> bool) -> Vec<f64> {
    let times = &evidence.series.times;
    let Some(first) = times.first() else {
        return Vec::new();
    };
    let bins = (evidence.seconds() / BIN).floor() as usize;
    let mut values = vec![0.0; bins];
    let columns = evidence.series.columns.iter();
    for (_, column) in columns.filter(|(key, _)| key.name == name && wanted(&key.subject)) {
        for pair in column.points.windows(2) {
            let [before, after] = [pair[0], pair[1]];
            let Some(at) = times.get(after.0 as usize) else {
                continue;
            };
            // The growth lies before the second point.
            let bin = (at.saturating_sub(*first).as_secs_f64() / BIN - 1e-9).floor() as usize;
            if let Some(value) = values.get_mut(bin) {
                *value += after.1.saturating_sub(before.1) as f64;
            }
        }
    }
    values
}

/// Returns, for each interval, the mean of the intervals around it.
fn smoothed(values: &[f64]) -> Vec<f64> {
    let half = SMOOTH / 2;
    (0..values.len())
        .map(|i| {
            let around = &values[i.saturating_sub(half)..(i + half).min(values.len())];
            mean(around.iter().copied())
        })
        .collect()
}

/// Waits until `time` has passed or the flag is raised.
fn wait(time: Duration, stop: &Interrupt, interrupt: &Interrupt) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time && !stop.is_raised() {
        interrupt.sleep(Duration::from_millis(10))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_observe::{Key, Kind, Sample};

    #[test]
    fn a_counter_is_laid_to_the_half_seconds_in_which_it_grew() {
        let mut evidence = Evidence::default();
        for (ms, value) in [
            (0, 10),
            (250, 12),
            (500, 15),
            (750, 15),
            (1_000, 25),
            (1_100, 99),
        ] {
            let key = Key::new(Subject::Cpu(0), "n");
            let other = Key::new(Subject::Host, "n");
            evidence.series.push(Sample {
                at: Duration::from_millis(ms),
                values: vec![
                    (key, Kind::Counter, value),
                    (other, Kind::Counter, 7 * value),
                ],
            });
        }
        let bins = binned(&evidence, "n", |subject| Of::Cpus.has(subject));
        assert_eq!(bins, [5.0, 10.0]);
    }

    #[test]
    fn the_cheapest_of_the_closest_is_reported() {
        let of = |name: &str, r, cost| Candidate {
            name: name.into(),
            counts: Counts::Other,
            values: Vec::new(),
            r,
            single: None,
            cost,
        };
        let candidates = [
            of("dear", 0.95, Some(90.0)),
            of("call", -0.93, None),
            of("cheap", -0.92, Some(5.0)),
            of("far", 0.5, Some(1.0)),
        ];
        let text = cheapest(&candidates.iter().collect::<Vec<_>>()).expect("one");
        assert!(text.contains("cheap (r -0.92), 5 µs"), "{text}");
        assert_eq!(cheapest(&[]), None);
    }

    #[test]
    fn counters_of_packets_are_listed_apart() {
        let rising: Vec<f64> = (0..80).map(f64::from).collect();
        let candidate = |name: &str, counts| {
            let of = Candidate::of(name.into(), counts, rising.clone(), (&rising, 5.0));
            of.expect("no constant")
        };
        let mut found = Experiment::default();
        let all = vec![
            candidate("packets", Counts::Packets),
            candidate("waiting", Counts::Other),
        ];
        show(all, &rising, 5.0, &mut found);
        let first = |list: usize| found.lists[list].rows[0][..3].to_vec();
        assert_eq!(first(0), ["waiting", "1.00", "1.00 (1.00 to 1.00)"]);
        assert_eq!(first(1), ["packets", "1.00", "1.00 (1.00 to 1.00)"]);
        assert!(found.lists[1].title.contains("the throughput itself"));
    }

    #[test]
    fn functions_beside_the_path_of_packets_are_known() {
        assert!(counts("scheduler (sched_switch)") == Counts::Other);
        assert!(counts("packet_recvmsg") == Counts::Packets);
    }

    #[test]
    fn calls_that_were_counted_are_candidates_too() {
        let mut evidence = Evidence::default();
        let key = |name: &'static str| (Key::new(Subject::Host, name), Kind::Counter, 1);
        evidence.series.push(Sample {
            at: Duration::ZERO,
            values: vec![key("call.tun_chr_read_iter"), key("drop.FULL_RING")],
        });
        let names: Vec<String> = events(&evidence).into_iter().map(|of| of.name).collect();
        assert_eq!(names.len(), EVENTS.len() + 1);
        assert_eq!(names[EVENTS.len()], "calls of tun_chr_read_iter");
    }

    #[test]
    fn smoothing_keeps_constant_values() {
        assert_eq!(smoothed(&[3.0; 50]), [3.0; 50]);
        let mut step = vec![0.0; 40];
        step[20..].fill(1.0);
        let smooth = smoothed(&step);
        assert_eq!((smooth[9], smooth[20], smooth[31]), (0.0, 0.5, 1.0));
    }
}

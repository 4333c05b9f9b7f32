//! One guest sends, ever more spin: which counter goes with the throughput? The source took the
//! number of calls of a function of the kernel; here every counter that a doctor samples is a
//! candidate, calls of functions where the kernel counts them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use seikan_diagnose::stats::{correlate, strongest};
use seikan_diagnose::{Evidence, Recording};
use seikan_load::stats::Spread;
use seikan_load::{Stop, join};
use seikan_observe::{Subject, metric};
use seikan_sys::calls;
use seikan_ui::Interrupt;

use super::guests::{GUESTS, Network, Switch, UPLINK};
use super::look::Looker;
use super::profile::BIN;
use super::{Bench, Curve, Curves, Found, List};
use crate::error::Result;
use crate::scenario::Hog;

/// Intervals over which the source's figures are smoothed: 10 s.
const SMOOTH: usize = 20;
/// How often one more guest begins to spin, as a multiple of a load's time: 25 s with the usual 3.
const EVERY: f64 = 25.0 / 3.0;
/// The source compared values of the same interval.
const NO_LAG: usize = 0;
/// Counters that are drawn: those that go with the throughput most.
const DRAWN: usize = 7;
/// The published correlation.
const PUBLISHED_R: f64 = 0.605;

/// Counters that may explain the throughput: name, subjects to sum, counter, and its file.
const EVENTS: [(&str, Of, &str, &str); 8] = [
    (
        "packets handled in softirqs",
        Of::Cpus,
        metric::SOFTNET_PROCESSED,
        "/proc/self/net/softnet_stat",
    ),
    (
        "runs of the receive softirq",
        Of::Cpus,
        metric::NET_RX,
        "/proc/softirqs",
    ),
    (
        "time in softirqs",
        Of::Cpus,
        metric::SOFTIRQ_NS,
        "/proc/stat",
    ),
    ("time in user mode", Of::Cpus, metric::USER_NS, "/proc/stat"),
    (
        "time in which a task waited for a processor",
        Of::Host,
        metric::PRESSURE_CPU_US,
        "/proc/pressure/cpu",
    ),
    (
        "time that the switch waited for a processor",
        Of::Threads,
        metric::RUN_DELAY_NS,
        "/proc/thread-self/schedstat",
    ),
    (
        "times that the switch had to give way",
        Of::Threads,
        metric::INVOLUNTARY_SWITCHES,
        "/proc/thread-self/status",
    ),
    (
        "time that the switch ran",
        Of::Threads,
        metric::RUN_NS,
        "/proc/thread-self/schedstat",
    ),
];
/// The doctor looks for an hour at most.
const MOST_EVERY: Duration = Duration::from_secs(3_600 / GUESTS.len() as u64);
/// Correlations that differ by less are alike.
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

/// One guest sends, and every so often one more spins; which counter goes with the throughput?
pub(super) fn growing(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let every = bench.time().mul_f64(EVERY).min(MOST_EVERY);
    let seconds = (every.as_secs_f64() * GUESTS.len() as f64).ceil();
    let network = Network::create(Switch::OpenVSwitch, None, bench)?;
    bench.step(format!(
        "one guest sends for {seconds:.0} s, ever more spin"
    ))?;
    let recording = network.sending(1, bench, |_| {
        let looker = Looker {
            seconds,
            // The deepest level adds calls of functions; without them the cheapest level suffices.
            level: Some(if calls::can_be_counted() { 3 } else { 0 }),
            ..Looker::new("ever more spin", &network.switch, UPLINK)
        };
        let (stop, guests) = (AtomicBool::new(false), &network.guests[1..]);
        std::thread::scope(|scope| {
            let (stop, interrupt) = (&stop, bench.interrupt);
            let hogs = scope.spawn(move || -> Result<()> {
                let mut hogs = Vec::new();
                // The first one sends.
                for guest in guests {
                    wait(every, stop, interrupt)?;
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    hogs.push(Hog::start(guest)?);
                }
                wait(Duration::MAX / 4, stop, interrupt)
            });
            let looked = {
                let _stop = Stop(stop);
                looker.look(bench.desk())
            };
            join(hogs)??;
            looked
        })
    })?;
    let Some(recording) = recording.1 else {
        found.problems.extend(recording.0.problem);
        return Ok(());
    };
    correlations(&recording, every.as_secs_f64(), found);
    Ok(())
}

/// A quantity that may correlate with the throughput.
struct Event<'a> {
    name: String,
    of: Of,
    counter: &'a str,
    /// The file that has it; none of a function's calls, which the kernel counts as they happen.
    file: Option<&'static str>,
}

/// Returns all of them, and the functions with counted calls.
fn events(evidence: &Evidence) -> Vec<Event<'_>> {
    let known = EVENTS.iter().map(|(name, of, counter, file)| Event {
        name: (*name).to_owned(),
        of: *of,
        counter,
        file: Some(*file),
    });
    let columns = evidence.series.columns.keys();
    let function_calls = columns.filter_map(|key| {
        let function = key.name.strip_prefix(metric::CALL_PREFIX)?;
        Some(Event {
            name: format!("calls of {function}"),
            of: Of::Host,
            counter: key.name.as_ref(),
            file: None,
        })
    });
    known.chain(function_calls).collect()
}

/// Microseconds that it takes to read a file once.
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

/// A counter held against the throughput.
struct Candidate {
    r: f64,
    /// Microseconds for a reading.
    cost: Option<f64>,
    cells: Vec<String>,
    curve: Curve,
}

/// Each counter against the throughput: as the source did it, and with an interval.
fn correlations(recording: &Recording, every: f64, found: &mut Found) {
    let evidence = &recording.evidence;
    let inner = evidence.map.inner.clone().unwrap_or_default();
    let link = |subject: &Subject| matches!(subject, Subject::Link(name) if *name == inner);
    let (sent, received) = (
        binned(evidence, metric::TX_BYTES, link),
        binned(evidence, metric::RX_BYTES, link),
    );
    let bytes = if sent.iter().sum::<f64>() > received.iter().sum::<f64>() {
        sent
    } else {
        received
    };
    let throughput: Vec<f64> = bytes.iter().map(|bytes| bytes * 8.0 / 1e6 / BIN).collect();
    let seconds = |values: &[f64]| -> Vec<[f64; 2]> {
        let points = values.iter().enumerate();
        points.map(|(i, value)| [i as f64 * BIN, *value]).collect()
    };
    let smooth = smoothed(&throughput);
    let most = smooth.iter().copied().fold(0.0, f64::max);
    let mut curves = vec![Curve {
        name: "throughput".to_owned(),
        own: true,
        published: false,
        points: seconds(
            &smooth
                .iter()
                .map(|v| 100.0 * v / most.max(1e-9))
                .collect::<Vec<_>>(),
        ),
    }];
    let mut candidates: Vec<Candidate> = Vec::new();
    for event in events(evidence) {
        let values = binned(evidence, event.counter, |subject| event.of.has(subject));
        let smooth_values = smoothed(&values);
        let Some((_, r)) = strongest(&smooth_values, &smooth, NO_LAG) else {
            continue;
        };
        // A block is as long as a step of the load: neighbours within one are alike.
        let block = (every / BIN).round() as usize;
        let honest = correlate(&values, &throughput, NO_LAG, block);
        let honest = honest.map_or_else(
            || "too short".to_owned(),
            |c| format!("{:.2} ({:.2} to {:.2})", c.r.value, c.r.low, c.r.high),
        );
        let most = smooth_values.iter().copied().fold(0.0, f64::max);
        let shares = smooth_values.iter().map(|v| 100.0 * v / most.max(1e-9));
        // Every thread has a file of its own.
        let files = match event.of {
            Of::Threads => evidence.map.program.as_ref().map_or(1, |p| p.threads.len()),
            Of::Host | Of::Cpus => 1,
        };
        let cost = event.file.and_then(reading).map(|us| us * files as f64);
        let cost_label = match (event.file, cost) {
            (_, Some(us)) => format!("{us:.0}"),
            (Some(_), None) => "–".to_owned(),
            (None, None) => "at each call".to_owned(),
        };
        candidates.push(Candidate {
            r,
            cost,
            cells: vec![event.name.clone(), format!("{r:.2}"), honest, cost_label],
            curve: Curve {
                name: event.name,
                own: false,
                published: false,
                points: seconds(&shares.collect::<Vec<_>>()),
            },
        });
    }
    candidates.sort_by(|a, b| b.r.abs().total_cmp(&a.r.abs()));
    found.notes.extend(cheapest(&candidates));
    found.lists.push(List {
        title: format!(
            "counters against throughput while ever more spin; published for the calls of handle_tx: r {PUBLISHED_R}"
        ),
        columns: ["counter, read ten times a second", "r, smoothed over 10 s", "r (95 %)", "µs for a reading"]
            .map(str::to_owned)
            .to_vec(),
        rows: candidates.iter().map(|of| of.cells.clone()).collect(),
    });
    let drawn = candidates.into_iter().take(DRAWN);
    curves.extend(drawn.map(|of| of.curve));
    found.curves.push(Curves {
        name: "profile-events".to_owned(),
        title: "throughput and counters, smoothed over 10 s, of their largest values".to_owned(),
        x: "seconds; from time to time one more guest spins".to_owned(),
        y: "%".to_owned(),
        logarithmic: [false, false],
        curves,
    });
}

/// Which of those that go with the throughput as closely as the closest costs least.
fn cheapest(candidates: &[Candidate]) -> Option<String> {
    let best = candidates.first()?;
    let close = candidates
        .iter()
        .filter(|of| of.r.abs() >= best.r.abs() - EQUAL_WITHIN);
    let (cost, cheapest) = close
        .filter_map(|of| Some((of.cost?, of)))
        .min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(format!(
        "Cheapest to record of the counters that go with the throughput as closely as any (r within {EQUAL_WITHIN}): {} (r {:.2}), {cost:.0} µs for a reading, with no \
         function traced.",
        cheapest.curve.name, cheapest.r
    ))
}

/// By how much the counters called so grew in every interval, added up.
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

/// The mean of the intervals around each.
fn smoothed(values: &[f64]) -> Vec<f64> {
    let half = SMOOTH / 2;
    (0..values.len())
        .map(|i| {
            let around = &values[i.saturating_sub(half)..(i + half).min(values.len())];
            around.iter().sum::<f64>() / around.len().max(1) as f64
        })
        .collect()
}

/// Until `time` has passed or the flag is raised.
fn wait(time: Duration, stop: &AtomicBool, interrupt: &Interrupt) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time && !stop.load(Ordering::Relaxed) {
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
            r,
            cost,
            cells: Vec::new(),
            curve: Curve {
                name: name.into(),
                own: false,
                published: false,
                points: Vec::new(),
            },
        };
        let candidates = [
            of("dear", 0.95, Some(90.0)),
            of("call", -0.93, None),
            of("cheap", -0.92, Some(5.0)),
            of("far", 0.5, Some(1.0)),
        ];
        let text = cheapest(&candidates).expect("one");
        assert!(text.contains("cheap (r -0.92), 5 µs"), "{text}");
        assert_eq!(cheapest(&[]), None);
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

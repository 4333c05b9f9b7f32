//! Eight guests behind a virtual switch, some that send and some that spin: what of a profile tells why they are slow?
//!
//! Guests are network namespaces, each on a port of a bridge of the kernel's or of Open vSwitch with its datapath in user
//! space; all send to one host behind the same switch. The source profiled the kernel's functions and held the number of
//! their calls against the throughput. Here every counter that a doctor samples is a candidate, and what it costs to sample it
//! is measured, too.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use seikan_diagnose::stats::{correlate, strongest};
use seikan_diagnose::{Cause, Evidence, Recording};
use seikan_observe::profile::Share;
use seikan_observe::{Subject, metric};
use tempfile::TempDir;

use super::figures::interleaved;
use super::look::{LOOK, Looker};
use super::{Bench, Curve, Curves, Figures, Found, List, Row};
use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::{Host, veth};
use crate::load::{Ends, LiveOptions, Meter, join, live};
use crate::scenario::Hog;
use crate::stats::percentile;
use crate::tunnel::{Started, middle, openvswitch, private_directory};

/// The guests, and the ports of the switch, the last of which leads to who receives.
const GUESTS: [&str; 8] = ["G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8"];
const PORTS: [&str; 9] = [
    "port1", "port2", "port3", "port4", "port5", "port6", "port7", "port8", UPLINK,
];
const UPLINK: &str = "uplink";
const MTU: u32 = 1_500;
/// Guests that send and guests that spin: name, how many of each, and what was published in Mbit/s.
const PATTERNS: [(&str, usize, usize, Option<f64>); 6] = [
    ("A", 2, 0, Some(9_200.0)),
    ("B", 4, 0, Some(9_200.0)),
    ("C", 8, 0, Some(9_200.0)),
    ("D", 2, 2, None),
    ("E", 2, 4, None),
    ("F", 2, 6, None),
];
/// Throughput is told of so long intervals, as in the source.
const BIN: f64 = 0.5;
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_secs(1);
/// Intervals over which the source's figures are smoothed: 10 s.
const SMOOTH: usize = 20;
/// How often one more guest begins to spin, as a multiple of a load's time: 25 s with the usual 3.
const EVERY: f64 = 25.0 / 3.0;
/// Intervals by which a counter may come before or after the throughput.
const MOST_LAG: usize = 10;
/// Functions of a profile that are told.
const TOLD: usize = 6;
/// The published correlation.
const PUBLISHED_R: f64 = 0.605;

/// What forwards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Switch {
    Bridge,
    OpenVSwitch,
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bridge => "bridge",
            Self::OpenVSwitch => "Open vSwitch",
        })
    }
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    bench.expect(2 * rounds * PATTERNS.len() + LEVELS.len() * rounds + GUESTS.len() + 8);
    let mut found = Found::default();
    for switch in [Switch::Bridge, Switch::OpenVSwitch] {
        patterns(bench, switch, &mut found)?;
        let done = functions(bench, switch, &mut found);
        found.bear(done)?;
    }
    for part in [costs, growing] {
        let done = part(bench, &mut found);
        found.bear(done)?;
    }
    Ok(found)
}

/// Guests, switch and receiver. Fields drop in this order: programs, hosts, directory.
struct Network {
    _started: Started,
    guests: Vec<Host>,
    receiver: Host,
    switch: Host,
    _dir: TempDir,
}

impl Network {
    fn create(kind: Switch, bench: &Bench<'_>) -> Result<Self> {
        let refuse = |e: seikan_sys::netlink::NetlinkError| LabError::Setup(e.to_string());
        let switch = Host::create("S", 3)?;
        let receiver = Host::create("B", 2)?;
        let guests = GUESTS.iter().zip(11..);
        let guests: Vec<Host> = guests
            .map(|(name, number)| Host::create(name, number))
            .collect::<Result<_>>()?;
        for (port, host) in PORTS.iter().zip(guests.iter().chain([&receiver])) {
            veth(&switch, port, host, &host.device)?;
            host.configure(&host.device, MTU, host.address, host.address6)?;
            let netlink = switch.netlink()?;
            let index = netlink.link(port).map_err(refuse)?.index;
            netlink.set_up(index).map_err(refuse)?;
            if kind == Switch::OpenVSwitch {
                // It takes packets as they are: longer ones than the MTU it would not pass on.
                host.set_offload(false)?;
            }
        }
        let dir = private_directory()?;
        let started = match kind {
            Switch::Bridge => {
                middle::bridge(&switch, &PORTS)?;
                Started::default()
            }
            Switch::OpenVSwitch => {
                openvswitch::start_in(&switch, &PORTS, dir.path(), bench.interrupt)?
            }
        };
        Ok(Self {
            _started: started,
            guests,
            receiver,
            switch,
            _dir: dir,
        })
    }

    /// Lets so many guests send while `work` is done, which is told how many bytes have arrived.
    fn sending<T>(
        &self,
        senders: usize,
        bench: &Bench<'_>,
        work: impl FnOnce(&dyn Fn() -> u64) -> Result<T>,
    ) -> Result<T> {
        let ends: Vec<Ends<'_>> = self
            .guests
            .iter()
            .take(senders)
            .map(|guest| Ends {
                client: guest,
                server: &self.receiver,
                target: self.receiver.address,
                sources: &[],
            })
            .collect();
        let (mut work, mut outcome) = (Some(work), None);
        nested(&ends, &[], bench.interrupt, &mut |meters| {
            bench.interrupt.sleep(WARMUP)?;
            let arrived = || meters.iter().map(|meter| meter.bytes()).sum::<u64>();
            outcome = work.take().map(|work| work(&arrived));
            Ok(())
        })?;
        let none = || Err(LabError::Setup("nothing was done: this is a bug".into()));
        outcome.unwrap_or_else(none)
    }

    /// Guests that spin, the last ones first.
    fn spinning(&self, hogs: usize) -> Result<Vec<Hog>> {
        self.guests
            .iter()
            .rev()
            .take(hogs)
            .map(Hog::start)
            .collect()
    }
}

/// One load within the other, down to `work`, which has the meters of all.
fn nested(
    ends: &[Ends<'_>],
    meters: &[&Meter],
    interrupt: &Interrupt,
    work: &mut dyn FnMut(&[&Meter]) -> Result<()>,
) -> Result<()> {
    let Some((first, rest)) = ends.split_first() else {
        return work(meters);
    };
    live(first, &LiveOptions::default(), interrupt, |meter| {
        let mut all = meters.to_vec();
        all.push(meter);
        nested(rest, &all, interrupt, work)
    })
}

/// Raises a flag when dropped, also by a panic: a scope would wait for its threads for ever.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Until `time` has passed or the flag is raised.
fn wait(time: Duration, stop: &AtomicBool, interrupt: &Interrupt) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time && !stop.load(Ordering::Relaxed) {
        interrupt.sleep(Duration::from_millis(10))?;
    }
    Ok(())
}

/// Mbit/s of every interval of `time`.
fn rates(bench: &Bench<'_>, time: Duration, arrived: &dyn Fn() -> u64) -> Result<Vec<f64>> {
    let bins = (time.as_secs_f64() / BIN).round().max(2.0) as usize;
    let mut before = arrived();
    let mut rates = Vec::new();
    let mut begin = Instant::now();
    for _ in 0..bins {
        bench.interrupt.sleep(Duration::from_secs_f64(BIN))?;
        let (now, end) = (arrived(), Instant::now());
        // Who looks on a busy machine is late.
        let seconds = end.duration_since(begin).as_secs_f64();
        rates.push((now - before) as f64 * 8.0 / 1e6 / seconds);
        (before, begin) = (now, end);
    }
    Ok(rates)
}

/// Throughput by pattern: how much, how much it swings, how it is distributed.
fn patterns(bench: &mut Bench<'_>, switch: Switch, found: &mut Found) -> Result<()> {
    let names = PATTERNS.map(|(name, ..)| name);
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let (_, senders, hogs, _) = pattern(name);
        let network = Network::create(switch, bench)?;
        let _hogs = network.spinning(hogs)?;
        let time = bench.time().mul_f64(5.0 / 3.0);
        network.sending(senders, bench, |arrived| rates(bench, time, arrived))
    })?;
    let label = |(name, senders, hogs, _): (&str, usize, usize, Option<f64>)| {
        format!("{name}: {senders} send, {hogs} spin")
    };
    let figures = |title: String, unit: &str, told: bool, of: fn(&[f64]) -> Option<f64>| Figures {
        title,
        unit: unit.to_owned(),
        base: label(PATTERNS[0]),
        rows: PATTERNS
            .into_iter()
            .zip(&measured)
            .map(|(pattern, rounds)| Row {
                rounds: rounds.iter().map(|rates| of(rates.as_ref()?)).collect(),
                ..Row::new(label(pattern), pattern.3.filter(|_| told))
            })
            .collect(),
    };
    let throughput = figures(format!("throughput, {switch}"), "Mbit/s", true, |rates| {
        at(rates, 0.5)
    });
    let swing = figures(
        format!("swing, {switch}"),
        "of the median",
        false,
        |rates| Some((at(rates, 0.95)? - at(rates, 0.05)?) / at(rates, 0.5)?),
    );
    let [a, .., f] = PATTERNS.map(label);
    let d = label(PATTERNS[3]);
    found.claims.push(throughput.claim(&a, &d));
    found.claims.push(throughput.claim(&d, &f));
    found.claims.push(swing.claim(&f, &a));
    found.figures.extend([throughput, swing]);
    let lines = PATTERNS
        .into_iter()
        .zip(&measured)
        .map(|(pattern, rounds)| {
            let mut all: Vec<f64> = rounds.iter().flatten().flatten().copied().collect();
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
        name: format!("profile-distribution-{}", file_name(switch)),
        title: format!("share of half seconds with so much or less, {switch}"),
        x: "Mbit/s".to_owned(),
        y: "%".to_owned(),
        logarithmic: [false, false],
        curves: lines.collect(),
    });
    Ok(())
}

fn file_name(switch: Switch) -> &'static str {
    match switch {
        Switch::Bridge => "bridge",
        Switch::OpenVSwitch => "openvswitch",
    }
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

/// Where the processors' time goes without guests that spin and with most, and what the doctor says of the latter.
fn functions(bench: &mut Bench<'_>, switch: Switch, found: &mut Found) -> Result<()> {
    let mut columns: Vec<(String, Vec<Share>)> = Vec::new();
    let good = found
        .figures
        .iter()
        .find(|f| f.title == format!("throughput, {switch}"));
    let expected = good
        .and_then(|f| f.rows[0].spread())
        .map_or(1e3, |s| s.median);
    for name in ["A", "F"] {
        bench.step(format!("functions, {switch}, {name}"))?;
        let (_, senders, hogs, _) = pattern(name);
        let network = Network::create(switch, bench)?;
        let _hogs = network.spinning(hogs)?;
        let of = format!("{switch}, {name}");
        let looker = Looker {
            expected,
            right: &[Cause::CpuContention],
            ..Looker::new(&of, &network.switch, UPLINK)
        };
        let (look, recording) = network.sending(senders, bench, |_| looker.look(bench.desk()))?;
        let Some(recording) = recording else {
            found.problems.extend(look.problem);
            continue;
        };
        let profile = recording.evidence.profile.unwrap_or_default();
        columns.push((name.to_owned(), profile.machine));
        // The bridge has no program that could wait for a processor: who sends does, at the guests.
        if name == "F" && switch == Switch::OpenVSwitch {
            found.looks.push(look);
        }
    }
    let mut names: Vec<String> = Vec::new();
    for (_, shares) in &columns {
        for share in shares.iter().take(TOLD) {
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

/// What recording costs two guests that send through Open vSwitch.
fn costs(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let names = LEVELS.map(|(name, _)| name);
    let network = Network::create(Switch::OpenVSwitch, bench)?;
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let level = LEVELS
            .iter()
            .find(|level| level.0 == name)
            .and_then(|level| level.1);
        network.sending(2, bench, |arrived| {
            std::thread::scope(|scope| {
                let looker = Looker {
                    level,
                    ..Looker::new(name, &network.switch, UPLINK)
                };
                let desk = bench.desk();
                let looking = level.map(|_| scope.spawn(move || looker.look(desk)));
                // What comes after the measuring, writing and reading, is not counted.
                let (before, begin) = (arrived(), Instant::now());
                let slept = bench.interrupt.sleep(Duration::from_secs_f64(LOOK));
                let bits = (arrived() - before) as f64 * 8.0;
                let seconds = begin.elapsed().as_secs_f64();
                if let Some(looking) = looking {
                    let (look, _) = join(looking)??;
                    if let Some(problem) = look.problem {
                        return Err(LabError::Setup(problem));
                    }
                }
                slept.map(|()| bits / 1e6 / seconds)
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

/// Counters that might tell: name, and the values that are added up.
const EVENTS: [(&str, Of, &str); 8] = [
    (
        "packets handled in softirqs",
        Of::Cpus,
        metric::SOFTNET_PROCESSED,
    ),
    ("runs of the receive softirq", Of::Cpus, metric::NET_RX),
    ("time in softirqs", Of::Cpus, metric::SOFTIRQ_NS),
    ("time in user mode", Of::Cpus, metric::USER_NS),
    (
        "time in which somebody waited for a processor",
        Of::Host,
        metric::PRESSURE_CPU_US,
    ),
    (
        "time that the switch waited for a processor",
        Of::Threads,
        metric::RUN_DELAY_NS,
    ),
    (
        "times that the switch had to give way",
        Of::Threads,
        metric::INVOLUNTARY_SWITCHES,
    ),
    ("time that the switch ran", Of::Threads, metric::RUN_NS),
];

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
fn growing(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let every = bench.time().mul_f64(EVERY);
    let seconds = (every.as_secs_f64() * GUESTS.len() as f64).ceil();
    let network = Network::create(Switch::OpenVSwitch, bench)?;
    bench.step(format!(
        "one guest sends for {seconds:.0} s, ever more spin"
    ))?;
    let recording = network.sending(1, bench, |_| {
        let looker = Looker {
            seconds,
            level: Some(0),
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
    let mut rows: Vec<(f64, Vec<String>)> = Vec::new();
    for (name, of, counter) in EVENTS {
        let values = binned(evidence, counter, |subject| of.has(subject));
        let smooth_values = smoothed(&values);
        let Some((lag, r)) = strongest(&smooth_values, &smooth, MOST_LAG) else {
            continue;
        };
        // A block is as long as a step of the load: neighbours within one are alike.
        let block = (every / BIN).round() as usize;
        let honest = correlate(&values, &throughput, MOST_LAG, block);
        let honest = honest.map_or_else(
            || "too short".to_owned(),
            |c| format!("{:.2} ({:.2} to {:.2})", c.r.value, c.r.low, c.r.high),
        );
        rows.push((
            r.abs(),
            vec![
                name.to_owned(),
                format!("{r:.2}"),
                format!("{:.1} s", f64::from(lag) * BIN),
                honest,
            ],
        ));
        let most = smooth_values.iter().copied().fold(0.0, f64::max);
        let share: Vec<f64> = smooth_values
            .iter()
            .map(|v| 100.0 * v / most.max(1e-9))
            .collect();
        curves.push(Curve {
            name: name.to_owned(),
            own: false,
            published: false,
            points: seconds(&share),
        });
    }
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.lists.push(List {
        title: format!(
            "counters against throughput while ever more spin; published for the calls of handle_tx: r {PUBLISHED_R}"
        ),
        columns: ["counter, read ten times a second", "r, smoothed over 10 s", "throughput later by", "r (95 %)"]
            .map(str::to_owned)
            .to_vec(),
        rows: rows.into_iter().map(|(_, row)| row).collect(),
    });
    found.curves.push(Curves {
        name: "profile-events".to_owned(),
        title: "throughput and counters, smoothed over 10 s, of their largest values".to_owned(),
        x: "seconds; from time to time one more guest spins".to_owned(),
        y: "%".to_owned(),
        logarithmic: [false, false],
        curves,
    });
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
    fn smoothing_keeps_what_is_level() {
        assert_eq!(smoothed(&[3.0; 50]), [3.0; 50]);
        let mut step = vec![0.0; 40];
        step[20..].fill(1.0);
        let smooth = smoothed(&step);
        assert_eq!((smooth[9], smooth[20], smooth[31]), (0.0, 0.5, 1.0));
    }
}

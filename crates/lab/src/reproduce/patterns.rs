//! The kernel's functions pattern by pattern of [`profile`](super::profile): their processor time,
//! which a sampling profiler sees, and the number of their calls.

use std::time::{Duration, Instant};

use seikan_diagnose::Cause;
use seikan_observe::profile::Share;

use super::figures::{cell, named};
use super::guests::{Network, Switch, UPLINK};
use super::look::{LOOK, Looker};
use super::profile::{PATTERNS, Pattern};
use super::tracepoints::Counted;
use super::{Bars, Bench, Experiment, List, Part, titled};
use crate::error::Result;

/// Number of functions of a profile that are listed for each pattern.
const LISTED: usize = 5;
/// Number of functions that the source shows: those with most time.
const LARGEST: usize = 4;
/// Their published share together, in percent of the processors' time.
const PUBLISHED_SHARE: f64 = 90.0;
/// Time for which calls are counted, as a share of the time of a load.
const COUNTED: f64 = 1.0 / 3.0;
/// A note reports the calls of this function, which corresponds to `handle_tx` of a virtual
/// machine.
const TRANSMIT: &str = "net_dev_start_xmit";
/// The row that calls are compared with.
const THROUGHPUT: &str = "throughput";

/// Calls of one pattern.
struct Calls {
    /// Name and number per second.
    rates: Vec<(String, f64)>,
    /// Throughput meanwhile, in Mbit/s.
    throughput: f64,
}

/// Measures processor time and calls of each pattern, where the receiver's link has this limit, and
/// runs the doctor on the pattern with most busy guests.
pub(super) fn functions(
    bench: &mut Bench<'_>,
    (switch, limit): (Switch, Option<u64>),
    found: &mut Experiment,
) -> Result<()> {
    let mut times: Vec<(String, Vec<Share>)> = Vec::new();
    let mut calls: Vec<(String, Calls)> = Vec::new();
    let title = format!("throughput, {switch}");
    let good = found.figures.iter().find(|figures| figures.title == title);
    let expected = good.and_then(|figures| figures.rows[0].median());
    let last = PATTERNS[PATTERNS.len() - 1].name;
    for pattern in PATTERNS {
        let Pattern { name, .. } = pattern;
        bench.step(format!("functions, {switch}, {name}"))?;
        let network = Network::create(switch, limit, bench)?;
        let _hogs = network.spinning(pattern.hogs)?;
        let of = format!("{switch}, {name}");
        let looker = Looker {
            expected,
            // Functions are sampled quickly; a verdict needs the usual time.
            seconds: if name == last { LOOK } else { LOOK / 2.0 },
            right: Some(Cause::CpuContention),
            ..Looker::new(&of, &network.switch, UPLINK)
        };
        let ((look, recording), counted) = network.sending(pattern.senders, bench, |arrived| {
            // Count and sample one after the other, as in the source: both cost processor time.
            let counted = count(bench, arrived);
            Ok((looker.look(bench.desk)?, counted))
        })?;
        let counted = found.unless_failed("calls of functions", counted)?;
        calls.extend(counted.map(|counted| (name.to_owned(), counted)));
        let Some(recording) = recording else {
            found.problems.extend(look.problem);
            continue;
        };
        let profile = recording.evidence.profile.unwrap_or_default();
        times.push((name.to_owned(), profile.machine));
        // The bridge has no program that could wait for a processor; the senders at the guests do.
        if name == last && switch == Switch::OpenVSwitch {
            found.looks.push(look);
        }
    }
    let of = titled(&switch.to_string(), limit);
    processor_time((switch, &of), &times, found);
    call_rates((switch, &of), &calls, found);
    Ok(())
}

/// Counts calls for a while.
fn count(bench: &Bench<'_>, arrived: &dyn Fn() -> Vec<u64>) -> Result<Calls> {
    let mut counted = Counted::functions()?;
    let arrived = || arrived().iter().sum::<u64>();
    let (before, bytes, begin) = (counted.read()?, arrived(), Instant::now());
    let time = Duration::from_secs_f64(bench.options.seconds * COUNTED);
    bench.interrupt.sleep(time)?;
    let (after, seconds) = (counted.read()?, begin.elapsed().as_secs_f64());
    let grown = before.iter().zip(after);
    let rates = grown.map(|(before, after)| (after - before) as f64 / seconds);
    Ok(Calls {
        throughput: (arrived() - bytes) as f64 * 8.0 / 1e6 / seconds,
        rates: counted.names().iter().cloned().zip(rates).collect(),
    })
}

/// The share of a function, in percent.
fn share(shares: &[Share], symbol: &str) -> Option<f64> {
    let share = shares.iter().find(|share| share.symbol == symbol)?;
    Some(100.0 * share.share)
}

/// Names of the functions with most time over all patterns, the largest first.
fn largest(times: &[(String, Vec<Share>)]) -> Vec<String> {
    let mut sums: Vec<(&str, f64)> = Vec::new();
    for of in times.iter().flat_map(|(_, shares)| shares) {
        match sums.iter_mut().find(|(symbol, _)| *symbol == of.symbol) {
            Some((_, sum)) => *sum += of.share,
            None => sums.push((&of.symbol, of.share)),
        }
    }
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    let names = sums.into_iter().map(|(symbol, _)| symbol.to_owned());
    names.take(LARGEST).collect()
}

/// The source's figure of processor time by pattern: the largest functions and the rest.
fn processor_time(
    (switch, of): (Switch, &str),
    times: &[(String, Vec<Share>)],
    found: &mut Experiment,
) {
    let names = largest(times);
    let sums: Vec<f64> = times
        .iter()
        .map(|(_, shares)| names.iter().filter_map(|name| share(shares, name)).sum())
        .collect();
    let shares_of = |name: &str| -> Vec<Option<f64>> {
        times
            .iter()
            .map(|(_, shares)| share(shares, name))
            .collect()
    };
    let mut parts: Vec<Part> = names
        .iter()
        .map(|name| Part::new(name, shares_of(name)))
        .collect();
    let others = sums.iter().map(|sum| Some((100.0 - sum).max(0.0)));
    parts.push(Part::new("all others", others));
    let patterns: Vec<String> = times.iter().map(|(name, _)| name.clone()).collect();
    found.bars.push(Bars {
        name: format!("profile-functions-{}", switch.slug()),
        title: format!("processor time by function and pattern, {of}"),
        unit: "% of the busy time".to_owned(),
        groups: patterns.clone(),
        parts,
        stacked: true,
    });
    let low = sums.iter().copied().fold(f64::INFINITY, f64::min);
    let high = sums.iter().copied().fold(0.0, f64::max);
    if high > 0.0 {
        found.notes.push(format!(
            "{of}: the {LARGEST} functions with most processor time have {low:.0} to {high:.0} % of the busy time together, by \
             pattern; published for four functions of virtual machines: about {PUBLISHED_SHARE:.0} %."
        ));
    }
    let mut listed = names;
    let more = times
        .iter()
        .flat_map(|(_, shares)| shares.iter().take(LISTED));
    for share in more {
        if !listed.contains(&share.symbol) {
            listed.push(share.symbol.clone());
        }
    }
    let row = |name: &String| {
        named(
            name,
            shares_of(name).into_iter().map(|share| cell(share, 1)),
        )
    };
    let mut rows: Vec<Vec<String>> = listed.iter().map(row).collect();
    let together = sums.iter().map(|sum| format!("{sum:.1}"));
    rows.push(named(format!("the first {LARGEST} together"), together));
    found.lists.push(List {
        title: format!("processor time by function, {of}, % of the busy time"),
        columns: headings("function", &patterns),
        rows,
    });
}

/// The source's figure of calls by pattern. Each is drawn as a share of its number in the first
/// pattern, beside the throughput.
fn call_rates((switch, of): (Switch, &str), calls: &[(String, Calls)], found: &mut Experiment) {
    let Some((_, first)) = calls.first() else {
        return;
    };
    let patterns: Vec<String> = calls.iter().map(|(name, _)| name.clone()).collect();
    let throughput = calls.iter().map(|(_, of)| Some(of.throughput));
    let mut all: Vec<(String, Vec<Option<f64>>)> =
        vec![(THROUGHPUT.to_owned(), throughput.collect())];
    for (name, _) in &first.rates {
        let rate = |(_, of): &(String, Calls)| {
            let mut rates = of.rates.iter();
            rates.find(|(other, _)| other == name).map(|rate| rate.1)
        };
        all.push((name.clone(), calls.iter().map(rate).collect()));
    }
    let relative = |values: &[Option<f64>]| -> Vec<Option<f64>> {
        let base = values[0].filter(|base| *base > 0.0);
        let of = |value: &Option<f64>| Some(100.0 * (*value)? / base?);
        values.iter().map(of).collect()
    };
    found.bars.push(Bars {
        name: format!("profile-calls-{}", switch.slug()),
        title: format!("calls of functions by pattern, {of}"),
        unit: format!("% of pattern {}", patterns[0]),
        groups: patterns.clone(),
        parts: all
            .iter()
            .map(|(name, values)| Part::new(name, relative(values)))
            .collect(),
        stacked: false,
    });
    let transmit = all.iter().find(|(name, _)| name.contains(TRANSMIT));
    for (name, values) in all[..1].iter().chain(transmit) {
        let words: Vec<String> = relative(values)
            .iter()
            .zip(&patterns)
            .map(|(value, pattern)| format!("{pattern} {}", cell(*value, 0)))
            .collect();
        found.notes.push(format!(
            "{of}, {name}, % of pattern {}: {}.",
            patterns[0],
            words.join(", ")
        ));
    }
    found.notes.push(
        "Published, as a picture: calls of handle_tx hardly change from A to C and fall from D to F, as the throughput does."
            .to_owned(),
    );
    let rows = all.iter().map(|(name, values)| {
        let unit = if name == THROUGHPUT { ", Mbit/s" } else { "" };
        let cells = values.iter().map(|value| cell(*value, 0));
        named(format!("{name}{unit}"), cells)
    });
    found.lists.push(List {
        title: format!("calls per second by function, whole machine, {of}"),
        columns: headings("function", &patterns),
        rows: rows.collect(),
    });
}

fn headings(first: &str, patterns: &[String]) -> Vec<String> {
    named(first, patterns.iter().map(|name| format!("pattern {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_observe::profile::Stage;

    fn times() -> Vec<(String, Vec<Share>)> {
        let shares = |of: &[(&str, f64)]| {
            let share = |(symbol, share): &(&str, f64)| Share {
                symbol: (*symbol).into(),
                stage: Stage::Other,
                share: *share,
            };
            of.iter().map(share).collect()
        };
        let a = [("a", 0.4), ("b", 0.3), ("c", 0.1), ("d", 0.05), ("e", 0.04)];
        let b = [("e", 0.5), ("a", 0.2), ("b", 0.1)];
        vec![("A".into(), shares(&a)), ("B".into(), shares(&b))]
    }

    #[test]
    fn the_largest_functions_are_those_of_all_patterns() {
        assert_eq!(largest(&times()), ["a", "e", "b", "c"]);
    }

    #[test]
    fn parts_of_a_pattern_add_up_to_the_whole() {
        let mut found = Experiment::default();
        processor_time((Switch::Bridge, "b"), &times(), &mut found);
        let bars = &found.bars[0];
        for group in 0..2 {
            let sum: f64 = bars
                .parts
                .iter()
                .filter_map(|part| part.values[group])
                .sum();
            assert!((sum - 100.0).abs() < 1e-9, "{bars:?}");
        }
        let last = found.lists[0].rows.last().expect("the sum");
        assert_eq!(last[1..], ["84.0", "80.0"]);
    }

    #[test]
    fn calls_are_compared_with_the_first_pattern() {
        let calls = |throughput, rate| Calls {
            rates: vec![("f (net_dev_start_xmit)".into(), rate)],
            throughput,
        };
        let mut found = Experiment::default();
        let all = [
            ("A".into(), calls(50.0, 200.0)),
            ("D".into(), calls(25.0, 80.0)),
        ];
        call_rates((Switch::Bridge, "b"), &all, &mut found);
        let parts = &found.bars[0].parts;
        assert_eq!(parts[0].values, [Some(100.0), Some(50.0)]);
        assert_eq!(parts[1].values, [Some(100.0), Some(40.0)]);
        assert!(found.notes[1].contains("A 100, D 40"), "{:?}", found.notes);
    }
}

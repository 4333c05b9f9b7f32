//! Counters by step of the load. There are as many equal steps as guests, and one more guest spins
//! in each. In the source, the calls of `handle_tx` rose in the third step and fell in the fourth,
//! but the throughput did not follow; the source does not explain why.

use seikan_load::stats::mean;

use super::figures::{cell, named};
use super::guests::GUESTS;
use super::profile::BIN;
use super::{Experiment, List};

/// Index of the step with the rise, 50 to 75 s.
const RISE: usize = 2;
/// Minimum factor by which a rise exceeds both neighbours.
const HIGHER: f64 = 1.1;
/// Share of the throughput from which it counts as not fallen.
const KEPT: f64 = 0.9;

/// Lists the mean of each series by step, in percent of the largest, and says which have the
/// source's rise.
pub(super) fn show(
    series: Vec<(&str, &[f64])>,
    throughput: &[f64],
    every: f64,
    found: &mut Experiment,
) {
    let bins = (every / BIN).round().max(1.0) as usize;
    let base = means(throughput, bins);
    let mut rows = vec![row("throughput", &base)];
    let mut risen: Vec<&str> = Vec::new();
    let count = series.len();
    for (name, values) in series {
        let means = means(values, bins);
        rows.push(row(name, &means));
        if rises(&means, &base) {
            risen.push(name);
        }
    }
    let second = |step: usize| format!("{:.0}", step as f64 * every);
    let spans = (0..GUESTS.len()).map(|step| format!("{} to {} s", second(step), second(step + 1)));
    found.lists.push(List {
        title: "mean by step, % of the largest; one more guest spins in each".to_owned(),
        columns: named("counter", spans),
        rows,
    });
    let result = if risen.is_empty() {
        format!("in none of {count} counters")
    } else {
        format!(
            "in {} of {count} counters: {}",
            risen.len(),
            risen.join("; ")
        )
    };
    found.notes.push(format!(
        "The published rise of calls (50 to 75 s there, {} to {} s here), after which they fall while the throughput does not, was \
         looked for: it is {result}. It counts if a step is a tenth above both of its neighbours, and the throughput keeps nine \
         tenths in the next.",
        second(RISE),
        second(RISE + 1),
    ));
}

/// Means of the steps; the last one may be shorter.
fn means(values: &[f64], bins: usize) -> Vec<f64> {
    let steps = values.chunks(bins).take(GUESTS.len());
    steps.map(|step| mean(step.iter().copied())).collect()
}

fn row(name: &str, means: &[f64]) -> Vec<String> {
    let most = means.iter().copied().fold(1e-9, f64::max);
    let share = |step| Some(100.0 * means.get(step)? / most);
    named(name, (0..GUESTS.len()).map(|step| cell(share(step), 0)))
}

/// Whether these steps have the source's rise.
fn rises(means: &[f64], throughput: &[f64]) -> bool {
    let [Some(before), Some(at), Some(after)] =
        [RISE - 1, RISE, RISE + 1].map(|step| means.get(step))
    else {
        return false;
    };
    let kept = throughput
        .get(RISE)
        .zip(throughput.get(RISE + 1))
        .is_some_and(|(at, after)| *after >= KEPT * at);
    kept && *at > HIGHER * before && *at > HIGHER * after
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rise_is_above_both_neighbours_while_the_throughput_stays() {
        let flat = [10.0; 8];
        let peak = [5.0, 5.0, 7.0, 5.0, 4.0, 4.0, 3.0, 3.0];
        assert!(rises(&peak, &flat));
        assert!(!rises(&flat, &flat));
        // The calls only follow the throughput.
        assert!(!rises(&peak, &peak));
        assert!(!rises(&peak[..3], &flat));
    }

    #[test]
    fn steps_are_listed_as_shares_of_the_largest() {
        let mut found = Experiment::default();
        let values: Vec<f64> = (0..8).flat_map(|step| [f64::from(8 - step); 10]).collect();
        show(vec![("n", &values)], &values, 5.0, &mut found);
        let rows = &found.lists[0].rows;
        assert_eq!(rows[1][..3], ["n", "100", "88"]);
        assert_eq!(rows[1].len(), found.lists[0].columns.len());
        assert_eq!(found.lists[0].columns[3], "10 to 15 s");
        assert!(found.notes[0].contains("none of 1"), "{:?}", found.notes);
    }
}

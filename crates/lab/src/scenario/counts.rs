//! Counts of cases and of correct diagnoses, with intervals. Pure functions.

use std::collections::BTreeMap;

use seikan_diagnose::Cause;
use seikan_load::stats::{Spread, mean};
use serde::{Deserialize, Serialize};

use super::{Outcome, Repair};

/// The normal distribution's quantile for 95 % between the tails.
const Z: f64 = 1.959_963_984_540_054;

/// A share with its 95 % interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Number of hits.
    pub hits: u32,
    /// Number of cases.
    pub of: u32,
    /// Lower end, 0 to 1.
    pub low: f64,
    /// Upper end, 0 to 1.
    pub high: f64,
}

impl Interval {
    /// Wilson's score interval (Wilson: "Probable Inference, the Law of Succession, and Statistical
    /// Inference", 1927).
    pub fn wilson(hits: u32, of: u32) -> Self {
        if of == 0 {
            return Self {
                hits,
                of,
                low: 0.0,
                high: 1.0,
            };
        }
        let (n, z2) = (f64::from(of), Z * Z);
        let p = f64::from(hits) / n;
        let middle = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = Z / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
        Self {
            hits,
            of,
            low: (middle - half).max(0.0),
            high: (middle + half).min(1.0),
        }
    }

    /// Returns the share; `None` without cases.
    pub fn share(self) -> Option<f64> {
        (self.of > 0).then(|| f64::from(self.hits) / f64::from(self.of))
    }
}

/// Results for one cause.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerClass {
    /// The cause.
    pub cause: Cause,
    /// Cases of this cause in which it was named.
    pub recall: Interval,
    /// Cases in which this cause was named and correct.
    pub precision: Interval,
    /// Cases of this cause in which it was the first or second cause named.
    pub first_two: Interval,
    /// Harmonic mean of precision and recall; 0 if the cause was never named correctly.
    pub f1: f64,
}

/// Correct diagnoses of a naive method on the same cases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Name of the method.
    pub name: String,
    /// Cases in which it names the cause.
    pub top_1: Interval,
}

/// Cases of two faults at once; they are in no other count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Doubles {
    /// Cases in which the cause named first is one of the two.
    pub one_first: Interval,
    /// Cases in which both causes are among the first two named.
    pub both_in_two: Interval,
}

/// Results of the doctor's changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fixes {
    /// Cases with a remedy on this host (`fixable` in the scenario) in which a remedy was tried and
    /// the throughput then reached 90 % of the healthy one.
    pub restored: Interval,
    /// Cases among these in which a change was kept.
    pub kept: Interval,
    /// Cases in which no change was kept and the state was as before.
    pub rolled_back: Interval,
    /// Cases in which a change was kept, and the state was as before after it was undone.
    pub undone: Interval,
    /// Settings that differ from their former values.
    pub left: Vec<String>,
}

/// All cases counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Cases of a fault or control that count.
    pub cases: u32,
    /// Cases whose throughput fell too little, and controls whose throughput fell.
    pub discarded: u32,
    /// Cases that count in which the doctor gave no diagnosis; they are treated as `unknown`.
    pub silent: u32,
    /// Cases in which the cause or an equally correct one was named.
    pub top_1: Interval,
    /// Cases in which the cause itself was named, not an equally correct one.
    pub strict: Interval,
    /// Cases in which the cause was the first or second named.
    pub top_2: Interval,
    /// Results of naive tools on the same cases.
    pub baselines: Vec<Baseline>,
    /// Results for two faults at once.
    pub doubles: Doubles,
    /// Results of changes.
    pub fixes: Fixes,
    /// Mean F1 of the causes that had cases.
    pub macro_f1: f64,
    /// Cases with a fault in which the diagnosis was `unknown`.
    pub abstained: Interval,
    /// Cases without a fault in which a cause was named.
    pub false_alarms: Interval,
    /// Time until the doctor's diagnosis, in seconds.
    pub seconds: Option<Spread>,
    /// Results for each cause that had cases.
    pub classes: Vec<PerClass>,
    /// Counts of (true cause, diagnosed cause), in the order of the catalogue.
    pub confusion: Vec<(Cause, Cause, u32)>,
}

impl Counts {
    /// Shares of the doctor's answers with their names: of all cases, and of double faults and fixes.
    pub fn of_doctor(&self) -> [Vec<(&'static str, Interval)>; 2] {
        let (doubles, fixes) = (&self.doubles, &self.fixes);
        [
            vec![
                ("named first", self.top_1),
                ("the same, aliases not counted", self.strict),
                ("among the first two", self.top_2),
                ("unknown where there was something", self.abstained),
                ("false alarms on healthy controls", self.false_alarms),
            ],
            vec![
                ("double faults: one named first", doubles.one_first),
                ("double faults: both among first two", doubles.both_in_two),
                ("fixes: 90 % of healthy restored", fixes.restored),
                ("fixes: kept", fixes.kept),
                ("fixes: rolled back correctly", fixes.rolled_back),
                ("fixes: kept and undone correctly", fixes.undone),
            ],
        ]
    }

    /// Counts the outcomes. The most frequent class in `training` is one baseline.
    pub fn of<'a>(
        outcomes: impl IntoIterator<Item = &'a Outcome>,
        training: impl IntoIterator<Item = &'a Outcome>,
    ) -> Self {
        let (counted, discarded): (Vec<_>, Vec<_>) =
            outcomes.into_iter().partition(|outcome| outcome.counts);
        let fixes = Fixes::of(&counted);
        let (double, counted): (Vec<_>, Vec<_>) = counted
            .into_iter()
            .partition(|outcome| outcome.second.is_some());
        let named = |outcome: &Outcome| outcome.found().unwrap_or(Cause::Unknown);
        let mut matrix: BTreeMap<(Cause, Cause), u32> = BTreeMap::new();
        for outcome in &counted {
            *matrix.entry((outcome.cause, named(outcome))).or_default() += 1;
        }
        let sum = |keep: &dyn Fn(Cause, Cause) -> bool| -> u32 {
            let cells = matrix.iter().filter(|((is, said), _)| keep(*is, *said));
            cells.map(|(_, count)| count).sum()
        };
        let cases = sum(&|_, _| true);
        let faults = sum(&|is, _| is != Cause::Healthy);
        let classes: Vec<PerClass> = Cause::ALL
            .iter()
            .copied()
            .filter(|cause| sum(&|is, _| is == *cause) > 0)
            .map(|cause| {
                let right = sum(&|is, said| is == cause && said == cause);
                let first_two = counted
                    .iter()
                    .filter(|o| o.cause == cause && o.in_first_two());
                let (of, named) = (sum(&|is, _| is == cause), sum(&|_, said| said == cause));
                PerClass {
                    cause,
                    recall: Interval::wilson(right, of),
                    precision: Interval::wilson(right, named),
                    first_two: Interval::wilson(first_two.count() as u32, of),
                    f1: f1(right, of, named),
                }
            })
            .collect();
        let first_two = counted.iter().filter(|o| o.in_first_two()).count() as u32;
        let times: Vec<f64> = counted
            .iter()
            .filter_map(|o| Some(o.diagnosis.as_ref()?.seconds))
            .collect();
        Self {
            cases,
            discarded: discarded.len() as u32,
            silent: counted.iter().filter(|o| o.diagnosis.is_none()).count() as u32,
            top_1: Interval::wilson(sum(&|is, said| is == said), cases),
            strict: share(&counted, |o| {
                o.diagnosis.as_ref().is_some_and(|d| d.cause == o.cause)
            }),
            top_2: Interval::wilson(first_two, cases),
            baselines: baselines(&counted, training),
            doubles: Doubles {
                one_first: share(&double, |o| o.of_both().is_some_and(|[one, _]| one)),
                both_in_two: share(&double, |o| o.of_both().is_some_and(|[_, both]| both)),
            },
            fixes,
            macro_f1: mean(classes.iter().map(|class| class.f1)),
            abstained: Interval::wilson(
                sum(&|is, said| is != Cause::Healthy && said == Cause::Unknown),
                faults,
            ),
            false_alarms: Interval::wilson(
                sum(&|is, said| is == Cause::Healthy && said.is_fault()),
                cases - faults,
            ),
            seconds: Spread::of(&times),
            classes,
            confusion: matrix
                .into_iter()
                .map(|((is, said), count)| (is, said, count))
                .collect(),
        }
    }
}

impl Fixes {
    fn of(counted: &[&Outcome]) -> Self {
        let of = |outcome: &&&Outcome| outcome.repair.as_ref().is_some_and(|r| r.tried > 0);
        let all: Vec<&&Outcome> = counted.iter().filter(of).collect();
        let tried: Vec<&Repair> = all.iter().filter_map(|o| o.repair.as_ref()).collect();
        let here = all.iter().filter(|outcome| outcome.fixable);
        let here: Vec<&Repair> = here.filter_map(|o| o.repair.as_ref()).collect();
        let (kept, back): (Vec<&Repair>, Vec<&Repair>) = tried.iter().partition(|r| r.kept);
        Self {
            restored: share(&here, |repair| repair.restored),
            kept: share(&tried, |repair| repair.kept),
            rolled_back: share(&back, |repair| repair.left.is_empty()),
            undone: share(&kept, |repair| repair.left.is_empty()),
            left: tried.iter().flat_map(|r| r.left.iter().cloned()).collect(),
        }
    }
}

/// Returns the results of naive tools on the cases that count.
fn baselines<'a>(
    counted: &[&Outcome],
    training: impl IntoIterator<Item = &'a Outcome>,
) -> Vec<Baseline> {
    let mut played: BTreeMap<Cause, u32> = BTreeMap::new();
    for outcome in training {
        if outcome.counts && outcome.second.is_none() {
            *played.entry(outcome.cause).or_default() += 1;
        }
    }
    let majority = played
        .into_iter()
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
        .map(|(cause, _)| cause);
    let right = |name: &str, guess: &dyn Fn(&Outcome) -> Option<Cause>| {
        let guessed: Vec<(&Outcome, Cause)> = counted
            .iter()
            .filter_map(|outcome| Some((*outcome, guess(outcome)?)))
            .collect();
        Baseline {
            name: name.to_owned(),
            top_1: share(&guessed, |(outcome, guess)| {
                outcome.folded(*guess) == outcome.cause
            }),
        }
    };
    vec![
        right("most frequent in training", &|_| majority),
        right("highest correlation", &|o| Some(o.guesses?.correlation)),
        right("largest jump of a counter", &|o| Some(o.guesses?.jump)),
    ]
}

fn share<T>(all: &[T], is: impl Fn(&T) -> bool) -> Interval {
    let hits = all.iter().filter(|one| is(one)).count();
    Interval::wilson(hits as u32, all.len() as u32)
}

/// Returns the harmonic mean of precision and recall, with `right` of `of` cases of a class, and
/// `named` diagnoses of it.
fn f1(right: u32, of: u32, named: u32) -> f64 {
    match of + named {
        0 => 0.0,
        both => 2.0 * f64::from(right) / f64::from(both),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{Diagnosis, Guesses};

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 5e-5, "{a} is not {b}");
    }

    /// Newcombe: "Two-sided confidence intervals for the single proportion", Statistics in Medicine
    /// 17 (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
    #[test]
    fn wilson_as_published() {
        for (hits, of, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            let interval = Interval::wilson(hits, of);
            near(interval.low, low);
            near(interval.high, high);
        }
    }

    #[test]
    fn nothing_counted_says_nothing() {
        let none = Interval::wilson(0, 0);
        assert_eq!((none.low, none.high, none.share()), (0.0, 1.0, None));
    }

    /// Precision 2/3 and recall 2/4: 2 * (2/3 * 1/2) / (2/3 + 1/2) = 4/7.
    #[test]
    fn f1_is_the_harmonic_mean() {
        near(f1(2, 4, 3), 4.0 / 7.0);
        near(f1(0, 4, 0), 0.0);
        near(f1(0, 0, 0), 0.0);
    }

    fn case(cause: Cause, found: Option<Cause>, second: Option<Cause>) -> Outcome {
        Outcome {
            scenario: cause.name().into(),
            cause,
            also: Vec::new(),
            fixable: false,
            tunnel: "raw".into(),
            severity: None,
            second: None,
            unit: String::new(),
            healthy: 100.0,
            expected: 100.0,
            faulty: 50.0,
            examined: None,
            loss: 0.5,
            counts: true,
            guesses: None,
            repair: None,
            problem: None,
            diagnosis: found.map(|cause| Diagnosis {
                cause,
                level: "supported".into(),
                alternatives: second.into_iter().collect(),
                chain: Vec::new(),
                seconds: 10.0,
            }),
        }
    }

    #[test]
    fn cases_are_counted_by_hand() {
        use Cause::{Healthy, PathLoss, Shaper, Unknown};
        let mut discarded = case(Shaper, Some(Shaper), None);
        discarded.counts = false;
        let outcomes = [
            case(Shaper, Some(Shaper), None),
            case(Shaper, Some(PathLoss), Some(Shaper)),
            case(PathLoss, Some(Unknown), None),
            case(PathLoss, None, None),
            case(Healthy, Some(Healthy), None),
            case(Healthy, Some(Shaper), None),
            discarded,
        ];
        let counts = Counts::of(&outcomes, &outcomes);
        assert_eq!((counts.cases, counts.discarded, counts.silent), (6, 1, 1));
        assert_eq!((counts.top_1.hits, counts.top_1.of), (2, 6));
        assert_eq!((counts.top_2.hits, counts.top_2.of), (3, 6));
        assert_eq!((counts.abstained.hits, counts.abstained.of), (2, 4));
        assert_eq!((counts.false_alarms.hits, counts.false_alarms.of), (1, 2));
        // Shaper 2*1/(2+2), path-loss 0, healthy 2*1/(2+1).
        near(counts.macro_f1, (0.5 + 0.0 + 2.0 / 3.0) / 3.0);
        assert!(counts.confusion.contains(&(Shaper, PathLoss, 1)));
    }

    #[test]
    fn an_equally_right_cause_counts() {
        let mut outcome = case(
            Cause::FramePerSyscall,
            Some(Cause::SingleThreadSaturated),
            None,
        );
        outcome.also = vec![Cause::SingleThreadSaturated];
        let counts = Counts::of([&outcome], []);
        assert_eq!((counts.top_1.hits, counts.strict.hits), (1, 0));
        assert_eq!(
            counts.confusion,
            [(Cause::FramePerSyscall, Cause::FramePerSyscall, 1)]
        );
    }
    #[test]
    fn baselines_are_counted_on_the_same_cases() {
        use Cause::{PathLoss, Shaper};
        let guesses = |correlation, jump| Some(Guesses { correlation, jump });
        let mut outcomes = [
            case(Shaper, Some(Shaper), None),
            case(Shaper, Some(Shaper), None),
            case(PathLoss, Some(PathLoss), None),
        ];
        outcomes[0].guesses = guesses(Shaper, PathLoss);
        outcomes[1].guesses = guesses(PathLoss, PathLoss);
        // That of the third was not kept.
        let counts = Counts::of(&outcomes, [&outcomes[2]]);
        let counts: Vec<(u32, u32)> = counts
            .baselines
            .iter()
            .map(|b| (b.top_1.hits, b.top_1.of))
            .collect();
        assert_eq!(counts, [(1, 3), (1, 2), (0, 2)]);
    }

    #[test]
    fn two_faults_at_once_are_counted_apart() {
        use Cause::{CpuQuota, PathLoss, Shaper};
        let double = |found, second| Outcome {
            second: Some(PathLoss),
            ..case(Shaper, Some(found), second)
        };
        let outcomes = [
            double(PathLoss, Some(Shaper)),
            double(Shaper, Some(CpuQuota)),
            double(CpuQuota, Some(Shaper)),
            case(Shaper, Some(Shaper), None),
        ];
        let counts = Counts::of(&outcomes, []);
        assert_eq!((counts.cases, counts.top_1.hits), (1, 1));
        let Doubles {
            one_first,
            both_in_two,
        } = counts.doubles;
        assert_eq!((one_first.hits, one_first.of), (2, 3));
        assert_eq!((both_in_two.hits, both_in_two.of), (1, 3));
    }

    #[test]
    fn reverted_changes_are_compared_with_the_state_before() {
        let repaired = |kept, restored, left: &[&str]| Outcome {
            repair: Some(Repair {
                tried: 1,
                commands: Vec::new(),
                kept,
                why: None,
                throughput: 95.0,
                healthy: 100.0,
                restored,
                left: left.iter().map(|s| (*s).to_owned()).collect(),
                seconds: 40.0,
            }),
            fixable: true,
            ..case(Cause::Shaper, Some(Cause::Shaper), None)
        };
        // Settings of programs and of other hosts cannot be restored.
        let elsewhere = Outcome {
            fixable: false,
            ..repaired(true, false, &[])
        };
        let outcomes = [
            elsewhere,
            repaired(true, true, &[]),
            repaired(false, false, &[]),
            repaired(false, false, &["a mtu: 1500 became 1400"]),
            case(Cause::Shaper, Some(Cause::Shaper), None),
        ];
        let fixes = Counts::of(&outcomes, []).fixes;
        let count = |i: Interval| (i.hits, i.of);
        assert_eq!(count(fixes.restored), (1, 3));
        assert_eq!(count(fixes.kept), (2, 4));
        assert_eq!(count(fixes.rolled_back), (1, 2));
        assert_eq!(count(fixes.undone), (2, 2));
        assert_eq!(fixes.left.len(), 1);
    }
}

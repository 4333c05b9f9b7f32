//! Results of an experiment: rows over rounds and published figures, curves, and claims of higher
//! speed.

use seikan_load::stats::{Spread, percentile, ratio};
use serde::{Deserialize, Serialize};

/// Measured and published figures of one quantity, by row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The quantity.
    pub title: String,
    /// Its unit.
    pub unit: String,
    /// Name of the row that measured and published ratios refer to.
    pub base: String,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// Figures of one setup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Whether the tunnel is Seikan.
    pub own: bool,
    /// The published figure.
    pub published: Option<f64>,
    /// A value for each round, in order; `None` where the measurement failed.
    pub rounds: Vec<Option<f64>>,
}

impl Row {
    /// Creates a row without values.
    pub(super) fn new(name: impl Into<String>, published: Option<f64>) -> Self {
        Self {
            name: name.into(),
            own: false,
            published,
            rounds: Vec::new(),
        }
    }

    pub(super) fn own(self, own: bool) -> Self {
        Self { own, ..self }
    }

    /// Adds a value for each round.
    pub(super) fn with(self, rounds: impl IntoIterator<Item = Option<f64>>) -> Self {
        Self {
            rounds: rounds.into_iter().collect(),
            ..self
        }
    }

    /// Median over the rounds.
    pub fn median(&self) -> Option<f64> {
        Some(self.spread()?.median)
    }

    /// Median and range over the rounds.
    pub fn spread(&self) -> Option<Spread> {
        let values: Vec<f64> = self.rounds.iter().copied().flatten().collect();
        Spread::of(&values)
    }
}

impl Figures {
    /// Creates figures whose base is the first row.
    pub(super) fn new(
        title: impl Into<String>,
        unit: &str,
        rows: impl IntoIterator<Item = Row>,
    ) -> Self {
        let rows: Vec<Row> = rows.into_iter().collect();
        Self {
            title: title.into(),
            unit: unit.to_owned(),
            base: rows
                .first()
                .map_or_else(String::new, |row| row.name.clone()),
            rows,
        }
    }

    /// Returns the median of the row with this name.
    pub(super) fn median(&self, name: &str) -> Option<f64> {
        self.row(name)?.median()
    }

    /// Returns the row with this name.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Returns a row as a multiple of the base: measured and published.
    pub fn ratios(&self, row: &Row) -> [Option<f64>; 2] {
        let base = self.row(&self.base);
        let of = |value: fn(&Row) -> Option<f64>| ratio(value(row)?, value(base?)?);
        [of(Row::median), of(|row| row.published)]
    }

    /// Returns the claim that `better` exceeds `worse`, with the ratio of each round.
    pub(super) fn claim(&self, better: &str, worse: &str) -> Claim {
        self.claim_above(better, worse, 0.0)
    }

    /// Returns the same claim for counts, which may be zero: a smaller count of zero is taken as
    /// one half.
    pub(super) fn claim_of_counts(&self, better: &str, worse: &str) -> Claim {
        self.claim_above(better, worse, 0.5)
    }

    fn claim_above(&self, better: &str, worse: &str, least: f64) -> Claim {
        let rows = self.row(better).zip(self.row(worse));
        let (mut rounds, mut missing) = (Vec::new(), 0);
        for (better, worse) in rows
            .iter()
            .flat_map(|(b, w)| b.rounds.iter().zip(&w.rounds))
        {
            let times = better.zip(*worse).and_then(|(b, w)| ratio(b, w.max(least)));
            match times {
                Some(times) => rounds.push(times),
                None => missing += 1,
            }
        }
        let there = rows.and_then(|(better, worse)| better.published.zip(worse.published));
        Claim {
            quantity: self.title.clone(),
            better: better.to_owned(),
            worse: worse.to_owned(),
            published: there.and_then(|(better, worse)| ratio(better, worse)),
            rounds,
            missing,
        }
    }
}

/// Figures of the same rows side by side, one column for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// The quantity.
    pub title: String,
    /// The rows.
    pub rows: String,
    /// The columns.
    pub columns: Vec<Figures>,
}

/// Rows of words and numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The content.
    pub title: String,
    /// Headings; the first column is words.
    pub columns: Vec<String>,
    /// Rows with one cell for each column.
    pub rows: Vec<Vec<String>>,
}

impl List {
    pub(super) fn new(
        title: impl Into<String>,
        columns: &[&str],
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Self {
        Self {
            title: title.into(),
            columns: columns.iter().map(|&name| name.to_owned()).collect(),
            rows: rows.into_iter().collect(),
        }
    }
}

/// The claim that one setup is faster than another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Title of the [`Figures`] that the claim is about.
    pub quantity: String,
    /// Name of the row that has more.
    pub better: String,
    /// Name of the row that has less.
    pub worse: String,
    /// Published ratio of `better` to `worse`.
    pub published: Option<f64>,
    /// Measured ratio of `better` to `worse` in each round.
    pub rounds: Vec<f64>,
    /// Number of rounds without a comparison, because one of the two failed.
    pub missing: usize,
}

impl Claim {
    /// Whether the claim was true in every round.
    pub fn holds(&self) -> bool {
        !self.rounds.is_empty() && self.missing == 0 && self.rounds.iter().all(|times| *times > 1.0)
    }

    /// Returns median and range of the measured ratio.
    pub fn spread(&self) -> Option<Spread> {
        Spread::of(&self.rounds)
    }
}

/// Quantities over another one, to be drawn in one frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curves {
    /// Name of the picture's file.
    pub name: String,
    /// Title.
    pub title: String,
    /// Horizontal axis, with its unit.
    pub x: String,
    /// Vertical axis, with its unit.
    pub y: String,
    /// Whether the horizontal and the vertical scale are logarithmic.
    pub logarithmic: [bool; 2],
    /// The lines.
    pub curves: Vec<Curve>,
}

impl Curves {
    /// Creates curves over linear scales.
    pub(super) fn new(
        name: impl Into<String>,
        title: impl Into<String>,
        [x, y]: [&str; 2],
        curves: impl IntoIterator<Item = Curve>,
    ) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            x: x.to_owned(),
            y: y.to_owned(),
            logarithmic: [false; 2],
            curves: curves.into_iter().collect(),
        }
    }

    /// Sets which scales are logarithmic: the horizontal and the vertical one.
    pub(super) fn logarithmic(self, logarithmic: [bool; 2]) -> Self {
        Self {
            logarithmic,
            ..self
        }
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Whether the curve belongs to Seikan.
    pub own: bool,
    /// Whether the curve was published by others.
    pub published: bool,
    /// Its points, left to right.
    pub points: Vec<[f64; 2]>,
}

impl Curve {
    pub(super) fn new(name: impl Into<String>, points: impl IntoIterator<Item = [f64; 2]>) -> Self {
        Self {
            name: name.into(),
            own: false,
            published: false,
            points: points.into_iter().collect(),
        }
    }

    pub(super) fn own(self, own: bool) -> Self {
        Self { own, ..self }
    }
}

/// Returns the text of a table cell; empty without a value.
pub(crate) fn cell(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.decimals$}"))
}

/// Returns the value below which this share of the values lies.
pub(super) fn quantile(values: impl IntoIterator<Item = f64>, share: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, share)
}

/// Returns a row of a table: its name, followed by the other cells.
pub(super) fn named(
    name: impl Into<String>,
    cells: impl IntoIterator<Item = String>,
) -> Vec<String> {
    std::iter::once(name.into()).chain(cells).collect()
}

/// Bars of quantities by kind. The bars of a group are side by side, or stacked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bars {
    /// Name of the picture's file.
    pub name: String,
    /// Title.
    pub title: String,
    /// Unit of the vertical axis.
    pub unit: String,
    /// Names of the groups, left to right.
    pub groups: Vec<String>,
    /// The kinds.
    pub parts: Vec<Part>,
    /// Whether the bars of a group are stacked.
    pub stacked: bool,
}

/// One kind of [`Bars`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// A value for each group; `None` where nothing could be measured.
    pub values: Vec<Option<f64>>,
}

impl Part {
    pub(super) fn new(name: &str, values: impl IntoIterator<Item = Option<f64>>) -> Self {
        Self {
            name: name.to_owned(),
            values: values.into_iter().collect(),
        }
    }
}

/// Quantities over two variables, each drawn as a map.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Surface {
    /// Name of the picture's file.
    pub name: String,
    /// Title.
    pub title: String,
    /// Columns, with their unit.
    pub x: String,
    /// Rows, with their unit.
    pub y: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Names of the rows.
    pub rows: Vec<String>,
    /// The quantities.
    pub layers: Vec<Layer>,
    /// The best point: its column and row.
    pub best: Option<[usize; 2]>,
}

/// One quantity of a [`Surface`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Quantity.
    pub title: String,
    /// Its unit.
    pub unit: String,
    /// Whether larger values are better.
    pub wanted: bool,
    /// Values by row and column; `None` where nothing could be measured.
    pub values: Vec<Vec<Option<f64>>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        let row =
            |name, published, rounds: [f64; 3]| Row::new(name, published).with(rounds.map(Some));
        let rows = [
            row("raw", Some(1000.0), [10_000.0, 12_000.0, 11_000.0]),
            row("slow", Some(20.0), [110.0, 100.0, 120.0]),
            row("good", Some(200.0), [1_100.0, 99.0, 1_200.0]),
        ];
        Figures::new("throughput", "Mbit/s", rows)
    }

    #[test]
    fn a_row_is_compared_with_the_base_here_and_there() {
        let figures = figures();
        let slow = figures.row("slow").expect("there");
        assert_eq!(figures.ratios(slow), [Some(0.01), Some(0.02)]);
    }

    #[test]
    fn a_claim_holds_if_it_does_in_every_round() {
        let figures = figures();
        let claim = figures.claim("raw", "slow");
        assert_eq!(claim.published, Some(50.0));
        assert!(claim.holds());
        // The second round goes the other way.
        assert!(!figures.claim("good", "slow").holds());
        assert!(!figures.claim("nobody", "slow").holds());
    }

    #[test]
    fn a_round_that_failed_is_compared_with_none() {
        let mut figures = figures();
        figures.rows[2].rounds[1] = None;
        let claim = figures.claim("good", "slow");
        assert_eq!((&claim.rounds[..], claim.missing), (&[10.0, 10.0][..], 1));
        assert!(!claim.holds());
    }

    #[test]
    fn more_than_none_is_more() {
        let mut figures = figures();
        figures.rows[1].rounds = vec![Some(0.0); 3];
        assert!(!figures.claim("good", "slow").holds());
        assert!(figures.claim_of_counts("good", "slow").holds());
    }
}

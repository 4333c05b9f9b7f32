//! Decides whether a difference between two ciphers exceeds the noise. It does if it has the same
//! sign in each of at least five rounds, which happens by chance in one of 16 cases. Rounds are
//! interleaved, so both rows of a round are close in time.

use super::figures::{Claim, Row, cell};
use super::{Figures, List};

/// Two ciphers to compare, of which the first should be faster.
#[derive(Clone, Copy)]
pub(super) struct Pair {
    more: &'static str,
    less: &'static str,
    mtus: &'static [u32],
    /// Published ratio of the speeds, at every MTU.
    published: Option<f64>,
}

impl Pair {
    /// Creates a pair for these MTUs. The published factor follows from the figures of both
    /// columns.
    pub(super) const fn new(more: &'static str, less: &'static str, mtus: &'static [u32]) -> Self {
        Self {
            more,
            less,
            mtus,
            published: None,
        }
    }

    /// Creates a pair with one published factor for all MTUs.
    pub(super) const fn published(
        more: &'static str,
        less: &'static str,
        mtus: &'static [u32],
        factor: f64,
    ) -> Self {
        Self {
            published: Some(factor),
            ..Self::new(more, less, mtus)
        }
    }
}

/// Minimum number of rounds for a difference.
const ENOUGH: usize = 5;

/// One comparison.
pub(super) struct Line {
    name: String,
    claim: Claim,
    setting: String,
    published: Option<f64>,
}

impl Line {
    /// A comparison in this setting, with the published factor.
    pub(super) fn of(name: &str, claim: Claim, setting: &str, published: Option<f64>) -> Self {
        Self {
            name: name.to_owned(),
            claim,
            setting: setting.to_owned(),
            published,
        }
    }

    /// Returns whether the difference exceeds the noise, in words.
    fn verdict(&self) -> &'static str {
        let rounds = &self.claim.rounds;
        let all = |wanted: fn(&f64) -> bool| rounds.iter().all(wanted);
        match rounds.len() {
            count if count < ENOUGH => "too few rounds",
            _ if all(|times| *times > 1.0) || all(|times| *times < 1.0) => "yes",
            _ => "no",
        }
    }
}

/// Compares each pair at each of its MTUs, where both are measured.
pub(super) fn pairs(columns: &[Figures], pairs: &[Pair], setting: &str) -> Vec<Line> {
    let row = |cipher: &str, mtu: u32| -> Option<&Row> {
        let column = columns.iter().find(|column| column.title == cipher)?;
        column
            .row(&mtu.to_string())
            .filter(|row| !row.rounds.is_empty())
    };
    let mut lines = Vec::new();
    for pair in pairs {
        for mtu in pair.mtus {
            let Some((more, less)) = row(pair.more, *mtu).zip(row(pair.less, *mtu)) else {
                continue;
            };
            let named = |row: &Row, name: &str| Row {
                name: name.to_owned(),
                ..row.clone()
            };
            let figures = Figures::new("", "", [named(more, pair.more), named(less, pair.less)]);
            let claim = figures.claim(pair.more, pair.less);
            let published = pair.published.or(claim.published);
            let setting = format!("MTU {mtu}, {setting}");
            let name = format!("{} / {}", pair.more, pair.less);
            lines.push(Line::of(&name, claim, &setting, published));
        }
    }
    lines
}

/// Returns a table of all comparisons, most of which had `rounds` rounds.
pub(super) fn list(lines: &[Line], rounds: u32) -> List {
    let rows = lines.iter().map(|line| {
        let spread = line.claim.spread();
        vec![
            line.name.clone(),
            line.setting.clone(),
            cell(line.published, 2),
            cell(spread.map(|spread| spread.median), 2),
            spread.map_or_else(|| "–".to_owned(), |s| format!("{:.2}–{:.2}", s.min, s.max)),
            line.verdict().to_owned(),
        ]
    });
    let columns = [
        "ciphers",
        "setting",
        "published",
        "here",
        "range",
        "above the noise",
    ];
    let title = format!("differences between ciphers, up to {rounds} rounds");
    List::new(title, &columns, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(title: &str, rounds: &[f64], published: Option<f64>) -> Figures {
        let row = |mtu: &str, rounds: &[f64]| {
            Row::new(mtu, published).with(rounds.iter().copied().map(Some))
        };
        Figures::new(title, "", [row("9000", rounds), row("48000", &[])])
    }

    #[test]
    fn a_difference_stands_out_if_every_round_has_it() {
        const PAIRS: [Pair; 3] = [
            Pair::new("fast", "slow", &[9_000, 48_000]),
            Pair::new("slow", "fast", &[9_000]),
            Pair::published("fast", "alike", &[9_000], 2.0),
        ];
        let columns = [
            column("fast", &[10.0, 12.0, 11.0, 10.0, 12.0], Some(30.0)),
            column("slow", &[5.0, 6.0, 10.0, 5.0, 6.0], Some(20.0)),
            column("alike", &[9.0, 12.5, 10.0, 9.0, 8.0], None),
        ];
        let list = list(&pairs(&columns, &PAIRS, "no limit"), 5);
        // The second MTU was not measured.
        let rows = list
            .rows
            .iter()
            .map(|row| [&row[0][..], &row[2], &row[3], &row[5]]);
        let expected = [
            ["fast / slow", "1.50", "2.00", "yes"],
            ["slow / fast", "0.67", "0.50", "yes"],
            ["fast / alike", "2.00", "1.11", "no"],
        ];
        assert_eq!(rows.collect::<Vec<_>>(), expected);
        assert_eq!(list.rows[0][1], "MTU 9000, no limit");
    }

    #[test]
    fn few_rounds_show_nothing() {
        const PAIR: [Pair; 1] = [Pair::new("fast", "slow", &[9_000])];
        let columns = [
            column("fast", &[9.0; 4], None),
            column("slow", &[1.0; 4], None),
        ];
        let list = list(&pairs(&columns, &PAIR, "no limit"), 4);
        assert_eq!(list.rows[0][5], "too few rounds");
    }
}

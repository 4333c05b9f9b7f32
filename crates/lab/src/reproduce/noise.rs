//! Decides whether a difference between two ciphers exceeds the noise. It does if it has the same
//! sign in each of at least five rounds, which happens by chance in one of 16 cases. Rounds are
//! interleaved, so both rows of a round are close in time.

use super::figures::{Claim, Row, cell};
use super::{Figures, List};

/// Two ciphers, the MTUs at which they are compared, and one published factor for all of these; `None`:
/// that of the columns.
pub(super) type Pair = (&'static str, &'static str, &'static [u32], Option<f64>);

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
    for (more_name, less_name, mtus, factor) in pairs {
        for mtu in *mtus {
            let Some((more, less)) = row(more_name, *mtu).zip(row(less_name, *mtu)) else {
                continue;
            };
            let named = |row: &Row, name: &str| Row {
                name: name.to_owned(),
                ..row.clone()
            };
            let figures = Figures::new("", "", [named(more, more_name), named(less, less_name)]);
            let claim = figures.claim(more_name, less_name);
            let published = factor.or(claim.published);
            let setting = format!("MTU {mtu}, {setting}");
            let name = format!("{more_name} / {less_name}");
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
            ("fast", "slow", &[9_000, 48_000], None),
            ("slow", "fast", &[9_000], None),
            ("fast", "alike", &[9_000], Some(2.0)),
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
        const PAIR: [Pair; 1] = [("fast", "slow", &[9_000], None)];
        let columns = [
            column("fast", &[9.0; 4], None),
            column("slow", &[1.0; 4], None),
        ];
        let list = list(&pairs(&columns, &PAIR, "no limit"), 4);
        assert_eq!(list.rows[0][5], "too few rounds");
    }
}

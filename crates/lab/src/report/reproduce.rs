//! The report of an experiment done again.

use seikan_ui::output::counted;

use crate::report::{Bar, Kind, NONE, Panel, Report, Row, Table, machine_facts, range};
use crate::reproduce::{Claim, Experiment, Figures, Grid, Layer, List, Look, Surface};

impl From<&Experiment> for Report {
    fn from(of: &Experiment) -> Self {
        let mut tables: Vec<Table> = of.grids.iter().map(grid).collect();
        for surface in &of.surfaces {
            tables.extend(surface.layers.iter().map(|layer| map(surface, layer)));
        }
        tables.extend(of.lists.iter().map(list));
        tables.extend([claims(&of.claims), looks(&of.looks)]);
        tables.extend(facts(&of.looks));
        tables.push(notes(&of.notes));
        tables.retain(|table| !table.rows.is_empty());
        Report {
            title: of.source.title(),
            subtitle: format!(
                "{} UTC, {}, {:.0} s in all",
                of.date,
                counted(of.options.rounds as usize, "round"),
                of.took
            ),
            headlines: headlines(of),
            panels: of.figures.iter().map(panel).collect(),
            tables,
            problems: of.problems.clone(),
            facts: machine_facts(&of.machine),
            method: method(of),
        }
    }
}

fn headlines(of: &Experiment) -> Vec<String> {
    let holding = of.claims.iter().filter(|claim| claim.holds()).count();
    let right = of.looks.iter().filter(|look| look.is_right()).count();
    let mut line = format!(
        "{holding} of {} hold in every round",
        counted(of.claims.len(), "comparison")
    );
    let setups = counted(of.source.looks(), "slow setup");
    line += &format!("; the doctor, blind, is right in {right} of {setups}");
    vec![line + "."]
}

fn panel(figures: &Figures) -> Panel {
    let bars = figures.rows.iter().map(|row| {
        let [here, there] = figures.ratios(row);
        let value = row.spread();
        Bar {
            label: row.name.clone(),
            kind: match () {
                () if row.own => Kind::Own,
                () if row.name == figures.base => Kind::Raw,
                () => Kind::Other,
            },
            value,
            cells: vec![
                times(here),
                range(value, short),
                times(row.published),
                times(there),
            ],
        }
    });
    let columns = ["×", "range", "published", "×"];
    Panel::new(figures.title.clone(), &figures.unit, columns, bars)
}

/// Returns a row for each column, because columns have longer names than rows: medians, and
/// published values in brackets.
fn grid(grid: &Grid) -> Table {
    let first = grid.columns.first().map_or(&[][..], |column| &column.rows);
    let headings = first.iter().map(|row| row.name.clone());
    let rows = grid.columns.iter().map(|column| {
        let cells = column.rows.iter().map(|row| {
            let here = times(row.spread().map(|spread| spread.median));
            match row.published {
                Some(there) => format!("{here} ({})", short(there)),
                None => here,
            }
        });
        let kind = if column.rows.iter().any(|row| row.own) {
            Kind::Own
        } else {
            Kind::Other
        };
        Row::new(kind, std::iter::once(column.title.clone()).chain(cells))
    });
    let mut all = grid.columns.iter().flat_map(|column| &column.rows);
    let published = if all.any(|row| row.published.is_some()) {
        "; published in brackets"
    } else {
        ""
    };
    let columns = std::iter::once(grid.rows.clone()).chain(headings);
    Table::new(format!("{}{published}", grid.title), columns, rows)
}

/// Rows and columns of a map.
fn map(surface: &Surface, layer: &Layer) -> Table {
    let corner = format!("{} \\ {}", surface.y, surface.x);
    let rows = surface.rows.iter().zip(&layer.values);
    let rows = rows.map(|(name, values)| {
        let cells = values.iter().map(|value| times(*value));
        plain(std::iter::once(name.clone()).chain(cells))
    });
    let title = format!("{}: {}, {}", surface.title, layer.title, layer.unit);
    let columns = std::iter::once(corner).chain(surface.columns.iter().cloned());
    Table::new(title, columns, rows)
}

fn list(list: &List) -> Table {
    let rows = list.rows.iter().cloned().map(plain);
    Table::new(list.title.clone(), list.columns.clone(), rows)
}

fn claims(claims: &[Claim]) -> Table {
    let rows = claims.iter().map(|claim| {
        let here = claim.spread();
        plain([
            format!("{} > {}", claim.better, claim.worse),
            claim.quantity.clone(),
            times(claim.published),
            times(here.map(|spread| spread.median)),
            range(here, short),
            if claim.holds() { "yes" } else { "no" }.to_owned(),
        ])
    });
    let columns = ["", "of", "published", "here", "range", "every round"];
    Table::new("Comparisons", columns, rows)
}

fn looks(looks: &[Look]) -> Table {
    let rows = looks.iter().map(|look| {
        let right: Vec<&str> = look.right.iter().map(|cause| cause.name()).collect();
        plain([
            look.of.clone(),
            look.to_string(),
            right.join(" or "),
            if look.is_right() { "yes" } else { "no" }.to_owned(),
        ])
    });
    let columns = ["of", "says", "should say", "right"];
    Table::new("Verdicts of the doctor", columns, rows)
}

fn facts(looks: &[Look]) -> Option<Table> {
    let rows = looks.iter().flat_map(|look| {
        let fact =
            |(name, value): &(_, f64)| plain([format!("{}: {name}", look.of), short(*value)]);
        look.facts.iter().map(fact)
    });
    Table::new("Seen on the way", ["", "value"], rows).if_any()
}

fn method(of: &Experiment) -> Vec<String> {
    vec![
        format!("Published: {}", of.source.published()),
        of.source.differs().to_owned(),
        "Rows are measured in interleaved rounds; figures are medians, ranges the smallest and the largest. Sweeps are \
         measured once. × is the multiple of the dimmed row, here and in what was published: figures of different machines \
         are compared in no other way."
            .to_owned(),
    ]
}

fn notes(notes: &[String]) -> Table {
    let rows = notes
        .iter()
        .map(|note| plain(["·".to_owned(), note.clone()]));
    Table::new("To be known", ["", ""], rows)
}

/// A row without an owner.
fn plain(cells: impl IntoIterator<Item = String>) -> Row {
    Row::new(Kind::Other, cells)
}

/// Formats a value with three digits.
fn short(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

fn times(ratio: Option<f64>) -> String {
    match ratio {
        Some(ratio) => short(ratio),
        None => NONE.to_owned(),
    }
}

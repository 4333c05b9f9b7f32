//! Sheets drawn from fixed numbers. The expected pictures are worked out by hand from the numbers.

use super::*;
use crate::error::LabError;
use seikan_ui::screen::Style;

fn bar(label: &str, kind: Kind, values: &[f64], cells: &[&str]) -> Bar {
    Bar {
        label: label.to_owned(),
        kind,
        value: Spread::of(values),
        cells: cells.iter().map(|&c| c.to_owned()).collect(),
    }
}

fn sample() -> Report {
    Report {
        title: "Side by side".to_owned(),
        subtitle: "today".to_owned(),
        headlines: vec!["Ours is half as fast as nothing.".to_owned()],
        panels: vec![Panel {
            title: "TCP".to_owned(),
            unit: "Gbit/s".to_owned(),
            columns: vec!["× raw".to_owned()],
            bars: vec![
                bar("raw", Kind::Raw, &[16.0], &["1.00"]),
                bar("ours", Kind::Own, &[7.0, 8.0, 9.0], &["0.50"]),
                bar("slow", Kind::Other, &[1.0], &["0.06"]),
                bar("broken", Kind::Other, &[], &["–"]),
            ],
        }],
        tables: vec![Table {
            title: "Latency".to_owned(),
            columns: vec!["tunnel".to_owned(), "ping µs".to_owned(), "MiB".to_owned()],
            rows: vec![Row {
                kind: Kind::Own,
                cells: vec!["ours".to_owned(), "90".to_owned(), "12.5".to_owned()],
            }],
        }],
        problems: vec!["broken: did not start".to_owned()],
        facts: vec![("CPU".to_owned(), "one <&> two".to_owned())],
        method: vec!["By hand.".to_owned()],
    }
}

/// 60 columns: 2 indent, 6 for names, 2 + 6 + 2 + 5 for figures, 2 between name and bar leave 35
/// for the longest bar; 8/16 of 35 are 17 and 4/8, 1/16 are 2 and 1.5/8, rounded to 2/8.
#[test]
fn terminal_without_colour() {
    let expected = [
        "Side by side".to_owned(),
        "today".to_owned(),
        String::new(),
        format!("TCP{}Gbit/s  × raw", " ".repeat(44)),
        format!("  raw     {}   16.00   1.00", "█".repeat(35)),
        format!(
            "  ours    {}▌{}    8.00   0.50",
            "█".repeat(17),
            " ".repeat(17)
        ),
        format!("  slow    ██▎{}    1.00   0.06", " ".repeat(32)),
        format!("  broken  {}  failed      –", " ".repeat(35)),
        String::new(),
        "Latency".to_owned(),
        "  tunnel  ping µs   MiB".to_owned(),
        "  ours         90  12.5".to_owned(),
        String::new(),
        "Ours is half as fast as nothing.".to_owned(),
        String::new(),
        "Problems".to_owned(),
        "  broken: did not start".to_owned(),
    ];
    let drawn = terminal(
        &sample(),
        Style {
            width: 60,
            color: false,
        },
    );
    assert_eq!(
        drawn.lines().collect::<Vec<_>>(),
        expected.iter().map(String::as_str).collect::<Vec<_>>()
    );
}

#[test]
fn terminal_fits_its_width() {
    for width in [60, 72, 100] {
        let drawn = terminal(&sample(), Style { width, color: true });
        assert!(
            drawn
                .lines()
                .all(|l| console::measure_text_width(l) <= width),
            "{width}:\n{drawn}"
        );
    }
}

#[test]
fn a_long_title_has_its_own_line() {
    let mut report = sample();
    let title = "title ".repeat(8);
    report.panels[0].title.clone_from(&title);
    let drawn = terminal(
        &report,
        Style {
            width: 60,
            color: false,
        },
    );
    let line = drawn.lines().find(|line| line.contains("title"));
    assert_eq!(line.map(str::trim_end), Some(title.trim_end()));
}

#[test]
fn colours_only_when_wanted() {
    assert!(
        terminal(
            &sample(),
            Style {
                width: 80,
                color: true
            }
        )
        .contains('\u{1b}')
    );
    assert!(
        !terminal(
            &sample(),
            Style {
                width: 80,
                color: false
            }
        )
        .contains('\u{1b}')
    );
}

#[test]
fn long_lines_break_between_words() {
    let mut report = sample();
    report.problems = vec!["word ".repeat(40)];
    let drawn = terminal(
        &report,
        Style {
            width: 60,
            color: false,
        },
    );
    assert_eq!(drawn.matches("word").count(), 40);
    assert!(
        drawn.lines().all(|l| console::measure_text_width(l) <= 60),
        "{drawn}"
    );
}

/// Bars begin at 170 and the largest end, 16, is at 810: 8 ends in the middle, at 490; its range is
/// 450 to 530.
#[test]
fn svg_has_bars_of_the_right_length() {
    let drawn = svg(&sample());
    let rectangles: Vec<(&str, &str)> = drawn
        .lines()
        .filter(|l| l.starts_with("<rect"))
        .map(|l| (attribute(l, "x"), attribute(l, "width")))
        .collect();
    assert_eq!(rectangles, [("170", "640"), ("170", "320"), ("170", "40")]);
    assert!(
        drawn.contains("d=\"M450 ") && drawn.contains("L530 "),
        "{drawn}"
    );
}

fn attribute<'a>(line: &'a str, name: &str) -> &'a str {
    let start = line.find(&format!(" {name}=\"")).expect("attribute") + name.len() + 3;
    line[start..].split('"').next().expect("value")
}

#[test]
fn html_needs_nothing_from_elsewhere_and_escapes_text() {
    let page = html(&sample()).expect("drawn");
    for outside in [
        "http://", "https://", "src=", "href=", "url(", "@import", "<script",
    ] {
        let rest = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!rest.contains(outside), "{outside}");
    }
    // Either spelling is right: the template engine chooses.
    assert!(
        page.contains("one &lt;&amp;&gt; two") || page.contains("one &#60;&#38;&#62; two"),
        "{page}"
    );
    for text in [
        "Side by side",
        "ours",
        "8.00",
        "By hand.",
        "<svg class=\"seikan-plot\"",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn an_empty_report_can_be_drawn() -> Result<(), LabError> {
    let empty = Report::default();
    assert_eq!(
        terminal(
            &empty,
            Style {
                width: 80,
                color: false
            }
        ),
        "\n\n"
    );
    assert!(!svg(&empty).contains("NaN"));
    html(&empty).map(drop)
}

//! Parts of terminal output: colours, lines with labels, numbers, sizes, times, tables.
//!
//! Colours are always written. The output stream removes them where they are not wanted.

use std::fmt::Write;

use console::Term;
use seikan_observe::DropReason;

/// Escape sequence.
pub const RESET: &str = "\x1b[0m";
/// Escape sequence.
pub const BOLD: &str = "\x1b[1m";
/// Escape sequence.
pub const GREEN: &str = "\x1b[1;32m";
/// Escape sequence.
pub const YELLOW: &str = "\x1b[1;33m";
/// Escape sequence.
pub const RED: &str = "\x1b[1;31m";
/// Escape sequence.
pub const CYAN: &str = "\x1b[36m";
/// Escape sequence.
pub const DIM: &str = "\x1b[2m";

/// Text with labelled lines, in the format of `wg show`.
pub struct Screen(pub String);

impl Screen {
    /// Writes the title of a section.
    pub fn title(&mut self, colour: &str, kind: &str, name: &str) {
        let kind_colour = colour.replace("1;", "");
        // Writing to memory does not fail.
        let _ = writeln!(
            self.0,
            "{colour}{kind}{RESET}: {kind_colour}{}{RESET}",
            printable(name)
        );
    }

    /// Writes one line: a label and a text.
    pub fn line(&mut self, label: &str, text: impl std::fmt::Display) {
        let _ = writeln!(self.0, "  {BOLD}{label}{RESET}: {text}");
    }

    /// Writes a heading for the following lines.
    pub fn heading(&mut self, label: &str) {
        let _ = writeln!(self.0, "  {BOLD}{label}{RESET}:");
    }

    /// Writes a count of dropped packets, followed by a sentence.
    pub fn drop(&mut self, count: u64, direction: &str, sentence: &str) {
        let _ = writeln!(
            self.0,
            "    {RED}{:>9}{RESET} {direction:<3}  {sentence}",
            number(count)
        );
    }
}

/// Maximum width of output in columns; longer bars would show nothing more.
const MAX_WIDTH: usize = 100;

/// Properties of the output, a terminal or a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Number of columns to use.
    pub width: usize,
    /// Whether to use colours.
    pub color: bool,
}

impl Style {
    /// Returns the properties of standard output: its width, and colours unless it is piped or
    /// `NO_COLOR` is set.
    #[must_use]
    pub fn of_stdout() -> Self {
        let term = Term::stdout();
        let width = term
            .size_checked()
            .map_or(MAX_WIDTH, |(_, columns)| usize::from(columns));
        let silent = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Self {
            width: width.clamp(60, MAX_WIDTH),
            color: term.is_term() && !silent,
        }
    }
}

/// A table of text. Each column is as wide as its widest cell.
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

/// Alignment of a cell in its column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left, for words.
    Left,
    /// Right, for numbers.
    Right,
}

impl Table {
    /// Creates a table with these columns. Empty headings only leave space.
    pub fn new(columns: &[(&str, Align)]) -> Table {
        let columns = columns
            .iter()
            .map(|(name, align)| ((*name).to_owned(), *align));
        Table {
            columns: columns.collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Cells may have colours.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Writes the table, indented by two spaces. Columns without any content are left out.
    pub fn write(&self, out: &mut Screen) {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                self.rows
                    .iter()
                    .map(|row| width(&row[i]))
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let shown = |i: &usize| widths[*i] > 0;
        let mut line = |cells: &dyn Fn(usize) -> String| {
            let mut text = String::from(" ");
            for i in (0..self.columns.len()).filter(shown) {
                let cell = cells(i);
                let padding = widths[i].max(width(&self.columns[i].0)) - width(&cell);
                let space = " ".repeat(padding);
                text += &match self.columns[i].1 {
                    Align::Left => format!(" {cell}{space} "),
                    Align::Right => format!(" {space}{cell} "),
                };
            }
            let _ = writeln!(out.0, "{}", text.trim_end());
        };
        line(&|i| match self.columns[i].0.as_str() {
            "" => String::new(),
            name => format!("{BOLD}{name}{RESET}"),
        });
        for row in &self.rows {
            line(&|i| row[i].clone());
        }
    }
}

/// Returns the number of characters, without escape sequences.
pub fn width(text: &str) -> usize {
    plain(text).chars().count()
}

/// Returns the text without characters that could move a terminal's cursor.
pub fn printable(text: &str) -> String {
    let shown = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

/// Does the same for text of several lines, and also keeps tabs.
pub fn printable_lines(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// Returns the items as one text, with a separator between them.
pub fn joined(items: impl IntoIterator<Item: ToString>, separator: &str) -> String {
    let items = items.into_iter().map(|item| item.to_string());
    items.collect::<Vec<_>>().join(separator)
}

/// Formats a number with thousands separators.
pub fn number(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number with three significant digits; integers are exact.
pub fn rounded(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "?".into();
    }
    let sign = if value < 0.0 { "-" } else { "" };
    if size == 0.0 {
        "0".into()
    } else if size >= 100.0 || (size.fract() == 0.0 && size < 1e15) {
        format!("{sign}{}", number(size.round() as u64))
    } else if size < 1e-4 {
        format!("{value:.1e}")
    } else {
        let decimals = (2 - size.log10().floor() as i32).max(0) as usize;
        let text = format!("{value:.decimals$}");
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    }
}

/// Formats a number of bytes as `wg` does.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} {CYAN}B{RESET}"),
        _ => format!("{size:.2} {CYAN}{}{RESET}", UNITS[unit]),
    }
}

/// Formats a time since an event as briefly as possible.
pub fn ago(seconds: Option<f64>) -> String {
    match seconds {
        None => format!("{DIM}never{RESET}"),
        Some(s) if s < 1.0 => "now".into(),
        Some(s) if s < 120.0 => format!("{s:.0} {CYAN}s{RESET} ago"),
        Some(s) if s < 7200.0 => format!("{:.0} {CYAN}min{RESET} ago", s / 60.0),
        Some(s) if s < 172_800.0 => format!("{:.0} {CYAN}h{RESET} ago", s / 3600.0),
        Some(s) => format!("{:.0} {CYAN}days{RESET} ago", s / 86_400.0),
    }
}

/// Formats a time, given in microseconds, in milliseconds with three significant digits.
pub fn milliseconds(us: u64) -> String {
    let ms = us as f64 / 1000.0;
    match us {
        0..10_000 => format!("{ms:.2} {CYAN}ms{RESET}"),
        10_000..100_000 => format!("{ms:.1} {CYAN}ms{RESET}"),
        _ => format!("{ms:.0} {CYAN}ms{RESET}"),
    }
}

/// Formats a duration as `wg` does, but with at most the two largest units, which is exact enough.
pub fn duration(seconds: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("day", 86_400),
        ("hour", 3_600),
        ("minute", 60),
        ("second", 1),
    ];
    let mut rest = seconds;
    let mut parts = Vec::new();
    for (name, length) in UNITS {
        let count = rest / length;
        rest %= length;
        if count > 0 {
            let plural = if count == 1 { "" } else { "s" };
            parts.push(format!("{count} {CYAN}{name}{plural}{RESET}"));
        }
    }
    parts.truncate(2);
    if parts.is_empty() {
        format!("0 {CYAN}seconds{RESET}")
    } else {
        parts.join(", ")
    }
}

/// Returns the sentence for a drop reason. For the unknown name of a newer instance, returns the
/// name.
pub fn sentence(name: &str) -> String {
    let known = DropReason::ALL.iter().find(|reason| reason.name() == name);
    known.map_or_else(|| printable(name), |reason| reason.describe().into())
}

/// Returns the text without escape sequences.
pub fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_but_line_feeds_and_tabs_are_replaced() {
        let text = "a\tb\n\x1b[2J\r\u{9b}1m";
        assert_eq!(printable_lines(text), "a\tb\n\u{fffd}[2J\u{fffd}\u{fffd}1m");
        assert!(!printable(text).contains(['\t', '\n', '\x1b']));
    }

    #[test]
    fn sizes_and_times_are_written_as_wg_does() {
        assert_eq!(plain(&bytes(1023)), "1023 B");
        assert_eq!(plain(&bytes(1536)), "1.50 KiB");
        assert_eq!(plain(&bytes(5 << 30)), "5.00 GiB");
        assert_eq!(plain(&duration(0)), "0 seconds");
        assert_eq!(plain(&duration(61)), "1 minute, 1 second");
        assert_eq!(plain(&duration(86_400 + 7_200 + 5)), "1 day, 2 hours");
        assert_eq!(number(1_234_567), "1,234,567");
        assert_eq!(number(123), "123");
    }

    #[test]
    fn every_reason_has_its_sentence() {
        for reason in DropReason::ALL {
            assert_eq!(sentence(reason.name()), reason.describe());
        }
        assert_eq!(sentence("from_the_future"), "from_the_future");
    }

    #[test]
    fn nothing_moves_the_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[
            ("name", Align::Left),
            ("bytes", Align::Right),
            ("nothing", Align::Left),
            ("", Align::Left),
        ]);
        let cell = |text: &str| text.to_owned();
        table.row(vec![
            cell("a"),
            format!("{RED}12{RESET}"),
            cell(""),
            cell("x"),
        ]);
        table.row(vec![cell("longer"), cell("1234567"), cell(""), cell("")]);
        let mut out = Screen(String::new());
        table.write(&mut out);
        let expected = "  name      bytes\n  a            12  x\n  longer  1234567\n";
        assert_eq!(plain(&out.0), expected);
    }

    #[test]
    fn numbers_have_three_digits() {
        let texts = [
            0.0,
            0.047_619,
            4.5,
            12.34,
            123.4,
            1_234_567.8,
            0.000_01,
            3.0,
            -2.5,
            9.999,
        ]
        .map(rounded);
        let expected = [
            "0",
            "0.0476",
            "4.5",
            "12.3",
            "123",
            "1,234,568",
            "1.0e-5",
            "3",
            "-2.5",
            "10",
        ];
        assert_eq!(texts, expected);
        assert_eq!(rounded(f64::NAN), "?");
    }

    #[test]
    fn how_long_ago_is_said_in_one_unit() {
        let texts = [
            None,
            Some(0.9),
            Some(119.0),
            Some(600.0),
            Some(7200.0),
            Some(200_000.0),
        ];
        let texts = texts.map(|seconds| plain(&ago(seconds)));
        assert_eq!(
            texts,
            [
                "never",
                "now",
                "119 s ago",
                "10 min ago",
                "2 h ago",
                "2 days ago"
            ]
        );
    }

    #[test]
    fn times_have_three_digits() {
        let texts = [310, 31_400, 314_000].map(|us| plain(&milliseconds(us)));
        assert_eq!(texts, ["0.31 ms", "31.4 ms", "314 ms"]);
    }
}

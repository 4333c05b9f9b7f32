//! What the doctor's screens are made of beside [`crate::screen`]: a page's width and characters, broken lines, numbers.

use seikan_ui::screen::Style;

use crate::screen;

/// Nothing is wider, so that it can be pasted into a mail.
const WIDTH: usize = 80;

/// Where it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Columns.
    pub width: usize,
    /// Whether lines and arrows of Unicode can be shown.
    pub unicode: bool,
}

impl Page {
    /// That of standard output: 80 columns, or the terminal's if it has less; Unicode where the locale has it.
    pub fn of_stdout() -> Self {
        // In the order in which setlocale(3) looks; one that is set but empty does not count.
        let names = ["LC_ALL", "LC_CTYPE", "LANG"];
        let locale = names
            .iter()
            .filter_map(|name| std::env::var(name).ok())
            .find(|value| !value.is_empty());
        Page {
            width: Style::of_stdout().width.min(WIDTH),
            unicode: locale.is_some_and(|locale| is_utf8(&locale)),
        }
    }

    /// One of two spellings.
    pub fn either<'a>(&self, unicode: &'a str, ascii: &'a str) -> &'a str {
        match self.unicode {
            true => unicode,
            false => ascii,
        }
    }
}

fn is_utf8(locale: &str) -> bool {
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Breaks a text between words into lines of at most `width` characters; a word that is longer stands alone.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let room = screen::width(&line) + 1 + screen::width(word) <= width;
        if !line.is_empty() && !room {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// A text whose lines all begin with `indent`, but the first with `first`; ends with a line feed.
pub fn paragraph(first: &str, indent: &str, text: &str, width: usize) -> String {
    let room = width.saturating_sub(screen::width(indent).max(screen::width(first)));
    let lines = wrap(text, room);
    let begun = lines.iter().enumerate().map(|(i, line)| match i {
        0 => format!("{first}{line}\n"),
        _ => format!("{indent}{line}\n"),
    });
    begun.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("aa bb  cc", 5), ["aa bb", "cc"]);
        assert_eq!(wrap("much-too-long a", 4), ["much-too-long", "a"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(paragraph("1. ", "   ", "aa bb", 6), "1. aa\n   bb\n");
    }

    #[test]
    fn only_a_locale_of_unicode_has_its_characters() {
        assert!(is_utf8("de_DE.UTF-8") && is_utf8("C.utf8"));
        assert!(!is_utf8("C") && !is_utf8("de_DE.ISO-8859-1"));
    }
}

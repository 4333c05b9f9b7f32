//! Layout of the doctor's text: the width and characters of a page, and line breaks.

use seikan_ui::screen::Style;

use crate::screen;

/// Maximum number of columns, so that the text can be pasted into a mail.
const WIDTH: usize = 80;

/// Properties of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Columns.
    pub width: usize,
    /// Whether lines and arrows of Unicode can be shown.
    pub unicode: bool,
}

impl Page {
    /// Returns the properties of standard output: 80 columns, or fewer if the terminal has fewer;
    /// Unicode if the locale supports it.
    pub fn of_stdout() -> Self {
        // In the order of setlocale(3); an empty variable does not count.
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

    /// Returns `unicode` if the page can show it, otherwise `ascii`.
    pub fn either<'a>(&self, unicode: &'a str, ascii: &'a str) -> &'a str {
        if self.unicode { unicode } else { ascii }
    }
}

fn is_utf8(locale: &str) -> bool {
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Breaks a text between words into lines of at most `width` characters; a longer word has a line of its own.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let fits = screen::width(&line) + 1 + screen::width(word) <= width;
        if !line.is_empty() && !fits {
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

/// Returns a text whose first line begins with `first` and the others with `indent`; ends with a line feed.
pub fn paragraph(first: &str, indent: &str, text: &str, width: usize) -> String {
    let width = width.saturating_sub(screen::width(indent).max(screen::width(first)));
    let lines = wrap(text, width);
    let indented = lines.iter().enumerate().map(|(i, line)| match i {
        0 => format!("{first}{line}\n"),
        _ => format!("{indent}{line}\n"),
    });
    indented.collect()
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

//! A picture as SVG text: lines, boxes, words, and tooltips.
//!
//! Everything that comes from a recording goes through [`escaped`]. Positions are pixels of a
//! picture [`WIDTH`] wide.

use std::fmt::Write;

use crate::palette::{Colour, FAINT, style_rules};

/// Width of every picture.
pub const WIDTH: f64 = 900.0;
/// Height of ordinary letters.
pub const SIZE: f64 = 14.0;
const FONT: &str = "system-ui, sans-serif";
/// Mean width of a letter relative to its height, slightly overestimated so that words do not
/// overlap.
const LETTER: f64 = 0.6;

/// Size and weight of words.
#[derive(Clone, Copy, Debug)]
pub struct Font {
    /// Height in units of the picture.
    pub size: f64,
    /// Whether the letters are bold.
    pub bold: bool,
}

impl Default for Font {
    fn default() -> Font {
        Font {
            size: SIZE,
            bold: false,
        }
    }
}

/// The part of a text that is placed at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The beginning.
    Start,
    /// The middle.
    Middle,
    /// The end.
    End,
}

/// A picture that grows downwards.
#[derive(Debug, Default)]
pub struct Svg {
    body: String,
}

/// A rectangle: left, top, width, height.
pub type Box4 = [f64; 4];

impl Svg {
    /// Draws a straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: Colour, width: f64) {
        self.path(&[from, to], colour, width, "");
    }

    /// Draws a line through points; `extra` holds further attributes.
    pub fn path(&mut self, points: &[(f64, f64)], colour: Colour, width: f64, extra: &str) {
        if points.len() < 2 {
            return;
        }
        let _ = writeln!(
            self.body,
            "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"{extra}/>",
            route(points),
            colour.hex()
        );
    }

    /// Draws straight lines of one colour, as one element.
    pub fn strokes(&mut self, lines: &[[(f64, f64); 2]], colour: Colour, width: f64) {
        let mut data = String::new();
        for line in lines {
            data += &route(line);
        }
        if !data.is_empty() {
            let _ = writeln!(
                self.body,
                "<path d=\"{data}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"/>",
                colour.hex()
            );
        }
    }

    /// Fills the area between points and a floor.
    pub fn area(&mut self, points: &[(f64, f64)], floor: f64, colour: Colour, opacity: f64) {
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return;
        };
        let closed: Vec<_> = [(first.0, floor)]
            .iter()
            .chain(points)
            .chain([&(last.0, floor)])
            .copied()
            .collect();
        self.filled(&closed, colour, opacity);
    }

    /// Fills the polygon whose corners are these points.
    pub fn filled(&mut self, points: &[(f64, f64)], colour: Colour, opacity: f64) {
        let _ = writeln!(
            self.body,
            "<path d=\"{}Z\" fill=\"{}\" fill-opacity=\"{opacity}\"/>",
            route(points),
            colour.hex()
        );
    }

    /// Draws a rectangle, with a tooltip for a pointer that rests on it.
    pub fn rectangle(&mut self, at: Box4, colour: Colour, opacity: f64, tooltip: &str) {
        let [x, y, width, height] = at.map(number);
        let _ = write!(
            self.body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{}\"",
            colour.hex()
        );
        if opacity < 1.0 {
            let _ = write!(self.body, " fill-opacity=\"{}\"", number(opacity));
        }
        self.end("rect", tooltip);
    }

    /// Draws a dot, with a tooltip for a pointer that rests on it.
    pub fn dot(&mut self, at: (f64, f64), radius: f64, colour: Colour, tooltip: &str) {
        let (x, y) = (number(at.0), number(at.1));
        let _ = write!(
            self.body,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{}\"",
            colour.hex()
        );
        self.end("circle", tooltip);
    }

    fn end(&mut self, element: &str, tooltip: &str) {
        let _ = if tooltip.is_empty() {
            writeln!(self.body, "/>")
        } else {
            writeln!(
                self.body,
                "><title>{}</title></{element}>",
                escaped(tooltip)
            )
        };
    }

    /// Draws words; `at` is on their baseline.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, colour: Colour, text: &str) {
        self.letters(at, anchor, colour, Font::default(), text);
    }

    /// Draws bold words.
    pub fn bold(&mut self, at: (f64, f64), anchor: Anchor, colour: Colour, text: &str) {
        self.letters(
            at,
            anchor,
            colour,
            Font {
                bold: true,
                ..Font::default()
            },
            text,
        );
    }

    /// Draws words in a font.
    pub fn letters(
        &mut self,
        at: (f64, f64),
        anchor: Anchor,
        colour: Colour,
        font: Font,
        text: &str,
    ) {
        let Font { size, bold } = font;
        let (x, y) = (number(at.0), number(at.1));
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let weight = if bold { " font-weight=\"600\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<text x=\"{x}\" y=\"{y}\" fill=\"{}\" font-size=\"{size}\"{anchor}{weight}>{}</text>",
            colour.hex(),
            escaped(text)
        );
    }

    /// Draws boxes with words in one row; returns the horizontal position at which the row ends.
    pub fn legend(&mut self, at: (f64, f64), entries: &[(Colour, &str)]) -> f64 {
        let (mut x, y) = at;
        for (colour, text) in entries {
            self.rectangle([x, y - 10.0, 12.0, 12.0], *colour, 1.0, "");
            self.text((x + 18.0, y), Anchor::Start, FAINT, text);
            x += 18.0 + width(text, SIZE) + 18.0;
        }
        x
    }

    /// Draws words that run upwards; `at` is the foot of their first letter.
    pub fn upright(&mut self, at: (f64, f64), colour: Colour, text: &str) {
        let (x, y) = (number(at.0), number(at.1));
        let _ = writeln!(
            self.body,
            "<text x=\"{x}\" y=\"{y}\" fill=\"{}\" font-size=\"{SIZE}\" transform=\"rotate(-90 {x} {y})\">{}</text>",
            colour.hex(),
            escaped(text)
        );
    }

    /// Returns the picture for a page that has the style rules.
    pub fn finish(self, height: f64, name: &str) -> String {
        self.finish_wide(WIDTH, height, name)
    }

    /// Returns a picture of another width than [`WIDTH`].
    pub fn finish_wide(self, width: f64, height: f64, name: &str) -> String {
        format!(
            "<svg class=\"seikan-plot\" role=\"img\" aria-label=\"{}\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
             font-family=\"{FONT}\" xmlns=\"http://www.w3.org/2000/svg\">\n{}</svg>\n",
            escaped(name),
            self.body,
            w = width.ceil(),
            h = height.ceil()
        )
    }
}

/// Returns a picture for a separate file, with its title, description, and the rules for dark
/// pages.
pub fn standalone(svg: &str, title: &str, description: &str) -> String {
    let Some((head, body)) = svg.split_once(">\n") else {
        return svg.to_owned();
    };
    let (title, description) = (escaped(title), escaped(description));
    let rules = style_rules();
    format!(
        "{head}>\n<title>{title}</title>\n<desc>{description}</desc>\n<style>{rules}</style>\n{body}"
    )
}

/// Returns the title and the description that [`standalone`] wrote into a picture.
pub fn title_and_description(svg: &str) -> Option<[String; 2]> {
    let (_, rest) = svg.split_once(">\n<title>")?;
    let (title, rest) = rest.split_once("</title>\n<desc>")?;
    let (description, _) = rest.split_once("</desc>")?;
    Some([unescaped(title), unescaped(description)])
}

fn route(points: &[(f64, f64)]) -> String {
    let mut data = String::new();
    for (position, (x, y)) in points.iter().enumerate() {
        let step = if position == 0 { 'M' } else { 'L' };
        let _ = write!(data, "{step}{} {}", number(*x), number(*y));
    }
    data
}

/// Rounds to tenths of pixels; a value that is not a number becomes 0.
fn number(value: f64) -> f64 {
    if value.is_finite() {
        (value.clamp(-1e6, 1e6) * 10.0).round() / 10.0
    } else {
        0.0
    }
}

/// Escapes a text for XML. Characters that XML does not allow become U+FFFD.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn unescaped(text: &str) -> String {
    let named = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
    ];
    let text = named
        .iter()
        .fold(text.to_owned(), |text, (name, character)| {
            text.replace(name, character)
        });
    text.replace("&amp;", "&")
}

/// Returns the estimated width of words, in pixels.
pub fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * LETTER * size
}

/// Returns words cut to a width, with an ellipsis; empty if there is no space even for the
/// ellipsis.
pub fn cut(text: &str, room: f64, size: f64) -> String {
    if width(text, size) <= room {
        return text.to_owned();
    }
    let fits = (room / (LETTER * size)) as usize;
    match fits {
        0..3 => String::new(),
        _ => text.chars().take(fits - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::palette::INK;

    #[test]
    fn a_hostile_name_stays_text() {
        let mut svg = Svg::default();
        let name = "</title><script>alert('x\" &\u{1b}\u{0}')";
        svg.text((0.0, 0.0), Anchor::Start, INK, name);
        svg.rectangle([0.0; 4], INK, 1.0, name);
        let text = svg.finish(10.0, name);
        let safe = "&lt;/title&gt;&lt;script&gt;alert(&#39;x&quot; &amp;\u{fffd}\u{fffd}&#39;)";
        assert_eq!(text.matches(safe).count(), 3, "{text}");
        assert!(!text.contains("<script"));
    }

    #[test]
    fn a_picture_of_its_own_has_a_title_and_a_description() {
        let svg = Svg::default().finish(10.0, "a");
        let [title, description] = ["a & b", "\"&lt;\" is '<'"];
        let file = standalone(&svg, title, description);
        assert!(file.contains("<style>"));
        assert_eq!(
            title_and_description(&file),
            Some([title, description].map(str::to_owned))
        );
        assert_eq!(title_and_description(&svg), None);
    }

    #[test]
    fn words_are_cut_to_their_width() {
        assert_eq!(cut("interface", 200.0, 10.0), "interface");
        // 30 pixels hold 5 letters of 6.
        assert_eq!(cut("interface", 30.0, 10.0), "inte…");
        assert_eq!(cut("interface", 10.0, 10.0), "");
    }

    #[test]
    fn positions_are_always_numbers() {
        let mut svg = Svg::default();
        svg.line((f64::NAN, f64::INFINITY), (1e300, -4.1234), INK, 1.0);
        let text = svg.finish(10.0, "");
        assert!(text.contains("d=\"M0 0L1000000 -4.1\""), "{text}");
    }
}

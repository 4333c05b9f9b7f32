//! A picture as SVG text: lines, boxes, words, and what is told when a pointer rests on them.
//!
//! Everything that comes from a recording goes through [`escaped`]. Positions are pixels of a picture [`WIDTH`] wide.

use std::fmt::Write;

use seikan_lab::report::palette::{Colour, style_rules};

/// Width of every picture.
pub const WIDTH: f64 = 900.0;
/// Height of ordinary letters.
pub const SIZE: f64 = 14.0;
const FONT: &str = "system-ui, sans-serif";
/// Mean width of a letter, of its height; a little too much, so that words end before what stands behind them.
const LETTER: f64 = 0.6;

/// Which end of words stands at their position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
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
    /// A straight line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: Colour, width: f64) {
        self.path(&[from, to], colour, width, "");
    }

    /// A line through points; `extra` are further attributes.
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

    /// Straight lines of one colour, as one element.
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

    /// What lies between points and a floor.
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

    /// What lies inside of points.
    pub fn filled(&mut self, points: &[(f64, f64)], colour: Colour, opacity: f64) {
        let _ = writeln!(
            self.body,
            "<path d=\"{}Z\" fill=\"{}\" fill-opacity=\"{opacity}\"/>",
            route(points),
            colour.hex()
        );
    }

    /// A rectangle, and what is told where a pointer rests on it.
    pub fn rectangle(&mut self, at: Box4, colour: Colour, opacity: f64, told: &str) {
        let [x, y, width, height] = at.map(number);
        let _ = write!(
            self.body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{}\"",
            colour.hex()
        );
        if opacity < 1.0 {
            let _ = write!(self.body, " fill-opacity=\"{}\"", number(opacity));
        }
        self.end("rect", told);
    }

    /// A dot, and what is told where a pointer rests on it.
    pub fn dot(&mut self, at: (f64, f64), radius: f64, colour: Colour, told: &str) {
        let (x, y) = (number(at.0), number(at.1));
        let _ = write!(
            self.body,
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{}\"",
            colour.hex()
        );
        self.end("circle", told);
    }

    fn end(&mut self, element: &str, told: &str) {
        let _ = match told.is_empty() {
            true => writeln!(self.body, "/>"),
            false => writeln!(self.body, "><title>{}</title></{element}>", escaped(told)),
        };
    }

    /// Words, with the foot of their letters at `at`.
    pub fn text(&mut self, at: (f64, f64), anchor: Anchor, colour: Colour, text: &str) {
        self.letters(at, anchor, colour, SIZE, false, text);
    }

    /// Words that stand out.
    pub fn bold(&mut self, at: (f64, f64), anchor: Anchor, colour: Colour, text: &str) {
        self.letters(at, anchor, colour, SIZE, true, text);
    }

    /// Words of a size.
    pub fn letters(
        &mut self,
        at: (f64, f64),
        anchor: Anchor,
        colour: Colour,
        size: f64,
        bold: bool,
        text: &str,
    ) {
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

    /// Boxes with words, in one row; returns where the row ends.
    pub fn legend(&mut self, at: (f64, f64), entries: &[(Colour, &str)]) -> f64 {
        let (mut x, y) = at;
        for (colour, text) in entries {
            self.rectangle([x, y - 10.0, 12.0, 12.0], *colour, 1.0, "");
            self.text(
                (x + 18.0, y),
                Anchor::Start,
                seikan_lab::report::palette::FAINT,
                text,
            );
            x += 18.0 + width(text, SIZE) + 18.0;
        }
        x
    }

    /// The picture, to stand in a page that has the style rules.
    pub fn finish(self, height: f64, name: &str) -> String {
        format!(
            "<svg class=\"seikan-plot\" role=\"img\" aria-label=\"{}\" width=\"{WIDTH}\" height=\"{h}\" viewBox=\"0 0 {WIDTH} {h}\" \
             font-family=\"{FONT}\" xmlns=\"http://www.w3.org/2000/svg\">\n{}</svg>\n",
            escaped(name),
            self.body,
            h = height.ceil()
        )
    }
}

/// A picture to stand alone, with the rules for dark pages in it.
pub fn alone(svg: &str) -> String {
    match svg.split_once(">\n") {
        Some((head, body)) => format!("{head}>\n<style>{}</style>\n{body}", style_rules()),
        None => svg.to_owned(),
    }
}

fn route(points: &[(f64, f64)]) -> String {
    let mut data = String::new();
    for (position, (x, y)) in points.iter().enumerate() {
        let step = if position == 0 { 'M' } else { 'L' };
        let _ = write!(data, "{step}{} {}", number(*x), number(*y));
    }
    data
}

/// Tenths of pixels are enough; what is not a number is nowhere.
fn number(value: f64) -> f64 {
    match value.is_finite() {
        true => (value.clamp(-1e6, 1e6) * 10.0).round() / 10.0,
        false => 0.0,
    }
}

/// As text of XML. Characters that XML cannot have become U+FFFD.
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

/// About how wide words are.
pub fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * LETTER * size
}

/// Words cut to a width, with an ellipsis; nothing where not even that has room.
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
    use seikan_lab::report::palette::INK;

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
    fn words_are_cut_to_their_room() {
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

//! A sheet's panels as SVG: horizontal bars, the range of the rounds as a whisker, the value beside each.
//!
//! Colours stand for whose tunnel it is, and names and values stand beside every bar, so that nothing rests on colour
//! alone. A style sheet inside adapts ink and lines to a dark page, in a page as in an image viewer.

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, IntoFont, RGBColor, ShapeStyle, TextStyle};

use crate::error::{LabError, Result};
use crate::report::palette::{Colour, FAINT, INK, LINE, OTHER, OWN, RAW, style_rules};
use crate::report::{Bar, Kind, Panel, Sheet};

/// Width of the picture.
const WIDTH: i32 = 900;
/// Where bars begin: room for names on the left, of the usual ones, and of the longest.
const LEFT: std::ops::RangeInclusive<i32> = 170..=420;
/// Mean width of a letter of names.
const LETTER: usize = 9;
/// Where the longest bar ends: room for its value on the right.
const RIGHT: i32 = WIDTH - 90;
const HEAD: i32 = 38;
const ROW: i32 = 24;
const THICKNESS: i32 = 15;
const FOOT: i32 = 14;
pub(super) const FONT: &str = "system-ui, sans-serif";

/// Draws all panels, one below the other.
///
/// # Errors
/// [`LabError::Render`] when plotters refuses.
pub fn svg(sheet: &Sheet) -> Result<String> {
    let heights: Vec<i32> = sheet
        .panels
        .iter()
        .map(|p| HEAD + ROW * p.bars.len() as i32 + FOOT)
        .collect();
    let height = heights.iter().sum::<i32>().max(1);
    let mut text = String::new();
    {
        let root =
            SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32)).into_drawing_area();
        let left = left(sheet);
        let mut top = 0;
        for (panel, height) in sheet.panels.iter().zip(heights) {
            draw_panel(&root, panel, left, top)?;
            top += height;
        }
        root.present().map_err(render)?;
    }
    Ok(with_style_sheet(&text))
}

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(super) fn render(error: impl std::fmt::Display) -> LabError {
    LabError::Render(error.to_string())
}

/// Where bars begin.
fn left(sheet: &Sheet) -> i32 {
    let bars = sheet.panels.iter().flat_map(|panel| &panel.bars);
    let letters = bars.map(|bar| bar.label.chars().count()).max().unwrap_or(0);
    let room = i32::try_from(letters * LETTER + 20).unwrap_or(i32::MAX);
    room.clamp(*LEFT.start(), *LEFT.end())
}

fn draw_panel(root: &Area<'_>, panel: &Panel, left: i32, top: i32) -> Result<()> {
    write(root, &panel.title, (0, top + 16), HPos::Left, INK, true)?;
    write(
        root,
        &panel.unit,
        (WIDTH, top + 16),
        HPos::Right,
        FAINT,
        false,
    )?;
    let (first, max) = (top + HEAD, panel.end());
    let bottom = first + ROW * panel.bars.len() as i32;
    root.draw(&PathElement::new(
        [(left, first - 4), (left, bottom)],
        rgb(LINE),
    ))
    .map_err(render)?;
    for (number, bar) in (0..).zip(&panel.bars) {
        draw_bar(root, panel, bar, max, (left, first + ROW * number))?;
    }
    Ok(())
}

fn draw_bar(
    root: &Area<'_>,
    panel: &Panel,
    bar: &Bar,
    max: f64,
    (left, top): (i32, i32),
) -> Result<()> {
    let middle = top + ROW / 2 - 2;
    let own = bar.kind == Kind::Own;
    write(
        root,
        &bar.label,
        (left - 10, middle),
        HPos::Right,
        if own { INK } else { FAINT },
        own,
    )?;
    let x = |value: f64| left + (value / max * f64::from(RIGHT - left)).round() as i32;
    let Some(value) = bar.value.filter(|_| max > 0.0) else {
        return write(root, "failed", (left + 8, middle), HPos::Left, FAINT, false);
    };
    let colour = match bar.kind {
        Kind::Own => OWN,
        Kind::Raw => RAW,
        Kind::Other => OTHER,
    };
    let corners = [
        (left, middle - THICKNESS / 2),
        (x(value.median).max(left + 1), middle + THICKNESS / 2 + 1),
    ];
    root.draw(&Rectangle::new(corners, rgb(colour).filled()))
        .map_err(render)?;
    let (low, high) = (x(value.min), x(value.max));
    if high - low > 2 {
        let whisker = ShapeStyle {
            color: rgb(INK).to_rgba(),
            filled: false,
            stroke_width: 1,
        };
        for path in [
            [(low, middle), (high, middle)],
            [(low, middle - 3), (low, middle + 3)],
            [(high, middle - 3), (high, middle + 3)],
        ] {
            root.draw(&PathElement::new(path, whisker))
                .map_err(render)?;
        }
    }
    let end = x(value.median).max(high) + 8;
    write(
        root,
        &panel.number(Some(value.median)),
        (end, middle),
        HPos::Left,
        INK,
        own,
    )
}

fn write(
    root: &Area<'_>,
    text: &str,
    at: (i32, i32),
    h: HPos,
    colour: Colour,
    bold: bool,
) -> Result<()> {
    let font = (FONT, 17).into_font();
    let font = if bold {
        font.style(plotters::style::FontStyle::Bold)
    } else {
        font
    };
    let colour = rgb(colour);
    let style = TextStyle::from(font)
        .color(&colour)
        .pos(Pos::new(h, VPos::Center));
    root.draw(&Text::new(text.to_owned(), at, style))
        .map_err(render)
}

pub(super) fn rgb(colour: Colour) -> RGBColor {
    let [_, red, green, blue] = colour.light.to_be_bytes();
    RGBColor(red, green, blue)
}

/// Gives the picture a class and the rules for dark pages.
pub(super) fn with_style_sheet(text: &str) -> String {
    let text = text.replacen("<svg ", "<svg class=\"seikan-plot\" role=\"img\" ", 1);
    match text.find(">\n") {
        Some(end) => format!(
            "{}<style>{}</style>\n{}",
            &text[..end + 2],
            style_rules(),
            &text[end + 2..]
        ),
        None => text,
    }
}

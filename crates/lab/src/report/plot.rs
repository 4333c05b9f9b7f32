//! A sheet's panels as SVG: horizontal bars, the range of the rounds as a whisker, the value beside each.
//!
//! Colours stand for whose tunnel it is, and names and values stand beside every bar, so that nothing rests on colour
//! alone. A style sheet inside adapts ink and lines to a dark page, in a page as in an image viewer.

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle};

use crate::error::{LabError, Result};
use crate::report::{Bar, Kind, Panel, Sheet};

/// Width of the picture.
const WIDTH: i32 = 900;
/// Where bars begin: room for names on the left.
const LEFT: i32 = 170;
/// Where the longest bar ends: room for its value on the right.
const RIGHT: i32 = WIDTH - 90;
const HEAD: i32 = 38;
const ROW: i32 = 24;
const THICKNESS: i32 = 15;
const FOOT: i32 = 14;
pub(super) const FONT: &str = "system-ui, sans-serif";

/// Replaced by the style sheet where the page is dark.
pub(super) const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
pub(super) const FAINT: RGBColor = RGBColor(0x59, 0x63, 0x6e);
pub(super) const LINE: RGBColor = RGBColor(0xd0, 0xd7, 0xde);
pub(super) const OWN: RGBColor = RGBColor(0x0f, 0x8b, 0x8d);
pub(super) const WRONG: RGBColor = RGBColor(0xc9, 0x5d, 0x12);
const OTHER: RGBColor = RGBColor(0x8f, 0x9a, 0xa6);
const RAW: RGBColor = RGBColor(0xc8, 0xcf, 0xd7);

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
        let mut top = 0;
        for (panel, height) in sheet.panels.iter().zip(heights) {
            draw_panel(&root, panel, top)?;
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

fn draw_panel(root: &Area<'_>, panel: &Panel, top: i32) -> Result<()> {
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
    root.draw(&PathElement::new([(LEFT, first - 4), (LEFT, bottom)], LINE))
        .map_err(render)?;
    for (number, bar) in (0..).zip(&panel.bars) {
        draw_bar(root, panel, bar, max, first + ROW * number)?;
    }
    Ok(())
}

fn draw_bar(root: &Area<'_>, panel: &Panel, bar: &Bar, max: f64, top: i32) -> Result<()> {
    let middle = top + ROW / 2 - 2;
    let own = bar.kind == Kind::Own;
    write(
        root,
        &bar.label,
        (LEFT - 10, middle),
        HPos::Right,
        if own { INK } else { FAINT },
        own,
    )?;
    let x = |value: f64| LEFT + (value / max * f64::from(RIGHT - LEFT)).round() as i32;
    let Some(value) = bar.value.filter(|_| max > 0.0) else {
        return write(root, "failed", (LEFT + 8, middle), HPos::Left, FAINT, false);
    };
    let color = match bar.kind {
        Kind::Own => OWN,
        Kind::Raw => RAW,
        Kind::Other => OTHER,
    };
    let corners = [
        (LEFT, middle - THICKNESS / 2),
        (x(value.median).max(LEFT + 1), middle + THICKNESS / 2 + 1),
    ];
    root.draw(&Rectangle::new(corners, color.filled()))
        .map_err(render)?;
    let (low, high) = (x(value.min), x(value.max));
    if high - low > 2 {
        let whisker = ShapeStyle {
            color: INK.to_rgba(),
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
    color: RGBColor,
    bold: bool,
) -> Result<()> {
    let font = (FONT, 17).into_font();
    let font = if bold {
        font.style(plotters::style::FontStyle::Bold)
    } else {
        font
    };
    let style = TextStyle::from(font)
        .color(&color)
        .pos(Pos::new(h, VPos::Center));
    root.draw(&Text::new(text.to_owned(), at, style))
        .map_err(render)
}

/// Gives the picture a class and the rules for dark pages; a rule beats the attributes that plotters writes.
pub(super) fn with_style_sheet(text: &str) -> String {
    let hex = |RGBColor(r, g, b): RGBColor| format!("#{r:02X}{g:02X}{b:02X}");
    let rules = format!(
        "<style>.seikan-plot text{{font-variant-numeric:tabular-nums}}@media (prefers-color-scheme:dark){{\
         .seikan-plot [fill=\"{ink}\"]{{fill:#e6edf3}}.seikan-plot [stroke=\"{ink}\"]{{stroke:#e6edf3}}\
         .seikan-plot [fill=\"{faint}\"]{{fill:#9aa4af}}.seikan-plot [stroke=\"{line}\"]{{stroke:#3d444d}}\
         .seikan-plot [fill=\"{own}\"]{{fill:#2bb5b0}}.seikan-plot [fill=\"{other}\"]{{fill:#7d8996}}\
         .seikan-plot [fill=\"{raw}\"]{{fill:#4a535e}}.seikan-plot [fill=\"{wrong}\"]{{fill:#f0883e}}}}</style>\n",
        ink = hex(INK),
        faint = hex(FAINT),
        line = hex(LINE),
        own = hex(OWN),
        other = hex(OTHER),
        raw = hex(RAW),
        wrong = hex(WRONG),
    );
    let text = text.replacen("<svg ", "<svg class=\"seikan-plot\" role=\"img\" ", 1);
    match text.find(">\n") {
        Some(end) => text[..end + 2].to_owned() + &rules + &text[end + 2..],
        None => text,
    }
}

//! A report's panels as SVG: horizontal bars with values, and the range of the rounds as a whisker.
//!
//! Colours distinguish tunnels, and every bar has its name and value, so that nothing depends on
//! colour alone. A style sheet inside adapts ink and lines to a dark page, in a page as in an image
//! viewer.

use seikan_ui::palette::{FAINT, INK, LINE, OTHER, OWN, RAW};
use seikan_ui::svg::{Anchor, Font, SIZE, Svg, WIDTH, standalone, width};

use crate::report::{Bar, Kind, Panel, Report};

/// Smallest and largest room for names, on the left of the bars.
const LEFT: [f64; 2] = [170.0, 420.0];
/// End of the longest bar: room for its value on the right.
const RIGHT: f64 = WIDTH - 90.0;
const HEAD: f64 = 38.0;
const ROW: f64 = 24.0;
const THICKNESS: f64 = 15.0;
const FOOT: f64 = 14.0;

/// Draws all panels, one below the other.
pub fn svg(report: &Report) -> String {
    let bars = report.panels.iter().flat_map(|panel| &panel.bars);
    let names = bars.map(|bar| width(&bar.label, SIZE)).fold(0.0, f64::max);
    let left = (names + 20.0).clamp(LEFT[0], LEFT[1]);
    let mut svg = Svg::default();
    let mut top = 0.0;
    for panel in &report.panels {
        draw_panel(&mut svg, panel, left, top);
        top += HEAD + ROW * panel.bars.len() as f64 + FOOT;
    }
    standalone(&svg.finish(top.max(1.0), &report.title), &report.title, "")
}

fn draw_panel(svg: &mut Svg, panel: &Panel, left: f64, top: f64) {
    svg.bold((0.0, top + 21.0), Anchor::Start, INK, &panel.title);
    svg.text((WIDTH, top + 21.0), Anchor::End, FAINT, &panel.unit);
    let first = top + HEAD;
    let bottom = first + ROW * panel.bars.len() as f64;
    svg.line((left, first - 4.0), (left, bottom), LINE, 1.0);
    for (number, bar) in panel.bars.iter().enumerate() {
        draw_bar(svg, panel, bar, (left, first + ROW * number as f64));
    }
}

fn draw_bar(svg: &mut Svg, panel: &Panel, bar: &Bar, (left, top): (f64, f64)) {
    let middle = top + ROW / 2.0 - 2.0;
    let foot = middle + SIZE / 3.0;
    let own = bar.kind == Kind::Own;
    let font = Font {
        bold: own,
        ..Font::default()
    };
    let ink = if own { INK } else { FAINT };
    svg.letters((left - 10.0, foot), Anchor::End, ink, font, &bar.label);
    let max = panel.end();
    let Some(value) = bar.value.filter(|_| max > 0.0) else {
        return svg.text((left + 8.0, foot), Anchor::Start, FAINT, "failed");
    };
    let x = |value: f64| (left + value / max * (RIGHT - left)).round();
    let colour = match bar.kind {
        Kind::Own => OWN,
        Kind::Raw => RAW,
        Kind::Other => OTHER,
    };
    let length = (x(value.median) - left).max(1.0);
    svg.rectangle([left, middle - 7.0, length, THICKNESS], colour, 1.0, "");
    let (low, high) = (x(value.min), x(value.max));
    if high - low > 2.0 {
        let ends = [low, high].map(|x| [(x, middle - 3.0), (x, middle + 3.0)]);
        svg.strokes(
            &[[(low, middle), (high, middle)], ends[0], ends[1]],
            INK,
            1.0,
        );
    }
    let end = x(value.median).max(high) + 8.0;
    let text = panel.number(Some(value.median));
    svg.letters((end, foot), Anchor::Start, INK, font, &text);
}

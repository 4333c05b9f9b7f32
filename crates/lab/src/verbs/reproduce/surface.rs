//! Quantities over two variables: one map for each, side by side, with stronger colours for larger
//! values.

use seikan_lab::reproduce::{Layer, Surface};
use seikan_ui::axis::format_number;
use seikan_ui::palette::{Colour, FAINT, INK, OWN, SECOND};
use seikan_ui::svg::{Anchor, Box4, SIZE, Svg, WIDTH};

/// Room for the names of rows, between maps, and above them.
const LEFT: f64 = 60.0;
const GAP: f64 = 24.0;
const TOP: f64 = 62.0;
/// Height of a cell.
const CELL: f64 = 30.0;
/// Strongest colour, on which text is still readable.
const STRONGEST: f64 = 0.7;

/// Draws a surface.
pub fn draw(surface: &Surface) -> String {
    let count = surface.layers.len().max(1) as f64;
    let wide = (WIDTH - LEFT - GAP * (count - 1.0)) / count;
    let bottom = TOP + CELL * surface.rows.len() as f64;
    let mut svg = Svg::default();
    svg.bold((0.0, 16.0), Anchor::Start, INK, &surface.title);
    for (row, name) in surface.rows.iter().enumerate() {
        let y = TOP + CELL * (row as f64 + 0.5) + 5.0;
        svg.text((LEFT - 8.0, y), Anchor::End, FAINT, name);
    }
    for (number, layer) in surface.layers.iter().enumerate() {
        let left = LEFT + (wide + GAP) * number as f64;
        let colour = if layer.wanted { OWN } else { SECOND };
        map(&mut svg, surface, layer, (left, wide, colour));
    }
    let below = format!("across: {}; down: {}", surface.x, surface.y);
    svg.text((WIDTH, bottom + 46.0), Anchor::End, FAINT, &below);
    svg.finish(bottom + 58.0, &surface.title)
}

fn map(svg: &mut Svg, surface: &Surface, layer: &Layer, (left, wide, colour): (f64, f64, Colour)) {
    let cell = wide / surface.columns.len().max(1) as f64;
    let at = |column: usize, row: usize| -> Box4 {
        let (x, y) = (left + cell * column as f64, TOP + CELL * row as f64);
        [x, y, cell - 2.0, CELL - 2.0]
    };
    let title = format!("{}, {}", layer.title, layer.unit);
    svg.text((left, TOP - 12.0), Anchor::Start, INK, &title);
    for (row, values) in layer.values.iter().enumerate() {
        for (column, value) in values.iter().enumerate() {
            let [x, y, width, height] = at(column, row);
            let text = value.map_or_else(|| "–".to_owned(), format_number);
            let strength = value.map_or(0.0, |value| strength(layer, value));
            svg.rectangle([x, y, width, height], colour, strength, "");
            let middle = (x + width / 2.0, y + height / 2.0 + SIZE / 3.0);
            svg.text(middle, Anchor::Middle, INK, &text);
        }
    }
    if let Some([column, row]) = surface.best {
        let [x, y, width, height] = at(column, row);
        let (right, bottom) = (x + width, y + height);
        let around = [(x, y), (right, y), (right, bottom), (x, bottom), (x, y)];
        svg.path(&around, INK, 2.5, "");
    }
    let bottom = TOP + CELL * surface.rows.len() as f64;
    for (column, name) in surface.columns.iter().enumerate() {
        let [x, _, width, _] = at(column, 0);
        let middle = (x + width / 2.0, bottom + 18.0);
        svg.text(middle, Anchor::Middle, FAINT, name);
    }
}

/// Strength of the colour of a value: by its logarithm, between the smallest and the largest.
fn strength(layer: &Layer, value: f64) -> f64 {
    let all = layer.values.iter().flatten().copied().flatten();
    let logarithms = all.filter(|value| *value > 0.0).map(f64::ln);
    let (low, high) = logarithms.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| {
        (low.min(v), high.max(v))
    });
    let share = if value > 0.0 && high > low {
        (value.ln() - low) / (high - low)
    } else {
        0.0
    };
    0.05 + (STRONGEST - 0.05) * share
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surface(values: Vec<Vec<Option<f64>>>) -> Surface {
        Surface {
            name: "n".into(),
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            columns: vec!["1".into(), "2".into()],
            rows: vec!["10".into(), "20".into()],
            layers: vec![Layer {
                title: "throughput".into(),
                unit: "Mbit/s".into(),
                wanted: true,
                values,
            }],
            best: Some([1, 0]),
        }
    }

    #[test]
    fn more_is_stronger_by_its_logarithm() {
        let surface = surface(vec![vec![Some(1.0), Some(100.0)], vec![Some(10.0), None]]);
        let layer = &surface.layers[0];
        let of = |value| strength(layer, value);
        assert_eq!((of(1.0), of(100.0)), (0.05, STRONGEST));
        assert!((of(10.0) - (0.05 + STRONGEST) / 2.0).abs() < 1e-9);
        assert_eq!(of(0.0), 0.05);
    }

    #[test]
    fn every_cell_has_its_number_and_one_a_frame() {
        let svg = draw(&surface(vec![
            vec![Some(1.0), Some(250.0)],
            vec![Some(10.0), None],
        ]));
        assert_eq!(svg.matches("<rect").count(), 4);
        assert_eq!(svg.matches("stroke-width=\"2.5\"").count(), 1);
        for text in [">250<", ">10<", ">–<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(!draw(&surface(vec![])).contains("NaN"));
    }
}

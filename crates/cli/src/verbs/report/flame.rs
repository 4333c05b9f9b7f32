//! Flame graph: boxes of functions above their callers, as wide as the time spent in them (Gregg
//! 2016).

use std::collections::BTreeMap;

use seikan_diagnose::stage;
use seikan_ui::palette::INK;
use seikan_ui::svg::{Anchor, Font, Svg, WIDTH, cut};

use super::functions;
use super::{Drawing, Scene};
use crate::screen::number;

/// Maximum number of levels.
const DEPTH: usize = 48;
/// Minimum width of a box, in pixels.
const NARROW: f64 = 0.8;
const ROW: f64 = 18.0;
const LETTERS: f64 = 11.0;

/// A function in its call stack.
#[derive(Debug, Default, PartialEq)]
struct Node<'a> {
    samples: u64,
    calls: BTreeMap<&'a str, Node<'a>>,
}

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let functions = scene.recording.functions.as_ref();
    let stacks = functions.map_or(&[][..], |functions| &functions.stacks);
    let root = tree(stacks);
    if root.samples == 0 {
        return Err("no call stacks were recorded (`seikan record --stacks`)".into());
    }
    let per_sample = WIDTH / root.samples as f64;
    let levels = depth(&root, per_sample);
    let bottom = 40.0 + ROW * levels as f64;
    let mut svg = Svg::default();
    functions::legend(&mut svg, 18.0);
    let picture = Picture {
        total: root.samples,
        bottom,
        per_sample,
    };
    picture.level(&mut svg, &root, 0, 0.0);
    Ok(Drawing {
        svg: svg.finish(bottom + 8.0, "flame graph"),
        caption: format!(
            "Each box is a function above its caller, as wide as its share of {} samples. The order from left to right is by name, \
             not by time. Time is spent in wide boxes without others above them. Point at a box to see its name.",
            number(root.samples)
        ),
    })
}

/// Merges stacks: common prefixes share nodes.
fn tree(stacks: &[(Vec<String>, u64)]) -> Node<'_> {
    let mut root = Node::default();
    for (stack, samples) in stacks {
        root.samples = root.samples.saturating_add(*samples);
        let mut node = &mut root;
        for function in stack.iter().take(DEPTH) {
            node = node.calls.entry(function).or_default();
            node.samples = node.samples.saturating_add(*samples);
        }
    }
    root
}

/// Returns the number of levels with boxes of sufficient width.
fn depth(node: &Node<'_>, per_sample: f64) -> usize {
    let wide = node.calls.values();
    let wide = wide.filter(|call| call.samples as f64 * per_sample >= NARROW);
    wide.map(|call| 1 + depth(call, per_sample))
        .max()
        .unwrap_or(0)
}

struct Picture {
    total: u64,
    bottom: f64,
    per_sample: f64,
}

impl Picture {
    fn level(&self, svg: &mut Svg, node: &Node<'_>, level: usize, left: f64) {
        let mut x = left;
        for (function, call) in &node.calls {
            let wide = call.samples as f64 * self.per_sample;
            if wide >= NARROW {
                let y = self.bottom - ROW * (level + 1) as f64;
                let share = 100.0 * call.samples as f64 / self.total as f64;
                let label = format!("{function}: {share:.1} %, {} samples", number(call.samples));
                let (_, colour) = functions::stage(stage(function, ""));
                let gap = if wide > 3.0 { 0.6 } else { 0.1 };
                svg.rectangle([x, y, wide - gap, ROW - 1.0], colour, 0.5, &label);
                let name = cut(function, wide - 8.0, LETTERS);
                if !name.is_empty() {
                    let at = (x + 4.0, y + ROW - 5.5);
                    let font = Font {
                        size: LETTERS,
                        bold: false,
                    };
                    svg.letters(at, Anchor::Start, INK, font, &name);
                }
                self.level(svg, call, level + 1, x);
            }
            x += wide;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefixes_are_merged() {
        let stack = |names: &[&str], samples| {
            (
                names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>(),
                samples,
            )
        };
        let stacks = [
            stack(&["main", "read"], 3),
            stack(&["main", "write"], 5),
            stack(&["main"], 2),
        ];
        let root = tree(&stacks);
        assert_eq!((root.samples, root.calls.len()), (10, 1));
        let main = &root.calls["main"];
        assert_eq!(main.samples, 10);
        assert_eq!(main.calls["read"].samples, 3);
        // 90 pixels a sample: 10, 3 and 5 of them are wide enough; 0.1 pixels are not.
        assert_eq!(depth(&root, 90.0), 2);
        assert_eq!(depth(&root, 0.1), 1);
    }
}

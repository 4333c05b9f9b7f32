//! Processor time by function, and by purpose of functions.

use seikan_diagnose::{Share, Stage};
use seikan_ui::axis::RIGHT;
use seikan_ui::palette::{Colour, FAINT, INK, KINDS, LINE, OTHER, OWN, SECOND};
use seikan_ui::svg::{Anchor, SIZE, Svg, WIDTH, cut, width};

use super::{Drawing, Scene};

/// Number of functions shown.
const SHOWN: usize = 14;
/// Left end of the bars, after the names of functions.
const LEFT: f64 = 380.0;
const ROW: f64 = 22.0;

/// Returns the display name and colour of a stage.
pub fn stage(stage: Stage) -> (&'static str, Colour) {
    match stage {
        Stage::Crypto => ("encryption", KINDS[0]),
        Stage::Copy => ("copies", KINDS[1]),
        Stage::Checksum => ("checksums", KINDS[2]),
        Stage::Syscall => ("system calls", KINDS[3]),
        Stage::Schedule => ("scheduling", SECOND),
        Stage::Network => ("network stack", OWN),
        Stage::Memory => ("memory", KINDS[4]),
        Stage::Other => ("other", OTHER),
    }
}

/// Every stage, in the order of legends.
pub const STAGES: [Stage; 8] = [
    Stage::Crypto,
    Stage::Copy,
    Stage::Checksum,
    Stage::Syscall,
    Stage::Schedule,
    Stage::Network,
    Stage::Memory,
    Stage::Other,
];

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let profile = evidence
        .profile
        .as_ref()
        .ok_or("processor time was not sampled by function (it needs CAP_PERFMON and level 2)")?;
    let name = evidence.map.program.as_ref().map(|program| &*program.name);
    let lists = [
        (name.unwrap_or("the program"), &profile.program),
        ("the whole machine, while it was not idle", &profile.machine),
    ];
    let lists: Vec<_> = lists
        .into_iter()
        .filter(|(_, shares)| !shares.is_empty())
        .collect();
    if lists.is_empty() {
        return Err("no function was sampled".into());
    }
    let mut svg = Svg::default();
    legend(&mut svg, 18.0);
    let mut top = 62.0;
    for (title, shares) in &lists {
        svg.bold(
            (0.0, top),
            Anchor::Start,
            INK,
            &cut(title, WIDTH - 60.0, SIZE * 1.06),
        );
        svg.text((RIGHT, top), Anchor::End, FAINT, "% of its time");
        top += 14.0;
        stages(&mut svg, top, shares);
        top += 44.0;
        top = bars(&mut svg, top, shares) + 50.0;
    }
    Ok(Drawing {
        svg: svg.finish(top - 40.0, "processor time by function"),
        caption: format!(
            "Shares of {} samples of the processors. The upper bar sums functions by purpose; below are the largest functions.",
            crate::screen::number(profile.samples)
        ),
    })
}

/// Draws the legend of the colours.
pub fn legend(svg: &mut Svg, y: f64) {
    let entries = STAGES.map(|of| {
        let (name, colour) = stage(of);
        (colour, name)
    });
    svg.legend((0.0, y), &entries);
}

/// Draws one bar of all stages; time of functions that are not listed stays empty.
fn stages(svg: &mut Svg, top: f64, shares: &[Share]) {
    let mut x = 0.0;
    svg.rectangle(
        [0.0, top, RIGHT, 26.0],
        LINE,
        0.35,
        "functions with smaller shares",
    );
    for of in STAGES {
        let (name, colour) = stage(of);
        let share = total(shares, of);
        let wide = (share * RIGHT).min(RIGHT - x).max(0.0);
        if wide < 0.5 {
            continue;
        }
        let percent = format!("{:.0} %", share * 100.0);
        svg.rectangle(
            [x, top, wide, 26.0],
            colour,
            0.75,
            &format!("{name}: {percent}"),
        );
        let label = format!("{name} {percent}");
        let label = [label, percent]
            .into_iter()
            .find(|text| width(text, SIZE) + 8.0 < wide);
        if let Some(label) = label {
            svg.text((x + wide / 2.0, top + 18.0), Anchor::Middle, INK, &label);
        }
        x += wide;
    }
}

fn total(shares: &[Share], stage: Stage) -> f64 {
    let of = shares.iter().filter(|share| share.stage == stage);
    of.map(|share| share.share.clamp(0.0, 1.0)).sum()
}

fn bars(svg: &mut Svg, top: f64, shares: &[Share]) -> f64 {
    let largest = shares
        .iter()
        .map(|share| share.share)
        .fold(0.0, f64::max)
        .max(1e-9);
    let available = RIGHT - 60.0 - LEFT;
    for (row, share) in shares.iter().take(SHOWN).enumerate() {
        let y = top + ROW * row as f64;
        let (name, colour) = stage(share.stage);
        let label = cut(&share.symbol, LEFT - 16.0, SIZE);
        svg.text((LEFT - 10.0, y + 13.0), Anchor::End, INK, &label);
        let percent = format!("{:.1} %", share.share * 100.0);
        let wide = (share.share / largest * available).max(1.0);
        let about = format!("{}: {percent}, {name}", share.symbol);
        svg.rectangle([LEFT, y, wide, ROW - 6.0], colour, 0.85, &about);
        svg.text(
            (LEFT + wide + 8.0, y + 13.0),
            Anchor::Start,
            FAINT,
            &percent,
        );
    }
    top + ROW * shares.len().min(SHOWN) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_the_sum_of_its_functions() {
        let share = |stage, share| Share {
            symbol: String::new(),
            stage,
            share,
        };
        let shares = [
            share(Stage::Crypto, 0.5),
            share(Stage::Copy, 0.25),
            share(Stage::Crypto, 0.125),
        ];
        assert_eq!(total(&shares, Stage::Crypto), 0.625);
        assert_eq!(total(&shares, Stage::Network), 0.0);
    }
}

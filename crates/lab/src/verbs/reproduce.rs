//! `seikan lab reproduce`: published experiments on slow tunnels, repeated, as tables, pictures and
//! one page.

mod bars;
mod curves;
mod page;
mod surface;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;
use std::sync::LazyLock;

use anyhow::Context;
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum, ValueHint};
use seikan_lab::report::{Report, svg, terminal};
use seikan_lab::reproduce::Source;
use seikan_lab::{Experiment, LabError, ReproduceOptions, program, reproduce};
use seikan_ui::palette::FAINT;
use seikan_ui::screen::Style;
use seikan_ui::svg::{Anchor, SIZE, Svg, WIDTH, standalone, title_and_description, width};
use seikan_ui::{Interrupt, ProgressBar, output};

use super::{JsonFile, exit_code};

/// Pictures of a recording that sources had as well: the time-sequence graph, from readings of the
/// kernel's state and from a capture, and softirqs by processor.
const PICTURES: [&str; 3] = ["sequence", "segments", "softirq"];
/// Distance between two rows of a legend.
const LEGEND_ROW: f64 = 20.0;

/// Options of `lab reproduce`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab reproduce queue\n  \
    sudo seikan lab reproduce all --html reproduced.html --json reproduced.json\n\n\
    Rebuilds each published setup as closely as one machine allows, slow and fast, and compares the ratios of its \
    figures with the published ones. Runs the doctor on the slow setup without hints. Each source takes some minutes. \
    The exit status is 1 if a comparison did not hold in every round, or the doctor was wrong.")]
pub struct ReproduceArguments {
    /// Published sources to reproduce
    #[arg(value_name = "SOURCE", required = true)]
    pub sources: Vec<SourceName>,
    #[command(flatten)]
    options: ReproduceOptions,
    #[command(flatten)]
    json: JsonFile,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Write each picture as an SVG file into this directory
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub svg: Option<PathBuf>,
}

/// A selection of sources: one, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceName(Option<Source>);

impl ValueEnum for SourceName {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<SourceName>> = LazyLock::new(|| {
            let sources = Source::value_variants().iter().copied().map(Some);
            sources.chain([None]).map(SourceName).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self.0 {
            Some(source) => source.to_possible_value(),
            None => Some(PossibleValue::new("all").help("All of them")),
        }
    }
}

/// A picture of an experiment.
struct Picture {
    /// Name of the picture in file names.
    name: String,
    title: String,
    caption: String,
    svg: String,
}

/// Runs the experiments, and prints and writes the results. The exit status is 1 if a published
/// result was not reproduced.
pub fn run(arguments: &ReproduceArguments) -> anyhow::Result<ExitCode> {
    let mut sources: Vec<Source> = Vec::new();
    for SourceName(name) in &arguments.sources {
        let named = name
            .as_ref()
            .map_or(Source::value_variants(), slice::from_ref);
        for source in named {
            if !sources.contains(source) {
                sources.push(*source);
            }
        }
    }
    let kept = seikan_lab::cleanup::private_directory()?;
    let options = ReproduceOptions {
        recordings: Some(kept.path().to_owned()),
        ..arguments.options.clone()
    };
    // Check the directory before anything is measured, not after half an hour.
    if let Some(directory) = &arguments.svg {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    }
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let mut experiments = Vec::new();
    let mut failed = None;
    for source in sources {
        let bar = ProgressBar::new();
        let outcome = reproduce(source, &options, &interrupt, &mut |step| bar.show(step));
        drop(bar);
        let experiment = match outcome {
            Err(error @ LabError::Usage(_)) => return Err(error.into()),
            // Finished experiments are kept.
            Err(error @ LabError::Interrupted) => {
                failed = Some(error);
                break;
            }
            Err(error) => {
                output::error(&anyhow::anyhow!("{source}: {error}"));
                failed = Some(error);
                continue;
            }
            Ok(experiment) => experiment,
        };
        let shown = show(&experiment, experiments.is_empty());
        experiments.push(experiment);
        // Write after each experiment: they take long, and the next one may be interrupted.
        arguments.json.write(&experiments)?;
        if let Err(error) = shown {
            output::error(&anyhow::Error::from(error).context("cannot show it"));
        }
    }
    let drawn = experiments
        .iter()
        .map(|experiment| Ok((experiment, pictures(experiment, kept.path())?)))
        .collect::<anyhow::Result<Vec<_>>>()?;
    if let Some(directory) = &arguments.svg {
        for picture in drawn.iter().flat_map(|(_, pictures)| pictures) {
            let file = directory.join(format!("{}.svg", picture.name));
            let svg = if picture.svg.contains("<style>") {
                picture.svg.clone()
            } else {
                standalone(&picture.svg, &picture.title, &picture.caption)
            };
            output::write_file(&file, &svg)?;
        }
    }
    if let Some(file) = &arguments.html {
        output::write_file(file, &page::page(&drawn)?)?;
    }
    if let Some(error @ LabError::Interrupted) = failed {
        return Err(error.into());
    }
    Ok(exit_code(
        failed.is_some() || !experiments.iter().all(Experiment::reproduced),
    ))
}

fn show(experiment: &Experiment, first: bool) -> io::Result<()> {
    let mut out = io::stdout();
    if !first {
        writeln!(out)?;
    }
    let text = terminal(&Report::from(experiment), Style::of_stdout());
    write!(out, "{text}")?;
    out.flush()
}

/// Returns bars, curves, and pictures of the doctor's recordings.
fn pictures(experiment: &Experiment, recordings: &Path) -> anyhow::Result<Vec<Picture>> {
    let source = experiment.source;
    let mut pictures = vec![Picture {
        name: source.to_string(),
        title: "Measured".to_owned(),
        caption: "Medians over the rounds; whiskers are the smallest and the largest.".to_owned(),
        svg: svg(&Report::from(experiment)),
    }];
    let drawn = |name: &str, title: &str, svg| Picture {
        name: name.to_owned(),
        title: title.to_owned(),
        caption: String::new(),
        svg,
    };
    let curves = experiment.curves.iter();
    pictures.extend(curves.map(|of| drawn(&of.name, &of.title, curves::draw(of))));
    let bars = experiment.bars.iter();
    pictures.extend(bars.map(|of| drawn(&of.name, &of.title, bars::draw(of))));
    pictures.extend(experiment.surfaces.iter().map(|of| Picture {
        caption: "What bulk gets and what a flow of small datagrams beside it waits for; framed: the most throughput for the \
                  shortest wait."
            .to_owned(),
        ..drawn(&of.name, &of.title, surface::draw(of))
    }));
    for look in &experiment.looks {
        let file = look.recording.as_ref().map(|file| recordings.join(file));
        let Some(file) = file.filter(|file| file.exists()) else {
            continue;
        };
        let stem = file.with_extension("");
        let mut report = program::seikan_command()?;
        report.arg("report").arg(&file).arg("--svg").arg(&stem);
        let capture = file.with_extension("pcap");
        if capture.exists() {
            report.arg("--pcap").arg(capture);
        }
        let printed = report.output().context("cannot run seikan report")?;
        if !printed.status.success() {
            anyhow::bail!(
                "seikan report: {}",
                String::from_utf8_lossy(&printed.stderr)
            );
        }
        for name in PICTURES {
            // A recording may lack the data for a picture.
            let Ok(svg) = std::fs::read_to_string(stem.join(format!("{name}.svg"))) else {
                continue;
            };
            let [title, caption] = title_and_description(&svg).unwrap_or_default();
            let stem = stem.file_name().unwrap_or_default().to_string_lossy();
            pictures.push(Picture {
                name: format!("{stem}-{name}"),
                title: format!("{}: {title}", look.of),
                caption,
                svg,
            });
        }
    }
    Ok(pictures)
}

/// Draws names with samples before them, in as many rows as needed; returns where a frame begins
/// below them.
fn legend<'a>(
    svg: &mut Svg,
    names: impl Iterator<Item = &'a String>,
    sample_width: f64,
    sample: impl Fn(&mut Svg, usize, (f64, f64)),
) -> f64 {
    let (mut x, mut y) = (0.0, 14.0);
    for (number, name) in names.enumerate() {
        let before = sample_width + 6.0;
        let wide = before + width(name, SIZE) + 16.0;
        if x > 0.0 && x + wide > WIDTH {
            (x, y) = (0.0, y + LEGEND_ROW);
        }
        sample(svg, number, (x, y));
        svg.text((x + before, y), Anchor::Start, FAINT, name);
        x += wide;
    }
    y + 36.0
}

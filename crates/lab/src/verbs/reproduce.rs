//! `seikan lab reproduce`: published experiments on slow tunnels, repeated, as tables, pictures and
//! one page.

mod bars;
mod curves;
mod page;
mod surface;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueEnum, ValueHint};
use seikan_lab::report::{Report, svg, terminal};
use seikan_lab::reproduce::Source;
use seikan_lab::{Experiment, LabError, ReproduceOptions, program, reproduce};
use seikan_ui::screen::Style;
use seikan_ui::svg::{standalone, title_and_description};
use seikan_ui::{Interrupt, ProgressBar, output};

use super::{exit_code, write_json};

/// Pictures of a recording that sources had as well: the time-sequence graph, from readings of the
/// kernel's state and from a capture, and softirqs by processor.
const PICTURES: [&str; 3] = ["sequence", "segments", "softirq"];

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
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Write each picture as an SVG file into this directory
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub svg: Option<PathBuf>,
}

/// Which source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SourceName {
    /// A tunnel with a queue of three packets
    Queue,
    /// A gateway that encapsulates merged packets
    Offload,
    /// Many frames per system call
    Batch,
    /// Guests behind a virtual switch, some of them busy
    Profile,
    /// The MTU of a tunnel and its cipher
    MtuCipher,
    /// All of them
    All,
}

impl SourceName {
    fn sources(self) -> Vec<Source> {
        match self {
            Self::Queue => vec![Source::Queue],
            Self::Offload => vec![Source::Offload],
            Self::Batch => vec![Source::Batch],
            Self::Profile => vec![Source::Profile],
            Self::MtuCipher => vec![Source::MtuCipher],
            Self::All => Source::ALL.to_vec(),
        }
    }
}

/// A picture of an experiment.
struct Picture {
    /// In names of files.
    name: String,
    title: String,
    caption: String,
    svg: String,
}

/// Runs, shows, writes. The exit status is 1 where something did not come out as it was published.
pub fn run(arguments: &ReproduceArguments) -> anyhow::Result<ExitCode> {
    let mut sources: Vec<Source> = Vec::new();
    for source in arguments.sources.iter().flat_map(|name| name.sources()) {
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    let kept = seikan_lab::cleanup::private_directory()?;
    let options = ReproduceOptions {
        recordings: Some(kept.path().to_owned()),
        ..arguments.options.clone()
    };
    // Known before anything is measured, rather than after half an hour.
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
        // After each: they take long, and something may end the next one.
        write_json(arguments.json.as_deref(), &experiments)?;
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
        name: source.name().to_owned(),
        title: "Measured".to_owned(),
        caption: "Medians over the rounds; whiskers are the smallest and the largest.".to_owned(),
        svg: svg(&Report::from(experiment)),
    }];
    pictures.extend(experiment.curves.iter().map(|curves| Picture {
        name: curves.name.clone(),
        title: curves.title.clone(),
        caption: String::new(),
        svg: curves::draw(curves),
    }));
    pictures.extend(experiment.bars.iter().map(|bars| Picture {
        name: bars.name.clone(),
        title: bars.title.clone(),
        caption: String::new(),
        svg: bars::draw(bars),
    }));
    pictures.extend(experiment.surfaces.iter().map(|surface| Picture {
        name: surface.name.clone(),
        title: surface.title.clone(),
        caption: "What bulk gets and what a flow of small datagrams beside it waits for; framed: the most throughput for the \
                  shortest wait."
            .to_owned(),
        svg: surface::draw(surface),
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

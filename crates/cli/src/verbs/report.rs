//! `seikan report`: draws a recording as one page with pictures, or as separate pictures.
//!
//! A module of its own draws each picture from a [`Scene`]: [`timeline`], [`sequence`],
//! [`segments`], [`cdf`], [`softirq`], [`functions`], [`flame`], [`queues`], [`correlation`],
//! [`trial`]. [`trace`] computes quantities over time from columns. [`suspects`] selects counters
//! that indicate causes. [`seikan_ui::axis`] and [`seikan_ui::svg`] draw, and [`mod@page`]
//! assembles the page.

mod capture;
mod cdf;
mod correlation;
mod flame;
mod functions;
mod page;
mod queues;
mod segments;
mod sequence;
mod softirq;
mod suspects;
mod timeline;
mod trace;
mod trial;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_diagnose::{Recording, Verdict};

use capture::Capture;

use seikan_ui::svg;

use crate::screen::printable;
use crate::verbs::doctor::verdict;
use crate::verbs::lab;

/// Options of `report`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan doctor --record slow.parquet    measure a tunnel, and record it\n  \
    sudo seikan report slow.parquet             draw it: slow.html\n  \
    sudo seikan report slow.parquet --html /tmp/a.html --pcap headers.pcap\n  \
    sudo seikan report slow.parquet --png pictures    write separate pictures\n\n\
    The page is self-contained and has no JavaScript. Of a capture only headers are read; the first 96 bytes of \
    each packet are enough (tcpdump -s 96 -w headers.pcap). Like the recording, the page contains addresses and \
    names of interfaces, programs and functions.")]
pub struct Arguments {
    /// The recording
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    /// Output file of the page [default: FILE with the extension .html, unless --svg or --png is
    /// given]
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
    /// Write each picture as an SVG file into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    svg: Option<PathBuf>,
    /// Write each picture as a PNG file into this directory; needs seikan-lab, and a font on this machine
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    png: Option<PathBuf>,
    /// Also draw the largest TCP connection of this capture (pcap or pcapng)
    #[arg(long, value_name = "CAPTURE", value_hint = ValueHint::FilePath)]
    pcap: Option<PathBuf>,
}

/// Input of the pictures.
pub struct Scene<'a> {
    recording: &'a Recording,
    verdict: &'a Verdict,
    capture: Option<&'a Capture>,
}

/// A drawing.
pub struct Drawing {
    svg: String,
    /// Explanation of the drawing.
    caption: String,
}

/// A picture with its name and title.
pub struct Picture {
    /// Base name of its file.
    name: &'static str,
    title: &'static str,
    caption: String,
    svg: String,
}

/// Title of a picture that could not be drawn, and the reason.
pub type Absent = (&'static str, String);

/// Draws a picture; the error is the reason why it cannot.
type Draw = fn(&Scene<'_>) -> Result<Drawing, String>;

/// The pictures in their order: name, title, function.
const PICTURES: [(&str, &str, Draw); 10] = [
    (
        "timeline",
        "Throughput and related counters",
        timeline::draw,
    ),
    ("sequence", "TCP time-sequence graph", sequence::draw),
    ("segments", "TCP segments of the capture", segments::draw),
    ("distribution", "Distribution of throughput", cdf::draw),
    ("softirq", "Softirqs by processor", softirq::draw),
    ("functions", "Processor time by function", functions::draw),
    ("flame", "Flame graph", flame::draw),
    ("queues", "Queues", queues::draw),
    ("correlation", "Correlation by lag", correlation::draw),
    ("trial", "Throughput without and with a change", trial::draw),
];

/// Draws the pictures and writes the files.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let recording = crate::recording::read(&arguments.file)?;
    let page_file = page_file(arguments)?;
    let capture = arguments.pcap.as_deref().map(capture::read).transpose()?;
    let verdict = verdict(&recording, None);
    let scene = Scene {
        recording: &recording,
        verdict: &verdict,
        capture: capture.as_ref(),
    };
    let (pictures, absent) = pictures(&scene);
    let mut written = Vec::new();
    if let Some(file) = page_file {
        let page = page::page(&recording, &verdict, &pictures, &absent)?;
        write(&file, page.as_bytes())?;
        written.push(file);
    }
    if let Some(directory) = &arguments.svg {
        for picture in &pictures {
            let svg = svg::standalone(&picture.svg, picture.title, &picture.caption);
            written.push(into(directory, picture.name, "svg", svg.as_bytes())?);
        }
    }
    if let Some(directory) = &arguments.png {
        for picture in &pictures {
            let png = lab::png(&picture.svg)?;
            written.push(into(directory, picture.name, "png", &png)?);
        }
    }
    let mut out = std::io::stdout();
    for file in &written {
        writeln!(out, "{}", file.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn pictures(scene: &Scene<'_>) -> (Vec<Picture>, Vec<Absent>) {
    let (mut pictures, mut absent) = (Vec::new(), Vec::new());
    for (name, title, draw) in PICTURES {
        match draw(scene) {
            Ok(Drawing { svg, caption }) => pictures.push(Picture {
                name,
                title,
                caption: printable(&caption),
                svg,
            }),
            Err(why) => absent.push((title, printable(&why))),
        }
    }
    (pictures, absent)
}

/// Returns the output file of the page, if one is requested.
fn page_file(arguments: &Arguments) -> anyhow::Result<Option<PathBuf>> {
    let file = match &arguments.html {
        Some(file) => file.clone(),
        None if arguments.svg.is_some() || arguments.png.is_some() => return Ok(None),
        None => arguments.file.with_extension("html"),
    };
    if file == arguments.file {
        bail!(
            "cannot write the page to {}: it is the recording; name another file with --html",
            file.display()
        );
    }
    Ok(Some(file))
}

/// Writes a picture into a directory, which is created if necessary.
fn into(directory: &Path, name: &str, ending: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create the directory {}", directory.display()))?;
    let file = directory.join(format!("{name}.{ending}"));
    write(&file, bytes)?;
    Ok(file)
}

/// Writes to a temporary file and renames it, so that no incomplete file appears.
fn write(file: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let context = || format!("cannot write {}", file.display());
    let directory = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // For the owner only, as the recording is, whose content it shows.
    let mut temporary = tempfile::Builder::new()
        .prefix(".seikan-report-")
        .tempfile_in(directory)
        .with_context(context)?;
    temporary.write_all(bytes).with_context(context)?;
    temporary.persist(file).with_context(context)?;
    Ok(())
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

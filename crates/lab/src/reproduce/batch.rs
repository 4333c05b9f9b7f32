//! N frames for each crossing between kernel and program, instead of one.
//!
//! The source changed the driver of the kernel so that one read returns several packets. Linux has
//! since learned to hand a TUN device's program one super-packet for many segments of a TCP stream.
//! The number of segments is a setting of the interface (`gso_max_segs`), so N can be chosen. The
//! load is the source's: `ab` requests a page of 5 MB from a web server repeatedly over eight
//! connections that are kept. [`surface`] answers questions that the source leaves open.

use std::sync::Arc;

use seikan_diagnose::Cause;
use seikan_load::LiveOptions;

use super::crossings::{self, Crossings, Through};
use super::forwarding::limit_frames;
use super::look::Looker;
use super::pages::{CONNECTIONS, REQUESTS, page_seconds, request_repeatedly, web_server};
use super::{
    Bench, Curve, Curves, Experiment, Figures, Row, delay, forwarding, limit, null, plain, surface,
    titled,
};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::tunnel::{Running, Tunnel};

/// Frames for each crossing.
const SIZES: [u32; 5] = [1, 2, 4, 16, 64];
/// Frames for each crossing over a rate-limited link, and without a cipher.
const FEW: [u32; 3] = [1, 4, 64];
/// Buffer of the source: four packets of 1,500 bytes.
const PUBLISHED_SIZE: u32 = 4;
const BARE: &str = "no tunnel";
const CRUDE: &str = "crude, 1 frame";
const SEIKAN: &str = "Seikan, ";
const NULL: &str = "Seikan without a cipher, ";
pub(super) const ONE: &str = "Seikan, 1 frame";
/// Published rates in KB/s: bare forwarding, the original driver, the changed driver.
const PUBLISHED: [f64; 3] = [114_089.42, 102_512.37, 111_139.88];

pub(super) fn run(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    if null::program().is_none() {
        found.notes.push(null::missing());
    }
    for rate in bench.rates() {
        if let Some(rate) = rate {
            found.attempt(|found| limit::check(bench, rate, found))?;
        }
        for part in [pages, forwarding::rows, delay::rows] {
            found.attempt(|found| part(bench, rate, found))?;
        }
    }
    found.attempt_all(bench, &[surface::surface, diagnosis])
}

pub(super) fn frames_in_words(size: u32) -> String {
    match size {
        1 => "1 frame".to_owned(),
        more => format!("{more} frames"),
    }
}

/// Returns the name of a row: Seikan, or Seikan without a cipher, with `size` frames for each
/// crossing.
fn batched(kind: &str, size: u32) -> String {
    format!("{kind}{}", frames_in_words(size))
}

/// Returns the frames for each crossing of a row; `None` for a row without a limit.
fn size_of(name: &str) -> Option<u32> {
    let words = name.strip_prefix(NULL).or(name.strip_prefix(SEIKAN))?;
    words.split(' ').next()?.parse().ok()
}

/// Returns the names of the rows over a link of this rate in bit/s.
fn names(rate: Option<u64>) -> Vec<String> {
    let limited = rate.is_some();
    let sizes = if limited { &FEW[..] } else { &SIZES };
    let mut names = vec![BARE.to_owned(), CRUDE.to_owned()];
    names.extend(sizes.iter().map(|size| batched(SEIKAN, *size)));
    if !limited && null::program().is_some() {
        names.extend(FEW.map(|size| batched(NULL, size)));
    }
    names
}

/// Measures every row by the output of `ab`, over a link of this rate in bit/s.
fn pages(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<()> {
    let names = names(rate);
    let measured = bench.rounds(
        &names,
        |name| name,
        found,
        |bench, name| {
            let mut running = bench.start_over(&tunnel_of(name)?, bench.link(rate))?;
            if let Some(size) = size_of(name) {
                frames(&running, size)?;
            }
            request(bench, &mut running)
        },
    )?;
    let there = |name: &str| match name {
        BARE => Some(PUBLISHED[0]),
        CRUDE => Some(PUBLISHED[1]),
        name if name == batched(SEIKAN, PUBLISHED_SIZE) => Some(PUBLISHED[2]),
        _ => None,
    };
    let title = format!(
        "a page of 5 MB, {REQUESTS} times or for {} s over {CONNECTIONS} connections",
        page_seconds(bench.options)
    );
    let row = |name: &String| Row::new(name, there(name)).own(name.starts_with("Seikan"));
    let rows = measured.rows(row, |(pages, _)| Some(*pages));
    let figures = Figures::new(titled(&title, rate), "KB/s", rows);
    let title = titled("system calls of the tunnels for the pages", rate);
    found.lists.push(crossings::list(title, &measured));
    let (few, many) = (batched(SEIKAN, PUBLISHED_SIZE), batched(SEIKAN, 64));
    found.claims.push(figures.claim(&few, CRUDE));
    if rate.is_none() {
        found.claims.push(figures.claim(&few, ONE));
        found.claims.push(figures.claim(&many, &few));
        found.curves.push(curves(&figures));
    }
    found.figures.push(figures);
    Ok(())
}

/// Requests the page, and counts the calls of the tunnel's programs meanwhile, if there are any.
fn request(bench: &Bench<'_>, running: &mut Running) -> Result<(f64, Option<Crossings>)> {
    let dir = private_directory()?;
    // Pages come from B.
    let [a, b] = running.hosts.both();
    let devices = [a, b].map(|host| running.device(host));
    let server = web_server(b, dir.path())?;
    let through = Through {
        read: (b, &devices[1]),
        written: (a, &devices[0]),
        programs: &running.started.processes,
    };
    let loaded = through.counting(|| request_repeatedly(bench, &running.ends(), server))?;
    running.check_alive()?;
    Ok(loaded)
}

/// KB/s over the number of frames, with and without a cipher.
fn curves(figures: &Figures) -> Curves {
    let line = |kind: &str| {
        let rows = figures.rows.iter().filter(|row| row.name.starts_with(kind));
        let point = |row: &Row| Some([f64::from(size_of(&row.name)?), row.median()? / 1e3]);
        Curve::new(kind.trim_end_matches(", "), rows.filter_map(point)).own(true)
    };
    let lines = [SEIKAN, NULL].map(line).into_iter();
    let lines = lines.filter(|line| line.points.len() > 1);
    let axes = ["frames for each crossing, at most", "thousands of KB/s"];
    Curves::new("batch-frames", "a page again and again", axes, lines).logarithmic([true; 2])
}

/// Diagnoses one frame for each crossing.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    bench.step("the doctor on one frame for each crossing")?;
    let running = bench.start("crude", None)?;
    let host = &running.hosts.a;
    let pages = found.figures.first();
    let best = pages.and_then(|pages| pages.median(&batched(SEIKAN, 64)));
    let looker = Looker {
        // KB/s of 1,024 bytes as Mbit/s.
        expected: best.map(|best| best * 8.192e-3),
        ..Looker::at(CRUDE, &running, host, Cause::FramePerSyscall)
    };
    let load = LiveOptions {
        streams: CONNECTIONS as usize,
        ..LiveOptions::default()
    };
    looker.note(&load, &running, bench.desk, found)
}

pub(super) fn tunnel_of(row: &str) -> Result<Arc<dyn Tunnel>> {
    match row {
        BARE => plain("raw"),
        CRUDE => plain("crude"),
        row if row.starts_with(NULL) => null::tunnel(),
        _ => plain("seikan-native"),
    }
}

/// Limits super-packets of the tunnel's interfaces to `size` frames; 1 disables them.
pub(super) fn frames(running: &Running, size: u32) -> Result<()> {
    let mut hosts = running.hosts.both().into_iter();
    hosts.try_for_each(|host| limit_frames(host, &running.device(host), size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_say_how_many_frames_they_have() {
        assert_eq!(size_of(&batched(SEIKAN, 64)), Some(64));
        assert_eq!(size_of(&batched(NULL, 1)), Some(1));
        assert_eq!([BARE, CRUDE].map(size_of), [None; 2]);
        assert_eq!(batched(SEIKAN, 1), ONE);
    }
}

//! N frames for each crossing between kernel and program, instead of one.
//!
//! The source changed the driver of the kernel so that one read returns several packets. Linux has
//! since learned to hand a TUN device's program one super-packet for many segments of a TCP stream.
//! The number of segments is a setting of the interface (`gso_max_segs`), so N can be chosen. The
//! load is the source's: `ab` requests a page of 5 MB from a web server repeatedly over eight
//! connections that are kept. [`surface`] answers questions that the source leaves open.

use seikan_diagnose::Cause;
use seikan_load::LiveOptions;
use seikan_sys::ethtool::Feature;

use super::crossings::{self, Crossings, Through};
use super::figures::interleaved;
use super::look::Looker;
use super::pages::{CONNECTIONS, REQUESTS, page_seconds, request_repeatedly, web_server};
use super::{
    Bench, Curve, Curves, Figures, Found, Row, delay, forwarding, limit, null, plain, set_link,
    surface, titled,
};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::host::Host;
use crate::tunnel::{self, Running, Tunnel, inner_device};

/// Frames for each crossing.
const SIZES: [u32; 5] = [1, 2, 4, 16, 64];
/// Those over a link with a limit, and those without a cipher.
const FEW: [u32; 3] = [1, 4, 64];
/// Buffer of the source: four packets of 1,500 bytes.
const PUBLISHED_SIZE: u32 = 4;
const BARE: &str = "no tunnel";
const CRUDE: &str = "crude, 1 frame";
const SEIKAN: &str = "Seikan, ";
const NULL: &str = "Seikan without a cipher, ";
pub(super) const ONE: &str = "Seikan, 1 frame";
/// Published, in KB/s: bare forwarding, the driver as it is, the driver changed.
const PUBLISHED: [f64; 3] = [114_089.42, 102_512.37, 111_139.88];

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    let rows = bench.rates().map(|rate| {
        let checks = rate.map_or(0, |_| limit::STEPS);
        checks + names(rate).len() + forwarding::row_count(rate) + delay::row_count(rate)
    });
    let rows: usize = rows.iter().sum();
    bench.expect(rows * rounds + surface::POINTS + 1);
    let mut found = Found::default();
    if null::program().is_none() {
        found.notes.push(null::missing());
    }
    for rate in bench.rates() {
        if let Some(rate) = rate {
            let done = limit::check(bench, rate, &mut found);
            found.note_failure(done)?;
        }
        for part in [pages, forwarding::rows, delay::rows] {
            let done = part(bench, rate, &mut found);
            found.note_failure(done)?;
        }
    }
    for part in [surface::surface, diagnosis] {
        let done = part(bench, &mut found);
        found.note_failure(done)?;
    }
    Ok(found)
}

pub(super) fn frames_in_words(size: u32) -> String {
    match size {
        1 => "1 frame".to_owned(),
        more => format!("{more} frames"),
    }
}

/// Name of a row of Seikan, or of Seikan without a cipher.
fn batched(kind: &str, size: u32) -> String {
    format!("{kind}{}", frames_in_words(size))
}

/// Frames for each crossing of a row; none where nothing is limited.
fn size_of(name: &str) -> Option<u32> {
    let words = name.strip_prefix(NULL).or(name.strip_prefix(SEIKAN))?;
    words.split(' ').next()?.parse().ok()
}

/// Names of the rows over a link of this rate.
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

/// Reads the output of `ab` for every row, over a link of this rate.
fn pages(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let names = names(rate);
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let tunnel = tunnel_of(name)?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        if let Some(size) = size_of(name) {
            for host in [&running.hosts.a, &running.hosts.b] {
                frames(host, tunnel.name(), size)?;
            }
        }
        request(bench, tunnel.as_ref(), &mut running)
    })?;
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
    let figures = Figures {
        title: titled(&title, rate),
        unit: "KB/s".to_owned(),
        base: BARE.to_owned(),
        rows: names
            .iter()
            .zip(&measured)
            .map(|(name, rounds)| Row {
                own: name.starts_with("Seikan"),
                rounds: rounds.iter().map(|r| r.as_ref().map(|r| r.0)).collect(),
                ..Row::new(name, there(name))
            })
            .collect(),
    };
    let crossed: Vec<Vec<Option<Crossings>>> = measured
        .into_iter()
        .map(|rounds| rounds.into_iter().map(|round| round?.1).collect())
        .collect();
    let title = titled("system calls of the tunnels for the pages", rate);
    found.lists.push(crossings::list(title, &names, &crossed));
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

/// Requests the page, and counts what the programs do meanwhile, if there are any.
fn request(
    bench: &Bench<'_>,
    tunnel: &dyn Tunnel,
    running: &mut Running,
) -> Result<(f64, Option<Crossings>)> {
    let dir = private_directory()?;
    let (hosts, started) = running.parts();
    let server = web_server(&hosts.b, dir.path())?;
    let ends = tunnel.ends(hosts);
    let seconds = page_seconds(bench.options);
    let load = || request_repeatedly(&ends, server, seconds, bench.interrupt);
    if started.processes.0.is_empty() {
        return Ok((load()?, None));
    }
    // Pages come from B.
    let devices = [&hosts.a, &hosts.b].map(|host| inner_device(tunnel.name(), host));
    let through = Through {
        read: (&hosts.b, &devices[1]),
        written: (&hosts.a, &devices[0]),
        programs: &started.processes.0,
    };
    let (pages, crossings) = through.counting(load)?;
    started.check_alive()?;
    Ok((pages, Some(crossings)))
}

/// KB/s over the number of frames, with and without a cipher.
fn curves(figures: &Figures) -> Curves {
    let line = |kind: &str| Curve {
        name: kind.trim_end_matches(", ").to_owned(),
        own: true,
        published: false,
        points: figures
            .rows
            .iter()
            .filter(|row| row.name.starts_with(kind))
            .filter_map(|row| Some([f64::from(size_of(&row.name)?), row.spread()?.median / 1e3]))
            .collect(),
    };
    let lines = [SEIKAN, NULL].map(line).into_iter();
    Curves {
        name: "batch-frames".to_owned(),
        title: "a page again and again".to_owned(),
        x: "frames for each crossing, at most".to_owned(),
        y: "thousands of KB/s".to_owned(),
        logarithmic: [true, true],
        curves: lines.filter(|line| line.points.len() > 1).collect(),
    }
}

/// Diagnoses one frame for each crossing.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    bench.step("the doctor on one frame for each crossing")?;
    let tunnel = tunnel_of(CRUDE)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let host = &running.hosts.a;
    let pages = found.figures.first();
    let best = pages.and_then(|pages| pages.row(&batched(SEIKAN, 64))?.spread());
    let interface = inner_device(tunnel.name(), host);
    let looker = Looker {
        // KB/s of 1,024 bytes as Mbit/s.
        expected: best.map_or(1e3, |best| best.median * 8.192e-3),
        right: &[Cause::FramePerSyscall],
        ..Looker::new(CRUDE, host, &interface)
    };
    let load = LiveOptions {
        streams: CONNECTIONS as usize,
        ..LiveOptions::default()
    };
    let ends = tunnel.ends(&running.hosts);
    let verdict = looker.look_under(&load, &ends, bench.desk(), |_| Vec::new())?;
    found.looks.push(verdict);
    Ok(())
}

pub(super) fn tunnel_of(row: &str) -> Result<Box<dyn Tunnel>> {
    match row {
        BARE => plain("raw"),
        CRUDE => plain("crude"),
        row if row.starts_with(NULL) => null::tunnel(),
        _ => plain("seikan-native"),
    }
}

/// So many frames at most make a super-packet of the tunnel's interface; with one, there are none.
pub(super) fn frames(host: &Host, tunnel: &str, size: u32) -> Result<()> {
    let device = inner_device(tunnel, host);
    host.set_features(&device, &[(Feature::Tso, size > 1)])?;
    set_link(host, tunnel, &format!("gso_max_segs {size}"))
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

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

use super::figures::interleaved;
use super::look::Looker;
use super::pages::{CONNECTIONS, REQUESTS, SECONDS, request_repeatedly, web_server};
use super::{
    Bench, Curve, Curves, Figures, Found, Row, forwarding, plain, set_link, surface, titled,
};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::host::Host;
use crate::tunnel::{self, Tunnel, inner_device};

/// Frames for each crossing.
const SIZES: [u32; 6] = [2, 4, 8, 16, 32, 64];
/// Buffer of the source: four packets of 1,500 bytes.
const PUBLISHED_SIZE: u32 = 4;
const BARE: &str = "no tunnel";
const CRUDE: &str = "crude, 1 frame";
pub(super) const ONE: &str = "Seikan, 1 frame";
/// Published, in KB/s: bare forwarding, the driver as it is, the driver changed.
const PUBLISHED: [f64; 3] = [114_089.42, 102_512.37, 111_139.88];

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    let rows = bench
        .rates()
        .map(|rate| sizes(rate).len() + 3 + forwarding::ROWS);
    let rows: usize = rows.iter().sum();
    bench.expect(rows * rounds + surface::POINTS + 1);
    let mut found = Found::default();
    for rate in bench.rates() {
        for part in [pages, forwarding::rows] {
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

fn batched(size: u32) -> String {
    format!("Seikan, {}", frames_in_words(size))
}

/// Frames for each crossing that are measured over a link of this rate.
fn sizes(rate: Option<u64>) -> &'static [u32] {
    if rate.is_some() {
        &[PUBLISHED_SIZE, SIZES[5]]
    } else {
        &SIZES
    }
}

/// Reads the output of `ab` for every row, over a link of this rate.
fn pages(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let mut names = vec![BARE.to_owned(), CRUDE.to_owned(), ONE.to_owned()];
    names.extend(sizes(rate).iter().copied().map(batched));
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let tunnel = tunnel_of(name)?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        let size = SIZES.into_iter().find(|size| batched(*size) == name);
        if name == ONE || size.is_some() {
            let host_b = &running.hosts.b;
            for host in [&running.hosts.a, host_b] {
                frames(host, tunnel.name(), size.unwrap_or(1))?;
            }
        }
        let dir = private_directory()?;
        let ends = tunnel.ends(&running.hosts);
        let server = web_server(&running.hosts.b, dir.path())?;
        let pages = request_repeatedly(&ends, server, bench.interrupt)?;
        running.check_alive()?;
        Ok(pages)
    })?;
    let there = |name: &str| match name {
        BARE => Some(PUBLISHED[0]),
        CRUDE => Some(PUBLISHED[1]),
        name if name == batched(PUBLISHED_SIZE) => Some(PUBLISHED[2]),
        _ => None,
    };
    let rows = names.iter().zip(measured);
    let title = format!(
        "a page of 5 MB, {REQUESTS} times or for {SECONDS} s over {CONNECTIONS} connections"
    );
    let figures = Figures {
        title: titled(&title, rate),
        unit: "KB/s".to_owned(),
        base: BARE.to_owned(),
        rows: rows
            .map(|(name, rounds)| Row {
                own: name.starts_with("Seikan"),
                rounds,
                ..Row::new(name, there(name))
            })
            .collect(),
    };
    let (few, many) = (batched(PUBLISHED_SIZE), batched(SIZES[5]));
    found.claims.push(figures.claim(&few, CRUDE));
    if rate.is_some() {
        found.figures.push(figures);
        return Ok(());
    }
    found.claims.push(figures.claim(&few, ONE));
    found.claims.push(figures.claim(&many, &few));
    let points = figures.rows.iter().filter_map(|row| {
        let size = SIZES.into_iter().find(|size| batched(*size) == row.name);
        let size = size.or((row.name == ONE).then_some(1))?;
        Some([f64::from(size), row.spread()?.median / 1e3])
    });
    found.curves.push(Curves {
        name: "batch-frames".to_owned(),
        title: "a page again and again".to_owned(),
        x: "frames for each crossing, at most".to_owned(),
        y: "thousands of KB/s".to_owned(),
        logarithmic: [true, true],
        curves: vec![Curve {
            name: "Seikan".to_owned(),
            own: true,
            published: false,
            points: points.collect(),
        }],
    });
    found.figures.push(figures);
    Ok(())
}

/// Diagnoses one frame for each crossing.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    bench.step("the doctor on one frame for each crossing")?;
    let tunnel = tunnel_of(CRUDE)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let host = &running.hosts.a;
    let rows = found
        .figures
        .first()
        .map_or(&[][..], |figures| &figures.rows);
    let best = rows.last().and_then(Row::spread);
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
    let name = match row {
        BARE => "raw",
        CRUDE => "crude",
        _ => "seikan-native",
    };
    plain(name)
}

/// So many frames at most make a super-packet of the tunnel's interface; with one, there are none.
pub(super) fn frames(host: &Host, tunnel: &str, size: u32) -> Result<()> {
    let device = inner_device(tunnel, host);
    host.set_features(&device, &[(Feature::Tso, size > 1)])?;
    set_link(host, tunnel, &format!("gso_max_segs {size}"))
}

//! The tunnel's MTU and its cipher: OpenVPN with each cipher over MTUs of 1,500 to 60,000 bytes,
//! Seikan with both of its ciphers, and the link without a tunnel, with fewer offloads.
//!
//! A tunnel starts once a round for each cipher, and the MTU of its interface changes at both ends
//! while it runs. OpenVPN is configured with the largest one, so that its buffers fit every size.

use std::path::PathBuf;
use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::{Direction, LiveOptions, TcpOptions, tcp_bulk};
use seikan_sys::ethtool::Feature;

use super::figures::interleaved;
use super::look::Looker;
use super::{
    Bench, Curve, Curves, Figures, Found, GIGABIT, Grid, Row, library, plain, set_link, titled,
};
use crate::error::{LabError, Result};
use crate::link::Hosts;
use crate::scenario::lookup;
use crate::tunnel::seikan::Seikan;
use crate::tunnel::{self, Changes, Tunnel, inner_device};

/// MTUs inside the tunnel, in bytes.
const MTUS: [u32; 8] = [1_500, 6_000, 9_000, 12_000, 24_000, 36_000, 48_000, 60_000];
/// Places in [`MTUS`].
const SMALL: usize = 1;
const MIDDLE: usize = 2;
const LARGE: usize = 6;

/// A cipher of OpenVPN: its name here, OpenVPN's options for it, and the published figures for each
/// of [`MTUS`], in Mbit/s.
type Cipher = (&'static str, &'static [&'static str], [Option<f64>; 8]);

const NONE: &str = "none";
const SHORT_KEY: &str = "AES-128-CBC";
const CBC: &str = "AES-256-CBC";
const BLOWFISH: &str = "BF-CBC";
const NO_AES: &str = "AES-256-CBC, no AES-NI";
/// OpenSSL without any extension of the instruction set: a library as slow as they were.
const SLOW_CBC: &str = "AES-256-CBC, slow library";
const SLOW_BLOWFISH: &str = "BF-CBC, slow library";
const CBC_OPTIONS: &[&str] = &["--cipher", CBC, "--data-ciphers", CBC];
const BLOWFISH_OPTIONS: &[&str] = &[
    "--providers",
    "legacy",
    "default",
    "--cipher",
    BLOWFISH,
    "--data-ciphers",
    BLOWFISH,
];
const CIPHERS: [Cipher; 9] = [
    (
        NONE,
        &["--cipher", NONE, "--data-ciphers", NONE, "--auth", NONE],
        [None; 8],
    ),
    (
        SHORT_KEY,
        &["--cipher", SHORT_KEY, "--data-ciphers", SHORT_KEY],
        [None; 8],
    ),
    (
        CBC,
        CBC_OPTIONS,
        from_6000([407.0, 410.0, 478.0, 540.0, 561.0, 585.0, 582.0]),
    ),
    ("AES-256-GCM", &[], [None; 8]),
    (
        "ChaCha20-Poly1305",
        &[
            "--cipher",
            "CHACHA20-POLY1305",
            "--data-ciphers",
            "CHACHA20-POLY1305",
        ],
        [None; 8],
    ),
    (
        BLOWFISH,
        BLOWFISH_OPTIONS,
        from_6000([310.0, 385.0, 417.0, 470.0, 510.0, 500.0, 500.0]),
    ),
    (NO_AES, CBC_OPTIONS, [None; 8]),
    (SLOW_CBC, CBC_OPTIONS, [None; 8]),
    (SLOW_BLOWFISH, BLOWFISH_OPTIONS, [None; 8]),
];
/// Ours, and what its configuration says. No release build knows the last one.
const OWN: [(&str, &str); 3] = [
    (OWN_AES, "aes-256-gcm"),
    ("Seikan, ChaCha20-Poly1305", "chacha20-poly1305"),
    (OWN_NONE, "null"),
];
const OWN_NONE: &str = "Seikan, none";
/// Where the program is that knows it, as `make reproduce` builds it.
const NULL_PROGRAM: &str = "SEIKAN_NULL_BIN";
const OWN_AES: &str = "Seikan, AES-256-GCM";

/// A setup without a tunnel: its name, features of the NICs, the published figure in Mbit/s.
type Bare = (&'static str, &'static [(Feature, bool)], Option<f64>);
/// The link without a tunnel, and the published figures for 10 Gbit/s, in Mbit/s.
const RAW: [Bare; 3] = [
    ("no tunnel", &[], Some(8_800.0)),
    (
        "no tunnel, no checksum offload",
        &[(Feature::TxChecksum, false)],
        Some(3_800.0),
    ),
    (
        "no tunnel, no offload",
        &[
            (Feature::Tso, false),
            (Feature::Gso, false),
            (Feature::Gro, false),
            (Feature::TxChecksum, false),
        ],
        None,
    ),
];
/// OpenVPN without a cipher on 10 Gbit/s: place in [`MTUS`], row, published in Mbit/s.
const PLAIN: [(usize, &str, f64); 3] = [
    (7, "OpenVPN, no cipher, MTU 60000", 3_600.0),
    (LARGE, "OpenVPN, no cipher, MTU 48000", 2_400.0),
    (MIDDLE, "OpenVPN, no cipher, MTU 9000", 1_300.0),
];

/// OpenVPN at an MTU of 9,000: cipher, direction, published in Mbit/s. One of the source's machines
/// was slower; here host B has no AES instructions, which slows it in both directions.
const SETUPS: [(&str, Direction, f64); 5] = [
    (NONE, Direction::Forward, 930.0),
    (SHORT_KEY, Direction::Forward, 885.0),
    (CBC, Direction::Forward, 878.0),
    (SHORT_KEY, Direction::Reverse, 748.0),
    (CBC, Direction::Reverse, 543.0),
];

/// The faster link of the source, in bit/s: for the link itself, and OpenVPN without a cipher.
pub(super) const FASTER: u64 = 10 * GIGABIT;
/// Ciphers that are measured over a link of the source's speed: the published ones, and with a slow
/// library.
const PUBLISHED: [&str; 6] = [NONE, SHORT_KEY, CBC, BLOWFISH, SLOW_CBC, SLOW_BLOWFISH];

/// Time for a stream to find its rate: there is no distance.
const WARMUP: Duration = Duration::from_millis(500);
/// Of the time of a load: there are many.
const SHARE: f64 = 1.0 / 3.0;

const fn from_6000(figures: [f64; 7]) -> [Option<f64>; 8] {
    let [a, b, c, d, e, f, g] = figures;
    [
        None,
        Some(a),
        Some(b),
        Some(c),
        Some(d),
        Some(e),
        Some(f),
        Some(g),
    ]
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    let setups = CIPHERS.len() + OWN.len() + PUBLISHED.len() + 1;
    bench.expect(rounds * (setups * (MTUS.len() + 1) + 2 * (RAW.len() + SETUPS.len())) + 4);
    let mut found = Found::default();
    bench.step("ciphers alone")?;
    found
        .figures
        .push(library::figures(bench, &mut found.problems)?);
    let columns = sweep(bench, &names(&mut found), None, &mut found)?;
    found.curves.push(curves(&columns));
    without_cipher(bench, &columns, None, &mut found)?;
    claims(&columns, &mut found);
    found.grids.push(grid(columns, None));
    let faster = Some(FASTER);
    let columns = sweep(bench, &[NONE], faster, &mut found)?;
    without_cipher(bench, &columns, faster, &mut found)?;
    let rates = bench.rates();
    let columns = sweep(bench, &PUBLISHED, rates[1], &mut found)?;
    found.grids.push(grid(columns, rates[1]));
    for rate in rates {
        both_directions(bench, rate, &mut found)?;
    }
    let done = diagnoses(bench, &mut found);
    found.note_failure(done)?;
    Ok(found)
}

/// The table of a sweep over a link of this rate.
fn grid(columns: Vec<Figures>, rate: Option<u64>) -> Grid {
    Grid {
        title: titled("TCP, 1 stream, by cipher", rate),
        rows: "MTU".to_owned(),
        columns,
    }
}

/// One stream, in Mbit/s.
fn stream(
    bench: &Bench<'_>,
    tunnel: &dyn Tunnel,
    hosts: &Hosts,
    direction: Direction,
) -> Result<f64> {
    let options = TcpOptions {
        direction,
        warmup: WARMUP,
        duration: bench.time().mul_f64(SHARE),
        ..TcpOptions::default()
    };
    let report = tcp_bulk(&tunnel.ends(hosts), &options, bench.interrupt)?;
    Ok(report.gbit_per_second * 1e3)
}

/// The link itself, of this rate.
fn raw(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<Figures> {
    let names = RAW.map(|(name, ..)| name);
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let tunnel = plain("raw")?;
        let running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        without(&running.hosts, name)?;
        stream(bench, tunnel.as_ref(), &running.hosts, Direction::Forward)
    })?;
    let rows = RAW.into_iter().zip(measured);
    Ok(Figures {
        title: titled("TCP, 1 stream, without a cipher", rate),
        unit: "Mbit/s".to_owned(),
        base: RAW[0].0.to_owned(),
        rows: rows
            .map(|((name, _, published), rounds)| Row {
                rounds,
                ..Row::new(name, published)
            })
            .collect(),
    })
}

/// Disables the features that a row lacks on both ends' NICs.
fn without(hosts: &Hosts, name: &str) -> Result<()> {
    let features = RAW
        .iter()
        .find(|row| row.0 == name)
        .map_or(&[][..], |row| row.1);
    for host in [&hosts.a, &hosts.b] {
        host.set_features(&host.device, features)?;
    }
    Ok(())
}

/// All ciphers that are measured, of OpenVPN and of Seikan.
fn names(found: &mut Found) -> Vec<&'static str> {
    found.notes.push(match null_program() {
        Some(_) => format!(
            "{OWN_NONE}: another build, with debug assertions, which costs it a little; no release build can do without a cipher."
        ),
        None => format!(
            "Without a cipher ours is not measured: ${NULL_PROGRAM} names no program that has none (cargo build --profile lab \
             --features null-cipher)."
        ),
    });
    let own = OWN.into_iter().map(|(name, _)| name);
    let own = own.filter(|name| *name != OWN_NONE || null_program().is_some());
    let ciphers = CIPHERS.into_iter().map(|(name, ..)| name);
    let ciphers = ciphers.filter(|name| ![SLOW_CBC, SLOW_BLOWFISH].contains(name));
    ciphers.chain(own).collect()
}

/// These ciphers over every MTU, on a link of this rate: a column for each cipher.
fn sweep(
    bench: &mut Bench<'_>,
    names: &[&'static str],
    rate: Option<u64>,
    found: &mut Found,
) -> Result<Vec<Figures>> {
    let mut failed = Vec::new();
    let measured = interleaved(bench, names, &mut found.problems, &mut |bench, name| {
        let tunnel = with_cipher(name)?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        let mut rates = Vec::new();
        for mtu in MTUS {
            bench.step(format!("{name}, MTU {mtu}"))?;
            let mut measure = || {
                for host in [&running.hosts.a, &running.hosts.b] {
                    set_link(host, tunnel.name(), &format!("mtu {mtu}"))?;
                }
                running.check_alive()?;
                stream(bench, tunnel.as_ref(), &running.hosts, Direction::Forward)
            };
            rates.push(match measure() {
                Err(LabError::Interrupted) => return Err(LabError::Interrupted),
                Err(error) => {
                    failed.push(format!("{name}, MTU {mtu}: {error}"));
                    None
                }
                Ok(rate) => Some(rate),
            });
        }
        Ok(rates)
    })?;
    found.problems.extend(failed);
    let columns = names.iter().zip(measured);
    Ok(columns
        .map(|(name, rounds)| column(name, &rounds))
        .collect())
}

/// The column of a cipher, from the rates of each round by MTU.
fn column(name: &str, rounds: &[Option<Vec<Option<f64>>>]) -> Figures {
    let cipher = CIPHERS.iter().find(|cipher| cipher.0 == name);
    let there = cipher.map_or([None; 8], |cipher| cipher.2);
    let rows = MTUS.iter().zip(there).enumerate();
    Figures {
        title: name.to_owned(),
        unit: "Mbit/s".to_owned(),
        base: MTUS[SMALL].to_string(),
        rows: rows
            .map(|(place, (mtu, published))| Row {
                own: cipher.is_none(),
                rounds: rounds
                    .iter()
                    .map(|rates| *rates.as_ref()?.get(place)?)
                    .collect(),
                ..Row::new(mtu.to_string(), published)
            })
            .collect(),
    }
}

fn curves(columns: &[Figures]) -> Curves {
    let line = |column: &Figures, published: bool| Curve {
        name: if published {
            format!("{}, published", column.title)
        } else {
            column.title.clone()
        },
        own: column.rows.iter().any(|row| row.own),
        published,
        points: MTUS
            .iter()
            .zip(&column.rows)
            .filter_map(|(mtu, row)| {
                let here = row.spread().map(|spread| spread.median);
                let value = if published { row.published } else { here };
                Some([f64::from(*mtu), value?])
            })
            .collect(),
    };
    let here = columns.iter().map(|column| line(column, false));
    let there = columns.iter().map(|column| line(column, true));
    Curves {
        name: "mtu-cipher-throughput".to_owned(),
        title: "throughput of one TCP stream, by cipher".to_owned(),
        x: "MTU inside the tunnel, bytes".to_owned(),
        y: "Mbit/s".to_owned(),
        logarithmic: [true, true],
        curves: here.chain(there).filter(|c| c.points.len() > 1).collect(),
    }
}

/// Compares a link of this rate with tunnels without a cipher over it, and with Seikan.
fn without_cipher(
    bench: &mut Bench<'_>,
    columns: &[Figures],
    rate: Option<u64>,
    found: &mut Found,
) -> Result<()> {
    let mut figures = raw(bench, rate, found)?;
    let named = |name: &str| columns.iter().find(|column| column.title == name);
    if let Some(none) = named(NONE) {
        figures
            .rows
            .extend(PLAIN.map(|(place, name, published)| Row {
                rounds: none.rows[place].rounds.clone(),
                ..Row::new(name, Some(published))
            }));
    }
    for cipher in [OWN_NONE, OWN_AES] {
        figures.rows.extend(named(cipher).map(|own| Row {
            rounds: own.rows[0].rounds.clone(),
            ..Row::new(format!("{cipher}, MTU 1500"), None).own()
        }));
    }
    let [raw, no_checksum, _] = RAW.map(|(name, ..)| name);
    let [largest, large, middle] = PLAIN.map(|(_, name, _)| name);
    found.claims.push(figures.claim(raw, no_checksum));
    found.claims.push(figures.claim(largest, middle));
    found.claims.push(figures.claim(large, middle));
    found.figures.push(figures);
    Ok(())
}

/// AES out and back, where host B has no instructions for it.
fn both_directions(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let names: Vec<String> = SETUPS
        .iter()
        .map(|(cipher, direction, _)| match direction {
            Direction::Reverse => format!("{cipher}, back"),
            _ => format!("{cipher}, out"),
        })
        .collect();
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let setup = names.iter().zip(SETUPS).find(|(known, _)| *known == name);
        let (cipher, direction, _) = setup.map_or(SETUPS[0], |(_, setup)| setup);
        let tunnel = openvpn(cipher, [Vec::new(), vec![library::without_aes()]])?;
        let running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        for host in [&running.hosts.a, &running.hosts.b] {
            set_link(host, tunnel.name(), &format!("mtu {}", MTUS[MIDDLE]))?;
        }
        stream(bench, tunnel.as_ref(), &running.hosts, direction)
    })?;
    let rows = names.iter().zip(SETUPS).zip(measured);
    found.figures.push(Figures {
        title: titled(
            &format!(
                "OpenVPN, MTU {}, the far end without AES instructions",
                MTUS[MIDDLE]
            ),
            rate,
        ),
        unit: "Mbit/s".to_owned(),
        base: names[0].clone(),
        rows: rows
            .map(|((name, (.., published)), rounds)| Row {
                rounds,
                ..Row::new(name, Some(published))
            })
            .collect(),
    });
    Ok(())
}

/// Claims about larger packets, instructions and no cipher, and about Seikan and the best other
/// tunnel.
fn claims(columns: &[Figures], found: &mut Found) {
    let large = MTUS[LARGE].to_string();
    for cipher in [CBC, BLOWFISH] {
        let column = columns.iter().find(|column| column.title == cipher);
        found
            .claims
            .extend(column.map(|column| column.claim(&large, &MTUS[SMALL].to_string())));
    }
    // The same MTU across ciphers.
    let across = |place: usize| Figures {
        title: format!("MTU {}", MTUS[place]),
        unit: "Mbit/s".to_owned(),
        base: CBC.to_owned(),
        rows: columns
            .iter()
            .map(|column| Row {
                name: column.title.clone(),
                ..column.rows[place].clone()
            })
            .collect(),
    };
    let mut none = across(MIDDLE).claim(NONE, CBC);
    // Both with AES instructions, out.
    none.published = Some(SETUPS[0].2 / SETUPS[2].2);
    found.claims.push(none);
    found.claims.push(across(LARGE).claim(CBC, NO_AES));
    found.claims.push(across(LARGE).claim(OWN_AES, CBC));
    let own = columns.iter().find(|column| column.title == OWN_AES);
    let rates = own.map(|own| own.rows.iter().filter_map(Row::spread));
    let rates: Vec<f64> = rates.map_or_else(Vec::new, |r| r.map(|s| s.median).collect());
    let (low, high) = rates
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(l, h), r| (l.min(*r), h.max(*r)));
    if high > 0.0 {
        found.notes.push(format!(
            "{OWN_AES} has {low:.0} to {high:.0} Mbit/s over all MTUs: its interface takes super-packets of 60 KiB from \
             the kernel, whatever its MTU, and seals them in runs of datagrams that fit the way."
        ));
    }
}

/// Diagnoses a slow cipher, small packets, and a link without offloads.
fn diagnoses(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let rate = |found: &Found, cipher: &str, place: usize| {
        let column = found.grids[0].columns.iter().find(|c| c.title == cipher);
        let spread = column.and_then(|column| column.rows[place].spread());
        spread.map_or(1e3, |spread| spread.median)
    };
    for (cipher, mtu, expected, right) in [
        (
            NO_AES,
            MTUS[LARGE],
            rate(found, CBC, LARGE),
            Cause::CipherBound,
        ),
        (NONE, 576, rate(found, NONE, LARGE), Cause::PacketsTooSmall),
    ] {
        let of = format!("OpenVPN, {cipher}, MTU {mtu}");
        bench.step(format!("the doctor on {of}"))?;
        let tunnel = with_cipher(cipher)?;
        let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
        for host in [&running.hosts.a, &running.hosts.b] {
            set_link(host, tunnel.name(), &format!("mtu {mtu}"))?;
        }
        let host = &running.hosts.a;
        let interface = inner_device(tunnel.name(), host);
        let looker = Looker {
            expected,
            right: &[right],
            ..Looker::new(&of, host, &interface)
        };
        let ends = tunnel.ends(&running.hosts);
        let load = LiveOptions::default();
        let verdict = looker.look_under(&load, &ends, bench.desk(), |_| Vec::new())?;
        found.looks.push(verdict);
    }
    let (name, ..) = RAW[2];
    bench.step(format!("the doctor on {name}"))?;
    let tunnel = plain("raw")?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    without(&running.hosts, name)?;
    let whole = found.figures.iter().find_map(|f| f.row(RAW[0].0)?.spread());
    let host = &running.hosts.a;
    let looker = Looker {
        expected: whole.map_or(1e3, |whole| whole.median),
        right: &[Cause::OffloadMissing],
        ..Looker::new(name, host, &host.device)
    };
    let ends = tunnel.ends(&running.hosts);
    let verdict =
        looker.look_under(&LiveOptions::default(), &ends, bench.desk(), |_| Vec::new())?;
    found.looks.push(verdict);
    Ok(())
}

/// Returns OpenVPN or Seikan with the cipher of this name.
fn with_cipher(name: &str) -> Result<Box<dyn Tunnel>> {
    if let Some((_, cipher)) = OWN.iter().find(|(own, _)| *own == name) {
        let mut tunnel = Seikan::new("native", 0).with_cipher(cipher);
        if let Some(program) = null_program().filter(|_| name == OWN_NONE) {
            tunnel = tunnel.with_program(program);
        }
        tunnel.availability().map_err(LabError::Setup)?;
        return Ok(Box::new(tunnel));
    }
    let environment = match name {
        NO_AES => vec![library::without_aes()],
        SLOW_CBC | SLOW_BLOWFISH => vec![library::without_extensions()],
        _ => Vec::new(),
    };
    openvpn(name, [environment.clone(), environment])
}

/// Returns OpenVPN with the cipher of this name, and variables of its environment at both ends.
fn openvpn(name: &str, environment: [Vec<(String, String)>; 2]) -> Result<Box<dyn Tunnel>> {
    let mut arguments: Vec<String> = ["--tun-mtu", "60000", "--mssfix", "0"]
        .map(Into::into)
        .to_vec();
    let cipher = CIPHERS.iter().find(|cipher| cipher.0 == name);
    arguments.extend(
        cipher
            .iter()
            .flat_map(|cipher| cipher.1)
            .map(|word| (*word).to_owned()),
    );
    let changes = Changes {
        arguments: [arguments.clone(), arguments],
        environment,
    };
    lookup("openvpn", &changes)
}

fn null_program() -> Option<PathBuf> {
    std::env::var_os(NULL_PROGRAM).map(PathBuf::from)
}

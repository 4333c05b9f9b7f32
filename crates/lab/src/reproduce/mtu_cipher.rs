//! The tunnel's MTU and its cipher: OpenVPN with each cipher over MTUs of 1,500 to 60,000 bytes,
//! Seikan with both of its ciphers, and the link without a tunnel, with fewer offloads.
//!
//! A tunnel starts once a round for each cipher, and the MTU of its interface changes at both ends
//! while it runs. OpenVPN is configured with the largest one, so that its buffers fit every size.
//! Rows that differ by their cipher only have more rounds than others, and
//! [`noise`] says of each pair whether its difference stands above the noise.

use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::{Direction, LiveOptions, TcpOptions, tcp_bulk};
use seikan_sys::ethtool::Feature;

use super::figures::{interleaved, interleaved_for};
use super::look::Looker;
use super::noise::{self, Pair};
use super::{
    Bench, Curve, Curves, Figures, Found, GIGABIT, Grid, Row, library, limit, null, plain,
    set_link, titled,
};
use crate::error::{LabError, Result};
use crate::link::{Hosts, Link};
use crate::scenario::lookup;
use crate::tunnel::seikan::Seikan;
use crate::tunnel::{self, Changes, Tunnel, inner_device};

/// MTUs inside the tunnel, in bytes.
const MTUS: [u32; 8] = [1_500, 6_000, 9_000, 12_000, 24_000, 36_000, 48_000, 60_000];
/// Those of ciphers that the source did not sweep.
const FEW: &[u32] = &[1_500, 9_000, 48_000];
/// Those without a cipher: with all of its table for 10 Gbit/s.
const WITHOUT: &[u32] = &[1_500, 9_000, 48_000, 60_000];
/// Those of the source's sweep.
const SWEPT: &[u32] = &[6_000, 9_000, 12_000, 24_000, 36_000, 48_000, 60_000];
/// Those of its table for 10 Gbit/s.
const FASTER_MTUS: &[u32] = &[9_000, 48_000, 60_000];
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
const GCM: &str = "AES-256-GCM";
const CHACHA: &str = "ChaCha20-Poly1305";
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
    (GCM, &[], [None; 8]),
    (
        CHACHA,
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
    (OWN_CHACHA, "chacha20-poly1305"),
    (OWN_NONE, "null"),
];
const OWN_AES: &str = "Seikan, AES-256-GCM";
const OWN_CHACHA: &str = "Seikan, ChaCha20-Poly1305";
const OWN_NONE: &str = "Seikan, none";

/// A setup without a tunnel: its name, features of the NICs and their MTU, the published figure in
/// Mbit/s.
type Bare = (&'static str, &'static [(Feature, bool)], u32, Option<f64>);
/// MTUs of the NICs: that of the source, and of jumbo frames.
const NIC: u32 = 1_500;
const JUMBO: u32 = 9_000;
/// The link without a tunnel, and the published figures for 10 Gbit/s, in Mbit/s.
const RAW: [Bare; 4] = [
    ("no tunnel", &[], NIC, Some(8_800.0)),
    (
        "no tunnel, no checksum offload",
        &[(Feature::TxChecksum, false)],
        NIC,
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
        NIC,
        None,
    ),
    ("no tunnel, NICs with an MTU of 9000", &[], JUMBO, None),
];
/// OpenVPN without a cipher on 10 Gbit/s: place in [`MTUS`], row, published in Mbit/s.
const PLAIN: [(usize, &str, f64); 3] = [
    (7, "OpenVPN, no cipher, MTU 60000", 3_600.0),
    (LARGE, "OpenVPN, no cipher, MTU 48000", 2_400.0),
    (MIDDLE, "OpenVPN, no cipher, MTU 9000", 1_300.0),
];

/// OpenVPN at an MTU of 9,000 where both ends are alike, and where host B has no AES instructions:
/// cipher, whether B lacks them, and the published figures in Mbit/s, B decrypting and B
/// encrypting. One of the source's machines was slower.
type Setup = (&'static str, bool, [Option<f64>; 2]);
const SETUPS: [Setup; 5] = [
    (NONE, false, [Some(PUBLISHED_NONE), None]),
    (SHORT_KEY, false, [None; 2]),
    (CBC, false, [None; 2]),
    (SHORT_KEY, true, [Some(PUBLISHED_SHORT), Some(SLOW_SHORT)]),
    (CBC, true, [Some(PUBLISHED_CBC), Some(SLOW_LONG)]),
];
const PUBLISHED_NONE: f64 = 930.0;
const PUBLISHED_SHORT: f64 = 885.0;
const PUBLISHED_CBC: f64 = 878.0;
/// Where the slower machine encrypts.
const SLOW_SHORT: f64 = 748.0;
const SLOW_LONG: f64 = 543.0;

/// A comparison of two rows: its name, place in [`SETUPS`] and direction of both, published factor.
type Compared = (&'static str, (usize, usize), (usize, usize), Option<f64>);
const COMPARED: [Compared; 8] = [
    (
        "none / AES-128, ends alike",
        (0, 0),
        (1, 0),
        Some(PUBLISHED_NONE / PUBLISHED_SHORT),
    ),
    (
        "AES-128 / AES-256, ends alike",
        (1, 0),
        (2, 0),
        Some(PUBLISHED_SHORT / PUBLISHED_CBC),
    ),
    (
        "AES-128 / AES-256, slow B decrypts",
        (3, 0),
        (4, 0),
        Some(PUBLISHED_SHORT / PUBLISHED_CBC),
    ),
    (
        "AES-128 / AES-256, slow B encrypts",
        (3, 1),
        (4, 1),
        Some(SLOW_SHORT / SLOW_LONG),
    ),
    (
        "slow B decrypts / encrypts, AES-128",
        (3, 0),
        (3, 1),
        Some(PUBLISHED_SHORT / SLOW_SHORT),
    ),
    (
        "slow B decrypts / encrypts, AES-256",
        (4, 0),
        (4, 1),
        Some(PUBLISHED_CBC / SLOW_LONG),
    ),
    (
        "B encrypts with / without AES-NI, AES-128",
        (1, 1),
        (3, 1),
        None,
    ),
    (
        "B encrypts with / without AES-NI, AES-256",
        (2, 1),
        (4, 1),
        None,
    ),
];

/// The faster link of the source, in bit/s: for the link itself, and OpenVPN without a cipher.
const FASTER: u64 = 10 * GIGABIT;
/// Ciphers that are measured over it: none, as published, and those that the source leaves open.
const OVER_FASTER: [&str; 4] = [NONE, CBC, GCM, OWN_AES];
/// Ciphers that are swept over a link of the source's speed: the published ones, and both with a
/// slow library.
const PUBLISHED: [&str; 4] = [CBC, BLOWFISH, SLOW_CBC, SLOW_BLOWFISH];
/// How much slower AES was with the source's slow library, about, whatever the MTU, and Blowfish.
const SLOWER: [f64; 2] = [2.0, 1.0];

/// Time for a stream to find its rate: there is no distance.
const WARMUP: Duration = Duration::from_millis(250);
/// Of the time of a load: there are many.
const SHARE: f64 = 0.2;

/// Rounds of rows that differ by their cipher: 5 for every 3.
fn cipher_rounds(bench: &Bench<'_>) -> u32 {
    (bench.options.rounds * 5 / 3).max(1)
}

/// The MTUs that a cipher is measured with where no link limits it.
fn mtus_of(cipher: &str) -> &'static [u32] {
    match cipher {
        CBC | BLOWFISH => &MTUS,
        NONE => WITHOUT,
        _ => FEW,
    }
}

/// One sweep over MTUs, and the link it is made over.
#[derive(Clone, Copy)]
struct Sweep<'a> {
    names: &'a [&'static str],
    mtus: fn(&str) -> &'static [u32],
    rate: Option<u64>,
    nic: u32,
    rounds: u32,
}

impl<'a> Sweep<'a> {
    /// A sweep over NICs with the source's MTU.
    fn of(
        names: &'a [&'static str],
        mtus: fn(&str) -> &'static [u32],
        rate: Option<u64>,
        rounds: u32,
    ) -> Self {
        Self {
            names,
            mtus,
            rate,
            nic: NIC,
            rounds,
        }
    }
}

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
    let mut found = Found::default();
    let all = names(&mut found);
    let (rounds, more) = (bench.options.rounds, cipher_rounds(bench));
    let gigabit = bench.source.rate();
    let sweeps = [
        Sweep::of(&all, mtus_of, None, more),
        Sweep::of(&OVER_FASTER, |_| FASTER_MTUS, Some(FASTER), rounds),
        Sweep {
            nic: JUMBO,
            ..Sweep::of(&OVER_FASTER[..1], |_| FASTER_MTUS, Some(FASTER), rounds)
        },
        Sweep::of(&PUBLISHED, |_| SWEPT, Some(gigabit), more),
    ];
    let steps = sweeps.iter().map(|of| {
        let mtus = of.names.iter().map(|name| 1 + (of.mtus)(name).len());
        of.rounds as usize * mtus.sum::<usize>()
    });
    let single = rounds as usize * 2 * (RAW.len() + limit::STEPS) + more as usize * SETUPS.len();
    bench.expect(steps.sum::<usize>() + single + 4);
    bench.step("ciphers alone")?;
    found
        .figures
        .push(library::figures(bench, &mut found.problems)?);
    for rate in [gigabit, FASTER] {
        let done = limit::check(bench, rate, &mut found);
        found.note_failure(done)?;
    }
    let [free, faster, jumbo, slow] = &sweeps;
    let columns = run_sweep(bench, free, &mut found)?;
    found.curves.push(curves(&columns));
    let figures = without_cipher(bench, &[(&columns[..], "")], None, &mut found)?;
    found.figures.push(figures);
    claims(&columns, &mut found);
    let mut pairs = noise::pairs(&columns, &PAIRS, "no limit");
    found.grids.push(grid(columns, None));

    let columns = run_sweep(bench, faster, &mut found)?;
    let wide = run_sweep(bench, jumbo, &mut found)?;
    let of_both = [(&columns[..], ""), (&wide[..], ", NICs 9000")];
    let figures = without_cipher(bench, &of_both, faster.rate, &mut found)?;
    order(&figures, &mut found);
    found.figures.push(figures);
    pairs.extend(noise::pairs(&columns, &FASTER_PAIRS, "10 Gbit/s"));
    found.grids.push(grid(columns, faster.rate));

    let columns = run_sweep(bench, slow, &mut found)?;
    pairs.extend(noise::pairs(&columns, &PUBLISHED_PAIRS, "1 Gbit/s"));
    found.grids.push(grid(columns, slow.rate));
    pairs.extend(both_directions(bench, gigabit, &mut found)?);
    found.lists.push(noise::list(&pairs, more));
    let done = diagnoses(bench, &mut found);
    found.note_failure(done)?;
    Ok(found)
}

/// Ciphers that are compared at the same MTU: the first should be faster, and the published factor
/// is that of the MTU's figures unless there is another.
const PAIRS: [Pair; 9] = [
    Pair::new(NONE, SHORT_KEY, FEW),
    Pair::new(SHORT_KEY, CBC, FEW),
    Pair::new(CBC, BLOWFISH, FEW),
    Pair::new(GCM, CBC, FEW),
    Pair::new(GCM, CHACHA, FEW),
    Pair::new(CBC, NO_AES, FEW),
    Pair::new(NONE, GCM, FEW),
    Pair::new(OWN_AES, OWN_CHACHA, FEW),
    Pair::new(OWN_NONE, OWN_AES, FEW),
];
const FASTER_PAIRS: [Pair; 3] = [
    Pair::new(NONE, CBC, FASTER_MTUS),
    Pair::new(NONE, GCM, FASTER_MTUS),
    Pair::new(OWN_AES, NONE, FASTER_MTUS),
];
const PUBLISHED_PAIRS: [Pair; 4] = [
    Pair::new(CBC, BLOWFISH, SWEPT),
    Pair::new(SLOW_CBC, SLOW_BLOWFISH, FEW),
    Pair::published(CBC, SLOW_CBC, SWEPT, SLOWER[0]),
    Pair::published(BLOWFISH, SLOW_BLOWFISH, SWEPT, SLOWER[1]),
];

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
        let nic = RAW
            .iter()
            .find(|row| row.0 == name)
            .map_or(NIC, |row| row.2);
        let link = Link {
            mtu: nic,
            ..bench.link(rate)
        };
        let running = tunnel::start(tunnel.as_ref(), link, bench.interrupt)?;
        without(&running.hosts, name)?;
        stream(bench, tunnel.as_ref(), &running.hosts, Direction::Forward)
    })?;
    let rows = RAW.into_iter().zip(measured);
    Ok(Figures {
        title: titled("TCP, 1 stream, without a cipher", rate),
        unit: "Mbit/s".to_owned(),
        base: RAW[0].0.to_owned(),
        rows: rows
            .map(|((name, _, _, published), rounds)| Row {
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
    found.notes.push(match null::program() {
        Some(_) => format!(
            "{OWN_NONE}: another build, with debug assertions, which costs it a little; no release build can do without a cipher."
        ),
        None => null::missing(),
    });
    let own = OWN.into_iter().map(|(name, _)| name);
    let own = own.filter(|name| *name != OWN_NONE || null::program().is_some());
    let ciphers = CIPHERS.into_iter().map(|(name, ..)| name);
    let ciphers = ciphers.filter(|name| ![SLOW_CBC, SLOW_BLOWFISH].contains(name));
    ciphers.chain(own).collect()
}

/// Ciphers over their MTUs: a column for each cipher.
fn run_sweep(bench: &mut Bench<'_>, sweep: &Sweep<'_>, found: &mut Found) -> Result<Vec<Figures>> {
    let mut failed = Vec::new();
    let rows = (sweep.names, sweep.rounds);
    let measured = interleaved_for(bench, rows, &mut found.problems, &mut |bench, name| {
        let tunnel = with_cipher(name)?;
        let link = Link {
            mtu: sweep.nic,
            ..bench.link(sweep.rate)
        };
        let mut running = tunnel::start(tunnel.as_ref(), link, bench.interrupt)?;
        let mut rates = Vec::new();
        for mtu in (sweep.mtus)(name) {
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
    let columns = sweep.names.iter().zip(measured);
    Ok(columns
        .map(|(name, rounds)| column(name, (sweep.mtus)(name), &rounds))
        .collect())
}

/// The column of a cipher, from the rates of each round at these MTUs. Rows of others are empty.
fn column(name: &str, mtus: &[u32], rounds: &[Option<Vec<Option<f64>>>]) -> Figures {
    let cipher = CIPHERS.iter().find(|cipher| cipher.0 == name);
    let there = cipher.map_or([None; 8], |cipher| cipher.2);
    let of = |mtu: u32| -> Vec<Option<f64>> {
        let Some(index) = mtus.iter().position(|known| *known == mtu) else {
            return Vec::new();
        };
        let rate = |rates: &Option<Vec<Option<f64>>>| *rates.as_ref()?.get(index)?;
        rounds.iter().map(rate).collect()
    };
    Figures {
        title: name.to_owned(),
        unit: "Mbit/s".to_owned(),
        base: MTUS[SMALL].to_string(),
        rows: MTUS
            .into_iter()
            .zip(there)
            .map(|(mtu, published)| Row {
                own: cipher.is_none(),
                rounds: of(mtu),
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

/// Compares a link of this rate with tunnels without a cipher over it, and with Seikan. Columns
/// come from sweeps, each with what its rows are called besides.
fn without_cipher(
    bench: &mut Bench<'_>,
    sweeps: &[(&[Figures], &str)],
    rate: Option<u64>,
    found: &mut Found,
) -> Result<Figures> {
    let mut figures = raw(bench, rate, found)?;
    for (columns, besides) in sweeps {
        let named = |name: &str| columns.iter().find(|column| column.title == name);
        let published = besides.is_empty();
        if let Some(none) = named(NONE) {
            figures.rows.extend(PLAIN.map(|(place, name, there)| Row {
                rounds: none.rows[place].rounds.clone(),
                ..Row::new(
                    format!("{name}{besides}"),
                    Some(there).filter(|_| published),
                )
            }));
        }
        for own in [OWN_NONE, OWN_AES].into_iter().filter_map(named) {
            let measured = own.rows.iter().find(|row| !row.rounds.is_empty());
            figures.rows.extend(measured.map(|row| Row {
                rounds: row.rounds.clone(),
                ..Row::new(format!("{}, MTU {}{besides}", own.title, row.name), None).own()
            }));
        }
    }
    Ok(figures)
}

/// The order of the source's table for 10 Gbit/s, row by row.
fn order(figures: &Figures, found: &mut Found) {
    let [raw, no_checksum, ..] = RAW.map(|(name, ..)| name);
    let rows = [raw, no_checksum].into_iter();
    let rows: Vec<&str> = rows.chain(PLAIN.map(|(_, name, _)| name)).collect();
    let claims = rows.windows(2).map(|pair| figures.claim(pair[0], pair[1]));
    found.claims.extend(claims);
}

/// AES where both ends are alike, and where host B has no instructions for it and decrypts, or
/// encrypts.
fn both_directions(
    bench: &mut Bench<'_>,
    rate: u64,
    found: &mut Found,
) -> Result<Vec<noise::Line>> {
    let names = SETUPS.map(|(cipher, slow, _)| match slow_words(slow) {
        "" => format!("{cipher}, ends alike"),
        words => format!("{cipher}{words}"),
    });
    let words = names.each_ref().map(String::as_str);
    let rows = (&words[..], cipher_rounds(bench));
    let measured = interleaved_for(bench, rows, &mut found.problems, &mut |bench, name| {
        let setup = names.iter().zip(SETUPS).find(|(known, _)| *known == name);
        let (cipher, slow, _) = setup.map_or(SETUPS[0], |(_, setup)| setup);
        let far = if slow {
            vec![library::without_aes()]
        } else {
            Vec::new()
        };
        let tunnel = openvpn(cipher, [Vec::new(), far])?;
        let link = bench.link(Some(rate));
        let running = tunnel::start(tunnel.as_ref(), link, bench.interrupt)?;
        for host in [&running.hosts.a, &running.hosts.b] {
            set_link(host, tunnel.name(), &format!("mtu {}", MTUS[MIDDLE]))?;
        }
        let of = |direction| stream(bench, tunnel.as_ref(), &running.hosts, direction);
        Ok([of(Direction::Forward)?, of(Direction::Reverse)?])
    })?;
    let mut figures = Figures {
        title: titled(&format!("OpenVPN, MTU {}", MTUS[MIDDLE]), Some(rate)),
        unit: "Mbit/s".to_owned(),
        base: direction_name(&names[0], 0),
        rows: Vec::new(),
    };
    for ((name, (_, _, published)), rounds) in names.iter().zip(SETUPS).zip(&measured) {
        for (direction, published) in published.into_iter().enumerate() {
            figures.rows.push(Row {
                rounds: rounds
                    .iter()
                    .map(|rates| rates.map(|rates| rates[direction]))
                    .collect(),
                ..Row::new(direction_name(name, direction), published)
            });
        }
    }
    let setting = format!("MTU {}, 1 Gbit/s", MTUS[MIDDLE]);
    let lines = COMPARED.map(|(name, more, less, published)| {
        let claim = figures.claim(
            &direction_name(&names[more.0], more.1),
            &direction_name(&names[less.0], less.1),
        );
        noise::Line::of(name, claim, &setting, published)
    });
    found.figures.push(figures);
    Ok(lines.into())
}

fn slow_words(slow: bool) -> &'static str {
    if slow { ", B without AES-NI" } else { "" }
}

/// Name of a row of [`both_directions`].
fn direction_name(name: &str, direction: usize) -> String {
    let does = ["B decrypts", "B encrypts"][direction];
    format!("{name}, {does}")
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
    // Both with AES instructions.
    none.published = Some(PUBLISHED_NONE / PUBLISHED_CBC);
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
        if name == OWN_NONE {
            return null::tunnel();
        }
        let tunnel = Seikan::new("native", 0).with_cipher(cipher);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::{Claim, Source, testing};

    #[test]
    fn a_cipher_has_rows_for_its_own_mtus_alone() {
        let rates = vec![Some(1.0), None, Some(3.0)];
        let figures = column(GCM, FEW, &[Some(rates), None]);
        let rounds: Vec<usize> = figures.rows.iter().map(|row| row.rounds.len()).collect();
        assert_eq!(rounds, [2, 0, 2, 0, 0, 0, 2, 0]);
        assert_eq!(figures.rows[LARGE].rounds, [Some(3.0), None]);
        assert_eq!(figures.rows[MIDDLE].rounds, [None, None]);
    }

    #[test]
    fn aes_is_masked_at_one_end() {
        testing::short(Source::MtuCipher, |bench| {
            let (name, value) = library::without_aes();
            let tunnel = openvpn(CBC, [Vec::new(), vec![(name.clone(), value.clone())]])?;
            let mut running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
            let (_, started) = running.parts();
            let variable = format!("{name}={value}");
            for program in &started.processes.0 {
                let file = format!("/proc/{}/environ", program.pid());
                let environment = std::fs::read(&file).map_err(LabError::io("read it"))?;
                let all = String::from_utf8_lossy(&environment).into_owned();
                let masked = all.split('\0').any(|of| of == variable);
                assert_eq!(masked, program.host() == "B", "{all}");
            }
            Ok(())
        });
    }

    #[test]
    fn the_order_of_the_source_is_a_chain_of_comparisons() {
        let names = [RAW[0].0, RAW[1].0, PLAIN[0].1, PLAIN[1].1, PLAIN[2].1];
        let figures = Figures {
            title: "t".into(),
            unit: "Mbit/s".into(),
            base: names[0].into(),
            rows: (1..)
                .zip(names)
                .map(|(place, name)| Row {
                    rounds: vec![Some(100.0 / f64::from(place))],
                    ..Row::new(name, None)
                })
                .collect(),
        };
        let mut found = Found::default();
        order(&figures, &mut found);
        assert_eq!(found.claims.len(), 4);
        assert!(found.claims.iter().all(Claim::holds));
    }

    #[test]
    fn the_published_figures_belong_to_the_swept_mtus() {
        for cipher in [CBC, BLOWFISH] {
            let known = CIPHERS.iter().find(|of| of.0 == cipher).expect(cipher);
            let published = MTUS.iter().zip(known.2).filter(|of| of.1.is_some());
            let mtus: Vec<u32> = published.map(|(mtu, _)| *mtu).collect();
            assert_eq!(mtus, SWEPT);
        }
    }
}

//! The tunnel's MTU and its cipher: OpenVPN with each cipher over MTUs of 1,500 to 60,000 bytes,
//! Seikan with both of its ciphers, and the link without a tunnel, with fewer offloads.
//!
//! A tunnel starts once a round for each cipher, and the MTU of its interface changes at both ends
//! while it runs. OpenVPN is configured with the largest one, so that its buffers fit every size.
//! Rows that differ only by their cipher have more rounds than others, and [`noise`] decides for
//! each pair whether its difference exceeds the noise.

use std::sync::Arc;
use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::stats::Spread;
use seikan_load::{Direction, LiveOptions, TcpOptions, tcp_bulk};
use seikan_sys::ethtool::Feature;

use super::look::Looker;
use super::noise::{self, Pair};
use super::{
    Bench, Curve, Curves, Experiment, Figures, GIGABIT, Grid, Row, library, limit, null, plain,
    set_both, titled,
};
use crate::error::Result;
use crate::scenario::lookup;
use crate::site::{Link, NO_OFFLOAD};
use crate::tunnel::seikan::Seikan;
use crate::tunnel::{Changes, Running, Tunnel};

/// MTUs inside the tunnel, in bytes.
const MTUS: [u32; 8] = [1_500, 6_000, 9_000, 12_000, 24_000, 36_000, 48_000, 60_000];
/// MTUs for ciphers that the source did not sweep.
const FEW: &[u32] = &[1_500, 9_000, 48_000];
/// MTUs without a cipher: these include all of the source's table for 10 Gbit/s.
const WITHOUT: &[u32] = &[1_500, 9_000, 48_000, 60_000];
/// MTUs of the source's sweep.
const SWEPT: &[u32] = &[6_000, 9_000, 12_000, 24_000, 36_000, 48_000, 60_000];
/// MTUs of the source's table for 10 Gbit/s.
const FASTER_MTUS: &[u32] = &[9_000, 48_000, 60_000];
/// Indices in [`MTUS`].
const SMALL: usize = 1;
const MIDDLE: usize = 2;
const LARGE: usize = 6;

/// A cipher of OpenVPN: its name here and there, further options that it needs, and the published
/// figures for each of [`MTUS`], in Mbit/s.
type Cipher = (
    &'static str,
    &'static str,
    &'static [&'static str],
    [Option<f64>; 8],
);

const NONE: &str = "none";
const SHORT_KEY: &str = "AES-128-CBC";
const CBC: &str = "AES-256-CBC";
const GCM: &str = "AES-256-GCM";
const CHACHA: &str = "ChaCha20-Poly1305";
const BLOWFISH: &str = "BF-CBC";
const NO_AES: &str = "AES-256-CBC, no AES-NI";
/// OpenSSL without any extension of the instruction set: as slow as the libraries of the source's
/// time.
const SLOW_CBC: &str = "AES-256-CBC, slow library";
const SLOW_BLOWFISH: &str = "BF-CBC, slow library";
/// OpenSSL 3 has Blowfish in a provider of its own.
const LEGACY: &[&str] = &["--providers", "legacy", "default"];
const CIPHERS: [Cipher; 9] = [
    (NONE, NONE, &["--auth", NONE], [None; 8]),
    (SHORT_KEY, SHORT_KEY, &[], [None; 8]),
    (
        CBC,
        CBC,
        &[],
        from_6000([407.0, 410.0, 478.0, 540.0, 561.0, 585.0, 582.0]),
    ),
    (GCM, GCM, &[], [None; 8]),
    (CHACHA, "CHACHA20-POLY1305", &[], [None; 8]),
    (
        BLOWFISH,
        BLOWFISH,
        LEGACY,
        from_6000([310.0, 385.0, 417.0, 470.0, 510.0, 500.0, 500.0]),
    ),
    (NO_AES, CBC, &[], [None; 8]),
    (SLOW_CBC, CBC, &[], [None; 8]),
    (SLOW_BLOWFISH, BLOWFISH, LEGACY, [None; 8]),
];
/// Seikan's ciphers, and their names in its configuration. Release builds do not have the last one.
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
/// MTUs of the NICs: that of the source, and jumbo frames.
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
    ("no tunnel, no offload", &NO_OFFLOAD, NIC, None),
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
/// Published figures in Mbit/s where the slower machine encrypts.
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
/// Ciphers that are measured over the faster link: none, as published, and ciphers that the source
/// did not measure there.
const OVER_FASTER: [&str; 4] = [NONE, CBC, GCM, OWN_AES];
/// Ciphers that are swept over a link of the source's speed: the published ones, and both with a
/// slow library.
const PUBLISHED: [&str; 4] = [CBC, BLOWFISH, SLOW_CBC, SLOW_BLOWFISH];
/// Approximate factors by which AES and Blowfish were slower with the source's slow library, at any
/// MTU.
const SLOWER: [f64; 2] = [2.0, 1.0];

/// Time for a stream to find its rate: there is no distance.
const WARMUP: Duration = Duration::from_millis(250);
/// Share of a load's usual time that each measurement takes, because there are many.
const SHARE: f64 = 0.2;

/// Rounds of rows that differ by their cipher: 5 for every 3.
fn cipher_rounds(bench: &Bench<'_>) -> u32 {
    (bench.options.rounds * 5 / 3).max(1)
}

/// Returns the MTUs with which a cipher is measured where no link limits it.
fn mtus_of(cipher: &str) -> &'static [u32] {
    match cipher {
        CBC | BLOWFISH => &MTUS,
        NONE => WITHOUT,
        _ => FEW,
    }
}

/// A sweep over MTUs, and its link.
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

const fn from_6000([a, b, c, d, e, f, g]: [f64; 7]) -> [Option<f64>; 8] {
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

pub(super) fn run(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let all = names(found);
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
    bench.step("ciphers alone")?;
    library::figures(bench, found)?;
    for rate in [gigabit, FASTER] {
        found.attempt(|found| limit::check(bench, rate, found))?;
    }
    let [free, faster, jumbo, slow] = &sweeps;
    let columns = run_sweep(bench, free, found)?;
    found.curves.push(curves(&columns));
    let figures = without_cipher(bench, &[(&columns[..], "")], None, found)?;
    found.figures.push(figures);
    claims(&columns, found);
    let mut pairs = noise::pairs(&columns, &PAIRS, "no limit");
    found.grids.push(grid(columns, None));

    let columns = run_sweep(bench, faster, found)?;
    let wide = run_sweep(bench, jumbo, found)?;
    let of_both = [(&columns[..], ""), (&wide[..], ", NICs 9000")];
    let figures = without_cipher(bench, &of_both, faster.rate, found)?;
    order(&figures, found);
    found.figures.push(figures);
    pairs.extend(noise::pairs(&columns, &FASTER_PAIRS, "10 Gbit/s"));
    found.grids.push(grid(columns, faster.rate));

    let columns = run_sweep(bench, slow, found)?;
    pairs.extend(noise::pairs(&columns, &PUBLISHED_PAIRS, "1 Gbit/s"));
    found.grids.push(grid(columns, slow.rate));
    pairs.extend(both_directions(bench, gigabit, found)?);
    found.lists.push(noise::list(&pairs, more));
    found.attempt(|found| diagnoses(bench, found))
}

/// Ciphers that are compared at the same MTU. The first should be faster. The published factor
/// follows from the figures for the MTU unless another is given.
const PAIRS: [Pair; 9] = [
    (NONE, SHORT_KEY, FEW, None),
    (SHORT_KEY, CBC, FEW, None),
    (CBC, BLOWFISH, FEW, None),
    (GCM, CBC, FEW, None),
    (GCM, CHACHA, FEW, None),
    (CBC, NO_AES, FEW, None),
    (NONE, GCM, FEW, None),
    (OWN_AES, OWN_CHACHA, FEW, None),
    (OWN_NONE, OWN_AES, FEW, None),
];
const FASTER_PAIRS: [Pair; 3] = [
    (NONE, CBC, FASTER_MTUS, None),
    (NONE, GCM, FASTER_MTUS, None),
    (OWN_AES, NONE, FASTER_MTUS, None),
];
const PUBLISHED_PAIRS: [Pair; 4] = [
    (CBC, BLOWFISH, SWEPT, None),
    (SLOW_CBC, SLOW_BLOWFISH, FEW, None),
    (CBC, SLOW_CBC, SWEPT, Some(SLOWER[0])),
    (BLOWFISH, SLOW_BLOWFISH, SWEPT, Some(SLOWER[1])),
];

/// The table of a sweep over a link of this rate.
fn grid(columns: Vec<Figures>, rate: Option<u64>) -> Grid {
    Grid {
        title: titled("TCP, 1 stream, by cipher", rate),
        rows: "MTU".to_owned(),
        columns,
    }
}

/// Measures the rate of one stream, in Mbit/s.
fn stream(bench: &Bench<'_>, running: &Running, direction: Direction) -> Result<f64> {
    let options = TcpOptions {
        direction,
        warmup: WARMUP,
        duration: bench.time().mul_f64(SHARE),
        ..TcpOptions::default()
    };
    let report = tcp_bulk(&running.ends(), &options, bench.interrupt)?;
    Ok(report.gbit_per_second * 1e3)
}

/// The link itself, of this rate.
fn raw(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<Figures> {
    let measured = bench.rounds(
        &RAW,
        |row| row.0,
        found,
        |bench, row| {
            let running = start_raw(bench, row, rate)?;
            stream(bench, &running, Direction::Forward)
        },
    )?;
    let title = titled("TCP, 1 stream, without a cipher", rate);
    let rows = measured.rows(|row| Row::new(row.0, row.3), |rate| Some(*rate));
    Ok(Figures::new(title, "Mbit/s", rows))
}

/// Starts a row without a tunnel, whose NICs lack features.
fn start_raw(
    bench: &Bench<'_>,
    (_, features, mtu, _): &Bare,
    rate: Option<u64>,
) -> Result<Running> {
    let link = Link {
        mtu: *mtu,
        features,
        ..bench.link(rate)
    };
    bench.start_over(&plain("raw")?, link)
}

/// All ciphers that are measured, of OpenVPN and of Seikan.
fn names(found: &mut Experiment) -> Vec<&'static str> {
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
fn run_sweep(
    bench: &mut Bench<'_>,
    sweep: &Sweep<'_>,
    found: &mut Experiment,
) -> Result<Vec<Figures>> {
    let mut failed = Experiment::default();
    let rows = (sweep.names, |name: &&'static str| *name);
    let measured = bench.so_many_rounds(sweep.rounds, rows, found, |bench, name| {
        let link = Link {
            mtu: sweep.nic,
            ..bench.link(sweep.rate)
        };
        let mut running = bench.start_over(&with_cipher(name)?, link)?;
        let mut rates = Vec::new();
        for mtu in (sweep.mtus)(name) {
            let context = format!("{name}, MTU {mtu}");
            bench.step(&context)?;
            let mut measure = || {
                set_both(&running, &format!("mtu {mtu}"))?;
                running.check_alive()?;
                stream(bench, &running, Direction::Forward)
            };
            rates.push(failed.unless_failed(&context, measure())?);
        }
        Ok(rates)
    })?;
    found.problems.extend(failed.problems);
    let column = |(name, rounds): (&&str, &Vec<_>)| column(name, (sweep.mtus)(name), rounds);
    Ok(measured.iter().map(column).collect())
}

/// The column of a cipher, from the rates of each round at these MTUs. Rows of others are empty.
fn column(name: &str, mtus: &[u32], rounds: &[Option<Vec<Option<f64>>>]) -> Figures {
    let cipher = CIPHERS.iter().find(|cipher| cipher.0 == name);
    let there = cipher.map_or([None; 8], |cipher| cipher.3);
    let of = |mtu: u32| -> Vec<Option<f64>> {
        let Some(index) = mtus.iter().position(|known| *known == mtu) else {
            return Vec::new();
        };
        let rate = |rates: &Option<Vec<Option<f64>>>| *rates.as_ref()?.get(index)?;
        rounds.iter().map(rate).collect()
    };
    let rows = MTUS.into_iter().zip(there).map(|(mtu, published)| {
        let row = Row::new(mtu.to_string(), published).own(cipher.is_none());
        row.with(of(mtu))
    });
    Figures {
        base: MTUS[SMALL].to_string(),
        ..Figures::new(name, "Mbit/s", rows)
    }
}

fn curves(columns: &[Figures]) -> Curves {
    let line = |column: &Figures, published: bool| {
        let words = if published { ", published" } else { "" };
        let rows = MTUS.iter().zip(&column.rows);
        let points = rows.filter_map(|(mtu, row)| {
            let value = if published {
                row.published
            } else {
                row.median()
            };
            Some([f64::from(*mtu), value?])
        });
        Curve {
            own: column.rows.iter().any(|row| row.own),
            published,
            ..Curve::new(format!("{}{words}", column.title), points)
        }
    };
    let here = columns.iter().map(|column| line(column, false));
    let there = columns.iter().map(|column| line(column, true));
    let curves = here.chain(there).filter(|curve| curve.points.len() > 1);
    let title = "throughput of one TCP stream, by cipher";
    let axes = ["MTU inside the tunnel, bytes", "Mbit/s"];
    Curves::new("mtu-cipher-throughput", title, axes, curves).logarithmic([true; 2])
}

/// Compares a link of this rate with tunnels without a cipher over it, and with Seikan. Columns
/// come from sweeps, each with what its rows are called besides.
fn without_cipher(
    bench: &mut Bench<'_>,
    sweeps: &[(&[Figures], &str)],
    rate: Option<u64>,
    found: &mut Experiment,
) -> Result<Figures> {
    let mut figures = raw(bench, rate, found)?;
    for (columns, besides) in sweeps {
        let named = |name: &str| columns.iter().find(|column| column.title == name);
        let published = besides.is_empty();
        if let Some(none) = named(NONE) {
            figures.rows.extend(PLAIN.map(|(place, name, there)| {
                let there = Some(there).filter(|_| published);
                Row::new(format!("{name}{besides}"), there).with(none.rows[place].rounds.clone())
            }));
        }
        for own in [OWN_NONE, OWN_AES].into_iter().filter_map(named) {
            let measured = own.rows.iter().find(|row| !row.rounds.is_empty());
            figures.rows.extend(measured.map(|row| {
                let name = format!("{}, MTU {}{besides}", own.title, row.name);
                Row::new(name, None).own(true).with(row.rounds.clone())
            }));
        }
    }
    Ok(figures)
}

/// The order of the source's table for 10 Gbit/s, row by row.
fn order(figures: &Figures, found: &mut Experiment) {
    let [raw, no_checksum, ..] = RAW.map(|(name, ..)| name);
    let rows = [raw, no_checksum].into_iter();
    let rows: Vec<&str> = rows.chain(PLAIN.map(|(_, name, _)| name)).collect();
    let claims = rows.windows(2).map(|pair| figures.claim(pair[0], pair[1]));
    found.claims.extend(claims);
}

/// Measures AES where both ends are alike, and where host B lacks AES instructions and either
/// decrypts or encrypts.
fn both_directions(
    bench: &mut Bench<'_>,
    rate: u64,
    found: &mut Experiment,
) -> Result<Vec<noise::Line>> {
    let rows = (&SETUPS[..], setup_name);
    let rounds = cipher_rounds(bench);
    let measured = bench.so_many_rounds(rounds, rows, found, |bench, (cipher, slow, _)| {
        let far = slow.then(library::without_aes);
        let tunnel = openvpn(cipher, [Vec::new(), far.into_iter().collect()])?;
        let running = bench.start_over(&tunnel, bench.link(Some(rate)))?;
        set_both(&running, &format!("mtu {}", MTUS[MIDDLE]))?;
        let of = |direction| stream(bench, &running, direction);
        Ok([of(Direction::Forward)?, of(Direction::Reverse)?])
    })?;
    let rows = measured.iter().flat_map(|(setup, rounds)| {
        [0, 1].map(|direction| {
            let rates = rounds.iter().map(|rates| Some((*rates)?[direction]));
            Row::new(direction_name(setup, direction), setup.2[direction]).with(rates)
        })
    });
    let title = format!("OpenVPN, MTU {}", MTUS[MIDDLE]);
    let figures = Figures::new(titled(&title, Some(rate)), "Mbit/s", rows);
    let setting = format!("MTU {}, 1 Gbit/s", MTUS[MIDDLE]);
    let name = |(setup, direction): (usize, usize)| direction_name(&SETUPS[setup], direction);
    let lines = COMPARED.map(|(words, more, less, published)| {
        let claim = figures.claim(&name(more), &name(less));
        noise::Line::of(words, claim, &setting, published)
    });
    found.figures.push(figures);
    Ok(lines.into())
}

fn setup_name((cipher, slow, _): &Setup) -> String {
    let words = if *slow {
        "B without AES-NI"
    } else {
        "ends alike"
    };
    format!("{cipher}, {words}")
}

/// Name of a row of [`both_directions`].
fn direction_name(setup: &Setup, direction: usize) -> String {
    let does = ["B decrypts", "B encrypts"][direction];
    format!("{}, {does}", setup_name(setup))
}

/// Claims about larger packets, instructions and no cipher, and about Seikan and the best other
/// tunnel.
fn claims(columns: &[Figures], found: &mut Experiment) {
    let large = MTUS[LARGE].to_string();
    for cipher in [CBC, BLOWFISH] {
        let column = columns.iter().find(|column| column.title == cipher);
        let claim = column.map(|column| column.claim(&large, &MTUS[SMALL].to_string()));
        found.claims.extend(claim);
    }
    // Compare ciphers at the same MTU.
    let across = |place: usize| {
        let rows = columns.iter().map(|column| Row {
            name: column.title.clone(),
            ..column.rows[place].clone()
        });
        Figures::new(format!("MTU {}", MTUS[place]), "Mbit/s", rows)
    };
    let mut none = across(MIDDLE).claim(NONE, CBC);
    // Both published figures are with AES instructions.
    none.published = Some(PUBLISHED_NONE / PUBLISHED_CBC);
    let large = across(LARGE);
    let claims = [none, large.claim(CBC, NO_AES), large.claim(OWN_AES, CBC)];
    found.claims.extend(claims);
    let own = columns.iter().find(|column| column.title == OWN_AES);
    let rates = own.into_iter().flat_map(|own| &own.rows);
    let rates: Vec<f64> = rates.filter_map(Row::median).collect();
    if let Some(Spread { min, max, .. }) = Spread::of(&rates) {
        found.notes.push(format!(
            "{OWN_AES} has {min:.0} to {max:.0} Mbit/s over all MTUs: its interface takes super-packets of 60 KiB from \
             the kernel, whatever its MTU, and seals them in runs of datagrams that fit the way."
        ));
    }
}

/// Diagnoses a slow cipher, small packets, and a link without offloads.
fn diagnoses(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    for (cipher, mtu, good, right) in [
        (NO_AES, MTUS[LARGE], CBC, Cause::CipherBound),
        (NONE, 576, NONE, Cause::PacketsTooSmall),
    ] {
        let mut columns = found.grids[0].columns.iter();
        let good = columns.find(|column| column.title == good);
        let expected = good.and_then(|column| column.rows[LARGE].median());
        let of = format!("OpenVPN, {cipher}, MTU {mtu}");
        bench.step(format!("the doctor on {of}"))?;
        let running = bench.start_over(&with_cipher(cipher)?, bench.link(None))?;
        set_both(&running, &format!("mtu {mtu}"))?;
        look(bench, found, (&of, &running), expected, right)?;
    }
    let (name, ..) = RAW[2];
    bench.step(format!("the doctor on {name}"))?;
    let running = start_raw(bench, &RAW[2], None)?;
    let whole = found.figures.iter().find_map(|f| f.median(RAW[0].0));
    look(bench, found, (name, &running), whole, Cause::OffloadMissing)
}

/// Runs the doctor at host A under load.
fn look(
    bench: &Bench<'_>,
    found: &mut Experiment,
    (name, running): (&str, &Running),
    expected: Option<f64>,
    right: Cause,
) -> Result<()> {
    let looker = Looker {
        expected,
        ..Looker::at(name, running, &running.hosts.a, right)
    };
    looker.note(&LiveOptions::default(), running, bench.desk, found)
}

/// Returns OpenVPN or Seikan with the cipher of this name.
fn with_cipher(name: &str) -> Result<Arc<dyn Tunnel>> {
    if let Some((_, cipher)) = OWN.iter().find(|(own, _)| *own == name) {
        if name == OWN_NONE {
            return null::tunnel();
        }
        let tunnel = Seikan::with_cipher(cipher);
        tunnel.availability()?;
        return Ok(Arc::new(tunnel));
    }
    let environment = match name {
        NO_AES => vec![library::without_aes()],
        SLOW_CBC | SLOW_BLOWFISH => vec![library::without_extensions()],
        _ => Vec::new(),
    };
    openvpn(name, [environment.clone(), environment])
}

/// Returns OpenVPN with the cipher of this name, and variables of its environment at both ends.
fn openvpn(name: &str, environment: [Vec<(String, String)>; 2]) -> Result<Arc<dyn Tunnel>> {
    let cipher = CIPHERS.iter().find(|cipher| cipher.0 == name);
    let mut words = vec!["--tun-mtu", "60000", "--mssfix", "0"];
    if let Some((_, algorithm, further, _)) = cipher {
        words.extend(*further);
        words.extend(["--cipher", algorithm, "--data-ciphers", algorithm]);
    }
    let arguments: Vec<String> = words.into_iter().map(str::to_owned).collect();
    let changes = Changes {
        arguments: [arguments.clone(), arguments],
        environment,
    };
    lookup("openvpn", &changes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Doing;
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
            let running = bench.start_over(&tunnel, bench.link(None))?;
            let variable = format!("{name}={value}");
            for program in &running.started.processes {
                let file = format!("/proc/{}/environ", program.pid());
                let environment = std::fs::read(&file).doing("read it")?;
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
        let rows = (1..)
            .zip(names)
            .map(|(place, name)| Row::new(name, None).with([Some(100.0 / f64::from(place))]));
        let figures = Figures::new("t", "Mbit/s", rows);
        let mut found = Experiment::default();
        order(&figures, &mut found);
        assert_eq!(found.claims.len(), 4);
        assert!(found.claims.iter().all(Claim::holds));
    }

    #[test]
    fn the_published_figures_belong_to_the_swept_mtus() {
        for cipher in [CBC, BLOWFISH] {
            let known = CIPHERS.iter().find(|of| of.0 == cipher).expect(cipher);
            let published = MTUS.iter().zip(known.3).filter(|of| of.1.is_some());
            let mtus: Vec<u32> = published.map(|(mtu, _)| *mtu).collect();
            assert_eq!(mtus, SWEPT);
        }
    }
}

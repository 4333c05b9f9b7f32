//! The results of a bench as a page of 80 columns and 40 lines.

use std::fmt::Write;

use super::figures::{Cpu, Direction, Figures, PathReport, Report, RoundTrips};
use crate::screen::{BOLD, DIM, RESET, printable, rounded};
use crate::verbs::doctor::text::{Page, paragraph};
use crate::verbs::doctor::view;

/// Columns of the names of rows.
const NAME: usize = 32;
/// Columns of a figure.
const CELL: usize = 16;
/// Figures of the doctor.
const DOCTOR_FIGURES: usize = 2;

/// A cell of a row.
type Cell = fn(&Figures) -> String;

/// Rows of the table: name and cell.
const ROWS: [(&str, Cell); 11] = [
    ("TCP to far, Mbit/s", |it| {
        megabits(it.to_far.tcp_bits_per_second)
    }),
    ("TCP from far, Mbit/s", |it| {
        megabits(it.from_far.tcp_bits_per_second)
    }),
    ("UDP to far, Mbit/s / lost at 80%", |it| udp(&it.to_far)),
    ("UDP from far", |it| udp(&it.from_far)),
    ("round trip, median / p99, ms", |it| round_trip(&it.idle)),
    ("  during TCP to far", |it| {
        round_trip(&it.to_far.round_trips)
    }),
    ("  during TCP from far", |it| {
        round_trip(&it.from_far.round_trips)
    }),
    ("CPU s/Gbit here, to / from far", |it| {
        host(&it.to_far.cpu_here, &it.from_far.cpu_here)
    }),
    ("  tunnel process", |it| {
        process(&it.to_far.cpu_here, &it.from_far.cpu_here)
    }),
    ("CPU s/Gbit at far, to / from far", |it| {
        host(&it.to_far.cpu_far, &it.from_far.cpu_far)
    }),
    ("  tunnel process", |it| {
        process(&it.to_far.cpu_far, &it.from_far.cpu_far)
    }),
];

/// Returns the page.
pub fn render(report: &Report, page: &Page) -> String {
    let mut out = String::new();
    let paths = [
        ("raw", &report.raw),
        ("tunnel", &report.tunnel),
        ("kernel WG", &report.kernel_wireguard),
    ];
    let _ = writeln!(
        out,
        "{BOLD}{} to {} ({}){RESET}, {} s each, port {}",
        printable(&report.here),
        printable(&report.far),
        printable(&report.host),
        report.seconds,
        report.port
    );
    for (name, path) in paths {
        out += &paragraph(
            &format!("{name:<11}"),
            &" ".repeat(11),
            &about(path),
            page.width,
        );
    }
    out.push('\n');
    table(&paths, &mut out);
    out.push('\n');
    out += &paragraph("", "", &comparison(report), page.width);
    if let Some(doctor) = &report.doctor {
        let direction = if doctor.reverse { "from" } else { "to" };
        let _ = writeln!(
            out,
            "\n{DIM}The doctor, during TCP {direction} the far end:{RESET}"
        );
        out += &view::brief(&doctor.verdict, DOCTOR_FIGURES, page);
    }
    out
}

/// Returns the address of a path, or why it was not measured.
fn about(path: &PathReport) -> String {
    let address = path.address.map(|address| address.to_string());
    let interface = path.interface.as_deref().map(printable);
    let place = match (address, interface) {
        (Some(address), Some(interface)) => format!("{address} through {interface}"),
        (Some(address), None) => address,
        (None, _) => String::new(),
    };
    match &path.unavailable {
        Some(reason) if place.is_empty() => format!("not measured: {}", printable(reason)),
        Some(reason) => format!("{place}, not measured: {}", printable(reason)),
        None => place,
    }
}

fn table(paths: &[(&str, &PathReport)], out: &mut String) {
    let mut row = |name: &str, cells: Vec<String>, colour: &str| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>CELL$}")).collect();
        let line = format!("{name:<NAME$}{cells}");
        let _ = writeln!(out, "{colour}{}{RESET}", line.trim_end());
    };
    let names = paths.iter().map(|(name, _)| (*name).to_owned());
    row("", names.collect(), BOLD);
    for (name, cell) in ROWS {
        let cells = paths
            .iter()
            .map(|(_, path)| path.figures.as_ref().map_or("-".to_owned(), cell));
        row(name, cells.collect(), "");
    }
}

fn megabits(bits_per_second: f64) -> String {
    rounded(bits_per_second / 1e6)
}

fn udp(direction: &Direction) -> String {
    let loss = direction.udp.loss.map(|share| share * 100.0);
    let loss = loss.map_or("-".to_owned(), |percent| match percent {
        0.0..1.0 => format!("{percent:.2} %"),
        _ => format!("{} %", rounded(percent)),
    });
    format!("{} / {loss}", megabits(direction.udp.most_bits_per_second))
}

fn round_trip(times: &RoundTrips) -> String {
    match (times.median_us, times.p99_us) {
        (Some(median), Some(p99)) => {
            format!("{} / {}", rounded(median / 1e3), rounded(p99 / 1e3))
        }
        _ => "no answer".to_owned(),
    }
}

fn host(to: &Cpu, from: &Cpu) -> String {
    pair(to.host, from.host)
}

fn process(to: &Cpu, from: &Cpu) -> String {
    match (to.tunnel, from.tunnel) {
        (None, None) => "-".to_owned(),
        (to, from) => pair(to, from),
    }
}

fn pair(to: Option<f64>, from: Option<f64>) -> String {
    let one = |value: Option<f64>| value.map_or("-".to_owned(), rounded);
    format!("{} / {}", one(to), one(from))
}

/// Compares the tunnel with the raw path, and with the kernel's WireGuard.
fn comparison(report: &Report) -> String {
    let Some(tunnel) = &report.tunnel.figures else {
        return "No tunnel was measured, so there is nothing to compare.".to_owned();
    };
    let others = [
        ("the raw path", &report.raw),
        ("the kernel's WireGuard", &report.kernel_wireguard),
    ];
    let shares = others.iter().filter_map(|(name, path)| {
        let other = path.figures.as_ref()?;
        let [to, from] = [false, true].map(|reverse| {
            let rate = |it: &Figures| it.direction(reverse).tcp_bits_per_second;
            rounded(rate(tunnel) / rate(other) * 100.0)
        });
        Some(format!("{to} % / {from} % of {name}"))
    });
    let shares: Vec<String> = shares.collect();
    if shares.is_empty() {
        return "There is no other path to compare the tunnel with.".to_owned();
    }
    format!(
        "The tunnel carries {} over TCP to / from far.",
        shares.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use seikan_diagnose::{Evidence, diagnose};

    use super::super::figures::{Diagnosis, Udp};
    use super::*;
    use crate::screen::width;

    fn figures(bits: f64) -> Figures {
        let cpu = Cpu {
            host: Some(0.123_456),
            tunnel: Some(0.1),
        };
        let times = RoundTrips {
            sent: 100,
            lost: 0,
            median_us: Some(12_345.0),
            p99_us: Some(123_456.0),
        };
        let direction = || Direction {
            tcp_bits_per_second: bits,
            round_trips: times,
            cpu_here: cpu,
            cpu_far: cpu,
            udp: Udp {
                most_bits_per_second: bits,
                steady_bits_per_second: bits,
                loss: Some(0.0123),
            },
        };
        Figures {
            idle: times,
            to_far: direction(),
            from_far: direction(),
        }
    }

    fn path(address: &str, bits: f64) -> PathReport {
        PathReport {
            address: address.parse::<IpAddr>().ok(),
            figures: Some(figures(bits)),
            ..PathReport::default()
        }
    }

    #[test]
    fn a_page_has_80_columns_and_40_lines() {
        let report = Report {
            version: 1,
            host: "root@hub.example.org".into(),
            here: "laptop".into(),
            far: "hub".into(),
            seconds: 8,
            port: 9588,
            raw: path("2001:db8:1111:2222:3333:4444:5555:6666", 98_765e6),
            tunnel: path("fd00:1111:2222:3333:4444:5555:6666:7777", 12_345e6),
            kernel_wireguard: path("198.18.0.2", 23_456e6),
            doctor: Some(Diagnosis {
                reverse: false,
                verdict: diagnose(&Evidence::default()),
            }),
        };
        let page = Page {
            width: 80,
            unicode: false,
        };
        let text = render(&report, &page);
        assert!(text.lines().all(|line| width(line) <= 80), "{text}");
        // This verdict has one figure; another one and the remedy usually have ten lines at most.
        assert!(text.lines().count() <= 40 - 10, "{text}");
        assert!(text.contains("12.5 % / 12.5 % of the raw path"), "{text}");
        assert!(text.contains(" 12.3 / 123 "), "{text}");
        assert!(text.contains(" 98,765 / 1.23 % "), "{text}");
    }

    #[test]
    fn a_path_that_was_not_measured_has_its_reason() {
        let missing = PathReport::unavailable("port 9588 does not answer");
        assert_eq!(about(&missing), "not measured: port 9588 does not answer");
    }
}

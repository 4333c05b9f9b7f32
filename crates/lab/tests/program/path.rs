//! The comparison over emulated paths, by the real program.

use std::net::UdpSocket;
use std::time::Duration;

use seikan_lab::bench::Load;
use seikan_lab::bench::path::{Figure, PathReport};
use seikan_lab::site::Link;
use seikan_lab::tunnel::{self, Changes};
use seikan_lab::wire::{Faults, Wire, WireFaults};
use seikan_ui::Interrupt;

use crate::common::skip;

/// Runs `seikan-lab bench --path` and reads its JSON; `None`, with a message, if the machine cannot.
fn compared(words: &[&str]) -> Option<PathReport> {
    if let Err(reason) = Wire::availability() {
        skip(&reason);
        return None;
    }
    if !nix::unistd::geteuid().is_root() {
        skip("the lab needs root");
        return None;
    }
    let (works, report) = super::bench(&[&["--path"], words].concat());
    assert!(works);
    Some(report)
}

#[test]
fn tunnels_are_compared_over_a_slow_path() {
    let words = [
        "--only",
        "raw,native",
        "--rtt",
        "10",
        "--rate",
        "20",
        "--load",
        "tcp1,web,voice",
    ];
    let Some(report) = compared(&words) else {
        return;
    };
    let [cell] = &report.cells[..] else {
        panic!("{report:?}");
    };
    for tunnel in &cell.tunnels {
        assert!(tunnel.errors.is_empty(), "{tunnel:?}");
        let of = |load, figure| {
            let summary = tunnel.load(load).expect("a load");
            summary.median(figure).expect("a figure")
        };
        // 1,448 of 1,514 bytes are data without a tunnel.
        let goodput = of(Load::Tcp1, Figure::GoodputMbit);
        assert!((1.0..20.0).contains(&goodput), "{tunnel:?}");
        let wire = of(Load::Tcp1, Figure::WireBytesPerByte);
        assert!((1.04..1.5).contains(&wire), "{tunnel:?}");
        assert!(of(Load::Web, Figure::PageMs) > 10.0, "{tunnel:?}");
        assert!(of(Load::Voice, Figure::RttMs) > 10.0, "{tunnel:?}");
    }
}

#[test]
fn a_tunnel_comes_back_after_a_change_of_address() {
    let words = ["--only", "raw,wireguard", "--rtt", "10", "--load", "roam"];
    let Some(report) = compared(&words) else {
        return;
    };
    let [raw, tunnel] = &report.cells[0].tunnels[..] else {
        panic!("{report:?}");
    };
    assert!(raw.loads[0].figures.is_empty(), "{raw:?}");
    assert!(
        tunnel.loads[0].median(Figure::VoiceBackS).is_some(),
        "{tunnel:?}"
    );
}

/// 60 datagrams leave in a quarter of the round trip of 40 ms, at 72 of 100 Mbit/s. At once they
/// would exceed the queue of 32 by more than 20. On a busy machine the wire may take several
/// milliseconds of datagrams at once, so one of five bursts has to fit.
#[test]
fn a_burst_through_a_native_tunnel_fits_a_short_queue() {
    let faults = Faults {
        delay_us: 20_000,
        nic_bits: 10_000_000_000,
        rate_bits: 100_000_000,
        queue_frames: 32,
        ..Faults::default()
    };
    let link = Link::with_faults(WireFaults {
        punctual: true,
        ..WireFaults::both(faults)
    });
    let native = tunnel::named("seikan-native", &Changes::default()).expect("a tunnel");
    let started =
        Wire::availability().and_then(|()| tunnel::start(&native, link, &Interrupt::new()));
    let running = match started {
        Ok(running) => running,
        Err(reason) => return skip(&reason),
    };
    // The search for the path's MTU measures the round trip.
    std::thread::sleep(Duration::from_secs(2));
    let [a, b] = running.hosts.both();
    let overflowed = || {
        let wire = running.hosts.wire.as_ref().expect("a wire");
        wire.counts().expect("counts").a_to_b.overflowed
    };
    let burst = || {
        let socket = UdpSocket::bind((a.inner, 0)).expect("bind");
        for _ in 0..60 {
            socket.send_to(&[7; 1200], (b.inner, 4000)).expect("sent");
        }
    };
    let lost = || {
        let before = overflowed();
        a.run(burst).expect("the burst");
        std::thread::sleep(Duration::from_millis(300));
        overflowed() - before
    };
    let bursts: Vec<u64> = std::iter::repeat_with(lost).take(5).collect();
    assert!(bursts.contains(&0), "{bursts:?} datagrams did not fit");
}

#[test]
fn options_of_paths_need_a_path() {
    for (words, complaint) in [
        (&["bench", "--loss", "1"][..], "--path"),
        (&["bench", "--loads", "voice"], "--path"),
        (&["bench", "--path", "--rate", "0"], "--rate 0"),
        (&["bench", "--path", "--loads", "udp"], "the load udp"),
    ] {
        let output = super::lab().args(words).output().expect("seikan-lab");
        let written = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{written}");
        assert!(written.contains(complaint), "{written}");
    }
}

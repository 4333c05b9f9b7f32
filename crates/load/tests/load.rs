//! The load generator against a real kernel: over the loopback of a fresh namespace.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use seikan_load::{
    Direction, Ends, LatencyOptions, LoadError, Pattern, TcpOptions, UdpOptions, ping, tcp_bulk,
    udp_flood, verify_stream, wait_reachable, web,
};
use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;

const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Returns a new namespace, or `None` with a message if this process may not create one.
fn host() -> Option<NetNs> {
    match NetNs::create() {
        Ok(host) => Some(host),
        Err(error) => {
            let required = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some_and(|v| v == "1");
            assert!(!required, "required, but: {error}");
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

fn loopback(host: &NetNs, target: IpAddr) -> Ends<'_> {
    Ends {
        client: host,
        server: host,
        target,
        sources: &[],
        congestion: None,
        forward: None,
    }
}

fn short() -> TcpOptions {
    TcpOptions {
        warmup: Duration::from_millis(50),
        duration: Duration::from_millis(300),
        interval: Duration::from_millis(100),
        seed: 42,
        ..TcpOptions::default()
    }
}

#[test]
fn a_stream_uses_the_congestion_control_that_is_asked_for() {
    let Some(host) = host() else {
        return;
    };
    let with = |name| Ends {
        congestion: Some(name),
        ..loopback(&host, V4)
    };
    // CUBIC need not be among those that the machine allows to a namespace.
    tcp_bulk(&with("cubic"), &short(), &Interrupt::new()).expect("load");
    let error = tcp_bulk(&with("nonesuch"), &short(), &Interrupt::new()).expect_err("none");
    assert!(
        error.to_string().contains("congestion control nonesuch"),
        "{error}"
    );
}

#[test]
fn every_byte_of_a_tcp_stream_is_verified() {
    let Some(host) = host() else {
        return;
    };
    let options = TcpOptions {
        verify: true,
        streams: 3,
        ..short()
    };
    let report = tcp_bulk(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    let measured: u64 = report.stream_bytes.iter().sum();
    assert!(measured > 1_000_000, "{report:?}");
    assert!(report.verified_bytes >= measured);
}

#[test]
fn the_round_trip_is_that_of_the_senders_kernel() {
    let Some(host) = host() else {
        return;
    };
    for direction in [Direction::Forward, Direction::Reverse] {
        let options = TcpOptions {
            streams: 2,
            direction,
            ..short()
        };
        let report = tcp_bulk(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
        // The loopback has no distance, so the time is short. A receiver has no estimate, and would
        // report 0.
        let time = report.round_trip_us.expect("Linux has it");
        assert!(time > 0.0 && time < 10e6, "{report:?}");
    }
}

#[test]
fn web_pages_arrive_whole() {
    let Some(host) = host() else {
        return;
    };
    let time = Duration::from_millis(200);
    let report = web(&loopback(&host, V4), time, &Interrupt::new()).expect("pages");
    assert!(report.pages > 0 && report.failed == 0, "{report:?}");
    assert!(report.p50_ms > 0.0 && report.p50_ms <= report.p99_ms);
}

#[test]
fn rate_is_bytes_over_time() {
    let Some(host) = host() else {
        return;
    };
    let report = tcp_bulk(&loopback(&host, V4), &short(), &Interrupt::new()).expect("load");
    let bytes: u64 = report.stream_bytes.iter().sum();
    assert!((report.seconds - 0.3).abs() < 0.1, "{report:?}");
    let rate = bytes as f64 * 8.0 / 1e9 / report.seconds;
    assert!((report.gbit_per_second / rate - 1.0).abs() < 1e-9);
    let by_intervals: f64 = report
        .intervals
        .iter()
        .map(|i| i.gbit_per_second * i.seconds)
        .sum();
    assert!((by_intervals / (rate * report.seconds) - 1.0).abs() < 1e-9);
}

#[test]
fn reverse_flows_from_server_to_client_only() {
    let Some(host) = host() else {
        return;
    };
    let options = TcpOptions {
        direction: Direction::Reverse,
        ..short()
    };
    let report = tcp_bulk(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    assert!(report.reverse_gbit_per_second > 0.0);
    assert_eq!(report.forward_gbit_per_second, 0.0);
}

#[test]
fn both_directions_at_once_and_over_ipv6() {
    let Some(host) = host() else {
        return;
    };
    let options = TcpOptions {
        direction: Direction::Both,
        streams: 2,
        ..short()
    };
    let ends = loopback(&host, Ipv6Addr::LOCALHOST.into());
    let report = tcp_bulk(&ends, &options, &Interrupt::new()).expect("load");
    assert_eq!(report.stream_bytes.len(), 4);
    assert!(report.stream_bytes.iter().all(|b| *b > 0), "{report:?}");
}

#[test]
fn a_hundred_and_twenty_eight_streams() {
    let Some(host) = host() else {
        return;
    };
    let options = TcpOptions {
        streams: 128,
        ..short()
    };
    let report = tcp_bulk(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    assert_eq!(report.stream_bytes.len(), 128);
}

#[test]
fn an_interrupted_load_ends_at_once() {
    let Some(host) = host() else {
        return;
    };
    let interrupt = Interrupt::new();
    let waker = interrupt.clone();
    let start = Instant::now();
    let waking = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        waker.raise();
    });
    let options = TcpOptions {
        duration: Duration::from_secs(60),
        ..short()
    };
    let outcome = tcp_bulk(&loopback(&host, V4), &options, &interrupt);
    assert!(matches!(outcome, Err(LoadError::Interrupted(_))));
    assert!(start.elapsed() < Duration::from_secs(30));
    waking.join().expect("waker");
}

/// A proxy that flips one forwarded bit.
#[test]
fn a_corrupted_byte_far_into_the_stream_is_detected() {
    let Some(host) = host() else {
        return;
    };
    const LENGTH: usize = 1 << 20;
    const WRONG: usize = 777_777;
    let pattern = Pattern::new(5);
    let (from, to) = host
        .run(|| {
            let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
            let to = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
            (listener.accept().expect("accept").0, to)
        })
        .expect("namespace");
    let sender = std::thread::spawn(move || {
        let mut bytes = vec![0; LENGTH];
        pattern.fill(0, &mut bytes);
        bytes[WRONG] ^= 1;
        (&to).write_all(&bytes).expect("write");
    });
    let outcome = verify_stream(&mut (&from).take(LENGTH as u64), 3, pattern);
    sender.join().expect("sender");
    assert!(
        matches!(outcome, Err(LoadError::Corrupt { stream: 3, offset }) if offset == WRONG as u64),
        "{outcome:?}"
    );
}

#[test]
fn an_undisturbed_udp_flow_loses_nothing() {
    let Some(host) = host() else {
        return;
    };
    let options = UdpOptions {
        rate: Some(20e6),
        duration: Duration::from_millis(500),
        verify: true,
        ..UdpOptions::default()
    };
    let report = udp_flood(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    assert_eq!(
        (
            report.lost,
            report.reordered,
            report.duplicated,
            report.corrupt
        ),
        (0, 0, 0, 0),
        "{report:?}"
    );
    // In bits, not bytes, and not as fast as it goes (hundreds of times as much); closer than a
    // factor of two would assert how evenly a busy machine runs threads.
    assert!((0.01..0.04).contains(&report.gbit_per_second), "{report:?}");
}

/// Behind a translating gateway the server learns the client's address from its datagrams only.
#[test]
fn a_udp_flow_can_go_in_the_other_direction() {
    let Some(host) = host() else {
        return;
    };
    let options = UdpOptions {
        direction: Direction::Reverse,
        rate: Some(20e6),
        duration: Duration::from_millis(300),
        verify: true,
        ..UdpOptions::default()
    };
    let report = udp_flood(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    assert!(report.sent > 0 && report.received > 0, "{report:?}");
    assert_eq!((report.lost, report.corrupt), (0, 0), "{report:?}");
    let both = UdpOptions {
        direction: Direction::Both,
        ..options
    };
    assert!(udp_flood(&loopback(&host, V4), &both, &Interrupt::new()).is_err());
}

#[test]
fn loss_at_a_tiny_receive_buffer_is_counted_and_located() {
    let Some(host) = host() else {
        return;
    };
    let options = UdpOptions {
        receive_buffer: Some(1),
        duration: Duration::from_millis(500),
        ..UdpOptions::default()
    };
    let report = udp_flood(&loopback(&host, V4), &options, &Interrupt::new()).expect("load");
    assert!(report.lost > 0, "{report:?}");
    assert_eq!(report.sent, report.received + report.lost);
    assert_eq!(
        report.lost_at_receiver, report.lost,
        "loopback loses nowhere else: {report:?}"
    );
}

#[test]
fn a_datagram_larger_than_ip_allows_is_refused() {
    let Some(host) = host() else {
        return;
    };
    let options = UdpOptions {
        datagram: 65_508,
        ..UdpOptions::default()
    };
    let outcome = udp_flood(&loopback(&host, V4), &options, &Interrupt::new());
    assert!(matches!(outcome, Err(LoadError::Usage(_))));
}

#[test]
fn loopback_answers_pings_within_ten_milliseconds() {
    let Some(host) = host() else {
        return;
    };
    for target in [V4, Ipv6Addr::LOCALHOST.into()] {
        let options = LatencyOptions {
            count: 20,
            ..LatencyOptions::default()
        };
        let report = ping(&loopback(&host, target), &options, &Interrupt::new()).expect("ping");
        assert_eq!((report.sent, report.received), (20, 20));
        assert!(
            report.min_us > 0.0 && report.min_us <= report.p50_us && report.p50_us <= report.p99_us
        );
        assert!(report.p50_us < 10_000.0, "{report:?}");
    }
}

#[test]
fn an_address_without_a_host_times_out() {
    let Some(host) = host() else {
        return;
    };
    let ends = loopback(&host, Ipv4Addr::new(192, 0, 2, 1).into());
    let outcome = wait_reachable(&ends, Duration::from_millis(300), &Interrupt::new(), || {
        Ok::<_, LoadError>(())
    });
    assert!(matches!(outcome, Err(LoadError::Timeout { .. })));
}

#[test]
fn sockets_stay_in_their_host() {
    let (Some(one), Some(other)) = (host(), host()) else {
        return;
    };
    let bound = one
        .run(|| UdpSocket::bind("127.0.0.1:0").expect("bind"))
        .expect("namespace");
    let address: SocketAddr = bound.local_addr().expect("address");
    let again = other.run(|| UdpSocket::bind(address)).expect("namespace");
    assert!(again.is_ok(), "the same port is free in another host");
}

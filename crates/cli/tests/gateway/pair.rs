//! Two gateways on one local network: one is active, and the other takes over.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io::IoSlice};

use seikan_lab::site::Host;
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, RECEIVE_BUFFER_LEN};
use seikan_sys::udp::{Transmit, UdpOptions, UdpSocket};
use seikan_wire::VNET_HDR_LEN;
use seikan_wire::arp::{Arp, Operation};
use seikan_wire::ethernet::{ETHERTYPE_ARP, Ethernet, HEADER_LEN, Mac};

use crate::common::{PATIENCE, Tunnel, eventually};
use crate::gateway::lan::end;
use crate::gateway::site::{
    DEVICE, DEVICE_INTERFACE, DEVICE_MAC, LAN, PORT, Plan, REMOTE, SHOWN, Site, WAN, add_addresses,
    at_site, index, new_host,
};
use crate::gateway::stream::Stream;

/// The second gateway.
struct Second {
    host: Host,
    config: PathBuf,
}

/// Runs a test with two gateways, the first of which is active.
fn with_two(test: impl FnOnce(&Site, &Second, [Tunnel; 3])) {
    let plan = Plan {
        gateway: "priority = 100",
        ..Plan::default()
    };
    at_site(&plan, |site| {
        let host = new_host("second").expect("host");
        site.lan.plug(&host, LAN, 1500);
        site.wan.plug(&host, WAN, 1500);
        add_addresses(&host, WAN, ["10.0.0.3/24", "fd00:2::3/64"]);
        let text = fs::read_to_string(&site.gateway_config).expect("read");
        let text = text.replace("priority = 100", "priority = 50");
        let config = site.write("h", &text);
        let second = Second { host, config };
        let [first, remote] = site.up();
        let standby = site.start(&second.host, &second.config);
        eventually("the first is not active", || {
            active(site, &second) == [true, false]
        });
        site.reaches(&site.device, SHOWN[0]);
        test(site, &second, [first, standby, remote]);
    });
}

/// Returns the active gateway, by the status of both.
fn active(site: &Site, second: &Second) -> [bool; 2] {
    let hosts = [
        (&site.gateway, &site.gateway_config),
        (&second.host, &second.config),
    ];
    hosts.map(|(host, config)| site.status(host, config)["gateway"]["responder"]["active"] == true)
}

/// Returns the number of answers to a device's ARP request for the remote.
fn answers_to_arp(site: &Site) -> usize {
    let socket = PacketOptions::new(Accept::Host(DEVICE_MAC));
    let interface = index(&site.device, DEVICE_INTERFACE);
    let socket = site.device.run(|| PacketSocket::open(interface, &socket));
    let socket = socket.expect("namespace").expect("packet socket");
    let [device, remote] = ["192.168.1.10", SHOWN[0]].map(|a| a.parse().expect("address"));
    let asked = Arp::request(Mac(DEVICE_MAC), device, remote);
    let mut frame = vec![0; VNET_HDR_LEN + HEADER_LEN];
    let header = Ethernet::new(Mac::BROADCAST, Mac(DEVICE_MAC), None, ETHERTYPE_ARP);
    header.write(&mut frame[VNET_HDR_LEN..]);
    frame.extend(asked.to_bytes());
    socket.send_vectored(&[IoSlice::new(&frame)]).expect("send");
    std::thread::sleep(Duration::from_millis(300));
    let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
    let mut answers = 0;
    while let Ok(received) = socket.receive(&mut buffer) {
        let frame = &buffer[VNET_HDR_LEN..received.length];
        let is_answer = Ethernet::parse(frame).is_ok_and(|e| e.ethertype == ETHERTYPE_ARP)
            && Arp::parse(&frame[HEADER_LEN..])
                .is_ok_and(|arp| arp.operation == Operation::Reply && arp.sender == remote);
        answers += usize::from(is_answer);
    }
    answers
}

/// Streams both ways survive `event` with a gap below `limit`.
fn goes_on(site: &Site, limit: Duration, event: impl FnOnce()) {
    let streams = [
        Stream::start(&site.device, &site.remote, SHOWN[0], 1_000_000),
        Stream::start(&site.remote, &site.device, DEVICE[1], 1_000_000),
    ];
    for stream in &streams {
        stream.goes_on_within(PATIENCE);
    }
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    event();
    // A stalled stream fails by its gap, with a figure.
    for stream in &streams {
        stream.goes_on_within(PATIENCE);
    }
    std::thread::sleep(limit.saturating_sub(begin.elapsed()));
    for (stream, name) in streams
        .into_iter()
        .zip(["from the device", "to the device"])
    {
        let gap = stream.finish().longest_gap;
        eprintln!("{name}: {gap:.2?} without a byte");
        assert!(gap < limit, "{name}: {gap:.2?} without a byte");
    }
}

#[test]
fn the_second_takes_over_from_one_that_is_killed() {
    with_two(|site, second, [mut first, _standby, _remote]| {
        assert_eq!(answers_to_arp(site), 1);
        goes_on(site, Duration::from_secs(3), || {
            first.child.kill().expect("kill");
            first.child.wait().expect("wait");
        });
        assert_eq!(answers_to_arp(site), 1);
        // A returning gateway is standby, whatever its priority: no second interruption.
        let begin = Instant::now();
        let _first = site.start(&site.gateway, &site.gateway_config);
        while begin.elapsed() < Duration::from_secs(3) {
            assert_eq!(active(site, second), [false, true]);
        }
        assert_eq!(answers_to_arp(site), 1);
        site.reaches(&site.device, SHOWN[1]);
    });
}

#[test]
fn the_second_takes_over_from_one_that_ends() {
    with_two(|site, _second, [first, _standby, _remote]| {
        goes_on(site, Duration::from_secs(1), || {
            let (code, _) = end(first, "TERM");
            assert_eq!(code, Some(0), "{}", site.logs());
        });
        assert_eq!(answers_to_arp(site), 1);
    });
}

#[test]
fn the_second_takes_over_when_the_first_has_no_cable() {
    with_two(|site, second, _tunnels| {
        goes_on(site, Duration::from_secs(3), || {
            site.lan.netlink.set_down(site.gateway_port).expect("down");
        });
        assert_eq!(answers_to_arp(site), 1);
        site.lan.netlink.set_up(site.gateway_port).expect("up");
        goes_on(site, Duration::from_secs(3), || {
            std::thread::sleep(Duration::from_secs(2));
        });
        assert_eq!(active(site, second), [false, true]);
        assert_eq!(answers_to_arp(site), 1);
    });
}

#[test]
fn the_standby_counts_each_datagram_and_packet_that_it_drops() {
    with_two(|site, second, _tunnels| {
        // The kernel joins them on their way; datagrams on loopback pass the filter.
        let send = |from: &str, to: SocketAddr| {
            let sent = second.host.run(|| {
                let from = (from.parse::<IpAddr>().expect("address"), 0).into();
                let socket = UdpSocket::bind(from, &UdpOptions::default()).expect("bind");
                let payload = [4; 40 * 1000];
                socket.send(&Transmit {
                    destination: to,
                    source: None,
                    traffic_class: 0,
                    hop_limit: None,
                    segment_size: Some(1000),
                    payload: &payload,
                })
            });
            sent.expect("namespace").expect("sent");
        };
        let dropped = || {
            let status = site.status(&second.host, &second.config);
            let drops = &status["gateway"]["unattributed"]["drops"];
            drops["standby"].as_u64().unwrap_or(0)
        };
        let remote: IpAddr = REMOTE[0].parse().expect("address");
        let to = [
            ("127.0.0.1", ([127, 0, 0, 1], PORT).into()),
            ("0.0.0.0", (remote, 9).into()),
        ];
        for (from, to) in to {
            let before = dropped();
            send(from, to);
            eventually("not all are counted", || dropped() >= before + 40);
        }
    });
}

//! Rules of a device: hosts that reach it, and hosts that it reaches.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use seikan_lab::site::Host;

use crate::gateway::site::{DEVICE, LISTED, Plan, SHOWN, at_site, ip};

/// Time after which a connection counts as denied; an allowed one opens at once.
const SILENCE: Duration = Duration::from_millis(600);

fn plan() -> Plan {
    let rules = r#"
allow-from = ["10.77.0.2 tcp/5001", "fd77::2 tcp/5001"]
allow-to = ["10.77.0.0/24 udp/7001", "fd77::/64 udp/7001", "10.77.0.2 icmp"]
"#;
    Plan {
        devices: format!("{LISTED}{rules}"),
        ..Plan::default()
    }
}

/// Returns whether a connection opens and a byte comes back.
fn connects(client: &Host, server: &Host, target: &str, port: u16) -> bool {
    let target = SocketAddr::new(ip(target), port);
    let any = if target.is_ipv4() { "0.0.0.0" } else { "[::]" };
    let listener = server.run(|| TcpListener::bind(format!("{any}:{port}")));
    let listener = listener.expect("namespace").expect("listen");
    // accept(2) honours it.
    let socket = socket2::SockRef::from(&listener);
    socket.set_read_timeout(Some(SILENCE)).expect("timeout");
    let answer = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"x")
    });
    let connected = client.run(|| TcpStream::connect_timeout(&target, SILENCE));
    let Ok(mut stream) = connected.expect("namespace") else {
        let _ = answer.join().expect("join");
        return false;
    };
    stream.set_read_timeout(Some(SILENCE)).expect("timeout");
    let answered = stream.read_exact(&mut [0]).is_ok();
    answer.join().expect("join").expect("answer");
    answered
}

/// Returns whether a datagram is answered.
fn is_answered(client: &Host, server: &Host, target: &str, port: u16) -> bool {
    let target = SocketAddr::new(ip(target), port);
    let any = if target.is_ipv4() { "0.0.0.0" } else { "[::]" };
    let open = |host: &Host, port: u16| {
        let socket = host.run(|| UdpSocket::bind(format!("{any}:{port}")));
        let socket = socket.expect("namespace").expect("bind");
        socket.set_read_timeout(Some(SILENCE)).expect("timeout");
        socket
    };
    let (server, client) = (open(server, port), open(client, 0));
    client.send_to(b"x", target).expect("send");
    let Ok((_, from)) = server.recv_from(&mut [0]) else {
        return false;
    };
    server.send_to(b"y", from).expect("send");
    client.recv_from(&mut [0]).is_ok()
}

#[test]
fn only_allowed_hosts_reach_a_device_and_get_answers() {
    at_site(&plan(), |site| {
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        for (n, target) in (1..).zip(DEVICE) {
            assert!(connects(&site.remote, &site.device, target, 5001));
            assert!(!connects(&site.remote, &site.device, target, 5002));
            assert!(!is_answered(&site.remote, &site.device, target, 5001));
            let status = site.gateway_status();
            let device = &status["devices"][0];
            // The SYN, and the datagram.
            assert!(
                device["denied"]["from"].as_u64() >= Some(2 * n),
                "{device:#}"
            );
            assert_eq!(device["rules"][n as usize - 1]["flows"], 1, "{device:#}");
            assert_eq!(device["denied"]["to"], 0, "{device:#}");
        }
    });
}

#[test]
fn a_device_reaches_only_allowed_hosts_and_gets_answers() {
    at_site(&plan(), |site| {
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        for (n, target) in (1..).zip(SHOWN) {
            assert!(is_answered(&site.device, &site.remote, target, 7001));
            assert!(!is_answered(&site.device, &site.remote, target, 7002));
            assert!(!connects(&site.device, &site.remote, target, 5001));
            let status = site.gateway_status();
            let device = &status["devices"][0];
            assert!(device["denied"]["to"].as_u64() >= Some(2 * n), "{device:#}");
            assert_eq!(device["denied"]["from"], 0, "{device:#}");
        }
    });
}

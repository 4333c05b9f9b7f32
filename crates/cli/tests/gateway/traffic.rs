//! Traffic through a gateway: both families, both directions, both protocols, both modes.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use seikan_lab::site::Host;

use crate::common::eventually;
use crate::gateway::site::{
    DEVICE, Plan, REMOTE, SHOWN, at_running_site, carries, carries_tcp, carries_udp, ip,
};

/// Traffic from the device to the remote at `there`, and back to the device's overlay address.
fn both_directions(plan: &Plan, there: [&str; 2]) {
    at_running_site(plan, |site, _tunnels| {
        for target in there {
            carries(&site.device, &site.remote, target);
        }
        for target in DEVICE {
            carries(&site.remote, &site.device, target);
        }
    });
}

fn transparent(protocol: &'static str) -> Plan {
    Plan {
        protocol,
        ..Plan::default()
    }
}

fn routed(protocol: &'static str) -> Plan {
    Plan {
        mode: "routed",
        remotes: "",
        ..transparent(protocol)
    }
}

fn proxied(protocol: &'static str) -> Plan {
    Plan {
        mode: "routed",
        gateway: "proxy-arp = true",
        ..transparent(protocol)
    }
}

#[test]
fn transparent_native() {
    both_directions(&transparent("native"), SHOWN);
}

#[test]
fn transparent_wireguard() {
    both_directions(&transparent("wireguard"), SHOWN);
}

#[test]
fn routed_native() {
    both_directions(&routed("native"), REMOTE);
}

#[test]
fn routed_wireguard() {
    both_directions(&routed("wireguard"), REMOTE);
}

#[test]
fn proxied_native() {
    both_directions(&proxied("native"), SHOWN);
}

#[test]
fn proxied_wireguard() {
    both_directions(&proxied("wireguard"), SHOWN);
}

#[test]
fn jumbo_frames() {
    let plan = Plan {
        mtu: 9000,
        head: "mtu = 9000",
        remote_head: "mtu = 9000",
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for (there, back) in SHOWN.into_iter().zip(DEVICE) {
            carries_tcp(&site.device, &site.remote, there);
            // A whole frame, with 48 bytes of headers.
            carries_udp(&site.device, &site.remote, there, 8952);
            carries_udp(&site.remote, &site.device, back, 8952);
        }
    });
}

#[test]
fn fragments() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        for (there, back) in SHOWN.into_iter().zip(DEVICE) {
            // The first packet tells an IPv6 sender the maximum length of fragments.
            teach(&site.device, there, 4000);
            carries_udp(&site.device, &site.remote, there, 4000);
            teach(&site.remote, back, 4000);
            carries_udp(&site.remote, &site.device, back, 4000);
        }
    });
}

#[test]
fn a_device_learns_the_mtu_of_the_tunnel() {
    let plan = Plan {
        mtu: 9000,
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for target in SHOWN {
            teach(&site.device, target, 3000);
            eventually(&format!("no path MTU to {target}"), || {
                path_mtu(&site.device, target) == 1444
            });
            carries_udp(&site.device, &site.remote, target, 3000);
        }
    });
}

#[test]
fn a_remote_learns_the_mtu_of_the_lan() {
    let plan = Plan {
        mtu: 1300,
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for target in DEVICE {
            teach(&site.remote, target, 1350);
            eventually(&format!("no path MTU to {target}"), || {
                path_mtu(&site.remote, target) == 1300
            });
            carries_udp(&site.remote, &site.device, target, 1350);
        }
    });
}

#[test]
fn segments_fit_the_tunnel_from_the_first_on() {
    let plan = Plan {
        mtu: 9000,
        head: "mtu = 1420",
        remote_head: "mtu = 9000",
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for ((there, back), headers) in SHOWN.into_iter().zip(DEVICE).zip([40, 60]) {
            let limit = 1420 - headers;
            let mss = accepted_mss(&site.device, &site.remote, there);
            assert!(mss <= limit, "the remote sends {mss} to the device");
            let mss = accepted_mss(&site.remote, &site.device, back);
            assert!(mss <= limit, "the device sends {mss} to {back}");
        }
    });
}

/// Sends a datagram that may be refused as too long, and waits for the ICMP error.
fn teach(from: &Host, to: &str, length: usize) {
    let to = SocketAddr::new(ip(to), 9);
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let send = || -> std::io::Result<usize> {
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        let sent = socket.send(&vec![0; length]);
        // The kernel handles the error only while its socket exists.
        std::thread::sleep(Duration::from_millis(200));
        sent
    };
    let sent = from.run(send).expect("namespace");
    assert_eq!(sent.expect("send"), length);
}

fn path_mtu(from: &Host, to: &str) -> u32 {
    let netlink = from.netlink().expect("netlink");
    netlink.route_get(ip(to), None).expect("route").mtu
}

/// Returns the segments sent by the accepting end of a connection.
fn accepted_mss(client: &Host, server: &Host, target: &str) -> u32 {
    let target = ip(target);
    let any = if target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let listener = server.run(|| TcpListener::bind(any)).expect("namespace");
    let listener = listener.expect("listen");
    let port = listener.local_addr().expect("address").port();
    let connected = client.run(|| TcpStream::connect((target, port)));
    let _connected = connected.expect("namespace").expect("connect");
    let (accepted, _) = listener.accept().expect("accept");
    socket2::SockRef::from(&accepted).tcp_mss().expect("mss")
}

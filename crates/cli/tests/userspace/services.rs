//! Proxies, forwarded and exposed ports.

use crate::common::{ECHO_PORT, Host, PATIENCE, StopsAtEnd, echo, eventually};
use crate::userspace::client::{
    Echo, Target, answers_datagram, assert_echo, connect, http, socks, socks_answers_datagram,
};
use crate::userspace::user::with_tunnels;
use serde_json::Value;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

const PROXY: &str = "127.0.0.1:1080";
const SERVER: &str = "10.80.0.2:7000";

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

#[test]
fn socks_reaches_a_server_at_the_other_end() {
    with_tunnels(&["--socks", "1080"], |world, user| {
        let _server = Echo::at(&world.right.namespace, SERVER);
        let left = &world.left.namespace;
        let stream = socks(left, at(PROXY), &Target::Address(at(SERVER))).expect("connected");
        assert_echo(stream);
        // Nobody listens there: connection refused (RFC 1928, section 6).
        let refused = socks(left, at(PROXY), &Target::Address(at("10.80.0.2:7001")));
        assert_eq!(refused.expect_err("refused"), 5);
        let counts = || -> Value {
            let status = user.status(left, &world.left.interface);
            status["userspace"]["services"]["socks"].clone()
        };
        eventually("both are counted, and closed", || {
            let counts = counts();
            counts["accepted"] == 1 && counts["refused"] == 1 && counts["open"] == 0
        });
        let (received, sent) = (
            counts()["bytes_in"].as_u64(),
            counts()["bytes_out"].as_u64(),
        );
        let bytes = Some(crate::userspace::client::LENGTH as u64);
        assert_eq!((received, sent), (bytes, bytes));
    });
}

#[test]
fn an_http_proxy_reaches_a_server_at_the_other_end() {
    with_tunnels(&["--http", "1080"], |world, _| {
        let _server = Echo::at(&world.right.namespace, SERVER);
        assert_echo(http(&world.left.namespace, at(PROXY), SERVER));
    });
}

#[test]
fn a_forwarded_port_is_that_of_the_other_end() {
    let words = ["--forward", "8080:10.80.0.2:7000"];
    with_tunnels(&words, |world, _| {
        let _server = Echo::at(&world.right.namespace, SERVER);
        let left = &world.left.namespace;
        assert_echo(connect(left, at("127.0.0.1:8080")).expect("connected"));
    });
}

#[test]
fn datagrams_pass_a_forwarded_port() {
    with_tunnels(&["--forward", "5353:10.80.0.2:7/udp"], |world, _| {
        let left = &world.left.namespace;
        assert!(while_echoing(&world.right, || {
            answers_datagram(left, at("127.0.0.1:5353"))
        }));
    });
}

#[test]
fn datagrams_pass_socks() {
    with_tunnels(&["--socks", "1080"], |world, _| {
        let left = &world.left.namespace;
        let server = "10.80.0.2:7".parse().expect("an address");
        assert!(while_echoing(&world.right, || {
            socks_answers_datagram(left, at(PROXY), server)
        }));
    });
}

/// Runs a test while a host echoes datagrams.
fn while_echoing(host: &Host, test: impl FnOnce() -> bool) -> bool {
    assert_eq!(ECHO_PORT, 7);
    let (namespace, stop) = (&host.namespace, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stops = StopsAtEnd(stop);
        scope.spawn(move || namespace.run(|| echo(stop)));
        test()
    })
}

#[test]
fn only_exposed_ports_are_reached_from_the_other_end() {
    with_tunnels(&["--expose", "2222:7000"], |world, _| {
        let _server = Echo::at(&world.left.namespace, "127.0.0.1:7000");
        let right = &world.right.namespace;
        assert_echo(connect(right, at("10.80.0.1:2222")).expect("connected"));
        let other = connect(right, at("10.80.0.1:7000")).expect_err("closed");
        assert_eq!(other.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn its_address_answers_pings() {
    with_tunnels(&["--socks", "1080"], |world, _| {
        let mut ping = Command::new("ping");
        let seconds = PATIENCE.as_secs().to_string();
        ping.args(["-n", "-c", "1", "-w", &seconds, "10.80.0.1"]);
        let child = world
            .right
            .namespace
            .spawn_command(ping.stdout(Stdio::piped()));
        let output = child.expect("ping").wait_with_output().expect("an end");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
    });
}

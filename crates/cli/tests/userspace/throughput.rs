//! Measurements of throughput; they need an idle machine.

use crate::common::{Host, PATIENCE, World, in_world};
use crate::userspace::library::example;
use crate::userspace::user::{NOBODY, User};
use seikan_sys::netns::NetNs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Counts the bytes of one connection; returns Gbit/s from its first byte to its last one.
fn sink(listener: &TcpListener) -> f64 {
    let (mut socket, _) = listener.accept().expect("a connection");
    let mut chunk = vec![0; 1 << 20];
    let mut length = socket.read(&mut chunk).expect("bytes");
    let started = Instant::now();
    loop {
        match socket.read(&mut chunk).expect("bytes") {
            0 => break,
            more => length += more,
        }
    }
    length as f64 * 8e-9 / started.elapsed().as_secs_f64()
}

/// Sends one stream from a host for `time`; returns its rate in Gbit/s.
fn stream(from: &Host, to: &str, listener: &TcpListener, time: Duration) -> f64 {
    std::thread::scope(|scope| {
        let result = scope.spawn(|| sink(listener));
        send(&from.namespace, to, time);
        result.join().expect("a result")
    })
}

/// A listener in the tunnel's network on the right.
fn listener(world: &World) -> TcpListener {
    let bind = || TcpListener::bind("10.80.0.2:7001");
    let bound = world.right.namespace.run(bind);
    bound.expect("namespace").expect("bound")
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Sends for `time`.
fn send(at: &NetNs, to: &str, time: Duration) {
    let mut socket = at
        .run(|| TcpStream::connect(to))
        .expect("namespace")
        .expect("connected");
    // The socket has the same congestion control as the stack in user space.
    let socket_ref = socket2::SockRef::from(&socket);
    socket_ref.set_tcp_congestion(b"cubic").expect("CUBIC");
    let (chunk, end) = (vec![0; 256 << 10], Instant::now() + time);
    while Instant::now() < end {
        socket.write_all(&chunk).expect("sent");
    }
}

/// Prints the throughput of one stream to a tunnel with an interface, by the library and by a
/// forwarded port.
#[test]
#[ignore = "a measurement: it needs an idle machine"]
fn throughput_of_the_library_and_of_a_forwarded_port() {
    in_world(["Protocol = native", ""], |world| {
        let (user, left) = (User::new(NOBODY), &world.left);
        let program = example(&user, "send");
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let listener = listener(world);
        let mut results = [Vec::new(), Vec::new()];
        for _ in 0..5 {
            let (mut tunnel, _) = user.up(left, &["--forward", "5300:10.80.0.2:7001"]);
            let time = Duration::from_secs(3);
            results[0].push(stream(left, "127.0.0.1:5300", &listener, time));
            user.succeed(&left.namespace, &["down", left.config()]);
            tunnel.wait(PATIENCE);
            let words = [left.config(), "10.80.0.2:7001", "3"];
            let mut command = user.command_of(&program, &words);
            command.stderr(Stdio::inherit());
            std::thread::scope(|scope| {
                let result = scope.spawn(|| sink(&listener));
                let mut child = left.namespace.spawn_command(&mut command).expect("started");
                assert!(child.wait().expect("an end").success());
                results[1].push(result.join().expect("a result"));
            });
        }
        let [forward, library] = results.map(median);
        println!(
            "forward {forward:.2} Gbit/s, library {library:.2} Gbit/s, ratio {:.2}",
            library / forward
        );
    });
}

/// An emulated path in place of the cable between two hosts; ends with the test.
struct Path(Child);

impl Path {
    /// 300 Mbit/s, a round trip of 50 ms, a queue of as much, and a loss of 0.1 % in each direction.
    fn between(world: &World) -> Path {
        let [left, right] = [&world.left, &world.right];
        let under = left.netlink.link("under").expect("the cable").index;
        left.netlink.delete_link(under).expect("removed");
        let far = right.namespace.as_fd().as_raw_fd();
        let far = format!("/proc/{}/fd/{far}", std::process::id());
        let mut command = Command::new(concat!(env!("CARGO_BIN_EXE_seikan"), "-lab"));
        command
            .args(["wire", "--near", "under", "--far", "under"])
            .args(["--far-namespace", &far, "--seed", "1", "--punctual"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let started = left.namespace.spawn_command(&mut command);
        let mut path = Path(started.expect("started"));
        let faults =
            r#"{"delay_us":25000,"loss":0.001,"rate_bits":300000000,"queue_bytes":1875000}"#;
        let stdin = path.0.stdin.as_mut().expect("piped");
        writeln!(
            stdin,
            r#"{{"set":{{"a_to_b":{faults},"b_to_a":{faults}}}}}"#
        )
        .expect("written");
        let mut answer = String::new();
        let stdout = path.0.stdout.as_mut().expect("piped");
        BufReader::new(stdout)
            .read_line(&mut answer)
            .expect("an answer");
        left.add_address("192.0.2.1/24");
        right.add_address("192.0.2.2/24");
        path
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prints the throughput of one stream of CUBIC over a path with delay and loss, by a forwarded
/// port of a tunnel without root and by the interface of the same tunnel with root.
#[test]
#[ignore = "a measurement: it needs an idle machine"]
fn throughput_of_a_forwarded_port_and_of_an_interface_over_a_path_with_loss() {
    for protocol in ["native", "wireguard"] {
        let line = format!("Protocol = {protocol}");
        in_world([&line, ""], |world| {
            let _path = Path::between(world);
            let (user, left) = (User::new(NOBODY), &world.left);
            let _right = world.up_with(&world.right, &["--protocol", protocol]);
            let listener = listener(world);
            let time = Duration::from_secs(10);
            let mut results = [Vec::new(), Vec::new()];
            for _ in 0..5 {
                let (mut tunnel, _) = user.up(left, &["--forward", "5300:10.80.0.2:7001"]);
                results[0].push(stream(left, "127.0.0.1:5300", &listener, time));
                user.succeed(&left.namespace, &["down", left.config()]);
                tunnel.wait(PATIENCE);
                let mut tunnel = world.up(left);
                results[1].push(stream(left, "10.80.0.2:7001", &listener, time));
                world.run(left, &["down", left.config()]);
                tunnel.wait(PATIENCE);
            }
            println!("{protocol}: {results:.4?} Gbit/s");
            let [forward, interface] = results.map(median);
            println!("{protocol}: ratio {:.2}", forward / interface);
        });
    }
}

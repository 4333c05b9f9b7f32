//! Programs with the library: its examples.

use crate::common::{PATIENCE, eventually, in_world};
use crate::mesh::site::at_a_site;
use crate::userspace::client::{assert_echo, connect};
use crate::userspace::user::{NOBODY, User};
use seikan_sys::netns::NetNs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A copy of an example that the user may execute.
fn example(user: &User, name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this binary");
    let build = test.parent().and_then(Path::parent).expect("the build");
    let program = user.folder.path().join(name);
    std::fs::copy(build.join("examples").join(name), &program).expect("the example");
    program
}

#[test]
fn a_program_joins_a_mesh_and_serves_its_members() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [a, service] = [site.host(), site.host()];
        a.join("a", &site.token(&[]));
        let _a = a.up();
        let user = User::new(NOBODY);
        let program = example(&user, "echo");
        let [token, pin] = site.token(&[]);
        let words = ["https://192.0.2.1:7443", &pin, &token, "svc", "svc.toml"];
        // The second start needs no token: its file has what it needs.
        for words in [words, [words[0], words[1], "used-up", words[3], words[4]]] {
            let mut command = user.command_of(&program, &words);
            command.stderr(Stdio::inherit());
            let started = service.netns.spawn_command(&mut command);
            let mut child = started.expect("started");
            let stdout = child.stdout.take().expect("piped");
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).expect("a line");
            assert_eq!(line, "svc listens\n");
            let members = site.members();
            let own = members.iter().find(|member| member["name"] == "svc");
            let own = &own.expect("a member")["addresses"];
            let own = own.as_array().expect("addresses").iter();
            let own = own.filter_map(|ip| ip.as_str()?.parse().ok());
            let own: Vec<std::net::Ipv4Addr> = own.collect();
            let at = SocketAddr::new(own[0].into(), 7);
            let mut stream = None;
            eventually("the service answers", || {
                stream = connect(&a.netns, at).ok();
                stream.is_some()
            });
            assert_echo(stream.expect("connected"));
            let answer = a.netns.run(|| -> std::io::Result<usize> {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                socket.set_read_timeout(Some(Duration::from_secs(60)))?;
                socket.send_to(b"query", at)?;
                socket.recv(&mut [0; 16])
            });
            assert_eq!(answer.expect("namespace").expect("an answer"), 5);
            child.kill().expect("killed");
            child.wait().expect("an end");
        }
        let kept = user.home().join("svc.state");
        assert!(kept.is_dir(), "{kept:?}");
    });
}

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

/// Sends through the forwarded port for that time.
fn send(at: &NetNs, to: &str, time: Duration) {
    let mut socket = at
        .run(|| TcpStream::connect(to))
        .expect("namespace")
        .expect("connected");
    let (chunk, end) = (vec![0; 256 << 10], Instant::now() + time);
    while Instant::now() < end {
        socket.write_all(&chunk).expect("sent");
    }
}

/// Prints the throughput of one stream by the library and by a forwarded port, to a tunnel with an interface.
#[test]
#[ignore = "a measurement: it needs an idle machine"]
fn throughput_of_the_library_and_of_a_forwarded_port() {
    in_world(["Protocol = native", ""], |world| {
        let (user, left) = (User::new(NOBODY), &world.left);
        let program = example(&user, "send");
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let bound = world
            .right
            .namespace
            .run(|| TcpListener::bind("10.80.0.2:7001"));
        let listener = bound.expect("namespace").expect("bound");
        let mut results = [Vec::new(), Vec::new()];
        for _ in 0..5 {
            let (mut tunnel, _) = user.up(left, &["--forward", "5300:10.80.0.2:7001"]);
            std::thread::scope(|scope| {
                let result = scope.spawn(|| sink(&listener));
                send(&left.namespace, "127.0.0.1:5300", Duration::from_secs(3));
                results[0].push(result.join().expect("a result"));
            });
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
        let [forward, library] = results.map(|mut all| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        });
        println!(
            "forward {forward:.2} Gbit/s, library {library:.2} Gbit/s, ratio {:.2}",
            library / forward
        );
    });
}

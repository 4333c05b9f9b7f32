//! `seikan bench` between two hosts: the far end is started by SSH, or by a script that enters its
//! namespace as SSH would.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::{PATIENCE, StopsAtEnd, World, eventually, in_world, skip, stderr};
use crate::schema::check_json;

const SEIKAN: &str = env!("CARGO_BIN_EXE_seikan");
/// Port of the load by default.
const PORT: u16 = 9588;
/// Options by which the load does not depend on the speed of this machine.
const SLOWED: [&str; 4] = ["--seconds", "2", "--load-rate", "200"];

/// A bench; killed with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).expect("signal");
    }

    /// Waits for its end.
    fn output(mut self) -> Output {
        let (mut out, mut errors) = (Vec::new(), Vec::new());
        let mut stdout = self.0.stdout.take().expect("piped");
        let mut stderr = self.0.stderr.take().expect("piped");
        std::thread::scope(|scope| {
            scope.spawn(|| stderr.read_to_end(&mut errors));
            stdout.read_to_end(&mut out).expect("read");
        });
        Output {
            status: self.0.wait().expect("wait"),
            stdout: out,
            stderr: errors,
        }
    }
}

/// Writes a script that runs a command on the right host, in place of SSH.
fn stand_in(world: &World) -> PathBuf {
    let path = world.folder.path().join("ssh");
    let namespace = world.right.namespace.as_fd().as_raw_fd();
    let own = std::process::id();
    let script = format!(
        "#!/bin/sh\n\
         shift\n\
         export SSH_CONNECTION='192.0.2.1 50000 192.0.2.2 22'\n\
         echo 'Last login: yesterday'\n\
         exec nsenter --net=/proc/{own}/fd/{namespace} sh -c \"$*\"\n"
    );
    fs::write(&path, script).expect("write");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("mode");
    path
}

/// Starts a bench on the left host, to the right one.
fn start(world: &World, ssh: &Path, words: &[&str]) -> Running {
    let mut command = world.seikan(&["bench", "right.example"]);
    command.arg("--ssh").arg(ssh).args(["--program", SEIKAN]);
    command.args(words);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Running(
        world
            .left
            .namespace
            .spawn_command(&mut command)
            .expect("start"),
    )
}

fn json(output: &Output) -> Value {
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", stderr(output)));
    check_json("bench", &report);
    report
}

/// Returns the sockets of the right host at the port of the load, other than connections that were closed.
fn open_ports(world: &World) -> Vec<String> {
    let read = || {
        ["tcp", "tcp6", "udp", "udp6"].map(|name| {
            let text = fs::read_to_string(format!("/proc/thread-self/net/{name}"));
            (name, text.unwrap_or_default())
        })
    };
    let tables = world.right.namespace.run(read).expect("namespace");
    let mut ports = Vec::new();
    for (name, text) in tables {
        for line in text.lines().skip(1) {
            let words: Vec<_> = line.split_whitespace().collect();
            // Established or listening (include/net/tcp_states.h).
            let is_open = name.starts_with("udp") || ["01", "0A"].contains(&words[3]);
            if is_open && words[1].ends_with(&format!(":{PORT:04X}")) {
                ports.push(format!("{name} {line}"));
            }
        }
    }
    ports
}

/// Returns the processes in the namespace of the right host that serve a bench.
fn servers(world: &World) -> Vec<String> {
    let id = world.right.namespace.id().expect("inode");
    let is_there = |pid: &str| {
        let namespace = fs::read_link(format!("/proc/{pid}/ns/net"));
        namespace.is_ok_and(|link| link.to_string_lossy() == format!("net:[{id}]"))
    };
    let processes = fs::read_dir("/proc").expect("proc").flatten();
    let names = processes.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|pid| is_there(pid))
        .filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words
                .split(|byte| *byte == 0)
                .any(|word| word == b"--serve")
        })
        .collect()
}

fn nothing_is_left(world: &World) {
    eventually("the far end does not end", || servers(world).is_empty());
    eventually("the port stays open", || open_ports(world).is_empty());
}

/// Waits until the load flows through the tunnel.
fn loaded(world: &World) {
    let received = || {
        let link = world
            .right
            .netlink
            .link(&world.right.interface)
            .expect("link");
        let counts = world.right.netlink.link_stats(link.index);
        counts.expect("counters").rx_bytes
    };
    eventually("no load in the tunnel", || received() > 5_000_000);
}

#[test]
fn a_page_compares_the_tunnel_with_the_raw_path() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        let output = start(world, &stand_in(world), &SLOWED).output();
        let (page, errors) = (String::from_utf8_lossy(&output.stdout), stderr(&output));
        assert!(output.status.success(), "{errors}");
        assert!(errors.contains("bench loads the path to right.example at up to 200 Mbit/s"));
        assert!(
            page.lines().all(|line| line.chars().count() <= 80),
            "{page}"
        );
        assert!(page.lines().count() <= 40, "{page}");
        let through = format!("tunnel     10.80.0.2 through {}", world.left.interface);
        assert!(
            page.contains("raw        192.0.2.2\n") && page.contains(&through),
            "{page}"
        );
        for name in ["TCP to far", "TCP from far", "UDP to far", "UDP from far"] {
            let row = page.lines().find(|line| line.starts_with(name));
            let row = row.expect(name);
            for cell in [&row[32..48], &row[48..64]] {
                let rate = cell.split_whitespace().next().expect(row);
                let rate: f64 = rate.parse().unwrap_or_else(|_| panic!("{page}"));
                assert!((1.0..=220.0).contains(&rate), "{page}");
            }
        }
        assert!(
            page.contains("over TCP") && page.contains("The doctor, during TCP"),
            "{page}"
        );
        nothing_is_left(world);
    });
}

#[test]
fn a_fault_of_the_tunnel_alone_is_named() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        // A queue of three packets drops bursts on their way into the tunnel.
        for host in [&world.left, &world.right] {
            let index = host.netlink.link(&host.interface).expect("link").index;
            host.netlink.set_tx_queue_len(index, 3).expect("queue");
        }
        let output = start(world, &stand_in(world), &["--seconds", "3", "--json"]).output();
        let report = json(&output);
        let rate = |path: &str| {
            let rate = &report[path]["figures"]["to_far"]["tcp_bits_per_second"];
            rate.as_f64().expect("a rate")
        };
        assert!(rate("tunnel") < rate("raw"), "{report:#}");
        let verdict = &report["doctor"]["verdict"];
        let lists = ["chain", "alternatives"].map(|list| verdict[list].as_array().expect("a list"));
        let mut names = lists.into_iter().flatten();
        assert!(
            names.any(|name| name == "tun-queue-overflow"),
            "{verdict:#}"
        );
        let inner = &verdict["far"]["path"]["inner"];
        assert_eq!(inner, world.right.interface.as_str(), "{verdict:#}");
        for path in ["raw", "tunnel"] {
            let idle = &report[path]["figures"]["idle"];
            assert!(
                idle["median_us"].as_f64().is_some_and(|us| us > 0.0),
                "{idle}"
            );
        }
        let cpu = &report["tunnel"]["figures"]["to_far"]["cpu_far"]["tunnel"];
        assert!(
            cpu.as_f64().is_some_and(|seconds| seconds > 0.0),
            "{report:#}"
        );
        nothing_is_left(world);
    });
}

#[test]
fn strangers_neither_disturb_a_bench_nor_get_an_answer() {
    in_world(["", ""], |world| {
        let to: SocketAddr = ([192, 0, 2, 2], PORT).into();
        let stop = AtomicBool::new(false);
        let (report, answers) = std::thread::scope(|scope| {
            let _stops = StopsAtEnd(&stop);
            let stranger = || {
                let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                let pause = Duration::from_millis(5);
                socket.set_read_timeout(Some(pause)).expect("timeout");
                let mut answers = 0;
                while !stop.load(Ordering::Relaxed) {
                    // The lengths of a token, of a request for a round trip, and of a datagram of
                    // the load.
                    for length in [16, 172, 1_200] {
                        let _ = socket.send_to(&vec![0; length], to);
                        answers += usize::from(socket.recv(&mut [0; 2_000]).is_ok());
                    }
                    if let Ok(mut stream) = TcpStream::connect_timeout(&to, pause) {
                        let _ = stream.set_read_timeout(Some(pause));
                        let _ = stream.write_all(&[0; 16]);
                        let read = stream.read(&mut [0; 16]);
                        answers += usize::from(read.is_ok_and(|count| count > 0));
                    }
                }
                answers
            };
            let namespace = &world.left.namespace;
            let stranger = scope.spawn(move || namespace.run(stranger));
            let words = [&SLOWED[..], &["--json"]].concat();
            let output = start(world, &stand_in(world), &words).output();
            stop.store(true, Ordering::Relaxed);
            let answers = stranger.join().expect("join").expect("namespace");
            (json(&output), answers)
        });
        assert_eq!(answers, 0);
        let direction = &report["raw"]["figures"]["to_far"];
        let rate = direction["tcp_bits_per_second"].as_f64().expect("a rate");
        assert!((1e6..=220e6).contains(&rate), "{report:#}");
        let udp = direction["udp"]["most_bits_per_second"].as_f64();
        assert!(
            udp.is_some_and(|rate| (1e6..=220e6).contains(&rate)),
            "{report:#}"
        );
        // Without a tunnel the page has the raw path alone.
        assert_eq!(report["tunnel"]["figures"], Value::Null);
        assert_eq!(report["doctor"], Value::Null);
        nothing_is_left(world);
    });
}

#[test]
fn ctrl_c_and_sigkill_leave_nothing() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        for signal in [Signal::SIGINT, Signal::SIGKILL] {
            let bench = start(world, &stand_in(world), &SLOWED);
            loaded(world);
            bench.signal(signal);
            let output = bench.output();
            if signal == Signal::SIGINT {
                let errors = stderr(&output);
                assert_eq!(output.status.code(), Some(1), "{errors}");
                assert!(errors.contains("interrupted"), "{errors}");
            }
            nothing_is_left(world);
        }
    });
}

#[test]
fn a_closed_port_is_named_with_the_remedy() {
    in_world(["", ""], |world| {
        let mut nft = Command::new("nft");
        nft.arg(format!(
            "add table inet t; add chain inet t c {{ type filter hook input priority 0; }}; \
             add rule inet t c udp dport {PORT} drop"
        ));
        let set = world.right.namespace.spawn_command(&mut nft);
        if !set.is_ok_and(|mut child| child.wait().is_ok_and(|status| status.success())) {
            return skip("no nft");
        }
        let ssh = stand_in(world);
        let errors = |words: &[&str]| {
            let output = start(world, &ssh, words).output();
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            stderr(&output)
        };
        let blocked = errors(&[]);
        let named = format!("UDP port {PORT} of 192.0.2.2 does not answer");
        assert!(
            blocked.contains(&named) && blocked.contains("--port"),
            "{blocked}"
        );
        let busy = world
            .right
            .namespace
            .run(|| std::net::TcpListener::bind(("0.0.0.0", PORT + 1)))
            .expect("namespace")
            .expect("bind");
        let taken = errors(&["--port", &(PORT + 1).to_string()]);
        assert!(
            taken.contains(&format!("cannot open port {}", PORT + 1)),
            "{taken}"
        );
        drop(busy);
        let output = start(world, &ssh, &["--port", "9600", "--seconds", "2"]).output();
        assert!(output.status.success(), "{}", stderr(&output));
    });
}

#[test]
fn a_far_end_that_cannot_start_is_explained() {
    in_world(["", ""], |world| {
        let ssh = stand_in(world);
        let folder = world.folder.path();
        let old = folder.join("old");
        fs::write(&old, "#!/bin/sh\nexit 2\n").expect("write");
        fs::set_permissions(&old, fs::Permissions::from_mode(0o755)).expect("mode");
        let unreachable = folder.join("unreachable");
        fs::write(&unreachable, "#!/bin/sh\nexit 255\n").expect("write");
        fs::set_permissions(&unreachable, fs::Permissions::from_mode(0o755)).expect("mode");
        let [ssh, old, unreachable] =
            [&ssh, &old, &unreachable].map(|it| it.to_str().expect("UTF-8"));
        for (words, expected) in [
            (
                ["--ssh", "no-such-ssh", "--program", "seikan"],
                "install the OpenSSH client",
            ),
            (
                ["--ssh", ssh, "--program", "no-such-seikan"],
                "right.example has no `no-such-seikan`",
            ),
            (["--ssh", ssh, "--program", old], "has no `bench`"),
            (
                ["--ssh", unreachable, "--program", "seikan"],
                "SSH does not reach right.example",
            ),
        ] {
            let words = [&["bench", "right.example"], &words[..]].concat();
            let output = world.run(&world.left, &words);
            let errors = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{errors}");
            assert!(errors.contains(expected), "{errors}");
        }
        let output = world.run(&world.left, &["bench", "-oProxyCommand=true"]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    });
}

/// Runs Dropbear's server on the right host, and returns the command of its client.
fn dropbear(world: &World) -> Option<(Running, String)> {
    let folder = world.folder.path();
    let (home, keys) = (folder.join("home"), folder.join("home/.ssh"));
    fs::create_dir_all(&keys).expect("folder");
    let [host_key, own_key] = ["host", "own"].map(|name| keys.join(name).display().to_string());
    let mut authorized = String::new();
    for key in [&host_key, &own_key] {
        let made = Command::new("dropbearkey")
            .args(["-t", "ed25519", "-f", key])
            .output();
        let text = String::from_utf8(made.ok()?.stdout).expect("UTF-8");
        let public = text.lines().find(|line| line.starts_with("ssh-ed25519 "));
        authorized = public.expect("a key").to_owned() + "\n";
    }
    fs::write(keys.join("authorized_keys"), authorized).expect("write");
    for path in [folder, &home, &keys] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("mode");
    }
    // The server searches for keys in the home directory of passwd(5): this file replaces it for
    // the server alone.
    let (passwd, pid) = (folder.join("passwd"), home.join("pid"));
    fs::write(&passwd, format!("root:x:0:0::{}:/bin/sh\n", home.display())).expect("write");
    let script = format!(
        "mount --bind {} /etc/passwd && exec dropbear -F -E -m -s -r {host_key} -P {} -p 22",
        passwd.display(),
        pid.display()
    );
    let mut server = Command::new("unshare");
    server
        .args(["--mount", "sh", "-c", &script])
        .stderr(Stdio::null());
    let server = Running(
        world
            .right
            .namespace
            .spawn_command(&mut server)
            .expect("start"),
    );
    let listens = || {
        let connect = || TcpStream::connect_timeout(&([192, 0, 2, 2], 22).into(), PATIENCE);
        world
            .left
            .namespace
            .run(connect)
            .expect("namespace")
            .is_ok()
    };
    eventually("dropbear does not listen", listens);
    Some((server, format!("dbclient -y -T -i {own_key}")))
}

#[test]
fn the_far_end_starts_by_ssh_through_the_tunnel() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        let Some((_server, client)) = dropbear(world) else {
            return skip("no dropbear: install dropbear-bin");
        };
        let mut command = world.seikan(&["bench", "root@10.80.0.2", "--json", "--ssh", &client]);
        command.args(["--program", SEIKAN]).args(SLOWED);
        command.env("HOME", world.folder.path().join("home"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let bench = world.left.namespace.spawn_command(&mut command);
        let report = json(&Running(bench.expect("start")).output());
        // SSH came through the tunnel: the raw path is another address of the far host.
        assert_eq!(report["raw"]["address"], "192.0.2.2", "{report:#}");
        assert_eq!(report["tunnel"]["address"], "10.80.0.2");
        assert_eq!(report["tunnel"]["interface"], world.left.interface.as_str());
        for path in ["raw", "tunnel"] {
            let rate = &report[path]["figures"]["from_far"]["tcp_bits_per_second"];
            assert!(rate.as_f64().is_some_and(|rate| rate > 1e6), "{report:#}");
        }
        nothing_is_left(world);
    });
}

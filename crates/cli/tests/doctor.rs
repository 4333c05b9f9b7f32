//! The doctor on a real tunnel: idle, with a short queue, with invalid arguments, and reading
//! recordings.

use crate::schema::check_json;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{World, eventually, in_world, skip, stderr};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use seikan_sys::netlink::Route;
use serde_json::Value;

/// Keys of the verdict that docs/reference/doctor.md promises.
const KEYS: [&str; 16] = [
    "version",
    "cause",
    "sentence",
    "level",
    "loss_repair",
    "chain",
    "evidence",
    "remedies",
    "moves",
    "alternatives",
    "ruled_out",
    "throughput",
    "expected",
    "path",
    "cost",
    "fixes",
];

fn doctor(world: &World, words: &[&str]) -> Output {
    let iface = &world.left.interface;
    let words = [&["doctor", "--iface", iface, "--seconds", "2"], words].concat();
    world.run(&world.left, &words)
}

fn verdict(output: &Output) -> Value {
    let verdict = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", stderr(output)));
    check_json("doctor", &verdict);
    verdict
}

/// Sends bursts of datagrams into the tunnel, far below its capacity, until it is stopped.
fn bursts(stop: &AtomicBool) {
    let socket = UdpSocket::bind("10.80.0.1:0").expect("bind");
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            // A full queue is no error for a UDP sender.
            let _ = socket.send_to(&[7; 1200], "10.80.0.2:9");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the result of `work` while bursts go through the tunnel.
fn under_bursts<T>(world: &World, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (left, stop) = (&world.left.namespace, &stop);
        scope.spawn(move || left.run(|| bursts(stop)));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[test]
fn an_idle_tunnel_gets_advice_and_the_verdict_has_its_keys() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let output = doctor(world, &["--json", "--exit-code"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let verdict = verdict(&output);
        assert_eq!(verdict["cause"], "idle", "{verdict:#}");
        let mut keys: Vec<_> = verdict.as_object().expect("object").keys().collect();
        keys.sort();
        let mut expected = KEYS;
        expected.sort_unstable();
        assert_eq!(keys, expected);
        assert_eq!(verdict["path"]["inner"], *world.left.interface);
        // Ten in each of two seconds, on a possibly busy machine.
        let samples = verdict["cost"]["samples"].as_u64().expect("a count");
        assert!((10..=21).contains(&samples), "{samples}");
    });
}

#[test]
fn a_queue_that_is_too_short_is_named() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        let output = under_bursts(world, || doctor(world, &["--json", "--exit-code"]));
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        let verdict = verdict(&output);
        assert!(shows(&verdict, "tun-queue-overflow"), "{verdict:#}");
    });
}

/// Returns whether a cause is named or also shown: with many tests at once, waiting for a processor
/// shows too.
fn shows(verdict: &Value, cause: &str) -> bool {
    let lists = ["chain", "alternatives"].map(|list| verdict[list].as_array().expect("a list"));
    lists.into_iter().flatten().any(|name| name == cause)
}

/// Runs a doctor that tries remedies without asking.
fn fixing(iface: &str) -> [&str; 8] {
    [
        "doctor",
        "--iface",
        iface,
        "--seconds",
        "2",
        "--json",
        "--fix",
        "--yes",
    ]
}

fn queue_length(world: &World) -> u32 {
    let link = world.left.netlink.link(&world.left.interface);
    link.expect("link").tx_queue_len
}

/// Sets the queue of the left tunnel's interface to 3 packets.
fn with_a_short_queue(world: &World) {
    let netlink = &world.left.netlink;
    let index = netlink.link(&world.left.interface).expect("link").index;
    netlink.set_tx_queue_len(index, 3).expect("queue length");
}

#[test]
fn a_helpful_change_stays_until_it_is_undone() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        let words = ["--json", "--fix", "--yes", "--no-probe"];
        let output = under_bursts(world, || doctor(world, &words));
        assert!(output.status.success(), "{}", stderr(&output));
        let verdict = verdict(&output);
        let fix = &verdict["fixes"][0];
        assert_eq!(fix["trial"]["decision"], "keep", "{verdict:#}");
        assert_eq!(verdict["level"], "confirmed", "{verdict:#}");
        assert!(queue_length(world) >= 500);
        let output = world.run(&world.left, &["doctor", "--undo"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(queue_length(world), 3);
        let output = world.run(&world.left, &["doctor", "--undo"]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(text.contains("nothing to revert"), "{text}");
    });
}

#[test]
fn a_proof_leaves_nothing_changed() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        let words = ["--json", "--prove", "--yes", "--no-probe"];
        let output = under_bursts(world, || doctor(world, &words));
        assert!(output.status.success(), "{}", stderr(&output));
        let verdict = verdict(&output);
        assert_eq!(verdict["level"], "confirmed", "{verdict:#}");
        assert_eq!(verdict["fixes"][0]["trial"]["decision"], "take-back");
        assert_eq!(queue_length(world), 3);
    });
}

/// Adds a router that bypasses the tunnel: left `198.51.100.1`, router `198.51.100.2` on the right
/// host.
fn with_a_router(world: &World) {
    let end = std::os::fd::AsFd::as_fd(&world.right.namespace);
    let link = world
        .left
        .netlink
        .create_veth("office", "office", Some(end));
    link.expect("veth");
    for (host, address) in [
        (&world.left, "198.51.100.1/24"),
        (&world.right, "198.51.100.2/24"),
    ] {
        let index = host.netlink.link("office").expect("link").index;
        host.netlink
            .add_address(index, address.parse().expect("address"))
            .expect("address");
        host.netlink.set_up(index).expect("up");
    }
    let default = Route::to("0.0.0.0/0".parse().expect("net"));
    let router = "198.51.100.2".parse().expect("address");
    let route = world.left.netlink.add_route(&default.via(router));
    route.expect("route");
}

#[test]
fn a_host_that_is_cut_off_takes_the_change_back() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        with_a_router(world);
        let iface = &world.left.interface;
        let words = fixing(iface);
        let verdict = under_bursts(world, || {
            let mut run = world.start(&world.left, &mut world.seikan(&words));
            eventually("nothing is tried", || queue_length(world) != 3);
            let office = world.right.netlink.link("office").expect("link").index;
            world.right.netlink.set_down(office).expect("down");
            let mut text = String::new();
            run.stdout.read_to_string(&mut text).expect("read");
            serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
        });
        let trial = &verdict["fixes"][0]["trial"];
        assert_eq!(trial["decision"], "take-back", "{verdict:#}");
        let why = trial["why"].as_str().expect("why");
        assert!(why.contains("198.51.100.2"), "{why}");
        assert_eq!(queue_length(world), 3);
    });
}

#[test]
fn a_change_goes_with_the_doctor_that_is_killed() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        let iface = &world.left.interface;
        let words = fixing(iface);
        under_bursts(world, || {
            let mut doctor = world.seikan(&words);
            let run = world.start(&world.left, doctor.process_group(0));
            eventually("nothing is tried", || queue_length(world) != 3);
            // All processes of the doctor's group are killed.
            let group = Pid::from_raw(run.child.id() as i32);
            killpg(group, Signal::SIGKILL).expect("a group");
            eventually("it is not taken back", || queue_length(world) == 3);
        });
    });
}

#[test]
fn without_a_terminal_there_is_no_prompt() {
    in_world([""; 2], |world| {
        let output = world.run(&world.left, &["doctor", "--fix", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("--yes"), "{}", stderr(&output));
    });
}

#[test]
fn an_unknown_interface_is_answered_with_those_that_are_there() {
    in_world([""; 2], |world| {
        let output = world.run(&world.left, &["doctor", "--iface", "nosuch0"]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("nosuch0") && errors.contains("under"),
            "{errors}"
        );
    });
}

#[test]
fn nothing_is_captured() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (left, done) = (&world.left.namespace, &done);
            // The thread's file is read, because the process is in another namespace.
            let look = || std::fs::read_to_string("/proc/thread-self/net/packet").expect("read");
            let looking = scope.spawn(move || {
                left.run(|| {
                    let mut looks = 0;
                    while !done.load(Ordering::Relaxed) {
                        // A heading, and one line for each packet socket.
                        let sockets = look().lines().count() - 1;
                        assert_eq!(sockets, 0);
                        looks += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    looks
                })
            });
            let output = doctor(world, &[]);
            done.store(true, Ordering::Relaxed);
            assert!(output.status.success(), "{}", stderr(&output));
            let looks = looking.join().expect("a packet socket").expect("namespace");
            assert!(looks > 100, "{looks}");
        });
    });
}

#[test]
fn piped_output_has_80_columns_and_no_colours() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let output = under_bursts(world, || doctor(world, &["--verbose"]));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(!text.contains('\x1b'), "{text:?}");
        let wide = text.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None);
        assert!(text.contains("CPU s"), "{text}");
    });
}

#[test]
fn calls_are_counted_or_it_says_why_not() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let words = ["--level", "3", "--verbose", "--no-probe"];
        let output = under_bursts(world, || doctor(world, &words));
        assert!(output.status.success(), "{}", stderr(&output));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        // Needs a kernel with kprobes.
        let told = if Path::new("/sys/bus/event_source/devices/kprobe").exists() {
            "  udp_sendmsg "
        } else {
            "  calls of kernel functions: "
        };
        assert!(text.contains(told), "{text}");
    });
}

#[test]
fn a_process_is_measured_by_its_number() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let pid = world.status(&world.left)["pid"].to_string();
        let words = ["doctor", "--pid", &pid, "--seconds", "2", "--json"];
        let verdict = verdict(&world.run(&world.left, &words));
        assert_eq!(verdict["path"]["inner"], *world.left.interface);
    });
}

#[test]
fn the_screen_shows_the_tunnel_until_q_is_pressed() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let iface = &world.left.interface;
        let program = env!("CARGO_BIN_EXE_seikan");
        // script(1), of bsdutils, which every Debian has, makes a terminal; it has no size yet.
        let line = format!("stty rows 40 cols 120; exec {program} top --iface {iface}");
        let mut command = Command::new("script");
        command
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        world.settle(&mut command);
        let mut screen = world.left.namespace.spawn_command(&mut command);
        let screen = screen.as_mut().expect("script");
        let mut keys = screen.stdin.take().expect("piped");
        let mut drawn = screen.stdout.take().expect("piped");
        let (mut text, mut part) = (Vec::new(), [0; 4096]);
        while !String::from_utf8_lossy(&text).contains(iface.as_str()) {
            let length = drawn.read(&mut part).expect("a screen");
            let shown = String::from_utf8_lossy(&text);
            assert!(length > 0, "it ends before it shows {iface}: {shown}");
            text.extend_from_slice(&part[..length]);
        }
        keys.write_all(b"q").expect("a key");
        drawn.read_to_end(&mut text).expect("the end");
        assert!(screen.wait().expect("an end").success());
    });
}

#[test]
fn the_map_needs_no_samples() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let output = doctor(world, &["--map"]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(text.contains(&world.left.interface), "{text}");
        assert!(!text.contains("samples"), "{text}");
    });
}

#[test]
fn ctrl_c_ends_it_with_the_data_so_far() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let iface = &world.left.interface;
        let words = ["doctor", "--iface", iface, "--seconds", "60", "--json"];
        for (patience, code) in [(0, 1), (2500, 0)] {
            let run = world.start(&world.left, &mut world.seikan(&words));
            eventually("Ctrl-C would kill it", || run.handles_ctrl_c());
            std::thread::sleep(Duration::from_millis(patience));
            run.signal("INT");
            let (ended, errors) = run.ended();
            assert_eq!(ended, Some(code), "after {patience} ms: {errors}");
        }
    });
}

#[test]
fn missing_permissions_are_listed() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        // Other users may not reach the directory of this program.
        let program = world.folder.path().join("seikan");
        std::fs::copy(env!("CARGO_BIN_EXE_seikan"), &program).expect("copy");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(world.folder.path(), open).expect("mode");
        // The namespace is entered first, which an unprivileged user cannot.
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(&program).args([
            "doctor",
            "--iface",
            &world.left.interface,
            "--seconds",
            "2",
            "--json",
        ]);
        let run = world
            .left
            .namespace
            .spawn_command(command.stdout(std::process::Stdio::piped()));
        let output = match run {
            Ok(child) => child.wait_with_output().expect("wait"),
            Err(error) => return skip(&format!("cannot run as nobody: {error}")),
        };
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let verdict = verdict(&output);
        assert_eq!(verdict["cause"], "idle", "{verdict:#}");
        let unseen = verdict["path"]["unseen"].as_array().expect("a list");
        assert!(!unseen.is_empty(), "{verdict:#}");
    });
}

/// Returns the path of a file of the world.
fn file(world: &World, name: &str) -> String {
    let path = world.folder.path().join(name);
    path.to_str().expect("UTF-8").to_owned()
}

/// Returns the files of the world with this in their name.
fn files(world: &World, part: &str) -> Vec<String> {
    let entries = world.folder.path().read_dir().expect("list");
    let names = entries.map(|entry| entry.expect("entry").file_name().into_string());
    let names = names.map(|name| name.expect("UTF-8"));
    names.filter(|name| name.contains(part)).collect()
}

#[test]
fn a_recording_gives_the_same_verdict_as_the_live_run() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        with_a_short_queue(world);
        let file = file(world, "slow.parquet");
        let words = ["--json", "--fix", "--yes", "--record", &file];
        let live = verdict(&under_bursts(world, || doctor(world, &words)));
        assert!(shows(&live, "tun-queue-overflow"), "{live:#}");
        assert_eq!(live["level"], "confirmed", "{live:#}");
        // Reading it needs no tunnel.
        let read = world.run(&world.right, &["doctor", "--from", &file, "--json"]);
        let read = verdict(&read);
        assert_eq!(read, live);
        let output = world.run(&world.right, &["doctor", "--from", &file, "--exit-code"]);
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(text.contains("tested: "), "{text}");
        let map = world.run(
            &world.right,
            &["doctor", "--from", &file, "--map", "--json"],
        );
        let map: Value = serde_json::from_slice(&map.stdout).expect("JSON");
        check_json("doctor --map", &map);
        assert_eq!(map, live["path"]);
        world.run(&world.left, &["doctor", "--undo"]);
    });
}

#[test]
fn another_expectation_gives_another_verdict_of_the_same_recording() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let file = file(world, "idle.parquet");
        let iface = &world.left.interface;
        let words = ["record", "--iface", iface, "--seconds", "2", &file];
        let output = world.run(&world.left, &words);
        assert!(output.status.success(), "{}", stderr(&output));
        let said = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(said.contains(" samples, "), "{said}");
        for (words, cause) in [(&[][..], "idle"), (&["--expect", "900"], "unknown")] {
            let words = [&["doctor", "--from", &file, "--json"], words].concat();
            let verdict = verdict(&world.run(&world.right, &words));
            assert_eq!(verdict["cause"], cause, "{verdict:#}");
        }
    });
}

#[test]
fn ctrl_c_ends_a_recording_with_a_whole_file_or_none() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let iface = &world.left.interface;
        for (patience, code, left) in [(0, 1, 0), (2500, 0, 1)] {
            let file = file(world, "cut.parquet");
            let words = ["record", "--iface", iface, &file];
            let run = world.start(&world.left, &mut world.seikan(&words));
            eventually("Ctrl-C would kill it", || run.handles_ctrl_c());
            std::thread::sleep(Duration::from_millis(patience));
            run.signal("INT");
            let (ended, errors) = run.ended();
            assert_eq!(ended, Some(code), "after {patience} ms: {errors}");
            assert_eq!(files(world, "cut").len(), left);
        }
        let words = ["doctor", "--from", &file(world, "cut.parquet"), "--json"];
        let verdict = verdict(&world.run(&world.right, &words));
        let seconds = verdict["cost"]["seconds"].as_f64().expect("a number");
        assert!((1.0..30.0).contains(&seconds), "{seconds}");
    });
}

#[test]
fn other_files_than_recordings_are_refused() {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up();
        let text = file(world, "text");
        std::fs::write(&text, "time,value\n").expect("write");
        for (words, code, says) in [
            (vec!["--from", &text], 1, "no recording"),
            (vec!["--from", &text, "--iface", "tun0"], 2, "--iface"),
            (
                vec!["--iface", &world.left.interface, "--record", "/dev/null"],
                1,
                "regular file",
            ),
        ] {
            let output = world.run(&world.left, &[vec!["doctor"], words].concat());
            assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
            assert!(stderr(&output).contains(says), "{}", stderr(&output));
        }
    });
}

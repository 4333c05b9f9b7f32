//! `seikan IFACE` in the place of wireguard-go: started by an unmodified wg-quick, by a link with
//! that name, and with descriptors of another program.

use std::fs;
use std::io::{self, Read, Write};
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use seikan_sys::tun::{Tun, TunError, TunOptions};

use crate::common::{Host, PATIENCE, Tunnel, World, eventually, in_world, skip, stderr};

/// Runs wg-quick with mounts of its own. On a kernel with WireGuard, the module is hidden there and
/// `ip` refuses to create such an interface; elsewhere nothing is replaced.
const WG_QUICK: &str = r#"set -e
if ip link add probe type wireguard 2> "$folder/probe"; then
    ip link delete probe
    ip=$(command -v ip)
    cp "$ip" "$folder/ip"
    printf '#!/bin/sh\ncase "$*" in *"type wireguard"*) exit 2 ;; esac\nexec "%s" "$@"\n' "$folder/ip" \
        > "$folder/refusing-ip"
    chmod 755 "$folder/refusing-ip"
    mount --bind "$folder/refusing-ip" "$ip"
    mount -t tmpfs none /sys/module
fi
exec wg-quick "$0" "$1""#;

/// Deletes the interface of a test that fails, which also ends its process.
struct Cleanup<'a>(&'a Host);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        let Cleanup(host) = self;
        if let Ok(Some(index)) = host.netlink.link_index(&host.interface) {
            let _ = host.netlink.delete_link(index);
        }
    }
}

fn wg_quick(world: &World, host: &Host, verb: &str) -> String {
    let mut command = world.shell(WG_QUICK);
    command.args([verb, host.config()]).env(
        "WG_QUICK_USERSPACE_IMPLEMENTATION",
        env!("CARGO_BIN_EXE_seikan"),
    );
    let (code, errors) = world.start(host, &mut command).ended();
    assert_eq!(code, Some(0), "wg-quick {verb}: {errors}");
    errors
}

/// Returns the output of `wg` on a host.
fn wg(host: &Host, words: &[&str]) -> String {
    let mut command = Command::new("wg");
    command.args(words).stdout(Stdio::piped());
    let child = host.namespace.spawn_command(&mut command).expect("wg");
    let output = child.wait_with_output().expect("wg");
    assert!(output.status.success(), "wg {words:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--help").output().is_ok()
}

fn uapi(host: &Host) -> PathBuf {
    Path::new("/var/run/wireguard").join(format!("{}.sock", host.interface))
}

/// Returns the processes of a host's interface in the background.
fn processes(host: &Host) -> Vec<PathBuf> {
    let words = format!("seikan\0--detached\0{}\0", host.interface);
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let ours =
        |path: &PathBuf| fs::read(path.join("cmdline")).is_ok_and(|line| line == words.as_bytes());
    all.map(|process| process.path()).filter(ours).collect()
}

/// Returns what is left of a host's interface.
fn left_behind(world: &World, host: &Host) -> Vec<PathBuf> {
    let run = fs::read_dir(world.folder.path().join("run"));
    let run = run.into_iter().flatten().flatten();
    let mut left: Vec<PathBuf> = run.map(|file| file.path()).collect();
    left.retain(|path| path.to_string_lossy().contains(&host.interface));
    left.extend(processes(host));
    left.extend(Some(uapi(host)).filter(|path| path.exists()));
    left
}

/// Waits until the process of a host's interface has set it up, and answers.
fn wait_for_answer(host: &Host) {
    let asks = || -> io::Result<usize> {
        let mut stream = UnixStream::connect(uapi(host))?;
        stream.write_all(b"get=1\n\n")?;
        stream.read(&mut [0; 64])
    };
    eventually("no answer on the socket for wg", || {
        asks().is_ok_and(|length| length > 0)
    });
}

#[test]
fn wg_quick_runs_it_where_the_kernel_has_no_wireguard() {
    in_world(["FwMark = 0x123", ""], |world| {
        if !has("wg-quick") {
            return skip("no `wg-quick`: install wireguard-tools");
        }
        let hosts = [&world.right, &world.left];
        let _cleanup = hosts.map(Cleanup);
        for host in hosts {
            let errors = wg_quick(world, host, "up");
            assert!(errors.contains("userspace implementation"), "{errors}");
            assert_eq!(processes(host).len(), 2, "a daemon and its monitor");
        }
        assert!(world.answers_within(PATIENCE), "no echo");
        assert_eq!(
            wg(&world.left, &["show", &world.left.interface, "fwmark"]),
            "0x123\n"
        );
        // The next process may start before this one has ended.
        wg_quick(world, &world.left, "down");
        wg_quick(world, &world.left, "up");
        assert!(world.answers_within(PATIENCE), "no echo");
        for host in hosts {
            wg_quick(world, host, "down");
            assert!(!host.has_tunnel());
            eventually("something is left", || left_behind(world, host).is_empty());
        }
    });
}

#[test]
fn a_link_with_the_name_of_wireguard_go_ends_with_its_interface_or_a_signal() {
    in_world(["", ""], |world| {
        if !has("wg") {
            return skip("no `wg`: install wireguard-tools");
        }
        let host = &world.left;
        let link = world.folder.path().join("wireguard-go");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_seikan"), &link).expect("a link");
        let start = |words: &[&str], environment: &[(&str, &str)]| {
            let mut command = Command::new(&link);
            world.settle(command.args(words));
            command.envs(environment.iter().copied());
            let tunnel = world.start(host, &mut command);
            wait_for_answer(host);
            tunnel
        };
        let ended = |tunnel: Tunnel| {
            assert_eq!(tunnel.ended(), (Some(0), String::new()));
            assert!(!host.has_tunnel());
            assert_eq!(left_behind(world, host), Vec::<PathBuf>::new());
        };

        let tunnel = start(&["-f", &host.interface], &[]);
        // The interface is down, without a key and peers: the dump has only its own line.
        let line = wg(host, &["show", &host.interface, "dump"]);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.starts_with("(none)\t(none)\t"), "{line}");
        let index = host
            .netlink
            .link_index(&host.interface)
            .expect("links")
            .expect("it");
        assert!(!host.netlink.link_by_index(index).expect("it").up);
        host.netlink.delete_link(index).expect("deleted");
        ended(tunnel);

        for signal in ["TERM", "INT"] {
            let tunnel = start(&[&host.interface], &[("WG_PROCESS_FOREGROUND", "1")]);
            tunnel.signal(signal);
            ended(tunnel);
        }

        let version = Command::new(&link).arg("--version").output().expect("it");
        let text = String::from_utf8_lossy(&version.stdout);
        assert_eq!(text, format!("seikan {}\n", env!("CARGO_PKG_VERSION")));
    });
}

#[test]
fn the_log_level_is_that_of_wireguard_go() {
    in_world(["", ""], |world| {
        let host = &world.left;
        for (level, is_logged) in [("verbose", true), ("error", false), ("silent", false)] {
            let mut command = world.seikan(&["-f", &host.interface]);
            let tunnel = world.start(host, command.env("LOG_LEVEL", level));
            wait_for_answer(host);
            tunnel.signal("TERM");
            let (code, errors) = tunnel.ended();
            assert_eq!(code, Some(0), "{errors}");
            assert_eq!(errors.contains("is up"), is_logged, "{level}: {errors}");
        }
    });
}

/// Configures a host's interface from its file, as wg-quick would.
fn configure(world: &World, host: &Host) {
    let text = fs::read_to_string(&host.config).expect("read");
    let lines = text.lines().filter(|line| !line.starts_with("Address"));
    let file = world.folder.path().join("setconf");
    fs::write(&file, lines.collect::<Vec<_>>().join("\n")).expect("written");
    let file = file.to_str().expect("UTF-8");
    wg(host, &["setconf", &host.interface, file]);
    let index = host.netlink.link(&host.interface).expect("it").index;
    let address = "10.80.0.1/24".parse().expect("an address");
    host.netlink
        .add_address(index, address)
        .expect("an address");
    host.netlink.set_up(index).expect("up");
}

#[test]
fn padding_ends_at_the_mtu_that_was_set_last() {
    in_world(["", ""], |world| {
        if !has("wg") {
            return skip("no `wg`: install wireguard-tools");
        }
        let host = &world.left;
        let _process = world.start(host, &mut world.seikan(&["-f", &host.interface]));
        wait_for_answer(host);
        configure(world, host);
        let _right = world.up(&world.right);
        assert!(world.answers_within(PATIENCE), "no echo");
        let index = host.netlink.link(&host.interface).expect("it").index;
        host.netlink.set_mtu(index, 1285).expect("set");
        let sent = || -> u64 {
            let text = wg(host, &["show", &host.interface, "transfer"]);
            let last = text.split_whitespace().last().expect("a count");
            last.parse().expect("a number")
        };
        let send = || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.send_to(&[0; 1285 - 28], "10.80.0.2:9")
        };
        eventually("padding beyond the MTU", || {
            let before = sent();
            host.namespace
                .run(send)
                .expect("a namespace")
                .expect("sent");
            // Keepalives have 32 bytes. A record adds as many to its packet, which would be padded
            // to 1296 bytes.
            (sent() - before) % 32 == 1285 % 32
        });
    });
}

fn with_given_descriptors(create: fn(&TunOptions) -> Result<Tun, TunError>) {
    in_world(["", ""], |world| {
        if !has("wg") {
            return skip("no `wg`: install wireguard-tools");
        }
        let host = &world.left;
        let options = TunOptions {
            name: host.interface.clone(),
            mtu: 1500,
            queues: 1,
            offload: true,
        };
        let open = || -> io::Result<OwnedFd> {
            let tun = create(&options).map_err(io::Error::other)?;
            tun.queues()[0].as_fd().try_clone_to_owned()
        };
        let device = host.namespace.run(open).expect("a namespace");
        let device = device.expect("a TUN device");
        fs::create_dir_all("/var/run/wireguard").expect("a folder");
        let socket = OwnedFd::from(UnixListener::bind(uapi(host)).expect("a socket"));
        // The name in the arguments is not that of the device.
        let script = "exec 3<&0 4<&1 </dev/null >/dev/null; exec \"$seikan\" -f other0";
        let mut command = world.shell(script);
        command.env("WG_TUN_FD", "3").env("WG_UAPI_FD", "4");
        command.stdin(device).stdout(socket).stderr(Stdio::null());
        let mut child = host.namespace.spawn_command(&mut command).expect("started");
        // It holds the descriptors.
        drop(command);
        configure(world, host);
        let _right = world.up(&world.right);
        assert!(world.answers_within(PATIENCE), "no echo");
        let stopped = world.run(host, &["down", &host.interface]);
        assert!(stopped.status.success(), "{}", stderr(&stopped));
        assert_eq!(child.wait().expect("ended").code(), Some(0));
        assert!(!host.has_tunnel());
        assert_eq!(left_behind(world, host), Vec::<PathBuf>::new());
    });
}

#[test]
fn an_open_device_with_a_header_and_an_open_socket_are_used() {
    with_given_descriptors(Tun::create);
}

#[test]
fn an_open_device_without_a_header_and_an_open_socket_are_used() {
    with_given_descriptors(Tun::create_without_header);
}

#[test]
fn wrong_descriptors_and_taken_names_are_reported() {
    in_world(["", ""], |world| {
        let host = &world.left;
        let fails = |command: &mut Command, reason: &str| {
            let (code, errors) = world.start(host, command).ended();
            assert_eq!(code, Some(1), "{errors}");
            assert!(errors.contains(reason), "{errors}");
        };
        let interface = || world.seikan(&[&host.interface]);
        fails(interface().env("WG_TUN_FD", "99"), "WG_TUN_FD=99");
        fails(interface().env("WG_UAPI_FD", "/run/x"), "WG_UAPI_FD=/run/x");
        let bridge = host
            .netlink
            .create_bridge(&host.interface)
            .expect("a bridge");
        fails(&mut interface(), "it is a bridge device");
        host.netlink.delete_link(bridge).expect("deleted");
        assert_eq!(left_behind(world, host), Vec::<PathBuf>::new());
    });
}

#[test]
fn a_misspelt_verb_creates_no_interface() {
    in_world(["", ""], |world| {
        let links = || world.left.netlink.links().expect("links").len();
        let before = links();
        let run = |words: &[&str]| -> Output { world.run(&world.left, words) };
        for (words, reason) in [
            (&["statsu"][..], "a similar subcommand exists: 'status'"),
            (&["-f", "statsu"], "unexpected argument '-f'"),
            (&["dwon"], "a similar subcommand exists: 'down'"),
            (&["wg0", "wg1"], "unrecognized subcommand 'wg0'"),
            (&["wg/0"], "unrecognized subcommand 'wg/0'"),
            (
                &["an-interface-wg0"],
                "unrecognized subcommand 'an-interface-wg0'",
            ),
            (&["--verison"], "unexpected argument '--verison'"),
        ] {
            let output = run(words);
            let errors = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{words:?}: {errors}");
            assert!(errors.contains(reason), "{words:?}: {errors}");
        }
        assert_eq!(links(), before);
        // A word that resembles no verb does create one.
        let _cleanup = Cleanup(&world.left);
        let output = run(&[&world.left.interface]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(links(), before + 1);
    });
}

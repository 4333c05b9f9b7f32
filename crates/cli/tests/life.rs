//! A tunnel's life with the real program: two hosts in namespaces, a link between them, and what
//! befalls hosts and links. Each test has names of its own, so that all can run at once.
//!
//! ```text
//!  left: SxxA 10.80.0.1 ==(tunnel)== SxxB 10.80.0.2 :right
//!        under 192.0.2.1 ---(veth)--- 192.0.2.2 under
//! ```
#![forbid(unsafe_code)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use seikan_sys::netlink::{Family, Netlink, Route};
use seikan_sys::netns::NetNs;

const ECHO_PORT: u16 = 7;
const TUNNEL_PORT: u16 = 51820;

/// A host: a namespace with one end of the link.
struct Host {
    namespace: NetNs,
    netlink: Netlink,
    /// The interface of its tunnel, unique on this machine.
    interface: String,
    config: PathBuf,
}

/// Two hosts and their files.
struct World {
    left: Host,
    right: Host,
    folder: tempfile::TempDir,
}

/// A running `seikan`; killed with the test.
struct Tunnel {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

/// Says why a test did not run; fails instead where every test must run.
fn skip(reason: &str) {
    assert!(
        std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// Runs a test in a world of its own. `extra` is what the left configuration says beside the usual,
/// in `[Interface]` and in `[Peer]`.
fn in_world(extra: [&str; 2], test: impl FnOnce(&World)) {
    if !std::path::Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    match World::create(extra) {
        Ok(world) => test(&world),
        Err(reason) => skip(&reason),
    }
}

impl World {
    fn create(extra: [&str; 2]) -> Result<World, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side: &str| format!("s{}x{number}{side}", std::process::id());
        let namespace = || NetNs::create().map_err(|error| error.to_string());
        let folder = tempfile::tempdir().expect("folder");
        let host = |side: &str| -> Result<Host, String> {
            let namespace = namespace()?;
            let interface = name(side);
            Ok(Host {
                netlink: namespace.netlink().map_err(|e| e.to_string())?,
                namespace,
                config: folder.path().join(format!("{interface}.conf")),
                interface,
            })
        };
        let (left, right) = (host("a")?, host("b")?);
        let end = std::os::fd::AsFd::as_fd(&right.namespace);
        let link = left.netlink.create_veth("under", "under", Some(end));
        link.map_err(|error| error.to_string())?;
        left.add_address("192.0.2.1/24");
        right.add_address("192.0.2.2/24");
        let keys = [key_pair(), key_pair()];
        let peer = |side: usize, allowed: &str, rest: &str| {
            let public = &keys[side].1;
            format!("[Peer]\nPublicKey = {public}\nAllowedIPs = {allowed}\n{rest}\n")
        };
        let interface = |side: usize, address: &str, rest: &str| {
            let private = &keys[side].0;
            format!(
                "[Interface]\nPrivateKey = {private}\nAddress = {address}\n\
                 ListenPort = {TUNNEL_PORT}\n{rest}\n"
            )
        };
        let default = "AllowedIPs = 10.80.0.2/32\nPersistentKeepalive = 1";
        let towards_right = if extra[1].is_empty() {
            default
        } else {
            extra[1]
        };
        let (allowed, rest) = towards_right
            .strip_prefix("AllowedIPs = ")
            .and_then(|text| text.split_once('\n'))
            .expect("AllowedIPs first");
        let endpoint = format!("Endpoint = 192.0.2.2:{TUNNEL_PORT}\n{rest}");
        let endpoint = if rest.contains("Endpoint") {
            rest.to_owned()
        } else {
            endpoint
        };
        left.write(&(interface(0, "10.80.0.1/24", extra[0]) + &peer(1, allowed, &endpoint)));
        right.write(&(interface(1, "10.80.0.2/24", "") + &peer(0, "10.80.0.1/32", "")));
        Ok(World {
            left,
            right,
            folder,
        })
    }

    /// Starts a tunnel and waits until it is up.
    fn up(&self, host: &Host) -> Tunnel {
        let mut tunnel = self.start(host, &mut self.seikan(&["up", host.config()]));
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        if !line.starts_with(&format!("{} is up", host.interface)) {
            let mut errors = String::new();
            let stderr = tunnel.child.stderr.as_mut().expect("piped");
            stderr.read_to_string(&mut errors).expect("read");
            panic!("not up: {line:?}: {errors}");
        }
        tunnel
    }

    fn start(&self, host: &Host, command: &mut Command) -> Tunnel {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = host.namespace.spawn_command(command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    /// Runs a command on a host to its end.
    fn run(&self, host: &Host, words: &[&str]) -> Output {
        let mut tunnel = self.start(host, &mut self.seikan(words));
        let status = tunnel.wait(Duration::from_secs(20));
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        tunnel.stdout.read_to_end(&mut stdout).expect("read");
        let errors = tunnel.child.stderr.as_mut().expect("piped");
        errors.read_to_end(&mut stderr).expect("read");
        Output {
            status,
            stdout,
            stderr,
        }
    }

    fn seikan(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.args(words);
        self.settle(&mut command);
        command
    }

    /// A shell with mounts of its own, in which `$seikan` and `$folder` are set.
    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]);
        command.env("seikan", env!("CARGO_BIN_EXE_seikan"));
        command.env("folder", self.folder.path());
        self.settle(&mut command);
        command
    }

    fn settle(&self, command: &mut Command) {
        for name in ["PROTOCOL", "OFFLOAD", "METRICS", "MTU"] {
            command.env_remove(format!("SEIKAN_{name}"));
        }
        command.env("SEIKAN_RUN_DIR", self.folder.path().join("run"));
    }

    /// Both tunnels, and an echo that has come through them.
    fn both_up(&self) -> [Tunnel; 2] {
        let tunnels = [self.up(&self.right), self.up(&self.left)];
        assert!(self.answers_within(Duration::from_secs(10)), "no echo");
        tunnels
    }

    /// Whether a datagram comes back from the right through the tunnel.
    fn answers_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let right = &self.right.namespace;
            let stop = &stop;
            scope.spawn(move || right.run(|| echo(stop)));
            let answered = self.left.namespace.run(|| ask(until)).expect("namespace");
            stop.store(true, Ordering::Relaxed);
            answered
        })
    }
}

/// Sends back what comes, until told to stop. The socket is opened anew when its interface went.
fn echo(stop: &std::sync::atomic::AtomicBool) {
    let socket = UdpSocket::bind(("0.0.0.0", ECHO_PORT)).expect("bind");
    let pause = Some(Duration::from_millis(50));
    socket.set_read_timeout(pause).expect("timeout");
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}

fn ask(until: Instant) -> bool {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
    let pause = Some(Duration::from_millis(200));
    socket.set_read_timeout(pause).expect("timeout");
    let to: SocketAddr = ([10, 80, 0, 2], ECHO_PORT).into();
    let mut buffer = [0; 64];
    while Instant::now() < until {
        let _ = socket.send_to(b"are you there?", to);
        if socket.recv_from(&mut buffer).is_ok() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}

impl Host {
    fn add_address(&self, address: &str) {
        let index = self.netlink.link("under").expect("link").index;
        let address = address.parse().expect("address");
        self.netlink.add_address(index, address).expect("address");
        self.netlink.set_up(index).expect("up");
    }

    /// Makes a default route the only way to the other host.
    fn know_the_right_by_default_only(&self) {
        self.remove_address("192.0.2.1/24");
        self.add_address("192.0.2.1/32");
        let link = self.netlink.link("under").expect("link").index;
        let route = Route::to("0.0.0.0/0".parse().expect("prefix")).device(link);
        self.netlink.add_route(&route).expect("route");
    }

    fn remove_address(&self, address: &str) {
        let index = self.netlink.link("under").expect("link").index;
        let address = address.parse().expect("address");
        self.netlink.delete_address(index, address).expect("delete");
    }

    fn write(&self, config: &str) {
        fs::write(&self.config, config).expect("write");
        fs::set_permissions(&self.config, fs::Permissions::from_mode(0o600)).expect("mode");
    }

    /// Adds lines to the configuration's first section.
    fn add_to_interface(&self, lines: &str) {
        let text = fs::read_to_string(&self.config).expect("read");
        self.write(&text.replacen("[Interface]\n", &format!("[Interface]\n{lines}\n"), 1));
    }

    fn config(&self) -> &str {
        self.config.to_str().expect("UTF-8")
    }

    fn has_tunnel(&self) -> bool {
        self.netlink
            .link_index(&self.interface)
            .expect("links")
            .is_some()
    }

    /// Everything that a tunnel may leave: its interface, rules, the sysctl, a firewall table.
    fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        if self.has_tunnel() {
            traces.push("the interface".to_owned());
        }
        for family in [Family::V4, Family::V6] {
            // main and default (IPv4), main (IPv6); the local table's is passed over.
            let rules = self.netlink.rules(family).expect("rules");
            let own = rules
                .iter()
                .filter(|rule| rule.priority.is_some_and(|p| (1..32766).contains(&p)));
            traces.extend(own.map(ToString::to_string));
        }
        let mark = || fs::read_to_string("/proc/sys/net/ipv4/conf/all/src_valid_mark");
        let mark = self
            .namespace
            .run(mark)
            .expect("namespace")
            .expect("sysctl");
        if mark.trim() != "0" {
            traces.push("src_valid_mark".to_owned());
        }
        let mut nft = Command::new("nft");
        nft.args(["list", "tables"]).stdout(Stdio::piped());
        if let Ok(child) = self.namespace.spawn_command(&mut nft) {
            let tables = child.wait_with_output().expect("nft").stdout;
            let tables = String::from_utf8_lossy(&tables).into_owned();
            traces.extend(tables.lines().map(str::to_owned));
        }
        traces
    }
}

impl Tunnel {
    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let kill = Command::new("sh")
            .args(["-c", &format!("kill -{name} {pid}")])
            .status();
        assert!(kill.expect("sh").success());
    }

    fn wait(&mut self, patience: Duration) -> ExitStatus {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it by a signal; gives its exit code and what it had to say.
    fn ended(mut self) -> (Option<i32>, String) {
        let code = self.wait(Duration::from_secs(10)).code();
        let mut errors = String::new();
        let stderr = self.child.stderr.as_mut().expect("piped");
        stderr.read_to_string(&mut errors).expect("read");
        (code, errors)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn key_pair() -> (String, String) {
    let binary = env!("CARGO_BIN_EXE_seikan");
    let private = Command::new(binary).arg("genkey").output().expect("genkey");
    let mut child = Command::new(binary)
        .arg("pubkey")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("pubkey");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(&private.stdout).expect("write");
    drop(input);
    let public = child.wait_with_output().expect("pubkey").stdout;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8").trim().to_owned();
    (text(private.stdout), text(public))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits for something that another process does.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(8);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

const DEFAULT_ROUTE: &str = "AllowedIPs = 0.0.0.0/0, ::/0\nPersistentKeepalive = 1";

#[test]
fn a_killed_peer_is_back_when_it_is_started_again() {
    in_world(["", ""], |world| {
        let [mut right, _left] = world.both_up();
        right.child.kill().expect("kill");
        right.child.wait().expect("wait");
        let _again = world.up(&world.right);
        assert!(world.answers_within(Duration::from_secs(30)));
    });
}

#[test]
fn a_deleted_interface_ends_the_tunnel_with_a_word_and_it_can_be_started_again() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, left] = world.both_up();
        let index = world
            .left
            .netlink
            .link(&world.left.interface)
            .expect("link")
            .index;
        world.left.netlink.delete_link(index).expect("delete");
        let (code, errors) = left.ended();
        assert_eq!(code, Some(1));
        assert!(errors.contains("was deleted under the tunnel"), "{errors}");
        assert_eq!(world.left.traces(), Vec::<String>::new());
        let _again = world.up(&world.left);
        assert!(world.answers_within(Duration::from_secs(10)));
    });
}

#[test]
fn a_new_address_under_the_tunnel_is_found_out_in_seconds() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        world.left.remove_address("192.0.2.1/24");
        world.left.add_address("192.0.2.77/24");
        assert!(world.answers_within(Duration::from_secs(10)));
    });
}

#[test]
fn thirty_seconds_without_a_link_are_survived() {
    in_world(["", ""], |world| {
        let _tunnels = world.both_up();
        let link = world.right.netlink.link("under").expect("link").index;
        world.right.netlink.set_down(link).expect("down");
        assert!(!world.answers_within(Duration::from_secs(30)));
        world.right.netlink.set_up(link).expect("up");
        assert!(world.answers_within(Duration::from_secs(15)));
    });
}

#[test]
fn a_peer_whose_name_moved_is_found_again() {
    // No keepalive on either side: nobody tells the left where the right went.
    let peer = "AllowedIPs = 10.80.0.2/32\nEndpoint = right.example:51820";
    in_world(["", peer], |world| {
        let hosts = world.folder.path().join("hosts");
        fs::write(&hosts, "192.0.2.2 right.example\n").expect("write");
        let _right = world.up(&world.right);
        let script = "mount --bind $folder/hosts /etc/hosts && exec $seikan up \"$0\"";
        let mut command = world.shell(script);
        let _left = world.start(&world.left, command.arg(world.left.config()));
        assert!(world.answers_within(Duration::from_secs(10)), "no echo");
        world.right.remove_address("192.0.2.2/24");
        world.right.add_address("192.0.2.3/24");
        fs::write(&hosts, "192.0.2.3 right.example\n").expect("write");
        // 15 s until silence is noticed, two tries 5 s apart, one look after 5 s more.
        assert!(world.answers_within(Duration::from_secs(50)));
    });
}

#[test]
fn a_name_that_cannot_be_resolved_yet_is_tried_again() {
    let peer = "AllowedIPs = 10.80.0.2/32\nEndpoint = right.example:51820\nPersistentKeepalive = 1";
    in_world(["", peer], |world| {
        let hosts = world.folder.path().join("hosts");
        fs::write(&hosts, "127.0.0.1 localhost\n").expect("write");
        let _right = world.up(&world.right);
        let script = "mount --bind $folder/hosts /etc/hosts && exec $seikan up \"$0\"";
        let mut command = world.shell(script);
        let _left = world.start(&world.left, command.arg(world.left.config()));
        eventually("no tunnel", || world.left.has_tunnel());
        fs::write(&hosts, "192.0.2.2 right.example\n").expect("write");
        assert!(world.answers_within(Duration::from_secs(20)));
    });
}

#[test]
fn a_second_instance_is_told_of_the_first_which_goes_on() {
    in_world(["", ""], |world| {
        let [_right, left] = world.both_up();
        let second = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(second.status.code(), Some(1));
        let errors = stderr(&second);
        assert!(errors.contains(&left.child.id().to_string()), "{errors}");
        assert!(world.answers_within(Duration::from_secs(5)));
    });
}

#[test]
fn a_default_route_does_not_swallow_the_tunnel_and_is_taken_back() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let [_right, left] = world.both_up();
        let somewhere: IpAddr = [198, 51, 100, 1].into();
        let route = world
            .left
            .netlink
            .route_get(somewhere, None)
            .expect("route");
        let tunnel = world
            .left
            .netlink
            .link(&world.left.interface)
            .expect("link");
        assert_eq!(route.device, tunnel.index);
        left.signal("TERM");
        let (code, errors) = left.ended();
        assert_eq!((code, errors.as_str()), (Some(0), ""));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn half_of_the_internet_does_not_swallow_the_endpoint() {
    let halves = "AllowedIPs = 0.0.0.0/1, 128.0.0.0/1\nPersistentKeepalive = 1";
    in_world(["", halves], |world| {
        world.left.know_the_right_by_default_only();
        let _tunnels = world.both_up();
    });
}

#[test]
fn what_peers_send_passes_a_strict_check_of_its_source() {
    in_world(["", DEFAULT_ROUTE], |world| {
        if Command::new("nft").arg("--version").output().is_err() {
            return skip("no `nft`: install nftables");
        }
        world.left.know_the_right_by_default_only();
        let strict = || fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1");
        let set = world.left.namespace.run(strict).expect("namespace");
        set.expect("sysctl");
        let _tunnels = world.both_up();
    });
}

#[test]
fn a_killed_tunnel_leaves_nothing_behind_and_its_hooks_are_made_good() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let mark = world.folder.path().join("mark");
        let path = mark.display();
        world
            .left
            .add_to_interface(&format!("PostUp = touch {path}\nPostDown = rm {path}"));
        let [_right, left] = world.both_up();
        assert!(mark.exists());
        left.signal("KILL");
        eventually("traces", || {
            world.left.traces().is_empty() && !mark.exists()
        });
    });
}

#[test]
fn a_hangup_does_nothing() {
    in_world(["", ""], |world| {
        let [_right, left] = world.both_up();
        left.signal("HUP");
        assert!(world.answers_within(Duration::from_secs(5)));
    });
}

#[test]
fn a_failing_hook_is_named_and_nothing_stays() {
    in_world(["PostUp = exit 7", DEFAULT_ROUTE], |world| {
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("the PostUp hook `exit 7` failed (exit status: 7)"),
            "{errors}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn hooks_run_in_order_and_with_the_interfaces_name() {
    in_world(["", ""], |world| {
        let log = world.folder.path().join("log");
        let hooks = ["PreUp", "PostUp", "PreDown", "PostDown"].map(|moment| {
            format!("{moment} = echo {moment} %i $(ls /sys/class/net >/dev/null; grep -c %i /proc/net/dev) >> {}", log.display())
        });
        world.left.add_to_interface(&hooks.join("\n"));
        let left = world.up(&world.left);
        left.signal("INT");
        assert_eq!(left.ended().0, Some(0));
        let name = &world.left.interface;
        let expected =
            format!("PreUp {name} 0\nPostUp {name} 1\nPreDown {name} 1\nPostDown {name} 0\n");
        assert_eq!(fs::read_to_string(&log).expect("log"), expected);
    });
}

#[test]
fn the_resolver_is_told_of_name_servers_and_of_their_end() {
    in_world(["DNS = 10.80.0.2, corp.example", ""], |world| {
        let (programs, record) = (
            world.folder.path().join("bin"),
            world.folder.path().join("dns"),
        );
        fs::create_dir(&programs).expect("folder");
        let resolvconf = programs.join("resolvconf");
        let script = format!(
            "#!/bin/sh\n{{ echo \"$1 ${{2##*.}}\"; cat; }} >> {}\n",
            record.display()
        );
        fs::write(&resolvconf, script).expect("write");
        fs::set_permissions(&resolvconf, fs::Permissions::from_mode(0o755)).expect("mode");
        let path = std::env::var("PATH").expect("PATH");
        let mut command = world.seikan(&["up", world.left.config()]);
        command.env("PATH", format!("{}:{path}", programs.display()));
        let mut left = world.start(&world.left, &mut command);
        let mut line = String::new();
        left.stdout.read_line(&mut line).expect("read");
        let name = &world.left.interface;
        let told = format!("-a {name}\nnameserver 10.80.0.2\nsearch corp.example\n");
        assert_eq!(fs::read_to_string(&record).expect("record"), told, "{line}");
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        let told = format!("{told}-d {name}\n");
        assert_eq!(fs::read_to_string(&record).expect("record"), told);
    });
}

#[test]
fn a_port_in_use_is_told_with_its_holder_and_nothing_stays() {
    in_world(["", DEFAULT_ROUTE], |world| {
        let bind = || UdpSocket::bind(("0.0.0.0", TUNNEL_PORT));
        let _held = world
            .left
            .namespace
            .run(bind)
            .expect("namespace")
            .expect("bind");
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        let holder = format!("(process {})", std::process::id());
        assert!(
            errors.contains("port 51820 is in use") && errors.contains(&holder),
            "{errors}"
        );
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn an_interface_of_somebody_else_is_left_alone() {
    in_world(["", ""], |world| {
        let name = &world.left.interface;
        world.left.netlink.create_bridge(name).expect("bridge");
        let output = world.run(&world.left, &["up", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("exists already: it is a bridge device"),
            "{errors}"
        );
        assert_eq!(world.left.netlink.link(name).expect("link").kind, "bridge");
    });
}

#[test]
fn in_the_background_it_returns_when_it_is_up() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        let output = world.run(&world.left, &["up", "-d", world.left.config()]);
        let errors = stderr(&output);
        assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""));
        assert!(world.answers_within(Duration::from_secs(10)), "no echo");
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert!(down.status.success(), "{}", stderr(&down));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn in_the_background_a_failure_comes_back() {
    in_world(["PreUp = exit 9", ""], |world| {
        let output = world.run(&world.left, &["up", "-d", world.left.config()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(errors.contains("PreUp hook `exit 9`"), "{errors}");
    });
}

#[test]
fn what_wg_set_is_saved() {
    in_world(["SaveConfig = true", ""], |world| {
        let left = world.up(&world.left);
        let (_, new) = key_pair();
        let mut set = Command::new("wg");
        set.args([
            "set",
            &world.left.interface,
            "peer",
            &new,
            "allowed-ips",
            "10.80.9.0/24",
        ]);
        match world.left.namespace.spawn_command(&mut set) {
            Ok(mut child) => assert!(child.wait().expect("wg").success()),
            Err(_) => return skip("no `wg`: install wireguard-tools"),
        }
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        let saved = fs::read_to_string(&world.left.config).expect("read");
        assert!(
            saved.contains(&new) && saved.contains("10.80.9.0/24"),
            "{saved}"
        );
    });
}

#[test]
fn on_a_full_disk_the_old_configuration_stays() {
    in_world(["SaveConfig = true", ""], |world| {
        let script = "mkdir $folder/small && mount -t tmpfs -o size=16k none $folder/small && \
             cp \"$0\" $folder/small && cd $folder/small && \
             { cat /dev/zero > fill 2>/dev/null; true; } && \
             $seikan up ./\"${0##*/}\"; echo rc $?; cmp \"$0\" ./\"${0##*/}\" && echo same; ls";
        let mut command = world.shell(script);
        let mut shell = world.start(&world.left, command.arg(world.left.config()));
        let mut line = String::new();
        shell.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}");
        let down = world.run(&world.left, &["down", &world.left.interface]);
        assert!(down.status.success(), "{}", stderr(&down));
        let mut rest = String::new();
        shell.stdout.read_to_string(&mut rest).expect("read");
        assert!(rest.contains("same"), "{rest}");
        assert!(!rest.contains(".new"), "{rest}");
        let (_, errors) = shell.ended();
        assert!(
            errors.contains("No space left on device") && errors.contains("the file is as it was"),
            "{errors}"
        );
    });
}

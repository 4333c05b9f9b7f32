//! Two hosts in namespaces, a link between them, and the real program on both.
//!
//! ```text
//!  left: SxxA 10.80.0.1 ==(tunnel)== SxxB 10.80.0.2 :right
//!        under 192.0.2.1 ---(veth)--- 192.0.2.2 under
//! ```

pub mod lossy;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use seikan_sys::netlink::{Family, Netlink, Route};
use seikan_sys::netns::NetNs;
use serde_json::Value;

/// Port of [`echo`].
pub const ECHO_PORT: u16 = 7;
/// Port of both tunnels.
pub const TUNNEL_PORT: u16 = 51820;

/// A host: a namespace with one end of the link.
pub struct Host {
    pub namespace: NetNs,
    pub netlink: Netlink,
    /// The interface of its tunnel, unique on this machine.
    pub interface: String,
    pub config: PathBuf,
}

/// Two hosts and their files.
pub struct World {
    pub left: Host,
    pub right: Host,
    pub folder: tempfile::TempDir,
}

/// A running `seikan`; killed with the test.
pub struct Tunnel {
    pub child: Child,
    pub stdout: BufReader<std::process::ChildStdout>,
}

/// Prints why a test is skipped; fails if no test may be skipped.
pub fn skip(reason: &str) {
    assert!(
        std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// Runs a test in a world of its own. `extra` has further lines of the left configuration,
/// in `[Interface]` and in `[Peer]`.
pub fn in_world(extra: [&str; 2], test: impl FnOnce(&World)) {
    if !std::path::Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    match World::create(extra) {
        Ok(world) => test(&world),
        Err(reason) => skip(&reason),
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A failed test leaves its tunnels in the background.
        if std::thread::panicking() {
            for host in [&self.left, &self.right] {
                let mut down = self.seikan(&["down", &host.interface]);
                down.stdout(Stdio::null()).stderr(Stdio::null());
                if let Ok(mut down) = host.namespace.spawn_command(&mut down) {
                    let _ = down.wait();
                }
            }
        }
    }
}

impl World {
    pub fn create(extra: [&str; 2]) -> Result<World, String> {
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
    pub fn up(&self, host: &Host) -> Tunnel {
        self.up_with(host, &[])
    }

    /// As [`World::up`], with more arguments.
    pub fn up_with(&self, host: &Host, words: &[&str]) -> Tunnel {
        let words = [&["up", host.config()], words].concat();
        let mut tunnel = self.start(host, &mut self.seikan(&words));
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

    pub fn start(&self, host: &Host, command: &mut Command) -> Tunnel {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = host.namespace.spawn_command(command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    /// Runs a command on a host to its end.
    pub fn run(&self, host: &Host, words: &[&str]) -> Output {
        let mut tunnel = self.start(host, &mut self.seikan(words));
        let mut errors = tunnel.child.stderr.take().expect("piped");
        // Both are read while it runs, or it would block on a full pipe.
        let (status, stdout, stderr) = std::thread::scope(|scope| {
            let errors = scope.spawn(move || {
                let mut text = Vec::new();
                errors.read_to_end(&mut text).map(|_| text)
            });
            let mut stdout = Vec::new();
            tunnel.stdout.read_to_end(&mut stdout).expect("read");
            let status = tunnel.wait(Duration::from_secs(20));
            (status, stdout, errors.join().expect("join").expect("read"))
        });
        Output {
            status,
            stdout,
            stderr,
        }
    }

    pub fn seikan(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.args(words);
        self.settle(&mut command);
        command
    }

    /// Returns a shell with its own mounts, in which `$seikan` and `$folder` are set.
    pub fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]);
        command.env("seikan", env!("CARGO_BIN_EXE_seikan"));
        command.env("folder", self.folder.path());
        self.settle(&mut command);
        command
    }

    pub fn settle(&self, command: &mut Command) {
        for name in ["PROTOCOL", "OFFLOAD", "METRICS", "MTU"] {
            command.env_remove(format!("SEIKAN_{name}"));
        }
        // Tests read standard error for what went wrong.
        command.env("SEIKAN_LOG", "warn");
        command.env("SEIKAN_RUN_DIR", self.folder.path().join("run"));
    }

    /// Starts both tunnels and waits for an echo through them.
    pub fn both_up(&self) -> [Tunnel; 2] {
        self.both_up_with(&[])
    }

    /// As [`World::both_up`], with more arguments after `up`.
    pub fn both_up_with(&self, words: &[&str]) -> [Tunnel; 2] {
        let tunnels = [&self.right, &self.left].map(|host| self.up_with(host, words));
        assert!(self.answers_within(PATIENCE), "no echo");
        tunnels
    }

    /// Returns `seikan status --json` of a host.
    pub fn status(&self, host: &Host) -> Value {
        let output = self.run(host, &["status", &host.interface, "--json"]);
        let errors = stderr(&output);
        assert!(output.status.success(), "{errors}");
        crate::schema::printed("status", &output.stdout)
    }

    /// Returns whether a datagram comes back from the right through the tunnel.
    pub fn answers_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let stop = AtomicBool::new(false);
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

/// Stops a background thread and waits for it, also if the test fails.
pub struct StopsAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Echoes datagrams of both families until it is stopped.
pub fn echo(stop: &AtomicBool) {
    // A kernel without IPv6 has the second only.
    let any: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    let any = any.map(|address| SocketAddr::new(address, ECHO_PORT));
    let socket = UdpSocket::bind(&any[..]).expect("bind");
    let pause = Some(Duration::from_millis(50));
    socket.set_read_timeout(pause).expect("timeout");
    let mut buffer = [0; 64];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}

pub fn ask(until: Instant) -> bool {
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
    pub fn add_address(&self, address: &str) {
        let index = self.netlink.link("under").expect("link").index;
        let address = address.parse().expect("address");
        self.netlink.add_address(index, address).expect("address");
        self.netlink.set_up(index).expect("up");
    }

    /// Makes a default route the only route to the other host.
    pub fn know_the_right_by_default_only(&self) {
        self.remove_address("192.0.2.1/24");
        self.add_address("192.0.2.1/32");
        let link = self.netlink.link("under").expect("link").index;
        let route = Route::to("0.0.0.0/0".parse().expect("prefix")).device(link);
        self.netlink.add_route(&route).expect("route");
    }

    pub fn remove_address(&self, address: &str) {
        let index = self.netlink.link("under").expect("link").index;
        let address = address.parse().expect("address");
        self.netlink.delete_address(index, address).expect("delete");
    }

    pub fn write(&self, config: &str) {
        fs::write(&self.config, config).expect("write");
        fs::set_permissions(&self.config, fs::Permissions::from_mode(0o600)).expect("mode");
    }

    /// Adds lines to the first section of the configuration.
    pub fn add_to_interface(&self, lines: &str) {
        let text = fs::read_to_string(&self.config).expect("read");
        self.write(&text.replacen("[Interface]\n", &format!("[Interface]\n{lines}\n"), 1));
    }

    pub fn config(&self) -> &str {
        self.config.to_str().expect("UTF-8")
    }

    pub fn has_tunnel(&self) -> bool {
        self.netlink
            .link_index(&self.interface)
            .expect("links")
            .is_some()
    }

    /// Returns everything that a tunnel may leave: its interface, rules, the sysctl, a firewall
    /// table.
    pub fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        if self.has_tunnel() {
            traces.push("the interface".to_owned());
        }
        for family in [Family::V4, Family::V6] {
            // main and default (IPv4), main (IPv6); the local table is skipped.
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
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let kill = Command::new("sh")
            .args(["-c", &format!("kill -{name} {pid}")])
            .status();
        assert!(kill.expect("sh").success());
    }

    /// Returns whether the process handles Ctrl-C by now.
    pub fn handles_ctrl_c(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("status");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.expect("a mask").trim(), 16);
        // SIGINT is 2, and the lowest bit is signal 1 (proc_pid_status(5)).
        caught.expect("hexadecimal") & 0b10 != 0
    }

    pub fn wait(&mut self, patience: Duration) -> ExitStatus {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for its end; returns its exit code and its standard error.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let code = self.wait(PATIENCE).code();
        let mut errors = String::new();
        let stderr = self.child.stderr.as_mut().expect("piped");
        stderr.read_to_string(&mut errors).expect("read");
        (code, errors)
    }
}

/// Returns a tunnel's monitor: its only child.
pub fn monitor_of(tunnel: &Tunnel) -> String {
    let pid = tunnel.child.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.expect("children").trim().to_owned()
}

impl Drop for Host {
    fn drop(&mut self) {
        // Files that a killed tunnel could not remove.
        let socket = format!("/var/run/wireguard/{}.sock", self.interface);
        let _ = fs::remove_file(socket);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn key_pair() -> (String, String) {
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

/// Returns a count of a direction (`inbound`, `outbound`) in the totals of a status.
pub fn number(status: &Value, direction: &str, name: &str) -> u64 {
    status["totals"][direction][name].as_u64().expect("a count")
}

/// Returns the drops for a reason in the totals of a status.
pub fn drops(status: &Value, direction: &str, reason: &str) -> u64 {
    let drops = &status["totals"][direction]["drops"];
    drops[reason].as_u64().unwrap_or(0)
}

/// Returns the unaccounted packets, outbound and inbound.
pub fn unaccounted(status: &Value) -> [i64; 2] {
    ["outbound", "inbound"].map(|direction| {
        let count = &status["totals"][direction]["unaccounted"];
        count.as_i64().expect("a count")
    })
}

/// Makes a directory that every user passes, as those above a service's directory have to be.
pub fn passable_folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).expect("set");
    folder
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Time limit for another process: much longer than needed, as only a failure takes that long, and
/// machines may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Whether times have to be kept at each attempt (`SEIKAN_STRICT=1`): for a machine that does nothing
/// else.
pub fn is_strict() -> bool {
    std::env::var_os("SEIKAN_STRICT").is_some_and(|value| value == "1")
}

/// Number of attempts to keep a time, one of which has to: other programs can only delay. One with
/// [`is_strict`].
pub fn tries() -> usize {
    if is_strict() { 1 } else { 3 }
}

/// Waits until a condition that depends on another process is true.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

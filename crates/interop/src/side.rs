//! One host of the pair and its WireGuard implementation.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use seikan_sys::netlink::AddressOptions;
use seikan_sys::netns::NetNs;

/// Name of the underlay's interface on either host.
pub(crate) const UPLINK: &str = "uplink";
/// Inner MTU that fits WireGuard over IPv6 into 1500 bytes.
const INNER_MTU: u32 = 1420;
/// Disables IPv6's duplicate address detection.
pub(crate) const USABLE_AT_ONCE: AddressOptions = AddressOptions {
    no_dad: true,
    no_prefix_route: false,
    replace: false,
};
/// Time for a daemon to create its interface and socket.
const START_LIMIT: Duration = Duration::from_secs(20);

/// A WireGuard implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implementation {
    /// Seikan with the WireGuard protocol.
    Seikan,
    /// Seikan with its native protocol.
    SeikanNative,
    /// golang.zx2c4.com/wireguard.
    WireguardGo,
    /// boringtun-cli of crates.io.
    Boringtun,
    /// gotatun-cli of crates.io.
    Gotatun,
}

impl Implementation {
    /// Seikan. `SEIKAN_STAND_IN=wireguard-go` replaces it, to distinguish its faults from the
    /// test's.
    pub fn under_test() -> Implementation {
        match std::env::var("SEIKAN_STAND_IN").as_deref() {
            Ok("wireguard-go") => Implementation::WireguardGo,
            Ok("boringtun") => Implementation::Boringtun,
            Ok("gotatun") => Implementation::Gotatun,
            _ => Implementation::Seikan,
        }
    }

    /// Returns the program, or the reason why it cannot run.
    pub fn program(self) -> Result<PathBuf> {
        let name = match self {
            Implementation::Seikan | Implementation::SeikanNative => return our_program(),
            Implementation::WireguardGo => "wireguard",
            Implementation::Boringtun => "boringtun-cli",
            Implementation::Gotatun => "gotatun",
        };
        crate::find_program(name)
            .with_context(|| format!("{name} is not in $SEIKAN_PEERS nor on PATH (make peers)"))
    }

    /// Whether it takes a configuration file; the others are configured through their sockets.
    fn reads_file(self) -> bool {
        matches!(self, Implementation::Seikan | Implementation::SeikanNative)
    }

    fn command(self, interface: &str, config: &Path) -> Result<Command> {
        let mut command = Command::new(self.program()?);
        match self {
            Implementation::Seikan => command
                .arg("up")
                .arg(config)
                .args(["--protocol", "wireguard"]),
            Implementation::SeikanNative => {
                command.arg("up").arg(config).args(["--protocol", "native"])
            }
            Implementation::WireguardGo => command.args(["-f", interface]),
            // Connected sockets cannot follow a change of the host's own address.
            Implementation::Boringtun => command.args([
                "-f",
                "--disable-drop-privileges",
                "--disable-connected-udp",
                interface,
            ]),
            Implementation::Gotatun => command.args(["-f", "--disable-drop-privileges", interface]),
        };
        Ok(command)
    }
}

/// Returns the `seikan` binary of this build: `$SEIKAN_BIN`, or the workspace's, built once per
/// run.
fn our_program() -> Result<PathBuf> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let build = || -> Result<PathBuf> {
        if let Some(program) = std::env::var_os("SEIKAN_BIN") {
            return Ok(program.into());
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build
            .args(["build", "--quiet", "--locked", "--package", "seikan-cli"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        ensure!(build.status()?.success(), "the command does not build");
        // This test is target/PROFILE/deps/NAME.
        let test = std::env::current_exe()?;
        let profile = test
            .ancestors()
            .nth(2)
            .context("the test is not in a target folder")?;
        Ok(profile.join("seikan"))
    };
    PROGRAM
        .get_or_init(|| build().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(anyhow::Error::msg)
}

/// One end: a host with its implementation, running or not.
pub struct Side {
    /// The host.
    pub host: NetNs,
    /// Its implementation.
    pub implementation: Implementation,
    /// Name of the tunnel's interface. Unique on the machine, because all sockets are in one
    /// folder.
    pub interface: String,
    /// Inner addresses, IPv4 then IPv6.
    pub inner: [IpNet; 2],
    /// Outer address in the family that the tunnel uses.
    pub outer: IpAddr,
    /// UDP port.
    pub port: u16,
    pub(crate) private_key: String,
    pub(crate) peer: Peer,
    pub(crate) folder: PathBuf,
    pub(crate) daemon: Option<Child>,
}

/// Configuration of one end's peer.
pub(crate) struct Peer {
    pub public_key: String,
    pub preshared_key: Option<String>,
    pub endpoint: Option<SocketAddr>,
    pub allowed_ips: [IpNet; 2],
    pub keepalive: u16,
}

impl Side {
    /// Starts the daemon, configures it and its interface, and returns once it can carry traffic.
    pub fn start(&mut self) -> Result<()> {
        let config = self.write_config()?;
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.log())?;
        let mut command = self.implementation.command(&self.interface, &config)?;
        command.env("SEIKAN_RUN_DIR", &self.folder);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.daemon = Some(self.host.spawn_command(&mut command)?);
        self.wait_for_interface()?;
        if !self.implementation.reads_file() {
            self.wg(&["setconf", &self.interface, &config.to_string_lossy()])?;
            self.configure_interface()?;
        }
        Ok(())
    }

    /// Kills the daemon with SIGKILL, like a crash or the kernel's OOM killer.
    pub fn kill(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("not running")?;
        daemon.kill()?;
        daemon.wait()?;
        Ok(())
    }

    /// Moves the host to another outer address and port, like a roaming laptop. The peer is not
    /// notified.
    pub fn roam(&mut self, address: IpAddr, port: u16) -> Result<()> {
        let netlink = self.host.netlink()?;
        let uplink = netlink.link(UPLINK)?.index;
        // In this order: the kernel removes a network's later addresses with its first.
        netlink.delete_address(uplink, underlay_net(self.outer)?)?;
        netlink.add_address_with(uplink, underlay_net(address)?, USABLE_AT_ONCE)?;
        self.outer = address;
        self.port = port;
        self.wg(&["set", &self.interface, "listen-port", &port.to_string()])?;
        Ok(())
    }

    /// Runs `wg` on this host and returns what it printed.
    pub fn wg(&self, arguments: &[&str]) -> Result<String> {
        run(&self.host, Command::new("wg").args(arguments))
    }

    /// A column of `wg show INTERFACE WHAT` for the only peer.
    pub fn show(&self, what: &str) -> Result<String> {
        let printed = self.wg(&["show", &self.interface, what])?;
        let value = printed
            .trim_end()
            .split_once('\t')
            .context("the interface has no peer")?
            .1;
        Ok(value.to_owned())
    }

    /// Returns the time since this end's last handshake; `None` if there was none.
    pub fn handshake_age(&self) -> Result<Option<Duration>> {
        let seconds = Duration::from_secs(self.show("latest-handshakes")?.parse()?);
        Ok(match self.implementation {
            _ if seconds.is_zero() => None,
            // Some implementations report the age when the interface requests the time.
            Implementation::Boringtun => Some(seconds),
            _ => Some(
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)?
                    .saturating_sub(seconds),
            ),
        })
    }

    /// Sends a raw request to the configuration socket and returns the response.
    pub fn uapi(&self, request: &str) -> Result<String> {
        let mut socket = UnixStream::connect(self.socket())?;
        socket.set_read_timeout(Some(START_LIMIT))?;
        socket.write_all(request.as_bytes())?;
        let mut answer = String::new();
        // A response ends with an empty line; the socket stays open for the next request.
        while !answer.ends_with("\n\n") {
            let mut part = [0; 4096];
            let length = socket.read(&mut part)?;
            if length == 0 {
                break;
            }
            answer.push_str(std::str::from_utf8(&part[..length])?);
        }
        Ok(answer)
    }

    /// Returns the daemon's resident memory in KiB.
    pub fn memory(&self) -> Result<u64> {
        let id = self.daemon.as_ref().context("not running")?.id();
        let status = fs::read_to_string(format!("/proc/{id}/status"))?;
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .context("no VmRSS")?;
        Ok(line
            .split_whitespace()
            .nth(1)
            .context("no value")?
            .parse()?)
    }

    /// Returns the daemon's output so far.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Returns the configuration in wg-quick's format, or without addresses in that of `wg
    /// setconf`.
    pub fn config_text(&self) -> String {
        let mut text = format!(
            "[Interface]\nPrivateKey = {}\nListenPort = {}\n",
            self.private_key, self.port
        );
        if self.implementation.reads_file() {
            text += &format!(
                "Address = {}, {}\nMTU = {INNER_MTU}\n",
                self.inner[0], self.inner[1]
            );
        }
        let peer = &self.peer;
        text += &format!(
            "\n[Peer]\nPublicKey = {}\nAllowedIPs = {}, {}\nPersistentKeepalive = {}\n",
            peer.public_key, peer.allowed_ips[0], peer.allowed_ips[1], peer.keepalive
        );
        if let Some(key) = &peer.preshared_key {
            text += &format!("PresharedKey = {key}\n");
        }
        if let Some(endpoint) = peer.endpoint {
            text += &format!("Endpoint = {endpoint}\n");
        }
        text
    }

    fn write_config(&self) -> Result<PathBuf> {
        let file = self.folder.join(format!("{}.conf", self.interface));
        let mut options = fs::File::options();
        let mut open = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&file)?;
        open.write_all(self.config_text().as_bytes())?;
        Ok(file)
    }

    fn wait_for_interface(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let netlink = self.host.netlink()?;
        loop {
            if let Some(status) = self.daemon.as_mut().context("not running")?.try_wait()? {
                bail!(
                    "{:?} ended with {status}:\n{}",
                    self.implementation,
                    self.log_text()
                );
            }
            let made = match netlink.link_index(&self.interface)? {
                // A daemon with a file also sets the addresses, the IPv6 address last.
                Some(index) if self.implementation.reads_file() => {
                    netlink.addresses(index)?.len() >= 2
                }
                Some(_) => true,
                None => false,
            };
            if made && self.answers() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{:?} made no interface:\n{}",
                self.implementation,
                self.log_text()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns whether the daemon can be configured: it has read its file, or serves its socket.
    /// The socket may be left over from an earlier daemon.
    fn answers(&self) -> bool {
        self.implementation.reads_file() || UnixStream::connect(self.socket()).is_ok()
    }

    fn configure_interface(&self) -> Result<()> {
        let netlink = self.host.netlink()?;
        let index = netlink.link(&self.interface)?.index;
        netlink.set_mtu(index, INNER_MTU)?;
        for address in self.inner {
            netlink.add_address_with(index, address, USABLE_AT_ONCE)?;
        }
        netlink.set_up(index)?;
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        Path::new("/var/run/wireguard").join(format!("{}.sock", self.interface))
    }

    fn log(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.interface))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if self.daemon.is_some() {
            let _ = self.kill();
        }
        let _ = fs::remove_file(self.socket());
    }
}

/// Runs a program on a host to its end; returns its output, or its error.
pub(crate) fn run(host: &NetNs, command: &mut Command) -> Result<String> {
    let child = host.spawn_command(
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    )?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

pub(crate) fn underlay_net(address: IpAddr) -> Result<IpNet> {
    Ok(IpNet::new(
        address,
        if address.is_ipv4() { 24 } else { 64 },
    )?)
}

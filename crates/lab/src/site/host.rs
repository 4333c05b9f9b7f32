//! Hosts: network namespaces with interfaces, addresses and routes.
//!
//! A namespace has no name: it ends with the last descriptor and process that holds it.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};

use clap::ValueEnum;
use ipnet::IpNet;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use seikan_load::Ends;
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::{AddressOptions, Netlink, Route};
use seikan_sys::netns::NetNs;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Result, setup};

/// Length of the prefix of the hosts' IPv4 networks.
const PREFIX4: u8 = 24;
/// Length of the prefix of the hosts' IPv6 networks.
const PREFIX6: u8 = 64;
/// Value of `napi_defer_hard_irqs` in [`Host::moderate`], with which an idle NIC practically never
/// interrupts.
const DEFERRED: &str = "1000000";
/// Bytes that a rate-limited NIC sends at once: more than the largest super-packet with the headers
/// of its segments, which tc-tbf(8) would otherwise split.
const BUCKET: u32 = 100_000;
/// Queue of a rate-limited NIC in bytes: 1,000 packets, the default of `txqueuelen`.
const NIC_QUEUE: u32 = 1_514_000;

/// Congestion control of TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Congestion {
    /// RFC 9438, the kernel's default
    #[default]
    Cubic,
    /// RFC 5681
    Reno,
    /// By measured rate and round trip; hardly affected by loss
    Bbr,
}

impl Congestion {
    /// Returns the kernel's name of the algorithm.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cubic => "cubic",
            Self::Reno => "reno",
            Self::Bbr => "bbr",
        }
    }
}

/// A host: a network namespace with one interface on the link.
#[derive(Clone, Debug)]
pub struct Host {
    /// `A` or `B`, or `M` in the middle.
    pub name: &'static str,
    /// Name of the interface on the link.
    pub device: String,
    /// Address on the link (IPv4).
    pub address: IpAddr,
    /// Address on the link (IPv6).
    pub address6: IpAddr,
    /// Address inside a tunnel (IPv4), for tunnels to configure.
    pub inner: IpAddr,
    /// Address inside a tunnel (IPv6).
    pub inner6: IpAddr,
    /// Networks that a tunnel reaches through this host, in addition to its own inner address.
    pub behind: Vec<IpNet>,
    netns: Arc<NetNs>,
    /// Congestion control that loads request themselves, because the machine does not allow it as
    /// the namespace's default.
    congestion: OnceLock<Congestion>,
}

impl Host {
    /// Creates a host that has only the loopback interface. `number` is the last part of its
    /// addresses.
    ///
    /// # Errors
    /// When the kernel refuses a namespace.
    pub fn create(name: &'static str, number: u8) -> Result<Self> {
        let netns = Arc::new(NetNs::create()?);
        let v6 = |net: u16| IpAddr::V6(Ipv6Addr::new(net, 0, 0, 0, 0, 0, 0, u16::from(number)));
        Ok(Self {
            name,
            device: format!("link{name}"),
            address: Ipv4Addr::new(10, 77, 0, number).into(),
            address6: v6(0xfd77),
            inner: Ipv4Addr::new(10, 78, 0, number).into(),
            inner6: v6(0xfd78),
            behind: Vec::new(),
            netns,
            congestion: OnceLock::new(),
        })
    }

    /// Runs `work` in a thread inside the host; sockets opened there belong to the host for good.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(self.netns.run(work)?)
    }

    /// Starts a program inside the host. The kernel kills it when this process ends.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        self.netns.spawn_command(command)
    }

    /// Runs a program inside the host to its end, with this input, and returns its output.
    ///
    /// # Errors
    /// The program cannot be started; it fails, with the text that it wrote to standard error.
    pub(crate) fn output(&self, command: &mut Command, input: &str) -> Result<String> {
        output(Some(self), command, input)
    }

    /// Runs a command line inside the host; words are separated by blanks.
    pub(crate) fn tool(&self, line: &str) -> Result<()> {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or_default());
        self.output(command.args(words), "").map(drop)
    }

    /// Loads rules of nftables inside the host.
    pub(crate) fn filter(&self, rules: &str) -> Result<()> {
        let mut nft = Command::new("nft");
        self.output(nft.args(["-f", "-"]), rules).map(drop)
    }

    /// Runs `ip link set dev DEVICE` with these words inside the host.
    pub(crate) fn set_link(&self, device: &str, words: &str) -> Result<()> {
        self.tool(&format!("ip link set dev {device} {words}"))
    }

    /// Returns the host's addresses on the link, IPv4 first.
    pub(crate) fn addresses(&self) -> [IpAddr; 2] {
        [self.address, self.address6]
    }

    /// Returns the ends of a load from this host to `target`, an address of `server`.
    pub(crate) fn to<'a>(&'a self, server: &'a Host, target: IpAddr) -> Ends<'a> {
        Ends {
            client: &self.netns,
            server: &server.netns,
            target,
            sources: &[],
            congestion: self.congestion.get().map(|congestion| congestion.name()),
            forward: None,
        }
    }

    /// Returns the namespace, for operations that this type does not offer.
    pub fn netns(&self) -> &NetNs {
        &self.netns
    }

    /// Opens a netlink socket inside the host.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn netlink(&self) -> Result<Netlink> {
        Ok(self.netns.netlink()?)
    }

    /// Returns the index of an interface.
    ///
    /// # Errors
    /// There is no such interface.
    pub fn index(&self, device: &str) -> Result<u32> {
        Ok(self.netlink()?.link(device)?.index)
    }

    /// Gives `device` the host's tunnel addresses and an MTU, and sets it up.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses.
    pub fn configure_tunnel(&self, device: &str, mtu: u32) -> Result<()> {
        self.configure(device, mtu, &[self.inner, self.inner6])
    }

    /// Gives `device` an MTU and addresses, with prefixes of /24 for IPv4 and /64 for IPv6, and
    /// sets it up.
    pub(crate) fn configure(&self, device: &str, mtu: u32, addresses: &[IpAddr]) -> Result<()> {
        let netlink = self.netlink()?;
        let index = netlink.link(device)?.index;
        netlink.set_mtu(index, mtu)?;
        for address in addresses {
            self.add_address(device, network(*address))?;
        }
        Ok(netlink.set_up(index)?)
    }

    /// Adds an address, which is usable at once (no duplicate address detection). Without IPv6 in
    /// the kernel, an IPv6 address is left out.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses.
    pub fn add_address(&self, device: &str, address: IpNet) -> Result<()> {
        if !is_available(address.addr()) {
            return Ok(());
        }
        let netlink = self.netlink()?;
        let options = AddressOptions {
            no_dad: address.addr().is_ipv6(),
            ..AddressOptions::default()
        };
        let index = netlink.link(device)?.index;
        Ok(netlink.add_address_with(index, address, options)?)
    }

    /// Adds a route. Without IPv6 in the kernel, a route of IPv6 is left out.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_route(&self, route: &Route) -> Result<()> {
        if !is_available(route.destination.addr()) {
            return Ok(());
        }
        Ok(self.netlink()?.add_route(route)?)
    }

    /// Adds a default route via `gateway`, an address in the network of `device`.
    pub(crate) fn add_default_route(&self, gateway: IpAddr, device: &str) -> Result<()> {
        let any = match gateway {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let route = Route::to(IpNet::new_assert(any, 0)).via(gateway);
        self.add_route(&route.device(self.index(device)?))
    }

    /// Sets an interface up.
    pub(crate) fn set_up(&self, device: &str) -> Result<()> {
        let netlink = self.netlink()?;
        Ok(netlink.set_up(netlink.link(device)?.index)?)
    }

    /// Creates a bridge with these ports, and sets all of them up.
    pub(crate) fn bridge(&self, name: &str, ports: &[&str]) -> Result<()> {
        let bridge = self.netlink()?.create_bridge(name)?;
        for port in ports {
            self.add_port(name, port)?;
        }
        Ok(self.netlink()?.set_up(bridge)?)
    }

    /// Replaces an address.
    pub(crate) fn replace_address(&self, device: &str, [old, new]: [IpNet; 2]) -> Result<()> {
        let netlink = self.netlink()?;
        netlink.delete_address(netlink.link(device)?.index, old)?;
        self.add_address(device, new)
    }

    /// Makes an interface a port of a bridge, and sets it up.
    pub(crate) fn add_port(&self, bridge: &str, port: &str) -> Result<()> {
        let netlink = self.netlink()?;
        let index = netlink.link(port)?.index;
        netlink.set_master(index, Some(netlink.link(bridge)?.index))?;
        Ok(netlink.set_up(index)?)
    }

    /// Writes `value` to `/proc/sys/NAME`. Without IPv6 in the kernel, a setting of IPv6 is left
    /// out.
    ///
    /// # Errors
    /// There is no such setting, or the kernel refuses the value.
    pub fn write_sysctl(&self, name: &str, value: &str) -> Result<()> {
        if name.starts_with("net/ipv6") && !has_ipv6() {
            return Ok(());
        }
        let file = format!("/proc/sys/{name}");
        // The file belongs to the namespace of the thread that opens it.
        self.run(|| std::fs::write(&file, value))?
            .doing(format!("write {value} to {file} of host {}", self.name))
    }

    /// Switches forwarding of IPv4 on or off.
    pub(crate) fn forward(&self, on: bool) -> Result<()> {
        self.write_sysctl("net/ipv4/ip_forward", if on { "1" } else { "0" })
    }

    /// Lets the host forward both families.
    pub(crate) fn forward_all(&self) -> Result<()> {
        self.forward(true)?;
        self.forward6()
    }

    /// Lets the host forward IPv6.
    pub(crate) fn forward6(&self) -> Result<()> {
        self.write_sysctl("net/ipv6/conf/all/forwarding", "1")
    }

    /// Sets the host's default congestion control of TCP, as `sysctl
    /// net.ipv4.tcp_congestion_control=NAME` does.
    ///
    /// A namespace may use only algorithms that the machine allows to all
    /// (`net.ipv4.tcp_allowed_congestion_control`). If the algorithm is not allowed, the loads of
    /// this host request it for their own sockets, and other programs use Reno, which is always
    /// allowed.
    pub(crate) fn set_congestion_control(&self, congestion: Congestion) -> Result<()> {
        let write =
            |of: Congestion| self.write_sysctl("net/ipv4/tcp_congestion_control", of.name());
        write(congestion).or_else(|_| {
            let _ = self.congestion.set(congestion);
            write(Congestion::Reno)
        })
    }

    /// Switches offloads of `device` on or off, one after the other.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_features(&self, device: &str, features: &[(Feature, bool)]) -> Result<()> {
        let ethtool = self.netns.ethtool()?;
        features
            .iter()
            .try_for_each(|(feature, on)| ethtool.set_feature(device, *feature, *on))
            .map_err(|e| setup(format!("host {}: {e}", self.name)))
    }

    /// Limits the rate at which an interface sends, in bit/s, as a NIC of that speed does.
    pub(crate) fn limit(&self, device: &str, rate: u64) -> Result<()> {
        self.tool(&format!(
            "tc qdisc replace dev {device} root tbf rate {rate}bit burst {BUCKET} limit {NIC_QUEUE}"
        ))
    }

    /// Sets the minimum interval at which an interface polls for received packets, in microseconds.
    pub(crate) fn moderate(&self, device: &str, microseconds: u32) -> Result<()> {
        // A veth polls only with receive offload, and only if the sender does not defer
        // segmentation to it.
        self.set_features(device, &[(Feature::Gro, true), (Feature::Tso, false)])?;
        let nanoseconds = format!("{microseconds}000");
        self.set_attribute(&format!("{device}/gro_flush_timeout"), &nanoseconds)?;
        self.set_attribute(&format!("{device}/napi_defer_hard_irqs"), DEFERRED)
            .map(drop)
    }

    /// Steers received packets of `device` to these processors (RPS). Returns the former setting.
    pub(crate) fn steer(&self, device: &str, cpus: &[u32]) -> Result<String> {
        self.set_attribute(&steering_file(device), &seikan_sys::softirq::mask(cpus))
    }

    /// Writes a file below `/sys/class/net`, and returns its former content. A sysfs mount shows
    /// the network namespace of the process that mounted it. The writing thread therefore mounts
    /// sysfs anew, in a mount namespace that ends with the thread.
    ///
    /// # Errors
    /// When there is no such file or the kernel refuses.
    pub fn set_attribute(&self, path: &str, value: &str) -> Result<String> {
        let file = format!("/sys/class/net/{path}");
        self.run(|| {
            let none: Option<&str> = None;
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none)?;
            let before = std::fs::read_to_string(&file)?;
            std::fs::write(&file, value)?;
            Ok(before)
        })?
        .doing(format!("write {value} to {file} of host {}", self.name))
    }
}

/// Runs a program to its end, inside a host if one is given, with this input, and returns its
/// output.
///
/// # Errors
/// The program cannot be started; it fails, with the text that it wrote to standard error.
pub(crate) fn output(host: Option<&Host>, command: &mut Command, input: &str) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let place = host.map_or_else(String::new, |host| format!(" on host {}", host.name));
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = match host {
        Some(host) => host.spawn(command),
        None => command.spawn(),
    };
    let output = child
        .and_then(|mut child| {
            if let Some(mut stdin) = child.stdin.take() {
                // A program that ends before it has read its input reports the reason itself.
                let _ = stdin.write_all(input.as_bytes());
            }
            child.wait_with_output()
        })
        .doing(format!(
            "run `{program}`{place}: is it installed, and on PATH?"
        ))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    Err(setup(format!(
        "`{program} {}`{place} failed: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    )))
}

/// Returns the file below `/sys/class/net` that sets which processors handle a device's received
/// packets.
pub(crate) fn steering_file(device: &str) -> String {
    format!("{device}/queues/rx-0/rps_cpus")
}

/// Returns the numbers of the processors that this process may use, in ascending order; not empty.
pub(crate) fn all_cpus() -> Vec<u32> {
    let allowed = seikan_sys::schedule::affinity(std::process::id()).unwrap_or_default();
    if allowed.is_empty() { vec![0] } else { allowed }
}

/// Returns an address with the prefix length of the lab's networks in its family.
pub(crate) fn network(address: IpAddr) -> IpNet {
    let length = if address.is_ipv4() { PREFIX4 } else { PREFIX6 };
    IpNet::new_assert(address, length)
}

/// Whether the kernel has IPv6. A kernel booted with ipv6.disable=1 has none.
fn has_ipv6() -> bool {
    Path::new("/proc/sys/net/ipv6").exists()
}

fn is_available(address: IpAddr) -> bool {
    address.is_ipv4() || has_ipv6()
}

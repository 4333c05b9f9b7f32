//! Two tunnels of `nobody` in namespaces, in this process.
//!
//! ```text
//!  left  10.80.0.1, fd80::1 ==(tunnel)== 10.80.0.2, fd80::2  right
//!        192.0.2.1 --------(veth)-------- 192.0.2.2
//! ```

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use seikan::{Config, Peer, Tunnel};
use seikan_config::{PrivateKey, encode_key};
use seikan_node::system::SystemRandom;
use seikan_sys::netns::NetNs;
use std::future::Future;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Duration;

/// A failure waits that long.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const RIGHT_V4: &str = "10.80.0.2";
pub const RIGHT_V6: &str = "fd80::2";
const NOBODY: u32 = 65534;
pub const PORT: u16 = 51820;

/// Two hosts with a link.
pub struct Hosts {
    pub left: NetNs,
    pub right: NetNs,
}

/// The configurations of both ends.
pub struct Configs {
    pub left: seikan::Builder,
    pub right: seikan::Builder,
}

/// Prints why a test is skipped; fails if no test may be skipped.
pub fn skip(reason: &str) {
    let required = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!required, "{reason}");
    eprintln!("SKIPPED: {reason}");
}

impl Hosts {
    pub fn create() -> Result<Hosts, String> {
        let namespace = || NetNs::create().map_err(|error| error.to_string());
        let (left, right) = (namespace()?, namespace()?);
        let netlink = left.netlink().map_err(|error| error.to_string())?;
        let link = netlink.create_veth("under", "under", Some(right.as_fd()));
        link.map_err(|error| error.to_string())?;
        for (host, address) in [(&left, "192.0.2.1/24"), (&right, "192.0.2.2/24")] {
            let netlink = host.netlink().expect("netlink");
            let index = netlink.link_index("under").expect("listed");
            let index = index.expect("the link");
            let address = address.parse().expect("an address");
            netlink.add_address(index, address).expect("address");
            netlink.set_up(index).expect("up");
        }
        Ok(Hosts { left, right })
    }
}

/// Configurations of both ends: `left` knows where `right` is.
pub fn configs() -> Configs {
    let keys = [(); 2].map(|()| PrivateKey::generate(&mut SystemRandom));
    let end = |own: usize, v4: &str, v6: &str| {
        let builder = Config::builder().private_key(&encode_key(keys[own].as_bytes()));
        let (v4, v6) = (format!("{v4}/24"), format!("{v6}/64"));
        builder.listen_port(PORT).address(&v4).address(&v6)
    };
    let peer = |of: usize, name: &str, v4: &str, v6: &str| {
        let peer = Peer::new(&encode_key(keys[of].public().as_bytes())).name(name);
        let (v4, v6) = (format!("{v4}/32"), format!("{v6}/128"));
        peer.allowed_ip(&v4).allowed_ip(&v6)
    };
    let right = peer(1, "right", RIGHT_V4, RIGHT_V6).endpoint("192.0.2.2:51820");
    Configs {
        left: end(0, "10.80.0.1", "fd80::1").peer(right),
        right: end(1, RIGHT_V4, RIGHT_V6).peer(peer(0, "left", "10.80.0.1", "fd80::1")),
    }
}

/// Starts tunnels in these namespaces as a user without privileges. This process has none any more then.
pub fn start<const N: usize>(tunnels: [(&NetNs, Config); N]) -> [Tunnel; N] {
    let (starts, results): (Vec<_>, Vec<_>) = tunnels
        .map(|(host, config)| {
            let (start, wait) = mpsc::channel::<()>();
            let (done, result) = mpsc::channel();
            let connect = move || {
                wait.recv().expect("the user has changed");
                let tunnel = runtime().block_on(Tunnel::connect(config));
                done.send(tunnel.expect("a tunnel")).expect("awaited");
            };
            // A thread starts in the namespace of the thread that creates it.
            host.spawn_thread("start", connect).expect("a thread");
            (start, result)
        })
        .into_iter()
        .unzip();
    become_nobody();
    starts
        .iter()
        .for_each(|start| start.send(()).expect("waits"));
    let tunnels: Vec<Tunnel> = results
        .iter()
        .map(|result| result.recv().expect("a tunnel"))
        .collect();
    tunnels.try_into().expect("as many")
}

fn become_nobody() {
    let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    setgroups(&[]).expect("no groups");
    setresgid(group, group, group).expect("a group");
    setresuid(user, user, user).expect("a user");
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("read");
    let effective = status.lines().find(|line| line.starts_with("CapEff:"));
    assert_eq!(effective, Some("CapEff:\t0000000000000000"));
}

pub fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

/// Runs a test with two tunnels.
pub fn with_pair<F: Future<Output = ()>>(test: impl FnOnce(Tunnel, Tunnel) -> F) {
    let configs = configs();
    with_configs(configs, test);
}

pub fn with_configs<F: Future<Output = ()>>(
    configs: Configs,
    test: impl FnOnce(Tunnel, Tunnel) -> F,
) {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let left = configs.left.build().expect("a configuration");
    let right = configs.right.build().expect("a configuration");
    let [left, right] = start([(&hosts.left, left), (&hosts.right, right)]);
    let test = async { tokio::time::timeout(PATIENCE, test(left, right)).await };
    runtime().block_on(test).expect("in time");
}

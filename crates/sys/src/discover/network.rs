//! The interfaces of the namespace, and those on the path.

use ipnet::IpNet;
use seikan_observe::path::{LinkFacts, Unseen};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::ethtool::Ethtool;
use crate::netlink::{Address, Family, LinkNode, Netlink, NetlinkError, TABLE_MAIN};
use crate::softirq::{Steering, steering};

/// Maximum number of interfaces that are reported.
const LINKS_MAX: usize = 48;

/// The interfaces, read once, and a socket for further requests.
pub(super) struct Network {
    pub(super) netlink: Netlink,
    pub(super) nodes: Vec<LinkNode>,
    pub(super) addresses: Vec<Address>,
}

impl Network {
    pub(super) fn read() -> Result<Self, NetlinkError> {
        let netlink = Netlink::open()?;
        Ok(Self {
            nodes: netlink.topology()?,
            addresses: netlink.all_addresses()?,
            netlink,
        })
    }

    pub(super) fn named(&self, name: &str) -> Option<&LinkNode> {
        self.nodes.iter().find(|node| node.info.name == name)
    }

    pub(super) fn node(&self, index: u32) -> Option<&LinkNode> {
        self.nodes.iter().find(|node| node.info.index == index)
    }

    /// Returns the ports of a bridge or bond.
    pub(super) fn ports(&self, master: u32) -> impl Iterator<Item = &LinkNode> {
        let of = move |node: &&LinkNode| node.master == Some(master);
        self.nodes.iter().filter(of)
    }

    /// Returns the names of all interfaces except loopback, for people.
    pub(super) fn names(&self) -> String {
        let names = self.nodes.iter().map(|node| &node.info.name);
        let names: Vec<String> = names
            .filter(|name| *name != "lo")
            .take(LINKS_MAX)
            .map(|name| name.escape_debug().to_string())
            .collect();
        if names.is_empty() {
            "no interface but loopback".into()
        } else {
            names.join(", ")
        }
    }

    /// Returns the addresses of an interface, with their network prefixes.
    pub(super) fn addresses(&self, index: u32) -> Vec<IpNet> {
        let of = self
            .addresses
            .iter()
            .filter(|address| address.index == index);
        of.map(|address| address.net).collect()
    }

    /// Returns the interface of the default route of an IP version, but not `except`.
    pub(super) fn default_device(&self, family: Family, except: u32) -> Option<u32> {
        let routes = self.netlink.routes(family, TABLE_MAIN).ok()?;
        let mut routes: Vec<_> = routes
            .into_iter()
            .filter(|route| route.destination.prefix_len() == 0)
            .filter(|route| route.device.is_some_and(|device| device != except))
            .collect();
        routes.sort_by_key(|route| route.metric);
        routes.first()?.device
    }

    /// Adds the interfaces connected to this one to `order`: its bridge or bond with the other
    /// ports, its own ports, and the links below it.
    pub(super) fn surround(&self, index: u32, order: &mut Vec<u32>) {
        let mut next = vec![index];
        while let Some(index) = next.pop() {
            if order.contains(&index) || order.len() >= LINKS_MAX {
                continue;
            }
            let Some(node) = self.node(index) else {
                continue;
            };
            order.push(index);
            // A stack, so the last one pushed comes first.
            let mut near = Vec::new();
            // The other end of a veth matters only if it is a bridge port.
            let leads_on = |lower: &u32| {
                node.info.kind != "veth" || self.node(*lower).is_some_and(|n| n.master.is_some())
            };
            near.extend(node.lower.filter(leads_on));
            near.extend(node.master);
            near.extend(self.ports(index).map(|port| port.info.index));
            near.reverse();
            next.extend(near);
        }
    }

    /// Returns the facts of these interfaces.
    pub(super) fn facts(&self, order: &[u32], unseen: &mut Vec<Unseen>) -> Vec<LinkFacts> {
        let nodes: Vec<&LinkNode> = order.iter().filter_map(|index| self.node(*index)).collect();
        let steerings = self.steerings(&nodes, unseen);
        let ethtool = Ethtool::open().ok();
        let mut links = Vec::new();
        for (node, steering) in nodes.into_iter().zip(steerings) {
            let mut link = self.base(node);
            match ethtool.as_ref().map(|tool| tool.features(&link.name)) {
                Some(Ok(features)) => {
                    for feature in features.into_iter().filter(|f| !f.name.is_empty()) {
                        if feature.changeable {
                            link.changeable.push(feature.name.clone());
                        }
                        link.features.insert(feature.name, feature.active);
                    }
                }
                Some(Err(error)) => unseen.push(Unseen {
                    what: format!("the offloads of {}", link.name.escape_debug()),
                    why: error.to_string(),
                }),
                None => {}
            }
            match self.netlink.shaped_rate(node.info.index) {
                Ok(rate) => link.qdisc_rate = rate,
                Err(error) => unseen.push(Unseen {
                    what: format!("the rate of {}'s shaper", link.name.escape_debug()),
                    why: error.to_string(),
                }),
            }
            if let Some(steering) = steering.filter(|queues| !queues.is_empty()) {
                link.rx_queues = steering.len() as u32;
                link.rps = steering.into_iter().map(|queue| queue.cpus).collect();
                if link.rps.iter().all(Vec::is_empty) {
                    link.rps.clear();
                }
            }
            links.push(link);
        }
        links
    }

    fn base(&self, node: &LinkNode) -> LinkFacts {
        LinkFacts {
            name: node.info.name.clone(),
            kind: node.info.kind.clone(),
            mtu: node.info.mtu,
            queue_length: node.info.tx_queue_len,
            qdisc: node.qdisc.clone(),
            rx_queues: node.info.num_rx_queues,
            master: node
                .master
                .and_then(|index| Some(self.node(index)?.info.name.clone())),
            vnet_hdr: node.vnet_hdr,
            ..LinkFacts::default()
        }
    }

    /// Returns how the receive queues are spread over processors. If `/sys` belongs to another
    /// namespace, it is mounted again for a thread of its own, if the process may do that.
    fn steerings(
        &self,
        nodes: &[&LinkNode],
        unseen: &mut Vec<Unseen>,
    ) -> Vec<Option<Vec<Steering>>> {
        let read = || nodes.iter().map(|node| steering(&node.info)).collect();
        let mut found: Vec<Option<Vec<Steering>>> = read();
        if found.iter().any(Option::is_none)
            && let Some(again) = with_own_sysfs(read)
        {
            found = again;
        }
        for (node, steering) in nodes.iter().zip(&found) {
            if steering.is_none() {
                unseen.push(Unseen {
                    what: format!(
                        "the processors over which packets from {} are spread",
                        node.info.name.escape_debug()
                    ),
                    why: "/sys belongs to another network namespace; run the doctor as root".into(),
                });
            }
        }
        found
    }
}

/// Runs `work` on a thread with a mount namespace of its own, in which `/sys` belongs to the
/// network namespace of the calling thread. Returns `None` without the privilege.
fn with_own_sysfs<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let remount = || -> nix::Result<()> {
        let none: Option<&str> = None;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("sysfs"), "/sys", Some("sysfs"), flags, none)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("sysfs".into());
        let thread = thread.spawn_scoped(scope, || remount().ok().map(|()| work()));
        thread.ok()?.join().ok()?
    })
}

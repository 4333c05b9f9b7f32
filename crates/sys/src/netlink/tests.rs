//! Compares each request with the result that the kernel reports in another interface:
//! /sys/class/net in the sysfs of the namespace, /proc/net, getifaddrs(3), or a packet that
//! arrives.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;

use super::*;
use crate::test_namespace::{NetNs, namespace, sysfs};
use crate::testing::in_child;

/// A namespace with an interface `d0` (up; a veth whose other end `d1` is also there and up), and a
/// netlink socket in it.
struct Host {
    namespace: NetNs,
    netlink: Netlink,
    device: u32,
}

fn host() -> Option<Host> {
    let namespace = namespace()?;
    let netlink = namespace.netlink().unwrap();
    let device = create_sink(&netlink);
    Some(Host {
        namespace,
        netlink,
        device,
    })
}

/// Creates an interface that discards packets.
fn create_sink(netlink: &Netlink) -> u32 {
    let device = netlink.create_veth("d0", "d1", None).unwrap();
    netlink.set_up(device).unwrap();
    netlink.set_up(netlink.link("d1").unwrap().index).unwrap();
    device
}

impl Host {
    /// Returns an attribute from the namespace's own sysfs, which is mounted for the length of the
    /// call.
    fn sysfs(&self, name: &str, attribute: &str) -> String {
        self.sysfs_path(&format!("{name}/{attribute}"))
            .expect(attribute)
    }

    fn sysfs_path(&self, path: &str) -> Option<String> {
        sysfs(&self.namespace, path)
    }

    fn proc_net(&self, file: &str) -> String {
        self.namespace
            .run(|| fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap())
            .unwrap()
    }

    fn addresses_by_getifaddrs(&self) -> Vec<(String, IpAddr)> {
        self.namespace
            .run(|| {
                getifaddrs()
                    .unwrap()
                    .filter_map(|entry| {
                        let address = entry.address?;
                        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
                            (Some(v4), _) => v4.ip().into(),
                            (_, Some(v6)) => v6.ip().into(),
                            _ => return None,
                        };
                        Some((entry.interface_name, ip))
                    })
                    .collect()
            })
            .unwrap()
    }
}

fn net(text: &str) -> ipnet::IpNet {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

// Interfaces.

#[test]
fn link_agrees_with_sysfs() {
    let Some(host) = host() else { return };
    let link = host.netlink.link("d0").unwrap();
    assert_eq!(link.index.to_string(), host.sysfs("d0", "ifindex"));
    assert_eq!(link.mtu.to_string(), host.sysfs("d0", "mtu"));
    assert_eq!(
        link.tx_queue_len.to_string(),
        host.sysfs("d0", "tx_queue_len")
    );
    let address: Vec<_> = link
        .address
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(address.join(":"), host.sysfs("d0", "address"));
    assert_eq!(link.hardware_type.to_string(), host.sysfs("d0", "type"));
    assert_eq!(link.mac().map(|mac| mac.to_vec()), Some(link.address));
    assert_eq!(link.kind, "veth");
    assert!(link.up);
}

#[test]
fn links_agrees_with_proc() {
    let Some(host) = host() else { return };
    let mut names: Vec<_> = host
        .netlink
        .links()
        .unwrap()
        .into_iter()
        .map(|link| link.name)
        .collect();
    names.sort();
    let dev = host.proc_net("dev");
    let mut expected: Vec<_> = dev
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next())
        .map(str::trim)
        .collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

#[test]
fn link_index_of_an_absent_interface_is_none() {
    let Some(host) = host() else { return };
    assert_eq!(host.netlink.link_index("absent").unwrap(), None);
    assert_eq!(host.netlink.link_index("d0").unwrap(), Some(host.device));
}

#[test]
fn set_down_takes_the_flag_away() {
    let Some(host) = host() else { return };
    host.netlink.set_down(host.device).unwrap();
    let flags = host.sysfs("d0", "flags");
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap();
    assert_eq!(flags & libc::IFF_UP as u32, 0);
}

#[test]
fn set_mtu_arrives() {
    let Some(host) = host() else { return };
    host.netlink.set_mtu(host.device, 1420).unwrap();
    assert_eq!(host.sysfs("d0", "mtu"), "1420");
}

#[test]
fn set_tx_queue_len_arrives() {
    let Some(host) = host() else { return };
    host.netlink.set_tx_queue_len(host.device, 4096).unwrap();
    assert_eq!(host.sysfs("d0", "tx_queue_len"), "4096");
}

#[test]
fn set_gso_max_is_read_back() {
    // sysfs does not show these limits; iproute2 reads the same attributes.
    let Some(host) = host() else { return };
    host.netlink
        .set_gso_max(host.device, 30_000, 20, 25_000)
        .unwrap();
    let link = host.netlink.link("d0").unwrap();
    assert_eq!((link.gso_max_size, link.gso_max_segs), (30_000, 20));
    assert!(matches!(link.gso_ipv4_max_size, 25_000 | 0));
}

#[test]
fn rename_moves_the_name() {
    let Some(host) = host() else { return };
    host.netlink.set_down(host.device).unwrap();
    host.netlink.rename(host.device, "renamed").unwrap();
    assert_eq!(host.sysfs("renamed", "ifindex"), host.device.to_string());
}

#[test]
fn set_hardware_address_arrives() {
    let Some(host) = host() else { return };
    host.netlink
        .set_hardware_address(host.device, [2, 0, 0, 0, 0, 7])
        .unwrap();
    assert_eq!(host.sysfs("d0", "address"), "02:00:00:00:00:07");
}

#[test]
fn delete_link_removes_it() {
    let Some(host) = host() else { return };
    host.netlink.delete_link(host.device).unwrap();
    assert_eq!(host.sysfs_path("d0/ifindex"), None);
}

#[test]
fn set_master_makes_a_bridge_port() {
    let Some(host) = host() else { return };
    let bridge = host.netlink.create_bridge("br0").unwrap();
    host.netlink.set_master(host.device, Some(bridge)).unwrap();
    assert_eq!(
        host.sysfs("br0", "brif/d0/port_no")
            .trim_start_matches("0x"),
        "1"
    );
    host.netlink.set_master(host.device, None).unwrap();
    assert_eq!(host.sysfs_path("br0/brif/d0/port_no"), None);
}

/// Two namespaces joined by a veth pair, 10.0.0.1 and 10.0.0.2, fd00::1 and fd00::2.
fn pair() -> Option<(Host, Host)> {
    let (a, b) = (namespace()?, namespace()?);
    let (netlink, peer) = (a.netlink().unwrap(), b.netlink().unwrap());
    let device = netlink.create_veth("v0", "v1", Some(b.as_fd())).unwrap();
    let peer_device = peer.link("v1").unwrap().index;
    let options = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    for (netlink, device, last) in [(&netlink, device, 1), (&peer, peer_device, 2)] {
        netlink
            .add_address(device, net(&format!("10.0.0.{last}/24")))
            .unwrap();
        netlink
            .add_address_with(device, net(&format!("fd00::{last}/64")), options)
            .unwrap();
        netlink.set_up(device).unwrap();
    }
    Some((
        Host {
            namespace: a,
            netlink,
            device,
        },
        Host {
            namespace: b,
            netlink: peer,
            device: peer_device,
        },
    ))
}

fn datagram_crosses(a: &Host, b: &Host, from: &str, to: &str) -> (Vec<u8>, IpAddr) {
    let receiver = b
        .namespace
        .run(|| UdpSocket::bind((ip(to), 7000)).unwrap())
        .unwrap();
    receiver
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let sender = a
        .namespace
        .run(|| UdpSocket::bind((ip(from), 0)).unwrap())
        .unwrap();
    sender.send_to(b"across", (ip(to), 7000)).unwrap();
    let mut buffer = [0; 16];
    let (length, source) = receiver.recv_from(&mut buffer).unwrap();
    (buffer[..length].to_vec(), source.ip())
}

#[test]
fn a_datagram_crosses_the_veth_pair() {
    let Some((a, b)) = pair() else { return };
    assert_eq!(
        datagram_crosses(&a, &b, "10.0.0.1", "10.0.0.2"),
        (b"across".to_vec(), ip("10.0.0.1"))
    );
}

#[test]
fn an_ipv6_datagram_crosses_at_once() {
    let Some((a, b)) = pair() else { return };
    assert_eq!(
        datagram_crosses(&a, &b, "fd00::1", "fd00::2"),
        (b"across".to_vec(), ip("fd00::1"))
    );
}

#[test]
fn link_stats_count_the_datagram() {
    let Some((a, b)) = pair() else { return };
    let before = b.netlink.link_stats(b.device).unwrap();
    datagram_crosses(&a, &b, "10.0.0.1", "10.0.0.2");
    let after = b.netlink.link_stats(b.device).unwrap();
    assert!(after.rx_packets > before.rx_packets);
    // Ethernet, IPv4 and UDP headers and the six bytes.
    assert!(after.rx_bytes >= before.rx_bytes + 14 + 20 + 8 + 6);
}

#[test]
fn link_stats_are_those_of_sysfs() {
    let Some((a, b)) = pair() else { return };
    datagram_crosses(&a, &b, "10.0.0.1", "10.0.0.2");
    // No more traffic, except packets in flight: attempts to send would count as dropped.
    a.netlink.set_down(a.device).unwrap();
    b.netlink.set_down(b.device).unwrap();
    let names = [
        "rx_packets",
        "rx_bytes",
        "tx_packets",
        "tx_bytes",
        "rx_dropped",
        "tx_dropped",
        "rx_errors",
    ];
    for _ in 0..10 {
        let before = b.netlink.link_stats(b.device).unwrap();
        let shown = names.map(|name| b.sysfs("v1", &format!("statistics/{name}")));
        if b.netlink.link_stats(b.device).unwrap() != before {
            continue;
        }
        let read = [
            before.rx_packets,
            before.rx_bytes,
            before.tx_packets,
            before.tx_bytes,
            before.rx_dropped,
            before.tx_dropped,
            before.rx_errors,
        ];
        assert_eq!(read.map(|value| value.to_string()), shown, "{names:?}");
        return;
    }
    panic!("the counters of an interface that is down do not come to rest");
}

// Addresses.

#[test]
fn add_address_is_seen_by_getifaddrs() {
    let Some(host) = host() else { return };
    host.netlink
        .add_address(host.device, net("10.1.2.3/24"))
        .unwrap();
    host.netlink
        .add_address(host.device, net("fd01::3/64"))
        .unwrap();
    let seen = host.addresses_by_getifaddrs();
    assert!(seen.contains(&("d0".into(), ip("10.1.2.3"))), "{seen:?}");
    assert!(seen.contains(&("d0".into(), ip("fd01::3"))), "{seen:?}");
}

#[test]
fn addresses_agrees_with_getifaddrs() {
    let Some(host) = host() else { return };
    host.netlink
        .add_address(host.device, net("10.1.2.3/24"))
        .unwrap();
    let list = || {
        let addresses = host.netlink.addresses(host.device).unwrap().into_iter();
        addresses
            .map(|address| ("d0".to_owned(), address.net.addr()))
            .collect::<Vec<_>>()
    };
    // The kernel adds a link-local address at any time: compare with the state before and after.
    let (mut listed, mut expected) = loop {
        let before = list();
        let expected = host.addresses_by_getifaddrs();
        if before == list() {
            break (before, expected);
        }
    };
    expected.retain(|(name, _)| name == "d0");
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
}

#[test]
fn delete_address_takes_it_away() {
    let Some(host) = host() else { return };
    host.netlink
        .add_address(host.device, net("10.1.2.3/24"))
        .unwrap();
    host.netlink
        .delete_address(host.device, net("10.1.2.3/24"))
        .unwrap();
    assert!(
        !host
            .addresses_by_getifaddrs()
            .contains(&("d0".into(), ip("10.1.2.3")))
    );
}

#[test]
fn an_address_without_dad_is_never_tentative() {
    let Some((a, _b)) = pair() else { return };
    let address = net("fd00::77/64");
    let options = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    a.netlink
        .add_address_with(a.device, address, options)
        .unwrap();
    let listed = a.netlink.addresses(a.device).unwrap();
    assert!(
        !listed
            .iter()
            .find(|entry| entry.net == address)
            .unwrap()
            .tentative
    );
    // The flags column of if_inet6: IFA_F_TENTATIVE is 0x40.
    let line = a.proc_net("if_inet6");
    let line = line
        .lines()
        .find(|line| line.starts_with("fd000000000000000000000000000077"));
    let flags = u32::from_str_radix(line.unwrap().split_whitespace().nth(4).unwrap(), 16).unwrap();
    assert_eq!(flags & 0x40, 0);
}

#[test]
fn no_prefix_route_makes_no_route() {
    let Some(host) = host() else { return };
    let options = AddressOptions {
        no_prefix_route: true,
        ..AddressOptions::default()
    };
    host.netlink
        .add_address_with(host.device, net("10.1.2.3/24"), options)
        .unwrap();
    assert!(!host.proc_net("route").contains("d0"));
}

// Neighbours.

/// Two hosts on a link, of which `b` forwards and has the networks 10.77.0.0/24 and fd77::/64
/// behind another interface; `a` has routes for both out of its `v0`, without a next hop.
fn pair_with_networks_behind_b() -> Option<(Host, Host)> {
    let (a, b) = pair()?;
    let behind = b.netlink.create_veth("x0", "x1", None).unwrap();
    b.netlink.set_up(behind).unwrap();
    b.netlink
        .set_up(b.netlink.link("x1").unwrap().index)
        .unwrap();
    for prefix in ["10.77.0.0/24", "fd77::/64"] {
        b.netlink
            .add_route(&Route::to(net(prefix)).device(behind))
            .unwrap();
        a.netlink
            .add_route(&Route::to(net(prefix)).device(a.device))
            .unwrap();
    }
    // A failure takes three requests, by default a second apart.
    let hurry = |family| crate::sysctl::write(&[family, "neigh", "v0", "retrans_time_ms"], "50");
    let hurried = a
        .namespace
        .run(|| hurry("ipv4").and_then(|()| hurry("ipv6")));
    hurried.unwrap().unwrap();
    let settings = [
        (["ipv4", "conf", "all", "forwarding"], "1"),
        (["ipv4", "neigh", "v1", "proxy_delay"], "0"),
        (["ipv6", "conf", "all", "forwarding"], "1"),
        (["ipv6", "conf", "v1", "proxy_ndp"], "1"),
        (["ipv6", "neigh", "v1", "proxy_delay"], "0"),
    ];
    let written = b.namespace.run(|| {
        settings
            .iter()
            .try_for_each(|(name, value)| crate::sysctl::write(name, value))
    });
    written.unwrap().unwrap();
    Some((a, b))
}

/// Sends a packet to `to`, so that the kernel resolves its hardware address, and waits for the
/// result.
fn resolve(host: &Host, to: &str) -> Option<Neighbour> {
    let to = ip(to);
    host.namespace
        .run(|| {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            UdpSocket::bind(any)
                .unwrap()
                .send_to(b"?", (to, 9))
                .unwrap();
        })
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let neighbours = host.netlink.neighbours(host.device).unwrap();
        let found = neighbours.into_iter().find(|entry| entry.address == to);
        if let Some(entry) = found
            && entry.state != NeighbourState::Incomplete
        {
            return Some(entry);
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_neighbour_that_answered_has_its_hardware_address() {
    let Some((a, b)) = pair() else { return };
    let neighbour = resolve(&a, "10.0.0.2").unwrap();
    assert_eq!(neighbour.mac, b.netlink.link("v1").unwrap().mac());
    assert_eq!(neighbour.state, NeighbourState::Reachable);
}

#[test]
fn a_proxy_answers_for_its_addresses_only() {
    let Some((a, b)) = pair_with_networks_behind_b() else {
        return;
    };
    let mac = b.netlink.link("v1").unwrap().mac();
    for (proxied, other) in [("10.77.0.5", "10.77.0.6"), ("fd77::5", "fd77::6")] {
        b.netlink.add_proxy(b.device, ip(proxied)).unwrap();
        b.netlink.add_proxy(b.device, ip(proxied)).unwrap();
        let answered = resolve(&a, proxied).unwrap();
        assert_eq!(answered.mac, mac, "{proxied}");
        let silent = resolve(&a, other).unwrap();
        assert_eq!((silent.mac, silent.state), (None, NeighbourState::Failed));
    }
}

#[test]
fn proxies_are_no_neighbours_and_can_be_deleted() {
    let Some(host) = host() else { return };
    let elsewhere = host.netlink.link("d1").unwrap().index;
    for address in ["10.77.0.5", "fd77::5"] {
        host.netlink.add_proxy(host.device, ip(address)).unwrap();
        host.netlink.add_proxy(elsewhere, ip(address)).unwrap();
    }
    let proxies = [ip("10.77.0.5"), ip("fd77::5")];
    let neighbours = host.netlink.neighbours(host.device).unwrap();
    assert!(
        neighbours
            .iter()
            .all(|entry| !proxies.contains(&entry.address))
    );

    let delete = |device| host.netlink.delete_proxy(device, ip("fd77::5"));
    delete(host.device).unwrap();
    let error = delete(host.device).unwrap_err();
    assert!(error.is_not_found(), "{error}");
    // Other addresses and other interfaces keep their entries.
    delete(elsewhere).unwrap();
    host.netlink
        .delete_proxy(host.device, ip("10.77.0.5"))
        .unwrap();
}

// Routes and rules.

#[test]
fn add_route_appears_in_proc() {
    let Some((a, _b)) = pair() else { return };
    let route = Route::to(net("192.0.2.0/24"))
        .via(ip("10.0.0.2"))
        .device(a.device)
        .metric(7)
        .mtu(1300);
    a.netlink.add_route(&route).unwrap();
    let table = a.proc_net("route");
    let line = table
        .lines()
        .find(|line| line.contains("000200C0"))
        .expect(&table);
    let fields: Vec<_> = line.split_whitespace().collect();
    // Interface, destination, gateway, flags, use counts, metric, mask.
    assert_eq!(
        (fields[0], fields[2], fields[6], fields[7]),
        ("v0", "0200000A", "7", "00FFFFFF")
    );
}

#[test]
fn routes_lists_the_route_as_it_was_added() {
    let Some((a, _b)) = pair() else { return };
    for text in ["192.0.2.0/24 10.0.0.2", "2001:db8::/32 fd00::2"] {
        let (destination, gateway) = text.split_once(' ').unwrap();
        let route = Route::to(net(destination))
            .via(ip(gateway))
            .device(a.device)
            .table(51820)
            .metric(7)
            .mtu(1300);
        a.netlink.add_route(&route).unwrap();
        let listed = a.netlink.routes(route.family(), 51820).unwrap();
        assert_eq!(
            listed,
            [Route {
                scope: Some(RouteScope::Universe),
                ..route
            }]
        );
    }
}

#[test]
fn route_get_names_interface_source_gateway_and_mtu() {
    let Some((a, _b)) = pair() else { return };
    a.netlink
        .add_route(&Route::to(net("192.0.2.0/24")).via(ip("10.0.0.2")).mtu(1300))
        .unwrap();
    let lookup = a.netlink.route_get(ip("192.0.2.9"), None).unwrap();
    assert_eq!(lookup.device, a.device);
    assert_eq!(lookup.source, Some(ip("10.0.0.1")));
    assert_eq!(lookup.gateway, Some(ip("10.0.0.2")));
    // The path MTU that a socket sees (ip(7), IP_MTU).
    let socket = a
        .namespace
        .run(|| UdpSocket::bind("0.0.0.0:0").unwrap())
        .unwrap();
    socket.connect("192.0.2.9:9").unwrap();
    let path_mtu = nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::IpMtu).unwrap();
    assert_eq!((lookup.mtu, path_mtu), (1300, 1300));
}

#[test]
fn route_get_falls_back_on_the_interface_mtu() {
    let Some((a, _b)) = pair() else { return };
    a.netlink.set_mtu(a.device, 1442).unwrap();
    assert_eq!(a.netlink.route_get(ip("10.0.0.2"), None).unwrap().mtu, 1442);
}

#[test]
fn route_get_without_a_route_says_so() {
    let Some(host) = host() else { return };
    let error = host.netlink.route_get(ip("192.0.2.9"), None).unwrap_err();
    assert!(
        matches!(
            error,
            NetlinkError::Refused {
                errno: nix::errno::Errno::ENETUNREACH,
                ..
            }
        ),
        "{error}"
    );
}

/// Sets up the default route as wg-quick does: marked packets use the default route of the main
/// table, all others that of the tunnel, unless the main table has a more specific route.
fn with_default_through_d0(a: &Host, family: Family, gateway: &str) -> u32 {
    let any = net(if family == Family::V4 {
        "0.0.0.0/0"
    } else {
        "::/0"
    });
    let tunnel = create_sink(&a.netlink);
    a.netlink
        .add_route(&Route::to(any).via(ip(gateway)))
        .unwrap();
    a.netlink
        .add_route(&Route::to(any).device(tunnel).table(51820))
        .unwrap();
    a.netlink
        .add_rule(&Rule::unless_marked(family, 51820, 51820))
        .unwrap();
    a.netlink.add_rule(&Rule::suppress_default(family)).unwrap();
    tunnel
}

#[test]
fn rules_steer_by_mark() {
    let Some((a, _b)) = pair() else { return };
    let tunnel = with_default_through_d0(&a, Family::V4, "10.0.0.2");
    let get = |address, mark| a.netlink.route_get(ip(address), mark).unwrap().device;
    assert_eq!(
        get("198.51.100.1", None),
        tunnel,
        "traffic takes the tunnel"
    );
    assert_eq!(
        get("198.51.100.1", Some(51820)),
        a.device,
        "the tunnel's own packets do not"
    );
    assert_eq!(
        get("10.0.0.2", None),
        a.device,
        "nor do those of a known network"
    );
}

#[test]
fn rules_steer_ipv6_by_mark() {
    let Some((a, _b)) = pair() else { return };
    let tunnel = with_default_through_d0(&a, Family::V6, "fd00::2");
    let get = |address, mark| a.netlink.route_get(ip(address), mark).unwrap().device;
    assert_eq!(get("2001:db8::1", None), tunnel);
    assert_eq!(get("2001:db8::1", Some(51820)), a.device);
    assert_eq!(get("fd00::2", None), a.device);
}

#[test]
fn a_marked_socket_goes_where_route_get_said() {
    let Some((a, b)) = pair() else { return };
    with_default_through_d0(&a, Family::V4, "10.0.0.2");
    b.netlink
        .add_address(b.device, net("198.51.100.1/32"))
        .unwrap();
    let receiver = b
        .namespace
        .run(|| UdpSocket::bind("198.51.100.1:7000").unwrap())
        .unwrap();
    receiver
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let sender = a
        .namespace
        .run(|| UdpSocket::bind("0.0.0.0:0").unwrap())
        .unwrap();
    sender
        .send_to(b"lost in the tunnel", "198.51.100.1:7000")
        .unwrap();
    nix::sys::socket::setsockopt(&sender, nix::sys::socket::sockopt::Mark, &51820).unwrap();
    sender.send_to(b"marked", "198.51.100.1:7000").unwrap();
    let mut buffer = [0; 32];
    let length = receiver.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"marked");
}

#[test]
fn rules_are_listed_and_removed() {
    let Some(host) = host() else { return };
    for family in [Family::V4, Family::V6] {
        let before = host.netlink.rules(family).unwrap();
        let added = [
            Rule::unless_marked(family, 51820, 51820),
            Rule::suppress_default(family),
        ];
        for rule in &added {
            host.netlink.add_rule(rule).unwrap();
        }
        let listed = host.netlink.rules(family).unwrap();
        for rule in &added {
            assert!(
                listed.iter().any(|entry| Rule {
                    priority: None,
                    ..*entry
                } == *rule),
                "{listed:?}"
            );
            host.netlink.delete_rule(rule).unwrap();
        }
        assert_eq!(host.netlink.rules(family).unwrap(), before);
    }
}

#[test]
fn a_new_namespace_has_the_three_rules_of_linux() {
    // ip-rule(8): 0 local, 32766 main, 32767 default (253).
    let Some(host) = host() else { return };
    let rules = host.netlink.rules(Family::V4).unwrap();
    let expected = [(Some(0), 255), (Some(32766), 254), (Some(32767), 253)];
    assert!(
        rules
            .iter()
            .map(|rule| (rule.priority, rule.table))
            .eq(expected),
        "{rules:?}"
    );
}

// Notifications.

/// Wait until an event matches.
fn wait_for(events: &mut Subscription, matches: impl Fn(&Event) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut seen = Vec::new();
    while Instant::now() < deadline {
        while let Some(event) = events.next_event().unwrap() {
            if matches(&event) {
                return;
            }
            seen.push(event);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("not among {seen:?}");
}

#[test]
fn events_report_links_addresses_and_routes() {
    let Some((a, _b)) = pair() else { return };
    let mut events = a
        .namespace
        .run(|| Netlink::subscribe(&[Group::Link, Group::Address, Group::Route]).unwrap())
        .unwrap();
    let device = a.device;

    a.netlink.add_address(device, net("10.9.0.1/24")).unwrap();
    wait_for(
        &mut events,
        |event| matches!(event, Event::Address(address) if address.net == net("10.9.0.1/24")),
    );
    let route = Route::to(net("192.0.2.0/24")).via(ip("10.9.0.2"));
    a.netlink.add_route(&route).unwrap();
    wait_for(
        &mut events,
        |event| matches!(event, Event::Route(route) if route.destination == net("192.0.2.0/24")),
    );
    a.netlink
        .delete_address(device, net("10.9.0.1/24"))
        .unwrap();
    // The kernel reports the address, then the route to its network (`__inet_del_ifa()`, net/ipv4/devinet.c).
    wait_for(
        &mut events,
        |event| matches!(event, Event::AddressRemoved(address) if address.net == net("10.9.0.1/24")),
    );
    wait_for(
        &mut events,
        |event| matches!(event, Event::RouteRemoved(route) if route.destination == net("10.9.0.0/24")),
    );
    a.netlink.set_down(device).unwrap();
    wait_for(
        &mut events,
        |event| matches!(event, Event::Link(link) if link.index == device && !link.up),
    );
    a.netlink.delete_link(device).unwrap();
    wait_for(
        &mut events,
        |event| matches!(event, Event::LinkRemoved(link) if link.index == device && link.name == "v0"),
    );
}

#[test]
fn a_port_that_leaves_its_bridge_is_not_removed() {
    let Some(host) = host() else { return };
    let bridge = host.netlink.create_bridge("br0").unwrap();
    host.netlink.set_master(host.device, Some(bridge)).unwrap();
    let mut events = host
        .namespace
        .run(|| Netlink::subscribe(&[Group::Link]).unwrap())
        .unwrap();
    host.netlink.set_master(host.device, None).unwrap();
    host.netlink.set_mtu(host.device, 1234).unwrap();
    let removed = std::cell::Cell::new(false);
    wait_for(&mut events, |event| {
        removed.set(removed.get() || matches!(event, Event::LinkRemoved(_)));
        matches!(event, Event::Link(link) if link.mtu == 1234)
    });
    assert!(!removed.get());
}

#[test]
fn too_many_events_are_reported_as_lost() {
    let Some(host) = host() else { return };
    let mut events = host
        .namespace
        .run(|| Netlink::subscribe(&[Group::Link]).unwrap())
        .unwrap();
    for round in 0..2000 {
        host.netlink.set_mtu(host.device, 1000 + round % 2).unwrap();
    }
    wait_for(&mut events, |event| *event == Event::Lost);
}

// Refusals.

#[test]
fn an_absent_interface_is_named() {
    let Some(host) = host() else { return };
    let error = host.netlink.link("absent").unwrap_err();
    assert!(
        matches!(error, NetlinkError::NoSuchDevice { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("absent"), "{error}");
}

#[test]
fn setting_up_an_absent_interface_fails() {
    let Some(host) = host() else { return };
    let error = host.netlink.set_up(4711).unwrap_err();
    assert!(
        matches!(error, NetlinkError::NoSuchDevice { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("4711"), "{error}");
}

#[test]
fn a_name_that_is_taken_says_so() {
    let Some(host) = host() else { return };
    let error = host.netlink.create_bridge("d0").unwrap_err();
    assert!(matches!(error, NetlinkError::Exists { .. }), "{error}");
}

#[test]
fn an_address_that_is_there_says_so() {
    let Some(host) = host() else { return };
    host.netlink
        .add_address(host.device, net("10.1.2.3/24"))
        .unwrap();
    let error = host
        .netlink
        .add_address(host.device, net("10.1.2.3/24"))
        .unwrap_err();
    assert!(matches!(error, NetlinkError::Exists { .. }), "{error}");
    assert!(
        error.to_string().contains("10.1.2.3/24 to interface d0"),
        "{error}"
    );
}

#[test]
fn replacing_an_address_that_is_there_succeeds() {
    let Some(host) = host() else { return };
    let options = AddressOptions {
        replace: true,
        ..AddressOptions::default()
    };
    for _ in 0..2 {
        host.netlink
            .add_address_with(host.device, net("10.1.2.3/24"), options)
            .unwrap();
    }
}

#[test]
fn removing_an_absent_address_is_not_found() {
    let Some(host) = host() else { return };
    let error = host
        .netlink
        .delete_address(host.device, net("10.1.2.3/24"))
        .unwrap_err();
    assert!(error.is_not_found(), "{error}");
}

#[test]
fn removing_an_absent_rule_is_not_found() {
    let Some(host) = host() else { return };
    let error = host
        .netlink
        .delete_rule(&Rule::unless_marked(Family::V4, 1, 2))
        .unwrap_err();
    assert!(error.is_not_found(), "{error}");
}

#[test]
fn the_error_of_an_unreachable_gateway_names_the_remedy() {
    let Some(host) = host() else { return };
    let error = host
        .netlink
        .add_route(&Route::to(net("192.0.2.0/24")).via(ip("10.0.0.1")))
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("192.0.2.0/24 via 10.0.0.1") && text.contains("gateway"),
        "{text}"
    );
}

#[test]
fn an_mtu_out_of_range_carries_the_kernels_sentence() {
    let Some((a, _b)) = pair() else { return };
    let error = a.netlink.set_mtu(a.device, 10).unwrap_err();
    let NetlinkError::Refused { detail, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(detail, "mtu less than device minimum");
}

#[test]
fn invalid_names_never_reach_the_kernel() {
    for name in ["", "a-name-too-long-", "a/b", "a b", "..", "a:b", "x%d"] {
        assert!(
            matches!(
                link::check_name(name),
                Err(NetlinkError::InvalidName { .. })
            ),
            "{name:?}"
        );
    }
    link::check_name("exactly15bytes_").unwrap();
}

#[test]
fn without_the_capability_it_is_not_permitted() {
    let Some(host) = host() else { return };
    in_child(|| {
        caps::clear(None, caps::CapSet::Effective).map_err(|e| e.to_string())?;
        let error = host.netlink.set_mtu(host.device, 1400).err();
        match error {
            Some(error @ NetlinkError::NotPermitted { .. }) => {
                let text = error.to_string();
                if text.contains("d0") && text.contains("CAP_NET_ADMIN") {
                    Ok(())
                } else {
                    Err(text)
                }
            }
            other => Err(format!("{other:?}")),
        }
    });
}

// Parsing.

#[test]
fn truncated_messages_do_not_panic() {
    let Some((a, _b)) = pair() else { return };
    let mut message = netlink_packet_route::link::LinkMessage::default();
    message.header.index = a.device;
    let mut payloads = Vec::new();
    a.netlink
        .exchange(
            RouteNetlinkMessage::GetLink(message),
            NLM_F_ACK,
            |_, payload| {
                payloads.push(payload.to_vec());
            },
        )
        .unwrap();
    for payload in payloads {
        for length in 0..payload.len() {
            link::parse_link(&payload[..length]);
            address::parse_address(&payload[..length]);
            route::parse_routes(&payload[..length]);
        }
    }
}

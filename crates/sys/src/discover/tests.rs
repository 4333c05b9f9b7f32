//! Creates paths in network namespaces and discovers them.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::netlink::Netlink;
use crate::testing::{in_namespace, set_address, set_up, skip};
use crate::tun::{Tun, TunOptions};

/// Creates a tun device of this process in the namespace of the calling thread and sets it up.
fn tun(name: &str) -> Option<Tun> {
    let options = TunOptions {
        name: name.into(),
        mtu: 1400,
        queues: 1,
        offload: true,
    };
    match Tun::create(&options) {
        Ok(tun) => {
            set_up(name);
            Some(tun)
        }
        Err(error) => {
            skip(&error.to_string());
            None
        }
    }
}

/// Creates a veth pair and sets it up.
fn veth(name: &str, peer: &str) -> (u32, u32) {
    let netlink = Netlink::open().unwrap();
    let index = netlink.create_veth(name, peer, None).unwrap();
    set_up(name);
    set_up(peer);
    (index, netlink.link(peer).unwrap().index)
}

#[test]
fn a_tun_is_found_with_the_program_that_has_it_open() {
    in_namespace(|| {
        let Some(_tun) = tun("disc0") else { return };
        let map = path(&Subject::Anything).unwrap();
        let link = map.inner_link().unwrap();
        assert_eq!((&*link.name, &*link.kind, link.mtu), ("disc0", "tun", 1400));
        assert_eq!(link.vnet_hdr, Some(true));
        assert!(link.features.contains_key("tx-tcp-segmentation"));
        let program = map.program.unwrap();
        assert_eq!(program.pid, std::process::id());
        let own = nix::unistd::gettid().as_raw().cast_unsigned();
        assert!(program.threads.iter().any(|(tid, _)| *tid == own));
        assert_eq!(candidates().unwrap()[0].interface, "disc0");
    });
}

#[test]
fn a_process_is_found_by_its_number() {
    in_namespace(|| {
        let Some(_tun) = tun("disc1") else { return };
        let map = path(&Subject::Process(std::process::id())).unwrap();
        assert_eq!(map.inner.as_deref(), Some("disc1"));
    });
}

#[test]
fn a_device_of_the_same_name_elsewhere_has_another_program() {
    in_namespace(|| {
        let Some(_tun) = tun("disc2") else { return };
        in_namespace(|| {
            // Here `disc2` is a veth; the program of the tun with the same name is not its program.
            veth("disc2", "peer");
            let map = path(&Subject::Interface("disc2".into())).unwrap();
            assert_eq!(map.program, None);
            let error = path(&Subject::Process(std::process::id())).unwrap_err();
            // This process also holds the devices of other tests.
            assert!(matches!(error, DiscoverError::Elsewhere { .. }), "{error}");
        });
    });
}

#[test]
fn the_only_other_interface_is_the_egress() {
    in_namespace(|| {
        let Some(_tun) = tun("disc3") else { return };
        let (index, _) = veth("out0", "away");
        // Only one end is up and visible, as with a peer in another namespace.
        Netlink::open().unwrap().set_down(index + 1).ok();
        let away = Netlink::open().unwrap().link("away").unwrap().index;
        Netlink::open().unwrap().set_down(away).unwrap();
        let map = path(&Subject::Interface("disc3".into())).unwrap();
        assert_eq!(map.egress.as_deref(), Some("out0"));
        let names: Vec<_> = map.links.iter().map(|link| &*link.name).collect();
        assert_eq!(names, ["disc3", "out0"]);
    });
}

#[test]
fn the_ports_of_a_bridge_are_on_the_path() {
    in_namespace(|| {
        let netlink = Netlink::open().unwrap();
        let bridge = netlink.create_bridge("br0").unwrap();
        set_up("br0");
        let (first, _) = veth("port0", "guest0");
        let (second, _) = veth("port1", "guest1");
        for port in [first, second] {
            netlink.set_master(port, Some(bridge)).unwrap();
        }
        let map = path(&Subject::Interface("port0".into())).unwrap();
        assert_eq!(map.egress.as_deref(), Some("port1"));
        let names: Vec<_> = map.links.iter().map(|link| &*link.name).collect();
        assert_eq!(names, ["port0", "br0", "port1"]);
        assert_eq!(map.inner_link().unwrap().master.as_deref(), Some("br0"));
        // Without a tunnel, the subject is the bridge.
        let map = path(&Subject::Anything).unwrap();
        assert_eq!(map.inner.as_deref(), Some("br0"));
    });
}

#[test]
fn the_rate_of_a_shaper_is_known() {
    in_namespace(|| {
        veth("shaped", "peer");
        let command = "qdisc add dev shaped root tbf rate 20mbit burst 32kb latency 50ms";
        let mut tc = Command::new("tc");
        tc.args(command.split(' ')).stdout(Stdio::null());
        // This thread forks the child, so the child is in its namespace.
        match tc.status() {
            Ok(status) if status.success() => {}
            other => return skip(&format!("no tc (package iproute2), or no tbf: {other:?}")),
        }
        let map = path(&Subject::Interface("shaped".into())).unwrap();
        let link = map.inner_link().unwrap();
        assert_eq!((&*link.qdisc, link.qdisc_rate), ("tbf", Some(20_000_000)));
    });
}

#[test]
fn spread_of_receive_queues_is_seen_although_sys_is_another_namespaces() {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};

    in_namespace(|| {
        veth("v0", "v1");
        std::thread::scope(|scope| {
            let spread = scope.spawn(|| {
                let none: Option<&str> = None;
                unshare(CloneFlags::CLONE_NEWNS).unwrap();
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
                mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).unwrap();
                std::fs::write("/sys/class/net/v0/queues/rx-0/rps_cpus", "1")
            });
            spread.join().unwrap().unwrap();
        });
        let map = path(&Subject::Interface("v0".into())).unwrap();
        assert_eq!(map.links[0].rps[0], [0], "{:?}", map.unseen);
        let map = path(&Subject::Interface("v1".into())).unwrap();
        assert!(map.links[0].rps.is_empty() && map.links[0].rx_queues > 0);
        assert!(
            !map.unseen
                .iter()
                .any(|unseen| unseen.what.contains("spread"))
        );
    });
}

#[test]
fn addresses_come_with_their_prefixes() {
    in_namespace(|| {
        veth("v0", "v1");
        let address = std::net::Ipv4Addr::new(192, 0, 2, 7);
        let mask = std::net::Ipv4Addr::new(255, 255, 255, 0);
        set_address("v0", address, mask);
        let expected: IpNet = "192.0.2.7/24".parse().unwrap();
        assert!(addresses("v0").unwrap().contains(&expected));
        // Not the link-local prefix, which the other interfaces also have.
        assert_eq!(routed("v0").unwrap(), [expected.trunc()]);
    });
}

#[test]
fn a_missing_subject_is_reported_with_the_existing_ones() {
    in_namespace(|| {
        let error = path(&Subject::Anything).unwrap_err();
        assert!(matches!(error, DiscoverError::Nothing { .. }), "{error}");
        veth("v0", "v1");
        let name = "x".repeat(100_000);
        let error = path(&Subject::Interface(name)).unwrap_err().to_string();
        assert!(
            error.contains("v0, v1") || error.contains("v1, v0"),
            "{error}"
        );
        assert!(error.len() < 1000, "{}", error.len());
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let error = path(&Subject::Process(child.id())).unwrap_err();
        assert!(matches!(error, DiscoverError::NoProcess { .. }), "{error}");
        let error = path(&Subject::Process(1)).unwrap_err();
        let expected = matches!(
            error,
            DiscoverError::NoInterfaceOfProcess { .. } | DiscoverError::Refused { .. }
        );
        assert!(expected, "{error}");
    });
}

#[test]
fn the_program_has_its_sockets_and_the_connections_their_tunnel() {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::linux::fs::MetadataExt;

    in_namespace(|| {
        let Some(_tun) = tun("disc4") else { return };
        let mask = std::net::Ipv4Addr::new(255, 255, 255, 0);
        set_address("disc4", std::net::Ipv4Addr::new(198, 51, 100, 1), mask);
        veth("out0", "away");
        set_address("out0", std::net::Ipv4Addr::new(192, 0, 2, 1), mask);
        let (other, _) = veth("other0", "elsewhere");
        let default = crate::netlink::Route::to("0.0.0.0/0".parse().unwrap()).device(other);
        Netlink::open().unwrap().add_route(&default).unwrap();
        let outer = UdpSocket::bind("192.0.2.1:5555").unwrap();
        outer.connect("192.0.2.2:6666").unwrap();
        let listener = TcpListener::bind("198.51.100.1:80").unwrap();
        let inner = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let inode = |fd: std::os::fd::RawFd| {
            let path = format!("/proc/self/fd/{fd}");
            std::fs::metadata(path).unwrap().st_ino()
        };
        use std::os::fd::AsRawFd;
        let (outer_inode, inner_inode) = (inode(outer.as_raw_fd()), inode(inner.as_raw_fd()));

        let map = path(&Subject::Interface("disc4".into())).unwrap();
        let socket = map
            .sockets
            .iter()
            .find(|socket| socket.inode == outer_inode);
        let socket = socket.expect("the connected UDP socket");
        assert_eq!(socket.local, outer.local_addr().unwrap());
        assert_eq!(socket.remote, Some("192.0.2.2:6666".parse().unwrap()));
        let size = nix::sys::socket::getsockopt(&outer, nix::sys::socket::sockopt::RcvBuf);
        assert_eq!(socket.receive_buffer as usize, size.unwrap());
        // The interface of the route to the peer, although the default route is another.
        assert_eq!(map.egress.as_deref(), Some("out0"));
        assert!(
            map.flows.iter().any(|flow| flow.inode == inner_inode),
            "{:?}",
            map.flows
        );
        assert!(map.flows.iter().all(|flow| flow.inode != outer_inode));
    });
}

#[test]
fn a_program_is_found_where_a_supervisor_holds_the_device_too() {
    in_namespace(|| {
        let Some(_tun) = tun("disc5") else { return };
        // The kernel counts processor time in ticks of 10 ms. This process must have several more
        // than the child.
        let used = || {
            nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID)
                .map(Duration::from)
        };
        while used().unwrap() < Duration::from_millis(100) {
            std::hint::spin_loop();
        }
        // A child that inherits every descriptor and does nothing. The standard library closes its
        // own descriptors on exec, so only a fork makes a second holder.
        crate::testing::in_child(|| {
            let map = path(&Subject::Interface("disc5".into())).map_err(|e| e.to_string())?;
            let several = map
                .unseen
                .iter()
                .any(|unseen| unseen.why.contains("several processes"));
            let program = map.program.ok_or("no program")?.pid;
            // The parent has used more processor time and has as many sockets.
            if several && program == nix::unistd::getppid().as_raw().cast_unsigned() {
                Ok(())
            } else {
                Err(format!("taken {program}: {:?}", map.unseen))
            }
        });
    });
}

#[test]
fn a_gateway_between_packet_sockets_is_found() {
    use crate::packet::{Accept, PacketOptions, PacketSocket};

    in_namespace(|| {
        let (index, _) = veth("lan0", "guest");
        let _socket = match PacketSocket::open(
            index,
            &PacketOptions::new(Accept::Host([2, 0, 0, 0, 0, 1])),
        ) {
            Ok(socket) => socket,
            Err(error) => return skip(&error.to_string()),
        };
        let _outer = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let map = path(&Subject::Anything).unwrap();
        assert_eq!(map.inner.as_deref(), Some("lan0"));
        assert_eq!(map.program.unwrap().pid, std::process::id());
    });
}

//! Tests on the running kernel, in namespaces. Refusals of older kernels are simulated.

use super::capabilities::TUN_F_TSO_ECN;
use super::*;
use crate::testing::{in_namespace, set_address, set_up, skip};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SetSockOpt, sockopt};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};

const GSO_TCPV4: u8 = 1;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
const HERE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

fn options(name: &str) -> TunOptions {
    TunOptions {
        name: name.into(),
        mtu: 1500,
        queues: 1,
        offload: true,
    }
}

/// Creates a device that is up and has the address HERE.
fn configured(options: &TunOptions, features: u32) -> Tun {
    let tun = Tun::create_on(options, features).expect("TUN device");
    set_address(tun.name(), HERE, MASK);
    set_up(tun.name());
    tun
}

/// Waits for `queue` to be readable and reads IPv4 packets, skipping the kernel's own IPv6 packets.
fn read_ipv4(queue: &TunQueue, buf: &mut [u8]) -> usize {
    loop {
        let mut fds = [PollFd::new(queue.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut fds, PollTimeout::from(2000u16)).expect("poll");
        assert!(ready == 1, "nothing to read within two seconds");
        let length = queue.read(buf).expect("read");
        if length > VNET_HEADER_LEN && buf[VNET_HEADER_LEN] >> 4 == 4 {
            return length;
        }
    }
}

/// The sum of RFC 1071 over `bytes`, folded, not inverted.
fn ones_sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// An IPv4 UDP packet from THERE to HERE. The UDP checksum covers the pseudo-header, as required by
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`, or is 0 (none).
fn udp_packet(port: u16, payload: &[u8], needs_checksum: bool) -> Vec<u8> {
    let udp_length = (8 + payload.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend((20 + udp_length).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend(THERE.octets());
    packet.extend(HERE.octets());
    let checksum = !ones_sum(&packet);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut pseudo = packet[12..20].to_vec();
    pseudo.extend([0, 17]);
    pseudo.extend(udp_length.to_be_bytes());
    packet.extend(9u16.to_be_bytes());
    packet.extend(port.to_be_bytes());
    packet.extend(udp_length.to_be_bytes());
    packet.extend(if needs_checksum { ones_sum(&pseudo) } else { 0 }.to_be_bytes());
    packet.extend(payload);
    packet
}

/// A virtio-net header for [`udp_packet`] with a checksum to fill in.
fn udp_header(gso_type: u8, gso_size: u16) -> [u8; VNET_HEADER_LEN] {
    let header_length: u16 = 28;
    let mut header = [0; VNET_HEADER_LEN];
    header[0] = NEEDS_CSUM;
    header[1] = gso_type;
    header[2..4].copy_from_slice(&header_length.to_le_bytes());
    header[4..6].copy_from_slice(&gso_size.to_le_bytes());
    header[6..8].copy_from_slice(&20u16.to_le_bytes());
    header[8..10].copy_from_slice(&6u16.to_le_bytes());
    header
}

fn udp_listener() -> (UdpSocket, u16) {
    let socket = UdpSocket::bind((HERE, 0)).expect("bind");
    socket
        .set_read_timeout(Some(std::time::Duration::from_secs(2)))
        .expect("timeout");
    let port = socket.local_addr().expect("address").port();
    (socket, port)
}

#[test]
fn create_reports_name_index_and_offloads() {
    in_namespace(|| {
        let tun = Tun::create(&options("tun-a")).expect("TUN device");
        assert_eq!(tun.name(), "tun-a");
        assert_eq!(nix::net::if_::if_nametoindex("tun-a").ok(), tun.index());
        let mtu = std::process::Command::new("cat")
            .arg("/proc/net/dev")
            .output();
        assert!(String::from_utf8_lossy(&mtu.expect("cat").stdout).contains("tun-a"));
        let can = tun.capabilities();
        for ability in [
            &can.vnet_header,
            &can.checksum,
            &can.tso4,
            &can.tso6,
            &can.tso_ecn,
        ] {
            assert_eq!(ability, &Ability::Present);
        }
        assert!(!can.multi_queue.is_present());
    });
}

#[test]
fn the_interface_goes_with_the_tun() {
    in_namespace(|| {
        drop(Tun::create(&options("tun-a")).expect("TUN device"));
        assert!(nix::net::if_::if_nametoindex("tun-a").is_err());
    });
}

#[test]
fn a_read_shorter_than_the_packet_discards_the_rest() {
    in_namespace(|| {
        let jumbo = TunOptions {
            mtu: 5000,
            ..options("tun-a")
        };
        let tun = configured(&jumbo, !0);
        let sender = UdpSocket::bind((HERE, 0)).expect("bind");
        for payload in [[1; 4972], [2; 4972]] {
            sender.send_to(&payload, (THERE, 9)).expect("send");
        }
        let mut buf = [0; VNET_HEADER_LEN + 2000];
        let queue = &tun.queues()[0];
        for payload in [1, 2] {
            assert_eq!(read_ipv4(queue, &mut buf), buf.len());
            // Each packet has 5,000 bytes by its header; the next read begins with the next one.
            let packet = &buf[VNET_HEADER_LEN..];
            assert_eq!(packet[2..4], 5000_u16.to_be_bytes());
            assert_eq!(packet[28..], [payload; 1972]);
        }
    });
}

#[test]
fn an_existing_interface_is_an_error_of_its_own() {
    in_namespace(|| {
        let _first = Tun::create(&options("tun-a")).expect("TUN device");
        let second = Tun::create(&options("tun-a"));
        assert!(
            matches!(&second, Err(TunError::Exists { name }) if name == "tun-a"),
            "{second:?}"
        );
        let loopback = Tun::create(&options("lo"));
        assert!(
            matches!(&loopback, Err(TunError::Exists { .. })),
            "{loopback:?}"
        );
    });
}

#[test]
fn names_that_the_kernel_refuses_are_refused_first() {
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "a:b",
        "a b",
        "tun%d",
        "a\0b",
        "sixteen-bytes-ab",
    ] {
        let outcome = Tun::create(&options(name));
        assert!(
            matches!(outcome, Err(TunError::Name { .. })),
            "{name:?}: {outcome:?}"
        );
    }
}

#[test]
fn fifteen_bytes_name_an_interface() {
    in_namespace(|| {
        let tun = Tun::create(&options("fifteen-bytes-a")).expect("TUN device");
        assert_eq!(
            nix::net::if_::if_nametoindex("fifteen-bytes-a").ok(),
            tun.index()
        );
    });
}

#[test]
fn an_impossible_mtu_is_an_error_of_its_own() {
    in_namespace(|| {
        // A name for each device: a process forked by another test may hold a descriptor, which
        // keeps a dropped device alive until that process executes its program.
        for mtu in [67, 65536, u32::MAX] {
            let outcome = Tun::create(&TunOptions {
                mtu,
                ..options(&format!("tun-{mtu}"))
            });
            assert!(
                matches!(outcome, Err(TunError::Mtu { .. })),
                "{mtu}: {outcome:?}"
            );
        }
        for mtu in [68, 65535] {
            Tun::create(&TunOptions {
                mtu,
                ..options(&format!("tun-{mtu}"))
            })
            .expect("TUN device");
        }
    });
}

#[test]
fn missing_privilege_is_an_error_of_its_own() {
    in_namespace(|| {
        let dropped = caps::drop(
            None,
            caps::CapSet::Effective,
            caps::Capability::CAP_NET_ADMIN,
        );
        dropped.expect("drop CAP_NET_ADMIN in this thread");
        let outcome = Tun::create(&options("tun-a"));
        assert!(
            matches!(outcome, Err(TunError::NotPermitted { .. })),
            "{outcome:?}"
        );
    });
}

#[test]
fn a_missing_device_node_is_an_error_of_its_own() {
    use nix::mount::{MsFlags, mount};
    std::thread::spawn(|| {
        if let Err(errno) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS) {
            return skip(&format!("no mount namespace: {errno}"));
        }
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private");
        mount(
            Some("tmpfs"),
            "/dev/net",
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )
        .expect("tmpfs");
        let outcome = Tun::create(&options("tun-a"));
        assert!(
            matches!(outcome, Err(TunError::NoDriver { .. })),
            "{outcome:?}"
        );
    })
    .join()
    .expect("thread");
}

#[test]
fn reading_an_idle_queue_would_block() {
    in_namespace(|| {
        let tun = Tun::create(&options("tun-a")).expect("TUN device");
        let error = tun.queues()[0]
            .read(&mut [0; 100])
            .expect_err("nothing to read");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    });
}

/// Simulates `set_offload` of drivers/net/tun.c, of a kernel that knows only `known`.
fn play_kernel(known: u32, now: &mut u32, bits: u32) -> nix::Result<()> {
    let uso = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let needs_csum = bits == 0 || bits & libc::TUN_F_CSUM != 0;
    let whole_uso = bits & uso == 0 || bits & uso == uso;
    if bits & !known != 0 || !needs_csum || !whole_uso {
        return Err(Errno::EINVAL);
    }
    *now = bits;
    Ok(())
}

fn negotiate_with(known: u32) -> (TunCapabilities, u32) {
    let mut now = 0;
    let one = Ability::Absent("one queue".into());
    let can = negotiate_offload(Ability::Present, one, |bits| {
        play_kernel(known, &mut now, bits)
    });
    (can, now)
}

#[test]
fn without_uso_everything_else_is_kept() {
    let known = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | TUN_F_TSO_ECN;
    let (can, now) = negotiate_with(known);
    assert_eq!(now, known);
    assert!(can.tso6.is_present() && !can.uso4.is_present() && !can.uso6.is_present());
    let reason = can.uso4.reason().expect("a reason");
    assert!(
        reason.contains("TUN_F_USO4") && reason.contains("Invalid argument"),
        "{reason}"
    );
}

#[test]
fn one_refused_family_does_not_cost_the_other() {
    let uso = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let (can, now) = negotiate_with(libc::TUN_F_CSUM | libc::TUN_F_TSO6 | uso);
    assert_eq!(now, libc::TUN_F_CSUM | libc::TUN_F_TSO6 | uso);
    assert!(!can.tso4.is_present() && can.tso6.is_present() && can.uso4.is_present());
}

#[test]
fn without_checksum_no_offload_is_requested() {
    let (can, now) = negotiate_with(0);
    assert_eq!(now, 0);
    let reason = can.tso4.reason().expect("a reason");
    assert!(reason.contains("needs TUN_F_CSUM"), "{reason}");
}

#[test]
fn a_failed_offload_request_leaves_framing_and_offloads() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !0);
        let queue = &tun.queues()[0];
        assert_eq!(
            ioctl::set_offload(&queue.file, 0x4000_0000),
            Err(Errno::EINVAL)
        );
        let socket = UdpSocket::bind((HERE, 0)).expect("bind");
        socket.send_to(b"payload", (THERE, 9)).expect("send");
        let mut buf = [0; 2000];
        let length = read_ipv4(queue, &mut buf);
        assert_eq!(length, VNET_HEADER_LEN + 28 + 7);
        assert_eq!(
            buf[0] & NEEDS_CSUM,
            NEEDS_CSUM,
            "checksum offload is still on"
        );
    });
}

#[test]
fn without_offload_packets_come_finished_in_the_same_framing() {
    in_namespace(|| {
        let tun = configured(
            &TunOptions {
                offload: false,
                ..options("tun-a")
            },
            !0,
        );
        assert_eq!(tun.capabilities().tso4, Ability::turned_off());
        let socket = UdpSocket::bind((HERE, 0)).expect("bind");
        socket.send_to(b"payload", (THERE, 9)).expect("send");
        let mut buf = [0xff; 2000];
        let length = read_ipv4(&tun.queues()[0], &mut buf);
        assert_eq!(length, VNET_HEADER_LEN + 28 + 7);
        // Other bits than NEEDS_CSUM, and fields that belong to them, have no meaning (virtio 1.2,
        // 5.1.6).
        assert_eq!(buf[0] & NEEDS_CSUM, 0);
        assert_eq!(buf[1], 0);
        let udp = &buf[VNET_HEADER_LEN + 20..length];
        let mut covered = buf[VNET_HEADER_LEN + 12..VNET_HEADER_LEN + 20].to_vec();
        covered.extend([0, 17, 0, udp.len() as u8]);
        covered.extend(udp);
        assert_eq!(ones_sum(&covered), 0xffff, "the checksum is complete");
    });
}

#[test]
fn a_written_packet_arrives() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !0);
        let (socket, port) = udp_listener();
        let packet = udp_packet(port, b"through the tunnel", true);
        let header = udp_header(0, 0);
        let bufs = [
            IoSlice::new(&header),
            IoSlice::new(&packet[..24]),
            IoSlice::new(&packet[24..]),
        ];
        let written = tun.queues()[0].write_vectored(&bufs).expect("write");
        assert_eq!(written, VNET_HEADER_LEN + packet.len());
        let mut buf = [0; 100];
        let (length, from) = socket.recv_from(&mut buf).expect("receive");
        assert_eq!(&buf[..length], b"through the tunnel");
        assert_eq!(from.ip(), THERE);
    });
}

#[test]
fn a_written_udp_super_packet_arrives_as_its_datagrams() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !0);
        if let Some(reason) = tun.capabilities().uso4.reason() {
            return skip(reason);
        }
        let (socket, port) = udp_listener();
        let payload: Vec<u8> = (0..2500u32).map(|i| (i / 1000) as u8).collect();
        let packet = udp_packet(port, &payload, true);
        let header = udp_header(GSO_UDP_L4, 1000);
        tun.queues()[0]
            .write_vectored(&[IoSlice::new(&header), IoSlice::new(&packet)])
            .expect("write");
        let mut buf = [0; 4000];
        for (value, expected) in [(0, 1000), (1, 1000), (2, 500)] {
            let length = socket.recv(&mut buf).expect("receive");
            assert_eq!(&buf[..length], &vec![value; expected]);
        }
    });
}

#[test]
fn a_udp_super_packet_is_read_whole() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !0);
        let socket = UdpSocket::bind((HERE, 0)).expect("bind");
        if let Some(reason) = tun.capabilities().uso4.reason() {
            return skip(reason);
        }
        let size = 1000;
        sockopt::UdpGsoSegment
            .set(&socket, &size)
            .expect("UDP_SEGMENT");
        socket.send_to(&[7; 20_500], (THERE, 9)).expect("send");
        let mut buf = vec![0; READ_BUFFER_LEN];
        let length = read_ipv4(&tun.queues()[0], &mut buf);
        assert_eq!(length, VNET_HEADER_LEN + 28 + 20_500);
        assert_eq!((buf[0] & NEEDS_CSUM, buf[1]), (NEEDS_CSUM, GSO_UDP_L4));
        assert_eq!(buf[4..6], 1000u16.to_le_bytes());
    });
}

#[test]
fn a_wrong_super_packet_header_is_invalid_input() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !0);
        let packet = udp_packet(9, b"payload", true);
        let header = udp_header(0x7f, 1000);
        let bufs = [IoSlice::new(&header), IoSlice::new(&packet)];
        let error = tun.queues()[0]
            .write_vectored(&bufs)
            .expect_err("unknown gso_type");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    });
}

#[test]
fn writing_while_the_interface_is_down_is_eio() {
    in_namespace(|| {
        let tun = Tun::create(&options("tun-a")).expect("TUN device");
        let bufs = [
            IoSlice::new(&[0; VNET_HEADER_LEN]),
            IoSlice::new(&[0x45; 40]),
        ];
        let error = tun.queues()[0].write_vectored(&bufs).expect_err("down");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    });
}

#[test]
fn an_emulated_header_reads_as_zero_and_writes_as_nothing() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !libc::IFF_VNET_HDR.cast_unsigned());
        let queue = &tun.queues()[0];
        assert!(!tun.capabilities().vnet_header.is_present());
        assert!(
            tun.capabilities()
                .tso4
                .reason()
                .expect("a reason")
                .contains("IFF_VNET_HDR")
        );

        let (socket, port) = udp_listener();
        socket.send_to(b"out", (THERE, 9)).expect("send");
        let mut buf = [0xff; 2000];
        let length = read_ipv4(queue, &mut buf);
        assert_eq!(length, VNET_HEADER_LEN + 28 + 3);
        assert_eq!(buf[..VNET_HEADER_LEN], [0; VNET_HEADER_LEN]);

        let packet = udp_packet(port, b"in", false);
        let header = [0; VNET_HEADER_LEN];
        let bufs = [
            IoSlice::new(&header[..3]),
            IoSlice::new(&header[3..]),
            IoSlice::new(&packet),
        ];
        let written = queue.write_vectored(&bufs).expect("write");
        assert_eq!(written, VNET_HEADER_LEN + packet.len());
        let length = socket.recv(&mut buf).expect("receive");
        assert_eq!(&buf[..length], b"in");
    });
}

#[test]
fn an_emulated_header_cannot_ask_for_a_checksum() {
    in_namespace(|| {
        let tun = configured(&options("tun-a"), !libc::IFF_VNET_HDR.cast_unsigned());
        let packet = udp_packet(9, b"in", true);
        let header = udp_header(0, 0);
        let bufs = [IoSlice::new(&header), IoSlice::new(&packet)];
        let error = tun.queues()[0]
            .write_vectored(&bufs)
            .expect_err("nobody fills it in");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    });
}

#[test]
fn several_queues_belong_to_one_interface() {
    in_namespace(|| {
        let tun = configured(
            &TunOptions {
                queues: 3,
                ..options("tun-a")
            },
            !0,
        );
        assert_eq!(tun.queues().len(), 3);
        assert!(
            tun.capabilities().tso4.is_present() && tun.capabilities().multi_queue.is_present()
        );
        let (socket, port) = udp_listener();
        for (position, queue) in tun.queues().iter().enumerate() {
            let packet = udp_packet(port, &[position as u8], true);
            let header = udp_header(0, 0);
            queue
                .write_vectored(&[IoSlice::new(&header), IoSlice::new(&packet)])
                .expect("write");
            let mut buf = [0xff; 10];
            assert_eq!(socket.recv(&mut buf).expect("receive"), 1);
            assert_eq!(buf[0], position as u8);
        }
    });
}

#[test]
fn without_multi_queue_there_is_one_queue_and_a_reason() {
    in_namespace(|| {
        let several = TunOptions {
            queues: 3,
            ..options("tun-a")
        };
        let tun = configured(&several, !libc::IFF_MULTI_QUEUE.cast_unsigned());
        assert_eq!(tun.queues().len(), 1);
        assert!(
            tun.capabilities()
                .multi_queue
                .reason()
                .is_some_and(|r| r.contains("MULTI_QUEUE"))
        );
    });
}

/// Returns a TUN and a listener in another namespace, which lives as long as they do.
fn far_host() -> (Tun, TcpListener) {
    std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("namespace");
        let tun = Tun::create(&options("tun-b")).expect("TUN device");
        set_address(tun.name(), THERE, MASK);
        set_up(tun.name());
        let listener = TcpListener::bind((THERE, 7)).expect("listen");
        (tun, listener)
    })
    .join()
    .expect("thread")
}

/// Forwards packets between two queues until both were idle for `idle` milliseconds. Returns the
/// length, `gso_type` and `gso_size` of the largest packet from `a`.
fn forward(a: &TunQueue, b: &TunQueue, idle: u16) -> (usize, u8, u16) {
    let mut largest = (0, 0, 0);
    let mut buf = vec![0; READ_BUFFER_LEN];
    loop {
        let mut fds = [a, b].map(|queue| PollFd::new(queue.as_fd(), PollFlags::POLLIN));
        if poll(&mut fds, PollTimeout::from(idle)).expect("poll") == 0 {
            return largest;
        }
        for (from, to) in [(a, b), (b, a)] {
            while let Ok(length) = from.read(&mut buf) {
                to.write_vectored(&[IoSlice::new(&buf[..length])])
                    .expect("write");
                if std::ptr::eq(from, a) && length > largest.0 {
                    largest = (length, buf[1], u16::from_le_bytes([buf[4], buf[5]]));
                }
            }
        }
    }
}

#[test]
fn tcp_super_packets_pass_whole_and_intact() {
    in_namespace(|| {
        let near = configured(&options("tun-a"), !0);
        let (far, listener) = far_host();
        let sent: Vec<u8> = (0..4_000_000u32).map(|i| ((i * 31) >> 3) as u8).collect();
        std::thread::scope(|scope| {
            let client = scope.spawn(|| {
                let mut stream = TcpStream::connect((THERE, 7)).expect("connect");
                stream.write_all(&sent).expect("send");
            });
            let server = scope.spawn(|| {
                let mut received = Vec::new();
                let (mut stream, _) = listener.accept().expect("accept");
                stream.read_to_end(&mut received).expect("receive");
                received
            });
            let (length, gso_type, gso_size) = forward(&near.queues()[0], &far.queues()[0], 500);
            client.join().expect("client");
            assert!(server.join().expect("server") == sent, "the bytes differ");
            assert!(length > 10_000, "the largest packet had {length} bytes");
            assert_eq!(gso_type & !GSO_ECN, GSO_TCPV4);
            // MTU 1500 less IPv4, TCP and the timestamp option.
            assert_eq!(gso_size, 1448);
        });
    });
}

#[test]
fn a_tap_device_reads_ethernet_frames() {
    in_namespace(|| {
        let tap = Tun::create_tap(&options("tap-a")).expect("TAP device");
        set_address(tap.name(), HERE, MASK);
        set_up(tap.name());
        let socket = UdpSocket::bind((HERE, 0)).expect("bind");
        // No host has this address, so the first frame is an ARP request for it.
        socket.send_to(b"x", (THERE, 9)).expect("send");
        let mut buf = vec![0; TAP_READ_BUFFER_LEN];
        for _ in 0..20 {
            let mut fds = [PollFd::new(tap.queues()[0].as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut fds, PollTimeout::from(2000u16)).expect("poll"), 1);
            let length = tap.queues()[0].read(&mut buf).expect("read");
            let frame = &buf[VNET_HEADER_LEN..length];
            // EtherType of ARP (RFC 826).
            if frame[12..14] == [8, 6] {
                assert_eq!(frame[..6], [0xff; 6]);
                return;
            }
        }
        panic!("no ARP request among 20 frames");
    });
}

#[test]
fn without_a_header_nothing_is_offloaded() {
    in_namespace(|| {
        let tun = Tun::create_without_header(&options("tun-a")).expect("TUN device");
        assert!(!tun.capabilities().vnet_header.is_present());
        assert!(!tun.capabilities().checksum.is_present());
    });
}

#[test]
fn a_given_device_is_used_with_or_without_its_header() {
    in_namespace(|| {
        for has_header in [true, false] {
            let opened = if has_header {
                Tun::create(&options("tun-a"))
            } else {
                Tun::create_without_header(&options("tun-a"))
            };
            let opened = opened.expect("TUN device");
            let device = opened.queues()[0].as_fd().try_clone_to_owned();
            drop(opened);
            let other = options("tun-b");
            let tun = Tun::adopt(device.expect("a descriptor"), &other).expect("usable");
            assert_eq!(tun.name(), "tun-a");
            let can = tun.capabilities();
            assert_eq!(can.vnet_header.is_present(), has_header);
            assert_eq!(can.checksum.is_present(), has_header);
            set_address(tun.name(), HERE, MASK);
            set_up(tun.name());
            let socket = UdpSocket::bind((HERE, 0)).expect("bind");
            socket.send_to(b"hello", (THERE, 9)).expect("send");
            let mut buf = vec![0; READ_BUFFER_LEN];
            let length = read_ipv4(&tun.queues()[0], &mut buf);
            assert!(buf[..length].ends_with(b"hello"), "{has_header}");
        }
    });
}

#[test]
fn a_given_descriptor_that_is_no_tun_device_is_refused() {
    in_namespace(|| {
        let tap = Tun::create_tap(&options("tap-a")).expect("TAP device");
        let tap = tap.queues()[0].as_fd().try_clone_to_owned();
        let loose = ioctl::open().expect("/dev/net/tun");
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        for (device, reason) in [
            (tap.expect("a descriptor"), "tap-a is a TAP device"),
            (loose.into(), "it belongs to no interface"),
            (null.into(), "TUNGETIFF: ENOTTY"),
        ] {
            let error = Tun::adopt(device, &options("tun-b")).expect_err("refused");
            assert!(error.to_string().contains(reason), "{error}");
        }
    });
}

/// Bytes of a virtio-net header and `length` more.
fn message(length: usize) -> Vec<u8> {
    (0..VNET_HEADER_LEN + length)
        .map(|i| (i % 251) as u8)
        .collect()
}

#[test]
fn a_pair_carries_the_largest_packets_whole_both_ways() {
    let (tun, stack) = Tun::pair("pair").expect("a pair");
    assert_eq!(tun.index(), None);
    assert!(tun.capabilities().uso6.is_present());
    let queue = &tun.queues()[0];
    for length in [1, 1420, 65_536] {
        let packet = message(length);
        let (header, rest) = packet.split_at(VNET_HEADER_LEN);
        let parts = [IoSlice::new(header), IoSlice::new(rest)];
        assert_eq!(queue.write_vectored(&parts).ok(), Some(packet.len()));
        let mut buffer = vec![0; READ_BUFFER_LEN];
        let read = nix::unistd::read(&stack, &mut buffer).expect("read");
        assert_eq!(buffer[..read], packet);
        nix::unistd::write(&stack, &packet).expect("write");
        let read = queue.read(&mut buffer).expect("read");
        assert_eq!(buffer[..read], packet);
    }
    let nothing = queue.read(&mut [0; READ_BUFFER_LEN]);
    let kind = nothing.expect_err("empty").kind();
    assert_eq!(kind, io::ErrorKind::WouldBlock);
}

#[test]
fn a_pair_whose_reader_is_slow_refuses_packets_after_some() {
    let (tun, stack) = Tun::pair("pair").expect("a pair");
    let packet = message(65_536);
    let write = || tun.queues()[0].write_vectored(&[IoSlice::new(&packet)]);
    // At least two, or nothing could be sent while one is being read.
    let written = std::iter::repeat_with(write).take(10_000);
    let written = written.take_while(Result::is_ok).count();
    assert!((2..10_000).contains(&written), "{written}");
    let kind = write().expect_err("full").kind();
    assert_eq!(kind, io::ErrorKind::WouldBlock);
    let mut buffer = vec![0; READ_BUFFER_LEN];
    nix::unistd::read(&stack, &mut buffer).expect("read");
    assert!(write().is_ok());
}

#[test]
fn a_pair_without_a_stack_is_gone() {
    let (tun, stack) = Tun::pair("pair").expect("a pair");
    drop(stack);
    let mut buffer = [0; READ_BUFFER_LEN];
    let error = tun.queues()[0].read(&mut buffer).expect_err("closed");
    assert_eq!(error.raw_os_error(), Some(libc::EBADFD));
}

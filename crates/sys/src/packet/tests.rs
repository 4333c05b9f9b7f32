//! Tests on the running kernel: a LAN of one veth pair between a device and a gateway, each in a
//! namespace of its own.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SetSockOpt, sockopt};

use super::*;
use crate::netlink::{self, Netlink};
use crate::netns::NetNs;
use crate::sysctl;
use crate::test_namespace::{namespace, sysfs};
use crate::testing::{in_child, in_namespace, skip};

const DEVICE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
/// Local experimental EtherType (IEEE 802), which no other host of the LAN uses.
const EXPERIMENTAL: u16 = 0x88b5;
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 99];
const BROADCAST: [u8; 6] = [0xff; 6];
const WHOLE: Accept = Accept::Everything {
    snap_length: u32::MAX,
};
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_UDP_L4: u8 = 5;
const NO_OFFLOAD: [u8; VNET_HEADER_LEN] = [0; VNET_HEADER_LEN];

/// One end of the LAN.
struct End {
    namespace: NetNs,
    netlink: Netlink,
    index: u32,
    mac: [u8; 6],
}

impl End {
    fn new(namespace: NetNs, interface: &str, address: Ipv4Addr) -> Self {
        let netlink = namespace.netlink().unwrap();
        // IPv6 would send packets by itself.
        let quiet = ["ipv6", "conf", interface, "disable_ipv6"];
        let _ = namespace.run(|| sysctl::write(&quiet, "1")).unwrap();
        let link = netlink.link(interface).unwrap();
        let net = ipnet::IpNet::new(address.into(), 24).unwrap();
        netlink.add_address(link.index, net).unwrap();
        netlink.set_up(link.index).unwrap();
        Self {
            namespace,
            netlink,
            index: link.index,
            mac: link.mac().unwrap(),
        }
    }

    fn open(&self, accept: Accept) -> PacketSocket {
        self.open_with(&PacketOptions::new(accept)).unwrap()
    }

    fn open_with(&self, options: &PacketOptions) -> Result<PacketSocket, PacketError> {
        let index = self.index;
        self.namespace
            .run(|| PacketSocket::open(index, options))
            .unwrap()
    }
}

/// Returns the device (`d0`) and the gateway (`g0`).
fn lan() -> Option<(End, End)> {
    let (device, gateway) = (namespace()?, namespace()?);
    let netlink = device.netlink().unwrap();
    netlink
        .create_veth("d0", "g0", Some(gateway.as_fd()))
        .unwrap();
    let device = End::new(device, "d0", DEVICE);
    let gateway = End::new(gateway, "g0", GATEWAY);
    // An end has a carrier when both are up.
    let deadline = Instant::now() + Duration::from_secs(5);
    while !device.netlink.link("d0").unwrap().carrier {
        assert!(Instant::now() < deadline, "no carrier");
        std::thread::sleep(Duration::from_millis(1));
    }
    Some((device, gateway))
}

fn frame(destination: [u8; 6], source: [u8; 6], ether_type: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [destination, source].concat();
    frame.extend(ether_type.to_be_bytes());
    frame.extend(payload);
    frame
}

fn send(socket: &PacketSocket, frame: &[u8]) {
    let parts = [IoSlice::new(&NO_OFFLOAD), IoSlice::new(frame)];
    let length = socket.send_vectored(&parts).unwrap();
    assert_eq!(length, VNET_HEADER_LEN + frame.len());
}

fn readable(socket: &PacketSocket, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::try_from(timeout).unwrap()).unwrap() == 1
}

/// Returns the next frame, which must arrive within two seconds: its properties, the header and the
/// frame.
fn receive(socket: &PacketSocket) -> (Received, Vec<u8>, Vec<u8>) {
    assert!(readable(socket, Duration::from_secs(2)), "no frame");
    let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
    let received = socket.receive(&mut buffer).unwrap();
    let frame = buffer[VNET_HEADER_LEN..received.length].to_vec();
    buffer.truncate(VNET_HEADER_LEN);
    (received, buffer, frame)
}

/// Returns the next frame of the tests' own EtherType.
fn receive_experimental(socket: &PacketSocket) -> (Received, Vec<u8>) {
    loop {
        let (received, _, frame) = receive(socket);
        if frame[12..14] == EXPERIMENTAL.to_be_bytes() {
            return (received, frame);
        }
    }
}

fn field(header: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([header[at], header[at + 1]])
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

/// IPv4 and UDP headers for `payload_length` bytes. The UDP checksum covers the pseudo-header only.
fn udp_headers(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload_length: usize) -> Vec<u8> {
    let udp_length = (8 + payload_length) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend((20 + udp_length).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend(from.0.octets());
    packet.extend(to.0.octets());
    let checksum = !ones_sum(&packet);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut pseudo = packet[12..20].to_vec();
    pseudo.extend([0, 17]);
    pseudo.extend(udp_length.to_be_bytes());
    packet.extend(from.1.to_be_bytes());
    packet.extend(to.1.to_be_bytes());
    packet.extend(udp_length.to_be_bytes());
    packet.extend(ones_sum(&pseudo).to_be_bytes());
    packet
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i % 251) as u8).collect()
}

// Super-packets.

#[test]
fn a_tcp_super_packet_arrives_whole() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let listener = gateway
        .namespace
        .run(|| TcpListener::bind((GATEWAY, 0)).unwrap())
        .unwrap();
    let to = listener.local_addr().unwrap();
    let mut stream = device
        .namespace
        .run(|| TcpStream::connect(to).unwrap())
        .unwrap();
    stream
        .set_write_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let (mut accepted, _) = listener.accept().unwrap();
    let reader = std::thread::spawn(move || std::io::copy(&mut accepted, &mut std::io::sink()));
    stream.write_all(&pattern(500_000)).unwrap();
    drop(stream);
    reader.join().unwrap().unwrap();

    let (received, header, frame) = loop {
        let (received, header, frame) = receive(&socket);
        if frame.len() > 10_000 {
            break (received, header, frame);
        }
    };
    let ip_length = u16::from_be_bytes([frame[16], frame[17]]);
    assert_eq!(frame.len(), 14 + usize::from(ip_length));
    assert_eq!(received.frame_length, frame.len());
    assert_eq!((header[0], header[1]), (NEEDS_CSUM, GSO_TCPV4));
    let options = 12; // timestamps
    assert_eq!(field(&header, 4), 1500 - 20 - 20 - options, "gso_size");
    assert_eq!(
        field(&header, 6),
        14 + 20,
        "csum_start counts from the Ethernet header"
    );
    assert_eq!(field(&header, 8), 16, "csum_offset");
    assert!(!received.truncated);
}

#[test]
fn a_udp_super_packet_arrives_whole() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let sender = device
        .namespace
        .run(|| UdpSocket::bind((DEVICE, 0)).unwrap())
        .unwrap();
    sockopt::UdpGsoSegment.set(&sender, &1000).unwrap();
    let payload = pattern(20_500);
    sender.send_to(&payload, (GATEWAY, 9)).unwrap();
    let (header, frame) = loop {
        let (_, header, frame) = receive(&socket);
        if frame[12..14] == [8, 0] {
            break (header, frame);
        }
    };
    assert_eq!((header[0], header[1]), (NEEDS_CSUM, GSO_UDP_L4));
    assert_eq!(field(&header, 4), 1000, "gso_size");
    assert_eq!(frame[14 + 28..], payload);
}

#[test]
fn a_udp_super_packet_sent_arrives_as_its_datagrams() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let receiver = device
        .namespace
        .run(|| UdpSocket::bind((DEVICE, 0)).unwrap())
        .unwrap();
    receiver
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    let port = receiver.local_addr().unwrap().port();
    let payload = pattern(9_500);
    let packet = udp_headers((GATEWAY, 9), (DEVICE, port), payload.len());
    let headers = frame(device.mac, gateway.mac, libc::ETH_P_IP as u16, &packet);
    let mut offload = NO_OFFLOAD;
    offload[..2].copy_from_slice(&[NEEDS_CSUM, GSO_UDP_L4]);
    for (at, value) in [(2, headers.len() as u16), (4, 1000), (6, 14 + 20), (8, 6)] {
        offload[at..at + 2].copy_from_slice(&value.to_ne_bytes());
    }
    let parts = [&offload[..], &headers, &payload].map(IoSlice::new);
    socket.send_vectored(&parts).unwrap();
    let mut buffer = [0; 2000];
    for expected in payload.chunks(1000) {
        let (length, from) = receiver.recv_from(&mut buffer).unwrap();
        assert_eq!(buffer[..length], *expected);
        assert_eq!(from, SocketAddr::from((GATEWAY, 9)));
    }
}

/// Forwards frames between two interfaces until both were silent for a while. Returns the longest
/// length.
fn bridge(a: &PacketSocket, b: &PacketSocket, done: &AtomicBool) -> usize {
    let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
    let mut longest = 0;
    while !done.load(Ordering::Relaxed) {
        let mut fds = [a, b].map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN));
        poll(&mut fds, PollTimeout::from(20u16)).unwrap();
        for (from, to) in [(a, b), (b, a)] {
            while let Ok(received) = from.receive(&mut buffer) {
                longest = longest.max(received.length);
                // A full queue is packet loss, which TCP repairs.
                let _ = to.send_vectored(&[IoSlice::new(&buffer[..received.length])]);
            }
        }
    }
    longest
}

#[test]
fn tcp_passes_whole_and_intact_through_two_sockets() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let Some(remote) = namespace() else { return };
    gateway
        .netlink
        .create_veth("g1", "r0", Some(remote.as_fd()))
        .unwrap();
    let beyond = gateway.netlink.link("g1").unwrap().index;
    gateway.netlink.set_up(beyond).unwrap();
    let address = Ipv4Addr::new(10, 9, 0, 3);
    let remote = End::new(remote, "r0", address);
    let near = gateway.open(WHOLE);
    let far = gateway
        .namespace
        .run(|| PacketSocket::open(beyond, &PacketOptions::new(WHOLE)).unwrap())
        .unwrap();
    let listener = remote
        .namespace
        .run(|| TcpListener::bind((address, 0)).unwrap())
        .unwrap();
    let to = listener.local_addr().unwrap();
    let sent = pattern(2_000_000);
    let done = AtomicBool::new(false);
    let (longest, got) = std::thread::scope(|scope| {
        let bridge = scope.spawn(|| bridge(&near, &far, &done));
        let reader = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            let mut got = Vec::new();
            stream.read_to_end(&mut got).map(|_| got)
        });
        let stream = device.namespace.run(|| {
            let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(10))?;
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(&sent)
        });
        if stream.unwrap().is_err() {
            // Ends the reader.
            let _ = remote.namespace.run(|| TcpStream::connect(to));
        }
        let got = reader.join().unwrap();
        done.store(true, Ordering::Relaxed);
        (bridge.join().unwrap(), got.unwrap())
    });
    assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
    assert!(
        longest > 10_000,
        "no super-packet: the longest had {longest}"
    );
}

// Received frames.

#[test]
fn a_vlan_tag_is_reported_and_removed() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let tci = (5 << 13) | 42;
    let mut tagged = frame(gateway.mac, device.mac, 0x8100, &u16::to_be_bytes(tci));
    tagged.extend(EXPERIMENTAL.to_be_bytes());
    tagged.extend(pattern(60));
    send(&device.open(WHOLE), &tagged);
    let (received, frame) = receive_experimental(&socket);
    assert_eq!((received.vlan, received.vlan_protocol), (Some(tci), 0x8100));
    assert_eq!(frame[14..], pattern(60));
    assert_eq!(received.frame_length, 14 + 60);
}

#[test]
fn an_untagged_frame_has_no_vlan() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    send(
        &device.open(WHOLE),
        &frame(gateway.mac, device.mac, EXPERIMENTAL, &[0; 60]),
    );
    let (received, _) = receive_experimental(&socket);
    assert_eq!((received.vlan, received.vlan_protocol), (None, 0));
}

#[test]
fn the_status_bits_are_those_of_the_kernel() {
    // TP_STATUS_VLAN_VALID 1 << 4 (include/uapi/linux/if_packet.h).
    let auxiliary = |status| Auxiliary {
        status,
        frame_length: 0,
        vlan: 7,
        vlan_protocol: 0x88a8,
    };
    assert_eq!(received(10, false, &auxiliary(0x6f)).vlan, None);
    assert_eq!(received(10, false, &auxiliary(0x90)).vlan, Some(7));
}

/// Destinations of frames, each with whether a socket for the address `own` receives it.
fn by_destination(own: [u8; 6]) -> Vec<([u8; 6], u16, bool)> {
    let mut almost = own;
    almost[0] ^= 0x40;
    let mut nearly = own;
    nearly[5] ^= 1;
    vec![
        (own, EXPERIMENTAL, true),
        (OTHER_MAC, EXPERIMENTAL, false),
        (almost, EXPERIMENTAL, false),
        (nearly, EXPERIMENTAL, false),
        (BROADCAST, EXPERIMENTAL, true),
        ([0x33, 0x33, 0, 0, 0, 1], EXPERIMENTAL, true),
        ([1, 0, 0x5e, 0, 0, 251], EXPERIMENTAL, true),
        (OTHER_MAC, libc::ETH_P_ARP as u16, true),
        (OTHER_MAC, libc::ETH_P_IP as u16, false),
    ]
}

/// Sends one frame to each destination, and returns those that `socket` received.
fn seen(device: &End, socket: &PacketSocket, frames: &[([u8; 6], u16, bool)]) -> Vec<usize> {
    let sender = device.open(WHOLE);
    // The payload is neither valid ARP nor IPv4, so that no host answers.
    for (number, (to, ether_type, _)) in frames.iter().enumerate() {
        let payload = [0xa5, 0xa5, number as u8];
        send(&sender, &frame(*to, device.mac, *ether_type, &payload));
    }
    send(
        &sender,
        &frame(BROADCAST, device.mac, EXPERIMENTAL, &[0xa5, 0xa5, 0xff]),
    );
    let mut numbers = Vec::new();
    loop {
        let (_, _, frame) = receive(socket);
        match frame[14..] {
            [0xa5, 0xa5, 0xff] => return numbers,
            [0xa5, 0xa5, number] => numbers.push(number.into()),
            _ => {}
        }
    }
}

fn expected(frames: &[([u8; 6], u16, bool)]) -> Vec<usize> {
    let wanted = frames.iter().enumerate();
    wanted
        .filter(|(_, (_, _, seen))| *seen)
        .map(|(number, _)| number)
        .collect()
}

#[test]
fn the_filter_refuses_unicast_to_others() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    socket.set_promiscuous(true).unwrap();
    let frames = by_destination(gateway.mac);
    assert_eq!(seen(&device, &socket, &frames), expected(&frames));
}

#[test]
fn everything_is_seen_up_to_the_snap_length() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Everything { snap_length: 128 });
    let whole = frame(OTHER_MAC, device.mac, EXPERIMENTAL, &pattern(1000));
    send(&device.open(WHOLE), &whole);
    let (received, frame) = receive_experimental(&socket);
    assert_eq!(frame, whole[..128]);
    assert_eq!(received.frame_length, whole.len());
    assert!(!received.truncated);
}

#[test]
fn a_frame_longer_than_the_buffer_is_said_to_be_truncated() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let whole = frame(gateway.mac, device.mac, EXPERIMENTAL, &pattern(1000));
    send(&device.open(WHOLE), &whole);
    assert!(readable(&socket, Duration::from_secs(2)));
    let mut buffer = [0; 200];
    let received = socket.receive(&mut buffer).unwrap();
    assert!(received.truncated);
    assert_eq!(received.length, 200);
    assert_eq!(received.frame_length, whole.len());
    assert_eq!(buffer[VNET_HEADER_LEN..], whole[..190]);
}

/// Sends frames from the gateway by the stack and by another socket, then a frame from the device:
/// the first frame that `socket` receives must be the device's.
fn sees_only_the_device(device: &End, gateway: &End, socket: &PacketSocket) {
    let own = frame(BROADCAST, gateway.mac, EXPERIMENTAL, &[1; 60]);
    send(socket, &own);
    send(&gateway.open(WHOLE), &own);
    let sender = gateway
        .namespace
        .run(|| UdpSocket::bind((GATEWAY, 0)).unwrap())
        .unwrap();
    sender.set_broadcast(true).unwrap();
    sender.send_to(b"own", "255.255.255.255:9").ok();
    send(
        &device.open(WHOLE),
        &frame(BROADCAST, device.mac, EXPERIMENTAL, &[2; 60]),
    );
    let (_, frame) = receive_experimental(socket);
    assert_eq!(frame[14], 2, "the gateway's own");
}

#[test]
fn own_transmissions_are_not_seen() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    for accept in [WHOLE, Accept::Host(gateway.mac)] {
        sees_only_the_device(&device, &gateway, &gateway.open(accept));
    }
}

#[test]
fn the_filter_alone_refuses_own_transmissions() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    for accept in [WHOLE, Accept::Host(gateway.mac)] {
        let socket = gateway.open(accept);
        option::set_int(socket.as_fd(), libc::PACKET_IGNORE_OUTGOING, 0).unwrap();
        sees_only_the_device(&device, &gateway, &socket);
    }
}

// Interface and socket.

#[test]
fn a_link_that_was_down_works_again() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    let sender = device.open(WHOLE);
    let number = |n: u8| frame(gateway.mac, device.mac, EXPERIMENTAL, &[n; 60]);
    send(&sender, &number(1));
    assert_eq!(receive_experimental(&socket).1[14], 1);

    gateway.netlink.set_down(gateway.index).unwrap();
    assert!(readable(&socket, Duration::from_secs(2)), "poll says so");
    let mut buffer = [0; 200];
    let error = socket.receive(&mut buffer).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NetworkDown);
    let error = socket.receive(&mut buffer).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "said once");
    let own = frame(device.mac, gateway.mac, EXPERIMENTAL, &[3; 60]);
    let parts = [IoSlice::new(&NO_OFFLOAD), IoSlice::new(&own)];
    let error = socket.send_vectored(&parts).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NetworkDown);

    gateway.netlink.set_up(gateway.index).unwrap();
    send(&sender, &number(2));
    assert_eq!(receive_experimental(&socket).1[14], 2);
    let other = device.open(Accept::Host(device.mac));
    socket.send_vectored(&parts).unwrap();
    assert_eq!(receive_experimental(&other).1[14], 3);
}

#[test]
fn a_socket_can_be_opened_before_the_interface_is_up() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    gateway.netlink.set_down(gateway.index).unwrap();
    let socket = gateway.open(Accept::Host(gateway.mac));
    let error = socket.receive(&mut [0; 200]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NetworkDown);
    gateway.netlink.set_up(gateway.index).unwrap();
    send(
        &device.open(WHOLE),
        &frame(gateway.mac, device.mac, EXPERIMENTAL, &[4; 60]),
    );
    assert_eq!(receive_experimental(&socket).1[14], 4);
}

#[test]
fn a_deleted_interface_is_a_network_that_is_down() {
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(Accept::Host(gateway.mac));
    gateway.netlink.delete_link(gateway.index).unwrap();
    let error = socket.receive(&mut [0; 200]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NetworkDown);
    let parts = [IoSlice::new(&NO_OFFLOAD), IoSlice::new(&[0; 60])];
    let error = socket.send_vectored(&parts).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENXIO));
}

#[test]
fn frames_above_the_receive_buffer_are_counted() {
    let Some((device, gateway)) = lan() else {
        return;
    };
    let options = PacketOptions {
        receive_buffer: 1, // the kernel's minimum instead
        ..PacketOptions::new(Accept::Host(gateway.mac))
    };
    let socket = gateway.open_with(&options).unwrap();
    let sender = device.open(WHOLE);
    for _ in 0..2 {
        for _ in 0..50 {
            send(
                &sender,
                &frame(gateway.mac, device.mac, EXPERIMENTAL, &[0; 1000]),
            );
        }
        // veth delivers from a softirq.
        std::thread::sleep(Duration::from_millis(50));
        socket.drops();
    }
    let mut received = 0;
    while socket.receive(&mut [0; 2000]).is_ok() {
        received += 1;
    }
    assert!(received > 0 && received < 50, "{received}");
    assert_eq!(socket.drops() + received, 100);
}

#[test]
fn a_smaller_buffer_than_requested_has_a_reason() {
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(WHOLE);
    assert_eq!(socket.buffers(), (&Ability::Present, &Ability::Present));
    in_child(|| {
        caps::drop(
            None,
            caps::CapSet::Effective,
            caps::Capability::CAP_NET_ADMIN,
        )
        .map_err(|e| e.to_string())?;
        let options = PacketOptions {
            receive_buffer: 1 << 30,
            ..PacketOptions::new(WHOLE)
        };
        let socket = gateway.open_with(&options).map_err(|e| e.to_string())?;
        match socket.buffers().0.reason() {
            Some(reason) if reason.contains("net.core.rmem_max") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
}

/// Whether the gateway's interface has `IFF_PROMISC`.
fn is_promiscuous(gateway: &End) -> bool {
    let flags = sysfs(&gateway.namespace, "g0/flags").unwrap();
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap();
    flags & libc::IFF_PROMISC as u32 != 0
}

#[test]
fn promiscuous_mode_ends_on_request_or_with_the_socket() {
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(WHOLE);
    assert!(!is_promiscuous(&gateway));
    socket.set_promiscuous(true).unwrap();
    socket.set_promiscuous(true).unwrap();
    assert!(is_promiscuous(&gateway));
    socket.set_promiscuous(false).unwrap();
    assert!(!is_promiscuous(&gateway));
    socket.set_promiscuous(true).unwrap();
    drop(socket);
    assert!(!is_promiscuous(&gateway));
}

#[test]
fn a_unicast_address_is_joined_until_the_socket_is_closed() {
    // A veth has no address filter, so for a second address it becomes promiscuous
    // (__dev_set_rx_mode(), net/core/dev_addr_lists.c).
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(WHOLE);
    socket.join_unicast(OTHER_MAC).unwrap();
    assert!(is_promiscuous(&gateway));
    drop(socket);
    assert!(!is_promiscuous(&gateway));
}

#[test]
fn the_kernel_lists_which_sockets_take_super_packets() {
    in_namespace(|| {
        let netlink = Netlink::open().unwrap();
        netlink.create_veth("d0", "d1", None).unwrap();
        let device = netlink.link("d0").unwrap().index;
        let (family, kind) = (AddressFamily::Packet, SockType::Raw);
        let single = socket::socket(family, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let accept = Accept::Everything { snap_length: 128 };
        let merged = PacketSocket::open(device, &PacketOptions::new(accept)).unwrap();
        match netlink::diag::packet_sockets() {
            Ok(found) => {
                let of = |fd: BorrowedFd| {
                    let inode = nix::sys::stat::fstat(fd).unwrap().st_ino;
                    let ours = found.iter().find(|(other, _)| *other == inode);
                    ours.map(|(_, vnet_hdr)| *vnet_hdr)
                };
                assert_eq!(of(single.as_fd()), Some(false));
                assert_eq!(of(merged.as_fd()), Some(true));
            }
            Err(error) if error.is_not_found() => skip("this kernel has no packet_diag"),
            Err(error) => panic!("{error}"),
        }
    });
}

// Errors.

#[test]
fn a_frame_over_the_mtu_is_refused_unless_it_is_a_super_packet() {
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(WHOLE);
    let parts = [IoSlice::new(&NO_OFFLOAD), IoSlice::new(&[0; 1600])];
    let error = socket.send_vectored(&parts).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
}

#[test]
fn a_wrong_header_is_invalid_input() {
    let Some((_device, gateway)) = lan() else {
        return;
    };
    let socket = gateway.open(WHOLE);
    let mut offload = NO_OFFLOAD;
    offload[1] = 99; // no such gso_type
    offload[4] = 100;
    let parts = [IoSlice::new(&offload), IoSlice::new(&[0; 200])];
    let error = socket.send_vectored(&parts).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn an_absent_interface_is_an_error_of_its_own() {
    let Some(namespace) = namespace() else { return };
    for index in [0, 999_999] {
        let outcome = namespace.run(|| PacketSocket::open(index, &PacketOptions::new(WHOLE)));
        assert!(
            matches!(outcome, Ok(Err(PacketError::NoSuchInterface { index: i })) if i == index),
            "{outcome:?}"
        );
    }
}

#[test]
fn loopback_is_not_ethernet() {
    let Some(namespace) = namespace() else { return };
    let index = namespace.netlink().unwrap().link("lo").unwrap().index;
    let outcome = namespace.run(|| PacketSocket::open(index, &PacketOptions::new(WHOLE)));
    let loopback = libc::ARPHRD_LOOPBACK;
    assert!(
        matches!(
            outcome,
            Ok(Err(PacketError::NotEthernet { hardware_type, .. })) if hardware_type == loopback
        ),
        "{outcome:?}"
    );
}

#[test]
fn missing_privilege_is_an_error_of_its_own() {
    in_child(|| {
        caps::clear(None, caps::CapSet::Effective).map_err(|e| e.to_string())?;
        match PacketSocket::open(1, &PacketOptions::new(WHOLE)) {
            Err(error @ PacketError::NotPermitted) if error.to_string().contains("CAP_NET_RAW") => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    });
}

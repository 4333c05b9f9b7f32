use super::*;
use crate::testing::{in_namespace, skip};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// `struct inet_diag_msg` of 10.0.0.1:443 to 10.0.0.2:5000 (family, state, timer, retrans; sockid; expires, rqueue,
/// wqueue, uid, inode).
fn message(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![libc::AF_INET as u8, 1, 0, 0];
    bytes.extend(443u16.to_be_bytes());
    bytes.extend(5000u16.to_be_bytes());
    bytes.extend([10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([0; 12]);
    for word in [0u32, 0, 0, 1000, 4711] {
        bytes.extend(word.to_ne_bytes());
    }
    for (kind, value) in attributes {
        bytes.extend((4 + value.len() as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(*value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

#[test]
fn a_connection_has_its_addresses_and_its_owner() {
    let connection = parse_tcp(&message(&[(CONG, b"cubic\0")])).unwrap();
    assert_eq!(connection.local, "10.0.0.1:443".parse().unwrap());
    assert_eq!(connection.remote, "10.0.0.2:5000".parse().unwrap());
    assert_eq!((connection.uid, connection.inode), (1000, 4711));
    assert_eq!(connection.congestion.as_deref(), Some("cubic"));
}

#[test]
fn a_field_that_an_older_kernel_lacks_is_none() {
    // Linux 3.10 ended at tcpi_total_retrans: 104 bytes.
    let mut old = [0; 104];
    old[68..72].copy_from_slice(&1234u32.to_ne_bytes());
    old[100..104].copy_from_slice(&5u32.to_ne_bytes());
    let info = parse_tcp(&message(&[(INFO, &old)])).unwrap().info;
    assert_eq!((info.rtt(), info.total_retrans()), (Some(1234), Some(5)));
    assert_eq!((info.bytes_acked(), info.total_rto()), (None, None));
    assert_eq!(info.delivery_rate_app_limited(), None);
}

#[test]
fn a_longer_structure_of_a_newer_kernel_is_read() {
    let mut new = vec![0; 400];
    new[240..242].copy_from_slice(&7u16.to_ne_bytes());
    let info = parse_tcp(&message(&[(INFO, &new)])).unwrap().info;
    assert_eq!(info.total_rto(), Some(7));
}

#[test]
fn memory_is_read_in_the_order_of_sk_meminfo() {
    let words: Vec<u8> = (1u32..=9).flat_map(u32::to_ne_bytes).collect();
    let socket = parse_udp(&message(&[(SKMEMINFO, &words)])).unwrap();
    let memory = socket.memory.unwrap();
    assert_eq!((memory.receive_buffer, memory.send_buffer), (2, 4));
    assert_eq!(memory.drops, Some(9));
    let older = parse_udp(&message(&[(SKMEMINFO, &words[..32])])).unwrap();
    assert_eq!(older.memory.unwrap().drops, None);
}

#[test]
fn truncated_or_wrong_bytes_never_panic() {
    let whole = message(&[(INFO, &[0xff; 248]), (CONG, &[0xff; 40]), (SKMEMINFO, &[1])]);
    for length in 0..whole.len() {
        let _ = parse_tcp(&whole[..length]);
        let _ = parse_udp(&whole[..length]);
    }
    for at in 0..whole.len() {
        let mut wrong = whole.clone();
        wrong[at] ^= 0xff;
        let _ = parse_tcp(&wrong);
        let _ = parse_udp(&wrong);
    }
}

#[test]
fn a_connection_that_carries_data_is_listed_and_found_again() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut server = listener.accept().unwrap().0;
            client.write_all(&[1; 5000]).unwrap();
            server.read_exact(&mut [0; 5000]).unwrap();

            let mut diag = Diag::open().unwrap();
            let mut found = Vec::new();
            diag.tcp(|connection| found.push(connection)).unwrap();
            let local = client.local_addr().unwrap();
            let ours = found.iter().find(|found| found.local == local).unwrap();
            assert_eq!(ours.remote, client.peer_addr().unwrap());
            // One more byte for the SYN (tcpi_bytes_acked, RFC 4898 counts it).
            assert!((5000..=5001).contains(&ours.info.bytes_acked().unwrap()));
            assert!(ours.memory.unwrap().send_buffer > 0 && ours.congestion.is_some());

            let again = diag.connection(&ours.id).unwrap().unwrap();
            assert_eq!((again.inode, again.local), (ours.inode, local));
            drop((client, server));
        }
    });
}

#[test]
fn a_udp_socket_is_listed_with_its_buffer() {
    in_namespace(|| {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        match udp_sockets() {
            Ok(found) => {
                let local = socket.local_addr().unwrap();
                let ours = found.iter().find(|found| found.local == local).unwrap();
                assert_eq!(ours.remote, None);
                assert!(ours.inode > 0 && ours.memory.unwrap().receive_buffer > 0);
            }
            Err(error) if error.is_not_found() => skip("this kernel has no udp_diag"),
            Err(error) => panic!("{error}"),
        }
    });
}

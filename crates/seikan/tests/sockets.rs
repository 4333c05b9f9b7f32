//! Names, ports, datagrams and the status.

use crate::pair::{RIGHT_V4, RIGHT_V6, with_pair};
use seikan::{Error, PeerState, TcpListener, TcpStream, Tunnel, UdpSocket};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn handles_may_be_used_in_all_threads() {
    fn is_sent_and_shared<T: Send + Sync + 'static>() {}
    is_sent_and_shared::<Tunnel>();
    is_sent_and_shared::<TcpStream>();
    is_sent_and_shared::<TcpListener>();
    is_sent_and_shared::<UdpSocket>();
    is_sent_and_shared::<Error>();
}

#[test]
fn peers_are_found_by_name_and_other_names_are_unknown() {
    with_pair(|left, _right| async move {
        let found = left.lookup("Right").await.expect("found");
        assert_eq!(found, [address(RIGHT_V4), address(RIGHT_V6)]);
        let unknown = left.tcp_connect(("localhost", 80)).await;
        assert!(matches!(unknown, Err(Error::UnknownName(_))), "{unknown:?}");
        for text in ["right", "right:0", "a b:80"] {
            let refused = left.tcp_connect(text).await;
            assert!(
                matches!(refused, Err(Error::Destination(_))),
                "{text}: {refused:?}"
            );
        }
    });
}

#[test]
fn a_port_is_open_as_long_as_its_listener() {
    with_pair(|left, right| async move {
        let closed = left.tcp_connect(("right", 80)).await;
        assert!(matches!(closed, Err(Error::Refused(_))), "{closed:?}");
        let mut listener = right.tcp_listen(80).await.expect("a port");
        let again = right.tcp_listen(80).await.expect_err("in use");
        assert!(matches!(again, Error::PortInUse(80)), "{again}");
        let (near, far) = join!(left.tcp_connect(("right", 80)), listener.accept());
        let (mut near, mut far) = (near.expect("connected"), far.expect("accepted"));
        drop(listener);
        let closed = left.tcp_connect(("right", 80)).await;
        assert!(matches!(closed, Err(Error::Refused(_))), "{closed:?}");
        // Its connections remain.
        near.write_all(b"hello").await.expect("sent");
        let mut hello = [0; 5];
        far.read_exact(&mut hello).await.expect("received");
        right.tcp_listen(80).await.expect("free again");
    });
}

#[test]
fn datagrams_cross_in_both_directions() {
    with_pair(|left, right| async move {
        let near = left.udp_bind(0).await.expect("a port");
        let far = right.udp_bind(53).await.expect("a port");
        assert!(matches!(
            right.udp_bind(53).await,
            Err(Error::PortInUse(53))
        ));
        let mut buf = vec![0; 65_536];
        // 1444 bytes less the headers of IPv4 or IPv6 and UDP.
        for (host, most) in [(RIGHT_V4, 1416), (RIGHT_V6, 1396)] {
            let to = SocketAddr::new(address(host), 53);
            for length in [0, 1, most] {
                let sent = vec![length as u8; length];
                // The first ones may be lost before the session.
                let (read, from) = loop {
                    near.send_to(&sent, to).await.expect("sent");
                    let pause = std::time::Duration::from_secs(1);
                    if let Ok(received) = tokio::time::timeout(pause, far.recv_from(&mut buf)).await
                    {
                        break received.expect("received");
                    }
                };
                assert_eq!(buf[..read], sent);
                assert_eq!(from.port(), near.port());
                far.send_to(&sent, from).await.expect("sent back");
                let (read, from) = near.recv_from(&mut buf).await.expect("received back");
                assert_eq!((read, from), (length, to));
            }
            let refused = near.send_to(&vec![0; most + 1], to).await;
            assert_eq!(
                refused.expect_err("too large").kind(),
                ErrorKind::InvalidInput
            );
        }
    });
}

#[test]
fn the_status_has_the_peer() {
    with_pair(|left, right| async move {
        assert_eq!(
            left.status().await.expect("status").peers[0].state,
            PeerState::NeverSeen
        );
        let _ = left.tcp_connect(("right", 80)).await;
        let status = left.status().await.expect("status");
        assert_eq!(status.addresses, left.addresses());
        assert_eq!((status.mtu, status.coordinator), (1444, None));
        let peer = &status.peers[0];
        assert_eq!(peer.name.as_deref(), Some("right"));
        assert_eq!(peer.state, PeerState::Up);
        assert_eq!(
            peer.endpoint,
            Some("192.0.2.2:51820".parse().expect("an endpoint"))
        );
        assert!(peer.received_bytes > 0 && peer.sent_bytes > 0);
        drop(right);
    });
}

//! STUN binding requests (RFC 8489) over UDP, on the port of the coordinator.
//!
//! A host sends a request from the socket of its tunnel and receives the address that the server
//! sees, behind any NAT. The server keeps no state. A response is at most twelve bytes longer than
//! its request over IPv4 and twenty-four over IPv6, so it is of little use for amplification with
//! forged addresses. The server answers requests with any attributes: none that it knows changes
//! the response.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use seikan_proto::mesh::relay;
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Maximum bytes of a request that are read.
const MAX_REQUEST: usize = 1500;

/// Answers requests until the socket fails. A response is sent from the address that the request
/// was sent to: hosts and NATs would drop one from another address.
///
/// # Errors
/// The socket cannot report destination addresses, or the runtime ends.
pub(super) async fn answer(socket: UdpSocket) -> io::Result<()> {
    let state = UdpSocketState::new((&socket).into())?;
    let mut request = [0; MAX_REQUEST];
    loop {
        let mut meta = RecvMeta::default();
        let received = socket.async_io(Interest::READABLE, || {
            let mut buffers = [IoSliceMut::new(&mut request)];
            state.recv(
                (&socket).into(),
                &mut buffers,
                std::slice::from_mut(&mut meta),
            )
        });
        // The error reports an earlier response that could not be delivered.
        if received.await.is_err() {
            continue;
        }
        // The kernel joins datagrams of one host that arrive together (GRO).
        let stride = meta.stride.clamp(1, MAX_REQUEST);
        let requests = request[..meta.len.min(MAX_REQUEST)].chunks(stride);
        for reply in requests.filter_map(|request| reply(request, meta.addr)) {
            // A full buffer drops it, as any network may: the host repeats its request.
            let _ = state.try_send(
                (&socket).into(),
                &Transmit {
                    destination: meta.addr,
                    ecn: None,
                    contents: &reply,
                    segment_size: None,
                    src_ip: meta.dst_ip,
                },
            );
        }
    }
}

/// Returns the response to a binding request; `None` for anything else.
fn reply(request: &[u8], from: SocketAddr) -> Option<Vec<u8>> {
    let id = relay::request_id(request)?;
    Some(relay::Answer::address(from).write(id, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hex"))
            .collect()
    }

    /// RFC 5769, section 2.2 and 2.3: the mapped addresses of the sample responses.
    #[test]
    fn a_response_holds_the_source_address() {
        let request = hex("0001 0000 2112a442 b7e7a701bc34d686fa87dfae");
        for (from, attribute) in [
            ("192.0.2.1:32853", "0020 0008 0001 a147 e112a643"),
            (
                "[2001:db8:1234:5678:11:2233:4455:6677]:32853",
                "0020 0014 0002 a147 0113a9faa5d3f179bc25f4b5bed2b9d9",
            ),
        ] {
            let reply = reply(&request, from.parse().expect("an address")).expect("an answer");
            assert_eq!(reply[..2], [1, 1]);
            assert_eq!(reply[4..20], request[4..20]);
            assert_eq!(reply[20..], hex(attribute));
            let mapped: SocketAddr = from.parse().expect("an address");
            if let SocketAddr::V4(v4) = mapped {
                let shown = SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port()));
                assert_eq!(super::reply(&request, shown), Some(reply));
            }
        }
    }

    #[tokio::test]
    async fn a_response_comes_from_the_address_of_the_request() {
        // All of 127.0.0.0/8 is local; by default the kernel would answer from 127.0.0.1.
        for any in ["0.0.0.0:0", "[::]:0"] {
            let server = UdpSocket::bind(any).await.expect("a socket");
            let destination = SocketAddr::from((
                [127, 0, 0, 5],
                server.local_addr().expect("its port").port(),
            ));
            let answers = tokio::spawn(answer(server));
            let client = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
            let request = hex("0001 0000 2112a442 b7e7a701bc34d686fa87dfae");
            client.send_to(&request, destination).await.expect("sent");
            let mut answer = [0; 100];
            let time = std::time::Duration::from_secs(10);
            let received = tokio::time::timeout(time, client.recv_from(&mut answer)).await;
            let (_, from) = received.expect("in time").expect("an answer");
            assert_eq!(from, destination);
            answers.abort();
        }
    }

    #[test]
    fn only_binding_requests_are_answered() {
        let from = "192.0.2.1:7".parse().expect("an address");
        for other in [
            "",
            "0001",
            // A response, an indication, another method, another cookie.
            "0101 0000 2112a442 b7e7a701bc34d686fa87dfae",
            "0011 0000 2112a442 b7e7a701bc34d686fa87dfae",
            "0003 0000 2112a442 b7e7a701bc34d686fa87dfae",
            "0001 0000 2112a443 b7e7a701bc34d686fa87dfae",
        ] {
            assert_eq!(reply(&hex(other), from), None, "{other}");
        }
    }
}

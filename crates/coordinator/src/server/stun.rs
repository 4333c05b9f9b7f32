//! What hosts look like from here: STUN (RFC 8489) over UDP, at the same port.
//!
//! A host asks from the socket of its tunnel and is told the address that it asked from: what a NAT on
//! the way has made of its own. Nothing is remembered, and an answer is twelve bytes longer than a
//! question at most with IPv4 and twenty-four with IPv6, so that it is of little use to who forges
//! addresses. Questions are answered whatever attributes they have: none that we know changes the answer.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use seikan_proto::mesh::relay;
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Longest question that is read, in bytes: the rest is not looked at.
const MAX_QUESTION: usize = 1500;

/// Answers until the socket fails, each from the address that was asked: from another of this host's, a host would not take the
/// answer, nor would a NAT let it through.
///
/// # Errors
/// The kernel does not say which address was asked, or the runtime ends.
pub(super) async fn answer(socket: UdpSocket) -> io::Result<()> {
    let state = UdpSocketState::new((&socket).into())?;
    let mut question = [0; MAX_QUESTION];
    loop {
        let mut meta = RecvMeta::default();
        let received = socket.async_io(Interest::READABLE, || {
            let mut buffers = [IoSliceMut::new(&mut question)];
            state.recv(
                (&socket).into(),
                &mut buffers,
                std::slice::from_mut(&mut meta),
            )
        });
        // An error belongs to an earlier answer, which found nobody.
        if received.await.is_err() {
            continue;
        }
        // The kernel joins what comes together from one host (GRO).
        let stride = meta.stride.clamp(1, MAX_QUESTION);
        let questions = question[..meta.len.min(MAX_QUESTION)].chunks(stride);
        for reply in questions.filter_map(|question| reply(question, meta.addr)) {
            // A full buffer loses it, as any network might: the host asks again.
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

/// The answer to a binding request; nothing for anything else.
fn reply(question: &[u8], from: SocketAddr) -> Option<Vec<u8>> {
    let id = relay::request_id(question)?;
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

    /// RFC 5769, section 2.2 and 2.3: the mapped addresses of the sample responses, by their transaction.
    #[test]
    fn who_asks_is_told_where_from() {
        let question = hex("0001 0000 2112a442 b7e7a701bc34d686fa87dfae");
        for (from, attribute) in [
            ("192.0.2.1:32853", "0020 0008 0001 a147 e112a643"),
            (
                "[2001:db8:1234:5678:11:2233:4455:6677]:32853",
                "0020 0014 0002 a147 0113a9faa5d3f179bc25f4b5bed2b9d9",
            ),
        ] {
            let reply = reply(&question, from.parse().expect("an address")).expect("an answer");
            assert_eq!(reply[..2], [1, 1]);
            assert_eq!(reply[4..20], question[4..20]);
            assert_eq!(reply[20..], hex(attribute));
            let mapped: SocketAddr = from.parse().expect("an address");
            if let SocketAddr::V4(v4) = mapped {
                let shown = SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port()));
                assert_eq!(super::reply(&question, shown), Some(reply));
            }
        }
    }

    #[tokio::test]
    async fn the_answer_comes_from_the_address_that_was_asked() {
        // All of 127.0.0.0/8 is this host's; left to the kernel, the answer would come from 127.0.0.1.
        for any in ["0.0.0.0:0", "[::]:0"] {
            let server = UdpSocket::bind(any).await.expect("a socket");
            let asked = SocketAddr::from((
                [127, 0, 0, 5],
                server.local_addr().expect("its port").port(),
            ));
            let answers = tokio::spawn(answer(server));
            let client = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
            let question = hex("0001 0000 2112a442 b7e7a701bc34d686fa87dfae");
            client.send_to(&question, asked).await.expect("sent");
            let mut answer = [0; 100];
            let time = std::time::Duration::from_secs(10);
            let received = tokio::time::timeout(time, client.recv_from(&mut answer)).await;
            let (_, from) = received.expect("in time").expect("an answer");
            assert_eq!(from, asked);
            answers.abort();
        }
    }

    #[test]
    fn nothing_else_is_answered() {
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

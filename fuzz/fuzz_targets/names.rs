//! Any bytes as a DNS query: every response can be decoded, answers that query, and fits the
//! buffer.
use hickory_proto::op::{Message, MessageType};
use seikan_mesh::names::zone::{Reply, Transport, Zone};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, Device, Member};

/// One input.
pub fn run(bytes: &[u8]) {
    let networks = ["100.80.0.1/12", "fd00:0:0:7::1/64"];
    let mut zone = Zone::new(networks.map(|net| net.parse().expect(net)).to_vec());
    zone.set_own("host".parse().ok());
    zone.take(&[Change::Set(Member {
        name: "b".parse().expect("a name"),
        public_key: PublicKey::from_bytes([1; 32]),
        addresses: vec![[100, 80, 0, 2].into(), [0xfd00, 0, 0, 7, 0, 0, 0, 2].into()],
        endpoints: Vec::new(),
        relayed: Vec::new(),
        tags: Vec::new(),
        devices: vec![Device {
            name: "plc".parse().expect("a name"),
            addresses: vec![[100, 80, 0, 3].into()],
            tags: Vec::new(),
        }],
    })]);
    for (transport, room) in [
        (Transport::Udp, 1232),
        (Transport::Tcp, usize::from(u16::MAX)),
    ] {
        for recursive in [false, true] {
            match zone.reply(bytes, transport, recursive) {
                Reply::Answer(answer) => {
                    assert!(answer.len() <= room);
                    assert_eq!(answer[..2], bytes[..2]);
                    let message = Message::from_vec(&answer).expect("its own answer");
                    assert_eq!(message.message_type, MessageType::Response);
                    // A response never contains names outside of the zone.
                    for record in message.answers {
                        let name = record.name.to_lowercase().to_string();
                        assert!(
                            name.ends_with("seikan.") || name.ends_with(".arpa."),
                            "{name}"
                        );
                    }
                }
                Reply::Forward => assert!(recursive),
                Reply::Silence => {}
            }
        }
    }
}

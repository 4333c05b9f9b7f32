//! The test vectors of docs/internals/protocol.md, created by another implementation
//! (`scripts/protocol_vectors.py`), against this one in both roles.
//!
//! Order: parts of a handshake, handshakes, records and batches received, records sent, paths and
//! health; then the setup of both ends.

use seikan_observe::DropReason;
use seikan_proto::batch::PacketBatch;
use seikan_proto::capabilities::{Capabilities, Cipher};
use seikan_proto::constants::MAX_HANDSHAKE_LEN;
use seikan_proto::cookie::{Admission, CookieChecker, CookieJar};
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{Identity, PresharedKey, PrivateKey, PublicKey};
use seikan_proto::mode::Mode;
use seikan_proto::native::health::{Receiver, Report};
use seikan_proto::native::path_mtu::PathMtu;
use seikan_proto::native::probe_request::ProbeRequest;
use seikan_proto::native::reassembly::Record;
use seikan_proto::native::record::{Envelope, Outgoing, RecordWriter};
use seikan_proto::native::repair::{gf256, parity};
use seikan_proto::native::stamp::Stamp;
use seikan_proto::noise::{Established, Initiation, Initiator, Protocol, consume_initiation};
use seikan_proto::outbox::{Destination, Outbox};
use seikan_proto::replay::ReplayWindow;
use seikan_proto::rng::Rng;
use seikan_proto::segment::SuperPacket;
use seikan_proto::session::Session;
use seikan_proto::tai64n::Tai64n;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::ethernet::Mac;
use seikan_wire::message::{RECORD_HEADER_LEN, RecordHeader};
use seikan_wire::{VNET_HDR_LEN, ip};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;
use std::time::Duration;

static VECTORS: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!(
        "../../../docs/internals/protocol-vectors.json"
    ))
    .expect("JSON")
});

#[test]
fn capabilities_are_understood() {
    for v in list(&VECTORS["capabilities"]) {
        let parsed = Capabilities::parse(&bytes(&v["payload"])).ok();
        let expected = v["parsed"].as_object().map(|p| Capabilities {
            version: number(&p["version"]) as u8,
            ciphers: ciphers(&p["ciphers"]),
            max_lanes: number(&p["max_lanes"]) as u8,
            inner_mtu: number(&p["inner_mtu"]) as u16,
            features: number(&p["features"]),
            mode: mode(&v["parsed"]),
        });
        assert_eq!(parsed, expected, "{}", v["name"]);
    }
}

#[test]
fn the_cipher_is_chosen() {
    for v in list(&VECTORS["cipher_choices"]) {
        let with = |list: &Value| Capabilities {
            version: 1,
            ciphers: ciphers(list),
            max_lanes: 1,
            inner_mtu: 1420,
            features: 0,
            mode: Mode::Ip,
        };
        let chosen = with(&v["own"]).choose(&with(&v["offer"])).ok();
        let chosen = chosen.map(|(_, agreed)| agreed.cipher as u64);
        assert_eq!(chosen, v["chosen"].as_u64(), "{v}");
    }
}

#[test]
fn stamps_are_tai64n() {
    for v in list(&VECTORS["stamps"]) {
        assert_eq!(
            Tai64n::from_unix(wall(v)).as_bytes()[..],
            bytes(&v["stamp"])
        );
    }
}

#[test]
fn cookies_are_issued_and_used() {
    let responder = identity("responder");
    for v in list(&VECTORS["cookies"]) {
        let address: IpAddr = text(&v["address"]).parse().unwrap();
        let source = SocketAddr::new(address, number(&v["port"]) as u16);
        let now = Instant::from_nanos(1 << 40);
        let mut rng = Scripted([bytes(&v["secret"]), bytes(&v["nonce"])].concat());
        let mut checker = CookieChecker::new(Protocol::Native, &responder);
        let first = bytes(&v["initiation"]);
        let admission = checker.admit(&first, source, || true, now, &mut rng);
        assert_eq!(admission, Admission::NeedsCookie);
        let reply = checker
            .create_reply(&first, source, now, &mut rng)
            .expect("long enough");
        assert_eq!(hex(&reply), text(&v["reply"]));

        let mut jar = CookieJar::new(Protocol::Native, responder.public());
        jar.stamp(&mut first.clone(), now);
        jar.consume_reply(&reply, now).expect("a good reply");
        let mut second = [0; MAX_HANDSHAKE_LEN];
        let (_, length) = Initiation {
            protocol: Protocol::Native,
            identity: &identity("initiator"),
            remote: responder.public(),
            psk: &PresharedKey::default(),
            sender_index: index("initiator") + 1,
            timestamp: Tai64n::from_unix(Duration::from_secs(number(&v["unix_seconds"]))),
            payload: &[],
        }
        .write(&mut Scripted(bytes(&v["ephemeral"])), &mut second)
        .unwrap();
        jar.stamp(&mut second[..length], now);
        assert_eq!(hex(&second[..length]), text(&v["initiation_with_mac2"]));
        let admission = checker.admit(&second[..length], source, || true, now, &mut rng);
        assert_eq!(admission, Admission::Process);
    }
}

#[test]
fn the_initiator_makes_the_handshake() {
    for v in list(&VECTORS["handshakes"]) {
        let (mut initiator, message) = initiation(v);
        assert_eq!(hex(&message), text(&v["initiation"]));
        let keys = initiator
            .consume_response(&bytes(&v["response"]))
            .expect("the response is good");
        assert_eq!(hex(&*keys.send), text(&v["key_initiator"]));
        assert_eq!(hex(&*keys.receive), text(&v["key_responder"]));
        assert_eq!(hex(&keys.handshake_hash), text(&v["handshake_hash"]));
        assert_eq!(hex(&keys.payload), text(&v["choice"]));
        assert_eq!(keys.remote_index, index("responder"));
    }
}

#[test]
fn the_responder_makes_the_handshake() {
    for v in list(&VECTORS["handshakes"]) {
        let (keys, message) = response(v);
        assert_eq!(hex(&message), text(&v["response"]));
        assert_eq!(hex(&*keys.send), text(&v["key_responder"]));
        assert_eq!(hex(&*keys.receive), text(&v["key_initiator"]));
        assert_eq!(hex(&keys.handshake_hash), text(&v["handshake_hash"]));
        assert_eq!(hex(&keys.payload), text(&v["offer"]));
        assert_eq!(keys.remote_index, index("initiator"));
    }
}

#[test]
fn a_tunnel_initiates_and_takes_the_answer() {
    let v = &VECTORS["handshakes"][0];
    let mut end = End::new("initiator", v);
    let read = bytes(&VECTORS["batches"][0]["reads"][0]);
    assert_eq!(end.send(&read), [bytes(&v["initiation"])]);
    end.receive(&[&bytes(&v["response"])], 0);
    end.poll();
    let (writes, _) = end.receive(&[&bytes(&v["responder_datagram"])], 0);
    assert_eq!(writes, hex_list(&VECTORS["responder_record"]["writes"]));
}

#[test]
fn a_tunnel_answers() {
    for v in list(&VECTORS["handshakes"]) {
        let mut end = End::new("responder", v);
        let (_, answers) = end.receive(&[&bytes(&v["initiation"])], 0);
        assert_eq!(answers, [bytes(&v["response"])], "{}", v["name"]);
    }
}

#[test]
fn bad_initiations_are_dropped_in_silence() {
    for v in list(&VECTORS["rejected_handshakes"]) {
        let mut end = End::established(&VECTORS["handshakes"][0]);
        end.pass(Duration::from_secs(1));
        let before = end.drops();
        let (_, answers) = end.receive(&[&bytes(&v["message"])], 0);
        assert_eq!(new_drops(&before, &end.drops()), reason(v), "{}", v["name"]);
        assert!(answers.is_empty(), "{}", v["name"]);
    }
}

#[test]
fn bad_responses_make_no_session() {
    for v in list(&VECTORS["rejected_responses"]) {
        let good = &VECTORS["handshakes"][0];
        let mut end = End::new("initiator", good);
        end.send(&bytes(&VECTORS["batches"][0]["reads"][0]));
        end.receive(&[&bytes(&v["message"])], 0);
        assert_eq!(end.drops(), reason(v), "{}", v["name"]);
        assert!(end.peer().cipher().is_none(), "{}", v["name"]);
    }
}

/// The handshakes in IP mode and in Ethernet mode, each with the vectors that hold the records and
/// batches of its datagrams.
fn sessions() -> impl Iterator<Item = (&'static Value, &'static Value)> {
    let all: &'static Value = &VECTORS;
    let ip = list(&all["handshakes"]).iter().map(move |v| (v, all));
    let ethernet = &all["ethernet"];
    ip.chain([(&ethernet["handshake"], ethernet)])
}

#[test]
fn records_are_received() {
    for (v, vectors) in sessions() {
        let mut end = End::established(v);
        let (mut initiator, _) = initiation(v);
        let keys = initiator.consume_response(&bytes(&v["response"])).unwrap();
        let mut back = Session::new(&keys, cipher(v), true, Instant::BOOT);
        let datagrams = list(&v["record_datagrams"]);
        for (record, datagram) in list(&vectors["records"]).iter().zip(datagrams) {
            let name = &record["name"];
            let before = end.drops();
            let outer = number(&record["outer_ecn"]) as u8;
            let (writes, answers) = end.receive(&[&bytes(datagram)], outer);
            assert_eq!(writes, hex_list(&record["writes"]), "{name}");
            let expected: BTreeMap<String, u64> =
                serde_json::from_value(record["drops"].clone()).unwrap();
            assert_eq!(new_drops(&before, &end.drops()), expected, "{name}");
            if record["report"].is_object() {
                assert_eq!(
                    end.peer().path.report,
                    Some(report(&record["report"])),
                    "{name}"
                );
            }
            // Of the far end's datagrams only the answer to a probe matters.
            let expected: Vec<&str> = record["answer"].as_str().into_iter().collect();
            let frames: Vec<String> = answers
                .iter()
                .map(|answer| hex(&open(&mut back, answer)[3..]))
                .collect();
            assert_eq!(frames, expected, "{name}");
        }
        for rejected in list(&v["rejected_datagrams"]) {
            let before = end.drops();
            let (writes, _) = end.receive(&[&bytes(&rejected["datagram"])], 0);
            assert!(writes.is_empty());
            assert_eq!(
                new_drops(&before, &end.drops()),
                reason(rejected),
                "{rejected}"
            );
        }
    }
}

#[test]
fn super_packets_come_out_as_far_as_they_arrive() {
    for (v, vectors) in sessions() {
        let datagrams = list(&v["batch_datagrams"]);
        for (batch, datagrams) in list(&vectors["batches"]).iter().zip(datagrams) {
            let datagrams: Vec<Vec<u8>> = list(datagrams).iter().map(bytes).collect();
            for outcome in list(&batch["outcomes"]) {
                let mut end = End::established(v);
                let received = list(&outcome["received"]).iter();
                let received: Vec<&[u8]> = received
                    .map(|i| &datagrams[number(i) as usize][..])
                    .collect();
                let (writes, _) = end.receive(&received, 0);
                let expected = hex_list(&outcome["writes"]);
                assert_eq!(
                    writes, expected,
                    "{} {}",
                    batch["name"], outcome["received"]
                );
            }
        }
    }
}

#[test]
fn records_are_sealed() {
    for v in list(&VECTORS["handshakes"]) {
        let mut session = sending_session(v);
        let datagrams = list(&v["record_datagrams"]);
        for (record, datagram) in list(&VECTORS["records"]).iter().zip(datagrams) {
            let plaintext = bytes(&record["plaintext"]);
            let mut buffer = [&[0; RECORD_HEADER_LEN][..], &plaintext, &[0; 16]].concat();
            session.seal(Protocol::Native, &mut buffer);
            assert_eq!(hex(&buffer), text(datagram), "{}", record["name"]);
        }
    }
}

#[test]
fn reads_are_packed() {
    for (v, vectors) in sessions() {
        let datagrams = list(&v["batch_datagrams"]);
        for (batch, datagrams) in list(&vectors["batches"]).iter().zip(datagrams) {
            let mut outgoing = Outgoing::from_id(number(&batch["first_id"]) as u16);
            let (size, time) = (number(&batch["size"]), number(&batch["time"]));
            let sent = with_writer(v, size, time, &mut outgoing, |writer| {
                for read in list(&batch["reads"]) {
                    let read = bytes(read);
                    let packet = &read[VNET_HDR_LEN..];
                    let Some(ip_at) = mode(v).ip_at(packet).expect("a good read") else {
                        writer.set_traffic_class(0).unwrap();
                        writer.frame(packet).unwrap();
                        continue;
                    };
                    let packet = SuperPacket::parse_at(&read, ip_at).expect("a good read");
                    let class = ip::ecn(&packet.bytes[ip_at..]);
                    writer.set_traffic_class(class).unwrap();
                    writer.super_packet(&packet).unwrap();
                }
            });
            let expected: Vec<(u8, Vec<u8>)> = list(&batch["records"])
                .iter()
                .zip(list(datagrams))
                .map(|(record, d)| (number(&record["outer_ecn"]) as u8, bytes(d)))
                .collect();
            assert_eq!(sent, expected, "{}", batch["name"]);
        }
    }
}

#[test]
fn control_frames_are_written() {
    let v = &VECTORS["handshakes"][0];
    for record in list(&VECTORS["records"]) {
        let plaintext = bytes(&record["plaintext"]);
        let write: Box<dyn Fn(&mut RecordWriter<'_>)> = match text(&record["name"]) {
            "keepalive" => Box::new(|w| w.keepalive().unwrap()),
            "health" => Box::new(|w| w.health(&report(&record["report"])).unwrap()),
            "probe of 1472 bytes" => Box::new(|w| w.probe(0x0102, 1472).unwrap()),
            "probe acknowledgement of a probe that was not sent" => {
                Box::new(|w| w.probe_ack(9, 1472).unwrap())
            }
            "ports of a symmetric NAT" => Box::new(|w| {
                let addresses = ["198.51.100.7", "2001:db8::7"];
                let request = ProbeRequest {
                    ports: 256,
                    addresses: addresses.map(|a| a.parse().unwrap()).to_vec(),
                };
                w.ports(&request).unwrap();
            }),
            _ => continue,
        };
        let time = u64::from(u16::from_le_bytes([plaintext[1], plaintext[2]]));
        let sent = with_writer(v, 1232, time, &mut Outgoing::default(), write);
        let (keys, _) = response(v);
        let mut receiver = Session::new(&keys, cipher(v), false, Instant::BOOT);
        let opened: Vec<String> = sent
            .iter()
            .map(|(_, d)| hex(&open(&mut receiver, d)))
            .collect();
        assert_eq!(
            opened,
            [text(&record["plaintext"])],
            "{}",
            text(&record["name"])
        );
    }
}

#[test]
fn the_path_is_searched() {
    for v in list(&VECTORS["path_mtu"]) {
        let limit = number(&v["limit"]) as usize;
        let mut path = PathMtu::new(v["v6"].as_bool().unwrap());
        let mut probes = Vec::new();
        // 60 seconds are enough for three probes of every size and too few for the raise timer.
        for ms in 0..60_000 {
            let Some((id, size)) = path.poll(Instant::from_nanos(ms * 1_000_000)) else {
                continue;
            };
            // Neither repetitions nor confirmations.
            if probes.last() != Some(&(size as u64)) && size > path.size() {
                probes.push(size as u64);
            }
            if size <= limit {
                path.acknowledged(id, size as u16, Instant::from_nanos(ms * 1_000_000));
            }
        }
        let expected: Vec<u64> = list(&v["probes"]).iter().map(number).collect();
        assert_eq!(
            (probes, path.size() as u64),
            (expected, number(&v["found"])),
            "{v}"
        );
    }
}

#[test]
fn health_is_reported() {
    let v = &VECTORS["health"];
    let mut receiver = Receiver::default();
    for arrival in list(&v["arrivals"]) {
        let [counter, byte_0, time, ms, ce] = [0, 1, 2, 3, 4].map(|i| number(&arrival[i]));
        let record = Record {
            session: 1,
            counter,
            ecn: if ce == 1 { ip::ECN_CE } else { 0 },
        };
        let [t0, t1] = (time as u16).to_le_bytes();
        let stamp = Stamp::read(&[byte_0 as u8, t0, t1]).expect("a whole stamp");
        let now = Instant::from_nanos(ms * 1_000_000);
        let from = SocketAddr::from(([192, 0, 2, 1], 7));
        receiver.datagram(&record, stamp, (1, from), now);
        receiver.packets(now);
    }
    let made = receiver
        .due(Instant::from_nanos(10_000_000_000))
        .expect("a second is over");
    let expected = report(&v["report"]);
    // The arithmetic of the mean is not specified to the microsecond.
    assert!(made.queueing_delay.abs_diff(expected.queueing_delay) <= 2);
    let queueing_delay = expected.queueing_delay;
    assert_eq!(
        Report {
            queueing_delay,
            ..made
        },
        expected
    );
}

#[test]
fn counters_are_recovered_from_their_low_half() {
    for v in list(&VECTORS["counters"]) {
        let mut window = ReplayWindow::new();
        if let Some(greatest) = v["greatest"].as_u64() {
            window.update(greatest).expect("the first");
        }
        let counter = window.whole_counter(number(&v["low"]) as u32);
        assert_eq!(counter, number(&v["counter"]), "{v}");
    }
}

#[test]
fn parity_restores_lost_records() {
    for v in list(&VECTORS["parity"]) {
        let records: Vec<Vec<u8>> = list(&v["records"]).iter().map(bytes).collect();
        let of = |v: &Value| list(v).iter().map(|n| number(n) as u8).collect::<Vec<u8>>();
        let (numbers, lost) = (of(&v["numbers"]), of(&v["lost"]));
        let symbols: Vec<Vec<u8>> = list(&v["symbols"]).iter().map(bytes).collect();
        let mut made = vec![Vec::new(); numbers.len()];
        for (index, frames) in records.iter().enumerate() {
            parity::add_symbol(&mut made, &numbers, index as u8, frames);
        }
        assert_eq!(made, symbols);
        let (mut rows, numbers) = (symbols[..lost.len()].to_vec(), &numbers[..lost.len()]);
        for (index, frames) in records.iter().enumerate() {
            if !lost.contains(&(index as u8)) {
                parity::add_symbol(&mut rows, numbers, index as u8, frames);
            }
        }
        gf256::solve(&mut rows, numbers, &lost);
        for (row, index) in rows.iter().zip(lost) {
            let frames = &records[usize::from(index)];
            assert_eq!(parity::frames_of(row), Some(&frames[..]), "record {index}");
        }
    }
}

/// One end as a whole tunnel, with the other end as its only peer.
struct End {
    tunnel: Tunnel,
    peer: PeerId,
    now: Now,
    far: SocketAddr,
    outbox: Outbox,
    inbox: Inbox,
}

impl End {
    /// The end `role` of the handshake `v`, with the index and ephemeral key of that handshake.
    fn new(role: &str, v: &Value) -> End {
        let other = if role == "initiator" {
            "responder"
        } else {
            "initiator"
        };
        let drawn = [
            &index(role).to_le_bytes()[..],
            &bytes(&VECTORS[role]["ephemeral"]),
        ];
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol: Protocol::Native,
            mode: mode(v),
            private_key: PrivateKey::from_bytes(key(&VECTORS[role]["private"])),
            inner_mtu: 1420,
            offload: true,
            ciphers: ciphers(&VECTORS["responder"]["ciphers"]),
            copy_dscp: false,
            repair: None,
            rng: Box::new(Scripted(drawn.concat())),
        });
        let public = PublicKey::from_bytes(key(&VECTORS[other]["public"]));
        let peer = tunnel.add_peer(public).expect("another key");
        tunnel.set_preshared_key(peer, PresharedKey::from_bytes(key(&v["psk"])));
        for address in list(&VECTORS["inner"][other]) {
            let address: IpAddr = text(address).parse().unwrap();
            tunnel.add_allowed_ip(peer, address.into());
        }
        if mode(v) == Mode::Ethernet {
            let mac = bytes(&VECTORS["ethernet"]["mac"][role]);
            tunnel.set_own_mac(Mac(mac.try_into().unwrap()));
        }
        let far = SocketAddr::from(([192, 0, 2, 1], 51820));
        tunnel.set_endpoint(peer, far);
        End {
            tunnel,
            peer,
            now: Now {
                mono: Instant::from_nanos(1 << 42),
                wall: wall(v),
            },
            far,
            outbox: Outbox::new(4 << 20),
            inbox: Inbox::new(true, true),
        }
    }

    /// The responder, after answering the initiation of `v`.
    fn established(v: &Value) -> End {
        let mut end = End::new("responder", v);
        end.receive(&[&bytes(&v["initiation"])], 0);
        end
    }

    fn peer(&self) -> &seikan_proto::peer::Peer {
        self.tunnel.peer(self.peer).unwrap()
    }

    fn pass(&mut self, time: Duration) {
        self.now.mono += time;
        self.now.wall += time;
    }

    /// Processes a read of the TUN device. Returns the datagrams sent.
    fn send(&mut self, read: &[u8]) -> Vec<Vec<u8>> {
        let mut batch = PacketBatch::new(1 << 20, 16);
        batch.space().unwrap()[..read.len()].copy_from_slice(read);
        batch.commit(read.len());
        self.tunnel
            .outbound(self.now, &mut batch, &mut self.outbox, &mut self.inbox);
        self.sent()
    }

    fn poll(&mut self) -> Vec<Vec<u8>> {
        self.tunnel
            .poll(self.now, &mut self.outbox, &mut self.inbox);
        self.sent()
    }

    /// Processes datagrams that arrived in one batch. Returns its writes in hexadecimal, and the
    /// datagrams sent.
    fn receive(&mut self, datagrams: &[&[u8]], outer: u8) -> (Vec<String>, Vec<Vec<u8>>) {
        let mut arena = datagrams.concat();
        let mut at = 0;
        let batch: Vec<Datagram> = datagrams
            .iter()
            .map(|datagram| {
                at += datagram.len();
                Datagram {
                    source: self.far,
                    destination: None,
                    traffic_class: outer,
                    range: at - datagram.len()..at,
                    segment_size: datagram.len(),
                    truncated: false,
                }
            })
            .collect();
        self.tunnel.inbound(
            self.now,
            batch.into_iter(),
            &mut arena,
            &mut self.inbox,
            &mut self.outbox,
        );
        let mut writes = Vec::new();
        for write in self.inbox.writes() {
            let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
            let n = write.parts(&arena, &mut parts);
            writes.push(parts[..n].iter().map(|part| hex(part)).collect());
        }
        self.inbox.clear();
        (writes, self.sent())
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        let sent = datagrams(&self.outbox)
            .into_iter()
            .map(|(_, d)| d)
            .collect();
        self.outbox.clear();
        sent
    }

    fn drops(&self) -> BTreeMap<String, u64> {
        let totals = self.tunnel.totals();
        let counts = totals.inbound.drops.nonzero();
        counts
            .map(|(reason, n)| (reason.name().to_owned(), n))
            .collect()
    }
}

/// Changes of the counters since `before`.
fn new_drops(
    before: &BTreeMap<String, u64>,
    after: &BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let new = after
        .iter()
        .map(|(name, n)| (name.clone(), n - before.get(name).unwrap_or(&0)));
    new.filter(|(_, n)| *n > 0).collect()
}

/// One drop for the reason of the vector, which must exist.
fn reason(v: &Value) -> BTreeMap<String, u64> {
    let name = text(&v["reason"]);
    assert!(DropReason::ALL.iter().any(|reason| reason.name() == name));
    BTreeMap::from([(name.to_owned(), 1)])
}

/// The mode of a handshake or of parsed capabilities.
fn mode(v: &Value) -> Mode {
    match v["mode"].as_str() {
        Some("ethernet") => Mode::Ethernet,
        _ => Mode::Ip,
    }
}

fn initiation(v: &Value) -> (Initiator, Vec<u8>) {
    let mut out = [0; MAX_HANDSHAKE_LEN];
    let (initiator, length) = Initiation {
        protocol: Protocol::Native,
        identity: &identity("initiator"),
        remote: identity("responder").public(),
        psk: &PresharedKey::from_bytes(key(&v["psk"])),
        sender_index: index("initiator"),
        timestamp: Tai64n::from_unix(wall(v)),
        payload: &bytes(&v["offer"]),
    }
    .write(
        &mut Scripted(bytes(&VECTORS["initiator"]["ephemeral"])),
        &mut out,
    )
    .expect("good keys");
    (initiator, out[..length].to_vec())
}

fn response(v: &Value) -> (Established, Vec<u8>) {
    let message = bytes(&v["initiation"]);
    let received = consume_initiation(Protocol::Native, &identity("responder"), &message)
        .expect("the initiation is good");
    assert_eq!(
        received.remote.as_bytes()[..],
        bytes(&VECTORS["initiator"]["public"])
    );
    assert_eq!(received.timestamp.as_bytes()[..], bytes(&v["timestamp"]));
    let mut out = [0; MAX_HANDSHAKE_LEN];
    let (keys, length) = received
        .create_response(
            &PresharedKey::from_bytes(key(&v["psk"])),
            index("responder"),
            &bytes(&v["choice"]),
            &mut Scripted(bytes(&VECTORS["responder"]["ephemeral"])),
            &mut out,
        )
        .expect("good keys");
    (keys, out[..length].to_vec())
}

/// The initiator's new session.
fn sending_session(v: &Value) -> Session {
    let (mut initiator, _) = initiation(v);
    let keys = initiator.consume_response(&bytes(&v["response"])).unwrap();
    Session::new(&keys, cipher(v), true, Instant::BOOT)
}

/// Datagrams of the initiator, with their outer traffic class, if `write` fills its records.
fn with_writer(
    v: &Value,
    size: u64,
    time: u64,
    outgoing: &mut Outgoing,
    write: impl FnOnce(&mut RecordWriter<'_>),
) -> Vec<(u8, Vec<u8>)> {
    let mut outbox = Outbox::new(1 << 20);
    let mut session = sending_session(v);
    let envelope = Envelope {
        destination: Destination {
            address: SocketAddr::from(([192, 0, 2, 2], 51820)),
            source: None,
            traffic_class: 0,
            hop_limit: None,
        },
        peer: PeerId(0),
        size: size as usize,
        stamp: time as u16,
        now: Instant::BOOT,
        offload: true,
        gso: true,
    };
    let mut writer = RecordWriter::new(&mut outbox, &mut session, outgoing, envelope);
    write(&mut writer);
    writer.finish().expect("there is room");
    datagrams(&outbox)
}

fn datagrams(outbox: &Outbox) -> Vec<(u8, Vec<u8>)> {
    let runs = outbox.runs().iter();
    runs.flat_map(|run| {
        let class = run.destination.traffic_class;
        let parts = outbox.bytes(run).chunks(run.segment_size);
        parts.map(move |datagram| (class, datagram.to_vec()))
    })
    .collect()
}

fn open(session: &mut Session, datagram: &[u8]) -> Vec<u8> {
    let mut buffer = datagram.to_vec();
    let header = RecordHeader::read(&buffer).expect("a header");
    let counter = session.whole_counter(header.counter);
    let sealed = &mut buffer[RECORD_HEADER_LEN..];
    let length = session.open(counter, sealed).expect("it authenticates");
    sealed[..length].to_vec()
}

fn report(v: &Value) -> Report {
    let field = |name: &str| number(&v[name]) as u32;
    Report {
        received: field("received"),
        lost: field("lost"),
        lost_first: field("lost_first"),
        reordering: field("reordering") as u16,
        congestion_marks: field("congestion_marks"),
        queueing_delay: field("queueing_delay"),
        received_later: field("received_later"),
        ..Report::default()
    }
}

fn identity(role: &str) -> Identity {
    Identity::new(PrivateKey::from_bytes(key(&VECTORS[role]["private"])))
}

fn index(role: &str) -> u32 {
    number(&VECTORS[role]["index"]) as u32
}

fn wall(v: &Value) -> Duration {
    Duration::new(number(&v["unix_seconds"]), number(&v["unix_nanos"]) as u32)
}

fn cipher(v: &Value) -> Cipher {
    match number(&v["cipher"]) {
        1 => Cipher::Aes256Gcm,
        _ => Cipher::ChaCha20Poly1305,
    }
}

fn ciphers(v: &Value) -> Vec<Cipher> {
    let of = |code: &Value| match number(code) {
        1 => Cipher::Aes256Gcm,
        _ => Cipher::ChaCha20Poly1305,
    };
    list(v).iter().map(of).collect()
}

fn list(v: &Value) -> &[Value] {
    v.as_array().expect("a list")
}

fn number(v: &Value) -> u64 {
    v.as_u64().expect("a number")
}

fn text(v: &Value) -> &str {
    v.as_str().expect("a string")
}

fn bytes(v: &Value) -> Vec<u8> {
    let text = text(v);
    let digits = (0..text.len()).step_by(2);
    digits
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hexadecimal"))
        .collect()
}

fn key(v: &Value) -> [u8; 32] {
    bytes(v).try_into().expect("32 bytes")
}

fn hex_list(v: &Value) -> Vec<&str> {
    list(v).iter().map(text).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns given bytes, in order, then zeros (for jitter).
struct Scripted(Vec<u8>);

impl Rng for Scripted {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(0);
        let n = destination.len().min(self.0.len());
        destination[..n].copy_from_slice(&self.0[..n]);
        self.0.drain(..n);
    }
}

use super::*;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Access, Party};

const A: u16 = 1;
const NS: u16 = 2;
const SOA_TYPE: u16 = 6;
const PTR_TYPE: u16 = 12;
const AAAA_TYPE: u16 = 28;
const ANY: u16 = 255;

fn member(key: u8, name: &str, addresses: &[&str]) -> Member {
    Member {
        name: name.parse().expect("a name"),
        public_key: PublicKey::from_bytes([key; 32]),
        addresses: addresses.iter().map(|a| a.parse().expect(a)).collect(),
        endpoints: Vec::new(),
        relayed: Vec::new(),
        tags: Vec::new(),
        devices: Vec::new(),
    }
}

fn set(key: u8, name: &str, addresses: &[&str]) -> Change {
    Change::Set(member(key, name, addresses))
}

fn zone() -> Zone {
    let networks = ["100.80.0.1/12", "fd00:0:0:7::1/64"];
    let mut zone = Zone::new(networks.map(|net| net.parse().expect(net)).to_vec());
    zone.set_own(Some("host".parse().expect("a name")));
    zone.take(&[
        set(1, "b", &["100.80.0.2", "fd00:0:0:7::2"]),
        set(2, "old", &["100.80.0.3"]),
    ]);
    zone
}

/// RFC 1035, section 4.1: number 0x1234, recursion desired, one question of class IN.
fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.push(0);
    message.extend(kind.to_be_bytes());
    message.extend([0, 1]);
    message
}

/// With an OPT record (RFC 6891, section 6.1.2) of this version, taking this many bytes.
fn with_edns(mut message: Vec<u8>, version: u8, room: u16) -> Vec<u8> {
    message[11] += 1;
    message.extend([0, 0, 41]);
    message.extend(room.to_be_bytes());
    // DO (RFC 3225).
    message.extend([0, version, 0x80, 0, 0, 0]);
    message
}

fn bytes(reply: Reply) -> Vec<u8> {
    match reply {
        Reply::Answer(bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

fn ask(zone: &Zone, message: &[u8]) -> Message {
    let answer = bytes(zone.reply(message, Transport::Udp, false));
    Message::from_vec(&answer).expect("a message")
}

/// The code, what was found, and how many records of authority there are.
fn found(zone: &Zone, name: &str, kind: u16) -> (ResponseCode, Vec<String>, usize) {
    let answer = ask(zone, &query(name, kind));
    assert!(answer.authoritative && !answer.truncation, "{name}");
    let shown = answer.answers.iter().map(|record| record.data.to_string());
    (
        answer.response_code,
        shown.collect(),
        answer.authorities.len(),
    )
}

#[test]
fn an_answer_is_as_rfc_1035_has_it() {
    let query = query("b.seikan", A);
    let answer = bytes(zone().reply(&query, Transport::Udp, false));
    let mut expected = query.clone();
    // QR, AA and RD; one answer.
    expected[2] = 0b1000_0101;
    expected[7] = 1;
    // The question's name, A, IN, 10 s, four bytes.
    expected.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 10, 0, 4, 100, 80, 0, 2]);
    assert_eq!(answer, expected);
    // With somebody to forward to, recursion is available.
    expected[3] = 0x80;
    let answer = bytes(zone().reply(&query, Transport::Tcp, true));
    assert_eq!(answer, expected);
}

#[test]
fn members_and_this_host_are_found_in_any_case() {
    let zone = zone();
    let one = |text: &str| (ResponseCode::NoError, vec![text.to_owned()], 0);
    assert_eq!(found(&zone, "b.seikan", A), one("100.80.0.2"));
    assert_eq!(found(&zone, "B.SeiKan", A), one("100.80.0.2"));
    assert_eq!(found(&zone, "b.seikan.", AAAA_TYPE), one("fd00:0:0:7::2"));
    assert_eq!(found(&zone, "Host.seikan", A), one("100.80.0.1"));
    let (_, both, _) = found(&zone, "b.seikan", ANY);
    assert_eq!(both, ["100.80.0.2", "fd00:0:0:7::2"]);
    let name = ask(&zone, &query("B.SeiKan", A)).answers[0]
        .name
        .to_string();
    assert_eq!(name, "B.SeiKan.");
}

/// A device with one address.
fn device(name: &str, address: &str) -> Device {
    Device {
        name: name.parse().expect("a name"),
        addresses: vec![address.parse().expect("an address")],
        tags: Vec::new(),
    }
}

#[test]
fn a_device_is_found_below_its_gateway() {
    let mut zone = zone();
    let gateway = |device: Device| {
        let mut member = member(1, "b", &["100.80.0.2"]);
        member.devices = vec![device];
        Change::Set(member)
    };
    let own = Access {
        own: Some(Party {
            name: "host".parse().expect("a name"),
            tags: Vec::new(),
            gateway: None,
        }),
        devices: vec![device("camera", "100.80.0.7")],
        ..Access::default()
    };
    zone.take(&[Change::Access(own), gateway(device("plc", "100.80.0.8"))]);
    let one = |text: &str| (ResponseCode::NoError, vec![text.to_owned()], 0);
    assert_eq!(found(&zone, "PLC.b.seikan", A), one("100.80.0.8"));
    assert_eq!(found(&zone, "b.seikan", A), one("100.80.0.2"));
    assert_eq!(found(&zone, "camera.host.seikan", A), one("100.80.0.7"));
    let at = |name: &str| found(&zone, name, PTR_TYPE);
    assert_eq!(at("8.0.80.100.in-addr.arpa"), one("plc.b.seikan."));
    assert_eq!(at("7.0.80.100.in-addr.arpa"), one("camera.host.seikan."));
    for nobody in [
        "plc.seikan",
        "plc.old.seikan",
        "plc.host.seikan",
        "x.plc.b.seikan",
    ] {
        let (code, ..) = found(&zone, nobody, A);
        assert_eq!(code, ResponseCode::NXDomain, "{nobody}");
    }
    // No data of the other family, rather than no such name.
    assert_eq!(
        found(&zone, "plc.b.seikan", AAAA_TYPE).0,
        ResponseCode::NoError
    );
    // A coordinator is believed about addresses of the mesh alone, and the name ends with the device.
    zone.take(&[gateway(device("plc", "192.0.2.1"))]);
    assert!(found(&zone, "plc.b.seikan", A).1.is_empty());
    zone.take(&[Change::Removed(PublicKey::from_bytes([1; 32]))]);
    assert_eq!(found(&zone, "plc.b.seikan", A).0, ResponseCode::NXDomain);
    let (code, ..) = found(&zone, "8.0.80.100.in-addr.arpa", PTR_TYPE);
    assert_eq!(code, ResponseCode::NXDomain);
}

#[test]
fn addresses_have_their_members_names() {
    let zone = zone();
    let one = |text: &str| (ResponseCode::NoError, vec![text.to_owned()], 0);
    let at = |name: &str| found(&zone, name, PTR_TYPE);
    assert_eq!(at("2.0.80.100.in-addr.arpa"), one("b.seikan."));
    assert_eq!(at("1.0.80.100.IN-ADDR.ARPA"), one("host.seikan."));
    // fd00:0:0:7::2, RFC 3596, section 2.5.
    let six = "2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.7.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa";
    assert_eq!(at(six), one("b.seikan."));
    assert_eq!(at("9.0.80.100.in-addr.arpa").0, ResponseCode::NXDomain);
    let other = ask(&zone, &query("2.2.0.192.in-addr.arpa", PTR_TYPE));
    assert_eq!(other.response_code, ResponseCode::Refused);
}

#[test]
fn other_names_do_not_exist_with_a_ttl_of_a_second() {
    let zone = zone();
    for name in [
        "c.seikan",
        "x.b.seikan",
        "b_.seikan",
        "9.0.80.100.in-addr.arpa",
    ] {
        let answer = ask(&zone, &query(name, A));
        assert_eq!(answer.response_code, ResponseCode::NXDomain, "{name}");
        assert!(answer.authoritative && answer.answers.is_empty(), "{name}");
        // RFC 2308, section 5: the lesser of the two counts.
        let [record] = &answer.authorities[..] else {
            panic!("{name}: {answer:?}");
        };
        let RData::SOA(start) = &record.data else {
            panic!("{name}: {record:?}");
        };
        assert_eq!((record.ttl, start.minimum), (1, 1), "{name}");
        let query = DomainName::from_ascii(format!("{name}.")).expect("a name");
        assert!(record.name.zone_of(&query), "{name} in {}", record.name);
    }
}

#[test]
fn no_name_is_denied_before_the_membership_is_known() {
    let networks = ["100.80.0.1/12"].map(|net| net.parse().expect(net));
    let mut zone = Zone::new(networks.into());
    for (name, kind) in [("b.seikan", A), ("9.0.80.100.in-addr.arpa", PTR_TYPE)] {
        let answer = ask(&zone, &query(name, kind));
        assert_eq!(answer.response_code, ResponseCode::ServFail, "{name}");
    }
    zone.take(&[]);
    let answer = ask(&zone, &query("b.seikan", A));
    assert_eq!(answer.response_code, ResponseCode::NXDomain);
}

#[test]
fn a_name_without_the_requested_type_exists() {
    let zone = zone();
    let nothing = (ResponseCode::NoError, Vec::new(), 1);
    assert_eq!(found(&zone, "old.seikan", AAAA_TYPE), nothing);
    assert_eq!(found(&zone, "b.seikan", NS), nothing);
    assert_eq!(found(&zone, "seikan", A), nothing);
    assert_eq!(found(&zone, "2.0.80.100.in-addr.arpa", A), nothing);
    // There are names under it.
    assert_eq!(found(&zone, "80.100.in-addr.arpa", PTR_TYPE), nothing);
    let (code, start, _) = found(&zone, "seikan", SOA_TYPE);
    assert_eq!((code, start.len()), (ResponseCode::NoError, 1));
}

#[test]
fn changes_take_effect_at_once() {
    let mut zone = zone();
    let serial = |zone: &Zone| match &ask(zone, &query("seikan", SOA_TYPE)).answers[0].data {
        RData::SOA(start) => start.serial,
        other => panic!("{other:?}"),
    };
    let before = serial(&zone);
    // Another has the name of one that goes, in whichever order.
    zone.take(&[
        set(3, "old", &["100.80.0.4"]),
        Change::Removed(PublicKey::from_bytes([2; 32])),
        set(1, "b", &["100.80.0.5"]),
    ]);
    assert_ne!(serial(&zone), before);
    assert_eq!(found(&zone, "old.seikan", A).1, ["100.80.0.4"]);
    assert_eq!(found(&zone, "b.seikan", A).1, ["100.80.0.5"]);
    let gone = found(&zone, "3.0.80.100.in-addr.arpa", PTR_TYPE).0;
    assert_eq!(gone, ResponseCode::NXDomain);
    zone.take(&[Change::Removed(PublicKey::from_bytes([1; 32]))]);
    assert_eq!(found(&zone, "b.seikan", A).0, ResponseCode::NXDomain);
}

#[test]
fn a_coordinator_gives_names_to_addresses_of_the_mesh_alone() {
    let mut zone = zone();
    let outside = ["127.0.0.1", "192.0.2.1", "2001:db8::1", "100.80.0.1"];
    zone.take(&[set(4, "www", &outside), set(5, "host", &["100.80.0.9"])]);
    assert_eq!(found(&zone, "www.seikan", A).1, Vec::<String>::new());
    assert_eq!(
        found(&zone, "www.seikan", AAAA_TYPE).1,
        Vec::<String>::new()
    );
    // This host's own name and address are nobody else's.
    assert_eq!(found(&zone, "host.seikan", A).1, ["100.80.0.1"]);
    assert_eq!(
        found(&zone, "1.0.80.100.in-addr.arpa", PTR_TYPE).1,
        ["host.seikan."]
    );
}

#[test]
fn other_names_are_forwarded_or_refused() {
    let zone = zone();
    for name in [
        "example.org",
        "seikan.example",
        "b.seikan2",
        "",
        "2.2.0.192.in-addr.arpa",
    ] {
        let query = query(name, A);
        assert_eq!(
            zone.reply(&query, Transport::Udp, true),
            Reply::Forward,
            "{name}"
        );
        let refused = ask(&zone, &query);
        assert_eq!(refused.response_code, ResponseCode::Refused, "{name}");
        assert!(!refused.authoritative, "{name}");
    }
}

#[test]
fn edns_is_answered_with_edns() {
    let zone = zone();
    let query = query("b.seikan", A);
    assert!(ask(&zone, &query).edns.is_none());
    let answer = ask(&zone, &with_edns(query.clone(), 0, 4096));
    assert_eq!(answer.answers.len(), 1);
    let edns = answer.edns.expect("EDNS");
    assert_eq!((edns.version(), edns.max_payload()), (0, 1232));
    assert!(edns.flags().dnssec_ok);
    // RFC 6891, section 6.1.3: a version that we do not speak.
    let answer = ask(&zone, &with_edns(query.clone(), 1, 4096));
    assert_eq!(u16::from(answer.response_code), 16);
    assert_eq!(answer.edns.expect("EDNS").version(), 0);
    assert!(answer.answers.is_empty());
    // Section 6.1.1: more than one.
    let answer = ask(&zone, &with_edns(with_edns(query, 0, 512), 0, 512));
    assert_eq!(answer.response_code, ResponseCode::FormErr);
}

#[test]
fn records_that_do_not_fit_set_the_tc_flag() {
    let mut zone = zone();
    let label = "x".repeat(63);
    let many: Vec<String> = (0..100).map(|n| format!("fd00:0:0:7::1:{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    zone.take(&[set(6, &label, &many)]);
    let query = query(&format!("{label}.seikan"), AAAA_TYPE);
    let reply = |query: &[u8], transport| {
        let answer = bytes(zone.reply(query, transport, false));
        let message = Message::from_vec(&answer).expect("a message");
        (answer.len(), message.truncation, message.answers.len())
    };
    let (length, truncated, _) = reply(&query, Transport::Udp);
    assert!(length <= 512 && truncated, "{length}");
    for (theirs, most) in [(1000, 1000), (65000, 1232), (100, 512)] {
        let (length, truncated, _) = reply(&with_edns(query.clone(), 0, theirs), Transport::Udp);
        assert!(length <= most && truncated, "{theirs}: {length}");
    }
    let (_, truncated, records) = reply(&query, Transport::Tcp);
    assert!(!truncated && records == 100, "{records}");
}

#[test]
fn other_messages_get_an_error_code_or_nothing() {
    let zone = zone();
    let code = |message: &[u8]| ask(&zone, message).response_code;
    let query = query("b.seikan", A);
    // Two questions, and none (RFC 9619).
    for count in [0, 2] {
        let mut message = query.clone();
        message[5] = count;
        message.extend(&query[12..]);
        assert_eq!(code(&message), ResponseCode::FormErr);
    }
    // 65535, which are not there.
    let mut message = query.clone();
    message[4..6].copy_from_slice(&[0xff; 2]);
    assert_eq!(code(&message), ResponseCode::FormErr);
    // IQUERY, of class CHAOS.
    let mut message = query.clone();
    message[2] |= 1 << 3;
    assert_eq!(code(&message), ResponseCode::NotImp);
    let mut message = query.clone();
    *message.last_mut().expect("a byte") = 3;
    assert_eq!(code(&message), ResponseCode::Refused);
    // A name that points at itself, at what follows it, and two that point at each other (RFC 1035, section 4.1.4).
    for name in [
        &[0xc0, 12][..],
        &[0xc0, 14],
        &[0xc0, 14, 0xc0, 12],
        &[1, b'b', 0xc0, 12],
    ] {
        let mut message = query[..12].to_vec();
        message.extend(name);
        message.extend([0, 1, 0, 1]);
        assert_eq!(code(&message), ResponseCode::FormErr, "{name:?}");
    }
    // Cut off anywhere.
    for end in 0..query.len() {
        match zone.reply(&query[..end], Transport::Udp, true) {
            Reply::Silence => assert!(end < 12, "{end}"),
            Reply::Answer(answer) => assert_eq!(answer[3] & 0xf, 1, "{end}"),
            Reply::Forward => panic!("{end}"),
        }
    }
    // An answer.
    let mut message = query;
    message[2] |= 0x80;
    assert_eq!(zone.reply(&message, Transport::Udp, true), Reply::Silence);
}

#[test]
fn an_answer_repeats_the_id_and_the_query() {
    let sent = query("www.example.org", A);
    let mut answer = sent.clone();
    answer[2] |= 0x80;
    assert!(is_answer(&sent, &answer));
    assert!(is_answer(&query("WWW.example.org", A), &answer));
    assert!(!is_answer(&sent, &sent));
    assert!(!is_answer(&query("www.example.com", A), &answer));
    assert!(!is_answer(&query("www.example.org", NS), &answer));
    answer[0] ^= 1;
    assert!(!is_answer(&sent, &answer));
    let failed = failure(&sent).expect("an answer");
    assert!(is_answer(&sent, &failed));
    assert_eq!(failed[3] & 0xf, 2);
    assert_eq!(failure(&sent[..11]), None);
}

#[test]
fn a_proxy_finds_members_and_devices_with_and_without_the_domain() {
    let mut zone = zone();
    let device = Device {
        name: "plc".parse().expect("a name"),
        addresses: vec!["100.80.0.9".parse().expect("an address")],
        tags: Vec::new(),
    };
    let mut gateway = member(3, "site-a", &["100.80.0.8"]);
    gateway.devices.push(device);
    zone.take(&[Change::Set(gateway)]);
    let found = |name: &str| -> Vec<String> {
        let found = zone.find(name);
        found.iter().map(ToString::to_string).collect()
    };
    for name in ["b", "B", "b.seikan", "b.SEIKAN", "b.seikan.", "b."] {
        assert_eq!(found(name), ["100.80.0.2", "fd00:0:0:7::2"], "{name}");
    }
    for name in ["plc.site-a", "plc.site-a.seikan"] {
        assert_eq!(found(name), ["100.80.0.9"], "{name}");
    }
    for name in [
        "",
        ".",
        "seikan",
        "b.example.org",
        "plc",
        "b.seikan.seikan",
        "b..seikan",
    ] {
        assert_eq!(found(name), [""; 0], "{name}");
    }
}

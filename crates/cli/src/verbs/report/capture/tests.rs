//! Captures written byte by byte, by the formats' documents (draft-ietf-opsawg-pcap, -pcapng).

use super::*;

const CLIENT: u8 = 1;
const SERVER: u8 = 2;

/// A TCP packet of IPv4 with `length` bytes of data.
fn packet4(
    from: u8,
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    options: &[u8],
    length: usize,
) -> Vec<u8> {
    let segment = segment(from, seq, ack, flags, window, options, length);
    let total = (20 + segment.len()) as u16;
    let mut bytes = vec![0x45, 0];
    bytes.extend(total.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    bytes.extend([10, 0, 0, from, 10, 0, 0, 3 - from]);
    bytes.extend(segment);
    bytes
}

fn packet6(
    from: u8,
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    options: &[u8],
    length: usize,
) -> Vec<u8> {
    let segment = segment(from, seq, ack, flags, window, options, length);
    let mut bytes = vec![0x60, 0, 0, 0];
    bytes.extend((segment.len() as u16).to_be_bytes());
    bytes.extend([6, 64]);
    for end in [from, 3 - from] {
        bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, end]);
    }
    bytes.extend(segment);
    bytes
}

fn segment(
    from: u8,
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    options: &[u8],
    length: usize,
) -> Vec<u8> {
    let ports: [u16; 2] = if from == CLIENT {
        [4000, 80]
    } else {
        [80, 4000]
    };
    let mut bytes: Vec<u8> = ports.iter().flat_map(|port| port.to_be_bytes()).collect();
    bytes.extend(seq.to_be_bytes());
    bytes.extend(ack.to_be_bytes());
    bytes.extend([(5 + options.len() as u8 / 4) << 4, flags]);
    bytes.extend(window.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(options);
    bytes.resize(bytes.len() + length, 7);
    bytes
}

type Packets = fn(u8, u32, u32, u8, u16, &[u8], usize) -> Vec<u8>;

/// Returns a handshake with window scales 7 and 3, two segments of 1,000 bytes of which the second
/// is retransmitted, and acknowledgements, with times in milliseconds. The sequence numbers wrap.
fn conversation(packet: Packets) -> Vec<(u64, Vec<u8>)> {
    let start = u32::MAX - 500;
    let own = start.wrapping_add(1);
    let at = |bytes: u32| own.wrapping_add(bytes);
    let scale = |by: u8| [1, 3, 3, by];
    vec![
        (0, packet(CLIENT, start, 0, tcp::SYN, 64_000, &scale(7), 0)),
        (
            10,
            packet(SERVER, 900, own, tcp::SYN | tcp::ACK, 65_000, &scale(3), 0),
        ),
        (20, packet(CLIENT, own, 901, tcp::ACK, 500, &[], 0)),
        (30, packet(CLIENT, own, 901, tcp::ACK, 500, &[], 1000)),
        (40, packet(CLIENT, at(1000), 901, tcp::ACK, 500, &[], 1000)),
        (50, packet(SERVER, 901, at(1000), tcp::ACK, 1000, &[], 0)),
        (90, packet(CLIENT, at(1000), 901, tcp::ACK, 500, &[], 1000)),
        (95, packet(SERVER, 901, at(2000), tcp::ACK, 1000, &[], 0)),
    ]
}

/// Returns the expected result of reading [`conversation`].
fn expected(name: &str) -> Capture {
    let segment = |at, begin, is_retransmission| Segment {
        at,
        begin,
        end: begin + 1000,
        is_retransmission,
    };
    let ack = |at, number, bytes| Acknowledgement {
        at,
        number,
        window: Some(number + bytes),
    };
    Capture {
        name: name.to_owned(),
        segments: vec![
            segment(0.03, 0, false),
            segment(0.04, 1000, false),
            segment(0.09, 1000, true),
        ],
        acknowledgements: vec![
            ack(0.01, 0, 65_000),
            ack(0.05, 1000, 8000),
            ack(0.095, 2000, 8000),
        ],
        is_cut: false,
    }
}

/// Format of a file.
#[derive(Clone, Copy)]
struct Format {
    big_endian: bool,
    nanoseconds: bool,
    kind: u32,
    snap: usize,
}

const PLAIN: Format = Format {
    big_endian: false,
    nanoseconds: false,
    kind: 101,
    snap: 65_535,
};

impl Format {
    fn u32(self, value: u32) -> [u8; 4] {
        if self.big_endian {
            value.to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    }

    fn pcap(self, packets: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let magic = if self.nanoseconds {
            0xa1b2_3c4d
        } else {
            0xa1b2_c3d4
        };
        let version = if self.big_endian {
            [0, 2, 0, 4]
        } else {
            [2, 0, 4, 0]
        };
        let mut file = self.u32(magic).to_vec();
        file.extend(version);
        for value in [0, 0, self.snap as u32, self.kind] {
            file.extend(self.u32(value));
        }
        for (milliseconds, packet) in packets {
            let kept = &packet[..packet.len().min(self.snap)];
            let fraction = milliseconds * if self.nanoseconds { 1_000_000 } else { 1_000 };
            let lengths = [kept.len() as u32, packet.len() as u32];
            for value in [1_700_000_000, fraction as u32].into_iter().chain(lengths) {
                file.extend(self.u32(value));
            }
            file.extend(kept);
        }
        file
    }

    /// With an interface whose clock counts milliseconds.
    fn pcapng(self, packets: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let block = |kind: u32, body: &[u8]| {
            let length = self.u32(12 + body.len() as u32);
            [&self.u32(kind)[..], &length, body, &length].concat()
        };
        let u16 = |value: u16| {
            if self.big_endian {
                value.to_be_bytes()
            } else {
                value.to_le_bytes()
            }
        };
        let section = [&self.u32(0x1a2b_3c4d)[..], &u16(1), &u16(0), &[0xff; 8]];
        let mut file = block(0x0a0d_0d0a, &section.concat());
        let interface = [
            &u16(self.kind as u16)[..],
            &u16(0),
            &self.u32(self.snap as u32),
            // if_tsresol: 10^-3; end of options.
            &u16(9),
            &u16(1),
            &[3, 0, 0, 0],
            &u16(0),
            &u16(0),
        ];
        file.extend(block(1, &interface.concat()));
        for (milliseconds, packet) in packets {
            let at = 1_700_000_000_000 + milliseconds;
            let kept = &packet[..packet.len().min(self.snap)];
            let mut body = Vec::new();
            let lengths = [kept.len() as u32, packet.len() as u32];
            for value in [0, (at >> 32) as u32, at as u32].into_iter().chain(lengths) {
                body.extend(self.u32(value));
            }
            body.extend(kept);
            body.resize(body.len().next_multiple_of(4), 0);
            file.extend(block(6, &body));
        }
        file
    }
}

fn parse(file: &[u8]) -> anyhow::Result<Capture> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("capture");
    std::fs::write(&path, file)?;
    read(&path)
}

fn with(header: &[u8], packets: Vec<(u64, Vec<u8>)>) -> Vec<(u64, Vec<u8>)> {
    let all = packets.into_iter();
    all.map(|(at, packet)| (at, [header, &packet].concat()))
        .collect()
}

const NAME4: &str = "10.0.0.1:4000 to 10.0.0.2:80";
const NAME6: &str = "[fd00::1]:4000 to [fd00::2]:80";

#[test]
fn every_format_gives_the_same_result() {
    let both = [false, true];
    for (big_endian, nanoseconds) in both.iter().flat_map(|a| both.map(|b| (*a, b))) {
        let format = Format {
            big_endian,
            nanoseconds,
            ..PLAIN
        };
        let packets = conversation(packet4);
        assert_eq!(
            parse(&format.pcap(&packets)).expect("pcap"),
            expected(NAME4)
        );
        assert_eq!(
            parse(&format.pcapng(&packets)).expect("pcapng"),
            expected(NAME4)
        );
    }
}

#[test]
fn every_link_type_gives_the_same_result() {
    let ethernet4 = [[2; 12].as_slice(), &[8, 0]].concat();
    let ethernet6 = [[2; 12].as_slice(), &[0x81, 0, 0, 5, 0x86, 0xdd]].concat();
    let cooked = [[0; 14].as_slice(), &[8, 0]].concat();
    let cooked2 = [[8, 0].as_slice(), &[0; 18]].concat();
    for (kind, header, packet, name) in [
        (1, &ethernet4[..], packet4 as Packets, NAME4),
        (1, &ethernet6, packet6, NAME6),
        (101, &[], packet6, NAME6),
        (229, &[], packet6, NAME6),
        (113, &cooked, packet4, NAME4),
        (276, &cooked2, packet4, NAME4),
    ] {
        let format = Format { kind, ..PLAIN };
        let packets = with(header, conversation(packet));
        let found = parse(&format.pcap(&packets)).expect("capture");
        assert_eq!(found, expected(name), "link type {kind}");
    }
}

#[test]
fn headers_are_enough() {
    // 14 of Ethernet, 20 of IP, 20 of TCP: data and most options are cut off.
    let format = Format {
        kind: 1,
        snap: 58,
        ..PLAIN
    };
    let header = [[2; 12].as_slice(), &[8, 0]].concat();
    let packets = with(&header, conversation(packet4));
    assert_eq!(
        parse(&format.pcap(&packets)).expect("capture"),
        expected(NAME4)
    );
}

#[test]
fn without_the_handshake_the_window_is_unknown() {
    let packets = conversation(packet4).split_off(2);
    let capture = parse(&PLAIN.pcap(&packets)).expect("capture");
    assert_eq!(capture.segments.len(), 3);
    let acks = capture.acknowledgements;
    assert!(acks.iter().all(|ack| ack.window.is_none()), "{acks:?}");
}

#[test]
fn the_largest_connection_is_taken() {
    let mut packets = conversation(packet4);
    let small = packet6(CLIENT, 5, 5, tcp::ACK, 5, &[], 100);
    packets.extend([(1, small.clone()), (2, small)]);
    assert_eq!(
        parse(&PLAIN.pcap(&packets)).expect("capture"),
        expected(NAME4)
    );
}

#[test]
fn other_files_are_refused_and_partial_captures_are_read() {
    for nothing in [&b""[..], b"x", &[0; 100], b"\xd4\xc3\xb2\xa1"] {
        let error = parse(nothing).expect_err("refused");
        assert!(format!("{error:#}").contains("not a pcap"), "{error:#}");
    }
    let file = PLAIN.pcap(&conversation(packet4));
    let capture = parse(&file[..file.len() - 30]).expect("capture");
    assert_eq!(capture.acknowledgements.len(), 2);
    let empty = parse(&PLAIN.pcap(&[])).expect_err("nothing in it");
    assert!(format!("{empty:#}").contains("no TCP connection"));
}

/// Any byte of a header may be wrong: reading ends and does not panic.
#[test]
fn damage_does_no_harm() {
    let packets = conversation(packet4);
    for file in [PLAIN.pcap(&packets), PLAIN.pcapng(&packets)] {
        for at in (0..file.len()).filter(|at| file[*at] != 7) {
            let mut damaged = file.clone();
            damaged[at] = !damaged[at];
            let _ = parse(&damaged);
        }
    }
}

//! Records of a malicious authenticated peer, laid out by hand from
//! docs/internals/protocol-data.md: for each kind of frame, the shape that causes the most work
//! for its bytes.
#![allow(dead_code, reason = "every test uses its part")]

/// Bytes of a record besides its plaintext: header and tag.
pub const OVERHEAD: usize = 24;

/// A shape of records.
pub struct Shape {
    pub name: &'static str,
    /// Packets for the host in each record, if the record causes nothing else; each costs a write.
    pub packets: Option<usize>,
    /// The plaintext of the `n`th record.
    pub plaintext: Box<dyn FnMut(usize) -> Vec<u8>>,
}

pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind];
    frame.extend((body.len() as u16).to_le_bytes());
    frame.extend(body);
    frame
}

/// An IPv4 packet of the peer with protocol 59 (no next header), of this length.
pub fn packet(length: usize) -> Vec<u8> {
    let mut packet = vec![0; length.max(20)];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
    (packet[8], packet[9]) = (64, 59);
    packet[12..16].copy_from_slice(&[10, 0, 0, 2]);
    packet[16..20].copy_from_slice(&[10, 0, 0, 1]);
    packet
}

pub fn fields(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// SLICE: id, offset, segment size, headers, chunk; with END if it reaches `total`.
pub fn slice(id: u16, offset: u16, total: u16, gso: u16, chunk: usize) -> Vec<u8> {
    let mut body = fields(&[id, offset, gso]);
    let mut headers = packet(20);
    headers[9] = 6;
    headers.extend([0; 12]);
    headers.extend([0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    body.extend(headers);
    body.extend(vec![7; chunk]);
    let ends = usize::from(offset) + chunk == usize::from(total);
    frame(if ends { 0x12 } else { 0x02 }, &body)
}

/// FRAGMENT: id, offset, total, chunk.
pub fn fragment(id: u16, offset: u16, total: u16, chunk: usize) -> Vec<u8> {
    let mut body = fields(&[id, offset, total]);
    body.extend(vec![7; chunk]);
    frame(3, &body)
}

/// A plaintext of `size` bytes, full of frames; `make` creates the `n`th.
pub fn full(size: usize, mut make: impl FnMut(usize) -> Vec<u8>) -> Vec<u8> {
    let mut plaintext = vec![0; 3];
    for n in 0.. {
        let frame = make(n);
        if plaintext.len() + frame.len() > size {
            break;
        }
        plaintext.extend(frame);
    }
    // Padded, so that all shapes have the same size.
    plaintext.resize(size, 0);
    plaintext
}

impl Shape {
    /// Records of padding, which cause the least work.
    pub fn padding(size: usize) -> Shape {
        Shape {
            name: "padding",
            packets: None,
            plaintext: Box::new(move |_| vec![0; size]),
        }
    }

    /// All shapes, each with plaintexts of `size` bytes. Padding is the first.
    pub fn all(size: usize) -> Vec<Shape> {
        let shape = |name, plaintext| Shape {
            name,
            packets: None,
            plaintext,
        };
        let number = |n: usize, i: usize| (n * 300 + i) as u16;
        // The rest for a chunk after the headers of a slice.
        let chunk = size - 3 - 49;
        vec![
            Shape::padding(size),
            Shape {
                packets: Some((size - 3) / frame(1, &packet(20)).len()),
                ..shape(
                    "tiny packets",
                    Box::new(move |_| full(size, |_| frame(1, &packet(20)))),
                )
            },
            shape(
                "packets of somebody else",
                Box::new(move |_| {
                    full(size, |_| {
                        let mut packet = packet(20);
                        packet[15] = 9;
                        frame(1, &packet)
                    })
                }),
            ),
            shape(
                "slices of tiny segments",
                Box::new(move |n| full(size, |_| slice(n as u16, 0, chunk as u16, 1, chunk))),
            ),
            shape(
                "slices of the least segments",
                Box::new(move |n| full(size, |_| slice(n as u16, 0, chunk as u16, 256, chunk))),
            ),
            shape(
                "tiny slices",
                Box::new(move |n| full(size, |i| slice(n as u16, i as u16, 65_000, 1400, 1))),
            ),
            shape(
                "tiny last slices",
                Box::new(move |n| full(size, |i| slice(number(n, i), 999, 1000, 1400, 1))),
            ),
            shape(
                "a last slice behind tiny packets",
                Box::new(move |n| {
                    // Without a length, and with folded headers of 40 bytes: flags LAST and DF.
                    let mut last = vec![0xc2];
                    last.extend(fields(&[n as u16, 256, 256]));
                    last.extend(packet(20));
                    last.extend([0; 12]);
                    last.extend([0x50, 0x10, 0, 0, 0, 0, 0, 0]);
                    let tiny = frame(1, &packet(20));
                    let chunk = 256.min(size - 3 - last.len());
                    let mut plaintext = vec![0; 3];
                    while plaintext.len() + tiny.len() + last.len() + chunk <= size {
                        plaintext.extend(&tiny);
                    }
                    plaintext.extend(last);
                    plaintext.resize(size, 7);
                    plaintext
                }),
            ),
            shape(
                "tiny fragments",
                Box::new(move |n| full(size, |i| fragment(1, number(n, i), 65_000, 1))),
            ),
            shape(
                "tiny last fragments",
                Box::new(move |n| full(size, |i| fragment(number(n, i), 64_999, 65_000, 1))),
            ),
            shape(
                "the least fragments with gaps",
                Box::new(move |n| {
                    full(size, |i| {
                        fragment(1, ((n * 5 + i) % 120 * 512) as u16, 65_000, 256)
                    })
                }),
            ),
            shape(
                "probes",
                Box::new(move |n| full(size, |i| frame(5, &fields(&[number(n, i)])))),
            ),
            shape(
                "acknowledgements",
                Box::new(move |n| full(size, |i| frame(6, &fields(&[number(n, i), 45])))),
            ),
            shape(
                "reports",
                Box::new(move |_| full(size, |_| frame(4, &[0xff; 26]))),
            ),
            shape(
                "ports",
                Box::new(move |_| {
                    full(size, |_| frame(7, &[fields(&[256]), vec![0; 48]].concat()))
                }),
            ),
            shape(
                "unknown kinds",
                Box::new(move |_| full(size, |_| frame(9, &[]))),
            ),
            shape(
                "empty packets",
                Box::new(move |_| full(size, |_| frame(1, &[]))),
            ),
        ]
    }
}

//! Folded headers: the last frame of a record leaves out header bytes that the receiver computes.
//!
//! The last bytes of the frame are in their places, so the frame is that much shorter, and neither
//! end moves more than these bytes:
//!
//! ```text
//! frame    | length | addresses | checksum | ... payload | abcd |
//! folded   | ab     | addresses | cd       | ... payload |
//! ```
//!
//! | header | PACKET | SLICE |
//! |---|---|---|
//! | IPv4 | total length, checksum | these, and the protocol |
//! | the same, with the flag DF | also flags and fragment offset | also flags and fragment offset |
//! | IPv6 | payload length | payload length, next header |
//! | TCP | | checksum, urgent pointer |
//!
//! Packets that are no IP have nothing to compute. The receiver restores a frame behind the end of
//! its plaintext, where the tag was.

use crate::segment::SuperPacket;
use seikan_observe::DropReason;
use seikan_wire::checksum;
use seikan_wire::ip::PROTO_TCP;
use seikan_wire::message::TAG_LEN;

/// Bytes that a SLICE of TCP over IPv4 with DF is shorter by.
pub const SLICE4: usize = 11;
/// The same over IPv6.
pub const SLICE6: usize = 7;
/// The restored frame must end within the tag.
const _: () = assert!(SLICE4 <= TAG_LEN);

/// IPv4 flags and fragment offset of a packet that is no fragment, with DF.
const DF: [u8; 2] = [0x40, 0];
/// Minimum length of a TCP header.
const TCP_HEADER: usize = 20;

/// The header bytes that a frame leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fold {
    headers: Headers,
    ip_at: usize,
    /// IPv4 flags and fragment offset are left out ([`DF`]).
    pub df: bool,
}

/// The headers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Headers {
    NotIp,
    Packet4,
    Packet6,
    Slice4 { tcp_at: usize },
    Slice6 { tcp_at: usize },
}

impl Fold {
    /// Returns the header bytes that a PACKET frame of `packet` leaves out; `None` if the receiver
    /// would compute other bytes than those of the packet.
    pub fn of_packet(packet: &SuperPacket<'_>) -> Option<Fold> {
        let header = packet.bytes.get(packet.ip_at..)?;
        if packet.ip.is_v6() {
            return Some(Fold::new(Headers::Packet6, packet.ip_at, false));
        }
        // The headers of a super-packet's segments are written anew, so their checksums are right.
        let right = packet.kind.is_some()
            || checksum::fold(checksum::sum(header.get(..header_len4(header))?)) == 0;
        right.then(|| Fold::new(Headers::Packet4, packet.ip_at, header[6..8] == DF))
    }

    /// Returns the bytes that a SLICE with the headers of this TCP packet leaves out.
    pub fn of_slice(packet: &SuperPacket<'_>) -> Option<Fold> {
        let tcp_at = packet.ip_at + packet.ip.header_len;
        let urgent = packet.bytes.get(tcp_at + 18..tcp_at + TCP_HEADER)?;
        if urgent != [0, 0] || packet.ip.is_v6() && packet.ip.extended {
            return None;
        }
        Some(if packet.ip.is_v6() {
            Fold::new(Headers::Slice6 { tcp_at }, packet.ip_at, false)
        } else {
            let df = packet.bytes[packet.ip_at + 6..packet.ip_at + 8] == DF;
            Fold::new(Headers::Slice4 { tcp_at }, packet.ip_at, df)
        })
    }

    /// Returns what a packet without an IP header leaves out: nothing.
    pub fn none() -> Fold {
        Fold::new(Headers::NotIp, 0, false)
    }

    fn new(headers: Headers, ip_at: usize, df: bool) -> Fold {
        Fold { headers, ip_at, df }
    }

    /// Calls `gap` with offset and length of the bytes left out, in ascending order. The lengths are
    /// constants, so that nothing of this is a call of `memmove`.
    #[inline]
    fn each_gap(&self, mut gap: impl FnMut(usize, usize)) {
        let ip_at = self.ip_at;
        match self.headers {
            Headers::NotIp => {}
            Headers::Packet4 => {
                gap(ip_at + 2, 2);
                if self.df {
                    gap(ip_at + 6, 2);
                }
                gap(ip_at + 10, 2);
            }
            Headers::Packet6 => gap(ip_at + 4, 2),
            Headers::Slice4 { tcp_at } => {
                gap(ip_at + 2, 2);
                if self.df {
                    gap(ip_at + 6, 2);
                }
                // Protocol and checksum; checksum and urgent pointer.
                gap(ip_at + 9, 3);
                gap(tcp_at + 16, 4);
            }
            Headers::Slice6 { tcp_at } => {
                // Length and next header.
                gap(ip_at + 4, 3);
                gap(tcp_at + 16, 4);
            }
        }
    }

    /// Number of bytes left out.
    pub fn saved(&self) -> usize {
        let df = if self.df { 2 } else { 0 };
        match self.headers {
            Headers::NotIp => 0,
            Headers::Packet4 => 4 + df,
            Headers::Packet6 => 2,
            Headers::Slice4 { .. } => SLICE4 - 2 + df,
            Headers::Slice6 { .. } => SLICE6,
        }
    }

    /// Moves the last bytes of `frame` into the places of those left out. The frame is shorter by
    /// [`Self::saved`] then. It must be longer than its headers by that.
    pub fn apply(&self, frame: &mut [u8]) {
        let mut from = frame.len() - self.saved();
        self.each_gap(|at, len| {
            frame.copy_within(from..from + len, at);
            from += len;
        });
    }

    /// Moves the bytes back, for a frame that ends at `end` of `bytes`. Returns its true end; `None`
    /// if there is no space.
    fn undo(&self, bytes: &mut [u8], end: usize) -> Option<usize> {
        let bytes = bytes.get_mut(..end + self.saved())?;
        let mut to = end;
        self.each_gap(|at, len| {
            bytes.copy_within(at..at + len, to);
            to += len;
        });
        Some(to)
    }
}

fn header_len4(header: &[u8]) -> usize {
    usize::from(header[0] & 0x0f) * 4
}

/// Restores the left-out header bytes of a PACKET frame whose IP header is at `ip_at`. `bytes`
/// begins with the packet, which ends at `end`, and has space behind it. Returns the end of the
/// restored packet.
pub fn unfold_packet(
    bytes: &mut [u8],
    end: usize,
    ip_at: usize,
    df: bool,
) -> Result<usize, DropReason> {
    let header = bytes.get(ip_at..end).unwrap_or_default();
    match header.first().map(|first| first >> 4) {
        Some(4) if header.len() >= 20 => {
            let header_len = header_len4(header);
            let end = Fold::new(Headers::Packet4, ip_at, df)
                .undo(bytes, end)
                .ok_or(DropReason::BadFrame)?;
            let header = &mut bytes[ip_at..end];
            let length = header.len() as u16;
            header[2..4].copy_from_slice(&length.to_be_bytes());
            if df {
                header[6..8].copy_from_slice(&DF);
            }
            header[10..12].fill(0);
            let covered = header.get(..header_len).ok_or(DropReason::NotIp)?;
            let check = checksum::fold(checksum::sum(covered));
            header[10..12].copy_from_slice(&check.to_be_bytes());
            Ok(end)
        }
        Some(6) if header.len() >= 40 => {
            let end = Fold::new(Headers::Packet6, ip_at, false)
                .undo(bytes, end)
                .ok_or(DropReason::BadFrame)?;
            let length = (end - ip_at - 40) as u16;
            bytes[ip_at + 4..ip_at + 6].copy_from_slice(&length.to_be_bytes());
            Ok(end)
        }
        _ => Err(DropReason::NotIp),
    }
}

/// Restores the left-out header bytes of a SLICE frame, whose headers and chunk follow each other.
/// Length and checksums, which have no meaning in a slice, are set to zero.
pub fn unfold_slice(
    bytes: &mut [u8],
    end: usize,
    ip_at: usize,
    df: bool,
) -> Result<usize, DropReason> {
    let header = bytes.get(ip_at..end).unwrap_or_default();
    let (tcp_at, is_v6) = match header.first().map(|first| first >> 4) {
        Some(4) => (ip_at + header_len4(header), false),
        Some(6) => (ip_at + 40, true),
        _ => return Err(DropReason::BadFrame),
    };
    let least = ip_at + if is_v6 { 40 } else { 20 };
    if tcp_at < least || tcp_at + TCP_HEADER > end {
        return Err(DropReason::BadFrame);
    }
    let fold = if is_v6 {
        Fold::new(Headers::Slice6 { tcp_at }, ip_at, false)
    } else {
        Fold::new(Headers::Slice4 { tcp_at }, ip_at, df)
    };
    let end = fold.undo(bytes, end).ok_or(DropReason::BadFrame)?;
    fold.each_gap(|at, len| bytes[at..at + len].fill(0));
    if is_v6 {
        bytes[ip_at + 6] = PROTO_TCP;
    } else {
        bytes[ip_at + 9] = PROTO_TCP;
        if df {
            bytes[ip_at + 6..ip_at + 8].copy_from_slice(&DF);
        }
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use seikan_wire::{GsoType, VnetHdr, ip};

    /// An IP packet behind a link header, from random bytes.
    #[derive(Clone, Debug)]
    struct Shape {
        bytes: Vec<u8>,
        link: usize,
        v6: bool,
        /// Words of IPv4 options.
        options: usize,
        df: bool,
        /// Words of TCP options.
        tcp_options: usize,
    }

    impl Shape {
        fn ip_len(&self) -> usize {
            if self.v6 { 40 } else { 20 + 4 * self.options }
        }

        /// The packet, with `protocol` and right lengths and IPv4 checksum.
        fn packet(&self, protocol: u8) -> Vec<u8> {
            let mut bytes = self.bytes.clone();
            let ip_len = self.ip_len();
            let ip = &mut bytes[self.link..];
            let length = ip.len();
            if self.v6 {
                ip[0] = 0x60 | ip[0] & 0x0f;
                ip[6] = protocol;
            } else {
                ip[0] = 0x45 + self.options as u8;
                ip[6..8].copy_from_slice(if self.df { &DF } else { &[0, 0] });
                ip[9] = protocol;
            }
            ip::set_length(ip, ip_len, length, None);
            if protocol == PROTO_TCP {
                let tcp = &mut ip[ip_len..];
                tcp[12] = (5 + self.tcp_options as u8) << 4 | tcp[12] & 0x0f;
                tcp[18..20].fill(0);
            }
            bytes
        }

        fn header_len(&self) -> usize {
            self.link + self.ip_len() + 20 + 4 * self.tcp_options
        }
    }

    prop_compose! {
        fn shape()(
            bytes in prop::collection::vec(any::<u8>(), 400..1500),
            link in prop::sample::select(vec![0usize, 14, 18, 22]),
            v6: bool,
            options in 0usize..=10,
            df: bool,
            tcp_options in 0usize..=10,
        ) -> Shape {
            Shape { bytes, link, v6, options, df, tcp_options }
        }
    }

    fn read(packet: &[u8], vnet: VnetHdr) -> Vec<u8> {
        [&vnet.to_bytes()[..], packet].concat()
    }

    /// Folds a packet and restores it in the middle of other bytes.
    fn round_trip(fold: &Fold, packet: &[u8], is_slice: bool, ip_at: usize) -> Vec<u8> {
        let mut folded = packet.to_vec();
        fold.apply(&mut folded);
        let cut = packet.len() - fold.saved();
        // Nothing but the gaps has changed, and they are as many.
        let mut expected = packet[..cut].to_vec();
        let mut gaps = 0;
        fold.each_gap(|at, len| {
            expected[at..at + len].copy_from_slice(&folded[at..at + len]);
            gaps += len;
        });
        assert_eq!((&folded[..cut], fold.saved()), (&expected[..], gaps));
        folded.truncate(cut);
        folded.extend([0x11; TAG_LEN + 1]);
        let unfold = if is_slice {
            unfold_slice
        } else {
            unfold_packet
        };
        let end = unfold(&mut folded, cut, ip_at, fold.df).expect("a good frame");
        assert!(folded[end..].iter().all(|byte| *byte == 0x11));
        folded.truncate(end);
        folded
    }

    proptest! {
        #[test]
        fn packets_come_out_as_they_were(
            shape in shape(),
            protocol in prop::sample::select(vec![1u8, 6, 17, 58, 59, 255]),
        ) {
            let packet = shape.packet(protocol);
            let read = read(&packet, VnetHdr::default());
            let whole = SuperPacket::parse_at(&read, shape.link).expect("a packet");
            let fold = Fold::of_packet(&whole).expect("a right header");
            let saved = if shape.v6 { 2 } else if shape.df { 6 } else { 4 };
            prop_assert_eq!(fold.saved(), saved);
            prop_assert_eq!(round_trip(&fold, &packet, false, shape.link), packet);
        }

        #[test]
        fn slices_come_out_without_length_and_checksums(shape in shape()) {
            let packet = shape.packet(PROTO_TCP);
            let ip_len = shape.ip_len();
            let vnet = VnetHdr {
                needs_csum: true,
                gso_type: if shape.v6 { GsoType::Tcp6 } else { GsoType::Tcp4 },
                gso_size: 100,
                csum_start: (shape.link + ip_len) as u16,
                csum_offset: 16,
                ..VnetHdr::default()
            };
            let read = read(&packet, vnet);
            let whole = SuperPacket::parse_at(&read, shape.link).expect("a super-packet");
            prop_assert_eq!(whole.header_len, shape.header_len());
            let fold = Fold::of_slice(&whole).expect("nothing unusual");
            let saved = if shape.v6 { SLICE6 } else if shape.df { SLICE4 } else { SLICE4 - 2 };
            prop_assert_eq!(fold.saved(), saved);
            // A receiver of slices writes these fields anew.
            let mut expected = packet.clone();
            let ip = &mut expected[shape.link..];
            if shape.v6 {
                ip[4..6].fill(0);
            } else {
                ip[2..4].fill(0);
                ip[10..12].fill(0);
            }
            ip[ip_len + 16..ip_len + 18].fill(0);
            prop_assert_eq!(round_trip(&fold, &packet, true, shape.link), expected);
        }

        #[test]
        fn hostile_frames_never_panic_nor_reach_beyond_the_tag(
            bytes in prop::collection::vec(any::<u8>(), 0..120),
            version in prop::sample::select(vec![0x40u8, 0x60, 0]),
            ip_at in 0usize..24,
            df: bool,
        ) {
            for unfold in [unfold_packet, unfold_slice] {
                let mut arena = bytes.clone();
                if let Some(first) = arena.get_mut(ip_at) {
                    *first = *first & 0x0f | version;
                }
                arena.extend([0x11; TAG_LEN + 1]);
                if let Ok(end) = unfold(&mut arena, bytes.len(), ip_at, df) {
                    prop_assert!(end <= bytes.len() + SLICE4);
                }
                prop_assert_eq!(arena[bytes.len() + TAG_LEN], 0x11);
                // Without space behind the frame.
                let _ = unfold(&mut bytes.clone(), bytes.len(), ip_at, df);
            }
        }
    }

    fn ordinary() -> Shape {
        Shape {
            bytes: vec![7; 500],
            link: 0,
            v6: false,
            options: 0,
            df: true,
            tcp_options: 3,
        }
    }

    #[test]
    fn a_wrong_ipv4_checksum_is_not_repaired() {
        let mut packet = ordinary().packet(17);
        packet[10] ^= 1;
        let read = read(&packet, VnetHdr::default());
        let whole = SuperPacket::parse(&read).expect("a packet");
        assert_eq!(Fold::of_packet(&whole), None);
    }

    #[test]
    fn an_urgent_pointer_and_extension_headers_are_kept() {
        let mut packet = ordinary().packet(PROTO_TCP);
        packet[20 + 19] = 1;
        let urgent = read(&packet, VnetHdr::default());
        let whole = SuperPacket::parse(&urgent).expect("a packet");
        assert_eq!(Fold::of_slice(&whole), None);
        let v6 = Shape {
            v6: true,
            ..ordinary()
        };
        let mut packet = v6.packet(0);
        packet[40..48].copy_from_slice(&[PROTO_TCP, 0, 1, 4, 0, 0, 0, 0]); // hop-by-hop options
        packet[48 + 18..48 + 20].fill(0);
        let extended = read(&packet, VnetHdr::default());
        let whole = SuperPacket::parse(&extended).expect("a packet");
        assert_eq!(whole.ip.protocol, PROTO_TCP);
        assert_eq!(Fold::of_slice(&whole), None);
    }
}

//! Packets of a TAP device as the frames that a NIC would put on the wire.
//!
//! [`Frames::parse`] returns the number of frames in a (super-)packet; [`Frames::cut`] makes a
//! packet of a range of them, like segmentation offload: headers copied, lengths, sequence numbers
//! and flags corrected, a partial checksum left partial.

use seikan_proto::segment::{SegmentPosition, SuperPacket, rewrite_header};
use seikan_wire::ethernet::HEADER_LEN;
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr};

/// A packet behind its virtio-net header, and how it divides into frames.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    bytes: &'a [u8],
    vnet: VnetHdr,
    /// The super-packet; `None` if the packet is a single frame.
    super_packet: Option<SuperPacket<'a>>,
}

impl<'a> Frames<'a> {
    /// Parses bytes that begin with the virtio-net header. A packet that is no super-packet, or of
    /// an unknown kind, is one frame.
    pub(super) fn parse(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            vnet: VnetHdr::read(bytes).unwrap_or_default(),
            super_packet: SuperPacket::parse_at(bytes, HEADER_LEN)
                .ok()
                .filter(|packet| packet.kind.is_some()),
        }
    }

    /// Returns the number of frames that the NIC would send.
    pub(super) fn count(&self) -> usize {
        self.super_packet.map_or(1, |packet| packet.segments())
    }

    /// Whether the NIC is to segment the packet.
    pub(super) fn is_super_packet(&self) -> bool {
        self.vnet.gso_type != GsoType::None
    }

    /// Whether the NIC is to complete the checksum.
    pub(super) fn needs_checksum(&self) -> bool {
        self.vnet.needs_csum
    }

    /// Bytes of frame `index` on the wire, with its Ethernet header.
    pub(super) fn length(&self, index: usize) -> usize {
        let whole = self.bytes.len().saturating_sub(VNET_HDR_LEN);
        self.super_packet
            .map_or(whole, |packet| packet.segment_len(index))
    }

    /// Bytes of all frames on the wire.
    pub(super) fn total_length(&self) -> usize {
        (0..self.count()).map(|index| self.length(index)).sum()
    }

    /// Returns the frames `from` to `to` (not included) as one packet behind a virtio-net header.
    /// If `complete`, the header tells the far end that the checksum is good; otherwise the
    /// checksum stays incomplete and unmarked.
    pub(super) fn cut(&self, from: usize, to: usize, complete: bool) -> Vec<u8> {
        let mut vnet = self.vnet;
        vnet.needs_csum &= complete;
        let part = self
            .super_packet
            .filter(|packet| to - from < packet.segments());
        let mut packet = match part {
            None => self.bytes.to_vec(),
            Some(whole) => {
                if to - from == 1 {
                    (vnet.gso_type, vnet.gso_ecn) = (GsoType::None, false);
                    (vnet.gso_size, vnet.hdr_len) = (0, 0);
                }
                // Only the first frame has CWR, which the ECN flag stands for.
                vnet.gso_ecn &= from == 0;
                part_of(&whole, from, to)
            }
        };
        if packet.len() >= VNET_HDR_LEN && (part.is_some() || !complete) {
            packet[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
        }
        packet
    }
}

/// Room for a virtio-net header, and the packet of these segments.
fn part_of(whole: &SuperPacket<'_>, from: usize, to: usize) -> Vec<u8> {
    let (headers, payload) = whole.bytes.split_at(whole.header_len);
    let offset = from * whole.gso_size;
    let end = (to * whole.gso_size).min(payload.len());
    let mut packet = [&[0; VNET_HDR_LEN], headers, &payload[offset..end]].concat();
    if let Some(kind) = whole.kind {
        let ip = &mut packet[VNET_HDR_LEN + whole.ip_at..];
        let position = SegmentPosition {
            offset,
            index: from as u16,
            length: ip.len(),
            last: to == whole.segments(),
        };
        rewrite_header(ip, &whole.ip, kind, position);
    }
    packet
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use seikan_wire::ip::set_length;
    use seikan_wire::{IpPacket, checksum, tcp};

    /// Payload bytes of each frame of [`super_packet`].
    pub(in super::super) const SIZE: usize = 1000;

    /// An IPv4 TCP super-packet of `payload` bytes that count up, with FIN, PSH and CWR, from
    /// sequence number 5000.
    pub(in super::super) fn super_packet(payload: usize) -> Vec<u8> {
        let vnet = VnetHdr {
            needs_csum: true,
            gso_type: if payload > SIZE {
                GsoType::Tcp4
            } else {
                GsoType::None
            },
            gso_ecn: false,
            hdr_len: 54,
            gso_size: if payload > SIZE { SIZE as u16 } else { 0 },
            csum_start: 34,
            csum_offset: 16,
        };
        let mut packet = vnet.to_bytes().to_vec();
        packet.extend([0; 12]);
        packet.extend([8, 0]);
        let mut ip = vec![0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, 6, 0, 0];
        ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        set_length(&mut ip, 20, 40 + payload, None);
        packet.extend(ip);
        packet.extend([0, 1, 0, 2, 0, 0, 0x13, 0x88, 0, 0, 0, 0, 0x50, 0x99]);
        packet.extend([0xff, 0xff, 0, 0, 0, 0]);
        packet.extend((0..payload).map(|n| n as u8));
        packet
    }

    fn sequence(packet: &[u8]) -> u32 {
        u32::from_be_bytes(packet[48..52].try_into().unwrap())
    }

    #[test]
    fn a_super_packet_counts_as_its_frames() {
        let packet = super_packet(2500);
        let frames = Frames::parse(&packet);
        assert_eq!(frames.count(), 3);
        assert_eq!([0, 1, 2].map(|i| frames.length(i)), [1054, 1054, 554]);
        assert_eq!(frames.total_length(), 1054 + 1054 + 554);
    }

    #[test]
    fn a_whole_packet_is_cut_as_it_is() {
        let packet = super_packet(2500);
        assert_eq!(Frames::parse(&packet).cut(0, 3, true), packet);
    }

    #[test]
    fn a_middle_frame_is_a_packet_of_its_own() {
        let packet = super_packet(2500);
        let frame = Frames::parse(&packet).cut(1, 2, true);
        let vnet = VnetHdr::read(&frame).unwrap();
        assert_eq!((vnet.gso_type, vnet.gso_size), (GsoType::None, 0));
        assert!(vnet.needs_csum);
        let ip = &frame[24..];
        assert_eq!(IpPacket::parse(ip).unwrap().total_len, 1040);
        // The header's checksum covers the new length and identification (0xffff + 1).
        assert_eq!(checksum::fold(checksum::sum(&ip[..20])), 0);
        assert_eq!([ip[4], ip[5]], [0, 0]);
        assert_eq!(sequence(&frame), 6000);
        assert_eq!(frame[10 + 34 + 13], 0x10, "neither FIN, PSH nor CWR");
        assert_eq!(frame[64..], packet[64 + 1000..64 + 2000]);
    }

    #[test]
    fn flags_stay_with_the_first_and_the_last_frame() {
        let packet = super_packet(2500);
        let frames = Frames::parse(&packet);
        let flags = |from, to| frames.cut(from, to, true)[10 + 34 + 13];
        assert_eq!(flags(0, 1), 0x10 | tcp::CWR);
        assert_eq!(flags(1, 3), 0x10 | tcp::FIN | tcp::PSH);
    }

    #[test]
    fn the_partial_checksum_is_that_of_the_pseudo_header() {
        let packet = super_packet(2500);
        let frame = Frames::parse(&packet).cut(2, 3, true);
        // 0a00 + 0001 + 0a00 + 0002 + 6 + 520
        let by_hand = 0x0a00 + 0x0001 + 0x0a00 + 0x0002 + 6 + 520;
        assert_eq!(frame[10 + 34 + 16..][..2], u16::to_be_bytes(by_hand));
    }

    #[test]
    fn a_run_of_frames_stays_a_super_packet() {
        let packet = super_packet(3500);
        let run = Frames::parse(&packet).cut(1, 3, true);
        let again = Frames::parse(&run);
        assert_eq!((again.count(), again.total_length()), (2, 2 * 1054));
        assert_eq!(sequence(&run), 6000);
    }

    #[test]
    fn an_incomplete_frame_does_not_ask_for_its_checksum() {
        let packet = super_packet(500);
        let frame = Frames::parse(&packet).cut(0, 1, false);
        assert!(!VnetHdr::read(&frame).unwrap().needs_csum);
        assert_eq!(frame[10..], packet[10..]);
    }

    #[test]
    fn bytes_that_make_no_sense_are_one_frame() {
        let whole = super_packet(2500);
        // The headers are whole from 64 bytes on, with a payload from 65.
        for length in 0..=64 {
            let frames = Frames::parse(&whole[..length]);
            assert_eq!(frames.count(), 1);
            let _ = (frames.total_length(), frames.cut(0, 1, false));
        }
    }
}

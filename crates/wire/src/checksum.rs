//! The Internet checksum (RFC 1071), its pseudo-headers and its incremental update (RFC 1624).
//!
//! Sums are unfolded `u64` sums of big-endian 16-bit words; [`fold`] completes them.

use std::net::IpAddr;

/// Sum of the 16-bit big-endian words of `bytes`; an odd last byte is padded with zero.
///
/// Works on 32-bit native words in independent lanes so that the compiler vectorises it, and swaps
/// once at the end: the one's complement sum is byte-order independent (RFC 1071, section 2 B).
pub fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 8];
    let mut blocks = bytes.chunks_exact(32);
    for block in &mut blocks {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(4)) {
            *lane += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
    let mut total: u64 = lanes.iter().map(|l| (l >> 32) + (l & 0xffff_ffff)).sum();
    let mut words = blocks.remainder().chunks_exact(2);
    for word in &mut words {
        total += u64::from(u16::from_ne_bytes([word[0], word[1]]));
    }
    if let [last] = words.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    u64::from(u16::from_be(add_carries(total)))
}

/// Folds a sum to 16 bits, without complementing it.
pub fn add_carries(mut sum: u64) -> u16 {
    sum = (sum >> 32) + (sum & 0xffff_ffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum as u16
}

/// The checksum that belongs in a header: the complement of the folded sum.
pub fn fold(sum: u64) -> u16 {
    !add_carries(sum)
}

/// Sum of the TCP/UDP pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
///
/// `length` counts the transport header and its payload. Addresses of different families cannot
/// come from one packet; their bytes are summed all the same.
pub fn pseudo_header(src: IpAddr, dst: IpAddr, protocol: u8, length: usize) -> u64 {
    let address = |a: IpAddr| match a {
        IpAddr::V4(a) => sum(&a.octets()),
        IpAddr::V6(a) => sum(&a.octets()),
    };
    address(src)
        + address(dst)
        + u64::from(protocol)
        + (length as u64 >> 16)
        + (length as u64 & 0xffff)
}

/// Replaces one 16-bit word under a checksum: RFC 1624, equation 3.
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    fold(u64::from(!checksum) + u64::from(!old) + u64::from(new))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 1071, section 3: the bytes 00 01 f2 03 f4 f5 f6 f7 sum to ddf2 (with carries).
    #[test]
    fn rfc1071_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(add_carries(sum(&bytes)), 0xddf2);
    }

    #[test]
    fn every_length_agrees_with_the_definition() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 151 + 7) as u8).collect();
        for n in 0..bytes.len() {
            let mut naive = 0u64;
            for pair in bytes[..n].chunks(2) {
                naive += u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u64::from(*b));
            }
            assert_eq!(
                add_carries(sum(&bytes[..n])),
                add_carries(naive),
                "length {n}"
            );
        }
    }

    /// RFC 1624, section 4: the example where the naive update goes wrong.
    #[test]
    fn rfc1624_example() {
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
    }
}

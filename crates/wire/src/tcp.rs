//! TCP header fields (RFC 9293) that segmentation, coalescing and MSS clamping touch.

use crate::checksum;

/// FIN flag.
pub const FIN: u8 = 0x01;
/// SYN flag.
pub const SYN: u8 = 0x02;
/// RST flag.
pub const RST: u8 = 0x04;
/// PSH flag.
pub const PSH: u8 = 0x08;
/// ACK flag.
pub const ACK: u8 = 0x10;
/// URG flag.
pub const URG: u8 = 0x20;
/// CWR flag (RFC 3168).
pub const CWR: u8 = 0x80;

/// Offset of the checksum in the header.
pub const CHECKSUM_AT: usize = 16;

/// Length of the TCP header at the start of `segment`, including options, if it is complete.
pub fn header_len(segment: &[u8]) -> Option<usize> {
    let length = usize::from(segment.get(12)? >> 4) * 4;
    (length >= 20 && length <= segment.len()).then_some(length)
}

/// Sequence number. `header` holds at least 20 bytes, as for every function below.
pub fn seq(header: &[u8]) -> u32 {
    u32::from_be_bytes([header[4], header[5], header[6], header[7]])
}

/// Sets the sequence number.
pub fn set_seq(header: &mut [u8], seq: u32) {
    header[4..8].copy_from_slice(&seq.to_be_bytes());
}

/// The flags byte.
pub fn flags(header: &[u8]) -> u8 {
    header[13]
}

/// Number of the next byte that the sender of an acknowledgement expects.
pub fn acknowledged(header: &[u8]) -> u32 {
    u32::from_be_bytes([header[8], header[9], header[10], header[11]])
}

/// The receive window field, without its scale.
pub fn window(header: &[u8]) -> u16 {
    u16::from_be_bytes([header[14], header[15]])
}

/// Returns the window scale among a header's options (RFC 7323 section 2.2), which may be cut off.
pub fn window_scale(options: &[u8]) -> Option<u8> {
    let mut at = 0;
    loop {
        match (options.get(at)?, options.get(at + 1)) {
            (0, _) => return None,
            (1, _) => at += 1,
            (3, Some(3)) => return options.get(at + 2).copied(),
            (_, Some(length)) if *length >= 2 => at += usize::from(*length),
            _ => return None,
        }
    }
}

/// Converts sequence numbers of 32 bits to positions that do not wrap; the first one is 0.
#[derive(Debug, Default)]
pub struct Positions {
    last: Option<(u32, i64)>,
}

impl Positions {
    /// Returns the position of a number: of all positions with this number, the one nearest to the
    /// position before, less than half of all numbers away (RFC 9293, 3.4).
    pub fn of(&mut self, number: u32) -> i64 {
        let position = match self.last {
            None => 0,
            Some((last, position)) => position + i64::from(number.wrapping_sub(last) as i32),
        };
        self.last = Some((number, position));
        position
    }
}

/// Lowers the MSS option of a SYN to `limit` (RFC 9293 section 3.7.1). Returns true if it changed.
///
/// `segment` is the whole TCP segment. `partial`: its checksum field covers only the pseudo-header,
/// not the option.
pub fn clamp_mss(segment: &mut [u8], limit: u16, partial: bool) -> bool {
    let Some(length) = header_len(segment) else {
        return false;
    };
    if flags(segment) & SYN == 0 {
        return false;
    }
    let mut at = 20;
    while at < length {
        match segment[at] {
            0 => return false, // end of options
            1 => at += 1,      // no-operation
            kind => {
                let Some(&size) = segment[..length].get(at + 1) else {
                    return false;
                };
                let size = usize::from(size);
                if size < 2 || at + size > length {
                    return false;
                }
                if kind == 2 && size == 4 {
                    return lower_mss_at(segment, at + 2, limit, partial);
                }
                at += size;
            }
        }
    }
    false
}

fn lower_mss_at(segment: &mut [u8], at: usize, limit: u16, partial: bool) -> bool {
    let old = u16::from_be_bytes([segment[at], segment[at + 1]]);
    if old <= limit {
        return false;
    }
    segment[at..at + 2].copy_from_slice(&limit.to_be_bytes());
    if !partial {
        let mut check = u16::from_be_bytes([segment[CHECKSUM_AT], segment[CHECKSUM_AT + 1]]);
        // An option may start at an odd offset: then each byte lies in another 16-bit word.
        if at.is_multiple_of(2) {
            check = checksum::update(check, old, limit);
        } else {
            check = checksum::update(check, old.swap_bytes(), limit.swap_bytes());
        }
        segment[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&check.to_be_bytes());
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn syn(options: &[u8]) -> Vec<u8> {
        let mut s = vec![0; 20];
        s.extend(options);
        s[12] = ((s.len() / 4) as u8) << 4;
        s[13] = SYN;
        let check = checksum::fold(checksum::sum(&s));
        s[16..18].copy_from_slice(&check.to_be_bytes());
        s
    }

    #[test]
    fn the_window_scale_is_found_among_other_options() {
        assert_eq!(window_scale(&[1, 1, 8, 2, 3, 3, 7, 0]), Some(7));
        assert_eq!(window_scale(&[0, 3, 3, 7]), None);
        for cut in [&[3, 3][..], &[3], &[8, 1, 3, 3, 7], &[]] {
            assert_eq!(window_scale(cut), None);
        }
    }

    #[test]
    fn positions_go_on_where_numbers_wrap() {
        let mut positions = Positions::default();
        let numbers = [u32::MAX - 1, 3, u32::MAX, 10];
        assert_eq!(numbers.map(|number| positions.of(number)), [0, 5, 1, 12]);
    }

    #[test]
    fn mss_is_lowered_and_the_checksum_stays_right() {
        for options in [vec![2, 4, 0x05, 0xb4], vec![1, 2, 4, 0x05, 0xb4, 1, 1, 1]] {
            let mut s = syn(&options);
            assert!(clamp_mss(&mut s, 1200, false));
            let at = 20 + options.iter().position(|b| *b == 4).unwrap() + 1;
            assert_eq!(s[at..at + 2], 1200u16.to_be_bytes());
            assert_eq!(checksum::fold(checksum::sum(&s)), 0, "{options:?}");
        }
    }

    #[test]
    fn a_smaller_mss_or_no_syn_is_left_alone() {
        let mut s = syn(&[2, 4, 0x04, 0x00]);
        assert!(!clamp_mss(&mut s, 1200, false));
        let mut s = syn(&[2, 4, 0x05, 0xb4]);
        s[13] = ACK;
        assert!(!clamp_mss(&mut s, 1200, false));
    }

    #[test]
    fn malformed_options_end_the_search() {
        for options in [[2, 0, 5, 180], [3, 200, 0, 0], [1, 1, 1, 2]] {
            assert!(!clamp_mss(&mut syn(&options), 100, false), "{options:?}");
        }
    }
}

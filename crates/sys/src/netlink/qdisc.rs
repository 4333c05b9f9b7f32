//! Queueing disciplines: packets passed, dropped and queued.
//!
//! The attributes are parsed here, since only counters are needed, for any kind of discipline.

use netlink_packet_core::NlasIterator;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::TcMessage;

use super::{Netlink, NetlinkError};

/// `struct tcmsg` (include/uapi/linux/rtnetlink.h).
const HEADER_SIZE: usize = 20;
/// `TC_H_ROOT` (include/uapi/linux/pkt_sched.h).
const ROOT: u32 = 0xffff_ffff;
/// `TCA_KIND`, `TCA_STATS`, `TCA_STATS2` (include/uapi/linux/rtnetlink.h).
const KIND: u16 = 1;
const STATS: u16 = 3;
const STATS2: u16 = 7;
/// `TCA_STATS_BASIC`, `TCA_STATS_QUEUE`, `TCA_STATS_PKT64` (include/uapi/linux/gen_stats.h).
const BASIC: u16 = 1;
const QUEUE: u16 = 3;
const PACKETS64: u16 = 8;

/// The counters of one queueing discipline. The one at the root of an interface includes those
/// below it (`mq` adds up its children when it is read, the others count themselves).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QdiscStats {
    /// Index of its interface.
    pub index: u32,
    /// Its kind, such as `fq_codel`.
    pub kind: String,
    /// Its handle; 0 if the kernel created it by default.
    pub handle: u32,
    /// Handle of its parent.
    pub parent: u32,
    /// Packets passed.
    pub packets: u64,
    /// Bytes passed, with link headers.
    pub bytes: u64,
    /// Packets dropped.
    pub drops: u32,
    /// Number of times that packets were delayed by a rate limit.
    pub overlimits: u32,
    /// Packets that the device returned; `None` on kernels that do not report it.
    pub requeues: Option<u32>,
    /// Packets queued.
    pub qlen: u32,
    /// Bytes queued.
    pub backlog: u32,
}

impl QdiscStats {
    /// Whether it is the root of the transmit side of its interface.
    pub fn is_root(&self) -> bool {
        self.parent == ROOT
    }
}

impl Netlink {
    /// Returns every queueing discipline of the namespace (`tc -s qdisc`), including `noqueue`,
    /// which queues nothing.
    pub fn qdiscs(&self) -> Result<Vec<QdiscStats>, NetlinkError> {
        self.dump(
            RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()),
            |_, payload| parse(payload),
            |_| "list the queueing disciplines".into(),
        )
    }
}

fn parse(payload: &[u8]) -> Option<QdiscStats> {
    let mut qdisc = QdiscStats {
        index: u32_at(payload, 4)?,
        handle: u32_at(payload, 8)?,
        parent: u32_at(payload, 12)?,
        ..QdiscStats::default()
    };
    let mut newer = None;
    let mut older = None;
    for nla in NlasIterator::new(payload.get(HEADER_SIZE..)?).map_while(Result::ok) {
        match nla.kind() {
            KIND => {
                let name = nla.value().split(|byte| *byte == 0).next()?;
                qdisc.kind = String::from_utf8_lossy(name).into_owned();
            }
            STATS => older = parse_stats(nla.value(), qdisc.clone()),
            STATS2 => newer = parse_stats2(nla.value(), qdisc.clone()),
            _ => {}
        }
    }
    newer.or(older)
}

/// `TCA_STATS2`: nested attributes.
fn parse_stats2(value: &[u8], mut qdisc: QdiscStats) -> Option<QdiscStats> {
    let mut seen = false;
    let mut packets64 = None;
    for nla in NlasIterator::new(value).map_while(Result::ok) {
        let value = nla.value();
        match nla.kind() {
            BASIC => {
                qdisc.bytes = u64_at(value, 0)?;
                qdisc.packets = u32_at(value, 8)?.into();
                seen = true;
            }
            QUEUE => {
                qdisc.qlen = u32_at(value, 0)?;
                qdisc.backlog = u32_at(value, 4)?;
                qdisc.drops = u32_at(value, 8)?;
                qdisc.requeues = Some(u32_at(value, 12)?);
                qdisc.overlimits = u32_at(value, 16)?;
            }
            PACKETS64 => packets64 = u64_at(value, 0),
            _ => {}
        }
    }
    qdisc.packets = packets64.unwrap_or(qdisc.packets);
    seen.then_some(qdisc)
}

/// `TCA_STATS`: `struct tc_stats`.
fn parse_stats(value: &[u8], mut qdisc: QdiscStats) -> Option<QdiscStats> {
    qdisc.bytes = u64_at(value, 0)?;
    qdisc.packets = u32_at(value, 8)?.into();
    qdisc.drops = u32_at(value, 12)?;
    qdisc.overlimits = u32_at(value, 16)?;
    qdisc.qlen = u32_at(value, 28)?;
    qdisc.backlog = u32_at(value, 32)?;
    Some(qdisc)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_ne_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk::<8>()?;
    Some(u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// `struct tcmsg` of interface 7, handle 8001:, at the root, and a kind.
    fn message(stats: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = words(&[0, 7, 0x8001_0000, ROOT, 2]);
        bytes.extend(attribute(KIND, b"tbf\0"));
        bytes.extend(stats.concat());
        bytes
    }

    fn basic(bytes: u64, packets: u32) -> Vec<u8> {
        let mut value = bytes.to_ne_bytes().to_vec();
        value.extend(packets.to_ne_bytes());
        value
    }

    #[test]
    fn nested_counters_are_read() {
        let queue = words(&[1, 2, 3, 4, 5]);
        let nested = [attribute(BASIC, &basic(1000, 10)), attribute(QUEUE, &queue)].concat();
        let qdisc = parse(&message(&[attribute(STATS2, &nested)])).unwrap();
        assert_eq!((qdisc.index, qdisc.kind.as_str()), (7, "tbf"));
        assert!(qdisc.is_root());
        assert_eq!((qdisc.packets, qdisc.bytes), (10, 1000));
        assert_eq!((qdisc.qlen, qdisc.backlog, qdisc.drops), (1, 2, 3));
        assert_eq!((qdisc.requeues, qdisc.overlimits), (Some(4), 5));
    }

    #[test]
    fn the_long_count_of_packets_is_preferred() {
        let long = (1u64 << 32) + 10;
        let nested = [
            attribute(BASIC, &basic(1000, 10)),
            attribute(PACKETS64, &long.to_ne_bytes()),
        ];
        let qdisc = parse(&message(&[attribute(STATS2, &nested.concat())])).unwrap();
        assert_eq!(qdisc.packets, long);
    }

    #[test]
    fn the_flat_structure_of_old_kernels_is_read() {
        let mut old = basic(1000, 10);
        old.extend(words(&[3, 5, 0, 0, 1, 2]));
        let qdisc = parse(&message(&[attribute(STATS, &old)])).unwrap();
        assert_eq!((qdisc.packets, qdisc.drops, qdisc.overlimits), (10, 3, 5));
        assert_eq!((qdisc.qlen, qdisc.backlog, qdisc.requeues), (1, 2, None));
    }

    #[test]
    fn truncated_or_wrong_bytes_never_panic() {
        let nested = [
            attribute(BASIC, &basic(1, 2)),
            attribute(QUEUE, &words(&[1; 5])),
        ]
        .concat();
        let whole = message(&[
            attribute(STATS, &words(&[1; 9])),
            attribute(STATS2, &nested),
        ]);
        for length in 0..whole.len() {
            let _ = parse(&whole[..length]);
        }
        for at in 0..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 0xff;
            let _ = parse(&wrong);
        }
    }
}

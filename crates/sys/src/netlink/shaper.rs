//! The rate limit of an interface's queueing disciplines.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::TcMessage;

use super::topology::{attributes, number, text};
use super::{Netlink, NetlinkError};

/// `struct tcmsg`.
const TC_HEADER_SIZE: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// `TC_H_ROOT` (include/uapi/linux/pkt_sched.h).
const ROOT: u32 = 0xffff_ffff;
/// `struct tc_ratespec`, whose last member is the rate in bytes per second.
const RATESPEC_SIZE: usize = 12;
/// `struct tc_netem_qopt`, before netem's attributes.
const NETEM_SIZE: usize = 24;
/// Maximum number of ancestors of a class that are read.
const DEPTH: usize = 8;

/// A queueing discipline, or a class of one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Node {
    index: u32,
    handle: u32,
    parent: u32,
    kind: String,
    /// Rate in bits per second.
    rate: Option<u64>,
    /// HTB: minor number of the class for packets that no filter classifies.
    default_class: Option<u32>,
}

impl Netlink {
    /// Returns the rate, in bits per second, that the queueing disciplines of an interface allow:
    /// that of the root (`tbf`, `netem`, `cake`; for `htb` the ceiling of its default class, else
    /// of its largest), or of the only one below it that has a rate.
    pub fn shaped_rate(&self, index: u32) -> Result<Option<u64>, NetlinkError> {
        let action = |netlink: &Self| {
            format!(
                "list the queueing disciplines of {}",
                netlink.describe_link(index)
            )
        };
        let message = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
        let mut nodes = self.dump(message, |_, payload| parse(payload), action)?;
        nodes.retain(|node| node.index == index);
        let Some(root) = nodes.iter().find(|node| node.parent == ROOT) else {
            return Ok(None);
        };
        if root.kind == "htb" {
            let message = TcMessage::with_index(index.cast_signed());
            let message = RouteNetlinkMessage::GetTrafficClass(message);
            let classes = self.dump(message, |_, payload| parse(payload), action)?;
            return Ok(ceiling(root, &classes));
        }
        let mut below = nodes.iter().filter(|node| node.parent != ROOT);
        let mut below = below.by_ref().filter_map(|node| node.rate);
        Ok(root
            .rate
            .or_else(|| below.next().filter(|_| below.next().is_none())))
    }
}

/// Returns the ceiling of HTB's default class and of its ancestors, or that of the largest class if
/// there is no default.
fn ceiling(root: &Node, classes: &[Node]) -> Option<u64> {
    let classes: Vec<&Node> = classes
        .iter()
        .filter(|class| class.handle & 0xffff_0000 == root.handle)
        .collect();
    let by_handle = |handle: u32| classes.iter().find(|class| class.handle == handle);
    let default = root.default_class.filter(|minor| *minor != 0);
    let Some(mut class) = default.and_then(|minor| by_handle(root.handle | minor)) else {
        return classes.iter().filter_map(|class| class.rate).max();
    };
    let mut rate = class.rate;
    for _ in 0..DEPTH {
        let Some(above) = by_handle(class.parent) else {
            break;
        };
        class = above;
        rate = [rate, class.rate].into_iter().flatten().min();
    }
    rate
}

/// Parses `RTM_NEWQDISC` or `RTM_NEWTCLASS`.
fn parse(payload: &[u8]) -> Option<Node> {
    let word = |at: usize| number(payload.get(at..)?);
    let mut node = Node {
        index: word(4)?,
        handle: word(8)?,
        parent: word(12)?,
        ..Node::default()
    };
    let mut options: &[u8] = &[];
    for (attribute, value) in attributes(payload.get(TC_HEADER_SIZE..)?) {
        match attribute {
            TCA_KIND => node.kind = text(value),
            TCA_OPTIONS => options = value,
            _ => {}
        }
    }
    let (narrow, wide) = match node.kind.as_str() {
        // TCA_TBF_PARMS begins with the rate; TCA_TBF_RATE64.
        "tbf" => (part(options, 1, 0), part64(options, 4)),
        // TCA_HTB_PARMS: rate, then ceiling; TCA_HTB_CEIL64.
        "htb" => {
            // TCA_HTB_INIT, struct tc_htb_glob: version, quantum, default class.
            let init = attributes(options).find(|(kind, _)| *kind == 2);
            node.default_class = init.and_then(|(_, value)| number(value.get(8..)?));
            (part(options, 1, RATESPEC_SIZE), part64(options, 7))
        }
        // TCA_CAKE_BASE_RATE64.
        "cake" => (None, part64(options, 2)),
        // TCA_NETEM_RATE is a number without a ratespec; TCA_NETEM_RATE64.
        "netem" => {
            let options = options.get(NETEM_SIZE..).unwrap_or(&[]);
            let narrow = attributes(options).find(|(kind, _)| *kind == 6);
            let narrow = narrow.and_then(|(_, value)| number(value));
            (narrow, part64(options, 8))
        }
        _ => (None, None),
    };
    let bytes = wide.or(narrow.map(u64::from));
    node.rate = bytes.filter(|bytes| *bytes > 0);
    node.rate = node.rate.map(|bytes| bytes.saturating_mul(8));
    Some(node)
}

/// Returns the rate of the `tc_ratespec` at an offset of an attribute.
fn part(options: &[u8], wanted: u16, offset: usize) -> Option<u32> {
    let (_, value) = attributes(options).find(|(kind, _)| *kind == wanted)?;
    number(value.get(offset + RATESPEC_SIZE - 4..)?)
}

fn part64(options: &[u8], wanted: u16) -> Option<u64> {
    let (_, value) = attributes(options).find(|(kind, _)| *kind == wanted)?;
    Some(u64::from_ne_bytes(*value.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::test_namespace::{NetNs, namespace};
    use crate::testing::skip;

    /// Returns the rate of interface `v0` after these commands of tc(8).
    fn rate_after(commands: &[&str]) -> Option<Option<u64>> {
        let namespace = namespace()?;
        let netlink = namespace.netlink().unwrap();
        let index = netlink.create_veth("v0", "v1", None).unwrap();
        for command in commands {
            if let Err(reason) = tc(&namespace, command) {
                skip(&reason);
                return None;
            }
        }
        Some(netlink.shaped_rate(index).unwrap())
    }

    fn tc(namespace: &NetNs, arguments: &str) -> Result<(), String> {
        let mut command = Command::new("tc");
        command.args(arguments.split_whitespace());
        let child = namespace.spawn_command(command.stdout(std::process::Stdio::null()));
        let mut child = child.map_err(|error| format!("no tc (package iproute2): {error}"))?;
        match child.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(format!("tc {arguments}: {other:?}: the kernel lacks it?")),
        }
    }

    #[test]
    fn the_rate_of_a_tbf_is_the_one_set() {
        let set = ["qdisc add dev v0 root tbf rate 50mbit burst 32kb latency 50ms"];
        let Some(rate) = rate_after(&set) else { return };
        assert_eq!(rate, Some(50_000_000));
    }

    #[test]
    fn a_rate_beyond_32_bits_of_bytes_is_read() {
        let set = ["qdisc add dev v0 root tbf rate 40gbit burst 1mb latency 50ms"];
        let Some(rate) = rate_after(&set) else { return };
        assert_eq!(rate, Some(40_000_000_000));
    }

    #[test]
    fn the_rate_of_an_htb_is_the_ceiling_above_its_default_class() {
        let set = [
            "qdisc add dev v0 root handle 1: htb default 20",
            "class add dev v0 parent 1: classid 1:1 htb rate 30mbit ceil 30mbit",
            "class add dev v0 parent 1:1 classid 1:10 htb rate 1mbit ceil 5mbit",
            "class add dev v0 parent 1:1 classid 1:20 htb rate 1mbit ceil 90mbit",
        ];
        let Some(rate) = rate_after(&set) else { return };
        assert_eq!(rate, Some(30_000_000));
    }

    #[test]
    fn without_a_shaper_there_is_no_rate() {
        let set = ["qdisc add dev v0 root pfifo limit 100"];
        let Some(rate) = rate_after(&set) else { return };
        assert_eq!(rate, None);
    }

    #[test]
    fn truncated_messages_have_no_rate() {
        assert_eq!(parse(&[0; 19]), None);
        assert_eq!(parse(&[0; 20]).unwrap().rate, None);
        assert_eq!(part(&[8, 0, 1, 0, 1, 2, 3, 4], 1, 0), None);
    }
}

//! Policy routing rules for a tunnel that carries the default route but not its own packets. The
//! tunnel's own packets have a firewall mark, and all others use the tunnel's table
//! ([`Rule::unless_marked`]). Routes of the main table that are more specific than a default route
//! stay in effect ([`Rule::suppress_default`]). The rules are those of wg-quick(8).

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NlasIterator, Parseable};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage};

use super::{Family, Netlink, NetlinkError, TABLE_MAIN};

/// `struct fib_rule_hdr`.
const RULE_HEADER_SIZE: usize = 12;

/// A rule that sends packets to a routing table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Packets of this family.
    pub family: Family,
    /// Priority: rules are tried from the lowest number on. `None` puts it before all rules after
    /// that of the local table.
    pub priority: Option<u32>,
    /// Firewall mark of the packets.
    pub fwmark: Option<u32>,
    /// Bits of the mark that are compared; `None`: all.
    pub fwmask: Option<u32>,
    /// Inverts the condition: the rule applies to packets that do not match.
    pub invert: bool,
    /// The table to look up.
    pub table: u32,
    /// Ignores routes with a prefix of this length or shorter, and continues with the next rule.
    pub suppress_prefix_length: Option<u32>,
}

impl Rule {
    /// A rule by which packets without `mark` use `table`.
    pub fn unless_marked(family: Family, mark: u32, table: u32) -> Self {
        Self {
            family,
            priority: None,
            fwmark: Some(mark),
            fwmask: None,
            invert: true,
            table,
            suppress_prefix_length: None,
        }
    }

    /// A rule by which all packets use the main table, except its default route.
    pub fn suppress_default(family: Family) -> Self {
        Self {
            family,
            priority: None,
            fwmark: None,
            fwmask: None,
            invert: false,
            table: TABLE_MAIN,
            suppress_prefix_length: Some(0),
        }
    }

    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header = RuleHeader {
            family: self.family.into(),
            table: u8::try_from(self.table).unwrap_or(0),
            action: RuleAction::ToTable,
            flags: if self.invert {
                RuleFlags::Invert
            } else {
                RuleFlags::empty()
            },
            ..RuleHeader::default()
        };
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Table(self.table));
        attributes.extend(self.priority.map(RuleAttribute::Priority));
        attributes.extend(self.fwmark.map(RuleAttribute::FwMark));
        attributes.extend(self.fwmask.map(RuleAttribute::FwMask));
        attributes.extend(
            self.suppress_prefix_length
                .map(RuleAttribute::SuppressPrefixLen),
        );
        message
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rule ", self.family)?;
        if let Some(mark) = self.fwmark {
            write!(
                f,
                "{}fwmark {mark:#x} ",
                if self.invert { "not " } else { "" }
            )?;
        }
        write!(f, "lookup {}", self.table)?;
        if let Some(length) = self.suppress_prefix_length {
            write!(f, " suppress_prefixlength {length}")?;
        }
        Ok(())
    }
}

impl Netlink {
    /// Adds a rule. It is an error if an equal one exists.
    pub fn add_rule(&self, rule: &Rule) -> Result<(), NetlinkError> {
        self.change(
            RouteNetlinkMessage::NewRule(rule.message()),
            NLM_F_CREATE | NLM_F_EXCL,
            |_| format!("add the {rule}"),
        )
    }

    /// Removes the first rule that matches all given fields.
    pub fn delete_rule(&self, rule: &Rule) -> Result<(), NetlinkError> {
        self.change(RouteNetlinkMessage::DelRule(rule.message()), 0, |_| {
            format!("remove the {rule}")
        })
    }

    /// Returns the rules of a family that look up a table, in the order in which the kernel tries
    /// them: none if the kernel has no policy routing.
    pub fn rules(&self, family: Family) -> Result<Vec<Rule>, NetlinkError> {
        let mut message = RuleMessage::default();
        message.header.family = family.into();
        let rules = self.dump(
            RouteNetlinkMessage::GetRule(message),
            |_, payload| parse_rule(family, payload),
            |_| format!("list the {family} rules"),
        );
        let mut rules = none_if_unsupported(rules)?;
        rules.sort_by_key(|rule| rule.priority);
        Ok(rules)
    }
}

/// Takes a kernel without rules for one without any. Without `CONFIG_FIB_RULES` nothing answers
/// `RTM_GETRULE`: `EOPNOTSUPP` (`rtnetlink_rcv_msg()`, net/core/rtnetlink.c). With it, but without
/// `CONFIG_IP_MULTIPLE_TABLES` or `CONFIG_IPV6_MULTIPLE_TABLES`, that family has no rules:
/// `EAFNOSUPPORT` (`fib_nl_dumprule()`, net/core/fib_rules.c). To add a rule is still an error.
fn none_if_unsupported(rules: Result<Vec<Rule>, NetlinkError>) -> Result<Vec<Rule>, NetlinkError> {
    match rules {
        Err(error) if error.is_unsupported() => Ok(Vec::new()),
        rules => rules,
    }
}

fn parse_rule(family: Family, payload: &[u8]) -> Option<Rule> {
    let header = RuleHeader::parse(payload).ok()?;
    if header.action != RuleAction::ToTable {
        return None;
    }
    let mut rule = Rule {
        family,
        priority: Some(0), // the kernel leaves out a zero
        fwmark: None,
        fwmask: None,
        invert: header.flags.contains(RuleFlags::Invert),
        table: header.table.into(),
        suppress_prefix_length: None,
    };
    for nla in NlasIterator::new(payload.get(RULE_HEADER_SIZE..)?).map_while(Result::ok) {
        match RuleAttribute::parse(&nla) {
            Ok(RuleAttribute::Priority(priority)) => rule.priority = Some(priority),
            Ok(RuleAttribute::FwMark(mark)) => rule.fwmark = Some(mark),
            Ok(RuleAttribute::FwMask(mask)) if mask != u32::MAX => rule.fwmask = Some(mask),
            Ok(RuleAttribute::Table(table)) => rule.table = table,
            // The kernel reports -1 for "none".
            Ok(RuleAttribute::SuppressPrefixLen(length)) if length != u32::MAX => {
                rule.suppress_prefix_length = Some(length);
            }
            _ => {}
        }
    }
    Some(rule)
}

#[cfg(test)]
mod tests {
    use std::io;

    use nix::errno::Errno;

    use super::super::error::Fault;
    use super::*;

    /// Returns the rules after a dump that ended with a fault.
    fn after(fault: Fault) -> Result<Vec<Rule>, NetlinkError> {
        none_if_unsupported(Err(fault.into_error("list the IPv4 rules".into())))
    }

    fn refused(errno: Errno) -> Fault {
        Fault::Errno {
            errno: errno as i32,
            detail: None,
        }
    }

    #[test]
    fn a_kernel_without_policy_routing_has_no_rules() {
        assert_eq!(after(refused(Errno::EOPNOTSUPP)).unwrap(), []);
        assert_eq!(after(refused(Errno::EAFNOSUPPORT)).unwrap(), []);
        let untranslated = io::Error::from_raw_os_error(Errno::EOPNOTSUPP as i32);
        assert_eq!(after(Fault::Io(untranslated)).unwrap(), []);
    }

    #[test]
    fn another_failure_of_a_dump_is_an_error() {
        assert!(after(refused(Errno::EPERM)).is_err());
        assert!(after(refused(Errno::EINVAL)).is_err());
        assert!(after(Fault::Io(io::ErrorKind::BrokenPipe.into())).is_err());
        assert!(after(Fault::Interrupted).is_err());
    }
}

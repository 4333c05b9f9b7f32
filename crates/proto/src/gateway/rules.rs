//! Rules of a device for remotes and services: `WHO [WHAT]`, for instance `10.77.0.0/24
//! tcp/22,8000-8010`.

use ipnet::IpNet;
use seikan_wire::ip::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Ranges of ports in one rule at most.
const MAX_RANGES: usize = 16;

/// Allowed traffic: a network and a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    remote: Option<IpNet>,
    service: Service,
}

/// Which traffic a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Service {
    Any,
    /// ICMP, ICMPv6.
    Icmp,
    /// TCP or UDP, by its IANA number; without ranges every port.
    Ports(u8, Vec<RangeInclusive<u16>>),
}

/// The input of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The overlay address at the other end from the device.
    pub remote: IpAddr,
    /// The transport protocol, by its IANA number.
    pub protocol: u8,
    /// The port that a service listens on; `None` where there are no ports.
    pub port: Option<u16>,
}

impl Rule {
    /// Whether the rule allows the traffic.
    pub fn allows(&self, subject: &Subject) -> bool {
        self.remote.is_none_or(|net| net.contains(&subject.remote))
            && match &self.service {
                Service::Any => true,
                Service::Icmp => matches!(subject.protocol, PROTO_ICMP | PROTO_ICMPV6),
                Service::Ports(protocol, ranges) => {
                    *protocol == subject.protocol
                        && (ranges.is_empty()
                            || subject
                                .port
                                .is_some_and(|port| ranges.iter().any(|r| r.contains(&port))))
                }
            }
    }
}

/// Why a text is no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// No text at all, or more than two words.
    #[error("has {0} words; write WHO, or WHO and WHAT, as in `10.77.0.0/24 tcp/22`")]
    Words(usize),
    /// The first word.
    #[error("`{0}` is not an address; write `any`, an address, or a prefix such as 10.77.0.0/24")]
    Address(String),
    /// The second word.
    #[error(
        "`{0}` is not a service; write `any`, `icmp`, `tcp`, `udp`, or ports as in `tcp/22,8000-8010`"
    )]
    Service(String),
    /// Too much for one rule.
    #[error("has more than {MAX_RANGES} port ranges; write two rules")]
    Ranges,
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Rule, RuleError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (remote, service) = match words[..] {
            [remote] => (remote, "any"),
            [remote, service] => (remote, service),
            _ => return Err(RuleError::Words(words.len())),
        };
        let remote = match remote {
            "any" => None,
            remote => Some(
                remote
                    .parse::<IpNet>()
                    .or_else(|_| remote.parse::<IpAddr>().map(IpNet::from))
                    .map_err(|_| RuleError::Address(remote.to_owned()))?
                    .trunc(),
            ),
        };
        Ok(Rule {
            remote,
            service: parse_service(service)?,
        })
    }
}

fn parse_service(text: &str) -> Result<Service, RuleError> {
    let wrong = || RuleError::Service(text.to_owned());
    let (name, ports) = match text.split_once('/') {
        Some((name, ports)) => (name, Some(ports)),
        None => (text, None),
    };
    let protocol = match (name, ports) {
        ("any", None) => return Ok(Service::Any),
        ("icmp", None) => return Ok(Service::Icmp),
        ("tcp", _) => PROTO_TCP,
        ("udp", _) => PROTO_UDP,
        _ => return Err(wrong()),
    };
    let mut ranges = Vec::new();
    for part in ports.into_iter().flat_map(|ports| ports.split(',')) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let port = |text: &str| text.parse::<u16>().map_err(|_| wrong());
        let range = port(first)?..=port(last)?;
        if range.is_empty() {
            return Err(wrong());
        }
        if ranges.len() == MAX_RANGES {
            return Err(RuleError::Ranges);
        }
        ranges.push(range);
    }
    Ok(Service::Ports(protocol, ranges))
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remote {
            Some(net) if net.prefix_len() == net.max_prefix_len() => write!(f, "{}", net.addr())?,
            Some(net) => write!(f, "{net}")?,
            None => f.write_str("any")?,
        }
        let (protocol, ranges) = match &self.service {
            Service::Any => return Ok(()),
            Service::Icmp => return f.write_str(" icmp"),
            Service::Ports(protocol, ranges) => (*protocol, ranges),
        };
        f.write_str(if protocol == PROTO_TCP {
            " tcp"
        } else {
            " udp"
        })?;
        for (i, range) in ranges.iter().enumerate() {
            f.write_str(if i == 0 { "/" } else { "," })?;
            write!(f, "{}", range.start())?;
            if range.start() != range.end() {
                write!(f, "-{}", range.end())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(remote: &str, protocol: u8, port: u16) -> Subject {
        Subject {
            remote: remote.parse().unwrap(),
            protocol,
            port: Some(port),
        }
    }

    #[test]
    fn address_and_service_must_both_match() {
        let rule: Rule = "10.77.0.0/24 tcp/22,8000-8010".parse().unwrap();
        assert!(rule.allows(&subject("10.77.0.9", PROTO_TCP, 22)));
        assert!(rule.allows(&subject("10.77.0.9", PROTO_TCP, 8010)));
        assert!(!rule.allows(&subject("10.77.0.9", PROTO_TCP, 8011)));
        assert!(!rule.allows(&subject("10.77.0.9", PROTO_UDP, 22)));
        assert!(!rule.allows(&subject("10.77.1.9", PROTO_TCP, 22)));
        assert!(!rule.allows(&subject("fd77::9", PROTO_TCP, 22)));
    }

    #[test]
    fn a_rule_for_ports_does_not_allow_packets_without_ports() {
        let rule: Rule = "any tcp/22".parse().unwrap();
        let fragment = Subject {
            port: None,
            ..subject("10.77.0.9", PROTO_TCP, 0)
        };
        assert!(!rule.allows(&fragment));
        assert!("any tcp".parse::<Rule>().unwrap().allows(&fragment));
    }

    #[test]
    fn icmp_is_that_of_either_family() {
        let rule: Rule = "any icmp".parse().unwrap();
        assert!(rule.allows(&subject("10.77.0.9", PROTO_ICMP, 0)));
        assert!(rule.allows(&subject("fd77::9", PROTO_ICMPV6, 0)));
        assert!(!rule.allows(&subject("10.77.0.9", PROTO_TCP, 0)));
    }

    #[test]
    fn rules_round_trip() {
        for text in [
            "any",
            "10.77.0.0/24",
            "10.77.0.9 udp",
            "fd77::/64 tcp/22,8000-8010",
            "any icmp",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_wrong_word_is_named() {
        let error = |text: &str| text.parse::<Rule>().unwrap_err();
        assert_eq!(error(""), RuleError::Words(0));
        assert_eq!(error("10.0.0.1 tcp 22"), RuleError::Words(3));
        assert_eq!(error("10.0.0"), RuleError::Address("10.0.0".into()));
        for service in ["tcp/", "tcp/70000", "tcp/9-8", "sctp", "icmp/8"] {
            assert_eq!(
                error(&format!("any {service}")),
                RuleError::Service(service.into())
            );
        }
        let many = (1..=17)
            .map(|p| p.to_string())
            .collect::<Vec<_>>()
            .join(",");
        assert_eq!(error(&format!("any tcp/{many}")), RuleError::Ranges);
    }
}

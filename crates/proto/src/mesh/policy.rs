//! The access policy of a mesh.
//!
//! An administrator writes one rule per line; `#` begins a comment:
//!
//! ```text
//! # from    -> to         service
//! allow tag:ops -> *       *
//! allow *       -> tag:web tcp/443
//! allow laptop  -> tag:db  tcp/5432-5433
//! ```
//!
//! FROM and TO are `*`, a tag, a member's name, or a device's name with that of its gateway, as in
//! `printer.site-a`. Devices are subjects of their own: a rule for a member is not one for the
//! devices behind it, and `*` is all members and devices. SERVICE is `*`, `icmp`, `tcp`, `udp`, or a port
//! or range of TCP or UDP. Every line is one rule, so an error has its line, and a decision names
//! the rule as written.
//!
//! Without any rule, two members may talk if they have a tag in common, or if neither has a tag.
//! From the first rule on, only rules allow traffic, for members with and without tags. Rules only
//! add, so their order does not matter, and a member that lacks a rule is stricter. The receiver
//! enforces the policy on the traffic that a member initiates; [`crate::filter`] defines which
//! packets are replies. A member is sent the rules that name it, and the number of others
//! ([`Policy::concerning`]).

mod groups;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Device, DeviceName, MAX_DEVICES, MAX_TAGS, Member, Name, NameError, PartyName};
use crate::filter::{Filter, Open};
pub use groups::Receivers;

/// Maximum number of rules of a policy.
pub const MAX_RULES: usize = 1024;
/// Maximum size of the text of a policy in bytes.
pub const MAX_POLICY: usize = 256 << 10;
/// The policy of a mesh. In messages it is a list of rules as text, and the number of rules that
/// were withheld. Rules beyond [`MAX_RULES`] are ignored. Rules that cannot be parsed allow
/// nothing; they may be from a later version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Encoded", into = "Encoded")]
pub struct Policy {
    rules: Vec<Rule>,
    /// Unknown rules as text, so that passing the policy on loses nothing.
    unknown: Vec<String>,
    /// Number of rules between other members, which this member was not sent.
    untold: usize,
}

/// A policy in messages.
#[derive(Serialize, Deserialize)]
struct Encoded {
    rules: Vec<String>,
    #[serde(default)]
    untold: usize,
}

/// The members and devices that some may talk to in either direction, as far as the rules say:
/// [`Policy::sight`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// All.
    Everybody,
    /// Members and devices with one of these tags or names.
    Some {
        /// Tags.
        tags: BTreeSet<Name>,
        /// Names.
        names: BTreeSet<PartyName>,
        /// Also those without tags. Set if there are no rules, so that tags decide.
        untagged: bool,
    },
}

impl Sight {
    /// Whether it includes this member or device.
    pub fn has(&self, party: &Party) -> bool {
        match self {
            Sight::Everybody => true,
            Sight::Some {
                tags,
                names,
                untagged,
            } => {
                let is_tagged = party.tags.iter().any(|tag| tags.contains(tag));
                let is_untagged = *untagged && party.tags.is_empty();
                is_tagged || is_untagged || names.contains(&party.full_name())
            }
        }
    }
}

/// A rule that allows something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The initiating members.
    pub from: Selector,
    /// The members that they may talk to.
    pub to: Selector,
    /// The allowed service.
    pub service: Service,
}

/// Selects members and devices, at one end of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// Every member and device.
    Any,
    /// Members and devices with this tag.
    Tag(Name),
    /// The member with this name, without the devices behind it, or the device.
    Named(PartyName),
}

/// The service of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// All traffic, including protocols other than TCP, UDP and ICMP.
    Any,
    /// ICMP and ICMPv6.
    Icmp,
    /// These TCP ports.
    Tcp(RangeInclusive<u16>),
    /// These UDP ports.
    Udp(RangeInclusive<u16>),
}

/// The subject of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// A connection to this TCP port.
    Tcp(u16),
    /// Datagrams to this UDP port.
    Udp(u16),
    /// ICMP or ICMPv6.
    Icmp,
    /// Any other protocol.
    Other,
}

/// A member or a device, as input to the policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Party {
    /// Its name.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub name: Name,
    /// Its tags, at most 16.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<String>"))]
    pub tags: Vec<Name>,
    /// The member that a device is behind; absent for a member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub gateway: Option<Name>,
}

impl Party {
    /// The name as rules have it.
    pub fn full_name(&self) -> PartyName {
        let name = self.name.clone();
        match self.gateway.clone() {
            Some(gateway) => PartyName::Device(DeviceName {
                device: name,
                gateway,
            }),
            None => PartyName::Member(name),
        }
    }

    /// Whether it has this name.
    fn is_called(&self, name: &PartyName) -> bool {
        match name {
            PartyName::Member(name) => self.gateway.is_none() && self.name == *name,
            PartyName::Device(name) => {
                self.gateway.as_ref() == Some(&name.gateway) && self.name == name.device
            }
        }
    }
}

/// Whether a member may initiate traffic to another, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Both have this tag, and there are no rules.
    CommonTag(Name),
    /// Neither has any tag, and there are no rules.
    NoTags,
    /// A rule allows it.
    Rule(Rule),
    /// Nothing allows it.
    Denied,
}

/// The access rules of a host: its own name and tags, and the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The host itself. Unknown if the coordinator knows no policy; everything is allowed then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<Party>,
    /// Approved devices behind this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    /// The rules; none until the coordinator has sent some.
    #[serde(default)]
    pub policy: Policy,
}

/// Why the text of a policy is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A line is invalid.
    #[error("line {line}: {error}")]
    Line {
        /// Line number, from 1.
        line: usize,
        /// Why it is invalid.
        error: RuleError,
    },
    /// Too many rules.
    #[error(
        "line {0}: too many rules; a policy has at most {MAX_RULES}: name tags instead of members"
    )]
    TooMany(usize),
    /// Too long.
    #[error("policy of {0} bytes, more than {MAX_POLICY}")]
    TooLong(usize),
}

/// Why a text is not a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Not in the form of a rule.
    #[error("not a rule; write `allow FROM -> TO PORTS`, as in `allow tag:ops -> tag:web tcp/443`")]
    Words,
    /// Not a selector.
    #[error(
        "{text:?} is neither a tag nor a member: {error}; write `*`, a tag as in `tag:web`, a member's name, or a \
         device's as in `printer.site-a`"
    )]
    Selector {
        /// The text.
        text: String,
        /// Why it is not a name.
        error: NameError,
    },
    /// Not a service.
    #[error(
        "{0:?} is not a service; write `*`, `icmp`, `tcp`, `udp`, a port as in `tcp/443`, or a range as in `udp/8000-8999`"
    )]
    Service(String),
    /// A range that ends before it begins.
    #[error("port range {0:?} is reversed; write the lower port first")]
    Backwards(String),
}

/// Why a text cannot be decided on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a service; write a port as in `tcp/443` or `udp/53`, `icmp`, or `*` for other protocols"
)]
pub struct TrafficError(String);

impl Policy {
    /// Parses the text of an administrator.
    ///
    /// # Errors
    /// [`PolicyError`]: the first invalid line, or too many rules.
    pub fn parse(text: &str) -> Result<Policy, PolicyError> {
        if text.len() > MAX_POLICY {
            return Err(PolicyError::TooLong(text.len()));
        }
        let mut policy = Policy::default();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let rule = line.split('#').next().unwrap_or_default().trim();
            if rule.is_empty() {
                continue;
            }
            if policy.rules.len() == MAX_RULES {
                return Err(PolicyError::TooMany(line_number));
            }
            policy
                .rules
                .push(rule.parse().map_err(|error| PolicyError::Line {
                    line: line_number,
                    error,
                })?);
        }
        Ok(policy)
    }

    /// The rules, in the order in which they were written.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Number of rules that this version does not know.
    pub fn unknown(&self) -> usize {
        self.unknown.len()
    }

    /// Number of rules that were withheld because they name neither this member nor its tags.
    pub fn untold(&self) -> usize {
        self.untold
    }

    /// Whether there are no rules, so that tags decide.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.unknown.is_empty() && self.untold == 0
    }

    /// The part of the policy for a member and the devices behind it: the rules that apply to them,
    /// and the number of others.
    pub fn concerning(&self, parties: &[Party]) -> Policy {
        let is_one = |selector: &Selector| parties.iter().any(|party| selector.is(party));
        let concerns = |rule: &&Rule| is_one(&rule.from) || is_one(&rule.to);
        let rules: Vec<Rule> = self.rules.iter().filter(concerns).cloned().collect();
        Policy {
            untold: self.untold + self.rules.len() - rules.len(),
            rules,
            unknown: self.unknown.clone(),
        }
    }

    /// The members and devices that one of these may talk to, whichever end initiates.
    pub fn sight(&self, parties: &[Party]) -> Sight {
        let (mut tags, mut names) = (BTreeSet::new(), BTreeSet::new());
        if self.is_empty() {
            tags.extend(parties.iter().flat_map(|party| &party.tags).cloned());
            return Sight::Some {
                tags,
                names,
                untagged: parties.iter().any(|party| party.tags.is_empty()),
            };
        }
        for rule in &self.rules {
            for (own, other) in [(&rule.from, &rule.to), (&rule.to, &rule.from)] {
                if !parties.iter().any(|party| own.is(party)) {
                    continue;
                }
                match other {
                    Selector::Any => return Sight::Everybody,
                    Selector::Tag(tag) => tags.insert(tag.clone()),
                    Selector::Named(name) => names.insert(name.clone()),
                };
            }
        }
        Sight::Some {
            tags,
            names,
            untagged: false,
        }
    }

    /// Decides whether `from` may initiate this traffic to `to`. If several rules allow it, returns
    /// the first.
    pub fn decide(&self, from: &Party, to: &Party, traffic: Traffic) -> Decision {
        if self.is_empty() {
            return by_tags(from, to).unwrap_or(Decision::Denied);
        }
        let rule = self
            .between(from, to)
            .find(|rule| rule.service.covers(traffic));
        rule.map_or(Decision::Denied, |rule| Decision::Rule(rule.clone()))
    }

    /// The filter for traffic from `from` to `to`.
    pub fn filter(&self, from: &Party, to: &Party) -> Filter {
        if self.is_empty() && by_tags(from, to).is_some() {
            return Filter::All;
        }
        Policy::filter_of(self.between(from, to))
    }

    /// Everything that these rules allow together, to whom all of them apply.
    pub fn filter_of<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Filter {
        let (mut icmp, mut tcp, mut udp) = (false, Vec::new(), Vec::new());
        for rule in rules {
            match &rule.service {
                Service::Any => return Filter::All,
                Service::Icmp => icmp = true,
                Service::Tcp(ports) => tcp.push(ports.clone()),
                Service::Udp(ports) => udp.push(ports.clone()),
            }
        }
        Filter::Only(Open {
            icmp,
            tcp: tcp.into_iter().collect(),
            udp: udp.into_iter().collect(),
        })
    }

    fn between(&self, from: &Party, to: &Party) -> impl Iterator<Item = &Rule> {
        let rules = self.rules.iter();
        rules.filter(move |rule| rule.from.is(from) && rule.to.is(to))
    }
}

/// The decision without any rule.
fn by_tags(from: &Party, to: &Party) -> Option<Decision> {
    if from.tags.is_empty() && to.tags.is_empty() {
        return Some(Decision::NoTags);
    }
    let common = from.tags.iter().find(|tag| to.tags.contains(tag));
    common.cloned().map(Decision::CommonTag)
}

impl Access {
    /// The filter for traffic from another member to this host's own addresses.
    pub fn filter(&self, from: &Member) -> Filter {
        match &self.own {
            Some(own) => self.policy.filter(&from.party(), own),
            None => Filter::All,
        }
    }

    /// Applies an update from a coordinator. Returns whether anything changed.
    pub(super) fn take(
        &mut self,
        own: Option<Party>,
        mut devices: Vec<Device>,
        policy: Option<Policy>,
    ) -> bool {
        let mut different = false;
        if let Some(mut own) = own {
            own.tags.truncate(MAX_TAGS);
            devices.truncate(MAX_DEVICES);
            devices.retain(Device::is_within_bounds);
            different |= self.own.as_ref() != Some(&own) || self.devices != devices;
            (self.own, self.devices) = (Some(own), devices);
        }
        if let Some(policy) = policy {
            different |= self.policy != policy;
            self.policy = policy;
        }
        different
    }
}

impl Member {
    /// The member as input to the policy.
    pub fn party(&self) -> Party {
        Party {
            name: self.name.clone(),
            tags: self.tags.clone(),
            gateway: None,
        }
    }

    /// The member and the devices behind it, as input to the policy.
    pub fn parties(&self) -> Vec<Party> {
        let devices = self.devices.iter();
        let devices = devices.map(|device| device.party(&self.name));
        std::iter::once(self.party()).chain(devices).collect()
    }
}

impl Decision {
    /// Whether the traffic is allowed.
    pub fn is_allowed(&self) -> bool {
        *self != Decision::Denied
    }
}

impl Selector {
    /// Whether it selects a member or device.
    pub fn is(&self, party: &Party) -> bool {
        match self {
            Selector::Any => true,
            Selector::Tag(tag) => party.tags.contains(tag),
            Selector::Named(name) => party.is_called(name),
        }
    }
}

impl Service {
    fn covers(&self, traffic: Traffic) -> bool {
        match (self, traffic) {
            (Service::Any, _) | (Service::Icmp, Traffic::Icmp) => true,
            (Service::Tcp(ports), Traffic::Tcp(port)) => ports.contains(&port),
            (Service::Udp(ports), Traffic::Udp(port)) => ports.contains(&port),
            _ => false,
        }
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Rule, RuleError> {
        let mut words = text.split_whitespace();
        let mut word = || words.next().ok_or(RuleError::Words);
        let ("allow", from, "->", to, service) = (word()?, word()?, word()?, word()?, word()?)
        else {
            return Err(RuleError::Words);
        };
        if words.next().is_some() {
            return Err(RuleError::Words);
        }
        Ok(Rule {
            from: from.parse()?,
            to: to.parse()?,
            service: service.parse()?,
        })
    }
}

impl FromStr for Selector {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Selector, RuleError> {
        if text == "*" {
            return Ok(Selector::Any);
        }
        let selector = match text.strip_prefix("tag:") {
            Some(tag) => tag.parse().map(Selector::Tag),
            None => text.parse().map(Selector::Named),
        };
        selector.map_err(|error| RuleError::Selector {
            text: text.to_owned(),
            error,
        })
    }
}

impl FromStr for Service {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Service, RuleError> {
        let wrong = || RuleError::Service(text.to_owned());
        let (protocol, ports) = match text.split_once('/') {
            Some((protocol, ports)) => (protocol, Some(ports)),
            None => (text, None),
        };
        let range = match ports {
            None => 0..=u16::MAX,
            Some(ports) => {
                let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
                port(first).ok_or_else(wrong)?..=port(last).ok_or_else(wrong)?
            }
        };
        if range.is_empty() {
            return Err(RuleError::Backwards(text.to_owned()));
        }
        match (protocol, ports) {
            ("*", None) => Ok(Service::Any),
            ("icmp", None) => Ok(Service::Icmp),
            ("tcp", _) => Ok(Service::Tcp(range)),
            ("udp", _) => Ok(Service::Udp(range)),
            _ => Err(wrong()),
        }
    }
}

impl FromStr for Traffic {
    type Err = TrafficError;

    fn from_str(text: &str) -> Result<Traffic, TrafficError> {
        let traffic = match (text, text.split_once('/')) {
            ("icmp", _) => Some(Traffic::Icmp),
            ("*", _) => Some(Traffic::Other),
            (_, Some(("tcp", text))) => port(text).map(Traffic::Tcp),
            (_, Some(("udp", text))) => port(text).map(Traffic::Udp),
            _ => None,
        };
        traffic.ok_or_else(|| TrafficError(text.to_owned()))
    }
}

/// Parses a port of digits only, without a sign.
fn port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allow {} -> {} {}", self.from, self.to, self.service)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Any => f.write_str("*"),
            Selector::Tag(tag) => write!(f, "tag:{tag}"),
            Selector::Named(name) => write!(f, "{name}"),
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (protocol, ports) = match self {
            Service::Any => return f.write_str("*"),
            Service::Icmp => return f.write_str("icmp"),
            Service::Tcp(ports) => ("tcp", ports),
            Service::Udp(ports) => ("udp", ports),
        };
        match (*ports.start(), *ports.end()) {
            (0, u16::MAX) => f.write_str(protocol),
            (first, last) if first == last => write!(f, "{protocol}/{first}"),
            (first, last) => write!(f, "{protocol}/{first}-{last}"),
        }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Traffic::Tcp(port) => write!(f, "tcp/{port}"),
            Traffic::Udp(port) => write!(f, "udp/{port}"),
            Traffic::Icmp => f.write_str("icmp"),
            Traffic::Other => f.write_str("*"),
        }
    }
}

impl From<Encoded> for Policy {
    fn from(encoded: Encoded) -> Policy {
        let mut policy = Policy {
            // Ignored rules count as withheld.
            untold: encoded
                .untold
                .saturating_add(encoded.rules.len().saturating_sub(MAX_RULES)),
            ..Policy::default()
        };
        for text in encoded.rules.into_iter().take(MAX_RULES) {
            match text.parse() {
                Ok(rule) => policy.rules.push(rule),
                Err(_) => policy.unknown.push(text),
            }
        }
        policy
    }
}

impl From<Policy> for Encoded {
    fn from(policy: Policy) -> Encoded {
        let rules = policy.rules.iter().map(ToString::to_string);
        Encoded {
            rules: rules.chain(policy.unknown).collect(),
            untold: policy.untold,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::{Destinations, Filters};
    use std::net::IpAddr;

    fn name(text: &str) -> Name {
        text.parse().expect(text)
    }

    /// A member with the first word as its name and the others as tags.
    fn party(words: &str) -> Party {
        let mut words = words.split_whitespace().map(name);
        Party {
            name: words.next().expect("a name"),
            tags: words.collect(),
            gateway: None,
        }
    }

    fn policy(text: &str) -> Policy {
        Policy::parse(text).expect(text)
    }

    fn decide(text: &str, from: &str, to: &str, traffic: &str) -> bool {
        let traffic = traffic.parse().expect(traffic);
        let decided = policy(text).decide(&party(from), &party(to), traffic);
        decided.is_allowed()
    }

    #[test]
    fn a_rule_is_shown_as_it_is_written() {
        for text in [
            "allow * -> * *",
            "allow tag:ops -> web-1 tcp/443",
            "allow laptop -> tag:web tcp/8000-8999",
            "allow * -> tag:dns udp/53",
            "allow tag:a -> tag:b icmp",
            "allow a -> b tcp",
            "allow a -> b udp/0-1",
            "allow printer.site-a -> tag:b udp/0-1",
        ] {
            assert_eq!(text.parse::<Rule>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn comments_and_empty_lines_are_no_rules() {
        let text = "# all\n\n  allow a -> b *   # for now\n\t\n#allow b -> a *\r\n";
        assert_eq!(
            policy(text).rules(),
            ["allow a -> b *".parse().expect("one")]
        );
    }

    #[test]
    fn an_error_names_its_line_and_the_remedy() {
        for (line, named, right) in [
            ("permit a -> b *", "not a rule", "allow FROM -> TO PORTS"),
            ("allow a b *", "not a rule", "allow FROM -> TO PORTS"),
            ("allow a -> b", "not a rule", "allow FROM -> TO PORTS"),
            (
                "allow a -> b tcp/1 tcp/2",
                "not a rule",
                "allow FROM -> TO PORTS",
            ),
            ("allow a_b -> b *", "a_b", "tag:web"),
            ("allow a -> tag: *", "tag:", "tag:web"),
            ("allow a -> b tcp/65536", "tcp/65536", "tcp/443"),
            ("allow a -> b tcp/", "tcp/", "tcp/443"),
            ("allow a -> b tcp/+80", "tcp/+80", "tcp/443"),
            ("allow a -> b tcp/1-2-3", "tcp/1-2-3", "8000-8999"),
            ("allow a -> b icmp/8", "icmp/8", "icmp"),
            ("allow a -> b */80", "*/80", "tcp/443"),
            ("allow a -> b sctp/80", "sctp/80", "tcp/443"),
            ("allow a -> b udp/9-8", "is reversed", "lower port first"),
        ] {
            let error = Policy::parse(&format!("# a policy\n\n{line}\nallow a -> b *"));
            let error = error.expect_err(line).to_string();
            assert!(error.starts_with("line 3: "), "{error}");
            assert!(error.contains(named) && error.contains(right), "{error}");
        }
    }

    #[test]
    fn a_policy_has_bounds() {
        let most = "allow a -> b *\n".repeat(MAX_RULES);
        assert_eq!(policy(&most).rules().len(), MAX_RULES);
        let more = format!("{most}# one too many:\nallow a -> b *");
        let line = MAX_RULES + 2;
        assert_eq!(Policy::parse(&more), Err(PolicyError::TooMany(line)));
        let long = format!("#{}", "x".repeat(MAX_POLICY));
        assert_eq!(
            Policy::parse(&long),
            Err(PolicyError::TooLong(MAX_POLICY + 1))
        );
        let rules = vec!["allow a -> b *".to_owned(); MAX_RULES + 1];
        let policy = Policy::from(Encoded { rules, untold: 0 });
        assert_eq!((policy.rules().len(), policy.untold()), (MAX_RULES, 1));
    }

    #[test]
    fn without_rules_tags_decide() {
        for (from, to, allowed) in [
            ("a", "b", true),
            ("a web", "b web", true),
            ("a x web", "b web y", true),
            ("a web", "b db", false),
            ("a web", "b", false),
            ("a", "b web", false),
        ] {
            for traffic in ["tcp/80", "udp/53", "icmp", "*"] {
                assert_eq!(decide("", from, to, traffic), allowed, "{from}, {to}");
            }
            let filter = policy("").filter(&party(from), &party(to));
            assert_eq!(filter == Filter::All, allowed, "{from}, {to}");
        }
    }

    #[test]
    fn a_rule_allows_its_selectors_and_service_only() {
        let text = "allow tag:ops -> tag:web tcp/443\nallow laptop -> db udp/8000-8999\nallow * -> tag:web icmp\nallow tag:root -> * *";
        for (from, to, traffic, allowed) in [
            ("a ops", "b web", "tcp/443", true),
            ("a ops", "b web", "tcp/442", false),
            ("a ops", "b web", "tcp/444", false),
            ("a ops", "b web", "udp/443", false),
            ("b web", "a ops", "tcp/443", false),
            ("ops x", "web y", "tcp/443", false),
            ("laptop x", "db y", "udp/8000", true),
            ("laptop x", "db y", "udp/8999", true),
            ("laptop x", "db y", "udp/7999", false),
            ("laptop x", "db y", "udp/9000", false),
            ("other laptop", "x db", "udp/8000", false),
            ("anybody", "b web", "icmp", true),
            ("anybody", "b db", "icmp", false),
            ("a root", "b", "tcp/1", true),
            ("a root", "b db", "*", true),
            ("a ops", "b web", "*", false),
        ] {
            let decided = decide(text, from, to, traffic);
            assert_eq!(decided, allowed, "{from} -> {to} {traffic}");
        }
    }

    #[test]
    fn a_decision_says_why() {
        let why = |policy: &Policy, from: &str, to: &str| {
            policy.decide(&party(from), &party(to), Traffic::Tcp(1))
        };
        let none = Policy::default();
        assert_eq!(why(&none, "a", "b"), Decision::NoTags);
        assert_eq!(why(&none, "a x y", "b z y"), Decision::CommonTag(name("y")));
        assert_eq!(why(&none, "a x", "b"), Decision::Denied);
        let some = policy("allow a -> b tcp/1\nallow * -> b tcp/1");
        let first = "allow a -> b tcp/1".parse().expect("a rule");
        assert_eq!(why(&some, "a x", "b"), Decision::Rule(first));
        assert_eq!(why(&some, "b", "a x"), Decision::Denied);
    }

    #[test]
    fn from_the_first_rule_on_only_rules_allow() {
        // The rule names none of these; a rule of a later version, or a withheld one, counts as
        // well.
        let unknown = |rule: &str| {
            Policy::from(Encoded {
                rules: vec![rule.to_owned()],
                untold: 0,
            })
        };
        let strange = policy("allow strange -> stranger tcp/1");
        let untold = strange.concerning(&[party("a")]);
        for policy in [strange, untold, unknown("forbid c -> d *")] {
            for (from, to) in [("a", "b"), ("a web", "b web"), ("a web", "b db")] {
                for traffic in [Traffic::Tcp(80), Traffic::Icmp, Traffic::Other] {
                    let decided = policy.decide(&party(from), &party(to), traffic);
                    assert_eq!(decided, Decision::Denied, "{from}, {to}");
                }
                assert!(policy.filter(&party(from), &party(to)).is_closed());
                let to = party(to);
                assert!(!policy.sight(&[party(from)]).has(&to));
            }
        }
        // Comments are not rules.
        assert!(policy("# nothing yet\n").is_empty());
    }

    #[test]
    fn a_member_sees_the_members_it_may_talk_to_in_either_direction() {
        let text = "allow tag:ops -> tag:web tcp/443\nallow laptop -> db udp/8000\nallow tag:root -> * icmp";
        let parties = [
            "a ops", "b web", "c web eu", "laptop", "db", "r root", "x", "y eu",
        ];
        for policy in [Policy::default(), policy(text)] {
            for one in parties.map(party) {
                let sight = policy.sight(std::slice::from_ref(&one));
                for other in parties.map(party) {
                    let opens = |from, to| !policy.filter(from, to).is_closed();
                    let talks = opens(&one, &other) || opens(&other, &one);
                    let sees = sight.has(&other);
                    assert_eq!(sees, talks, "{one:?} {other:?}");
                }
            }
        }
    }

    #[test]
    fn a_member_gets_its_rules_and_the_number_of_others() {
        let all =
            policy("allow tag:ops -> tag:web tcp/443\nallow laptop -> db *\nallow * -> dns udp/53");
        let known = |words: &str| {
            let known = all.concerning(&[party(words)]);
            let rules: Vec<String> = known.rules().iter().map(ToString::to_string).collect();
            (rules, known.untold())
        };
        let dns = "allow * -> dns udp/53".to_owned();
        assert_eq!(known("x"), (vec![dns.clone()], 2));
        let db = "allow laptop -> db *".to_owned();
        assert_eq!(known("db"), (vec![db, dns.clone()], 1));
        let web = "allow tag:ops -> tag:web tcp/443".to_owned();
        assert_eq!(known("w web"), (vec![web, dns], 1));
        // Both policies give the same filters.
        for own in ["x", "db", "w web", "o ops", "laptop", "dns"].map(party) {
            let part = all.concerning(std::slice::from_ref(&own));
            for other in ["x", "db", "w web", "o ops", "laptop", "dns"].map(party) {
                assert_eq!(part.filter(&own, &other), all.filter(&own, &other));
                assert_eq!(part.filter(&other, &own), all.filter(&other, &own));
            }
        }
    }

    #[test]
    fn the_filter_agrees_with_the_policy() {
        let policy = policy(
            "allow a -> b tcp/10-20\nallow tag:t -> b tcp/15-30\nallow * -> b tcp/31\nallow a -> * udp/53\nallow c -> b icmp",
        );
        let (from, to) = (party("a t"), party("b u"));
        let Filter::Only(open) = policy.filter(&from, &to) else {
            panic!("not everything is allowed")
        };
        for port in 0..=u16::MAX {
            let tcp = policy.decide(&from, &to, Traffic::Tcp(port)).is_allowed();
            let udp = policy.decide(&from, &to, Traffic::Udp(port)).is_allowed();
            assert_eq!(
                (open.tcp.contains(port), open.udp.contains(port)),
                (tcp, udp),
                "{port}"
            );
        }
        assert!(!open.icmp);
        assert_eq!(open.tcp, std::iter::once(10..=31).collect());
    }

    #[test]
    fn a_rule_of_a_later_version_allows_nothing_and_is_passed_on() {
        let text = r#"{"rules":["allow a -> b tcp/1","forbid c -> d *"],"untold":3}"#;
        let policy: Policy = serde_json::from_str(text).expect("a policy");
        let counts = (policy.rules().len(), policy.unknown(), policy.untold());
        assert_eq!(counts, (1, 1, 3));
        let again = serde_json::to_string(&policy).expect("text");
        assert_eq!(again, text);
    }

    #[test]
    fn a_host_without_its_own_tags_admits_everything() {
        let other = Member {
            name: name("a"),
            public_key: crate::keys::PublicKey::from_bytes([1; 32]),
            addresses: Vec::new(),
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: vec![name("web")],
            devices: Vec::new(),
        };
        let mut access = Access::default();
        assert_eq!(access.filter(&other), Filter::All);
        assert!(access.take(Some(party("me")), Vec::new(), None));
        assert_eq!(access.filter(&other), Filter::Only(Open::default()));
    }

    /// A device, named in full by the first word, with the others as tags.
    fn device(words: &str) -> Party {
        let (full, tags) = words.split_once(' ').unwrap_or((words, ""));
        let full: DeviceName = full.parse().expect(full);
        Party {
            name: full.device,
            tags: tags.split_whitespace().map(name).collect(),
            gateway: Some(full.gateway),
        }
    }

    #[test]
    fn a_device_is_a_subject_of_its_own() {
        let rules = policy(
            "allow laptop -> printer.site-a tcp/9100\nallow laptop -> site-a tcp/22\nallow tag:ops -> tag:plc icmp",
        );
        let opens = |from: &Party, to: &Party| !rules.filter(from, to).is_closed();
        let laptop = party("laptop");
        assert!(opens(&laptop, &device("printer.site-a")));
        assert!(!opens(&laptop, &device("printer.site-b")));
        assert!(!opens(&laptop, &device("site-a.printer")));
        assert!(opens(&laptop, &party("site-a")));
        // A member with the name of a device or of a gateway is neither.
        assert!(!opens(&laptop, &party("printer")));
        assert!(!opens(&laptop, &device("site-a.site-a")));
        assert!(opens(&party("o ops"), &device("plc-1.site-a plc")));
        assert!(opens(
            &device("panel.site-b ops"),
            &device("plc-1.site-a plc")
        ));
    }

    #[test]
    fn a_gateway_sees_and_gets_what_its_devices_need() {
        let rules = policy(
            "allow laptop -> printer.site-a tcp/9100\nallow tag:ops -> tag:plc icmp\nallow x -> y *",
        );
        let gateway = [
            party("site-a"),
            device("printer.site-a"),
            device("p.site-a plc"),
        ];
        let sight = rules.sight(&gateway);
        for (other, sees) in [
            (party("laptop"), true),
            (party("o ops"), true),
            (device("panel.site-b ops"), true),
            (party("x"), false),
            (device("printer.site-a"), false),
        ] {
            assert_eq!(sight.has(&other), sees, "{other:?}");
        }
        let part = rules.concerning(&gateway);
        assert_eq!((part.rules().len(), part.untold()), (2, 1));
        // Without rules: a tag in common, or no tag at either end.
        let sight = Policy::default().sight(&gateway[1..]);
        assert!(sight.has(&party("a")) && sight.has(&party("b plc")));
        assert!(!sight.has(&party("c web")));
        let sight = Policy::default().sight(&gateway[2..]);
        assert!(!sight.has(&party("a")));
    }

    #[test]
    fn each_pair_of_devices_has_its_own_filter() {
        let ip = |n: u8| IpAddr::from([100, 80, 0, n]);
        let behind = |device: &str, n: u8| Device {
            name: name(device),
            addresses: vec![ip(n)],
            tags: Vec::new(),
        };
        let mut access = Access {
            own: Some(party("site-a")),
            devices: vec![behind("printer", 2), behind("plc", 3)],
            policy: policy(
                "allow panel.site-b -> plc.site-a tcp/502\nallow printer.site-a -> site-b udp/5000",
            ),
        };
        let other = Member {
            name: name("site-b"),
            public_key: crate::keys::PublicKey::from_bytes([1; 32]),
            addresses: vec![ip(11)],
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: Vec::new(),
            devices: vec![behind("panel", 12)],
        };
        let filters = access.filters(&access.receivers(&[ip(1)]), &other);
        let Filters::Pairs(pairs) = &filters else {
            panic!("one filter for all")
        };
        let Some(Filter::Only(open)) = pairs.get(ip(12), ip(3)) else {
            panic!("no filter for the PLC")
        };
        assert!(open.tcp.contains(502) && !open.tcp.contains(503));
        // Only replies: the printer begins.
        assert_eq!(
            pairs.get(ip(11), ip(2)),
            Some(&Filter::Only(Open::default()))
        );
        for (from, to) in [(11, 1), (11, 3), (12, 1), (12, 2)] {
            assert_eq!(pairs.get(ip(from), ip(to)), None, "{from} {to}");
        }
        // Without devices at either end, the filter is that of the member.
        access.devices.clear();
        let other = Member {
            devices: Vec::new(),
            ..other
        };
        let same = Filters::Same(access.filter(&other), Destinations::Only(vec![ip(1)]));
        let receivers = access.receivers(&[ip(1)]);
        assert_eq!(access.filters(&receivers, &other), same);
    }

    /// Devices `d0` and so on; the tags of each are the bits of its number.
    fn devices(first: u8, count: u8) -> Vec<Device> {
        let devices = (0..count).map(|n| Device {
            name: name(&format!("d{n}")),
            addresses: vec![IpAddr::from([100, 80, first, n])],
            tags: (0..3)
                .filter(|bit| n >> bit & 1 == 1)
                .map(|bit| name(&format!("t{bit}")))
                .collect(),
        });
        devices.collect()
    }

    /// A member with 64 devices, and one that has as many.
    fn two_gateways(text: &str) -> (Access, Member) {
        let access = Access {
            own: Some(party("site-a t0")),
            devices: devices(1, 64),
            policy: policy(text),
        };
        let other = Member {
            name: name("site-b"),
            public_key: crate::keys::PublicKey::from_bytes([1; 32]),
            addresses: vec![IpAddr::from([100, 80, 0, 2])],
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: vec![name("t1")],
            devices: devices(2, 64),
        };
        (access, other)
    }

    #[test]
    fn the_filters_of_groups_are_those_of_their_pairs() {
        let own = [IpAddr::from([100, 80, 0, 1])];
        for text in [
            "",
            "allow tag:t0 -> tag:t1 tcp/1\nallow tag:t1 -> tag:t0 tcp/2\nallow tag:t2 -> * udp/3",
            "allow d3.site-b -> d5.site-a icmp\nallow * -> tag:t2 tcp/4\nallow site-b -> site-a *",
            "allow d3.site-a -> d5.site-b icmp",
        ] {
            let (access, other) = two_gateways(text);
            let Filters::Pairs(pairs) = access.filters(&access.receivers(&own), &other) else {
                panic!("one filter for all")
            };
            let there = other.parties().into_iter().zip(other.all_addresses());
            let here = access
                .devices
                .iter()
                .map(|d| (d.party(&name("site-a")), d.addresses[0]));
            let here: Vec<_> = here.chain([(party("site-a t0"), own[0])]).collect();
            for (from, source) in there {
                for (to, destination) in &here {
                    let filter = access.policy.filter(&from, to);
                    let back = access.policy.filter(to, &from);
                    let passes = !filter.is_closed() || !back.is_closed();
                    let expected = passes.then_some(&filter);
                    assert_eq!(pairs.get(source, *destination), expected, "{from:?} {to:?}");
                }
            }
        }
    }

    #[test]
    fn filters_grow_with_the_rules_and_not_with_the_devices() {
        let rules = "allow tag:t0 -> tag:t1 tcp/1\nallow tag:t2 -> tag:t2 udp/2";
        let (access, other) = two_gateways(rules);
        let receivers = access.receivers(&[IpAddr::from([100, 80, 0, 1])]);
        let Filters::Pairs(pairs) = access.filters(&receivers, &other) else {
            panic!("one filter for all")
        };
        // Of 65 times 65 pairs. Neither rule, one of them, or both; three tags make eight groups.
        assert_eq!(pairs.filters.len(), 4);
        assert_eq!((pairs.receiver_groups, pairs.indices.len()), (8, 64));
        // The other peers share the receivers.
        let again = access.filters(&receivers, &other);
        let Filters::Pairs(again) = &again else {
            panic!("one filter for all")
        };
        assert!(std::sync::Arc::ptr_eq(&again.receivers, &pairs.receivers));
    }

    #[test]
    fn a_decision_is_about_one_port_or_protocol() {
        for (text, traffic) in [
            ("tcp/443", Traffic::Tcp(443)),
            ("udp/53", Traffic::Udp(53)),
            ("icmp", Traffic::Icmp),
            ("*", Traffic::Other),
        ] {
            assert_eq!(text.parse(), Ok(traffic));
            assert_eq!(traffic.to_string(), text);
        }
        for bad in ["tcp", "tcp/1-2", "tcp/70000", "443", "", "icmp/8"] {
            let error = bad.parse::<Traffic>().expect_err(bad);
            assert!(error.to_string().contains("tcp/443"), "{error}");
        }
    }
}

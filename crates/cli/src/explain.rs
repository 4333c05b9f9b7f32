//! Explains whether a mesh's policy allows a connection.

use std::io::Write;
use std::process::ExitCode;

use seikan_proto::mesh::policy::{Decision, Traffic};
use seikan_proto::mesh::{Name, Party, Policy};
use serde::Serialize;

use crate::output::{counted, print_json};

/// A connection to explain.
pub struct Connection {
    /// Member that opens the connection.
    pub from: Party,
    /// Member that receives it.
    pub to: Party,
    /// Traffic of the connection.
    pub traffic: Traffic,
}

impl Connection {
    /// Prints the policy's decision. The exit status is 0 if it allows the connection, 1 if not.
    pub fn answer(&self, policy: &Policy, as_json: bool) -> anyhow::Result<ExitCode> {
        let decision = policy.decide(&self.from, &self.to, self.traffic);
        if as_json {
            print_json(&self.explanation(&decision, policy))?;
        } else {
            write!(anstream::stdout(), "{}", self.words(&decision, policy))?;
        }
        Ok(if decision.is_allowed() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn words(&self, decision: &Decision, policy: &Policy) -> String {
        let (from, to) = (named(&self.from), named(&self.to));
        let (answer, why) = match decision {
            Decision::NoTags => ("allowed", "neither has a tag".to_owned()),
            Decision::CommonTag(tag) => ("allowed", format!("both have the tag {tag}")),
            Decision::Rule(rule) => ("allowed", format!("rule: {rule}")),
            Decision::Denied if policy.is_empty() => (
                "denied",
                "there is no rule, and they have no common tag".to_owned(),
            ),
            Decision::Denied => ("denied", "no rule allows it".to_owned()),
        };
        let mut text = format!("{} from {from} to {to}: {answer}\n  {why}\n", self.traffic);
        if decision.is_allowed() {
            let to = self.to.full_name();
            text += &format!("  policy only: {to}'s firewall and services are not checked\n");
        }
        if policy.unknown() > 0 {
            let rules = counted(policy.unknown(), "rule");
            text += &format!(
                "  {rules} of a later version ignored: this version does not support them\n"
            );
        }
        text
    }

    fn explanation(&self, decision: &Decision, policy: &Policy) -> Explanation {
        let (why, rule, tag) = match decision {
            Decision::NoTags => (Why::NoTags, None, None),
            Decision::CommonTag(tag) => (Why::CommonTag, None, Some(tag.clone())),
            Decision::Rule(rule) => (Why::Rule, Some(rule.to_string()), None),
            Decision::Denied => (Why::Nothing, None, None),
        };
        Explanation {
            from: self.from.clone(),
            to: self.to.clone(),
            traffic: self.traffic.to_string(),
            allowed: decision.is_allowed(),
            why,
            rule,
            tag,
            unknown_rules: policy.unknown(),
        }
    }
}

/// Decision of a policy about a connection.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Explanation {
    /// Member or device that opens the connection.
    from: Party,
    /// Member or device that receives it.
    to: Party,
    /// `tcp/PORT`, `udp/PORT`, `icmp`, or `*` for other protocols.
    traffic: String,
    /// Whether the policy allows it; firewalls and services are not checked.
    allowed: bool,
    /// Reason of the decision.
    why: Why,
    /// The rule that allows it, for the reason `rule`.
    rule: Option<String>,
    /// The common tag, for the reason `common-tag`.
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    tag: Option<Name>,
    /// Number of rules of a later version, which were ignored.
    unknown_rules: usize,
}

/// Reason of a decision.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
enum Why {
    /// Neither party has a tag.
    NoTags,
    /// Both parties have the same tag.
    CommonTag,
    /// A rule allows it.
    Rule,
    /// Nothing allows the traffic.
    Nothing,
}

/// "web-1 (tag:eu tag:web)"
fn named(party: &Party) -> String {
    let tags: Vec<&str> = party.tags.iter().map(Name::as_str).collect();
    if tags.is_empty() {
        format!("{} (no tags)", party.full_name())
    } else {
        format!("{} (tag:{})", party.full_name(), tags.join(" tag:"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn party(name: &str, tags: &[&str]) -> Party {
        Party {
            name: name.parse().expect(name),
            tags: tags.iter().map(|tag| tag.parse().expect(tag)).collect(),
            gateway: None,
        }
    }

    fn connection(port: u16) -> Connection {
        Connection {
            from: party("laptop", &["ops"]),
            to: party("web-1", &["eu", "web"]),
            traffic: Traffic::Tcp(port),
        }
    }

    #[test]
    fn an_answer_names_tags_rule_and_limits() {
        let policy = Policy::parse("allow * -> tag:web tcp/443").expect("a policy");
        let explained = |connection: &Connection| {
            let decision = policy.decide(&connection.from, &connection.to, connection.traffic);
            connection.words(&decision, &policy)
        };
        let allowed = explained(&connection(443));
        for part in [
            "tcp/443 from laptop (tag:ops) to web-1 (tag:eu tag:web): allowed",
            "rule: allow * -> tag:web tcp/443",
            "policy only",
        ] {
            assert!(allowed.contains(part), "{allowed}");
        }
        let denied = explained(&connection(80));
        assert!(
            denied.contains("denied") && denied.contains("no rule"),
            "{denied}"
        );
    }

    #[test]
    fn unknown_rules_are_reported() {
        let policy: Policy =
            serde_json::from_value(json!({ "rules": ["forbid * -> * *"] })).expect("a policy");
        let connection = connection(80);
        let explained = connection.words(&Decision::Denied, &policy);
        assert!(
            explained.contains("1 rule of a later version"),
            "{explained}"
        );
        let explanation = connection.explanation(&Decision::Denied, &policy);
        assert_eq!((explanation.allowed, explanation.unknown_rules), (false, 1));
    }
}

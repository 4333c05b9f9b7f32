//! Explains whether a mesh's policy allows a connection.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use seikan_proto::mesh::policy::{Decision, Traffic};
use seikan_proto::mesh::{Name, Party, Policy};
use serde_json::json;

use crate::output::counted;

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
        let mut out = anstream::stdout();
        if as_json {
            let text = serde_json::to_string_pretty(&self.json(&decision, policy));
            writeln!(out, "{}", text.context("cannot write JSON")?)?;
        } else {
            write!(out, "{}", self.words(&decision, policy))?;
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

    fn json(&self, decision: &Decision, policy: &Policy) -> serde_json::Value {
        let (why, rule, tag) = match decision {
            Decision::NoTags => ("no-tags", None, None),
            Decision::CommonTag(tag) => ("common-tag", None, Some(tag.as_str())),
            Decision::Rule(rule) => ("rule", Some(rule.to_string()), None),
            Decision::Denied => ("nothing", None, None),
        };
        json!({
            "from": self.from, "to": self.to, "traffic": self.traffic.to_string(),
            "allowed": decision.is_allowed(), "why": why, "rule": rule, "tag": tag,
            "unknown_rules": policy.unknown(),
        })
    }
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
        let json = connection.json(&Decision::Denied, &policy);
        assert_eq!(
            (&json["allowed"], &json["unknown_rules"]),
            (&json!(false), &json!(1))
        );
    }
}

//! Why a mesh lets a member begin something with another, or not, in words.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use seikan_proto::mesh::policy::{Decision, Traffic};
use seikan_proto::mesh::{Name, Party, Policy};
use serde_json::json;

use crate::output::counted;

/// What is asked.
pub struct Question {
    /// Who begins.
    pub from: Party,
    /// With whom.
    pub to: Party,
    /// What.
    pub traffic: Traffic,
}

impl Question {
    /// Says what the policy answers. The exit status is 0 if it is allowed, 1 if not.
    pub fn answer(&self, policy: &Policy, as_json: bool) -> anyhow::Result<ExitCode> {
        let decision = policy.decide(&self.from, &self.to, self.traffic);
        let mut out = anstream::stdout();
        if as_json {
            let text = serde_json::to_string_pretty(&self.json(&decision, policy));
            writeln!(out, "{}", text.context("cannot write JSON")?)?;
        } else {
            write!(out, "{}", self.words(&decision, policy))?;
        }
        Ok(match decision.is_allowed() {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
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
                "there is no rule, and they have no tag in common".to_owned(),
            ),
            Decision::Denied => ("denied", "no rule allows it".to_owned()),
        };
        let mut text = format!("{} from {from} to {to}: {answer}\n  {why}\n", self.traffic);
        if decision.is_allowed() {
            let to = &self.to.name;
            text += &format!(
                "  policy only: whether {to}'s firewall lets it in, and something answers, was not looked at\n"
            );
        }
        if policy.unknown() > 0 {
            let rules = counted(policy.unknown(), "rule");
            text += &format!(
                "  {rules} of a later version not looked at: this one does not know them\n"
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
    match tags.is_empty() {
        true => format!("{} (no tags)", party.name),
        false => format!("{} (tag:{})", party.name, tags.join(" tag:")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(name: &str, tags: &[&str]) -> Party {
        Party {
            name: name.parse().expect(name),
            tags: tags.iter().map(|tag| tag.parse().expect(tag)).collect(),
        }
    }

    fn question(port: u16) -> Question {
        Question {
            from: party("laptop", &["ops"]),
            to: party("web-1", &["eu", "web"]),
            traffic: Traffic::Tcp(port),
        }
    }

    #[test]
    fn an_answer_names_tags_rule_and_what_was_not_looked_at() {
        let policy = Policy::parse("allow * -> tag:web tcp/443").expect("a policy");
        let said = |question: &Question| {
            let decision = policy.decide(&question.from, &question.to, question.traffic);
            question.words(&decision, &policy)
        };
        let allowed = said(&question(443));
        for part in [
            "tcp/443 from laptop (tag:ops) to web-1 (tag:eu tag:web): allowed",
            "rule: allow * -> tag:web tcp/443",
            "policy only",
        ] {
            assert!(allowed.contains(part), "{allowed}");
        }
        let denied = said(&question(80));
        assert!(
            denied.contains("denied") && denied.contains("no rule"),
            "{denied}"
        );
    }

    #[test]
    fn rules_that_are_not_known_are_told() {
        let policy: Policy =
            serde_json::from_value(json!({ "rules": ["forbid * -> * *"] })).expect("a policy");
        let question = question(80);
        let said = question.words(&Decision::Denied, &policy);
        assert!(said.contains("1 rule of a later version"), "{said}");
        let json = question.json(&Decision::Denied, &policy);
        assert_eq!(
            (&json["allowed"], &json["unknown_rules"]),
            (&json!(false), &json!(1))
        );
    }
}

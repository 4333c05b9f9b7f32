//! Any text as the policy of a mesh: an accepted one survives writing and reading, in full and in
//! the form that members receive, and the receiver's filter matches the policy's decision.
use seikan_proto::filter::Filter;
use seikan_proto::mesh::policy::{Selector, Traffic};
use seikan_proto::mesh::{Party, PartyName, Policy};

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // The rules in the form that members receive, of any version.
    let rules: Vec<&str> = text.lines().collect();
    let json = serde_json::json!({ "rules": rules, "untold": rules.len() });
    let received: Policy = serde_json::from_value(json).expect("a policy");
    let json = serde_json::to_vec(&received).expect("JSON");
    let again: Policy = serde_json::from_slice(&json).expect("its own text");
    assert_eq!(again, received);
    let Ok(policy) = Policy::parse(text) else {
        return;
    };
    let rules = policy.rules().iter().map(ToString::to_string);
    let rules = rules.collect::<Vec<_>>().join("\n");
    assert_eq!(Policy::parse(&rules).as_ref(), Ok(&policy));
    assert!(rules.len() <= text.len(), "an answer has room for it");
    // Members that the first rules name, to each other.
    let ends = policy.rules().iter().flat_map(|r| [&r.from, &r.to]);
    let nobody = || "nobody".parse().expect("a name");
    let parties: Vec<Party> = ends
        .take(6)
        .map(|selector| match selector {
            Selector::Any => (nobody(), Vec::new(), None),
            Selector::Tag(tag) => (nobody(), vec![tag.clone()], None),
            Selector::Named(PartyName::Member(name)) => (name.clone(), vec![name.clone()], None),
            Selector::Named(PartyName::Device(name)) => {
                (name.device.clone(), Vec::new(), Some(name.gateway.clone()))
            }
        })
        .map(|(name, tags, gateway)| Party {
            name,
            tags,
            gateway,
        })
        .collect();
    for (from, to) in parties
        .iter()
        .flat_map(|a| parties.iter().map(move |b| (a, b)))
    {
        let decide = |traffic| policy.decide(from, to, traffic).is_allowed();
        // Each end receives the rules that it needs, and the other member if they may communicate.
        for own in [from, to] {
            assert_eq!(
                policy
                    .concerning(std::slice::from_ref(own))
                    .filter(from, to),
                policy.filter(from, to)
            );
        }
        if !policy.filter(from, to).is_closed() {
            assert!(policy.sight(std::slice::from_ref(from)).has(to));
            assert!(policy.sight(std::slice::from_ref(to)).has(from));
        }
        match policy.filter(from, to) {
            Filter::All => assert!(decide(Traffic::Other)),
            Filter::Only(open) => {
                assert!(!decide(Traffic::Other));
                assert_eq!(open.icmp, decide(Traffic::Icmp));
                for port in [0, 22, 80, 443, 8000, u16::MAX] {
                    assert_eq!(open.tcp.contains(port), decide(Traffic::Tcp(port)));
                    assert_eq!(open.udp.contains(port), decide(Traffic::Udp(port)));
                }
            }
        }
    }
}

//! Policies and tags.

use seikan_proto::mesh::policy::MAX_RULES;
use seikan_proto::mesh::{
    Changes, Cursor, Device, Endpoints, MAX_ANSWER, MAX_DEVICES, MAX_MEMBERS, Party, Policy,
};

use super::super::changes::{Change, ChangeKind, assemble};
use super::super::rows::{Former, PolicyRow};
use super::answers::add_members;
use super::*;

const RULE: &str = "allow tag:ops -> tag:web tcp/443";

fn tags(words: &str) -> Vec<Name> {
    words.split_whitespace().map(name).collect()
}

fn set(store: &Store, text: &str) -> bool {
    store.set_policy(text, &operator(), NOW).expect("set")
}

/// Makes every use of the policy an error.
pub fn damage(store: &Store) {
    let damaged = store.change(|mesh| mesh.put(PolicyRow::new("no policy".to_owned(), 1)));
    damaged.expect("set");
}

#[test]
fn a_policy_is_stored_verbatim() {
    let mesh = Mesh::new("100.80.0.0/12");
    let text = format!("# comment\n{RULE}  # another\n");
    assert_eq!(mesh.store.policy().expect("queried"), "");
    assert!(set(&mesh.store, &text));
    assert_eq!(mesh.reopen().policy().expect("queried"), text);
    assert_eq!(mesh.store.revision().expect("queried"), 1);
    assert!(!set(&mesh.store, &text));
    assert_eq!(mesh.store.revision().expect("queried"), 1);
    let newest = &mesh.store.audit(1).expect("an audit")[0];
    assert_eq!(
        (&*newest.change, &*newest.subject),
        ("policy set", "1 rule")
    );
}

#[test]
fn an_invalid_policy_is_refused() {
    let mesh = Mesh::new("100.80.0.0/12");
    set(&mesh.store, RULE);
    let error = mesh.store.set_policy("\nallow everybody", &operator(), NOW);
    let error = error.expect_err("invalid").to_string();
    assert!(error.starts_with("line 2: "), "{error}");
    assert_eq!(mesh.store.policy().expect("queried"), RULE);
}

#[test]
fn a_policy_is_sent_once_and_in_whole_answers() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let changes_since = |since| mesh.store.changes(since, a).expect("changes");
    // Also without a policy: a member that comes from another mesh must forget its policy.
    assert_eq!(changes_since(0).policy, Some(Policy::default()));
    assert_eq!(changes_since(1).policy, None);
    let text = format!("{RULE}\nallow * -> tag:web icmp\n");
    set(&mesh.store, &text);
    let policy = Policy::parse(&text).expect("a policy");
    let own = changes_since(0).own.expect("itself");
    let policy = Some(policy.concerning(&[own]));
    assert_eq!(policy.as_ref().map(Policy::untold), Some(1));
    assert_eq!(
        (changes_since(1).policy, changes_since(1).revision),
        (policy.clone(), 2)
    );
    assert_eq!(changes_since(2).policy, None);
    assert_eq!(changes_since(0).policy, policy);
    mesh.join("b", 2);
    assert_eq!(changes_since(2).policy, None);
    assert_eq!(changes_since(9).policy, policy, "an unknown revision");
}

#[test]
fn tags_are_sent_to_their_member_and_to_others() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b] = [mesh.join("a", 1), mesh.join("b", 2)];
    let changes_since = |since, to| -> Changes { mesh.store.changes(since, to).expect("changes") };
    let own = |words| Party {
        name: name("a"),
        tags: tags(words),
        gateway: None,
    };
    assert_eq!(changes_since(0, a).own, Some(own("")));
    assert_eq!(changes_since(2, a).own, None);
    let change = |words: &str| {
        let changed = mesh
            .store
            .set_tags(&name("a"), &tags(words), &operator(), NOW);
        changed.expect("set")
    };
    set(&mesh.store, "allow b -> a tcp/1");
    assert!(change("web eu"));
    assert!(!change("web eu"), "the same again");
    assert_eq!(changes_since(3, a).own, Some(own("web eu")));
    assert_eq!(changes_since(3, b).members[0].tags, tags("web eu"));
    assert_eq!(changes_since(3, b).own, None);
    assert!(change(""));
    assert_eq!(changes_since(4, a).own, Some(own("")));
    let newest = &mesh.store.audit(2).expect("an audit")[1];
    assert_eq!(
        (&*newest.change, &*newest.subject),
        ("tags set", "a: web eu")
    );
}

/// Returns the names of the members and the keys of the removals in an answer.
fn seen(changes: &Changes) -> (Vec<&str>, Vec<PublicKey>) {
    let names = changes.members.iter().map(|m| m.name.as_str());
    (names.collect(), changes.removed.clone())
}

#[test]
fn a_member_sees_only_members_that_it_may_talk_to() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c, d] = [("a", 1), ("b", 2), ("c", 3), ("d", 4)].map(|(n, i)| mesh.join(n, i));
    set(&mesh.store, "allow a -> b tcp/1\nallow c -> a udp/1");
    let changes_since = |to| mesh.store.changes(0, to).expect("changes");
    for (of, others) in [
        (a, vec!["b", "c"]),
        (b, vec!["a"]),
        (c, vec!["a"]),
        (d, vec![]),
    ] {
        assert_eq!(seen(&changes_since(of)).0, others);
        assert!(changes_since(of).removed.is_empty());
    }
    // The member receives no rules of others, but their number: without a policy everything would
    // be allowed.
    let policy = changes_since(d).policy.expect("a policy");
    assert_eq!((policy.rules().len(), policy.untold()), (0, 2));
    // It receives no joins, moves, new keys and removals of others, and cannot call them.
    let before = mesh.store.revision().expect("queried");
    mesh.join("e", 5);
    let at = Endpoints {
        endpoints: vec![([192, 0, 2, 1], 7).into()],
        relayed: Vec::new(),
    };
    assert!(mesh.store.set_endpoints(b, &at, NOW).expect("set"));
    assert!(
        mesh.store
            .set_key(c, &key(33), &operator(), NOW)
            .expect("set")
    );
    mesh.remove("e");
    let found = mesh.store.changes(before, d).expect("changes");
    assert_eq!((seen(&found), found.whole), ((vec![], vec![]), false));
    let found = mesh.store.changes(before, a).expect("changes");
    assert_eq!(seen(&found), (vec!["b", "c"], vec![key(3)]));
    let callee = |from, n| mesh.store.pair(from, &key(n)).expect("a pair").1;
    assert_eq!(callee(a, 2), Some(b));
    assert_eq!((callee(d, 2), callee(b, 33)), (None, None));
}

#[test]
fn changes_of_tags_show_and_hide_a_member() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c] = [("a", 1), ("b", 2), ("c", 3)].map(|(n, i)| mesh.join(n, i));
    set(
        &mesh.store,
        "allow a -> tag:web tcp/1\nallow b -> tag:db tcp/1",
    );
    let tag = |words| {
        let now = mesh.store.revision().expect("queried");
        let changed = mesh
            .store
            .set_tags(&name("c"), &tags(words), &operator(), NOW);
        assert!(changed.expect("set"));
        now
    };
    let changes_since = |since: u64, to| mesh.store.changes(since, to).expect("changes");
    let none: (Vec<&str>, Vec<PublicKey>) = (vec![], vec![]);
    let first = tag("web");
    assert_eq!(seen(&changes_since(first, a)), (vec!["c"], vec![]));
    assert_eq!(seen(&changes_since(first, b)), none);
    let second = tag("db");
    assert_eq!(seen(&changes_since(second, a)), (vec![], vec![key(3)]));
    assert_eq!(seen(&changes_since(second, b)), (vec!["c"], vec![]));
    // Its own tags have changed: it receives all visible members.
    assert!(changes_since(second, c).whole);
    assert_eq!(seen(&changes_since(second, c)).0, ["b"]);
    // A member that was away receives only the latest state.
    let third = tag("web");
    assert_eq!(seen(&changes_since(second, a)), (vec!["c"], vec![]));
    assert_eq!(seen(&changes_since(second, b)), (vec![], vec![key(3)]));
    // It leaves and joins again with the same key, invisible to all.
    mesh.remove("c");
    mesh.join("c", 3);
    let found = changes_since(third + 1, a);
    assert_eq!((seen(&found), found.whole), ((vec![], vec![key(3)]), false));
    assert_eq!(seen(&changes_since(third + 1, b)), none);
}

#[test]
fn a_policy_that_changes_visibility_sends_all_members_in_parts() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    add_members(&mesh.store, 5000);
    set(&mesh.store, "allow * -> a tcp/1");
    let first = mesh.store.changes(10, a).expect("changes");
    assert_eq!(
        (first.whole, first.more, first.members.len()),
        (true, true, MAX_MEMBERS)
    );
    let second = mesh.store.changes(first.cursor(), a).expect("changes");
    assert_eq!((second.whole, second.more), (false, false));
    assert_eq!(second.members.len(), 5000 - MAX_MEMBERS);
    // A policy between two parts restarts the list.
    set(&mesh.store, "allow c100 -> a tcp/1");
    let third = mesh.store.changes(first.cursor(), a).expect("changes");
    assert_eq!((third.whole, third.more), (true, false));
    assert_eq!(seen(&third).0, ["c100"]);
}

#[test]
fn a_policy_that_keeps_visibility_sends_only_rules() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c] = [("a", 1), ("b", 2), ("c", 3)].map(|(n, i)| mesh.join(n, i));
    let changes_since = |since: u64, to| mesh.store.changes(since, to).expect("changes");
    set(&mesh.store, "allow a -> b tcp/1");
    assert!(changes_since(3, a).whole);
    assert!(set(&mesh.store, "allow a -> b tcp/2"));
    for (to, rules) in [(a, 1), (b, 1), (c, 0)] {
        let changes_since = changes_since(4, to);
        assert!(!changes_since.whole && changes_since.own.is_none());
        assert_eq!(seen(&changes_since), (vec![], vec![]));
        let policy = changes_since.policy.expect("another one");
        assert_eq!((policy.rules().len(), policy.untold()), (rules, 1 - rules));
    }
    // Other changes are reported as usual.
    let at = Endpoints {
        endpoints: vec![([192, 0, 2, 1], 7).into()],
        relayed: Vec::new(),
    };
    assert!(mesh.store.set_endpoints(b, &at, NOW).expect("set"));
    assert_eq!(seen(&changes_since(4, a)), (vec!["b"], vec![]));
    assert!(changes_since(6, a).policy.is_none());
    set(&mesh.store, "allow a -> c tcp/2");
    for (to, others) in [(a, vec!["c"]), (b, vec![]), (c, vec!["a"])] {
        let changes_since = changes_since(6, to);
        assert!(changes_since.whole);
        assert_eq!(seen(&changes_since).0, others);
    }
}

#[test]
fn unknown_former_visibility_sends_all_members() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    mesh.join("b", 2);
    let other = mesh.reopen();
    let whole = |store: &Store, since: u64| {
        store.catch_up().expect("caught up");
        store.changes(since, a).expect("changes").whole
    };
    set(&mesh.store, "allow a -> b tcp/1");
    assert!(whole(&mesh.store, 2));
    // This store answers no polls at revisions 4 and 5.
    set(&other, "allow b -> a tcp/1\nallow a -> a tcp/1");
    set(&other, "allow a -> b tcp/2");
    assert!(whole(&mesh.store, 4));
    assert!(!whole(&mesh.store, 5));
    // A new store knows no earlier policy.
    assert!(whole(&mesh.reopen(), 4));
}

fn revision_of(mesh: &Mesh) -> u64 {
    mesh.store.revision().expect("queried")
}

/// Returns the shortest time of a poll with this revision of the visibility, of twenty.
fn shortest_poll(mesh: &Mesh, of: MemberId, sight: u64) -> Duration {
    let known = Cursor {
        revision: revision_of(mesh),
        epoch: 0,
        sight,
    };
    let times = (0..20).map(|_| {
        let started_at = Instant::now();
        let changes = mesh.store.changes(known, of).expect("changes");
        assert!(!changes.whole);
        started_at.elapsed()
    });
    times.min().unwrap_or_default()
}

#[test]
fn former_members_cost_a_poll_nothing_whatever_visibility_it_names() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let filled = mesh.store.change(|mesh| {
        for n in 0..50_000 {
            let revision = mesh.next_revision()?;
            mesh.put(Former {
                revision,
                member: 0,
                public_key: (&key(n)).into(),
                own: None,
                devices: Vec::new(),
            })?;
        }
        Ok(())
    });
    filled.expect("filled");
    let (latest, earliest) = (
        shortest_poll(&mesh, a, revision_of(&mesh)),
        shortest_poll(&mesh, a, 1),
    );
    // Reading all of them takes milliseconds.
    assert!(earliest < 10 * latest, "{earliest:?} {latest:?}");
    // The member's own earlier states are found among them.
    let tagged = mesh
        .store
        .set_tags(&name("a"), &tags("web"), &operator(), NOW);
    assert!(tagged.expect("set"));
    let known = Cursor {
        revision: revision_of(&mesh),
        epoch: 0,
        sight: 1,
    };
    assert!(mesh.store.changes(known, a).expect("changes").whole);
}

#[test]
fn tags_need_a_member_and_are_bounded() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let nobody = mesh
        .store
        .set_tags(&name("b"), &tags("web"), &operator(), NOW);
    assert!(matches!(nobody, Err(StoreError::NotAMember)));
    let many: Vec<Name> = (0..17).map(|n| name(&format!("t{n}"))).collect();
    let error = mesh.store.set_tags(&name("a"), &many, &operator(), NOW);
    assert!(matches!(error, Err(StoreError::OutOfBounds(_))));
    assert_eq!(mesh.store.revision().expect("queried"), 1);
}

#[test]
fn an_answer_with_the_longest_policy_is_bounded() {
    let longest = "x".repeat(Name::MAX_LEN);
    // As many rules as the text may have.
    let rule = format!("allow tag:{longest} -> tag:{longest} tcp/10000-65535\n");
    let policy = Policy::parse(&rule.repeat(MAX_RULES)).expect("a policy");
    let party = Party {
        name: name(&longest),
        tags: vec![name(&longest); 16],
        gateway: None,
    };
    let device = Device {
        name: name(&longest),
        addresses: networks("100.80.0.0/12")
            .addresses(1)
            .expect("addresses")
            .to_vec(),
        tags: vec![name(&longest); 16],
    };
    // As many removals as there may be.
    let cost = MAX_ANSWER / MAX_MEMBERS;
    let found = (1..).take(MAX_MEMBERS).map(|revision| Change {
        revision,
        cost,
        kind: ChangeKind::Removal(key(1)),
    });
    let changes_since = Changes {
        policy: Some(policy),
        own: Some(party),
        own_devices: vec![device; MAX_DEVICES],
        ..assemble(found.collect(), 9999, true, MAX_ANSWER)
    };
    assert!(changes_since.more, "it was full");
    let others = serde_json::to_vec(&Changes {
        removed: Vec::new(),
        ..changes_since.clone()
    });
    let remaining = MAX_ANSWER - changes_since.removed.len() * cost;
    assert!(others.expect("JSON").len() <= remaining);
}

/// Prints the cost of reporting a change to all members, for docs/internals/mesh-figures.md: `cargo
/// test -p seikan-coordinator --lib answer_cost -- --ignored --nocapture`.
#[test]
#[ignore = "figures, of some seconds"]
fn answer_cost() {
    let pairs = |count: u32| -> String {
        let rules = (0..MAX_RULES as u32).map(|n| {
            let n = 100 + n % (count - 1);
            format!("allow c{n} -> c{} tcp/1\n", n + 1)
        });
        rules.collect()
    };
    for count in [500, 1000, 2000] {
        for (policy, text) in [
            ("everybody", "allow * -> * *\n".to_owned()),
            ("one server", "allow * -> c100 tcp/443\n".to_owned()),
            ("1,024 rules of pairs", pairs(count)),
        ] {
            let mesh = Mesh::new("100.80.0.0/12");
            add_members(&mesh.store, count);
            let ids: Vec<MemberId> = (1..=i64::from(count)).map(MemberId).collect();
            let mut known = vec![seikan_proto::mesh::Cursor::default(); ids.len()];
            let mut report = |step: &str| {
                let (started_at, mut bytes) = (Instant::now(), 0);
                for (id, known) in ids.iter().zip(&mut known) {
                    let changes_since = mesh.store.changes(*known, *id).expect("changes");
                    bytes += serde_json::to_vec(&changes_since).expect("JSON").len();
                    *known = changes_since.cursor();
                }
                let elapsed = started_at.elapsed().as_secs_f64() * 1e3;
                println!("{count} members, {policy}, {step}: {elapsed:.1} ms, {bytes} bytes");
            };
            report("nothing known");
            set(&mesh.store, &text);
            report("another policy");
            let at = Endpoints {
                endpoints: vec![([192, 0, 2, 1], 7).into()],
                relayed: Vec::new(),
            };
            assert!(mesh.store.set_endpoints(ids[0], &at, NOW).expect("set"));
            report("one moved");
        }
    }
}

on_etcd! {
    a_policy_is_stored_verbatim
    an_invalid_policy_is_refused
    a_policy_is_sent_once_and_in_whole_answers
    tags_are_sent_to_their_member_and_to_others
    a_member_sees_only_members_that_it_may_talk_to
    changes_of_tags_show_and_hide_a_member
    a_policy_that_changes_visibility_sends_all_members_in_parts
    a_policy_that_keeps_visibility_sends_only_rules
    unknown_former_visibility_sends_all_members
    tags_need_a_member_and_are_bounded
    an_answer_with_the_longest_policy_is_bounded
}

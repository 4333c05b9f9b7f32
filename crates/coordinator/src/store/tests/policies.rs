//! Policies and tags.

use seikan_proto::mesh::policy::MAX_RULES;
use seikan_proto::mesh::{Changes, Endpoints, MAX_ANSWER, MAX_MEMBERS, Party, Policy};

use super::super::changes::{News, What, tell};
use super::telling::crowd;
use super::*;

const RULE: &str = "allow tag:ops -> tag:web tcp/443";

fn tags(words: &str) -> Vec<Name> {
    words.split_whitespace().map(name).collect()
}

fn set(store: &Store, text: &str) -> bool {
    store.set_policy(text, &operator(), NOW).expect("set")
}

#[test]
fn a_policy_is_kept_as_it_was_written_and_the_same_again_is_no_change() {
    let mesh = Mesh::new("100.80.0.0/12");
    let text = format!("# who\n{RULE}  # and why\n");
    assert_eq!(mesh.store.policy().expect("asked"), "");
    assert!(set(&mesh.store, &text));
    assert_eq!(mesh.again().policy().expect("asked"), text);
    assert_eq!(mesh.store.revision().expect("asked"), 1);
    assert!(!set(&mesh.store, &text));
    assert_eq!(mesh.store.revision().expect("asked"), 1);
    let newest = &mesh.store.audit(1).expect("an audit")[0];
    assert_eq!((&*newest.what, &*newest.subject), ("policy set", "1 rule"));
}

#[test]
fn what_is_no_policy_changes_nothing() {
    let mesh = Mesh::new("100.80.0.0/12");
    set(&mesh.store, RULE);
    let error = mesh.store.set_policy("\nallow everybody", &operator(), NOW);
    let error = error.expect_err("no policy").to_string();
    assert!(error.starts_with("line 2: "), "{error}");
    assert_eq!(mesh.store.policy().expect("asked"), RULE);
}

#[test]
fn a_policy_is_told_once_and_to_who_knows_nothing() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let told = |since| mesh.store.changes(since, a).expect("changes");
    // Before there is one: who comes from another coordinator forgets that one's.
    assert_eq!(told(0).policy, Some(Policy::default()));
    assert_eq!(told(1).policy, None);
    let text = format!("{RULE}\nallow * -> tag:web icmp\n");
    set(&mesh.store, &text);
    let policy = Policy::parse(&text).expect("a policy");
    let own = told(0).own.expect("itself");
    let policy = Some(policy.concerning(&own));
    assert_eq!(policy.as_ref().map(Policy::untold), Some(1));
    assert_eq!((told(1).policy, told(1).revision), (policy.clone(), 2));
    assert_eq!(told(2).policy, None);
    assert_eq!(told(0).policy, policy);
    mesh.join("b", 2);
    assert_eq!(told(2).policy, None);
    assert_eq!(told(9).policy, policy, "a revision that there was not");
}

#[test]
fn tags_are_told_to_the_others_and_to_who_has_them() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b] = [mesh.join("a", 1), mesh.join("b", 2)];
    let told = |since, to| -> Changes { mesh.store.changes(since, to).expect("changes") };
    let own = |words| Party {
        name: name("a"),
        tags: tags(words),
    };
    assert_eq!(told(0, a).own, Some(own("")));
    assert_eq!(told(2, a).own, None);
    let change = |words: &str| {
        let changed = mesh
            .store
            .set_tags(&name("a"), &tags(words), &operator(), NOW);
        changed.expect("set")
    };
    set(&mesh.store, "allow b -> a tcp/1");
    assert!(change("web eu"));
    assert!(!change("web eu"), "the same again");
    assert_eq!(told(3, a).own, Some(own("web eu")));
    assert_eq!(told(3, b).members[0].tags, tags("web eu"));
    assert_eq!(told(3, b).own, None);
    assert!(change(""));
    assert_eq!(told(4, a).own, Some(own("")));
    let newest = &mesh.store.audit(2).expect("an audit")[1];
    assert_eq!((&*newest.what, &*newest.subject), ("tags set", "a: web eu"));
}

/// Names of those that one is told of, and the keys of those that are gone.
fn seen(changes: &Changes) -> (Vec<&str>, Vec<PublicKey>) {
    let names = changes.members.iter().map(|m| m.name.as_str());
    (names.collect(), changes.removed.clone())
}

#[test]
fn a_member_is_told_of_those_alone_that_it_may_talk_to_in_either_direction() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c, d] = [("a", 1), ("b", 2), ("c", 3), ("d", 4)].map(|(n, i)| mesh.join(n, i));
    set(&mesh.store, "allow a -> b tcp/1\nallow c -> a udp/1");
    let told = |to| mesh.store.changes(0, to).expect("changes");
    for (of, others) in [
        (a, vec!["b", "c"]),
        (b, vec!["a"]),
        (c, vec!["a"]),
        (d, vec![]),
    ] {
        assert_eq!(seen(&told(of)).0, others);
        assert!(told(of).removed.is_empty());
    }
    // Nor is it told what others may do, but that there is a policy: without one, everything would be open to it.
    let policy = told(d).policy.expect("a policy");
    assert_eq!((policy.rules().len(), policy.untold()), (0, 2));
    // Nor that others come, move, change their keys and go, and none of them can be called.
    let before = mesh.store.revision().expect("asked");
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
    let news = mesh.store.changes(before, d).expect("changes");
    assert_eq!((seen(&news), news.whole), ((vec![], vec![]), false));
    let news = mesh.store.changes(before, a).expect("changes");
    assert_eq!(seen(&news), (vec!["b", "c"], vec![key(3)]));
    let called = |from, n| mesh.store.pair(from, &key(n)).expect("a pair").1;
    assert_eq!(called(a, 2), Some(b));
    assert_eq!((called(d, 2), called(b, 33)), (None, None));
}

#[test]
fn who_is_another_by_its_tags_comes_and_goes_for_those_alone_to_whom_it_does() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c] = [("a", 1), ("b", 2), ("c", 3)].map(|(n, i)| mesh.join(n, i));
    set(
        &mesh.store,
        "allow a -> tag:web tcp/1\nallow b -> tag:db tcp/1",
    );
    let tag = |words| {
        let now = mesh.store.revision().expect("asked");
        let changed = mesh
            .store
            .set_tags(&name("c"), &tags(words), &operator(), NOW);
        assert!(changed.expect("set"));
        now
    };
    let told = |since: u64, to| mesh.store.changes(since, to).expect("changes");
    let none: (Vec<&str>, Vec<PublicKey>) = (vec![], vec![]);
    let first = tag("web");
    assert_eq!(seen(&told(first, a)), (vec!["c"], vec![]));
    assert_eq!(seen(&told(first, b)), none);
    let second = tag("db");
    assert_eq!(seen(&told(second, a)), (vec![], vec![key(3)]));
    assert_eq!(seen(&told(second, b)), (vec!["c"], vec![]));
    // Its own tags are others: it is told of everybody anew whom it may know.
    assert!(told(second, c).whole);
    assert_eq!(seen(&told(second, c)).0, ["b"]);
    // Who was away meanwhile hears of what is left of it.
    let third = tag("web");
    assert_eq!(seen(&told(second, a)), (vec!["c"], vec![]));
    assert_eq!(seen(&told(second, b)), (vec![], vec![key(3)]));
    // It goes and comes again under the same key, as somebody whom nobody may talk to.
    mesh.remove("c");
    mesh.join("c", 3);
    let news = told(third + 1, a);
    assert_eq!((seen(&news), news.whole), ((vec![], vec![key(3)]), false));
    assert_eq!(seen(&told(third + 1, b)), none);
}

#[test]
fn another_policy_has_each_told_of_everybody_whom_it_may_know_and_parts_of_that_go_on() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    crowd(&mesh.store, 5000);
    set(&mesh.store, "allow * -> a tcp/1");
    let first = mesh.store.changes(10, a).expect("changes");
    assert_eq!(
        (first.whole, first.more, first.members.len()),
        (true, true, MAX_MEMBERS)
    );
    let second = mesh.store.changes(first.cursor(), a).expect("changes");
    assert_eq!((second.whole, second.more), (false, false));
    assert_eq!(second.members.len(), 5000 - MAX_MEMBERS);
    // What comes between two parts begins it anew.
    set(&mesh.store, "allow c100 -> a tcp/1");
    let third = mesh.store.changes(first.cursor(), a).expect("changes");
    assert_eq!((third.whole, third.more), (true, false));
    assert_eq!(seen(&third).0, ["c100"]);
}

#[test]
fn another_policy_that_shows_a_member_nobody_else_is_told_and_nothing_more() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, c] = [("a", 1), ("b", 2), ("c", 3)].map(|(n, i)| mesh.join(n, i));
    let told = |since: u64, to| mesh.store.changes(since, to).expect("changes");
    set(&mesh.store, "allow a -> b tcp/1");
    assert!(told(3, a).whole);
    assert!(set(&mesh.store, "allow a -> b tcp/2"));
    for (to, rules) in [(a, 1), (b, 1), (c, 0)] {
        let told = told(4, to);
        assert!(!told.whole && told.own.is_none());
        assert_eq!(seen(&told), (vec![], vec![]));
        let policy = told.policy.expect("another one");
        assert_eq!((policy.rules().len(), policy.untold()), (rules, 1 - rules));
    }
    // Others are told of as usual beside it.
    let at = Endpoints {
        endpoints: vec![([192, 0, 2, 1], 7).into()],
        relayed: Vec::new(),
    };
    assert!(mesh.store.set_endpoints(b, &at, NOW).expect("set"));
    assert_eq!(seen(&told(4, a)), (vec!["b"], vec![]));
    assert!(told(6, a).policy.is_none());
    set(&mesh.store, "allow a -> c tcp/2");
    for (to, others) in [(a, vec!["c"]), (b, vec![]), (c, vec!["a"])] {
        let told = told(6, to);
        assert!(told.whole);
        assert_eq!(seen(&told).0, others);
    }
}

#[test]
fn a_member_is_told_of_everybody_where_it_is_not_known_whom_it_was_told_of() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    mesh.join("b", 2);
    let other = mesh.again();
    let whole = |store: &Store, since: u64| {
        store.catch_up().expect("caught up");
        store.changes(since, a).expect("changes").whole
    };
    set(&mesh.store, "allow a -> b tcp/1");
    assert!(whole(&mesh.store, 2));
    // This one asks nobody at revisions 4 and 5.
    set(&other, "allow b -> a tcp/1\nallow a -> a tcp/1");
    set(&other, "allow a -> b tcp/2");
    assert!(whole(&mesh.store, 4));
    assert!(!whole(&mesh.store, 5));
    // One that begins knows no earlier policy.
    assert!(whole(&mesh.again(), 4));
}

#[test]
fn tags_are_for_members_and_not_too_many() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let nobody = mesh
        .store
        .set_tags(&name("b"), &tags("web"), &operator(), NOW);
    assert!(matches!(nobody, Err(StoreError::NotAMember)));
    let many: Vec<Name> = (0..17).map(|n| name(&format!("t{n}"))).collect();
    let error = mesh.store.set_tags(&name("a"), &many, &operator(), NOW);
    assert!(matches!(error, Err(StoreError::OutOfBounds(_))));
    assert_eq!(mesh.store.revision().expect("asked"), 1);
}

#[test]
fn the_longest_policy_leaves_an_answer_in_its_bounds() {
    let longest = "x".repeat(Name::MAX_LEN);
    // As many as the text has room for.
    let rule = format!("allow tag:{longest} -> tag:{longest} tcp/10000-65535\n");
    let policy = Policy::parse(&rule.repeat(MAX_RULES)).expect("a policy");
    let party = Party {
        name: name(&longest),
        tags: vec![name(&longest); 16],
    };
    // As much beside it as there may be.
    let cost = MAX_ANSWER / MAX_MEMBERS;
    let news = (1..).take(MAX_MEMBERS).map(|revision| News {
        revision,
        cost,
        what: What::Removal(key(1)),
    });
    let told = Changes {
        policy: Some(policy),
        own: Some(party),
        ..tell(news.collect(), 9999, true)
    };
    assert!(told.more, "it was full");
    let others = serde_json::to_vec(&Changes {
        removed: Vec::new(),
        ..told.clone()
    });
    let room = MAX_ANSWER - told.removed.len() * cost;
    assert!(others.expect("JSON").len() <= room);
}

/// `cargo test -p seikan-coordinator --lib telling_cost -- --ignored --nocapture`: what docs/internals/mesh-figures.md has of telling all members of a change.
#[test]
#[ignore = "figures, of some seconds"]
fn telling_cost() {
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
            crowd(&mesh.store, count);
            let ids: Vec<MemberId> = (1..=i64::from(count)).map(MemberId).collect();
            let mut known = vec![seikan_proto::mesh::Cursor::default(); ids.len()];
            let mut tell = |what: &str| {
                let (begun, mut bytes) = (Instant::now(), 0);
                for (id, known) in ids.iter().zip(&mut known) {
                    let told = mesh.store.changes(*known, *id).expect("changes");
                    bytes += serde_json::to_vec(&told).expect("JSON").len();
                    *known = told.cursor();
                }
                let took = begun.elapsed().as_secs_f64() * 1e3;
                println!("{count} members, {policy}, {what}: {took:.1} ms, {bytes} bytes");
            };
            tell("nothing known");
            set(&mesh.store, &text);
            tell("another policy");
            let at = Endpoints {
                endpoints: vec![([192, 0, 2, 1], 7).into()],
                relayed: Vec::new(),
            };
            assert!(mesh.store.set_endpoints(ids[0], &at, NOW).expect("set"));
            tell("one moved");
        }
    }
}

on_etcd! {
    a_policy_is_kept_as_it_was_written_and_the_same_again_is_no_change
    what_is_no_policy_changes_nothing
    a_policy_is_told_once_and_to_who_knows_nothing
    tags_are_told_to_the_others_and_to_who_has_them
    a_member_is_told_of_those_alone_that_it_may_talk_to_in_either_direction
    who_is_another_by_its_tags_comes_and_goes_for_those_alone_to_whom_it_does
    another_policy_has_each_told_of_everybody_whom_it_may_know_and_parts_of_that_go_on
    another_policy_that_shows_a_member_nobody_else_is_told_and_nothing_more
    a_member_is_told_of_everybody_where_it_is_not_known_whom_it_was_told_of
    tags_are_for_members_and_not_too_many
    the_longest_policy_leaves_an_answer_in_its_bounds
}

//! Policies and tags.

use seikan_proto::mesh::policy::MAX_RULES;
use seikan_proto::mesh::{Changes, MAX_ANSWER, MAX_MEMBERS, Party, Policy};

use super::super::changes::{News, What, tell};
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
    set(&mesh.store, RULE);
    let policy = Some(Policy::parse(RULE).expect("a policy"));
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
    assert!(change("web eu"));
    assert!(!change("web eu"), "the same again");
    assert_eq!(told(2, a).own, Some(own("web eu")));
    assert_eq!(told(2, b).members[0].tags, tags("web eu"));
    assert_eq!(told(2, b).own, None);
    assert!(change(""));
    assert_eq!(told(3, a).own, Some(own("")));
    let newest = &mesh.store.audit(2).expect("an audit")[1];
    assert_eq!((&*newest.what, &*newest.subject), ("tags set", "a: web eu"));
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

on_etcd! {
    a_policy_is_kept_as_it_was_written_and_the_same_again_is_no_change
    what_is_no_policy_changes_nothing
    a_policy_is_told_once_and_to_who_knows_nothing
    tags_are_told_to_the_others_and_to_who_has_them
    tags_are_for_members_and_not_too_many
    the_longest_policy_leaves_an_answer_in_its_bounds
}

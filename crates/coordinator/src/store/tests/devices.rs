//! Devices behind members.

use seikan_proto::mesh::{Changes, Device, DeviceName, MAX_DEVICES, Reason};

use super::*;

fn names(words: &str) -> Vec<Name> {
    words.split_whitespace().map(name).collect()
}

fn full(text: &str) -> DeviceName {
    text.parse().expect("a name")
}

fn report(mesh: &Mesh, id: MemberId, words: &str) -> bool {
    let reported = mesh.store.report_devices(id, &names(words), &host(), NOW);
    reported.expect("reported")
}

fn approve(mesh: &Mesh, device: &str, tags: Option<&str>) -> bool {
    let tags = tags.map(names);
    let approved = mesh
        .store
        .approve_device(&full(device), tags.as_deref(), &operator(), NOW);
    approved.expect("approved")
}

fn whole(mesh: &Mesh, to: MemberId) -> Changes {
    mesh.store.changes(0, to).expect("changes")
}

fn since(mesh: &Mesh, since: u64, to: MemberId) -> Changes {
    mesh.store.changes(since, to).expect("changes")
}

fn revision(mesh: &Mesh) -> u64 {
    mesh.store.revision().expect("queried")
}

/// The names of the devices in an answer, each with that of its gateway.
fn devices(changes: &Changes) -> Vec<String> {
    let members = changes.members.iter();
    let devices = members.flat_map(|member| {
        let devices = member.devices.iter();
        devices.map(move |device| format!("{}.{}", device.name, member.name))
    });
    devices.collect()
}

fn states(mesh: &Mesh) -> Vec<(String, bool)> {
    let members = mesh.store.members().expect("members");
    let devices = members.iter().flat_map(|info| {
        info.devices.iter().map(|device| {
            let is_approved = matches!(device, DeviceInfo::Approved(_));
            (
                format!("{}.{}", device.name(), info.member.name),
                is_approved,
            )
        })
    });
    devices.collect()
}

#[test]
fn a_reported_device_waits_for_approval() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [gateway, laptop] = [mesh.join("site-a", 1), mesh.join("laptop", 2)];
    let before = revision(&mesh);
    assert!(report(&mesh, gateway, "printer plc"));
    assert!(!report(&mesh, gateway, "plc printer"), "the same again");
    // Nobody learns of it, the gateway included.
    assert_eq!(revision(&mesh), before);
    assert_eq!(devices(&whole(&mesh, laptop)), [""; 0]);
    assert_eq!(whole(&mesh, gateway).own_devices, []);
    let pending = |name: &str| (name.to_owned(), false);
    assert_eq!(
        states(&mesh),
        [pending("plc.site-a"), pending("printer.site-a")]
    );

    assert!(approve(&mesh, "printer.site-a", None));
    assert!(!approve(&mesh, "printer.site-a", None), "approved already");
    let changes = since(&mesh, before, laptop);
    assert_eq!(devices(&changes), ["printer.site-a"]);
    assert!(!changes.whole);
    let printer = &changes.members[0].devices[0];
    let addresses = printer.addresses.iter().map(ToString::to_string);
    assert!(addresses.eq(["100.80.0.3", "fd00::3"]));
    // The gateway receives its own devices and all members anew: it may see more of them now.
    let changes = since(&mesh, before, gateway);
    assert!(changes.whole);
    assert_eq!(changes.own_devices, std::slice::from_ref(printer));
    let newest = &mesh.store.audit(2).expect("an audit");
    let changes = newest.iter().map(|e| (&*e.change, &*e.subject));
    let expected = [
        ("device approved", "printer.site-a"),
        ("devices reported", "site-a"),
    ];
    assert_eq!(changes.collect::<Vec<_>>(), expected);
    // A member that joins gets another address, and everything survives a restart.
    mesh.join("b", 3);
    let members = mesh.reopen().members().expect("members");
    assert_eq!(members.last().map(|info| info.number), Some(4));
    assert_eq!(members[0].member.devices.len(), 1);
    assert_eq!(members[0].devices.len(), 2);
}

#[test]
fn a_device_that_is_no_longer_reported_is_gone() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [gateway, laptop] = [mesh.join("site-a", 1), mesh.join("laptop", 2)];
    report(&mesh, gateway, "printer plc");
    approve(&mesh, "printer.site-a", None);
    approve(&mesh, "plc.site-a", None);
    let before = revision(&mesh);
    assert!(report(&mesh, gateway, "plc"));
    assert_eq!(devices(&since(&mesh, before, laptop)), ["plc.site-a"]);
    // It returns as a new one: not approved, and with another address.
    report(&mesh, gateway, "plc printer");
    assert_eq!(devices(&whole(&mesh, laptop)), ["plc.site-a"]);
    approve(&mesh, "printer.site-a", None);
    let member = &whole(&mesh, laptop).members[0];
    let printer = member.devices.iter().find(|d| d.name == name("printer"));
    let address = printer.expect("the printer").addresses[0];
    assert_eq!(address, IpAddr::from([100, 80, 0, 5]));
    // An administrator takes an approval back.
    let revoke = || {
        let revoked = mesh
            .store
            .revoke_device(&full("printer.site-a"), &operator(), NOW);
        revoked.expect("revoked")
    };
    assert!(revoke() && !revoke());
    assert_eq!(devices(&whole(&mesh, laptop)), ["plc.site-a"]);
    assert_eq!(whole(&mesh, gateway).own_devices.len(), 1);
    // The gateway leaves with its devices.
    mesh.remove("site-a");
    assert!(states(&mesh).is_empty());
    assert_eq!(since(&mesh, before, laptop).removed, [key(1)]);
}

#[test]
fn a_device_is_seen_by_those_that_may_talk_to_it() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [gateway, other, laptop, guest] =
        [("site-a", 1), ("site-b", 2), ("laptop", 3), ("guest", 4)].map(|(n, i)| mesh.join(n, i));
    let policy = "allow laptop -> printer.site-a tcp/9100\nallow tag:panel -> tag:plc tcp/502\n";
    mesh.store
        .set_policy(policy, &operator(), NOW)
        .expect("set");
    report(&mesh, gateway, "printer plc");
    report(&mesh, other, "panel");
    for (device, tags) in [
        ("printer.site-a", None),
        ("plc.site-a", Some("plc")),
        ("panel.site-b", Some("panel")),
    ] {
        approve(&mesh, device, tags);
    }
    // Each with the gateway, and nothing else.
    for (to, seen) in [
        (laptop, vec!["printer.site-a"]),
        (gateway, vec!["panel.site-b"]),
        (other, vec!["plc.site-a"]),
        (guest, vec![]),
    ] {
        assert_eq!(devices(&whole(&mesh, to)), seen);
    }
    let members = |to| -> Vec<String> {
        let members = whole(&mesh, to).members;
        members.iter().map(|m| m.name.to_string()).collect()
    };
    assert_eq!(members(gateway), ["laptop", "site-b"]);
    assert!(members(guest).is_empty());
    // The gateway receives the rules of its devices, and may call the members that they need.
    let rules = whole(&mesh, gateway).policy.expect("a policy");
    assert_eq!((rules.rules().len(), rules.untold()), (2, 0));
    let called = |from, to| {
        mesh.store
            .pair(from, &key(to))
            .expect("queried")
            .1
            .is_some()
    };
    assert!(called(laptop, 1) && called(gateway, 3) && called(other, 1));
    assert!(!called(guest, 1));
    // Other tags take the device away from those that saw it.
    let before = revision(&mesh);
    let tagged = |words: &str| {
        let tags = names(words);
        let device = full("panel.site-b");
        let set = mesh.store.set_device_tags(&device, &tags, &operator(), NOW);
        set.expect("tagged")
    };
    assert!(tagged("") && !tagged(""));
    assert_eq!(since(&mesh, before, gateway).removed, [key(2)]);
    assert!(since(&mesh, before, other).whole);
    assert!(since(&mesh, before, laptop).removed.is_empty());
}

#[test]
fn a_trusted_token_approves_devices_with_the_tags_of_their_gateway() {
    let mesh = Mesh::new("100.80.0.0/12");
    let token = NewToken {
        tags: names("lab"),
        devices: true,
        ..NewToken::default()
    };
    let token = mesh.admit(2, token);
    let gateway = join(&mesh.store, 2, "site-a", 1).expect("joined").id;
    report(&mesh, gateway, "printer");
    let own = |mesh: &Mesh| -> Vec<Device> { whole(mesh, gateway).own_devices };
    assert_eq!(own(&mesh)[0].tags, names("lab"));
    // Other tags of the administrator stay.
    approve(&mesh, "printer.site-a", Some("prints"));
    report(&mesh, gateway, "printer plc");
    let tags: Vec<_> = own(&mesh).into_iter().map(|device| device.tags).collect();
    assert_eq!(tags, [names("lab"), names("prints")]);
    // The gateway could have a revoked one approved again by two reports.
    let revoke = || {
        mesh.store
            .revoke_device(&full("plc.site-a"), &operator(), NOW)
    };
    let refused = revoke().expect_err("trusted").to_string();
    assert!(
        refused.contains(&format!("withdraw {}", token.0)),
        "{refused}"
    );
    // A gateway that gets fewer tags keeps none by its devices.
    let tagged = mesh
        .store
        .set_tags(&name("site-a"), &names("shed"), &operator(), NOW);
    assert!(tagged.expect("tagged"));
    let tags: Vec<_> = own(&mesh).into_iter().map(|device| device.tags).collect();
    assert_eq!(tags, [names("shed"), names("prints")]);
    // A token that was withdrawn approves nothing more.
    let withdrawn = mesh.store.withdraw_token(token, &operator(), NOW);
    assert!(withdrawn.expect("withdrawn"));
    report(&mesh, gateway, "printer plc camera");
    assert_eq!(own(&mesh).len(), 2);
    assert!(revoke().expect("revoked"));
    report(&mesh, gateway, "printer camera");
    report(&mesh, gateway, "printer plc camera");
    assert_eq!(own(&mesh).len(), 1);
}

#[test]
fn a_hostile_gateway_gets_no_more_than_its_own() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [gateway, hostile, laptop] =
        [("site-a", 1), ("site-b", 2), ("laptop", 3)].map(|(n, i)| mesh.join(n, i));
    report(&mesh, gateway, "printer");
    approve(&mesh, "printer.site-a", None);
    let before = whole(&mesh, laptop);
    // The same name is another device, and it is not approved.
    report(&mesh, hostile, "printer");
    let after = whole(&mesh, laptop);
    assert_eq!(after.members, before.members);
    let refused = |reported: &[Name]| {
        let reported = mesh.store.report_devices(hostile, reported, &host(), NOW);
        reported.expect_err("refused").refusal()
    };
    let many: Vec<Name> = (0..10_000).map(|n| name(&format!("d{n}"))).collect();
    assert_eq!(refused(&many).reason, Reason::Malformed);
    assert!(refused(&many).message.contains("at most 64"));
    let most = &many[..=MAX_DEVICES];
    assert_eq!(refused(most).reason, Reason::Malformed);
    let twice = [name("a"), name("b"), name("a")];
    assert!(refused(&twice).message.contains("same name"));
    assert_eq!(states(&mesh).len(), 2);
    // Reports that differ each time are refused after a while, for an hour.
    let mut changed = 0;
    let flip = |n: usize| {
        let report = &many[n % 2..=n % 2];
        mesh.store.report_devices(hostile, report, &host(), NOW)
    };
    while flip(changed).is_ok() {
        changed += 1;
        assert!(changed < 100, "never refused");
    }
    assert_eq!(
        flip(changed).expect_err("refused").refusal().reason,
        Reason::TooMany
    );
    assert_eq!(whole(&mesh, laptop).members, before.members);
    // Others are not affected.
    report(&mesh, gateway, "printer plc");
    let later = NOW + 3601;
    let again = mesh
        .store
        .report_devices(hostile, &twice[..2], &host(), later);
    assert!(again.expect("reported"));
}

#[test]
fn a_device_that_nobody_reported_cannot_be_approved() {
    let mesh = Mesh::new("100.80.0.0/12");
    let gateway = mesh.join("site-a", 1);
    report(&mesh, gateway, "printer");
    for unknown in ["plc.site-a", "printer.site-b"] {
        let approved = mesh
            .store
            .approve_device(&full(unknown), None, &operator(), NOW);
        let error = approved.expect_err("unknown").to_string();
        assert!(error.contains(unknown), "{error}");
    }
    let tags = names("a");
    let tagged = mesh
        .store
        .set_device_tags(&full("printer.site-a"), &tags, &operator(), NOW);
    let error = tagged.expect_err("pending").to_string();
    assert!(error.contains("approve-device printer.site-a"), "{error}");
}

#[test]
fn addresses_of_devices_are_reused_last() {
    let mesh = Mesh::new("10.0.0.0/29");
    let gateway = mesh.join("site-a", 1);
    report(&mesh, gateway, "a b");
    approve(&mesh, "a.site-a", None);
    approve(&mesh, "b.site-a", None);
    report(&mesh, gateway, "b c d e f g");
    for device in ["c.site-a", "d.site-a", "e.site-a", "f.site-a"] {
        approve(&mesh, device, None);
    }
    // Six addresses: the gateway, and five devices; `f` has that of the first.
    let own = whole(&mesh, gateway).own_devices;
    let of = |wanted: &str| {
        let device = own.iter().find(|device| device.name == name(wanted));
        device.expect(wanted).addresses[0]
    };
    assert_eq!(of("f"), IpAddr::from([10, 0, 0, 2]));
    let full_mesh = mesh
        .store
        .approve_device(&full("g.site-a"), None, &operator(), NOW);
    assert!(matches!(full_mesh, Err(StoreError::Full { capacity: 6 })));
}

on_etcd! {
    a_reported_device_waits_for_approval
    a_device_that_is_no_longer_reported_is_gone
    a_device_is_seen_by_those_that_may_talk_to_it
    a_trusted_token_approves_devices_with_the_tags_of_their_gateway
    a_hostile_gateway_gets_no_more_than_its_own
}

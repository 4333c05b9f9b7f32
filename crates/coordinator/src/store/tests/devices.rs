//! Devices behind members.

use seikan_proto::mesh::{Changes, Device, DeviceName, Devices, MAX_ANSWER, MAX_DEVICES, Reason};

use super::*;

fn names(words: &str) -> Vec<Name> {
    words.split_whitespace().map(name).collect()
}

fn full(text: &str) -> DeviceName {
    text.parse().expect("a name")
}

fn listed(devices: &[Name]) -> Devices {
    Devices {
        devices: devices.to_vec(),
        ..Devices::default()
    }
}

fn report(mesh: &Mesh, id: MemberId, words: &str) -> bool {
    let reported = listed(&names(words));
    let reported = mesh.store.report_devices(id, &reported, &host(), NOW);
    reported.expect("reported")
}

/// Approves the device `to` as the former device `from`, with the tags of `from`.
fn move_device(mesh: &Mesh, from: &str, to: &str) -> Result<(), String> {
    let (from, to) = (full(from), full(to));
    let moved = mesh.store.move_device((&from, &to), None, &operator(), NOW);
    moved.map_err(|error| error.to_string())
}

/// The IPv4 address and the tags of a device, as a member receives it.
fn seen(mesh: &Mesh, to: MemberId, device: &str) -> Option<(IpAddr, Vec<Name>)> {
    let wanted = full(device);
    let members = whole(mesh, to).members;
    let gateway = members.into_iter().find(|m| m.name == wanted.gateway)?;
    let mut devices = gateway.devices.into_iter();
    let device = devices.find(|device| device.name == wanted.device)?;
    Some((device.addresses[0], device.tags))
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

/// Returns the names of the devices in an answer, each with the name of its gateway.
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
    // No member receives the pending device, not even its gateway.
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
    // A device that returns is new: not approved, and with another address.
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
    // With other tags, members that saw the device no longer see it.
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
    // The gateway could have a revoked device approved again by two reports.
    let revoke = || {
        mesh.store
            .revoke_device(&full("plc.site-a"), &operator(), NOW)
    };
    let refused = revoke().expect_err("trusted").to_string();
    assert!(
        refused.contains(&format!("withdraw {}", token.0)),
        "{refused}"
    );
    // If a gateway loses a tag, devices with the gateway's tags lose it too.
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
        let reported = mesh
            .store
            .report_devices(hostile, &listed(reported), &host(), NOW);
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
        let report = listed(&many[n % 2..=n % 2]);
        mesh.store.report_devices(hostile, &report, &host(), NOW)
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
        .report_devices(hostile, &listed(&twice[..2]), &host(), later);
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
fn a_device_moves_to_another_gateway_with_its_addresses_and_tags() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b, laptop] =
        [("site-a", 1), ("site-b", 2), ("laptop", 3)].map(|(n, i)| mesh.join(n, i));
    // Without rules, tags decide who sees what.
    let set = mesh.store.set_policy("allow * -> * *\n", &operator(), NOW);
    assert!(set.expect("set"));
    report(&mesh, a, "plc printer camera");
    for (device, tags) in [
        ("plc.site-a", Some("plcs")),
        ("printer.site-a", None),
        ("camera.site-a", None),
    ] {
        approve(&mesh, device, tags);
    }
    let [plc, printer, camera] = ["plc.site-a", "printer.site-a", "camera.site-a"]
        .map(|device| seen(&mesh, laptop, device).expect("a device").0);
    // The former gateway has removed it, or reports it still.
    report(&mesh, a, "printer camera");
    report(&mesh, b, "plc printer camera");
    assert_eq!(seen(&mesh, laptop, "plc.site-b"), None, "not approved");
    assert_eq!(move_device(&mesh, "plc.site-a", "plc.site-b"), Ok(()));
    assert_eq!(
        move_device(&mesh, "printer.site-a", "printer.site-b"),
        Ok(())
    );
    assert_eq!(
        seen(&mesh, laptop, "plc.site-b"),
        Some((plc, names("plcs")))
    );
    let at_b = seen(&mesh, laptop, "printer.site-b");
    assert_eq!(at_b, Some((printer, Vec::new())));
    assert_eq!(seen(&mesh, laptop, "printer.site-a"), None);
    assert!(states(&mesh).contains(&("printer.site-a".to_owned(), false)));
    // Nobody else gets these addresses, and the gateway that leaves does not take them along.
    let refused = move_device(&mesh, "plc.site-a", "camera.site-b").expect_err("refused");
    assert!(refused.contains("plc.site-a has no addresses"), "{refused}");
    let unknown = move_device(&mesh, "camera.site-a", "scanner.site-b").expect_err("refused");
    assert!(unknown.contains("scanner.site-b"), "{unknown}");
    mesh.remove("site-a");
    assert_eq!(move_device(&mesh, "camera.site-a", "camera.site-b"), Ok(()));
    let at_b = seen(&mesh, laptop, "camera.site-b");
    assert_eq!(at_b, Some((camera, Vec::new())));
    let newest = &mesh.store.audit(1).expect("an audit")[0];
    let newest = (&*newest.change, &*newest.subject);
    assert_eq!(newest, ("device moved", "camera.site-a to camera.site-b"));
    // A device gets another name at the same gateway.
    report(&mesh, b, "plc printer camera scanner");
    assert_eq!(
        move_device(&mesh, "camera.site-b", "scanner.site-b"),
        Ok(())
    );
    let renamed = seen(&mesh, laptop, "scanner.site-b").expect("a device");
    assert_eq!(renamed.0, camera);
    assert_eq!(seen(&mesh, laptop, "camera.site-b"), None);
}

#[test]
fn a_trusted_device_moves_between_gateways_of_one_token_alone() {
    let mesh = Mesh::new("100.80.0.0/12");
    let trusting = |tags: &str| NewToken {
        tags: names(tags),
        devices: true,
        uses: None,
        ..NewToken::default()
    };
    mesh.admit(2, trusting("lab"));
    mesh.admit(3, trusting("shed"));
    let joined = |token, name: &str, n| join(&mesh.store, token, name, n).expect("joined").id;
    let gateways = [
        (2, "site-a", 1),
        (2, "site-b", 2),
        (2, "site-d", 4),
        (3, "site-c", 3),
    ];
    let [a, b, third, other] = gateways.map(|(token, name, n)| joined(token, name, n));
    report(&mesh, a, "plc");
    let own = |id| whole(&mesh, id).own_devices[0].clone();
    let plc = own(a);
    // Another device with this name, while the first one is there.
    report(&mesh, b, "plc");
    let namesake = own(b);
    assert_ne!(namesake.addresses, plc.addresses);
    report(&mesh, b, "");
    // The other token has other gateways, and other people may have made it.
    report(&mesh, a, "");
    report(&mesh, other, "plc");
    assert_ne!(own(other).addresses, plc.addresses);
    // Its own former addresses come first.
    report(&mesh, b, "plc");
    assert_eq!(own(b), namesake);
    report(&mesh, third, "plc");
    assert_eq!(own(third), plc);
}

#[test]
fn all_devices_are_replaced_by_former_ones() {
    let mesh = Mesh::new("100.80.0.0/12");
    let trusting = NewToken {
        devices: true,
        ..NewToken::default()
    };
    mesh.admit(2, trusting);
    let gateway = join(&mesh.store, 2, "site-a", 1).expect("joined").id;
    let all = |letter: &str| {
        let words = (0..MAX_DEVICES).map(|n| format!("{letter}{n} "));
        report(&mesh, gateway, &words.collect::<String>());
        whole(&mesh, gateway).own_devices
    };
    let first = all("a");
    assert_eq!(first.len(), MAX_DEVICES);
    all("b");
    // Each takes its former number back, and each of the others gives one up.
    assert_eq!(all("a"), first);
    let audit = mesh.store.audit(100).expect("an audit");
    let reports = audit.iter().filter(|e| e.change == "devices reported");
    assert_eq!(reports.count(), 3);
}

#[test]
fn a_device_has_addresses_of_its_own_families() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [gateway, laptop] = [mesh.join("site-a", 1), mesh.join("laptop", 2)];
    let report = |ipv4_only: &str, ipv6_only: &str| {
        let reported = Devices {
            devices: names("plc camera pc"),
            ipv4_only: names(ipv4_only),
            ipv6_only: names(ipv6_only),
        };
        let reported = mesh.store.report_devices(gateway, &reported, &host(), NOW);
        reported.expect("reported")
    };
    let addresses = || -> Vec<String> {
        let member = &whole(&mesh, laptop).members[0];
        let devices = member.devices.iter();
        let texts = devices.map(|device| {
            let addresses = device.addresses.iter().map(ToString::to_string);
            format!(
                "{} {}",
                device.name,
                addresses.collect::<Vec<_>>().join(" ")
            )
        });
        texts.collect()
    };
    assert!(report("plc", "camera") && !report("plc", "camera"));
    for device in ["plc.site-a", "camera.site-a", "pc.site-a"] {
        approve(&mesh, device, None);
    }
    let expected = ["camera fd00::4", "pc 100.80.0.5 fd00::5", "plc 100.80.0.3"];
    assert_eq!(addresses(), expected);
    // Its gateway lists an IPv6 address, too: others receive it.
    let before = revision(&mesh);
    assert!(report("", "camera"));
    assert_eq!(addresses()[2], "plc 100.80.0.3 fd00::3");
    assert_eq!(since(&mesh, before, laptop).members.len(), 1);
}

#[test]
fn devices_count_as_members_that_are_examined_for_an_answer() {
    let mesh = Mesh::new("100.80.0.0/12");
    let token = NewToken {
        devices: true,
        ..NewToken::default()
    };
    mesh.admit(2, token);
    let gateway = join(&mesh.store, 2, "site-a", 1).expect("joined").id;
    let laptop = mesh.join("laptop", 2);
    let many: Vec<String> = (0..MAX_DEVICES).map(|n| format!("d{n}")).collect();
    report(&mesh, gateway, &many.join(" "));
    let rows = |since: u64| {
        let answer = mesh.store.answer(since, laptop, MAX_ANSWER);
        answer.expect("an answer").rows
    };
    assert_eq!(rows(0), 2 + MAX_DEVICES);
    // The gateway as it is, and as it was.
    let before = revision(&mesh);
    report(&mesh, gateway, "");
    assert_eq!(rows(before), 2 + MAX_DEVICES);
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
    // Six addresses: the gateway, and five devices; `f` has the former address of `a`.
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
    a_device_moves_to_another_gateway_with_its_addresses_and_tags
    a_trusted_device_moves_between_gateways_of_one_token_alone
    all_devices_are_replaced_by_former_ones
    a_device_has_addresses_of_its_own_families
}

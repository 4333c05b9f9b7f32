//! The rollback of a coordinator, by the commands of docs/reference/compatibility.md. The version
//! before the upgrade is this one. A script changes the file as a later one does.

use super::compare;
use super::hosts::Network;
use super::page::{Directive, HostDefinition, Interface, Language, Page};
use super::project;
use crate::common::skip;
use std::path::Path;

const PAGE: &str = "docs/reference/compatibility.md";

/// Changes the database as a later version does.
const LATER_VERSION: &str = include_str!("../../../../packaging/tests/later_version.py");
const DATABASE: &str = "/var/lib/seikan-coordinator/mesh.db";

const JOIN: &str = "sudo seikan join https://hub.example.org:7443 --pin sha256:... --token skt_...";

fn host(name: &str, number: u8) -> HostDefinition {
    HostDefinition {
        name: name.to_owned(),
        interfaces: vec![Interface {
            name: "eth0".to_owned(),
            addresses: vec![format!("192.0.2.{number}/24")],
            mac: None,
            switch: "internet".to_owned(),
        }],
    }
}

/// Runs commands on a host, up to `tries` times.
fn run(network: &mut Network, name: &str, script: &str, tries: usize) -> String {
    let directive = Directive {
        tries,
        ..Directive::default()
    };
    let result = network.host(name).run(script, &directive);
    result.unwrap_or_else(|problem| panic!("on {name}: {problem}\n{script}\n{}", network.end()))
}

/// Lets a host join with the token that `hub` printed.
fn join(network: &mut Network, name: &str) {
    let command = compare::fill(JOIN, network.host("hub").printed()).expect("a token");
    run(network, name, &command, 1);
}

#[test]
fn a_coordinator_goes_back_to_the_version_before_with_its_members() {
    if !Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    let page = Page::read(&project().join(PAGE));
    let mut blocks = page.blocks.iter();
    let documented = blocks
        .find(|block| block.language == Language::Shell && block.text.contains("mesh.db.schema"))
        .expect("a block of commands");
    let hosts = [host("hub", 1), host("laptop", 11), host("web", 12)];
    let mut network = match Network::create(&hosts) {
        Ok(network) => network,
        Err(reason) => return skip(&reason),
    };
    run(
        &mut network,
        "hub",
        "sudo systemctl enable --now seikan-coordinator
        sudo -u seikan-coordinator seikan coordinator token --reusable --host hub.example.org",
        1,
    );
    join(&mut network, "laptop");
    let later = |action: &str| {
        format!(
            "sudo -u seikan-coordinator python3 - {action} {DATABASE} <<'END'\n{LATER_VERSION}END\n"
        )
    };
    let upgrade = later("upgrade");
    let stop = format!("sudo systemctl stop seikan-coordinator\n{upgrade}");
    run(&mut network, "hub", &stop, 1);
    let fails = Directive {
        fails: true,
        ..Directive::default()
    };
    let refused = network.host("hub");
    let refused = refused.run("sudo systemctl start seikan-coordinator", &fails);
    let refused = refused.expect("a refusal");
    assert!(refused.contains("a later version of seikan"), "{refused}");
    // Its log must not get into the copy.
    let kill = later("kill");
    let kill = format!("{kill}[ -s {DATABASE}-wal ]\n");
    run(&mut network, "hub", &kill, 1);
    // packaging/tests/upgrade.sh installs a package; here the program is this one all along.
    let apt = "printf '#!/bin/sh\\n' > /usr/local/bin/apt\nchmod 755 /usr/local/bin/apt\n";
    run(&mut network, "hub", &format!("{apt}{}", documented.text), 1);
    let members = "sudo -u seikan-coordinator seikan coordinator members";
    let members = run(&mut network, "hub", members, 1);
    assert!(members.contains("laptop"), "{members}");
    // The member that joined before the rollback hears of a new one, from this coordinator.
    join(&mut network, "web");
    run(&mut network, "laptop", "seikan ping -c 1 web", 60);
}

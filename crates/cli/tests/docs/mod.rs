//! Tests the pages of the documentation as a reader would: runs every command block on hosts in
//! namespaces, and compares the output with the page.
//!
//! HTML comments, invisible to the reader, name the host of a block ([`page::Directive`]):
//!
//! ```text
//! <!-- host office: eth0 192.0.2.1/24 at internet -->  defines a host; semicolons separate interfaces
//! <!-- continues PAGE up to "HEADING" -->              runs the blocks of another page first, on its hosts
//! <!-- on office -->                                   runs the following blocks there
//! <!-- on office, until "listens" -->                  leaves the next block in the background once it printed that
//! <!-- on office, fails -->                            expects a status other than 0 of the next block
//! <!-- on office, tries 3 -->                          repeats the next block if its output does not fit
//! <!-- on office, from branch -->                      fills `...` in the next block from branch's output
//! <!-- not run: reason -->                             does not run the next block; on every page, a block of `sh` is
//!                                                      run or has a reason
//! <!-- not a configuration -->                         does not check the next block of TOML
//! ```
//!
//! `sh` blocks are run. A `console` block is the output of the `sh` block before it: figures, keys
//! and addresses may differ, and a line `...` stands for any lines. `toml` and `ini` blocks are
//! checked by `seikan check`. `UPDATE_GOLDEN=1` rewrites `console` blocks that do not fit: review
//! the changes.

mod commands;
mod compare;
mod hosts;
mod page;
mod reference;
mod rollback;

use crate::common::skip;
use hosts::Network;
use page::{Block, Language, Page};
use std::path::{Path, PathBuf};

/// Defines a test for each page, and the list of all of them.
macro_rules! pages {
    ($($name:ident: $path:literal,)*) => {
        const PAGES: &[&str] = &[$($path),*];
        $(
            #[test]
            fn $name() {
                run($path);
            }
        )*
    };
}

pages! {
    readme: "README.md",
    getting_started_install: "docs/getting-started/install.md",
    getting_started_tunnel: "docs/getting-started/tunnel.md",
    getting_started_mesh: "docs/getting-started/mesh.md",
    getting_started_gateway: "docs/getting-started/gateway.md",
    getting_started_doctor: "docs/getting-started/doctor.md",
    guide_routes_and_dns: "docs/guides/routes-and-dns.md",
    guide_doctor_recordings: "docs/guides/doctor-recordings.md",
    guide_wg_quick: "docs/guides/wg-quick.md",
    guide_without_root: "docs/guides/without-root.md",
    guide_library: "docs/guides/library.md",
    guide_ethernet: "docs/guides/ethernet.md",
    guide_hooks: "docs/guides/hooks.md",
    guide_monitoring: "docs/guides/monitoring.md",
    guide_logs: "docs/guides/logs.md",
    guide_bug_reports: "docs/guides/bug-reports.md",
    guide_containers: "docs/guides/containers.md",
    guide_openwrt: "docs/guides/openwrt.md",
    guide_coordinator: "docs/guides/coordinator.md",
    guide_members: "docs/guides/members.md",
    guide_policy: "docs/guides/policy.md",
    guide_names: "docs/guides/names.md",
    guide_devices: "docs/guides/devices.md",
    guide_key_rotation: "docs/guides/key-rotation.md",
    guide_pinned_keys: "docs/guides/pinned-keys.md",
    guide_nat_traversal: "docs/guides/nat-traversal.md",
    guide_paths: "docs/guides/paths.md",
    guide_relays: "docs/guides/relays.md",
    guide_relays_tls: "docs/guides/relays-tls.md",
    guide_turn: "docs/guides/turn.md",
    guide_multiple_coordinators: "docs/guides/multiple-coordinators.md",
    guide_gateway_lan: "docs/guides/gateway-lan.md",
    guide_gateway_routed: "docs/guides/gateway-routed.md",
    guide_gateway_pair: "docs/guides/gateway-pair.md",
    guide_gateway_status: "docs/guides/gateway-status.md",
    reference_configuration: "docs/reference/configuration.md",
    reference_compatibility: "docs/reference/compatibility.md",
    reference_json: "docs/reference/json.md",
}

/// Reasons for which a block may be left out.
const ACCEPTED_REASONS: [&str; 8] = [
    "builds the program",
    "takes minutes",
    // userspace/member.rs
    "tested with a mesh",
    // The tests `mesh::web_proxy` have one.
    "needs a web proxy",
    // Settings of the kernel, of the firewall or of devices, which the doctor recommends.
    "changes the system",
    "needs a slow tunnel",
    "needs a capture",
    "needs a package of PyPI",
];

/// Targets that run scripts of packaging/tests. The reason `dist-check: image.sh` names one of them and the script;
/// `make house` checks that the script has the commands.
const TARGETS_OF_SCRIPTS: [&str; 2] = ["dist-check", "openwrt-check"];

/// Returns why a block may not be left out for this reason.
fn objection(reason: &str, block: &str) -> Option<String> {
    let none = || Some(format!("{reason:?} is no reason to leave a block out"));
    if ACCEPTED_REASONS.contains(&reason) {
        return None;
    }
    let Some((kind, name)) = reason.split_once(": ") else {
        return none();
    };
    if TARGETS_OF_SCRIPTS.contains(&kind) && project().join("packaging/tests").join(name).is_file()
    {
        return None;
    }
    // A test of this folder that has the options, such as `tests: mesh/devices.rs`.
    let test = project().join("crates/cli/tests").join(name);
    match std::fs::read_to_string(test) {
        Ok(test) if kind == "tests" => {
            let untested: Vec<_> = options(block).filter(|&o| !test.contains(o)).collect();
            (!untested.is_empty()).then(|| format!("{name} does not test {untested:?}"))
        }
        _ => none(),
    }
}

/// Returns the verbs and long options of the program in a block.
fn options(block: &str) -> impl Iterator<Item = &str> {
    block.lines().flat_map(|line| {
        let command = line.split("  #").next().unwrap_or_default();
        let words = command.split_once("seikan ").map_or("", |(_, words)| words);
        let mut words = words.split_whitespace();
        let verb = words.next();
        verb.into_iter()
            .chain(words.filter(|word| word.starts_with("--")))
    })
}

/// Returns the folder of the project.
pub fn project() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    folder.canonicalize().expect("the project")
}

/// Returns README.md and all pages under docs/, as paths within the project.
fn all_pages() -> Vec<String> {
    let mut folders = vec![project().join("docs")];
    let mut pages = vec!["README.md".to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                let path = path.strip_prefix(project()).expect("in the project");
                pages.push(path.to_str().expect("UTF-8").to_owned());
            }
        }
    }
    pages.sort();
    pages
}

/// Runs the blocks of a page in order, and compares their output.
fn run(path: &str) {
    if !Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    let mut page = Page::read(&project().join(path));
    let earlier = page.continues.as_ref().map(|(path, heading)| {
        let page = Page::read(&project().join("docs").join(path));
        let end = page.line_of(heading);
        (path.clone(), page, end)
    });
    let hosts = earlier.iter().flat_map(|(_, page, _)| &page.hosts);
    let hosts: Vec<_> = hosts.chain(&page.hosts).cloned().collect();
    let mut network = match Network::create(&hosts) {
        Ok(network) => network,
        Err(reason) => return skip(&reason),
    };
    if let Some((path, page, end)) = &earlier {
        let blocks = page.blocks.iter().filter(|block| block.line < *end);
        for block in blocks.filter(|block| block.language == Language::Shell) {
            run_block(&mut network, block, &format!("{path}:{}", block.line));
        }
    }
    let mut last: Option<(Block, String)> = None;
    for index in 0..page.blocks.len() {
        let block = page.blocks[index].clone();
        let location = format!("{path}:{}", block.line);
        match block.language {
            Language::Shell => {
                let output = run_block(&mut network, &block, &location);
                last = Some((block, output));
            }
            Language::Console => {
                let (source, output) = last
                    .as_mut()
                    .unwrap_or_else(|| panic!("{location}: output without a block"));
                for _ in 1..source.directive.tries {
                    if compare::fits(&block.text, output) {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_secs(1));
                    *output = run_block(&mut network, source, &location);
                }
                compare_output(&mut page, index, output, &location);
            }
            Language::Configuration(ending) if !block.directive.foreign => {
                check_configuration(&block.text, ending, &location);
            }
            _ => {}
        }
    }
    page.write_if_changed();
}

/// Runs a block of commands and returns their output.
fn run_block(network: &mut Network, block: &Block, location: &str) -> String {
    if let Some(reason) = &block.directive.not_run {
        let objection = objection(reason, &block.text);
        assert_eq!(objection, None, "{location}");
        return String::new();
    }
    let host = block.host.as_deref();
    let host = host.unwrap_or_else(|| panic!("{location}: no host is given for this block"));
    let mut script = block.text.clone();
    if let Some(source) = &block.directive.filled_from {
        script = compare::fill(&script, network.host(source).printed())
            .unwrap_or_else(|line| panic!("{location}: {source} printed nothing like {line:?}"));
    }
    let result = network.host(host).run(&script, &block.directive);
    result.unwrap_or_else(|problem| {
        let states = network.end();
        panic!("{location}: on {host}: {problem}\n{script}\n{states}")
    })
}

/// Compares a `console` block with the output, or rewrites it.
fn compare_output(page: &mut Page, index: usize, output: &str, location: &str) {
    let expected = &page.blocks[index].text;
    if compare::fits(expected, output) {
        return;
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        page.replace(index, &compare::without_secrets(output));
        return;
    }
    panic!("{location}: the output differs; shown:\n{expected}\nprinted:\n{output}");
}

/// Checks a configuration, or a part of one, with `seikan check`.
fn check_configuration(text: &str, ending: &str, location: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let [key, peer] = [(); 2].map(|()| crate::common::key_pair());
    let file = folder.path().join(format!("tunnel.{ending}"));
    let names_key = ["private-key", "PrivateKey"]
        .iter()
        .any(|name| text.contains(name));
    let mut whole = match (names_key, ending) {
        (true, _) => String::new(),
        (false, "toml") => format!("private-key = \"{}\"\n", key.0),
        (false, _) => format!("[Interface]\nPrivateKey = {}\n", key.0),
    };
    whole += &text
        .replace("\"...\"", &format!("\"{}\"", peer.1))
        .replace("= ...", &format!("= {}", peer.1));
    let own = folder.path().display().to_string();
    whole = whole.replace("/etc/seikan", &own);
    std::fs::write(&file, whole).expect("written");
    for word in text
        .split(['"', ' ', '\n', '/'])
        .filter(|word| word.ends_with(".key"))
    {
        let path = folder.path().join(word);
        std::fs::write(&path, format!("{}\n", key.0)).expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).expect("a mode");
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&file, mode).expect("a mode");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_seikan"))
        .arg("check")
        .arg(&file)
        .output()
        .expect("seikan");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{location}: {said}\n{text}");
}

#[test]
fn every_block_of_commands_is_run_or_says_why_not() {
    let mut faults = Vec::new();
    for path in all_pages() {
        let page = Page::read(&project().join(&path));
        for block in page.blocks {
            let location = format!("{path}:{}", block.line);
            if block.language != Language::Shell {
                continue;
            }
            match &block.directive.not_run {
                Some(reason) => {
                    let objection = objection(reason, &block.text);
                    faults.extend(objection.map(|fault| format!("{location}: {fault}")));
                }
                None if PAGES.contains(&path.as_str()) => continue,
                None => faults.push(format!(
                    "{location}: mark it `not run`, or add the page to PAGES"
                )),
            }
            // At least, the shell can read it.
            let parsed = std::process::Command::new("bash")
                .args(["-n", "-c", &block.text])
                .output()
                .expect("bash");
            if !parsed.status.success() {
                let said = String::from_utf8_lossy(&parsed.stderr);
                faults.push(format!("{location}: {said}"));
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

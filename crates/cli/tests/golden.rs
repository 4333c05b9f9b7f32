//! Golden texts: `--help` of every verb, and the shapes of `--json` output.
//!
//! `UPDATE_GOLDEN=1` rewrites the files under `tests/golden` (`make golden`): review the changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::mesh::site::{Host, SOON, at_a_site, while_answering};
use seikan_diagnose::Action;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

pub fn updates() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1")
}

/// Returns the difference between the golden text `name` and `text`, if any.
fn difference(name: &str, text: &str) -> Option<String> {
    let path = folder().join(name);
    if updates() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(&path, text).expect("written");
        return None;
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    if golden == text {
        return None;
    }
    let [before, after] = [&golden[..], text].map(|text| text.lines().collect::<BTreeSet<_>>());
    let gone = golden.lines().filter(|line| !after.contains(line));
    let new = text.lines().filter(|line| !before.contains(line));
    let lines = gone
        .map(|l| format!("- {l}\n"))
        .chain(new.map(|l| format!("+ {l}\n")));
    Some(format!(
        "{}:\n{}",
        path.display(),
        lines.collect::<String>()
    ))
}

/// Headings of lists of verbs.
const LISTS: [&str; 5] = ["Commands:", "Tunnel:", "Mesh:", "Diagnose:", "Tools:"];

/// Returns the help of a verb, at a fixed width, and the verbs below it.
pub fn help(words: &[String]) -> (String, Vec<String>) {
    let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
        .args(words)
        .arg("--help")
        .env("COLUMNS", "100")
        .env("NO_COLOR", "1")
        .output()
        .expect("seikan");
    assert!(output.status.success(), "{words:?}: {output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let mut in_list = false;
    let verbs = text
        .lines()
        .filter(|line| {
            if !line.starts_with(' ') {
                in_list = LISTS.contains(line);
            }
            // A wrapped description is indented further.
            in_list && line.starts_with("  ") && !line.starts_with("   ")
        })
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .map(str::to_owned)
        .collect();
    (text, verbs)
}

#[test]
fn the_help_of_every_verb_is_its_golden_text() {
    let mut known = BTreeSet::new();
    let mut differences = String::new();
    let mut waiting = vec![Vec::new()];
    while let Some(words) = waiting.pop() {
        let (text, verbs) = help(&words);
        let name = [&["seikan".to_owned()], &words[..]].concat().join("-") + ".txt";
        differences.extend(difference(&format!("help/{name}"), &text));
        known.insert(name);
        waiting.extend(verbs.into_iter().map(|verb| [&words[..], &[verb]].concat()));
    }
    assert!(known.len() > 20, "the verbs are not found: {known:?}");
    for file in fs::read_dir(folder().join("help")).expect("a folder") {
        let file = file.expect("a file");
        let name = file.file_name().into_string().expect("UTF-8");
        if !known.contains(&name) {
            if updates() {
                fs::remove_file(file.path()).expect("removed");
            } else {
                differences += &format!("{name}: of a verb that is not there\n");
            }
        }
    }
    assert!(
        differences.is_empty(),
        "the help has changed; if it should, run `make golden`:\n{differences}"
    );
}

/// Objects whose keys are data, such as drop reasons, by the name of their field.
const MAPS: [&str; 5] = ["drops", "features", "relays", "sysctls", "turn"];

/// A list of actions, whose kinds have different fields. The kinds in a run depend on the machine,
/// so [`the_json_of_every_action_has_its_golden_shape`] checks their shape.
const ACTIONS: &str = ".actions[]";

/// Types by path, and whether the value may be missing: one line each in a golden file.
type Shape = BTreeMap<String, (BTreeSet<&'static str>, bool)>;

fn describe(path: &str, value: &Value, shape: &mut Shape) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    shape.entry(path.to_owned()).or_default().0.insert(kind);
    match value {
        Value::Array(values) => {
            let path = format!("{path}[]");
            values.iter().for_each(|v| describe(&path, v, shape));
        }
        Value::Object(_) if path.ends_with(ACTIONS) => {}
        Value::Object(fields) => {
            let is_map = MAPS.iter().any(|name| path.ends_with(&format!(".{name}")));
            for (name, value) in fields {
                let name = if is_map { "*" } else { name };
                describe(&format!("{path}.{name}"), value, shape);
            }
        }
        _ => {}
    }
}

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Parses lines of a path, `?` if the value may be missing, and types: `.peers[].name?
/// null|string`.
fn read(text: &str) -> Shape {
    let line = |line: &str| {
        let (path, types) = line.rsplit_once(' ').expect("a path and types");
        let types = types.split('|').map(|name| {
            let known = TYPES.iter().find(|known| **known == name);
            *known.unwrap_or_else(|| panic!("no type: {name}"))
        });
        let named = path.trim_end_matches('?');
        (named.to_owned(), (types.collect(), named != path))
    };
    text.lines().map(line).collect()
}

fn write(shape: &Shape) -> String {
    let line = |(path, (types, optional)): (&String, &(BTreeSet<&str>, bool))| {
        let types: Vec<&str> = types.iter().copied().collect();
        let mark = if *optional { "?" } else { "" };
        format!("{path}{mark} {}\n", types.join("|"))
    };
    shape.iter().map(line).collect()
}

/// Returns the path of the container of a value.
fn parent(path: &str) -> &str {
    let end = path.rfind('.').unwrap_or(0);
    &path[..end]
}

/// Checks that `value`, the output of `seikan NAME --json`, has only fields and types of the golden
/// file, and all of those that are not optional. `UPDATE_GOLDEN=1` adds new ones to the file.
pub fn check_shape(name: &str, value: &Value) {
    let path = folder().join(format!(
        "json/{}.txt",
        name.replace(" --", "-").replace(' ', "-")
    ));
    let golden = read(&fs::read_to_string(&path).unwrap_or_default());
    let mut found = Shape::new();
    describe("", value, &mut found);
    // A field is missing if its container exists. Elements of a list may be of several kinds, or
    // none.
    let missing = |path: &str| {
        let is_there = found.contains_key(path) || path.contains("[]") || path.contains(".*");
        let container = found.get(parent(path));
        !is_there && container.is_some_and(|(types, _)| types.contains("object"))
    };
    if updates() {
        // Other tests may update the same file.
        fs::create_dir_all(folder()).expect("created");
        let alone = fs::File::open(folder()).expect("a folder");
        alone.lock().expect("locked");
        let mut golden = read(&fs::read_to_string(&path).unwrap_or_default());
        let is_new = golden.is_empty();
        for (path, (_, optional)) in &mut golden {
            *optional |= missing(path);
        }
        for (path, (types, _)) in found {
            let known = golden.contains_key(&path);
            let entry = golden.entry(path.clone()).or_default();
            entry.0.extend(types);
            entry.1 |= !known && !is_new;
        }
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(&path, write(&golden)).expect("written");
        return;
    }
    let mut differences = String::new();
    // A value that was always null, or a list that was always empty, may hold anything.
    let only_null = |path: &str| {
        let types = golden.get(path).map(|(types, _)| types);
        types.is_some_and(|types| types.iter().eq(["null"].iter()))
    };
    let only_empty = |path: &str| {
        let types = golden.get(path).map(|(types, _)| types);
        types.is_some_and(|types| types.contains("array"))
            && !golden.contains_key(&format!("{path}[]"))
    };
    let is_within_unseen = |path: &str| {
        let ends = path.char_indices().filter(|(_, c)| ".[".contains(*c));
        let mut ancestors = ends.map(|(end, _)| &path[..end]);
        ancestors.any(|ancestor| only_null(ancestor) || only_empty(ancestor))
    };
    for (path, (types, _)) in &found {
        let is_known = golden
            .get(path)
            .is_some_and(|(known, _)| types.iter().all(|t| *t == "null" || known.contains(t)));
        if !is_known && !only_null(path) && !is_within_unseen(path) {
            differences += &format!("+ {path} {types:?}\n");
        }
    }
    for (path, (types, optional)) in &golden {
        if !optional && missing(path) {
            differences += &format!("- {path} {types:?}\n");
        }
    }
    assert!(
        differences.is_empty(),
        "the JSON of `seikan {name}` has changed; if it should, run `make golden` and change the documentation:\n\
         {differences}in {value:#}"
    );
}

#[test]
fn the_json_of_every_action_has_its_golden_shape() {
    let (link, cpus) = (|| "eth0".to_owned(), || vec![0, 1]);
    let actions = [
        Action::QueueLength {
            link: link(),
            packets: 1000,
        },
        Action::Mtu {
            link: link(),
            bytes: 1500,
        },
        Action::Offload {
            link: link(),
            feature: "gro".into(),
            on: true,
        },
        Action::Sysctl {
            name: "net.core.rmem_default".into(),
            value: "212992".into(),
        },
        Action::Rps {
            link: link(),
            queue: 0,
            cpus: cpus(),
        },
        Action::RemoveQdisc { link: link() },
        Action::Nice { pid: 1, nice: -10 },
        Action::Affinity {
            pid: 1,
            cpus: cpus(),
        },
        Action::CpuLimit {
            group: "/sys/fs/cgroup/a".into(),
            cpus: Some(1.0),
        },
        Action::ClampMss {
            link: link(),
            bytes: 1360,
        },
    ];
    let mut kinds = BTreeMap::new();
    for action in actions {
        let kind = match action {
            Action::QueueLength { .. } => "queue-length",
            Action::Mtu { .. } => "mtu",
            Action::Offload { .. } => "offload",
            Action::Sysctl { .. } => "sysctl",
            Action::Rps { .. } => "rps",
            Action::RemoveQdisc { .. } => "remove-qdisc",
            Action::Nice { .. } => "nice",
            Action::Affinity { .. } => "affinity",
            Action::CpuLimit { .. } => "cpu-limit",
            // A new kind needs an example in the list above.
            Action::ClampMss { .. } => "clamp-mss",
        };
        let json = serde_json::to_value(&action).expect("JSON");
        assert_eq!(json["do"], kind);
        kinds.insert(kind, json);
    }
    check_shape(
        "doctor actions",
        &serde_json::to_value(kinds).expect("JSON"),
    );
}

#[test]
fn the_json_of_a_coordinator_and_a_member_has_its_golden_shape() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        host.join("host", &site.token(&[]));
        let other = site.host();
        let addresses = other.join("other", &site.token(&[]));
        let _tunnels = [&host, &other].map(Host::up);
        while_answering(&[&other], || assert!(host.reaches(addresses[0], SOON)));
        site.token(&["--reusable", "--tag", "server"]);
        let secret = "--secret=skr_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        site.administer(&["relay", "add", "192.0.2.1:3478", secret]);
        for list in ["members", "tokens", "relays", "audit"] {
            let json = site.administer(&[list, "--json"]);
            let json = serde_json::from_str(&json).expect("JSON");
            check_shape(&format!("coordinator {list}"), &json);
        }
        let question = ["policy", "explain", "host", "other", "tcp/22", "--json"];
        let json = serde_json::from_str(&site.administer(&question)).expect("JSON");
        check_shape("coordinator policy explain", &json);
        check_shape("status", &host.status());
        let output = host.run(&["netcheck", &host.interface, "--json"]);
        let json = serde_json::from_slice(&output.stdout).expect("JSON");
        check_shape("netcheck", &json);
    });
}

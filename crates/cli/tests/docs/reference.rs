//! Pages of the reference that are generated from the program.

use super::project;
use crate::golden::help;
use crate::shape::updates;
use std::fmt::Write;
use std::fs;

/// Pages of commands: name, title, and the commands whose help they show, with everything below
/// these.
const COMMANDS: [(&str, &str, &[&str]); 4] = [
    (
        "tunnel",
        "Commands: tunnels and gateways",
        &[
            "up", "down", "reload", "status", "top", "ping", "check", "gateway", "genkey",
            "pubkey", "genpsk",
        ],
    ),
    (
        "mesh",
        "Commands: meshes",
        &[
            "join",
            "leave",
            "rotate-key",
            "netcheck",
            "coordinator",
            "relay",
        ],
    ),
    (
        "diagnose",
        "Commands: diagnosis",
        &["doctor", "bench", "record", "report", "bugreport"],
    ),
    (
        "lab",
        "Commands: the lab and packaging",
        &["demo", "lab", "generate"],
    ),
];

/// Pages of JSON shapes: name, title, and the commands whose golden files they show.
const SHAPES: [(&str, &str, &[&str]); 2] = [
    (
        "json",
        "JSON",
        &[
            "status",
            "ping",
            "netcheck",
            "check",
            "gateway status",
            "gateway discover",
            "coordinator members",
            "coordinator devices",
            "coordinator tokens",
            "coordinator relays",
            "coordinator audit",
            "coordinator policy explain",
        ],
    ),
    (
        "json-doctor",
        "JSON: the doctor",
        &["doctor", "doctor --map", "bench"],
    ),
];

/// Section of the page of JSON about its schemas.
const SCHEMAS: &str = "
## Schemas

JSON Schemas (draft 2020-12) describe each field of each output, with units. A package installs them in
`/usr/share/seikan/schemas`, the archive has them in `share/seikan/schemas`, and the sources in
[`packaging/schemas`](../../packaging/schemas). The file has the name of the command: `status.json`,
`gateway-status.json`, `doctor-map.json`. `seikan check --explain` prints the JSON of
`coordinator-policy-explain.json`. `seikan ping` prints one value per line. Any validator takes them, such as
[check-jsonschema](https://check-jsonschema.readthedocs.io):

<!-- not run: dist-check: package.sh -->
```sh
pipx install check-jsonschema
sudo seikan status --json >status.json
check-jsonschema --schemafile /usr/share/seikan/schemas/status.json status.json
```

The schemas permit fields that they do not name, because later versions of Seikan may add some. They may also
add values of an enumeration, such as a cause of the doctor: use the schemas of the installed version, and let
a script ignore what it does not know. Counters may exceed 2^53.
";

/// Compares a page of the reference with its generated text, or writes it.
fn check(name: &str, text: &str) -> Result<(), String> {
    let path = project().join(format!("docs/reference/{name}.md"));
    if updates() {
        fs::write(&path, text).expect("written");
    }
    if fs::read_to_string(&path).unwrap_or_default() == text {
        Ok(())
    } else {
        Err(format!("{} is stale: run `make golden`", path.display()))
    }
}

#[test]
fn commands_are_those_of_the_program() {
    let (_, mut missing) = help(&[]);
    for (name, title, verbs) in COMMANDS {
        let mut page = format!(
            "# {title}\n\nThis page is the output of `--help`; a test keeps it current. Exit status: 0 done, 1 failed,\n\
             2 wrong usage. `NO_COLOR` turns colours off.\n"
        );
        let mut waiting: Vec<Vec<String>> =
            verbs.iter().rev().map(|v| vec![(*v).to_owned()]).collect();
        while let Some(words) = waiting.pop() {
            let (text, below) = help(&words);
            let _ = write!(
                page,
                "\n## seikan {}\n\n```text\n{}\n```\n",
                words.join(" "),
                text.trim_end()
            );
            let below = below.into_iter().rev();
            waiting.extend(below.map(|verb| [&words[..], &[verb]].concat()));
        }
        missing.retain(|verb| !verbs.contains(&verb.as_str()));
        check(&format!("commands-{name}"), &page).unwrap_or_else(|stale| panic!("{stale}"));
    }
    assert!(missing.is_empty(), "on no page: {missing:?}");
}

#[test]
fn shapes_of_json_are_the_golden_ones() {
    let folder = project().join("crates/cli/tests/golden/json");
    for (name, title, commands) in SHAPES {
        let mut page = format!(
            "# {title}\n\nEach line is the path of a value and its types. `?` marks a value that may be missing, `[]` an element of a\n\
             list, `*` a name that is no field, such as the reason of a drop. A test compares this page with the printed\n\
             JSON. Fields keep their names and meaning as long as `version` stays the same; fields may be added.\n"
        );
        page += match name {
            "json" => SCHEMAS,
            _ => "[Schemas](json.md#schemas) for validation describe the fields.\n",
        };
        for command in commands {
            let file = format!("{}.txt", command.replace(" --", "-").replace(' ', "-"));
            let shape = fs::read_to_string(folder.join(file)).expect("a golden file");
            let _ = write!(
                page,
                "\n## seikan {command} --json\n\n```text\n{}\n```\n",
                shape.trim_end()
            );
        }
        check(name, &page).unwrap_or_else(|stale| panic!("{stale}"));
    }
}

//! JSON Schemas of what `--json` prints, made from the types that are serialised.
//!
//! They are the files of `packaging/schemas`, which packages install. `make golden` writes them anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use seikan_node::status::Status;
use seikan_observe::path::PathMap;
use serde::Serialize;
use serde_json::Value;

use crate::explain::Explanation;
use crate::verbs::coordinator::view::{AuditRow, DeviceRow, MemberRow, RelayRow, TokenRow};
use crate::verbs::gateway::discover::Discovery;
use crate::verbs::gateway::status::TunnelGateway;
use crate::verbs::{bench, check, doctor, netcheck, ping};

/// A command with `--json`, and the schema of the type that it prints.
type Output = (&'static str, fn() -> Schema);

/// The commands with `--json`.
const OUTPUTS: [Output; 15] = [
    ("status", schema::<OneOrAll<Status>>),
    ("ping", schema::<ping::Line>),
    ("netcheck", schema::<netcheck::Check>),
    ("check", schema::<check::Report>),
    ("gateway status", schema::<OneOrAll<TunnelGateway>>),
    ("gateway discover", schema::<Discovery>),
    ("coordinator members", schema::<Vec<MemberRow>>),
    ("coordinator devices", schema::<Vec<DeviceRow>>),
    ("coordinator tokens", schema::<Vec<TokenRow>>),
    ("coordinator relays", schema::<Vec<RelayRow>>),
    ("coordinator audit", schema::<Vec<AuditRow>>),
    ("coordinator policy explain", schema::<Explanation>),
    ("doctor", schema::<doctor::Report>),
    ("doctor --map", schema::<PathMap>),
    ("bench", schema::<bench::Report>),
];

/// An object if an interface is named, otherwise an array with one for each.
#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
#[expect(dead_code)]
enum OneOrAll<T> {
    /// The output with an interface as argument.
    One(T),
    /// The output without an interface.
    All(Vec<T>),
}

fn schema<T: JsonSchema>() -> Schema {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let settings = settings.with_transform(RecursiveTransform(for_users));
    settings.into_generator().into_root_schema_for::<T>()
}

/// Turns the schema of a Rust type into the schema of the printed JSON.
fn for_users(schema: &mut Schema) {
    // Defaults are for readers of the JSON of former versions, formats are types of Rust, and later
    // versions may add fields.
    schema.remove("default");
    schema.remove("format");
    if schema.get("additionalProperties") == Some(&Value::Bool(false)) {
        schema.remove("additionalProperties");
    }
    if let Some(Value::String(text)) = schema.get_mut("description") {
        assert!(!text.contains("[`"), "a link in a description: {text}");
        *text = text.replace("`None`", "null").replace('\n', " ");
    }
    let required = schema.get("required").cloned().unwrap_or_default();
    if let Some(Value::Object(fields)) = schema.get_mut("properties") {
        let is_required = |name: &str| {
            required
                .as_array()
                .is_some_and(|all| all.iter().any(|r| r == name))
        };
        // A field that may be left out is never null.
        for (_, field) in fields.iter_mut().filter(|(name, _)| !is_required(name)) {
            forbid_null(field);
        }
    }
}

/// Removes null from the types of a value.
fn forbid_null(schema: &mut Value) {
    let Value::Object(schema) = schema else {
        return;
    };
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            schema.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(kinds)) = schema.get_mut("anyOf") {
        kinds.retain(|kind| kind["type"] != "null");
        if let [Value::Object(only)] = &kinds[..] {
            let only = only.clone();
            schema.remove("anyOf");
            schema.extend(only);
        }
    }
}

#[test]
fn schemas_are_those_of_the_types() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = project.join("packaging/schemas");
    let mut schemas = BTreeMap::new();
    for (command, schema) in OUTPUTS {
        let file = format!("{}.json", command.replace(" --", "-").replace(' ', "-"));
        let mut schema = schema();
        let base_url = concat!(env!("CARGO_PKG_REPOSITORY"), "/raw/main/packaging/schemas");
        schema.insert("$id".into(), format!("{base_url}/{file}").into());
        schema.insert("title".into(), format!("seikan {command} --json").into());
        let text = serde_json::to_string_pretty(&schema).expect("JSON") + "\n";
        schemas.insert(file, text);
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
        // This also removes schemas of commands that no longer exist.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("created");
        for (file, text) in &schemas {
            fs::write(folder.join(file), text).expect("written");
        }
    }
    let files = fs::read_dir(&folder).expect("packaging/schemas");
    let committed = files.map(|entry| {
        let path = entry.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), fs::read_to_string(&path).expect("text"))
    });
    let committed: BTreeMap<String, String> = committed.collect();
    let names = |of: &BTreeMap<String, String>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&committed), names(&schemas), "run `make golden`");
    for (name, text) in schemas {
        assert!(
            committed[&name] == text,
            "packaging/schemas/{name} is stale: run `make golden`"
        );
    }
}

/// Adds the names of all commands below one that have `--json`.
fn with_json(command: &clap::Command, name: &str, found: &mut Vec<String>) {
    let mut arguments = command.get_arguments();
    if arguments.any(|argument| argument.get_id() == "json") {
        found.push(name.to_owned());
    }
    for below in command.get_subcommands() {
        with_json(below, format!("{name} {}", below.get_name()).trim(), found);
    }
}

#[test]
fn every_command_with_json_has_a_schema() {
    let mut found = Vec::new();
    with_json(&crate::cli::command(), "", &mut found);
    let is_known = |name: &String| OUTPUTS.iter().any(|(command, _)| command == name);
    // `demo` runs seikan-lab, which has no schemas.
    let missing: Vec<_> = found
        .iter()
        .filter(|name| !is_known(name) && *name != "demo")
        .collect();
    assert!(
        found.len() > 10 && missing.is_empty(),
        "{missing:?} of {found:?}"
    );
}

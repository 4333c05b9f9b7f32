//! The shape of what `--json` prints, compared with a golden file; shared with the tests of the lab.
//!
//! With `UPDATE_GOLDEN=1` the files under `tests/golden` are written anew (`make golden`): read what changed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

pub fn updates() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1")
}

/// Objects whose keys are not names of fields, such as reasons of drops: by the name of the field
/// they are in.
const MAPS: [&str; 5] = ["drops", "features", "relays", "sysctls", "turn"];

/// A list of changes of this host, whose kinds have different fields. Which of them a run suggests
/// depends on the machine, so [`every_change_of_this_host_has_the_shape_that_was_written_down`] has
/// their shape.
const ACTIONS: &str = ".actions[]";

/// Paths and the types of the values there, and whether a value may be missing: a line each in a golden file.
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

/// A line is a path, `?` if there may be nothing, and types: `.peers[].name? null|string`.
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

/// The path of the value that a path is in.
fn parent(path: &str) -> &str {
    let end = path.rfind('.').unwrap_or(0);
    &path[..end]
}

/// Checks that `value`, which `seikan NAME --json` printed, has only fields and types that the
/// golden file has, and all of those that are not optional. With `UPDATE_GOLDEN=1`, new
/// fields and types are added to the file.
pub fn check_shape(name: &str, value: &Value) {
    let path = folder().join(format!(
        "json/{}.txt",
        name.replace(" --", "-").replace(' ', "-")
    ));
    let golden = read(&fs::read_to_string(&path).unwrap_or_default());
    let mut found = Shape::new();
    describe("", value, &mut found);
    // A field counts as missing if its object is there. Elements of a list may be of several kinds,
    // or none.
    let missing = |path: &str| {
        let is_there = found.contains_key(path) || path.contains("[]") || path.contains(".*");
        let container = found.get(parent(path));
        !is_there && container.is_some_and(|(types, _)| types.contains("object"))
    };
    if updates() {
        // Other tests may add the same fields.
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
    // A value that was never seen but null, or a list or object that was never seen but empty, may be or hold
    // anything.
    let only_null = |path: &str| {
        let types = golden.get(path).map(|(types, _)| types);
        types.is_some_and(|types| types.iter().eq(["null"].iter()))
    };
    let only_empty = |path: &str| {
        let types = golden.get(path).map(|(types, _)| types);
        let holds = |end: &str| {
            let start = format!("{path}{end}");
            golden.keys().any(|known| known.starts_with(&start))
        };
        types.is_some_and(|types| {
            types.contains("array") && !holds("[]") || types.contains("object") && !holds(".")
        })
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

//! The schemas of `packaging/schemas`, against what the program prints.

use crate::docs::project;
use crate::shape::check_shape;
use jsonschema::error::ValidationErrorKind as Kind;
use jsonschema::{ValidationError, Validator};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::sync::{Mutex, PoisonError};

/// Checks what `seikan COMMAND --json` printed against its golden shape and its schema.
pub fn check_json(command: &str, value: &Value) {
    check_shape(command, value);
    check_schema(command, value);
}

/// Returns what `seikan COMMAND --json` printed, which must be as its schema says.
pub fn printed(command: &str, text: &[u8]) -> Value {
    let value = serde_json::from_slice(text)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)));
    check_schema(command, &value);
    value
}

/// Checks a value against the schema of a command, which must name every field.
fn check_schema(command: &str, value: &Value) {
    /// Validators are kept, for tests that query again and again.
    static VALIDATORS: Mutex<BTreeMap<String, Validator>> = Mutex::new(BTreeMap::new());
    let mut validators = VALIDATORS.lock().unwrap_or_else(PoisonError::into_inner);
    let validator = validators
        .entry(command.to_owned())
        .or_insert_with(|| validator(&closed(read(command))));
    let faults = faults(validator, value);
    assert!(
        faults.is_empty(),
        "not as in the schema of `seikan {command} --json`:\n{faults}in {value:#}"
    );
}

/// Checks a value against a type of the schema of a command.
pub fn check_type(command: &str, name: &str, value: &Value) {
    let schema = read(command);
    let part = json!({"$ref": format!("#/$defs/{name}"), "$defs": schema["$defs"]});
    let faults = faults(&validator(&closed(part)), value);
    assert!(faults.is_empty(), "no {name}:\n{faults}in {value:#}");
}

/// Returns the schema of a command.
fn read(command: &str) -> Value {
    let name = command.replace(" --", "-").replace(' ', "-");
    let path = project().join(format!("packaging/schemas/{name}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

fn validator(schema: &Value) -> Validator {
    jsonschema::draft202012::new(schema).unwrap_or_else(|error| panic!("{error}"))
}

fn faults(validator: &Validator, value: &Value) -> String {
    let mut text = String::new();
    for fault in validator.iter_errors(value) {
        describe(&fault, &mut text);
    }
    text
}

/// Adds a line about a fault, or about those of each alternative if none fits.
fn describe(fault: &ValidationError<'_>, text: &mut String) {
    match fault.kind() {
        Kind::AnyOf { context } | Kind::OneOfNotValid { context } => {
            let faults = context.iter().flatten();
            faults.for_each(|fault| describe(fault, text));
        }
        _ => *text += &format!("{}: {}\n", fault.instance_path(), fault.masked()),
    }
}

/// Forbids fields that the schema does not name. The files permit them, so that they fit the JSON
/// of later versions too.
fn closed(mut schema: Value) -> Value {
    close(&mut schema);
    schema
}

/// Closes a schema of a value, and those of the values in it. Alternatives of the same value are
/// closed as a whole: each names only some of its fields.
fn close(schema: &mut Value) {
    let Value::Object(fields) = schema else {
        return;
    };
    const ALTERNATIVES: [&str; 3] = ["allOf", "anyOf", "oneOf"];
    within(fields);
    if ALTERNATIVES.iter().any(|of| fields.contains_key(*of)) || fields.contains_key("properties") {
        fields.insert("unevaluatedProperties".into(), json!(false));
    }
}

/// Closes the schemas of values that are in the value of a schema.
fn within(fields: &mut Map<String, Value>) {
    for (key, schema) in fields {
        match (key.as_str(), schema) {
            ("properties" | "$defs", Value::Object(named)) => named.values_mut().for_each(close),
            ("items" | "additionalProperties", schema) => close(schema),
            ("prefixItems", Value::Array(all)) => all.iter_mut().for_each(close),
            ("allOf" | "anyOf" | "oneOf", Value::Array(all)) => {
                all.iter_mut()
                    .filter_map(Value::as_object_mut)
                    .for_each(within);
            }
            _ => {}
        }
    }
}

/// Returns the status with all its fields.
fn full_status() -> Value {
    let path = project().join("crates/node/testdata/status.json");
    serde_json::from_str(&fs::read_to_string(path).expect("text")).expect("JSON")
}

#[test]
fn the_status_with_all_its_fields_fits_its_schema() {
    check_schema("status", &full_status());
}

/// Calls `visit` with the path of every object in a value.
fn objects(value: &Value, path: &str, visit: &mut dyn FnMut(&str)) {
    match value {
        Value::Object(fields) => {
            visit(path);
            for (name, value) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                objects(value, &format!("{path}/{name}"), visit);
            }
        }
        Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                objects(value, &format!("{path}/{index}"), visit);
            }
        }
        _ => {}
    }
}

#[test]
fn a_field_that_a_schema_does_not_name_is_a_fault() {
    let (status, schema) = (full_status(), read("status"));
    let (open, closed) = (validator(&schema), validator(&closed(schema)));
    let mut seen = 0;
    objects(&status, "", &mut |path| {
        let mut changed = status.clone();
        let object = changed.pointer_mut(path).expect("an object");
        // No map has values of this type.
        object["unknown"] = json!([]);
        assert!(!closed.is_valid(&changed), "{path}");
        seen += 1;
    });
    assert!(seen > 50, "{seen}");
    let mut later = status.clone();
    later["unknown"] = json!([]);
    assert!(open.is_valid(&later));
}

#[test]
fn a_missing_field_or_another_type_is_a_fault() {
    let mut status = full_status();
    let pid = status["pid"].take();
    let validator = validator(&read("status"));
    assert!(!validator.is_valid(&status), "null");
    status["pid"] = pid.to_string().into();
    assert!(!validator.is_valid(&status), "a text");
    status.as_object_mut().expect("an object").remove("pid");
    assert!(!validator.is_valid(&status), "missing");
    status["pid"] = pid;
    assert!(validator.is_valid(&status));
}

#[test]
fn each_golden_shape_has_a_schema() {
    let shapes = crate::shape::folder().join("json");
    for shape in fs::read_dir(shapes).expect("golden shapes") {
        let path = shape.expect("a file").path();
        let name = path.file_stem().expect("a name").to_string_lossy();
        // A part of the output of `seikan doctor`.
        if name != "doctor-actions" {
            validator(&read(&name));
        }
    }
}

//! Golden texts: `--help` of every verb, word for word.
//!
//! With `UPDATE_GOLDEN=1` the files under `tests/golden` are written anew (`make golden`): read what changed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn updates() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1")
}

/// What differs between the golden text `name` and `text`, or nothing.
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

/// The help of a verb, at a fixed width, and the verbs below it.
fn help(words: &[String]) -> (String, Vec<String>) {
    let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
        .args(words)
        .arg("--help")
        .env("COLUMNS", "100")
        .env("NO_COLOR", "1")
        .output()
        .expect("seikan");
    assert!(output.status.success(), "{words:?}: {output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let verbs = text
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        // A description that goes on in the next line begins further right.
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .map(str::to_owned)
        .collect();
    (text, verbs)
}

#[test]
fn the_help_of_every_verb_is_as_it_was_written_down() {
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

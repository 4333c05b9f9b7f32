//! Compares the diagnostics of every file in `tests/files` with `FILE.expected`.
//!
//! `UPDATE_GOLDEN=1` writes the expected files: review the difference.

use std::fs;
use std::path::{Path, PathBuf};

use seikan_config::{Overrides, Source, Syntax, parse};
use zeroize::Zeroizing;

/// The private key in the files.
const SECRET: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")
}

/// Returns the diagnostics of a file, by its name only, so that the text is the same everywhere.
fn findings(path: &Path) -> (String, String) {
    let source = Source {
        file: path.file_name().unwrap().to_str().unwrap().to_owned(),
        syntax: Syntax::of(path),
        text: Zeroizing::new(fs::read_to_string(path).unwrap()),
    };
    let parsed = parse(&source, &Overrides::default(), &|_| {
        Err(std::io::ErrorKind::NotFound.into())
    });
    let json = serde_json::to_string(&parsed.diagnostics).unwrap();
    (parsed.diagnostics.render(false), json)
}

fn files() -> Vec<PathBuf> {
    let entries = fs::read_dir(folder()).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "conf" || e == "toml"));
    files.sort();
    assert!(!files.is_empty());
    files
}

#[test]
fn findings_are_those_expected() {
    for file in files() {
        let expected = PathBuf::from(format!("{}.expected", file.display()));
        let (found, _) = findings(&file);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&expected, &found).unwrap();
        }
        let expected = fs::read_to_string(&expected).unwrap_or_default();
        assert_eq!(found, expected, "{}", file.display());
    }
}

#[test]
fn no_finding_shows_the_private_key() {
    for file in files() {
        let (text, json) = findings(&file);
        for shown in [text, json] {
            // Parts, too, for files with a damaged key.
            for at in 0..=SECRET.len() - 16 {
                assert!(!shown.contains(&SECRET[at..at + 16]), "{}", file.display());
            }
        }
    }
}

//! The pages in docs/reference/causes: one for each cause, and no others.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use seikan_diagnose::Cause;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of a page with single spaces instead of line breaks.
fn page(name: &str) -> String {
    let path = workspace()
        .join("docs/reference/causes")
        .join(format!("{name}.md"));
    let text = std::fs::read_to_string(&path);
    let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the names of the pages, without `.md`.
fn pages() -> BTreeSet<String> {
    let folder = std::fs::read_dir(workspace().join("docs/reference/causes"))
        .expect("docs/reference/causes");
    let names = folder.map(|entry| entry.expect("entry").file_name());
    let names = names.map(|name| name.into_string().expect("name"));
    names
        .map(|name| match name.strip_suffix(".md") {
            Some(stem) => stem.to_owned(),
            None => panic!("{name} is not a page"),
        })
        .collect()
}

#[test]
fn every_cause_has_its_page_with_its_sentence() {
    for cause in Cause::ALL {
        let begin = format!("# {cause} {} ## Mechanism ", cause.sentence());
        assert!(
            page(cause.name()).starts_with(&begin),
            "{cause}.md has to begin with `{begin}`"
        );
    }
}

#[test]
fn every_page_has_all_parts() {
    let parts = ["Symptoms", "Similar causes", "Fix", "Try it"];
    for cause in Cause::ALL {
        let page = page(cause.name());
        for part in parts {
            assert!(page.contains(&format!(" ## {part} ")), "{cause}: {part}");
        }
    }
}

#[test]
fn every_cause_is_in_the_index() {
    let index = page("README");
    for cause in Cause::ALL {
        assert!(
            index.contains(&format!("| [{cause}]({cause}.md) |")),
            "{cause}"
        );
    }
}

#[test]
fn every_page_belongs_to_a_cause() {
    let causes = Cause::ALL.iter().map(|cause| cause.name().to_owned());
    let mut known: BTreeSet<String> = causes.collect();
    known.insert("README".to_owned());
    assert_eq!(pages(), known);
}

#[test]
fn pages_only_link_to_pages() {
    for name in pages() {
        let text = page(&name);
        let links = text.split("](").skip(1);
        for link in links.filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            let target = workspace().join("docs/reference/causes").join(file);
            assert!(target.exists(), "{name}: {link}");
        }
    }
}

#[test]
fn scenarios_to_try_exist() {
    for name in pages() {
        let text = page(&name);
        let runs = text.split("seikan lab run ").skip(1);
        for scenario in runs.filter_map(|rest| rest.split(['`', ' ']).next()) {
            let file = format!("crates/lab/scenarios/{scenario}.toml");
            let placeholder = scenario == "SCENARIO";
            assert!(
                placeholder || workspace().join(&file).exists(),
                "{name}: {file}"
            );
        }
    }
}

#[test]
fn every_scenario_is_on_a_page() {
    let all: String = pages().iter().map(|name| page(name)).collect();
    let folder = std::fs::read_dir(workspace().join("crates/lab/scenarios")).expect("scenarios");
    for entry in folder {
        let file = entry.expect("entry").path();
        let scenario = file.file_stem().expect("stem").to_string_lossy();
        // Scenarios with two causes belong to no page.
        if scenario.starts_with("double-") {
            continue;
        }
        let run = format!("seikan lab run {scenario}`");
        assert!(all.contains(&run), "{scenario}");
    }
}

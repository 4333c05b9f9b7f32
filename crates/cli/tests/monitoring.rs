//! The alerts and the dashboard of `packaging/` name only metrics that exist, as the reference
//! lists them. `make monitoring-check` runs them in a real Prometheus.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Files that name metrics.
const FILES: [&str; 3] = [
    "packaging/prometheus/seikan.rules.yaml",
    "packaging/prometheus/seikan.rules.test.yaml",
    "packaging/grafana/seikan.json",
];
/// Pages that list them, each compared with the program by a test.
const PAGES: [&str; 2] = [
    "docs/reference/metrics.md",
    "docs/reference/metrics-relay.md",
];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the words of a text that are names of metrics.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("seikan_")).collect()
}

/// Returns the names of all samples.
fn exported() -> BTreeSet<String> {
    let pages = PAGES.map(read);
    let rows = pages.iter().flat_map(|page| page.lines());
    let rows = rows.filter_map(|row| row.strip_prefix("| `seikan_")?.split_once("` | "));
    rows.flat_map(|(name, kind)| {
        let suffixes: &[&str] = if kind.starts_with("histogram") {
            &["_bucket", "_sum", "_count"]
        } else {
            &[""]
        };
        suffixes
            .iter()
            .map(move |suffix| format!("seikan_{name}{suffix}"))
    })
    .collect()
}

#[test]
fn alerts_and_the_dashboard_name_metrics_that_exist() {
    let exported = exported();
    for path in FILES {
        let text = read(path);
        let names = names(&text);
        assert!(names.len() > 15, "{path}: {names:?}");
        let unknown: Vec<_> = names.iter().filter(|n| !exported.contains(**n)).collect();
        assert!(unknown.is_empty(), "{path}: no such metrics: {unknown:?}");
    }
}

#[test]
fn every_alert_has_a_test() {
    let [rules, tests] = [FILES[0], FILES[1]].map(read);
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: Vec<_> = alerts.collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    for alert in alerts {
        let fires = format!("- alertname: {alert}\n");
        assert!(tests.contains(&fires), "no test in which {alert} fires");
    }
}

#[test]
fn panels_of_the_dashboard_have_numbers_of_their_own() {
    let dashboard: serde_json::Value = serde_json::from_str(&read(FILES[2])).expect("JSON");
    let rows = dashboard["panels"].as_array().expect("panels");
    let below = |row: &serde_json::Value| row["panels"].as_array().cloned().unwrap_or_default();
    let panels = rows
        .iter()
        .flat_map(|row| [vec![row.clone()], below(row)].concat());
    let mut seen = BTreeSet::new();
    for panel in panels {
        assert!(seen.insert(panel["id"].as_u64()), "twice: {}", panel["id"]);
    }
    assert!(seen.len() > 30, "{seen:?}");
}

//! Every scenario file is valid, and errors in files are reported.

use std::collections::BTreeSet;

use super::*;

const SHAPER: &str = r#"
name = "x"
about = "A test."
cause = "shaper"
tunnels = ["openvpn"]
[load]
kind = "tcp"
rate = 300
[fault]
kind = "shaper"
severity = [60, 200]
"#;

fn refused(text: &str) -> String {
    Scenario::parse("x", text)
        .expect_err("should be refused")
        .to_string()
}

#[test]
fn every_file_is_right() {
    for (name, text) in FILES {
        if let Err(error) = Scenario::parse(name, text) {
            panic!("{error}");
        }
    }
}

#[test]
fn every_file_of_the_directory_is_in_the_program() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");
    let there: BTreeSet<String> = std::fs::read_dir(dir)
        .expect("scenarios")
        .map(|entry| {
            entry
                .expect("entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let here = FILES.iter().map(|(name, _)| format!("{name}.toml"));
    assert_eq!(there, here.collect());
}

#[test]
fn unknown_keys_are_refused() {
    for (before, after) in [
        ("[load]", "colour = 1\n[load]"),
        ("rate = 300", "rte = 300"),
        ("severity =", "harshness = 1\nseverity ="),
    ] {
        let error = refused(&SHAPER.replace(before, after));
        assert!(error.contains("unknown field"), "{error}");
    }
}

#[test]
fn scenarios_that_make_no_sense_are_refused() {
    Scenario::parse("x", SHAPER).expect("right");
    for (before, after, reason) in [
        ("[60, 200]", "[0, 200]", "severity 0"),
        ("severity = [60, 200]", "", "needs a severity"),
        ("\"shaper\"\nsev", "\"offloads-off\"\nsev", "no severity"),
        (
            "\"shaper\"\nsev",
            "\"receive-buffer-option\"\nsev",
            "severity 60",
        ),
        ("cause = \"shaper\"", "cause = \"healthy\"", "healthy"),
        ("name = \"x\"", "name = \"y\"", "its name"),
        ("[\"openvpn\"]", "[]", "no tunnels"),
        ("kind = \"tcp\"", "kind = \"tcp\"\nstreams = 0", "streams"),
    ] {
        let error = refused(&SHAPER.replace(before, after));
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn the_middle_is_for_tunnels_that_have_one() {
    let text = SHAPER.replace("[fault]", "[fault]\nat = \"middle\"");
    Scenario::parse("x", &text.replace("\"openvpn\"", "\"bridge\"")).expect("right");
    let error = refused(&text);
    assert!(
        error.contains("openvpn has no host in the middle"),
        "{error}"
    );
    let text = SHAPER.replace("[load]", "[link]\nmoderation = 10001\n[load]");
    assert!(refused(&text).contains("moderation"));
}

#[test]
fn openvpn_options_are_for_openvpn_only() {
    let text = SHAPER
        .replace("\"shaper\"\nsev", "\"receive-buffer-option\"\nsev")
        .replace("[60, 200]", "[4096, 8192]");
    Scenario::parse("x", &text).expect("right");
    let error = refused(&text.replace("\"openvpn\"", "\"wireguard-go\""));
    assert!(error.contains("wireguard-go"), "{error}");
}

#[test]
fn splits_share_no_severity_and_stay_within_the_range() {
    let range = [100.0, 1.0];
    let (mut train, mut held): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    for n in 0..1_000 {
        let fraction = f64::from(n) / 1_000.0;
        train.push(in_band(range, fraction, Split::Train));
        held.push(in_band(range, fraction, Split::HeldOut));
    }
    assert!(train.iter().chain(&held).all(|s| (1.0..=100.0).contains(s)));
    // Ten bands of a factor of 10^(2/10) each, from the top: even ones for training.
    let band = |s: &f64| ((100.0 / s).log10() / 0.2 + 1e-9).floor() as u32 % 2;
    assert!(train.iter().all(|s| band(s) == 0));
    assert!(held.iter().all(|s| band(s) == 1));
}

#[test]
fn draws_depend_on_seed_number_and_nothing_else() {
    let draws = |seed| -> Vec<f64> { (0..50).map(|n| Pattern::new(seed).share(n)).collect() };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
    assert!(draws(1).iter().all(|x| (0.0..1.0).contains(x)));
}

#[test]
fn no_rule_is_tuned_on_the_excluded_tunnel() {
    for scenario in Scenario::all().expect("scenarios") {
        let tunnels = scenario.available_tunnels(Split::Train);
        assert!(!tunnels.iter().any(|t| t == UNTUNED_TUNNEL));
    }
}

#[test]
fn a_second_fault_is_another_one_in_a_tunnel_that_runs() {
    let with = |cause: &str, fault: &str| {
        format!("{SHAPER}[second]\ncause = \"{cause}\"\n[second.fault]\n{fault}\n")
    };
    let text = with("path-loss", "kind = \"loss\"\nseverity = [1, 5]");
    let scenario = Scenario::parse("x", &text).expect("right");
    let draw = |number| Draw::new(&scenario, Split::Train, 1, number);
    let drawn: Vec<Draw> = (0..8).filter_map(draw).collect();
    // Each separately; nothing is drawn if the tunnel is not installed.
    let share =
        |value: Option<f64>, [from, to]: [f64; 2]| (value.expect("drawn") / from).log(to / from);
    assert!(drawn.iter().all(|draw| {
        let (first, second) = (
            share(draw.severity, [60.0, 200.0]),
            share(draw.second, [1.0, 5.0]),
        );
        (0.0..=1.0).contains(&second) && (first - second).abs() > 1e-6
    }));
    for (cause, fault, reason) in [
        ("path-loss", "kind = \"none\"", "running tunnel"),
        (
            "path-delay",
            "kind = \"wire-delay\"\nseverity = [1, 5]",
            "running tunnel",
        ),
        (
            "path-loss",
            "kind = \"shaper\"\nseverity = [60, 90]",
            "is the first",
        ),
        (
            "path-loss",
            "kind = \"loss\"\nseverity = [0, 5]",
            "severity 0",
        ),
    ] {
        let error = refused(&with(cause, fault));
        assert!(error.contains(reason), "{error}");
    }
}

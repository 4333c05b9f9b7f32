use super::*;
use crate::error::LabError;

#[test]
fn an_unknown_tunnel_is_named_with_those_that_are_known() {
    let Err(error) = tunnels(&BenchOptions::default(), Some(&["wireguard-og".to_owned()])) else {
        panic!("accepted")
    };
    let text = error.to_string();
    assert!(
        text.contains("`wireguard-og`") && text.contains("wireguard-go"),
        "{text}"
    );
}

#[test]
fn our_tunnels_may_go_by_their_protocol() {
    assert!(means("native", "seikan-native"));
    assert!(means("seikan-native", "seikan-native"));
    assert!(!means("go", "wireguard-go"));
}

#[test]
fn nothing_to_measure_is_refused() {
    let options = BenchOptions {
        rounds: 0,
        ..BenchOptions::default()
    };
    assert!(matches!(check(&options), Err(LabError::Usage(_))));
    let options = BenchOptions {
        seconds: f64::NAN,
        ..BenchOptions::default()
    };
    assert!(matches!(check(&options), Err(LabError::Usage(_))));
}

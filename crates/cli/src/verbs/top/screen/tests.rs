use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use seikan_diagnose::diagnose;
use seikan_node::status::RepairState;
use seikan_observe::path::{LinkFacts, PathMap};
use seikan_observe::{Key, Kind, Sample, Series};

/// A second in which 12.5 MB went out of tun0, and 30 packets were dropped.
fn view() -> View {
    let link = || Subject::Link("tun0".into());
    let values = |bytes, drops| {
        vec![
            (Key::new(link(), metric::TX_BYTES), Kind::Counter, bytes),
            (Key::new(link(), metric::TX_DROPPED), Kind::Counter, drops),
        ]
    };
    let mut series = Series::default();
    for (second, bytes, drops) in [(0, 0, 0), (1, 12_500_000, 30)] {
        series.push(Sample {
            at: Duration::from_secs(second),
            values: values(bytes, drops),
        });
    }
    let now = Evidence {
        map: PathMap {
            inner: Some("tun0".into()),
            links: vec![LinkFacts {
                name: "tun0".into(),
                ..LinkFacts::default()
            }],
            ..PathMap::default()
        },
        series,
        ..Evidence::default()
    };
    View {
        verdict: diagnose(&now),
        now,
        history: vec![(50e6, 0.0), (100e6, 0.0)],
        repairs: Repairs {
            found: vec![LossRepair {
                peer: "branch".into(),
                state: Some(RepairState::Repairing),
                loss: 0.011,
                restored: 132,
                not_restored: 2,
            }],
            time: Duration::from_secs(2),
        },
        every: Duration::from_secs(1),
        is_paused: false,
    }
}

fn drawn(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("terminal");
    terminal.draw(|frame| draw(frame, view)).expect("drawn");
    terminal.backend().to_string()
}

#[test]
fn rates_and_drops_are_shown() {
    for width in [80, 140] {
        let text = drawn(&view(), width, 24);
        assert!(text.contains("out 100 Mbit/s, maximum 100"), "{text}");
        let line = |heading: &str| {
            let line = text.lines().find(|line| line.contains(heading));
            line.unwrap_or_else(|| panic!("{heading}: {text}"))
                .to_owned()
        };
        assert!(line("tun0: tx_dropped").contains(" 30"), "{text}");
        let repair = line("branch");
        let words = repair.split(['"', ' ']).filter(|word| !word.is_empty());
        let row = words.skip_while(|word| *word != "branch").take(4);
        assert!(row.eq(["branch", "1.1", "66", "1"]), "{text}");
    }
}

#[test]
fn any_size_of_terminal_can_be_drawn() {
    for (width, height) in [(1, 1), (20, 5), (80, 12), (200, 3)] {
        drawn(&view(), width, height);
    }
}

#[test]
fn a_name_cannot_move_the_cursor() {
    let mut view = view();
    view.now.map.links[0].name = "tun\u{1b}[2J".into();
    assert!(!drawn(&view, 80, 24).contains('\u{1b}'));
}

//! Messages that are taken, and those that are not.

use super::*;
use crate::diagnose;
use crate::losses::made::sender;
use crate::rules::testing::*;
use seikan_observe::metric;

fn json(text: &str) -> Result<Message, WrongMessage> {
    Message::read(text.as_bytes())
}

fn ask() -> Ask {
    Ask {
        seconds: 5,
        interval: 100,
        level: 2,
        probe: true,
        load: None,
    }
}

fn told_of(message: Message) -> Evidence {
    let Ok(Message::Told(told)) = Message::read(&message.write()) else {
        panic!("not told");
    };
    told.evidence().expect("evidence")
}

#[test]
fn what_is_told_leads_to_the_same_verdict() {
    let mut evidence = sender(10_000, 300, 0);
    evidence.map.links[0].queue_length = 3;
    count(&mut evidence, inner(), metric::TX_DROPPED, 300);
    let message = Message::Told(Box::new(Told::of(&evidence)));
    assert_eq!(diagnose(&told_of(message)), diagnose(&evidence));
}

#[test]
fn a_counter_that_starts_anew_is_told_by_its_growth() {
    let column = Column {
        kind: Kind::Counter,
        points: vec![(0, 10), (1, 15), (2, 3), (3, 5)],
    };
    assert_eq!(told(&column, 1), [(0, 0), (1, 5), (2, 5), (3, 7)]);
    assert_eq!(told(&column, 2), [(0, 5), (1, 7)]);
}

#[test]
fn what_never_changes_is_told_twice_only() {
    let column = Column {
        kind: Kind::Gauge,
        points: vec![(0, 7), (1, 7), (2, 7)],
    };
    assert_eq!(told(&column, 1), [(0, 7), (2, 7)]);
}

#[test]
fn a_long_measurement_is_thinned_out_and_grows_as_much() {
    let mut evidence = tunnel();
    evidence.series = Series::default();
    for index in 0..5_000 {
        evidence.series.push(seikan_observe::Sample {
            at: Duration::from_millis(100 * index),
            values: vec![(
                Key::new(inner(), metric::TX_BYTES),
                Kind::Counter,
                1_000 * index,
            )],
        });
    }
    let (whole, message) = (evidence.throughput(), Told::of(&evidence));
    let thin = told_of(Message::Told(Box::new(message)));
    assert!(thin.series.times.len() <= SAMPLES);
    assert!((thin.throughput() / whole - 1.0).abs() < 0.001);
}

#[test]
fn another_version_is_named_whatever_else_it_says() {
    let error = json(r#"{"version":2,"message":{"dance":7},"more":1}"#);
    assert_eq!(error, Err(WrongMessage::Version(2)));
}

#[test]
fn what_is_no_message_is_refused() {
    for text in [
        "",
        "{}",
        "[]",
        r#"{"version":1}"#,
        r#"{"version":1,"message":"dance"}"#,
        r#"{"version":1,"message":"alive","more":1}"#,
        r#"{"version":1,"message":{"ready":{"sink":null,"more":1}}}"#,
    ] {
        assert!(matches!(json(text), Err(WrongMessage::Syntax(_))), "{text}");
    }
    assert_eq!(
        json(r#"{"version":1,"message":"alive"}"#),
        Ok(Message::Alive)
    );
}

#[test]
fn a_question_out_of_range_is_refused() {
    let read = |ask: Ask| Message::read(&Message::Ask(ask).write());
    assert!(read(ask()).is_ok());
    let flood = Load {
        kind: LoadKind::Udp,
        rate: None,
        reverse: false,
    };
    for wrong in [
        Ask {
            seconds: 3601,
            ..ask()
        },
        Ask {
            interval: 0,
            ..ask()
        },
        Ask { level: 3, ..ask() },
        Ask {
            load: Some(flood),
            ..ask()
        },
    ] {
        assert!(matches!(read(wrong), Err(WrongMessage::Impossible(_))));
    }
}

#[test]
fn impossible_measurements_are_refused() {
    let point = |kind, points: &[(u32, u64)]| ToldColumn {
        subject: Subject::Host,
        name: "x".into(),
        kind,
        points: points.to_vec(),
    };
    let with = |times: &[u64], columns| Told {
        times: times.to_vec(),
        columns,
        ..Told::default()
    };
    assert!(with(&[0, 1], vec![]).evidence().is_ok());
    for wrong in [
        with(&[], vec![]),
        with(&[1, 0], vec![]),
        with(&[0, u64::MAX], vec![]),
        with(&vec![0; SAMPLES + 1], vec![]),
        with(&[0, 1], vec![point(Kind::Gauge, &[(2, 0)])]),
        with(&[0, 1], vec![point(Kind::Gauge, &[(1, 0), (0, 0)])]),
        with(&[0, 1], vec![point(Kind::Counter, &[(0, 5), (1, 4)])]),
        with(
            &[0, 1],
            vec![point(Kind::Counter, &[(0, 0), (1, u64::MAX)])],
        ),
    ] {
        assert!(matches!(wrong.evidence(), Err(WrongMessage::Impossible(_))));
    }
}

#[test]
fn a_token_is_not_shown() {
    assert_eq!(format!("{:?}", Token([7; 16])), "Token(...)");
}

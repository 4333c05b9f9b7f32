//! Messages that are accepted, and those that are refused.

use super::*;
use crate::diagnose;
use crate::losses::made::sender;
use crate::rules::testing::*;
use seikan_observe::metric;

fn json(text: &str) -> Result<Message, WrongMessage> {
    Message::read(text.as_bytes())
}

fn request() -> Request {
    Request {
        seconds: 5,
        interval: 100,
        level: 2,
        probe: true,
        load: None,
    }
}

fn received(message: Message) -> Evidence {
    let Ok(Message::Measurement(measurement)) = Message::read(&message.write()) else {
        panic!("no measurement");
    };
    measurement.evidence().expect("evidence")
}

#[test]
fn a_measurement_has_the_same_verdict_as_its_evidence() {
    let mut evidence = sender(10_000, 300, 0);
    evidence.map.links[0].queue_length = 3;
    count(&mut evidence, inner(), metric::TX_DROPPED, 300);
    let message = Message::Measurement(Box::new(Measurement::of(&evidence)));
    assert_eq!(diagnose(&received(message)), diagnose(&evidence));
}

#[test]
fn a_counter_that_restarts_keeps_its_growth() {
    let column = Column {
        kind: Kind::Counter,
        points: vec![(0, 10), (1, 15), (2, 3), (3, 5)],
    };
    assert_eq!(thinned(&column, 1), [(0, 0), (1, 5), (2, 5), (3, 7)]);
    assert_eq!(thinned(&column, 2), [(0, 5), (1, 7)]);
}

#[test]
fn a_constant_has_two_points() {
    let column = Column {
        kind: Kind::Gauge,
        points: vec![(0, 7), (1, 7), (2, 7)],
    };
    assert_eq!(thinned(&column, 1), [(0, 7), (2, 7)]);
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
    let (whole, message) = (evidence.throughput(), Measurement::of(&evidence));
    let thin = received(Message::Measurement(Box::new(message)));
    assert!(thin.series.times.len() <= MAX_SAMPLES);
    assert!((thin.throughput() / whole - 1.0).abs() < 0.001);
}

#[test]
fn another_version_is_refused_by_its_number() {
    let error = json(r#"{"version":2,"message":{"dance":7},"more":1}"#);
    assert_eq!(error, Err(WrongMessage::Version(2)));
}

#[test]
fn malformed_messages_are_refused() {
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
fn a_request_out_of_range_is_refused() {
    let read = |request: Request| Message::read(&Message::Request(request).write());
    assert!(read(request()).is_ok());
    let flood = Load {
        kind: LoadKind::Udp,
        rate: None,
        reverse: false,
    };
    for wrong in [
        Request {
            seconds: 3601,
            ..request()
        },
        Request {
            interval: 0,
            ..request()
        },
        Request {
            level: 3,
            ..request()
        },
        Request {
            load: Some(flood),
            ..request()
        },
    ] {
        assert!(matches!(read(wrong), Err(WrongMessage::Impossible(_))));
    }
}

#[test]
fn impossible_measurements_are_refused() {
    let point = |kind, points: &[(u32, u64)]| MeasuredColumn {
        subject: Subject::Host,
        name: "x".into(),
        kind,
        points: points.to_vec(),
    };
    let with = |times: &[u64], columns| Measurement {
        times: times.to_vec(),
        columns,
        ..Measurement::default()
    };
    assert!(with(&[0, 1], vec![]).evidence().is_ok());
    for wrong in [
        with(&[], vec![]),
        with(&[1, 0], vec![]),
        with(&[0, u64::MAX], vec![]),
        with(&vec![0; MAX_SAMPLES + 1], vec![]),
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

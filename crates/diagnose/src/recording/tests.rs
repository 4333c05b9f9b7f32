use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use parquet::file::metadata::ParquetMetaDataReader;
use proptest::prelude::*;
use seikan_observe::path::Unseen;
use seikan_observe::profile::Function;
use seikan_observe::{Key, Kind, Sample, Series, Subject};

use super::*;
use crate::rules::testing;
use crate::trial::{Block, Decision, Trial};
use crate::{Cause, Location, Remedy};

fn subjects() -> impl Strategy<Value = Subject> {
    prop_oneof![
        Just(Subject::Host),
        Just(Subject::Probe),
        any::<u32>().prop_map(Subject::Cpu),
        any::<String>().prop_map(Subject::Link),
        any::<String>().prop_map(Subject::Qdisc),
        any::<u32>().prop_map(Subject::Process),
        any::<(u32, u32)>().prop_map(|(pid, tid)| Subject::Thread { pid, tid }),
        any::<u64>().prop_map(Subject::Udp),
        any::<u64>().prop_map(Subject::Tcp),
        any::<String>().prop_map(Subject::Group),
    ]
}

/// A series of any keys and values; every sample has at least one.
fn series() -> impl Strategy<Value = Series> {
    let key = (subjects(), any::<String>(), any::<bool>());
    let value = (
        any::<prop::sample::Index>(),
        prop_oneof![any::<u64>(), 0..300_u64],
    );
    let sample = (1..2_000_000_000_u64, prop::collection::vec(value, 1..30));
    let keys = prop::collection::vec(key, 1..40);
    (keys, prop::collection::vec(sample, 0..40)).prop_map(|(keys, samples)| {
        // One kind for each key.
        let keys: BTreeMap<Key, Kind> = keys
            .into_iter()
            .map(|(subject, name, counts)| {
                let kind = if counts { Kind::Counter } else { Kind::Gauge };
                (Key::new(subject, name), kind)
            })
            .collect();
        let keys: Vec<_> = keys.into_iter().collect();
        let mut series = Series::default();
        let mut at = Duration::ZERO;
        for (pause, values) in samples {
            let values: BTreeMap<usize, u64> = values
                .into_iter()
                .map(|(index, value)| (index.index(keys.len()), value))
                .collect();
            let values = values.into_iter().map(|(index, value)| {
                let (key, kind) = keys[index].clone();
                (key, kind, value)
            });
            series.push(Sample {
                at,
                values: values.collect(),
            });
            at += Duration::from_nanos(pause);
        }
        series
    })
}

/// A recording with data in every part.
fn recording(series: Series, number: f64) -> Recording {
    let mut evidence = testing::tunnel();
    evidence.series = series;
    evidence.expected = Some(number);
    evidence.profile = Some(Profile {
        samples: 7,
        ..Profile::default()
    });
    evidence.probes.idle_rtt_us = Some(number / 3.0);
    let block = Block {
        throughput: number,
        ..Block::default()
    };
    Recording {
        started_at: UNIX_EPOCH + Duration::from_nanos(1_795_336_629_123_456_789),
        evidence,
        functions: Some(Functions {
            samples: 9,
            functions: vec![Function {
                symbol: "copy_page".into(),
                module: "kernel".into(),
                program: 1,
                machine: 2,
            }],
            stacks: vec![
                (vec!["main".into(), "copy_page".into()], 2),
                (vec!["main".into()], 1),
            ],
            unseen: vec![Unseen {
                what: "a".into(),
                why: "b".into(),
            }],
            ..Functions::default()
        }),
        attempts: vec![Attempt {
            cause: Cause::TunQueueOverflow,
            remedy: Remedy::ask(Location::Tunnel, "what", vec!["how".into()], "much"),
            trial: Trial {
                pairs: vec![(block, block)],
                gain: None,
                decision: Decision::TakeBack("why".into()),
            },
        }],
        cost: Cost {
            seconds: number / 7.0,
            cpu_seconds: number / 11.0,
            samples: 3,
        },
    }
}

fn written(recording: &Recording) -> Vec<u8> {
    let mut bytes = Vec::new();
    recording.write(&mut bytes).expect("written");
    bytes
}

/// A few samples of two counters.
fn short() -> Series {
    let mut series = Series::default();
    for step in 0..20 {
        let value = |subject, name: &'static str| {
            let key = Key::new(subject, name);
            (key, Kind::Counter, step * step)
        };
        series.push(Sample {
            at: Duration::from_millis(100 * step),
            values: vec![
                value(Subject::Host, "Ip.InReceives"),
                value(Subject::Link("tun0".into()), "rx_bytes"),
            ],
        });
    }
    series
}

proptest! {
    #[test]
    fn a_recording_is_read_as_written(series in series(), number in 1e-9..1e12_f64) {
        let recording = recording(series, number);
        let read = Recording::parse(&written(&recording)).expect("read");
        prop_assert_eq!(read, recording);
    }

    #[test]
    fn noise_behind_the_magic_is_refused(noise: Vec<u8>) {
        let file = [b"PAR1", noise.as_slice(), b"PAR1"].concat();
        prop_assert!(Recording::parse(&file).is_err());
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    let file = written(&recording(short(), 1.0));
    for length in 0..file.len() {
        assert!(Recording::parse(&file[..length]).is_err(), "{length}");
    }
}

#[test]
fn a_file_that_was_garbled_is_refused_or_read_but_breaks_nothing() {
    let file = written(&recording(short(), 1.0));
    let mut refused = 0;
    for index in 0..file.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut file = file.clone();
            file[index] ^= change;
            refused += u32::from(Recording::parse(&file).is_err());
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// A file with some changed bytes.
fn exchanged(from: &[u8], to: &[u8]) -> RecordingError {
    let mut file = written(&recording(short(), 1.0));
    let index = file.windows(from.len()).position(|window| window == from);
    let index = index.expect("it is in the file");
    file[index..][..to.len()].copy_from_slice(to);
    Recording::parse(&file).expect_err("refused")
}

#[test]
fn a_host_of_too_many_processors_is_refused() {
    let mut recording = recording(short(), 1.0);
    recording.evidence.map.host.cpus = vec![0; 8193];
    assert!(Recording::parse(&written(&recording)).is_err());
    recording.evidence.map.host.cpus.pop();
    assert!(Recording::parse(&written(&recording)).is_ok());
}

#[test]
fn a_version_from_the_future_is_named() {
    // Thrift's compact protocol: the next field, a text of one byte.
    let error = exchanged(b"seikan.version\x18\x011", b"seikan.version\x18\x019");
    assert!(
        matches!(error, RecordingError::Newer { found: 9, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("version 9"), "{error}");
}

#[test]
fn another_table_is_no_recording() {
    let error = exchanged(b"seikan.version", b"seikan.VERSION");
    assert!(matches!(error, RecordingError::Foreign(_)), "{error}");
    let error = Recording::parse(b"time,value\n0,1\n").expect_err("refused");
    assert!(matches!(error, RecordingError::Foreign(_)), "{error}");
}

#[test]
fn other_columns_are_refused() {
    let error = exchanged(b"subject", b"SUBJECT");
    assert!(error.to_string().contains("columns"), "{error}");
}

#[test]
fn a_long_recording_is_written_in_parts() {
    let key = |number| Key::new(Subject::Cpu(number), "net_rx");
    let mut recording = recording(Series::default(), 1.0);
    let mut file = Vec::new();
    let mut writer = Writer::new(&mut file).expect("writer");
    for step in 0..700_u64 {
        let values = (0..1000).map(|cpu| (key(cpu), Kind::Counter, step * u64::from(cpu)));
        let sample = Sample {
            at: Duration::from_millis(100 * step),
            values: values.collect(),
        };
        recording.evidence.series.push(sample.clone());
        writer.push(sample).expect("taken");
        assert!(writer.pending_values() <= 1 << 18);
    }
    writer.finish(&recording).expect("written");
    let parts = ParquetMetaDataReader::new().parse_and_finish(&Bytes::from(file.clone()));
    assert_eq!(parts.expect("metadata").num_row_groups(), 3);
    assert_eq!(Recording::parse(&file).expect("read"), recording);
}

#[test]
fn the_rarest_call_stacks_are_left_out_where_there_are_too_many() {
    let mut recording = recording(short(), 1.0);
    let functions = recording.functions.as_mut().expect("functions");
    functions.stacks = (0..40_000)
        .map(|number| (vec![format!("{number:1000}")], 40_000 - number))
        .collect();
    let read = Recording::parse(&written(&recording)).expect("read");
    let read = read.functions.expect("functions");
    let whole = &recording.functions.expect("functions").stacks;
    assert_eq!(read.stacks.len(), 10_000);
    assert_eq!(read.stacks[..], whole[..10_000]);
}

#[test]
fn samples_come_in_order() {
    let mut writer = Writer::new(Vec::new()).expect("writer");
    let sample = |millis| Sample {
        at: Duration::from_millis(millis),
        values: vec![(Key::new(Subject::Host, "a"), Kind::Gauge, 1)],
    };
    writer.push(sample(5)).expect("taken");
    for late in [5, 4] {
        let error = writer.push(sample(late)).expect_err("refused");
        assert!(matches!(error, RecordingError::Unfit(_)), "{error}");
    }
}

#[test]
fn nothing_but_zeros_is_within_the_values_that_a_byte_may_hold() {
    let mut series = Series::default();
    for step in 0..400 {
        let values = (0..1000).map(|cpu| (Key::new(Subject::Cpu(cpu), "n"), Kind::Gauge, 0));
        series.push(Sample {
            at: Duration::from_millis(step),
            values: values.collect(),
        });
    }
    // Zeros only: as many rows per byte as possible.
    let file = written(&recording(series, 1.0));
    assert!(file.len() * 64 > 400_000, "{} bytes", file.len());
    Recording::parse(&file).expect("read");
}

//! Whole reports of handmade recordings.

use std::os::unix::fs::PermissionsExt;

use seikan_diagnose::stats::Interval;
use seikan_diagnose::trial::{Attempt, Block, Decision, Trial};
use seikan_diagnose::{Cause, Evidence, Remedy};
use seikan_observe::path::{ProgramFacts, Unseen};
use seikan_observe::profile::{Function, Functions};
use seikan_observe::{Subject, metric};

use super::testing::*;
use super::*;

const HOSTILE: &str = "</title></svg><script src=\"https://evil.example/x.js\">'&\u{1b}[2J";

/// Returns five seconds of a tunnel with data for every picture and hostile names.
fn everything() -> Recording {
    let times: Vec<f64> = (0..50).map(|i| f64::from(i) / 10.0).collect();
    let mut evidence = sampled(&times);
    // Grows by a different amount each time.
    let grow = |by: u64| -> Vec<u64> {
        let mut sum = 0;
        (0..50u64)
            .map(|i| {
                sum += by * (1 + (i * i) % 7);
                sum
            })
            .collect()
    };
    let level = |by: u64| -> Vec<u64> { (0..50u64).map(|i| by * (1 + (i * i) % 5)).collect() };
    let name = HOSTILE.to_owned();
    evidence.map.inner = Some(name.clone());
    evidence.map.links = vec![link(&name)];
    evidence.map.host.cpus = vec![0, 1];
    evidence.map.unseen = vec![Unseen {
        what: name.clone(),
        why: name.clone(),
    }];
    evidence.map.program = Some(ProgramFacts {
        pid: 7,
        name: name.clone(),
        threads: vec![(7, name.clone())],
        ..ProgramFacts::default()
    });
    evidence.expected = Some(500e6);
    let device = || Subject::Link(name.clone());
    count(&mut evidence, device(), metric::TX_BYTES, &grow(100_000));
    count(&mut evidence, device(), metric::TX_PACKETS, &grow(100));
    count(&mut evidence, device(), metric::TX_DROPPED, &grow(9));
    let queue = || Subject::Qdisc(name.clone());
    measure(
        &mut evidence,
        queue(),
        metric::QDISC_BACKLOG_BYTES,
        &level(10_000),
    );
    count(&mut evidence, queue(), metric::QDISC_BYTES, &grow(100_000));
    count(
        &mut evidence,
        Subject::Host,
        &format!("drop.{HOSTILE}"),
        &grow(1),
    );
    let thread = Subject::Thread { pid: 7, tid: 7 };
    count(&mut evidence, thread, metric::RUN_NS, &grow(10_000_000));
    for cpu in [0, 1] {
        let cpu = || Subject::Cpu(cpu);
        count(&mut evidence, cpu(), metric::SOFTIRQ_NS, &grow(1_000_000));
        count(&mut evidence, cpu(), metric::IDLE_NS, &grow(10_000_000));
        count(&mut evidence, cpu(), metric::NET_RX, &grow(50));
    }
    flow(&mut evidence, 3);
    let tcp = || Subject::Tcp(3);
    count(&mut evidence, tcp(), metric::TCP_BYTES_SENT, &grow(110_000));
    count(
        &mut evidence,
        tcp(),
        metric::TCP_BYTES_ACKED,
        &grow(100_000),
    );
    count(&mut evidence, tcp(), metric::TCP_RETRANS, &grow(2));
    measure(&mut evidence, tcp(), metric::TCP_SND_WND, &level(60_000));
    measure(&mut evidence, tcp(), metric::TCP_MSS, &level(1));
    let functions = Functions {
        samples: 100,
        program: 60,
        machine: true,
        functions: vec![Function {
            symbol: name.clone(),
            module: name.clone(),
            program: 60,
            machine: 100,
        }],
        stacks: vec![(vec![name.clone(), name.clone()], 100)],
        ..Functions::default()
    };
    evidence.profile = seikan_diagnose::profile(&functions);
    let block = |megabits: f64| Block {
        throughput: megabits * 1e6,
        ..Block::default()
    };
    let attempt = Attempt {
        cause: Cause::TunQueueOverflow,
        remedy: Remedy::here(name.clone(), Vec::new(), name.clone()),
        trial: Trial {
            pairs: vec![(block(100.0), block(200.0)), (block(110.0), block(190.0))],
            gain: Some(Interval {
                value: 0.86,
                low: 0.73,
                high: 1.0,
            }),
            decision: Decision::TakeBack(name),
        },
    };
    Recording {
        functions: Some(functions),
        attempts: vec![attempt],
        ..recorded(evidence)
    }
}

fn drawn(recording: &Recording, capture: Option<&Capture>) -> (String, Vec<Picture>, Vec<Absent>) {
    let verdict = verdict(recording, None);
    let scene = Scene {
        recording,
        verdict: &verdict,
        capture,
    };
    let (pictures, absent) = pictures(&scene);
    let page = page::page(recording, &verdict, &pictures, &absent).expect("page");
    (page, pictures, absent)
}

fn capture() -> Capture {
    let segment = |i: i64| capture::Segment {
        at: i as f64 / 10.0,
        begin: i * 1000,
        end: i * 1000 + 1000,
        is_retransmission: false,
    };
    Capture {
        name: HOSTILE.to_owned(),
        segments: (0..10).map(segment).collect(),
        ..Capture::default()
    }
}

#[test]
fn every_picture_is_drawn() {
    let (page, pictures, absent) = drawn(&everything(), Some(&capture()));
    assert_eq!(absent, []);
    assert_eq!(pictures.len(), PICTURES.len());
    let sections = ["evidence", "findings", "path", "pictures"];
    for name in sections.into_iter().chain(PICTURES.map(|(name, ..)| name)) {
        assert!(page.contains(&format!("id=\"{name}\"")), "{name}");
    }
}

#[test]
fn hostile_names_are_escaped() {
    let (page, pictures, _) = drawn(&everything(), Some(&capture()));
    let svgs = pictures
        .iter()
        .map(|picture| svg::standalone(&picture.svg, picture.title, &picture.caption));
    for text in svgs.chain([page]) {
        assert!(!text.contains("<script"), "{text}");
        assert!(!text.contains('\u{1b}'));
        assert_eq!(text.matches("<svg").count(), text.matches("</svg>").count());
    }
}

#[test]
fn pictures_alone_are_well_formed() {
    let (_, pictures, _) = drawn(&everything(), Some(&capture()));
    for picture in pictures {
        let tree = resvg::usvg::Tree::from_str(
            &svg::standalone(&picture.svg, "", ""),
            &Default::default(),
        );
        assert!(tree.is_ok(), "{}: {:?}", picture.name, tree.err());
        assert!(!picture.svg.contains("NaN") && !picture.svg.contains("inf "));
    }
}

#[test]
fn missing_pictures_are_listed_with_reasons() {
    let (page, pictures, absent) = drawn(&recorded(Evidence::default()), None);
    assert_eq!(pictures.len(), 0);
    assert_eq!(absent.len(), PICTURES.len());
    assert!(page.contains("id=\"absent\""));
    for (title, why) in absent {
        assert!(page.contains(title), "{title}");
        assert!(why.len() > 20, "{title}: {why}");
    }
}

#[test]
fn an_hour_makes_no_larger_page_than_a_minute() {
    let length = |seconds: u32| {
        let times: Vec<f64> = (0..seconds * 10).map(|i| f64::from(i) / 10.0).collect();
        let mut evidence = sampled(&times);
        evidence.map.inner = Some("tun0".into());
        let noise = |i: u64| (i * 7919) % 1000;
        let bytes: Vec<u64> = (0..times.len() as u64)
            .map(|i| i * 1_000_000 + noise(i))
            .collect();
        for name in [metric::TX_BYTES, metric::TX_DROPPED] {
            count(&mut evidence, Subject::Link("tun0".into()), name, &bytes);
        }
        evidence.map.links = vec![link("tun0")];
        drawn(&recorded(evidence), None).0.len()
    };
    let (minute, hour) = (length(60), length(3600));
    assert!(hour < 8 * minute && hour < 1_000_000, "{minute} {hour}");
}

#[test]
fn a_file_is_replaced_and_never_half_written() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("page.html");
    write(&file, b"old").expect("written");
    write(&file, b"new").expect("written");
    assert_eq!(std::fs::read(&file).expect("read"), b"new");
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);
    let error = write(&folder.path().join("none/page.html"), b"").expect_err("no folder");
    assert!(format!("{error:#}").contains("none/page.html"), "{error:#}");
}

#[test]
fn only_its_owner_can_read_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("page.html");
    write(&file, b"page").expect("written");
    let mode = file.metadata().expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

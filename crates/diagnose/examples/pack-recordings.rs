//! Packs recordings of cases that count into the file of the test `recordings`: `pack-recordings
//! OUT.jsonl.gz (CASES.jsonl DIRECTORY)...`. Each pair is the output of `seikan lab score --out
//! CASES.jsonl --recordings DIRECTORY`. See `make recordings`.
//!
//! Cases are left out if other work kept the processors busy while they were recorded. The doctor
//! named `cpu-contention` then, which is true, but is not the fault of the scenario.
//!
//! The rules read counters by their growth, and gauges by their mean and extremes. So only the
//! first and the last value of a counter are kept, and every fifth value of a gauge. Functions,
//! call stacks, fixes and settings that no rule reads are left out.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use packed::Packed;
use seikan_diagnose::exchange::Measurement;
use seikan_diagnose::{Evidence, Profile, Recording, Share};
use seikan_observe::Kind;
use serde_json::Value;

#[path = "../tests/recordings/packed.rs"]
#[allow(dead_code, reason = "the test reads, this writes")]
mod packed;

/// One of this many values of a gauge is kept.
const EVERY: usize = 5;
/// Number of functions of a profile that keep their names; the others are summed by stage.
const NAMED: usize = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [out, sources @ ..] = &words[..] else {
        return Err("pack-recordings OUT.jsonl.gz (CASES.jsonl DIRECTORY)...".into());
    };
    let mut out = GzEncoder::new(File::create(out)?, Compression::best());
    let mut count = 0;
    for pair in sources.chunks_exact(2) {
        for line in fs::read_to_string(&pair[0])?.lines() {
            let case: Value = serde_json::from_str(line)?;
            let outcome = &case["outcome"];
            let found = &outcome["diagnosis"]["cause"];
            let other_work = found == "cpu-contention" && outcome["cause"] != *found;
            if outcome["counts"] != true || found.is_null() || other_work {
                continue;
            }
            let id = case["id"]
                .as_str()
                .ok_or("a case without an id")?
                .to_owned();
            let file = Path::new(&pair[1]).join(format!("{}.parquet", id.replace('/', "-")));
            let recording = Recording::parse(&fs::read(file)?)?;
            let expected = recording.evidence.expected;
            let packed = Packed {
                id,
                cause: serde_json::from_value(outcome["cause"].clone())?,
                also: serde_json::from_value(outcome["also"].clone())?,
                second: serde_json::from_value(outcome["second"].clone())?,
                expected,
                measurement: Measurement::of(&thinned(recording.evidence)),
            };
            serde_json::to_writer(&mut out, &packed)?;
            out.write_all(b"\n")?;
            count += 1;
        }
    }
    out.finish()?;
    println!("{count} cases");
    Ok(())
}

fn thinned(mut evidence: Evidence) -> Evidence {
    for column in evidence.series.columns.values_mut() {
        let points = &mut column.points;
        match column.kind {
            Kind::Counter => {
                // A counter that restarted from zero has still grown.
                let growth = column.growth();
                let points = &mut column.points;
                if let ([first, .., last], true) = (&mut points[..], growth <= u64::MAX / 2) {
                    (first.1, last.1) = (0, growth);
                    let kept = vec![*first, *last];
                    *points = kept;
                }
            }
            Kind::Gauge => {
                let last = points.len().saturating_sub(1);
                let mut index = 0;
                points.retain(|_| {
                    let keep = index % EVERY == 0 || index == last;
                    index += 1;
                    keep
                });
            }
        }
    }
    if let Some(profile) = &mut evidence.profile {
        let Profile {
            program, machine, ..
        } = profile;
        for shares in [program, machine] {
            *shares = fewer(shares);
        }
    }
    evidence
}

/// The largest functions, and of each stage the sum of the others; the largest first.
fn fewer(shares: &[Share]) -> Vec<Share> {
    let mut fewer: Vec<Share> = shares.iter().take(NAMED).cloned().collect();
    for share in shares.iter().skip(NAMED) {
        let others = fewer[NAMED..]
            .iter_mut()
            .find(|other| other.stage == share.stage);
        match others {
            Some(others) => others.share += share.share,
            None => fewer.push(Share {
                symbol: "others".to_owned(),
                ..share.clone()
            }),
        }
    }
    fewer
}

//! The file of packed recordings: JSON lines, compressed by gzip, a case each. Written by the
//! example `pack-recordings`, read by the test `recordings`.

use std::io::{BufRead, BufReader, Read};

use flate2::read::GzDecoder;
use seikan_diagnose::exchange::Measurement;
use seikan_diagnose::{Cause, Evidence};
use serde::{Deserialize, Serialize};

/// A case: a measurement, and the cause by its scenario.
#[derive(Debug, Serialize, Deserialize)]
pub struct Packed {
    /// Split, scenario, seed and number.
    pub id: String,
    /// The cause to be named.
    pub cause: Cause,
    /// Other causes that are right as well.
    #[serde(default)]
    pub also: Vec<Cause>,
    /// The cause of a second fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<Cause>,
    /// Expected throughput, bits per second.
    pub expected: Option<f64>,
    /// The measurement: counters by their growth only.
    pub measurement: Measurement,
}

impl Packed {
    /// Whether a cause is right.
    pub fn is_right(&self, named: Cause) -> bool {
        named == self.cause || self.also.contains(&named) || self.second == Some(named)
    }

    /// Returns the evidence.
    pub fn evidence(&self) -> Evidence {
        let evidence = self.measurement.clone().evidence();
        let evidence = evidence.unwrap_or_else(|error| panic!("{}: {error}", self.id));
        Evidence {
            expected: self.expected,
            ..evidence
        }
    }
}

/// The cases of a file.
pub fn read(file: impl Read) -> impl Iterator<Item = Packed> {
    let lines = BufReader::new(GzDecoder::new(file)).lines();
    lines.map(|line| serde_json::from_str(&line.expect("gzip")).expect("a case"))
}

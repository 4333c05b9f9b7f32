//! Messages between two doctors: the client has the server measure the far end.
//!
//! ```text
//! client                                         server
//! Request (duration, depth, load)           -->
//!                                           <--  Ready (port for the load), or Refused
//! Begin                                     -->
//! Alive, once a second                      <->  Alive
//! End, to end early                         -->
//!                                           <--  Measurement (path, samples, processor time, probes)
//! ```
//!
//! A message is JSON with a version. Both ends share a secret; messages are bounded and checked nevertheless:
//! [`Message::read`] and [`Measurement::evidence`] return evidence that the rules can work on, or an error.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use seikan_observe::path::PathMap;
use seikan_observe::{Column, Key, Kind, Series, Subject};
use serde::{Deserialize, Serialize};

use crate::{Evidence, Probes, Profile};

/// Version of the messages.
pub const VERSION: u32 = 1;
/// Largest request, bytes.
pub const LONGEST_REQUEST: usize = 16 << 10;
/// Largest message, bytes.
pub const LONGEST: usize = 64 << 20;

/// Maximum number of samples of a measurement; more are thinned out.
const MAX_SAMPLES: usize = 600;
/// Maximum number of columns, interfaces, sockets, threads or functions.
const MAX_ITEMS: usize = 100_000;
/// Maximum number of processors of a kernel (`CONFIG_NR_CPUS`).
pub(crate) const MAX_PROCESSORS: usize = 8192;
/// Largest growth of a counter.
const MAX_GROWTH: u64 = 1 << 53;
/// Maximum duration of a measurement, in microseconds.
const LONGEST_US: u64 = 2 * 3_600_000_000;

/// Reason why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongMessage {
    /// The other end has another version.
    #[error(
        "the other end uses version {0} of the messages, this one {VERSION}: use the same seikan at both ends"
    )]
    Version(u32),
    /// The message is malformed.
    #[error("the other end sent a malformed message: {0}")]
    Syntax(String),
    /// The message has impossible values.
    #[error("the other end sent impossible values: {0}")]
    Impossible(&'static str),
}

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// Prepare a measurement.
    Request(Request),
    /// The server is ready.
    Ready(Ready),
    /// Start the measurement.
    Begin,
    /// Keepalive.
    Alive,
    /// End the measurement early.
    End,
    /// The result.
    Measurement(Box<Measurement>),
    /// The request is refused, for this reason.
    Refused(String),
}

/// Request for a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Duration, 2 to 3600 seconds.
    pub seconds: u32,
    /// Time between samples, 10 to 1000 milliseconds.
    pub interval: u32,
    /// Depth, 0 to 2.
    pub level: u32,
    /// Whether echo requests may be sent.
    pub probe: bool,
    /// Load during the measurement.
    pub load: Option<Load>,
}

/// A load between the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Protocol.
    pub kind: LoadKind,
    /// Maximum rate, 0.01 to 1,000,000 Mbit/s; `None`: unlimited (TCP only).
    pub rate: Option<f64>,
    /// Whether the load runs from the server to the client.
    pub reverse: bool,
}

/// Protocol of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadKind {
    /// One TCP connection.
    Tcp,
    /// UDP datagrams.
    Udp,
}

/// The server is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// Destination of the load, if one was requested.
    pub sink: Option<Sink>,
}

/// Destination of a load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sink {
    /// Port at the address of the server.
    pub port: u16,
    /// First bytes of the load, which authenticate it.
    pub token: Token,
}

/// Random bytes that only the two ends of a session know.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// Result of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// The path on that host.
    map: PathMap,
    /// Time of each sample, microseconds since the first.
    times: Vec<u64>,
    columns: Vec<MeasuredColumn>,
    profile: Option<Profile>,
    probes: Probes,
}

/// The values of one key; values of a counter as growth since the first one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeasuredColumn {
    subject: Subject,
    name: String,
    kind: Kind,
    points: Vec<(u32, u64)>,
}

#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    message: &'a Message,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    #[serde(rename = "version")]
    _version: u32,
    message: Message,
}

impl Message {
    /// Encodes the message.
    pub fn write(&self) -> Vec<u8> {
        let written = Written {
            version: VERSION,
            message: self,
        };
        // Cannot fail: map keys are strings, and numbers are finite or null.
        serde_json::to_vec(&written).unwrap_or_default()
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// It is malformed, of another version, or out of range.
    pub fn read(bytes: &[u8]) -> Result<Message, WrongMessage> {
        let syntax = |error: serde_json::Error| WrongMessage::Syntax(error.to_string());
        let Version { version } = serde_json::from_slice(bytes).map_err(syntax)?;
        if version != VERSION {
            return Err(WrongMessage::Version(version));
        }
        let Read { message, .. } = serde_json::from_slice(bytes).map_err(syntax)?;
        if let Message::Request(request) = &message {
            request.check()?;
        }
        Ok(message)
    }
}

impl Request {
    fn check(&self) -> Result<(), WrongMessage> {
        let rate = self.load.and_then(|load| load.rate);
        let fits = (2..=3600).contains(&self.seconds)
            && (10..=1000).contains(&self.interval)
            && self.level <= 2
            && rate.is_none_or(|rate| (0.01..=1e6).contains(&rate));
        if !fits {
            return Err(WrongMessage::Impossible(
                "a time, an interval, a level or a rate out of range",
            ));
        }
        // Datagrams have no congestion control.
        match self.load {
            Some(Load {
                kind: LoadKind::Udp,
                rate: None,
                ..
            }) => Err(WrongMessage::Impossible("a load of UDP without a rate")),
            _ => Ok(()),
        }
    }
}

impl Measurement {
    /// Returns the measurement of some evidence, with some hundreds of samples at most.
    pub fn of(evidence: &Evidence) -> Measurement {
        let series = &evidence.series;
        let every = series.times.len().div_ceil(MAX_SAMPLES).max(1);
        let times = series.times.chunks(every);
        let times = times.filter_map(|part| Some(part.last()?.as_micros() as u64));
        let columns = series.columns.iter().map(|(key, column)| MeasuredColumn {
            subject: key.subject.clone(),
            name: key.name.clone().into_owned(),
            kind: column.kind,
            points: thinned(column, every as u32),
        });
        Measurement {
            map: evidence.map.clone(),
            times: times.collect(),
            columns: columns.collect(),
            profile: evidence.profile.clone(),
            probes: evidence.probes.clone(),
        }
    }

    /// Returns the evidence.
    ///
    /// # Errors
    /// It has values that no measurement has.
    pub fn evidence(self) -> Result<Evidence, WrongMessage> {
        let check = |fits: bool, reason| fits.then_some(()).ok_or(WrongMessage::Impossible(reason));
        let count = self.times.len();
        check(
            (1..=MAX_SAMPLES).contains(&count),
            "no samples, or too many",
        )?;
        let ordered = self.times.windows(2).all(|pair| pair[0] <= pair[1]);
        let last = self.times.last().copied().unwrap_or(0);
        check(
            ordered && last <= LONGEST_US,
            "times out of order, or a duration of hours",
        )?;
        let map = &self.map;
        let program = map.program.as_ref();
        let threads = program.map_or(0, |program| program.threads.len());
        let functions = |profile: &Profile| profile.program.len() + profile.machine.len();
        let lists = [
            self.columns.len(),
            map.links.len(),
            map.sockets.len(),
            map.flows.len(),
            map.unseen.len(),
            threads,
            self.profile.as_ref().map_or(0, functions),
        ];
        check(
            lists.iter().all(|length| *length <= MAX_ITEMS),
            "too many items",
        )?;
        check(map.host.cpus.len() <= MAX_PROCESSORS, "too many processors")?;
        let mut columns = BTreeMap::new();
        for column in self.columns {
            let points = &column.points;
            let indices = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
            let known = points.iter().all(|(index, _)| (*index as usize) < count);
            check(indices && known, "values without a sample")?;
            if column.kind == Kind::Counter {
                let grows = points.windows(2).all(|pair| pair[0].1 <= pair[1].1);
                let most = points.last().map_or(0, |(_, value)| *value);
                check(
                    grows && most <= MAX_GROWTH,
                    "a counter that decreases or grows too much",
                )?;
            }
            columns.insert(
                Key::new(column.subject, column.name),
                Column {
                    kind: column.kind,
                    points: column.points,
                },
            );
        }
        let times = self.times.into_iter().map(Duration::from_micros);
        Ok(Evidence {
            map: self.map,
            series: Series {
                times: times.collect(),
                columns,
            },
            expected: None,
            profile: self.profile,
            probes: self.probes,
        })
    }
}

/// Returns the points of a column, thinned to the last of every `every` samples; of a constant, the
/// first and the last.
fn thinned(column: &Column, every: u32) -> Vec<(u32, u64)> {
    let mut grown = 0;
    let mut before = None;
    let mut points: Vec<(u32, u64)> = Vec::new();
    for (index, value) in &column.points {
        let value = match column.kind {
            Kind::Gauge => *value,
            Kind::Counter => {
                grown += value.saturating_sub(before.replace(*value).unwrap_or(*value));
                grown
            }
        };
        let slot = index / every;
        match points.last_mut() {
            Some(last) if last.0 == slot => last.1 = value,
            _ => points.push((slot, value)),
        }
    }
    if let (Some(first), Some(last)) = (points.first().copied(), points.last().copied())
        && points.len() > 2
        && points.iter().all(|(_, value)| *value == first.1)
    {
        return vec![first, last];
    }
    points
}

#[cfg(test)]
mod tests;
